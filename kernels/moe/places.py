"""Where the row of each choice of an expert lies when rows are in groups by expert.

Choices come in the order of SOURCES ranks, and then of tokens. Those of an expert keep this order. At most MOST rows
are taken: in the order of the sources, then of the experts, then of the tokens, the last ones have no place.

Two launches: the first counts the choices of each block, and in the second each program adds up the counts of all
blocks by itself. So nobody waits for anybody.
"""

import triton
import triton.language as tl


@triton.jit
def count_kernel(
    experts_ptr,  # i32 [SOURCES, PER]: what is below 0, or EXPERTS or more, is no expert
    counts_ptr,  # i32 [SOURCES * BLOCKS, EXPERTS]
    PER: tl.constexpr,  # choices of a source
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,  # choices of a program, a power of 2
    BLOCKS: tl.constexpr,  # of a source
    STEP: tl.constexpr,  # experts that are counted at a time, a power of 2
):
    block = tl.program_id(0)
    expert = load_block(experts_ptr, block, PER, BLOCK, BLOCKS)
    for first in range(0, EXPERTS, STEP):
        kind = first + tl.arange(0, STEP)
        count = tl.sum((expert[:, None] == kind[None, :]).to(tl.int32), 0)
        tl.store(counts_ptr + block * EXPERTS + kind, count, mask=kind < EXPERTS)


@triton.jit
def place_kernel(
    experts_ptr,  # i32 [SOURCES, PER]
    counts_ptr,  # i32 [SOURCES * BLOCKS, EXPERTS], of `count_kernel`
    places_ptr,  # i32 [SOURCES, PER]: the row of each choice, -1 if it has none
    sizes_ptr,  # i32 [EXPERTS]: how many rows each expert has
    SOURCES: tl.constexpr,
    PER: tl.constexpr,
    EXPERTS: tl.constexpr,
    LENGTH: tl.constexpr,  # EXPERTS or more, a power of 2
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,  # blocks whose counts are added up at a time, a power of 2
):
    block = tl.program_id(0)
    own = block // BLOCKS
    kind = tl.arange(0, LENGTH)
    ahead = 0  # rows of the sources before, also of those that have no place
    sizes = tl.zeros([LENGTH], tl.int32)
    room = tl.zeros([LENGTH], tl.int32)  # of this block, how many choices of each expert have a place
    begin = tl.zeros([LENGTH], tl.int32)  # and the first of these places, of the expert's
    for source in range(SOURCES):
        count = tl.zeros([LENGTH], tl.int32)
        before = tl.zeros([LENGTH], tl.int32)
        for first in range(0, BLOCKS, STEP):
            other = first + tl.arange(0, STEP)[:, None]
            there = (other < BLOCKS) & (kind[None, :] < EXPERTS)
            index = (source * BLOCKS + other) * EXPERTS + kind[None, :]
            counts = tl.load(counts_ptr + index, mask=there, other=0)
            count += tl.sum(counts, 0)
            before += tl.sum(tl.where(source * BLOCKS + other < block, counts, 0), 0)
        end = ahead + tl.cumsum(count, 0)
        taken = tl.minimum(tl.maximum(MOST - (end - count), 0), count)
        room = tl.where(source == own, taken - before, room)
        begin = tl.where(source == own, sizes + before, begin)
        sizes += taken
        ahead += tl.sum(count, 0)
    begin += tl.cumsum(sizes, 0) - sizes

    expert = load_block(experts_ptr, block, PER, BLOCK, BLOCKS)
    is_kind = expert[:, None] == kind[None, :]
    index = tl.cumsum(is_kind.to(tl.int32), 0) - 1  # among the block's choices of this expert
    # One term of the sum at most, and one more than the place.
    found = tl.sum(tl.where(is_kind & (index < room[None, :]), begin[None, :] + index + 1, 0), 1)
    at = block % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    tl.store(places_ptr + own * PER + at, found - 1, mask=at < PER)
    tl.store(sizes_ptr + kind, sizes, mask=(kind < EXPERTS) & (block == 0))


@triton.jit
def load_block(experts_ptr, block, PER: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The experts of a block; -1 where there is no choice."""
    at = block % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    return tl.load(experts_ptr + block // BLOCKS * PER + at, mask=at < PER, other=-1)
