"""Products of global arrays, outside of `jax.shard_map`, beside JAX's own."""

import collections
import dataclasses
import functools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.primitive import Unsupported
from jaxtaxfree.sharded import call as calls
from jaxtaxfree.sharded.plan import Plan, Sharded, plan
from tests.conftest import MeshFactory
from tests.helpers.support import COLLECTIVES, TRITON_CALL, fails, lower_for_cuda

LENGTHS = {"b": 8, "m": 16, "t": 8, "d": 16, "k": 16, "f": 32, "n": 4, "h": 8, "c": 2}


@dataclasses.dataclass(frozen=True)
class Case:
    """A product, and how its arrays lie on a mesh of "data" and "tp".

    Attributes:
      subscripts: of the einsum.
      specs: of the operands.
      out: of the result.
      weights: gathered by the program first, along the axis of data.
    """

    subscripts: str
    specs: tuple[P, P]
    out: P
    weights: bool = False

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(LENGTHS[x] for x in labels) for labels in self.subscripts.partition("->")[0].split(",")]


CASES = {
    "gather": Case("mk,kf->mf", (P(("data", "tp")), P(None, "tp")), P("data", "tp")),
    "gather-batch": Case("btd,df->btf", (P("data", "tp"), P(None, "tp")), P("data", None, "tp")),
    "gather-first": Case("btd,df->btf", (P(("data", "tp")), P(None, "tp")), P("data", None, "tp")),
    "gather-heads": Case("btd,dnh->btnh", (P("data", "tp"), P(None, "tp")), P("data", None, "tp")),
    "gather-heads-fsdp": Case("btd,dnh->btnh", (P("data", "tp"), P("data", "tp")), P("data", None, "tp"), weights=True),
    "gather-transposed": Case("btd,fd->btf", (P("data", "tp"), P("tp")), P("data", None, "tp")),
    "gather-transposed-fsdp": Case(
        "btd,nhd->btnh", (P("data", "tp"), P("tp", "data")), P("data", None, "tp"), weights=True
    ),
    "gather-copied": Case("btd,ndh->btnh", (P("data", "tp"), P("tp")), P("data", None, "tp")),
    "gather-permuted": Case("btd,cdnh->cbtnh", (P("data", "tp"), P(None, None, "tp")), P(None, "data", None, "tp")),
    "gather-weights-first": Case("dnh,btd->btnh", (P("data", "tp"), P("data", "tp")), P("data", None, "tp"), True),
    "gather-columns": Case("btd,df->btf", (P("data", None, "tp"), P(None, "tp")), P("data", None, "tp")),
    "sum": Case("mk,kf->mf", (P("data", "tp"), P("tp")), P("data")),
    "sum-row": Case("k,kf->f", (P("tp"), P("tp")), P()),
    "sum-idle": Case("mk,kf->mf", (P(None, "tp"), P("tp", "data")), P()),
    "sum-transposed": Case("btf,df->btd", (P("data", None, "tp"), P(None, "tp")), P("data")),
    "sum-whole": Case("mk,kf->mf", (P("data", "tp"), P()), P("data")),
    "sum-both": Case("mk,kf->mf", (P(None, ("data", "tp")), P(("data", "tp"))), P()),
    "sum-heads": Case("btnh,nhd->btd", (P("data", None, "tp"), P("tp")), P("data")),
    "sum-heads-fsdp": Case("btnh,nhd->btd", (P("data", None, "tp"), P("tp", None, "data")), P("data"), weights=True),
    "sum-heads-before": Case("bnth,nhd->btd", (P("data", "tp"), P("tp")), P("data")),
    "sum-fsdp-major": Case("btf,fd->btd", (P("data", None, "tp"), P(("data", "tp"))), P("data")),
    "sum-columns": Case("mk,kf->mf", (P(None, "tp"), P("tp", "data")), P(None, "data")),
    "scatter": Case("mk,kf->mf", (P("data", "tp"), P("tp")), P(("data", "tp"))),
    "scatter-batch": Case("btf,fd->btd", (P("data", None, "tp"), P("tp")), P("data", "tp")),
    "scatter-heads-fsdp": Case(
        "btnh,nhd->btd", (P("data", None, "tp"), P("tp", "data")), P("data", "tp"), weights=True
    ),
    "scatter-fsdp-same": Case("btf,fd->btd", (P("data", None, "tp"), P(("tp", "data"))), P("data", "tp"), weights=True),
    "scatter-transposed": Case("btf,df->btd", (P("data", None, "tp"), P(None, "tp")), P("data", "tp")),
    "scatter-columns": Case("btf,fd->btd", (P("data", None, "tp"), P("tp")), P("data", None, "tp")),
    "scatter-last": Case("btnh,nhd->dbt", (P(None, None, "tp"), P("tp", None, "data")), P("data", None, "tp")),
}
KINDS = ("Explicit", "Auto")
ON_AUTO = [*(x for x in CASES if "fsdp" in x), "gather-permuted", "sum-idle"]
EACH = [*(("Explicit", name) for name in CASES), *(("Auto", name) for name in ON_AUTO)]


