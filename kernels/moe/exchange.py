"""`spread` and `collect` of tokens that lie on all ranks: each row crosses once to each rank, and back as one sum.

The programs with the lowest ids send, in stages, each with a signal to all ranks. As many others collect, each what the
senders of its number on all ranks have sent. Senders wait for nobody, and a GPU starts them first.

*Dispatch.* A token goes to the inbox of every other rank. Collectors spread the rank's own tokens while those of the
others are on their way, and then a stage at a time.

*Combine* is the transpose. Senders add up the rows that this rank has of each token, and put the sum, in the dtype of
the result, into the inbox of the token's owner. Collectors add those of all ranks up, in f32 and in the order of the
ranks, with this rank's own sum as it is.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import shmem
from jaxtaxfree.kernels.moe.rows import collect_tile, load_tile, spread_tile, store_tile


@triton.jit
def dispatch_kernel(
    y_ptr,  # [TOKENS, D], of this rank; floats or, without weights, i8
    places_ptr,  # i32 [WORLD * TOKENS, CHOICES]: the row here of each choice of all tokens, -1 for none
    weights,  # f32 [WORLD * TOKENS, CHOICES], or nothing, for ones
    team,
    inbox,  # scratch [WORLD, TOKENS, D]: tokens of the other ranks
    arrived,  # signals [PROGRAMS, WORLD]: STAGES of each rank
    rows_ptr,  # [ROWS, D]; whatever was there where no choice has its row
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    CHOICES: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,  # that send, and that collect
    STAGES: tl.constexpr,
    TILE: tl.constexpr,  # tokens that a program moves at a time, a power of 2
    BLOCK: tl.constexpr,  # elements of each, a power of 2
):
    me = shmem.start(team)
    box = shmem.scratch(me, inbox, y_ptr.dtype.element_ty)
    part = tl.program_id(0) % PROGRAMS
    meeting = arrived + part * WORLD
    if tl.program_id(0) < PROGRAMS:
        for stage in range(STAGES):
            begin, end = tiles_of(stage, part, TOKENS, PROGRAMS, STAGES, TILE)
            for i in range(1, WORLD):
                # In step with the peers, each link carries one stream at a time.
                dest = shmem.remote(me, box + me.rank.to(tl.int64) * (TOKENS * D), (me.rank + i) % WORLD)
                for tile in range(begin, end):
                    token, there = tokens_of(tile, part, TOKENS, PROGRAMS, TILE)
                    for first in range(0, D, BLOCK):
                        element = first + tl.arange(0, BLOCK)
                        y = load_tile(y_ptr, token, there, element, D)
                        store_tile(dest, y, token, there & me.ready, element, D)
            shmem.signal_all(me, meeting + me.rank, WORLD)
    else:
        begin, _ = tiles_of(0, part, TOKENS, PROGRAMS, STAGES, TILE)
        _, end = tiles_of(STAGES - 1, part, TOKENS, PROGRAMS, STAGES, TILE)
        spread_tiles(
            rows_ptr, y_ptr, places_ptr, weights, me.rank, part, begin, end, me.ready,
            TOKENS, D, CHOICES, PROGRAMS, TILE, BLOCK,
        )  # fmt: skip
        ready = me.ready
        for stage in range(STAGES):
            ready &= shmem.wait_all(me, meeting, (me.epoch - 1) * STAGES + stage + 1)
            begin, end = tiles_of(stage, part, TOKENS, PROGRAMS, STAGES, TILE)
            for i in range(1, WORLD):
                source = (me.rank + WORLD - i) % WORLD
                of_source = box + source.to(tl.int64) * (TOKENS * D)
                spread_tiles(
                    rows_ptr, of_source, places_ptr, weights, source, part, begin, end, ready,
                    TOKENS, D, CHOICES, PROGRAMS, TILE, BLOCK,
                )  # fmt: skip
    shmem.finish(me)


@triton.jit
def spread_tiles(
    rows_ptr, y_ptr, places_ptr, weights, source, part, begin, end, ready,
    TOKENS: tl.constexpr, D: tl.constexpr, CHOICES: tl.constexpr,
    PROGRAMS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Spreads tokens of a source, [TOKENS, D] at y_ptr, from tile `begin` of a part up to tile `end`."""
    for tile in range(begin, end):
        token, there = tokens_of(tile, part, TOKENS, PROGRAMS, TILE)
        for first in range(0, D, BLOCK):
            element = first + tl.arange(0, BLOCK)
            y = load_tile(y_ptr, token, there, element, D)
            # Whole numbers have no NaN. They are values of 8 bits, and their scales, which come apart, are NaN.
            if y.dtype.is_floating():
                y = tl.where(ready, y, float("nan"))
            spread_tile(rows_ptr, y, places_ptr, weights, source * TOKENS + token, there, element, D, CHOICES)


