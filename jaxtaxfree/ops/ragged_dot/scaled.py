"""`ragged_dot` of operands of 8 bits, whose scales are applied to sums."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtaxfree.ops import epilogue as epilogues
from jaxtaxfree.ops import matmul, scaled
from jaxtaxfree.ops.epilogue import Epilogue
from jaxtaxfree.ops.operand import Operand, Scales
from jaxtaxfree.ops.quantize import DTYPES, dequantize, expand, is_eight_bits
from jaxtaxfree.ops.ragged_dot.common import BLOCKS, Call, check_operands
from jaxtaxfree.ops.ragged_dot.hopper import Hopper
from jaxtaxfree.ops.ragged_dot.variants import VARIANTS
from jaxtaxfree.ops.untrusted import as_int32
from jaxtaxfree.ops.variant import KERNEL, Choice, choose, settings_of
from jaxtaxfree.primitive import DTYPES as RESULTS
from jaxtaxfree.primitive import Unsupported, check_implementation, collective, needs_devices, symbolic
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.target import target_of


def define(operation: Callable[..., jax.Array]) -> Any:
    """The primitive of the kernel for 8 bits; without it the product is `operation`, `jaxtaxfree.ragged_dot`, of 16."""
    given = {"operation": operation}
    primitive = collective(
        "ragged_dot_scaled",
        reference=functools.partial(_reference, **given),
        fused=functools.partial(_fused, **given),
        slower=_slower,
    )
    needs_devices(primitive)
    return primitive


def ragged_dot(
    primitive: Any,
    operation: Callable[..., jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *,
    scales: Mapping[str, Any],
    gate: jax.Array | None,
    activation: Any,
    preferred_element_type: Any,
    rhs_transposed: bool,
    implementation: str | None,
    config: Any,
    **form: Any,
) -> jax.Array:
    """The product of what the scales make of the operands.

    Args:
      primitive, operation: see `define`.
      scales: of "lhs", "rhs" and "gate"; None for one that there is not.
      **form: other keywords.

    Raises:
      ValueError: if an operand or a scale does not fit.
    """
    lhs, rhs, sizes = jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(sizes)
    check_implementation(implementation)
    check_operands(lhs, rhs, sizes, rhs_transposed)
    if gate is not None and jnp.shape(gate) != rhs.shape:
        raise ValueError(f"ragged_dot takes a gate like rhs, {list(rhs.shape)}, not {list(jnp.shape(gate))}.")
    weights = {"rhs": rhs} if gate is None else {"rhs": rhs, "gate": jnp.asarray(gate)}
    given = {"lhs": lhs, **weights}
    found = {name: _check(name, given.get(name), scale, rhs_transposed) for name, scale in scales.items()}
    found = {name: scale for name, scale in found.items() if scale is not None}
    params: dict[str, Any] = {
        "axes": (),
        "names": (*weights, *found),
        "activation": epilogues.activation_name("ragged_dot", activation),
        "dtype": scaled.result_dtype(lhs, rhs, preferred_element_type),
        "rhs_transposed": bool(rhs_transposed),
        **form,
    }
    operands = (lhs, sizes, *weights.values(), *found.values())
    settings = settings_of("ragged_dot", VARIANTS, config)
    if implementation == "xla" or not _may_fit(lhs, list(weights.values()), sizes, params):
        how = {"operation": operation, "implementation": implementation, "config": dict(settings)}
        return _cast(*operands, **how, **params)
    operands = matmul.vary_alike(*operands, axes=())
    return primitive.bind(*operands, implementation=implementation, config=settings, **params)[0]


def _cast(
    lhs: jax.Array,
    sizes: jax.Array,
    *operands: jax.Array,
    names: Sequence[str],
    activation: str | None,
    dtype: np.dtype,
    operation: Callable[..., jax.Array],
    axes: tuple[str, ...] = (),
    **form: Any,
) -> jax.Array:
    """By the kernel for 16 bits, in which numbers of 8 are exact. Its f32 sums are scaled behind it.

    Scales of blocks are applied to the operands, which are then multiplied as f32.
    """
    del axes
    weights, scales = _named(names, operands)
    given = {"lhs": lhs, **weights}
    transposed = form["rhs_transposed"]
    by_blocks = [name for name, scale in scales.items() if _of_blocks(name, given[name], scale, transposed)]
    if by_blocks and form["implementation"] in ("fused", "simulate") and _names_hopper(form["config"]):
        why = "scales of blocks: it takes all operands of 8 bits, rhs as [G, N, K] with rhs_transposed=True"
        raise Unsupported(f"ragged_dot ({Hopper.name!r})", [why])
    for name in by_blocks:
        given[name], scales[name] = _apply(name, given[name], scales[name], transposed)
    # Each row's group. Rows behind the last one have none, and no scales.
    group = jnp.repeat(jnp.arange(sizes.shape[0]), jnp.maximum(sizes, 0), total_repeat_length=lhs.shape[0])
    there = jnp.arange(lhs.shape[0])[:, None] < jnp.sum(sizes)
    products = []
    for name in weights:
        wide = np.dtype(np.float32) if by_blocks else _wide(lhs, weights[name])
        left, right = (x.astype(wide) if by_blocks or is_eight_bits(x) else x for x in (given["lhs"], given[name]))
        out = operation(left, right, sizes, preferred_element_type=jnp.float32, **form)
        for scale in (scales.get("lhs"), scales.get(name)):
            if scale is not None:
                scale = scale if scale.ndim < 3 else scale.reshape(scale.shape[0], -1)[group]
                out *= jnp.where(there, scale, 1.0)
        products.append(out)
    return Epilogue(activation, ("gate",) * (len(weights) - 1)).apply(products, {}, dtype)


def _apply(name: str, x: jax.Array, scale: jax.Array, transposed: bool) -> tuple[jax.Array, jax.Array]:
    """What scales of blocks make of an operand, f32, and what is left for the sums: 1, or NaN where a scale is none.

    `lax.ragged_dot` multiplies every row by the weights of every group, of which it needs some, so that a NaN among
    the operands would reach all.
    """
    along = -1 if name == "lhs" or transposed else 1
    rest = 1.0 + 0.0 * jnp.sum(scale, axis=along, keepdims=True)
    return dequantize(x, jnp.where(jnp.isfinite(scale), scale, 0.0)), expand(rest, _shapes(name, x, transposed)["row"])


def _named(names: Sequence[str], operands: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights and the scales: operands whose names are those of the weights, and then of what has scales."""
    count = 2 if "gate" in names[1:2] else 1
    return dict(zip(names[:count], operands)), dict(zip(names[count:], operands[count:], strict=True))


