"""`shmem_call`: a Triton or Gluon kernel with symmetric scratch and signals as a JAX operation."""

import concurrent.futures
import functools
import hashlib
import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.core import NamedAxisEffect, ShapedArray
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, PartitionSpec

from jaxtaxfree import amd, diagnosis, environment, gluon, heap, language
from jaxtaxfree.call import (
    Bundles,
    Descriptor,
    bundled,
    check_call,
    check_kernel,
    constants_of,
    frozen,
    is_alone,
    members,
    places_of,
    pointers_of,
    runs_once,
    sizes_of,
    unbundled,
)
from jaxtaxfree.heap.errors import SpansHostsError
from jaxtaxfree.kernels import shmem as device
from jaxtaxfree.target import is_amd, name_of, target_of
from jaxtaxfree.teams import ArrangementError, Team, check_axes, check_index, team_of, vary, varying
from jaxtaxfree.written import multiples_of_16, telling

with environment.kept("TRITON_CACHE_DIR"):  # jax-triton deletes it
    import jax_triton


class CompileError(RuntimeError):
    """A kernel does not compile as it is called, or the GPU has no room for the compiled kernel."""


def shmem_call(
    kernel: Any,
    *args: jax.Array | Mapping[str, jax.Array],
    axis_name: str | Sequence[str],
    out_type: Any,
    grid: int | tuple[int, ...],
    scratch: Mapping[str, Any] | None = None,
    signals: Mapping[str, int | tuple[int, ...]] | None = None,
    messages: Mapping[str, Any] | None = None,
    descriptors: Mapping[str, Descriptor] | None = None,
    name: str | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    together: int = 1,
    cost_estimate: Mapping[str, int] | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
    axis_index: jax.Array | None = None,
    implementation: str | None = None,
    **params: Any,
) -> Any:
    """Runs a Triton kernel on every rank of a mesh axis, with scratch memory and signals that the ranks share.

    Call it inside `jax.shard_map`. All ranks launch the kernel on the same grid. In the kernel they reach each other
    through `jaxtaxfree.kernels.shmem`. These are the kernel's parameters, in this order. Only `team`, the names of the
    buffers and `WORLD` have fixed names.

    * One pointer for each array of `args`, and one tuple of pointers for each mapping, a bundle, in its order. (JAX
      sorts a dict that passes through `jit` or `shard_map`.) If the bundle's parameter is `scales` and the kernel has a
      constant `SCALES`, this is the tuple of their names.
    * `team`, which goes to `shmem.start`, and the names of `scratch`, `messages` and `signals`. They go to
      `shmem.scratch`, to `shmem.messages`, and as first index to `shmem.signal` and `shmem.wait`. These parameters may
      stand anywhere before the outputs.
    * One pointer for each leaf of `out_type`.
    * Constants (`tl.constexpr`), which `params` gives. If the kernel has a parameter `WORLD`, it is the number of ranks
      and filled in automatically.

    A kernel without the parameter `team` works alone, with `axis_name=()`: it calls nothing of `shmem`, takes no
    scratch, signals or messages, and needs no heap. As nobody counts on it, XLA may drop or repeat the call.

    A pointer may be missing: if `params` sets a parameter to None, it is None in a Triton kernel and takes no array.

    Every program of the kernel begins with `me = shmem.start(team)` and ends with `shmem.finish(me)`. A program may
    wait only for programs of a lower id (on any rank), or of its own id, because those are sure to run. With `together`
    it may wait for the next ones, too. See `examples/custom_kernel.py`.

    A Gluon kernel reaches its peers through `jaxtaxfree.kernels.shmem_gluon`. It may have partitions of warps
    (`gl.warp_specialize`), and may take operands and results as TMA descriptors. It needs NVIDIA GPUs of compute
    capability 9.0 or higher.

    Args:
      kernel: a function decorated with `triton.jit` or `gluon.jit`.
      *args: this rank's operands. A mapping from names to arrays, without None, is one parameter of the kernel.
      axis_name: the mesh axis, or axes, along which the ranks work together. A rank's number is
        `lax.axis_index(axis_name)`. () is a team of one rank.
      out_type: pytree of objects with `shape` and `dtype`: this rank's results.
      grid: number of programs, in one to three dimensions, the same on every rank.
      scratch: an object with `shape` and `dtype` for each name. Peers write into this memory, and every rank has it
        twice: calls take turns, so a rank that is one call ahead disturbs nobody. It is not zeroed.
      signals: the number of counters, or their shape, for each name. Counters only grow.
      messages: for each name either the number or shape of f32 values, or an object with `shape` and dtype int32.
        `shmem.send` and `shmem.receive` exchange every f32 value once in each call. `shmem.send_words` and
        `shmem.receive_words` exchange as many int32 words as they like. In every call each rank must wait for something
        from each other rank.
      descriptors: the shape of a block for each name of a pointer ("scales.lhs" in a bundle), for Gluon kernels. The
        parameter is then a TMA descriptor of the whole operand or result. Its layout is
        `gl.NVMMASharedLayout.get_default_for` of the block. To take an operand in several ways, pass it several times,
        which costs nothing. With a block of [groups, rows, width] an array [rows, columns] is read as [columns / width,
        rows, width]. A pair (block, shape) reads an array as if it had this shape, where a reshape would cost XLA a
        copy: see `input_output_aliases`.
      name: the operation's name in profiles and errors; the kernel's name if None.
      num_warps, num_stages: as in Triton. In a Gluon kernel `num_warps` are those of the first partition.
      together: how many programs with consecutive ids may wait for each other. If other work leaves the GPU too few
        places for them, they wait until it ends.
      cost_estimate: {"flops": ..., "bytes_accessed": ...} of one rank's call, for XLA and profilers.
      input_output_aliases: which result is an operand that the kernel changes: {number of the operand: number of the
        result}, of all arrays of `args` and of all leaves of `out_type`, from 0 on. They have the same shape and dtype.
        The kernel has a pointer for each, both to the same memory, which holds the operand when it begins. XLA takes
        the memory of an array that nobody needs later, such as a donated one or what a loop carries. Otherwise it
        copies the operand first, as it does if the same array is another operand as well, or is reshaped for the call.
      axis_index: this rank's number, `lax.axis_index(axis_name)`, i32[] or i32[1], if the caller has it. XLA asks for
        it again in every pass of a loop, which takes some 3 us on an H100 and splits a CUDA graph in two. Take it in
        front of the loop, or pass it to the program as `jnp.arange(ranks)`, sharded along the axis. With another number
        ranks wait in vain.
      implementation: None and "fused" run the kernel on GPUs. "simulate" runs it for all ranks on the CPU, and raises
        what a GPU would hide; see `jaxtaxfree.simulator`.
      **params: the kernel's other parameters: numbers (integers of 32 bits, floats as f32), Triton's dtypes, strings.
        As in Triton, the compiler is told of integers that 16 divides.

    Returns: the results, in the structure of `out_type`. They vary along `axis_name`.

    Raises:
      ValueError: if the implementation does not exist, messages have another dtype, a number is out of range (a grid of
        0, 64 warps, -1 signals), two things have the same name, or an operand cannot be the result that
        `input_output_aliases` says.
      TypeError: if the kernel is not decorated, its parameters and the arguments do not match, a constant cannot be
        hashed, or an axis, a result or scratch has the wrong type.
      NameError: if `axis_name` is not bound, because the call is not inside `jax.shard_map`.
      NotImplementedError: when the program is lowered, if the kernel cannot run there, such as on a CPU.
      jaxtaxfree.CompileError: when the program is lowered, if the kernel does not compile, or needs more shared memory
        than there is.
      jaxtaxfree.PeerTimeoutError: if a rank waited in vain; see `jaxtaxfree.heap`.
      jaxtaxfree.GarbageError: likewise, if the kernel called `shmem.report_garbage`.
    """
    check_kernel(kernel, "shmem_call")
    name = name or kernel.fn.__name__
    with language.as_triton_has_it():
        hash(kernel)  # which Triton remembers, with the key that `_digest` takes
    if implementation not in (None, "fused", "simulate"):
        raise ValueError(f"{name} has no implementation {implementation!r}: choose None, 'fused' or 'simulate'.")
    axes = check_axes(axis_name, name, alone=True)
    index = check_index(axis_index, name)
    world = lax.axis_size(axes)
    scratch, signals, messages, descriptors = scratch or {}, signals or {}, messages or {}, descriptors or {}
    leaves, bundles = unbundled(name, args)
    params = constants_of(kernel, params, world, bundles, [*scratch, *signals, *messages])
    out_leaves, out_tree = jax.tree.flatten(out_type)
    buffers = {"scratch": scratch, "signals": signals, "messages": messages, "descriptors": descriptors}
    launch: dict[str, Any] = {"num_warps": num_warps, "num_stages": num_stages, "together": together}
    launch["input_output_aliases"] = input_output_aliases
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    check_call(kernel, name, bundled(arrays, bundles), out_leaves, grid, params, **buffers, **launch)
    for parameter in kernel.params:
        if parameter.has_default and not parameter.is_constexpr:  # which jax-triton asks for
            params.setdefault(parameter.name, parameter.default)
    outs = bind(
        kernel,
        arrays if index is None else [*arrays, index],
        out_leaves,
        indexed=index is not None,
        bundles=bundles,
        axes=axes,
        grid=sizes_of(grid),
        layout=heap.Layout.of(sizes_of(grid), scratch, signals, messages, kernel.arg_names),
        descriptors=frozen(descriptors),
        name=name,
        cost_estimate=tuple(sorted(cost_estimate.items())) if cost_estimate else None,
        aliases=tuple(sorted((int(operand), int(result)) for operand, result in (input_output_aliases or {}).items())),
        params=params,
        simulate=implementation == "simulate",
        num_warps=int(num_warps),
        num_stages=int(num_stages),
        together=int(together),
    )
    return jax.tree.unflatten(out_tree, outs)


