"""`iris_call`: an Iris kernel as a JAX operation, and workspaces for kernels that share buffers."""

import dataclasses
import functools
import hashlib
import math
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.core import trace_ctx

from jaxtaxfree import heap, language, shmem
from jaxtaxfree.call import check_call, check_kernel, sizes_of
from jaxtaxfree.iris import reading, wrapper
from jaxtaxfree.iris.arguments import Arguments, Buffer, Symmetric, sort, triton_dtype
from jaxtaxfree.teams import check_axes

_FILLERS = 64  # programs of a kernel's own grid that fill its buffers: so many have to run at once
_OPENERS = 256  # programs of a launch that does nothing else
_CLOSERS = 128
_READ_A_PROGRAM = 1 << 15  # bytes


def iris_call(
    kernel: Any,
    arguments: Mapping[str, Any] | None = None,
    *,
    axis_name: str | Sequence[str] | None = None,
    grid: int | tuple[int, ...],
    workspace: "Workspace | None" = None,
    constant_rank: bool | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    together: int = 1,
    name: str | None = None,
    implementation: str | None = None,
    **named: Any,
) -> Any:
    """Runs a kernel that was written for Iris on every rank of a mesh axis. Call it inside `jax.shard_map`.

    The kernel is unmodified: a function decorated with `triton.jit` that reaches its peers by Iris's device functions
    or by ours (`jaxtaxfree.iris`). Each of its parameters is given by name:

    * an array [...], which is an operand of this rank. The kernel may not store into it;
    * `Out(shape, dtype)`: a result of this rank;
    * `symmetric(...)`: a buffer on the symmetric heap, or `ws.name`: one of a workspace;
    * `RANK`, `WORLD`, or a `Number` of them such as `(RANK + 1) % WORLD`;
    * `BASES`: the table with the base of every rank's heap (Iris's `heap_bases`); or `CONTEXT`: the tensor that Iris's
      `get_device_context` makes;
    * a number, dtype, string or None, as in Triton.

    Parameters with a default may be left out. What holds when the kernel begins: bases[r] + (p - bases[rank]) is where
    rank r keeps what this rank keeps at p, for each symmetric buffer; all ranks' buffers are filled as `fill` says; and
    nothing that an earlier call has stored can still arrive in them. This takes one meeting of all ranks, for which
    every program waits. A rank that does not come to it within the heap's timeout is reported, the kernel does not run,
    and results are NaN, -1 in integers. Waits inside of the kernel have no bound.

    Args:
      kernel: the Iris kernel.
      arguments: values of parameters whose names are also keywords of this function.
      axis_name: the mesh axis, or axes, along which the ranks work together. A workspace knows its own.
      grid: number of programs, in one to three dimensions, the same on every rank.
      workspace: the kernel takes part in a call that this workspace has opened.
      constant_rank: whether the rank is a constant, in a copy of the kernel for each rank, which takes so many times as
        long to compile. None: if the kernel asks for it, as far as its source says.
      num_warps, num_stages: as in Triton.
      together: how many programs with consecutive ids may wait for each other; see `shmem_call`. Of a persistent kernel
        that waits for any of its programs, say all. If there are fewer multiprocessors, the call is refused.
      name: the operation's name in profiles and errors; the kernel's name if None.
      implementation: None and "fused" run the kernel on GPUs, "simulate" on the CPU; see `jaxtaxfree.simulator`.
      **named: values of the kernel's parameters.

    Returns: the result, or a tuple of them in the order of the kernel's parameters. With a workspace (results,
      workspace), or the workspace alone if there are no results; use that one from then on.

    Raises:
      TypeError: if the kernel is not decorated, or the arguments do not fit it: with all reasons.
      ValueError: if a number is out of range, or the kernel waits in a way that a compiler deletes, or that does not
        assemble: with the line and what to do.
      NotImplementedError, jaxtaxfree.CompileError, jaxtaxfree.PeerTimeoutError: as `shmem_call` does.
    """
    check_kernel(kernel, "iris_call")
    name = name or kernel.fn.__name__
    if kernel.is_gluon():
        raise TypeError(f"iris_call takes kernels of triton.jit, and {name} is one of gluon.jit: see shmem_call.")
    with language.as_triton_has_it():
        hash(kernel)  # which Triton remembers, with all that the kernel calls
    given = {**(arguments or {}), **named}
    buffers = workspace.buffers if workspace is not None else None
    found = sort(kernel, name, given, buffers)
    if problems := reading.problems(kernel):
        raise ValueError(f"The Iris kernel {name} cannot run like this: {'; '.join(problems)}.")
    if constant_rank is None:
        constant_rank = reading.wants_constant_rank(kernel, [key for key, of in found.special.items()])
    how = {"num_warps": num_warps, "num_stages": num_stages, "together": together}
    if workspace is not None:
        if axis_name is not None and check_axes(axis_name, name, alone=True) != workspace.axes:
            raise ValueError(f"{name} runs along the axes of its workspace, {workspace.axes}, not {axis_name!r}.")
        return _join(kernel, found, workspace, grid, name, constant_rank, how)
    if axis_name is None:
        raise TypeError(f"{name} takes axis_name, or a workspace.")
    if not found.outs and not any(each.result for each in found.symmetric.values()):
        raise TypeError(f"The Iris kernel {name} has no result: give it an Out(...) or a symmetric(..., result=True).")
    axes = check_axes(axis_name, name, alone=True)
    if any(each.result for each in found.symmetric.values()):
        return _with_results(kernel, found, axes, grid, name, constant_rank, how, implementation)
    return _alone(kernel, found, axes, grid, name, constant_rank, how, implementation)


