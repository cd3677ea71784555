"""Attention's part of a decode step: one new token of each sequence over its old keys and itself.

The programs share the keys of each sequence and key/value head (a pair): an item is one of SPLITS parts of a pair's
blocks of keys. `attend` leaves of each item (acc, top, total), as FlashDecoding does: acc = sum_s 2^(score_s - top)
value_s and total = sum_s 2^(score_s - top), scores in units of log 2. `merge` adds up the items of a pair. The new
token's own key and value, which are in no block, belong to the first item.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxtaxfree.kernels.decode_step import phases
from jaxtaxfree.kernels.decode_step import ring as rings

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def lengths_of(given, SIZES: gl.constexpr):
    """Tokens in the cache, of each sequence."""
    B: gl.constexpr = SIZES.B
    lengths = ()
    for b in gl.static_range(B):
        lengths = lengths + (gl.maximum(gl.load(given.lengths + b), 0),)
    return lengths


@gluon.jit
def blocks_of(given, lengths, window, item, SIZES: gl.constexpr):
    """What an item has: (sequence, key/value head, tokens in the cache, slots from `begin` to before `end`, blocks from
    `first` to before `last`)."""
    B: gl.constexpr = SIZES.B
    BLOCK: gl.constexpr = given.old_keys.block_shape[0]
    pair = item // SIZES.SPLITS
    split = item % SIZES.SPLITS
    sequence = pair // SIZES.KV_HEADS
    length = lengths[0]
    for b in gl.static_range(1, B):
        length = gl.where(sequence == b, lengths[b], length)
    end = gl.minimum(length, SIZES.SLOTS)
    begin = gl.minimum(gl.maximum(length - window, 0), end)
    before = begin // BLOCK
    blocks = (end + (BLOCK - 1)) // BLOCK - before
    first = before + blocks * split // SIZES.SPLITS
    last = before + blocks * (split + 1) // SIZES.SPLITS
    return sequence, pair % SIZES.KV_HEADS, length, begin, end, first, last


@gluon.jit
def fetch(ring, position, given, lengths, layer, SIZES: gl.constexpr):
    """Begins to load the old keys and values of this program's items."""
    window = gl.load(given.windows + layer)
    BLOCK: gl.constexpr = given.old_keys.block_shape[0]
    ITEMS: gl.constexpr = SIZES.B * SIZES.KV_HEADS * SIZES.SPLITS
    for item in range(gl.program_id(0), ITEMS, SIZES.PROGRAMS):
        sequence, head, _, _, _, first, last = blocks_of(given, lengths, window, item, SIZES)
        row = ((layer * SIZES.B + sequence) * SIZES.KV_HEADS + head) * SIZES.SLOTS
        for block in range(first, last):
            position = rings.fetch(ring, position, given.old_keys, row + block * BLOCK, 0)
            position = rings.fetch(ring, position, given.old_values, row + block * BLOCK, 0)
    return position


@gluon.jit
def attend(ring, position, given, kept, results, lengths, window, table, layer, factor, SIZES: gl.constexpr):
    """Leaves the parts of this program's items in `kept`, and the new keys and values in the results.

    Args:
      lengths: what `lengths_of` returned.
      window, table: i32, those of the layer.
    """
    H: gl.constexpr = SIZES.H
    G: gl.constexpr = SIZES.HEADS // SIZES.KV_HEADS
    WIDTH: gl.constexpr = (SIZES.HEADS + 2 * SIZES.KV_HEADS) * H
    BLOCK: gl.constexpr = given.old_keys.block_shape[0]
    ITEMS: gl.constexpr = SIZES.B * SIZES.KV_HEADS * SIZES.SPLITS
    DTYPE: gl.constexpr = given.old_keys.dtype
    CAP: gl.constexpr = SIZES.SCORE_SOFT_CAP
    column = rings.columns_of(given.old_keys, 0)
    query_norm = phases.of_layer(given.query_norm, layer, H)
    key_norm = phases.of_layer(given.key_norm, layer, H)
    for item in range(gl.program_id(0), ITEMS, SIZES.PROGRAMS):
        sequence, head, length, begin, end, first, last = blocks_of(given, lengths, window, item, SIZES)
        row = table * SIZES.POSITIONS + gl.minimum(length, SIZES.POSITIONS - 1)
        cos, sin = rotation_of(given, row, column, SIZES)
        of = kept.qkv + sequence * WIDTH
        key = rotated(of + (SIZES.HEADS + head) * H, key_norm, cos, sin, column, SIZES)
        value = gl.load(of + (SIZES.HEADS + SIZES.KV_HEADS + head) * H + column)
        key, value = key.to(DTYPE), value.to(DTYPE)
        # The new token belongs to the first item; where the cache is full it is dropped.
        own = (item % SIZES.SPLITS == 0) & (length < SIZES.SLOTS)
        place = ((layer * SIZES.B + sequence) * SIZES.KV_HEADS + head) * H + column
        gl.store(results.new_keys + place, key, mask=(item % SIZES.SPLITS == 0) & (column < H))
        gl.store(results.new_values + place, value, mask=(item % SIZES.SPLITS == 0) & (column < H))
        key, value = key.to(gl.float32), value.to(gl.float32)
        queries, tops, totals, accs = (), (), (), ()
        for g in gl.static_range(G):
            at = of + (head * G + g) * H
            query = rotated(at, query_norm, cos, sin, column, SIZES) * (factor * SIZES.SCORE_SCALE)
            score = capped(gl.sum(gl.sum(query * key, 1), 0), CAP)
            queries = queries + (query,)
            tops = tops + (gl.where(own, score, float("-inf")),)
            totals = totals + (gl.where(own, 1.0, 0.0),)
            accs = accs + (gl.where(own, value, 0.0),)
        for block in range(first, last):
            slot = block * BLOCK + rings.rows_of(given.old_keys)
            seen = (slot >= begin) & (slot < end)
            keys, position = rings.take(ring, position, given.old_keys)
            weights, keeps, higher, sum_ = (), (), (), ()
            for g in gl.static_range(G):
                scores = capped(gl.sum(gl.sum(keys * queries[g][None, :, :], 2), 1), CAP)
                scores = gl.where(seen, scores, float("-inf"))
                top = gl.maximum(tops[g], gl.max(scores, 0))
                base = gl.where(top == float("-inf"), 0.0, top)
                weight = gl.exp2(scores - base)
                keep = gl.exp2(tops[g] - base)
                weights = weights + (weight,)
                keeps = keeps + (keep,)
                higher = higher + (top,)
                sum_ = sum_ + (totals[g] * keep + gl.sum(weight, 0),)
            tops, totals = higher, sum_
            values, position = rings.take(ring, position, given.old_values)
            # Behind the last key the cache may hold anything, and 0 * NaN is NaN.
            values = gl.where(seen[:, None, None], values, 0.0)
            added = ()
            for g in gl.static_range(G):
                added = added + (accs[g] * keeps[g] + gl.sum(values * weights[g][:, None, None], 0),)
            accs = added
        for g in gl.static_range(G):
            gl.store(kept.accs + (item * G + g) * H + column, accs[g])
            gl.store(kept.tops + (item * G + g) * 2, tops[g])
            gl.store(kept.tops + (item * G + g) * 2 + 1, totals[g])
    return position


