"""Prints the rows of a result file as a Markdown table: python benchmarks/table.py benchmarks/results/FILE.json

`python benchmarks/table.py --write FILE.json` puts it into README.md or docs/benchmarks.md, between the marks of its
operation. A time whose samples lay more than 3 % apart has a ~.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.shapes import DECODE_ATTENTION_TARGETS_US  # noqa: E402

Row = dict[str, Any]

# Where tables stand, that of an operation in one of them.
DOCUMENTS = (Path("README.md"), Path("docs/benchmarks.md"))
# Peers that not every machine can run, as tables name them.
OTHERS = {"pallas": "Pallas", "torch": "PyTorch"}
MISSING = "–"
NOISY_MARK = "~"  # samples lie far apart, see sampling.NOISY


def marks(op: str) -> tuple[str, str]:
    """The lines of a document between which the table of an operation stands."""
    return f"<!-- results of {op}: begin -->", f"<!-- results of {op}: end -->"


def read(path: Path) -> list[Row]:
    """The rows of a file, or of all files in a folder, in the order of their names."""
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    return [row for file in files for row in json.loads(file.read_text())]


def table(path: Path, folder: Path | None = None) -> str:
    """One line per shape, and where and when it was measured. The link to the file is for a document in `folder`."""
    rows = read(path)
    lines = TABLES[rows[0]["op"]](rows)
    run = rows[0]
    where = os.path.relpath(path.resolve(), folder or ROOT)
    versions = f"{run['dtype']}, JAX {run['jax']}, Triton {run['triton']}, {run['date']}, commit {run['commit']}"
    if (l2 := run.get("l2", "usual")) != "usual":
        versions += f", L2 cache {l2}"
    return "\n".join([*lines, "", f"{run['world']} x {run['gpu']}, {versions}: [`{where}`]({where})."])


def _by_peer(rows: list[Row], *, sizes: tuple[str, ...], heading: str, digits: int) -> list[str]:
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


def _attention(rows: list[Row]) -> list[str]:
    """Times of the sustained mode in microseconds."""
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
                str(DECODE_ATTENTION_TARGETS_US.get((b, s), "")),
            )
        )
    return lines


_matmul = partial(_by_peer, sizes=("m", "k", "n"), heading="M, K, N", digits=0)
_collective = partial(_by_peer, sizes=("nbytes",), heading="bytes a rank", digits=1)

TABLES: dict[str, Callable[[list[Row]], list[str]]] = {
    "all_gather_matmul": _matmul,
    "gated_all_gather_matmul": _matmul,
    "matmul_reduce_scatter": _matmul,
    "matmul_all_reduce": partial(_matmul, digits=1),
    "mlp_gradients": _matmul,
    "decode_attention": _attention,
    "decode_step": partial(_by_peer, sizes=("b", "context"), heading="sequences, tokens of each", digits=0),
    "psum": _collective,
    "all_gather": _collective,
    "psum_scatter": _collective,
}


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _of_shape(rows: list[Row], mode: str, sizes: dict[str, int]) -> list[Row]:
    return [row for row in rows if row["mode"] == mode and all(row[size] == value for size, value in sizes.items())]


def fastest(rows: list[Row], mode: str, **sizes: int) -> Callable[[str], Row | None]:
    """Gives, for the beginning of a name, the row with the least time of all such names, of what was found right.

    Configurations that were tried beside the default ("fused[...]") do not count.
    """
    timed = [row for row in _of_shape(rows, mode, sizes) if row["median_us"] and "[" not in row["implementation"]]

    def of(beginning: str) -> Row | None:
        named = (row for row in timed if row["implementation"].startswith(beginning))
        return min(named, key=lambda row: row["median_us"], default=None)

    return of


def _floor(rows: list[Row], **sizes: int) -> float | None:
    return next((row["floor_us"] for row in _of_shape(rows, "sustained", sizes)), None)


def _us(row: Row | None) -> float | None:
    return row["median_us"] if row else None


def _time(row: Row | None, digits: int = 0) -> str:
    return f"{row['median_us']:.{digits}f}{NOISY_MARK if row.get('noisy') else ''}" if row else MISSING


def _ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.2f}" if above and below else MISSING


def document_of(op: str) -> Path:
    """The document with a place for the table of an operation. Raises ValueError if there is none."""
    begin, end = marks(op)
    for document in DOCUMENTS:
        if end in (ROOT / document).read_text().partition(begin)[2]:
            return ROOT / document
    names = ", ".join(map(str, DOCUMENTS))
    raise ValueError(f"There is no place for the table of {op} in {names}: it needs the lines {begin} and {end}.")


def with_table(path: Path) -> tuple[Path, str]:
    """The document of a result file's operation, and its text with the table of that file."""
    op = read(path)[0]["op"]
    document, (begin, end) = document_of(op), marks(op)
    head, _, rest = document.read_text().partition(begin)
    return document, f"{head}{begin}\n{table(path, document.parent)}\n{end}{rest.partition(end)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--write", action="store_true", help="write the table into the document that has a place for it"
    )
    args = parser.parse_args()
    if args.write:
        document, text = with_table(args.file)
        document.write_text(text)
    else:
        print(table(args.file))


if __name__ == "__main__":
    main()
