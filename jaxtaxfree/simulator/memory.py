"""The memory of all ranks: which addresses exist, and what they are called."""

import bisect
import ctypes
import dataclasses
import mmap

import numpy as np

from jaxtaxfree.heap.layout import GRANULE, LINE, Layout, indices
from jaxtaxfree.simulator.events import Event

_GUARD = 4096  # bytes around an array that belong to nobody
POISON = 0xFF  # of every byte: NaN in all floating-point types


@dataclasses.dataclass(eq=False)
class Part:
    """A range of addresses of one purpose on one rank.

    Attributes:
      name: such as "lhs_ptr" or "gathered".
      kind: "operand", "output", "updated" (both), "control", "epochs", "signals", "messages", "scratch" or "shared".
      rank: whose memory.
      start, stop: addresses.
      shape: if known, for reports.
      note: which copy, for reports.
      unit: log2 of the bytes that a word of `writers` stands for.
      writers: for each unit the index of the event that wrote it last, 0 if none.
      reads: for each thread its loads since: (clock, first unit, last unit, units, event), in the order of the clock.
    """

    name: str
    kind: str
    rank: int
    start: int
    stop: int
    shape: tuple[int, ...] = ()
    note: str = ""
    unit: int = 2
    writers: np.ndarray = dataclasses.field(init=False)
    reads: dict[int, list[tuple[int, int, int, np.ndarray, Event]]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind != "operand":
            self.writers = np.zeros((self.stop - self.start + (1 << self.unit) - 1) >> self.unit, np.int32)

    def units(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """The units that accesses of `size` bytes touch. Splits the units if they are coarser than that."""
        offsets = (addresses - np.uint64(self.start)).astype(np.int64)
        odd = int(np.bitwise_or.reduce(offsets))
        while self.unit and (size < 1 << self.unit or odd & ((1 << self.unit) - 1)):
            self._split()
        units = offsets >> self.unit
        if size == 1 << self.unit:
            return units
        return (units[:, None] + np.arange(size >> self.unit)).ravel()

    def _split(self) -> None:
        self.unit -= 1
        self.writers = np.repeat(self.writers, 2)
        for entries in self.reads.values():
            entries[:] = [
                (clock, 2 * low, 2 * high + 1, (2 * units[:, None] + np.arange(2)).ravel(), event)
                for clock, low, high, units, event in entries
            ]

    def element(self, address: int, size: int) -> str:
        """How to call the element at an address, such as `gathered[1, 0, 5] of rank 2`."""
        return f"{self.name}[{indices((address - self.start) // size, self.shape)}]{self.note} of rank {self.rank}"

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name}{self.note} of rank {self.rank}"


@dataclasses.dataclass(eq=False)
class Messages(Part):
    """One copy of an array of messages on one rank.

    Attributes:
      words: the memory, i32.
      cleared: whether whoever receives a word makes it 0 (`shmem.send_words`); it need not be sent in every call then.
      parity: of the calls whose copy this is.
      sent: for each word the last call in which it was sent; before, the call that would have come before the first.
      received: for each word the index of the event that had sent it when it was last received.
      full: for each word that is cleared, whether it has been sent since.
    """

    words: np.ndarray = dataclasses.field(kw_only=True)
    cleared: bool = dataclasses.field(kw_only=True)
    parity: int = dataclasses.field(kw_only=True)
    sent: np.ndarray = dataclasses.field(init=False)
    received: np.ndarray = dataclasses.field(init=False)
    full: np.ndarray = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sent = np.full_like(self.writers, -self.parity)
        self.received = np.zeros_like(self.writers)
        self.full = np.zeros(self.writers.shape, bool)

    def title_of(self, units: np.ndarray) -> str:
        """How to call some of the words, such as `partials[0, 3] to [1, 7] (12 words) of rank 1`."""
        first, last = int(units.min()), int(units.max())
        place = f"[{indices(first, self.shape)}]"
        if last > first:
            place += f" to [{indices(last, self.shape)}] ({len(units)} words)"
        return f"{self.name}{place}{self.note} of rank {self.rank}"


class Space:
    """The addresses that exist."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._parts: list[Part] = []
        self._buffers: dict[int, np.ndarray] = {}  # by the start of the part that lies in it

    def add(self, part: Part) -> None:
        at = bisect.bisect(self._starts, part.start)
        self._starts.insert(at, part.start)
        self._parts.insert(at, part)

    def array(self, name: str, kind: str, rank: int, value: np.ndarray) -> tuple[Part, np.ndarray]:
        """A copy of an array, with addresses around it that nobody may touch."""
        buffer = np.full(value.nbytes + 2 * _GUARD, POISON, np.uint8)
        start = (buffer.ctypes.data + _GUARD + LINE - 1) // LINE * LINE
        offset = start - buffer.ctypes.data
        copy = buffer[offset : offset + value.nbytes].view(value.dtype).reshape(value.shape)
        copy[...] = value
        part = Part(name, kind, rank, start, start + max(value.nbytes, 1), value.shape)
        self._buffers[start] = buffer
        self.add(part)
        return part, copy

    def remove(self, part: Part) -> None:
        at = bisect.bisect_left(self._starts, part.start)
        del self._starts[at], self._parts[at]
        self._buffers.pop(part.start, None)

    def at(self, address: int) -> Part | None:
        """The part that holds this address."""
        i = bisect.bisect(self._starts, address) - 1
        if i >= 0 and address < self._parts[i].stop:
            return self._parts[i]
        return None

    def split(self, addresses: np.ndarray, size: int) -> list[tuple[Part, np.ndarray]]:
        """The parts in which the accesses lie, usually one.

        Raises:
          LookupError: if an address lies in none, or one access runs from one part into another; says where.
        """
        low = high = int(addresses[0])
        if addresses.size > 1:
            low, high = int(addresses.min()), int(addresses.max())
        part = self.at(low)
        if part is not None and high + size <= part.stop:
            return [(part, addresses)]
        indices = np.searchsorted(np.array(self._starts, np.uint64), addresses, "right") - 1
        parts, found = [], []
        for index in dict.fromkeys(indices.tolist()):
            of = addresses[indices == index]
            stop = self._parts[index].stop if index >= 0 else 0
            if int(of.max()) + size > stop:
                address = next(address for address in of.tolist() if address + size > stop)
                raise LookupError(f"reaches {self._nowhere(address, size)}", address)
            parts.append(self._parts[index])
            found.append((self._parts[index], of))
        # One access may reach the same place on several ranks, but not two places; except operands, each of which lies
        # by itself.
        if len({part.kind if part.kind == "operand" else (part.name, part.note) for part in parts}) > 1:
            titles = " and ".join(part.title for part in parts[:2])
            raise LookupError(f"runs from one array into another: {titles}")
        return found

    def _nowhere(self, address: int, size: int) -> str:
        """Where an address lies that belongs to nobody."""
        i = bisect.bisect(self._starts, address) - 1
        candidates = [self._parts[j] for j in (i, i + 1) if 0 <= j < len(self._parts)]
        nearest = min(
            candidates, key=lambda part: min(abs(address - part.stop), abs(address - part.start)), default=None
        )
        if nearest is None:
            return f"address {address:#x}, where nothing is"
        count = (nearest.stop - nearest.start) // size
        return (
            f"element {(address - nearest.start) // size} of {nearest.title}, which has elements 0 to {count - 1} "
            f"of {size} bytes"
        )


class Heap:
    """The regions of a team in host memory, laid out as on the GPUs.

    Attributes:
      origin, stride: as in `heap.Region`, in granules.
      epochs: for each rank the epoch counters of its programs.
      parts: of all ranks.
    """

    def __init__(self, space: Space, world: int, layout: Layout, header: bytes):
        self.layout = layout
        shapes = dict(layout.shapes)
        self.stride = layout.nbytes // GRANULE + 1
        # Anonymous memory costs nothing before it is touched.
        self._memory = mmap.mmap(-1, (world * self.stride + 1) * GRANULE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.origin = -(-address // GRANULE)
        everything = np.frombuffer(self._memory, np.uint8)
        self.epochs: list[np.ndarray] = []
        self.parts: list[Part] = []

        def add(part: Part) -> None:
            self.parts.append(part)
            space.add(part)

        for rank in range(world):
            base = self.base(rank)
            region = everything[base - address :]
            region[: len(header)] = np.frombuffer(header, np.uint8)
            self.epochs.append(region[LINE : LINE + 8 * layout.programs].view(np.int64))
            add(Part("header", "control", rank, base, base + LINE))
            add(Part("epochs", "epochs", rank, base + LINE, base + LINE + 8 * layout.programs))
            for name, index in layout.signal_index.items():
                size = 4 * dict(layout.signals)[name]
                start = base + layout.signal_line * LINE + 4 * index
                if size:
                    add(Part(name, "signals", rank, start, start + size, shapes.get(name, ())))
            sizes = {**dict(layout.messages), **dict(layout.scratch)}
            for name, (line, lines) in layout.buffer_lines.items():
                size, kind = sizes[name], "messages" if name in dict(layout.messages) else "scratch"
                for copy in range(2):
                    at = (line + copy * lines) * LINE
                    place = (rank, base + at, base + at + size, shapes.get(name, ()))
                    note = f" (copy of {'odd' if copy else 'even'} calls)"
                    if not size:
                        continue
                    if kind == "messages":
                        words = region[at : at + size].view(np.int32)
                        cleared = name in layout.words
                        add(Messages(name, kind, *place, note, words=words, cleared=cleared, parity=copy))
                    else:
                        region[at : at + size] = POISON
                        add(Part(name, kind, *place, note))

    def base(self, rank: int) -> int:
        """Address of a rank's region."""
        return (self.origin + rank * self.stride) * GRANULE

    def rank_at(self, address: int) -> int:
        """Whose region is at an address, or would be."""
        return (address // GRANULE - self.origin) // self.stride
