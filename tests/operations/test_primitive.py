"""What holds for every operation alike, as a JAX primitive. No GPU needed."""

import functools
import pickle
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import dispatch, primitive
from jaxtaxfree.ops.collectives import portable
from jaxtaxfree.ops.matmul_all_reduce import few
from jaxtaxfree.teams import Team
from tests.conftest import MeshFactory
from tests.helpers.support import (
    TRITON_CALL,
    assert_fused,
    exact_product,
    fails,
    lower_for_cuda,
    mesh_of,
    sharded,
    whole_numbers,
)

# By name, how each operation is called with x, [8, 16] on every rank, and an axis.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "psum": jtf.psum,
    "all_gather": jtf.all_gather,
    "psum_scatter": functools.partial(jtf.psum_scatter, tiled=True),
    "all_to_all": functools.partial(jtf.all_to_all, split_axis=0, concat_axis=0, tiled=True),
    "all_gather_matmul": lambda x, axis_name, **keywords: jtf.all_gather_matmul(x, x.T, axis_name, **keywords),
    "matmul_reduce_scatter": lambda x, axis_name, **keywords: jtf.matmul_reduce_scatter(x, x.T, axis_name, **keywords),
    "matmul_all_reduce": lambda x, axis_name, **keywords: jtf.matmul_all_reduce(x, x.T, axis_name, **keywords),
    "decode_attention": lambda x, axis_name, **keywords: jtf.decode_attention(
        x.reshape(2, 4, 16), x.reshape(2, 4, 1, 16), x.reshape(2, 4, 1, 16), axis_name, **keywords
    ),
}
# The same along the axis "tp", and other forms of them.
CALLS: dict[str, Callable] = {
    **{name: functools.partial(call, axis_name="tp") for name, call in OPERATIONS.items()},
    "all_gather_matmul-gathered": lambda x, **keywords: jtf.all_gather_matmul(
        x, x.T, "tp", return_gathered=True, **keywords
    )[1],
    **{
        f"{name}-silu": functools.partial(OPERATIONS[name], axis_name="tp", activation="silu")
        for name in OPERATIONS
        if "matmul" in name
    },
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


@pytest.mark.usefixtures("no_code")
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


def shaped(mesh: Mesh, call: Callable, shape: tuple[int, int] = (8, 16)) -> None:
    program = jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    jax.eval_shape(program, jax.ShapeDtypeStruct(shape, "float32"))


each_operation = pytest.mark.parametrize("name", OPERATIONS)


def each_operation_with(*axes: Any) -> pytest.MarkDecorator:
    """Attention takes None and (), and the gather (): they are without peers then."""
    alone = [("decode_attention", None), ("decode_attention", ()), ("all_gather_matmul", ())]
    return pytest.mark.parametrize(
        ("name", "axes"), [(name, each) for name in OPERATIONS for each in axes if (name, each) not in alone]
    )


@each_operation_with(None, 3, 1.5, (["tp"],), "operand")
def test_what_is_no_axis(mesh: Mesh, name: str, axes: Any) -> None:
    with fails(TypeError, f"{name} takes ", "axis_name", "not "):
        shaped(mesh, lambda x: OPERATIONS[name](x, x if axes == "operand" else axes))


@each_operation_with("dp", "", (), ("tp", 3), (None,))
def test_axes_that_are_not_bound(mesh: Mesh, name: str, axes: Any) -> None:
    with fails(NameError, f"{name} needs a mesh axis", "call it inside jax.shard_map"):
        shaped(mesh, lambda x: OPERATIONS[name](x, axes))


@each_operation
def test_what_is_no_config(mesh: Mesh, name: str) -> None:
    for config in (5, 0, "small", [("num_warps", 4)], dispatch.Case):
        with fails(
            TypeError, f"{name} takes as config None, a mapping, or the Config of one of its kernels", repr(config)
        ):
            shaped(mesh, lambda x, config=config: OPERATIONS[name](x, "tp", config=config))
    other = portable if "matmul" in name else few
    with fails(TypeError, f"{name} takes as config", "not Config("):
        shaped(mesh, lambda x: OPERATIONS[name](x, "tp", config=other.Config()))


@pytest.mark.parametrize(
    ("name", "keyword"),
    (
        ("all_gather", "axis"),
        ("psum_scatter", "scatter_dimension"),
        ("all_gather_matmul", "axis"),
        ("matmul_reduce_scatter", "scatter_dimension"),
    ),
)
def test_dimensions(mesh: Mesh, name: str, keyword: str) -> None:
    for wrong in (None, "x", 1.0, (0,)):
        with fails(TypeError, f"{name} takes {keyword} as a whole number, not {wrong!r}."):
            shaped(mesh, lambda x, wrong=wrong: OPERATIONS[name](x, "tp", **{keyword: wrong}))
    with fails(TypeError, f"{name} takes {keyword} as a whole number, not "):
        shaped(mesh, lambda x: OPERATIONS[name](x, "tp", **{keyword: x.astype(int)[0, 0]}))
    shaped(mesh, lambda x: OPERATIONS[name](x, "tp", **{keyword: np.int64(0)}))


@pytest.mark.parametrize("implementation", (None, "xla", "fused", "simulate"))
def test_empty_dimensions(mesh: Mesh, implementation: str | None) -> None:
    # XLA gathers and scatters none, and says so in words of its intermediate language.
    for name, part in (
        ("all_gather", "cannot concatenate dimension 0 of [0, 16], which is 0"),
        ("psum_scatter", "dimension 0 of [0, 16] over 4 ranks: with tiled=True, 0 is not a positive multiple of 4"),
        ("all_gather_matmul", "axis 0 of lhs [0, 16], which is 0"),
        ("matmul_reduce_scatter", "a product [0, 0] over 4 ranks: 0 is not a positive multiple of 4"),
    ):
        keywords: dict[str, Any] = {"tiled": True} if name == "all_gather" else {}
        with fails(ValueError, name, part):
            call = functools.partial(OPERATIONS[name], axis_name="tp", implementation=implementation, **keywords)
            shaped(mesh, call, (0, 16))


@pytest.mark.parametrize("activation", ([1], {}, "relu", 3, jax.nn.relu))
@pytest.mark.parametrize("name", [name for name in OPERATIONS if "matmul" in name])
def test_what_is_no_activation(mesh: Mesh, name: str, activation: Any) -> None:
    with fails(ValueError, f"{name} has no activation {activation!r}", "'silu'"):
        shaped(mesh, lambda x: OPERATIONS[name](x, "tp", activation=activation))


@pytest.mark.parametrize(
    ("operation", "rows", "columns", "dtype"),
    (
        *(
            (f"matmul_{of}", 8, 12, dtype)
            for of in ("reduce_scatter", "all_reduce")
            for dtype in ("int8", "float8_e4m3fn")
        ),
        ("all_gather_matmul", 8, 12, "int8"),
        ("matmul_all_reduce", 0, 12, "float32"),
        ("matmul_all_reduce", 8, 0, "float32"),
    ),
)
def test_what_no_kernel_takes_is_left_to_xla(operation: str, rows: int, columns: int, dtype: str) -> None:
    mesh = mesh_of(4)

    def local(x: jax.Array) -> jax.Array:
        return getattr(jtf, operation)(x, jnp.ones((16, columns), dtype), "tp", preferred_element_type=jnp.float32)

    call = jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False)
    assert "triton" not in lower_for_cuda(call, sharded(mesh, P("tp"), (4 * rows, 16), dtype))


