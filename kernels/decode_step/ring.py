"""The ring in shared memory through which all that a decode step reads once comes: weights, and old keys and values.

A block is [rows, groups of 64 columns, 64], of an array [rows, columns / 64, 64]; one TMA load fetches it. A group of
numbers of 8 bits is as many bytes, and so 128 columns. Blocks of all arrays take the same stages, in one order that
both roles know: `fetch` puts the next one in, `take` takes it out. A position is (stage, phase) of a role's next block.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import CachePolicy, FractionalEvictionPolicy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.blocks import widen
from jaxtaxfree.kernels.decode_step import packed

# What is read once is not to drive out of the L2 cache what all programs read.
READ_ONCE = gl.constexpr(CachePolicy(l2=FractionalEvictionPolicy("evict_first", 1.0)))


class Ring(NamedTuple):
    """What lies in shared memory."""

    stages: Any  # [STAGES, STAGE / 64, 64]
    full: Any  # mbarriers of the stages: the block has come
    empty: Any  # it has been taken
    sums: Any  # f32 [SUMS]: what each warp has of some sums
    few: Any  # f32 [FEW]: the same, of those that are few


FEW = gl.constexpr(256)  # two of each warp for each of 8 heads


@gluon.jit
def allocate(DTYPE: gl.constexpr, STAGE: gl.constexpr, STAGES: gl.constexpr, SUMS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STAGE // 64, 64], DTYPE)
    stages = gl.allocate_shared_memory(DTYPE, [STAGES, STAGE // 64, 64], LAYOUT)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sums = gl.allocate_shared_memory(gl.float32, [SUMS], PLAIN, gl.full([SUMS], 0.0, gl.float32, LANES))
    few = gl.allocate_shared_memory(gl.float32, [FEW], PLAIN, gl.full([FEW], 0.0, gl.float32, LANES))
    return Ring(stages, full, empty, sums, few)


@gluon.jit
def first_of_loads():
    """The position of who loads: the stage, the phase in which it is empty, and when the next load is due."""
    zero = gl.program_id(0) * 0
    return zero, zero + 1, zero.to(gl.int64)


@gluon.jit
def fetch(ring, position, desc, row, group, IN_FLIGHT: gl.constexpr, PACE: gl.constexpr = 0):
    """Begins to load the block of `desc` at this row and group of columns; returns the next position.

    Args:
      IN_FLIGHT: how many blocks may be on their way at a time, this one included. A few keep the memory busy, and
        phases end sooner than with more.
      PACE: clock cycles from one load to the next at least.
    """
    STAGES: gl.constexpr = ring.stages.shape[0]
    stage, phase, due = position
    block = view(ring, stage, desc)
    mbarrier.wait(ring.empty.index(stage), phase)
    if IN_FLIGHT < STAGES:
        around = stage < IN_FLIGHT
        last = gl.where(around, stage + (STAGES - IN_FLIGHT), stage - IN_FLIGHT)
        mbarrier.wait(ring.full.index(last), gl.where(around, phase, phase ^ 1))
    due = shmem.pace(due, PACE, 0)
    mbarrier.expect(ring.full.index(stage), block.nbytes_per_cta)
    tma.async_load(desc, [row, group, 0], ring.full.index(stage), block, cache_policy=READ_ONCE)
    stage, phase = after(ring, (stage, phase))
    return stage, phase, due


@gluon.jit
def take(ring, position, desc, THREADS: gl.constexpr = 8):
    """The next block, which is one of `desc`, in f32 and in its `layout_of`; and the next position."""
    loaded = load(ring, position, desc, THREADS)
    give_back(ring, position[0])
    return in_f32(loaded, desc, THREADS), after(ring, position)


@gluon.jit
def load(ring, position, desc, THREADS: gl.constexpr = 8):
    """The block at a position, once it is there, as it is: of 8 bits in words of two."""
    stage, phase = position
    mbarrier.wait(ring.full.index(stage), phase)
    block = view(ring, stage, desc)
    if desc.dtype.primitive_bitwidth == 8:
        block = widen.pairs(block)
    return block.load(layout_of(block.shape, gl.num_warps(), THREADS))


@gluon.jit
def in_f32(loaded, desc, THREADS: gl.constexpr = 8):
    """What `load` returned, in f32 and in the block's `layout_of`."""
    LAYOUT: gl.constexpr = layout_of(desc.block_shape, gl.num_warps(), THREADS)
    if desc.dtype.primitive_bitwidth == 8:
        low, high = widen.words_of_f32(loaded, desc.dtype)
        block = gl.convert_layout(gl.join(low, high).reshape(desc.block_shape), LAYOUT, assert_trivial=True)
    else:
        block = loaded.to(gl.float32)
    return block


