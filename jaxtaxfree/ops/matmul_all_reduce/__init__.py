"""`matmul_all_reduce`: a row-parallel layer whose result every rank needs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxtaxfree.ops import checks, matmul, narrow, product, scaled
from jaxtaxfree.ops.epilogue import NONE, Epilogue
from jaxtaxfree.ops.matmul_all_reduce.few import Few
from jaxtaxfree.ops.matmul_all_reduce.hopper import Hopper
from jaxtaxfree.ops.matmul_all_reduce.hopper_few import HopperFew
from jaxtaxfree.ops.matmul_all_reduce.portable import Portable
from jaxtaxfree.ops.scaled import UNSCALED, Scaling
from jaxtaxfree.ops.variant import Variant, settings_of
from jaxtaxfree.primitive import Lasting, check_implementation, takes_reference
from jaxtaxfree.settings import Settings
from jaxtaxfree.teams import check_axes, varying

# The kernels. The cheapest one that does not refuse a call takes it.
VARIANTS: tuple[Variant[product.Call], ...] = (Hopper(), HopperFew(), Few(), Portable())


@overload
def matmul_all_reduce(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | Sequence[str],
    *,
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
def matmul_all_reduce(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | Sequence[str],
    *,
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


def matmul_all_reduce(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | Sequence[str],
    *,
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
    """`lax.psum(lhs @ rhs, axis_name)`, as one kernel on GPUs.

    For the few rows of a decode step, the kernel sends every tile of the product as soon as it is done, while it still
    reads the weights of later tiles. It sends a tile in one shot to all ranks, or in two shots: to its owner, and from
    there to all. (TensorRT-LLM has the same one-shot and two-shot all-reduce. Here the data are words that carry the
    news of their own arrival.) For many rows it takes two shots, with tiles in scratch memory. Call it inside
    `jax.shard_map`.

    Args:
      lhs: this rank's part of the contracted dimension, [..., M, K] or [K].
      rhs: the same part, [K, N]. The reference also takes a vector [K].
      axis_name: the mesh axis, or axes, over which the contracted dimension is sharded. If some of them lie inside of
        hosts and the others span hosts, there are kernels inside, and XLA's sum across.
      precision: as in `jnp.matmul`. For f32 operands on GPUs None means TF32, unless `jax_default_matmul_precision`
        says more.
      preferred_element_type: dtype of the result. The kernel's sums are always f32, and are rounded once. Each rank's
        part is rounded to the operands' dtype on its way, as XLA does. It travels as f32 if the result has more bits
        than the operands, if there are so few rows that rounding saves nothing, if `config` asks for `exact_wire`, or
        if there are many rows on a GPU other than Hopper.
      rhs_transposed: `rhs` is [N, K]. The kernels read it as it lies. By default XLA takes more than 128 rows, because
        these were not measured yet.
      lhs_scale: by what a `lhs` of 8 bits (float8_e4m3fn, float8_e5m2, int8) is multiplied, f32, of this rank: [],
        [..., 1] or [..., ceil(K / 128)], as `quantize` makes them. The kernel for many rows
        on Hopper takes scales where `rhs` has 8 bits, too, and is [N, K], and the result is bfloat16; by default from
        2048 rows on, which was measured.
      rhs_scale: the same of a `rhs` of 8 bits: [], [1, N] or [ceil(K / 128), ceil(N / 128)], turned over as `rhs` is;
        `lhs` may then have 16 bits. The result has the dtype of the operand that has not 8 bits, else bfloat16.
      quantize_lhs: "row" or "block": `lhs` has 16 or 32 bits, and is quantised to the dtype of `rhs`, which has a
        `rhs_scale`, by rows or by 1 x 128 before it travels. A program in front of the kernel does that. Gradients are
        those of `lhs` as it was. The result has the dtype of `lhs`.
      out_scale: with a `preferred_element_type` of 8 bits: by what the result is divided before it is rounded to that,
        f32 []; or "block", which gives a pair of values and their scales, [..., ceil(N / 128)]. A program behind the
        kernel does that, to a result of 16 bits.
      bias: [N], the same on every rank. It is added once to the sum over all ranks, before the activation.
      activation: None, "silu", "gelu_tanh", "gelu_exact", `jax.nn.silu`, or `jax.nn.gelu`, which is "gelu_tanh".
      residual: has the result's shape, is the same on every rank, and is added last.
      implementation: "fused": the kernel. "xla": plain `lax`. None: the kernel, where it can run and is not known to
        be slower. Shapes and tables alone decide this, when the program is lowered, and the logger "jaxtaxfree" says
        at DEBUG level why a kernel is not taken. "simulate": the kernel, run for all ranks on the CPU; see
        `jaxtaxfree.simulator`.
      config: names the kernel and its settings: a mapping such as `{"kernel": "hopper_few", "splits": 4}`, or the
        `Config` of a kernel. The shape decides whatever it leaves out. `VARIANTS` has the kernels; each has settings
        of its own.

    Returns: [..., M, N] or [N], the sum over all ranks, the same on every rank. The kernel adds up in the same order in
      every call and on every rank. XLA's order may be another one.

    Bias, activation and residual are applied in f32. The kernel applies them to its f32 sums, before it rounds; XLA
    applies them to the result of `lax.psum`. In a program that is differentiated the product is rounded to the dtype of
    the result first. With `check_vma=True` `shard_map` knows what is the same on all ranks, and the kernel refuses a
    bias or residual that is not. Without it, each part of the result gets the bias and residual of the rank that
    computes it.

    Raises:
      ValueError: if the operands do not fit together, or the implementation, activation or setting does not exist.
      TypeError: if the axis or `config` has the wrong type.
      NameError: if `axis_name` is not bound.
      NotImplementedError: if implementation="fused" (or "simulate") cannot run here. The error gives all reasons.
    """
    if narrow.asked(quantize_lhs, out_scale):
        return narrow.call(
            matmul_all_reduce, lhs, rhs, axis_name, quantize_lhs=quantize_lhs, out_scale=out_scale,
            operands={"lhs_scale": lhs_scale, "rhs_scale": rhs_scale, "bias": bias, "residual": residual},
            precision=precision, preferred_element_type=preferred_element_type, rhs_transposed=rhs_transposed,
            activation=activation, implementation=implementation, config=config,
        )  # fmt: skip
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    axes = check_axes(axis_name, "matmul_all_reduce")
    check_implementation(implementation)
    matmul.check_operands("matmul_all_reduce", lhs, rhs)
    matmul.check_contraction("matmul_all_reduce", lhs, rhs, rhs_transposed=rhs_transposed)
    params: dict[str, Any] = {"axes": axes, **matmul.check_precision(precision, preferred_element_type)}
    shape = (*lhs.shape[:-1], *matmul.columns(rhs, rhs_transposed))
    one_row = lhs.ndim == 1 and rhs.ndim == 2
    lhs = lhs[None] if one_row else lhs
    found, scales, operands = checks.check(
        "matmul_all_reduce", lhs, rhs, shape, activation, rhs_transposed=rhs_transposed,
        scales={"lhs_scale": lhs_scale, "rhs_scale": rhs_scale}, parts=lax.axis_size(axes),
        bias=bias, residual=residual,
    )  # fmt: skip
    epilogue: Epilogue = found["epilogue"]
    if one_row:
        operands = [x[None] if name == "residual" else x for name, x in zip(epilogue.operands, operands)]
    settings = settings_of("matmul_all_reduce", VARIANTS, config)
    differing = [name for name, x in zip(epilogue.operands, operands) if not varying(x).isdisjoint(axes)]
    operands = [*scales, *operands]
    params |= found
    reasons = PRODUCT.unsupported(lhs, rhs, *operands, **params)
    reasons += [
        Lasting(f"it takes a {name} that is the same on all ranks along {axes}: give it in_specs without these")
        for name in differing
    ]
    lhs, rhs = matmul.vary_alike(lhs, rhs, axes=axes)
    if takes_reference("matmul_all_reduce", [lhs, rhs], implementation, reasons):
        out = reference(lhs, rhs, *operands, **params)
    else:
        params |= {"implementation": implementation, "config": settings}
        if operands or epilogue:
            (out,) = with_epilogue_p.bind(lhs, rhs, *operands, **params)
        else:
            del params["epilogue"], params["scaling"]
            out = matmul_all_reduce_p.bind(lhs, rhs, **params)
    return out[0] if one_row else out


def reference(
    lhs: jax.Array,
    rhs: jax.Array,
    *operands: jax.Array,
    axes: tuple[str, ...],
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
    total = lax.psum(scaled.matmul(lhs, rhs, scales, precision, preferred_element_type), axes)
    return epilogue.apply([total], epilogue.split(rhs, operands)[1], total.dtype) if epilogue else total


PRODUCT = product.Product(
    name="matmul_all_reduce",
    variants=VARIANTS,
    reference=reference,
    alone="add up",
    # On 2 H100 16 rows took 20.3 us where XLA took 35.0 (8192 x 2048), and 97 where it took 107 (28672 x 8192); 128
    # rows 106 and 130.
    slower_transposed=lambda rows: matmul.UNMEASURED if rows > 128 else None,
    # 16 rows by int8 weights took 69 and 90, 128 rows 95 and 142; of both operands (e4m3) 66 and 94, 77 and 97.
    scaled_rows=128,
)
case = PRODUCT.case
matmul_all_reduce_p = PRODUCT.bilinear()
# With an epilogue or scales.
with_epilogue_p = PRODUCT.collective()
