"""A matrix product by parts, for Gluon kernels on Hopper: tiles loaded by TMA, multiplied by warpgroups, stored by TMA.

A kernel of persistent programs has one warp that loads (`load_steps`) and eight that multiply (`multiply_tile`,
`store_tile`), in two partitions, each of which multiplies half of the rows of all tiles. Each partition has its own
loop over the program's tiles, the same tiles in the same order, and they meet at the stages of a `Ring`. The loop that
loads may wait, before any step, for what it loads: the others then wait for it. Those that multiply do not wait for
each other, so that one stores while the other one multiplies. What is to be added to a product may come by the same
stages (`load_block`, `take_block`).

The left-hand side is [sources, M, K] and the result [destinations, M, N], so that TMA clips the rows of each source by
itself, and M, N, K may be anything of which TMA can take rows (multiples of 16 bytes).

    position = (0, 1)                              | position = (0, 0)
    for tile in range(id, whole, programs):        | for tile in range(id, whole, programs):
        position = load_steps(ring, position, ...) |     product, *position = multiply_tile(me, ring, position, ...)
                                                   |     store_tile(out_desc, ring, product, ...)
    for half in range(2 * whole + id, ...):        | for half in range(2 * whole + id, ...): ...
                                                   | finish_stores()

Of a last wave that is at most half full the programs compute half tiles: `whole` says how many tiles come before.

With a gate, which is a second array of columns, a stage has half as many columns of each, side by side (of arrays
[N, K] one above the other): the two products are the `halves` of one.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.blocks import bundle, epilogue, tiles

SCALED = gl.constexpr(128)  # columns of rhs that have one scale, and steps of K, where scales are of blocks
PROMOTED = gl.constexpr(128)  # columns of which the registers hold the sums of a step beside those of all steps


class Factors(NamedTuple):
    """Scales of blocks of a product's operands, BLOCK_K of K long: by what the sums of a step are multiplied."""

    rows: Any  # f32, from that of the first row of a tile on; or None
    row_step: Any  # from one step to the next
    row_stride: Any  # from one row to the next
    count: Any  # of rows that have some from there on
    columns: Any  # f32, from that of the block of columns of a tile on; or None
    gates: Any  # the same of the gate, which are the right half of the columns
    further: Any  # from the block of columns of a tile to that of its right half if it has two; 0 beyond the last
    column_step: Any


class Ring(NamedTuple):
    """The shared memory of a program: the stages between loads and products, and what waits to be stored."""

    ready: Any  # mbarriers [STAGES]: the stage is loaded
    empty: Any  # mbarriers [STAGES]: all partitions have multiplied the stage
    lhs: Any  # [STAGES, 1, BLOCK_M, BLOCK_K]
    rhs: Any  # [STAGES, BLOCK_K, BLOCK_N], or [STAGES, BLOCK_N, BLOCK_K] of a transposed array
    half: Any  # the same memory for half tiles: [2 * STAGES, BLOCK_K, BLOCK_N // 2], of which every other one is used
    results: Any  # [2 * partitions, 1, rows of a partition, columns that are stored at a time]


@gluon.jit
def whole(tiles):
    """How many of a program's tiles are computed whole, when they are dealt out in turn."""
    rest = tiles % gl.num_programs(0)
    return gl.where(2 * rest <= gl.num_programs(0), tiles - rest, tiles)


