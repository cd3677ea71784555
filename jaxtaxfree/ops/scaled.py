"""Products whose operands have scales: what they mean, in plain `lax`, and which scales fit which operands."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtaxfree.ops.operand import Scales
from jaxtaxfree.ops.quantize import BLOCK, DTYPES, dequantize, is_eight_bits
from jaxtaxfree.primitive import DTYPES as RESULTS
from jaxtaxfree.primitive import Lasting, symbolic


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Which operands of a product have scales, and what of them has one.

    Attributes:
      kinds: of "lhs", "rhs" and "gate", in this order, those with scales.
    """

    kinds: tuple[tuple[str, Scales], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.kinds)

    def of(self, operand: str) -> Scales:
        return dict(self.kinds).get(operand, "none")

    def split[T](self, operands: Sequence[T]) -> tuple[dict[str, T], tuple[T, ...]]:
        """The scales by the names of what they scale, and the operands behind them."""
        names = [name for name, _ in self.kinds]
        return dict(zip(names, operands, strict=False)), tuple(operands[len(names) :])

    def labels(self, rows: list[Any], column: Any) -> list[list[Any]]:
        """Of the scales' dimensions, as `Product.dimensions` has them; those of weights lie as [K, N], see `check`."""
        found: list[list[Any]] = []
        for name, kind in self.kinds:
            weights = {"tensor": [], "row": [None, column], "block": [None, None]}[kind]
            found.append([] if kind == "tensor" else [*rows, None] if name == "lhs" else weights)
        return found


UNSCALED = Scaling()


@dataclasses.dataclass(frozen=True)
class Scaled:
    """The operands of a product, each with its scale.

    Attributes:
      lhs: [..., K].
      rhs: [K, N].
      lhs_scale: f32 [], [..., 1] or [..., ceil(K / 128)]; None for 1.
      rhs_scale: f32 [], [1, N] or [ceil(K / 128), ceil(N / 128)]; None for 1.
    """

    lhs: jax.Array
    rhs: jax.Array
    lhs_scale: jax.Array | None = None
    rhs_scale: jax.Array | None = None

    def matmul(self, precision: Any = None) -> jax.Array:
        """The product in f32.

        Scales that are the same all along K are applied to the sums. Those of blocks are applied to the operands, which
        are then multiplied as f32.
        """
        if not self._factors():
            lhs = self.lhs if self.lhs_scale is None else dequantize(self.lhs, self.lhs_scale)
            rhs = self.rhs if self.rhs_scale is None else dequantize(self.rhs, self.rhs_scale)
            lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
            return jnp.matmul(lhs, rhs, precision=precision, preferred_element_type=jnp.float32)
        lhs, rhs = multipliable(self.lhs, self.rhs)
        integers = jnp.issubdtype(lhs.dtype, jnp.integer)
        out = jnp.matmul(lhs, rhs, precision=precision, preferred_element_type=jnp.int32 if integers else jnp.float32)
        out = out.astype(jnp.float32)
        out = out if self.lhs_scale is None else out * self.lhs_scale
        return out if self.rhs_scale is None else out * self.rhs_scale

    def _factors(self) -> bool:
        lhs = self.lhs_scale is None or not self.lhs_scale.ndim or self.lhs_scale.shape[-1] == 1
        rhs = self.rhs_scale is None or not self.rhs_scale.ndim or self.rhs_scale.shape == (1, self.rhs.shape[1])
        return lhs and rhs


def matmul(
    lhs: jax.Array, rhs: jax.Array, scales: Mapping[str, jax.Array], precision: Any, preferred: Any
) -> jax.Array:
    """`jnp.matmul`, of operands that may have scales."""
    if not scales:
        return jnp.matmul(lhs, rhs, precision=precision, preferred_element_type=preferred)
    return (
        Scaled(lhs, rhs, scales.get("lhs"), scales.get("rhs"))
        .matmul(precision)
        .astype(result_dtype(lhs, rhs, preferred))
    )


def unsupported(lhs: Any, rhs: Any, preferred_element_type: Any) -> list[str]:
    """All that keeps every kernel from taking operands that have scales."""
    reasons = symbolic(lhs, rhs)
    weights_alone = np.dtype(lhs.dtype).itemsize == 2 and is_eight_bits(rhs)
    if not (weights_alone or lhs.dtype == rhs.dtype == np.int8 or (_is_float8(lhs) and _is_float8(rhs))):
        reasons.append(
            Lasting(
                "it multiplies int8 by int8, float8 by float8, and float16 and bfloat16 by either, not "
                f"{lhs.dtype} by {rhs.dtype}: quantize both, or rhs alone"
            )
        )
    if preferred_element_type is not None and np.dtype(preferred_element_type).name not in RESULTS:
        reasons.append(Lasting(f"it gives {', '.join(RESULTS)}, not {preferred_element_type}: cast the result"))
    if rhs.ndim != 2 or lhs.ndim < 2:
        reasons.append(f"it takes lhs of two or more dimensions and rhs of two, not {lhs.ndim} and {rhs.ndim}")
    if 0 in lhs.shape or 0 in rhs.shape:
        reasons.append(f"an operand is empty: {list(lhs.shape)}, {list(rhs.shape)}")
    return reasons


