"""What a fused matmul does to its product before it rounds it: bias, activation, gate and residual."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtaxfree.ops import matmul
from jaxtaxfree.primitive import DTYPES, Lasting

# JAX 0.12.0 cannot differentiate its own in `shard_map`.
_erf = jax.custom_jvp(lax.erf)
_erf.defjvps(lambda tangent, _, x: tangent * (2 * math.pi**-0.5) * jnp.exp(-x * x))


def _gelu_exact(x: jax.Array) -> jax.Array:
    """`jax.nn.gelu(x, approximate=False)`."""
    return 0.5 * x * (1 + _erf(x * 2**-0.5))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_exact": _gelu_exact,
}
_NAMES = {jax.nn.silu: "silu", jax.nn.gelu: "gelu_tanh"}  # as these functions do it by default


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """activation(product + bias) + residual; with a gate activation(gate's product) * (product + bias) + residual.

    Attributes:
      activation: a key of `ACTIVATIONS`, or None; a tuple of these, if it is of several products (`joined`).
      operands: which of "gate", "bias" and "residual" there are, in this order; of several products "bias0", ...
    """

    activation: str | tuple[str | None, ...] | None = None
    operands: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.activation is not None or bool(self.operands)

    @property
    def gated(self) -> bool:
        return "gate" in self.operands

    def split(self, rhs: jax.Array, operands: Sequence[jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """The two bundles of a kernel, arrays by their names: what lhs is multiplied by, and the other operands."""
        others = dict(zip(self.operands, operands, strict=True))
        weights = {"rhs": rhs}
        if self.gated:
            weights["gate"] = others.pop("gate")
        return weights, others

    def apply(self, products: Sequence[jax.Array], others: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
        """The epilogue in plain `jax.numpy`, in f32 (or f64), of the products by what `split` gives first."""
        wide = wide_type(dtype)
        out, *gates = (product.astype(wide) for product in products)
        assert not isinstance(self.activation, tuple), "each of several products has an epilogue of its own"
        activate = ACTIVATIONS[self.activation] if self.activation else lambda x: x
        if "bias" in others:
            out = out + jnp.expand_dims(others["bias"].astype(wide), range(out.ndim - 1))
        out = activate(gates[0]) * out if gates else activate(out)
        if "residual" in others:
            out = out + others["residual"].astype(wide)
        return out.astype(dtype)

    def rows_first(self, operands: Sequence[jax.Array], axis: int) -> list[jax.Array]:
        """The operands of a kernel whose lhs is made of rows by `matmul.rows_first`."""
        return [
            matmul.rows_first(x, axis)[0] if name == "residual" else x
            for name, x in zip(self.operands, operands, strict=True)
        ]


NONE = Epilogue()


def joined(each: Sequence[Epilogue]) -> Epilogue:
    """What a kernel of several products takes for their epilogues: a tuple of activations, operands by number."""
    names = tuple(f"{name}{i}" for i, epilogue in enumerate(each) for name in epilogue.operands)
    activations: tuple[Any, ...] = tuple(epilogue.activation for epilogue in each)
    return Epilogue(activations, names)


def wide_type(dtype: Any) -> Any:
    """In which a result of this dtype is computed."""
    if jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize == 1:
        return np.dtype(np.float32)  # JAX promotes no floating-point numbers of 8 bits
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.float32)


def activation_name(operation: str, activation: Any) -> str | None:
    """The key of `ACTIVATIONS` of a name or a function of `jax.nn`; raises ValueError if there is none."""
    name = activation if isinstance(activation, str) else next((_NAMES[f] for f in _NAMES if f is activation), None)
    if activation is not None and name not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{operation} has no activation {activation!r}: choose {known}, jax.nn.silu or jax.nn.gelu.")
    return name


def check(
    operation: str,
    lhs: jax.Array,
    rhs: jax.Array,
    shape: Sequence[int],
    activation: Any,
    *,
    of_integers: bool = False,
    **given: Any,
) -> tuple[Epilogue, list[jax.Array]]:
    """An epilogue and its operands.

    Args:
      shape: of the result.
      activation: a name, a function of `jax.nn`, or None.
      of_integers: whether lhs, rhs and gate may be integers, because scales make them floating-point numbers.
      **given: operands in the order of `Epilogue.operands`; None for one that there is not.

    Raises:
      ValueError: if there is no such activation, or an operand does not fit.
    """
    name = activation_name(operation, activation)
    operands = {name: jnp.asarray(x) for name, x in given.items() if x is not None}
    epilogue = Epilogue(name, tuple(operands))
    if not epilogue:
        return NONE, []
    if lhs.ndim < 2 or rhs.ndim != 2:
        raise ValueError(
            f"{operation} has an epilogue for lhs of two or more dimensions and rhs of two, not {lhs.ndim} and "
            f"{rhs.ndim}."
        )
    shapes = {"gate": rhs.shape, "bias": tuple(shape[-1:]), "residual": tuple(shape)}
    for name, x in operands.items():
        if x.shape != shapes[name]:
            raise ValueError(f"{operation} takes a {name} of shape {list(shapes[name])} here, not {list(x.shape)}.")
    if epilogue.gated and operands["gate"].dtype != rhs.dtype:
        raise ValueError(f"{operation} takes a gate of the dtype of rhs, {rhs.dtype}, not {operands['gate'].dtype}.")
    for name, x in {"lhs": lhs, "rhs": rhs, **operands}.items():
        if of_integers and name in ("lhs", "rhs", "gate"):
            continue
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{operation} has an epilogue for floating-point numbers, but {name} is {x.dtype}.")
    return epilogue, list(operands.values())


def batch(
    call: Callable[..., Any],
    operands: Sequence[jax.Array],
    dims: Sequence[int | None],
    size: int,
    *,
    moved: str | None = None,
    epilogue: Epilogue = NONE,
    **params: Any,
) -> Any:
    """A `jaxtaxfree.primitive.Batch` of a product: the rows of all examples make one product, if one rhs takes them.

    Args:
      operands: lhs, rhs, and those of the epilogue.
      moved: the parameter that is a dimension of lhs.
    """
    if params.get("scaling"):
        return "jax.vmap maps over operands with scales"
    names = ("lhs", "rhs", *epilogue.operands)
    mapped = [name for name, dim in zip(names, dims, strict=True) if dim is not None]
    if "lhs" not in mapped or not {"lhs", "residual"}.issuperset(mapped):
        return f"jax.vmap maps over {', '.join(mapped)}, and the kernel takes lhs, with or without a residual"
    batched = []
    for name, x, dim in zip(names, operands, dims, strict=True):
        if dim is not None:
            x = jnp.moveaxis(x, dim, 0)
        elif name == "residual":
            x = jnp.broadcast_to(x, (size, *x.shape))
        batched.append(x)
    # With `spmd_axis_name` what is mapped varies along one axis more.
    batched[:2] = matmul.vary_alike(*batched[:2], axes=params["axes"])
    return call(*batched, **({moved: params[moved] + 1} if moved else {}))


def unsupported(epilogue: Epilogue, operands: Sequence[Any]) -> list[str]:
    """All that keeps every kernel from taking these operands of the epilogue; the gate is as rhs."""
    return [
        Lasting(f"it takes a {name} of {', '.join(DTYPES)}, not {x.dtype}: cast it")
        for name, x in zip(epilogue.operands, operands, strict=True)
        if name != "gate" and x.dtype.name not in DTYPES
    ]
