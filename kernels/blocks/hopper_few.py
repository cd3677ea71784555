"""What the kernels for the few rows of a decode step on Hopper share: the product, and how its weights are kept coming.

With few rows a product takes as long as reading `rhs`. It is turned round here: a tile is as many columns of `rhs` as a
warpgroup multiplies rows, by all rows of lhs, so that few rows waste no tensor cores and `rhs` is read once. More than
100 KB of it are on their way to every multiprocessor before anything else is done.

Of more rows than a tile takes there are several blocks of them (`place_of`), and `rhs` is read once for each. A tile
whose rows are no power of 2 is multiplied in two parts, the largest power of 2 and the rest.

Where there are fewer tiles than multiprocessors, several programs share one. Each multiplies a part of K (`share_of`),
and those of the highest ids, the adders, add up the rows of a tile, each some of them: all leave to them what they have
of these rows (`leave`, `wait`, `take`). So an adder may wait for programs that begin after it; there have to be places
for as many programs as share a tile, which start in the order of their ids. If tiles are more than multiprocessors,
those that fill all of these have a program each, and only those left over are shared (`WHOLE`).

With a gate, which is a second matrix of weights, a stage has blocks of both, side by side: the tile has columns of
`rhs` and then of the gate (`product_and_gate`). Of several `rhs` (`blocks.several`) a tile has columns of one.

Weights of 8 bits are half the bytes. Under rows of 16 bits they go through registers, where they become numbers of 16
bits: the tensor cores take their first operand from there, too. Rows of 8 bits are multiplied as they are. Scales that
are the same along K come last (`scale`), those of blocks with each step (`Blocks`).

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
from jaxtaxfree.kernels.blocks import bundle, several, tiles, widen

# Weights are read once. They are not to drive out of the L2 cache what all programs read.
READ_ONCE = gl.constexpr(CachePolicy(l2=FractionalEvictionPolicy("evict_first", 1.0)))
AHEAD = gl.constexpr(8)  # steps of K whose weights `begin` asks for, which keep the memory busy until `load` begins
PIECE = gl.constexpr(8192)  # elements of a tile that are handled at a time
SCALED = gl.constexpr(128)  # of K, and of N, have one scale where scales are of blocks


class Ring(NamedTuple):
    """What lies in shared memory."""

    lhs: Any  # [STAGES, rows of the first part, BLOCK_K]
    rest: Any  # [STAGES, other rows, BLOCK_K], or None
    rhs: Any  # [STAGES, BLOCK_K, columns of a tile]; None if rhs is [N, K]
    transposed: Any  # [STAGES, columns of a tile, BLOCK_K] then, else None
    full: Any  # mbarriers of the stages: all blocks have come
    empty: Any  # they have been multiplied


@triton.constexpr_function
def first_part(block_m):
    """How many rows the first part of a tile has: the largest power of 2. So many as remain have to be one, too."""
    return 1 << (block_m.bit_length() - 1)


@gluon.jit
def allocate(weights, ROWS_TYPE: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr):
    """The program's `Ring`.

    Args:
      ROWS_TYPE: of the elements of lhs.
      weights: a bundle: `rhs` [K, N], and the gate if there is one, in blocks [BLOCK_K, BLOCK_N]; with TRANSPOSED
        [N, K], in blocks [BLOCK_N, BLOCK_K].
    """
    rhs_desc = weights[0]
    BLOCK_K: gl.constexpr = rhs_desc.block_shape[1 if TRANSPOSED else 0]
    COLUMNS: gl.constexpr = rhs_desc.block_shape[0 if TRANSPOSED else 1] * len(weights)
    ROWS: gl.constexpr = first_part(BLOCK_M)
    LHS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_K], ROWS_TYPE)
    lhs = gl.allocate_shared_memory(ROWS_TYPE, [STAGES, ROWS, BLOCK_K], LHS)
    rest = None
    if ROWS < BLOCK_M:
        rest = gl.allocate_shared_memory(ROWS_TYPE, [STAGES, BLOCK_M - ROWS, BLOCK_K], LHS)
    rhs, transposed = None, None
    if TRANSPOSED:
        transposed = gl.allocate_shared_memory(rhs_desc.dtype, [STAGES, COLUMNS, BLOCK_K], rhs_desc.layout)
    else:
        rhs = gl.allocate_shared_memory(rhs_desc.dtype, [STAGES, BLOCK_K, COLUMNS], rhs_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    return Ring(lhs, rest, rhs, transposed, full, empty)


@gluon.jit
def share_of(program, K: gl.constexpr, BLOCK_K: gl.constexpr, SPLITS: gl.constexpr, WHOLE: gl.constexpr):
    """What a program multiplies: (number of its tile, its own among those that share it, first step of K, end).

    Args:
      WHOLE: tiles, the first ones, that nobody shares. Their programs are as the last one of SPLITS, with all steps.
    """
    number = program // SPLITS
    split = program % SPLITS
    if WHOLE > 0:
        whole = program < WHOLE
        number = gl.where(whole, program, WHOLE + (program - WHOLE) // SPLITS)
        split = gl.where(whole, SPLITS - 1, (program - WHOLE) % SPLITS)
    first = split * gl.cdiv(K, BLOCK_K) // SPLITS
    end = (split + 1) * gl.cdiv(K, BLOCK_K) // SPLITS
    if WHOLE > 0:
        first = gl.where(whole, 0, first)
    return number, split, first, end


class Place(NamedTuple):
    """Where a tile is.

    Attributes:
      number: of the tile. Those of the same columns follow each other, and read them together.
      block: of rows, from 0 on.
      row, column: its first ones; the column is one of the rhs to which it belongs.
      rhs: which of several that is; None if there is one.
    """

    number: Any
    block: Any
    row: Any
    column: Any
    rhs: Any


@gluon.jit
def place_of(number, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, N: gl.constexpr = 0):
    """The `Place` of a tile of a product of so many rows.

    Args:
      N: the widths of several rhs.
    """
    BLOCKS: gl.constexpr = gl.cdiv(ROWS, BLOCK_M)
    block = number % BLOCKS
    rhs, column_block = several.block_of(number // BLOCKS, N, BLOCK_N)
    return Place(number, block, block * BLOCK_M, column_block * BLOCK_N, rhs)


@gluon.jit
def begin(ring, weights, place, first, STEPS: gl.constexpr):
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
        fetch_weights(ring, weights, stage, first + stage, place)
    for stage in gl.static_range(FIRST, STAGES):
        mbarrier.init(ring.full.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.empty.index(stage), count=1)
    return FIRST


@gluon.jit
def fetch_weights(ring, weights, stage, step, place):
    """Begins to fill a stage, and announces the block of lhs along with those of the weights."""
    full = ring.full.index(stage)
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    DIMENSION: gl.constexpr = 1 if ring.transposed is None else 0
    if ring.transposed is None:
        dest = ring.rhs.index(stage)
        at = [step * BLOCK_K, place.column]
    else:
        dest = ring.transposed.index(stage)
        at = [place.column, step * BLOCK_K]
    REST: gl.constexpr = 0 if ring.rest is None else ring.rest.index(stage).nbytes_per_cta
    mbarrier.expect(full, ring.lhs.index(stage).nbytes_per_cta + REST + dest.nbytes_per_cta)
    if place.rhs is not None:
        for i in gl.static_range(len(weights)):
            tma.async_load(weights[i], at, full, dest, pred=place.rhs == i, cache_policy=READ_ONCE)
    elif len(weights) == 1:
        tma.async_load(weights[0], at, full, dest, cache_policy=READ_ONCE)
    else:
        BLOCK_N: gl.constexpr = weights[0].block_shape[DIMENSION]
        for i in gl.static_range(len(weights)):
            part = dest.slice(i * BLOCK_N, BLOCK_N, DIMENSION)
            tma.async_load(weights[i], at, full, part, cache_policy=READ_ONCE)


@gluon.jit
def load(ring, lhs_desc, weights, place, ROWS: gl.constexpr, position, first, end, fetched):
    """Fetches what `multiply` needs for some steps of K.

    Args:
      ROWS: of lhs.
      position: the stage of step `first`, and the phase in which it is empty: (0, 1) for the program's first step.
      first, end: the steps.
      fetched: of all steps before this one the weights have been asked for.

    Returns: the position of step `end`.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    BOX: gl.constexpr = lhs_desc.block_shape[0]
    BOXES: gl.constexpr = ring.lhs.shape[1] // BOX
    stage, phase = position
    for step in range(first, end):
        if step >= fetched:
            mbarrier.wait(ring.empty.index(stage), phase)
            fetch_weights(ring, weights, stage, step, place)
        for box in gl.static_range(BOXES):
            at = [tiles.row_of_box(place.row, box, ROWS, BOX), step * BLOCK_K]
            tma.async_load(lhs_desc, at, ring.full.index(stage), ring.lhs.index(stage).slice(box * BOX, BOX))
        if ring.rest is not None:
            for box in gl.static_range(ring.rest.shape[1] // BOX):
                at = [tiles.row_of_box(place.row, BOXES + box, ROWS, BOX), step * BLOCK_K]
                tma.async_load(lhs_desc, at, ring.full.index(stage), ring.rest.index(stage).slice(box * BOX, BOX))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase = phase ^ 1
    return stage, phase


@triton.constexpr_function
def layout_of_sums(block_m, warps):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, block_m, 16])


