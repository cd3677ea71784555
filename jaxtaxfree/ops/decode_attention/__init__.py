"""`decode_attention`: attention of new tokens over a cache that is sharded along the sequence."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxtaxfree.dispatch import Case
from jaxtaxfree.ops.decode_attention.checks import check_operands, static, unsupported, usual_scale, window_of
from jaxtaxfree.ops.decode_attention.meaning import finite, log, normalised, reference
from jaxtaxfree.ops.decode_attention.portable import VARIANTS, Call
from jaxtaxfree.ops.decode_attention.spec import Spec
from jaxtaxfree.ops.decode_attention.vmap import OF_SEQUENCES, batch
from jaxtaxfree.ops.kv_cache import cache_sizes, check_sharded, placement_of
from jaxtaxfree.ops.untrusted import as_int32
from jaxtaxfree.ops.variant import Choice, choose, settings_of
from jaxtaxfree.primitive import (
    Labels,
    Unsupported,
    check_implementation,
    collective,
    needs_devices,
    takes_reference,
)
from jaxtaxfree.settings import Settings
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.target import target_of
from jaxtaxfree.teams import Team, check_axes


@overload
def decode_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: str | Sequence[str] | None,
    *,
    scale: float | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    placement: str = "contiguous",
    block_size: int | None = None,
    kv_layout: str = "BSKH",
    block_tables: jax.Array | None = None,
    starts: jax.Array | None = None,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    output: str = "replicated",
    return_residual: Literal[False] = False,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> jax.Array: ...


@overload
def decode_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: str | Sequence[str] | None,
    *,
    scale: float | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    placement: str = "contiguous",
    block_size: int | None = None,
    kv_layout: str = "BSKH",
    block_tables: jax.Array | None = None,
    starts: jax.Array | None = None,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    output: str = "replicated",
    return_residual: Literal[True],
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def decode_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: str | Sequence[str] | None,
    *,
    scale: float | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    placement: str = "contiguous",
    block_size: int | None = None,
    kv_layout: str = "BSKH",
    block_tables: jax.Array | None = None,
    starts: jax.Array | None = None,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    output: str = "replicated",
    return_residual: bool,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def decode_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: str | Sequence[str] | None,
    *,
    scale: float | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    placement: str = "contiguous",
    block_size: int | None = None,
    kv_layout: str = "BSKH",
    block_tables: jax.Array | None = None,
    starts: jax.Array | None = None,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    output: str = "replicated",
    return_residual: bool = False,
    preferred_element_type: DTypeLike | None = None,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of one or a few new tokens over keys and values sharded along the sequence, as one kernel.

    Each rank attends to its own keys, in parts that run side by side (FlashDecoding, Dao et al. 2023). It sends each
    partial result to the ranks that need it as soon as it is ready, and the merge takes results as they arrive. Call it
    inside `jax.shard_map`, after `append_kv` has put the new tokens into the cache. Without peers (`axis_name=()`) it
    may also stand outside, in a program for one device. The letters are those of `jax.nn`: B sequences, T new tokens, N
    query heads, K key/value heads (N is a multiple of K), H the head size, and S the keys of a sequence that a rank has
    room for.

    Args:
      query: [B, N, H] or [B, T, N, H], the same on every rank. The T tokens are the last T of their sequence. A token
        does not attend to later ones.
      key: this rank's part, [B, S, K, H], or in the layout of `kv_layout`. The dtype is that of query, or int8,
        float8_e4m3fn or float8_e5m2 with a scale.
      value: like key. Its head size Hv may differ.
      axis_name: the mesh axis, or axes, along which the cache is sharded. () or None: this rank has all keys of its
        sequences, or of its heads, and nothing is sent.
      scale: multiplies the logits. None means 1 / sqrt(H).
      key_value_seq_lengths: i32[B], keys of each sequence over all ranks, including the new tokens. It is the same on
        every rank. None: the cache is full.
      placement: "contiguous": rank r has the positions from r * S on. "round_robin": blocks of positions are dealt out,
        the first to rank 0, so that a growing cache loads all ranks alike.
      block_size: positions in a block of "round_robin". None means a page, or without pages the largest power of 2 up
        to 64 that divides S.
      kv_layout: "BSKH", "BKSH" or "KBSH".
      block_tables: i32[B, pages of a sequence], for a paged cache: the pages of this rank that hold the sequence, in
        order. Then `key` and `value` are pools with pages in place of B and page_size in place of S, such as
        [pages, page_size, K, H], or [K, pages, page_size, H] with "KBSH", as JAX's own paged attention takes them. S is
        page_size times the pages of a sequence. Where an entry within a sequence's length is no page of the pool,
        another one is read, and the result of the sequence means nothing.
      starts: i32[B], for a cache that is a ring, as a right-aligned one is: token i of a sequence lies in the place
        (starts + i) modulo the places of all ranks, of which there are S on each. `placement` says which rank has a
        place. Lengths and windows count tokens as ever. None: token i lies in place i.
      key_scale, value_scale: f32 factors of the cached keys and values: [], [K], or one for each token and head (the
        shape of `key` without its last dimension).
      local_window_size: the number of positions before a token that it attends to, besides itself. Of a pair (before,
        after) only the first matters.
      logits_soft_cap: c. A logit becomes c * tanh(logit / c).
      sinks: [N], one more logit for each head. It takes part in the softmax and has no value.
      output: "replicated": every rank has the result of all heads. "heads": each rank has its N / world heads, rank 0
        the first ones, as a row-parallel projection takes them.
      return_residual: return the log-sum-exp as well, for `merge_attention`.
      preferred_element_type: dtype of the result; query's if None. Sums are always f32.
      implementation: as in `all_gather_matmul`.
      config: how the kernel splits its work. The shape decides whatever it leaves out.

    Returns: [B, N, Hv] or [B, T, N, Hv] (N / world with output="heads"). With `return_residual` a pair of that and the
      log-sum-exp, f32 [B, N] or [B, T, N]: the natural logarithm of the softmax's denominator, sinks included.

    A token that attends to nothing gets zeros and a log-sum-exp of -inf, and the derivatives of both are 0. Results are
    the same bits every time and on every rank. Derivatives are those of the reference. `jax.vmap` over several
    sequences, or over several queries of the same keys, becomes one call.

    Raises:
      ValueError: if the arguments do not fit together. Also if `shard_map` knows (`check_vma=True`) that several ranks
        have the same cache: each copy would count as other positions.
      TypeError: if `scale`, `logits_soft_cap`, `local_window_size` or `block_size` is traced, or not a number, or None
        where its default depends on a symbolic shape.
      NameError: if `axis_name` is not bound.
      NotImplementedError: if implementation="fused" (or "simulate") cannot run here. The error gives all reasons.
    """
    axes = check_axes(axis_name, "decode_attention", alone=True)
    check_implementation(implementation)
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    block_tables = None if block_tables is None else jnp.asarray(block_tables)
    if query.ndim not in (3, 4) or not query.shape[-1]:
        raise ValueError(f"decode_attention takes a query [B, N, H] or [B, T, N, H], H > 0, not {list(query.shape)}.")
    single = query.ndim == 3
    if single:
        query = query[:, None]
    slots, page_size, kv_heads = cache_sizes(key, kv_layout, block_tables, "decode_attention")
    spec = Spec(
        placement=placement_of(placement, block_size, slots, page_size, "decode_attention"),
        page_size=page_size,
        kv_heads=kv_heads,
        layout=kv_layout,
        scale=usual_scale(query.shape[-1]) if scale is None else static("scale", scale, "a number", float),
        window=window_of(local_window_size),
        soft_cap=None if logits_soft_cap is None else static("logits_soft_cap", logits_soft_cap, "a number", float),
        by_heads=output == "heads",
        dtype=np.dtype(preferred_element_type or query.dtype),
    )
    operands = {
        "query": query,
        "key": key,
        "value": value,
        "lengths": key_value_seq_lengths,
        "tables": block_tables,
        "starts": starts,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "sinks": sinks,
    }
    operands = {name: jnp.asarray(x) for name, x in operands.items() if x is not None}
    world = lax.axis_size(axes)
    check_operands(operands, spec, world, output)
    check_sharded("decode_attention", key, value, block_tables, axes)
    if block_tables is not None:
        # Nobody reads outside of the pool. A check in the kernel's loop would take its registers.
        operands["tables"] = jnp.clip(as_int32(block_tables), 0, key.shape[kv_layout.index("B")] - 1)
    params = {"axes": axes, "names": tuple(operands), "spec": spec}
    settings = settings_of("decode_attention", VARIANTS, config)
    reasons = unsupported(operands, spec)
    if takes_reference("decode_attention", [query, key, value], implementation, reasons):
        out, residual = reference(*operands.values(), **params)
    else:
        inside = axes or jax.sharding.get_abstract_mesh().manual_axes
        out, residual = (decode_attention_p if inside else alone_p).bind(
            *operands.values(), implementation=implementation, config=settings, **params
        )
    if single:
        out, residual = out[:, 0], residual[:, 0]
    return (out, residual) if return_residual else out


