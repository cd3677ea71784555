"""`ragged_all_to_all` against NumPy: values, derivatives, transformations, garbage, errors."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.ops import ragged_all_to_all as ragged_op
from jaxtaxfree.ops.ragged_all_to_all.portable import Call
from jaxtaxfree.ops.ragged_all_to_all.shapes import SHAPES, TINY_SHAPES
from jaxtaxfree.ops.shapes import RaggedShape
from jaxtaxfree.teams import Team
from tests.helpers.ragged_cases import Routing, garbage, reports
from tests.helpers.support import TRITON_CALL, assert_fused, fails, lower_for_cuda, mesh_of, one_program, sharded

# So small that every program has chunks that are not full, and each transfer several of them.
CONFIG = {"programs": 2, "chunk": 16, "stages": 2}
SIMULATED: dict[str, Any] = {"implementation": "simulate", "config": CONFIG}
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8", "uint8", "uint16", "int32", "bool")


def on_ranks(call: Callable, world: int, operands: int = 6, check_vma: bool = True) -> Callable:
    """The function of a rank's arrays, on all of them [world, ...]."""

    def local(*operands: jax.Array) -> jax.Array:
        return call(*(x[0] for x in operands))[None]

    return one_program(
        local, mesh=mesh_of(world), in_specs=(P("tp"),) * operands, out_specs=P("tp"), check_vma=check_vma
    )


def ragged(world: int, check_vma: bool = True, **keywords: Any) -> Callable:
    call = functools.partial(jtf.ragged_all_to_all, axis_name="tp", **keywords)
    return on_ranks(call, world, check_vma=check_vma)


def check(routing: Routing, dtype: Any = "float32", row: tuple[int, ...] = (5,), **keywords: Any) -> None:
    operand, output = routing.arrays(jnp.dtype(dtype), *row)
    found = ragged(routing.world, **keywords)(operand, output, *routing.tables)
    assert found.dtype == output.dtype
    np.testing.assert_array_equal(found, routing.expected(operand, output))


@pytest.mark.parametrize("world", (1, 2, 3, 4))
def test_values(world: int) -> None:
    for seed, keywords in enumerate(({}, SIMULATED)):
        check(Routing.drawn(world, seed), **keywords)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str) -> None:
    check(Routing.drawn(2, 0), dtype, **SIMULATED)


def test_dtypes_by_lax() -> None:
    """Where the kernel does not take a type, plain `lax` does."""
    for dtype in ("float8_e4m3fn", "bool", "complex64"):
        check(Routing.drawn(2, 0), dtype)


@pytest.mark.parametrize("row", ((), (1,), (2, 3), (40,)))
def test_rows_of_any_shape(row: tuple[int, ...]) -> None:
    check(Routing.drawn(2, 1), row=row, **SIMULATED)


