"""Rows that tokens have at their experts: spread from tokens, collected by tokens, and multiplied with them.

A token t has a row for each choice j, at places[t, j]. With weights w all three are derivatives of one form, the sum
over t and j of w[t, j] * <rows[places[t, j]], y[t]>: by rows, by y, and by w. So each is made of the others when it is
differentiated.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from triton import next_power_of_2

from jaxtaxfree.kernels.moe.rows import collect_kernel, dots_kernel, spread_kernel
from jaxtaxfree.ops import matmul
from jaxtaxfree.ops.epilogue import wide_type
from jaxtaxfree.primitive import (
    DTYPES,
    Lasting,
    Unsupported,
    collective,
    multilinear,
    needs_devices,
    symbolic,
    takes_reference,
)
from jaxtaxfree.shmem import shmem_call

# Choices of a token, whose rows a program reads at the same time.
MOST_CHOICES = 64
MOST_ROWS = 2**30


def spread(
    y: jax.Array, places: jax.Array, most: int, weights: jax.Array | None = None, *, implementation: str | None = None
) -> jax.Array:
    """A row for each choice that has a place: the token's, by the choice's weight.

    Args:
      y: [T, D], floats or, without weights, int8.
      places: i32[T, k], from `places`.
      most: number of rows.
      weights: f32[T, k]; None: ones.

    Returns: [most, D] of the dtype of y. Nothing is said of rows that no choice has.
    """
    operands = [y, places] if weights is None else [y, places, weights]
    return _apply(spread_p, *operands, implementation=implementation, most=most, dtype=np.dtype(y.dtype))


def collect(
    rows: jax.Array,
    places: jax.Array,
    weights: jax.Array | None = None,
    dtype: Any = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """The sum of a token's rows by their weights, in f32 and in the order of its choices.

    Args:
      rows: [M, D].
      places: i32[T, k], below M. A choice with -1 adds nothing.
      weights: f32[T, k]; None: ones.
      dtype: of the result, by default that of rows.

    Returns: [T, D].
    """
    operands = [rows, places] if weights is None else [rows, places, weights]
    return _apply(collect_p, *operands, implementation=implementation, dtype=np.dtype(dtype or rows.dtype))


def _apply(primitive: Any, *operands: jax.Array, implementation: str | None, **params: Any) -> jax.Array:
    if takes_reference(primitive.name, operands, implementation, unsupported(*operands)):
        return _REFERENCES[primitive](*operands, **params)[0]
    return bind(primitive, *operands, **how(implementation), **params)


def bind(primitive: Any, *operands: jax.Array, **params: Any) -> jax.Array:
    return primitive.bind(*matmul.vary_alike(*operands, axes=params["axes"]), **params)[0]


def _spread(
    y: jax.Array, places: jax.Array, *weights: jax.Array, most: int, dtype: np.dtype, **_: Any
) -> list[jax.Array]:
    each = jnp.broadcast_to(y[:, None], (*places.shape, y.shape[1]))
    for w in weights:
        each = each.astype(wide_type(y.dtype)) * w[..., None]
    at = jnp.where(places < 0, most, places).reshape(-1)
    return [jnp.zeros((most, y.shape[1]), dtype).at[at].set(each.reshape(at.size, -1).astype(dtype), mode="drop")]


def _collect(rows: jax.Array, places: jax.Array, *weights: jax.Array, dtype: np.dtype, **_: Any) -> list[jax.Array]:
    wide = wide_type(rows.dtype)
    total = jnp.zeros((places.shape[0], rows.shape[1]), wide)
    for choice in range(places.shape[1]):
        place = places[:, choice, None]
        value = rows[jnp.maximum(place[:, 0], 0)].astype(wide)
        for w in weights:
            value = value * w[:, choice, None]
        total = total + jnp.where(place < 0, 0, value)
    return [total.astype(dtype)]


def _dots(rows: jax.Array, y: jax.Array, places: jax.Array, **_: Any) -> list[jax.Array]:
    """<rows[places[t, j]], y[t]> of each choice, [T, k], 0 if it has no row."""
    wide = wide_type(rows.dtype)
    found = []
    for choice in range(places.shape[1]):
        place = places[:, choice]
        value = jnp.sum(rows[jnp.maximum(place, 0)].astype(wide) * y.astype(wide), axis=1)
        found.append(jnp.where(place < 0, 0, value))
    return [jnp.stack(found, axis=1)]


def unsupported(*operands: Any) -> list[str]:
    """All that keeps the kernels from taking these operands."""
    if reasons := symbolic(*operands):
        return reasons
    floats = [x for x in operands if jnp.issubdtype(x.dtype, jnp.floating)]
    if unknown := {x.dtype.name for x in floats if x.dtype.name not in DTYPES}:
        reasons.append(Lasting(f"it takes {', '.join(DTYPES)}, not {', '.join(sorted(unknown))}: cast the operands"))
    if any(x.size == 0 for x in operands):
        reasons.append(f"an operand is empty: {', '.join(str(list(x.shape)) for x in operands)}")
    if (most := max(x.shape[0] for x in operands)) > MOST_ROWS:
        reasons.append(f"it takes at most {MOST_ROWS} rows, not {most}")
    choices = next(x.shape[1] for x in operands if x.dtype == jnp.int32)
    if choices > MOST_CHOICES:
        reasons.append(f"it takes at most {MOST_CHOICES} choices of a token, not {choices}")
    return reasons


def block_of(d: int) -> int:
    """Elements of a row that a program moves at a time."""
    whole = min(2048, d & -d)  # which divides d
    return whole if whole >= 512 else min(2048, max(16, next_power_of_2(d)))


def keywords(name: str, places: tuple[int, ...], d: int, itemsize: int) -> dict[str, Any]:
    """Of `shmem_call`, for each of the kernels; `places` is the shape of these."""
    tokens, choices = places
    block = block_of(d)
    tile = min(next_power_of_2(tokens), 2048 // block)
    return {
        "axis_name": (),
        "name": name,
        "grid": (math.ceil(tokens / tile), 1 if name == "moe_dots" else math.ceil(d / block)),
        "num_warps": 4,
        "cost_estimate": {
            "flops": 2 * choices * tokens * d,
            "bytes_accessed": (choices + 1) * tokens * d * itemsize,
        },
        "TOKENS": tokens,
        "D": d,
        "CHOICES": choices,
        "TILE": tile,
        "BLOCK": block,
    }


def _fused_spread(
    y: jax.Array, places: jax.Array, *weights: jax.Array, most: int, dtype: np.dtype,
    implementation: str | None = None, **_: Any,
) -> list[jax.Array]:  # fmt: skip
    check("moe_spread", y, places, *weights)
    how = keywords("moe_spread", places.shape, y.shape[1], y.dtype.itemsize)
    out_type = jax.ShapeDtypeStruct((most, y.shape[1]), dtype)
    return [shmem_call(
        spread_kernel, y, places, bundle_of(weights), out_type=out_type, implementation=implementation, **how
    )]  # fmt: skip


def _fused_collect(
    rows: jax.Array, places: jax.Array, *weights: jax.Array, dtype: np.dtype,
    implementation: str | None = None, **_: Any,
) -> list[jax.Array]:  # fmt: skip
    check("moe_collect", rows, places, *weights)
    how = keywords("moe_collect", places.shape, rows.shape[1], rows.dtype.itemsize)
    out_type = jax.ShapeDtypeStruct((places.shape[0], rows.shape[1]), dtype)
    return [shmem_call(
        collect_kernel, rows, places, bundle_of(weights), out_type=out_type, implementation=implementation, **how
    )]  # fmt: skip


def _fused_dots(
    rows: jax.Array, y: jax.Array, places: jax.Array, *, implementation: str | None = None, **_: Any
) -> list[jax.Array]:
    check("moe_dots", rows, y, places)
    how = keywords("moe_dots", places.shape, rows.shape[1], rows.dtype.itemsize)
    out_type = jax.ShapeDtypeStruct(places.shape, jnp.float32)
    return [shmem_call(dots_kernel, rows, y, places, out_type=out_type, implementation=implementation, **how)]


def bundle_of(weights: Sequence[jax.Array]) -> dict[str, jax.Array]:
    return dict(zip(("weights",), weights))


def check(operation: str, *operands: jax.Array) -> None:
    if reasons := unsupported(*operands):
        raise Unsupported(operation, reasons)


def slower(*operands: Any, **_: Any) -> str | None:
    """Why XLA is taken, whose gathers and scatters are slower where both run."""
    return "; ".join(unsupported(*operands)) or None


_define = functools.partial(collective, slower=slower)
spread_p = _define("moe_spread", reference=_spread, fused=_fused_spread)
collect_p = _define("moe_collect", reference=_collect, fused=_fused_collect)
dots_p = _define("moe_dots", reference=_dots, fused=_fused_dots)
_REFERENCES: dict[Any, Callable[..., list[jax.Array]]] = {spread_p: _spread, collect_p: _collect, dots_p: _dots}


def how(implementation: str | None, axes: tuple[str, ...] = ()) -> dict[str, Any]:
    """Parameters that every primitive has; without axes, of one of the three here."""
    return {"axes": axes, "implementation": implementation, "config": ()}


def local(params: dict[str, Any]) -> dict[str, Any]:
    """Of one of the three functions here, in a derivative."""
    return how(params["implementation"])


def _transpose_spread(cts: Any, y: Any, places: Any, *weights: Any, **params: Any) -> list[Any]:
    [ct] = cts
    nothing = [None] * (2 + len(weights))
    if type(ct) is ad.Zero:
        return nothing
    if ad.is_undefined_primal(y):
        return [bind(collect_p, ct, places, *weights, dtype=y.aval.dtype, **local(params)), *nothing[1:]]
    return [*nothing[:2], bind(dots_p, ct, y, places, **local(params))]


def _transpose_collect(cts: Any, rows: Any, places: Any, *weights: Any, **params: Any) -> list[Any]:
    [ct] = cts
    nothing = [None] * (2 + len(weights))
    if type(ct) is ad.Zero:
        return nothing
    if ad.is_undefined_primal(rows):
        like = {"most": rows.aval.shape[0], "dtype": rows.aval.dtype}
        return [bind(spread_p, ct, places, *weights, **like, **local(params)), *nothing[1:]]
    return [*nothing[:2], bind(dots_p, rows, ct, places, **local(params))]


def _transpose_dots(cts: Any, rows: Any, y: Any, places: Any, **params: Any) -> list[Any]:
    [ct] = cts
    if type(ct) is ad.Zero:
        return [None] * 3
    if ad.is_undefined_primal(rows):
        like = {"most": rows.aval.shape[0], "dtype": rows.aval.dtype}
        return [bind(spread_p, y, places, ct, **like, **local(params)), None, None]
    return [None, bind(collect_p, rows, places, ct, dtype=y.aval.dtype, **local(params)), None]


for _primitive, _linear, _transpose in (
    (spread_p, (0, 2), _transpose_spread),
    (collect_p, (0, 2), _transpose_collect),
    (dots_p, (0, 1), _transpose_dots),
):
    needs_devices(_primitive)
    ad.primitive_jvps[_primitive] = multilinear(functools.partial(bind, _primitive), _linear)
    ad.primitive_transposes[_primitive] = _transpose
