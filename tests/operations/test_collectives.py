"""`psum`, `all_gather` and `psum_scatter` as JAX operations, against `lax`'s. No GPU needed."""

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import simulator
from jaxtaxfree.kernels.collectives.portable import all_gather_kernel
from jaxtaxfree.ops import register
from jaxtaxfree.ops.collectives import DTYPES, FASTER_UP_TO, VARIANTS, Call
from jaxtaxfree.ops.collectives.portable import Config, PsumConfig
from jaxtaxfree.ops.variant import choose
from tests.conftest import MeshFactory
from tests.helpers.support import (
    TRITON_CALL,
    assert_fused,
    assert_not_fused,
    fails,
    lower_for_cuda,
    mesh_of,
    one_program,
    sharded,
)

NAMES = ("psum", "all_gather", "psum_scatter")
HLO = {"psum": "all_reduce", "all_gather": "all_gather", "psum_scatter": "reduce_scatter"}
FLOATS = ("float32", "bfloat16", "float16")
each_name = pytest.mark.parametrize("name", NAMES)
each_implementation = pytest.mark.parametrize("implementation", (None, "simulate"))
both_ways = pytest.mark.parametrize("check_vma", (True, False))
# What moves small arrays in each way; sums of floats may also travel as words, and gathers of 16 and 32 bits.
CONFIGS = (
    {"protocol": "messages", "shots": 1, "block": 32},
    {"protocol": "messages", "shots": 2, "block": 16},
    {"protocol": "signals", "shots": 1, "block": 32},
    {"protocol": "signals", "shots": 2, "block": 16},
)


def on_mesh(mesh: Mesh, function: Callable, *, check_vma: bool = False, varies: bool = True) -> Callable:
    """A function of a rank's arrays on arrays that have all ranks' along a first dimension; results likewise."""

    def local(x: Any) -> Any:
        out = function(jax.tree.map(lambda leaf: leaf[0], x))
        return jax.tree.map(lambda leaf: leaf[None] if varies else leaf, out)

    axes = mesh.axis_names
    return one_program(local, mesh=mesh, in_specs=P(axes), out_specs=P(axes) if varies else P(), check_vma=check_vma)


def ours(name: str, axis_name: Any = "tp", **keywords: Any) -> Callable:
    return functools.partial(getattr(jtf, name), axis_name=axis_name, **keywords)


def laxs(name: str, axis_name: Any = "tp", **keywords: Any) -> Callable:
    return functools.partial(getattr(lax, name), axis_name=axis_name, **keywords)


def integers(dtype: Any, *shape: int, seed: int = 0, limit: int = 3) -> np.ndarray:
    """Whose sums are exact in every dtype and order; of unsigned types they are not negative."""
    return np.random.default_rng(seed).integers(-limit, limit + 1, shape).astype(jnp.dtype(dtype))


def bits(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.itemsize])


def assert_same(found: Any, wanted: Any) -> None:
    """Equal trees of arrays: the same structure, dtypes, shapes and bits."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(bits(x), bits(y))


def assert_like(wanted: Callable, functions: Sequence[Callable], mesh: Mesh, x: Any) -> None:
    """All functions of a rank's array give what the first one gives: in one program, for compiling takes longest."""
    first, *others = on_mesh(mesh, lambda x: [function(x) for function in (wanted, *functions)])(x)
    for other in others:
        assert_same(other, first)


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of(4)


@each_name
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(mesh: Mesh, name: str, dtype: str) -> None:
    keywords = {} if name == "psum" else {"tiled": True}
    implementations = [ours(name, implementation=how, **keywords) for how in (None, "xla", "simulate")]
    assert_like(laxs(name, **keywords), implementations, mesh, integers(dtype, 4, 36))


WORDS = tuple({"protocol": "words", "shots": shots, "block": 32} for shots in (1, 2))


@pytest.mark.covers(1)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("size", (1, 2, 3, 7, 1000))
def test_sizes_and_ways_of_a_sum(mesh: Mesh, config: dict[str, Any], size: int) -> None:
    block = config["block"] if size < 100 else 256
    for dtype in ("bfloat16", "int32"):
        simulated = ours("psum", implementation="simulate", config={**config, "block": block})
        assert_like(laxs("psum"), [simulated], mesh, integers(dtype, 4, size))


