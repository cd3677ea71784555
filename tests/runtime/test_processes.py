"""The real kernels with one process per rank, which meet through jax.distributed: one per GPU, or all on one GPU.

Processes that share a GPU take turns of a few milliseconds. That is slow, but a program that spins does not keep its
peer from running, so that one GPU tests any number of ranks.
"""

import os
import re
import socket
import subprocess
import sys
import textwrap
from typing import Any

import pytest

PROLOGUE = """
import sys
import jax
rank, world, port = map(int, sys.argv[1:4])
jax.distributed.initialize(f"127.0.0.1:{port}", world, rank, local_device_ids=[LOCAL])
import jax.numpy as jnp
import jaxtaxfree as jtf
from jaxtaxfree import heap
from tests.gpu import test_gpu_hopper
from tests.helpers import attention_parity, collectives_parity, parity, step_parity
devices = jax.devices("cuda")
mesh = parity.mesh_of(devices, (world,), ("tp",))
"""


def run_processes(world: int, body: str, *, gpus: str = "own", timeout: float = 300) -> list[str]:
    """Runs a program in `world` processes; returns what each wrote.

    Args:
      gpus: each process has its "own", or sees its own alone ("isolated", by CUDA_VISIBLE_DEVICES), or they share the
        first one ("shared").
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = PROLOGUE.replace("LOCAL", "rank" if gpus == "own" else "0") + textwrap.dedent(body)
    processes = []
    for rank in range(world):
        environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3", "JAX_PLATFORMS": "cuda"}
        if gpus == "isolated":
            environment["CUDA_VISIBLE_DEVICES"] = str(rank)
        elif gpus == "shared":
            environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
            environment["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
            # NCCL refuses two ranks on one GPU, unless it takes them for those of two hosts.
            environment |= {"NCCL_HOSTID": f"rank {rank} of {port}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), str(world), str(port)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        return [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def check_processes(world: int, body: str, **where: Any) -> None:
    """Runs checks, which raise, in such processes; the arguments are those of `run_processes`."""
    body = textwrap.dedent(body) + '\nprint("rank", rank, "agrees")'
    for rank, output in enumerate(run_processes(world, body, **where)):
        assert f"rank {rank} agrees" in output, output[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, gpus",
    [
        pytest.param(2, "isolated", marks=pytest.mark.gpu(2)),
        pytest.param(4, "own", marks=pytest.mark.gpu(4)),
    ],
)
def test_parity(world, gpus):
    body = """
    for operation in parity.OPERATIONS:
        parity.check_repetition(mesh, operation)
    attention_parity.check_mixture(mesh)
    """
    check_processes(world, body, gpus=gpus)


CHECKS = {
    "portable": """
        for operation in parity.OPERATIONS:
            parity.check_odd_shapes(mesh, operation)
    """,
    "hopper": """
        for operation in test_gpu_hopper.OPERATIONS:
            test_gpu_hopper.test_values(mesh, operation)
            assert test_gpu_hopper.wrong_repetitions(operation, mesh, 20) == 0
    """,
    "few_rows": """
        for kind in ("gather", "scatter", "1", "2"):
            test_gpu_hopper.test_few_rows(mesh, kind)
    """,
    "collectives": """
        collectives_parity.check_dtypes_and_odd_sizes(mesh)
        collectives_parity.check_order_of_sums(mesh)
        collectives_parity.check_many_calls(mesh, 200)
    """,
    "attention": """
        attention_parity.check_features(mesh)
        attention_parity.check_mixture(mesh)
    """,
    "decode_step": """
        step_parity.check_cases(mesh)
        step_parity.check_repetition(mesh, 50)
    """,
    "decode_step of 8 bits and in pages": """
        for check in (step_parity.check_eight_bits, step_parity.check_caches, step_parity.check_pages):
            check(mesh, "hopper")
    """,
}
HOPPER = re.compile("hopper|step_parity")  # in checks of kernels that are for it alone


@pytest.mark.slow
@pytest.mark.parametrize("world", (4, 8))
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=pytest.mark.gpu(1, "9.0") if HOPPER.search(body) else pytest.mark.gpu(1))
        for check, body in CHECKS.items()
    ],
)
def test_parity_of_ranks_that_share_a_gpu(world, check):
    check_processes(world, CHECKS[check], gpus="shared", timeout=900)


@pytest.mark.soak
@pytest.mark.gpu(1, "9.0")
@pytest.mark.parametrize("world", (4, 8))
@pytest.mark.parametrize("seed", range(17))
def test_random_shapes_of_ranks_that_share_a_gpu(world, seed):
    body = f"for operation in parity.OPERATIONS: test_gpu_hopper.test_random_shapes(mesh, operation, {seed})"
    check_processes(world, body, gpus="shared", timeout=900)


@pytest.mark.soak
@pytest.mark.gpu(1, "9.0")
@pytest.mark.parametrize("world", (4, 8))
@pytest.mark.parametrize("kind", ("gather", "scatter", "1", "2"))
def test_few_rows_a_thousand_times_on_ranks_that_share_a_gpu(world, kind):
    body = """
    for m, columns in ((16, 2048), (256, 2048), (144, 18432)):
        test_gpu_hopper.test_few_rows_a_thousand_times(mesh, KIND, m, columns)
    """
    check_processes(world, body.replace("KIND", repr(kind)), gpus="shared", timeout=900)


each_placement = pytest.mark.parametrize(
    "world, gpus",
    [
        pytest.param(4, "shared", marks=pytest.mark.gpu(1)),
        pytest.param(2, "own", marks=pytest.mark.gpu(2)),
        pytest.param(4, "own", marks=pytest.mark.gpu(4)),
    ],
)


def name_the_last_process(world, gpus, call, name):
    """The last process builds the program of a call and its operands, and does not run it the second time."""
    body = """
    import os, time
    from tests.helpers import moe_parity, ragged_parity
    heap.set_timeout(2.0)
    call, operands = CALL
    jtf.block_until_ready(call(*operands))
    if rank == world - 1:
        time.sleep(8)
    else:
        start = time.monotonic()
        try:
            jtf.block_until_ready(call(*operands))
        except jtf.PeerTimeoutError as error:
            print(f"rank {rank} raised after {time.monotonic() - start:.1f} s: {error}", flush=True)
        time.sleep(8 - (time.monotonic() - start))
    os._exit(0)
    """
    for rank, output in enumerate(run_processes(world, body.replace("CALL", call), gpus=gpus)[:-1]):
        assert f"rank {rank} raised after" in output, output[-3000:]
        assert f"waited 2 s for rank {world - 1} (device {world - 1})" in output and name in output
        assert float(output.split("raised after ")[1].split(" s")[0]) < 4


@pytest.mark.slow
@each_placement
def test_a_process_that_does_not_arrive_is_named(world, gpus):
    operands = "parity.operands(64, 128, 128, jnp.float32, mesh)"
    call = f'parity.gather_matmul(mesh, implementation="fused"), {operands}'
    name_the_last_process(world, gpus, call, "all_gather_matmul")


@pytest.mark.slow
@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "helper, name", (("moe_parity", "moe_dispatch"), ("ragged_parity", "ragged_all_to_all")), ids=("moe", "ragged")
)
def test_a_process_that_sends_no_rows_is_named(helper, name):
    name_the_last_process(2, "own", f"{helper}.small_call(mesh)", name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpus", [pytest.param("shared", marks=pytest.mark.gpu(1)), pytest.param("own", marks=pytest.mark.gpu(2))]
)
def test_a_process_that_builds_no_program_is_named(gpus):
    body = """
    import os, time
    os.environ["JAXTAXFREE_MEETING_TIMEOUT"] = "3"
    if rank == 0:
        try:
            parity.check_cases(mesh, [(64, 128, 128, jnp.float32)])
        except Exception as error:
            print(f"raised {type(error).__name__}: {error}", flush=True)
    else:
        time.sleep(15)
    os._exit(0)
    """
    output = run_processes(2, body, gpus=gpus)[0]
    assert "process 0 waited 3 s for process 1" in output.lower(), output[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpus", [pytest.param("shared", marks=pytest.mark.gpu(1)), pytest.param("own", marks=pytest.mark.gpu(4))]
)
@pytest.mark.parametrize("order", ([0, 1, 2, 3], [3, 2, 0, 1]))
def test_teams_of_processes_that_believe_to_be_on_two_hosts(gpus, order):
    body = """
    from jaxtaxfree.heap import door
    door.announce().host = "alpha" if rank < 2 else "beta"
    mesh = parity.mesh_of([devices[i] for i in ORDER], (2, 2), ("dp", "tp"))
    for operation in parity.OPERATIONS:
        parity.check_data_parallel(mesh, operation)
    """
    check_processes(4, body.replace("ORDER", str(order)), gpus=gpus, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpus", [pytest.param("shared", marks=pytest.mark.gpu(1)), pytest.param("own", marks=pytest.mark.gpu(4))]
)
def test_two_levels_of_processes_that_believe_to_be_on_two_hosts(gpus):
    body = """
    from jaxtaxfree.heap import door
    from tests.helpers import levels_parity
    door.announce().host = "alpha" if rank < 2 else "beta"
    mesh = parity.mesh_of(devices, (2, 2), ("data", "model"))
    levels_parity.check_program(mesh, "fused")
    for _ in range(3):
        levels_parity.check(mesh, "fused")
    """
    check_processes(4, body, gpus=gpus, timeout=600)


@pytest.mark.slow
@pytest.mark.gpu(2)
def test_two_processes_that_believe_to_be_two_hosts():
    """Data across hosts, each a team of its own; and an axis that spans them."""
    body = """
    from jaxtaxfree.heap import door
    door.announce().host = "alpha" if rank == 0 else "beta"
    pairs = parity.mesh_of(devices, (2, 1), ("dp", "tp"))
    for operation in parity.OPERATIONS:
        parity.check_data_parallel(pairs, operation)
    lhs, rhs = parity.operands(64, 128, 128, jnp.float32, mesh)
    ours, wanted = (
        parity.gather_matmul(mesh, implementation=each, precision="highest")(lhs, rhs) for each in (None, "xla")
    )
    assert parity.error(ours, wanted) < parity.TOLERANCE["float32"]
    try:
        parity.gather_matmul(mesh, implementation="fused")(lhs, rhs)
        raise AssertionError("no error")
    except NotImplementedError as error:
        assert "the axis spans hosts (process 0 on " in str(error) and "; process 1 on " in str(error), error
    """
    check_processes(2, body)


@pytest.mark.slow
@pytest.mark.gpu(2)
def test_a_heap_that_cannot_grow_in_one_process_ends_all():
    body = """
    import time
    from jaxtaxfree.heap.driver import Driver, DriverError
    call = parity.gather_matmul(mesh, implementation="fused")
    lhs, rhs = parity.operands(64, 128, 128, jnp.float32, mesh)
    driver, taken, size = Driver(), [], 1 << 36
    while rank == 1 and size >= 1 << 21:
        try:
            taken.append(driver.create(jax.local_devices()[0].local_hardware_id, size))
        except DriverError:
            size //= 2
    start = time.monotonic()
    try:
        call(lhs, rhs)
    except jtf.HeapError as error:
        print(f"rank {rank} raised after {time.monotonic() - start:.1f} s: {error}", flush=True)
    for handle in taken:
        driver.release(handle)
    jtf.block_until_ready(call(lhs, rhs))
    print(f"rank {rank} went on", flush=True)
    """
    for rank, output in enumerate(run_processes(2, body)):
        assert f"rank {rank} raised after" in output and f"rank {rank} went on" in output, output[-3000:]
        assert "of device 1 for the symmetric heap, but only" in output
        assert ("Process 1: " in output) == (rank == 0)
        assert float(output.split("raised after ")[1].split(" s")[0]) < 15


@pytest.mark.slow
@pytest.mark.gpu(2)
def test_a_process_that_is_killed_before_it_lowers_is_named():
    body = """
    import os, signal, time
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        parity.check_cases(mesh, [(64, 128, 128, jnp.float32)])
    except Exception as error:
        print(f"raised after {time.monotonic() - start:.1f} s: {type(error).__name__}: {error}", flush=True)
    os._exit(0)
    """
    output = run_processes(2, body)[0]  # with JAX's heartbeat of 100 s and a meeting time-out of 300 s
    assert "HeapError: Process 1 ended before all processes of the mesh had set up" in output, output[-3000:]
    assert float(output.split("raised after ")[1].split(" s")[0]) < 15


@pytest.mark.slow
@pytest.mark.gpu(1)
@pytest.mark.parametrize("protocol, dtype", (("messages", "int32"), ("signals", "float32"), ("words", "bfloat16")))
def test_a_sum_that_lacks_a_rank_is_nobodys_result(protocol, dtype):
    """Rank 2 comes when rank 0 has given up, and rank 1 has not: they are not to add up what rank 0 has not got."""
    body = """
    import functools, os, time
    from jax.sharding import PartitionSpec as P
    heap.set_timeout(1.0 if rank == 0 else 6.0)
    call = functools.partial(jtf.psum, axis_name="tp", implementation="fused", config=CONFIG)
    call = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False))
    make = jax.jit(jnp.full, static_argnums=(0, 2), out_shardings=jax.NamedSharding(mesh, P("tp")))
    for value in (100, 10):
        jtf.block_until_ready(call(make((3 * 4096,), value, DTYPE)))
    ones = jax.block_until_ready(make((3 * 4096,), 1, DTYPE))
    start = time.monotonic()
    if rank == 2:
        time.sleep(3)
    try:
        result = jtf.block_until_ready(call(ones))
        print("took for the sum:", set(result.addressable_shards[0].data.tolist()), flush=True)
    except jtf.PeerTimeoutError as error:
        print("raised:", error, flush=True)
    time.sleep(15 - (time.monotonic() - start))
    os._exit(0)
    """
    config = repr({"protocol": protocol, "shots": 2})
    outputs = run_processes(3, body.replace("CONFIG", config).replace("DTYPE", repr(dtype)), gpus="shared")
    for rank, output in enumerate(outputs):
        assert "raised:" in output, output[-3000:]
        assert f"for rank {2 if rank == 0 else 0} " in output


DECODE = """
import functools, os, signal, time
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
heap.set_timeout(2.0)
cache = P(None, "tp")
at = NamedSharding(mesh, cache)

