"""What `ragged_dot` must get right on GPUs, as functions of a mesh; as in `collectives_parity`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.helpers.ragged_dot_cases import Grouped, garbage

CASES = (
    (Grouped(150, 40, 40, (7, 0, 70, 41)), "bfloat16", None),
    (Grouped(40, 24, 41, (7, 0, 18, 9)), "float32", {"kernel": "portable", "block_m": 16, "block_n": 16}),
)
LARGE = (
    (Grouped(1000, 264, 520, (1, 129, 0, 300, 511, 3)), "bfloat16", None),
    (Grouped(1000, 264, 520, (1, 129, 0, 300, 511, 59)), "float16", {"kernel": "hopper", "block_m": 64}),
    (Grouped(1000, 264, 520, (1, 129, 0, 300, 511, 3)), "bfloat16", {"kernel": "portable"}),
)


def _check(mesh: Mesh, case: Grouped, dtype: str, config: Any) -> None:
    """Result and both gradients on each device, exactly, and NaN of every kind of garbage."""
    lhs, rhs, sizes, ct = case.arrays(jnp.dtype(dtype))
    call = functools.partial(jtf.ragged_dot, implementation="fused")

    def local(sizes: jax.Array) -> Any:
        out = call(lhs, rhs, sizes, config=config)
        _, back = jax.vjp(lambda *x: call(*x, sizes), lhs, rhs)
        return jax.tree.map(lambda x: x[None], (out, *back(jnp.asarray(ct))))

    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(mesh.axis_names), check_vma=False))
    wanted = case.product(lhs, rhs), case.product(ct, rhs.swapaxes(1, 2)), case.of_weights(lhs, ct)
    for found, of in zip(program(sizes), wanted, strict=True):
        rounded = np.asarray(jnp.asarray(of, jnp.float32).astype(dtype), np.float64)
        for each in np.asarray(found, np.float64):
            np.testing.assert_array_equal(each, rounded)
    for name, wrong in garbage(sizes, case.m):
        assert all(np.isnan(np.asarray(x, np.float32)).all() for x in program(wrong)), name


def check_groups(mesh: Mesh) -> None:
    for case in CASES:
        _check(mesh, *case)


def check_sizes(mesh: Mesh) -> None:
    """Larger, with another tile for each."""
    for case in LARGE:
        _check(mesh, *case)


CHECKS = (check_groups, check_sizes)
