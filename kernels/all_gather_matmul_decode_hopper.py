"""All-gather and matrix product in one kernel, for the few rows of a decode step, on Hopper GPUs.

The product is that of `all_gather_matmul_small`, turned round: a tile is as many columns of `rhs` as a warpgroup
multiplies rows, by all rows of all ranks, so that few rows waste no tensor cores and `rhs` is read once. A program has
its first blocks of `rhs` on their way before it knows who it is, and waits for the peers' rows only then: as long as
they come before these blocks do, nobody notices that they come from elsewhere.

The first `PUSHERS` programs write this rank's rows into everybody's scratch, its own included; each later program
waits for all ranks and computes one tile. Many rows are sent and awaited in parts of K: while the first one is
multiplied the others come.

Pushers have the lowest program ids, so a GPU starts them first and no tile waits for a program that has no place to
run.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import CachePolicy, FractionalEvictionPolicy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from jaxtaxfree.kernels import epilogue
from jaxtaxfree.kernels import shmem_gluon as shmem

# Weights are read once. They are not to drive out of the L2 cache what all programs read.
READ_ONCE = gl.constexpr(CachePolicy(l2=FractionalEvictionPolicy("evict_first", 1.0)))


@gluon.jit
def all_gather_matmul_decode_hopper_kernel(
    lhs_ptr,  # [M, K], this rank's rows
    rhs_desc,  # [K, N], in blocks [BLOCK_K, BLOCK_N]
    gate_desc,  # the same of the gate, or None
    bias_ptr,  # [N], or None
    residual_ptr,  # [WORLD * M, N], or None
    team,
    gathered,  # scratch [WORLD, M, K]
    arrived,  # signals [parts, WORLD]: PUSHERS from each rank
    out_ptr,  # [WORLD * M, N]
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    WORLD: gl.constexpr,
    BLOCK_M: gl.constexpr,  # at least WORLD * M
    BLOCK_N: gl.constexpr,  # 16 for each warp
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,  # steps of K in flight
    PUSHERS: gl.constexpr,
    PART: gl.constexpr,  # columns that are sent and waited for together, a multiple of BLOCK_K
    CHUNK: gl.constexpr,  # elements that a pusher moves at a time
    ACTIVATION: gl.constexpr,  # see `epilogue.activate`
):
    me = shmem.start(team, VERIFY=False)
    if gl.program_id(0) < PUSHERS:
        push(me, lhs_ptr, gathered, arrived, M, K, WORLD, PUSHERS, PART, CHUNK)
    else:
        column = (gl.program_id(0) - PUSHERS) * BLOCK_N
        ring = allocate(rhs_desc, gate_desc, BLOCK_M, STAGES)
        steps: gl.constexpr = gl.cdiv(K, BLOCK_K)
        # What keeps the memory busy until `load` begins, before anything else.
        ahead: gl.constexpr = min(STAGES, steps, 8)
        for stage in gl.static_range(ahead):
            mbarrier.init(ring.full.index(stage), count=1)
        for stage in gl.static_range(ahead):
            fetch_weights(ring, rhs_desc, gate_desc, stage, stage * BLOCK_K, column)
        for stage in gl.static_range(ahead, STAGES):
            mbarrier.init(ring.full.index(stage), count=1)
        for stage in gl.static_range(STAGES):
            mbarrier.init(ring.empty.index(stage), count=1)
        mbarrier.init(ring.told, count=1)
        shmem.verify(me)
        gl.warp_specialize(
            [
                (multiply, (ring, bias_ptr, residual_ptr, out_ptr, column, WORLD * M, N, steps, ACTIVATION)),
                (load, (me, ring, rhs_desc, gate_desc, column, gathered, arrived, M, K, WORLD, PUSHERS, PART, ahead)),
            ],
            [1],
            [64],
        )
    shmem.finish(me)


class Ring(NamedTuple):
    """What lies in shared memory."""

    lhs: Any  # [STAGES, BLOCK_M, BLOCK_K]
    rhs: Any  # [STAGES, BLOCK_K, BLOCK_N]
    gate: Any  # the same, or None
    full: Any  # mbarriers of the stages: all blocks have come
    empty: Any  # they have been multiplied
    came: Any  # i32 [4]: whether all ranks' rows have come
    told: Any  # mbarrier: that is known


@gluon.jit
def allocate(rhs_desc, gate_desc, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    BLOCK_K: gl.constexpr = rhs_desc.block_shape[0]
    BLOCK_N: gl.constexpr = rhs_desc.block_shape[1]
    LHS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], rhs_desc.dtype)
    lhs = gl.allocate_shared_memory(rhs_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], LHS)
    rhs = gl.allocate_shared_memory(rhs_desc.dtype, [STAGES, BLOCK_K, BLOCK_N], rhs_desc.layout)
    gate = None
    if gate_desc is not None:
        gate = gl.allocate_shared_memory(rhs_desc.dtype, [STAGES, BLOCK_K, BLOCK_N], rhs_desc.layout)
    came = gl.allocate_shared_memory(gl.int32, [4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    told = mbarrier.allocate_mbarrier()
    return Ring(lhs, rhs, gate, full, empty, came, told)


@gluon.jit
def push(
    me,
    lhs_ptr,
    gathered,
    arrived,
    M: gl.constexpr,
    K: gl.constexpr,
    WORLD: gl.constexpr,
    PUSHERS: gl.constexpr,
    PART: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """Writes this rank's rows into the scratch of every rank, one part of K after the other, each with one release."""
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    mine = shmem.scratch(me, gathered, lhs_ptr.dtype.element_ty) + me.rank * (M * K)
    for part in range(gl.cdiv(K, PART)):
        for at in range(gl.program_id(0) * CHUNK, M * PART, PUSHERS * CHUNK):
            place = at + gl.arange(0, CHUNK, LANES)
            column = part * PART + place % PART
            element = place // PART * K + column
            inside = (place < M * PART) & (column < K)
            value = gl.load(lhs_ptr + element, mask=inside)
            shmem.verify(me)  # behind the load, which takes as long
            for i in gl.static_range(1, WORLD + 1):
                shmem.store(me, mine + element, value, (me.rank + i) % WORLD, inside)
        shmem.signal_all(me, arrived + part * WORLD + me.rank, WORLD)