def bind(
    kernel: Any,
    arrays: Sequence[jax.Array],
    outs: Sequence[Any],
    *,
    axes: tuple[str, ...],
    name: str,
    params: Mapping[str, Any],
    shared: str | None = None,
    **how: Any,
) -> list[jax.Array]:
    """A launch that has been checked.

    Args:
      arrays: the operands; with `indexed` of the primitive the last one is this rank's number.
      outs: shape and dtype of each result.
      params: the kernel's other parameters.
      shared: names a region that launches of several kernels share, all with the same layout; None: that of calls like
        this one.
      **how: the primitive's other parameters.
    """
    along = set(axes).union(*map(varying, arrays))
    with jax.named_scope(name):
        results = shmem_call_p.bind(
            *(vary(array, along) for array in arrays),
            kernel=kernel,
            out_types=tuple(jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outs),
            axes=axes,
            name=name,
            params=tuple(sorted(params.items())),
            shared=shared,
            **how,
        )
    return [vary(result, along) for result in results]


shmem_call_p = jex_core.Primitive("shmem_call")
shmem_call_p.multiple_results = True


@shmem_call_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, axes: tuple[str, ...], out_types: tuple, **_: Any) -> Any:
    return [ShapedArray(out.shape, out.dtype) for out in out_types], {NamedAxisEffect(axis) for axis in axes}


