"""All-gather and matrix product in one kernel, for the few rows of a decode step.

With few rows the product takes as long as reading `rhs`, so `rhs` must be read once: every tile has the rows of all
ranks. The first `PUSHERS` programs write this rank's rows into everybody's scratch, its own included; each later
program waits for all ranks and computes one tile.

Pushers have the lowest program ids, so a GPU starts them first and no tile waits for a program that has no place to
run.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import shmem
from jaxtaxfree.kernels.blocks import epilogue as epilogues
from jaxtaxfree.kernels.blocks import matmul, several, tiles


@triton.jit
def all_gather_matmul_few_kernel(
    lhs_ptr,  # [M, K], this rank's rows
    weights,  # rhs [K, N], or [N, K]; and gate [K, N], if there is one; or several rhs
    epilogue,  # what there is of bias [N] and residual [WORLD * M, N]; or of a bias for each rhs
    scales,  # of weights of 8 bits, see `matmul.multiply_narrow`; none of several rhs
    team,
    gathered,  # scratch [WORLD, M, K]
    arrived,  # signals [WORLD]: PUSHERS from each rank
    out_ptr,  # [WORLD * M, N]
    out1_ptr,  # the results of three more rhs, or None
    out2_ptr,
    out3_ptr,
    gathered_ptr,  # [WORLD * M, K]: where the gathered rows go as well, or None
    M: tl.constexpr,
    N: tl.constexpr,  # of several rhs a tuple, and so is ACTIVATION: see `blocks.several`
    K: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PUSHERS: tl.constexpr,
    CHUNK: tl.constexpr,  # elements that a pusher moves at a time
    PRECISION: tl.constexpr,
    RHS_TRANSPOSED: tl.constexpr,  # not with a gate
    EPILOGUE: tl.constexpr,  # the names of `epilogue`
    SCALES: tl.constexpr,  # those of `scales`
    ACTIVATION: tl.constexpr,
):
    me = shmem.start(team)
    inbox = shmem.scratch(me, gathered, lhs_ptr.dtype.element_ty)
    if tl.program_id(0) < PUSHERS:
        push(me, lhs_ptr, inbox, arrived, M * K, WORLD, PUSHERS, CHUNK)
    else:
        all_rows: tl.constexpr = WORLD * M
        row_blocks: tl.constexpr = tl.cdiv(all_rows, BLOCK_M)
        count: tl.constexpr = several.count(N)
        column_blocks: tl.constexpr = several.blocks_before(N, BLOCK_N, count)
        tile = tl.program_id(0) - PUSHERS
        row_block, column_block = tiles.grouped(tile, row_blocks, column_blocks, GROUP_M=64)
        ready = shmem.wait_all(me, arrived, me.epoch * PUSHERS)
        outs = (out_ptr, out1_ptr, out2_ptr, out3_ptr)
        rhs, column_block = several.block_of(column_block, N, BLOCK_N)
        for i in tl.static_range(count):
            if several.is_number(rhs, i):
                multiply(
                    inbox, weights, epilogue, scales, outs, ready, row_block, column_block, all_rows, N, K,
                    BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, RHS_TRANSPOSED, EPILOGUE, SCALES, ACTIVATION, i,
                )  # fmt: skip
        if gathered_ptr is not None:
            for at in range(tile * CHUNK, all_rows * K, (tl.num_programs(0) - PUSHERS) * CHUNK):
                element = at + tl.arange(0, CHUNK)
                inside = element < all_rows * K
                value = tl.load(inbox + element, mask=inside)
                tl.store(gathered_ptr + element, tl.where(ready, value, float("nan")), mask=inside)
    shmem.finish(me)


@triton.jit
def multiply(
    inbox, weights, epilogue, scales, outs, ready, row_block, column_block,
    ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, RHS_TRANSPOSED: tl.constexpr, EPILOGUE: tl.constexpr,
    SCALES: tl.constexpr, ACTIVATION: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Computes a tile, of columns of this rhs, and stores it; NaN if some rows have not come."""
    WIDTH: tl.constexpr = several.of(N, NUMBER)
    last = epilogues.of(epilogue, EPILOGUE, N, NUMBER)
    row = row_block * BLOCK_M
    rows = tl.minimum(ROWS - row, BLOCK_M)
    column = column_block * BLOCK_N
    lhs = inbox + row.to(tl.int64) * K
    product, gate = matmul.multiply_gated(
        lhs, several.weights_of(weights, N, NUMBER), rows, column, ROWS, WIDTH, K,
        BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, RHS_TRANSPOSED, scales, SCALES,
    )  # fmt: skip
    product = tl.where(ready, product, float("nan"))
    out = outs[NUMBER] + row.to(tl.int64) * WIDTH
    activation: tl.constexpr = several.of(ACTIVATION, NUMBER)
    epilogues.store_tile(out, product, gate, last, row, rows, column, WIDTH, BLOCK_M, BLOCK_N, activation)


@triton.jit
def push(
    me, lhs_ptr, inbox, arrived, size: tl.constexpr, WORLD: tl.constexpr, PUSHERS: tl.constexpr, CHUNK: tl.constexpr
):
    """Writes this rank's rows into the scratch of every rank: one load for all of them, and one release."""
    mine = inbox + me.rank.to(tl.int64) * size
    for at in range(tl.program_id(0) * CHUNK, size, PUSHERS * CHUNK):
        element = at + tl.arange(0, CHUNK)
        value = tl.load(lhs_ptr + element, mask=element < size)
        for i in tl.static_range(1, WORLD + 1):
            shmem.store(me, mine + element, value, (me.rank + i) % WORLD, element < size)
    shmem.signal_all(me, arrived + me.rank, WORLD)
