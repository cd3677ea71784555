"""Makes an operation a JAX primitive.

A fused operation has two implementations of one meaning: a reference in plain `lax` and a kernel. Which one runs is
decided when the program is lowered, so one traced program serves every platform; but what no kernel takes is the
reference from the beginning. Transformations go through the reference, unless the operation has a rule of its own:
`batch` here, derivatives in `jaxtaxfree.ops.gradients`.
"""

import contextlib
import functools
import logging
import operator
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax._src.core import NamedAxisEffect, ShardingTypeError
from jax._src.dispatch import apply_primitive, prim_requires_devices_during_lowering
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from jaxtaxfree import dispatch, levels
from jaxtaxfree.target import is_amd
from jaxtaxfree.teams import ArrangementError, Team, concrete_mesh, explicit_axes, resharded, team_of

_log = logging.getLogger("jaxtaxfree")

IMPLEMENTATIONS = (None, "fused", "xla", "simulate")
# What the kernels take and give, apart from quantised operands.
DTYPES = ("float32", "bfloat16", "float16")


# (call, operands, their batch dimensions or None, size of the batch, **params) -> the results for all examples, these
# along the first dimension, by one `call(*operands, **parameters that change)`; or why there is none such.
Batch = Callable[..., Any]

# A name for each dimension of each array. What a call computes at one place of a named dimension depends on that place
# of the dimensions of this name alone, in all operands. None: the dimension is contracted, exchanged or mixed.
Labels = Sequence[Sequence[str | None]]
# (*types of the operands, **params) -> (labels of the operands, labels of the results).
Dimensions = Callable[..., tuple[Labels, Labels]]


class Lasting(str):
    """A reason to take XLA that no other shape takes away: dtypes, the mesh, the platform. It says what does."""


class Unsupported(NotImplementedError):
    """An implementation cannot run an operation here; the message says why in full."""

    def __init__(self, operation: str, reasons: list[str]):
        self.operation, self.reasons = operation, reasons
        super().__init__(
            f"The fused kernel of {operation} cannot run here: {'; '.join(reasons)}. implementation=None or 'xla' "
            "uses XLA instead."
        )

    def __reduce__(self) -> tuple[Any, ...]:  # exceptions are made again from their message otherwise
        return type(self), (self.operation, self.reasons)


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError unless the implementation is one."""
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"There is no implementation {implementation!r}: choose one of {known}.")


def symbolic(*operands: Any) -> list[str]:
    """What keeps a kernel from taking these operands if a dimension is symbolic, as `jax.export` allows it."""
    shapes = [list(x.shape) for x in operands if any(map(jax.export.is_symbolic_dim, x.shape))]
    return [f"it is compiled for known shapes, not {', '.join(map(str, shapes))}"] if shapes else []


def takes_reference(operation: str, operands: Sequence[Any], implementation: str | None, reasons: list[str]) -> bool:
    """Whether a call is its reference on every platform: because the caller says so, or for these reasons.

    Raises:
      NotImplementedError: with the reasons, if the kernel was asked for.
    """
    if reasons and implementation in ("fused", "simulate"):
        raise Unsupported(operation, reasons)
    if reasons and implementation is None:
        log_reference(operation, operands, reasons)
    return bool(reasons) or implementation == "xla"


_warnings_lock = threading.Lock()
_warned: set[tuple[str, str]] = set()  # of which operation, and of what


def log_reference(operation: str, operands: Sequence[Any], reasons: Sequence[str]) -> None:
    """Says that XLA takes a call that was left to us.

    At WARNING level, once in a process, for each operation and each `Lasting` reason; otherwise at DEBUG level.
    """
    lasting = {(operation, reason) for reason in reasons if isinstance(reason, Lasting)}
    with _warnings_lock:
        new = lasting - _warned
        _warned.update(new)
    level, more = logging.DEBUG, ""
    if new:
        level, more = logging.WARNING, ". implementation='xla' asks for that. Later calls say so at DEBUG level."
    described = [f"{x.dtype}{list(x.shape)}" for x in operands]
    _log.log(level, "%s%s uses XLA: %s%s", operation, described, "; ".join(reasons), more)


def forget_warnings() -> None:
    """Makes `log_reference` warn again of what it has warned of: for tests."""
    with _warnings_lock:
        _warned.clear()


@contextlib.contextmanager
def _refusing(operation: str) -> Generator[None]:
    """Makes an `Unsupported` of this operation of what says that a kernel cannot run."""
    try:
        yield
    except Unsupported:
        raise
    except NotImplementedError as error:
        reason = str(error)
        raise Unsupported(operation, [Lasting(reason) if isinstance(error, ArrangementError) else reason]) from error


def check_whole(operation: str, name: str, number: Any) -> int:
    """The keyword `name` of an operation as Python's number; raises TypeError if it is no whole one."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{operation} takes {name} as a whole number, not {number!r}.") from None


