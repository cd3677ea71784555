"""`matmul_all_reduce`: a row-parallel layer whose result every rank needs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxtaxfree.ops import epilogue as epilogues
from jaxtaxfree.ops import matmul, product, scaled
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
    bias: jax.Array | None = None,
    activation: str | Callable[..., jax.Array] | None = None,
    residual: jax.Array | None = None,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> jax.Array:
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
        on Hopper takes scales where `rhs` has 8 bits, too, and is [N, K], and the result is bfloat16. None takes XLA
        for now.
      rhs_scale: the same of a `rhs` of 8 bits: [], [1, N] or [ceil(K / 128), ceil(N / 128)], turned over as `rhs` is;
        `lhs` may then have 16 bits. The result has the dtype of the operand that has not 8 bits, else bfloat16.
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
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    axes = check_axes(axis_name, "matmul_all_reduce")
    check_implementation(implementation)
    matmul.check_operands("matmul_all_reduce", lhs, rhs)
    matmul.check_contraction("matmul_all_reduce", lhs, rhs, rhs_transposed=rhs_transposed)
    params: dict[str, Any] = {"axes": axes, **matmul.check_precision(precision, preferred_element_type)}
    shape = (*lhs.shape[:-1], *matmul.columns(rhs, rhs_transposed))
    one_row = lhs.ndim == 1 and rhs.ndim == 2
    lhs = lhs[None] if one_row else lhs
    form = {"rhs_transposed": rhs_transposed, "lhs_scale": lhs_scale, "rhs_scale": rhs_scale}
    scaling, scales = scaled.check("matmul_all_reduce", lhs, rhs, parts=lax.axis_size(axes), **form)
    epilogue, operands = epilogues.check(
        "matmul_all_reduce",
        lhs,
        rhs,
        shape,
        activation,
        rhs_transposed=rhs_transposed,
        of_integers=bool(scaling),
        bias=bias,
        residual=residual,
    )
    if one_row:
        operands = [x[None] if name == "residual" else x for name, x in zip(epilogue.operands, operands)]
    settings = settings_of("matmul_all_reduce", VARIANTS, config)
    differing = [name for name, x in zip(epilogue.operands, operands) if not varying(x).isdisjoint(axes)]
    operands = [*scales, *operands]
    params |= {"epilogue": epilogue, "scaling": scaling, "rhs_transposed": rhs_transposed}
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
