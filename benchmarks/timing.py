"""Clocks, ceilings and the guard against hangs."""

import faulthandler
import random
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.operation import AXIS, Implementation, chain, normal
from benchmarks.sampling import MIN_ROUNDS, Mode


@contextmanager
def guard(step: str, timeout: float) -> Generator[None]:
    """Ends the process when the step takes longer: a kernel that waits for ever cannot be interrupted otherwise."""
    message = f"\n{step}: no end after {timeout:g} s, giving up\n"
    # The message needs the interpreter, which a thread that is stuck in C++ may hold; faulthandler needs nothing.
    timer = threading.Timer(timeout, lambda: (sys.stderr.write(message), sys.stderr.flush()))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(timeout + 1, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


@dataclass(kw_only=True)
class Run:
    """One executable on the devices, and what was measured of it.

    checked_operands: of the runs that `check` makes.
    queue: launches programs before earlier ones have ended. Not for virtual CPU devices, which share a thread pool that
        two collective programs in flight can deadlock.
    """

    label: str
    executable: Callable[..., Any] | jax.stages.Compiled
    operands: tuple[Any, ...]
    calls: int
    queue: bool
    checked_operands: Sequence[tuple[Any, ...]] = ()
    tolerance: float = Implementation.tolerance
    samples: dict[str, list[float]] = field(default_factory=dict)
    program_seconds: float = 0.0
    last_result: Any = None

    def launch(self, count: int = 1, *, operands: tuple[Any, ...] | None = None, waits: bool = False) -> float:
        """Seconds from the first dispatch until the last program has ended, on an idle device."""
        operands = operands or self.operands
        executable = partial(self.executable, waits=True) if waits else self.executable
        result = None
        start = time.perf_counter()
        # Each dispatch but the first hides behind the programs already queued.
        for _ in range(count):
            result = executable(*operands)
            if not self.queue:
                jax.block_until_ready(result)
        jax.block_until_ready(result)
        seconds = time.perf_counter() - start
        self.last_result = result
        return seconds

    def sample(self, mode: Mode) -> None:
        """Appends the microseconds of one call: wall time over calls, nothing subtracted."""
        count = mode.launches(self.program_seconds)
        time.sleep(mode.idle)
        if warm := mode.warm_launches(self.program_seconds):
            self.launch(warm, waits=mode.waits)
        microseconds = self.launch(count, waits=mode.waits) / (count * self.calls) * 1e6
        self.samples.setdefault(mode.name, []).append(microseconds)


def can_queue(mesh: Mesh) -> bool:
    return mesh.devices.flat[0].platform != "cpu"


def sample_rounds(runs: Mapping[str, Run], mode: Mode, seconds: float, timeout: float) -> dict[str, Exception]:
    """Takes turns between the runs, for about so many seconds. Returns what failed, by name.

    Turns, so that throttling meets all of them alike; another order in each round, so that nobody always follows the
    one that leaves the devices coolest.
    """
    shuffle = random.Random(0).shuffle
    failed: dict[str, Exception] = {}
    order = list(runs)
    end = time.perf_counter() + seconds
    rounds = 0
    while order and (rounds < MIN_ROUNDS or time.perf_counter() < end):
        shuffle(order)
        for name in order:
            try:
                with guard(f"{runs[name].label}, {mode.name}", timeout):
                    runs[name].sample(mode)
            except Exception as error:
                failed[name] = error
        order = [name for name in order if name not in failed]
        rounds += 1
    return failed


def queued_us(run: Callable[..., Any], operands: Sequence[Any], seconds: float, calls: int = 20) -> float:
    """Microseconds of a call among others that are queued: the median over rounds of so many, for so many seconds."""
    jax.block_until_ready(run(*operands))
    found, end = [], time.monotonic() + seconds
    while not found or time.monotonic() < end:
        start = time.perf_counter()
        for _ in range(calls - 1):
            run(*operands)
        jax.block_until_ready(run(*operands))
        found.append((time.perf_counter() - start) / calls)
    return 1e6 * float(np.median(found))


def _best_seconds(mesh: Mesh, repetitions: int, function: Callable[..., Any], *args: Any) -> float:
    run = Run(label="bandwidth", executable=function, operands=args, calls=1, queue=can_queue(mesh))
    run.launch(2)
    # Several at once, or the dispatch would count as part of the copy.
    return min(run.launch(4) / 4 for _ in range(repetitions))


def measure_memory_bandwidths(mesh: Mesh, nbytes: int, repetitions: int = 8) -> dict[str, float]:
    """Bytes a second between a device and its own memory, by plain reductions and a copy of `nbytes`.

    All devices do it at the same time. The best of all is the ceiling that floors are computed from.
    """
    columns = 8192
    rows = max(1, nbytes // (2 * columns))
    x = normal((mesh.shape[AXIS] * rows, columns), NamedSharding(mesh, P(AXIS, None)))(jax.random.key(1))

    def on_mesh(function: Callable[[jax.Array], jax.Array], out_spec: P) -> Callable[..., Any]:
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(AXIS, None), out_specs=out_spec))

    best = partial(_best_seconds, mesh, repetitions)
    read = rows * columns * 2
    return {
        "reduction of rows": read / best(on_mesh(lambda x: jnp.max(x, axis=1), P(AXIS)), x),
        "sum of rows": read / best(on_mesh(lambda x: jnp.sum(x, axis=1, dtype=jnp.float32), P(AXIS)), x),
        "copy": 2 * read / best(on_mesh(lambda x: -x, P(AXIS, None)), x),
    }


@cache
def measure_bandwidths(mesh: Mesh, nbytes: int, repetitions: int = 8) -> dict[str, float]:
    """Bytes a second that one rank receives from its peers, by three plain ways to move `nbytes` between devices.

    Once in a run. The best of all is the ceiling that floors are computed from: a low one would flatter the kernels.
    """
    world = mesh.devices.size
    if world == 1:
        return {}
    steps = 8
    make = normal((world, nbytes // 2), NamedSharding(mesh, P(AXIS, None)))
    arrays = [make(key) for key in jax.random.split(jax.random.key(1), steps)]

    best = partial(_best_seconds, mesh, repetitions)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P(AXIS, None), out_specs=P(AXIS, None), check_vma=False)
    def ring(x: jax.Array) -> jax.Array:
        for _ in range(steps):
            x = lax.ppermute(x, AXIS, [(i, (i + 1) % world) for i in range(world)])
        return x

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P(AXIS, None), out_specs=P(AXIS), check_vma=False)
    def gather(xs: list[jax.Array]) -> jax.Array:
        outs = chain(lambda x, _: lax.all_gather(x, AXIS, axis=0, tiled=True), xs, [xs[0]])
        return jnp.stack([out[-1, -1] for out in outs])

    source, target = mesh.devices.flat[0], mesh.devices.flat[1]
    parts = [next(s.data for s in x.addressable_shards if s.device == source) for x in arrays]

    def copy(xs: list[jax.Array]) -> list[jax.Array]:
        return [jax.device_put(x, target) for x in xs]

    return {
        "peer copy": steps * nbytes / best(copy, parts),
        "ppermute ring": steps * nbytes / best(ring, arrays[0]),
        "all_gather": steps * (world - 1) * nbytes / best(gather, arrays),
    }
