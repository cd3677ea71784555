"""Iris's kernels beside our operations and XLA's, each through `jaxtaxfree.iris_call` in the same run.

JAXTAXFREE_IRIS_EXAMPLES=/path/to/iris python benchmarks/iris.py [op ...] [what benchmarks/run.py takes]
python benchmarks/iris.py --page benchmarks/results/FOLDER     # measures nothing: a page, and docs/iris.md

Operations: all_gather_matmul_columns (Iris's example 14, pull and push, and `iris.ops.all_gather_matmul_hbm_buffer`),
decode_attention (example 13) and psum (example 16). The kernels are Iris's; how they are called is in iris_kernels.py.
Of each kernel some settings are tried, and the fastest is timed: Iris's own are for another GPU.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from benchmarks import iris_kernels, layout, operations, run
from benchmarks.attention import REFERENCE as ATTENTION
from benchmarks.attention import DecodeAttention
from benchmarks.collectives import Psum
from benchmarks.columns import GATHER_REFERENCE, AllGatherMatmulColumns
from benchmarks.layout import Row
from benchmarks.operation import AXIS, Config, Implementation
from benchmarks.table import ROOT, read
from jaxtaxfree.iris import home_of_iris

OWN_FUNCTIONS = "-own-functions"
DOCUMENT = ROOT / "docs" / "iris.md"
MARKS = ("<!-- results of Iris's kernels: begin -->", "<!-- results of Iris's kernels: end -->")
EXAMPLES = {"flash_decode": "13", "pull": "14, pull", "push": "14, push", "ring": "16", "hbm_buffer": "ops, HBM buffer"}

_BLOCKS = (
    {"blocks": (128, 128, 64), "num_warps": 4, "num_stages": 4},
    {"blocks": (128, 128, 64), "num_warps": 8, "num_stages": 3},
    {"blocks": (128, 256, 64), "num_warps": 8, "num_stages": 3},
)
_FETCHED = tuple({**each, "fetchers": count} for each in _BLOCKS[1:] for count in (16, 32))


def _gather(function: Any, x: jax.Array, y: jax.Array, *, config: Config, own: bool = True) -> jax.Array:
    return function(x, y, AXIS, own=own, **config)


def _attention(x: jax.Array, y: Any, *, config: Config, own: bool = True) -> jax.Array:
    key, value, *_ = y
    lengths = jnp.full((jax.lax.axis_size(AXIS), key.shape[0]), key.shape[1], jnp.int32)  # caches are full
    return iris_kernels.flash_decode(x, key, value, lengths, AXIS, own=own, **config)


def _ring(x: jax.Array, y: Any, *, config: Config, own: bool = True) -> jax.Array:
    del y
    return iris_kernels.ring_all_reduce(x.reshape(-1, 64), AXIS, own=own, **config).reshape(x.shape)


def _both(
    reference: Implementation, name: str, call: Any, alternatives: tuple[Config, ...]
) -> dict[str, Implementation]:
    """A kernel of Iris's with our device functions, and with its own."""
    return {
        f"iris/{name}{suffix}": replace(
            reference, name=f"iris/{name}{suffix}", call=partial(call, own=own), alternatives=alternatives
        )
        for suffix, own in (("", True), (OWN_FUNCTIONS, False))
    }


class Gather(AllGatherMatmulColumns):
    peers = ("xla", "iris")

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        functions = {
            "pull": (iris_kernels.gather_matmul_pull, _BLOCKS),
            "push": (iris_kernels.gather_matmul_push, _BLOCKS),
            "hbm_buffer": (iris_kernels.gather_matmul_hbm, _FETCHED),
        }
        known = super().implementations(configs)
        for name, (function, alternatives) in functions.items():
            known |= _both(GATHER_REFERENCE, name, partial(_gather, function), alternatives)
        return known


class Attention(DecodeAttention):
    peers = ("xla", "local+gather", "iris")

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        alternatives = tuple({"splits": splits, "block": block} for splits in (16, 32, 64) for block in (64, 128))
        return super().implementations(configs) | _both(ATTENTION, "flash_decode", _attention, alternatives)


class AllReduce(Psum):
    peers = ("xla", "iris")

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        known = super().implementations(configs)
        alternatives = tuple({"blocks": (rows, 64), "programs": 128} for rows in (16, 64))
        return known | _both(known["fused"], "ring", _ring, alternatives)


