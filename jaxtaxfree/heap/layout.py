"""What a region of the symmetric heap holds, and where. `jaxtaxfree.kernels.shmem` reads what this file writes."""

import ctypes
import dataclasses
import hashlib
import itertools
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtaxfree.kernels import shmem as device

GRANULE = 1 << device.GRANULE_SHIFT.value  # bytes; CUDA maps memory in these
LINE = 1 << device.LINE_SHIFT.value  # bytes
RECORD_BYTES = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The parts of a region, in this order: header, epochs, signals, messages, scratch.

    Attributes:
      programs: programs of the kernel's grid; each has an epoch counter of 8 bytes.
      signals: (name, number of counters of 4 bytes) of each array of signals.
      messages: (name, bytes) of each array of words that say by themselves whether they have arrived.
      words: which of the messages are of `send_words` and `receive_words`.
      scratch: (name, bytes) of each scratch. Messages and scratch have two copies, for calls of odd and of even epoch.
      shapes: (name, shape) of the arrays above, for reports; without it they have one dimension.
      parameters: names of the kernel's, for reports.
      sparse: there is room behind each array, so that the simulator sees who gets behind the end.
    """

    programs: int
    signals: tuple[tuple[str, int], ...] = ()
    messages: tuple[tuple[str, int], ...] = ()
    words: tuple[str, ...] = ()
    scratch: tuple[tuple[str, int], ...] = ()
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    parameters: tuple[str, ...] = ()
    sparse: bool = False

    @classmethod
    def of(
        cls,
        grid: tuple[int, ...],
        scratch: Mapping[str, Any],
        signals: Mapping[str, int | tuple[int, ...]],
        messages: Mapping[str, Any],
        parameters: Sequence[str] = (),
    ) -> "Layout":
        """For a kernel on a grid, with scratch, signals and messages as `shmem_call` takes them."""

        def count(shape: int | tuple[int, ...]) -> int:
            return int(np.prod(shape, dtype=np.int64))

        return cls(
            programs=math.prod(grid),
            signals=tuple((name, count(shape)) for name, shape in signals.items()),
            messages=tuple((name, 4 * count(getattr(of, "shape", of))) for name, of in messages.items()),
            words=tuple(name for name, of in messages.items() if _is_words(name, of)),
            scratch=tuple((name, math.prod(s.shape) * np.dtype(s.dtype).itemsize) for name, s in scratch.items()),
            shapes=tuple(
                (name, tuple(map(int, np.atleast_1d(getattr(of, "shape", of)))))
                for name, of in (*signals.items(), *messages.items(), *scratch.items())
            ),
            parameters=tuple(parameters),
        )

    @property
    def signal_line(self) -> int:
        """The line at which signal 0 stands."""
        return 1 + _lines(8 * self.programs)

    @property
    def signal_index(self) -> dict[str, int]:
        """Index of the first counter of each array of signals."""
        counts = [self._room(count) for _, count in self.signals]
        return {name: sum(counts[:i]) for i, (name, _) in enumerate(self.signals)}

    @property
    def control_bytes(self) -> int:
        """Size of all that must be zero before the first call."""
        return LINE * (self._message_line + sum(2 * self._room(_lines(size)) for _, size in self.messages))

    @property
    def buffer_lines(self) -> dict[str, tuple[int, int]]:
        """(first line, lines of one copy) of each array of messages and each scratch."""
        lines, at = {}, self._message_line
        for name, size in (*self.messages, *self.scratch):
            lines[name] = (at, self._room(_lines(size)))
            at += 2 * lines[name][1]
        return lines

    @property
    def _message_line(self) -> int:
        return self.signal_line + _lines(4 * sum(self._room(count) for _, count in self.signals))

    @property
    def nbytes(self) -> int:
        """Size of the region, a multiple of the granule."""
        lines = self.control_bytes // LINE + sum(2 * self._room(_lines(size)) for _, size in self.scratch)
        return math.ceil(lines * LINE / GRANULE) * GRANULE

    def _room(self, size: int) -> int:
        """Lines or counters for an array of so many; a block of another rank's index ends in it, too."""
        return 9 * size + 64 if self.sparse else size

    def awaited(self, index: int) -> str:
        """How the kernel's author calls what a wait was for: a counter such as "signal arrived[1, 3]", or a message.

        Args:
          index: of a signal; of a message -1 minus the word's place in the region.
        """
        if index < 0:
            line, word = divmod(-1 - index, LINE // 4)
            for name, (first, lines) in reversed(self.buffer_lines.items()):
                if line >= first:
                    return f"message {self._element(name, (line - first) % lines * (LINE // 4) + word)}"
        for name, first in reversed(self.signal_index.items()):
            if index >= first:
                return f"signal {self._element(name, index - first)}"
        return f"signal {index}"

    def _element(self, name: str, index: int) -> str:
        return f"{name}[{indices(index, dict(self.shapes).get(name, ()))}]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """Memory of the same layout on every device of a team, at addresses that kernels compute.

    Attributes:
      name: what asked for it: operation, shapes, dtypes, configuration.
      device_ids: of the devices in the order of the mesh, each team's devices next to each other.
      world: devices in a team.
      origin: address of the window, in granules.
      stride: from one place in the window to the next one, in granules.
      magic: i32 at the start of each part, by which a kernel knows its region.
      places: of each device's part in the window, in the order of the mesh.
      tables: for each device the addresses of all parts, as its process sees them; None: parts lie in a window. With
        tables `origin` and `stride` mean nothing.
    """

    name: str
    device_ids: tuple[int, ...]
    world: int
    layout: Layout
    origin: int
    stride: int
    magic: int
    places: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...] | None = None

    def address(self, position: int) -> int:
        """Address of the part of the device at `position` in the mesh, as its own process sees it."""
        if self.tables is not None:
            return self.tables[position][position]
        return (self.origin + self.places[position] * self.stride) * GRANULE


def places(processes: Sequence[int], world: int) -> tuple[int, ...]:
    """Where in a window each device of a mesh has its part, by the processes that drive them.

    Teams of one process follow each other. Those that no process has in common may have the same place, because what
    is an address in one process is none in another.
    """
    taken: dict[int, set[int]] = {process: set() for process in processes}
    found: list[int] = []
    for first in range(0, len(processes), world):
        members = set(processes[first : first + world])
        slot = next(slot for slot in itertools.count() if not any(slot in taken[process] for process in members))
        for process in members:
            taken[process].add(slot)
        found += range(slot * world, (slot + 1) * world)
    return tuple(found)


def indices(index: int, shape: tuple[int, ...]) -> str:
    """The indices of an element, such as "1, 3", from its place in an array; that alone if it is outside."""
    inside = shape and index < math.prod(shape)
    return ", ".join(map(str, np.unravel_index(index, shape) if inside else (index,)))


def magic(name: str, device_ids: tuple[int, ...], world: int) -> int:
    """A number of 31 bits for a region, the same in every process."""
    digest = hashlib.sha256(repr((name, device_ids, world)).encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF


def header(magic: int, record_address: int, timeout: float) -> bytes:
    """The first bytes of a region.

    Args:
      magic: as in `Region`.
      record_address: where the device writes its error record.
      timeout: of a wait, in seconds.
    """
    bytes_ = bytearray(LINE)
    struct.pack_into("<i", bytes_, device.HEADER_MAGIC.value, magic)
    struct.pack_into("<q", bytes_, device.HEADER_RECORD.value, record_address)
    struct.pack_into("<q", bytes_, device.HEADER_TIMEOUT.value, round(timeout * 1e9))
    return bytes(bytes_)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What a rank leaves behind when a wait of it has expired."""

    magic: int
    rank: int
    peer: int
    program: int
    signal: int
    expected: int
    seen: int
    epoch: int

    @classmethod
    def read(cls, memory: bytes) -> "Record | None":
        """The record in these bytes, or None if the rank has not given up."""
        words = struct.unpack_from(f"<{RECORD_BYTES // 4}i", memory)
        if words[device.RECORD_STATE.value] == 0:
            return None
        return _named(cls, "RECORD", words)


@dataclasses.dataclass(frozen=True)
class Garbage:
    """What a rank has found wrong in data, as `shmem.report_garbage` has it."""

    operand: int
    index: int
    value: int
    least: int
    most: int
    epoch: int

    @classmethod
    def take(cls, address: int) -> "list[Garbage]":
        """The reports at the address of a record. They are there no more then, and the rank may write others."""
        words = (ctypes.c_int32 * (RECORD_BYTES // 4)).from_address(address)
        found = []
        for slot in range(device.GARBAGE_SLOTS.value):
            first = device.GARBAGE_BEGIN.value + slot * device.GARBAGE_WORDS.value
            if words[first + device.GARBAGE_STATE.value]:
                found.append(_named(cls, "GARBAGE", words[first:]))
                words[first + device.GARBAGE_STATE.value] = 0
        return found

    def describe(self, name: str, rank: str, parameters: Sequence[str]) -> str:
        """For an error.

        Args:
          name: of the region.
          rank: who has found it, such as "rank 1 (device 1)".
          parameters: of the kernel.
        """
        if self.operand < 0:
            return (
                f"{name}: {rank} has no result in call {self.epoch}, because the sizes or offsets that rank "
                f"{self.index} was given for it do not fit: rank {self.index} reports them."
            )
        wanted = f"it must be {self.least}" if self.least == self.most else f"{self.least} to {self.most} is allowed"
        known = self.operand < len(parameters)  # which is said by the kernel, which may be a user's
        operand = parameters[self.operand].removesuffix("_ptr") if known else f"parameter {self.operand}"
        return (
            f"{name}: {rank} was given {operand}[{self.index}] = {self.value} in call {self.epoch}, where {wanted}. "
            "Nothing was addressed by it, and the result that depends on it is NaN: correct the operand, and go on."
        )


def _named(kind: Any, prefix: str, words: Sequence[int]) -> Any:
    """What words say, of a dataclass whose fields have their places in `kernels/shmem.py`, by the prefix."""
    at = {field.name: f"{prefix}_{field.name.upper()}" for field in dataclasses.fields(kind)}
    return kind(**{name: words[getattr(device, place).value] for name, place in at.items()})


def _is_words(name: str, messages: Any) -> bool:
    """Whether these messages, as `shmem_call` takes them, are i32 words, not f32."""
    dtype = np.dtype(getattr(messages, "dtype", np.float32))
    if dtype not in (np.float32, np.int32):
        raise ValueError(f"Messages are of float32 or of int32, and {name!r} are of {dtype}.")
    return dtype == np.int32


def _lines(size: int) -> int:
    return math.ceil(size / LINE)
