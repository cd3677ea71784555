"""A model of libamdhip64 in front of the model of a driver: it takes what ctypes would hand to the library."""

import ctypes
from typing import Any

from jaxtaxfree.heap import hip
from jaxtaxfree.heap.driver import DriverError
from jaxtaxfree.heap.layout import GRANULE
from tests.helpers.driver_model import DriverModel

OUT_OF_MEMORY, UNKNOWN, INVALID_DEVICE = 2, 999, 101
_NAMES = {OUT_OF_MEMORY: b"hipErrorOutOfMemory", UNKNOWN: b"hipErrorUnknown", INVALID_DEVICE: b"hipErrorInvalidDevice"}
_CODES = {"CUDA_ERROR_OUT_OF_MEMORY": OUT_OF_MEMORY, "CUDA_ERROR_INVALID_DEVICE": INVALID_DEVICE}


def _value(argument: Any) -> Any:
    return argument.value or 0


class HipLibrary:
    """The functions by their names in hip_runtime_api.h, with their parameters in that order."""

    def __init__(self, model: DriverModel):
        self.model = model
        self.current: int | None = None
        self.streams = 0

        def name_of(code: ctypes.c_int) -> bytes | None:
            return _NAMES.get(code.value)

        self.hipGetErrorName: Any = name_of  # restype is set on it

    def _done(self, call: Any, *args: Any) -> int:
        try:
            call(*args)
        except DriverError as error:
            return _CODES.get(error.code, UNKNOWN)
        return 0

    def hipInit(self, flags: ctypes.c_uint) -> int:
        return 0 if flags.value == 0 else UNKNOWN

    def hipSetDevice(self, device: ctypes.c_int) -> int:
        self.current = device.value
        return 0

    def hipStreamCreateWithFlags(self, stream: Any, flags: ctypes.c_uint) -> int:
        assert flags.value == hip.NON_BLOCKING and self.current is not None
        self.streams += 1
        stream._obj.value = 0x5000 + self.current
        return 0

    def hipStreamSynchronize(self, stream: ctypes.c_void_p) -> int:
        assert stream.value == 0x5000 + self.current
        return 0

    def _check(self, properties: Any) -> int:
        found = properties._obj
        assert isinstance(found, hip.Properties)
        assert (found.type, found.handle_type, found.location.type) == (1, 1, 1)
        return found.location.id

    def hipMemGetAllocationGranularity(self, granularity: Any, properties: Any, option: ctypes.c_int) -> int:
        assert option.value == 0
        if not self.model.supports_virtual_memory(self._check(properties)):
            return UNKNOWN
        granularity._obj.value = GRANULE
        return 0

    def hipDeviceGetPCIBusId(self, text: Any, length: ctypes.c_int, device: ctypes.c_int) -> int:
        assert length.value == len(text)
        text.value = self.model.bus_id(device.value).encode()
        return 0

    def hipDeviceCanAccessPeer(self, can: Any, device: ctypes.c_int, peer: ctypes.c_int) -> int:
        can._obj.value = self.model.can_access_peer(device.value, peer.value)
        return 0

    def hipMemGetInfo(self, free: Any, total: Any) -> int:
        assert self.current is not None
        free._obj.value, total._obj.value = self.model.free_memory(self.current)
        return 0

    def hipMemAddressReserve(self, address: Any, size: Any, alignment: Any, hint: Any, flags: Any) -> int:
        assert alignment.value == flags.value == 0

        def reserve() -> None:
            address._obj.value = self.model.reserve(size.value, _value(hint))

        return self._done(reserve)

    def hipMemAddressFree(self, address: Any, size: Any) -> int:
        return self._done(self.model.unreserve, _value(address), size.value)

    def hipMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> int:
        ordinal = self._check(properties)
        assert flags.value == 0 and self.current == ordinal

        def create() -> None:
            handle._obj.value = self.model.create(ordinal, size.value)

        return self._done(create)

    def hipMemExportToShareableHandle(self, exported: Any, handle: Any, kind: Any, flags: Any) -> int:
        assert (kind.value, flags.value) == (1, 0) and isinstance(exported._obj, ctypes.c_int)

        def export() -> None:
            exported._obj.value = self.model.export(_value(handle))

        return self._done(export)

    def hipMemImportFromShareableHandle(self, handle: Any, descriptor: Any, kind: Any) -> int:
        assert kind.value == 1

        def import_() -> None:
            handle._obj.value = self.model.import_(_value(descriptor))

        return self._done(import_)

    def hipMemRelease(self, handle: Any) -> int:
        return self._done(self.model.release, _value(handle))

    def hipMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert offset.value == flags.value == 0
        return self._done(self.model.map, _value(address), size.value, _value(handle))

    def hipMemUnmap(self, address: Any, size: Any) -> int:
        return self._done(self.model.unmap, _value(address), size.value)

    def hipMemSetAccess(self, address: Any, size: Any, accesses: Any, count: Any) -> int:
        assert len(accesses) == count.value
        assert all((access.location.type, access.flags) == (1, 3) for access in accesses)
        ordinals = [access.location.id for access in accesses]
        return self._done(self.model.allow, _value(address), size.value, ordinals)

    def hipMemsetD8Async(self, address: Any, value: Any, size: Any, stream: Any) -> int:
        assert value.value == 0 and stream.value == 0x5000 + self.current
        return self._done(self.model.zero, self.current, _value(address), size.value)

    def hipMemcpyHtoDAsync(self, address: Any, data: bytes, size: Any, stream: Any) -> int:
        assert size.value == len(data) and stream.value == 0x5000 + self.current
        return self._done(self.model.write, self.current, _value(address), data)

    def hipDeviceSynchronize(self) -> int:
        return self._done(self.model.synchronize, self.current)

    def hipHostMalloc(self, address: Any, size: Any, flags: Any) -> int:
        assert flags.value == 0x40000003

        def allocate() -> None:
            address._obj.value = self.model.allocate_host(self.current or 0, size.value)

        return self._done(allocate)

    def hipHostFree(self, address: Any) -> int:
        return self._done(self.model.free_host, _value(address))
