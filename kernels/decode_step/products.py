"""Products of blocks of rows and vectors, of one sequence or few, whose vectors are messages or normalised.

`operands_of` makes of vectors what `multiply` takes. A block of rows is multiplied without a meeting of the warps but
the one that gives its stage back: each warp leaves what it has of a sum in shared memory, and `collect` adds that up.

With `row_cores` tensor cores multiply bf16. A row of a block is octets of 8 groups of 64 columns. An octet times the
same columns of a vector is the trace of a product of matrices: [8, 64], the groups of the vector, times [64, 8], those
of the row. The instruction's first operand has 16 rows: 8 are the vector rounded to bf16, and 8 what that has lost,
rounded as well, so that a product is as exact as in f32 but for some 2**-17. Otherwise products are f32 in registers,
which takes twice the instructions.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jaxtaxfree.kernels.blocks import widen
from jaxtaxfree.kernels.decode_step import ring as rings
from jaxtaxfree.kernels.decode_step import tensor_cores

AT_ONCE = gl.constexpr(8)  # octets that the warps multiply at a time
GROUPS_AT_ONCE = gl.constexpr(64)


@triton.constexpr_function
def by_tensor_cores(desc, warps, sizes):
    """Whether tensor cores multiply a block."""
    rows, groups, _ = desc.block_shape
    fits = 8 <= groups <= 2 * GROUPS_AT_ONCE.value and rows * groups % GROUPS_AT_ONCE.value == 0
    return bool(sizes.ROW_CORES) and fits and warps <= AT_ONCE.value


@triton.constexpr_function
def octets_of(desc):
    """The octets of a row that are multiplied at a time, 1 to 8; of fewer than 8 those of several rows are."""
    return min(desc.block_shape[1] // 8, AT_ONCE.value)


@triton.constexpr_function
def operands_in(desc):
    """Of how many operands of 64 groups, or fewer, a block's columns are."""
    return max(1, desc.block_shape[1] // GROUPS_AT_ONCE.value)


@triton.constexpr_function
def rows_at_once(desc):
    """The rows of a block whose products are one matrix of traces."""
    return AT_ONCE.value // octets_of(desc)


@triton.constexpr_function
def layout_of(warps):
    """The layout of products [8, 16, 8]: each warp has other octets."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@triton.constexpr_function
def across_of(desc, warps, sizes):
    """Of how many parts, each of some warp, the product of a row is."""
    if by_tensor_cores(desc, warps, sizes):
        return octets_of(desc)
    return rings.layout_of(desc.block_shape, warps).warps_per_cta[1]


@triton.constexpr_function
def vectors_of(sizes):
    """How many vectors sums are of, those of `sums_of` and those that are sent: B or more."""
    return triton.next_power_of_2(sizes.B)


@triton.constexpr_function
def portion_of(blocks, desc, warps, matrices, sizes):
    """Of how many blocks, a power of 2 and of `blocks` as many as there are, the sums have room."""
    size = matrices * vectors_of(sizes) * desc.block_shape[0] * across_of(desc, warps, sizes)
    return min(triton.next_power_of_2(blocks), sizes.SUMS // size)


@gluon.jit
def sums_of(ring, desc, BLOCKS: gl.constexpr, SIZES: gl.constexpr):
    """The ring's sums as f32 [BLOCKS * vectors, rows of a block, parts of a row's product]."""
    ACROSS: gl.constexpr = across_of(desc, gl.num_warps(), SIZES)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return ring.sums.reinterpret(gl.float32, [BLOCKS * vectors_of(SIZES), desc.block_shape[0], ACROSS], PLAIN)


@gluon.jit
def operands_of(ring, desc, vectors, SIZES: gl.constexpr):
    """Vectors, as `rings.received` or `rings.normalised` returned them, as `multiply` takes them.

    For tensor cores they are [8, 16, 64], a first operand for each octet. If a row has fewer they are there again.
    """
    if by_tensor_cores(desc, gl.num_warps(), SIZES):
        OCTETS: gl.constexpr = octets_of(desc)
        WIDTH: gl.constexpr = desc.block_shape[2]
        DTYPE: gl.constexpr = ring.stages.dtype
        TURNED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, layout_of(gl.num_warps()), 2)
        lines = ring.sums.slice(0, 64 * WIDTH).reinterpret(DTYPE, [16, 8, WIDTH], TURNED)
        operands = ()
        for i in gl.static_range(len(vectors)):
            parts = (vectors[i],)
            if operands_in(desc) == 2:
                parts = gl.split(vectors[i].reshape([2, 64, WIDTH]).permute([1, 2, 0]))
            for part in gl.static_range(len(parts)):
                high = parts[part].to(DTYPE)
                low = (parts[part] - high.to(gl.float32)).to(DTYPE)
                both = gl.join(high, low).reshape([OCTETS, 8, WIDTH, 2]).permute([0, 3, 1, 2])
                both = both.reshape([2 * OCTETS * 8, WIDTH])
                if desc.dtype.primitive_bitwidth == 8:
                    both = tensor_cores.order(both)
                both = both.reshape([2 * OCTETS, 8, WIDTH])
                for again in gl.static_range(rows_at_once(desc)):
                    lines.slice(again * 2 * OCTETS, 2 * OCTETS, dim=0).store(both)
                operands = operands + (lines.reinterpret(DTYPE, [8, 16, WIDTH], TURNED).load(OPERAND),)
        vectors = operands
    return vectors


@gluon.jit
def multiply(
    ring, position, desc, vectors, sums, count, COLUMNS: gl.constexpr, SIZES: gl.constexpr, MATRICES: gl.constexpr = 1
):  # fmt: skip
    """The blocks of rows that come next times each vector.

    Args:
      vectors: what `operands_of` returned.
      sums: of `sums_of`, for all blocks of each matrix. Each warp puts its parts of the products there.
      count: how many blocks of rows there are of each matrix, 1 or more; matrices come in turns.

    Returns: the next position.
    """
    if by_tensor_cores(desc, gl.num_warps(), SIZES):
        products = zeros_of(desc, SIZES)
        for i in range(count * MATRICES):
            position, following = traces_of(ring, position, desc, vectors, COLUMNS, SIZES)
            # Threads add up what they have of the block before, while this one is multiplied.
            keep(sums, gl.maximum(i - 1, 0), desc, products, MATRICES, SIZES)
            products = following
        keep(sums, count * MATRICES - 1, desc, products, MATRICES, SIZES)
    else:
        for i in range(count * MATRICES):
            first = place_of(sums, i, MATRICES, SIZES)
            position = multiply_in_registers(ring, position, desc, vectors, sums, first, COLUMNS, SIZES.B)
    return position


@gluon.jit
def place_of(sums, i, MATRICES: gl.constexpr, SIZES: gl.constexpr):
    """From which on of `sums` those of the i-th block are."""
    return i % MATRICES * (sums.shape[0] // MATRICES) + i // MATRICES * vectors_of(SIZES)


@gluon.jit
def zeros_of(desc, SIZES: gl.constexpr):
    """Products that are 0, as `traces_of` returns them."""
    COUNT: gl.constexpr = SIZES.B * desc.block_shape[0] // rows_at_once(desc)
    zeros = ()
    for _ in gl.static_range(COUNT):
        zeros = zeros + (gl.full([8, 16, 8], 0.0, gl.float32, layout_of(gl.num_warps())),)
    return zeros


@gluon.jit
def traces_of(ring, position, desc, vectors, COLUMNS: gl.constexpr, SIZES: gl.constexpr):
    """The next position; and, of each vector and then of `rows_at_once` rows of the next block, f32 [8, 16, 8]: the
    traces of its upper and of its lower 8 rows are an octet's products."""
    B: gl.constexpr = SIZES.B
    CHUNKS: gl.constexpr = rings.chunks_of(COLUMNS, desc)
    PARTS: gl.constexpr = operands_in(desc)
    TIMES: gl.constexpr = desc.block_shape[0] // rows_at_once(desc)
    LAYOUT: gl.constexpr = layout_of(gl.num_warps())
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    NARROW: gl.constexpr = desc.dtype.primitive_bitwidth == 8
    SHAPE: gl.constexpr = [8 * TIMES * PARTS, 8, desc.block_shape[2]]
    products = zeros_of(desc, SIZES)
    for chunk in gl.static_range(CHUNKS):
        stage, phase = position
        mbarrier.wait(ring.full.index(stage), phase)
        lines = ring.stages.index(stage).reinterpret(desc.dtype, SHAPE, desc.layout)
        if NARROW:
            lines = widen.pairs(lines)
        lines = lines.permute([0, 2, 1])
        blocks = ()
        for i in gl.static_range(TIMES * PARTS):
            blocks = blocks + (lines.slice(8 * i, 8, dim=0).load(OPERAND),)
        rings.give_back(ring, stage)
        position = rings.after(ring, position)
        if NARROW:
            words, blocks = blocks, ()
            for i in gl.static_range(TIMES * PARTS):
                blocks = blocks + (tensor_cores.widened(words[i], desc.dtype, ring.stages.dtype, LAYOUT),)
        added = ()
        for b in gl.static_range(B):
            for i in gl.static_range(TIMES):
                product = products[b * TIMES + i]
                for part in gl.static_range(PARTS):
                    vector = vectors[(b * CHUNKS + chunk) * PARTS + part]
                    product = mma_v2(vector, blocks[i * PARTS + part], product)
                added = added + (product,)
        products = added
    return position, products


