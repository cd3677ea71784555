"""The tables of measured configurations: what is in them, and what follows from them."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from jax._src.lib import gpu_triton
from jax.sharding import Mesh

import jaxtaxfree as jtf
from benchmarks import operation, tune
from benchmarks.operation import AXIS, DTYPE, Operation
from benchmarks.operations import OPERATIONS, TIMED
from jaxtaxfree import dispatch
from jaxtaxfree.dispatch import Case
from jaxtaxfree.ops import register
from jaxtaxfree.ops.epilogue import Epilogue
from jaxtaxfree.teams import Team
from tests.compiled.test_compiled import SHARED_MEMORY
from tests.helpers import compiling
from tests.helpers.support import TRITON_CALL, lower_for_cuda

KIND = "NVIDIA H200"
TABLES = sorted(dispatch.TUNED.glob("*/*.json"))
each_operation = pytest.mark.parametrize("op", TIMED.values(), ids=lambda op: op.name)


def mesh_of(world: int = 4) -> Mesh:
    return operation.make_mesh(jax.devices("cpu")[:world])


def team_of(mesh: Mesh) -> Team:
    return Team(axes=(AXIS,), others=(operation.ONE,), world=mesh.shape[AXIS], devices=tuple(mesh.devices.flat))


def case_at(op: Operation, shape: Any, mesh: Mesh) -> Case:
    """The call of a benchmark, as the tables know it."""
    case = op.case_at(shape, team_of(mesh))
    assert case is not None
    return case


@pytest.fixture
def on_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Programs are for H200, whose tables lie elsewhere: the function writes the rows of an operation."""

    def write(name: str, *rows: dispatch.Row) -> None:
        dispatch.table.cache_clear()
        path = dispatch.path_of(KIND, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(rows))

    monkeypatch.setattr(Team, "device_kind", KIND)
    monkeypatch.setattr(dispatch, "TUNED", tmp_path)
    dispatch.table.cache_clear()
    yield write
    dispatch.table.cache_clear()


def lowered(op: Operation, implementation: str | None, config: Any = None) -> str:
    """The usual call at the operation's first tiny shape."""
    mesh, entry = mesh_of(), register.OPERATIONS[op.name]
    call = functools.partial(entry.call, axis_name=AXIS, implementation=implementation, config=config)
    program = jax.shard_map(
        call, mesh=mesh, in_specs=entry.in_specs(AXIS), out_specs=entry.out_spec(AXIS), check_vma=False
    )
    return lower_for_cuda(program, *entry.operands(entry.tiny_shapes[0], mesh.shape[AXIS], jnp.dtype(DTYPE)))


@each_operation
def test_none_takes_what_was_faster(op: Operation, on_h200: Callable[..., None]) -> None:
    """Also where the heuristics say otherwise, and with the configuration that was the fastest."""
    case = case_at(op, op.tiny_shapes[0], mesh_of())
    fastest = case.default.settings
    if "block_k" in fastest:
        fastest["block_k"] *= 2  # of a product
    else:
        fastest["num_warps"] *= 2
    on_h200(op.name, case.row() | {"config": None, "fused_us": 3.0, "xla_us": 2.0})
    assert TRITON_CALL not in lowered(op, None)
    on_h200(op.name, case.row() | {"config": fastest, "fused_us": 1.0, "xla_us": 2.0})
    assert lowered(op, None) == lowered(op, "fused", fastest)


