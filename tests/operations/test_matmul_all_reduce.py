"""`matmul_all_reduce` as a JAX operation: values, transformations, errors, what it lowers to. No GPU needed."""

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

from jaxtaxfree import matmul_all_reduce
from jaxtaxfree.ops import matmul_all_reduce as reduce_ops
from jaxtaxfree.ops import register
from jaxtaxfree.ops.matmul_all_reduce import few as few_kernel
from jaxtaxfree.ops.product import Call
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

M, K, N = 15, 33, 37  # of the result, but K is that of a rank
SMALL = {"kernel": "few", "block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 4}
LARGE = {**SMALL, "kernel": "portable"}
FEW_ON_HOPPER = {**SMALL, "kernel": "hopper_few", "block_m": 32, "num_stages": 2, "add_rows": 4}
MANY_ON_HOPPER = {
    "kernel": "hopper",
    "block_m": 32,
    "block_n": 64,
    "block_k": 16,
    "num_stages": 2,
    "programs": 3,
    "chunk": 512,
}


def row_parallel(mesh: Mesh, axis_name: Any = "tp", *, check_vma: bool = True, **keywords: Any) -> Callable:
    """lhs @ rhs of whole arrays, by `matmul_all_reduce`."""
    return one_program(
        functools.partial(matmul_all_reduce, axis_name=axis_name, **keywords),
        mesh=mesh,
        in_specs=(P(None, axis_name), P(axis_name)),
        out_specs=P(),
        check_vma=check_vma,
    )


def plain(mesh: Mesh, *, check_vma: bool = True) -> Callable:
    """The same in `lax`, for derivatives to be compared with."""
    return one_program(
        lambda lhs, rhs: lax.psum(lhs @ rhs, "tp"),
        mesh=mesh,
        in_specs=(COLUMNS, ROWS),
        out_specs=P(),
        check_vma=check_vma,
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
    assert out.sharding.is_fully_replicated
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, dtype))


@hypothesis.given(
    world=st.sampled_from((1, 2, 4, 8)),
    dtype=st.sampled_from(DTYPES),
    lead=st.lists(st.integers(1, 3), min_size=0, max_size=3),
    k=st.integers(1, 10),
    n=st.integers(1, 9),
)
def test_shapes(world: int, dtype: str, lead: list[int], k: int, n: int) -> None:
    lhs = whole_numbers(0, *lead, world * k, dtype=dtype, limit=1)
    rhs = whole_numbers(1, world * k, n, dtype=dtype, limit=1)
    out = jax.shard_map(
        lambda a, b: matmul_all_reduce(a, b, "tp"),
        mesh=mesh_of(world),
        in_specs=(P(*[None] * len(lead), "tp"), ROWS),
        out_specs=P(),
    )(lhs, rhs)
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, dtype))


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


@pytest.mark.parametrize("m", (3, 60, 272))  # by one shot, by two, and by the other kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check_vma", (True, False))
def test_simulated(mesh: Mesh, m: int, dtype: str, check_vma: bool) -> None:
    lhs, rhs = operands(dtype=dtype, m=m)
    config = {"shots": 2} if m == 60 else None
    program = row_parallel(mesh, check_vma=check_vma, implementation="simulate", precision="highest", config=config)
    np.testing.assert_array_equal(jax.jit(program)(lhs, rhs), exact_product(lhs, rhs, dtype))


@pytest.mark.covers(1)
@pytest.mark.parametrize("world, m, k, n", ((1, 17, 8, 40), (2, 37, 24, 16), (3, 70, 40, 72), (4, 133, 16, 136)))
@pytest.mark.parametrize("dtype, groups", (("bfloat16", 2), ("float16", 1)))
def test_simulated_on_hopper(world: int, m: int, k: int, n: int, dtype: str, groups: int) -> None:
    """Tiles that are clipped at all ends, by few programs; of the last ranks some own fewer."""
    lhs, rhs = operands(world, dtype, m=m, k=k, n=n)
    program = row_parallel(mesh_of(world), implementation="simulate", config={**MANY_ON_HOPPER, "groups": groups})
    np.testing.assert_array_equal(jax.jit(program)(lhs, rhs), exact_product(lhs, rhs, dtype))


