"""Forward and backward of a tensor-parallel MLP: `all_gather_matmul`, SiLU, `matmul_reduce_scatter`, and all gradients.

The floor of a shape is the longer of two times of the same run: the same products with operands that are gathered
already and sums of a rank alone (`gemm`), and the bytes that a rank at least receives or sends in bf16 (a gather and a
scatter forward, and the same backward) over the best bandwidth that a plain copy between devices reached.
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
from benchmarks.matmuls import MatmulOperation, gather_then_matmul, matmul_then_scatter
from benchmarks.operation import (
    AXIS,
    DTYPE,
    Config,
    Implementation,
    Operands,
    by_flags,
    fused,
    normal,
)
from benchmarks.shapes import MLP_GRADIENTS, MLP_GRADIENTS_TINY
from jaxtaxfree.ops.shapes import MatmulShape

Weights = tuple[jax.Array, jax.Array, jax.Array]  # up [K, N / world], down [N / world, K], cotangent [M / world, K]


def _gradients(gather_matmul: Any, matmul_scatter: Any, x: jax.Array, weights: Weights) -> jax.Array:
    """The gradient of x [M / world, K], with a trace of those of the weights, which are computed as well."""
    up, down, ct = weights

    def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return matmul_scatter(jax.nn.silu(gather_matmul(x, up)), down)

    out, backward = jax.vjp(mlp, x, up, down)
    # The cotangent comes after the forward pass, from the layers behind: XLA must not gather it any earlier.
    out, ct = lax.optimization_barrier((out, ct))
    # Behind a barrier, or XLA would compute no more of the gradients than what is read of them.
    out, (x_bar, up_bar, down_bar) = lax.optimization_barrier((out, backward(ct)))
    return x_bar + (out[0, 0] + up_bar[0, 0] + down_bar[0, 0]).astype(x_bar.dtype)


def _gathered_gemms(x: jax.Array, weights: Weights) -> jax.Array:
    up, down, ct = weights
    return _gradients(jnp.matmul, jnp.matmul, x, (up, down, jnp.tile(ct, (x.shape[0] // ct.shape[0], 1))))


def _fused(x: jax.Array, weights: Weights, *, config: Config | None = None) -> jax.Array:
    keywords = {"axis_name": AXIS, "implementation": "fused", "config": config}
    return _gradients(
        lambda x, w: jtf.all_gather_matmul(x, w, **keywords),
        lambda y, w: jtf.matmul_reduce_scatter(y, w, **keywords),
        x,
        weights,
    )


_xla = partial(_gradients, gather_then_matmul, matmul_then_scatter)
_weights = (P(None, AXIS), P(AXIS, None), P(AXIS, None))
_sharded = partial(Implementation, in_specs=(P(AXIS, None), _weights), out_spec=P(AXIS, None))

REFERENCE = _sharded(name="xla/default", call=_xla)


class MlpGradients(MatmulOperation):
    name = "mlp_gradients"
    shapes = MLP_GRADIENTS
    tiny_shapes = MLP_GRADIENTS_TINY
    parts = ("gemm",)

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        """A configuration is for both operations, but not for the kernels of their gradients."""
        implementations = (
            *by_flags(_sharded, "xla", _xla),
            Implementation(
                name="gemm",
                call=_gathered_gemms,
                in_specs=(P(None, None), _weights),
                out_spec=P(AXIS, None),
                takes="gathered",
            ),
            *fused(_sharded, _fused, configs),
        )
        return {implementation.name: implementation for implementation in implementations}

    def expected_from(self, implementation: Implementation) -> Implementation:
        # Nothing else gives what the products of a rank alone give.
        return implementation if implementation.name == "gemm" else REFERENCE

    def operands(self, shape: MatmulShape, mesh: Mesh, calls: int, turns: int) -> Operands:
        rows, columns, whole = (NamedSharding(mesh, spec) for spec in (P(AXIS, None), P(None, AXIS), P(None, None)))
        keys = jax.random.split(jax.random.key(0), calls + 3 * turns)
        make = normal((shape.m, shape.k), rows)
        xs = tuple(make(key) for key in keys[:calls])
        gather = jax.jit(lambda x: x, out_shardings=whole)
        scale = jax.jit(lambda x: (x / 64).astype(DTYPE))
        make_up, make_down = normal((shape.k, shape.n), columns), normal((shape.n, shape.k), rows)
        ys = tuple(
            (scale(make_up(up)), scale(make_down(down)), make(ct)) for up, down, ct in keys[calls:].reshape(turns, 3)
        )
        # One at a time, because virtual CPU devices deadlock over two collective programs in flight.
        gathered = tuple(jax.block_until_ready(gather(x)) for x in xs)
        return Operands(xs={"sharded": xs, "gathered": gathered}, ys=ys)

    def usual_turns(self, shape: MatmulShape, calls: int) -> int:
        return 1

    def y_bytes(self, shape: MatmulShape, world: int) -> int:
        return 2 * super().y_bytes(shape, world)

    def fastest_seconds(self, shape: MatmulShape, world: int) -> float:
        return 6 * shape.flops(world) / 800e12

    def wire_bytes(self, shape: MatmulShape, world: int) -> int:
        return 4 * shape.wire_bytes(world, jnp.dtype(DTYPE).itemsize)