@pytest.fixture(autouse=True)
def say_again() -> None:
    calls.forget()


def mesh_of(kind: str, *more: str) -> Mesh:
    types = tuple(getattr(AxisType, each) for each in (kind, *(more or (kind,))))
    return Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "tp"), axis_types=types)


def operands(*shapes: Sequence[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def on(mesh: Mesh, arrays: Sequence[np.ndarray], specs: Sequence[P]) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


def program(kind: str, case: Case, **keywords: Any) -> Callable[..., jax.Array]:
    told: dict[str, Any] = {"in_shardings": case.specs} if kind == "Auto" else {}
    return functools.partial(
        jtf.einsum, case.subscripts, out_sharding=case.out, precision="highest", **told, **keywords
    )


def plain(subscripts: str) -> Callable[..., jax.Array]:
    return functools.partial(jnp.einsum, subscripts, precision="highest")


def with_gradients(f: Callable) -> Callable:
    """The result and the gradients of all arguments."""

    def value(*given: Any) -> Any:
        y = f(*given)
        return jnp.sum(jnp.sin(y)), y

    def call(*given: Any) -> Any:
        (_, y), found = jax.value_and_grad(value, tuple(range(len(given))), has_aux=True)(*given)
        return y, *found

    return jax.jit(call)


def assert_alike(found: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def assert_lies(x: jax.Array, mesh: Mesh, spec: P) -> None:
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), x.sharding


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_values_and_gradients(kind: str, name: str) -> None:
    case, mesh = CASES[name], mesh_of(kind)
    arrays = operands(*case.shapes)
    with jax.set_mesh(mesh):
        found = with_gradients(program(kind, case))(*on(mesh, arrays, case.specs))
    for x, wanted, spec in zip(found, with_gradients(plain(case.subscripts))(*arrays), (case.out, *case.specs)):
        assert_alike(x, wanted)
        assert_lies(x, mesh, spec)


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("Explicit", name) for name in CASES),
        *(("Auto", name) for name in ("gather-heads-fsdp", "sum-idle", "scatter-heads-fsdp")),
    ],
)
def test_one_kernel(kind: str, name: str) -> None:
    """And no collective of XLA's but the gather of the weights."""
    case, mesh = CASES[name], mesh_of(kind)
    with jax.set_mesh(mesh):
        text = lower_for_cuda(
            program(kind, case, implementation="fused"), *on(mesh, operands(*case.shapes), case.specs)
        )
    assert text.count(TRITON_CALL) == 1
    left = {x: text.count(f"stablehlo.{x}") for x in COLLECTIVES if f"stablehlo.{x}" in text}
    assert left == ({"all_gather": 1} if case.weights else {})


@pytest.mark.parametrize(
    "name", ("gather-heads-fsdp", "gather-transposed", "sum-heads", "sum-transposed", "scatter-heads-fsdp")
)
def test_simulated_kernels(name: str) -> None:
    case, mesh = CASES[name], mesh_of("Explicit")
    arrays = operands(*case.shapes)
    with jax.set_mesh(mesh):
        call = program("Explicit", case, implementation="simulate")
        found = with_gradients(call)(*on(mesh, arrays, case.specs))
    for x, wanted in zip(found, with_gradients(plain(case.subscripts))(*arrays)):
        assert_alike(x, wanted)


def random_product(rng: np.random.Generator) -> tuple[str, tuple[P, P], P]:
    """Rows, contracted dimensions and columns, one or two of each in any order, sharded along up to three axes."""
    rows, contracted, columns = (x[: rng.integers(1, 3)] for x in ("ab", "kl", "mn"))
    arrays = [list(rng.permutation(list(x))) for x in (rows + contracted, contracted + columns, rows + columns)]
    specs = [[[] for _ in x] for x in arrays]
    for axis in rng.permutation(["x", "y", "z"]):
        for labels, spec in zip(arrays, specs):
            if rng.random() < 0.75:
                entry = spec[rng.integers(len(labels))]
                entry.insert(rng.integers(len(entry) + 1), str(axis))
    lhs, rhs, out = (P(*(tuple(entry) or None for entry in spec)) for spec in specs)
    return f"{''.join(arrays[0])},{''.join(arrays[1])}->{''.join(arrays[2])}", (lhs, rhs), out


