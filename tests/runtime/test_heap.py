"""The symmetric heap on a model of a CUDA driver, its layout, and how processes meet. No GPU needed."""

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from jax._src import distributed

from jaxtaxfree import environment, heap
from jaxtaxfree.heap import HeapError, HeapUnavailableError, Layout, PeerTimeoutError, cuda, door, exchange, layout
from jaxtaxfree.heap.cuda import BASES, RANGE_BYTES, CudaHeap, Device
from jaxtaxfree.heap.door import Door
from jaxtaxfree.heap.driver import DriverError
from jaxtaxfree.heap.errors import SpansHostsError
from jaxtaxfree.heap.layout import GRANULE, LINE, RECORD_BYTES, Garbage, Record, Region
from jaxtaxfree.kernels import shmem
from tests.helpers.driver_model import MIB, DriverModel

LAYOUT = Layout(
    programs=4, signals=(("arrived", 6), ("turn", 2)), messages=(("partials", 4000),), scratch=(("inbox", 3 * MIB),)
)
MESSAGES = LAYOUT.buffer_lines["partials"][0] * LINE  # their first copy in a region
SIZE = LAYOUT.nbytes
TIMEOUT = 2.5


def test_model_has_the_drivers_methods() -> None:
    from jaxtaxfree.heap.driver import Driver

    wanted = {name for name in vars(Driver) if not name.startswith("_")}
    assert wanted <= set(vars(DriverModel))


def devices(count: int, first: int = 0) -> list[Device]:
    """Devices of one process, whose numbers are not those of CUDA."""
    return [Device(id=10 + i, process=0, ordinal=i) for i in range(first, first + count)]


@pytest.fixture
def driver() -> DriverModel:
    return DriverModel()


@pytest.fixture
def alone(driver: DriverModel) -> CudaHeap:
    return CudaHeap(driver, exchange.Alone(), TIMEOUT)


def test_equal_keys_share_a_region(alone: CudaHeap, driver: DriverModel) -> None:
    region = alone.region("a", devices(4), 4, LAYOUT)
    assert alone.region("a", devices(4), 4, LAYOUT) is region
    assert len(driver.mapped) == 4


def test_other_keys_have_windows_of_their_own(alone: CudaHeap, driver: DriverModel) -> None:
    regions = [
        alone.region("a", devices(4), 4, LAYOUT),
        alone.region("b", devices(4), 4, LAYOUT),
        alone.region("a", devices(4)[::-1], 4, LAYOUT),
        alone.region("a", devices(4), 2, LAYOUT),
        alone.region("a", devices(2), 2, Layout(programs=1)),
    ]
    assert len({region.magic for region in regions}) == len(regions)
    parts = [region.address(i) for region in regions for i in range(len(region.device_ids))]
    assert sorted(driver.mapped) == sorted(parts)  # the model refuses parts that overlap
    assert all(BASES[0] <= part < BASES[0] + RANGE_BYTES for part in parts)


def test_threads_that_ask_together_share_a_region(alone: CudaHeap, driver: DriverModel) -> None:
    with ThreadPoolExecutor(8) as pool:
        regions = list(pool.map(lambda i: alone.region("ab"[i % 2], devices(4), 4, LAYOUT), range(16)))
    assert len(set(map(id, regions))) == 2
    assert len(driver.mapped) == 8


def test_parts_lie_in_the_order_of_the_mesh(alone: CudaHeap, driver: DriverModel) -> None:
    order = [devices(4)[i] for i in (2, 0, 3, 1)]
    region = alone.region("a", order, 4, LAYOUT)
    assert region.device_ids == (12, 10, 13, 11)
    assert region.stride * GRANULE == SIZE
    for position, device in enumerate(order):
        assert driver.owned[driver.mapped[region.address(position)]] == device.ordinal
        assert region.address(position) == region.address(0) + position * SIZE


def test_parts_begin_with_a_header_and_zeros(alone: CudaHeap, driver: DriverModel) -> None:
    region = alone.region("a", devices(4), 4, LAYOUT)
    records = set()
    for position in range(4):
        memory = driver.read(region.address(position), SIZE)
        magic, failed, record, timeout = struct.unpack_from("<iiqq", memory)
        assert (magic, failed, timeout) == (region.magic, 0, round(TIMEOUT * 1e9))
        assert len(driver.host[record]) >= RECORD_BYTES
        records.add(record)
        assert not any(memory[24 : LAYOUT.control_bytes])
        assert set(memory[LAYOUT.control_bytes :]) == {0xFF}  # nobody spends time on the scratch
    assert len(records) == 4


@pytest.mark.parametrize("world", (1, 2, 4))
def test_devices_reach_their_own_team(alone: CudaHeap, driver: DriverModel, world: int) -> None:
    order = [devices(4)[i] for i in (3, 1, 2, 0)]
    region = alone.region("a", order, world, LAYOUT)
    for position in range(4):
        first = position // world * world
        team = {device.ordinal for device in order[first : first + world]}
        assert driver.access[region.address(position)] == team


def test_out_of_memory(alone: CudaHeap, driver: DriverModel) -> None:
    big = Layout(programs=1, scratch=(("inbox", 20 * MIB),))
    alone.region("first", devices(4), 4, LAYOUT)
    before = dict(driver.mapped), dict(driver.owned), dict(driver.host)
    driver.create(2, 30 * MIB)
    before[1].update(driver.owned)
    free = driver.free_memory(2)[0] >> 20
    with pytest.raises(HeapError) as found:
        alone.region("matmul", devices(4), 4, big)
    message = str(found.value)
    assert message.startswith(f"matmul needs {big.nbytes >> 20} MiB of device 12 for the symmetric heap")
    assert f"only {free} of its 64 MiB are free" in message
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in message and "implementation='xla'" in message
    assert not isinstance(found.value, HeapUnavailableError)
    assert (driver.mapped, driver.owned, driver.host) == before