@gluon.jit
def allocate(
    lhs_desc, rhs_desc, half_desc, out_desc, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr = False
):
    """The program's `Ring`. Called by the kernel itself, before `gl.warp_specialize`.

    Args:
      lhs_desc: boxes [1, rows, BLOCK_K], see `tiles.box_of`.
      rhs_desc: blocks [BLOCK_K, BLOCK_N]; of an array [N, K] blocks [BLOCK_N, BLOCK_K].
      half_desc: of the same array, blocks of half the columns.
      out_desc: blocks [1, rows, columns], of which a tile has powers of 2: the rows that a partition multiplies.
      GATED: whether a stage has a block of each of two arrays.
    """
    BLOCK_K: gl.constexpr = lhs_desc.block_type.shape[2]
    RHS: gl.constexpr = rhs_desc.block_type.shape
    HALF: gl.constexpr = half_desc.block_type.shape
    ROWS: gl.constexpr = out_desc.block_type.shape[1]
    COLUMNS: gl.constexpr = out_desc.block_type.shape[2]
    PARTITIONS: gl.constexpr = BLOCK_M // ROWS
    lhs = gl.allocate_shared_memory(lhs_desc.dtype, [STAGES, 1, BLOCK_M, BLOCK_K], lhs_desc.layout)
    # Where half a tile has half of the first dimension that has the columns.
    DOWN: gl.constexpr = 2 if GATED and HALF[0] != RHS[0] else 1
    ACROSS: gl.constexpr = 2 if GATED and HALF[0] == RHS[0] else 1
    rhs = gl.allocate_shared_memory(rhs_desc.dtype, [STAGES, DOWN * RHS[0], ACROSS * RHS[1]], rhs_desc.layout)
    half = rhs.reinterpret(rhs_desc.dtype, [2 * STAGES, DOWN * HALF[0], ACROSS * HALF[1]], half_desc.layout)
    results = gl.allocate_shared_memory(out_desc.dtype, [2 * PARTITIONS, 1, ROWS, COLUMNS], out_desc.layout)
    ready = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=PARTITIONS)
    return Ring(ready, empty, lhs, rhs, half, results)


@gluon.constexpr_function
def is_transposed(ring):
    """Whether rhs is [N, K]: then half a tile has half of the first dimension."""
    return ring.half.shape[1] != ring.rhs.shape[1]


@gluon.constexpr_function
def stages_of(ring):
    return ring.rhs.shape[0]


