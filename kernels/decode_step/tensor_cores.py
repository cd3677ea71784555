"""Products by tensor cores: of 8 or 16 vectors and the rows of weights that come through the ring.

A block of weights is a tile of 8 rows, [groups, 8, 64]: so many groups of 64 columns. Warps share the groups: each adds
up the products of its own columns, and `collect` adds up what the warps have. The blocks of all tiles of a program that
have the same columns follow each other, so each part of the vectors is loaded once, and only a part is in registers.

The vectors lie in memory as a warp needs them (`place_of`), in 16 bits.

A group of weights of 8 bits is 128 columns. Two of them are a word, and words are loaded as numbers of 16 bits are: so
a thread has 4 neighbours of 16 columns, and not two and two. Of the vectors it takes the same, in the same order.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.blocks import widen
from jaxtaxfree.kernels.decode_step import ring as rings

VECTORS = gl.constexpr(16)  # of an instruction
ROWS = gl.constexpr(8)


@triton.constexpr_function
def product_layout(warps):
    """The layout of products [warps, 16, 8]: each warp has its own."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@gluon.jit
def place_of(b, column, COUNT: gl.constexpr, NARROW: gl.constexpr):
    """Where a number of vectors [COUNT, columns] lies: those of a thread next to each other, of a warp's instruction.

    That is [columns / 16, 8, 4, 2, COUNT / 8, 2]: b modulo 8, the pair of 8 columns, which 8 of 16 columns, which 8
    vectors, and which of the pair. For weights of 8 bits (NARROW) which 4 of 16 columns and which pair of these take
    the places of the second and the third one.
    """
    EACH: gl.constexpr = COUNT // 8
    if NARROW:
        thread, half = column % 16 // 4, column % 4 // 2
    else:
        thread, half = column % 8 // 2, column % 16 // 8
    thread = b % 8 * 4 + thread
    return (column // 16 * 32 + thread) * (4 * EACH) + half * (2 * EACH) + b // 8 * 2 + column % 2


@gluon.jit
def keep(vectors, value, b, column, there, SIZES: gl.constexpr):
    """Stores numbers of vectors that a phase multiplies, but those behind the last one that lies in memory."""
    COUNT: gl.constexpr = SIZES.VECTORS
    place = place_of(b, column, COUNT, SIZES.NARROW)
    gl.store(vectors + place, value.to(vectors.dtype.element_ty), mask=there & (b < COUNT))


@gluon.jit
def load_part(source, group, GROUPS: gl.constexpr, WIDTH: gl.constexpr, SIZES: gl.constexpr):
    """Vectors [vectors, WIDTH * GROUPS] in words, two numbers each: for each warp WIDTH columns from a group on; 0
    behind the last group.

    In words, because the compiler gives a number of 16 bits a register of its own where it is carried around a loop.
    """
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = WIDTH // 16
    EACH: gl.constexpr = SIZES.VECTORS // 4  # words of a thread
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, STEPS, EACH], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    own = group + gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    step = gl.arange(0, STEPS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    word = gl.arange(0, 32 * EACH, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    there = (own < GROUPS) & (step >= 0) & (word >= 0)
    words = source.to(gl.pointer_type(gl.int32), bitcast=True)
    return gl.load(words + (own * STEPS + step) * (32 * EACH) + word, mask=there, other=0)


@gluon.jit
def operand_of(words, DTYPE: gl.constexpr):
    """What `load_part` returned as an operand [warps, 16, columns of a group]."""
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = words.shape[1]
    if words.shape[2] < 128:  # of 8 vectors, behind which there are zeros
        words = gl.join(words, words * 0).reshape([WARPS, STEPS, 128])
    part = shmem.elements_of(words, DTYPE)
    part = part.reshape([WARPS, STEPS, 8, 4, 2, 2, 2]).permute([0, 5, 2, 1, 4, 3, 6]).reshape([WARPS, 16, 16 * STEPS])
    return gl.convert_layout(part, gl.DotOperandLayout(0, product_layout(WARPS), 2), assert_trivial=True)


@gluon.jit
def load_chunk(source, chunk, desc, COLUMNS: gl.constexpr, SIZES: gl.constexpr):
    """What the columns of a block are multiplied by: parts for one group of each warp after the other, in words."""
    WARPS: gl.constexpr = gl.num_warps()
    parts = ()
    WIDTH: gl.constexpr = desc.block_shape[2]
    for i in gl.static_range(desc.block_shape[0] // WARPS):
        parts = parts + (load_part(source, chunk * desc.block_shape[0] + i * WARPS, COLUMNS // WIDTH, WIDTH, SIZES),)
    return parts


@triton.constexpr_function
def chunks_of(columns, desc):
    """Into how many blocks 8 rows of so many columns fall."""
    return -(-columns // (desc.block_shape[2] * desc.block_shape[0]))


@gluon.jit
def fetch(ring, position, desc, chunk, row, IN_FLIGHT: gl.constexpr, PACE: gl.constexpr):
    """Begins to load the block of 8 rows from `row` on and of a chunk of the columns; returns the next position."""
    return rings.fetch(ring, position, desc, chunk * desc.block_shape[0], row, IN_FLIGHT, PACE)


@gluon.jit
def multiply(
    ring, position, first, second, source, later, COLUMNS: gl.constexpr, TILES: gl.constexpr, SIZES: gl.constexpr
):
    """The blocks that come next times the vectors: TILES of 8 rows, of which all blocks of the same
    columns come one after the other.

    Args:
      first, second: descriptors of what comes in turns; the second one may be None.
      source: the vectors, as `place_of` has them.
      later: those of the first columns, what `load_chunk` returned.

    Returns: (each warp's part of the products, one [warps, 16, 8] after the other; the next position).
    """
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = product_layout(WARPS)
    CHUNKS: gl.constexpr = chunks_of(COLUMNS, first)
    EACH: gl.constexpr = 1 if second is None else 2
    products = ()
    for _ in gl.static_range(EACH * TILES):
        products = products + (gl.full([WARPS, 16, 8], 0.0, gl.float32, LAYOUT),)
    for chunk in range(CHUNKS):
        parts = later
        later = load_chunk(source, chunk + 1, first, COLUMNS, SIZES)  # on its way while this one is multiplied
        added = ()
        for i in gl.static_range(EACH * TILES):
            if i % EACH == 0:
                product, position = multiply_block(ring, position, first, parts, products[i])
            else:
                product, position = multiply_block(ring, position, second, parts, products[i])
            added = added + (product,)
        products = added
    return products, position


@gluon.jit
def multiply_block(ring, position, desc, parts, product):
    WARPS: gl.constexpr = gl.num_warps()
    NARROW: gl.constexpr = desc.dtype.primitive_bitwidth == 8
    DTYPE: gl.constexpr = ring.stages.dtype
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, product_layout(WARPS), 2)
    stage, phase = position
    mbarrier.wait(ring.full.index(stage), phase)
    block = rings.view(ring, stage, desc)
    if NARROW:
        block = widen.pairs(block)
    for i in gl.static_range(len(parts)):
        own = block.permute([0, 2, 1]).slice(i * WARPS, WARPS, dim=0)
        weights = own.load(OPERAND)
        if NARROW:
            weights = widened(weights, desc.dtype, DTYPE, product_layout(WARPS))
        product = mma_v2(operand_of(parts[i], DTYPE), weights, product)
    rings.give_back(ring, stage)
    return product, rings.after(ring, position)


@gluon.jit
def widened(words, SOURCE: gl.constexpr, DEST: gl.constexpr, PRODUCT: gl.constexpr):
    """The second operand of a product, [batch, 64, N] of words, each of two numbers of type SOURCE, as one
    [batch, 128, N] of DEST.

    The numbers of a thread stay its own: of every 16 columns, two words next to each other come to lie 8 apart. `order`
    has the columns of the first operand likewise.

    Args:
      PRODUCT: the layout of the product.
    """
    BATCH: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[2]
    low, high = widen.words(words, SOURCE, DEST)
    both = gl.join(low, high).reshape([BATCH, 4, 2, 4, 2, N, 2]).permute([0, 1, 2, 4, 3, 6, 5])
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    return gl.convert_layout(both.reshape([BATCH, 128, N]), OPERAND, assert_trivial=True)


@gluon.jit
def order(x):
    """Rows [M, K] whose columns are to be multiplied by what `widened` returns, in the order that this has."""
    M: gl.constexpr = x.shape[0]
    K: gl.constexpr = x.shape[1]
    return x.reshape([M, K // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4]).reshape([M, K])


@triton.constexpr_function
def collected(warps):
    """The layout of what `collect` reads."""
    return gl.BlockedLayout([1, warps, 1, 4], [1, 1, 16, 2], [warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.jit
def collect(ring, products, FIRST: gl.constexpr, STEP: gl.constexpr, COUNT: gl.constexpr, SIZE: gl.constexpr):
    """Adds up what the warps have of COUNT products, every STEP-th: f32 [SIZE, 16, 8], anything behind them."""
    WARPS: gl.constexpr = gl.num_warps()
    EACH: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ALL: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    sums = ring.sums.reinterpret(gl.float32, [SIZE, WARPS, 16, 8], EACH)
    for i in gl.static_range(COUNT):
        sums.index(i).store(products[FIRST + i * STEP])
    return gl.sum(ring.sums.reinterpret(gl.float32, [SIZE, WARPS, 16, 8], ALL).load(collected(WARPS)), 1)