def of_kernel(call: Any, scaling: Scaling, scales: Mapping[str, jax.Array], axis: int) -> dict[str, jax.Array]:
    """The bundle of scales of a kernel: [rows] of lhs, whose rows this axis counts slowest, and [N] of the others; or
    lhs_blocks [blocks of K, rows], and rhs_blocks and gate_blocks [blocks of K, blocks of N].
    """
    found = {}
    for name, scale in scales.items():
        if not scale.ndim:
            found[name] = jnp.broadcast_to(scale, call.rows if name == "lhs" else call.n)
            continue
        rows = jnp.moveaxis(scale, axis, 0).reshape(-1, scale.shape[-1]) if name == "lhs" else scale
        if scaling.of(name) == "block":
            found[f"{name}_blocks"] = rows.T if name == "lhs" else rows
        else:
            found[name] = rows.reshape(-1)
    return found


def multipliable(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The operands in dtypes that `lax` multiplies: a pair of int8 or of two floating-point numbers of 8 bits as it is,
    and what has 8 bits beside something wider in the dtype of that, which holds all its values.
    """
    if lhs.dtype == rhs.dtype == np.int8 or (_is_float8(lhs) and _is_float8(rhs)):
        return lhs, rhs
    wide = next((x.dtype for x in (lhs, rhs) if not is_eight_bits(x)), jnp.dtype(jnp.bfloat16))
    lhs, rhs = (x.astype(wide) if is_eight_bits(x) else x for x in (lhs, rhs))
    return lhs, rhs


def result_dtype(lhs: Any, rhs: Any, preferred: Any) -> np.dtype:
    """Of the product: what is preferred, else that of the wider operand, else bfloat16."""
    wide = [np.dtype(x.dtype) for x in (lhs, rhs) if not is_eight_bits(x)]
    if preferred is not None:
        return np.dtype(preferred)
    return jnp.result_type(*wide) if wide else np.dtype(jnp.bfloat16)


def check(
    operation: str,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    rhs_transposed: bool = False,
    parts: int = 1,
    gate: Any = None,
    lhs_scale: Any = None,
    rhs_scale: Any = None,
    gate_scale: Any = None,
) -> tuple[Scaling, list[jax.Array]]:
    """Which scales there are, and the scales, f32; those of a transposed rhs as [K, N] has them.

    Args:
      parts: of K, which ranks have.
      gate: None if there is none. It is like rhs, which others check.

    Raises:
      ValueError: if a scale does not fit its operand, the operand has no 8 bits or is not there, or a block lies on
        two ranks.
    """
    if gate_scale is not None and gate is None:
        raise ValueError(f"{operation} takes gate_scale with a gate only.")
    k = lhs.shape[-1]
    given = {"lhs": (lhs, lhs_scale), "rhs": (rhs, rhs_scale), "gate": (rhs, gate_scale)}
    kinds: list[tuple[str, Scales]] = []
    found = []
    for operand_name, (operand, scale) in given.items():
        if scale is None:
            continue
        name = f"{operand_name}_scale"
        scale = jnp.asarray(scale)
        if scale.dtype != np.float32:
            raise ValueError(f"{operation} takes {name} as float32, not {scale.dtype}.")
        if not is_eight_bits(operand):
            raise ValueError(
                f"{operation} takes {name} for an operand of {', '.join(DTYPES)}, and this one is {operand.dtype}."
            )
        allowed = shapes_of(operand, k, of_lhs=name == "lhs_scale", transposed=rhs_transposed)
        if scale.shape not in allowed.values():
            shapes = ", ".join(f"{list(shape)} ({kind})" for kind, shape in allowed.items())
            raise ValueError(
                f"{operation} takes {name} of shape {shapes} here, not {list(scale.shape)}. "
                "Scales are those of this rank's part of the operand."
            )
        if parts > 1 and k % BLOCK and k > BLOCK and scale.shape == allowed["block"]:
            raise ValueError(
                f"{operation} takes {name} by blocks of {BLOCK} where each rank has a multiple of {BLOCK} of the "
                f"contracted dimension, not {k}: scale by rows, or shard it between blocks."
            )
        kinds.append((operand_name, next(kind for kind, shape in allowed.items() if scale.shape == shape)))
        found.append(_turned(scale) if rhs_transposed and operand_name != "lhs" else scale)
    if found and lhs.ndim < 2:
        raise ValueError(f"{operation} takes scales with lhs of two or more dimensions, not {lhs.ndim}.")
    return Scaling(tuple(kinds)), found


def shapes_of(operand: jax.Array, k: int, *, of_lhs: bool, transposed: bool) -> dict[Scales, tuple[int, ...]]:
    """The shapes that a scale may have, by what has one; of weights [K, N], or of groups of them, [G, K, N]."""
    steps = math.ceil(k / BLOCK)
    if of_lhs:
        return {"tensor": (), "row": (*operand.shape[:-1], 1), "block": (*operand.shape[:-1], steps)}
    groups = operand.shape[:-2]
    n = operand.shape[len(groups) + (0 if transposed else 1)]
    row, block = (1, n), (steps, math.ceil(n / BLOCK))
    turn = -1 if transposed else 1
    return {"tensor": (), "row": (*groups, *row[::turn]), "block": (*groups, *block[::turn])}


def _turned(scale: jax.Array) -> jax.Array:
    """A transposed scale. Of one for each row nothing moves, which XLA need not find out."""
    return scale.reshape(scale.shape[::-1]) if 1 in scale.shape else scale.T


def of_rows(lhs: jax.Array, scale: jax.Array) -> jax.Array:
    """A scale of this rank's lhs as one of its rows, so that the rows of several ranks can lie together."""
    return scale if scale.ndim else jnp.broadcast_to(scale, (*lhs.shape[:-1], 1))


def _is_float8(x: Any) -> bool:
    return is_eight_bits(x) and jnp.issubdtype(x.dtype, jnp.floating)
