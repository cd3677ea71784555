"""What the compiler makes of the collectives' kernels, read from the PTX: no GPU needed."""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.kernels.collectives import portable as collectives
from jaxtaxfree.kernels.collectives.largest import largest_kernel
from jaxtaxfree.ops.collectives.portable import GATHERED_AS_WORDS
from tests.compiled.test_compiled import (
    bytes_of,
    local_memory,
    narrow_remote_stores,
    parse,
    ptxas_report,
    publishes_out_of_order,
    spilled_bytes,
    waits_that_do_not_wait,
)
from tests.compiled.test_compiled_attention import polling_loops, widths
from tests.helpers import amd
from tests.helpers.support import Compiled, compile_call, compile_for_amd, mesh_of

NAMES = ("psum", "all_gather", "psum_scatter", "all_to_all")
# These deliver every pattern of bits, so as words they need a second one for two of them.
COPIES = ("all_gather", "all_to_all")
SMALL = {  # bytes of a rank, dtype
    "2 B": (2, "bfloat16"),
    "2 KB": (2 << 10, "bfloat16"),
    "16 KB": (16 << 10, "bfloat16"),
    "16 KB of f32": (16 << 10, "float32"),
    "1003 B": (1003, "int8"),
    "128 KB": (128 << 10, "bfloat16"),
    "128 KB of f16": (128 << 10, "float16"),
}
LARGE = {
    "2 MB": (2 << 20, "bfloat16"),
    "2 MB of f32": (2 << 20, "float32"),
    "4 MB of int8": (4 << 20, "int8"),
}
each_name = pytest.mark.parametrize("name", NAMES)
# One that adds up and one that copies; the others are made of the same functions.
two_names = pytest.mark.parametrize(
    "name", [name if name in ("psum", "all_to_all") else pytest.param(name, marks=pytest.mark.soak) for name in NAMES]
)


