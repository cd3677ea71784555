"""The symmetric heap on GPUs: CUDA's virtual memory management, or HIP's, in one process or in many.

The heap reserves ranges of addresses, and the processes of a mesh agree on one that is free in all of them. A region
is a window in that range, with one part of equal size for each device of a team in the order of the mesh, so that a
kernel finds any part by arithmetic. Each process takes the memory of its own devices, and maps it and that of its
devices' peers into the window. Teams that no process shares have the same addresses: a window is as long as what one
process sees. A team is on one host, or in one NVLink domain of several; the processes of a mesh, whose program is the
same, may be anywhere.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import os
import socket
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from jaxtaxfree import environment
from jaxtaxfree.heap import layout
from jaxtaxfree.heap.driver import Driver, DriverError
from jaxtaxfree.heap.errors import HeapError, HeapUnavailableError, SpansHostsError
from jaxtaxfree.heap.exchange import Alone, Late, Meeting
from jaxtaxfree.heap.hip import HipDriver
from jaxtaxfree.heap.layout import GRANULE, RECORD_BYTES, Garbage, Layout, Record, Region
from jaxtaxfree.heap.places import Place, agreed, gathered, spanning

# Where ranges are asked for. Programs load themselves near 0x55... and their libraries below a random address near the
# top; what they map later goes below these, into the last range in one process of several.
BASES = (0x6000_0000_0000, 0x5000_0000_0000, 0x7E00_0000_0000)
RANGE_BYTES = 1 << 40
_RESETS = "its resets"  # under which it tells how many it has been through
STEPS = ("placed", "taken", "joined")  # in which processes make a region
_LEFT = "left"  # under which a process tells that it has waited for another one at a reset in vain
_OTHER_BASE = (
    f"Set JAXTAXFREE_HEAP_BASE to a free address, the same for every process, and a multiple of {GRANULE >> 20} MiB."
)


def wanted_bases() -> tuple[int, ...]:
    """Where ranges are asked for in this process. Raises ValueError if JAXTAXFREE_HEAP_BASE is no address."""
    chosen = environment.heap_base()
    return BASES if chosen is None else (chosen,)


@dataclasses.dataclass(frozen=True)
class Device:
    """What the heap must know of a JAX device.

    Attributes:
      id: the same in every process.
      process: index of the process that drives it.
      ordinal: CUDA's number of it in that process.
    """

    id: int
    process: int
    ordinal: int

    @classmethod
    def of(cls, device: Any) -> "Device":
        """Of a `jax.Device`."""
        return cls(device.id, device.process_index, device.local_hardware_id or 0)


def next_meeting(exchange: Alone, name: str, devices: Sequence[Device], world: int) -> Meeting:
    """The next attempt at a region, of all processes of the mesh."""
    key = layout.magic(name, tuple(device.id for device in devices), world)
    return exchange.meeting(f"{key:x}", name, sorted({device.process for device in devices}))


class _Part:
    """One device's part of a region, as this process sees it. `close` undoes what was done to get it."""

    def __init__(self, device: Device, address: int):
        self.device = device
        self.address = address
        self.record_address = 0  # of this process's devices only
        self.timeout = 0.0  # likewise: of a wait in a kernel, in seconds
        self._undo = contextlib.ExitStack()
        self.undo = self._undo.callback
        self.close = self._undo.close


