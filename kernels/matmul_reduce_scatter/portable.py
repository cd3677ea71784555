"""Matrix product and reduce-scatter in one kernel, for results of at least a tile of rows a rank.

Each program computes one tile of this rank's product. Tiles of the rows that other ranks own come first, in the order
rank + 1, rank + 2, ..., so that at any time each link carries the tiles of one rank. Tiles of this rank's own rows
come last: their programs add what the peers have sent in the meantime, and store the sum. The order of additions is
the same in every call: a rank's own part, then those of rank - 1, rank - 2, ..., as they arrive.

Programs that run at the same time end at the same time. If each then sent its own tile, nothing would be multiplied
while the links are busy. So a program leaves its tile in this rank's outbox, and carries another one while it
multiplies, a part in each step: that of the program `LAG` ids before it.

A program waits for lower ids alone, or for its own id on other ranks: what is to be added to a tile has been carried
by such programs. A tile whose carrier would have a higher id is sent by its own program; if there are few tiles, all
are.

Where ranks own columns of the sum in place of rows, a tile of another rank has other columns and the same rows; nothing
else differs.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import shmem
from jaxtaxfree.kernels.blocks import epilogue as epilogues
from jaxtaxfree.kernels.blocks import matmul, tiles


@triton.jit
def matmul_reduce_scatter_kernel(
    lhs_ptr,  # [WORLD * M, K]; [M, K] if ranks own columns
    rhs_ptr,  # [K, N], or [N, K]; WORLD * N if ranks own columns
    epilogue,  # what there is of bias [N] and residual [M, N]
    team,
    partials,  # scratch [WORLD - 1, tiles, BLOCK_M, BLOCK_N]: those of rank - 1 come first
    outbox,  # scratch [LAG, BLOCK_M, BLOCK_N] for tiles of this rank
    arrived,  # signals [2, WORLD - 1, tiles]: in `partials`, and in the outbox
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
    COLUMNS: tl.constexpr,  # ranks own columns of the sum, not rows
    LAG: tl.constexpr,
    PART: tl.constexpr,  # 4-byte words that are carried in a step of K
    CHUNK: tl.constexpr,  # the power of 2 of words that are moved at a time
    EPILOGUE: tl.constexpr,  # the names of `epilogue`
    ACTIVATION: tl.constexpr,
):
    me = shmem.start(team)
    last = epilogues.of(epilogue, EPILOGUE)
    wire: tl.constexpr = tl.float32 if EXACT_WIRE else lhs_ptr.dtype.element_ty
    inbox = shmem.scratch(me, partials, wire)
    row_blocks: tl.constexpr = tl.cdiv(M, BLOCK_M)
    column_blocks: tl.constexpr = tl.cdiv(N, BLOCK_N)
    tiles_a_rank: tl.constexpr = row_blocks * column_blocks
    sent: tl.constexpr = (WORLD - 1) * tiles_a_rank  # tiles that other ranks own
    size: tl.constexpr = BLOCK_M * BLOCK_N
    slot = tl.program_id(0)
    tile = slot % tiles_a_rank
    row_block, column_block = tiles.grouped(tile, row_blocks, column_blocks, GROUP_M)
    owner = (me.rank + 1 + slot // tiles_a_rank) % WORLD

    # A place of the outbox takes the tiles of all programs that are LAG ids apart: each carries what the last one left.
    place = shmem.scratch(me, outbox, wire) + slot % LAG * size
    carried = slot - LAG
    carries = (carried >= 0) & (carried < sent) & (slot <= sent + carried % tiles_a_rank)
    if carries:
        carries = shmem.wait(me, arrived + sent + carried, me.epoch, me.rank)
    carried = tl.maximum(carried, 0)
    receiver = (me.rank + 1 + carried // tiles_a_rank) % WORLD
    source = words(place)
    dest = words(shmem.remote(me, inbox + carried.to(tl.int64) * size, receiver))
    count = tl.where(carries, size * wire.primitive_bitwidth // 32, 0)

    rows = tl.minimum(M - row_block * BLOCK_M, BLOCK_M)
    column = column_block * BLOCK_N
    first_row = row_block * BLOCK_M
    rhs = rhs_ptr
    if COLUMNS:
        rhs += owner.to(tl.int64) * (N * K if RHS_TRANSPOSED else N)
    else:
        first_row += owner * M
    product = matmul.multiply(
        lhs_ptr + first_row.to(tl.int64) * K, rhs, rows, column, M, N, K,
        BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, RHS_TRANSPOSED=RHS_TRANSPOSED,
        source=source, dest=dest, count=count, PART=PART, CHUNK=CHUNK,
        STRIDE=WORLD * N if COLUMNS and not RHS_TRANSPOSED else 0,
    )  # fmt: skip
    for at in range(tl.cdiv(K, BLOCK_K) * PART, count, CHUNK):
        word = at + tl.arange(0, CHUNK)
        tl.store(dest + word, tl.load(source + word, mask=word < count), mask=word < count)

    # By halves, because the registers hold no second tile beside the product.
    half: tl.constexpr = BLOCK_N // 2
    left, right = matmul.halves(product, BLOCK_M, BLOCK_N)
    waits = slot + LAG <= sent + tile  # for its carrier
    next_hop = tl.where(waits, me.rank, owner)
    if slot < sent:
        # A tile lies whole and in one piece, whatever the sizes: all stores are 16 bytes wide.
        element = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, half)[None, :]
        home = tl.where(waits, place, inbox + slot.to(tl.int64) * size) + element
        tl.debug_barrier()  # all threads have read what was in this place
        shmem.store(me, home, left.to(wire), next_hop)
        shmem.store(me, home + half, right.to(wire), next_hop)
    # One signal for this program's tile and one for the tile that it carried.
    own = tl.arange(0, 2) == 0
    index = arrived + tl.where(own, tl.where(waits, sent, 0) + slot, carried)
    shmem.signal(me, index, tl.where(own, next_hop, receiver), tl.where(own, slot < sent, carries))

    if slot >= sent:
        ready = me.ready
        for i in range(WORLD - 1):
            ready &= shmem.wait(me, arrived + i * tiles_a_rank + tile, me.epoch, (me.rank + WORLD - 1 - i) % WORLD)
        received = inbox + tile.to(tl.int64) * size
        stride: tl.constexpr = tiles_a_rank * size
        row = row_block * BLOCK_M
        out = out_ptr + row.to(tl.int64) * N
        left = add_received(left, received, ready, stride, WORLD - 1, BLOCK_M, BLOCK_N)
        left = epilogues.apply(left, None, last, row, rows, column, N, BLOCK_M, half, ACTIVATION)
        matmul.store_tile(out, left, rows, column, N, BLOCK_M, half)
        right = add_received(right, received + half, ready, stride, WORLD - 1, BLOCK_M, BLOCK_N)
        right = epilogues.apply(right, None, last, row, rows, column + half, N, BLOCK_M, half, ACTIVATION)
        matmul.store_tile(out, right, rows, column + half, N, BLOCK_M, half)
    shmem.finish(me)


@triton.jit
def words(tile):
    """A pointer to a tile's 4-byte words."""
    return tl.multiple_of(tile.to(tl.pointer_type(tl.int32)), 16)


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
