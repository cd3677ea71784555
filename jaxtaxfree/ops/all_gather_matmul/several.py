"""`all_gather_matmul` with several right-hand sides: one gather, one kernel, a product by each."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtaxfree.ops import epilogue as epilogues
from jaxtaxfree.ops import matmul, product
from jaxtaxfree.ops.all_gather_matmul.variants import VARIANTS
from jaxtaxfree.ops.epilogue import NONE, Epilogue
from jaxtaxfree.ops.variant import choose
from jaxtaxfree.primitive import Labels, Unsupported, collective, takes_reference

NAME = "all_gather_matmul"


def check(
    lhs: jax.Array, rhs: Sequence[jax.Array], activation: Any, bias: Any, rhs_transposed: bool = False
) -> tuple[tuple[Epilogue, ...], list[jax.Array]]:
    """The epilogue of each product, and the biases that there are.

    Args:
      activation, bias: one for all, or a tuple of one for each; None in it is none.

    Raises:
      ValueError: if a tuple has another length, or something does not fit.
    """
    if len(dtypes := {str(each.dtype) for each in rhs}) > 1:
        raise ValueError(f"{NAME} takes several rhs of one dtype, not {', '.join(sorted(dtypes))}: cast them.")
    found, biases = [], []
    pairs = zip(
        *(for_each(NAME, *each, len(rhs)) for each in (("activation", activation), ("bias", bias))), strict=True
    )
    for each, (function, own) in zip(rhs, pairs, strict=True):
        epilogue, operands = epilogues.check(NAME, lhs, each, matmul.columns(each, rhs_transposed), function, bias=own)
        found.append(epilogue)
        biases += operands
    return tuple(found), biases


def check_epilogue(operation: str, count: int, **others: Any) -> None:
    """Raises ValueError if there are no rhs, or operands of an epilogue that a tuple of them does not take."""
    if not count:
        raise ValueError(f"{operation} takes as rhs an array or a tuple of them, not an empty tuple.")
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{operation} takes no {name} with a tuple of rhs: call it once more for the rhs that has it."
            )


def for_each(operation: str, name: str, value: Any, count: int) -> tuple[Any, ...]:
    """A keyword that is one for all rhs or a tuple of as many."""
    if not isinstance(value, tuple):
        return (value,) * count
    if len(value) != count:
        raise ValueError(
            f"{operation} takes one {name} for all {count} rhs or a tuple of {count}, not of {len(value)}."
        )
    return value


def call(
    lhs: jax.Array,
    rhs: Sequence[jax.Array],
    biases: Sequence[jax.Array],
    *,
    epilogue: tuple[Epilogue, ...],
    implementation: str | None,
    return_gathered: bool,
    **params: Any,
) -> Any:
    """A tuple of the products, and with `return_gathered` a pair of it and the gathered lhs."""
    params |= {"epilogue": epilogue, "return_gathered": return_gathered}
    reasons = _unsupported(lhs, *rhs, *biases, **params)
    if takes_reference(NAME, [lhs, *rhs], implementation, reasons):
        found = reference(lhs, *rhs, *biases, **params)
    else:
        found = matmul.bind(several_p, lhs, *rhs, *biases, implementation=implementation, **params)
    return (tuple(found[: len(rhs)]), found[len(rhs)]) if return_gathered else tuple(found)


def split(
    operands: Sequence[Any], epilogue: tuple[Epilogue, ...]
) -> tuple[list[Any], list[dict[str, Any]], dict[str, Any]]:
    """Of the operands behind lhs: the rhs, of each the operands of its epilogue by name, and a kernel's bundle."""
    rhs, left = list(operands[: len(epilogue)]), iter(operands[len(epilogue) :])
    others = [{name: next(left) for name in each.operands} for each in epilogue]
    return rhs, others, {f"{name}{i}": x for i, each in enumerate(others) for name, x in each.items()}


def reference(
    lhs: jax.Array,
    *operands: jax.Array,
    axes: tuple[str, ...],
    axis: int,
    precision: Any,
    preferred_element_type: Any,
    epilogue: tuple[Epilogue, ...],
    return_gathered: bool = False,
    rhs_transposed: bool = False,
    config: Any = None,
) -> list[jax.Array]:
    """One gather, and a product by each rhs, in plain `lax`; the gathered lhs comes last, if it is returned."""
    del config
    gathered = lax.all_gather(lhs, axes, axis=axis, tiled=True)
    rhs, others, _ = split(operands, epilogue)
    outs = []
    for weights, each, own in zip(rhs, epilogue, others, strict=True):
        dtype = preferred_element_type or jnp.result_type(lhs, weights)
        wide = epilogues.wide_type(dtype) if each else preferred_element_type
        weights = weights.T if rhs_transposed else weights
        out = jnp.matmul(gathered, weights, precision=precision, preferred_element_type=wide)
        outs.append(each.apply([out], own, dtype) if each else out)
    return [*outs, gathered] if return_gathered else outs


PRODUCT = product.Product(name=NAME, variants=VARIANTS, reference=reference, moved="axis", gathers=True, alone="gather")


