"""What the compiler makes of `ragged_all_to_all`, read from the PTX: no GPU needed."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.kernels import shmem
from jaxtaxfree.kernels.ragged_all_to_all import portable
from tests.compiled.test_compiled import (
    Statement,
    bytes_of,
    local_memory,
    parse,
    places_of,
    ptxas_report,
    publishes_out_of_order,
    spilled_bytes,
    waits_that_do_not_wait,
)
from tests.helpers import amd
from tests.helpers.support import Compiled, compile_call, compile_for_amd, mesh_of


@functools.cache
def compiled(
    dtype: str = "bfloat16", rows: int = 4096, d: int = 2048, *, world: int = 4, capability: int = 90
) -> Compiled:
    call = functools.partial(jtf.ragged_all_to_all, axis_name="tp", implementation="fused")
    program = jax.shard_map(call, mesh=mesh_of(world), in_specs=(P("tp"),) * 6, out_specs=P("tp"), check_vma=False)
    operand = jax.ShapeDtypeStruct((world * rows, d), dtype)
    table = jax.ShapeDtypeStruct((world * world,), jnp.int32)
    kernel = portable.ragged_all_to_all_kernel
    return compile_call(kernel, program, operand, operand, *[table] * 4, compute_capability=capability)


def narrow_moves(program: list[Statement]) -> list[str]:
    """Rows are loaded and stored by 16 bytes, wherever they begin."""
    [place] = places_of(portable.move, "tl.store(")
    file, line = place.split(":")
    # A load is several lines of assembly, one for each register, which count as lines of the source.
    places = [f"{file}:{int(line) + i}" for i in range(4)]
    moves = [s for s in program if s.starts("ld.", "st.") and s.has("global") and s.place in places]
    wrong = [f"{bytes_of(s)} bytes: {s.text}" for s in moves if bytes_of(s) != 16]
    # To the peers, and from the inbox to the result: 16 KB by 8 warps are 4 accesses of a thread, in loops that the
    # compiler may unroll.
    loads, stores = (sum(s.starts(kind) for s in moves) for kind in ("ld.", "st."))
    return wrong if wrong or (loads == stores >= 8 and loads % 4 == 0) else [f"{loads} loads and {stores} stores"]


def wrong(call: Compiled) -> list[str]:
    program = parse(call.ptx)
    lines = waits_that_do_not_wait(program, 1) + publishes_out_of_order(program) + local_memory(call.ptx)
    if spilled := spilled_bytes(ptxas_report(call)):
        lines.append(f"{spilled} bytes spilled")
    return lines


@pytest.mark.parametrize("dtype", ("bfloat16", "float32", "int8", "float8_e4m3fn"))
def test_rows_move_by_16_bytes(dtype: str) -> None:
    call = compiled(dtype)
    assert wrong(call) == []
    assert narrow_moves(parse(call.ptx)) == []


def test_rows_that_nothing_divides() -> None:
    """They move by elements, and are waited for and published alike."""
    call = compiled(d=7)
    assert wrong(call) == []
    assert narrow_moves(parse(call.ptx)) != []


@pytest.mark.parametrize("world", (2, 8))
def test_other_worlds(world: int) -> None:
    call = compiled(world=world)
    assert wrong(call) == []
    assert narrow_moves(parse(call.ptx)) == []


def misreports(program: list[Statement]) -> list[str]:
    """Reports of garbage that the host may read before all of them is there: it polls the state alone."""
    words = places_of(shmem.report_garbage, "tl.store(")
    [state] = places_of(shmem.report_garbage, "tl.atomic_store(")
    after = {*words, state, *places_of(shmem.report_garbage, "tl.debug_barrier(")}
    order = ""
    for s in program:
        if s.place in words and s.starts("st.") and s.has("global"):
            order += "w"
        elif s.place in after and s.starts("bar.sync"):
            order += "b"
        elif s.place == state and s.starts("fence.") and s.has("sys"):
            order += "f"
        elif s.place == state and s.starts("st.") and s.has("sys"):
            order += "s"
    # Of what a rank sends, and of what it receives.
    return [] if re.fullmatch(rf"(b*w{{{len(words)}}}b+fs){{2}}", order) else [order]


@pytest.mark.parametrize("capability", (80, 90, 100))
def test_reports_are_published(capability: int) -> None:
    call = compiled(capability=capability)
    assert misreports(parse(call.ptx)) == []
    for fault in (("bar.sync", "nanosleep.u32"), ("fence.", "prefetch."), ("st.relaxed.sys", "st.relaxed.gpu")):
        assert misreports(parse(call.ptx.replace(*fault))) != [], fault


@pytest.mark.parametrize("capability", (80, 100))
def test_other_nvidia_gpus(capability: int) -> None:
    call = compiled(capability=capability)
    assert f".target sm_{capability}" in call.ptx
    program = parse(call.ptx)
    assert waits_that_do_not_wait(program, 1) + publishes_out_of_order(program) + narrow_moves(program) == []


@pytest.mark.parametrize("architecture", amd.EACH)
def test_amd(architecture: str) -> None:
    code = compile_for_amd(compiled(), architecture).asm["amdgcn"]
    assert amd.publishes_out_of_order(code) + amd.polls_that_do_not_acquire(code) == []
    assert amd.leaves_and_traps(code) and amd.polling_loops(code) > 0
    assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", code) == ["0"]
    assert "sc0 sc1" in code  # system scope


def test_faults_are_reported() -> None:
    call = compiled()
    for pattern, replacement in (
        (r"(atom|red)(\S*)\.sys\.", r"\1\2.gpu."),
        (r"ld(\S*)\.acquire\.sys", r"ld\1.acquire.gpu"),
    ):
        tampered = Compiled(re.sub(pattern, replacement, call.ptx), call.shared, call.source, call.options)
        assert tampered.ptx != call.ptx
        assert any("not at system scope" in line for line in wrong(tampered))
    narrow = call.ptx.replace("st.global.v4.b32", "st.global.v2.b32")
    assert any(line.startswith("8 bytes") for line in narrow_moves(parse(narrow)))
