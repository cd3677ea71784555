"""What the operations that fuse a matrix product share: checks, precisions, tiles by shape, and launches of them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtaxfree.primitive import DTYPES, Lasting, symbolic
from jaxtaxfree.teams import vary, varying

# Why XLA is taken where nobody has measured which is faster.
UNMEASURED = "the kernel has not been measured against XLA yet"


def check_operands(operation: str, lhs: jax.Array, rhs: jax.Array) -> None:
    """Raises ValueError if an operand is a scalar, or rhs has more than two dimensions.

    `jnp.matmul` takes three dimensions for a batch of matrices. Weights [N, H, D] of attention heads are meant as one
    matrix, and where the sizes happen to fit, a batch of products would come out without an error.
    """
    if lhs.ndim == 0 or rhs.ndim == 0:
        raise ValueError(f"{operation} takes no scalars: lhs has shape {lhs.shape}, rhs {rhs.shape}.")
    if rhs.ndim > 2:
        first, last = rhs.shape[0], rhs.shape[-1]
        raise ValueError(
            f"{operation} takes rhs as a matrix [K, N], not {list(rhs.shape)}: reshape it to "
            f"[{math.prod(rhs.shape[:-1])}, {last}] where all dimensions but the last are contracted (as in einsum's "
            f"'...nh,nhd->...d'; lhs then ends in one such dimension, too) or to [{first}, {math.prod(rhs.shape[1:])}] "
            "where the first one is ('...d,dnh->...nh'), and use jax.vmap for a batch of matrices."
        )


def check_contraction(
    operation: str, lhs: jax.Array, rhs: jax.Array, parts: int = 1, rhs_transposed: bool = False
) -> None:
    """Raises ValueError if `lhs @ rhs` is no product, where the last dimension of lhs is gathered of so many parts."""
    size, k = parts * lhs.shape[-1], rhs.shape[-1 if rhs_transposed else 0]
    if size != k:
        gathered = f" ({lhs.shape[-1]} from each of {parts} ranks)" if parts > 1 else ""
        which = "last (rhs_transposed)" if rhs_transposed else "first"
        raise ValueError(
            f"{operation} contracts the last dimension of lhs with the {which} of rhs, but lhs is "
            f"{list(lhs.shape)} and rhs is {list(rhs.shape)}: {size}{gathered} is not {k}."
        )


def columns(rhs: jax.Array, rhs_transposed: bool) -> tuple[int, ...]:
    """The lengths of the dimensions that a product has of rhs: N, or none of a vector."""
    return rhs.shape[:-1] if rhs_transposed else rhs.shape[1:]


def check_precision(precision: Any, preferred_element_type: Any) -> dict[str, Any]:
    """The two keywords of `jnp.matmul` as parameters of a primitive."""
    return {
        "precision": jax.config.jax_default_matmul_precision if precision is None else precision,
        "preferred_element_type": None if preferred_element_type is None else np.dtype(preferred_element_type),
    }


def bind(primitive: Any, *operands: jax.Array, axes: tuple[str, ...], **params: Any) -> Any:
    """Binds a primitive, whose operands must vary along the same axes."""
    return primitive.bind(*vary_alike(*operands, axes=axes), axes=axes, **params)


def vary_alike(*operands: jax.Array, axes: tuple[str, ...]) -> list[jax.Array]:
    """The operands as values that vary along these axes, and along those of each other."""
    along = set(axes).union(*map(varying, operands))
    return [vary(x, along) for x in operands]


def unsupported(lhs: Any, rhs: Any, *, precision: Any, preferred_element_type: Any) -> list[str]:
    """All that keeps every kernel from taking these operands."""
    reasons = symbolic(lhs, rhs)
    if lhs.dtype != rhs.dtype:
        reasons.append(
            Lasting(
                f"it takes operands of one dtype, not {lhs.dtype} and {rhs.dtype}: cast one of them, and in gradients "
                "leave out preferred_element_type"
            )
        )
    elif lhs.dtype.name not in DTYPES:
        reasons.append(Lasting(f"it takes {', '.join(DTYPES)}, not {lhs.dtype}: cast the operands"))
    if preferred_element_type is not None and preferred_element_type.name not in DTYPES:
        reasons.append(Lasting(f"it gives {', '.join(DTYPES)}, not {preferred_element_type}: cast the result"))
    if rhs.ndim != 2 or lhs.ndim < 2:
        reasons.append(f"it takes lhs of two or more dimensions and rhs of two, not {lhs.ndim} and {rhs.ndim}")
    if 0 in lhs.shape or 0 in rhs.shape:
        reasons.append(f"an operand is empty: {list(lhs.shape)}, {list(rhs.shape)}")
    if triton_precision(precision) is None:
        reasons.append(Lasting(f"it has no precision {precision}: take 'default', 'high' or 'highest'"))
    return reasons


def slower(lhs: Any, rhs: Any, rows: int, *, precision: Any, preferred_element_type: Any) -> str | None:
    """Why XLA takes a product of so many rows, if it does whatever the configuration: no kernel takes the operands, or
    XLA's product of f32 is known to be faster. Measured on H200.
    """
    if reasons := unsupported(lhs, rhs, precision=precision, preferred_element_type=preferred_element_type):
        return Lasting("; ".join(reasons))  # shapes were right when the call was traced
    if lhs.dtype == np.float32:
        if triton_precision(precision) != "tf32" and 2 * rows * math.prod(rhs.shape) > 1e8:
            # Triton multiplies such operands without tensor cores: 6 TFLOP/s.
            return "XLA's f32 products of more than TF32 precision are faster than Triton's"
        if rows > 64:
            return "XLA's TF32 products of many rows are faster than Triton's"
    return None


def rows_back(x: jax.Array, lengths: tuple[int, ...], axis: int) -> jax.Array:
    """What `rows_first` made of an array, as it was; of another length along the axis."""
    return jnp.moveaxis(x.reshape(-1, *lengths[1:], x.shape[-1]), 0, axis)


def rows_first(x: jax.Array, axis: int) -> tuple[jax.Array, tuple[int, ...]]:
    """[..., M, ..., K] as [M * others, K], the given axis counting slowest; and the lengths of all but the last."""
    moved = jnp.moveaxis(x, axis, 0)
    return moved.reshape(-1, x.shape[-1]), moved.shape[:-1]


_TRITON_PRECISIONS = {
    None: "tf32",
    lax.Precision.DEFAULT: "tf32",
    lax.Precision.HIGH: "tf32x3",
    lax.Precision.HIGHEST: "ieee",
    lax.DotAlgorithmPreset.TF32_TF32_F32: "tf32",
    lax.DotAlgorithmPreset.TF32_TF32_F32_X3: "tf32x3",
    lax.DotAlgorithmPreset.F32_F32_F32: "ieee",
}


def triton_precision(precision: Any) -> str | None:
    """Triton's name for the precision of f32 products; None if it has none."""
    if isinstance(precision, str):
        try:
            precision = lax.Precision(precision)  # knows "highest", "float32", ...
        except ValueError:
            precision = getattr(lax.DotAlgorithmPreset, precision, precision)
    if isinstance(precision, tuple) and precision[0] == precision[1]:
        return triton_precision(precision[0])
    return _TRITON_PRECISIONS.get(precision)