@pytest.mark.parametrize("world, m", ((1, 3), (2, 1), (3, 7), (4, 5), (4, 16)))
@pytest.mark.parametrize("dtype, result", (("bfloat16", None), ("float16", "float32")))
@pytest.mark.parametrize("shots", (1, 2))
def test_simulated_on_hopper_with_few_rows(world: int, m: int, dtype: str, result: str | None, shots: int) -> None:
    """Tiles that are clipped at all ends, and ranks that own rows past the end."""
    lhs, rhs = operands(world, dtype, m=m, k=40, n=72)
    config = {**FEW_ON_HOPPER, "shots": shots, "exact_wire": m > 4}
    program = row_parallel(mesh_of(world), implementation="simulate", preferred_element_type=result, config=config)
    np.testing.assert_array_equal(jax.jit(program)(lhs, rhs), exact_product(lhs, rhs, result or dtype))


@pytest.mark.parametrize(
    "config",
    (
        {**SMALL, "shots": 1},
        {**SMALL, "shots": 2},
        LARGE,
        {**FEW_ON_HOPPER, "shots": 1, "exact_wire": True},
        {**FEW_ON_HOPPER, "shots": 2, "exact_wire": True},
    ),
)
def test_sums_are_rounded_once(mesh: Mesh, config: dict[str, Any]) -> None:
    """Four parts of 1 + 2**-9 each: in bf16 a part alone is 1, but their sum is 4 + 2**-7."""
    lhs, rhs = sums_of_four()
    program = row_parallel(mesh, implementation="simulate", preferred_element_type="float32", config=config)
    np.testing.assert_array_equal(jax.jit(program)(lhs, rhs), np.full((18, 8), 4 + 2**-7))


def sums_of_four() -> tuple[np.ndarray, np.ndarray]:
    """Operands of which each rank's part is 1 + 2**-9; K and N as TMA takes them."""
    lhs, rhs = np.zeros((18, 4, 8), jnp.bfloat16), np.ones((32, 8), jnp.bfloat16)
    lhs[:, :, 0], lhs[:, :, 1] = 1, 2**-9
    return lhs.reshape(18, 32), rhs


@pytest.mark.parametrize("shots", (1, 2))
@pytest.mark.parametrize("hopper", (False, True))
def test_partial_sums_may_be_rounded_on_the_way(mesh: Mesh, shots: int, hopper: bool) -> None:
    lhs, rhs = sums_of_four()
    config = {**(FEW_ON_HOPPER if hopper else SMALL), "shots": shots, "exact_wire": False}
    program = row_parallel(mesh, implementation="simulate", preferred_element_type="float32", config=config)
    np.testing.assert_array_equal(jax.jit(program)(lhs, rhs), np.full((18, 8), 4))


@pytest.mark.parametrize(
    "config",
    (
        SMALL,
        {**SMALL, "shots": 1},
        {**SMALL, "exact_wire": False},
        LARGE,
        {**LARGE, "exact_wire": False},
    ),
)
def test_every_rank_has_the_same_bits(mesh: Mesh, config: dict[str, Any]) -> None:
    lhs, rhs = (
        np.random.default_rng(i).standard_normal(size, np.float32) for i, size in enumerate(((18, 40), (40, 9)))
    )
    program = jax.shard_map(
        lambda a, b: matmul_all_reduce(a, b, "tp", implementation="simulate", precision="highest", config=config),
        mesh=mesh,
        in_specs=(COLUMNS, ROWS),
        out_specs=ROWS,
        check_vma=False,
    )
    of_ranks = np.split(np.asarray(jax.jit(program)(lhs, rhs)), 4)
    np.testing.assert_allclose(of_ranks[0], lhs @ rhs, rtol=1e-4, atol=1e-5)
    for other in of_ranks[1:]:
        np.testing.assert_array_equal(other, of_ranks[0])


def test_every_rank_has_the_same_bits_on_hopper(mesh: Mesh) -> None:
    lhs, rhs = (
        np.random.default_rng(i).standard_normal(size, np.float32).astype(jnp.bfloat16)
        for i, size in enumerate(((70, 64), (64, 72)))
    )
    program = jax.shard_map(
        lambda a, b: matmul_all_reduce(a, b, "tp", implementation="simulate", config={**MANY_ON_HOPPER, "groups": 2}),
        mesh=mesh,
        in_specs=(COLUMNS, ROWS),
        out_specs=ROWS,
        check_vma=False,
    )
    of_ranks = np.split(np.asarray(jax.jit(program)(lhs, rhs)), 4)
    np.testing.assert_allclose(
        of_ranks[0].astype(np.float32), lhs.astype(np.float32) @ rhs.astype(np.float32), 0.02, 0.2
    )
    for other in of_ranks[1:]:
        np.testing.assert_array_equal(other, of_ranks[0])


