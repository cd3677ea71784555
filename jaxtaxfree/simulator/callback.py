"""`implementation="simulate"`: a simulated call inside a JAX program.

Ranks cannot wait for each other in callbacks, because XLA has no thread for each of them. So each rank gathers the
operands of all, and can simulate its whole team: the first that comes does, and leaves the others their results.
"""

import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from jaxtaxfree.call import Bundles
from jaxtaxfree.heap.layout import Layout
from jaxtaxfree.simulator.errors import SimulationError
from jaxtaxfree.simulator.scheduler import Settings
from jaxtaxfree.simulator.session import Launch, Session
from jaxtaxfree.simulator.trace import Trace
from jaxtaxfree.teams import Team


@dataclasses.dataclass(eq=False)
class Recording:
    """What was simulated within `simulating`.

    Attributes:
      traces: of the calls, in the order in which they ended.
    """

    settings: Settings
    traces: list[Trace] = dataclasses.field(default_factory=list)


_current = Recording(Settings())
_lock = threading.RLock()


@contextlib.contextmanager
def simulating(
    *,
    seed: int = 0,
    policy: str = "random",
    slots: int | None = None,
    patience: int = 1_000_000,
    tickets: bool = False,
    implicit_barriers: bool = False,
) -> Generator[Recording]:
    """Sets how calls with implementation="simulate" run that are executed inside of the `with` block.

    The settings are no part of the program, so another seed compiles nothing anew. JAX runs programs in the background:
    call `jax.block_until_ready` on the results before the block ends.

    Args:
      seed, policy, slots, patience, tickets, implicit_barriers: as in `Settings`.

    Yields: a `Recording`, with the traces of the calls.
    """
    global _current
    settings = Settings(
        seed=seed,
        policy=policy,
        slots=slots,
        patience=patience,
        tickets=tickets,
        implicit_barriers=implicit_barriers,
    )
    before, _current = _current, (recording := Recording(settings))
    try:
        yield recording
    finally:
        _current = before


def simulate(
    *operands: jax.Array,
    kernel: Any,
    bundles: Bundles,
    axes: tuple[str, ...],
    out_types: tuple,
    grid: tuple[int, ...],
    layout: Layout,
    name: str,
    params: tuple,
    identity: str,
    team: Team,
    descriptors: tuple,
    num_warps: int,
    together: int,
    aliases: tuple[tuple[int, int], ...] = (),
) -> Sequence[jax.Array]:
    """A call of `shmem_call`, to be traced inside `jax.shard_map`, or anywhere if it has no axes.

    Args:
      *operands: of this rank.
      identity: tells calls apart that may not share a region.
      team: the ranks.
      kernel, bundles, axes, out_types, grid, layout, name, params, descriptors, num_warps, together, aliases: of
        the primitive.
    """
    launch = Launch(
        kernel=kernel,
        bundles=bundles,
        name=name,
        world=team.world,
        grid=grid,
        out_types=out_types,
        layout=layout,
        params=dict(params),
        descriptors=dict(descriptors),
        num_warps=num_warps,
        together=together,
        aliases=aliases,
    )
    shapes = tuple((operand.shape, operand.dtype.name) for operand in operands)
    devices = tuple((device.process_index, device.id) for device in team.devices)

    def call(position: Any, *gathered: Any) -> tuple[np.ndarray, ...]:
        index, rank = divmod(int(position), team.world)
        members = devices[index * team.world : (index + 1) * team.world]
        here = sum(process == jax.process_index() for process, _ in members)
        meeting = _meeting((identity, shapes, members), launch, here)
        return tuple(meeting.results(rank, [np.asarray(operand) for operand in gathered]))

    everybodys = [lax.all_gather(operand, axes) if axes else operand[None] for operand in operands]
    position = jnp.asarray(team.position(), jnp.int32)
    return io_callback(call, out_types, position, *everybodys)


class _Meeting:
    """A team's calls of one kind, which share a session as they share a region on GPUs."""

    def __init__(self, launch: Launch, ranks_here: int):
        self._launch, self._ranks_here = launch, ranks_here
        self._session = Session(launch)
        self._calls: list[_Call] = []  # of which some rank has not had its results

    def results(self, rank: int, gathered: list[np.ndarray]) -> list[np.ndarray]:
        """The results of a rank, from the operands of all ranks, [world, ...] each."""
        digest = hashlib.blake2b(digest_size=16)
        for operand in gathered:
            digest.update(np.ascontiguousarray(operand).view(np.uint8).data)
        with _lock:
            # Told apart by what they compute, because XLA may order independent calls differently on every device.
            key = digest.digest()
            call = next((call for call in self._calls if call.key == key and rank not in call.had), None)
            if call is None:
                call = _Call(key)
                self._calls.append(call)
                self._run(call, gathered)
            call.had.add(rank)
            if len(call.had) == self._ranks_here:
                self._calls.remove(call)
            if call.error is not None:
                raise call.error
            return call.results[rank]

    def _run(self, call: "_Call", gathered: list[np.ndarray]) -> None:
        recording = _current
        operands = [[operand[rank] for operand in gathered] for rank in range(self._launch.world)]
        try:
            (call.results,), trace = self._session.run([operands], recording.settings)
        except Exception as error:
            call.error = error
            if isinstance(error, SimulationError) and error.trace is not None:
                recording.traces.append(error.trace)
            self._session = Session(self._launch)  # as after `jaxtaxfree.heap.reset`
        else:
            recording.traces.append(trace)


@dataclasses.dataclass(eq=False)
class _Call:
    key: bytes
    results: list[list[np.ndarray]] = dataclasses.field(default_factory=list)
    error: Exception | None = None
    had: set[int] = dataclasses.field(default_factory=set)


_meetings: dict[Any, _Meeting] = {}


def _meeting(key: Any, launch: Launch, ranks_here: int) -> _Meeting:
    with _lock:
        if key not in _meetings:
            _meetings[key] = _Meeting(launch, ranks_here)
        return _meetings[key]


def reset() -> None:
    """Forgets the regions of all simulated calls, so that the next ones begin with epoch 1."""
    with _lock:
        _meetings.clear()
