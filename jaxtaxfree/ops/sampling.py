"""`top_k`, `sample_greedy`, `sample_top_k`: from logits whose vocabulary is sharded to the next tokens."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
from jax import lax

from jaxtaxfree.kernels.collectives.largest import largest_kernel
from jaxtaxfree.ops.collectives import all_gather
from jaxtaxfree.primitive import (
    Lasting,
    Unsupported,
    check_implementation,
    check_whole,
    collective,
    symbolic,
    takes_reference,
)
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.teams import check_axes, check_index, vary

# B sequences, V vocabulary, W ranks, k candidates.

CHUNK = 32  # logits of which the maximum is looked at first


def top_k(
    x: jax.Array, k: int, axis_name: str | Sequence[str], *, axis_index: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`lax.top_k` along a last dimension that is sharded: the k largest of all ranks, and where they are.

    Call it inside `jax.shard_map`. Ranks exchange their own k largest and no more, in one `all_gather` of 8 k bytes for
    each row and rank; where a rank has no more than k, all that it has. On NVIDIA GPUs k of 1 is one kernel.

    Args:
      x: this rank's part [..., V / W] of floats of up to 32 bits; the parts lie in the order of the ranks.
      k: how many, from 1 to V.
      axis_name: the mesh axis, or axes, along which the last dimension is sharded.
      axis_index: this rank's number, i32[] or i32[1], if the caller has it, as in `decode_step`.
      implementation: of the `all_gather`. For k of 1: "fused": the kernel. "xla": plain `lax`. None: the kernel, along
        several ranks. "simulate": the kernel, run for all ranks on the CPU.

    Returns: (values [..., k] of x's dtype, positions i32[..., k] in the whole dimension), the same on every rank, the
      largest first. Of equal values the one at the lower position comes first, so the lowest of them are taken. NaN is
      larger than any number. The kernel returns -0 as 0.
      By their types (`check_vma`) they vary along the axis, as what `all_gather` returns.

    Raises: what `all_gather` raises, and
      TypeError: if x has no floats, or floats of 64 bits, or k is no whole number.
      ValueError: if x has no dimension, or k is not from 1 to V.
    """
    axes, index = check_axes(axis_name, "top_k"), check_index(axis_index, "top_k")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 4:
        raise TypeError(f"top_k takes floats of up to 32 bits, not {x.dtype}.")
    if not x.ndim:
        raise ValueError("top_k needs an array with a dimension, not a scalar.")
    size, world, k = x.shape[-1], lax.axis_size(axes), check_whole("top_k", "k", k)
    if not 1 <= k <= size * world:
        raise ValueError(f"top_k must take from 1 to {size * world} of {size * world} values, not {k}.")
    if k > 1 and k >= size:
        # All that a rank has is asked for, so nothing is sorted before the whole is, and positions need not travel.
        whole = all_gather(x, axes, axis=x.ndim - 1, tiled=True, implementation=implementation)
        values, positions = lax.top_k(whole, k)
        return values, positions.astype(jnp.int32)
    if k == 1:
        return _top_1(x, axes, index, implementation)
    values, positions = _gathered(*_largest(x, k), size, axes, index, implementation)
    # Ranks lie in the order of their positions, and each has its own in order where they are equal; so the first of
    # equal ones is the lowest here, too.
    values, best = lax.top_k(values, k)
    return values.astype(x.dtype), jnp.take_along_axis(positions, best, axis=-1)


MOST_ROWS = 1 << 16
BLOCK = 4096  # numbers of a row that a program looks at in one step


