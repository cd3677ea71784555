"""A simulation: the ranks of one team and their region, through any number of calls."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from triton.runtime.jit import JITFunction

from jaxtaxfree import language
from jaxtaxfree.call import (
    Bundles,
    Descriptor,
    block_of,
    bundled,
    check_call,
    check_kernel,
    constants_of,
    is_alone,
    members,
    pointers_of,
    sizes_of,
    unbundled,
)
from jaxtaxfree.diagnosis import about_tuples
from jaxtaxfree.heap import tell_garbage
from jaxtaxfree.heap.layout import Layout, header
from jaxtaxfree.simulator import (
    hooks,  # noqa: F401  they belong to every simulation
    interpreter,
)
from jaxtaxfree.simulator.clocks import AgentClocks, Clocks
from jaxtaxfree.simulator.errors import SimulationError
from jaxtaxfree.simulator.events import kernel_lines, who
from jaxtaxfree.simulator.machine import Machine
from jaxtaxfree.simulator.memory import POISON, Heap, Part, Space
from jaxtaxfree.simulator.scheduler import Program, Scheduler, Settings
from jaxtaxfree.simulator.trace import Trace

_MAGIC = 0x51D1A
_NO_TIMEOUT = 1e9  # seconds: a wait ends by its signal, or the simulation does


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel and all that is the same in each of its calls.

    Attributes:
      kernel: what `triton.jit` made.
      bundles: which of the operands are one parameter.
      name: of the operation.
      world: number of ranks.
      grid: programs, in one to three dimensions.
      out_types: shape and dtype of each result.
      layout: of the region.
      params: the kernel's other parameters.
      descriptors: by the parameters that are TMA descriptors of operands or results, what `call.block_of` takes.
      num_warps: of a program, for Gluon kernels that ask.
      together: programs that may wait for each other.
      aliases: (number of an operand, number of the result that it becomes).
    """

    kernel: JITFunction
    bundles: Bundles
    name: str
    world: int
    grid: tuple[int, ...]
    out_types: tuple[Any, ...]
    layout: Layout
    params: Mapping[str, Any]
    descriptors: Mapping[str, Descriptor] = dataclasses.field(default_factory=dict)
    num_warps: int = 4
    together: int = 1
    aliases: tuple[tuple[int, int], ...] = ()


def _kind_of(kernel: JITFunction) -> tuple[type[Machine], type[Clocks]]:
    """What runs a kernel of this language."""
    if not kernel.is_gluon():
        return Machine, Clocks
    # Here, because Gluon's language is experimental, and takes long to import.
    from jaxtaxfree.simulator import gluon

    return gluon.GluonMachine, AgentClocks


