"""What holds for every operation alike, as a JAX primitive. No GPU needed."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.support import assert_fused, lower_for_cuda, mesh_of, sharded

# Each takes x, [8, 16] on every rank.
CALLS: dict[str, Callable] = {
    "psum": lambda x, **keywords: jtf.psum(x, "tp", **keywords),
    "all_gather": lambda x, **keywords: jtf.all_gather(x, "tp", **keywords),
    "psum_scatter": lambda x, **keywords: jtf.psum_scatter(x, "tp", tiled=True, **keywords),
    "all_gather_matmul": lambda x, **keywords: jtf.all_gather_matmul(x, x.T, "tp", **keywords),
    "all_gather_matmul-gathered": lambda x, **keywords: jtf.all_gather_matmul(
        x, x.T, "tp", return_gathered=True, **keywords
    )[1],
    "all_gather_matmul-silu": lambda x, **keywords: jtf.all_gather_matmul(x, x.T, "tp", activation="silu", **keywords),
    "matmul_reduce_scatter": lambda x, **keywords: jtf.matmul_reduce_scatter(x, x.T, "tp", **keywords),
    "matmul_reduce_scatter-silu": lambda x, **keywords: jtf.matmul_reduce_scatter(
        x, x.T, "tp", activation="silu", **keywords
    ),
    "matmul_all_reduce": lambda x, **keywords: jtf.matmul_all_reduce(x, x.T, "tp", **keywords),
    "matmul_all_reduce-silu": lambda x, **keywords: jtf.matmul_all_reduce(x, x.T, "tp", activation="silu", **keywords),
    "decode_attention": lambda x, **keywords: jtf.decode_attention(
        x.reshape(2, 4, 16), x.reshape(2, 4, 1, 16), x.reshape(2, 4, 1, 16), "tp", **keywords
    ),
}


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of(4)


each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def scaled(mesh: Mesh, call: Callable, **keywords: str) -> Callable:
    """The call inside `jax.vmap` over something else, by which its result is multiplied."""

    def local(x: jax.Array, scales: jax.Array) -> jax.Array:
        return jax.vmap(lambda scale: scale * call(x, **keywords))(scales)[None]

    return jax.shard_map(local, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"), check_vma=False)


@each_call
def test_vmap_over_something_else(mesh: Mesh, call: Callable) -> None:
    x = np.random.default_rng(0).normal(size=(8 * mesh.size, 16)).astype(np.float32)
    plain = jax.shard_map(lambda x: call(x)[None], mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False)
    found = scaled(mesh, call)(x, jnp.array([1.0, -2.0]))
    np.testing.assert_allclose(found, np.stack([plain(x), -2 * plain(x)], axis=1), rtol=1e-6)


@each_call
def test_vmap_over_something_else_stays_fused(mesh: Mesh, call: Callable) -> None:
    x = sharded(mesh, P("tp"), (8 * mesh.size, 16), "bfloat16")
    scales = sharded(mesh, P(), (2,), "bfloat16")
    assert_fused(lower_for_cuda(scaled(mesh, call, implementation="fused"), x, scales))


def test_gradients_inside_vmap_over_something_else(mesh: Mesh) -> None:
    """Which give the gathered lhs besides."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=size).astype(np.float32) for size in ((8 * mesh.size, 16), (16, 8 * mesh.size)))

    def gradient(operation: Callable) -> Callable:
        def local(x: jax.Array, w: jax.Array, scales: jax.Array) -> jax.Array:
            loss = lambda w, scale: scale * (operation(x, w) ** 2).sum()  # noqa: E731
            return jax.vmap(jax.grad(loss), in_axes=(None, 0))(w, scales)

        specs = (P("tp"), P(None, "tp"), P())
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, None, "tp"), check_vma=False)

    found = gradient(lambda x, w: jtf.all_gather_matmul(x, w, "tp", precision="highest"))
    wanted = gradient(lambda x, w: jnp.matmul(jax.lax.all_gather(x, "tp", tiled=True), w, precision="highest"))
    scales = jnp.array([1.0, -2.0])
    np.testing.assert_allclose(found(x, w, scales), wanted(x, w, scales), rtol=1e-5)