@gluon.jit
def give_back(ring, stage):
    """Lets the next block into a stage, which all warps have read.

    TMA does not wait for reads that are still on their way, and an mbarrier does not either: behind the loads of global
    memory some took longer than the next block, so that rows of it were multiplied instead. The fence waits for them.
    """
    fence_async_shared()
    mbarrier.arrive(ring.empty.index(stage), count=1)


@gluon.jit
def view(ring, stage, desc):
    """A stage as a block of `desc`."""
    return ring.stages.index(stage).reinterpret(desc.dtype, desc.block_shape, desc.layout)


@gluon.jit
def after(ring, position):
    """The position after this one."""
    STAGES: gl.constexpr = ring.stages.shape[0]
    stage, phase = position
    stage += 1
    around = stage == STAGES
    return gl.where(around, 0, stage), gl.where(around, phase ^ 1, phase)


@triton.constexpr_function
def layout_of(block_shape, warps, threads=8):
    """How the threads share a block: each has 16 bytes of a row, a warp 4 groups, as shared memory has them.

    Args:
      threads: that share a group of a row; with 16, each has 8 bytes of it.
    """
    groups, width = block_shape[1:]
    lanes = min(32 // threads, groups)
    across = min(warps, groups // lanes)
    per_warp = [32 // threads // lanes, lanes, threads]
    return gl.BlockedLayout([1, 1, width // threads], per_warp, [warps // across, across, 1], [2, 1, 0])


@triton.constexpr_function
def columns_layout(block_shape, warps):
    """The layout of what every row of a block is multiplied by."""
    return gl.SliceLayout(0, layout_of(block_shape, warps))


@triton.constexpr_function
def rows_layout(block_shape, warps):
    """The layout of what a block has one of for each row."""
    return gl.SliceLayout(1, gl.SliceLayout(2, layout_of(block_shape, warps)))


@gluon.jit
def columns_of(desc, chunk):
    """The columns of a block, the chunk-th of its rows: i32 [groups, columns of a group]."""
    GROUPS: gl.constexpr = desc.block_shape[1]
    WIDTH: gl.constexpr = desc.block_shape[2]
    LAYOUT: gl.constexpr = columns_layout(desc.block_shape, gl.num_warps())
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, LAYOUT))[:, None]
    return (chunk * GROUPS + group) * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def rows_of(desc):
    """The rows of a block: i32 [rows]."""
    return gl.arange(0, desc.block_shape[0], rows_layout(desc.block_shape, gl.num_warps()))


@triton.constexpr_function
def chunks_of(columns, desc):
    """Into how many blocks rows of so many columns fall."""
    return -(-columns // width_of(desc))


@triton.constexpr_function
def width_of(desc):
    """The columns of a block."""
    return desc.block_shape[1] * desc.block_shape[2]


@gluon.jit
def fetch_rows(ring, position, desc, row, COLUMNS: gl.constexpr, IN_FLIGHT: gl.constexpr, PACE: gl.constexpr):
    """Begins to load rows of so many columns, one block after the other."""
    for chunk in range(chunks_of(COLUMNS, desc)):
        position = fetch(ring, position, desc, row, chunk * desc.block_shape[1], IN_FLIGHT, PACE)
    return position


@triton.constexpr_function
def across_of(block_shape, warps):
    """Among how many warps a row of a block is divided."""
    return layout_of(block_shape, warps).warps_per_cta[1]


@triton.constexpr_function
def portion_of(blocks, block_shape, warps, vectors, matrices, sums):
    """Of how many blocks, a power of 2 and of `blocks` as many as there are, the sums are no more than `sums`."""
    size = matrices * vectors * block_shape[0] * across_of(block_shape, warps)
    return min(triton.next_power_of_2(blocks), sums // size)


@gluon.jit
def sums_of(ring, desc, BLOCKS: gl.constexpr, VECTORS: gl.constexpr):
    """The ring's sums as f32 [BLOCKS * VECTORS, rows of a block, warps that share a row]."""
    ACROSS: gl.constexpr = across_of(desc.block_shape, gl.num_warps())
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return ring.sums.reinterpret(gl.float32, [BLOCKS * VECTORS, desc.block_shape[0], ACROSS], PLAIN)


@gluon.jit
def multiply_rows(
    ring, position, desc, vectors, sums, count, COLUMNS: gl.constexpr, B: gl.constexpr, EVEN: gl.constexpr = False
):  # fmt: skip
    """The rows of `count` blocks that come next times each of B vectors.

    Of one vector, and rows that are one block wide, two blocks are multiplied at a time: warps wait for each other once
    for both, and what the threads of a warp have of both is added up together.

    Args:
      vectors: what `received` or `normalised` returned.
      sums: what `sums_of` returned, into which each warp puts its part of the products.
      EVEN: whether `count` always is, which saves instructions.

    Returns: the next position.
    """
    VECTORS: gl.constexpr = triton.next_power_of_2(B)
    if B == 1 and chunks_of(COLUMNS, desc) == 1 and sums.shape[0] > 1:
        for i in range(count // 2):
            position = multiply_two(ring, position, desc, vectors, sums, i)
        if not EVEN and count % 2 == 1:
            position = multiply(ring, position, desc, vectors, sums, count - 1, COLUMNS, B)
    else:
        for i in range(count):
            position = multiply(ring, position, desc, vectors, sums, i * VECTORS, COLUMNS, B)
    return position


@gluon.jit
def multiply_two(ring, position, desc, vectors, sums, pair):
    """`multiply` of two blocks at once, which puts its parts behind those of so many pairs."""
    ROWS: gl.constexpr = desc.block_shape[0]
    BOTH: gl.constexpr = (2 * ROWS, desc.block_shape[1], desc.block_shape[2])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    later = after(ring, position)
    first = load(ring, position, desc)
    second = load(ring, later, desc)
    fence_async_shared()
    mbarrier.arrive(ring.empty.index(position[0]), count=1)
    mbarrier.arrive(ring.empty.index(later[0]), count=1)
    first = products_of(in_f32(first, desc), desc, vectors[0])
    second = products_of(in_f32(second, desc), desc, vectors[0])
    both = gl.join(first, second).permute([3, 0, 1, 2]).reshape([2 * ROWS, first.shape[1], first.shape[2]])
    part = gl.convert_layout(both, halved(BOTH, gl.num_warps()))
    pairs = sums.reinterpret(gl.float32, [sums.shape[0] // 2, 2 * ROWS, sums.shape[2]], PLAIN)
    pairs.index(pair).store(gl.sum(part, 2))
    return after(ring, later)


@gluon.jit
def multiply(ring, position, desc, vectors, sums, first, COLUMNS: gl.constexpr, B: gl.constexpr):
    """The rows that come next times each of B vectors, without a meeting of the warps.

    Args:
      vectors: what `received` or `normalised` returned.
      sums, first: from which on, of `sums_of`, each warp puts its part of the products.

    Returns: the next position.
    """
    CHUNKS: gl.constexpr = chunks_of(COLUMNS, desc)
    parts = ()
    for chunk in gl.static_range(CHUNKS):
        block, position = take(ring, position, desc)
        added = ()
        for b in gl.static_range(B):
            part = products_of(block, desc, vectors[b * CHUNKS + chunk])
            if chunk > 0:
                part += parts[b]
            added = added + (part,)
        parts = added
    for b in gl.static_range(B):
        part = gl.convert_layout(parts[b], halved(desc.block_shape, gl.num_warps()))
        sums.index(first + b).store(gl.sum(part, 2))
    return position


@gluon.jit
def products_of(block, desc, vector):
    """What each thread has of a block's rows times a vector: f32 [rows, warps that share a row, threads that do].

    This is added up first, and then, once for all blocks of a row, what the threads of a warp have.
    """
    ROWS: gl.constexpr = desc.block_shape[0]
    LAYOUT: gl.constexpr = layout_of(desc.block_shape, gl.num_warps())
    LANES: gl.constexpr = LAYOUT.threads_per_warp[1]
    ACROSS: gl.constexpr = LAYOUT.warps_per_cta[1]
    AGAIN: gl.constexpr = desc.block_shape[1] // (LANES * ACROSS)
    OWN: gl.constexpr = desc.block_shape[2] // 8
    product = block * vector[None, :, :]
    part = gl.sum(gl.sum(product.reshape([ROWS, AGAIN, ACROSS, LANES, 8, OWN]), 5), 1)
    return part.reshape([ROWS, ACROSS, LANES * 8])


@triton.constexpr_function
def halved(block_shape, warps):
    """The layout of [rows, warps that share a row, threads that do] in which a warp adds up what its threads have.

    Half of its threads go on with half of the rows that each has, and so on: 2 rows take 5 shuffles, and not 10.
    """
    of = layout_of(block_shape, warps)
    shape = [block_shape[0], of.warps_per_cta[1], of.threads_per_warp[1] * of.threads_per_warp[2]]

    def bits(axis, first, end):
        """What the bits of a number mean that counts along an axis from `first` to `end`: nothing behind its end."""
        places = [first << i for i in range((end // first).bit_length() - 1)]
        return [[place if i == axis and place < shape[i] else 0 for i in range(3)] for place in places]

    threads, beside = bits(2, 1, shape[2]), bits(0, 1, of.threads_per_warp[0])
    apart = of.threads_per_warp[0] * of.warps_per_cta[0]  # rows that no thread shares
    own = bits(0, apart, shape[0])
    for i in range(min(len(own), len(threads))):
        own[i], threads[-1 - i] = threads[-1 - i], own[i]
    of_warps = bits(1, 1, shape[1]) + bits(0, of.threads_per_warp[0], apart)
    return gl.DistributedLinearLayout(own, threads + beside, of_warps, [], shape)


@triton.constexpr_function
def collected(across, warps):
    """The layout of what `collect` reads: a row is a thread's, so that at most two threads wait for each other's bank,
    and four where the blocks of two matrices take turns.

    With 4 rows next to each other up to 8 did, in all warps, and two phases of a layer ended 1 us later.
    """
    return gl.BlockedLayout([1, across], [32, 1], [warps, 1], [1, 0])


@triton.constexpr_function
def in_order(shape, warps, own=0):
    """The layout of this shape, of powers of 2, whose elements lie one behind the other on the threads, and then again
    on them; those along the last `own` axes are all a thread's."""

    def bits(axes):
        return [
            [1 << i if axis == j else 0 for j in range(len(shape))]
            for axis in reversed(axes)
            for i in range(shape[axis].bit_length() - 1)
        ]

    apart, threads = len(shape) - own, 4 + warps.bit_length()
    places = bits(range(apart))
    of_threads = (places + [[0] * len(shape)] * threads)[:threads]
    registers = bits(range(apart, len(shape))) + places[threads:]
    return gl.DistributedLinearLayout(registers, of_threads[:5], of_threads[5:], [], list(shape))


@gluon.jit
def collect(sums, BLOCKS: gl.constexpr, WHICH: gl.constexpr = 0, OF: gl.constexpr = 1):
    """What `multiply_rows` has left of so many blocks: f32, block by block, of each the vectors, of each the rows.

    Args:
      sums: what `sums_of` returned.
      WHICH: of OF matrices whose blocks take turns those of this one.
    """
    ACROSS: gl.constexpr = sums.shape[2]
    EACH: gl.constexpr = sums.shape[0] * sums.shape[1] // (OF * BLOCKS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    LAYOUT: gl.constexpr = collected(ACROSS, gl.num_warps())
    blocks = sums.reinterpret(gl.float32, [BLOCKS, OF * EACH, ACROSS], PLAIN).slice(WHICH * EACH, EACH, dim=1)
    parts = blocks.load(in_order((BLOCKS, EACH, ACROSS), gl.num_warps(), 1)).reshape([BLOCKS * EACH, ACROSS])
    return gl.sum(gl.convert_layout(parts, LAYOUT, assert_trivial=True), 1)


@gluon.jit
def gains_of(desc, gain_ptr, COLUMNS: gl.constexpr):
    """Weights [COLUMNS] of RMSNorm as `normalised` takes them; () of None.

    They are to be asked for before what they are multiplied by.
    """
    gains = ()
    if gain_ptr is not None:
        for chunk in gl.static_range(chunks_of(COLUMNS, desc)):
            gains = gains + (load_part(desc, gain_ptr, chunk, COLUMNS),)
    return gains


@gluon.jit
def received(
    me, desc, source, factor, COLUMNS: gl.constexpr, B: gl.constexpr, there=True, PATIENCE: gl.constexpr = 0
):  # fmt: skip
    """Vectors f32 [B, COLUMNS] times `factor`, as `multiply` takes them, of messages from programs of this rank.

    Args:
      there: i1, whether there are any; if not, nothing is waited for, and they are NaN.
      PATIENCE: as `shmem.poll_places` takes it, of the first part.

    Returns: (of each vector one part after the other, for `report` what did not come).
    """
    CHUNKS: gl.constexpr = chunks_of(COLUMNS, desc)
    WIDTH: gl.constexpr = width_of(desc)
    vectors, reports = (), ()
    for i in gl.static_range(B * CHUNKS):
        part, late = shmem.receive_own(
            me, source + message_of(i, COLUMNS, desc), messages_of(i, COLUMNS, desc), WIDTH, there,
            PATIENCE if i == 0 else 0,
        )  # fmt: skip
        vectors = vectors + (in_columns(desc, i, part, COLUMNS) * factor,)
        reports = reports + (late,)
    return vectors, reports


@gluon.jit
def in_columns(desc, i, values, COLUMNS: gl.constexpr):
    """The values of the i-th part of vectors as those of a block's columns; 0 behind the last one."""
    COUNT: gl.constexpr = messages_of(i, COLUMNS, desc)
    part = gl.convert_layout(values.reshape(desc.block_shape[1:]), columns_layout(desc.block_shape, gl.num_warps()))
    if COUNT < width_of(desc):
        part = gl.where(columns_of(desc, 0) < COUNT, part, 0.0)
    return part


@gluon.jit
def report(me, desc, source, reports, COLUMNS: gl.constexpr, B: gl.constexpr):
    """Reports what `received` waited for in vain."""
    for i in gl.static_range(len(reports)):
        shmem.report_own(me, source + message_of(i, COLUMNS, desc), reports[i], width_of(desc))


@gluon.jit
def received_sums(
    me, desc, source, COLUMNS: gl.constexpr, B: gl.constexpr, WORLD: gl.constexpr, there, PATIENCE: gl.constexpr
):  # fmt: skip
    """The same of sums over the ranks, of messages [WORLD, B, COLUMNS / 2] from programs of all of them: four words for
    eight columns, as `packed.py` makes them.

    Who adds them up, on whatever rank, does it in their order: all have the same bits. `report_sums` has to follow.
    """
    WIDTH: gl.constexpr = width_of(desc)
    vectors, reports = (), ()
    for i in gl.static_range(B * chunks_of(COLUMNS, desc)):
        at = source + message_of(i, COLUMNS, desc) // 2
        found, late = shmem.receive_all(
            me, at, messages_of(i, COLUMNS, desc) // 2, WIDTH // 2, B * COLUMNS // 2, WORLD, there,
            PATIENCE if i == 0 else 0,
        )  # fmt: skip
        pieces = ()
        for piece in gl.static_range(len(found) // WORLD):
            total = packed.unpack(found[piece * WORLD])
            for rank in gl.static_range(1, WORLD):
                total += packed.unpack(found[piece * WORLD + rank])
            pieces = pieces + (total,)
        total = shmem.joined(pieces, shmem.pieces_of(WIDTH // 2, gl.num_warps()))
        # A thread has 8 columns next to each other in either layout.
        vectors = vectors + (in_columns(desc, i, total, COLUMNS),)
        reports = reports + (late,)
    return vectors, reports


@gluon.jit
def report_sums(me, desc, source, reports, COLUMNS: gl.constexpr, B: gl.constexpr, WORLD: gl.constexpr):
    """Reports what `received_sums` waited for in vain."""
    for i in gl.static_range(len(reports)):
        at = source + message_of(i, COLUMNS, desc) // 2
        shmem.report_own(me, at, reports[i], width_of(desc) // 2, B * COLUMNS // 2, WORLD)


@gluon.jit
def send_sums(
    me, told, products, first, count, HEIGHT: gl.constexpr, COLUMNS: gl.constexpr, B: gl.constexpr,
    WORLD: gl.constexpr,
):  # fmt: skip
    """Sends all ranks this rank's part of sums, for `received_sums`.

    Args:
      products: as `collect` returns them, of blocks of HEIGHT rows, from the block `first` on, of which there are
        `count`; a multiple of 8 rows.
    """
    VECTORS: gl.constexpr = triton.next_power_of_2(B)
    GROUPS: gl.constexpr = products.shape[0] // (8 * VECTORS)  # of a vector
    NUMBERS: gl.constexpr = in_order((GROUPS * VECTORS, 4, 2), gl.num_warps())
    WORDS: gl.constexpr = gl.SliceLayout(2, NUMBERS)
    rows = products.reshape([8 * GROUPS // HEIGHT, VECTORS, HEIGHT]).permute([1, 0, 2])
    words = packed.pack(rows.reshape([8 * GROUPS * VECTORS]), NUMBERS)
    at = gl.arange(0, GROUPS * VECTORS, gl.SliceLayout(1, WORDS))[:, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, WORDS))[None, :]
    row = first * HEIGHT + at % GROUPS * 8
    there = (at % GROUPS * 8 < count * HEIGHT) & (at // GROUPS < B) & (row + word < COLUMNS)
    dest = told + ((me.rank * B + at // GROUPS) * COLUMNS + row) // 2 + word
    for i in gl.static_range(1, WORLD + 1):
        shmem.send(me, dest, words, (me.rank + i) % WORLD, there)


@triton.constexpr_function
def message_of(part, columns, desc):
    """Where a part of vectors [B, columns] begins, counted as `load_vectors` returns them."""
    chunks = chunks_of(columns, desc)
    return part // chunks * columns + part % chunks * width_of(desc)


@triton.constexpr_function
def messages_of(part, columns, desc):
    """How many columns of vectors [B, columns] are in a part."""
    width = width_of(desc)
    return min(width, columns - part % chunks_of(columns, desc) * width)


@gluon.jit
def load_vectors(desc, source, COLUMNS: gl.constexpr, B: gl.constexpr, there=None):
    """The parts of vectors f32 [B, COLUMNS].

    Args:
      there: i1, whether there are any; None: yes.
    """
    parts = ()
    for b in gl.static_range(B):
        for chunk in gl.static_range(chunks_of(COLUMNS, desc)):
            parts = parts + (load_part(desc, source + b * COLUMNS, chunk, COLUMNS, there),)
    return parts


@gluon.jit
def normalised(
    desc, parts, gains, factor, COLUMNS: gl.constexpr, B: gl.constexpr, EPS: gl.constexpr, PLUS_ONE: gl.constexpr
):
    """The parts of vectors f32 [B, COLUMNS] behind RMSNorm, times `factor`.

    Args:
      gains: `gains_of` the norm.
    """
    CHUNKS: gl.constexpr = chunks_of(COLUMNS, desc)
    vectors = ()
    for b in gl.static_range(B):
        squares = parts[b * CHUNKS] * parts[b * CHUNKS]
        for chunk in gl.static_range(1, CHUNKS):
            squares += parts[b * CHUNKS + chunk] * parts[b * CHUNKS + chunk]
        scale = factor * gl.rsqrt(gl.sum(squares.reshape([width_of(desc)]), 0) / COLUMNS + EPS)
        for chunk in gl.static_range(CHUNKS):
            gain = gains[chunk].to(gl.float32)
            vectors = vectors + (parts[b * CHUNKS + chunk] * scale * (gain + 1.0 if PLUS_ONE else gain),)
    return vectors


@gluon.jit
def load_part(desc, source, chunk, COLUMNS: gl.constexpr, there=None):
    """A part of a vector [COLUMNS], that of a block; 0 behind its end, and if it is not there."""
    WHOLE: gl.constexpr = COLUMNS % width_of(desc) == 0
    column = columns_of(desc, chunk)
    if there is not None:
        part = gl.load(source + column, mask=(column < COLUMNS) & there, other=0.0)
    elif WHOLE:
        part = gl.load(source + column)
    else:
        part = gl.load(source + column, mask=column < COLUMNS, other=0.0)
    return part
