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
from collections.abc import Iterable

import numpy as np

from jaxtaxfree.simulator.errors import DataRaceError, UninitializedReadError
from jaxtaxfree.simulator.events import Event, Stack, who
from jaxtaxfree.simulator.memory import Part


@dataclasses.dataclass(slots=True, eq=False)
class Counter:
    """A word on which atomics meet.

    Attributes:
      version: changes with the word.
      everywhere: what was published at system scope, as both vector clocks.
      within: what programs of one rank have published, by rank.
      raised: (thread, call) of each increment, if the word is a signal.
      made: increments by call.
      expected: by (thread, which of its waits in a call): the last call with that wait, and the count it asked for.
      a_call: increments that a call makes if the waits are right: so much more does each wait ask for in the next one.
    """

    version: int = 0
    everywhere: np.ndarray | None = None
    within: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    raised: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    made: dict[int, int] = dataclasses.field(default_factory=dict)
    expected: dict[tuple[int, int], tuple[int, int]] = dataclasses.field(default_factory=dict)
    a_call: int | None = None


ORDERED, HEARD = 0, 1  # the rows of a pair of vector clocks


class Clocks:
    """Vector clocks of all programs of all ranks. A program is one thread through all calls of its rank."""

    def __init__(self, world: int, programs: int):
        threads = world * programs
        self._programs = programs
        # Of each thread that runs: up to which time it knows each other one, [2, threads].
        self.known: dict[int, np.ndarray] = {}
        self._own = [0] * threads  # its own time of each thread
        self._barrier = [0] * threads  # a thread's own time at its last block barrier
        self._before = np.zeros((world, 2, threads), np.int32)  # what is ordered before the current call of a rank
        self._ended = np.zeros((world, 2, threads), np.int32)  # joined over the programs that have ended in it
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
        self.known[thread][:, thread] = self._own[thread]

    def release(self, counter: Counter, rank: int, thread: int, scope: str) -> None:
        if scope == "cta":
            return
        published = self.known[thread].copy()
        published[:, thread] = self._barrier[thread]
        within = counter.within.get(rank)
        counter.within[rank] = published if within is None else np.maximum(within, published)
        if scope == "sys":
            before = counter.everywhere
            counter.everywhere = published if before is None else np.maximum(before, published)

    def acquire(self, counter: Counter, rank: int, thread: int, scope: str) -> None:
        if scope == "cta":
            return
        known = self.known[thread]
        if (within := counter.within.get(rank)) is not None:
            np.maximum(known, within, out=known)
        if scope == "sys" and counter.everywhere is not None:
            np.maximum(known, counter.everywhere, out=known)
        known[:, thread] = self._own[thread]

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
        if part.kind in ("scratch", "output"):
            self._check_written(part, units, writers, event, size)
        self.remember_read(part, units, event)

    @staticmethod
    def remember_read(part: Part, units: np.ndarray, event: Event) -> None:
        low, high = int(units.min()), int(units.max())
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
        part.writers[units] = len(self.events)
        self.events.append(event)

    def observe(self, part: Part, addresses: np.ndarray, size: int, event: Event) -> None:
        """Checks an atomic that only looks."""
        units = part.units(addresses, size)
        self.check_writers(part, units, part.writers[units], event, "reads", size)

    def check_writers(
        self, part: Part, units: np.ndarray, writers: np.ndarray, event: Event, does: str, size: int
    ) -> None:
        """Checks that an access is ordered after what wrote there before."""
        first = int(writers[0])
        for index in (first,) if (writers == first).all() else np.unique(writers).tolist():
            writer = self.events[index]
            if writer is None or writer.thread == event.thread:
                continue
            if writer.verb == event.verb == "atomic" or self._knows(ORDERED, event, writer):
                continue
            element = self._element(part, int(units[np.argmax(writers == index)]), size)
            raise DataRaceError(
                f"Data race on {element}: {event} {does} what {writer} wrote, and nothing orders the one after the "
                f"other. {self._missing(event, writer)}"
            )

    def _knows(self, row: int, event: Event, other: Event) -> bool:
        return self.known[event.thread][row, other.thread] >= other.clock

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
        first = int(writers[0])
        for index in (first,) if (writers == first).all() else np.unique(writers).tolist():
            writer = self.events[index]
            if writer is not None and (part.kind == "output" or writer.call == event.call):
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
        known = self.known[event.thread][row]
        low, high = int(units.min()), int(units.max())
        for thread, entries in part.reads.items():
            ordered = known[thread]
            if thread == event.thread or not entries or entries[-1][0] <= ordered:
                continue
            for clock, first, last, others, reader in reversed(entries):
                if clock <= ordered:
                    break
                if first > high or last < low:
                    continue
                common = np.intersect1d(units, others)
                if common.size:
                    raise DataRaceError(
                        f"Data race on {self._element(part, int(common[0]), size)}: {event} overwrites what {reader} "
                        "reads, and nothing orders the one after the other: on a GPU the reader may still be at it."
                    )

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
        return who(thread // self._programs, thread % self._programs, call)
