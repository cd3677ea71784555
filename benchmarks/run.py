"""Times the fused operations and XLA's on the same operands, in the same run, and checks every result first.

    python benchmarks/run.py all_gather_matmul --json results.json
    python benchmarks/run.py matmul_reduce_scatter --implementations fused --config exact_wire=True
    python benchmarks/run.py matmul_all_reduce --implementations gemm fused --config shots=1 --config shots=2
    python benchmarks/run.py psum all_gather decode_attention --json results.json
    python benchmarks/run.py --check
    python benchmarks/run.py decode_attention --implementations fused --config block_s=128 --config block_s=32,splits=66

Each --config is one more fused implementation; what it does not say is chosen by shape, if the operation can do that.

--peers says what to compare with; without it, all that the machine can run. xla is the plain program under several
sets of XLA's flags (FLAG_SETS in `operation.py`), of which the table shows the fastest. xla_auto is XLA's own
collective matmul. pallas is JAX's collective matmul for Hopper (`pallas_matmul.py`), the fastest of eight
configurations at each shape; the row names it. torch is PyTorch's asynchronous tensor parallelism, in processes of its
own after the rest (`torch_async_tp.py`). Neither of these two uses NVLink multicast.

Two modes, whose figures must not be compared with each other, because GPUs lower their clocks under load:

sustained: host clock around about 40 ms of programs queued back to back, directly after more of the same.
burst: host clock around about 8 ms of programs, after 0.1 s of idleness. It includes the dispatch of one program, 0.3
    to 1.2 ms, which weighs equally on all implementations but torch, whose first kernels run while it launches more.

Both are wall time over the number of calls, with nothing subtracted. A time whose samples lie more than 3 % apart (the
20th and the 80th percentile) is marked as noisy. `operation.py` describes the program that is timed; `matmuls.py`,
`mlp.py`, `attention.py`, `decode_step.py` and `collectives.py` describe the operations, what they are compared with,
and their floors.

Calls follow each other without a pause, and nothing is flushed between them. --l2 says what they find of weights or
keys and values in the L2 cache. cold: nothing, since they take turns between so many that twice the cache is read in
between. warm: as much as fits, since all calls have the same. Each call has an x of its own in any case. usual:

decode_attention: nothing. Each call of a chain has a cache of its own, together many times the L2 cache.
decode_step: nothing. A step reads many times the L2 cache.
all_gather_matmul, gated or not, matmul_reduce_scatter, matmul_all_reduce, mlp_gradients: what the call before has left
    of the weights, 29 MB a rank and more at the listed shapes on four. Calls of few rows take turns between two weights
    and find neither. Each call of a chain has its own lhs.
psum, all_gather, psum_scatter: their operands, but for the largest: each call of a chain has its own, and the chain is
    repeated in a loop.

Exits with 1 when a result was wrong, the fused implementation failed, or a shape could not be measured at all. A peer
that cannot be compiled or run, and an implementation that refuses a shape with NotImplementedError, are reported and
left out.
"""

import argparse
import ast
import datetime
import gc
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import torch_peer
from benchmarks.attention import DecodeAttention
from benchmarks.collectives import AllGather, Psum, PsumScatter
from benchmarks.decode_step import DecodeStep
from benchmarks.matmuls import (
    AllGatherMatmul,
    GatedAllGatherMatmul,
    MatmulAllReduce,
    MatmulOperation,
    MatmulReduceScatter,
)
from benchmarks.mlp import MlpGradients
from benchmarks.operation import (
    AXIS,
    CHECKED_RUNS,
    DTYPE,
    FLAG_SETS,
    L2,
    Config,
    Implementation,
    Operands,
    Operation,
    family,
    is_ours,
    is_written_by_hand,
    make_mesh,
    make_program,
    variant,
)
from benchmarks.sampling import MODES, NOISY, Mode, quantiles, spread
from benchmarks.table import NOISY_MARK
from benchmarks.timing import Run, can_queue, guard, sample_rounds

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        AllGatherMatmul(),
        GatedAllGatherMatmul(),
        MatmulReduceScatter(),
        MatmulAllReduce(),
        MlpGradients(),
        DecodeAttention(),
        DecodeStep(),
        Psum(),
        AllGather(),
        PsumScatter(),
    )
}
CHECK_WORLD = 4
CHECK_CALLS = 4
# The whole table with every peer, also where there is no terminal.
WIDTH = 280