@shmem_call_p.def_impl
def _impl(*args: Any, **params: Any) -> Any:
    raise NotImplementedError("shmem_call runs inside jax.shard_map only.")


def _refuse(what: str) -> Any:
    def rule(*args: Any, **params: Any) -> Any:
        raise NotImplementedError(
            f"shmem_call has no rule for {what}: it cannot know what your kernel computes. Wrap the call in a "
            "function with "
            f"jax.custom_{'jvp or jax.custom_vjp' if what == 'differentiation' else 'batching.custom_vmap'}."
        )

    return rule


ad.primitive_jvps[shmem_call_p] = _refuse("differentiation")
batching.primitive_batchers[shmem_call_p] = _refuse("vmap")


def _lower_elsewhere(ctx: Any, *args: Any, name: str, simulate: bool, **params: Any) -> Any:
    if simulate:
        return _lower_simulated(ctx, *args, name=name, **params)
    raise NotImplementedError(
        f"{name} is a Triton kernel for NVIDIA GPUs, and this program is lowered for "
        f'{", ".join(ctx.module_context.platforms)}: implementation="simulate" runs it on the CPU, and '
        "lax.platform_dependent(..., cuda=..., default=...) takes a reference on other platforms."
    )


def _team_of(ctx: Any, params: dict[str, Any]) -> Team:
    try:
        return team_of(ctx, params["axes"])
    except ArrangementError as error:
        raise ArrangementError(f"{params['name']} cannot run here: {error}.") from error


