"""All-gather and matrix product in one Gluon kernel for Hopper, for products of many rows.

Persistent programs, one for each multiprocessor, each of three roles that partitions of its warps play side by side:

* `push`: sends to one peer alone, rank - 1: first this rank's own rows, then those of rank + 1, rank + 2, ... as they
  arrive here. So each link carries one stream, at its full speed, and nobody has to keep the ranks in step. Rows go in
  units of a few rows and one part of K, part after part, which is the order in which they are multiplied. Units are
  claimed by ticket, so that they are sent soon by whoever runs, however few programs the GPU has started. They are sent
  at the pace at which they are multiplied, if that will do: what queues up in front of the wire holds up the product.
* `load`: brings tiles of rows and columns into shared memory by TMA, and waits for a part of K of a block of rows just
  before it loads the first step of it. So the product begins with the first parts that arrive.
* `multiply`: multiplies what is loaded, applies the epilogue, and stores the tiles by TMA. It never waits for a peer.
  Two partitions do so, each for half of the rows of a tile: while one stores, the other one multiplies.

A tile needs the rows of one rank only. Tiles of this rank's own rows come first; the others follow in the order
rank + 1, rank + 2, ..., as they arrive. Nobody waits for a tile, so their programs may start late.

Where ranks have columns of lhs in place of rows, a tile needs those of all ranks: this rank's own first, then those of
rank + 1, rank + 2, ... What is pushed then has another order: all columns of the rows of the first group of tiles, then
of the next one.

No push waits in a circle. A rank's own rows, which it sends first, wait for nothing; what it passes on in a later step
waits for the step before of rank + 1 alone. Units of lower tickets have been claimed by programs that run.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.blocks import epilogue as epilogues
from jaxtaxfree.kernels.blocks import hopper as matmul
from jaxtaxfree.kernels.blocks import several, tiles

CHUNK = gl.constexpr(4)  # rows that a program has in flight: more of them, or more warps, fill the wire no better


class Work(NamedTuple):
    """What of a call is constant."""

    M: Any
    N: Any
    K: Any
    WORLD: Any
    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_K: Any
    GROUP_M: Any
    FAST_SUMS: Any
    PART: Any
    UNIT: Any
    PACE: Any
    GATED: Any
    EPILOGUE: Any
    SCALES: Any
    ACTIVATION: Any
    COLUMNS: Any


@gluon.jit
def all_gather_matmul_hopper_kernel(
    lhs_ptr,  # [1, M, K], this rank's rows or columns
    lhs_desc,  # the same, in boxes [1, rows, BLOCK_K], see `tiles.box_of`
    weights,  # rhs [K, N] in blocks [BLOCK_K, BLOCK_N], or [N, K] in blocks [BLOCK_N, BLOCK_K]; a gate that lies as rhs
    # does, if any; of columns WORLD * K; or several rhs
    half_weights,  # the same, in blocks of half the columns
    epilogue,  # what there is of bias [N], or of a bias for each rhs
    scales,  # of operands of 8 bits what there is of lhs [WORLD * M], rhs [N] and gate [N], f32; or of lhs_blocks
    # [steps, WORLD * M], rhs_blocks and gate_blocks [steps, blocks of matmul.SCALED columns], for steps of as many
    team,
    gathered,  # scratch [WORLD, M, K]; this rank's own rows stay in lhs
    arrived,  # signals [WORLD, row blocks, parts of K]: BLOCK_M // UNIT for each part of the rows of each rank
    tickets,  # signal: to claim units
    out_desc,  # [WORLD, M, N], or [1, M, N] for columns; in blocks [1, rows of a partition, columns stored at a time]
    out1_desc,  # the results of three more rhs, or None
    out2_desc,
    out3_desc,
    gathered_ptr,  # [WORLD, M, K], or [1, M, WORLD * K]: where what is gathered goes as well, or None
    M: gl.constexpr,
    N: gl.constexpr,  # of several rhs a tuple, and so is ACTIVATION: see `blocks.several`
    K: gl.constexpr,
    WORLD: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,  # of each product, if there is a gate
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    FAST_SUMS: gl.constexpr,  # as `matmul.multiply_tile` takes it
    STAGES: gl.constexpr,  # steps of K in flight
    PART: gl.constexpr,  # columns that are sent and waited for together, a multiple of BLOCK_K
    UNIT: gl.constexpr,  # rows that are sent together, of one part
    PACE: gl.constexpr,  # cycles in which a program sends CHUNK of these rows
    EPILOGUE: gl.constexpr,  # the names of `epilogue`
    SCALES: gl.constexpr,  # and of `scales`
    ACTIVATION: gl.constexpr,  # see `epilogue.activate`
    COLUMNS: gl.constexpr,  # ranks have columns of lhs, not rows
):
    gl.static_assert(gl.num_warps() == 4, "each partition that multiplies has four warps")
    me = shmem.start(team)
    GATED: gl.constexpr = len(several.weights_of(weights, N, 0)) > 1
    ring = matmul.allocate(lhs_desc, weights[0], half_weights[0], out_desc, BLOCK_M, STAGES, GATED)
    work: gl.constexpr = Work(
        M, N, K, WORLD, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, FAST_SUMS, PART, UNIT, PACE, GATED, EPILOGUE, SCALES,
        ACTIVATION, COLUMNS,
    )  # fmt: skip
    outs = (out_desc, out1_desc, out2_desc, out3_desc)
    gl.warp_specialize(
        [
            (multiply, (me, ring, outs, epilogue, scales, work, 0)),
            (multiply, (me, ring, outs, epilogue, scales, work, 1)),
            (load, (me, ring, lhs_desc, weights, half_weights, gathered, arrived, work)),
            (push, (me, lhs_ptr, gathered, gathered_ptr, arrived, tickets, work)),
        ],
        [4, 1, 2],
        [216, 64, 64],
    )
    shmem.finish(me)


@gluon.jit
def multiply(me, ring, outs, epilogue, scales, work, PARTITION: gl.constexpr):
    """Multiplies and stores a partition's rows of this program's tiles."""
    position = (0, 0)
    count = tile_count(work)
    whole = matmul.whole(count)
    for tile in range(gl.program_id(0), whole, gl.num_programs(0)):
        position = multiply_tile(me, ring, position, outs, epilogue, scales, tile, 0, work, False, PARTITION)
    for half in range(2 * whole + gl.program_id(0), 2 * count, gl.num_programs(0)):
        position = multiply_tile(me, ring, position, outs, epilogue, scales, half // 2, half % 2, work, True, PARTITION)
    matmul.finish_stores()


@gluon.jit
def multiply_tile(
    me, ring, position, outs, epilogue, scales, tile, half, work, HALF: gl.constexpr, PARTITION: gl.constexpr
):
    source, row, rhs, column = place(me, tile, half, work)
    steps = sources_of_a_tile(work) * gl.cdiv(work.K, work.BLOCK_K)
    factors = matmul.scales_of_blocks(
        ring, scales, work.SCALES, source, work.WORLD, row, work.M, column, work.N, PARTITION
    )
    product, stage, phase = matmul.multiply_tile(
        me, ring, position, steps, HALF, PARTITION, factors, work.GATED, work.FAST_SUMS
    )
    gate = None
    if work.GATED:
        product, gate = matmul.halves(product)
        gate = scale(ring, gate, scales, "gate", source, row, column, work, PARTITION)
    product = scale(ring, product, scales, "rhs", source, row, column, work, PARTITION)
    destination = 0 if work.COLUMNS else source
    for number in gl.static_range(several.count(work.N)):
        if several.is_number(rhs, number):
            store_tile(ring, outs, epilogue, product, gate, destination, row, column, work, PARTITION, number)
    return stage, phase


@gluon.jit
def store_tile(
    ring, outs, epilogue, product, gate, destination, row, column, work, PARTITION: gl.constexpr, NUMBER: gl.constexpr
):
    """Applies the epilogue to a partition's rows of a tile, of columns of this rhs, and stores them."""
    last = epilogues.of(epilogue, work.EPILOGUE, work.N, NUMBER)
    activation: gl.constexpr = several.of(work.ACTIVATION, NUMBER)
    product = matmul.activate(product, gate, last, column, several.of(work.N, NUMBER), activation)
    matmul.store_tile(outs[NUMBER], ring, product, destination, row, column, PARTITION=PARTITION)


