"""The device API compiles for every target, on a heap of base and stride and on a table of bases."""

import functools
import re

import jax
import numpy as np
import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jaxtaxfree import simulator
from jaxtaxfree.kernels import shmem
from jaxtaxfree.simulator import interpreter
from tests.helpers import amd

TARGETS = [("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64), ("hip", "gfx950", 64)]
# The type of `origin` in the tuple `team`: granules of the built-in heap, or a table as Iris has it.
HEAPS = {"base and stride": "i32", "table": "*i64"}


@triton.jit
def everything(x_ptr, team, inbox, arrived, out_ptr, SIZE: tl.constexpr, WORLD: tl.constexpr):
    me = shmem.start(team)
    box = shmem.scratch(me, inbox, x_ptr.dtype.element_ty)
    element = tl.arange(0, SIZE)
    peer = (me.rank + 1) % me.world
    shmem.put(me, box + element, x_ptr + element, peer)
    shmem.store(me, box + SIZE + element, tl.load(x_ptr + element), peer)
    shmem.signal(me, arrived, peer)
    shmem.signal_all(me, arrived + 1 + me.rank, WORLD)
    ready = shmem.wait(me, arrived, me.epoch, peer) & shmem.wait_all(me, arrived + 1, me.epoch)
    shmem.fence_proxy()
    shmem.get(me, out_ptr + element, box + element, peer)
    value = shmem.load(me, box + SIZE + element, peer)
    tl.store(out_ptr + SIZE + element, tl.where(ready, value, float("nan")))
    shmem.finish(me)


@triton.jit
def messages(x_ptr, team, box, out_ptr, SIZE: tl.constexpr):
    me = shmem.start(team)
    element = tl.arange(0, SIZE)
    words = shmem.messages(me, box) + element
    peer = (me.rank + 1) % me.world
    shmem.send(me, words, tl.load(x_ptr + element), peer)
    value, ready = shmem.receive(me, words, peer)
    half, half_ready = shmem.receive(me, words, peer, element < SIZE // 2)
    tl.store(out_ptr + element, tl.where(ready & half_ready, value + half, float("nan")))
    shmem.finish(me)


@functools.cache
def compile_messages(heap: str, target: tuple) -> dict[str, str]:
    signature = {
        "x_ptr": "*fp32",
        "team": ("*i32", HEAPS[heap], "i32", "i32", "i32", "i32"),
        "box": ("i32", "i32"),
        "out_ptr": "*fp32",
        "SIZE": "constexpr",
    }
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(messages, signature, {"SIZE": 4096}, {(0,): aligned, (3,): aligned})
    return triton.compile(source, target=GPUTarget(*target), options={"enable_fp_fusion": True}).asm


@functools.cache
def compile_everything(heap: str, target: tuple) -> dict[str, str]:
    signature = {
        "x_ptr": "*bf16",
        "team": ("*i32", HEAPS[heap], "i32", "i32", "i32", "i32"),
        "inbox": ("i32", "i32"),
        "arrived": "i32",
        "out_ptr": "*bf16",
        "SIZE": "constexpr",
        "WORLD": "constexpr",
    }
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(everything, signature, {"SIZE": 4096, "WORLD": 4}, {(0,): aligned, (4,): aligned})
    return triton.compile(source, target=GPUTarget(*target), options={"enable_fp_fusion": True}).asm


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_compiles(heap, target):
    for compiled in (compile_everything, compile_messages):
        asm = compiled(heap, target)
        assert asm["ptx"] if target[0] == "cuda" else asm["amdgcn"]


@pytest.mark.parametrize("heap", HEAPS)
def test_remote_accesses_are_16_bytes_wide(heap):
    """Four programs' worth of 16-byte accesses for each of put, store, get and load; nothing narrower for data."""
    ptx = compile_everything(heap, ("cuda", 90, 32))["ptx"]
    per_access = 4096 * 2 // (128 * 16)
    assert len(re.findall(r"\bst\.global\.v4\.b32", ptx)) == 4 * per_access
    assert len(re.findall(r"\bld\.global\.v4\.b32", ptx)) >= 3 * per_access
    assert not re.search(r"\b(ld|st)\.global\.(v[24]\.)?b(8|16)\b", ptx)


@pytest.mark.parametrize("heap", HEAPS)
def test_signals_and_waits_are_of_system_scope(heap):
    ptx = compile_everything(heap, ("cuda", 90, 32))["ptx"]
    assert len(re.findall(r"\bld\.acquire\.sys\.global\.b32", ptx)) == 4  # a first look and a loop for each wait
    assert len(re.findall(r"\bred\.global\.sys\.release\.add", ptx)) == 2
    assert "fence.proxy.async" in ptx


@pytest.mark.parametrize("heap", HEAPS)
def test_messages_are_16_bytes_wide_and_need_no_fence(heap):
    ptx = compile_messages(heap, ("cuda", 90, 32))["ptx"]
    accesses = 4096 * 4 // (128 * 16)
    assert len(re.findall(r"\bst\.relaxed\.sys\.global\.v4\.b32", ptx)) == accesses
    # Two receives, each with a first look and a loop.
    assert len(re.findall(r"\bld\.(?:relaxed\.sys|volatile)\.global\.v4\.b32", ptx)) == 4 * accesses
    assert not re.search(r"\b(ld\.acquire|red|fence|membar)\b", ptx)


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("architecture", amd.ARCHITECTURES)
def test_on_amd_signals_release_and_waits_acquire(architecture, heap):
    """At system scope: signals behind what all waves have stored, in loops what a wait polls."""
    code = compile_everything(heap, ("hip", architecture, 64))["amdgcn"]
    assert amd.publishes_out_of_order(code) == []
    assert amd.polls_that_do_not_acquire(code) == []
    assert amd.polling_loops(code) >= 2  # LLVM makes several of `wait_all`'s
    widths = amd.store_widths(code)
    # Two of put and two of store for each of the two copies that LLVM makes, and what the kernel stores for itself and
    # in reports; an epoch has 8 bytes, the states of two reports 4.
    assert widths == {"dwordx4": 12, "dword": 2, "dwordx2": 1}


@pytest.mark.parametrize("architecture", amd.ARCHITECTURES)
def test_on_amd_a_launch_that_only_loads_leaves_at_once(architecture):
    for compiled in (compile_everything, compile_messages):
        code = compiled("base and stride", ("hip", architecture, 64))["amdgcn"]
        assert amd.leaves_and_traps(code)
        verify = "s_cbranch_scc1 1\ns_trap 2\n"
        assert verify in code  # unless the region is the launch's


def test_on_amd_faults_are_found():
    code = compile_everything("base and stride", ("hip", "gfx942", 64))["amdgcn"]
    for pattern, replacement, what in (
        (r"buffer_wbl2 sc0 sc1", "buffer_wbl2 sc0", "no release"),
        (r"buffer_wbl2 sc0 sc1", "", "no release"),
        (r"s_waitcnt vmcnt\(0\)\nv_mov", "v_mov", "stores may be on their way"),
        (r"s_barrier", "s_nop 0", "no barrier"),
        (r"(global_atomic_add v\S+ v\d+, \S+) sc1", r"\1", "nothing is published"),
    ):
        tampered, count = re.subn(pattern, replacement, code)
        assert count
        assert any(what in line for line in amd.publishes_out_of_order(tampered)), what
    for pattern in (r"buffer_inv sc0 sc1", r"(?<=sc0) sc1"):
        assert amd.polls_that_do_not_acquire(re.sub(pattern, "", code))
    assert not amd.leaves_and_traps(code.replace("s_endpgm\ns_trap 2", "s_nop 0\ns_trap 2"))


@triton.jit
def late(team, arrived, out_ptr, CAME: tl.constexpr, WORLD: tl.constexpr):
    """Each rank raises those of its own signals that CAME has a bit for, and has waited for all in vain."""
    me = shmem.start(team)
    signals = tl.arange(0, WORLD)
    shmem.signal(me, arrived + signals, me.rank, ((CAME >> signals) & 1) != 0)
    shmem.report_signals(me, arrived, me.epoch.to(tl.int32))
    tl.store(out_ptr, 0)
    shmem.finish(me)


@pytest.mark.parametrize(
    ("came", "blamed"), ((0b0000, 0), (0b1110, 0), (0b0001, 1), (0b0101, 1), (0b1011, 2), (0b0111, 3), (0b1111, 3))
)
def test_who_is_blamed(came, blamed, monkeypatch):
    """The first rank that did not come; the last one if all came a moment after the wait."""
    reports = []

    def record(me, *arguments):
        reports.append([int(value.handle.data.reshape(-1)[0]) for value in arguments])

    monkeypatch.setitem(interpreter.convert(shmem.report_signal).fn.__globals__, "_report", record)
    one = jax.ShapeDtypeStruct((1,), np.int32)
    simulator.run(late, world=4, grid=1, out_type=one, signals={"arrived": 4}, calls=1, CAME=came)
    assert reports == [[blamed, 1, came >> blamed & 1, blamed]] * 4
