"""The launches that `simulator.run_iris` takes, as a JAX program of `iris_call`s: the same calls on both ways."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import iris
from jaxtaxfree.simulator.iris import Buffer, Launch
from tests.helpers.support import lower_for_cuda, mesh_of, one_program


def lowered(launches: Sequence[Any], world: int) -> str:
    """The program for CUDA, inside `jax.shard_map`: one that opens a workspace, the launches, and one that reads it.

    Symmetric buffers, and what kernels are to find filled, are the workspace's. Of the others those that begin with
    values are operands; the rest is a result of the launch that takes it first. `Fill` and `Barrier` are left out: a
    workspace fills and meets by itself.
    """
    kernels = [each for each in launches if isinstance(each, Launch)]
    buffers = dict.fromkeys(v for launch in kernels for v in launch.arguments.values() if isinstance(v, Buffer))
    shared = {each: f"b{i}" for i, each in enumerate(buffers) if each.symmetric or _is_number(each.value)}

    def program() -> jax.Array:
        held = {name: _symmetric(each) for each, name in shared.items()}
        ws = iris.workspace("tp", name="lowered", **held)
        arrays: dict[Buffer, jax.Array] = {}
        for launch in kernels:
            arguments, results = {}, []
            for name, value in launch.arguments.items():
                if isinstance(value, Buffer) and value not in shared:
                    if value.value is not None:
                        arrays[value] = jnp.asarray(value.value[0], value.dtype)
                    if value not in arrays:
                        results.append((launch.kernel.arg_names.index(name), value))
                arguments[name] = _argument(value, shared, ws, arrays)
            found = jtf.iris_call(launch.kernel, arguments, workspace=ws, grid=launch.grid)
            outs, ws = found if results else ((), found)
            outs = [outs] if len(results) == 1 else outs
            arrays |= {each: out for (_, each), out in zip(sorted(results, key=lambda x: x[0]), outs)}
        first, _ = ws.read(next(iter(shared.values())))
        used = [each.reshape(-1)[:1].astype(jnp.float32) for each in (first, *arrays.values())]
        return jnp.concatenate(used)

    mesh = mesh_of(world)
    return lower_for_cuda(one_program(program, mesh=mesh, in_specs=(), out_specs=P("tp"), check_vma=False))


def launched(launches: Sequence[Any]) -> int:
    """How many kernels `lowered` has of them."""
    return 2 + sum(isinstance(each, Launch) for each in launches)


def _is_number(value: Any) -> bool:
    return value is not None and np.ndim(value) == 0


def _symmetric(of: Buffer) -> Any:
    if of.value is None or _is_number(of.value):
        return iris.symmetric(of.shape, of.dtype, fill=of.value)
    return iris.symmetric(jnp.asarray(of.value[0], of.dtype))


def _argument(value: Any, shared: dict[Buffer, str], ws: iris.Workspace, arrays: dict[Buffer, jax.Array]) -> Any:
    if not isinstance(value, Buffer):
        return value
    if value in shared:
        return getattr(ws, shared[value])
    return arrays[value] if value in arrays else iris.Out(value.shape, value.dtype)
