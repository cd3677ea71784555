"""`ragged_dot`: rows in groups, each multiplied by a matrix of its group, as in a mixture of experts."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxtaxfree.dispatch import Case
from jaxtaxfree.ops import epilogue as epilogues
from jaxtaxfree.ops import matmul, narrow
from jaxtaxfree.ops.epilogue import NONE, Epilogue
from jaxtaxfree.ops.operand import Operand
from jaxtaxfree.ops.ragged_dot import scaled
from jaxtaxfree.ops.ragged_dot.common import Call, check_operands
from jaxtaxfree.ops.ragged_dot.variants import VARIANTS, VARIANTS_OF_WEIGHTS
from jaxtaxfree.ops.scaled import result_dtype
from jaxtaxfree.ops.untrusted import as_int32, nothing
from jaxtaxfree.ops.variant import Choice, choose, settings_of
from jaxtaxfree.primitive import (
    DTYPES,
    Lasting,
    Unsupported,
    check_implementation,
    collective,
    jvp_of,
    multilinear,
    needs_devices,
    symbolic,
    takes_reference,
)
from jaxtaxfree.settings import Settings
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.target import target_of
from jaxtaxfree.teams import Team

# Elements of a matrix, so that indices within it have 32 bits; and rows, where the end of ragged descriptors lies.
MOST_ELEMENTS = 2**31 - 2**17
MOST_ROWS = 2**30 - 2**10
# The gradient of the weights: rows are contracted.
OF_WEIGHTS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@overload
def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    rhs_transposed: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    gate: jax.Array | None = None,
    gate_scale: jax.Array | None = None,
    out_scale: jax.Array | None = None,
    activation: str | Callable[..., Any] | None = None,
    fill: bool = True,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> jax.Array: ...


@overload
def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    rhs_transposed: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    gate: jax.Array | None = None,
    gate_scale: jax.Array | None = None,
    out_scale: Literal["block"],
    activation: str | Callable[..., Any] | None = None,
    fill: bool = True,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    rhs_transposed: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    gate: jax.Array | None = None,
    gate_scale: jax.Array | None = None,
    out_scale: jax.Array | str | None = None,
    activation: str | Callable[..., Any] | None = None,
    fill: bool = True,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> Any:
    """`lax.ragged_dot`, as one kernel on NVIDIA GPUs: sizes are read on the device, and empty groups cost nothing.

    The rows of `lhs` are in groups, one behind the other. Those of group i are multiplied by `rhs[i]`. Rows behind the
    last group are zeros in the result. It works inside and outside of `jax.shard_map`, and needs no mesh axis.

    Args:
      lhs: [M, K].
      rhs: [G, K, N].
      group_sizes: integers [G], how many rows each group has. Their sum is at most M.
      precision: as in `jnp.matmul`. For f32 operands on GPUs None means TF32, unless `jax_default_matmul_precision`
        says more.
      preferred_element_type: dtype of the result. Sums are always f32.
      rhs_transposed: `rhs` is [G, N, K]. The kernel reads it as it lies.
      lhs_scale: by what a `lhs` of 8 bits (see `quantize`) is multiplied, f32: [], [M, 1], or [M, ceil(K / 128)] of
        blocks. Sums are multiplied, with blocks those of every 128 of K. The result has the dtype of the operand that
        has not 8 bits, else bfloat16. A kernel for Hopper multiplies operands of 8 bits as they are, and reads weights
        of 8 bits under a `lhs` of 16, with `rhs_transposed`; elsewhere they are cast to 16 bits before, which is exact,
        or with scales of blocks become f32.
      rhs_scale, gate_scale: the same of `rhs` and of the gate: [], [G, 1, N], or [G, ceil(K / 128), ceil(N / 128)],
        turned over as `rhs` is.
      gate: [G, K, N], a second `rhs`, as in SwiGLU. With scales it lies as `rhs` does. The result is
        `activation(ragged_dot(lhs, gate)) * ragged_dot(lhs, rhs)`.
      out_scale: with a `preferred_element_type` of 8 bits: by what the result is divided before it is rounded to that,
        f32 []; or "block", which gives a pair of values and their scales, f32 [M, ceil(N / 128)], which are `lhs` and
        `lhs_scale` of the next product. A program of XLA behind the kernel does that, to a result of the dtype that it
        would have with no other preferred: bfloat16, or that of the operand that has not 8 bits.
      activation: None, "silu", "gelu_tanh", "gelu_exact", `jax.nn.silu`, or `jax.nn.gelu`, which is "gelu_tanh".
      fill: False: nothing is said of rows behind the last group, in the result and in the gradient of `lhs`. Nobody
        writes them then. (Where sizes are wrong they are NaN, too.)
      implementation: "fused": the kernel. "xla": `lax.ragged_dot`. None: the kernel, where it can run and is not known
        to be slower. "simulate": the kernel, run on the CPU; see `jaxtaxfree.simulator`.
      config: names the kernel and its settings, such as `{"kernel": "hopper", "num_stages": 3}`. The shape decides
        whatever it leaves out.

    Returns: [M, N], or with out_scale="block" a pair of it and its scales. Where a size is negative, or the sum is more
      than M, the kernel addresses nothing by it, and the whole result is NaN, as are its gradients; so they are on
      CPUs. (XLA's own kernels for GPUs check nothing.) No error is raised, because the kernel has no heap in which it
      could leave one for the host. An int8 has no NaN: with "block" the scales are, and with a given scale the result
      is 0.

    Its gradients are kernels as well: that of `lhs` is a `ragged_dot`, and that of `rhs` contracts the rows of each
    group. In a program that is differentiated the product is rounded before gate and activation are applied.

    Raises:
      ValueError: if the operands do not fit together, a scale has the wrong dtype or shape, `out_scale` comes without a
        `preferred_element_type` of 8 bits, or the implementation, activation or setting does not exist.
      TypeError: if `config` has the wrong type.
      NotImplementedError: if implementation="fused" (or "simulate") cannot run here. The error gives all reasons.
    """
    if out_scale is not None:
        lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
        dtype, out_scale = narrow.check_result("ragged_dot", preferred_element_type, out_scale)
        out = ragged_dot(
            lhs, rhs, group_sizes, precision, result_dtype(lhs, rhs, None), rhs_transposed=rhs_transposed,
            lhs_scale=lhs_scale, rhs_scale=rhs_scale, gate=gate, gate_scale=gate_scale, activation=activation,
            fill=fill, implementation=implementation, config=config,
        )  # fmt: skip
        return narrow.rounded(out, dtype, out_scale)
    scales = {"lhs": lhs_scale, "rhs": rhs_scale, "gate": gate_scale}
    if any(scale is not None for scale in scales.values()):
        form = {"precision": precision, "fill": bool(fill), "implementation": implementation, "config": config}
        return scaled.ragged_dot(
            scaled_p, ragged_dot, lhs, rhs, group_sizes, scales=scales, gate=gate, activation=activation,
            preferred_element_type=preferred_element_type, rhs_transposed=rhs_transposed, **form,
        )  # fmt: skip
    lhs, rhs, sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(group_sizes)
    check_implementation(implementation)
    check_operands(lhs, rhs, sizes, rhs_transposed)
    found, operands = _epilogue(lhs, rhs, activation, gate, rhs_transposed)
    settings = settings_of("ragged_dot", VARIANTS, config)
    sizes = as_int32(sizes)
    params: dict[str, Any] = {
        "axes": (),
        "epilogue": found,
        "rhs_transposed": bool(rhs_transposed),
        "fill": bool(fill),
        **matmul.check_precision(precision, preferred_element_type),
    }
    reasons = unsupported(lhs, rhs, sizes, *operands, **params)
    if takes_reference("ragged_dot", [lhs, rhs], implementation, reasons):
        return reference(lhs, rhs, sizes, *operands, **params)[0]
    return _bind(ragged_dot_p, lhs, rhs, sizes, *operands, implementation=implementation, config=settings, **params)


def _bind(primitive: Any, *operands: jax.Array, **params: Any) -> jax.Array:
    return primitive.bind(*matmul.vary_alike(*operands, axes=()), **params)[0]


def _epilogue(
    lhs: jax.Array, rhs: jax.Array, activation: Any, gate: jax.Array | None, rhs_transposed: bool
) -> tuple[Epilogue, list[jax.Array]]:
    name = epilogues.activation_name("ragged_dot", activation)
    if gate is None:
        return (Epilogue(name) if name else NONE), []
    gate = jnp.asarray(gate)
    if rhs_transposed:
        raise ValueError("ragged_dot takes a gate with rhs [G, K, N] only, not with rhs_transposed.")
    if gate.shape != rhs.shape or gate.dtype != rhs.dtype:
        raise ValueError(
            f"ragged_dot takes a gate like rhs, {rhs.dtype}{list(rhs.shape)}, not {gate.dtype}{list(gate.shape)}."
        )
    return Epilogue(name, ("gate",)), [gate]


def _mappable(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A product of `lax` that `jax.vmap` maps over any of its operands, and not over all alone, as `lax` has it."""
    mapped = jax.custom_batching.custom_vmap(product)

    @mapped.def_vmap
    def _(size: int, batched: Any, *operands: jax.Array) -> tuple[jax.Array, bool]:
        each = (x if there else jnp.broadcast_to(x, (size, *x.shape)) for x, there in zip(operands, batched))
        return jax.vmap(product)(*each), True

    return mapped


def reference(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *operands: jax.Array,
    axes: tuple[str, ...] = (),
    precision: Any,
    preferred_element_type: Any,
    epilogue: Epilogue = NONE,
    rhs_transposed: bool = False,
    fill: bool = True,
    config: Any = None,
    mappable: Callable[..., Any] = lambda product: product,
) -> list[jax.Array]:
    """What the operation means, in plain `lax`.

    Args:
      mappable: `_mappable`, of which JAX has no transpose, where the derivatives are those of the primitive.
    """
    del axes, config, fill
    rhs = rhs.swapaxes(1, 2) if rhs_transposed else rhs

    def multiply(lhs: jax.Array, rhs: jax.Array, preferred_element_type: Any) -> jax.Array:
        how = {"precision": precision, "preferred_element_type": preferred_element_type}
        return mappable(functools.partial(lax.ragged_dot, **how))(lhs, rhs, sizes)

    if not epilogue:
        return [_checked(multiply(lhs, rhs, preferred_element_type=preferred_element_type), sizes, lhs.shape[0])]
    dtype = preferred_element_type or jnp.result_type(lhs, rhs)
    wide = epilogues.wide_type(dtype)
    products = [multiply(lhs, w, preferred_element_type=wide) for w in (rhs, *operands)]
    return [_checked(epilogue.apply(products, {}, dtype), sizes, lhs.shape[0])]


def _checked(out: jax.Array, sizes: jax.Array, rows: int) -> jax.Array:
    """NaN where sizes are wrong, as of the kernel, on CPUs. On GPUs it would be a pass over what XLA's kernel wrote."""

    def check(out: jax.Array, sizes: jax.Array) -> jax.Array:
        ends = jnp.cumsum(sizes)  # the first sum that wraps around is negative
        wrong = jnp.any((sizes < 0) | (ends < 0) | (ends > rows))
        # A product, so that gradients are NaN, too.
        return out * jnp.where(wrong, nothing(out.dtype), np.ones((), out.dtype))

    out, sizes = matmul.vary_alike(out, sizes, axes=())
    return lax.platform_dependent(out, sizes, cpu=check, default=lambda out, _: out)


def reference_of_weights(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, precision: Any, preferred_element_type: Any, **_: Any
) -> list[jax.Array]:
    """lhs^T @ rhs of the rows of each group: [G, K, N]."""
    how = {"precision": precision, "preferred_element_type": preferred_element_type}

    def product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(lhs, rhs, sizes, OF_WEIGHTS, **how)

    out = _mappable(product)(lhs, rhs, sizes)
    return [_checked(out, sizes, lhs.shape[0])]


def unsupported(
    lhs: Any,
    rhs: Any,
    sizes: Any,
    *_: Any,
    precision: Any,
    preferred_element_type: Any,
    **__: Any,
) -> list[str]:
    """All that keeps every kernel from taking these operands."""
    if reasons := symbolic(lhs, rhs, sizes):
        return reasons
    if lhs.dtype != rhs.dtype:
        reasons.append(Lasting(f"it takes operands of one dtype, not {lhs.dtype} and {rhs.dtype}: cast one of them"))
    elif lhs.dtype.name not in DTYPES:
        reasons.append(Lasting(f"it takes {', '.join(DTYPES)}, not {lhs.dtype}: cast the operands"))
    if preferred_element_type is not None and preferred_element_type.name not in DTYPES:
        reasons.append(Lasting(f"it gives {', '.join(DTYPES)}, not {preferred_element_type}: cast the result"))
    if 0 in lhs.shape or 0 in rhs.shape:
        reasons.append(f"an operand is empty: {list(lhs.shape)}, {list(rhs.shape)}")
    if lhs.shape[0] > MOST_ROWS or max(x.shape[-1] * x.shape[-2] for x in (lhs, rhs)) > MOST_ELEMENTS:
        reasons.append(
            f"it takes at most {MOST_ROWS} rows, and matrices of {MOST_ELEMENTS} elements, not {list(lhs.shape)} and "
            f"{list(rhs.shape)}"
        )
    if matmul.triton_precision(precision) is None:
        reasons.append(Lasting(f"it has no precision {precision}: take 'default', 'high' or 'highest'"))
    return reasons


def _call_of(
    lhs: Any,
    rhs: Any,
    sizes: Any,
    of_weights: bool,
    compute_capability: int,
    *,
    precision: Any,
    preferred_element_type: Any,
    epilogue: Epilogue = NONE,
    rhs_transposed: bool = False,
    fill: bool = True,
    **_: Any,
) -> Call:
    assert not isinstance(epilogue.activation, tuple), "there is one product"
    return Call(
        m=lhs.shape[0],
        k=lhs.shape[1],
        n=rhs.shape[1 if rhs_transposed else -1],
        groups=sizes.shape[0],
        operand=Operand(dtype=np.dtype(lhs.dtype), transposed=rhs_transposed),
        out_dtype=np.dtype(preferred_element_type or lhs.dtype),
        precision=matmul.triton_precision(precision) or "",
        activation=epilogue.activation,
        gated=epilogue.gated,
        rhs_transposed=rhs_transposed,
        fill=fill,
        of_weights=of_weights,
        target=target_of(compute_capability),
    )


def _fused(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *operands: jax.Array,
    of_weights: bool,
    config: tuple[tuple[str, Any], ...],
    compute_capability: int,
    implementation: str | None = None,
    **params: Any,
) -> list[jax.Array]:
    """The operation by one kernel."""
    if reasons := unsupported(lhs, rhs, sizes, **params):
        raise Unsupported("ragged_dot", reasons)
    call = _call_of(lhs, rhs, sizes, of_weights, compute_capability, **params)
    chosen = _choose(call, dict(config))
    weights = dict(zip(("rhs", "gate"), (rhs, *operands)))
    arrays = chosen.arrays(lhs, weights, sizes)
    return [shmem_call(chosen.variant.kernel, *arrays, implementation=implementation, **chosen.keywords)]


def _choose(call: Call, settings: Mapping[str, Any]) -> Choice:
    return choose("ragged_dot", VARIANTS_OF_WEIGHTS if call.of_weights else VARIANTS, call, settings)


def _slower(
    lhs: Any, rhs: Any, sizes: Any, *_: Any, of_weights: bool, compute_capability: int, config: Any, **params: Any
) -> str | None:
    """Why XLA is taken: no kernel takes the call, or the one that would has not been measured."""
    if reasons := unsupported(lhs, rhs, sizes, **params):
        return Lasting("; ".join(reasons))
    call = _call_of(lhs, rhs, sizes, of_weights, compute_capability, **params)
    try:
        chosen = _choose(call, dict(config))
    except Unsupported as error:
        return "; ".join(error.reasons)
    return chosen.variant.slower(call, chosen.config)


def _case(lhs: Any, rhs: Any, sizes: Any, *_: Any, of_weights: bool, team: Team, **params: Any) -> Case | None:
    """What the tables know a call by; None if none of its kind is in them."""
    if params.get("epilogue") or params["preferred_element_type"] not in (None, lhs.dtype):
        return None
    call = _call_of(lhs, rhs, sizes, of_weights, team.compute_capability, **params)
    same = {"dtype": lhs.dtype.name, "groups": call.groups, "k": call.k, "n": call.n}
    kind = "weights" if of_weights else "transposed" if call.rhs_transposed else "rows"

    def chosen(rows: int, settings: Mapping[str, Any]) -> Choice:
        return _choose(dataclasses.replace(call, m=rows), settings)

    return Case(
        operation="ragged_dot",
        device_kind=team.device_kind,
        same=same | {"kind": kind},
        along="m",
        size=call.m,
        choose=chosen,
    )


ragged_dot_p = collective(
    "ragged_dot",
    reference=functools.partial(reference, mappable=_mappable),
    fused=functools.partial(_fused, of_weights=False),
    slower=functools.partial(_slower, of_weights=False),
    case=functools.partial(_case, of_weights=False),
)
weights_p = collective(
    "ragged_dot_weights",
    reference=reference_of_weights,
    fused=functools.partial(_fused, of_weights=True),
    slower=functools.partial(_slower, of_weights=True),
    case=functools.partial(_case, of_weights=True),
)
scaled_p = scaled.define(ragged_dot)
needs_devices(ragged_dot_p)
needs_devices(weights_p)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """Of a product that is linear in lhs and in rhs; with an epilogue it is an operation by itself."""
    if params["epilogue"]:
        return jvp_of(functools.partial(_separate, **params), primals, tangents)
    return _multilinear(ragged_dot_p)(primals, tangents, **params)


def _multilinear(primitive: Any) -> Callable[..., Any]:
    return multilinear(lambda *operands, **params: primitive.bind(*operands, **params)[0], (0, 1))


def _separate(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *operands: jax.Array, epilogue: Epilogue, **params: Any
) -> list[jax.Array]:
    if operands:
        params["config"] = ()  # is of another kernel
    products = [ragged_dot_p.bind(lhs, w, sizes, epilogue=NONE, **params)[0] for w in (rhs, *operands)]
    return [epilogue.apply(products, {}, products[0].dtype)]


def _of(primitive: Any, lhs: Any, rhs: Any, sizes: Any, like: Any, params: dict[str, Any], **own: Any) -> jax.Array:
    """A product that is the gradient of an operand of this type."""
    implementation = params["implementation"]
    if lhs.dtype != rhs.dtype:
        implementation = None  # the kernels take one dtype, and who insisted on them gave one
    return _bind(
        primitive,
        lhs,
        rhs,
        sizes,
        axes=(),
        precision=params["precision"],
        preferred_element_type=np.dtype(like.aval.dtype),
        implementation=implementation,
        config=(),  # is of another kernel
        **own,
    )


def _transpose(cts: Any, lhs: Any, rhs: Any, sizes: Any, *_: Any, rhs_transposed: bool, **params: Any) -> list[Any]:
    """Of `ragged_dot_p` without an epilogue, as a linear function of one operand."""
    [ct] = cts
    if type(ct) is ad.Zero:
        return [None] * 3
    if ad.is_undefined_primal(lhs):
        own = {"rhs_transposed": not rhs_transposed, "epilogue": NONE, "fill": params["fill"]}
        back = _of(ragged_dot_p, ct, rhs, sizes, lhs, params, **own)
        return [back, None, None]
    pair = (ct, lhs) if rhs_transposed else (lhs, ct)
    return [None, _of(weights_p, *pair, sizes, rhs, params), None]


def _transpose_weights(cts: Any, lhs: Any, rhs: Any, sizes: Any, **params: Any) -> list[Any]:
    """Of `weights_p`, as a linear function of one operand: products by groups again."""
    [ct] = cts
    if type(ct) is ad.Zero:
        return [None] * 3
    if ad.is_undefined_primal(lhs):
        back = _of(ragged_dot_p, rhs, ct, sizes, lhs, params, rhs_transposed=True, epilogue=NONE, fill=True)
        return [back, None, None]
    return [None, _of(ragged_dot_p, lhs, ct, sizes, rhs, params, rhs_transposed=False, epilogue=NONE, fill=True), None]


ad.primitive_jvps[ragged_dot_p] = _jvp
ad.primitive_transposes[ragged_dot_p] = _transpose
ad.primitive_jvps[weights_p] = _multilinear(weights_p)
ad.primitive_transposes[weights_p] = _transpose_weights