def operation_of(subscripts: str, specs: Sequence[P], out: P) -> str | None:
    ins, _, result = subscripts.partition("->")
    arrays = [
        Sharded(tuple(labels), tuple((entry,) if isinstance(entry, str) else entry or () for entry in spec))
        for labels, spec in zip((*ins.split(","), result), (*specs, out))
    ]
    found = plan(*arrays, dict.fromkeys("abklmn", 8), {"x": 2, "y": 2, "z": 2})
    return found.operation if isinstance(found, Plan) else None


@pytest.mark.soak
def test_random_products() -> None:
    """Of those that are an operation's, whatever else may shard them."""
    types = (AxisType.Auto, AxisType.Explicit)
    devices, rng = np.array(jax.devices("cpu")[:8]).reshape(2, 2, 2), np.random.default_rng(0)
    found = collections.Counter()
    while found.total() < 100:
        subscripts, specs, out = random_product(rng)
        if (operation := operation_of(subscripts, specs, out)) is None:
            continue
        mesh = Mesh(devices, ("x", "y", "z"), axis_types=(types[found.total() % 2],) * 3)
        found[operation] += 1
        arrays = operands(*([8] * len(x) for x in subscripts.partition("->")[0].split(",")))
        with jax.set_mesh(mesh):
            call = functools.partial(jtf.einsum, subscripts, in_shardings=specs, out_sharding=out, precision="highest")
            y, *gradients = with_gradients(call)(*on(mesh, arrays, specs))
        wanted, *of_plain = with_gradients(plain(subscripts))(*arrays)
        assert_alike(y, wanted)
        assert_lies(y, mesh, out)
        for x, expected, spec in zip(gradients, of_plain, specs):
            assert_alike(x, expected, 1e-3)
            assert_lies(x, mesh, spec)
    assert len(found) == 3 and min(found.values()) > 5, found


@dataclasses.dataclass(frozen=True)
class WithEpilogue:
    """A product with an epilogue of these operands.

    Attributes:
      bias: its spec, as of the columns.
      kernel: whether there is an operation for it.
    """

    case: Case
    operands: tuple[str, ...]
    bias: P
    kernel: bool = True


EPILOGUES = {
    "gather": WithEpilogue(CASES["gather-heads-fsdp"], ("gate", "bias", "residual"), P("tp")),
    "sum": WithEpilogue(CASES["sum-heads"], ("bias", "residual"), P()),
    "scatter": WithEpilogue(CASES["scatter-heads-fsdp"], ("bias", "residual"), P()),
    "permuted": WithEpilogue(CASES["gather-permuted"], ("gate", "bias", "residual"), P(None, "tp"), kernel=False),
    "gated sum": WithEpilogue(CASES["sum"], ("gate", "bias", "residual"), P(), kernel=False),
    "local": WithEpilogue(
        Case("btd,dnh->ntbh", (P("data"), P(None, "tp")), P("tp", None, "data")),
        ("gate", "bias", "residual"),
        P("tp"),
        kernel=False,
    ),
}


@pytest.mark.parametrize(
    ("kind", "name"), [*(("Explicit", name) for name in EPILOGUES), ("Auto", "gather"), ("Auto", "local")]
)
def test_epilogues(kind: str, name: str) -> None:
    """The same of operations and of JAX's own product."""
    each, mesh = EPILOGUES[name], mesh_of(kind)
    ins, _, out = each.case.subscripts.partition("->")
    lhs, rhs = ins.split(",")
    columns = [x for x in rhs if x not in lhs]
    shapes = {"gate": each.case.shapes[1], "bias": [LENGTHS[x] for x in columns], "residual": [LENGTHS[x] for x in out]}
    specs = {"gate": each.case.specs[1], "bias": each.bias, "residual": each.case.out}
    arrays = operands(*each.case.shapes, *(shapes[x] for x in each.operands))

    def call(lhs: Any, rhs: Any, *others: Any, **keywords: Any) -> jax.Array:
        keywords |= dict(zip(each.operands, others, strict=True))
        return program(kind, each.case, activation="silu", **keywords)(lhs, rhs)

    def wanted(lhs: Any, rhs: Any, *others: Any) -> jax.Array:
        multiply, given = plain(each.case.subscripts), dict(zip(each.operands, others, strict=True))
        bias = jnp.einsum(f"{''.join(columns)}->{''.join(x for x in out if x in columns)}", given["bias"])
        y = multiply(lhs, rhs) + jnp.expand_dims(bias, [i for i, x in enumerate(out) if x not in columns])
        return (jax.nn.silu(multiply(lhs, given["gate"])) * y if "gate" in given else jax.nn.silu(y)) + given[
            "residual"
        ]

    given = on(mesh, arrays, (*each.case.specs, *(specs[x] for x in each.operands)))
    with jax.set_mesh(mesh):
        found = with_gradients(call)(*given)
        if each.kernel:
            assert lower_for_cuda(functools.partial(call, implementation="fused"), *given).count(TRITON_CALL) == 1
    for x, like, expected in zip(found, (None, *given), with_gradients(wanted)(*arrays)):
        assert_alike(x, expected, 1e-3)
        assert_lies(x, mesh, each.case.out if like is None else like.sharding.spec)


