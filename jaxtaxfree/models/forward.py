"""A decoder by operations: a gather in each product that needs one, a scatter in each product before it.

The residual stream is sharded over rows, which are the tokens of all sequences. So a layer has four exchanges, and each
of them is part of a product: `all_gather_matmul`, `matmul_reduce_scatter`, twice. What a decoder is made of is
`jaxtaxfree.ops.decode_step.reference`'s; this form reads prompts of many tokens, returns the logits of all of them, and
has experts. Everything here runs inside `jax.shard_map`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtaxfree import routing
from jaxtaxfree.ops.all_gather_matmul import all_gather_matmul
from jaxtaxfree.ops.collectives import psum, psum_scatter
from jaxtaxfree.ops.decode_step.reference import (
    LAYER_FREE,
    added,
    as_heads,
    attend,
    attend_along_the_sequence,
    capped,
    gated,
    precision_of,
    product,
    rms_norm,
    scaled,
    scaled_embedding,
)
from jaxtaxfree.ops.decode_step.spec import DecoderSpec
from jaxtaxfree.ops.kv_cache import Placement
from jaxtaxfree.ops.matmul_reduce_scatter import matmul_reduce_scatter
from jaxtaxfree.ops.moe import moe
from jaxtaxfree.ops.quantize import BLOCK, quantize
from jaxtaxfree.ops.scaled import Scaled

# Keys and values; of 8 bits with the scales of both.
Cache = tuple[jax.Array, ...]
Weights = Mapping[str, jax.Array]
QUERIES = 512  # of a prompt at a time, in attention: the scores of one block are in memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class How:
    """What is alike in all calls.

    Attributes:
      model: what the decoder is made of.
      axes: along which it is sharded.
      implementation: of the operations.
      placement: of a cache along the sequence; None: by heads.
      pages: of the pool of a paged cache along the sequence; 0: it has none.
      cache_dtype: of a cache of 8 bits; None: it has the dtype of keys and values.
      quantized: activations take the 8 bits of the weights that they are multiplied by, with a scale for each row, or
        for each 128 elements of it where weights have blocks.
    """

    model: DecoderSpec
    axes: tuple[str, ...]
    implementation: str | None
    placement: Placement | None
    pages: int = 0
    cache_dtype: np.dtype | None = None
    quantized: bool = False

    def gather(self, x: jax.Array, w: Weights, name: str, **keywords: Any) -> tuple[jax.Array, "Rows"]:
        """The rows of all ranks, x [M / W, in], times weight [out / W, in], transposed where it lies; and the rows."""
        x, how = self._operands(x, w, name, keywords)
        out, rows = all_gather_matmul(x, w[name], self.axes, return_gathered=True, **how)
        scale = how["lhs_scale"]
        return out, Rows(rows, None if scale is None else lax.all_gather(scale, self.axes, tiled=True))

    def scatter(self, x: jax.Array, w: Weights, name: str, **keywords: Any) -> jax.Array:
        """x [M, in / W] times weight [out, in / W], added up over the ranks: [M / W, out]."""
        x, how = self._operands(x, w, name, keywords)
        return matmul_reduce_scatter(x, w[name], self.axes, **how)

    def _operands(self, x: jax.Array, w: Weights, name: str, keywords: dict[str, Any]) -> tuple[jax.Array, Any]:
        """The left operand, and how it is multiplied."""
        how: dict[str, Any] = {"precision": precision_of(x), "rhs_transposed": True}
        how |= {
            "implementation": self.implementation,
            "lhs_scale": None,
            "rhs_scale": w.get(f"{name}_scale"),
        } | keywords
        if how["rhs_scale"] is not None:
            how.setdefault("preferred_element_type", x.dtype)
            if self.quantized:
                of_blocks = how["rhs_scale"].shape[-1] > 1
                x, how["lhs_scale"] = quantize(x, w[name].dtype, block=(1, BLOCK if of_blocks else -1))
            elif self.implementation != "xla":
                how["implementation"] = None  # no kernel takes weights alone in 8 bits for every number of rows
        return x, how


@dataclasses.dataclass(frozen=True)
class Rows:
    """The gathered rows [M, in] of activations, with their scales if they have 8 bits."""

    rows: jax.Array
    scale: jax.Array | None

    def times(self, w: Weights, name: str) -> jax.Array:
        """Their product with a weight [out / W, in], in f32."""
        scale = w.get(f"{name}_scale")
        if scale is None:
            return product(self.rows, w[name])
        return Scaled(self.rows, w[name].T, self.scale, scale.T).matmul(precision_of(self.rows))


def sharded_rows(
    table: jax.Array, which: jax.Array, axes: tuple[str, ...], implementation: str | None, scattered: bool = False
) -> jax.Array:
    """Some rows of a table [N / W, D] whose rows are sharded: [M, D] on every rank, or scattered [M / W, D]."""
    at = which - table.shape[0] * lax.axis_index(axes)
    here = (at >= 0) & (at < table.shape[0])
    # Of the ranks one has a number, and the others add 0 to it.
    rows = jnp.where(here[:, None], table[jnp.clip(at, 0, table.shape[0] - 1)], 0)
    if scattered:
        return psum_scatter(rows, axes, tiled=True, implementation=implementation)
    return psum(rows, axes, implementation=implementation)


def run(
    params: Mapping[str, jax.Array],
    tokens: jax.Array,
    cache: Cache | None,
    lengths: jax.Array,
    counts: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    how: How,
    every: bool = False,
    tables: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """T new tokens of each sequence, through all layers.

    Args:
      params: this rank's part, as `decode_step` takes it, and `embed` [V / W, D].
      tokens: i32[B, T].
      cache: as in `decode_step`, for one new token; None: the tokens are the first ones of their sequences, and attend
        to their keys and values as they are.
      lengths: i32[B], tokens before these.
      counts: i32[B], how many of the T there are.
      cos, sin: f32 [tables, positions, rotated / 2].
      every: the logits of every token are wanted, not of the last one.
      tables: i32[B, pages of a sequence], of a paged cache.

    Returns: (logits f32 [B, V / W], or [B, T, V / W], the cache). Of a prompt the cache is keys and values of
      all its tokens, [L, B, T, K, H], as `placed` takes them.
    """
    model, (b, t) = how.model, tokens.shape
    at = lengths[:, None] + jnp.arange(t, dtype=jnp.int32)
    row = jnp.clip(at, 0, cos.shape[1] - 1)
    flat = _filled(tokens.reshape(-1), lax.axis_size(how.axes))
    x = scaled_embedding(sharded_rows(params["embed"], flat, how.axes, how.implementation, scattered=True), model)
    windows = sorted(set(model.window_by_layer), key=lambda window: -1 if window is None else window)
    by_layer = (
        {name: w for name, w in params.items() if name not in LAYER_FREE},
        cache,
        jnp.asarray([windows.index(window) for window in model.window_by_layer], jnp.int32),
        jnp.asarray(model.table_by_layer, jnp.int32),
    )

    def layer(x: jax.Array, of_layer: tuple) -> tuple[jax.Array, Cache]:
        w, past, window, table = of_layer
        rotation = cos[table][row][:, :, None], sin[table][row][:, :, None]
        q, k, v = _heads(w, rms_norm(x, w["attn_norm"], model), rotation, (b, t), how)
        if past is None:
            y, past = _attend_to_prompt(q, k, v, _of(windows, window), how), (k, v)
        else:
            past, y = _attend_to_cache(q, k, v, past, lengths, windows, window, tables, how)
        y = _filled(y.reshape(b * t, -1), lax.axis_size(how.axes))
        x = _added(x, y, w, "o_proj", w.get("post_attn_norm"), how)
        y = rms_norm(x, w["mlp_norm"], model)
        return _mlp(x, y, w, how), past

    x, cache = lax.scan(layer, x, by_layer)
    x = rms_norm(x, params["final_norm"], model)
    unembed = params["embed" if model.tied else "unembed"]
    if every:
        logits = all_gather_matmul(
            x, unembed, how.axes, precision=precision_of(x), preferred_element_type=jnp.float32, rhs_transposed=True,
            implementation=how.implementation,
        )[: b * t].reshape(b, t, -1)  # fmt: skip
    else:
        last = t * jnp.arange(b) + jnp.maximum(counts - 1, 0)
        logits = product(sharded_rows(x, last, how.axes, how.implementation), unembed)
    return capped(logits * model.logit_scale, model.logit_soft_cap), cache


def _filled(x: jax.Array, world: int) -> jax.Array:
    """x [M, ...] with rows behind it, so that the ranks divide them."""
    return jnp.pad(x, [(0, -x.shape[0] % world)] + [(0, 0)] * (x.ndim - 1))


def _heads(
    w: Mapping[str, jax.Array], y: jax.Array, rotation: tuple[jax.Array, jax.Array], sizes: tuple[int, int], how: How
) -> list[jax.Array]:
    """Of rows y [M / W, D] the queries, keys and values of this rank's heads, each [B, T, heads, H]."""
    model, (b, t) = how.model, sizes
    made = []
    bias = {"bias": w["q_bias"]} if model.qkv_bias else {}
    q, rows = how.gather(y, w, "q_proj", **bias)
    for name in ("q", "k", "v"):
        of = q
        if name != "q":  # the rows are here
            of = rows.times(w, f"{name}_proj")
            of = (of + w[f"{name}_bias"].astype(jnp.float32) if model.qkv_bias else of).astype(y.dtype)
        made.append(as_heads(name, of[: b * t].reshape(b, t, -1), w, rotation, model))
    return made


