"""Sizes, offsets and numbers of experts, which arrive as data and may be wrong."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_int32(numbers: jax.Array) -> jax.Array:
    """Integers of any dtype as i32. What has more bits becomes garbage as well, and not another number.

    Bounds are compared behind it: a narrow dtype may not hold them, and JAX wraps a Python number that it does not.
    """
    if numbers.dtype != np.int32:
        info = jnp.iinfo(numbers.dtype)
        numbers = jnp.clip(numbers, max(-1, int(info.min)), min(int(info.max), np.iinfo(np.int32).max))
    return numbers.astype(jnp.int32)


def nothing(dtype: Any) -> np.ndarray:
    """What a result holds that there cannot be: NaN, or of integers all bits."""
    dtype = np.dtype(dtype)
    return np.asarray(jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else -1).astype(dtype)
