"""Finds, inside of `jax.shard_map`, gathers before products and sums after them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jaxtaxfree.fusion.graph import CASTS, GATHERS, SAME, SHAPES, SUMS, Graph, Node, Step, Value, made_by, untransposed
from jaxtaxfree.fusion.products import (
    Form,
    Product,
    cast_reason,
    described,
    exact_wire,
    form_of,
    typed_as,
)
from jaxtaxfree.fusion.report import Found, Missed
from jaxtaxfree.fusion.shapes import Move, backward, forward, keeps_elements
from jaxtaxfree.primitive import symbolic

CHAIN = (*CASTS, *SHAPES, *SAME)
# Names a value for a policy of jax.checkpoint, or holds back the compiler, and is nothing to look through.
MARKS = ("name", "optimization_barrier")


@dataclasses.dataclass(eq=False)
class Replacement(Step):
    """A step that runs an operation.

    Attributes:
      run: (values of `ins`, implementation) -> values of `outs`.
      found: for the report.
      collective: name of the primitive that it replaces.
    """

    run: Callable[[Sequence[Any], str | None], list[Any]]
    found: Found
    collective: str


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


def find_sums(graph: Graph, path: str) -> tuple[list[Replacement], list[Missed]]:
    """All sums of products.

    Args:
      path: the transformations around the graph, for the report.
    """
    steps, missed = [], []
    for node in graph.nodes:
        if node.name not in SUMS or not is_manual(node):
            continue
        dot, chain = made_by(node.ins[0], (*CHAIN, *MARKS))
        if dot is None or dot.name != "dot_general" or not dot.outs[0].aval.ndim:
            continue
        step = _sum(node, dot, chain, path)
        if isinstance(step, str):
            missed.append(Missed(node.name, axes_of(node), place(node, path), step))
        else:
            steps.append(step)
    return steps, missed


def _sum(node: Node, dot: Node, chain: list[Node], path: str) -> Replacement | str:
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
    form, ins = _form(dot, dimension)
    if isinstance(form, str):
        return form
    operands = [x.aval for x in ins]
    row = 0 if dimension is None else form.row_of(dimension, len(dot.outs[0].aval.shape))
    assert row is not None
    moved = forward(chain, dimension, parts)
    if isinstance(moved, str):
        return moved
    product = Product(
        operation,
        form,
        axes_of(node),
        row,
        dot.params["precision"],
        dtypes[-1],
        exact=exact_wire(operation, operands[0].dtype, dtypes),
    )
    if reasons := _refusals(product, operands):
        return "; ".join(reasons)
    moves = [dataclasses.replace(move, dtype=None) for move in moved[0]]

    def run(ins: Sequence[Any], implementation: str | None) -> list[Any]:
        out, _ = product(ins[form.rows], ins[1 - form.rows], implementation)
        for move in moves:
            out = move(out)
        return [typed_as(out, node.outs[0].aval)]

    found = Found(operation, product.axes, described(form, operands), place(node, path), product.note(operands))
    return Replacement([dot, *chain, node], ins, node.outs, node.index, run, found, node.name)


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


def form_and_operands(dot: Node, rows: int) -> tuple[Form | str, tuple[Any, ...]]:
    """The form of a product, and what it is of: its operands, but the weights before they were transposed."""
    weights, permutation = untransposed(dot.ins[1 - rows])
    ins = (dot.ins[0], weights) if rows == 0 else (weights, dot.ins[1])
    return form_of(dot.params, [x.aval for x in ins], rows, permutation), ins


def _form(dot: Node, dimension: int | None) -> tuple[Form | str, tuple[Any, ...]]:
    """The same in which this dimension is one of rows, if there is one."""
    reasons = []
    ndim = len(dot.outs[0].aval.shape)
    for rows in (0, 1):
        form, ins = form_and_operands(dot, rows)
        if isinstance(form, str):
            reasons.append(form)
        elif dimension is not None and form.row_of(dimension, ndim) is None:
            reasons.append("it scatters the columns of the weights, and the operation scatters rows")
        else:
            return form, ins
    return "; ".join(dict.fromkeys(reasons)), ()


def _refusals(product: Product, operands: Sequence[Any]) -> list[str]:
    """Why no kernel takes a product inside of `jax.shard_map`."""
    reasons = product.refusals(operands)
    partly = [x for x in operands if any(entry is not None for entry in x.sharding.spec)]
    plain = product.form.k == 1 and len(product.form.free) == 1 and product.form.rows == 0
    if partly and not (plain and not product.form.transposed):
        reasons.append("an operand is sharded along an axis that jax.shard_map leaves over, and would be reshaped")
    return reasons


def find_gathers(graph: Graph, taken: set[Node], path: str) -> tuple[list[Replacement], list[Missed]]:
    """All gathers before products that no sum has taken."""
    candidates: dict[Node, list[Candidate]] = {}
    for dot in graph.nodes:
        if dot.name != "dot_general" or not dot.outs[0].aval.ndim:
            continue
        for rows, value in enumerate(dot.ins):
            gather, chain = made_by(value, (*CHAIN, *MARKS))
            if gather is not None and gather.name in GATHERS and is_manual(gather):
                candidates.setdefault(gather, []).append(Candidate(dot, rows, chain))
    steps, missed = [], []
    for gather, some in candidates.items():
        reasons = []
        for candidate in some:
            if candidate.dot in taken:
                reasons.append("the product is one with another collective")
                continue
            step = _gather(gather, candidate, path)
            if isinstance(step, Replacement):
                steps.append(step)
                taken.add(candidate.dot)
                break
            reasons.append(step)
        else:
            why = "; ".join(dict.fromkeys(reasons))
            missed.append(Missed(gather.name, axes_of(gather), place(gather, path), why))
    return steps, missed


def _gather(gather: Node, candidate: Candidate, path: str) -> Replacement | str:
    """A gather before a product as one step; or all reasons why it is none."""
    dot, chain, rows = candidate.dot, candidate.chain, candidate.rows
    if reasons := [*_never(gather, dot, chain), *_widened(chain)]:
        return "; ".join(reasons)
    form, own = form_and_operands(dot, rows)
    operands = [x.aval for x in own]
    parts = gather.params["axis_size"]
    dimension = gather.params["all_gather_dimension"]
    moved = forward(chain, dimension, parts)
    wrong = [each for each in (form, moved) if isinstance(each, str)]
    if isinstance(form, str) or isinstance(moved, str):
        return "; ".join(wrong)
    moves, row = moved
    assert row is not None
    if row >= len(operands[rows].shape) - form.k:
        return "it gathers a contracted dimension, and the operation gathers rows"
    kept = _kept(gather, candidate)
    if isinstance(kept, str):
        return kept
    product = Product(
        "all_gather_matmul",
        form,
        axes_of(gather),
        row,
        dot.params["precision"],
        dot.outs[0].aval.dtype,
        return_gathered=bool(kept),
    )
    if reasons := _refusals(product, operands):
        return "; ".join(reasons)
    # The whole arrays of which parts are moved, to go back from the gathered rows.
    shapes = [gather.outs[0].aval.shape, *(each.outs[0].aval.shape for each in chain)]
    untiled = not gather.params["tiled"]

    def run(ins: Sequence[Any], implementation: str | None) -> list[Any]:
        x, w = ins
        x = lax.expand_dims(x, [dimension]) if untiled else x
        for move in moves:
            x = move(x)
        out, gathered = product(x, w, implementation)
        results = [typed_as(out, dot.outs[0].aval)]
        for i, value in kept:
            assert gathered is not None
            results.append(typed_as(_undone(gathered, moves[i:], shapes[i:]), value.aval))
        return results

    found = Found(
        "all_gather_matmul", product.axes, described(form, operands), place(gather, path), product.note(operands)
    )
    outs = (dot.outs[0], *(value for _, value in kept))
    ins = (gather.ins[0], own[1 - rows])
    return Replacement([gather, *chain, dot], ins, outs, dot.index, run, found, gather.name)


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


def _kept(gather: Node, candidate: Candidate) -> list[tuple[int, Value]] | str:
    """The gathered values that others use, and how many nodes of the chain come before them; or why they cannot be had.

    The last user along the chain is the product.
    """
    dot, chain = candidate.dot, candidate.chain
    values = [gather.outs[0], *(each.outs[0] for each in chain)]
    own = [*chain, dot]
    kept = [
        (i, value)
        for i, (value, user) in enumerate(zip(values, own))
        if value.returned or any(each is not user for each in value.users) or value.users.count(user) > 1
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
