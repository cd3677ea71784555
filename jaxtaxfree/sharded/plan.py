"""Which operation a product is: of global arrays by how they lie on the mesh, of a rank's parts by what is moved.

Nothing here knows an array or a device. A product is written as in `einsum`: every dimension has a label, those of both
operands that the result lacks are contracted. One operand, x, has the rows; the other one, w, the columns. What happens
along a mesh axis follows from the dimensions that it shards:

| x | w | result | then |
|---|---|---|---|
| a contracted one | the same | none | partial sums are added up: `matmul_all_reduce` |
| a contracted one | the same | a row, or a column | and dealt out: `matmul_reduce_scatter` |
| a row, or a contracted one | a column | this column | x is gathered: `all_gather_matmul` |
| a row | none | this row | nothing: data |
| none | a column | this column | nothing |
| a row | any | this row | w is gathered first: data, and w is sharded along it to save memory (FSDP) |
| none | any | none | the same |

Weights that are whole along a contracted dimension of which each rank has a part of x are taken in parts. That is free.

All else is left to XLA.
"""

import dataclasses
import math
import string
from collections.abc import Mapping, Sequence
from typing import Any

Axes = tuple[str, ...]  # the mesh axes that shard a dimension, the last one counting fastest


@dataclasses.dataclass(frozen=True)
class Sharded:
    """An array by the labels of its dimensions, and the axes that shard each."""

    labels: tuple[str, ...]
    entries: tuple[Axes, ...]

    def along(self, label: str) -> Axes:
        """The axes of a dimension; none if there is no such dimension."""
        return dict(zip(self.labels, self.entries, strict=True)).get(label, ())

    def dimension(self, axis: str) -> str | None:
        """The label of what an axis shards."""
        return next((label for label, axes in zip(self.labels, self.entries, strict=True) if axis in axes), None)

    def without(self, axes: Sequence[str]) -> "Sharded":
        """The array, gathered along these axes."""
        return Sharded(self.labels, tuple(tuple(a for a in entry if a not in axes) for entry in self.entries))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A product as one operation.

    Attributes:
      operation: "matmul_all_reduce", "matmul_reduce_scatter" or "all_gather_matmul"; None for a product that needs no
        communication once w is gathered.
      axes: along which the operation communicates.
      moved: the dimension that it gathers or scatters.
      swapped: x is rhs.
      x, w, out: as the operation's program takes and gives them.
      before: the axes along which XLA gathers w before the program.
      cut: each rank takes its part of a w that is whole.
      gathered: dimensions of w that the program gathers first, with the axes, the last ones of the dimension.
      rows, contracted, columns: labels, in the order in which the operation has them.
      layout: of w, "KN", "NK", or "mixed" if it has to be copied.
    """

    operation: str | None
    axes: Axes
    moved: str | None
    swapped: bool
    x: Sharded
    w: Sharded
    out: Sharded
    before: Axes
    cut: bool
    gathered: tuple[tuple[str, Axes], ...]
    rows: tuple[str, ...]
    contracted: tuple[str, ...]
    columns: tuple[str, ...]

    @property
    def layout(self) -> str:
        if self.w.labels == self.contracted + self.columns:
            return "KN"
        return "NK" if self.w.labels == self.columns + self.contracted else "mixed"


def plan(
    lhs: Sharded,
    rhs: Sharded,
    out: Sharded,
    lengths: Mapping[str, int],
    mesh: Mapping[str, int],
    epilogue: Sequence[str] = (),
    swapped: bool | None = None,
) -> Plan | list[str]:
    """The operation that computes a product, or all reasons why there is none.

    Args:
      lhs, rhs, out: the product.
      lengths: of the dimensions.
      mesh: the lengths of the mesh's axes.
      epilogue: which of "gate", "bias" and "residual" there are.
      swapped: whether rhs has the rows. None: whatever can be fused.
    """
    if reasons := _no_product(lhs, rhs, out) or _uneven((lhs, rhs, out), lengths, mesh):
        return reasons
    # In most results rows come before columns. If those of rhs are the first ones, lhs may be the weights.
    first = next((label for label in out.labels if label not in lhs.labels or label not in rhs.labels), None)
    weights_first, of_rhs = first in rhs.labels, [name for name in ("gate", "bias") if name in epilogue]
    orders = [True, False] if weights_first and not of_rhs else [False]
    orders = orders if swapped is None else [swapped]
    plans = [_as(lhs, rhs, out, swapped, epilogue) for swapped in orders]
    fused = [each for each in plans if isinstance(each, Plan) and each.operation]
    # What is gathered before, because nothing else differs along an axis, may be rows in truth.
    if not fused and weights_first and of_rhs:
        return [f"with a {of_rhs[0]} rhs has to be the weights, and its dimensions the last ones of the result"]
    return min(fused, key=lambda each: len(each.before), default=plans[-1])


def local(
    operation: str,
    axes: Axes,
    labels: Sequence[Sequence[str]],
    swapped: bool,
    moved: str | None = None,
    epilogue: Sequence[str] = (),
) -> Plan | list[str]:
    """A product of a rank's parts as an operation; or all reasons why that does not take it.

    Args:
      operation, axes, moved, swapped: see `Plan`.
      labels: of lhs, rhs and the result.
      epilogue: as of `plan`.
    """
    lhs, rhs, out = (Sharded(tuple(each), ((),) * len(each)) for each in labels)
    if reasons := _no_product(lhs, rhs, out):
        return reasons
    x, w = (rhs, lhs) if swapped else (lhs, rhs)
    found = _plan_of(operation, axes, moved, swapped, x, w, out)
    return _unfit(found, epilogue) or found


def labels_of(dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int) -> tuple[tuple[str, ...], ...]:
    """The labels of lhs, rhs and the result of a `lax.dot_general`."""
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dimension_numbers
    letters = iter(string.ascii_letters)
    names = [next(letters) for _ in range(lhs_ndim)]
    same = {int(j): names[i] for i, j in zip((*lhs_contracted, *lhs_batch), (*rhs_contracted, *rhs_batch))}
    of_rhs = [same.get(j) or next(letters) for j in range(rhs_ndim)]
    batch = [names[i] for i in lhs_batch]
    result = [*batch, *(x for x in names if x not in of_rhs), *(x for x in of_rhs if x not in names)]
    return tuple(names), tuple(of_rhs), tuple(result)


def _no_product(lhs: Sharded, rhs: Sharded, out: Sharded) -> list[str]:
    """Why a product is not one of rows by columns."""
    reasons = []
    for labels in (lhs.labels, rhs.labels, out.labels):
        if len(set(labels)) < len(labels):
            reasons.append("it takes a diagonal")
    both = [label for label in lhs.labels if label in rhs.labels]
    if batch := [label for label in both if label in out.labels]:
        reasons.append(f"both operands and the result have {_dimensions(batch)}: it is a batch of products")
    if len(batch) == len(both):
        reasons.append("no dimension is contracted")
    if alone := [x for x in (*lhs.labels, *rhs.labels) if x not in both and x not in out.labels]:
        reasons.append(f"{_dimensions(alone)} of one operand is summed up alone")
    return reasons


def _uneven(arrays: Sequence[Sharded], lengths: Mapping[str, int], mesh: Mapping[str, int]) -> list[str]:
    reasons = ["an operand is empty"] if 0 in lengths.values() else []
    for array in arrays:
        for label, axes in zip(array.labels, array.entries, strict=True):
            if lengths[label] % math.prod(mesh[axis] for axis in axes):
                reasons.append(f"{axes} do not divide the {lengths[label]} places of dimension {label!r}")
    return list(dict.fromkeys(reasons))


def _dimensions(labels: Sequence[str]) -> str:
    return f"dimension{'s' if len(labels) > 1 else ''} {', '.join(map(repr, labels))}"


@dataclasses.dataclass
class _Found:
    """What happens along the axes of a product: the axes by what they do."""

    sums: list[str] = dataclasses.field(default_factory=list)
    scatters: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # by dimension of the result
    gathers: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # by dimension of x
    data: list[str] = dataclasses.field(default_factory=list)  # w is gathered along them, and x differs
    idle: list[str] = dataclasses.field(default_factory=list)  # w is gathered along them, and x is the same
    reasons: list[str] = dataclasses.field(default_factory=list)


def _along_axes(x: Sharded, w: Sharded, out: Sharded, swapped: bool) -> _Found:
    names = ("rhs", "lhs", "the result") if swapped else ("lhs", "rhs", "the result")
    found = _Found()
    used = dict.fromkeys(axis for array in (x, w, out) for entry in array.entries for axis in entry)
    for axis in used:
        a, b, c = (array.dimension(axis) for array in (x, w, out))
        contracted = a is not None and a in w.labels
        if contracted and a == b and c is None:
            found.sums.append(axis)
        elif contracted and a == b and c is not None:
            found.scatters.setdefault(c, []).append(axis)
        elif a is not None and b is not None and b == c:
            found.gathers.setdefault(a, []).append(axis)
        elif a == c and not contracted and b is not None:
            (found.idle if a is None else found.data).append(axis)
        elif not (a == c and b is None) and not (a is None and b == c):
            places = [f"{label!r} of {name}" for name, label in zip(names, (a, b, c)) if label is not None]
            found.reasons.append(f"no operation is for the axis {axis!r} along {' and '.join(places)} alone")
    return found


def _as(lhs: Sharded, rhs: Sharded, out: Sharded, swapped: bool, epilogue: Sequence[str]) -> Plan | list[str]:
    """The product with lhs, or with rhs, as the operand that has the rows."""
    x, w = (rhs, lhs) if swapped else (lhs, rhs)
    given, w = w, _in_parts(x, w)
    found = _along_axes(x, w, out, swapped)
    if found.reasons:
        return found.reasons
    gathers, scatters = (
        [(label, tuple(axes)) for label, axes in each.items()] for each in (found.gathers, found.scatters)
    )
    several = [*gathers, *scatters, *([("", tuple(found.sums))] if found.sums else [])]
    if len(several) > 1:
        return [f"one operation communicates along one set of axes, and this product along {[a for _, a in several]}"]
    moved, axes = several[0] if several else (None, ())
    operation = "matmul_all_reduce" if found.sums else None
    operation = "all_gather_matmul" if gathers else "matmul_reduce_scatter" if scatters else operation
    before, gathered = _gather_weights(w, found.data, found.idle)
    axes = _in_order(axes, out.along(moved or "") if scatters else x.along(moved or ""))
    result = _plan_of(operation, axes, moved or None, swapped, x, w.without(before), out, before, w != given, gathered)
    whole = w.without([*found.data, *found.idle])
    return _misplaced(result, whole) + _unfit(result, epilogue) or result


def _plan_of(
    operation: str | None,
    axes: Axes,
    moved: str | None,
    swapped: bool,
    x: Sharded,
    w: Sharded,
    out: Sharded,
    before: Axes = (),
    cut: bool = False,
    gathered: tuple[tuple[str, Axes], ...] = (),
) -> Plan:
    return Plan(
        operation=operation,
        axes=axes,
        moved=moved,
        swapped=swapped,
        x=x,
        w=w,
        out=out,
        before=before,
        cut=cut,
        gathered=gathered,
        rows=tuple(label for label in x.labels if label not in w.labels),
        contracted=tuple(label for label in w.labels if label in x.labels),
        columns=tuple(label for label in w.labels if label not in x.labels),
    )


def _in_parts(x: Sharded, w: Sharded) -> Sharded:
    """The weights, of which each rank takes the part that it has of x, where they are whole."""
    used = {axis for entry in w.entries for axis in entry}
    entries = [
        x.along(label) if not entry and used.isdisjoint(x.along(label)) else entry
        for label, entry in zip(w.labels, w.entries, strict=True)
    ]
    return Sharded(w.labels, tuple(entries))


def _in_order(axes: Axes, entry: Axes) -> Axes:
    """The axes as a dimension has them, whose blocks they number."""
    return tuple(axis for axis in entry if axis in axes) or axes


def _gather_weights(w: Sharded, data: Sequence[str], idle: Sequence[str]) -> tuple[Axes, tuple]:
    """The axes along which w is gathered before the program, and what the program then gathers.

    The transpose of a gather in the program is a reduce-scatter, which is the gradient along an axis of data. The last
    axes of a dimension can be gathered so; others, and those along which nothing differs, XLA gathers before.
    """
    gathered, outside = [], list(idle)
    for label, entry in zip(w.labels, w.entries, strict=True):
        last = len(entry)
        while last and entry[last - 1] in data:
            last -= 1
        if entry[last:]:
            gathered.append((label, entry[last:]))
        outside += [axis for axis in entry[:last] if axis in data]
    return tuple(outside), tuple(gathered)


def _misplaced(plan: Plan, w: Sharded) -> list[str]:
    """Why the blocks of a result are not those that the operation gives; `w` is gathered."""
    x, out, axes, moved = plan.x, plan.out, plan.axes, plan.moved
    gathers, scatters = plan.operation == "all_gather_matmul", plan.operation == "matmul_reduce_scatter"
    reasons = []

    def compare(label: str, given: Axes, wanted: Axes) -> None:
        if given != wanted:
            reasons.append(f"dimension {label!r} would have to be sharded along {wanted}, in this order, not {given}")

    for label in (*plan.rows, *plan.columns):
        source = x if label in plan.rows else w
        if label == moved and gathers:
            compare(label, source.along(label), out.along(label) + axes)
        else:
            compare(label, out.along(label), source.along(label) + (axes if label == moved and scatters else ()))
    for label in plan.contracted:
        compare(label, x.along(label), w.along(label) + (axes if label == moved and gathers else ()))
    return reasons


def _unfit(plan: Plan, epilogue: Sequence[str]) -> list[str]:
    """Why the operation does not take the operands as they lie."""
    reasons = []
    if not plan.operation:
        return reasons
    for labels, name in ((plan.contracted, "contracted dimensions"), (plan.columns, "columns")):
        if plan.moved in labels[1:]:
            reasons.append(f"dimension {plan.moved!r} is not the first of the {name} of a weight")
    if not plan.columns:
        reasons.append("one operand is a vector, so there are no columns")
    if "gate" in epilogue and plan.operation != "all_gather_matmul":
        reasons.append(f"{plan.operation} has no gate")
    if plan.moved in plan.columns and "bias" in epilogue:
        reasons.append("a scatter along columns has no bias")
    return reasons
