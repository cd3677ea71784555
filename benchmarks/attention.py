"""`decode_attention`, and what it is compared with.

One new token of each sequence, bf16, every cache full, the result on every rank. The implementations:

fused: the kernel.
xla/...: the reference of the operation, by XLA: two einsums, all-gathers, a merge.
xla_unmasked: the same without lengths, so with nothing to mask: what a caller whose caches are full may write.
local: the same kernel along an axis of size 1, each rank over its own keys, with its log-sum-exp. It is the part of
    the operation that needs no peer.
local+gather/...: that, `lax.all_gather` of what it returns, and a merge by XLA. The fairest bulk-synchronous form.

The calls of a chain have caches of their own, as the layers of a model have, so nothing of a cache is left in the L2
cache (50 MB on an H200) from one call of it to the next; and the chain is repeated in a loop, as a decode step is.

The floor of a shape is the time to read a rank's keys and values once, at the best bandwidth that a plain reduction
or copy of device memory reached in the same run.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from benchmarks.layout import Row, attention
from benchmarks.operation import (
    AXIS,
    DEPENDENT,
    DTYPE,
    ONE,
    Config,
    Implementation,
    Operands,
    Operation,
    by_flags,
    fused,
    normal,
)
from benchmarks.timing import measure_memory_bandwidths
from jaxtaxfree.ops import register
from jaxtaxfree.ops.shapes import AttentionShape

# Microseconds that a call is to take on 4 H200, by (b, s).
TARGETS_US = {
    (1, 8192): 16,
    (1, 32768): 40,
    (1, 131072): 140,
    (8, 8192): 75,
    (8, 32768): 275,
    (16, 8192): 140,
}
# What they are computed from.
USUAL_BANDWIDTH = 4.3e12

# Keys and values [B, S, K, H] of this rank, lengths i32 [B] over all ranks, and those of this rank alone.
Cache = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _fused(query: jax.Array, cache: Cache, *, config: Config | None = None) -> jax.Array:
    return register.OPERATIONS["decode_attention"].call(
        query, *cache[:3], axis_name=AXIS, implementation="fused", config=config
    )


def _xla(query: jax.Array, cache: Cache) -> jax.Array:
    return register.OPERATIONS["decode_attention"].call(query, *cache[:3], axis_name=AXIS, implementation="xla")


def _local(query: jax.Array, cache: Cache) -> tuple[jax.Array, jax.Array]:
    """f32 [B, N, H] over this rank's keys, and its log-sum-exp [B, N]."""
    key, value, _, own_lengths = cache
    return jtf.decode_attention(
        query,
        key,
        value,
        ONE,
        key_value_seq_lengths=own_lengths,
        return_residual=True,
        preferred_element_type=jnp.float32,
        implementation="fused",
    )


def _merge(out: jax.Array, residual: jax.Array) -> jax.Array:
    """[B, N, H] of all ranks, from this rank's f32 [B, N, H] and [B, N]."""
    outs, residuals = lax.all_gather((out, residual), AXIS)
    weights = jax.nn.softmax(residuals, axis=0)
    return jnp.sum(weights[..., None] * outs, axis=0).astype(DTYPE)


def _local_then_gather(query: jax.Array, cache: Cache) -> jax.Array:
    return _merge(*_local(query, cache))


def _einsum(query: jax.Array, cache: Cache, dtype: Any = DTYPE) -> tuple[jax.Array, jax.Array]:
    """What `_local` computes for full caches, in operands of `dtype`."""
    key, value, *_ = cache
    b, n, h = query.shape
    grouped = query.reshape(b, key.shape[2], -1, h).astype(dtype)
    einsum = partial(
        jnp.einsum,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
    )
    logits = einsum("bkgh,bskh->bkgs", grouped, key.astype(dtype)) * h**-0.5
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = einsum("bkgs,bskh->bkgh", weights.astype(dtype), value.astype(dtype)) / total
    return out.reshape(b, n, h), (top + jnp.log(total)).reshape(b, n)


def _unmasked(query: jax.Array, cache: Cache) -> jax.Array:
    return _merge(*_einsum(query, cache))


def _expected(query: jax.Array, cache: Cache) -> jax.Array:
    # Spelled out rather than called through jaxtaxfree: a reference must not depend on what it judges.
    outs, residuals = lax.all_gather(_einsum(query, cache, jnp.float32), AXIS)
    return jnp.sum(jax.nn.softmax(residuals, axis=0)[..., None] * outs, axis=0)


_QUERY, _KV = P(None, None, None), P(None, AXIS, None, None)
_all = partial(Implementation, in_specs=(_QUERY, (_KV, _KV, P(None), P(AXIS))), out_spec=P(None, None, None))
# Each rank has a result of its own: stacked along the sequences.
_own = partial(Implementation, in_specs=(_QUERY, (_KV, _KV, P(None), P(AXIS))), out_spec=P(AXIS, None, None))

