"""The benchmark program: its rows and floors, and that it lets no wrong result and no merged call through."""

import io
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import implementations, run, timing  # noqa: E402
from benchmarks.shapes import ALL_GATHER_MATMUL, ALL_GATHER_MATMUL_TINY, MatmulShape  # noqa: E402

REQUIRED = {"op", "m", "k", "n", "dtype", "world", "implementation", "config", "median_us", "p20_us", "p80_us"}
REQUIRED |= {"floor_us", "gpu", "jax", "triton", "commit", "date"}
ADDED = {"mode", "name", "ratio_to_floor", "checked"}
COMMON = {"gpu": "none", "jax": "0", "triton": "0", "commit": "unknown", "date": "2000-01-01"}
SMALL = MatmulShape(name="small", m=64, k=256, n=256)


@pytest.fixture
def mesh() -> Mesh:
    return implementations.make_mesh(jax.devices("cpu")[:4])


def bench(mesh: Mesh, *names: str, check_only: bool = True) -> dict[tuple[str, str], run.Row]:
    rows = run.bench_shape(
        SMALL, names, mesh, bandwidth=1e9, seconds=0.0, timeout=60.0, check_only=check_only, common=COMMON
    )
    return {(row["implementation"], row["mode"]): row for row in rows}


def test_check_runs_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, "benchmarks/run.py", run.OP, "--check", "--json", str(out)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())
    assert len(rows) == len(ALL_GATHER_MATMUL_TINY) * len(implementations.all_implementations())
    for row in rows:
        assert set(row) == REQUIRED | ADDED
        assert (row["world"], row["mode"], row["median_us"]) == (4, "check", None)
        assert row["checked"] == "ok" or (row["implementation"] == "fused" and row["checked"].startswith("refused")), (
            row
        )


def test_timed_rows(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "calls_per_program", lambda shape, world: 4)
    monkeypatch.setattr(timing, "MIN_ROUNDS", 2)
    rows = bench(mesh, "gemm", "collective", "xla/default", check_only=False)
    assert {mode for _, mode in rows} == {"sustained", "burst"}
    for (name, mode), row in rows.items():
        assert row["checked"] == "ok"
        assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
        wire_us = 64 * 256 * 2 * 3 / 4 / 1e9 * 1e6
        assert row["floor_us"] == pytest.approx(max(rows["gemm", mode]["median_us"], wire_us))
        assert (row["ratio_to_floor"] is None) == (name == "collective")