@triton.constexpr_function
def layout_of_product(block_m, warps, dtype):
    """As the tensor cores have the sums of a product of rows of this type."""
    # Each instruction multiplies 32 bytes of K. Of integers, Triton has instructions for up to 224 rows.
    depth = 256 // dtype.primitive_bitwidth
    return gl.NVMMADistributedLayout(
        [3, 0], [warps, 1], [16, min(block_m, 128) if dtype == gl.int8 else block_m, depth]
    )


class Blocks(NamedTuple):
    """Scales of blocks of a product's operands, SCALED of K long: by what the sums of a step are multiplied.

    Attributes:
      rows: f32 [blocks of K, all rows], or None.
      columns: f32 [blocks of K, blocks of N], or None.
      place: of the tile.
      first: its first step of K.
      count: of all rows.
      width: N.
    """

    rows: Any
    columns: Any
    place: Any
    first: Any
    count: Any
    width: Any


@gluon.jit
def blocks_of(scales, NAMES: gl.constexpr, place, first, ROWS: gl.constexpr, N: gl.constexpr):
    """The `Blocks` of a bundle of scales: "lhs_blocks" and "rhs_blocks"."""
    rows = bundle.member(scales, NAMES, "lhs_blocks")
    columns = bundle.member(scales, NAMES, "rhs_blocks")
    return Blocks(rows, columns, place, first, ROWS, N)


