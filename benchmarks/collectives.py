"""`psum`, `all_gather` and `psum_scatter`, and what they are compared with: XLA's, of arrays of bf16.

A shape is the bytes of a rank: of its operand; of `psum_scatter` those of its result, which is a `world`-th of its
operand.

Calls take a few microseconds, so the chain is repeated in a loop, as a decode step is, which XLA replays as a CUDA
graph. Each call has an operand of its own and begins when the one before has ended.

The floor of a shape is the bytes that a rank has to receive over the best bandwidth that a plain copy between devices
reached. At latency-bound sizes nothing gets near it: a launch and the way over the wire take 2 us by themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from benchmarks.operation import (
    AXIS,
    DTYPE,
    NCCL_SYMMETRIC,
    Config,
    Implementation,
    Operands,
    Operation,
    config_name,
    normal,
)
from benchmarks.shapes import COLLECTIVE, COLLECTIVE_TINY, CollectiveShape
from benchmarks.timing import measure_bandwidths


class _Collective(Operation):
    """What the three have in common."""

    shapes = COLLECTIVE
    tiny_shapes = COLLECTIVE_TINY
    sizes = ("nbytes",)
    parts = ()
    program_seconds = 0.2e-3
    fewest_calls = 16
    ceiling = "GB/s received by a rank"
    # The fused one and XLA's, of x and an axis name, and the sharding of the result.
    ours: ClassVar[Callable[..., jax.Array]]
    xlas: ClassVar[Callable[..., jax.Array]]
    out_spec: ClassVar[P]

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        make = partial(Implementation, in_specs=(P(AXIS), ()), out_spec=self.out_spec)

        def xla(x: jax.Array, _: Any) -> jax.Array:
            return self.xlas(x, AXIS)

        def fused(x: jax.Array, _: Any, config: Config | None = None) -> jax.Array:
            return self.ours(x, AXIS, implementation="fused", config=config)

        # Nothing in a chain of dependent calls is there to hide latency behind, so NCCL's buffers are the only choice.
        implementations = (
            make(name="xla/default", call=xla),
            make(name="xla/nccl_symmetric", call=xla, options=NCCL_SYMMETRIC),
            # Last, so that everything else has been compiled and checked should it break the device.
            make(name="fused", call=fused),
            *(make(name=config_name(config), call=partial(fused, config=config), config=config) for config in configs),
        )
        return {implementation.name: implementation for implementation in implementations}

    def expected_from(self, implementation: Implementation) -> Implementation:
        del implementation

        def call(x: jax.Array, _: Any) -> jax.Array:
            return self.xlas(x.astype(jnp.float32), AXIS).astype(DTYPE)

        return Implementation(name="f32", call=call, in_specs=(P(AXIS), ()), out_spec=self.out_spec)

    def operand_bytes(self, shape: CollectiveShape, world: int) -> int:
        """Of a rank."""
        del world
        return shape.nbytes

    def received_bytes(self, shape: CollectiveShape, world: int) -> int:
        """What each rank has to receive from its peers."""
        return shape.nbytes * (world - 1)

    def operands(self, shape: CollectiveShape, mesh: Mesh, calls: int) -> Operands:
        world = mesh.shape[AXIS]
        elements = world * self.operand_bytes(shape, world) // jnp.dtype(DTYPE).itemsize
        make = normal((elements,), NamedSharding(mesh, P(AXIS)))
        return Operands(xs={"sharded": tuple(make(key) for key in jax.random.split(jax.random.key(0), calls))}, ys=((),))

    def fastest_seconds(self, shape: CollectiveShape, world: int) -> float:
        return 2e-6 + self.received_bytes(shape, world) / 340e9

    def rounds(self, shape: CollectiveShape, world: int) -> int:
        chain_seconds = self.calls_per_program(shape, world) * self.fastest_seconds(shape, world)
        return max(2, round(4e-3 / chain_seconds))

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
        return next(listed, CollectiveShape(name=f"{text} B", nbytes=int(text)))


class Psum(_Collective):
    name = "psum"
    ours = staticmethod(jtf.psum)
    xlas = staticmethod(lax.psum)
    out_spec = P(None)

    def received_bytes(self, shape: CollectiveShape, world: int) -> int:
        """Its share of what the others have, and the sums of their shares."""
        return 2 * shape.nbytes * (world - 1) // world


class AllGather(_Collective):
    name = "all_gather"
    ours = staticmethod(partial(jtf.all_gather, tiled=True))
    xlas = staticmethod(partial(lax.all_gather, tiled=True))
    out_spec = P(None)


class PsumScatter(_Collective):
    name = "psum_scatter"
    ours = staticmethod(partial(jtf.psum_scatter, tiled=True))
    xlas = staticmethod(partial(lax.psum_scatter, tiled=True))
    out_spec = P(AXIS)

    def operand_bytes(self, shape: CollectiveShape, world: int) -> int:
        return world * shape.nbytes
