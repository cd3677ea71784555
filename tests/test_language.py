"""Threads that lower kernels do so side by side, and a simulation, which rebinds Triton's language, does it alone."""

import contextlib
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import language
from tests.conftest import MeshFactory

SOON, LATE = 10.0, 0.2  # seconds: what happens has happened by then, and what does not happen has not


class Holder:
    """A thread that holds something until it is told to let go."""

    def __init__(self, context: contextlib.AbstractContextManager) -> None:
        self.has_it, self.let_go = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(context,), daemon=True)
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
    others.append(Holder(language.as_triton_has_it()))
    assert others[0].has_it.wait(SOON)
    with language.as_triton_has_it():
        pass


@pytest.mark.parametrize(
    "first, second", [("as_triton_has_it", "rebound"), ("rebound", "as_triton_has_it"), ("rebound",) * 2]
)
def test_a_simulation_is_alone(others: list[Holder], first: str, second: str) -> None:
    others.append(Holder(getattr(language, first)()))
    assert others[0].has_it.wait(SOON)
    others.append(Holder(getattr(language, second)()))
    assert not others[1].has_it.wait(LATE)
    others[0].let_go.set()
    assert others[1].has_it.wait(SOON)


def test_a_simulation_may_trace_and_simulate(others: list[Holder]) -> None:
    with language.rebound():
        with language.rebound(), language.as_triton_has_it():
            pass
        others.append(Holder(language.rebound()))
        assert not others[0].has_it.wait(LATE)
    assert others[0].has_it.wait(SOON)


def test_a_failed_lowering_keeps_nobody_waiting(others: list[Holder]) -> None:
    for context in (language.as_triton_has_it, language.rebound):
        with contextlib.suppress(RuntimeError), context():
            raise RuntimeError
    others.append(Holder(language.rebound()))
    assert others[0].has_it.wait(SOON)


def test_programs_are_lowered_while_others_are_simulated(cpu_mesh: MeshFactory) -> None:
    mesh, failures = cpu_mesh(2, "tp"), []

    def call(implementation: str, size: int) -> jax.stages.Traced:
        local = lambda x: jtf.psum(x, "tp", implementation=implementation)  # noqa: E731
        program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P()))
        return program.trace(jnp.arange(2.0 * size))

    def simulate(size: int) -> None:
        try:
            x = jnp.arange(2.0 * size)
            found = call("simulate", size).lower().compile()(x)
            assert jnp.array_equal(found, x[:size] + x[size:])
        except BaseException as error:
            failures.append(error)

    def lower(size: int) -> None:
        try:
            call("fused", size).lower(lowering_platforms=("cuda",))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(size,)) for size in (5, 6, 7) for run in (simulate, lower)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures
