"""Runs a planned product: a program of each device around one operation, over all axes of the mesh."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtaxfree.ops.all_gather_matmul import all_gather_matmul
from jaxtaxfree.ops.matmul_all_reduce import matmul_all_reduce
from jaxtaxfree.ops.matmul_reduce_scatter import matmul_reduce_scatter
from jaxtaxfree.sharded.plan import Axes, Plan, Sharded

type AnyMesh = Mesh | AbstractMesh

# From so many rows on, a copy of the weights is small beside the product.
COPY_FROM = 512

_OPERATIONS: dict[str | None, Callable[..., jax.Array]] = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_all_reduce": matmul_all_reduce,
    "matmul_reduce_scatter": matmul_reduce_scatter,
}


def axes_of(mesh: AnyMesh, kind: AxisType) -> set[str]:
    """The axes of a mesh that are of this type."""
    return {name for name, each in zip(mesh.axis_names, mesh.axis_types, strict=True) if each == kind}


def spec_of(entries: Sequence[Axes], kept: set[str] | None = None) -> PartitionSpec:
    """A `PartitionSpec`, of the axes that are kept."""
    parts = [tuple(axis for axis in entry if kept is None or axis in kept) for entry in entries]
    return PartitionSpec(*(part[0] if len(part) == 1 else part or None for part in parts))


def _in_context(mesh: AnyMesh) -> bool:
    """Whether a mesh is that of `jax.set_mesh`, which JAX then knows better than we do."""
    return isinstance(mesh, AbstractMesh) and not jax.sharding.get_abstract_mesh().empty


def sharding_on(mesh: AnyMesh, spec: PartitionSpec) -> PartitionSpec | NamedSharding:
    """A spec with its mesh, where that is not the one of the context."""
    return spec if _in_context(mesh) else NamedSharding(mesh, spec)


def typed(x: jax.Array, mesh: AnyMesh, entries: Sequence[Axes]) -> jax.Array:
    """`x`, whose type says that it is sharded like this along the Explicit axes."""
    explicit = axes_of(mesh, AxisType.Explicit)
    spec = spec_of(entries, explicit)
    if not explicit or jax.typeof(x).sharding.spec == spec:
        return x
    return jax.reshard(x, sharding_on(mesh, spec))


def placed(x: jax.Array, mesh: AnyMesh, entries: Sequence[Axes]) -> jax.Array:
    """`x`, sharded like this: by its type along Explicit axes, by a constraint along the others."""
    explicit = axes_of(mesh, AxisType.Explicit)
    if explicit.issuperset(mesh.axis_names):
        return typed(x, mesh, entries)
    rest = spec_of(entries, set(mesh.axis_names) - explicit)
    return lax.with_sharding_constraint(typed(x, mesh, entries), sharding_on(mesh, rest))


def run(
    plans: Sequence[Plan],
    mesh: AnyMesh,
    x: jax.Array,
    weights: Sequence[jax.Array],
    others: Mapping[str, Any],
    *,
    gathered: Sequence[Axes] | None = None,
    scales: Mapping[str, Sharded] | None = None,
    **keywords: Any,
) -> list[jax.Array]:
    """The products of one x, by one operation.

    Args:
      plans: of each; of several they agree in all that concerns x, see `disagreement`.
      mesh: that has the plans' axes.
      x, weights: the operands.
      others: "gate" [as the weights], "bias" [columns], "residual" [as the result] and "out_scale" [], as far as there
        are any. Of several products only a bias, a tuple of one or None for each.
      gathered: how x lies where it was gathered, if that is to be returned as well.
      scales: how "lhs_scale", "rhs_scale" and "gate_scale" of others lie, as far as there are any.
      **keywords: of the operation. With out_scale="block" there is one product.

    Returns: the results, which lie as the plans say, and x as it was gathered; or the result and its scales.
    """
    first = plans[0]
    columns = [Sharded(plan.columns, tuple(map(plan.out.along, plan.columns))) for plan in plans]
    bias = others.get("bias")
    of_bias = tuple(None if b is None else c for b, c in zip(bias, columns)) if isinstance(bias, tuple) else columns[0]
    # A bias is as whole, or as sharded, as the columns.
    how = {"gate": first.w, "bias": of_bias, "residual": first.out, "out_scale": Sharded((), ()), **(scales or {})}
    there = {name: given for name, given in others.items() if given is not None}
    arrays = {"x": x, "weights": tuple(weights), **there}
    ins = {"x": first.x, "weights": tuple(plan.w for plan in plans), **{name: how[name] for name in there}}

    def program(given: Mapping[str, Any]) -> list[jax.Array]:
        others = {name: given[name] for name in there}
        gathers = gathered is not None
        return of_device(plans, given["x"], given["weights"], others, return_gathered=gathers, **keywords)

    more = [first.out.entries] if "out_scale" in keywords else [] if gathered is None else [tuple(gathered)]
    outs = [plan.out.entries for plan in plans] + more
    return jax.shard_map(
        program,
        mesh=None if _in_context(mesh) else mesh,
        in_specs=(jax.tree.map(lambda _, lies: spec_of(lies.entries), arrays, ins),),
        out_specs=list(map(spec_of, outs)),
        # What is gathered counts as different on each rank, so that JAX could not check that it is the same.
        check_vma=gathered is None,
    )(jax.tree.map(lambda array, lies: typed(array, mesh, lies.entries), arrays, ins))


def disagreement(plans: Sequence[Plan]) -> list[str]:
    """Why products of one x by several weights are not one operation."""
    first, reasons = plans[0], []
    for plan in plans[1:]:
        if plan.operation != "all_gather_matmul" or first.operation != plan.operation:
            reasons.append("several products are one operation where lhs is gathered alone")
        elif (plan.axes, plan.moved, plan.rows) != (first.axes, first.moved, first.rows):
            reasons.append("several products gather one dimension of lhs along the same axes")
        elif plan.contracted != first.contracted:
            reasons.append(f"weights have their contracted dimensions as {first.contracted} and {plan.contracted}")
    return list(dict.fromkeys(reasons))


def of_device(
    plans: Sequence[Plan],
    x: jax.Array,
    weights: Sequence[jax.Array],
    others: Mapping[str, Any],
    *,
    return_gathered: bool = False,
    **keywords: Any,
) -> list[jax.Array]:
    """The operation, of a device's parts of the arrays: what `run` returns."""
    first, one = plans[0], len(plans) == 1
    lengths = dict(zip(first.x.labels, x.shape, strict=True))
    rows = first.rows or ("",)  # a vector is one row
    x = _ordered(x, first.x.labels, (*first.rows, *first.contracted))
    x = x.reshape(*(x.shape[: len(first.rows)] or (1,)), -1)
    # The kernel of matmul_all_reduce for many rows on Hopper was measured with [K, N] alone.
    in_place = one and (first.operation != "matmul_all_reduce" or math.prod(x.shape[:-1]) < COPY_FROM)
    matrices = [_matrix(plan, w, in_place) for plan, w in zip(plans, weights, strict=True)]
    own: dict[str, Any] = {}
    if one:
        own = {name: _flat(first, name, given, in_place) for name, given in others.items() if given is not None}
        own |= {"rhs_transposed": True} if matrices[0].transposed else {}
    elif others.get("bias") is not None:
        own["bias"] = tuple(None if bias is None else bias.reshape(-1) for bias in others["bias"])
    if first.moved:
        dimension = rows.index(first.moved) if first.moved in rows else len(rows)
        own["axis" if first.operation == "all_gather_matmul" else "scatter_dimension"] = dimension
    if return_gathered:
        own["return_gathered"] = True
    operation = _OPERATIONS[first.operation]
    flat = tuple(each.array for each in matrices)
    found = operation(x, flat[0] if one else flat, first.axes, **own, **keywords)
    if "out_scale" in keywords:  # columns are a single dimension, and the last one
        return [_result(first, matrices[0], each) for each in found]
    products, *more = found if return_gathered else (found,)
    outs = [_result(*each) for each in zip(plans, matrices, (products,) if one else products, strict=True)]
    for gathered in more:
        contracted = [lengths[label] for label in first.contracted]
        whole = gathered.reshape(*(gathered.shape[:-1] if first.rows else ()), -1, *contracted[1:])
        outs.append(_ordered(whole, (*first.rows, *first.contracted), first.x.labels))
    return outs


