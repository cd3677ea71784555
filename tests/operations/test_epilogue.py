"""Bias, activation, gate and residual of the fused products: values, derivatives, errors."""

import dataclasses
import logging
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtaxfree import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, simulator
from jaxtaxfree.ops import all_gather_matmul as gather_ops
from jaxtaxfree.ops import matmul_reduce_scatter as scatter_ops
from jaxtaxfree.ops.variant import named
from jaxtaxfree.simulator.scheduler import POLICIES
from tests.helpers import compiling
from tests.helpers.support import (
    DTYPES,
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

WORLDS = (2, 3, 4, 8)
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}
# What is given beside lhs and rhs: the names of arrays, and an activation.
ELEMENTWISE = (
    {"bias": True},
    {"residual": True},
    {"activation": "silu"},
    {"activation": "gelu_tanh"},
    {"activation": "gelu_exact"},
    {"bias": True, "activation": "silu", "residual": True},
)
PAIRS = (
    {"gate": True},
    {"gate": True, "activation": "silu"},
    {"gate": True, "bias": True, "activation": "gelu_tanh", "residual": True},
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """A fused product on a mesh with the axis "tp".

    Attributes:
      function: of lhs, rhs and an axis name.
      specs: of all operands that it may have, and of the result ("out").
      tiles: settings of its two kernels for small operands.
      module: whose kernels' `Config` say what settings leave open; None leaves it to the shape.
    """

    function: Callable[..., Any]
    specs: dict[str, P]
    tiles: dict[str, dict[str, Any]]
    module: ModuleType | None

    def on_mesh(self, mesh: Mesh, names: tuple[str, ...], **keywords: Any) -> Callable:
        """The operation on whole arrays: lhs, rhs, and those of these names."""

        def local(lhs: jax.Array, rhs: jax.Array, *others: jax.Array) -> Any:
            return self.function(lhs, rhs, "tp", precision="highest", **dict(zip(names, others)), **keywords)

        if keywords.get("config") and self.module:
            settings = dict(keywords["config"])
            keywords["config"] = named("", self.module.VARIANTS, settings.pop("kernel")).Config(**settings)
        specs = tuple(self.specs[name] for name in ("lhs", "rhs", *names))
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=self.specs["out"]))

    def operands(self, world: int, m: int, k: int, n: int, dtype: Any = "float32") -> dict[str, np.ndarray]:
        """Whole arrays for m rows and n columns of a rank's operands."""
        gathers = self.function is all_gather_matmul
        k, n = (k, world * n) if gathers else (world * k, n)
        sizes = {"lhs": (world * m, k), "rhs": (k, n), "gate": (k, n), "bias": (n,), "residual": (world * m, n)}
        draw = np.random.default_rng(0)
        scale = {"rhs": k**-0.5, "gate": 2 * k**-0.5}
        return {
            name: (scale.get(name, 1) * draw.standard_normal(size)).astype(jnp.dtype(dtype))
            for name, size in sizes.items()
        }


TILE = {"block_m": 16, "block_n": 32, "block_k": 32}
GATHER = Operation(
    function=all_gather_matmul,
    specs={
        "lhs": P("tp"),
        "rhs": P(None, "tp"),
        "gate": P(None, "tp"),
        "bias": P("tp"),
        "residual": P(None, "tp"),
        "out": P(None, "tp"),
    },
    tiles={
        "portable": {"kernel": "portable", **TILE, "pushers": 2, "chunk": 64, "units": 2, "group_m": 2},
        "few": {"kernel": "few", **TILE, "pushers": 2, "chunk": 64},
    },
    module=gather_ops,
)
SCATTER = Operation(
    function=matmul_reduce_scatter,
    specs={"lhs": P(None, "tp"), "rhs": P("tp"), "bias": P(), "residual": P("tp"), "out": P("tp")},
    tiles={"portable": {"kernel": "portable", **TILE, "group_m": 2}, "few": {"kernel": "few", **TILE}},
    module=scatter_ops,
)
REDUCE = Operation(
    function=matmul_all_reduce,
    specs={"lhs": P(None, "tp"), "rhs": P("tp"), "bias": P(), "residual": P(), "out": P()},
    tiles={"portable": {"kernel": "portable", **TILE, "group_m": 2}, "few": {"kernel": "few", **TILE, "add_rows": 4}},
    module=None,
)
OPERATIONS = (GATHER, SCATTER, REDUCE)
EPILOGUES = [
    *((GATHER, given) for given in ELEMENTWISE + PAIRS),
    *((operation, given) for operation in (SCATTER, REDUCE) for given in ELEMENTWISE),
]
# Of each operation the one with most in it.
FULLEST = ((GATHER, PAIRS[-1]), (SCATTER, ELEMENTWISE[-1]), (REDUCE, ELEMENTWISE[-1]))


