"""Kernels of Iris in the simulator: launches on a stream of each rank, which share a symmetric heap that lasts.

`simulator.run` knows one kernel, whose scratch and signals have rules of their own. Iris's kernels find each other's
memory by a table of bases, keep flags in ordinary memory, and rely on what the launch before has left there.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from triton.runtime.jit import JITFunction

from jaxtaxfree import language
from jaxtaxfree.call import check_kernel, sizes_of
from jaxtaxfree.iris.arguments import BASES, CONTEXT, RANK, WORLD, Number, Table
from jaxtaxfree.simulator import interpreter
from jaxtaxfree.simulator.errors import SimulationError
from jaxtaxfree.simulator.events import Stack, who
from jaxtaxfree.simulator.iris_machine import IrisClocks, IrisMachine, SymmetricHeap
from jaxtaxfree.simulator.machine import Machine
from jaxtaxfree.simulator.memory import POISON, Heap, Space
from jaxtaxfree.simulator.scheduler import Program, Scheduler, Settings
from jaxtaxfree.simulator.trace import Trace

# Of which RANK, WORLD, BASES and CONTEXT are those of `iris_call`.
__all__ = [
    "BASES",
    "CONTEXT",
    "RANK",
    "WORLD",
    "Barrier",
    "Buffer",
    "Fill",
    "Launch",
    "PerRank",
    "local",
    "run_iris",
    "symmetric",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Buffer:
    """Memory of every rank that lasts over all launches. Kernels reach a peer's only if it is `symmetric`.

    Attributes:
      shape, dtype: of it, the same on all ranks.
      value: what it holds at the beginning: a number, an array for each rank, or None for what nobody may read.
      symmetric: whether it lies on the symmetric heap.
    """

    shape: tuple[int, ...]
    dtype: Any
    value: Any = None
    symmetric: bool = False


def symmetric(shape: tuple[int, ...], dtype: Any, value: Any = None) -> Buffer:
    """A buffer on the symmetric heap. `value` as in `Buffer`."""
    return Buffer(tuple(shape), dtype, value, True)


def local(shape: tuple[int, ...], dtype: Any, value: Any = None) -> Buffer:
    """A buffer of each rank that peers do not reach. `value` as in `Buffer`."""
    return Buffer(tuple(shape), dtype, value)


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """A launch of a kernel on the stream of each rank.

    Attributes:
      kernel: what `triton.jit` made.
      grid: programs, in one to three dimensions.
      arguments: for each of its parameters a `Buffer`, a constant or None, `PerRank` constants, or what `iris_call`
        takes as well: numbers of RANK and WORLD, BASES, and CONTEXT.
      ranks: where it is launched; None for everywhere.
    """

    kernel: JITFunction
    grid: int | tuple[int, ...]
    arguments: Mapping[str, Any]
    ranks: Sequence[int] | None = None
    lines: Stack = dataclasses.field(default=(), init=False)

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def sizes(self) -> tuple[int, int, int]:
        x, y, z = (*sizes_of(self.grid), 1, 1)[:3]
        return x, y, z


class PerRank(tuple):
    """Constants of which each rank takes its own."""


# What Iris's host does between launches. Each is one program on each rank.


def _line(name: str) -> Stack:
    return ((compile("", "host", "exec").replace(co_name=name), 1, "host"),)


@dataclasses.dataclass(frozen=True, eq=False)
class Fill:
    """Every rank sets its own buffer to a value, as `tensor.fill_` does."""

    buffer: Buffer
    value: Any = 0

    name = "Fill"
    sizes = (1, 1, 1)
    ranks = None
    lines = _line("Fill")


@dataclasses.dataclass(frozen=True, eq=False)
class Barrier:
    """All ranks wait until all have ended what was launched before, as `barrier` of Iris's host does."""

    name = "Barrier"
    sizes = (1, 1, 1)
    ranks = None
    lines = _line("Barrier")


TRITON = ("3.8", "3.9")


