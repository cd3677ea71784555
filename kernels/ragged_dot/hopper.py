"""`ragged_dot` and the gradient of its weights in one Gluon kernel for Hopper.

Persistent programs, one for each multiprocessor. In each, one warp brings tiles into shared memory by TMA, and one or
two groups of four warps multiply 64 rows of a tile each, as in `kernels/blocks/hopper.py`. Tiles of all groups are
numbered one after the other and dealt out in waves. Every warp reads the sizes of all groups once, and finds by itself
to which group a tile belongs.

A tile has rows of one group alone. Where the group ends within it, TMA stores no further, and 64 rows that are all
behind the end are neither loaded nor multiplied. In the gradient of the weights, where rows are contracted, TMA loads
no further: what is behind the end comes as zeros. Both by ragged descriptors, see `described_as` in jaxtaxfree/call.py.
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

from jaxtaxfree.kernels.blocks import epilogue, ragged
from jaxtaxfree.kernels.blocks import hopper as blocks


class Ring(NamedTuple):
    """The shared memory of a program: the stages between loads and products, and what waits to be stored."""

    ready: Any  # mbarriers [STAGES]: the stage is loaded
    empty: Any  # mbarriers [STAGES]: all partitions have multiplied the stage
    lhs: Any  # [STAGES * PARTITIONS, block of lhs], of each partition its own rows
    rhs: Any  # [STAGES, block of rhs], with a gate that of both side by side
    results: Any  # [2 * PARTITIONS, block of the result]


class Work(NamedTuple):
    """What of a call is constant."""

    M: Any
    N: Any
    K: Any
    GROUPS: Any
    PARTITIONS: Any
    BLOCK_N: Any
    BLOCK_K: Any
    GROUP_M: Any
    STAGES: Any
    GATED: Any
    TRANSPOSED: Any
    OUTER: Any
    ACTIVATION: Any
    FILL: Any


ROWS = gl.constexpr(64)  # of a tile that a partition multiplies


@gluon.jit
def ragged_dot_hopper_kernel(
    lhs_desc,  # [M, K], in blocks [ROWS, BLOCK_K]; with OUTER ragged, in blocks [1, 1, BLOCK_K, ROWS]
    weights,  # rhs, and gate if any, [GROUPS, K, N] in blocks [1, BLOCK_K, BLOCK_N], or with TRANSPOSED [GROUPS, N, K]
    # in blocks [1, BLOCK_N, BLOCK_K]; with OUTER [M, N], ragged, in blocks [1, 1, BLOCK_K, BLOCK_N]
    sizes_ptr,  # i32 [GROUPS]
    out_desc,  # [M, N], ragged, in blocks [1, 1, ROWS, columns]; with OUTER [GROUPS, K, N], blocks [1, ROWS, columns]
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr,  # ROWS, or twice as many
    BLOCK_N: gl.constexpr,  # of each product, if there is a gate
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    OUTER: gl.constexpr,  # the result is lhs^T @ rhs of each group
    ACTIVATION: gl.constexpr,  # see `epilogue.activate`
    FILL: gl.constexpr,  # rows behind the last group are zeros, or whatever was there
):
    gl.static_assert(gl.num_warps() == 4, "each partition that multiplies has four warps")
    PARTITIONS: gl.constexpr = BLOCK_M // ROWS
    GATED: gl.constexpr = len(weights) > 1
    work: gl.constexpr = Work(
        M, N, K, GROUPS, PARTITIONS, BLOCK_N, BLOCK_K, GROUP_M, STAGES, GATED, TRANSPOSED, OUTER, ACTIVATION, FILL
    )
    ring = allocate(lhs_desc, weights[0], out_desc, work)
    if PARTITIONS == 1:
        gl.warp_specialize(
            [
                (multiply, (ring, out_desc, sizes_ptr, work, 0)),
                (load, (ring, lhs_desc, weights, sizes_ptr, work)),
            ],
            [1],
            [96],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (ring, out_desc, sizes_ptr, work, 0)),
                (multiply, (ring, out_desc, sizes_ptr, work, 1)),
                (load, (ring, lhs_desc, weights, sizes_ptr, work)),
            ],
            [4, 1],
            [208, 88],
        )


@gluon.jit
def allocate(lhs_desc, rhs_desc, out_desc, work):
    """The program's `Ring`."""
    PARTS: gl.constexpr = work.STAGES * work.PARTITIONS
    COLUMNS: gl.constexpr = (2 if work.GATED else 1) * work.BLOCK_N
    STORED: gl.constexpr = out_desc.block_type.shape[-1]
    if work.OUTER:
        lhs = gl.allocate_shared_memory(lhs_desc.dtype, [PARTS, 1, 1, work.BLOCK_K, ROWS], lhs_desc.layout)
        rhs = gl.allocate_shared_memory(rhs_desc.dtype, [work.STAGES, 1, 1, work.BLOCK_K, COLUMNS], rhs_desc.layout)
        results = gl.allocate_shared_memory(out_desc.dtype, [2 * work.PARTITIONS, 1, ROWS, STORED], out_desc.layout)
    else:
        lhs = gl.allocate_shared_memory(lhs_desc.dtype, [PARTS, ROWS, work.BLOCK_K], lhs_desc.layout)
        SHAPE: gl.constexpr = [work.BLOCK_N, work.BLOCK_K] if work.TRANSPOSED else [work.BLOCK_K, COLUMNS]
        rhs = gl.allocate_shared_memory(rhs_desc.dtype, [work.STAGES, 1, SHAPE[0], SHAPE[1]], rhs_desc.layout)
        results = gl.allocate_shared_memory(out_desc.dtype, [2 * work.PARTITIONS, 1, 1, ROWS, STORED], out_desc.layout)
    ready = mbarrier.allocate_mbarrier(batch=work.STAGES)
    empty = mbarrier.allocate_mbarrier(batch=work.STAGES)
    for i in gl.static_range(work.STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=work.PARTITIONS)
    return Ring(ready, empty, lhs, rhs, results)


