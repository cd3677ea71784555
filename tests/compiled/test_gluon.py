"""Gluon kernels in `shmem_call`: what they lower to and what is refused, without a GPU, and that they run, with two."""

import functools
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import jaxtaxfree as jtf
from jaxtaxfree import call as call_module
from jaxtaxfree import heap, shmem_call
from jaxtaxfree.gluon import _not_assembled
from jaxtaxfree.kernels import shmem
from tests.compiled.test_compiled import (
    is_barrier,
    local_memory,
    narrow_remote_stores,
    parse,
    publishes_out_of_order,
    waits_that_do_not_wait,
)
from tests.gpu.test_gpu import give_up
from tests.helpers import parity
from tests.helpers.gluon_kernels import BLOCK, PROGRAMS, exchange, exchange_by_xla
from tests.helpers.support import TRITON_CALL, fails, lower_for_cuda, mesh_of, sharded

SHAPE = (2 * BLOCK[0] * PROGRAMS, BLOCK[1])  # of one rank: two tiles for each program

descriptors_of_both_kinds = pytest.mark.parametrize("own_descriptor", (False, True), ids=("pointer", "descriptor"))


def on_mesh(mesh: Mesh, function: Callable, **keywords: Any) -> Callable:
    return jax.shard_map(function, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), **keywords)


def operand(mesh: Mesh, shape: tuple[int, ...] = SHAPE, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return sharded(mesh, P("tp"), (shape[0] * mesh.shape["tp"], *shape[1:]), dtype)


def lower(function: Callable = exchange, **operand_: Any) -> str:
    mesh = mesh_of(4)
    return lower_for_cuda(on_mesh(mesh, function), operand(mesh, **operand_))


def launch_of(program: str) -> dict[int, Any]:
    """The fields of the one kernel that a program launches, by their numbers in jaxlib's triton.proto."""
    (launch,) = launches_of(program)
    return launch


def launches_of(program: str) -> list[dict[int, Any]]:
    """The fields of each kernel that a program launches."""
    escaped = re.findall(r'opaque = "(.*?)"}', program)
    assert len(escaped) == program.count(TRITON_CALL)
    return [_kernel_of(each) for each in escaped]


def _kernel_of(escaped: str) -> dict[int, Any]:
    opaque = re.sub(r"\\([0-9A-F]{2})|\\(.)", lambda m: chr(int(m[1], 16)) if m[1] else m[2], escaped)
    message = zlib.decompress(opaque.encode("latin1"))
    for _ in range(3):  # TritonAnyKernelCall, TritonKernelCall, TritonKernel
        fields = fields_of(message)
        message = fields[1]
    return fields


def fields_of(message: bytes) -> dict[int, Any]:
    """The fields of an encoded protocol buffer: whole numbers, or bytes."""

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    fields, at = {}, 0
    while at < len(message):
        number, kind = divmod(varint(), 8)
        value = varint()
        if kind == 2:
            value, at = message[at : at + value], at + value
        fields[number] = value
    return fields


NAME, WARPS, SHARED_MEMORY, PTX, GLOBAL_SCRATCH_SIZE = 1, 2, 3, 4, 12


def test_what_is_launched_is_not_assembled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """jaxlib assembles it. Who has a hook in Triton's compiler keeps it."""
    asked = []

    def theirs(*of: Any) -> tuple[str, str] | None:
        asked.append(len(of))
        return None if of else ("key", "digest")

    monkeypatch.setitem(vars(triton.knobs.cache), "dir", str(tmp_path))
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", theirs)
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda *_: pytest.fail("ptxas runs"))
    lower()
    assert asked == [0, 5]  # what it changes, and to change it
    assert triton.knobs.runtime.add_stages_inspection_hook is theirs


def test_what_other_threads_compile_is_assembled() -> None:
    with _not_assembled(), ThreadPoolExecutor(1) as pool:
        hook, stages = triton.knobs.runtime.add_stages_inspection_hook, {"cubin": "theirs"}
        assert pool.submit(hook).result() == ("", "")
        pool.submit(hook, None, stages, None, None, None).result()
        assert stages == {"cubin": "theirs"}
        hook(None, stages, None, None, None)
        assert stages["cubin"]("", {}) == b""