def test_explicit_mesh() -> None:
    mesh = Mesh(mesh_of(4).devices, ("tp",), axis_types=(AxisType.Explicit,))
    lhs, rhs = operands()
    with jax.set_mesh(mesh):
        placed = (jax.device_put(lhs, NamedSharding(mesh, COLUMNS)), jax.device_put(rhs, NamedSharding(mesh, ROWS)))
        out = jax.jit(row_parallel(mesh))(*placed)
    assert jax.typeof(out).sharding.spec == P(None, None)
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, "float32"))


def test_one_device() -> None:
    lhs, rhs = operands(world=1)
    np.testing.assert_array_equal(row_parallel(mesh_of(1))(lhs, rhs), exact_product(lhs, rhs, "float32"))


@pytest.mark.parametrize("config", (SMALL, {**SMALL, "shots": 1}, LARGE))
def test_the_kernel_of_one_rank(config: dict[str, Any]) -> None:
    lhs, rhs = operands(world=1)
    program = row_parallel(mesh_of(1), implementation="simulate", precision="highest", config=config)
    np.testing.assert_array_equal(jax.jit(program)(lhs, rhs), exact_product(lhs, rhs, "float32"))


def test_permuted_devices() -> None:
    mesh = Mesh(np.array(jax.devices("cpu"))[[5, 2, 7, 0]], ("tp",))
    lhs, rhs = operands()
    np.testing.assert_array_equal(row_parallel(mesh)(lhs, rhs), exact_product(lhs, rhs, "float32"))


@pytest.mark.parametrize("dims", ((2, 4), (4, 2)))
@pytest.mark.parametrize("implementation", (None, "simulate"))
def test_one_axis_of_two(cpu_mesh: MeshFactory, dims: tuple[int, int], implementation: str | None) -> None:
    mesh = cpu_mesh(dims, ("dp", "tp"))
    lhs, rhs = whole_numbers(0, dims[0], 7, 16), whole_numbers(1, dims[0], 16, 24)
    program = jax.shard_map(
        lambda a, b: matmul_all_reduce(a[0], b[0], "tp", implementation=implementation)[None],
        mesh=mesh,
        in_specs=(P("dp", None, "tp"), P("dp", "tp")),
        out_specs=P("dp"),
    )
    np.testing.assert_array_equal(jax.jit(program)(lhs, rhs), exact_product(lhs, rhs, "float32"))


@pytest.mark.parametrize("axes", (("dp", "tp"), ("tp", "dp")))
@pytest.mark.parametrize("implementation", (None, "simulate"))
def test_axis_tuple(cpu_mesh: MeshFactory, axes: tuple[str, str], implementation: str | None) -> None:
    lhs, rhs = operands(world=8, k=3)
    program = row_parallel(cpu_mesh((2, 4), ("dp", "tp")), axes, implementation=implementation, config=SMALL)
    np.testing.assert_array_equal(jax.jit(program)(lhs, rhs), exact_product(lhs, rhs, "float32"))


@pytest.mark.parametrize("implementation", (None, "xla"))
def test_operands_that_are_the_same_everywhere(mesh: Mesh, implementation: str | None) -> None:
    # Their types vary along no axis, and a sum over the ranks wants what does.
    lhs, rhs = operands(world=1)
    program = jax.shard_map(
        lambda a, b: matmul_all_reduce(a, b, "tp", implementation=implementation),
        mesh=mesh,
        in_specs=(P(), P()),
        out_specs=P(),
    )
    np.testing.assert_array_equal(program(lhs, rhs), 4 * exact_product(lhs, rhs, "float32"))


def scanned(x: jax.Array, w: jax.Array, **keywords: Any) -> jax.Array:
    return lax.scan(lambda carry, _: (layer(carry, w, **keywords), None), x, length=2)[0]


def looped(x: jax.Array, w: jax.Array, **keywords: Any) -> jax.Array:
    step = lambda state: (state[0] + 1, layer(state[1], w, **keywords))  # noqa: E731
    return lax.while_loop(lambda state: state[0] < 2, step, (0, x))[1]


