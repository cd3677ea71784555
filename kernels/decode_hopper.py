"""What the kernels for the few rows of a decode step on Hopper share: the product, and how its weights are kept coming.

With few rows a product takes as long as reading `rhs`. It is turned round here: a tile is as many columns of `rhs` as a
warpgroup multiplies rows, by all rows of lhs, so that few rows waste no tensor cores and `rhs` is read once. More than
100 KB of it are on their way to every multiprocessor before anything else is done.

Of more rows than a tile takes there are several blocks of them (`place_of`), and `rhs` is read once for each.

Where there are fewer tiles than multiprocessors, several programs share one. Each multiplies a part of K (`share_of`),
and those of the highest ids, the adders, add up the rows of a tile, each some of them: all leave to them what they have
of these rows (`leave`, `wait`, `take`). So an adder may wait for programs that begin after it; there have to be places
for as many programs as share a tile, which start in the order of their ids.

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
from jaxtaxfree.kernels import tiles

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


class Place(NamedTuple):
    """Where a tile is.

    Attributes:
      number: of the tile. Those of the same columns follow each other, and read them together.
      block: of rows, from 0 on.
      row, column: its first ones.
    """

    number: Any
    block: Any
    row: Any
    column: Any


@gluon.jit
def place_of(number, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The `Place` of a tile of a product of so many rows."""
    BLOCKS: gl.constexpr = gl.cdiv(ROWS, BLOCK_M)
    block = number % BLOCKS
    return Place(number, block, block * BLOCK_M, number // BLOCKS * BLOCK_N)


@gluon.jit
def begin(ring, rhs_desc, gate_desc, place, first, STEPS: gl.constexpr):
    """Asks for the weights of the first steps, before anything else.

    Args:
      first: the first step.
      STEPS: how many there are at least.

    Returns: how many it has asked for.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    FIRST: gl.constexpr = min(STAGES, STEPS, AHEAD)
    for stage in gl.static_range(FIRST):
        mbarrier.init(ring.full.index(stage), count=1)
    for stage in gl.static_range(FIRST):
        fetch_weights(ring, rhs_desc, gate_desc, stage, first + stage, place)
    for stage in gl.static_range(FIRST, STAGES):
        mbarrier.init(ring.full.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.empty.index(stage), count=1)
    return FIRST


@gluon.jit
def fetch_weights(ring, rhs_desc, gate_desc, stage, step, place):
    """Begins to fill a stage, and announces the block of lhs along with those of rhs and gate."""
    full = ring.full.index(stage)
    dest = ring.rhs.index(stage)
    at = [step * rhs_desc.block_shape[0], place.column]
    mbarrier.expect(full, ring.lhs.index(stage).nbytes_per_cta + dest.nbytes_per_cta)
    if gate_desc is None:
        tma.async_load(rhs_desc, at, full, dest, cache_policy=READ_ONCE)
    else:
        BLOCK_N: gl.constexpr = rhs_desc.block_shape[1]
        tma.async_load(rhs_desc, at, full, dest.slice(0, BLOCK_N, 1), cache_policy=READ_ONCE)
        tma.async_load(gate_desc, at, full, dest.slice(BLOCK_N, BLOCK_N, 1), cache_policy=READ_ONCE)


@gluon.jit
def load(ring, lhs_desc, rhs_desc, gate_desc, place, ROWS: gl.constexpr, position, first, end, fetched):
    """Fetches what `multiply` needs for some steps of K.

    Args:
      ROWS: of lhs.
      position: the stage of step `first`, and the phase in which it is empty: (0, 1) for the program's first step.
      first, end: the steps.
      fetched: of all steps before this one the weights have been asked for.

    Returns: the position of step `end`.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_M: gl.constexpr = ring.lhs.shape[1]
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    BOX: gl.constexpr = lhs_desc.block_shape[0]
    stage, phase = position
    for step in range(first, end):
        if step >= fetched:
            mbarrier.wait(ring.empty.index(stage), phase)
            fetch_weights(ring, rhs_desc, gate_desc, stage, step, place)
        for box in gl.static_range(BLOCK_M // BOX):
            at = [tiles.row_of_box(place.row, box, ROWS, BOX), step * BLOCK_K]
            tma.async_load(lhs_desc, at, ring.full.index(stage), ring.lhs.index(stage).slice(box * BOX, BOX))
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
    """The tile, from what `load` fetches, with columns of `rhs`, and of the gate, as its rows."""
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
def pieces(tile, LEAST: gl.constexpr):
    """A tile of `multiply` in pieces of no more than PIECE elements, each in the `layout_of_sums`.

    One of so many begins with 8 rows of the tile, the next one with the next 8, and when all have 8 the first one goes
    on (`rows_of`): so no element changes its thread.

    Args:
      LEAST: how many there are at least, a power of 2.
    """
    BLOCK_N: gl.constexpr = tile.shape[0]
    BLOCK_M: gl.constexpr = tile.shape[1]
    if LEAST <= 1 and BLOCK_N * BLOCK_M <= PIECE:
        found = (tile,)
    else:
        left, right = tile.reshape([BLOCK_N, BLOCK_M // 16, 2, 8]).permute([0, 1, 3, 2]).split()
        HALF: gl.constexpr = BLOCK_M // 2
        SUMS: gl.constexpr = layout_of_sums(HALF, gl.num_warps())
        even = pieces(gl.convert_layout(left.reshape([BLOCK_N, HALF]), SUMS), LEAST // 2)
        odd = pieces(gl.convert_layout(right.reshape([BLOCK_N, HALF]), SUMS), LEAST // 2)
        found = ()
        for i in gl.static_range(len(even)):
            found = found + (even[i], odd[i])
    return found


@gluon.jit
def rows_of(number, PIECES: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """The rows of the tile that one of its pieces has."""
    return 8 * number + shmem.spread(gl.arange(0, ROWS, LAYOUT), PIECES)


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
def adder_of(split, SPLITS: gl.constexpr, ADDERS: gl.constexpr):
    """Which one of a tile's adders a program is, or a negative number."""
    return split - (SPLITS - ADDERS)


@gluon.jit
def leave(me, parts, shares, left, number, split, SPLITS: gl.constexpr, ADDERS: gl.constexpr):
    """Leaves what a program has of the rows that others add up.

    Args:
      parts: `pieces` of its tile, at least ADDERS. Of each ADDERS that follow each other every adder has one.
      shares: scratch f32 [tiles, SPLITS, BLOCK_N * BLOCK_M].
      left: signals [tiles].
      number: of the tile.
    """
    if SPLITS > 1:
        adder = adder_of(split, SPLITS, ADDERS)
        for i in gl.static_range(len(parts)):
            if adder != i % ADDERS:
                gl.store(place_in(me, parts[i], shares, number, split, i, len(parts), SPLITS), parts[i])
        if split < signals(SPLITS, ADDERS):
            shmem.signal(me, left + number, me.rank)


@triton.constexpr_function
def signals(splits, adders):
    """How many of the programs that share a tile leave something: a single adder does not."""
    return splits if adders > 1 else splits - 1


@gluon.jit
def wait(me, left, number, SPLITS: gl.constexpr, ADDERS: gl.constexpr):
    """Waits for what others leave to the adders of a tile: whether it has come."""
    came = me.ready
    if SPLITS > 1:
        came = shmem.wait(me, left + number, me.epoch * signals(SPLITS, ADDERS), me.rank)
    return came


@gluon.jit
def take(me, parts, shares, number, split, i: gl.constexpr, SPLITS: gl.constexpr, ADDERS: gl.constexpr):
    """What an adder adds up: one of the `parts` from number i * ADDERS on, and what others have left of it.

    Returns: (the sums, the number of the piece).
    """
    adder = adder_of(split, SPLITS, ADDERS)
    total = parts[i * ADDERS]
    for mine in gl.static_range(1, ADDERS):
        total = gl.where(adder == mine, parts[i * ADDERS + mine], total)
    piece = i * ADDERS + adder
    if SPLITS > 1:
        for after in range(1, SPLITS):  # no static_range: there are no registers for all of them
            other = (split + after) % SPLITS
            total += gl.load(place_in(me, total, shares, number, other, piece, len(parts), SPLITS))
    return total, piece


@gluon.jit
def place_in(me, sums, shares, number, split, piece, PIECES: gl.constexpr, SPLITS: gl.constexpr):
    """Where the elements of a piece lie that a program leaves: 8 columns of 8 rows together, as a warp has them."""
    COLUMNS: gl.constexpr = sums.shape[0]
    ROWS: gl.constexpr = sums.shape[1]
    SUMS: gl.constexpr = layout_of_sums(ROWS, gl.num_warps())
    first = ((number * SPLITS + split) * PIECES + piece) * (COLUMNS * ROWS)
    n = gl.arange(0, COLUMNS, gl.SliceLayout(1, SUMS))[:, None]
    m = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))[None, :]
    within = (n // 8 * (ROWS // 8) + m // 8) * 64 + n % 8 * 8 + m % 8
    return shmem.scratch(me, shares, gl.float32) + first + within
