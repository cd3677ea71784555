"""Says what became slower or faster between two runs: python benchmarks/compare.py OLD NEW (result files or folders)

A change counts when it is larger than the noise: the distance of the 20th and the 80th percentile of either run's
samples, and at least --tolerance, because machines and clocks differ from run to run even where samples do not.

Exits with 1 if something made of our kernels became slower, or had a time and no longer has one.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.layout import Row
from benchmarks.operation import is_ours
from benchmarks.sampling import spread
from benchmarks.table import read

Key = tuple[str, str, int, str, str]  # operation, shape, ranks, mode, implementation


@dataclass(frozen=True, kw_only=True)
class Change:
    """One measurement in two runs.

    Attributes:
      old, new: microseconds; None without a right result.
      noise: what a change has to exceed, as a share.
    """

    key: Key
    old: float | None
    new: float | None
    noise: float

    @property
    def ratio(self) -> float | None:
        return self.new / self.old if self.old and self.new else None

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "lost" if self.old else "new"
        if abs(self.ratio - 1) <= self.noise:
            return "same"
        return "slower" if self.ratio > 1 else "faster"


def timed(rows: Sequence[Row]) -> dict[Key, Row]:
    """What has a time, the last where something was measured several times."""
    return {(*place_of(row), row["implementation"]): row for row in rows if row["median_us"]}


def place_of(row: Row) -> tuple[str, str, int, str]:
    """What tells a measurement from the others, but for the implementation."""
    l2 = row.get("l2", "usual")
    return row["op"], row["name"], row["world"], row["mode"] + (f", {l2} L2" if l2 != "usual" else "")


def compare(old: Sequence[Row], new: Sequence[Row], tolerance: float) -> list[Change]:
    """What both measured, and what OLD has of the operations and shapes that NEW has. The worst first."""
    before, after = timed(old), timed(new)
    tried = set(map(place_of, new))

    def noise_of(rows: Mapping[Key, Row], key: Key) -> float:
        row = rows.get(key)
        return spread(row["median_us"], row["p20_us"], row["p80_us"]) if row else 0.0

    changes = [
        Change(
            key=key,
            old=before[key]["median_us"] if key in before else None,
            new=after[key]["median_us"] if key in after else None,
            noise=max(tolerance, noise_of(before, key), noise_of(after, key)),
        )
        for key in dict.fromkeys([*before, *after])
        if key[:4] in tried
    ]
    return sorted(changes, key=lambda change: -(change.ratio or float("inf")))


def is_worse(change: Change) -> bool:
    return is_ours(change.key[-1]) and change.verdict in ("slower", "lost")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.02, metavar="SHARE", help="default: 0.02")
    args = parser.parse_args(argv)
    old, new = read(args.old), read(args.new)
    changes = compare(old, new, args.tolerance)

    console = Console(width=160)
    machines = [sorted({row["gpu"] for row in rows}) for rows in (old, new)]
    if machines[0] != machines[1]:
        console.print(f"Other machines: {', '.join(machines[0])}, then {', '.join(machines[1])}.", markup=False)
    table = Table(box=box.MARKDOWN)
    for heading in ("", "operation", "shape", "ranks", "mode", "implementation"):
        table.add_column(heading)
    for heading in ("old, us", "new, us", "new / old", "noise"):
        table.add_column(heading, justify="right")
    for change in changes:
        if change.verdict not in ("same", "new"):
            times = (f"{time:.1f}" if time else "" for time in (change.old, change.new))
            ratio = f"{change.ratio:.3f}" if change.ratio else ""
            table.add_row(change.verdict, *map(str, change.key), *times, ratio, f"{change.noise:.1%}")
    if table.row_count:
        console.print(table, markup=False)
    verdicts = [change.verdict for change in changes]
    counted = ", ".join(f"{verdicts.count(each)} {each}" for each in ("slower", "lost", "faster", "same", "new"))
    console.print(f"{counted}; of ours {sum(map(is_worse, changes))} worse", highlight=False)
    if not any(change.old for change in changes):
        console.print("Nothing was measured in both.")
    return 1 if any(map(is_worse, changes)) else 0


if __name__ == "__main__":
    sys.exit(main())
