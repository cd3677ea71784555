"""What `jaxtaxfree.fuse` found in a program, and what it left alone."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Found:
    """A product and a collective that one operation replaces.

    Attributes:
      operation: name of the operation, such as "matmul_all_reduce".
      axes: the mesh axes along which it communicates.
      operands: their types, such as "float32[8,16] @ float32[16,32]".
      where: the transformations around it, outermost first, and the line of the program.
      note: what else there is to know; empty if nothing.
    """

    operation: str
    axes: tuple[str, ...]
    operands: str
    where: str
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"{self.operation} over {_names(self.axes)}: {self.operands}, {self.where}{note}"


@dataclasses.dataclass(frozen=True)
class Missed:
    """A collective next to a product that stays what it is.

    Attributes:
      collective: name of JAX's primitive, such as "psum".
      axes: the mesh axes along which it communicates.
      where: as of `Found`.
      why: the reason, or several with semicolons between them.
    """

    collective: str
    axes: tuple[str, ...]
    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.collective} over {_names(self.axes)}, {self.where}: {self.why}"


@dataclasses.dataclass(frozen=True)
class Report:
    """All of a program, in its order. What stands in a loop or in a branch counts once.

    Attributes:
      found: what is replaced.
      missed: what is not.
    """

    found: tuple[Found, ...] = ()
    missed: tuple[Missed, ...] = ()

    def __str__(self) -> str:
        lines = [f"{len(self.found)} fused, {len(self.missed)} missed"]
        lines += [f"fused   {each}" for each in self.found]
        lines += [f"missed  {each}" for each in self.missed]
        return "\n".join(lines)


def joined(reports: Iterable[Report]) -> Report:
    """Several reports as one."""
    reports = list(reports)
    return Report(tuple(x for each in reports for x in each.found), tuple(x for each in reports for x in each.missed))


def _names(axes: tuple[str, ...]) -> str:
    return ", ".join(map(repr, axes)) or "no axis"
