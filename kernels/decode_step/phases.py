"""The phases of a decode step that are products, and how they end.

Each program has some rows of every matrix (`share_of`), in blocks that lie next to each other. No sum is divided among
programs, so results are the same bits every time. The arguments that most functions take are

* `given`, `kept`: the kernel's `Given` and `Kept`, what it is given and its scratch;
* `factor`: f32, 1, or NaN once something has not come, so that nothing looks like a result that is none;
* SIZES: the kernel's `Sizes`.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.blocks import epilogue
from jaxtaxfree.kernels.decode_step import ring as rings

PHASES = gl.constexpr(6)  # of a layer


@gluon.jit
def share_of(ROWS: gl.constexpr, BLOCK: gl.constexpr, UNIT: gl.constexpr, PROGRAMS: gl.constexpr):
    """The program's blocks of rows: (the first one, how many)."""
    MOST: gl.constexpr = most_of(ROWS, BLOCK, UNIT, PROGRAMS)
    first = gl.program_id(0) * MOST
    return first, gl.minimum(gl.maximum((ROWS + BLOCK - 1) // BLOCK - first, 0), MOST)


@triton.constexpr_function
def most_of(rows, block, unit, programs):
    """The most blocks of rows that a program has."""
    blocks = -(-rows // block)
    return -(-blocks // (unit * programs)) * unit


@triton.constexpr_function
def unit_of(desc):
    """How many blocks of rows go together where they are sent: 4 words or more."""
    return max(1, 4 // desc.block_shape[0])


@gluon.jit
def of_layer(ptr, layer, SIZE: gl.constexpr):
    """A layer's part of [L, SIZE]; None of None."""
    if ptr is not None:
        ptr = ptr + layer * SIZE
    return ptr


@gluon.jit
def meet(me, met, phase, factor, SIZES: gl.constexpr):
    """Ends a phase: what any program of this rank has stored in it all others see.

    Returns: `factor`, NaN if some did not come.
    """
    shmem.arrive(me, met)
    return await_all(me, met, phase, factor, SIZES)


@gluon.jit
def await_all(me, met, phase, factor, SIZES: gl.constexpr):
    """The second half of `meet`."""
    A_CALL: gl.constexpr = SIZES.LAYERS * PHASES * SIZES.PROGRAMS
    count = ((me.epoch - 1) * A_CALL).to(gl.int32) + (phase + 1) * SIZES.PROGRAMS
    return gl.where(shmem.meet(me, met, count), factor, float("nan"))


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
            position = rings.fetch_rows(ring, position, given.query, layer * QUERIES + row, SIZES.D)
        elif row < QUERIES + KEYS:
            position = rings.fetch_rows(ring, position, given.key, layer * KEYS + row - QUERIES, SIZES.D)
        else:
            position = rings.fetch_rows(ring, position, given.value, layer * KEYS + row - QUERIES - KEYS, SIZES.D)
    return position


@gluon.jit
def project(ring, position, given, x, layer, qkv, factor, SIZES: gl.constexpr):
    """qkv f32 [B, (HEADS + 2 KV_HEADS) * H]: queries, keys and values of the normalised stream x f32 [B, D]."""
    desc = given.query
    B: gl.constexpr = SIZES.B
    ROWS: gl.constexpr = desc.block_shape[0]
    QUERIES: gl.constexpr = SIZES.HEADS * SIZES.H
    KEYS: gl.constexpr = SIZES.KV_HEADS * SIZES.H
    first, count = share_of(QUERIES + 2 * KEYS, ROWS, 1, SIZES.PROGRAMS)
    gain = given.attn_norm + layer * SIZES.D
    vectors = rings.vectors_of(desc, x, gain, factor, SIZES.D, B, SIZES.EPS, SIZES.PLUS_ONE)
    for i in range(count):
        row = (first + i) * ROWS + rings.rows_of(desc)
        bias = row.to(gl.float32) * 0.0
        if given.query_bias is not None:
            bias += part_of(of_layer(given.query_bias, layer, QUERIES), row, QUERIES)
            bias += part_of(of_layer(given.key_bias, layer, KEYS), row - QUERIES, KEYS)
            bias += part_of(of_layer(given.value_bias, layer, KEYS), row - QUERIES - KEYS, KEYS)
        products, position = rings.multiply(ring, position, desc, vectors, SIZES.D, B)
        for b in gl.static_range(B):
            gl.store(qkv + b * (QUERIES + 2 * KEYS) + row, products[b] + bias)
    return position


@gluon.jit
def part_of(ptr, place, SIZE: gl.constexpr):
    """Elements of a vector [SIZE], 0 outside of it."""
    return gl.load(ptr + place, mask=(place >= 0) & (place < SIZE), other=0.0).to(gl.float32)


@gluon.jit
def fetch_gate(ring, position, given, layer, SIZES: gl.constexpr):
    """Begins to load the program's rows of the gate and of what it gates, block by block."""
    ROWS: gl.constexpr = given.gate.block_shape[0]
    first, count = share_of(SIZES.F, ROWS, 1, SIZES.PROGRAMS)
    for i in range(count):
        row = layer * SIZES.F + (first + i) * ROWS
        position = rings.fetch_rows(ring, position, given.gate, row, SIZES.D)
        position = rings.fetch_rows(ring, position, given.up, row, SIZES.D)
    return position


@gluon.jit
def gate(ring, position, given, x, layer, hidden, factor, SIZES: gl.constexpr):
    """hidden f32 [B, F] = activation(gate) * up, of the normalised stream x f32 [B, D]."""
    desc = given.gate
    B: gl.constexpr = SIZES.B
    ROWS: gl.constexpr = desc.block_shape[0]
    first, count = share_of(SIZES.F, ROWS, 1, SIZES.PROGRAMS)
    gain = given.mlp_norm + layer * SIZES.D
    vectors = rings.vectors_of(desc, x, gain, factor, SIZES.D, B, SIZES.EPS, SIZES.PLUS_ONE)
    for i in range(count):
        gates, position = rings.multiply(ring, position, desc, vectors, SIZES.D, B)
        ups, position = rings.multiply(ring, position, given.up, vectors, SIZES.D, B)
        row = (first + i) * ROWS + rings.rows_of(desc)
        for b in gl.static_range(B):
            value = epilogue.activate_gated(ups[b], gates[b], SIZES.ACTIVATION)
            gl.store(hidden + b * SIZES.F + row, value, mask=row < SIZES.F)
    return position


@gluon.jit
def fetch_share(ring, position, desc, layer, COLUMNS: gl.constexpr, SIZES: gl.constexpr):
    """Begins to load the program's rows of a matrix whose product `add` sums over the ranks."""
    ROWS: gl.constexpr = desc.block_shape[0]
    first, count = share_of(SIZES.D, ROWS, unit_of(desc), SIZES.PROGRAMS)
    for i in range(count):
        position = rings.fetch_rows(ring, position, desc, layer * SIZES.D + (first + i) * ROWS, COLUMNS)
    return position


@gluon.jit
def add(
    me, ring, position, desc, source, old, new, sums, met, which, phase, factor, COLUMNS: gl.constexpr,
    SIZES: gl.constexpr,
):  # fmt: skip
    """new = old + scale * (product of `source`, summed over the ranks): the program's rows. Ends the phase.

    A row belongs to the same program on every rank, so a program exchanges its rows with its twins alone, and adds up
    in the order of the ranks: all have the same bits.

    Args:
      source: f32 [B, COLUMNS].
      old, new: f32 [B, D], the stream before and after, which may be the same.
      which: number of the sum in this call.

    Returns: (position, factor).
    """
    B: gl.constexpr = SIZES.B
    D: gl.constexpr = SIZES.D
    WORLD: gl.constexpr = SIZES.WORLD
    SCALE: gl.constexpr = SIZES.RESIDUAL_SCALE
    ROWS: gl.constexpr = desc.block_shape[0]
    first, count = share_of(D, ROWS, unit_of(desc), SIZES.PROGRAMS)
    vectors = rings.vectors_of(desc, source, None, factor, COLUMNS, B, 0.0, False)
    box = shmem.messages(me, sums) + which * (WORLD * SIZES.WORDS)
    if WORLD == 1:
        before = rows_before(old, first, first + count, desc, SIZES)  # of the next block, before it is needed
    for i in range(count):
        if WORLD == 1:
            olds = before
            before = rows_before(old, first + i + 1, first + count, desc, SIZES)
        products, position = rings.multiply(ring, position, desc, vectors, COLUMNS, B)
        row = (first + i) * ROWS + rings.rows_of(desc)
        for b in gl.static_range(B):
            if WORLD == 1:
                gl.store(new + b * D + row, olds[b] + products[b] * SCALE, mask=row < D)
            else:
                word = ((first + i) * B + b) * ROWS + rings.rows_of(desc)
                send(me, box, word, products[b], SIZES)
    if WORLD == 1:
        factor = meet(me, met, phase, factor, SIZES)
    else:
        # Rows of 4 words, which a thread polls at a time.
        MOST: gl.constexpr = triton.next_power_of_2(most_of(D, ROWS, unit_of(desc), SIZES.PROGRAMS) * B * ROWS // 4)
        begin, end = first * (B * ROWS) // 4, (first + count) * (B * ROWS) // 4
        VECTORS: gl.constexpr = shmem.vectors_of(4, gl.num_warps())
        word = gl.arange(0, max(4 * MOST, 4 * 32 * gl.num_warps()), VECTORS)
        row = (first + word // (B * ROWS)) * ROWS + word % ROWS
        at = word // ROWS % B * D + row
        inside = (word < count * (B * ROWS)) & (row < D)
        before = gl.load(old + at, mask=inside, other=0.0)
        words, late = shmem.receive_vectors(me, box, begin, end, 4, SIZES.WORDS, MOST, 4, 1, WORLD)
        total = words[0].to(gl.float32, bitcast=True)
        for rank in gl.static_range(1, WORLD):
            total += words[rank].to(gl.float32, bitcast=True)
        gl.store(new + at, before + total * SCALE, mask=inside)
        shmem.arrive(me, met)
        shmem.clear_vectors(me, box, begin, end, late, 4, SIZES.WORDS, MOST, 4, 1, WORLD)
        factor = await_all(me, met, phase, factor, SIZES)
    return position, factor


@gluon.jit
def rows_before(old, block, end, desc, SIZES: gl.constexpr):
    """Of each sequence the stream's rows of a block before block `end`."""
    B: gl.constexpr = SIZES.B
    row = block * desc.block_shape[0] + rings.rows_of(desc)
    rows = ()
    for b in gl.static_range(B):
        rows = rows + (gl.load(old + b * SIZES.D + row, mask=(block < end) & (row < SIZES.D), other=0.0),)
    return rows


@gluon.jit
def send(me, box, word, value, SIZES: gl.constexpr):
    """Sends this rank's part of a sum to the twins of this program, on every rank."""
    WORLD: gl.constexpr = SIZES.WORLD
    words = value.to(gl.int32, bitcast=True)
    for i in gl.static_range(1, WORLD + 1):
        shmem.send_words(me, box + me.rank * SIZES.WORDS + word, words, (me.rank + i) % WORLD)


@gluon.jit
def fetch_unembed(ring, position, given, SIZES: gl.constexpr):
    """Begins to load the program's rows of the last product."""
    ROWS: gl.constexpr = given.unembed.block_shape[0]
    first, count = share_of(SIZES.V, ROWS, 1, SIZES.PROGRAMS)
    for i in range(count):
        position = rings.fetch_rows(ring, position, given.unembed, (first + i) * ROWS, SIZES.D)


@gluon.jit
def unembed(ring, position, given, x, logits_ptr, factor, SIZES: gl.constexpr):
    """The program's logits f32 [B, V] of the normalised stream x f32 [B, D]."""
    desc = given.unembed
    B: gl.constexpr = SIZES.B
    ROWS: gl.constexpr = desc.block_shape[0]
    CAP: gl.constexpr = SIZES.LOGIT_SOFT_CAP
    first, count = share_of(SIZES.V, ROWS, 1, SIZES.PROGRAMS)
    vectors = rings.vectors_of(desc, x, given.final_norm, factor, SIZES.D, B, SIZES.EPS, SIZES.PLUS_ONE)
    for i in range(count):
        products, position = rings.multiply(ring, position, desc, vectors, SIZES.D, B)
        row = (first + i) * ROWS + rings.rows_of(desc)
        for b in gl.static_range(B):
            logit = products[b] * SIZES.LOGIT_SCALE
            if CAP > 0:
                logit = CAP * (1 - 2 / (gl.exp(logit * (2 / CAP)) + 1))
            gl.store(logits_ptr + b * SIZES.V + row, logit, mask=row < SIZES.V)