@pytest.mark.parametrize(
    "dtype, protocols", (("float32", ("messages", "signals", "words")), ("int8", ("messages", "signals")))
)
@pytest.mark.parametrize("name", ("all_gather", "psum_scatter"))
@pytest.mark.parametrize("tiled", (True, False))
@pytest.mark.parametrize("dimension", (0, 1, 2, -1))
def test_dimensions(mesh: Mesh, name: str, dtype: str, tiled: bool, dimension: int, protocols: tuple[str, ...]) -> None:
    keywords = {"tiled": tiled, "axis" if name == "all_gather" else "scatter_dimension": dimension}
    shape = [3, 5, 7]
    if name == "psum_scatter":
        shape[dimension] = 8 if tiled else 4
        keywords["scatter_dimension"] %= 3  # lax takes no other
    configs = [{"protocol": protocol, "block": 32} for protocol in protocols]
    simulated = [ours(name, **keywords, implementation="simulate", config=config) for config in configs]
    assert_like(laxs(name, **keywords), [ours(name, **keywords), *simulated], mesh, integers(dtype, 4, *shape))


@hypothesis.given(
    data=st.data(),
    world=st.sampled_from((1, 2, 4, 8)),
    shape=st.lists(st.integers(1, 4), max_size=3),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(NAMES),
)
def test_shapes(data: st.DataObject, world: int, shape: list[int], dtype: str, name: str) -> None:
    keywords: dict[str, Any] = {}
    if name != "psum":
        keywords["tiled"] = data.draw(st.booleans()) if shape else name == "psum_scatter"
        if name == "psum_scatter":
            shape = shape or [1]
            at = keywords["scatter_dimension"] = data.draw(st.integers(0, len(shape) - 1))
            shape[at] = shape[at] * world if keywords["tiled"] else world
        else:
            keywords["axis"] = data.draw(st.integers(0, len(shape) - keywords["tiled"]))
    x = integers(dtype, world, *shape)
    found = on_mesh(mesh_of(world), ours(name, **keywords))(x)
    wanted = on_mesh(Mesh(np.array(jax.devices("cpu")[:world]), ("tp",)), laxs(name, **keywords))(x)
    assert_same(found, wanted)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_integers_wrap_around(mesh: Mesh, config: dict[str, Any]) -> None:
    for dtype in DTYPES:
        if dtype not in FLOATS:
            limits = np.iinfo(dtype)
            x = np.random.default_rng(0).integers(limits.min, limits.max, (4, 20), dtype, endpoint=True)
            found = on_mesh(mesh, ours("psum", implementation="simulate", config=config))(x)
            assert_same(found, np.broadcast_to(x.sum(0, dtype=dtype), x.shape))


@pytest.mark.covers(1)
@pytest.mark.parametrize("config", CONFIGS + WORDS, ids=str)
@pytest.mark.parametrize("world", (2, 3, 4))
def test_special_values(world: int, config: dict[str, Any]) -> None:
    """-0.0 is the sum of nothing but -0.0; infinities and NaN behave."""
    special = np.array([-0.0, 0.0, np.inf, -np.inf, np.nan, 1.0, -0.0, 3e38], np.float32)
    x = np.stack([special, *[np.where(np.arange(8) == 6, 0.0, special)] * (world - 1)]).astype(np.float32)
    x[:, 0] = -0.0
    with np.errstate(all="ignore"):
        for dtype in FLOATS:
            given = x.astype(jnp.dtype(dtype))
            wanted = functools.reduce(np.add, given.astype(np.float32)).astype(given.dtype)
            program = on_mesh(mesh_of(world), ours("psum", implementation="simulate", config=config))
            for found in np.asarray(program(given)):
                np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))
                numbers = ~np.isnan(wanted.astype(np.float32))
                np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(wanted)[numbers])
            assert np.signbit(wanted[0])


@pytest.mark.parametrize("config", CONFIGS + WORDS, ids=str)
@pytest.mark.parametrize("world", (3, 4))
def test_sums_are_f32_in_the_order_of_the_ranks(world: int, config: dict[str, Any]) -> None:
    for dtype in FLOATS:
        x = np.random.default_rng(1).normal(size=(world, 50)).astype(jnp.dtype(dtype))
        wanted = functools.reduce(np.add, x.astype(np.float32)).astype(x.dtype)
        found = on_mesh(mesh_of(world), ours("psum", implementation="simulate", config=config))(x)
        assert_same(found, np.broadcast_to(wanted, x.shape))


