"""`quantize` and `dequantize`: arrays of 8 bits and the factors by which they are multiplied."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxtaxfree.kernels.blocks.hopper import SCALED

# What a value may be quantised to.
DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
# Rows (or columns) of a block, and its extent along the contracted dimension, where scales are by blocks.
BLOCK: int = SCALED.value
_WHOLE = -1


def quantize(
    x: jax.Array,
    dtype: DTypeLike,
    *,
    block: Sequence[int] | None = None,
    power_of_2: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`x` in 8 bits: (values, scale), of which `values * scale` is about `x`.

    The scale of a block is its largest magnitude over the largest finite number of `dtype`, so that nothing is cut
    off. That is dynamic ("current") scaling, as in "FP8 Formats for Deep Learning" (arXiv 2209.05433); with blocks of
    1 x 128 for activations and 128 x 128 for weights as in the DeepSeek-V3 technical report (arXiv 2412.19437).

    Args:
      x: [..., M, K], or of any shape if there is one block. f32, bf16 or f16.
      dtype: float8_e4m3fn, float8_e5m2 or int8. int8 is symmetric: -127 to 127.
      block: how many elements of the last two dimensions have one scale, -1 for all: None (all of x), (1, -1) (rows),
        (-1, 1) (columns), (1, 128) or (128, 128). A last block may be smaller.
      power_of_2: round scales up to powers of 2. Then they change no digit of a product.

    Returns: values of the shape of x, and scales, f32: [] for None, else [..., blocks of M, blocks of K]. These are
      the shapes that the products take: [M, 1] of rows, [1, K] of columns, [M, ceil(K / 128)] or
      [ceil(M / 128), ceil(K / 128)].

    A block of zeros has the scale 1. A block that holds NaN or an infinity has a scale of NaN. The values are rounded
    to nearest, ties to even. What is derived from values of 8 bits is in `docs/eight_bits.md`, with a quantiser that
    lets gradients through.

    Raises:
      ValueError: for another dtype or block, or an x without rows and columns where the block has them.
      TypeError: if x has no floating-point numbers.
    """
    x, dtype = jnp.asarray(x), _check_dtype(dtype)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"quantize takes floating-point numbers, not {x.dtype}.")
    wide, extents = x.astype(jnp.float32), _check_block(x.shape, block)
    amax = jnp.max(jnp.abs(_blocks(wide, extents) if extents else wide), (-3, -1) if extents else None, initial=0.0)
    scale = jnp.where(amax == 0, 1.0, _quotient(amax, _largest(dtype)))
    if power_of_2:
        scale = _up_to_power_of_2(scale)
    return divide(wide, expand(scale, x.shape) if extents else scale, dtype), scale


def divide(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """x / scale, f32, rounded to a dtype of 8 bits; what is beyond its largest number becomes that."""
    values, largest = x / scale, _largest(dtype)
    if dtype == np.int8:
        values = jnp.round(values)
        values = jnp.where(jnp.isnan(values), 0.0, values)  # an integer has no NaN: its scale is one
    return jnp.clip(values, -largest, largest).astype(dtype)


def dequantize(values: jax.Array, scale: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """`values * scale`, computed in f32.

    Args:
      values: [..., M, K].
      scale: as `quantize` gives it, or in any shape that `expand` takes.
      dtype: of the result.

    Raises:
      ValueError: if the shape of the scale is none of blocks of the values.
    """
    scale = jnp.asarray(scale, jnp.float32)
    scale = expand(scale, values.shape) if scale.ndim else scale
    return (values.astype(jnp.float32) * scale).astype(dtype)


def expand(scale: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Scales [..., blocks of M, blocks of K] of an array, one for each element, or broadcast along a dimension.

    Raises:
      ValueError: if the scales are of no blocks of such an array.
    """
    shape = tuple(shape)
    for axis in (-2, -1):
        if len(shape) < 2 or scale.ndim < 2 or not _divides(scale.shape[axis], shape[axis]):
            raise ValueError(f"scales {list(scale.shape)} are of no blocks of 1, {BLOCK} or all of {list(shape)}.")
        if scale.shape[axis] not in (1, shape[axis]):
            scale = jnp.repeat(scale, BLOCK, axis=axis)
            scale = jax.lax.slice_in_dim(scale, 0, shape[axis], axis=axis % scale.ndim)
    return scale


def _divides(blocks: int, length: int) -> bool:
    return blocks in (1, length, math.ceil(length / BLOCK))


def _check_dtype(dtype: DTypeLike) -> np.dtype:
    dtype = np.dtype(dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"quantize gives {', '.join(DTYPES)}, not {dtype}.")
    return dtype


def _check_block(shape: Sequence[int], block: Sequence[int] | None) -> tuple[int, int] | None:
    """The extent of a block along the last two dimensions; None if all is one."""
    if block is None:
        return None
    allowed = [(1, _WHOLE), (_WHOLE, 1), (1, BLOCK), (BLOCK, BLOCK)]
    if not isinstance(block, Sequence) or tuple(block) not in allowed:
        raise ValueError(f"quantize has no block {block!r}: take None, {', '.join(map(str, allowed))}.")
    if len(shape) < 2:
        raise ValueError(f"quantize takes blocks of rows and columns, and x has shape {list(shape)}.")
    rows, columns = (length if each == _WHOLE else each for each, length in zip(block, shape[-2:], strict=True))
    return rows, columns


def _blocks(x: jax.Array, extents: tuple[int, int]) -> jax.Array:
    """[..., M, K] as [..., blocks of M, rows, blocks of K, columns], with zeros where the last block is smaller."""
    pairs = list(zip(x.shape[-2:], extents, strict=True))
    counts = [1 if length == extent else math.ceil(length / extent) for length, extent in pairs]  # all of none is 1
    missing = [count * extent - length for count, (length, extent) in zip(counts, pairs, strict=True)]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, each) for each in missing])
    return padded.reshape(*x.shape[:-2], counts[0], extents[0], counts[1], extents[1])


def _largest(dtype: np.dtype) -> float:
    return 127.0 if dtype == np.int8 else float(jnp.finfo(dtype).max)


def _quotient(amax: jax.Array, largest: float) -> jax.Array:
    """amax / largest, no smaller than the least normal number, by which a value can be divided."""
    return jnp.maximum(amax / largest, jnp.finfo(jnp.float32).tiny) + 0.0 * amax  # NaN where amax is none or infinite


def _up_to_power_of_2(scale: jax.Array) -> jax.Array:
    """The least power of 2 that is not less; NaN stays."""
    mantissa, exponent = jnp.frexp(scale)
    power = jnp.ldexp(jnp.ones_like(scale), jnp.where(mantissa == 0.5, exponent - 1, exponent))
    return jnp.where(jnp.isfinite(scale), power, scale)


def is_eight_bits(x: Any) -> bool:
    """Whether an array, or its type, is of a dtype that `quantize` gives."""
    return np.dtype(x.dtype).name in DTYPES