def test_threads_that_compile_side_by_side_keep_the_hook_until_the_last() -> None:
    knobs, first = triton.knobs.runtime, _not_assembled()
    before = knobs.add_stages_inspection_hook
    with ThreadPoolExecutor(1) as pool:
        pool.submit(first.__enter__).result()
        with _not_assembled():
            pool.submit(first.__exit__, None, None, None).result()
            assert knobs.add_stages_inspection_hook() == ("-not-assembled", "-not-assembled")
    assert knobs.add_stages_inspection_hook is before


@descriptors_of_both_kinds
def test_one_launch_with_the_warps_of_all_partitions(own_descriptor: bool) -> None:
    kernel = launch_of(lower(functools.partial(exchange, own_descriptor=own_descriptor)))
    ptx = kernel[PTX].decode()
    assert kernel[NAME] == b"exchange_kernel"
    assert kernel[WARPS] == 8  # 4 to send, 1 to load, 2 to receive; rounded up to a multiple of 4
    assert f".reqntid {32 * kernel[WARPS]}" in ptx
    assert kernel[SHARED_MEMORY] >= 3 * 2 * BLOCK[0] * BLOCK[1]
    assert ".target sm_90a" in ptx and ".version 8.8" in ptx
    assert len(re.findall(r"\.param \.align 64 \.b8 \w+\[128\]", ptx)) == 2  # a descriptor of x and one of the result
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared::cta\.global", ptx)) == (3 if own_descriptor else 2)
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta", ptx)) == 1
    assert ("tensormap.replace" in ptx) == own_descriptor
    assert "mbarrier.try_wait" in ptx
    assert local_memory(ptx) == []
    program = parse(ptx)
    assert narrow_remote_stores(program) == []
    assert publishes_out_of_order(program) == []
    assert waits_that_do_not_wait(program, 1) == []


def test_barriers_are_those_of_a_partition() -> None:
    # Barriers of all warps would wait for partitions that are elsewhere.
    program = parse(launch_of(lower(functools.partial(exchange, own_descriptor=True)))[PTX].decode())
    barriers = {s.text for s in program if is_barrier(s)}
    assert {re.sub(r"\s+", " ", barrier) for barrier in barriers} == {
        "barrier.sync 1",
        "bar.sync 0, 128",
        "bar.sync 3, 64",
    }


def test_own_descriptors_lie_in_memory_of_the_program() -> None:
    # Memory that jaxlib would allocate at each launch cannot be part of a CUDA graph.
    program = lower(functools.partial(exchange, own_descriptor=True))
    assert f"tensor<{128 * PROGRAMS}xui8>" in program
    assert GLOBAL_SCRATCH_SIZE not in launch_of(program)
    assert "xui8>" not in lower()


def test_the_launch_that_loads_the_module_has_the_same_code() -> None:
    mesh = mesh_of(2)
    programs = []
    launch = jtf.shmem._launch

    def twice(*args: Any, **params: Any) -> Any:
        tiny = jtf.shmem._tiny(2)
        load = functools.partial(launch, **params, position=shmem.POSITION_LOAD_ONLY.value, programs=1)
        programs.append(lower_for_cuda(load, jax.ShapeDtypeStruct(tiny, "bfloat16")))
        return launch(*args, **params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jtf.shmem, "_launch", twice)
        program = lower_for_cuda(on_mesh(mesh, exchange), operand(mesh))
    (load,) = programs
    assert launch_of(load) == launch_of(program)


def test_a_launch_that_loads_leaves_by_the_end_of_the_kernel() -> None:
    # Warps of partitions wait for orders: those of the first one may not just be gone.
    ptx = launch_of(lower())[PTX].decode()
    leave = re.search(r"setp\.eq\.b32\s+(%p\d+), %r\d+, -1;\s*(?:\.loc.*\s*)?@\1 bra\s+(\$L__BB0_\d+);", ptx)
    assert leave and leave.start() < ptx.index("exit;")
    end = ptx[ptx.index(f"{leave[2]}:") :]
    assert re.match(r"\S+:\s*(?:\.loc.*\s*)?st\.shared\.b32\s.*;\s*(?:\.loc.*\s*)?barrier\.sync\s+1;", end)


