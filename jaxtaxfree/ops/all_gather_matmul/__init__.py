"""`all_gather_matmul`: the column-parallel half of a tensor-parallel layer."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxtaxfree.dispatch import Case
from jaxtaxfree.ops import epilogue as epilogues
from jaxtaxfree.ops import matmul, product
from jaxtaxfree.ops.all_gather_matmul.few import Few
from jaxtaxfree.ops.all_gather_matmul.hopper import Hopper
from jaxtaxfree.ops.all_gather_matmul.hopper_few import HopperFew
from jaxtaxfree.ops.all_gather_matmul.portable import Portable
from jaxtaxfree.ops.epilogue import NONE, Epilogue
from jaxtaxfree.ops.variant import Variant, settings_of
from jaxtaxfree.primitive import Unsupported, bilinear, check_implementation, check_whole, collective, takes_reference
from jaxtaxfree.settings import Settings
from jaxtaxfree.teams import Team, check_axes

# The kernels. The cheapest one that does not refuse a call takes it.
VARIANTS: tuple[Variant[product.Call], ...] = (Hopper(), HopperFew(), Few(), Portable())


@overload
def all_gather_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    gate: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: str | Callable[..., jax.Array] | None = None,
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
    gate: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: str | Callable[..., jax.Array] | None = None,
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
    gate: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: str | Callable[..., jax.Array] | None = None,
    residual: jax.Array | None = None,
    return_gathered: bool,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def all_gather_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    gate: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: str | Callable[..., jax.Array] | None = None,
    residual: jax.Array | None = None,
    return_gathered: bool = False,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`lax.all_gather(lhs, axis_name, axis=axis, tiled=True) @ rhs`, as one kernel on NVIDIA GPUs.

    The ranks send their rows to each other while they multiply the rows that they have. So the gathered matrix makes
    no trip through device memory, and no rank waits for all others. Call it inside `jax.shard_map`. The method is the
    all-gather + GEMM of "Eliminating Multi-GPU Performance Taxes" (arXiv 2511.02168). Here the programs that a GPU
    starts first push the rows.

    Args:
      lhs: this rank's rows, [..., M, ..., K], or its part of the contracted dimension, [..., K / world].
      rhs: this rank's columns, [K, N]. The reference also takes a vector [K].
      axis_name: the mesh axis, or axes, over which `lhs` is sharded.
      axis: the sharded dimension of `lhs`. The last one, which is contracted, is for activations that are sharded along
        their channels. The result then has no more rows than `lhs`.
      precision: as in `jnp.matmul`. For f32 operands on GPUs None means TF32, unless `jax_default_matmul_precision`
        says more.
      preferred_element_type: dtype of the result. Sums are always f32.
      gate: [K, N], a second `rhs`, as in SwiGLU. With G the gathered lhs, the result is
        `activation(G @ gate) * (G @ rhs)`. The activation applies to the gate's product only.
      bias: [N], added to `G @ rhs` before the activation, or before the gate multiplies it.
      activation: None, "silu", "gelu_tanh", "gelu_exact", `jax.nn.silu`, or `jax.nn.gelu`, which is "gelu_tanh".
      residual: has the result's shape, and is added last.
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
      [..., world * M, ..., K]. The gathered lhs is exact. Sums may be added in another order than XLA's.

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
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    axes = check_axes(axis_name, "all_gather_matmul")
    check_implementation(implementation)
    params: dict[str, Any] = {
        "axes": axes,
        "axis": _check_operands(lhs, rhs, axis, axes),
        **matmul.check_precision(precision, preferred_element_type),
    }
    shape = [*lhs.shape[:-1], *rhs.shape[-1:]]
    if params["axis"] < lhs.ndim - 1:
        shape[params["axis"]] *= lax.axis_size(axes)
    epilogue, operands = epilogues.check(
        "all_gather_matmul", lhs, rhs, shape, activation, gate=gate, bias=bias, residual=residual
    )
    settings = settings_of("all_gather_matmul", VARIANTS, config)
    reasons = _unsupported(lhs, rhs, *operands, epilogue=epilogue, **params)
    if takes_reference("all_gather_matmul", [lhs, rhs], implementation, reasons):
        return reference(lhs, rhs, *operands, epilogue=epilogue, return_gathered=return_gathered, **params)
    params |= {"rhs_transposed": False, "implementation": implementation, "config": settings}
    if epilogue:
        result = matmul.bind(
            with_epilogue_p, lhs, rhs, *operands, epilogue=epilogue, return_gathered=return_gathered, **params
        )
        return tuple(result) if return_gathered else result[0]
    primitive = gathered_too_p if return_gathered else all_gather_matmul_p
    result = matmul.bind(primitive, lhs, rhs, **params)
    return tuple(result) if return_gathered else result


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
    config: Any = None,
) -> Any:
    """What the operation means, in plain `lax`; `operands` are those of the epilogue."""
    del config
    rhs = rhs.T if rhs_transposed else rhs
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


def fused(
    lhs: jax.Array,
    rhs: jax.Array,
    *operands: jax.Array,
    axes: tuple[str, ...],
    axis: int,
    precision: Any,
    preferred_element_type: Any,
    config: tuple[tuple[str, Any], ...] | None,
    compute_capability: int,
    epilogue: Epilogue = NONE,
    rhs_transposed: bool = False,
    return_gathered: bool = False,
    implementation: str | None = None,
) -> Any:
    """The operation by one kernel."""
    if reasons := _unsupported(
        lhs,
        rhs,
        *operands,
        axes=axes,
        axis=axis,
        precision=precision,
        preferred_element_type=preferred_element_type,
        epilogue=epilogue,
    ):
        raise Unsupported("all_gather_matmul", reasons)
    world = lax.axis_size(axes)
    along_columns = axis == lhs.ndim - 1
    dimension = 0 if along_columns else axis
    rows, lengths = matmul.rows_first(lhs, dimension)
    call = product.call_of(
        "all_gather_matmul",
        rows,
        rhs,
        *operands,
        rows=rows.shape[0] if along_columns else world * rows.shape[0],
        world=world,
        compute_capability=compute_capability,
        precision=precision,
        preferred_element_type=preferred_element_type,
        epilogue=epilogue,
        rhs_transposed=rhs_transposed,
        return_gathered=return_gathered,
        along_columns=along_columns,
    )
    weights, others = epilogue.split(rhs, epilogue.rows_first(operands, dimension))
    outs = product.run(VARIANTS, call, rows, weights, others, axes=axes, config=config, implementation=implementation)
    return jax.tree.map(lambda out: matmul.rows_back(out, lengths, dimension), outs)


def _check_operands(lhs: jax.Array, rhs: jax.Array, axis: int, axes: tuple[str, ...]) -> int:
    """The sharded dimension of `lhs`, from 0 on; raises ValueError if the operands do not fit."""
    matmul.check_operands("all_gather_matmul", lhs, rhs)
    axis = check_whole("all_gather_matmul", "axis", axis)
    if not -lhs.ndim <= axis < lhs.ndim:
        raise ValueError(f"all_gather_matmul cannot gather axis {axis} of lhs, which has shape {lhs.shape}.")
    axis %= lhs.ndim
    if not lhs.shape[axis]:
        raise ValueError(f"all_gather_matmul cannot gather axis {axis} of lhs {list(lhs.shape)}, which is 0.")
    parts = lax.axis_size(axes) if axis == lhs.ndim - 1 else 1
    matmul.check_contraction("all_gather_matmul", lhs, rhs, parts)
    return axis


def _unsupported(
    lhs: Any,
    rhs: Any,
    *operands: Any,
    axes: tuple[str, ...],
    axis: int,
    precision: Any,
    preferred_element_type: Any,
    epilogue: Epilogue,
) -> list[str]:
    """All reasons for which the kernel cannot take these operands."""
    del axes
    reasons = matmul.unsupported(lhs, rhs, precision=precision, preferred_element_type=preferred_element_type)
    return reasons + epilogues.unsupported(epilogue, operands)


def _slower(
    lhs: Any,
    rhs: Any,
    *others: Any,
    axes: tuple[str, ...],
    axis: int,
    precision: Any,
    preferred_element_type: Any,
    rhs_transposed: bool,
    compute_capability: int,
    epilogue: Epilogue = NONE,
    return_gathered: bool = False,
    **_: Any,
) -> str | None:
    """Why XLA is known to be faster, if it is. Measured on 2 and 4 H200."""
    world = lax.axis_size(axes)
    rows = math.prod(lhs.shape[:-1]) * (1 if axis == lhs.ndim - 1 else world)
    if world == 1:
        return "there is one rank, so nothing to gather"
    if why := matmul.slower(lhs, rhs, rows, precision=precision, preferred_element_type=preferred_element_type):
        return why
    call = product.call_of(
        "all_gather_matmul",
        lhs,
        rhs,
        *others,
        rows=rows,
        world=world,
        compute_capability=compute_capability,
        precision=precision,
        preferred_element_type=preferred_element_type,
        epilogue=epilogue,
        rhs_transposed=rhs_transposed,
        return_gathered=return_gathered,
        along_columns=axis == lhs.ndim - 1,
    )
    if why := product.slower(VARIANTS, call):
        return why
    # Of gradients, that of an MLP of 4096 rows was measured.
    return matmul.UNMEASURED if rhs_transposed and rows < 2048 else None


def case(lhs: Any, rhs: Any, *, team: Team, **params: Any) -> Case | None:
    """What the tables know a call by."""
    if params["axis"] == lhs.ndim - 1:
        return None
    return product.case("all_gather_matmul", VARIANTS, lhs, rhs, rows=lambda m: team.world * m, team=team, **params)


def _dimensions(*operands: Any, axis: int, rhs_transposed: bool, epilogue: Epilogue = NONE, **params: Any) -> Any:
    gathered = params.get("return_gathered", False)
    return product.dimensions(
        *operands, moved=axis, rhs_transposed=rhs_transposed, epilogue=epilogue, return_gathered=gathered
    )


_batch = functools.partial(epilogues.batch, moved="axis")
all_gather_matmul_p = bilinear(
    "all_gather_matmul",
    reference=reference,
    fused=fused,
    slower=_slower,
    dimensions=_dimensions,
    case=case,
    batch=_batch,
)
# With the gathered lhs as a second result.
gathered_too_p = collective(
    "all_gather_matmul",
    reference=functools.partial(reference, return_gathered=True),
    fused=functools.partial(fused, return_gathered=True),
    slower=_slower,
    dimensions=functools.partial(_dimensions, return_gathered=True),
    batch=_batch,
)
# With an epilogue; a list of the result and, with `return_gathered`, the gathered lhs.
with_epilogue_p = collective(
    "all_gather_matmul",
    reference=lambda *operands, **params: jax.tree.leaves(reference(*operands, **params)),
    fused=lambda *operands, **params: jax.tree.leaves(fused(*operands, **params)),
    slower=_slower,
    dimensions=_dimensions,
    batch=_batch,
)