def name_of(value: Any) -> str | None:
    if isinstance(value, Operation):
        return value.function.__name__
    if isinstance(value, dict):
        return "-".join(key if value[key] is True else value[key] for key in value)
    return None


each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=name_of)
each_epilogue = pytest.mark.parametrize(("operation", "given"), EPILOGUES, ids=name_of)
each_fullest = pytest.mark.parametrize(("operation", "given"), FULLEST, ids=name_of)


def names_of(given: dict[str, Any]) -> tuple[str, ...]:
    """Of the arrays."""
    return tuple(name for name in given if name != "activation")


def call(
    operation: Operation, mesh: Mesh, given: dict[str, Any], arrays: dict[str, np.ndarray], **keywords: Any
) -> jax.Array:
    names = names_of(given)
    program = operation.on_mesh(mesh, names, activation=given.get("activation"), **keywords)
    return program(*(arrays[name] for name in ("lhs", "rhs", *names)))


def activated(x: np.ndarray, activation: str | None) -> np.ndarray:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    if activation == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if activation == "gelu_exact":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return x


def expected(given: dict[str, Any], arrays: dict[str, np.ndarray]) -> np.ndarray:
    """In f64, of whole arrays."""
    wide = {name: x.astype(np.float64) for name, x in arrays.items()}
    out = wide["lhs"] @ wide["rhs"]
    if "bias" in given:
        out = out + wide["bias"]
    if "gate" in given:
        out = activated(wide["lhs"] @ wide["gate"], given.get("activation")) * out
    else:
        out = activated(out, given.get("activation"))
    return out + wide["residual"] if "residual" in given else out


def assert_close(found: Any, wanted: Any, tolerance: float) -> None:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of(4)


@each_epilogue
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", (None, "xla"))
def test_values(
    mesh: Mesh, operation: Operation, given: dict[str, Any], dtype: str, implementation: str | None
) -> None:
    arrays = operation.operands(4, 5, 33, 9, dtype)
    # XLA adds up partial sums that it has rounded to the type of the result.
    keywords = {} if operation is GATHER else {"preferred_element_type": "float32"}
    out = call(operation, mesh, given, arrays, implementation=implementation, **keywords)
    assert out.dtype == keywords.get("preferred_element_type", dtype)
    assert_close(out, expected(given, arrays), TOLERANCE[dtype])


