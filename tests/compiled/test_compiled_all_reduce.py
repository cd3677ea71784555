"""What the compiler makes of `matmul_all_reduce`'s kernel for few rows, read from the PTX: no GPU needed."""

import dataclasses
import functools
import re
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxtaxfree import matmul_all_reduce
from jaxtaxfree.kernels.matmul_all_reduce.few import matmul_all_reduce_few_kernel
from jaxtaxfree.ops import matmul_all_reduce as reduce_ops
from jaxtaxfree.ops import register
from tests.compiled.test_compiled import (
    SHARED_MEMORY,
    copies_not_in_flight,
    local_memory,
    parse,
    ptxas_report,
    spilled_bytes,
)
from tests.compiled.test_compiled_attention import is_message, polling_loops, widths
from tests.helpers import amd
from tests.helpers.compiling import names
from tests.helpers.support import Compiled, by_shape, compile_call, compile_for_amd, mesh_of, product_call, sharded

K, N = 28672, 8192
CASES: dict[str, dict[str, Any]] = {
    "rows-1": {"m": 1},
    "rows-16": {"m": 16},
    "rows-16-two-shots": {"m": 16, "shots": 2},
    "rows-16-exact": {"m": 16, "exact_wire": True},
    "rows-64": {"m": 64},
    "rows-64-exact": {"m": 64, "exact_wire": True},
    "rows-128": {"m": 128},
    "rows-128-exact": {"m": 128, "exact_wire": True},
    "rows-256": {"m": 256},
    "apart": {"m": 16, "n": 28672},
    "rows-64-apart": {"m": 64, "apart": True, "linger": True},
    "float32": {"m": 16, "dtype": "float32"},
    "odd": {"m": 13, "n": 777},
    "rows-16-epilogue": {"m": 16, "epilogue": True},
    "rows-16-two-shots-epilogue": {"m": 16, "shots": 2, "epilogue": True},
    "rows-128-epilogue": {"m": 128, "epilogue": True},
}
LIKE_OTHERS = ("rows-64", "rows-64-exact", "rows-16-exact", "rows-16-two-shots", "rows-16-epilogue", "rows-1")
each_case = names(CASES, LIKE_OTHERS)


@functools.cache
def compiled(name: str, compute_capability: int = 90, world: int = 4, amd: bool = False) -> Compiled:
    """Compiles the kernel of a call of this case's sizes, [M, K / world] @ [K / world, N] on every rank."""
    case = {"n": N, "dtype": "bfloat16", **CASES[name]}
    m, n, dtype = case.pop("m"), case.pop("n"), case.pop("dtype")
    mesh, in_specs, shapes = mesh_of(world), (P(None, "tp"), P("tp")), ((m, K), (K, n))
    names = ()
    if case.pop("epilogue", False):
        names, in_specs, shapes = ("bias", "residual"), (*in_specs, P(), P()), (*shapes, (n,), (m, n))

    def call(lhs: jax.Array, rhs: jax.Array, *others: jax.Array) -> jax.Array:
        config = {**case, "kernel": "few", **({"num_stages": 2} if amd else {})}
        keywords = {"implementation": "fused", "config": config}
        keywords |= {**dict(zip(names, others)), "activation": "silu" if names else None}
        return matmul_all_reduce(lhs, rhs, "tp", **keywords)

    arrays = [sharded(mesh, spec, shape, dtype) for spec, shape in zip(in_specs, shapes)]
    program = jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=P())
    return compile_call(matmul_all_reduce_few_kernel, program, *arrays, compute_capability=compute_capability)


def dot_of(call: Compiled) -> str:
    return "wgmma.mma_async" if "wgmma.mma_async" in call.ptx else "mma.sync"


def narrow_words(call: Compiled) -> list[str]:
    """Tiles are sent in 16-byte stores, and sums where they are enough for all threads; all polls are of 16 bytes."""
    program, constants = parse(call.ptx), call.constants
    ranks, threads = constants["WORLD"], 32 * call.options["num_warps"]
    stores, polls = widths(program, "st."), widths(program, "ld.")
    two_shots = constants["SHOTS"] == 2
    few = constants["ADD_ROWS"] * constants["BLOCK_N"] < 8 * threads  # 16 bytes of 16 bits
    wrong = []
    if stores[16] < ranks * (2 if two_shots and not few else 1):
        wrong.append(f"{stores[16]} stores of 16 bytes")
    if (narrow := stores[4] + stores[8]) > (ranks if two_shots and few else 0):
        wrong.append(f"{narrow} narrow stores")
    if polls[16] < ranks * (1 + two_shots):
        wrong.append(f"{polls[16]} polls of 16 bytes")
    if narrow := polls[4] + polls[8] - constants["LINGER"] * (1 + two_shots):
        wrong.append(f"{narrow} narrow polls")
    return wrong


