"""Processes that build programs together: what each finds if one is late, fails, differs or ends. No GPU needed."""

import json
import re
from typing import Any

import pytest

from tests.helpers import fake_gpus

PATIENCE = 5.0  # seconds that a process waits for another one

FAILURES = """
everybody, last = jax.devices(), world - 1
if rank == last:
    model, fake_gpus.heap.Driver = fake_gpus.heap.Driver, "none"
found["driver"] = lower(everybody)
if rank == last:
    fake_gpus.heap.Driver = model
if rank == last:
    time.sleep(3.5)
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


# One launch is one test, whatever it checks: processes that import JAX take seconds of a core each.
@pytest.mark.slow
@pytest.mark.parametrize("world", (pytest.param(2, marks=pytest.mark.soak), 4))
def test_failure_of_one_process_ends_all(world: int) -> None:
    found, outputs = fake_gpus.run(world, 2, FAILURES, JAXTAXFREE_MEETING_TIMEOUT=str(PATIENCE))
    assert found.pop() is None  # it was killed
    living = [each for each in found if each is not None]
    assert len(living) == world - 1, "\n".join(outputs)
    check_late(living, outputs)
    for each in living:
        check_no_driver(each, world)
        check_full_memory(each, world)
        check_killed(each, world)
    for rank, each in enumerate(living):
        check_differing_programs(each, rank, world)


def check_late(found: Found, outputs: list[str]) -> None:
    assert all(each["late"]["kernel"] for each in found)
    assert len({each["late"]["program"] for each in found}) == 1
    patience = rf"\d s \(of {PATIENCE:g}: JAXTAXFREE_MEETING_TIMEOUT\)"
    for rank, output in enumerate(outputs[:-1]):
        warning = f"Process {rank} has waited {patience} for process {len(outputs) - 1} to set up psum"
        assert re.search(warning, output), output


def check_no_driver(found: dict[str, Any], world: int) -> None:
    needed = f"HeapUnavailableError: Process {world - 1}: The heap needs an NVIDIA driver"
    assert found["driver"]["error"].startswith(needed)
    assert found["driver"]["seconds"] < PATIENCE


def check_full_memory(found: dict[str, Any], world: int) -> None:
    assert found["memory"]["error"].startswith(f"HeapError: Process {world - 1}: psum(")
    assert "for the symmetric heap, but only" in found["memory"]["error"]
    assert found["memory"]["seconds"] < PATIENCE
    assert found["again"]["kernel"]


def check_differing_programs(found: dict[str, Any], rank: int, world: int) -> None:
    others = range(world // 2, world) if rank < world // 2 else range(world // 2)
    error = found["differ"]["error"]
    assert f" waited {PATIENCE:g} s for process" in error
    assert any(re.search(f"Process {other} (waits|waited) for others to set up psum", error) for other in others), error
    assert found["differ"]["seconds"] < PATIENCE + 3  # of which tracing takes some
    assert found["own"]["kernel"]


def check_killed(found: dict[str, Any], world: int) -> None:
    assert found["killed"]["error"].startswith(f"HeapError: Process {world - 1} ended before all processes of the mesh")
    assert found["killed"]["seconds"] < 15


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


LOOP = """
found["step"] = lower(jax.devices(), rows=8)
if rank == 1 and DIES:
    os.kill(os.getpid(), signal.SIGKILL)
found["next"] = lower(jax.devices(), rows=16)
if rank == 0:
    time.sleep(2)
"""


@pytest.mark.soak
def test_a_process_killed_between_two_programs_is_named_and_both_start_again() -> None:
    (found, _), outputs = fake_gpus.run(2, 1, LOOP.replace("DIES", "True"))
    assert found is not None and found["step"]["kernel"], outputs[0]
    assert found["next"]["error"].startswith("HeapError: Process 1 ended before all processes of the mesh had set up")
    assert found["next"]["seconds"] < 15
    again, outputs = fake_gpus.run(2, 1, LOOP.replace("DIES", "False"))
    assert all(each and each["step"]["kernel"] and each["next"]["kernel"] for each in again), "\n".join(outputs)


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


HOSTS = """
devices = jax.devices()
def on(hosts, *args, by=lower, **named):
    fake_gpus.move(hosts[rank])
    return by(*args, **named)

def in_levels(name, shape, hosts, devices=devices, hows=(None, "fused")):
    for how, axes in zip(hows, (("data", "model"), ("model", "data"))):
        found[f"levels {name} {how}"] = on(hosts, devices, shape, axes, how, by=lower_all)