ROUTINGS = {
    "nothing at all": np.zeros((3, 3), int),
    "all to one rank": np.array([[0, 9, 0], [0, 4, 0], [0, 11, 0]]),
    "all from one rank": np.array([[0, 0, 0], [6, 1, 9], [0, 0, 0]]),
    "to the next rank": np.array([[0, 7, 0], [0, 0, 7], [7, 0, 0]]),
    "even": np.full((3, 3), 4),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routings(name: str) -> None:
    """What nobody sends is that of `output`; with no spare row, all of it is sent to the rank that gets most."""
    for spare in (0, 2) if ROUTINGS[name].any() else (2,):
        check(Routing(ROUTINGS[name], spare=spare), **SIMULATED)


@pytest.mark.parametrize("rows", ("operand", "output", "both"))
def test_no_rows(rows: str) -> None:
    """An array without rows is for `lax`."""
    routing = Routing(np.zeros((2, 2), int))
    operand, output = routing.arrays("float32", 3)
    operand = operand[:, :0] if rows != "output" else operand
    output = output[:, :0] if rows != "operand" else output
    tables = [np.zeros_like(x) for x in routing.tables]  # offsets, too, which there are none behind 0
    found = ragged(2)(operand, output, *tables)
    np.testing.assert_array_equal(found, output)
    with fails(NotImplementedError, "an operand is empty"):
        ragged(2, implementation="fused")(operand, output, *tables)


def test_offsets_in_any_order() -> None:
    """Rows for a rank may lie anywhere in the operand, and be sent twice; so may they in the result."""
    operand, output = np.arange(24.0).reshape(2, 6, 2), np.full((2, 8, 2), -1.0)
    tables = [np.array(x, np.int32) for x in ([[2, 1], [4, 4]], [[3, 2], [1, 2]], [[5, 0], [0, 6]], [[3, 1], [2, 2]])]
    wanted = output.copy()
    wanted[0, 5:8], wanted[1, 0:2] = operand[0, 2:5], operand[0, 1:3]
    wanted[0, 0:1], wanted[1, 6:8] = operand[1, 4:5], operand[1, 4:6]
    for keywords in ({}, SIMULATED):
        np.testing.assert_array_equal(ragged(2, **keywords)(operand, output, *tables), wanted)


def test_tables_of_any_integers() -> None:
    routing = Routing.drawn(2, 2)
    operand, output = routing.arrays("float32", 3)
    for dtype in ("uint8", "int16", "uint32"):
        found = ragged(2)(operand, output, *(x.astype(dtype) for x in routing.tables))
        np.testing.assert_array_equal(found, routing.expected(operand, output))


def test_tables_of_64_bits() -> None:
    """What has more than 32 bits stays garbage."""
    routing = Routing.drawn(2, 2)
    operand, output = routing.arrays("float32", 3)
    with jax.enable_x64(True):
        tables = [x.astype(np.int64) for x in routing.tables]
        wanted = routing.expected(operand, output)
        np.testing.assert_array_equal(ragged(2, **SIMULATED)(operand, output, *tables), wanted)
        for table, value in ((0, 2**32), (1, 2**32), (2, -(2**32))):
            wrong = [x.copy() for x in tables]
            wrong[table][0, 1] += value
            found = ragged(2, **SIMULATED)(operand, output, *wrong)
            np.testing.assert_array_equal(found[0], wanted[0])
            assert np.isnan(found[1]).all()
            with pytest.raises(
                jtf.GarbageError, match=rf"rank 0 was given \w+\[1\] = {-1 if value < 0 else 2**31 - 1} in"
            ):
                jtf.heap.check()


def test_two_axes_in_any_order() -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    routing = Routing.drawn(4, 3)
    operand, output = routing.arrays("float32", 3)
    for axes in (("a", "b"), ("b", "a")):
        call = functools.partial(jtf.ragged_all_to_all, axis_name=axes, **SIMULATED)
        program = one_program(
            lambda *operands, call=call: call(*(x[0] for x in operands))[None],
            mesh=mesh,
            in_specs=(P(axes),) * 6,
            out_specs=P(axes),
        )
        found = program(operand, output, *routing.tables)
        np.testing.assert_array_equal(found, routing.expected(operand, output))


@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("keywords", ({}, SIMULATED), ids=("lax", "simulated"))
def test_gradients(keywords: dict[str, Any], check_vma: bool) -> None:
    routing = Routing.drawn(3, 4)
    operand, output = routing.arrays("float32", 2, 2)
    call = ragged(3, check_vma, **keywords)
    out, back = jax.vjp(lambda *x: call(*x, *routing.tables), operand, output)
    np.testing.assert_array_equal(out, routing.expected(operand, output))
    ct = np.random.default_rng(0).integers(1, 99, out.shape).astype(np.float32)
    for found, wanted in zip(back(ct), routing.gradients(ct), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_gradients_of_one_operand() -> None:
    routing = Routing.drawn(2, 5)
    operand, output = routing.arrays("float32", 3)
    call, ct = ragged(2), routing.arrays("float32", 3, seed=1)[1]
    of_operand, of_output = routing.gradients(ct)
    _, back = jax.vjp(lambda x: call(x, output, *routing.tables), operand)
    np.testing.assert_array_equal(back(ct)[0], of_operand)
    _, back = jax.vjp(lambda x: call(operand, x, *routing.tables), output)
    np.testing.assert_array_equal(back(ct)[0], of_output)


def test_second_derivatives() -> None:
    """Of the sum of squares: those of what arrives."""
    routing = Routing.drawn(2, 5)
    operand, output = routing.arrays("float32", 3)
    call = ragged(2)
    gradient = jax.grad(lambda x: jnp.sum(call(x, output, *routing.tables) ** 2))
    _, found = jax.jvp(gradient, [operand], [operand])
    wanted, _ = routing.gradients(2 * routing.expected(operand, output))
    np.testing.assert_array_equal(found, wanted)


def test_jvp() -> None:
    """It is linear: the tangent is the same call of the tangents."""
    routing = Routing.drawn(2, 6)
    primals, dots = routing.arrays("float32", 3), routing.arrays("float32", 3, seed=1)
    call = ragged(2, **SIMULATED)
    out, dot = jax.jvp(lambda *x: call(*x, *routing.tables), primals, dots)
    np.testing.assert_array_equal(out, routing.expected(*primals))
    np.testing.assert_array_equal(dot, routing.expected(*dots))


def test_in_scan_and_remat() -> None:
    """Three times in a loop that is computed again for the gradient, with other sizes in each step."""
    routings = [Routing(np.roll([[2, 1], [0, 3]], i, axis=0)) for i in range(3)]
    operand, output = routings[0].arrays("float32", 3)
    tables = [np.stack(each, axis=1) for each in zip(*(r.tables for r in routings))]

    def steps(operand: jax.Array, output: jax.Array, *tables: jax.Array) -> jax.Array:
        @jax.checkpoint
        def step(out: jax.Array, some: Any) -> tuple[jax.Array, None]:
            return jtf.ragged_all_to_all(operand, 2 * out, *some, axis_name="tp"), None

        return lax.scan(step, output, tables)[0]

    program = on_ranks(steps, 2)
    out, back = jax.vjp(lambda *x: program(*x, *tables), operand, output)
    wanted = output
    for routing in routings:
        wanted = routing.expected(operand, 2 * wanted)
    np.testing.assert_array_equal(out, wanted)
    of_out, total = routings[0].arrays("float32", 3, seed=1)[1], 0
    found = back(of_out)
    for routing in reversed(routings):
        of_operand, of_out = routing.gradients(of_out)
        of_out, total = 2 * of_out, total + of_operand
    np.testing.assert_array_equal(found[0], total)
    np.testing.assert_array_equal(found[1], of_out)


def test_vmap() -> None:
    """Over rows and tables, by the reference."""
    routings = [Routing(np.array([[2, 1], [0, 3]])), Routing(np.array([[0, 3], [2, 1]]))]
    arrays = [routing.arrays("float32", 3, seed=i) for i, routing in enumerate(routings)]
    batched = [np.stack(each, axis=1) for each in zip(*(a + tuple(r.tables) for a, r in zip(arrays, routings)))]
    call = functools.partial(jtf.ragged_all_to_all, axis_name="tp")
    found = on_ranks(jax.vmap(call), 2)(*batched)
    for i, routing in enumerate(routings):
        np.testing.assert_array_equal(found[:, i], routing.expected(*arrays[i]))
    with fails(NotImplementedError, "jax.vmap maps over it"):
        on_ranks(jax.vmap(functools.partial(call, implementation="fused")), 2)(*batched)


@pytest.mark.filterwarnings("ignore::jaxtaxfree.simulator.WastedTrafficWarning")  # what came beside the garbage
@pytest.mark.parametrize("dtype", ("float32", "uint8", "float8_e4m3fn"))
@pytest.mark.parametrize("keywords", ({}, SIMULATED), ids=("lax", "kernel"))
def test_garbage(dtype: str, keywords: dict[str, Any]) -> None:
    """Who cannot have a result has none; all others have theirs. A write outside the simulator would report.

    A kernel reports the garbage as well; the reference has nobody to tell.
    """
    call = ragged(2, **keywords)
    for name, routing, tables, receivers in garbage(2):
        operand, output = routing.arrays(jnp.dtype(dtype), 3)
        wanted = routing.expected(operand, output)
        wanted[receivers] = 255 if dtype == "uint8" else np.nan
        found = call(operand, output, *tables)
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32), err_msg=name)
        if keywords:
            with pytest.raises(jtf.GarbageError) as raised:
                jtf.heap.check()
            wanted = reports(routing, tables, call=r"\d+")
            for message in wanted:
                assert re.search(r"ragged_all_to_all: " + message.replace("[", r"\["), str(raised.value)), name
            assert str(raised.value).count("ragged_all_to_all: ") == len(wanted), name
        jtf.heap.check()


