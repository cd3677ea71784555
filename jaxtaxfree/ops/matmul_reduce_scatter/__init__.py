"""`matmul_reduce_scatter`: the row-parallel half of a tensor-parallel layer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxtaxfree.ops import checks, matmul, narrow, product, scaled
from jaxtaxfree.ops.epilogue import NONE, Epilogue
from jaxtaxfree.ops.matmul_reduce_scatter.few import Few
from jaxtaxfree.ops.matmul_reduce_scatter.hopper import Hopper
from jaxtaxfree.ops.matmul_reduce_scatter.hopper_few import HopperFew
from jaxtaxfree.ops.matmul_reduce_scatter.portable import Portable
from jaxtaxfree.ops.scaled import UNSCALED, Scaling
from jaxtaxfree.ops.variant import Variant, settings_of
from jaxtaxfree.primitive import check_implementation, check_whole, takes_reference
from jaxtaxfree.settings import Settings
from jaxtaxfree.teams import check_axes

# The kernels. The cheapest one that does not refuse a call takes it.
VARIANTS: tuple[Variant[product.Call], ...] = (Hopper(), HopperFew(), Few(), Portable())


@overload
def matmul_reduce_scatter(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | Sequence[str],
    *,
    scatter_dimension: int = 0,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    rhs_transposed: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    quantize_lhs: str | None = None,
    out_scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: str | Callable[..., jax.Array] | None = None,
    residual: jax.Array | None = None,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> jax.Array: ...


@overload
def matmul_reduce_scatter(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | Sequence[str],
    *,
    scatter_dimension: int = 0,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    rhs_transposed: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    quantize_lhs: str | None = None,
    out_scale: Literal["block"],
    bias: jax.Array | None = None,
    activation: str | Callable[..., jax.Array] | None = None,
    residual: jax.Array | None = None,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def matmul_reduce_scatter(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | Sequence[str],
    *,
    scatter_dimension: int = 0,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    rhs_transposed: bool = False,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    quantize_lhs: str | None = None,
    out_scale: jax.Array | str | None = None,
    bias: jax.Array | None = None,
    activation: str | Callable[..., jax.Array] | None = None,
    residual: jax.Array | None = None,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> Any:
    """`lax.psum_scatter(lhs @ rhs, axis_name, scatter_dimension=scatter_dimension, tiled=True)`, as one kernel on GPUs.

    Each rank multiplies the rows of other ranks first, and sends each tile when it is done. So the transfer hides
    behind the product of the rows that are still to come. Call it inside `jax.shard_map`.

    Args:
      lhs: this rank's part of the contracted dimension, for the rows of all ranks, [..., world * M, ..., K].
      rhs: the same part, [K, N]. The reference also takes a vector [K].
      axis_name: the mesh axis, or axes, over which the contracted dimension is sharded and the result will be.
      scatter_dimension: the scattered dimension of the result. The last one, of the columns of rhs, is for activations
        that are sharded along their channels.
      precision: as in `jnp.matmul`. For f32 operands on GPUs None means TF32, unless `jax_default_matmul_precision`
        says more.
      preferred_element_type: dtype of the result. The kernel's sums are always f32, and the sum is rounded once. Each
        rank's part is rounded to the operands' dtype on its way, unless the result is small or `config` asks for
        `exact_wire`.
      rhs_transposed: `rhs` is [N, K]. The kernel reads it as it lies.
      lhs_scale: by what a `lhs` of 8 bits (float8_e4m3fn, float8_e5m2, int8) is multiplied, f32, of this rank: [],
        [..., 1] or [..., ceil(K / 128)], as `quantize` makes them. The kernel for many rows
        on Hopper takes scales where `rhs` has 8 bits, too, and is [N, K], and rows are scattered. Each rank's part
        travels in bfloat16. By default it takes 2048 rows and more, which was measured.
      rhs_scale: the same of a `rhs` of 8 bits: [], [1, N] or [ceil(K / 128), ceil(N / 128)], turned over as `rhs` is;
        `lhs` may then have 16 bits. The result has the dtype of the operand that has not 8 bits, else bfloat16.
      quantize_lhs: "row" or "block": `lhs` has 16 or 32 bits, and is quantised to the dtype of `rhs`, which has a
        `rhs_scale`, by rows or by 1 x 128 before it travels. A program in front of the kernel does that. Gradients are
        those of `lhs` as it was. The result has the dtype of `lhs`.
      out_scale: with a `preferred_element_type` of 8 bits: by what the result is divided before it is rounded to that,
        f32 []; or "block", which gives a pair of values and their scales, [..., ceil(N / 128)]. A program behind the
        kernel does that, to a result of 16 bits.
      bias: [N]. Every rank has the whole bias, or where columns are scattered that of its columns. It is added once to
        the sum over all ranks, before the activation.
      activation: None, "silu", "gelu_tanh", "gelu_exact", `jax.nn.silu`, or `jax.nn.gelu`, which is "gelu_tanh".
      residual: has the result's shape, and is added last.
      implementation: "fused": the kernel. "xla": plain `lax`. None: the kernel, where it can run and is not known to
        be slower. Shapes and tables alone decide this, when the program is lowered, and the logger "jaxtaxfree" says
        at DEBUG level why a kernel is not taken. "simulate": the kernel, run for all ranks on the CPU; see
        `jaxtaxfree.simulator`. With None, gradients gather in a kernel where there are 2048 rows or more.
      config: names the kernel and its settings: a mapping such as `{"kernel": "hopper_few", "splits": 4}`, or the
        `Config` of a kernel. The shape decides whatever it leaves out. `VARIANTS` has the kernels; each has settings
        of its own.

    Returns: [..., M, ..., N], this rank's rows of the sum over all ranks, or [..., N / world], its
      columns. The kernel adds up in the same order in every call. XLA's order may be another one.

    Bias, activation and residual are applied in f32. The kernel applies them to its f32 sums, before it rounds; XLA
    applies them to the result of `lax.psum_scatter`. In a program that is differentiated the product is an operation of
    its own, so that its gradients stay fused. There it is rounded to the dtype of the result before they are applied.

    Raises:
      ValueError: if the operands do not fit together, the scattered dimension is 0, or the implementation, activation
        or setting does not exist.
      TypeError: if an axis or `config` has the wrong type.
      NameError: if `axis_name` is not bound.
      NotImplementedError: if implementation="fused" (or "simulate") cannot run here. The error gives all reasons.
    """
    if narrow.asked(quantize_lhs, out_scale):
        return narrow.call(
            matmul_reduce_scatter, lhs, rhs, axis_name, quantize_lhs=quantize_lhs, out_scale=out_scale,
            operands={"lhs_scale": lhs_scale, "rhs_scale": rhs_scale, "bias": bias, "residual": residual},
            scatter_dimension=scatter_dimension, precision=precision, preferred_element_type=preferred_element_type,
            rhs_transposed=rhs_transposed, activation=activation, implementation=implementation, config=config,
        )  # fmt: skip
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    axes = check_axes(axis_name, "matmul_reduce_scatter")
    check_implementation(implementation)
    scatter_dimension, shape = _check_operands(lhs, rhs, scatter_dimension, axes, rhs_transposed)
    params: dict[str, Any] = {
        "axes": axes,
        "scatter_dimension": scatter_dimension,
        **matmul.check_precision(precision, preferred_element_type),
    }
    found, scales, operands = checks.check(
        "matmul_reduce_scatter", lhs, rhs, shape, activation, rhs_transposed=rhs_transposed,
        scales={"lhs_scale": lhs_scale, "rhs_scale": rhs_scale}, parts=lax.axis_size(axes),
        bias=bias, residual=residual,
    )  # fmt: skip
    settings = settings_of("matmul_reduce_scatter", VARIANTS, config)
    operands = [*scales, *operands]
    params |= found
    reasons = PRODUCT.unsupported(lhs, rhs, *operands, **params)
    if takes_reference("matmul_reduce_scatter", [lhs, rhs], implementation, reasons):
        return reference(lhs, rhs, *operands, **params)
    params |= {"implementation": implementation, "config": settings}
    if operands or found["epilogue"]:
        return matmul.bind(with_epilogue_p, lhs, rhs, *operands, **params)[0]
    del params["epilogue"], params["scaling"]
    return matmul.bind(matmul_reduce_scatter_p, lhs, rhs, **params)


def reference(
    lhs: jax.Array,
    rhs: jax.Array,
    *operands: jax.Array,
    axes: tuple[str, ...],
    scatter_dimension: int,
    precision: Any,
    preferred_element_type: Any,
    epilogue: Epilogue = NONE,
    rhs_transposed: bool = False,
    scaling: Scaling = UNSCALED,
    config: Any = None,
) -> jax.Array:
    """What the operation means, in plain `lax`; `operands` are the scales, and those of the epilogue."""
    del config
    scales, operands = scaling.split(operands)
    rhs = rhs.T if rhs_transposed else rhs
    product = scaled.matmul(lhs, rhs, scales, precision, preferred_element_type)
    total = lax.psum_scatter(product, axes, scatter_dimension=scatter_dimension, tiled=True)
    return epilogue.apply([total], epilogue.split(rhs, operands)[1], total.dtype) if epilogue else total


def _check_operands(
    lhs: jax.Array, rhs: jax.Array, dimension: int, axes: tuple[str, ...], rhs_transposed: bool
) -> tuple[int, list[int]]:
    """The scattered dimension, from 0 on, and the result's shape; raises ValueError if the operands do not fit."""
    matmul.check_operands("matmul_reduce_scatter", lhs, rhs)
    dimension = check_whole("matmul_reduce_scatter", "scatter_dimension", dimension)
    matmul.check_contraction("matmul_reduce_scatter", lhs, rhs, rhs_transposed=rhs_transposed)
    result = [*lhs.shape[:-1], *matmul.columns(rhs, rhs_transposed)]
    if not -len(result) <= dimension < len(result):
        raise ValueError(f"matmul_reduce_scatter cannot scatter dimension {dimension} of a product {result}.")
    dimension %= len(result)
    size, world = result[dimension], lax.axis_size(axes)
    if size % world or not size:
        raise ValueError(
            f"matmul_reduce_scatter cannot scatter dimension {dimension} of a product {result} over {world} "
            f"ranks: {size} is not a {'' if size else 'positive '}multiple of {world}."
        )
    result[dimension] //= world
    return dimension, result


PRODUCT = product.Product(
    name="matmul_reduce_scatter",
    variants=VARIANTS,
    reference=reference,
    moved="scatter_dimension",
    alone="scatter",
    # Forward and backward of an MLP (4096, 8192, 28672) took 4.84 ms with this kernel, and 4.78 with XLA, which
    # scatters beside the gradient of the weights.
    slower_transposed=lambda rows: "XLA is faster in the gradients of an MLP",
)
case = PRODUCT.case
matmul_reduce_scatter_p = PRODUCT.bilinear()
# With an epilogue or scales.
with_epilogue_p = PRODUCT.collective()
