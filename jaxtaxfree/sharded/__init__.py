"""Products of global arrays: `einsum`, `matmul` and `dot_general`, which are fused where they communicate."""

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from opt_einsum.parser import parse_einsum_input

from jaxtaxfree.primitive import symbolic
from jaxtaxfree.settings import Settings
from jaxtaxfree.sharded.call import Call, Sharding, product


def einsum(
    subscripts: Any,
    /,
    *operands: Any,
    out: None = None,
    optimize: Any = "auto",
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    _dot_general: Callable[..., jax.Array] = lax.dot_general,
    out_sharding: Sharding | None = None,
    in_shardings: Sequence[Sharding | None] | None = None,
    gate: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: str | Callable[..., jax.Array] | None = None,
    residual: jax.Array | None = None,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> jax.Array:
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
        dimensions come first, or last in the two operations that gather and scatter, are read where they lie.
      out_sharding: how the result lies: a `PartitionSpec` of the mesh of `jax.set_mesh`, or a `NamedSharding`.
      in_shardings: the same of both operands, of which types say nothing along Auto axes. Along Explicit axes the types
        say how operands lie; an operand that lies otherwise is resharded first.
      gate: a second rhs, of its shape and sharding. With G the gathered lhs, the result is
        `activation(G · gate) * (G · rhs)`. The activation applies to the gate's product only.
      bias: [columns of rhs], in the order in which rhs has them. It is added before the activation, or before the gate
        multiplies.
      activation: None, "silu", "gelu_tanh", "gelu_exact", `jax.nn.silu`, or `jax.nn.gelu`, which is "gelu_tanh".
      residual: has the result's shape and sharding, and is added last.
      implementation: "fused": the kernel. "xla": JAX's own product. None: the kernel, where it can run and is not known
        to be slower. "simulate": the kernel, run for all ranks on the CPU; see `jaxtaxfree.simulator`.
      config: names the kernel and its settings, as of the operation; see `all_gather_matmul`.

    Returns: the result. Gate, bias, activation and residual are applied in f32; see the operations.

    Inside a `jax.shard_map` with manual axes arrays are local, and the product is JAX's own.

    Raises:
      ValueError: if gate, bias or residual do not fit, shardings are of several meshes, or the implementation,
        activation or setting does not exist; or JAX does.
      NotImplementedError: if implementation="fused" (or "simulate") cannot run here, or no operation is for such a
        product. The error gives all reasons.
    """
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

    def of_jax(operands: Sequence[jax.Array], out_sharding: Any) -> jax.Array:
        return jnp.einsum(
            *own(operands),
            out=out,
            optimize=optimize,
            precision=precision,
            preferred_element_type=preferred_element_type,
            _dot_general=_dot_general,
            out_sharding=out_sharding,
        )

    return product(
        Call(
            name="einsum",
            own=of_jax,
            operands=_promoted(arrays),
            labels=labels,
            reasons=reasons,
            in_shardings=in_shardings,
            out_sharding=out_sharding,
            gate=gate,
            bias=bias,
            activation=activation,
            residual=residual,
            implementation=implementation,
            keywords={"precision": precision, "preferred_element_type": preferred_element_type, "config": config},
        )
    )


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Sharding | None = None,
    in_shardings: Sequence[Sharding | None] | None = None,
    gate: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: str | Callable[..., jax.Array] | None = None,
    residual: jax.Array | None = None,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> jax.Array:
    """`jnp.matmul` of global arrays, as one kernel with the communication that its shardings ask for.

    It is `einsum` with the dimensions of a product of matrices: a [..., M, K], and b [K, N], which can be fused, or
    [..., K, N]. See `einsum` for the rules, the arguments and the errors.

    Returns: [..., M, N].
    """
    lhs, rhs = jnp.asarray(a), jnp.asarray(b)
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

    def of_jax(operands: Sequence[jax.Array], out_sharding: Any) -> jax.Array:
        how = {"precision": precision, "preferred_element_type": preferred_element_type}
        return jnp.matmul(*operands, **how, out_sharding=out_sharding)

    return product(
        Call(
            name="matmul",
            own=of_jax,
            operands=_promoted([lhs, rhs]),
            labels=labels,
            reasons=reasons,
            in_shardings=in_shardings,
            out_sharding=out_sharding,
            gate=gate,
            bias=bias,
            activation=activation,
            residual=residual,
            implementation=implementation,
            keywords={"precision": precision, "preferred_element_type": preferred_element_type, "config": config},
        )
    )


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Sharding | None = None,
    in_shardings: Sequence[Sharding | None] | None = None,
    gate: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: str | Callable[..., jax.Array] | None = None,
    residual: jax.Array | None = None,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> jax.Array:
    """`jax.lax.dot_general` of global arrays, as one kernel with the communication that its shardings ask for.

    See `einsum` for the rules, the arguments and the errors. A product with batch dimensions is JAX's own.

    Returns: [batch, dimensions of lhs, dimensions of rhs], without the contracted ones.
    """
    operands = jnp.asarray(lhs), jnp.asarray(rhs)
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dimension_numbers
    letters = iter(string.ascii_letters)
    names = [next(letters) for _ in range(operands[0].ndim)]
    same = {int(j): names[i] for i, j in zip((*lhs_contracted, *lhs_batch), (*rhs_contracted, *rhs_batch))}
    of_rhs = [same.get(j) or next(letters) for j in range(operands[1].ndim)]
    batch = [names[i] for i in lhs_batch]
    result = [*batch, *(x for x in names if x not in of_rhs), *(x for x in of_rhs if x not in names)]
    dtypes = [x.dtype for x in operands]
    reasons = [] if len(set(dtypes)) == 1 else [f"operands are of two dtypes, {dtypes[0]} and {dtypes[1]}"]

    def of_jax(operands: Sequence[jax.Array], out_sharding: Any) -> jax.Array:
        lhs, rhs = operands
        return lax.dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
        )

    return product(
        Call(
            name="dot_general",
            own=of_jax,
            operands=operands,
            labels=(tuple(names), tuple(of_rhs), tuple(result)),
            reasons=reasons,
            in_shardings=in_shardings,
            out_sharding=out_sharding,
            gate=gate,
            bias=bias,
            activation=activation,
            residual=residual,
            implementation=implementation,
            keywords={"precision": precision, "preferred_element_type": preferred_element_type, "config": config},
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
