"""The largest number of each row that is sharded, and where it is: what `top_k` of 1 and `sample_greedy` need.

A row of a rank falls into parts, and each part has a program. It looks at its part at once, and tells all ranks, its
own as well, by two words what is largest there. The program of a row's last part waits for the words of all parts of
all ranks, and takes the largest. So every rank has the same result, and nothing but these words is exchanged.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import shmem

# What f32 become so that their order is that of whole numbers, see `ordered`; all NaN are the same, the largest.
NAN = tl.constexpr(0x7FC00000)
ALL = tl.constexpr(0x7FFFFFFF)
LEAST = tl.constexpr(-0x80000000)  # less than what any number becomes


@triton.jit
def largest_kernel(
    x_ptr,  # [ROWS, SIZE], this rank's part of each row
    team,
    found,  # messages i32 [ROWS, WORLD, PARTS, 2]: of each part of each rank the number, and where it is
    value_ptr,  # [ROWS], of x's dtype
    position_ptr,  # i32 [ROWS], in the whole row
    SIZE: tl.constexpr,
    PART: tl.constexpr,  # numbers of a row that a program looks at; the last part may have fewer
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    me = shmem.start(team, VERIFY=False, EARLY=True, WORLD=WORLD)
    PARTS: tl.constexpr = triton.cdiv(SIZE, PART)
    row, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    number, column = largest_of_part(x_ptr + row.to(tl.int64) * SIZE, part * PART, SIZE, PART, BLOCK)
    which = tl.arange(0, 2)[None, :]
    box = shmem.messages(me, found) + row * (2 * WORLD * PARTS)
    peer = tl.arange(0, triton.next_power_of_2(WORLD))[:, None]
    dest = box + 2 * (me.rank * PARTS + part) + which + 0 * peer
    shmem.send_words(me, dest, tl.where(which + 0 * peer == 0, number, me.rank * SIZE + column), peer, peer < WORLD)
    shmem.verify(me)
    # It waits for programs of lower ids alone.
    if part == PARTS - 1:
        pair = tl.arange(0, triton.next_power_of_2(WORLD * PARTS))
        sent = pair < WORLD * PARTS
        words, came = shmem.receive_words(
            me, box + 2 * pair[:, None] + which, pair[:, None] // PARTS, sent[:, None] & (which >= 0)
        )
        number, column = tl.split(words)
        number, column = first_of_largest(tl.where(sent, number, LEAST), column)
        tl.store(value_ptr + row, tl.where(came, value_of(number), float("nan")).to(value_ptr.dtype.element_ty))
        tl.store(position_ptr + row, tl.where(came, column, -1))
    shmem.finish(me)


@triton.jit
def largest_of_part(row_ptr, start, SIZE: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr):
    """The largest of a row's numbers from `start` on, as `ordered` has it, and the first column that has it."""
    number = tl.full([BLOCK], LEAST, tl.int32)
    column = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, PART, BLOCK):
        within = begin + tl.arange(0, BLOCK)
        at = start + within
        there = (within < PART) & (at < SIZE)
        x = tl.load(row_ptr + at, mask=there)
        now = tl.where(there, ordered(x.to(tl.float32)), LEAST)
        column = tl.where(now > number, at, column)
        number = tl.maximum(number, now)
    return first_of_largest(number, column)


@triton.jit
def first_of_largest(number, place):
    """The largest of some numbers i32, and the least place among those that are equal to it."""
    most = tl.max(number, 0)
    return most, tl.min(tl.where(number == most, place, ALL), 0)


@triton.jit
def ordered(x):
    """Numbers i32 in the order of x f32, NaN the largest, -0 as 0. None is LEAST, or -1, which does not travel."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN, tl.where(bits < 0, bits ^ ALL, bits))


@triton.jit
def value_of(number):
    """f32 of what `ordered` returns."""
    return tl.where(number < 0, number ^ ALL, number).to(tl.float32, bitcast=True)