def _added(x: jax.Array, y: jax.Array, w: Weights, name: str, norm: jax.Array | None, how: How) -> jax.Array:
    """The residual stream x [M / W, D] and a block's result, y [M, in / W] times weight [D, in / W]."""
    return added(x, functools.partial(how.scatter, y, w, name), norm, how.model)


def _mlp(x: jax.Array, y: jax.Array, w: Mapping[str, jax.Array], how: How) -> jax.Array:
    """The residual stream x after the MLP of y, both [M / W, D]."""
    model = how.model
    if model.experts:
        # Mixtral's softmax over the chosen ones is the one over all, divided by their sum.
        normalise = "sum" if model.normalized_experts else "none"
        chosen, shares = routing.top_k(product(y, w["router"]), model.experts_per_token, normalise=normalise)
        y = moe(
            y, chosen, shares, w["gate_proj"], w["up_proj"], w["down_proj"], how.axes, parallel="tensor",
            activation=model.gate_activation, precision=precision_of(y), implementation=how.implementation,
        )  # fmt: skip
        return x + scaled(y, model)
    up, rows = how.gather(y, w, "up_proj", preferred_element_type=jnp.float32)
    y = gated(rows.times(w, "gate_proj"), up, model).astype(x.dtype)
    return _added(x, y, w, "down_proj", w.get("post_mlp_norm"), how)


