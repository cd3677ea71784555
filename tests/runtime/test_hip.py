"""The heap on a model of HIP's runtime: the same calls as with CUDA's driver. It never ran on a GPU of AMD."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from jax._src import distributed

from jaxtaxfree import heap
from jaxtaxfree.heap import HeapUnavailableError, exchange, hip
from jaxtaxfree.heap.cuda import CudaHeap
from jaxtaxfree.heap.driver import Driver, DriverError
from jaxtaxfree.heap.layout import LINE
from tests.helpers.driver_model import DriverModel
from tests.helpers.hip_model import HipLibrary
from tests.runtime import test_heap as with_cuda
from tests.runtime.test_heap import FOUR, LAYOUT, TIMEOUT, together
from tests.runtime.test_heap import closed_doors as closed_doors


@pytest.fixture(autouse=True)
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip, "_STREAMS", {})


@pytest.fixture
def model() -> DriverModel:
    return DriverModel()


@pytest.fixture
def alone(model: DriverModel) -> CudaHeap:
    return CudaHeap(hip.HipDriver(HipLibrary(model)), exchange.Alone(), TIMEOUT)


def test_it_has_the_methods_of_the_other_driver() -> None:
    assert {name for name in vars(Driver) if name[0] != "_"} == {name for name in vars(hip.HipDriver) if name[0] != "_"}


@pytest.mark.parametrize(
    "test",
    (
        with_cuda.test_equal_keys_share_a_region,
        with_cuda.test_other_keys_have_windows_of_their_own,
        with_cuda.test_threads_that_ask_together_share_a_region,
        with_cuda.test_parts_lie_in_the_order_of_the_mesh,
        with_cuda.test_parts_begin_with_a_header_and_zeros,
        with_cuda.test_out_of_memory,
        with_cuda.test_out_of_memory_in_the_second_team,
        with_cuda.test_memory_can_be_asked_for_again,
        with_cuda.test_no_peer_access,
        with_cuda.test_no_virtual_memory,
        with_cuda.test_close_gives_everything_back,
        with_cuda.test_records_are_found,
        with_cuda.test_fail_and_reset,
    ),
    ids=lambda test: test.__name__,
)
def test_the_heap_is_as_with_cuda(test: Callable, alone: CudaHeap, model: DriverModel) -> None:
    test(alone, model)


@pytest.mark.parametrize("call", ("create", "map", "allow", "allocate_host", "zero", "write"))
def test_failing_calls_leak_nothing(alone: CudaHeap, model: DriverModel, call: str) -> None:
    model.fail(call, 1)
    with pytest.raises(heap.HeapError, match=r"hip\w+ failed with hipErrorUnknown"):
        alone.region("a", with_cuda.devices(4), 4, LAYOUT)
    assert model.leaked == {}


def test_processes_share_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.global_state, "client", with_cuda.Store())
    store: dict[int, Any] = {}
    models = [DriverModel(2, store=store, first=i + 1) for i in range(2)]
    heaps = [
        CudaHeap(hip.HipDriver(HipLibrary(model)), with_cuda.one_of_several(i, 2.0), TIMEOUT)
        for i, model in enumerate(models)
    ]
    mine, yours = together(heaps, lambda each: each.region("a", FOUR, 4, LAYOUT))
    assert mine == yours
    for model in models:
        assert sorted(model.mapped) == [mine.address(i) for i in range(4)]
        assert (len(model.owned), len(model.imported)) == (2, 2)
    heaps[0]._driver.write(1, mine.address(3) + LINE, b"hello")
    assert models[1].read(mine.address(3) + LINE, 5) == b"hello"
    together(heaps, lambda each: each.close())
    assert [model.leaked for model in models] == [{}, {}]


def test_structures_are_those_of_the_header() -> None:
    assert (ctypes.sizeof(hip.Properties), ctypes.sizeof(hip.Access)) == (32, 12)
    assert (hip.Properties.location.offset, hip.Properties.win32.offset, hip.Properties.flags.offset) == (8, 16, 24)


def test_other_hosts_are_not_reached(model: DriverModel) -> None:
    driver = hip.HipDriver(HipLibrary(model))
    assert driver.domain([0]) is None and driver.bus_id(2) == "0000:02:00.0"
    for call in (
        lambda: driver.create(0, 2 << 20, True),
        lambda: driver.export_fabric(1),
        lambda: driver.import_fabric(b""),
    ):
        with pytest.raises(DriverError, match="hipErrorNotSupported"):
            call()
    assert driver._name_of(7) == "error 7"


def test_the_gpus_say_which_driver(monkeypatch: pytest.MonkeyPatch, model: DriverModel) -> None:
    amd, nvidia = SimpleNamespace(compute_capability="gfx942"), SimpleNamespace(compute_capability="9.0")
    monkeypatch.setattr(hip, "LIBRARIES", ("libamdhip64-that-is-not-there.so",))
    with pytest.raises(
        HeapUnavailableError, match=r"needs AMD's driver and ROCm's HIP runtime: there is no libamdhip64"
    ):
        heap._driver_of([amd])
    monkeypatch.setattr(hip, "_library", lambda: HipLibrary(model))
    assert isinstance(heap._driver_of([amd]), hip.HipDriver)
    monkeypatch.setattr(heap, "Driver", lambda: "CUDA's")
    assert heap._driver_of([nvidia]) == "CUDA's"
