"""`jax.vmap` of `decode_attention`: one call for all examples."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtaxfree.ops.decode_attention.spec import Spec

# Apart from the cache, what each sequence has of its own.
OF_SEQUENCES = ("query", "lengths", "starts", "tables")


def batch(
    call: Callable[..., Any],
    operands: Sequence[jax.Array],
    dims: Sequence[int | None],
    size: int,
    *,
    axes: tuple[str, ...],
    names: tuple[str, ...],
    spec: Spec,
    **_: Any,
) -> Any:
    """A `jaxtaxfree.primitive.Batch`: examples are more sequences, or more query heads if they share all keys."""
    given = dict(zip(names, operands, strict=True))
    mapped = [name for name, dim in zip(names, dims, strict=True) if dim is not None]
    # The scales of tokens are a part of the cache; others are the same for all sequences, as sinks are.
    sizes = {name: x.ndim - (name in mapped) for name, x in given.items()}
    cache = [name for name in ("key", "value", "key_scale", "value_scale") if sizes.get(name, 0) > 1]
    stacked = {
        name: jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for name, x, dim in zip(names, operands, dims, strict=True)
    }
    if {"query", "sinks"}.issuperset(mapped) and not (spec.by_heads and spec.kv_heads % lax.axis_size(axes)):
        if along := jax.typeof(stacked["query"]).sharding.spec[0]:
            return f"jax.vmap maps over queries of the same keys, and they are sharded along {along!r}"
        return _as_heads(call, given, stacked, size, spec.kv_heads)
    if alike := [name for name in mapped if name not in (*OF_SEQUENCES, *cache)]:
        return f"jax.vmap maps over {', '.join(alike)}, and the kernel takes one for all sequences"
    shared = [name for name in cache if name not in mapped]
    if shared and (len(shared) < len(cache) or spec.page_size is None):
        return f"jax.vmap does not map over {', '.join(shared)}, which the kernel's sequences share as pages alone"
    if spec.layout == "KBSH":  # sequences, or pages, stand second in these
        stacked |= {name: jnp.moveaxis(stacked[name], 1, 2) for name in cache if name not in shared}
    if "tables" in given:  # one pool of all examples' pages
        pages = 0 if shared else stacked["key"].shape[1]
        stacked["tables"] = stacked["tables"].astype(jnp.int32) + pages * jnp.arange(size)[:, None, None]
    # JAX joins two dimensions, and parts them, if the second is not sharded (along an Explicit axis).
    b, sharded = stacked["query"].shape[1], jax.typeof(stacked["query"]).sharding.spec[1] is not None
    for name in (*OF_SEQUENCES, *([] if shared else cache)):
        if name in given:
            given[name] = lax.collapse(jnp.swapaxes(stacked[name], 0, 1) if sharded else stacked[name], 0, 2)
            if spec.layout == "KBSH" and name in cache:
                given[name] = jnp.moveaxis(given[name], 1, 0)
    outs = call(*given.values())
    if sharded:
        return [jnp.swapaxes(x.reshape(b, size, *x.shape[1:]), 0, 1) for x in outs]
    return [x.reshape(size, b, *x.shape[1:]) for x in outs]


def _as_heads(
    call: Callable[..., Any], given: dict[str, jax.Array], stacked: dict[str, jax.Array], size: int, kv_heads: int
) -> list[jax.Array]:
    """One call in which each key/value head has the query heads of all examples: [..., N, H] as [..., K, V, N/K, H]."""

    def joined(x: jax.Array, axis: int) -> jax.Array:
        """[V, ..., N, ...] -> [..., K * V * N/K, ...], for N along the axis of x."""
        x = x.reshape(*x.shape[:axis], kv_heads, x.shape[axis] // kv_heads, *x.shape[axis + 1 :])
        return lax.collapse(jnp.moveaxis(x, 0, axis), axis - 1, axis + 2)

    heads = stacked["query"].shape[3]
    given = given | {"query": joined(stacked["query"], 3)}
    if "sinks" in given:
        given["sinks"] = joined(stacked["sinks"], 1)

    def parted(x: jax.Array) -> jax.Array:
        """[B, T, heads of all examples, ...] -> [V, B, T, heads, ...]."""
        group = heads // kv_heads
        x = x.reshape(*x.shape[:2], x.shape[2] // (size * group), size, group, *x.shape[3:])
        return lax.collapse(jnp.moveaxis(x, 3, 0), 3, 5)

    return [parted(x) for x in call(*given.values())]
