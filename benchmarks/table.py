"""Prints the rows of a result file as a Markdown table: python benchmarks/table.py benchmarks/results/FILE.json

`python benchmarks/table.py --readme FILE.json` puts it into README.md, between the marks that name the table.
"""

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def table(path: Path) -> str:
    """One line per shape: times of the sustained mode in microseconds, and the speed-up of both modes."""
    rows = json.loads(path.read_text())
    shapes = dict.fromkeys((row["m"], row["k"], row["n"]) for row in rows)
    lines = [
        "| M, K, N | best XLA, µs | fused, µs | speed-up sustained / burst | floor, µs | floor / fused |",
        "|---|---|---|---|---|---|",
    ]
    for shape in shapes:
        sustained, burst = (_medians(rows, shape, mode) for mode in ("sustained", "burst"))
        floor = next(row["floor_us"] for row in rows if _is(row, shape, "sustained"))
        speed_up, in_burst = (_best_xla(times) / times["fused"] for times in (sustained, burst))
        cells = [
            ", ".join(map(str, shape)),
            f"{_best_xla(sustained):.0f}",
            f"{sustained['fused']:.0f}",
            f"{speed_up:.2f} / {in_burst:.2f}",
            f"{floor:.0f}",
            f"{floor / sustained['fused']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    run = rows[0]
    where = path.resolve().relative_to(ROOT)
    versions = f"{run['dtype']}, JAX {run['jax']}, Triton {run['triton']}, {run['date']}, commit {run['commit']}"
    lines += ["", f"{run['world']} x {run['gpu']}, {versions}: [`{where}`]({where})."]
    return "\n".join(lines)


def _is(row: dict[str, Any], shape: tuple, mode: str) -> bool:
    return (row["m"], row["k"], row["n"]) == shape and row["mode"] == mode


def _medians(rows: list[dict[str, Any]], shape: tuple, mode: str) -> dict[str, float]:
    return {row["implementation"]: row["median_us"] for row in rows if _is(row, shape, mode) and row["median_us"]}


def _best_xla(medians: dict[str, float]) -> float:
    return min(time for name, time in medians.items() if name.startswith("xla"))


def in_readme(readme: str, text: str) -> str:
    """The README with the table replaced by `text`."""
    head, _, rest = readme.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise ValueError(f"README.md has no place for the table: it needs the lines {BEGIN} and {END}.")
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    args = parser.parse_args()
    if args.readme:
        readme = ROOT / "README.md"
        readme.write_text(in_readme(readme.read_text(), table(args.file)))
    else:
        print(table(args.file))


if __name__ == "__main__":
    main()
