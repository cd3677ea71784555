"""Prints the rows of a result file as a Markdown table: python benchmarks/table.py benchmarks/results/FILE.json

`python benchmarks/table.py --write FILE.json` puts it into README.md or docs/benchmarks.md, between the marks of its
operation. A time whose samples lay more than 3 % apart has a ~.
"""

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.layout import Row  # noqa: E402
from benchmarks.operations import OPERATIONS  # noqa: E402

# Where tables stand, that of an operation in one of them.
DOCUMENTS = (Path("README.md"), Path("docs/benchmarks.md"))


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
    lines = OPERATIONS[rows[0]["op"]].table(rows)
    run = rows[0]
    where = os.path.relpath(path.resolve(), folder or ROOT)
    versions = f"{run['dtype']}, JAX {run['jax']}, Triton {run['triton']}, {run['date']}, commit {run['commit']}"
    if (l2 := run.get("l2", "usual")) != "usual":
        versions += f", L2 cache {l2}"
    return "\n".join([*lines, "", f"{run['world']} x {run['gpu']}, {versions}: [`{where}`]({where})."])


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
