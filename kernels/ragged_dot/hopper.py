"""`ragged_dot` and the gradient of its weights in one Gluon kernel for Hopper.

Persistent programs, one for each multiprocessor. In each, one warp brings tiles into shared memory by TMA, and one or
two groups of four warps multiply 64 rows of a tile each, as in `kernels/blocks/hopper.py`. Tiles of all groups are
numbered one after the other and dealt out in waves. Every warp reads the sizes of all groups once, and finds by itself
to which group a tile belongs.

A tile has rows of one group alone. Where the group ends within it, TMA stores no further, and 64 rows that are all
behind the end are neither loaded nor multiplied. In the gradient of the weights, where rows are contracted, TMA loads
no further: what is behind the end comes as zeros. Both by ragged descriptors, see `described_as` in jaxtaxfree/call.py.

Operands of 8 bits lie along K alone (`TRANSPOSED`), as the tensor cores take them, and what is added up is multiplied
by scales of rows and of each group's columns before anything else becomes of it. Scales of blocks are those of every
step, with the functions of `blocks/hopper.py`. Sums of 8-bit floating-point numbers leave the tensor cores after every
step, see `blocks.hopper.promotes`.

With few rows of a group a tile is turned round (`TURNED`), as in `kernels/blocks/hopper_few.py`: the weights' columns
are what the tensor cores take as rows, and each partition has some of the columns, and all rows. So few rows waste
little, and weights of 8 bits under rows of 16 become numbers of 16 bits in registers, from which the tensor cores take
their first operand.
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

from jaxtaxfree.kernels.blocks import bundle, epilogue, hopper_few, ragged, widen
from jaxtaxfree.kernels.blocks import hopper as blocks


class Ring(NamedTuple):
    """The shared memory of a program: the stages between loads and products, and what waits to be stored."""

    ready: Any  # mbarriers [STAGES]: the stage is loaded
    empty: Any  # mbarriers [STAGES]: all partitions have multiplied the stage
    lhs: Any  # [STAGES * LHS_PARTS, block of lhs]
    rhs: Any  # [STAGES, block of rhs], with a gate that of both side by side, or with TRANSPOSED one above the other
    results: Any  # [2 * PARTITIONS, block of the result]; with TURNED, of which a part of a tile has one, half as many


class Work(NamedTuple):
    """What of a call is constant."""

    M: Any
    N: Any
    K: Any
    GROUPS: Any
    BLOCK_M: Any
    PARTITIONS: Any
    ROWS: Any  # of a tile that a partition multiplies
    BLOCK_N: Any
    BLOCK_K: Any
    GROUP_M: Any
    STAGES: Any
    GATED: Any
    TRANSPOSED: Any
    TURNED: Any
    OUTER: Any
    SCALES: Any
    ACTIVATION: Any
    FILL: Any


ROWS = gl.constexpr(64)  # that a partition multiplies, unless the tile is turned round


@gluon.jit
def ragged_dot_hopper_kernel(
    lhs_desc,  # [M, K], in blocks [rows of a partition, BLOCK_K]; with OUTER ragged, in blocks [1, 1, BLOCK_K, ROWS]
    weights,  # rhs, and gate if any, [GROUPS, K, N] in blocks [1, BLOCK_K, BLOCK_N], or with TRANSPOSED [GROUPS, N, K]
    # in blocks [1, BLOCK_N, BLOCK_K]; with OUTER [M, N], ragged, in blocks [1, 1, BLOCK_K, BLOCK_N]
    sizes_ptr,  # i32 [GROUPS]
    scales,  # of operands of 8 bits what there is of lhs [M], rhs [GROUPS, N] and gate [GROUPS, N], f32; of blocks
    # lhs_blocks [M, blocks of K], rhs_blocks and gate_blocks [GROUPS, blocks of N, blocks of K]
    out_desc,  # [M, N], ragged, in blocks [1, 1, ROWS, columns]; with OUTER [GROUPS, K, N], blocks [1, ROWS, columns]
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr,  # ROWS, or twice as many; with TURNED a power of 2 from 8 on
    BLOCK_N: gl.constexpr,  # of each product, if there is a gate
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    PARTITIONS: gl.constexpr,  # that multiply, one or two
    TRANSPOSED: gl.constexpr,
    TURNED: gl.constexpr,  # only with TRANSPOSED
    OUTER: gl.constexpr,  # the result is lhs^T @ rhs of each group
    SCALES: gl.constexpr,  # the names of `scales`
    ACTIVATION: gl.constexpr,  # see `epilogue.activate`
    FILL: gl.constexpr,  # rows behind the last group are zeros, or whatever was there
):
    gl.static_assert(gl.num_warps() == 4, "each partition that multiplies has four warps")
    GATED: gl.constexpr = len(weights) > 1
    PART: gl.constexpr = BLOCK_M if TURNED else BLOCK_M // PARTITIONS
    work: gl.constexpr = Work(
        M, N, K, GROUPS, BLOCK_M, PARTITIONS, PART, BLOCK_N, BLOCK_K, GROUP_M, STAGES, GATED, TRANSPOSED, TURNED,
        OUTER, SCALES, ACTIVATION, FILL,
    )  # fmt: skip
    ring = allocate(lhs_desc, weights[0], out_desc, work)
    if PARTITIONS == 1:
        gl.warp_specialize(
            [
                (multiply, (ring, out_desc, sizes_ptr, scales, work, 0)),
                (load, (ring, lhs_desc, weights, sizes_ptr, work)),
            ],
            [1],
            [96],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (ring, out_desc, sizes_ptr, scales, work, 0)),
                (multiply, (ring, out_desc, sizes_ptr, scales, work, 1)),
                (load, (ring, lhs_desc, weights, sizes_ptr, work)),
            ],
            [4, 1],
            [208, 88],
        )


@gluon.jit
def allocate(lhs_desc, rhs_desc, out_desc, work):
    """The program's `Ring`."""
    PARTS: gl.constexpr = work.STAGES * lhs_parts(work)
    COLUMNS: gl.constexpr = (2 if work.GATED else 1) * work.BLOCK_N
    STORED: gl.constexpr = out_desc.block_type.shape[-1]
    if work.OUTER:
        lhs = gl.allocate_shared_memory(lhs_desc.dtype, [PARTS, 1, 1, work.BLOCK_K, ROWS], lhs_desc.layout)
        rhs = gl.allocate_shared_memory(rhs_desc.dtype, [work.STAGES, 1, 1, work.BLOCK_K, COLUMNS], rhs_desc.layout)
        results = gl.allocate_shared_memory(out_desc.dtype, [2 * work.PARTITIONS, 1, ROWS, STORED], out_desc.layout)
    else:
        lhs = gl.allocate_shared_memory(lhs_desc.dtype, [PARTS, work.ROWS, work.BLOCK_K], lhs_desc.layout)
        SHAPE: gl.constexpr = [COLUMNS, work.BLOCK_K] if work.TRANSPOSED else [work.BLOCK_K, COLUMNS]
        rhs = gl.allocate_shared_memory(rhs_desc.dtype, [work.STAGES, 1, SHAPE[0], SHAPE[1]], rhs_desc.layout)
        BUFFERS: gl.constexpr = work.PARTITIONS if work.TURNED else 2 * work.PARTITIONS
        results = gl.allocate_shared_memory(out_desc.dtype, [BUFFERS, 1, 1, work.ROWS, STORED], out_desc.layout)
    ready = mbarrier.allocate_mbarrier(batch=work.STAGES)
    empty = mbarrier.allocate_mbarrier(batch=work.STAGES)
    for i in gl.static_range(work.STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=work.PARTITIONS)
    return Ring(ready, empty, lhs, rhs, results)


