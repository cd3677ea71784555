"""HIP's calls that the heap needs, for GPUs of AMD: what `driver.Driver` is for NVIDIA's, by ctypes.

It was tested on a model of the library, and never run on a GPU of AMD. Nobody knows yet whether memory of
hipMemCreate, which is coarse-grained, shows peers' atomics while a kernel runs
(https://github.com/ROCm/iris/issues/418).
"""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

from jaxtaxfree.heap.driver import DriverError
from jaxtaxfree.heap.layout import GRANULE

# https://github.com/ROCm/hip, include/hip/hip_runtime_api.h
LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
PINNED = 1  # hipMemAllocationTypePinned
FILE_DESCRIPTOR = 1  # hipMemHandleTypePosixFileDescriptor
DEVICE = 1  # hipMemLocationTypeDevice
MINIMUM = 0  # hipMemAllocationGranularityMinimum
READ_WRITE = 3  # hipMemAccessFlagsProtReadWrite
NON_BLOCKING = 1  # hipStreamNonBlocking
PORTABLE, MAPPED, COHERENT = 0x1, 0x2, 0x40000000  # hipHostMalloc...

_STREAMS: dict[int, Any] = {}  # of each device; they stay when a heap is closed, and serve the next one


class Location(ctypes.Structure):
    """hipMemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """hipMemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_type", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 4),
    )