def layers(kind: str, product: str, **keywords: Any) -> Callable[..., jax.Array]:
    """Of an MLP, its weights sharded along both axes, scanned and rematerialised."""
    x, h = P("data", "tp"), P("data", None, "tp")

    def told(*specs: P) -> dict[str, Any]:
        return {"in_shardings": specs} if kind == "Auto" else {}

    def layer(y: jax.Array, weights: Any) -> Any:
        up, down = weights
        if product == "einsum":
            z = jtf.einsum(
                "btd,df->btf", y, up, out_sharding=h, activation="silu", **told(x, P("data", "tp")), **keywords
            )
            z = jtf.einsum("btf,fd->btd", z, down, out_sharding=x, residual=y, **told(h, P("tp", "data")), **keywords)
        elif product == "matmul":
            z = jax.nn.silu(jtf.matmul(y, up, out_sharding=h, **told(x, P("data", "tp")), **keywords))
            z = y + jtf.matmul(z, down, out_sharding=x, **told(h, P("tp", "data")), **keywords)
        else:
            last = (((2,), (0,)), ((), ()))
            z = jtf.dot_general(y, up, last, out_sharding=h, **told(x, P("data", "tp")), **keywords)
            z = y + jtf.dot_general(jax.nn.silu(z), down, last, out_sharding=x, **told(h, P("tp", "data")), **keywords)
        return z, None

    return lambda y, up, down: jax.lax.scan(jax.checkpoint(layer), y, (up, down))[0]


def plain_layers(y: Any, up: Any, down: Any) -> Any:
    for i in range(len(up)):
        y = y + jax.nn.silu(y @ up[i]) @ down[i]
    return y


@pytest.mark.parametrize(
    ("kind", "product"),
    (("Auto", "einsum"), ("Auto", "matmul"), ("Explicit", "dot_general")),
)
def test_layers(kind: str, product: str) -> None:
    mesh, specs = mesh_of(kind), (P("data", "tp"), P(None, "data", "tp"), P(None, "tp", "data"))
    arrays = [x / 4 for x in operands((4, 8, 16), (2, 16, 32), (2, 32, 16))]
    given = on(mesh, arrays, specs)
    with jax.set_mesh(mesh):
        found = with_gradients(layers(kind, product, precision="highest"))(*given)
        fused = layers(kind, product, implementation="fused")
        assert lower_for_cuda(fused, *given).count(TRITON_CALL) == 2
        backward = jax.grad(lambda *given: jnp.sum(fused(*given)), (0, 1, 2))
        assert lower_for_cuda(backward, *given).count(TRITON_CALL) == 5  # two forward, repeated, and two of their own
    for x, spec, wanted in zip(found, (specs[0], *specs), with_gradients(plain_layers)(*arrays)):
        assert_alike(x, wanted)
        assert_lies(x, mesh, spec)


@pytest.mark.parametrize("kind", ("Auto",))
def test_vmap(kind: str) -> None:
    """Over lhs it stays one kernel, along whose rows the examples lie."""
    case, mesh = CASES["sum-heads"], mesh_of(kind)
    x, w = operands((3, *case.shapes[0]), case.shapes[1])
    with jax.set_mesh(mesh):
        given = on(mesh, (x, w), (P(None, *case.specs[0]), case.specs[1]))
        call = jax.vmap(program(kind, case, implementation="simulate"), in_axes=(0, None))
        found = jax.jit(call)(*given)
        fused = jax.vmap(program(kind, case, implementation="fused"), in_axes=(0, None))
        assert lower_for_cuda(fused, *given).count(TRITON_CALL) == 1
    assert_alike(found, jnp.einsum("xbtnh,nhd->xbtd", x, w))


def test_vmap_over_examples_that_are_sharded() -> None:
    case, mesh = Case("tnh,nhd->td", (P(None, "tp"), P("tp")), P()), mesh_of("Explicit")
    x, w = operands((4, *case.shapes[0]), case.shapes[1])
    with jax.set_mesh(mesh):
        given = on(mesh, (x, w), (P("data", None, "tp"), P("tp")))
        found = jax.jit(jax.vmap(program("Explicit", case), in_axes=(0, None)))(*given)
    assert_alike(found, jnp.einsum("xtnh,nhd->xtd", x, w))
    assert_lies(found, mesh, P("data"))


