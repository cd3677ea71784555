"""A whole layer of experts, forward, and with all its gradients; and its products alone.

Ranks have experts of their own, or some columns of all experts (`moe_tensor`). Then a few tokens lie on all ranks, as
in a decode step. Routing is drawn, and read on the device. The floor of a shape is `dense`, measured in the same run:
the three products of a rank as XLA's batched ones, of as many rows in groups of equal size. For few tokens that is the
reading of the weights. Nothing travels in it, and no row is sorted. The capacity is what the busiest rank needs:
nothing is dropped.

XLA's peer is the same layer by `lax.ragged_dot`, which multiplies all rows by all experts of a rank and takes as much
memory; so a chain of it is short.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from benchmarks.operation import AXIS, DTYPE, Config, Implementation, Operands, Operation, fused, normal
from benchmarks.timing import measure_bandwidths
from jaxtaxfree.ops.moe.shapes import SHAPES, TINY_SHAPES
from jaxtaxfree.ops.shapes import MoeShape

# Of a rank, x: tokens [tokens, d]. y: their experts and weights [tokens, top_k]; w_gate, w_up [experts, d, f], w_down
# [experts, f, d]; a cotangent like x; and an array as long as the capacity, of which only that is read.
# The results of experts are rounded, and their sum may be less than each of them; so may gradients of products.
_make = partial(Implementation, in_specs=(P(AXIS), (P(AXIS),) * 7), out_spec=P(AXIS), tolerance=2e-2)

# Capacities are multiples of it, so that most routings take the same kernels.
CAPACITY = 1024
# Of a rank, where ranks have columns of experts: fewer are on all ranks.
SHARDED_TOKENS = 512


def _tokens(tokens: int, parallel: str) -> str:
    return "replicated" if parallel == "tensor" and tokens < SHARDED_TOKENS else "sharded"


def _rows(tokens: int, choices: int, world: int, parallel: str) -> int:
    """That a rank multiplies, if all have as many."""
    gathered = parallel == "tensor" and _tokens(tokens, parallel) == "sharded"
    return tokens * choices * (world if gathered else 1)


def _moe(x: jax.Array, y: Any, *, parallel: str, implementation: str, config: Config | None = None) -> jax.Array:
    experts, weights, w_gate, w_up, w_down = y[:5]
    how: dict[str, Any] = {"parallel": parallel, "tokens": _tokens(x.shape[0], parallel), "capacity": y[-1].shape[0]}
    how |= {"implementation": implementation, "config": config}
    return jtf.moe(x, experts, weights, w_gate, w_up, w_down, AXIS, **how)


def _dense(x: jax.Array, y: Any, *, parallel: str) -> jax.Array:
    """As many rows as a rank's experts have on average, in groups of equal size."""
    w_gate, w_up, w_down = y[2:5]
    groups = w_up.shape[0]
    rows = max(1, _rows(x.shape[0], y[0].shape[1], lax.axis_size(AXIS), parallel) // groups)
    each = jnp.broadcast_to(x[: min(rows, x.shape[0])], (groups, min(rows, x.shape[0]), x.shape[1]))
    each = jnp.tile(each, (1, -(-rows // each.shape[1]), 1))[:, :rows]
    hidden = jax.nn.silu(jnp.einsum("gmd,gdf->gmf", each, w_gate)) * jnp.einsum("gmd,gdf->gmf", each, w_up)
    out = jnp.einsum("gmf,gfd->gmd", hidden, w_down).reshape(-1, x.shape[1])
    return out[: x.shape[0]] if out.shape[0] >= x.shape[0] else jnp.pad(out, ((0, x.shape[0] - out.shape[0]), (0, 0)))


def _by_experts(x: jax.Array, y: Any, *, parallel: str) -> jax.Array:
    """What is expected: each expert multiplies all tokens, and its results are weighted."""
    experts, weights = y[:2]
    along = (0, 0, 0) if parallel == "expert" else (2, 2, 1)
    w_gate, w_up, w_down = (lax.all_gather(w, AXIS, axis=axis, tiled=True) for w, axis in zip(y[2:5], along))

    multiply = partial(jnp.matmul, preferred_element_type=jnp.float32)

    def with_expert(i: Any, out: jax.Array) -> jax.Array:
        hidden = (jax.nn.silu(multiply(x, w_gate[i])) * multiply(x, w_up[i])).astype(x.dtype)
        factor = jnp.sum(jnp.where(experts == i, weights, 0), axis=1, keepdims=True)
        return out + factor * multiply(hidden, w_down[i])

    zeros = lax.pcast(jnp.zeros(x.shape, jnp.float32), AXIS, to="varying")
    return lax.fori_loop(0, w_up.shape[0], with_expert, zeros).astype(x.dtype)


def _gradients(x: jax.Array, y: Any, *, call: Any, **settings: Any) -> tuple[jax.Array, ...]:
    """The result, the gradients of x and of weights (as one row), and a row of those of each expert's matrices.

    No sum over all of a gradient: terms that cancel leave their rounding alone.
    """
    experts, *weights, ct, capacity = y

    def layer(x: jax.Array, *weights: jax.Array) -> jax.Array:
        return call(x, (experts, *weights, capacity), **settings)

    out, backward = jax.vjp(layer, x, *weights)
    # As in `mlp.py`: the cotangent comes after the forward pass, and all gradients are computed whole.
    out, ct = lax.optimization_barrier((out, ct))
    out, (x_bar, weights_bar, *bars) = lax.optimization_barrier((out, backward(ct)))
    return out, x_bar, weights_bar.reshape(1, -1), *(bar[:, 0] for bar in bars)


class Moe(Operation):
    name = "moe"
    shapes = SHAPES
    tiny_shapes = TINY_SHAPES
    sizes = MoeShape.sizes
    parts = ("dense",)
    fewest_calls = 2
    ceiling = "GB/s received by a rank"
    heading = "tokens of a rank, D, F, experts, choices of a token, routing"
    parallel: ClassVar[str] = "expert"

    def call(self, function: Any) -> Any:
        """Of a layer that is a function (x, y), what is timed."""
        return function

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        """A configuration is that of `ragged_dot`."""
        layer = partial(_moe, parallel=self.parallel)
        implementations = (
            _make(name="xla/default", call=self.call(partial(layer, implementation="xla"))),
            _make(name="dense", call=self.call(partial(_dense, parallel=self.parallel))),
            *fused(_make, self.call(partial(layer, implementation="fused")), configs),
        )
        return {implementation.name: implementation for implementation in implementations}

    def expected_from(self, implementation: Implementation) -> Implementation:
        # Nothing else gives what these products alone give.
        if implementation.name == "dense":
            return implementation
        return _make(name="all", call=self.call(partial(_by_experts, parallel=self.parallel)))

    def operands(self, shape: MoeShape, mesh: Mesh, calls: int, turns: int) -> Operands:
        world, sharding = mesh.shape[AXIS], NamedSharding(mesh, P(AXIS))
        put = partial(jax.jit, out_shardings=sharding)
        copies = world if _tokens(shape.tokens, self.parallel) == "replicated" else 1
        rows = world * shape.tokens // copies
        share = np.full(shape.experts, 1 / shape.experts)
        if shape.routing == "dirichlet":
            share = np.random.default_rng(0).dirichlet(np.ones(shape.experts))
        keys = jax.random.split(jax.random.key(0), calls + 6 * turns)
        of_tokens = lambda make: put(lambda key: jnp.tile(make(key), (copies, 1)))  # noqa: E731

        def experts(key: jax.Array) -> jax.Array:  # each token draws without putting back
            drawn = jax.random.gumbel(key, (rows, shape.experts)) + jnp.log(share)
            return lax.top_k(drawn, shape.top_k)[1].astype(jnp.int32)

        def weights(key: jax.Array) -> jax.Array:
            return jax.nn.softmax(jax.random.normal(key, (rows, shape.top_k)))

        here, f = self.experts_of_rank(shape, world)

        def matrices(k: int, n: int, terms: int) -> Any:
            make = normal((world * here * k, n), sharding)
            scale = put(lambda x: (x * terms**-0.5).astype(DTYPE).reshape(world * here, k, n))
            return lambda key: scale(make(key))

        make_x = of_tokens(lambda key: jax.random.normal(key, (rows, shape.d), DTYPE))
        make_up, make_down = matrices(shape.d, f, shape.d), matrices(f, shape.d, shape.f)
        makers = (of_tokens(experts), of_tokens(weights), make_up, make_up, make_down, make_x)
        ys = tuple(
            tuple(make(key) for make, key in zip(makers, some)) for some in keys[calls:].reshape(turns, len(makers))
        )
        needed = _rows(shape.tokens, shape.top_k, world, self.parallel)
        if self.parallel == "expert":
            needed = max(int(np.bincount(np.asarray(y[0]).reshape(-1) // here, minlength=world).max()) for y in ys)
        capacity = put(lambda: jnp.zeros(world * (needed + -needed % CAPACITY), jnp.int8))()
        return Operands(
            xs={"sharded": tuple(make_x(key) for key in keys[:calls])}, ys=tuple((*y, capacity) for y in ys)
        )

    def experts_of_rank(self, shape: MoeShape, world: int) -> tuple[int, int]:
        """How many experts a rank has, and how many columns of each."""
        return (shape.experts // world, shape.f) if self.parallel == "expert" else (shape.experts, shape.f // world)

    def calls_per_program(self, shape: MoeShape, world: int) -> int:
        return min(4, super().calls_per_program(shape, world))

    def is_repeated(self, shape: MoeShape) -> bool:
        """Of few tokens the ten kernels of a layer take less than their launches one by one from one host."""
        return shape.tokens < SHARDED_TOKENS

    def y_bytes(self, shape: MoeShape, world: int) -> int:
        return shape.weight_bytes(world, jnp.dtype(DTYPE).itemsize)

    def needed_for_floor(self) -> tuple[str, ...]:
        return ("dense",)

    def fastest_seconds(self, shape: MoeShape, world: int) -> float:
        rows = _rows(shape.tokens, shape.top_k, world, self.parallel)
        flops = 6 * rows * shape.d * self.experts_of_rank(shape, world)[1]
        return max(flops / 800e12, self.y_bytes(shape, world) / 4.8e12)

    def ceilings(self, mesh: Mesh, on_gpu: bool) -> dict[str, float]:
        return measure_bandwidths(mesh, (256 if on_gpu else 1) * 2**20)

    def floor_us(self, shape: MoeShape, world: int, medians: Mapping[str, float], bandwidth: float) -> float | None:
        """The products alone."""
        del shape, world, bandwidth
        return medians.get("dense")

    def check_shape(self, shape: MoeShape, world: int) -> None:
        if self.parallel == "expert" and shape.experts % world:
            raise ValueError(f"{shape.experts} experts are not shared out among {world} ranks")
        if self.parallel == "tensor" and shape.f % world:
            raise ValueError(f"{shape.f} columns of an expert are not shared out among {world} ranks")

    def parse_shape(self, text: str) -> MoeShape:
        """TOKENS,D,F,EXPERTS,TOP_K or the same and ROUTING."""
        *numbers, routing = text.split(",") if text.count(",") == 5 else [*text.split(","), "even"]
        if (
            len(numbers) != 5
            or not all(x.isdecimal() and int(x) for x in numbers)
            or routing not in ("even", "dirichlet")
        ):
            raise ValueError(f"{text!r} is not TOKENS,D,F,EXPERTS,TOP_K or with ROUTING, which is even or dirichlet")
        tokens, d, f, experts, top_k = map(int, numbers)
        listed = (shape for shape in self.shapes if self.sizes_of(shape) == (tokens, d, f, experts, top_k, routing))
        return next(listed, MoeShape.of(tokens, d, f, experts, top_k, routing))


class MoeGradients(Moe):
    """Forward and backward."""

    name = "moe_gradients"
    shapes = tuple(shape for shape in SHAPES if shape.tokens >= 4096)

    def call(self, function: Any) -> Any:
        return partial(_gradients, call=function)

    def fastest_seconds(self, shape: MoeShape, world: int) -> float:
        return 3 * super().fastest_seconds(shape, world)


class MoeTensor(Moe):
    """Ranks have columns of all experts."""

    name = "moe_tensor"
    parallel = "tensor"