@functools.cache
def compiled(
    name: str, nbytes: int, dtype: str, *, world: int = 4, compute_capability: int = 90, protocol: str | None = None
) -> Compiled:
    """Compiles the kernel of a call with so many bytes of each rank, by the protocol that is chosen by default."""
    keywords: dict[str, Any] = {} if name == "psum" else {"tiled": True}
    if name == "all_to_all":
        keywords |= {"split_axis": 0, "concat_axis": 0}
    if protocol is not None:
        itemsize = jnp.dtype(dtype).itemsize
        blocks = {"messages": 128 // max(1, itemsize // 2), "words": 512 // itemsize, "signals": 8192 // itemsize}
        num_warps = 8 if protocol == "signals" else 1
        keywords["config"] = {"protocol": protocol, "block": blocks[protocol], "num_warps": num_warps}
    call = functools.partial(getattr(jtf, name), axis_name="tp", implementation="fused", **keywords)
    elements = nbytes // jnp.dtype(dtype).itemsize * (world if name in ("psum_scatter", "all_to_all") else 1)
    program = jax.shard_map(call, mesh=mesh_of(world), in_specs=P(), out_specs=P("tp"), check_vma=False)
    kernel = getattr(collectives, f"{name}_kernel")
    return compile_call(
        kernel, program, jax.ShapeDtypeStruct((elements,), dtype), compute_capability=compute_capability
    )


def chosen(name: str, nbytes: int, dtype: str) -> str:
    """The protocol of a call of 4 ranks."""
    more, most = GATHERED_AS_WORDS
    if dtype != "int8" and (name not in COPIES or more < nbytes <= most):
        return "words"
    return "signals" if nbytes > 512 << 10 else "messages"


def shots(call: Compiled) -> int:
    return 1 + call.constants.get("TWO_SHOT", False)


def wrong_messages(call: Compiled) -> list[str]:
    """Every word is sent and polled in 16-byte accesses, behind no fence; in registers alone.

    But those of a copy that decide what another one was, which are few.
    """
    program, world = parse(call.ptx), call.constants["WORLD"]
    stores, polls = widths(program, "st."), widths(program, "ld.")
    # No rank sends itself words.
    words = call.constants["PROTOCOL"] == "words"
    wrong, loops = [], shots(call)
    if words and any(f"{name}_kernel" in call.ptx for name in COPIES):
        loops += world
        del stores[4], polls[4]
    if set(stores) != {16} or stores[16] < (world - words) * shots(call):
        wrong.append(f"stores of messages by bytes: {dict(stores)}")
    if set(polls) != {16} or polls[16] < world * shots(call):
        wrong.append(f"polls by bytes: {dict(polls)}")
    if polling_loops(program) != loops:
        wrong.append(f"{polling_loops(program)} polling loops")
    wrong += [s.text for s in program if s.starts("fence", "membar")]
    return wrong + local_memory(call.ptx)


def wrong_signals(call: Compiled) -> list[str]:
    """Data move in 16-byte accesses, and a wait follows every publish."""
    program = parse(call.ptx)
    wrong = waits_that_do_not_wait(program, shots(call)) + publishes_out_of_order(program)
    loads = [s for s in program if s.starts("ld.global.v")]
    wrong += [f"narrow: {s.text}" for s in loads if bytes_of(s) != 16]
    return wrong + narrow_remote_stores(program) + local_memory(call.ptx)


def wrong(call: Compiled) -> list[str]:
    """What is wrong with a kernel, whatever its protocol."""
    lines = wrong_signals(call) if call.constants["PROTOCOL"] == "signals" else wrong_messages(call)
    if spilled := spilled_bytes(ptxas_report(call)):
        lines.append(f"{spilled} bytes spilled")
    return lines


@pytest.mark.covers(1)
@each_name
@pytest.mark.parametrize("size", SMALL | LARGE)
def test_the_choice_by_size(name: str, size: str) -> None:
    nbytes, dtype = (SMALL | LARGE)[size]
    call = compiled(name, nbytes, dtype)
    assert call.constants["PROTOCOL"] == chosen(name, nbytes, dtype)
    assert wrong(call) == []


@each_name
@pytest.mark.parametrize("protocol", ("messages", "words", "signals"))
@pytest.mark.parametrize("dtype", ("bfloat16", pytest.param("float32", marks=pytest.mark.soak)))
def test_every_protocol(name: str, protocol: str, dtype: str) -> None:
    assert wrong(compiled(name, 16 << 10, dtype, protocol=protocol)) == []


@two_names
@pytest.mark.parametrize("world", (2, 3, 8))
def test_other_worlds(name: str, world: int) -> None:
    assert wrong(compiled(name, 3 << 12, "bfloat16", world=world)) == []
    assert wrong(compiled(name, 3 << 20, "float32", world=world)) == []


@two_names
@pytest.mark.parametrize("compute_capability", (80, 100))
def test_other_nvidia_gpus(name: str, compute_capability: int) -> None:
    for size, wrong in (("16 KB", wrong_messages), ("4 MB of int8", wrong_signals)):
        call = compiled(name, *(SMALL | LARGE)[size], compute_capability=compute_capability)
        assert f".target sm_{compute_capability}" in call.ptx
        assert wrong(call) == []


@two_names
@pytest.mark.parametrize("architecture", amd.EACH)
def test_amd(name: str, architecture: str) -> None:
    for size in ("16 KB", "4 MB of int8"):
        code = compile_for_amd(compiled(name, *(SMALL | LARGE)[size]), architecture).asm["amdgcn"]
        assert amd.leaves_and_traps(code)
        if size == "4 MB of int8":  # by signals
            assert amd.publishes_out_of_order(code) + amd.polls_that_do_not_acquire(code) == []
            assert amd.polling_loops(code) > 0
            assert amd.store_widths(code)["dwordx4"] > 0
        assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", code) == ["0"]
        assert "sc0 sc1" in code  # system scope


def test_no_block_of_a_rank_is_looked_for() -> None:
    """The blocks of the ranks lie in registers of their own: neither shuffles nor shared memory carry them."""
    call = compiled("psum", *SMALL["2 KB"])
    assert call.options["num_warps"] == 1
    assert call.shared == 0
    assert len(re.findall(r"\bshfl\.", call.ptx)) <= 1


@pytest.mark.covers(1)
@each_name
@pytest.mark.parametrize("size", ("2 KB", "128 KB", "1 MB of bf16", "16 KB of i32"))
def test_the_result_waits_for_no_barrier(name: str, size: str) -> None:
    """What has arrived is stored at once: the threads of a program meet afterwards."""
    more = {"1 MB of bf16": (1 << 20, "bfloat16"), "16 KB of i32": (16 << 10, "int32")}
    call = compiled(name, *(SMALL | more)[size])
    assert call.constants["PROTOCOL"] != "signals"
    stores = [match.start() for match in re.finditer(r"\bst\.global\.", call.ptx)]
    barriers = [match.start() for match in re.finditer(r"\b(bar|barrier)\.(?!warp)", call.ptx)]
    assert len(barriers) > 0
    assert stores[0] < barriers[0]


def test_faults_are_reported() -> None:
    call = compiled("psum", *SMALL["16 KB"])
    for pattern, replacement, report in (
        (r"st\.relaxed\.sys\.global\.v4\.b32", "st.relaxed.sys.global.v2.b32", "stores of messages"),
        (r"st\.relaxed\.sys", "st.relaxed.gpu", "stores of messages"),
        (r"ld\.relaxed\.sys", "ld.weak", "0 polling loops"),
    ):
        tampered = Compiled(re.sub(pattern, replacement, call.ptx), call.shared, call.source, call.options)
        assert any(report in line for line in wrong_messages(tampered))


def _largest(dtype: str, compute_capability: int = 90) -> Compiled:
    call = functools.partial(jtf.top_k, k=1, axis_name="tp", implementation="fused")
    program = jax.shard_map(call, mesh=mesh_of(4), in_specs=P(None, "tp"), out_specs=P(None, "tp"), check_vma=False)
    logits = jax.ShapeDtypeStruct((2, 4 * 16032), dtype)
    return compile_call(largest_kernel, program, logits, compute_capability=compute_capability)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute_capability", [80, 90, 100])
def test_the_largest_of_each_row(compute_capability: int, dtype: str) -> None:
    """Nothing is fenced or spilled. Before a barrier a part's loads are all on their way, each of 16 bytes."""
    found = _largest(dtype, compute_capability)
    program = parse(found.ptx)
    assert [s.text for s in program if s.starts("fence", "membar")] == []
    before = itertools.takewhile(lambda s: not s.starts("bar"), program)
    wide = [bytes_of(s) for s in before if s.starts("ld.global.v")]
    assert wide == [16] * (2048 * jnp.dtype(dtype).itemsize // (16 * 128))
    assert "redux.sync.max.s32" in found.ptx
    assert local_memory(found.ptx) == []
    if compute_capability < 100:  # what is assembled elsewhere, too
        assert spilled_bytes(ptxas_report(found)) == 0


@pytest.mark.parametrize("architecture", amd.EACH)
def test_the_largest_of_each_row_on_amd(architecture: str) -> None:
    code = compile_for_amd(_largest("float32"), architecture).asm["amdgcn"]
    assert "s_trap 2" in amd.instructions(code)
    assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", code) == ["0"]
    assert "sc0 sc1" in code  # system scope
