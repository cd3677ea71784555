"""`ragged_dot` against NumPy: values, derivatives, transformations, garbage, choice, errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.ops import ragged_dot as op
from jaxtaxfree.ops.ragged_dot.variants import VARIANTS, VARIANTS_OF_WEIGHTS
from jaxtaxfree.teams import Team
from tests.helpers.ragged_dot_cases import Grouped, garbage
from tests.helpers.support import TRITON_CALL, fails, lower_for_cuda, mesh_of, one_program

PORTABLE = {"kernel": "portable", "block_m": 16, "block_n": 16, "block_k": 16}
HOPPER = {"kernel": "hopper", "block_n": 32, "block_k": 16, "num_stages": 2, "programs": 3}
CASE = Grouped(50, 24, 40, (7, 0, 18, 9))
simulated = {
    "portable": {"implementation": "simulate", "config": PORTABLE},
    "hopper": {"implementation": "simulate", "config": HOPPER},
}
each_way = pytest.mark.parametrize("keywords", ({}, *simulated.values()), ids=("lax", *simulated))


@each_way
@pytest.mark.parametrize("transposed", (False, True))
def test_values(keywords: dict[str, Any], transposed: bool) -> None:
    lhs, rhs, sizes, _ = CASE.arrays(jnp.bfloat16)
    w = rhs.swapaxes(1, 2) if transposed else rhs
    found = jtf.ragged_dot(lhs, w, sizes, rhs_transposed=transposed, **keywords)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(jnp.float32), CASE.product(lhs, rhs))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 20), st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_any_sizes(sizes: list[int], spare: int, seed: int) -> None:
    """Of groups and behind them, by the portable kernel, with its gradients."""
    case = Grouped(sum(sizes) + spare or 1, 9, 17, tuple(sizes))
    lhs, rhs, groups, ct = case.arrays(np.float32, seed)
    out, back = jax.vjp(lambda *x: jtf.ragged_dot(*x, groups, **simulated["portable"]), lhs, rhs)
    np.testing.assert_array_equal(out, case.product(lhs, rhs))
    of_lhs, of_rhs = back(ct)
    np.testing.assert_array_equal(of_lhs, case.product(ct, rhs.swapaxes(1, 2)))
    np.testing.assert_array_equal(of_rhs, case.of_weights(lhs, ct))


@pytest.mark.parametrize("kernel", simulated)
def test_rows_behind_the_last_group_may_be_left_out(kernel: str) -> None:
    """All others are right, and so are both gradients."""
    lhs, rhs, sizes, ct = CASE.arrays(jnp.bfloat16)
    rows = slice(sum(CASE.sizes))
    out, back = jax.vjp(lambda *x: jtf.ragged_dot(*x, sizes, fill=False, **simulated[kernel]), lhs, rhs)
    of_lhs, of_rhs = back(jnp.asarray(ct))
    np.testing.assert_array_equal(out[rows].astype(jnp.float32), CASE.product(lhs, rhs)[rows])
    np.testing.assert_array_equal(of_lhs[rows].astype(jnp.float32), CASE.product(ct, rhs.swapaxes(1, 2))[rows])
    np.testing.assert_array_equal(of_rhs.astype(jnp.float32), CASE.of_weights(lhs, ct))
    # Nobody writes them in the gradient of lhs, either.
    gradient = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(jtf.ragged_dot(x, rhs, sizes, fill=False) * ct)))(lhs)
    assert str(gradient).count("fill=False") == 2 and "fill=True" not in str(gradient)


@each_way
def test_result_of_another_dtype(keywords: dict[str, Any]) -> None:
    lhs, rhs, sizes, _ = CASE.arrays(jnp.bfloat16)
    found = jtf.ragged_dot(lhs, rhs, sizes, preferred_element_type="float32", **keywords)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, CASE.product(lhs, rhs))


@each_way
@pytest.mark.parametrize("activation", (None, "silu", jax.nn.gelu))
def test_gate_and_activation(keywords: dict[str, Any], activation: Any) -> None:
    lhs, rhs, sizes, _ = CASE.arrays(jnp.bfloat16)
    gate = (rhs[::-1] / 8).astype(rhs.dtype)
    apply = {None: lambda x: x, "silu": jax.nn.silu}.get(activation, activation)
    product, gated = CASE.product(lhs, rhs), np.asarray(apply(jnp.asarray(CASE.product(lhs, gate), jnp.float32)))
    for others, wanted in (({"gate": gate}, gated * product), ({}, apply(jnp.asarray(product, jnp.float32)))):
        found = jtf.ragged_dot(lhs, rhs, sizes, activation=activation, **others, **keywords)
        np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=2**-7, atol=1e-3)
        assert not found[sum(CASE.sizes) :].any()


@pytest.mark.parametrize("transposed", (False, True))
@each_way
def test_gradients(keywords: dict[str, Any], transposed: bool) -> None:
    lhs, rhs, sizes, ct = CASE.arrays(jnp.bfloat16)
    w = rhs.swapaxes(1, 2) if transposed else rhs
    keywords = {name: value for name, value in keywords.items() if name != "config"}
    call = functools.partial(jtf.ragged_dot, group_sizes=sizes, rhs_transposed=transposed, **keywords)
    _, back = jax.vjp(call, lhs, w)
    of_lhs, of_rhs = back(jnp.asarray(ct))
    np.testing.assert_array_equal(of_lhs.astype(jnp.float32), CASE.product(ct, rhs.swapaxes(1, 2)))
    wanted = CASE.of_weights(lhs, ct)
    np.testing.assert_array_equal(of_rhs.astype(jnp.float32), wanted.swapaxes(1, 2) if transposed else wanted)


def test_gradients_with_a_gate() -> None:
    lhs, rhs, sizes, ct = CASE.arrays(np.float32)
    gate = rhs[::-1] / 8

    def gradients(**keywords: Any) -> Any:
        call = functools.partial(jtf.ragged_dot, group_sizes=sizes, activation="silu", **keywords)
        out, back = jax.vjp(lambda lhs, rhs, gate: call(lhs, rhs, gate=gate), lhs, rhs, gate)
        return out, *back(jnp.asarray(ct))

    for found, wanted in zip(gradients(implementation="simulate"), gradients(implementation="xla"), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)


def test_second_derivatives() -> None:
    """Of the kernels' gradients, with respect to both operands, as of the reference's."""
    lhs, rhs, sizes, ct = CASE.arrays(np.float32)

    def loss(lhs: Any, rhs: Any, **keywords: Any) -> jax.Array:
        return jnp.sum(jtf.ragged_dot(lhs, rhs, sizes, **keywords) ** 2 * ct)

    def second(**keywords: Any) -> Any:
        gradient = jax.grad(functools.partial(loss, **keywords), (0, 1))
        return jax.jit(lambda *x: jax.vjp(gradient, *x)[1]((lhs, rhs)))(lhs, rhs)

    def dense(lhs: Any, rhs: Any) -> jax.Array:
        group = np.repeat(np.arange(4), sizes)
        out = jnp.einsum("mk,mkn->mn", lhs[: len(group)], rhs[group])
        return jnp.sum(out**2 * ct[: len(group)])

    _, wanted = jax.jvp(jax.grad(dense, (0, 1)), (lhs, rhs), (lhs, rhs))
    for found, of in zip(second(implementation="simulate"), wanted, strict=True):
        np.testing.assert_allclose(found, of, rtol=1e-5)


def test_in_scan_and_remat() -> None:
    """Layers that are computed again for the gradient, with sizes of their own."""
    case = Grouped(20, 16, 16, (5, 9))
    lhs, rhs, _, ct = case.arrays(np.float32)
    sizes = jnp.array([[5, 9], [0, 20], [13, 0]], jnp.int32)

    def layers(lhs: Any, rhs: Any, implementation: str) -> jax.Array:
        @jax.checkpoint
        def step(x: Any, sizes: Any) -> Any:
            return jtf.ragged_dot(x, rhs, sizes, implementation=implementation) / 8, None

        return jnp.sum(lax.scan(step, lhs, sizes)[0] * ct)

    found, wanted = (
        jax.jit(jax.grad(functools.partial(layers, implementation=how), (0, 1)))(lhs, rhs)
        for how in ("simulate", "xla")
    )
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


@pytest.mark.parametrize("mapped", [(0, None, None), (None, 0, None), (0, 0, None), (1, None, 0), (None, None, 0)])
def test_vmap_over_some_operands(mapped: tuple[int | None, ...]) -> None:
    """The values and the gradients of one example after the other."""
    lhs, rhs, sizes, _ = Grouped(12, 5, 6, (3, 4)).arrays(np.float32)
    all_sizes = np.array([sizes, sizes[::-1], [12, 0]], np.int32)
    alike = [np.stack([lhs, -lhs, 2 * lhs], 1 if mapped[0] else 0), np.stack([rhs, -rhs, 2 * rhs]), all_sizes]
    operands = [several if dim is not None else one for several, one, dim in zip(alike, (lhs, rhs, sizes), mapped)]

    def both(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return jax.value_and_grad(lambda x, y: jnp.sum(jtf.ragged_dot(x, y, sizes, activation="silu") ** 2), (0, 1))(
            lhs, rhs
        )

    found = jax.jit(jax.vmap(both, mapped))(*operands)
    for i in range(3):
        own = [x if dim is None else np.take(x, i, dim) for x, dim in zip(operands, mapped)]
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(both(*own)), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=1e-4, atol=1e-4)
    # Derivatives of what is mapped are those of `lax`.
    mapped_dot = jax.vmap(lambda *one: jnp.sum(jtf.ragged_dot(*one, activation="silu") ** 2), mapped)
    total = jax.grad(lambda x: jnp.sum(mapped_dot(x, *operands[1:])))(operands[0])
    wanted = found[1][0] if mapped[0] is not None else found[1][0].sum(0)
    np.testing.assert_allclose(total, np.moveaxis(wanted, 0, mapped[0] or 0), rtol=1e-4, atol=1e-4)


def test_vmap() -> None:
    """Over all operands by `lax.ragged_dot`; the kernel says no."""
    cases = [Grouped(12, 5, 6, sizes) for sizes in ((3, 4), (12, 0))]
    lhs, rhs, sizes, _ = (np.stack(each) for each in zip(*(case.arrays(np.float32, i) for i, case in enumerate(cases))))
    found = jax.vmap(jtf.ragged_dot)(lhs, rhs, sizes)
    for i, case in enumerate(cases):
        np.testing.assert_array_equal(found[i], case.product(lhs[i], rhs[i]))
    with fails(NotImplementedError, "jax.vmap maps over it"):
        jax.vmap(functools.partial(jtf.ragged_dot, implementation="fused"))(lhs, rhs, sizes)


@each_way
def test_in_shard_map(keywords: dict[str, Any]) -> None:
    """Each rank has groups of its own; no axis is named. Its gradient of weights that all ranks have is a sum."""
    cases = [Grouped(24, 8, 16, sizes) for sizes in ((3, 4), (24, 0))]
    lhs, rhs, sizes, ct = (np.concatenate(each) for each in zip(*(case.arrays(np.float32) for case in cases)))
    rhs = rhs[:2]
    if keywords:
        keywords = {**simulated["portable"], **keywords, "config": PORTABLE}
    call = functools.partial(jtf.ragged_dot, **keywords)
    program = one_program(call, mesh=mesh_of(2), in_specs=(P("tp"), P(), P("tp")), out_specs=P("tp"))
    out, back = jax.vjp(lambda *x: program(*x, sizes), lhs, rhs)
    halves = np.split(lhs, 2), np.split(ct, 2)
    wanted = [case.product(x, rhs) for case, x in zip(cases, halves[0])]
    np.testing.assert_array_equal(out, np.concatenate(wanted))
    of_rhs = sum(case.of_weights(x, y) for case, x, y in zip(cases, *halves))
    np.testing.assert_array_equal(back(jnp.asarray(ct))[1], of_rhs)


@pytest.mark.parametrize("how", [*simulated.values(), {}, {"activation": "silu"}], ids=[*simulated, "lax", "silu"])
def test_garbage(how: dict[str, Any]) -> None:
    """Nothing is addressed by it, and results and gradients are NaN."""
    lhs, rhs, sizes, ct = CASE.arrays(jnp.bfloat16)

    @jax.jit
    def all_of(sizes: jax.Array) -> Any:
        call = functools.partial(jtf.ragged_dot, group_sizes=sizes, **how)
        out, back = jax.vjp(call, lhs, rhs)
        return out, *back(jnp.asarray(ct))

    for name, wrong in garbage(sizes, CASE.m):
        assert all(jnp.isnan(x).all() for x in all_of(wrong)), name


def test_sizes_of_64_bits() -> None:
    """What has more than 32 bits stays garbage."""
    lhs, rhs, sizes, _ = CASE.arrays(np.float32)
    with jax.enable_x64(True):
        wide = sizes.astype(np.int64)
        found = jtf.ragged_dot(lhs, rhs, wide, **simulated["portable"])
        np.testing.assert_array_equal(found, CASE.product(lhs, rhs))
        for more in (2**32, -(2**32)):
            wide[1] = more
            assert np.isnan(jtf.ragged_dot(lhs, rhs, wide, **simulated["portable"])).all()
            # Operands of 64 bits, which no kernel takes.
            assert np.isnan(jtf.ragged_dot(lhs.astype(float), rhs.astype(float), wide)).all()


def test_nan_stays_in_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the gradient of the weights, where rows of other groups are loaded beside those of a group."""
    lhs, rhs, sizes, ct = CASE.arrays(jnp.bfloat16)
    lhs[7], ct[8], rhs[3, 0, 0] = np.nan, np.inf, np.nan
    wrong = [CASE.product(lhs, rhs), CASE.of_weights(lhs, ct)]
    for kernel in ("hopper", "portable"):
        monkeypatch.setattr(op, "VARIANTS", [each for each in VARIANTS if each.name == kernel])
        monkeypatch.setattr(op, "VARIANTS_OF_WEIGHTS", [each for each in VARIANTS_OF_WEIGHTS if each.name == kernel])
        out, back = jax.vjp(lambda x, y: jtf.ragged_dot(x, y, sizes, implementation="simulate"), lhs, rhs)
        for found, wanted in zip((out, back(jnp.asarray(ct))[1]), wrong, strict=True):
            np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))