def test_without_jit() -> None:
    case = CASES["sum-heads"]
    arrays = operands(*case.shapes)
    for kind in KINDS:
        mesh = mesh_of(kind)
        with jax.set_mesh(mesh):
            found = program(kind, case)(*on(mesh, arrays, case.specs))
            assert_lies(found, mesh, case.out)
            assert_alike(found, plain(case.subscripts)(*arrays))


def test_shardings_with_their_mesh() -> None:
    """No mesh is set, and all of the shardings say which one."""
    case, mesh = CASES["scatter-heads-fsdp"], mesh_of("Auto")
    arrays = operands(*case.shapes)
    ins = tuple(NamedSharding(mesh, spec) for spec in case.specs)
    given = on(mesh, arrays, case.specs)

    def call(*given: jax.Array, **keywords: Any) -> jax.Array:
        out = NamedSharding(mesh, case.out)
        return jtf.einsum(case.subscripts, *given, in_shardings=ins, out_sharding=out, precision="highest", **keywords)

    assert_alike(jax.jit(call)(*given), plain(case.subscripts)(*arrays))
    assert lower_for_cuda(functools.partial(call, implementation="fused"), *given).count(TRITON_CALL) == 1
    other = Mesh(mesh.devices.T, mesh.axis_names)
    with fails(ValueError, "shardings of one mesh"):
        jtf.einsum(case.subscripts, *given, in_shardings=ins, out_sharding=NamedSharding(other, case.out))


def test_a_mesh_of_both_kinds_of_axes() -> None:
    case, mesh = CASES["gather-heads-fsdp"], mesh_of("Explicit", "Auto")
    arrays = operands(*case.shapes)
    given = on(mesh, arrays, case.specs)
    with jax.set_mesh(mesh):
        found = with_gradients(program("Auto", case))(*given)
        assert lower_for_cuda(program("Auto", case, implementation="fused"), *given).count(TRITON_CALL) == 1
    for x, wanted in zip(found, with_gradients(plain(case.subscripts))(*arrays)):
        assert_alike(x, wanted)


def test_operands_that_lie_otherwise_are_resharded() -> None:
    case = CASES["scatter-batch"]
    arrays = operands(*case.shapes)
    for kind in KINDS:
        mesh = mesh_of(kind)
        with jax.set_mesh(mesh):
            found = jax.jit(program("Auto", case))(*on(mesh, arrays, (P(), P("data"))))
        assert_alike(found, plain(case.subscripts)(*arrays))
        assert_lies(found, mesh, case.out)


def test_two_dtypes_become_one() -> None:
    """As in `jnp.einsum`."""
    case, mesh = CASES["sum"], mesh_of("Explicit")
    x, w = operands(*case.shapes)
    with jax.set_mesh(mesh):
        given = on(mesh, (jnp.asarray(x, jnp.bfloat16), w), case.specs)
        call = program("Explicit", case, implementation="fused")
        assert jax.eval_shape(program("Explicit", case), *given).dtype == jnp.float32
        assert lower_for_cuda(call, *given).count(TRITON_CALL) == 1


# What is JAX's own product, with a part of the reason: subscripts, specs, and of the result.
OWN = {
    "batch": ("bmk,bkf->bmf", (P(None, None, "tp"), P(None, "tp")), P(), "batch of products"),
    "rows": ("mk,kf->mf", (P("tp"), P()), P(), "'tp' along 'm' of lhs alone"),
    "local": ("mk,kf->mf", (P("data"), P(None, "tp")), P("data", "tp"), "it needs no communication"),
    "fsdp": ("mk,kf->mf", (P("data"), P("data")), P("data"), "no communication once the weights are gathered"),
    "vector": ("mk,k->m", (P(None, "tp"), P("tp")), P(), "vector"),
}