def rotated(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    out = lax.all_gather(lhs, "tp", tiled=True) @ rhs
    return jnp.roll(out, lhs.shape[0], axis=0)


def not_a_number(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return (lax.all_gather(lhs, "tp", tiled=True) @ rhs).at[-1, -1].set(jnp.nan)


def late_columns(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The last rank sees one row without its last 16 columns."""
    gathered = lax.all_gather(lhs, "tp", tiled=True)
    late = lax.axis_index("tp") == lax.axis_size("tp") - 1
    return gathered.at[0, -16:].multiply(jnp.where(late, 0, 1).astype(lhs.dtype)) @ rhs


@pytest.mark.parametrize("wrong", [rotated, not_a_number, late_columns])
def test_wrong_results_are_caught(
    wrong: Callable[[jax.Array, jax.Array], jax.Array], mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxtaxfree.all_gather_matmul", lambda lhs, rhs, axis_name, **_: wrong(lhs, rhs))
    rows = bench(mesh, "fused", "xla/latency_hiding")
    assert rows["fused", "check"]["checked"].startswith("wrong")
    assert run.is_fault(rows["fused", "check"])
    assert rows["xla/latency_hiding", "check"]["checked"] == "ok"


def test_result_that_goes_wrong_while_it_is_timed_has_no_time(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "calls_per_program", lambda shape, world: 4)
    monkeypatch.setattr(timing, "MIN_ROUNDS", 1)
    sample = timing.Run.sample

    def spoil(self: timing.Run, mode: timing.Mode) -> None:
        sample(self, mode)
        self.last_result = jax.tree.map(jnp.zeros_like, self.last_result)

    monkeypatch.setattr(timing.Run, "sample", spoil)
    row = bench(mesh, "xla/default", check_only=False)["xla/default", "burst"]
    assert row["checked"].startswith("wrong")
    assert row["median_us"] is row["p20_us"] is row["p80_us"] is row["ratio_to_floor"] is None


def test_stale_result_is_caught(mesh: Mesh) -> None:
    operands = implementations.make_operands(SMALL, mesh, 4)
    honest = run.prepare(SMALL, implementations.REFERENCE, mesh, operands, 4)
    expected = run.reference_results(honest)
    assert run.check(honest, expected) == "ok"
    first = honest.executable(*honest.operands)
    stale = timing.Run(label="", executable=lambda *_: first, operands=honest.operands, calls=4, queue=False)
    assert run.check(stale, expected).startswith("wrong")


def test_failures_and_refusals_are_recorded(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> jax.Array:
        raise NotImplementedError("k must be a multiple of 512,\n not 256")

    monkeypatch.setattr("jaxtaxfree.all_gather_matmul", refuse)
    monkeypatch.setitem(implementations._LATENCY_HIDING, "xla_there_is_no_such_flag", True)
    rows = bench(mesh, "fused", "xla/latency_hiding", "gemm")
    assert rows["fused", "check"]["checked"] == "refused: k must be a multiple of 512, not 256"
    assert rows["xla/latency_hiding", "check"]["checked"].startswith("failed: ")
    assert rows["gemm", "check"]["checked"] == "ok"
    assert not any(run.is_fault(row) for row in rows.values())
    _, notes = run.summarize(list(rows.values()))
    assert len(notes) == 2


def test_crash_of_the_fused_operation_fails_the_run(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtaxfree.all_gather_matmul", lambda *_, **__: 1 / 0)
    row = bench(mesh, "fused")["fused", "check"]
    assert row["checked"] == "failed: ZeroDivisionError: division by zero"
    assert run.is_fault(row)


@pytest.mark.parametrize("name, gathers, products", [("xla/default", 8, 8), ("collective", 8, 0), ("gemm", 0, 8)])
def test_xla_merges_no_calls(name: str, gathers: int, products: int, mesh: Mesh) -> None:
    operands = implementations.make_operands(SMALL, mesh, 8)
    prepared = run.prepare(SMALL, implementations.all_implementations()[name], mesh, operands, 8)
    assert isinstance(prepared.executable, jax.stages.Compiled)
    instructions = Counter(
        opcode
        for line in (prepared.executable.as_text() or "").splitlines()
        for opcode in (" all-gather(", " all-gather-start(", " dot(")
        if opcode in line
    )
    assert instructions[" all-gather("] + instructions[" all-gather-start("] == gathers
    assert instructions[" dot("] == products


def test_shapes() -> None:
    sizes = [(shape.m, shape.k, shape.n) for shape in ALL_GATHER_MATMUL]
    assert len(set(sizes)) == len({shape.name for shape in ALL_GATHER_MATMUL}) == 7
    assert all(shape.m % world == shape.n % world == 0 for shape in ALL_GATHER_MATMUL for world in (2, 4, 8))
    assert MatmulShape(name="", m=8192, k=8192, n=1).wire_bytes(4) == 3 * 2048 * 8192 * 2
    assert MatmulShape(name="", m=8192, k=8192, n=1).wire_bytes(1) == 0


@pytest.mark.parametrize(
    "gemm_us, wire_bytes, bandwidth, expected",
    [
        (350.0, 100_000_000, 400e9, 350.0),
        (100.0, 100_000_000, 400e9, 250.0),
        (100.0, 0, math.inf, 100.0),
        (None, 100_000_000, 400e9, None),
    ],
)
def test_floor(gemm_us: float | None, wire_bytes: int, bandwidth: float, expected: float | None) -> None:
    assert run.floor_us(gemm_us, wire_bytes, bandwidth) == expected


def test_row_arithmetic_and_file(tmp_path: Path) -> None:
    row = run.make_row(
        SMALL, "fused", world=4, mode="burst", checked="ok", config={"stages": 4}, samples=[4, 1, 2, 3, 5], floor=2.4,
        common=COMMON,
    )  # fmt: skip
    assert set(row) == REQUIRED | ADDED
    assert (row["median_us"], row["p20_us"], row["p80_us"], row["ratio_to_floor"]) == (3, 1.8, 4.2, 0.8)
    path = tmp_path / "rows.json"
    run.write_rows(path, [row, row])
    assert json.loads(path.read_text()) == [row, row]
    assert len(path.read_text().splitlines()) == 4
    assert list(tmp_path.iterdir()) == [path]


def test_arguments() -> None:
    args = run.parse_args([run.OP, "--shapes", "16,8192,28672", "8,8,8", "--config", "stages=4,split=True,order=own"])
    assert args.shapes == [ALL_GATHER_MATMUL[0], MatmulShape(name="8x8x8", m=8, k=8, n=8)]
    assert args.config == {"stages": 4, "split": True, "order": "own"}
    assert run.parse_args([run.OP]).config is None


def test_commit_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert run.commit() == "unknown"


def test_summary_of_every_shape_is_short() -> None:
    rows = [
        run.make_row(shape, name, world=4, mode=mode, checked="ok", samples=[1234.5], floor=1000.0, common=COMMON)
        for shape in ALL_GATHER_MATMUL
        for mode in ("sustained", "burst")
        for name in implementations.all_implementations()
    ]
    table, notes = run.summarize(rows)
    output = io.StringIO()
    run.Console(width=220, file=output).print(table)
    text = output.getvalue()
    assert notes == []
    assert len(text) < 6000
    # A line more would be a cell that was wrapped.
    assert len(text.strip().splitlines()) == 2 + 2 * len(ALL_GATHER_MATMUL), text


def test_hang_is_named_and_ended() -> None:
    code = "import time; from benchmarks.timing import guard\nwith guard('small, fused', 0.5): time.sleep(60)"
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode != 0
    assert "small, fused: no end after 0.5 s" in done.stderr
    assert time.perf_counter() - started < 40