@each_epilogue
@pytest.mark.parametrize("tiles", ("portable", "few"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_the_kernels(operation: Operation, given: dict[str, Any], tiles: str, dtype: str) -> None:
    arrays = operation.operands(2, 21, 37, 19, dtype)
    out = call(operation, mesh_of(2), given, arrays, implementation="simulate", config=operation.tiles[tiles])
    assert out.dtype == jnp.dtype(dtype)
    assert_close(out, expected(given, arrays), TOLERANCE[dtype])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("tiles", ("portable", "few"))
@each_fullest
def test_interleavings(operation: Operation, given: dict[str, Any], tiles: str, world: int) -> None:
    arrays = operation.operands(world, 5, 21, 19)
    wanted = expected(given, arrays)
    names = names_of(given)
    program = operation.on_mesh(
        mesh_of(world),
        names,
        activation=given["activation"],
        implementation="simulate",
        config=operation.tiles[tiles],
    )
    for seed in range(6):
        slots = (1, 2, None)[seed % 3]
        with simulator.simulating(seed=seed, policy=POLICIES[seed % len(POLICIES)], slots=slots) as recording:
            out = jax.block_until_ready(program(*(arrays[name] for name in ("lhs", "rhs", *names))))
        assert len(recording.traces) == 1
        assert_close(out, wanted, TOLERANCE["float32"])


def check_simulated(
    operation: Operation, given: dict[str, Any], arrays: dict[str, Any], seeds: range, **config: Any
) -> None:
    """The kernel of this configuration, on 2 ranks."""
    dtype, keywords = arrays["lhs"].dtype.name, {"implementation": "simulate", "config": config}
    for seed in seeds:
        with simulator.simulating(seed=seed, policy=POLICIES[seed % len(POLICIES)], slots=(1, 2, None)[seed]):
            out = call(operation, mesh_of(2), given, arrays, **keywords)
        assert_close(out, expected(given, arrays), TOLERANCE[dtype])


REDUCE_HOPPER = {"kernel": "hopper", **TILE, "block_m": 32, "programs": 2, "chunk": 128, "num_stages": 2, "groups": 2}


@pytest.mark.covers(1)
@pytest.mark.parametrize("given", ELEMENTWISE, ids=name_of)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_values_of_the_kernel_for_hopper_that_reduces(given: dict[str, Any], dtype: str) -> None:
    check_simulated(REDUCE, given, REDUCE.operands(2, 21, 40, 104, dtype), range(3), **REDUCE_HOPPER)


DECODE_HOPPER = {**GATHER.tiles["few"], "kernel": "hopper_few", "block_n": 16, "part": 32, "num_stages": 2}


@pytest.mark.covers(1)
@pytest.mark.parametrize("given", ELEMENTWISE + PAIRS, ids=name_of)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_values_of_the_decode_kernel_for_hopper(given: dict[str, Any], dtype: str) -> None:
    check_simulated(GATHER, given, GATHER.operands(2, 7, 72, 24, dtype), range(3), **DECODE_HOPPER)


@pytest.mark.parametrize("given", (ELEMENTWISE[-1], PAIRS[-1]), ids=name_of)
def test_values_of_the_decode_kernel_for_hopper_in_blocks_of_rows(given: dict[str, Any]) -> None:
    arrays = GATHER.operands(2, 7, 72, 24, "bfloat16")
    check_simulated(GATHER, given, arrays, range(2), **DECODE_HOPPER | {"block_m": 8})


@pytest.mark.parametrize("splits", (1, 2))
@pytest.mark.parametrize("given", (ELEMENTWISE[-1], PAIRS[-1]), ids=name_of)
def test_values_of_a_tile_that_is_handled_in_pieces(given: dict[str, Any], splits: int) -> None:
    """By the same kernel, of 256 rows, and by two programs."""
    config = {**DECODE_HOPPER, "block_m": 256, "block_n": 64, "num_warps": 8, "chunk": 4096, "splits": splits}
    arrays = GATHER.operands(2, 125, 72, 40, "bfloat16")
    check_simulated(GATHER, given, arrays, range(splits, splits + 1), **config)


@pytest.mark.parametrize("given", ELEMENTWISE, ids=name_of)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("shots", (0, 1, 2))
def test_values_of_the_kernel_for_hopper_that_reduces_few_rows(given: dict[str, Any], dtype: str, shots: int) -> None:
    operation = REDUCE if shots else SCATTER
    config = {**TILE, "kernel": "hopper_few", "block_n": 16, "num_stages": 2, "exact_wire": True}
    arrays = operation.operands(2, 7, 72, 24, dtype)
    if shots:
        config |= {"shots": shots, "add_rows": 4}
        # Rows that the ranks do not divide.
        arrays |= {name: arrays[name][:-1] for name in ("lhs", "residual")}
    check_simulated(operation, given, arrays, range(shots, shots + 1), **config)


@pytest.mark.parametrize("m", (16, 300))
@each_fullest
def test_the_configuration_that_gpus_take(operation: Operation, given: dict[str, Any], m: int) -> None:
    arrays = operation.operands(2, m, 70, 200)
    out = call(operation, mesh_of(2), given, arrays, implementation="simulate")
    assert_close(out, expected(given, arrays), TOLERANCE["float32"])


@each_operation
@pytest.mark.parametrize("implementation", ("xla", "simulate"))
def test_rounds_once(mesh: Mesh, operation: Operation, implementation: str) -> None:
    """The residual cancels what bf16 has no bits for."""
    if operation is not GATHER and implementation == "xla":
        pytest.skip("XLA rounds what it adds up")
    arrays = operation.operands(4, 4, 64, 8, "bfloat16")
    arrays |= {name: whole_numbers(i, *arrays[name].shape, limit=20) for i, name in enumerate(("lhs", "rhs"))}
    product = exact_product(arrays["lhs"], arrays["rhs"], "float32")
    assert (product != product.astype(jnp.bfloat16)).any()
    arrays["residual"] = 1 - product
    for name in ("lhs", "rhs"):
        arrays[name] = arrays[name].astype(jnp.bfloat16)
    out = call(operation, mesh, {"residual": True}, arrays, implementation=implementation)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, np.ones_like(product))


@pytest.mark.parametrize("implementation", ("xla", "simulate"))
@pytest.mark.parametrize("result", ("float32", "float16"))
def test_operands_of_other_dtypes(mesh: Mesh, implementation: str, result: str) -> None:
    arrays = GATHER.operands(4, 5, 33, 9, "bfloat16")
    arrays["bias"] = arrays["bias"].astype(np.float32)
    arrays["residual"] = arrays["residual"].astype(np.float16)
    given = {"bias": True, "residual": True}
    out = call(GATHER, mesh, given, arrays, implementation=implementation, preferred_element_type=result)
    assert out.dtype == jnp.dtype(result)
    assert_close(out, expected(given, arrays), TOLERANCE[result])


@each_operation
@pytest.mark.parametrize("implementation", ("xla", "simulate"))
def test_another_dimension(operation: Operation, implementation: str) -> None:
    """Gathered or scattered: a dimension that is not the first one, which the residual has as well; or none."""
    mesh, (b, t, k, n) = mesh_of(2), (3, 8, 10, 6)
    draw = np.random.default_rng(0).standard_normal
    lhs, rhs, residual = (draw(shape).astype(np.float32) for shape in ((b, t, k), (k, n), (b, t, n)))
    axis = {GATHER: {"axis": 1}, SCATTER: {"scatter_dimension": 1}, REDUCE: {}}[operation]

    def local(lhs: jax.Array, rhs: jax.Array, residual: jax.Array) -> jax.Array:
        keywords = {"precision": "highest", "implementation": implementation, "activation": "silu", **axis}
        return operation.function(lhs, rhs, "tp", residual=residual, **keywords)

    by_tokens, by_columns = P(None, "tp"), P(None, None, "tp")
    lhs_spec, out_spec = {
        GATHER: (by_tokens, by_columns),
        SCATTER: (by_columns, by_tokens),
        REDUCE: (by_columns, P()),
    }[operation]
    program = jax.shard_map(local, mesh=mesh, in_specs=(lhs_spec, operation.specs["rhs"], out_spec), out_specs=out_spec)
    wanted = activated(lhs.astype(np.float64) @ rhs, "silu") + residual
    assert_close(program(lhs, rhs, residual), wanted, TOLERANCE["float32"])


@pytest.mark.covers(1)
@pytest.mark.parametrize("implementation", (None, "xla", "simulate"))
@pytest.mark.parametrize("tiles", ("portable", "few"))
def test_return_gathered(mesh: Mesh, implementation: str | None, tiles: str) -> None:
    arrays = GATHER.operands(4, 5, 33, 9)

    def local(lhs: jax.Array, rhs: jax.Array, gate: jax.Array) -> tuple[jax.Array, jax.Array]:
        return all_gather_matmul(
            lhs,
            rhs,
            "tp",
            gate=gate,
            activation="silu",
            precision="highest",
            return_gathered=True,
            implementation=implementation,
            config=GATHER.tiles[tiles],
        )

    specs = (P("tp"), P(None, "tp"), P(None, "tp"))
    program = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(None, "tp"), P("tp")))
    out, gathered = program(arrays["lhs"], arrays["rhs"], arrays["gate"])
    assert_close(out, expected({"gate": True, "activation": "silu"}, arrays), TOLERANCE["float32"])
    np.testing.assert_array_equal(gathered, np.tile(arrays["lhs"], (4, 1)))
    found = jax.grad(lambda *args: jnp.sin(program(*args)[0]).sum() + program(*args)[1].sum(), (0, 1, 2))
    plain = GATHER.on_mesh(mesh, ("gate",), activation="silu", implementation="xla")
    wanted = jax.grad(lambda *args: jnp.sin(plain(*args)).sum() + 4 * args[0].sum(), (0, 1, 2))
    for mine, xlas in zip(*(f(arrays["lhs"], arrays["rhs"], arrays["gate"]) for f in (found, wanted)), strict=True):
        assert_close(mine, xlas, 1e-5)


