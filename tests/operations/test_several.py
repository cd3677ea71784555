"""`all_gather_matmul` with a tuple of right-hand sides: one gather, a product by each."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtaxfree import all_gather_matmul
from tests.compiled.test_gluon import NAME, launch_of
from tests.helpers.support import (
    TRITON_CALL,
    assert_fused,
    fails,
    lower_for_cuda,
    mesh_of,
    one_program,
    sharded,
    whole_numbers,
)

IMPLEMENTATIONS = (None, "xla", "simulate")
ROWS, COLUMNS = P("tp"), P(None, "tp")


def program(mesh: Mesh, count: int, **keywords: Any) -> Callable:
    """(lhs [M, K], *rhs [K, N_i]) -> the products, and the gathered lhs if it is returned."""
    outs = (COLUMNS,) * count
    return one_program(
        lambda lhs, *rhs: all_gather_matmul(lhs, rhs, "tp", **keywords),
        mesh=mesh,
        in_specs=(ROWS, *outs),
        out_specs=(outs, P()) if keywords.get("return_gathered") else outs,
        check_vma=False,
    )


@pytest.mark.parametrize(
    ("implementation", "world", "dtype", "widths"),
    [
        *((implementation, 4, "float32", (20, 7, 3)) for implementation in IMPLEMENTATIONS),
        *((implementation, 4, "bfloat16", (20, 7, 3)) for implementation in IMPLEMENTATIONS),
        ("simulate", 2, "float16", (1, 33)),
        ("simulate", 3, "float32", (5, 5, 5, 9)),
        ("xla", 3, "float32", (5, 5, 5, 9, 2)),
        ("simulate", 2, "float32", (6,)),
    ],
)
def test_values(implementation: str | None, world: int, dtype: str, widths: tuple[int, ...]) -> None:
    lhs = whole_numbers(0, 2 * world, 24, dtype=dtype, limit=1)
    rhs = [whole_numbers(i, 24, world * n, dtype=dtype, limit=1) for i, n in enumerate(widths, 1)]
    call = program(mesh_of(world), len(widths), implementation=implementation, return_gathered=True)
    outs, gathered = call(lhs, *rhs)
    assert isinstance(outs, tuple) and len(outs) == len(widths)
    np.testing.assert_array_equal(gathered, lhs)
    for out, weights in zip(outs, rhs):
        assert out.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(out, np.float64), np.float64(lhs) @ np.float64(weights))


@pytest.mark.parametrize("kernel", ("few", "portable"))
def test_both_kernels_for_any_gpu(kernel: str) -> None:
    lhs, rhs = whole_numbers(0, 20, 16), [whole_numbers(i, 16, 2 * n) for i, n in enumerate((40, 9, 16), 1)]
    config = {"kernel": kernel, "block_m": 16, "block_n": 16, "block_k": 16}
    outs = program(mesh_of(2), 3, implementation="simulate", config=config)(lhs, *rhs)
    for out, weights in zip(outs, rhs, strict=True):
        np.testing.assert_array_equal(out, lhs @ weights)


@pytest.mark.parametrize(
    ("implementation", "config"),
    [(None, {}), *(("simulate", {"kernel": kernel, "block_m": 16}) for kernel in ("few", "portable"))],
)
def test_transposed(implementation: str | None, config: dict[str, Any]) -> None:
    """Weights that lie as [N_i, K], with a bias for one of them; and the gradients of all operands."""
    lhs, rhs = whole_numbers(0, 6, 16), [whole_numbers(i, 2 * n, 16) for i, n in ((1, 9), (2, 5))]
    bias, how = whole_numbers(3, 10), {"implementation": implementation, "config": config}

    def local(lhs: jax.Array, rhs: tuple, bias: jax.Array, transposed: bool = True, **how: Any) -> Any:
        rhs = rhs if transposed else tuple(each.T for each in rhs)
        return all_gather_matmul(lhs, rhs, "tp", rhs_transposed=transposed, bias=(None, bias), **how)

    def local_gradients(*operands: Any, **how: Any) -> Any:
        outs, back = jax.vjp(functools.partial(local, **how), *operands)
        return back(tuple(jnp.ones_like(out) + i for i, out in enumerate(outs)))

    specs = {"mesh": mesh_of(2), "in_specs": (ROWS, (ROWS, ROWS), ROWS)}
    outs = one_program(functools.partial(local, **how), out_specs=(COLUMNS,) * 2, **specs)(lhs, tuple(rhs), bias)
    np.testing.assert_array_equal(outs[0], lhs @ rhs[0].T)
    np.testing.assert_array_equal(outs[1], lhs @ rhs[1].T + bias)
    found, expected = (
        one_program(functools.partial(local_gradients, **each), out_specs=specs["in_specs"], **specs)(
            lhs, tuple(rhs), bias
        )
        for each in (how, {"transposed": False, "implementation": "xla"})
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("implementation", (None, "simulate"))
def test_along_columns_and_of_more_dimensions(implementation: str | None) -> None:
    """[B, T, K], of which ranks have tokens, or channels."""
    mesh = mesh_of(2)
    lhs, rhs = whole_numbers(0, 3, 4, 16), [whole_numbers(i, 16, 2 * n) for i, n in ((1, 9), (2, 4))]
    for axis, spec in ((1, P(None, "tp")), (-1, P(None, None, "tp"))):
        call = one_program(
            lambda x, *w, axis=axis: all_gather_matmul(x, w, "tp", axis=axis, implementation=implementation),
            mesh=mesh,
            in_specs=(spec, COLUMNS, COLUMNS),
            out_specs=(P(None, None, "tp"),) * 2,
        )
        for out, weights in zip(call(lhs, *rhs), rhs, strict=True):
            np.testing.assert_array_equal(out, lhs @ weights)


@pytest.mark.parametrize("implementation", (None, "simulate"))
@pytest.mark.parametrize("activation", ("silu", (None, "gelu_tanh", jax.nn.silu)))
def test_bias_and_activation_are_one_for_all_or_a_tuple(activation: Any, implementation: str | None) -> None:
    lhs, rhs = whole_numbers(0, 6, 16) / 4, [whole_numbers(i, 16, 2 * n) for i, n in ((1, 5), (2, 5), (3, 5))]
    common, third = whole_numbers(4, 10), whole_numbers(5, 10)
    biases = (None, common, third) if isinstance(activation, tuple) else (common,) * 3

    def local(lhs: jax.Array, rhs: tuple, common: jax.Array, third: jax.Array) -> Any:
        bias = (None, common, third) if isinstance(activation, tuple) else common
        return all_gather_matmul(
            lhs, rhs, "tp", bias=bias, activation=activation, precision="highest", implementation=implementation
        )

    specs = (COLUMNS,) * 3
    call = one_program(local, mesh=mesh_of(2), in_specs=(ROWS, specs, ROWS, ROWS), out_specs=specs)
    outs = call(lhs, tuple(rhs), common, third)
    functions = (lambda x: x, jax.nn.gelu, jax.nn.silu) if isinstance(activation, tuple) else (jax.nn.silu,) * 3
    for out, weights, bias, function in zip(outs, rhs, biases, functions, strict=True):
        expected = lhs @ weights + (0 if bias is None else bias)
        np.testing.assert_allclose(out, function(jnp.asarray(expected, jnp.float32)), rtol=1e-5, atol=1e-5)


def attention(lhs: jax.Array, rhs: tuple, bias: jax.Array, multiply: Callable) -> jax.Array:
    """A function of three products, one of which has a bias, and one of which is not differentiated."""
    query, key, value = multiply(lhs, rhs, (None, bias, None), (None, "silu", None))
    return jnp.sum(jnp.sin(query)) + jnp.sum(jnp.cos(key) * key) + jnp.sum(lax.stop_gradient(value))


@pytest.mark.parametrize("implementation", (None, "simulate"))
def test_gradients(implementation: str | None) -> None:
    mesh, widths = mesh_of(2), (8, 6, 4)
    rng = np.random.default_rng(0)
    lhs, *rhs = (rng.standard_normal(shape, np.float32) for shape in ((6, 16), *((16, n) for n in widths)))
    bias = rng.standard_normal(6, np.float32)

    def by_kernel(lhs: jax.Array, rhs: tuple, bias: tuple, activation: tuple) -> Any:
        keywords = {"activation": activation, "precision": "highest", "implementation": implementation}
        specs = (COLUMNS,) * 3
        call = jax.shard_map(
            lambda lhs, rhs, bias: all_gather_matmul(lhs, rhs, "tp", bias=(None, bias, None), **keywords),
            mesh=mesh,
            in_specs=(ROWS, specs, ROWS),
            out_specs=specs,
        )
        return call(lhs, rhs, bias[1])

    def plain(lhs: jax.Array, rhs: tuple, bias: tuple, activation: tuple) -> Any:
        del activation
        return lhs @ rhs[0], jax.nn.silu(lhs @ rhs[1] + bias[1]), lhs @ rhs[2]

    found, expected = (
        jax.jit(jax.grad(functools.partial(attention, multiply=multiply), (0, 1, 2)))(lhs, tuple(rhs), bias)
        for multiply in (by_kernel, plain)
    )
    for mine, jax_s in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, jax_s, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", (0, 1))
def test_gradients_of_what_is_gathered_and_linear_transpose(axis: int) -> None:
    mesh, widths = mesh_of(2), (8, 6)
    rng = np.random.default_rng(0)
    lhs, *rhs = (rng.standard_normal(shape, np.float32) for shape in ((6, 16), *((16, n) for n in widths)))
    spec = (ROWS, COLUMNS)[axis]
    call = jax.shard_map(
        lambda lhs, *rhs: all_gather_matmul(lhs, rhs, "tp", axis=axis, return_gathered=True, precision="highest"),
        mesh=mesh,
        in_specs=(spec, COLUMNS, COLUMNS),
        out_specs=((COLUMNS, COLUMNS), P(("tp",))),  # of the gathered lhs a copy of each rank, one below the other
    )

    def loss(lhs: jax.Array, *rhs: jax.Array, multiply: Callable) -> jax.Array:
        (query, key), gathered = multiply(lhs, *rhs)
        return jnp.sum(jnp.sin(query)) + jnp.sum(key**2) + jnp.sum(jnp.cos(gathered))

    def plain(lhs: jax.Array, *rhs: jax.Array) -> Any:
        return (lhs @ rhs[0], lhs @ rhs[1]), jnp.concatenate([lhs, lhs])

    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, multiply=multiply), (0, 1, 2)))(lhs, *rhs)
        for multiply in (call, plain)
    )
    for mine, jax_s in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, jax_s, rtol=1e-4, atol=1e-4)
    cts = [rng.standard_normal((6, n), np.float32) for n in widths]
    (back,) = jax.linear_transpose(lambda w: call(lhs, w, rhs[1])[0][0], rhs[0])(cts[0])
    np.testing.assert_allclose(back, lhs.T @ cts[0], rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize(
    ("rows", "compute_capability"),
    [(16, "80"), (1024, "80"), (16, "90"), pytest.param(1024, "90", marks=pytest.mark.slow)],
)
def test_one_kernel_and_no_collective(rows: int, compute_capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", compute_capability)
    mesh, widths = mesh_of(2), (1024, 128, 128)
    call = program(mesh, 3, implementation="fused")
    lhs, *rhs = (
        sharded(mesh, spec, shape, "bfloat16")
        for spec, shape in ((ROWS, (rows, 512)), *((COLUMNS, (512, n)) for n in widths))
    )
    text = lower_for_cuda(call, lhs, *rhs)
    assert_fused(text)
    if compute_capability == "90":
        kernel = "all_gather_matmul_hopper_few_kernel" if rows == 16 else "all_gather_matmul_hopper_kernel"
        assert launch_of(text)[NAME].decode() == kernel


def test_forward_and_backward_are_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gather, which gives what is gathered, and one scatter of the sum of all gradients of lhs."""
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "80")
    mesh, widths = mesh_of(2), (1024, 128, 128)
    call = jax.shard_map(
        lambda lhs, rhs: all_gather_matmul(lhs, rhs, "tp", implementation="fused"),
        mesh=mesh,
        in_specs=(ROWS, COLUMNS),
        out_specs=(COLUMNS,) * 3,
    )
    lhs, *rhs = (
        sharded(mesh, spec, shape, "bfloat16")
        for spec, shape in ((ROWS, (16, 512)), *((COLUMNS, (512, n)) for n in widths))
    )
    gradients = jax.grad(lambda lhs, rhs: sum(jnp.sum(jnp.sin(out)) for out in call(lhs, rhs)), (0, 1))
    assert_fused(lower_for_cuda(gradients, lhs, tuple(rhs)), calls=2)