@gluon.constexpr_function
def has_blocks(SCALES):
    return any(name.endswith("_blocks") for name in SCALES)


@gluon.constexpr_function
def lhs_parts(work):
    """In how many parts the rows of a tile lie: each partition has its own, unless the tile is turned round."""
    return 1 if work.TURNED else work.PARTITIONS


@gluon.jit
def groups_of(sizes_ptr, work):
    """What the calling partition has to know of the groups: each of its warps all of it."""
    LENGTH: gl.constexpr = ragged.length_of(work.GROUPS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([LENGTH // 32], [32], [gl.num_warps()], [0])
    index = gl.arange(0, LENGTH, LAYOUT)
    groups = ragged.read(sizes_ptr, index, work.M, work.GROUPS, work.BLOCK_M, work.FILL)
    ranks = groups.index
    if work.OUTER:
        ranks = ragged.ranks_of(groups, sizes_ptr, work.GROUPS)
    return groups, ranks


@gluon.jit
def tile_of(wave, work):
    """The number of this program's tile in a wave, in which each program has one.

    Tiles of weights take as long as their group has rows, and those of the largest groups come first. So the order of
    the programs turns round from wave to wave: who had the longest one has the shortest one next.
    """
    place = gl.program_id(0)
    if work.OUTER:
        place = gl.where(wave % 2 == 0, place, gl.num_programs(0) - 1 - place)
    return wave * gl.num_programs(0) + place


@gluon.jit
def wave_count(groups, work):
    """How many waves this program takes part in."""
    count = tile_count(groups, work)
    waves = count // gl.num_programs(0)
    return waves + (tile_of(waves, work) < count).to(gl.int32)


@gluon.jit
def tile_count(groups, work):
    columns = gl.cdiv(work.N, work.BLOCK_N)
    if work.OUTER:
        count = work.GROUPS * gl.cdiv(work.K, work.BLOCK_M) * columns
    else:
        count = ragged.blocks_of(groups) * columns
    return count


@gluon.jit
def place(groups, ranks, tile, work):
    """Where a tile lies, and how many steps it takes."""
    columns = gl.cdiv(work.N, work.BLOCK_N)
    if work.OUTER:
        at = ragged.place_of_weights(
            groups, ranks, tile, gl.cdiv(work.K, work.BLOCK_M), columns, work.BLOCK_M, work.BLOCK_N, work.GROUP_M
        )
        steps = gl.cdiv(at.size, work.BLOCK_K)
    else:
        at = ragged.place(groups, tile, columns, work.BLOCK_M, work.BLOCK_N, work.GROUP_M)
        steps = gl.where(at.group < work.GROUPS, gl.cdiv(work.K, work.BLOCK_K), 0)
    return at, steps


@gluon.jit
def is_there(at, row, work):
    """Whether rows of a tile from this one on exist."""
    return row < (work.K if work.OUTER else at.size)


@gluon.jit
def load(ring, lhs_desc, weights, sizes_ptr, work):
    """Loads this program's tiles."""
    groups, ranks = groups_of(sizes_ptr, work)
    stage, phase = 0, 1
    for wave in range(wave_count(groups, work)):
        at, steps = place(groups, ranks, tile_of(wave, work), work)
        for step in range(steps):
            mbarrier.wait(ring.empty.index(stage), phase)
            load_step(ring, stage, lhs_desc, weights, at, step * work.BLOCK_K, work)
            stage, phase = blocks.following(stage, phase, work.STAGES)


@gluon.jit
def load_step(ring, stage, lhs_desc, weights, at, k, work):
    bar = ring.ready.index(stage)
    dest = ring.rhs.index(stage)
    COLUMNS: gl.constexpr = dest.nbytes_per_cta
    ONE: gl.constexpr = ring.lhs.index(0).nbytes_per_cta
    PARTS: gl.constexpr = lhs_parts(work)
    if PARTS == 1:
        mbarrier.expect(bar, COLUMNS + ONE)
    else:
        both = is_there(at, at.row + work.ROWS, work)
        mbarrier.expect(bar, COLUMNS + 2 * ONE, pred=both)
        mbarrier.expect(bar, COLUMNS + ONE, pred=both == 0)
    for part in gl.static_range(PARTS):
        own = ring.lhs.index(stage * PARTS + part)
        row = at.row + part * work.ROWS
        there = is_there(at, row, work)
        if work.OUTER:
            first, end, along = ragged.to_ragged(at, k)
            tma.async_load(lhs_desc, [first, end, along, row], bar, own, pred=there)
        else:
            tma.async_load(lhs_desc, [at.begin + row, k], bar, own, pred=there)
    if work.OUTER:
        first, end, along = ragged.to_ragged(at, k)
        tma.async_load(weights[0], [first, end, along, at.column], bar, dest)
    elif work.TRANSPOSED and work.GATED:
        tma.async_load(weights[0], [at.group, at.column, k], bar, dest.slice(0, work.BLOCK_N, 1))
        tma.async_load(weights[1], [at.group, at.column, k], bar, dest.slice(work.BLOCK_N, work.BLOCK_N, 1))
    elif work.TRANSPOSED:
        tma.async_load(weights[0], [at.group, at.column, k], bar, dest)
    elif work.GATED:
        tma.async_load(weights[0], [at.group, k, at.column], bar, dest.slice(0, work.BLOCK_N, 2))
        tma.async_load(weights[1], [at.group, k, at.column], bar, dest.slice(work.BLOCK_N, work.BLOCK_N, 2))
    else:
        tma.async_load(weights[0], [at.group, k, at.column], bar, dest)


@gluon.jit
def multiply(ring, out_desc, sizes_ptr, scales, work, PARTITION: gl.constexpr):
    """Multiplies and stores a partition's part of this program's tiles."""
    groups, ranks = groups_of(sizes_ptr, work)
    stage, phase = 0, 0
    for wave in range(wave_count(groups, work)):
        at, steps = place(groups, ranks, tile_of(wave, work), work)
        row, column = part_of(at, work, PARTITION)
        if is_there(at, row, work):
            if work.TURNED:
                parts, stage, phase = multiply_turned(ring, stage, phase, steps, work, PARTITION)
            elif has_blocks(work.SCALES):
                parts, stage, phase = multiply_blocks(ring, stage, phase, steps, scales, at, row, work, PARTITION)
            elif blocks.promotes(ring):
                parts, stage, phase = multiply_promoted(ring, stage, phase, steps, work, PARTITION)
            else:
                parts, stage, phase = multiply_steps(ring, stage, phase, steps, work, PARTITION)
            if work.GATED and len(parts) == 1:
                parts = blocks.halves(parts[0])
            if work.GATED:
                finish(ring, out_desc, parts[0], parts[1], scales, groups, at, row, column, work, 0, PARTITION)
            else:
                for i in gl.static_range(len(parts)):
                    finish(ring, out_desc, parts[i], None, scales, groups, at, row, column, work, i, PARTITION)
        else:
            for _ in range(steps):
                mbarrier.wait(ring.ready.index(stage), phase)
                mbarrier.arrive(ring.empty.index(stage), count=1)
                stage, phase = blocks.following(stage, phase, work.STAGES)
    blocks.finish_stores()


@gluon.jit
def finish(
    ring, out_desc, product, gate, scales, groups, at, row, column, work, NUMBER: gl.constexpr, PARTITION: gl.constexpr
):
    """Makes of sums what they become, and stores them.

    Args:
      product, gate: of as many columns, and of the gate's, or None.
      row, column: where a partition's part of a tile begins.
      NUMBER: of those columns among as many others of that part.
    """
    WIDTH: gl.constexpr = product.shape[0 if work.TURNED else 1]
    column += NUMBER * WIDTH
    product = scale(product, scales, "rhs", at, row, column, work)
    if gate is not None:
        gate = scale(gate, scales, "gate", at, row, column, work)
    product = epilogue.activate_gated(product, gate, work.ACTIVATION)
    PIECE: gl.constexpr = NUMBER * WIDTH // ring.results.shape[-1]
    store(ring, out_desc, product * groups.scale, at, row, column, work, PIECE, PARTITION)


@gluon.jit
def part_of(at, work, PARTITION: gl.constexpr):
    """The first row and the first column of a partition's part of a tile."""
    if work.TURNED:
        row, column = at.row, at.column + PARTITION * (work.BLOCK_N // work.PARTITIONS)
    else:
        row, column = at.row + PARTITION * work.ROWS, at.column
    return row, column


@gluon.jit
def multiply_steps(ring, stage, phase, steps, work, PARTITION: gl.constexpr):
    """The product of a partition's rows of what arrives in the next stages, f32, and the position behind them."""
    COLUMNS: gl.constexpr = (2 if work.GATED else 1) * work.BLOCK_N
    LAYOUT: gl.constexpr = blocks.layout_of(ring, COLUMNS, gl.num_warps())
    SUMS: gl.constexpr = gl.int32 if ring.lhs.dtype == gl.int8 else gl.float32
    product = gl.zeros((work.ROWS, COLUMNS), SUMS, LAYOUT)
    previous = 0  # not `stage`: Triton would take `previous = stage` in the loop for no change
    for step in range(steps):
        mbarrier.wait(ring.ready.index(stage), phase)
        rows = ring.lhs.index(stage * work.PARTITIONS + PARTITION)
        if work.OUTER:
            rows = rows.reshape([work.BLOCK_K, work.ROWS]).permute([1, 0])
        if work.TRANSPOSED:
            columns = columns_of(ring, stage, 0, COLUMNS, work).permute([1, 0])
        else:
            columns = ring.rhs.index(stage).reshape([work.BLOCK_K, COLUMNS])
        product = warpgroup_mma(rows, columns, product, use_acc=step > 0, is_async=True)
        product = warpgroup_mma_wait(num_outstanding=1, deps=(product,))
        mbarrier.arrive(ring.empty.index(previous), count=1, pred=step > 0)
        previous = stage
        stage, phase = blocks.following(stage, phase, work.STAGES)
    product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
    mbarrier.arrive(ring.empty.index(previous), count=1, pred=steps > 0)
    return (product.to(gl.float32),), stage, phase


@gluon.jit
def multiply_promoted(ring, stage, phase, steps, work, PARTITION: gl.constexpr):
    """The same with TRANSPOSED, of sums that leave the tensor cores after every step: one part, or those of the left
    and of the right half of the columns, because the registers hold no more than those of one of them beside all.
    """
    COLUMNS: gl.constexpr = (2 if work.GATED else 1) * work.BLOCK_N
    WIDTH: gl.constexpr = min(COLUMNS, blocks.PROMOTED)
    LAYOUT: gl.constexpr = blocks.layout_of(ring, WIDTH, gl.num_warps())
    left = gl.zeros((work.ROWS, WIDTH), gl.float32, LAYOUT)
    right = gl.zeros((work.ROWS, WIDTH), gl.float32, LAYOUT)
    for _ in range(steps):
        mbarrier.wait(ring.ready.index(stage), phase)
        left += blocks.sums_of_step(ring, stage, False, PARTITION, 0, WIDTH)
        if WIDTH < COLUMNS:
            right += blocks.sums_of_step(ring, stage, False, PARTITION, WIDTH, WIDTH)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        stage, phase = blocks.following(stage, phase, work.STAGES)
    parts = (left, right) if WIDTH < COLUMNS else (left,)
    return parts, stage, phase


@gluon.jit
def multiply_blocks(ring, stage, phase, steps, scales, at, row, work, PARTITION: gl.constexpr):
    """The same with TRANSPOSED and scales of blocks, as BLOCK_K is long: one part.

    Rows behind the last group take no steps. Their scales, which are read all the same, are those of the last one.
    """
    COLUMNS: gl.constexpr = (2 if work.GATED else 1) * work.BLOCK_N
    WIDE: gl.constexpr = COLUMNS > blocks.PROMOTED
    factors = scales_of_blocks(scales, at, row, work)
    product, stage, phase = blocks.multiply_scaled(
        ring, (stage, phase), steps, False, PARTITION, factors, work.GATED, WIDE
    )  # fmt: skip
    return (product,), stage, phase


@gluon.jit
def scales_of_blocks(scales, at, row, work):
    """The `Factors` of a partition's rows of a tile, as callers have them: those of a row, and of a block of columns,
    lie side by side for all steps. So nothing is turned over in front of the kernel, and a step reads from the cache
    lines of the step before.
    """
    BLOCKS: gl.constexpr = gl.cdiv(work.N, blocks.SCALED)
    STEPS: gl.constexpr = gl.cdiv(work.K, work.BLOCK_K)
    block = at.column // blocks.SCALED
    above = (gl.minimum(at.group, work.GROUPS - 1) * BLOCKS + block).to(gl.int64) * STEPS
    rows = bundle.member(scales, work.SCALES, "lhs_blocks")
    columns = bundle.member(scales, work.SCALES, "rhs_blocks")
    gates = bundle.member(scales, work.SCALES, "gate_blocks")
    if rows is not None:
        rows += (at.begin + row).to(gl.int64) * STEPS
    if columns is not None:
        columns += above
    if gates is not None:
        gates += above
    count = gl.where(at.group < work.GROUPS, at.size - row, 0)
    further = gl.minimum(1, BLOCKS - 1 - block) * STEPS
    return blocks.Factors(rows, 1, STEPS, count, columns, gates, further, 1)


@gluon.jit
def sums_of(rows, columns, LAYOUT: gl.constexpr):
    """A product of 8-bit floating-point numbers. While this waits, the other partition multiplies."""
    sums = gl.zeros((rows.shape[0], columns.shape[1]), gl.float32, LAYOUT)
    sums = warpgroup_mma(rows, columns, sums, use_acc=False, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(sums,))


@gluon.jit
def columns_of(ring, stage, FIRST: gl.constexpr, COLUMNS: gl.constexpr, work):
    """So many columns of the weights in a stage from the FIRST on, [COLUMNS, BLOCK_K]. With TRANSPOSED."""
    LINES: gl.constexpr = ring.rhs.shape[2]
    columns = ring.rhs.index(stage).reshape([LINES, work.BLOCK_K])
    if COLUMNS < LINES:
        columns = columns.slice(FIRST, COLUMNS, 0)
    return columns


@gluon.jit
def multiply_turned(ring, stage, phase, steps, work, PARTITION: gl.constexpr):
    """The product of a partition's columns of the weights, as rows, and all rows of a tile, as columns; and that of the
    gate's, if there is a gate. Both f32; and the position behind them.
    """
    COLUMNS: gl.constexpr = work.BLOCK_N // work.PARTITIONS
    FIRST: gl.constexpr = PARTITION * COLUMNS
    LAYOUT: gl.constexpr = hopper_few.layout_of_product(work.ROWS, gl.num_warps(), ring.lhs.dtype)
    SUMS: gl.constexpr = gl.int32 if ring.lhs.dtype == gl.int8 else gl.float32
    product = gl.zeros((COLUMNS, work.ROWS), SUMS, LAYOUT)
    gate = gl.zeros((COLUMNS, work.ROWS), SUMS, LAYOUT)
    for _ in range(steps):
        mbarrier.wait(ring.ready.index(stage), phase)
        product = add_turned(product, ring, stage, FIRST, LAYOUT, work)
        if work.GATED:
            gate = add_turned(gate, ring, stage, work.BLOCK_N + FIRST, LAYOUT, work)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        stage, phase = blocks.following(stage, phase, work.STAGES)
    parts = (product.to(gl.float32), gate.to(gl.float32)) if work.GATED else (product.to(gl.float32),)
    return parts, stage, phase


@gluon.jit
def add_turned(product, ring, stage, FIRST: gl.constexpr, LAYOUT: gl.constexpr, work):
    """A product, and that of some columns of a stage from the FIRST on. While this waits, the other partition works."""
    COLUMNS: gl.constexpr = product.shape[0]
    rows = ring.lhs.index(stage).permute([1, 0])
    if widen.is_wider(ring.lhs.dtype, ring.rhs.dtype):
        pairs = widen.pairs(ring.rhs.index(stage).reshape([ring.rhs.shape[2], work.BLOCK_K]))
        columns = widen.block(pairs.slice(FIRST, COLUMNS, 0), ring.rhs.dtype, ring.lhs.dtype, LAYOUT)
    else:
        columns = columns_of(ring, stage, FIRST, COLUMNS, work)
    if blocks.promotes(ring):
        product += sums_of(columns, rows, LAYOUT)
    else:
        product = warpgroup_mma(columns, rows, product, is_async=True)
        product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
    return product


@gluon.jit
def scale(tile, scales, NAME: gl.constexpr, at, row, column, work):
    """A part of a tile, multiplied by the scales of its rows and by those of its group's columns.

    Args:
      scales: the bundle of scales: "lhs" [M], and one of [GROUPS, N] of this NAME, all f32.
      row, column: where the part begins. Rows behind the last group have no scales.
    """
    ROW: gl.constexpr = 1 if work.TURNED else 0
    of_rows = bundle.member(scales, work.SCALES, "lhs")
    if of_rows is not None:
        m = row + gl.arange(0, tile.shape[ROW])
        there = (m < at.size) & (at.group < work.GROUPS)
        factors = gl.load(of_rows + at.begin + m, mask=there, other=1.0)
        tile *= gl.expand_dims(factors, 1 - ROW)
    of_columns = bundle.member(scales, work.SCALES, NAME)
    if of_columns is not None:
        n = column + gl.arange(0, tile.shape[1 - ROW])
        there = (n < work.N) & (at.group < work.GROUPS)
        factors = gl.load(of_columns + at.group.to(gl.int64) * work.N + n, mask=there, other=1.0)
        tile *= gl.expand_dims(factors, ROW)
    return tile


@gluon.jit
def store(ring, out_desc, tile, at, row, column, work, PIECE: gl.constexpr, PARTITION: gl.constexpr):
    """Begins to store a partition's part of a tile, some columns after the others; with TURNED all at once.

    Args:
      row, column: where the part begins.
      PIECE: how many pieces of the tile come before.
    """
    STORED: gl.constexpr = ring.results.shape[-1]
    WIDTH: gl.constexpr = tile.shape[1]
    if work.TURNED:
        tma.store_wait(0)
        put(ring, out_desc, tile.permute([1, 0]), at, row, column, work, PARTITION)
    elif WIDTH > STORED:
        left, right = blocks.halves(tile)
        AFTER: gl.constexpr = PIECE + WIDTH // 2 // STORED
        store(ring, out_desc, left, at, row, column, work, PIECE, PARTITION)
        store(ring, out_desc, right, at, row, column + WIDTH // 2, work, AFTER, PARTITION)
    else:
        tma.store_wait(1)
        put(ring, out_desc, tile, at, row, column, work, 2 * PARTITION + PIECE % 2)


@gluon.jit
def put(ring, out_desc, piece, at, row, column, work, BUFFER: gl.constexpr):
    """Begins to store a piece of a tile through a buffer that is free."""
    buffer = ring.results.index(BUFFER)
    buffer.reshape([work.ROWS, ring.results.shape[-1]]).store(piece.to(out_desc.dtype))
    fence_async_shared()
    if work.OUTER:
        tma.async_store(out_desc, [at.group, row, column], buffer)
    else:
        first, end, along = ragged.to_ragged(at, row)
        tma.async_store(out_desc, [first, end, along, column], buffer)
