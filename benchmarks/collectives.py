"""`psum`, `all_gather`, `psum_scatter`, `all_to_all`, and what they are compared with: XLA's, of arrays of bf16.

A shape is the bytes of a rank: of its operand; of `psum_scatter` those of its result, and of `all_to_all` those of the
part for each rank, which are a `world`-th of the operand.

Calls take a few microseconds, so the chain is repeated in a loop, as a decode step is, which XLA replays as a CUDA
graph. Each call has an operand of its own and begins when the one before has ended.

The floor of a shape is the bytes that a rank has to receive over the best bandwidth that a plain copy between devices
reached. At latency-bound sizes nothing gets near it: a launch and the way over the wire take 2 us by themselves.
"""

import abc
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.operation import (
    AXIS,
    DEPENDENT,
    DTYPE,
    Config,
    Implementation,
    Operands,
    Operation,
    by_flags,
    fused,
    normal,
)
from benchmarks.timing import measure_bandwidths
from jaxtaxfree.ops import register
from jaxtaxfree.ops.shapes import CollectiveShape


class _Collective(Operation):
    """What they have in common."""

    sizes = ("nbytes",)
    parts = ()
    fewest_calls = 16
    ceiling = "GB/s received by a rank"
    heading = "bytes a rank"
    digits = 1
    out_spec: ClassVar[P]  # of the result

    def fused(self, x: jax.Array, y: Any, *, config: Config | None = None) -> jax.Array:
        del y
        return register.OPERATIONS[self.name].call(x, axis_name=AXIS, implementation="fused", config=config)

    @abc.abstractmethod
    def xla(self, x: jax.Array, y: Any) -> jax.Array: ...

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        make = partial(Implementation, in_specs=(P(AXIS), ()), out_spec=self.out_spec)
        implementations = (
            *by_flags(make, "xla", self.xla, DEPENDENT),
            *fused(make, self.fused, configs),
        )
        return {implementation.name: implementation for implementation in implementations}

    def expected_from(self, implementation: Implementation) -> Implementation:
        del implementation

        def call(x: jax.Array, y: Any) -> jax.Array:
            return self.xla(x.astype(jnp.float32), y).astype(DTYPE)

        return Implementation(name="f32", call=call, in_specs=(P(AXIS), ()), out_spec=self.out_spec)

    def operand_bytes(self, shape: CollectiveShape, world: int) -> int:
        """Of a rank."""
        del world
        return shape.nbytes

    def received_bytes(self, shape: CollectiveShape, world: int) -> int:
        """What each rank has to receive from its peers."""
        return shape.nbytes * (world - 1)

    def operands(self, shape: CollectiveShape, mesh: Mesh, calls: int, turns: int) -> Operands:
        del turns
        world = mesh.shape[AXIS]
        elements = world * self.operand_bytes(shape, world) // jnp.dtype(DTYPE).itemsize
        make = normal((elements,), NamedSharding(mesh, P(AXIS)))
        return Operands(
            xs={"sharded": tuple(make(key) for key in jax.random.split(jax.random.key(0), calls))}, ys=((),)
        )

    def fastest_seconds(self, shape: CollectiveShape, world: int) -> float:
        return 2e-6 + self.received_bytes(shape, world) / 340e9

    def is_repeated(self, shape: CollectiveShape) -> bool:
        del shape
        return True

    def ceilings(self, mesh: Mesh, on_gpu: bool) -> dict[str, float]:
        return measure_bandwidths(mesh, (256 if on_gpu else 1) * 2**20)

    def floor_us(
        self, shape: CollectiveShape, world: int, medians: Mapping[str, float], bandwidth: float
    ) -> float | None:
        """The wire alone."""
        del medians
        return self.received_bytes(shape, world) / bandwidth * 1e6

    def parse_shape(self, text: str) -> CollectiveShape:
        """The bytes of a rank, an even number."""
        if not text.isdecimal() or not int(text) or int(text) % 2:
            raise ValueError(f"{text!r} is no even number of bytes")
        listed = (shape for shape in self.shapes if shape.nbytes == int(text))
        return next(listed, CollectiveShape.of(int(text)))


class Psum(_Collective):
    name = "psum"
    shapes = register.OPERATIONS[name].shapes
    tiny_shapes = register.OPERATIONS[name].tiny_shapes
    out_spec = P(None)

    def xla(self, x: jax.Array, y: Any) -> jax.Array:
        del y
        return lax.psum(x, AXIS)

    def received_bytes(self, shape: CollectiveShape, world: int) -> int:
        """Its share of what the others have, and the sums of their shares."""
        return 2 * shape.nbytes * (world - 1) // world


class AllGather(_Collective):
    name = "all_gather"
    shapes = register.OPERATIONS[name].shapes
    tiny_shapes = register.OPERATIONS[name].tiny_shapes
    out_spec = P(None)

    def xla(self, x: jax.Array, y: Any) -> jax.Array:
        del y
        return lax.all_gather(x, AXIS, tiled=True)


class PsumScatter(_Collective):
    name = "psum_scatter"
    shapes = register.OPERATIONS[name].shapes
    tiny_shapes = register.OPERATIONS[name].tiny_shapes
    out_spec = P(AXIS)

    def xla(self, x: jax.Array, y: Any) -> jax.Array:
        del y
        return lax.psum_scatter(x, AXIS, tiled=True)

    def operand_bytes(self, shape: CollectiveShape, world: int) -> int:
        return world * shape.nbytes


class AllToAll(PsumScatter):
    name = "all_to_all"
    shapes = register.OPERATIONS[name].shapes
    tiny_shapes = register.OPERATIONS[name].tiny_shapes

    def xla(self, x: jax.Array, y: Any) -> jax.Array:
        del y
        return lax.all_to_all(x, AXIS, 0, 0, tiled=True)
