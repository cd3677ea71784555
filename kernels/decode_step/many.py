"""A decode step of many sequences: its phases with the products of tensor cores.

They are those of `hopper.py`, but all programs meet behind `merge`, `add` and `gate` as well: so many vectors would be
too much to send to every program as messages. Before `merge` they meet, or messages go from program to program. What a
phase multiplies lies in scratch, 8 or 16 vectors in 16 bits, as `tensor_cores.place_of` has them.

A norm multiplies the stream by a gain for each column and a scale for each vector. Who adds to the stream leaves it
times the gains of the next norm, and the sum of squares of its own rows; the scale comes last, behind the product.

Vectors behind the last sequence are zeros, and nobody reads their products.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.blocks import epilogue
from jaxtaxfree.kernels.decode_step import attention, attention_cores, phases
from jaxtaxfree.kernels.decode_step import ring as rings
from jaxtaxfree.kernels.decode_step import tensor_cores as tensor

MOST = gl.constexpr(16)  # products that a program has in registers at a time
PORTION = gl.constexpr(8)  # and whose sums it has in shared memory


@gluon.jit
def load(ring, given, SIZES: gl.constexpr):
    """Fetches all that the program reads once, in the order in which `compute` takes it."""
    position = rings.first_of_loads()
    lengths = attention.lengths_of(given, SIZES)
    QUERIES: gl.constexpr = SIZES.HEADS * SIZES.H
    for layer in range(SIZES.LAYERS):
        position = fetch_projections(ring, position, given, layer, SIZES)
        position = attention.fetch(ring, position, given, lengths, layer, SIZES)
        position = fetch_share(ring, position, given.out, None, layer, SIZES.D, QUERIES, SIZES)
        position = fetch_share(ring, position, given.gate, given.up, layer, SIZES.F, SIZES.D, SIZES)
        position = fetch_share(ring, position, given.down, None, layer, SIZES.D, SIZES.F, SIZES)
    fetch_share(ring, position, given.unembed, None, 0, SIZES.V, SIZES.D, SIZES)


@gluon.jit
def compute(me, ring, given, kept, results, x_ptr, sums, met, SIZES: gl.constexpr):
    """The phases of all layers, and the logits."""
    shmem.verify(me)
    D: gl.constexpr = SIZES.D
    QUERIES: gl.constexpr = SIZES.HEADS * SIZES.H
    POST: gl.constexpr = 1 if SIZES.POST_NORMS else 0  # and inside of `add`
    position = (me.rank * 0, me.rank * 0)
    factor = gl.where(me.ready, 1.0, float("nan"))
    lengths = attention.lengths_of(given, SIZES)
    x = x_ptr
    begin(kept, x, given.attn_norm, SIZES)
    factor = phases.meet(me, met, 0, factor, None, SIZES)
    for layer in range(SIZES.LAYERS):
        phase = 1 + layer * phases.meetings_of(SIZES) - SIZES.QUERIES_TOLD  # of those that end with a meeting
        window = phases.of_each_layer(given.windows, layer, SIZES.WINDOW)
        table = phases.of_each_layer(given.tables, layer, SIZES.TABLE)
        times = phases.times_of(results.times, layer, 0, SIZES)
        position = project(me, ring, position, given, kept, layer, times, factor, SIZES)
        factor = phases.finish(me, met, phase, SIZES.QUERIES_TOLD, factor, times, SIZES)
        times = phases.times_of(results.times, layer, 1, SIZES)
        position = attention_cores.attend(
            me, ring, position, given, kept, lengths, window, table, layer, factor, SIZES
        )  # fmt: skip
        factor = phases.finish(me, met, phase + 1, SIZES.PARTS_TOLD, factor, times, SIZES)
        phase -= SIZES.PARTS_TOLD
        times = phases.times_of(results.times, layer, 2, SIZES)
        if SIZES.PARTS_TOLD:
            attention_cores.merge(me, kept, kept.heads, layer, factor, SIZES)
        else:
            attention.merge(me, kept, kept.heads, layer, factor, SIZES)
        factor = phases.meet(me, met, phase + 2, factor, times, SIZES)
        times = phases.times_of(results.times, layer, 3, SIZES)
        behind = phases.of_layer(given.post_attn_norm, layer, D)
        position, factor = add(
            me, ring, position, given.out, phases.of_layer(given.out_scale, layer, D), kept.heads, x,
            given.mlp_norm + layer * D, behind, kept, sums, met, 2 * layer, phase + 3, times, factor, QUERIES,
            SIZES,
        )  # fmt: skip
        factor = phases.meet(me, met, phase + 3 + POST, factor, times, SIZES)
        x = kept.stream
        times = phases.times_of(results.times, layer, 4, SIZES)
        position = gate(ring, position, given, kept, layer, times, factor, SIZES)
        factor = phases.meet(me, met, phase + 4 + POST, factor, times, SIZES)
        times = phases.times_of(results.times, layer, 5, SIZES)
        norm = gl.where(layer == SIZES.LAYERS - 1, given.final_norm, given.attn_norm + (layer + 1) * D)
        behind = phases.of_layer(given.post_mlp_norm, layer, D)
        position, factor = add(
            me, ring, position, given.down, phases.of_layer(given.down_scale, layer, D), kept.hidden, x, norm, behind,
            kept, sums, met, 2 * layer + 1, phase + 5 + POST, times, factor, SIZES.F, SIZES,
        )  # fmt: skip
        factor = phases.meet(me, met, phase + 5 + 2 * POST, factor, times, SIZES)
    attention.put(me, given, kept, results, SIZES)
    times = phases.times_of(results.times, SIZES.LAYERS, 0, SIZES)
    unembed(ring, position, given, kept, results.logits, times, factor, SIZES)


# How the rows of a matrix are shared: in tiles of 8, of which a program takes some at a time, in so many turns.


@triton.constexpr_function
def turns_of(rows, each, programs):
    """In how many turns a program takes its tiles, of which each makes so many products."""
    return triton.cdiv(triton.cdiv(triton.cdiv(rows, 8), programs) * each, MOST.value)


@triton.constexpr_function
def tiles_of(rows, each, programs):
    """How many tiles a program takes in a turn."""
    return triton.cdiv(triton.cdiv(triton.cdiv(rows, 8), programs), turns_of(rows, each, programs))


@gluon.jit
def first_row(turn, ROWS: gl.constexpr, EACH: gl.constexpr, SIZES: gl.constexpr):
    """The first of ROWS rows that the program takes in a turn; ROWS or more if there is none."""
    TURNS: gl.constexpr = turns_of(ROWS, EACH, SIZES.PROGRAMS)
    TILES: gl.constexpr = tiles_of(ROWS, EACH, SIZES.PROGRAMS)
    return (gl.program_id(0) * TURNS + turn) * (8 * TILES)


@gluon.jit
def fetch_projections(ring, position, given, layer, SIZES: gl.constexpr):
    """Begins to load the program's rows of queries, keys and values, which are counted one after the other."""
    QUERIES: gl.constexpr = SIZES.HEADS * SIZES.H
    KEYS: gl.constexpr = SIZES.KV_HEADS * SIZES.H
    WIDTH: gl.constexpr = QUERIES + 2 * KEYS
    for turn in range(turns_of(WIDTH, 1, SIZES.PROGRAMS)):
        first = first_row(turn, WIDTH, 1, SIZES)
        if first < WIDTH:
            for chunk in range(tensor.chunks_of(SIZES.D, given.query)):
                for tile in range(tiles_of(WIDTH, 1, SIZES.PROGRAMS)):
                    row = first + tile * 8
                    if row < QUERIES:
                        position = tensor.fetch(
                            ring, position, given.query, chunk, layer * QUERIES + row, SIZES.IN_FLIGHT
                        )
                    elif row < QUERIES + KEYS:
                        position = tensor.fetch(
                            ring, position, given.key, chunk, layer * KEYS + row - QUERIES, SIZES.IN_FLIGHT
                        )
                    else:  # behind the last row whatever is there
                        position = tensor.fetch(
                            ring, position, given.value, chunk, layer * KEYS + row - QUERIES - KEYS, SIZES.IN_FLIGHT
                        )
    return position


