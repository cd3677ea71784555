"""Matrix product and all-reduce in one Gluon kernel for Hopper, for products of many rows.

The tiles of the product are shared out among the ranks, neighbours to the same. The roles of a program are those of
`matmul_reduce_scatter_hopper`, and so are the ways of the partial tiles:

* A tile that another rank owns: `multiply` leaves it in the outbox, `push` carries it to its owner.
* An own tile: behind its rows and columns `load` brings the peers' partial tiles, `multiply` adds them up, does what
  the epilogue says, rounds the sum, stores it, and leaves it in the outbox as well. `push` carries it to all peers.
* A copy of a tile that another rank has summed: `load` waits for it and brings it into the ring of stages; `multiply`
  stores it.

Tiles of a rank come in groups. Between the others' tiles of a group and the own ones lie those of `LAG` more groups of
others, so that partial tiles have the time of these products to arrive, and sums travel while later groups are
multiplied. With a lag of one group: others 0, others 1, own 0, others 2, own 1, ..., own G - 1, and then all copies,
group after group. Among the others' tiles of a group those of rank + 1 come first, then those of rank + 2, ..., so that
at any time each link carries the tiles of one rank.

Nothing waits in a circle. All ranks number their work alike, by tickets. An own tile waits for tickets of the others'
tiles of its group, a copy for those of others' tiles and of an own tile: lower ones in all cases, of programs that run,
because they have been claimed before. What remains is a program's own order. Its roles take its tickets one after the
other, each in ascending order, so that the work of a ticket needs the program's lower tickets, and what it waits for,
but never a higher ticket:

* `load` waits for a stage until `multiply` (both of its partitions, each of which has half of the rows) has taken
  what lies there: steps or blocks of the same or a lower ticket.
* `multiply` waits for a place in the outbox until `push` has carried what lies there: the tile of a lower ticket.
* `push` waits for nobody but `multiply`.

Hence of all the work that is not done, on all ranks, that of the lowest ticket can go on.

The order of additions is the same in every call: the owner's part, then those of rank - 1, rank - 2, ... Every rank
gets the same bits, because sums are rounded once, by their owners. Partial tiles and sums travel as they lie in the
registers of the warps that multiply.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.blocks import epilogue as epilogues
from jaxtaxfree.kernels.blocks import hopper as matmul
from jaxtaxfree.kernels.blocks import wire
from jaxtaxfree.kernels.matmul_reduce_scatter import hopper as scatter

PLACES = scatter.PLACES


class Work(NamedTuple):
    """The sizes of a call, as constants: those of `scatter.Work` and some more."""

    M: Any
    N: Any
    K: Any
    WORLD: Any
    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_K: Any
    GROUP_M: Any
    FAST_SUMS: Any
    TILES: Any
    GROUPS: Any
    LAG: Any
    CHUNK: Any
    PACE: Any
    LAST_PACE: Any
    SUM_PACE: Any
    SCALES: Any
    ACTIVATION: Any
    LINES: Any


@gluon.jit
def matmul_all_reduce_hopper_kernel(
    lhs_desc,  # [1, M, K], in boxes [1, rows, BLOCK_K], see `tiles.box_of`
    rhs_desc,  # [K, N], in blocks [BLOCK_K, BLOCK_N], or [N, K], in blocks [BLOCK_N, BLOCK_K]
    half_desc,  # the same, in blocks of half the columns
    epilogue,  # what there is of bias [N] and residual [1, M, N], in blocks [1, BLOCK_M, columns that a stage takes]
    scales,  # of operands of 8 bits what there is of lhs [M] and rhs [N], f32; or of lhs_blocks [steps, M] and
    # rhs_blocks [steps, blocks of matmul.SCALED columns], for steps of as many
    team,
    partials,  # scratch [WORLD - 1, TILES, BLOCK_M, BLOCK_N]: those of rank - 1 come first
    sums,  # scratch [WORLD, TILES, BLOCK_M, BLOCK_N], by owner
    outbox,  # scratch [programs, PLACES, BLOCK_M, BLOCK_N] for tiles of this rank
    arrived,  # signals [WORLD - 1, TILES]: in `partials`
    added,  # signals [WORLD, TILES]: in `sums`
    tickets,  # signal: to claim tiles
    out_desc,  # [1, M, N], in blocks [1, rows of a partition, columns stored at a time]
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    WORLD: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    FAST_SUMS: gl.constexpr,  # as `matmul.multiply_tile` takes it
    STAGES: gl.constexpr,  # steps of K in flight
    TILES: gl.constexpr,  # that a rank owns, the last ones may own fewer
    GROUPS: gl.constexpr,  # of a rank's tiles
    LAG: gl.constexpr,  # groups of others between those of a group and the own ones, less than GROUPS
    CHUNK: gl.constexpr,  # elements that are pushed at a time, a divisor of a tile's; two of them are in flight
    PACE: gl.constexpr,  # cycles in which a program sends so many to an owner,
    LAST_PACE: gl.constexpr,  # when no other product hides that any more,
    SUM_PACE: gl.constexpr,  # and to all peers
    EPILOGUE: gl.constexpr,  # the names of `epilogue`
    SCALES: gl.constexpr,  # and of `scales`
    ACTIVATION: gl.constexpr,  # see `epilogue.activate`
):
    gl.static_assert(gl.num_warps() == 4, "each partition that multiplies has four warps")
    me = shmem.start(team)
    last = epilogues.of(epilogue, EPILOGUE)
    WIRE: gl.constexpr = wire.type_of(lhs_desc.dtype, False)
    inbox = shmem.scratch(me, partials, WIRE)
    results = shmem.scratch(me, sums, WIRE)
    places = shmem.scratch(me, outbox, WIRE) + gl.program_id(0) * (PLACES * BLOCK_M * BLOCK_N)
    ring = matmul.allocate(lhs_desc, rhs_desc, half_desc, out_desc, BLOCK_M, STAGES)
    claimed = scatter.allocate_relay(1, 2)
    staged = scatter.allocate_relay(2, 1)
    LINES: gl.constexpr = scatter.lines_of(ring, BLOCK_M)
    work: gl.constexpr = Work(
        M,
        N,
        K,
        WORLD,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        GROUP_M,
        FAST_SUMS,
        TILES,
        GROUPS,
        LAG,
        CHUNK,
        PACE,
        LAST_PACE,
        SUM_PACE,
        SCALES,
        ACTIVATION,
        LINES,
    )
    gl.warp_specialize(
        [
            (multiply, (me, ring, claimed, staged, places, last, scales, out_desc, work, 0)),
            (multiply, (me, ring, claimed, staged, places, last, scales, out_desc, work, 1)),
            (load, (me, ring, claimed, lhs_desc, rhs_desc, last, inbox, results, arrived, added, tickets, work)),
            (push, (me, staged, inbox, results, places, arrived, added, work)),
        ],
        [4, 1, 2],
        [224, 64, 64],
    )
    shmem.finish(me)


@gluon.jit
def load(me, ring, claimed, lhs_desc, rhs_desc, last, inbox, results, arrived, added, tickets, work):
    """Loads as many tiles as this program can claim, what is to be added to its own ones, and the sums of others."""
    parts_desc = describe(inbox, max(work.WORLD - 1, 1) * work.TILES, work)
    sums_desc = describe(results, work.WORLD * work.TILES, work)
    count = products(work) + copies(work)
    position = (0, 1)
    place = (0, 1)
    ticket = shmem.claim(me, tickets, count + gl.num_programs(0))
    while ticket < count:
        turn, tile = turn_of(ticket, work)
        owner = owner_of(me, turn, work)
        if tile < owned(owner, work):
            place = scatter.give(claimed, place, ticket)
            row, column = start_of(owner, tile, work)
            if turn < work.WORLD:
                steps = gl.cdiv(work.K, work.BLOCK_K)
                position = matmul.load_steps(
                    ring, position, lhs_desc, 0, row, work.M, rhs_desc, column, 0, steps, False
                )
                if owner == me.rank:
                    position = scatter.load_parts(
                        me, ring, position, parts_desc, last, arrived, tile, work.TILES, row, column, work
                    )
            else:
                position = load_sum(me, ring, position, sums_desc, arrived, added, owner, tile, work)
        ticket = shmem.claim(me, tickets, count + gl.num_programs(0))
    scatter.give(claimed, place, ticket)


@gluon.jit
def describe(region, count, work):
    """A descriptor of so many tiles as they travel, in blocks of as many lines as a stage takes."""
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(0, 16, 2)
    shape = [count * work.BLOCK_M, work.BLOCK_N]
    return tma.make_tensor_descriptor(region, shape, [work.BLOCK_N, 1], [work.LINES, work.BLOCK_N], PLAIN)


@gluon.jit
def load_sum(me, ring, position, sums_desc, arrived, added, owner, tile, work):
    """Loads a tile that its owner has summed into the next stages; if it does not come, `failed` says so.

    It may not come because a third rank is missing. So this one waits for a part from each rank first, which that one
    has not sent either: then it is the one that is named.
    """
    own = gl.minimum(tile, owned(me.rank, work) - 1)
    if own >= 0:
        for i in range(work.WORLD - 1):
            peer = (me.rank + work.WORLD - 1 - i) % work.WORLD
            shmem.wait(me, arrived + i * work.TILES + own, me.epoch, peer)
    place = owner * work.TILES + tile
    shmem.wait(me, added + place, me.epoch, owner)
    shmem.fence_proxy()
    for first in range(0, work.BLOCK_M, work.LINES):
        position = matmul.load_block(ring, position, sums_desc, [place * work.BLOCK_M + first, 0])
    return position


@gluon.jit
def multiply(me, ring, claimed, staged, places, last, scales, out_desc, work, PARTITION: gl.constexpr):
    """Multiplies a partition's rows of the tiles.

    It hands over what is for others, completes what is for this rank, and stores copies.
    """
    size = work.BLOCK_M * work.BLOCK_N
    position = (0, 0)
    from_load = (0, 0)
    to_push = (0, 1)
    ticket, from_load = scatter.take_number(claimed, from_load)
    while ticket < products(work) + copies(work):
        turn, tile = turn_of(ticket, work)
        owner = owner_of(me, turn, work)
        row, column = start_of(owner, tile, work)
        if turn < work.WORLD:
            product, stage, phase = scatter.multiply_scaled(
                me, ring, position, scales, 0, 1, row, column, work, PARTITION
            )
            position = (stage, phase)
            scatter.wait_for_place(staged, to_push)
            place = places + to_push[0] * size
            if owner == me.rank:
                position, _ = scatter.complete(
                    me, product, ring, position, False, last, out_desc, row, column, work, 0, PARTITION, place
                )
            else:
                part = scatter.to_wire(product.to(places.dtype.element_ty))
                gl.store(place + scatter.in_order(part, work, PARTITION), part)
            to_push = scatter.give(staged, to_push, ticket, PARTITION)
        else:
            position = store_sum(me, ring, position, out_desc, row, column, work, PARTITION)
        ticket, from_load = scatter.take_number(claimed, from_load)
    scatter.give(staged, to_push, ticket, PARTITION)
    matmul.finish_stores()


@gluon.jit
def store_sum(me, ring, position, out_desc, row, column, work, PARTITION: gl.constexpr):
    """Stores a partition's rows of a tile that `load_sum` brings into the next stages: the position behind them."""
    PART: gl.constexpr = work.LINES * work.BLOCK_N // work.BLOCK_M  # columns in a stage
    COLUMNS: gl.constexpr = out_desc.block_type.shape[2]
    SHAPE: gl.constexpr = [PART // 16, 2 * work.BLOCK_M, 8]
    LAYOUT: gl.constexpr = scatter.wire_layout(gl.num_warps())
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    WIRE: gl.constexpr = wire.type_of(ring.rhs.dtype, False)
    for first in gl.static_range(0, work.BLOCK_N, PART):
        part, position = matmul.take_block(ring, position, WIRE, SHAPE, PLAIN, LAYOUT, 1, PARTITION)
        if first == 0:
            failed = shmem.failed(me)  # `load` has waited for the sum before the first of these
        part = scatter.from_wire(gl.where(failed, float("nan"), part.to(gl.float32)))
        matmul.store_tile(out_desc, ring, part, 0, row, column + first, first // COLUMNS, PARTITION)
    return position


@gluon.jit
def push(me, staged, inbox, results, places, arrived, added, work):
    """Carries tiles from the outbox: partial ones to their owners, sums to all peers."""
    size = work.BLOCK_M * work.BLOCK_N
    place = (0, 0)
    ticket = scatter.take(staged, place)
    due = me.epoch * 0  # i64
    while ticket < products(work):
        turn, tile = turn_of(ticket, work)
        owner = owner_of(me, turn, work)
        part = turn * work.TILES + tile
        total = owner * work.TILES + tile
        source = places + place[0] * size
        to_owner = inbox + part.to(gl.int64) * size
        to_all = results + total.to(gl.int64) * size
        if owner == me.rank:
            due = scatter.carry(me, source, to_all, me.rank + 1, me.world - 1, due, work.SUM_PACE, work)
        elif ticket + gl.num_programs(0) < products(work):
            due = scatter.carry(me, source, to_owner, owner, 1, due, work.PACE, work)
        else:
            due = scatter.carry(me, source, to_owner, owner, 1, due, work.LAST_PACE, work)
        place = scatter.release(staged, place)
        if owner == me.rank:
            shmem.signal_all(me, added + total, work.WORLD)
        else:
            shmem.signal(me, arrived + part, owner)
        ticket = scatter.take(staged, place)


@gluon.jit
def tiles_a_group(work):
    """How many tickets each rank's tiles of a group have. The last groups may have fewer tiles."""
    return gl.cdiv(work.TILES, work.GROUPS)


@gluon.jit
def products(work):
    """How many tickets are for products. Those of copies follow."""
    return work.GROUPS * work.WORLD * tiles_a_group(work)


@gluon.jit
def copies(work):
    return work.GROUPS * (work.WORLD - 1) * tiles_a_group(work)


@gluon.jit
def turn_of(ticket, work):
    """What a ticket is for: (turn, tile). The tile is that of rank + 1 + turn, and from turn `WORLD` on a copy."""
    a_group = tiles_a_group(work)
    others = max(work.WORLD - 1, 1)
    # In units of a rank's tiles of a group. First come only those of others,
    unit = ticket // a_group
    turn = unit % others
    group = unit // others
    # then in turn own ones and the others' of a later group,
    mixed = unit - (work.LAG + 1) * (work.WORLD - 1)
    is_own = mixed % work.WORLD == 0
    turn = gl.where(mixed < 0, turn, gl.where(is_own, work.WORLD - 1, mixed % work.WORLD - 1))
    group = gl.where(mixed < 0, group, mixed // work.WORLD + gl.where(is_own, 0, work.LAG + 1))
    # own ones alone,
    own = mixed - (work.GROUPS - work.LAG - 1) * work.WORLD
    turn = gl.where(own < 0, turn, work.WORLD - 1)
    group = gl.where(own < 0, group, work.GROUPS - work.LAG - 1 + own)
    # and copies.
    copy = own - (work.LAG + 1)
    turn = gl.where(copy < 0, turn, work.WORLD + copy % others)
    group = gl.where(copy < 0, group, copy // others)
    return turn, group * a_group + ticket % a_group


@gluon.jit
def owner_of(me, turn, work):
    """The rank whose tile a turn is for."""
    return (me.rank + 1 + turn) % work.WORLD


@gluon.jit
def owned(owner, work):
    """How many tiles a rank owns; not above 0 if none."""
    count = gl.cdiv(work.M, work.BLOCK_M) * gl.cdiv(work.N, work.BLOCK_N)
    return gl.minimum(count - owner * work.TILES, work.TILES)


@gluon.jit
def start_of(owner, tile, work):
    """The first row and column of a rank's tile."""
    return scatter.start_of(owner * work.TILES + tile, work)