class CudaHeap:
    """A heap on the GPUs of this process and those of its peers, which are on the same host or NVLink domain.

    Args:
      driver: CUDA's or HIP's, or a model of one.
      exchange: how to meet the other processes of the job.
      timeout: of a wait in a kernel, in seconds.
      resets: how often this process was told to reset its heap before it had this one.

    Raises:
      HeapUnavailableError: if no range of addresses is free.
      ValueError: if JAXTAXFREE_HEAP_BASE is no address.
    """

    def __init__(self, driver: Driver | HipDriver, exchange: Alone, timeout: float, resets: int = 0):
        self._driver = driver
        self._exchange = exchange
        self.timeout = timeout
        self._lock = threading.RLock()
        self._gates: dict[tuple, threading.Lock] = {}
        self._regions: dict[tuple, Region] = {}
        self._parts: dict[tuple, list[_Part]] = {}
        self._place: Place | None = None
        self._known: dict[tuple[int, ...], dict[int, Place]] = {}
        self._resets = resets
        self._refused: list[Meeting] = []
        self._failed = False
        self._bases = self._reserve()

    def region(self, name: str, devices: Sequence[Device], world: int, layout_: Layout) -> Region:
        """The region of a name on a mesh; made when it is asked for first, by all processes of the mesh together.

        Args:
          name: what the region is for. Calls with equal names share it, so they must run one after the other.
          devices: of the mesh, in an order that puts the devices of each team next to each other.
          world: devices in a team. Only devices of one team reach each other's parts.
          layout_: what a part holds.

        Raises:
          HeapUnavailableError: if a device cannot reach another one of its team, or no range of addresses is free in
            all processes.
          HeapError: if memory runs out, or another process fails or does not come.
        """
        ids = tuple(device.id for device in devices)
        key = (name, ids, world)
        # A gate for each region, not one for all: two threads may wait for other processes to make theirs.
        with self._lock:
            gate = self._gates.setdefault(key, threading.Lock())
        with gate:
            if key not in self._regions:
                region, parts = self._make(key, name, devices, world, layout_)
                with self._lock:
                    self._regions[key], self._parts[key] = region, parts
                    if self._failed:  # meanwhile
                        self._mark(parts)
            return self._regions[key]

    def places(self, devices: Sequence[Device]) -> dict[int, Place]:
        """Where the processes of a mesh are, one of them this one; all of them ask for it together.

        Raises:
          HeapError: if one of them fails or does not come.
        """
        members = sorted({device.process for device in devices})
        key = tuple(members)
        with self._lock:
            gate = self._gates.setdefault(key, threading.Lock())
        with gate:
            if key not in self._known:
                self._known[key] = gathered(self._exchange, lambda: self._own_place(devices), members)
            return self._known[key]

    def refuse(self, name: str, devices: Sequence[Device], world: int, why: str) -> None:
        """Tells the other processes that this one makes no region before a reset, so that they do not wait for it."""
        with self._lock:
            if (name, tuple(device.id for device in devices), world) not in self._regions:
                self._refused.append(next_meeting(self._exchange, name, devices, world))
                self._refused[-1].fail(HeapError(why), STEPS)

    def records(self) -> list[tuple[Region, Device, float, Record]]:
        """What ranks of this process have left behind when they gave up, and after how many seconds they did."""
        found = []
        with self._lock:
            for key, parts in self._parts.items():
                for part in parts:
                    if part.record_address:
                        record = Record.read(ctypes.string_at(part.record_address, RECORD_BYTES))
                        if record is not None:
                            found.append((self._regions[key], part.device, part.timeout, record))
        return found

    def garbage(self) -> list[tuple[Region, Device, Garbage]]:
        """What ranks of this process have found wrong in data since this was asked last."""
        with self._lock:
            return [
                (self._regions[key], part.device, found)
                for key, parts in self._parts.items()
                for part in parts
                if part.record_address
                for found in Garbage.take(part.record_address)
            ]

    def fail(self) -> None:
        """Makes every later call on this process's devices give NaN at once, and its peers time out."""
        with self._lock:
            self._failed = True
            self._mark(self._own_parts())

    def reset(self) -> None:
        """Starts every region afresh. All processes call it together, when nothing runs on their devices."""
        with self._lock:
            members = sorted({part.device.process for parts in self._parts.values() for part in parts})
            # After the last one of all members: those who came late to one have been through fewer.
            self._resets = 1 + max([self._resets, *map(int, self._exchange.heard(_RESETS, members))])
            while self._exchange.heard(f"reset/{self._resets}/{_LEFT}", members):
                self._resets += 1
            meeting = f"reset/{self._resets}"
            try:
                with self._together(f"{meeting}/idle", members):
                    for ordinal in {part.device.ordinal for part in self._own_parts()}:
                        self._driver.synchronize(ordinal)
                with self._together(f"{meeting}/done", members):
                    for key, parts in self._parts.items():
                        for part in parts:
                            if part.record_address:
                                ctypes.memset(part.record_address, 0, RECORD_BYTES)
                                self._clear(part, self._regions[key])
            except BaseException as error:
                steps = ("idle", "done", _LEFT) if isinstance(error, HeapError) and error.missing else ("idle", "done")
                why = str(error) or f"process {self._exchange.process} stopped with {type(error).__name__}"
                with contextlib.suppress(HeapError):  # then the others find out by waiting
                    for step in steps:
                        self._exchange.tell(f"{meeting}/{step}", why)
                raise
            self._exchange.tell(_RESETS, str(self._resets))
            while self._refused:
                self._refused[-1].pass_over(STEPS[0])
                self._refused.pop()
            self._failed = False

    def close(self) -> None:
        """Gives all memory and addresses back. Programs built on this heap must not run any more."""
        # All of it is done, even if some of it fails; what is last here comes first.
        with self._lock, contextlib.ExitStack() as undo:
            parts = [part for parts in self._parts.values() for part in parts]
            bases, self._bases = self._bases, []
            undo.callback(self._exchange.close)
            for base in bases:
                undo.callback(self._driver.unreserve, base, RANGE_BYTES)
            for part in parts:
                undo.callback(part.close)
            for part in self._own_parts():
                undo.callback(self._driver.synchronize, part.device.ordinal)
            # From here on nobody looks at what is given back.
            self._parts.clear()
            self._regions.clear()

    def _mark(self, parts: Sequence[_Part]) -> None:
        """Makes later calls fail on those of these parts that are this process's."""
        for part in parts:
            if part.record_address:
                address = part.address + layout.device.HEADER_FAILED.value
                self._driver.write(part.device.ordinal, address, (2).to_bytes(4, "little"))

    def _own_parts(self) -> list[_Part]:
        return [part for parts in self._parts.values() for part in parts if part.record_address]

    def _reserve(self) -> list[int]:
        """Reserves what is free: another process may have taken what this one would choose."""
        hints = wanted_bases()
        bases = []
        for hint in hints:
            try:
                address = self._driver.reserve(RANGE_BYTES, hint)
            except DriverError:
                continue
            if address == hint:
                bases.append(address)
            else:
                self._driver.unreserve(address, RANGE_BYTES)
        if not bases:
            raise HeapUnavailableError(
                f"The heap needs {RANGE_BYTES >> 30} GiB of free addresses at {' or '.join(map(hex, hints))}, and "
                f"something in this process has taken them. {_OTHER_BASE}"
            )
        return bases

    def _own_place(self, devices: Sequence[Device]) -> Place:
        """Where this process is. It stays there, so it is found with the first mesh of several processes."""
        mine = [device.ordinal for device in devices if device.process == self._exchange.process]
        if len(mine) == len(devices):
            return Place(self._exchange.host, self._exchange.host, socket.gethostname())
        with self._lock:
            if self._place is None:
                domain = self._driver.domain(mine) or self._exchange.host
                self._place = Place(self._exchange.host, domain, socket.gethostname())
            return self._place

    def _common_base(self, of_processes: Mapping[int, Sequence[str]]) -> int:
        """The first range that all processes have."""
        for base in next(iter(of_processes.values())):
            if all(base in bases for bases in of_processes.values()):
                return int(base, 0)
        found = "; ".join(f"process {process}: {' '.join(bases)}" for process, bases in sorted(of_processes.items()))
        raise HeapUnavailableError(
            f"The heap needs {RANGE_BYTES >> 30} GiB of addresses that are free in every process, and there are none "
            f"({found}). {_OTHER_BASE}"
        )

    def _make(
        self, key: tuple, name: str, devices: Sequence[Device], world: int, layout_: Layout
    ) -> tuple[Region, list[_Part]]:
        # All processes of the mesh meet, even if their teams have nothing to do with each other: so a failure of one is
        # that of all, and all of them come, or none, when the region is asked for again.
        while True:
            try:
                meeting = next_meeting(self._exchange, name, devices, world)
                return self._make_at(meeting, key, name, devices, world, layout_)
            except Late:
                continue  # with the meeting at which the others will be if they try again

    def _make_at(
        self, meeting: Meeting, key: tuple, name: str, devices: Sequence[Device], world: int, layout_: Layout
    ) -> tuple[Region, list[_Part]]:
        teams = [range(first, first + world) for first in range(0, len(devices), world)]
        teams = [team for team in teams if any(devices[i].process == self._exchange.process for i in team)]
        placed = [[(i, devices[i]) for i in team] for team in teams]
        parts: list[_Part] = []
        try:
            region, spread = self._set(meeting, key, name, devices, world, layout_)
            for team in placed:
                self._check_access([device for _, device in team])
                self._take(region, team, meeting, parts, team[0][0] // world in spread)
            meeting.settle("taken")
            for team in placed:
                self._join(region, team, meeting, parts, team[0][0] // world in spread)
            meeting.settle("joined")
        except BaseException as error:
            with contextlib.ExitStack() as undo:  # all of it, even if some of it fails
                for part in parts:
                    undo.callback(part.close)
                if not isinstance(error, Late):
                    meeting.fail(error, STEPS)
            if isinstance(error, DriverError):
                raise HeapError(str(error)) from error
            raise
        finally:
            meeting.end()
        return region, parts

    def _set(
        self, meeting: Meeting, key: tuple, name: str, devices: Sequence[Device], world: int, layout_: Layout
    ) -> tuple[Region, set[int]]:
        """Finds addresses for a region, the same in all processes of the mesh, so that all build the same program.

        Returns: the region, and which teams of the mesh are on several hosts.
        """
        owners = [device.process for device in devices]
        size = layout_.nbytes
        granules = size // GRANULE
        places = layout.places(owners, world)

        def origin(said: Mapping[int, str]) -> str:
            words = {process: text.split() for process, text in said.items()}
            found = agreed({process: Place(*text[:3]) for process, text in words.items()})
            if why := spanning(owners, world, found):
                raise SpansHostsError(why)
            base = self._common_base({process: text[3:] for process, text in words.items()})
            hosts = {process: place.host for process, place in found.items()}
            start = self._exchange.next_window(granules * (max(places) + 1), hosts, RANGE_BYTES // GRANULE)
            if start is None:
                raise HeapError(
                    f"The heap's {RANGE_BYTES >> 30} GiB of addresses are used up; {name} needs {size >> 20} MiB on "
                    f"each of {len(devices)} devices. Close the heap (jaxtaxfree.heap.close()) to begin afresh."
                )
            teams = enumerate(itertools.batched((hosts[owner] for owner in owners), world))
            spread = (str(i) for i, team in teams if len(set(team)) > 1)
            return " ".join([str(base // GRANULE + start), *spread])

        said = (*self._own_place(devices), *map(hex, self._bases))
        start, *spread = meeting.settle("placed", " ".join(said), origin).split()
        region = Region(
            name=name,
            device_ids=key[1],
            world=world,
            layout=layout_,
            origin=int(start),
            stride=granules,
            magic=layout.magic(*key),
            places=places,
        )
        return region, set(map(int, spread))

    @contextlib.contextmanager
    def _together(self, step: str, members: Sequence[int]) -> Generator[None]:
        """Runs a step of a reset in all processes; if it fails in one, all raise."""
        try:
            yield
        except DriverError as error:
            raise HeapError(str(error)) from error
        self._exchange.meet(step, members)

    def _check_access(self, team: list[Device]) -> None:
        mine = [device for device in team if device.process == self._exchange.process]
        for device in mine:
            if not self._driver.supports_virtual_memory(device.ordinal):
                raise HeapUnavailableError(
                    f"Device {device.id} cannot map memory at chosen addresses, which the heap needs."
                )
        for device in mine:
            for peer in mine:
                if device != peer and not self._driver.can_access_peer(device.ordinal, peer.ordinal):
                    raise HeapUnavailableError(
                        f"Device {device.id} cannot reach the memory of device {peer.id} (no NVLink or PCIe peer "
                        "access between them). Put devices that can on the axis, or use implementation='xla'; "
                        "`nvidia-smi topo -p2p r` shows which can."
                    )

    def _take(
        self, region: Region, team: list[tuple[int, Device]], meeting: Meeting, parts: list[_Part], fabric: bool
    ) -> None:
        """Takes, maps and clears the memory of this process's own devices of a team."""
        size = region.stride * GRANULE
        for position, device in team:
            if device.process != self._exchange.process:
                continue
            try:
                handle = self._driver.create(device.ordinal, size, fabric)
            except DriverError as error:
                if not error.out_of_memory:
                    raise
                free, total = self._driver.free_memory(device.ordinal)
                raise HeapError(
                    f"{region.name} needs {size >> 20} MiB of device {device.id} for the symmetric heap, but only "
                    f"{free >> 20} of its {total >> 20} MiB are free. JAX takes 75 % of a device's memory when it "
                    "starts: set XLA_PYTHON_CLIENT_MEM_FRACTION to less, or use implementation='xla' here."
                ) from error
            part = self._map(region, position, device, handle, parts)
            self._driver.allow(part.address, size, [device.ordinal])
            part.record_address = self._driver.allocate_host(device.ordinal, RECORD_BYTES)
            part.undo(self._driver.free_host, part.record_address)
            self._clear(part, region)
            if any(peer.process != device.process for _, peer in team):
                if fabric:
                    meeting.hand_over(position, self._driver.export_fabric(handle))
                else:
                    meeting.offer(position, self._driver.export(handle))

    def _join(
        self, region: Region, team: list[tuple[int, Device]], meeting: Meeting, parts: list[_Part], fabric: bool
    ) -> None:
        """Maps other processes' devices, and lets all own devices of the team reach the whole team's memory."""
        ordinals = [device.ordinal for _, device in team if device.process == self._exchange.process]
        for position, device in team:
            if device.process != self._exchange.process:
                handle = self._import(meeting, position, device.process, fabric)
                self._map(region, position, device, handle, parts)
            try:
                self._driver.allow(region.address(position), region.stride * GRANULE, ordinals)
            except DriverError as error:
                raise HeapUnavailableError(
                    f"The devices of process {self._exchange.process} cannot reach the memory of device {device.id} "
                    f"({error}). Put devices that can on the axis, or use implementation='xla'; `nvidia-smi topo "
                    "-p2p r` shows which can."
                ) from error

    def _import(self, meeting: Meeting, position: int, owner: int, fabric: bool) -> Any:
        """A handle of the memory of another process."""
        if fabric:
            return self._driver.import_fabric(meeting.handed_over(position, owner))
        descriptor = meeting.fetch(position, owner)
        try:
            return self._driver.import_(descriptor)
        finally:
            os.close(descriptor)

    def _map(self, region: Region, position: int, device: Device, handle: Any, parts: list[_Part]) -> _Part:
        """Maps memory where the region has it."""
        part = _Part(device, region.address(position))
        parts.append(part)
        part.undo(self._driver.release, handle)
        self._driver.map(part.address, region.stride * GRANULE, handle)
        part.undo(self._driver.unmap, part.address, region.stride * GRANULE)
        return part

    def _clear(self, part: _Part, region: Region) -> None:
        """Puts a part in the state before the first call."""
        self._driver.zero(part.device.ordinal, part.address, region.layout.control_bytes)
        part.timeout = self.timeout
        header = layout.header(region.magic, part.record_address, part.timeout)
        self._driver.write(part.device.ordinal, part.address, header)
