"""Matrix product and reduce-scatter in one Gluon kernel for Hopper, for products of many rows.

Persistent programs, one for each multiprocessor, each of three roles (partitions of warps) that run side by side:

* `load`: claims tiles by ticket, and brings their rows and columns into shared memory by TMA. Behind those of a tile of
  this rank's own rows it waits for the peers' partial tiles, and brings them into the same ring of stages: while it
  waits and they come, the product of the tile goes on. A residual comes behind them in the same way.
* `multiply`: multiplies what is loaded. A tile that another rank owns it leaves in this rank's outbox, and goes on; to
  a tile of this rank's own rows it adds the partial tiles as they are loaded, then does what the epilogue says, and
  stores the result. Two partitions do so, each for half of the rows of a tile: while one hands over, or adds and
  stores, the other one multiplies.
* `push`: carries tiles from the outbox to their owners, at the pace at which they are multiplied: what queues up in
  front of the wire holds up the product.

Tiles of the rows that other ranks own come first, in the order rank + 1, rank + 2, ..., so that at any time each link
carries the tiles of one rank. Tiles of this rank's own rows come last. A program waits only for tiles of lower tickets
on other ranks: programs that run have claimed them, and send them without waiting for anybody. For tickets grow within
a program too: before `load` waits for the first time, it has loaded all of the program's tiles for others, and
`multiply` and `push` need nothing more of it to send them.

The order of additions is the same in every call: a rank's own part, then those of rank - 1, rank - 2, ... Partial tiles
travel as they lie in the registers of the warps that multiply, 16 bytes of each thread after the other. So those who
send and those who add up move whole lines, and nothing from thread to thread.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.blocks import epilogue as epilogues
from jaxtaxfree.kernels.blocks import hopper as matmul
from jaxtaxfree.kernels.blocks import tiles, wire

PLACES = gl.constexpr(4)  # of an outbox


class Work(NamedTuple):
    """The sizes of a call, as constants."""

    M: Any
    N: Any
    K: Any
    WORLD: Any
    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_K: Any
    GROUP_M: Any
    FAST_SUMS: Any
    CHUNK: Any
    PACE: Any
    SCALES: Any
    ACTIVATION: Any
    COLUMNS: Any
    LINES: Any


class Relay(NamedTuple):
    """By which one role of a program hands numbers over to another one, and what it has stored before.

    Where a role has several partitions, all of them hand over, or take, each number.
    """

    numbers: Any  # i32 [PLACES, 1], in shared memory
    given: Any  # mbarriers [PLACES]
    taken: Any  # mbarriers [PLACES]


@gluon.jit
def matmul_reduce_scatter_hopper_kernel(
    lhs_desc,  # [WORLD, M, K], in boxes [1, rows, BLOCK_K], see `tiles.box_of`; [1, M, K] if ranks own columns
    rhs_desc,  # [K, N], in blocks [BLOCK_K, BLOCK_N], or [N, K], in blocks [BLOCK_N, BLOCK_K]; N of all if ranks own
    # columns, WORLD * N
    half_desc,  # the same, in blocks of half the columns
    epilogue,  # what there is of bias [N] and residual [1, M, N], in blocks [1, BLOCK_M, columns that a stage takes]
    scales,  # of operands of 8 bits what there is of lhs [WORLD * M] and rhs [N], f32; or of lhs_blocks [steps,
    # WORLD * M] and rhs_blocks [steps, blocks of matmul.SCALED columns], for steps of as many
    team,
    partials,  # scratch [WORLD - 1, tiles, BLOCK_M, BLOCK_N]: those of rank - 1 come first
    outbox,  # scratch [programs, PLACES, BLOCK_M, BLOCK_N] for tiles of this rank
    arrived,  # signals [WORLD - 1, tiles]: in `partials`
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
    CHUNK: gl.constexpr,  # elements that are pushed at a time, a divisor of a tile's; two of them are in flight
    PACE: gl.constexpr,  # cycles in which a program sends so many
    EPILOGUE: gl.constexpr,  # the names of `epilogue`
    SCALES: gl.constexpr,  # and of `scales`
    ACTIVATION: gl.constexpr,  # see `epilogue.activate`
    COLUMNS: gl.constexpr,  # ranks own columns of the sum, not rows
):
    gl.static_assert(gl.num_warps() == 4, "each partition that multiplies has four warps")
    me = shmem.start(team)
    last = epilogues.of(epilogue, EPILOGUE)
    WIRE: gl.constexpr = wire.type_of(lhs_desc.dtype, False)
    inbox = shmem.scratch(me, partials, WIRE)
    places = shmem.scratch(me, outbox, WIRE) + gl.program_id(0) * (PLACES * BLOCK_M * BLOCK_N)
    ring = matmul.allocate(lhs_desc, rhs_desc, half_desc, out_desc, BLOCK_M, STAGES)
    claimed = allocate_relay(1, 2)
    staged = allocate_relay(2, 1)
    LINES: gl.constexpr = lines_of(ring, BLOCK_M)
    work: gl.constexpr = Work(
        M, N, K, WORLD, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, FAST_SUMS, CHUNK, PACE, SCALES, ACTIVATION, COLUMNS, LINES
    )
    gl.warp_specialize(
        [
            (multiply, (me, ring, claimed, staged, places, last, scales, out_desc, work, 0)),
            (multiply, (me, ring, claimed, staged, places, last, scales, out_desc, work, 1)),
            (load, (me, ring, claimed, lhs_desc, rhs_desc, last, inbox, arrived, tickets, work)),
            (push, (me, staged, inbox, places, arrived, work)),
        ],
        [4, 1, 2],
        [216, 56, 56],
    )
    shmem.finish(me)


@gluon.jit
def load(me, ring, claimed, lhs_desc, rhs_desc, last, inbox, arrived, tickets, work):
    """Loads as many tiles as this program can claim, and for those of this rank's own rows what is to be added."""
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(0, 16, 2)
    count = work.WORLD * tiles_a_rank(work)
    parts_desc = tma.make_tensor_descriptor(
        inbox,
        [max(work.WORLD - 1, 1) * tiles_a_rank(work) * work.BLOCK_M, work.BLOCK_N],
        [work.BLOCK_N, 1],
        [work.LINES, work.BLOCK_N],
        PLAIN,
    )
    position = (0, 1)
    place = (0, 1)
    ticket = shmem.claim(me, tickets, count + gl.num_programs(0))
    while ticket < count:
        place = give(claimed, place, ticket)
        owner = owner_of(me, ticket, work)
        row, column = start_of(ticket % tiles_a_rank(work), work)
        steps = gl.cdiv(work.K, work.BLOCK_K)
        # Past the owner's columns a block has those of the next one, and the result of these is nobody's.
        source, first = (0, owner * work.N) if work.COLUMNS else (owner, 0)
        position = matmul.load_steps(
            ring, position, lhs_desc, source, row, work.M, rhs_desc, first + column, 0, steps, False
        )
        if owner == me.rank:
            tile = ticket % tiles_a_rank(work)
            position = load_parts(
                me, ring, position, parts_desc, last, arrived, tile, tiles_a_rank(work), row, column, work
            )
        ticket = shmem.claim(me, tickets, count + gl.num_programs(0))
    give(claimed, place, ticket)


