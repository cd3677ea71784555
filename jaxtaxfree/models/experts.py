"""Mixtures of experts, as the models of `jaxtaxfree.models` call them."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from jaxtaxfree.ops.collectives import all_gather, psum_scatter
from jaxtaxfree.ops.decode_step import plain
from jaxtaxfree.ops.decode_step.spec import DecoderSpec


def mixture(
    w: Mapping[str, jax.Array], y: jax.Array, axes: tuple[str, ...], *, model: DecoderSpec, implementation: str | None
) -> jax.Array:
    """A layer's mixture of experts, of which each rank has some columns of every one.

    Args:
      w: of the layer: `router` [E, D], `gate_proj` and `up_proj` [E, F / W, D], `down_proj` [E, D, F / W].
      y: [M / W, D], this rank's rows.

    Returns: [M / W, D], of y's dtype.
    """
    rows = all_gather(y, axes, tiled=True, implementation=implementation)
    out = psum_scatter(_of_this_rank(w, rows, model), axes, tiled=True, implementation=implementation)
    return out.astype(y.dtype)


def _of_this_rank(w: Mapping[str, jax.Array], y: jax.Array, model: DecoderSpec) -> jax.Array:
    """What this rank adds to the results of rows y [M, D]: f32 [M, D]."""
    k = model.experts_per_token
    chances = jax.nn.softmax(plain._product(y, w["router"]), axis=-1)  # [M, E]
    weights, chosen = lax.top_k(chances, k)
    if model.normalized_experts:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    # Rows in the order of their experts.
    order = jnp.argsort(chosen.ravel(), stable=True)
    sizes = jnp.bincount(chosen.ravel(), length=model.experts).astype(jnp.int32)
    rows = y[order // k]
    gate, up = (_ragged(rows, w[name], sizes) for name in ("gate_proj", "up_proj"))
    inner = (plain._ACTIVATIONS[model.activation](gate) * up).astype(y.dtype)
    out = _ragged(inner, w["down_proj"], sizes)
    # Back to the order of the tokens, of which each adds up its own k.
    out = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(-1, k, y.shape[-1])
    return jnp.sum(out * weights[..., None], axis=1)


def _ragged(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """rows [M, in] times weights [E, out, in] of their expert, in f32."""
    precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    weights = jnp.swapaxes(weights, 1, 2)
    return lax.ragged_dot(rows, weights, sizes, precision=precision, preferred_element_type=jnp.float32)