def program(transposed: bool = False, **keywords: Any) -> Any:
    def both(lhs: Any, rhs: Any, sizes: Any) -> Any:
        call = functools.partial(jtf.ragged_dot, group_sizes=sizes, rhs_transposed=transposed, **keywords)
        out, back = jax.vjp(call, lhs, rhs)
        return out, *back(out)

    return both


S = jax.ShapeDtypeStruct
SHAPES = S((4096, 1024), "bfloat16"), S((8, 1024, 768), "bfloat16"), S((8,), "int32")


@pytest.mark.usefixtures("no_code")
def test_lowered_for_cuda() -> None:
    """Three kernels, and no heap: outside of `shard_map`, and inside, where other axes are Explicit, too."""
    text = lower_for_cuda(program(implementation="fused"), *SHAPES)
    assert text.count(TRITON_CALL) == 3
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Explicit, AxisType.Auto))
    sharded = [S(x.shape, x.dtype, sharding=NamedSharding(mesh, P())) for x in SHAPES]
    inside = jax.shard_map(program(implementation="fused"), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    assert lower_for_cuda(inside, *sharded).count(TRITON_CALL) == 3


@pytest.mark.usefixtures("no_code")
def test_what_none_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured, operands of 16 bits on Hopper; XLA for others."""
    assert lower_for_cuda(program(), *SHAPES).count(TRITON_CALL) == 3
    portable = S((4096, 1020), "bfloat16"), S((8, 1020, 768), "bfloat16"), SHAPES[2]
    assert lower_for_cuda(program(), *portable).count(TRITON_CALL) == 3
    wide = [x if x.dtype == np.int32 else S(x.shape, "float32") for x in SHAPES]
    assert TRITON_CALL not in lower_for_cuda(program(), *wide)
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "80")
    assert TRITON_CALL not in lower_for_cuda(program(), *SHAPES)


def test_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_of(1)
    for capability, dtype, k, wanted in (
        ("90", "bfloat16", 1024, "hopper"),
        ("90", "bfloat16", 1020, "portable"),
        ("90", "float32", 1024, "portable"),
        ("80", "bfloat16", 1024, "portable"),
        ("100", "bfloat16", 1024, "portable"),
    ):
        monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", capability)
        team = Team((), (), 1, tuple(mesh.devices.flat))
        lhs, rhs = S((4096, k), dtype), S((8, k, 768), dtype)
        params = {"precision": None, "preferred_element_type": None, "epilogue": op.NONE, "rhs_transposed": False}
        for case in (
            op._case(lhs, rhs, SHAPES[2], of_weights=False, team=team, **params),
            op._case(lhs, S((4096, 768), dtype), SHAPES[2], of_weights=True, team=team, **params),
        ):
            assert case is not None
            assert case.row()["m"] == 4096
            assert case.default.variant.name == wanted
            for variant in VARIANTS_OF_WEIGHTS if case.row()["kind"] == "weights" else VARIANTS:
                if variant.name in (wanted, "portable"):
                    for some in variant.variations(case.default.call, variant.by_shape(case.default.call, {})):
                        case.choose(4096, {"kernel": variant.name} | some)


def test_few_rows_of_a_group_take_small_tiles() -> None:
    team = Team((), (), 1, tuple(mesh_of(1).devices.flat))
    params = {"precision": None, "preferred_element_type": None, "epilogue": op.NONE, "rhs_transposed": False}
    for rows, wanted in ((512, 64), (4096, 128)):
        lhs, rhs, sizes = S((rows, 1024), "bfloat16"), S((16, 1024, 768), "bfloat16"), S((16,), "int32")
        case = op._case(lhs, rhs, sizes, of_weights=False, team=team, **params)
        assert case is not None
        assert case.default.config.block_m == wanted


def test_errors() -> None:
    lhs, rhs, sizes = jnp.ones((6, 4)), jnp.ones((2, 4, 8)), jnp.array([3, 3])
    with fails(ValueError, "ragged_dot takes lhs [M, K] and rhs [G, K, N]", "[6, 5]"):
        jtf.ragged_dot(jnp.ones((6, 5)), rhs, sizes)
    with fails(ValueError, "rhs [G, N, K]"):
        jtf.ragged_dot(lhs, rhs, sizes, rhs_transposed=True)
    with fails(ValueError, "group_sizes as integers [2]", "int32[3]"):
        jtf.ragged_dot(lhs, rhs, jnp.zeros(3, jnp.int32))
    with fails(ValueError, "group_sizes as integers [2]", "float32[2]"):
        jtf.ragged_dot(lhs, rhs, jnp.zeros(2))
    with fails(ValueError, "a gate like rhs, float32[2, 4, 8]", "float32[2, 4, 7]"):
        jtf.ragged_dot(lhs, rhs, sizes, gate=rhs[..., 1:])
    with fails(ValueError, "not with rhs_transposed"):
        jtf.ragged_dot(lhs, rhs.swapaxes(1, 2), sizes, gate=rhs.swapaxes(1, 2), rhs_transposed=True)
    with fails(ValueError, "no activation 'tanh'"):
        jtf.ragged_dot(lhs, rhs, sizes, activation="tanh")
    with fails(ValueError, "'fast'"):
        jtf.ragged_dot(lhs, rhs, sizes, implementation="fast")
    with fails(ValueError, "block_m"):
        jtf.ragged_dot(lhs, rhs, sizes, config={"kernel": "hopper", "block_m": 48})
    with fails(NotImplementedError, "one dtype, not float32 and bfloat16"):
        jtf.ragged_dot(lhs, rhs.astype("bfloat16"), sizes, implementation="fused")
    with fails(NotImplementedError, "an operand is empty"):
        jtf.ragged_dot(lhs[:0], rhs, sizes, implementation="fused")
    with fails(NotImplementedError, "it takes float16 and bfloat16", "TMA takes rows of multiples of 16 bytes"):
        jtf.ragged_dot(lhs, rhs, sizes, implementation="simulate", config={"kernel": "hopper"})


def test_no_rows() -> None:
    assert jtf.ragged_dot(jnp.ones((0, 4)), jnp.ones((2, 4, 8)), jnp.array([0, 0])).shape == (0, 8)


def test_axes_that_are_left_over() -> None:
    """`lax.ragged_dot` knows no Explicit axes, and so does not this one; nobody computes something else in silence."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    lhs, rhs, sizes, _ = CASE.arrays(np.float32)
    columns = NamedSharding(mesh, P(None, None, "dp"))
    with jax.set_mesh(mesh), fails(NotImplementedError, "Explicit sharding"):
        jax.jit(jtf.ragged_dot)(lhs, jax.device_put(rhs, columns), sizes)
