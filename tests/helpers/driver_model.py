"""A model of a CUDA driver, for tests of the heap without GPUs."""

import ctypes
import itertools
import os
from collections.abc import Sequence
from typing import Any

from jaxtaxfree.heap.driver import DriverError
from jaxtaxfree.heap.layout import GRANULE

MIB = 1 << 20


class DriverModel:
    """What `jaxtaxfree.heap.driver.Driver` does, on dictionaries; it refuses what CUDA refuses.

    Args:
      devices: number of devices.
      memory: bytes of each.
      store: memory that other models can import, by handle; shared by the models of one host in one process.
      first: what the devices' memory is called in `store`: models of one store have different ones.
    """

    def __init__(self, devices: int = 4, memory: int = 64 * MIB, store: dict[int, Any] | None = None, first: int = 1):
        self.memory = memory
        self.store = {} if store is None else store
        self.unreachable: set[tuple[int, int]] = set()
        self.without_virtual_memory: set[int] = set()
        self.taken: set[int] = set()  # addresses that something else in the process has reserved
        self.failures: dict[str, tuple[int, str]] = {}  # call -> (how many still succeed, code)
        self.reserved: dict[int, int] = {}
        self.owned: dict[int, int] = {}  # handle -> ordinal
        self.imported: set[int] = set()
        self.mapped: dict[int, int] = {}  # address -> handle
        self.access: dict[int, set[int]] = {}  # address -> ordinals
        self.host: dict[int, Any] = {}
        self.exported: list[int] = []  # descriptors
        self.fabric: str | None = None  # the NVLink domain of the devices, if it may have other hosts
        self.for_fabric: set[int] = set()  # handles that hold on other hosts
        self.synchronized: list[int] = []
        self._handles = itertools.count(first * 1000 + 1)

    def fail(self, call: str, after: int = 0, code: str = "CUDA_ERROR_UNKNOWN") -> None:
        self.failures[call] = (after, code)

    def _called(self, call: str) -> None:
        if call in self.failures:
            left, code = self.failures[call]
            if left == 0:
                raise DriverError(call, code)
            self.failures[call] = (left - 1, code)

    @property
    def leaked(self) -> dict[str, Any]:
        held = {"owned": self.owned, "imported": self.imported, "mapped": self.mapped, "host": self.host}
        return {what: things for what, things in held.items() if things}

    def supports_virtual_memory(self, ordinal: int) -> bool:
        return ordinal not in self.without_virtual_memory

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        return (ordinal, peer) not in self.unreachable

    def free_memory(self, ordinal: int) -> tuple[int, int]:
        used = sum(len(self.store[handle]) for handle, owner in list(self.owned.items()) if owner == ordinal)
        return self.memory - used, self.memory

    def reserve(self, size: int, hint: int) -> int:
        self._called("reserve")
        address = hint if hint not in self.taken and hint % GRANULE == 0 else 0x1_0000_0000
        assert address not in self.reserved
        self.reserved[address] = size
        return address

    def unreserve(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size
        assert not any(address <= mapped < address + size for mapped in self.mapped)

    def bus_id(self, ordinal: int) -> str:
        return f"0000:{ordinal:02x}:00.0"

    def domain(self, ordinals: Sequence[int]) -> str | None:
        assert ordinals and self.memory
        return self.fabric

    def create(self, ordinal: int, size: int, fabric: bool = False) -> int:
        self._called("create")
        if fabric and self.fabric is None:
            raise DriverError("cuMemCreate", "CUDA_ERROR_NOT_PERMITTED")
        if size > self.free_memory(ordinal)[0]:
            raise DriverError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY")
        handle = next(self._handles)
        self.store[handle] = bytearray(b"\xff" * size)
        self.owned[handle] = ordinal
        if fabric:
            self.for_fabric.add(handle)
        return handle

    def export(self, handle: int) -> int:
        self._called("export")
        if handle in self.for_fabric:
            raise DriverError("cuMemExportToShareableHandle", "CUDA_ERROR_INVALID_VALUE")
        descriptor = os.memfd_create("memory")
        os.pwrite(descriptor, f"{handle} {len(self.store[handle])}".encode(), 0)
        self.exported.append(descriptor)
        return descriptor

    def import_(self, descriptor: int) -> int:
        self._called("import_")
        handle, size = map(int, os.pread(descriptor, 40, 0).split())
        self.store.setdefault(handle, bytearray(b"\xff" * size))  # that of a process that really is another one
        self.imported.add(handle)
        return handle

    def export_fabric(self, handle: int) -> bytes:
        self._called("export_fabric")
        if handle not in self.for_fabric:
            raise DriverError("cuMemExportToShareableHandle", "CUDA_ERROR_INVALID_VALUE")
        return f"{self.fabric} {handle} {len(self.store[handle])}".encode().ljust(64)

    def import_fabric(self, exported: bytes) -> int:
        self._called("import_fabric")
        assert len(exported) == 64
        fabric, handle, size = exported.split()
        if fabric.decode() != self.fabric:
            raise DriverError("cuMemImportFromShareableHandle", "CUDA_ERROR_NOT_PERMITTED")
        self.store.setdefault(int(handle), bytearray(b"\xff" * int(size)))
        self.imported.add(int(handle))
        return int(handle)

    def release(self, handle: int) -> None:
        assert handle not in list(self.mapped.values()), "released while it is mapped"
        if handle in self.imported:
            self.imported.remove(handle)
        else:
            del self.owned[handle]  # the memory lives on while another process has it

    def map(self, address: int, size: int, handle: int) -> None:
        self._called("map")
        assert address % GRANULE == size % GRANULE == 0
        assert len(self.store[handle]) == size
        assert any(start <= address and address + size <= start + length for start, length in self.reserved.items())
        assert not any(other < address + size and address < other + self._size(other) for other in list(self.mapped))
        self.mapped[address] = handle

    def unmap(self, address: int, size: int) -> None:
        assert self._size(address) == size
        del self.mapped[address]
        self.access.pop(address, None)

    def allow(self, address: int, size: int, ordinals: list[int]) -> None:
        self._called("allow")
        assert self._size(address) == size
        owner = self.owned.get(self.mapped[address])
        if owner is not None and any((ordinal, owner) in self.unreachable for ordinal in ordinals):
            raise DriverError("cuMemSetAccess", "CUDA_ERROR_INVALID_DEVICE")
        self.access.setdefault(address, set()).update(ordinals)

    def zero(self, ordinal: int, address: int, size: int) -> None:
        self._called("zero")
        self._store(ordinal, address, bytes(size))

    def write(self, ordinal: int, address: int, data: bytes) -> None:
        self._called("write")
        self._store(ordinal, address, data)

    def read(self, address: int, size: int) -> bytes:
        start = self._start(address)
        return bytes(self.store[self.mapped[start]][address - start : address - start + size])

    def synchronize(self, ordinal: int) -> None:
        self._called("synchronize")
        self.synchronized.append(ordinal)

    def allocate_host(self, ordinal: int, size: int) -> int:
        self._called("allocate_host")
        memory = ctypes.create_string_buffer(size)
        self.host[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free_host(self, address: int) -> None:
        del self.host[address]

    def _size(self, address: int) -> int:
        return len(self.store[self.mapped[address]])

    def _start(self, address: int) -> int:
        return next(start for start in list(self.mapped) if start <= address < start + self._size(start))

    def _store(self, ordinal: int, address: int, data: bytes) -> None:
        start = self._start(address)
        assert ordinal in self.access[start], f"device {ordinal} may not write at {address:x}"
        assert address - start + len(data) <= self._size(start)
        self.store[self.mapped[start]][address - start : address - start + len(data)] = data