@gluon.jit
def scale(ring, tile, scales, NAME: gl.constexpr, source, row, column, work, PARTITION: gl.constexpr):
    return matmul.scale(ring, tile, scales, work.SCALES, NAME, source, row, work.M, column, work.N, PARTITION)


@gluon.jit
def load(me, ring, lhs_desc, weights, half_weights, gathered, arrived, work):
    """Loads this program's tiles, those of other ranks from where they arrive.

    Args:
      weights, half_weights: the columns and those of the gate, in blocks for whole and for half tiles.
    """
    inbox = shmem.scratch(me, gathered, lhs_desc.dtype)
    inbox_desc = tma.make_tensor_descriptor(
        inbox,
        [work.WORLD, work.M, work.K],
        [work.M * work.K, work.K, 1],
        lhs_desc.block_shape,
        lhs_desc.layout,
    )
    position = (0, 1)
    count = tile_count(work)
    whole = matmul.whole(count)
    for tile in range(gl.program_id(0), whole, gl.num_programs(0)):
        position = load_tile(me, ring, position, lhs_desc, inbox_desc, weights, arrived, tile, 0, work, False)
    for half in range(2 * whole + gl.program_id(0), 2 * count, gl.num_programs(0)):
        position = load_tile(
            me, ring, position, lhs_desc, inbox_desc, half_weights, arrived, half // 2, half % 2, work, True
        )