def _of(windows: list[int | None], which: jax.Array) -> jax.Array:
    """The window of a layer, as a number that masks."""
    return jnp.asarray([jnp.iinfo(jnp.int32).max if window is None else window for window in windows], jnp.int32)[which]


def _attend_to_prompt(q: jax.Array, k: jax.Array, v: jax.Array, window: jax.Array, how: How) -> jax.Array:
    """Causal attention among T tokens: [B, T, heads, H] each."""
    b, t, heads, h = q.shape
    if how.placement is not None:  # this rank has all keys, of which its queries want some
        first = heads * lax.axis_index(how.axes)
        of = (first + jnp.arange(heads)) // how.model.group
        k, v = k[:, :, of], v[:, :, of]
    past = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    ends = jnp.full((b,), t, jnp.int32)

    def of_block(first: Any, q: jax.Array) -> jax.Array:
        at = jnp.broadcast_to(first + jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2])
        return attend(q, past, at, ends, window, how.model)

    if t <= 2 * QUERIES or t % QUERIES:
        return of_block(0, q)
    blocks = jnp.moveaxis(q.reshape(b, -1, QUERIES, heads, h), 1, 0)
    y = lax.map(lambda block: of_block(*block), (QUERIES * jnp.arange(len(blocks)), blocks))
    return jnp.moveaxis(y, 0, 1).reshape(q.shape)