if world == 4:
    found["inside"] = on("aabb", devices, (2, 4), ("dp", "tp"))
    found["permuted"] = on("aabb", [devices[i] for i in (5, 4, 7, 6, 1, 0, 3, 2)], (2, 4), ("dp", "tp"))
    found["uneven"] = on("aabb", [devices[i] for i in (0, 2, 1, 3, 4, 5, 6, 7)], (4, 2), ("dp", "tp"))
    found["in a process"] = on("abcd", devices, (4, 2), ("dp", "tp"))
    found["across"] = on("aabb", devices)
    found["fused across"] = lower(devices, implementation="fused")
    found["one team across"] = on("aaab", devices, (2, 4), ("dp", "tp"))
    in_levels("2 x 2 x 2", (2, 4), "aabb")
    in_levels("4 x 1 x 2", (4, 2), "abcd", hows=("fused",))
    in_levels("permuted", (2, 4), "aabb", [devices[i] for i in (5, 4, 7, 6, 1, 0, 3, 2)], ("fused",))
    driver.fabric = "rack"
    found["one domain of two hosts"] = on("aabb", devices)
    driver.fabric = ("rack", "another")[rank // 2]
    found["across domains"] = on("aabb", devices)
    driver.fabric = None
    found["nothing inside"] = on("aaab", devices, (2, 4), ("data", "model"), "fused", by=lower_all)
    fake_gpus.move("aabb"[rank])
    if rank == 3:
        driver.fail("create", code="CUDA_ERROR_OUT_OF_MEMORY")
    found["memory"] = lower(devices, (2, 4), ("dp", "tp"))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    found["killed"] = lower(devices, (2, 4), ("dp", "tp"), rows=16)
else:
    found["inside"] = on("aaaabbbb", devices, (2, 4), ("dp", "tp"))
    found["across"] = on("abcdefgh", devices, (4, 2), ("dp", "tp"))
    found["fused across"] = lower(devices, (4, 2), ("dp", "tp"), implementation="fused")
    in_levels("2 x 4 x 1", (2, 4), "aaaabbbb", hows=("fused",))
if rank == 0:
    time.sleep(6)  # the coordination service is in it
"""


def check_levels(found: dict[str, Any]) -> None:
    """Kernels of the four operations inside of hosts (gathers follow sums), and XLA's collectives across."""
    assert found.get("kernels") == 2 + 1 + 1 + 2, found
    assert sorted(found["collectives"]) == ["all_gather", "all_reduce", "all_reduce", "reduce_scatter"]


@pytest.mark.slow
@pytest.mark.parametrize("world", (4, pytest.param(8, marks=pytest.mark.soak)))
def test_meshes_of_several_hosts(world: int) -> None:
    names = ["alpha"] * (world // 2) + ["beta"] * (world // 2)
    found, outputs = fake_gpus.run(world, 8 // world, HOSTS, hosts=names, timeout=240, JAXTAXFREE_MEETING_TIMEOUT="60")
    if world == 4:
        assert found.pop() is None  # it was killed
    living = [each for each in found if each is not None]
    assert len(living) == len(found), "\n".join(outputs)
    in_levels = {case for case in living[0] if case.startswith("levels")}
    assert len(in_levels) == (4 if world == 4 else 1)
    for case in in_levels:
        (program,) = {json.dumps({**each[case], "seconds": None}) for each in living}
        check_levels(json.loads(program))
    for case in living[0].keys() - in_levels - {"fused across", "nothing inside", "memory", "killed"}:
        has_kernel = "across" not in case
        assert all(each[case].get("kernel") is has_kernel for each in living), (case, living[0][case])
        assert len({each[case]["program"] for each in living}) == 1, case
    (refusal,) = {each["fused across"]["error"] for each in living}
    where = "processes 0, 1 on a; processes 2, 3 on b" if world == 4 else "process 0 on a; process 1 on b"
    assert refusal.startswith("Unsupported: The fused kernel of psum cannot run here")
    assert f"the axis spans hosts ({where})" in refusal and "put only devices of one host on the axis" in refusal
    if world == 4:
        (refusal,) = {each["nothing inside"]["error"] for each in living}
        assert "processes 0, 1, 2 on a; process 3 on b" in refusal and "some devices share a host" in refusal
        (error,) = {each["memory"]["error"] for each in living}
        assert error.startswith("HeapError: Process 3: psum(") and "for the symmetric heap" in error
        (error,) = {each["killed"]["error"] for each in living}  # which its neighbour on the host has seen, process 2
        assert error.startswith("HeapError: Process 3 ended before all processes of the mesh had set up psum(")
        assert all(each["killed"]["seconds"] < 15 for each in living)
