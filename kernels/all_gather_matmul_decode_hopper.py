"""All-gather and matrix product in one kernel, for the few rows of a decode step, on Hopper GPUs.

The product is that of `decode_hopper`, of all rows of all ranks. A program has its first blocks of `rhs` on their way
before it knows who it is, and waits for the peers' rows only then: as long as they come before these blocks do, nobody
notices that they come from elsewhere.

The first `PUSHERS` programs write this rank's rows into everybody's scratch, its own included; each later program
waits for all ranks and computes one tile. Many rows are sent and awaited in parts of K: while the first one is
multiplied the others come.

Pushers have the lowest program ids, so a GPU starts them first and no tile waits for a program that has no place to
run.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from jaxtaxfree.kernels import decode_hopper, epilogue
from jaxtaxfree.kernels import shmem_gluon as shmem


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
        ring = decode_hopper.allocate(rhs_desc, gate_desc, BLOCK_M, STAGES)
        rows = allocate_answer()
        steps: gl.constexpr = gl.cdiv(K, BLOCK_K)
        decode_hopper.begin(ring, rhs_desc, gate_desc, column, steps)
        mbarrier.init(rows.told, count=1)
        shmem.verify(me)
        gl.warp_specialize(
            [
                (store_tile, (ring, rows, bias_ptr, residual_ptr, out_ptr, column, WORLD * M, N, steps, ACTIVATION)),
                (load, (me, ring, rows, rhs_desc, gate_desc, column, gathered, arrived, M, K, WORLD, PUSHERS, PART)),
            ],
            [1],
            [64],
        )
    shmem.finish(me)


class Answer(NamedTuple):
    """Whether all ranks' rows have come, as the partition that waited for them tells the other one."""

    came: Any  # i32 [4]
    told: Any  # mbarrier: that is known


@gluon.jit
def allocate_answer():
    came = gl.allocate_shared_memory(gl.int32, [4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Answer(came, mbarrier.allocate_mbarrier())


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
def load(
    me,
    ring,
    rows,
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
):
    """Fetches what is multiplied, rows of peers as they arrive."""
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_M: gl.constexpr = ring.lhs.shape[1]
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    LHS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], rhs_desc.dtype)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    STEPS: gl.constexpr = gl.cdiv(K, BLOCK_K)
    for step in range(min(STAGES, STEPS, decode_hopper.AHEAD), min(STAGES, STEPS)):
        decode_hopper.fetch_weights(ring, rhs_desc, gate_desc, step, step * BLOCK_K, column)
    inbox = shmem.scratch(me, gathered, rhs_desc.dtype)
    lhs_desc = tma.make_tensor_descriptor(inbox, [WORLD * M, K], [K, 1], [BLOCK_M, BLOCK_K], LHS)
    ready = me.ready
    position = (0, 1)
    for part in range(gl.cdiv(K, PART)):
        ready = shmem.wait_all(me, arrived + part * WORLD, me.epoch * PUSHERS) & ready
        shmem.fence_proxy()
        first = part * (PART // BLOCK_K)
        end = min((part + 1) * (PART // BLOCK_K), STEPS)
        position = decode_hopper.load(ring, lhs_desc, rhs_desc, gate_desc, column, position, first, end, STAGES)
    rows.came.store(gl.full([4], ready.to(gl.int32), gl.int32, LANES))
    mbarrier.arrive(rows.told, count=1)


@gluon.jit
def store_tile(
    ring,
    rows,
    bias_ptr,
    residual_ptr,
    out_ptr,
    column,
    ROWS: gl.constexpr,
    N: gl.constexpr,
    STEPS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Computes the tile of all rows and stores it; NaN if some have not come."""
    BLOCK_M: gl.constexpr = ring.lhs.shape[1]
    BLOCK_N: gl.constexpr = ring.rhs.shape[2]
    WARPS: gl.constexpr = gl.num_warps()
    tile, gate = decode_hopper.multiply(ring, STEPS)
    SUMS: gl.constexpr = decode_hopper.layout_of_sums(BLOCK_M, WARPS)
    mbarrier.wait(rows.told, 0)
    ready = gl.max(rows.came.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0) != 0
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