@pytest.mark.covers(1)
@pytest.mark.parametrize(
    "protocol, dtype",
    (
        *itertools.product(("messages", "signals"), ("float32", "bfloat16", "float16", "int8")),
        *itertools.product(("words",), ("float32", "bfloat16", "int32")),
    ),
)
def test_gathers_are_copies_of_bits(mesh: Mesh, dtype: str, protocol: str) -> None:
    """Of every pattern of 8 and 16 bits, and of many of 32, NaN with any payload among them."""
    size = jnp.dtype(dtype).itemsize
    if size == 4:
        patterns = np.random.default_rng(0).integers(0, 2**32, (4, 2048), np.uint32)
        patterns[:, :6] = [0x80000000, 0x7F800001, 0xFFC00001, 0xFFFFFFFF, 0x7FFFFFFF, 0]
        patterns[1] = 0xFFFFFFFF
    else:
        patterns = np.arange(4 * 2 ** (8 * size - 2)).reshape(4, -1).astype({1: np.uint8, 2: np.uint16}[size])
    if size == 2:
        patterns[:2, :6] = [0xFFFF, 0xFFFF, 0xFFFF, 0x7FFF, 0, 0]
    call = Call(size=patterns.shape[1], world=4, dtype=np.dtype(jnp.dtype(dtype)))
    launched = VARIANTS["all_gather"][0].launch(call, Config(protocol=protocol, block=1024))
    # Without XLA, which may change what is no number.
    outs, _ = simulator.run(all_gather_kernel, list(patterns.view(jnp.dtype(dtype))), world=4, **launched)
    for found in outs:
        np.testing.assert_array_equal(bits(found), patterns.reshape(-1))


@pytest.mark.parametrize("world", (2, 3, 4, pytest.param(8, marks=pytest.mark.soak)))
def test_gathers_of_words_in_doubt(world: int) -> None:
    """In some interleavings: of the two patterns that a word alone does not tell apart, and of few others."""
    for seed in range(3):
        x = np.random.default_rng(seed).choice(np.array([0, -1, 0x7FFFFFFF, 5], np.int32), (world, 50))
        call = Call(size=50, world=world, dtype=np.dtype(np.int32))
        launched = VARIANTS["all_gather"][0].launch(call, Config(protocol="words", block=16))
        outs, _ = simulator.run(all_gather_kernel, list(x), world=world, seed=seed, calls=4, **launched)
        for found in outs:
            np.testing.assert_array_equal(found, x.reshape(-1))


@each_implementation
def test_booleans(mesh: Mesh, implementation: str | None) -> None:
    x = integers("int8", 4, 12) > 0
    assert_same(
        on_mesh(mesh, ours("all_gather", implementation=implementation))(x), on_mesh(mesh, laxs("all_gather"))(x)
    )
    assert_same(on_mesh(mesh, ours("psum", implementation=implementation))(x), on_mesh(mesh, laxs("psum"))(x))


@each_name
@each_implementation
def test_trees(mesh: Mesh, name: str, implementation: str | None) -> None:
    x = {"a": integers("float32", 4, 4, 3), "b": [integers("int32", 4, 4), integers("bfloat16", 4, 4, 2)]}
    assert_same(on_mesh(mesh, ours(name, implementation=implementation))(x), on_mesh(mesh, laxs(name))(x))


def test_a_sum_of_constants_is_a_product(mesh: Mesh) -> None:
    def local(x: jax.Array) -> jax.Array:
        assert jtf.psum(1, "tp") == 4
        return x

    on_mesh(mesh, local)(integers("float32", 4, 1))


def test_scalars_and_empty_arrays(mesh: Mesh) -> None:
    x = integers("float32", 4)
    assert_same(on_mesh(mesh, ours("psum", implementation="simulate"))(x), on_mesh(mesh, laxs("psum"))(x))
    assert_same(on_mesh(mesh, ours("all_gather", implementation="simulate"))(x), on_mesh(mesh, laxs("all_gather"))(x))
    empty = np.zeros((4, 0, 3), np.float32)
    for name in ("psum", "all_gather"):
        assert_same(on_mesh(mesh, ours(name))(empty), on_mesh(mesh, laxs(name))(empty))