@gluon.jit
def load_parts(me, ring, position, parts_desc, last, arrived, tile, count, row, column, work):
    """Loads the peers' partial tiles into the next stages: of all peers some lines, then of all of them the next ones.

    Behind some lines of all peers comes the residual's part that is added to their sum. If one of them does not come,
    `failed` says so to `multiply`.

    Args:
      tile, count: which of so many tiles of this rank.
      row, column: where it begins.
    """
    for first in range(0, work.BLOCK_M, work.LINES):
        for i in range(work.WORLD - 1):
            part = i * count + tile
            if first == 0:
                shmem.wait(me, arrived + part, me.epoch, (me.rank + work.WORLD - 1 - i) % work.WORLD)
                shmem.fence_proxy()
            position = matmul.load_block(ring, position, parts_desc, [part * work.BLOCK_M + first, 0])
        if last.residual is not None:
            at = [0, row, column + first * work.BLOCK_N // work.BLOCK_M]
            position = matmul.load_block(ring, position, last.residual, at)
    return position


@gluon.jit
def multiply(me, ring, claimed, staged, places, last, scales, out_desc, work, PARTITION: gl.constexpr):
    """Multiplies a partition's rows of the tiles; hands over what is for others, completes what is for this rank."""
    size = work.BLOCK_M * work.BLOCK_N
    sent = (work.WORLD - 1) * tiles_a_rank(work)
    position = (0, 0)
    from_load = (0, 0)
    to_push = (0, 1)
    ticket, from_load = take_number(claimed, from_load)
    while ticket < work.WORLD * tiles_a_rank(work):
        row, column = start_of(ticket % tiles_a_rank(work), work)
        source = 0 if work.COLUMNS else owner_of(me, ticket, work)
        product, stage, phase = multiply_scaled(
            me, ring, position, scales, source, work.WORLD, row, column, work, PARTITION
        )
        position = (stage, phase)
        if ticket < sent:
            wait_for_place(staged, to_push)
            part = to_wire(product.to(places.dtype.element_ty))
            gl.store(places + to_push[0] * size + in_order(part, work, PARTITION), part)
            to_push = give(staged, to_push, ticket, PARTITION)
        else:
            row, column = start_of(ticket - sent, work)  # again, so that no register holds them meanwhile
            position, _ = complete(
                me, product, ring, position, False, last, out_desc, row, column, work, PARTITION=PARTITION
            )
        ticket, from_load = take_number(claimed, from_load)
    give(staged, to_push, ticket, PARTITION)
    matmul.finish_stores()


@gluon.jit
def multiply_scaled(
    me, ring, position, scales, source, SOURCES: gl.constexpr, row, column, work, PARTITION: gl.constexpr
):
    """A partition's rows of the tile that begins here, times its scales, f32, and the position behind it.

    Args:
      source: of the rows, of so many SOURCES.
    """
    factors = matmul.scales_of_blocks(
        ring, scales, work.SCALES, source, SOURCES, row, work.M, column, work.N, PARTITION
    )
    steps = gl.cdiv(work.K, work.BLOCK_K)
    product, stage, phase = matmul.multiply_tile(
        me, ring, position, steps, False, PARTITION, factors, FAST_SUMS=work.FAST_SUMS
    )
    product = matmul.scale(ring, product, scales, work.SCALES, "rhs", source, row, work.M, column, work.N, PARTITION)
    return product, stage, phase


@gluon.jit
def push(me, staged, inbox, places, arrived, work):
    """Carries tiles from the outbox to their owners, to the same places as they have in the order of tickets."""
    size = work.BLOCK_M * work.BLOCK_N
    place = (0, 0)
    ticket = take(staged, place)
    due = me.epoch * 0  # i64
    while ticket < (work.WORLD - 1) * tiles_a_rank(work):
        owner = owner_of(me, ticket, work)
        dest = inbox + ticket.to(gl.int64) * size
        due = carry(me, places + place[0] * size, dest, owner, 1, due, work.PACE, work)
        place = release(staged, place)
        shmem.signal(me, arrived + ticket, owner)
        ticket = take(staged, place)


@gluon.jit
def carry(me, source, dest, peer, peers, due, PACE: gl.constexpr, work):
    """Carries a tile to so many ranks from `peer` on, and says when the next chunk is due.

    Args:
      peers: how many; a variable where they are all, so that registers hold the address of one at a time.
    """
    LINES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    size = work.BLOCK_M * work.BLOCK_N
    element = gl.arange(0, work.CHUNK, LINES)
    value = gl.load(source + element)
    for first in range(0, size - work.CHUNK, work.CHUNK):
        due = shmem.pace(due, PACE)
        later = gl.load(source + (first + work.CHUNK) + element)  # on its way while the last one is stored
        for i in range(peers):
            shmem.store(me, dest + first + element, value, (peer + i) % work.WORLD)
        value = later
    for i in range(peers):
        shmem.store(me, dest + (size - work.CHUNK) + element, value, (peer + i) % work.WORLD)
    return due


@gluon.jit
def tiles_a_rank(work):
    return gl.cdiv(work.M, work.BLOCK_M) * gl.cdiv(work.N, work.BLOCK_N)


@gluon.jit
def owner_of(me, ticket, work):
    """The rank whose tile a ticket is for."""
    return (me.rank + 1 + ticket // tiles_a_rank(work)) % work.WORLD


@gluon.jit
def start_of(tile, work):
    """The first row and column of a tile of a rank."""
    row_block, column_block = tiles.grouped(
        tile, gl.cdiv(work.M, work.BLOCK_M), gl.cdiv(work.N, work.BLOCK_N), work.GROUP_M
    )
    return row_block * work.BLOCK_M, column_block * work.BLOCK_N


@gluon.constexpr_function
def lines_of(ring, BLOCK_M):
    """How many lines of a partial tile a stage takes, where a tile as it travels has BLOCK_M lines of BLOCK_N elements.

    They hold all rows of some columns, because columns travel one after the other. They lie where the columns of a step
    lie, whose elements may be shorter.
    """
    bits = ring.rhs.dtype.primitive_bitwidth
    return min(ring.lhs.shape[3] * bits // max(bits, 16), BLOCK_M)


@gluon.jit
def complete(
    me,
    tile,
    ring,
    position,
    failed,
    last,
    out_desc,
    row,
    column,
    work,
    PIECE: gl.constexpr = 0,
    PARTITION: gl.constexpr = 0,
    outbox=None,
):
    """Adds the peers' partial tiles to columns of a tile, as they arrive in the next stages, and stores the result.

    Args:
      tile: a partition's rows of these columns.
      position: of the first of these stages.
      failed: whether this rank has given up, so that the sum is NaN; looked up with the first columns.
      PIECE: how many pieces of the tile come before.
      PARTITION: which of those that multiply calls.
      outbox: where to leave the whole tile's result as it travels, too, or None.

    Returns: the position behind the stages, and `failed`.
    """
    PART: gl.constexpr = work.LINES * work.BLOCK_N // work.BLOCK_M  # columns in a stage
    COLUMNS: gl.constexpr = out_desc.block_type.shape[2]
    LAYOUT: gl.constexpr = wire_layout(gl.num_warps())
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    half: gl.constexpr = tile.shape[1] // 2
    if tile.shape[1] > PART:
        left, right = matmul.halves(tile)
        AFTER: gl.constexpr = PIECE + half // COLUMNS
        position, failed = complete(
            me, left, ring, position, failed, last, out_desc, row, column, work, PIECE, PARTITION, outbox
        )
        position, failed = complete(
            me, right, ring, position, failed, last, out_desc, row, column + half, work, AFTER, PARTITION, outbox
        )
    else:
        tile = to_wire(tile)
        SHAPE: gl.constexpr = [tile.shape[0], 2 * work.BLOCK_M, tile.shape[2]]
        WIRE: gl.constexpr = wire.type_of(ring.rhs.dtype, False)
        for _ in range(work.WORLD - 1):
            part, position = matmul.take_block(ring, position, WIRE, SHAPE, PLAIN, LAYOUT, 1, PARTITION)
            tile += part.to(gl.float32)
        if PIECE == 0:
            failed = shmem.failed(me)  # `load` has waited for all peers before the last of these
        tile = from_wire(gl.where(failed, float("nan"), tile))
        tile, position = finish_sum(tile, ring, position, last, column, work, PARTITION)
        if outbox is not None:
            part = to_wire(tile.to(outbox.dtype.element_ty))
            gl.store(outbox + PIECE * COLUMNS * work.BLOCK_M + in_order(part, work, PARTITION), part)
        matmul.store_tile(out_desc, ring, tile, 0, row, column, PIECE, PARTITION)
    return position, failed


@gluon.jit
def finish_sum(tile, ring, position, last, column, work, PARTITION: gl.constexpr):
    """activation(sum + bias) + residual of columns of a tile, and the position behind the residual's stage."""
    N: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    tile = gl.convert_layout(tile, LAYOUT, assert_trivial=True)
    tile = matmul.activate(tile, None, last, column, work.N, work.ACTIVATION)
    if last.residual is not None:
        dtype: gl.constexpr = last.residual.dtype
        SHAPE: gl.constexpr = [work.BLOCK_M, N]
        SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, dtype)
        residual, position = matmul.take_block(ring, position, dtype, SHAPE, SHARED, LAYOUT, 0, PARTITION)
        tile += residual.to(gl.float32)
    return tile, position


@gluon.constexpr_function
def wire_layout(num_warps):
    """How the warps that multiply hold a tile as it travels."""
    return gl.BlockedLayout([1, 1, 8], [1, 32, 1], [1, num_warps, 1], [2, 1, 0])


@gluon.jit
def to_wire(tile):
    """Columns of a product [M, N] as they travel, [N / 16, threads, 8], without leaving the registers.

    A warp has 16 rows. Of them a thread has the rows r and r + 8, and of each 8 columns two next to each other.
    """
    M: gl.constexpr = tile.shape[0]
    N: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = wire_layout(gl.num_warps())
    tile = tile.reshape([M // 16, 2, 8, N // 16, 2, 4, 2]).permute([3, 0, 2, 5, 4, 1, 6])
    return gl.convert_layout(tile.reshape([N // 16, 2 * M, 8]), LAYOUT, assert_trivial=True)


@gluon.jit
def from_wire(tile):
    """What `to_wire` made of a tile, as it was."""
    M: gl.constexpr = tile.shape[1] // 2
    N: gl.constexpr = tile.shape[0] * 16
    return tile.reshape([N // 16, M // 16, 8, 4, 2, 2, 2]).permute([1, 5, 2, 0, 4, 3, 6]).reshape([M, N])


@gluon.jit
def in_order(tile, work, PARTITION: gl.constexpr):
    """Where the elements of a partition's rows of a tile on the wire lie: lines of all threads, one after the other."""
    LAYOUT: gl.constexpr = wire_layout(gl.num_warps())
    i = gl.arange(0, tile.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    j = gl.arange(0, tile.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    k = gl.arange(0, tile.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    return (i * (2 * work.BLOCK_M) + PARTITION * tile.shape[1] + j) * tile.shape[2] + k


@gluon.jit
def allocate_relay(GIVERS: gl.constexpr, TAKERS: gl.constexpr):
    """A `Relay` between so many partitions. Called by the kernel itself, before `gl.warp_specialize`."""
    numbers = gl.allocate_shared_memory(gl.int32, [PLACES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    given = mbarrier.allocate_mbarrier(batch=PLACES)
    taken = mbarrier.allocate_mbarrier(batch=PLACES)
    for i in gl.static_range(PLACES):
        mbarrier.init(given.index(i), count=GIVERS)
        mbarrier.init(taken.index(i), count=TAKERS)
    return Relay(numbers, given, taken)


@gluon.jit
def wait_for_place(relay, position):
    """Waits until what was handed over at a position has been released.

    Args:
      position: (place, phase), (0, 1) in the beginning.
    """
    place, phase = position
    mbarrier.wait(relay.taken.index(place), phase)


@gluon.jit
def give(relay, position, number, PARTITION: gl.constexpr = 0):
    """Hands a number over, and all that this role has stored: the next position.

    Args:
      PARTITION: of several that hand over the same numbers the first one writes them.
    """
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    wait_for_place(relay, position)
    place, phase = position
    if PARTITION == 0:
        relay.numbers.index(place).store(gl.full([1], number, gl.int32, WARP))
    mbarrier.arrive(relay.given.index(place), count=1)
    return following(place, phase)


@gluon.jit
def take(relay, position):
    """Waits for the number that is handed over at a position, (0, 0) in the beginning. `release` has to follow."""
    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place, phase = position
    mbarrier.wait(relay.given.index(place), phase)
    return gl.max(relay.numbers.index(place).load(WARP), 0)


@gluon.jit
def release(relay, position):
    """Lets the other role use the place again: the next position."""
    place, phase = position
    mbarrier.arrive(relay.taken.index(place), count=1)
    return following(place, phase)


@gluon.jit
def take_number(relay, position):
    """`take` and `release` of a number with which nothing else comes: the number and the next position."""
    number = take(relay, position)
    place, phase = release(relay, position)
    return number, (place, phase)


@gluon.jit
def following(place, phase):
    last = place == PLACES - 1
    return gl.where(last, 0, place + 1), gl.where(last, phase ^ 1, phase)
