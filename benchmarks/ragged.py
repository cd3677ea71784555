"""`ragged_all_to_all`, and what it is compared with: XLA's, and an `all_to_all` of as many rows in equal parts.

Each call reads its tables on the device, as it would behind a router. Calls that take less than the host needs to
launch them are repeated in a loop; the others make up a chain without a loop, whose carry would be copied.

The floor of a shape is the bytes that the busiest rank has to send to its peers, or to receive from them, over the best
bandwidth that a plain copy between devices reached.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
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
from jaxtaxfree.ops.ragged_all_to_all import by_all_gather
from jaxtaxfree.ops.ragged_all_to_all.shapes import SHAPES, TINY_SHAPES
from jaxtaxfree.ops.shapes import RaggedShape

# x: operand [world * rows, d]. y: output [world * most, d], where `most` is what the busiest rank receives, and the
# four tables [world * world].
_make = partial(Implementation, in_specs=(P(AXIS), (P(AXIS),) * 5), out_spec=P(AXIS))


def sizes_of(shape: RaggedShape, world: int) -> np.ndarray:
    """How many rows each rank sends to each other one, [world, world]; rows are shared out whole."""
    share = np.full(world, 1 / world)
    if shape.routing == "skewed":  # all senders prefer the same receivers, by a draw from Dirichlet(1)
        share = np.random.default_rng(0).dirichlet(np.ones(world))
    ends = np.round(np.cumsum(share) * shape.rows).astype(np.int32)
    return np.tile(np.diff(ends, prepend=0), (world, 1))


def _tables(sizes: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(
        x.reshape(-1).astype(np.int32)
        for x in (np.cumsum(sizes, 1) - sizes, sizes, np.cumsum(sizes, 0) - sizes, sizes.T)
    )


def _ragged(x: jax.Array, y: Any, *, implementation: str, config: Config | None = None) -> jax.Array:
    return jtf.ragged_all_to_all(x, *y, axis_name=AXIS, implementation=implementation, config=config)


def _equal_parts(x: jax.Array, y: Any) -> jax.Array:
    del y
    return lax.all_to_all(x, AXIS, 0, 0, tiled=True)


def _equal_parts_gathered(x: jax.Array, y: Any) -> jax.Array:
    del y
    parts = lax.all_gather(x, AXIS).reshape(lax.axis_size(AXIS), lax.axis_size(AXIS), -1, x.shape[1])
    return parts[:, lax.axis_index(AXIS)].reshape(x.shape)


def _gathered(x: jax.Array, y: Any) -> jax.Array:
    return by_all_gather(x, *y, axes=(AXIS,))


class RaggedAllToAll(Operation):
    name = "ragged_all_to_all"
    shapes = SHAPES
    tiny_shapes = TINY_SHAPES
    sizes = RaggedShape.sizes
    parts = ("all_to_all",)
    ceiling = "GB/s received by a rank"
    heading = "rows of a rank, their elements, routing"
    digits = 1

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        implementations = (
            *by_flags(_make, "xla", partial(_ragged, implementation="xla"), DEPENDENT),
            _make(name="all_to_all", call=_equal_parts),
            *fused(_make, partial(_ragged, implementation="fused"), configs),
        )
        return {implementation.name: implementation for implementation in implementations}

    def expected_from(self, implementation: Implementation) -> Implementation:
        if implementation.name == "all_to_all":
            return _make(name="gathered parts", call=_equal_parts_gathered)
        return _make(name="gathered", call=_gathered)

    def operands(self, shape: RaggedShape, mesh: Mesh, calls: int, turns: int) -> Operands:
        world, sharding = mesh.shape[AXIS], NamedSharding(mesh, P(AXIS))
        sizes = sizes_of(shape, world)
        keys = jax.random.split(jax.random.key(0), calls + turns)
        make_x = normal((world * shape.rows, shape.d), sharding)
        make_output = normal((world * int(sizes.sum(0).max()), shape.d), sharding)
        tables = tuple(jax.device_put(x, sharding) for x in _tables(sizes))
        return Operands(
            xs={"sharded": tuple(make_x(key) for key in keys[:calls])},
            ys=tuple((make_output(key), *tables) for key in keys[calls:]),
        )

    def crossing_bytes(self, shape: RaggedShape, world: int) -> int:
        """What the busiest rank sends to its peers, or receives from them, whichever is more."""
        sizes = sizes_of(shape, world)
        others = sizes - np.diag(np.diag(sizes))
        return int(max(others.sum(0).max(), others.sum(1).max())) * shape.d * jnp.dtype(DTYPE).itemsize

    def fastest_seconds(self, shape: RaggedShape, world: int) -> float:
        return 8e-6 + self.crossing_bytes(shape, world) / 340e9

    def is_repeated(self, shape: RaggedShape) -> bool:
        return shape.rows * shape.d < 1 << 20

    def ceilings(self, mesh: Mesh, on_gpu: bool) -> dict[str, float]:
        return measure_bandwidths(mesh, (256 if on_gpu else 1) * 2**20)

    def floor_us(self, shape: RaggedShape, world: int, medians: Mapping[str, float], bandwidth: float) -> float | None:
        """The wire alone."""
        del medians
        return self.crossing_bytes(shape, world) / bandwidth * 1e6

    def check_shape(self, shape: RaggedShape, world: int) -> None:
        if shape.rows % world:
            raise ValueError(f"{shape.rows} rows are not in {world} equal parts")

    def parse_shape(self, text: str) -> RaggedShape:
        """ROWS,D or ROWS,D,ROUTING."""
        rows, d, routing = (text.split(",") + ["even"])[:3] if text.count(",") in (1, 2) else ("", "", "")
        if not (rows.isdecimal() and d.isdecimal() and int(rows) and int(d)) or routing not in ("even", "skewed"):
            raise ValueError(f"{text!r} is not ROWS,D or ROWS,D,ROUTING, which is even or skewed")
        sizes = int(rows), int(d), routing
        listed = (shape for shape in self.shapes if self.sizes_of(shape) == sizes)
        return next(listed, RaggedShape.of(*sizes))
