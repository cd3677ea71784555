"""Finds, inside of `jax.shard_map`, gathers before products and sums after them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

from jaxtaxfree.fusion.graph import (
    CASTS,
    GATHERS,
    SAME,
    SHAPES,
    SUMS,
    Graph,
    Node,
    Value,
    depends,
    made_by,
)
from jaxtaxfree.fusion.products import (
    Operands,
    Product,
    cast_reason,
    exact_wire,
    local_plan,
    operands_of,
)
from jaxtaxfree.fusion.report import Missed
from jaxtaxfree.fusion.shapes import Move, backward, forward, keeps_elements
from jaxtaxfree.fusion.step import Branch, Draft
from jaxtaxfree.ops.all_gather_matmul.common import MOST
from jaxtaxfree.primitive import symbolic
from jaxtaxfree.sharded.plan import Plan
from jaxtaxfree.sharded.run import disagreement, of_device

CHAIN = (*CASTS, *SHAPES, *SAME)
# Names a value for a policy of jax.checkpoint, or holds back the compiler, and is nothing to look through.
MARKS = ("name", "optimization_barrier")


@dataclasses.dataclass(eq=False)
class Candidate:
    """A product behind a gather.

    Attributes:
      dot: the product.
      rows: which of its operands is gathered.
      chain: what is between the two.
    """

    dot: Node
    rows: int
    chain: list[Node]


def is_manual(node: Node) -> bool:
    """Whether a collective is along named axes, as inside of `jax.shard_map`."""
    return all(isinstance(axis, str) for axis in axes_of(node))


def axes_of(node: Node) -> tuple[Any, ...]:
    axes = node.params["axes"] if "axes" in node.params else node.params["axis_name"]
    return axes if isinstance(axes, tuple) else (axes,)


def find_sums(graph: Graph, path: str) -> tuple[list[Draft], list[Missed]]:
    """All sums of products.

    Args:
      path: the transformations around the graph, for the report.
    """
    drafts, missed = [], []
    for node in graph.nodes:
        if node.name not in SUMS or not is_manual(node):
            continue
        dot, chain = made_by(node.ins[0], (*CHAIN, *MARKS))
        if dot is None or dot.name != "dot_general" or not dot.outs[0].aval.ndim:
            continue
        found = _sum(node, dot, chain, path)
        if isinstance(found, str):
            missed.append(Missed(node.name, axes_of(node), place(node, path), found))
        else:
            drafts.append(found)
    return drafts, missed


def _sum(node: Node, dot: Node, chain: list[Node], path: str) -> Draft | str:
    """A sum of a product as one step; or all reasons why it is none."""
    reasons = _never(node, dot, chain)
    if any(len(x.users) != 1 or x.returned for each in (dot, *chain) for x in each.outs):
        reasons.append("the product is used before its sum as well")
    dtypes = [dot.outs[0].aval.dtype, *(x.outs[0].aval.dtype for x in chain if x.name in CASTS)]
    if why := cast_reason(dtypes):
        reasons.append(why)
    if reasons:
        return "; ".join(reasons)

    scatters = node.name == "reduce_scatter"
    parts = node.params["axis_size"] if scatters else 1
    dimension: int | None = None
    if scatters:
        found = backward(chain, node.params["scatter_dimension"], parts)
        if isinstance(found, str):
            return found
        dimension = found
    operation = "matmul_reduce_scatter" if scatters else "matmul_all_reduce"
    planned = _planned(operation, dot, axes_of(node), dimension)
    if isinstance(planned, str):
        return planned
    operands, plan = planned
    moved = forward(chain, dimension, parts)
    if isinstance(moved, str):
        return moved
    exact = exact_wire(operation, operands.types[0].dtype, dtypes)
    product = Product(plan, dot.params["precision"], dtypes[-1], exact=exact)
    if reasons := [*product.refusals(operands), *_left_over(product, operands)]:
        return "; ".join(reasons)
    moves = [dataclasses.replace(move, dtype=None) for move in moved[0]]

    def call(x: Any, weights: Sequence[Any], others: Mapping[str, Any], keywords: Mapping[str, Any]) -> list[Any]:
        given = dict(others)
        if given["residual"] is not None:
            part = [plan.out.labels.index(plan.moved)] if plan.moved else []
            shape = tuple(n // parts if i in part else n for i, n in enumerate(dot.outs[0].aval.shape))
            given["residual"] = _undone(given["residual"], moves, [shape, *(move.shape for move in moves)])
        (out,) = of_device([plan], x, weights, given, **keywords)
        for move in moves:
            out = move(out)
        return [out]

    branch = Branch(dot, operands, product, node.outs[0], plain=all(each.name in (*CASTS, *SAME) for each in chain))
    nodes = [dot, *chain, node]
    return Draft(
        [branch], operands.atoms[operands.rows], [], nodes, node.name, place(node, path), call, _is_whole(operands)
    )


def _never(node: Node, dot: Node, chain: Sequence[Node]) -> list[str]:
    """What keeps a collective next to a product from every operation."""
    reasons = symbolic(*(x.aval for x in dot.ins))
    if node.params.get("axis_index_groups") is not None:
        reasons.append("it has axis_index_groups")
    if node.name not in ("all_gather", "all_gather_invariant", "psum", "psum_invariant", "reduce_scatter"):
        reasons.append("its operand or its result is unreduced")
    reasons += [f"there is a {each.name} between it and the product" for each in chain if each.name in MARKS]
    if not all(map(keeps_elements, chain)):
        reasons.append("there is a broadcast, or a reshape in another order, between it and the product")
    return reasons


def _planned(operation: str, dot: Node, axes: tuple[str, ...], dimension: int | None) -> tuple[Operands, Plan] | str:
    """A product whose result is summed, with the rows of either operand: rather a scatter of rows than of columns."""
    found, reasons = [], []
    for rows in (0, 1):
        operands = operands_of(dot, rows)
        plan = local_plan(operation, axes, operands, None if dimension is None else operands.labels[2][dimension])
        if isinstance(plan, list):
            reasons += plan
        else:
            found.append((operands, plan))
    if not found:
        return "; ".join(dict.fromkeys(reasons))
    return next(((operands, plan) for operands, plan in found if plan.moved not in plan.columns), found[0])


def _is_whole(operands: Operands) -> bool:
    """Whether no operand is sharded along an axis that `jax.shard_map` leaves over."""
    return all(entry is None for x in operands.types for entry in x.sharding.spec)


def _left_over(product: Product, operands: Operands) -> list[str]:
    """Why an operation inside of `jax.shard_map` does not take operands that are sharded along further axes."""
    plan = product.plan
    plain = len(plan.contracted) == len(plan.columns) == 1 and not plan.swapped and plan.layout == "KN"
    if plain or _is_whole(operands):
        return []
    return ["an operand is sharded along an axis that jax.shard_map leaves over, and would be reshaped"]


def find_gathers(graph: Graph, taken: set[Node], path: str) -> tuple[list[Draft], list[Missed]]:
    """All gathers before products that no sum has taken."""
    candidates: dict[Node, list[Candidate]] = {}
    for dot in graph.nodes:
        if dot.name != "dot_general" or not dot.outs[0].aval.ndim:
            continue
        for rows, value in enumerate(dot.ins):
            gather, chain = made_by(value, (*CHAIN, *MARKS))
            if gather is not None and gather.name in GATHERS and is_manual(gather):
                candidates.setdefault(gather, []).append(Candidate(dot, rows, chain))
    drafts, missed = [], []
    for gather, some in candidates.items():
        reasons, free = [], [candidate for candidate in some if candidate.dot not in taken]
        if len(free) < len(some):
            reasons.append("the product is one with another collective")
        for i, candidate in enumerate(free):
            branch = _branch(gather, candidate)
            if isinstance(branch, str):
                reasons.append(branch)
                continue
            branches = _together(branch, gather, candidate, free[i + 1 :])
            draft = _gather(gather, candidate, branches, path)
            if isinstance(draft, Draft):
                drafts.append(draft)
                taken.update(branch.dot for branch in branches)
                break
            reasons.append(draft)
        else:
            why = "; ".join(dict.fromkeys(reasons))
            missed.append(Missed(gather.name, axes_of(gather), place(gather, path), why))
    return drafts, missed


def _branch(gather: Node, candidate: Candidate) -> Branch | str:
    """A product behind a gather; or all reasons why it is not one with it."""
    dot, chain = candidate.dot, candidate.chain
    if reasons := [*_never(gather, dot, chain), *_widened(chain)]:
        return "; ".join(reasons)
    operands = operands_of(dot, candidate.rows)
    moved = forward(chain, gather.params["all_gather_dimension"], gather.params["axis_size"])
    if isinstance(moved, str):
        return moved
    _, row = moved
    assert row is not None
    plan = local_plan("all_gather_matmul", axes_of(gather), operands, operands.labels[candidate.rows][row])
    if isinstance(plan, list):
        return "; ".join(plan)
    product = Product(plan, dot.params["precision"], dot.outs[0].aval.dtype)
    if reasons := [*product.refusals(operands), *_left_over(product, operands)]:
        return "; ".join(reasons)
    return Branch(dot, operands, product, dot.outs[0])


def _together(first: Branch, gather: Node, candidate: Candidate, others: Sequence[Candidate]) -> list[Branch]:
    """The product, and those others that one kernel makes with it."""
    together = [first]
    for other in others:
        if other.dot.ins[other.rows] is not candidate.dot.ins[candidate.rows] or len(together) == MOST:
            continue
        branch = _branch(gather, other)
        if isinstance(branch, Branch) and all(map(_fit, together, [branch] * len(together))):
            together.append(branch)
    return together if all(not depends(each.operands.weights, {gather}) for each in together) else [first]


def _fit(one: Branch, other: Branch) -> bool:
    """Whether one kernel makes both of two products of the same rows."""
    first, second = one.product, other.product
    if disagreement([first.plan, second.plan]) or "NK" in (first.plan.layout, second.plan.layout):
        return False
    if first.plan.swapped or second.plan.swapped or not (_is_whole(one.operands) and _is_whole(other.operands)):
        return False
    alike = (first.precision, first.dtype, one.operands.types[1].dtype)
    return alike == (second.precision, second.dtype, other.operands.types[1].dtype) and not (
        depends(one.operands.weights, {other.dot}) or depends(other.operands.weights, {one.dot})
    )


def _gather(gather: Node, candidate: Candidate, branches: Sequence[Branch], path: str) -> Draft | str:
    """A gather before products as one step; or why it is none."""
    chain, dimension, first = candidate.chain, gather.params["all_gather_dimension"], branches[0]
    moved = forward(chain, dimension, gather.params["axis_size"])
    assert not isinstance(moved, str)
    moves, _ = moved
    kept = _kept(gather, candidate, [branch.dot for branch in branches])
    if isinstance(kept, str):
        return kept
    # The whole arrays of which parts are moved, to go back from the gathered rows.
    shapes = [gather.outs[0].aval.shape, *(each.outs[0].aval.shape for each in chain)]
    untiled = not gather.params["tiled"]
    draft: Draft

    def call(x: Any, weights: Sequence[Any], others: Mapping[str, Any], keywords: Mapping[str, Any]) -> list[Any]:
        x = lax.expand_dims(x, [dimension]) if untiled else x
        for move in moves:
            x = move(x)
        plans = [branch.product.plan for branch in draft.branches]
        outs = of_device(plans, x, weights, others, return_gathered=bool(kept), **keywords)
        if kept:
            gathered = outs.pop()
            outs += [_undone(gathered, moves[i:], shapes[i:]) for i, _ in kept]
        return outs

    draft = Draft(
        list(branches),
        gather.ins[0],
        [value for _, value in kept],
        [gather, *chain, *(branch.dot for branch in branches)],
        gather.name,
        place(gather, path),
        call,
        _is_whole(first.operands),
    )
    return draft


def _undone(x: jax.Array, moves: Sequence[Move], shapes: Sequence[tuple[int, ...]]) -> jax.Array:
    """What the moves made x of: an array that had these shapes before each of them, and has the last one."""
    for move, before in zip(reversed(moves), reversed(shapes[:-1])):
        x = move.undone(before)(x)
    return x


def _widened(chain: Sequence[Node]) -> list[str]:
    casts = [(each.ins[0].aval.dtype, each.outs[0].aval.dtype) for each in chain if each.name in CASTS]
    return [
        f"what is gathered as {a} is cast to {b}, which would be sent: cast it before, or multiply {a} with "
        f"preferred_element_type={b}"
        for a, b in casts
        if b.itemsize > a.itemsize
    ]


def _kept(gather: Node, candidate: Candidate, dots: Sequence[Node]) -> list[tuple[int, Value]] | str:
    """The gathered values that others use, and how many nodes of the chain come before them; or why they cannot be had.

    Args:
      dots: the products that use the last value of the chain.
    """
    dot, chain = candidate.dot, candidate.chain
    values = [gather.outs[0], *(each.outs[0] for each in chain)]
    own = [*([each] for each in chain), list(dots)]
    kept = [
        (i, value)
        for i, (value, users) in enumerate(zip(values, own))
        if value.returned or any(each not in users or value.users.count(each) > 1 for each in value.users)
    ]
    if any(each.name in CASTS for i, _ in kept for each in chain[i:]):
        return "the gathered array is used before its cast as well"
    varying = dot.ins[candidate.rows].aval.mat.varying
    if more := {axis for _, value in kept for axis in varying - value.aval.mat.varying}:
        return f"the gathered array is used elsewhere as one that is the same on every rank along {sorted(more)}"
    return kept


def place(node: Node, path: str) -> str:
    """Where a node is, for the report."""
    return f"{path}, {node.source}" if path else node.source
