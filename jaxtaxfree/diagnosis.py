"""Where and why a kernel does not compile or run: what Triton says, in one sentence."""

import ast
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from triton import JITFunction
from triton.compiler.errors import CompilationError

from jaxtaxfree.heap.layout import Layout

_DEVICE_API = ("jaxtaxfree.kernels.shmem", "jaxtaxfree.kernels.shmem_gluon")


def why(error: Exception, kernel: JITFunction, layout: Layout) -> str:
    """Why a kernel does not compile.

    Args:
      layout: what it shares with its peers.

    Returns: such as "ring.py:17 in ring, `tl.load(inbox)`: 'tuple' object has no attribute 'scalar'", as far as known.
    """
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    frames = [found for found in chain if isinstance(found, CompilationError) and hasattr(found.node, "lineno")]
    # A Gluon kernel is called by another one.
    frames = frames[next((i for i, frame in enumerate(frames) if frame.src == kernel.src), len(frames)) :]
    reason = _reason(chain)
    if not frames:
        return reason
    functions = _functions(kernel, frames)
    own = max((i for i, function in enumerate(functions) if not _of_device_api(function)), default=0)
    place = f"{_line(functions[own], frames[own])}, `{_source(frames[own])}`"
    if own < len(frames) - 1:
        place += f" ({_line(functions[-1], frames[-1])})"
    if own:
        place += f", called from {_line(functions[0], frames[0])}"
    return f"{place}: {reason}{about_tuples(reason, map(_source, frames[: own + 1]), layout)}"


def _reason(chain: Sequence[BaseException]) -> str:
    """The last line of what the compiler says, of the innermost of its errors, which knows the most."""
    texts = [found.error_message or "" for found in chain if isinstance(found, CompilationError)]
    if not any(texts):  # of JAX are reports of where a program was traced, and Triton's own texts are places
        texts = [
            str(found)
            for found in chain
            if not (isinstance(found, CompilationError) or type(found).__module__.startswith("jax."))
        ]
    lines = [line.strip() for text in texts for line in text.splitlines() if not line.startswith("Repro command")]
    return next((line.rstrip(".") for line in reversed(lines) if line), type(chain[-1]).__name__)


def _functions(kernel: JITFunction, frames: Sequence[CompilationError]) -> list[JITFunction | None]:
    """Which function each of these errors is about: each one stands at the call of the next one."""
    functions: list[JITFunction | None] = [kernel]
    for caller, called in itertools.pairwise(frames):
        function = _named(functions[-1], caller.node)
        functions.append(function if isinstance(function, JITFunction) and function.src == called.src else None)
    return functions


def _named(function: JITFunction | None, call: ast.AST) -> Any:
    """What a function of the kernel calls, such as `helper` or `shmem.put`, if that is known."""
    if function is None or not isinstance(call, ast.Call):
        return None
    first, *attributes = ast.unparse(call.func).split(".")
    value = function.fn.__globals__.get(first)
    for attribute in attributes:
        value = getattr(value, attribute, None)
    return value


def _of_device_api(function: JITFunction | None) -> bool:
    return function is not None and function.fn.__module__ in _DEVICE_API


def _line(function: JITFunction | None, error: CompilationError) -> str:
    """The file and its folder, the line, and the function; without the file where it is not known."""
    line = error.node.lineno
    if function is None:
        found = re.match(r"def (\w+)", error.src or "")
        return f"line {line} of {found[1] if found else 'a function'}"
    file = os.sep.join(function.file_name.split(os.sep)[-2:])
    return f"{file}:{function.def_file_line_number + line - 1} in {function.fn.__name__}"


def _source(error: CompilationError) -> str:
    return (error.src or "").splitlines()[error.node.lineno - 1].strip()


def about_tuples(reason: str, lines: Iterable[str], layout: Layout) -> str:
    """What to do where a parameter for scratch or messages, which is a tuple, was taken for a pointer.

    Args:
      reason: what went wrong.
      lines: of the kernel, in which it did.
    """
    pointers = {name: f"shmem.scratch(me, {name}, dtype)" for name, _ in layout.scratch}
    pointers |= {name: f"shmem.messages(me, {name})" for name, _ in layout.messages}
    if "'tuple" not in reason or not pointers:
        return ""
    words = {word for line in lines for word in re.findall(r"\w+", line)}
    named = [name for name in pointers if name in words] or list(pointers)
    what = (
        "a parameter for scratch or messages is a tuple" if len(named) > 1 else f"the parameter {named[0]} is a tuple"
    )
    return f"; {what}, and the pointer is {' or '.join(pointers[name] for name in named)}"
