"""Measures every operation on this machine and writes a folder about it: rows, a page with the tables, and plots.

    python benchmarks/report.py                                     # benchmarks/results/DATE-NxGPU/
    python benchmarks/report.py --operations decode_attention --seconds-per-shape 5
    python benchmarks/report.py --from benchmarks/results/2026-11-20-4xh200     # only the page and the plots

Each operation runs in a process of its own; arguments that are not known here go to `run.py`. A day's second report of
the same machine replaces the files of the operations that it measures.

Git ignores the plots, which can be drawn again. Exits with 1 if a run failed. What was measured is in the folder all
the same.
"""

import argparse
import datetime
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import plots
from benchmarks.operations import OPERATIONS
from benchmarks.summary import summarize
from benchmarks.table import ROOT, read, table

RESULTS = ROOT / "benchmarks" / "results"
PAGE = "README.md"


def machine() -> tuple[int, str]:
    """How many GPUs there are, and their kind. In another process, which gives their memory back."""
    code = "import jax; devices = jax.devices(); print(len(devices), devices[0].platform, devices[0].device_kind)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    count, platform, kind = done.stdout.strip().splitlines()[-1].split(" ", 2)
    if platform != "gpu":
        raise SystemExit("There is no GPU here. --from FOLDER draws what was measured elsewhere.")
    return int(count), kind


def folder_name(date: datetime.date, count: int, kind: str) -> str:
    return f"{date.isoformat()}-{count}x{kind.removeprefix('NVIDIA ').lower().replace(' ', '-')}"


def measure(folder: Path, operations: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Writes a file for each operation. Returns those whose run failed."""
    folder.mkdir(parents=True, exist_ok=True)
    program = ROOT / "benchmarks" / "run.py"
    return [
        name
        for name in operations
        if subprocess.run(
            [sys.executable, str(program), name, "--json", str(folder / f"{name}.json"), *arguments], check=False
        ).returncode
    ]


def section(path: Path) -> str:
    """A file's heading, table and what is to be said of it."""
    rows = read(path)
    operation = OPERATIONS[rows[0]["op"]]
    parts = [f"## {path.stem}", table(path, path.resolve().parent)]
    _, notes = summarize(operation, rows)
    if remarks := [*notes, *operation.remarks(rows)]:
        parts.append("\n".join(f"* {remark}" for remark in remarks))
    return "\n\n".join(parts)


def results_of(folder: Path) -> list[Path]:
    """The files of a folder that have results."""
    files = sorted(path for path in folder.glob("*.json") if read(path))
    if not files:
        raise SystemExit(f"{folder} has no results.")
    return files


def render(folder: Path) -> Path:
    """Writes the page of a folder of result files."""
    files = results_of(folder)
    machines = dict.fromkeys(f"{row['world']} x {row['gpu']}, {row['date']}" for path in files for row in read(path))
    introduction = (
        "Medians of one call. `benchmarks/run.py` says how it measures; `benchmarks/report.py` made this page. A time "
        "with ~ is of samples that lay more than 3 % apart. With `--from FOLDER` the latter draws plots of a folder."
    )
    page = folder / PAGE
    page.write_text("\n\n".join([f"# {'; '.join(machines)}", introduction, *map(section, files)]) + "\n")
    return page


def draw(folder: Path) -> list[Path]:
    """Draws two plots beside each result file, in which each peer stands by its fastest variant, and returns them."""
    pictures = []
    for path in results_of(folder):
        rows = read(path)
        if any(row["median_us"] for row in rows):
            for what, plot in (("times", plots.draw_times), ("speed-up", plots.draw_speedups)):
                pictures.append(path.with_name(f"{path.stem}-{what}.png"))
                plot(OPERATIONS[rows[0]["op"]], rows, pictures[-1])
    return pictures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog="Other arguments go to benchmarks/run.py."
    )
    parser.add_argument("--from", dest="folder", type=Path, help="measure nothing: use the results in this folder")
    parser.add_argument("--operations", nargs="+", choices=list(OPERATIONS), default=list(OPERATIONS))
    parser.add_argument("--world", type=int, help="number of GPUs; default: all")
    args, others = parser.parse_known_args(argv)
    failed: list[str] = []
    folder = args.folder
    if folder is None:
        count, kind = machine()
        folder = RESULTS / folder_name(datetime.date.today(), args.world or count, kind)
        failed = measure(folder, args.operations, [*(["--world", str(args.world)] if args.world else []), *others])
    elif others:
        parser.error(f"unknown with --from: {' '.join(others)}")
    print(render(folder))
    for picture in draw(folder):
        print(picture)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
