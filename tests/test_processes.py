"""The real kernels with one process per GPU, which meet through jax.distributed."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest

PROLOGUE = """
import sys
import jax
rank, world, port = map(int, sys.argv[1:4])
jax.distributed.initialize(f"127.0.0.1:{port}", world, rank, local_device_ids=[LOCAL])
import jax.numpy as jnp
import jaxtaxfree as jtf
from jaxtaxfree import heap
from tests import attention_parity, parity
devices = jax.devices("cuda")
mesh = parity.mesh_of(devices, (world,), ("tp",))
"""


def run_processes(world: int, body: str, *, isolated: bool = False, timeout: float = 300) -> list[str]:
    """Runs a program in `world` processes of one GPU each; returns what each wrote.

    Args:
      isolated: each process sees its own GPU alone (CUDA_VISIBLE_DEVICES).
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = PROLOGUE.replace("LOCAL", "0" if isolated else "rank") + textwrap.dedent(body)
    processes = []
    for rank in range(world):
        environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3", "JAX_PLATFORMS": "cuda"}
        if isolated:
            environment["CUDA_VISIBLE_DEVICES"] = str(rank)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, isolated",
    [
        pytest.param(2, True, marks=pytest.mark.gpu(2)),
        pytest.param(4, False, marks=pytest.mark.gpu(4)),
    ],
)
def test_parity(world, isolated):
    body = """
    for operation in parity.OPERATIONS:
        parity.check_repetition(mesh, operation)
    attention_parity.check_mixture(mesh)
    print("rank", rank, "agrees")
    """
    for rank, output in enumerate(run_processes(world, body, isolated=isolated)):
        assert f"rank {rank} agrees" in output, output[-3000:]


@pytest.mark.slow
@pytest.mark.gpu(2)
def test_a_process_that_does_not_arrive_is_named():
    """The last process builds the program and does not run it the second time."""
    body = """
    import time
    heap.set_timeout(2.0)
    call = parity.gather_matmul(mesh, implementation="fused")
    lhs, rhs = parity.operands(64, 128, 128, jnp.float32, mesh)
    jtf.block_until_ready(call(lhs, rhs))
    if rank == world - 1:
        time.sleep(8)
    else:
        start = time.monotonic()
        try:
            jtf.block_until_ready(call(lhs, rhs))
        except jtf.PeerTimeoutError as error:
            print(f"rank {rank} raised after {time.monotonic() - start:.1f} s: {error}", flush=True)
        time.sleep(8 - (time.monotonic() - start))
    import os
    os._exit(0)
    """
    import jax

    world = min(4, len(jax.devices("cuda")))
    for rank, output in enumerate(run_processes(world, body)[:-1]):
        assert f"rank {rank} raised after" in output, output[-3000:]
        assert f"waited 2 s for rank {world - 1} (device {world - 1})" in output
        assert float(output.split("raised after ")[1].split(" s")[0]) < 4


@pytest.mark.slow
@pytest.mark.gpu(2)
def test_a_process_that_builds_no_program_is_named():
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
    output = run_processes(2, body)[0]
    assert "process 0 waited 3 s for process 1" in output.lower(), output[-3000:]
