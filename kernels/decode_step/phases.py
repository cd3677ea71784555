"""The phases of a decode step that are products, and how they end.

Each program has some rows of every matrix (`share_of`), in blocks that lie next to each other. No sum is divided among
programs, so results are the same bits every time. The arguments that most functions take are

* `given`, `kept`: the kernel's `Given` and `Kept`, what it is given and its scratch;
* `factor`: f32, 1, or NaN once something has not come, so that nothing looks like a result that is none;
* SIZES: the kernel's `Sizes`.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.blocks import epilogue
from jaxtaxfree.kernels.decode_step import ring as rings

PHASES = gl.constexpr(6)  # of a layer
STAMPS = gl.constexpr(4)  # times of a phase, if they are taken


@gluon.jit
def share_of(ROWS: gl.constexpr, BLOCK: gl.constexpr, UNIT: gl.constexpr, PROGRAMS: gl.constexpr):
    """The program's blocks of rows: (the first one, how many)."""
    MOST: gl.constexpr = most_of(ROWS, BLOCK, UNIT, PROGRAMS)
    first = gl.program_id(0) * MOST
    return first, gl.minimum(gl.maximum((ROWS + BLOCK - 1) // BLOCK - first, 0), MOST)


@gluon.jit
def even_share_of(ROWS: gl.constexpr, BLOCK: gl.constexpr, PROGRAMS: gl.constexpr):
    """Like `share_of`, but programs have as many as others or one less, and none only if there is not one for each."""
    BLOCKS: gl.constexpr = triton.cdiv(ROWS, BLOCK)
    first = gl.program_id(0) * BLOCKS // PROGRAMS
    return first, (gl.program_id(0) + 1) * BLOCKS // PROGRAMS - first


@triton.constexpr_function
def most_of(rows, block, unit, programs):
    """The most blocks of rows that a program has."""
    blocks = -(-rows // block)
    return -(-blocks // (unit * programs)) * unit


@triton.constexpr_function
def unit_of(desc, sizes):
    """How many blocks of rows go together where they are sent: 4 words or more; if sums are told, 8 rows or more."""
    return max(1, (8 if sizes.SUMS_TOLD else 4) // desc.block_shape[0])


@gluon.jit
def of_layer(ptr, layer, SIZE: gl.constexpr):
    """A layer's part of [L, SIZE]; None of None."""
    if ptr is not None:
        ptr = ptr + layer * SIZE
    return ptr


@gluon.jit
def of_each_layer(ptr, layer, SAME: gl.constexpr):
    """A layer's number of i32 [L]; SAME if all layers have the same one, and `ptr` is None."""
    if ptr is not None:
        number = gl.load(ptr + layer)
    else:
        number = layer * 0 + SAME
    return number


@gluon.jit
def times_of(times, layer, phase: gl.constexpr, SIZES: gl.constexpr):
    """Where the program's times of a phase go; None of None. The logits are the first phase of one layer more."""
    if times is not None:
        times = times + ((gl.program_id(0) * (SIZES.LAYERS + 1) + layer) * PHASES + phase) * STAMPS
    return times


@gluon.jit
def stamp(times, which: gl.constexpr):
    """Writes down what time it is, if times are taken: that of a program at which

    0: a phase has the vectors that it multiplies; 1: its products are there; 2: its sum over the ranks is; 3: all
    programs have met.
    """
    if times is not None:
        gl.store(times + which, shmem.now().to(gl.int32))


@triton.constexpr_function
def meetings_of(sizes):
    """How many times the programs meet in a layer: behind each phase but those whose results are messages.

    For tensor cores four phases always end so, and each of two norms behind a block has a meeting before it.
    """
    if sizes.TENSOR_CORES:
        others = 6 if sizes.POST_NORMS else 4
    else:
        others = 0 if sizes.STREAM_TOLD or sizes.SUMS_TOLD else 2
    return others + (not sizes.PARTS_TOLD) + (not sizes.QUERIES_TOLD)


@triton.constexpr_function
def last_meeting_of(sizes):
    """How many times they meet in front of the logits: once if they have not met since any has read the cache."""
    return int(sizes.TENSOR_CORES or (sizes.PARTS_TOLD and (sizes.STREAM_TOLD or sizes.SUMS_TOLD)))


@gluon.jit
def finish(me, met, phase, TOLD: gl.constexpr, factor, times, SIZES: gl.constexpr):
    """Ends a phase whose results are messages if they are told; else all programs of this rank meet.

    Returns: `factor`, as `meet` does.
    """
    if TOLD:
        pass_by(times)
    else:
        factor = meet(me, met, phase, factor, times, SIZES)
    return factor


@gluon.jit
def meet(me, met, phase, factor, times, SIZES: gl.constexpr):
    """Ends a phase: what any program of this rank has stored in it all others see.

    Returns: `factor`, NaN if some did not come.
    """
    stamp(times, 1)
    shmem.arrive(me, met)
    return await_all(me, met, phase, factor, times, SIZES)


@gluon.jit
def pass_by(times):
    """Ends a phase whose results are messages, at which nobody waits. A sum comes with the next phase's vectors."""
    stamp(times, 1)
    stamp(times, 2)
    stamp(times, 3)


@gluon.jit
def await_all(me, met, phase, factor, times, SIZES: gl.constexpr):
    """The second half of `meet`."""
    A_CALL: gl.constexpr = (SIZES.LAYERS * meetings_of(SIZES) + last_meeting_of(SIZES)) * SIZES.PROGRAMS
    count = ((me.epoch - 1) * A_CALL).to(gl.int32) + (phase + 1) * SIZES.PROGRAMS
    factor = gl.where(shmem.meet(me, met, count), factor, float("nan"))
    stamp(times, 3)
    return factor


@gluon.jit
def fetch_projections(ring, position, given, layer, SIZES: gl.constexpr):
    """Begins to load the program's rows of queries, keys and values, which are counted one after the other."""
    ROWS: gl.constexpr = given.query.block_shape[0]
    QUERIES: gl.constexpr = SIZES.HEADS * SIZES.H
    KEYS: gl.constexpr = SIZES.KV_HEADS * SIZES.H
    first, count = share_of(QUERIES + 2 * KEYS, ROWS, 1, SIZES.PROGRAMS)
    for i in range(count):
        row = (first + i) * ROWS
        if row < QUERIES:
            position = rings.fetch_rows(
                ring, position, given.query, layer * QUERIES + row, SIZES.D, SIZES.IN_FLIGHT, SIZES.PACE
            )
        elif row < QUERIES + KEYS:
            position = rings.fetch_rows(
                ring, position, given.key, layer * KEYS + row - QUERIES, SIZES.D, SIZES.IN_FLIGHT, SIZES.PACE
            )
        else:
            position = rings.fetch_rows(
                ring, position, given.value, layer * KEYS + row - QUERIES - KEYS, SIZES.D, SIZES.IN_FLIGHT, SIZES.PACE
            )
    return position


class Norms(NamedTuple):
    """The gains of a phase's norms, each as `rings.gains_of` has them."""

    before: Any  # of the norm in front of a block
    behind: Any  # of the one behind the last block; () if there is none


@gluon.jit
def norms_of(desc, before, behind, SIZES: gl.constexpr):
    """The gains at these pointers, [D] each, of which the second one may be None."""
    return Norms(rings.gains_of(desc, before, SIZES.D), rings.gains_of(desc, behind, SIZES.D))


@gluon.jit
def stream_of(me, desc, x, block, norms, there, after, factor, SIZES: gl.constexpr):
    """The normalised stream, as `multiply` takes it.

    With norms behind the blocks `add` leaves a block's result alone and does not add it to the stream, because its norm
    is that of all rows. Each program adds it here, to the whole stream, and stores some of its rows. If sums are told
    each program has the whole stream, and adds any block's result here.

    Args:
      x: f32 [B, D], the stream, before a block's result is added if it has to be. If the stream is told, that in front
        of the first block; None behind it. If sums are told its parts, as `rings.load_vectors` returns them.
      block: f32 [B, D], that result; messages of the stream behind the block if it is told, of the ranks' parts of the
        result if sums are.
      norms: `norms_of` the phase.
      there: whether there is a `block`.
      after: f32 [B, D], where the stream with it goes, which nobody reads in this phase; None: nowhere.

    Returns: (the stream, for `report_stream` what did not come, the stream's parts if sums are told).
    """
    D: gl.constexpr = SIZES.D
    B: gl.constexpr = SIZES.B
    late, held = (), ()
    if SIZES.SUMS_TOLD:
        SCALE: gl.constexpr = 1.0 if SIZES.POST_NORMS else SIZES.RESIDUAL_SCALE
        sums, late = rings.received_sums(me, desc, block, D, B, SIZES.WORLD, there, SIZES.PATIENCE)
        if SIZES.POST_NORMS:
            sums = behind_norm(desc, sums, norms, SIZES)
        for i in gl.static_range(len(sums)):
            held = held + (x[i] + gl.where(there, sums[i] * SCALE, 0.0),)
        parts = held
    elif SIZES.STREAM_TOLD:
        parts, late = rings.received(me, desc, block, 1.0, D, B, there)
        if x is not None:
            given, told = rings.load_vectors(desc, x, D, B, there == 0), parts
            parts = ()
            for i in gl.static_range(len(told)):
                parts = parts + (gl.where(there, told[i], given[i]),)
    else:
        parts = rings.load_vectors(desc, x, D, B)
        if SIZES.POST_NORMS:
            parts = with_result(desc, block, parts, norms, there, after, SIZES)
    vectors = rings.normalised(desc, parts, norms.before, factor, D, B, SIZES.EPS, SIZES.PLUS_ONE)
    return vectors, late, held


@gluon.jit
def report_stream(me, desc, block, late, SIZES: gl.constexpr):
    """Reports what `stream_of` waited for in vain."""
    if SIZES.SUMS_TOLD:
        rings.report_sums(me, desc, block, late, SIZES.D, SIZES.B, SIZES.WORLD)
    else:
        rings.report(me, desc, block, late, SIZES.D, SIZES.B)


@gluon.jit
def behind_norm(desc, results, norms, SIZES: gl.constexpr):
    """Parts of a block's result behind the norm that follows it."""
    return rings.normalised(
        desc, results, norms.behind, SIZES.RESIDUAL_SCALE, SIZES.D, SIZES.B, SIZES.EPS, SIZES.PLUS_ONE
    )  # fmt: skip


@gluon.jit
def with_result(desc, block, parts, norms, there, after, SIZES: gl.constexpr):
    """Parts of the stream with a block's result, and what `stream_of` has to store of it."""
    B: gl.constexpr = SIZES.B
    D: gl.constexpr = SIZES.D
    CHUNKS: gl.constexpr = rings.chunks_of(D, desc)
    OWN: gl.constexpr = triton.cdiv(D, SIZES.PROGRAMS)
    added, results = (), ()
    for b in gl.static_range(B):
        for chunk in gl.static_range(CHUNKS):
            column = rings.columns_of(desc, chunk)
            at = block + b * D + column
            results = results + (gl.load(at, mask=(column < D) & there, other=0.0),)
    results = behind_norm(desc, results, norms, SIZES)
    for i in gl.static_range(B * CHUNKS):
        part = parts[i] + results[i]
        if after is not None:
            column = rings.columns_of(desc, i % CHUNKS)
            mine = (column // OWN == gl.program_id(0)) & (column < D)
            gl.store(after + i // CHUNKS * D + column, part, mask=mine)
        added = added + (part,)
    return added


@gluon.jit
def project(me, ring, position, given, kept, x, block, after, layer, norms, times, factor, SIZES: gl.constexpr):
    """kept.qkv f32 [B, (HEADS + 2 KV_HEADS) * H]: queries, keys and values of the normalised stream. If they are told,
    it is messages, [L, ...].

    Args:
      x, block, after, norms: as `stream_of` takes them.

    Returns: (position, the stream's parts, as `stream_of` returns them).
    """
    desc = given.query
    QUERIES: gl.constexpr = SIZES.HEADS * SIZES.H
    KEYS: gl.constexpr = SIZES.KV_HEADS * SIZES.H
    WIDTH: gl.constexpr = QUERIES + 2 * KEYS
    first, count = share_of(WIDTH, desc.block_shape[0], 1, SIZES.PROGRAMS)
    vectors, late, held = stream_of(me, desc, x, block, norms, layer > 0, after, factor, SIZES)
    stamp(times, 0)
    VECTORS: gl.constexpr = vectors_of_sums(SIZES)
    PORTION: gl.constexpr = portion_of(WIDTH, desc, gl.num_warps(), 1, SIZES)
    for begin in range(0, count, PORTION):
        _, b, row, there = rows_of_share(desc, first, begin, count, PORTION, WIDTH, SIZES)
        scale = 1.0
        if given.query_scale is not None:
            scale = scale_of_projections(given, layer, row, SIZES)
        bias = row.to(gl.float32) * 0.0
        if given.query_bias is not None:
            bias += part_of(of_layer(given.query_bias, layer, QUERIES), row, QUERIES)
            bias += part_of(of_layer(given.key_bias, layer, KEYS), row - QUERIES, KEYS)
            bias += part_of(of_layer(given.value_bias, layer, KEYS), row - QUERIES - KEYS, KEYS)
        sums = rings.sums_of(ring, desc, PORTION, VECTORS)
        blocks = gl.minimum(count - begin, PORTION)
        position = rings.multiply_rows(ring, position, desc, vectors, sums, blocks, SIZES.D, SIZES.B)
        value = rings.collect(sums, PORTION) * scale + bias
        if SIZES.QUERIES_TOLD:
            shmem.send(me, kept.qkv + (layer * SIZES.B + b) * WIDTH + row, value, me.rank, there)
        else:
            gl.store(kept.qkv + b * WIDTH + row, value, mask=there)
    report_stream(me, desc, block, late, SIZES)
    return position, held


@triton.constexpr_function
def vectors_of_sums(sizes):
    """How many vectors sums are of, those of `rings.sums_of` and those that are sent: B or more."""
    return triton.next_power_of_2(sizes.B)


@triton.constexpr_function
def portion_of(rows, desc, warps, matrices, sizes, unit=1):
    """Of how many blocks the products are collected at a time."""
    most = most_of(rows, desc.block_shape[0], unit, sizes.PROGRAMS)
    return rings.portion_of(most, desc.block_shape, warps, vectors_of_sums(sizes), matrices, sizes.SUMS)


@gluon.jit
def rows_of_share(
    desc, first, begin, count, PORTION: gl.constexpr, ROWS: gl.constexpr, SIZES: gl.constexpr
):  # fmt: skip
    """What is collected at a time, in its order: (its place in the share, which vector, which of ROWS rows, whether
    there is such a product).

    Args:
      first, count: what `share_of` returned.
      begin: the first of PORTION blocks, counted from `first`.
    """
    HEIGHT: gl.constexpr = desc.block_shape[0]
    VECTORS: gl.constexpr = vectors_of_sums(SIZES)
    SIZE: gl.constexpr = PORTION * VECTORS * HEIGHT
    ACROSS: gl.constexpr = rings.across_of(desc.block_shape, gl.num_warps())
    LAYOUT: gl.constexpr = gl.SliceLayout(1, rings.collected(ACROSS, gl.num_warps()))
    at = gl.arange(0, SIZE, LAYOUT)
    block = begin + at // (VECTORS * HEIGHT)
    b = at // HEIGHT % VECTORS
    row = (first + block) * HEIGHT + at % HEIGHT
    return begin * (VECTORS * HEIGHT) + at, b, row, (block < count) & (b < SIZES.B) & (row < ROWS)


@gluon.jit
def part_of(ptr, place, SIZE: gl.constexpr):
    """Elements of a vector [SIZE], 0 outside of it."""
    return gl.load(ptr + place, mask=(place >= 0) & (place < SIZE), other=0.0).to(gl.float32)


@gluon.jit
def scale_of(ptr, row, there):
    """The scales of rows of weights of 8 bits; 1 of None.

    They are to be asked for before what they are multiplied by.
    """
    scale = 1.0
    if ptr is not None:
        scale = gl.load(ptr + row, mask=there, other=0.0)
    return scale


@gluon.jit
def scale_of_projections(given, layer, row, SIZES: gl.constexpr):
    """The same of queries, keys and values, which have some."""
    QUERIES: gl.constexpr = SIZES.HEADS * SIZES.H
    KEYS: gl.constexpr = SIZES.KV_HEADS * SIZES.H
    scale = part_of(of_layer(given.query_scale, layer, QUERIES), row, QUERIES)
    scale += part_of(of_layer(given.key_scale, layer, KEYS), row - QUERIES, KEYS)
    scale += part_of(of_layer(given.value_scale, layer, KEYS), row - QUERIES - KEYS, KEYS)
    return scale


@gluon.jit
def fetch_gate(ring, position, given, layer, SIZES: gl.constexpr):
    """Begins to load the program's rows of the gate and of what it gates, block by block."""
    ROWS: gl.constexpr = given.gate.block_shape[0]
    first, count = even_share_of(SIZES.F, ROWS, SIZES.PROGRAMS)
    for i in range(count):
        row = layer * SIZES.F + (first + i) * ROWS
        position = rings.fetch_rows(ring, position, given.gate, row, SIZES.D, SIZES.IN_FLIGHT, SIZES.PACE)
        position = rings.fetch_rows(ring, position, given.up, row, SIZES.D, SIZES.IN_FLIGHT, SIZES.PACE)
    return position


@gluon.jit
def gate(me, ring, position, given, x, block, after, hidden, layer, norms, times, factor, SIZES: gl.constexpr):
    """Sends hidden, messages f32 [B, F] = activation(gate) * up, of the normalised stream.

    Args:
      x, block, after, norms: as `stream_of` takes them.

    Returns: (position, the stream's parts, as `stream_of` returns them).
    """
    desc = given.gate
    first, count = even_share_of(SIZES.F, desc.block_shape[0], SIZES.PROGRAMS)
    vectors, late, held = stream_of(me, desc, x, block, norms, True, after, factor, SIZES)
    stamp(times, 0)
    VECTORS: gl.constexpr = vectors_of_sums(SIZES)
    PORTION: gl.constexpr = portion_of(SIZES.F, desc, gl.num_warps(), 2, SIZES)
    for begin in range(0, count, PORTION):
        _, b, row, there = rows_of_share(desc, first, begin, count, PORTION, SIZES.F, SIZES)
        gate_scale = scale_of(of_layer(given.gate_scale, layer, SIZES.F), row, there)
        up_scale = scale_of(of_layer(given.up_scale, layer, SIZES.F), row, there)
        sums = rings.sums_of(ring, desc, 2 * PORTION, VECTORS)
        blocks = 2 * gl.minimum(count - begin, PORTION)  # of `given.up` every second one
        position = rings.multiply_rows(ring, position, desc, vectors, sums, blocks, SIZES.D, SIZES.B, True)
        gates = rings.collect(sums, PORTION, 0, 2) * gate_scale
        ups = rings.collect(sums, PORTION, 1, 2) * up_scale
        value = epilogue.activate_gated(ups, gates, SIZES.ACTIVATION)
        shmem.send(me, hidden + b * SIZES.F + row, value, me.rank, there)
    report_stream(me, desc, block, late, SIZES)
    return position, held


@gluon.jit
def fetch_share(ring, position, desc, layer, COLUMNS: gl.constexpr, SIZES: gl.constexpr):
    """Begins to load the program's rows of a matrix whose product `add` sums over the ranks."""
    ROWS: gl.constexpr = desc.block_shape[0]
    first, count = share_of(SIZES.D, ROWS, unit_of(desc, SIZES), SIZES.PROGRAMS)
    for i in range(count):
        position = rings.fetch_rows(
            ring, position, desc, layer * SIZES.D + (first + i) * ROWS, COLUMNS, SIZES.IN_FLIGHT, SIZES.PACE
        )
    return position


@triton.constexpr_function
def patience_within(sizes):
    """Cycles before a program looks for what attention's phases send each other, which have less to do than others."""
    return sizes.PATIENCE // 3


@gluon.jit
def add(
    me, ring, position, desc, scales, source, old, new, told, sums, met, which, phase, times, factor,
    COLUMNS: gl.constexpr, PATIENCE: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """new = old + scale * (product of `source`, summed over the ranks): the program's rows. Ends the phase.

    With norms behind the blocks it is new = the sum over the ranks, see `stream_of`. If sums are told, it sends its
    part to all programs of all ranks, which do the rest there.

    A row belongs to the same program on every rank, so a program exchanges its rows with its twins alone, and adds up
    in the order of the ranks: all have the same bits.

    Args:
      scales: f32 [D], those of the layer's rows; or None.
      source: messages f32 [B, COLUMNS].
      old: f32 [B, D], the stream before.
      told: messages f32 [B, D], where the new one goes as well, if it is told; then nobody else reads `new`. Of sums
        that are told messages as `rings.received_sums` takes them.
      which: number of the sum in this call.
      PATIENCE: cycles before it looks for `source`.

    Returns: (position, factor).
    """
    D: gl.constexpr = SIZES.D
    WORLD: gl.constexpr = SIZES.WORLD
    ROWS: gl.constexpr = desc.block_shape[0]
    VECTORS: gl.constexpr = vectors_of_sums(SIZES)
    UNIT: gl.constexpr = unit_of(desc, SIZES)
    first, count = share_of(D, ROWS, UNIT, SIZES.PROGRAMS)
    # Rows of 4 words, which a thread polls at a time.
    MOST: gl.constexpr = triton.next_power_of_2(most_of(D, ROWS, UNIT, SIZES.PROGRAMS)) * VECTORS * ROWS // 4
    LANES: gl.constexpr = shmem.vectors_of(4, gl.num_warps())
    word = gl.arange(0, max(4 * MOST, 4 * 32 * gl.num_warps()), LANES)
    row = (first + word // (VECTORS * ROWS)) * ROWS + word % ROWS
    vector = word // ROWS % VECTORS
    inside = (word < count * (VECTORS * ROWS)) & (row < D) & (vector < SIZES.B)
    at = vector * D + row
    SCALE: gl.constexpr = 1.0 if SIZES.POST_NORMS else SIZES.RESIDUAL_SCALE
    TWINS: gl.constexpr = WORLD > 1 and not SIZES.SUMS_TOLD
    ALONE: gl.constexpr = WORLD == 1 and not SIZES.SUMS_TOLD
    if TWINS:
        before = gl.load(old + at, mask=inside & (not SIZES.POST_NORMS), other=0.0)  # before it is needed
    vectors, missing = rings.received(me, desc, source, factor, COLUMNS, SIZES.B, PATIENCE=PATIENCE)
    stamp(times, 0)
    box = shmem.messages(me, sums) + which * (WORLD * SIZES.WORDS)
    PORTION: gl.constexpr = portion_of(D, desc, gl.num_warps(), 1, SIZES, UNIT)
    EVEN: gl.constexpr = UNIT % 2 == 0 and PORTION % 2 == 0  # 64 divides D, so the last program's are even, too
    for begin in range(0, count, PORTION):
        place, b, own, there = rows_of_share(desc, first, begin, count, PORTION, D, SIZES)
        scale = scale_of(scales, own, there)
        if ALONE:
            before = gl.load(old + b * D + own, mask=there & (not SIZES.POST_NORMS), other=0.0)
        parts = rings.sums_of(ring, desc, PORTION, VECTORS)
        blocks = gl.minimum(count - begin, PORTION)
        position = rings.multiply_rows(ring, position, desc, vectors, parts, blocks, COLUMNS, SIZES.B, EVEN)
        products = rings.collect(parts, PORTION) * scale
        if SIZES.SUMS_TOLD:
            rings.send_sums(me, told, products, first + begin, count - begin, ROWS, D, SIZES.B, WORLD)
        elif ALONE:
            gl.store(new + b * D + own, before + products * SCALE, mask=there)
            if SIZES.STREAM_TOLD:
                shmem.send(me, told + b * D + own, before + products * SCALE, me.rank, there)
        else:
            sent = place < count * (VECTORS * ROWS)
            send(me, box, first * (VECTORS * ROWS) + place, gl.where(there, products, 0.0), sent, SIZES)
    rings.report(me, desc, source, missing, COLUMNS, SIZES.B)
    if not TWINS:
        factor = finish(me, met, phase, SIZES.STREAM_TOLD or SIZES.SUMS_TOLD, factor, times, SIZES)
    else:
        stamp(times, 1)
        begin, end = first * (VECTORS * ROWS) // 4, (first + count) * (VECTORS * ROWS) // 4
        words, late = shmem.receive_vectors(me, box, begin, end, 4, SIZES.WORDS, MOST, 4, 1, WORLD)
        total = words[0].to(gl.float32, bitcast=True)
        for rank in gl.static_range(1, WORLD):
            total += words[rank].to(gl.float32, bitcast=True)
        gl.store(new + at, before + total * SCALE, mask=inside)
        if SIZES.STREAM_TOLD:
            shmem.send(me, told + at, before + total * SCALE, me.rank, inside)
        stamp(times, 2)
        if not SIZES.STREAM_TOLD:
            shmem.arrive(me, met)
        shmem.clear_vectors(me, box, begin, end, late, 4, SIZES.WORDS, MOST, 4, 1, WORLD)
        if SIZES.STREAM_TOLD:
            stamp(times, 3)
        else:
            factor = await_all(me, met, phase, factor, times, SIZES)
    return position, factor


@gluon.jit
def send(me, box, word, value, mask, SIZES: gl.constexpr):
    """Sends this rank's part of a sum to the twins of this program, on every rank."""
    WORLD: gl.constexpr = SIZES.WORLD
    words = value.to(gl.int32, bitcast=True)
    for i in gl.static_range(1, WORLD + 1):
        shmem.send_words(me, box + me.rank * SIZES.WORDS + word, words, (me.rank + i) % WORLD, mask)


@gluon.jit
def fetch_unembed(ring, position, given, SIZES: gl.constexpr):
    """Begins to load the program's rows of the last product."""
    ROWS: gl.constexpr = given.unembed.block_shape[0]
    first, count = share_of(SIZES.V, ROWS, 1, SIZES.PROGRAMS)
    for i in range(count):
        position = rings.fetch_rows(ring, position, given.unembed, (first + i) * ROWS, SIZES.D, SIZES.IN_FLIGHT, 0)


@gluon.jit
def unembed(me, ring, position, given, x, block, norms, logits_ptr, times, factor, SIZES: gl.constexpr):
    """The program's logits f32 [B, V] of the normalised stream.

    Args:
      x, block, norms: as `stream_of` takes them.
    """
    desc = given.unembed
    CAP: gl.constexpr = SIZES.LOGIT_SOFT_CAP
    first, count = share_of(SIZES.V, desc.block_shape[0], 1, SIZES.PROGRAMS)
    if desc.block_shape[2] != given.query.block_shape[2]:
        # One has 8 bits, and the other one 16: these gains lie otherwise.
        norms = norms_of(desc, given.final_norm, of_layer(given.post_mlp_norm, SIZES.LAYERS - 1, SIZES.D), SIZES)
    vectors, late, _last = stream_of(me, desc, x, block, norms, True, None, factor, SIZES)
    stamp(times, 0)
    VECTORS: gl.constexpr = vectors_of_sums(SIZES)
    PORTION: gl.constexpr = portion_of(SIZES.V, desc, gl.num_warps(), 1, SIZES)
    for begin in range(0, count, PORTION):
        _, b, row, there = rows_of_share(desc, first, begin, count, PORTION, SIZES.V, SIZES)
        scale = scale_of(given.unembed_scale, row, there)
        sums = rings.sums_of(ring, desc, PORTION, VECTORS)
        blocks = gl.minimum(count - begin, PORTION)
        position = rings.multiply_rows(ring, position, desc, vectors, sums, blocks, SIZES.D, SIZES.B)
        logit = rings.collect(sums, PORTION) * scale * SIZES.LOGIT_SCALE
        if CAP > 0:
            logit = CAP * (1 - 2 / (gl.exp(logit * (2 / CAP)) + 1))
        gl.store(logits_ptr + b * SIZES.V + row, logit, mask=there)
    report_stream(me, desc, block, late, SIZES)
    stamp(times, 1)
