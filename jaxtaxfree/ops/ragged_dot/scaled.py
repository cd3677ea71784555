"""`ragged_dot` of operands of 8 bits: scales of rows and columns are applied to the sums of the kernel for 16 bits."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtaxfree.ops import epilogue as epilogues
from jaxtaxfree.ops import scaled
from jaxtaxfree.ops.epilogue import Epilogue
from jaxtaxfree.ops.quantize import DTYPES, is_eight_bits


def ragged_dot(
    operation: Callable[..., jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *,
    scales: Mapping[str, Any],
    gate: jax.Array | None,
    activation: Any,
    preferred_element_type: Any,
    rhs_transposed: bool,
    **form: Any,
) -> jax.Array:
    """The product of what the scales make of the operands. Numbers of 8 bits are exact in the 16 bits of the kernel.

    Args:
      operation: `jaxtaxfree.ragged_dot`.
      scales: of "lhs", "rhs" and "gate"; None for one that there is not.
      **form: other keywords.

    Raises:
      ValueError: if a scale does not fit.
    """
    lhs, rhs, sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(sizes)
    weights = [rhs] if gate is None else [rhs, jnp.asarray(gate)]
    dtype = scaled.result_dtype(lhs, rhs, preferred_element_type)
    given = {"lhs": lhs, **dict(zip(("rhs", "gate"), weights))}
    found = {name: _check(name, given.get(name), scale, rhs_transposed) for name, scale in scales.items()}
    # Each row's group; rows behind the last one are zeros, whatever multiplies them.
    group = jnp.repeat(jnp.arange(sizes.shape[0]), jnp.maximum(sizes, 0), total_repeat_length=lhs.shape[0])
    products = []
    for name, w in zip(("rhs", "gate"), weights):
        left, right = (x.astype(_wide(lhs, rhs)) if is_eight_bits(x) else x for x in (lhs, w))
        form |= {"rhs_transposed": rhs_transposed, "preferred_element_type": jnp.float32}
        out = operation(left, right, sizes, **form)
        for scale in (found["lhs"], found[name]):
            if scale is not None:
                out *= scale if scale.ndim < 3 else scale.reshape(scale.shape[0], -1)[group]
        products.append(out)
    name = epilogues.activation_name("ragged_dot", activation)
    return Epilogue(name, ("gate",) * (len(weights) - 1)).apply(products, {}, dtype)


def _wide(lhs: jax.Array, rhs: jax.Array) -> np.dtype:
    """In which both are multiplied: that of the one that has not 8 bits."""
    return next((x.dtype for x in (lhs, rhs) if not is_eight_bits(x)), jnp.dtype(jnp.bfloat16))


def _check(name: str, x: jax.Array | None, scale: Any, transposed: bool) -> jax.Array | None:
    if scale is None:
        return None
    scale = jnp.asarray(scale)
    if x is None or not is_eight_bits(x):
        raise ValueError(
            f"ragged_dot takes {name}_scale for a {name} of {', '.join(DTYPES)}, and there is "
            f"{'none' if x is None else x.dtype}."
        )
    if scale.dtype != np.float32:
        raise ValueError(f"ragged_dot takes {name}_scale as float32, not {scale.dtype}.")
    row = (*x.shape[:-1], 1) if name == "lhs" or transposed else (x.shape[0], 1, x.shape[2])
    if scale.shape not in ((), row):
        raise ValueError(f"ragged_dot takes {name}_scale of shape [], {list(row)} here, not {list(scale.shape)}.")
    return scale
