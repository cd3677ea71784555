"""`all_gather_matmul` as a JAX operation: values, transformations, errors, and what it lowers to. No GPU needed."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax_triton
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtaxfree import all_gather_matmul
from jaxtaxfree.ops import register
from jaxtaxfree.ops.all_gather_matmul import portable
from jaxtaxfree.ops.shapes import MatmulShape
from tests.conftest import MeshFactory
from tests.helpers.support import (
    DTYPES,
    TRITON_CALL,
    assert_fused,
    assert_not_fused,
    exact_product,
    fails,
    lower_for_cuda,
    mesh_of,
    one_program,
    sharded,
    whole_numbers,
)

ROWS, COLUMNS = P("tp"), P(None, "tp")
M, K, N = 60, 129, 37  # of the whole lhs, and of one rank's rhs


def column_parallel(mesh: Mesh, axis_name: Any = "tp", *, check_vma: bool = True, **keywords: Any) -> Callable:
    """all_gather(lhs) @ rhs of whole arrays, by `all_gather_matmul`."""
    return one_program(
        functools.partial(all_gather_matmul, axis_name=axis_name, **keywords),
        mesh=mesh,
        in_specs=(P(axis_name), P(None, axis_name)),
        out_specs=P(None, axis_name),
        check_vma=check_vma,
    )


def plain(mesh: Mesh) -> Callable:
    """The same in `lax`, for derivatives to be compared with."""
    return one_program(
        lambda lhs, rhs: lax.all_gather(lhs, "tp", tiled=True) @ rhs,
        mesh=mesh,
        in_specs=(ROWS, COLUMNS),
        out_specs=COLUMNS,
    )


def operands(world: int = 4, dtype: Any = "float32", m: int = M, k: int = K, n: int = N) -> tuple:
    """lhs [m, k] and rhs [k, world * n]."""
    return whole_numbers(0, m, k, dtype=dtype), whole_numbers(1, k, world * n, dtype=dtype)


def shapes(mesh: Mesh, dtype: Any = "bfloat16", m: int = 64, k: int = 64, n: int = 128) -> tuple:
    """Operands for lowering."""
    return sharded(mesh, ROWS, (m, k), dtype), sharded(mesh, COLUMNS, (k, n), dtype)


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of(4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", (None, "xla"))
@pytest.mark.parametrize("check_vma", (True, False))
def test_values(mesh: Mesh, dtype: str, implementation: str | None, check_vma: bool) -> None:
    lhs, rhs = operands(dtype=dtype)
    out = jax.jit(column_parallel(mesh, check_vma=check_vma, implementation=implementation))(lhs, rhs)
    assert out.dtype == jnp.dtype(dtype)
    assert out.sharding.spec == COLUMNS
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, dtype))


@hypothesis.given(
    data=st.data(),
    world=st.sampled_from((1, 2, 4, 8)),
    dtype=st.sampled_from(DTYPES),
    lead=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    k=st.integers(1, 40),
    n=st.integers(1, 9),
)
def test_shapes_and_axes(data: st.DataObject, world: int, dtype: str, lead: list[int], k: int, n: int) -> None:
    axis = data.draw(st.integers(0, len(lead) - 1), label="axis")
    named = data.draw(st.sampled_from((axis, axis - len(lead) - 1)), label="as given")
    shape = [size * world if i == axis else size for i, size in enumerate(lead)]
    lhs, rhs = whole_numbers(0, *shape, k, dtype=dtype), whole_numbers(1, k, world * n, dtype=dtype)
    out = jax.shard_map(
        lambda a, b: all_gather_matmul(a, b, "tp", axis=named),
        mesh=mesh_of(world),
        in_specs=(P(*[None] * axis, "tp"), COLUMNS),
        out_specs=P(*[None] * len(lead), "tp"),
    )(lhs, rhs)
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, dtype))


@pytest.mark.parametrize("axis", (1, -1))
def test_gathers_the_contracted_dimension_by_reference(mesh: Mesh, axis: int) -> None:
    lhs, rhs = operands(k=64)
    program = jax.shard_map(
        lambda a, b: all_gather_matmul(a, b, "tp", axis=axis), mesh=mesh, in_specs=(COLUMNS, COLUMNS), out_specs=COLUMNS
    )
    np.testing.assert_array_equal(program(lhs, rhs), exact_product(lhs, rhs, "float32"))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("result", ("float32", "float16"))
def test_preferred_element_type(mesh: Mesh, dtype: str, result: str) -> None:
    lhs, rhs = operands(dtype=dtype)
    out = column_parallel(mesh, preferred_element_type=result)(lhs, rhs)
    assert out.dtype == jnp.dtype(result)
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, result))


def test_operands_of_different_dtypes(mesh: Mesh) -> None:
    lhs, rhs = operands()
    out = column_parallel(mesh)(lhs.astype(ml_dtypes.bfloat16), rhs)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, "float32"))


@pytest.mark.parametrize("implementation", (None, "xla"))
def test_precision_reaches_the_product(mesh: Mesh, implementation: str | None) -> None:
    def text(**keywords: Any) -> str:
        program = column_parallel(mesh, implementation=implementation, **keywords)
        return jax.jit(program).lower(*shapes(mesh, "float32")).as_text()

    assert "HIGHEST" in text(precision="highest")
    assert "HIGHEST" in text(precision=lax.Precision.HIGHEST)
    assert "HIGHEST" not in text()
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in text()


def test_explicit_mesh() -> None:
    mesh = Mesh(mesh_of(4).devices, ("tp",), axis_types=(AxisType.Explicit,))
    lhs, rhs = operands()
    with jax.set_mesh(mesh):
        placed = (jax.device_put(lhs, NamedSharding(mesh, ROWS)), jax.device_put(rhs, NamedSharding(mesh, COLUMNS)))
        out = jax.jit(column_parallel(mesh))(*placed)
    assert jax.typeof(out).sharding.spec == COLUMNS
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, "float32"))


def test_one_device() -> None:
    lhs, rhs = operands(world=1)
    np.testing.assert_array_equal(column_parallel(mesh_of(1))(lhs, rhs), exact_product(lhs, rhs, "float32"))


def test_permuted_devices() -> None:
    mesh = Mesh(np.array(jax.devices("cpu"))[[5, 2, 7, 0]], ("tp",))
    lhs, rhs = operands()
    np.testing.assert_array_equal(column_parallel(mesh)(lhs, rhs), exact_product(lhs, rhs, "float32"))


@pytest.mark.parametrize("dims", ((2, 4), (4, 2)))
def test_one_axis_of_two(cpu_mesh: MeshFactory, dims: tuple[int, int]) -> None:
    mesh = cpu_mesh(dims, ("dp", "tp"))
    lhs, rhs = whole_numbers(0, dims[0], 24, K), whole_numbers(1, dims[0], K, 24)
    program = jax.shard_map(
        lambda a, b: all_gather_matmul(a[0], b[0], "tp")[None],
        mesh=mesh,
        in_specs=(P("dp", "tp"), P("dp", None, "tp")),
        out_specs=P("dp", None, "tp"),
    )
    np.testing.assert_array_equal(program(lhs, rhs), exact_product(lhs, rhs, "float32"))


@pytest.mark.parametrize("axes", (("dp", "tp"), ("tp", "dp")))
def test_axis_tuple_counts_the_last_axis_fastest(cpu_mesh: MeshFactory, axes: tuple[str, str]) -> None:
    lhs, rhs = operands(world=8, m=64)
    program = column_parallel(cpu_mesh((2, 4), ("dp", "tp")), axes)
    np.testing.assert_array_equal(program(lhs, rhs), exact_product(lhs, rhs, "float32"))


def test_operand_that_is_the_same_everywhere(mesh: Mesh) -> None:
    # Its type varies along no axis, and the primitive wants both operands to vary alike.
    lhs, rhs = operands()
    program = jax.shard_map(
        lambda a, b: all_gather_matmul(a, b, "tp"), mesh=mesh, in_specs=(ROWS, P()), out_specs=P("tp", None)
    )
    np.testing.assert_array_equal(program(lhs, rhs), np.tile(exact_product(lhs, rhs, "float32"), (4, 1)))


def test_donated_operand(mesh: Mesh) -> None:
    lhs, rhs = operands(m=64, k=64)
    wanted = exact_product(lhs, rhs, "float32")
    donated = jax.device_put(rhs, NamedSharding(mesh, COLUMNS))
    out = jax.jit(column_parallel(mesh), donate_argnums=1)(lhs, donated)
    assert donated.is_deleted()
    np.testing.assert_array_equal(out, wanted)


def gathered_too(mesh: Mesh, **keywords: Any) -> Callable:
    """The product, and for each rank the gathered lhs."""
    return one_program(
        functools.partial(all_gather_matmul, axis_name="tp", return_gathered=True, **keywords),
        mesh=mesh,
        in_specs=(ROWS, COLUMNS),
        out_specs=(COLUMNS, ROWS),
    )


@pytest.mark.parametrize("implementation", (None, "xla", "simulate"))
@pytest.mark.parametrize("m", (16, 272))  # by either kernel
def test_return_gathered(mesh: Mesh, implementation: str | None, m: int) -> None:
    lhs, rhs = operands(m=m, k=40, n=5)
    out, gathered = jax.jit(gathered_too(mesh, implementation=implementation, precision="highest"))(lhs, rhs)
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, "float32"))
    np.testing.assert_array_equal(gathered, np.tile(lhs, (4, 1)))


@pytest.mark.parametrize("m", (64, 2048))
def test_return_gathered_lowers_to_one_kernel(mesh: Mesh, m: int) -> None:
    assert_fused(lower_for_cuda(gathered_too(mesh), *shapes(mesh, m=m)))


def test_gradients_with_the_gathered_operand(mesh: Mesh) -> None:
    """The gradient of rhs uses what was gathered, and that of lhs has the part that came through it."""
    lhs, rhs = operands()
    weights = whole_numbers(2, M, 4 * N), whole_numbers(3, 4 * M, K)

    def loss(lhs: jax.Array, rhs: jax.Array, through_gathered: float) -> jax.Array:
        out, gathered = gathered_too(mesh)(lhs, rhs)
        return (out * weights[0]).sum() + through_gathered * (gathered * weights[1]).sum()

    for through_gathered in (0.0, 1.0):
        found = jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs, through_gathered)
        gathered_part = through_gathered * weights[1].reshape(4, M, K).sum(0)
        np.testing.assert_array_equal(found[0], exact_product(weights[0], rhs.T, "float32") + gathered_part)
        np.testing.assert_array_equal(found[1], exact_product(lhs.T, weights[0], "float32"))
    program = gathered_too(mesh, implementation="fused")
    product_alone = jax.grad(lambda a, b: jnp.sin(program(a, b)[0]).sum(), (0, 1))
    assert_fused(lower_for_cuda(product_alone, *shapes(mesh)), calls=2)


def own_rows(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """[M, K] -> [M, K] of a rank, so that a loop can carry it."""
    out = all_gather_matmul(lhs, rhs, "tp")
    return lax.dynamic_slice_in_dim(out, lax.axis_index("tp") * lhs.shape[0], lhs.shape[0])


def scanned(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return lax.scan(lambda carry, _: (own_rows(carry, rhs), None), lhs, length=3)[0]


def looped(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    step = lambda state: (state[0] + 1, own_rows(state[1], rhs))  # noqa: E731
    return lax.while_loop(lambda state: state[0] < 3, step, (0, lhs))[1]


@pytest.mark.parametrize("body", (scanned, looped))
@pytest.mark.parametrize("check_vma", (True, False))
def test_loops(mesh: Mesh, body: Callable, check_vma: bool) -> None:
    lhs = whole_numbers(0, 8, 5, limit=1)
    rhs = whole_numbers(1, 4, 5, 5, limit=1)  # one for each rank
    program = jax.shard_map(
        lambda a, b: body(a, b[0]), mesh=mesh, in_specs=(ROWS, ROWS), out_specs=ROWS, check_vma=check_vma
    )
    wanted = np.concatenate([lhs[2 * r : 2 * r + 2] @ np.linalg.matrix_power(rhs[r], 3) for r in range(4)])
    np.testing.assert_array_equal(jax.jit(program)(lhs, rhs), wanted)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("check_vma", (True, False))
def test_gradients(mesh: Mesh, dtype: str, check_vma: bool) -> None:
    lhs, rhs = operands(dtype=dtype)
    weights = whole_numbers(2, M, 4 * N, dtype=dtype)

    def gradients(function: Callable) -> tuple[jax.Array, jax.Array]:
        loss = lambda a, b: (function(a, b) * weights).astype(jnp.float32).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)

    found = gradients(column_parallel(mesh, check_vma=check_vma))
    assert [g.dtype for g in found] == [lhs.dtype, rhs.dtype]
    for mine, lax_s in zip(found, gradients(plain(mesh))):
        np.testing.assert_array_equal(mine, lax_s)
    np.testing.assert_array_equal(found[1], exact_product(lhs.T, weights, dtype))
    if dtype == "float32":  # of bf16 the ranks' parts of the other one are rounded before they are added
        np.testing.assert_array_equal(found[0], exact_product(weights, rhs.T, dtype))


def test_gradient_inside_shard_map(mesh: Mesh) -> None:
    lhs, rhs = operands()

    def local(a: jax.Array, b: jax.Array) -> tuple:
        return jax.grad(lambda a, b: lax.psum((all_gather_matmul(a, b, "tp") ** 2).sum(), "tp"), (0, 1))(a, b)

    found = jax.shard_map(local, mesh=mesh, in_specs=(ROWS, COLUMNS), out_specs=(ROWS, COLUMNS))(lhs, rhs)
    product = exact_product(lhs, rhs, "float64")
    np.testing.assert_allclose(found[0], 2 * product @ rhs.T.astype(np.float64), rtol=1e-6)
    np.testing.assert_allclose(found[1], 2 * lhs.T.astype(np.float64) @ product, rtol=1e-6)


def test_gradient_of_preferred_element_type(mesh: Mesh) -> None:
    lhs, rhs = operands(dtype="bfloat16")
    program = column_parallel(mesh, preferred_element_type="float32")
    found = jax.grad(lambda a, b: program(a, b).sum(), (0, 1))(lhs, rhs)
    assert [g.dtype for g in found] == [jnp.bfloat16, jnp.bfloat16]
    np.testing.assert_array_equal(found[1], exact_product(lhs.T, np.ones((M, 4 * N)), "bfloat16"))


def test_jvp(mesh: Mesh) -> None:
    lhs, rhs = operands()
    lhs_dot, rhs_dot = whole_numbers(2, *lhs.shape), whole_numbers(3, *rhs.shape)
    out, out_dot = jax.jvp(column_parallel(mesh), (lhs, rhs), (lhs_dot, rhs_dot))
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, "float32"))
    wanted = exact_product(lhs_dot, rhs, "float32") + exact_product(lhs, rhs_dot, "float32")
    np.testing.assert_array_equal(out_dot, wanted)


def test_linearize(mesh: Mesh) -> None:
    lhs, rhs = operands()
    lhs_dot, rhs_dot = whole_numbers(2, *lhs.shape), whole_numbers(3, *rhs.shape)
    out, linear = jax.linearize(column_parallel(mesh), jnp.asarray(lhs), jnp.asarray(rhs))
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, "float32"))
    wanted = exact_product(lhs_dot, rhs, "float32") + exact_product(lhs, rhs_dot, "float32")
    np.testing.assert_array_equal(jax.jit(linear)(lhs_dot, rhs_dot), wanted)


def test_second_order(mesh: Mesh) -> None:
    lhs, rhs = operands()
    tangents = jnp.asarray(whole_numbers(2, *lhs.shape)), jnp.asarray(whole_numbers(3, *rhs.shape))

    def hessian_vector_product(function: Callable) -> tuple:
        gradient = jax.grad(lambda a, b: (jnp.sin(function(a, b) / 50)).sum(), (0, 1))
        return jax.jit(lambda *primals: jax.jvp(gradient, primals, tangents)[1])(lhs, rhs)

    for mine, lax_s in zip(hessian_vector_product(column_parallel(mesh)), hessian_vector_product(plain(mesh))):
        assert np.abs(lax_s).max() > 0.1
        np.testing.assert_allclose(mine, lax_s, rtol=1e-4, atol=1e-4)


def test_remat_computes_the_product_again(mesh: Mesh) -> None:
    lhs, rhs = operands()
    program = column_parallel(mesh)
    loss = lambda a, b: jnp.sin(program(a, b) / 50).sum()  # noqa: E731
    again = jax.grad(jax.checkpoint(loss), (0, 1))
    for mine, wanted in zip(again(lhs, rhs), jax.grad(loss, (0, 1))(lhs, rhs)):
        np.testing.assert_allclose(mine, wanted, rtol=1e-6, atol=1e-6)
    calls = [str(jax.make_jaxpr(f)(lhs, rhs)).count(" all_gather_matmul[") for f in (jax.grad(loss, (0, 1)), again)]
    assert calls == [1, 2]


@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("in_axes", ((0, None), (2, None), (None, 0), (None, 1), (0, 0), (1, 2)))
def test_vmap(mesh: Mesh, in_axes: tuple, check_vma: bool) -> None:
    stacked, specs = [], []
    for x, dim, sharded_dim in zip(operands(), in_axes, (0, 1), strict=True):
        stacked.append(x if dim is None else np.stack([x, 2 * x, x[::-1]], axis=dim))
        before = sharded_dim + (dim is not None and dim <= sharded_dim)
        specs.append(P(*[None] * before, "tp"))
    program = jax.shard_map(
        jax.vmap(lambda a, b: all_gather_matmul(a, b, "tp"), in_axes=in_axes),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=P(None, None, "tp"),
        check_vma=check_vma,
    )
    examples = [x if dim is None else np.moveaxis(x, dim, 0) for x, dim in zip(stacked, in_axes, strict=True)]
    np.testing.assert_array_equal(program(*stacked), exact_product(*examples, "float32"))


def test_vmap_along_the_gathered_axis() -> None:
    lhs, rhs = whole_numbers(0, 4, 15, K), whole_numbers(1, 4, K, N)
    out = jax.vmap(lambda a, b: all_gather_matmul(a, b, "i"), axis_name="i")(lhs, rhs)
    np.testing.assert_array_equal(out, exact_product(lhs.reshape(60, K), rhs, "float32"))


def test_vmap_along_the_gathered_axis_inside_shard_map(mesh: Mesh) -> None:
    lhs, rhs = whole_numbers(0, 2, 16, K), whole_numbers(1, K, 4 * N)
    program = jax.shard_map(
        jax.vmap(lambda a, b: all_gather_matmul(a, b, "i"), in_axes=(0, None), axis_name="i"),
        mesh=mesh,
        in_specs=(P(), COLUMNS),
        out_specs=P(None, None, "tp"),
        check_vma=False,  # JAX itself gathers along no axis of vmap where it keeps account of the mesh's
    )
    wanted = exact_product(lhs.reshape(32, K), rhs, "float32")
    np.testing.assert_array_equal(program(lhs, rhs), np.stack([wanted, wanted]))


def test_vmap_of_gradients(mesh: Mesh) -> None:
    lhs, rhs = operands()
    stacked = np.stack([lhs, 2 * lhs])
    gradient = lambda f: jax.vmap(jax.grad(lambda a, b: f(a, b).sum(), (0, 1)), in_axes=(0, None))  # noqa: E731
    for mine, lax_s in zip(gradient(column_parallel(mesh))(stacked, rhs), gradient(plain(mesh))(stacked, rhs)):
        np.testing.assert_array_equal(mine, lax_s)


def test_contraction_mismatch(mesh: Mesh) -> None:
    with fails(ValueError, "contracts the last dimension of lhs", "[15, 129]", "[128, 37]", "129 is not 128"):
        column_parallel(mesh)(whole_numbers(0, M, K), whole_numbers(1, K - 1, 4 * N))


def test_scalar_operand(mesh: Mesh) -> None:
    program = jax.shard_map(lambda a: all_gather_matmul(a, 1.0, "tp"), mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    with fails(ValueError, "takes no scalars", "()"):
        program(np.ones((4, 4)))


@pytest.mark.parametrize("axis", (2, -3))
def test_axis_out_of_range(mesh: Mesh, axis: int) -> None:
    with fails(ValueError, f"cannot gather axis {axis} of lhs", "(15, 129)"):
        column_parallel(mesh, axis=axis)(*operands())


def test_unbound_axis_name(mesh: Mesh) -> None:
    program = jax.shard_map(
        lambda a, b: all_gather_matmul(a, b, "model"), mesh=mesh, in_specs=(ROWS, COLUMNS), out_specs=COLUMNS
    )
    with fails(NameError, "all_gather_matmul needs a mesh axis", "'model'", "jax.shard_map"):
        program(*operands())


def test_axis_tuple_with_a_wrong_name(mesh: Mesh) -> None:
    program = jax.shard_map(
        lambda a, b: all_gather_matmul(a, b, ("tp", "model")), mesh=mesh, in_specs=(ROWS, COLUMNS), out_specs=COLUMNS
    )
    with fails(NameError, "all_gather_matmul needs a mesh axis", "'model'", "axis_name=()"):
        program(*operands())


def test_outside_shard_map() -> None:
    with fails(NameError, "all_gather_matmul needs a mesh axis", "'tp'", "call it inside jax.shard_map"):
        all_gather_matmul(*operands(), "tp")


def test_unknown_implementation(mesh: Mesh) -> None:
    with fails(ValueError, "no implementation 'triton'", "None, 'fused', 'xla'"):
        column_parallel(mesh, implementation="triton")(*operands())


def test_fused_names_all_reasons_at_once(mesh: Mesh) -> None:
    program = column_parallel(
        mesh, implementation="fused", preferred_element_type="int32", precision="BF16_BF16_F32_X9"
    )
    with fails(NotImplementedError, "not int8", "not int32", "no precision", "implementation=None or 'xla'") as found:
        program(np.ones((8, 5), np.int8), np.ones((5, 8), np.int8))
    assert "float32, bfloat16, float16" in str(found.value)


@pytest.mark.parametrize(
    ("keywords", "part"),
    (
        ({"preferred_element_type": "float64"}, "not float64"),
        ({"precision": "BF16_BF16_F32_X9"}, "no precision"),
    ),
)
def test_what_fused_cannot_do(mesh: Mesh, keywords: dict[str, Any], part: str) -> None:
    with jax.enable_x64(True), fails(NotImplementedError, part):
        column_parallel(mesh, implementation="fused", **keywords)(*operands(k=32))


def test_fused_takes_one_dtype_and_no_empty_operands(mesh: Mesh) -> None:
    program = column_parallel(mesh, implementation="fused")
    with fails(NotImplementedError, "one dtype, not float32 and bfloat16"):
        program(np.ones((8, 5), np.float32), np.ones((5, 8), jnp.bfloat16))
    with fails(NotImplementedError, "an operand is empty: [2, 0], [0, 2]"):
        program(np.ones((8, 0), np.float32), np.ones((0, 8), np.float32))


def test_no_columns_by_reference(mesh: Mesh) -> None:
    assert column_parallel(mesh)(np.ones((8, 5), np.float32), np.ones((5, 0), np.float32)).shape == (8, 0)


def test_fused_on_cpus_names_the_platform(mesh: Mesh) -> None:
    with fails(NotImplementedError, "all_gather_matmul", "for NVIDIA GPUs", "lowered for cpu"):
        jax.jit(column_parallel(mesh, implementation="fused"))(*operands())


@pytest.mark.parametrize("in_axes", ((None, 0), (0, 0)))
def test_fused_has_no_vmap_over_rhs(mesh: Mesh, in_axes: tuple) -> None:
    mapped = jax.vmap(lambda a, b: all_gather_matmul(a, b, "tp", implementation="fused"), in_axes=in_axes)
    lhs_spec = P(None, "tp") if in_axes[0] == 0 else ROWS
    program = jax.shard_map(mapped, mesh=mesh, in_specs=(lhs_spec, P(None, None, "tp")), out_specs=P(None, None, "tp"))
    lhs, rhs = operands()
    with fails(NotImplementedError, f"jax.vmap maps over {'lhs, rhs' if in_axes[0] == 0 else 'rhs'}, and the kernel"):
        program(np.stack([lhs, lhs]) if in_axes[0] == 0 else lhs, np.stack([rhs, rhs]))


@pytest.mark.parametrize("implementation", (None, "fused", "xla"))
def test_config_with_an_unknown_key(mesh: Mesh, implementation: str | None) -> None:
    with fails((TypeError, ValueError), "block_q"):
        column_parallel(mesh, implementation=implementation, config={"block_q": 64})(*operands())


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("implementation", (None, "fused"))
@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("dtype", DTYPES)
def test_lowers_to_one_kernel(mesh: Mesh, implementation: str | None, check_vma: bool, dtype: str) -> None:
    program = column_parallel(mesh, implementation=implementation, check_vma=check_vma)
    assert_fused(lower_for_cuda(program, *shapes(mesh, dtype)))


def test_xla_lowers_to_none(mesh: Mesh) -> None:
    assert_not_fused(lower_for_cuda(column_parallel(mesh, implementation="xla"), *shapes(mesh)))


@pytest.mark.parametrize("config", (portable.Config(), {"block_m": 32, "block_n": 64, "block_k": 32, "num_warps": 4}))
def test_config_is_taken(mesh: Mesh, config: Any) -> None:
    assert_fused(lower_for_cuda(column_parallel(mesh, implementation="fused", config=config), *shapes(mesh)))


def test_lowers_for_two_platforms(mesh: Mesh) -> None:
    text = lower_for_cuda(column_parallel(mesh), *shapes(mesh), platforms=("cuda", "cpu"))
    assert text.count(TRITON_CALL) == 1
    assert text.count("stablehlo.all_gather") == 1


def test_lowers_on_an_explicit_mesh() -> None:
    mesh = Mesh(mesh_of(4).devices, ("tp",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        assert_fused(lower_for_cuda(column_parallel(mesh, implementation="fused"), *shapes(mesh)))


@pytest.mark.parametrize("axes", ("tp", ("dp", "tp")))
def test_lowers_on_a_mesh_of_two_axes(cpu_mesh: MeshFactory, axes: Any) -> None:
    mesh = cpu_mesh((2, 4), ("dp", "tp"))
    program = column_parallel(mesh, axes, implementation="fused")
    specs = (P(axes), P(None, axes))
    arrays = [sharded(mesh, spec, shape, "bfloat16") for spec, shape in zip(specs, ((64, 64), (64, 128)))]
    assert_fused(lower_for_cuda(program, *arrays))


def test_exports_with_the_check_for_custom_calls_disabled(mesh: Mesh) -> None:
    call = jax_triton.CUSTOM_CALL_TARGET_NAME
    assert call == TRITON_CALL
    program = jax.jit(column_parallel(mesh))
    check = jax.export.DisabledSafetyCheck.custom_call(call)
    exported = jax.export.export(program, platforms=("cuda",), disabled_checks=[check])(*shapes(mesh))
    assert exported.platforms == ("cuda",)
    assert exported.nr_devices == 4
    assert_fused(exported.mlir_module())
    with fails(ValueError, call):
        jax.export.export(program, platforms=("cuda",))(*shapes(mesh))


@pytest.mark.parametrize("implementation, calls", (("fused", 2), (None, 1)))
def test_kernels_of_a_gradient_program(mesh: Mesh, implementation: str | None, calls: int) -> None:
    """None keeps that of the forward product, which alone was faster than XLA. Nothing is gathered twice."""
    program = column_parallel(mesh, implementation=implementation)
    loss = lambda a, b: jnp.sin(program(a, b)).sum()  # noqa: E731
    text = lower_for_cuda(jax.grad(loss, (0, 1)), *shapes(mesh))
    assert text.count(TRITON_CALL) == calls
    assert ("stablehlo.reduce_scatter" in text) == (implementation is None)
    assert "stablehlo.all_gather" not in text


def test_vmap_over_lhs_keeps_the_kernel(mesh: Mesh) -> None:
    program = jax.shard_map(
        jax.vmap(lambda a, b: all_gather_matmul(a, b, "tp", implementation="fused"), in_axes=(0, None)),
        mesh=mesh,
        in_specs=(P(None, "tp"), COLUMNS),
        out_specs=P(None, None, "tp"),
    )
    batch = sharded(mesh, P(None, "tp"), (3, 64, 64), "bfloat16")
    assert_fused(lower_for_cuda(program, batch, shapes(mesh)[1]))


@pytest.mark.parametrize("body", (scanned, looped))
def test_loops_keep_the_kernel(mesh: Mesh, body: Callable) -> None:
    program = jax.shard_map(body, mesh=mesh, in_specs=(ROWS, COLUMNS), out_specs=ROWS)
    text = lower_for_cuda(
        program, sharded(mesh, ROWS, (64, 32), "bfloat16"), sharded(mesh, COLUMNS, (32, 4 * 32), "bfloat16")
    )
    assert_fused(text)
    assert "stablehlo.while" in text


def partly_manual(cpu_mesh: MeshFactory, implementation: str | None) -> tuple:
    mesh = cpu_mesh((2, 4), ("dp", "tp"))
    program = jax.shard_map(
        lambda a, b: all_gather_matmul(a, b, "tp", implementation=implementation),
        mesh=mesh,
        in_specs=(ROWS, COLUMNS),
        out_specs=COLUMNS,
        axis_names={"tp"},
    )
    return program, shapes(mesh)


def test_partly_manual_mesh_falls_back(cpu_mesh: MeshFactory, caplog: pytest.LogCaptureFixture) -> None:
    program, arrays = partly_manual(cpu_mesh, None)
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        assert_not_fused(lower_for_cuda(program, *arrays))
    assert "['dp']" in caplog.text


def test_partly_manual_mesh_cannot_be_fused(cpu_mesh: MeshFactory) -> None:
    program, arrays = partly_manual(cpu_mesh, "fused")
    with fails(NotImplementedError, "all_gather_matmul", "['dp']", "make all axes manual"):
        lower_for_cuda(program, *arrays)


def test_log_says_why_not(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        assert_not_fused(lower_for_cuda(column_parallel(mesh), *shapes(mesh, "int32")))
        assert_not_fused(lower_for_cuda(column_parallel(mesh), *shapes(mesh, "int32")))
    record = caplog.records[-1]  # the first one may be a warning
    assert (record.name, record.levelno) == ("jaxtaxfree", logging.DEBUG)
    operands = "['int32[16, 64]', 'int32[64, 32]']"
    why = "it takes float32, bfloat16, float16, not int32: cast the operands"
    assert record.getMessage() == f"all_gather_matmul{operands} uses XLA: {why}"


def test_log_says_why_not_along_columns(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    program = jax.shard_map(
        lambda a, b: all_gather_matmul(a, b, "tp", axis=-1), mesh=mesh, in_specs=(COLUMNS, COLUMNS), out_specs=COLUMNS
    )
    arrays = [sharded(mesh, spec, (64, 64), "float32") for spec in (COLUMNS, COLUMNS)]
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        assert_not_fused(lower_for_cuda(program, *arrays))
    assert "has not been measured against XLA yet" in caplog.text


def test_log_says_nothing_of_what_is_fused(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        lower_for_cuda(column_parallel(mesh), *shapes(mesh))
    assert [record for record in caplog.records if record.name == "jaxtaxfree"] == []


def test_one_rank_has_nothing_to_gather(caplog: pytest.LogCaptureFixture) -> None:
    mesh = mesh_of(1)
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        assert TRITON_CALL not in lower_for_cuda(column_parallel(mesh), *shapes(mesh))
    assert "one rank" in caplog.text


@pytest.mark.parametrize("shape", register.OPERATIONS["all_gather_matmul"].shapes, ids=lambda shape: shape.name)
def test_the_shapes_of_the_benchmarks_are_fused_by_default(mesh: Mesh, shape: MatmulShape) -> None:
    assert_fused(lower_for_cuda(column_parallel(mesh), *shapes(mesh, "bfloat16", shape.m, shape.k, shape.n)))


@pytest.mark.parametrize(
    "m, k, n, dtype, precision, why",
    (
        (512, 500, 512, "bfloat16", None, "512 rows"),  # of which TMA does not take rows
        (4096, 512, 512, "float32", None, "TF32 products of many rows"),
        (64, 1024, 4096, "float32", "highest", "more than TF32 precision"),
    ),
)
def test_xla_is_taken_where_it_was_measured_faster(
    mesh: Mesh, caplog: pytest.LogCaptureFixture, m: int, k: int, n: int, dtype: str, precision: str | None, why: str
) -> None:
    operands = shapes(mesh, dtype, m, k, n)
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        assert_not_fused(lower_for_cuda(column_parallel(mesh, precision=precision), *operands))
    assert why in caplog.text
    assert_fused(lower_for_cuda(column_parallel(mesh, precision=precision, implementation="fused"), *operands))


def test_small_exact_products_are_fused(mesh: Mesh) -> None:
    """As in a decode step of the demo: the launches weigh more than the arithmetic."""
    assert_fused(lower_for_cuda(column_parallel(mesh, precision="highest"), *shapes(mesh, "float32", 8, 128, 768)))
