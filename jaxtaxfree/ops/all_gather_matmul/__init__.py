"""`all_gather_matmul`: the column-parallel half of a tensor-parallel layer."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxtaxfree.ops import checks, matmul, narrow, product, scaled
from jaxtaxfree.ops import epilogue as epilogues
from jaxtaxfree.ops.all_gather_matmul import several
from jaxtaxfree.ops.all_gather_matmul.variants import VARIANTS
from jaxtaxfree.ops.collectives import all_gather
from jaxtaxfree.ops.epilogue import NONE, Epilogue
from jaxtaxfree.ops.quantize import dequantize
from jaxtaxfree.ops.scaled import UNSCALED, Scaling
from jaxtaxfree.ops.variant import settings_of
from jaxtaxfree.primitive import check_implementation, check_whole, takes_reference
from jaxtaxfree.settings import Settings
from jaxtaxfree.teams import check_axes

_Activation = str | Callable[..., jax.Array] | None


@overload
def all_gather_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    rhs_transposed: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    gate: jax.Array | None = None,
    gate_scale: jax.Array | None = None,
    quantize_lhs: str | None = None,
    out_scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: _Activation = None,
    residual: jax.Array | None = None,
    return_gathered: Literal[False] = False,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> jax.Array: ...


@overload
def all_gather_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    rhs_transposed: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    gate: jax.Array | None = None,
    gate_scale: jax.Array | None = None,
    quantize_lhs: str | None = None,
    out_scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: _Activation = None,
    residual: jax.Array | None = None,
    return_gathered: Literal[True],
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def all_gather_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    rhs_transposed: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    gate: jax.Array | None = None,
    gate_scale: jax.Array | None = None,
    quantize_lhs: str | None = None,
    out_scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: _Activation = None,
    residual: jax.Array | None = None,
    return_gathered: bool,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@overload
def all_gather_matmul(
    lhs: jax.Array,
    rhs: tuple[jax.Array, ...],
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    lhs_scale: jax.Array | None = None,
    rhs_scale: tuple[jax.Array | None, ...] | None = None,
    bias: jax.Array | tuple[jax.Array | None, ...] | None = None,
    activation: _Activation | tuple[_Activation, ...] = None,
    return_gathered: Literal[False] = False,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> tuple[jax.Array, ...]: ...


@overload
def all_gather_matmul(
    lhs: jax.Array,
    rhs: tuple[jax.Array, ...],
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    lhs_scale: jax.Array | None = None,
    rhs_scale: tuple[jax.Array | None, ...] | None = None,
    bias: jax.Array | tuple[jax.Array | None, ...] | None = None,
    activation: _Activation | tuple[_Activation, ...] = None,
    return_gathered: Literal[True],
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> tuple[tuple[jax.Array, ...], jax.Array]: ...


@overload
def all_gather_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    rhs_transposed: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    gate: jax.Array | None = None,
    gate_scale: jax.Array | None = None,
    quantize_lhs: str | None = None,
    out_scale: Literal["block"],
    bias: jax.Array | None = None,
    activation: _Activation = None,
    residual: jax.Array | None = None,
    return_gathered: Literal[False] = False,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def all_gather_matmul(
    lhs: jax.Array,
    rhs: jax.Array | tuple[jax.Array, ...],
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    rhs_transposed: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | tuple[jax.Array | None, ...] | None = None,
    gate: jax.Array | None = None,
    gate_scale: jax.Array | None = None,
    quantize_lhs: str | None = None,
    out_scale: jax.Array | str | None = None,
    bias: jax.Array | tuple[jax.Array | None, ...] | None = None,
    activation: _Activation | tuple[_Activation, ...] = None,
    residual: jax.Array | None = None,
    return_gathered: bool = False,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> Any:
    """`lax.all_gather(lhs, axis_name, axis=axis, tiled=True) @ rhs`, as one kernel on NVIDIA GPUs.

    The ranks send their rows to each other while they multiply the rows that they have. So the gathered matrix makes
    no trip through device memory, and no rank waits for all others. Call it inside `jax.shard_map`. The method is the
    all-gather + GEMM of "Eliminating Multi-GPU Performance Taxes" (arXiv 2511.02168). Here the programs that a GPU
    starts first push the rows.

    Args:
      lhs: this rank's rows, [..., M, ..., K], or its part of the contracted dimension, [..., K / world].
      rhs: this rank's columns, [K, N]. The reference also takes a vector [K]. Or a tuple of several, [K, N_i] of one
        dtype, such as those of query, key and value: one gather and one kernel then make a product by each. A kernel
        takes up to four. By default a kernel takes them on Hopper alone, where that was measured.
      axis_name: the mesh axis, or axes, over which `lhs` is sharded. (): over none, so each rank has a product of its
        own, with all that the kernel does besides. For few rows, as in a decode step, "fused" may be faster than XLA,
        which None takes.
      axis: the sharded dimension of `lhs`. The last one, which is contracted, is for activations that are sharded along
        their channels. The result then has no more rows than `lhs`.
      precision: as in `jnp.matmul`. For f32 operands on GPUs None means TF32, unless `jax_default_matmul_precision`
        says more.
      preferred_element_type: dtype of the result. Sums are always f32, those of int8 by int8 exact. With scales the
        result has the dtype of the operand that has not 8 bits, else bfloat16.
      rhs_transposed: `rhs` is [N, K]. The kernel reads it as it lies. With several rhs each of them.
      lhs_scale: by what a `lhs` of 8 bits (float8_e4m3fn, float8_e5m2, int8) is multiplied, f32, of this rank: [],
        [..., M, ..., 1] or [..., M, ..., ceil(K / 128)], as `quantize` makes them. The wire carries 8 bits. A kernel
        takes them where `rhs` has 8 bits, too, and is [N, K]; by default only one that was measured.
      rhs_scale: the same of a `rhs` of 8 bits: [], [1, N] or [ceil(K / 128), ceil(N / 128)], turned over as `rhs` is;
        `lhs` may then have 16 bits. With several rhs a tuple with one, or None, for each.
      gate: a second `rhs`, as in SwiGLU, which lies as `rhs` does. With G the gathered lhs, the result is
        `activation(G @ gate) * (G @ rhs)`. The activation applies to the gate's product only. Not with several rhs.
      gate_scale: as `rhs_scale`, of a gate of 8 bits.
      quantize_lhs: "row" or "block": `lhs` has 16 or 32 bits, and is quantised to the dtype of `rhs`, which has a
        `rhs_scale`, by rows or by 1 x 128 before it travels. A program in front of the kernel does that. Gradients are
        those of `lhs` as it was. The result has the dtype of `lhs`.
      out_scale: with a `preferred_element_type` of 8 bits: by what the result is divided before it is rounded to that,
        f32 []; or "block", which gives a pair of values and their scales, [..., ceil(N / 128)]. A program behind the
        kernel does that, to a result of 16 bits.
      bias: [N], added to `G @ rhs` before the activation, or before the gate multiplies it. With several rhs one for
        all, or a tuple with one, or None, for each.
      activation: None, "silu", "gelu_tanh", "gelu_exact", `jax.nn.silu`, or `jax.nn.gelu`, which is "gelu_tanh". With
        several rhs one for all, or a tuple with one for each.
      residual: has the result's shape, and is added last. Not with several rhs.
      return_gathered: return the gathered lhs as well. The kernel writes its bytes once more. The gradient of rhs then
        needs no second gather.
      implementation: "fused": the kernel. "xla": plain `lax`. None: the kernel, where it can run and is not known to
        be slower. Shapes and tables alone decide this, when the program is lowered, and the logger "jaxtaxfree" says
        at DEBUG level why a kernel is not taken. "simulate": the kernel, run for all ranks on the CPU; see
        `jaxtaxfree.simulator`. The gradient of `lhs` is fused with "fused" only, because XLA's is faster.
      config: names the kernel and its settings: a mapping such as `{"kernel": "hopper_few", "splits": 4}`, or the
        `Config` of a kernel. The shape decides whatever it leaves out. `VARIANTS` has the kernels; each has settings
        of its own.

    Returns: [..., world * M, ..., N], or with `return_gathered` a pair of it and the gathered lhs,
      [..., world * M, ..., K]. With several rhs a tuple of their results takes the place of the result. The gathered
      lhs is exact. Sums may be added in another order than XLA's.

    Gate, bias, activation and residual are applied in f32 to the product's f32 sums, and the result is rounded once.
    In a program that is differentiated the product is an operation of its own, so that its gradients stay fused. There
    it is rounded to the dtype of the result before they are applied.

    Raises:
      ValueError: if the operands do not fit together, the sharded dimension is 0, or the implementation, activation or
        setting does not exist.
      TypeError: if an axis or `config` has the wrong type.
      NameError: if `axis_name` is not bound.
      NotImplementedError: if implementation="fused" (or "simulate") cannot run here. The error gives all reasons.
    """
    if narrow.asked(quantize_lhs, out_scale):
        return narrow.call(
            all_gather_matmul, lhs, rhs, axis_name, quantize_lhs=quantize_lhs, out_scale=out_scale,
            operands={"lhs_scale": lhs_scale, "rhs_scale": rhs_scale, "gate": gate, "gate_scale": gate_scale}
            | {"bias": bias, "residual": residual},
            axis=axis, precision=precision, preferred_element_type=preferred_element_type,
            rhs_transposed=rhs_transposed, activation=activation, return_gathered=return_gathered,
            implementation=implementation, config=config,
        )  # fmt: skip
    axes = check_axes(axis_name, "all_gather_matmul", alone=axis_name is not None)
    check_implementation(implementation)
    if isinstance(rhs, tuple):
        several.check_epilogue(several.NAME, len(rhs), gate=gate, residual=residual, gate_scale=gate_scale)
        if lhs_scale is not None or rhs_scale is not None:
            return _several_scaled(
                lhs, rhs, axis_name, lhs_scale, rhs_scale, axis=axis, precision=precision,
                preferred_element_type=preferred_element_type, rhs_transposed=rhs_transposed, bias=bias,
                activation=activation, return_gathered=return_gathered, implementation=implementation, config=config,
            )  # fmt: skip
        return _several(
            jnp.asarray(lhs),
            tuple(map(jnp.asarray, rhs)),
            axes,
            axis,
            matmul.check_precision(precision, preferred_element_type),
            {"activation": activation, "bias": bias},
            rhs_transposed=rhs_transposed,
            return_gathered=return_gathered,
            implementation=implementation,
            config=settings_of("all_gather_matmul", VARIANTS, config),
        )
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    params: dict[str, Any] = {
        "axes": axes,
        "axis": _check_operands(lhs, rhs, axis, axes, rhs_transposed),
        **matmul.check_precision(precision, preferred_element_type),
    }
    shape = [*lhs.shape[:-1], *matmul.columns(rhs, rhs_transposed)]
    if params["axis"] < lhs.ndim - 1:
        shape[params["axis"]] *= lax.axis_size(axes)
    found, scales, operands = checks.check(
        "all_gather_matmul", lhs, rhs, shape, activation, rhs_transposed=rhs_transposed,
        scales={"lhs_scale": lhs_scale, "rhs_scale": rhs_scale, "gate_scale": gate_scale},
        gate=gate, bias=bias, residual=residual,
    )  # fmt: skip
    settings = settings_of("all_gather_matmul", VARIANTS, config)
    if found["scaling"].of("lhs") != "none":
        lhs, found["scaling"], scales = _gather_scales(lhs, found["scaling"], scales, axes, params["axis"])
    params |= found
    how = {"implementation": implementation, "config": settings}
    return _call(lhs, rhs, *scales, *operands, return_gathered=return_gathered, **how, **params)


def _call(
    lhs: jax.Array,
    rhs: jax.Array,
    *operands: jax.Array,
    implementation: str | None,
    config: Any,
    return_gathered: bool,
    **params: Any,
) -> Any:
    """The operation of checked operands, by the primitive that has what it needs, or by the reference."""
    reasons = PRODUCT.unsupported(lhs, rhs, *operands, **params)
    if takes_reference("all_gather_matmul", [lhs, rhs], implementation, reasons):
        return reference(lhs, rhs, *operands, return_gathered=return_gathered, **params)
    how = {"implementation": implementation, "config": config}
    if params["epilogue"] or params["scaling"]:
        result = matmul.bind(with_epilogue_p, lhs, rhs, *operands, return_gathered=return_gathered, **how, **params)
        return tuple(result) if return_gathered else result[0]
    del params["epilogue"], params["scaling"]
    result = matmul.bind(gathered_too_p if return_gathered else all_gather_matmul_p, lhs, rhs, **how, **params)
    return tuple(result) if return_gathered else result


def _several(
    lhs: jax.Array,
    rhs: tuple[jax.Array, ...],
    axes: tuple[str, ...],
    axis: int,
    precision: dict[str, Any],
    epilogue: dict[str, Any],
    rhs_transposed: bool,
    **others: Any,
) -> Any:
    """The operation with a tuple of rhs. The kernels know no tuple of one: that is the product by the one."""
    found, biases = several.check(lhs, rhs, rhs_transposed=rhs_transposed, **epilogue)
    (axis,) = {_check_operands(lhs, each, axis, axes, rhs_transposed) for each in rhs}
    others |= {"rhs_transposed": rhs_transposed}
    if len(rhs) > 1:
        return several.call(lhs, rhs, biases, axes=axes, axis=axis, epilogue=found, **precision, **others)
    others |= {"config": dict(others["config"]), "activation": found[0].activation}
    out = all_gather_matmul(lhs, rhs[0], axes, axis=axis, bias=biases[0] if biases else None, **precision, **others)
    return ((out[0],), out[1]) if others["return_gathered"] else (out,)


def _several_scaled(
    lhs: jax.Array,
    rhs: tuple[jax.Array, ...],
    axis_name: Any,
    lhs_scale: Any,
    rhs_scale: Any,
    *,
    bias: Any,
    activation: Any,
    return_gathered: bool,
    **others: Any,
) -> Any:
    """The operation with a tuple of rhs and scales, one product after the other; XLA gathers once."""
    named = {"rhs_scale": rhs_scale, "bias": bias, "activation": activation}
    each = [several.for_each(several.NAME, name, value, len(rhs)) for name, value in named.items()]
    if rhs_scale is not None and not isinstance(rhs_scale, tuple):
        raise ValueError("all_gather_matmul takes rhs_scale as a tuple where rhs is one.")
    # The gathered lhs is a result of the first product alone, because a kernel writes it once more.
    outs = [
        all_gather_matmul(
            lhs, weights, axis_name, lhs_scale=lhs_scale, rhs_scale=scale, bias=own, activation=function,
            return_gathered=return_gathered and i == 0, **others,
        )
        for i, (weights, scale, own, function) in enumerate(zip(rhs, *each, strict=True))
    ]  # fmt: skip
    if not return_gathered:
        return tuple(outs)
    first, gathered = outs[0]
    return (first, *outs[1:]), gathered


def reference(
    lhs: jax.Array,
    rhs: jax.Array,
    *operands: jax.Array,
    axes: tuple[str, ...],
    axis: int,
    precision: Any,
    preferred_element_type: Any,
    epilogue: Epilogue = NONE,
    rhs_transposed: bool = False,
    return_gathered: bool = False,
    scaling: Scaling = UNSCALED,
    config: Any = None,
) -> Any:
    """What the operation means, in plain `lax`; `operands` are the scales, and those of the epilogue."""
    del config
    scales, operands = scaling.split(operands)
    if rhs_transposed:
        rhs = rhs.T
        operands = tuple(x.T if name == "gate" else x for name, x in zip(epilogue.operands, operands))
    if scaling:
        return _scaled_reference(
            lhs, rhs, operands, scales, axes, axis, precision, preferred_element_type, epilogue, return_gathered
        )
    gathered = lax.all_gather(lhs, axes, axis=axis, tiled=True)
    multiply = functools.partial(jnp.matmul, gathered, precision=precision)
    if epilogue:
        dtype = preferred_element_type or jnp.result_type(lhs, rhs)
        weights, others = epilogue.split(rhs, operands)
        wide = epilogues.wide_type(dtype)
        out = epilogue.apply([multiply(w, preferred_element_type=wide) for w in weights.values()], others, dtype)
    else:
        out = multiply(rhs, preferred_element_type=preferred_element_type)
    return (out, gathered) if return_gathered else out


def _gather_scales(
    lhs: jax.Array, scaling: Scaling, scales: list[jax.Array], axes: tuple[str, ...], axis: int
) -> tuple[jax.Array, Scaling, list[jax.Array]]:
    """The operands with the scales of all rows, which are few bytes, in place of those of this rank's rows.

    Where ranks have columns, each with scales of its own, these are applied before the gather.
    """
    if not axes:
        return lhs, scaling, scales
    own, *others = scales
    if axis == lhs.ndim - 1:
        return dequantize(lhs, own), Scaling(scaling.kinds[1:]), others
    kinds = (("lhs", "row" if scaling.of("lhs") == "tensor" else scaling.of("lhs")), *scaling.kinds[1:])
    return lhs, Scaling(kinds), [all_gather(scaled.of_rows(lhs, own), axes, axis=axis, tiled=True), *others]


def _scaled_reference(
    lhs: jax.Array,
    rhs: jax.Array,
    operands: Sequence[jax.Array],
    scales: Mapping[str, jax.Array],
    axes: tuple[str, ...],
    axis: int,
    precision: Any,
    preferred_element_type: Any,
    epilogue: Epilogue,
    return_gathered: bool,
) -> Any:
    dtype = scaled.result_dtype(lhs, rhs, preferred_element_type)
    gathered = lax.all_gather(lhs, axes, axis=axis, tiled=True)
    weights, others = epilogue.split(rhs, operands)
    products = [
        scaled.Scaled(gathered, each, scales.get("lhs"), scales.get(name)).matmul(precision)
        for name, each in weights.items()
    ]
    out = epilogue.apply(products, others, dtype)
    return (out, gathered) if return_gathered else out


def _check_operands(lhs: jax.Array, rhs: jax.Array, axis: int, axes: tuple[str, ...], rhs_transposed: bool) -> int:
    """The sharded dimension of `lhs`, from 0 on; raises ValueError if the operands do not fit."""
    matmul.check_operands("all_gather_matmul", lhs, rhs)
    axis = check_whole("all_gather_matmul", "axis", axis)
    if not -lhs.ndim <= axis < lhs.ndim:
        raise ValueError(f"all_gather_matmul cannot gather axis {axis} of lhs, which has shape {lhs.shape}.")
    axis %= lhs.ndim
    if not lhs.shape[axis]:
        raise ValueError(f"all_gather_matmul cannot gather axis {axis} of lhs {list(lhs.shape)}, which is 0.")
    parts = lax.axis_size(axes) if axis == lhs.ndim - 1 else 1
    matmul.check_contraction("all_gather_matmul", lhs, rhs, parts, rhs_transposed)
    return axis


PRODUCT = product.Product(
    name="all_gather_matmul",
    variants=VARIANTS,
    reference=reference,
    moved="axis",
    gathers=True,
    alone="gather",
    # Of gradients, that of an MLP of 4096 rows was measured.
    slower_transposed=lambda rows: matmul.UNMEASURED if rows < 2048 else None,
)
case = PRODUCT.case
all_gather_matmul_p = PRODUCT.bilinear()
# With the gathered lhs as a second result.
gathered_too_p = PRODUCT.collective(return_gathered=True)
# With an epilogue; a list of the result and, with `return_gathered`, the gathered lhs.
with_epilogue_p = PRODUCT.collective()
