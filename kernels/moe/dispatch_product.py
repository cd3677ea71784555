"""Dispatch and the experts' first product in one Gluon kernel for Hopper: rows cross while others are multiplied.

Persistent programs as in `kernels/ragged_dot/hopper.py`, whose roles `load` and `multiply` these are, with two more:

* `send` sends this rank's tokens to all peers in stages, each with a signal, and waits for nobody.
* `scatter` stores this rank's own tokens to their experts' rows, and then, a stage at a time, those that come.

Tiles of whole blocks of this rank's own rows come first, and wait for all programs' own tokens alone. All other tiles
wait for all rows. A group with such tiles has its weights loaded twice, so only the first EARLY groups have them: as
many as it takes until the peers' rows are there.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.blocks import hopper as blocks
from jaxtaxfree.kernels.blocks import ragged, tiles
from jaxtaxfree.kernels.ragged_dot import hopper as product


class Early(NamedTuple):
    """Of each group the row blocks that have this rank's own rows alone."""

    first: Any  # the first one
    count: Any  # how many
    own: Any  # those of this group and all before, counted
    others: Any  # and all other blocks of these


class Tokens(NamedTuple):
    """What of a call's tokens is constant."""

    TOKENS: Any  # of a rank
    D: Any
    CHOICES: Any
    WORLD: Any
    STAGES: Any


@gluon.jit
def dispatch_product_kernel(
    y_ptr,  # [TOKENS, K], of this rank
    y_desc,  # the same, in blocks [64, BLOCK_K]
    places_ptr,  # i32 [WORLD * TOKENS, CHOICES]
    ends_ptr,  # i32 [WORLD, GROUPS]: rows of each group that this source has, and those before
    weights,  # rhs and gate [GROUPS, K, N] in blocks [1, BLOCK_K, BLOCK_N]
    team,
    inbox,  # scratch [WORLD, TOKENS, K]
    arrived,  # signals [programs, WORLD]
    placed,  # signals [2]: programs whose own tokens, and all tokens, are in their rows
    out_desc,  # [M, N], ragged, in blocks [1, 1, 64, columns stored at a time]
    rows_ptr,  # [M, K]; whatever was there where no choice has its row
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    TOKENS: gl.constexpr,
    CHOICES: gl.constexpr,
    WORLD: gl.constexpr,
    SEND_STAGES: gl.constexpr,
    EARLY: gl.constexpr,  # groups whose own rows are multiplied first
):
    gl.static_assert(gl.num_warps() == 4, "each partition that multiplies has four warps")
    me = shmem.start(team)
    work: gl.constexpr = product.Work(
        M, N, K, GROUPS, BLOCK_M, 2, BLOCK_M // 2, BLOCK_N, BLOCK_K, GROUP_M, STAGES, True, False, False,
        False, (), ACTIVATION, False,
    )  # fmt: skip
    tokens: gl.constexpr = Tokens(TOKENS, K, CHOICES, WORLD, SEND_STAGES)
    ring = product.allocate(y_desc, weights[0], out_desc, work)
    gl.warp_specialize(
        [
            (multiply, (me, ring, out_desc, ends_ptr, work, EARLY, WORLD, 0)),
            (multiply, (me, ring, out_desc, ends_ptr, work, EARLY, WORLD, 1)),
            (load, (me, ring, rows_ptr, y_desc, weights, ends_ptr, placed, work, EARLY, WORLD)),
            (scatter, (me, y_ptr, places_ptr, inbox, arrived, placed, rows_ptr, tokens)),
            (send, (me, y_ptr, inbox, arrived, tokens)),
        ],
        [4, 1, 2, 1],
        [208, 88, 88, 88],
    )
    shmem.finish(me)