def merge_attention(
    out: jax.Array, residual: jax.Array, other: jax.Array, other_residual: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The attention over two sets of keys, from the attention over each.

    This is plain `jax.numpy`. It is differentiable in all operands, forward and backward, any number of times. A set
    without keys has a result of zeros and a log-sum-exp of -inf. It changes neither results nor derivatives. Where no
    set has a key, the derivatives are 0.

    Args:
      out, other: [..., N, H], the results of attention of the same queries over different keys.
      residual, other_residual: f32 [..., N], their log-sum-exp (natural logarithm), -inf where there was no key. Only
        one of the two may count a sink.

    Returns: (result of `out`'s dtype, its log-sum-exp f32 [..., N]).

    Raises:
      ValueError: if the shapes do not fit together, or `out` is not floating-point.
    """
    out, residual, other, other_residual = map(jnp.asarray, (out, residual, other, other_residual))
    shapes = [list(x.shape) for x in (out, residual, other, other_residual)]
    if shapes != [shapes[0], shapes[0][:-1]] * 2 or not out.ndim:
        raise ValueError(
            "merge_attention takes out and other of one shape [..., N, H], residual and other_residual of [..., N], "
            f"not out {shapes[0]}, residual {shapes[1]}, other {shapes[2]} and other_residual {shapes[3]}."
        )
    if not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(
            f"merge_attention gives a result of out's dtype, which must be floating-point, not {out.dtype}."
        )
    base = finite(jnp.maximum(residual, other_residual))
    weight, other_weight = jnp.exp(residual - base), jnp.exp(other_residual - base)
    total = weight + other_weight
    merged = out.astype(jnp.float32) * weight[..., None] + other.astype(jnp.float32) * other_weight[..., None]
    return normalised(merged, total).astype(out.dtype), base + log(total)


def fused(
    *operands: jax.Array,
    axes: tuple[str, ...],
    names: tuple[str, ...],
    spec: Spec,
    config: tuple[tuple[str, Any], ...],
    compute_capability: int,
    implementation: str | None = None,
) -> list[jax.Array]:
    """The operation by one kernel."""
    given = dict(zip(names, operands))
    if reasons := unsupported(given, spec):
        raise Unsupported("decode_attention", reasons)
    query, key, value = given["query"], given["key"], given["value"]
    b = query.shape[0]
    world = lax.axis_size(axes)
    if "lengths" not in given:
        given["lengths"] = jnp.full((b,), world * spec.placement.slots, jnp.int32)
    # A pointer for what is not there; the kernel does not look at it.
    nothing = given["lengths"]
    arrays = [
        query,
        key,
        value,
        given["lengths"].astype(jnp.int32),
        given["tables"].astype(jnp.int32) if "tables" in given else nothing,
        *(given[name].astype(jnp.float32) if name in given else nothing for name in ("key_scale", "value_scale")),
        given.get("sinks", nothing),
        *([given["starts"].astype(jnp.int32)] if "starts" in given else []),
    ]
    call = _call_of(given, spec, world, compute_capability)
    chosen = choose("decode_attention", VARIANTS, call, dict(config))
    kernel, keywords = chosen.variant.kernel, chosen.keywords
    return list(shmem_call(kernel, *arrays, axis_name=axes, implementation=implementation, **keywords))


def _call_of(given: Mapping[str, Any], spec: Spec, world: int, compute_capability: int) -> Call:
    """The call with these operands (arrays or their types)."""
    return Call(
        query_shape=given["query"].shape,
        value_head_size=given["value"].shape[-1],
        world=world,
        spec=spec,
        dtype=np.dtype(given["query"].dtype),
        cache_dtype=np.dtype(given["key"].dtype),
        target=target_of(compute_capability),
        key_scale=_scale_kind(given.get("key_scale")),
        value_scale=_scale_kind(given.get("value_scale")),
        sinks="sinks" in given,
        starts="starts" in given,
        pages=given["key"].shape[spec.layout.index("B")],
    )


def _scale_kind(scale: Any) -> str:
    if scale is None:
        return "none"
    return {0: "tensor", 1: "head"}.get(scale.ndim, "token")


def _slower(query: Any, key: Any, value: Any, *_: Any, spec: Spec, **__: Any) -> str | None:
    """Why XLA is known to be faster, if it is. Measured on an H200."""
    flops = 2 * math.prod(query.shape[:3]) * spec.placement.slots * (query.shape[-1] + value.shape[-1])
    if query.dtype == np.float32 and flops > 1e8:
        return "XLA's f32 products of many keys are faster than Triton's, which take no tensor cores"
    return None


_USUAL_OPERANDS = {"query", "key", "value", "lengths"}


def case(
    query: Any, key: Any, value: Any, *_: Any, team: Team, names: tuple[str, ...], spec: Spec, **__: Any
) -> Case | None:
    """What the tables know a call by; None if none of its kind is in them."""
    unusual = spec.page_size, spec.layout != "BSKH", spec.soft_cap, spec.by_heads, set(names) - _USUAL_OPERANDS
    if any(unusual) or spec.window is not None or spec.dtype != query.dtype:
        return None
    call = _call_of({"query": query, "key": key, "value": value}, spec, team.world, team.compute_capability)

    def chosen(slots: int, settings: Mapping[str, Any]) -> Choice:
        placement = dataclasses.replace(spec.placement, slots=slots)
        spec_of_slots = dataclasses.replace(spec, placement=placement)
        return choose("decode_attention", VARIANTS, dataclasses.replace(call, spec=spec_of_slots), settings)

    b, t, n, h = query.shape
    sizes = {"b": b, "t": t, "n": n, "kv_heads": spec.kv_heads, "h": h, "value_h": value.shape[-1]}
    return Case(
        operation="decode_attention",
        device_kind=team.device_kind,
        same={"world": team.world, "dtype": query.dtype.name, **sizes},
        along="s",
        size=spec.placement.slots,
        choose=chosen,
    )


def _dimensions(*operands: Any, names: tuple[str, ...], spec: Spec, **_: Any) -> tuple[Labels, Labels]:
    """Sequences are independent of each other, but for the pages of a paged cache."""
    along: dict[str, int] = dict.fromkeys(OF_SEQUENCES, 0)
    if "tables" not in names:
        # Scales of tokens are a part of the cache; others are the same for all sequences.
        scales = [name for name, x in zip(names, operands) if name.endswith("scale") and len(x.shape) > 2]
        along |= dict.fromkeys(["key", "value", *scales], spec.layout.index("B"))

    def labels(dimensions: int, of_sequences: int | None) -> list[str | None]:
        return ["sequence" if i == of_sequences else None for i in range(dimensions)]

    ins = [labels(len(x.shape), along.get(name)) for name, x in zip(names, operands)]
    return ins, [labels(4, 0), labels(3, 0)]


def _primitive() -> Any:
    return collective(
        "decode_attention",
        reference=reference,
        fused=fused,
        slower=_slower,
        dimensions=_dimensions,
        case=case,
        batch=batch,
    )


decode_attention_p = _primitive()
# Outside of `jax.shard_map`, without peers.
alone_p = _primitive()
needs_devices(alone_p)
