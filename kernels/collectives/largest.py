"""The largest number of each row that is sharded, and where it is: what `top_k` of 1 and `sample_greedy` need.

A program takes a row. It finds the largest number of its rank's part, sends it to its twins on the other ranks as two
words, and takes the largest of theirs. So every rank has the same result, and nothing but these words is exchanged.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import shmem

# What f32 become so that their order is that of whole numbers, see `ordered`; all NaN are the same, the largest.
NAN = tl.constexpr(0x7FC00000)
ALL = tl.constexpr(0x7FFFFFFF)
LEAST = tl.constexpr(-(2**63))


@triton.jit
def largest_kernel(
    x_ptr,  # [ROWS, SIZE], this rank's part of each row
    team,
    found,  # messages i32 [ROWS, WORLD, 2]: from each rank the number, and where it is
    value_ptr,  # f32 [ROWS]
    position_ptr,  # i32 [ROWS], in the whole row
    SIZE: tl.constexpr,
    WORLD: tl.constexpr,
    RANKS: tl.constexpr,  # at least WORLD, a power of 2
    BLOCK: tl.constexpr,
):
    me = shmem.start(team, VERIFY=False, EARLY=True, WORLD=WORLD)
    row = tl.program_id(0)
    best = tl.full([BLOCK], LEAST, tl.int64)
    for begin in range(0, SIZE, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row.to(tl.int64) * SIZE + column, mask=column < SIZE)
        number = both(ordered(x.to(tl.float32)), me.rank * SIZE + column)
        best = tl.maximum(best, tl.where(column < SIZE, number, LEAST))
    own = tl.max(best, 0)
    which = tl.arange(0, 2)
    words = tl.where(which == 0, (own >> 32).to(tl.int32), position_of(own))
    box = shmem.messages(me, found) + row * (2 * WORLD)
    for i in tl.static_range(1, WORLD):
        shmem.send_words(me, box + 2 * me.rank + which, words, (me.rank + i) % WORLD)
    shmem.verify(me)
    rank = tl.arange(0, RANKS)[:, None]
    words, came = shmem.receive_words(
        me, box + 2 * rank + which[None, :], rank, mask=(rank < WORLD) & (rank != me.rank) & (which[None, :] >= 0)
    )
    number, position = tl.split(words)
    others = (tl.arange(0, RANKS) < WORLD) & (tl.arange(0, RANKS) != me.rank)
    all_best = tl.maximum(tl.max(tl.where(others, both(number, position), LEAST), 0), own)
    tl.store(value_ptr + row, tl.where(came, value_of((all_best >> 32).to(tl.int32)), float("nan")))
    tl.store(position_ptr + row, tl.where(came, position_of(all_best), -1))
    shmem.finish(me)


@triton.jit
def ordered(x):
    """Whole numbers i32 in the order of x f32, NaN the largest, -0 as 0. None is -1 or 2**31 - 1."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN, tl.where(bits < 0, bits ^ ALL, bits))


@triton.jit
def value_of(number):
    """f32 of what `ordered` returns."""
    return tl.where(number < 0, number ^ ALL, number).to(tl.float32, bitcast=True)


@triton.jit
def both(number, position):
    """One i64, by which larger numbers are larger, and of equal ones those at a lower position."""
    return (number.to(tl.int64) << 32) | (ALL - position).to(tl.int64)


@triton.jit
def position_of(number):
    return ALL - (number & ALL).to(tl.int32)