def _alone(
    kernel: Any,
    found: Arguments,
    axes: tuple[str, ...],
    grid: Any,
    name: str,
    constant_rank: bool,
    how: Mapping[str, Any],
    implementation: str | None,
) -> Any:
    world, sizes = lax.axis_size(axes), _checked(name, grid)
    programs = math.prod(sizes)
    parts = wrapper.parts_of(found.symmetric.values(), min(programs, _FILLERS))
    scratch = {"iris_table": jax.ShapeDtypeStruct((programs, world + 2), np.dtype(np.int64))}
    scratch |= {f"{key}_symmetric": jax.ShapeDtypeStruct(of.shape, of.dtype) for key, of in found.symmetric.items()}
    outs = shmem.shmem_call(
        wrapper.alone(kernel, found, parts, constant_rank),
        *found.operands.values(),
        *(of.source for of in found.symmetric.values() if of.source is not None),
        axis_name=axes,
        out_type=tuple(jax.ShapeDtypeStruct(of.shape, of.dtype) for of in found.outs.values()),
        grid=sizes,
        scratch=scratch,
        signals={"iris_opened": (world,)},
        name=name,
        implementation=implementation,
        **_with_together(how, parts),
        **wrapper.constants(found),
    )
    return outs[0] if len(outs) == 1 else outs


def _with_together(how: Mapping[str, Any], least: int) -> dict[str, Any]:
    """For a launch in which at least so many programs wait for each other."""
    return {**how, "together": max(how["together"], least)}