@gluon.jit
def keep(sums, i, desc, products, MATRICES: gl.constexpr, SIZES: gl.constexpr):
    """Adds up what the threads of a warp have of the i-th block's products, and puts it into `sums`."""
    B: gl.constexpr = SIZES.B
    LAYOUT: gl.constexpr = layout_of(gl.num_warps())
    ROWS: gl.constexpr = rows_at_once(desc)
    TIMES: gl.constexpr = desc.block_shape[0] // ROWS
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    first = place_of(sums, i, MATRICES, SIZES)
    for b in gl.static_range(B):
        for time in gl.static_range(TIMES):
            diagonals = gl.where(row % 8 == column, products[b * TIMES + time], 0.0)
            total = gl.sum(diagonals.reshape([ROWS, octets_of(desc), 128]), 2)
            sums.index(first + b).slice(time * ROWS, ROWS, dim=0).store(total)


@gluon.jit
def multiply_in_registers(ring, position, desc, vectors, sums, first, COLUMNS: gl.constexpr, B: gl.constexpr):
    """The next block of rows times each of B vectors; and the next position.

    Args:
      first: from which on, of `sums`, each warp puts its part of the products.
    """
    CHUNKS: gl.constexpr = rings.chunks_of(COLUMNS, desc)
    ROWS: gl.constexpr = desc.block_shape[0]
    LAYOUT: gl.constexpr = rings.layout_of(desc.block_shape, gl.num_warps())
    LANES: gl.constexpr = LAYOUT.threads_per_warp[1]
    ACROSS: gl.constexpr = LAYOUT.warps_per_cta[1]
    AGAIN: gl.constexpr = desc.block_shape[1] // (LANES * ACROSS)
    OWN: gl.constexpr = desc.block_shape[2] // 8
    parts = ()
    for chunk in gl.static_range(CHUNKS):
        block, position = rings.take(ring, position, desc)
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
        sums.index(first + b).store(gl.sum(parts[b].reshape([ROWS, ACROSS, LANES * 8]), 2))
    return position


@triton.constexpr_function
def collected(across, warps):
    """The layout of what `collect` reads: 4 rows next to each other are a thread's."""
    return gl.BlockedLayout([4, across], [32, 1], [warps, 1], [1, 0])


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