@each_implementation
def test_types_of_results(mesh: Mesh, implementation: str | None) -> None:
    """Sums are the same on every rank, and `check_vma` knows it; the others vary."""
    x = integers("float32", 4, 8)
    found = on_mesh(mesh, ours("psum", implementation=implementation), check_vma=True, varies=False)(x)
    assert_same(found, x.sum(0))
    for name in ("all_gather", "psum_scatter"):
        program = on_mesh(mesh, ours(name, tiled=True, implementation=implementation), check_vma=True, varies=False)
        with pytest.raises(ValueError, match="out_specs"):
            program(x)
        program = on_mesh(mesh, ours(name, tiled=True, implementation=implementation), check_vma=True)
        assert_same(program(x), on_mesh(mesh, laxs(name, tiled=True))(x))


def test_operand_that_is_the_same_everywhere(mesh: Mesh) -> None:
    x = integers("float32", 8)
    for name in NAMES:
        keywords = {} if name == "psum" else {"tiled": True}

        def run(function: Callable, varies: bool = name != "psum") -> Any:
            return jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P("tp") if varies else P())(x)

        assert_same(run(ours(name, **keywords)), run(laxs(name, **keywords)))


@pytest.mark.parametrize("dims", ((2, 4), (4, 2)))
@pytest.mark.parametrize("axes", ("tp", "dp", ("dp", "tp"), ("tp", "dp")), ids=str)
@each_name
def test_meshes_of_two_axes(cpu_mesh: MeshFactory, dims: tuple[int, int], axes: Any, name: str) -> None:
    mesh = cpu_mesh(dims, ("dp", "tp"))
    keywords = {} if name == "psum" else {"tiled": True}
    x = integers("float32", 8, 16)
    implementations = [ours(name, axes, implementation=how, **keywords) for how in (None, "simulate")]
    assert_like(laxs(name, axes, **keywords), implementations, mesh, x)


@each_name
def test_permuted_devices_and_explicit_axes(name: str) -> None:
    devices = np.array(jax.devices("cpu"))[[5, 2, 7, 0]]
    keywords = {} if name == "psum" else {"tiled": True}
    x = integers("float32", 4, 8)
    wanted = on_mesh(mesh_of(4), laxs(name, **keywords))(x)
    assert_same(on_mesh(Mesh(devices, ("tp",)), ours(name, implementation="simulate", **keywords))(x), wanted)
    mesh = Mesh(devices, ("tp",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("tp")))
        assert_same(jax.jit(on_mesh(mesh, ours(name, **keywords)))(placed), wanted)


@pytest.mark.parametrize("name", ("psum", "psum_scatter"))
def test_terms_of_an_unreduced_sum_are_added_by_xla(name: str) -> None:
    mesh = Mesh(np.array(jax.devices("cpu"))[:4], ("tp",), axis_types=(AxisType.Explicit,))
    keywords = {} if name == "psum" else {"tiled": True}
    rows = P(None, None, unreduced={"tp"})
    with jax.set_mesh(mesh):
        lhs, rhs = (jax.device_put(np.ones(s, np.float32), p) for s, p in (((4, 8), P(None, "tp")), ((8, 4), P("tp"))))
        terms = jax.jit(lambda lhs, rhs: jnp.einsum("ij,jk->ik", lhs, rhs, out_sharding=rows))(lhs, rhs)

        def total(function: Callable) -> jax.Array:
            return jax.jit(jax.shard_map(function, in_specs=rows, out_specs=P("tp" if keywords else None)))(terms)

        assert_same(total(ours(name, **keywords)), np.full((4, 4), 8, np.float32))
        with fails(NotImplementedError, name, "unreduced along ['tp']"):
            total(ours(name, implementation="fused", **keywords))


@each_name
@each_implementation
def test_outside_of_jit(mesh: Mesh, name: str, implementation: str | None) -> None:
    """Operation by operation, as in a notebook."""
    keywords = {} if name == "psum" else {"tiled": True}
    x = integers("float32", 4, 8)

    def results(function: Callable) -> jax.Array:
        local = lambda x: function(x[0])[None]  # noqa: E731
        return jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False)(x)

    assert_same(results(ours(name, implementation=implementation, **keywords)), results(laxs(name, **keywords)))


