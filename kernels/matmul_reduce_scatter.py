"""Matrix product and reduce-scatter in one kernel, for results of at least a tile of rows a rank.

Each program computes one tile of this rank's product. Tiles of the rows that other ranks own come first, in the order
rank + 1, rank + 2, ..., so that at any time each link carries the tiles of one rank; a program pushes its tile into
the owner's scratch and signals. Tiles of this rank's own rows come last: their programs add what the peers have sent
in the meantime, and store the sum. The order of additions is the same in every call: a rank's own part, then those of
rank - 1, rank - 2, ..., as they arrive.

A tile waits for programs of lower ids alone, because on every rank the own tiles have the highest.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import matmul, shmem, tiles


@triton.jit
def matmul_reduce_scatter_kernel(
    lhs_ptr,  # [WORLD * M, K]
    rhs_ptr,  # [K, N], or [N, K]
    team,
    partials,  # scratch [WORLD - 1, tiles, BLOCK_M, BLOCK_N]: those of rank - 1 come first
    arrived,  # signals [WORLD - 1, tiles]
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
):
    me = shmem.start(team)
    inbox = shmem.scratch(me, partials, tl.float32 if EXACT_WIRE else lhs_ptr.dtype.element_ty)
    row_blocks: tl.constexpr = tl.cdiv(M, BLOCK_M)
    column_blocks: tl.constexpr = tl.cdiv(N, BLOCK_N)
    tiles_a_rank: tl.constexpr = row_blocks * column_blocks
    step = tl.program_id(0) // tiles_a_rank
    tile = tl.program_id(0) % tiles_a_rank
    row_block, column_block = tiles.grouped(tile, row_blocks, column_blocks, GROUP_M)
    owner = (me.rank + 1 + step) % WORLD

    rows = tl.minimum(M - row_block * BLOCK_M, BLOCK_M)
    column = column_block * BLOCK_N
    lhs = lhs_ptr + (owner * M + row_block * BLOCK_M).to(tl.int64) * K
    product = matmul.multiply(
        lhs, rhs_ptr, rows, column, M, N, K,
        BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, RHS_TRANSPOSED=RHS_TRANSPOSED,
    )  # fmt: skip

    # A tile travels whole and in one piece, whatever the sizes: all stores are 16 bytes wide.
    size: tl.constexpr = BLOCK_M * BLOCK_N
    if step < WORLD - 1:
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
        out = out_ptr + (row_block * BLOCK_M).to(tl.int64) * N
        half: tl.constexpr = BLOCK_N // 2
        # By halves, because the registers hold no second tile beside the product.
        left, right = matmul.halves(product, BLOCK_M, BLOCK_N)
        left = add_received(left, received, ready, stride, WORLD - 1, BLOCK_M, BLOCK_N)
        matmul.store_tile(out, left, rows, column, N, BLOCK_M, half)
        right = add_received(right, received + half, ready, stride, WORLD - 1, BLOCK_M, BLOCK_N)
        matmul.store_tile(out, right, rows, column + half, N, BLOCK_M, half)
    shmem.finish(me)


@triton.jit
def add_received(
    tile,  # f32 [BLOCK_M, BLOCK_N / 2]
    received,  # the same half of the first partial tile
    ready,  # i1, whether all of them have come
    stride: tl.constexpr,  # from one partial tile to the next
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The tile and the peers' partial tiles, added in the order in which they lie."""
    element = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N // 2)[None, :]
    for _ in range(COUNT):
        tile += tl.load(received + element).to(tl.float32)
        received += stride
    return tl.where(ready, tile, float("nan"))