def layer(x: jax.Array, w: jax.Array, **keywords: Any) -> jax.Array:
    """x [M, K] on every rank, w [K / world, K] -> [M, K] on every rank, so that a loop can carry it."""
    own = lax.dynamic_slice_in_dim(x, lax.axis_index("tp") * w.shape[0], w.shape[0], axis=1)
    return matmul_all_reduce(own, w, "tp", **keywords)


@pytest.mark.parametrize("body", (scanned, looped))
@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("implementation", (None, "simulate"))
def test_loops(mesh: Mesh, body: Callable, check_vma: bool, implementation: str | None) -> None:
    x, w = whole_numbers(0, 5, 12, limit=1), whole_numbers(1, 12, 12, limit=1)
    program = jax.shard_map(
        functools.partial(body, implementation=implementation, precision="highest"),
        mesh=mesh,
        in_specs=(P(), ROWS),
        out_specs=P(),
        check_vma=check_vma,
    )
    np.testing.assert_array_equal(jax.jit(program)(x, w), x @ w @ w)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("implementation", (None, "simulate"))
def test_gradients(mesh: Mesh, dtype: str, check_vma: bool, implementation: str | None) -> None:
    lhs, rhs = operands(dtype=dtype)
    weights = whole_numbers(2, M, N, dtype=dtype)

    def gradients(function: Callable) -> tuple[jax.Array, jax.Array]:
        loss = lambda a, b: (function(a, b) * weights).astype(jnp.float32).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)

    found = gradients(row_parallel(mesh, check_vma=check_vma, implementation=implementation, precision="highest"))
    assert [g.dtype for g in found] == [lhs.dtype, rhs.dtype]
    for mine, lax_s in zip(found, gradients(plain(mesh, check_vma=check_vma))):
        np.testing.assert_array_equal(mine, lax_s)
    np.testing.assert_array_equal(found[0], exact_product(weights, rhs.T, dtype))
    np.testing.assert_array_equal(found[1], exact_product(lhs.T, weights, dtype))


@pytest.mark.parametrize("check_vma", (True, False))
def test_gradients_inside_shard_map(mesh: Mesh, check_vma: bool) -> None:
    """Where the two modes differ: without types a rank's own loss is what each of them differentiates."""
    lhs, rhs = operands()

    def gradients(function: Callable) -> Any:
        local = jax.grad(lambda a, b: (function(a, b) ** 2).sum(), (0, 1))
        return one_program(local, mesh=mesh, in_specs=(COLUMNS, ROWS), out_specs=(COLUMNS, ROWS), check_vma=check_vma)(
            lhs, rhs
        )

    found = gradients(lambda a, b: matmul_all_reduce(a, b, "tp"))
    for mine, lax_s in zip(found, gradients(lambda a, b: lax.psum(a @ b, "tp"))):
        np.testing.assert_array_equal(mine, lax_s)


@pytest.mark.parametrize("check_vma", (True, False))
def test_gradients_with_data_parallelism(cpu_mesh: MeshFactory, check_vma: bool) -> None:
    """Weights that are the same along another axis get the sum of its gradients."""
    lhs, rhs = operands(world=2, m=6)
    program = jax.shard_map(
        functools.partial(matmul_all_reduce, axis_name="tp"),
        mesh=cpu_mesh((2, 2), ("dp", "tp")),
        in_specs=(P("dp", "tp"), ROWS),
        out_specs=P("dp"),
        check_vma=check_vma,
    )
    found = jax.jit(jax.grad(lambda a, b: (program(a, b) ** 2).sum(), (0, 1)))(lhs, rhs)
    product = exact_product(lhs, rhs, "float64")
    np.testing.assert_array_equal(found[0], 2 * product @ rhs.T.astype(np.float64))
    np.testing.assert_array_equal(found[1], 2 * lhs.T.astype(np.float64) @ product)


@pytest.mark.parametrize("check_vma", (True, False))
def test_the_gradient_of_a_layer_has_one_kernel(mesh: Mesh, check_vma: bool) -> None:
    """Forward; where types say that the gradient of the result is the same everywhere, nothing else is exchanged."""
    program = row_parallel(mesh, implementation="fused", check_vma=check_vma)
    text = lower_for_cuda(jax.grad(lambda a, b: jnp.sin(program(a, b)).sum(), (0, 1)), *shapes(mesh, "float32"))
    assert text.count(TRITON_CALL) == 1
    assert ("stablehlo.all_reduce" in text) == (not check_vma)


