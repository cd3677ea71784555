"""Mixtures of experts, as the models of `jaxtaxfree.models` call them."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from jaxtaxfree.ops.decode_step.reference import (
    _ACTIVATIONS as ACTIVATIONS,
)
from jaxtaxfree.ops.decode_step.reference import (
    _product as product,
)
from jaxtaxfree.ops.decode_step.spec import DecoderSpec


def mix(w: Mapping[str, jax.Array], y: jax.Array, model: DecoderSpec) -> jax.Array:
    """What this rank adds to the mixture: each rank has a part of every expert's columns.

    Args:
      w: of a layer: `router` [E, D], `gate_proj` and `up_proj` [E, F / W, D], `down_proj` [E, D, F / W].
      y: [M, D], the rows of all ranks.

    Returns: f32 [M, D], to be added up over the ranks.
    """
    k = model.experts_per_token
    chances = jax.nn.softmax(product(y, w["router"]), axis=-1)  # [M, E]
    weights, chosen = lax.top_k(chances, k)
    if model.normalized_experts:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    # Rows in the order of their experts.
    order = jnp.argsort(chosen.ravel(), stable=True)
    sizes = jnp.bincount(chosen.ravel(), length=model.experts).astype(jnp.int32)
    rows = y[order // k]
    gate, up = (_ragged(rows, w[name], sizes) for name in ("gate_proj", "up_proj"))
    inner = (ACTIVATIONS[model.activation](gate) * up).astype(y.dtype)
    out = _ragged(inner, w["down_proj"], sizes)
    # Back to the order of the tokens, of which each adds up its own k.
    out = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(-1, k, y.shape[-1])
    return jnp.sum(out * weights[..., None], axis=1)


def _ragged(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    """rows [M, in] times weights [E, out, in] of their expert, in f32."""
    precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    weights = jnp.swapaxes(weights, 1, 2)
    return lax.ragged_dot(rows, weights, sizes, precision=precision, preferred_element_type=jnp.float32)
