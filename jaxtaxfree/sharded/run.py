"""Runs a planned product: a program of each device around one operation, over all axes of the mesh."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtaxfree.ops.all_gather_matmul import all_gather_matmul
from jaxtaxfree.ops.matmul_all_reduce import matmul_all_reduce
from jaxtaxfree.ops.matmul_reduce_scatter import matmul_reduce_scatter
from jaxtaxfree.sharded.plan import Axes, Plan, Sharded

type AnyMesh = Mesh | AbstractMesh

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
    plan: Plan, mesh: AnyMesh, lhs: jax.Array, rhs: jax.Array, others: Mapping[str, jax.Array], **keywords: Any
) -> jax.Array:
    """The product by the plan's operation.

    Args:
      mesh: that has the plan's axes.
      others: "gate" [as w], "bias" [columns] and "residual" [as the result], as far as there are any.
      **keywords: of the operation.

    Returns: the result, which lies as the plan says.
    """
    x, w = (rhs, lhs) if plan.swapped else (lhs, rhs)
    # A bias is as whole, or as sharded, as the columns.
    columns = Sharded(plan.columns, tuple(map(plan.out.along, plan.columns)))
    how = {"gate": plan.w, "bias": columns, "residual": plan.out}
    ins = [sharded.entries for sharded in (plan.x, plan.w, *(how[name] for name in others))]
    arrays = [typed(each, mesh, entries) for each, entries in zip((x, w, *others.values()), ins, strict=True)]

    def program(x: jax.Array, w: jax.Array, *more: jax.Array) -> jax.Array:
        return _of_device(plan, x, w, dict(zip(others, more, strict=True)), keywords)

    return jax.shard_map(
        program,
        mesh=None if _in_context(mesh) else mesh,
        in_specs=tuple(map(spec_of, ins)),
        out_specs=spec_of(plan.out.entries),
    )(*arrays)


def _of_device(
    plan: Plan, x: jax.Array, w: jax.Array, others: dict[str, jax.Array], keywords: dict[str, Any]
) -> jax.Array:
    """The operation, of a device's parts of the arrays."""
    rows = plan.rows or ("",)  # a vector is one row
    w, lengths = _matrix(plan, w)
    x = _ordered(x, plan.x.labels, (*plan.rows, *plan.contracted))
    x = x.reshape(*(x.shape[: len(plan.rows)] or (1,)), -1)
    if "gate" in others:
        others["gate"], _ = _matrix(plan, others["gate"])
    if "bias" in others:
        others["bias"] = others["bias"].reshape(-1)
    if "residual" in others:
        residual = _ordered(others["residual"], plan.out.labels, (*plan.rows, *plan.columns))
        others["residual"] = residual.reshape(*(residual.shape[: len(plan.rows)] or (1,)), -1)
    own: dict[str, Any] = {"rhs_transposed": True} if plan.layout == "NK" else {}
    if plan.moved:
        dimension = rows.index(plan.moved) if plan.moved in rows else len(rows)
        own["axis" if plan.operation == "all_gather_matmul" else "scatter_dimension"] = dimension
    y = _OPERATIONS[plan.operation](x, w, plan.axes, **own, **others, **keywords)
    # Of the columns only the first ones may have been scattered.
    y = y.reshape(*(y.shape[:-1] if plan.rows else ()), -1, *lengths[1:])
    return _ordered(y, (*plan.rows, *plan.columns), plan.out.labels)


def _matrix(plan: Plan, w: jax.Array) -> tuple[jax.Array, list[int]]:
    """A device's weights as [K, N], or as [N, K] where they lie so; and the lengths of their columns' dimensions."""
    labels = plan.w.labels
    for label, axes in plan.gathered:
        w = lax.all_gather(w, axes, axis=labels.index(label), tiled=True)
    lengths = dict(zip(labels, w.shape, strict=True))
    columns = [lengths[label] for label in plan.columns]
    if plan.layout == "NK":
        return w.reshape(math.prod(columns), -1), columns
    w = _ordered(w, labels, (*plan.contracted, *plan.columns))
    return w.reshape(-1, math.prod(columns)), columns


def _ordered(x: jax.Array, labels: Sequence[str], wanted: Sequence[str]) -> jax.Array:
    """An array with its dimensions in another order."""
    return x if tuple(labels) == tuple(wanted) else x.transpose([labels.index(label) for label in wanted])