def _lower_simulated(ctx: Any, *args: Any, **params: Any) -> Any:
    from jaxtaxfree.simulator import callback  # not for those who do not simulate

    if params.pop("shared") is not None:
        raise NotImplementedError(
            f'{params["name"]} is one of several launches that share a workspace, and implementation="simulate" runs '
            "single launches: jaxtaxfree.simulator.run_iris simulates a sequence of them."
        )
    identity = _digest(params)
    for of_compiled_code in ("num_stages", "cost_estimate"):
        del params[of_compiled_code]
    indexed = params.pop("indexed", False)
    simulate = functools.partial(callback.simulate, team=_team_of(ctx, params), identity=identity, **params)
    call = (lambda *args: simulate(*args[:-1])) if indexed else simulate  # which has the numbers of all ranks
    return mlir.lower_fun(call, multiple_results=True)(ctx, *args)


def _lower_for_gpus(ctx: Any, *args: Any, simulate: bool, together: int, **params: Any) -> Any:
    if simulate:
        return _lower_simulated(ctx, *args, together=together, **params)
    team = _team_of(ctx, params)
    alone = is_alone(params["kernel"])
    if team.on_gpus and not alone and (why := environment.concurrent_calls()):
        raise ArrangementError(why)
    if params["kernel"].is_gluon() and (why := gluon.unsupported(params["name"], team.compute_capability)):
        raise NotImplementedError(why)
    if together > 1 and together > (team.multiprocessors or together):
        raise NotImplementedError(
            f"{params['name']} has {together} programs that wait for each other (together), and a GPU has "
            f"{team.multiprocessors} multiprocessors: nothing says that all of them run at once."
        )
    region = None if alone else _region(ctx, team, params)
    return _lower_launch(ctx, *args, team=team, region=region, **params)


mlir.register_lowering(shmem_call_p, _lower_elsewhere)
mlir.register_lowering(shmem_call_p, _lower_for_gpus, platform="cuda")
mlir.register_lowering(shmem_call_p, _lower_for_gpus, platform="rocm")  # compiled, and never run


def _region(ctx: Any, team: Team, params: dict[str, Any]) -> heap.Region | None:
    """The call's region of the heap; None if the program is not for this process's GPUs, and must not find a heap."""
    exported = ctx.module_context.lowering_parameters.for_export
    own = any(device.process_index == jax.process_index() for device in team.devices)
    if exported or not team.on_gpus or not own:  # a process without a device of the mesh builds the program, too
        return None
    shapes = ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in ctx.avals_in)
    if params["shared"]:
        name = f"{params['shared']} over {team.axes}"
    else:  # calls share a region if they run the same kernel with the same constants on the same shapes
        name = f"{params['name']}({shapes}) over {team.axes} [{_digest(params)}]"
    try:
        region = heap.region(name, team.devices, team.world, params["layout"])
    except SpansHostsError as error:  # in every process of the mesh
        raise ArrangementError(str(error)) from error
    except heap.HeapUnavailableError as error:
        if any(device.process_index != jax.process_index() for device in team.devices):
            raise  # this process alone must not decide for another implementation
        raise ArrangementError(str(error)) from error
    operands = tuple((np.dtype(aval.dtype), len(aval.shape)) for aval in ctx.avals_in)
    _load_modules(team, region, operands, tuple(params.items()))
    return region


def _digest(params: dict[str, Any]) -> str:
    """Tells calls apart that may not share a region, the same in every process."""
    identity = {**params, "kernel": params["kernel"].cache_key, "cost_estimate": None}
    return hashlib.sha256(repr(sorted(identity.items())).encode()).hexdigest()[:8]


