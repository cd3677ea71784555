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
configurations at each shape; the row names it. tokamax is that library's product by groups for Hopper
(`tokamax_peer.py`), the fastest of 32. torch is PyTorch's asynchronous tensor parallelism, in processes of its own
after the rest (`torch_async_tp.py`). Neither pallas nor torch uses NVLink multicast.

Modes, whose figures must not be compared with each other, because GPUs lower their clocks under load:

sustained: host clock around about 40 ms of programs queued back to back, directly after more of the same.
burst: host clock around about 8 ms of programs, after 0.1 s of idleness. It includes the dispatch of one program, 0.3
    to 1.2 ms, which weighs equally on all implementations but torch, whose first kernels run while it launches more.

calls, waited: of a program that takes many steps, the same with each step in a call of its own, as servers run them.
    The host launches one after the other (calls), or waits for each before it launches the next (waited).

All are wall time over the number of calls, with nothing subtracted. A time whose samples lie more than 3 % apart (the
20th and the 80th percentile) is marked as noisy. `operation.py` describes the program that is timed; `matmuls.py`,
`mlp.py`, `attention.py`, `decode_step.py`, `collectives.py` and `ragged.py` describe the operations, what they are
compared with, and their floors.

Calls follow each other without a pause, and nothing is flushed between them. --l2 says what they find of weights or
keys and values in the L2 cache. cold: nothing, since they take turns between so many that twice the cache is read in
between. warm: as much as fits, since all calls have the same. Each call has an x of its own in any case. usual:

decode_attention: nothing. Each call of a chain has a cache of its own, together many times the L2 cache.
decode_step: nothing. A step reads many times the L2 cache.
all_gather_matmul, gated or not, matmul_reduce_scatter, matmul_all_reduce, mlp_gradients: what the call before has left
    of the weights, 29 MB a rank and more at the listed shapes on four. Calls of few rows take turns between two weights
    and find neither. Each call of a chain has its own lhs.
psum, all_gather, psum_scatter, all_to_all: their operands, but for the largest: each call of a chain has its own, and
    the chain is repeated in a loop. So it is with few rows of ragged_all_to_all.

Exits with 1 when a result was wrong, the fused implementation failed, or a shape could not be measured at all. A peer
that cannot be compiled or run, and an implementation that refuses a shape with NotImplementedError, are reported and
left out.
"""

import argparse
import ast
import gc
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import torch_peer
from benchmarks.layout import Row
from benchmarks.measure import bench_shape
from benchmarks.operation import AXIS, FLAG_SETS, L2, Config, Implementation, Operation, family, make_mesh, variant
from benchmarks.operations import OPERATIONS
from benchmarks.rows import environment, is_fault, reason, torch_rows, write_rows
from benchmarks.sampling import MODES, STEPWISE
from benchmarks.summary import summarize
from benchmarks.timing import guard

CHECK_WORLD = 4
# The whole table with every peer, also where there is no terminal.
WIDTH = 280


@contextmanager
def steps(console: Console, total: int) -> Generator[Callable[[str], None]]:
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
    names = [mode.name for mode in (*MODES, *STEPWISE)]
    parser.add_argument("--modes", nargs="+", choices=names, default=names, help="default: all that an operation has")
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
    shapes = args.shapes or (operation.tiny_shapes if args.check else operation.shapes_for(world))
    known = (*MODES, *(STEPWISE if any(map(operation.stepwise, implementations)) else ()))
    modes = [] if args.check else [mode for mode in known if mode.name in args.modes]
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
        if with_torch:
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
    gc.freeze()  # what is imported stays: collections behind each shape need not look at it
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
