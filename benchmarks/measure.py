"""Checks and times the implementations of an operation at one shape."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.layout import Row
from benchmarks.operation import (
    AXIS,
    CHECKED_RUNS,
    Implementation,
    Operands,
    Operation,
    family,
    is_written_by_hand,
    make_program,
)
from benchmarks.rows import judge, make_row, reason
from benchmarks.sampling import MODES, STEPWISE, Mode, quantiles
from benchmarks.timing import Run, can_queue, guard, sample_rounds

# Calls of a chain that is checked and not timed.
CHECK_CALLS = 4


@cache
def _error_of_rank(sharding: NamedSharding) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def error(out: jax.Array, want: jax.Array) -> jax.Array:
        out, want = out.astype(jnp.float32), want.astype(jnp.float32)
        apart = jnp.sum((out - want) ** 2, axis=-1)
        # A row of zeros that has to be zeros is right.
        return jnp.max(jnp.where(apart == 0, 0, jnp.sqrt(apart / jnp.sum(want**2, axis=-1)))).reshape(1)

    mesh, spec = sharding.mesh, sharding.spec
    return jax.jit(
        jax.shard_map(error, mesh=mesh, in_specs=(spec, spec), out_specs=P(mesh.axis_names), check_vma=False)
    )


def relative_error(result: Any, expected: Any) -> float:
    """The largest relative Frobenius error of any row of the arrays on any device; NaN if there is one.

    Of rows, because in the error of a whole array a tile that was lost or came late drowns. Of every device, because
    each of them may be wrong about a result that all of them have.
    """

    def error(out: jax.Array, want: jax.Array) -> jax.Array:
        assert isinstance(out.sharding, NamedSharding)
        return _error_of_rank(out.sharding)(out, jax.device_put(want, out.sharding))

    return float(np.max(jax.tree.leaves(jax.tree.map(error, result, expected))))


def verdict(run: Run, expected: Any) -> str:
    """What is to be said of the last result of a run."""
    return judge(relative_error(run.last_result[1], expected), run.tolerance)


def _compile(implementation: Implementation, mesh: Mesh, xs: Any, ys: Any, rounds: int) -> jax.stages.Compiled:
    program = jax.jit(make_program(implementation, mesh, rounds)).lower(xs, ys)
    return program.compile(compiler_options=implementation.options or None)


def prepare(label: str, implementation: Implementation, mesh: Mesh, operands: Operands, rounds: int = 1) -> Run:
    xs, ys = operands.of(implementation)
    executable = (implementation.compile or _compile)(implementation, mesh, xs, ys, rounds)
    return Run(
        label=f"{label}, {implementation.name}",
        executable=executable,
        operands=(xs, ys),
        checked_operands=[operands.of(implementation, rotation) for rotation in range(CHECKED_RUNS)],
        calls=len(xs) * rounds * implementation.steps,
        tolerance=implementation.tolerance,
        queue=can_queue(mesh),
    )


def expected_results(reference: Implementation, mesh: Mesh, operands: Operands) -> list[Any]:
    """What the last call of a chain has to give, in each of the runs that `check` makes."""
    program = jax.jit(make_program(reference, mesh))
    last = []
    for rotation in range(CHECKED_RUNS):
        xs, ys = operands.of(reference, rotation)
        last.append(jax.block_until_ready(program([xs[-1]], [ys[(len(xs) - 1) % len(ys)]]))[1])
    return last


def check(run: Run, expected: Sequence[Any]) -> str:
    """Runs the very executable that is timed, several times, and compares every result.

    Each time another x comes first. A tile that was not written would otherwise pass, since the memory of a result
    often still holds the same result of an earlier run.
    """
    for operands, want in zip(run.checked_operands, expected, strict=True):
        run.program_seconds = run.launch(operands=operands)
        found = verdict(run, want)
        if found != "ok":
            return found
    return "ok"


def prepare_all(
    label: str,
    implementations: Sequence[Implementation],
    mesh: Mesh,
    operands: Operands,
    rounds: int,
    timeout: float,
    show: Callable[[str], None],
    chosen: bool = False,
) -> dict[str, list[tuple[Implementation, Future[Run]]]]:
    """Compiles everything: of each implementation, by name, the runs of its alternatives, or its own run.

    Hand-written kernels side by side. XLA times products to choose between them, so of each peer one program at a time;
    what it chose it keeps, so those of other flags go side by side then.

    Args:
      chosen: XLA has compiled these products before, in other programs.
    """
    prepared: dict[str, list[tuple[Implementation, Future[Run]]]] = {each.name: [] for each in implementations}
    written = [each for each in implementations if is_written_by_hand(each)]
    others = [each for each in implementations if each not in written]
    first = [] if chosen else list({family(each.name): each for each in reversed(others)}.values())[::-1]

    def submit(pool: ThreadPoolExecutor, each: Implementation) -> None:
        for variant in variants(each) if each in written else [each]:
            future = pool.submit(prepare, label, variant, mesh, operands, rounds)
            prepared[each.name].append((variant, future))

    def side_by_side(some: Sequence[Implementation], what: str) -> None:
        with guard(f"{label}, compilation of {what}", timeout), ThreadPoolExecutor(os.cpu_count()) as pool:
            for each in some:
                submit(pool, each)

    side_by_side(written, "kernels")
    for each in first:
        show(f"{label}: {each.name}")
        with guard(f"{label}, {each.name}, compilation", timeout), ThreadPoolExecutor(1) as pool:
            submit(pool, each)
    rest = [each for each in others if each not in first]
    for each in rest:
        show(f"{label}: {each.name}")
    side_by_side(rest, "other programs")
    return prepared


def variants(implementation: Implementation) -> list[Implementation]:
    """An implementation with each of its alternatives; itself if it has none."""
    return [
        replace(implementation, call=partial(implementation.call, config=config), alternatives=(), config=config)
        for config in implementation.alternatives
    ] or [implementation]


def fastest_right(
    prepared: Sequence[tuple[Implementation, Future[Run]]], expected: Sequence[Any], timeout: float
) -> tuple[Implementation, Run]:
    """Of the alternatives that give right results the one that is fastest in a few programs."""
    fastest = None
    problems: list[Exception] = []
    for implementation, future in prepared:
        try:
            run = future.result()
            with guard(f"{run.label} {implementation.config}", timeout):
                if (found := check(run, expected)) != "ok":
                    raise ArithmeticError(found)
                seconds = min(run.launch() for _ in range(3))
        except Exception as error:
            problems.append(error)
        else:
            if fastest is None or seconds < fastest[0]:
                fastest = seconds, implementation, run
    if fastest is None:
        raise problems[0]
    return fastest[1], fastest[2]


def bench_shape(
    operation: Operation,
    shape: Any,
    implementations: Sequence[Implementation],
    mesh: Mesh,
    *,
    bandwidth: float,
    seconds: float,
    timeout: float,
    modes: Sequence[Mode] = MODES,
    l2: str = "usual",
    common: Row,
    show: Callable[[str], None] = lambda step: None,
) -> list[Row]:
    """The rows of one shape: check everything, then time what passed, then check once more.

    Without modes it only checks. `show` is told of each implementation and each mode as its turn comes.
    """
    world = mesh.shape[AXIS]
    operation.check_shape(shape, world)
    calls = operation.calls_per_program(shape, world)
    calls = calls if modes else min(calls, CHECK_CALLS)
    rounds = operation.rounds(shape, world) if modes else 1
    references = {each.name: operation.expected_from(each) for each in implementations}

    with guard(f"{shape.name}, operands and reference", timeout):
        operands = operation.operands(shape, mesh, calls, operation.turns(shape, world, calls, l2))
        expected = {
            reference.name: expected_results(reference, mesh, operands)
            for reference in {each.name: each for each in references.values()}.values()
        }

    groups = [([mode for mode in modes if mode not in STEPWISE], list(implementations))]
    if stepwise := [mode for mode in modes if mode in STEPWISE]:
        groups.append((stepwise, [each for each in map(operation.stepwise, implementations) if each is not None]))
    rows = []
    for modes_of_group, group in groups:
        if not group or (modes and not modes_of_group):
            continue
        measured = _measure(
            shape.name, group, mesh, operands, {name: expected[each.name] for name, each in references.items()},
            rounds=rounds, seconds=seconds * len(modes_of_group) / max(1, len(modes)), timeout=timeout,
            modes=modes_of_group, show=show, chosen=bool(rows),
        )  # fmt: skip
        for mode_name in [mode.name for mode in modes_of_group] or ["check"]:
            samples = {name: run.samples[mode_name] for name, run in measured.runs.items() if mode_name in run.samples}
            medians = {name: quantiles(taken)[0] for name, taken in samples.items() if measured.checked[name] == "ok"}
            floor = operation.floor_us(shape, world, medians, bandwidth)
            rows += [
                make_row(
                    operation,
                    shape,
                    each,
                    world=world,
                    mode=mode_name,
                    checked=measured.checked[each.name],
                    samples=samples.get(each.name, []),
                    floor=floor,
                    common=common,
                )
                for each in measured.taken
            ]
    return rows


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What was found of some implementations: which alternatives were taken, what the checks say, and the runs."""

    taken: list[Implementation]
    checked: dict[str, str]
    runs: dict[str, Run]