def hashable(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Settings as a parameter of a primitive; `dict` makes a mapping of them again."""
    return tuple(sorted(settings.items()))


def bilinear(
    name: str,
    *,
    reference: Callable[..., jax.Array],
    fused: Callable[..., jax.Array],
    slower: Callable[..., str | None],
    dimensions: Dimensions,
    case: Callable[..., dispatch.Case | None] | None = None,
    batch: Batch | None = None,
) -> Any:
    """Defines a primitive of two operands that is linear in each and communicates along mesh axes.

    Its operands must vary along the same axes. It needs the parameters `axes` (tuple of axis names), `implementation`,
    and `config`, which is false if the caller leaves it to us; others are the operation's own. Its derivatives are
    defined in `jaxtaxfree.ops.gradients`.

    Args:
      name: of the operation.
      reference: (lhs, rhs, *, axes, **params) -> result, in plain `lax`.
      fused: the same by `shmem_call`, to which it passes its keyword `implementation`, for a `compute_capability` (90
        for 9.0); raises NotImplementedError, when it is traced or lowered, where the kernel cannot run.
      slower: (lhs aval, rhs aval, *, axes, compute_capability, **params) -> why `reference` is taken, which is known to
        be faster, or None; asked where the tables say nothing.
      dimensions: their labels, which say along which ones a call falls into parts.
      case: (lhs aval, rhs aval, *, team, axes, **params) -> what the tables know the call by.
      batch: for `jax.vmap`, which maps the reference where there is none, or along `axes`.

    Returns: the primitive.
    """
    return _communicating(
        name, reference=reference, fused=fused, slower=slower, dimensions=dimensions, case=case, batch=batch
    )


def linear(
    name: str,
    *,
    reference: Callable[..., jax.Array],
    fused: Callable[..., jax.Array],
    slower: Callable[..., str | None],
    dimensions: Dimensions,
    case: Callable[..., dispatch.Case | None] | None = None,
    transpose: Callable[..., jax.Array],
    batch_dimension: Callable[..., tuple[int, dict[str, Any]]],
) -> Any:
    """Defines a primitive of one operand that is linear in it and communicates along mesh axes.

    Args:
      name, reference, fused, slower, dimensions, case: as of `bilinear`, of one operand.
      transpose: (cotangent, the operand as an undefined primal, **params) -> the operand's cotangent.
      batch_dimension: (batch dimension of the operand, **params) -> (that of the result, the parameters that change),
        for `jax.vmap` over another axis.

    Returns: the primitive.
    """
    primitive = _communicating(name, reference=reference, fused=fused, slower=slower, dimensions=dimensions, case=case)
    ad.deflinear2(primitive, lambda ct, x, **params: [transpose(ct, x, **params)])

    def map_(axis_data: Any, operands: Any, dims: Any, **params: Any) -> Any:
        if axis_data.name in params["axes"]:
            return by_reference(axis_data, operands, dims, **params)
        dim, changed = (None, {}) if dims[0] is None else batch_dimension(dims[0], **params)
        return primitive.bind(*operands, **params | changed), dim

    by_reference = batching.fancy_primitive_batchers[primitive]
    batching.fancy_primitive_batchers[primitive] = map_
    return primitive


def composed(name: str, function: Callable[..., jax.Array], transpose: Callable[..., list[Any]]) -> Any:
    """Defines a primitive that is a function of other primitives, except that it has a transpose of its own.

    Args:
      function: (*operands, *, axes, **params) -> result.
      transpose: (cotangent, *operands, **params) -> a cotangent, or None, for each operand.

    Returns: the primitive.
    """
    primitive = jex_core.Primitive(name)

    @primitive.def_effectful_abstract_eval
    def _abstract_eval(*operands: Any, axes: tuple[str, ...], **params: Any) -> Any:
        (out,) = jax.make_jaxpr(functools.partial(function, axes=axes, **params))(*operands).out_avals
        return out, {NamedAxisEffect(axis) for axis in axes}

    def batch(axis_data: Any, operands: Any, dims: Any, **params: Any) -> Any:
        call = functools.partial(function, **params)
        return jax.vmap(call, in_axes=dims, axis_name=axis_data.name, axis_size=axis_data.size)(*operands), 0

    primitive.def_impl(function)
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
    ad.primitive_jvps[primitive] = lambda primals, tangents, **params: jvp_of(
        functools.partial(function, **params), primals, tangents
    )
    ad.primitive_transposes[primitive] = transpose
    batching.fancy_primitive_batchers[primitive] = batch
    return primitive


def collective(
    name: str,
    *,
    reference: Callable[..., list[jax.Array]],
    fused: Callable[..., list[jax.Array]],
    slower: Callable[..., str | None],
    dimensions: Dimensions | None = None,
    case: Callable[..., dispatch.Case | None] | None = None,
    batch: Batch | None = None,
) -> Any:
    """Defines a primitive that communicates along mesh axes, of any number of operands and results.

    It is differentiated through its reference. The arguments are those of `bilinear`, but for lists of results. Without
    `dimensions` there is no kernel where `jax.shard_map` leaves axes over.

    Returns: the primitive.
    """
    primitive = _communicating(
        name,
        reference=reference,
        fused=fused,
        slower=slower,
        dimensions=dimensions,
        case=case,
        batch=batch,
        multiple_results=True,
    )

    def jvp(primals: Any, tangents: Any, *, implementation: str | None, **params: Any) -> Any:
        del implementation
        return jvp_of(functools.partial(reference, **params), primals, tangents)

    def transpose(cts: Any, *operands: Any, implementation: str | None, **params: Any) -> list[Any]:
        """For `jax.linear_transpose`, of a call that is linear in some operands."""
        del implementation
        unknown = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]

        def of_unknown(*some: Any) -> Any:
            return reference(*_replaced(operands, unknown, some), **params)

        back = jax.linear_transpose(of_unknown, *(operands[i].aval for i in unknown))
        return _replaced([None] * len(operands), unknown, back([ad.instantiate_zeros(ct) for ct in cts]))

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    return primitive


def needs_devices(primitive: Any) -> None:
    """Has JAX say which devices a program is for where it lowers this primitive outside of `jax.shard_map`."""
    prim_requires_devices_during_lowering.add(primitive)


def multilinear(bind: Callable[..., jax.Array], operands: Sequence[int]) -> Callable[..., Any]:
    """The JVP rule of a primitive with one result, in a list, that is linear in each of these operands.

    Args:
      bind: (*operands, **params) -> the result.
      operands: their indices; the last ones may be missing in a call.
    """

    def rule(primals: Any, tangents: Any, **params: Any) -> tuple[list[jax.Array], list[Any]]:
        out = bind(*primals, **params)
        dots = [
            bind(*_replaced(primals, [i], [tangents[i]]), **params)
            for i in operands
            if i < len(primals) and type(tangents[i]) is not ad.Zero
        ]
        zero = ad.Zero(jax.typeof(out).to_tangent_aval())
        return [out], [functools.reduce(ad.add_tangents, dots) if dots else zero]

    return rule


def jvp_of(function: Callable, primals: Any, tangents: Any) -> Any:
    """The rule of a primitive that is differentiated as this function of its operands."""
    primals = [jnp.asarray(x) for x in primals]  # literals of a jaxpr are none
    differentiable = [i for i, x in enumerate(tangents) if type(x) is not ad.Zero]

    def of_some(*some: Any) -> Any:
        return function(*_replaced(primals, differentiable, some))

    return jax.jvp(of_some, [primals[i] for i in differentiable], [tangents[i] for i in differentiable])


def _replaced(operands: Sequence[Any], places: Sequence[int], some: Sequence[Any]) -> list[Any]:
    """The operands, but some of them others."""
    others = dict(zip(places, some, strict=True))
    return [others.get(i, x) for i, x in enumerate(operands)]


def _communicating(
    name: str,
    *,
    reference: Callable[..., Any],
    fused: Callable[..., Any],
    slower: Callable[..., str | None],
    dimensions: Dimensions | None,
    case: Callable[..., dispatch.Case | None] | None,
    batch: Batch | None = None,
    multiple_results: bool = False,
) -> Any:
    """A primitive with its types, `jax.vmap` and its lowering by platform; the arguments are those of `bilinear`."""
    primitive = jex_core.Primitive(name)
    primitive.multiple_results = multiple_results

    @primitive.def_effectful_abstract_eval
    def _abstract_eval(*operands: Any, axes: tuple[str, ...], implementation: str | None, **params: Any) -> Any:
        del implementation
        try:
            outs = jax.make_jaxpr(functools.partial(reference, axes=axes, **params))(*operands).out_avals
        except ShardingTypeError as error:
            labels = dimensions(*operands, axes=axes, **params)[0] if dimensions else None
            if labels and (reasons := _inseparable(operands, labels)):
                raise ValueError(f"{name} cannot take these operands: {'; '.join(reasons)}.") from error
            raise
        return outs if multiple_results else outs[0], {NamedAxisEffect(axis) for axis in axes}

    @primitive.def_impl
    def _impl(*operands: Any, **params: Any) -> Any:
        if params["axes"]:
            raise NotImplementedError(f"{name} runs inside jax.shard_map only.")
        return apply_primitive(primitive, *operands, **params)

    _register_lowerings(primitive, reference=reference, fused=fused, slower=slower, dimensions=dimensions, case=case)
    _register_map(primitive, reference=reference, batch=batch)
    return primitive


def _register_lowerings(
    primitive: Any,
    *,
    reference: Callable[..., Any],
    fused: Callable[..., Any],
    slower: Callable[..., str | None],
    dimensions: Dimensions | None,
    case: Callable[..., dispatch.Case | None] | None,
) -> None:
    """The reference for every platform, and on GPUs the kernel where nothing speaks against it."""
    name, multiple_results = primitive.name, primitive.multiple_results

    def lower(function: Callable, ctx: Any, *operands: Any, **params: Any) -> Any:
        return mlir.lower_fun(function, multiple_results=multiple_results)(ctx, *operands, **params)

    def lower_reference(ctx: Any, *operands: Any, implementation: str | None, **params: Any) -> Any:
        if implementation == "simulate":
            how = params | {"implementation": implementation}
            if found := levels_of(ctx, how):
                return lower(found.function, ctx, *operands)
            return lower_kernel(ctx, *operands, **how)
        platforms = ctx.platforms or ctx.module_context.platforms
        why = Lasting(f"it is for NVIDIA GPUs, and the program is lowered for {', '.join(platforms)}")
        if implementation == "fused":
            raise Unsupported(name, [why])
        if not {"cpu", "cuda"}.issuperset(platforms):  # on a CPU nobody expects a kernel
            log_reference(name, ctx.avals_in, [why])
        return lower(reference, ctx, *operands, **params)

    def case_of(avals: Sequence[Any], team: Team, params: Mapping[str, Any]) -> dispatch.Case | None:
        return case(*avals, team=team, **params) if case else None

    @_refusing(name)
    def levels_of(ctx: Any, params: dict[str, Any]) -> levels.Levels | None:
        return None if symbolic(*ctx.avals_in) else levels.of(primitive, ctx, **params)

    @_refusing(name)
    def lower_kernel(ctx: Any, *operands: Any, **params: Any) -> Any:
        team = team_of(ctx, params["axes"])
        if not params["config"] and (measured := dispatch.config(case_of(ctx.avals_in, team, params))):
            params["config"] = hashable(measured)
        function = functools.partial(fused, compute_capability=team.compute_capability)
        return lower(function, ctx, *operands, **params)

    why_reference = functools.partial(_why_reference, slower, case_of)
    levels.define_why(primitive, why_reference)

    @_refusing(name)
    def reasons_for_reference(ctx: Any, params: dict[str, Any]) -> list[str]:
        # jax.vmap may have made dimensions symbolic.
        return symbolic(*ctx.avals_in) or why_reference(ctx.avals_in, team_of(ctx, params["axes"]), params)

    def lower_fused(ctx: Any, *operands: Any, implementation: str | None, **params: Any) -> Any:
        how = params | {"implementation": implementation}
        try:
            if found := levels_of(ctx, how):
                return lower(found.function, ctx, *operands)
            reasons = reasons_for_reference(ctx, params) if implementation is None else []
            if not reasons:
                return lower_kernel(ctx, *operands, **how)
        except Unsupported as error:
            if implementation is not None:
                raise
            reasons = error.reasons
        log_reference(name, ctx.avals_in, reasons)
        return lower(reference, ctx, *operands, **params)

    register = functools.partial(_register, primitive, reference, dimensions)
    register(lower_reference)
    register(lower_fused, "cuda")
    register(lower_fused, "rocm")


def _why_reference(
    slower: Callable[..., str | None],
    case_of: Callable[..., dispatch.Case | None],
    avals: Sequence[Any],
    team: Team,
    params: Mapping[str, Any],
) -> list[str]:
    """Why None takes XLA on GPUs, as shapes and tables say it."""
    if (is_slower := dispatch.is_slower(case_of(avals, team, params))) is not None:
        return [dispatch.SLOWER] if is_slower else []
    target = team.compute_capability
    why = None if params["config"] else dispatch.unmeasured(target)
    if why and is_amd(target):
        return [Lasting(why)]
    why = why or slower(*avals, compute_capability=target, **params)
    return [why] if why else []


def _register(
    primitive: Any,
    reference: Callable[..., Any],
    dimensions: Dimensions | None,
    lower_part: Callable[..., Any],
    platform: str | None = None,
) -> None:
    """Registers a lowering rule that takes each part of the operands where Explicit axes are left over."""

    def rule(ctx: Any, *operands: Any, implementation: str | None, **params: Any) -> Any:
        axes = explicit_axes(ctx)
        if not axes or dimensions is None:
            return lower_part(ctx, *operands, implementation=implementation, **params)
        ins, outs = dimensions(*ctx.avals_in, **params)
        function = functools.partial(primitive.bind, implementation=implementation)
        if reasons := _inseparable(ctx.avals_in, ins):
            if implementation is not None:
                raise Unsupported(primitive.name, reasons)
            log_reference(primitive.name, ctx.avals_in, reasons)
            function = reference
        split = _split(functools.partial(function, **params), ctx.avals_in, ins, ctx.avals_out, outs, axes)
        with concrete_mesh(ctx):
            return mlir.lower_fun(split, multiple_results=True)(ctx, *operands)

    mlir.register_lowering(primitive, rule, platform=platform)


def _sharded(avals: Sequence[Any], labels: Labels) -> dict[str | None, Any]:
    """How the dimensions of each label are sharded: the entry of a `PartitionSpec`."""
    found: dict[str | None, Any] = {}
    for aval, names in zip(avals, labels, strict=True):
        for label, entry in zip(names, aval.sharding.spec.partitions, strict=True):
            if label is not None and entry is not None:
                found.setdefault(label, entry)
    return found


def _inseparable(avals: Sequence[Any], labels: Labels) -> list[str]:
    """Why a call is not one for each part of its operands, as their types say they are sharded."""
    sharded = _sharded(avals, labels)
    reasons: list[str] = []
    for aval, names in zip(avals, labels, strict=True):
        for i, (label, entry) in enumerate(zip(names, aval.sharding.spec.partitions, strict=True)):
            if entry is None or sharded.get(label) == entry:
                continue
            needed = "whole" if label is None else f"sharded along {sharded[label]!r}, as another operand is"
            reasons.append(
                Lasting(
                    f"jax.shard_map leaves the mesh axis {entry!r} over, along which dimension {i} of an operand of "
                    f"{len(aval.shape)} dimensions is sharded, and the kernel needs it {needed}: jax.reshard the "
                    "operand, or make all axes manual"
                )
            )
    return list(dict.fromkeys(reasons))


def _split(
    function: Callable[..., Any],
    avals_in: Sequence[Any],
    ins: Labels,
    avals_out: Sequence[Any],
    outs: Labels,
    axes: tuple[str, ...],
) -> Callable[..., list[Any]]:
    """The function of each part of its operands, by a `jax.shard_map` over all axes along which they are sharded.

    Operands are resharded first: one that is whole where another one is sharded, or is sharded where it must be whole.
    """
    sharded = _sharded(avals_in, ins)
    in_specs, out_specs = ([PartitionSpec(*(sharded.get(label) for label in x)) for x in each] for each in (ins, outs))

    def split(*operands: Any) -> list[Any]:
        nested = jax.shard_map(
            lambda *parts: jax.tree.leaves(function(*parts)),
            in_specs=tuple(in_specs),
            out_specs=out_specs,
            axis_names=set(axes),
            check_vma=False,
        )
        results = nested(*map(resharded, operands, in_specs))
        return [resharded(x, aval.sharding.spec) for x, aval in zip(results, avals_out)]

    return split


def _register_map(primitive: Any, *, reference: Callable[..., Any], batch: Batch | None) -> None:
    """`jax.vmap` by `batch`, or by the reference."""
    name, multiple_results = primitive.name, primitive.multiple_results

    def map_(axis_data: Any, operands: Any, dims: Any, **params: Any) -> Any:
        outs, dim = map_all(axis_data, operands, dims, **params)
        return outs, [dim] * len(outs) if multiple_results else dim

    def map_all(
        axis_data: Any, operands: Any, dims: Any, *, implementation: str | None, **params: Any
    ) -> tuple[Any, int | None]:
        operands = [jnp.asarray(x) for x in operands]  # literals of a jaxpr are none
        call = functools.partial(primitive.bind, implementation=implementation, **params)
        if axis_data.name in params["axes"]:
            found = Lasting(f"jax.vmap maps over the axis {axis_data.name!r} itself: take jax.shard_map for that")
        elif all(dim is None for dim in dims):
            return call(*operands), None
        elif not jax.export.is_symbolic_dim(axis_data.size) and axis_data.size == 0:
            found = "jax.vmap maps over no examples"
        else:
            found = batch(call, operands, dims, axis_data.size, **params) if batch else "jax.vmap maps over it"
            if isinstance(found, str):
                found = Lasting(f"{found}: jax.lax.map, over the same examples, keeps it")
        if not isinstance(found, str):
            return found, 0
        if implementation in ("fused", "simulate"):
            raise Unsupported(name, [found])
        log_reference(name, operands, [found])
        call = functools.partial(reference, **params)
        return jax.vmap(call, in_axes=dims, axis_name=axis_data.name, axis_size=axis_data.size)(*operands), 0

    batching.fancy_primitive_batchers[primitive] = map_