@gluon.jit
def scale_kernel(
    x_ptr, x_desc, scale, offset, negative, team, out_ptr, SIZE: gl.constexpr, NUMBERS: gl.constexpr = (1, 2)
):
    """An operand in two ways, numbers, and a parameter with a default."""
    me = shmem.start(team)
    IN_LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    element = gl.arange(0, SIZE, IN_LANES)
    value = gl.load(x_ptr + element) * scale + offset + NUMBERS[1] + x_desc.shape[0]
    gl.store(out_ptr + element, gl.where(negative, -value, value))
    shmem.finish(me)


def scale(x: jax.Array, **changed: Any) -> jax.Array:
    arguments = {
        "axis_name": "tp",
        "out_type": x,
        "grid": (1, 1),
        "descriptors": {"x_desc": (16,)},
        "scale": 2.5,
        "offset": 3,
        "negative": True,
        "SIZE": x.size,
        "num_warps": 2,
    }
    return shmem_call(scale_kernel, x, x, **arguments | changed)


def test_an_operand_in_two_ways() -> None:
    kernel = launch_of(lower(scale, shape=(64,), dtype="float32"))
    assert kernel[WARPS] == 2
    assert ".reqntid 64" in kernel[PTX].decode()


@gluon.jit
def wrong_kernel(x_ptr, team, out_ptr, SIZE: gl.constexpr, WRONG: gl.constexpr):
    me = shmem.start(team)
    IN_LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps() * (2 if WRONG == "warps" else 1)], [0])
    element = gl.arange(0, SIZE, IN_LANES)
    if WRONG == "name":
        gl.store(out_ptr + element, no_such_name)  # noqa: F821
    if WRONG == "memory":
        LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        buffer = gl.allocate_shared_memory(gl.float32, [64, SIZE], LAYOUT)
        gl.store(out_ptr + element, buffer.index(0).load(IN_LANES))
    shmem.finish(me)


@pytest.mark.parametrize(
    ("wrong", "parts"),
    (
        (
            "name",
            (
                "does not compile: compiled/test_gluon.py:",
                " in wrong_kernel, `gl.store(out_ptr + element, no_such_name)  # noqa: F821`: ",
                "`: NameError('no_such_name is not defined').",
            ),
        ),
        ("warps", ("does not compile: ",)),
        ("memory", (f"needs {4 * 64 * 1024} bytes of shared memory, of which there are 232448: take smaller blocks",)),
    ),
)
def test_a_kernel_that_does_not_compile(wrong: str, parts: tuple[str, ...]) -> None:
    call = functools.partial(shmem_call, wrong_kernel, axis_name="tp", grid=1, SIZE=1024, WRONG=wrong)
    of = "The kernel wrong_kernel of wrong_kernel, for compute capability 9.0 with num_warps=4, "
    with fails(jtf.CompileError, of, f"SIZE=1024, WRONG={wrong!r}", *parts):
        lower(lambda x: call(x, out_type=x), shape=(1024,), dtype="float32")


@gluon.jit
def waiting_kernel(x_ptr, team, arrived, out_ptr):
    me = shmem.start(team)
    shmem.wait(me, arrived, me.epoch, 0)
    shmem.finish(me)


def test_waits_of_triton_kernels_are_refused() -> None:
    # They are for all warps of a block together.
    call = functools.partial(shmem_call, waiting_kernel, axis_name="tp", grid=1, signals={"arrived": 1})
    with pytest.raises(Exception) as raised:
        lower(lambda x: call(x, out_type=x))
    causes = [raised.value]
    while causes[-1].__cause__:
        causes.append(causes[-1].__cause__)
    assert "shmem_gluon.wait" in str(causes[-1])


def test_newer_nvidia_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "100")
    assert ".target sm_100a" in launch_of(lower())[PTX].decode()


def test_in_loops() -> None:
    program = lower(lambda x: lax.fori_loop(0, 3, lambda _, x: exchange(x, own_descriptor=True), x))
    assert "stablehlo.while" in program
    launch_of(program)


