"""What is ordered after what: vector clocks, and the check of every access against them.

The rules are those of the GPU's memory model as far as the device API uses them:

* A release publishes what its program knew of the others, and of its own stores those before its last block barrier.
* An acquire that reads a released counter learns what was published there, if the scopes of both reach each other:
  "sys" reaches all ranks, "gpu" those programs of its own rank, "cta" nobody.
* The end of a call on a rank comes before the next call on that rank, and not before anything on another one.

A message publishes nothing but itself. But who has received one knows that all its sender had received before has been
read, and this is what lets the words be sent again two calls later. So there are two clocks: what is ordered before a
program as data, and what it has heard of, which is used for messages alone.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jaxtaxfree.simulator.errors import DataRaceError, MissingFenceError, UninitializedReadError
from jaxtaxfree.simulator.events import Event, Stack, who
from jaxtaxfree.simulator.memory import Part


@dataclasses.dataclass(slots=True, eq=False)
class Counter:
    """A word on which atomics meet.

    Attributes:
      version: changes with the word.
      everywhere: what was published at system scope, as both vector clocks.
      within: what programs of one rank have published, by rank.
      raised: each increment, if the word is a signal.
      made: increments by call.
      expected: by (thread, which of its waits in a call): the last call with that wait, and the count it asked for.
      a_call: increments that a call makes if the waits are right: so much more does each wait ask for in the next one.
      awaited: the lines of the last wait.
    """

    version: int = 0
    everywhere: np.ndarray | None = None
    within: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    raised: list[Event] = dataclasses.field(default_factory=list)
    made: dict[int, int] = dataclasses.field(default_factory=dict)
    expected: dict[tuple[int, int], tuple[int, int]] = dataclasses.field(default_factory=dict)
    a_call: int | None = None
    awaited: Stack = ()


ORDERED, HEARD = 0, 1  # the rows of a pair of vector clocks
SHARED, PROXIED, SHARED_PROXIED = 2, 3, 4  # and those that `AgentClocks` has besides

# What waits for an asynchronous operation, where that is no mbarrier.
_WAITS = {"TMA store": "tma.store_wait", "warpgroup MMA": "warpgroup_mma_wait"}


def _extent(units: np.ndarray) -> tuple[int, int]:
    """The first and the last one."""
    first = int(units[0])
    return (first, first) if units.size == 1 else (int(units.min()), int(units.max()))


def each(writers: np.ndarray) -> Sequence[int]:
    """All that are among them, usually one."""
    first = int(writers[0])
    if writers.size == 1 or not np.count_nonzero(writers != first):
        return (first,)
    return np.unique(writers).tolist()


class Clocks:
    """Vector clocks of all programs of all ranks. A program is one thread through all calls of its rank."""

    _rows = 2  # of what a thread knows
    _direct = slice(0, 2)  # rows in which it knows what it has done itself as soon as that is done

    def __init__(self, world: int, programs: int):
        threads = world * programs
        self.world, self._programs = world, programs
        # Of each thread that runs: up to which time it knows each other one, [rows, threads].
        self.known: dict[int, np.ndarray] = {}
        self._own = [0] * threads  # its own time of each thread
        self._barrier = [0] * threads  # a thread's own time at its last block barrier
        self._before = np.zeros(
            (world, self._rows, threads), np.int32
        )  # what is ordered before the current call of a rank
        self._ended = np.zeros((world, self._rows, threads), np.int32)  # joined over the programs that have ended in it
        self.events: list[Event | None] = [None]
        self.counters: dict[int, Counter] = {}

    def start(self, rank: int, thread: int) -> None:
        self.known[thread] = self._before[rank].copy()
        self._own[thread] += 1
        self.barrier(thread)

    def end(self, rank: int, thread: int) -> None:
        np.maximum(self._ended[rank], self.known.pop(thread), out=self._ended[rank])

    def end_call(self, rank: int) -> None:
        self._before[rank] = self._ended[rank]

    def barrier(self, thread: int) -> None:
        self._barrier[thread] = self._own[thread]
        self._tick(thread)

    def _tick(self, thread: int) -> None:
        self._own[thread] += 1
        self.known[thread][self._direct, thread] = self._own[thread]

    def release(self, counter: Counter, rank: int, thread: int, scope: str) -> None:
        if scope == "cta":
            return
        published = self._published(thread)
        within = counter.within.get(rank)
        counter.within[rank] = published if within is None else np.maximum(within, published)
        if scope == "sys":
            before = counter.everywhere
            counter.everywhere = published if before is None else np.maximum(before, published)

    def _published(self, thread: int) -> np.ndarray:
        published = self.known[thread].copy()
        published[self._direct, thread] = self._barrier[thread]
        return published

    def acquire(self, counter: Counter, rank: int, thread: int, scope: str) -> None:
        if scope == "cta":
            return
        known = self.known[thread]
        if (within := counter.within.get(rank)) is not None:
            np.maximum(known, within, out=known)
        if scope == "sys" and counter.everywhere is not None:
            np.maximum(known, counter.everywhere, out=known)
        known[self._direct, thread] = self._own[thread]

    def send(self, event: Event) -> int:
        """Remembers that messages were sent. Returns the index of the event."""
        event.heard = self.known[event.thread][HEARD].copy()
        self._tick(event.thread)
        self.events.append(event)
        return len(self.events) - 1

    def hear(self, thread: int, sends: Iterable[Event]) -> None:
        """Messages have been received."""
        heard = self.known[thread][HEARD]
        for send in sends:
            assert send.heard is not None
            np.maximum(heard, send.heard, out=heard)
        heard[thread] = self._own[thread]

    def event(self, verb: str, rank: int, program: int, call: int, thread: int, step: int, lines: Stack) -> Event:
        return Event(verb, rank, program, call, thread, self._own[thread], step, lines)

    def read(self, part: Part, addresses: np.ndarray, size: int, event: Event) -> None:
        """Checks a load and remembers it."""
        units = part.units(addresses, size)
        writers = part.writers[units]
        self.check_writers(part, units, writers, event, "reads", size)
        if part.kind in ("scratch", "output", "shared"):
            self._check_written(part, units, writers, event, size)
        self.remember_read(part, units, event)

    @staticmethod
    def remember_read(part: Part, units: np.ndarray, event: Event) -> None:
        low, high = _extent(units)
        entries = part.reads.setdefault(event.thread, [])
        if entries and entries[-1][0] == event.clock and len(units) == 1 and entries[-1][1:3] == (low, high):
            return
        entries.append((event.clock, low, high, units, event))

    def write(self, part: Part, addresses: np.ndarray, size: int, event: Event) -> None:
        """Checks a store, or an atomic that changes the word, and remembers it."""
        units = part.units(addresses, size)
        writers = part.writers[units]
        self.check_writers(part, units, writers, event, "overwrites", size)
        self.check_readers(part, units, event, ORDERED, size)
        if event.verb == "atomic" and part.kind == "scratch":  # what was there is in the sum
            self._use(writers)
        part.writers[units] = len(self.events)
        self.events.append(event)

    def observe(self, part: Part, addresses: np.ndarray, size: int, event: Event) -> None:
        """Checks an atomic that only looks."""
        units = part.units(addresses, size)
        writers = part.writers[units]
        self.check_writers(part, units, writers, event, "reads", size)
        if part.kind == "scratch":
            self._use(writers)

    def _use(self, writers: np.ndarray) -> None:
        for index in np.unique(writers).tolist():
            if (writer := self.events[index]) is not None:
                writer.use()

    def check_writers(
        self, part: Part, units: np.ndarray, writers: np.ndarray, event: Event, does: str, size: int
    ) -> None:
        """Checks that an access is ordered after what wrote there before."""
        for index in each(writers):
            writer = self.events[index]
            if writer is None or self._ordered(part, event, writer):
                continue
            element = self._element(part, int(units[np.argmax(writers == index)]), size)
            raise self._race(part, f"Data race on {element}: {event} {does} what {writer} wrote, ", event, writer)

    def _ordered(self, part: Part, event: Event, writer: Event) -> bool:
        """Whether an access comes after a write to the same place."""
        del part
        if writer.thread == event.thread:
            return True
        if writer.verb == event.verb == "atomic":
            # Those of which one does not reach the other's GPU, or block, are as good as ordinary accesses.
            enough = ("sys",) if writer.rank != event.rank else ("sys", "gpu")
            if writer.scope in enough and event.scope in enough:
                return True
        return self._knows(ORDERED, event, writer)

    def _knows(self, row: int, event: Event, other: Event) -> bool:
        return self.known[event.knower][row, other.thread] >= other.clock

    def _race(self, part: Part, what: str, event: Event, writer: Event) -> DataRaceError:
        del part
        return DataRaceError(f"{what}and nothing orders the one after the other. {self._missing(event, writer)}")

    def _missing(self, event: Event, writer: Event) -> str:
        """What would have made a store known to others."""
        if self._knows(HEARD, event, writer):
            return "Messages came after it, but they publish nothing but themselves: signal, and wait for the signal."
        if self._barrier[writer.thread] < writer.clock:
            return "The writing program has passed no block barrier since, so none of its releases publishes the store."
        return (
            "The writing program has passed a block barrier since, but this one has acquired no later release of it: "
            "both must be at system scope, and meet on one signal."
        )

    def _check_written(self, part: Part, units: np.ndarray, writers: np.ndarray, event: Event, size: int) -> None:
        for index in each(writers):
            writer = self.events[index]
            if writer is not None and (part.kind == "output" or writer.call == event.call):
                writer.use()
                continue
            element = self._element(part, int(units[np.argmax(writers == index)]), size)
            if writer is not None and writer.call > event.call:
                raise DataRaceError(
                    f"Data race on {element}: {writer} has overwritten what {event} was to read, and nothing made it "
                    "wait for that."
                )
            last = "nobody has ever written" if writer is None else f"{writer} was the last to write"
            raise UninitializedReadError(f"{event} reads {element}, which nobody has written in this call: {last} it.")

    def check_readers(self, part: Part, units: np.ndarray, event: Event, row: int, size: int) -> None:
        """Checks that a write is ordered after those who read there before."""
        known = self.known[event.knower]
        low, high = _extent(units)
        for thread, entries in part.reads.items():
            if thread == event.thread or not entries:
                continue
            ordered = known[self._row_of_readers(part, event, entries[-1][-1], row), thread]
            if entries[-1][0] <= ordered:
                continue
            for clock, first, last, others, reader in reversed(entries):
                if clock <= ordered:
                    break
                if first > high or last < low:
                    continue
                inside = others[(others >= low) & (others <= high)]
                touched = np.zeros(high - low + 1, bool)
                touched[units - low] = True
                common = np.sort(inside[touched[inside - low]])
                if common.size:
                    what = f"Data race on {self._element(part, int(common[0]), size)}: {event} overwrites what "
                    raise self._late(part, f"{what}{reader} reads, ", event, reader)

    @staticmethod
    def _row_of_readers(part: Part, event: Event, reader: Event, row: int) -> int:
        """What a write has to know of the reads of one thread, of which `reader` is one."""
        del part, event, reader
        return row

    def _late(self, part: Part, what: str, event: Event, reader: Event) -> DataRaceError:
        """The race of a write with an earlier read."""
        del part, event
        return DataRaceError(
            f"{what}and nothing orders the one after the other: on a GPU the reader may still be at it."
            f"{self._until(reader)}"
        )

    def _until(self, reader: Event) -> str:
        """What makes it known that a read has ended, if more is to be said of it."""
        del reader
        return ""

    def forget(self, parts: list[Part]) -> None:
        """Drops the loads that are ordered before everything that can still come."""
        thresholds = self._before.min(axis=0)
        for part in parts:
            threshold = thresholds[HEARD if part.kind == "messages" else ORDERED]
            for thread, entries in part.reads.items():
                if entries and entries[0][0] <= threshold[thread]:
                    entries[:] = [entry for entry in entries if entry[0] > threshold[thread]]

    @staticmethod
    def _element(part: Part, unit: int, size: int) -> str:
        return part.element(part.start + (unit << part.unit), size)

    def name(self, thread: int, call: int) -> str:
        return who(thread // self._programs % self.world, thread % self._programs, call)


class AgentClocks(Clocks):
    """Clocks of Gluon kernels, whose programs are several threads.

    Besides its own thread a program has lanes: threads of its partitions, of its mbarriers, and of the operations that
    each partition begins and that run on their own. An operation is an access by such a lane, at a time that others
    know when they have waited for it; what comes before it is what the partition knew that began it.

    A GPU's asynchronous operations see memory by another path (proxy) than loads and stores do. So there are rows for
    what is ordered before a thread in shared memory, and for what is ordered before the asynchronous operations that
    it begins: a fence makes these two what the thread itself knows.
    """

    _rows = 5
    _direct = slice(0, 3)

    def __init__(self, world: int, programs: int):
        super().__init__(world, programs)
        self._arriving: dict[int, np.ndarray] = {}  # by the lane of an mbarrier: what those know who have arrived

    def lane(self, thread: int, index: int) -> int:
        """A thread of a program besides its own, from 1 on."""
        lane = thread + index * self.world * self._programs
        while lane >= len(self._own):
            self._grow()
        return lane

    def _grow(self) -> None:
        more = 8 * self.world * self._programs

        def wider(vectors: np.ndarray) -> np.ndarray:
            return np.pad(vectors, [(0, 0)] * (vectors.ndim - 1) + [(0, more)])

        self._own += [0] * more
        self._barrier += [0] * more
        self._before, self._ended = wider(self._before), wider(self._ended)
        self.known = {thread: wider(known) for thread, known in self.known.items()}
        self._arriving = {lane: wider(known) for lane, known in self._arriving.items()}
        for counter in self.counters.values():
            counter.within = {rank: wider(known) for rank, known in counter.within.items()}
            if counter.everywhere is not None:
                counter.everywhere = wider(counter.everywhere)
        for event in self.events:
            if event is not None and event.heard is not None:
                event.heard = wider(event.heard)

    def fork(self, thread: int, lane: int) -> None:
        """A partition begins."""
        self._own[lane] += 1
        self.known[lane] = self.known[thread].copy()
        self.known[lane][self._direct, thread] = self._barrier[thread]
        self.barrier(lane)

    def join(self, thread: int, lane: int) -> None:
        """A partition has ended."""
        known = self.known[thread]
        np.maximum(known, self.known.pop(lane), out=known)

    def end(self, rank: int, thread: int) -> None:
        for lane in range(thread, len(self._own), self.world * self._programs):
            self.known[thread][self._direct, lane] = self._own[lane]
            if lane != thread:
                self.known.pop(lane, None)
                self._arriving.pop(lane, None)
        super().end(rank, thread)

    def end_call(self, rank: int) -> None:
        super().end_call(rank)
        before = self._before[rank]
        before[PROXIED], before[SHARED_PROXIED] = before[ORDERED], before[SHARED]

    def _published(self, thread: int) -> np.ndarray:
        published = super()._published(thread)
        published[PROXIED] = 0  # a fence comes after the acquire
        return published

    # Mbarriers.

    def arrive(self, thread: int, lane: int) -> None:
        """An arrival at an mbarrier, before which Triton puts a barrier of the partition."""
        published = self.known[thread].copy()
        self.barrier(thread)
        before = self._arriving.get(lane)
        self._arriving[lane] = published if before is None else np.maximum(before, published)

    def complete(self, lane: int) -> None:
        """A phase of an mbarrier is complete."""
        known = self._arriving.pop(lane)
        if lane in self.known:
            np.maximum(known, self.known[lane], out=known)
        known[:, lane] = self._own[lane]
        self.known[lane] = known
        self._own[lane] += 1

    def learn(self, thread: int, lane: int) -> None:
        """A thread has seen that the phases of an mbarrier are complete, as far as they are."""
        if lane in self.known:
            known = self.known[thread]
            np.maximum(known, self.known[lane], out=known)
            known[self._direct, thread] = self._own[thread]

    # Asynchronous operations.

    def now(self, lane: int) -> int:
        """The time of the phase of an mbarrier that goes on."""
        return self._own[lane]

    def begin(self, lane: int) -> int:
        """The time of the next operation of a lane."""
        self._own[lane] += 1
        return self._own[lane]

    def sees(self, thread: int, event: Event) -> bool:
        """Whether something that was done to shared memory is ordered before a thread."""
        return bool(self.known[thread][SHARED, event.thread] >= event.clock)

    def know(self, thread: int, lane: int, time: int, rows: slice | list[int]) -> None:
        """A thread has waited for a lane's operations until this time."""
        known = self.known[thread]
        known[rows, lane] = np.maximum(known[rows, lane], time)

    def fence(self, thread: int, row: int, proxied: int) -> None:
        known = self.known[thread]
        np.maximum(known[proxied], known[row], out=known[proxied])
        self._tick(thread)

    def _ordered(self, part: Part, event: Event, writer: Event) -> bool:
        if event.issuer is None and (part.kind != "shared" or writer.thread == event.thread):
            return super()._ordered(part, event, writer)
        return self._knows(self._row(part, event, writer), event, writer)

    @staticmethod
    def _row(part: Part, event: Event, writer: Event) -> int:
        """What an access has to know of a write to the same place."""
        if part.kind == "shared":
            return SHARED if event.issuer is None or writer.issuer is not None else SHARED_PROXIED
        # A store by TMA need not see what it overwrites.
        return PROXIED if event.verb == "TMA load" else ORDERED

    def _race(self, part: Part, what: str, event: Event, writer: Event) -> DataRaceError:
        shared = part.kind == "shared"
        if self._row(part, event, writer) in (PROXIED, SHARED_PROXIED) and self._knows(
            SHARED if shared else ORDERED, event, writer
        ):
            fence = "fence_async_shared()" if shared else "shmem.fence_proxy() after the wait"
            return MissingFenceError(
                f"{what}and nothing orders the one after the other but for ordinary loads: asynchronous operations go "
                f"by another path, and need {fence}."
            )
        return super()._race(part, what, event, writer)

    def _missing(self, event: Event, writer: Event) -> str:
        if writer.issuer is not None:
            return self._until(writer).strip()
        if self._same_program(event, writer):
            return "What a partition does, another one knows only by an mbarrier at which the first arrives."
        return super()._missing(event, writer)

    def _until(self, reader: Event) -> str:
        if reader.issuer is None:
            return ""
        wait = _WAITS.get(reader.verb, "mbarrier.wait")
        return f" A {reader.verb} goes on after the line that begins it, until {wait} has seen it complete."

    @staticmethod
    def _same_program(event: Event, writer: Event) -> bool:
        return (event.rank, event.program, event.call) == (writer.rank, writer.program, writer.call)

    @staticmethod
    def _row_of_readers(part: Part, event: Event, reader: Event, row: int) -> int:
        if part.kind != "shared":
            return row
        return SHARED_PROXIED if event.issuer is not None and reader.issuer is None else SHARED

    def _late(self, part: Part, what: str, event: Event, reader: Event) -> DataRaceError:
        row = self._row_of_readers(part, event, reader, ORDERED)
        if row == SHARED_PROXIED and self._knows(SHARED, event, reader):
            return MissingFenceError(
                f"{what}and nothing orders the one after the other but an mbarrier: asynchronous operations go by "
                "another path, and need fence_async_shared() between the reads and the arrival."
            )
        return super()._late(part, what, event, reader)