def _attend_to_cache(
    q: jax.Array, k: jax.Array, v: jax.Array, past: Cache, lengths: jax.Array, windows: list[int | None],
    window: jax.Array, tables: jax.Array | None, how: How,
) -> tuple[Cache, jax.Array]:  # fmt: skip
    """Of one new token over the keys so far, [B, K, S, H], or [pages, K, page, H]."""
    model, b = how.model, len(lengths)
    if how.placement is None:
        sequence, head = jnp.ogrid[:b, : k.shape[2]]
        slot = jnp.where(lengths >= 0, lengths, past[0].shape[2])[:, None]
        past = tuple(
            old.at[sequence, head, slot].set(new[:, 0].astype(old.dtype), mode="drop", unique_indices=True)
            for old, new in zip(past, _stored((k, v), how), strict=True)
        )
        return past, attend(q, past, lengths[:, None], lengths + 1, _of(windows, window), model)
    return attend_along_the_sequence(
        q, k, v, past, lengths, windows, window, how.placement, how.axes, model, how.implementation,
        block_tables=tables if how.pages else None,
    )  # fmt: skip


def _stored(fresh: Cache, how: How) -> Cache:
    """Keys and values [..., H] as a cache has them: of 8 bits with a scale for each, [...]."""
    if how.cache_dtype is None:
        return fresh
    (keys, of_keys), (values, of_values) = (quantize(x, how.cache_dtype, block=(1, -1)) for x in fresh)
    return keys, values, of_keys[..., 0], of_values[..., 0]


def placed(fresh: Cache, slots: int, tables: jax.Array, how: How) -> Cache:
    """A cache of `slots` positions a rank, [L, B, K, S, H], of the keys and values of prompts, [L, B, T, K, H]; or of
    pages, [L, pages, K, page, H]. Scales have the same shapes without H.
    """
    return tuple(_placed(x, slots, tables, how) for x in _stored(fresh, how))


def _placed(x: jax.Array, slots: int, tables: jax.Array, how: How) -> jax.Array:
    t = x.shape[2]
    if how.placement is None:
        x = jnp.pad(x[:, :, : min(t, slots)], [(0, 0)] * 2 + [(0, max(0, slots - t))] + [(0, 0)] * (x.ndim - 3))
    else:  # each rank has all, and keeps its own
        world = lax.axis_size(how.axes)
        positions = dataclasses.replace(how.placement, slots=slots).positions(lax.axis_index(how.axes), world)
        if how.pages:  # whose each page is, and which of its sequence
            at = jnp.where(tables >= 0, tables, how.pages)
            sequence, number = jnp.indices(tables.shape, jnp.int32)
            own = [jnp.zeros(how.pages, jnp.int32).at[at].set(of, mode="drop") for of in (sequence, number)]
            positions = positions.reshape(-1, how.placement.stretch)[own[1]]
            return jnp.swapaxes(x[:, own[0][:, None], jnp.clip(positions, 0, t - 1)], 2, 3)
        x = x[:, :, jnp.clip(positions, 0, t - 1)]
    return jnp.swapaxes(x, 2, 3)