@gluon.jit
def read(me, ends_ptr, work, EARLY: gl.constexpr, WORLD: gl.constexpr):
    """The groups, and which of their row blocks need no peer.

    A block that is not full is none of these: TMA loads the first rows of the next group with it.
    """
    LENGTH: gl.constexpr = ragged.length_of(work.GROUPS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([LENGTH // 32], [32], [gl.num_warps()], [0])
    index = gl.arange(0, LENGTH, LAYOUT)
    groups = ragged.read(ends_ptr + (WORLD - 1) * work.GROUPS, index, work.M, work.GROUPS, work.BLOCK_M, False)
    there = index < work.GROUPS
    before = gl.load(ends_ptr + (me.rank - 1) * work.GROUPS + index, mask=there & (me.rank > 0), other=0)
    end = gl.load(ends_ptr + me.rank * work.GROUPS + index, mask=there, other=0)
    first = (before + work.BLOCK_M - 1) // work.BLOCK_M
    last = end // work.BLOCK_M
    count = gl.where(there & (index < EARLY), gl.maximum(last - first, 0), 0)
    own = gl.cumsum(count, 0)
    return groups, Early(first, count, own, groups.blocks - own)


@gluon.jit
def count_tiles(early, work):
    """How many tiles have own rows alone, and how many tiles there are."""
    columns = gl.cdiv(work.N, work.BLOCK_N)
    own = gl.max(early.own, 0) * columns
    return own, own + gl.max(early.others, 0) * columns


@gluon.jit
def place(groups, early, tile, own_tiles, work):
    """Where a tile lies. As `ragged.place`, with those of own rows alone first."""
    columns = gl.cdiv(work.N, work.BLOCK_N)
    is_own = tile < own_tiles
    ends = gl.where(is_own, early.own, early.others)
    tile = gl.where(is_own, tile, tile - own_tiles)
    before = ends <= tile // columns
    group = gl.sum(before.to(gl.int32), 0)
    ahead = gl.max(gl.where(before, ends, 0), 0)
    begin = gl.max(gl.where(groups.index < group, groups.ends, 0), 0)
    here = groups.index == group
    size = gl.sum(gl.where(here, groups.sizes, 0), 0)
    first = gl.sum(gl.where(here, early.first, 0), 0)
    count = gl.sum(gl.where(here, early.count, 0), 0)
    all_blocks = (size + work.BLOCK_M - 1) // work.BLOCK_M
    m, n = tiles.grouped(tile - ahead * columns, gl.where(is_own, count, all_blocks - count), columns, work.GROUP_M)
    m += gl.where(is_own, first, gl.where(m >= first, count, 0))
    return ragged.Place(group, begin, size, m * work.BLOCK_M, n * work.BLOCK_N)


@gluon.jit
def load(me, ring, rows_ptr, y_desc, weights, ends_ptr, placed, work, EARLY: gl.constexpr, WORLD: gl.constexpr):
    """Loads this program's tiles, once their rows have their places."""
    groups, early = read(me, ends_ptr, work, EARLY, WORLD)
    # What is behind the last group nobody has written.
    length = gl.maximum(gl.max(groups.ends, 0), 1)
    rows_desc = tma.make_tensor_descriptor(rows_ptr, [length, work.K], [work.K, 1], y_desc.block_shape, y_desc.layout)
    own, count = count_tiles(early, work)
    stage, phase = 0, 1
    waited = 0  # signals of `placed` that have been waited for
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        needed = gl.where(tile < own, 1, 2)
        if needed > waited:
            shmem.meet(me, placed + needed - 1, me.epoch * gl.num_programs(0))
            shmem.fence_proxy()
        waited = needed
        at = place(groups, early, tile, own, work)
        for step in range(gl.cdiv(work.K, work.BLOCK_K)):
            mbarrier.wait(ring.empty.index(stage), phase)
            product.load_step(ring, stage, rows_desc, weights, at, step * work.BLOCK_K, work)
            stage, phase = blocks.following(stage, phase, work.STAGES)


@gluon.jit
def multiply(me, ring, out_desc, ends_ptr, work, EARLY: gl.constexpr, WORLD: gl.constexpr, PARTITION: gl.constexpr):
    """Multiplies and stores a partition's part of this program's tiles."""
    groups, early = read(me, ends_ptr, work, EARLY, WORLD)
    own, count = count_tiles(early, work)
    stage, phase = 0, 0
    steps = gl.cdiv(work.K, work.BLOCK_K)
    for tile in range(gl.program_id(0), count, gl.num_programs(0)):
        at = place(groups, early, tile, own, work)
        row, column = product.part_of(at, work, PARTITION)
        if product.is_there(at, row, work):
            parts, stage, phase = product.multiply_steps(ring, stage, phase, steps, work, PARTITION)
            parts = blocks.halves(parts[0])
            product.finish(ring, out_desc, parts[0], parts[1], (), groups, at, row, column, work, 0, PARTITION)
        else:
            for _ in range(steps):
                mbarrier.wait(ring.ready.index(stage), phase)
                mbarrier.arrive(ring.empty.index(stage), count=1)
                stage, phase = blocks.following(stage, phase, work.STAGES)
    blocks.finish_stores()


@gluon.constexpr_function
def layout_of(dtype, warps):
    """16 bytes of a thread, next to each other."""
    return gl.BlockedLayout([1, 128 // dtype.primitive_bitwidth], [1, 32], [1, warps], [1, 0])


@gluon.jit
def tokens_of_stage(stage, tokens):
    """Tokens of a stage of this program: first, and the one behind the last. They lie together."""
    each = gl.cdiv(tokens.TOKENS, gl.num_programs(0))
    begin = gl.program_id(0) * each
    first = begin + each * stage // tokens.STAGES
    end = begin + each * (stage + 1) // tokens.STAGES
    return gl.minimum(first, tokens.TOKENS), gl.minimum(end, tokens.TOKENS)


@gluon.jit
def send(me, y_ptr, inbox, arrived, tokens):
    """Sends this program's tokens to all peers, in stages."""
    LAYOUT: gl.constexpr = layout_of(y_ptr.dtype.element_ty, gl.num_warps())
    box = shmem.scratch(me, inbox, y_ptr.dtype.element_ty)
    meeting = arrived + gl.program_id(0) * tokens.WORLD
    row = gl.arange(0, 2, gl.SliceLayout(1, LAYOUT))[:, None]
    BLOCK: gl.constexpr = min(1024, triton.next_power_of_2(tokens.D))
    element = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))[None, :]
    for stage in range(tokens.STAGES):
        begin, end = tokens_of_stage(stage, tokens)
        for i in range(1, tokens.WORLD):
            own = box + me.rank.to(gl.int64) * (tokens.TOKENS * tokens.D)
            dest = shmem.remote(me, own, (me.rank + i) % tokens.WORLD)
            for first in range(begin, end, 2):
                for column in range(0, tokens.D, BLOCK):
                    offset = (first + row).to(gl.int64) * tokens.D + (column + element)
                    there = (first + row < end) & (column + element < tokens.D)
                    value = gl.load(y_ptr + offset, mask=there)
                    gl.store(dest + offset, value, mask=there & me.ready)
        shmem.signal_all(me, meeting + me.rank, tokens.WORLD)


@gluon.jit
def scatter(me, y_ptr, places_ptr, inbox, arrived, placed, rows_ptr, tokens):
    """Stores tokens to their rows: this rank's own ones, and then those that come."""
    box = shmem.scratch(me, inbox, y_ptr.dtype.element_ty)
    meeting = arrived + gl.program_id(0) * tokens.WORLD
    begin, _ = tokens_of_stage(0, tokens)
    _, end = tokens_of_stage(tokens.STAGES - 1, tokens)
    spread(rows_ptr, y_ptr, places_ptr, me.rank, begin, end, me.ready, tokens)
    shmem.arrive(me, placed)
    ready = me.ready
    for stage in range(tokens.STAGES):
        ready &= shmem.wait_all(me, meeting, (me.epoch - 1) * tokens.STAGES + stage + 1)
        begin, end = tokens_of_stage(stage, tokens)
        for i in range(1, tokens.WORLD):
            source = (me.rank + tokens.WORLD - i) % tokens.WORLD
            of_source = box + source.to(gl.int64) * (tokens.TOKENS * tokens.D)
            spread(rows_ptr, of_source, places_ptr, source, begin, end, ready, tokens)
    shmem.arrive(me, placed + 1)


@gluon.jit
def spread(rows_ptr, y_ptr, places_ptr, source, begin, end, ready, tokens):
    """Stores tokens of a source to all of their rows."""
    LAYOUT: gl.constexpr = layout_of(y_ptr.dtype.element_ty, gl.num_warps())
    row = gl.arange(0, 2, gl.SliceLayout(1, LAYOUT))
    BLOCK: gl.constexpr = min(2048, triton.next_power_of_2(tokens.D))
    element = gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))[None, :]
    for first in range(begin, end, 2):
        number = (source * tokens.TOKENS + first + row).to(gl.int64) * tokens.CHOICES
        places = ()
        for choice in gl.static_range(tokens.CHOICES):
            places = places + (gl.load(places_ptr + number + choice, mask=first + row < end, other=-1),)
        for column in range(0, tokens.D, BLOCK):
            offset = (first + row)[:, None].to(gl.int64) * tokens.D + (column + element)
            inside = column + element < tokens.D
            value = gl.load(y_ptr + offset, mask=(first + row < end)[:, None] & inside)
            value = gl.where(ready, value, float("nan"))
            for choice in gl.static_range(tokens.CHOICES):
                at = places[choice][:, None]
                gl.store(rows_ptr + at.to(gl.int64) * tokens.D + (column + element), value, mask=(at >= 0) & inside)
