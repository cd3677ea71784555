"""The real kernels on real GPUs, all of them driven by this process."""

import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest
import triton
import triton.language as tl
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import heap
from jaxtaxfree.kernels import shmem
from tests.helpers import attention_parity, collectives_parity, moe_parity, parity, ragged_dot_parity, ragged_parity
from tests.helpers.rehearsal import needs_real_gpus

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.gpu(4))])
def mesh(request: pytest.FixtureRequest) -> jax.sharding.Mesh:
    return parity.mesh_of(jax.devices("cuda")[: request.param], (request.param,), ("tp",))


each_operation = pytest.mark.parametrize("operation", parity.OPERATIONS, ids=lambda operation: operation.name)


@pytest.mark.parametrize("check", parity.CHECKS, ids=parity.name_of)
def test_parity(check, mesh):
    check(mesh)


@pytest.mark.parametrize("check", attention_parity.CHECKS)
def test_parity_of_decode_attention(check, mesh):
    check(mesh)


@pytest.mark.parametrize("check", collectives_parity.CHECKS)
def test_parity_of_collectives(check, mesh):
    check(mesh)


@pytest.mark.parametrize("check", ragged_parity.CHECKS)
def test_parity_of_ragged_all_to_all(check, mesh):
    check(mesh)


@pytest.mark.parametrize("check", ragged_dot_parity.CHECKS)
def test_parity_of_ragged_dot(check, mesh):
    check(mesh)


@pytest.mark.parametrize("check", moe_parity.CHECKS)
def test_parity_of_moe(check, mesh):
    check(mesh)


@each_operation
def test_meshes(mesh, operation):
    parity.check_meshes(list(mesh.devices.flat), operation)


@each_operation
def test_thousand_repetitions_are_bitwise_equal(mesh, operation):
    parity.check_repetition(mesh, operation)


@each_operation
def test_one_device(operation):
    mesh = parity.mesh_of(jax.devices("cuda")[:1], (1,), ("tp",))
    parity.check_cases(mesh, [(60, 129, 37, jnp.float32), (600, 129, 37, jnp.float32)], operation=operation)


def test_decode_attention_on_one_device():
    """A kernel without peers."""
    mesh = parity.mesh_of(jax.devices("cuda")[:1], (1,), ("tp",))
    attention_parity.check_combinations(mesh, 4)


@pytest.mark.parametrize("check", attention_parity.ALONE)
def test_decode_attention_without_peers(check):
    """Outside of `jax.shard_map`, on one device."""
    check(jax.devices("cuda")[0])