@each_case
def test_sm_90(name: str) -> None:
    call = compiled(name)
    program = parse(call.ptx)
    assert ".target sm_90a" in call.ptx
    assert narrow_words(call) == []
    if name != "odd":
        assert copies_not_in_flight(program, dot_of(call)) == []
    assert polling_loops(program) >= call.constants["SHOTS"]
    assert not any(s.starts("membar", "fence") and not s.has("proxy") for s in program)
    assert local_memory(call.ptx) == []
    assert 0 < call.shared <= SHARED_MEMORY[90]
    assert spilled_bytes(ptxas_report(call)) == 0


others = names(("rows-1", "rows-16", "rows-128", "rows-256"), ("rows-1", "rows-16", "rows-256"))


@pytest.mark.parametrize("world", (2, 8))
@others
def test_other_worlds(name: str, world: int) -> None:
    call = compiled(name, world=world)
    assert narrow_words(call) == []
    assert polling_loops(parse(call.ptx)) >= call.constants["SHOTS"]
    assert spilled_bytes(ptxas_report(call)) == 0


@pytest.mark.parametrize("compute_capability", (80, 89, 100))
@others
def test_other_nvidia_gpus(name: str, compute_capability: int) -> None:
    call = compiled(name, compute_capability)
    assert f".target sm_{compute_capability}" in call.ptx
    assert narrow_words(call) == []
    assert polling_loops(parse(call.ptx)) >= call.constants["SHOTS"]
    assert call.shared <= SHARED_MEMORY[compute_capability]


@names(("rows-1", "rows-128", "rows-256"), ("rows-1", "rows-256"))
@pytest.mark.parametrize("architecture", amd.EACH)
def test_amd(name: str, architecture: str) -> None:
    code = compile_for_amd(compiled(name, amd=True), architecture).asm["amdgcn"]
    assert amd.leaves_and_traps(code)
    assert "mfma" in code
    assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", code) == ["0"]  # scalars find a place in vector registers
    # System scope.
    assert re.search(r"global_store_dwordx?4? .*sc0 sc1", code)
    assert re.search(r"global_load_dwordx?4? .*sc0 sc1", code)


def test_the_shapes_of_the_benchmarks_are_compiled() -> None:
    rows = {case["m"] for case in CASES.values()}
    assert {shape.m for shape in register.OPERATIONS["matmul_all_reduce"].shapes if shape.m <= 256} <= rows
    assert {(shape.k, shape.n) for shape in register.OPERATIONS["matmul_all_reduce"].shapes} == {(K, N)}


def test_default_config_is_taken() -> None:
    call = compiled("rows-128")
    config = dataclasses.asdict(by_shape(reduce_ops, "few", product_call(reduce_ops, 128, K // 4, N, world=4)))
    for name in ("block_m", "block_n", "block_k", "shots", "exact_wire", "apart", "linger", "add_rows"):
        assert call.constants[name.upper()] == config[name]


def tampered(name: str, pattern: str, replacement: str) -> Compiled:
    call = compiled(name)
    ptx, count = re.subn(pattern, replacement, call.ptx)
    assert count, f"nothing to tamper with: {pattern}"
    return dataclasses.replace(call, ptx=ptx)


def test_narrow_words_are_reported() -> None:
    for pattern, replacement, report in (
        (r"st\.relaxed\.sys\.global\.v4\.b32", "st.relaxed.sys.global.v2.b32", "0 stores of 16 bytes"),
        (r"st\.relaxed\.sys", "st.relaxed.gpu", "0 stores of 16 bytes"),
        (r"(ld\.\S*\.global)\.v4\.b32", r"\1.v2.b32", "0 polls of 16 bytes"),
    ):
        assert any(report in line for line in narrow_words(tampered("rows-128", pattern, replacement)))


def test_lost_polls_are_reported() -> None:
    call = tampered("rows-128", r"ld\.relaxed\.sys", "ld.weak")
    assert polling_loops(parse(call.ptx)) == 0
    assert not any(is_message(s) and s.starts("ld.") for s in parse(call.ptx))