def _with_results(
    kernel: Any,
    found: Arguments,
    axes: tuple[str, ...],
    grid: Any,
    name: str,
    constant_rank: bool,
    how: Mapping[str, Any],
    implementation: str | None,
) -> Any:
    """A call some of whose symmetric buffers are results: a workspace for it alone."""
    held = {f"{key}_buffer": of for key, of in found.symmetric.items()}  # a workspace has attributes of its own
    ws = workspace(axes, name=f"of {name}", implementation=implementation, after=found.operands, **held)
    buffers = {key: getattr(ws, f"{key}_buffer") for key in found.symmetric}
    within = dataclasses.replace(found, symmetric={}, buffers=buffers)
    joined = _join(kernel, within, ws, grid, name, constant_rank, how)
    outs, ws = joined if found.outs else ((), joined)
    values = dict(zip(found.outs, [outs] if len(found.outs) == 1 else outs))
    wanted = [key for key, of in found.symmetric.items() if of.result]
    read, _ = ws.read(*(f"{key}_buffer" for key in wanted))
    values |= dict(zip(wanted, [read] if len(wanted) == 1 else read))
    ordered = tuple(values[key] for key in kernel.arg_names if key in values)
    return ordered[0] if len(ordered) == 1 else ordered


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Symmetric buffers that several launches share; see `workspace`. Its buffers are its attributes, by name.

    Attributes:
      token: i32[1], what orders the launches.
      axes: the mesh axes of its ranks.
      name: of its memory.
      buffers: what it holds.
      layout: of its region.
      implementation: of all its launches.
    """

    token: jax.Array
    axes: tuple[str, ...]
    name: str
    buffers: tuple[Buffer, ...]
    layout: heap.Layout
    implementation: str | None

    def __getattr__(self, name: str) -> Buffer:
        for each in object.__getattribute__(self, "buffers"):
            if each.name == name:
                return each
        raise AttributeError(f"The workspace {self.name!r} has no buffer {name!r}.")

    def read(self, *names: str) -> tuple[Any, "Workspace"]:
        """Buffers as arrays, behind a meeting of all ranks: what peers have stored by earlier launches has arrived.

        Args:
          *names: of the buffers.

        Returns: (the array, or a tuple of them; the workspace from then on).
        """
        read = [getattr(self, name) for name in names]
        size = sum(math.prod(each.shape) * np.dtype(each.dtype).itemsize for each in read)
        programs = max(1, min(_CLOSERS, math.ceil(size / _READ_A_PROGRAM)))
        outs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in read]
        kernel = wrapper.closing(self.buffers, read, programs)
        token, *arrays = self._launch(kernel, [self.token], outs, (programs,), f"{self.name} read", {}, {})
        return arrays[0] if len(arrays) == 1 else tuple(arrays), dataclasses.replace(self, token=token)

    def _launch(
        self,
        kernel: Any,
        operands: Sequence[Any],
        outs: Sequence[Any],
        grid: tuple[int, ...],
        name: str,
        params: Mapping[str, Any],
        how: Mapping[str, Any],
    ) -> list[jax.Array]:
        """A launch; its first result is the token."""
        how = {"num_warps": 4, "num_stages": 3, "together": 1, **how}
        params = {**params, "WORLD": lax.axis_size(self.axes)}
        names = (*self.layout.scratch, *self.layout.signals)
        outs = [jax.ShapeDtypeStruct((1,), np.dtype(np.int32)), *outs]
        arrays = [jnp.asarray(operand) for operand in operands]
        shared = dict(names)
        check_call(
            kernel, name, arrays, outs, grid, params, scratch={}, messages={}, descriptors={}, signals=shared, **how
        )
        with language.as_triton_has_it():
            hash(kernel)
        results = shmem.bind(
            kernel,
            arrays,
            outs,
            bundles=(None,) * len(arrays),
            axes=self.axes,
            grid=grid,
            layout=self.layout,
            descriptors=(),
            name=name,
            cost_estimate=None,
            params=params,
            simulate=self.implementation == "simulate",
            shared=self._memory,
            **{key: int(value) for key, value in how.items()},
        )
        lax.neg(results[0])  # of which XLA makes nothing: JAX keeps what is used for as long as it traces the program
        _last.tokens[self._memory] = weakref.ref(results[0])
        return results

    @property
    def _memory(self) -> str:
        """The name of its region, the same in every process."""
        return f"{self.name} [{_digest(self.layout, self.buffers)}]"

    def _before(self) -> jax.Array:
        """The token of the workspace that had this memory before, where one program traces both; otherwise any."""
        last = _last.tokens[self._memory]() if self._memory in _last.tokens else None
        if last is None or getattr(last, "_trace", None) is not trace_ctx.trace:
            return jnp.zeros((1,), jnp.int32)
        return last


class _Last(threading.local):
    """The token of the last launch by the workspace's memory, of each thread: others trace programs of their own."""

    def __init__(self) -> None:
        self.tokens: dict[str, Any] = {}


_last = _Last()


jax.tree_util.register_dataclass(
    Workspace,
    data_fields=["token"],
    meta_fields=["axes", "name", "buffers", "layout", "implementation"],
)


