"""All-gather and matrix product in one kernel, for shards of at least a tile of rows.

The first `PUSHERS` programs send this rank's rows to its peers; each later program computes one tile of the product.
A tile needs the rows of one rank only. Tiles of this rank's own rows come first and wait for nothing; the others
follow in the order rank + 1, rank + 2, ..., and each waits for its block of rows alone, so the rows of one rank
travel while those of another are multiplied.

Where ranks have columns of lhs in place of rows, a tile needs those of all ranks: its own first, then as above.

Pushers have the lowest program ids, so a GPU starts them first and no tile waits for a program that has no place to
run.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import shmem
from jaxtaxfree.kernels.blocks import epilogue as epilogues
from jaxtaxfree.kernels.blocks import matmul, tiles


@triton.jit
def all_gather_matmul_kernel(
    lhs_ptr,  # [M, K], this rank's rows, or its columns
    weights,  # rhs [K, N], or [N, K]; and gate [K, N], if there is one; WORLD * K if ranks have columns
    epilogue,  # what there is of bias [N] and residual, which is as the result
    team,
    gathered,  # scratch [WORLD, M, K]; this rank's own rows stay in lhs
    arrived,  # signals [WORLD, row blocks]: UNITS from each rank for each block of its rows
    turn,  # signals [PUSHERS]: one at the end of each step of the push
    out_ptr,  # [WORLD * M, N]; [M, N] if ranks have columns
    gathered_ptr,  # [WORLD * M, K], or [M, WORLD * K]: where what is gathered goes as well, or None
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PUSHERS: tl.constexpr,
    UNITS: tl.constexpr,  # parts in which a block of rows is pushed
    CHUNK: tl.constexpr,  # elements that a pusher moves at a time
    PRECISION: tl.constexpr,
    RHS_TRANSPOSED: tl.constexpr,  # not with a gate
    EPILOGUE: tl.constexpr,  # the names of `epilogue`
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,  # ranks have columns of lhs, not rows
):
    me = shmem.start(team)
    last = epilogues.of(epilogue, EPILOGUE)
    inbox = shmem.scratch(me, gathered, lhs_ptr.dtype.element_ty)
    if tl.program_id(0) < PUSHERS:
        push(me, lhs_ptr, inbox, arrived, turn, M, K, WORLD, BLOCK_M, PUSHERS, UNITS, CHUNK)
    else:
        row_blocks: tl.constexpr = tl.cdiv(M, BLOCK_M)
        column_blocks: tl.constexpr = tl.cdiv(N, BLOCK_N)
        tile = tl.program_id(0) - PUSHERS
        step = tile // (row_blocks * column_blocks)
        row_block, column_block = tiles.grouped(tile % (row_blocks * column_blocks), row_blocks, column_blocks, GROUP_M)
        rows = tl.minimum(M - row_block * BLOCK_M, BLOCK_M)
        column = column_block * BLOCK_N
        row = row_block * BLOCK_M
        if COLUMNS:
            WIDTH: tl.constexpr = BLOCK_N * len(weights)
            STRIDE: tl.constexpr = WORLD * K if RHS_TRANSPOSED else N
            ready = me.ready
            total = tl.zeros((BLOCK_M, WIDTH), dtype=tl.float32)
            for i in range(WORLD):
                source = (me.rank + i) % WORLD
                lhs, came = find(me, lhs_ptr, inbox, arrived, i, source, row_block, M, K, BLOCK_M, UNITS)
                ready &= came
                if gathered_ptr is not None:
                    dest = gathered_ptr + row.to(tl.int64) * (WORLD * K) + source * K
                    copy(dest, lhs, came, rows, column_block, WORLD * K, K, BLOCK_M, column_blocks, CHUNK)
                above = source.to(tl.int64) * (K if RHS_TRANSPOSED else K * N)
                total = matmul.multiply(
                    lhs, weights[0] + above, rows, column, M, N, K, BLOCK_M, WIDTH, BLOCK_K, PRECISION, RHS_TRANSPOSED,
                    None if len(weights) == 1 else weights[1] + above, STRIDE=STRIDE, accumulator=total,
                )  # fmt: skip
            product, gate = matmul.split_gated(total, len(weights) > 1, BLOCK_M, WIDTH)
        else:
            source = (me.rank + step) % WORLD
            row += source * M
            lhs, ready = find(me, lhs_ptr, inbox, arrived, step, source, row_block, M, K, BLOCK_M, UNITS)
            if gathered_ptr is not None:
                dest = gathered_ptr + row.to(tl.int64) * K
                copy(dest, lhs, ready, rows, column_block, K, K, BLOCK_M, column_blocks, CHUNK)
            product, gate = matmul.multiply_gated(
                lhs, weights, rows, column, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, RHS_TRANSPOSED
            )
        product = tl.where(ready, product, float("nan"))
        out = out_ptr + row.to(tl.int64) * N
        epilogues.store_tile(out, product, gate, last, row, rows, column, N, BLOCK_M, BLOCK_N, ACTIVATION)
    shmem.finish(me)


@triton.jit
def find(
    me, lhs_ptr, inbox, arrived, step, source, row_block,
    M: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Where a block of rows of a rank lies here, and whether it is there: waits for it, if it is another rank's.

    Args:
      step: 0 for this rank itself.
    """
    ready = me.ready
    rows_of = lhs_ptr.to(tl.int64)
    if step > 0:
        ready = shmem.wait(me, arrived + source * tl.cdiv(M, BLOCK_M) + row_block, me.epoch * UNITS, source)
        rows_of = (inbox + source.to(tl.int64) * M * K).to(tl.int64)
    # One product for both cases: with two, each would take shared memory for a pipeline of its own.
    return tl.multiple_of(rows_of.to(lhs_ptr.dtype), 16) + (row_block * BLOCK_M).to(tl.int64) * K, ready