@gluon.jit
def factor_of(blocks, step, ring, sums, before):
    """By what a step's part of sums is multiplied, f32 of their shape or what becomes that; None without scales.

    Args:
      before: rows of the tile before these.
    """
    factor = None
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    COLUMNS: gl.constexpr = sums.shape[0]
    ROWS: gl.constexpr = sums.shape[1]
    LAYOUT: gl.constexpr = layout_of_sums(ROWS, gl.num_warps())
    block = (blocks.first + step) * BLOCK_K // SCALED
    if blocks.columns is not None:
        n = blocks.place.column + gl.arange(0, COLUMNS, gl.SliceLayout(1, LAYOUT))
        at = block * gl.cdiv(blocks.width, SCALED) + n // SCALED
        factor = gl.load(blocks.columns + at, mask=n < blocks.width, other=1.0)[:, None]
    if blocks.rows is not None:
        m = blocks.place.row + before + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
        of_rows = gl.load(blocks.rows + block * blocks.count + m, mask=m < blocks.count, other=1.0)[None, :]
        factor = of_rows if factor is None else factor * of_rows
    return factor


@gluon.jit
def multiply(ring, steps, blocks):
    """The tile, from what `load` fetches, with columns of `rhs`, and of the gate, as its rows: each of its parts.

    Args:
      blocks: `Blocks`.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    PROMOTES: gl.constexpr = blocks.rows is not None or blocks.columns is not None or promotes(ring)
    # Registers from which a product takes its first operand must not be written before it has ended.
    UNDERWAY: gl.constexpr = 0 if widens(ring) else 1
    tile = zeros(ring.lhs, ring, PROMOTES)
    factor = factor_of(blocks, 0, ring, tile, 0)
    if ring.rest is not None:
        rest = zeros(ring.rest, ring, PROMOTES)
        other = factor_of(blocks, 0, ring, rest, ring.lhs.shape[1])
    stage = 0
    phase = 0
    previous = 0
    for step in range(steps):
        mbarrier.wait(ring.full.index(stage), phase)
        lhs = ring.lhs.index(stage).permute((1, 0))
        rhs = columns_of(ring, stage)
        if PROMOTES:
            # On their way while this step is multiplied.
            following = gl.minimum(step + 1, steps - 1)
            coming = factor_of(blocks, following, ring, tile, 0)
            tile = add_step(tile, rhs, lhs, ring, factor)
            if factor is not None:
                factor = coming
            if ring.rest is not None:
                coming = factor_of(blocks, following, ring, rest, ring.lhs.shape[1])
                rest = add_step(rest, beside(rhs, ring), ring.rest.index(stage).permute((1, 0)), ring, other)
                if other is not None:
                    other = coming
            mbarrier.arrive(ring.empty.index(stage), count=1)
        else:
            tile = warpgroup_mma(rhs, lhs, tile, use_acc=step > 0, is_async=True)
            if ring.rest is None:
                tile = warpgroup_mma_wait(num_outstanding=UNDERWAY, deps=(tile,))
            else:
                others = ring.rest.index(stage).permute((1, 0))
                rest = warpgroup_mma(beside(rhs, ring), others, rest, use_acc=step > 0, is_async=True)
                tile, rest = warpgroup_mma_wait(num_outstanding=2 * UNDERWAY, deps=(tile, rest))
            mbarrier.arrive(ring.empty.index(previous), count=1, pred=step > 0)
        previous = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase = phase ^ 1
    if ring.rest is None:
        if not PROMOTES:
            tile = warpgroup_mma_wait(num_outstanding=0, deps=(tile,))
        parts = (as_sums(tile),)
    else:
        if not PROMOTES:
            tile, rest = warpgroup_mma_wait(num_outstanding=0, deps=(tile, rest))
        parts = (as_sums(tile), as_sums(rest))
    return parts


@gluon.jit
def add_step(sums, rhs, lhs, ring, factor):
    """Sums, and the product of a step of K, multiplied by a `factor_of` it."""
    ROWS: gl.constexpr = sums.shape[1]
    TYPE: gl.constexpr = gl.int32 if ring.lhs.dtype == gl.int8 else gl.float32
    LAYOUT: gl.constexpr = layout_of_product(ROWS, gl.num_warps(), ring.lhs.dtype)
    product = gl.zeros((sums.shape[0], ROWS), TYPE, LAYOUT)
    product = warpgroup_mma(rhs, lhs, product, use_acc=False, is_async=True)
    product = as_sums(warpgroup_mma_wait(num_outstanding=0, deps=(product,)))
    if factor is not None:
        product *= factor
    return sums + product


@gluon.jit
def as_sums(tile):
    """A tile as the tensor cores have it as f32, in the `layout_of_sums`."""
    return gl.convert_layout(tile.to(gl.float32), layout_of_sums(tile.shape[1], gl.num_warps()))


@gluon.constexpr_function
def promotes(ring):
    """Whether the sums of a step are added up in f32 outside of the tensor cores, as in `blocks.hopper`."""
    return ring.lhs.dtype.is_fp8()


@gluon.jit
def columns_of(ring, stage):
    """The block of weights in a stage, with their columns as rows: [columns of a tile, BLOCK_K], of the type of lhs.

    It stays where it is, unless it has 8 bits under lhs of 16.
    """
    if ring.transposed is None:
        columns = ring.rhs.index(stage).permute((1, 0))
    elif widens(ring):
        SUMS: gl.constexpr = layout_of_sums(ring.lhs.shape[1], gl.num_warps())
        pairs = widen.pairs(ring.transposed.index(stage))
        columns = widen.block(pairs, ring.transposed.dtype, ring.lhs.dtype, SUMS)
    else:
        columns = ring.transposed.index(stage)
    return columns


@gluon.constexpr_function
def widens(ring):
    """Whether weights become numbers of 16 bits in registers."""
    return ring.transposed is not None and widen.is_wider(ring.lhs.dtype, ring.transposed.dtype)


@gluon.jit
def beside(columns, ring):
    """The same `columns_of`, for the other rows of a tile."""
    if widens(ring):
        SUMS: gl.constexpr = layout_of_sums(ring.rest.shape[1], gl.num_warps())
        columns = gl.convert_layout(columns, gl.DotOperandLayout(0, SUMS, 2))
    return columns


@gluon.jit
def zeros(lhs, ring, PROMOTES: gl.constexpr):
    """What a product begins with of these blocks of lhs."""
    COLUMNS: gl.constexpr = ring.rhs.shape[2] if ring.transposed is None else ring.transposed.shape[1]
    SUMS: gl.constexpr = layout_of_sums(lhs.shape[1], gl.num_warps())
    PRODUCT: gl.constexpr = layout_of_product(lhs.shape[1], gl.num_warps(), lhs.dtype)
    TYPE: gl.constexpr = gl.int32 if lhs.dtype == gl.int8 and not PROMOTES else gl.float32
    return gl.zeros((COLUMNS, lhs.shape[1]), TYPE, SUMS if PROMOTES else PRODUCT)


@gluon.jit
def scales_of_columns(ring, scales, NAMES: gl.constexpr, place, N: gl.constexpr):
    """The scales "rhs" [N], f32, of a tile's columns, which `scale` takes; None if there are none.

    Asked for before the product, they are there when it is done.
    """
    of_columns = bundle.member(scales, NAMES, "rhs")
    found = None
    if of_columns is not None:
        LAYOUT: gl.constexpr = layout_of_sums(ring.lhs.shape[1], gl.num_warps())
        n = place.column + gl.arange(0, ring.transposed.shape[1], gl.SliceLayout(1, LAYOUT))
        found = gl.load(of_columns + n, mask=n < N, other=1.0)
    return found


@gluon.jit
def scale(parts, of_columns, scales, NAMES: gl.constexpr, place, ROWS: gl.constexpr):
    """The parts of a tile, multiplied by `scales_of_columns`, and by the scales "lhs" [ROWS], f32, of its rows."""
    found = ()
    for part in gl.static_range(len(parts)):
        before = 0 if part == 0 else parts[0].shape[1]
        found = found + (_scale_part(parts[part], of_columns, scales, NAMES, place, before, ROWS),)
    return found


@gluon.jit
def _scale_part(tile, of_columns, scales, NAMES: gl.constexpr, place, before, ROWS: gl.constexpr):
    """As `scale`, of a part with so many rows before it."""
    LAYOUT: gl.constexpr = layout_of_sums(tile.shape[1], gl.num_warps())
    if of_columns is not None:
        tile *= gl.convert_layout(of_columns, gl.SliceLayout(1, LAYOUT))[:, None]
    of_rows = bundle.member(scales, NAMES, "lhs")
    if of_rows is not None:
        m = place.row + before + gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
        tile *= gl.load(of_rows + m, mask=m < ROWS, other=1.0)[None, :]
    return tile


class Piece(NamedTuple):
    """Some rows of a tile.

    Attributes:
      sums: columns of `rhs` by rows, in the `layout_of_sums`.
      first: the first 8 rows are those of the tile from 8 * first on,
      apart: and every further 8 those that are 8 * apart after the ones before.
    """

    sums: Any
    first: Any
    apart: Any


@gluon.jit
def pieces(parts, LEAST: gl.constexpr):
    """Each `Piece` of a tile of `multiply`, of the first part first.

    Args:
      LEAST: how many there are at least of each part, a power of 2. There may be more of one, by a power of 2.
    """
    found = ()
    for part in gl.static_range(len(parts)):
        split = halves(parts[part], LEAST)
        for i in gl.static_range(len(split)):
            before = 0 if part == 0 else parts[0].shape[1] // 8
            found = found + (Piece(split[i], before + i, len(split)),)
    return found


@gluon.jit
def halves(part, LEAST: gl.constexpr):
    """A part of a tile divided until no piece has more than PIECE elements.

    One of so many begins with 8 rows of the part, the next one with the next 8, and when all have 8 the first one goes
    on: so no element changes its thread.
    """
    BLOCK_N: gl.constexpr = part.shape[0]
    ROWS: gl.constexpr = part.shape[1]
    if LEAST <= 1 and BLOCK_N * ROWS <= PIECE:
        found = (part,)
    else:
        left, right = part.reshape([BLOCK_N, ROWS // 16, 2, 8]).permute([0, 1, 3, 2]).split()
        HALF: gl.constexpr = ROWS // 2
        SUMS: gl.constexpr = layout_of_sums(HALF, gl.num_warps())
        even = halves(gl.convert_layout(left.reshape([BLOCK_N, HALF]), SUMS), LEAST // 2)
        odd = halves(gl.convert_layout(right.reshape([BLOCK_N, HALF]), SUMS), LEAST // 2)
        found = ()
        for i in gl.static_range(len(even)):
            found = found + (even[i], odd[i])
    return found


@gluon.jit
def rows_of(piece, LAYOUT: gl.constexpr):
    """The rows of the tile that a piece has."""
    return 8 * piece.first + shmem.spread(gl.arange(0, piece.sums.shape[1], LAYOUT), piece.apart)


@gluon.jit
def product_and_gate(sums, LAYOUT: gl.constexpr):
    """The same piece of each of the two products, in this layout."""
    COLUMNS: gl.constexpr = sums.shape[0] // 2
    ROWS: gl.constexpr = sums.shape[1]
    BOTH: gl.constexpr = gl.BlockedLayout([8, 1, 2], [8, 4, 1], [1, gl.num_warps(), 1], [2, 0, 1])
    both = gl.convert_layout(sums.reshape([2, COLUMNS, ROWS]).permute([1, 2, 0]), BOTH)
    product, gate = both.split()
    return gl.convert_layout(product, LAYOUT), gl.convert_layout(gate, LAYOUT)


@gluon.jit
def adder_of(split, SPLITS: gl.constexpr, ADDERS: gl.constexpr):
    """Which one of a tile's adders a program is, or a negative number."""
    return split - (SPLITS - ADDERS)


