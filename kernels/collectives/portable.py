"""Sums and exchanges of small arrays among the ranks: `psum`, `all_gather`, `psum_scatter`, `all_to_all`.

Each program takes a block of elements and talks with its twins on the other ranks alone. It puts a block into the
inbox of every rank, and collects one of each rank from its own inbox. PROTOCOL says how a block travels:

* "messages", which say by themselves that they have arrived. A message carries 16 bits of payload, so that is twice
  the bytes, or 4 times of 8-bit types, but takes no fence: the fastest way for what is small (NCCL's LL protocol).
* "words", which do so too and carry 32 bits, but for one pattern that arrives as another one, a NaN as well. Sums of
  floats need no more; a gather sends a second word for each of these two, which says what it was. A rank sends itself
  none.
* "signals": as it is, and a signal after it. The other two need none: each thread polls its own.

A sum takes one shot, in which every rank gets all that the others have, or two: each rank sums up its share of the
elements, then the ranks gather the sums. Payloads are integers of the elements' size, so that every bit pattern
arrives as it was sent.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import shmem

# As this word `shmem.send_words` delivers -1, too: the same word with the top bit.
DOUBTFUL = tl.constexpr(0x7FFFFFFF)
TOP_BIT = tl.constexpr(-0x80000000)


@triton.jit
def psum_kernel(
    x_ptr,  # [SIZE]
    team,
    parts,  # inbox [WORLD, programs, BLOCK]: the ranks' elements
    sums,  # inbox of the same shape, of two shots: the sums
    arrived,  # signals [2, programs, WORLD]
    out_ptr,  # [SIZE]
    SIZE: tl.constexpr,
    PART: tl.constexpr,  # elements that a rank sums up
    TWO_SHOT: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PROTOCOL: tl.constexpr,
):
    me = shmem.start(team, VERIFY=False, EARLY=True, WORLD=WORLD)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if TWO_SHOT:
        own = load_parts(me, x_ptr, element, SIZE, PART, PART, WORLD)
        blocks, came, late, there = exchange(me, own, parts, arrived, WORLD, PROTOCOL)
        own = (total(blocks, dtype, WORLD),) * WORLD
        all_arrived = arrived + tl.num_programs(0) * WORLD
        blocks, all_came, all_late, _ = exchange(me, own, sums, all_arrived, WORLD, PROTOCOL, after=late, there=there)
        store_gathered(out_ptr, blocks, came & all_came, element, SIZE, PART, PART, WORLD)
        reports = clear(me, own[0], parts, late, WORLD, PROTOCOL)
        all_reports = clear(me, own[0], sums, all_late, WORLD, PROTOCOL)
        shmem.finish(me)
        shmem.leave_if_all_came(me, reports + all_reports)
        report(me, own[0], parts, reports, PROTOCOL)
        report(me, own[0], sums, all_reports, PROTOCOL)
    else:
        own = (load_bits(x_ptr + element, element < SIZE),) * WORLD
        blocks, came, late, _ = exchange(me, own, parts, arrived, WORLD, PROTOCOL)
        store_bits(out_ptr + element, total(blocks, dtype, WORLD), came, element < SIZE)
        reports = clear(me, own[0], parts, late, WORLD, PROTOCOL)
        shmem.finish(me)
        shmem.leave_if_all_came(me, reports)
        report(me, own[0], parts, reports, PROTOCOL)


@triton.jit
def psum_scatter_kernel(
    x_ptr,  # [PART / INNER, WORLD, INNER]
    team,
    parts,  # inbox [WORLD, programs, BLOCK]
    arrived,  # signals [programs, WORLD]
    out_ptr,  # [PART / INNER, INNER]
    SIZE: tl.constexpr,  # elements of x
    PART: tl.constexpr,
    INNER: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PROTOCOL: tl.constexpr,
):
    me = shmem.start(team, VERIFY=False, EARLY=True, WORLD=WORLD)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = load_parts(me, x_ptr, element, SIZE, PART, INNER, WORLD)
    blocks, came, late, _ = exchange(me, own, parts, arrived, WORLD, PROTOCOL)
    store_bits(out_ptr + element, total(blocks, x_ptr.dtype.element_ty, WORLD), came, element < PART)
    reports = clear(me, own[0], parts, late, WORLD, PROTOCOL)
    shmem.finish(me)
    shmem.leave_if_all_came(me, reports)
    report(me, own[0], parts, reports, PROTOCOL)


@triton.jit
def all_gather_kernel(
    x_ptr,  # [PART / INNER, INNER]
    team,
    parts,  # inbox [WORLD, programs, BLOCK]
    doubts,  # inbox of the same shape, of words: for those in which two patterns of bits look the same
    arrived,  # signals [programs, WORLD]
    out_ptr,  # [PART / INNER, WORLD, INNER]
    SIZE: tl.constexpr,  # elements of the result
    PART: tl.constexpr,
    INNER: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PROTOCOL: tl.constexpr,
):
    me = shmem.start(team, VERIFY=False, EARLY=True, WORLD=WORLD)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = (load_bits(x_ptr + element, element < PART),) * WORLD
    blocks, came, late, _ = exchange(me, own, parts, arrived, WORLD, PROTOCOL, doubts)
    store_gathered(out_ptr, blocks, came, element, SIZE, PART, INNER, WORLD)
    reports = clear(me, own[0], parts, late, WORLD, PROTOCOL)
    if PROTOCOL == "words":
        settle(me, out_ptr, blocks, doubts, element, SIZE, PART, INNER, WORLD)
    shmem.finish(me)
    shmem.leave_if_all_came(me, reports)
    report(me, own[0], parts, reports, PROTOCOL)


@triton.jit
def all_to_all_kernel(
    x_ptr,  # [PART / INNER, WORLD, INNER]: a part for each rank
    team,
    parts,  # inbox [WORLD, programs, BLOCK]
    doubts,  # as of `all_gather_kernel`
    arrived,  # signals [programs, WORLD]
    out_ptr,  # [PART / OUT_INNER, WORLD, OUT_INNER]: a part of each rank
    SIZE: tl.constexpr,  # elements of x, and of the result
    PART: tl.constexpr,
    INNER: tl.constexpr,
    OUT_INNER: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PROTOCOL: tl.constexpr,
):
    me = shmem.start(team, VERIFY=False, EARLY=True, WORLD=WORLD)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = load_parts(me, x_ptr, element, SIZE, PART, INNER, WORLD)
    blocks, came, late, _ = exchange(me, own, parts, arrived, WORLD, PROTOCOL, doubts)
    store_gathered(out_ptr, blocks, came, element, SIZE, PART, OUT_INNER, WORLD)
    reports = clear(me, own[0], parts, late, WORLD, PROTOCOL)
    if PROTOCOL == "words":
        settle(me, out_ptr, blocks, doubts, element, SIZE, PART, OUT_INNER, WORLD)
    shmem.finish(me)
    shmem.leave_if_all_came(me, reports)
    report(me, own[0], parts, reports, PROTOCOL)


@triton.jit
def load_parts(me, x_ptr, element, SIZE: tl.constexpr, PART: tl.constexpr, INNER: tl.constexpr, WORLD: tl.constexpr):
    """Some elements of each rank's part of x: those of rank + 1, rank + 2, ..."""
    parts = ()
    for i in tl.static_range(1, WORLD + 1):
        at, mask = place(element, (me.rank + i) % WORLD, SIZE, PART, INNER, WORLD)
        parts = parts + (load_bits(x_ptr + at, mask),)
    return parts


