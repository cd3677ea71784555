"""`all_gather_matmul` and `matmul_reduce_scatter` along columns: activations that are sharded along their channels.

Floors and sizes are those of the forms along rows (`matmuls.py`): the same bytes cross the wire, and a rank's product
has as many operations.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from benchmarks.matmuls import DECODE_ROWS, GATHERED_GEMM, PARTIAL_GEMM, PRODUCT, AllGatherMatmul, MatmulReduceScatter
from benchmarks.operation import AXIS, Config, Implementation, Operands, by_flags, fused, normal

COLUMNS = P(None, AXIS)
# lhs [M, K] sharded along K, rhs [K, N] and the result along N.
_gather = partial(Implementation, in_specs=(COLUMNS, COLUMNS), out_spec=COLUMNS)
# lhs [M, K] and rhs [K, N] sharded along K, the result along N.
_scatter = partial(Implementation, in_specs=(COLUMNS, P(AXIS, None)), out_spec=COLUMNS)


def gather_then_matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return jnp.matmul(lax.all_gather(lhs, AXIS, axis=1, tiled=True), rhs)


def matmul_then_scatter(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return lax.psum_scatter(jnp.matmul(lhs, rhs), AXIS, scatter_dimension=1, tiled=True)


def _fused_gather(lhs: jax.Array, rhs: jax.Array, *, config: Config | None = None) -> jax.Array:
    return jtf.all_gather_matmul(lhs, rhs, AXIS, axis=1, implementation="fused", config=config)


def _fused_scatter(lhs: jax.Array, rhs: jax.Array, *, config: Config | None = None) -> jax.Array:
    return jtf.matmul_reduce_scatter(lhs, rhs, AXIS, scatter_dimension=1, implementation="fused", config=config)


GATHER_REFERENCE = _gather(name="xla/default", call=gather_then_matmul)
SCATTER_REFERENCE = _scatter(name="xla/default", call=matmul_then_scatter)


class AllGatherMatmulColumns(AllGatherMatmul):
    name = "all_gather_matmul_columns"
    shapes = tuple(shape for shape in AllGatherMatmul.shapes if shape.m > DECODE_ROWS)
    optional_peers = ()
    parts = ("gemm",)
    shared_out = ("k", "n")

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        implementations = (
            *by_flags(_gather, "xla", gather_then_matmul),
            GATHERED_GEMM,
            *fused(_gather, _fused_gather, configs),
        )
        return {implementation.name: implementation for implementation in implementations}

    def expected_from(self, implementation: Implementation) -> Implementation:
        del implementation
        return GATHER_REFERENCE

    def operands(self, shape, mesh: Mesh, calls: int, turns: int) -> Operands:
        columns, whole = NamedSharding(mesh, COLUMNS), NamedSharding(mesh, P(None, None))
        keys = jax.random.split(jax.random.key(0), calls + turns)
        make_lhs, make_rhs = normal((shape.m, shape.k), columns), normal((shape.k, shape.n), columns)
        gather = jax.jit(lambda lhs: lhs, out_shardings=whole)
        sharded = tuple(make_lhs(key) for key in keys[:calls])
        # One at a time, because virtual CPU devices deadlock over two collective programs in flight.
        gathered = tuple(jax.block_until_ready(gather(lhs)) for lhs in sharded)
        return Operands(xs={"sharded": sharded, "gathered": gathered}, ys=tuple(make_rhs(key) for key in keys[calls:]))


class MatmulReduceScatterColumns(MatmulReduceScatter):
    name = "matmul_reduce_scatter_columns"
    shapes = tuple(shape for shape in MatmulReduceScatter.shapes if shape.m > DECODE_ROWS)
    optional_peers = ()
    parts = ("gemm",)
    shared_out = ("k", "n")

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        implementations = (
            *by_flags(_scatter, "xla", matmul_then_scatter),
            PARTIAL_GEMM,
            *fused(_scatter, _fused_scatter, configs),
        )
        return {implementation.name: implementation for implementation in implementations}

    def expected_from(self, implementation: Implementation) -> Implementation:
        return PRODUCT if implementation.name == "gemm" else SCATTER_REFERENCE
