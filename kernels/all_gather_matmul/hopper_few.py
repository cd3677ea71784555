"""All-gather and matrix product in one kernel, for the few rows of a decode step, on Hopper GPUs.

The product is that of `blocks.hopper_few`, of all rows of all ranks. A program has its first blocks of `rhs` on their
way before it knows who it is, and waits for the peers' rows only then: as long as they come before these blocks do,
nobody notices that they come from elsewhere.

The first `PUSHERS` programs write this rank's rows into everybody's scratch, its own included; each later program
waits for all ranks and computes one tile, or a part of K of it. Many rows are sent and awaited in parts of K: while the
first one is multiplied the others come.

A rank without peers has no pushers, and multiplies its rows where they lie.

Pushers have the lowest program ids, so a GPU starts them first and no tile waits for a program that has no place to
run, as long as there are places for all that share a tile.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.blocks import epilogue as epilogues
from jaxtaxfree.kernels.blocks import hopper_few, several, tiles


@gluon.jit
def all_gather_matmul_hopper_few_kernel(
    lhs_ptr,  # [M, K], this rank's rows
    weights,  # rhs [K, N], in blocks [BLOCK_K, BLOCK_N], and gate, if there is one; or several rhs. With
    # RHS_TRANSPOSED [N, K], in blocks [BLOCK_N, BLOCK_K]
    epilogue,  # what there is of bias [N] and residual [WORLD * M, N]; or of a bias for each rhs
    scales,  # what there is of f32 scales, see `hopper_few.scale` and `hopper_few.blocks_of`; none of several rhs
    team,
    gathered,  # scratch [WORLD, M, K]; None without PUSHERS
    arrived,  # signals [parts, WORLD]: PUSHERS // GROUPS from each rank; or None
    shares,  # scratch f32 [shared tiles, SPLITS, BLOCK_N * BLOCK_M]: sums of a part of K; or None
    left,  # signals [shared tiles]: one from each program that has left some; or None
    out_ptr,  # [WORLD * M, N]
    out1_ptr,  # the results of three more rhs, or None
    out2_ptr,
    out3_ptr,
    M: gl.constexpr,
    N: gl.constexpr,  # of several rhs a tuple, and so is ACTIVATION: see `blocks.several`
    K: gl.constexpr,
    WORLD: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,  # of each product; 16 columns of all for each warp
    BLOCK_K: gl.constexpr,
    RHS_TRANSPOSED: gl.constexpr,
    STAGES: gl.constexpr,  # steps of K in flight
    SPLITS: gl.constexpr,  # programs that share a tile,
    WHOLE: gl.constexpr,  # but for so many tiles, the first ones
    ADDERS: gl.constexpr,  # so many of these add it up
    PUSHERS: gl.constexpr,  # 0 if WORLD is 1
    GROUPS: gl.constexpr,  # of pushers, each of which sends some of the parts
    PART: gl.constexpr,  # columns that are sent and waited for together, a multiple of BLOCK_K
    CHUNK: gl.constexpr,  # elements that a pusher moves at a time
    EPILOGUE: gl.constexpr,  # the names of `epilogue`
    SCALES: gl.constexpr,  # those of `scales`
    ACTIVATION: gl.constexpr,  # see `epilogue.activate`
):
    me = shmem.start(team, VERIFY=False)
    if PUSHERS > 0 and gl.program_id(0) < PUSHERS:
        push(me, lhs_ptr, gathered, arrived, M, K, WORLD, PUSHERS, GROUPS, PART, CHUNK)
    else:
        number, split, first, end = hopper_few.share_of(gl.program_id(0) - PUSHERS, K, BLOCK_K, SPLITS, WHOLE)
        place = hopper_few.place_of(number, WORLD * M, BLOCK_M, BLOCK_N, N)
        ring = hopper_few.allocate(
            several.weights_of(weights, N, 0), lhs_ptr.dtype.element_ty, BLOCK_M, STAGES, RHS_TRANSPOSED
        )
        rows = allocate_answer()
        hopper_few.begin(ring, weights, place, first, gl.cdiv(K, BLOCK_K) // SPLITS)
        mbarrier.init(rows.told, count=1)
        shmem.verify(me)
        blocks = hopper_few.blocks_of(scales, SCALES, place, first, WORLD * M, N)
        gl.warp_specialize(
            [
                (
                    multiply,
                    (
                        me, ring, rows, epilogue, scales, blocks, shares, left,
                        (out_ptr, out1_ptr, out2_ptr, out3_ptr), place, split, end - first, WORLD * M, N, BLOCK_M,
                        BLOCK_N, SPLITS, WHOLE, ADDERS, EPILOGUE, ACTIVATION, SCALES,
                    ),
                ),
                (
                    load,
                    (
                        me, ring, rows, lhs_ptr, weights, place, first, end, gathered, arrived, M, K, WORLD,
                        BLOCK_M, SPLITS, PUSHERS // GROUPS, PART,
                    ),
                ),
            ],
            [1],
            [64],
        )  # fmt: skip
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
    GROUPS: gl.constexpr,
    PART: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """Writes this rank's rows into the scratch of every rank, one part of K after the other, each with one release.

    Where programs begin at several parts of K at once, as many groups of pushers do.
    """
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    mine = shmem.scratch(me, gathered, lhs_ptr.dtype.element_ty) + me.rank * (M * K)
    group = gl.program_id(0) % GROUPS
    parts: gl.constexpr = gl.cdiv(K, PART)
    for part in range(group * parts // GROUPS, (group + 1) * parts // GROUPS):
        for at in range(gl.program_id(0) // GROUPS * CHUNK, M * PART, PUSHERS // GROUPS * CHUNK):
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
    lhs_ptr,
    weights,
    place,
    first,
    end,
    gathered,
    arrived,
    M: gl.constexpr,
    K: gl.constexpr,
    WORLD: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SPLITS: gl.constexpr,
    SIGNALS: gl.constexpr,
    PART: gl.constexpr,
):
    """Fetches what is multiplied in the steps from `first` to before `end`, rows of peers as they arrive.

    Args:
      SIGNALS: of a part, from each rank; 0 if there are no peers, and the rows are multiplied where they lie.
    """
    STAGES: gl.constexpr = ring.lhs.shape[0]
    BLOCK_K: gl.constexpr = ring.lhs.shape[2]
    BOX: gl.constexpr = tiles.box_of(WORLD * M, BLOCK_M)
    LHS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOX, BLOCK_K], ring.lhs.dtype)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    STEPS: gl.constexpr = gl.cdiv(K, BLOCK_K) // SPLITS
    STEPS_A_PART: gl.constexpr = PART // BLOCK_K
    for stage in range(min(STAGES, STEPS, hopper_few.AHEAD), min(STAGES, STEPS)):
        hopper_few.fetch_weights(ring, weights, stage, first + stage, place)
    fetched = first + min(STAGES, STEPS)
    ready = me.ready
    if SIGNALS == 0:
        lhs_desc = tma.make_tensor_descriptor(lhs_ptr, [M, K], [K, 1], [BOX, BLOCK_K], LHS)
        hopper_few.load(ring, lhs_desc, weights, place, M, (0, 1), first, end, fetched)
    else:
        inbox = shmem.scratch(me, gathered, ring.lhs.dtype)
        lhs_desc = tma.make_tensor_descriptor(inbox, [WORLD * M, K], [K, 1], [BOX, BLOCK_K], LHS)
        position = (0, 1)
        for part in range(first // STEPS_A_PART, gl.cdiv(end, STEPS_A_PART)):
            ready = shmem.wait_all(me, arrived + part * WORLD, me.epoch * SIGNALS) & ready
            shmem.fence_proxy()
            begin = gl.maximum(part * STEPS_A_PART, first)
            until = gl.minimum((part + 1) * STEPS_A_PART, end)
            position = hopper_few.load(ring, lhs_desc, weights, place, WORLD * M, position, begin, until, fetched)
    rows.came.store(gl.full([4], ready.to(gl.int32), gl.int32, LANES))
    mbarrier.arrive(rows.told, count=1)


@gluon.jit
def multiply(
    me, ring, rows, epilogue, scales, blocks, shares, left, outs, place, split, steps,
    ROWS: gl.constexpr, N: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPLITS: gl.constexpr,
    WHOLE: gl.constexpr, ADDERS: gl.constexpr, EPILOGUE: gl.constexpr, ACTIVATION: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Computes a tile, and stores it or what it adds up of it; NaN if some rows have not come."""
    of_columns = hopper_few.scales_of_columns(ring, scales, SCALES, place, N)
    tile = hopper_few.multiply(ring, steps, blocks)
    tile = hopper_few.scale(tile, of_columns, scales, SCALES, place, ROWS)
    mbarrier.wait(rows.told, 0)
    ready = gl.max(rows.came.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0) != 0
    if SPLITS > 1:
        tile = nan_unless(ready, tile)
    parts = hopper_few.pieces(tile, ADDERS)
    hopper_few.leave(me, parts, shares, left, place.number, split, BLOCK_M, SPLITS, WHOLE, ADDERS)
    if hopper_few.adder_of(split, SPLITS, ADDERS) >= 0:
        ready = hopper_few.wait(me, left, place.number, SPLITS, WHOLE, ADDERS) & ready
        for i in gl.static_range(len(parts) // ADDERS):
            piece = hopper_few.take(me, parts, shares, place.number, split, i, BLOCK_M, SPLITS, WHOLE, ADDERS)
            for number in gl.static_range(several.count(N)):
                if several.is_number(place.rhs, number):
                    store_piece(piece, ready, epilogue, outs, place, ROWS, N, BLOCK_N, EPILOGUE, ACTIVATION, number)


@gluon.jit
def nan_unless(ready, tile):
    """A tile of `hopper_few.multiply`, of which others are told by NaN that rows have not come."""
    found = ()
    for part in gl.static_range(len(tile)):
        found = found + (gl.where(ready, tile[part], float("nan")),)
    return found


@gluon.jit
def store_piece(
    piece, ready, epilogue, outs, place, ROWS: gl.constexpr, N: gl.constexpr, BLOCK_N: gl.constexpr,
    EPILOGUE: gl.constexpr, ACTIVATION: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    """Applies the epilogue to a piece of the tile at this place, of columns of this rhs, and stores it."""
    WIDTH: gl.constexpr = several.of(N, NUMBER)
    activation: gl.constexpr = several.of(ACTIVATION, NUMBER)
    last = epilogues.of(epilogue, EPILOGUE, N, NUMBER)
    out_ptr = outs[NUMBER]
    # 8 columns of a row for each thread.
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    SUMS: gl.constexpr = hopper_few.layout_of_sums(piece.sums.shape[1], gl.num_warps())
    GATED: gl.constexpr = piece.sums.shape[0] > BLOCK_N
    LAYOUT: gl.constexpr = STORED if GATED else SUMS
    sums, gate = piece.sums, None
    if GATED:
        sums, gate = hopper_few.product_and_gate(sums, LAYOUT)
    if last.bias is not None:
        n = place.column + gl.arange(0, BLOCK_N, gl.SliceLayout(1, LAYOUT))
        sums += gl.load(last.bias + n, mask=n < WIDTH, other=0.0).to(gl.float32)[:, None]
    sums = gl.where(ready, epilogues.activate_gated(sums, gate, activation), float("nan"))
    n = place.column + gl.arange(0, BLOCK_N, gl.SliceLayout(1, STORED))[:, None]
    m = place.row + hopper_few.rows_of(piece, gl.SliceLayout(0, STORED))[None, :]
    inside = (m < ROWS) & (n < WIDTH)
    if last.residual is not None:
        residual = gl.load(last.residual + m * WIDTH + n, mask=inside, other=0.0)
        sums += gl.convert_layout(residual.to(gl.float32), LAYOUT)
    stored = gl.convert_layout(sums.to(out_ptr.dtype.element_ty), STORED)
    gl.store(out_ptr + m * WIDTH + n, stored, mask=inside)