@gluon.jit
def groups_of(sizes_ptr, work):
    """What the calling partition has to know of the groups: each of its warps all of it."""
    LENGTH: gl.constexpr = ragged.length_of(work.GROUPS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([LENGTH // 32], [32], [gl.num_warps()], [0])
    index = gl.arange(0, LENGTH, LAYOUT)
    groups = ragged.read(sizes_ptr, index, work.M, work.GROUPS, work.PARTITIONS * ROWS, work.FILL)
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
        count = work.GROUPS * gl.cdiv(work.K, work.PARTITIONS * ROWS) * columns
    else:
        count = ragged.blocks_of(groups) * columns
    return count


@gluon.jit
def place(groups, ranks, tile, work):
    """Where a tile lies, and how many steps it takes."""
    BLOCK_M: gl.constexpr = work.PARTITIONS * ROWS
    columns = gl.cdiv(work.N, work.BLOCK_N)
    if work.OUTER:
        at = ragged.place_of_weights(
            groups, ranks, tile, gl.cdiv(work.K, BLOCK_M), columns, BLOCK_M, work.BLOCK_N, work.GROUP_M
        )
        steps = gl.cdiv(at.size, work.BLOCK_K)
    else:
        at = ragged.place(groups, tile, columns, BLOCK_M, work.BLOCK_N, work.GROUP_M)
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
    if work.PARTITIONS == 1:
        mbarrier.expect(bar, COLUMNS + ONE)
    else:
        both = is_there(at, at.row + ROWS, work)
        mbarrier.expect(bar, COLUMNS + 2 * ONE, pred=both)
        mbarrier.expect(bar, COLUMNS + ONE, pred=both == 0)
    for part in gl.static_range(work.PARTITIONS):
        own = ring.lhs.index(stage * work.PARTITIONS + part)
        row = at.row + part * ROWS
        there = is_there(at, row, work)
        if work.OUTER:
            first, end, along = ragged.to_ragged(at, k)
            tma.async_load(lhs_desc, [first, end, along, row], bar, own, pred=there)
        else:
            tma.async_load(lhs_desc, [at.begin + row, k], bar, own, pred=there)
    if work.OUTER:
        first, end, along = ragged.to_ragged(at, k)
        tma.async_load(weights[0], [first, end, along, at.column], bar, dest)
    elif work.TRANSPOSED:
        tma.async_load(weights[0], [at.group, at.column, k], bar, dest)
    elif work.GATED:
        tma.async_load(weights[0], [at.group, k, at.column], bar, dest.slice(0, work.BLOCK_N, 2))
        tma.async_load(weights[1], [at.group, k, at.column], bar, dest.slice(work.BLOCK_N, work.BLOCK_N, 2))
    else:
        tma.async_load(weights[0], [at.group, k, at.column], bar, dest)


@gluon.jit
def multiply(ring, out_desc, sizes_ptr, work, PARTITION: gl.constexpr):
    """Multiplies and stores a partition's rows of this program's tiles."""
    groups, ranks = groups_of(sizes_ptr, work)
    stage, phase = 0, 0
    for wave in range(wave_count(groups, work)):
        at, steps = place(groups, ranks, tile_of(wave, work), work)
        if is_there(at, at.row + PARTITION * ROWS, work):
            product, stage, phase = multiply_steps(ring, stage, phase, steps, work, PARTITION)
            gate = None
            if work.GATED:
                product, gate = blocks.halves(product)
            product = epilogue.activate_gated(product, gate, work.ACTIVATION)
            store(ring, out_desc, product * groups.scale, at, at.column, work, 0, PARTITION)
        else:
            for _ in range(steps):
                mbarrier.wait(ring.ready.index(stage), phase)
                mbarrier.arrive(ring.empty.index(stage), count=1)
                stage, phase = blocks.following(stage, phase, work.STAGES)
    blocks.finish_stores()


@gluon.jit
def multiply_steps(ring, stage, phase, steps, work, PARTITION: gl.constexpr):
    """The product of a partition's rows of what arrives in the next stages, f32, and the position behind them."""
    COLUMNS: gl.constexpr = (2 if work.GATED else 1) * work.BLOCK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 16])
    product = gl.zeros((ROWS, COLUMNS), gl.float32, LAYOUT)
    previous = 0  # not `stage`: Triton would take `previous = stage` in the loop for no change
    for step in range(steps):
        mbarrier.wait(ring.ready.index(stage), phase)
        rows = ring.lhs.index(stage * work.PARTITIONS + PARTITION)
        columns = ring.rhs.index(stage)
        if work.OUTER:
            rows = rows.reshape([work.BLOCK_K, ROWS]).permute([1, 0])
        if work.TRANSPOSED:
            columns = columns.reshape([work.BLOCK_N, work.BLOCK_K]).permute([1, 0])
        else:
            columns = columns.reshape([work.BLOCK_K, COLUMNS])
        product = warpgroup_mma(rows, columns, product, use_acc=step > 0, is_async=True)
        product = warpgroup_mma_wait(num_outstanding=1, deps=(product,))
        mbarrier.arrive(ring.empty.index(previous), count=1, pred=step > 0)
        previous = stage
        stage, phase = blocks.following(stage, phase, work.STAGES)
    product = warpgroup_mma_wait(num_outstanding=0, deps=(product,))
    mbarrier.arrive(ring.empty.index(previous), count=1, pred=steps > 0)
    return product, stage, phase


@gluon.jit
def store(ring, out_desc, tile, at, column, work, PIECE: gl.constexpr, PARTITION: gl.constexpr):
    """Begins to store a partition's rows of a tile, some columns after the others.

    Args:
      PIECE: how many pieces of the tile come before.
    """
    STORED: gl.constexpr = ring.results.shape[-1]
    WIDTH: gl.constexpr = tile.shape[1]
    if WIDTH > STORED:
        left, right = blocks.halves(tile)
        AFTER: gl.constexpr = PIECE + WIDTH // 2 // STORED
        store(ring, out_desc, left, at, column, work, PIECE, PARTITION)
        store(ring, out_desc, right, at, column + WIDTH // 2, work, AFTER, PARTITION)
    else:
        buffer = ring.results.index(2 * PARTITION + PIECE % 2)
        tma.store_wait(1)
        buffer.reshape([ROWS, STORED]).store(tile.to(out_desc.dtype))
        fence_async_shared()
        row = at.row + PARTITION * ROWS
        if work.OUTER:
            tma.async_store(out_desc, [at.group, row, column], buffer)
        else:
            first, end, along = ragged.to_ragged(at, row)
            tma.async_store(out_desc, [first, end, along, column], buffer)
