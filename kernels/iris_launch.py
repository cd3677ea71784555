"""What stands around an Iris kernel: `jaxtaxfree.iris` writes wrappers that call these functions.

An Iris kernel knows neither calls nor epochs. It takes pointers into a symmetric heap, its rank, and a table of all
ranks' bases: bases[r] + (p - bases[rank]) is where rank r keeps what this rank keeps at p. Its flags hold 0 when it
begins. So the wrapper writes the table, fills this call's copy of the buffers, and meets all ranks once. Who has met
the others knows that their buffers are filled, and that nobody is left in the call before the last one, whose stores
went to the same copy.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import shmem

BLOCK_BYTES = tl.constexpr(1 << 15)  # that a program fills or copies at a time: fewer leave memory idle


@triton.jit
def table(me, region, row, WORLD: tl.constexpr):
    """A pointer to this rank's row [rank, world, base of rank 0, 1, ...] of i64, as Iris's context tensor begins.

    Args:
      region: the parameter of the scratch that holds rows.
      row: which of them.
    """
    return shmem.scratch(me, region, tl.int64) + row * (WORLD + 2)


@triton.jit
def write_table(me, context, WORLD: tl.constexpr):
    """Writes a row. Visible to this program."""
    column = tl.arange(0, triton.next_power_of_2(WORLD + 2))
    bases = shmem._region_of(me, tl.maximum(tl.minimum(column - 2, WORLD - 1), 0))
    value = tl.where(column == 0, me.rank.to(tl.int64), tl.where(column == 1, WORLD, bases))
    tl.store(context + column, value, mask=column < WORLD + 2)
    tl.debug_barrier()


@triton.constexpr_function
def _block(size, bits):
    """How many elements of an array a program fills or copies at a time."""
    return min(triton.next_power_of_2(max(size, 1)), BLOCK_BYTES.value // max(1, bits // 8))


@triton.jit
def fill(pointer, SIZE: tl.constexpr, VALUE: tl.constexpr, part, PARTS: tl.constexpr):
    """Stores a number into part `part` of an array."""
    BLOCK: tl.constexpr = _block(SIZE, pointer.dtype.element_ty.primitive_bitwidth)
    for first in range(part * BLOCK, SIZE, PARTS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(pointer + at, tl.full([BLOCK], VALUE, pointer.dtype.element_ty), mask=at < SIZE)


@triton.jit
def copy(dest, source, SIZE: tl.constexpr, part, PARTS: tl.constexpr):
    """Copies part `part` of an array."""
    BLOCK: tl.constexpr = _block(SIZE, dest.dtype.element_ty.primitive_bitwidth)
    for first in range(part * BLOCK, SIZE, PARTS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(dest + at, tl.load(source + at, mask=at < SIZE), mask=at < SIZE)


@triton.jit
def meet(me, opened, part, PARTS: tl.constexpr, WORLD: tl.constexpr):
    """Publishes this program's part of what is filled, and waits for all parts of all ranks.

    Args:
      part: of this program; programs from PARTS on fill nothing.

    Returns: i1, false if a rank did not come within the heap's timeout.
    """
    if part < PARTS:
        shmem.signal_all(me, opened + me.rank, WORLD)
    return shmem.wait_all(me, opened, me.epoch * PARTS)


@triton.jit
def publish(me, opened, WORLD: tl.constexpr):
    """Publishes this program's part of what is filled."""
    shmem.signal_all(me, opened + me.rank, WORLD)


@triton.jit
def close(me, closed, part, WORLD: tl.constexpr):
    """In a launch behind those that stored: meets the launches of all ranks, so that nothing is on its way any more.

    The signal is the number of the call, not a count: launches of one workspace may close in some calls only.
    """
    if part == 0:
        tl.debug_barrier()
        peers = tl.arange(0, triton.next_power_of_2(WORLD))
        number = (me.epoch + peers * 0).to(tl.int32)
        signals = shmem._signal_of(me, closed + me.rank, peers)
        tl.atomic_xchg(signals, number, mask=(peers < WORLD) & me.ready, sem="release", scope="sys")
    return shmem.wait_all(me, closed, me.epoch)


@triton.jit
def spoil(pointer, SIZE: tl.constexpr, part, PARTS: tl.constexpr):
    """Fills part `part` of a result that is not computed: NaN, -1 in integers."""
    dtype: tl.constexpr = pointer.dtype.element_ty
    if dtype.is_floating():
        fill(pointer, SIZE, float("nan"), part, PARTS)
    elif dtype.is_int_unsigned():
        fill(pointer, SIZE, 2**dtype.primitive_bitwidth - 1, part, PARTS)
    else:
        fill(pointer, SIZE, -1, part, PARTS)


@triton.jit
def programs():
    """How many programs this launch has."""
    return tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
