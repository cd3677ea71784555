"""The CUDA driver's calls that the heap needs, as functions of plain integers.

Tests put a model of a driver in its place.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from jaxtaxfree.heap import fabric as fabrics

# Context and stream of each device. They stay when a heap is closed, and serve the next one.
_STREAMS: dict[int, tuple[Any, Any]] = {}


class DriverError(RuntimeError):
    """A call of the driver failed."""

    def __init__(self, call: str, code: str):
        super().__init__(f"{call} failed with {code}")
        self.code = code

    @property
    def out_of_memory(self) -> bool:
        return self.code in ("CUDA_ERROR_OUT_OF_MEMORY", "hipErrorOutOfMemory")


class Driver:
    """CUDA's virtual memory management. Devices are ordinals, addresses and handles are integers.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#virtual-memory-management
    """

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._cuda: Any = driver
        self._call("cuInit", 0)

    def _call(self, name: str, *args: Any) -> Any:
        code, *values = getattr(self._cuda, name)(*args)
        if int(code) != 0:
            raise DriverError(name, getattr(code, "name", str(code)))
        return values[0] if len(values) == 1 else tuple(values)

    def _enter(self, ordinal: int) -> Any:
        """Makes a device current in this thread; returns a stream of its own that waits for no other."""
        if ordinal not in _STREAMS:
            context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", ordinal))
            self._call("cuCtxSetCurrent", context)
            flags = self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
            _STREAMS[ordinal] = (context, self._call("cuStreamCreate", int(flags)))
        context, stream = _STREAMS[ordinal]
        self._call("cuCtxSetCurrent", context)
        return stream

    def _properties(self, ordinal: int, fabric: bool) -> Any:
        properties = self._cuda.CUmemAllocationProp()
        properties.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        properties.requestedHandleTypes = self._handle_type(fabric)
        return properties

    def _handle_type(self, fabric: bool) -> Any:
        types = self._cuda.CUmemAllocationHandleType
        return types.CU_MEM_HANDLE_TYPE_FABRIC if fabric else types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def supports_virtual_memory(self, ordinal: int) -> bool:
        """Whether a device can map memory at chosen addresses and share it with another process."""
        attributes = self._cuda.CUdevice_attribute
        device = self._call("cuDeviceGet", ordinal)
        return all(
            self._call("cuDeviceGetAttribute", attribute, device)
            for attribute in (
                attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
                attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            )
        )

    def bus_id(self, ordinal: int) -> str:
        """The PCI address of a device."""
        device = self._call("cuDeviceGet", ordinal)
        return self._call("cuDeviceGetPCIBusId", 32, device).rstrip(b"\0").decode()

    def domain(self, ordinals: Sequence[int]) -> str | None:
        """A name for the GPUs that reach these devices over NVLink, if they may be on several hosts.

        None if NVLink ends in the host, or memory cannot be handed over to other hosts.
        """
        attribute = self._cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
        domains = set()
        try:
            for ordinal in ordinals:
                device = self._call("cuDeviceGet", ordinal)
                found = fabrics.of(self.bus_id(ordinal))
                supported = self._call("cuDeviceGetAttribute", attribute, device)
                domains.add(found.domain if found and supported else None)
            name = domains.pop() if len(domains) == 1 else None
            if name:
                self._hand_over(ordinals[0])
        except DriverError:  # of a driver that does not know the attribute, or has no IMEX channel
            return None
        return name

    def _hand_over(self, ordinal: int) -> None:
        """Exports a little memory to other hosts, which needs an IMEX channel."""
        flag = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        size = int(self._call("cuMemGetAllocationGranularity", self._properties(ordinal, True), flag))
        handle = self.create(ordinal, size, fabric=True)
        try:
            self.export_fabric(handle)
        finally:
            self.release(handle)

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        """Whether kernels on `ordinal` can load and store in the memory of `peer`."""
        devices = (self._call("cuDeviceGet", ordinal), self._call("cuDeviceGet", peer))
        return bool(self._call("cuDeviceCanAccessPeer", *devices))

    def free_memory(self, ordinal: int) -> tuple[int, int]:
        """Bytes that are free on a device, and bytes that it has."""
        self._enter(ordinal)
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def reserve(self, size: int, hint: int) -> int:
        """Reserves addresses, at `hint` if they are free there; returns the address."""
        return int(self._call("cuMemAddressReserve", size, 0, hint, 0))

    def unreserve(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def create(self, ordinal: int, size: int, fabric: bool = False) -> Any:
        """Takes memory of a device, to be shared with this host or with those on its fabric; returns a handle."""
        self._enter(ordinal)
        return self._call("cuMemCreate", size, self._properties(ordinal, fabric), 0)

    def export(self, handle: Any) -> int:
        """A file descriptor through which another process can import the memory."""
        return int(self._call("cuMemExportToShareableHandle", handle, self._handle_type(False), 0))

    def export_fabric(self, handle: Any) -> bytes:
        """64 bytes through which a process on a host of the same fabric can import the memory."""
        return bytes(self._call("cuMemExportToShareableHandle", handle, self._handle_type(True), 0).data)

    def import_(self, descriptor: int) -> Any:
        """A handle of the memory that another process exported."""
        return self._call("cuMemImportFromShareableHandle", descriptor, self._handle_type(False))

    def import_fabric(self, exported: bytes) -> Any:
        """The same of what `export_fabric` gave."""
        memory = ctypes.create_string_buffer(exported, len(exported))
        return self._call("cuMemImportFromShareableHandle", ctypes.addressof(memory), self._handle_type(True))

    def release(self, handle: Any) -> None:
        """Gives memory back once it is mapped nowhere any more."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: Any) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def allow(self, address: int, size: int, ordinals: list[int]) -> None:
        """Lets kernels on these devices load and store in a mapped range."""
        descriptions = []
        for ordinal in ordinals:
            description = self._cuda.CUmemAccessDesc()
            description.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            description.location.id = ordinal
            description.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            descriptions.append(description)
        self._call("cuMemSetAccess", address, size, descriptions, len(descriptions))

    def zero(self, ordinal: int, address: int, size: int) -> None:
        stream = self._enter(ordinal)
        self._call("cuMemsetD8Async", address, 0, size, stream)
        self._call("cuStreamSynchronize", stream)

    def write(self, ordinal: int, address: int, data: bytes) -> None:
        stream = self._enter(ordinal)
        self._call("cuMemcpyHtoDAsync", address, data, len(data), stream)
        self._call("cuStreamSynchronize", stream)

    def synchronize(self, ordinal: int) -> None:
        """Waits for everything that runs on a device."""
        self._enter(ordinal)
        self._call("cuCtxSynchronize")

    def allocate_host(self, ordinal: int, size: int) -> int:
        """Takes zeroed memory of the host that every device can write; its address is the same on host and device."""
        self._enter(ordinal)
        flags = self._cuda.CU_MEMHOSTALLOC_PORTABLE | self._cuda.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(self._call("cuMemHostAlloc", size, flags))
        ctypes.memset(address, 0, size)
        return address

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)