def fused(
    lhs: jax.Array,
    *operands: jax.Array,
    axes: tuple[str, ...],
    axis: int,
    precision: Any,
    preferred_element_type: Any,
    epilogue: tuple[Epilogue, ...],
    compute_capability: int,
    config: tuple[tuple[str, Any], ...] | None,
    return_gathered: bool = False,
    rhs_transposed: bool = False,
    implementation: str | None = None,
) -> list[jax.Array]:
    """The products by one kernel."""
    form: dict[str, Any] = {"precision": precision, "preferred_element_type": preferred_element_type}
    form |= {"epilogue": epilogue}
    if reasons := _unsupported(lhs, *operands, axes=axes, axis=axis, **form):
        raise Unsupported(NAME, reasons)
    form |= {"return_gathered": return_gathered, "rhs_transposed": rhs_transposed}
    form |= {"compute_capability": compute_capability}
    call = _call(lhs, *operands, axes=axes, axis=axis, **form)
    dimension = 0 if call.along_columns else axis
    rows, lengths = matmul.rows_first(lhs, dimension)
    rhs, _, biases = split(operands, epilogue)
    weights = dict(zip(call.weights, rhs, strict=True))
    outs = PRODUCT.launch(call, rows, weights, biases, axes=axes, config=config, implementation=implementation)
    return [matmul.rows_back(out, lengths, dimension) for out in outs]


def _unsupported(
    lhs: Any, *operands: Any, precision: Any, preferred_element_type: Any, epilogue: tuple[Epilogue, ...], **_: Any
) -> list[str]:
    """All reasons for which no kernel can take these operands."""
    rhs, others, _ = split(operands, epilogue)
    reasons = []
    for weights, each, own in zip(rhs, epilogue, others, strict=True):
        reasons += matmul.unsupported(lhs, weights, precision=precision, preferred_element_type=preferred_element_type)
        reasons += epilogues.unsupported(each, list(own.values()))
    return list(dict.fromkeys(reasons))


def _call(
    lhs: Any, *operands: Any, axes: tuple[str, ...], axis: int, epilogue: tuple[Epilogue, ...], rhs_transposed: bool,
    **form: Any,
) -> product.Call:  # fmt: skip
    """The call with these operands (arrays or their types)."""
    rhs, _, _ = split(operands, epilogue)
    k = rhs[0].shape[1 if rhs_transposed else 0]
    widths = tuple(n for each in rhs for n in matmul.columns(each, rhs_transposed))
    return PRODUCT.call(
        lhs,
        jax.ShapeDtypeStruct((sum(widths), k) if rhs_transposed else (k, sum(widths)), rhs[0].dtype),
        rhs_transposed=rhs_transposed,
        world=lax.axis_size(axes),
        epilogue=epilogues.joined(epilogue),
        along_columns=axis == lhs.ndim - 1,
        widths=widths,
        **form,
    )


def _slower(
    lhs: Any,
    *operands: Any,
    axes: tuple[str, ...],
    axis: int,
    precision: Any,
    preferred_element_type: Any,
    epilogue: tuple[Epilogue, ...],
    **params: Any,
) -> str | None:
    """Why XLA is taken, if it is.

    On 2 H100, q, k and v of Llama 3 70B took 34 us where XLA took 45 (16 rows), and 306 where it took 370 (2048 rows).
    Other numbers of rows go by what is known of one rhs of as many columns.
    """
    world = lax.axis_size(axes)
    if world == 1:
        return "there is one rank, so nothing to gather"
    form = {"precision": precision, "preferred_element_type": preferred_element_type}
    rows = math.prod(lhs.shape[:-1]) * (1 if axis == lhs.ndim - 1 else world)
    reasons = (matmul.slower(lhs, each, rows, **form) for each in operands[: len(epilogue)])
    if why := next(filter(None, reasons), None):
        return why
    call = _call(lhs, *operands, axes=axes, axis=axis, epilogue=epilogue, **form, **params)
    chosen = choose(NAME, VARIANTS, call, {})
    if not chosen.variant.name.startswith("hopper"):
        return matmul.UNMEASURED
    return chosen.variant.slower(call, chosen.config)


def _dimensions(
    lhs: Any,
    *operands: Any,
    axis: int,
    epilogue: tuple[Epilogue, ...],
    return_gathered: bool = False,
    rhs_transposed: bool = False,
    **_: Any,
) -> tuple[Labels, Labels]:
    del operands
    rows = [None if i == axis else f"row {i}" for i in range(len(lhs.shape) - 1)]
    columns = [f"column {i}" for i in range(len(epilogue))]
    biases = [[column] for column, each in zip(columns, epilogue, strict=True) for _ in each.operands]
    outs = [[*rows, column] for column in columns]
    weights = [[column, None] if rhs_transposed else [None, column] for column in columns]
    ins = [[*rows, None], *weights, *biases]
    return ins, [*outs, [*rows, None]] if return_gathered else outs


def _batch(
    call: Callable[..., Any], operands: Sequence[jax.Array], dims: Sequence[int | None], size: int, **params: Any
) -> Any:
    """A `jaxtaxfree.primitive.Batch`: the rows of all examples make one product by each rhs."""
    del size
    if dims[0] is None or any(dim is not None for dim in dims[1:]):
        return "jax.vmap maps over rhs or bias, and the kernel takes lhs alone"
    rows, *rest = operands
    # With `spmd_axis_name` what is mapped varies along one axis more.
    batched = matmul.vary_alike(jnp.moveaxis(rows, dims[0], 0), *rest, axes=params["axes"])
    return call(*batched, axis=params["axis"] + 1)


# lhs, the rhs, and the biases that there are; a list of the products and, with `return_gathered`, the gathered lhs.
several_p = collective(NAME, reference=reference, fused=fused, slower=_slower, dimensions=_dimensions, batch=_batch)


def linear(lhs: jax.Array, *rhs: jax.Array, **params: Any) -> list[jax.Array]:
    """The products alone, and whatever else the operation gives."""
    return matmul.bind(several_p, lhs, *rhs, **params | {"epilogue": (NONE,) * len(rhs)})
