"""Times the fused operations and XLA's on the same operands, in the same run, and checks every result first.

    python benchmarks/run.py all_gather_matmul --json results.json
    python benchmarks/run.py all_gather_matmul --check

Two modes, whose figures must not be compared with each other, because GPUs lower their clocks under load:

sustained: host clock around about 40 ms of programs queued back to back, directly after more of the same.
burst: host clock around about 8 ms of programs, after 0.1 s of idleness. It includes the dispatch of one program, some
    0.3 ms, which weighs equally on all implementations.

Both are wall time over the number of calls, with nothing subtracted. `implementations.py` describes the program.

The floor of a shape is the longer of two times of the same run: the plain product of the gathered lhs (`gemm`), and
the bytes a rank receives over the best bandwidth that a plain copy between devices reached.

Exits with 1 when a result was wrong, the fused implementation failed, or a shape could not be measured at all. An XLA
flag set that cannot be compiled or run, and an implementation that refuses a shape with NotImplementedError, are
reported and left out.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import shapes as shape_lists
from benchmarks.implementations import (
    DTYPE,
    Implementation,
    all_implementations,
    calls_per_program,
    expected_from,
    make_mesh,
    make_operands,
    make_program,
)
from benchmarks.shapes import MatmulShape
from benchmarks.timing import MODES, Run, can_queue, guard, measure_bandwidths, quantiles, sample_rounds

OP = "all_gather_matmul"
TOLERANCE = 1e-2  # relative Frobenius error; two roundings to bf16 differ by about 2e-3
# XLA runs a program once launch by launch, and as a CUDA graph from then on: both are checked.
CHECKED_RUNS = 3
CHECK_WORLD = 4
CHECK_CALLS = 4

Row = dict[str, Any]


def floor_us(gemm_us: float | None, wire_bytes: int, bandwidth: float) -> float | None:
    """Microseconds below which no schedule can get: all of the product, or all of the wire, whichever is longer."""
    return None if gemm_us is None else max(gemm_us, wire_bytes / bandwidth * 1e6)


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
    shape: MatmulShape,
    implementation: str,
    *,
    world: int,
    mode: str,
    checked: str,
    config: dict[str, Any] | None = None,
    samples: Sequence[float] = (),
    floor: float | None = None,
    common: Row,
) -> Row:
    """One measurement as it is written to JSON. Without samples, or with a failed check, it carries no time."""
    median = p20 = p80 = None
    if samples and checked == "ok":
        median, p20, p80 = (round(value, 3) for value in quantiles(samples))
    # A part of the operation may well be faster than the floor of the whole.
    ratio = round(floor / median, 4) if median and floor and implementation != "collective" else None
    return {
        "op": OP,
        "m": shape.m,
        "k": shape.k,
        "n": shape.n,
        "dtype": jnp.dtype(DTYPE).name,
        "world": world,
        "implementation": implementation,
        "config": config if implementation == "fused" else None,
        "median_us": median,
        "p20_us": p20,
        "p80_us": p80,
        "floor_us": None if floor is None else round(floor, 3),
        **common,
        "mode": mode,
        "name": shape.name,
        "ratio_to_floor": ratio,
        "checked": checked,
    }


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """A JSON list with one row a line. An interrupted run leaves the previous file whole."""
    partial_file = path.with_name(path.name + ".part")
    partial_file.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    partial_file.replace(path)


@jax.jit
def relative_error(result: Any, expected: Any) -> jax.Array:
    """The largest relative Frobenius error of any row of the arrays; NaN if there is one.

    Of rows, because in the error of a whole array a tile that was lost or came late drowns.
    """

    def error(out: jax.Array, want: jax.Array) -> jax.Array:
        out, want = out.astype(jnp.float32), want.astype(jnp.float32)
        return jnp.max(jnp.sqrt(jnp.sum((out - want) ** 2, axis=-1) / jnp.sum(want**2, axis=-1)))

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(error, result, expected))))


def verdict(result: Any, expected: Any) -> str:
    error = float(relative_error(result, expected))
    # Spelled so that NaN fails.
    return "ok" if error < TOLERANCE else f"wrong: relative error {error:.3g}"


def reason(error: Exception) -> str:
    kind = "refused" if isinstance(error, NotImplementedError) else f"failed: {type(error).__name__}"
    return " ".join(f"{kind}: {error}".split())[:300]


def prepare(shape: MatmulShape, implementation: Implementation, mesh: Mesh, operands: Any, calls: int) -> Run:
    lhs, rhs = operands.of(implementation)
    program = jax.jit(make_program(implementation, mesh)).lower(lhs, rhs)
    executable = program.compile(compiler_options=implementation.options or None)
    return Run(
        label=f"{shape.name}, {implementation.name}",
        executable=executable,
        operands=(lhs, rhs),
        calls=calls,
        queue=can_queue(mesh),
    )


def rotated_operands(run: Run, rotation: int) -> tuple[Any, Any]:
    lhs, rhs = run.operands
    return lhs[rotation:] + lhs[:rotation], rhs


def reference_results(run: Run) -> list[Any]:
    results = []
    for rotation in range(CHECKED_RUNS):
        run.launch(operands=rotated_operands(run, rotation))
        results.append(run.last_result)
    return results


def check(run: Run, expected: Sequence[Any]) -> str:
    """Runs the very executable that is timed, several times, and compares every result.

    Each time another lhs comes first. A tile that was not written would otherwise pass, since the memory of a result
    often still holds the same result of an earlier run.
    """
    for rotation, want in enumerate(expected):
        run.program_seconds = run.launch(operands=rotated_operands(run, rotation))
        found = verdict(run.last_result, want)
        if found != "ok":
            return found
    return "ok"


def bench_shape(
    shape: MatmulShape,
    names: Sequence[str],
    mesh: Mesh,
    *,
    bandwidth: float,
    seconds: float,
    timeout: float,
    config: dict[str, Any] | None = None,
    check_only: bool = False,
    common: Row,
) -> list[Row]:
    """The rows of one shape: check everything, then time what passed, then check once more."""
    world = mesh.devices.size
    if shape.m % world or shape.n % world:
        raise ValueError(f"{shape}: m and n must be multiples of the {world} devices; choose others, or --world")
    implementations = {key: value for key, value in all_implementations(config).items() if key in names}
    references = {name: expected_from(implementation) for name, implementation in implementations.items()}
    calls = CHECK_CALLS if check_only else calls_per_program(shape, world)

    prepared: dict[str, Run] = {}
    expected: dict[str, list[Any]] = {}
    with guard(f"{shape.name}, operands and reference", timeout):
        operands = make_operands(shape, mesh, calls)
        for reference in references.values():
            if reference.name not in prepared:
                prepared[reference.name] = prepare(shape, reference, mesh, operands, calls)
                expected[reference.name] = reference_results(prepared[reference.name])

    checked: dict[str, str] = {}
    runs: dict[str, Run] = {}
    for name, implementation in implementations.items():
        try:
            with guard(f"{shape.name}, {name}, compilation and check", timeout):
                run = prepared.get(name) or prepare(shape, implementation, mesh, operands, calls)
                checked[name] = check(run, expected[references[name].name])
        except Exception as error:
            checked[name] = reason(error)
        else:
            runs[name] = run

    for mode in () if check_only else MODES:
        live = {name: run for name, run in runs.items() if checked[name] == "ok"}
        for name, error in sample_rounds(live, mode, seconds / len(MODES), timeout).items():
            checked[name] = reason(error)
            del live[name]
        # Counters and double buffers that go wrong do so after many calls.
        for name, run in live.items():
            with guard(f"{run.label}, check after timing", timeout):
                want = expected[references[name].name]
                checked[name] = verdict(run.last_result, want[0])
                if checked[name] == "ok":
                    checked[name] = check(run, want)

    rows = []
    for mode_name in ["check"] if check_only else [mode.name for mode in MODES]:
        samples = {name: run.samples.get(mode_name, []) for name, run in runs.items()}
        gemm = quantiles(samples["gemm"])[0] if checked.get("gemm") == "ok" and samples["gemm"] else None
        floor = floor_us(gemm, shape.wire_bytes(world, jnp.dtype(DTYPE).itemsize), bandwidth)
        rows += [
            make_row(
                shape,
                name,
                world=world,
                mode=mode_name,
                checked=checked[name],
                config=config,
                samples=samples.get(name, []),
                floor=floor,
                common=common,
            )
            for name in implementations
        ]
    return rows


def summarize(rows: Sequence[Row]) -> tuple[Table, list[str]]:
    """One line per shape and mode, and the reason for every time that is missing."""
    names = [name for name in all_implementations() if any(row["implementation"] == name for row in rows)]
    table = Table(box=box.MARKDOWN)
    table.add_column("M, K, N")
    table.add_column("mode")
    parts = [name for name in ("gemm", "collective") if name in names]
    rivals = [name for name in names if name not in parts]
    for heading in [*parts, "floor", *rivals, "best xla / fused", "floor / fused", "ahead"]:
        table.add_column(heading, justify="right")

    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = (row["m"], row["k"], row["n"], row["mode"])
        groups.setdefault(key, {})[row["implementation"]] = row

    def time_or_word(row: Row | None) -> str:
        if row is None:
            return ""
        if row["median_us"] is None:
            return row["checked"].split(":")[0]
        return f"{row['median_us']:.1f}"

    for (m, k, n, mode), group in groups.items():
        fused = group["fused"]["median_us"] if "fused" in group else None
        floor = next(iter(group.values()))["floor_us"]
        xla = [row["median_us"] for name, row in group.items() if name.startswith("xla") and row["median_us"]]
        table.add_row(
            f"{m}, {k}, {n}",
            mode,
            *(time_or_word(group.get(name)) for name in parts),
            f"{floor:.1f}" if floor else "",
            *(time_or_word(group.get(name)) for name in rivals),
            f"{min(xla) / fused:.2f}x" if xla and fused else "",
            f"{floor / fused:.3f}" if floor and fused else "",
            ("yes" if fused < min(xla) else "NO") if xla and fused else "",
        )
    notes: dict[str, list[str]] = {}
    for row in rows:
        if row["checked"] != "ok":
            where = f"({row['m']}, {row['k']}, {row['n']})"
            # Messages that differ only in some size at their end are one note, and the table stays short.
            places = notes.setdefault(f"{row['implementation']} {row['checked'][:120]}", [])
            if where not in places:
                places.append(where)
    return table, [f"{note} at {', '.join(places)}" for note, places in notes.items()]


def is_fault(row: Row) -> bool:
    """Whether the row must fail the run: a wrong result, or a fused kernel that broke."""
    return row["checked"].startswith("wrong") or (
        row["implementation"] == "fused" and row["checked"].startswith("failed")
    )


def parse_config(text: str) -> dict[str, Any]:
    """`key=value,...`, with Python literals as values; what is no literal is a string."""
    config: dict[str, Any] = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if not (key and equals):
            raise argparse.ArgumentTypeError(f"{item!r} is not key=value")
        try:
            config[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            config[key.strip()] = value.strip()
    return config


def parse_shape(text: str) -> MatmulShape:
    try:
        m, k, n = (int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not M,K,N") from None
    listed = (shape for shape in shape_lists.ALL_GATHER_MATMUL if (shape.m, shape.k, shape.n) == (m, k, n))
    return next(listed, MatmulShape(name=f"{m}x{k}x{n}", m=m, k=k, n=n))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    known = list(all_implementations())
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None, epilog=f"Implementations: {', '.join(known)}."
    )
    parser.add_argument("op", choices=[OP])
    parser.add_argument("--json", type=Path, help="write the rows here, after each shape")
    parser.add_argument("--shapes", type=parse_shape, nargs="+", metavar="M,K,N", help="global sizes; default: all")
    parser.add_argument("--world", type=int, help="number of devices; default: all, with --check at most 4")
    parser.add_argument("--implementations", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument("--config", type=parse_config, metavar="KEY=VALUE,...", help="for the fused implementation")
    parser.add_argument("--seconds-per-shape", type=float, default=10.0, metavar="S", help="measuring; default: 10")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="of a step, then exit; default: 120")
    parser.add_argument("--commit", metavar="HASH", help="of this code, where it is no git checkout")
    parser.add_argument("--check", action="store_true", help="only check results, at tiny shapes, also without a GPU")
    return parser.parse_args(argv)


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
    on_gpu = jax.default_backend() == "gpu"
    common = environment() | ({"commit": args.commit} if args.commit else {})
    mesh = make_mesh(jax.devices()[:world])
    # Without the plain product there would be no floor.
    names = args.implementations if args.check else [*args.implementations, "gemm"]
    shapes = args.shapes or (shape_lists.ALL_GATHER_MATMUL_TINY if args.check else shape_lists.ALL_GATHER_MATMUL)

    console = Console(width=220)  # the whole table, also where there is no terminal
    settings = {key: value for key, value in sorted(os.environ.items()) if key.startswith(("NCCL_", "XLA_FLAGS"))}
    console.print(
        f"{world} x {common['gpu']}, JAX {common['jax']}, Triton {common['triton']}, commit {common['commit']}"
    )
    console.print(f"environment: {settings or 'no NCCL_* and no XLA_FLAGS'}", markup=False, highlight=False)
    if not (on_gpu or args.check):
        console.print("These are CPU devices: the times below say nothing about the kernels.")

    bandwidth = math.inf
    if not args.check:
        with guard("bandwidth between devices", args.timeout):
            measured = measure_bandwidths(mesh, (256 if on_gpu else 1) * 2**20)
        bandwidth = max(measured.values(), default=math.inf)
        found = ", ".join(f"{way} {value / 1e9:.0f}" for way, value in measured.items())
        console.print(f"GB/s received by a rank: {found or 'one device'}; the floors use the best")

    rows: list[Row] = []
    faults = 0
    for shape in shapes:
        shape_started = time.perf_counter()
        try:
            rows += bench_shape(
                shape,
                names,
                mesh,
                bandwidth=bandwidth,
                seconds=args.seconds_per_shape,
                timeout=args.timeout,
                config=args.config,
                check_only=args.check,
                common=common,
            )
        except Exception as error:
            # One shape, out of memory perhaps, must not cost the results of the others.
            faults += 1
            traceback.print_exc()
            console.print(f"{shape.name}: {reason(error)}", markup=False)
        if args.json:
            write_rows(args.json, rows)
        # The operands and executables of a shape are worth gigabytes; do not wait for the collector.
        gc.collect()
        console.print(f"{shape.name}: {time.perf_counter() - shape_started:.0f} s", highlight=False)

    table, notes = summarize(rows)
    if not args.check:
        console.print(f"{OP}: medians in microseconds a call, on one of {world} ranks", highlight=False)
        console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)
    faults += sum(map(is_fault, rows))
    passed = sum(row["checked"] == "ok" for row in rows)
    console.print(
        f"{passed} of {len(rows)} rows checked and right, {time.perf_counter() - started:.0f} s", markup=False
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