def test_out_of_memory_in_the_second_team(alone: CudaHeap, driver: DriverModel) -> None:
    driver.fail("create", after=3, code="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(HeapError, match="of device 13"):
        alone.region("a", devices(4), 2, Layout(programs=1))
    assert driver.leaked == {}


def test_memory_can_be_asked_for_again(alone: CudaHeap, driver: DriverModel) -> None:
    driver.fail("create", after=2, code="CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(HeapError):
        alone.region("a", devices(4), 4, LAYOUT)
    driver.failures.clear()
    alone.region("a", devices(4), 4, LAYOUT)
    assert len(driver.mapped) == 4


@pytest.mark.parametrize("call", ("create", "map", "allow", "allocate_host", "zero", "write"))
@pytest.mark.parametrize("after", (0, 1, 3))
def test_failing_calls_leak_nothing(alone: CudaHeap, driver: DriverModel, call: str, after: int) -> None:
    driver.fail(call, after)
    with pytest.raises((HeapError, DriverError), match="CUDA_ERROR_UNKNOWN"):
        alone.region("a", devices(4), 4, LAYOUT)
    assert driver.leaked == {}


@pytest.mark.parametrize("call", ("create", "map", "allow", "allocate_host", "zero", "write"))
def test_failing_calls_are_errors_of_the_heap(alone: CudaHeap, driver: DriverModel, call: str) -> None:
    # As `heap.region` documents; callers tell them from bugs by their class.
    driver.fail(call)
    with pytest.raises(HeapError, match="CUDA_ERROR_UNKNOWN"):
        alone.region("a", devices(4), 4, LAYOUT)


def test_no_peer_access(alone: CudaHeap, driver: DriverModel) -> None:
    driver.unreachable = {(3, 2)}
    with pytest.raises(HeapUnavailableError, match=r"Device 13 cannot reach the memory of device 12 .*NVLink"):
        alone.region("a", devices(4), 4, LAYOUT)
    assert driver.leaked == {}
    driver.unreachable = {(0, 2), (2, 0), (1, 3), (3, 1)}
    alone.region("a", devices(4), 2, LAYOUT)  # only a team's devices must reach each other


def test_refused_access(alone: CudaHeap, driver: DriverModel) -> None:
    driver.fail("allow", after=4 + 2, code="CUDA_ERROR_INVALID_DEVICE")  # the first four are for each device itself
    with pytest.raises(HeapUnavailableError, match=r"cannot reach the memory of device 12.*CUDA_ERROR_INVALID"):
        alone.region("a", devices(4), 4, LAYOUT)
    assert driver.leaked == {}


def test_no_virtual_memory(alone: CudaHeap, driver: DriverModel) -> None:
    driver.without_virtual_memory = {1}
    with pytest.raises(HeapUnavailableError, match="Device 11 cannot map memory at chosen addresses"):
        alone.region("a", devices(4), 4, LAYOUT)
    assert driver.leaked == {}


def test_next_base_where_the_first_is_taken(driver: DriverModel) -> None:
    driver.taken = {BASES[0]}
    region = CudaHeap(driver, exchange.Alone(), TIMEOUT).region("a", devices(2), 2, LAYOUT)
    assert BASES[1] <= region.address(0) < BASES[1] + RANGE_BYTES
    assert list(driver.reserved) == list(BASES[1:])  # what was offered elsewhere is given back


@pytest.mark.parametrize("how", ("elsewhere", "fails"))
def test_no_free_addresses(driver: DriverModel, how: str) -> None:
    driver.taken = set(BASES)
    if how == "fails":
        driver.fail("reserve")
    with pytest.raises(HeapUnavailableError) as found:
        CudaHeap(driver, exchange.Alone(), TIMEOUT)
    for part in (*map(hex, BASES), "1024 GiB of free addresses", "JAXTAXFREE_HEAP_BASE", "multiple of 2 MiB"):
        assert part in str(found.value)
    assert driver.reserved == {}


def test_base_of_the_user(driver: DriverModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTAXFREE_HEAP_BASE", "0x400000000000")
    region = CudaHeap(driver, exchange.Alone(), TIMEOUT).region("a", devices(2), 2, LAYOUT)
    assert region.address(0) == 0x4000_0000_0000
    for refused in ("0x300000000000", "0x300000000001"):
        driver.taken = {0x3000_0000_0000}
        monkeypatch.setenv("JAXTAXFREE_HEAP_BASE", refused)
        with pytest.raises(HeapUnavailableError, match=refused):
            CudaHeap(driver, exchange.Alone(), TIMEOUT)


@pytest.mark.parametrize("wrong", ("abc", "", "-0x200000", "0", "1e12", hex(1 << 64)))
def test_base_of_the_user_that_is_none(driver: DriverModel, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("JAXTAXFREE_HEAP_BASE", wrong)
    with pytest.raises(ValueError, match=f"JAXTAXFREE_HEAP_BASE is an address such as .*, not '{wrong}'"):
        CudaHeap(driver, exchange.Alone(), TIMEOUT)


def test_used_up_addresses(driver: DriverModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "RANGE_BYTES", 7 * SIZE)
    alone = CudaHeap(driver, exchange.Alone(), TIMEOUT)
    alone.region("a", devices(4), 4, LAYOUT)
    with pytest.raises(HeapError, match=rf"used up; b needs {SIZE >> 20} MiB on each of 4 devices.*heap\.close\(\)"):
        alone.region("b", devices(4), 4, LAYOUT)
    assert len(driver.mapped) == 4


def test_close_gives_everything_back(alone: CudaHeap, driver: DriverModel) -> None:
    alone.region("a", devices(4), 4, LAYOUT)
    alone.region("b", devices(4), 2, LAYOUT)
    alone.close()
    assert driver.leaked == {}
    assert driver.reserved == {}
    assert set(driver.synchronized) == {0, 1, 2, 3}  # before anything is taken from a kernel that runs


@pytest.mark.parametrize("call", ("synchronize", "unmap", "clear_caches"))
@pytest.mark.usefixtures("unopened")
def test_close_that_fails_half_way(driver: DriverModel, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    calls = []

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) == (1 if call == "clear_caches" else 2):
            raise KeyboardInterrupt
        return inner(*args)

    owner: Any = jax if call == "clear_caches" else driver
    inner = getattr(owner, call)
    monkeypatch.setattr(owner, call, failing)
    heap.region("a", jax_devices(4), 4, LAYOUT)
    closing: Any = heap._heap
    with pytest.raises((KeyboardInterrupt, AssertionError)):
        heap.close()
    assert len(driver.host) == 0 and closing.records() == []  # not a look at what has been given back
    monkeypatch.setattr(owner, call, inner)
    heap.close()
    if call != "unmap":  # that stays where it is
        assert driver.leaked == driver.reserved == {}
        heap.region("a", jax_devices(4), 4, LAYOUT)


def plant(driver: DriverModel, region: Region, position: int, **words: int) -> None:
    """Writes the record that the kernel of a rank writes when it gives up."""
    memory = driver.read(region.address(position), LINE)
    (address,) = struct.unpack_from("<q", memory, shmem.HEADER_RECORD.value)
    record = (ctypes.c_int32 * (RECORD_BYTES // 4)).from_address(address)
    for name, value in {"magic": region.magic, **words}.items():
        record[getattr(shmem, f"RECORD_{name.upper()}").value] = value
    record[shmem.RECORD_STATE.value] = 1


GAVE_UP = {"rank": 1, "peer": 0, "program": 7, "signal": 6, "expected": 40, "seen": 39, "epoch": 20}


def test_records_are_found(alone: CudaHeap, driver: DriverModel) -> None:
    alone.region("a", devices(4), 4, LAYOUT)
    region = alone.region("b", devices(4), 2, LAYOUT)
    assert alone.records() == []
    plant(driver, region, 3, **GAVE_UP)
    assert alone.records() == [(region, devices(4)[3], TIMEOUT, Record(magic=region.magic, **GAVE_UP))]


def failed_flag(driver: DriverModel, region: Region, position: int) -> int:
    return struct.unpack_from("<i", driver.read(region.address(position), LINE), shmem.HEADER_FAILED.value)[0]


def test_fail_and_reset(alone: CudaHeap, driver: DriverModel) -> None:
    regions = [alone.region(name, devices(4), 2, LAYOUT) for name in "ab"]
    plant(driver, regions[1], 3, **GAVE_UP)
    driver.write(2, regions[0].address(2) + LINE, b"\1" * 64)  # epochs of some calls
    driver.write(2, regions[0].address(2) + MESSAGES + 4000, b"\1" * 64)  # and messages
    alone.fail()
    assert all(failed_flag(driver, region, i) for region in regions for i in range(4))
    alone.timeout = 9.0
    alone.reset()
    assert set(driver.synchronized) == {0, 1, 2, 3}
    assert alone.records() == []
    for region in regions:
        for i in range(4):
            memory = driver.read(region.address(i), LAYOUT.control_bytes)
            magic, failed, _, timeout = struct.unpack_from("<iiqq", memory)
            assert (magic, failed, timeout) == (region.magic, 0, 9_000_000_000)
            assert not any(memory[24:])


def jax_devices(count: int) -> list[Any]:
    return [SimpleNamespace(id=10 + i, process_index=0, local_hardware_id=i) for i in range(count)]


@pytest.fixture
def opened(alone: CudaHeap, monkeypatch: pytest.MonkeyPatch) -> CudaHeap:
    """`alone` as the process's heap, as if no test had used it before."""
    monkeypatch.setattr(heap, "_heap", alone)
    monkeypatch.setattr(heap, "_failure", None)
    monkeypatch.setattr(heap, "_delivered", False)
    monkeypatch.setattr(heap, "_garbage", [])
    monkeypatch.setattr(heap, "_timeout", TIMEOUT)
    return alone


MESSAGE = (
    "b: rank 1 (device 13) waited 2.5 s for rank 0 (device 12), which did not arrive: program 7 saw 39 of 40 at signal "
    "turn[0] in call 20. The result of the call is NaN."
)


def give_up(driver: DriverModel) -> None:
    plant(driver, heap.region("b", jax_devices(4), 2, LAYOUT), 3, **GAVE_UP)


def test_check_names_who_was_missing(opened: CudaHeap, driver: DriverModel, caplog: pytest.LogCaptureFixture) -> None:
    heap.check()
    give_up(driver)
    heap.set_timeout(60)  # of regions to come
    with pytest.raises(PeerTimeoutError, match=re.escape(MESSAGE)):
        heap.check()
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [("jaxtaxfree", "ERROR", MESSAGE)]
    with pytest.raises(PeerTimeoutError, match=re.escape(MESSAGE)):
        heap.block_until_ready(jnp.zeros(()))


def test_check_names_every_rank_that_gave_up(opened: CudaHeap, driver: DriverModel) -> None:
    give_up(driver)
    a = heap.region("a", jax_devices(4), 4, LAYOUT)
    plant(driver, a, 0, **GAVE_UP | {"rank": 0, "peer": 2, "signal": 5})
    plant(driver, a, 2, **GAVE_UP | {"rank": 2, "peer": 3, "signal": -1 - (MESSAGES // 4 + 12)})
    with pytest.raises(PeerTimeoutError) as found:
        heap.check()
    assert MESSAGE in str(found.value)
    assert "a: rank 0 (device 10) waited 2.5 s for rank 2 (device 12)" in str(found.value)
    assert "at signal arrived[5] in call 20" in str(found.value)
    assert "saw 39 of 40 at message partials[12] in call 20" in str(found.value)


def test_check_names_who_was_late(opened: CudaHeap, driver: DriverModel) -> None:
    plant(driver, heap.region("b", jax_devices(4), 2, LAYOUT), 3, **GAVE_UP | {"seen": 40})
    message = MESSAGE.replace("did not arrive", "came too late").replace("saw 39", "saw 40")
    with pytest.raises(PeerTimeoutError, match=re.escape(message)):
        heap.check()


def test_check_understands_counters_that_wrapped_around(opened: CudaHeap, driver: DriverModel) -> None:
    words = GAVE_UP | {"expected": -(1 << 31) + 5, "seen": (1 << 31) - 3}
    plant(driver, heap.region("b", jax_devices(4), 2, LAYOUT), 3, **words)
    with pytest.raises(PeerTimeoutError, match="did not arrive"):
        heap.check()


def test_check_of_a_kernel_that_blames_nobody(opened: CudaHeap, driver: DriverModel) -> None:
    plant(driver, heap.region("b", jax_devices(4), 2, LAYOUT), 3, **GAVE_UP | {"peer": 2})
    with pytest.raises(PeerTimeoutError, match=r"waited 2\.5 s for rank 2 \(device none of its team\)"):
        heap.check()


def test_failure_is_told_even_if_later_calls_cannot_be_stopped(
    opened: CudaHeap, driver: DriverModel, caplog: pytest.LogCaptureFixture
) -> None:
    with watched(opened):
        heap.region("b", jax_devices(4), 2, LAYOUT)
        driver.fail("write", code="CUDA_ERROR_LAUNCH_FAILED")
        give_up(driver)
        with pytest.raises(PeerTimeoutError, match=re.escape(MESSAGE)):
            sleep(10)
    assert caplog.messages[0] == MESSAGE
    assert "CUDA_ERROR_LAUNCH_FAILED" in caplog.text


ENDING = """
import logging
from jaxtaxfree import heap
from tests.runtime.test_heap import DriverModel, LAYOUT, give_up, jax_devices
driver = DriverModel()
heap.Driver = lambda: driver
heap.region("b", jax_devices(4), 2, LAYOUT)
give_up(driver)
"""


def test_failure_of_the_last_call_is_logged() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], check=True, capture_output=True, text=True)
    assert "b: rank 1 (device 13) waited 60 s for rank 0 (device 12)" in ended.stderr


def test_no_regions_until_reset(opened: CudaHeap, driver: DriverModel) -> None:
    region = heap.region("b", jax_devices(4), 2, LAYOUT)
    give_up(driver)
    with pytest.raises(PeerTimeoutError):
        heap.check()
    assert failed_flag(driver, region, 0)
    for name in "bc":
        with pytest.raises(PeerTimeoutError, match=r"takes no calls until jaxtaxfree\.heap\.reset\(\): b: rank 1"):
            heap.region(name, jax_devices(4), 2, LAYOUT)
    heap.reset()
    heap.check()
    assert heap.region("b", jax_devices(4), 2, LAYOUT) is region
    assert not failed_flag(driver, region, 0)


def test_set_timeout(opened: CudaHeap, driver: DriverModel) -> None:
    for wrong in (0, -1.0, float("nan"), float("inf"), 1e300, "abc", None):
        with pytest.raises(ValueError, match=f"positive number of seconds, finite.* not {re.escape(repr(wrong))}"):
            heap.set_timeout(wrong)
    heap.set_timeout(7)
    region = heap.region("a", jax_devices(2), 2, LAYOUT)
    memory = driver.read(region.address(0), LINE)
    assert struct.unpack_from("<q", memory, shmem.HEADER_TIMEOUT.value) == (7_000_000_000,)


def test_close(opened: CudaHeap, driver: DriverModel) -> None:
    heap.region("a", jax_devices(4), 4, LAYOUT)
    heap.close()
    assert driver.leaked == {}
    assert heap._heap is None
    heap.close()
    heap.check()


@pytest.fixture
def unopened(driver: DriverModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has not used the heap, with the model of a driver."""
    for name in ("_heap", "_exchange", "_failure", "_timeout"):
        monkeypatch.setattr(heap, name, None)
    monkeypatch.setattr(heap, "Driver", lambda: driver)
    yield
    if heap._heap is not None:
        heap._heap.close()


GARBAGE = {"operand": 1, "index": 3, "value": -7, "least": 0, "most": 12, "epoch": 20}
FOUND = (
    "b: rank 1 (device 13) was given sizes[3] = -7 in call 20, where 0 to 12 is allowed. Nothing was addressed by it, "
    "and the result that depends on it is NaN: correct the operand, and go on."
)


def find_garbage(driver: DriverModel, slot: int = 0, **words: int) -> None:
    """Writes what the kernel of a rank writes when it reports garbage."""
    layout_ = dataclasses.replace(LAYOUT, parameters=("x_ptr", "sizes_ptr"))
    region = heap.region("b", jax_devices(4), 2, layout_)
    (address,) = struct.unpack_from("<q", driver.read(region.address(3), LINE), shmem.HEADER_RECORD.value)
    record = (ctypes.c_int32 * (RECORD_BYTES // 4)).from_address(address)
    first = shmem.GARBAGE_BEGIN.value + slot * shmem.GARBAGE_WORDS.value
    assert record[first + shmem.GARBAGE_STATE.value] == 0  # the host has read what was there
    for name, value in {**GARBAGE, **words, "state": 1}.items():
        record[first + getattr(shmem, f"GARBAGE_{name.upper()}").value] = value


def test_garbage_is_told_once_and_stops_nothing(
    opened: CudaHeap, driver: DriverModel, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        find_garbage(driver)
        with pytest.raises(heap.GarbageError) as raised:
            heap.block_until_ready(jnp.zeros(()))
        assert str(raised.value) == FOUND
        heap.check()
    assert caplog.messages == [FOUND] * 2
    assert not any(failed_flag(driver, region, i) for region in opened._regions.values() for i in range(4))


def test_garbage_of_a_peer_and_of_an_unknown_parameter(opened: CudaHeap, driver: DriverModel) -> None:
    find_garbage(driver, 0, operand=-1, index=0)
    find_garbage(driver, 1, operand=2, least=4, most=4)
    with pytest.raises(heap.GarbageError) as raised:
        heap.check()
    assert "b: rank 1 (device 13) has no result in call 20, because the sizes or offsets that rank 0 was" in str(
        raised.value
    )
    assert "b: rank 1 (device 13) was given parameter 2[3] = -7 in call 20, where it must be 4." in str(raised.value)


def test_watcher_tells_of_garbage(opened: CudaHeap, driver: DriverModel) -> None:
    with watched(opened):
        for _ in range(2):
            find_garbage(driver)
            with pytest.raises(heap.GarbageError, match=re.escape(FOUND)):
                sleep(10)
        sleep(0.3)  # once is enough
        heap.check()


def test_who_is_missing_is_said_before_garbage(opened: CudaHeap, driver: DriverModel) -> None:
    find_garbage(driver)
    plant(driver, next(iter(opened._regions.values())), 3, **GAVE_UP)
    with pytest.raises(PeerTimeoutError):
        heap.check()
    heap.reset()
    heap.check()


@pytest.mark.usefixtures("unopened")
@pytest.mark.parametrize("variable", ("JAXTAXFREE_TIMEOUT", "JAXTAXFREE_MEETING_TIMEOUT"))
@pytest.mark.parametrize("wrong", ("-5", "0", "nan", "inf", "abc", ""))
def test_times_of_the_environment_that_are_none(monkeypatch: pytest.MonkeyPatch, variable: str, wrong: str) -> None:
    monkeypatch.setenv(variable, wrong)
    with pytest.raises(ValueError, match=f"{variable} is a positive number of seconds, finite.*, not '{wrong}'"):
        heap.region("a", jax_devices(2), 2, LAYOUT)
    monkeypatch.delenv(variable)
    heap.region("a", jax_devices(2), 2, LAYOUT)


@pytest.mark.usefixtures("unopened")
def test_timeout_of_the_environment(driver: DriverModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTAXFREE_TIMEOUT", "2.5")
    region = heap.region("a", jax_devices(2), 2, LAYOUT)
    memory = driver.read(region.address(0), LINE)
    assert struct.unpack_from("<q", memory, shmem.HEADER_TIMEOUT.value) == (2_500_000_000,)


@pytest.mark.usefixtures("unopened")
def test_set_timeout_before_the_heap_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTAXFREE_TIMEOUT", "abc")  # which counts no more
    heap.set_timeout(7)
    heap.region("a", jax_devices(2), 2, LAYOUT)
    assert heap._heap is not None and heap._heap.timeout == 7


def test_import_reads_no_environment() -> None:
    wrong = dict.fromkeys(environment.VARIABLES, "abc")
    subprocess.run([sys.executable, "-c", "import jaxtaxfree"], check=True, env=os.environ | wrong)


def test_import_leaves_triton_its_cache() -> None:
    code = "import os, jaxtaxfree; assert os.environ['TRITON_CACHE_DIR'] == 'a folder'"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"TRITON_CACHE_DIR": "a folder"})


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:

    class Absent:
        def __init__(self) -> None:
            raise RuntimeError("no libcuda.so")

    monkeypatch.setattr(heap, "_heap", None)
    monkeypatch.setattr(heap, "_failure", None)
    monkeypatch.setattr(heap, "Driver", Absent)
    with pytest.raises(HeapUnavailableError, match=r"needs an NVIDIA driver.*pip install.*no libcuda\.so"):
        heap.region("a", jax_devices(2), 2, LAYOUT)


@contextlib.contextmanager
def watched(opened: CudaHeap) -> Generator[None]:
    thread = threading.Thread(target=heap._watch, args=(opened,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        heap._heap = None
        thread.join(5)
        assert not thread.is_alive()


def sleep(seconds: float) -> None:
    # Python raises another thread's exception between two instructions, so not within one long sleep.
    for _ in range(round(seconds / 0.01)):
        time.sleep(0.01)


def test_watcher_raises_in_the_main_thread(opened: CudaHeap, driver: DriverModel) -> None:
    assert threading.current_thread() is threading.main_thread()
    with watched(opened):
        sleep(0.3)
        give_up(driver)
        with pytest.raises(PeerTimeoutError, match=re.escape(MESSAGE)):
            sleep(10)
        sleep(0.3)  # once is enough
        with pytest.raises(PeerTimeoutError, match=re.escape(MESSAGE)):
            heap.check()


def test_watcher_leaves_alone_who_has_asked(opened: CudaHeap, driver: DriverModel) -> None:
    with watched(opened):
        give_up(driver)
        with pytest.raises(PeerTimeoutError):
            heap.check()
        sleep(0.4)
        heap.reset()
        give_up(driver)  # after a reset a new failure counts anew
        with pytest.raises(PeerTimeoutError, match=re.escape(MESSAGE)):
            sleep(10)


counts = st.lists(st.integers(1, 500), max_size=4)


@hypothesis.given(
    programs=st.integers(1, 5000),
    signals=counts,
    messages=st.lists(st.integers(0, 50_000).map(lambda words: 4 * words), max_size=4),
    scratch=st.lists(st.integers(1, 5 * MIB), max_size=4),
    sparse=st.booleans(),
)
def test_layout(programs: int, signals: list[int], messages: list[int], scratch: list[int], sparse: bool) -> None:
    layout_ = Layout(
        programs=programs,
        signals=tuple((f"signal{i}", count) for i, count in enumerate(signals)),
        messages=tuple((f"messages{i}", size) for i, size in enumerate(messages)),
        scratch=tuple((f"scratch{i}", size) for i, size in enumerate(scratch)),
        sparse=sparse,
    )
    spans = [("header", 0, LINE), ("epochs", LINE, LINE + 8 * programs)]
    for name, count in layout_.signals:
        start = layout_.signal_line * LINE + 4 * layout_.signal_index[name]
        spans.append((name, start, start + 4 * count))
    copies = []
    for name, size in layout_.messages + layout_.scratch:
        line, lines = layout_.buffer_lines[name]
        copies += [(name, (line + copy * lines) * LINE, (line + copy * lines) * LINE + size) for copy in range(2)]
    zeroed, rest = copies[: 2 * len(messages)], copies[2 * len(messages) :]
    for (_, _, end), (_, start, _) in zip(spans + copies, (spans + copies)[1:]):
        assert end <= start
    if sparse:
        for (_, begin, end), (_, start, _) in zip((spans + copies)[2:], (spans + copies)[3:]):
            assert start - end >= 8 * (end - begin) + 4 * 64
    assert all(start % LINE == 0 for _, start, _ in copies)
    assert (spans + zeroed)[-1][2] <= layout_.control_bytes <= (rest[0][1] if rest else layout_.nbytes)
    assert (spans + copies)[-1][2] <= layout_.nbytes
    assert layout_.nbytes % GRANULE == 0
    for name, count in layout_.signals:
        first = layout_.signal_index[name]
        assert layout_.awaited(first) == f"signal {name}[0]"
        assert layout_.awaited(first + count - 1) == f"signal {name}[{count - 1}]"
    for name, start, stop in zeroed:
        if start < stop:
            assert layout_.awaited(-1 - start // 4) == f"message {name}[0]"
            assert layout_.awaited(-1 - (stop // 4 - 1)) == f"message {name}[{(stop - start) // 4 - 1}]"


def test_a_wait_is_told_by_the_indices_of_its_array() -> None:
    words = jax.ShapeDtypeStruct((2, 2, 5), "int32")
    layout_ = Layout.of((3,), {}, {"turn": 4, "arrived": (4, 6)}, {"partials": (2, 3), "words": words})
    assert [layout_.awaited(i) for i in (3, 4, 4 + 13, 4 + 24)] == [
        "signal turn[3]",
        "signal arrived[0, 0]",
        "signal arrived[2, 1]",
        "signal arrived[24]",  # behind the end
    ]
    for name, word, element in (("partials", 5, "partials[1, 2]"), ("words", 13, "words[1, 0, 3]")):
        line, lines = layout_.buffer_lines[name]
        for copy in range(2):
            assert layout_.awaited(-1 - ((line + copy * lines) * LINE // 4 + word)) == f"message {element}"


def test_layout_is_no_larger_than_it_must_be() -> None:
    assert Layout(programs=1).nbytes == GRANULE
    assert Layout(programs=1, scratch=(("a", GRANULE // 2),)).nbytes == 2 * GRANULE


def test_constants_agree_with_the_kernels() -> None:
    assert 1 << shmem.GRANULE_SHIFT.value == GRANULE
    assert 1 << shmem.LINE_SHIFT.value == LINE
    names = [name for name in vars(shmem) if name.startswith("RECORD_")]
    indices = [getattr(shmem, name).value for name in names]
    assert sorted(indices) == list(range(len(indices)))
    assert 4 * len(indices) <= RECORD_BYTES
    assert {name.removeprefix("RECORD_").lower() for name in names} == {*Record.__dataclass_fields__, "state"}
    names = [name for name in vars(shmem) if name.startswith("GARBAGE_")]
    words = {name.removeprefix("GARBAGE_").lower(): getattr(shmem, name).value for name in names}
    begin, size, slots = (words.pop(name) for name in ("begin", "words", "slots"))
    assert set(words) == {*Garbage.__dataclass_fields__, "state"}
    assert sorted(words.values()) == list(range(len(words))) and len(words) <= size
    assert len(indices) <= begin and 4 * (begin + slots * size) <= RECORD_BYTES
    header = layout.header(0x1234567, 0x7F00_0000_1000, 1.5)
    assert len(header) == LINE
    at = lambda form, offset: struct.unpack_from(form, header, offset.value)[0]  # noqa: E731
    assert at("<i", shmem.HEADER_MAGIC) == 0x1234567
    assert at("<i", shmem.HEADER_FAILED) == 0
    assert at("<q", shmem.HEADER_RECORD) == 0x7F00_0000_1000
    assert at("<q", shmem.HEADER_TIMEOUT) == 1_500_000_000


@hypothesis.given(
    key=st.tuples(st.text(max_size=9), st.lists(st.integers(0, 99), max_size=3).map(tuple), st.integers(1, 9)),
    other=st.tuples(st.text(max_size=9), st.lists(st.integers(0, 99), max_size=3).map(tuple), st.integers(1, 9)),
)
def test_magic_fits_a_scalar_of_a_launch(key: tuple, other: tuple) -> None:
    assert 0 <= layout.magic(*key) < 1 << 31
    assert (layout.magic(*key) == layout.magic(*other)) == (key == other)


def test_record_that_is_not_there() -> None:
    assert Record.read(bytes(RECORD_BYTES)) is None


# Heaps of two processes, in threads: a store and a host are all that they share.


class Store:
    """The key-value store of `jax.distributed`, which takes a key only once."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self._changed:
            if key in self._values and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_ms / 1000):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self._values[key]

    def key_value_try_get(self, key: str) -> str:
        with self._changed:
            if key not in self._values:
                raise RuntimeError(f"NOT_FOUND: {key}")
            return self._values[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self._changed:
            return [(name, value) for name, value in self._values.items() if name.startswith(f"{key}/")]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)

    def key_value_increment(self, key: str, by: int) -> int:
        with self._changed:
            self._values[key] = str(int(self._values.get(key, 0)) + by)
            return int(self._values[key])


opened_doors: list[Door] = []


@pytest.fixture(autouse=True)
def closed_doors() -> Iterator[None]:
    yield
    while opened_doors:
        opened_doors.pop().close()


def one_of_several(process: int, patience: float, host: str = "") -> exchange.Processes:
    """The exchange of one of several processes, with a door of its own."""
    opened_doors.append(Door())
    opened_doors[-1].host = host or opened_doors[-1].host
    return exchange.Processes(process, 0, patience, opened_doors[-1])


@pytest.fixture
def taken() -> list[set[int]]:
    """Addresses that something else has reserved in each of two processes."""
    return [set(), set()]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, taken: list[set[int]]) -> list[CudaHeap]:
    """Two processes of two devices each."""
    monkeypatch.setattr(distributed.global_state, "client", Store())
    memory: dict[int, Any] = {}
    drivers = [DriverModel(2, store=memory, first=i + 1) for i in range(2)]
    for driver, addresses in zip(drivers, taken):
        driver.taken = addresses
    return [CudaHeap(driver, one_of_several(i, 2.0), TIMEOUT) for i, driver in enumerate(drivers)]


FOUR = [Device(id=i, process=i // 2, ordinal=i % 2) for i in range(4)]


def check_causes(error: BaseException) -> None:
    """JAX follows the causes of an error to their end, for ever if there is none."""
    chain: list[BaseException | None] = [error]
    while (cause := getattr(chain[-1], "__cause__", None)) is not None:
        assert not any(cause is each for each in chain), f"the causes of {error!r} go round"
        chain.append(cause)


def together(heaps: list[CudaHeap], call: Callable[[CudaHeap], Any]) -> list[Any]:
    """What a call returns or raises in each process."""

    def guarded(each: CudaHeap) -> Any:
        try:
            return call(each)
        except Exception as error:
            check_causes(error)
            return error

    with ThreadPoolExecutor(len(heaps)) as pool:
        return list(pool.map(guarded, heaps))


def test_processes_share_a_region(pair: list[CudaHeap]) -> None:
    mine, yours = together(pair, lambda each: each.region("a", FOUR, 4, LAYOUT))
    assert isinstance(mine, Region)
    assert mine == yours
    for each in pair:
        driver = each._driver
        assert sorted(driver.mapped) == [mine.address(i) for i in range(4)]
        assert set(map(frozenset, driver.access.values())) == {frozenset({0, 1})}
        assert (len(driver.owned), len(driver.imported), len(driver.host)) == (2, 2, 2)
    pair[0]._driver.write(1, mine.address(3) + LINE, b"hello")
    assert pair[1]._driver.read(mine.address(3) + LINE, 5) == b"hello"
    assert all(result is None for result in together(pair, lambda each: each.reset()))
    assert pair[1]._driver.read(mine.address(3) + LINE, 5) == bytes(5)
    together(pair, lambda each: each.close())
    assert [each._driver.leaked for each in pair] == [{}, {}]


@pytest.mark.parametrize(
    ("taken", "base"),
    (([{BASES[0]}, set()], BASES[1]), ([set(), {BASES[0]}], BASES[1]), ([{BASES[0]}, {BASES[1]}], BASES[2])),
)
def test_processes_agree_on_addresses(pair: list[CudaHeap], base: int) -> None:
    mine, yours = together(pair, lambda each: each.region("a", FOUR, 4, LAYOUT))
    assert mine == yours
    assert mine.address(0) == base
    # Each has all it needs alone, where it likes.
    alone = pair[0].region("b", FOUR[:2], 2, LAYOUT)
    assert alone.address(0) == next(iter(pair[0]._driver.reserved)) + RANGE_BYTES // 4 * 3


@pytest.mark.parametrize("taken", ([set(BASES[1:]), {BASES[0]}],))
def test_processes_without_common_addresses(pair: list[CudaHeap]) -> None:
    for result in together(pair, lambda each: each.region("a", FOUR, 4, LAYOUT)):
        assert isinstance(result, HeapUnavailableError)
        own = f"(process 0: {BASES[0]:#x}; process 1: {BASES[1]:#x} {BASES[2]:#x})"
        assert own in str(result) and "Set JAXTAXFREE_HEAP_BASE to a free address, the same for" in str(result)
    assert [each._driver.leaked for each in pair] == [{}, {}]


@pytest.mark.usefixtures("unopened")
def test_process_that_cannot_open_its_heap_tries_again(monkeypatch: pytest.MonkeyPatch, driver: DriverModel) -> None:
    monkeypatch.setattr(distributed.global_state, "client", Store())
    # No backend of JAX may begin in here: it would take the store for its own.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    driver.taken = {0x3000_0000_0000}
    monkeypatch.setenv("JAXTAXFREE_HEAP_BASE", "0x300000000000")
    for _ in range(2):
        with pytest.raises(HeapUnavailableError, match="JAXTAXFREE_HEAP_BASE"):
            heap.region("a", jax_devices(2), 2, LAYOUT)
    monkeypatch.delenv("JAXTAXFREE_HEAP_BASE")
    heap.region("a", jax_devices(2), 2, LAYOUT)


def is_open(descriptor: int) -> bool:
    try:
        return "memory" in os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return False


def test_close_gives_shared_memory_back(pair: list[CudaHeap]) -> None:
    # An open descriptor of memory keeps the memory from being given back, whoever has unmapped it.
    together(pair, lambda each: each.region("a", FOUR, 4, LAYOUT))
    shared = [descriptor for each in pair for descriptor in each._driver.exported]
    assert len(shared) == 4
    together(pair, lambda each: each.close())
    assert not any(map(is_open, shared))


def test_failure_gives_shared_memory_back(pair: list[CudaHeap]) -> None:
    pair[1]._driver.fail("create", after=1, code="CUDA_ERROR_OUT_OF_MEMORY")
    together(pair, lambda each: each.region("a", FOUR, 4, LAYOUT))
    shared = [descriptor for each in pair for descriptor in each._driver.exported]
    assert shared
    assert not any(map(is_open, shared))


def test_door_that_closes_ends_its_thread() -> None:
    entrance = Door()
    entrance.offer("a", os.open(os.devnull, os.O_RDONLY))
    assert door.fetch(entrance.address, "b", 2.0) is None
    thread = entrance._thread
    entrance.close()
    assert thread is not None
    thread.join(2)
    assert not thread.is_alive()


def test_teams_within_a_process_share_nothing(pair: list[CudaHeap]) -> None:
    mine, yours = together(pair, lambda each: each.region("a", FOUR, 2, LAYOUT))
    assert mine == yours
    assert sorted(pair[1]._driver.mapped) == [mine.address(2), mine.address(3)]
    assert not pair[1]._driver.imported


def test_failure_of_one_process_is_that_of_all(pair: list[CudaHeap]) -> None:
    pair[1]._driver.fail("create", after=1, code="CUDA_ERROR_OUT_OF_MEMORY")
    for result in together(pair, lambda each: each.region("a", FOUR, 4, LAYOUT)):
        assert isinstance(result, HeapError)
        assert "of device 3 for the symmetric heap" in str(result)
    assert [each._driver.leaked for each in pair] == [{}, {}]


def test_processes_ask_again_after_a_failure(pair: list[CudaHeap]) -> None:
    pair[1]._driver.fail("create", after=1, code="CUDA_ERROR_OUT_OF_MEMORY")
    together(pair, lambda each: each.region("a", FOUR, 4, LAYOUT))
    pair[1]._driver.failures.clear()
    results = together(pair, lambda each: each.region("a", FOUR, 4, LAYOUT))
    assert [type(result) for result in results] == [Region, Region], results


@pytest.mark.parametrize("call", ("import_", "map", "allow", "export"))
def test_processes_leak_nothing(pair: list[CudaHeap], call: str) -> None:
    pair[1]._driver.fail(call, after={"import_": 1, "map": 3, "allow": 3, "export": 1}[call])
    results = together(pair, lambda each: each.region("a", FOUR, 4, LAYOUT))
    assert "CUDA_ERROR_UNKNOWN" in str(results[1])
    assert pair[1]._driver.leaked == {}


def test_process_that_does_not_come(pair: list[CudaHeap]) -> None:
    pair[0]._exchange.timeout = 0.2
    with pytest.raises(
        HeapError, match=r"Process 0 waited 0\.2 s for process 1 to set up .*JAXTAXFREE_MEETING_TIMEOUT"
    ):
        pair[0].region("a", FOUR, 4, LAYOUT)
    assert pair[0]._driver.leaked == {}


def processes_of(
    monkeypatch: pytest.MonkeyPatch, members: list[Device], patience: float = 2.0, hosts: str = "", fabrics: str = ""
) -> list[CudaHeap]:
    """Heaps of the processes that drive these devices, on hosts and fabrics of one letter; "-" is no fabric."""
    monkeypatch.setattr(distributed.global_state, "client", Store())
    memory: dict[int, Any] = {}
    heaps = []
    for process in range(1 + max(device.process for device in members)):
        own = sum(device.process == process for device in members)
        driver = DriverModel(own, store=memory, first=process + 1)
        driver.fabric = fabrics[process:][:1].strip("-") or None
        heaps.append(CudaHeap(driver, one_of_several(process, patience, hosts[process:][:1]), TIMEOUT))
    return heaps


# Teams of two: of processes 0, 1 and 2, 3; and of processes 0, 1 and 0, 2.
APART = [Device(id=i, process=i, ordinal=0) for i in range(4)]
OVERLAPPING = [Device(0, 0, 0), Device(1, 1, 0), Device(2, 0, 1), Device(3, 2, 0)]


@pytest.mark.parametrize("mesh", (APART, OVERLAPPING))
def test_failure_in_one_team_is_that_of_all(monkeypatch: pytest.MonkeyPatch, mesh: list[Device]) -> None:
    heaps = processes_of(monkeypatch, mesh, patience=20.0)
    heaps[-1]._driver.fail("create", code="CUDA_ERROR_OUT_OF_MEMORY")
    start = time.monotonic()
    for result in together(heaps, lambda each: each.region("a", mesh, 2, LAYOUT)):
        assert isinstance(result, HeapError) and "of device 3 for the symmetric heap" in str(result)
    assert [each._driver.leaked for each in heaps] == [{}] * len(heaps)
    heaps[-1]._driver.failures.clear()
    results = together(heaps, lambda each: each.region("a", mesh, 2, LAYOUT))
    assert [type(result) for result in results] == [Region] * len(heaps), results
    assert time.monotonic() - start < 10  # nobody has waited for one that does not come again


@pytest.mark.parametrize("heap_is_late", (False, True))
def test_process_that_comes_late_meets_those_who_try_again(monkeypatch: pytest.MonkeyPatch, heap_is_late: bool) -> None:
    mesh = APART[:3]
    heaps = processes_of(monkeypatch, mesh[:2] if heap_is_late else mesh, patience=0.5)
    for result in together(heaps[:2], lambda each: each.region("a", mesh, 3, LAYOUT)):
        assert isinstance(result, HeapError) and "for process 2 to set up" in str(result)
    if heap_is_late:
        heaps.append(CudaHeap(DriverModel(1, store=heaps[0]._driver.store, first=3), one_of_several(2, 0.5), TIMEOUT))
    results = together(heaps, lambda each: each.region("a", mesh, 3, LAYOUT))
    assert [type(result) for result in results] == [Region] * 3, results


def test_process_that_gives_the_verdict_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = APART[:3]
    heaps = processes_of(monkeypatch, mesh, patience=0.5)
    for result in together(heaps[1:], lambda each: each.region("a", mesh, 3, LAYOUT)):
        assert isinstance(result, HeapError) and "for process 0 to set up" in str(result)
    results = together(heaps, lambda each: each.region("a", mesh, 3, LAYOUT))
    assert [type(result) for result in results] == [Region] * 3, results


@pytest.mark.parametrize("slow", (0, 2))
def test_process_that_is_too_slow_fails_with_the_others(monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    mesh = APART[:3]
    heaps = processes_of(monkeypatch, mesh, patience=0.5)
    create = heaps[slow]._driver.create

    def slowly(*args: Any) -> Any:
        time.sleep(1.0)
        return create(*args)

    with monkeypatch.context() as once:
        once.setattr(heaps[slow]._driver, "create", slowly)
        start = time.monotonic()
        for result in together(heaps, lambda each: each.region("a", mesh, 3, LAYOUT)):
            assert isinstance(result, HeapError) and f"for process {slow} to set up" in str(result)
        assert time.monotonic() - start < 1.4  # it does not begin to wait again
    assert [each._driver.leaked for each in heaps] == [{}] * 3
    results = together(heaps, lambda each: each.region("a", mesh, 3, LAYOUT))
    assert [type(result) for result in results] == [Region] * 3, results


@pytest.mark.parametrize("error", (KeyboardInterrupt(), OSError("Too many open files"), AssertionError()))
def test_processes_hear_of_every_failure(
    pair: list[CudaHeap], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    pair[0]._exchange.timeout = 20.0

    def create(*_: Any) -> Any:
        raise error

    start = time.monotonic()
    with monkeypatch.context() as failing, ThreadPoolExecutor(2) as pool:
        failing.setattr(pair[1]._driver, "create", create)
        mine, yours = (pool.submit(each.region, "a", FOUR, 4, LAYOUT) for each in pair)
        assert isinstance(yours.exception(), type(error))
        assert isinstance(mine.exception(), HeapError)
        assert type(error).__name__ in str(mine.exception()) or str(error) in str(mine.exception())
    assert time.monotonic() - start < 10
    results = together(pair, lambda each: each.region("a", FOUR, 4, LAYOUT))
    assert [type(result) for result in results] == [Region, Region], results


@pytest.mark.parametrize("ended", (0, 2))
@pytest.mark.parametrize("how", ("exits", "is killed"))
def test_process_that_has_ended_is_named(monkeypatch: pytest.MonkeyPatch, ended: int, how: str) -> None:
    heaps = processes_of(monkeypatch, APART, patience=20.0)
    entrance = heaps.pop(ended)._exchange.door
    if how == "exits":
        entrance.close()
    else:
        entrance._life.close()  # all else may be there
    start = time.monotonic()
    for result in together(heaps, lambda each: each.region("a", APART, 4, LAYOUT)):
        assert isinstance(result, HeapError)
        assert str(result).startswith(f"Process {ended} ended before all processes of the mesh had set up a.")
    assert time.monotonic() - start < 10
    assert [each._driver.leaked for each in heaps] == [{}] * 3


def test_process_whose_door_is_not_seen_may_live(monkeypatch: pytest.MonkeyPatch) -> None:
    entrance = Door()
    where, namespace, life, path = entrance.address.split(" ")
    assert not door.has_ended(entrance.address)
    entrance.close()
    assert door.has_ended(entrance.address)
    assert not door.has_ended(f"another-host {namespace} {life} {path}")
    assert not door.has_ended(f"{where} 1 {life} {path}")  # in a container


def test_process_at_whose_door_many_wait_lives() -> None:
    entrance = Door()
    entrance._listener.listen(1)
    entrance._life.listen(1)
    opened_doors.append(entrance)
    assert not any(door.has_ended(entrance.address) for _ in range(10))
    for _ in range(3):
        with pytest.raises(OSError):
            door.fetch(entrance.address, "a", 0.1)
    threading.Timer(0.2, entrance.offer, ("a", os.memfd_create("memory"))).start()  # from now on it is served
    descriptor = door.fetch(entrance.address, "a", 5.0)
    assert descriptor is not None
    os.close(descriptor)


def test_child_of_a_fork_is_no_sign_of_life() -> None:
    code = "import os, sys; from jaxtaxfree.heap import door; d = door.Door(); pid = os.fork()\n"
    code += "if pid: print(d.address, pid, flush=True); os._exit(0)\n"
    code += "os.close(1); import time; time.sleep(30)"
    output = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    address, _, child = output.strip().rpartition(" ")
    try:
        assert door.has_ended(address)
    finally:
        os.kill(int(child), signal.SIGKILL)
        os.unlink(door.path_of(address))
        os.rmdir(os.path.dirname(door.path_of(address)))


def test_process_that_comes_late_to_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = APART[:2]
    heaps = processes_of(monkeypatch, mesh, patience=0.5)
    together(heaps, lambda each: each.region("a", mesh, 2, LAYOUT))
    with pytest.raises(HeapError, match="for process 1 to set up reset"):
        heaps[0].reset()
    for _ in range(2):
        assert together(heaps, lambda each: each.reset()) == [None, None]


def test_process_that_has_missed_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    heaps = processes_of(monkeypatch, APART[:3], patience=0.5)
    together(heaps[:2], lambda each: each.region("a", APART[:2], 2, LAYOUT))
    for _ in range(2):
        assert together(heaps[:2], lambda each: each.reset()) == [None, None]
    together(heaps, lambda each: each.region("b", APART[:3], 3, LAYOUT))
    idle, clear = heaps[2]._driver.synchronized, heaps[0]._driver.zero
    before = len(idle)

    def synchronize(_: int) -> None:
        time.sleep(0.2)
        idle.append(0)

    def zero(*args: int) -> None:
        assert len(idle) > before  # nobody clears its memory before all are idle
        clear(*args)

    monkeypatch.setattr(heaps[2]._driver, "synchronize", synchronize)
    monkeypatch.setattr(heaps[0]._driver, "zero", zero)
    assert together(heaps, lambda each: each.reset()) == [None] * 3


def test_failure_in_a_reset_is_that_of_all(pair: list[CudaHeap]) -> None:
    pair[0]._exchange.timeout = 20.0
    together(pair, lambda each: each.region("a", FOUR, 4, LAYOUT))
    pair[1]._driver.fail("synchronize")
    start = time.monotonic()
    for result in together(pair, lambda each: each.reset()):
        assert isinstance(result, HeapError) and "synchronize failed with CUDA_ERROR_UNKNOWN" in str(result)
    pair[1]._driver.failures.clear()
    assert together(pair, lambda each: each.reset()) == [None, None]
    assert time.monotonic() - start < 10


def test_process_that_takes_no_calls_keeps_nobody_waiting(pair: list[CudaHeap]) -> None:
    pair[1]._exchange.timeout = 20.0
    for _ in range(3):
        pair[0].refuse("a", FOUR, 4, "until it is reset")
    start = time.monotonic()
    with pytest.raises(HeapError, match="until it is reset"):
        pair[1].region("a", FOUR, 4, LAYOUT)
    assert time.monotonic() - start < 10
    assert together(pair, lambda each: each.reset()) == [None, None]
    results = together(pair, lambda each: each.region("a", FOUR, 4, LAYOUT))
    assert [type(result) for result in results] == [Region, Region], results


def test_failure_holds_for_a_region_that_is_being_made(
    opened: CudaHeap, driver: DriverModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = opened._join

    def join(*args: Any) -> None:
        monkeypatch.setattr(opened, "_join", inner)
        give_up(driver)
        with pytest.raises(PeerTimeoutError):
            heap.check()
        inner(*args)

    monkeypatch.setattr(opened, "_join", join)
    region = heap.region("a", jax_devices(4), 4, LAYOUT)
    assert all(failed_flag(driver, region, i) for i in range(4))
    heap.reset()
    assert not any(failed_flag(driver, region, i) for i in range(4))


@pytest.mark.usefixtures("unopened")
def test_process_without_a_heap_counts_what_all_call_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_generation", 0)
    monkeypatch.setattr(heap, "_resets", 0)
    opened = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(exchange, "Processes", lambda *args: opened.append(args) or exchange.Alone())
    heap.close()
    heap.reset()
    heap.region("a", jax_devices(2), 2, LAYOUT)
    assert opened[0][:2] == (0, 1)
    assert heap._heap is not None and heap._heap._resets == 1


def test_team_that_spans_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    heaps = processes_of(monkeypatch, APART, hosts="abbb")
    for result in together(heaps, lambda each: each.region("a", APART, 2, LAYOUT)):
        assert isinstance(result, SpansHostsError)  # also processes 2 and 3, whose team does not
        name = socket.gethostname()
        assert f"the axis spans hosts (process 0 on {name}; process 1 on {name})" in str(result)
    assert [each._driver.leaked for each in heaps] == [{}] * 4


def test_mesh_of_teams_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    heaps = processes_of(monkeypatch, APART, hosts="aabb")
    regions = together(heaps, lambda each: each.region("a", APART, 2, LAYOUT))
    assert isinstance(regions[0], Region), regions
    assert all(region == regions[0] for region in regions)
    assert regions[0].places == (0, 1, 0, 1)  # as long as what one process sees
    for each in heaps:
        assert sorted(each._driver.mapped) == [regions[0].address(0), regions[0].address(1)]
        assert len(each._driver.imported) == 1
    heaps[3]._driver.fail("create", code="CUDA_ERROR_OUT_OF_MEMORY")
    for result in together(heaps, lambda each: each.region("b", APART, 2, LAYOUT)):
        assert "of device 3 for the symmetric heap" in str(result)  # one host's failure is that of all
    heaps[3]._driver.failures.clear()
    again = together(heaps, lambda each: each.region("b", APART, 2, LAYOUT))
    assert all(region == again[0] for region in again)
    assert again[0].address(0) >= regions[0].address(1) + SIZE
    assert together(heaps, lambda each: each.reset()) == [None] * 4


def test_containers_that_share_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    heaps = processes_of(monkeypatch, APART[:2], patience=20.0)
    os.unlink(door.path_of(opened_doors[1].address))  # as process 0 sees it
    results = together(heaps, lambda each: each.region("a", APART[:2], 2, LAYOUT))
    assert isinstance(results[0], HeapUnavailableError) and isinstance(results[1], HeapError)
    assert "Process 0 cannot reach process 1 at" in str(results[0])
    assert "mount one folder of the host into all of them, at the same path, and set TMPDIR to it" in str(results[0])
    assert [each._driver.leaked for each in heaps] == [{}] * 2


def test_domain_of_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    heaps = processes_of(monkeypatch, APART, hosts="aabb", fabrics="ffff")
    regions = together(heaps, lambda each: each.region("a", APART, 4, LAYOUT))
    assert isinstance(regions[0], Region), regions
    assert all(region == regions[0] for region in regions)
    for each in heaps:
        assert len(each._driver.imported) == 3 and each._driver.exported == []
        assert sorted(each._driver.mapped) == [regions[0].address(i) for i in range(4)]
        assert each._driver.read(regions[0].address(3), 4) == regions[0].magic.to_bytes(4, "little")
    heaps[3]._driver.fail("export_fabric", code="CUDA_ERROR_NOT_PERMITTED")
    for result in together(heaps, lambda each: each.region("b", APART, 4, LAYOUT)):
        assert isinstance(result, HeapError) and "CUDA_ERROR_NOT_PERMITTED" in str(result)
    for each in heaps:
        each.close()
        assert each._driver.leaked == {}


def test_meshes_of_a_domain_share_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    heaps = processes_of(monkeypatch, APART, hosts="aabb", fabrics="ffff")
    meshes = [(heaps, APART, 4), (heaps[:2], APART[:2], 2), (heaps, APART, 2), (heaps[2:], APART[2:], 2)]
    taken: dict[int, set[int]] = {process: set() for process in range(4)}
    for number, (members, devices, world) in enumerate(meshes):
        asked = (f"{number}", devices, world, LAYOUT)
        found = together(members, lambda each, asked=asked: each.region(*asked))
        for position, device in enumerate(devices):
            for process in {other.process for other in devices[position // world * world :][:world]}:
                address = found[0].address(position)
                assert address not in taken[process], (number, device)
                taken[process].add(address)


def test_teams_with_and_without_a_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    heaps = processes_of(monkeypatch, APART, hosts="abcc", fabrics="ff--")
    regions = together(heaps, lambda each: each.region("a", APART, 2, LAYOUT))
    assert all(region == regions[0] for region in regions) and isinstance(regions[0], Region), regions
    assert [len(each._driver.for_fabric) for each in heaps] == [1, 1, 0, 0]
    assert [len(each._driver.exported) for each in heaps] == [0, 0, 1, 1]


def test_teams_on_one_host_of_a_domain_take_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    heaps = processes_of(monkeypatch, APART, hosts="aabb", fabrics="ffff")
    together(heaps, lambda each: each.region("a", APART, 2, LAYOUT))
    assert [len(each._driver.exported) for each in heaps] == [1] * 4


def test_processes_of_a_host_that_find_different_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share memory as if there was no fabric, and those of other hosts do not reach them."""
    heaps = processes_of(monkeypatch, APART, hosts="aabb", fabrics="f-ff")
    regions = together(heaps, lambda each: each.region("a", APART, 2, LAYOUT))
    assert isinstance(regions[0], Region), regions
    assert [len(each._driver.exported) for each in heaps] == [1] * 4
    for result in together(heaps, lambda each: each.region("b", APART, 4, LAYOUT)):
        assert isinstance(result, SpansHostsError)
    places = together(heaps, lambda each: each.places(APART))
    assert [place.domain for place in places[0].values()] == ["a", "a", "f", "f"]


@pytest.mark.parametrize("fabrics", ("ffgg", "ff--", "fff-"))
def test_several_domains(monkeypatch: pytest.MonkeyPatch, fabrics: str) -> None:
    heaps = processes_of(monkeypatch, APART, hosts="aabb", fabrics=fabrics)
    results = together(heaps, lambda each: each.region("a", APART, 4, LAYOUT))
    assert all(isinstance(result, SpansHostsError) for result in results)
    assert len({str(result) for result in results}) == 1


def test_places_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    heaps = processes_of(monkeypatch, APART, hosts="aabc", fabrics="ff-f")
    found = together(heaps, lambda each: each.places(APART))
    name = socket.gethostname()
    wanted = {i: (host, domain, name) for i, (host, domain) in enumerate(("af", "af", "bb", "cf"))}
    assert found == [wanted] * 4
    store = distributed.global_state.client
    assert store is not None
    before = dict(store._values)
    assert together(heaps, lambda each: each.places(APART)) == [wanted] * 4
    assert store._values == before  # they are asked once
    heaps[0]._driver.domain = lambda _: pytest.fail("asked again")
    assert together(heaps[:2], lambda each: each.places(APART[:2])) == [{0: wanted[0], 1: wanted[1]}] * 2


def test_place_that_cannot_be_found_is_an_error_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    heaps = processes_of(monkeypatch, APART, patience=20.0)

    def domain(_: Any) -> str:
        raise DriverError("cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE")

    heaps[2]._driver.domain = domain
    start = time.monotonic()
    for result in together(heaps, lambda each: each.places(APART)):
        assert isinstance(result, HeapError) and "cuDeviceGet failed with CUDA_ERROR_INVALID_DEVICE" in str(result)
    assert time.monotonic() - start < 10
    del heaps[2]._driver.domain
    assert len({str(result) for result in together(heaps, lambda each: each.places(APART))}) == 1


@hypothesis.given(st.data())
def test_places_in_a_window(data: st.DataObject) -> None:
    world, teams = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    drivers = data.draw(st.lists(st.integers(0, 5), min_size=world * teams, max_size=world * teams))
    found = layout.places(drivers, world)
    for first in range(0, len(drivers), world):
        assert found[first] % world == 0
        assert found[first : first + world] == tuple(range(found[first], found[first] + world))
        for other in range(0, first, world):
            if {*drivers[first : first + world]} & {*drivers[other : other + world]}:
                assert found[first] != found[other]
    assert max(found) < len(drivers)


def test_window_does_not_grow_with_the_mesh() -> None:
    assert max(layout.places(list(range(512)), 8)) == 7  # one process a GPU
    for world in (8, 2):  # one process a host
        assert max(layout.places([device // 8 for device in range(512)], world)) == 7


class CountingStore(Store):
    """A store that counts questions, and knows what processes say that are not there.

    Args:
      says: what each says in each step.
      one_by_one: a process comes only when somebody waits for it.
    """

    def __init__(self, says: dict[str, dict[int, str]], one_by_one: bool):
        super().__init__()
        self.calls: dict[str, int] = {}
        self._says, self._come, self._one_by_one = says, 0, one_by_one

    def __getattribute__(self, name: str) -> Any:
        if "key_value" in name:
            calls = object.__getattribute__(self, "calls")
            calls[name] = calls.get(name, 0) + 1
        return object.__getattribute__(self, name)

    def come(self, upto: int, step: str) -> None:
        seats = {process: said for process, said in self._says[step].items() if process <= upto or not self._one_by_one}
        for process, said in seats.items():
            self._values.setdefault(f"{MEETING}/{step}/seats/{process}", said)

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        _, step, _, process = key.rsplit("/", 3) if "/seats/" in key else ("", "", "", "")
        if step:
            self.come(int(process), step)
        return super().blocking_key_value_get(key, timeout_ms)

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        if key.endswith("/seats"):
            self.come(0, key.split("/")[-2])
        return super().key_value_dir_get(key)


MANY = [Device(id=i, process=i, ordinal=0) for i in range(512)]
MEETING = f"jaxtaxfree/0/{layout.magic('a', tuple(range(512)), 8):x}/1"


@pytest.mark.parametrize("one_by_one", (False, True))
def test_questions_of_512_processes(monkeypatch: pytest.MonkeyPatch, one_by_one: bool) -> None:
    here = f"here HOST HOST name {' '.join(map(hex, BASES))}"
    says = {"placed": {i: here.replace("HOST", f"{i // 8}") for i in range(1, 512)}}
    says |= {step: dict.fromkeys(range(1, 512), "here ") for step in ("taken", "joined")}
    store = CountingStore(says, one_by_one)
    monkeypatch.setattr(distributed.global_state, "client", store)
    monkeypatch.setattr(door, "fetch", lambda *_: peer.export(peer.create(0, SIZE)))
    peer = DriverModel(1, 1024 * MIB, first=9)
    found = []
    for process, host in ((0, "0"), (9, "1")):  # the one that gives the verdicts, and another one, which finds them
        each = CudaHeap(DriverModel(1), one_of_several(process, 20.0, host), TIMEOUT)
        if not process:
            store._values |= {f"{door.ADDRESSES}/{i}": "host namespace life path" for i in range(1, 512)}
        store.calls.clear()
        found.append(each.region("a", MANY, 8, LAYOUT))
        calls = sum(store.calls.values())
        if process:
            assert calls == 3 * 2 + 1, store.calls  # to say and to hear in each step, and where the others are
        elif one_by_one:
            assert calls <= 3 * (2 * 511 + 4) + 2, store.calls
        else:
            assert calls == 3 * 4 + 2, store.calls
    assert found[0] == found[1]
    assert found[0].places == (*range(8),) * 64


def test_each_kind_of_mesh_has_windows_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [each._exchange for each in processes_of(monkeypatch, APART, hosts="aabb")]
    inside = [dict.fromkeys((0, 1), "a"), dict.fromkeys((0, 1), "a"), dict.fromkeys((2, 3), "b"), {2: "b", 3: "b"}]
    assert [job.next_window(6, hosts, 24) for job, hosts in zip(jobs, inside)] == [0, 6, 0, 6]
    assert jobs[0].next_window(1, inside[0], 24) is None
    across = {0: "a", 2: "b"}
    assert [jobs[0].next_window(3, across, 24) for _ in range(3)] == [12, 15, None]
    assert [jobs[i].next_window(3, {i: "a"}, 24) for i in (0, 0, 0, 1)] == [18, 21, None, 18]


def test_offers_of_several_threads(pair: list[CudaHeap]) -> None:
    entrance, interval = pair[0]._exchange.door, sys.getswitchinterval()

    def offer(thread: int) -> None:
        for _ in range(1000):
            entrance.offer(f"{thread}/0", os.open(os.devnull, os.O_RDONLY))
            entrance.withdraw(f"{thread}/")

    for position in range(1000):
        entrance.offer(f"many/{position}", os.open(os.devnull, os.O_RDONLY))
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(offer, range(4)))
    finally:
        sys.setswitchinterval(interval)
        entrance.withdraw("many/")


def test_thread_that_hands_out_memory_survives(pair: list[CudaHeap], monkeypatch: pytest.MonkeyPatch) -> None:
    path = door.path_of(pair[1]._exchange.door.address)
    accept, failures = socket.socket.accept, [OSError(24, "Too many open files")] * 3

    def failing(self: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", failing)
    for said in (b"\xff\n", b"", b"nothing\n"):
        with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
            connection.connect(path)
            connection.sendall(said)
            time.sleep(0.05)
    results = together(pair, lambda each: each.region("a", FOUR, 4, LAYOUT))
    assert [type(result) for result in results] == [Region, Region], results


def test_process_with_too_many_open_files_says_so(pair: list[CudaHeap], monkeypatch: pytest.MonkeyPatch) -> None:
    recv_fds = socket.recv_fds

    def truncated(*args: Any) -> Any:
        said, descriptors, flags, address = recv_fds(*args)
        for descriptor in descriptors:
            os.close(descriptor)
        return said, [], flags | socket.MSG_CTRUNC, address

    monkeypatch.setattr(socket, "recv_fds", truncated)
    for result in together(pair, lambda each: each.region("a", FOUR, 4, LAYOUT)):
        assert re.match(r"Process \d cannot open what process \d shares .*Too many open files.*ulimit -n", str(result))


def test_process_with_a_long_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(distributed.global_state, "client", Store())
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    entrance = Door()
    assert os.listdir(entrance.folder) == ["handles"]
    entrance.close()
    assert not os.path.exists(entrance.folder) and not os.listdir(long)


def test_store_that_fails_is_not_a_process_that_does_not_come(pair: list[CudaHeap], monkeypatch: Any) -> None:
    def failing(*_: Any) -> str:
        raise RuntimeError("CANCELLED: the client is shut down")

    monkeypatch.setattr(pair[0]._exchange._store, "blocking_key_value_get", failing)
    with pytest.raises(HeapError, match="gets no answer of JAX's coordination service") as found:
        pair[0].region("a", FOUR, 4, LAYOUT)
    assert "waited" not in str(found.value)


def test_process_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.global_state, "client", None)
    lone = CudaHeap(DriverModel(2), one_of_several(0, 1.0), TIMEOUT)
    with pytest.raises(HeapUnavailableError, match=r"call jax\.distributed\.initialize\(\) first"):
        lone.region("a", FOUR, 4, LAYOUT)
    region = lone.region("a", FOUR[:2], 2, LAYOUT)
    lone.reset()
    assert lone.region("a", FOUR[:2], 2, LAYOUT) is region
    lone.close()
    assert lone._driver.leaked == {}


SCRIPT = """
import json, os, signal, sys, threading
import jax
rank, world, port = map(int, sys.argv[1:4])
jax.distributed.initialize(f"127.0.0.1:{port}", world, rank)
from jax._src import distributed
from jaxtaxfree.heap import HeapError, door, exchange

def error_of(call, *args):
    try:
        return call(*args)
    except HeapError as error:
        return f"{type(error).__name__}: {error}"

found = {}
everyone = list(range(world))
entrance = door.announce()
job = exchange.Processes(rank, 0, 60.0, entrance)
meeting = job.meeting("memory", "a region", everyone)
hosts = dict.fromkeys(everyone, "a")
decide = lambda said: str(job.next_window(3, hosts, 100)) + " of " + " ".join(said[i] for i in everyone)
found["decided"] = [meeting.settle(step, f"{rank}", decide) for step in ("first", "second")]

descriptor = os.memfd_create("memory")
os.pwrite(descriptor, f"of {rank}".encode(), 0)
meeting.offer(0, descriptor)
meeting.settle("offered")
found["read"] = [os.pread(meeting.fetch(0, peer), 9, 0).decode() for peer in everyone if peer != rank]
meeting.settle("read")
found["not shared"] = error_of(meeting.fetch, 1, (rank + 1) % world)
os.pwrite(meeting.fetch(0, (rank + 1) % world), f"by {rank}".encode(), 0)
meeting.settle("written")
found["written"] = os.pread(descriptor, 9, 0).decode()

if rank == 1:
    meeting.fail(HeapError("device 1 is full"), ["failing"])
else:
    found["error"] = error_of(meeting.settle, "failing")
found["after"] = error_of(job.meeting("memory", "a region", everyone).settle, "fine")
store, key = distributed.global_state.client, f"twice/{rank}/key"
store.key_value_set(key, "")
try:
    store.key_value_set(key, "")
except Exception as error:
    found["twice"] = str(error)
try:
    store.key_value_try_get("absent")
except Exception as error:
    found["absent"] = str(error)
found["folder"] = [store.key_value_dir_get(f"twice/{rank}"), store.key_value_dir_get("absent")]
impatient = exchange.Processes(rank, 1, 0.5, entrance)
found["missing"] = error_of(impatient.meeting("rare", "a region", everyone).settle, "rare") if rank != 2 else None
found["missing from a reset"] = error_of(impatient.meet, "reset", everyone) if rank != 2 else None

patient = exchange.Processes(rank, 3, 60.0, entrance)
if rank == 0:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        patient.meet("nothing", [0, 1])
    except KeyboardInterrupt:
        found["interrupted"] = True
found["folder at exit"] = entrance.folder
job.meet("end", everyone)
print("FOUND " + json.dumps(found), flush=True)
"""

WORLD = 3


@pytest.fixture(scope="module")
def processes() -> list[dict[str, Any]]:
    """What each of three processes found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [*command, str(rank), str(WORLD), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert all("FOUND " in output for output in outputs), "\n".join(outputs)
    return [json.loads(output.partition("FOUND ")[2].splitlines()[0]) for output in outputs]


def test_real_processes_agree(processes: list[dict[str, Any]]) -> None:
    assert [found["decided"] for found in processes] == [["0 of 0 1 2", "3 of 0 1 2"]] * WORLD


def test_real_processes_pass_descriptors(processes: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(processes):
        assert found["read"] == [f"of {peer}" for peer in range(WORLD) if peer != rank]
        assert found["written"] == f"by {(rank - 1) % WORLD}"
        peer = (rank + 1) % WORLD
        assert found["not shared"].startswith(
            f"HeapError: Process {peer} does not share 'jaxtaxfree/0/memory/1/1' with"
        )


def test_real_processes_leave_nothing_behind(processes: list[dict[str, Any]]) -> None:
    assert not any(os.path.exists(found["folder at exit"]) for found in processes)


def test_real_process_that_waits_can_be_interrupted(processes: list[dict[str, Any]]) -> None:
    assert processes[0]["interrupted"]


def test_real_processes_raise_each_others_errors(processes: list[dict[str, Any]]) -> None:
    expected = "HeapError: Process 1: device 1 is full"
    assert [found.get("error") for found in processes] == [expected, None, expected]
    assert [found["after"] for found in processes] == [""] * WORLD


def test_real_store_does_as_its_model(processes: list[dict[str, Any]]) -> None:
    # So that what is tested with the model holds.
    for rank, found in enumerate(processes):
        assert "ALREADY_EXISTS" in found["twice"] and "NOT_FOUND" in found["absent"]
        assert found["folder"] == [[[f"twice/{rank}/key", ""]], []]


def test_real_process_is_missed(processes: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        message = processes[rank]["missing"]
        assert re.match(r"HeapError: Process [01] waited 0\.5 s for process 2 to set up a region\. ", message)
        assert "JAXTAXFREE_MEETING_TIMEOUT" in message
        assert f"Process {rank} waited 0.5 s for process 2 to set up reset." in processes[rank]["missing from a reset"]
