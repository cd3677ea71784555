"""`decode_attention`: attention of new tokens over a cache that is sharded along the sequence."""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jaxtaxfree.dispatch import Case
from jaxtaxfree.ops.decode_attention.portable import VARIANTS, Call
from jaxtaxfree.ops.decode_attention.spec import Spec
from jaxtaxfree.ops.decode_attention.vmap import batch
from jaxtaxfree.ops.kv_cache import KVCache, cache_faults, cache_sizes, check_sharded, placement_of
from jaxtaxfree.ops.variant import Choice, choose, settings_of
from jaxtaxfree.primitive import (
    DTYPES,
    Labels,
    Lasting,
    Unsupported,
    check_implementation,
    collective,
    symbolic,
    takes_reference,
)
from jaxtaxfree.settings import Settings
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.target import target_of
from jaxtaxfree.teams import Team, check_axes, explicit_sharding, varying

OUTPUTS = ("replicated", "heads")


@overload
def decode_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis_name: str | Sequence[str],
    *,
    scale: float | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    placement: str = "contiguous",
    block_size: int | None = None,
    kv_layout: str = "BSKH",
    block_tables: jax.Array | None = None,
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
    axis_name: str | Sequence[str],
    *,
    scale: float | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    placement: str = "contiguous",
    block_size: int | None = None,
    kv_layout: str = "BSKH",
    block_tables: jax.Array | None = None,
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
    axis_name: str | Sequence[str],
    *,
    scale: float | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    placement: str = "contiguous",
    block_size: int | None = None,
    kv_layout: str = "BSKH",
    block_tables: jax.Array | None = None,
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
    axis_name: str | Sequence[str],
    *,
    scale: float | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    placement: str = "contiguous",
    block_size: int | None = None,
    kv_layout: str = "BSKH",
    block_tables: jax.Array | None = None,
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
    inside `jax.shard_map`, after `append_kv` has put the new tokens into the cache. The letters are those of `jax.nn`:
    B sequences, T new tokens, N query heads, K key/value heads (N is a multiple of K), H the head size, and S the keys
    of a sequence that a rank has room for.

    Args:
      query: [B, N, H] or [B, T, N, H], the same on every rank. The T tokens are the last T of their sequence. A token
        does not attend to later ones.
      key: this rank's part, [B, S, K, H], or in the layout of `kv_layout`. The dtype is that of query, or int8,
        float8_e4m3fn or float8_e5m2 with a scale.
      value: like key. Its head size Hv may differ.
      axis_name: the mesh axis, or axes, along which the cache is sharded.
      scale: multiplies the logits. None means 1 / sqrt(H).
      key_value_seq_lengths: i32[B], keys of each sequence over all ranks, including the new tokens. It is the same on
        every rank. None: the cache is full.
      placement: "contiguous": rank r has the positions from r * S on. "round_robin": blocks of positions are dealt out,
        the first to rank 0, so that a growing cache loads all ranks alike.
      block_size: positions in a block of "round_robin". None means a page, or without pages the largest power of 2 up
        to 64 that divides S.
      kv_layout: "BSKH" or "BKSH".
      block_tables: i32[B, pages of a sequence], for a paged cache: the pages of this rank that hold the sequence, in
        order. Then `key` and `value` are pools [pages, page_size, K, H] (or [pages, K, page_size, H]), and S is
        page_size times the pages of a sequence.
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
    axes = check_axes(axis_name, "decode_attention")
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
        head_major=kv_layout == "BKSH",
        scale=_scale(query.shape[-1]) if scale is None else _static("scale", scale, "a number", float),
        window=_window(local_window_size),
        soft_cap=None if logits_soft_cap is None else _static("logits_soft_cap", logits_soft_cap, "a number", float),
        by_heads=output == "heads",
        dtype=np.dtype(preferred_element_type or query.dtype),
    )
    operands = {
        "query": query,
        "key": key,
        "value": value,
        "lengths": key_value_seq_lengths,
        "tables": block_tables,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "sinks": sinks,
    }
    operands = {name: jnp.asarray(x) for name, x in operands.items() if x is not None}
    world = lax.axis_size(axes)
    _check_operands(operands, spec, world, output)
    check_sharded("decode_attention", key, value, block_tables, axes)
    params = {"axes": axes, "names": tuple(operands), "spec": spec}
    settings = settings_of("decode_attention", VARIANTS, config)
    reasons = _unsupported(operands, spec)
    if takes_reference("decode_attention", [query, key, value], implementation, reasons):
        out, residual = reference(*operands.values(), **params)
    else:
        out, residual = decode_attention_p.bind(
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
    base = _finite(jnp.maximum(residual, other_residual))
    weight, other_weight = jnp.exp(residual - base), jnp.exp(other_residual - base)
    total = weight + other_weight
    merged = out.astype(jnp.float32) * weight[..., None] + other.astype(jnp.float32) * other_weight[..., None]
    return _normalised(merged, total).astype(out.dtype), base + _log(total)


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
        if spec.head_major:
            x = jnp.swapaxes(x, 1, 2)
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
    positions = spec.placement.positions(rank, world)[None, None]  # [1, 1, S]
    lengths = given.get("lengths", jnp.full((b,), world * spec.placement.slots)).astype(jnp.int32)
    of_token = lengths[:, None, None] - t + jnp.arange(t)[None, :, None]  # [B, T, 1]
    seen = positions <= of_token  # [B, T, S]
    if spec.window is not None:
        seen &= positions >= of_token - spec.window
    logits = jnp.where(seen[:, None, None], logits, -jnp.inf)

    # The results are the same whatever is subtracted, so their derivatives take it for a constant.
    top = lax.stop_gradient(jnp.max(logits, axis=-1, initial=-jnp.inf))  # [B, K, G, T]
    weights = jnp.exp(logits - _finite(top)[..., None])
    total = jnp.sum(weights, axis=-1)
    # Behind the last key the cache and its scales may hold anything, and 0 * NaN is NaN.
    scales = jnp.where(seen[:, None, None], scale_of("value_scale"), 0)
    # The largest scale goes to the sum: times the weights it might be too small for f16.
    unit = lax.stop_gradient(jnp.max(jnp.abs(scales), axis=-1, keepdims=True, initial=0))
    unit = jnp.where(unit == 0, 1, unit)
    weights = (weights * scales / unit).astype(query.dtype)
    values = jnp.where((positions[0] < lengths[:, None])[:, :, None, None], values, 0)
    acc = jnp.einsum("bkgts,bskh->bkgth", weights, values, precision=precision, preferred_element_type=jnp.float32)
    acc = acc * unit

    def exchange(x: jax.Array) -> jax.Array:
        """[B, K, G, T, ...] -> [world, B, N or N / world, T, ...]."""
        x = x.reshape(b, n, *x.shape[3:])
        if spec.by_heads:
            x = jnp.moveaxis(x.reshape(b, world, n // world, *x.shape[2:]), 1, 0)
            return lax.all_to_all(x, axes, 0, 0, tiled=True)
        # With check_vma=False, shard_map counts on the derivative of the other kind. lax does not lower a gather of
        # symbolic shapes along a new dimension.
        return lax.all_gather(x[None], axes, tiled=True, to="invarying" if varying(x) else "varying")

    tops = exchange(top)
    sinks = given.get("sinks", jnp.full((n,), -jnp.inf)).astype(jnp.float32)[None, :, None]
    if spec.by_heads:
        sinks = lax.dynamic_slice_in_dim(sinks, rank * (n // world), n // world, axis=1)
    base = _finite(jnp.maximum(jnp.max(tops, axis=0), sinks))
    parts = jnp.exp(tops - base[None])
    total = jnp.sum(parts * exchange(total), axis=0) + jnp.exp(sinks - base)
    acc = jnp.sum(parts[..., None] * exchange(acc), axis=0)
    out = _normalised(acc, total)
    return [jnp.swapaxes(out, 1, 2).astype(spec.dtype), jnp.swapaxes(base + _log(total), 1, 2)]


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
    if reasons := _unsupported(given, spec):
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
    )


def _scale_kind(scale: Any) -> str:
    if scale is None:
        return "none"
    return {0: "tensor", 1: "head"}.get(scale.ndim, "token")


def _finite(x: jax.Array) -> jax.Array:
    """x with 0 in place of -inf, to be subtracted from -inf; a constant for derivatives."""
    return lax.stop_gradient(jnp.where(jnp.isneginf(x), 0.0, x))


def _log(x: jax.Array) -> jax.Array:
    """The logarithm of x, which is not negative; of 0 it is -inf, with a derivative of 0 in place of 0 / 0."""
    return jnp.where(x == 0, -jnp.inf, jnp.log(jnp.where(x == 0, 1.0, x)))


def _normalised(acc: jax.Array, total: jax.Array) -> jax.Array:
    """acc [..., H] over total [...], and 0 where there was no key."""
    return jnp.where(total[..., None] == 0, 0.0, acc / jnp.where(total == 0, 1.0, total)[..., None])


def _static[T](name: str, x: Any, kind: str, convert: Callable[[Any], T]) -> T:
    """A parameter that is compiled into the program; raises TypeError if it is none of its kind."""
    try:
        return convert(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"decode_attention takes {kind} for {name}, known when it is traced, not {x!r}.") from error


def _scale(head_size: int) -> float:
    """The usual scale of the logits."""
    if jax.export.is_symbolic_dim(head_size):
        raise TypeError(
            f"decode_attention takes scale as a number here, because its default, 1 / sqrt(H), is compiled into the "
            f"program, and the head size of query is symbolic, {head_size}."
        )
    return head_size**-0.5


def _window(size: int | tuple[int, int] | None) -> int | None:
    """Positions before a token that it attends to; None for all."""
    if size is None:
        return None
    one = size[0] if isinstance(size, tuple) and len(size) == 2 else size
    before = _static("local_window_size", one, "an integer or a pair of integers", operator.index)
    if before < 0:
        raise ValueError(f"decode_attention takes a local_window_size of 0 or more positions, not {size}.")
    return before if before < np.iinfo(np.int32).max else None


_QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")


def _check_operands(operands: Mapping[str, jax.Array], spec: Spec, world: int, output: str) -> None:
    """Raises ValueError if the operands do not fit together."""
    query, key, value = operands["query"], operands["key"], operands["value"]
    k = spec.kv_heads
    wrong = []
    b, _, n, h = query.shape
    for name, dtype in (("query", query.dtype), ("preferred_element_type", spec.dtype)):
        if not jnp.issubdtype(dtype, jnp.floating):
            wrong.append(f"{name} must be floating-point, not {dtype}")
    if not k or n % k:
        wrong.append(f"query has {n} heads, which is no multiple of the {k} heads of key")
    if key.shape[3] != h:
        wrong.append(f"query has heads of size {h} and key of {key.shape[3]}")
    wrong += cache_faults(KVCache(key, value, operands.get("key_scale"), operands.get("value_scale")), k)
    if output not in OUTPUTS:
        wrong.append(f"there is no output {output!r} (choose one of {', '.join(map(repr, OUTPUTS))})")
    if spec.by_heads and n % world:
        wrong.append(f'output="heads" deals out {n} heads to {world} ranks, which does not come out even')
    sequences = operands["tables"].shape[0] if "tables" in operands else key.shape[0]
    if sequences != b:
        what = "block_tables" if "tables" in operands else "key"
        wrong.append(f"query is of {b} sequences and {what} of {sequences}")
    if "lengths" in operands:
        lengths = operands["lengths"]
        if lengths.shape != (b,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
            wrong.append(f"key_value_seq_lengths must be i32[{b}], not {lengths.dtype}{list(lengths.shape)}")
    if "sinks" in operands and operands["sinks"].shape != (n,):
        wrong.append(f"sinks must be [{n}], not {list(operands['sinks'].shape)}")
    if spec.soft_cap is not None and not spec.soft_cap > 0:
        wrong.append(f"logits_soft_cap must be positive, not {spec.soft_cap}")
    if wrong:
        raise ValueError(f"decode_attention cannot take these arguments: {'; '.join(wrong)}.")


def _unsupported(operands: Mapping[str, Any], spec: Spec) -> list[str]:
    """All that keeps the kernel from taking these operands."""
    query, key, value = operands["query"], operands["key"], operands["value"]
    if reasons := symbolic(*operands.values()):
        return reasons
    if query.dtype.name not in DTYPES:
        reasons.append(Lasting(f"it takes a query of {', '.join(DTYPES)}, not {query.dtype}: cast it"))
    elif key.dtype != query.dtype and key.dtype.name not in _QUANTISED:
        reasons.append(
            Lasting(
                f"it takes a cache of the query's dtype, {', '.join(_QUANTISED)}, not {key.dtype} with {query.dtype}: "
                "cast the query"
            )
        )
    if spec.dtype.name not in DTYPES:
        reasons.append(Lasting(f"it gives {', '.join(DTYPES)}, not {spec.dtype}: cast the result"))
    if max(query.shape[-1], value.shape[-1]) > 256:
        reasons.append(f"it takes heads of at most 256, not {query.shape[-1]} and {value.shape[-1]}")
    if 0 in query.shape or 0 in key.shape or 0 in value.shape:
        reasons.append(f"an operand is empty: {list(query.shape)}, {list(key.shape)}, {list(value.shape)}")
    return reasons


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
    unusual = spec.page_size, spec.head_major, spec.soft_cap, spec.by_heads, set(names) - _USUAL_OPERANDS
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


def _dimensions(*operands: Any, names: tuple[str, ...], **_: Any) -> tuple[Labels, Labels]:
    """Sequences are independent of each other, but for the pages of a paged cache."""
    of_sequences = {"query", "lengths", "tables"}
    if "tables" not in names:
        of_sequences |= {"key", "value"}
        # Those of tokens are a part of the cache; others are the same for all sequences.
        of_sequences |= {name for name, x in zip(names, operands) if name.endswith("scale") and len(x.shape) > 2}

    def labels(dimensions: int, by_sequence: bool) -> list[str | None]:
        return ["sequence" if i == 0 and by_sequence else None for i in range(dimensions)]

    ins = [labels(len(x.shape), name in of_sequences) for name, x in zip(names, operands)]
    return ins, [labels(4, True), labels(3, True)]


decode_attention_p = collective(
    "decode_attention",
    reference=reference,
    fused=fused,
    slower=_slower,
    dimensions=_dimensions,
    case=case,
    batch=batch,
)
