"""Matrix product and all-reduce in one kernel, for the few rows of a decode step.

With few rows the product takes as long as reading `rhs`. A program multiplies a tile and sends it as words, which say
by themselves that they have arrived. Who adds the tiles up, in the order of the ranks, is either the same program, or,
where there are more tiles than run at a time, later ones: then nobody who multiplies waits.

With one shot a tile goes to every rank, and each adds up all of it. With two, a rank adds up the rows that it owns
alone, and sends the rounded sums to all: two ways over the wire instead of one, for a part of the bytes. Who adds up
applies the epilogue as well.

Who adds waits for programs of lower ids, and for its twin on every other rank, which has sent what it is waited for.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import shmem
from jaxtaxfree.kernels.blocks import epilogue as epilogues
from jaxtaxfree.kernels.blocks import matmul, tiles
from jaxtaxfree.kernels.blocks import wire as wire_types


@triton.jit
def matmul_all_reduce_few_kernel(
    lhs_ptr,  # [M, K]
    rhs_ptr,  # [K, N]; with RHS_TRANSPOSED [N, K]
    epilogue,  # what there is of bias [N] and residual [M, N]
    scales,  # of weights of 8 bits, see `matmul.multiply_narrow`
    team,
    partials,  # words [WORLD, OWNED, COLUMNS]: each rank's part of the rows that this one adds up
    sums,  # words [WORLD, OWNED, COLUMNS] with two shots: the rows that each rank has added up
    out_ptr,  # [M, N]
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    OWNED: tl.constexpr,  # rows that a rank adds up: M, or with two shots M / WORLD, rounded up
    SHOTS: tl.constexpr,
    EXACT_WIRE: tl.constexpr,  # partial sums travel in f32, not in the type of the operands
    APART: tl.constexpr,  # programs of their own add up
    LINGER: tl.constexpr,  # a word of each rank is waited for before the others are looked at
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ADD_ROWS: tl.constexpr,  # rows of a tile that are added up at once
    PRECISION: tl.constexpr,
    RHS_TRANSPOSED: tl.constexpr,
    EPILOGUE: tl.constexpr,  # the names of `epilogue`
    SCALES: tl.constexpr,  # those of `scales`
    ACTIVATION: tl.constexpr,
):
    me = shmem.start(team, VERIFY=False)  # `send_tile` has time for it
    last = epilogues.of(epilogue, EPILOGUE)
    wire: tl.constexpr = wire_types.type_of(lhs_ptr.dtype.element_ty, EXACT_WIRE)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    # Rows and columns that are sent; those past the end of the result are not stored.
    all_rows: tl.constexpr = M if SHOTS == 1 else WORLD * OWNED
    row_blocks: tl.constexpr = tl.cdiv(all_rows, BLOCK_M)
    column_blocks: tl.constexpr = tl.cdiv(N, BLOCK_N)
    columns: tl.constexpr = column_blocks * BLOCK_N
    multiplying: tl.constexpr = row_blocks * column_blocks
    parts: tl.constexpr = tl.cdiv(OWNED, ADD_ROWS)
    if tl.program_id(0) < multiplying:
        row_block, column_block = tiles.grouped(tl.program_id(0), row_blocks, column_blocks, GROUP_M=row_blocks)
        send_tile(
            me, lhs_ptr, rhs_ptr, scales, partials, wire, row_block * BLOCK_M, column_block * BLOCK_N,
            M, N, K, WORLD, OWNED, columns, SHOTS, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
            RHS_TRANSPOSED, SCALES,
        )  # fmt: skip
        first = 0
        # The last row block's program has the highest id of its columns.
        end = 0 if APART else tl.where(row_block == row_blocks - 1, parts, 0)
    else:
        shmem.verify(me)
        column_block = (tl.program_id(0) - multiplying) // parts
        first = (tl.program_id(0) - multiplying) % parts
        end = first + 1
    column = column_block * BLOCK_N
    for part in range(first, end):
        row = part * ADD_ROWS
        values = receive(me, partials, wire, row, column, WORLD, OWNED, columns, LINGER, BLOCK_N, ADD_ROWS)
        total = values[0].to(tl.float32)
        for rank in tl.static_range(1, WORLD):
            total += values[rank].to(tl.float32)
        first_row = row if SHOTS == 1 else me.rank * OWNED + row
        rows = tl.minimum(M - first_row, OWNED - row)
        total = epilogues.apply(total, None, last, first_row, rows, column, N, ADD_ROWS, BLOCK_N, ACTIVATION)
        rounded = total.to(dtype)
        if SHOTS == 1:
            store(out_ptr, rounded, row, column, M, M, N, ADD_ROWS, BLOCK_N)
        else:
            send_sums(me, sums, rounded, row, column, WORLD, OWNED, columns, ADD_ROWS, BLOCK_N)
    if SHOTS == 2:
        for part in range(first, end):
            row = part * ADD_ROWS
            values = receive(me, sums, dtype, row, column, WORLD, OWNED, columns, LINGER, BLOCK_N, ADD_ROWS)
            for rank in tl.static_range(WORLD):
                store(
                    out_ptr + rank * (OWNED * N), values[rank], row, column,
                    OWNED, M - rank * OWNED, N, ADD_ROWS, BLOCK_N,
                )  # fmt: skip
    shmem.finish(me)


@triton.jit
def send_tile(
    me, lhs_ptr, rhs_ptr, scales, partials, wire: tl.constexpr, row, column,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WORLD: tl.constexpr, OWNED: tl.constexpr, COLUMNS: tl.constexpr,
    SHOTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    RHS_TRANSPOSED: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Computes a tile of this rank's product, and sends its rows to those who add them up."""
    first = tl.minimum(row, M - 1)
    # Where rows past the end are sent as well, `multiply` must not take a block for one that is whole.
    rows_of_lhs: tl.constexpr = M if SHOTS == 1 or WORLD * OWNED == M else 1
    product, _ = matmul.multiply_gated(
        lhs_ptr + first.to(tl.int64) * K, (rhs_ptr,), tl.minimum(M - first, BLOCK_M), column, rows_of_lhs, N, K,
        BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, RHS_TRANSPOSED, scales, SCALES,
    )  # fmt: skip
    shmem.verify(me)
    words = shmem.words_of(product.to(wire))
    m = row + tl.arange(0, BLOCK_M)
    for i in tl.static_range(1, WORLD + 1):
        peer = (me.rank + i) % WORLD
        within = m if SHOTS == 1 else m - peer * OWNED
        send(me, partials, words, within, column, OWNED, COLUMNS, BLOCK_N, peer)