class _Run:
    """The memory of a simulation, and what its launches take of it."""

    def __init__(self, launches: Sequence[Any], world: int, buffers: Sequence[Buffer], settings: Settings):
        self.launches, self.world = launches, world
        self.programs = max(math.prod(launch.sizes) for launch in launches)
        self.space = Space()
        self.heap = SymmetricHeap(world, self.programs)
        self.clocks = IrisClocks(world, self.programs)
        self.arrays: dict[Buffer, list[np.ndarray]] = {}
        names = _names(launches)
        shared = [buffer for buffer in buffers if buffer.symmetric]
        kinds = [(names[buffer], buffer.shape, np.dtype(buffer.dtype)) for buffer in shared]
        counter = [("barrier", (1,), np.dtype(np.int32))]
        *of_shared, counters = self.heap.allocate(self.space, kinds + counter)
        for buffer, arrays in zip(shared, of_shared):
            self.arrays[buffer] = arrays
        for buffer in buffers:
            if not buffer.symmetric:
                poison = np.full(_bytes(buffer), POISON, np.uint8).view(buffer.dtype).reshape(buffer.shape)
                made = [self.space.array(names[buffer], "local", rank, poison) for rank in range(world)]
                self.arrays[buffer] = [array for _, array in made]
        for buffer, arrays in self.arrays.items():
            for rank, array in enumerate(arrays):
                if buffer.value is not None:
                    array[...] = buffer.value if np.ndim(buffer.value) == 0 else buffer.value[rank]
                    self._begin(array)
        for array in counters:
            array[...] = 0
            self._begin(array)
        self.counter = counters[0].ctypes.data
        self.tables = []
        for rank in range(world):
            row = np.array([rank, world, *self.heap.bases, 0], np.int64)
            part, _ = self.space.array("heap_bases", "operand", rank, row)
            self.tables.append(part.start)
        trace = Trace(launches[0].name)
        self.trace = trace
        machine = self.machine = IrisMachine(
            launches[0].name, self.space, cast(Heap, self.heap), self.clocks, (1, 1, 1), settings, trace
        )
        machine.launches = launches

    def _begin(self, array: np.ndarray) -> None:
        if array.size and (part := self.space.at(array.ctypes.data)):
            self.clocks.begin(part)

    def body(self, program: Program) -> None:
        machine = self.machine
        machine.begin(program)
        launch = machine.launch(program)
        here = launch.ranks is None or program.rank in launch.ranks
        if program.program < math.prod(launch.sizes) and here:
            try:
                self._launch(launch, program.rank)
            except SimulationError:
                raise
            except Exception as error:
                error.add_note(f"in {who(program.rank, program.program, program.call)} of {launch.name}")
                raise
        machine.end(program)

    def _launch(self, launch: Any, rank: int) -> None:
        if isinstance(launch, Fill):
            self.machine.fill(self.arrays[launch.buffer][rank], launch.value)
        elif isinstance(launch, Barrier):
            self.machine.meet(self.counter, self.world)
        else:
            constants = interpreter.constants(launch.kernel)
            bound = {name: self._argument(value, rank, name in constants) for name, value in launch.arguments.items()}
            interpreter.convert(launch.kernel)(**bound)

    def _argument(self, value: Any, rank: int, constant: bool) -> Any:
        if isinstance(value, Buffer):
            return interpreter.pointer(self.arrays[value][rank].ctypes.data, np.dtype(value.dtype))
        if isinstance(value, Table):
            begin, dtype = (0, np.int64) if value is CONTEXT else (16, np.uint64)
            return interpreter.pointer(self.tables[rank] + begin, np.dtype(dtype))
        if isinstance(value, Number):
            value = value.compute(rank, self.world)
        elif isinstance(value, PerRank):
            value = value[rank]
        return interpreter.convert(value) if constant or value is None else interpreter.argument(value)

    def run(self, rounds: int, settings: Settings) -> None:
        machine = self.machine

        def end_call(rank: int, call: int) -> None:
            self.clocks.end_call(rank)
            machine.end_call(rank, call)

        with language.rebound():
            machine.scheduler = Scheduler(
                world=self.world,
                programs=self.programs,
                first_call=1,
                last_call=rounds * len(self.launches),
                slots=settings.slots,
                policy=settings.policy,
                seed=settings.seed,
                index=lambda i: (i, 0, 0),  # of which the machine makes a place in the grid of a launch
                body=self.body,
                begin_call=lambda rank, call: None,
                end_call=end_call,
                stuck=machine.stuck,
            )
            Machine.running = machine
            try:
                with interpreter.interpreting(interpreter.Builder(machine)):
                    machine.scheduler.run()
                machine.finish()
            except SimulationError as error:
                error.trace = self.trace
                raise
            finally:
                Machine.running = None
                self.trace.steps = machine.scheduler.step


def _bytes(buffer: Buffer) -> int:
    return math.prod(buffer.shape) * np.dtype(buffer.dtype).itemsize


def _names(launches: Sequence[Any]) -> dict[Buffer, str]:
    """What reports call the buffers: as the first kernel does that takes them."""
    names: dict[Buffer, str] = {}
    for launch in launches:
        if isinstance(launch, Launch):
            for name, value in launch.arguments.items():
                if isinstance(value, Buffer):
                    names.setdefault(value, name)
    for launch in launches:
        if isinstance(launch, Fill):
            names.setdefault(launch.buffer, "filled")
    return names


