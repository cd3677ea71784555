"""`matmul_reduce_scatter` as a JAX operation: values, transformations, errors, what it lowers to. No GPU needed."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtaxfree import all_gather_matmul, matmul_reduce_scatter
from jaxtaxfree.ops import matmul_reduce_scatter as scatter_ops
from jaxtaxfree.ops import register
from jaxtaxfree.ops.matmul_reduce_scatter import few, hopper, hopper_few, portable
from jaxtaxfree.ops.shapes import MatmulShape
from tests.compiled.test_gluon import NAME, launch_of
from tests.conftest import MeshFactory
from tests.helpers.support import (
    COLUMNS,
    DTYPES,
    ROWS,
    TRITON_CALL,
    assert_fused,
    assert_not_fused,
    by_shape,
    exact_product,
    fails,
    lower_for_cuda,
    mesh_of,
    one_program,
    portable_choice,
    product_call,
    row_parallel_operands,
    sharded,
    whole_numbers,
)
from tests.helpers.support import (
    row_parallel_shapes as shapes,
)

M, K, N = 60, 33, 37  # of the whole lhs and result, but K is that of a rank


def row_parallel(mesh: Mesh, axis_name: Any = "tp", *, check_vma: bool = True, **keywords: Any) -> Callable:
    """lhs @ rhs of whole arrays, by `matmul_reduce_scatter`."""
    return one_program(
        functools.partial(matmul_reduce_scatter, axis_name=axis_name, **keywords),
        mesh=mesh,
        in_specs=(P(None, axis_name), P(axis_name)),
        out_specs=P(axis_name),
        check_vma=check_vma,
    )


def plain(mesh: Mesh) -> Callable:
    """The same in `lax`, for derivatives to be compared with."""
    return one_program(
        lambda lhs, rhs: lax.psum_scatter(lhs @ rhs, "tp", tiled=True),
        mesh=mesh,
        in_specs=(COLUMNS, ROWS),
        out_specs=ROWS,
    )


operands = functools.partial(row_parallel_operands, m=M, k=K, n=N)


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of(4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", (None, "xla"))
@pytest.mark.parametrize("check_vma", (True, False))
def test_values(mesh: Mesh, dtype: str, implementation: str | None, check_vma: bool) -> None:
    lhs, rhs = operands(dtype=dtype)
    out = jax.jit(row_parallel(mesh, check_vma=check_vma, implementation=implementation))(lhs, rhs)
    assert out.dtype == jnp.dtype(dtype)
    assert out.sharding.spec == ROWS
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, dtype))


@hypothesis.given(
    data=st.data(),
    world=st.sampled_from((1, 2, 4, 8)),
    dtype=st.sampled_from(DTYPES),
    lead=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    k=st.integers(1, 10),
    n=st.integers(1, 9),
)
def test_shapes_and_dimensions(data: st.DataObject, world: int, dtype: str, lead: list[int], k: int, n: int) -> None:
    dimension = data.draw(st.integers(0, len(lead) - 1), label="dimension")
    named = data.draw(st.sampled_from((dimension, dimension - len(lead) - 1)), label="as given")
    shape = [size * world if i == dimension else size for i, size in enumerate(lead)]
    lhs = whole_numbers(0, *shape, world * k, dtype=dtype, limit=1)
    rhs = whole_numbers(1, world * k, n, dtype=dtype, limit=1)
    out = jax.shard_map(
        lambda a, b: matmul_reduce_scatter(a, b, "tp", scatter_dimension=named),
        mesh=mesh_of(world),
        in_specs=(P(*[None] * len(lead), "tp"), ROWS),
        out_specs=P(*[None] * dimension, "tp"),
    )(lhs, rhs)
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, dtype))


@pytest.mark.parametrize("dimension", (1, -1))
def test_scatters_columns_by_reference(mesh: Mesh, dimension: int) -> None:
    lhs, rhs = operands(n=40)
    program = jax.shard_map(
        lambda a, b: matmul_reduce_scatter(a, b, "tp", scatter_dimension=dimension),
        mesh=mesh,
        in_specs=(COLUMNS, ROWS),
        out_specs=COLUMNS,
    )
    np.testing.assert_array_equal(program(lhs, rhs), exact_product(lhs, rhs, "float32"))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("result", ("float32", "float16"))
def test_preferred_element_type(mesh: Mesh, dtype: str, result: str) -> None:
    lhs, rhs = operands(dtype=dtype)
    out = row_parallel(mesh, preferred_element_type=result)(lhs, rhs)
    assert out.dtype == jnp.dtype(result)
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, result))


def test_operands_of_different_dtypes(mesh: Mesh) -> None:
    lhs, rhs = operands()
    out = row_parallel(mesh)(lhs.astype(ml_dtypes.bfloat16), rhs)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, "float32"))


@pytest.mark.parametrize("implementation", (None, "xla"))
def test_precision_reaches_the_product(mesh: Mesh, implementation: str | None) -> None:
    def text(**keywords: Any) -> str:
        program = row_parallel(mesh, implementation=implementation, **keywords)
        return jax.jit(program).lower(*shapes(mesh, "float32")).as_text()

    assert "HIGHEST" in text(precision="highest")
    assert "HIGHEST" not in text()
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in text()


@pytest.mark.parametrize("m", (12, 272))  # by either kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_simulated(mesh: Mesh, m: int, dtype: str) -> None:
    lhs, rhs = operands(dtype=dtype, m=m)
    out = jax.jit(row_parallel(mesh, implementation="simulate", precision="highest"))(lhs, rhs)
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, dtype))


@pytest.mark.parametrize("world, m, k, n", ((1, 17, 8, 40), (2, 34, 24, 16), (3, 15, 40, 72), (4, 132, 16, 24)))
@pytest.mark.parametrize("dtype, result, block_m", (("bfloat16", None, 32), ("float16", "float32", 64)))
def test_simulated_on_hopper(world: int, m: int, k: int, n: int, dtype: str, result: str | None, block_m: int) -> None:
    """Tiles that are clipped at all ends, by few programs, and of which a step takes a half or a quarter."""
    lhs, rhs = operands(world, dtype, m=m, k=k, n=n)
    config = hopper.Config(block_m=block_m, block_n=64, block_k=16, num_stages=2, programs=3, chunk=512)
    program = row_parallel(mesh_of(world), implementation="simulate", preferred_element_type=result, config=config)
    np.testing.assert_array_equal(jax.jit(program)(lhs, rhs), exact_product(lhs, rhs, result or dtype))


@pytest.mark.parametrize("world, m", ((1, 3), (2, 2), (3, 15), (4, 20)))
@pytest.mark.parametrize("dtype, result", (("bfloat16", None), ("float16", "float32")))
@pytest.mark.parametrize("exact_wire", (False, True))
def test_simulated_on_hopper_with_few_rows(
    world: int, m: int, dtype: str, result: str | None, exact_wire: bool
) -> None:
    lhs, rhs = operands(world, dtype, m=m, k=40, n=72)
    tile = {"block_m": 32, "block_n": 16, "block_k": 16, "num_stages": 2}
    program = row_parallel(
        mesh_of(world),
        implementation="simulate",
        preferred_element_type=result,
        config=hopper_few.Config(**tile, exact_wire=exact_wire),
    )
    np.testing.assert_array_equal(jax.jit(program)(lhs, rhs), exact_product(lhs, rhs, result or dtype))


@pytest.mark.parametrize("world", (1, 2, 4))
@pytest.mark.parametrize("lag", (1, 3, 4, 100))
def test_simulated_with_a_lag(world: int, lag: int) -> None:
    """Of the three tiles of a rank all are carried, or some of them, or none."""
    lhs, rhs = operands(world=world, m=12 * world)
    config = portable.Config(block_m=16, block_n=16, block_k=16, num_warps=1, lag=lag)
    program = row_parallel(mesh_of(world), implementation="simulate", precision="highest", config=config)
    np.testing.assert_array_equal(jax.jit(program)(lhs, rhs), exact_product(lhs, rhs, "float32"))


@pytest.mark.parametrize("m, lag", ((128, 132), (384, 132), (512, 128), (2048, 132)))
def test_the_lag_follows_the_tiles(m: int, lag: int) -> None:
    assert by_shape(scatter_ops, "portable", product_call(scatter_ops, 4 * m, 1024, 8192, world=4)).lag == lag


@pytest.mark.parametrize("m, dtype", ((64, "float32"), (65, "bfloat16"), (512, "bfloat16")))
def test_few_rows_travel_as_f32(m: int, dtype: str) -> None:
    call = product_call(scatter_ops, 4 * m, 1024, 512, world=4)
    assert portable_choice(scatter_ops, call).config.exact_wire == (dtype == "float32")


@pytest.mark.parametrize("m", (8, 272))
def test_sums_are_rounded_once(mesh: Mesh, m: int) -> None:
    """Four parts of 1 + 2**-9 each: in bf16 a part alone is 1, and their sum 4 + 2**-7 is 4."""
    lhs = np.tile(np.array([1, 2**-9], jnp.bfloat16), (m, 4))
    rhs = np.ones((8, 5), jnp.bfloat16)
    wanted = {True: 4 * (1 + 2**-9), False: 4}
    for exact_wire, value in wanted.items():
        kernel = few if m == 8 else portable
        config = kernel.Config(block_m=16, block_n=16, block_k=16, num_warps=4, exact_wire=exact_wire)
        program = row_parallel(mesh, implementation="simulate", preferred_element_type="float32", config=config)
        found = np.asarray(jax.jit(program)(lhs, rhs))
        # Without the exact wire, what stays on the rank is not rounded.
        own = 2**-9 if not exact_wire and m != 8 else 0
        np.testing.assert_array_equal(found, np.full((m, 5), value + own))


def test_explicit_mesh() -> None:
    mesh = Mesh(mesh_of(4).devices, ("tp",), axis_types=(AxisType.Explicit,))
    lhs, rhs = operands()
    with jax.set_mesh(mesh):
        placed = (jax.device_put(lhs, NamedSharding(mesh, COLUMNS)), jax.device_put(rhs, NamedSharding(mesh, ROWS)))
        out = jax.jit(row_parallel(mesh))(*placed)
    assert jax.typeof(out).sharding.spec == P("tp", None)
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, "float32"))


def test_one_device() -> None:
    lhs, rhs = operands(world=1)
    np.testing.assert_array_equal(row_parallel(mesh_of(1))(lhs, rhs), exact_product(lhs, rhs, "float32"))


def test_permuted_devices() -> None:
    mesh = Mesh(np.array(jax.devices("cpu"))[[5, 2, 7, 0]], ("tp",))
    lhs, rhs = operands()
    np.testing.assert_array_equal(row_parallel(mesh)(lhs, rhs), exact_product(lhs, rhs, "float32"))


@pytest.mark.parametrize("dims", ((2, 4), (4, 2)))
@pytest.mark.parametrize("implementation", (None, "simulate"))
def test_one_axis_of_two(cpu_mesh: MeshFactory, dims: tuple[int, int], implementation: str | None) -> None:
    mesh = cpu_mesh(dims, ("dp", "tp"))
    lhs, rhs = whole_numbers(0, dims[0], 24, 16), whole_numbers(1, dims[0], 16, 24)
    program = jax.shard_map(
        lambda a, b: matmul_reduce_scatter(a[0], b[0], "tp", implementation=implementation)[None],
        mesh=mesh,
        in_specs=(P("dp", None, "tp"), P("dp", "tp")),
        out_specs=P("dp", "tp"),
    )
    np.testing.assert_array_equal(jax.jit(program)(lhs, rhs), exact_product(lhs, rhs, "float32"))


@pytest.mark.parametrize("axes", (("dp", "tp"), ("tp", "dp")))
def test_axis_tuple_counts_the_last_axis_fastest(cpu_mesh: MeshFactory, axes: tuple[str, str]) -> None:
    lhs, rhs = operands(world=8, m=64)
    program = row_parallel(cpu_mesh((2, 4), ("dp", "tp")), axes)
    np.testing.assert_array_equal(program(lhs, rhs), exact_product(lhs, rhs, "float32"))


def test_operand_that_is_the_same_everywhere(mesh: Mesh) -> None:
    # Its type varies along no axis, and the primitive wants both operands to vary alike.
    lhs, rhs = operands(world=1)
    program = jax.shard_map(
        lambda a, b: matmul_reduce_scatter(lax.pcast(a, "tp", to="varying"), b, "tp"),
        mesh=mesh,
        in_specs=(P(), P()),
        out_specs=ROWS,
    )
    np.testing.assert_array_equal(program(lhs, rhs), 4 * exact_product(lhs, rhs, "float32"))


def test_donated_operand(mesh: Mesh) -> None:
    lhs, rhs = operands(k=16, n=64, m=64)
    wanted = exact_product(lhs, rhs, "float32")
    donated = jax.device_put(rhs, NamedSharding(mesh, ROWS))
    out = jax.jit(row_parallel(mesh), donate_argnums=1)(lhs, donated)
    assert donated.is_deleted()
    np.testing.assert_array_equal(out, wanted)


def layer(x: jax.Array, up: jax.Array, down: jax.Array, **keywords: Any) -> jax.Array:
    """x [M, K], up [K, F], down [F, K] of a rank -> [M, K], so that a loop can carry it."""
    return matmul_reduce_scatter(all_gather_matmul(x, up, "tp", **keywords), down, "tp", **keywords)


def scanned(x: jax.Array, up: jax.Array, down: jax.Array, **keywords: Any) -> jax.Array:
    return lax.scan(lambda carry, _: (layer(carry, up, down, **keywords), None), x, length=2)[0]


def looped(x: jax.Array, up: jax.Array, down: jax.Array, **keywords: Any) -> jax.Array:
    step = lambda state: (state[0] + 1, layer(state[1], up, down, **keywords))  # noqa: E731
    return lax.while_loop(lambda state: state[0] < 2, step, (0, x))[1]


@pytest.mark.parametrize("body", (scanned, looped))
@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("implementation", (None, "simulate"))
def test_loops(mesh: Mesh, body: Callable, check_vma: bool, implementation: str | None) -> None:
    x, up, down = whole_numbers(0, 8, 5, limit=1), whole_numbers(1, 5, 12, limit=1), whole_numbers(2, 12, 5, limit=1)
    program = jax.shard_map(
        functools.partial(body, implementation=implementation, precision="highest"),
        mesh=mesh,
        in_specs=(ROWS, COLUMNS, ROWS),
        out_specs=ROWS,
        check_vma=check_vma,
    )
    np.testing.assert_array_equal(jax.jit(program)(x, up, down), x @ up @ down @ up @ down)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("check_vma", (True, False))
def test_gradients(mesh: Mesh, dtype: str, check_vma: bool) -> None:
    lhs, rhs = operands(dtype=dtype)
    weights = whole_numbers(2, M, N, dtype=dtype)

    def gradients(function: Callable) -> tuple[jax.Array, jax.Array]:
        loss = lambda a, b: (function(a, b) * weights).astype(jnp.float32).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)

    found = gradients(row_parallel(mesh, check_vma=check_vma))
    assert [g.dtype for g in found] == [lhs.dtype, rhs.dtype]
    for mine, lax_s in zip(found, gradients(plain(mesh))):
        np.testing.assert_array_equal(mine, lax_s)
    np.testing.assert_array_equal(found[0], exact_product(weights, rhs.T, dtype))
    np.testing.assert_array_equal(found[1], exact_product(lhs.T, weights, dtype))


@pytest.mark.parametrize("dimension", (0, 1))
def test_gradients_of_more_dimensions(mesh: Mesh, dimension: int) -> None:
    lhs, rhs = whole_numbers(0, 4, 8, 12), whole_numbers(1, 12, 5)
    weights = whole_numbers(2, 4, 8, 5)
    program = jax.shard_map(
        lambda a, b: matmul_reduce_scatter(a, b, "tp", scatter_dimension=dimension),
        mesh=mesh,
        in_specs=(P(None, None, "tp"), ROWS),
        out_specs=P(*[None] * dimension, "tp"),
    )
    found = jax.grad(lambda a, b: (program(a, b) * weights).sum(), (0, 1))(lhs, rhs)
    np.testing.assert_array_equal(found[0], exact_product(weights, rhs.T, "float32"))
    np.testing.assert_array_equal(found[1], exact_product(lhs.reshape(32, 12).T, weights.reshape(32, 5), "float32"))


def test_gradient_inside_shard_map(mesh: Mesh) -> None:
    lhs, rhs = operands()

    def local(a: jax.Array, b: jax.Array) -> tuple:
        return jax.grad(lambda a, b: lax.psum((matmul_reduce_scatter(a, b, "tp") ** 2).sum(), "tp"), (0, 1))(a, b)

    found = jax.shard_map(local, mesh=mesh, in_specs=(COLUMNS, ROWS), out_specs=(COLUMNS, ROWS))(lhs, rhs)
    product = exact_product(lhs, rhs, "float64")
    np.testing.assert_allclose(found[0], 2 * product @ rhs.T.astype(np.float64), rtol=1e-6)
    np.testing.assert_allclose(found[1], 2 * lhs.T.astype(np.float64) @ product, rtol=1e-6)


def test_gradient_of_preferred_element_type(mesh: Mesh) -> None:
    lhs, rhs = operands(dtype="bfloat16")
    program = row_parallel(mesh, preferred_element_type="float32")
    found = jax.grad(lambda a, b: program(a, b).sum(), (0, 1))(lhs, rhs)
    assert [g.dtype for g in found] == [jnp.bfloat16, jnp.bfloat16]
    np.testing.assert_array_equal(found[1], exact_product(lhs.T, np.ones((M, N)), "bfloat16"))


def test_jvp(mesh: Mesh) -> None:
    lhs, rhs = operands()
    lhs_dot, rhs_dot = whole_numbers(2, *lhs.shape), whole_numbers(3, *rhs.shape)
    out, out_dot = jax.jvp(row_parallel(mesh), (lhs, rhs), (lhs_dot, rhs_dot))
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, "float32"))
    wanted = exact_product(lhs_dot, rhs, "float32") + exact_product(lhs, rhs_dot, "float32")
    np.testing.assert_array_equal(out_dot, wanted)


def mlp(mesh: Mesh, check_vma: bool = True, **keywords: Any) -> Callable:
    """A tensor-parallel MLP of whole arrays: x [M, K], up [K, F], down [F, K] -> [M, K]."""

    def local(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        h = jax.nn.silu(all_gather_matmul(x, up, "tp", **keywords))
        return matmul_reduce_scatter(h, down, "tp", **keywords)

    return one_program(local, mesh=mesh, in_specs=(ROWS, COLUMNS, ROWS), out_specs=ROWS, check_vma=check_vma)


def mlp_operands(m: int = 20, k: int = 18, f: int = 32) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = ((m, k), (k, f), (f, k))
    return tuple(jax.random.normal(key, size) / size[0] ** 0.5 for key, size in zip(keys, sizes))


@pytest.mark.parametrize("implementation", (None, "simulate"))
@pytest.mark.parametrize("check_vma", (True, False))
def test_gradients_of_an_mlp(mesh: Mesh, implementation: str | None, check_vma: bool) -> None:
    x, up, down = mlp_operands()

    def gradients(function: Callable) -> Any:
        return jax.jit(jax.grad(lambda *args: jnp.sin(function(*args)).sum(), (0, 1, 2)))(x, up, down)

    found = gradients(mlp(mesh, check_vma, implementation=implementation, precision="highest"))
    wanted = gradients(lambda x, up, down: jax.nn.silu(x @ up) @ down)
    for mine, jax_s in zip(found, wanted):
        np.testing.assert_allclose(mine, jax_s, atol=1e-5)


@pytest.mark.parametrize("implementation", (None, "simulate"))
@pytest.mark.parametrize("check_vma", (True, False))
def test_gradients_with_data_parallelism(cpu_mesh: MeshFactory, implementation: str | None, check_vma: bool) -> None:
    """Weights that are the same along another axis get the sum of its gradients."""
    x, up, down = mlp_operands()

    def local(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        keywords = {"axis_name": "tp", "implementation": implementation, "precision": "highest"}
        return matmul_reduce_scatter(jax.nn.silu(all_gather_matmul(x, up, **keywords)), down, **keywords)

    rows = P(("dp", "tp"))
    program = jax.shard_map(
        local, mesh=cpu_mesh((2, 2), ("dp", "tp")), in_specs=(rows, COLUMNS, ROWS), out_specs=rows, check_vma=check_vma
    )

    def gradients(function: Callable) -> Any:
        return jax.jit(jax.grad(lambda *args: jnp.sin(function(*args)).sum(), (0, 1, 2)))(x, up, down)

    for mine, jax_s in zip(gradients(program), gradients(lambda x, up, down: jax.nn.silu(x @ up) @ down)):
        np.testing.assert_allclose(mine, jax_s, atol=1e-5)


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("check_vma", (True, False))
def test_an_mlp_has_no_collective_forward_and_backward(mesh: Mesh, check_vma: bool) -> None:
    program = mlp(mesh, check_vma, implementation="fused")
    arrays = [sharded(mesh, *of, "bfloat16") for of in ((ROWS, (64, 32)), (COLUMNS, (32, 128)), (ROWS, (128, 32)))]
    assert_fused(lower_for_cuda(program, *arrays), calls=2)
    text = lower_for_cuda(jax.grad(lambda *args: jnp.sin(program(*args)).sum(), (0, 1, 2)), *arrays)
    assert_fused(text, calls=4)
    # No operand of a kernel; only the result of a plain product, for which that is a matter of its layout.
    assert text.count("stablehlo.transpose") == 1


@pytest.mark.parametrize("rows, calls", ((64, 2), (2048, 3)))
def test_an_mlp_has_the_kernels_that_were_measured_faster(mesh: Mesh, rows: int, calls: int) -> None:
    """Those of its products, and of many rows that of a gradient that gathers; nothing is gathered by XLA beside it."""
    program = mlp(mesh)
    arrays = [sharded(mesh, *of, "bfloat16") for of in ((ROWS, (rows, 32)), (COLUMNS, (32, 128)), (ROWS, (128, 32)))]
    assert lower_for_cuda(program, *arrays).count(TRITON_CALL) == 2
    text = lower_for_cuda(jax.grad(lambda *args: jnp.sin(program(*args)).sum(), (0, 1, 2)), *arrays)
    assert text.count(TRITON_CALL) == calls
    assert text.count("stablehlo.all_gather") == 3 - calls


def test_second_order(mesh: Mesh) -> None:
    """Every derivative of the three operations, each of which appears in the second derivatives of another."""
    x, up, down = mlp_operands()
    tangents = mlp_operands()[::-1]
    tangents = tuple(jnp.ones_like(p) + 0.1 * jnp.resize(t, p.shape) for p, t in zip((x, up, down), tangents))

    def hessian_vector_products(function: Callable) -> Any:
        gradient = jax.grad(lambda *args: jnp.sin(function(*args)).sum(), (0, 1, 2))
        forward = lambda *primals: jax.jvp(gradient, primals, tangents)[1]  # noqa: E731
        dot = lambda *primals: sum(jnp.vdot(g, t) for g, t in zip(gradient(*primals), tangents))  # noqa: E731
        return jax.jit(forward)(x, up, down), jax.jit(jax.grad(dot, (0, 1, 2)))(x, up, down)

    wanted = hessian_vector_products(lambda x, up, down: jax.nn.silu(x @ up) @ down)
    for way, jax_s in zip(hessian_vector_products(mlp(mesh)), wanted):
        for mine, value in zip(way, jax_s):
            np.testing.assert_allclose(mine, value, rtol=1e-4, atol=1e-4)


def test_remat_computes_the_product_again(mesh: Mesh) -> None:
    x, up, down = mlp_operands()
    loss = lambda *args: jnp.sin(mlp(mesh)(*args)).sum()  # noqa: E731
    again = jax.grad(jax.checkpoint(loss), (0, 1, 2))
    for mine, wanted in zip(again(x, up, down), jax.grad(loss, (0, 1, 2))(x, up, down)):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("in_axes", ((0, None), (2, None), (None, 0), (0, 0), (1, 2)))
def test_vmap(mesh: Mesh, in_axes: tuple, check_vma: bool) -> None:
    stacked, specs = [], []
    for x, dim, sharded_dim in zip(operands(), in_axes, (1, 0), strict=True):
        stacked.append(x if dim is None else np.stack([x, 2 * x, x[::-1]], axis=dim))
        before = sharded_dim + (dim is not None and dim <= sharded_dim)
        specs.append(P(*[None] * before, "tp"))
    program = jax.shard_map(
        jax.vmap(lambda a, b: matmul_reduce_scatter(a, b, "tp"), in_axes=in_axes),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=P(None, "tp"),
        check_vma=check_vma,
    )
    examples = [x if dim is None else np.moveaxis(x, dim, 0) for x, dim in zip(stacked, in_axes, strict=True)]
    np.testing.assert_array_equal(program(*stacked), exact_product(*examples, "float32"))


def test_vmap_of_gradients(mesh: Mesh) -> None:
    lhs, rhs = operands()
    stacked = np.stack([lhs, 2 * lhs])
    gradient = lambda f: jax.vmap(jax.grad(lambda a, b: (f(a, b) ** 2).sum(), (0, 1)), in_axes=(0, None))  # noqa: E731
    for mine, lax_s in zip(gradient(row_parallel(mesh))(stacked, rhs), gradient(plain(mesh))(stacked, rhs)):
        np.testing.assert_array_equal(mine, lax_s)


def test_contraction_mismatch(mesh: Mesh) -> None:
    with fails(ValueError, "contracts the last dimension of lhs", "[60, 33]", "[32, 37]", "33 is not 32"):
        row_parallel(mesh)(whole_numbers(0, M, 4 * K), whole_numbers(1, 4 * 32, N))


def test_scalar_operand(mesh: Mesh) -> None:
    program = jax.shard_map(lambda a: matmul_reduce_scatter(a, 1.0, "tp"), mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    with fails(ValueError, "matmul_reduce_scatter takes no scalars", "()"):
        program(np.ones((4, 4)))


@pytest.mark.parametrize("dimension", (2, -3))
def test_dimension_out_of_range(mesh: Mesh, dimension: int) -> None:
    with fails(ValueError, f"cannot scatter dimension {dimension} of a product [60, 37]"):
        row_parallel(mesh, scatter_dimension=dimension)(*operands())


def test_rows_that_the_ranks_do_not_divide(mesh: Mesh) -> None:
    with fails(ValueError, "[62, 37] over 4 ranks", "62 is not a multiple of 4"):
        row_parallel(mesh)(*operands(m=62))


def test_outside_shard_map() -> None:
    with fails(NameError, "matmul_reduce_scatter needs a mesh axis", "'tp'", "call it inside jax.shard_map"):
        matmul_reduce_scatter(*operands(), "tp")


def test_unknown_implementation(mesh: Mesh) -> None:
    with fails(ValueError, "no implementation 'triton'", "None, 'fused', 'xla'"):
        row_parallel(mesh, implementation="triton")(*operands())


@pytest.mark.parametrize(
    ("keywords", "part"),
    (
        ({"preferred_element_type": "float64"}, "not float64"),
        ({"precision": "BF16_BF16_F32_X9"}, "no precision"),
    ),
)
def test_what_fused_cannot_do(mesh: Mesh, keywords: dict[str, Any], part: str) -> None:
    with jax.enable_x64(True), fails(NotImplementedError, "matmul_reduce_scatter", part):
        row_parallel(mesh, implementation="fused", **keywords)(*operands(n=40))


def test_fused_on_cpus_names_the_platform(mesh: Mesh) -> None:
    with fails(NotImplementedError, "matmul_reduce_scatter", "for NVIDIA GPUs", "lowered for cpu"):
        jax.jit(row_parallel(mesh, implementation="fused"))(*operands())


@pytest.mark.parametrize("implementation", (None, "fused", "xla"))
def test_config_with_an_unknown_key(mesh: Mesh, implementation: str | None) -> None:
    with fails(ValueError, "matmul_reduce_scatter has no setting 'block_q'"):
        row_parallel(mesh, implementation=implementation, config={"block_q": 64})(*operands())


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("dtype", DTYPES)
def test_lowers_to_one_kernel(mesh: Mesh, check_vma: bool, dtype: str) -> None:
    program = row_parallel(mesh, implementation="fused", check_vma=check_vma)
    assert_fused(lower_for_cuda(program, *shapes(mesh, dtype)))


def test_xla_lowers_to_none(mesh: Mesh) -> None:
    assert_not_fused(lower_for_cuda(row_parallel(mesh, implementation="xla"), *shapes(mesh)), "reduce_scatter")


@pytest.mark.parametrize(
    "config", (portable.Config(), {"block_m": 32, "block_n": 64, "block_k": 32, "num_warps": 4}, {"exact_wire": False})
)
def test_config_is_taken(mesh: Mesh, config: Any) -> None:
    assert_fused(lower_for_cuda(row_parallel(mesh, implementation="fused", config=config), *shapes(mesh)))


def test_lowers_on_an_explicit_mesh() -> None:
    mesh = Mesh(mesh_of(4).devices, ("tp",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        assert_fused(lower_for_cuda(row_parallel(mesh, implementation="fused"), *shapes(mesh)))


def kernel_of(mesh: Mesh, *shape: Any, **keywords: Any) -> str:
    """The name of the kernel that is launched for such operands."""
    program = row_parallel(mesh, implementation="fused", **keywords)
    return launch_of(lower_for_cuda(program, *shapes(mesh, *shape)))[NAME].decode()


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize(
    "m, k, n",
    (
        (8192, 8192, 8192),
        (8448, 544, 4096),
        (8192, 28672, 8192),
        (4096, 14336, 4096),
        (2048, 28672, 8192),
        (512, 28672, 8192),
        (1024, 8192, 2048),
    ),
)
@pytest.mark.usefixtures("no_code")
def test_hopper_has_a_kernel_of_its_own_for_many_rows(mesh: Mesh, dtype: str, m: int, k: int, n: int) -> None:
    assert kernel_of(mesh, dtype, m, k, n) == "matmul_reduce_scatter_hopper_kernel"


@pytest.mark.usefixtures("no_code")
def test_the_kernel_for_hopper_takes_an_epilogue(mesh: Mesh) -> None:
    others = {"bias": jnp.zeros(8192), "activation": "silu", "residual": jnp.zeros((2048, 8192), jnp.float16)}
    assert kernel_of(mesh, "bfloat16", 8192, 512, 8192, **others) == "matmul_reduce_scatter_hopper_kernel"


@pytest.mark.parametrize(
    "shape, keywords",
    (
        (("float32", 8192, 512, 8192), {}),
        (("bfloat16", 8192, 500, 8192), {}),  # rows that TMA does not take
        (("bfloat16", 8192, 512, 8196), {}),
        (("bfloat16", 8192, 512, 8192), {"residual": jnp.zeros((2048, 8192))}),
        (("bfloat16", 8192, 512, 8192), {"config": {"exact_wire": True}}),
        (("bfloat16", 8192, 512, 8192), {"capability": 80}),
        (("bfloat16", 8192, 512, 8192), {"capability": 100}),
    ),
)
@pytest.mark.usefixtures("no_code")
def test_others_are_multiplied_by_the_portable_kernel(
    mesh: Mesh, shape: tuple, keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keywords = dict(keywords)
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", str(keywords.pop("capability", 90)))
    assert kernel_of(mesh, *shape, **keywords) == "matmul_reduce_scatter_kernel"


@pytest.mark.parametrize("shape", register.OPERATIONS["matmul_reduce_scatter"].shapes, ids=lambda shape: shape.name)
def test_the_kernel_for_hopper_takes_every_listed_shape(mesh: Mesh, shape: MatmulShape) -> None:
    name = kernel_of(mesh, "bfloat16", shape.m, shape.k, shape.n, config={"kernel": "hopper"})
    assert name == "matmul_reduce_scatter_hopper_kernel"


@pytest.mark.usefixtures("no_code")
def test_what_the_kernel_for_hopper_cannot_do(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "80")
    parts = ("9.0, not 8.0", "float16 and bfloat16, not float32", "125 and 512 elements", "a residual of float16 and")
    with fails(NotImplementedError, "matmul_reduce_scatter ('hopper')", *parts):
        kernel_of(mesh, "float32", 2048, 500, 512, residual=jnp.zeros((512, 512)), config={"kernel": "hopper"})


@pytest.mark.parametrize("body", (scanned, looped))
def test_loops_keep_the_kernels(mesh: Mesh, body: Callable) -> None:
    program = jax.shard_map(
        functools.partial(body, implementation="fused"), mesh=mesh, in_specs=(ROWS, COLUMNS, ROWS), out_specs=ROWS
    )
    arrays = [sharded(mesh, *of, "bfloat16") for of in ((ROWS, (64, 32)), (COLUMNS, (32, 128)), (ROWS, (128, 32)))]
    text = lower_for_cuda(program, *arrays)
    assert_fused(text, calls=2)
    assert "stablehlo.while" in text


def test_partly_manual_mesh_cannot_be_fused(cpu_mesh: MeshFactory) -> None:
    mesh = cpu_mesh((2, 4), ("dp", "tp"))
    program = jax.shard_map(
        lambda a, b: matmul_reduce_scatter(a, b, "tp", implementation="fused"),
        mesh=mesh,
        in_specs=(COLUMNS, ROWS),
        out_specs=ROWS,
        axis_names={"tp"},
    )
    with fails(NotImplementedError, "matmul_reduce_scatter", "['dp']", "make all axes manual"):
        lower_for_cuda(program, *shapes(mesh))


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("shape", register.OPERATIONS["matmul_reduce_scatter"].shapes, ids=lambda shape: shape.name)
def test_the_shapes_of_the_benchmarks_can_be_fused(mesh: Mesh, shape: MatmulShape) -> None:
    program = row_parallel(mesh, implementation="fused")
    assert_fused(lower_for_cuda(program, *shapes(mesh, "bfloat16", shape.m, shape.k, shape.n)))


@pytest.mark.parametrize(
    "m, k, n, dtype, precision, why",
    (
        (4096, 2048, 512, "float32", None, "TF32 products of many rows"),
        (64, 4096, 4096, "float32", "highest", "more than TF32 precision"),
    ),
)
def test_xla_is_taken_where_it_was_measured_faster(
    mesh: Mesh, caplog: pytest.LogCaptureFixture, m: int, k: int, n: int, dtype: str, precision: str | None, why: str
) -> None:
    arrays = shapes(mesh, dtype, m, k, n)
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        assert_not_fused(lower_for_cuda(row_parallel(mesh, precision=precision), *arrays), "reduce_scatter")
    assert why in caplog.text
    assert_fused(lower_for_cuda(row_parallel(mesh, precision=precision, implementation="fused"), *arrays))


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("rows", (16, 64, 256, 512, 8192))
def test_the_kernel_is_taken_where_it_was_measured_faster(mesh: Mesh, rows: int) -> None:
    assert_fused(lower_for_cuda(row_parallel(mesh), *shapes(mesh, "bfloat16", rows, 4096, 4096)))


def test_one_rank_has_nothing_to_scatter(caplog: pytest.LogCaptureFixture) -> None:
    mesh = mesh_of(1)
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        assert TRITON_CALL not in lower_for_cuda(row_parallel(mesh), *shapes(mesh))
    assert "one rank" in caplog.text
