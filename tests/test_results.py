"""The figures in the README are those of a result file in the repository."""

import json
import re

import pytest

from benchmarks import table
from benchmarks.shapes import ALL_GATHER_MATMUL

README = (table.ROOT / "README.md").read_text()


def results() -> list:
    return sorted((table.ROOT / "benchmarks" / "results").glob("all_gather_matmul*.json"))


def test_readme_shows_a_committed_file():
    shown = re.search(r"\[`(benchmarks/results/[^`]+)`\]", README)
    assert shown is not None
    path = table.ROOT / shown[1]
    assert path in results()
    assert table.in_readme(README, table.table(path)) == README


@pytest.mark.parametrize("path", results(), ids=lambda path: path.name)
def test_committed_files_are_whole(path):
    """Every shape has checked times of the fused kernel and of XLA, and says where they were taken."""
    rows = json.loads(path.read_text())
    for shape in ALL_GATHER_MATMUL:
        for mode in ("sustained", "burst"):
            of_shape = [row for row in rows if table._is(row, (shape.m, shape.k, shape.n), mode)]
            timed = {row["implementation"] for row in of_shape if row["median_us"] and row["checked"] == "ok"}
            assert {"fused", "gemm"} < timed
            assert any(name.startswith("xla") for name in timed)
    keys = ("world", "gpu", "jax", "triton", "commit", "date", "p20_us", "p80_us", "floor_us", "config", "dtype", "op")
    assert all(key in row for row in rows for key in keys)
    assert not any(row["commit"].endswith("-dirty") or row["commit"] == "unknown" for row in rows)


def test_a_readme_without_a_place_for_the_table():
    with pytest.raises(ValueError, match="no place"):
        table.in_readme("# no marks", "table")