@pytest.mark.parametrize(
    ("function", "name"), ((jax.nn.silu, "silu"), (jax.nn.swish, "silu"), (jax.nn.gelu, "gelu_tanh"))
)
def test_functions_of_jax(mesh: Mesh, function: Callable, name: str) -> None:
    arrays = GATHER.operands(4, 5, 33, 9)
    out, named = (call(GATHER, mesh, {"activation": activation}, arrays) for activation in (function, name))
    np.testing.assert_array_equal(out, named)
    np.testing.assert_allclose(
        out, function(call(GATHER, mesh, {}, arrays)), rtol=TOLERANCE["float32"], atol=TOLERANCE["float32"]
    )


@pytest.mark.parametrize("activation", ("silu", "gelu_tanh", "gelu_exact"))
@pytest.mark.parametrize("tiles", ("portable", "few"))
def test_extreme_values(activation: str, tiles: str) -> None:
    """Neither overflows where the function does not, nor hides a NaN."""
    lhs = np.array([[x] for x in (-3e38, -1e20, -100, -20, -1e-30, 0, 1e-30, 20, 1e20, 3e38, np.inf, np.nan)])
    arrays = {"lhs": lhs.astype(np.float32), "rhs": np.ones((1, 2), np.float32)}
    given = {"activation": activation}
    out = call(GATHER, mesh_of(2), given, arrays, implementation="simulate", config=GATHER.tiles[tiles])
    wanted = np.where(lhs < 0, 0, lhs).astype(np.float32)
    wanted[np.abs(lhs) == 1e-30] /= 2
    wanted[lhs == -1e-30] = -0.5e-30
    np.testing.assert_allclose(
        out, np.repeat(wanted, 2, axis=1), rtol=1e-6, atol=1e-7 if activation != "silu" else 5e-8
    )