@gluon.jit
def rotation_of(given, row, column, SIZES: gl.constexpr):
    """cos and sin for each column of a head, from a row of the tables."""
    HALF: gl.constexpr = SIZES.ROTATED // 2
    turns = column < SIZES.ROTATED
    angle = row * HALF + gl.where(column < HALF, column, column - HALF)
    cos = gl.load(given.cos + angle, mask=turns, other=1.0)
    return cos, gl.load(given.sin + angle, mask=turns, other=0.0)


@gluon.jit
def rotated(source, gain_ptr, cos, sin, column, SIZES: gl.constexpr):
    """The query or key of a head, f32 [H], normalised if there is a gain, and rotated."""
    HALF: gl.constexpr = SIZES.ROTATED // 2
    low = column < HALF
    turns = column < SIZES.ROTATED
    partner = gl.where(low, column + HALF, gl.where(turns, column - HALF, column))
    x = gl.load(source + column)
    y = gl.load(source + partner)
    if gain_ptr is not None:
        scale = gl.rsqrt(gl.sum(gl.sum(x * x, 1), 0) / SIZES.H + SIZES.EPS)
        x_gain, y_gain = gl.load(gain_ptr + column).to(gl.float32), gl.load(gain_ptr + partner).to(gl.float32)
        if SIZES.PLUS_ONE:
            x_gain, y_gain = x_gain + 1.0, y_gain + 1.0
        x, y = x * scale * x_gain, y * scale * y_gain
    return x * cos + gl.where(low, -y, y) * sin


@gluon.jit
def capped(score, SOFT_CAP: gl.constexpr):
    """A score in units of log 2, after the soft cap if there is one."""
    if SOFT_CAP > 0:
        # tanh(x) = 1 - 2 / (e^2x + 1), right at both ends.
        score = SOFT_CAP * (1 - 2 / (gl.exp2(score * (2 * LOG2_E / SOFT_CAP)) + 1))
    return score * LOG2_E


@gluon.jit
def merge(kept, factor, SIZES: gl.constexpr):
    """Adds up the parts of some columns of the heads, which all items have left."""
    H: gl.constexpr = SIZES.H
    G: gl.constexpr = SIZES.HEADS // SIZES.KV_HEADS
    MERGED: gl.constexpr = SIZES.MERGED
    PARTS: gl.constexpr = triton.next_power_of_2(SIZES.SPLITS)
    LANES: gl.constexpr = MERGED // 4
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    part = gl.arange(0, PARTS, gl.SliceLayout(1, LAYOUT))
    there = part < SIZES.SPLITS
    for unit in range(gl.program_id(0), SIZES.B * SIZES.HEADS * (H // MERGED), SIZES.PROGRAMS):
        head = unit // (H // MERGED)  # of all sequences
        column = unit % (H // MERGED) * MERGED + gl.arange(0, MERGED, gl.SliceLayout(0, LAYOUT))
        at = (head // G * SIZES.SPLITS + part) * G + head % G
        top = gl.load(kept.tops + at * 2, mask=there, other=float("-inf"))
        total = gl.load(kept.tops + at * 2 + 1, mask=there, other=0.0)
        acc = gl.load(
            kept.accs + at[:, None] * H + column[None, :], mask=there[:, None] & (column[None, :] < H), other=0.0
        )
        highest = gl.max(top, 0)
        weight = gl.exp2(top - gl.where(highest == float("-inf"), 0.0, highest))
        whole = gl.sum(weight * total, 0)
        result = gl.sum(acc * weight[:, None], 0) * (factor / gl.where(whole == 0, 1.0, whole))
        gl.store(kept.heads + head * H + column, result)
