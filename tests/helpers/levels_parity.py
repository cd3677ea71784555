"""What operations in two levels must get right on GPUs, as functions of a mesh whose team spans hosts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.helpers.collectives_parity import numbers, wrong_bits
from tests.helpers.parity import program
from tests.helpers.support import COLLECTIVES, TRITON_CALL

DTYPES = ("float32", "bfloat16")


def found(module: Any, dtype: str, axes: Any, rank: jax.Array, world: int, most: int, **how: Any) -> list[jax.Array]:
    """Every operation that goes in two levels, of whole numbers, whose sums are exact."""
    shapes = (5, 3), (5, 2 * world, 3), (most,)
    one, few, many = (numbers(i, shape, dtype, rank) for i, shape in enumerate(shapes))
    lhs, rhs = numbers(3, (3, 64), dtype, rank), numbers(4, (64, 128), dtype, rank)
    if module is jtf:
        product = jtf.matmul_all_reduce(lhs, rhs, axes, preferred_element_type="float32", **how)
    else:
        product = lax.psum(jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32, precision="highest"), axes)
    return [
        product,
        module.psum(one, axes, **how),
        module.psum(many, axes, **how),
        module.all_gather(few, axes, axis=1, tiled=True, **how),
        module.psum_scatter(few, axes, scatter_dimension=1, tiled=True, **how),
    ]


def check(mesh: Mesh, implementation: str, most: int = 1 << 16) -> None:
    """All are what `lax` gives bit for bit, for both orders of the two axes of the mesh, up to sums of `most`."""
    world = mesh.devices.size

    def differences() -> jax.Array:
        rank = lax.axis_index(mesh.axis_names)
        wrong = []
        for axes in (mesh.axis_names, mesh.axis_names[::-1]):
            for dtype in DTYPES:
                of = functools.partial(found, dtype=dtype, axes=axes, rank=rank, world=world, most=most)
                wrong += map(wrong_bits, of(jtf, implementation=implementation), of(lax))
        return lax.psum(jnp.stack(wrong), mesh.axis_names)

    counts = np.asarray(program(mesh, differences)())
    assert not counts.any(), counts.tolist()
    jtf.heap.check()


def check_program(mesh: Mesh, implementation: str | None) -> None:
    """A sum of f32 over all axes is two kernels and one collective of XLA's."""

    def total(x: jax.Array) -> jax.Array:
        return jtf.psum(x, mesh.axis_names, implementation=implementation)

    call = jax.shard_map(total, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P())
    text = jax.jit(call).lower(jax.ShapeDtypeStruct((1024 * mesh.devices.size,), jnp.float32)).as_text()
    assert text.count(TRITON_CALL) == 2
    assert [name for name in COLLECTIVES if f"stablehlo.{name}" in text] == ["all_reduce"]
