"""Matrix product and all-reduce in one kernel, for the few rows of a decode step.

With few rows the product takes as long as reading `rhs`. A program multiplies a tile and sends it as messages, which
say by themselves that they have arrived. Who adds the tiles up, in the order of the ranks, is either the same program,
or, where there are more tiles than run at a time, later ones: then nobody who multiplies waits.

With one shot a tile goes to every rank, and each adds up all of it. With two, a rank adds up the rows that it owns
alone, and sends the rounded sums to all: two ways over the wire instead of one, for a part of the bytes. Who adds up
applies the epilogue as well.

Partial sums, and sums, may go through scratch memory instead, in a type of fewer bytes and at the price of a signal.

Who adds waits for programs of lower ids, and for its twin on every other rank, which has sent what it is waited for.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import epilogue, matmul, shmem, tiles


@triton.jit
def matmul_all_reduce_small_kernel(
    lhs_ptr,  # [M, K]
    rhs_ptr,  # [K, N]
    bias_ptr,  # [N], or None
    residual_ptr,  # [M, N], or None
    team,
    partials,  # [WORLD, OWNED, COLUMNS]: each rank's part of the rows that this one adds up
    sums,  # [WORLD, OWNED, COLUMNS] with two shots: the rows that each rank has added up
    arrived,  # signals [multiplying programs, WORLD] unless EXACT_WIRE
    added,  # signals [parts of all tiles, WORLD] if SUMS_AS_SCRATCH
    out_ptr,  # [M, N]
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    OWNED: tl.constexpr,  # rows that a rank adds up: M, or with two shots M / WORLD, rounded up
    SHOTS: tl.constexpr,
    EXACT_WIRE: tl.constexpr,  # partial sums are messages, not scratch in the type of the operands
    SUMS_AS_SCRATCH: tl.constexpr,  # in the type of the result, not messages
    APART: tl.constexpr,  # programs of their own add up
    LINGER: tl.constexpr,  # a word of each rank is waited for before the others are looked at
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ADD_ROWS: tl.constexpr,  # rows of a tile that are added up at once
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    me = shmem.start(team, VERIFY=False)  # `send_tile` has time for it
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
            me, lhs_ptr, rhs_ptr, partials, arrived + tl.program_id(0) * WORLD,
            row_block * BLOCK_M, column_block * BLOCK_N,
            M, N, K, WORLD, OWNED, columns, SHOTS, EXACT_WIRE, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
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
    arrived += column_block * (row_blocks * WORLD)
    added += column_block * (parts * WORLD)
    for part in range(first, end):
        row = part * ADD_ROWS
        values, mask = receive(
            me, partials, lhs_ptr.dtype.element_ty, arrived, row, column,
            WORLD, OWNED, columns, not EXACT_WIRE, row_blocks, LINGER, BLOCK_N, ADD_ROWS,
        )  # fmt: skip
        total = tl.sum(tl.where(mask, values, 0.0), axis=0)
        first_row = row if SHOTS == 1 else me.rank * OWNED + row
        rows = tl.minimum(M - first_row, OWNED - row)
        total = epilogue.apply(
            total, None, bias_ptr, residual_ptr, first_row, rows, column, N, ADD_ROWS, BLOCK_N, ACTIVATION
        )
        give_out(
            me, total, sums, added + part * WORLD, out_ptr, row, column,
            N, WORLD, OWNED, columns, SHOTS, SUMS_AS_SCRATCH, BLOCK_N, ADD_ROWS,
        )  # fmt: skip
    if SHOTS == 2:
        for part in range(first, end):
            collect(
                me, sums, added + part * WORLD, out_ptr, part * ADD_ROWS, column,
                M, N, WORLD, OWNED, columns, SUMS_AS_SCRATCH, LINGER, BLOCK_N, ADD_ROWS,
            )  # fmt: skip
    shmem.finish(me)


@triton.jit
def send_tile(
    me, lhs_ptr, rhs_ptr, partials, arrived, row, column,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WORLD: tl.constexpr, OWNED: tl.constexpr, COLUMNS: tl.constexpr,
    SHOTS: tl.constexpr, EXACT_WIRE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes a tile of this rank's product, and sends its rows to those who add them up."""
    first = tl.minimum(row, M - 1)
    # Where rows past the end are sent as well, `multiply` must not take a block for one that is whole.
    rows_of_lhs: tl.constexpr = M if SHOTS == 1 or WORLD * OWNED == M else 1
    product = matmul.multiply(
        lhs_ptr + first.to(tl.int64) * K, rhs_ptr, tl.minimum(M - first, BLOCK_M), column, rows_of_lhs, N, K,
        BLOCK_M, BLOCK_N, BLOCK_K, PRECISION,
    )  # fmt: skip
    shmem.verify(me)
    m = row + tl.arange(0, BLOCK_M)[:, None]
    n = column + tl.arange(0, BLOCK_N)[None, :]
    mine = me.rank.to(tl.int64) * (OWNED * COLUMNS)
    for i in tl.static_range(1, WORLD + 1):
        peer = (me.rank + i) % WORLD
        within = m if SHOTS == 1 else m - peer * OWNED
        mask = (within >= 0) & (within < OWNED) & (n >= 0)
        send(me, partials, mine + (within * COLUMNS + n), product, lhs_ptr.dtype.element_ty, peer, mask, not EXACT_WIRE)
    if not EXACT_WIRE:
        shmem.signal_all(me, arrived + me.rank, WORLD)