class Access(ctypes.Structure):
    """hipMemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class HipDriver:
    """HIP's virtual memory management. Devices are ordinals, addresses and handles are integers.

    Args:
      library: libamdhip64, or a model of it; None: the one that is installed.

    Raises:
      OSError: if there is no library.
      DriverError: if it finds no GPU.
    """

    def __init__(self, library: Any = None):
        self._hip = library or _library()
        self._call("hipInit", ctypes.c_uint(0))

    def _call(self, name: str, *args: Any) -> None:
        if code := getattr(self._hip, name)(*args):
            raise DriverError(name, self._name_of(code))

    def _name_of(self, code: int) -> str:
        name_of = self._hip.hipGetErrorName
        name_of.restype = ctypes.c_char_p
        return (name_of(ctypes.c_int(code)) or b"error " + str(code).encode()).decode()

    def _enter(self, ordinal: int) -> Any:
        """Makes a device current in this thread; returns a stream of its own that waits for no other."""
        self._call("hipSetDevice", ctypes.c_int(ordinal))
        if ordinal not in _STREAMS:
            stream = ctypes.c_void_p()
            self._call("hipStreamCreateWithFlags", ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING))
            _STREAMS[ordinal] = stream
        return _STREAMS[ordinal]

    @staticmethod
    def _properties(ordinal: int) -> Properties:
        return Properties(PINNED, FILE_DESCRIPTOR, Location(DEVICE, ordinal))

    def supports_virtual_memory(self, ordinal: int) -> bool:
        """Whether a device can map memory at chosen addresses, in the heap's granules."""
        granularity = ctypes.c_size_t()
        properties = self._properties(ordinal)
        try:
            self._call(
                "hipMemGetAllocationGranularity",
                ctypes.byref(granularity),
                ctypes.byref(properties),
                ctypes.c_int(MINIMUM),
            )
        except DriverError:
            return False
        return granularity.value > 0 and GRANULE % granularity.value == 0

    def bus_id(self, ordinal: int) -> str:
        """The PCI address of a device."""
        text = ctypes.create_string_buffer(32)
        self._call("hipDeviceGetPCIBusId", text, ctypes.c_int(len(text)), ctypes.c_int(ordinal))
        return text.value.decode()

    def domain(self, ordinals: Sequence[int]) -> str | None:
        """None: memory is not handed over to other hosts."""
        del ordinals
        return None

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        """Whether kernels on `ordinal` can load and store in the memory of `peer`."""
        found = ctypes.c_int()
        self._call("hipDeviceCanAccessPeer", ctypes.byref(found), ctypes.c_int(ordinal), ctypes.c_int(peer))
        return bool(found.value)

    def free_memory(self, ordinal: int) -> tuple[int, int]:
        """Bytes that are free on a device, and bytes that it has."""
        self._enter(ordinal)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("hipMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def reserve(self, size: int, hint: int) -> int:
        """Reserves addresses, at `hint` if they are free there; returns the address."""
        address = ctypes.c_void_p()
        where = ctypes.c_void_p(hint)
        self._call(
            "hipMemAddressReserve",
            *(ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), where, ctypes.c_ulonglong(0)),
        )
        return address.value or 0

    def unreserve(self, address: int, size: int) -> None:
        self._call("hipMemAddressFree", ctypes.c_void_p(address), ctypes.c_size_t(size))

    def create(self, ordinal: int, size: int, fabric: bool = False) -> Any:
        """Takes memory of a device, to be shared with this host; returns a handle."""
        if fabric:
            raise DriverError("hipMemCreate", "hipErrorNotSupported")
        self._enter(ordinal)
        handle, properties = ctypes.c_void_p(), self._properties(ordinal)
        of_size = ctypes.c_size_t(size)
        self._call("hipMemCreate", ctypes.byref(handle), of_size, ctypes.byref(properties), ctypes.c_ulonglong(0))
        return handle.value

    def export(self, handle: Any) -> int:
        """A file descriptor through which another process can import the memory."""
        descriptor = ctypes.c_int(-1)
        self._call(
            "hipMemExportToShareableHandle",
            *(ctypes.byref(descriptor), ctypes.c_void_p(handle), ctypes.c_int(FILE_DESCRIPTOR), ctypes.c_ulonglong(0)),
        )
        return descriptor.value

    def export_fabric(self, handle: Any) -> bytes:
        del handle
        raise DriverError("hipMemExportToShareableHandle", "hipErrorNotSupported")

    def import_(self, descriptor: int) -> Any:
        """A handle of the memory that another process exported."""
        handle = ctypes.c_void_p()
        self._call(
            "hipMemImportFromShareableHandle",
            *(ctypes.byref(handle), ctypes.c_void_p(descriptor), ctypes.c_int(FILE_DESCRIPTOR)),
        )
        return handle.value

    def import_fabric(self, exported: bytes) -> Any:
        del exported
        raise DriverError("hipMemImportFromShareableHandle", "hipErrorNotSupported")

    def release(self, handle: Any) -> None:
        """Gives memory back once it is mapped nowhere any more."""
        self._call("hipMemRelease", ctypes.c_void_p(handle))

    def map(self, address: int, size: int, handle: Any) -> None:
        sizes = ctypes.c_size_t(size), ctypes.c_size_t(0)
        self._call("hipMemMap", ctypes.c_void_p(address), *sizes, ctypes.c_void_p(handle), ctypes.c_ulonglong(0))

    def unmap(self, address: int, size: int) -> None:
        self._call("hipMemUnmap", ctypes.c_void_p(address), ctypes.c_size_t(size))

    def allow(self, address: int, size: int, ordinals: list[int]) -> None:
        """Lets kernels on these devices load and store in a mapped range."""
        accesses = (Access * len(ordinals))(*(Access(Location(DEVICE, ordinal), READ_WRITE) for ordinal in ordinals))
        place = ctypes.c_void_p(address), ctypes.c_size_t(size)
        self._call("hipMemSetAccess", *place, accesses, ctypes.c_size_t(len(ordinals)))

    def zero(self, ordinal: int, address: int, size: int) -> None:
        stream = self._enter(ordinal)
        place = ctypes.c_void_p(address), ctypes.c_ubyte(0), ctypes.c_size_t(size)
        self._call("hipMemsetD8Async", *place, stream)
        self._call("hipStreamSynchronize", stream)

    def write(self, ordinal: int, address: int, data: bytes) -> None:
        stream = self._enter(ordinal)
        self._call("hipMemcpyHtoDAsync", ctypes.c_void_p(address), data, ctypes.c_size_t(len(data)), stream)
        self._call("hipStreamSynchronize", stream)

    def synchronize(self, ordinal: int) -> None:
        """Waits for everything that runs on a device."""
        self._enter(ordinal)
        self._call("hipDeviceSynchronize")

    def allocate_host(self, ordinal: int, size: int) -> int:
        """Takes zeroed memory of the host that every device can write; its address is the same on host and device."""
        self._enter(ordinal)
        address = ctypes.c_void_p()
        flags = ctypes.c_uint(PORTABLE | MAPPED | COHERENT)
        self._call("hipHostMalloc", ctypes.byref(address), ctypes.c_size_t(size), flags)
        ctypes.memset(address, 0, size)
        return address.value or 0

    def free_host(self, address: int) -> None:
        self._call("hipHostFree", ctypes.c_void_p(address))


def _library() -> Any:
    """HIP's runtime. Raises OSError if it is not installed."""
    for name in LIBRARIES:
        for folder in ("", os.path.join(os.environ.get("ROCM_PATH", "/opt/rocm"), "lib")):
            try:
                return ctypes.CDLL(os.path.join(folder, name))
            except OSError:
                continue
    raise OSError(
        f"there is no {LIBRARIES[0]}, neither where libraries are looked for nor below ROCM_PATH or /opt/rocm"
    )