def _may_fit(lhs: jax.Array, weights: Sequence[jax.Array], sizes: jax.Array, params: Mapping[str, Any]) -> bool:
    """Whether a kernel for 8 bits may take operands, on some GPU."""
    return (
        params["rhs_transposed"]
        and all(is_eight_bits(w) and w.dtype == weights[0].dtype for w in weights)
        and params["dtype"].name in RESULTS
        and not symbolic(lhs, *weights, sizes)
        and all(x.size for x in (lhs, *weights))
    )


def _choose(operands: Sequence[Any], compute_capability: int, config: Any, params: Mapping[str, Any]) -> Choice:
    lhs, _, *others = operands
    weights, scales = _named(params["names"], others)
    groups, n, k = weights["rhs"].shape
    call = Call(
        m=lhs.shape[0],
        k=k,
        n=n,
        groups=groups,
        operand=Operand(dtype=np.dtype(lhs.dtype)),
        narrow=Operand(dtype=np.dtype(weights["rhs"].dtype), transposed=True),
        scales=tuple(_kernel_names(lhs, weights, scales).values()),
        out_dtype=params["dtype"],
        precision="",
        activation=params["activation"],
        gated="gate" in weights,
        rhs_transposed=True,
        fill=params["fill"],
        target=target_of(compute_capability),
    )
    return choose("ragged_dot", VARIANTS, call, dict(config))