@triton.jit
def combine_kernel(
    rows_ptr,  # [ROWS, D]
    places_ptr,  # i32 [WORLD * TOKENS, CHOICES]: the row here of each choice of all tokens, -1 for none
    weights,  # f32 [WORLD * TOKENS, CHOICES], or nothing, for ones
    team,
    inbox,  # scratch [WORLD, TOKENS, D]: the other ranks' sums of this rank's tokens
    arrived,  # signals [PROGRAMS, WORLD]: STAGES of each rank
    out_ptr,  # [TOKENS, D]: the sums of all ranks
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    CHOICES: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    me = shmem.start(team)
    box = shmem.scratch(me, inbox, out_ptr.dtype.element_ty)
    part = tl.program_id(0) % PROGRAMS
    meeting = arrived + part * WORLD
    if tl.program_id(0) < PROGRAMS:
        for stage in range(STAGES):
            begin, end = tiles_of(stage, part, TOKENS, PROGRAMS, STAGES, TILE)
            for i in range(1, WORLD):
                owner = (me.rank + i) % WORLD
                dest = shmem.remote(me, box + me.rank.to(tl.int64) * (TOKENS * D), owner)
                for tile in range(begin, end):
                    token, there = tokens_of(tile, part, TOKENS, PROGRAMS, TILE)
                    for first in range(0, D, BLOCK):
                        element = first + tl.arange(0, BLOCK)
                        number = owner * TOKENS + token
                        total = collect_tile(rows_ptr, places_ptr, weights, number, there, element, D, CHOICES)
                        store_tile(dest, total, token, there & me.ready, element, D)
            shmem.signal_all(me, meeting + me.rank, WORLD)
    else:
        ready = me.ready
        for stage in range(STAGES):
            ready &= shmem.wait_all(me, meeting, (me.epoch - 1) * STAGES + stage + 1)
            begin, end = tiles_of(stage, part, TOKENS, PROGRAMS, STAGES, TILE)
            for tile in range(begin, end):
                token, there = tokens_of(tile, part, TOKENS, PROGRAMS, TILE)
                for first in range(0, D, BLOCK):
                    element = first + tl.arange(0, BLOCK)
                    number = me.rank * TOKENS + token
                    own = collect_tile(rows_ptr, places_ptr, weights, number, there, element, D, CHOICES)
                    total = tl.zeros([TILE, BLOCK], tl.float32)
                    for source in tl.static_range(WORLD):
                        came = load_tile(box + source * TOKENS * D, token, there & (source != me.rank), element, D)
                        total += tl.where(source == me.rank, own, came.to(tl.float32))
                    store_tile(out_ptr, tl.where(ready, total, float("nan")), token, there, element, D)
    shmem.finish(me)


@triton.jit
def tiles_of(stage, part, TOKENS: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr):
    """The first tile of a part that belongs to a stage, and the one behind the last. Parts get tiles in turn."""
    tiles = (tl.cdiv(TOKENS, TILE) - part + PROGRAMS - 1) // PROGRAMS
    return tiles * stage // STAGES, tiles * (stage + 1) // STAGES


@triton.jit
def tokens_of(tile, part, TOKENS: tl.constexpr, PROGRAMS: tl.constexpr, TILE: tl.constexpr):
    """The tokens of a tile, and which of them there are."""
    token = (tile * PROGRAMS + part) * TILE + tl.arange(0, TILE)
    return token, token < TOKENS