def _measure(
    label: str,
    implementations: Sequence[Implementation],
    mesh: Mesh,
    operands: Operands,
    expected: Mapping[str, Sequence[Any]],
    *,
    rounds: int,
    seconds: float,
    timeout: float,
    modes: Sequence[Mode],
    show: Callable[[str], None],
    chosen: bool,
) -> _Measured:
    """Checks everything, times what passed, and checks once more.

    Args:
      expected: by the name of an implementation.
      chosen: as in `prepare_all`.
    """
    checked: dict[str, str] = {}
    runs: dict[str, Run] = {}
    taken = {each.name: each for each in implementations}
    together = [each for each in implementations if not each.apart]
    for some in [together, *([each] for each in implementations if each.apart)]:
        prepared = prepare_all(label, some, mesh, operands, rounds, timeout, show, chosen)
        # Ours come last, so that everything else has been checked should they break the device.
        for each in some:
            want = expected[each.name]
            try:
                if each.alternatives:
                    taken[each.name], run = fastest_right(prepared[each.name], want, timeout)
                    checked[each.name] = "ok"
                else:
                    [(_, future)] = prepared[each.name]
                    run = future.result()
                    with guard(f"{run.label}, check", timeout):
                        checked[each.name] = check(run, want)
            except Exception as error:
                checked[each.name] = reason(error)
            else:
                runs[each.name] = run
        del prepared

        for mode in modes:
            show(f"{label}: {mode.name}")
            live = {each.name: runs[each.name] for each in some if checked[each.name] == "ok"}
            share = len(some) / len(implementations) / len(modes)
            for name, error in sample_rounds(live, mode, seconds * share, timeout).items():
                checked[name] = reason(error)
                del live[name]
            # Counters and double buffers that go wrong do so after many calls.
            for name, run in live.items():
                with guard(f"{run.label}, check after timing", timeout):
                    want = expected[name]
                    checked[name] = verdict(run, want[0])
                    if checked[name] == "ok":
                        checked[name] = check(run, want)

    return _Measured(taken=list(taken.values()), checked=checked, runs=runs)
