"""What was measured, and what follows from it: a kernel's configuration, and whether XLA is taken instead.

`jaxtaxfree/tuned/<device kind>/<operation>.json` has a row for each shape that `benchmarks/tune.py` has timed: what has
to be equal for the row to say something of a call, the fastest kernel and configuration (null if that was the choice by
shape), the microseconds of a call with it and by XLA, and with what and when that was measured.

Everything here is a function of the shapes, the dtype, the number of ranks, the kind of GPU, these tables and
JAXTAXFREE_UNMEASURED, so every rank decides alike. Programs that are built for GPUs which are not there have no kind,
and no tables.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxtaxfree import environment
from jaxtaxfree.target import is_amd, name_of

TUNED = Path(__file__).with_name("tuned")
# Compute capabilities of GPUs on which kernels were timed, 90 for 9.0. A GPU of another one needs an entry here, or in
# the tables, before implementation=None takes a kernel there.
MEASURED = (90,)
# Between two measured sizes further apart than by this factor, nothing is concluded about which is faster.
FARTHEST = 4
SLOWER = "XLA was faster when this shape, or those next to it, were measured"

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call of an operation, as the tables know it.

    Attributes:
      operation: its name.
      device_kind: of the GPUs, such as "NVIDIA H200"; empty if there are no tables for them.
      same: what is equal in every row that says something of the call: ranks, dtype, sizes.
      along, size: name and value of the size in which such rows may differ.
      choose: (a value of it, settings) -> the kernel and its configuration, a `jaxtaxfree.ops.variant.Choice`; raises
        NotImplementedError if the kernel that the settings name cannot take the call.
    """

    operation: str
    device_kind: str
    same: dict[str, Any]
    along: str
    size: int
    choose: Callable[[int, Mapping[str, Any]], Any]

    @property
    def default(self) -> Any:
        """The choice by shape alone."""
        return self.choose(self.size, {})

    def row(self) -> Row:
        """What tells this case from the others of its operation, as a row has it."""
        return {**self.same, self.along: self.size}

    def rows(self) -> list[Row]:
        """The rows that say something of the call."""
        known = table(self.device_kind, self.operation)
        return [row for row in known if all(row[name] == value for name, value in self.same.items())]


def unmeasured(compute_capability: int) -> str | None:
    """Why XLA is taken on GPUs for which no kernel was ever timed; None on others, or if the environment takes kernels.

    Raises ValueError if JAXTAXFREE_UNMEASURED is neither "xla" nor "fused".
    """
    if compute_capability in MEASURED or environment.unmeasured() == "fused":
        return None
    never = f"timed on GPUs of compute capability {name_of(compute_capability)}"
    if is_amd(compute_capability):
        never = f"run on GPUs of AMD, such as {name_of(compute_capability)}"
    return f"no kernel was ever {never}. implementation='fused', a config or JAXTAXFREE_UNMEASURED=fused takes it"


def path_of(device_kind: str, operation: str) -> Path:
    return TUNED / device_kind.lower().replace(" ", "_") / f"{operation}.json"


@functools.cache
def table(device_kind: str, operation: str) -> list[Row]:
    """The rows of an operation; none if nothing was measured on such GPUs."""
    path = path_of(device_kind, operation)
    return json.loads(path.read_text()) if device_kind and path.is_file() else []


def config(case: Case | None) -> dict[str, Any] | None:
    """What was the fastest at the nearest size for which the heuristics make the same choice.

    None if that was their own, or if the kernel cannot take the call.
    """
    if case is None or case.size == 0:  # of empty operands
        return None
    by_size = {row[case.along]: row["config"] for row in case.rows()}
    default = case.default if by_size else None
    alike = [size for size in by_size if size == case.size or case.choose(size, {}) == default]
    nearest = min(alike, key=lambda size: (abs(math.log(size / case.size)), size), default=None)
    if nearest is None or not by_size[nearest]:
        return None
    try:
        return case.choose(case.size, by_size[nearest]).settings
    except NotImplementedError:
        return None


def is_slower(case: Case | None) -> bool | None:
    """Whether XLA was faster: at this size, or at the next ones on both sides. None if that is not known."""
    if case is None:
        return None
    by_size = {row[case.along]: row for row in case.rows()}
    below = max((size for size in by_size if size <= case.size), default=None)
    above = min((size for size in by_size if size >= case.size), default=None)
    if below is None or above is None or above > FARTHEST * below:
        return None
    slower = {by_size[size]["fused_us"] > by_size[size]["xla_us"] for size in (below, above)}
    return slower.pop() if len(slower) == 1 else None