@functools.partial(jax.jit, donate_argnums=(3, 4))
@functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P(), cache, cache, P()), out_specs=(P(), cache, cache))
def attend(q, k, v, keys, values, lengths):
    keys, values = jtf.append_kv((keys, values), k, v, lengths, "tp", placement="round_robin")
    ways = {"placement": "round_robin", "implementation": IMPLEMENTATION}
    return jtf.decode_attention(q, keys, values, "tp", key_value_seq_lengths=lengths + 1, **ways), keys, values

keys, values = (jax.jit(lambda: jnp.zeros((2, 1024, 4, 64)), out_shardings=at)() for _ in range(2))
for token in range(200):
    if rank == 1 and token == LAST:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    q, k, v = (np.full((2, heads, 64), 1 + token, np.float32) for heads in (8, 4, 4))
    try:
        y, keys, values = attend(q, k, v, keys, values, np.full(2, token, np.int32))
        jtf.block_until_ready(y)
    except Exception as error:
        print(f"rank {rank} raised at token {token} after {time.monotonic() - start:.1f} s:", flush=True)
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
print(f"rank {rank} has decoded to", float(y.addressable_shards[0].data.max()), flush=True)
jax.distributed.shutdown()
"""


@pytest.mark.slow
@pytest.mark.gpu(2)
def test_a_process_that_is_killed_in_a_decode_loop_is_named_and_both_start_again():
    """With JAX's heartbeat of 100 s, which would end process 0."""
    body = DECODE.replace("IMPLEMENTATION", "'fused'")
    output = run_processes(2, body.replace("LAST", "100"))[0]
    assert "rank 0 raised at token 100 after" in output, output[-3000:]
    assert float(output.split("token 100 after ")[1].split(" s")[0]) < 4
    assert "PeerTimeoutError: decode_attention" in output and "waited 2 s for rank 1 (device 1)" in output
    for rank, output in enumerate(run_processes(2, body.replace("LAST", "None"))):
        assert f"rank {rank} has decoded to 200.0" in output, output[-3000:]