def _lower_launch(ctx: Any, *args: Any, **launch: Any) -> Any:
    """Lowers `_launch`, which compiles the kernel; what goes wrong then is a CompileError."""
    capability = launch["team"].compute_capability
    settings = {key: launch[key] for key in ("num_warps", "num_stages")} | dict(launch["params"])
    kernel = (
        f"The kernel {launch['kernel'].fn.__name__} of {launch['name']}, for compute capability "
        f"{name_of(capability)} with "
        f"{', '.join(f'{key}={reprlib.repr(value)}' for key, value in settings.items() if value is not None)},"
    )
    try:
        with language.as_triton_has_it():
            outs = mlir.lower_fun(functools.partial(_launch, **launch), multiple_results=True)(ctx, *args)
    except NotImplementedError:
        raise
    except Exception as error:  # the compiler raises its own kinds, AssertionError and ValueError
        why = diagnosis.why(error, launch["kernel"], launch["layout"])
        raise CompileError(f"{kernel} does not compile: {why}.") from error
    shared, most = _shared_memory(outs), target_of(capability).shared_memory
    if most is not None and shared > most:
        raise CompileError(
            f"{kernel} needs {shared} bytes of shared memory, of which there are {most}: take smaller blocks or fewer "
            "stages."
        )
    return outs


def _shared_memory(outs: Sequence[Any]) -> int:
    """Bytes of shared memory of a block of the launch that gives these values."""
    attributes = outs[0].owner.attributes if outs else {}
    if "mhlo.backend_config" not in attributes:
        return 0
    return gluon.shared_memory(attributes["mhlo.backend_config"]["opaque"].value_bytes)


# PTX of CUDA 12.9. By default Triton writes for the newest assembler that it brings, which older drivers refuse.
_COMPILER_OPTIONS = {"enable_fp_fusion": True, "ptx_version": 88}
_COMPILER_OPTIONS_FOR_AMD = {"enable_fp_fusion": True}


def _launch(
    *args: jax.Array,
    kernel: Any,
    bundles: Bundles,
    axes: tuple[str, ...],
    out_types: tuple,
    grid: tuple[int, ...],
    layout: heap.Layout,
    descriptors: tuple,
    name: str,
    num_warps: int,
    num_stages: int,
    cost_estimate: tuple | None,
    params: tuple,
    team: Team,
    region: heap.Region | None,
    aliases: tuple[tuple[int, int], ...] = (),
    shared: str | None = None,
    indexed: bool = False,
    position: Any = None,
    programs: int | None = None,
) -> Any:
    """The launch of a kernel as a traceable function; with `programs`, of so many only, and with tiny results."""
    args, index = (args[:-1], args[-1]) if indexed else (args, None)
    if programs is not None:
        grid = (programs,)
        out_types = tuple(jax.ShapeDtypeStruct(_tiny(len(out.shape)), out.dtype) for out in out_types)
    loads = position is not None
    if position is None:
        position = _place(team, region, index) if region else device.POSITION_NO_HEAP.value
    origin, stride, magic = (region.origin, region.stride, region.magic) if region else (3, 3, 3)
    if region and region.tables is not None:
        words = np.array(region.tables, np.uint64).view(np.uint32)
        origin = jnp.asarray(words)[0 if loads else team.position(index)]
    place = {}
    if not is_alone(kernel):
        at = jnp.full((1,), position, jnp.int32)
        place["team"] = (at, origin, stride, team.world, magic, layout.signal_line)
    return _call_of(kernel, descriptors, num_stages, team, multiples_of_16(kernel, dict(params)))(
        *bundled(args, bundles),
        kernel=kernel,
        out_type=out_types,
        grid=grid,
        name=name,
        num_warps=num_warps,
        compute_capability=team.compute_capability,
        backend_options=_COMPILER_OPTIONS_FOR_AMD if is_amd(team.compute_capability) else _COMPILER_OPTIONS,
        cost_estimate=dict(cost_estimate) if cost_estimate else None,
        aliases=aliases,
        # The peers count on it, or later launches.
        has_side_effect="team" in place and (team.world > 1 or shared is not None),
        **place,
        **layout.buffer_lines,
        **layout.signal_index,
        **dict(params),
    )