def lowered(call: Callable, dtype: str = "bfloat16") -> str:
    mesh = mesh_of(4)
    program = jax.shard_map(call, mesh=mesh, in_specs=(P("tp"),) * 6, out_specs=P("tp"))
    rows, table = sharded(mesh, P("tp"), (4 * 64, 2048), dtype), sharded(mesh, P("tp"), (16,), "int32")
    return lower_for_cuda(program, rows, rows, *[table] * 4)


def test_lowered_for_cuda() -> None:
    call = functools.partial(jtf.ragged_all_to_all, axis_name="tp", implementation="fused")
    for dtype in ("bfloat16", "float8_e4m3fn", "bool"):
        assert_fused(lowered(call, dtype))


def test_the_gradient_lowered_for_cuda() -> None:
    """One kernel each way; the tables travel by XLA."""

    def gradient(operand: jax.Array, output: jax.Array, *tables: jax.Array) -> jax.Array:
        def call(operand: jax.Array) -> jax.Array:
            return jtf.ragged_all_to_all(operand, output, *tables, axis_name="tp", implementation="fused")

        out, back = jax.vjp(call, operand)
        return back(2 * out)[0]

    text = lowered(gradient)
    assert text.count(TRITON_CALL) == 2
    moved = [line for line in text.splitlines() if "stablehlo.all_to_all" in line or "ragged_all_to_all" in line]
    assert all("tensor<4xi32>" in line for line in moved if "stablehlo.all_to_all" in line)
    assert not any("stablehlo.all_gather" in line for line in text.splitlines())


