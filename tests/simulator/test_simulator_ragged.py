"""`ragged_all_to_all` in the simulator: right for all sizes, safe for garbage, and planted faults are found."""

import dataclasses
import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxtaxfree as jtf
from jaxtaxfree import simulator
from jaxtaxfree.kernels.ragged_all_to_all import portable
from jaxtaxfree.ops.ragged_all_to_all.portable import Call as RaggedCall
from jaxtaxfree.ops.ragged_all_to_all.portable import Config, Portable
from jaxtaxfree.simulator import (
    DataRaceError,
    DeadlockError,
    OutOfBoundsError,
    SignalCountError,
    SimulationError,
    UninitializedReadError,
)
from tests.helpers.ragged_cases import Routing, garbage, reports
from tests.helpers.simulator_kernels import Call, Simulated, load
from tests.simulator.test_simulator_kernels import PORTION, PORTIONS
from tests.simulator.test_simulator_mutants import edit

WORLDS = (2, 3, 4, 8)
SEEDS = 10
SETTINGS = {"programs": 2, "chunk": 16, "stages": 2}
# Columns, what is sent, settings. Of three stages some are empty.
SHAPES: tuple[tuple[int, str, dict[str, int]], ...] = (
    (5, "any", SETTINGS),
    (16, "any", {"programs": 1, "chunk": 32, "stages": 3}),
    (3, "to one", {"programs": 3, "chunk": 16, "stages": 1}),
    (24, "nothing", SETTINGS),
    (7, "even", {"programs": 2, "chunk": 16, "stages": 3}),
)


def routing_of(kind: str, world: int) -> Routing:
    if kind == "any":
        return Routing.drawn(world, seed=world)
    sizes = np.full((world, world), 4 if kind == "even" else 0)
    if kind == "to one":
        sizes[:, -1] = np.arange(world) * 3
    return Routing(sizes, spare=2)


def simulated(routing: Routing, tables: list[np.ndarray], d: int, dtype: Any, settings: dict[str, int]) -> Call:
    operand, output = routing.arrays(dtype, d)
    call = RaggedCall(rows_in=routing.rows_in, rows_out=routing.rows_out, d=d, world=routing.world, dtype=dtype)
    keywords = Portable().launch(call, Config(**settings))
    del keywords["name"]
    arrays = tuple(map(list, (operand, output, *tables)))
    expected = list(routing.expected(operand, output))
    return Call(arrays=arrays, keywords={"world": routing.world, **keywords}, expected=expected)


def ragged(world: int, dtype: np.dtype, shape: tuple) -> Call:
    d, kind, settings = shape
    routing = routing_of(kind, world)
    return simulated(routing, routing.tables, d, dtype, settings)


KERNEL = Simulated(
    name="ragged_all_to_all",
    module=portable,
    function="ragged_all_to_all_kernel",
    call=ragged,
    shapes=lambda world: SHAPES,
)


@pytest.mark.parametrize("world", WORLDS)
def test_every_shape_is_right(world: int) -> None:
    KERNEL.run(range(2 * len(SHAPES) if world < 4 else 3 if world == 4 else 1), world)