@each_name
@both_ways
@each_implementation
def test_gradients(mesh: Mesh, name: str, check_vma: bool, implementation: str | None) -> None:
    """Through a rank's own loss and through the whole program, as of `lax`'s."""
    keywords = {} if name == "psum" else {"tiled": True}
    x = integers("float32", 4, 8)

    def gradients(function: Callable) -> tuple[Any, ...]:
        def loss(x: jax.Array) -> jax.Array:
            out = function(x)
            return jnp.sum(out * jnp.arange(out.size, dtype=out.dtype))

        outer = on_mesh(mesh, function, check_vma=check_vma, varies=name != "psum")
        whole = jax.grad(lambda x: jnp.sum(jnp.cos(outer(x))))
        own = on_mesh(mesh, jax.grad(loss), check_vma=check_vma)
        return jax.jit(lambda x: (own(x), whole(x), *jax.jvp(outer, (x,), (x + 1,))))(x)

    found = gradients(ours(name, implementation=implementation, **keywords))
    for mine, wanted in zip(found, gradients(laxs(name, **keywords)), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-6, atol=1e-6)


@each_name
def test_second_derivatives(mesh: Mesh, name: str) -> None:
    keywords = {} if name == "psum" else {"tiled": True}
    x = integers("float32", 4, 8)

    def products(function: Callable) -> jax.Array:
        outer = on_mesh(mesh, function, check_vma=True, varies=name != "psum")
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(outer(x))))
        return jax.jvp(gradient, (x,), (x + 1,))[1]

    np.testing.assert_allclose(products(ours(name, **keywords)), products(laxs(name, **keywords)), rtol=1e-5)


@pytest.mark.parametrize("dim", (0, 1, 2))
@pytest.mark.parametrize("tiled", (True, False))
@pytest.mark.parametrize("dimension", (0, 1))
@each_name
def test_vmap(mesh: Mesh, name: str, tiled: bool, dimension: int, dim: int) -> None:
    keywords: dict[str, Any] = {}
    if name != "psum":
        keywords = {"tiled": tiled, "axis" if name == "all_gather" else "scatter_dimension": dimension}
    x = integers("float32", 4, 3, 4, 4)  # of each rank, 3 examples
    each = laxs(name, **keywords)
    mapped = jax.vmap(ours(name, **keywords), in_axes=dim)
    assert_like(
        lambda x: jnp.stack([each(x[i]) for i in range(3)]), [lambda x: mapped(jnp.moveaxis(x, 0, dim))], mesh, x
    )


def test_vmap_over_the_axis_itself() -> None:
    with fails(NotImplementedError, "psum", "jax.vmap maps over the axis 'tp' itself"):
        jax.vmap(lambda x: jtf.psum(x, "tp", implementation="fused"), axis_name="tp")(jnp.ones((4, 3)))
    found = jax.vmap(lambda x: jtf.psum(x, "tp"), axis_name="tp")(jnp.ones((4, 3)))
    np.testing.assert_array_equal(found, np.full((4, 3), 4))


@both_ways
@each_implementation
def test_loops(mesh: Mesh, check_vma: bool, implementation: str | None) -> None:
    """A loop whose body has all three, and whose condition has a sum."""
    keywords = {"axis_name": "tp", "implementation": implementation}

    def local(x: jax.Array) -> jax.Array:
        def step(state: tuple) -> tuple:
            i, x = state
            part = jtf.psum_scatter(jtf.all_gather(x, tiled=True, **keywords), tiled=True, **keywords)
            return i + 1, part - 3 * x

        return lax.while_loop(lambda state: (jtf.psum(state[1], **keywords)[0] < 1e6) & (state[0] < 3), step, (0, x))[1]

    x = integers("float32", 4, 8)
    assert_same(jax.jit(on_mesh(mesh, local, check_vma=check_vma))(x), x)


def test_partly_manual_mesh_cannot_be_fused(cpu_mesh: MeshFactory) -> None:
    mesh = cpu_mesh((2, 4), ("dp", "tp"))
    program = jax.shard_map(
        ours("psum", implementation="fused"), mesh=mesh, in_specs=P("tp"), out_specs=P(), axis_names={"tp"}
    )
    with fails(NotImplementedError, "psum", "['dp']", "make all axes manual"):
        lower_for_cuda(program, sharded(mesh, P("tp"), (16,), "bfloat16"))


