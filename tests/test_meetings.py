"""Processes that build programs together: what each finds if one is late, fails, differs or ends. No GPU needed."""

import re
from typing import Any

import pytest

from tests import fake_gpus

PATIENCE = 6.0  # seconds that a process waits for another one

FAILURES = """
everybody, last = jax.devices(), world - 1
if rank == last:
    time.sleep(4)
found["late"] = lower(everybody, rows=8)
if rank == last:
    driver.fail("create", code="CUDA_ERROR_OUT_OF_MEMORY")
found["memory"] = lower(everybody, rows=16)
driver.failures.clear()
found["again"] = lower(everybody, rows=16)
found["differ"] = lower(everybody, rows=24 if rank < world // 2 else 32)
found["own"] = lower(jax.local_devices(), rows=40 + rank)
os.environ["JAXTAXFREE_MEETING_TIMEOUT"] = "100"
jtf.heap.close()
if rank == last:
    os.kill(os.getpid(), signal.SIGKILL)
found["killed"] = lower(everybody, rows=8)
if rank == 0:
    time.sleep(2)  # the coordination service is in it
"""

type Found = list[dict[str, Any]]


@pytest.fixture(scope="module", params=(2, 4))
def failures(request: pytest.FixtureRequest) -> tuple[Found, list[str]]:
    """What the processes found, but for the one that is killed; and what they wrote."""
    found, outputs = fake_gpus.run(request.param, 2, FAILURES, JAXTAXFREE_MEETING_TIMEOUT=str(PATIENCE))
    assert found.pop() is None
    assert None not in found, "\n".join(outputs)
    return [each for each in found if each is not None], outputs


def test_process_that_is_late_is_waited_for(failures: tuple[Found, list[str]]) -> None:
    found, outputs = failures
    late = len(outputs) - 1
    assert all(each["late"]["kernel"] for each in found)
    assert len({each["late"]["program"] for each in found}) == 1
    waiting = rf"has waited \d s \(of {PATIENCE:g}: JAXTAXFREE_MEETING_TIMEOUT\) for process {late} to set up psum"
    assert all(re.search(f"Process {rank} {waiting}", output) for rank, output in enumerate(outputs[:-1])), outputs


def test_memory_that_is_full_in_one_process_ends_all(failures: tuple[Found, list[str]]) -> None:
    found, outputs = failures
    for each in found:
        assert each["memory"]["error"].startswith(f"HeapError: Process {len(outputs) - 1}: psum(")
        assert "for the symmetric heap, but only" in each["memory"]["error"]
        assert each["memory"]["seconds"] < PATIENCE
        assert each["again"]["kernel"]


def test_programs_that_differ_end_in_all_processes(failures: tuple[Found, list[str]]) -> None:
    found, outputs = failures
    world = len(outputs)
    for rank, each in enumerate(found):
        others = range(world // 2, world) if rank < world // 2 else range(world // 2)
        error = each["differ"]["error"]
        assert f" waited {PATIENCE:g} s for process" in error
        assert any(re.search(f"Process {other} (waits|waited) for others to set up psum", error) for other in others)
        assert each["differ"]["seconds"] < PATIENCE + 3  # of which the kernel takes some to compile
        assert each["own"]["kernel"]


def test_process_that_is_killed_before_it_lowers_is_named(failures: tuple[Found, list[str]]) -> None:
    found, outputs = failures
    for each in found:
        assert each["killed"]["error"].startswith(f"HeapError: Process {len(outputs) - 1} ended before all processes")
        assert each["killed"]["seconds"] < 15


NEVER = """
if rank == 1:
    jax.numpy.ones(3) + 1
    os.kill(os.getpid(), signal.SIGKILL)
found["killed"] = lower(jax.devices())
"""


def test_process_that_never_used_the_heap_is_named() -> None:
    (found, _), outputs = fake_gpus.run(2, 2, NEVER)  # with the meeting time-out of 300 s
    assert found is not None, outputs[0]
    assert found["killed"]["error"].startswith("HeapError: Process 1 ended before all processes of the mesh had set up")
    assert found["killed"]["seconds"] < 15


SHUTDOWN = """
found["before"] = lower(jax.devices(), rows=8)
jax.distributed.shutdown()
found["own"] = lower(jax.local_devices(), rows=16)
found["all"] = lower(jax.devices(), rows=16)
jtf.heap.close()
found["opened"] = lower(jax.local_devices(), rows=24)
jtf.heap.reset()
found["again"] = lower(jax.local_devices(), rows=24)
"""


def test_meshes_of_own_devices_outlive_the_job() -> None:
    found, outputs = fake_gpus.run(2, 2, SHUTDOWN, JAXTAXFREE_MEETING_TIMEOUT=str(PATIENCE))
    for each, output in zip(found, outputs):
        assert each is not None, output
        assert all(each[when].get("kernel") for when in ("before", "own", "opened", "again")), each
        assert "call jax.distributed.initialize() first" in each["all"]["error"]
        assert each["all"]["seconds"] < PATIENCE
