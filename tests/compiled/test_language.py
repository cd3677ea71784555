"""Threads that lower kernels do so side by side, and a simulation, which rebinds Triton's language, does it alone."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from jaxtaxfree import language

SOON, LATE = 10.0, 0.2  # seconds: what happens has happened by then, and what does not happen has not


class Holder:
    """A thread that holds the language until it is told to let go."""

    def __init__(self, how: str) -> None:
        self.has_it, self.let_go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(getattr(language, how)(),), daemon=True)
        self._thread.start()

    def _run(self, context: contextlib.AbstractContextManager) -> None:
        with context:
            self.has_it.set()
            self.let_go.wait(SOON)

    def end(self) -> None:
        self.let_go.set()
        self._thread.join(SOON)
        assert not self._thread.is_alive()


@pytest.fixture
def others() -> Iterator[list[Holder]]:
    holders: list[Holder] = []
    yield holders
    for holder in holders:
        holder.end()


def test_lowerings_do_not_wait_for_each_other(others: list[Holder]) -> None:
    for _ in range(3):
        others.append(Holder("as_triton_has_it"))
    assert all(other.has_it.wait(SOON) for other in others)


@pytest.mark.parametrize(
    "first, second", [("as_triton_has_it", "rebound"), ("rebound", "as_triton_has_it"), ("rebound", "rebound")]
)
def test_a_simulation_is_alone(others: list[Holder], first: str, second: str) -> None:
    others.append(Holder(first))
    assert others[0].has_it.wait(SOON)
    others.append(Holder(second))
    assert not others[1].has_it.wait(LATE)
    others[0].let_go.set()
    assert others[1].has_it.wait(SOON)


def test_lowerings_that_come_later_do_not_keep_a_simulation_waiting(others: list[Holder]) -> None:
    for how in ("as_triton_has_it", "rebound", "as_triton_has_it"):
        others.append(Holder(how))
        others[0].has_it.wait(SOON)
        threading.Event().wait(LATE)  # until it waits
    first, simulation, second = others
    assert first.has_it.is_set() and not simulation.has_it.is_set() and not second.has_it.is_set()
    first.let_go.set()
    assert simulation.has_it.wait(SOON) and not second.has_it.wait(LATE)
    simulation.let_go.set()
    assert second.has_it.wait(SOON)


def test_a_simulation_may_lower_and_simulate(others: list[Holder]) -> None:
    """While others wait, too."""
    with language.rebound():
        others.append(Holder("rebound"))
        assert not others[0].has_it.wait(LATE)
        with language.rebound(), language.as_triton_has_it(), language.rebound():
            assert not others[0].has_it.is_set()
        assert not others[0].has_it.wait(LATE)
    assert others[0].has_it.wait(SOON)


def test_a_lowering_may_simulate_when_those_who_wait_have_done_so(others: list[Holder]) -> None:
    with language.as_triton_has_it():
        others.append(Holder("rebound"))
        assert not others[0].has_it.wait(LATE)
        with language.as_triton_has_it():
            assert not others[0].has_it.wait(LATE)
        threading.Timer(LATE, others[0].let_go.set).start()
        with language.rebound(), language.as_triton_has_it():
            assert others[0].has_it.is_set()
            others.append(Holder("rebound"))
            assert not others[1].has_it.wait(LATE)
        assert not others[1].has_it.wait(LATE)
    assert others[1].has_it.wait(SOON)


def test_lowerings_that_simulate_do_not_wait_for_each_other() -> None:
    both = threading.Barrier(2)

    def run() -> None:
        with language.as_triton_has_it():
            both.wait(SOON)
            with language.rebound():
                pass

    threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert not any(thread.is_alive() for thread in threads)


def test_a_lowering_whose_simulation_is_interrupted_goes_on(
    others: list[Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Callable[[], bool]) -> None:
        raise KeyboardInterrupt

    with language.as_triton_has_it():
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(language._changed, "wait_for", interrupt)
            with language.rebound():
                pass
        others.append(Holder("rebound"))
        assert not others[0].has_it.wait(LATE)
    assert others[0].has_it.wait(SOON)


def test_a_failed_lowering_keeps_nobody_waiting(others: list[Holder]) -> None:
    for context in (language.as_triton_has_it, language.rebound):
        with contextlib.suppress(RuntimeError), context():
            raise RuntimeError
    others.append(Holder("rebound"))
    assert others[0].has_it.wait(SOON)


THREADS = """
import threading
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
import jaxtaxfree as jtf
mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))

def traced(implementation, size):
    local = lambda x: jtf.psum(x, "tp", implementation=implementation)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P())).trace(jnp.arange(2.0 * size))

def simulate(size):
    x = jnp.arange(2.0 * size)
    assert jnp.array_equal(traced("simulate", size).lower().compile()(x), x[:size] + x[size:])

def lower(size):
    traced("fused", size).lower(lowering_platforms=("cuda",))

done = []
def run(function, size):
    function(size)
    done.append(size)

threads = [threading.Thread(target=run, args=(f, size), daemon=True) for size in (5, 6, 7) for f in (simulate, lower)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(done) == [5, 5, 6, 6, 7, 7], done
"""


def test_programs_are_lowered_while_others_are_simulated() -> None:
    """From the first one on, whose thread imports the simulator while others lower."""
    run = [sys.executable, "-c", THREADS]
    done = subprocess.run(run, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