def workspace(
    axis_name: str | Sequence[str],
    /,
    *,
    name: str = "workspace",
    after: Any = None,
    implementation: str | None = None,
    **buffers: Symmetric,
) -> Workspace:
    """Opens a call of several launches that share symmetric buffers. Inside `jax.shard_map`.

    One launch fills this call's copy of the buffers and meets all ranks. What the kernels store stays until the next
    call but one. Give the workspace to each `iris_call`, and go on with the one that it returns: this orders them.

    Workspaces of the same name and buffers share memory, like two calls of one kernel. So launch the last kernel of one
    before you open the next. Where one function opens both, or the second is opened `after` a result of the first, or a
    loop goes round, they follow each other. Otherwise, such as in a function under a `jax.jit` of its own, XLA may
    interleave them; the GPU then stops with an error ("unspecified launch failure"). Say `after`, or give them
    different names.

    Args:
      axis_name: the mesh axis, or axes, along which the ranks work together.
      name: of the memory.
      after: arrays, in any structure: it is opened when they are there. Pass the operands of what runs in it.
      implementation: of all its launches: None or "fused".
      **buffers: `symmetric(...)` for each name.

    Raises:
      TypeError: if a buffer is something else, or has a name that a workspace needs itself, or Triton does not know the
        dtype of an array of `after`.
      NotImplementedError: with implementation="simulate".
    """
    if implementation not in (None, "fused", "simulate"):
        raise ValueError(f"A workspace has no implementation {implementation!r}: choose None, 'fused' or 'simulate'.")
    reserved = {field.name for field in dataclasses.fields(Workspace)} | {"read", "after"}
    taken = {"after": after} if isinstance(after, Symmetric) else {}
    for key, of in (buffers | taken).items():
        if not isinstance(of, Symmetric):
            raise TypeError(f"The workspace {name!r} takes buffers as symmetric(...), not {key}={of!r}.")
        if key in reserved or key.startswith("_"):
            raise TypeError(
                f"A buffer of a workspace cannot be named {key!r}: the workspace has an attribute like that."
            )
    axes = check_axes(axis_name, name, alone=True)
    world = lax.axis_size(axes)
    parts = wrapper.parts_of(buffers.values(), _OPENERS)
    scratch = {"iris_table": jax.ShapeDtypeStruct((1, world + 2), np.dtype(np.int64))}
    scratch |= {f"{key}_symmetric": jax.ShapeDtypeStruct(of.shape, of.dtype) for key, of in buffers.items()}
    signals = {"iris_opened": (world,), "iris_closed": (world,)}
    layout = heap.Layout.of((parts,), scratch, signals, {})
    held = tuple(Buffer(key, of.shape, of.dtype) for key, of in buffers.items())
    ws = Workspace(jnp.zeros((1,), jnp.int32), axes, name, held, layout, implementation)
    sources = [of.source for of in buffers.values() if of.source is not None]
    # An operand that nobody reads is an order that XLA keeps.
    behind = [array for array in map(jnp.asarray, jax.tree.leaves(after)) if array.size]
    for array in behind:
        triton_dtype(array.dtype)
    kernel = wrapper.opening(buffers, parts, len(behind))
    (token,) = ws._launch(kernel, [*sources, *behind, ws._before()], [], (parts,), f"{name} open", {}, {})
    return dataclasses.replace(ws, token=token)


def _join(
    kernel: Any,
    found: Arguments,
    ws: Workspace,
    grid: Any,
    name: str,
    constant_rank: bool,
    how: Mapping[str, Any],
) -> Any:
    """A launch of a workspace."""
    token, *outs = ws._launch(
        wrapper.joining(kernel, found, ws.buffers, constant_rank),
        [*found.operands.values(), ws.token],
        [jax.ShapeDtypeStruct(of.shape, of.dtype) for of in found.outs.values()],
        _checked(name, grid),
        name,
        wrapper.constants(found),
        how,
    )
    ws = dataclasses.replace(ws, token=token)
    if not outs:
        return ws
    return outs[0] if len(outs) == 1 else tuple(outs), ws


def _checked(name: str, grid: Any) -> tuple[int, ...]:
    sizes = sizes_of(grid)
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ValueError(f"{name} takes a grid of one to three positive whole numbers, not {grid!r}.")
    return sizes


@functools.cache
def _digest(layout: heap.Layout, buffers: tuple[Buffer, ...]) -> str:
    """Tells workspaces apart that may not share memory, the same in every process."""
    return hashlib.sha256(repr((layout, buffers)).encode()).hexdigest()[:8]