REFERENCE = _all(name="f32", call=_expected)
LOCAL_REFERENCE = _own(name="local f32", call=lambda query, cache: _einsum(query, cache, jnp.float32)[0])


class DecodeAttention(Operation):
    name = "decode_attention"
    shapes = register.OPERATIONS[name].shapes
    tiny_shapes = register.OPERATIONS[name].tiny_shapes
    sizes = ("b", "s", "n", "kv_heads", "h")
    parts = ("local",)
    peers = ("xla", "local+gather")
    # Together the caches of a chain are many times the L2 cache.
    fewest_calls = 16
    ceiling = "GB/s of device memory"
    heading = "batch, keys a rank"
    digits = 1

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        implementations = (
            *by_flags(_all, "xla", _xla, DEPENDENT),
            _all(name="xla_unmasked", call=_unmasked),
            _own(name="local", call=lambda query, cache: _local(query, cache)[0]),
            *by_flags(_all, "local+gather", _local_then_gather, DEPENDENT),
            *fused(_all, _fused, configs),
        )
        return {implementation.name: implementation for implementation in implementations}

    def expected_from(self, implementation: Implementation) -> Implementation:
        return LOCAL_REFERENCE if implementation.name == "local" else REFERENCE

    def fastest_seconds(self, shape: AttentionShape, world: int) -> float:
        del world
        return shape.kv_bytes() / 4.8e12

    def is_repeated(self, shape: AttentionShape) -> bool:
        del shape
        return True

    def usual_turns(self, shape: AttentionShape, calls: int) -> int:
        return calls

    def y_bytes(self, shape: AttentionShape, world: int) -> int:
        del world
        return shape.kv_bytes()

    def operands(self, shape: AttentionShape, mesh: Mesh, calls: int, turns: int) -> Operands:
        world = mesh.shape[AXIS]
        slots = world * shape.s
        make_query = normal((shape.b, shape.n, shape.h), NamedSharding(mesh, _QUERY))
        make_kv = normal((shape.b, slots, shape.kv_heads, shape.h), NamedSharding(mesh, _KV))
        lengths = jax.device_put(jnp.full((shape.b,), slots, jnp.int32), NamedSharding(mesh, P(None)))
        own_lengths = jax.device_put(jnp.full((world * shape.b,), shape.s, jnp.int32), NamedSharding(mesh, P(AXIS)))
        keys = jax.random.split(jax.random.key(0), (calls, 3))
        return Operands(
            xs={"sharded": tuple(make_query(key) for key in keys[:, 0])},
            ys=tuple((make_kv(key), make_kv(value), lengths, own_lengths) for key, value in keys[:turns, 1:]),
        )

    def ceilings(self, mesh: Mesh, on_gpu: bool) -> dict[str, float]:
        return measure_memory_bandwidths(mesh, 4 * 2**30 if on_gpu else 2**20)

    def floor_us(
        self, shape: AttentionShape, world: int, medians: Mapping[str, float], bandwidth: float
    ) -> float | None:
        """A rank's keys and values, read once."""
        del world, medians
        return shape.kv_bytes() / bandwidth * 1e6

    def parse_shape(self, text: str) -> AttentionShape:
        """B,S with the heads of the listed shapes, or B,S,N,K,H."""
        try:
            b, s, *heads = (int(size) for size in text.split(","))
            n, kv_heads, h = heads or self.sizes_of(self.shapes[0])[2:]
        except ValueError:
            raise ValueError(f"{text!r} is neither B,S nor B,S,N,K,H") from None
        listed = (shape for shape in self.shapes if self.sizes_of(shape) == (b, s, n, kv_heads, h))
        return next(listed, AttentionShape.of(b, s, n, kv_heads, h))

    def table(self, rows: Sequence[Row]) -> list[str]:
        return attention(rows, TARGETS_US)

    def remarks(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """How each shape stands to its target, and to reading its cache at the usual bandwidth."""
        remarks = []
        for row in rows:
            shape = self.parse_shape(",".join(map(str, self.sizes_of(row))))
            target = TARGETS_US.get((shape.b, shape.s))
            if row["implementation"] == "fused" and row["median_us"]:
                read = shape.kv_bytes() / USUAL_BANDWIDTH * 1e6
                remarks.append(
                    f"{shape.name}, {row['mode']}: fused {row['median_us']:.1f} us, {read:.1f} at "
                    f"{USUAL_BANDWIDTH / 1e12:g} TB/s ({read / row['median_us']:.2f}), target {target or 'none'}"
                )
        return remarks