@pytest.mark.parametrize(("kind", "name"), [*(("Explicit", name) for name in OWN), ("Auto", "rows"), ("Auto", "fsdp")])
def test_all_else_is_the_product_of_jax(kind: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    subscripts, specs, out, reason = OWN[name]
    case, mesh = Case(subscripts, specs, out), mesh_of(kind)
    arrays = operands(*case.shapes)
    given = on(mesh, arrays, specs)
    caplog.set_level(logging.DEBUG, "jaxtaxfree")
    with jax.set_mesh(mesh):
        call = program(kind, case)
        found = with_gradients(call)(*given)
        for x, wanted in zip(found, with_gradients(plain(subscripts))(*arrays)):
            assert_alike(x, wanted)
        assert TRITON_CALL not in lower_for_cuda(call, *given)
        with fails(Unsupported, "einsum", reason):
            program(kind, case, implementation="fused")(*given)
        said = [record for record in caplog.records if reason in record.message]
        assert {record.levelno for record in said[:1]} == {logging.INFO}
        assert {record.levelno for record in said[1:]} == {logging.DEBUG}
        caplog.clear()
        program(kind, case, implementation="xla")(*given)
        assert not caplog.records
    assert_lies(found[0], mesh, out)


def test_the_product_of_jax_where_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    x, w = operands((8, 16), (16, 4))
    caplog.set_level(logging.INFO, "jaxtaxfree")
    assert_alike(jtf.einsum("mk,kn->mn", x, w), x @ w)
    assert_alike(jtf.matmul(x, w), x @ w)
    assert_alike(jtf.matmul(np.stack([x] * 3), np.stack([w] * 3)), np.stack([x @ w] * 3))
    assert_alike(jtf.matmul(x[0], w[:, 0]), x[0] @ w[:, 0])
    assert_alike(jtf.einsum(x, [0, 1], w, [1, 2]), x @ w)
    assert_alike(jtf.einsum("mk->km", x), x.T)
    assert_alike(jtf.einsum("mk,kn,nl->ml", x, w, w.T), x @ w @ w.T)
    assert_alike(jtf.einsum("mk,kn->mn", x[:1], w, bias=w[0], activation="silu"), jax.nn.silu(x[:1] @ w + w[0]))
    mesh = mesh_of("Auto")
    with jax.set_mesh(mesh):
        jtf.einsum("mk,kn->mn", x, w, out_sharding=P())
        jtf.einsum("mk,kn->mn", x, w)
    messages = " ".join(record.message for record in caplog.records)
    for reason in ("there is no mesh", "3 operands", "along the Auto axes ['data', 'tp']", "no out_sharding"):
        assert reason in messages


def test_ellipses_and_lists() -> None:
    mesh = mesh_of("Explicit")
    x, w = operands((4, 8, 16), (16, 12))
    specs = (P("data", None, "tp"), P("tp"))
    how: dict[str, Any] = {"out_sharding": P("data"), "implementation": "fused"}
    for call in (
        lambda x, w: jtf.einsum("...d,df->...f", x, w, **how),
        lambda x, w: jtf.einsum("...d,df", x, w, **how),
        lambda x, w: jtf.einsum(x, [0, 1, 2], w, [2, 3], [0, 1, 3], **how),
        lambda x, w: jtf.matmul(x, w, **how),
    ):
        with jax.set_mesh(mesh):
            assert lower_for_cuda(call, *on(mesh, (x, w), specs)).count(TRITON_CALL) == 1


def test_inside_of_shard_map() -> None:
    """Arrays are local there."""
    mesh = mesh_of("Auto")
    x, w = operands((8, 16), (16, 4))
    specs = (P("data", "tp"), P("tp"))

    def call(x: jax.Array, w: jax.Array, **keywords: Any) -> jax.Array:
        return jax.lax.psum(jtf.einsum("mk,kn->mn", x, w, **keywords), "tp")  # by "fused" a kernel of its own

    def mapped(**keywords: Any) -> Callable:
        return jax.jit(
            jax.shard_map(functools.partial(call, **keywords), mesh=mesh, in_specs=specs, out_specs=P("data"))
        )

    assert_alike(mapped()(x, w), x @ w)
    assert (
        mapped(implementation="fused").trace(x, w).lower(lowering_platforms=("cuda",)).as_text().count(TRITON_CALL) == 1
    )
    with fails(ValueError, "has made 'data' manual", "P('data',)"):
        mapped(out_sharding=P("data"))(x, w)


@pytest.mark.parametrize(
    ("keywords", "parts"),
    (
        ({"implementation": "nccl"}, ("There is no implementation 'nccl'",)),
        ({"activation": "relu"}, ("einsum has no activation 'relu'",)),
        ({"bias": np.ones(3, np.float32)}, ("bias of shape [4]", "not [3]")),
        ({"gate": np.ones((4, 16), np.float32)}, ("gate of shape [16, 4]", "not [4, 16]")),
        ({"residual": np.ones((8, 16), np.float32)}, ("residual of shape [8, 4]", "not [8, 16]")),
        ({"out_sharding": P("pp")}, ("axes of the mesh ('data', 'tp')", "'pp'")),
        ({"out_sharding": P(None, None, "tp")}, ("up to 2 dimensions", "P(None, None, 'tp')")),
        ({"in_shardings": (P(),)}, ("in_shardings of 2 operands",)),
        ({"config": {"kernel": "nothing"}}, ("nothing",)),
    ),
)
def test_errors(keywords: dict[str, Any], parts: tuple[str, ...]) -> None:
    x, w = operands((8, 16), (16, 4))
    given = {"in_shardings": (P(None, "tp"), P("tp")), "out_sharding": P(), **keywords}
    with jax.set_mesh(mesh_of("Auto")), fails(ValueError, *parts):
        jtf.einsum("mk,kn->mn", x, w, **given)


# Of several weights: subscripts, specs of the two operands, the lengths of "n" in each weight, and the operations.
SEVERAL = {
    "heads": ("btd,dnh->btnh", (P("data", "tp"), P(None, "tp")), (4, 2, 2), 1),
    "fsdp": ("btd,dnh->btnh", (P("data", "tp"), P("data", "tp")), (4, 2, 2), 1),
    "fsdp-major": ("btd,dn->btn", (P("data", "tp"), P(None, ("data", "tp"))), (8, 4), 1),
    "transposed": ("btd,nd->btn", (P("data", "tp"), P("tp")), (8, 4), 1),
    "columns": ("btd,dn->btn", (P("data", None, "tp"), P(None, "tp")), (8, 4), 1),
    "permuted": ("btd,cdnh->cbtnh", (P("data", "tp"), P(None, None, "tp")), (4, 2), 1),
    "sum": ("btd,dn->btn", (P("data", None, "tp"), P("tp")), (8, 4), 2),
}


@pytest.mark.parametrize(("kind", "name"), [*(("Explicit", name) for name in SEVERAL), ("Auto", "fsdp")])
def test_several_weights(kind: str, name: str) -> None:
    """One gather and one kernel; of sums a kernel for each. Values, gradients, and an epilogue of each."""
    subscripts, specs, widths, count = SEVERAL[name]
    (lhs, rhs), out, mesh = subscripts.partition("->")[0].split(","), subscripts.partition("->")[2], mesh_of(kind)
    spec = P(*{"sum": ("data",), "permuted": (None, "data", None, "tp")}.get(name, ("data", None, "tp")))
    columns = [x for x in rhs if x not in lhs]
    lengths = [{**LENGTHS, "n": n} for n in widths]
    shapes = [[lengths[0][x] for x in lhs], *([each[x] for x in rhs] for each in lengths)]
    x, *weights = operands(*shapes)
    bias = operands(*([each[x] for x in columns] for each in lengths))[0]
    told: dict[str, Any] = {"in_shardings": specs} if kind == "Auto" else {}
    activation = ("silu", None, None)[: len(widths)]

    def call(x: Any, *weights: Any, **keywords: Any) -> Any:
        biases = (bias, *[None] * (len(widths) - 1))
        return jtf.einsum(
            subscripts,
            x,
            weights,
            out_sharding=spec,
            precision="highest",
            bias=biases,
            activation=activation,
            **told,
            **keywords,
        )

    def wanted(x: Any, *weights: Any) -> Any:
        first, *rest = (plain(subscripts)(x, w) for w in weights)
        own = jnp.einsum(f"{''.join(columns)}->{''.join(x for x in out if x in columns)}", bias)
        own = jnp.expand_dims(own, [i for i, label in enumerate(out) if label not in columns])
        return jax.nn.silu(first + own), *rest

    def value(function: Callable, *given: Any) -> Any:
        found = function(*given)
        return sum(jnp.sum(jnp.sin(i + y)) for i, y in enumerate(found)), found

    def both(function: Callable) -> Callable:
        return jax.jit(jax.grad(functools.partial(value, function), tuple(range(1 + len(widths))), has_aux=True))

    with jax.set_mesh(mesh):
        given = on(mesh, (x, *weights), (specs[0], *[specs[1]] * len(widths)))
        gradients, found = both(call)(*given)
        text = lower_for_cuda(functools.partial(call, implementation="fused"), *given)
        assert text.count(TRITON_CALL) == count
    of_plain, expected = both(wanted)(x, *weights)
    for y, to in zip((*found, *gradients), (*expected, *of_plain), strict=True):
        assert_alike(y, to, 1e-3)
    for y in found:
        assert_lies(y, mesh, spec)
    for y, to in zip(gradients, (specs[0], *[specs[1]] * len(widths)), strict=True):
        assert_lies(y, mesh, to)


def test_several_weights_of_the_simulated_kernel() -> None:
    mesh = mesh_of("Explicit")
    x, *weights = operands((4, 8, 16), (16, 8), (16, 4))
    with jax.set_mesh(mesh):
        given = on(mesh, (x, *weights), (P("data", "tp"), P("data", "tp"), P("data", "tp")))
        how: dict[str, Any] = {"out_sharding": P("data", None, "tp"), "implementation": "simulate"}
        call = jax.jit(lambda x, *w: jtf.einsum("btd,df->btf", x, w, bias=(None, jnp.ones(4)), **how))
        found = call(*given)
    assert_alike(found[0], x @ weights[0])
    assert_alike(found[1], x @ weights[1] + 1)


def test_errors_of_several_weights() -> None:
    x, w = operands((8, 16), (16, 4))
    with fails(ValueError, "einsum takes no gate with a tuple of rhs"):
        jtf.einsum("mk,kn->mn", x, (w, w), gate=w)
    with fails(ValueError, "einsum takes no residual with a tuple of rhs"):
        jtf.einsum("mk,kn->mn", x, (w, w), residual=x)
    with fails(ValueError, "einsum takes as rhs an array or a tuple of them"):
        jtf.einsum("mk,kn->mn", x, ())
    with fails(ValueError, "einsum takes one activation for all 2 rhs or a tuple of 2, not of 1"):
        jtf.einsum("mk,kn->mn", x, (w, w), activation=("silu",))
    with fails(ValueError, "bias of shape [4]", "not [3]"):
        jtf.einsum("mk,kn->mn", x, (w, w), bias=(None, np.ones(3, np.float32)))


def test_errors_of_an_epilogue_of_several_operands() -> None:
    x, w = operands((8, 16), (16, 4))
    with fails(ValueError, "bias with two operands only"):
        jtf.einsum("mk,kn,nl->ml", x, w, w.T, bias=w[0])
    with fails(ValueError, "floating-point numbers, not int32"):
        jtf.einsum("mk,kn->mn", x.astype(int), w.astype(int), activation="silu")


TWICE = """
import hashlib, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import jaxtaxfree as jtf
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "tp"), axis_types=(AxisType.Explicit,) * 2)
arrays = [np.ones((4, 8, 16), np.float32), np.ones((16, 4, 8), np.float32)]
x, w = (jax.device_put(a, NamedSharding(mesh, P("data", "tp"))) for a in arrays)
with jax.set_mesh(mesh):
    call = jax.jit(lambda x, w: jtf.einsum("btd,dnh->btnh", x, w, out_sharding=P("data", None, "tp")))
    before = len(events)
    assert np.asarray(call(x, w)).max() == 16
    hits = [name for name in events[before:] if name == "/jax/compilation_cache/cache_hits"]
    fused = jax.jit(
        lambda x, w: jtf.einsum(
            "btd,dnh->btnh", x, w, out_sharding=P("data", None, "tp"), implementation="fused"
        )
    )
    text = fused.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
print(len(hits), hashlib.sha256(text.encode()).hexdigest())
"""


@pytest.mark.slow
def test_a_second_process_finds_the_program_in_the_cache(tmp_path: Path) -> None:
    """And builds the same program for CUDA, which is what the cache knows it by."""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", TWICE, str(tmp_path)]
    first, second = (
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True).stdout.split()
        for _ in range(2)
    )
    assert (first[0], second[0]) == ("0", "1")
    assert first[1] == second[1]


