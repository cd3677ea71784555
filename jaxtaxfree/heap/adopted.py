"""The symmetric heap in memory that another library owns, such as Iris's or rocSHMEM's: kernels find it by a table.

It was tested on a model of a driver, and on two NVIDIA GPUs with memory of CUDA's driver; not with those libraries.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtaxfree.heap import layout
from jaxtaxfree.heap.cuda import STEPS, CudaHeap, Device, _Part, next_meeting
from jaxtaxfree.heap.driver import Driver, DriverError
from jaxtaxfree.heap.errors import HeapError
from jaxtaxfree.heap.exchange import Alone, Late
from jaxtaxfree.heap.hip import HipDriver
from jaxtaxfree.heap.layout import LINE, RECORD_BYTES, Layout, Region

type Bases = tuple[tuple[int, ...], ...]


def checked(bases: Any, nbytes: int, count: int) -> Bases:
    """A table as `adopt` takes it: for each of `count` devices the addresses of all. Raises ValueError otherwise."""
    table = np.asarray(bases)
    reasons = []
    if table.dtype.kind not in "iu" or table.shape not in ((count,), (count, count)):
        reasons.append(
            f"bases are whole numbers [{count}], or [{count}, {count}] with a row as each rank sees them, for {count} "
            f"devices, not {table.dtype}{list(table.shape)}"
        )
    elif (table % LINE).any() or not table.all():
        reasons.append(
            f"each base is an address that {LINE} divides, not {hex(int(table[(table % LINE > 0) | (table == 0)][0]))}"
        )
    if nbytes < layout.GRANULE:
        reasons.append(f"nbytes is at least {layout.GRANULE}, not {nbytes}")
    if reasons:
        raise ValueError(f"heap.adopt: {'; '.join(reasons)}.")
    return tuple(tuple(map(int, row)) for row in np.broadcast_to(table, (count, count)))


class AdoptedHeap(CudaHeap):
    """Regions one after the other in memory of another library, at the same place on each rank.

    Args:
      driver: CUDA's or HIP's, or a model of one. It writes into the memory, and does not map it.
      bases: for each device the address of every device's memory, as its process sees it.
      ids: of the devices, in the order of `bases`.
      nbytes: of each device.
      exchange, timeout, resets: as in `CudaHeap`.
    """

    def __init__(
        self,
        driver: Driver | HipDriver,
        bases: Bases,
        ids: Sequence[int],
        nbytes: int,
        exchange: Alone,
        timeout: float,
        resets: int = 0,
    ):
        self._table = {id_: dict(zip(ids, row)) for id_, row in zip(ids, bases)}
        self._nbytes, self._used = nbytes, 0
        super().__init__(driver, exchange, timeout, resets)

    def _reserve(self) -> list[int]:
        return []

    def _make(
        self, key: tuple, name: str, devices: Sequence[Device], world: int, layout_: Layout
    ) -> tuple[Region, list[_Part]]:
        if unknown := [device.id for device in devices if device.id not in self._table]:
            raise HeapError(f"{name} is for devices {unknown}, whose bases heap.adopt was not told.")
        while True:
            try:
                return self._make_once(key, name, devices, world, layout_)
            except Late:
                continue  # as in CudaHeap

    def _make_once(
        self, key: tuple, name: str, devices: Sequence[Device], world: int, layout_: Layout
    ) -> tuple[Region, list[_Part]]:
        with self._lock:
            offset = self._used
            self._used += layout_.nbytes
        meeting = next_meeting(self._exchange, name, devices, world)
        parts: list[_Part] = []
        try:
            if offset + layout_.nbytes > self._nbytes:
                raise HeapError(
                    f"{name} needs {layout_.nbytes >> 20} MiB of the adopted heap, of whose {self._nbytes >> 20} MiB "
                    f"{offset >> 20} are taken: allocate more there."
                )
            meeting.settle("placed", str(offset), _alike)
            region = Region(
                name=name,
                device_ids=key[1],
                world=world,
                layout=layout_,
                origin=0,
                stride=0,
                magic=layout.magic(*key),
                places=tuple(range(len(devices))),
                tables=tuple(tuple(self._table[device.id][peer.id] + offset for peer in devices) for device in devices),
            )
            for position, device in enumerate(devices):
                if device.process == self._exchange.process:
                    parts.append(_Part(device, region.address(position)))
                    parts[-1].record_address = self._driver.allocate_host(device.ordinal, RECORD_BYTES)
                    parts[-1].undo(self._driver.free_host, parts[-1].record_address)
                    self._clear(parts[-1], region)
            meeting.settle("taken")
            meeting.settle("joined")
        except BaseException as error:
            for part in parts:
                part.close()
            if not isinstance(error, Late):
                meeting.fail(error, STEPS)
            if isinstance(error, DriverError):
                raise HeapError(str(error)) from error
            raise
        finally:
            meeting.end()
        return region, parts


def _alike(said: Mapping[int, str]) -> str:
    """The offset of a region, if it is the same in all processes."""
    if len(set(said.values())) > 1:
        found = ", ".join(f"process {process} at {offset}" for process, offset in sorted(said.items()))
        raise HeapError(f"The processes ask for regions of the adopted heap in different orders ({found}).")
    return next(iter(said.values()))
