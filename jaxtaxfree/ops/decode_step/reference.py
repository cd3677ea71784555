"""What `decode_step` means, in plain `lax`: a dense decoder of any family that `DecoderSpec` describes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtaxfree.ops.decode_attention import decode_attention
from jaxtaxfree.ops.decode_attention.meaning import times_scales
from jaxtaxfree.ops.decode_step.spec import DecoderSpec
from jaxtaxfree.ops.epilogue import ACTIVATIONS
from jaxtaxfree.ops.kv_cache import Placement, append_kv, quantised
from jaxtaxfree.ops.scaled import Scaled
from jaxtaxfree.teams import vary

Params = Mapping[str, jax.Array]
Parts = tuple[jax.Array, ...]  # of a cache: keys and values, and of 8 bits the scales of both
LAYER_FREE = ("final_norm", "unembed", "unembed_scale", "embed")  # parameters that no layer has


def run(
    params: Params,
    x: jax.Array,
    cache: Parts,
    lengths: jax.Array,
    counts: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    axes: tuple[str, ...],
    model: DecoderSpec,
    placement: Placement | None,
    block_tables: jax.Array | None = None,
) -> tuple[jax.Array, Parts]:
    """All layers, for T new tokens of each sequence.

    Args:
      params, cache, lengths: as in `decode_step`.
      x: [B, T, D].
      counts: i32[B], how many of the T tokens are there; those behind them leave no trace.
      cos, sin: f32 [tables, positions, rotated / 2].
      placement: which positions a rank keeps; None: all, of some of the heads.
      block_tables: of a paged cache, any i32[B, pages of a sequence].

    Returns: (logits f32[B, V / W] of each sequence's last token, the cache).
    """
    b, t, _ = x.shape
    if t > 1 and placement is not None:
        raise NotImplementedError("decode_step takes several new tokens only with a cache by heads.")
    at = lengths[:, None] + jnp.arange(t, dtype=jnp.int32)  # [B, T]
    row = jnp.clip(at, 0, cos.shape[1] - 1)
    x = scaled_embedding(x, model)
    no_window = jnp.iinfo(jnp.int32).max
    pages = readable(block_tables, cache)
    by_layer = (
        {name: w for name, w in params.items() if name not in LAYER_FREE},
        jnp.arange(model.layers),
        jnp.asarray([no_window if w is None else w for w in model.window_by_layer], jnp.int32),
        jnp.asarray(model.table_by_layer, jnp.int32),
    )

    def normal(y: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(y, weight, model)

    def layer(state: tuple, of_layer: tuple) -> tuple[tuple, None]:
        x, cache = state
        w, i, window, table = of_layer
        rotation = cos[table][row][:, :, None], sin[table][row][:, :, None]  # [B, T, 1, rotated / 2]
        q, k, v = _queries_keys_values(w, normal(x, w["attn_norm"]), rotation, model)
        cache = appended(cache, i, k, v, at, counts, placement, axes, block_tables)
        if placement is None:
            y = attend(q, _of_layer(cache, i, pages), at, lengths + counts, window, model)
        else:
            there = jnp.where(counts > 0, lengths, -1)  # where there is no token, it attends to nothing
            past = _of_layer(cache, i)
            y = over_the_sequence(q, past, there, model.windows[0], placement, axes, model, "xla", pages)
        y = lax.psum(times(y.reshape(b, t, -1), w, "o_proj"), axes).astype(x.dtype)
        x = x + scaled(normal(y, w["post_attn_norm"]) if model.post_norms else y, model)
        y = normal(x, w["mlp_norm"])
        gate, up = (times(y, w, name) for name in ("gate_proj", "up_proj"))
        y = gated(gate, up, model).astype(x.dtype)
        y = lax.psum(times(y, w, "down_proj"), axes).astype(x.dtype)
        x = x + scaled(normal(y, w["post_mlp_norm"]) if model.post_norms else y, model)
        return (x, cache), None

    # The cache is carried through the layers, not handed to each: then a donated one is updated where it lies.
    cache = tuple(vary(part, axes) for part in cache)
    (x, cache), _ = lax.scan(layer, (x, cache), by_layer)
    x = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = times(normal(x, params["final_norm"]), params, "embed" if model.tied else "unembed")
    return capped(logits * model.logit_scale, model.logit_soft_cap), cache


def scaled_embedding(x: jax.Array, model: DecoderSpec) -> jax.Array:
    """The residual stream at first, of embeddings x. Scale and result are of x's dtype, as in published models."""
    return x * jnp.asarray(model.embedding_scale, x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, model: DecoderSpec) -> jax.Array:
    """x [..., D] over the root of its mean square, times weight [D] or 1 + weight. In f32, rounded once."""
    x32, w32 = x.astype(jnp.float32), weight.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + model.norm_eps)
    return (x32 * (1 + w32 if model.norm_plus_one else w32)).astype(x.dtype)


