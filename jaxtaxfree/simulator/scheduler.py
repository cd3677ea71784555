"""Who runs next: programs as greenlets, one at a time."""

import contextvars
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

from greenlet import GreenletExit, getcurrent, greenlet

from jaxtaxfree.simulator.events import Event

POLICIES = ("round-robin", "random", "ahead", "straggler")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a simulation chooses among the interleavings.

    Attributes:
      seed: of all choices.
      policy: "round-robin", "random", "ahead" or "straggler"; see `Scheduler`.
      slots: programs of a rank that run at a time, or as many as the kernel needs `together`; None for all.
      patience: steps after which a wait has lasted too long.
      tickets: the kernel's programs claim their work, otherwise than by `shmem.claim`, so they may wait for programs of
        a higher id.
      implicit_barriers: a block barrier stands in front of every atomic that releases, as Triton 3.9 compiles it.
        Otherwise those count that are written.
    """

    seed: int = 0
    policy: str = "random"
    slots: int | None = None
    patience: int = 1_000_000
    tickets: bool = False
    implicit_barriers: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"There is no policy {self.policy!r}: choose one of {', '.join(map(repr, POLICIES))}.")
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"A rank needs at least one slot, not {self.slots}.")


@dataclasses.dataclass(slots=True, eq=False)
class Program:
    """One program of one rank in one call, or a part of one that runs beside it.

    Attributes:
      rank, program, call: which; calls count from 1.
      thread: index among the programs of all ranks.
      index: place in the grid.
      steps: memory operations so far.
      seen: counters that it has looked at since it last did anything else, and their versions.
      parked: addresses of the counters it waits for.
      part: 0 for the program itself.
      portions: of the atomic store that it is at, how many are to come.
      whole: the first of them.
      run: what executes it.
      course: of an operation, which has no `run`: its steps.
    """

    rank: int
    program: int
    call: int
    thread: int
    index: tuple[int, int, int]
    steps: int = 0
    seen: dict[int, int] = dataclasses.field(default_factory=dict)
    parked: tuple[int, ...] = ()
    part: int = 0
    portions: int = 0
    whole: Event | None = None
    run: greenlet | None = None
    course: Iterator[None] | None = None


@dataclasses.dataclass(slots=True)
class _Rank:
    call: int = 0  # the current one, from 1 on
    next: int = 0  # the program that starts next
    live: int = 0  # programs that have started and not ended
    runnable: list[Program] = dataclasses.field(default_factory=list)


class Scheduler:
    """Runs the programs of all ranks, and decides by a seed which one takes the next step.

    Programs of a rank start in the order of their ids, as many at a time as the rank has slots, and the next call of
    a rank starts when all programs of its last one have ended.

    Args:
      world, programs: ranks, and programs of a call.
      first_call, last_call: which calls to run.
      slots: programs of a rank that run at a time; None for all.
      policy: "round-robin": each program in turn; "random": any; "ahead": one rank as far ahead of the others as it
        gets; "straggler": one rank only when no other one can run.
      seed: of all choices. The same arguments make the same run.
      body: runs a program.
      begin_call, end_call: (rank, call), around the programs of a call.
      stuck: called when nobody can run, with whether some program only needs a slot; says whether to lend it one,
        unless it has woken somebody. Raises if there is no way out.
    """

    def __init__(
        self,
        *,
        world: int,
        programs: int,
        first_call: int,
        last_call: int,
        slots: int | None,
        policy: str,
        seed: int,
        index: Callable[[int], tuple[int, int, int]],
        body: Callable[[Program], None],
        begin_call: Callable[[int, int], None],
        end_call: Callable[[int, int], None],
        stuck: Callable[[bool], bool],
    ):
        self._programs, self._last_call = programs, last_call
        self._slots = programs if slots is None else slots
        self._policy = policy
        self._random = random.Random(f"{policy} {seed} {first_call}")
        # A program that keeps running for a while gets into other places than one that is always interrupted.
        self._stay = self._random.choice((0.0, 0.5, 0.9))
        self._special = self._random.randrange(world)
        self._index, self._body, self._stuck = index, body, stuck
        self._begin_call, self._end_call = begin_call, end_call
        self.ranks = [_Rank(first_call - 1) for _ in range(world)]
        self._turn = 0
        self._watchers: dict[int, list[Program]] = {}
        self.live: dict[Program, None] = {}
        self.current: Program | None = None
        self._chosen: Program | None = None  # for the hub
        self._failure: BaseException | None = None  # of an operation, for the hub to raise
        self.step = 0

    def run(self) -> None:
        """Runs all calls to their end."""
        self._hub = getcurrent()
        try:
            for rank in range(len(self.ranks)):
                self._next_call(rank)
            while (program := self._chosen or self._operate(self._choose())) is not None or self.live:
                self._chosen = None
                if self._failure is not None:
                    raise self._failure
                if program is None:
                    self._lend_slot()
                    continue
                self.current = program
                assert program.run is not None
                program.run.switch()
        finally:
            self.current = None
            for program in list(self.live):
                if program.run:  # started and not finished
                    program.run.throw(GreenletExit)

    def draw(self) -> float:
        """A random number below 1, for choices that a simulation leaves open elsewhere."""
        return self._random.random()

    def pause(self) -> None:
        """A place where another program may take over."""
        program = self.current
        assert program is not None
        self.step += 1
        program.steps += 1
        chosen = self._choose()
        if chosen is not program:
            self._switch(chosen)

    def park(self, addresses: Sequence[int]) -> None:
        """The current program goes on when one of these words has changed."""
        program = self.current
        assert program is not None
        program.parked = tuple(addresses)
        for address in addresses:
            self._watchers.setdefault(address, []).append(program)
        self.ranks[program.rank].runnable.remove(program)
        self._switch(self._choose())

    def _switch(self, program: Program | None) -> None:
        """Leaves the current program for another one, unless it is its turn again after some operations."""
        before = self.current
        program = self._operate(program)
        self.current = program
        if program is not None and program is before:
            return
        if program is not None and program.run:
            program.run.switch()
        else:
            # A greenlet counts its calls on top of those of the one that starts it: only the hub starts them.
            self._chosen = program
            self._hub.switch()

    def _operate(self, program: Program | None) -> Program | None:
        """Takes steps of operations, which need no stack of their own, until it is a program's turn."""
        while program is not None and program.course is not None:
            self.current = program
            try:
                next(program.course)
                self.step += 1
                program.steps += 1
            except StopIteration:
                self._retire(program)
            except BaseException as error:
                # Not here: this may be the stack of a program that has nothing to do with it.
                self._failure = error
                return None
            program = self._choose()
        return program

    def changed(self, address: int) -> None:
        """Lets those go on who wait for this word."""
        for program in tuple(self._watchers.get(address, ())):
            self.wake(program)

    def wake(self, program: Program) -> None:
        """Lets a program go on that is parked."""
        for address in program.parked:
            self._watchers[address].remove(program)
        program.parked = ()
        self.ranks[program.rank].runnable.append(program)

    def _next_call(self, rank: int) -> None:
        state = self.ranks[rank]
        if state.call == self._last_call:
            return
        state.call += 1
        state.next = 0
        self._begin_call(rank, state.call)
        self._fill(rank)

    def _fill(self, rank: int) -> None:
        while self.ranks[rank].live < self._slots and self.ranks[rank].next < self._programs:
            self._start(rank)

    def _start(self, rank: int) -> None:
        state = self.ranks[rank]
        program = Program(rank, state.next, state.call, rank * self._programs + state.next, self._index(state.next))
        state.next += 1
        state.live += 1
        self._launch(program, lambda: self._live(program))

    def spawn(self, part: Program, body: Callable[[], None]) -> None:
        """Starts a part of a program. It needs no slot, and ends before its program does."""

        def live() -> None:
            body()
            self._retire(part)

        self._launch(part, live)

    def operate(self, part: Program, course: Iterator[None]) -> None:
        """Starts an operation of a program: another one may take over wherever it yields. It never parks."""
        part.course = course
        self.ranks[part.rank].runnable.append(part)
        self.live[part] = None

    def _launch(self, program: Program, live: Callable[[], None]) -> None:
        program.run = greenlet(live, parent=self._hub)
        # NumPy keeps its error state, which the interpreter sets, in the context; a greenlet would begin with none.
        program.run.gr_context = contextvars.copy_context()
        self.ranks[program.rank].runnable.append(program)
        self.live[program] = None

    def _retire(self, program: Program) -> None:
        self.ranks[program.rank].runnable.remove(program)
        del self.live[program]

    def _live(self, program: Program) -> None:
        self._body(program)
        self._retire(program)
        state = self.ranks[program.rank]
        state.live -= 1
        if state.live == 0 and state.next == self._programs:
            self._end_call(program.rank, state.call)
            self._next_call(program.rank)
        else:
            self._fill(program.rank)

    def _lend_slot(self) -> None:
        """Nobody can run. A program more than the slots allow shows whether one waits for a higher id."""
        waiting = [rank for rank, state in enumerate(self.ranks) if state.live > 0 and state.next < self._programs]
        if self._stuck(bool(waiting)):
            for rank in waiting:
                self._start(rank)

    def _choose(self) -> Program | None:
        program, draw = self.current, self._random.random
        if self._policy == "round-robin":
            world = len(self.ranks)
            for i in range(1, world + 1):
                runnable = self.ranks[(self._turn + i) % world].runnable
                if runnable:
                    self._turn += i
                    return runnable[(self._turn // world) % len(runnable)]
            return None
        if (
            program is not None
            and not program.parked
            and program in self.live
            and draw() < self._stay
            and (self._policy == "random" or (program.rank == self._special) == (self._policy == "ahead"))
        ):
            return program
        ranks = [state.runnable for state in self.ranks if state.runnable]
        if not ranks:
            return None
        special = self.ranks[self._special].runnable
        if special and self._policy == "ahead":
            ranks = [special]
        elif special and self._policy == "straggler" and len(ranks) > 1:
            ranks = [runnable for runnable in ranks if runnable is not special]
        runnable = ranks[int(draw() * len(ranks))]
        return runnable[int(draw() * len(runnable))]