def _place(team: Team, region: heap.Region, index: jax.Array | None) -> jax.Array:
    """Where in the region's window this device has its part, i32[]; `index` is its rank, if the caller has it."""
    count, period = len(region.places), max(region.places) + 1
    if index is not None and region.places == tuple(position % team.world for position in range(count)):
        return index
    position = team.position(index)
    if region.places == tuple(range(count)):
        return position
    if region.places == tuple(position % period for position in range(count)):
        return position % period
    return jnp.asarray(region.places, jnp.int32)[position]


def _call_of(
    kernel: Any, descriptors: tuple, num_stages: int, team: Team, multiples: tuple[str, ...]
) -> Callable[..., Any]:
    """What calls a kernel of this dialect on these GPUs, with the parameters that are multiples of 16."""
    if is_amd(team.compute_capability):
        return functools.partial(amd.amd_call, num_stages=num_stages, multiples=multiples)
    if kernel.is_gluon():
        return functools.partial(gluon.gluon_call, descriptors=dict(descriptors), multiples=multiples)
    return functools.partial(_triton_call, num_stages=num_stages, multiples=multiples)


def _triton_call(
    *args: Any,
    kernel: Any,
    out_type: tuple,
    multiples: tuple[str, ...],
    aliases: tuple[tuple[int, int], ...],
    **named: Any,
) -> Any:
    # By name, because parameters before these may be None.
    arguments = (tuple(arg.values()) if isinstance(arg, dict) else arg for arg in args)
    pointers = pointers_of(kernel, named)
    operands = runs_once(dict(zip(pointers, arguments)), out_type, named["has_side_effect"])
    own = {key: value for key, value in named.items() if key in kernel.arg_names}
    places = places_of(kernel, args, own, numbers=True)
    # jax-triton passes no pointer for a result that is an operand, and takes it that such results are the last ones.
    order = sorted(range(len(out_type)), key=lambda result: result in dict(aliases).values())
    if multiples or aliases:
        of_operands = [
            name if not isinstance(arg, dict) else f"{name}[{i}]"
            for name, arg in zip(pointers, args)
            for i, _ in enumerate(members(name, arg))
        ]
        same = {pointers[len(args) + result]: of_operands[operand] for operand, result in aliases}
        kernel, told = telling(kernel, own, pointers, multiples, same)
        named = {key: value for key, value in named.items() if key not in own} | told
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        outs = jax_triton.triton_call(
            kernel=kernel,
            out_type=tuple(out_type[result] for result in order),
            input_output_aliases={places[operand]: order.index(result) for operand, result in aliases},
            **operands,
            **named,
        )
    return [outs[order.index(result)] for result in range(len(out_type))]


_load_p = jex_core.Primitive("shmem_load")
_load_p.multiple_results = True


@_load_p.def_abstract_eval
def _load_abstract_eval(*_: Any, out_types: tuple, **__: Any) -> Any:
    return [ShapedArray(_tiny(len(out.shape)), out.dtype) for out in out_types]


def _lower_load(ctx: Any, *args: Any, **params: Any) -> Any:
    return _lower_launch(ctx, *args, position=device.POSITION_LOAD_ONLY.value, programs=1, **params)


mlir.register_lowering(_load_p, _lower_load, platform="cuda")
mlir.register_lowering(_load_p, _lower_load, platform="rocm")


@functools.cache
def _load_modules(team: Team, region: heap.Region, operands: tuple, params: tuple) -> None:
    """Loads the kernel's module on every local device, by a launch that leaves at once.

    Otherwise the first call loads it on one device while the kernel already waits on another one, and the driver may
    let the loading wait for the kernel: a deadlock.
    """
    devices = [device for device in team.devices if device.process_index == jax.process_index()]
    mesh = Mesh(np.array(devices), ("device",))
    load = jax.jit(
        jax.shard_map(
            functools.partial(_load_p.bind, team=team, region=region, **dict(params)),
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )

    def run() -> None:
        jax.block_until_ready(load(*(np.zeros(_tiny(rank), dtype) for dtype, rank in operands)))

    # In a thread of its own, because this one is in the middle of lowering another program.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


def _tiny(rank: int) -> tuple[int, ...]:
    """The shape of arrays that nobody reads: the smallest that TMA takes for every dtype."""
    return (1,) * (rank - 1) + (16,) * min(rank, 1)
