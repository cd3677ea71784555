"""`all_gather_matmul` with three right-hand sides: query, key and value of one gather.

Floors are those of a single product (`matmuls.py`), of the columns of all three. Decode shapes take turns between two
sets of weights. One set of Llama 3 8B that four GPUs share would stay in the L2 cache whole (13 MB), and so would two:
`--l2 cold` reads as much in between as the weights of other layers.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from benchmarks.matmuls import AllGatherMatmul
from benchmarks.operation import AXIS, DTYPE, Config, Implementation, Operands, by_flags, fused, normal
from benchmarks.shapes import ALL_GATHER_MATMUL_QKV, ALL_GATHER_MATMUL_QKV_TINY, QkvShape

Three = tuple[jax.Array, ...]  # of query, key and value

_columns = (P(None, AXIS),) * 3
# lhs [M, K] sharded on rows, rhs [K, N], [K, KV], [K, KV] and the results on columns.
_sharded = partial(Implementation, in_specs=(P(AXIS, None), _columns), out_spec=_columns)


def products(rows: jax.Array, weights: Three) -> Three:
    return tuple(jnp.matmul(rows, each) for each in weights)


def gather_then_products(lhs: jax.Array, weights: Three) -> Three:
    return products(lax.all_gather(lhs, AXIS, axis=0, tiled=True), weights)


def _one_kernel(lhs: jax.Array, weights: Three, *, config: Config | None = None) -> Three:
    return jtf.all_gather_matmul(lhs, tuple(weights), AXIS, implementation="fused", config=config)


def _three_kernels(lhs: jax.Array, weights: Three) -> Three:
    return tuple(jtf.all_gather_matmul(lhs, each, AXIS, implementation="fused") for each in weights)


REFERENCE = _sharded(name="xla/default", call=gather_then_products)
GEMM = Implementation(
    name="gemm", call=products, in_specs=(P(None, None), _columns), out_spec=_columns, takes="gathered"
)


class AllGatherMatmulQkv(AllGatherMatmul):
    name = "all_gather_matmul_qkv"
    shapes = ALL_GATHER_MATMUL_QKV
    tiny_shapes = ALL_GATHER_MATMUL_QKV_TINY
    sizes = ("m", "k", "n", "kv")
    heading = "M, K, N, KV"
    optional_peers = ()
    parts = ("gemm",)
    shared_out = ("m", "n", "kv")

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        implementations = (
            *by_flags(_sharded, "xla", gather_then_products),
            GEMM,
            _sharded(name="fused_three", call=_three_kernels),
            *fused(_sharded, _one_kernel, configs),
        )
        return {implementation.name: implementation for implementation in implementations}

    def expected_from(self, implementation: Implementation) -> Implementation:
        del implementation
        return REFERENCE

    def operands(self, shape: Any, mesh: Mesh, calls: int, turns: int) -> Operands:
        rows, columns, whole = (NamedSharding(mesh, spec) for spec in (P(AXIS, None), P(None, AXIS), P(None, None)))
        keys = jax.random.split(jax.random.key(0), calls + turns)
        make_lhs = normal((shape.m, shape.k), rows)
        make = [normal((shape.k, width), columns) for width in (shape.n, shape.kv, shape.kv)]
        gather = jax.jit(lambda lhs: lhs, out_shardings=whole)
        sharded = tuple(make_lhs(key) for key in keys[:calls])
        # One at a time, because virtual CPU devices deadlock over two collective programs in flight.
        gathered = tuple(jax.block_until_ready(gather(lhs)) for lhs in sharded)
        weights = tuple(tuple(map(lambda one, key: one(key), make, jax.random.split(key, 3))) for key in keys[calls:])
        return Operands(xs={"sharded": sharded, "gathered": gathered}, ys=weights)

    def y_bytes(self, shape: Any, world: int) -> int:
        return shape.k * shape.columns // world * jnp.dtype(DTYPE).itemsize

    def fastest_seconds(self, shape: Any, world: int) -> float:
        return max(shape.flops(world) / 800e12, self.y_bytes(shape, world) / 4.8e12)

    def parse_shape(self, text: str) -> QkvShape:
        try:
            m, k, n, kv = (int(size) for size in text.split(","))
        except ValueError:
            raise ValueError(f"{text!r} is not M,K,N,KV") from None
        listed = (shape for shape in self.shapes if self.sizes_of(shape) == (m, k, n, kv))
        return next(listed, QkvShape(name=f"{m}x{k}x{n}+2x{kv}", m=m, k=k, n=n, kv=kv))
