"""What happens at each memory operation: who runs next, whether the access is right, and what the trace shows of it."""

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxtaxfree.simulator import interpreter, messages
from jaxtaxfree.simulator.clocks import Clocks, Counter
from jaxtaxfree.simulator.errors import (
    DeadlockError,
    DeviceAssertError,
    EpochMismatchError,
    MessageError,
    OutOfBoundsError,
    SignalCountError,
    SimulationError,
    WaitOrderError,
    WaitTimeoutError,
    WrongPeerError,
)
from jaxtaxfree.simulator.events import DEVICE_API, GLUON_API, Event, Stack, stack, where, who
from jaxtaxfree.simulator.memory import Heap, Messages, Part, Space
from jaxtaxfree.simulator.scheduler import Program, Scheduler, Settings
from jaxtaxfree.simulator.trace import Span, Trace
from jaxtaxfree.simulator.waste import Waste

_WAITS_SHOWN = 24  # in a report
_PARTED = 0.25  # how often an atomic store of a block arrives in two portions
_POKES = 16  # polls of its own that a program may repeat in vain while nothing else happens


@dataclasses.dataclass(slots=True, eq=False)
class _Wait:
    """A program in `shmem.wait` or `shmem.wait_all`: for which signals, how many, since when, and who is to come."""

    addresses: list[int]
    expected: int
    begin: int
    peer: int | None
    lines: Stack


@dataclasses.dataclass(slots=True, eq=False)
class _Blame:
    """A wait for one signal that has come, and the rank that it names."""

    program: Program
    wait: _Wait
    address: int
    peer: int


@dataclasses.dataclass(slots=True, eq=False)
class _Block:
    """Messages that a program polls by one load.

    Attributes:
      part, units: which.
      event: the last poll.
      writers: for each of them, which event had sent it then.
      missing: for each word of the part, whether it was missing then.
      news: the reception's, then.
      again: polls in a row with the same news.
    """

    part: Messages
    units: np.ndarray
    event: Event
    writers: np.ndarray
    missing: np.ndarray
    news: int
    again: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class _Reception:
    """A program in `shmem.receive` or another function that receives: since when, where, and what it has polled.

    Attributes:
      awaited: addresses, and who sends what comes there.
      depth: how many functions that receive it is in.
      news: how often something has come that was missing.
    """

    begin: int
    lines: Stack
    awaited: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)
    blocks: dict[tuple[int, int, int], _Block] = dataclasses.field(default_factory=dict)
    depth: int = 0
    news: int = 0

    def misses(self, part: Messages, units: np.ndarray) -> bool:
        """Whether it goes on when these words come."""
        return any(block.part is part and block.missing[units].any() for block in self.blocks.values())


@dataclasses.dataclass(slots=True, eq=False)
class Sleep:
    """A part of a program that waits for another one: since when, where, and for what, in words."""

    begin: int
    lines: Stack
    what: Callable[[], str]


@dataclasses.dataclass(slots=True, eq=False)
class Work:
    """What a program has done since its last wait or publish."""

    begin: int
    label: str = ""
    kind: str = "work"