def program_of(mesh: Mesh, name: str, *, check_vma: bool = False, **keywords: Any) -> Callable:
    """An operation on the whole array [world * M, N], for lowering."""
    return jax.shard_map(
        ours(name, **keywords),
        mesh=mesh,
        in_specs=P("tp"),
        out_specs=P() if name == "psum" else P("tp"),
        check_vma=check_vma,
    )


def operations_in(text: str) -> set[str]:
    """Of StableHLO, without what makes constants."""
    found = {word for line in text.splitlines() for word in line.split() if word.startswith("stablehlo.")}
    return found - {"stablehlo.constant", "stablehlo.broadcast_in_dim"}


@pytest.mark.usefixtures("no_code")
@pytest.mark.covers(1)
@each_name
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape, check_vma",
    [
        pytest.param(shape, check_vma, marks=[] if check_vma == (len(shape) == 2) else pytest.mark.soak)
        for shape, check_vma in itertools.product(((4,), (4, 1001), (4, 8, 3)), (True, False))
    ],
)
def test_lowers_to_one_kernel_and_nothing_else(
    mesh: Mesh, name: str, check_vma: bool, dtype: str, shape: tuple[int, ...]
) -> None:
    keywords = {} if name == "psum" else {"tiled": True}
    program = program_of(mesh, name, check_vma=check_vma, implementation="fused", **keywords)
    text = lower_for_cuda(program, sharded(mesh, P("tp"), (4 * shape[0], *shape[1:]), dtype))
    assert_fused(text)
    assert operations_in(text) <= {"stablehlo.custom_call", "stablehlo.reshape"}


@pytest.mark.parametrize("dimension", (1, 2))
@pytest.mark.parametrize("name", ("all_gather", "psum_scatter"))
def test_other_dimensions_are_no_transposition(mesh: Mesh, name: str, dimension: int) -> None:
    keywords = {"axis" if name == "all_gather" else "scatter_dimension": dimension, "tiled": True}
    text = lower_for_cuda(
        program_of(mesh, name, implementation="fused", **keywords), sharded(mesh, P("tp"), (8, 4, 4), "bfloat16")
    )
    assert_fused(text)
    assert operations_in(text) <= {"stablehlo.custom_call", "stablehlo.reshape"}


@pytest.mark.usefixtures("no_code")
@each_name
@both_ways
def test_derivatives_stay_fused(mesh: Mesh, name: str, check_vma: bool) -> None:
    keywords = {} if name == "psum" else {"tiled": True}
    program = program_of(mesh, name, check_vma=check_vma, implementation="fused", **keywords)
    x = sharded(mesh, P("tp"), (64, 4), "float32")
    assert_fused(lower_for_cuda(lambda x: jax.jvp(program, (x,), (x,)), x), calls=2)
    # With types, the cotangent of a sum is the same on every rank, and needs no sum.
    backward = 0 if name == "psum" and check_vma else 1
    assert_fused(lower_for_cuda(jax.grad(lambda x: jnp.sum(jnp.sin(program(x)))), x), calls=1 + backward)


@each_name
def test_vmap_stays_fused(mesh: Mesh, name: str) -> None:
    mapped = jax.vmap(ours(name, implementation="fused"), in_axes=1)
    program = jax.shard_map(mapped, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False)
    assert_fused(lower_for_cuda(program, sharded(mesh, P("tp"), (16, 4), "float32")))


@each_name
def test_xla_lowers_to_none(mesh: Mesh, name: str) -> None:
    keywords = {} if name == "psum" else {"tiled": True}
    program = program_of(mesh, name, implementation="xla", **keywords)
    assert_not_fused(lower_for_cuda(program, sharded(mesh, P("tp"), (64,), "float32")), HLO[name])