class Session:
    """Ranks with a region that lasts from call to call, as on the GPUs."""

    def __init__(self, launch: Launch):
        self.launch = launch
        self.calls = 0  # that have been run
        programs = math.prod(launch.grid)
        self.space = Space()
        self._machine, clocks = _kind_of(launch.kernel)
        self.clocks = clocks(launch.world, programs)
        self.layout = dataclasses.replace(launch.layout, sparse=True)
        self.heap = Heap(self.space, launch.world, self.layout, header(_MAGIC, 0, _NO_TIMEOUT))
        self.broken: SimulationError | None = None
        self._warned: set[str] = set()

    def run(
        self, operands: Sequence[Sequence[Sequence[np.ndarray]]], settings: Settings
    ) -> tuple[list[list[list[np.ndarray]]], Trace]:
        """Runs calls, each rank one after the other and the ranks as they come.

        Args:
          operands: for each call, for each rank, its operands.

        Returns: for each call, for each rank, its results; and what everybody did.

        Raises:
          SimulationError: the kernel breaks a rule. The session takes no calls after that.
        """
        with language.rebound():
            return self._run(operands, settings)

    def _run(
        self, operands: Sequence[Sequence[Sequence[np.ndarray]]], settings: Settings
    ) -> tuple[list[list[list[np.ndarray]]], Trace]:
        if self.broken is not None:
            raise self.broken
        launch, first = self.launch, self.calls + 1
        trace = Trace(launch.name)
        programs = math.prod(launch.grid)
        x, y, z = (*launch.grid, 1, 1)[:3]
        machine = self._machine(launch.name, self.space, self.heap, self.clocks, (x, y, z), settings, trace)
        machine.num_warps, machine.together = launch.num_warps, launch.together
        machine.alone = is_alone(launch.kernel)
        function = interpreter.convert(launch.kernel)
        arguments: dict[tuple[int, int], dict[str, Any]] = {}
        arrays: dict[tuple[int, int], list[Part]] = {}
        results: list[list[list[np.ndarray]]] = [[[] for _ in range(launch.world)] for _ in operands]

        def begin_call(rank: int, call: int) -> None:
            parts, outs, bound = self._bind(rank, operands[call - first][rank])
            arguments[rank, call], arrays[rank, call] = bound, parts
            results[call - first][rank] = outs

        def end_call(rank: int, call: int) -> None:
            # Nobody may touch an array of a call that has ended.
            for part in arrays.pop((rank, call)):
                self.space.remove(part)
            del arguments[rank, call]
            self.clocks.end_call(rank)
            machine.end_call(rank, call)

        def body(program: Program) -> None:
            machine.begin(program)
            try:
                function(**arguments[program.rank, program.call])
            except SimulationError:
                raise
            except Exception as error:
                of = f"{who(program.rank, program.program, program.call)} of {launch.name}"
                error.add_note(f"in {of}{about_tuples(str(error), kernel_lines(error), launch.layout)}")
                raise
            machine.end(program)

        machine.scheduler = Scheduler(
            world=launch.world,
            programs=programs,
            first_call=first,
            last_call=self.calls + len(operands),
            slots=settings.slots and max(settings.slots, launch.together),
            policy=settings.policy,
            seed=settings.seed,
            index=lambda i: (i % x, i // x % y, i // (x * y)),
            body=body,
            begin_call=begin_call,
            end_call=end_call,
            stuck=machine.stuck,
        )
        Machine.running = machine
        try:
            with interpreter.interpreting(interpreter.Builder(machine)):
                machine.scheduler.run()
            machine.finish()
        except SimulationError as error:
            self.broken = error
            error.trace = trace
            raise
        finally:
            Machine.running = None
            trace.steps = machine.scheduler.step
        self.calls += len(operands)
        self.clocks.forget(self.heap.parts)
        machine.waste.warn(launch.name, self._warned)
        for (rank, _), (_, garbage) in sorted(machine.garbage.items(), key=lambda each: each[0]):
            tell_garbage(garbage.describe(launch.name, f"rank {rank}", launch.layout.parameters))
        return results, trace

    def _bind(self, rank: int, operands: Sequence[np.ndarray]) -> tuple[list[Part], list[np.ndarray], dict[str, Any]]:
        """The arrays of a call of a rank, its results, and the arguments of its programs."""
        launch, layout, heap, kernel = self.launch, self.layout, self.heap, self.launch.kernel
        named = {
            **layout.buffer_lines,
            **layout.signal_index,
            **launch.params,
        }
        constants = interpreter.constants(kernel)
        bound = {
            name: interpreter.convert(value) if name in constants else interpreter.argument(value)
            for name, value in named.items()
        }
        parts, outs = [], []
        if not is_alone(kernel):
            part, _ = self.space.array("team", "operand", rank, np.array([rank], np.int32))
            parts.append(part)
            bound["team"] = (
                interpreter.pointer(part.start, np.dtype(np.int32)),
                *map(interpreter.argument, (heap.origin, heap.stride, launch.world, _MAGIC, layout.signal_line)),
            )
        values: list[tuple[str, Any]] = [
            ("operand", each) for each in bundled(map(np.asarray, operands), launch.bundles)
        ]
        for out in launch.out_types:
            poison = np.full(math.prod(out.shape) * np.dtype(out.dtype).itemsize, POISON, np.uint8)
            values.append(("output", poison.view(out.dtype).reshape(out.shape)))
        changed, updated = dict(launch.aliases), {result: operand for operand, result in launch.aliases}
        made: list[tuple[Part, np.ndarray]] = []  # of operands
        for pointer, (kind, value) in zip(pointers_of(kernel, bound), values):
            arguments = []
            for name, array in members(pointer, value):
                if kind == "output" and len(outs) in updated:
                    part, copy = made[updated[len(outs)]]
                else:
                    is_changed = kind == "operand" and len(made) in changed
                    part, copy = self.space.array(name, "updated" if is_changed else kind, rank, array)
                    parts.append(part)
                if kind == "operand":
                    made.append((part, copy))
                if (described := launch.descriptors.get(name)) is not None:
                    block, shape = block_of(described, array.shape)
                    arguments.append(self._machine.describe(part.start, array.reshape(shape), block))
                else:
                    arguments.append(interpreter.pointer(part.start, array.dtype))
                if kind == "output":
                    outs.append(copy)
            bound[pointer] = tuple(arguments) if isinstance(value, dict) else arguments[0]
        return parts, outs, bound


# An operand of all ranks: an array for each rank; or a bundle of such operands by their names.
Operand = Sequence[np.ndarray] | Mapping[str, Sequence[np.ndarray]]


def run(kernel: JITFunction, *arrays: Operand, calls: int = 3, **keywords: Any) -> tuple[list[Any], Trace]:
    """Runs a Triton or Gluon kernel for all ranks on the CPU, and raises what a GPU would hide.

    Takes what `shmem_call` takes, and NumPy arrays:

        outs, trace = run(kernel, [x_of_rank_0, x_of_rank_1], world=2, grid=4, out_type=..., signals={"arrived": 2})

    Args:
      kernel: a function decorated with `triton.jit` or `gluon.jit`.
      *arrays: the operands, the same in each call. Each one is a sequence with an array for each rank, or, for a
        bundle, a mapping from names to such sequences.
      calls: how many times each rank makes the call, one after the other. Double buffers and counters need three calls
        to show their faults.
      **keywords: as in `run_calls`.

    Returns: (results, trace). `results` has each rank's result in the last call, or its results if `out_type` is a
      sequence.

    Raises:
      SimulationError, TypeError, ValueError: as `run_calls` does.
    """
    if calls < 1:
        raise ValueError(f"simulator.run takes calls of at least 1, not {calls}.")
    results, trace = run_calls(kernel, [arrays] * calls, **keywords)
    return results[-1], trace


def run_calls(
    kernel: JITFunction,
    calls: Sequence[Sequence[Operand]],
    *,
    world: int,
    grid: int | tuple[int, ...],
    out_type: Any,
    scratch: Mapping[str, Any] | None = None,
    signals: Mapping[str, int | tuple[int, ...]] | None = None,
    messages: Mapping[str, Any] | None = None,
    descriptors: Mapping[str, Descriptor] | None = None,
    seed: int = 0,
    policy: str = "random",
    slots: int | None = None,
    patience: int = 1_000_000,
    tickets: bool = False,
    implicit_barriers: bool = False,
    name: str | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    together: int = 1,
    cost_estimate: Mapping[str, int] | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
    **params: Any,
) -> tuple[list[list[Any]], Trace]:
    """Runs several calls, one after the other, each with operands of its own.

    Use it for kernels whose messages depend on data, such as counts. They need calls that differ, for example a tile
    that is empty in one call only.

    Args:
      kernel: a function decorated with `triton.jit` or `gluon.jit`.
      calls: the operands of each call, as in `run`.
      world: number of ranks.
      grid, out_type, scratch, signals, messages, descriptors, name, together, input_output_aliases, **params: as in
        `shmem_call`. `out_type` is one object with `shape` and `dtype`, or a sequence of them.
      seed, policy, slots, patience, tickets, implicit_barriers: as in `Settings`.
      num_warps: what `gl.num_warps` returns outside of partitions.
      num_stages, cost_estimate: accepted and ignored, because they mean nothing here.

    Returns: (results, trace). `results` has a list for each call, with each rank's result, or its results if `out_type`
      is a sequence.

    Raises:
      SimulationError: if the kernel breaks a rule. The error is of one of its kinds, with the source lines of both
        sides.
      TypeError, ValueError: as `shmem_call` does, or if operands differ in shape or dtype between ranks or calls.
    """
    del cost_estimate
    check_kernel(kernel, "simulator.run")
    name = name or kernel.fn.__name__
    single = hasattr(out_type, "shape")
    out_types = (out_type,) if single else tuple(out_type)
    if world < 1:
        raise ValueError(f"simulator.run takes world of at least 1, not {world}.")
    flat = [unbundled(name, arrays) for arrays in calls]
    if len({bundles for _, bundles in flat}) != 1:
        raise ValueError(
            "simulator.run_calls takes one call or more, each with as many operands as the others, and bundles of the "
            "same names."
        )
    arrays_of_calls, bundles = [arrays for arrays, _ in flat], flat[0][1]
    for operand in zip(*arrays_of_calls):
        for array in operand:
            if len(array) != world:
                raise ValueError(f"An operand has {len(array)} arrays for {world} ranks: give one for each rank.")
        each = (np.asarray(of_rank) for array in operand for of_rank in array)
        if len(kinds := {f"{x.dtype}{list(x.shape)}" for x in each}) > 1:
            raise ValueError(f"The ranks have operands of several kinds, {' and '.join(sorted(kinds))}: give one kind.")
    num_warps = num_warps or 4
    buffers = {"scratch": scratch or {}, "signals": signals or {}, "messages": messages or {}}
    params = constants_of(kernel, params, world, bundles, [key for each in buffers.values() for key in each])
    descriptors = descriptors or {}
    check_call(
        kernel,
        name,
        bundled([np.asarray(operand[0]) for operand in arrays_of_calls[0]], bundles),
        out_types,
        grid,
        params,
        num_warps=num_warps,
        num_stages=num_stages or 3,
        together=together,
        input_output_aliases=input_output_aliases,
        descriptors=descriptors,
        **buffers,
    )
    grid = sizes_of(grid)
    launch = Launch(
        kernel=kernel,
        bundles=bundles,
        name=name,
        world=world,
        grid=grid,
        out_types=out_types,
        layout=Layout.of(grid, **buffers, parameters=kernel.arg_names),
        params=params,
        descriptors=dict(descriptors),
        num_warps=num_warps,
        together=together,
        aliases=tuple(sorted((input_output_aliases or {}).items())),
    )
    operands = [[[array[rank] for array in arrays] for rank in range(world)] for arrays in arrays_of_calls]
    how: dict[str, Any] = {"seed": seed, "policy": policy, "slots": slots, "patience": patience, "tickets": tickets}
    results, trace = Session(launch).run(operands, Settings(**how, implicit_barriers=implicit_barriers))
    return [[outs[0] if single else outs for outs in of_call] for of_call in results], trace