each_product = pytest.mark.parametrize("name", [name for name in OPERATIONS if "matmul" in name])


@pytest.mark.covers(3)
@each_product
@pytest.mark.parametrize("implementation", (None, "xla", "fused", "simulate"))
@pytest.mark.parametrize(
    ("lhs", "rhs", "matrices"),
    (
        ((4, 8, 1, 16), (8, 16, 6), ("[128, 6]", "[8, 96]")),  # which jnp.matmul takes for a batch
        ((4, 8, 16), (8, 16, 6), ("[128, 6]", "[8, 96]")),
        ((4, 1, 16), (16, 2, 8), ("[32, 8]", "[16, 16]")),
        ((4, 8), (2, 2, 8, 6), ("[32, 6]", "[2, 96]")),
        ((16,), (1, 16, 6), ("[16, 6]", "[1, 96]")),
    ),
)
def test_what_is_no_matrix(
    mesh: Mesh, name: str, implementation: str | None, lhs: Any, rhs: Any, matrices: tuple[str, str]
) -> None:
    call = functools.partial(getattr(jtf, name), axis_name="tp", implementation=implementation)
    program = jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P("tp"), check_vma=False)
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in (lhs, rhs)]
    with fails(ValueError, f"{name} takes rhs as a matrix [K, N], not {list(rhs)}: ", *matrices, "jax.vmap"):
        jax.eval_shape(program, *shapes)


