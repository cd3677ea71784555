"""What the assembly of a kernel for AMD's GPUs says of its waits and publishes.

LLVM's memory model of gfx942, which gfx950 shares: https://llvm.org/docs/AMDGPUUsage.html#memory-model-gfx942. sc0 sc1
is system scope. A release writes the L2 cache back (buffer_wbl2) and waits for it; an acquire makes caches invalid
(buffer_inv). A wave waits for its own stores by `s_waitcnt vmcnt(0)`, and a barrier for no stores.
"""

import re
from collections.abc import Iterator

import pytest

ARCHITECTURES = ("gfx942", "gfx950")
# Of kernels that take seconds to compile: one more target is no other test.
EACH = ("gfx942", pytest.param("gfx950", marks=pytest.mark.soak))
_STORE = re.compile(r"(global|flat|buffer)_store")


def instructions(code: str) -> list[str]:
    """Instructions and labels, without comments and directives."""
    lines = (line.split(";")[0].strip() for line in code.splitlines())
    return [line for line in lines if re.match(r"(\.LBB\w+:|[a-z]\w+ |[a-z]\w+$)", line)]


def publishes_out_of_order(code: str) -> list[str]:
    """Signals to peers that are no release at system scope behind stores that all waves have done."""
    lines = instructions(code)
    # Returning atomics (sc0) are polls, and flags that stay on this GPU have no sc1.
    publishes = [i for i, line in enumerate(lines) if re.match(r"global_atomic_add v\S+ ", line) and "sc0" not in line]
    publishes = [i for i in publishes if "sc1" in lines[i]]
    wrong = [] if publishes else ["nothing is published"]
    for i in publishes:
        if not lines[i - 1].startswith("s_waitcnt vmcnt(0)") or lines[i - 2] != "buffer_wbl2 sc0 sc1":
            wrong.append(f"no release: {' / '.join(lines[i - 2 : i + 1])}")
            continue
        what = re.compile(r"(global|flat|buffer)_store|s_barrier|s_waitcnt vmcnt\(0\)")
        before = [line for line in lines[: i - 2] if what.match(line)]
        while before and before[-1].startswith("s_waitcnt"):  # for loads since the barrier
            before.pop()
        barriers = 0
        while before and before[-1] == "s_barrier":
            before.pop()
            barriers += 1
        if not barriers:
            wrong.append(f"no barrier before {lines[i]}")
        elif not before or not before[-1].startswith("s_waitcnt vmcnt(0)"):
            wrong.append(f"stores may be on their way at the barrier before {lines[i]}: {before[-1:]}")
    return wrong


def loops(lines: list[str]) -> Iterator[list[str]]:
    """The code between a label and a branch back to it."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    for i, line in enumerate(lines):
        if line.startswith(("s_branch ", "s_cbranch_")) and labels.get(line.split()[-1], i) < i:
            yield lines[labels[line.split()[-1]] : i]


def polling_loops(code: str) -> int:
    """How many loops wait for a signal by an atomic that acquires at system scope."""
    return sum(any(_acquires(loop, i) for i in range(len(loop))) for loop in loops(instructions(code)))


def _acquires(lines: list[str], i: int) -> bool:
    atomic = re.match(r"global_atomic_add v\S+, v\S+, v\S+, .*sc0 sc1", lines[i])
    return bool(atomic) and lines[i + 1 : i + 3] == ["s_waitcnt vmcnt(0)", "buffer_inv sc0 sc1"]


def polls_that_do_not_acquire(code: str) -> list[str]:
    """Returning atomic additions at system scope, by which kernels poll, that do not acquire."""
    lines = instructions(code)
    polls = [i for i, line in enumerate(lines) if re.match(r"global_atomic_add v\S+, v\S+, v\S+,", line)]
    return [lines[i] for i in polls if "sc1" not in lines[i] or not _acquires(lines, i)]


def store_widths(code: str) -> dict[str, int]:
    """How many stores to global memory there are of each width, such as dwordx4."""
    widths: dict[str, int] = {}
    for line in instructions(code):
        if _STORE.match(line):
            width = line.split()[0].split("_store_")[1]
            widths[width] = widths.get(width, 0) + 1
    return widths


def leaves_and_traps(code: str) -> bool:
    """Whether the kernel leaves a launch that only loads it, and traps in one that has no region."""
    lines = instructions(code)
    at = lines.index("s_endpgm")
    return (
        re.match(r"s_cmp_ge_i32 s\d+, 0", lines[at - 4]) is not None
        and lines[at - 3] == "s_cbranch_scc1 4"
        and re.match(r"s_cmp_eq_i32 s\d+, -1", lines[at - 2]) is not None
        and lines[at - 1 : at + 2] == ["s_cbranch_scc0 1", "s_endpgm", "s_trap 2"]
        and not any(_STORE.match(line) for line in lines[:at])
    )