@pytest.mark.parametrize("own_descriptor", (True, False))
def test_xla_takes_no_slice_of_what_would_run_twice(monkeypatch: pytest.MonkeyPatch, own_descriptor: bool) -> None:
    """Scratch memory for descriptors is a result of the launch: with it there are several."""
    monkeypatch.setattr(call_module, "RUNS_TWICE_WITH_SLICES", True)
    program = lower(lambda x: exchange(x, own_descriptor=own_descriptor))
    assert program.count("stablehlo.optimization_barrier") == own_descriptor


def test_older_nvidia_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "80")
    with fails(NotImplementedError, "exchange_kernel is a Gluon kernel", "9.0 and higher", "lowered for 8.0"):
        lower()


LOWERED = """
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf

mesh = jax.make_mesh((2,), ("tp",))


def local(x, w):
    return {call}


call = jax.shard_map(local, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
x, w = jnp.ones((512, 512), "{dtype}"), jnp.ones((512, 512), "{dtype}")
print(jax.jit(call).trace(x, w).lower(lowering_platforms=("cuda",)).as_text().count("triton_kernel_call_ffi"))
"""


@pytest.mark.parametrize(
    ("call", "dtype"),
    (
        # The last one launches a kernel of each kind.
        pytest.param('jtf.all_gather_matmul(x, w, "tp", implementation="fused")', "float32", marks=pytest.mark.soak),
        pytest.param('jtf.all_gather_matmul(x, w, "tp", implementation="fused")', "bfloat16", marks=pytest.mark.soak),
        ('jtf.matmul_all_reduce(x[:16], w, "tp", implementation="fused")', "bfloat16"),
        ('jtf.psum(jtf.matmul_reduce_scatter(x, w, "tp", implementation="fused"), "tp")', "bfloat16"),
    ),
    ids=("triton", "gluon", "gluon of few rows", "both"),
)
def test_a_process_that_lowered_a_kernel_ends_without_a_word(call: str, dtype: str) -> None:
    """nanobind reports what is left of Triton at the end of a process."""
    # What is found in Triton's cache leaves nothing behind.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "TRITON_ALWAYS_COMPILE": "1"}
    command = [sys.executable, "-c", LOWERED.format(call=call, dtype=dtype)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, int(done.stdout)) == (0, "", call.count("jtf."))


@pytest.mark.parametrize("platform, kind", (("cpu", "cpu"), ("rocm", "gfx942")))
def test_other_platforms_are_refused(platform: str, kind: str) -> None:
    mesh = mesh_of(4)
    with fails(NotImplementedError, "exchange_kernel is a", "for NVIDIA GPUs", f"lowered for {kind}"):
        lower_for_cuda(on_mesh(mesh, exchange), operand(mesh), platforms=(platform,))


def test_unknown_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    with fails(NotImplementedError, "exchange_kernel is a Gluon kernel", "known for Triton 3.9", "not for 3.10.0"):
        lower()


def test_rows_that_tma_cannot_take() -> None:
    with fails(NotImplementedError, "exchange_kernel moves bfloat16[256, 60] by TMA", "multiple of 16 bytes"):
        lower(shape=(SHAPE[0], 60))


@pytest.mark.parametrize(
    ("changed", "part"),
    (
        ({"descriptors": {"y_desc": BLOCK}}, "it has no pointer 'y_desc' to be a descriptor"),
        ({"descriptors": {"team": BLOCK}}, "it has no pointer 'team' to be a descriptor"),
        ({"descriptors": {"x_desc": (32,)}}, "'x_desc' is an array [256, 64], and its descriptor has blocks [32]"),
        (
            {"descriptors": {"x_desc": ((16, 64), (128, 64))}},
            "'x_desc' is an array [256, 64], and its descriptor reads it as [128, 64]",
        ),
        (
            {"descriptors": {"x_desc": ((32,), (128, 128))}},
            "'x_desc' is an array [128, 128], and its descriptor has blocks [32]",
        ),
    ),
)
def test_descriptors_do_not_fit(changed: dict[str, Any], part: str) -> None:
    with fails(TypeError, "The kernel of exchange_kernel does not fit its call", part):
        lower(functools.partial(exchange, **changed))


@triton.jit
def triton_kernel(x_ptr, team, out_ptr):
    me = shmem.start(team)
    shmem.finish(me)


