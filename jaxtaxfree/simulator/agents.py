"""What happens within the programs of a Gluon kernel: partitions, mbarriers, and operations that run on their own.

Each partition and each operation of TMA is a greenlet of its own beside its program, so that a seed decides when the
data of a load arrive and when a store reads its buffer.
"""

import dataclasses
import linecache
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as memory
from triton.experimental.gluon import language as gl

from jaxtaxfree.simulator.clocks import ORDERED, PROXIED, SHARED, SHARED_PROXIED, AgentClocks
from jaxtaxfree.simulator.errors import (
    DataRaceError,
    MbarrierError,
    OutOfBoundsError,
    SimulationError,
    UnfinishedOperationError,
)
from jaxtaxfree.simulator.events import Event, stack, where
from jaxtaxfree.simulator.machine import Machine
from jaxtaxfree.simulator.memory import Heap, Space
from jaxtaxfree.simulator.scheduler import Program
from jaxtaxfree.simulator.shared import Buffer, Mbarrier, Memory, TensorDescriptor, numpy_type, tensor, whole
from jaxtaxfree.simulator.waits import Sleep, Work

_EVERYTHING = slice(None)
_LAG = 8  # steps of its own by which an operation may be late at most
_ASSIGNMENT = re.compile(r"\s*(\w+)\s*(?::[^=]*)?=[^=]")


@dataclasses.dataclass(slots=True, eq=False)
class _Store:
    """A store by TMA: where it was begun, when its lane did so, and how far it is."""

    event: Event
    read: bool = False
    written: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class _Agent:
    """What the program itself or a partition has begun.

    Attributes:
      stores, products: the lanes of its stores by TMA and of its asynchronous products.
      begun_stores: all of them.
      read_stores: so many of them have been waited for, at least until they had read their buffers.
      begun, retired: the last product that was begun, and the last one that has been waited for.
      product: where the last one was begun.
      num_warps: warps that run it.
    """

    stores: int
    products: int
    num_warps: int
    begun_stores: list[_Store] = dataclasses.field(default_factory=list)
    read_stores: int = 0
    begun: int = 0
    retired: int = 0
    product: Event | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Block:
    """What a program has besides its registers.

    Attributes:
      program: which one.
      lanes: threads that it has among the clocks, its own included.
      going: its parts that have not ended.
      agents: by their threads.
      barriers: that were initialised.
    """

    program: Program
    lanes: int = 1
    going: set[Program] = dataclasses.field(default_factory=set)
    agents: dict[int, _Agent] = dataclasses.field(default_factory=dict)
    barriers: list[Mbarrier] = dataclasses.field(default_factory=list)


class Accumulator:
    """The result of a product that may not have ended. `warpgroup_mma_wait` makes a tensor of it."""

    def __init__(self, machine: "GluonMachine", value: Any, time: int, event: Event):
        self._machine, self._event = machine, event
        self.value, self.time = value, time
        self.dtype, self.shape, self.type = value.dtype, value.shape, value.type

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._machine.unretired(self._event)

    def _use(self, _: Any) -> Any:
        raise self._machine.unretired(self._event)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _use


