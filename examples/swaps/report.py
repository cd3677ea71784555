"""What the swaps in this folder share: patches at run time, and what they compare and count.

Each script changes a model so that its products are those of jaxtaxfree, and runs a tiny configuration of the original
and of the changed one on virtual CPU devices. It prints how far they are apart, how many lines differ, how many kernels
the program for CUDA has, and which collectives are left to XLA. Nothing is fetched.
"""

import collections
import difflib
import importlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jaxtaxfree.primitive import Unsupported

COLLECTIVES = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
# By which a simulation brings the operands of all ranks together, or what a reference has in a kernel's place.
OURS = re.compile(r'op_name="[^"]*/(all_gather_matmul|matmul_reduce_scatter|matmul_all_reduce|psum|psum_scatter)/')
Patch = Mapping[str, Sequence[tuple[str, str]]]  # by file: regular expressions and what replaces each match


def patched(text: str, replacements: Sequence[tuple[str, str]]) -> str:
    """The text with all replacements; raises ValueError if one is not found."""
    for pattern, replacement in replacements:
        text, found = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if not found:
            raise ValueError(f"Nothing matches {pattern!r}: the patch is for another version of this file.")
    return text


def stand_in_for_missing() -> None:
    """Makes modules in place of packages that models import for checkpoints and which are not there.

    They have what is named when a model is imported, and nothing that a test would call.
    """
    for name in ("etils.epath", "jax.experimental.array_serialization.pytree_serialization"):
        try:
            importlib.import_module(name)
        except ImportError:
            package, _, module = name.rpartition(".")
            made = ModuleType(name)
            vars(made)["Path"] = Path
            for each in (package, name):
                sys.modules.setdefault(each, made if each == name else ModuleType(package))
            setattr(sys.modules[package], module, made)


def lines_changed(before: str, after: str) -> int:
    """Lines that are new or replaced, blank ones apart."""
    diff = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return sum(line.startswith("+") and not line.startswith("+++") and bool(line[1:].strip()) for line in diff)


def load(folder: Path, modules: Sequence[str], patch: Patch | None = None) -> tuple[list[ModuleType], int]:
    """Imports modules of a folder, as they are or from a copy that is patched.

    Other modules of the folder are imported again for each call, so that an original and its copy live side by side.

    Returns: the modules, and the number of lines changed.
    """
    changed = 0
    copy = Path(tempfile.mkdtemp()) / folder.name
    shutil.copytree(folder, copy)
    for name, replacements in (patch or {}).items():
        before = (copy / name).read_text()
        after = patched(before, replacements)
        (copy / name).write_text(after)
        changed += lines_changed(before, after)
    own = {path.stem for path in copy.glob("*.py")} | {name.partition(".")[0] for name in modules}
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        del sys.modules[name]
    sys.path.insert(0, str(copy))
    try:
        return [importlib.import_module(name) for name in modules], changed
    finally:
        sys.path.remove(str(copy))


def lenient(function: Callable[..., Any], implementation: str | None) -> Callable[..., Any]:
    """A product with this implementation, where there is an operation for it, and JAX's own elsewhere."""

    def call(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, implementation=implementation, **keywords)
        except Unsupported:
            return function(*args, **keywords)

    return call


# Both trace a function anew, which may have changed what it calls.


def kernels(function: Callable[..., Any], *args: Any) -> int:
    """Kernels in the program for CUDA, each once for a place in the program."""
    lowered = jax.jit(lambda *args: function(*args)).trace(*args).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("triton_kernel_call_ffi")


def collectives(function: Callable[..., Any], *args: Any) -> dict[str, int]:
    """XLA's collectives in the compiled program, without those of the operations of a simulation."""
    text = jax.jit(lambda *args: function(*args)).lower(*args).compile().as_text() or ""
    lines = [line for line in text.splitlines() if not OURS.search(line)]
    return dict(collections.Counter(COLLECTIVES.findall("\n".join(lines))))


def distance(found: Any, wanted: Any) -> float:
    """The largest difference between two trees of arrays, over the largest value of its array; infinite for NaN."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        apart = float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30))
        worst = max(worst, apart if np.isfinite(apart) else np.inf)
    return worst


def row(name: str, value: Any) -> None:
    print(f"  {name:<46}{value}", flush=True)
