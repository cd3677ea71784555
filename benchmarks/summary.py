"""What a run prints of an operation: tables for the terminal, and the reason for every time that is missing."""

import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from benchmarks.layout import NOISY_MARK, Row
from benchmarks.operation import Operation, family, variant


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
