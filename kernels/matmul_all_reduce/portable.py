"""Matrix product and all-reduce in one kernel, for results of many tiles.

The tiles of the product are shared out among the ranks, neighbours to the same. First come the tiles that other ranks
own, in the order rank + 1, rank + 2, ..., so that at any time each link carries the tiles of one rank; their programs
push them into the owner's scratch and signal. Then come this rank's own: their programs add what the peers have sent in
the meantime, apply the epilogue, round the tile, store it and push it to all ranks. The last programs copy the tiles of
the peers into the result. The order of additions is the same in every call: the owner's part, then those of rank - 1,
rank - 2, ..., as they arrive.

An own tile waits for programs of lower ids alone, because on every rank the own tiles come after the others; and so
does a copy.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import shmem
from jaxtaxfree.kernels.blocks import epilogue as epilogues
from jaxtaxfree.kernels.blocks import matmul, tiles
from jaxtaxfree.kernels.blocks import wire as wire_types
from jaxtaxfree.kernels.matmul_reduce_scatter.portable import add_received


@triton.jit
def matmul_all_reduce_kernel(
    lhs_ptr,  # [M, K]
    rhs_ptr,  # [K, N]; with RHS_TRANSPOSED [N, K]
    epilogue,  # what there is of bias [N] and residual [M, N]
    team,
    partials,  # scratch [WORLD - 1, tiles a rank, BLOCK_M, BLOCK_N]: those of rank - 1 come first
    sums,  # scratch [WORLD, tiles a rank, BLOCK_M, BLOCK_N], by owner
    arrived,  # signals [WORLD - 1, tiles a rank]
    added,  # signals [WORLD, tiles a rank]
    out_ptr,  # [M, N]
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr,
    RHS_TRANSPOSED: tl.constexpr,
    EXACT_WIRE: tl.constexpr,  # partial sums travel as f32, not in the type of the operands
    EPILOGUE: tl.constexpr,  # the names of `epilogue`
    ACTIVATION: tl.constexpr,
):
    me = shmem.start(team)
    last = epilogues.of(epilogue, EPILOGUE)
    row_blocks: tl.constexpr = tl.cdiv(M, BLOCK_M)
    column_blocks: tl.constexpr = tl.cdiv(N, BLOCK_N)
    tiles_a_rank: tl.constexpr = tl.cdiv(row_blocks * column_blocks, WORLD)
    # WORLD steps of tiles, of which the last are this rank's own, and WORLD - 1 steps of copies.
    step = tl.program_id(0) // tiles_a_rank
    tile = tl.program_id(0) % tiles_a_rank
    owner = (me.rank + 1 + step) % WORLD
    place = owner * tiles_a_rank + tile
    if place < row_blocks * column_blocks:  # the last rank may own fewer
        row_block, column_block = tiles.grouped(place, row_blocks, column_blocks, GROUP_M)
        row = row_block * BLOCK_M
        rows = tl.minimum(M - row, BLOCK_M)
        column = column_block * BLOCK_N
        out = out_ptr + row.to(tl.int64) * N
        size: tl.constexpr = BLOCK_M * BLOCK_N
        outbox = shmem.scratch(me, sums, out_ptr.dtype.element_ty) + place.to(tl.int64) * size
        if step < WORLD:
            lhs = lhs_ptr + row.to(tl.int64) * K
            product = matmul.multiply(
                lhs, rhs_ptr, rows, column, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, RHS_TRANSPOSED=RHS_TRANSPOSED
            )  # fmt: skip
            inbox = shmem.scratch(me, partials, wire_types.type_of(lhs_ptr.dtype.element_ty, EXACT_WIRE))
            if step < WORLD - 1:
                # A tile travels whole and in one piece, whatever the sizes: all stores are 16 bytes wide.
                slot = step * tiles_a_rank + tile
                element = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                shmem.store(me, inbox + slot.to(tl.int64) * size + element, product.to(inbox.dtype.element_ty), owner)
                shmem.signal(me, arrived + slot, owner)
            else:
                ready = me.ready
                for i in range(WORLD - 1):
                    slot = i * tiles_a_rank + tile
                    ready &= shmem.wait(me, arrived + slot, me.epoch, (me.rank + WORLD - 1 - i) % WORLD)
                received = inbox + tile.to(tl.int64) * size
                stride: tl.constexpr = tiles_a_rank * size
                half: tl.constexpr = BLOCK_N // 2
                # By halves, because the registers hold no second tile beside the product.
                left, right = matmul.halves(product, BLOCK_M, BLOCK_N)
                left = add_received(left, received, ready, stride, WORLD - 1, BLOCK_M, BLOCK_N)
                give_out(
                    me, left, last, out, outbox, row, rows, column,
                    N, WORLD, BLOCK_M, half, BLOCK_N, ACTIVATION,
                )  # fmt: skip
                right = add_received(right, received + half, ready, stride, WORLD - 1, BLOCK_M, BLOCK_N)
                give_out(
                    me, right, last, out, outbox + half, row, rows, column + half,
                    N, WORLD, BLOCK_M, half, BLOCK_N, ACTIVATION,
                )  # fmt: skip
                shmem.signal_all(me, added + place, WORLD)
        else:
            ready = shmem.wait(me, added + place, me.epoch, owner)
            element = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            total = tl.load(outbox + element)
            total = tl.where(ready, total, float("nan"))
            matmul.store_tile(out, total, rows, column, N, BLOCK_M, BLOCK_N)
    shmem.finish(me)


@triton.jit
def give_out(
    me,
    total,  # f32 [BLOCK_M, BLOCK_N]: some columns of a tile
    last,
    out,  # first row of the tile; row stride N
    outbox,  # where every rank keeps these columns of the tile
    row,
    rows,
    column,
    N: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIDE: tl.constexpr,  # columns of the whole tile
    ACTIVATION: tl.constexpr,
):
    """Applies the epilogue to sums, rounds them, stores them in the result and pushes them to the peers."""
    ALONE: tl.constexpr = last.bias is None and last.residual is None and ACTIVATION is None
    if not ALONE and BLOCK_M * BLOCK_N > 64 * 128:
        # By halves, because the registers hold no residual beside so many sums.
        half: tl.constexpr = BLOCK_N // 2
        left, right = matmul.halves(total, BLOCK_M, BLOCK_N)
        give_out(
            me, left, last, out, outbox, row, rows, column,
            N, WORLD, BLOCK_M, half, STRIDE, ACTIVATION,
        )  # fmt: skip
        give_out(
            me, right, last, out, outbox + half, row, rows, column + half,
            N, WORLD, BLOCK_M, half, STRIDE, ACTIVATION,
        )  # fmt: skip
    else:
        result = epilogues.apply(total, None, last, row, rows, column, N, BLOCK_M, BLOCK_N, ACTIVATION)
        rounded = result.to(out.dtype.element_ty)
        matmul.store_tile(out, rounded, rows, column, N, BLOCK_M, BLOCK_N)
        element = tl.arange(0, BLOCK_M)[:, None] * STRIDE + tl.arange(0, BLOCK_N)[None, :]
        for i in tl.static_range(1, WORLD):
            shmem.store(me, outbox + element, rounded, (me.rank + i) % WORLD)
