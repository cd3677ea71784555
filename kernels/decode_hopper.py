"""What the kernels for the few rows of a decode step on Hopper share: the product, and how its weights are kept coming.

With few rows a product takes as long as reading `rhs`. It is turned round here: a tile is as many columns of `rhs` as a
warpgroup multiplies rows, by all rows of lhs, so that few rows waste no tensor cores and `rhs` is read once. More than
100 KB of it are on their way to every multiprocessor before anything else is done.

Where there are fewer tiles than multiprocessors, several programs share one: each has a part of K (`share_of`), and
leaves its sums to the one of the highest id (`leave`, `take`), which waits for programs that have begun before it.

With a gate, which is a second matrix of weights, a stage has blocks of both, side by side: the tile has columns of
`rhs` and then of the gate (`product_and_gate`).

`allocate` and `begin` stand in the kernel itself; of its partitions one calls `load`, the other one `multiply` and what
comes after it. What becomes of a tile then it does with one of its `pieces` after the other, for want of registers.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import CachePolicy, FractionalEvictionPolicy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from jaxtaxfree.kernels import shmem_gluon as shmem

# Weights are read once. They are not to drive out of the L2 cache what all programs read.
READ_ONCE = gl.constexpr(CachePolicy(l2=FractionalEvictionPolicy("evict_first", 1.0)))
AHEAD = gl.constexpr(8)  # steps of K whose weights `begin` asks for, which keep the memory busy until `load` begins
PIECE = gl.constexpr(8192)  # elements of a tile that are handled at a time


class Ring(NamedTuple):
    """What lies in shared memory."""

    lhs: Any  # [STAGES, BLOCK_M, BLOCK_K]
    rhs: Any  # [STAGES, BLOCK_K, columns of a tile]
    full: Any  # mbarriers of the stages: all blocks have come
    empty: Any  # they have been multiplied


@gluon.jit
def allocate(rhs_desc, gate_desc, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    BLOCK_K: gl.constexpr = rhs_desc.block_shape[0]
    COLUMNS: gl.constexpr = rhs_desc.block_shape[1] * (1 if gate_desc is None else 2)
    LHS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], rhs_desc.dtype)
    lhs = gl.allocate_shared_memory(rhs_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], LHS)
    rhs = gl.allocate_shared_memory(rhs_desc.dtype, [STAGES, BLOCK_K, COLUMNS], rhs_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    return Ring(lhs, rhs, full, empty)


@gluon.jit
def share_of(program, K: gl.constexpr, BLOCK_K: gl.constexpr, SPLITS: gl.constexpr):
    """What a program multiplies: (number of its tile, its own among those that share it, first step of K, end)."""
    split = program % SPLITS
    first = split * gl.cdiv(K, BLOCK_K) // SPLITS
    end = (split + 1) * gl.cdiv(K, BLOCK_K) // SPLITS
    return program // SPLITS, split, first, end


@gluon.jit
def begin(ring, rhs_desc, gate_desc, column, first, STEPS: gl.constexpr):
    """Asks for the weights of the first steps, before anything else.

    Args:
      first: the first step.
      STEPS: how many there are at least.

    Returns: how many it has asked for.
    """
    BLOCK_K: gl.constexpr = rhs_desc.block_shape[0]
    STAGES: gl.constexpr = ring.lhs.shape[0]
    FIRST: gl.constexpr = min(STAGES, STEPS, AHEAD)
    for stage in gl.static_range(FIRST):
        mbarrier.init(ring.full.index(stage), count=1)
    for stage in gl.static_range(FIRST):
        fetch_weights(ring, rhs_desc, gate_desc, stage, (first + stage) * BLOCK_K, column)
    for stage in gl.static_range(FIRST, STAGES):
        mbarrier.init(ring.full.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.empty.index(stage), count=1)
    return FIRST


@gluon.jit
def fetch_weights(ring, rhs_desc, gate_desc, stage, row, column):
    """Begins to fill a stage, and announces the block of lhs along with those of rhs and gate."""
    full = ring.full.index(stage)
    dest = ring.rhs.index(stage)
    mbarrier.expect(full, ring.lhs.index(stage).nbytes_per_cta + dest.nbytes_per_cta)
    if gate_desc is None:
        tma.async_load(rhs_desc, [row, column], full, dest, cache_policy=READ_ONCE)
    else:
        BLOCK_N: gl.constexpr = rhs_desc.block_shape[1]
        tma.async_load(rhs_desc, [row, column], full, dest.slice(0, BLOCK_N, 1), cache_policy=READ_ONCE)
        tma.async_load(gate_desc, [row, column], full, dest.slice(BLOCK_N, BLOCK_N, 1), cache_policy=READ_ONCE)


@gluon.jit
def load(ring, lhs_desc, rhs_desc, gate_desc, column, position, first, end, fetched):
    """Fetches what `multiply` needs for some steps of K.

    Args:
      position: the stage of step `first`, and the phase in which it is empty: (0, 1) for the program's first step.
      first, end: the steps.
      fetched: of all steps before this one the weights have been asked for.

    Returns: the position of step `end`.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    stage, phase = position
    for step in range(first, end):
        if step >= fetched:
            mbarrier.wait(ring.empty.index(stage), phase)
            fetch_weights(ring, rhs_desc, gate_desc, stage, step * BLOCK_K, column)
        tma.async_load(lhs_desc, [0, step * BLOCK_K], ring.full.index(stage), ring.lhs.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase = phase ^ 1
    return stage, phase


@triton.constexpr_function
def layout_of_sums(block_m, warps):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, block_m, 16])


