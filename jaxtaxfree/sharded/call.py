"""A product of global arrays: by an operation where there is one for it, by JAX's own product otherwise."""

import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxtaxfree.ops import epilogue as epilogues
from jaxtaxfree.ops import narrow
from jaxtaxfree.ops.all_gather_matmul import all_gather_matmul, several
from jaxtaxfree.ops.epilogue import Epilogue
from jaxtaxfree.ops.quantize import BLOCK
from jaxtaxfree.ops.scaled import result_dtype
from jaxtaxfree.primitive import Unsupported, check_implementation, symbolic
from jaxtaxfree.settings import Settings
from jaxtaxfree.sharded import scales
from jaxtaxfree.sharded.plan import Axes, Plan, Sharded, plan
from jaxtaxfree.sharded.run import AnyMesh, axes_of, disagreement, placed, run, sharding_on, spec_of, typed

_log = logging.getLogger("jaxtaxfree")

Sharding = PartitionSpec | NamedSharding
Activation = str | Callable[..., jax.Array] | None


class _Keywords(TypedDict, total=False):
    """What `einsum`, `matmul` and `dot_general` take besides; see `jaxtaxfree.einsum`."""

    out_sharding: Sharding | None
    in_shardings: Sequence[Sharding | None] | None
    gate: jax.Array | None
    bias: jax.Array | tuple[jax.Array | None, ...] | None
    activation: Activation | tuple[Activation, ...]
    residual: jax.Array | None
    lhs_scale: jax.Array | None
    rhs_scale: jax.Array | tuple[jax.Array | None, ...] | None
    gate_scale: jax.Array | None
    quantize_lhs: str | None
    implementation: str | None
    config: Settings | Mapping[str, Any] | None


class Keywords(_Keywords, total=False):
    """The same, where the result is an array."""

    out_scale: jax.Array | None


