"""Gluon kernels as one writes them for Hopper, to be run by the simulator: a product, and one behind an all-gather."""

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


@gluon.jit
def multiply_tile(ready, empty, lhs, rhs, stage, phase, steps, M: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr):
    """The product of what arrives in the next stages: (tile, stage, phase)."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    acc = gl.zeros((M, N), gl.float32, LAYOUT)
    previous = 0  # not `stage`: Triton would take `previous = stage` in the loop for no change
    for step in range(steps):
        mbarrier.wait(ready.index(stage), phase)
        acc = warpgroup_mma(lhs.index(stage), rhs.index(stage), acc, use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index(previous), count=1, pred=step > 0)
        previous = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase = phase ^ 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index(previous), count=1)
    return acc, stage, phase


@gluon.jit
def store_tile(out_desc, buffers, tile, row, column, half: gl.constexpr):
    """Begins to store half of the columns of a tile."""
    tma.store_wait(1)
    buffers.index(half).store(tile.to(out_desc.dtype))
    fence_async_shared()
    tma.async_store(out_desc, [row, column], buffers.index(half))


@gluon.jit
def multiply_part(out_desc, bars, bufs, sizes, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr):
    ready, empty = bars
    lhs, rhs, results = bufs
    rows, columns, depth = sizes
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), gl.cdiv(rows, M) * gl.cdiv(columns, N), gl.num_programs(0)):
        row = tile // gl.cdiv(columns, N) * M
        column = tile % gl.cdiv(columns, N) * N
        steps = gl.cdiv(depth, K)
        acc, stage, phase = multiply_tile(ready, empty, lhs, rhs, stage, phase, steps, M, N, STAGES)
        left, right = acc.reshape([M, 2, N // 2]).permute([0, 2, 1]).split()
        store_tile(out_desc, results, left, row, column, 0)
        store_tile(out_desc, results, right, row, column + N // 2, 1)
    tma.store_wait(0)


@gluon.jit
def load_part(
    lhs_desc, rhs_desc, bars, bufs, sizes, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr
):
    ready, empty = bars
    lhs, rhs, _ = bufs
    rows, columns, depth = sizes
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), gl.cdiv(rows, M) * gl.cdiv(columns, N), gl.num_programs(0)):
        row = tile // gl.cdiv(columns, N) * M
        column = tile % gl.cdiv(columns, N) * N
        for k in range(0, depth, K):
            bar = ready.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, lhs_desc.nbytes_per_cta + rhs_desc.nbytes_per_cta)
            tma.async_load(lhs_desc, [row, k], bar, lhs.index(stage))
            tma.async_load(rhs_desc, [k, column], bar, rhs.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1


@gluon.jit
def matmul_kernel(
    lhs_desc,
    rhs_desc,
    team,
    rows,
    columns,
    depth,
    out_desc,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
):
    me = shmem.start(team)
    lhs = gl.allocate_shared_memory(lhs_desc.dtype, [STAGES, M, K], lhs_desc.layout)
    rhs = gl.allocate_shared_memory(rhs_desc.dtype, [STAGES, K, N], rhs_desc.layout)
    results = gl.allocate_shared_memory(out_desc.dtype, [2, M, N // 2], out_desc.layout)
    ready = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    bars = (ready, empty)
    bufs = (lhs, rhs, results)
    sizes = (rows, columns, depth)
    gl.warp_specialize(
        [
            (multiply_part, (out_desc, bars, bufs, sizes, M, N, K, STAGES)),
            (load_part, (lhs_desc, rhs_desc, bars, bufs, sizes, M, N, K, STAGES)),
        ],
        [1],
        [24],
    )
    shmem.finish(me)


@gluon.jit
def push_gathered_part(
    me,
    x_ptr,
    gathered,
    arrived,
    rows,
    depth,
    M: gl.constexpr,
    K: gl.constexpr,
    PARTS: gl.constexpr,
    WORLD: gl.constexpr,
):
    """Sends this program's rows to all others, one part of the columns after the other."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.program_id(0) * M + gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))
    inbox = shmem.scratch(me, gathered, x_ptr.dtype.element_ty) + me.rank * rows * depth
    steps = depth // K // PARTS
    for part in range(PARTS):
        for i in gl.static_range(1, WORLD):
            peer = (me.rank + i) % WORLD
            for step in range(part * steps, (part + 1) * steps):
                element = row[:, None] * depth + (step * K + column)[None, :]
                shmem.put(me, inbox + element, x_ptr + element, peer)
            shmem.signal(me, arrived + (me.rank * gl.num_programs(0) + gl.program_id(0)) * PARTS + part, peer)