@triton.jit
def copy(
    dest, lhs, ready, rows, column_block,
    STRIDE: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, COLUMN_BLOCKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Copies a part of a block of rows, of which each of its tiles copies another one; NaN if they are not there.

    Args:
      STRIDE: from one row of `dest` to the next one.
    """
    size = rows * K
    part: tl.constexpr = tl.cdiv(tl.cdiv(BLOCK_M * K, COLUMN_BLOCKS), CHUNK) * CHUNK
    for at in range(column_block * part, tl.minimum((column_block + 1) * part, size), CHUNK):
        element = at + tl.arange(0, CHUNK)
        value = tl.load(lhs + element, mask=element < size)
        place = element if STRIDE == K else element // K * STRIDE + element % K
        tl.store(dest + place, tl.where(ready, value, float("nan")), mask=element < size)


@triton.jit
def push(
    me,
    lhs_ptr,
    inbox,
    arrived,
    turn,
    M: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PUSHERS: tl.constexpr,
    UNITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sends this rank's rows to every peer, a block at a time; first to the peer that needs them first.

    A block sends UNITS signals to arrived[rank, row block].
    """
    pusher = tl.program_id(0)
    row_blocks: tl.constexpr = tl.cdiv(M, BLOCK_M)
    unit_size: tl.constexpr = tl.cdiv(tl.cdiv(BLOCK_M * K, UNITS), CHUNK) * CHUNK
    for step in range(1, WORLD):
        peer = (me.rank + WORLD - step) % WORLD
        if step > 1:
            # In step with the peers, each link carries one stream at a time; out of step it reaches little over half
            # its speed.
            count = (me.epoch - 1) * (WORLD - 2) + step - 1
            shmem.wait(me, turn + pusher, count, (me.rank + step - 1) % WORLD)
        for unit in range(pusher, row_blocks * UNITS, PUSHERS):
            row_block = unit // UNITS
            first = (row_block * BLOCK_M).to(tl.int64) * K
            size = tl.minimum(M - row_block * BLOCK_M, BLOCK_M) * K
            if M * K % 16 == 0:
                size = tl.multiple_of(size, 16)
            begin = unit % UNITS * unit_size
            source = lhs_ptr + first
            dest = inbox + (me.rank.to(tl.int64) * M * K + first)
            for at in range(begin, tl.minimum(begin + unit_size, size), CHUNK):
                element = at + tl.arange(0, CHUNK)
                shmem.put(me, dest + element, source + element, peer, element < size)
            shmem.signal(me, arrived + me.rank * row_blocks + row_block, peer)
        if step < WORLD - 1:  # after the last step nobody waits
            shmem.signal(me, turn + pusher, peer)