@triton.jit
def late_team_kernel(x_ptr, out_ptr, team):
    me = shmem.start(team)
    shmem.finish(me)


def test_team_stands_before_the_results() -> None:
    # jaxlib takes operands first, and the team's first element is one.
    with fails(TypeError, "The kernel of late_team_kernel does not fit", "its results do not stand behind 'team'"):
        lower(lambda x: shmem_call(late_team_kernel, x, axis_name="tp", grid=1, out_type=x))


def test_no_descriptors_for_triton_kernels() -> None:
    call = functools.partial(shmem_call, triton_kernel, axis_name="tp", grid=1, descriptors={"x_ptr": BLOCK})
    with fails(TypeError, "descriptors are for Gluon kernels"):
        lower(lambda x: call(x, out_type=x))


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.gpu(4))])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    return parity.mesh_of(jax.devices("cuda")[: request.param], (request.param,), ("tp",))


def random(mesh: Mesh, key: int = 0) -> jax.Array:
    shape = (SHAPE[0] * mesh.size, SHAPE[1])
    return jax.device_put(jax.random.normal(jax.random.key(key), shape, jnp.bfloat16), jax.NamedSharding(mesh, P("tp")))


@pytest.mark.gpu(2)
@descriptors_of_both_kinds
@pytest.mark.parametrize("check_vma", (True, False))
def test_calls_again_and_again(mesh: Mesh, own_descriptor: bool, check_vma: bool) -> None:
    # From the second call on XLA plays a CUDA graph.
    call = jax.jit(on_mesh(mesh, functools.partial(exchange, own_descriptor=own_descriptor), check_vma=check_vma))
    want = jax.jit(on_mesh(mesh, exchange_by_xla))
    for key in range(50):
        x = random(mesh, key)
        assert bool(jnp.array_equal(jtf.block_until_ready(call(x)), want(x))), key


@pytest.mark.gpu(2)
@descriptors_of_both_kinds
def test_calls_in_a_loop(mesh: Mesh, own_descriptor: bool) -> None:
    def program(x: jax.Array) -> jax.Array:
        def body(i: jax.Array, x: jax.Array) -> jax.Array:
            x = exchange(x, own_descriptor=own_descriptor)
            return exchange(x + i.astype(x.dtype), own_descriptor=own_descriptor)

        return lax.fori_loop(0, 100, body, x)

    x = jnp.round(random(mesh))
    want = functools.reduce(lambda x, i: x + jnp.bfloat16(i), range(100), x)
    for _ in range(3):
        assert bool(jnp.array_equal(jtf.block_until_ready(jax.jit(on_mesh(mesh, program))(x)), want))


@pytest.mark.gpu(2)
def test_operands_in_two_ways_and_numbers(mesh: Mesh) -> None:
    x = jnp.arange(64.0 * mesh.size)
    want = -(x * 2.5 + 3 + 2 + 64)
    assert bool(jnp.array_equal(jtf.block_until_ready(jax.jit(on_mesh(mesh, scale))(x)), want))


@pytest.mark.gpu(2)
@descriptors_of_both_kinds
def test_a_partner_that_does_not_arrive_is_named(mesh: Mesh, own_descriptor: bool) -> None:
    x = random(mesh)
    heap.set_timeout(1.0)
    heap.reset()
    try:
        call = jax.jit(on_mesh(mesh, functools.partial(exchange, own_descriptor=own_descriptor)))
        want = jtf.block_until_ready(call(x))
        give_up(mesh.devices.flat[0])
        with pytest.raises(jtf.PeerTimeoutError) as raised:
            result = call(x)
            jtf.block_until_ready(result)
        devices = [device.id for device in mesh.devices.flat]
        assert f"rank 1 (device {devices[1]}) waited 1 s for rank 0 (device {devices[0]})" in str(raised.value)
        assert "arrived[" in str(raised.value)
        assert np.isnan(np.asarray(result.addressable_shards[1].data, np.float32)).all()
        heap.reset()
        assert bool(jnp.array_equal(jtf.block_until_ready(call(x)), want))
    finally:
        heap.set_timeout(60.0)
        heap.reset()