class Machine:
    """Runs the memory operations of one simulation. Implements `interpreter.Machine`.

    Attributes:
      running: the machine of the simulation that runs, for the hooks in the device API.
      scheduler: to be set before it runs.
      waste: what was sent to peers that nobody used, as far as that is known.
      num_warps: of a program.
      together: programs that may wait for each other.
    """

    running: "Machine | None" = None
    scheduler: Scheduler
    num_warps = 4
    together = 1

    def __init__(
        self,
        name: str,
        space: Space,
        heap: Heap,
        clocks: Clocks,
        grid: tuple[int, int, int],
        settings: Settings,
        trace: Trace,
    ):
        self.grid = grid
        self._name, self._space, self._heap, self._clocks = name, space, heap, clocks
        self._settings, self._trace = settings, trace
        self._waits: dict[Program, _Wait | _Reception | Sleep] = {}
        self._writing: dict[Program, str] = {}  # messages: why
        self._ended: dict[int, int] = {}  # by call: ranks that have ended it
        self._peer: dict[Program, int | None] = {}
        self._claims: set[tuple[int, int]] = set()  # (thread, call) of programs that have claimed work
        self._waited: dict[tuple[int, int], int] = {}  # by (thread, signal's address): waits in this call
        self._work: dict[Program, Work] = {}
        self._blames: list[_Blame] = []
        self._heard: dict[tuple[int, int], int] = {}  # by (program among all, call): when its first wait ended
        self._draws: dict[int, tuple[int, Stack]] = {}  # by the address of tickets: how many in a call, and who says so
        self._polled: set[int] = set()  # addresses that some program has looked at in order to wait
        self._signalled: dict[int, Event] = {}  # by the address of a peer's signal: who has raised it first
        self.waste = Waste()
        self._pokes = 0
        self._deadlock: str | None = None  # seen, and got round by a slot more than there are
        self._look_out = settings.patience // 4

    @staticmethod
    def describe(address: int, array: np.ndarray, block: tuple[int, ...]) -> Any:
        """A kernel's argument that is a TMA descriptor of an array. Only Gluon kernels take them."""
        raise NotImplementedError

    @property
    def _program(self) -> Program:
        program = self.scheduler.current
        assert program is not None
        return program

    @property
    def program_index(self) -> tuple[int, int, int]:
        return self._program.index

    # The life of a program.

    def begin(self, program: Program) -> None:
        self._clocks.start(program.rank, program.thread)
        self._work[program] = Work(self.scheduler.step)

    def end(self, program: Program) -> None:
        self._end_work(program)
        del self._work[program]
        epochs = [int(epochs[program.program]) for epochs in self._heap.epochs]
        if epochs[program.rank] != program.call:
            raise self._error(
                EpochMismatchError,
                f"{_who(program)} ended and left its epoch counter at "
                f"{epochs[program.rank]}, not {program.call}: the next call would disagree with the other programs. "
                "Every program ends with shmem.finish(me), once. The counters of this program on the ranks from 0 on: "
                f"{epochs}.",
            )
        self._clocks.end(program.rank, program.thread)

    def end_call(self, rank: int, call: int) -> None:
        self._ended[call] = self._ended.get(call, 0) + 1
        if self._ended[call] == self._world:
            self._check_blames(call)
            for part in self._heap.parts:
                if isinstance(part, Messages):
                    self._check(messages.check_complete, part, call, self._clocks)
            self.waste.end_call(call)
        self._check_draws(rank, call)
        # Waits are counted anew in the next call.
        world = self._world
        self._waited = {key: count for key, count in self._waited.items() if key[0] // self._programs % world != rank}

    @property
    def _programs(self) -> int:
        return self._heap.layout.programs

    @property
    def _world(self) -> int:
        return len(self.scheduler.ranks)

    @property
    def _threads(self) -> int:
        """Programs of all ranks. The threads of a program's parts are the same modulo this."""
        return self._world * self._programs

    def finish(self) -> None:
        """After the last call: what can only be said of whole calls."""
        if self._deadlock is not None:
            raise self._error(DeadlockError, self._deadlock)
        calls = {state.call for state in self.scheduler.ranks}
        if min(calls) > 1:  # who waits for signals of the call before need not do so in the first one
            for address, event in self._signalled.items():
                if address not in self._polled:
                    self.waste.add(event, f"waited for signal {self._signal(address)}, which {event} has raised")
        for address, counter in self._clocks.counters.items():
            if counter.a_call is None:
                continue
            for call in range(max(1, min(calls) - 2), min(calls) + 1):
                if counter.made.get(call, 0) != counter.a_call:
                    raise self._error(SignalCountError, self._miscounted(address, counter, call))

    # Accesses.

    def load(self, addresses: np.ndarray, size: int, volatile: bool) -> None:
        parts = self._parts("load", addresses, size)
        if len(parts) == 1 and parts[0][0].kind in ("operand", "control"):
            # Nobody writes there, so when it happens makes no difference.
            self.scheduler.step += 1
            return
        self._refuse_messages("load", parts)
        if volatile:
            self.look(addresses)
        else:
            self._pause()
            self._program.seen.clear()
        event = self._event("atomic" if volatile else "load")
        for part, of in parts:
            if part.kind != "operand":
                self._check(self._clocks.observe if volatile else self._clocks.read, part, of, size, event)

    def store(self, addresses: np.ndarray, size: int) -> None:
        parts = self._parts("store", addresses, size)
        if self._clears(parts):
            return
        self._refuse_messages("store", parts)
        self._pause()
        program = self._program
        program.seen.clear()
        self._pokes = 0
        event = self._event("store")
        for part, of in parts:
            self._check_store(part, of, size, event)
            self._written(of)
            self._label_push(program, part)

    def _check_store(self, part: Part, addresses: np.ndarray, size: int, event: Event) -> None:
        if part.kind in ("operand", "control"):
            raise self._error(OutOfBoundsError, f"{event} writes into the {part.title}, which is not for it.")
        if part.kind == "signals":
            raise self._error(
                SignalCountError,
                f"{event} overwrites signal {part.element(int(addresses[0]), 4)}. Signals only grow: an epoch's count "
                "is told from the next one's by its size.",
            )
        self._check(self._clocks.write, part, addresses, size, event)
        if part.kind == "scratch":
            self.waste.stored(part, int(addresses[0]), size, event)

    def _written(self, addresses: np.ndarray) -> None:
        for address in self._polled.intersection(addresses.tolist()) if self._polled else ():
            self._changed(address)

    def _label_push(self, program: Program, part: Part) -> None:
        if part.kind == "scratch" and part.rank != program.rank:
            work = self._work[program]
            work.kind, work.label = "push", f"{part.name} to rank {part.rank}"

    def look(self, addresses: np.ndarray) -> None:
        self._pause()
        program, counters = self._program, self._clocks.counters
        seen, looked = program.seen, addresses.tolist()
        if all(address in seen for address in looked) and all(
            counters[address].version == version for address, version in seen.items()
        ):
            # It has looked at all this before, and did nothing but look: it would do the same again.
            known = program in self._waits
            if not known:
                self._waits[program] = _Wait(looked, 0, self.scheduler.step, None, stack())
            self.scheduler.park(tuple(seen))
            if not known:
                del self._waits[program]
            seen.clear()
        # `wait_all` does not look again at what has come, which may change once more.
        for address in [address for address, version in seen.items() if counters[address].version != version]:
            del seen[address]
        for address in looked:
            if address not in counters:
                counters[address] = Counter()
            seen[address] = counters[address].version
            self._polled.add(address)

    def atomic(
        self, addresses: np.ndarray, size: int, semantics: str, scope: str, looks: bool, act: Callable[[], Any]
    ) -> Any:
        parts = self._parts("atomic", addresses, size)
        if isinstance(parts[0][0], Messages):
            return self._message(parts, size, scope, looks, act)
        if looks:
            self.look(addresses)
        else:
            self._pause()
            self._program.seen.clear()
        program, clocks = self._program, self._clocks
        event = self._event("atomic")
        event.scope = scope
        self._join_portions(event)
        before = {address: ctypes.string_at(address, size) for address in addresses.tolist()}
        for part, _ in parts:
            if part.kind == "operand":
                raise self._error(OutOfBoundsError, f"{event} writes into the {part.title}, which is not for it.")
        result = act()
        for part, of in parts:
            for address in of.tolist():
                counter = clocks.counters.setdefault(address, Counter())
                changed = ctypes.string_at(address, size) != before[address]
                if semantics in ("acquire", "acq_rel"):
                    clocks.acquire(counter, program.rank, program.thread, scope)
                check = clocks.write if changed else clocks.observe
                self._check(check, part, np.array([address], np.uint64), size, event)
                if changed and part.kind == "scratch":
                    self.waste.stored(part, address, size, event)
                if semantics in ("release", "acq_rel"):
                    clocks.release(counter, program.rank, program.thread, scope)
                if changed:
                    self._changed(address)
                    if part.kind == "signals":
                        if semantics == "release" and part.rank != program.rank:
                            self._signalled.setdefault(address, event)
                        self._raised(part, address, counter, before[address], event)
        return result

    def portions(self, lanes: np.ndarray) -> Sequence[np.ndarray]:
        """Now and then two: a block is no unit, so that others may see one part of it before the rest."""
        draw = self.scheduler.draw
        count = np.count_nonzero(lanes)
        if count == 1 or draw() >= _PARTED:
            return (lanes,)
        order = np.cumsum(lanes).reshape(lanes.shape)
        first = order <= 1 + int(draw() * (count - 1))
        portions = lanes & first, lanes & ~first
        program = self._program
        program.portions, program.whole = 2, None
        return portions if draw() < 0.5 else portions[::-1]

    def _join_portions(self, event: Event) -> None:
        """The current program is at an atomic, which may be a portion of one."""
        program = self._program
        if program.portions:
            program.portions -= 1
            event.whole, program.whole = program.whole, program.whole or event

    def barrier(self) -> None:
        self._clocks.barrier(self._program.thread)

    def fence_proxy(self) -> None:
        """Means nothing where nothing is asynchronous."""

    def product(self) -> None:
        self._work[self._program].kind = "multiply"

    def _pause(self) -> None:
        scheduler = self.scheduler
        if scheduler.step >= self._look_out:
            self._check_patience()
        scheduler.pause()

    def _parts(self, verb: str, addresses: np.ndarray, size: int) -> list[tuple[Part, np.ndarray]]:
        try:
            parts = self._space.split(addresses, size)
        except LookupError as error:
            place, *at = error.args
            world = self._world
            # Regions lie next to each other, so a peer that is none is one a little before or behind them.
            if at and not 0 <= (rank := self._heap.rank_at(*at)) < world and -world <= rank < 2 * world:
                place += f", where rank {rank} of a team of {world} would be"
            raise self._error(OutOfBoundsError, f"{self._event(verb)} {place}.") from None
        for part, _ in parts:
            # Such an array is gone as soon as its rank's call has ended.
            if part.kind in ("operand", "output") and part.rank != self._program.rank:
                raise self._error(
                    OutOfBoundsError,
                    f"{self._event(verb)} reaches the {part.title}: peers share only scratch and signals.",
                )
        return parts

    def remote(self, addresses: np.ndarray) -> None:
        """The current program asks where a peer keeps what is here."""
        ends = [self._space.at(int(address)) for address in (addresses.flat[0], addresses.flat[-1])]
        rank = self._program.rank
        # Lanes that a mask leaves out may be anywhere.
        if all(part and (part.rank != rank or part.kind in ("operand", "output")) for part in ends):
            assert ends[0] is not None
            raise self._error(
                OutOfBoundsError,
                f"{self._event('remote')} takes a pointer to the {ends[0].title}: peers share only scratch and "
                "messages, and it takes this rank's own pointer to them.",
            )

    def failed_assert(self, message: str) -> None:
        raise self._error(DeviceAssertError, f"{self._event('device_assert')} does not hold: {message}")

    def _event(self, verb: str) -> Event:
        program = self._program
        return self._clocks.event(
            verb, program.rank, program.program, program.call, program.thread, self.scheduler.step, stack()
        )

    def _check(self, check: Callable, *args: Any) -> Any:
        try:
            return check(*args)
        except SimulationError as error:
            raise self._error(type(error), str(error)) from None

    def _changed(self, address: int) -> None:
        self._pokes = 0
        self._clocks.counters[address].version += 1
        self.scheduler.changed(address)

    # Messages.

    def _refuse_messages(self, verb: str, parts: list[tuple[Part, np.ndarray]]) -> None:
        for part, of in parts:
            if isinstance(part, Messages):
                raise self._error(
                    MessageError,
                    f"{self._event(verb)} touches {part.element(int(of[0]), messages.WORD)}: only shmem.send and "
                    "shmem.receive may touch messages.",
                )

    def _message(
        self, parts: list[tuple[Part, np.ndarray]], size: int, scope: str, looks: bool, act: Callable[[], Any]
    ) -> Any:
        """An atomic on messages."""
        program = self._program
        wait = self._waits.get(program)
        receives = looks and isinstance(wait, _Reception)
        if not receives and (looks or self._writing.get(program) != "send"):
            self._refuse_messages("atomic", parts)
        event = self._event("receive" if receives else "send")
        units = [(part, self._check(messages.units_of, part, of, size, event)) for part, of in parts]
        if scope != "sys":
            raise self._error(MessageError, f"{event} is at scope {scope!r}: messages need that of the system.")
        if receives:
            assert isinstance(wait, _Reception)
            return self._receive(wait, units, event, act)
        return self._send(units, act)

    def _send(self, parts: list[tuple[Any, np.ndarray]], act: Callable[[], Any]) -> Any:
        self._pause()
        program = self._program
        program.seen.clear()
        self._pokes = 0
        event = self._event("send")
        self._join_portions(event)
        result, index = act(), self._clocks.send(event)
        for part, units in parts:
            self._check(messages.send, self._clocks, part, units, index)
            self.waste.sent(part, units, event)
            for other, wait in self._waits.items():
                if isinstance(wait, _Reception) and wait.misses(part, units):
                    wait.news += 1
                    if other.parked:
                        self.scheduler.wake(other)
        self._publish(f"{parts[0][0].name} to rank {', '.join(str(part.rank) for part, _ in parts)}")
        return result

    def _receive(
        self, wait: _Reception, parts: list[tuple[Any, np.ndarray]], event: Event, act: Callable[[], Any]
    ) -> Any:
        """A poll. Whoever looks a second time sleeps until something has come that was missing."""
        program = self._program
        (part, units), *others = parts
        if others or part.rank != program.rank:
            part = next(part for part, _ in parts if part.rank != program.rank)
            raise self._error(MessageError, f"{event} polls the {part.title}: a rank receives only what is sent to it.")
        self._pause()
        key = (part.start, int(units[0]), units.size)
        last, again = wait.blocks.get(key), 0
        if last is not None and last.news == wait.news:
            # A block that has come is polled again along with one that has not.
            again = last.again + 1
            if last.missing.any() or again > _POKES:
                self.scheduler.park((part.start,))
        late, writers = self._check(messages.look, self._clocks, part, units, event)
        missing = np.zeros(part.words.shape, bool)
        missing[late] = True
        wait.blocks[key] = _Block(part, units, event, writers, missing, wait.news, again)
        return act()

    def _clears(self, parts: list[tuple[Part, np.ndarray]]) -> bool:
        """Whether a store is that of `shmem.receive_words` or `clear_vectors`, to words that have come."""
        (part, of), program = parts[0], self._program
        clears = self._writing.get(program) == "clear" or isinstance(self._waits.get(program), _Reception)
        if not (clears and isinstance(part, Messages) and part.cleared and part.rank == program.rank):
            return False
        event = self._event("clear")
        units = self._check(messages.units_of, part, of, messages.WORD, event)
        self._check(messages.clear, self._clocks, part, units, event)
        return True

    def begin_write(self, why: str) -> None:
        """The current program writes messages from now on, to "send" or to "clear" them."""
        self._writing[self._program] = why

    def end_write(self) -> None:
        del self._writing[self._program]

    def begin_receive(self, addresses: np.ndarray, peers: np.ndarray) -> None:
        """The current program receives what these ranks send to these addresses."""
        program = self._program
        wait = self._waits.get(program)
        if not isinstance(wait, _Reception):
            program.seen.clear()
            self._end_work(program)
            wait = self._waits[program] = _Reception(self.scheduler.step, stack())
        wait.awaited.append((addresses, peers))
        wait.depth += 1

    def end_receive(self) -> None:
        program = self._program
        wait = self._waits[program]
        assert isinstance(wait, _Reception)
        wait.depth -= 1
        if wait.depth:
            return
        del self._waits[program]
        blocks = wait.blocks.values()
        self._span("wait", wait.begin, ", ".join(block.part.title_of(block.units) for block in blocks))
        self._work[program] = Work(self.scheduler.step)
        for block in blocks:
            received = block.part, block.units, block.writers, block.event
            for send in self._check(messages.receive, self._clocks, *received):
                what = f"messages {block.part.title_of(block.units)}"
                self._check_order(program, wait, what, send.thread, send.call)
            peers = self._peers(wait, block.part, block.units)
            senders = messages.senders(self._clocks, block.writers)
            if (wrong := peers != senders).any():
                what = f"messages {block.part.title_of(block.units[wrong])}"
                raise self._wrong_peer(program, wait, what, int(peers[wrong][0]), senders[wrong])
        self._has_heard(program)

    # Signals.

    def _raised(self, part: Part, address: int, counter: Counter, before: bytes, event: Event) -> None:
        old = int.from_bytes(before, "little", signed=True)
        new = int.from_bytes(ctypes.string_at(address, 4), "little", signed=True)
        by = (new - old + (1 << 31)) % (1 << 32) - (1 << 31)
        if by < 0:
            raise self._error(
                SignalCountError,
                f"{event} lowers signal {part.element(address, 4)} from {old} to {new}. Signals only grow.",
            )
        counter.raised.extend([event] * min(by, 1024))
        counter.made[event.call] = counter.made.get(event.call, 0) + by
        counter.made.pop(event.call - 8, None)
        self._publish(f"{part.name}[{(address - part.start) // 4}] of rank {part.rank}")
        if counter.a_call is not None and counter.made[event.call] > counter.a_call:
            raise self._error(
                SignalCountError, f"{event} is one too many: {self._miscounted(address, counter, event.call)}"
            )

    def _miscounted(self, address: int, counter: Counter, call: int) -> str:
        raised = [event for event in counter.raised if event.call == call]
        by = "; ".join(sorted({self._clocks.name(event.thread, call) for event in raised})) or "nobody"
        if raised:
            by += f", the last time at {where(raised[-1].lines)}"
        return (
            f"Signal {self._signal(address)} was raised {counter.made.get(call, 0)} times in call {call}, but the "
            f"counts that the waits for it ask for, as at {where(counter.awaited)}, grow by {counter.a_call} a call. "
            f"It was raised by {by}."
        )

    def claim(self, address: int, ticket: int, draws: int) -> None:
        """The current program has drawn a ticket. The work is its own from now on, whatever its id."""
        program = self._program
        self._claims.add((program.thread % self._threads, program.call))
        if not 0 <= ticket < draws:
            raise self._error(
                SignalCountError,
                f"{_who(program)} draws ticket {ticket} of {self._signal(address)} at {where(stack())}, but `draws` "
                f"says that all programs together draw {draws} in each call.",
            )
        self._draws[address] = (draws, stack())

    def _check_draws(self, rank: int, call: int) -> None:
        """Checks that as many tickets have been drawn on a rank in a call as its kernel says."""
        for address, (draws, lines) in self._draws.items():
            drawn = int.from_bytes(ctypes.string_at(address, 4), "little", signed=True) - (call - 1) * draws
            if self._heap.rank_at(address) == rank and drawn != draws:
                raise self._error(
                    SignalCountError,
                    f"In call {call}, {drawn} tickets of {self._signal(address)} have been drawn, as at "
                    f"{where(lines)}, but `draws` says that all programs together draw {draws} in each call: the next "
                    "call would begin with another ticket than 0.",
                )

    def blame(self, peer: int | None) -> None:
        """The next wait of the current program is for this rank."""
        self._peer[self._program] = peer

    def begin_wait(self, addresses: list[int], expected: int) -> None:
        program = self._program
        program.seen.clear()
        lines = stack()
        self._end_work(program)
        wait = _Wait(addresses, expected, self.scheduler.step, self._peer.pop(program, None), lines)
        self._waits[program] = wait
        for address in addresses:
            self._parts("atomic", np.array([address], np.uint64), 4)
            counter = self._clocks.counters.setdefault(address, Counter())
            key = (program.thread, address)
            self._waited[key] = self._waited.get(key, 0) + 1
            counter.awaited = lines
            place = (program.thread, self._waited[key])
            call, count = counter.expected.get(place, (0, 0))
            counter.expected[place] = (program.call, expected)
            if call == program.call - 1 and call > 0:
                counter.a_call = expected - count
                for made_in, made in counter.made.items():
                    if made > counter.a_call:
                        raise self._error(SignalCountError, self._miscounted(address, counter, made_in))

    def end_wait(self) -> None:
        program = self._program
        program.seen.clear()
        wait = self._waits.pop(program)
        assert isinstance(wait, _Wait)
        label = ", ".join(self._signal(address) for address in wait.addresses[:3])
        self._span("wait", wait.begin, label)
        self._work[program] = Work(self.scheduler.step)
        for address in wait.addresses:
            for event in self._clocks.counters[address].raised[max(0, wait.expected - 1024) : wait.expected]:
                self._check_order(program, wait, f"signal {self._signal(address)}", event.thread, event.call)
            if (peer := self._blamed(wait, address)) is not None:
                self._blames.append(_Blame(program, wait, address, peer))
        self._has_heard(program)

    def _check_order(self, program: Program, wait: _Wait | _Reception, what: str, thread: int, call: int) -> None:
        """Checks that a program waited for none of a higher id, but for the next ones that run together with it."""
        claimed = self._settings.tickets or (thread % self._threads, call) in self._claims
        if claimed or call != program.call or thread % self._programs < program.program + self.together:
            return
        does = "raises" if isinstance(wait, _Wait) else "sends"
        raise self._error(
            WaitOrderError,
            f"{_who(program)} waits at {where(wait.lines)} for {what}, which {self._clocks.name(thread, call)} {does}: "
            "a program of a higher id. A GPU starts programs in the order of their ids, so the higher one may get no "
            "place before the lower one has ended.",
        )

    def _has_heard(self, program: Program) -> None:
        self._heard.setdefault((program.thread % self._threads, program.call), self.scheduler.step)

    def _blamed(self, wait: _Wait, address: int) -> int | None:
        """The rank that a wait for this signal names, if any."""
        if wait.peer is None and len(wait.addresses) > 1:
            return wait.addresses.index(address)
        return wait.peer

    def _check_blames(self, call: int) -> None:
        """Checks that those have raised a signal in a call, which all ranks have ended, whom the waits for it name."""
        blames = [blame for blame in self._blames if blame.program.call == call]
        self._blames = [blame for blame in self._blames if blame.program.call != call]
        raised: dict[int, list[Event]] = {}
        for blame in blames:
            address, peer = blame.address, blame.peer
            if address not in raised:
                events = self._clocks.counters[address].raised
                raised[address] = [event for event in events if event.call == call]
            by = raised[address]
            ranks = {event.rank for event in by}
            # Several may raise a signal, in any order; and who has waited may pass on what another one sent.
            first = [self._heard.get((event.thread % self._threads, call), event.step) for event in by]
            if by and peer not in ranks and all(event.step <= step for event, step in zip(by, first)):
                raise self._wrong_peer(blame.program, blame.wait, f"signal {self._signal(address)}", peer, ranks)
        self._heard = {key: step for key, step in self._heard.items() if key[1] != call}

    def _wrong_peer(
        self, program: Program, wait: _Wait | _Reception, what: str, peer: int, by: Iterable[int]
    ) -> SimulationError:
        return self._error(
            WrongPeerError,
            f"{_who(program)} waits at {where(wait.lines)} for {what}, and names rank {peer} for it, but who sends it "
            f"is rank {' and '.join(map(str, sorted({int(rank) for rank in by})))}: if it did not come, the error "
            "would blame the wrong rank.",
        )

    def _signal(self, address: int) -> str:
        part = self._space.at(address)
        return part.element(address, 4) if part else f"at {address:#x}"

    # Nobody moves, or not for long enough.

    def stuck(self, can_lend: bool) -> bool:
        """Called when no program can run.

        Args:
          can_lend: a rank has programs that only need a slot.

        Returns: whether to lend them one. Otherwise somebody can run again.
        """
        # Who polls in a way of its own may stop doing so by itself.
        polls = [program for program, wait in self._waits.items() if isinstance(wait, _Wait) and not wait.expected]
        if polls and self._pokes < _POKES:
            self._pokes += 1
            for program in polls:
                self.scheduler.wake(program)
            return False
        if self._deadlock is None:
            self._deadlock = self._describe_waits(can_lend)
        if not can_lend or self._settings.tickets or self._claims:
            raise self._error(DeadlockError, self._deadlock)
        return True

    def _describe_waits(self, unstarted: bool) -> str:
        lines = ["Deadlock: no program can go on."]
        waits = sorted(self._waits.items(), key=lambda item: (item[0].call, item[0].thread))
        for program, wait in waits[:_WAITS_SHOWN]:
            if isinstance(wait, _Reception):
                lines.append(f"  {_who(program)} waits at {where(wait.lines)}:")
                lines.extend(f"    {line}." for line in self._describe_reception(wait))
                continue
            if isinstance(wait, Sleep):
                lines.append(f"  {_who(program)} waits at {where(wait.lines)}:")
                lines.append(f"    {wait.what()}.")
                continue
            for address in wait.addresses:
                seen = int.from_bytes(ctypes.string_at(address, 4), "little", signed=True)
                if wait.expected and seen >= wait.expected:
                    continue
                lines.append(f"  {_who(program)} waits at {where(wait.lines)}:")
                expected = f"expects {wait.expected} and sees {seen}" if wait.expected else f"sees {seen}"
                lines.append(f"    signal {self._signal(address)}: {expected}; {self._culprit(wait, address)}.")
        if len(waits) > _WAITS_SHOWN:
            lines.append(f"  and {len(waits) - _WAITS_SHOWN} more")
        if unstarted:
            lines.append("  Further programs need a slot, and those that wait have all of a rank.")
        return "\n".join(lines)

    def _describe_reception(self, wait: _Reception) -> list[str]:
        """For which messages of whom a program waits."""
        lines = []
        for block in wait.blocks.values():
            part, missing = block.part, np.flatnonzero(block.missing)
            peers = self._peers(wait, part, missing)
            for peer in np.unique(peers).tolist():
                of = missing[peers == peer]
                line = f"messages {part.title_of(of)}: "
                if 0 <= peer < self._world:
                    line += f"rank {peer} should send them, and {self._progress(peer)}; "
                send = self._clocks.events[int(part.writers[of].max())]
                lines.append(line + (f"the last to send them was {send}" if send else "nobody has ever sent them"))
        if not lines:
            titles = ", ".join(block.part.title_of(block.units) for block in wait.blocks.values())
            lines.append(f"messages {titles}, which have come: it does not take them for those of its call")
        return lines

    @staticmethod
    def _peers(wait: _Reception, part: Messages, units: np.ndarray) -> np.ndarray:
        """Who sends these words, as the functions say that wait for them."""
        addresses, peers = (np.concatenate([both[i].ravel() for both in wait.awaited]) for i in range(2))
        order = np.argsort(addresses, kind="stable")
        wanted = part.start + messages.WORD * units.astype(np.uint64)
        return peers[order][np.searchsorted(addresses[order], wanted)]

    def _progress(self, rank: int) -> str:
        state = self.scheduler.ranks[rank]
        return f"has ended {state.next - state.live} of {self._programs} programs of call {state.call}"

    def _culprit(self, wait: _Wait, address: int) -> str:
        peer = self._blamed(wait, address)
        part = self._space.at(address)
        raisers = sorted({event.thread for event in self._clocks.counters[address].raised}) if part else []
        world = self._world
        places = dict.fromkeys((t % self._programs, t // self._programs % world) for t in raisers)
        so_far = ", ".join(f"program {program} of rank {rank}" for program, rank in list(places)[:6])
        text = f"raised so far by {so_far}" if so_far else "nobody has raised it so far"
        if peer is None or not 0 <= peer < self._world:
            return text
        return f"rank {peer} should raise it, and {self._progress(peer)}; {text}"

    def _check_patience(self) -> None:
        patience = self._settings.patience
        self._look_out = self.scheduler.step + patience // 4
        for program, wait in self._waits.items():
            waited = self.scheduler.step - wait.begin
            if waited > patience:
                if isinstance(wait, _Wait):
                    what = f"signal {self._signal(wait.addresses[0])}"
                elif isinstance(wait, Sleep):
                    what = wait.what()
                else:
                    what = "; ".join(self._describe_reception(wait))
                raise self._error(
                    WaitTimeoutError,
                    f"{_who(program)} has waited at {where(wait.lines)} for {what} "
                    f"while others took {waited} steps. On a GPU the wait might have expired; here it may last "
                    f"{patience} steps (the setting patience).",
                )
        for program in self.scheduler.live:
            if program.steps > patience:
                raise self._error(
                    WaitTimeoutError,
                    f"{_who(program)} has not ended after {program.steps} steps: does it poll for ever?",
                )

    # Reports.

    def _error(self, kind: type[SimulationError], message: str) -> SimulationError:
        settings = self._settings
        message = message[:1].upper() + message[1:]
        return kind(
            f"{self._name}: {message}\n(seed={settings.seed}, policy={settings.policy!r}, slots={settings.slots})"
        )

    def _span(self, kind: str, begin: int, label: str) -> None:
        program = self._program
        self._trace.spans.append(
            Span(kind, program.rank, program.program, program.call, begin, self.scheduler.step, label, program.part)
        )

    def _end_work(self, program: Program) -> None:
        work = self._work[program]
        if self.scheduler.step > work.begin:
            self._span(work.kind, work.begin, work.label)
        self._work[program] = Work(self.scheduler.step)

    def _publish(self, label: str) -> None:
        self._end_work(self._program)
        self._span("publish", self.scheduler.step, label)


def _who(program: Program) -> str:
    return who(program.rank, program.program, program.call)


def _data(value: Any) -> Any:
    """What a kernel knows as a value: an array, or a number if it is constant."""
    return value.handle.data if hasattr(value, "handle") else value


def _integer(value: Any) -> int:
    return int(value.handle.data.reshape(-1)[0]) if hasattr(value, "handle") else int(value)


@interpreter.hook(DEVICE_API, "wait")
def _wait(function: Callable) -> Callable:
    def wait(me: Any, index: Any, count: Any, peer: Any) -> Any:
        if Machine.running is not None:
            Machine.running.blame(_integer(peer))
        return function(me, index, count, peer)

    return wait


@interpreter.hook(DEVICE_API, "_poll")
def _poll(function: Callable) -> Callable:
    def poll(me: Any, index: Any, counters: Any, count: Any) -> Any:
        machine = Machine.running
        assert machine is not None
        first = _integer(me.signals) + 4 * _integer(index)
        machine.begin_wait([first + 4 * i for i in range(_integer(counters))], _integer(count))
        arrived = function(me, index, counters, count)
        machine.end_wait()
        return arrived

    return poll


@interpreter.hook(DEVICE_API, "claim")
def _claim(function: Callable) -> Callable:
    def claim(me: Any, index: Any, draws: Any) -> Any:
        ticket = function(me, index, draws)
        if Machine.running is not None:
            address = _integer(me.signals) + 4 * _integer(index)
            Machine.running.claim(address, _integer(ticket), _integer(draws))
        return ticket

    return claim


@interpreter.hook(DEVICE_API, "remote")
def _remote(function: Callable) -> Callable:
    def remote(me: Any, ptr: Any, peer: Any) -> Any:
        if Machine.running is not None:
            Machine.running.remote(_data(ptr))
        return function(me, ptr, peer)

    return remote


@interpreter.hook(DEVICE_API, "fence_proxy")
def _fence_proxy(function: Callable) -> Callable:
    def fence_proxy() -> None:
        function()
        if Machine.running is not None:
            Machine.running.fence_proxy()

    return fence_proxy


# Gluon kernels wait in assembly; here they do as others do.


@interpreter.hook(GLUON_API, "wait")
def _gluon_wait(function: Callable) -> Callable:
    return lambda *args: function.__globals__["shmem"].wait(*args)


@interpreter.hook(GLUON_API, "_poll")
def _gluon_poll(function: Callable) -> Callable:
    return lambda *args: function.__globals__["shmem"]._poll(*args)


def _writes(why: str, function: Callable) -> Callable:
    def write(*args: Any, **kwargs: Any) -> Any:
        machine = Machine.running
        assert machine is not None
        machine.begin_write(why)
        result = function(*args, **kwargs)
        machine.end_write()
        return result

    return write


for _api, _name, _why in (
    (DEVICE_API, "send", "send"),
    (DEVICE_API, "send_words", "send"),
    (DEVICE_API, "clear_vectors", "clear"),
    (GLUON_API, "clear_vectors", "clear"),
):
    interpreter.hook(_api, _name)(functools.partial(_writes, _why))


@interpreter.hook(DEVICE_API, "receive")
@interpreter.hook(DEVICE_API, "receive_words")
@interpreter.hook(DEVICE_API, "_take_words")
def _receive(function: Callable) -> Callable:
    def receive(me: Any, source: Any, peer: Any, mask: Any = None, *patient: Any) -> Any:
        machine = Machine.running
        assert machine is not None
        machine.begin_receive(*_awaited(source, peer, mask))
        received = function(me, source, peer, mask, *patient)
        machine.end_receive()
        return received

    return receive


def _awaited(source: Any, peer: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """The addresses of a block of messages, and who sends what is there."""
    lanes = np.True_ if mask is None else _data(mask)
    addresses, peers, lanes = np.broadcast_arrays(_data(source), _data(peer), lanes)
    return addresses[lanes], peers[lanes]