@gluon.jit
def fetch_weights(ring, rhs_desc, gate_desc, stage, row, column):
    """Begins to fill a stage, and announces the block of lhs along with those of rhs and gate."""
    full = ring.full.index(stage)
    BLOCKS: gl.constexpr = 1 if gate_desc is None else 2
    mbarrier.expect(full, ring.lhs.index(stage).nbytes_per_cta + BLOCKS * rhs_desc.nbytes_per_cta)
    tma.async_load(rhs_desc, [row, column], full, ring.rhs.index(stage), cache_policy=READ_ONCE)
    if gate_desc is not None:
        tma.async_load(gate_desc, [row, column], full, ring.gate.index(stage), cache_policy=READ_ONCE)


@gluon.jit
def load(
    me,
    ring,
    rhs_desc,
    gate_desc,
    column,
    gathered,
    arrived,
    M: gl.constexpr,
    K: gl.constexpr,
    WORLD: gl.constexpr,
    PUSHERS: gl.constexpr,
    PART: gl.constexpr,
    AHEAD: gl.constexpr,  # stages whose weights are on their way
):
    """Fetches what `multiply` needs, rows of peers as they arrive."""
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_M: gl.constexpr = ring.lhs.shape[1]
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    LHS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], rhs_desc.dtype)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    STEPS: gl.constexpr = gl.cdiv(K, BLOCK_K)
    for step in range(AHEAD, min(STAGES, STEPS)):
        fetch_weights(ring, rhs_desc, gate_desc, step, step * BLOCK_K, column)
    inbox = shmem.scratch(me, gathered, rhs_desc.dtype)
    lhs_desc = tma.make_tensor_descriptor(inbox, [WORLD * M, K], [K, 1], [BLOCK_M, BLOCK_K], LHS)
    ready = me.ready
    stage = 0
    phase = 1
    for part in range(gl.cdiv(K, PART)):
        ready = shmem.wait_all(me, arrived + part * WORLD, me.epoch * PUSHERS) & ready
        shmem.fence_proxy()
        for step in range(part * (PART // BLOCK_K), min((part + 1) * (PART // BLOCK_K), STEPS)):
            if step >= STAGES:
                mbarrier.wait(ring.empty.index(stage), phase)
                fetch_weights(ring, rhs_desc, gate_desc, stage, step * BLOCK_K, column)
            tma.async_load(lhs_desc, [0, step * BLOCK_K], ring.full.index(stage), ring.lhs.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1
    ring.came.store(gl.full([4], ready.to(gl.int32), gl.int32, LANES))
    mbarrier.arrive(ring.told, count=1)


@gluon.jit
def multiply(
    ring,
    bias_ptr,
    residual_ptr,
    out_ptr,
    column,
    ROWS: gl.constexpr,
    N: gl.constexpr,
    STEPS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """The tile of all rows, from what `load` fetches; NaN if some have not come."""
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_M: gl.constexpr = ring.lhs.shape[1]
    BLOCK_N: gl.constexpr = ring.rhs.shape[2]
    WARPS: gl.constexpr = gl.num_warps()
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_M, 16]
    )
    tile = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, SUMS)
    gate = tile
    stage = 0
    phase = 0
    previous = 0
    for step in range(STEPS):
        mbarrier.wait(ring.full.index(stage), phase)
        lhs = ring.lhs.index(stage).permute((1, 0))
        tile = warpgroup_mma(ring.rhs.index(stage).permute((1, 0)), lhs, tile, use_acc=step > 0, is_async=True)
        if ring.gate is None:
            tile = warpgroup_mma_wait(num_outstanding=1, deps=(tile,))
        else:
            gate = warpgroup_mma(ring.gate.index(stage).permute((1, 0)), lhs, gate, use_acc=step > 0, is_async=True)
            tile, gate = warpgroup_mma_wait(num_outstanding=2, deps=(tile, gate))
        mbarrier.arrive(ring.empty.index(previous), count=1, pred=step > 0)
        previous = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase = phase ^ 1
    if ring.gate is None:
        tile = warpgroup_mma_wait(num_outstanding=0, deps=(tile,))
    else:
        tile, gate = warpgroup_mma_wait(num_outstanding=0, deps=(tile, gate))

    mbarrier.wait(ring.told, 0)
    ready = gl.max(ring.came.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0) != 0
    if bias_ptr is not None:
        n = column + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
        tile += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[:, None]
    tile = epilogue.activate_gated(tile, None if ring.gate is None else gate, ACTIVATION)
    # 8 columns of a row for each thread.
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    n = column + gl.arange(0, BLOCK_N, gl.SliceLayout(1, STORED))[:, None]
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, STORED))[None, :]
    inside = (m < ROWS) & (n < N)
    if residual_ptr is not None:
        residual = gl.load(residual_ptr + m * N + n, mask=inside, other=0.0)
        tile += gl.convert_layout(residual.to(gl.float32), SUMS)
    tile = gl.where(ready, tile, float("nan")).to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + m * N + n, gl.convert_layout(tile, STORED), mask=inside)