# Of parts of lhs and rhs on one rank of several, over which "c" is sharded, and of which the result is a sum.
CONTRACTIONS: dict[str, tuple[str, Callable, tuple[int, ...], tuple[int, ...]]] = {
    "over-two-dimensions": (
        "tch,chd->td",
        lambda x, w, product: product(x.reshape(3, -1), w.reshape(-1, 4)),
        (3, 4, 5),
        (4, 5, 4),
    ),
    "into-two-dimensions": (
        "tc,cnh->tnh",
        lambda x, w, product: product(x, w.reshape(-1, 6)).reshape(3, 2, 3),
        (3, 4),
        (4, 2, 3),
    ),
    "in-a-batch": ("etc,ecd->etd", lambda x, w, product: jax.vmap(product)(x, w), (2, 3, 4), (2, 4, 5)),
    "vector": ("tc,c->t", lambda x, w, product: product(x, w), (3, 4), (4,)),
}


@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_what_is_a_matrix(contraction: str) -> None:
    """The remedies that the error names."""
    formula, call, *sizes = CONTRACTIONS[contraction]
    operands = [whole_numbers(i, *size) for i, size in enumerate(sizes)]
    specs = [P(*["tp" if letter == "c" else None for letter in part]) for part in formula.split("->")[0].split(",")]
    local = lambda x, w: call(x, w, functools.partial(jtf.matmul_all_reduce, axis_name="tp"))  # noqa: E731
    found = jax.jit(jax.shard_map(local, mesh=mesh_of(2), in_specs=tuple(specs), out_specs=P()))(*operands)
    np.testing.assert_array_equal(found, np.einsum(formula, *operands))


@each_product
def test_sizes_that_do_not_fit(mesh: Mesh, name: str) -> None:
    """Also where the contracted dimension is what is gathered."""
    call = functools.partial(getattr(jtf, name), axis_name="tp")
    program = jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P("tp"), check_vma=False)
    wrong = "32 (8 from each of 4 ranks) is not 12" if name == "all_gather_matmul" else "8 is not 12"
    with fails(ValueError, f"{name} contracts the last dimension of lhs with the first of rhs", wrong):
        jax.eval_shape(program, *(jax.ShapeDtypeStruct(shape, "float32") for shape in ((8,), (12, 6))))


def test_errors_survive_a_pipe() -> None:
    error = primitive.Unsupported("all_gather_matmul", ["it is too small", "it is too big"])
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_an_axis_named_twice() -> None:
    mesh = mesh_of(4)
    call = jax.shard_map(lambda x: jtf.psum(x, ("tp", "tp")), mesh=mesh, in_specs=P("tp"), out_specs=P())
    with fails(ValueError, "psum takes each mesh axis once, not ('tp', 'tp')"):
        call(jnp.ones(4))


@pytest.mark.parametrize(
    ("name", "in_spec", "shape"),
    (
        ("psum", P("tp"), "4*b, 16"),
        ("all_gather", P("tp"), "4*b, 16"),
        ("psum_scatter", P(), "4*b, 16"),
        ("all_gather_matmul-silu", P("tp"), "4*b, 16"),
        ("matmul_reduce_scatter", P(None, "tp"), "4*b, 16"),
        ("matmul_all_reduce-silu", P(None, "tp"), "b, 16"),
    ),
)
def test_symbolic_shapes_take_no_kernel(mesh: Mesh, name: str, in_spec: P, shape: str) -> None:
    """What `jax.export` takes of `lax`, it takes of ours."""
    x = sharded(mesh, in_spec, jax.export.symbolic_shape(shape), "float32")

    def exported(implementation: str | None) -> str:
        call = functools.partial(CALLS[name], implementation=implementation)
        program = jax.shard_map(call, mesh=mesh, in_specs=in_spec, out_specs=P(), check_vma=False)
        return jax.export.export(jax.jit(program), platforms=("cuda",))(x).mlir_module()

    ours, theirs = (re.sub("loc.*", "", exported(implementation)) for implementation in (None, "xla"))
    assert ours == theirs  # but for the lines of this file
    with fails(NotImplementedError, "it is compiled for known shapes, not ["):
        exported("fused")


