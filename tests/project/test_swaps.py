"""The swaps into other models that need nothing but a package, and what they share."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.helpers.support import fails

SWAPS = Path(__file__).parents[2] / "examples" / "swaps"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report", SWAPS / "report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: str) -> dict[str, list[str]]:
    """What a swap prints of each of its programs, by what it is; its differences are no larger than it allows."""
    done = subprocess.run(
        [sys.executable, SWAPS / name, *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("  "):
            found.setdefault(line[:48].strip(), []).append(line[48:].strip())
    return found


@pytest.mark.slow
def test_a_training_step() -> None:
    found = run("train_step.py")
    # On Auto axes, where lines say how operands lie, and on Explicit ones.
    assert found["lines changed"] == ["4", "1"]
    assert found["kernels, forward and backward"] == ["5", "5"]
    # Gathers of weights along the axis of data, forward and again; their gradients; and the sum of the loss.
    assert found["XLA's collectives left"] == ["{'all-gather': 4, 'reduce-scatter': 2, 'all-reduce': 2}"] * 2


@pytest.mark.slow
def test_a_decoder_of_equinox() -> None:
    pytest.importorskip("equinox")
    found = run("equinox_decoder.py")
    assert found["lines changed"] == ["1"]
    assert found["kernels forward"] == ["14"]


def test_patches(report: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "layers_of_a_test.py").write_text("def twice(x):\n    return 2 * x\n")
    (original,), none = report.load(folder, ["layers_of_a_test"])
    patch = {"layers_of_a_test.py": [(r"2 \* (\w)", r"3 * \1")]}
    (swapped,), lines = report.load(folder, ["layers_of_a_test"], patch)
    assert (original.twice(1), none, swapped.twice(1), lines) == (2, 0, 3, 1)
    with fails(ValueError, "Nothing matches '4'"):
        report.load(folder, ["layers_of_a_test"], {"layers_of_a_test.py": [("4", "5")]})


def test_distances(report: ModuleType) -> None:
    x = np.array([1.0, 2.0, 4.0])
    assert report.distance([x, x + [0, 0, 1]], [x, x]) == 0.25
    assert report.distance([x * np.nan], [x]) == np.inf
    assert report.lines_changed("a\nb\nc\n", "a\nd\n\ne\nc\n") == 2