@pytest.mark.covers(1)
@each_epilogue
@pytest.mark.parametrize("implementation", (None, "simulate"))
def test_gradients(mesh: Mesh, operation: Operation, given: dict[str, Any], implementation: str | None) -> None:
    arrays = operation.operands(4, 5, 33, 9)
    names = ("lhs", "rhs", *names_of(given))
    operands = [arrays[name] for name in names]

    def gradients(implementation: str | None) -> tuple[jax.Array, ...]:
        program = operation.on_mesh(mesh, names[2:], activation=given.get("activation"), implementation=implementation)
        return jax.jit(jax.grad(lambda *args: jnp.sin(program(*args)).sum(), tuple(range(len(names)))))(*operands)

    for name, mine, xlas in zip(names, gradients(implementation), gradients("xla"), strict=True):
        assert mine.dtype == arrays[name].dtype
        assert_close(mine, xlas, 1e-5)


def test_gradients_of_bf16(mesh: Mesh) -> None:
    """Of the same dtypes as operands, and near those of f32."""
    given = {"gate": True, "bias": True, "activation": "silu", "residual": True}
    arrays = GATHER.operands(4, 5, 33, 9, "bfloat16")
    names = ("lhs", "rhs", *names_of(given))

    def gradients(dtype: Any) -> tuple[jax.Array, ...]:
        program = GATHER.on_mesh(mesh, names[2:], activation="silu")
        loss = lambda *args: jnp.sin(program(*args).astype(jnp.float32)).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, tuple(range(len(names)))))(*(arrays[name].astype(dtype) for name in names))

    for mine, wanted in zip(gradients(jnp.bfloat16), gradients(np.float32), strict=True):
        assert mine.dtype == jnp.bfloat16
        mine = np.asarray(mine, np.float32)
        assert np.linalg.norm(mine - wanted) < 0.02 * np.linalg.norm(wanted)


