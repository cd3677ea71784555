"""Finds the fastest configuration of each operation's kernel at the listed shapes, for `jaxtaxfree/tuned/`.

    python benchmarks/tune.py                                           # all operations: prints what it finds
    python benchmarks/tune.py matmul_all_reduce psum --write            # and writes it for GPUs of this kind
    python benchmarks/tune.py all_gather_matmul --shapes 16,8192,28672 --write FOLDER
    python benchmarks/tune.py --from benchmarks/results/FOLDER/*.json   # writes what was measured already
    python benchmarks/tune.py --check                                   # tiny shapes, also without a GPU

Candidates are the kernel and configuration by shape, and the kernel's `variations` of it. None of them changes how the
operation rounds. Each has to give the right results, as in `run.py`, before it is timed and after. The
slower half of them drops out, as long as there are more than two; these, the default and XLA's program are timed for
longer. A time is that of the slowest GPU, because a program has ended when it has on all of them. All candidates take
turns, so what throttles one throttles all.

Another configuration than the default has to be faster by more than MARGIN to be written. With it go the times of it
and of XLA's program under default flags, which is what `implementation=None` would take instead. Nothing is written of
a shape where XLA or the default gave no right result, or any candidate a wrong one. Rows of other shapes stay.

The kernels are compiled side by side, before anything of an operation is timed.
"""

import argparse
import concurrent.futures
import dataclasses
import gc
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import measure
from benchmarks.operation import AXIS, ONE, Implementation, Operation, config_name, make_mesh
from benchmarks.operations import TUNED
from benchmarks.rows import Row, environment, reason, write_rows
from benchmarks.run import CHECK_WORLD, WIDTH
from benchmarks.sampling import SUSTAINED, Mode, quantiles
from benchmarks.timing import Run, guard, sample_rounds
from jaxtaxfree import dispatch
from jaxtaxfree.ops.blocks import portable
from jaxtaxfree.ops.variant import KERNEL, Choice
from jaxtaxfree.teams import Team

XLA = "xla"
DEFAULT = "default"
QUICK = Mode(name="quick", seconds=0.010, warm=0.25)
FINALISTS = 2
MOST_CANDIDATES = 12
# What else a row of a table says of its measurement.
PROVENANCE = ("jax", "triton", "commit", "date")
# The setting that says how results are rounded, which is no matter of speed.
ROUNDING = "exact_wire"
# What another configuration has to save: samples of one and the same lie that far apart.
MARGIN = 0.01


def candidates(case: dispatch.Case) -> dict[str, Choice]:
    """Choices by name: the default, and the same with some setting changed, or another kernel.

    What changes nothing, makes a half of 1, or does not fit into shared memory is left out.
    """
    default = case.default
    found = {DEFAULT: default}
    for change in default.variant.variations(default.call, default.config):
        if KERNEL in change:
            new, settings = change, change
        else:
            new = {name: value for name, value in change.items() if value != default.settings[name]}
            settings = default.settings | new
        try:
            choice = case.choose(case.size, settings)
        except (ValueError, NotImplementedError):
            continue
        if choice not in found.values() and _fits(choice):
            found[config_name(new)] = choice
    return dict(list(found.items())[:MOST_CANDIDATES])


def _fits(choice: Choice) -> bool:
    """Whether the tiles of a product fit into shared memory."""
    if not isinstance(choice.config, portable.Tile):
        return True
    step = portable.bytes_of_a_step(choice.call, choice.config)
    return choice.config.num_stages * step <= (choice.call.target.shared_memory or 0)