def run_iris(
    launches: Any,
    *,
    world: int,
    results: Buffer | Sequence[Buffer] = (),
    rounds: int = 1,
    triton: str = "3.9",
    assumptions: bool = True,
    seed: int = 0,
    policy: str = "random",
    slots: int | None = None,
    patience: int = 100_000,
) -> tuple[list[Any], Trace]:
    """Runs Triton kernels that are written for Iris on all ranks on the CPU, and raises what a GPU would hide.

        x = iris.symmetric((64,), np.float32, [x_of_rank_0, x_of_rank_1])
        out = iris.local((64,), np.float32)
        pull = iris.Launch(kernel, grid=2, arguments=dict(x_ptr=x, out_ptr=out, rank=iris.RANK, heap_bases=iris.BASES))
        outs, trace = simulator.run_iris(pull, world=2, results=out)

    A rank's launches follow each other as on one stream, and the ranks as they come. Buffers stay as they were left, so
    a second round shows flags that nobody has reset.

    Args:
      launches: one, or those of a round in their order: `Launch`, `Fill` and `Barrier` of `jaxtaxfree.simulator.iris`.
      world: number of ranks.
      results: a buffer, or several of them.
      rounds: how many times each rank makes all launches.
      triton: as which version compiles: "3.9" puts a block barrier in front of every atomic that releases, "3.8" and
        older ones do not.
      assumptions: whether a `tl.assume` that is false is an error.
      seed, policy, slots, patience: as in `Settings`. Some of Iris's kernels need all their programs at a time, which
        is slots=None.

    Returns: (results, trace). `results` has what each rank's buffer holds in the end, or a list of those of several.

    Raises:
      SimulationError: a kernel breaks a rule. The error is of one of its kinds, with the source lines of both sides.
      TypeError, ValueError: launches or buffers that do not fit, with all reasons.
    """
    launches = [launches] if isinstance(launches, Launch | Fill | Barrier) else list(launches)
    single = isinstance(results, Buffer)
    wanted: list[Buffer] = [results] if isinstance(results, Buffer) else list(results)
    buffers = _check(launches, world, wanted, rounds, triton)
    bare = triton == "3.8"
    settings = Settings(seed=seed, policy=policy, slots=slots, patience=patience, implicit_barriers=not bare)
    simulation = _Run(launches, world, buffers, settings)
    simulation.machine.assumptions = assumptions
    simulation.run(rounds, settings)
    outs = [[simulation.arrays[buffer][rank].copy() for buffer in wanted] for rank in range(world)]
    return [out[0] for out in outs] if single else outs, simulation.trace


def _check(launches: Sequence[Any], world: int, results: Sequence[Buffer], rounds: int, triton: str) -> list[Buffer]:
    """The buffers of the launches. Raises unless all is what `run_iris` takes."""
    reasons = []
    if world < 1 or rounds < 1 or not launches:
        reasons.append(f"it takes world and rounds of at least 1, not {world} and {rounds}, and one launch or more")
    if triton not in TRITON:
        reasons.append(f"it knows Triton {' and '.join(TRITON)}, not {triton!r}")
    for i, launch in enumerate(launches, 1):
        if isinstance(launch, Launch):
            check_kernel(launch.kernel, "simulator.run_iris")
            reasons += [f"launch {i}, {launch.name}, {reason}" for reason in _reasons(launch, world)]
        elif not isinstance(launch, Fill | Barrier):
            raise TypeError(f"simulator.run_iris takes launches of Launch, Fill and Barrier, not {launch!r}.")
    buffers = list(_names(launches))
    for buffer in buffers:
        if np.ndim(buffer.value):
            shapes = {np.shape(value) for value in buffer.value}
            if len(buffer.value) != world or shapes != {tuple(buffer.shape)}:
                reasons.append(
                    f"a buffer {list(buffer.shape)} takes as value a number or an array of its shape for each of "
                    f"{world} ranks, not {len(buffer.value)} of shapes {sorted(shapes)}"
                )
    if any(result not in buffers for result in results):
        reasons.append("a result is a buffer that some launch takes")
    if reasons:
        raise ValueError(f"simulator.run_iris cannot run this: {'; '.join(reasons)}.")
    return buffers


def _reasons(launch: Launch, world: int) -> list[str]:
    """Why a launch does not fit its kernel."""
    reasons = []
    if launch.kernel.is_gluon():
        reasons.append("is a Gluon kernel, of which only simulator.run knows")
    known = {each.name: each.has_default for each in launch.kernel.params}
    if unknown := sorted(launch.arguments.keys() - known.keys()):
        reasons.append(f"has no parameter {', '.join(unknown)}")
    if missing := [name for name, default in known.items() if not default and name not in launch.arguments]:
        reasons.append(f"gets nothing for {', '.join(missing)}")
    for name, value in launch.arguments.items():
        if isinstance(value, PerRank) and len(value) != world:
            reasons.append(f"gets {len(value)} values of {name} for {world} ranks")
    sizes = launch.grid if isinstance(launch.grid, tuple) else (launch.grid,)
    if not 1 <= len(sizes) <= 3 or any(int(size) < 1 for size in sizes):
        reasons.append(f"takes a grid of one to three positive sizes, not {launch.grid!r}")
    return reasons
