"""The benchmark program: its rows and floors, and that it lets no wrong result and no merged call through."""

import io
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from rich.console import Console

import jaxtaxfree as jtf
from benchmarks import (
    decode_step,
    eight_bits,
    few_rows,
    global_products,
    iris,
    measure,
    operation,
    run,
    sampling,
    step_calls,
    summary,
    timing,
    torch_peer,
)
from benchmarks.attention import TARGETS_US
from benchmarks.operation import Operands, Operation
from benchmarks.operations import OPERATIONS
from benchmarks.rows import commit, is_fault, make_row, write_rows
from benchmarks.rows import torch_rows as rows_of_torch
from benchmarks.shapes import DecoderShape, QkvShape
from jaxtaxfree.ops import register
from jaxtaxfree.ops.shapes import AttentionShape, CollectiveShape, GroupedShape, MatmulShape, MoeShape, RaggedShape

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = {"op", "dtype", "world", "implementation", "config", "median_us", "p20_us", "p80_us"}
REQUIRED |= {"floor_us", "gpu", "jax", "triton", "commit", "date"}
ADDED = {"mode", "name", "ratio_to_floor", "checked", "noisy", "l2"}
COMMON = {"l2": "usual", "gpu": "none", "jax": "0", "triton": "0", "commit": "unknown", "date": "2000-01-01"}
MATMUL = OPERATIONS["all_gather_matmul"]
GATED = OPERATIONS["gated_all_gather_matmul"]
SCATTER = OPERATIONS["matmul_reduce_scatter"]
REDUCE = OPERATIONS["matmul_all_reduce"]
MLP = OPERATIONS["mlp_gradients"]
ATTENTION = OPERATIONS["decode_attention"]
STEP = OPERATIONS["decode_step"]
RAGGED = OPERATIONS["ragged_all_to_all"]
GROUPED = [OPERATIONS[f"ragged_dot{of}"] for of in ("", "_lhs_gradient", "_rhs_gradient")]
LAYERS = [OPERATIONS[name] for name in ("moe", "moe_gradients", "moe_tensor")]
COLLECTIVES = [OPERATIONS[name] for name in ("psum", "all_gather", "psum_scatter", "all_to_all")]
QKV = OPERATIONS["all_gather_matmul_qkv"]
COLUMNS = [OPERATIONS[f"{name}_columns"] for name in ("all_gather_matmul", "matmul_reduce_scatter")]
SMALL: dict[Operation, Any] = {
    MATMUL: MatmulShape(name="small", m=64, k=256, n=256),
    GATED: MatmulShape(name="small", m=64, k=256, n=256),
    QKV: QkvShape(name="small", m=64, k=256, n=256, kv=64),
    **{op: MatmulShape(name="small", m=64, k=256, n=256) for op in COLUMNS},
    SCATTER: MatmulShape(name="small", m=64, k=256, n=128),
    REDUCE: MatmulShape(name="small", m=30, k=256, n=128),
    MLP: MatmulShape(name="small", m=16, k=32, n=64),
    ATTENTION: AttentionShape(name="small", b=2, s=64, n=8, kv_heads=2, h=32),
    STEP: DecoderShape(name="small", b=4, context=64, layers=2, d_model=32, n=8, kv_heads=4, h=8, d_mlp=48, vocab=64),
    RAGGED: RaggedShape(name="small", rows=20, d=24, routing="skewed"),
    **dict.fromkeys(GROUPED, GroupedShape(name="small", tokens=12, d=16, f=32, groups=4, top_k=2, routing="dirichlet")),
    **{op: MoeShape(name="small", tokens=8, d=16, f=32, experts=8, top_k=4) for op in LAYERS},
    **{op: CollectiveShape(name="small", nbytes=200) for op in COLLECTIVES},
}
each_operation = pytest.mark.parametrize("op", OPERATIONS.values(), ids=lambda op: op.name)


@pytest.fixture
def mesh() -> Mesh:
    return operation.make_mesh(jax.devices("cpu")[:4])


def bench(
    op: Operation, mesh: Mesh, *names: str, timed: bool = False, l2: str = "usual", **settings: Any
) -> dict[tuple[str, str], Any]:
    implementations = [each for each in op.implementations(**settings).values() if each.name in names or each.config]
    rows = measure.bench_shape(
        op,
        SMALL[op],
        implementations,
        mesh,
        bandwidth=1e9,
        seconds=0.0,
        timeout=60.0,
        modes=sampling.MODES if timed else (),
        l2=l2,
        common=COMMON,
    )
    return {(row["implementation"], row["mode"]): row for row in rows}


@pytest.fixture
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Operation, "calls_per_program", lambda self, shape, world: 4)
    monkeypatch.setattr(Operation, "rounds", lambda self, shape, world: 3 if self.is_repeated(shape) else 1)
    monkeypatch.setattr(timing, "MIN_ROUNDS", 2)


def is_for_cpus(op: Operation, name: str) -> bool:
    return operation.family(name) not in op.optional_peers and operation.variant(name) in (
        "",
        "default",
        "one_launch",
        "operations",
    )


# `test_all_ways_to_make_a_step_agree` checks the steps.
@pytest.mark.slow
@pytest.mark.parametrize("left_out", ({STEP}, pytest.param(set(), marks=pytest.mark.soak)), ids=("operations", "all"))
def test_check_runs_without_a_gpu(tmp_path: Path, left_out: set[Operation]) -> None:
    out = tmp_path / "rows.json"
    ops = {name: op for name, op in OPERATIONS.items() if op not in left_out}
    command = [sys.executable, "benchmarks/run.py", *ops, "--check", "--json", str(out)]
    # Implementations have the programs in common that make operands and compare results.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | cache
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())
    assert {row["op"] for row in rows} == ops.keys()
    for op in ops.values():
        names = {row["implementation"] for row in rows if row["op"] == op.name}
        assert names == {name for name in op.implementations() if is_for_cpus(op, name)}
    for row in rows:
        assert set(row) == REQUIRED | ADDED | set(OPERATIONS[row["op"]].sizes)
        assert (row["world"], row["mode"], row["median_us"]) == (4, "check", None)
        refused = operation.is_ours(row["implementation"]) and row["checked"].startswith("refused")
        assert row["checked"] == "ok" or refused, row