@gluon.jit
def load_steps(
    ring, position, lhs_desc, source, row, ROWS: gl.constexpr, rhs_desc, column, first, end, HALF: gl.constexpr,
    gate_desc=None, above=0,
):  # fmt: skip
    """Loads the steps of K from `first` to before `end` into the next stages: the position behind them.

    Args:
      position: (stage, phase), (0, 1) in the beginning.
      source, row: of the block of lhs, of whose sources each has so many ROWS.
      rhs_desc: `half_desc` for half tiles.
      column: of the block of `rhs_desc`.
      HALF: whether that is a half tile.
      gate_desc: of a gate, blocks like those of `rhs_desc`, which come to lie right of them, or below.
      above: how many rows of rhs belong to sources before this one.
    """
    stage, phase = position
    BLOCK_M: gl.constexpr = ring.lhs.shape[2]
    BLOCK_K: gl.constexpr = ring.lhs.shape[3]
    BOX: gl.constexpr = lhs_desc.block_type.shape[1]
    PRODUCTS: gl.constexpr = 1 if gate_desc is None else 2
    for step in range(first, end):
        bar = ring.ready.index(stage)
        mbarrier.wait(ring.empty.index(stage), phase)
        lhs = ring.lhs.index(stage)
        mbarrier.expect(bar, lhs.nbytes_per_cta + PRODUCTS * rhs_desc.nbytes_per_cta)
        for box in gl.static_range(BLOCK_M // BOX):
            at = [source, tiles.row_of_box(row, box, ROWS, BOX), step * BLOCK_K]
            tma.async_load(lhs_desc, at, bar, lhs.slice(box * BOX, BOX, 1))
        dest = ring.half.index(2 * stage) if HALF else ring.rhs.index(stage)
        if gate_desc is not None and is_transposed(ring):
            LINES: gl.constexpr = rhs_desc.block_type.shape[0]
            tma.async_load(rhs_desc, [column, above + step * BLOCK_K], bar, dest.slice(0, LINES, 0))
            tma.async_load(gate_desc, [column, above + step * BLOCK_K], bar, dest.slice(LINES, LINES, 0))
        elif gate_desc is not None:
            COLUMNS: gl.constexpr = rhs_desc.block_type.shape[1]
            tma.async_load(rhs_desc, [above + step * BLOCK_K, column], bar, dest.slice(0, COLUMNS, 1))
            tma.async_load(gate_desc, [above + step * BLOCK_K, column], bar, dest.slice(COLUMNS, COLUMNS, 1))
        elif is_transposed(ring):
            tma.async_load(rhs_desc, [column, above + step * BLOCK_K], bar, dest)
        else:
            tma.async_load(rhs_desc, [above + step * BLOCK_K, column], bar, dest)
        stage, phase = following(stage, phase, ring.lhs.shape[0])
    return stage, phase


@gluon.jit
def multiply_tile(
    me, ring, position, steps, HALF: gl.constexpr, PARTITION: gl.constexpr = 0, factors=None,
    GATED: gl.constexpr = False, FAST_SUMS: gl.constexpr = False,
):  # fmt: skip
    """The product of a partition's rows of what arrives in the next stages, f32, and the position behind them.

    It is NaN if this rank has given up: whoever loaded may not have waited.

    Args:
      position: (stage, phase), (0, 0) in the beginning.
      PARTITION: which of those that multiply calls.
      factors: `Factors` of the partition's rows, or None.
      GATED: whether the right half of the columns is a gate's.
      FAST_SUMS: whether tensor cores add up sums that otherwise `promotes` says are added up outside of them.
    """
    stage, phase = position
    rhs = ring.half if HALF else ring.rhs
    ROWS: gl.constexpr = ring.results.shape[2]
    BLOCK_N: gl.constexpr = rhs.shape[1] if is_transposed(ring) else rhs.shape[2]
    LAYOUT: gl.constexpr = layout_of(ring, BLOCK_N, gl.num_warps())
    PROMOTES: gl.constexpr = (promotes(ring) and not FAST_SUMS) or factors is not None
    if PROMOTES:
        if factors is not None:
            WIDE: gl.constexpr = BLOCK_N > PROMOTED
            product, stage, phase = multiply_scaled(ring, position, steps, HALF, PARTITION, factors, GATED, WIDE)
        elif BLOCK_N > PROMOTED:
            product, stage, phase = multiply_halves(ring, position, steps, HALF, PARTITION)
        else:
            product = gl.zeros((ROWS, BLOCK_N), gl.float32, LAYOUT)
            for _ in range(steps):
                mbarrier.wait(ring.ready.index(stage), phase)
                product += sums_of_step(ring, stage, HALF, PARTITION, 0, BLOCK_N)
                mbarrier.arrive(ring.empty.index(stage), count=1)
                stage, phase = following(stage, phase, ring.lhs.shape[0])
    else:
        product = gl.zeros((ROWS, BLOCK_N), gl.int32 if ring.lhs.dtype == gl.int8 else gl.float32, LAYOUT)
        previous = 0  # not `stage`: Triton would take `previous = stage` in the loop for no change
        for step in range(steps):
            mbarrier.wait(ring.ready.index(stage), phase)
            rows, columns = operands_of(ring, stage, HALF, PARTITION, 0, BLOCK_N)
            product = warpgroup_mma(rows, columns, product, use_acc=step > 0, is_async=True)
            product = warpgroup_mma_wait(num_outstanding=1, deps=(product,))
            mbarrier.arrive(ring.empty.index(previous), count=1, pred=step > 0)
            previous = stage
            stage, phase = following(stage, phase, ring.lhs.shape[0])
    # On its way while the last step is multiplied.
    failed = shmem.failed(me)
    if not PROMOTES:
        product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
        mbarrier.arrive(ring.empty.index(previous), count=1)
    # A product, because ptxas takes a choice for a use of the sums within the loop, and no longer overlaps its steps.
    return product.to(gl.float32) * gl.where(failed, float("nan"), 1.0), stage, phase


@gluon.constexpr_function
def layout_of(ring, columns, num_warps):
    """How the warps that multiply hold so many columns of a product."""
    bits = ring.lhs.dtype.primitive_bitwidth
    # Each instruction multiplies 32 bytes of K; of integers, Triton has instructions for up to 224 columns.
    wide = min(columns, 128) if ring.lhs.dtype == gl.int8 else columns
    return gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, wide, 256 // bits])


@gluon.jit
def operands_of(ring, stage, HALF: gl.constexpr, PARTITION: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """A partition's rows of a stage, and so many of its columns from the FIRST on.

    Args:
      ring: a `Ring`, or that of a product by groups, whose partitions have blocks of rows of their own, and columns as
        [STAGES, 1, columns, BLOCK_K].
    """
    if len(ring.lhs.shape) == 3:
        PARTITIONS: gl.constexpr = ring.lhs.shape[0] // ring.rhs.shape[0]
        lhs = ring.lhs.index(stage * PARTITIONS + PARTITION)
        columns = ring.rhs.index(stage).reshape([ring.rhs.shape[2], ring.rhs.shape[3]])
        TRANSPOSED: gl.constexpr = True
    else:
        BLOCK_M: gl.constexpr = ring.lhs.shape[2]
        BLOCK_K: gl.constexpr = ring.lhs.shape[3]
        ROWS: gl.constexpr = ring.results.shape[2]
        lhs = ring.lhs.index(stage).reshape([BLOCK_M, BLOCK_K]).slice(PARTITION * ROWS, ROWS)
        columns = ring.half.index(2 * stage) if HALF else ring.rhs.index(stage)
        TRANSPOSED: gl.constexpr = is_transposed(ring)
    if TRANSPOSED:
        if columns.shape[0] > COLUMNS:
            columns = columns.slice(FIRST, COLUMNS, 0)
        columns = columns.permute([1, 0])
    return lhs, columns


@gluon.jit
def sums_of_step(ring, stage, HALF: gl.constexpr, PARTITION: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """What a stage adds to these columns of a product. While this waits, the other partition multiplies."""
    rows, columns = operands_of(ring, stage, HALF, PARTITION, FIRST, COLUMNS)
    LAYOUT: gl.constexpr = layout_of(ring, COLUMNS, gl.num_warps())
    SUMS: gl.constexpr = gl.int32 if ring.lhs.dtype == gl.int8 else gl.float32
    sums = gl.zeros((ring.results.shape[-2], COLUMNS), SUMS, LAYOUT)
    sums = warpgroup_mma(rows, columns, sums, use_acc=False, is_async=True)
    sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    return sums.to(gl.float32)


@gluon.jit
def multiply_halves(ring, position, steps, HALF: gl.constexpr, PARTITION: gl.constexpr):
    """A product of many columns, whose sums of a step the registers hold of half of the columns at a time."""
    stage, phase = position
    ROWS: gl.constexpr = ring.results.shape[2]
    COLUMNS: gl.constexpr = (ring.half if HALF else ring.rhs).shape[1] // 2
    LAYOUT: gl.constexpr = layout_of(ring, COLUMNS, gl.num_warps())
    left = gl.zeros((ROWS, COLUMNS), gl.float32, LAYOUT)
    right = gl.zeros((ROWS, COLUMNS), gl.float32, LAYOUT)
    for _ in range(steps):
        mbarrier.wait(ring.ready.index(stage), phase)
        left += sums_of_step(ring, stage, HALF, PARTITION, 0, COLUMNS)
        right += sums_of_step(ring, stage, HALF, PARTITION, COLUMNS, COLUMNS)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        stage, phase = following(stage, phase, ring.lhs.shape[0])
    return beside(ring, left, right), stage, phase


@gluon.jit
def beside(ring, left, right):
    """The two halves of a product as one."""
    COLUMNS: gl.constexpr = 2 * left.shape[1]
    product = gl.join(left, right).permute([0, 2, 1]).reshape([left.shape[0], COLUMNS])
    return gl.convert_layout(product, layout_of(ring, COLUMNS, gl.num_warps()), assert_trivial=True)


@gluon.jit
def multiply_scaled(
    ring, position, steps, HALF: gl.constexpr, PARTITION: gl.constexpr, factors, GATED: gl.constexpr,
    WIDE: gl.constexpr,
):  # fmt: skip
    """A product whose steps have scales of their own, of no steps zeros.

    Scales are loaded as soon as those of the same registers have been used, two steps before their own: they come from
    the L2 cache, which takes longer than a step.

    Args:
      WIDE: the registers hold the sums of a step of half of the columns at a time, and each half has its own scale.
        Such a step takes longer than the scales, and there are no registers for those of two.
    """
    ROWS: gl.constexpr = ring.results.shape[-2]
    COLUMNS: gl.constexpr = (ring.half if HALF else ring.rhs).shape[-2] // (2 if WIDE else 1)
    LAYOUT: gl.constexpr = layout_of(ring, COLUMNS, gl.num_warps())
    stage, phase = position
    last = gl.maximum(steps - 1, 0)
    product = (gl.zeros((ROWS, COLUMNS), gl.float32, LAYOUT),)
    if WIDE:
        product = product + (gl.zeros((ROWS, COLUMNS), gl.float32, LAYOUT),)
    scales = factors_of(factors, 0, ROWS, LAYOUT, WIDE)
    if WIDE:
        for step in range(steps):
            product, stage, phase = add_step(ring, stage, phase, product, scales, HALF, PARTITION, GATED)
            scales = factors_of(factors, gl.minimum(step + 1, last), ROWS, LAYOUT, WIDE)
        found = beside(ring, product[0], product[1])
    else:
        coming = factors_of(factors, gl.minimum(1, last), ROWS, LAYOUT, WIDE)
        for pair in range(steps // 2):
            product, stage, phase = add_step(ring, stage, phase, product, scales, HALF, PARTITION, GATED)
            scales = factors_of(factors, gl.minimum(2 * pair + 2, last), ROWS, LAYOUT, WIDE)
            product, stage, phase = add_step(ring, stage, phase, product, coming, HALF, PARTITION, GATED)
            coming = factors_of(factors, gl.minimum(2 * pair + 3, last), ROWS, LAYOUT, WIDE)
        if steps % 2 == 1:
            product, stage, phase = add_step(ring, stage, phase, product, scales, HALF, PARTITION, GATED)
        found = product[0]
    return found, stage, phase


@gluon.jit
def add_step(ring, stage, phase, product, scales, HALF: gl.constexpr, PARTITION: gl.constexpr, GATED: gl.constexpr):
    """A product, one or two halves, with that of one more stage, times `factors_of` it, and the position behind it."""
    COLUMNS: gl.constexpr = product[0].shape[1]
    rows, left, right = scales
    mbarrier.wait(ring.ready.index(stage), phase)
    sums = sums_of_step(ring, stage, HALF, PARTITION, 0, COLUMNS)
    if len(product) == 2:
        first = product[0] + sums * (rows * left)
        sums = sums_of_step(ring, stage, HALF, PARTITION, COLUMNS, COLUMNS)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        total = (first, product[1] + sums * (rows * right))
    else:
        mbarrier.arrive(ring.empty.index(stage), count=1)
        factor = rows * left
        if GATED:
            LAYOUT: gl.constexpr = layout_of(ring, COLUMNS, gl.num_warps())
            column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
            factor = rows * gl.where(column < COLUMNS // 2, left, right)
        total = (product[0] + sums * factor,)
    stage, phase = following(stage, phase, stages_of(ring))
    return total, stage, phase


@gluon.jit
def factors_of(factors, step, ROWS: gl.constexpr, LAYOUT: gl.constexpr, WIDE: gl.constexpr):
    """By what the sums of a step are multiplied: rows [ROWS, 1], and all columns, or the left and the right half."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    rows = (row * 0 + 1).to(gl.float32)
    if factors.rows is not None:
        rows = gl.load(
            factors.rows + step * factors.row_step + row * factors.row_stride, mask=row < factors.count, other=1.0
        )
    left = gl.to_tensor(1.0)
    right = gl.to_tensor(1.0)
    if factors.columns is not None:
        left = gl.load(factors.columns + step * factors.column_step)
    if factors.gates is not None:
        right = gl.load(factors.gates + step * factors.column_step)
    elif WIDE and factors.columns is not None:
        right = gl.load(factors.columns + step * factors.column_step + factors.further)
    return rows[:, None], left, right


@gluon.constexpr_function
def promotes(ring):
    """Whether the sums of a step are added up in f32 outside of the tensor cores, which keep some 14 bits of products
    of 8-bit floating-point numbers (DeepSeek-V3 technical report, arXiv 2412.19437, section 3.3.2)."""
    return ring.lhs.dtype.is_fp8()


@gluon.jit
def scale(
    ring, tile, scales, NAMES: gl.constexpr, NAME: gl.constexpr, source, row, M: gl.constexpr, column, N: gl.constexpr,
    PARTITION: gl.constexpr,
):  # fmt: skip
    """A partition's rows of a tile, multiplied by the scales of its rows and of its columns.

    Args:
      scales: the bundle of scales: "lhs" [sources * M], and one of [N] of this NAME, all f32.
      source, row, column: where the tile begins.
    """
    of_rows = bundle.member(scales, NAMES, "lhs")
    if of_rows is not None:
        m = row + PARTITION * ring.results.shape[2] + gl.arange(0, tile.shape[0])
        tile *= gl.load(of_rows + source * M + m, mask=m < M, other=1.0)[:, None]
    of_columns = bundle.member(scales, NAMES, NAME)
    if of_columns is not None:
        n = column + gl.arange(0, tile.shape[1])
        tile *= gl.load(of_columns + n, mask=n < N, other=1.0)[None, :]
    return tile


@gluon.jit
def scales_of_blocks(
    ring, scales, NAMES: gl.constexpr, source, SOURCES: gl.constexpr, row, M: gl.constexpr, column, N: gl.constexpr,
    PARTITION: gl.constexpr,
):  # fmt: skip
    """The scales of blocks of a partition's rows of a tile, or None if there are none.

    Args:
      scales: the bundle of scales: "lhs_blocks" [steps, SOURCES * M], and "rhs_blocks" and "gate_blocks" [steps, blocks
        of N], all f32.
      source, row, column: where the tile begins.
    """
    first = row + PARTITION * ring.results.shape[2]
    rows = bundle.member(scales, NAMES, "lhs_blocks")
    columns = bundle.member(scales, NAMES, "rhs_blocks")
    gates = bundle.member(scales, NAMES, "gate_blocks")
    found = None
    if rows is not None or columns is not None or gates is not None:
        BLOCKS: gl.constexpr = gl.cdiv(N, SCALED)
        if rows is not None:
            rows += source * M + first
        if columns is not None:
            columns += column // SCALED
        if gates is not None:
            gates += column // SCALED
        further = gl.minimum(1, BLOCKS - 1 - column // SCALED)
        found = Factors(rows, SOURCES * M, 1, M - first, columns, gates, further, BLOCKS)
    return found


@gluon.jit
def load_block(ring, position, desc, at):
    """Loads a block of an array into the next stage, in place of columns: the position behind it.

    Args:
      position: as of `load_steps`.
      desc: of the array, in blocks of at most the size of those of `rhs_desc`.
      at: the first element of the block.
    """
    stage, phase = position
    bar = ring.ready.index(stage)
    dest = ring.rhs.index(stage).reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    mbarrier.wait(ring.empty.index(stage), phase)
    mbarrier.expect(bar, desc.nbytes_per_cta)
    tma.async_load(desc, at, bar, dest)
    return following(stage, phase, ring.lhs.shape[0])


@gluon.jit
def take_block(
    ring,
    position,
    dtype: gl.constexpr,
    SHAPE: gl.constexpr,
    SHARED: gl.constexpr,
    LAYOUT: gl.constexpr,
    DIMENSION: gl.constexpr,
    PARTITION: gl.constexpr = 0,
):
    """A partition's part of what `load_block` brings into the next stage, and the position behind it.

    Args:
      position: as of `multiply_tile`.
      dtype, SHAPE, SHARED: how it lies there.
      LAYOUT: that the part is to have.
      DIMENSION: which is divided among the partitions.
      PARTITION: as of `multiply_tile`.
    """
    stage, phase = position
    PART: gl.constexpr = SHAPE[DIMENSION] * ring.results.shape[2] // ring.lhs.shape[2]
    source = ring.rhs.index(stage).reinterpret(dtype, SHAPE, SHARED).slice(PARTITION * PART, PART, DIMENSION)
    mbarrier.wait(ring.ready.index(stage), phase)
    block = source.load(LAYOUT)
    fence_async_shared()  # between these reads and what TMA, which takes another path, writes here next
    mbarrier.arrive(ring.empty.index(stage), count=1)
    return block, following(stage, phase, ring.lhs.shape[0])


@gluon.jit
def halves(tile):
    """The left and the right half of the columns of a tile."""
    return tile.reshape([tile.shape[0], 2, tile.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def activate(tile, gate, last, column, N: gl.constexpr, ACTIVATION: gl.constexpr):
    """activation(tile + bias), or activation(gate) * (tile + bias) if there is a gate.

    Args:
      last: an `epilogue.Epilogue`. What it says of a residual is left to the caller.
      column: of the tile's first elements.
      ACTIVATION: see `epilogue.activate`.
    """
    if last.bias is not None:
        n = column + gl.arange(0, tile.shape[1])
        tile += gl.load(last.bias + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    return epilogue.activate_gated(tile, gate, ACTIVATION)


@gluon.jit
def store_tile(out_desc, ring, tile, destination, row, column, PIECE: gl.constexpr = 0, PARTITION: gl.constexpr = 0):
    """Begins to store a partition's rows of a tile, some columns after the others.

    Args:
      row: the first of the tile.
      PIECE: how many pieces of the tile come before, an even number for a whole tile.
      PARTITION: as of `multiply_tile`.
    """
    ROWS: gl.constexpr = tile.shape[0]
    BLOCK_N: gl.constexpr = tile.shape[1]
    COLUMNS: gl.constexpr = ring.results.shape[3]
    if BLOCK_N > COLUMNS:
        left, right = halves(tile)
        AFTER: gl.constexpr = PIECE + BLOCK_N // 2 // COLUMNS
        store_tile(out_desc, ring, left, destination, row, column, PIECE, PARTITION)
        store_tile(out_desc, ring, right, destination, row, column + BLOCK_N // 2, AFTER, PARTITION)
    else:
        buffer = ring.results.index(2 * PARTITION + PIECE % 2)
        tma.store_wait(1)
        buffer.reshape([ROWS, COLUMNS]).store(tile.to(out_desc.dtype))
        fence_async_shared()
        tma.async_store(out_desc, [destination, row + PARTITION * ROWS, column], buffer)


@gluon.jit
def finish_stores():
    """Waits until what was to be stored has been read. Behind the last tile."""
    tma.store_wait(0)


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The position behind a stage."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
