"""Who did what where: what one access to memory leaves behind for a later report."""

import dataclasses
import linecache
import os
import sys
import traceback
from types import CodeType

import numpy as np

# A global name that marks the functions which the simulator has rewritten.
MARKER = "__simulated__"

DEVICE_API = "jaxtaxfree.kernels.shmem"
GLUON_API = "jaxtaxfree.kernels.shmem_gluon"

_lines: dict[tuple[int, int], tuple[CodeType, int, str]] = {}  # by the id of the code, which is kept, and instruction

type Stack = tuple[tuple[CodeType, int, str], ...]


def stack() -> Stack:
    """The lines of the kernel that are running, innermost first: (code, line, module)."""
    lines = []
    frame = sys._getframe(1)
    while frame is not None:
        space = frame.f_globals
        if MARKER in space:
            code = frame.f_code
            key = id(code), frame.f_lasti
            # To find the line of an instruction, Python reads its table of the function from the start.
            line = _lines.get(key)
            if line is None:
                line = _lines[key] = (code, frame.f_lineno, space[MARKER])
            lines.append(line)
        frame = frame.f_back
    return tuple(lines)


def kernel_lines(error: Exception) -> list[str]:
    """The source of the kernel's lines that an error has come through."""
    return [
        linecache.getline(frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if MARKER in frame.f_globals
    ]


def where(lines: Stack) -> str:
    """The kernel's line, and the line of the device API that it reached, such as `push.py:31 (put, shmem.py:203)`."""
    own = [line for line in lines if not line[2].startswith("triton.")]
    if not own:
        return "an unknown line"
    kernel = kernel_line(lines)
    place = _line(kernel)
    if own[0] is not kernel:
        place += f" ({own[0][0].co_name}, {_file(own[0][0])}:{own[0][1]})"
    if own[-1] is not kernel:
        place += f", called from {_line(own[-1])}"
    return place


def kernel_line(lines: Stack) -> tuple[CodeType, int, str]:
    """The innermost line that is of no language and not of the device API; if there is none, that of the API."""
    own = [line for line in lines if not line[2].startswith("triton.")]
    return next((line for line in own if line[2] not in (DEVICE_API, GLUON_API)), own[0])


def _line(line: tuple[CodeType, int, str]) -> str:
    return f"{_file(line[0])}:{line[1]} in {line[0].co_name}"


def _file(code: CodeType) -> str:
    """The path as short as it stays clear: the file and its folder."""
    return os.sep.join(code.co_filename.split(os.sep)[-2:])


@dataclasses.dataclass(slots=True, eq=False)
class Event:
    """An access.

    Attributes:
      verb: "load", "store", "atomic", "send", "receive" or "clear", or an asynchronous operation by its name.
      rank, program, call: who.
      thread: index of the program among those of all ranks.
      clock: the program's own time.
      step: the simulation's time.
      lines: where in the source.
      heard: of a send, what its program had heard of the others before; see `Clocks`.
      issuer: of an asynchronous operation, the thread that began it.
      used: whether somebody has read what it wrote, or received what it sent.
      whole: of an access that is the second portion of one, the first portion, which is `used` for both.
    """

    verb: str
    rank: int
    program: int
    call: int
    thread: int
    clock: int
    step: int
    lines: Stack
    heard: np.ndarray | None = None
    scope: str = "sys"
    issuer: int | None = None
    used: bool = False
    whole: "Event | None" = None

    @property
    def knower(self) -> int:
        """The thread whose knowledge decides what comes before the access."""
        return self.thread if self.issuer is None else self.issuer

    def use(self) -> None:
        """Somebody has read or received what it left."""
        (self.whole or self).used = True

    def __str__(self) -> str:
        return f"the {self.verb} of {who(self.rank, self.program, self.call)} at {where(self.lines)}"


def who(rank: int, program: int, call: int) -> str:
    return f"rank {rank}, program {program} in call {call}"