@dataclasses.dataclass(kw_only=True)
class Contest:
    """One shape of an operation: what is compared there, and how it ended.

    Attributes:
      entrants: by name, XLA among them.
      configs: those of the kernel.
      runs: what could be compiled, and is right so far.
      expected: what each has to give.
      excluded: why others are out.
      medians: microseconds of those who were timed to the end.
    """

    operation: Operation
    shape: Any
    case: dispatch.Case
    configs: dict[str, Choice]
    entrants: dict[str, Implementation]
    operands: Any
    expected: list[Any]
    runs: dict[str, Run] = dataclasses.field(default_factory=dict)
    excluded: dict[str, str] = dataclasses.field(default_factory=dict)
    medians: dict[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, operation: Operation, shape: Any, mesh: Mesh, calls: int, most: int = MOST_CANDIDATES) -> "Contest":
        team = Team(axes=(AXIS,), others=(ONE,), world=mesh.shape[AXIS], devices=tuple(mesh.devices.flat))
        operation.check_shape(shape, team.world)
        case = operation.case_at(shape, team)
        if case is None:
            raise NotImplementedError(f"no kernel takes {shape}")
        configs = dict(list(candidates(case).items())[:most])
        settings = [choice.settings for choice in configs.values()]
        implementations = operation.implementations(settings)
        ours = [each for each in implementations.values() if each.config in settings]
        xla = implementations[operation.rival]
        operands = operation.operands(shape, mesh, calls, operation.turns(shape, team.world, calls, "usual"))
        return cls(
            operation=operation,
            shape=shape,
            case=case,
            configs=configs,
            entrants={name: dataclasses.replace(each, name=name) for name, each in zip((XLA, *configs), (xla, *ours))},
            operands=operands,
            expected=measure.expected_results(operation.expected_from(xla), mesh, operands),
        )

    def check(self, name: str) -> None:
        """Excludes an entrant whose results are wrong, or that fails."""
        try:
            found = measure.check(self.runs[name], self.expected)
        except Exception as error:
            found = reason(error)
        if found != "ok":
            self.excluded[name] = found
            del self.runs[name]

    def race(self, seconds: float, timeout: float) -> None:
        """Times those who are right: fewer and fewer, and the last ones for so many seconds."""
        for name in list(self.runs):
            with guard(f"{self.shape.name}, {name}, check", timeout):
                self.check(name)
        if missing := {XLA, DEFAULT} - self.runs.keys():
            self.excluded["all"] = f"nothing is compared without {' and '.join(sorted(missing))}"
            return
        live = {name: each for name, each in self.runs.items() if name not in (XLA, DEFAULT)}
        while len(live) > FINALISTS:
            self.time(live, QUICK, 0.0, timeout)
            keep = max(FINALISTS, math.ceil(len(live) / 2))
            by_time = sorted((name for name in live if name in self.runs), key=lambda name: self.median(name, QUICK))
            live = {name: live[name] for name in by_time[:keep]}
        finalists = {XLA: self.runs[XLA], DEFAULT: self.runs[DEFAULT], **live}
        self.time(finalists, SUSTAINED, seconds, timeout)
        for name in finalists:
            # Counters and double buffers that go wrong do so after many calls.
            with guard(f"{self.shape.name}, {name}, check after timing", timeout):
                if name in self.runs:
                    self.check(name)
            if name in self.runs:
                self.medians[name] = self.median(name, SUSTAINED)

    def time(self, runs: Mapping[str, Run], mode: Mode, seconds: float, timeout: float) -> None:
        for name, error in sample_rounds(runs, mode, seconds, timeout).items():
            self.excluded[name] = reason(error)
            del self.runs[name]

    def median(self, name: str, mode: Mode) -> float:
        return quantiles(self.runs[name].samples[mode.name])[0]

    @property
    def wrong(self) -> bool:
        """Whether a kernel of ours gave a wrong result."""
        return any(why.startswith("wrong") for why in self.excluded.values())

    @property
    def fault(self) -> bool:
        """Whether the run has to fail: a refusal is none."""
        refused = self.excluded.get(DEFAULT, "").startswith("refused")
        return self.wrong or not (refused or {XLA, DEFAULT} <= self.medians.keys())

    def winner(self) -> str:
        """The default, unless another one is faster by more than the margin."""
        ours = {name: time for name, time in self.medians.items() if name != XLA}
        best = min(ours, key=lambda name: ours[name])
        return best if ours[best] < (1 - MARGIN) * ours[DEFAULT] else DEFAULT

    def row(self, provenance: dispatch.Row) -> dispatch.Row | None:
        """What the table is to say; None if this does not suffice."""
        if self.wrong or not {XLA, DEFAULT} <= self.medians.keys():
            return None
        winner = self.winner()
        return {
            **self.case.row(),
            "config": None if winner == DEFAULT else self.configs[winner].settings,
            "fused_us": round(self.medians[winner], 2),
            "xla_us": round(self.medians[XLA], 2),
            "name": self.shape.name,
            **provenance,
        }

    def lines(self) -> Iterator[str]:
        """The times, and why some have none."""
        if {XLA, DEFAULT} <= self.medians.keys():
            winner, xla = self.winner(), self.medians[XLA]
            others = ", ".join(f"{name} {time:.2f}" for name, time in self.medians.items() if name != winner)
            fastest = self.medians[winner]
            yield f"{self.shape.name}: {winner} {fastest:.2f} us, {xla / fastest:.2f}x as fast as XLA; {others}"
        for why in dict.fromkeys(self.excluded.values()):
            names = [name for name, its in self.excluded.items() if its == why]
            yield f"{self.shape.name}: {'all' if len(names) == len(self.configs) else ', '.join(names)}: {why}"


