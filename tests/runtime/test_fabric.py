"""NVLink domains of several hosts: what is made of what NVML and the driver say. No GPU needed."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from jaxtaxfree.heap import fabric
from jaxtaxfree.heap.driver import Driver, DriverError
from jaxtaxfree.heap.fabric import Fabric

BUS = "0000:0a:00.0"
CLUSTER = bytes(range(16))


def nvml(cluster: bytes = CLUSTER, clique: int = 7, state: int = 3, status: int = 0, fails: str = "") -> Any:
    """A model of NVML's library with one GPU."""
    calls: list[str] = []

    def called(name: str) -> int:
        calls.append(name)
        return 999 if name == fails else 0

    def find(bus_id: bytes, device: Any) -> int:
        assert bus_id == BUS.encode()
        device._obj.value = 1234
        return called("find")

    def ask(device: Any, info: Any) -> int:
        assert device.value == 1234
        # As nvml.h has it: NVML_STRUCT_VERSION(GpuFabricInfo, 2) of a structure of 36 bytes.
        assert info._obj.version == 36 | 2 << 24
        memory = ctypes.addressof(info._obj)
        ctypes.memmove(memory + 4, cluster, 16)
        for offset, number in ((20, status), (24, clique)):
            ctypes.c_int.from_address(memory + offset).value = number
        ctypes.c_ubyte.from_address(memory + 28).value = state
        return called("ask")

    return SimpleNamespace(
        calls=calls,
        nvmlInit_v2=lambda: called("begin"),
        nvmlShutdown=lambda: called("end"),
        nvmlDeviceGetHandleByPciBusId_v2=find,
        nvmlDeviceGetGpuFabricInfoV=ask,
    )


def planted(monkeypatch: pytest.MonkeyPatch, library: Any) -> Any:
    monkeypatch.setattr(fabric.ctypes, "CDLL", lambda name: library)
    return library


def test_domain_is_cluster_and_clique(monkeypatch: pytest.MonkeyPatch) -> None:
    library = planted(monkeypatch, nvml())
    found = fabric.of(BUS)
    assert found == Fabric(CLUSTER.hex(), 7, 3, 0)
    assert found.domain == f"{CLUSTER.hex()}/7"
    assert library.calls == ["begin", "find", "ask", "end"]


@pytest.mark.parametrize("facts", ({"cluster": bytes(16)}, {"state": 2}, {"state": 0}, {"status": 3}))
def test_no_domain_of_several_hosts(monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]) -> None:
    planted(monkeypatch, nvml(**facts))
    found = fabric.of(BUS)
    assert found is not None and found.domain is None
    assert fabric.report(found, None)[0].startswith("NVLink ends in this host (cluster ")


@pytest.mark.parametrize("fails, ends", (("begin", False), ("find", True), ("ask", True)))
def test_nvml_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, fails: str, ends: bool) -> None:
    library = planted(monkeypatch, nvml(fails=fails))
    assert fabric.of(BUS) is None
    assert ("end" in library.calls) is ends


def test_no_nvml_or_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    old = nvml()
    del old.nvmlDeviceGetGpuFabricInfoV
    planted(monkeypatch, old)
    assert fabric.of(BUS) is None

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(fabric.ctypes, "CDLL", missing)
    assert fabric.of(BUS) is None
    assert fabric.report(None, None) == ("NVLink ends in this host (NVML tells of no fabric)", "")


class Cuda:
    """The package cuda-bindings with its own types, and functions of a model of the driver with two GPUs."""

    def __init__(self, module: Any):
        self._module = module
        self.supported = [1, 1]
        self.code = module.CUresult.CUDA_SUCCESS  # of taking memory for a fabric
        self.held: dict[int, Any] = {}
        self.imported: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):  # no function of the real driver
            raise AssertionError(name)
        return getattr(self._module, name)

    def _done(self, *values: Any) -> tuple[Any, ...]:
        return self._module.CUresult.CUDA_SUCCESS, *values

    def cuDeviceGet(self, ordinal: int) -> Any:
        return self._done(ordinal)

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return self._done(device)

    def cuCtxSetCurrent(self, context: int) -> Any:
        return self._done()

    def cuStreamCreate(self, flags: int) -> Any:
        return self._done(0)

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> Any:
        return self._done(BUS.encode().ljust(length, b"\0"))

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> Any:
        assert attribute == self._module.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
        return self._done(self.supported[device])

    def cuMemGetAllocationGranularity(self, properties: Any, flag: Any) -> Any:
        assert properties.requestedHandleTypes == self._module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        return self._done(1 << 21)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> Any:
        if int(self.code):
            return (self.code,)
        handle = 17 + len(self.held)
        self.held[handle] = properties.requestedHandleTypes
        return self._done(handle)

    def cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> Any:
        assert kind == self.held[handle]
        if kind != self._module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC:
            return self._done(3)
        exported = self._module.CUmemFabricHandle()
        exported.data = bytes([handle]) * 64
        return self._done(exported)

    def cuMemImportFromShareableHandle(self, address: int, kind: Any) -> Any:
        assert kind == self._module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        self.imported.append(ctypes.string_at(address, 64))
        return self._done(99)

    def cuMemRelease(self, handle: int) -> Any:
        del self.held[handle]
        return self._done()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    module = pytest.importorskip("cuda.bindings.driver")
    monkeypatch.setattr("jaxtaxfree.heap.driver._STREAMS", {})
    planted(monkeypatch, nvml())
    return Cuda(module)


def driver_of(cuda: Cuda) -> Driver:
    driver = Driver.__new__(Driver)
    driver._cuda = cuda
    return driver


def test_driver_of_a_domain(cuda: Cuda) -> None:
    driver = driver_of(cuda)
    domain = driver.domain([0, 1])
    assert domain == f"{CLUSTER.hex()}/7"
    assert cuda.held == {}  # what was taken to see whether it can be handed over
    found, mend = fabric.report(fabric.of(BUS), domain)
    assert "never run on several hosts of one" in found and not mend


def test_handles_of_64_bytes(cuda: Cuda) -> None:
    driver = driver_of(cuda)
    handle = driver.create(0, 1 << 21, fabric=True)
    exported = driver.export_fabric(handle)
    assert exported == bytes([handle]) * 64
    assert driver.import_fabric(exported) == 99 and cuda.imported == [exported]
    assert driver.export(driver.create(0, 1 << 21)) == 3


def test_driver_without_a_domain(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_of(cuda)
    cuda.supported[1] = 0
    assert driver.domain([0]) is not None and driver.domain([0, 1]) is None
    cuda.code = cuda.CUresult.CUDA_ERROR_NOT_PERMITTED  # there is no IMEX channel
    with pytest.raises(DriverError):
        driver.create(0, 1 << 21, fabric=True)
    assert driver.domain([0]) is None
    found, mend = fabric.report(fabric.of(BUS), None)
    assert "memory cannot be handed over" in found and "/dev/nvidia-caps-imex-channels" in mend