def test_jvp_and_second_order(mesh: Mesh) -> None:
    given = {"gate": True, "activation": "silu"}
    arrays = GATHER.operands(4, 5, 33, 9)
    operands = [arrays[name] for name in ("lhs", "rhs", "gate")]

    def products(implementation: str | None) -> tuple:
        program = GATHER.on_mesh(mesh, ("gate",), activation=given["activation"], implementation=implementation)
        gradient = jax.grad(lambda *args: jnp.sin(program(*args)).sum(), (0, 1, 2))
        both = jax.jit(lambda *x: (jax.jvp(program, x, x), jax.jvp(gradient, x, x)))
        return both(*operands)

    for mine, xlas in zip(*map(jax.tree.leaves, (products(None), products("xla"))), strict=True):
        assert_close(mine, xlas, 1e-4)


@each_operation
def test_gradient_of_one_operand(mesh: Mesh, operation: Operation) -> None:
    arrays = operation.operands(4, 5, 33, 9)
    program = operation.on_mesh(mesh, ("bias",), activation="silu")
    xlas = operation.on_mesh(mesh, ("bias",), activation="silu", implementation="xla")
    operands = [arrays[name] for name in ("lhs", "rhs", "bias")]
    found, wanted = (jax.grad(lambda *args, f=f: f(*args).sum(), 2)(*operands) for f in (program, xlas))
    assert_close(found, wanted, 1e-5)


def mapped(operation: Operation, mesh: Mesh, given: dict[str, Any], over: dict[str, int], **keywords: Any) -> Callable:
    """The operation under `jax.vmap` over these dimensions of these operands; the result's new one is its first."""
    names = ("lhs", "rhs", *names_of(given))

    def local(lhs: jax.Array, rhs: jax.Array, *others: jax.Array) -> jax.Array:
        own = dict(zip(names[2:], others), activation=given.get("activation"))
        return operation.function(lhs, rhs, "tp", precision="highest", **own, **keywords)

    def spec(name: str) -> P:
        axes = list(operation.specs[name])
        if name in over:
            axes += [None] * (over[name] - len(axes))
            axes.insert(over[name], None)
        return P(*axes)

    return one_program(
        jax.vmap(local, in_axes=tuple(over.get(name) for name in names)),
        mesh=mesh,
        in_specs=tuple(map(spec, names)),
        out_specs=P(None, *operation.specs["out"]),
    )


@each_fullest
@pytest.mark.parametrize("over", ({"lhs": 0}, {"lhs": 2, "residual": 1}), ids=str)
@pytest.mark.parametrize("implementation", (None, "simulate"))
def test_vmap(
    mesh: Mesh, operation: Operation, given: dict[str, Any], over: dict[str, int], implementation: str | None
) -> None:
    arrays = operation.operands(4, 5, 33, 9)
    examples = [{name: (1 + i) * x if name in over else x for name, x in arrays.items()} for i in range(3)]
    stacked = {name: np.stack([each[name] for each in examples], dim) for name, dim in over.items()}
    operands = [stacked.get(name, arrays[name]) for name in ("lhs", "rhs", *names_of(given))]
    out = jax.jit(mapped(operation, mesh, given, over, implementation=implementation))(*operands)
    for found, example in zip(out, examples, strict=True):
        assert_close(found, expected(given, example), 1e-5)
    kernels = lower_for_cuda(mapped(operation, mesh, given, over, implementation="fused"), *operands)
    assert kernels.count("stablehlo.custom_call @triton_kernel_call") == 1