def test_timed_rows(mesh: Mesh, few_calls: None) -> None:
    rows = bench(MATMUL, mesh, "gemm", "collective", "xla/default", timed=True)
    assert {mode for _, mode in rows} == {"sustained", "burst"}
    for (name, mode), row in rows.items():
        assert row["checked"] == "ok"
        assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
        wire_us = 64 * 256 * 2 * 3 / 4 / 1e9 * 1e6
        assert row["floor_us"] == pytest.approx(max(rows["gemm", mode]["median_us"], wire_us), abs=1e-3)
        assert (row["ratio_to_floor"] is None) == (name in ("gemm", "collective"))


@pytest.fixture
def kernels_by_xla(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`decode_attention` computes by XLA whatever it is asked for. The list is of the configurations it was given."""
    configs = []

    def decode_attention(*operands: Any, implementation: str, config: Any = None, **keywords: Any) -> Any:
        assert implementation in (None, "fused", "xla")
        configs.append(config)
        return original(*operands, implementation="xla", **keywords)

    original = jtf.decode_attention
    monkeypatch.setattr("jaxtaxfree.decode_attention", decode_attention)
    return configs


@pytest.mark.slow
def test_timed_rows_of_attention(mesh: Mesh, few_calls: None, kernels_by_xla: list[Any]) -> None:
    config = {"block_s": 32, "splits": 3}
    rows = bench(ATTENTION, mesh, *ATTENTION.implementations(), timed=True, configs=[config])
    assert {name for name, _ in rows} == {*ATTENTION.implementations(), "fused[block_s=32,splits=3]"}
    for (name, _), row in rows.items():
        assert row["checked"] == "ok", row
        assert 0 < row["p20_us"] <= row["median_us"] <= row["p80_us"]
        assert row["floor_us"] == pytest.approx(2 * 2 * 64 * 2 * 32 * 2 / 1e9 * 1e6)
        assert (row["ratio_to_floor"] is None) == (name == "local")
        assert row["config"] == (config if "[" in name else None)
    given = [config for config in kernels_by_xla if config is not None]
    assert given and all((config["block_s"], config["splits"]) == (32, 3) for config in given)
    assert len(ATTENTION.remarks(list(rows.values()))) == 2


def test_parts_of_another_length(mesh: Mesh, monkeypatch: pytest.MonkeyPatch, kernels_by_xla: list[Any]) -> None:
    """The local kernel and the merge take what a rank has of sequences that end in the middle of it."""
    shape, calls = SMALL[ATTENTION], 1
    operands = ATTENTION.operands(shape, mesh, calls, calls)
    key, value, *_ = operands.ys[0]
    lengths = jnp.array([70, 256], jnp.int32)
    own = jnp.clip(lengths - shape.s * jnp.arange(mesh.shape["tp"])[:, None], 0, shape.s).reshape(-1)
    operands = Operands(xs=operands.xs, ys=((key, value, lengths, own),))
    by_name = ATTENTION.implementations()
    results = []
    for name in ("xla/default", "local+gather/default", "xla_unmasked"):
        prepared = measure.prepare("small", by_name[name], mesh, operands)
        prepared.launch()
        results.append((prepared, prepared.last_result[1]))
    assert measure.verdict(results[1][0], results[0][1]) == "ok"
    assert measure.verdict(results[2][0], results[0][1]).startswith("wrong")


@pytest.fixture
def all_kernels_by_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_xla(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands, implementation, **keywords: function(*operands, implementation="xla", **keywords)

    products = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    for name in ("all_gather", *products, "decode_attention", "top_k"):
        monkeypatch.setattr(jtf, name, by_xla(getattr(jtf, name)))


@pytest.mark.slow
def test_all_ways_to_make_a_step_agree(mesh: Mesh, all_kernels_by_xla: None) -> None:
    names = ("xla/default", "xla_heads/default", "xla_step/default", "fused", "fused_sequence", "fused_heads")
    rows = bench(STEP, mesh, *names, "fused_local", "fused_tokens")
    assert len(rows) == 8 and {row["checked"] for row in rows.values()} == {"ok"}


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_step_a_call(mesh: Mesh, few_calls: None, monkeypatch: pytest.MonkeyPatch, spoilt: bool) -> None:
    """It is checked as the loop is; where a step loses the cache of the one before, that is found."""
    monkeypatch.setattr(measure, "MODES", sampling.STEPWISE)
    monkeypatch.setattr(sampling, "MODES", sampling.STEPWISE)
    call = step_calls.StepCalls.__call__
    waited = []

    def watched(self: step_calls.StepCalls, xs: Any, ys: Any, *, waits: bool = False) -> Any:
        waited.append(waits)
        if spoilt:
            lost = lambda carry, x, y: self.step((*carry[:3], self.start(x, y)[3], carry[4]), x, y)  # noqa: E731
            return call(replace(self, step=lost), xs, ys, waits=waits)
        return call(self, xs, ys, waits=waits)

    monkeypatch.setattr(step_calls.StepCalls, "__call__", watched)
    rows = bench(STEP, mesh, "xla_step/default", "fused_tokens", timed=True)
    assert set(rows) == {("xla_step/default", "calls"), ("xla_step/default", "waited")}
    for row in rows.values():
        assert row["checked"].startswith("wrong" if spoilt else "ok"), row
        assert (row["median_us"] is None) == spoilt and row["floor_us"] > 0
    assert set(waited) == ({False} if spoilt else {False, True})


@cache
def right_step(mesh: Mesh) -> tuple[Any, Any]:
    """Operands of a step and what it makes of them, which is right. Times are those of a step."""
    operands = STEP.operands(SMALL[STEP], mesh, 1, 1)
    honest = STEP.implementations()["xla/default"]
    expected = measure.expected_results(STEP.expected_from(honest), mesh, operands)
    prepared = measure.prepare("small", honest, mesh, operands)
    assert prepared.calls == decode_step.STEPS
    assert measure.check(prepared, expected) == "ok"
    return operands, expected


@pytest.mark.parametrize("wrong", ["no rank added", "token", "logit"])
def test_wrong_steps_are_caught(mesh: Mesh, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """A layer that adds up no ranks; a token that is none, and a logit, of one step."""
    operands, expected = right_step(mesh)
    honest = STEP.implementations()["xla/default"]
    full = SMALL[STEP].context - decode_step.STEPS

    def spoilt(params: Any, cache: Any, token: jax.Array, lengths: jax.Array, cfg: Any, **how: Any) -> Any:
        logits, cache, (logit, last) = decode_step._replicated(params, cache, token, lengths, cfg, **how)
        now = lengths == full + 7
        if wrong == "token":
            last = jnp.where(now, cfg.vocab, last)
        else:
            logit = jnp.where(now, 2 * logit, logit)
        return logits, cache, (logit, last)

    if wrong == "no rank added":
        monkeypatch.setattr(jtf, "matmul_all_reduce", lambda y, w, *, residual, **_: residual + y @ w)
        spoilt_call = STEP.implementations()["xla/default"].call
    else:
        step = honest.call.args[0]
        spoilt_call = partial(decode_step._decode, partial(spoilt, **step.keywords))
    spoilt_run = measure.prepare("small", replace(honest, call=spoilt_call), mesh, operands)
    assert measure.check(spoilt_run, expected).startswith("wrong")


def test_every_rank_is_checked(mesh: Mesh) -> None:
    """Of a result that all of them have, of which the last one's is wrong."""

    def call(x: jax.Array, _: Any) -> jax.Array:
        last = lax.axis_index("tp") == lax.axis_size("tp") - 1
        return lax.psum(x, "tp") * jnp.where(last, 2, 1).astype(x.dtype)

    psum = COLLECTIVES[0]
    honest = psum.implementations()["xla/default"]
    operands = psum.operands(SMALL[psum], mesh, 4, 1)
    expected = measure.expected_results(psum.expected_from(honest), mesh, operands)
    assert measure.check(measure.prepare("small", honest, mesh, operands), expected) == "ok"
    assert measure.check(measure.prepare("small", replace(honest, call=call), mesh, operands), expected).startswith(
        "wrong"
    )


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


def rows_of_another_rank(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return lax.psum_scatter(jnp.roll(lhs @ rhs, 16, axis=0), "tp", tiled=True)


def lost_part(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The last rank's part of one tile of another rank's rows does not arrive."""
    product = lhs @ rhs
    lost = lax.axis_index("tp") == lax.axis_size("tp") - 1
    return lax.psum_scatter(product.at[:16, :16].multiply(jnp.where(lost, 0, 1)), "tp", tiled=True)


def lost_part_of_all(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """The same of the sum that every rank has."""
    product = lhs @ rhs
    lost = lax.axis_index("tp") == lax.axis_size("tp") - 1
    return lax.psum(product.at[:16, :16].multiply(jnp.where(lost, 0, 1)), "tp")


@pytest.mark.parametrize(
    "op, wrong",
    [
        (MATMUL, rotated),
        (MATMUL, not_a_number),
        (MATMUL, late_columns),
        (SCATTER, rows_of_another_rank),
        (SCATTER, lost_part),
        (REDUCE, lost_part_of_all),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_wrong_results_are_caught(
    op: Operation,
    wrong: Callable[[jax.Array, jax.Array], jax.Array],
    mesh: Mesh,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"jaxtaxfree.{op.name}", lambda lhs, rhs, axis_name, **_: wrong(lhs, rhs))
    rows = bench(op, mesh, "fused", "xla/latency_hiding")
    assert rows["fused", "check"]["checked"].startswith("wrong")
    assert is_fault(rows["fused", "check"])
    assert rows["xla/latency_hiding", "check"]["checked"] == "ok"


def test_lost_keys_are_caught(mesh: Mesh, monkeypatch: pytest.MonkeyPatch, kernels_by_xla: list[Any]) -> None:
    """The last 3 of 64 keys, or of 256 where there are peers."""
    whole = jtf.decode_attention

    def without_some(
        query: Any, key: Any, value: Any, axis_name: str, *, key_value_seq_lengths: Any, **keywords: Any
    ) -> Any:
        return whole(query, key, value, axis_name, key_value_seq_lengths=key_value_seq_lengths - 3, **keywords)

    monkeypatch.setattr("jaxtaxfree.decode_attention", without_some)
    rows = bench(ATTENTION, mesh, "fused", "local", "local+gather/default", "xla_unmasked")
    for name in ("fused", "local", "local+gather/default"):
        assert rows[name, "check"]["checked"].startswith("wrong"), name
        assert is_fault(rows[name, "check"])
    assert rows["xla_unmasked", "check"]["checked"] == "ok"


def test_the_fastest_right_alternative_is_timed(mesh: Mesh, few_calls: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of five is refused, one wrong, and the others take 3, 1 and 2 ms."""

    def tunable(lhs: jax.Array, rhs: jax.Array, *, config: dict[str, Any]) -> jax.Array:
        if config["kind"] == "refused":
            raise NotImplementedError("no such tile")
        out = lax.all_gather(lhs, "tp", tiled=True) @ rhs
        return jnp.roll(out, 1, axis=0) if config["kind"] == "wrong" else out

    def launch(self: timing.Run, *args: Any, **keywords: Any) -> float:
        run_in_earnest(self, *args, **keywords)
        order, _ = launched.setdefault(id(self), (len(launched), self))
        return (0.1, 3, 1, 2)[order] / 1000

    launched: dict[int, tuple[int, timing.Run]] = {}  # keeps the runs, or their ids would be used again
    run_in_earnest = timing.Run.launch
    kinds = tuple({"kind": kind} for kind in ("refused", "wrong", "a", "b", "c"))
    monkeypatch.setattr("benchmarks.pallas_matmul.all_gather_matmul", tunable)
    monkeypatch.setattr("benchmarks.pallas_matmul.CONFIGS", kinds)
    monkeypatch.setattr(timing.Run, "launch", launch)
    rows = bench(MATMUL, mesh, "pallas", timed=True)
    assert {row["checked"] for row in rows.values()} == {"ok"}
    assert rows["pallas", "burst"]["config"] == {"kind": "b"} and rows["pallas", "burst"]["median_us"] > 0

    monkeypatch.setattr(timing.Run, "launch", run_in_earnest)
    monkeypatch.setattr("benchmarks.pallas_matmul.CONFIGS", kinds[:2])
    row = bench(MATMUL, mesh, "pallas")["pallas", "check"]
    assert row["checked"] == "refused: no such tile" and not is_fault(row)
    monkeypatch.setattr("benchmarks.pallas_matmul.CONFIGS", kinds[1:2])
    row = bench(MATMUL, mesh, "pallas")["pallas", "check"]
    assert row["checked"].startswith("failed: ArithmeticError: wrong: relative error") and not is_fault(row)


def test_peers_that_may_do_harm_run_when_the_others_are_done(
    mesh: Mesh, few_calls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they did to the results of others would be found in those."""

    def sample(runs: dict[str, timing.Run], mode: sampling.Mode, *args: Any) -> dict[str, Exception]:
        turns.append((mode.name, set(runs)))
        return sample_in_earnest(runs, mode, *args)

    turns: list[tuple[str, set[str]]] = []
    sample_in_earnest = measure.sample_rounds
    monkeypatch.setattr(measure, "sample_rounds", sample)
    rows = bench(MATMUL, mesh, "xla/default", "xla_auto", "gemm", timed=True)
    assert {row["checked"] for row in rows.values()} == {"ok"}
    assert turns == [
        (mode, each) for each in ({"xla/default", "gemm"}, {"xla_auto"}) for mode in ("sustained", "burst")
    ]


def test_what_is_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each peer one program alone, in which XLA times products; of other flags all at once, and the second time."""
    under_way: list[str] = []
    company: dict[str, set[str]] = {}
    names = [f"xla/{flags}" for flags in operation.DEPENDENT] + ["fused_heads", "xla_heads/graph", "xla_heads/default"]
    meeting = threading.Barrier(len(operation.DEPENDENT))

    def prepare(label: str, implementation: operation.Implementation, *_: Any) -> str:
        under_way.append(implementation.name)
        if implementation.name not in alone:
            meeting.wait(10)
        company[implementation.name] = set(under_way)
        if implementation.name not in alone:
            meeting.wait(10)
        under_way.remove(implementation.name)
        return implementation.name

    monkeypatch.setattr(measure, "prepare", prepare)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    chosen = [STEP.implementations()[name] for name in names]
    alone = {"xla/default", "fused_heads", "xla_heads/graph"}
    compiled = partial(measure.prepare_all, "small", mesh=None, operands=None, rounds=1, timeout=60, show=print)
    found = compiled(chosen)
    assert list(found) == names and all(found[name][0][1].result() == name for name in names)
    assert all(company[name] == {name} for name in alone)
    assert all(company[name] == set(names) - alone for name in set(names) - alone)
    alone, meeting = set(), threading.Barrier(len(names))
    compiled(chosen, chosen=True)
    assert all(company[name] == set(names) for name in names)


def test_pallas_lowers_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the program that is timed, for the mesh that is measured; its tiles refuse what is too small."""
    mesh = operation.make_mesh(jax.devices("cpu"))
    pallas = MATMUL.implementations()["pallas"]
    assert len({tuple(config.items()) for config in pallas.alternatives}) == 8
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(core_count=132)])

    def lowered(m: int, config: dict[str, Any]) -> str:
        implementation = replace(pallas, call=partial(pallas.call, config=config))
        xs = [jax.ShapeDtypeStruct((m, 512), jnp.bfloat16)] * 2
        ys = [jax.ShapeDtypeStruct((512, 8 * 512), jnp.bfloat16)]
        program = jax.jit(operation.make_program(implementation, mesh))
        return program.trace(xs, ys).lower(lowering_platforms=("cuda",)).as_text()

    for config in (pallas.alternatives[0], pallas.alternatives[-1]):
        assert "mosaic_gpu" in lowered(8 * 512, config)
    with pytest.raises(NotImplementedError, match="must be divisible"):
        lowered(128, pallas.alternatives[0])


PARTNER = """
import json, sys, time
request = json.load(sys.stdin)
print("what NCCL has to say")
for job in request["jobs"]:
    found = {"name": job["name"], "implementation": "torch", "torch": "0", "launch": "CUDA graph"}
    samples = {mode: [job["calls"] + job["count_rhs"]] for mode in request["modes"]}
    if job["m"] == 64:
        print(json.dumps(found | {"error": 0.001, "samples": samples}), flush=True)
    elif job["m"] == 128:
        print(json.dumps(found | {"error": 0.5, "samples": samples}), flush=True)
    elif job["m"] == 192:
        print(json.dumps(found | {"failed": "RuntimeError: not at this\\nshape"}), flush=True)
    elif job["m"] == 256:
        time.sleep(60)
    else:
        raise SystemExit("Traceback\\nout of memory")
"""


@pytest.fixture
def torch_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[tuple[int, str], Any]]:
    """Rows by (M, mode) of what a stand-in for PyTorch's processes says of shapes of so many rows."""
    monkeypatch.setattr(torch_peer, "FOLDER", tmp_path)
    (tmp_path / MATMUL.torch_script).write_text(PARTNER)

    def rows(*sizes: int, modes: Sequence[sampling.Mode] = sampling.MODES) -> dict[tuple[int, str], Any]:
        shapes = [MatmulShape(name=str(m), m=m, k=256, n=256) for m in sizes]
        found, failure = torch_peer.measure(
            MATMUL, shapes, world=4, modes=modes, seconds=0.1, python=sys.executable, timeout=2.0
        )
        assert bool(failure) == bool({256, 320} & set(sizes))
        names = [mode.name for mode in modes] or ["check"]
        beside = [{"name": "64", "mode": "sustained", "floor_us": 33.0}]
        made = rows_of_torch(MATMUL, found, beside, world=4, modes=names, common=COMMON)
        return {(row["m"], row["mode"]): row for row in made}

    return rows


def test_rows_of_torch(torch_rows: Callable[..., Any]) -> None:
    rows = torch_rows(64, 128, 192)
    assert len(rows) == 6
    row = rows[64, "sustained"]
    assert set(row) == REQUIRED | ADDED | {"m", "k", "n"}
    assert (row["implementation"], row["config"]) == ("torch", {"torch": "0", "launch": "CUDA graph"})
    # 64 calls, which take turns with two rhs.
    assert (row["checked"], row["median_us"], row["floor_us"], row["ratio_to_floor"]) == ("ok", 66, 33, 0.5)
    assert rows[64, "burst"]["floor_us"] is None
    assert (rows[128, "burst"]["checked"], rows[128, "burst"]["median_us"]) == ("wrong: relative error 0.5", None)
    assert rows[192, "burst"]["checked"] == "failed: RuntimeError: not at this shape"
    assert not is_fault(rows[192, "burst"]) and is_fault(rows[128, "burst"])
    assert torch_rows(64, modes=())[64, "check"]["checked"] == "ok"


def test_what_torch_is_told_of_a_step() -> None:
    """All that its script reads of a job, as JSON."""
    script = (ROOT / "benchmarks" / STEP.torch_script).read_text()
    job = json.loads(json.dumps(STEP.torch_job(STEP.shapes[0], 2, "usual")))
    read = set(re.findall(r'job\["(\w+)"\]', script))
    assert {"b", "context", "steps"} <= read <= job.keys()


def test_torch_that_ends_early_keeps_what_it_found(torch_rows: Callable[..., Any]) -> None:
    started = time.perf_counter()
    rows = torch_rows(64, 256, 128)
    assert time.perf_counter() - started < 30
    checked = [rows[m, "sustained"]["checked"] for m in (64, 256, 128)]
    assert checked == ["ok", "failed: silent for 2 s", "failed: silent for 2 s"]
    rows = torch_rows(320, 64)
    assert {row["checked"] for row in rows.values()} == {"failed: out of memory"}


PARTNER_OF_8_BITS = """
import json, sys
request = json.load(sys.stdin)
for job in request["jobs"]:
    found = {"name": job["name"], "torch": "0", "launch": "CUDA graph"}
    if job["m"] == 16:
        print(json.dumps(found | {"implementation": "torch", "failed": "ValueError: too\\nfew"}), flush=True)
        continue
    for error, name in ((0.004, "torch"), (0.4, "torch/fast")):
        samples = {mode: [job["calls"], 7, 9] for mode in request["modes"]}
        print(json.dumps(found | {"implementation": name, "error": error, "samples": samples}), flush=True)
raise SystemExit("Traceback\\nout of memory")
"""


def test_rows_of_torch_in_eight_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written as they come; a wrong result has no time, and a refusal says why."""
    monkeypatch.setattr(torch_peer, "FOLDER", tmp_path)
    (tmp_path / eight_bits.TORCH_SCRIPT).write_text(PARTNER_OF_8_BITS)
    path = tmp_path / "rows.jsonl"
    eight_bits.main([
        "--programs", "torch", "--shapes", "128,256,512", "all_gather_matmul:16,256,512", "--world", "2",
        "--operations", "matmul_reduce_scatter", "matmul_all_reduce", "--json", str(path),
    ])  # fmt: skip
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    ours = {"operation": "matmul_reduce_scatter", "shape": [128, 256, 512], "program": "torch", "launch": "CUDA graph"}
    assert [row.get("us", row.get("ok", row.get("failed"))) for row in rows] == [True, 7, False, "ValueError: too few"]
    assert ours.items() <= rows[1].items() and (rows[1]["least"], rows[1]["most"]) == (eight_bits.TORCH_CALLS, 9)


def test_what_torch_is_told_of_a_product_of_8_bits() -> None:
    """All that its script reads of a job. Reductions have K and N the other way round."""
    script = (ROOT / "benchmarks" / eight_bits.TORCH_SCRIPT).read_text()
    keys = [(op, (64, 32, 48), "torch", "e4m3 rows") for op in eight_bits.SPECS]
    jobs = json.loads(json.dumps(eight_bits.torch_jobs([*keys, ("gated", (1, 1, 1), "fused", "e4m3 rows")])))
    assert set(re.findall(r'job\["(\w+)"\]', script)) | {"name"} == jobs[0].keys()
    sizes = [(job["op"], job["m"], job["k"], job["n"]) for job in jobs]
    assert sizes == [("all_gather_matmul", 64, 32, 48), ("matmul_reduce_scatter", 64, 48, 32)]


def chosen(*arguments: str) -> tuple[set[str], bool, list[str]]:
    args = run.parse_args(list(arguments))
    implementations, with_torch, left_out = run.choose(OPERATIONS[args.ops[0]], args)
    return {each.name for each in implementations}, with_torch, left_out


def test_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    every = {name for name in MATMUL.implementations() if name == "pallas" or is_for_cpus(MATMUL, name)}
    monkeypatch.setattr("benchmarks.pallas_matmul.unavailable", lambda: "too old")
    monkeypatch.setattr(torch_peer, "unavailable", lambda python: "")
    assert chosen("all_gather_matmul") == (every - {"pallas"}, True, ["pallas is left out: too old"])
    assert chosen("matmul_reduce_scatter") == (
        {name for name in SCATTER.implementations() if is_for_cpus(SCATTER, name)},
        True,
        [],
    )
    ours = {"gemm", "collective", "fused"}
    assert chosen("all_gather_matmul", "--peers") == (ours, False, [])
    assert chosen("all_gather_matmul", "--peers", "pallas", "torch") == (ours | {"pallas"}, True, [])
    assert chosen("all_gather_matmul", "--implementations", "fused", "--config", "a=1") == (
        {"fused", "fused[a=1]", "gemm"},
        False,
        [],
    )
    assert chosen("decode_attention", "--peers", "local+gather")[0] == {
        "fused",
        "local",
        "local+gather/default",
    }
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert chosen("ragged_dot")[2] == ["tokamax is left out: tokamax is not installed"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert chosen("ragged_dot")[2] == ["tokamax is left out: it needs Hopper GPUs"]
    assert chosen("ragged_dot", "--peers", "tokamax") == ({"fused", "dense", "tokamax"}, False, [])
    names, _, left_out = chosen("decode_step")
    assert left_out == ["xla_heads_cudnn is left out: cuDNN is for GPUs"]
    assert names == {name for name in STEP.implementations() if is_for_cpus(STEP, name)}
    assert chosen("psum", "--implementations", "xla/graph")[0] == {"xla/graph"}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert chosen("decode_step") == (set(STEP.implementations()), True, [])
    assert run.peers_of(MATMUL) == ["xla", "xla_auto", "pallas", "torch"]
    assert run.peers_of(SCATTER) == ["xla", "xla_auto", "torch"]


def test_result_that_goes_wrong_while_it_is_timed_has_no_time(
    mesh: Mesh, few_calls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = timing.Run.sample

    def spoil(self: timing.Run, mode: sampling.Mode) -> None:
        sample(self, mode)
        self.last_result = jax.tree.map(jnp.zeros_like, self.last_result)

    monkeypatch.setattr(timing.Run, "sample", spoil)
    row = bench(MATMUL, mesh, "xla/default", timed=True)["xla/default", "burst"]
    assert row["checked"].startswith("wrong")
    assert row["median_us"] is row["p20_us"] is row["p80_us"] is row["ratio_to_floor"] is None


@pytest.mark.parametrize(
    "op, name, calls",
    [
        (MATMUL, "xla/default", 4),
        (SCATTER, "xla/default", 4),
        (REDUCE, "xla/default", 4),
        (ATTENTION, "xla_unmasked", 4),
        (STEP, "xla/default", 1),
    ],
    ids=["gather", "scatter", "reduce", "attention", "step"],
)
def test_stale_result_is_caught(op: Operation, name: str, calls: int, mesh: Mesh) -> None:
    operands = op.operands(SMALL[op], mesh, calls, op.usual_turns(SMALL[op], calls))
    implementation = op.implementations()[name]
    honest = measure.prepare("small", implementation, mesh, operands)
    expected = measure.expected_results(op.expected_from(implementation), mesh, operands)
    assert measure.check(honest, expected) == "ok"
    first = honest.executable(*honest.operands)
    stale = replace(honest, executable=lambda *_: first)
    assert measure.check(stale, expected).startswith("wrong")


def test_failures_and_refusals_are_recorded(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> jax.Array:
        raise NotImplementedError("k must be a multiple of 512,\n not 256")

    monkeypatch.setattr("jaxtaxfree.all_gather_matmul", refuse)
    monkeypatch.setitem(operation.LATENCY_HIDING, "xla_there_is_no_such_flag", True)
    rows = bench(MATMUL, mesh, "fused", "xla/latency_hiding", "gemm")
    assert rows["fused", "check"]["checked"] == "refused: k must be a multiple of 512, not 256"
    assert rows["xla/latency_hiding", "check"]["checked"].startswith("failed: ")
    assert rows["gemm", "check"]["checked"] == "ok"
    assert not any(is_fault(row) for row in rows.values())
    _, notes = summary.summarize(MATMUL, list(rows.values()))
    assert len(notes) == 2


@each_operation
def test_crash_of_the_fused_operation_fails_the_run(op: Operation, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    # A form of an operation has its name in its own.
    named = max((name for name in register.OPERATIONS if name in op.name), key=len, default="")
    others = {MLP: "matmul_reduce_scatter", STEP: "decode_step", RAGGED: RAGGED.name}
    others |= {**dict.fromkeys(GROUPED, "ragged_dot"), **dict.fromkeys(LAYERS, "moe")}
    function = others.get(op, named)
    monkeypatch.setattr(f"jaxtaxfree.{function}", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(measure, "expected_results", lambda *_: [])  # nothing comes to be compared
    row = bench(op, mesh, "fused")["fused", "check"]
    assert row["checked"] == "failed: ZeroDivisionError: division by zero"
    assert is_fault(row)


def test_what_calls_find_in_the_cache(mesh: Mesh, few_calls: None) -> None:
    decode, *_, prefill = (shape for shape in MATMUL.shapes if shape.m in (16, 2048))
    assert [MATMUL.turns(decode, 4, 64, l2) for l2 in operation.L2] == [2, 1, 3]
    assert [MATMUL.turns(prefill, 4, 64, l2) for l2 in operation.L2] == [1, 1, 3]
    assert MATMUL.turns(prefill, 4, 2, "cold") == 2
    read = ATTENTION.turns(ATTENTION.shapes[0], 4, 64, "cold") * ATTENTION.shapes[0].kv_bytes()
    assert read - ATTENTION.shapes[0].kv_bytes() > 2 * 60e6
    assert ATTENTION.turns(ATTENTION.shapes[0], 4, 64, "usual") == 64
    with pytest.raises(ValueError, match="psum has no weights"):
        COLLECTIVES[0].turns(SMALL[COLLECTIVES[0]], 4, 64, "cold")
    for op in (MATMUL, GATED, MLP, ATTENTION):
        turns = op.turns(SMALL[op], 4, 4, "cold")
        assert len(op.operands(SMALL[op], mesh, 4, turns).ys) == turns == 4
    rows = bench(MATMUL, mesh, "gemm", "xla/default", timed=True, l2="warm")
    assert {row["checked"] for row in rows.values()} == {"ok"}


@pytest.mark.parametrize(
    "op, name, collectives, products",
    [
        (MATMUL, "xla/default", 8, 8),
        (MATMUL, "collective", 8, 0),
        (MATMUL, "gemm", 0, 8),
        (SCATTER, "xla/default", 8, 8),
        (SCATTER, "collective", 8, 0),
        (SCATTER, "gemm", 0, 8),
        (REDUCE, "xla/default", 8, 8),
        (REDUCE, "collective", 8, 0),
        (REDUCE, "gemm", 0, 8),
        (ATTENTION, "xla_unmasked", 16, 16),
        (ATTENTION, "xla/default", 24, 16),
        *((op, "xla/default", 8, 0) for op in COLLECTIVES),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_xla_merges_no_calls(op: Operation, name: str, collectives: int, products: int, mesh: Mesh) -> None:
    operands = op.operands(SMALL[op], mesh, 8, op.usual_turns(SMALL[op], 8))
    prepared = measure.prepare("small", op.implementations()[name], mesh, operands)
    assert isinstance(prepared.executable, jax.stages.Compiled)
    instructions = Counter(
        opcode
        for line in (prepared.executable.as_text() or "").splitlines()
        for opcode in (
            " all-gather(",
            " all-gather-start(",
            " all-reduce(",
            " reduce-scatter(",
            " all-to-all(",
            " dot(",
        )
        if opcode in line
    )
    assert instructions.total() - instructions[" dot("] == collectives
    assert instructions[" dot("] == products


@each_operation
def test_shapes(op: Operation) -> None:
    sizes = [op.sizes_of(shape) for shape in op.shapes]
    assert op.shapes_for(2) == op.shapes and op.shapes_for(8)
    assert len(set(sizes)) == len({shape.name for shape in op.shapes}) == len(op.shapes)
    for shape in op.shapes:
        assert op.parse_shape(",".join(map(str, op.sizes_of(shape)))) is shape
        assert op.sizes_of({size: getattr(shape, size) for size in op.sizes}) == op.sizes_of(shape)
        for world in (2, 4, 8):
            if shape not in op.shapes_for(world):
                with pytest.raises(ValueError, match=f"{world} ranks do not divide"):
                    op.check_shape(shape, world)
                continue
            op.check_shape(shape, world)
            assert op.fewest_calls <= op.calls_per_program(shape, world) <= 64


def test_sizes_of_shapes() -> None:
    assert MatmulShape(name="", m=8192, k=8192, n=1).wire_bytes(4) == 3 * 2048 * 8192 * 2
    assert MatmulShape(name="", m=8192, k=8192, n=1).wire_bytes(1) == 0
    assert MatmulShape(name="", m=8192, k=1, n=4096).scattered_bytes(4) == 3 * 2048 * 4096 * 2
    assert ATTENTION.shapes[0].kv_bytes() == 33_554_432
    assert {(shape.b, shape.s) for shape in ATTENTION.shapes} == set(TARGETS_US)


def test_caches_of_a_program_do_not_fit_the_l2_cache() -> None:
    for shape in ATTENTION.shapes:
        assert shape.kv_bytes() * ATTENTION.calls_per_program(shape, 4) > 4 * 50e6


@pytest.mark.parametrize(
    "gemm_us, m, bandwidth, expected",
    [
        (350.0, 8192, 400e9, 350.0),
        (100.0, 8192, 400e9, 251.65824),
        (100.0, 8192, math.inf, 100.0),
        (None, 8192, 400e9, None),
    ],
)
def test_floor(gemm_us: float | None, m: int, bandwidth: float, expected: float | None) -> None:
    medians = {} if gemm_us is None else {"gemm": gemm_us}
    assert MATMUL.floor_us(MatmulShape(name="", m=m, k=8192, n=8), 4, medians, bandwidth) == expected


@pytest.mark.parametrize("world", [1, 4])
def test_ceilings(world: int) -> None:
    mesh = operation.make_mesh(jax.devices("cpu")[:world])
    of_products, of_attention = (op.ceilings(mesh, on_gpu=False) for op in (MATMUL, ATTENTION))
    assert len(of_products) == (3 if world > 1 else 0)
    assert all(0 < value < 1e13 for value in (*of_products.values(), *of_attention.values()))
    assert of_attention


def test_row_arithmetic_and_file(tmp_path: Path) -> None:
    fused = MATMUL.implementations([{"stages": 4}])["fused[stages=4]"]
    row = make_row(
        MATMUL, SMALL[MATMUL], fused, world=4, mode="burst", checked="ok", samples=[4, 1, 2, 3, 5], floor=2.4,
        common=COMMON,
    )  # fmt: skip
    assert set(row) == REQUIRED | ADDED | {"m", "k", "n"}
    assert (row["median_us"], row["p20_us"], row["p80_us"], row["ratio_to_floor"]) == (3, 1.8, 4.2, 0.8)
    assert row["config"] == {"stages": 4}
    path = tmp_path / "rows.json"
    write_rows(path, [row, row])
    assert json.loads(path.read_text()) == [row, row]
    assert len(path.read_text().splitlines()) == 4
    assert list(tmp_path.iterdir()) == [path]


def test_arguments() -> None:
    args = run.parse_args(
        ["all_gather_matmul", "--shapes", "16,8192,28672", "8,8,8", "--config", "stages=4,split=True,order=own"]
    )
    assert args.shapes == [MATMUL.shapes[0], MatmulShape(name="8x8x8", m=8, k=8, n=8)]
    assert args.config == [{"stages": 4, "split": True, "order": "own"}]
    assert args.implementations is args.peers is None
    args = run.parse_args(
        ["decode_attention", "--shapes", "1,8192", "2,64,8,2,32", "--config", "a=1", "--config", "b=2"]
    )
    assert args.shapes == [
        ATTENTION.shapes[0],
        AttentionShape(name="2x64x8x2x32", b=2, s=64, n=8, kv_heads=2, h=32),
    ]
    assert args.config == [{"a": 1}, {"b": 2}]
    assert run.parse_args(["decode_attention"]).config == []
    assert run.parse_args(["decode_attention"]).modes == ["sustained", "burst", "calls", "waited"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["decode_attention", "--shapes", "1,2,3"], "'1,2,3' is neither B,S nor B,S,N,K,H"),
        (["all_gather_matmul", "--shapes", "1,2"], "'1,2' is not M,K,N"),
        (["decode_attention", "--implementations", "gemm"], "decode_attention has no implementation 'gemm': choose"),
        (["all_gather_matmul", "--config", "stages"], "'stages' is not key=value"),
        (
            ["matmul_reduce_scatter", "--peers", "pallas"],
            "matmul_reduce_scatter has no peer 'pallas': choose from xla, ",
        ),
        (["decode_step", "--shapes", "1,2,3"], "'1,2,3' is neither B,CONTEXT nor B,CONTEXT,LAYERS,"),
        (["psum", "sum"], "there is no operation 'sum': choose from all_gather_matmul, "),
        (["psum", "all_gather", "--shapes", "2"], "--shapes and --config are of a single operation"),
    ],
)
def test_arguments_that_say_nothing(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run.parse_args(arguments)
    assert message in capsys.readouterr().err


def test_errors_are_of_rows(mesh: Mesh) -> None:
    """The worst row counts, one that is zero has to be so exactly, and NaN is no result."""
    at = jax.NamedSharding(mesh, jax.P(operation.AXIS))
    want = np.ones((8, 4), np.float32)
    want[2] = 0
    for row, value, error in ((0, 1.0, 0.0), (5, 1.25, 0.25), (2, 0.5, np.inf), (7, np.nan, np.nan)):
        found = want.copy()
        found[row] = value
        put = [jax.device_put(x, at) for x in (found, want)]
        np.testing.assert_allclose(measure.relative_error(*put), error)


def test_commit_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit() == "unknown"


def rows_of(op: Operation, configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        make_row(op, shape, each, world=4, mode=mode, checked="ok", samples=[1234.5], floor=1000.0, common=COMMON)
        for shape in op.shapes
        for mode in ("sustained", "burst")
        for each in op.implementations(configs).values()
    ]


def printed(table: Any) -> str:
    output = io.StringIO()
    Console(width=run.WIDTH, file=output).print(table)
    return output.getvalue()


@each_operation
def test_summary_of_every_shape_is_short(op: Operation) -> None:
    tables, notes = summary.summarize(op, rows_of(op, []))
    assert notes == []
    assert len(tables) == (2 if op in (STEP, QKV) else 1)  # of these there are several forms of ours
    text = printed(tables[0])
    assert len(text) < 6500
    # A line more would be a cell that was wrapped.
    assert len(text.strip().splitlines()) == 2 + 2 * len(op.shapes), text


def test_summary_has_the_fastest_variant_of_a_peer() -> None:
    times = {"xla/default": [], "xla/nccl_symmetric": [30.0], "xla/graph": [20.0], "fused": [10.0]}
    op = COLLECTIVES[0]
    make = partial(make_row, op, SMALL[op], world=4, mode="burst", checked="ok", common=COMMON)
    rows = [make(each, samples=times.get(each.name, [40.0])) for each in op.implementations().values()]
    text = printed(summary.summarize(op, rows)[0][0])
    assert "20.0 graph |" in text and "30.0" not in text and "2.00x" in text


def test_summary_with_every_peer_stays_on_its_lines() -> None:
    rows = rows_of(MATMUL, [])
    found = [
        torch_peer.Found(shape=shape, name=name, config={}, error=0, failure="", samples={"sustained": [1000.0]})
        for shape in MATMUL.shapes
        for name in ("torch", "torch/native")
    ]
    rows += rows_of_torch(MATMUL, found, rows, world=4, modes=["sustained"], common=COMMON)
    text = printed(summary.summarize(MATMUL, rows)[0][0])
    assert len(text.strip().splitlines()) == 2 + 2 * len(MATMUL.shapes), text
    assert text.count("0.81x") == len(MATMUL.shapes) and "torch / fused" in text


@each_operation
def test_summary_of_configurations_has_a_line_for_each(op: Operation) -> None:
    rows = rows_of(op, [{"splits": 3}, {"splits": 5, "block_s": 128}])
    tables, _ = summary.summarize(op, rows)
    assert len(tables) == 2
    text = printed(tables[1])
    assert all(f"| {name} " in text for name in ("floor", "fused", "fused[splits=3]", "fused[splits=5,block_s=128]")), (
        text
    )
    forms = sum(name.startswith("fused") for name in op.implementations())
    assert text.count("1234.5") == (forms + 2) * 2 * len(op.shapes)
    assert "splits" not in printed(tables[0])


def test_remarks_say_what_each_adds_to_the_product() -> None:
    rows = [
        make_row(
            REDUCE, SMALL[REDUCE], each, world=4, mode="sustained", checked="ok", samples=[10.0 + i], common=COMMON
        )
        for i, each in enumerate(REDUCE.implementations().values())
    ]
    (remark,) = REDUCE.remarks(rows)
    assert remark.startswith("small, sustained: product 16.0 us; xla/default -6.0, ")
    assert remark.endswith(", fused +2.0")
    assert REDUCE.remarks(rows[:1]) == []


def test_kernels_of_iris_stand_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, with_iris in iris.OPERATIONS.items():
        ours, beside = OPERATIONS[name].implementations(), with_iris.implementations()
        added = beside.keys() - ours.keys()
        assert added and all(each.startswith("iris/") and beside[each].alternatives for each in added)
        assert list(beside)[: len(ours)] == list(ours)
    monkeypatch.delenv("JAXTAXFREE_IRIS_EXAMPLES", raising=False)
    with pytest.raises(SystemExit, match="JAXTAXFREE_IRIS_EXAMPLES names no checkout"):
        iris.main([])


def test_hang_is_named_and_ended() -> None:
    code = "import time; from benchmarks.timing import guard\nwith guard('small, fused', 0.5): time.sleep(60)"
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode != 0
    assert "small, fused: no end after 0.5 s" in done.stderr
    assert time.perf_counter() - started < 40


def test_global_products_run_on_a_cpu(capfd: pytest.CaptureFixture[str]) -> None:
    """And results that differ fail, however fast they came."""
    arguments = ["--shrink", "512", "--seconds", "0", "--implementation", "xla"]
    global_products.main(arguments)  # a CPU's times say nothing
    said = capfd.readouterr().out
    assert said.count("results alike") == 2 and said.count("sustained") == 4
    case = global_products.CASES["matmul_all_reduce"]
    wrong = replace(case, operation=lambda x, w, *_, **__: 2 * lax.psum(x @ w, operation.AXIS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(global_products, "CASES", {"matmul_all_reduce": wrong})
        assert global_products.main(arguments) == 1
    assert "DIFFER" in capfd.readouterr().out


def test_few_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    operations = ["alone", "matmul_reduce_scatter"]  # whose weights lie differently
    small = ["--shapes", "64,32", "--rows", "2", "--world", "2", "--seconds", "0.001", "--copies", "2"]
    small += ["--operations", *operations]
    few_rows.main([*small, "--kinds", "int8 weights", "--how", "xla", "--out", str(tmp_path / "rows.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["operation"] for row in rows] == operations
    said = capsys.readouterr().out
    for row in rows:
        assert (row["kind"], row["how"], row["error"]) == ("int8 weights", "xla", 0) and row["us"] > 0
        assert json.dumps(row) in said
