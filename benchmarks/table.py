"""Prints the rows of a result file as a Markdown table: python benchmarks/table.py benchmarks/results/FILE.json

`python benchmarks/table.py --readme FILE.json` puts it into README.md, between the marks of its operation.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.shapes import DECODE_ATTENTION_TARGETS_US  # noqa: E402

Row = dict[str, Any]
Medians = dict[str, float]  # microseconds by implementation


def marks(op: str) -> tuple[str, str]:
    """The lines of README.md between which the table of an operation stands."""
    return f"<!-- results of {op}: begin -->", f"<!-- results of {op}: end -->"


def table(path: Path) -> str:
    """One line per shape, and where and when it was measured."""
    rows = json.loads(path.read_text())
    lines = TABLES[rows[0]["op"]](rows)
    run = rows[0]
    where = path.resolve().relative_to(ROOT)
    versions = f"{run['dtype']}, JAX {run['jax']}, Triton {run['triton']}, {run['date']}, commit {run['commit']}"
    return "\n".join([*lines, "", f"{run['world']} x {run['gpu']}, {versions}: [`{where}`]({where})."])


def _matmul(rows: list[Row]) -> list[str]:
    """Times of the sustained mode in microseconds, and the speed-up of both modes."""
    lines = [
        "| M, K, N | best XLA, µs | fused, µs | speed-up sustained / burst | floor, µs | floor / fused |",
        "|---|---|---|---|---|---|",
    ]
    for shape in dict.fromkeys((row["m"], row["k"], row["n"]) for row in rows):
        sustained, burst = (medians(rows, mode, m=shape[0], k=shape[1], n=shape[2]) for mode in ("sustained", "burst"))
        floor = _floor(rows, m=shape[0], k=shape[1], n=shape[2])
        speed_up, in_burst = (_best(times, "xla") / times["fused"] for times in (sustained, burst))
        lines.append(
            _line(
                ", ".join(map(str, shape)),
                f"{_best(sustained, 'xla'):.0f}",
                f"{sustained['fused']:.0f}",
                f"{speed_up:.2f} / {in_burst:.2f}",
                f"{floor:.0f}",
                f"{floor / sustained['fused']:.2f}",
            )
        )
    return lines


def _attention(rows: list[Row]) -> list[str]:
    """Times of the sustained mode in microseconds."""
    lines = [
        "| batch, keys a rank | best XLA, µs | local kernel + gather, µs | fused, µs | speed-up over each "
        "| floor, µs | floor / fused | target, µs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for b, s in dict.fromkeys((row["b"], row["s"]) for row in rows):
        times = medians(rows, "sustained", b=b, s=s)
        floor = _floor(rows, b=b, s=s)
        xla, gather, fused = _best(times, "xla"), _best(times, "local+gather"), times["fused"]
        lines.append(
            _line(
                f"{b}, {s}",
                f"{xla:.1f}",
                f"{gather:.1f}",
                f"{fused:.1f}",
                f"{xla / fused:.2f}, {gather / fused:.2f}",
                f"{floor:.1f}",
                f"{floor / fused:.2f}",
                str(DECODE_ATTENTION_TARGETS_US.get((b, s), "")),
            )
        )
    return lines


TABLES: dict[str, Callable[[list[Row]], list[str]]] = {
    "all_gather_matmul": _matmul,
    "matmul_reduce_scatter": _matmul,
    "mlp_gradients": _matmul,
    "decode_attention": _attention,
}


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _of_shape(rows: list[Row], mode: str, sizes: dict[str, int]) -> list[Row]:
    return [row for row in rows if row["mode"] == mode and all(row[size] == value for size, value in sizes.items())]


def medians(rows: list[Row], mode: str, **sizes: int) -> Medians:
    """The times of a shape, of what was checked and found right."""
    return {row["implementation"]: row["median_us"] for row in _of_shape(rows, mode, sizes) if row["median_us"]}


def _floor(rows: list[Row], **sizes: int) -> float:
    return _of_shape(rows, "sustained", sizes)[0]["floor_us"]


def _best(times: Medians, beginning: str) -> float:
    return min(time for name, time in times.items() if name.startswith(beginning))


def in_readme(readme: str, op: str, text: str) -> str:
    """The README with the table of an operation replaced by `text`."""
    begin, end = marks(op)
    head, _, rest = readme.partition(begin)
    _, mark, tail = rest.partition(end)
    if not mark:
        raise ValueError(f"README.md has no place for the table of {op}: it needs the lines {begin} and {end}.")
    return f"{head}{begin}\n{text}\n{end}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    args = parser.parse_args()
    if args.readme:
        readme = ROOT / "README.md"
        op = json.loads(args.file.read_text())[0]["op"]
        readme.write_text(in_readme(readme.read_text(), op, table(args.file)))
    else:
        print(table(args.file))


if __name__ == "__main__":
    main()