@triton.jit
def exchange(
    me, own, region, arrived, WORLD: tl.constexpr, PROTOCOL: tl.constexpr, doubts=None, after=None, there=True
):
    """Puts blocks into the inboxes of rank + 1, rank + 2, ..., and waits for what the program's twins have put here.

    Args:
      doubts: where words are to arrive exactly, an inbox for what decides between two patterns; `settle` reads it.
      after: what an earlier exchange has returned as `late`. A thread that missed something there does not wait here.
      there: what an earlier exchange has returned as such, of which `own` was made: the others are not to take a sum
        for whole that is not, but to find this rank missing.

    Returns: (the block of each rank, words that did not come being NaN; whether the others came, for all elements or
      for each; `late`, which `clear` takes; which words of the blocks came, or whether all did).
    """
    dtype: tl.constexpr = own[0].dtype
    BLOCK: tl.constexpr = own[0].shape[0]
    WORDS: tl.constexpr = words_of_block(BLOCK, dtype, PROTOCOL)
    came = me.ready
    late = ()
    blocks = ()
    if PROTOCOL == "words":
        for i in tl.static_range(1, WORLD):
            to = inbox(me, region, me.rank, tl.int32, WORDS)
            words = shmem.words_of(own[i - 1])
            shmem.send_words(me, to, words, (me.rank + i) % WORLD, there)
            if doubts is not None:
                to = inbox(me, doubts, me.rank, tl.int32, WORDS)
                shmem.send_words(me, to, words & TOP_BIT, (me.rank + i) % WORLD, (words & ~TOP_BIT) == DOUBTFUL)
        shmem.verify(me)
        stride = tl.num_programs(0) * WORDS
        words, all_came, late = shmem.poll_vectors(
            me, vectors(me, region, WORDS), stride, WORLD, patient=came_before(after)
        )
        there = tl.max_constancy(of_each(all_came, 4), 4)
        own_words = shmem.words_of(own[WORLD - 1])
        for rank in tl.static_range(WORLD):
            blocks = blocks + (shmem.elements_of(tl.where(rank == me.rank, own_words, words[rank]), dtype),)
    elif PROTOCOL == "messages":
        for i in tl.static_range(1, WORLD + 1):
            to = inbox(me, region, me.rank, tl.int32, WORDS)
            shmem.send(me, to, pack(own[i - 1]), (me.rank + i) % WORLD, there)
        shmem.verify(me)
        stride = tl.num_programs(0) * WORDS
        words, all_came, late = shmem.poll_vectors(
            me, vectors(me, region, WORDS), stride, WORLD, OWN=True, patient=came_before(after), CLEARED=False
        )
        for rank in tl.static_range(WORLD):
            blocks = blocks + (unpack(words[rank], dtype),)
        there = tl.max_constancy(of_each(all_came, 4), 4)
        came = of_each(all_came, BLOCK // (WORDS // 4))
    else:
        for i in tl.static_range(1, WORLD + 1):
            shmem.store(me, inbox(me, region, me.rank, dtype, BLOCK), own[i - 1], (me.rank + i) % WORLD)
        shmem.signal_all(me, arrived + tl.program_id(0) * WORLD + me.rank, WORLD, there)
        shmem.verify(me)
        came = shmem.wait_all(me, arrived + tl.program_id(0) * WORLD, me.epoch)
        there = came
        for rank in tl.static_range(WORLD):
            blocks = blocks + (tl.load(inbox(me, region, rank, dtype, BLOCK)),)
    return blocks, came, late, there


@triton.jit
def of_each(all_came, COUNT: tl.constexpr):
    """What is true of vectors, for each of the COUNT things in them: words, or elements."""
    each = all_came[:, None] & (tl.arange(0, COUNT)[None, :] >= 0)
    return each.reshape(COUNT * all_came.shape[0])


@triton.jit
def came_before(after):
    """Whether all came that an earlier exchange has waited for, as far as each thread knows."""
    patient = True
    if after is not None:
        for i in tl.static_range(len(after)):
            patient = patient & (after[i] == 0)
    return patient


@triton.jit
def clear(me, block, region, late, WORLD: tl.constexpr, PROTOCOL: tl.constexpr):
    """Makes room for later calls once the result is stored.

    Args:
      block: one of those that were put.
      late: what `exchange` returned last; it took the other arguments.

    Returns: what `report` takes as `reports`.
    """
    reports = ()
    if PROTOCOL != "signals":
        WORDS: tl.constexpr = words_of_block(block.shape[0], block.dtype, PROTOCOL)
        source = vectors(me, region, WORDS)
        stride = tl.num_programs(0) * WORDS
        reports = shmem.clear_vectors(me, source, stride, late, WORLD, CLEARED=PROTOCOL == "words")
    return reports


@triton.jit
def report(me, block, region, reports, PROTOCOL: tl.constexpr):
    """Reports what did not come in an exchange; takes what `clear` took, and what it returned."""
    if PROTOCOL != "signals":
        WORDS: tl.constexpr = words_of_block(block.shape[0], block.dtype, PROTOCOL)
        shmem.report_vectors(me, vectors(me, region, WORDS), tl.num_programs(0) * WORDS, reports)


@triton.jit
def vectors(me, region, WORDS: tl.constexpr):
    """Where the block of rank 0 lies: pointers to 4 words each."""
    return shmem.messages(me, region) + tl.program_id(0) * WORDS + 4 * tl.arange(0, WORDS // 4)


@triton.constexpr_function
def words_of_block(elements, dtype, protocol):
    """How many words carry a block of so many elements."""
    if protocol == "words":
        return elements * dtype.primitive_bitwidth // 32
    return 2 * elements if dtype.primitive_bitwidth == 32 else elements


@triton.jit
def settle(
    me, out_ptr, blocks, doubts, element,
    SIZE: tl.constexpr, PART: tl.constexpr, INNER: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Stores those words again that may have been either of two patterns, once their top bit has come.

    There are hardly ever any, so the result does not wait for them.
    """
    WORDS: tl.constexpr = words_of_block(blocks[0].shape[0], blocks[0].dtype, "words")
    doubtful = tl.zeros([WORDS], tl.int32)
    for rank in tl.static_range(WORLD):
        doubtful = tl.where((shmem.words_of(blocks[rank]) == DOUBTFUL) & (rank != me.rank), 1, doubtful)
    if tl.max(doubtful) > 0:
        tl.debug_barrier()  # the same words may be other threads' here
        for rank in tl.static_range(WORLD):
            words = shmem.words_of(blocks[rank])
            unsure = (words == DOUBTFUL) & (rank != me.rank)
            top, came = shmem.receive_words(me, inbox(me, doubts, rank, tl.int32, WORDS), rank, unsure)
            settled = shmem.elements_of(tl.where(unsure, words | top, words), blocks[rank].dtype)
            at, mask = place(element, rank, SIZE, PART, INNER, WORLD)
            store_bits(out_ptr + at, settled, came, mask)


@triton.jit
def inbox(me, region, rank, dtype: tl.constexpr, BLOCK: tl.constexpr):
    """Where the block lies that this program's twin on a rank sends."""
    block = rank * tl.num_programs(0) + tl.program_id(0)
    return shmem.scratch(me, region, dtype) + (block * BLOCK + tl.arange(0, BLOCK))


@triton.jit
def total(blocks, dtype: tl.constexpr, WORLD: tl.constexpr):
    """The bits of the sum of all ranks' blocks: in f32 and in the order of the ranks, rounded once."""
    if dtype == tl.bfloat16:
        # A half of a word with zeros behind it is an f32: one instruction for each element.
        low, high = halves(blocks[0])
        for rank in tl.static_range(1, WORLD):
            more_low, more_high = halves(blocks[rank])
            low += more_low
            high += more_high
        result = tl.join(low, high).reshape(blocks[0].shape[0])
    else:
        WIDE: tl.constexpr = tl.float32 if dtype.is_floating() else tl.int32
        result = blocks[0].to(dtype, bitcast=True).to(WIDE)
        for rank in tl.static_range(1, WORLD):
            result += blocks[rank].to(dtype, bitcast=True).to(WIDE)
    return result.to(dtype).to(bits_of(dtype), bitcast=True)


@triton.jit
def halves(bits):
    """The bits of a block of bf16 as f32: (every other element from the first one on, the others)."""
    words = shmem.words_of(bits)
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def pack(bits):
    """A block of integers as f32 to be sent: the higher 16 bits of each word are payload."""
    if bits.dtype == tl.int32:
        words = tl.join(bits & -65536, bits << 16).reshape(2 * bits.shape[0])
    else:
        words = bits.to(tl.int32) << 16
    return words.to(tl.float32, bitcast=True)


@triton.jit
def unpack(words, dtype: tl.constexpr):
    """The block of integers that `pack` has made words of, whatever the lowest bits of the words are."""
    if dtype == tl.int32:
        high, low = tl.split(words.reshape(words.shape[0] // 2, 2))
        bits = (high & -65536) | ((low >> 16) & 65535)
    else:
        bits = (words >> 16).to(dtype)
    return bits


@triton.constexpr_function
def bits_of(dtype):
    """The integers of a type's size."""
    return {8: tl.int8, 16: tl.int16, 32: tl.int32}[dtype.primitive_bitwidth]


@triton.jit
def place(element, rank, SIZE: tl.constexpr, PART: tl.constexpr, INNER: tl.constexpr, WORLD: tl.constexpr):
    """Where some elements of a rank's part lie in the whole array [PART / INNER, WORLD, INNER], and which there are."""
    if INNER == PART:
        at = rank * PART + element
    else:
        at = (element // INNER * WORLD + rank) * INNER + element % INNER
    mask = element < PART
    if SIZE < WORLD * PART:
        mask = mask & (at < SIZE)
    return at, mask


@triton.jit
def load_bits(pointers, mask):
    value = tl.load(pointers, mask=mask, other=0)
    return value.to(bits_of(value.dtype), bitcast=True)


@triton.jit
def store_bits(pointers, bits, came, mask):
    """Stores elements; if they have not come, NaN, or -1 of integers."""
    bits = bits | (came.to(bits.dtype) - 1)
    tl.store(pointers, bits.to(pointers.dtype.element_ty, bitcast=True), mask=mask)


@triton.jit
def store_gathered(
    out_ptr, blocks, came, element,
    SIZE: tl.constexpr, PART: tl.constexpr, INNER: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Stores some elements of every rank's part."""
    for rank in tl.static_range(WORLD):
        at, mask = place(element, rank, SIZE, PART, INNER, WORLD)
        store_bits(out_ptr + at, blocks[rank], came, mask)