@each_fullest
@pytest.mark.parametrize("over", ({"lhs": 0, "rhs": 0}, {"bias": 0}, {"residual": 0}), ids=str)
def test_what_vmap_leaves_to_xla(
    mesh: Mesh, operation: Operation, given: dict[str, Any], over: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    arrays = operation.operands(4, 5, 33, 9)
    operands = [
        np.stack([arrays[name], 2 * arrays[name]], over[name]) if name in over else arrays[name]
        for name in ("lhs", "rhs", *names_of(given))
    ]
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        out = mapped(operation, mesh, given, over)(*operands)
    why = f"jax.vmap maps over {', '.join(over)}, and the kernel takes lhs, with or without a residual"
    (record,) = caplog.records
    assert record.getMessage().split(" uses XLA: ")[1].startswith(why)
    for factor, found in zip((1, 2), out, strict=True):
        example = {name: factor * x if name in over else x for name, x in arrays.items()}
        assert_close(found, expected(given, example), 1e-5)
    with fails(NotImplementedError, operation.function.__name__, why):
        mapped(operation, mesh, given, over, implementation="fused")(*operands)


@each_operation
@pytest.mark.parametrize(
    ("keywords", "parts"),
    (
        ({"activation": "gelu"}, ("no activation 'gelu'", "'gelu_tanh', 'gelu_exact'", "jax.nn.gelu")),
        ({"activation": jnp.tanh}, ("no activation", "'silu'")),
        ({"bias": np.ones(3, np.float32)}, ("takes a bias of shape", "not [3]")),
        ({"residual": np.ones((3, 9), np.float32)}, ("takes a residual of shape", "not [3, 9]")),
        ({"bias": np.ones(9, np.int32)}, ("floating-point", "bias is int32")),
    ),
)
def test_errors(mesh: Mesh, operation: Operation, keywords: dict[str, Any], parts: tuple[str, ...]) -> None:
    arrays = operation.operands(4, 5, 33, 9)
    with fails(ValueError, operation.function.__name__, *parts):
        operation.on_mesh(mesh, (), **keywords)(arrays["lhs"], arrays["rhs"])


@pytest.mark.parametrize(
    ("gate", "parts"),
    (
        (np.ones((33, 8), np.float32), ("takes a gate of shape [33, 9]", "not [33, 8]")),
        (np.ones((33, 9), jnp.bfloat16), ("a gate of the dtype of rhs, float32, not bfloat16",)),
    ),
)
def test_a_gate_that_does_not_fit(mesh: Mesh, gate: np.ndarray, parts: tuple[str, ...]) -> None:
    arrays = GATHER.operands(4, 5, 33, 9)
    with fails(ValueError, *parts):
        GATHER.on_mesh(mesh, (), gate=gate)(arrays["lhs"], arrays["rhs"])


@pytest.mark.parametrize("operation", (GATHER, SCATTER), ids=name_of)
def test_operands_without_rows_or_columns_have_no_epilogue(mesh: Mesh, operation: Operation) -> None:
    def local(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return operation.function(lhs[0], rhs, "tp", activation="silu")

    specs = (P("tp"), P()) if operation is GATHER else (P(), P())
    program = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("tp"), check_vma=False)
    shape = (4, 4) if operation is GATHER else (4, 8)
    with fails(ValueError, "lhs of two or more dimensions and rhs of two, not 1 and 2"):
        program(np.ones(shape, np.float32), np.ones((16 if operation is GATHER else 8, 4), np.float32))


def test_what_the_kernels_cannot_do(mesh: Mesh) -> None:
    arrays = GATHER.operands(4, 5, 33, 9)
    with jax.enable_x64(True), fails(NotImplementedError, "a residual of float32, bfloat16, float16, not float64"):
        GATHER.on_mesh(mesh, (), residual=np.ones((20, 9)), implementation="fused")(arrays["lhs"], arrays["rhs"])


def test_a_residual_that_differs_between_ranks(mesh: Mesh) -> None:
    """Each rank's own belongs to its result, and no rank has those of the others."""
    arrays = REDUCE.operands(4, 5, 33, 9)

    def local(implementation: str | None) -> Callable:
        def call(lhs: jax.Array, rhs: jax.Array, residual: jax.Array) -> jax.Array:
            keywords = {"precision": "highest", "implementation": implementation}
            return matmul_all_reduce(lhs, rhs, "tp", residual=residual[0], **keywords)[None]

        specs = (REDUCE.specs["lhs"], REDUCE.specs["rhs"], P("tp"))
        return one_program(call, mesh=mesh, in_specs=specs, out_specs=P("tp"))

    residuals = np.stack([rank * arrays["residual"] for rank in range(4)])
    out = local(None)(arrays["lhs"], arrays["rhs"], residuals)
    assert_close(out, expected({}, arrays) + residuals, TOLERANCE["float32"])
    with fails(NotImplementedError, "takes a residual that is the same on all ranks along ('tp',)"):
        local("simulate")(arrays["lhs"], arrays["rhs"], residuals)


def shapes(
    operation: Operation, mesh: Mesh, names: tuple[str, ...], m: int = 2048, n: int = 128
) -> list[jax.ShapeDtypeStruct]:
    """Operands for lowering: m rows in all, and n columns of a rank's."""
    arrays = operation.operands(4, m // 4, 64, n)
    return [sharded(mesh, operation.specs[name], arrays[name].shape, "bfloat16") for name in ("lhs", "rhs", *names)]


@pytest.mark.covers(1)
@compiling.each_depth
@each_epilogue
@pytest.mark.parametrize("m", (64, 2048))
def test_lowers_to_one_kernel(mesh: Mesh, operation: Operation, given: dict[str, Any], m: int, memory: bool) -> None:
    names = names_of(given)
    program = operation.on_mesh(mesh, names, activation=given.get("activation"), implementation="fused")
    with compiling.no_code(memory=memory):
        assert_fused(lower_for_cuda(program, *shapes(operation, mesh, names, m)))


@pytest.mark.usefixtures("no_code")
@each_epilogue
def test_forward_and_backward_are_fused(mesh: Mesh, operation: Operation, given: dict[str, Any]) -> None:
    """The product, and the gradient of lhs; with a gate not one kernel more.

    What an all-reduce gives is there on all ranks, and so are its gradients.
    """
    names = names_of(given)
    program = operation.on_mesh(mesh, names, activation=given.get("activation"), implementation="fused")
    gradient = jax.grad(lambda *args: jnp.sin(program(*args)).sum(), (0, 1))
    text = lower_for_cuda(gradient, *shapes(operation, mesh, names))
    assert_fused(text, calls=1 if operation is REDUCE else 2)


def test_gradients_leave_the_configuration_of_two_products_alone(mesh: Mesh) -> None:
    """It is of the kernel that multiplies by both, and differentiated they are one product."""

    def text(config: Any) -> str:
        program = GATHER.on_mesh(mesh, ("gate",), implementation="fused", config=config)
        return lower_for_cuda(jax.grad(lambda *args: program(*args).sum()), *shapes(GATHER, mesh, ("gate",)))

    assert text({"kernel": "portable", "block_m": 64, "block_n": 64, "num_warps": 8}) == text(None)


def test_what_none_takes(mesh: Mesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    program = GATHER.on_mesh(mesh, ("bias",), activation="silu")
    assert_fused(lower_for_cuda(program, *shapes(GATHER, mesh, ("bias",))))
    gated = GATHER.on_mesh(mesh, ("gate",))
    assert_fused(lower_for_cuda(gated, *shapes(GATHER, mesh, ("gate",), 128)))
    assert_fused(lower_for_cuda(gated, *shapes(GATHER, mesh, ("gate",), 8192)))
    wide = shapes(GATHER, mesh, ("gate",), 2048, 2048)
    assert_fused(lower_for_cuda(gated, *wide))
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "80")
    monkeypatch.setenv("JAXTAXFREE_UNMEASURED", "fused")
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        assert_not_fused(lower_for_cuda(GATHER.on_mesh(mesh, ("gate",)), *wide))
    assert "with a gate XLA was faster" in caplog.text
