"""All-gather and a product that contracts the gathered rows, in one kernel: the gradient of a layer's weights.

The first `PUSHERS` programs send this rank's rows to its peers; each later program computes one tile of the product.
A tile needs a few columns of the rows of all ranks. So the pushers send panels of columns, those first whose tiles
come first, and a tile adds up the part of one rank after the other: its own, then those of rank + 1, rank + 2, ..., for
each of which it waits.

Pushers have the lowest program ids, so a GPU starts them first and no tile waits for a program that has no place to
run.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import matmul, shmem, tiles
from jaxtaxfree.kernels.all_gather_matmul import push


@triton.jit
def all_gather_transposed_matmul_kernel(
    lhs_ptr,  # [M, K], this rank's rows
    rhs_ptr,  # [WORLD * M, N]
    team,
    gathered,  # scratch [WORLD, M, K]; this rank's own rows stay in lhs
    arrived,  # signals [WORLD, panels]: UNITS from each rank for each panel of its columns
    turn,  # signals [PUSHERS]: one at the end of each step of the push
    out_ptr,  # [K, N]; [N, K] if SWAPPED
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,  # tiles along K that run together; their columns are a panel
    PUSHERS: tl.constexpr,
    UNITS: tl.constexpr,  # parts in which a panel is pushed
    CHUNK: tl.constexpr,  # elements that a pusher moves at a time
    PRECISION: tl.constexpr,
    SWAPPED: tl.constexpr,  # the result is rhs^T @ gathered, not gathered^T @ rhs
):
    me = shmem.start(team)
    inbox = shmem.scratch(me, gathered, lhs_ptr.dtype.element_ty)
    ROWS: tl.constexpr = N if SWAPPED else K
    COLUMNS: tl.constexpr = K if SWAPPED else N
    BLOCK: tl.constexpr = BLOCK_N if SWAPPED else BLOCK_M  # of the gathered columns
    OTHER: tl.constexpr = BLOCK_M if SWAPPED else BLOCK_N
    PANEL: tl.constexpr = GROUP * BLOCK if GROUP * BLOCK < K else K
    panels: tl.constexpr = tl.cdiv(K, PANEL)
    if tl.program_id(0) < PUSHERS:
        push(me, lhs_ptr, inbox, arrived, turn, M, K, WORLD, M, PANEL, PUSHERS, UNITS, CHUNK)
    else:
        tile = tl.program_id(0) - PUSHERS
        block, other = tiles.grouped(tile, tl.cdiv(K, BLOCK), tl.cdiv(N, OTHER), GROUP)
        row = (other if SWAPPED else block) * BLOCK_M
        column = (block if SWAPPED else other) * BLOCK_N
        rows = tl.minimum(ROWS - row, BLOCK_M)
        ready = me.ready
        product = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(WORLD):
            source = (me.rank + step) % WORLD
            rows_of = lhs_ptr.to(tl.int64)
            if step > 0:
                ready &= shmem.wait(me, arrived + source * panels + block // GROUP, me.epoch * UNITS, source)
                rows_of = (inbox + source.to(tl.int64) * M * K).to(tl.int64)
            theirs = tl.multiple_of(rows_of.to(lhs_ptr.dtype), 16)
            others = rhs_ptr + source.to(tl.int64) * M * N
            product = matmul.multiply(
                (others if SWAPPED else theirs) + row,
                theirs if SWAPPED else others,
                rows,
                column,
                ROWS,
                COLUMNS,
                M,  # is what is contracted
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                PRECISION,
                LHS_TRANSPOSED=True,
                accumulator=product,
            )
        product = tl.where(ready, product, float("nan"))
        matmul.store_tile(out_ptr + row.to(tl.int64) * COLUMNS, product, rows, column, COLUMNS, BLOCK_M, BLOCK_N)
    shmem.finish(me)
