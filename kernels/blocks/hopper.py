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


class Factors(NamedTuple):
    """Scales of blocks of a product's operands, BLOCK_K of K long: by what the sums of a step are multiplied."""

    rows: Any  # f32 [steps, rows of all sources], from the first row of a tile on; or None
    row_step: Any  # from one step to the next
    count: Any  # of rows that the source has from there on
    columns: Any  # f32 [steps, blocks of columns], from the block of a tile on; or None
    gates: Any  # the same of the gate, which are the right half of the columns
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
    GATED: gl.constexpr = False,
):  # fmt: skip
    """The product of a partition's rows of what arrives in the next stages, f32, and the position behind them.

    It is NaN if this rank has given up: whoever loaded may not have waited.

    Args:
      position: (stage, phase), (0, 0) in the beginning.
      PARTITION: which of those that multiply calls.
      factors: `Factors` of the partition's rows, or None.
      GATED: whether the right half of the columns is a gate's.
    """
    stage, phase = position
    rhs = ring.half if HALF else ring.rhs
    BLOCK_M: gl.constexpr = ring.lhs.shape[2]
    ROWS: gl.constexpr = ring.results.shape[2]
    BLOCK_N: gl.constexpr = rhs.shape[1] if is_transposed(ring) else rhs.shape[2]
    BLOCK_K: gl.constexpr = ring.lhs.shape[3]
    BLOCKS: gl.constexpr = 2 if HALF else 1
    # Each instruction multiplies 32 bytes of K.
    DEPTH: gl.constexpr = 256 // ring.lhs.dtype.primitive_bitwidth
    # Of integers, Triton has instructions for up to 224 columns.
    COLUMNS: gl.constexpr = min(BLOCK_N, 128) if ring.lhs.dtype == gl.int8 else BLOCK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, DEPTH])
    PROMOTES: gl.constexpr = promotes(ring) or factors is not None
    SUMS: gl.constexpr = gl.int32 if ring.lhs.dtype == gl.int8 else gl.float32
    product = gl.zeros((ROWS, BLOCK_N), gl.float32 if PROMOTES else SUMS, LAYOUT)
    factor = factors_of(factors, 0, ROWS, BLOCK_N, LAYOUT, GATED)
    previous = 0  # not `stage`: Triton would take `previous = stage` in the loop for no change
    for step in range(steps):
        mbarrier.wait(ring.ready.index(stage), phase)
        lhs = ring.lhs.index(stage).reshape([BLOCK_M, BLOCK_K]).slice(PARTITION * ROWS, ROWS)
        columns = rhs.index(stage * BLOCKS)
        if is_transposed(ring):
            columns = columns.permute([1, 0])
        if PROMOTES:
            # While these wait for their sums, the other partition multiplies.
            sums = gl.zeros((ROWS, BLOCK_N), SUMS, LAYOUT)
            sums = warpgroup_mma(lhs, columns, sums, use_acc=False, is_async=True)
            # On their way while this step is multiplied.
            coming = factors_of(factors, gl.minimum(step + 1, steps - 1), ROWS, BLOCK_N, LAYOUT, GATED)
            sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
            mbarrier.arrive(ring.empty.index(stage), count=1)
            if factors is None:
                product += sums
            else:
                product += sums.to(gl.float32) * factor
                factor = coming
        else:
            product = warpgroup_mma(lhs, columns, product, use_acc=step > 0, is_async=True)
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


@gluon.jit
def factors_of(factors, step, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, GATED: gl.constexpr):
    """By what the sums of a step are multiplied, [ROWS, 1], with a gate [ROWS, COLUMNS]; None without `Factors`."""
    factor = None
    if factors is not None:
        row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        factor = (row * 0 + 1).to(gl.float32)
        if factors.rows is not None:
            factor = gl.load(factors.rows + step * factors.row_step + row, mask=row < factors.count, other=1.0)
        factor = factor[:, None]
        one = gl.to_tensor(1.0)
        of_columns = one if factors.columns is None else gl.load(factors.columns + step * factors.column_step)
        if GATED:
            of_gate = one if factors.gates is None else gl.load(factors.gates + step * factors.column_step)
            column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
            factor = factor * gl.where(column < COLUMNS // 2, of_columns, of_gate)
        elif factors.columns is not None:
            factor *= of_columns
    return factor


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
    rows = bundle.member(scales, NAMES, "lhs_blocks")
    columns = bundle.member(scales, NAMES, "rhs_blocks")
    gates = bundle.member(scales, NAMES, "gate_blocks")
    found = None
    if rows is not None or columns is not None or gates is not None:
        first = row + PARTITION * ring.results.shape[2]
        if rows is not None:
            rows += source * M + first
        if columns is not None:
            columns += column // SCALED
        if gates is not None:
            gates += column // SCALED
        found = Factors(rows, SOURCES * M, M - first, columns, gates, gl.cdiv(N, SCALED))
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