@pytest.mark.soak
@pytest.mark.parametrize("first", PORTIONS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_interleaving_is_right(world: int, first: int) -> None:
    KERNEL.run(range(first, first + PORTION), world)


@pytest.fixture(autouse=True)
def _nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels report in a test is not for the next one."""
    monkeypatch.setattr(jtf.heap, "_garbage", [])


def run_garbage(kernel: Any, world: int) -> None:
    """Who cannot have a result has none, all others have theirs, nothing is touched outside, and an error says why."""
    policies = itertools.cycle(simulator.scheduler.POLICIES)
    for seed, (name, routing, tables, receivers) in enumerate(garbage(world)):
        call = simulated(routing, tables, 5, np.dtype(np.float32), SETTINGS)
        for receiver in receivers:
            call.expected[receiver][:] = np.nan
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", simulator.WastedTrafficWarning)  # what came beside the garbage
            try:
                call.run(kernel, seed=seed, policy=next(policies), slots=None)
            except (SimulationError, AssertionError) as error:
                error.add_note(name)
                raise
        with pytest.raises(jtf.GarbageError) as raised:
            jtf.heap.check()
        message, wanted = str(raised.value), reports(routing, tables)
        assert message.count("ragged_all_to_all_kernel: ") == len(wanted), (name, message)
        assert all(f"ragged_all_to_all_kernel: {each}" in message for each in wanted), (name, message)
        jtf.heap.check()  # it is raised once


@pytest.mark.parametrize("world", (2, 3))
def test_garbage_is_found(world: int) -> None:
    run_garbage(KERNEL.kernel, world)


OF_REPORTS = (
    ("by all programs", "ready & (not fits) & (part == 0)", "ready & (not fits)", DataRaceError),
    ("of transfers by all programs", "if part == 0:  # while", "if part >= 0:  # while", DataRaceError),
    ("of no transfer", "if part == 0:  # while", "if part < 0:  # while", AssertionError),
    ("of no sender", "ready & (not fits) & (part == 0)", "ready & (not fits) & (part < 0)", AssertionError),
    ("of the wrong operand", "OUTPUT_OFFSETS = tl.constexpr(4)", "OUTPUT_OFFSETS = tl.constexpr(3)", AssertionError),
    ("of the wrong number", "where(of_first, first, to)", "where(of_first, to, first)", AssertionError),
    ("of a peer as one's own", "tl.where(count < 0, -1, RECV_SIZES)", "RECV_SIZES", AssertionError),
)


@pytest.mark.parametrize(
    ("old", "new", "error"), [each[1:] for each in OF_REPORTS], ids=[each[0] for each in OF_REPORTS]
)
def test_a_fault_of_reports_is_found(old: str, new: str, error: type[BaseException], tmp_path: Path) -> None:
    module = load(edit(portable, ((old, new),), tmp_path), portable.__name__)
    with pytest.raises(error):
        run_garbage(getattr(module, KERNEL.function), 2)


def test_parameters_have_their_places() -> None:
    names = portable.ragged_all_to_all_kernel.arg_names
    for name in ("INPUT_OFFSETS", "SEND_SIZES", "OUTPUT_OFFSETS", "RECV_SIZES"):
        assert names[getattr(portable, name).value] == f"{name.lower()}_ptr"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault.

    Attributes:
      name: in the names of tests.
      edits: (text, what to put in its place).
      errors: of which kind the finding must be; an AssertionError is a wrong result.
    """

    name: str
    edits: tuple[tuple, ...]
    errors: tuple[type[Exception], ...]


TOO_EARLY = (DataRaceError, UninitializedReadError)
SIGNAL = "            shmem.signal_all(me, meeting + me.rank, WORLD)\n"
MUTANTS = (
    Mutant(
        name="count of one peer one too low",
        edits=(
            (
                "                move(dest, source, count * D,",
                "                move(dest, source, tl.where(peer == 0, count - 1, count) * D,",
            ),
        ),
        errors=(UninitializedReadError,),
    ),
    Mutant(
        name="said count of one peer one too low",
        edits=(("me.rank + 1, count, peer)", "me.rank + 1, tl.where(peer == 0, count - 1, count), peer)"),),
        errors=(AssertionError,),
    ),
    Mutant(
        name="a stage that does not wait",
        edits=(("(me.epoch - 1) * STAGES + stage + 1)", "(me.epoch - 1) * STAGES + 1)"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="table of the call before",
        edits=(("(me.epoch - 1) * STAGES + stage + 1)", "(me.epoch - 1) * STAGES + stage)"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="inbox of the call before",
        edits=(
            (
                "rows = (box + to.to(tl.int64) * D)",
                "rows = (box + (1 - 2 * (me.epoch & 1)) * (inbox[1] * 128 // (box.dtype.element_ty.primitive_bitwidth "
                "// 8)) + to.to(tl.int64) * D)",
            ),
        ),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="no signal of the last stage",
        edits=((SIGNAL, "            if stage + 1 < STAGES:\n    " + SIGNAL),),
        errors=(DeadlockError,),
    ),
    Mutant(
        name="signal before the rows",
        edits=(
            (SIGNAL, ""),
            ("            for i in range(1, WORLD):\n", SIGNAL + "            for i in range(1, WORLD):\n"),
        ),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="place in the result of the wrong peer",
        edits=(("output_offsets_ptr + peer)\n    fits", "output_offsets_ptr + (peer + 1) % 3)\n    fits"),),
        errors=(DataRaceError, UninitializedReadError, AssertionError),
    ),
    Mutant(
        name="rows of the wrong peer",
        edits=(("input_offsets_ptr + peer)\n    count", "input_offsets_ptr)\n    count"),),
        errors=(AssertionError,),
    ),
    Mutant(
        name="one inbox for all",
        edits=(("dest = shmem.remote(me, box + to.to(tl.int64) * D, peer)", "dest = shmem.remote(me, box, peer)"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="fill of rows that came",
        edits=(("                    rest &= (row < to) | (row >= to + count)\n", "                    pass\n"),),
        errors=(AssertionError, DataRaceError),
    ),
    Mutant(
        name="last row filled",
        edits=(("(row >= to + count)", "(row >= to + count - 1)"),),
        errors=(AssertionError, DataRaceError),
    ),
    Mutant(
        name="own rows from the inbox",
        edits=(("                    if source == me.rank:\n", "                    if source == -1:\n"),),
        errors=(UninitializedReadError,),
    ),
    Mutant(
        name="one table for all programs",
        edits=(("tl.int32) + part * (2 * WORLD)", "tl.int32)"),),
        errors=(DataRaceError,),
    ),
    Mutant(
        name="one signal for all programs",
        edits=(("meeting = arrived + part * WORLD", "meeting = arrived"),),
        errors=(*TOO_EARLY, SignalCountError),
    ),
    Mutant(
        name="rows behind the last chunk",
        edits=(("mask = (element < size) & there", "mask = (element < size + 1) & there"),),
        errors=(DataRaceError, OutOfBoundsError, AssertionError),
    ),
)


@pytest.mark.filterwarnings("ignore::jaxtaxfree.simulator.WastedTrafficWarning")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    module = load(edit(portable, mutant.edits, tmp_path), portable.__name__)
    for seed in range(SEEDS):
        call, settings = KERNEL.case(seed, 3)
        try:
            call.run(getattr(module, KERNEL.function), **settings)
        except (SimulationError, AssertionError) as error:
            assert isinstance(error, mutant.errors), error
            return
    pytest.fail(f"not found in {SEEDS} seeds")


GUARDS = (
    ("(first >= 0) & ", (OutOfBoundsError,)),
    ("(first <= ROWS_IN - count) & ", (OutOfBoundsError,)),
    ("(to >= 0) & ", (OutOfBoundsError,)),
    (" & (to <= ROWS_OUT - count)", (OutOfBoundsError,)),
    (" & (count == tl.load(recv_sizes_ptr + source))", (AssertionError,)),
)


@pytest.mark.filterwarnings("ignore::jaxtaxfree.simulator.WastedTrafficWarning")
@pytest.mark.parametrize(("guard", "errors"), GUARDS, ids=[guard.strip(" &") for guard, _ in GUARDS])
def test_every_guard_guards(guard: str, errors: tuple[type[Exception], ...], tmp_path: Path) -> None:
    """Without it some garbage leads outside, or to a result."""
    module = load(edit(portable, ((guard, ""),), tmp_path), portable.__name__)
    for _, routing, tables, receivers in garbage(2):
        call = simulated(routing, tables, 5, np.dtype(np.float32), SETTINGS)
        for receiver in receivers:
            call.expected[receiver][:] = np.nan
        try:
            call.run(getattr(module, KERNEL.function))
        except (SimulationError, AssertionError) as error:
            assert isinstance(error, errors), error
            return
    pytest.fail("no garbage does harm without it")
