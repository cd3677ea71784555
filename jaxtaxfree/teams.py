"""Which devices work together: the axes of a mesh as a team of ranks."""

import dataclasses
import math
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.core import get_axis_env
from jax._src.sharding_impls import ShardingContext, SPMDAxisContext, _internal_use_concrete_mesh
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxtaxfree import environment
from jaxtaxfree.target import capability_of


class ArrangementError(NotImplementedError):
    """The mesh, or the processes, let no kernel run, of whatever shape.

    The message says what to do. It is logged once for each text, so it does not name a call, or its shapes.
    """


@dataclasses.dataclass(frozen=True)
class Team:
    """The teams that an axis splits a mesh into: one for each index along the other axes.

    Attributes:
      axes: the axes along which ranks work together, the last one counting fastest.
      others: the other axes of the mesh.
      world: ranks in a team.
      devices: of the whole mesh, the members of each team next to each other in the order of their ranks.
      rocm: whether the program is lowered for GPUs of AMD.
    """

    axes: tuple[str, ...]
    others: tuple[str, ...]
    world: int
    devices: tuple[Any, ...]
    rocm: bool = False

    @property
    def on_gpus(self) -> bool:
        """Whether the program will run on GPUs; otherwise it is only built for them."""
        return all(device.platform == "gpu" for device in self.devices)

    @property
    def compute_capability(self) -> int:
        """Of the GPUs, 90 for 9.0 and 0x942 for gfx942; where the program is only built, what
        JAXTAXFREE_COMPUTE_CAPABILITY says, or 90 or 0x942."""
        if not self.on_gpus:
            return environment.compute_capability(self.rocm)
        return capability_of(self.devices[0].compute_capability)

    @property
    def multiprocessors(self) -> int | None:
        """Of the GPU that has the fewest; None if the program is only built for GPUs."""
        return min(device.core_count for device in self.devices) if self.on_gpus else None

    @property
    def device_kind(self) -> str:
        """Of the GPUs, such as "NVIDIA H200"; empty if they are of several, or the program is only built for them."""
        kinds = {device.device_kind for device in self.devices} if self.on_gpus else set()
        return kinds.pop() if len(kinds) == 1 else ""

    def position(self, index: jax.Array | None = None) -> jax.Array:
        """Index of this device in `devices`, i32[]. Inside `shard_map`.

        Args:
          index: that along `axes`, if the caller has it.
        """
        position = jnp.int32(0)
        for axis in self.others if index is not None else (*self.others, *self.axes):
            if lax.axis_size(axis) > 1:
                position = position * lax.axis_size(axis) + lax.axis_index(axis)
        return position if index is None else position * self.world + index


def check_axes(axis_name: str | Sequence[str] | None, operation: str, *, alone: bool = False) -> tuple[str, ...]:
    """The axes as a tuple.

    Args:
      operation: its name, for errors.
      alone: whether there may be none, () or None: each rank works on its own.

    Raises:
      NameError: if one is not bound.
      TypeError: if it is no name, and no sequence of names.
      ValueError: if it names an axis twice.
    """
    if alone and (axis_name is None or (isinstance(axis_name, tuple | list) and not axis_name)):
        return ()
    several = not isinstance(axis_name, str)
    if several and (not isinstance(axis_name, Iterable) or isinstance(axis_name, jax.Array)):
        raise TypeError(f"{operation} takes a mesh axis as axis_name, or a tuple of them, not {axis_name!r}.")
    axes = tuple(axis_name) if several else (axis_name,)
    if wrong := [axis for axis in axes if not isinstance(axis, Hashable)]:
        raise TypeError(f"{operation} takes mesh axes in the tuple axis_name, not {wrong[0]!r}.")
    if len(set(axes)) < len(axes):
        raise ValueError(f"{operation} takes each mesh axis once, not {axes!r}.")
    unbound = [axis for axis in axes if not get_axis_env().axis_exists(axis)]
    if unbound or not axes:
        raise NameError(
            f"{operation} needs a mesh axis to work along, and {unbound[0] if unbound else axis_name!r} is none: "
            "call it inside jax.shard_map over a mesh that has the axis"
            f"{', or pass axis_name=() for a call without peers' if alone else ''}."
        )
    return axes


def check_index(axis_index: Any, operation: str) -> jax.Array | None:
    """A rank's number that the caller has, as i32[]; None if there is none.

    Raises:
      TypeError: if it is no whole number.
      ValueError: if it is several.
    """
    if axis_index is None:
        return None
    index = jnp.asarray(axis_index)
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(
            f"{operation} takes as axis_index a whole number, which jax.lax.axis_index gives, not {index.dtype}."
        )
    if index.size != 1:
        raise ValueError(
            f"{operation} takes as axis_index the number of one rank, i32[] or i32[1], not {list(index.shape)}."
        )
    return index.reshape(()).astype(jnp.int32)