def test_an_epilogue_goes_by_the_product(on_h200: Callable[..., None]) -> None:
    """Not one with a gate, which makes two products."""
    op, mesh = OPERATIONS["matmul_reduce_scatter"], mesh_of()
    entry, case = register.OPERATIONS[op.name], case_at(op, op.tiny_shapes[0], mesh)

    def kernels(**keywords: Any) -> int:
        def call(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return jtf.matmul_reduce_scatter(lhs, rhs, AXIS, activation="silu", **keywords)

        program = jax.shard_map(
            call, mesh=mesh, in_specs=entry.in_specs(AXIS), out_specs=entry.out_spec(AXIS), check_vma=False
        )
        given = entry.operands(entry.tiny_shapes[0], mesh.shape[AXIS], jnp.dtype(DTYPE))
        return lower_for_cuda(program, *given).count(TRITON_CALL)

    on_h200(op.name, case.row() | {"config": None, "fused_us": 3.0, "xla_us": 2.0})
    assert (kernels(), kernels(implementation="fused")) == (0, 1)
    on_h200(op.name, case.row() | {"config": case.default.settings, "fused_us": 1.0, "xla_us": 2.0})
    assert kernels() == 1
    lhs, rhs = jax.ShapeDtypeStruct((8, 16), "bfloat16"), jax.ShapeDtypeStruct((16, 32), "bfloat16")
    usual: dict[str, Any] = {"team": team_of(mesh), "axis": 0, "precision": None, "preferred_element_type": None}
    product = register.OPERATIONS["all_gather_matmul"].case
    assert product(lhs, rhs, rhs, epilogue=Epilogue(operands=("gate",)), **usual) is None
    assert product(lhs, rhs, epilogue=Epilogue("silu"), **usual).row() == product(lhs, rhs, **usual).row()


@each_operation
def test_programs_for_absent_gpus_have_no_tables(op: Operation) -> None:
    case = case_at(op, op.shapes[0], mesh_of())
    assert case.device_kind == ""
    assert case.rows() == [] and dispatch.config(case) is None and dispatch.is_slower(case) is None


def test_calls_of_another_kind_have_no_case(on_h200: Callable[..., None]) -> None:
    team = team_of(mesh_of())
    lhs, rhs = jax.ShapeDtypeStruct((8, 16), "bfloat16"), jax.ShapeDtypeStruct((16, 32), "bfloat16")
    usual: dict[str, Any] = {"team": team, "axis": 0, "precision": None, "preferred_element_type": None}
    row = {"world": 4, "dtype": "bfloat16", "k": 16, "n": 32, "m": 8}
    assert register.OPERATIONS["all_gather_matmul"].case(lhs, rhs, **usual).row() == row
    for other in (
        {"rhs_transposed": True},
        {"axis": 1},
        {"precision": "highest"},
        {"preferred_element_type": jnp.dtype("float32")},
    ):
        assert register.OPERATIONS["all_gather_matmul"].case(lhs, rhs, **usual | other) is None
    assert dispatch.config(None) is dispatch.is_slower(None) is None


SIZES = st.integers(1, 2**20)
ROW = st.fixed_dictionaries(
    {"world": st.sampled_from((2, 4)), "size": SIZES, "config": st.none() | st.fixed_dictionaries({"block": SIZES})}
    | {"fused_us": st.integers(1, 9), "xla_us": st.integers(1, 9)}
)
ROWS = st.lists(ROW, max_size=8, unique_by=lambda row: (row["world"], row["size"]))


@dataclasses.dataclass(frozen=True)
class Choice:
    """What heuristics choose, and what settings ask for."""

    kind: int
    settings: dict[str, Any]


def case_for(size: int, kind: str = KIND) -> Case:
    """For heuristics that think alike of sizes with as many bits."""
    return Case(
        operation="psum",
        device_kind=kind,
        same={"world": 4},
        along="size",
        size=size,
        choose=lambda size, settings: Choice(size.bit_length(), dict(settings)),
    )


@hypothesis.given(ROWS, SIZES, st.randoms())
def test_rules(rows: list[dispatch.Row], size: int, random: Any) -> None:
    shuffled = random.sample(rows, len(rows))
    answers = []
    for table in (rows, shuffled):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "table", lambda kind, name, table=table: table if kind == KIND else [])
            answers.append((dispatch.config(case_for(size)), dispatch.is_slower(case_for(size))))
            assert dispatch.config(case_for(size, "")) is dispatch.is_slower(case_for(size, "")) is None
            assert dispatch.config(case_for(0)) is dispatch.is_slower(case_for(0)) is None
    (config, slower), again = answers
    assert again == (config, slower)  # the order of a file means nothing

    ours = {row["size"]: row for row in rows if row["world"] == 4}
    was_slower = {each: row["fused_us"] > row["xla_us"] for each, row in ours.items()}
    if size in ours:
        assert (config, slower) == (ours[size]["config"], was_slower[size])
        return
    alike = {each: row["config"] for each, row in ours.items() if each.bit_length() == size.bit_length()}
    distance = min((abs(math.log(each / size)) for each in alike), default=None)
    nearest = [alike[each] for each in alike if abs(math.log(each / size)) == distance]
    assert config in (nearest or [None])
    below, above = [each for each in ours if each < size], [each for each in ours if each > size]
    if slower is not None:
        assert min(above) <= dispatch.FARTHEST * max(below)
        assert was_slower[min(above)] == was_slower[max(below)] == slower
    elif below and above and min(above) <= dispatch.FARTHEST * max(below):
        assert was_slower[min(above)] != was_slower[max(below)]


def lower_with(op: Operation, shape: Any, mesh: Mesh, config: dict[str, Any]) -> None:
    fused = next(each for each in op.implementations([config]).values() if each.config)
    operands = jax.eval_shape(lambda: op.operands(shape, mesh, 1, 1).of(fused))
    lower_for_cuda(operation.make_program(fused, mesh), *operands)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_shipped_tables(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row was measured with committed code, is where its shape is looked for, and its configuration fits."""
    op, rows = OPERATIONS[path.stem], json.loads(path.read_text())
    shapes = {shape.name: shape for shape in op.shapes}
    kernels: list[tuple[Any, ...]] = []
    kernel = gpu_triton.TritonKernel
    monkeypatch.setattr(gpu_triton, "TritonKernel", lambda *of: kernels.append(of) or kernel(*of))
    seen = []
    for row in rows:
        mesh = mesh_of(row["world"])
        # A shape that is not listed is named by its sizes.
        shape = shapes.get(row["name"]) or op.parse_shape(row["name"].removesuffix(" B").replace("x", ","))
        case = case_at(op, shape, mesh)
        assert row.keys() == case.row().keys() | {"config", "fused_us", "xla_us", "name"} | set(tune.PROVENANCE)
        assert case.row().items() <= row.items() and case.row() not in seen
        seen.append(case.row())
        assert row["fused_us"] > 0 < row["xla_us"]
        assert not row["commit"].endswith("-dirty") and row["commit"] != "unknown"
        if row["config"]:
            assert case.choose(case.size, row["config"]).settings == row["config"]
            kernels.clear()
            with compiling.no_code():
                lower_with(op, shape, mesh, row["config"])
            # A decode step has another one, which chooses the token.
            ((_, _, _, shared, *_),) = (each for each in kernels if each[0] != "largest_kernel")
            assert 0 < shared <= SHARED_MEMORY[90]
