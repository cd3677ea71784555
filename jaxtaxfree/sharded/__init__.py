"""Products of global arrays: `einsum`, `matmul` and `dot_general`, which are fused where they communicate."""

import string
from collections.abc import Callable, Sequence
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from opt_einsum.parser import parse_einsum_input

from jaxtaxfree.primitive import symbolic
from jaxtaxfree.sharded.call import Asked, Blocks, Call, Keywords, for_each, product, products
from jaxtaxfree.sharded.plan import labels_of


@overload
def einsum(
    subscripts: str,
    lhs: jax.Array,
    rhs: tuple[jax.Array, ...],
    /,
    *,
    out: None = None,
    optimize: Any = "auto",
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    _dot_general: Callable[..., jax.Array] = lax.dot_general,
    **asked: Unpack[Keywords],
) -> tuple[jax.Array, ...]: ...


@overload
def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    out: None = None,
    optimize: Any = "auto",
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    _dot_general: Callable[..., jax.Array] = lax.dot_general,
    **asked: Unpack[Keywords],
) -> jax.Array: ...


@overload
def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    out: None = None,
    optimize: Any = "auto",
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    _dot_general: Callable[..., jax.Array] = lax.dot_general,
    **asked: Unpack[Blocks],
) -> tuple[jax.Array, jax.Array]: ...


def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    out: None = None,
    optimize: Any = "auto",
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    _dot_general: Callable[..., jax.Array] = lax.dot_general,
    **asked: Any,
) -> Any:
    """`jnp.einsum` of global arrays, as one kernel with the communication that its shardings ask for.

    Call it where `jnp.einsum` is called: outside of `jax.shard_map`, in `jax.jit`, `jax.lax.scan`, `jax.checkpoint`,
    `jax.grad` and `jax.vmap`. What is fused follows from how the operands and the result lie on the mesh:

    | contracted dimensions | rows of lhs | columns of rhs | result | operation |
    |---|---|---|---|---|
    | sharded in both | | | whole along these axes | `matmul_all_reduce` |
    | sharded in both | | | a row sharded along these axes | `matmul_reduce_scatter` |
    | | sharded | sharded along the same axes | the columns sharded along them | `all_gather_matmul` |

    Other axes may shard rows of lhs and of the result (data) or columns of rhs and of the result. If further axes shard
    rhs alone (FSDP), it is gathered along them first. Each of the two operands may be the weights. All other products
    are JAX's own, and the logger "jaxtaxfree" says once at INFO level why.

    Args:
      subscripts, *operands, out, optimize, precision, preferred_element_type: as of `jnp.einsum`. Two operands can be
        fused. Operands of any rank are, such as "btd,dnh->btnh" and "btnh,nhd->btd". Weights whose contracted
        dimensions come first or last are read where they lie. In place of rhs there may be a tuple of several arrays
        with the same subscripts, such as the weights of query, key and value, of any widths: one gather and one kernel
        then make a product by each. These are read where they lie if their contracted dimensions come first.
      out_sharding: how the result lies: a `PartitionSpec` of the mesh of `jax.set_mesh`, or a `NamedSharding`.
      in_shardings: the same of both operands, of which types say nothing along Auto axes. Along Explicit axes the types
        say how operands lie; an operand that lies otherwise is resharded first.
        There is one for all of several rhs.
      gate: a second rhs, of its shape and sharding. Not with several rhs. With G the gathered lhs, the result is
        `activation(G · gate) * (G · rhs)`. The activation applies to the gate's product only.
      bias: [columns of rhs], in the order in which rhs has them. It is added before the activation, or before the gate
        multiplies. With several rhs one for all, or a tuple with one, or None, for each.
      activation: None, "silu", "gelu_tanh", "gelu_exact", `jax.nn.silu`, or `jax.nn.gelu`, which is "gelu_tanh". With
        several rhs one for all, or a tuple with one for each.
      residual: has the result's shape and sharding, and is added last. Not with several rhs.
      lhs_scale: by what a lhs of 8 bits (see `quantize`) is multiplied, f32, which lies as lhs does: [], or of its
        dimensions, 1 along the contracted ones (of rows), or ceil(K / 128) along a single one (of blocks). Sums are
        f32, and the result has the dtype of the operand that has not 8 bits, else bfloat16.
      rhs_scale, gate_scale: the same of rhs and of the gate, 1 along the contracted dimensions (of columns), or of a
        matrix ceil(length / 128) along both. With several rhs a tuple with one, or None, for each.
      quantize_lhs: "row" or "block": lhs has 16 or 32 bits, and is quantised to the dtype of rhs, which has a
        rhs_scale, by rows or by 128 of its single contracted dimension, before it travels. A row is what a device has
        of it where the operation multiplies; in JAX's own product it is whole. A program in front of the kernel does
        that. Gradients are those of lhs as it was. The result has the dtype of lhs. Not with several rhs.
      out_scale: with a preferred_element_type of 8 bits: by what the result is divided before it is rounded to that,
        f32 []; or "block", which gives a pair of values and their scales, f32 [..., ceil(N / 128)], where rhs has a
        single dimension N that lhs has not, and the result has it last. Scales lie as values do. A program behind the
        kernel does that, to a result of 16 bits, or of 32 if an operand has 32. Not with several rhs.
      implementation: "fused": the kernel. "xla": JAX's own product. None: the kernel, where it can run and is not known
        to be slower. "simulate": the kernel, run for all ranks on the CPU; see `jaxtaxfree.simulator`.
      config: names the kernel and its settings, as of the operation; see `all_gather_matmul`.

    Returns: the result; with out_scale="block" a pair of it and its scales; of several rhs a tuple of results. Gate,
      bias, activation and residual are applied in f32; see the operations. Several rhs whose lhs is not gathered are
      products by themselves.

    Inside a `jax.shard_map` with manual axes arrays are local, and the product is JAX's own. With "fused" a product of
    rows [..., M, K] by [K, N], or by [N, K] without a gate, is a kernel there, too: that of `all_gather_matmul` over no
    axis. Of the few rows of a decode step it reads the weights at the memory's speed.

    Raises:
      ValueError: if gate, bias, residual or scales do not fit, the equation has no rows or blocks as quantize_lhs and
        out_scale ask for, their dtypes do not go together, shardings are of several meshes, or the implementation,
        activation or setting does not exist; or JAX does.
      NotImplementedError: if implementation="fused" (or "simulate") cannot run here, or no operation is for such a
        product. The error gives all reasons.
    """
    given: dict[str, Any] = {"out": out, "optimize": optimize, "_dot_general": _dot_general, "precision": precision}
    given["preferred"] = preferred_element_type
    if len(operands) == 2 and isinstance(operands[1], tuple):
        lhs, several = operands
        each = for_each("einsum", len(several), Asked(**asked))
        return products([_einsum(subscripts, (lhs, rhs), own, **given) for rhs, own in zip(several, each, strict=True)])
    return product(_einsum(subscripts, operands, Asked(**asked), **given))