OPERATIONS = {each.name: each for each in (Gather(), Attention(), AllReduce())}


def table(folder: Path) -> str:
    """A line for each of Iris's kernels and each shape, of the rows in a folder: sustained, in microseconds."""
    columns = ("operation", "sizes", "Iris's kernel", "by `iris_call`, µs", "with Iris's functions, µs", "ours, µs")
    lines = [f"| {' | '.join((*columns, 'best XLA, µs'))} |", "|---" * 7 + "|"]
    for op, sizes, rows in _runs(folder):
        best = partial(_best, rows)
        names = dict.fromkeys(row["implementation"].removesuffix(OWN_FUNCTIONS) for row in rows)
        for name in names:
            if name.startswith("iris/"):
                times = best(name), best(name + OWN_FUNCTIONS), best("fused"), best("xla")
                kernel = EXAMPLES[name.removeprefix("iris/")]
                lines.append(f"| `{op}` | {', '.join(map(str, sizes))} | {kernel} | {' | '.join(times)} |")
    run = read(folder)[0]
    where = f"{run['world']} x {run['gpu']}, {run['dtype']}, JAX {run['jax']}, Triton {run['triton']}, {run['date']}"
    return "\n".join([*lines, "", where])


def _runs(folder: Path) -> Iterator[tuple[str, tuple[int, ...], list[Row]]]:
    """The operations and sizes in each file of a folder, and their sustained rows: those of one run."""
    for file in sorted(folder.glob("*.json")):
        rows = [row for row in read(file) if row["mode"] == "sustained"]
        operation = OPERATIONS[rows[0]["op"]]
        for sizes in dict.fromkeys(map(operation.sizes_of, rows)):
            yield operation.name, sizes, [row for row in rows if operation.sizes_of(row) == sizes]


def _best(rows: Sequence[Row], name: str) -> str:
    """The least time of an implementation, or of all variants of a peer."""
    named = [row for row in rows if row["implementation"] == name or row["implementation"].startswith(f"{name}/")]
    named += [row for row in rows if name == "xla" and row["implementation"].startswith("xla_")]
    timed = [row for row in named if row["median_us"]]
    if not timed:
        return layout.MISSING
    least = min(timed, key=lambda row: row["median_us"])
    return f"{least['median_us']:.1f}{layout.NOISY_MARK if least['noisy'] else ''}"


def page(folder: Path) -> str:
    """What a folder of such results says: the table, and the settings that were the fastest."""
    rows = [row for row in read(folder) if row["mode"] == "sustained" and row["implementation"].startswith("iris/")]
    settings = [
        f"* `{row['op']}` {OPERATIONS[row['op']].sizes_of(row)}, {row['implementation']}: "
        + (f"{row['config']}" if row["median_us"] else row["checked"])
        for row in rows
    ]
    run = rows[0]
    title = f"# {run['world']} x {run['gpu']}, {run['date']}: Iris's kernels"
    introduction = (
        "Medians of one call, queued back to back. `benchmarks/iris.py` made the files and this page. Each of Iris's "
        "kernels ran with several settings, of which the fastest is shown:"
    )
    return "\n\n".join([title, f"{table(folder)}.", introduction, "\n".join(settings)]) + "\n"


def with_table(folder: Path) -> str:
    """The text of docs/iris.md with the table of a folder."""
    head, _, rest = DOCUMENT.read_text().partition(MARKS[0])
    where = f"benchmarks/results/{folder.name}"
    return f"{head}{MARKS[0]}\n{table(folder)}: [`{where}`](../{where}).\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["--page"]:
        folder = Path(argv[1])
        (folder / "README.md").write_text(page(folder))
        DOCUMENT.write_text(with_table(folder))
        return 0
    if iris_kernels.checkout() is None or home_of_iris() is None:
        raise SystemExit("JAXTAXFREE_IRIS_EXAMPLES names no checkout of Iris, or its package is not installed.")
    operations.OPERATIONS.update(OPERATIONS)
    named = any(each in OPERATIONS for each in argv)
    return run.main(argv if named else [*OPERATIONS, *argv])


if __name__ == "__main__":
    sys.exit(main())