def test_programs_of_two_threads(mesh):
    """Each thread runs its own program on operands of its own, and gets its own results."""
    failures = []

    def run(key: int) -> None:
        try:
            lhs, rhs = parity.operands(128 * key, 256, 256, jnp.float32, mesh, key=key)
            call = parity.gather_matmul(mesh, precision="highest", implementation="fused")
            want = parity.gather_matmul(mesh, precision="highest", implementation="xla")(lhs, rhs)
            for _ in range(100):
                assert parity.error(call(lhs, rhs), want) < parity.TOLERANCE["float32"]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(key,)) for key in (1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures


def give_up(device: jax.Device) -> None:
    """Makes a rank take no part any more, as if a wait of it had expired: its peers find that it does not arrive."""
    needs_real_gpus()
    opened = heap._heap
    for part in opened._own_parts():
        if part.device.id == device.id:
            address = part.address + heap.layout.device.HEADER_FAILED.value
            opened._driver.write(part.device.ordinal, address, (2).to_bytes(4, "little"))


@each_operation
def test_a_rank_that_does_not_arrive_is_named(mesh, operation):
    """The rank before the last one behaves as if it had given up: the others name it, and go on after a reset."""
    missing = mesh.devices.size - 2
    lhs, rhs = parity.operands(64, 128, 128, jnp.float32, mesh, operation=operation)
    heap.set_timeout(1.0)
    heap.reset()
    try:
        call = parity.on_mesh(operation, mesh, implementation="fused", precision="highest")
        want = jtf.block_until_ready(call(lhs, rhs))
        device = mesh.devices.flat[missing]
        give_up(device)
        with pytest.raises(jtf.PeerTimeoutError) as raised:
            result = call(lhs, rhs)
            jtf.block_until_ready(result)
        message = str(raised.value)
        for rank in range(mesh.devices.size):
            blamed = (
                f"rank {rank} (device {mesh.devices.flat[rank].id}) waited 1 s for rank {missing} (device {device.id})"
            )
            assert (blamed in message) == (rank != missing), message
        assert operation.name in message and operation.awaited in message
        assert bool(jnp.isnan(result).any(axis=0).all())
        with pytest.raises(jtf.PeerTimeoutError, match="reset"):
            parity.on_mesh(operation, mesh, implementation="fused")(lhs, rhs)
        heap.reset()
        assert bool(jnp.array_equal(jtf.block_until_ready(call(lhs, rhs)), want))
    finally:
        heap.set_timeout(60.0)
        heap.reset()


@pytest.mark.parametrize(
    "small_call, name, awaited",
    (
        (attention_parity.small_call, "decode_attention", "message merged"),
        (collectives_parity.small_call, "psum", "message parts"),
        (moe_parity.small_call, "moe_dispatch", "signal arrived"),
        (ragged_parity.small_call, "ragged_all_to_all", "signal arrived"),
    ),
    ids=("decode_attention", "psum", "moe", "ragged_all_to_all"),
)
def test_a_rank_that_sends_no_messages_is_named(mesh, small_call, name, awaited):
    """As above, of kernels that wait for messages, and of one outside of the register."""
    missing = mesh.devices.size - 2
    heap.set_timeout(1.0)
    heap.reset()
    try:
        call, arrays = small_call(mesh)
        want = jtf.block_until_ready(call(*arrays))
        device = mesh.devices.flat[missing]
        give_up(device)
        with pytest.raises(jtf.PeerTimeoutError) as raised:
            result = call(*arrays)
            jtf.block_until_ready(result)
        message = str(raised.value)
        for rank in range(mesh.devices.size):
            blamed = (
                f"rank {rank} (device {mesh.devices.flat[rank].id}) waited 1 s for rank {missing} (device {device.id})"
            )
            assert (blamed in message) == (rank != missing), message
        assert name in message and awaited in message
        assert bool(jnp.isnan(result).all())
        heap.reset()
        # What the others had sent in the call that failed is not taken for messages of a later one.
        for _ in range(4):
            assert bool(jnp.array_equal(jtf.block_until_ready(call(*arrays)), want))
    finally:
        heap.set_timeout(60.0)
        heap.reset()


@triton.jit
def late_kernel(team, arrived, out, ALL: tl.constexpr):
    """A wait that gives up in the moment in which the signal comes."""
    me = shmem.start(team)
    if ALL:
        shmem.report_signals(me, arrived, 0)
    else:
        shmem.report_signal(me, arrived, 0, me.rank)
    tl.store(out, 1)
    shmem.finish(me)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("all_ranks", (False, True))
def test_a_signal_that_comes_too_late_is_an_error(all_ranks):
    mesh = parity.mesh_of(jax.devices("cuda")[:1], (1,), ("tp",))

    def call() -> jax.Array:
        one = jax.ShapeDtypeStruct((1,), jnp.int32)
        return jtf.shmem_call(
            late_kernel, axis_name="tp", out_type=one, grid=1, signals={"arrived": 1}, num_warps=1, ALL=all_ranks
        )

    try:
        with pytest.raises(
            jtf.PeerTimeoutError, match=r"rank 0 .* which came too late: program 0 saw 0 of 0 at signal"
        ):
            jtf.block_until_ready(parity.program(mesh, call)())
    finally:
        heap.reset()


def test_the_main_thread_hears_of_it_unasked(mesh):
    lhs, rhs = parity.operands(64, 128, 128, jnp.float32, mesh)
    heap.set_timeout(0.5)
    heap.reset()
    try:
        call = parity.gather_matmul(mesh, implementation="fused")
        jax.block_until_ready(call(lhs, rhs))
        give_up(mesh.devices.flat[0])
        with pytest.raises(jtf.PeerTimeoutError, match="did not arrive"):
            jax.block_until_ready(call(lhs, rhs))
            for _ in range(500):
                time.sleep(0.01)
    finally:
        heap.set_timeout(60.0)
        heap.reset()


def test_a_closed_heap_opens_again(mesh):
    lhs, rhs = parity.operands(64, 128, 128, jnp.float32, mesh)
    call = parity.gather_matmul(mesh, implementation="fused")
    before = call(lhs, rhs)
    heap.close()
    assert bool(jnp.array_equal(call(lhs, rhs), before))


def start_python(code: str, memory: str = "0.15") -> subprocess.Popen:
    needs_real_gpus()
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": memory},
    )


def run_python(code: str, memory: str = "0.15", timeout: float = 120) -> subprocess.CompletedProcess:
    process = start_python(code, memory)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


PROGRAM = """
import sys, jax, jax.numpy as jnp
from tests.helpers import parity
devices = jax.devices("cuda")
mesh = parity.mesh_of(devices, (len(devices),), ("tp",))
lhs, rhs = parity.operands(512, 256, 512, jnp.float32, mesh)
call = parity.gather_matmul(mesh, implementation="fused", precision="highest")
"""


TOGETHER = 10  # processes that share the GPUs, which keeps the test short and the starts uneven
COLD_CASES = """[
    (512, 256, 512, jnp.float32),
    (8, 256, 512, jnp.bfloat16),  # on Hopper a kernel of its own, and so has the next one
    (2048, 256, 2568 * len(devices), jnp.bfloat16),
]"""


