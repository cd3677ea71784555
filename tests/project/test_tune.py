"""The tuner: its candidates, that no wrong one wins, and what it writes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks import operation, timing, tune
from benchmarks.operation import AXIS, Operation
from benchmarks.operations import OPERATIONS, TUNED
from benchmarks.rows import make_row, write_rows
from jaxtaxfree import dispatch
from jaxtaxfree.ops.all_gather_matmul.hopper_few import HopperFew
from jaxtaxfree.ops.shapes import MatmulShape

ROOT = Path(__file__).resolve().parents[2]
MATMUL = OPERATIONS["all_gather_matmul"]
PROVENANCE = dict.fromkeys(tune.PROVENANCE, "0")
SHAPE = MatmulShape(name="small", m=64, k=256, n=256)
each_operation = pytest.mark.parametrize("op", TUNED.values(), ids=lambda op: op.name)


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return operation.make_mesh(jax.devices("cpu")[:4])


@each_operation
def test_candidates(op: Operation, mesh: jax.sharding.Mesh) -> None:
    team = tune.Team(axes=(AXIS,), others=(operation.ONE,), world=4, devices=tuple(mesh.devices.flat))
    for shape in (*op.shapes_for(4), *op.tiny_shapes):
        case = op.case_at(shape, team)
        if case is None:
            assert op.name == "decode_step" and shape.b > 16  # sequences that the kernel takes
            continue
        default = case.default
        found = tune.candidates(case)
        assert 4 <= len(found) <= tune.MOST_CANDIDATES
        assert len({tuple(choice.settings.items()) for choice in found.values()}) == len(found)
        assert found[tune.DEFAULT] == default
        for name, choice in found.items():
            said = set(name.removeprefix("fused[").removesuffix("]").split(","))
            if choice.variant is default.variant:
                changed = {key: value for key, value in choice.settings.items() if value != default.settings[key]}
                assert said == ({f"{key}={value}" for key, value in changed.items()} or {tune.DEFAULT})
            else:
                assert f"kernel={choice.variant.name}" in said
            assert choice.settings.get(tune.ROUNDING) == default.settings.get(tune.ROUNDING)
            assert case.choose(case.size, choice.settings) == choice


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`all_gather_matmul` by XLA, which takes made-up times: 3 us, 2 with 12 pushers, and 2.5 by itself."""
    times = {tune.XLA: 2.5, "fused[pushers=12]": 2.0}
    wrong: dict[str, Callable[[jax.Array], jax.Array]] = {}

    def all_gather_matmul(lhs: jax.Array, rhs: jax.Array, axis_name: str, *, config: Any, **_: Any) -> jax.Array:
        out = lax.all_gather(lhs, axis_name, tiled=True) @ rhs
        return wrong.get(f"pushers={config['pushers']}", lambda out: out)(out)

    def sample(self: timing.Run, mode: Any) -> None:
        self.last_result = self.executable(*self.operands)
        self.samples.setdefault(mode.name, []).append(times.get(self.label.partition(", ")[2], 3.0))

    def change(new_times: dict[str, float] | None = None, **functions: Any) -> None:
        times.update(new_times or {})
        wrong.update({f"pushers={number[1:]}": function for number, function in functions.items()})

    monkeypatch.setattr("jaxtaxfree.all_gather_matmul", all_gather_matmul)
    monkeypatch.setattr(timing.Run, "sample", sample)
    monkeypatch.setattr(HopperFew, "variations", lambda *_: [{"pushers": number} for number in (8, 12, 24, 32)])
    yield change


def contest(mesh: jax.sharding.Mesh) -> tune.Contest:
    held = tune.Contest.of(MATMUL, SHAPE, mesh, 2)
    tune.compile_all([held], mesh, 2)
    held.race(0.0, 60.0)
    return held


def test_the_fastest_is_written(mesh: jax.sharding.Mesh, kernel: Callable[..., None], tmp_path: Path) -> None:
    held = contest(mesh)
    assert len(held.medians) == 2 + tune.FINALISTS and not held.fault
    row = held.row(PROVENANCE)
    assert row is not None
    assert (row["m"], row["k"], row["n"], row["fused_us"], row["xla_us"]) == (16, 256, 64, 2.0, 2.5)
    assert row["config"] == held.configs["fused[pushers=12]"].settings

    assert len(list(held.lines())) == 1
    other = row | {"m": 128}
    for each in (other, row):
        tune.merge(tmp_path, "NVIDIA H200", held.case, each)
    kernel({"fused[pushers=12]": 2.98})  # no more than the margin
    again = contest(mesh).row(PROVENANCE)
    assert again is not None and (again["config"], again["fused_us"]) == (None, 3.0)
    tune.merge(tmp_path, "NVIDIA H200", held.case, again)
    assert json.loads((tmp_path / "nvidia_h200" / "all_gather_matmul.json").read_text()) == [again, other]


def test_a_wrong_candidate_spoils_its_shape(mesh: jax.sharding.Mesh, kernel: Callable[..., None]) -> None:
    kernel(_24=lambda out: jnp.roll(out, 1, axis=0))
    held = contest(mesh)
    assert held.excluded["fused[pushers=24]"].startswith("wrong")
    assert held.fault and held.row(PROVENANCE) is None