@triton.jit
def send_sums(
    me, sums, rounded, row, column,
    WORLD: tl.constexpr, OWNED: tl.constexpr, COLUMNS: tl.constexpr, ADD_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sends rows of the result to all ranks."""
    words = shmem.words_of(rounded)
    for i in tl.static_range(1, WORLD + 1):
        within = row + tl.arange(0, ADD_ROWS)
        send(me, sums, words, within, column, OWNED, COLUMNS, BLOCK_N, (me.rank + i) % WORLD)


@triton.jit
def send(
    me, region, words, row, column, OWNED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, peer
):  # fmt: skip
    """Sends a rank those rows of a block that it owns."""
    A_WORD: tl.constexpr = BLOCK_N // words.shape[1]  # elements
    m, n = row[:, None], tl.arange(0, BLOCK_N // A_WORD)[None, :]
    place = me.rank.to(tl.int64) * (OWNED * COLUMNS // A_WORD) + (m * (COLUMNS // A_WORD) + column // A_WORD + n)
    mask = (m >= 0) & (m < OWNED) & (n >= 0)
    shmem.send_words(me, shmem.messages(me, region) + place, words, peer, mask)


@triton.jit
def receive(
    me, region, dtype: tl.constexpr, row, column,
    WORLD: tl.constexpr, OWNED: tl.constexpr, COLUMNS: tl.constexpr, LINGER: tl.constexpr,
    BLOCK_N: tl.constexpr, ADD_ROWS: tl.constexpr,
):  # fmt: skip
    """What all ranks send to some rows: for each rank a block [ADD_ROWS, BLOCK_N], NaN where it did not come."""
    A_WORD: tl.constexpr = 32 // dtype.primitive_bitwidth  # elements
    VECTORS: tl.constexpr = BLOCK_N // (4 * A_WORD)  # of a row
    vector = tl.arange(0, ADD_ROWS * VECTORS)
    # Rows past the end are copies of the last one.
    within = tl.minimum(row + vector // VECTORS, OWNED - 1) * (COLUMNS // A_WORD) + 4 * (vector % VECTORS)
    source = shmem.messages(me, region) + column // A_WORD
    patient = me.ready
    if LINGER:
        patient = shmem.linger(me, source + row * (COLUMNS // A_WORD), WORLD, OWNED * COLUMNS // A_WORD, CLEARED=True)
    words = shmem.receive_vectors(me, source + within, OWNED * COLUMNS // A_WORD, WORLD, OWN=True, patient=patient)
    blocks = ()
    for rank in tl.static_range(WORLD):
        blocks = blocks + (shmem.elements_of(words[rank].reshape(ADD_ROWS, BLOCK_N // A_WORD), dtype),)
    return blocks


@triton.jit
def store(
    out_ptr, block, row, column, OWNED: tl.constexpr, rows, N: tl.constexpr, ADD_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Stores those rows of a block that its owner has and that the result has."""
    m = (row + tl.arange(0, ADD_ROWS))[:, None]
    n = column + tl.arange(0, BLOCK_N)[None, :]
    tl.store(out_ptr + m.to(tl.int64) * N + n, block, mask=(m < OWNED) & (m < rows) & (n < N))