@gluon.jit
def multiply(ring, steps):
    """The tile of all rows, from what `load` fetches, with columns of `rhs`, and of the gate, as its rows."""
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_M: gl.constexpr = ring.lhs.shape[1]
    COLUMNS: gl.constexpr = ring.rhs.shape[2]
    tile = gl.zeros((COLUMNS, BLOCK_M), gl.float32, layout_of_sums(BLOCK_M, gl.num_warps()))
    stage = 0
    phase = 0
    previous = 0
    for step in range(steps):
        mbarrier.wait(ring.full.index(stage), phase)
        lhs = ring.lhs.index(stage).permute((1, 0))
        tile = warpgroup_mma(ring.rhs.index(stage).permute((1, 0)), lhs, tile, use_acc=step > 0, is_async=True)
        tile = warpgroup_mma_wait(num_outstanding=1, deps=(tile,))
        mbarrier.arrive(ring.empty.index(previous), count=1, pred=step > 0)
        previous = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase = phase ^ 1
    return warpgroup_mma_wait(num_outstanding=0, deps=(tile,))


@gluon.jit
def pieces(tile):
    """A tile of `multiply` in pieces of PIECE elements, each in the `layout_of_sums`; `rows_of` says of which rows.

    Each has 8 rows, and again 8, from all over the tile: so no element changes its thread.
    """
    BLOCK_N: gl.constexpr = tile.shape[0]
    BLOCK_M: gl.constexpr = tile.shape[1]
    if BLOCK_N * BLOCK_M <= PIECE:
        found = (tile,)
    else:
        left, right = tile.reshape([BLOCK_N, BLOCK_M // 16, 2, 8]).permute([0, 1, 3, 2]).split()
        HALF: gl.constexpr = BLOCK_M // 2
        SUMS: gl.constexpr = layout_of_sums(HALF, gl.num_warps())
        left = gl.convert_layout(left.reshape([BLOCK_N, HALF]), SUMS)
        right = gl.convert_layout(right.reshape([BLOCK_N, HALF]), SUMS)
        found = pieces(left) + pieces(right)
    return found


@triton.constexpr_function
def first_row(piece, count):
    """Of a piece out of so many: 8 times its number, of which the bits stand in reverse, as they have been split."""
    bits = count.bit_length() - 1
    return 8 * sum((piece >> i & 1) << (bits - 1 - i) for i in range(bits))


@gluon.jit
def rows_of(PIECE_NUMBER: gl.constexpr, PIECES: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """The rows of the tile that one of its pieces has."""
    row = gl.arange(0, ROWS, LAYOUT)
    return row // 8 * (8 * PIECES) + first_row(PIECE_NUMBER, PIECES) + row % 8


@gluon.jit
def product_and_gate(piece, LAYOUT: gl.constexpr):
    """A piece of each of the two products, in this layout."""
    COLUMNS: gl.constexpr = piece.shape[0] // 2
    ROWS: gl.constexpr = piece.shape[1]
    BOTH: gl.constexpr = gl.BlockedLayout([8, 1, 2], [8, 4, 1], [1, gl.num_warps(), 1], [2, 0, 1])
    both = gl.convert_layout(piece.reshape([2, COLUMNS, ROWS]).permute([1, 2, 0]), BOTH)
    product, gate = both.split()
    return gl.convert_layout(product, LAYOUT), gl.convert_layout(gate, LAYOUT)


@gluon.jit
def leave(me, tile, shares, left, number, split, SPLITS: gl.constexpr):
    """Leaves the sums of a part of K to the program that adds them up.

    Args:
      shares: scratch f32 [tiles, SPLITS - 1, BLOCK_N * BLOCK_M].
      left: signals [tiles], 1 from each of the SPLITS - 1.
      number: of the tile.
    """
    parts = pieces(tile)
    for i in gl.static_range(len(parts)):
        place = place_in(me, parts[i], shares, number, split, i, len(parts), SPLITS)
        gl.store(place, parts[i])
    shmem.signal(me, left + number, me.rank)


@gluon.jit
def take(me, piece, shares, number, PIECE_NUMBER: gl.constexpr, PIECES: gl.constexpr, SPLITS: gl.constexpr):
    """A piece, and with it the sums that others have left of it, in their order. Behind `wait`."""
    total = piece
    if SPLITS > 1:
        for split in range(SPLITS - 1):  # no static_range: there are no registers for all of them
            total += gl.load(place_in(me, piece, shares, number, split, PIECE_NUMBER, PIECES, SPLITS))
    return total


@gluon.jit
def wait(me, left, number, SPLITS: gl.constexpr):
    """Waits for the sums of those who share a tile with this program: whether they have come."""
    came = me.ready
    if SPLITS > 1:
        came = shmem.wait(me, left + number, me.epoch * (SPLITS - 1), me.rank)
    return came


@gluon.jit
def place_in(me, piece, shares, number, split, PIECE_NUMBER: gl.constexpr, PIECES: gl.constexpr, SPLITS: gl.constexpr):
    """Where the elements of a piece lie that a program leaves."""
    COLUMNS: gl.constexpr = piece.shape[0]
    ROWS: gl.constexpr = piece.shape[1]
    SUMS: gl.constexpr = layout_of_sums(ROWS, gl.num_warps())
    first = ((number * (SPLITS - 1) + split) * PIECES + PIECE_NUMBER) * (COLUMNS * ROWS)
    n = gl.arange(0, COLUMNS, gl.SliceLayout(1, SUMS))[:, None]
    m = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))[None, :]
    return shmem.scratch(me, shares, gl.float32) + first + (n * ROWS + m)