@pytest.mark.parametrize("axis", (0, 1))
def test_vmap(axis: int) -> None:
    """Over lhs it stays one kernel, along whose rows the examples lie; over rhs it is the reference."""
    mesh = mesh_of(2)
    lhs, rhs = whole_numbers(0, 3, 4, 8), [whole_numbers(i, 8, 6) for i in (1, 2)]

    def mapped(implementation: str | None, *of_rhs: int | None) -> Callable:
        return one_program(
            jax.vmap(
                lambda x, *w: all_gather_matmul(x, w, "tp", axis=axis, bias=w[0][0], implementation=implementation),
                in_axes=(0, *of_rhs),
            ),
            mesh=mesh,
            in_specs=(P(None, *(ROWS, COLUMNS)[axis]), COLUMNS, COLUMNS),
            out_specs=(P(None, None, "tp"),) * 2,
        )

    for implementation in (None, "simulate"):
        for out, weights in zip(mapped(implementation, None, None)(lhs, *rhs), rhs, strict=True):
            np.testing.assert_array_equal(out, lhs @ weights + rhs[0][0])
    lowered = lower_for_cuda(
        mapped("fused", None, None),
        *(sharded(mesh, P(), x.shape, "bfloat16") for x in (lhs, *rhs)),
    )
    assert lowered.count(TRITON_CALL) == 1
    each = np.stack([rhs[0]] * 3, axis=2)
    with pytest.raises(NotImplementedError, match=r"jax\.lax\.map"):
        mapped("simulate", 2, None)(lhs, each, rhs[1])