@gluon.jit
def load_tile(me, ring, position, lhs_desc, inbox_desc, weights, arrived, tile, half, work, HALF: gl.constexpr):
    first, row, rhs, column = place(me, tile, half, work)
    for number in gl.static_range(several.count(work.N)):
        if several.is_number(rhs, number):
            position = load_parts(
                me, ring, position, lhs_desc, inbox_desc, several.weights_of(weights, work.N, number), arrived,
                first, row, column, work, HALF,
            )  # fmt: skip
    return position


@gluon.jit
def load_parts(
    me, ring, position, lhs_desc, inbox_desc, weights, arrived, first, row, column, work, HALF: gl.constexpr
):
    """Loads what a tile needs, from its source or all of them."""
    for i in range(sources_of_a_tile(work)):
        source = (first + i) % work.WORLD
        position = load_part(
            me, ring, position, lhs_desc, inbox_desc, weights, arrived, source, row, column, work, HALF
        )
    return position


@gluon.jit
def load_part(
    me, ring, position, lhs_desc, inbox_desc, weights, arrived, source, row, column, work, HALF: gl.constexpr
):
    """Loads what a tile needs of one source."""
    rhs_desc = weights[0]
    gate_desc = weights[1] if work.GATED else None
    steps = gl.cdiv(work.K, work.BLOCK_K)
    above = source * work.K if work.COLUMNS else 0
    if source == me.rank:
        position = matmul.load_steps(
            ring, position, lhs_desc, 0, row, work.M, rhs_desc, column, 0, steps, HALF, gate_desc, above
        )
    else:
        parts = gl.cdiv(work.K, work.PART)
        steps_a_part = work.PART // work.BLOCK_K
        for part in range(parts):
            wait_for_part(me, arrived, source, row, part, work)
            shmem.fence_proxy()
            end = gl.minimum((part + 1) * steps_a_part, steps)
            position = matmul.load_steps(
                ring, position, inbox_desc, source, row, work.M, rhs_desc, column, part * steps_a_part, end, HALF,
                gate_desc, above,
            )  # fmt: skip
    return position


@gluon.jit
def push(me, lhs_ptr, gathered, gathered_ptr, arrived, tickets, work):
    """Sends rows to the rank before, as many units as this program can claim; then copies, if it has to."""
    inbox = shmem.scratch(me, gathered, lhs_ptr.dtype.element_ty)
    peer = (me.rank + work.WORLD - 1) % work.WORLD
    remote = shmem.remote(me, inbox, peer)
    to_send = (work.WORLD - 1) * units_a_rank(work)
    draws = to_send + gl.num_programs(0)
    ticket = shmem.claim(me, tickets, draws)
    due = me.epoch * 0  # i64
    while ticket < to_send:
        source, row, part = unit_of(me, ticket, work.WORLD - 1, work)
        origin, came = find(me, lhs_ptr, inbox, arrived, source, row, part, work)
        # What has not come is not passed on: the others wait in vain, too, and say so.
        due = copy(remote + offset_of(source, work), work.K, origin, row, part, came, True, due, work.PACE, work)
        # Claimed while the unit is on its way, for the signal waits until it is there.
        following = shmem.claim(me, tickets, draws)
        shmem.signal(me, signal_of(source, row, part, arrived, work), peer, came)
        ticket = following

    if gathered_ptr is not None:
        for unit in range(gl.program_id(0), work.WORLD * units_a_rank(work), gl.num_programs(0)):
            source, row, part = unit_of(me, unit, work.WORLD, work)
            origin, came = find(me, lhs_ptr, inbox, arrived, source, row, part, work)
            if work.COLUMNS:
                dest = gl.multiple_of(gathered_ptr + source * work.K, 16)
                copy(dest, work.WORLD * work.K, origin, row, part, True, came, due, 0, work)
            else:
                copy(gathered_ptr + offset_of(source, work), work.K, origin, row, part, True, came, due, 0, work)


@gluon.jit
def units_a_rank(work):
    """Into how many units the rows of a rank are divided."""
    return units_a_part(work) * gl.cdiv(work.K, work.PART)


@gluon.jit
def units_a_part(work):
    return gl.cdiv(work.M, work.BLOCK_M) * work.BLOCK_M // work.UNIT


