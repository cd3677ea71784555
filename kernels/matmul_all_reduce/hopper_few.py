"""Matrix product and reduce-scatter or all-reduce in one kernel, for the few rows of a decode step, on Hopper GPUs.

The product is that of `blocks.hopper_few`: a program computes a tile, or some rows of it if it shares the tile. It
sends it as words, which say by themselves that they have arrived, to those who add it up; waits for what is sent for
its own rows; adds that up in the order of the ranks, and applies the epilogue.

With `SCATTERED` each rank adds up the rows that it owns alone: that is a reduce-scatter, or the first shot of an
all-reduce, whose second one sends the rounded sums to all. Without it all rows go to all ranks: an all-reduce in one
shot.

Who multiplies the same columns, on whichever rank and of whichever block of rows, adds up all rows of them that the
rank owns, 8 rows in turns. They wait for each other after they have sent what the others wait for, so none of them
needs more than its own place to run, and theirs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.blocks import epilogue as epilogues
from jaxtaxfree.kernels.blocks import hopper_few
from jaxtaxfree.kernels.blocks import wire as wire_types


@gluon.jit
def matmul_reduce_hopper_few_kernel(
    lhs_desc,  # [all rows, K], in boxes [rows, BLOCK_K], see `tiles.box_of`
    rhs_desc,  # [K, N], in blocks [BLOCK_K, BLOCK_N]; with RHS_TRANSPOSED [N, K], in blocks [BLOCK_N, BLOCK_K]
    epilogue,  # what there is of bias [N] and residual [M, N]
    scales,  # what there is of f32 scales, see `hopper_few.scale` and `hopper_few.blocks_of`
    team,
    partials,  # words [WORLD, OWNED, COLUMNS]: each rank's part of the rows that this one adds up
    sums,  # words [WORLD, OWNED, COLUMNS]: the rows that each rank has added up; or None if nobody else needs them
    shares,  # scratch f32 [shared tiles, SPLITS, BLOCK_N * BLOCK_M]: sums of a part of K; or None
    left,  # signals [shared tiles]: one from each program that has left some; or None
    out_ptr,  # [M, N]
    M: gl.constexpr,  # rows of the result
    N: gl.constexpr,
    K: gl.constexpr,
    WORLD: gl.constexpr,
    OWNED: gl.constexpr,  # rows that a rank adds up
    SCATTERED: gl.constexpr,  # each rank adds up rows of its own, all together WORLD * OWNED
    EXACT_WIRE: gl.constexpr,  # partial sums travel in f32, not in the type of the operands
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,  # 16 for each warp
    BLOCK_K: gl.constexpr,
    RHS_TRANSPOSED: gl.constexpr,
    STAGES: gl.constexpr,  # steps of K in flight
    SPLITS: gl.constexpr,  # programs that share a tile,
    WHOLE: gl.constexpr,  # but for so many tiles, the first ones
    ADDERS: gl.constexpr,  # so many of these add it up
    ADD_ROWS: gl.constexpr,  # rows that are added up at once; at least 8 if several programs take turns
    LINGER: gl.constexpr,  # words of each rank are waited for before all the others are looked at
    EPILOGUE: gl.constexpr,  # the names of `epilogue`
    SCALES: gl.constexpr,  # those of `scales`
    ACTIVATION: gl.constexpr,  # see `epilogue.activate`
):
    me = shmem.start(team, VERIFY=False)
    last = epilogues.of(epilogue, EPILOGUE)
    number, split, first, end = hopper_few.share_of(gl.program_id(0), K, BLOCK_K, SPLITS, WHOLE)
    ROWS: gl.constexpr = WORLD * OWNED if SCATTERED else OWNED
    place = hopper_few.place_of(number, ROWS, BLOCK_M, BLOCK_N)
    ring = hopper_few.allocate((rhs_desc,), lhs_desc.dtype, BLOCK_M, STAGES, RHS_TRANSPOSED)
    fetched = hopper_few.begin(ring, (rhs_desc,), place, first, gl.cdiv(K, BLOCK_K) // SPLITS)
    shmem.verify(me)
    blocks = hopper_few.blocks_of(scales, SCALES, place, first, ROWS, N)
    wire: gl.constexpr = wire_types.type_of(lhs_desc.dtype, EXACT_WIRE)
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    me, ring, last, scales, blocks, partials, sums, shares, left, out_ptr, place, split, end - first,
                    M, N, WORLD, OWNED, SCATTERED, wire, gl.cdiv(ROWS, BLOCK_M), BLOCK_M, BLOCK_N, SPLITS, WHOLE,
                    ADDERS, ADD_ROWS, LINGER, ACTIVATION, SCALES,
                ),
            ),
            (load, (ring, lhs_desc, rhs_desc, place, ROWS, first, end, first + fetched)),
        ],
        [1],
        [64],
    )  # fmt: skip
    shmem.finish(me)


@gluon.jit
def load(ring, lhs_desc, rhs_desc, place, ROWS: gl.constexpr, first, end, fetched):
    """Fetches what is multiplied, which nobody has to wait for."""
    hopper_few.load(ring, lhs_desc, (rhs_desc,), place, ROWS, (0, 1), first, end, fetched)


@gluon.jit
def multiply(
    me, ring, last, scales, blocks, partials, sums, shares, left, out_ptr, place, split, steps,
    M: gl.constexpr, N: gl.constexpr, WORLD: gl.constexpr, OWNED: gl.constexpr, SCATTERED: gl.constexpr,
    WIRE: gl.constexpr, BLOCKS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr,
    WHOLE: gl.constexpr, ADDERS: gl.constexpr, ADD_ROWS: gl.constexpr, LINGER: gl.constexpr, ACTIVATION: gl.constexpr,
    SCALES: gl.constexpr,
):  # fmt: skip
    """Computes this rank's tile, or a part of it, and sees to it that it is added up."""
    PITCH: gl.constexpr = gl.cdiv(N, BLOCK_N) * BLOCK_N
    of_columns = hopper_few.scales_of_columns(ring, scales, SCALES, place, N)
    tile = hopper_few.multiply(ring, steps, blocks)
    tile = hopper_few.scale(tile, of_columns, scales, SCALES, place, WORLD * OWNED if SCATTERED else OWNED)
    parts = hopper_few.pieces(tile, ADDERS)
    hopper_few.leave(me, parts, shares, left, place.number, split, BLOCK_M, SPLITS, WHOLE, ADDERS)
    adder = hopper_few.adder_of(split, SPLITS, ADDERS)
    if adder >= 0:
        came = hopper_few.wait(me, left, place.number, SPLITS, WHOLE, ADDERS)
        for i in gl.static_range(len(parts) // ADDERS):
            piece = hopper_few.take(me, parts, shares, place.number, split, i, BLOCK_M, SPLITS, WHOLE, ADDERS)
            total = piece.sums
            if SPLITS > 1:
                total = gl.where(came, total, float("nan"))
            rows = hopper_few.Piece(total.to(WIRE), piece.first, piece.apart)
            send_piece(me, rows, partials, place, WORLD, OWNED, PITCH, SCATTERED)
        adder += place.block * ADDERS
        reduce(
            me, last, partials, sums, out_ptr, place.column, adder, M, N, WORLD, OWNED, PITCH,
            BLOCK_N, WIRE, BLOCKS * ADDERS, ADD_ROWS, LINGER, ACTIVATION,
        )  # fmt: skip


@gluon.jit
def reduce(
    me, last, partials, sums, out_ptr, column, adder, M: gl.constexpr, N: gl.constexpr,
    WORLD: gl.constexpr, OWNED: gl.constexpr, PITCH: gl.constexpr, BLOCK_N: gl.constexpr, WIRE: gl.constexpr,
    ADDERS: gl.constexpr, ADD_ROWS: gl.constexpr, LINGER: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Adds up what all ranks send of the rows that this one owns, and with two shots sends the sums.

    Args:
      adder: which one a program is of the ADDERS of these columns. Each adds up 8 rows in turns, whoever sends them.
    """
    OUT: gl.constexpr = out_ptr.dtype.element_ty
    # The row of the result that this rank's first one is.
    first = 0 if sums is None else me.rank * OWNED
    for row in range(8 * adder, OWNED, ADD_ROWS * ADDERS):
        m, n = elements(row, column, WIRE, BLOCK_N, ADD_ROWS, ADDERS)
        inside = (m < OWNED) & (first + m < M) & (n < N)
        bias, residual = 0.0, 0.0
        # On their way while the words are.
        if last.bias is not None:
            bias = gl.load(last.bias + n, mask=inside, other=0.0).to(gl.float32)
        if last.residual is not None:
            residual = gl.load(last.residual + (first + m) * N + n, mask=inside, other=0.0).to(gl.float32)
        parts, late = receive(me, partials, WIRE, row, column, WORLD, OWNED, PITCH, BLOCK_N, ADDERS, ADD_ROWS, LINGER)
        total = parts[0].to(gl.float32)
        for rank in gl.static_range(1, WORLD):
            total += parts[rank].to(gl.float32)
        if last.bias is not None:
            total += bias
        total = epilogues.activate_gated(total, None, ACTIVATION)
        if last.residual is not None:
            total += residual
        if sums is None:
            gl.store(out_ptr + (first + m) * N + n, total.to(OUT), mask=inside)
        else:
            send_sums(me, sums, total.to(OUT), row, column, WORLD, OWNED, PITCH, BLOCK_N, ADDERS, ADD_ROWS)
        clear(me, partials, WIRE, late, row, column, WORLD, OWNED, PITCH, BLOCK_N, ADDERS, ADD_ROWS)
    if sums is not None:
        for row in range(8 * adder, OWNED, ADD_ROWS * ADDERS):
            m, n = elements(row, column, OUT, BLOCK_N, ADD_ROWS, ADDERS)
            blocks, late = receive(me, sums, OUT, row, column, WORLD, OWNED, PITCH, BLOCK_N, ADDERS, ADD_ROWS, LINGER)
            for rank in gl.static_range(WORLD):
                inside = (m < OWNED) & (rank * OWNED + m < M) & (n < N)
                gl.store(out_ptr + (rank * OWNED + m) * N + n, blocks[rank], mask=inside)
            clear(me, sums, OUT, late, row, column, WORLD, OWNED, PITCH, BLOCK_N, ADDERS, ADD_ROWS)


@gluon.jit
def send_piece(
    me, piece, partials, place, WORLD: gl.constexpr, OWNED: gl.constexpr, PITCH: gl.constexpr,
    SCATTERED: gl.constexpr,
):  # fmt: skip
    """Sends a piece of the tile at this place to those who add it up."""
    BLOCK_N: gl.constexpr = piece.sums.shape[0]
    ROWS: gl.constexpr = piece.sums.shape[1]
    VECTOR: gl.constexpr = 128 // piece.sums.dtype.primitive_bitwidth  # elements of 16 bytes
    A_WORD: gl.constexpr = VECTOR // 4
    ACROSS: gl.constexpr = min(BLOCK_N // VECTOR, 32)
    WARPS: gl.constexpr = gl.num_warps()
    # Rows that follow each other are those of a thread, so that at a time rows of all owners are sent.
    DOWN: gl.constexpr = max(ROWS // (WARPS * (32 // ACROSS)), 1)
    SENT: gl.constexpr = gl.BlockedLayout([DOWN, VECTOR], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    WORDS: gl.constexpr = gl.BlockedLayout([DOWN, 4], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    words = shmem.words_of(gl.convert_layout(gl.permute(piece.sums, (1, 0)), SENT))
    words = gl.convert_layout(words, WORDS)
    m = place.row + hopper_few.rows_of(piece, gl.SliceLayout(1, WORDS))[:, None]
    n = gl.arange(0, BLOCK_N // A_WORD, gl.SliceLayout(0, WORDS))[None, :]
    dest = shmem.messages(me, partials) + (me.rank * (OWNED * PITCH // A_WORD) + place.column // A_WORD)
    if SCATTERED:
        owner = m // OWNED
        offset = (m - owner * OWNED) * (PITCH // A_WORD) + n
        shmem.send_words(me, dest + offset, words, owner, (m < WORLD * OWNED) & (n >= 0))
    else:
        for i in gl.static_range(1, WORLD + 1):
            offset = m * (PITCH // A_WORD) + n
            shmem.send_words(me, dest + offset, words, (me.rank + i) % WORLD, (m < OWNED) & (n >= 0))


@gluon.jit
def send_sums(
    me, sums, rounded, row, column, WORLD: gl.constexpr, OWNED: gl.constexpr, PITCH: gl.constexpr,
    BLOCK_N: gl.constexpr, ADDERS: gl.constexpr, ADD_ROWS: gl.constexpr,
):  # fmt: skip
    """Sends rows of the result to all ranks."""
    VECTOR: gl.constexpr = 128 // rounded.dtype.primitive_bitwidth
    A_WORD: gl.constexpr = VECTOR // 4
    ROW: gl.constexpr = BLOCK_N // A_WORD
    words = shmem.words_of(gl.convert_layout(rounded, shmem.vectors_of(VECTOR, gl.num_warps())))
    words = gl.convert_layout(words, shmem.vectors_of(4, gl.num_warps()))
    word = gl.arange(0, words.shape[0], shmem.vectors_of(4, gl.num_warps()))
    m = row + shmem.spread(word // ROW, ADDERS)
    inside = (word < ADD_ROWS * ROW) & (m < OWNED)
    dest = shmem.messages(me, sums) + (me.rank * (OWNED * PITCH // A_WORD) + column // A_WORD)
    for i in gl.static_range(1, WORLD + 1):
        shmem.send_words(me, dest + (m * (PITCH // A_WORD) + word % ROW), words, (me.rank + i) % WORLD, inside)


@gluon.jit
def receive(
    me, region, dtype: gl.constexpr, row, column, WORLD: gl.constexpr, OWNED: gl.constexpr, PITCH: gl.constexpr,
    BLOCK_N: gl.constexpr, ADDERS: gl.constexpr, ADD_ROWS: gl.constexpr, LINGER: gl.constexpr,
):  # fmt: skip
    """What all ranks send to some rows.

    Returns: (for each rank a block of `elements`, NaN where it did not come; what `clear` takes as `late`).
    """
    A_WORD: gl.constexpr = 32 // dtype.primitive_bitwidth
    source = shmem.messages(me, region) + column // A_WORD
    words, late = shmem.receive_vectors(
        me, source, row, OWNED, PITCH // A_WORD, OWNED * PITCH // A_WORD, ADD_ROWS, BLOCK_N // A_WORD, ADDERS, WORLD,
        LINGER,
    )  # fmt: skip
    blocks = ()
    for rank in gl.static_range(WORLD):
        block = shmem.elements_of(words[rank], dtype)
        blocks = blocks + (gl.convert_layout(block, shmem.vectors_of(4 * A_WORD, gl.num_warps())),)
    return blocks, late


@gluon.jit
def clear(
    me, region, dtype: gl.constexpr, late, row, column, WORLD: gl.constexpr, OWNED: gl.constexpr,
    PITCH: gl.constexpr, BLOCK_N: gl.constexpr, ADDERS: gl.constexpr, ADD_ROWS: gl.constexpr,
):  # fmt: skip
    """Makes room where `receive`, which took the other arguments, has found what it returned."""
    A_WORD: gl.constexpr = 32 // dtype.primitive_bitwidth
    source = shmem.messages(me, region) + column // A_WORD
    shmem.clear_vectors(
        me, source, row, OWNED, late, PITCH // A_WORD, OWNED * PITCH // A_WORD, ADD_ROWS, BLOCK_N // A_WORD, ADDERS,
        WORLD,
    )  # fmt: skip


@gluon.jit
def elements(row, column, dtype: gl.constexpr, BLOCK_N: gl.constexpr, ADD_ROWS: gl.constexpr, ADDERS: gl.constexpr):
    """Row and column of each element of a block that `receive` returns."""
    VECTOR: gl.constexpr = 128 // dtype.primitive_bitwidth
    WARPS: gl.constexpr = gl.num_warps()
    SIZE: gl.constexpr = max(ADD_ROWS * BLOCK_N, 32 * WARPS * VECTOR)
    element = gl.arange(0, SIZE, shmem.vectors_of(VECTOR, WARPS))
    # Elements behind the block have rows that nobody owns.
    below = gl.where(element < ADD_ROWS * BLOCK_N, shmem.spread(element // BLOCK_N, ADDERS), 1 << 20)
    return row + below, column + element % BLOCK_N
