"""A key/value cache that is sharded along the sequence: which rank keeps which position, and `append_kv`."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtaxfree.primitive import check_whole
from jaxtaxfree.teams import check_axes, replicated, vary, varying

PLACEMENTS = ("contiguous", "round_robin")
KV_LAYOUTS = ("BSKH", "BKSH", "KBSH")
DEFAULT_BLOCK_SIZE = 64


class KVCache(NamedTuple):
    """One rank's part of a cache, as `append_kv` takes and returns it.

    Attributes:
      key: [B, S, K, H], or [B, K, S, H] with kv_layout="BKSH", or [K, B, S, H] with "KBSH". A paged cache has pages in
        place of B, and page_size in place of S.
      value: like key. Its head size may differ.
      key_scale, value_scale: f32 factors of the cached numbers: [], [K], or one for each token and head (the shape of
        `key` without its last dimension). None if the cache is not quantised.
    """

    key: jax.Array
    value: jax.Array
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Which positions of a sequence a rank keeps.

    Attributes:
      stretch: number of consecutive positions that a rank keeps, before those of the next rank follow.
      slots: number of positions that a rank has room for.
    """

    stretch: int
    slots: int

    def positions(self, rank: Any, world: int) -> jax.Array:
        """The position that each slot of a rank holds: i32 [S]."""
        slot = jnp.arange(self.slots, dtype=jnp.int32)
        return (slot // self.stretch * world + rank) * self.stretch + slot % self.stretch

    def in_ring(self, position: jax.Array, starts: jax.Array, world: int) -> jax.Array:
        """The place of a token in a ring that wraps round after the slots of all ranks; -1 if it has none.

        `slot_of` takes a place for a position, and `token_of` is the inverse.
        """
        places = world * self.slots
        place = jnp.mod(jnp.mod(starts, places).astype(jnp.int32) + jnp.clip(position, 0, places), places)
        return jnp.where((position >= 0) & (position < places), place, -1)

    def token_of(self, place: jax.Array, starts: jax.Array, world: int) -> jax.Array:
        """The token that lies in a place of such a ring, if its sequence is as long as that."""
        places = world * self.slots
        return jnp.mod(place - jnp.mod(starts, places).astype(jnp.int32), places)

    def slot_of(self, position: jax.Array, rank: Any, world: int) -> jax.Array:
        """The slot in which a rank keeps a position, or `slots`, which does not exist, if the rank does not keep it."""
        stretch = position // self.stretch
        slot = stretch // world * self.stretch + position % self.stretch
        return jnp.where((stretch % world == rank) & (position >= 0) & (slot < self.slots), slot, self.slots)


def placement_of(
    placement: str,
    block_size: int | None,
    slots: int,
    page_size: int | None,
    operation: str,
) -> Placement:
    """The placement that a caller names.

    Args:
      placement, block_size: as in `decode_attention`.
      slots: positions of a sequence that a rank has room for.
      page_size: None if the cache is not paged.
      operation: its name, for errors.

    Raises:
      ValueError: if the placement does not exist.
      TypeError: if `block_size` is not an integer, or is None where a symbolic shape leaves it open.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"{operation} has no placement {placement!r}: choose one of {_listed(PLACEMENTS)}.")
    if placement == "contiguous":
        if block_size is not None:
            raise ValueError(
                f'{operation} takes block_size={block_size} with placement="round_robin" only: contiguous parts have '
                "no blocks."
            )
        return Placement(stretch=slots, slots=slots)
    if block_size is None:
        block_size = page_size or _default_block_size(operation, slots)
    else:
        block_size = check_whole(operation, "block_size", block_size)
    if block_size < 1 or slots % block_size:
        raise ValueError(
            f"{operation} deals out blocks of block_size={block_size} positions, which does not divide the {slots} "
            "positions that this rank has room for."
        )
    return Placement(stretch=block_size, slots=slots)


def _default_block_size(operation: str, slots: int) -> int:
    """The largest power of 2 up to DEFAULT_BLOCK_SIZE that divides `slots`."""
    if not jax.export.is_symbolic_dim(slots):
        return math.gcd(slots, DEFAULT_BLOCK_SIZE)
    if slots % DEFAULT_BLOCK_SIZE:  # also where it cannot be known
        raise TypeError(
            f"{operation} takes block_size as a number here, because its default depends on whether "
            f"{DEFAULT_BLOCK_SIZE} divides the positions that this rank has room for, and they are symbolic, {slots}: "
            f"pass one that divides them, or make them a multiple, such as {DEFAULT_BLOCK_SIZE}*s."
        )
    return DEFAULT_BLOCK_SIZE


def cache_sizes(key: Any, kv_layout: str, block_tables: Any, operation: str) -> tuple[int, int | None, int]:
    """The sizes of a cache: (positions of a sequence that this rank has room for, page size or None, heads).

    Raises:
      ValueError: if `key` cannot be the keys of a cache.
    """
    if kv_layout not in KV_LAYOUTS:
        raise ValueError(f"{operation} has no kv_layout {kv_layout!r}: choose one of {_listed(KV_LAYOUTS)}.")
    if key.ndim != 4:
        raise ValueError(
            f"{operation} takes keys and values of 4 dimensions, {kv_layout} or pages in place of B and S, but key is "
            f"{list(key.shape)}."
        )
    length, heads = key.shape[kv_layout.index("S")], key.shape[kv_layout.index("K")]
    if block_tables is None:
        return length, None, heads
    if block_tables.ndim != 2 or not jnp.issubdtype(block_tables.dtype, jnp.integer):
        raise ValueError(
            f"{operation} takes block_tables of integers [B, pages of a sequence], not "
            f"{block_tables.dtype}{list(block_tables.shape)}."
        )
    return block_tables.shape[1] * length, length, heads


def cache_faults(cache: KVCache, heads: int) -> list[str]:
    """All reasons for which arrays are not the parts of one cache. `cache_sizes` has accepted the keys."""
    key, value = cache.key, cache.value
    shapes = (), (heads,), key.shape[:3]
    wrong = []
    if value.ndim != 4 or value.shape[:3] != key.shape[:3]:
        wrong.append(f"key is {list(key.shape)} and value {list(value.shape)}, which differ in more than the head size")
    if key.dtype != value.dtype:
        wrong.append(f"key is {key.dtype} and value {value.dtype}")
    for name, scale in (("key_scale", cache.key_scale), ("value_scale", cache.value_scale)):
        if scale is None:
            if key.dtype.itemsize == 1 or not jnp.issubdtype(key.dtype, jnp.floating):
                wrong.append(f"a cache of {key.dtype} needs a {name}")
        elif scale.shape not in shapes or (scale.ndim and not jnp.issubdtype(scale.dtype, jnp.floating)):
            known = f"[], [{heads}] or {list(shapes[2])}"
            wrong.append(f"{name} must be f32 {known}, not {scale.dtype}{list(scale.shape)}")
    return wrong


def check_sharded(operation: str, key: jax.Array, value: jax.Array, block_tables: Any, axes: tuple[str, ...]) -> None:
    """Raises ValueError if a cache is known to be the same on several ranks: each rank would count it again."""
    for name, x in (("key", key), ("value", value)):
        same = replicated(x, axes)
        if block_tables is not None:  # Ranks may have pages of their own in one pool.
            same = [axis for axis in same if axis in replicated(block_tables, axes)]
        if same:
            along = tuple(same)
            raise ValueError(
                f"{operation} takes a cache that is sharded along the sequence over axis_name={axes}, but its {name} "
                f"is the same on every rank along {along}, and each copy would count as other positions: shard it, "
                "leave out the axes along which it is whole, or, if the copies are meant as other positions (those of "
                f"an empty cache, say), pass jax.lax.pcast({name}, {along}, to='varying')."
            )


def append_kv(
    cache: KVCache | tuple,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    axis_name: str | Sequence[str] | None,
    *,
    placement: str = "contiguous",
    block_size: int | None = None,
    kv_layout: str = "BSKH",
    block_tables: jax.Array | None = None,
    starts: jax.Array | None = None,
) -> Any:
    """Puts the keys and values of new tokens into a cache that is sharded along the sequence.

    Call it inside `jax.shard_map`, before `decode_attention` with the new lengths. Nothing is sent: every rank has all
    new tokens, and keeps those that belong to it.

    Args:
      cache: this rank's part: a `KVCache`, or a tuple (key, value) or (key, value, key_scale, value_scale). Scales of a
        tensor or a head are taken as they are. Where there is a scale for each token and head, `append_kv` chooses the
        scales of the new tokens: the largest magnitude becomes the largest number of an 8-bit dtype, or 1 in a wider
        dtype.
      key: keys of the new tokens, [B, K, H] or [B, T, K, H], the same on every rank.
      value: like key. Its head size may differ.
      lengths: i32[B], keys in the cache so far, counted over all ranks. The first new token gets this position.
      axis_name: the mesh axis, or axes, along which the cache is sharded. () or None: it is not, and the call may stand
        outside of `jax.shard_map`.
      placement, block_size, kv_layout, block_tables: as in `decode_attention`.
      starts: i32[B], as in `decode_attention`. The first new token of a sequence goes to the place (starts + lengths)
        modulo the places of all ranks. To let it take the place of the oldest token of a full ring, move `starts` past
        that one, and make `lengths` smaller by as much.

    Returns: the cache with the new tokens. It has the type of `cache`. Tokens at positions past its end or before its
      beginning are dropped, with `starts` too, and so are tokens on pages that are -1. To give a sequence no token, set
      its length to -T.

    Raises:
      ValueError: if the arguments do not fit together. Also if `shard_map` knows (`check_vma=True`) that several ranks
        have the same cache. For an empty cache that you make inside, say
        `jax.lax.pcast(cache, axis_name, to="varying")`.
      TypeError: if `block_size` is not an integer, or is None where a symbolic shape leaves it open.
      NameError: if `axis_name` is not bound.
    """
    axes = check_axes(axis_name, "append_kv", alone=True)
    if not isinstance(cache, tuple | list) or len(cache) not in (2, 4):
        found = f"of {len(cache)} parts" if isinstance(cache, tuple | list) else repr(cache)
        raise ValueError(f"append_kv takes a cache (key, value) or (key, value, key_scale, value_scale), not {found}.")
    scales = (None if x is None else jnp.asarray(x) for x in cache[2:])
    parts = KVCache(jnp.asarray(cache[0]), jnp.asarray(cache[1]), *scales)
    key, value, lengths = jnp.asarray(key), jnp.asarray(value), jnp.asarray(lengths)
    key, value = (x[:, None] if x.ndim == 3 else x for x in (key, value))
    block_tables = None if block_tables is None else jnp.asarray(block_tables)
    slots, page_size, heads = cache_sizes(parts.key, kv_layout, block_tables, "append_kv")
    if wrong := cache_faults(parts, heads):
        raise ValueError(f"append_kv cannot take this cache: {'; '.join(wrong)}.")
    check_sharded("append_kv", parts.key, parts.value, block_tables, axes)
    starts = None if starts is None else jnp.asarray(starts)
    of_sequences = parts.key.shape[kv_layout.index("B")] if block_tables is None else block_tables.shape[0]
    _check_new_tokens(parts, key, value, lengths, starts, heads, of_sequences, paged=block_tables is not None)
    place = placement_of(placement, block_size, slots, page_size, "append_kv")
    world = lax.axis_size(axes)

    position = lengths.astype(jnp.int32)[:, None] + jnp.arange(key.shape[1], dtype=jnp.int32)[None]  # [B, T]
    if starts is not None:
        position = place.in_ring(position, starts[:, None], world)
    slot = place.slot_of(position, lax.axis_index(axes), world)
    if page_size is None or block_tables is None:
        row, inside = jnp.arange(key.shape[0])[:, None], slot
    else:
        row = jnp.take_along_axis(block_tables, jnp.minimum(slot // page_size, block_tables.shape[1] - 1), axis=1)
        inside = slot % page_size
    # A token of another rank, or on no page, gets a row past the end, each its own, and is dropped.
    past = parts.key.shape[kv_layout.index("B")] + jnp.arange(slot.size).reshape(slot.shape)
    row = jnp.where((slot < slots) & (row >= 0), row, past)
    everything = slice(None)
    at = {"BSKH": (row, inside), "BKSH": (row, everything, inside), "KBSH": (everything, row, inside)}[kv_layout]

    def put(array: jax.Array, new: jax.Array) -> jax.Array:
        if kv_layout == "KBSH":  # the two indices stand together, behind the heads
            new = jnp.moveaxis(new, 2, 0)
        along = set(axes) | varying(array) | varying(new) | varying(row)
        return vary(array, along).at[at].set(vary(new, along).astype(array.dtype), mode="drop", unique_indices=True)

    def put_scale(scales: jax.Array | None, new: jax.Array | None) -> jax.Array | None:
        # Scales of a tensor or a head stay as they are.
        return scales if scales is None or new is None or scales.ndim < 3 else put(scales, new)

    new_key, key_scale = quantised(key, parts.key.dtype, parts.key_scale)
    new_value, value_scale = quantised(value, parts.value.dtype, parts.value_scale)
    out = (
        put(parts.key, new_key),
        put(parts.value, new_value),
        put_scale(parts.key_scale, key_scale),
        put_scale(parts.value_scale, value_scale),
    )
    return like(cache, out)


def like[C: Sequence[Any]](cache: C, parts: Sequence[jax.Array | None]) -> C:
    """A cache of the same type and length with these parts; those that are left over are None in it."""
    same: Any = type(cache)
    found = [*parts[: len(cache)], *[None] * (len(cache) - len(parts))]
    return same(*found) if hasattr(cache, "_fields") else same(found)


def quantised(x: jax.Array, dtype: Any, scale: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """x [B, T, K, H] in the cache's dtype, and its scales [B, T, K] if the cache has one for each token and head."""
    if scale is None:
        return x, None
    x = x.astype(jnp.float32)
    integers = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if integers else jnp.finfo(dtype).max)
    if scale.ndim >= 3:
        # In wider floats the largest number would give scales that f32 does not hold, and gain nothing.
        scale = jnp.max(jnp.abs(x), axis=-1) / (largest if jnp.dtype(dtype).itemsize == 1 else 1.0)
        by = scale[..., None]
    else:
        by = scale if scale.ndim == 0 else scale[None, None, :, None]
    # Nothing is divided by a scale of 0, not even in derivatives, where 0 * NaN would be NaN.
    x = jnp.clip(jnp.where(by > 0, x / jnp.where(by > 0, by, 1.0), 0.0), -largest, largest)
    return (jnp.round(x) if integers else x), scale


def _check_new_tokens(
    cache: KVCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    starts: jax.Array | None,
    heads: int,
    sequences: int,
    *,
    paged: bool,
) -> None:
    for name, new, old in (("key", key, cache.key), ("value", value, cache.value)):
        if new.shape != (*key.shape[:2], heads, old.shape[3]):
            raise ValueError(
                f"append_kv takes a new {name} [B, {heads}, {old.shape[3]}] or [B, T, {heads}, {old.shape[3]}] for "
                f"this cache, the same B and T for both, not {list(new.shape)}."
            )
    b = key.shape[0]
    if sequences != b:
        what = "block_tables" if paged else "a cache"
        raise ValueError(f"append_kv has {what} of {sequences} sequences and new tokens of {b}.")
    for name, x in (("lengths", lengths), ("starts", starts)):
        if x is not None and (x.shape != (b,) or not jnp.issubdtype(x.dtype, jnp.integer)):
            raise ValueError(f"append_kv takes {name} i32[{b}], not {np.dtype(x.dtype)}{list(x.shape)}.")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
