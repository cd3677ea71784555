"""Matrix product and reduce-scatter in one kernel, for the few rows of a decode step.

With few rows the product takes as long as reading `rhs`, so `rhs` must be read once: every tile has the rows of all
ranks. Its program sends each rank the rows that it owns, waits for the programs of the same id on all ranks, and adds
up the rows of its own rank, in the order of the ranks.

Programs of one id wait for each other after they have sent what the others wait for, so none of them needs more than
its own place to run.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import shmem
from jaxtaxfree.kernels.blocks import epilogue as epilogues
from jaxtaxfree.kernels.blocks import matmul, tiles
from jaxtaxfree.kernels.blocks import wire as wire_types


@triton.jit
def matmul_reduce_scatter_few_kernel(
    lhs_ptr,  # [WORLD * M, K]
    rhs_ptr,  # [K, N], or [N, K]
    epilogue,  # what there is of bias [N] and residual [M, N]
    scales,  # of weights of 8 bits, see `matmul.multiply_narrow`
    team,
    partials,  # scratch [WORLD, M, N]
    arrived,  # signals [programs, WORLD]
    out_ptr,  # [M, N]
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    RHS_TRANSPOSED: tl.constexpr,
    EXACT_WIRE: tl.constexpr,  # partial sums travel as f32, not in the type of the operands
    EPILOGUE: tl.constexpr,  # the names of `epilogue`
    SCALES: tl.constexpr,  # those of `scales`
    ACTIVATION: tl.constexpr,
):
    me = shmem.start(team)
    last = epilogues.of(epilogue, EPILOGUE)
    inbox = shmem.scratch(me, partials, wire_types.type_of(lhs_ptr.dtype.element_ty, EXACT_WIRE))
    all_rows: tl.constexpr = WORLD * M
    row_blocks: tl.constexpr = tl.cdiv(all_rows, BLOCK_M)
    row_block, column_block = tiles.grouped(tl.program_id(0), row_blocks, tl.cdiv(N, BLOCK_N), GROUP_M=64)
    row = row_block * BLOCK_M
    column = column_block * BLOCK_N
    rows = tl.minimum(all_rows - row, BLOCK_M)
    product, _ = matmul.multiply_gated(
        lhs_ptr + row.to(tl.int64) * K, (rhs_ptr,), rows, column, all_rows, N, K,
        BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, RHS_TRANSPOSED, scales, SCALES,
    )  # fmt: skip

    n = column + tl.arange(0, BLOCK_N)
    m = row + tl.arange(0, BLOCK_M)
    mine = inbox + me.rank.to(tl.int64) * (M * N)
    for i in tl.static_range(1, WORLD + 1):
        owner = (me.rank + i) % WORLD
        dest = mine + (m - owner * M)[:, None] * N + n[None, :]
        owned = ((m >= owner * M) & (m < (owner + 1) * M))[:, None]
        shmem.store(me, dest, product.to(inbox.dtype.element_ty), owner, owned & (n[None, :] < N))
    meeting = arrived + tl.program_id(0) * WORLD
    shmem.signal_all(me, meeting + me.rank, WORLD)
    ready = shmem.wait_all(me, meeting, me.epoch)

    # The rows of the tile that this rank owns.
    SUM_ROWS: tl.constexpr = triton.next_power_of_2(M) if M < BLOCK_M else BLOCK_M
    first = tl.maximum(row - me.rank * M, 0)
    count = tl.minimum(row + BLOCK_M - me.rank * M, M) - first
    own = tl.arange(0, SUM_ROWS)[:, None]
    sources = inbox + first.to(tl.int64) * N + own * N + n[None, :]
    total = tl.zeros((SUM_ROWS, BLOCK_N), dtype=tl.float32)
    for source in tl.static_range(WORLD):
        partial = tl.load(sources + source * M * N, mask=(own < count) & (n[None, :] < N), other=0.0)
        total += partial.to(tl.float32)
    total = tl.where(ready, total, float("nan"))
    out = out_ptr + first.to(tl.int64) * N
    epilogues.store_tile(out, total, None, last, first, count, column, N, SUM_ROWS, BLOCK_N, ACTIVATION)
    shmem.finish(me)