def part_of(rows: int, size: int, world: int) -> int:
    """Numbers of a rank's row [size] that a program of `largest_kernel` looks at.

    Few rows fall into parts of some 2048 numbers, whose loads are all on their way at once. Many rows have programs
    enough, and one program of each row reads what all parts of all ranks have found.
    """
    parts = min(triton.cdiv(size, 2048), max(1, 512 // rows), max(1, 1024 // world))
    return size if parts == 1 else triton.cdiv(triton.cdiv(size, parts), 64) * 64  # whole lines of memory


def _top_1(
    x: jax.Array, axes: tuple[str, ...], index: jax.Array | None, implementation: str | None
) -> tuple[jax.Array, jax.Array]:
    check_implementation(implementation)
    reasons = _refusals(x, lax.axis_size(axes))
    if takes_reference("top_k", [x], implementation, reasons):
        values, positions = _reference(x, index, axes=axes)
    else:
        operands = [x] if index is None else [x, index]
        how: dict[str, Any] = {"axes": axes, "implementation": implementation, "config": ()}
        values, positions = top_1_p.bind(*(vary(each, axes) for each in operands), **how)
    return values, positions


def _reference(
    x: jax.Array, index: jax.Array | None = None, *, axes: tuple[str, ...], config: Any = None
) -> list[jax.Array]:
    """The largest of each row, and where it is, in plain `lax`: [values [..., 1], positions i32[..., 1]]."""
    del config
    at = jnp.argmax(x, axis=-1, keepdims=True)
    own = jnp.take_along_axis(x, at, axis=-1)
    pairs = _gathered(own, at, x.shape[-1], axes, index, "xla")
    # Ranks lie in the order of their positions, so the first of equal ones is the lowest here, too.
    best = jnp.argmax(pairs[0], axis=-1, keepdims=True)
    values, positions = (jnp.take_along_axis(each, best, axis=-1) for each in pairs)
    return [values.astype(x.dtype), positions]


def _gathered(
    values: jax.Array, positions: jax.Array, size: int, axes: tuple[str, ...], index: jax.Array | None,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """What all ranks have found [..., k] in rows [..., size] of theirs: f32[..., W * k], and where in whole rows."""
    rank = lax.axis_index(axes).astype(jnp.int32) if index is None else index
    at = positions.astype(jnp.int32) + size * rank
    # One message: values travel as the bits of an f32, which holds every narrower float.
    pair = jnp.stack([lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32), at], axis=-2)
    pair = all_gather(pair, axes, axis=values.ndim - 1, implementation=implementation)  # [..., W, 2, k]
    values, positions = (pair[..., i, :].reshape(*values.shape[:-1], -1) for i in range(2))
    return lax.bitcast_convert_type(values, jnp.float32), positions


def _fused(
    x: jax.Array, index: jax.Array | None = None, *, axes: tuple[str, ...], config: Any, compute_capability: int,
    implementation: str | None = None,
) -> list[jax.Array]:  # fmt: skip
    """The same by one kernel."""
    del config, compute_capability
    world = lax.axis_size(axes)
    if reasons := _refusals(x, world):
        raise Unsupported("top_k", reasons)
    rows, size = math.prod(x.shape[:-1]), x.shape[-1]
    part = part_of(rows, size, world)
    parts = triton.cdiv(size, part)
    values, positions = shmem_call(
        largest_kernel, x.reshape(rows, size), axis_name=axes, axis_index=index, implementation=implementation,
        out_type=(jax.ShapeDtypeStruct((rows,), x.dtype), jax.ShapeDtypeStruct((rows,), jnp.int32)),
        grid=rows * parts, messages={"found": jax.ShapeDtypeStruct((rows, world, parts, 2), np.int32)}, name="top_k",
        num_warps=4, cost_estimate={"flops": x.size, "bytes_accessed": x.size * x.dtype.itemsize},
        SIZE=size, PART=part, BLOCK=min(BLOCK, triton.next_power_of_2(part)),
    )  # fmt: skip
    shape = *x.shape[:-1], 1
    return [values.reshape(shape), positions.reshape(shape)]


def _refusals(x: Any, world: int) -> list[str]:
    """All that keeps the kernel from taking x."""
    if reasons := symbolic(x):
        return reasons
    if x.dtype.name not in ("float32", "bfloat16", "float16"):
        reasons.append(Lasting(f"it takes float32, bfloat16 and float16, not {x.dtype}: cast it"))
    rows = math.prod(x.shape[:-1])
    if not 0 < rows <= MOST_ROWS:
        reasons.append(f"it takes 1 to {MOST_ROWS} rows, not {rows}")
    if x.shape[-1] * world > 2**31 - 1:
        reasons.append(f"it takes rows of at most {2**31 - 1} of all ranks, not {x.shape[-1] * world}")
    return reasons


def _slower(x: Any, *index: Any, axes: tuple[str, ...], **_: Any) -> str | None:
    """Why XLA is taken."""
    del x, index
    return None if lax.axis_size(axes) > 1 else "there is one rank, so nothing to send"


def _batch(call: Any, operands: Any, dims: Any, size: int, **params: Any) -> Any:
    """A `jaxtaxfree.primitive.Batch`: all dimensions before the last one are rows."""
    del size, params
    (x, *index), (dim, *_) = operands, dims
    return call(jnp.moveaxis(x, dim, 0), *index)


top_1_p = collective("top_k", reference=_reference, fused=_fused, slower=_slower, batch=_batch)


def _largest(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k(x, k)`, of far fewer values at a time than x [..., S] has, because XLA sorts all that it is given.

    The k largest values lie in the k chunks of the largest maxima: were one of them in another chunk, each of those
    would have a value that is larger, or equal and at a lower position.
    """
    count = -(-x.shape[-1] // CHUNK)
    if count <= 2 * k:
        return lax.top_k(x, k)
    missing = count * CHUNK - x.shape[-1]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)
    chunks = x.reshape(*x.shape[:-1], count, CHUNK)
    _, at = lax.top_k(jnp.max(chunks, axis=-1), k)
    at = jnp.sort(at, axis=-1)  # so that of equal values the lowest position comes first
    some = jnp.take_along_axis(chunks, at[..., None], axis=-2)
    values, place = lax.top_k(some.reshape(*x.shape[:-1], k * CHUNK), k)
    return values, jnp.take_along_axis(at, place // CHUNK, axis=-1) * CHUNK + place % CHUNK


def sample_greedy(
    logits: jax.Array, axis_name: str | Sequence[str], *, axis_index: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:  # fmt: skip
    """The likeliest token of each sequence, as `jnp.argmax` of the logits of all ranks.

    Args:
      logits: of this rank's part of the vocabulary [B, V / W], as `decode_step` returns them.
      The other arguments are those of `top_k`.

    Returns: i32[B], the same on every rank. Of equal logits the lowest token wins.

    Raises: what `top_k` raises.
    """
    _, tokens = top_k(logits, 1, axis_name, axis_index=axis_index, implementation=implementation)
    return tokens[..., 0]


def sample_top_k(
    logits: jax.Array,
    key: jax.Array,
    axis_name: str | Sequence[str],
    *,
    k: int,
    temperature: jax.Array | float = 1.0,
    top_p: jax.Array | float = 1.0,
    axis_index: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """A token of each sequence, drawn from the k likeliest ones.

    It draws as `jax.random.categorical` does from the logits of those k, divided by the temperature. Of them `top_p`
    (nucleus sampling, Holtzman et al., https://arxiv.org/abs/1904.09751) keeps the fewest, likeliest first, whose
    probabilities, which are those among the k, add up to `top_p` or more.

    Args:
      logits: of this rank's part of the vocabulary [B, V / W], as `decode_step` returns them. A token whose logit is
        -inf is not drawn, unless all are.
      key: of `jax.random`, the same on every rank; another one in each step.
      k: how many tokens are candidates, from 1 to V.
      temperature: f32, one or [B]. 0 is the likeliest token.
      top_p: f32 above 0 up to 1, one or [B]. 1 keeps all k.
      The other arguments are those of `top_k`.

    Returns: i32[B], the same on every rank. Of equal logits the lower token is the likelier one, so it decides which
      tokens are among the k, and which `top_p` keeps.

    Raises: what `top_k` raises, and
      ValueError: if `temperature` or `top_p` is a number outside of its range, or an array of another shape.
    """
    if isinstance(temperature, numbers.Real) and not temperature >= 0:
        raise ValueError(f"temperature must not be negative, and is {temperature}.")
    if isinstance(top_p, numbers.Real) and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, and is {top_p}.")
    k, sequences = check_whole("sample_top_k", "k", k), jnp.shape(logits)[:-1]
    for name, x in (("temperature", temperature), ("top_p", top_p)):
        if jnp.ndim(x) and jnp.shape(x) != sequences:
            raise ValueError(f"{name} must be one number or {list(sequences)}, not {list(jnp.shape(x))}.")
    values, tokens = top_k(logits, k, axis_name, axis_index=axis_index, implementation=implementation)
    heat, share = (jnp.asarray(x, jnp.float32)[..., None] for x in (temperature, top_p))
    scores = values.astype(jnp.float32) / jnp.where(heat == 0, 1, heat)
    chances = jax.nn.softmax(scores, axis=-1)
    # A candidate stays while those before it do not reach `top_p`; the first one always does.
    before = jnp.cumsum(chances, axis=-1) - chances
    first = jnp.arange(k) == 0
    kept = first | ((before < share) & (heat != 0))
    drawn = jax.random.categorical(key, jnp.where(kept, scores, -jnp.inf), axis=-1)
    return jnp.take_along_axis(tokens, drawn[..., None], axis=-1)[..., 0]


__all__ = ["sample_greedy", "sample_top_k", "top_k"]
