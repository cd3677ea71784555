"""What `all_gather_matmul` is compared with, and the program that every implementation is timed in.

All implementations run in the same program: a chain of `calls` calls, each on an lhs of its own, in one executable.

* Each call has another lhs operand, because XLA merges equal collectives and hoists invariant products, also across
  `lax.optimization_barrier`.
* A barrier ties the lhs of call i + 1 to the output of call i. XLA removes barriers only after it has scheduled the
  program, so no call overlaps the next one.
* The program samples every output, and returns the last one whole, for the check. The samples are taken behind a
  barrier after the last call: XLA can neither shrink a product to what is sampled nor put small kernels between calls.
* Decode shapes take turns between two rhs. Four-way shards of the listed weights (117 MB) exceed the L2 cache of an
  H200, but a cache that does not evict strictly by age would still hold some of a single matrix from call to call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from benchmarks.shapes import MatmulShape

AXIS = "tp"
DTYPE = jnp.bfloat16
DECODE_ROWS = 256

Call = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute the operation, or one part of it.

    call: (lhs, rhs) -> out. Inside shard_map on lhs [M/world, K] and rhs [K, N/world], unless said otherwise below.
    options: XLA flags of this executable alone.
    gathered: lhs arrives whole on every rank, [M, K].
    auto: the call sees global arrays, and XLA partitions it.
    """

    name: str
    call: Call
    options: dict[str, Any] = field(default_factory=dict)
    gathered: bool = False
    auto: bool = False


def _fused(lhs: jax.Array, rhs: jax.Array, *, config: dict[str, Any] | None) -> jax.Array:
    return jtf.all_gather_matmul(lhs, rhs, AXIS, implementation="fused", config=config)


def _gather(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    del rhs
    return lax.all_gather(lhs, AXIS, axis=0, tiled=True)


def _gather_then_matmul(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    # Spelled out rather than called through jaxtaxfree: a baseline and a reference must not depend on what they judge.
    return jnp.matmul(_gather(lhs, rhs), rhs)


def _identity(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    del rhs
    return lhs


_LATENCY_HIDING = {"xla_gpu_enable_latency_hiding_scheduler": True}
_NCCL_SYMMETRIC = {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True}

REFERENCE = Implementation(name="xla/default", call=_gather_then_matmul)
# What an all-gather must return, without communication.
GATHERED = Implementation(name="gathered", call=_identity, gathered=True)


def all_implementations(config: dict[str, Any] | None = None) -> dict[str, Implementation]:
    """Every implementation by name. `config` is for the fused one."""
    implementations = (
        REFERENCE,
        Implementation(name="xla/latency_hiding", call=_gather_then_matmul, options=_LATENCY_HIDING),
        Implementation(name="xla/nccl_symmetric", call=_gather_then_matmul, options=_NCCL_SYMMETRIC),
        Implementation(name="xla/both", call=_gather_then_matmul, options=_LATENCY_HIDING | _NCCL_SYMMETRIC),
        # XLA's own collective matmul: the threshold of 0 MiB lets it decompose every product.
        Implementation(
            name="xla_auto", call=jnp.matmul, options={"xla_gpu_threshold_for_windowed_einsum_mib": 0}, auto=True
        ),
        Implementation(name="gemm", call=jnp.matmul, gathered=True),
        Implementation(name="collective", call=_gather),
        # Last, so that everything else has been compiled and checked should it break the device.
        Implementation(name="fused", call=partial(_fused, config=config)),
    )
    return {implementation.name: implementation for implementation in implementations}


def expected_from(implementation: Implementation) -> Implementation:
    """The implementation whose results are right for this one."""
    return GATHERED if implementation.name == "collective" else REFERENCE


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    # Auto rather than Explicit axes, because `xla_auto` leaves the partitioning to XLA.
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def calls_per_program(shape: MatmulShape, world: int) -> int:
    """A power of two from 8 to 64 that makes the program last about 2 ms or more, several times its dispatch."""
    fastest = max(shape.flops(world) / 800e12, 2 * shape.k * shape.n / world / 4.8e12)  # seconds a call on an H200
    calls = 8
    while calls < 64 and calls * fastest < 2e-3:
        calls *= 2
    return calls


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Random operands of one program: one lhs a call, in both layouts, and the rhs that the calls take turns with."""

    sharded: tuple[jax.Array, ...]
    gathered: tuple[jax.Array, ...]
    rhs: tuple[jax.Array, ...]

    def of(self, implementation: Implementation) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        return (self.gathered if implementation.gathered else self.sharded), self.rhs


def make_operands(shape: MatmulShape, mesh: Mesh, calls: int) -> Operands:
    """Normally distributed, since zeros would draw less power and run at higher clocks."""
    rows, columns, whole = (NamedSharding(mesh, spec) for spec in (P(AXIS, None), P(None, AXIS), P(None, None)))

    def normal(size: tuple[int, int], sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(lambda key: jax.random.normal(key, size, DTYPE), out_shardings=sharding)

    count_rhs = 2 if shape.m <= DECODE_ROWS else 1
    keys = jax.random.split(jax.random.key(0), calls + count_rhs)
    make_lhs, make_rhs = normal((shape.m, shape.k), rows), normal((shape.k, shape.n), columns)
    gather = jax.jit(lambda lhs: lhs, out_shardings=whole)
    sharded = tuple(make_lhs(key) for key in keys[:calls])
    return Operands(
        sharded=sharded,
        # One at a time, because virtual CPU devices deadlock over two collective programs in flight.
        gathered=tuple(jax.block_until_ready(gather(lhs)) for lhs in sharded),
        rhs=tuple(make_rhs(key) for key in keys[calls:]),
    )


def chain(call: Call, lhs: Sequence[jax.Array], rhs: Sequence[jax.Array]) -> list[jax.Array]:
    """All the outputs of the calls, made one after the other."""
    outs: list[jax.Array] = []
    for i, x in enumerate(lhs):
        if outs:
            x, outs[-1] = lax.optimization_barrier((x, outs[-1]))
        outs.append(call(x, rhs[i % len(rhs)]))
    return lax.optimization_barrier(outs)


def _sample(outs: Sequence[jax.Array]) -> jax.Array:
    """About 8 x 8 elements of each output, from rows of every rank: [calls, ~8, ~8]."""
    return jnp.stack([out[:: -(-out.shape[0] // 8), :: -(-out.shape[1] // 8)] for out in outs])


def make_program(
    implementation: Implementation, mesh: Mesh
) -> Callable[[Sequence[jax.Array], Sequence[jax.Array]], tuple[jax.Array, jax.Array]]:
    """(every lhs, every rhs) -> (samples of all outputs, the last output)."""
    # One trace and one lowering serve all the calls of the chain.
    call = jax.jit(implementation.call)
    columns = P(None, AXIS)
    local = partial(jax.shard_map, mesh=mesh, check_vma=False)

    if implementation.auto:
        out_sharding = NamedSharding(mesh, columns)

        def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return lax.with_sharding_constraint(call(lhs, rhs), out_sharding)

        def program(lhs: Sequence[jax.Array], rhs: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
            outs = chain(product, lhs, rhs)
            return local(_sample, in_specs=(columns,), out_specs=P(None, None, AXIS))(outs), outs[-1]

        return program

    def body(lhs: Sequence[jax.Array], rhs: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        outs = chain(call, lhs, rhs)
        return _sample(outs), outs[-1]

    lhs_spec = P(None, None) if implementation.gathered else P(AXIS, None)
    return local(body, in_specs=(lhs_spec, columns), out_specs=(P(None, None, AXIS), columns))
