"""Finds products of global arrays whose types say, along Explicit axes, that rows are gathered or sums are made."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtaxfree.fusion.find import place
from jaxtaxfree.fusion.graph import CASTS, Graph, Node, Value, depends, made_by
from jaxtaxfree.fusion.products import Product, copied_rows, exact_wire, operands_of
from jaxtaxfree.fusion.report import Missed
from jaxtaxfree.fusion.step import Branch, Draft
from jaxtaxfree.ops.all_gather_matmul.common import MOST
from jaxtaxfree.primitive import symbolic
from jaxtaxfree.sharded.plan import Axes, Plan, Sharded, plan
from jaxtaxfree.sharded.run import disagreement, run


def find_typed(graph: Graph, path: str) -> tuple[list[Draft], list[Missed]]:
    """All such products.

    Args:
      path: the transformations around the graph, for the report.
    """
    drafts: list[Draft] = []
    missed: list[Missed] = []
    gathered: dict[Value, Draft] = {}  # by a draft that gives them to all their users
    for dot in graph.nodes:
        if dot.name != "dot_general" or not _is_global(dot):
            continue
        found = _product(dot, gathered, path)
        if isinstance(found, Draft):
            drafts.append(found)
            gathered.update((value, found) for value in found.kept)
        elif found is not None:
            missed.append(found)
    for draft in drafts:
        _settle(draft)
    return drafts, missed


def _is_global(dot: Node) -> bool:
    """Whether the types of a product say how its operands are sharded, and no `jax.shard_map` is around it."""
    meshes = [x.aval.sharding.mesh for x in (*dot.ins, *dot.outs)]
    return all(not mesh.manual_axes for mesh in meshes) and any(mesh.explicit_axes for mesh in meshes)


def _product(dot: Node, gathered: Mapping[Value, Draft], path: str) -> Draft | Missed | None:
    """A product as a step; why it is none; or None if nothing of its rows or sums moves, or it is one with another."""
    out = dot.outs[0].aval
    if out.sharding.spec.unreduced or any(x.aval.sharding.spec.unreduced for x in dot.ins):
        return None
    reasons: list[str] = []
    communicates: Axes = ()
    for rows in (0, 1):
        if (draft := gathered.get(dot.ins[rows])) is not None and _joins(draft, dot, rows):
            return None
        source, chain = _source(dot, rows, gathered)
        found = _planned(dot, rows, source)
        if isinstance(found, Plan) and found.operation is None:
            if rows == 0:
                return None
            continue
        communicates = communicates or _moved(dot) or _lost(source.aval, dot.ins[rows].aval)
        if isinstance(found, list):
            reasons += found
            continue
        step = _draft(dot, rows, source, chain, found, path)
        if isinstance(step, Draft):
            return step
        reasons += step
    if not communicates:
        return None
    return Missed("dot_general", communicates, place(dot, path), "; ".join(dict.fromkeys(reasons)))


def _planned(dot: Node, rows: int, source: Any) -> Plan | list[str]:
    """What the planner says of a product whose rows come as `source` lies."""
    operands = operands_of(dot, rows)
    if reasons := symbolic(*operands.types):
        return reasons
    atoms = [source if i == rows else x for i, x in enumerate(operands.atoms)]
    types = (*(x.aval for x in atoms), dot.outs[0].aval)
    lhs, rhs, out = map(_sharded, operands.labels, types)
    lengths = {label: n for labels, x in zip(operands.labels, atoms) for label, n in zip(labels, x.aval.shape)}
    mesh = dot.outs[0].aval.sharding.mesh
    found = plan(lhs, rhs, out, lengths, mesh.shape, swapped=rows == 1)
    if isinstance(found, Plan) and found.operation:
        return copied_rows(found) or found
    return found


def _sharded(labels: Sequence[str], aval: Any) -> Sharded:
    return Sharded(tuple(labels), _axes(aval))


def _axes(aval: Any) -> tuple[Axes, ...]:
    """The mesh axes of each dimension."""
    entries = (*aval.sharding.spec, *[None] * (len(aval.shape) - len(aval.sharding.spec)))
    return tuple(() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in entries)


def _moved(dot: Node) -> Axes:
    """The axes along which a product makes sums."""
    contracted, _ = dot.params["dimension_numbers"]
    names = [_axes(x.aval) for x in dot.ins]
    pairs = zip(*contracted)
    return tuple(dict.fromkeys(axis for a, b in pairs for axis in names[0][a] if axis in names[1][b]))


def _lost(before: Any, after: Any) -> Axes:
    """The axes along which a resharding gathers."""
    old, new = ({axis for entry in _axes(x) for axis in entry} for x in (before, after))
    return tuple(sorted(old - new))


def _source(dot: Node, rows: int, gathered: Mapping[Value, Draft]) -> tuple[Any, list[Node]]:
    """What the rows of a product are a resharding of, through casts; the rows themselves if they are none."""
    value = dot.ins[rows]
    if value in gathered:
        return value, []
    maker, chain = made_by(value, CASTS)
    widened = any(x.outs[0].aval.dtype.itemsize > x.ins[0].aval.dtype.itemsize for x in chain)
    if maker is None or maker.name != "reshard" or widened:
        return value, []
    return maker.ins[0], [maker, *chain]


def _draft(dot: Node, rows: int, source: Any, chain: list[Node], found: Plan, path: str) -> Draft | list[str]:
    """A product as a step, or why it is none."""
    out, operands = dot.outs[0].aval, operands_of(dot, rows)
    mesh = out.sharding.mesh
    if left := [axis for axis in mesh.axis_names if axis not in mesh.explicit_axes and mesh.shape[axis] > 1]:
        return [f"the mesh has axes {left} that are not Explicit"]
    exact = exact_wire(found.operation, operands.types[0].dtype, [out.dtype])
    product = Product(found, dot.params["precision"], out.dtype, exact=exact)
    if reasons := product.refusals(operands):
        return reasons
    # Others use the gathered rows: those along the chain before a cast keep JAX's own gather.
    value = dot.ins[rows]
    shared = found.operation == "all_gather_matmul" and bool(chain) and (value.returned or value.users != [dot])
    dtype, gathered = value.aval.dtype, _axes(value.aval)
    draft: Draft

    def call(x: Any, weights: Sequence[Any], others: Mapping[str, Any], keywords: Mapping[str, Any]) -> list[Any]:
        plans = [branch.product.plan for branch in draft.branches]
        how = gathered if draft.kept else None
        return run(plans, mesh, x.astype(dtype), weights, others, gathered=how, **keywords)

    branch = Branch(dot, operands, product, dot.outs[0])
    kept = [value] if shared else []
    draft = Draft([branch], source, kept, [*chain, dot], dot.name, place(dot, path), call)
    return draft


def _joins(draft: Draft, dot: Node, rows: int) -> bool:
    """Adds a product of the same gathered rows to a draft, if one kernel makes it, too."""
    first = draft.branches[0]
    chain = [node for node in draft.nodes if node.name != "dot_general"]
    found = _planned(dot, rows, draft.source) if chain and rows == 0 else None
    if not isinstance(found, Plan) or len(draft.branches) == MOST or disagreement([first.product.plan, found]):
        return False
    product = Product(found, dot.params["precision"], dot.outs[0].aval.dtype)
    branch = Branch(dot, operands_of(dot, rows), product, dot.outs[0])
    own = (first.product.precision, first.product.dtype, first.operands.types[1].dtype)
    alike = (product.precision, product.dtype, branch.operands.types[1].dtype) == own
    layouts = [each.product.plan.layout for each in (first, branch)]
    dots = {each.dot for each in draft.branches}
    if not alike or "NK" in layouts or first.product.plan.swapped or depends(branch.operands.weights, dots):
        return False
    if any(depends(each.operands.weights, {dot}) for each in draft.branches) or product.refusals(branch.operands):
        return False
    draft.branches.append(branch)
    draft.nodes.append(dot)
    return True


def _settle(draft: Draft) -> None:
    """Keeps only those gathered rows that others use, and only those nodes that nobody needs any more."""
    dots = [branch.dot for branch in draft.branches]
    chain = [node for node in draft.nodes if node not in dots]
    value = dots[0].ins[draft.branches[0].operands.rows]
    if draft.kept and not value.returned and all(user in dots for user in value.users):
        draft.kept.clear()
    gone, own = [], dots
    for node in reversed(chain):
        value = node.outs[0]
        if value not in draft.kept and (value.returned or any(user not in own for user in value.users)):
            break
        gone.append(node)
        own = [node]
    draft.nodes = [*gone, *dots]
