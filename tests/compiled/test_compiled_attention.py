"""What the compiler makes of `decode_attention`'s kernel, read from the PTX: no GPU needed."""

import collections
import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxtaxfree import decode_attention
from jaxtaxfree.kernels.decode_attention.portable import decode_attention_kernel
from jaxtaxfree.ops.decode_attention.shapes import SHAPES
from tests.compiled.test_compiled import (
    SHARED_MEMORY,
    Statement,
    bytes_of,
    copies_not_in_flight,
    local_memory,
    loops,
    parse,
    ptxas_report,
    spilled_bytes,
)
from tests.helpers import amd
from tests.helpers.attention_cases import Case
from tests.helpers.attention_parity import operands
from tests.helpers.compiling import names
from tests.helpers.support import Compiled, compile_call, compile_for_amd, mesh_of

case = functools.partial(Case, world=4, b=1, n=64, k=8, h=128, s=8192, dtype="bfloat16")
CASES = {
    "batch-1": case(),
    "batch-8": case(b=8),
    "batch-16": case(b=16),
    "heads": case(output="heads"),
    "tokens-4": case(t=4, lengths=(5000,)),
    "float32": case(dtype="float32"),
    "int8-token": case(cache="int8"),
    "float8-tensor": case(cache="float8_e4m3fn", scales="tensor"),
    "paged-16": case(b=8, page_size=16),
    "paged-64": case(b=8, page_size=64),
    "h-80": case(h=80),
    "h-96": case(h=96),
    "h-192": case(h=192, hv=128),
    "h-256": case(h=256),
    "h-8": case(h=8, hv=128),
    "ring": case(starts=(5000,), lengths=(30000,)),
    "ring-pool-16": case(b=8, page_size=16, kv_layout="KBSH", starts=(5000,) * 8),
    "pool": case(b=8, kv_layout="KBSH"),
    "alone": case(world=1),
}
# Of which each is like two others.
LIKE_OTHERS = ("batch-16", "h-96", "h-192", "paged-64")
each_case = names(CASES, LIKE_OTHERS)
other_gpus = names(("batch-1", "int8-token", "paged-16"), ("int8-token", "paged-16"))


@functools.cache
def compiled(name: str, compute_capability: int = 90) -> Compiled:
    """Compiles the kernel of a call with operands of these shapes on every rank."""
    axis_name = "tp" if CASES[name].world > 1 else ()
    call = functools.partial(decode_attention, axis_name=axis_name, implementation="fused", **CASES[name].keywords)
    arrays = jax.eval_shape(lambda: operands(CASES[name], jax.random.key(0), jnp.int32(0)))
    program: Callable = lambda arrays: call(**arrays)  # noqa: E731
    if axis_name:
        program = jax.shard_map(program, mesh=mesh_of(4), in_specs=P(), out_specs=P("tp"), check_vma=False)
    return compile_call(decode_attention_kernel, program, arrays, compute_capability=compute_capability)


def is_message(statement: Statement) -> bool:
    """Whether it stores or polls words that say by themselves whether they have arrived."""
    return statement.starts("st.", "ld.") and statement.has("global", "relaxed", "sys")


def widths(program: list[Statement], kind: str) -> collections.Counter[int]:
    """How many accesses to messages there are of each number of bytes."""
    return collections.Counter(bytes_of(s) for s in program if is_message(s) and s.starts(kind))