def test_weights_that_are_transposed(cpu_mesh: MeshFactory) -> None:
    """What the products say of rhs [N, K]."""
    x, w = operands((8, 16), (4, 16))

    def call(operation: Callable[..., jax.Array], x: jax.Array, w: jax.Array, **keywords: Any) -> Any:
        mapped = jax.shard_map(
            functools.partial(operation, axis_name="tp", rhs_transposed=True, **keywords),
            mesh=cpu_mesh(2, "tp"),
            in_specs=(P("tp"), P()) if operation is jtf.all_gather_matmul else (P(None, "tp"), P(None, "tp")),
            out_specs=P("tp"),
            check_vma=False,
        )
        return jax.jit(mapped)(x, w)

    for operation in (jtf.all_gather_matmul, jtf.matmul_reduce_scatter, jtf.matmul_all_reduce):
        for implementation in (None, "xla", "simulate"):
            found = call(operation, x, w, precision="highest", bias=w[:, 0], implementation=implementation)
            assert_alike(found[:8], x @ w.T + w[:, 0])
        with fails(ValueError, operation.__name__, "with the last (rhs_transposed) of rhs", "is not"):
            call(operation, x, np.ascontiguousarray(w.T))
        with fails(ValueError, operation.__name__, "bias of shape [4]"):
            call(operation, x, w, bias=w[0])
    gated = call(jtf.all_gather_matmul, x, w, gate=jnp.asarray(w) / 2, precision="highest")
    assert_alike(gated[:8], (x @ w.T / 2) * (x @ w.T))