def _result(plan: Plan, matrix: "_Matrix", y: jax.Array) -> jax.Array:
    """What the operation gives, as the result lies."""
    # Of the columns only the first ones may have been scattered.
    y = y.reshape(*(y.shape[:-1] if plan.rows else ()), -1, *matrix.lengths[1:])
    return _ordered(y, (*plan.rows, *plan.columns), plan.out.labels)


def _flat(plan: Plan, name: str, given: jax.Array, in_place: bool) -> jax.Array:
    """An operand of the epilogue, or a scale, as the operation takes it."""
    if name == "gate":
        return _matrix(plan, given, in_place).array
    if name.endswith("_scale") and given.ndim == 0:
        return given
    if name == "lhs_scale":
        scale = _ordered(given, plan.x.labels, (*plan.rows, *plan.contracted))
        return scale.reshape(*(scale.shape[: len(plan.rows)] or (1,)), -1)
    if name.endswith("_scale"):
        return _matrix(dataclasses.replace(plan, gathered=()), given, in_place).array
    if name == "bias":
        return given.reshape(-1)
    residual = _ordered(given, plan.out.labels, (*plan.rows, *plan.columns))
    return residual.reshape(*(residual.shape[: len(plan.rows)] or (1,)), -1)


class _Matrix(NamedTuple):
    """Weights [K, N], or [N, K] if they are transposed, and the lengths of the dimensions that are their columns."""

    array: jax.Array
    lengths: list[int]
    transposed: bool


def _matrix(plan: Plan, w: jax.Array, in_place: bool) -> _Matrix:
    """A device's weights as the operation takes them.

    Args:
      in_place: weights that lie as [N, K] stay so.
    """
    labels = plan.w.labels
    for label, axes in plan.gathered:
        w = lax.all_gather(w, axes, axis=labels.index(label), tiled=True)
    lengths = dict(zip(labels, w.shape, strict=True))
    columns = [lengths[label] for label in plan.columns]
    if plan.layout == "NK" and in_place:
        return _Matrix(w.reshape(math.prod(columns), -1), columns, True)
    w = _ordered(w, labels, (*plan.contracted, *plan.columns))
    return _Matrix(w.reshape(-1, math.prod(columns)), columns, False)


def _ordered(x: jax.Array, labels: Sequence[str], wanted: Sequence[str]) -> jax.Array:
    """An array with its dimensions in another order."""
    return x if tuple(labels) == tuple(wanted) else x.transpose([labels.index(label) for label in wanted])
