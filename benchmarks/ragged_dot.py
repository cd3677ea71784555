"""`ragged_dot` of the experts of one rank, its two gradients, and what they are compared with: XLA's, tokamax's, and a
batched dense product.

Every rank multiplies the rows of its own experts, and nothing travels. The floor of a shape is `dense`, XLA's batched
product of as many rows in groups of equal size, measured in the same run. Sizes of groups are read on the device. Each
gradient is a program of its own, without the product forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from benchmarks import tokamax_peer
from benchmarks.operation import AXIS, DTYPE, Config, Implementation, Operands, Operation, fused, normal
from benchmarks.timing import measure_bandwidths
from jaxtaxfree.ops.ragged_dot.shapes import SHAPES, TINY_SHAPES
from jaxtaxfree.ops.shapes import GroupedShape

# x: lhs [world * rows, d]. y: rhs [world * groups, d, f] and sizes [world * groups].
_make = partial(Implementation, in_specs=(P(AXIS), (P(AXIS), P(AXIS))), out_spec=P(AXIS))


def sizes_of(shape: GroupedShape) -> np.ndarray:
    """How many rows each expert of a rank has, i32[groups]; all rows are shared out."""
    share = np.full(shape.groups, 1 / shape.groups)
    if shape.routing == "dirichlet":
        share = np.random.default_rng(0).dirichlet(np.ones(shape.groups))
    return np.diff(np.round(np.cumsum(share) * shape.rows).astype(np.int32), prepend=0).astype(np.int32)


def _xla(x: jax.Array, y: Any) -> jax.Array:
    return lax.ragged_dot(x, *y)


def _dense(x: jax.Array, y: Any) -> jax.Array:
    rhs, _ = y
    rows = x.reshape(rhs.shape[0], -1, x.shape[1])
    return jnp.einsum("gmk,gkn->gmn", rows, rhs).reshape(x.shape[0], -1)


def _inside(sizes: jax.Array, i: Any, rows: int) -> jax.Array:
    """Which of so many rows are of group i, [rows, 1]."""
    row, end = jnp.arange(rows)[:, None], jnp.cumsum(sizes)[i]
    return (row >= end - sizes[i]) & (row < end)


def _masked(x: jax.Array, y: Any) -> jax.Array:
    """What is expected: a dense product for each group, of which its rows are taken."""
    rhs, sizes = y

    def with_group(i: Any, out: jax.Array) -> jax.Array:
        return jnp.where(_inside(sizes, i, x.shape[0]), jnp.matmul(x, rhs[i]), out)

    return lax.fori_loop(0, rhs.shape[0], with_group, jnp.zeros((x.shape[0], rhs.shape[2]), x.dtype))


def _by_groups(x: jax.Array, y: Any) -> jax.Array:
    rhs, _ = y
    return jnp.concatenate([jnp.matmul(rows, w) for rows, w in zip(jnp.split(x, rhs.shape[0]), rhs)])


def _fused(x: jax.Array, y: Any, *, config: Config | None = None) -> jax.Array:
    return jtf.ragged_dot(x, *y, implementation="fused", config=config)


def _lhs_gradient(ct: jax.Array, y: Any, *, call: Any, **settings: Any) -> jax.Array:
    """Of a product (lhs, y), the gradient of lhs, of whose numbers it reads none."""
    lhs = lax.pcast(jnp.zeros((ct.shape[0], y[0].shape[1]), ct.dtype), AXIS, to="varying")
    return jax.vjp(lambda lhs: call(lhs, y, **settings), lhs)[1](ct)[0]


def _rhs_gradient(ct: jax.Array, y: Any, *, call: Any, **settings: Any) -> jax.Array:
    """Of a product (lhs, (rhs, sizes)), the gradient of rhs, of whose numbers it reads none. y is lhs and sizes."""
    lhs, sizes = y
    rhs = lax.pcast(jnp.zeros((sizes.shape[0], lhs.shape[1], ct.shape[1]), ct.dtype), AXIS, to="varying")
    return jax.vjp(lambda rhs: call(lhs, (rhs, sizes), **settings), rhs)[1](ct)[0]


def _transposed(ct: jax.Array, y: Any, *, call: Any) -> jax.Array:
    """The gradient of lhs by a product (lhs, y)."""
    rhs, sizes = y
    return call(ct, (rhs.mT, sizes))


def _outer_dense(ct: jax.Array, y: Any) -> jax.Array:
    rows, cts = (each.reshape(y[1].shape[0], -1, each.shape[-1]) for each in (y[0], ct))
    return jnp.einsum("gmk,gmn->gkn", rows, cts)


def _outer_masked(ct: jax.Array, y: Any) -> jax.Array:
    """What is expected of the gradient of rhs: of each group a dense product of its rows, all others zeros."""
    lhs, sizes = y

    def of_group(i: jax.Array) -> jax.Array:
        return jnp.matmul(jnp.where(_inside(sizes, i, ct.shape[0]), lhs, 0).T, ct)

    return lax.map(of_group, jnp.arange(sizes.shape[0]))


def _outer_by_groups(ct: jax.Array, y: Any) -> jax.Array:
    lhs, sizes = y
    groups = sizes.shape[0]
    return jnp.stack([jnp.matmul(a.T, b) for a, b in zip(jnp.split(lhs, groups), jnp.split(ct, groups))])


def _rows(shape: GroupedShape, columns: int, mesh: Mesh, count: int, seed: int = 0) -> tuple[jax.Array, ...]:
    """So many arrays of the rows of all ranks."""
    make = normal((mesh.shape[AXIS] * shape.rows, columns), NamedSharding(mesh, P(AXIS)))
    return tuple(make(key) for key in jax.random.split(jax.random.key(seed), count))


class RaggedDot(Operation):
    name = "ragged_dot"
    shapes = SHAPES
    tiny_shapes = TINY_SHAPES
    sizes = GroupedShape.sizes
    parts = ("dense",)
    optional_peers = ("tokamax",)
    ceiling = "GB/s received by a rank"
    heading = "tokens, D, F, experts of a rank, choices of a token, routing"

    # Of (x, y): XLA's, the kernel, tokamax's, the floor, what is expected, and what is expected of the floor.
    calls: ClassVar[Mapping[str, Any]] = {
        "xla": _xla, "fused": _fused, "tokamax": tokamax_peer.ragged_dot, "dense": _dense, "expected": _masked,
        "expected_dense": _by_groups,
    }  # fmt: skip

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        implementations = (
            _make(name="xla/default", call=self.calls["xla"]),
            _make(name="dense", call=self.calls["dense"]),
            _make(name="tokamax", call=self.calls["tokamax"], alternatives=tokamax_peer.CONFIGS),
            *fused(_make, self.calls["fused"], configs),
        )
        return {implementation.name: implementation for implementation in implementations}

    def unavailable(self, peer: str) -> str:
        return tokamax_peer.unavailable() if peer == "tokamax" else ""

    def expected_from(self, implementation: Implementation) -> Implementation:
        if implementation.name == "dense":
            return _make(name="by groups", call=self.calls["expected_dense"])
        return _make(name="masked", call=self.calls["expected"])

    def operands(self, shape: GroupedShape, mesh: Mesh, calls: int, turns: int) -> Operands:
        world, sharding = mesh.shape[AXIS], NamedSharding(mesh, P(AXIS))
        keys = jax.random.split(jax.random.key(0), calls + turns)
        make_lhs = normal((world * shape.rows, shape.d), sharding)
        make_rhs = normal((world * shape.groups, shape.d, shape.f), sharding)
        sizes = jax.device_put(np.tile(sizes_of(shape), world), sharding)
        return Operands(
            xs={"sharded": tuple(make_lhs(key) for key in keys[:calls])},
            ys=tuple((make_rhs(key), sizes) for key in keys[calls:]),
        )

    def y_bytes(self, shape: GroupedShape, world: int) -> int:
        del world
        return shape.groups * shape.d * shape.f * jnp.dtype(DTYPE).itemsize

    def needed_for_floor(self) -> tuple[str, ...]:
        return ("dense",)

    def fastest_seconds(self, shape: GroupedShape, world: int) -> float:
        return max(shape.flops() / 800e12, self.y_bytes(shape, world) / 4.8e12)

    def ceilings(self, mesh: Mesh, on_gpu: bool) -> dict[str, float]:
        return measure_bandwidths(mesh, (256 if on_gpu else 1) * 2**20)

    def floor_us(self, shape: GroupedShape, world: int, medians: Mapping[str, float], bandwidth: float) -> float | None:
        """The batched dense product."""
        del shape, world, bandwidth
        return medians.get("dense")

    def check_shape(self, shape: GroupedShape, world: int) -> None:
        if shape.rows % shape.groups:
            raise ValueError(f"{shape.rows} rows are not in {shape.groups} groups of equal size")

    def parse_shape(self, text: str) -> GroupedShape:
        """TOKENS,D,F,GROUPS,TOP_K or the same and ROUTING."""
        *numbers, routing = text.split(",") if text.count(",") == 5 else [*text.split(","), "even"]
        if (
            len(numbers) != 5
            or not all(x.isdecimal() and int(x) for x in numbers)
            or routing not in ("even", "dirichlet")
        ):
            raise ValueError(f"{text!r} is not TOKENS,D,F,GROUPS,TOP_K or with ROUTING, which is even or dirichlet")
        tokens, d, f, groups, top_k = map(int, numbers)
        listed = (shape for shape in self.shapes if self.sizes_of(shape) == (tokens, d, f, groups, top_k, routing))
        return next(listed, GroupedShape.of(tokens, d, f, groups, top_k, routing))


class RaggedDotLhsGradient(RaggedDot):
    """The gradient of lhs, [rows, d]. x: the cotangent [world * rows, f]; y: as forward."""

    name = "ragged_dot_lhs_gradient"
    calls: ClassVar[Mapping[str, Any]] = {
        "xla": partial(_lhs_gradient, call=_xla),
        "fused": partial(_lhs_gradient, call=_fused),
        "tokamax": tokamax_peer.lhs_gradient,
        "dense": partial(_transposed, call=_dense),
        "expected": partial(_transposed, call=_masked),
        "expected_dense": partial(_transposed, call=_by_groups),
    }

    def operands(self, shape: GroupedShape, mesh: Mesh, calls: int, turns: int) -> Operands:
        # Without lhs, of which nothing is read.
        return replace(super().operands(shape, mesh, 0, turns), xs={"sharded": _rows(shape, shape.f, mesh, calls)})


class RaggedDotRhsGradient(RaggedDot):
    """The gradient of rhs, [groups, d, f]. x: the cotangent [world * rows, f]; y: lhs [world * rows, d] and sizes."""

    name = "ragged_dot_rhs_gradient"
    calls: ClassVar[Mapping[str, Any]] = {
        "xla": partial(_rhs_gradient, call=_xla),
        "fused": partial(_rhs_gradient, call=_fused),
        "tokamax": tokamax_peer.rhs_gradient,
        "dense": _outer_dense,
        "expected": _outer_masked,
        "expected_dense": _outer_by_groups,
    }

    def operands(self, shape: GroupedShape, mesh: Mesh, calls: int, turns: int) -> Operands:
        sizes = jax.device_put(np.tile(sizes_of(shape), mesh.shape[AXIS]), NamedSharding(mesh, P(AXIS)))
        lhs = _rows(shape, shape.d, mesh, turns, seed=1)
        return Operands(xs={"sharded": _rows(shape, shape.f, mesh, calls)}, ys=tuple((each, sizes) for each in lhs))

    def y_bytes(self, shape: GroupedShape, world: int) -> int:
        del world
        return shape.rows * shape.d * jnp.dtype(DTYPE).itemsize