def _fused(
    *operands: jax.Array, operation: Any, config: Any, compute_capability: int, implementation: str | None = None,
    **params: Any,
) -> list[jax.Array]:  # fmt: skip
    """By the kernel for 8 bits, or where it refuses by the one for 16; of scales of blocks by one for f32."""
    lhs, sizes, *others = operands
    weights, scales = _named(params["names"], others)
    names = _kernel_names(lhs, weights, scales)
    try:
        chosen = _choose(operands, compute_capability, config, params)
    except Unsupported:
        if _names_hopper(config) and any(name.endswith(BLOCKS) for name in names.values()):
            raise  # the caller has no f32, which this kernel would refuse next
        how = {"operation": operation, "implementation": implementation or "fused", "config": dict(config)}
        return [_cast(*operands, **how, **params)]
    scales = {names[name]: _of_kernel(names[name], scale, chosen.call) for name, scale in scales.items()}
    arrays = chosen.arrays(lhs, weights, as_int32(sizes), scales)
    return [shmem_call(chosen.variant.kernel, *arrays, implementation=implementation, **chosen.keywords)]


def _kernel_names(lhs: Any, weights: Mapping[str, Any], scales: Mapping[str, Any]) -> dict[str, str]:
    """What the kernel calls the scales, whose weights are [G, N, K]."""
    given = {"lhs": lhs, **weights}
    return {name: name + BLOCKS * _of_blocks(name, given[name], scale, True) for name, scale in scales.items()}


def _of_kernel(name: str, scale: jax.Array, call: Call) -> jax.Array:
    """[M] of lhs, [G, N] of weights; those of blocks as they are."""
    if name.endswith(BLOCKS):
        return scale
    if name == "lhs":
        return jnp.broadcast_to(scale.reshape(-1), call.m)
    return jnp.broadcast_to(scale.reshape((call.groups, call.n) if scale.ndim else ()), (call.groups, call.n))


def _slower(*operands: Any, compute_capability: int, config: Any, **params: Any) -> str | None:
    """Why operands are cast: no kernel for 8 bits takes the call, or the one that would has not been measured."""
    try:
        chosen = _choose(operands, compute_capability, config, params)
    except Unsupported as error:
        return "; ".join(error.reasons)
    return chosen.variant.slower(chosen.call, chosen.config)


def _reference(*operands: jax.Array, config: Any = None, **params: Any) -> list[jax.Array]:
    del config  # is of another kernel
    return [_cast(*operands, implementation=None, config=None, **params)]


def _names_hopper(config: Any) -> bool:
    return dict(config or {}).get(KERNEL) == Hopper.name


def _wide(lhs: jax.Array, rhs: jax.Array) -> np.dtype:
    """In which both are multiplied: that of the one that has not 8 bits."""
    return next((x.dtype for x in (lhs, rhs) if not is_eight_bits(x)), jnp.dtype(jnp.bfloat16))


def _check(name: str, x: jax.Array | None, scale: Any, transposed: bool) -> jax.Array | None:
    if scale is None:
        return None
    scale = jnp.asarray(scale)
    if x is None or not is_eight_bits(x):
        raise ValueError(
            f"ragged_dot takes {name}_scale for a {name} of {', '.join(DTYPES)}, and there is "
            f"{'none' if x is None else x.dtype}."
        )
    if scale.dtype != np.float32:
        raise ValueError(f"ragged_dot takes {name}_scale as float32, not {scale.dtype}.")
    whole, row, blocks = map(list, _shapes(name, x, transposed).values())
    if list(scale.shape) not in (whole, row, blocks):
        raise ValueError(
            f"ragged_dot takes {name}_scale of shape {whole}, {row} or {blocks} here, not {list(scale.shape)}."
        )
    return scale


def _shapes(name: str, x: jax.Array, transposed: bool) -> dict[Scales, tuple[int, ...]]:
    """Those that its scale may have."""
    k = x.shape[-1 if name == "lhs" or transposed else -2]
    return scaled.shapes_of(x, k, of_lhs=name == "lhs", transposed=transposed)


def _of_blocks(name: str, x: jax.Array, scale: jax.Array, transposed: bool) -> bool:
    return scale.ndim > 0 and scale.shape != _shapes(name, x, transposed)["row"]