class Blocks(_Keywords):
    """The same, where the result is a pair of values and their scales."""

    out_scale: Literal["block"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """The same, with what holds where nothing is said."""

    out_sharding: Sharding | None = None
    in_shardings: Sequence[Sharding | None] | None = None
    gate: Any = None
    bias: Any = None
    activation: Any = None
    residual: Any = None
    lhs_scale: Any = None
    rhs_scale: Any = None
    gate_scale: Any = None
    quantize_lhs: Any = None
    out_scale: Any = None
    implementation: str | None = None
    config: Any = None

    @property
    def scaled(self) -> bool:
        """Whether there are scales."""
        return not (self.lhs_scale is None and self.rhs_scale is None and self.gate_scale is None)

    @property
    def by_blocks(self) -> bool:
        """Whether the result is in 8 bits with scales of its own."""
        return isinstance(self.out_scale, str)


def for_each(operation: str, count: int, asked: Asked) -> list[Asked]:
    """What is asked for of each of several rhs; raises ValueError if it is not for several."""
    several.check_epilogue(operation, count, gate=asked.gate, residual=asked.residual, gate_scale=asked.gate_scale)
    if narrow.asked(asked.quantize_lhs, asked.out_scale):
        raise ValueError(f"{operation} takes quantize_lhs and out_scale with one rhs.")
    if asked.rhs_scale is not None and not isinstance(asked.rhs_scale, tuple):
        raise ValueError(f"{operation} takes rhs_scale as a tuple where rhs is one.")
    names = ("activation", "bias", "rhs_scale")
    values = zip(*(several.for_each(operation, name, getattr(asked, name), count) for name in names), strict=True)
    return [dataclasses.replace(asked, **dict(zip(names, each))) for each in values]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A product as it was asked for.

    Attributes:
      name: of the function.
      own: (operands, out_sharding, preferred_element_type) -> JAX's own product of them.
      operands: of the product.
      labels: of lhs, rhs and the result; None if it is no product of two operands.
      reasons: why it can be JAX's own product alone.
      precision, preferred_element_type: as of the function.
      asked: the other keywords.
    """

    name: str
    own: Callable[..., jax.Array]
    operands: Sequence[jax.Array]
    labels: tuple[tuple[str, ...], ...] | None
    reasons: Sequence[str] = ()
    precision: lax.PrecisionLike
    preferred_element_type: DTypeLike | None
    asked: Asked

    @property
    def keywords(self) -> dict[str, Any]:
        """Of the operation."""
        precision = {"precision": self.precision, "preferred_element_type": self.preferred_element_type}
        names = ("activation", "quantize_lhs", "implementation", "config")
        blocks = {"out_scale": self.asked.out_scale} if self.asked.by_blocks else {}
        return precision | blocks | {name: getattr(self.asked, name) for name in names}

    @functools.cached_property
    def others(self) -> dict[str, jax.Array]:
        """The operands of the epilogue that there are."""
        given = {name: getattr(self.asked, name) for name in ("gate", "bias", "residual")}
        return {name: jnp.asarray(x) for name, x in given.items() if x is not None}

    @functools.cached_property
    def scales(self) -> dict[str, jax.Array]:
        """Of "lhs", "rhs" and "gate", as far as there are any."""
        given = {name: getattr(self.asked, f"{name}_scale") for name in ("lhs", "rhs", "gate")}
        return {name: jnp.asarray(x) for name, x in given.items() if x is not None}

    @property
    def named(self) -> dict[str, jax.Array]:
        """All arrays of a product of two operands, as the operation names them, with a scale of the result."""
        found = dict(zip(("lhs", "rhs"), self.operands, strict=True)) | self.others
        found |= {f"{name}_scale": scale for name, scale in self.scales.items()}
        given = self.asked.out_scale is not None and not self.asked.by_blocks
        return found | ({"out_scale": jnp.asarray(self.asked.out_scale)} if given else {})

    @property
    def by_name(self) -> dict[str, jax.Array]:
        """What may have scales."""
        return dict(zip(("lhs", "rhs"), self.operands)) | {k: x for k, x in self.others.items() if k == "gate"}

    @functools.cached_property
    def lengths(self) -> dict[str, int]:
        """Of the dimensions, by their labels."""
        assert self.labels is not None
        each = zip(self.labels, self.operands)
        return {label: length for labels, x in each for label, length in zip(labels, x.shape, strict=True)}

    @property
    def columns(self) -> list[str]:
        """The dimensions of the result that rhs has, in its order."""
        lhs, rhs, _ = self.labels or ((), (), ())
        return [label for label in rhs if label not in lhs]


def product(call: Call) -> Any:
    """The result of a call: an array, or with scales of its own a pair of values and these."""
    mesh = _checked(call)
    if call.asked.implementation == "xla":
        return _plain(call, mesh)
    found = _plan(call, mesh)
    if isinstance(found, Plan):
        assert mesh is not None
        out = _run([call], [found], mesh)
        return tuple(out) if call.asked.by_blocks else out[0]
    if call.asked.implementation is not None:
        if (transposed := _lies_alone(call, mesh)) is None:
            raise Unsupported(call.name, found)
        given: dict[str, Any] = call.keywords | call.named
        return all_gather_matmul(given.pop("lhs"), given.pop("rhs"), (), rhs_transposed=transposed, **given)
    _say(call, "; ".join(found))
    return _plain(call, mesh)


def _lies_alone(call: Call, mesh: AnyMesh | None) -> bool | None:
    """Whether rhs is [N, K], of a product of local arrays [..., M, K] and [K, N]; None if it is no such product."""
    if call.reasons or call.labels is None or mesh is None or not axes_of(mesh, AxisType.Manual):
        return None
    lhs, rhs, result = call.labels
    *rows, k = lhs
    if not rows or len(rhs) != 2 or k not in rhs:
        return None
    (n,) = (label for label in rhs if label != k)
    return rhs[1] == k if result == (*rows, n) else None


def products(calls: Sequence[Call]) -> tuple[jax.Array, ...]:
    """The results of calls that have lhs in common: by one operation if there is one, else of each by itself."""
    meshes = [_checked(call) for call in calls]
    asked = calls[0].asked
    scaled = any(call.scales for call in calls)
    alike = len({call.operands[1].dtype for call in calls}) == 1
    if len(calls) > 1 and asked.implementation != "xla" and alike and not scaled:
        found = [_plan(call, mesh) for call, mesh in zip(calls, meshes, strict=True)]
        plans = [each for each in found if isinstance(each, Plan)]
        if meshes[0] is not None and len(plans) == len(calls) and not disagreement(plans):
            return tuple(_run(calls, plans, meshes[0]))
    return tuple(map(product, calls))


def _checked(call: Call) -> AnyMesh | None:
    """The mesh of a call; raises ValueError if something is wrong with it."""
    check_implementation(call.asked.implementation)
    _check_epilogue(call)
    if call.scales:
        if call.labels is None:
            raise ValueError(f"{call.name} takes scales with two operands only.")
        if "gate" in call.scales and "gate" not in call.others:
            raise ValueError(f"{call.name} takes gate_scale with a gate only.")
        lhs, rhs, _ = call.labels
        scales.check(call.name, call.by_name, call.scales, {"lhs": lhs, "rhs": rhs, "gate": rhs})
    _check_narrow(call)
    mesh = _mesh_of(call)
    _check_shardings(call, mesh)
    return mesh


def _check_narrow(call: Call) -> None:
    """Raises ValueError if a product cannot quantise its lhs, or round its result to 8 bits, as it is asked to."""
    asked = call.asked
    if not narrow.asked(asked.quantize_lhs, asked.out_scale):
        return
    if call.labels is None:
        raise ValueError(f"{call.name} takes quantize_lhs and out_scale with two operands only.")
    lhs, _, result = call.labels
    if asked.quantize_lhs is not None:
        narrow.check_lhs(call.name, asked.quantize_lhs, call.named)
        contracted = [label for label in lhs if label not in result]
        if asked.quantize_lhs == "block" and len(contracted) != 1:
            raise ValueError(
                f"{call.name} takes quantize_lhs='block' where lhs has one contracted dimension, not {contracted}: "
                "take 'row'."
            )
    if asked.out_scale is not None:
        narrow.check_result(call.name, call.preferred_element_type, asked.out_scale)
    if asked.by_blocks and not (len(call.columns) == 1 and result[-1:] == tuple(call.columns)):
        raise ValueError(
            f"{call.name} takes out_scale='block' where rhs has one dimension that lhs has not, and it is the last one "
            f"of the result, not {call.columns} in {list(result)}: give an out_scale of float32 []."
        )


def _run(calls: Sequence[Call], plans: Sequence[Plan], mesh: AnyMesh) -> list[jax.Array]:
    """The results by one operation."""
    # The gradient of weights that are gathered or cut before lies as they do.
    operands = [
        _placed_operands(c, mesh) if plan.before or plan.cut else c.operands
        for c, plan in zip(calls, plans, strict=True)
    ]
    pairs = [(rhs, lhs) if plan.swapped else (lhs, rhs) for (lhs, rhs), plan in zip(operands, plans)]
    others: dict[str, Any] = dict(calls[0].others)
    keywords = calls[0].keywords
    if len(calls) > 1:
        others = {"bias": tuple(call.others.get("bias") for call in calls)}
        keywords["activation"] = tuple(call.asked.activation for call in calls)
    for name, scale in calls[0].scales.items():
        others[f"{name}_scale"] = scale
        keywords.setdefault("scales", {})[f"{name}_scale"] = scales.sharding(
            plans[0], name, calls[0].by_name[name], scale
        )
    if "out_scale" in calls[0].named:
        others["out_scale"] = calls[0].named["out_scale"]
    return run(plans, mesh, pairs[0][0], [w for _, w in pairs], others, **keywords)


_said: set[tuple[str, str]] = set()
_said_lock = threading.Lock()


def _say(call: Call, reason: str) -> None:
    """Says that a product is JAX's own: once in a process for each function and reason at INFO level."""
    with _said_lock:
        new = (call.name, reason) not in _said
        _said.add((call.name, reason))
    described = [f"{x.dtype}{list(x.shape)}" for x in call.operands]
    more = ". implementation='xla' asks for that. Later calls say so at DEBUG level." if new else ""
    _log.log(
        logging.INFO if new else logging.DEBUG, "%s%s is JAX's own product: %s%s", call.name, described, reason, more
    )


def forget() -> None:
    """Makes `_say` say again what it has said: for tests."""
    with _said_lock:
        _said.clear()


def _check_epilogue(call: Call) -> None:
    """Raises ValueError if there is no such activation, or an operand of the epilogue does not fit."""
    epilogues.activation_name(call.name, call.asked.activation)
    if not call.others and call.asked.activation is None:
        return
    if call.labels is None:
        raise ValueError(f"{call.name} takes {', '.join(call.others) or 'an activation'} with two operands only.")
    rhs, lengths = call.operands[1], call.lengths
    shapes = {
        "gate": rhs.shape,
        "bias": tuple(lengths[label] for label in call.columns),
        "residual": tuple(lengths[label] for label in call.labels[2]),
    }
    for name, x in call.others.items():
        if x.shape != shapes[name]:
            raise ValueError(f"{call.name} takes a {name} of shape {list(shapes[name])} here, not {list(x.shape)}.")
    scaled = {id(call.by_name[name]) for name in call.scales}
    for x in (*call.operands, *call.others.values()):
        if id(x) not in scaled and not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{call.name} has an epilogue for floating-point numbers, not {x.dtype}.")


def _mesh_of(call: Call) -> AnyMesh | None:
    """The mesh on which a call's arrays lie; None if nothing says it.

    Raises ValueError if the shardings are of several meshes.
    """
    context = jax.sharding.get_abstract_mesh()
    given = [
        s.mesh for s in (*(call.asked.in_shardings or ()), call.asked.out_sharding) if isinstance(s, NamedSharding)
    ]
    if len(set(given)) > 1:
        raise ValueError(f"{call.name} takes shardings of one mesh, not of {given}.")
    if context.manual_axes or not (given or context.empty):
        return context
    typed_by = [jax.typeof(x).sharding.mesh for x in call.operands]
    return next(iter([*given, *(mesh for mesh in typed_by if not mesh.empty)]), None)


def _check_shardings(call: Call, mesh: AnyMesh | None) -> None:
    """Raises ValueError if there are not as many as operands, or one names an axis that cannot shard a global array."""
    if call.asked.in_shardings is not None and len(call.asked.in_shardings) != len(call.operands):
        raise ValueError(
            f"{call.name} takes in_shardings of {len(call.operands)} operands, not {call.asked.in_shardings}."
        )
    if mesh is None:
        return
    manual = axes_of(mesh, AxisType.Manual)
    for sharding in (*(call.asked.in_shardings or ()), call.asked.out_sharding):
        for entry in () if sharding is None else _spec(sharding):
            for axis in entry if isinstance(entry, tuple) else (entry,):
                if isinstance(axis, str) and axis not in mesh.shape:
                    raise ValueError(
                        f"{call.name} takes axes of the mesh {mesh.axis_names}, not {axis!r} as in {sharding}."
                    )
                if axis in manual:
                    raise ValueError(
                        f"{call.name} is called inside a jax.shard_map that has made {axis!r} manual. Arrays are local "
                        f"along it there, so leave it out of the shardings, not as in {sharding}."
                    )


def _plan(call: Call, mesh: AnyMesh | None) -> Plan | list[str]:
    """The operation of a call, or all reasons why there is none."""
    reasons = list(call.reasons) or symbolic(*call.operands)
    if reasons or call.labels is None:
        return reasons
    if mesh is None:
        return ["there is no mesh: take jax.set_mesh or NamedShardings"]
    if manual := axes_of(mesh, AxisType.Manual):
        return [
            f"jax.shard_map has made the mesh axes {sorted(manual)} manual, where arrays are local: take "
            "jtf.matmul_all_reduce and its like"
        ]
    if call.asked.out_sharding is None:
        return ["there is no out_sharding"]
    auto = sorted(axis for axis in axes_of(mesh, AxisType.Auto) if mesh.shape[axis] > 1)
    if auto and (call.asked.in_shardings is None or None in call.asked.in_shardings):
        return [f"types say nothing along the Auto axes {auto}: take in_shardings"]
    given = call.asked.in_shardings or (None, None)
    shardings = [jax.typeof(x).sharding if s is None else s for x, s in zip(call.operands, given)]
    found = [_sharded(call.name, *each) for each in zip(call.labels, (*shardings, call.asked.out_sharding))]
    if reasons := [each for each in found if isinstance(each, str)]:
        return list(dict.fromkeys(reasons))
    lhs, rhs, out = (each for each in found if isinstance(each, Sharded))
    # With scales lhs has the rows: scales of rows and of weights are not alike, and blocks are of a row's columns.
    swapped = False if call.scales or call.asked.by_blocks else None
    planned = plan(lhs, rhs, out, call.lengths, mesh.shape, list(call.others), swapped)
    if isinstance(planned, Plan) and (refused := scales.refusals(planned, call.by_name, call.scales, mesh.shape)):
        return refused
    of_blocks = isinstance(planned, Plan) and call.asked.by_blocks
    if of_blocks and (refused := scales.refusals_of_result(planned, call.lengths, mesh.shape)):
        return refused
    if isinstance(planned, Plan) and not planned.operation:
        gathers = planned.gathered or planned.before
        return [f"it needs no communication{' once the weights are gathered' if gathers else ''}"]
    return planned


def _sharded(name: str, labels: Sequence[str], sharding: Sharding) -> Sharded | str:
    """An array as the planner sees it, or why that is not possible; raises ValueError if the sharding does not fit."""
    spec = _spec(sharding)
    if spec.unreduced or spec.reduced:
        return f"{spec} has sums that are added up later"
    if PartitionSpec.UNCONSTRAINED in tuple(spec):
        return f"{spec} leaves dimensions to the compiler"
    if len(spec) > len(labels):
        raise ValueError(f"{name} takes a sharding of up to {len(labels)} dimensions here, not {spec}.")
    return Sharded(tuple(labels), tuple(_entries(spec, len(labels))))


def _plain(call: Call, mesh: AnyMesh | None) -> Any:
    """JAX's own product, with the same epilogue: an array, or with scales of its own a pair of values and these."""
    if call.asked.out_scale is not None:
        dtype, out_scale = narrow.check_result(call.name, call.preferred_element_type, call.asked.out_scale)
        lhs, rhs = call.operands
        wide = result_dtype(lhs, rhs, None)
        asked = dataclasses.replace(call.asked, out_scale=None)
        y = _plain(dataclasses.replace(call, asked=asked, preferred_element_type=wide), mesh)
        return _rounded(y, dtype, out_scale)
    if call.asked.quantize_lhs is not None:
        return _quantized(call, mesh)
    if call.scales:
        wide = {name: scales.expanded(x, call.scales[name]) for name, x in call.by_name.items() if name in call.scales}
        operands = [wide.get(name, x.astype(jnp.float32)) for name, x in zip(("lhs", "rhs"), call.operands)]
        asked = dataclasses.replace(call.asked, lhs_scale=None, rhs_scale=None, gate_scale=None)
        if "gate" in call.others:
            asked = dataclasses.replace(asked, gate=wide.get("gate", call.others["gate"].astype(jnp.float32)))
        lhs, rhs = call.operands
        dtype = result_dtype(lhs, rhs, call.preferred_element_type)
        return _plain(dataclasses.replace(call, operands=operands, asked=asked), mesh).astype(dtype)
    others = dict(call.others)
    operands = _placed_operands(call, mesh)
    products = [_own(call, mesh, operands)]
    if not call.others and call.asked.activation is None:
        return products[0]
    if "gate" in others:
        gated = dataclasses.replace(call, operands=[operands[0], others.pop("gate")])
        products.append(_own(call, mesh, _placed_operands(gated, mesh)))
    y, own_mesh = products[0], jax.typeof(products[0]).sharding.mesh
    dtype, entries = y.dtype, _entries(jax.typeof(y).sharding.spec, y.ndim)
    if "bias" in others:
        assert call.labels is not None
        _, _, out = call.labels
        bias = others.pop("bias").transpose([call.columns.index(x) for x in out if x in call.columns])
        bias = jnp.expand_dims(bias, [i for i, x in enumerate(out) if x not in call.columns])
        bias = typed(bias, own_mesh, [entry if x in call.columns else () for x, entry in zip(out, entries)])
        products[0] = y.astype(epilogues.wide_type(dtype)) + bias.astype(epilogues.wide_type(dtype))
    if "residual" in others:
        others["residual"] = typed(others["residual"], own_mesh, entries)
    gate = ("gate",) * (len(products) - 1)
    epilogue = Epilogue(epilogues.activation_name(call.name, call.asked.activation), (*gate, *others))
    return epilogue.apply(products, others, dtype)


def _rounded(y: jax.Array, dtype: Any, out_scale: Any) -> Any:
    """The result in 8 bits, which lies as it did. Scales lie as blocks do; whole where a block lies on two devices."""
    if not isinstance(out_scale, str):
        return narrow.rounded(y, dtype, out_scale)
    mesh = jax.typeof(y).sharding.mesh
    spec = _entries(jax.typeof(y).sharding.spec, y.ndim)
    *others, last = spec
    divided = y.shape[-1] % (BLOCK * math.prod(mesh.shape[axis] for axis in last)) == 0
    quantizer = functools.partial(narrow.rounded, dtype=dtype, out_scale=out_scale)
    return _by_auto_axes(quantizer, mesh, [spec, [*others, last if divided else ()]])(y)


def _quantized(call: Call, mesh: AnyMesh | None) -> jax.Array:
    """The product of a lhs that is quantised, whose gradients are those of the product of lhs itself."""
    assert call.labels is not None
    labels, _, result = call.labels
    block = narrow.check_lhs(call.name, call.asked.quantize_lhs, call.named)

    def product(given: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
        names = ("gate", "bias", "residual", "lhs_scale", "rhs_scale", "gate_scale")
        own: dict[str, Any] = {name: given.get(name) for name in names}
        asked = dataclasses.replace(call.asked, quantize_lhs=None, **own)
        operands = [given["lhs"], given["rhs"]]
        return _plain(dataclasses.replace(call, operands=operands, asked=asked, preferred_element_type=dtype), mesh)

    def quantizer(lhs: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        lies = jax.typeof(lhs).sharding
        spec = _entries(lies.spec, lhs.ndim)
        contracted = [label not in result for label in labels]
        of_scale = [() if own else entry for own, entry in zip(contracted, spec, strict=True)]
        quantized = functools.partial(scales.quantized, contracted=contracted, dtype=dtype, block=block)
        return _by_auto_axes(quantized, lies.mesh, [spec, of_scale])(lhs)

    wide = call.preferred_element_type or call.operands[0].dtype
    return narrow.straight_through_lhs(product, quantizer, wide)(call.named)


def _by_auto_axes(
    function: Callable[[jax.Array], Any], mesh: AnyMesh, outs: Sequence[Sequence[Axes]]
) -> Callable[[jax.Array], Any]:
    """A function of an array, in which XLA finds how what it reshapes lies along Explicit axes.

    Args:
      outs: the axes that shard its results.
    """
    explicit = axes_of(mesh, AxisType.Explicit)
    if not explicit:
        return function
    out_sharding = tuple(sharding_on(mesh, spec_of(each, explicit)) for each in outs)
    return jax.sharding.auto_axes(function, axes=tuple(explicit), out_sharding=out_sharding)


def _placed_operands(call: Call, mesh: AnyMesh | None) -> list[jax.Array]:
    """The operands, as the caller says that they lie."""
    if mesh is None or call.asked.in_shardings is None:
        return list(call.operands)
    return [
        x if s is None else _placed(x, mesh, s) for x, s in zip(call.operands, call.asked.in_shardings, strict=True)
    ]


def _own(call: Call, mesh: AnyMesh | None, operands: Sequence[jax.Array]) -> jax.Array:
    """JAX's own product, which takes shardings along Explicit axes alone."""
    sharding = call.asked.out_sharding
    own = functools.partial(call.own, preferred_element_type=call.preferred_element_type)
    if sharding is None or mesh is None or not axes_of(mesh, AxisType.Auto):
        return own(operands, sharding)
    y = own(operands, None) if not axes_of(mesh, AxisType.Explicit) else None
    if y is None:
        spec = _spec(sharding)
        explicit = spec_of(_entries(spec, len(spec)), axes_of(mesh, AxisType.Explicit))
        y = own(operands, sharding_on(mesh, explicit))
    return _placed(y, mesh, sharding)


def _placed(x: jax.Array, mesh: AnyMesh, sharding: Sharding) -> jax.Array:
    if not axes_of(mesh, AxisType.Explicit):
        return lax.with_sharding_constraint(x, sharding)
    return placed(x, mesh, _entries(_spec(sharding), x.ndim))


def _spec(sharding: Sharding) -> PartitionSpec:
    return sharding if isinstance(sharding, PartitionSpec) else sharding.spec


def _entries(spec: PartitionSpec, ndim: int) -> list[Axes]:
    """The axes of each dimension."""
    parts = (*spec, *[None] * (ndim - len(spec)))
    return [() if part is None else part if isinstance(part, tuple) else (part,) for part in parts]
