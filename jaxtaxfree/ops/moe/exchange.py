"""`spread` and `collect` of tokens that lie on all ranks along some axes: a kernel each, or a collective beside them.

Each is the other's transpose, as a gather and a scatter of sums are.
"""

import functools
import math
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.interpreters import ad
from triton import next_power_of_2

from jaxtaxfree.kernels.moe.exchange import combine_kernel, dispatch_kernel
from jaxtaxfree.ops.collectives import all_gather, psum_scatter
from jaxtaxfree.ops.epilogue import wide_type
from jaxtaxfree.ops.moe import rows as local
from jaxtaxfree.ops.moe.rows import bind, block_of, bundle_of, collect, dots_p, how, spread
from jaxtaxfree.primitive import collective, multilinear, symbolic
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.target import HOPPER

# Bytes of a rank's tokens from which the kernels here are taken. Fewer go as words that need no fence.
LEAST_BYTES = 512 << 10


def dispatch(
    y: jax.Array,
    places: jax.Array,
    most: int,
    axes: tuple[str, ...],
    weights: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """`spread` of the tokens of all ranks.

    Args:
      y: [T, D], of this rank, floats or, without weights, int8.
      places: i32[world * T, k], the rows here of all tokens.
      most, weights: as of `spread`, of all tokens.

    Returns: [most, D].
    """
    if _is_apart(y, axes, implementation):
        y = all_gather(y, axes, tiled=True, implementation=implementation) if axes else y
        return spread(y, places, most, weights, implementation=implementation)
    operands = [y, places] if weights is None else [y, places, weights]
    return bind(dispatch_p, *operands, **how(implementation, axes), most=most, dtype=np.dtype(y.dtype))


def combine(
    rows: jax.Array,
    places: jax.Array,
    axes: tuple[str, ...],
    weights: jax.Array | None = None,
    dtype: Any = None,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """The sum over all ranks of `collect`, for this rank's tokens.

    Each rank adds up its rows in f32, and the ranks' sums are added in f32 and in the order of the ranks. The kernel
    rounds those of other ranks to `dtype`, in which they cross.

    Args:
      rows: [M, D].
      places: i32[world * T, k], the rows here of all tokens.
      weights, dtype: as of `collect`.

    Returns: [T, D].
    """
    dtype = np.dtype(dtype or rows.dtype)
    world = lax.axis_size(axes)
    part = jax.ShapeDtypeStruct((places.shape[0] // world, rows.shape[1]), dtype)
    if _is_apart(part, axes, implementation):
        if not axes:
            return collect(rows, places, weights, dtype, implementation=implementation)
        out = collect(rows, places, weights, wide_type(dtype), implementation=implementation)
        return psum_scatter(out, axes, tiled=True, implementation=implementation).astype(dtype)
    operands = [rows, places] if weights is None else [rows, places, weights]
    return bind(combine_p, *operands, **how(implementation, axes), dtype=dtype)


def _is_apart(part: Any, axes: tuple[str, ...], implementation: str | None) -> bool:
    """Whether a collective brings a rank's part, beside `spread` or `collect`."""
    if implementation == "xla" or symbolic(part) or lax.axis_size(axes) == 1:
        return True
    # A collective may go in two levels where axes span hosts, as several axes may.
    return part.size * part.dtype.itemsize < LEAST_BYTES or (implementation is None and len(axes) > 1)


def _dispatch(
    y: jax.Array, places: jax.Array, *weights: jax.Array, axes: tuple[str, ...], most: int, dtype: Any, **_: Any
) -> list[jax.Array]:
    """What it means. Where it is lowered, kernels of the parts are taken as anywhere else."""
    everything = all_gather(y, axes, tiled=True)
    return [bind(local.spread_p, everything, places, *weights, most=most, dtype=dtype, **how(None))]


def _combine(
    rows: jax.Array, places: jax.Array, *weights: jax.Array, axes: tuple[str, ...], dtype: Any, **_: Any
) -> list[jax.Array]:
    out = bind(local.collect_p, rows, places, *weights, dtype=np.dtype(wide_type(dtype)), **how(None))
    return [psum_scatter(out, axes, tiled=True).astype(dtype)]


def keywords(name: str, tokens: int, choices: int, d: int, dtype: Any, world: int) -> dict[str, Any]:
    """Of `shmem_call`, for both kernels."""
    nbytes = tokens * d * np.dtype(dtype).itemsize
    block = block_of(d)
    if name == "moe_dispatch":
        elements, warps, most = 8192, 8, HOPPER.multiprocessors
    else:
        # A thread has elements of all rows of a token in registers. Many small programs have more loads in flight.
        elements, warps, most = (2048 if choices >= 4 else 4096), 4, 2 * HOPPER.multiprocessors
    tile = min(next_power_of_2(tokens), max(1, elements // block))
    programs = min(most, math.ceil(tokens / tile))
    return {
        "name": name,
        "grid": 2 * programs,
        "num_warps": warps,
        "scratch": {"inbox": jax.ShapeDtypeStruct((world, tokens, d), dtype)},
        "signals": {"arrived": (programs, world)},
        "cost_estimate": {
            "flops": 2 * world * choices * tokens * d,
            "bytes_accessed": world * (choices + 2) * nbytes,
        },
        "TOKENS": tokens,
        "D": d,
        "CHOICES": choices,
        "PROGRAMS": programs,
        # A stage has to be worth its signal.
        "STAGES": 4 if nbytes >= 8 << 20 else 2 if nbytes >= 2 << 20 else 1,
        "TILE": tile,
        "BLOCK": block,
    }


def _fused_dispatch(
    y: jax.Array, places: jax.Array, *weights: jax.Array, axes: tuple[str, ...], most: int, dtype: Any,
    implementation: str | None = None, **_: Any,
) -> list[jax.Array]:  # fmt: skip
    _check("moe_dispatch", y, places, *weights, axes=axes)
    tokens, d = y.shape
    launch = keywords("moe_dispatch", tokens, places.shape[1], d, y.dtype, lax.axis_size(axes))
    launch |= {"axis_name": axes, "implementation": implementation, "out_type": jax.ShapeDtypeStruct((most, d), dtype)}
    return [shmem_call(dispatch_kernel, y, places, bundle_of(weights), **launch)]


def _fused_combine(
    rows: jax.Array, places: jax.Array, *weights: jax.Array, axes: tuple[str, ...], dtype: Any,
    implementation: str | None = None, **_: Any,
) -> list[jax.Array]:  # fmt: skip
    _check("moe_combine", rows, places, *weights, axes=axes)
    world = lax.axis_size(axes)
    tokens, d = places.shape[0] // world, rows.shape[1]
    launch = keywords("moe_combine", tokens, places.shape[1], d, dtype, world)
    launch |= {
        "axis_name": axes,
        "implementation": implementation,
        "out_type": jax.ShapeDtypeStruct((tokens, d), dtype),
    }
    return [shmem_call(combine_kernel, rows, places, bundle_of(weights), **launch)]


def _check(operation: str, *operands: Any, axes: tuple[str, ...]) -> None:
    local.check(operation, *operands)
    assert operands[1].shape[0] % lax.axis_size(axes) == 0, "each rank has as many tokens"


dispatch_p = collective("moe_dispatch", reference=_dispatch, fused=_fused_dispatch, slower=local.slower)
combine_p = collective("moe_combine", reference=_combine, fused=_fused_combine, slower=local.slower)


def _transpose_dispatch(cts: Any, y: Any, places: Any, *weights: Any, **params: Any) -> list[Any]:
    [ct] = cts
    nothing = [None] * (2 + len(weights))
    if type(ct) is ad.Zero:
        return nothing
    if ad.is_undefined_primal(y):
        own = how(params["implementation"], params["axes"])
        return [bind(combine_p, ct, places, *weights, dtype=y.aval.dtype, **own), *nothing[1:]]
    everything = _gathered(y, params)
    return [*nothing[:2], bind(dots_p, ct, everything, places, **local.local(params))]


def _transpose_combine(cts: Any, rows: Any, places: Any, *weights: Any, **params: Any) -> list[Any]:
    [ct] = cts
    nothing = [None] * (2 + len(weights))
    if type(ct) is ad.Zero:
        return nothing
    if ad.is_undefined_primal(rows):
        own = {**how(params["implementation"], params["axes"]), "most": rows.aval.shape[0]}
        return [bind(dispatch_p, ct, places, *weights, dtype=rows.aval.dtype, **own), *nothing[1:]]
    return [*nothing[:2], bind(dots_p, rows, _gathered(ct, params), places, **local.local(params))]


def _gathered(y: jax.Array, params: dict[str, Any]) -> jax.Array:
    return all_gather(y, params["axes"], tiled=True, implementation=params["implementation"])


ad.primitive_jvps[dispatch_p] = multilinear(functools.partial(bind, dispatch_p), (0, 2))
ad.primitive_jvps[combine_p] = multilinear(functools.partial(bind, combine_p), (0, 2))
ad.primitive_transposes[dispatch_p] = _transpose_dispatch
ad.primitive_transposes[combine_p] = _transpose_combine