@pytest.mark.slow
def test_twenty_cold_starts():
    """A fresh process compiles, loads and runs without a hang."""
    check = PROGRAM + f"parity.check_cases(mesh, {COLD_CASES})"
    for _ in range(20 // TOGETHER):
        processes = [start_python(check, memory="0.02") for _ in range(TOGETHER)]
        for process in processes:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors[-2000:]


@pytest.mark.slow
def test_a_serialized_program_does_not_run_without_its_heap(tmp_path):
    """Loaded in a process that has no such region, it ends in an error rather than in numbers."""
    path = str(tmp_path / "program")
    save = run_python(
        PROGRAM
        + f"""
import pickle
from jax.experimental import serialize_executable
compiled = call.lower(lhs, rhs).compile()
open({path!r}, "wb").write(pickle.dumps(serialize_executable.serialize(compiled)))
"""
    )
    assert save.returncode == 0, save.stderr[-2000:]
    load = run_python(
        PROGRAM
        + f"""
import pickle
from jax.experimental import serialize_executable
loaded = serialize_executable.deserialize_and_load(*pickle.loads(open({path!r}, "rb").read()))
print("result", jax.block_until_ready(loaded(lhs, rhs)).sum())
"""
    )
    assert load.returncode != 0 and "result" not in load.stdout
    assert "ILLEGAL" in load.stderr or "INTERNAL" in load.stderr or "FAILED" in load.stderr, load.stderr[-2000:]


@pytest.mark.slow
def test_an_exported_program_traps():
    run = run_python(
        PROGRAM
        + """
import jax_triton
from jax import export
allowed = [export.DisabledSafetyCheck.custom_call(jax_triton.CUSTOM_CALL_TARGET_NAME)]
exported = export.export(call, platforms=("cuda",), disabled_checks=allowed)(lhs, rhs)
print("result", jax.block_until_ready(export.deserialize(exported.serialize()).call(lhs, rhs)).sum())
"""
    )
    assert run.returncode != 0 and "result" not in run.stdout, run.stdout
    assert "CUDA_ERROR" in run.stderr, run.stderr[-2000:]


INDEPENDENT = """
import os
os.environ["XLA_FLAGS"] = GIVEN + " --xla_gpu_graph_min_graph_size=1"
import jax, jax.numpy as jnp, numpy as np
import jaxtaxfree as jtf
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((1,), ("tp",))
draw = np.random.default_rng(0)
xs = [jnp.asarray(draw.integers(-2, 3, (16, 512)), jnp.bfloat16) for _ in range(8)]
w = jnp.asarray(draw.integers(-1, 2, (512, 1024)), jnp.bfloat16)

def program(implementation):
    def products(xs, w):
        return [jtf.all_gather_matmul(x, w, "tp", implementation=implementation) for x in xs]

    def local(xs, w):
        def step(i, sums):
            return [a + b for a, b in zip(sums, products([x * (1 + i % 3) for x in xs], w))]
        return jax.lax.fori_loop(0, 50, step, [jnp.zeros((16, 1024), jnp.bfloat16)] * 8)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))

wanted = program("xla")(xs, w)
for _ in range(20):
    for found, value in zip(jtf.block_until_ready(program("fused")(xs, w)), wanted):
        assert jnp.array_equal(found, value)
"""


@pytest.mark.gpu(1)
@pytest.mark.parametrize("mode", (None, "SERIALIZE", "LHS"))
def test_calls_that_do_not_depend_on_each_other(mode):
    """They share a region, so they must run one after the other in a CUDA graph, too."""
    flags = f"--xla_gpu_command_buffer_scheduling_mode={mode}" if mode else ""
    run = run_python(INDEPENDENT.replace("GIVEN", repr(flags)))
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.gpu(1)
def test_calls_that_would_run_at_once_are_refused():
    flags = "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT"
    run = run_python(INDEPENDENT.replace("GIVEN", repr(flags)))
    assert run.returncode != 0 and f"with {flags} in XLA_FLAGS" in run.stderr, run.stderr[-2000:]


@pytest.mark.slow
def test_memory_that_is_not_there_is_an_error_with_sizes():
    run = run_python(PROGRAM + "parity.check_cases(mesh, [(262144, 16384, 512, jnp.bfloat16)])", memory="0.6")
    assert run.returncode != 0
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in run.stderr and "MiB are free" in run.stderr, run.stderr[-2000:]


def test_the_custom_kernel_example():
    run = run_python("import runpy; runpy.run_path('examples/custom_kernel.py', run_name='__main__')")
    assert run.returncode == 0, run.stderr[-2000:]
    assert "True" in run.stdout


def test_outputs_vary_along_the_axis(mesh):
    lhs, rhs = parity.operands(64, 128, 128, jnp.float32, mesh)
    local = jax.shard_map(
        lambda a, b: jtf.all_gather_matmul(a, b, "tp"), mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P()
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(local)(lhs, rhs)
