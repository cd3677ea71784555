"""A thousand calls on GPUs, one after the other in a loop, each of which has to be right."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

CALLS = 1000


def whole(mesh: Mesh, spec: P, *shape: int, dtype: Any = jnp.bfloat16, seed: int = 0) -> jax.Array:
    """Whole numbers, of which every product and sum is exact."""
    make = jax.jit(
        lambda: jax.random.randint(jax.random.key(seed), shape, -2, 3).astype(dtype),
        out_shardings=NamedSharding(mesh, spec),
    )
    return make()


class Case(NamedTuple):
    """A function of a rank's operands, what says where its result is right, and the operands with their specs."""

    call: Callable
    right: Callable
    specs: tuple[P, ...]
    operands: tuple[Any, ...]


def checked(mesh: Mesh, case: Case) -> Callable[[], jax.Array]:
    """How many of a thousand calls, one after the other in a loop, are not right, on each rank.

    Each has another first operand: one that found the last call's data in its buffers would be wrong. It is turned by
    rows of 256 bytes or more, because XLA hands parts of arrays to kernels as they lie.
    """

    def run(x: jax.Array, *others: jax.Array) -> jax.Array:
        def body(i: jax.Array, wrong: jax.Array) -> jax.Array:
            rows = x.reshape(-1, 64) if x.ndim == 1 else x
            turned = jnp.roll(rows, i, axis=0).reshape(x.shape)
            return wrong + jnp.any(~case.right(case.call(turned, *others), turned, *others)).astype(jnp.int32)

        return lax.fori_loop(0, CALLS, body, jnp.zeros((), jnp.int32))[None]

    program = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=case.specs, out_specs=P("tp"), check_vma=False))
    # XLA would time its products to choose between them.
    compiled = program.lower(*case.operands).compile(compiler_options={"xla_gpu_autotune_level": 0})
    return functools.partial(compiled, *case.operands)