def test_errors() -> None:
    lhs, rhs = np.zeros((4, 8), np.float32), (np.zeros((8, 6), np.float32), np.zeros((8, 4), np.float32))

    def call(rhs: tuple = rhs, **keywords: Any) -> Any:
        local = functools.partial(all_gather_matmul, axis_name="tp", **keywords)
        return jax.eval_shape(
            jax.shard_map(
                lambda x, w: local(x, w), mesh=mesh_of(2), in_specs=(ROWS, P()), out_specs=P("tp"), check_vma=False
            ),
            lhs,
            rhs,
        )

    with fails(ValueError, "no residual with a tuple of rhs"):
        call(residual=np.zeros((4, 6), np.float32))
    with fails(ValueError, "no gate with a tuple of rhs"):
        call(gate=rhs[0])
    with fails(ValueError, "not an empty tuple"):
        call(())
    with fails(ValueError, "one bias for all 2 rhs or a tuple of 2, not of 3"):
        call(bias=(None, None, None))
    with fails(ValueError, "one activation for all 2 rhs or a tuple of 2, not of 1"):
        call(activation=("silu",))
    with fails(ValueError, "a bias of shape [4] here, not [6]"):
        call(bias=np.zeros(6, np.float32))
    with fails(ValueError, "8 is not 9"):
        call((rhs[0], np.zeros((9, 4), np.float32)))
    with fails(ValueError, "several rhs of one dtype, not bfloat16, float32"):
        call((rhs[0], rhs[1].astype(jnp.bfloat16)))


