"""Draws the rows of one operation: times against a size with the floor, and the speed-up over every peer."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, NullLocator

from benchmarks.layout import Row
from benchmarks.operation import Operation, family

# Families have the same color in every plot; those that are not named take the next of the rest.
COLORS = {"fused": "#1b7837", "xla": "#4575b4", "xla_auto": "#91bfdb", "pallas": "#d6604d", "torch": "#ee9a3a"}
MORE_COLORS = ("#762a83", "#8c6d31", "#7b7b7b", "#c51b7d")
FLOOR: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1, "label": "floor"}


def best_rows(operation: Operation, rows: Sequence[Row]) -> dict[str, dict[tuple[str, str], Row]]:
    """By family and then by (shape, mode) the row with the least time; the parts and other configurations left out."""
    best: dict[str, dict[tuple[str, str], Row]] = {}
    for row in rows:
        name, place = row["implementation"], (row["name"], row["mode"])
        if row["median_us"] and name not in operation.parts and "[" not in name:
            of_family = best.setdefault(family(name), {})
            if place not in of_family or row["median_us"] < of_family[place]["median_us"]:
                of_family[place] = row
    # Ours is drawn last, on top.
    return dict(sorted(best.items(), key=lambda item: item[0] == "fused"))


def color_of(families: Sequence[str]) -> dict[str, str]:
    more = iter(MORE_COLORS)
    return {each: COLORS.get(each) or next(more, "#333333") for each in families}


def modes_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["mode"] for row in rows))


def panels(operation: Operation, rows: Sequence[Row]) -> tuple[str, list[tuple[str, list[Row]]]]:
    """A size, and groups of rows that differ in no other one, each under a title that says the others.

    Of all sizes the last of those that make the largest group, and of its groups those of two shapes and more. No size
    and one group, if there is none.
    """
    found: tuple[int, str, dict[tuple[int, ...], list[Row]]] = (1, "", {})
    for size in operation.sizes:
        groups: dict[tuple[int, ...], list[Row]] = {}
        for row in rows:
            groups.setdefault(tuple(row[other] for other in operation.sizes if other != size), []).append(row)
        largest = max(len({row[size] for row in group}) for group in groups.values())
        if largest > 1 and largest >= found[0]:
            found = (largest, size, groups)
    _, size, groups = found
    others = [other for other in operation.sizes if other != size]
    titled = [
        (", ".join(f"{other} {value}" for other, value in zip(others, values)), group)
        for values, group in groups.items()
        if len({row[size] for row in group}) > 1
    ]
    return size, titled or [("", list(rows))]


def draw_times(operation: Operation, rows: Sequence[Row], path: Path) -> None:
    """Medians with the 20th and 80th percentile, a row of panels for each mode."""
    size, groups = panels(operation, rows)
    modes = modes_of(rows)
    with _figure(path, max(5.5 * len(groups), 7), 3.8 * len(modes)) as drawn:
        grid = drawn.subplots(len(modes), len(groups), squeeze=False, sharey="row")
        families = list(best_rows(operation, rows))
        colors = color_of(families)
        for axes_of_mode, mode in zip(grid, modes):
            for axes, (title, group) in zip(axes_of_mode, groups):
                _draw_panel(axes, operation, [row for row in group if row["mode"] == mode], size, colors)
                axes.set_title(f"{mode}, {title}" if title else mode)
            axes_of_mode[0].set_ylabel("µs a call")
        _legend(drawn)


def _draw_panel(axes: Axes, operation: Operation, rows: Sequence[Row], size: str, colors: dict[str, str]) -> None:
    places = {row["name"]: row[size] if size else index for index, row in enumerate(_one_a_shape(rows))}
    for each, best in best_rows(operation, rows).items():
        timed = sorted(best.values(), key=lambda row: places[row["name"]])
        medians = [row["median_us"] for row in timed]
        below = [row["median_us"] - row["p20_us"] for row in timed]
        above = [row["p80_us"] - row["median_us"] for row in timed]
        axes.errorbar(
            [places[row["name"]] for row in timed], medians, (below, above), marker="o", markersize=4, capsize=2,
            linewidth=1.8 if each == "fused" else 1.2, linestyle="-" if size else "", color=colors[each], label=each,
        )  # fmt: skip
    floors = sorted((places[row["name"]], row["floor_us"]) for row in _one_a_shape(rows) if row["floor_us"])
    if floors:
        style = FLOOR if size else FLOOR | {"linestyle": "", "marker": "_", "markersize": 18}
        axes.plot(*zip(*floors), **style)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))  # where there are few major ones
    if size:
        axes.set_xscale("log")
        axes.set_xlabel(size)
    labels = [str(place) for place in places.values()] if size else [_stacked(name) for name in places]
    axes.set_xticks(list(places.values()), labels=labels)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)


def draw_speedups(operation: Operation, rows: Sequence[Row], path: Path) -> None:
    """The time of each peer over that of the fused kernel, at every shape, a panel for each mode."""
    best = best_rows(operation, rows)
    fused = best.pop("fused", {})
    peers = list(best)
    colors = color_of(peers)
    shapes = [row["name"] for row in _one_a_shape(rows)]
    modes = modes_of(rows)
    with _figure(path, max(1.5 * len(shapes), 7), 3.4 * len(modes)) as drawn:
        for axes, mode in zip(drawn.subplots(len(modes), 1, squeeze=False)[:, 0], modes):
            width = 0.8 / max(len(peers), 1)
            for i, peer in enumerate(peers):
                both = [n for n, shape in enumerate(shapes) if {(shape, mode)} <= best[peer].keys() & fused.keys()]
                ratios = [best[peer][shapes[n], mode]["median_us"] / fused[shapes[n], mode]["median_us"] for n in both]
                at = [n + (i - (len(peers) - 1) / 2) * width for n in both]
                bars = axes.bar(at, ratios, width, color=colors[peer], label=peer)
                axes.bar_label(bars, fmt="%.2f", fontsize=6, padding=1)
            axes.axhline(1, color="black", linewidth=1)
            axes.set(title=mode, ylabel="time / fused", xlim=(-0.6, len(shapes) - 0.4))
            axes.set_xticks(range(len(shapes)), labels=map(_stacked, shapes), fontsize=7)
        _legend(drawn)


def _one_a_shape(rows: Sequence[Row]) -> Iterator[Row]:
    return iter({row["name"]: row for row in rows}.values())


def _stacked(name: str) -> str:
    return name.replace("/", "\n")


@contextmanager
def _figure(path: Path, width: float, height: float) -> Generator[Figure]:
    """Is written to `path` at the end of a `with` block."""
    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    yield drawn
    drawn.savefig(path, dpi=110)


def _legend(drawn: Figure) -> None:
    """One for all panels."""
    named = {}
    for axes in drawn.axes:
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles))
    drawn.legend(list(named.values()), list(named), loc="outside upper center", ncols=min(len(named), 4) or 1)