@each_name
def test_the_choice_by_size(
    mesh: Mesh, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None takes the kernel up to a size in bytes of a rank, and says why not."""
    keywords = {} if name == "psum" else {"tiled": True}
    ranks = 4 if name == "psum_scatter" else 1  # whose results an operand holds
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        for most, why in ((60, "XLA is faster for more than 60 bytes"), (0, "not been measured"), (64, "")):
            monkeypatch.setitem(FASTER_UP_TO, name, most)
            text = lower_for_cuda(program_of(mesh, name, **keywords), sharded(mesh, P("tp"), (64 * ranks,), "float32"))
            if why:
                assert_not_fused(text, HLO[name])
                assert why in caplog.text
            else:
                assert_fused(text)


def test_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    mesh = mesh_of(1)
    x = integers("float32", 1, 4)
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        for name in NAMES:
            keywords = {} if name == "psum" else {"tiled": True}
            program = program_of(mesh, name, **keywords)
            assert TRITON_CALL not in lower_for_cuda(program, sharded(mesh, P("tp"), (8,), "float32"))
            assert_same(on_mesh(mesh, ours(name, implementation="simulate", **keywords))(x), x)
    assert "one rank" in caplog.text


@each_name
def test_what_the_kernels_do_not_take_goes_to_xla(
    mesh: Mesh, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FASTER_UP_TO, name, 1 << 20)
    for dtype in ("complex64", "float64", "int64"):
        with jax.enable_x64(True), caplog.at_level(logging.DEBUG, "jaxtaxfree"):
            x = integers(dtype, 4, 4)
            np.testing.assert_array_equal(on_mesh(mesh, ours(name))(x), on_mesh(mesh, laxs(name))(x))
            keywords = {} if name == "psum" else {"tiled": True}
            text = lower_for_cuda(program_of(mesh, name, **keywords), sharded(mesh, P("tp"), (16,), dtype))
            assert_not_fused(text, HLO[name])
            assert f"not {dtype}" in caplog.text
            with fails(NotImplementedError, name, f"not {dtype}"):
                on_mesh(mesh, ours(name, implementation="fused"))(x)


def test_errors(mesh: Mesh) -> None:
    x = integers("float32", 4, 6)
    with fails(NameError, "psum needs a mesh axis", "'tp'"):
        jtf.psum(x, "tp")
    with fails(ValueError, "no implementation 'triton'"):
        on_mesh(mesh, ours("psum", implementation="triton"))(x)
    with fails(NotImplementedError, "psum", "for NVIDIA GPUs", "lowered for cpu"):
        on_mesh(mesh, ours("psum", implementation="fused"))(x)
    with fails(NotImplementedError, "all_gather", "empty: [0]"):
        on_mesh(mesh, ours("all_gather", implementation="fused"))(x[:, :0])
    with fails(ValueError, "psum_scatter cannot scatter dimension 0 of [6] over 4 ranks", "6 is not a multiple of 4"):
        on_mesh(mesh, ours("psum_scatter", tiled=True))(x)
    with fails(ValueError, "psum_scatter cannot scatter", "6 is not 4"):
        on_mesh(mesh, ours("psum_scatter"))(x)
    with fails(ValueError, "all_gather cannot take dimension 2 of 2"):
        on_mesh(mesh, ours("all_gather", axis=2))(x)


def test_configurations(mesh: Mesh) -> None:
    x = integers("float32", 4, 6)
    for config, part in (
        ({"block_q": 1}, "psum has no setting 'block_q'"),
        ({"protocol": "pigeons"}, "no protocol 'pigeons'"),
        ({"shots": 3}, "an integer from 1 to 2, not 3"),
        ({"block": 48}, "a power of 2 from 16 to 16384, not 48"),
    ):
        with fails(ValueError, part):
            on_mesh(mesh, ours("psum", config=config))(x)
    for name, given in (("all_gather", x.astype(np.int8)), ("psum", x.astype(np.int32))):
        with fails(NotImplementedError, "words carry sums of floats", name):
            on_mesh(mesh, ours(name, implementation="simulate", config={"protocol": "words"}))(given)
    with fails(NotImplementedError, "blocks of at most 1024 of float32 as messages"):
        on_mesh(mesh, ours("psum", implementation="simulate", config={"protocol": "messages", "block": 2048}))(x)
    program = program_of(mesh, "psum", implementation="fused", config=PsumConfig(shots=2, block=64, num_warps=1))
    assert_fused(lower_for_cuda(program, sharded(mesh, P("tp"), (64,), "float32")))


@pytest.mark.parametrize("world", (2, 3, 4, 8, 72))
@each_name
def test_default_configurations_can_be_launched(name: str, world: int) -> None:
    for shape in register.OPERATIONS["psum"].shapes:
        for dtype in DTYPES:
            size = max(1, shape.nbytes // jnp.dtype(dtype).itemsize)
            call = Call(size=size, world=world, dtype=np.dtype(jnp.dtype(dtype)))
            chosen = choose(name, VARIANTS[name], call, {})
            assert choose(name, VARIANTS[name], call, chosen.settings) == chosen
            assert chosen.keywords["grid"] <= 1024