Row = dict[str, Any]


def commit() -> str:
    """The commit of this checkout, with "-dirty" when tracked files differ from it."""

    def git(*args: str) -> str:
        folder = Path(__file__).resolve().parent
        return subprocess.run(["git", *args], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()

    try:
        revision = git("rev-parse", "--short", "HEAD")
        return revision + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def environment() -> Row:
    """The columns that are the same for every row of a run."""
    return {
        "gpu": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "triton": version("triton"),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def make_row(
    operation: Operation,
    shape: Any,
    implementation: Implementation | torch_peer.Found,
    *,
    world: int,
    mode: str,
    checked: str,
    samples: Sequence[float] = (),
    floor: float | None = None,
    common: Row,
) -> Row:
    """One measurement as it is written to JSON. Without samples, or with a failed check, it carries no time."""
    median = p20 = p80 = None
    noisy = False
    if samples and checked == "ok":
        median, p20, p80 = (round(value, 3) for value in quantiles(samples))
        noisy = spread(median, p20, p80) > NOISY
    # A part of the operation may well be faster than the floor of the whole.
    ratio = round(floor / median, 4) if median and floor and implementation.name not in operation.parts else None
    return {
        "op": operation.name,
        **dict(zip(operation.sizes, operation.sizes_of(shape))),
        "dtype": jnp.dtype(DTYPE).name,
        "world": world,
        "implementation": implementation.name,
        "config": implementation.config,
        "median_us": median,
        "p20_us": p20,
        "p80_us": p80,
        "floor_us": None if floor is None else round(floor, 3),
        **common,
        "mode": mode,
        "name": shape.name,
        "ratio_to_floor": ratio,
        "checked": checked,
        "noisy": noisy,
    }


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """A JSON list with one row a line. An interrupted run leaves the previous file whole."""
    partial_file = path.with_name(path.name + ".part")
    partial_file.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    partial_file.replace(path)


@cache
def _error_of_rank(sharding: NamedSharding) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def error(out: jax.Array, want: jax.Array) -> jax.Array:
        out, want = out.astype(jnp.float32), want.astype(jnp.float32)
        return jnp.max(jnp.sqrt(jnp.sum((out - want) ** 2, axis=-1) / jnp.sum(want**2, axis=-1))).reshape(1)

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


def judge(error: float, tolerance: float = Implementation.tolerance) -> str:
    # Spelled so that NaN fails.
    return "ok" if error < tolerance else f"wrong: relative error {error:.3g}"


def verdict(run: Run, expected: Any) -> str:
    """What is to be said of the last result of a run."""
    return judge(relative_error(run.last_result[1], expected), run.tolerance)


def one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def reason(error: Exception) -> str:
    kind = "refused" if isinstance(error, NotImplementedError) else f"failed: {type(error).__name__}"
    return one_line(f"{kind}: {error}")


def prepare(label: str, implementation: Implementation, mesh: Mesh, operands: Operands, rounds: int = 1) -> Run:
    xs, ys = operands.of(implementation)
    program = jax.jit(make_program(implementation, mesh, rounds)).lower(xs, ys)
    executable = program.compile(compiler_options=implementation.options or None)
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
) -> dict[str, list[tuple[Implementation, Future[Run]]]]:
    """Compiles everything: of each implementation, by name, the runs of its alternatives, or its own run.

    Hand-written kernels side by side; but XLA times products to choose between them, so its programs one at a time.
    """
    prepared: dict[str, list[tuple[Implementation, Future[Run]]]] = {each.name: [] for each in implementations}
    written = [each for each in implementations if is_written_by_hand(each)]
    with guard(f"{label}, compilation of kernels", timeout), ThreadPoolExecutor(os.cpu_count()) as pool:
        for each in written:
            for variant in variants(each):
                future = pool.submit(prepare, label, variant, mesh, operands, rounds)
                prepared[each.name].append((variant, future))
    for each in implementations:
        if each not in written:
            show(f"{label}: {each.name}")
            with guard(f"{label}, {each.name}, compilation", timeout), ThreadPoolExecutor(1) as pool:
                prepared[each.name].append((each, pool.submit(prepare, label, each, mesh, operands, rounds)))
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

    checked: dict[str, str] = {}
    runs: dict[str, Run] = {}
    chosen = {each.name: each for each in implementations}
    together = [each for each in implementations if not each.apart]
    for some in [together, *([each] for each in implementations if each.apart)]:
        prepared = prepare_all(shape.name, some, mesh, operands, rounds, timeout, show)
        # Ours come last, so that everything else has been checked should they break the device.
        for each in some:
            want = expected[references[each.name].name]
            try:
                if each.alternatives:
                    chosen[each.name], run = fastest_right(prepared[each.name], want, timeout)
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
            show(f"{shape.name}: {mode.name}")
            live = {each.name: runs[each.name] for each in some if checked[each.name] == "ok"}
            share = len(some) / len(implementations) / len(modes)
            for name, error in sample_rounds(live, mode, seconds * share, timeout).items():
                checked[name] = reason(error)
                del live[name]
            # Counters and double buffers that go wrong do so after many calls.
            for name, run in live.items():
                with guard(f"{run.label}, check after timing", timeout):
                    want = expected[references[name].name]
                    checked[name] = verdict(run, want[0])
                    if checked[name] == "ok":
                        checked[name] = check(run, want)

    rows = []
    for mode_name in [mode.name for mode in modes] or ["check"]:
        samples = {name: run.samples[mode_name] for name, run in runs.items() if mode_name in run.samples}
        medians = {name: quantiles(taken)[0] for name, taken in samples.items() if checked[name] == "ok"}
        floor = operation.floor_us(shape, world, medians, bandwidth)
        rows += [
            make_row(
                operation,
                shape,
                each,
                world=world,
                mode=mode_name,
                checked=checked[each.name],
                samples=samples.get(each.name, []),
                floor=floor,
                common=common,
            )
            for each in chosen.values()
        ]
    return rows


def torch_rows(
    operation: Operation,
    found: Sequence[torch_peer.Found],
    beside: Sequence[Row],
    *,
    world: int,
    modes: Sequence[str],
    common: Row,
) -> list[Row]:
    """The rows of what PyTorch did, with the floors of the rows of the same run."""
    floors = {(row["name"], row["mode"]): row["floor_us"] for row in beside}
    return [
        make_row(
            operation,
            each.shape,
            each,
            world=world,
            mode=mode,
            checked=one_line(f"failed: {each.failure}") if each.error is None else judge(each.error),
            samples=each.samples.get(mode, ()),
            floor=floors.get((each.shape.name, mode)),
            common=common,
        )
        for each in found
        for mode in modes
    ]


def time_or_word(row: Row | None) -> str:
    if row is None:
        return ""
    if row["median_us"] is None:
        return row["checked"].split(":")[0]
    return f"{row['median_us']:.1f}{NOISY_MARK if row.get('noisy') else ''}"


def fastest_or_word(variants: Sequence[Row]) -> str:
    """The least time of the variants of a peer, and whose it is."""
    fastest = min(variants, key=lambda row: row["median_us"] or math.inf, default=None)
    whose = variant(fastest["implementation"]) if fastest and fastest["median_us"] else ""
    return f"{time_or_word(fastest)} {whose}".strip()


def summarize(operation: Operation, rows: Sequence[Row]) -> tuple[list[Table], list[str]]:
    """Tables with a line per shape and mode, and the reason for every time that is missing.

    Of a peer with several variants the first table shows the fastest. A time of samples that lie more than NOISY apart
    is marked by ~. The second table, where several configurations were measured, has a line for each of them.
    """
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    parts = [name for name in operation.parts if name in names]
    candidates = [name for name in names if name.startswith("fused")]
    # One column for all variants of a peer.
    rivals: dict[str, list[str]] = {}
    for name in names:
        if name not in parts and name not in candidates[1:]:
            rivals.setdefault(family(name), []).append(name)
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((*operation.sizes_of(row), row["mode"]), {})[row["implementation"]] = row

    # Sizes that are always the same would only make the lines longer.
    varying = [len(set(sizes)) > 1 for sizes in zip(*map(operation.sizes_of, [*operation.shapes, *rows]))]

    def shown(sizes: Sequence[Any]) -> str:
        return ", ".join(str(size) for size, varies in zip(sizes, varying) if varies)

    table = Table(box=box.MARKDOWN)
    table.add_column(shown(operation.sizes))
    table.add_column("mode")
    peers = [*operation.peers, *(peer for peer in operation.optional_peers if peer in map(family, names))]
    ratios = [f"{peer} / fused" for peer in peers]
    for heading in map(escape, [*parts, "floor", *rivals, *ratios, "floor / fused", "ahead"]):
        table.add_column(heading, justify="right")
    for (*sizes, mode), group in groups.items():
        fused = group[candidates[0]]["median_us"] if candidates else None
        floor = next(iter(group.values()))["floor_us"]
        best = [
            min(
                (row["median_us"] for name, row in group.items() if name.startswith(peer) and row["median_us"]),
                default=0,
            )
            for peer in peers
        ]
        table.add_row(
            shown(sizes),
            mode,
            *(time_or_word(group.get(name)) for name in parts),
            f"{floor:.1f}" if floor else "",
            *(fastest_or_word([group[name] for name in variants if name in group]) for variants in rivals.values()),
            *(f"{peer / fused:.2f}x" if peer and fused else "" for peer in best),
            f"{floor / fused:.3f}" if floor and fused else "",
            ("yes" if fused < min(filter(None, best)) else "NO") if any(best) and fused else "",
        )
    tables = [table]
    if len(candidates) > 1:
        table = Table(box=box.MARKDOWN)
        table.add_column("implementation", no_wrap=True)
        for *sizes, mode in groups:
            table.add_column(f"{shown(sizes)} {mode}", justify="right")
        floors = [next(iter(group.values()))["floor_us"] for group in groups.values()]
        table.add_row("floor", *(f"{floor:.1f}" if floor else "" for floor in floors))
        for name in candidates:
            table.add_row(escape(name), *(time_or_word(group.get(name)) for group in groups.values()))
        tables.append(table)

    notes: dict[str, list[str]] = {}
    for row in rows:
        if row["checked"] != "ok":
            where = f"({', '.join(map(str, operation.sizes_of(row)))})"
            # Messages that differ only in some size at their end are one note, and the table stays short.
            places = notes.setdefault(f"{row['implementation']} {row['checked'][:120]}", [])
            if where not in places:
                places.append(where)
    return tables, [f"{note} at {', '.join(places)}" for note, places in notes.items()]


def is_fault(row: Row) -> bool:
    """Whether the row must fail the run: a wrong result, or a kernel of ours that broke."""
    return row["checked"].startswith("wrong") or (
        is_ours(row["implementation"]) and row["checked"].startswith("failed")
    )


@contextmanager
def steps(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, and the function that moves it to the next step.

    It is drawn between steps only: a thread that draws would compete with the dispatch of what is timed.
    """
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=total, completed=-1, visible=False)

        def show(step: str) -> None:
            progress.update(task, advance=1, description=step, visible=True, refresh=True)

        yield show


def peers_of(operation: Operation) -> list[str]:
    """What an operation can be compared with."""
    others = [
        name for name in operation.implementations() if name not in operation.parts and not name.startswith("fused")
    ]
    return list(dict.fromkeys([*map(family, others), *operation.optional_peers]))


def choose(operation: Operation, args: argparse.Namespace) -> tuple[list[Implementation], bool, list[str]]:
    """The implementations to run, whether PyTorch's are as well, and what is left out because it cannot run here."""
    known = peers_of(operation)
    peers, left_out = args.peers, []
    if peers is None:
        obstacles = {} if args.implementations else obstacles_of(operation, known, args.torch_python)
        peers = [] if args.implementations else [peer for peer in known if peer not in obstacles]
        left_out = [f"{peer} is left out: {obstacle}" for peer, obstacle in obstacles.items()]
    every = operation.implementations(args.config)
    names = args.implementations or [name for name in every if family(name) not in known]
    needed = () if args.check else operation.needed_for_floor()
    # XLA's flags for GPUs change nothing elsewhere.
    useless = FLAG_SETS.keys() - {"default"} if jax.default_backend() == "cpu" else ()
    chosen = [
        each
        for name, each in every.items()
        if name in names or name in needed or each.config or (family(name) in peers and variant(name) not in useless)
    ]
    return chosen, "torch" in peers, left_out


def obstacles_of(operation: Operation, peers: Sequence[str], torch_python: str) -> dict[str, str]:
    """Why some of these peers cannot run here."""
    obstacles = {peer: operation.unavailable(peer) for peer in peers if peer in operation.optional_peers}
    if "torch" in peers:
        obstacles["torch"] = torch_peer.unavailable(torch_python)
    return {peer: obstacle for peer, obstacle in obstacles.items() if obstacle}


def parse_config(text: str) -> Config:
    """`key=value,...`, with Python literals as values; what is no literal is a string."""
    config: Config = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not (key and equals):
            raise argparse.ArgumentTypeError(f"{item!r} is not key=value")
        try:
            config[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            config[key.strip()] = value.strip()
    return config


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    listed = [f"{name}: {', '.join(operation.implementations())}." for name, operation in OPERATIONS.items()]
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, epilog=f"Implementations of {' '.join(listed)}"
    )
    parser.add_argument("ops", nargs="*", metavar="op", help=f"of {', '.join(OPERATIONS)}; default: all")
    parser.add_argument("--json", type=Path, help="write the rows here, after each shape")
    parser.add_argument(
        "--shapes",
        nargs="+",
        metavar="M,K,N",
        help="of a single operation; or B,S of decode_attention, or bytes; default: all listed",
    )
    parser.add_argument("--world", type=int, help="number of devices; default: all, with --check at most 4")
    parser.add_argument(
        "--implementations", nargs="+", metavar="NAME", help="default: ours, the parts and those of the peers"
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        metavar="PEER",
        help="what to compare with, such as xla, xla_auto, pallas and torch; default: all that can run here, "
        "or with --implementations none but those",
    )
    parser.add_argument(
        "--torch-python", default=sys.executable, metavar="PATH", help="a Python that has PyTorch; default: this one"
    )
    parser.add_argument(
        "--config",
        type=parse_config,
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="one more fused implementation, with this configuration; can be given several times",
    )
    names = [mode.name for mode in MODES]
    parser.add_argument("--modes", nargs="+", choices=names, default=names, help="default: both")
    parser.add_argument("--l2", choices=L2, default="usual", help="what calls find in the L2 cache; see above")
    parser.add_argument("--seconds-per-shape", type=float, default=10.0, metavar="S", help="measuring; default: 10")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="of a step, then exit; default: 120")
    parser.add_argument("--commit", metavar="HASH", help="of this code, where it is no git checkout")
    parser.add_argument("--check", action="store_true", help="only check results, at tiny shapes, also without a GPU")
    args = parser.parse_args(argv)

    if unknown := [name for name in args.ops if name not in OPERATIONS]:
        parser.error(f"there is no operation {unknown[0]!r}: choose from {', '.join(OPERATIONS)}")
    args.ops = args.ops or list(OPERATIONS)
    operations = [OPERATIONS[name] for name in args.ops]
    asked = " or ".join(args.ops)
    implementations = dict.fromkeys(name for operation in operations for name in operation.implementations())
    if unknown := [name for name in args.implementations or () if name not in implementations]:
        parser.error(f"{asked} has no implementation {unknown[0]!r}: choose from {', '.join(implementations)}")
    known = dict.fromkeys(peer for operation in operations for peer in peers_of(operation))
    if unknown := [peer for peer in args.peers or () if peer not in known]:
        parser.error(f"{asked} has no peer {unknown[0]!r}: choose from {', '.join(known)}")
    if len(operations) > 1 and (args.shapes or args.config):
        parser.error("--shapes and --config are of a single operation")
    try:
        args.shapes = [operations[0].parse_shape(text) for text in args.shapes or ()]
    except ValueError as error:
        parser.error(f"argument --shapes: {error}")
    if args.config and not operations[0].configurable:
        parser.error(f"{asked} is made of several operations, and takes no --config")
    return args


def measure(
    operation: Operation, args: argparse.Namespace, mesh: Mesh, before: Sequence[Row], common: Row, console: Console
) -> tuple[list[Row], int]:
    """The rows of an operation, and how many shapes could not be measured.

    Args:
      before: rows of other operations, which stay in the file.
    """
    world = mesh.shape[AXIS]
    implementations, with_torch, left_out = choose(operation, args)
    shapes = args.shapes or (operation.tiny_shapes if args.check else operation.shapes)
    modes = [] if args.check else [mode for mode in MODES if mode.name in args.modes]
    for line in left_out:
        console.print(line, markup=False, highlight=False)

    bandwidth = math.inf
    if not args.check:
        with guard("bandwidth", args.timeout):
            measured = operation.ceilings(mesh, jax.default_backend() == "gpu")
        bandwidth = max(measured.values(), default=math.inf)
        found = ", ".join(f"{way} {value / 1e9:.0f}" for way, value in measured.items())
        console.print(f"{operation.ceiling}: {found or 'one device'}; the floors use the best")

    rows: list[Row] = []
    failed = 0
    turns = 1 + sum(each.apart for each in implementations)
    with steps(console, len(shapes) * (len(implementations) + turns * len(modes)) + with_torch) as show:
        for shape in shapes:
            shape_started = time.perf_counter()
            try:
                rows += bench_shape(
                    operation,
                    shape,
                    implementations,
                    mesh,
                    bandwidth=bandwidth,
                    seconds=args.seconds_per_shape,
                    timeout=args.timeout,
                    modes=modes,
                    l2=args.l2,
                    common=common,
                    show=show,
                )
            except Exception as error:
                # One shape, out of memory perhaps, must not cost the results of the others.
                failed += 1
                traceback.print_exc()
                console.print(f"{shape.name}: {reason(error)}", markup=False)
            if args.json:
                write_rows(args.json, [*before, *rows])
            # The operands and executables of a shape are worth gigabytes; do not wait for the collector.
            gc.collect()
            console.print(f"{shape.name}: {time.perf_counter() - shape_started:.0f} s", highlight=False)
        if with_torch and isinstance(operation, MatmulOperation):
            show("torch")
            found, failure = torch_peer.measure(
                operation,
                shapes,
                world=world,
                modes=modes,
                seconds=args.seconds_per_shape,
                python=args.torch_python,
                timeout=args.timeout,
                l2=args.l2,
            )
            if failure:
                console.print(f"PyTorch ended early: {failure}", markup=False)
            names = [mode.name for mode in modes] or ["check"]
            rows += torch_rows(operation, found, rows, world=world, modes=names, common=common)
            if args.json:
                write_rows(args.json, [*before, *rows])

    tables, notes = summarize(operation, rows)
    if not args.check:
        console.print(f"{operation.name}: medians in microseconds a call, on one of {world} ranks", highlight=False)
        console.print(*tables)
    for note in [*notes, *operation.remarks(rows)]:
        console.print(note, markup=False, highlight=False)
    return rows, failed


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # Only counts where there is no GPU. Must precede the first use of a device.
        jax.config.update("jax_num_cpu_devices", args.world or CHECK_WORLD)
    started = time.perf_counter()
    available = len(jax.devices())
    world = args.world or (min(CHECK_WORLD, available) if args.check else available)
    if world > available:
        raise SystemExit(f"--world {world}: there are only {available} devices")
    common = environment() | {"l2": args.l2} | ({"commit": args.commit} if args.commit else {})
    mesh = make_mesh(jax.devices()[:world])

    console = Console(width=WIDTH)
    settings = {key: value for key, value in sorted(os.environ.items()) if key.startswith(("NCCL_", "XLA_FLAGS"))}
    console.print(
        f"{world} x {common['gpu']}, JAX {common['jax']}, Triton {common['triton']}, commit {common['commit']}"
    )
    console.print(f"environment: {settings or 'no NCCL_* and no XLA_FLAGS'}", markup=False, highlight=False)
    if not (args.check or jax.default_backend() == "gpu"):
        console.print("These are CPU devices: the times below say nothing about the kernels.")

    rows: list[Row] = []
    faults = 0
    for name in args.ops:
        of_operation, failed = measure(OPERATIONS[name], args, mesh, rows, common, console)
        rows += of_operation
        faults += failed + sum(map(is_fault, of_operation))
    passed = sum(row["checked"] == "ok" for row in rows)
    console.print(
        f"{passed} of {len(rows)} rows checked and right, {time.perf_counter() - started:.0f} s", markup=False
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
