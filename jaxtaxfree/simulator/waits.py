"""Waits for signals and messages, and the reports about them."""

import ctypes
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxtaxfree.heap.layout import Garbage
from jaxtaxfree.simulator import messages
from jaxtaxfree.simulator.clocks import Clocks, Counter
from jaxtaxfree.simulator.errors import (
    DeadlockError,
    OutOfBoundsError,
    SignalCountError,
    SimulationError,
    WaitOrderError,
    WaitTimeoutError,
    WrongPeerError,
)
from jaxtaxfree.simulator.events import Event, Stack, stack, where, who
from jaxtaxfree.simulator.memory import Heap, Messages, Part, Space
from jaxtaxfree.simulator.scheduler import Program, Scheduler, Settings
from jaxtaxfree.simulator.trace import Span, Trace
from jaxtaxfree.simulator.waste import Waste

_WAITS_SHOWN = 24  # in a report
POKES = 16  # polls of its own that a program may repeat in vain while nothing else happens


@dataclasses.dataclass(slots=True, eq=False)
class Wait:
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
    wait: Wait
    address: int
    peer: int


@dataclasses.dataclass(slots=True, eq=False)
class Block:
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
class Reception:
    """A program in `shmem.receive` or another function that receives: since when, where, and what it has polled.

    Attributes:
      awaited: addresses, and who sends what comes there.
      depth: how many functions that receive it is in.
      news: how often something has come that was missing.
    """

    begin: int
    lines: Stack
    awaited: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)
    blocks: dict[tuple[int, int, int], Block] = dataclasses.field(default_factory=dict)
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


class Waits:
    """Who waits for what, whether what came is what was waited for, and what to say if it does not come.

    Attributes:
      scheduler: to be set before it runs.
      waste: what was sent to peers that nobody used, as far as that is known.
      together: programs that may wait for each other.
    """

    scheduler: Scheduler
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
        self._waits: dict[Program, Wait | Reception | Sleep] = {}
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
        self.garbage: dict[tuple[int, int], tuple[Event, Garbage]] = {}  # by rank and slot: who reports what
        self._pokes = 0
        self._deadlock: str | None = None  # seen, and got round by a slot more than there are
        self._look_out = settings.patience // 4

    @property
    def _program(self) -> Program:
        program = self.scheduler.current
        assert program is not None
        return program

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

    # What every check asks for.

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
            if part.kind in ("operand", "output", "updated") and part.rank != self._program.rank:
                raise self._error(
                    OutOfBoundsError,
                    f"{self._event(verb)} reaches the {part.title}: peers share only scratch and signals.",
                )
        return parts

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
                f"{named(program)} draws ticket {ticket} of {self._signal(address)} at {where(stack())}, but `draws` "
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
        wait = Wait(addresses, expected, self.scheduler.step, self._peer.pop(program, None), lines)
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
        assert isinstance(wait, Wait)
        label = ", ".join(self._signal(address) for address in wait.addresses[:3])
        self._span("wait", wait.begin, label)
        self._work[program] = Work(self.scheduler.step)
        for address in wait.addresses:
            for event in self._clocks.counters[address].raised[max(0, wait.expected - 1024) : wait.expected]:
                self._check_order(program, wait, f"signal {self._signal(address)}", event.thread, event.call)
            if (peer := self._blamed(wait, address)) is not None:
                self._blames.append(_Blame(program, wait, address, peer))
        self._has_heard(program)

    def _check_order(self, program: Program, wait: Wait | Reception, what: str, thread: int, call: int) -> None:
        """Checks that a program waited for none of a higher id, but for the next ones that run together with it."""
        claimed = self._settings.tickets or (thread % self._threads, call) in self._claims
        if claimed or call != program.call or thread % self._programs < program.program + self.together:
            return
        does = "raises" if isinstance(wait, Wait) else "sends"
        raise self._error(
            WaitOrderError,
            f"{named(program)} waits at {where(wait.lines)} for {what}, which {self._clocks.name(thread, call)} "
            f"{does}: a program of a higher id. A GPU starts programs in the order of their ids, so the higher one may "
            "get no place before the lower one has ended.",
        )

    def _has_heard(self, program: Program) -> None:
        self._heard.setdefault((program.thread % self._threads, program.call), self.scheduler.step)

    def _blamed(self, wait: Wait, address: int) -> int | None:
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
        self, program: Program, wait: Wait | Reception, what: str, peer: int, by: Iterable[int]
    ) -> SimulationError:
        return self._error(
            WrongPeerError,
            f"{named(program)} waits at {where(wait.lines)} for {what}, and names rank {peer} for it, but who sends it "
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
        polls = [program for program, wait in self._waits.items() if isinstance(wait, Wait) and not wait.expected]
        if polls and self._pokes < POKES:
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
            if isinstance(wait, Reception):
                lines.append(f"  {named(program)} waits at {where(wait.lines)}:")
                lines.extend(f"    {line}." for line in self._describe_reception(wait))
                continue
            if isinstance(wait, Sleep):
                lines.append(f"  {named(program)} waits at {where(wait.lines)}:")
                lines.append(f"    {wait.what()}.")
                continue
            for address in wait.addresses:
                seen = int.from_bytes(ctypes.string_at(address, 4), "little", signed=True)
                if wait.expected and seen >= wait.expected:
                    continue
                lines.append(f"  {named(program)} waits at {where(wait.lines)}:")
                expected = f"expects {wait.expected} and sees {seen}" if wait.expected else f"sees {seen}"
                lines.append(f"    signal {self._signal(address)}: {expected}; {self._culprit(wait, address)}.")
        if len(waits) > _WAITS_SHOWN:
            lines.append(f"  and {len(waits) - _WAITS_SHOWN} more")
        if unstarted:
            lines.append("  Further programs need a slot, and those that wait have all of a rank.")
        return "\n".join(lines)

    def _describe_reception(self, wait: Reception) -> list[str]:
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
    def _peers(wait: Reception, part: Messages, units: np.ndarray) -> np.ndarray:
        """Who sends these words, as the functions say that wait for them."""
        addresses, peers = (np.concatenate([both[i].ravel() for both in wait.awaited]) for i in range(2))
        order = np.argsort(addresses, kind="stable")
        wanted = part.start + messages.WORD * units.astype(np.uint64)
        return peers[order][np.searchsorted(addresses[order], wanted)]

    def _progress(self, rank: int) -> str:
        state = self.scheduler.ranks[rank]
        return f"has ended {state.next - state.live} of {self._programs} programs of call {state.call}"

    def _culprit(self, wait: Wait, address: int) -> str:
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
                if isinstance(wait, Wait):
                    what = f"signal {self._signal(wait.addresses[0])}"
                elif isinstance(wait, Sleep):
                    what = wait.what()
                else:
                    what = "; ".join(self._describe_reception(wait))
                raise self._error(
                    WaitTimeoutError,
                    f"{named(program)} has waited at {where(wait.lines)} for {what} "
                    f"while others took {waited} steps. On a GPU the wait might have expired; here it may last "
                    f"{patience} steps (the setting patience).",
                )
        for program in self.scheduler.live:
            if program.steps > patience:
                raise self._error(
                    WaitTimeoutError,
                    f"{named(program)} has not ended after {program.steps} steps: does it poll for ever?",
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


def named(program: Program) -> str:
    return who(program.rank, program.program, program.call)
