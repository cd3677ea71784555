"""Which operation a product of global arrays is, as their types say how they are sharded along Explicit axes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxtaxfree.fusion.products import Form

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """A product that communicates.

    Attributes:
      operation: its name.
      axes: the mesh axes along which it communicates.
      dimension: of the rows that is gathered or scattered; 0 if none is.
      weights: for each dimension of the weights, along which axes a rank's part is gathered before the product.
      specs: how the rows and the weights are given to each rank, for each dimension the axes.
    """

    operation: str
    axes: Axes
    dimension: int
    weights: tuple[Axes, ...]
    specs: tuple[tuple[Axes, ...], tuple[Axes, ...]]


def axes_of_spec(spec: Any, ndim: int) -> list[Axes]:
    """The mesh axes of each dimension."""
    entries = (*spec, *[None] * (ndim - len(spec)))
    return [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in entries]


def arrange(
    form: Form, rows: Sequence[Axes], weights: Sequence[Axes], result: Sequence[Axes], contracted: Sequence[int]
) -> Arrangement | str | None:
    """The operation that a product of global arrays is.

    Along a mesh axis the product has, on
      contracted dimensions of both, and on a row of the result    matmul_reduce_scatter
      contracted dimensions of both, and on nothing of the result  matmul_all_reduce
      a row of the rows, and columns of weights and result         all_gather_matmul
      a dimension of the weights alone                             a gather of the weights before it (FSDP)
      the same row of the rows and of the result                   nothing

    Args:
      form: of the product.
      rows, weights, result: the mesh axes of each dimension.
      contracted: the dimensions of the rows that are contracted, in the order of `form.contracted`.

    Returns: None if nothing of rows or sums moves; why there is none, if none is as this.
    """
    gathered: list[Axes] = [()] * len(weights)
    given = list(weights)
    summed: Axes = ()
    for a, b in zip(contracted, form.contracted):
        if rows[a] == weights[b] or not weights[b]:
            summed, given[b] = (*summed, *rows[a]), rows[a]
        elif rows[a]:
            return f"its operands are sharded along {rows[a]} and {weights[b]} where they are contracted"
        else:
            gathered[b] = weights[b]
    tail = len(form.free)
    lead = len(result) - tail
    of_rows, of_columns = (result[:lead], result[lead:]) if form.rows == 0 else (result[tail:], result[:tail])
    columns: Axes = ()
    for b, after in zip(form.free, of_columns):
        if weights[b] != after:
            if after:
                return f"columns of the weights are sharded along {weights[b]}, and of the result along {after}"
            gathered[b] = weights[b]
        columns += after
    lost, won = {}, {}
    for d, (before, after) in enumerate(zip(rows, of_rows)):
        if before[: len(after)] == after and before != after:
            lost[d] = before[len(after) :]
        elif after[: len(before)] == before and before != after:
            won[d] = after[len(before) :]
        elif before != after:
            return f"rows are sharded along {before}, and of the result along {after}"
    if twice := [axis for axis in dict.fromkeys(sum(given, ())) if sum(given, ()).count(axis) > 1]:
        return f"the weights would be sharded along {twice} in two dimensions"
    return _operation(summed, lost, won, columns, tuple(gathered), (tuple(rows), tuple(given)))


def _operation(
    summed: Axes, lost: dict[int, Axes], won: dict[int, Axes], columns: Axes, gathered: tuple[Axes, ...], specs: Any
) -> Arrangement | str | None:
    if not summed and not lost:
        return f"rows are sharded along {tuple(won.values())} in the result alone" if won else None
    if summed and lost:
        return f"rows are gathered along {tuple(lost.values())} before a sum along {summed}"
    if len(lost) + len(won) > 1:
        return "several dimensions of rows are gathered or scattered"
    if lost:
        ((dimension, axes),) = lost.items()
        if not set(axes) <= set(columns):
            return f"rows are gathered along {axes}, along which the columns of the weights are not sharded"
        return Arrangement("all_gather_matmul", axes, dimension, gathered, specs)
    if not won:
        return Arrangement("matmul_all_reduce", summed, 0, gathered, specs)
    ((dimension, axes),) = won.items()
    if set(axes) != set(summed):
        return f"rows are scattered along {axes}, and summed along {summed}"
    return Arrangement("matmul_reduce_scatter", axes, dimension, gathered, specs)
