"""The environment variables, read when they are needed; README.md lists those of this library."""

import contextlib
import math
import os
import pathlib
import re
from collections.abc import Generator
from typing import Any

from jaxtaxfree.target import capability_of

_MOST_SECONDS = 1e9  # of which the nanoseconds are far from filling 64 bits


def timeout() -> float:
    """JAXTAXFREE_TIMEOUT: seconds that a kernel waits for a peer. Raises ValueError if it is no time."""
    return _seconds("JAXTAXFREE_TIMEOUT", "60")


def meeting_timeout() -> float:
    """JAXTAXFREE_MEETING_TIMEOUT: seconds that a process waits for another one. Raises ValueError if it is no time."""
    return _seconds("JAXTAXFREE_MEETING_TIMEOUT", "300")


def heap_base() -> int | None:
    """JAXTAXFREE_HEAP_BASE: the address of the heap, None if it is not set. Raises ValueError if it is none."""
    text = os.environ.get("JAXTAXFREE_HEAP_BASE")
    if text is None:
        return None
    try:
        address = int(text, 0)
    except ValueError:
        address = 0
    if not 0 < address < 1 << 64:
        raise ValueError(f"JAXTAXFREE_HEAP_BASE is an address such as 0x600000000000, not {text!r}.")
    return address


def compute_capability(rocm: bool = False) -> int:
    """JAXTAXFREE_COMPUTE_CAPABILITY: what to compile for where there are no GPUs. Raises ValueError if it is none.

    Args:
      rocm: for GPUs of AMD, which is gfx942 if the variable says nothing of them.
    """
    default = "gfx942" if rocm else "90"
    text = os.environ.get("JAXTAXFREE_COMPUTE_CAPABILITY", default)
    if not re.fullmatch(r"[1-9]\d\d?|gfx9[0-9a-f]{2}", text):
        raise ValueError(
            f"JAXTAXFREE_COMPUTE_CAPABILITY is a whole number such as 90, for 9.0, not {text!r}; for ROCm it is a name "
            "such as gfx942."
        )
    return capability_of(text if text.startswith("gfx") == rocm else default)


def unmeasured() -> str:
    """JAXTAXFREE_UNMEASURED: what implementation=None takes on GPUs for which no kernel was timed, "xla" or "fused".

    Raises ValueError if it is neither.
    """
    text = os.environ.get("JAXTAXFREE_UNMEASURED", "xla")
    if text not in ("xla", "fused"):
        raise ValueError(f"JAXTAXFREE_UNMEASURED is 'xla' or 'fused', not {text!r}.")
    return text


def concurrent_calls() -> str | None:
    """XLA_FLAGS: why XLA may run calls at once that do not depend on each other, which it does not by default; or None.

    Calls that share a region of the heap are wrong then (seen on an H200).
    """
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if flags and not flags.startswith("-"):  # then it is the name of a file, for XLA too
        with contextlib.suppress(OSError):
            flags = pathlib.Path(flags).read_text()
    mode = asked = ""
    for flag in re.sub("[\"']", "", flags).split():
        name, _, value = flag.lstrip("-").partition("=")
        if name == "xla_gpu_command_buffer_scheduling_mode":
            mode, asked = value.upper(), flag
        elif name == "xla_gpu_graph_enable_concurrent_region":
            mode, asked = "SERIALIZE" if value.lower() in ("false", "0") else "CONCURRENT", flag
    if mode in ("", "LHS", "SERIALIZE"):
        return None
    return f"with {asked} in XLA_FLAGS, XLA runs calls at once that have to follow each other: leave it out"


VARIABLES = {
    "JAXTAXFREE_TIMEOUT": timeout,
    "JAXTAXFREE_MEETING_TIMEOUT": meeting_timeout,
    "JAXTAXFREE_HEAP_BASE": heap_base,
    "JAXTAXFREE_COMPUTE_CAPABILITY": compute_capability,
    "JAXTAXFREE_UNMEASURED": unmeasured,
}


def seconds(what: str, value: Any) -> float:
    """A timeout as a number. Raises ValueError if it is not positive, or not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= _MOST_SECONDS:
        raise ValueError(f"{what} is a positive number of seconds, finite and at most 1e9, not {value!r}.")
    return number


def _seconds(variable: str, default: str) -> float:
    return seconds(variable, os.environ.get(variable, default))


@contextlib.contextmanager
def kept(variable: str) -> Generator[None]:
    """What a block does to an environment variable is undone behind it."""
    before = os.environ.get(variable)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before