def test_gradient_of_preferred_element_type(mesh: Mesh) -> None:
    lhs, rhs = operands(dtype="bfloat16")
    program = row_parallel(mesh, preferred_element_type="float32")
    found = jax.grad(lambda a, b: program(a, b).sum(), (0, 1))(lhs, rhs)
    assert [g.dtype for g in found] == [jnp.bfloat16, jnp.bfloat16]
    np.testing.assert_array_equal(found[1], exact_product(lhs.T, np.ones((M, N)), "bfloat16"))


def test_gradients_of_more_dimensions(mesh: Mesh) -> None:
    lhs, rhs = whole_numbers(0, 4, 8, 12), whole_numbers(1, 12, 5)
    weights = whole_numbers(2, 4, 8, 5)
    program = jax.shard_map(
        lambda a, b: matmul_all_reduce(a, b, "tp"), mesh=mesh, in_specs=(P(None, None, "tp"), ROWS), out_specs=P()
    )
    found = jax.grad(lambda a, b: (program(a, b) * weights).sum(), (0, 1))(lhs, rhs)
    np.testing.assert_array_equal(found[0], exact_product(weights, rhs.T, "float32"))
    np.testing.assert_array_equal(found[1], exact_product(lhs.reshape(32, 12).T, weights.reshape(32, 5), "float32"))


@pytest.mark.parametrize("check_vma", (True, False))
def test_jvp(mesh: Mesh, check_vma: bool) -> None:
    lhs, rhs = operands()
    lhs_dot, rhs_dot = whole_numbers(2, *lhs.shape), whole_numbers(3, *rhs.shape)
    out, out_dot = jax.jvp(row_parallel(mesh, check_vma=check_vma), (lhs, rhs), (lhs_dot, rhs_dot))
    np.testing.assert_array_equal(out, exact_product(lhs, rhs, "float32"))
    wanted = exact_product(lhs_dot, rhs, "float32") + exact_product(lhs, rhs_dot, "float32")
    np.testing.assert_array_equal(out_dot, wanted)


@pytest.mark.parametrize("check_vma", (True, False))
def test_second_order(mesh: Mesh, check_vma: bool) -> None:
    lhs, rhs = (jax.random.normal(jax.random.key(i), x.shape) / 8 for i, x in enumerate(operands()))
    tangents = jnp.ones_like(lhs), jnp.full_like(rhs, 0.5)

    def hessian_vector_products(function: Callable) -> Any:
        gradient = jax.grad(lambda *args: jnp.sin(function(*args)).sum(), (0, 1))
        forward = lambda *primals: jax.jvp(gradient, primals, tangents)[1]  # noqa: E731
        dot = lambda *primals: sum(jnp.vdot(g, t) for g, t in zip(gradient(*primals), tangents))  # noqa: E731
        return jax.jit(forward)(lhs, rhs), jax.jit(jax.grad(dot, (0, 1)))(lhs, rhs)

    wanted = hessian_vector_products(lambda a, b: a @ b)
    for way, jax_s in zip(hessian_vector_products(row_parallel(mesh, check_vma=check_vma)), wanted):
        for mine, value in zip(way, jax_s):
            np.testing.assert_allclose(mine, value, rtol=1e-4, atol=1e-4)


def test_remat_computes_the_product_again(mesh: Mesh) -> None:
    lhs, rhs = operands()
    loss = lambda *args: (row_parallel(mesh)(*args) ** 2).sum()  # noqa: E731
    again = jax.grad(jax.checkpoint(loss), (0, 1))
    for mine, wanted in zip(again(lhs, rhs), jax.grad(loss, (0, 1))(lhs, rhs)):
        np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("in_axes", ((0, None), (2, None), (None, 0), (0, 0), (1, 2)))
def test_vmap(mesh: Mesh, in_axes: tuple, check_vma: bool) -> None:
    stacked, specs = [], []
    for x, dim, sharded_dim in zip(operands(), in_axes, (1, 0), strict=True):
        stacked.append(x if dim is None else np.stack([x, 2 * x, x[::-1]], axis=dim))
        before = sharded_dim + (dim is not None and dim <= sharded_dim)
        specs.append(P(*[None] * before, "tp"))
    program = jax.shard_map(
        jax.vmap(lambda a, b: matmul_all_reduce(a, b, "tp"), in_axes=in_axes),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=P(),
        check_vma=check_vma,
    )
    examples = [x if dim is None else np.moveaxis(x, dim, 0) for x, dim in zip(stacked, in_axes, strict=True)]
    np.testing.assert_array_equal(program(*stacked), exact_product(*examples, "float32"))