def vary(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`x` as a value that may differ along these axes, as far as it does not yet. Nothing happens at run time."""
    manual = jax.sharding.get_abstract_mesh().manual_axes  # an axis of jax.vmap is none of them
    missing = tuple(axis for axis in axes if axis in manual and axis not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def varying(x: jax.Array) -> frozenset[str]:
    """The mesh axes along which `x` may differ, where `shard_map` keeps account of them (`check_vma=True`)."""
    return jax.typeof(x).mat.varying


def replicated(x: jax.Array, axes: Iterable[str]) -> list[str]:
    """The axes of several ranks along which `x` is known to be the same on each; none with `check_vma=False`."""
    same = [axis for axis in axes if axis not in varying(x)]
    return [axis for axis in same if axis in varying(lax.axis_index(axis)) and lax.axis_size(axis) > 1]


def explicit_axes(ctx: Any) -> tuple[str, ...]:
    """The Explicit axes that `jax.shard_map` leaves over where a program is lowered: those that types name.

    None if it leaves others over, too, or the mesh is abstract.
    """
    context = ctx.module_context.axis_context
    mesh = context.mesh if isinstance(context, SPMDAxisContext) else None
    if not isinstance(mesh, Mesh):
        return ()
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit}
    if not explicit.issuperset(_left_over(context)):
        return ()
    return tuple(axis for axis in mesh.axis_names if axis in explicit - context.manual_axes)


def _left_over(context: SPMDAxisContext) -> list[str]:
    """The axes of several devices that are not manual."""
    mesh = context.mesh
    return [axis for axis in mesh.axis_names if axis not in context.manual_axes and mesh.shape[axis] > 1]


def concrete_mesh(ctx: Any) -> AbstractContextManager[None]:
    """In which a `jax.shard_map` that is traced where a program is lowered knows the program's devices."""
    return _internal_use_concrete_mesh(ctx.module_context.axis_context.mesh)


def explicit_sharding(aval: Any) -> Any:
    """A type's sharding as the `out_sharding` of a function of `lax`; None where no axis is Explicit."""
    return aval.sharding if aval.sharding.mesh.explicit_axes else None


def resharded(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """`x`, sharded like this along Explicit axes that are not manual."""
    return x if jax.typeof(x).sharding.spec == spec else jax.reshard(x, spec)


def whole(x: jax.Array, dimension: int) -> jax.Array:
    """`x` without the sharding of a dimension along Explicit axes that are not manual."""
    spec = list(jax.typeof(x).sharding.spec.partitions)
    if spec[dimension] is None:
        return x
    spec[dimension] = None
    return jax.reshard(x, PartitionSpec(*spec))


def team_of(ctx: Any, axes: tuple[str, ...]) -> Team:
    """The team of these axes where a program is lowered.

    Raises:
      ArrangementError: if the mesh does not say which devices the program will run on, or not all of its axes are
        manual; without axes and a mesh, if the program is for several devices.
    """
    context = ctx.module_context.axis_context
    rocm = "rocm" in (ctx.platforms or ctx.module_context.platforms)
    if not axes and isinstance(context, ShardingContext):
        return _alone(context.device_assignment, rocm)
    mesh = context.mesh if isinstance(context, SPMDAxisContext) else None
    if not isinstance(mesh, Mesh):
        raise ArrangementError(
            "the mesh is abstract: set a concrete one with jax.set_mesh, or pass it to jax.shard_map (not if nested)"
        )
    if automatic := _left_over(context):
        raise ArrangementError(
            f"jax.shard_map leaves the mesh axes {automatic} to the compiler, and a kernel cannot be split by it: "
            "make all axes manual, which they are if axis_names is left out and the specs name them"
        )
    others = tuple(axis for axis in mesh.axis_names if axis not in axes and axis in context.manual_axes)
    hidden = tuple(axis for axis in mesh.axis_names if axis not in context.manual_axes)
    order = [mesh.axis_names.index(axis) for axis in (*hidden, *others, *axes)]
    devices = tuple(np.transpose(mesh.devices, order).flat)
    return Team(axes, others, math.prod(mesh.shape[axis] for axis in axes), devices, rocm)


def _alone(devices: tuple[Any, ...] | None, rocm: bool) -> Team:
    """The team of a call without peers that is in no `jax.shard_map`.

    Raises:
      ArrangementError: if the program is for several devices, or JAX does not say for which.
    """
    if devices is None:
        raise ArrangementError("JAX does not say for which device the program is: call it inside jax.shard_map")
    if len(devices) > 1:
        raise ArrangementError(
            "the program is for several devices, and outside of jax.shard_map the compiler would have to split the "
            "kernel among them, which it cannot: call it inside jax.shard_map, with axis_name=() if each device has "
            "all keys of its sequences or heads"
        )
    return Team((), (), 1, devices, rocm)