def _einsum(
    subscripts: Any, operands: Sequence[Any], asked: Asked, _dot_general: Any, preferred: Any, **given: Any
) -> Call:
    """The call of an einsum."""
    arrays, shapes, own = _einsum_operands(subscripts, operands)
    labels, reasons = None, [] if len(arrays) == 2 else [f"it has {len(arrays)} operands, not two"]
    if _dot_general is not lax.dot_general:
        reasons.append("_dot_general is a product of its own")
    if len(arrays) == 2 and not symbolic(*arrays):
        ins, result, _ = parse_einsum_input(shapes, shapes=True)
        lhs, rhs = ins.split(",")
        labels = tuple(lhs), tuple(rhs), tuple(result)
        if any(m != n for a, m in zip(lhs, arrays[0].shape) for b, n in zip(rhs, arrays[1].shape) if a == b):
            reasons.append("a dimension of length 1 is broadcast")

    def of_jax(operands: Sequence[jax.Array], out_sharding: Any, preferred_element_type: Any) -> jax.Array:
        how = given | {"out_sharding": out_sharding, "preferred_element_type": preferred_element_type}
        return jnp.einsum(*own(operands), _dot_general=_dot_general, **how)

    return Call(
        name="einsum",
        own=of_jax,
        operands=arrays if asked.scaled else _promoted(arrays),
        labels=labels,
        reasons=reasons,
        precision=given["precision"],
        preferred_element_type=preferred,
        asked=asked,
    )


@overload
def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    **asked: Unpack[Keywords],
) -> jax.Array: ...


