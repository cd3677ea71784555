"""`all_gather_matmul`, `matmul_reduce_scatter` and `matmul_all_reduce`, and what they are compared with.

The floor of a shape is the longer of two times of the same run: the plain product of a rank (`gemm`: of the gathered
lhs, or of its part of the contracted dimension), and the bytes that a rank receives or sends over the best bandwidth
that a plain copy between devices reached. The bytes are those of bf16, although `matmul_reduce_scatter` sends f32 for
decode shapes, and `matmul_all_reduce` for one row, or if a configuration says `exact_wire=True`.

Decode shapes take turns between two rhs. Four-way shards of the listed weights (117 MB) exceed the L2 cache of an
H200, but a cache that does not evict strictly by age would still hold some of a single matrix from call to call. They
are repeated in a loop, as a decode step is.
"""

import abc
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from benchmarks import pallas_matmul
from benchmarks.operation import (
    AXIS,
    DTYPE,
    Config,
    Implementation,
    Operands,
    Operation,
    by_flags,
    fused,
    fused_call,
    normal,
)
from benchmarks.shapes import GATED_ALL_GATHER_MATMUL
from benchmarks.timing import measure_bandwidths
from jaxtaxfree.ops import register
from jaxtaxfree.ops.shapes import MatmulShape

DECODE_ROWS = 256
# XLA's own collective matmul: the threshold of 0 MiB lets it decompose every product. On 4 H200, by XLA of JAX 0.11.2,
# its results were wrong at every shape. So they were in a program of one `jnp.matmul`, without anything of ours: of the
# rows of the three other ranks those of one were right.
XLA_AUTO: dict[str, Any] = {
    "options": {"xla_gpu_threshold_for_windowed_einsum_mib": 0},
    "auto": True,
    "apart": True,
}