def test_vmap_over_rows_keeps_the_kernel(mesh: Mesh) -> None:
    lhs, rhs = operands()
    stacked = np.stack([lhs, 2 * lhs])

    def program(implementation: str) -> Callable:
        return one_program(
            jax.vmap(lambda a, b: matmul_all_reduce(a, b, "tp", implementation=implementation), in_axes=(0, None)),
            mesh=mesh,
            in_specs=(P(None, None, "tp"), ROWS),
            out_specs=P(),
        )

    assert_fused(lower_for_cuda(program("fused"), stacked, rhs))
    np.testing.assert_array_equal(jax.jit(program("simulate"))(stacked, rhs), exact_product(stacked, rhs, "float32"))


@pytest.mark.covers(1)
@pytest.mark.parametrize("implementation", (None, "simulate", "xla"))
@pytest.mark.parametrize("batched", (False, True))
def test_one_row(mesh: Mesh, implementation: str | None, batched: bool) -> None:
    """A vector is a row, and `jax.vmap` over vectors multiplies a matrix."""
    lhs, rhs = operands()
    residual = np.arange(rhs.shape[1], dtype=np.float32)
    lhs, dim = (lhs, 0) if batched else (lhs[1], None)

    def program(implementation: str | None) -> Callable:
        def local(lhs: jax.Array, rhs: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
            product = matmul_all_reduce(lhs, rhs, "tp", implementation=implementation)
            return product, matmul_all_reduce(lhs, rhs, "tp", residual=residual, implementation=implementation)

        return one_program(
            jax.vmap(local, in_axes=(dim, None, None)) if batched else local,
            mesh=mesh,
            in_specs=(P(*[None] * batched, "tp"), ROWS, P()),
            out_specs=P(),
        )

    wanted = exact_product(lhs, rhs, "float32")
    for found, value in zip(jax.jit(program(implementation))(lhs, rhs, residual), (wanted, wanted + residual)):
        assert found.shape == (*lhs.shape[:-1], rhs.shape[1])
        np.testing.assert_array_equal(found, value)
    assert_fused(lower_for_cuda(program("fused"), lhs, rhs, residual), calls=2)
    with fails(ValueError, f"takes a residual of shape [{rhs.shape[1]}] here, not [1]"):
        program(None)(lhs, rhs, residual[:1])


def test_vmap_of_gradients(mesh: Mesh) -> None:
    lhs, rhs = operands()
    stacked = np.stack([lhs, 2 * lhs])
    gradient = lambda f: jax.vmap(jax.grad(lambda a, b: (f(a, b) ** 2).sum(), (0, 1)), in_axes=(0, None))  # noqa: E731
    for mine, lax_s in zip(gradient(row_parallel(mesh))(stacked, rhs), gradient(plain(mesh))(stacked, rhs)):
        np.testing.assert_array_equal(mine, lax_s)


def test_contraction_mismatch(mesh: Mesh) -> None:
    with fails(ValueError, "contracts the last dimension of lhs", "[15, 33]", "[32, 37]", "33 is not 32"):
        row_parallel(mesh)(whole_numbers(0, M, 4 * K), whole_numbers(1, 4 * 32, N))


def test_scalar_operand(mesh: Mesh) -> None:
    program = jax.shard_map(lambda a: matmul_all_reduce(a, 1.0, "tp"), mesh=mesh, in_specs=ROWS, out_specs=P())
    with fails(ValueError, "matmul_all_reduce takes no scalars", "()"):
        program(np.ones((4, 4)))


def test_outside_shard_map() -> None:
    with fails(NameError, "matmul_all_reduce needs a mesh axis", "'tp'", "call it inside jax.shard_map"):
        matmul_all_reduce(*operands(), "tp")


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
    with jax.enable_x64(True), fails(NotImplementedError, "matmul_all_reduce", part):
        row_parallel(mesh, implementation="fused", **keywords)(*operands())


def test_fused_on_cpus_names_the_platform(mesh: Mesh) -> None:
    with fails(NotImplementedError, "matmul_all_reduce", "for NVIDIA GPUs", "lowered for cpu"):
        jax.jit(row_parallel(mesh, implementation="fused"))(*operands())


@pytest.mark.parametrize("implementation", (None, "fused", "xla"))
def test_config_with_an_unknown_key(mesh: Mesh, implementation: str | None) -> None:
    with fails(ValueError, "matmul_all_reduce has no setting 'block_q'"):
        row_parallel(mesh, implementation=implementation, config={"block_q": 64})(*operands())


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("m", (1, 64, 512))
@pytest.mark.parametrize("dtype", DTYPES)
def test_lowers_to_one_kernel(mesh: Mesh, check_vma: bool, m: int, dtype: str) -> None:
    program = row_parallel(mesh, implementation="fused", check_vma=check_vma)
    assert_fused(lower_for_cuda(program, *shapes(mesh, dtype, m)))


def test_xla_lowers_to_none(mesh: Mesh) -> None:
    assert_not_fused(lower_for_cuda(row_parallel(mesh, implementation="xla"), *shapes(mesh)), "all_reduce")


@pytest.mark.parametrize(
    "config",
    (
        few_kernel.Config(),
        {"kernel": "few", "block_m": 32, "block_n": 32, "num_warps": 8},
        {"shots": 1},
        {"kernel": "few", "apart": True, "exact_wire": False},
    ),
)
def test_config_is_taken(mesh: Mesh, config: Any) -> None:
    assert_fused(lower_for_cuda(row_parallel(mesh, implementation="fused", config=config), *shapes(mesh)))


def call_of(m: int, n: int = 8192, *, world: int = 4, **form: Any) -> Call:
    return product_call(reduce_ops, m, 1024, n, world=world, **form)


def test_default_config() -> None:
    by_rows = {m: portable_choice(reduce_ops, call_of(m)) for m in (1, 16, 17, 128, 256, 257)}
    assert [choice.variant.name for choice in by_rows.values()] == ["few"] * 5 + ["portable"]
    few = {m: choice.config for m, choice in by_rows.items() if m <= 256}
    assert [config.shots for config in few.values()] == [1, 1, 2, 2, 2]
    assert [choice.config.exact_wire for choice in by_rows.values()] == [True, False, False, False, False, True]
    assert by_shape(reduce_ops, "few", call_of(128, out_dtype="float32")).exact_wire
    assert [by_shape(reduce_ops, "few", call_of(m, world=2)).shots for m in (64, 65)] == [1, 2]
    assert [by_shape(reduce_ops, "few", call_of(16, n)).apart for n in (8192, 28672)] == [False, True]
    for world in (2, 3, 4, 8):
        for m in range(1, 257):
            config = by_shape(reduce_ops, "few", call_of(m, world=world))
            assert config.add_rows * config.block_n * world <= 16384


def kernel_of(mesh: Mesh, *shape: Any, **keywords: Any) -> str:
    """The name of the kernel that is launched for such operands."""
    program = row_parallel(mesh, implementation="fused", **keywords)
    return launch_of(lower_for_cuda(program, *shapes(mesh, *shape)))[NAME].decode()


@pytest.mark.parametrize("shape", register.OPERATIONS["matmul_all_reduce"].shapes, ids=lambda shape: shape.name)
def test_the_kernel_for_hopper_takes_every_listed_shape(mesh: Mesh, shape: MatmulShape) -> None:
    name = kernel_of(mesh, "bfloat16", shape.m, shape.k, shape.n, config={"kernel": "hopper"})
    assert name == "matmul_all_reduce_hopper_kernel"


@pytest.mark.usefixtures("no_code")
def test_the_kernel_by_shape(mesh: Mesh) -> None:
    hopper = "matmul_all_reduce_hopper_kernel"
    few = "matmul_reduce_hopper_few_kernel"
    shape = ("bfloat16", 512, 512, 8192)
    assert kernel_of(mesh, *shape) == kernel_of(mesh, "bfloat16", 516, 512, 512) == hopper
    for m, n in ((1, 512), (16, 9216), (256, 8192), (257, 8192), (512, 512)):
        assert kernel_of(mesh, "bfloat16", m, 512, n) == few
    assert kernel_of(mesh, "bfloat16", 16, 512, 512, config={"kernel": "few"}) == "matmul_all_reduce_few_kernel"
    assert kernel_of(mesh, "bfloat16", 16, 512, 512, config={"splits": 2}) == few
    assert kernel_of(mesh, "bfloat16", 256, 512, 8192, config={"shots": 1}) == few
    with fails(ValueError, "'hopper' of matmul_all_reduce has no setting 'shots'", "'hopper_few', 'few' have it"):
        kernel_of(mesh, *shape, config={"shots": 1})
    refused = (
        {"preferred_element_type": "float32"},
        {"residual": jnp.zeros((512, 8192))},
        {"config": {"exact_wire": True}},
    )
    for keywords in refused:  # of up to 512 rows the kernel for few takes what that for many does not
        assert kernel_of(mesh, *shape, **keywords) == few
    many = ("bfloat16", 516, 512, 8192)
    others = (
        ("float32", 512, 512, 8192, {}),
        ("bfloat16", 512, 500, 8192, {}),  # rows that TMA does not take
        (*many, {"preferred_element_type": "float32"}),
        (*many, {"residual": jnp.zeros((516, 8192))}),
        (*many, {"config": {"exact_wire": True}}),
    )
    for *other, keywords in others:
        assert kernel_of(mesh, *other, **keywords) == "matmul_all_reduce_kernel"


def test_what_the_kernel_for_hopper_cannot_do(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "80")
    parts = (
        "9.0, not 8.0",
        "float16 and bfloat16, not float32",
        "125 and 512 elements",
        "partial sums, float32, not float16",
    )
    with fails(NotImplementedError, "matmul_all_reduce ('hopper')", *parts):
        kernel_of(mesh, "float32", 2048, 500, 512, preferred_element_type="float16", config={"kernel": "hopper"})


def test_its_configuration_by_shape() -> None:
    by_rows = {m: by_shape(reduce_ops, "hopper", call_of(m)) for m in (256, 512, 2048, 8192, 65536)}
    assert [config.block_n for config in by_rows.values()] == [128, 128, 256, 256, 256]
    assert [config.groups for config in by_rows.values()] == [1, 2, 4, 16, 16]
    assert [config.lag for config in by_rows.values()] == [1, 1, 1, 1, 0]
    assert [by_shape(reduce_ops, "hopper", call_of(2048, world=world)).lag for world in (2, 8)] == [3, 1]


def test_lowers_on_an_explicit_mesh() -> None:
    mesh = Mesh(mesh_of(4).devices, ("tp",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        assert_fused(lower_for_cuda(row_parallel(mesh, implementation="fused"), *shapes(mesh)))


@pytest.mark.parametrize("body", (scanned, looped))
def test_loops_keep_the_kernels(mesh: Mesh, body: Callable) -> None:
    program = jax.shard_map(
        functools.partial(body, implementation="fused"), mesh=mesh, in_specs=(P(), ROWS), out_specs=P()
    )
    arrays = [sharded(mesh, *of, "bfloat16") for of in ((P(), (64, 32)), (ROWS, (32, 32)))]
    text = lower_for_cuda(program, *arrays)
    assert_fused(text)
    assert "stablehlo.while" in text


def test_partly_manual_mesh_cannot_be_fused(cpu_mesh: MeshFactory) -> None:
    mesh = cpu_mesh((2, 4), ("dp", "tp"))
    program = jax.shard_map(
        lambda a, b: matmul_all_reduce(a, b, "tp", implementation="fused"),
        mesh=mesh,
        in_specs=(COLUMNS, ROWS),
        out_specs=P(),
        axis_names={"tp"},
    )
    with fails(NotImplementedError, "matmul_all_reduce", "['dp']", "make all axes manual"):
        lower_for_cuda(program, *shapes(mesh))


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("shape", register.OPERATIONS["matmul_all_reduce"].shapes, ids=lambda shape: shape.name)
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
        assert_not_fused(lower_for_cuda(row_parallel(mesh, precision=precision), *arrays), "all_reduce")
    assert why in caplog.text
    assert_fused(lower_for_cuda(row_parallel(mesh, precision=precision, implementation="fused"), *arrays))


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("rows", (16, 64, 256, 512, 8192))
def test_the_kernel_is_taken_where_it_was_measured_faster(mesh: Mesh, rows: int) -> None:
    assert_fused(lower_for_cuda(row_parallel(mesh), *shapes(mesh, "bfloat16", rows, 4096, 4096)))


def test_one_rank_has_nothing_to_add_up(caplog: pytest.LogCaptureFixture) -> None:
    mesh = mesh_of(1)
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        assert TRITON_CALL not in lower_for_cuda(row_parallel(mesh), *shapes(mesh))
    assert "one rank" in caplog.text