@gluon.jit
def load_gathered_part(
    me,
    x_desc,
    rhs_desc,
    gathered,
    bars,
    bufs,
    arrived,
    rows,
    depth,
    M: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    WORLD: gl.constexpr,
):
    ready, empty = bars
    lhs, rhs, _ = bufs
    inbox = shmem.scratch(me, gathered, x_desc.dtype)
    gathered_desc = tma.make_tensor_descriptor(inbox, [WORLD * rows, depth], [depth, 1], [M, K], x_desc.layout)
    stage = 0
    phase = 1
    row = gl.program_id(0) * M
    steps = depth // K // PARTS
    for i in range(WORLD):
        source = (me.rank + i) % WORLD
        for part in range(PARTS):
            if i > 0:
                signal = arrived + (source * gl.num_programs(0) + gl.program_id(0)) * PARTS + part
                shmem.wait(me, signal, me.epoch, source)
                shmem.fence_proxy()
            for step in range(part * steps, (part + 1) * steps):
                bar = ready.index(stage)
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(bar, x_desc.nbytes_per_cta + rhs_desc.nbytes_per_cta)
                if i == 0:
                    tma.async_load(x_desc, [row, step * K], bar, lhs.index(stage))
                else:
                    tma.async_load(gathered_desc, [source * rows + row, step * K], bar, lhs.index(stage))
                tma.async_load(rhs_desc, [step * K, 0], bar, rhs.index(stage))
                stage += 1
                if stage == STAGES:
                    stage = 0
                    phase = phase ^ 1


@gluon.jit
def multiply_gathered_part(
    me,
    out_desc,
    bars,
    bufs,
    rows,
    depth,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    WORLD: gl.constexpr,
):
    ready, empty = bars
    lhs, rhs, results = bufs
    stage = 0
    phase = 0
    for i in range(WORLD):
        source = (me.rank + i) % WORLD
        row = source * rows + gl.program_id(0) * M
        acc, stage, phase = multiply_tile(ready, empty, lhs, rhs, stage, phase, depth // K, M, N, STAGES)
        left, right = acc.reshape([M, 2, N // 2]).permute([0, 2, 1]).split()
        store_tile(out_desc, results, left, row, 0, 0)
        store_tile(out_desc, results, right, row, N // 2, 1)
    tma.store_wait(0)


@gluon.jit
def all_gather_matmul_kernel(
    x_ptr,
    x_desc,
    rhs_desc,
    team,
    gathered,
    arrived,
    rows,
    depth,
    out_desc,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    WORLD: gl.constexpr,
):
    """A program for each block of rows, which it sends to all others and multiplies for all ranks."""
    me = shmem.start(team)
    lhs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, M, K], x_desc.layout)
    rhs = gl.allocate_shared_memory(rhs_desc.dtype, [STAGES, K, N], rhs_desc.layout)
    results = gl.allocate_shared_memory(out_desc.dtype, [2, M, N // 2], out_desc.layout)
    ready = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    bars = (ready, empty)
    bufs = (lhs, rhs, results)
    loads = (me, x_desc, rhs_desc, gathered, bars, bufs, arrived, rows, depth, M, K, STAGES, PARTS, WORLD)
    gl.warp_specialize(
        [
            (multiply_gathered_part, (me, out_desc, bars, bufs, rows, depth, M, N, K, STAGES, WORLD)),
            (load_gathered_part, loads),
            (push_gathered_part, (me, x_ptr, gathered, arrived, rows, depth, M, K, PARTS, WORLD)),
        ],
        [1, 2],
        [24, 48],
    )
    shmem.finish(me)
