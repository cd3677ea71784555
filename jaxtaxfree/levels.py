"""Operations of a team that spans hosts, in two levels: kernels inside of each host, XLA's collective across.

There is such a form where some axes of the team lie inside of hosts and all ranks along the others are on hosts of
their own. `jaxtaxfree.ops.levels` has the forms. Which one is taken, if any, is found from the mesh, from what all
processes tell about where they are, and from shapes, so it is the same in all processes.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxtaxfree import heap
from jaxtaxfree.heap import Place
from jaxtaxfree.teams import ArrangementError, Team, team_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """The axes of a team in two levels.

    Attributes:
      sizes: ranks along each of the team's axes, in their order; the last one counts fastest in a rank's number.
      inside: the axes along which all ranks are on one host.
      across: the other axes, along which all ranks are on hosts of their own.
    """

    sizes: Mapping[str, int]
    inside: tuple[str, ...]
    across: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """Of a team, on a host."""
        return math.prod(self.sizes[axis] for axis in self.inside)

    @property
    def hosts(self) -> int:
        """Of a team."""
        return math.prod(self.sizes[axis] for axis in self.across)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the axes in their order."""
        return tuple(self.sizes.values())

    @property
    def order(self) -> list[int]:
        """Where the axes stand in their order, those inside first."""
        names = list(self.sizes)
        return [names.index(axis) for axis in (*self.inside, *self.across)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Levels:
    """A call in two levels.

    Attributes:
      function: (*operands) -> result, or the list of results if the primitive has several.
      first: the primitive that begins inside, the types of its operands, and its parameters. Where XLA takes that one,
        the kernels have nothing to gain.
      leaving: bytes of a team that leave each host.
      flat: the same of XLA's collective over all ranks.
    """

    function: Callable[..., Any]
    first: tuple[Any, Sequence[Any], dict[str, Any]]
    leaving: float
    flat: float


# (*types of the operands, split, implementation, **params) -> the call in these levels.
type Form = Callable[..., Levels]
# (types of the operands, team, params) -> why None takes XLA, as far as shapes and tables say it.
type Why = Callable[[Sequence[Any], Team, dict[str, Any]], list[str]]

_forms: dict[Any, Form] = {}  # of the primitives that have one
_why: dict[Any, Why] = {}  # of the primitives with kernels


def define(primitive: Any, form: Form) -> None:
    """Says how a primitive goes in two levels."""
    _forms[primitive] = form


def define_why(primitive: Any, why: Why) -> None:
    """Says when None takes XLA for a primitive."""
    _why[primitive] = why


def of(primitive: Any, ctx: Any, *, implementation: str | None, **params: Any) -> Levels | None:
    """A call that is lowered, in two levels; None where it is one kernel, or its reference, as anywhere else.

    With implementation=None only where a kernel is taken inside, and fewer bytes leave each host. Those of XLA's
    collective over all ranks are counted as those of a ring through all ranks, which NCCL takes for large arrays: it
    leaves each host once. NCCL's trees, which it takes for smaller ones, send as few as the two levels do. NCCL does
    not say which it takes before it runs.

    Raises:
      ArrangementError: if the team spans hosts and cannot be divided into two levels.
      NotImplementedError: if it is left to us, and nothing is gained.
    """
    axes, config = params["axes"], params["config"]
    if primitive not in _forms or len(axes) < 2:
        return None
    team = team_of(ctx, axes)
    if not may_span(team, ctx.module_context.lowering_parameters.for_export):
        return None

    def levels(split: Split) -> Levels:
        return _forms[primitive](*ctx.avals_in, split=split, implementation=implementation, **params | {"config": ()})

    def why_xla(found: Levels) -> list[str]:
        inner, avals, its_params = found.first
        try:
            return _why[inner](avals, team_of(ctx, its_params["axes"]), its_params)
        except NotImplementedError as error:
            return [str(error)]

    sizes = {axis: lax.axis_size(axis) for axis in axes}
    if implementation is None and all(why_xla(levels(split)) for split in splits(sizes)):
        return None  # however the hosts are divided, so nobody has to be asked
    split = split_of(team, sizes)
    if split is None:
        return None
    if config:
        raise ArrangementError(
            "it takes no config where its axes span hosts, because the kernels are others: leave it out"
        )
    found = levels(split)
    if implementation is None:
        if reasons := why_xla(found):
            raise NotImplementedError(f"the axes span hosts, and inside of a host XLA is taken: {'; '.join(reasons)}")
        if found.leaving >= found.flat:
            raise NotImplementedError(
                f"the axes span hosts, each of which would send {found.leaving:.0f} bytes in two levels, and "
                f"{found.flat:.0f} in XLA's ring"
            )
    return found


def splits(sizes: Mapping[str, int]) -> Iterator[Split]:
    """All ways in which these axes may lie in and across hosts, with several ranks on each of several hosts."""
    for lies_inside in itertools.product((True, False), repeat=len(sizes)):
        inside = tuple(axis for axis, lies in zip(sizes, lies_inside) if lies)
        across = tuple(axis for axis, lies in zip(sizes, lies_inside) if not lies)
        split = Split(sizes=sizes, inside=inside, across=across)
        if split.ranks > 1 and split.hosts > 1:
            yield split


def may_span(team: Team, exported: bool) -> bool:
    """Whether a team may be on several hosts, as far as that is known without asking.

    A program that is only built for GPUs, or not for this process's, is built as on one host.
    """
    if exported or not team.on_gpus:
        return False
    processes = [device.process_index for device in team.devices]
    own = jax.process_index() in processes
    return own and any(len(set(members)) > 1 for members in itertools.batched(processes, team.world))


def places(team: Team) -> tuple[list[int], Mapping[int, Place]]:
    """The process of each device of a team, and where these processes are.

    All processes of the mesh ask for it together, and find the same.
    """
    return [device.process_index for device in team.devices], heap.places(team.devices)


def split_of(team: Team, sizes: Mapping[str, int]) -> Split | None:
    """The two levels of the team's axes; None if each team is on one host.

    Args:
      sizes: ranks along each of the axes.

    Raises:
      ArrangementError: in all processes, if a team spans hosts, and no border between axes is the one between hosts.
    """
    owners, found = places(team)
    if (spans := heap.spanning(owners, team.world, found)) is None:
        return None
    domains: Any = np.array([found[owner].domain for owner in owners]).reshape(-1, *sizes.values())
    alike = [bool((domains == domains.take([0], axis=1 + i)).all()) for i in range(len(sizes))]
    split = Split(
        sizes=sizes,
        inside=tuple(axis for axis, is_inside in zip(sizes, alike) if is_inside),
        across=tuple(axis for axis, is_inside in zip(sizes, alike) if not is_inside),
    )
    moved = np.transpose(domains, (0, *(1 + i for i in split.order))).reshape(-1, split.ranks, split.hosts)
    apart = all(len(set(line)) == split.hosts for line in moved[:, 0].tolist())
    if apart and split.ranks > 1:
        return split
    why = (
        f"of {list(sizes)} none does"
        if apart
        else f"along {list(split.across)} some devices share a host, and others do not"
    )
    raise ArrangementError(f"{spans}, or some axes inside of hosts and the others across them: {why}")
