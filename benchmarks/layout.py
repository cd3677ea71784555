"""The lines of Markdown tables: times of the sustained mode, and how the fused kernel stands to the others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]

# Peers that not every machine can run, as tables name them.
OTHERS = {"pallas": "Pallas", "tokamax": "tokamax", "torch": "PyTorch"}
MISSING = "–"
NOISY_MARK = "~"  # samples lie far apart, see sampling.NOISY


def by_peer(rows: Sequence[Row], *, sizes: tuple[str, ...], heading: str, digits: int) -> list[str]:
    """Times of the sustained mode in microseconds, and the speed-up over XLA in both modes, over others sustained."""
    others = {
        name: peer for peer, name in OTHERS.items() if any(row["implementation"].startswith(peer) for row in rows)
    }
    lines = [
        _line(
            heading,
            "best XLA, µs",
            *(f"{name}, µs" for name in others),
            "fused, µs",
            "speed-up sustained / burst",
            *(f"over {name}" for name in others),
            "floor, µs",
            "floor / fused",
        )
    ]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for values in dict.fromkeys(tuple(row[size] for size in sizes) for row in rows):
        shape = dict(zip(sizes, values))
        sustained, burst = (fastest(rows, mode, **shape) for mode in ("sustained", "burst"))
        floor = _floor(rows, **shape)
        fused = sustained("fused")
        lines.append(
            _line(
                ", ".join(map(str, values)),
                _time(sustained("xla"), digits),
                *(_time(sustained(peer), digits) for peer in others.values()),
                _time(fused, digits),
                " / ".join(_ratio(_us(mode("xla")), _us(mode("fused"))) for mode in (sustained, burst)),
                *(_ratio(_us(sustained(peer)), _us(fused)) for peer in others.values()),
                f"{floor:.{digits}f}" if floor else MISSING,
                _ratio(floor, _us(fused)),
            )
        )
    return lines


def a_step_a_call(rows: Sequence[Row], *, sizes: tuple[str, ...], heading: str) -> list[str]:
    """Times of programs of one step, launched one after the other and waited for; no line if none was measured."""
    others = {
        name: peer for peer, name in OTHERS.items() if any(row["implementation"].startswith(peer) for row in rows)
    }
    columns = {"best XLA": "xla", **others, "fused": "fused"}
    lines = [_line(f"a step a call: {heading}", *(f"{name}, µs, launched / waited for" for name in columns))]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for values in dict.fromkeys(tuple(row[size] for size in sizes) for row in rows):
        shape = dict(zip(sizes, values))
        modes = [fastest(rows, mode, **shape) for mode in ("calls", "waited")]
        cells = [" / ".join(_time(mode(beginning)) for mode in modes) for beginning in columns.values()]
        if any(cell != f"{MISSING} / {MISSING}" for cell in cells):
            lines.append(_line(", ".join(map(str, values)), *cells))
    return lines if len(lines) > 2 else []


def attention(rows: Sequence[Row], targets_us: Mapping[tuple[int, int], float]) -> list[str]:
    """Times of the sustained mode in microseconds; targets by batch and keys of a rank."""
    lines = [
        "| batch, keys a rank | best XLA, µs | local kernel + gather, µs | fused, µs | speed-up over each "
        "| floor, µs | floor / fused | target, µs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for b, s in dict.fromkeys((row["b"], row["s"]) for row in rows):
        sustained = fastest(rows, "sustained", b=b, s=s)
        floor = _floor(rows, b=b, s=s)
        xla, gather, fused = sustained("xla"), sustained("local+gather"), sustained("fused")
        lines.append(
            _line(
                f"{b}, {s}",
                *(_time(row, 1) for row in (xla, gather, fused)),
                ", ".join(_ratio(_us(peer), _us(fused)) for peer in (xla, gather)),
                f"{floor:.1f}" if floor else MISSING,
                _ratio(floor, _us(fused)),
                str(targets_us.get((b, s), "")),
            )
        )
    return lines


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _of_shape(rows: Sequence[Row], mode: str, sizes: dict[str, int]) -> list[Row]:
    return [row for row in rows if row["mode"] == mode and all(row[size] == value for size, value in sizes.items())]


def fastest(rows: Sequence[Row], mode: str, /, **sizes: int) -> Callable[[str], Row | None]:
    """Gives, for the beginning of a name, the row with the least time of all such names, of what was found right.

    Configurations that were tried beside the default ("fused[...]") do not count.
    """
    timed = [row for row in _of_shape(rows, mode, sizes) if row["median_us"] and "[" not in row["implementation"]]

    def of(beginning: str) -> Row | None:
        named = (row for row in timed if row["implementation"].startswith(beginning))
        return min(named, key=lambda row: row["median_us"], default=None)

    return of


def _floor(rows: Sequence[Row], /, **sizes: int) -> float | None:
    return next((row["floor_us"] for row in _of_shape(rows, "sustained", sizes)), None)


def _us(row: Row | None) -> float | None:
    return row["median_us"] if row else None


def _time(row: Row | None, digits: int = 0) -> str:
    return f"{row['median_us']:.{digits}f}{NOISY_MARK if row.get('noisy') else ''}" if row else MISSING


def _ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}" if above and below else MISSING