@gluon.jit
def leave(
    me, parts, shares, left, number, split, BLOCK_M: gl.constexpr, SPLITS: gl.constexpr, WHOLE: gl.constexpr,
    ADDERS: gl.constexpr,
):  # fmt: skip
    """Leaves what a program has of the rows that others add up.

    Args:
      parts: `pieces` of its tile, at least ADDERS. Of each ADDERS that follow each other every adder has one.
      shares: scratch f32 [shared tiles, SPLITS, BLOCK_N * BLOCK_M].
      left: signals [shared tiles].
      number: of the tile.
      WHOLE: as of `share_of`; only a single adder has whole ones.
    """
    if SPLITS > 1:
        adder = adder_of(split, SPLITS, ADDERS)
        for i in gl.static_range(len(parts)):
            if adder != i % ADDERS:
                gl.store(place_in(me, parts[i], shares, number - WHOLE, split, BLOCK_M, SPLITS), parts[i].sums)
        if split < signals(SPLITS, ADDERS):
            shmem.signal(me, left + (number - WHOLE), me.rank)


@triton.constexpr_function
def signals(splits, adders):
    """How many of the programs that share a tile leave something: a single adder does not."""
    return splits if adders > 1 else splits - 1


@gluon.jit
def wait(me, left, number, SPLITS: gl.constexpr, WHOLE: gl.constexpr, ADDERS: gl.constexpr):
    """Waits for what others leave to the adders of a tile: whether it has come."""
    came = me.ready
    if SPLITS > 1:
        if number >= WHOLE:
            came = shmem.wait(me, left + (number - WHOLE), me.epoch * signals(SPLITS, ADDERS), me.rank)
    return came