@gluon.jit
def fetch_share(ring, position, desc, other, layer, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SIZES: gl.constexpr):
    """Begins to load the program's rows of a layer's matrix, in turns with those of another one that may be None."""
    EACH: gl.constexpr = 1 if other is None else 2
    for turn in range(turns_of(ROWS, EACH, SIZES.PROGRAMS)):
        first = first_row(turn, ROWS, EACH, SIZES)
        if first < ROWS:
            for chunk in range(tensor.chunks_of(COLUMNS, desc)):
                for tile in range(tiles_of(ROWS, EACH, SIZES.PROGRAMS)):
                    row = layer * ROWS + first + tile * 8
                    position = tensor.fetch(ring, position, desc, chunk, row, SIZES.IN_FLIGHT)
                    if other is not None:
                        position = tensor.fetch(ring, position, other, chunk, row, SIZES.IN_FLIGHT)
    return position


@gluon.jit
def load_stream(kept, desc, SIZES: gl.constexpr):
    """(squares of the stream, for `scale_of`; of the stream times the next norm's gains what a first block needs)."""
    squares = load_squares(kept.squares, SIZES)
    chunk = tensor.load_chunk(kept.scaled, 0, desc, SIZES.D, SIZES)
    return fewer(squares, SIZES), chunk


@gluon.jit
def take_turn(
    ring, position, first, second, source, chunk, turn, COLUMNS: gl.constexpr, TILES: gl.constexpr,
    TURNS: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """(The products of a turn's tiles, the vectors of the first columns for the turn after it, the next position).

    Args:
      first, second, source: as `tensor_cores.multiply` takes them.
      chunk: the vectors of the first columns. Behind the last turn nothing is loaded.
    """
    products, position = tensor.multiply(ring, position, first, second, source, chunk, COLUMNS, TILES, SIZES)
    if TURNS > 1:
        begin = gl.where(turn + 1 < TURNS, 0, tensor.chunks_of(COLUMNS, first))
        chunk = tensor.load_chunk(source, begin, first, COLUMNS, SIZES)
    return products, chunk, position


@gluon.jit
def place_of_sums(first, tile: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr):
    """Of COUNT tiles that `tensor.collect` returns, of those that the program has from row `first` on.

    Returns: (the vector b, the row, whether it is one of ROWS and of these tiles), which broadcast to [size, 16, 8],
    the size a power of 2.
    """
    LAYOUT: gl.constexpr = gl.SliceLayout(1, tensor.collected(gl.num_warps()))
    b = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    row = rows_of_sums(first, tile, COUNT)
    return b, row, (row < gl.minimum(ROWS, first + (tile + COUNT) * 8)) & (b >= 0)


@gluon.jit
def rows_of_sums(first, tile: gl.constexpr, COUNT: gl.constexpr):
    """The rows [size, 1, 8] of COUNT tiles that `tensor.collect` returns, from one of those from `first` on."""
    SIZE: gl.constexpr = triton.next_power_of_2(COUNT)
    LAYOUT: gl.constexpr = gl.SliceLayout(1, tensor.collected(gl.num_warps()))
    own = gl.arange(0, SIZE, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return first + (tile + own) * 8 + row


@triton.constexpr_function
def portion_of(tiles, tile):
    """How many of a turn's tiles are collected at a time, from a tile on."""
    return min(PORTION.value, tiles - tile)


@gluon.jit
def project(me, ring, position, given, kept, layer, times, factor, SIZES: gl.constexpr):
    """kept.qkv f32 [B, (HEADS + 2 KV_HEADS) * H]: queries, keys and values of the normalised stream. If they are told,
    it is messages, [L, ...].
    """
    WIDTH: gl.constexpr = (SIZES.HEADS + 2 * SIZES.KV_HEADS) * SIZES.H
    TILES: gl.constexpr = tiles_of(WIDTH, 1, SIZES.PROGRAMS)
    TURNS: gl.constexpr = turns_of(WIDTH, 1, SIZES.PROGRAMS)
    squares, chunk = load_stream(kept, given.query, SIZES)
    phases.stamp(times, 0)
    for turn in range(TURNS):
        first = first_row(turn, WIDTH, 1, SIZES)
        if first < WIDTH:
            scales = scales_of_projections(given, layer, first, TILES, SIZES)
            products, chunk, position = take_turn(
                ring, position, given.query, None, kept.scaled, chunk, turn, SIZES.D, TILES, TURNS, SIZES
            )  # fmt: skip
            scale = scale_of(squares, factor, SIZES)
            for tile in gl.static_range(0, TILES, PORTION):
                leave_projections(
                    me, ring, products, given, kept, layer, first, scale, scales, tile, portion_of(TILES, tile), SIZES
                )  # fmt: skip
    return position


@gluon.jit
def scales_of(ptr, first, TILES: gl.constexpr, ROWS: gl.constexpr):
    """The scales of a turn's rows of weights of 8 bits, for each PORTION of its tiles; () of None.

    They are to be asked for before the rows are multiplied.
    """
    scales = ()
    if ptr is not None:
        for tile in gl.static_range(0, TILES, PORTION):
            row = rows_of_sums(first, tile, portion_of(TILES, tile))
            scales = scales + (gl.load(ptr + row, mask=row < ROWS, other=0.0),)
    return scales


@gluon.jit
def scales_of_projections(given, layer, first, TILES: gl.constexpr, SIZES: gl.constexpr):
    """The same of queries, keys and values."""
    scales = ()
    if given.query_scale is not None:
        for tile in gl.static_range(0, TILES, PORTION):
            row = rows_of_sums(first, tile, portion_of(TILES, tile))
            scales = scales + (phases.scale_of_projections(given, layer, row, SIZES),)
    return scales


@gluon.jit
def scaled(value, scales, tile: gl.constexpr):
    """The products of the tiles from this one on times the scales of their rows, if there are any."""
    if len(scales) > 0:
        value *= scales[tile // PORTION]
    return value


@gluon.jit
def leave_projections(
    me, ring, products, given, kept, layer, first, scale, scales, tile: gl.constexpr, COUNT: gl.constexpr,
    SIZES: gl.constexpr,
):  # fmt: skip
    """Those of COUNT tiles."""
    QUERIES: gl.constexpr = SIZES.HEADS * SIZES.H
    KEYS: gl.constexpr = SIZES.KV_HEADS * SIZES.H
    WIDTH: gl.constexpr = QUERIES + 2 * KEYS
    SIZE: gl.constexpr = triton.next_power_of_2(COUNT)
    value = scaled(tensor.collect(ring, products, tile, 1, COUNT, SIZE) * scale, scales, tile)
    b, row, own = place_of_sums(first, tile, COUNT, WIDTH)
    if given.query_bias is not None:
        value += phases.part_of(phases.of_layer(given.query_bias, layer, QUERIES), row, QUERIES)
        value += phases.part_of(phases.of_layer(given.key_bias, layer, KEYS), row - QUERIES, KEYS)
        value += phases.part_of(phases.of_layer(given.value_bias, layer, KEYS), row - QUERIES - KEYS, KEYS)
    if SIZES.QUERIES_TOLD:
        shmem.send(me, kept.qkv + (layer * SIZES.B + b) * WIDTH + row, value, me.rank, own & (b < SIZES.B))
    else:
        gl.store(kept.qkv + b * WIDTH + row, value, mask=own & (b < SIZES.B))


@gluon.jit
def gate(ring, position, given, kept, layer, times, factor, SIZES: gl.constexpr):
    """kept.hidden [vectors, F] = activation(gate) * up, of the normalised stream."""
    TILES: gl.constexpr = tiles_of(SIZES.F, 2, SIZES.PROGRAMS)
    TURNS: gl.constexpr = turns_of(SIZES.F, 2, SIZES.PROGRAMS)
    squares, chunk = load_stream(kept, given.gate, SIZES)
    phases.stamp(times, 0)
    for turn in range(TURNS):
        first = first_row(turn, SIZES.F, 2, SIZES)
        if first < SIZES.F:
            gates = scales_of(phases.of_layer(given.gate_scale, layer, SIZES.F), first, TILES, SIZES.F)
            ups = scales_of(phases.of_layer(given.up_scale, layer, SIZES.F), first, TILES, SIZES.F)
            products, chunk, position = take_turn(
                ring, position, given.gate, given.up, kept.scaled, chunk, turn, SIZES.D, TILES, TURNS, SIZES
            )  # fmt: skip
            scale = scale_of(squares, factor, SIZES)
            for tile in gl.static_range(0, TILES, PORTION):
                store_hidden(
                    ring, products, kept, first, scale, gates, ups, tile, portion_of(TILES, tile), SIZES
                )  # fmt: skip
    return position


@gluon.jit
def store_hidden(
    ring, products, kept, first, scale, gate_scales, up_scales, tile: gl.constexpr, COUNT: gl.constexpr,
    SIZES: gl.constexpr,
):  # fmt: skip
    """That of COUNT tiles."""
    SIZE: gl.constexpr = triton.next_power_of_2(COUNT)
    gates = scaled(tensor.collect(ring, products, 2 * tile, 2, COUNT, SIZE) * scale, gate_scales, tile)
    ups = scaled(tensor.collect(ring, products, 2 * tile + 1, 2, COUNT, SIZE) * scale, up_scales, tile)
    b, row, own = place_of_sums(first, tile, COUNT, SIZES.F)
    tensor.keep(kept.hidden, epilogue.activate_gated(ups, gates, SIZES.ACTIVATION), b, row, own, SIZES)


@gluon.jit
def add(
    me, ring, position, desc, scales_ptr, source, old, norm, behind, kept, sums, met, which, phase, times, factor,
    COLUMNS: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """kept.stream f32 [B, D] = old + scale * (product of `source`, summed over the ranks): the program's rows.

    A row belongs to the same program on every rank, so a program exchanges its rows with its twins alone, and adds up
    in the order of the ranks: all have the same bits.

    A norm behind the block is of all rows. Then the program leaves its rows of the block's result, all meet, and each
    adds its own to the stream, times what the norm multiplies them by.

    Args:
      scales_ptr: f32 [D], those of the layer's rows; or None.
      source: [vectors, COLUMNS].
      old: f32 [B, D], the stream before.
      norm: [D], the gains of the next norm.
      behind: those of the norm behind the block, or None.
      which: number of the sum in this call.
      phase: number of the meeting, if there is such a norm.

    Returns: (position, factor).
    """
    D: gl.constexpr = SIZES.D
    WORLD: gl.constexpr = SIZES.WORLD
    TURNS: gl.constexpr = turns_of(D, 1, SIZES.PROGRAMS)
    TILES: gl.constexpr = tiles_of(D, 1, SIZES.PROGRAMS)
    SHARE: gl.constexpr = TURNS * TILES * 128
    box = shmem.messages(me, sums) + which * (WORLD * SIZES.WORDS)
    begin = gl.program_id(0) * SHARE
    LAYOUT: gl.constexpr = scale_layout(gl.num_warps())
    squares = gl.full([16], 0.0, gl.float32, LAYOUT)
    chunk = tensor.load_chunk(source, 0, desc, COLUMNS, SIZES)
    phases.stamp(times, 0)
    for turn in range(TURNS):
        first = first_row(turn, D, 1, SIZES)
        if first < D:
            scales = scales_of(scales_ptr, first, TILES, D)
            products, chunk, position = take_turn(
                ring, position, desc, None, source, chunk, turn, COLUMNS, TILES, TURNS, SIZES
            )  # fmt: skip
            for tile in gl.static_range(0, TILES, PORTION):
                squares += pass_on(
                    me, ring, products, box + begin + turn * (TILES * 128), old, norm, kept, first, scales, factor,
                    tile, portion_of(TILES, tile), SIZES,
                )  # fmt: skip
    phases.stamp(times, 1)
    if WORLD > 1:
        if first_row(0, D, 1, SIZES) < D:
            squares = gl.convert_layout(receive(me, box, begin, old, norm, kept, factor, SIZES), LAYOUT)
        phases.stamp(times, 2)
    if SIZES.POST_NORMS:
        store_squares(kept.squares + SIZES.PROGRAMS * 16, squares)
        factor = phases.meet(me, met, phase, factor, None, SIZES)
        squares = settle(kept, old, norm, behind, factor, SIZES)
    store_squares(kept.squares, squares)
    return position, factor


@gluon.jit
def store_squares(squares_ptr, squares):
    """Leaves the sums of squares f32 [16] of the program's rows."""
    FEW: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    gl.store(squares_ptr + gl.program_id(0) * 16 + gl.arange(0, 16, FEW), gl.convert_layout(squares, FEW))


@gluon.jit
def pass_on(
    me, ring, products, box, old, norm, kept, first, scales, factor, tile: gl.constexpr, COUNT: gl.constexpr,
    SIZES: gl.constexpr,
):  # fmt: skip
    """Sends COUNT tiles of a sum to the twins; without any it leaves what `leave_sum` does."""
    D: gl.constexpr = SIZES.D
    SIZE: gl.constexpr = triton.next_power_of_2(COUNT)
    value = scaled(tensor.collect(ring, products, tile, 1, COUNT, SIZE) * factor, scales, tile)
    b, row, own = place_of_sums(first, tile, COUNT, D)
    there = own & (b < SIZES.B)
    squares = gl.full([16], 0.0, gl.float32, scale_layout(gl.num_warps()))
    if SIZES.WORLD == 1:
        before = gl.load(old + b * D + row, mask=there & (not SIZES.POST_NORMS), other=0.0)
        squares += gl.sum(gl.sum(leave_sum(kept, value, before, norm, b, row, own, SIZES), 2), 0)
    else:
        word = (row - first) // 8 * 128 + b * 8 + row % 8
        phases.send(me, box, word, gl.where(there, value, 0.0), (row < first + (tile + COUNT) * 8) & (b >= 0), SIZES)
    return squares


@gluon.jit
def receive(me, box, begin, old, norm, kept, factor, SIZES: gl.constexpr):
    """Adds up the program's rows of a sum of all ranks, of which it leaves what `leave_sum` does."""
    D: gl.constexpr = SIZES.D
    WORLD: gl.constexpr = SIZES.WORLD
    TURNS: gl.constexpr = turns_of(D, 1, SIZES.PROGRAMS)
    EACH: gl.constexpr = tiles_of(D, 1, SIZES.PROGRAMS)
    TILES: gl.constexpr = TURNS * EACH
    # Rows of 4 words, which a thread polls at a time.
    MOST_ROWS: gl.constexpr = triton.next_power_of_2(TILES) * 128 // 4
    SIZE: gl.constexpr = max(4 * MOST_ROWS, 4 * 32 * gl.num_warps())
    word = gl.arange(0, SIZE, shmem.vectors_of(4, gl.num_warps()))
    row = gl.program_id(0) * (TILES * 8) + word // 128 * 8 + word % 8
    b = word // 8 % 16
    own = (word < TILES * 128) & (row < D)
    before = gl.load(old + b * D + row, mask=own & (b < SIZES.B) & (not SIZES.POST_NORMS), other=0.0)
    turns = gl.minimum(((D + 7) // 8 - gl.program_id(0) * TILES + (EACH - 1)) // EACH, TURNS)
    end = begin // 4 + turns * (EACH * 32)
    words, late = shmem.receive_vectors(me, box, begin // 4, end, 4, SIZES.WORDS, MOST_ROWS, 4, 1, WORLD)
    total = words[0].to(gl.float32, bitcast=True)
    for rank in gl.static_range(1, WORLD):
        total += words[rank].to(gl.float32, bitcast=True)
    squares = leave_sum(kept, total, before, norm, b, row, own, SIZES)
    shmem.clear_vectors(me, box, begin // 4, end, late, 4, SIZES.WORDS, MOST_ROWS, 4, 1, WORLD)
    return gl.sum(gl.sum(squares.reshape([SIZE // 128, 16, 8]), 2), 0)


@gluon.jit
def leave_sum(kept, value, before, norm, b, row, own, SIZES: gl.constexpr):
    """Adds rows of a sum over the ranks to the stream before it, and leaves that; returns their squares.

    With a norm behind the block it leaves the sum alone.
    """
    if SIZES.POST_NORMS:
        gl.store(kept.block + b * SIZES.D + row, value, mask=own & (b < SIZES.B))
        squares = gl.where(own & (b < SIZES.B), value * value, 0.0)
    else:
        squares = leave(kept, before + value * SIZES.RESIDUAL_SCALE, norm, b, row, own, SIZES)
    return squares


@gluon.jit
def settle(kept, old, norm, behind, factor, SIZES: gl.constexpr):
    """Adds the program's rows of a block's result, behind its norm, to the stream; returns their squares f32 [16]."""
    D: gl.constexpr = SIZES.D
    TILES: gl.constexpr = tiles_of(D, 1, SIZES.PROGRAMS)
    scale = scale_of(fewer(load_squares(kept.squares + SIZES.PROGRAMS * 16, SIZES), SIZES), factor, SIZES)
    squares = gl.full([16], 0.0, gl.float32, scale_layout(gl.num_warps()))
    for turn in range(turns_of(D, 1, SIZES.PROGRAMS)):
        first = first_row(turn, D, 1, SIZES)
        for tile in gl.static_range(0, TILES, PORTION):
            b, row, own = place_of_sums(first, tile, portion_of(TILES, tile), D)
            there = own & (b < SIZES.B)
            before = gl.load(old + b * D + row, mask=there, other=0.0)
            result = gl.load(kept.block + b * D + row, mask=there, other=0.0)
            result *= scale * gain_of(behind, row, own, SIZES) * SIZES.RESIDUAL_SCALE
            squares += gl.sum(gl.sum(leave(kept, before + result, norm, b, row, own, SIZES), 2), 0)
    return squares


@gluon.jit
def begin(kept, x, norm, SIZES: gl.constexpr):
    """Leaves what the first phase needs of x f32 [B, D], and zeros for vectors behind the last sequence."""
    D: gl.constexpr = SIZES.D
    QUERIES: gl.constexpr = SIZES.HEADS * SIZES.H
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    b = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    OWN: gl.constexpr = triton.cdiv(D, SIZES.PROGRAMS)
    place = gl.arange(0, triton.next_power_of_2(OWN), gl.SliceLayout(0, LAYOUT))[None, :]
    row = gl.program_id(0) * OWN + place
    own = (place < OWN) & (row < D) & (b >= 0)
    value = gl.load(x + b * D + row, mask=own & (b < SIZES.B), other=0.0)
    gain = gain_of(norm, row, own, SIZES)
    tensor.keep(kept.scaled, value * gain, b, row, own, SIZES)
    squares = gl.sum(value * value, 1)
    gl.store(kept.squares + gl.program_id(0) * 16 + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT)), squares)
    ROUGH: gl.constexpr = triton.cdiv(QUERIES, SIZES.PROGRAMS)
    place = gl.arange(0, triton.next_power_of_2(ROUGH), gl.SliceLayout(0, LAYOUT))[None, :]
    column = gl.program_id(0) * ROUGH + place
    behind = (place < ROUGH) & (column < QUERIES) & (b >= SIZES.B)
    tensor.keep(kept.heads, (b + column).to(gl.float32) * 0.0, b, column, behind, SIZES)


@gluon.jit
def leave(kept, value, norm, b, row, own, SIZES: gl.constexpr):
    """Leaves rows of the stream, and what the next phase needs of them; returns their squares, 0 of what is not."""
    gl.store(kept.stream + b * SIZES.D + row, value, mask=own & (b < SIZES.B))
    tensor.keep(kept.scaled, value * gain_of(norm, row, own, SIZES), b, row, own, SIZES)
    return gl.where(own, value * value, 0.0)


@gluon.jit
def gain_of(norm, row, own, SIZES: gl.constexpr):
    """By what a norm multiplies rows of the stream."""
    gain = gl.load(norm + row, mask=own, other=0.0).to(gl.float32)
    if SIZES.PLUS_ONE:
        gain += 1.0
    return gain


@triton.constexpr_function
def scale_layout(warps):
    """The layout of what each of 16 vectors has one of."""
    return gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(1, tensor.collected(warps))))


@gluon.jit
def load_squares(squares_ptr, SIZES: gl.constexpr):
    """What the programs have left of squares: f32 [programs, 16]. Nobody waits for it before `scale_of`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    program = gl.arange(0, triton.next_power_of_2(SIZES.PROGRAMS), gl.SliceLayout(1, LAYOUT))[:, None]
    b = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.load(squares_ptr + program * 16 + b, mask=(program < SIZES.PROGRAMS) & (b >= 0), other=0.0)


@triton.constexpr_function
def again_of(programs, warps):
    """Of how many programs a thread has the squares."""
    return max(1, triton.next_power_of_2(programs) // (8 * warps))


@gluon.jit
def fewer(squares, SIZES: gl.constexpr):
    """Adds up what each thread has of `load_squares`, which takes registers until `scale_of`."""
    AGAIN: gl.constexpr = again_of(SIZES.PROGRAMS, gl.num_warps())
    return gl.sum(squares.reshape([AGAIN, squares.shape[0] // AGAIN, 16]), 0)


@gluon.jit
def scale_of(squares, factor, SIZES: gl.constexpr):
    """What the norm multiplies the products of each vector by, times `factor`: f32 [1, 16, 1]."""
    scale = factor * gl.rsqrt(gl.sum(squares, 0) / SIZES.D + SIZES.EPS)
    return gl.convert_layout(scale, scale_layout(gl.num_warps()))[None, :, None]


@gluon.jit
def unembed(ring, position, given, kept, logits_ptr, times, factor, SIZES: gl.constexpr):
    """The program's logits f32 [B, V] of the normalised stream."""
    TILES: gl.constexpr = tiles_of(SIZES.V, 1, SIZES.PROGRAMS)
    TURNS: gl.constexpr = turns_of(SIZES.V, 1, SIZES.PROGRAMS)
    squares, chunk = load_stream(kept, given.unembed, SIZES)
    phases.stamp(times, 0)
    for turn in range(TURNS):
        first = first_row(turn, SIZES.V, 1, SIZES)
        if first < SIZES.V:
            scales = scales_of(given.unembed_scale, first, TILES, SIZES.V)
            products, chunk, position = take_turn(
                ring, position, given.unembed, None, kept.scaled, chunk, turn, SIZES.D, TILES, TURNS, SIZES
            )  # fmt: skip
            scale = scale_of(squares, factor, SIZES)
            for tile in gl.static_range(0, TILES, PORTION):
                store_logits(ring, products, logits_ptr, first, scale, scales, tile, portion_of(TILES, tile), SIZES)
    phases.stamp(times, 1)


@gluon.jit
def store_logits(
    ring, products, logits_ptr, first, scale, scales, tile: gl.constexpr, COUNT: gl.constexpr, SIZES: gl.constexpr
):  # fmt: skip
    """Those of COUNT tiles."""
    CAP: gl.constexpr = SIZES.LOGIT_SOFT_CAP
    SIZE: gl.constexpr = triton.next_power_of_2(COUNT)
    logit = scaled(tensor.collect(ring, products, tile, 1, COUNT, SIZE) * (scale * SIZES.LOGIT_SCALE), scales, tile)
    if CAP > 0:
        logit = CAP * (1 - 2 / (gl.exp(logit * (2 / CAP)) + 1))
    b, row, own = place_of_sums(first, tile, COUNT, SIZES.V)
    gl.store(logits_ptr + b * SIZES.V + row, logit, mask=own & (b < SIZES.B))