class GluonMachine(Machine):
    """The machine of kernels whose programs consist of several agents."""

    def __init__(self, name: str, space: Space, heap: Heap, clocks: AgentClocks, *others: Any):
        super().__init__(name, space, heap, clocks, *others)
        self._lanes = clocks
        self._blocks: dict[int, _Block] = {}  # by the program's thread

    @staticmethod
    def describe(address: int, array: np.ndarray, block: tuple[int, ...]) -> TensorDescriptor:
        return TensorDescriptor.of(address, array, block, gl.NVMMASharedLayout.get_default_for)

    # Programs and their partitions.

    def begin(self, program: Program) -> None:
        super().begin(program)
        block = self._blocks[program.thread] = _Block(program)
        self._begin_agent(block, program.thread, self.num_warps)

    def end(self, program: Program) -> None:
        block = self._block
        self._check_finished(block)
        while block.going:
            self._sleep(-1 - program.thread, lambda: "its last operations")
        del self._blocks[program.thread]
        super().end(program)

    def _check_finished(self, block: _Block) -> None:
        """Checks that all that was begun has been waited for: what is in flight may touch memory that is another's."""
        begun = []
        for agent in block.agents.values():
            begun += [store.event for store in agent.begun_stores[agent.read_stores :]]
            if agent.retired < agent.begun:
                begun.append(agent.product)
        for barrier in block.barriers:
            begun += [event for phase, event in barrier.loads.items() if phase >= barrier.waited]
        if begun:
            raise self._error(
                UnfinishedOperationError, f"the program ended, and nobody has waited for {begun[0]} to end."
            )

    @property
    def _block(self) -> _Block:
        return self._blocks[self._program.thread % (len(self.scheduler.ranks) * self._programs)]

    @property
    def _agent(self) -> _Agent:
        return self._block.agents[self._program.thread]

    def _lane(self, block: _Block) -> int:
        lane = self._lanes.lane(block.program.thread, block.lanes)
        block.lanes += 1
        return lane

    def _begin_agent(self, block: _Block, thread: int, num_warps: int) -> None:
        block.agents[thread] = _Agent(self._lane(block), self._lane(block), num_warps)

    @property
    def warps(self) -> int:
        """Of the agent that runs."""
        return self._agent.num_warps

    def warp_specialize(self, partitions: Sequence[tuple[Callable, Sequence[Any]]], num_warps: Sequence[int]) -> Any:
        """Runs the first partition here and the others beside it, until all have ended."""
        program, block = self._program, self._block
        if program.part:
            raise TypeError("gl.warp_specialize does not stand within a partition.")
        (default, arguments), *others = partitions
        if len(others) != len(num_warps):
            raise TypeError(f"gl.warp_specialize got {len(others)} partitions and {len(num_warps)} counts of warps.")
        self._clocks.barrier(program.thread)
        parts = [self._start(block, i + 1, *other, num_warps[i]) for i, other in enumerate(others)]
        result = default(*arguments)
        while running := block.going.intersection(parts):
            self._sleep(-1 - program.thread, lambda running=running: f"{len(running)} of its partitions to end")
        for part in parts:
            self._lanes.join(program.thread, part.thread)
        self._clocks.barrier(program.thread)
        return result

    def _start(self, block: _Block, index: int, function: Callable, arguments: Sequence[Any], warps: int) -> Program:
        part = self._part(block, self._lane(block), index)
        self._begin_agent(block, part.thread, warps)
        self._lanes.fork(block.program.thread, part.thread)
        self._work[part] = Work(self.scheduler.step)

        def live() -> None:
            try:
                function(*arguments)
            except SimulationError:
                raise
            except Exception as error:
                error.add_note(f"in partition {index} of program {part.program} of rank {part.rank} of {self._name}")
                raise
            self._end_work(part)
            del self._work[part]

        self._spawn(block, part, live)
        return part

    def _part(self, block: _Block, thread: int, index: int) -> Program:
        program = block.program
        return Program(program.rank, program.program, program.call, thread, program.index, part=index)

    def _spawn(self, block: _Block, part: Program, body: Callable[[], None]) -> None:
        def live() -> None:
            body()
            block.going.remove(part)
            self.scheduler.changed(-1 - block.program.thread)

        block.going.add(part)
        self.scheduler.spawn(part, live)

    def _beside(self, course: Iterator[None]) -> None:
        """Lets an operation take its course, which yields between its steps."""
        block = self._block
        part = self._part(block, self._program.thread, self._program.part)

        def operation() -> Iterator[None]:
            yield from course
            block.going.remove(part)
            self.scheduler.changed(-1 - block.program.thread)

        block.going.add(part)
        self.scheduler.operate(part, operation())

    def _lag(self) -> range:
        """The steps for which an operation is on its way: few or many."""
        return range(1 + int(self.scheduler.draw() ** 2 * _LAG))

    def _sleep(self, key: int, what: Callable[[], str]) -> None:
        program = self._program
        self._waits[program] = Sleep(self.scheduler.step, stack(), what)
        self.scheduler.park((key,))
        del self._waits[program]

    def _sleep_while(self, lacks: Callable[[], Any], key: int, what: Callable[[], str], label: str) -> None:
        """Sleeps as long as the current program lacks something, which may come when `key` changes."""
        program, begin = self._program, self.scheduler.step
        program.seen.clear()
        self._end_work(program)
        while lacks():
            self._sleep(key, what)
        if self.scheduler.step > begin:
            self._span("wait", begin, label)
            self._work[program] = Work(self.scheduler.step)

    def _act(self) -> None:
        """Before an access that others could tell from a later one."""
        self._pause()
        self._program.seen.clear()
        self._pokes = 0

    # Shared memory.

    def allocate(self, dtype: Any, shape: Sequence[int], layout: Any, value: Any = None) -> Memory:
        program, size = self._program, numpy_type(dtype).itemsize
        buffer = Buffer.allocate(_assigned(), program.program, program.rank, shape, size)
        view = Memory(self, buffer, whole(tuple(shape), size), dtype, layout)
        if value is not None:
            view.store(value)
        return view

    def load_shared(self, view: Memory) -> np.ndarray:
        self._act()
        self._check(self._clocks.read, view.buffer, *view.accesses, self._event("load"))
        return view.elements

    def store_shared(self, view: Memory, values: np.ndarray) -> None:
        self._act()
        self._check(self._clocks.write, view.buffer, *view.accesses, self._event("store"))
        view.elements = values

    def outside(self, view: Memory, what: str) -> SimulationError:
        title = f"{view.buffer.name}{view.buffer.note} of rank {view.buffer.rank}"
        return self._error(
            OutOfBoundsError, f"{where(stack())} takes {what} of {title}, and the view is {view.dtype}{view.shape}."
        )

    def fence_shared(self) -> None:
        self._lanes.fence(self._program.thread, SHARED, SHARED_PROXIED)

    def fence_proxy(self) -> None:
        self._lanes.fence(self._program.thread, ORDERED, PROXIED)

    # Mbarriers.

    def init_barrier(self, view: Memory, count: int) -> None:
        self._act()
        block, offset = self._block, int(view.offsets.flat[0])
        if offset in view.buffer.barriers:
            raise self._error(MbarrierError, f"mbarrier {self._title(view)} is initialised again at {where(stack())}.")
        address, made = view.buffer.start + offset, self._event("mbarrier.init")
        barrier = Mbarrier(self._title(view), address, self._lane(block), count, made, pending=count)
        self._lanes.begin(barrier.lane)
        view.buffer.barriers[offset] = barrier
        block.barriers.append(barrier)

    def invalidate_barrier(self, view: Memory) -> None:
        self._act()
        barrier = self._barrier_at(view)
        del view.buffer.barriers[barrier.address - view.buffer.start]

    @staticmethod
    def _title(view: Memory) -> str:
        offset = int(view.offsets.flat[0])
        return f"{view.buffer.name}[{offset // 8}]" if view.buffer.data.size > 8 else view.buffer.name

    def _barrier_at(self, view: Memory) -> Mbarrier:
        barrier = view.buffer.barriers.get(int(view.offsets.flat[0]))
        if barrier is None:
            raise self._error(
                MbarrierError, f"mbarrier {self._title(view)} is used at {where(stack())}, and nobody initialised it."
            )
        if not self._lanes.sees(self._program.thread, barrier.made):
            raise self._error(
                DataRaceError,
                f"mbarrier {barrier.name} is used at {where(stack())}, and nothing orders that after {barrier.made}.",
            )
        return barrier

    def arrive(self, view: Memory, count: int, size: int = 0) -> None:
        """Arrives at an mbarrier, and announces bytes to it."""
        self._act()
        program, barrier = self._program, self._barrier_at(view)
        if count > barrier.pending:
            raise self._error(
                MbarrierError, f"{self._event('arrival')} counts {count} times at {barrier.name}, but {barrier}."
            )
        self._lanes.arrive(program.thread, barrier.lane)
        barrier.pending -= count
        barrier.bytes += size
        self._settle(barrier)

    def _settle(self, barrier: Mbarrier) -> None:
        if barrier.pending == 0 and barrier.bytes == 0:
            self._lanes.complete(barrier.lane)
            barrier.phase += 1
            barrier.pending = barrier.count
            self.scheduler.changed(barrier.address)

    def wait_barrier(self, view: Memory, phase: int) -> None:
        self._act()
        program, barrier = self._program, self._barrier_at(view)
        self._sleep_while(lambda: barrier.phase % 2 == phase % 2, barrier.address, lambda: str(barrier), barrier.name)
        self._lanes.learn(program.thread, barrier.lane)
        barrier.waited = barrier.phase
        barrier.loads = {going: event for going, event in barrier.loads.items() if going >= barrier.phase}

    # TMA.

    def load_block(self, descriptor: TensorDescriptor, coordinates: Sequence[int], view: Memory, into: Memory) -> None:
        """Begins a load; the bytes count for the mbarrier at `view` when they have come."""
        self._act()
        barrier = self._barrier_at(view)
        addresses, inside = self._block_of(descriptor, coordinates, into)
        event = self._operation("TMA load", barrier.lane, self._lanes.now(barrier.lane))
        size, phase = numpy_type(descriptor.dtype).itemsize, barrier.phase
        if inside.any():
            parts = self._parts("TMA load", addresses[inside], size)
            self._refuse_messages("TMA load", parts)
            for part, of in parts:
                if part.kind != "operand":
                    self._check(self._clocks.read, part, of, size, event)
        self._check(self._clocks.write, into.buffer, *into.accesses, event)
        barrier.loads.setdefault(phase, event)

        def arrive() -> Iterator[None]:
            for _ in self._lag():
                yield
            zeros = np.zeros(addresses.shape, numpy_type(descriptor.dtype))
            into.elements = memory.load(addresses, inside, zeros, zeros.dtype)
            if barrier.phase != phase:
                raise self._error(
                    MbarrierError,
                    f"{event} arrives at {barrier.name} in phase {barrier.phase} and was begun in phase {phase}: "
                    "mbarrier.expect has to announce its bytes before.",
                )
            barrier.bytes -= descriptor.nbytes_per_cta
            self._settle(barrier)

        self._beside(arrive())

    def store_block(self, descriptor: TensorDescriptor, coordinates: Sequence[int], source: Memory) -> None:
        """Begins a store of a block."""
        self._act()
        agent, program = self._agent, self._program
        addresses, inside = self._block_of(descriptor, coordinates, source)
        event = self._operation("TMA store", agent.stores, self._lanes.begin(agent.stores))
        size = numpy_type(descriptor.dtype).itemsize
        self._check(self._clocks.read, source.buffer, *source.accesses, event)
        if inside.any():
            parts = self._parts("TMA store", addresses[inside], size)
            self._refuse_messages("TMA store", parts)
            for part, of in parts:
                self._check_store(part, of, size, event)
                self._label_push(program, part)
        store = _Store(event)
        agent.begun_stores.append(store)

        def take() -> Iterator[None]:
            for _ in self._lag():
                yield
            values = source.elements
            store.read = True
            self.scheduler.changed(-1 - agent.stores)
            for _ in self._lag():
                yield
            memory.store(addresses, values, inside)
            self._written(addresses[inside])
            store.written = True
            self.scheduler.changed(-1 - agent.stores)

        self._beside(take())

    def wait_stores(self, pending: int, read_only: bool) -> None:
        """Waits until no more than some of the current agent's stores read their buffers, or have not ended."""
        self._act()
        agent, program = self._agent, self._program
        stores = agent.begun_stores[: max(0, len(agent.begun_stores) - pending)]

        def going() -> list[_Store]:
            return [store for store in stores if not (store.read if read_only else store.written)]

        self._sleep_while(going, -1 - agent.stores, lambda: f"{going()[0].event} to end", "stores")
        if stores:
            rows = [SHARED, SHARED_PROXIED] if read_only else _EVERYTHING
            self._lanes.know(program.thread, agent.stores, stores[-1].event.clock, rows)
            agent.read_stores = max(agent.read_stores, len(stores))

    def _operation(self, verb: str, lane: int, time: int) -> Event:
        event = self._event(verb)
        event.issuer, event.thread, event.clock = event.thread, lane, time
        return event

    def _block_of(
        self, descriptor: TensorDescriptor, coordinates: Sequence[int], view: Memory
    ) -> tuple[np.ndarray, np.ndarray]:
        if view.shape != list(descriptor.block_shape) or view.dtype != descriptor.dtype:
            raise TypeError(
                f"TMA moves blocks of {descriptor.dtype}{list(descriptor.block_shape)} by this descriptor, which are "
                f"no shared {view.dtype}{view.shape}."
            )
        return descriptor.block(coordinates)

    # Products.

    def product_of(self, a: Any, b: Memory, acc: Any, use_acc: bool, is_async: bool) -> Any:
        """Begins a product of operands in shared memory; the first may be a tensor."""
        self._act()
        agent, program = self._agent, self._program
        self.product()
        agent.begun = self._lanes.begin(agent.products)
        event = agent.product = self._operation("warpgroup MMA", agent.products, agent.begun)
        operands = []
        for operand in (a, b):
            if isinstance(operand, Memory):
                self._check(self._clocks.read, operand.buffer, *operand.accesses, event)
                operand = tensor(operand.elements, operand.dtype)
            operands.append(operand.to(tl.float32).handle.data)
        value = acc.value if isinstance(acc, Accumulator) else acc
        total = np.matmul(*operands)
        if use_acc:
            total = total + value.handle.data
        result = tensor(total.astype(value.handle.data.dtype), value.dtype)
        if is_async:
            return Accumulator(self, result, agent.begun, event)
        self._retire(agent, program, 0)
        return result

    def wait_products(self, pending: int, values: Sequence[Any]) -> list[Any]:
        """Waits until no more than some products of the current agent go on. Returns tensors of those that do not."""
        agent = self._agent
        self._retire(agent, self._program, pending)
        return [
            value.value if isinstance(value, Accumulator) and value.time <= agent.retired else value for value in values
        ]

    def _retire(self, agent: _Agent, program: Program, pending: int) -> None:
        agent.retired = max(agent.retired, agent.begun - pending)
        self._lanes.know(program.thread, agent.products, agent.retired, [SHARED, SHARED_PROXIED])

    def unretired(self, event: Event) -> SimulationError:
        return self._error(
            DataRaceError,
            f"the result of {event} is used at {where(stack())}, before a warpgroup_mma_wait has seen it complete.",
        )


def _assigned() -> str:
    """The name to which the kernel's current line assigns."""
    for code, line, module in stack():
        if not module.startswith("triton."):
            found = _ASSIGNMENT.match(linecache.getline(code.co_filename, line))
            return found[1] if found else "a buffer"
    return "a buffer"