def test_more_than_kernels_take_is_refused_with_a_reason() -> None:
    mesh = mesh_of(2)
    rhs = [sharded(mesh, COLUMNS, (64, 32), "bfloat16")] * 5
    with fails(NotImplementedError, "it takes up to 4 rhs, not 5"):
        lower_for_cuda(program(mesh, 5, implementation="fused"), sharded(mesh, ROWS, (16, 64), "bfloat16"), *rhs)


@pytest.mark.parametrize(("axis", "many"), ((0, True), (-1, False)))
def test_rows_of_all_ranks_are_counted_where_rows_are_gathered(
    axis: int, many: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """40 of each rank are 80, of which XLA's products of f32 are faster; of columns they are 40 rows of all ranks."""
    mesh, lhs = mesh_of(2), (80, 32) if axis == 0 else (40, 32)
    call = functools.partial(all_gather_matmul, axis_name="tp", axis=axis)
    specs = (ROWS if axis == 0 else COLUMNS, (COLUMNS, COLUMNS))
    rhs = [sharded(mesh, COLUMNS, (32, 64), "float32") for _ in range(2)]
    f = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(COLUMNS, COLUMNS))
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        lower_for_cuda(f, sharded(mesh, specs[0], lhs, "float32"), tuple(rhs))
    assert ("many rows" in caplog.text) == many
    assert many or "not been measured" in caplog.text