def test_errors() -> None:
    operand, output, table = jnp.ones((2, 4, 3)), jnp.ones((2, 5, 3)), jnp.zeros((2, 2), jnp.int32)
    tables = [table] * 4
    with fails(ValueError, "an operand [M, ...] and an output [N, ...]", "float32[4, 3] and float32[5, 2]"):
        ragged(2)(operand, output[..., :2], *tables)
    with fails(ValueError, "of one dtype", "float32[4, 3] and bfloat16[5, 3]"):
        ragged(2)(operand, output.astype("bfloat16"), *tables)
    with fails(ValueError, "takes send_sizes as integers [2]", "not int32[3]"):
        ragged(2)(operand, output, table, jnp.zeros((2, 3), jnp.int32), table, table)
    with fails(ValueError, "takes recv_sizes as integers [2]", "not float32[2]"):
        ragged(2)(operand, output, table, table, table, table.astype("float32"))
    with fails(NotImplementedError, "types of up to 32 bits, not complex64"):
        ragged(2, implementation="fused")(operand.astype("complex64"), output.astype("complex64"), *tables)
    with fails(ValueError, "'fast'"):
        ragged(2, implementation="fast")(operand, output, *tables)
    with fails(ValueError, "chunk"):
        ragged(2, config={"chunk": 17})(operand, output, *tables)
    with fails(NameError, "ragged_all_to_all needs a mesh axis", "'tp'"):
        jtf.ragged_all_to_all(operand[0], output[0], *[table[0]] * 4, axis_name="tp")


@pytest.mark.parametrize("shape", (*SHAPES, *TINY_SHAPES), ids=lambda shape: shape.name)
def test_what_is_chosen(shape: RaggedShape) -> None:
    """At every listed shape, with all that may be tried instead; what is known of a call is its rows and their size."""
    for world, dtype in itertools.product((2, 8), ("bfloat16", "int8")):
        rows = jax.ShapeDtypeStruct((shape.rows, shape.d), dtype)
        team = Team(axes=("tp",), others=(), world=world, devices=tuple(mesh_of(world).devices.flat))
        known = ragged_op.case(rows, rows, team=team)
        assert known.row() == {"world": world, "dtype": dtype, "d": shape.d, "rows": shape.rows}
        chosen = known.default
        call = Call(rows_in=shape.rows, rows_out=shape.rows, d=shape.d, world=world, dtype=jnp.dtype(dtype))
        assert chosen.config == chosen.variant.by_shape(call, {})
        for some in chosen.variant.variations(call, chosen.config):
            other = known.choose(shape.rows, some).config
            assert other == dataclasses.replace(chosen.config, **some)


@pytest.mark.parametrize("kind", (AxisType.Explicit, AxisType.Auto))
def test_axes_that_are_left_over(kind: AxisType) -> None:
    """The reference computes along them; there is no kernel."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(kind, kind))
    routing = Routing.drawn(2, 7)
    wanted = routing.expected(*routing.arrays("float32", 4))
    operand, output = (x.reshape(-1, 4) for x in routing.arrays("float32", 4))
    tables = [x.reshape(-1) for x in routing.tables]

    def program(implementation: str | None) -> Callable:
        call = functools.partial(jtf.ragged_all_to_all, axis_name="tp", implementation=implementation)
        return jax.shard_map(call, mesh=mesh, in_specs=(P("tp"),) * 6, out_specs=P("tp"), axis_names={"tp"})

    operand, output, *tables = (jax.device_put(x, NamedSharding(mesh, P("tp"))) for x in (operand, output, *tables))
    with jax.set_mesh(mesh):
        found = jax.jit(program(None))(operand, output, *tables)
        np.testing.assert_array_equal(found, wanted.reshape(-1, 4))
        with fails(NotImplementedError, "ragged_all_to_all", "dp"):
            lower_for_cuda(program("fused"), operand, output, *tables)