@pytest.mark.parametrize(
    ("call", "symbols", "part"),
    (
        (functools.partial(jtf.all_gather, axis=1), "a, 2*b", "all_gather"),
        (jtf.psum_scatter, "2, a", "reduce_scatter"),
        (functools.partial(jtf.psum_scatter, scatter_dimension=1), "a, 2, b", "reduce_scatter"),
    ),
)
@pytest.mark.parametrize("implementation", (None, "xla"))
def test_symbolic_shapes_of_a_dimension_for_the_ranks(
    call: Callable, symbols: str, part: str, implementation: str | None
) -> None:
    """`lax`'s own gather and scatter with `tiled=False` do not lower them."""
    mesh = mesh_of(2)
    local = functools.partial(call, axis_name="tp", implementation=implementation)
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P("tp")))
    shape = sharded(mesh, P(), jax.export.symbolic_shape(symbols), "float32")
    assert f"stablehlo.{part}" in jax.export.export(program)(shape).mlir_module()


@pytest.mark.parametrize("name", ("psum", "matmul_all_reduce", "matmul_all_reduce-silu"))
@pytest.mark.parametrize("device_kind", ("", "NVIDIA H200"))
def test_a_symbolic_number_of_examples(
    mesh: Mesh, name: str, device_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`jax.vmap` makes them part of the shapes after the call was traced."""
    monkeypatch.setattr(Team, "device_kind", device_kind)
    x = sharded(mesh, P(), jax.export.symbolic_shape("b, 8192, 16"), "bfloat16")
    w = sharded(mesh, P(), (7168, 8192), "bfloat16")

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        call = jtf.psum if name == "psum" else jtf.matmul_all_reduce
        activation = {"activation": "silu"} if name.endswith("silu") else {}
        return call(x, "tp") if name == "psum" else call(x[:7168].T, w, "tp", **activation)

    program = jax.shard_map(
        jax.vmap(local, in_axes=(0, None)), mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False
    )
    text = jax.export.export(jax.jit(program), platforms=("cuda",))(x, w).mlir_module()
    assert TRITON_CALL not in text and "all_reduce" in text


@pytest.mark.parametrize("implementation", (None, "simulate"))
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "decode_attention"])
def test_operands_that_are_the_same_on_every_rank(name: str, implementation: str | None) -> None:
    """They are what they are for `lax`: sums of equals, and copies next to each other."""
    x = whole_numbers(0, 8, 16)
    product = exact_product(x, x.T, "float32")
    wanted = {
        "psum": 2 * x,
        "all_gather": np.stack([x, x]),
        "psum_scatter": 2 * x[:4],
        "all_to_all": np.stack([np.concatenate([x[:4]] * 2), np.concatenate([x[4:]] * 2)]),
        "all_gather_matmul": np.concatenate([product, product]),
        "matmul_reduce_scatter": 2 * product[:4],
        "matmul_all_reduce": 2 * product,
    }[name]
    local = lambda x: OPERATIONS[name](x, "tp", implementation=implementation)[None]  # noqa: E731
    out_spec = P() if name in ("psum", "matmul_all_reduce") else P("tp")
    found = jax.jit(jax.shard_map(local, mesh=mesh_of(2), in_specs=P(), out_specs=out_spec))(x)
    np.testing.assert_array_equal(found if name == "all_to_all" else found[0], wanted)


def test_gradients_with_an_algorithm() -> None:
    mesh = mesh_of(4)
    precision = jax.lax.DotAlgorithmPreset.F32_F32_F32
    for given in (precision, precision.algorithm if hasattr(precision, "algorithm") else None):
        call = functools.partial(CALLS["all_gather_matmul"], precision=given)
        on_mesh = jax.shard_map(call, mesh=mesh, in_specs=P("tp"), out_specs=P(None, "tp"))
        assert jax.grad(lambda x, on_mesh=on_mesh: on_mesh(x).sum())(jnp.ones((32, 16))).shape == (32, 16)


@pytest.mark.covers(1)
@each_call
@pytest.mark.parametrize("examples", (0, 2))
def test_vmap_of_any_number_of_examples(mesh: Mesh, call: Callable, examples: int) -> None:
    x = np.random.default_rng(0).normal(size=(examples, 4 * 8, 16)).astype(np.float32)

    def mapped(implementation: str | None) -> jax.Array:
        local = jax.vmap(functools.partial(call, implementation=implementation))
        on_mesh = jax.shard_map(local, mesh=mesh, in_specs=P(None, "tp"), out_specs=P(None, "tp"), check_vma=False)
        return jax.jit(on_mesh)(x)

    found, wanted = mapped(None), mapped("xla")
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CALLS if "scatter" not in name])  # lax's does not lower there
def test_vmap_over_a_dimension_that_is_sharded(cpu_mesh: MeshFactory, name: str) -> None:
    mesh = cpu_mesh((2, 2), ("dp", "tp"))
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(np.random.default_rng(0).normal(size=(2, 2 * 8, 16)).astype(np.float32), P("dp", "tp"))

        def mapped(implementation: str | None) -> jax.Array:
            local = functools.partial(CALLS[name], implementation=implementation)
            on_mesh = jax.shard_map(local, in_specs=P("tp"), out_specs=P("tp"), axis_names={"tp"}, check_vma=False)
            return jax.jit(jax.vmap(on_mesh))(x)

        found, wanted = mapped(None), mapped("xla")
        assert jax.typeof(found) == jax.typeof(wanted)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("operation", "specs", "out_spec"),
    (
        (jtf.all_gather_matmul, (P("tp"), P(None, "tp")), P(None, "tp")),
        (jtf.matmul_reduce_scatter, (P(None, "tp"), P("tp")), P("tp")),
        (jtf.matmul_all_reduce, (P(None, "tp"), P("tp")), P()),
    ),
)
@pytest.mark.parametrize("activation", (None, "silu"))
def test_gradients_by_shared_weights_of_examples_on_another_axis(
    cpu_mesh: MeshFactory, operation: Callable, specs: tuple[P, P], out_spec: P, activation: str | None
) -> None:
    mesh = cpu_mesh((2, 2), ("dp", "tp"))
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 8, 6)).astype(np.float32), rng.normal(size=(6, 4)).astype(np.float32)

    def gradients(implementation: str | None) -> tuple[jax.Array, jax.Array]:
        local = lambda x, w: operation(x, w, "tp", activation=activation, implementation=implementation)  # noqa: E731
        layer = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_spec)
        batched = jax.vmap(layer, in_axes=(0, None), spmd_axis_name="dp")
        return jax.jit(jax.grad(lambda x, w: jnp.sin(batched(x, w)).sum(), (0, 1)))(x, w)

    for found, wanted in zip(gradients(None), gradients("xla")):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@each_call
def test_types_do_not_depend_on_the_implementation(mesh: Mesh, call: Callable) -> None:
    """Not even whether they are weak."""

    def type_of(implementation: str | None, weak: bool) -> Any:
        def local() -> jax.Array:
            return call(jnp.full((8, 16), 1.0, None if weak else "float32"), implementation=implementation)

        return jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P("tp"), check_vma=False))

    for weak in (False, True):
        assert type_of(None, weak) == type_of("xla", weak)
        assert type_of(None, weak).weak_type == type_of("xla", weak).weak_type


LINEAR: dict[str, tuple[tuple[P, P], Callable]] = {  # in w, which the ranks have parts of
    "all_gather_matmul": (
        (P("tp"), P(None, "tp")),
        lambda x, w, **keywords: jtf.all_gather_matmul(x, w, "tp", **keywords),
    ),
    "all_gather_matmul-gathered": (
        (P("tp"), P(None, "tp")),
        lambda x, w, **keywords: jtf.all_gather_matmul(x, w, "tp", return_gathered=True, **keywords)[0],
    ),
    "matmul_reduce_scatter-residual": (
        (P(None, "tp"), P("tp")),
        lambda x, w, **keywords: jtf.matmul_reduce_scatter(x, w, "tp", residual=x[:4] @ w, **keywords),
    ),
    "matmul_all_reduce-residual": (
        (P(None, "tp"), P("tp")),
        lambda x, w, **keywords: jtf.matmul_all_reduce(x, w, "tp", residual=jax.lax.psum(2 * x @ w, "tp"), **keywords),
    ),
    "decode_attention": (
        (P(), P(None, "tp")),
        lambda x, w, **keywords: jtf.decode_attention(
            x.reshape(1, 4, 32),
            jax.lax.pcast(2 * x.reshape(1, 4, 1, 32), "tp", to="varying"),
            w.reshape(1, 8, 1, 32)[:, ::2],
            "tp",
            **keywords,
        ),
    ),
}


@pytest.mark.parametrize(("specs", "call"), LINEAR.values(), ids=LINEAR)
def test_linear_transpose(mesh: Mesh, specs: tuple[P, P], call: Callable) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=(16, 8)).astype(np.float32), rng.normal(size=(8, 128)).astype(np.float32))

    def transposed(implementation: str | None) -> jax.Array:
        def local(x: jax.Array, w: jax.Array) -> jax.Array:
            of_w = lambda w: call(x, w, implementation=implementation)  # noqa: E731
            return jax.linear_transpose(of_w, w)(jnp.sin(of_w(w)))[0]

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[1]))(x, w)

    found, wanted = transposed(None), transposed("xla")
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