@gluon.jit
def take(
    me, parts, shares, number, split, i: gl.constexpr, BLOCK_M: gl.constexpr, SPLITS: gl.constexpr,
    WHOLE: gl.constexpr, ADDERS: gl.constexpr,
):  # fmt: skip
    """What an adder adds up: one of the `parts` from number i * ADDERS on, and what others have left of it."""
    adder = adder_of(split, SPLITS, ADDERS)
    total = parts[i * ADDERS].sums
    for mine in gl.static_range(1, ADDERS):
        total = gl.where(adder == mine, parts[i * ADDERS + mine].sums, total)
    piece = Piece(total, parts[i * ADDERS].first + adder, parts[i * ADDERS].apart)
    if SPLITS > 1:
        programs = SPLITS
        if WHOLE > 0:
            programs = gl.where(number < WHOLE, 1, SPLITS)
        for after in range(1, programs):  # no static_range: there are no registers for all of them
            other = (split + after) % SPLITS
            total += gl.load(place_in(me, piece, shares, number - WHOLE, other, BLOCK_M, SPLITS))
    return Piece(total, piece.first, piece.apart)


@gluon.jit
def place_in(me, piece, shares, number, split, BLOCK_M: gl.constexpr, SPLITS: gl.constexpr):
    """Where the elements of a piece lie that a program leaves: 8 columns of 8 rows together, as a warp has them."""
    COLUMNS: gl.constexpr = piece.sums.shape[0]
    ROWS: gl.constexpr = piece.sums.shape[1]
    SUMS: gl.constexpr = layout_of_sums(ROWS, gl.num_warps())
    first = (number * SPLITS + split) * (COLUMNS * BLOCK_M)
    n = gl.arange(0, COLUMNS, gl.SliceLayout(1, SUMS))[:, None]
    m = gl.arange(0, ROWS, gl.SliceLayout(0, SUMS))[None, :]
    within = ((piece.first + m // 8 * piece.apart) * (COLUMNS // 8) + n // 8) * 64 + n % 8 * 8 + m % 8
    return shmem.scratch(me, shares, gl.float32) + first + within