@gluon.jit
def unit_of(me, unit, SOURCES: gl.constexpr, work):
    """The source of a unit, its first row and its part of K, in the order in which they travel.

    Args:
      SOURCES: how many ranks' units there are.
    """
    if work.COLUMNS:
        # Tiles are multiplied by groups of rows, which need all columns.
        parts: gl.constexpr = (work.K + work.PART - 1) // work.PART
        most: gl.constexpr = work.GROUP_M * work.BLOCK_M // work.UNIT  # units of a part in a group
        group = unit // (most * parts * SOURCES)
        within = unit % (most * parts * SOURCES)
        rows = gl.minimum(units_a_part(work) - group * most, most)
        source = (me.rank + within // (rows * parts)) % work.WORLD
        row = (group * most + within % rows) * work.UNIT
        part = within // rows % parts
    else:
        source = (me.rank + unit // units_a_rank(work)) % work.WORLD
        row = unit % units_a_part(work) * work.UNIT
        part = unit % units_a_rank(work) // units_a_part(work)
    return source, row, part


@gluon.jit
def sources_of_a_tile(work):
    """From how many ranks a tile has what it multiplies."""
    return work.WORLD if work.COLUMNS else 1


@gluon.jit
def find(me, lhs_ptr, inbox, arrived, source, row, part, work):
    """Where the rows of a rank lie here, and whether this part of K of a block of them is there: waits for it."""
    origin = lhs_ptr
    came = me.ready
    if source != me.rank:
        origin = inbox + offset_of(source, work)
        came = wait_for_part(me, arrived, source, row, part, work)
    return gl.multiple_of(origin, 16), came


@gluon.jit
def offset_of(source, work):
    """Of the rows of a rank, in elements, from those of rank 0."""
    return source.to(gl.int64) * (work.M * work.K)


@gluon.jit
def copy(dest, stride, source, row, part, mask, valid, due, PACE: gl.constexpr, work):
    """Copies a unit: some rows of a part of K, or NaN if they are not valid.

    Args:
      stride: from one row of `dest` to the next one.
      due: when to begin, if it is to keep the pace.

    Returns: when the next unit is due.
    """
    # A warp for each 512 bytes of a row, so that data cross the wire in whole lines.
    ELEMENTS: gl.constexpr = 128 // source.dtype.element_ty.primitive_bitwidth  # of 16 bytes
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, ELEMENTS], [1, 32], [1, gl.num_warps()], [1, 0])
    rows = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, work.PART, gl.SliceLayout(0, LAYOUT))[None, :]
    offset = rows * work.K + columns
    dest_offset = rows * stride + columns
    for first in range(0, work.UNIT, CHUNK):
        start = gl.multiple_of((row + first).to(gl.int64) * work.K + part * work.PART, ELEMENTS)
        dest_start = gl.multiple_of((row + first).to(gl.int64) * stride + part * work.PART, ELEMENTS)
        inside = (row + first + rows < work.M) & (part * work.PART + columns < work.K)
        due = shmem.pace(due, PACE)
        value = gl.load(source + start + offset, mask=inside)
        if ELEMENTS == 8:  # of 8 bits not all have a NaN: what is multiplied ends in one in any case
            value = gl.where(valid, value, float("nan"))
        gl.store(dest + dest_start + dest_offset, value, mask=inside & mask)
    return due


@gluon.jit
def place(me, tile, half, work):
    """The source of a tile, or the first of several, its first row, and the number of its rhs and column of it."""
    row_blocks = gl.cdiv(work.M, work.BLOCK_M)
    column_blocks = column_blocks_of(work)
    source = (me.rank + tile // (row_blocks * column_blocks)) % work.WORLD
    row_block, column_block = tiles.grouped(
        tile % (row_blocks * column_blocks), row_blocks, column_blocks, work.GROUP_M
    )
    rhs, block = several.block_of(column_block, work.N, work.BLOCK_N)
    return source, row_block * work.BLOCK_M, rhs, block * work.BLOCK_N + half * (work.BLOCK_N // 2)


@gluon.jit
def column_blocks_of(work):
    return several.blocks_before(work.N, work.BLOCK_N, several.count(work.N))


@gluon.jit
def tile_count(work):
    count = gl.cdiv(work.M, work.BLOCK_M) * column_blocks_of(work)
    return count if work.COLUMNS else work.WORLD * count


@gluon.jit
def signal_of(source, row, part, arrived, work):
    """The signal of a part of K of the block of rows that `row` belongs to."""
    block = source * gl.cdiv(work.M, work.BLOCK_M) + row // work.BLOCK_M
    return arrived + block * gl.cdiv(work.K, work.PART) + part


@gluon.jit
def wait_for_part(me, arrived, source, row, part, work):
    """Waits for all units of a part of K of a block of rows of another rank.

    The one whose rows they are is to blame if they do not come. If it is a rank between that is missing, its own rows
    are the first that do not come.
    """
    count = me.epoch * (work.BLOCK_M // work.UNIT)
    return shmem.wait(me, signal_of(source, row, part, arrived, work), count, source)
