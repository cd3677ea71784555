"""What `decode_attention` means, in plain `lax`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtaxfree.ops.decode_attention.spec import Spec
from jaxtaxfree.teams import explicit_sharding, varying


def reference(
    *operands: jax.Array, axes: tuple[str, ...], names: tuple[str, ...], spec: Spec, config: Any = None
) -> list[jax.Array]:
    """What the operation means, in plain `lax`: (result [B, T, N, Hv], log-sum-exp [B, T, N])."""
    del config
    given = dict(zip(names, operands))
    query = given["query"]
    b, t, n, h = query.shape
    k = spec.kv_heads
    rank, world = lax.axis_index(axes), lax.axis_size(axes)
    precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else None

    def cached(name: str) -> jax.Array:
        """Keys, values or their scales, [B, S, K, ...]."""
        x = given[name]
        x = jnp.moveaxis(x, [spec.layout.index(letter) for letter in "BSK"], [0, 1, 2])
        if spec.page_size is not None:
            tables = given["tables"]
            # JAX does not choose how a gather is sharded along Explicit axes.
            sharding = explicit_sharding(jax.typeof(tables)) and jax.typeof(tables).sharding.spec
            x = x.at[tables].get(out_sharding=sharding)  # [B, pages, page_size, K, ...]
            x = x.reshape(b, -1, *x.shape[3:])
        return x

    def scale_of(name: str) -> jax.Array | float:
        """Against [B, K, G, T, S]."""
        if name not in given:
            return 1.0
        if given[name].ndim < 3:
            return given[name].reshape(1, -1, 1, 1, 1)
        return jnp.moveaxis(cached(name), 2, 1)[:, :, None, None]

    keys, values = cached("key").astype(query.dtype), cached("value").astype(query.dtype)
    grouped = query.reshape(b, t, k, n // k, h)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, keys, precision=precision, preferred_element_type=jnp.float32)
    logits = logits * scale_of("key_scale") * spec.scale
    if spec.soft_cap is not None:
        logits = spec.soft_cap * jnp.tanh(logits / spec.soft_cap)
    positions = spec.placement.positions(rank, world)[None, None]  # [1, 1, S], or [B, 1, S] of a ring
    if "starts" in given:
        positions = spec.placement.token_of(positions, given["starts"][:, None, None], world)
    lengths = given.get("lengths", jnp.full((b,), world * spec.placement.slots)).astype(jnp.int32)
    of_token = lengths[:, None, None] - t + jnp.arange(t)[None, :, None]  # [B, T, 1]
    seen = positions <= of_token  # [B, T, S]
    if spec.window is not None:
        seen &= positions >= of_token - spec.window
    logits = jnp.where(seen[:, None, None], logits, -jnp.inf)

    # The results are the same whatever is subtracted, so their derivatives take it for a constant.
    top = lax.stop_gradient(jnp.max(logits, axis=-1, initial=-jnp.inf))  # [B, K, G, T]
    weights = jnp.exp(logits - finite(top)[..., None])
    total = jnp.sum(weights, axis=-1)
    # Behind the last key the cache and its scales may hold anything, and 0 * NaN is NaN.
    scales = jnp.where(seen[:, None, None], scale_of("value_scale"), 0)
    weights, unit = times_scales(weights, scales)
    weights = weights.astype(query.dtype)
    values = jnp.where((positions[:, 0] < lengths[:, None])[:, :, None, None], values, 0)
    acc = jnp.einsum("bkgts,bskh->bkgth", weights, values, precision=precision, preferred_element_type=jnp.float32)
    acc = acc * unit

    def exchange(x: jax.Array) -> jax.Array:
        """[B, K, G, T, ...] -> [world, B, N or N / world, T, ...]."""
        return _exchanged(x.reshape(b, n, *x.shape[3:]), axes, spec.by_heads)

    tops = exchange(top)
    sinks = given.get("sinks", jnp.full((n,), -jnp.inf)).astype(jnp.float32)[None, :, None]
    if spec.by_heads:
        sinks = lax.dynamic_slice_in_dim(sinks, rank * (n // world), n // world, axis=1)
    base = finite(jnp.maximum(jnp.max(tops, axis=0), sinks))
    parts = jnp.exp(tops - base[None])
    total = jnp.sum(parts * exchange(total), axis=0) + jnp.exp(sinks - base)
    acc = jnp.sum(parts[..., None] * exchange(acc), axis=0)
    out = normalised(acc, total)
    return [jnp.swapaxes(out, 1, 2).astype(spec.dtype), jnp.swapaxes(base + log(total), 1, 2)]


def times_scales(weights: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(Weights [..., S] times the scales of values over the largest of these; that one, which goes to the sum).

    Times the weights it might be too small for f16.
    """
    unit = lax.stop_gradient(jnp.max(jnp.abs(scales), axis=-1, keepdims=True, initial=0))
    unit = jnp.where(unit == 0, 1, unit)
    return weights * scales / unit, unit


def _exchanged(x: jax.Array, axes: tuple[str, ...], by_heads: bool) -> jax.Array:
    """[B, N, ...] of each rank -> [world, B, N or N / world, ...] of all ranks."""
    if not axes:
        return x[None]
    rank, world = lax.axis_index(axes), lax.axis_size(axes)
    if by_heads:
        x = jnp.moveaxis(x.reshape(x.shape[0], world, x.shape[1] // world, *x.shape[2:]), 1, 0)
        return lax.all_to_all(x, axes, 0, 0, tiled=True)
    if explicit_sharding(jax.typeof(x)) and not varying(x):
        # With check_vma=False, and axes left over, JAX does not lower the transpose of a gather.
        own = (jnp.arange(world) == rank).reshape(world, *[1] * x.ndim)
        return lax.psum(jnp.where(own, x[None], 0), axes)
    # With check_vma=False, shard_map counts on the derivative of the other kind. lax does not lower a gather of
    # symbolic shapes along a new dimension.
    return lax.all_gather(x[None], axes, tiled=True, to="invarying" if varying(x) else "varying")


def finite(x: jax.Array) -> jax.Array:
    """x with 0 in place of -inf, to be subtracted from -inf; a constant for derivatives."""
    return lax.stop_gradient(jnp.where(jnp.isneginf(x), 0.0, x))


def log(x: jax.Array) -> jax.Array:
    """The logarithm of x, which is not negative; of 0 it is -inf, with a derivative of 0 in place of 0 / 0."""
    return jnp.where(x == 0, -jnp.inf, jnp.log(jnp.where(x == 0, 1.0, x)))


def normalised(acc: jax.Array, total: jax.Array) -> jax.Array:
    """acc [..., H] over total [...], and 0 where there was no key."""
    return jnp.where(total[..., None] == 0, 0.0, acc / jnp.where(total == 0, 1.0, total)[..., None])