def compile_all(contests: Sequence[Contest], mesh: Mesh, jobs: int) -> None:
    """Compiles XLA's programs, for which it times products, and then those of kernels alone, side by side."""

    def prepare(contest: Contest, name: str) -> Run:
        rounds = contest.operation.rounds(contest.shape, mesh.shape[AXIS])
        return measure.prepare(contest.shape.name, contest.entrants[name], mesh, contest.operands, rounds)

    ours = [(contest, name) for contest in contests for name in contest.configs]
    for several, each in ((1, [(contest, XLA) for contest in contests]), (jobs, ours)):
        with concurrent.futures.ThreadPoolExecutor(several) as pool:
            programs = [pool.submit(prepare, contest, name) for contest, name in each]
        for (contest, name), program in zip(each, programs):
            try:
                contest.runs[name] = program.result()
            except Exception as error:
                contest.excluded[name] = reason(error)


def merge(folder: Path, kind: str, case: dispatch.Case, row: dispatch.Row) -> None:
    """Writes a row into the table of such GPUs, in place of that of the same shape, whose configuration it may keep."""
    path = folder / dispatch.path_of(kind, case.operation).relative_to(dispatch.TUNED)
    keys = list(case.row())
    rows = json.loads(path.read_text()) if path.is_file() else []
    by_key = {tuple(each[key] for key in keys): each for each in rows}
    key = tuple((case.row() | row)[each] for each in keys)
    by_key[key] = {**case.row(), "config": by_key.get(key, {}).get("config"), **row}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, [by_key[key] for key in sorted(by_key)])


