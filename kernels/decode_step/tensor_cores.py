"""The products of a decode step for more than four sequences, by tensor cores.

Each warp has a part of the columns, of its own rows of shared memory, and multiplies 16 vectors at a time by 8 rows. A
thread reads 8 neighbours of a row at once; which columns an instruction takes together does not matter, as long as both
operands agree. The vectors lie in registers for a whole phase, in the weights' dtype.

That of a norm which is different for each vector is its scale, and comes last. So who adds to the stream stores, for
all, the stream times the gains of the next norm, and the sum of squares of its rows.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from jaxtaxfree.kernels.decode_step import ring as rings

VECTORS = gl.constexpr(16)  # of an instruction


class Vectors(NamedTuple):
    """What rows are multiplied by."""

    scale: Any  # f32 [16], of the products
    parts: Any  # chunk by chunk [warps, 16, columns]


@triton.constexpr_function
def product_layout(warps):
    """The layout of products [warps, 16, rows]: each warp has its own."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@triton.constexpr_function
def scale_layout(warps):
    return gl.SliceLayout(0, gl.SliceLayout(2, product_layout(warps)))


@triton.constexpr_function
def block_layout(block_shape, warps):
    """The layout of a block [rows, groups, 64] that is an operand's, turned round: 8 neighbours of a row a thread."""
    rows, groups, _ = block_shape
    each = groups // warps
    powers = lambda first, end: [first << i for i in range((end // first).bit_length() - 1)]  # noqa: E731
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 32]]
    registers += [[0, group, 0] for group in powers(1, each)] + [[row, 0, 0] for row in powers(8, rows)]
    lanes = [[0, 0, 8], [0, 0, 16], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    of_warps = [[0, each * warp, 0] for warp in powers(1, warps)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [rows, groups, 64])


@gluon.jit
def vectors_of(desc, source, scale, COLUMNS: gl.constexpr, B: gl.constexpr):
    """Vectors [B, COLUMNS] of the weights' dtype.

    Args:
      scale: f32, or f32 [16] of `scale_layout`, by which their products are multiplied.
    """
    WARPS: gl.constexpr = gl.num_warps()
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, product_layout(WARPS), 8)
    EACH: gl.constexpr = 64 * desc.block_shape[1] // WARPS
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, OPERAND)))[:, None, None]
    b = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, OPERAND)))[None, :, None]
    column = warp * EACH + gl.arange(0, EACH, gl.SliceLayout(0, gl.SliceLayout(1, OPERAND)))[None, None, :]
    parts = ()
    for chunk in gl.static_range(rings.chunks_of(COLUMNS, desc)):
        at = chunk * (64 * desc.block_shape[1]) + column
        if COLUMNS % (64 * desc.block_shape[1]) == 0 and B == 16:
            part = gl.load(source + b * COLUMNS + at)
        else:
            part = gl.load(source + b * COLUMNS + at, mask=(b < B) & (at < COLUMNS), other=0.0)
        parts = parts + (part,)
    return Vectors(scale + gl.full([16], 0.0, gl.float32, scale_layout(WARPS)), parts)


@gluon.jit
def multiply(ring, position, desc, vectors, first, COLUMNS: gl.constexpr):
    """The rows that come next times the vectors, of each warp's columns, into the ring's sums.

    Args:
      first: where, as in `rings.multiply`.

    Returns: the next position.
    """
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = desc.block_shape[0]
    LAYOUT: gl.constexpr = product_layout(WARPS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    products = gl.full([WARPS, 16, ROWS], 0.0, gl.float32, LAYOUT)
    for chunk in gl.static_range(rings.chunks_of(COLUMNS, desc)):
        block, position = rings.take_as(ring, position, desc, block_layout(desc.block_shape, WARPS))
        block = block.reshape([ROWS, WARPS, 64 * desc.block_shape[1] // WARPS]).permute([1, 2, 0])
        products = mma_v2(vectors.parts[chunk], gl.convert_layout(block, gl.DotOperandLayout(1, LAYOUT, 8)), products)
    products = (products * vectors.scale[None, :, None]).permute([1, 2, 0]).reshape([16 * ROWS, WARPS])
    sums = ring.sums.reinterpret(
        gl.float32, [rings.SUMS // (16 * ROWS * WARPS), 16 * ROWS, WARPS], PLAIN
    )  # fmt: skip
    sums.index(first // 16).store(products)
    return position


@gluon.jit
def begin(kept, x, norm, SIZES: gl.constexpr):
    """The first call of `publish`, of x f32 [B, D] and the first norm: of some columns."""
    D: gl.constexpr = SIZES.D
    OWN: gl.constexpr = triton.cdiv(D, SIZES.PROGRAMS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    b = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    own = gl.arange(0, triton.next_power_of_2(OWN), gl.SliceLayout(0, LAYOUT))[None, :]
    row = gl.program_id(0) * OWN + own
    there = (b < SIZES.B) & (own < OWN) & (row < D)
    value = gl.load(x + b * D + row, mask=there, other=0.0)
    squares = gl.sum(publish(kept, value, b, row, there, norm, SIZES), 1)
    store_squares(kept, squares)


@gluon.jit
def publish(kept, value, b, row, there, norm, SIZES: gl.constexpr):
    """Stores rows of the stream times the gains of the next norm; returns their squares, 0 where there are none."""
    gain = gl.load(norm + row, mask=there, other=0.0).to(gl.float32)
    if SIZES.PLUS_ONE:
        gain += 1.0
    gl.store(kept.scaled + b * SIZES.D + row, (value * gain).to(kept.scaled.dtype.element_ty), mask=there)
    return gl.where(there, value * value, 0.0)


@gluon.jit
def store_squares(kept, squares):
    """Stores the program's sums of squares, f32 [16]."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    gl.store(kept.squares + gl.program_id(0) * 16 + gl.arange(0, 16, EACH), gl.convert_layout(squares, EACH))


@gluon.jit
def scale_of(kept, factor, SIZES: gl.constexpr):
    """What the norm multiplies each vector by, times `factor`: f32 [16]."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    program = gl.arange(0, triton.next_power_of_2(SIZES.PROGRAMS), gl.SliceLayout(1, LAYOUT))[:, None]
    b = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    squares = gl.sum(gl.load(kept.squares + program * 16 + b, mask=program < SIZES.PROGRAMS, other=0.0), 0)
    return gl.convert_layout(factor * gl.rsqrt(squares / SIZES.D + SIZES.EPS), scale_layout(gl.num_warps()))
