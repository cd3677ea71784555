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

from triton.experimental.gluon.language.nvidia.ampere import async_copy
import os
from jaxtaxfree.kernels import shmem_gluon as shmem
GIVE = gl.constexpr(int(os.environ.get("EXP_GIVE", "0")))
from jaxtaxfree.kernels.blocks import widen

# What is read once is not to drive out of the L2 cache what all programs read.
READ_ONCE = gl.constexpr(CachePolicy(l2=FractionalEvictionPolicy("evict_first", 1.0)))


class Ring(NamedTuple):
    """What lies in shared memory."""

    stages: Any  # [STAGES, STAGE / 64, 64]
    full: Any  # mbarriers of the stages: the block has come
    empty: Any  # it has been taken
    sums: Any  # f32 [SUMS]: what each warp has of some sums
    log: Any
    few: Any  # f32 [FEW]: the same, of those that are few


FEW = gl.constexpr(256)  # two of each warp for each of 8 heads


@gluon.jit
def allocate(log, DTYPE: gl.constexpr, STAGE: gl.constexpr, STAGES: gl.constexpr, SUMS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STAGE // 64, 64], DTYPE)
    stages = gl.allocate_shared_memory(DTYPE, [STAGES, STAGE // 64, 64], LAYOUT)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=(32 * gl.num_warps() if GIVE == 1 else 1))
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sums = gl.allocate_shared_memory(gl.float32, [SUMS], PLAIN, gl.full([SUMS], 0.0, gl.float32, LANES))
    few = gl.allocate_shared_memory(gl.float32, [FEW], PLAIN, gl.full([FEW], 0.0, gl.float32, LANES))
    return Ring(stages, full, empty, sums, log, few)


LOG = gl.constexpr(int(os.environ.get("EXP_LOG", "0")))
LOOP = gl.constexpr(int(os.environ.get("EXP_LOOP", "0")))


@gluon.jit
def clock():
    return gl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def note(ring, n, WHICH: gl.constexpr):
    if LOG == 1:
        gl.store(ring.log + n * 6 + WHICH, clock())


@triton.constexpr_function
def flight_of(sizes, gate):
    n = sizes.IN_FLIGHT
    return n if n < 10 else n // 10 if gate else n % 10


@gluon.jit
def fetch(ring, position, desc, row, group, IN_FLIGHT: gl.constexpr):
    """Begins to load the block of `desc` at this row and group of columns; returns the next position.

    Args:
      IN_FLIGHT: how many blocks may be on their way at a time, this one included. A few keep the memory busy, and
        phases end sooner than with more.
    """
    STAGES: gl.constexpr = ring.stages.shape[0]
    gl.static_assert(IN_FLIGHT < 10)
    stage, phase, n = position
    block = view(ring, stage, desc)
    note(ring, n, 3)
    mbarrier.wait(ring.empty.index(stage), phase)
    note(ring, n, 4)
    if IN_FLIGHT < STAGES:
        around = stage < IN_FLIGHT
        last = gl.where(around, stage + (STAGES - IN_FLIGHT), stage - IN_FLIGHT)
        mbarrier.wait(ring.full.index(last), gl.where(around, phase, phase ^ 1))
    mbarrier.expect(ring.full.index(stage), block.nbytes_per_cta)
    tma.async_load(desc, [row, group, 0], ring.full.index(stage), block, cache_policy=READ_ONCE)
    note(ring, n, 5)
    return after(ring, position)


@gluon.jit
def take(ring, position, desc, THREADS: gl.constexpr = 0):
    """The next block, which is one of `desc`, in f32 and in its `layout_of`; and the next position."""
    stage, phase, n = position
    note(ring, n, 0)
    mbarrier.wait(ring.full.index(stage), phase)
    note(ring, n, 1)
    LAYOUT: gl.constexpr = taken_layout(desc.block_shape, gl.num_warps(), THREADS)
    if desc.dtype.primitive_bitwidth == 8:
        pairs = widen.pairs(view(ring, stage, desc))
        loaded = pairs.load(halved(LAYOUT))
        give_back(ring, stage)
        note(ring, n, 2)
        low, high = widen.words_of_f32(loaded, desc.dtype)
        block = gl.convert_layout(gl.join(low, high).reshape(desc.block_shape), LAYOUT, assert_trivial=True)
    else:
        loaded = view(ring, stage, desc).load(LAYOUT)
        give_back(ring, stage)
        note(ring, n, 2)
        block = loaded.to(gl.float32)
    return block, after(ring, position)


@triton.constexpr_function
def halved(of):
    return gl.BlockedLayout([1, 1, of.size_per_thread[2] // 2], of.threads_per_warp, of.warps_per_cta, of.order)


@triton.constexpr_function
def taken_layout(shape, warps, threads):
    return layout_of(shape, warps, threads) if threads else products_layout(shape, warps)


@gluon.jit
def give_back(ring, stage):
    """Lets the next block into a stage, which all warps have read.

    TMA does not wait for reads that are still on their way, and an mbarrier does not either: behind the loads of global
    memory some took longer than the next block, so that rows of it were multiplied instead. The fence waits for them.
    """
    if GIVE == 0:
        fence_async_shared()
        mbarrier.arrive(ring.empty.index(stage), count=1)
    elif GIVE == 1:
        async_copy.mbarrier_arrive(ring.empty.index(stage), increment_count=False)
    elif GIVE == 2:
        mbarrier.arrive(ring.empty.index(stage), count=1)


@gluon.jit
def view(ring, stage, desc):
    """A stage as a block of `desc`."""
    return ring.stages.index(stage).reinterpret(desc.dtype, desc.block_shape, desc.layout)


@gluon.jit
def after(ring, position):
    """The position after this one."""
    STAGES: gl.constexpr = ring.stages.shape[0]
    stage, phase, n = position
    stage += 1
    around = stage == STAGES
    return gl.where(around, 0, stage), gl.where(around, phase ^ 1, phase), n + 1


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
def products_layout(block_shape, warps):
    return layout_of(block_shape, warps)


@triton.constexpr_function
def turned_layout(block_shape, warps):
    """[rows, warps that share a row, threads that do]: of the rows of a thread each goes to other threads of its warp."""
    of = layout_of(block_shape, warps)
    log = lambda n: n.bit_length() - 1
    lanes = log(of.threads_per_warp[1] * of.threads_per_warp[2])
    own = 5 - lanes
    across = log(of.warps_per_cta[1])
    apart = log(of.warps_per_cta[0])
    rows = log(block_shape[0])
    first = own + apart
    moved = min(2, max(0, rows - first))
    lane = [[0, 0, 1 << i] for i in range(lanes)] + [[1 << i if i < rows else 0, 0, 0] for i in range(own)]
    registers = []
    for i in range(moved):
        registers.append(lane[lanes - 1 - i])
        lane[lanes - 1 - i] = [1 << (first + i), 0, 0]
    registers += [[1 << i, 0, 0] for i in range(first + moved, rows)]
    warp = [[0, 1 << i, 0] for i in range(across)] + [[1 << (own + i) if own + i < rows else 0, 0, 0] for i in range(apart)]
    return gl.DistributedLinearLayout(registers, lane, warp, [], [1 << rows, 1 << across, 1 << lanes])


@triton.constexpr_function
def columns_layout(block_shape, warps):
    """The layout of what every row of a block is multiplied by."""
    return gl.SliceLayout(0, products_layout(block_shape, warps))


@triton.constexpr_function
def rows_layout(block_shape, warps):
    """The layout of what a block has one of for each row."""
    return gl.SliceLayout(1, gl.SliceLayout(2, products_layout(block_shape, warps)))


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
def fetch_rows(ring, position, desc, row, COLUMNS: gl.constexpr, IN_FLIGHT: gl.constexpr):
    """Begins to load rows of so many columns, one block after the other."""
    for chunk in range(chunks_of(COLUMNS, desc)):
        position = fetch(ring, position, desc, row, chunk * desc.block_shape[1], IN_FLIGHT)
    return position


@triton.constexpr_function
def across_of(block_shape, warps):
    """Among how many warps a row of a block is divided."""
    return products_layout(block_shape, warps).warps_per_cta[1]


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
def multiply(ring, position, desc, vectors, sums, first, COLUMNS: gl.constexpr, B: gl.constexpr):
    """The rows that come next times each of B vectors, without a meeting of the warps.

    Args:
      vectors: what `received` or `normalised` returned.
      sums, first: from which on, of `sums_of`, each warp puts its part of the products.

    Returns: the next position.
    """
    CHUNKS: gl.constexpr = chunks_of(COLUMNS, desc)
    ROWS: gl.constexpr = desc.block_shape[0]
    LAYOUT: gl.constexpr = products_layout(desc.block_shape, gl.num_warps())
    LANES: gl.constexpr = LAYOUT.threads_per_warp[1]
    ACROSS: gl.constexpr = LAYOUT.warps_per_cta[1]
    AGAIN: gl.constexpr = desc.block_shape[1] // (LANES * ACROSS)
    OWN: gl.constexpr = desc.block_shape[2] // 8
    parts = ()
    for chunk in gl.static_range(CHUNKS):
        block, position = take(ring, position, desc)
        added = ()
        for b in gl.static_range(B):
            product = block * vectors[b * CHUNKS + chunk][None, :, :]
            # What a thread has is added up first, and then, once for all chunks, what the threads of a warp have.
            part = gl.sum(gl.sum(product.reshape([ROWS, AGAIN, ACROSS, LANES, 8, OWN]), 5), 1)
            if chunk > 0:
                part += parts[b]
            added = added + (part,)
        parts = added
    for b in gl.static_range(B):
        sums.index(first + b).store(gl.sum(gl.convert_layout(parts[b].reshape([ROWS, ACROSS, LANES * 8]), turned_layout(desc.block_shape, gl.num_warps())), 2))
    return position


@gluon.jit
def multiply_all(ring, position, desc, vectors, sums, count, VECTORS: gl.constexpr, COLUMNS: gl.constexpr, B: gl.constexpr, MATRICES: gl.constexpr):
    CHUNKS: gl.constexpr = chunks_of(COLUMNS, desc)
    ROWS: gl.constexpr = desc.block_shape[0]
    LAYOUT: gl.constexpr = products_layout(desc.block_shape, gl.num_warps())
    LANES: gl.constexpr = LAYOUT.threads_per_warp[1]
    ACROSS: gl.constexpr = LAYOUT.warps_per_cta[1]
    AGAIN: gl.constexpr = desc.block_shape[1] // (LANES * ACROSS)
    OWN: gl.constexpr = desc.block_shape[2] // 8
    gl.static_assert(CHUNKS == 1)
    PART: gl.constexpr = LAYOUT
    total = count * MATRICES
    loaded, held = peek(ring, position, desc), position
    zeros = gl.sum(gl.sum((loaded.to(gl.float32) * 0.0).reshape([ROWS, AGAIN, ACROSS, LANES, 8, OWN]), 5), 1)
    pending = ()
    for b in gl.static_range(B):
        pending = pending + (zeros,)
    for i in range(total):
        position = after(ring, position)
        last = i == total - 1
        block = loaded.to(gl.float32)
        target = (gl.where(last, held[0], position[0]), gl.where(last, held[1], position[1]), gl.where(last, held[2], position[2]))
        loaded = peek(ring, target, desc)
        before = gl.maximum(i - 1, 0)
        at = before % MATRICES * (sums.shape[0] // MATRICES) + before // MATRICES * VECTORS
        made = ()
        for b in gl.static_range(B):
            product = block * vectors[b][None, :, :]
            made = made + (gl.sum(gl.sum(product.reshape([ROWS, AGAIN, ACROSS, LANES, 8, OWN]), 5), 1),)
            sums.index(at + b).store(gl.sum(pending[b].reshape([ROWS, ACROSS, LANES * 8]), 2))
        pending = made
        if GIVE == 1:
            # of the block before
            if i > 0:
                async_copy.mbarrier_arrive(ring.empty.index(gl.where(held[0] == 0, ring.stages.shape[0] - 1, held[0] - 1)), increment_count=False)
        else:
            give_back(ring, held[0])
        held = target
    before = total - 1
    at = before % MATRICES * (sums.shape[0] // MATRICES) + before // MATRICES * VECTORS
    for b in gl.static_range(B):
        sums.index(at + b).store(gl.sum(pending[b].reshape([ROWS, ACROSS, LANES * 8]), 2))
    if GIVE == 1:
        async_copy.mbarrier_arrive(ring.empty.index(held[0]), increment_count=False)
    return position


@gluon.jit
def multiply_rows(ring, position, desc, vectors, sums, count, VECTORS: gl.constexpr, COLUMNS: gl.constexpr, B: gl.constexpr, MATRICES: gl.constexpr):
    CHUNKS: gl.constexpr = chunks_of(COLUMNS, desc)
    if LOOP == 1 and CHUNKS == 1:
        position = multiply_all(ring, position, desc, vectors, sums, count, VECTORS, COLUMNS, B, MATRICES)
    elif LOOP == 2 and CHUNKS == 1:
        total = count * MATRICES
        for i in range(total // 2):
            position = multiply_two(ring, position, desc, vectors, sums, 2 * i, VECTORS, B, MATRICES)
        if total % 2 == 1:
            position = multiply(ring, position, desc, vectors, sums, place(sums, total - 1, VECTORS, MATRICES), COLUMNS, B)
    else:
        for i in range(count * MATRICES):
            position = multiply(ring, position, desc, vectors, sums, place(sums, i, VECTORS, MATRICES), COLUMNS, B)
    return position


@gluon.jit
def place(sums, i, VECTORS: gl.constexpr, MATRICES: gl.constexpr):
    return i % MATRICES * (sums.shape[0] // MATRICES) + i // MATRICES * VECTORS


@gluon.jit
def multiply_two(ring, position, desc, vectors, sums, i, VECTORS: gl.constexpr, B: gl.constexpr, MATRICES: gl.constexpr):
    ROWS: gl.constexpr = desc.block_shape[0]
    LAYOUT: gl.constexpr = products_layout(desc.block_shape, gl.num_warps())
    LANES: gl.constexpr = LAYOUT.threads_per_warp[1]
    ACROSS: gl.constexpr = LAYOUT.warps_per_cta[1]
    AGAIN: gl.constexpr = desc.block_shape[1] // (LANES * ACROSS)
    OWN: gl.constexpr = desc.block_shape[2] // 8
    second = after(ring, position)
    one, two = peek(ring, position, desc), peek(ring, second, desc)
    if GIVE != 1:
        fence_async_shared()
        mbarrier.arrive(ring.empty.index(position[0]), count=1)
        mbarrier.arrive(ring.empty.index(second[0]), count=1)
    one, two = one.to(gl.float32), two.to(gl.float32)
    for b in gl.static_range(B):
        part = gl.sum(gl.sum((one * vectors[b][None, :, :]).reshape([ROWS, AGAIN, ACROSS, LANES, 8, OWN]), 5), 1)
        part2 = gl.sum(gl.sum((two * vectors[b][None, :, :]).reshape([ROWS, AGAIN, ACROSS, LANES, 8, OWN]), 5), 1)
        sum1 = gl.sum(gl.convert_layout(part.reshape([ROWS, ACROSS, LANES * 8]), turned_layout(desc.block_shape, gl.num_warps())), 2)
        sum2 = gl.sum(gl.convert_layout(part2.reshape([ROWS, ACROSS, LANES * 8]), turned_layout(desc.block_shape, gl.num_warps())), 2)
        sums.index(place(sums, i, VECTORS, MATRICES) + b).store(sum1)
        sums.index(place(sums, i + 1, VECTORS, MATRICES) + b).store(sum2)
    if GIVE == 1:
        async_copy.mbarrier_arrive(ring.empty.index(position[0]), increment_count=False)
        async_copy.mbarrier_arrive(ring.empty.index(second[0]), increment_count=False)
    return after(ring, second)


@gluon.jit
def peek(ring, position, desc):
    stage, phase, n = position
    note(ring, n, 0)
    mbarrier.wait(ring.full.index(stage), phase)
    note(ring, n, 1)
    return view(ring, stage, desc).load(products_layout(desc.block_shape, gl.num_warps()))


@triton.constexpr_function
def collected(across, warps):
    """The layout of what `collect` reads: 4 numbers next to each other are a thread's, so that no two meet in a bank."""
    own = min(across, 4)
    lanes = across // own
    return gl.BlockedLayout([4 // own, own], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def collect(sums, SIZE: gl.constexpr, FIRST: gl.constexpr):
    """What `multiply` has left: f32 [SIZE], block by block, of each the vectors, of each the rows.

    Args:
      sums: what `sums_of` returned.
      FIRST: how many times SIZE to leave out before.
    """
    ACROSS: gl.constexpr = sums.shape[2]
    COUNT: gl.constexpr = sums.shape[0] * sums.shape[1]
    LAYOUT: gl.constexpr = collected(ACROSS, gl.num_warps())
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    parts = sums.reinterpret(gl.float32, [COUNT // SIZE, SIZE, ACROSS], PLAIN).index(FIRST).load(LAYOUT)
    return gl.sum(parts, 1)


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
def received(me, desc, source, factor, COLUMNS: gl.constexpr, B: gl.constexpr, there=True):
    """Vectors f32 [B, COLUMNS] times `factor`, as `multiply` takes them, of messages from programs of this rank.

    Args:
      there: i1, whether there are any; if not, nothing is waited for, and they are NaN.

    Returns: (of each vector one part after the other, for `report` what did not come).
    """
    CHUNKS: gl.constexpr = chunks_of(COLUMNS, desc)
    WIDTH: gl.constexpr = width_of(desc)
    vectors, reports = (), ()
    for i in gl.static_range(B * CHUNKS):
        part, late = shmem.receive_own(
            me, source + message_of(i, COLUMNS, desc), messages_of(i, COLUMNS, desc), WIDTH, there
        )  # fmt: skip
        part = gl.convert_layout(part.reshape(desc.block_shape[1:]), columns_layout(desc.block_shape, gl.num_warps()))
        if messages_of(i, COLUMNS, desc) < WIDTH:
            part = gl.where(columns_of(desc, 0) < messages_of(i, COLUMNS, desc), part, 0.0)
        vectors = vectors + (part * factor,)
        reports = reports + (late,)
    return vectors, reports


@gluon.jit
def report(me, desc, source, reports, COLUMNS: gl.constexpr, B: gl.constexpr):
    """Reports what `received` waited for in vain."""
    for i in gl.static_range(len(reports)):
        shmem.report_own(me, source + message_of(i, COLUMNS, desc), reports[i], width_of(desc))


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
