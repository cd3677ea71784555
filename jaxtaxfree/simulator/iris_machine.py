"""What is different for Iris's kernels: memory that lasts, flags in it, and launches on a stream."""

import ctypes
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxtaxfree.heap.layout import LINE
from jaxtaxfree.simulator.clocks import ORDERED, Clocks, Counter
from jaxtaxfree.simulator.errors import (
    DataRaceError,
    DroppedWaitError,
    SimulationError,
    UninitializedReadError,
)
from jaxtaxfree.simulator.events import Event, stack, where
from jaxtaxfree.simulator.machine import Machine
from jaxtaxfree.simulator.memory import POISON, Part, Space
from jaxtaxfree.simulator.scheduler import Program
from jaxtaxfree.simulator.waits import POKES

ATOMIC = 2  # the row of vector clocks that says up to which atomic of others is ordered before a thread
_RELEASES = ("release", "acq_rel")
_PLAIN = (
    "If the load is to wait, use an atomic that acquires: Triton deletes a loop that only loads, and a plain load sees "
    "nothing of what was published."
)


class SymmetricHeap:
    """Memory of all ranks in which a buffer has the same offset on each. In place of `memory.Heap`.

    Attributes:
      parts: of all ranks.
      bases: addresses of the ranks' memory.
    """

    def __init__(self, world: int, programs: int):
        self.layout = types.SimpleNamespace(programs=programs)
        self.parts: list[Part] = []
        self.bases: list[int] = []
        self._memory: list[np.ndarray] = []
        self._world = world

    def allocate(
        self, space: Space, buffers: Sequence[tuple[str, tuple[int, ...], np.dtype]]
    ) -> list[list[np.ndarray]]:
        """Makes buffers of these names, shapes and dtypes. Returns for each one its arrays, by rank."""
        offsets, end = [], LINE
        for _, shape, dtype in buffers:
            offsets.append(end)
            # A line that belongs to nobody lies between two buffers.
            end += (-(-_nbytes(shape, dtype) // LINE) + 1) * LINE
        arrays: list[list[np.ndarray]] = [[] for _ in buffers]
        for rank in range(self._world):
            memory = np.full(end + LINE, POISON, np.uint8)
            base = -(-memory.ctypes.data // LINE) * LINE
            self._memory.append(memory)
            self.bases.append(base)
            for (name, shape, dtype), offset, of_ranks in zip(buffers, offsets, arrays):
                start, size = base + offset, _nbytes(shape, dtype)
                of_ranks.append(memory[start - memory.ctypes.data :][:size].view(dtype).reshape(shape))
                part = Part(name, "symmetric", rank, start, start + max(size, 1), shape)
                self.parts.append(part)
                space.add(part)
        return arrays

    def rank_at(self, address: int) -> int:
        """As of `memory.Heap`; here nothing is said of addresses that belong to nobody."""
        del address
        return 0


def _nbytes(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


class IrisClocks(Clocks):
    """Vector clocks where flags are ordinary memory, which is also stored to and loaded.

    A release orders the atomic itself, and what its thread did before by atomics: whoever acquires it may touch the
    flag by other means. So there is a row more than in `Clocks`. A block's atomic is done by many threads, of which
    another one's release tells only behind a block barrier.

    Attributes:
      initial: what has written the values that buffers begin with.
      scattered: atomics of several lanes that release nothing.
      narrow: by thread, its last release that reached no other rank: its time, its scope, and where it was.
    """

    _rows = 3
    _direct = slice(0, 3)

    def __init__(self, world: int, programs: int):
        super().__init__(world, programs)
        self.initial = Event("initial value", 0, 0, 0, 0, 0, 0, ())
        self.events.append(self.initial)
        self.scattered: set[Event] = set()
        self.narrow: dict[int, tuple[int, str, str]] = {}
        self._polls: dict[Part, dict[int, dict[int, Event]]] = {}  # by unit and thread: the last one

    def begin(self, part: Part) -> None:
        """The buffer has its initial value."""
        part.writers[:] = 1

    def now(self, thread: int) -> int:
        """A thread's own time."""
        return self._own[thread]

    def _published(self, thread: int) -> np.ndarray:
        published = super()._published(thread)
        published[ATOMIC, thread] = self._own[thread]
        return published

    def release(self, counter: Counter, rank: int, thread: int, scope: str) -> None:
        super().release(counter, rank, thread, scope)
        self._tick(thread)  # what follows is not published

    def read(self, part: Part, addresses: np.ndarray, size: int, event: Event) -> None:
        self._check_begun(part, addresses, size, event)
        super().read(part, addresses, size, event)

    def observe(self, part: Part, addresses: np.ndarray, size: int, event: Event) -> None:
        self._check_begun(part, addresses, size, event)
        super().observe(part, addresses, size, event)
        polls = self._polls.setdefault(part, {})
        for unit in part.units(addresses, size).tolist():
            polls.setdefault(unit, {})[event.thread] = event

    def write(self, part: Part, addresses: np.ndarray, size: int, event: Event) -> None:
        super().write(part, addresses, size, event)
        if event.verb != "store":
            return
        polls = self._polls.get(part, {})
        for unit in part.units(addresses, size).tolist() if polls else ():
            for thread, poll in polls.get(unit, {}).items():
                if thread != event.thread and not self._knows_atomic(event, poll):
                    raise DataRaceError(
                        f"Data race on {self._element(part, unit, size)}: {event} overwrites what {poll} reads, and "
                        "nothing orders the one after the other: who polls may find it before or after."
                    )

    def check_readers(self, part: Part, units: np.ndarray, event: Event, row: int, size: int) -> None:
        try:
            super().check_readers(part, units, event, row, size)
        except DataRaceError as error:
            if event.verb == "atomic":
                raise DataRaceError(f"{error} {_PLAIN}") from None
            raise

    def _check_begun(self, part: Part, addresses: np.ndarray, size: int, event: Event) -> None:
        units = part.units(addresses, size)
        if not (writers := part.writers[units]).all():
            unit = int(units[np.argmin(writers != 0)])
            raise UninitializedReadError(
                f"{event} reads {self._element(part, unit, size)}, which nobody has written: the buffer has no initial "
                "value."
            )

    def _ordered(self, part: Part, event: Event, writer: Event) -> bool:
        if writer is self.initial or super()._ordered(part, event, writer):
            return True
        return writer.verb == "atomic" and writer not in self.scattered and self._knows(ATOMIC, event, writer)

    def _knows_atomic(self, event: Event, poll: Event) -> bool:
        return self._knows(ATOMIC, event, poll) or self._knows(ORDERED, event, poll)

    def _missing(self, event: Event, writer: Event) -> str:
        if writer.verb == event.verb == "atomic":
            reach = "rank" if writer.rank != event.rank else "program"
            return (
                f"Both are atomics, but at scopes {writer.scope!r} and {event.scope!r}: for another {reach} "
                f"{'both must be at scope sys' if reach == 'rank' else 'both must be at scope gpu or sys'}."
            )
        if event.verb == "load" and writer.verb == "atomic":
            return _PLAIN
        clock, scope, place = self.narrow.get(writer.thread, (0, "", ""))
        if event.rank != writer.rank and clock >= writer.clock:
            return (
                f"The writing program has released since at scope {scope!r}, at {place}, which reaches no other rank."
            )
        return super()._missing(event, writer)


class IrisMachine(Machine):
    """Runs the launches of all ranks.

    Attributes:
      launches: those of a call of all ranks, which follow each other.
      assumptions: whether a `tl.assume` is checked.
    """

    launches: Sequence[Any]
    assumptions = True

    def __init__(self, *args: Any):
        super().__init__(*args)
        # Plain loads of one place in a row: the program's step, the place, what it has found there, and how often.
        self._spins: dict[Program, tuple[int, int, bytes, int]] = {}

    def launch(self, program: Program) -> Any:
        """In which launch a program is."""
        return self.launches[(program.call - 1) % len(self.launches)]

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.launch(self._program).sizes

    @grid.setter
    def grid(self, _: object) -> None:
        pass

    @property
    def program_index(self) -> tuple[int, int, int]:
        program, (x, y, _) = self._program.program, self.grid
        return program % x, program // x % y, program // (x * y)

    def end(self, program: Program) -> None:
        self._end_work(program)
        del self._work[program]
        self._spins.pop(program, None)
        self._clocks.end(program.rank, program.thread)

    def atomic(
        self,
        addresses: np.ndarray,
        size: int,
        semantics: str,
        scope: str,
        looks: bool,
        act: Callable[[], Any],
        conditional: bool = False,
    ) -> Any:
        clocks = self._clocks
        assert isinstance(clocks, IrisClocks)
        before = clocks.events[-1]
        result = super().atomic(addresses, size, semantics, scope, looks, act, conditional)
        thread, last = self._program.thread, clocks.events[-1]
        if semantics in _RELEASES:
            if scope != "sys":
                clocks.narrow[thread] = (clocks.now(thread), scope, where(stack()))
        elif addresses.size > 1 and last is not before and last is not None and last.thread == thread:
            clocks.scattered.add(last)
        return result

    def load(self, addresses: np.ndarray, size: int, volatile: bool) -> None:
        super().load(addresses, size, volatile)
        part = self._space.at(int(addresses[0]))
        if part is not None and part.kind == "symmetric" and not volatile:
            self._check_spin(addresses, size)

    def _check_spin(self, addresses: np.ndarray, size: int) -> None:
        """Raises where a program does nothing but load one place again and again, and finds what it has found."""
        program, place = self._program, int(addresses[0])
        step, before, last, count = self._spins.get(program, (0, 0, b"", 0))
        found = b""
        if program.steps == step + 1 and place == before:
            found = b"".join(ctypes.string_at(address, size) for address in addresses.tolist())
        count = count + 1 if found and last in (b"", found) else 0
        self._spins[program] = program.steps, place, found, count
        if count == POKES:
            parts = self._parts("load", addresses, size)
            raise self._error(
                DroppedWaitError,
                f"{self._event('load')} polls {parts[0][0].element(int(addresses[0]), size)} by a plain load. Nothing "
                "tells the compiler that the word changes: Triton deletes the loop, and the kernel does not wait. Poll "
                'by an atomic that acquires, such as tl.atomic_add(flag, 0, sem="acquire", scope="sys").',
            )

    def failed_assumption(self) -> None:
        if self.assumptions:
            super().failed_assumption()

    def _error(self, kind: type[SimulationError], message: str) -> SimulationError:
        names = [launch.name for launch in self.launches]
        if len(names) > 1:
            listed = ", ".join(f"{i} {name}" for i, name in enumerate(names, 1))
            message += f"\nA rank's launches are counted as calls, {len(names)} in each round: {listed}."
        if not self._settings.implicit_barriers and issubclass(kind, DataRaceError):
            message += "\nThis is so as Triton before 3.9 compiles it, with no block barrier in front of a release."
        return super()._error(kind, message)

    def _event(self, verb: str) -> Event:
        event = super()._event(verb)
        event.lines = event.lines or self.launch(self._program).lines
        return event

    # What the host does between launches.

    def fill(self, array: np.ndarray, value: Any) -> None:
        """The current program stores a value to all of a buffer."""
        addresses = array.ctypes.data + np.arange(0, array.nbytes, array.itemsize, dtype=np.uint64)
        self.store(addresses, array.itemsize)
        array[...] = value

    def meet(self, address: int, world: int) -> None:
        """The current program waits until all ranks are here. The word there counts."""
        word, at = ctypes.c_int32.from_address(address), np.array([address], np.uint64)

        def arrive() -> None:
            word.value += 1

        self.barrier()
        self.atomic(at, 4, "release", "sys", False, arrive)
        target = -(-word.value // world) * world
        while self.atomic(at, 4, "acquire", "sys", True, lambda: word.value) < target:
            pass