def test_a_candidate_that_fails_is_left_out(mesh: jax.sharding.Mesh, kernel: Callable[..., None]) -> None:
    kernel(_12=lambda out: 1 / 0)
    held = contest(mesh)
    row = held.row(PROVENANCE)
    assert row is not None and row["config"] is None and not held.fault
    assert held.excluded == {"fused[pushers=12]": "failed: ZeroDivisionError: division by zero"}


@pytest.mark.parametrize("missing", [tune.XLA, tune.DEFAULT])
def test_nothing_is_written_without_an_anchor(
    missing: str, mesh: jax.sharding.Mesh, kernel: Callable[..., None]
) -> None:
    held = tune.Contest.of(MATMUL, SHAPE, mesh, 2)
    tune.compile_all([held], mesh, 2)
    del held.runs[missing]
    held.race(0.0, 60.0)
    assert held.row(PROVENANCE) is None and held.fault
    assert held.excluded == {"all": f"nothing is compared without {missing}"}


def test_check_runs_without_a_gpu(capsys: pytest.CaptureFixture) -> None:
    def tuner(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "benchmarks/tune.py", *arguments]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)

    done = tuner("psum", "--check")
    assert done.returncode == 0 and "refused" in done.stdout, done.stdout + done.stderr
    assert "no GPU here" in tuner("psum", "--write").stderr
    with pytest.raises(SystemExit):
        tune.parse_args(["mlp_gradients"])
    assert "nothing to tune in 'mlp_gradients'" in capsys.readouterr().err


def test_tables_lie_where_they_are_looked_for() -> None:
    assert dispatch.path_of("NVIDIA H200", "psum") == dispatch.TUNED / "nvidia_h200" / "psum.json"


def results(op: Operation, path: Path, times: dict[str, float], configs: list[dict[str, Any]], **checked: str) -> None:
    """A result file of the operation's first shape, in which others than those `checked` are right."""
    common = dict.fromkeys(("jax", "triton", "commit", "date"), "0") | {"gpu": "NVIDIA H200"}
    known = op.implementations(configs)
    rows = [
        make_row(
            op, op.shapes[0], known[name], world=4, mode=mode, checked=checked.get(name, "ok"), samples=[time],
            common=common,
        )
        for mode in ("sustained", "burst")
        for name, time in times.items()
    ]  # fmt: skip
    write_rows(path, rows)


@each_operation
def test_results_of_a_benchmark_become_rows(op: Operation, tmp_path: Path) -> None:
    """Of the kernel as it was chosen, or with a configuration that was faster by more than the margin."""
    team = tune.Team(axes=(AXIS,), others=(operation.ONE,), world=4, devices=tuple(jax.devices("cpu")[:1]))
    case = op.case_at(op.shapes[0], team)
    settings: dict[str, Any] = {"num_warps": 16}
    if op.name == "matmul_reduce_scatter":
        settings[tune.ROUNDING] = True  # as the default does at this shape
    other = operation.config_name(settings)
    file, path = tmp_path / "results.json", tmp_path / "nvidia_h200" / f"{op.name}.json"
    path.parent.mkdir()

    def taken(fused: float, changed: float, before: list[dispatch.Row]) -> dispatch.Row:
        path.write_text(json.dumps(before))
        results(op, file, {op.own: fused, other: changed, op.rival: 3.0}, [settings])
        assert tune.main(["--from", str(file), "--write", str(tmp_path)]) == 0
        (row,) = json.loads(path.read_text())
        assert row.items() >= case.row().items() and case.choose(case.size, row["config"] or {})
        assert (row["xla_us"], row["name"]) == (3.0, op.shapes[0].name)
        assert {key: row[key] for key in tune.PROVENANCE} == dict.fromkeys(tune.PROVENANCE, "0")
        return row

    row = taken(2.0, 1.99, [])
    assert (row["config"], row["fused_us"]) == (None, 2.0)
    faster = taken(2.0, 1.9, [])
    assert faster["fused_us"] == 1.9 and faster["config"]["num_warps"] == 16
    assert faster["config"] == case.default.settings | settings
    # "fused" took the table's configuration then, and keeps it.
    assert taken(1.8, 2.5, [faster]) == faster | {"fused_us": 1.8}


def test_results_that_round_otherwise_are_not_taken(tmp_path: Path) -> None:
    op = OPERATIONS["matmul_all_reduce"]
    configs = [{"exact_wire": False}, {"exact_wire": True}]
    names = [operation.config_name(config) for config in configs]
    results(op, tmp_path / "results.json", {"fused": 3.0, names[0]: 1.0, names[1]: 2.0, op.rival: 3.0}, configs)
    assert tune.main(["--from", str(tmp_path / "results.json"), "--write", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "nvidia_h200" / f"{op.name}.json").read_text())
    assert (row["config"], row["fused_us"]) == (None, 2.0)  # which is the default


def test_results_that_say_too_little_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "results.json"
    for times, checked in (
        ({"fused": 1.0}, {}),
        ({MATMUL.rival: 1.0}, {}),
        ({"fused": 1.0, "fused[pushers=8]": 1.0, MATMUL.rival: 1.0}, {"fused[pushers=8]": "wrong"}),
    ):
        results(MATMUL, path, times, [{"pushers": 8}], **checked)
        assert tune.main(["--from", str(path), "--write", str(tmp_path)]) == 0
        assert "not enough is known" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]
