"""What products do around a kernel to take wide rows and give results of 8 bits: `quantize_lhs=` and `out_scale=`."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtaxfree.ops.quantize import BLOCK, DTYPES, divide, is_eight_bits, quantize
from jaxtaxfree.ops.scaled import result_dtype

# What of lhs has one scale.
LHS_BLOCKS = {"row": (1, -1), "block": (1, BLOCK)}
# (operands by their names, dtype of the result) -> a product of them.
Product = Callable[[Mapping[str, jax.Array], Any], jax.Array]
Operands = Mapping[str, Any]


def asked(quantize_lhs: Any, out_scale: Any) -> bool:
    """Whether `call` is to make the product."""
    return quantize_lhs is not None or out_scale is not None


def call(
    operation: Callable[..., Any],
    lhs: jax.Array,
    rhs: Any,
    axis_name: Any,
    *,
    quantize_lhs: str | None,
    out_scale: Any,
    preferred_element_type: Any,
    operands: Mapping[str, Any],
    **form: Any,
) -> Any:
    """A product of a lhs that is quantised before it travels, or whose result is rounded to 8 bits, or both.

    Args:
      operation: one of the three products.
      quantize_lhs: "row" or "block": of what lhs, of 16 bits or more, gets one scale. Its dtype becomes that of rhs.
      out_scale: by what the result is divided: f32 [], or "block" for scales of its own. The result is one of bf16, or
        of lhs's dtype where that is wider than 8 bits, which is then rounded to `preferred_element_type`.
      operands: other arrays of the operation, by their names; None for one that there is not.
      **form: its other keywords.

    Raises:
      ValueError: for another `quantize_lhs` or `out_scale`, or dtypes that they do not go with.
    """
    name = operation.__name__
    if isinstance(rhs, tuple) or form.get("return_gathered"):
        raise ValueError(f"{name} takes quantize_lhs and out_scale with one rhs, and without return_gathered.")
    given = {"lhs": jnp.asarray(lhs), "rhs": jnp.asarray(rhs)}
    given |= {key: jnp.asarray(x) for key, x in operands.items() if x is not None}
    dtype = None
    if out_scale is not None:
        dtype, out_scale = check_result(name, preferred_element_type, out_scale)
        preferred_element_type = result_dtype(given["lhs"], given["rhs"], None)

    def product(operands: Mapping[str, jax.Array], preferred_element_type: Any) -> jax.Array:
        own = {key: x for key, x in operands.items() if key not in ("lhs", "rhs")}
        how = form | {"preferred_element_type": preferred_element_type}
        return operation(operands["lhs"], operands["rhs"], axis_name, **own, **how)

    if quantize_lhs is None:
        out = product(given, preferred_element_type)
    else:
        block = check_lhs(name, quantize_lhs, given)
        wide = preferred_element_type or given["lhs"].dtype
        out = straight_through_lhs(product, functools.partial(quantize, block=block), wide)(given)
    return out if dtype is None else rounded(out, dtype, out_scale)


def rounded(out: jax.Array, dtype: np.dtype, out_scale: Any) -> Any:
    """A result in 8 bits, divided by `out_scale`, f32 []; or with "block" values [..., N] and scales
    [..., ceil(N / 128)].
    """
    if isinstance(out_scale, str):
        if out.ndim == 1:
            values, scale = quantize(out[None], dtype, block=(1, BLOCK))
            return values[0], scale[0]
        return quantize(out, dtype, block=(1, BLOCK))
    return divide(out.astype(jnp.float32), out_scale, dtype)


def straight_through_lhs(
    product: Product, quantizer: Callable[[jax.Array, np.dtype], tuple[jax.Array, jax.Array]], dtype: Any
) -> Callable[[Mapping[str, jax.Array]], jax.Array]:
    """The product of a quantised lhs, whose gradients are those of the product of lhs itself.

    Args:
      product: of operands by their names, "lhs", "rhs", "lhs_scale" and whatever else it takes.
      quantizer: (lhs, dtype) -> values and their scales.
      dtype: of the result.
    """

    def narrow(operands: Mapping[str, jax.Array]) -> jax.Array:
        values, scale = quantizer(operands["lhs"], operands["rhs"].dtype)
        return product({**operands, "lhs": values, "lhs_scale": scale}, dtype)

    return straight_through(narrow, lambda operands: product(operands, dtype))


def straight_through(narrow: Callable[[Operands], Any], wide: Callable[[Operands], Any]) -> Callable[[Operands], Any]:
    """The function `narrow` of a tree of arrays, with the gradients of `wide`, which quantises nothing."""

    @jax.custom_vjp
    def run(operands: Operands) -> Any:
        return narrow(operands)

    def forward(operands: Operands) -> tuple[Any, Operands]:
        return run(operands), operands

    def backward(operands: Operands, cts: Any) -> tuple[Any]:
        (found,) = jax.vjp(wide, operands)[1](cts)
        return (found,)

    run.defvjp(forward, backward)
    return run


def check_lhs(name: str, quantize_lhs: str, operands: Mapping[str, jax.Array]) -> tuple[int, int]:
    """The block of lhs that has one scale; raises ValueError if operands do not go with `quantize_lhs`."""
    if quantize_lhs not in LHS_BLOCKS:
        raise ValueError(f"{name} takes quantize_lhs as {', '.join(map(repr, LHS_BLOCKS))}, not {quantize_lhs!r}.")
    lhs, rhs = operands["lhs"], operands["rhs"]
    if "lhs_scale" in operands or not jnp.issubdtype(lhs.dtype, jnp.floating) or is_eight_bits(lhs):
        raise ValueError(
            f"{name} takes quantize_lhs for a lhs of 16 or 32 bits without lhs_scale, and this one is {lhs.dtype}."
        )
    if not is_eight_bits(rhs) or "rhs_scale" not in operands:
        raise ValueError(
            f"{name} takes quantize_lhs with a rhs of {', '.join(DTYPES)} and its rhs_scale, and rhs is {rhs.dtype}."
        )
    return LHS_BLOCKS[quantize_lhs]


def check_result(name: str, preferred_element_type: Any, out_scale: Any) -> tuple[np.dtype, Any]:
    """The dtype of the result, and its scale: "block" or an array []; raises ValueError for another one."""
    if preferred_element_type is None or np.dtype(preferred_element_type).name not in DTYPES:
        raise ValueError(
            f"{name} takes out_scale with a preferred_element_type of {', '.join(DTYPES)}, not "
            f"{preferred_element_type}."
        )
    if isinstance(out_scale, str):
        if out_scale != "block":
            raise ValueError(f"{name} takes out_scale as float32 [] or 'block', not {out_scale!r}.")
    else:
        out_scale = jnp.asarray(out_scale)
        if out_scale.dtype != np.float32 or out_scale.ndim:
            raise ValueError(
                f"{name} takes out_scale as float32 [] or 'block', not {out_scale.dtype}{list(out_scale.shape)}."
            )
    return np.dtype(preferred_element_type), out_scale