def take_results(path: Path, folder: Path) -> Iterator[str]:
    """Writes what results of run.py say of each shape, by the rules of a contest. Yields a line for each.

    The implementation `Operation.own` stands for the default: it is what was chosen by shape, and by the table as it
    is. Of weights that stay in the L2 cache nothing is concluded: those of the layers of a model do not.
    """
    shapes: dict[tuple[Any, ...], list[Row]] = {}
    for row in json.loads(path.read_text()):
        if row["op"] in TUNED and row["mode"] == SUSTAINED.name and row.get("l2") != "warm":
            sizes = TUNED[row["op"]].sizes_of(row)
            shapes.setdefault((row["op"], row["world"], *sizes), []).append(row)
    for (name, world, *sizes), rows in shapes.items():
        operation = TUNED[name]
        shape = operation.parse_shape(",".join(map(str, sizes)))
        times = {row["implementation"]: row["median_us"] for row in rows if row["median_us"] and row["checked"] == "ok"}
        own, xla = operation.own, operation.rival
        names = [row["implementation"] for row in rows]
        ours = {name: row for name, row in zip(names, rows) if name == own or name.startswith("fused[")}
        if not {own, xla} <= times.keys() or any(row["checked"].startswith("wrong") for row in ours.values()):
            yield f"{name}, {shape.name}: not enough is known, or something is wrong"
            continue
        # On a CPU programs are built for the GPUs that have tables.
        team = Team(axes=(AXIS,), others=(ONE,), world=world, devices=tuple(jax.devices("cpu")[:1]))
        case = operation.case_at(shape, team)
        if case is None:
            yield f"{name}, {shape.name}: no kernel takes it"
            continue
        default = case.default.settings
        configs = {name: case.choose(case.size, row["config"]).settings for name, row in ours.items() if row["config"]}
        alike = [each for each, config in configs.items() if config.get(ROUNDING) == default.get(ROUNDING)]
        best = min((each for each in (own, *alike) if each in times), key=lambda each: times[each])
        best = best if times[best] < (1 - MARGIN) * times[own] else own
        found = {"fused_us": times[best], "xla_us": times[xla], "name": shape.name}
        found |= {key: ours[best][key] for key in PROVENANCE}
        if best != own:
            found["config"] = configs[best] if configs[best] != default else None
        merge(folder, ours[best]["gpu"], case, found)
        yield f"{name}, {shape.name}: {best} {times[best]:.2f} us, {times[xla] / times[best]:.2f}x as fast as XLA"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=f"of {', '.join(TUNED)}; default: all")
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", help="as of run.py; default: all listed")
    parser.add_argument("--world", type=int, help="number of devices; default: all, with --check at most 4")
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=dispatch.TUNED,
        metavar="FOLDER",
        help="of tables; default: the package's",
    )
    parser.add_argument(
        "--seconds-per-shape", type=float, default=1.0, metavar="S", help="of the last round; default: 1"
    )
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="of a step, then exit; default: 120")
    parser.add_argument(
        "--candidates", type=int, default=MOST_CANDIDATES, metavar="N", help=f"of a shape; default: {MOST_CANDIDATES}"
    )
    parser.add_argument(
        "--from",
        dest="results",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="measure nothing: write what these results of run.py say of XLA, and of the kernel with each --config",
    )
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="programs compiled side by side")
    parser.add_argument("--commit", metavar="HASH", help="of this code, where it is no git checkout")
    parser.add_argument("--check", action="store_true", help="only check results, at tiny shapes, also without a GPU")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.operations if name not in TUNED]:
        parser.error(f"there is nothing to tune in {unknown[0]!r}: choose from {', '.join(TUNED)}")
    args.operations = args.operations or list(TUNED)
    try:
        args.shapes = {name: [TUNED[name].parse_shape(text) for text in args.shapes or ()] for name in args.operations}
    except ValueError as error:
        parser.error(f"argument --shapes: {error}")
    if args.check and args.write:
        parser.error("--check times nothing, so there is nothing to --write")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.results:
        for path in args.results:
            for line in take_results(path, args.write or dispatch.TUNED):
                print(line)
        return 0
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", args.world or CHECK_WORLD)
    devices = jax.devices()
    mesh = make_mesh(devices[: args.world or (CHECK_WORLD if args.check else None)])
    world = mesh.shape[AXIS]
    about = environment() | ({"commit": args.commit} if args.commit else {})
    provenance = {name: about[name] for name in PROVENANCE}
    kind = about["gpu"]
    if args.write and jax.default_backend() != "gpu":
        raise SystemExit("There is no GPU here, so there is nothing to write.")

    console = Console(width=WIDTH)
    console.print(f"{world} x {kind}, {provenance}", markup=False, highlight=False)
    faults = 0
    for name in args.operations:
        operation, started = TUNED[name], time.perf_counter()
        contests = []
        for shape in args.shapes[name] or (operation.tiny_shapes if args.check else operation.shapes_for(world)):
            calls = measure.CHECK_CALLS if args.check else operation.calls_per_program(shape, world)
            try:
                with guard(f"{shape.name}, operands and reference", args.timeout):
                    contests.append(Contest.of(operation, shape, mesh, calls, args.candidates))
            except NotImplementedError as refusal:
                console.print(str(refusal), markup=False, highlight=False)
        with guard(f"{name}, compilation", args.timeout):
            compile_all(contests, mesh, args.jobs)
        console.print(f"{name}: compiled in {time.perf_counter() - started:.0f} s", highlight=False)
        for contest in contests:
            if args.check:
                for each in list(contest.runs):
                    contest.check(each)
            else:
                contest.race(args.seconds_per_shape, args.timeout)
            contest.runs.clear()
            if args.write and (row := contest.row(provenance)):
                merge(args.write, kind, contest.case, row)
            for line in contest.lines():
                console.print(line, markup=False, highlight=False)
        console.print(f"{name}: {time.perf_counter() - started:.0f} s", highlight=False)
        faults += sum(contest.wrong if args.check else contest.fault for contest in contests)
        # The operands and executables are worth gigabytes; do not wait for the collector.
        contests, contest = [], None
        gc.collect()
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
