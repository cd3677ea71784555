"""`top_k`, `sample_greedy`, `sample_top_k`: from logits whose vocabulary is sharded to the next tokens."""

import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxtaxfree.ops.collectives import all_gather
from jaxtaxfree.primitive import check_whole
from jaxtaxfree.teams import check_axes

# B sequences, V vocabulary, W ranks, k candidates.

CHUNK = 32  # logits of which the maximum is looked at first


def top_k(
    x: jax.Array, k: int, axis_name: str | Sequence[str], *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k` along a last dimension that is sharded: the k largest of all ranks, and where they are.

    Call it inside `jax.shard_map`. Ranks exchange their own k largest and no more, in one `all_gather` of 8 k bytes for
    each row and rank; where a rank has no more than k, all that it has.

    Args:
      x: this rank's part [..., V / W] of floats of up to 32 bits; the parts lie in the order of the ranks.
      k: how many, from 1 to V.
      axis_name: the mesh axis, or axes, along which the last dimension is sharded.
      implementation: of the `all_gather`.

    Returns: (values [..., k] of x's dtype, positions i32[..., k] in the whole dimension), the same on every rank, the
      largest first. Of equal values the one at the lower position comes first, so the lowest of them are taken.
      By their types (`check_vma`) they vary along the axis, as what `all_gather` returns.

    Raises: what `all_gather` raises, and
      TypeError: if x has no floats, or floats of 64 bits, or k is no whole number.
      ValueError: if x has no dimension, or k is not from 1 to V.
    """
    axes = check_axes(axis_name, "top_k")
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
        at = jnp.argmax(x, axis=-1, keepdims=True)
        own = jnp.take_along_axis(x, at, axis=-1)
    else:
        own, at = _largest(x, k)
    at = at.astype(jnp.int32) + size * lax.axis_index(axes).astype(jnp.int32)
    # One message: values travel as the bits of an f32, which holds every narrower float.
    pair = jnp.stack([lax.bitcast_convert_type(own.astype(jnp.float32), jnp.int32), at], axis=-2)
    pair = all_gather(pair, axes, axis=x.ndim - 1, implementation=implementation)  # [..., W, 2, k]
    values, positions = (pair[..., i, :].reshape(*x.shape[:-1], -1) for i in range(2))
    values = lax.bitcast_convert_type(values, jnp.float32)
    # Ranks lie in the order of their positions, and each has its own in order where they are equal; so the first of
    # equal ones is the lowest here, too.
    if k == 1:
        best = jnp.argmax(values, axis=-1, keepdims=True)
        values = jnp.take_along_axis(values, best, axis=-1)
    else:
        values, best = lax.top_k(values, k)
    return values.astype(x.dtype), jnp.take_along_axis(positions, best, axis=-1)


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


def sample_greedy(logits: jax.Array, axis_name: str | Sequence[str], *, implementation: str | None = None) -> jax.Array:
    """The likeliest token of each sequence, as `jnp.argmax` of the logits of all ranks.

    Args:
      logits: of this rank's part of the vocabulary [B, V / W], as `decode_step` returns them.
      The other arguments are those of `top_k`.

    Returns: i32[B], the same on every rank. Of equal logits the lowest token wins.

    Raises: what `top_k` raises.
    """
    _, tokens = top_k(logits, 1, axis_name, implementation=implementation)
    return tokens[..., 0]


def sample_top_k(
    logits: jax.Array,
    key: jax.Array,
    axis_name: str | Sequence[str],
    *,
    k: int,
    temperature: jax.Array | float = 1.0,
    top_p: jax.Array | float = 1.0,
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
    values, tokens = top_k(logits, k, axis_name, implementation=implementation)
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
