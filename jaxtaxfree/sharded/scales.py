"""The scales of operands of 8 bits of a product of global arrays: which fit, and how they lie."""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtaxfree.ops.quantize import BLOCK, DTYPES, is_eight_bits, quantize
from jaxtaxfree.sharded.plan import Plan, Sharded


def check(
    name: str, operands: Mapping[str, jax.Array], scales: Mapping[str, jax.Array], labels: Mapping[str, Sequence[str]]
) -> None:
    """Raises ValueError if a scale does not fit its operand.

    Args:
      name: of the function.
      operands, scales: by "lhs", "rhs" and "gate".
      labels: of the operands; those of lhs and rhs have the contracted dimensions in common.
    """
    for which, scale in scales.items():
        x = operands[which]
        if not is_eight_bits(x):
            raise ValueError(
                f"{name} takes {which}_scale for an operand of {', '.join(DTYPES)}, and this one is {x.dtype}."
            )
        if scale.dtype != np.float32:
            raise ValueError(f"{name} takes {which}_scale as float32, not {scale.dtype}.")
        other = labels["rhs" if which == "lhs" else "lhs"]
        allowed = _shapes(x.shape, [label in other for label in labels[which]], of_rows=which == "lhs")
        if scale.shape not in allowed:
            raise ValueError(
                f"{name} takes {which}_scale of shape {', '.join(str(list(each)) for each in allowed)} here, not "
                f"{list(scale.shape)}."
            )


def _shapes(shape: Sequence[int], contracted: Sequence[bool], of_rows: bool) -> list[tuple[int, ...]]:
    """The shapes that a scale may have: one for all, of rows or columns, of blocks of one contracted dimension."""
    found = [(), tuple(1 if own else length for own, length in zip(contracted, shape, strict=True))]
    if sum(contracted) == 1 and (of_rows or len(shape) == 2):
        found.append(
            tuple(
                length if of_rows and not own else math.ceil(length / BLOCK)
                for own, length in zip(contracted, shape, strict=True)
            )
        )
    return found


def expanded(x: jax.Array, scale: jax.Array) -> jax.Array:
    """What a scale makes of an operand, f32."""
    for axis, (length, blocks) in enumerate(zip(x.shape, scale.shape, strict=True) if scale.ndim else ()):
        if blocks not in (1, length):
            scale = jax.lax.slice_in_dim(jnp.repeat(scale, BLOCK, axis=axis), 0, length, axis=axis)
    return x.astype(jnp.float32) * scale


def quantized(
    x: jax.Array, contracted: Sequence[bool], dtype: np.dtype, block: tuple[int, int]
) -> tuple[jax.Array, jax.Array]:
    """A lhs in 8 bits, and its scale, which has its dimensions: 1 of what is contracted, or the blocks of a single one.

    Args:
      contracted: which of its dimensions are.
      block: of rows and of what is contracted, as of `quantize`.
    """
    order = sorted(range(x.ndim), key=lambda axis: contracted[axis])  # rows first
    back = [order.index(axis) for axis in range(x.ndim)]
    turned, rows = x.transpose(order), x.ndim - sum(contracted)
    lengths, k = turned.shape[:rows], math.prod(turned.shape[rows:])
    values, scale = quantize(turned.reshape(*(lengths or (1,)), k), dtype, block=block)
    of_scale = (*[1] * (sum(contracted) - 1), scale.shape[-1]) if any(contracted) else ()
    return values.reshape(turned.shape).transpose(back), scale.reshape(*lengths, *of_scale).transpose(back)


def sharding(plan: Plan, which: str, x: jax.Array, scale: jax.Array) -> Sharded:
    """How the scale of "lhs" or of weights lies where the operation takes it; whole where the operand is gathered."""
    if not scale.ndim:
        return Sharded((), ())
    lies = plan.x if which == "lhs" else plan.w
    gathered = {} if which == "lhs" else dict(plan.gathered)
    entries = [
        () if blocks == 1 < length else tuple(axis for axis in axes if axis not in gathered.get(label, ()))
        for label, axes, length, blocks in zip(lies.labels, lies.entries, x.shape, scale.shape, strict=True)
    ]
    return Sharded(lies.labels, tuple(entries))


def refusals(
    plan: Plan, operands: Mapping[str, jax.Array], scales: Mapping[str, jax.Array], mesh: Mapping[str, int]
) -> list[str]:
    """Why a plan does not take scales: a block of one would lie on two devices."""
    for which, scale in scales.items():
        lies = sharding(plan, which, operands[which], scale)
        for length, blocks, axes in zip(operands[which].shape, scale.shape, lies.entries, strict=scale.ndim > 0):
            parts = math.prod(mesh[axis] for axis in axes)
            if blocks not in (1, length) and parts > 1 and length % (parts * BLOCK):
                return [f"blocks of {BLOCK} of {which}_scale do not divide among {parts} devices"]
    return []


def refusals_of_result(plan: Plan, lengths: Mapping[str, int], mesh: Mapping[str, int]) -> list[str]:
    """Why a plan does not give scales of the blocks of its columns, which are the last dimension of the result."""
    parts = math.prod(mesh[axis] for axis in plan.out.entries[-1])
    if parts > 1 and lengths[plan.out.labels[-1]] % (parts * BLOCK):
        return [f"blocks of {BLOCK} of the result do not divide among {parts} devices"]
    return []