@triton.jit
def give_out(
    me, result, sums, added, out_ptr, row, column,
    N: tl.constexpr, WORLD: tl.constexpr, OWNED: tl.constexpr, COLUMNS: tl.constexpr, SHOTS: tl.constexpr,
    SUMS_AS_SCRATCH: tl.constexpr, BLOCK_N: tl.constexpr, ADD_ROWS: tl.constexpr,
):  # fmt: skip
    """Rounds rows of the result, and stores them or sends them to all ranks."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    rounded = result.to(dtype)
    m = row + tl.arange(0, ADD_ROWS)[:, None]
    n = column + tl.arange(0, BLOCK_N)[None, :]
    mask = (m < OWNED) & (n >= 0)
    if SHOTS == 1:
        tl.store(out_ptr + m.to(tl.int64) * N + n, rounded, mask=mask & (n < N))
    else:
        mine = me.rank.to(tl.int64) * (OWNED * COLUMNS)
        for i in tl.static_range(1, WORLD + 1):
            peer = (me.rank + i) % WORLD
            send(me, sums, mine + (m * COLUMNS + n), rounded, dtype, peer, mask, SUMS_AS_SCRATCH)
        if SUMS_AS_SCRATCH:
            shmem.signal_all(me, added + me.rank, WORLD)


@triton.jit
def collect(
    me, sums, added, out_ptr, row, column,
    M: tl.constexpr, N: tl.constexpr, WORLD: tl.constexpr, OWNED: tl.constexpr, COLUMNS: tl.constexpr,
    SUMS_AS_SCRATCH: tl.constexpr, LINGER: tl.constexpr, BLOCK_N: tl.constexpr, ADD_ROWS: tl.constexpr,
):  # fmt: skip
    """Stores the sums of all ranks."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    values, mask = receive(
        me, sums, dtype, added, row, column,
        WORLD, OWNED, COLUMNS, SUMS_AS_SCRATCH, 1, LINGER, BLOCK_N, ADD_ROWS,
    )  # fmt: skip
    rank = tl.arange(0, triton.next_power_of_2(WORLD))[:, None, None]
    m = rank * OWNED + (row + tl.arange(0, ADD_ROWS)[None, :, None])
    n = column + tl.arange(0, BLOCK_N)[None, None, :]
    tl.store(out_ptr + m.to(tl.int64) * N + n, values.to(dtype), mask=mask & (m < M) & (n < N))


@triton.jit
def send(me, region, place, value, dtype: tl.constexpr, peer, mask, AS_SCRATCH: tl.constexpr):
    """Sends values as messages, or stores them as `dtype`; then a signal has to follow."""
    if AS_SCRATCH:
        shmem.store(me, shmem.scratch(me, region, dtype) + place, value.to(dtype), peer, mask)
    else:
        shmem.send(me, shmem.messages(me, region) + place, value.to(tl.float32), peer, mask)


@triton.jit
def receive(
    me, region, dtype: tl.constexpr, signals, row, column,
    WORLD: tl.constexpr, OWNED: tl.constexpr, COLUMNS: tl.constexpr,
    AS_SCRATCH: tl.constexpr, SIGNALS: tl.constexpr, LINGER: tl.constexpr,
    BLOCK_N: tl.constexpr, ADD_ROWS: tl.constexpr,
):  # fmt: skip
    """A part [WORLD, ADD_ROWS, BLOCK_N] of what all ranks send to [WORLD, OWNED, COLUMNS].

    Returns: (f32 values, or NaN if they did not come; which of them there are).
    """
    rank = tl.arange(0, triton.next_power_of_2(WORLD))[:, None, None]
    m = row + tl.arange(0, ADD_ROWS)[None, :, None]
    n = column + tl.arange(0, BLOCK_N)[None, None, :]
    place = rank.to(tl.int64) * (OWNED * COLUMNS) + (m * COLUMNS + n)
    mask = (rank < WORLD) & (m < OWNED) & (n >= 0)
    came = me.ready
    if AS_SCRATCH:
        for i in tl.static_range(SIGNALS):
            came &= shmem.wait_all(me, signals + i * WORLD, me.epoch)
        values = tl.load(shmem.scratch(me, region, dtype) + place, mask=mask, other=0.0).to(tl.float32)
    else:
        box = shmem.messages(me, region)
        if LINGER:
            came = shmem.linger(me, box + row * COLUMNS + column, WORLD, OWNED * COLUMNS)
        values, came = shmem.receive(me, box + place, rank, mask, came)
    return tl.where(came, values, float("nan")), mask
