"""Rows of results: what a run writes of each measurement, and of itself."""

import datetime
import importlib.metadata
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import torch_peer
from benchmarks.layout import Row
from benchmarks.operation import DTYPE, Implementation, Operation, is_ours
from benchmarks.sampling import NOISY, quantiles, spread


def commit() -> str:
    """The commit of this checkout, with "-dirty" when tracked files differ from it."""

    def git(*args: str) -> str:
        folder = Path(__file__).resolve().parent
        return subprocess.run(["git", *args], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()

    try:
        revision = git("rev-parse", "--short", "HEAD")
        return revision + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def environment() -> Row:
    """The columns that are the same for every row of a run."""
    return {
        "gpu": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "triton": version("triton"),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def make_row(
    operation: Operation,
    shape: Any,
    implementation: Implementation | torch_peer.Found,
    *,
    world: int,
    mode: str,
    checked: str,
    samples: Sequence[float] = (),
    floor: float | None = None,
    common: Row,
) -> Row:
    """One measurement as it is written to JSON. Without samples, or with a failed check, it carries no time."""
    median = p20 = p80 = None
    noisy = False
    if samples and checked == "ok":
        median, p20, p80 = (round(value, 3) for value in quantiles(samples))
        noisy = spread(median, p20, p80) > NOISY
    # A part of the operation may well be faster than the floor of the whole.
    ratio = round(floor / median, 4) if median and floor and implementation.name not in operation.parts else None
    return {
        "op": operation.name,
        **dict(zip(operation.sizes, operation.sizes_of(shape))),
        "dtype": jnp.dtype(DTYPE).name,
        "world": world,
        "implementation": implementation.name,
        "config": implementation.config,
        "median_us": median,
        "p20_us": p20,
        "p80_us": p80,
        "floor_us": None if floor is None else round(floor, 3),
        **common,
        "mode": mode,
        "name": shape.name,
        "ratio_to_floor": ratio,
        "checked": checked,
        "noisy": noisy,
    }


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """A JSON list with one row a line. An interrupted run leaves the previous file whole."""
    partial_file = path.with_name(path.name + ".part")
    partial_file.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    partial_file.replace(path)


def judge(error: float, tolerance: float = Implementation.tolerance) -> str:
    # Spelled so that NaN fails.
    return "ok" if error < tolerance else f"wrong: relative error {error:.3g}"


def one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def reason(error: Exception) -> str:
    kind = "refused" if isinstance(error, NotImplementedError) else f"failed: {type(error).__name__}"
    return one_line(f"{kind}: {error}")


def torch_rows(
    operation: Operation,
    found: Sequence[torch_peer.Found],
    beside: Sequence[Row],
    *,
    world: int,
    modes: Sequence[str],
    common: Row,
) -> list[Row]:
    """The rows of what PyTorch did, with the floors of the rows of the same run."""
    floors = {(row["name"], row["mode"]): row["floor_us"] for row in beside}
    return [
        make_row(
            operation,
            each.shape,
            each,
            world=world,
            mode=mode,
            checked=one_line(f"failed: {each.failure}")
            if each.error is None
            else judge(each.error, operation.torch_tolerance),
            samples=each.samples.get(mode, ()),
            floor=floors.get((each.shape.name, mode)),
            common=common,
        )
        for each in found
        for mode in modes
    ]


def is_fault(row: Row) -> bool:
    """Whether the row must fail the run: a wrong result, or a kernel of ours that broke."""
    return row["checked"].startswith("wrong") or (
        is_ours(row["implementation"]) and row["checked"].startswith("failed")
    )