def _gather(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    del rhs
    return lax.all_gather(lhs, AXIS, axis=0, tiled=True)


def gather_then_matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    # Spelled out rather than called through jaxtaxfree: a baseline and a reference must not depend on what they judge.
    return jnp.matmul(_gather(lhs, rhs), rhs)


def _identity(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    del rhs
    return lhs


# lhs [M, K] sharded on rows, rhs [K, N] and the result on columns.
_sharded = partial(Implementation, in_specs=(P(AXIS, None), P(None, AXIS)), out_spec=P(None, AXIS))
_gathered = partial(Implementation, in_specs=(P(None, None), P(None, AXIS)), out_spec=P(None, AXIS), takes="gathered")

REFERENCE = _sharded(name="xla/default", call=gather_then_matmul)
# What an all-gather must return, without communication. Every rank has all rows, so "columns" are W copies.
GATHERED = _gathered(name="gathered", call=_identity)
GATHERED_GEMM = _gathered(name="gemm", call=jnp.matmul)


class MatmulOperation(Operation):
    """What operations with products of `MatmulShape` have in common.

    Attributes:
      shared_out: sizes that the ranks divide among themselves.
    """

    sizes = ("m", "k", "n")
    parts = ("gemm", "collective")
    ceiling = "GB/s received by a rank"
    heading = "M, K, N"
    shared_out: ClassVar[tuple[str, ...]] = ("m", "n")

    def check_shape(self, shape: MatmulShape, world: int) -> None:
        if any(getattr(shape, size) % world for size in self.shared_out):
            sizes = " and ".join(self.shared_out)
            raise ValueError(f"{shape}: {sizes} must be multiples of the {world} devices; choose others, or --world")

    def is_repeated(self, shape: MatmulShape) -> bool:
        return shape.m <= DECODE_ROWS

    def usual_turns(self, shape: MatmulShape, calls: int) -> int:
        return 2 if shape.m <= DECODE_ROWS else 1

    def y_bytes(self, shape: MatmulShape, world: int) -> int:
        return shape.k * shape.n // world * jnp.dtype(DTYPE).itemsize

    def fastest_seconds(self, shape: MatmulShape, world: int) -> float:
        return max(shape.flops(world) / 800e12, 2 * shape.k * shape.n / world / 4.8e12)

    def ceilings(self, mesh: Mesh, on_gpu: bool) -> dict[str, float]:
        return measure_bandwidths(mesh, (256 if on_gpu else 1) * 2**20)

    @abc.abstractmethod
    def wire_bytes(self, shape: MatmulShape, world: int) -> int:
        """Bytes that a rank receives or sends."""

    def floor_us(self, shape: MatmulShape, world: int, medians: Mapping[str, float], bandwidth: float) -> float | None:
        """All of the product, or all of the wire, whichever is longer."""
        wire = self.wire_bytes(shape, world) / bandwidth * 1e6
        return max(medians["gemm"], wire) if "gemm" in medians else None

    def needed_for_floor(self) -> tuple[str, ...]:
        return ("gemm",)

    def parse_shape(self, text: str) -> MatmulShape:
        try:
            m, k, n = (int(size) for size in text.split(","))
        except ValueError:
            raise ValueError(f"{text!r} is not M,K,N") from None
        listed = (shape for shape in self.shapes if self.sizes_of(shape) == (m, k, n))
        return next(listed, MatmulShape.of(m, k, n))


class AllGatherMatmul(MatmulOperation):
    name = "all_gather_matmul"
    shapes = register.OPERATIONS[name].shapes
    tiny_shapes = register.OPERATIONS[name].tiny_shapes
    optional_peers = ("pallas", "torch")

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        implementations = (
            *by_flags(_sharded, "xla", gather_then_matmul),
            _sharded(name="xla_auto", call=jnp.matmul, **XLA_AUTO),
            GATHERED_GEMM,
            _sharded(name="collective", call=_gather),
            _sharded(
                name="pallas",
                call=pallas_matmul.all_gather_matmul,
                alternatives=pallas_matmul.CONFIGS,
                flat=True,
                apart=True,
            ),
            *fused(_sharded, fused_call(register.OPERATIONS[self.name]), configs),
        )
        return {implementation.name: implementation for implementation in implementations}

    def unavailable(self, peer: str) -> str:
        return pallas_matmul.unavailable() if peer == "pallas" else ""

    def expected_from(self, implementation: Implementation) -> Implementation:
        return GATHERED if implementation.name == "collective" else REFERENCE

    def operands(self, shape: MatmulShape, mesh: Mesh, calls: int, turns: int) -> Operands:
        rows, columns, whole = (NamedSharding(mesh, spec) for spec in (P(AXIS, None), P(None, AXIS), P(None, None)))
        keys = jax.random.split(jax.random.key(0), calls + turns)
        make_lhs, make_rhs = normal((shape.m, shape.k), rows), normal((shape.k, shape.n), columns)
        gather = jax.jit(lambda lhs: lhs, out_shardings=whole)
        sharded = tuple(make_lhs(key) for key in keys[:calls])
        # One at a time, because virtual CPU devices deadlock over two collective programs in flight.
        gathered = tuple(jax.block_until_ready(gather(lhs)) for lhs in sharded)
        return Operands(xs={"sharded": sharded, "gathered": gathered}, ys=tuple(make_rhs(key) for key in keys[calls:]))

    def wire_bytes(self, shape: MatmulShape, world: int) -> int:
        return shape.wire_bytes(world, jnp.dtype(DTYPE).itemsize)


Pair = tuple[jax.Array, jax.Array]  # up [K, N / world], gate [K, N / world]


def _gated(lhs: jax.Array, weights: Pair) -> jax.Array:
    up, gate = weights
    rows = _gather(lhs, up)
    return jax.nn.silu(jnp.matmul(rows, gate)) * jnp.matmul(rows, up)


def _fused_gated(lhs: jax.Array, weights: Pair, *, config: Config | None = None) -> jax.Array:
    up, gate = weights
    return jtf.all_gather_matmul(lhs, up, AXIS, gate=gate, activation="silu", implementation="fused", config=config)


def _two_products(rows: jax.Array, weights: Pair) -> jax.Array:
    return jnp.matmul(rows, weights[0]) + jnp.matmul(rows, weights[1])


_pair = (P(None, AXIS), P(None, AXIS))
_gated_sharded = partial(_sharded, in_specs=(P(AXIS, None), _pair))

GATED_REFERENCE = _gated_sharded(name="xla/default", call=_gated)


class GatedAllGatherMatmul(AllGatherMatmul):
    """The first half of a gated MLP: `all_gather_matmul` with a gate and SiLU. The weights are a pair."""

    name = "gated_all_gather_matmul"
    shapes = GATED_ALL_GATHER_MATMUL
    optional_peers = ()
    parts = ("gemm",)

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        implementations = (
            *by_flags(_gated_sharded, "xla", _gated),
            _gathered(name="gemm", call=_two_products, in_specs=(P(None, None), _pair)),
            *fused(_gated_sharded, _fused_gated, configs),
        )
        return {implementation.name: implementation for implementation in implementations}

    def expected_from(self, implementation: Implementation) -> Implementation:
        # Nothing else gives what the products of a rank alone give.
        return implementation if implementation.name == "gemm" else GATED_REFERENCE

    def operands(self, shape: MatmulShape, mesh: Mesh, calls: int, turns: int) -> Operands:
        operands = super().operands(shape, mesh, calls, 2 * turns)
        return replace(operands, ys=tuple(itertools.batched(operands.ys, 2)))

    def y_bytes(self, shape: MatmulShape, world: int) -> int:
        return 2 * super().y_bytes(shape, world)

    def fastest_seconds(self, shape: MatmulShape, world: int) -> float:
        return 2 * super().fastest_seconds(shape, world)


def _scatter(partial_sum: jax.Array, rhs: jax.Array) -> jax.Array:
    del rhs
    return lax.psum_scatter(partial_sum, AXIS, scatter_dimension=0, tiled=True)


def matmul_then_scatter(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _scatter(jnp.matmul(lhs, rhs), rhs)


def _own_rows_of_sum(partial_sum: jax.Array, rhs: jax.Array) -> jax.Array:
    del rhs
    total = lax.psum(partial_sum.astype(jnp.float32), AXIS)
    rows = total.shape[0] // lax.axis_size(AXIS)
    return lax.dynamic_slice_in_dim(total, lax.axis_index(AXIS) * rows, rows)


# lhs [M, K] sharded on columns, rhs [K, N] and the result on rows.
_row_parallel = partial(Implementation, in_specs=(P(None, AXIS), P(AXIS, None)), out_spec=P(AXIS, None))
# Partial sums [M, N] of all ranks one below the other.
_partial = partial(Implementation, in_specs=(P(AXIS, None), P(AXIS, None)), out_spec=P(AXIS, None), takes="partial")

SCATTER_REFERENCE = _row_parallel(name="xla/default", call=matmul_then_scatter)
# What a reduce-scatter must return, and what the product of one rank.
SCATTERED = _partial(name="scattered", call=_own_rows_of_sum)
PARTIAL_GEMM = _row_parallel(name="gemm", call=jnp.matmul)
PRODUCT = _row_parallel(name="product", call=partial(jnp.matmul, preferred_element_type=jnp.float32))


class _RowParallel(MatmulOperation):
    """A product whose contracted dimension is sharded."""

    shared_out = ("m", "k")

    def operands(self, shape: MatmulShape, mesh: Mesh, calls: int, turns: int) -> Operands:
        rows, columns = (NamedSharding(mesh, spec) for spec in (P(AXIS, None), P(None, AXIS)))
        keys = jax.random.split(jax.random.key(0), calls + turns)
        make_lhs, make_rhs = normal((shape.m, shape.k), columns), normal((shape.k, shape.n), rows)
        make_partial = normal((mesh.shape[AXIS] * shape.m, shape.n), rows)
        return Operands(
            xs={
                "sharded": tuple(make_lhs(key) for key in keys[:calls]),
                "partial": tuple(make_partial(key) for key in keys[:calls]),
            },
            ys=tuple(make_rhs(key) for key in keys[calls:]),
        )


class MatmulReduceScatter(_RowParallel):
    name = "matmul_reduce_scatter"
    shapes = register.OPERATIONS[name].shapes
    tiny_shapes = register.OPERATIONS[name].tiny_shapes
    optional_peers = ("torch",)

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        implementations = (
            *by_flags(_row_parallel, "xla", matmul_then_scatter),
            _row_parallel(name="xla_auto", call=jnp.matmul, **XLA_AUTO),
            PARTIAL_GEMM,
            _partial(name="collective", call=_scatter),
            *fused(_row_parallel, fused_call(register.OPERATIONS[self.name]), configs),
        )
        return {implementation.name: implementation for implementation in implementations}

    def expected_from(self, implementation: Implementation) -> Implementation:
        return {"collective": SCATTERED, "gemm": PRODUCT}.get(implementation.name, SCATTER_REFERENCE)

    def wire_bytes(self, shape: MatmulShape, world: int) -> int:
        return shape.scattered_bytes(world, jnp.dtype(DTYPE).itemsize)


def _reduce(partial_sum: jax.Array, rhs: jax.Array) -> jax.Array:
    del rhs
    return lax.psum(partial_sum, AXIS)


def _matmul_then_reduce(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _reduce(jnp.matmul(lhs, rhs), rhs)


def _sum(partial_sum: jax.Array, rhs: jax.Array) -> jax.Array:
    return _reduce(partial_sum.astype(jnp.float32), rhs)


# lhs [M, K] sharded on columns, rhs [K, N] on rows, and the result nowhere.
_reduced = partial(Implementation, in_specs=(P(None, AXIS), P(AXIS, None)), out_spec=P(None, None))
_partial_reduced = partial(_partial, out_spec=P(None, None))

REDUCE_REFERENCE = _reduced(name="xla/default", call=_matmul_then_reduce)
REDUCED = _partial_reduced(name="reduced", call=_sum)


class MatmulAllReduce(_RowParallel):
    name = "matmul_all_reduce"
    shapes = register.OPERATIONS[name].shapes
    tiny_shapes = register.OPERATIONS[name].tiny_shapes
    shared_out = ("k",)
    digits = 1

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        implementations = (
            *by_flags(_reduced, "xla", _matmul_then_reduce),
            _row_parallel(name="gemm", call=jnp.matmul),
            _partial_reduced(name="collective", call=_reduce),
            *fused(_reduced, fused_call(register.OPERATIONS[self.name]), configs),
        )
        return {implementation.name: implementation for implementation in implementations}

    def expected_from(self, implementation: Implementation) -> Implementation:
        return {"collective": REDUCED, "gemm": PRODUCT}.get(implementation.name, REDUCE_REFERENCE)

    def wire_bytes(self, shape: MatmulShape, world: int) -> int:
        """Of a reduce-scatter and an all-gather."""
        return 2 * shape.scattered_bytes(world, jnp.dtype(DTYPE).itemsize)

    def remarks(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """What each implementation adds to the product, of each shape and mode."""
        groups: dict[tuple[str, str], dict[str, float]] = {}
        for row in rows:
            if row["median_us"]:
                groups.setdefault((row["name"], row["mode"]), {})[row["implementation"]] = row["median_us"]
        remarks = []
        for (name, mode), times in groups.items():
            gemm = times.get("gemm")
            added = [f"{each} {time - gemm:+.1f}" for each, time in times.items() if gemm and each not in self.parts]
            if added:
                remarks.append(f"{name}, {mode}: product {gemm:.1f} us; {', '.join(added)}")
        return remarks