def gated(gate: jax.Array, up: jax.Array, model: DecoderSpec) -> jax.Array:
    """The inner part of a gated MLP, of its two products [..., F]."""
    return ACTIVATIONS[model.gate_activation](gate) * up


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [B, T, heads, H]: each dimension of the first half of the rotated ones makes a pair with its like."""
    cos, sin = rotation
    half = cos.shape[-1]
    x32 = x.astype(jnp.float32)
    a, b, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)


def precision_of(x: jax.Array) -> lax.Precision | None:
    """Of products of x: operands of f32 are not rounded."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., in] times weight [out, in], in f32."""
    return jnp.einsum("...i,oi->...o", x, weight, precision=precision_of(x), preferred_element_type=jnp.float32)


def times(x: jax.Array, w: Params, name: str) -> jax.Array:
    """x [..., in] times the weight of this name [out, in], in f32; one of 8 bits is multiplied by its scales."""
    scale = w.get(f"{name}_scale")
    if scale is None:
        return product(x, w[name])
    return Scaled(x, w[name].T, rhs_scale=scale.T).matmul(precision_of(x))


def _queries_keys_values(
    w: Params, y: jax.Array, rotation: tuple[jax.Array, jax.Array], model: DecoderSpec
) -> list[jax.Array]:
    """Of y [B, T, D] the queries, keys and values of this rank's heads, each [B, T, heads, H]."""
    found = []
    for name in ("q", "k", "v"):
        of = times(y, w, f"{name}_proj")
        if model.qkv_bias:
            of = of + w[f"{name}_bias"].astype(jnp.float32)
        found.append(as_heads(name, of.astype(y.dtype), w, rotation, model))
    return found


def as_heads(
    name: str, x: jax.Array, w: Params, rotation: tuple[jax.Array, jax.Array], model: DecoderSpec
) -> jax.Array:
    """The heads [B, T, heads, H] of a product [B, T, heads * H]: "q" and "k" are normalised and rotated, "v" is not."""
    x = x.reshape(*x.shape[:2], -1, model.head_dim)
    if name == "v":
        return x
    return rotate(rms_norm(x, w[f"{name}_norm"], model) if model.qk_norm else x, rotation)


def _of_layer(cache: Parts, layer: jax.Array, pages: jax.Array | None = None) -> Parts:
    """Keys and values of one layer, [B, K, S, H], and their scales, [B, K, S]; of pools, what is on pages [B, P]."""
    if pages is None:
        return tuple(lax.dynamic_index_in_dim(part, layer, keepdims=False) for part in cache)
    found = (part.at[layer, pages].get(mode="promise_in_bounds") for part in cache)  # [B, P, K, page size, ...]
    return tuple(lax.collapse(jnp.swapaxes(part, 1, 2), 2, 4) for part in found)


def readable(block_tables: jax.Array | None, cache: Parts) -> jax.Array | None:
    """The tables with a page of the pool in each place, so that nobody reads outside of it.

    Where a table has none, nothing is written, and what is read means nothing.
    """
    return None if block_tables is None else jnp.clip(block_tables, 0, cache[0].shape[1] - 1)