@overload
def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    **asked: Unpack[Blocks],
) -> tuple[jax.Array, jax.Array]: ...


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    **asked: Any,
) -> Any:
    """`jnp.matmul` of global arrays, as one kernel with the communication that its shardings ask for.

    It is `einsum` with the dimensions of a product of matrices: a [..., M, K], and b [K, N], which can be fused, or
    [..., K, N]. See `einsum` for the rules, the arguments and the errors.

    Returns: [..., M, N]; with out_scale="block" a pair of it and its scales.
    """
    lhs, rhs, given = jnp.asarray(a), jnp.asarray(b), Asked(**asked)
    labels = None
    if lhs.ndim and rhs.ndim:
        names = string.ascii_lowercase[: lhs.ndim]
        batch = min(lhs.ndim, rhs.ndim) - 2  # dimensions that both have, from the last one on
        shared = names[lhs.ndim - 2 - batch : lhs.ndim - 2] if batch > 0 else ""
        further = string.ascii_uppercase[: max(0, rhs.ndim - max(lhs.ndim, 2))]
        of_rhs = (*further, *shared, names[-1], *(["N"] if rhs.ndim > 1 else []))
        rows = names[:-1]
        labels = tuple(names), of_rhs, (*further, *rows, *(["N"] if rhs.ndim > 1 else []))
    reasons = ["it is a batch of products"] if rhs.ndim > 2 else []

    def of_jax(operands: Sequence[jax.Array], out_sharding: Any, preferred_element_type: Any) -> jax.Array:
        how = {"precision": precision, "preferred_element_type": preferred_element_type}
        return jnp.matmul(*operands, **how, out_sharding=out_sharding)

    return product(
        Call(
            name="matmul",
            own=of_jax,
            operands=[lhs, rhs] if given.scaled else _promoted([lhs, rhs]),
            labels=labels,
            reasons=reasons,
            precision=precision,
            preferred_element_type=preferred_element_type,
            asked=given,
        )
    )


@overload
def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    **asked: Unpack[Keywords],
) -> jax.Array: ...


@overload
def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    **asked: Unpack[Blocks],
) -> tuple[jax.Array, jax.Array]: ...


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    **asked: Any,
) -> Any:
    """`jax.lax.dot_general` of global arrays, as one kernel with the communication that its shardings ask for.

    See `einsum` for the rules, the arguments and the errors. A product with batch dimensions is JAX's own.

    Returns: [batch, dimensions of lhs, dimensions of rhs], without the contracted ones; with out_scale="block" a pair
      of it and its scales.
    """
    operands = jnp.asarray(lhs), jnp.asarray(rhs)
    dtypes = [x.dtype for x in operands]
    given = Asked(**asked)
    alike = len(set(dtypes)) == 1 or given.scaled
    reasons = [] if alike else [f"operands are of two dtypes, {dtypes[0]} and {dtypes[1]}"]

    def of_jax(operands: Sequence[jax.Array], out_sharding: Any, preferred_element_type: Any) -> jax.Array:
        lhs, rhs = operands
        return lax.dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
        )

    return product(
        Call(
            name="dot_general",
            own=of_jax,
            operands=operands,
            labels=labels_of(dimension_numbers, operands[0].ndim, operands[1].ndim),
            reasons=reasons,
            precision=precision,
            preferred_element_type=preferred_element_type,
            asked=given,
        )
    )


def _promoted(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """The operands in one dtype, as the functions of `jax.numpy` make them."""
    if len({x.dtype for x in operands}) < 2:
        return list(operands)
    dtype = jnp.result_type(*operands)
    return [x.astype(dtype) for x in operands]


def _einsum_operands(
    subscripts: Any, operands: Sequence[Any]
) -> tuple[list[jax.Array], tuple, Callable[[Sequence[jax.Array]], tuple]]:
    """The arrays of an einsum, its arguments with shapes in their places, and a function that puts arrays there.

    Subscripts come first, or in lists after each array.
    """
    arguments = [subscripts, *operands]
    listed = not isinstance(subscripts, str)
    places = range(0, len(arguments) - 1, 2) if listed else range(1, len(arguments))
    arrays = [jnp.asarray(arguments[i]) for i in places]

    def put(each: Sequence[Any]) -> tuple:
        by_place = dict(zip(places, each, strict=True))
        return tuple(by_place.get(i, argument) for i, argument in enumerate(arguments))

    return arrays, put([x.shape for x in arrays]), put
