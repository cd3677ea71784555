"""Finds products of global arrays whose types say, along Explicit axes, that rows are gathered or sums are made."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxtaxfree import teams
from jaxtaxfree.fusion.arrange import Arrangement, Axes, arrange, axes_of_spec
from jaxtaxfree.fusion.find import Replacement, form_and_operands, place
from jaxtaxfree.fusion.graph import CASTS, Graph, Node, Value, made_by
from jaxtaxfree.fusion.products import Form, Product, described, exact_wire
from jaxtaxfree.fusion.report import Found, Missed


def find_typed(graph: Graph, path: str) -> tuple[list[Replacement], list[Missed]]:
    """All such products.

    Args:
      path: the transformations around the graph, for the report.
    """
    steps, missed = [], []
    gathered: set[Value] = set()  # by a step that gives them to all their users
    for dot in graph.nodes:
        if dot.name != "dot_general" or not _is_global(dot):
            continue
        found = _product(dot, gathered, path)
        if isinstance(found, Replacement):
            steps.append(found)
            gathered.update(found.outs[1:])
        elif found is not None:
            missed.append(found)
    return steps, missed


def _is_global(dot: Node) -> bool:
    """Whether the types of a product say how its operands are sharded, and no `jax.shard_map` is around it."""
    meshes = [x.aval.sharding.mesh for x in (*dot.ins, *dot.outs)]
    return all(not mesh.manual_axes for mesh in meshes) and any(mesh.explicit_axes for mesh in meshes)


def _product(dot: Node, gathered: set[Value], path: str) -> Replacement | Missed | None:
    """A product as one step; why it is none; or None if nothing of its rows or sums moves."""
    out = dot.outs[0].aval
    if out.sharding.spec.unreduced or any(x.aval.sharding.spec.unreduced for x in dot.ins):
        return None
    reasons: list[str] = []
    communicates: Axes = ()
    for rows in (0, 1):
        source, chain = _source(dot, rows, gathered)
        form, own = form_and_operands(dot, rows)
        if isinstance(form, str):
            reasons.append(form)
            communicates = communicates or _moved(dot)
            continue
        x, w = source.aval, own[1 - rows].aval
        x_axes, w_axes, out_axes = (axes_of_spec(each.sharding.spec, len(each.shape)) for each in (x, w, out))
        contracted = sorted(dot.params["dimension_numbers"][0][rows])
        found = arrange(form, x_axes, w_axes, out_axes, contracted)
        if found is None:
            return None
        communicates = communicates or _moved(dot) or _lost(source.aval, dot.ins[rows].aval)
        if isinstance(found, str):
            reasons.append(found)
            continue
        step = _step(dot, rows, own, source, chain, form, found, path)
        if isinstance(step, Replacement):
            return step
        reasons.append(step)
    if not communicates:
        return None
    return Missed("dot_general", communicates, place(dot, path), "; ".join(dict.fromkeys(reasons)))


def _moved(dot: Node) -> Axes:
    """The axes along which a product makes sums."""
    contracted, _ = dot.params["dimension_numbers"]
    names = [axes_of_spec(x.aval.sharding.spec, len(x.aval.shape)) for x in dot.ins]
    pairs = zip(*contracted)
    return tuple(dict.fromkeys(axis for a, b in pairs for axis in names[0][a] if axis in names[1][b]))


def _lost(before: Any, after: Any) -> Axes:
    """The axes along which a resharding gathers."""
    old, new = (
        {axis for entry in axes_of_spec(x.sharding.spec, len(x.shape)) for axis in entry} for x in (before, after)
    )
    return tuple(sorted(old - new))


def _source(dot: Node, rows: int, gathered: set[Value]) -> tuple[Any, list[Node]]:
    """What the rows of a product are a resharding of, through casts; the rows themselves if they are none."""
    value = dot.ins[rows]
    if value in gathered:
        return value, []
    maker, chain = made_by(value, CASTS)
    widened = any(x.outs[0].aval.dtype.itemsize > x.ins[0].aval.dtype.itemsize for x in chain)
    if maker is None or maker.name != "reshard" or widened:
        return value, []
    return maker.ins[0], [maker, *chain]


def _step(
    dot: Node,
    rows: int,
    own: tuple[Any, ...],
    source: Any,
    chain: list[Node],
    form: Form,
    found: Arrangement,
    path: str,
) -> Replacement | str:
    out, weights = dot.outs[0].aval, own[1 - rows]
    operands = [x.aval for x in own]
    mesh = out.sharding.mesh
    if left := [axis for axis in mesh.axis_names if axis not in mesh.explicit_axes and mesh.shape[axis] > 1]:
        return f"the mesh has axes {left} that are not Explicit"
    # Others use the gathered rows: those along the chain before a cast keep JAX's own gather.
    gathers = found.operation == "all_gather_matmul" and bool(chain)
    shared = gathers and (dot.ins[rows].returned or dot.ins[rows].users != [dot])
    precision = dot.params["precision"]
    exact = found.operation != "all_gather_matmul" and exact_wire(found.operation, operands[0].dtype, [out.dtype])
    product = Product(
        found.operation, form, found.axes, found.dimension, precision, out.dtype, exact=exact, return_gathered=shared
    )
    if reasons := product.refusals(operands):
        return "; ".join(reasons)
    dtype = operands[rows].dtype
    in_specs = tuple(map(_spec, found.specs))
    out_specs = (out.sharding.spec, operands[rows].sharding.spec) if shared else out.sharding.spec

    def local(x: jax.Array, w: jax.Array, implementation: str | None) -> Any:
        for dimension, axes in enumerate(found.weights):
            if axes:
                w = lax.all_gather(w, axes, axis=dimension, tiled=True)
        result, rows = product(x.astype(dtype), w, implementation)
        return (result, rows) if shared else result

    def run(ins: Sequence[Any], implementation: str | None) -> list[Any]:
        # What is gathered counts as different on each rank, so that JAX could not check that it is the same.
        call = jax.shard_map(
            lambda x, w: local(x, w, implementation),
            mesh=None if jax.sharding.get_abstract_mesh() == mesh else mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=not (shared or any(found.weights)),
        )
        results = call(*map(teams.resharded, ins, in_specs))
        return list(results) if shared else [results]

    what = Found(product.operation, product.axes, described(form, operands), place(dot, path), product.note(operands))
    outs = (dot.outs[0], dot.ins[rows]) if shared else (dot.outs[0],)
    return Replacement(_gone(dot, rows, chain, shared), (source, weights), outs, dot.index, run, what, dot.name)


def _gone(dot: Node, rows: int, chain: list[Node], shared: bool) -> list[Node]:
    """The nodes that nobody needs any more."""
    gone, value = [dot], dot.ins[rows]
    for node in reversed(chain):
        if not shared and (value.returned or value.users != [gone[-1]]):
            break
        gone.append(node)
        value, shared = node.ins[0], False
    return gone


def _spec(axes: Sequence[Axes]) -> PartitionSpec:
    return PartitionSpec(*(None if not each else each[0] if len(each) == 1 else each for each in axes))