def appended(
    cache: Parts, layer: jax.Array | int, k: jax.Array, v: jax.Array, at: jax.Array, counts: jax.Array,
    placement: Placement | None, axes: tuple[str, ...], block_tables: jax.Array | None = None,
) -> Parts:  # fmt: skip
    """Keys and values [L, B, K, S, H] with those of the new tokens [B, T, K, H] of a layer at positions [B, T].

    As by `append_kv`, which would have the layer alone, so that it would be copied, and back. Where they have scales,
    [L, B, K, S], the new ones are quantised. With tables they are pools, [L, pages, K, page size, H], and a token whose
    entry is no page of them is dropped.
    """
    b, t = at.shape
    pages, heads, size = cache[0].shape[1:4]
    if placement is not None:
        at = placement.slot_of(at, lax.axis_index(axes), lax.axis_size(axes))
    # Indices of the leading dimensions, or XLA would transpose the cache, and back.
    sequence, head, _ = jnp.ogrid[:b, :heads, :t]
    count = 1 if block_tables is None else block_tables.shape[1]
    there = (jnp.arange(t) < counts[:, None]) & (at >= 0) & (at < count * size)
    row = sequence
    if block_tables is not None:
        found = jnp.take_along_axis(block_tables, jnp.clip(at // size, 0, count - 1), axis=1)
        there &= (found >= 0) & (found < pages)
        row = jnp.where(there[:, None], found[:, None], sequence)
        at = at % size
    slot = jnp.where(there, at, size + jnp.arange(t))[:, None]  # each its own place past the end, to be dropped

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.swapaxes(new, 1, 2).astype(old.dtype)
        return old.at[layer, row, head, slot].set(new, mode="drop", unique_indices=True)

    scales = cache[2:] or (None, None)
    values, of_values = zip(*(quantised(x, old.dtype, s) for x, old, s in zip((k, v), cache, scales)))
    return tuple(put(old, new) for old, new in zip(cache, (*values, *of_values)))


def scales_of(scales: Sequence[jax.Array]) -> dict[str, Any]:
    """Those of a cache, if it has any, as `decode_attention` takes them."""
    return dict(zip(("key_scale", "value_scale"), scales))


def attend(
    q: jax.Array, past: Parts, at: jax.Array, ends: jax.Array, window: jax.Array, model: DecoderSpec
) -> jax.Array:
    """Of queries [B, T, N, H] at positions [B, T] over keys and values [B, K, S, H], before ends [B]: [B, T, N, H].

    Scales of keys and values, [B, K, S], multiply scores and weights, in f32, as in `decode_attention`.
    """
    b, t, n, h = q.shape
    key_scale, value_scale = (scale[:, :, None, None] for scale in past[2:]) if len(past) > 2 else (None, None)
    keys, values = past[0].astype(q.dtype), past[1].astype(q.dtype)
    k, slots = keys.shape[1:3]
    grouped = q.reshape(b, t, k, n // k, h)
    how = {"precision": precision_of(q), "preferred_element_type": jnp.float32}
    scores = jnp.einsum("btkgh,bksh->bkgts", grouped, keys, **how)
    scores = (scores if key_scale is None else scores * key_scale) * model.score_factor
    scores = capped(scores, model.score_soft_cap)
    slot = jnp.arange(slots)
    there = slot < ends[:, None]
    seen = there[:, None] & (slot <= at[:, :, None]) & (slot >= at[:, :, None] - window)  # [B, T, S]
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(top), 0, top))
    total = jnp.sum(weights, axis=-1)  # [B, K, G, T]
    # Behind the last key the cache and its scales may hold anything, and 0 * NaN is NaN.
    values = jnp.where(there[:, None, :, None], values, 0)
    unit = None
    if value_scale is not None:
        weights, unit = times_scales(weights, jnp.where(seen[:, None, None], value_scale, 0))
    y = jnp.einsum("bkgts,bksh->bkgth", weights.astype(q.dtype), values, **how)
    y = y if unit is None else y * unit
    y = y / jnp.where(total == 0, 1, total)[..., None]
    return jnp.moveaxis(y, 3, 1).reshape(b, t, n, h).astype(q.dtype)


def attend_along_the_sequence(
    q: jax.Array, k: jax.Array, v: jax.Array, past: Any, lengths: jax.Array, windows: Sequence[int | None],
    window: int | jax.Array, placement: Placement, axes: tuple[str, ...], model: DecoderSpec,
    implementation: str | None, block_tables: jax.Array | None = None,
) -> tuple[Any, jax.Array]:  # fmt: skip
    """As `attend`, of one new token, over a cache of which each rank has some positions of all heads.

    Args:
      q, k, v: of the new token, [B, 1, heads, H]: queries of this rank's heads, keys and values of all.
      past: keys and values, [B, K, S, H]; or [pages, K, page, H] with `block_tables`, as `decode_attention` takes them.
        Those of 8 bits have their scales behind them, of the same shape without H.
      windows: those that a layer may have; `window` says which of them this one has.

    Returns: (past with the new token, [B, 1, heads, H]).
    """
    past = append_kv(past, k, v, lengths, axes, **_placed(placement, block_tables))

    def over(size: int | None) -> jax.Array:
        return over_the_sequence(q, past, lengths, size, placement, axes, model, implementation, block_tables)

    if len(windows) == 1:
        return past, over(windows[0])
    return past, lax.switch(window, [lambda size=size: over(size) for size in windows])


def over_the_sequence(
    q: jax.Array, past: Any, lengths: jax.Array, window: int | None, placement: Placement, axes: tuple[str, ...],
    model: DecoderSpec, implementation: str | None, block_tables: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """As `attend_along_the_sequence`, whose new token is in `past`."""
    q = lax.all_gather(q, axes, axis=2, tiled=True)  # of all heads
    return decode_attention(
        q, past[0], past[1], axes, scale=model.score_factor, key_value_seq_lengths=lengths + 1,
        local_window_size=window, logits_soft_cap=model.score_soft_cap, output="heads",
        implementation=implementation, **scales_of(past[2:]), **_placed(placement, block_tables),
    )  # fmt: skip


def _placed(placement: Placement, block_tables: jax.Array | None) -> dict[str, Any]:
    """The placement of a cache as `append_kv` and `decode_attention` take it."""
    block = placement.stretch
    return {"placement": "round_robin", "kv_layout": "BKSH", "block_size": block, "block_tables": block_tables}


def scaled(y: jax.Array, model: DecoderSpec) -> jax.Array:
    """A block's result y, as it is added to the residual stream."""
    return y if model.residual_scale == 1 else y * jnp.asarray(model.residual_scale, y.dtype)


def added(x: jax.Array, product: Callable[..., jax.Array], norm: jax.Array | None, model: DecoderSpec) -> jax.Array:
    """The residual stream x and a block's result, which a product over the ranks ends in.

    Args:
      product: (**epilogue) -> the result; with `residual`, which it takes where nothing comes between, x plus it.
      norm: the weight of the norm behind the block, or None.
    """
    if norm is None and model.residual_scale == 1:
        return product(residual=x)
    y = product()
    return x + scaled(y if norm is None else rms_norm(y, norm, model), model)


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """x between -cap and cap: cap * tanh(x / cap); without a cap x itself."""
    return x if cap is None else cap * jnp.tanh(x / cap)
