"""What happens at each memory operation: who runs next, whether the access is right, and what the trace shows of it."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxtaxfree.heap.layout import Garbage
from jaxtaxfree.simulator import messages
from jaxtaxfree.simulator.clocks import Counter
from jaxtaxfree.simulator.errors import (
    AssumptionError,
    DataRaceError,
    DeadlockError,
    DeviceAssertError,
    EpochMismatchError,
    MessageError,
    OutOfBoundsError,
    SignalCountError,
)
from jaxtaxfree.simulator.events import Event, stack
from jaxtaxfree.simulator.memory import Messages, Part
from jaxtaxfree.simulator.scheduler import Program
from jaxtaxfree.simulator.waits import POKES, Block, Reception, Wait, Waits, Work, named

_PARTED = 0.25  # how often an atomic store of a block arrives in two portions
_MANY = 256  # addresses of which it takes longer to look up each than to compare the first and the last


class Machine(Waits):
    """Runs the memory operations of one simulation. Implements `interpreter.Machine`.

    Attributes:
      running: the machine of the simulation that runs, for the hooks in the device API.
      num_warps: of a program.
      alone: the kernel is no call of a team.
    """

    running: "Machine | None" = None
    num_warps = 4
    alone = False

    @staticmethod
    def describe(address: int, array: np.ndarray, block: tuple[int, ...]) -> Any:
        """A kernel's argument that is a TMA descriptor of an array. Only Gluon kernels take them."""
        raise NotImplementedError

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
        if epochs[program.rank] != program.call and not self.alone:
            raise self._error(
                EpochMismatchError,
                f"{named(program)} ended and left its epoch counter at "
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

    def report_garbage(self, slot: int, found: Garbage) -> None:
        """What a program tells the host. The first report of a rank and slot stays, as on a GPU until it is read."""
        event = self._event("report")
        first, _ = self.garbage.setdefault((event.rank, slot), (event, found))
        if first.program != event.program:
            raise self._error(
                DataRaceError,
                f"{event} and {first} report garbage into one slot: let one program of a rank do so.",
            )

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
        if not self._polled:
            return
        if addresses.size > _MANY:
            first, last = int(addresses.min()), int(addresses.max())
            if not any(first <= address <= last for address in self._polled):
                return
        for address in self._polled.intersection(addresses.tolist()):
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
                self._waits[program] = Wait(looked, 0, self.scheduler.step, None, stack())
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
        self,
        addresses: np.ndarray,
        size: int,
        semantics: str,
        scope: str,
        looks: bool,
        act: Callable[[], Any],
        conditional: bool = False,
    ) -> Any:
        parts = self._parts("atomic", addresses, size)
        if isinstance(parts[0][0], Messages):
            return self._message(parts, size, scope, looks, act)
        if self._settings.implicit_barriers and semantics in ("release", "acq_rel"):
            self.barrier()
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
                if semantics in ("release", "acq_rel") and (changed or not conditional):
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

    def remote(self, addresses: np.ndarray) -> None:
        """The current program asks where a peer keeps what is here."""
        ends = [self._space.at(int(address)) for address in (addresses.flat[0], addresses.flat[-1])]
        rank = self._program.rank
        # Lanes that a mask leaves out may be anywhere.
        if all(part and (part.rank != rank or part.kind in ("operand", "output", "updated")) for part in ends):
            assert ends[0] is not None
            raise self._error(
                OutOfBoundsError,
                f"{self._event('remote')} takes a pointer to the {ends[0].title}: peers share only scratch and "
                "messages, and it takes this rank's own pointer to them.",
            )

    def failed_assert(self, message: str) -> None:
        raise self._error(DeviceAssertError, f"{self._event('device_assert')} does not hold: {message}")

    def failed_assumption(self) -> None:
        raise self._error(
            AssumptionError,
            f"{self._event('assume')} is false. The compiler takes it for granted, so what it makes of the kernel may "
            "do anything: correct the condition, or leave it out.",
        )

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
        receives = looks and isinstance(wait, Reception)
        if not receives and (looks or self._writing.get(program) != "send"):
            self._refuse_messages("atomic", parts)
        event = self._event("receive" if receives else "send")
        units = [(part, self._check(messages.units_of, part, of, size, event)) for part, of in parts]
        if scope != "sys":
            raise self._error(MessageError, f"{event} is at scope {scope!r}: messages need that of the system.")
        if receives:
            assert isinstance(wait, Reception)
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
                if isinstance(wait, Reception) and wait.misses(part, units):
                    wait.news += 1
                    if other.parked:
                        self.scheduler.wake(other)
        self._publish(f"{parts[0][0].name} to rank {', '.join(str(part.rank) for part, _ in parts)}")
        return result

    def _receive(
        self, wait: Reception, parts: list[tuple[Any, np.ndarray]], event: Event, act: Callable[[], Any]
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
            if last.missing.any() or again > POKES:
                self.scheduler.park((part.start,))
        late, writers = self._check(messages.look, self._clocks, part, units, event)
        missing = np.zeros(part.words.shape, bool)
        missing[late] = True
        wait.blocks[key] = Block(part, units, event, writers, missing, wait.news, again)
        return act()

    def _clears(self, parts: list[tuple[Part, np.ndarray]]) -> bool:
        """Whether a store is that of `shmem.receive_words` or `clear_vectors`, to words that have come."""
        (part, of), program = parts[0], self._program
        clears = self._writing.get(program) == "clear" or isinstance(self._waits.get(program), Reception)
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
        if not isinstance(wait, Reception):
            program.seen.clear()
            self._end_work(program)
            wait = self._waits[program] = Reception(self.scheduler.step, stack())
        wait.awaited.append((addresses, peers))
        wait.depth += 1

    def end_receive(self) -> None:
        program = self._program
        wait = self._waits[program]
        assert isinstance(wait, Reception)
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