def pieces(call: Compiled) -> int:
    """How many pieces of 16 bytes of its program's result a merging thread has, at least 1."""
    constants = call.constants
    return max(1, constants["MERGE_ROWS"] * constants["HV"] // (4 * 32 * call.options["num_warps"]))


def waits(call: Compiled) -> int:
    """Places that wait, for each piece: for the splits, and for what the ranks send."""
    return 1 + (call.constants["WORLD"] > 1)


def narrow_messages(call: Compiled, program: list[Statement]) -> list[str]:
    """Partial results are sent and polled in 16-byte accesses; only their sums, two of a row, are single words.

    A result of fewer words than its program's threads could store in this way goes out in single words as well.
    """
    wrong, constants = [], call.constants
    ranks = constants["WORLD"] if constants["WORLD"] > 1 else 0  # to whom results are sent
    few = constants["MERGE_ROWS"] * constants["HV"] < 4 * 32 * call.options["num_warps"]
    sends = 1 if few else 1 + ranks  # of a split to this rank, and of its result to each
    stores, polls = widths(program, "st."), widths(program, "ld.")
    narrow, allowed = stores[4] + stores[8], 2 * (1 + ranks * pieces(call)) + (ranks if few else 0)
    if stores[16] < sends:
        wrong.append(f"{stores[16]} stores of 16 bytes in {sends} places that send")
    if narrow > allowed:
        wrong.append(f"{narrow} narrow stores where there are to be {allowed}")
    if polls[16] < 4:
        wrong.append(f"{polls[16]} polls of 16 bytes")
    return wrong


def late_copies(name: str, program: list[Statement]) -> list[str]:
    """As of other kernels, but pages and scales are looked up in single words, and 8-bit tiles come in 8 bytes."""
    case = CASES[name]
    narrow = {"0x4": case.page_size or (case.cache and case.scales == "token"), "0x8": case.cache}
    allowed = [size for size, reason in narrow.items() if reason]
    return [
        report
        for report in copies_not_in_flight(program, "cp.async.c")
        if not (report.startswith("not 16 bytes") and any(f" {size}" in report for size in allowed))
    ]


def polling_loops(program: list[Statement]) -> int:
    """Loops that look at messages until they are there, and do nothing else."""
    found: list[range] = []
    for loop in loops(program):
        if not any(set(inner) <= set(loop) for inner in found) and any(is_message(program[i]) for i in loop):
            found.append(loop)
    return len(found)


@each_case
def test_sm_90(name: str) -> None:
    call = compiled(name)
    program = parse(call.ptx)
    assert ".target sm_90a" in call.ptx
    assert narrow_messages(call, program) == []
    assert late_copies(name, program) == []
    assert polling_loops(program) == waits(call) * pieces(call)
    assert not any(s.starts("membar", "fence") for s in program)
    assert local_memory(call.ptx) == []
    assert 0 < call.shared <= SHARED_MEMORY[90]
    # At other sizes ptxas may spill a few scalars around a wait.
    assert spilled_bytes(ptxas_report(call)) <= (0 if CASES[name].h == 128 else 64)


def copies(name: str) -> collections.Counter[str]:
    """How many copies into shared memory the kernel has, by what they say of their size."""
    text = " ".join(compiled(name).ptx.split())
    return collections.Counter(re.findall(r"cp\.async\.c\w\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", text))


@pytest.mark.parametrize(("name", "plain"), (("ring", "batch-1"), ("ring-pool-16", "paged-16"), ("pool", "batch-8")))
def test_keys_and_values_are_loaded_as_in_other_forms(name: str, plain: str) -> None:
    assert copies(plain)["0x10"] >= 2
    assert copies(name) == copies(plain)


@pytest.mark.parametrize("compute_capability", (80, 100))
@other_gpus
def test_other_nvidia_gpus(name: str, compute_capability: int) -> None:
    call = compiled(name, compute_capability)
    program = parse(call.ptx)
    assert f".target sm_{compute_capability}" in call.ptx
    assert narrow_messages(call, program) == []
    assert late_copies(name, program) == []
    assert polling_loops(program) == waits(call) * pieces(call)
    assert call.shared <= SHARED_MEMORY[compute_capability]


@other_gpus
@pytest.mark.parametrize("architecture", amd.EACH)
def test_amd(name: str, architecture: str) -> None:
    code = compile_for_amd(compiled(name), architecture).asm["amdgcn"]
    assert amd.leaves_and_traps(code)
    assert "mfma" in code
    assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", code) == ["0"]  # scalars find a place in vector registers
    # System scope.
    assert re.search(r"global_store_dwordx?4? .*sc0 sc1", code)
    assert re.search(r"global_load_dwordx?4? .*sc0 sc1", code)


def test_the_listed_shapes_are_those_that_are_compiled() -> None:
    batches = {CASES[name].b for name in ("batch-1", "batch-8", "batch-16")}
    assert {shape.b for shape in SHAPES} == batches
    assert {(shape.n, shape.kv_heads, shape.h) for shape in SHAPES} == {(64, 8, 128)}


def tampered(call: Compiled, pattern: str, replacement: str) -> list[Statement]:
    text, count = re.subn(pattern, replacement, call.ptx)
    assert count, f"nothing to tamper with: {pattern}"
    return parse(text)


def test_narrow_messages_are_reported() -> None:
    call = compiled("batch-8")
    for pattern, replacement, report in (
        (r"st\.relaxed\.sys\.global\.v4\.b32", "st.relaxed.sys.global.v2.b32", "0 stores of 16 bytes"),
        (r"st\.relaxed\.sys", "st.relaxed.gpu", "0 stores of 16 bytes"),
        (r"st\.relaxed\.sys\.global\.v4\.b32", "st.global.v4.b32", "0 stores of 16 bytes"),
        (r"(ld\.\S*\.global)\.v4\.b32", r"\1.v2.b32", "0 polls of 16 bytes"),
    ):
        assert any(report in line for line in narrow_messages(call, tampered(call, pattern, replacement)))


def test_late_copies_are_reported() -> None:
    call = compiled("batch-8")
    assert "not 16 bytes" in late_copies("batch-8", tampered(call, r"\b0x10\b", "0x8"))[0]
    waiting = tampered(call, r"(cp\.async\.wait_group\s+)\d+", r"\g<1>0")
    assert "waits for the newest copy" in late_copies("batch-8", waiting)[0]


def test_lost_polls_are_reported() -> None:
    call = compiled("batch-8")
    assert polling_loops(tampered(call, r"ld\.relaxed\.sys", "ld.weak")) == 0
