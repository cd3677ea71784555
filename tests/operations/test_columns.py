"""Products whose ranks have columns: all_gather_matmul along K, and matmul_reduce_scatter along N."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtaxfree import all_gather_matmul, matmul_reduce_scatter
from tests.helpers.support import assert_fused, fails, lower_for_cuda, mesh_of, one_program, sharded, whole_numbers

COLUMNS = P(None, None, "tp")
IMPLEMENTATIONS = (None, "xla", "simulate")


def gathered(mesh: Mesh, **keywords: Any) -> Callable:
    """[B, T, K] @ [K, N], whose lhs is sharded along K, and rhs and the result along N."""
    return one_program(
        functools.partial(all_gather_matmul, axis_name="tp", axis=-1, **keywords),
        mesh=mesh,
        in_specs=(COLUMNS, P(None, "tp")),
        out_specs=COLUMNS,
    )


def scattered(mesh: Mesh, **keywords: Any) -> Callable:
    """[B, T, K] @ [K, N], whose operands are sharded along K, and the result along N."""
    return one_program(
        functools.partial(matmul_reduce_scatter, axis_name="tp", scatter_dimension=-1, **keywords),
        mesh=mesh,
        in_specs=(COLUMNS, P("tp")),
        out_specs=COLUMNS,
    )


@pytest.mark.parametrize("program", (gathered, scattered))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_values(program: Callable, implementation: str | None, dtype: str) -> None:
    mesh = mesh_of(4)
    lhs, rhs = whole_numbers(0, 2, 7, 24, dtype=dtype, limit=1), whole_numbers(1, 24, 20, dtype=dtype, limit=1)
    out = program(mesh, implementation=implementation)(lhs, rhs)
    assert out.dtype == jnp.dtype(dtype)
    assert out.sharding.spec == COLUMNS
    np.testing.assert_array_equal(np.asarray(out, np.float64), np.float64(lhs) @ np.float64(rhs))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_gathered_is_returned(implementation: str | None) -> None:
    lhs, rhs = whole_numbers(0, 3, 5, 16), whole_numbers(1, 16, 12)
    program = jax.shard_map(
        lambda a, b: all_gather_matmul(a, b, "tp", axis=2, return_gathered=True, implementation=implementation),
        mesh=mesh_of(4),
        in_specs=(COLUMNS, P(None, "tp")),
        out_specs=(COLUMNS, P()),
        check_vma=False,
    )
    out, whole = jax.jit(program)(lhs, rhs)
    np.testing.assert_array_equal(out, lhs @ rhs)
    np.testing.assert_array_equal(whole, lhs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_epilogues(implementation: str | None) -> None:
    """Of the gather a gate, of the scatter a residual; the bias has this rank's columns."""
    mesh = mesh_of(4)
    lhs, rhs, gate = (whole_numbers(i, *shape) for i, shape in enumerate(((9, 16), (16, 24), (16, 24))))
    bias, residual = whole_numbers(3, 24), whole_numbers(4, 9, 24)
    columns, common = P(None, "tp"), {"axis_name": "tp", "implementation": implementation, "precision": "highest"}
    up = one_program(
        lambda x, w, g, b: all_gather_matmul(x, w, axis=1, gate=g, bias=b, activation="silu", **common),
        mesh=mesh,
        in_specs=(columns, columns, columns, P("tp")),
        out_specs=columns,
    )
    down = one_program(
        lambda x, w, b, r: matmul_reduce_scatter(x, w, scatter_dimension=1, bias=b, residual=r, **common),
        mesh=mesh,
        in_specs=(columns, P("tp"), P("tp"), columns),
        out_specs=columns,
    )
    expected = jax.nn.silu(lhs @ gate) * (lhs @ rhs + bias)
    np.testing.assert_allclose(up(lhs, rhs, gate, bias), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(down(lhs, rhs, bias, residual), lhs @ rhs + bias + residual, rtol=1e-6)


def mlp(mesh: Mesh, **keywords: Any) -> Callable:
    """A layer whose tokens are whole and whose channels are sharded."""

    def local(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(all_gather_matmul(x, up, "tp", axis=1, **keywords))
        return matmul_reduce_scatter(hidden, down, "tp", scatter_dimension=1, **keywords)

    specs = (P(None, "tp"), P(None, "tp"), P("tp"))
    return one_program(local, mesh=mesh, in_specs=specs, out_specs=P(None, "tp"))


@pytest.mark.parametrize("implementation", (None, "simulate"))
def test_gradients(implementation: str | None) -> None:
    """Each of the two is the other one's transpose."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, np.float32) for shape in ((9, 16), (16, 24), (24, 16))]

    def gradients(function: Callable) -> Any:
        return jax.jit(jax.grad(lambda *args: jnp.sin(function(*args)).sum(), (0, 1, 2)))(*arrays)

    found = gradients(mlp(mesh_of(4), implementation=implementation, precision="highest"))
    for mine, jax_s in zip(found, gradients(lambda x, up, down: jax.nn.silu(x @ up) @ down)):
        np.testing.assert_allclose(mine, jax_s, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("no_code")
def test_an_mlp_has_no_collective_forward_and_backward() -> None:
    mesh = mesh_of(4)
    program = mlp(mesh, implementation="fused")
    columns = P(None, "tp")
    shapes = ((columns, (64, 256)), (columns, (256, 512)), (P("tp"), (512, 256)))
    arrays = [sharded(mesh, *shape, "bfloat16") for shape in shapes]
    assert_fused(lower_for_cuda(program, *arrays), calls=2)
    assert_fused(lower_for_cuda(jax.grad(lambda *args: jnp.sin(program(*args)).sum(), (0, 1, 2)), *arrays), calls=4)


@pytest.mark.parametrize("compute_capability", ("80", "90"))
def test_every_kernel_lowers(compute_capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", compute_capability)
    mesh = mesh_of(2)
    up, down = gathered(mesh, implementation="fused"), scattered(mesh, implementation="fused")
    lhs = sharded(mesh, COLUMNS, (2, 512, 1024), "bfloat16")
    for program, spec in ((up, P(None, "tp")), (down, P("tp"))):
        assert_fused(lower_for_cuda(program, lhs, sharded(mesh, spec, (1024, 2048), "bfloat16")))


def test_vmap() -> None:
    """Rows of several examples are rows of one product."""
    mesh = mesh_of(2)
    lhs, rhs = whole_numbers(0, 3, 5, 8), whole_numbers(1, 8, 6)
    program = jax.shard_map(
        jax.vmap(lambda a, b: all_gather_matmul(a, b, "tp", axis=1, implementation="simulate"), in_axes=(0, None)),
        mesh=mesh,
        in_specs=(COLUMNS, P(None, "tp")),
        out_specs=COLUMNS,
    )
    np.testing.assert_array_equal(jax.jit(program)(lhs, rhs), lhs @ rhs)


def test_errors() -> None:
    mesh = mesh_of(4)
    with fails(ValueError, "contracts the last dimension", "from each of 4 ranks"):
        gathered(mesh)(np.ones((2, 3, 16)), np.ones((12, 8)))
    with fails(ValueError, "cannot scatter dimension 2", "6 is not a multiple of 4"):
        scattered(mesh)(np.ones((2, 3, 16)), np.ones((16, 6)))
    bias = functools.partial(matmul_reduce_scatter, axis_name="tp", scatter_dimension=1)
    program = jax.shard_map(
        lambda a, b, c: bias(a, b, bias=c), mesh=mesh, in_specs=(P(None, "tp"), P("tp"), P()), out_specs=P(None, "tp")
    )
    with fails(ValueError, "bias", "[8]", "[2]"):
        program(np.ones((3, 16)), np.ones((16, 8)), np.ones(8))


def test_the_same_sum_as_lax() -> None:
    """Every order of the ranks along two axes."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    lhs, rhs = whole_numbers(0, 5, 16), whole_numbers(1, 16, 8)
    for axes in (("a", "b"), ("b", "a")):
        specs = {"mesh": mesh, "in_specs": (P(None, axes), P(axes)), "out_specs": P(None, axes)}
        mine = one_program(
            lambda a, b, axes=axes: matmul_reduce_scatter(a, b, axes, scatter_dimension=1, implementation="simulate"),
            **specs,
        )
        jax_s = one_program(
            lambda a, b, axes=axes: lax.psum_scatter(a @ b, axes, scatter_dimension=1, tiled=True), **specs
        )
        np.testing.assert_array_equal(mine(lhs, rhs), jax_s(lhs, rhs))
