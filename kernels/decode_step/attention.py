"""Attention's part of a decode step: one new token of each sequence over its old keys and itself.

The programs share the keys of each sequence and key/value head (a pair): an item is one of SPLITS parts of a pair's
blocks of keys. `attend` leaves of each item (acc, top, total), as FlashDecoding does: acc = sum_s 2^(score_s - top)
value_s and total = sum_s 2^(score_s - top), scores in units of log 2. `merge` adds up the items of a pair. The new
token's own key and value, which are in no block, belong to the first item. `put` stores them in the cache.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.decode_step import packed, phases, tensor_cores
from jaxtaxfree.kernels.decode_step import ring as rings

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def lengths_of(given, SIZES: gl.constexpr):
    """Tokens in the cache, of each sequence; () if there are more than registers should be spent on."""
    B: gl.constexpr = SIZES.B
    lengths = ()
    if not SIZES.TENSOR_CORES:
        for b in gl.static_range(B):
            lengths = lengths + (length_at(given, b),)
    return lengths


@gluon.jit
def length_at(given, sequence):
    return gl.maximum(gl.load(given.lengths + sequence), 0)


@triton.constexpr_function
def block_of(desc, sizes):
    """How many keys are in a block: [slots, groups of 64 columns, 64], for tensor cores [groups, slots, 64]."""
    return desc.block_shape[1 if sizes.ATTENTION_CORES else 0]


@gluon.jit
def blocks_of(given, lengths, window, item, SIZES: gl.constexpr):
    """What an item has: (sequence, key/value head, tokens in the cache, slots from `begin` to before `end`, blocks from
    `first` to before `last`)."""
    BLOCK: gl.constexpr = block_of(given.old_keys, SIZES)
    pair = item // SIZES.SPLITS
    split = item % SIZES.SPLITS
    sequence = pair // SIZES.KV_HEADS
    if len(lengths) == 0:
        length = length_at(given, sequence)
    else:
        length = lengths[0]
        for b in gl.static_range(1, len(lengths)):
            length = gl.where(sequence == b, lengths[b], length)
    end = gl.minimum(length, SIZES.SLOTS)
    begin = gl.minimum(gl.maximum(length - window, 0), end)
    before = begin // BLOCK
    blocks = (end + (BLOCK - 1)) // BLOCK - before
    first = before + blocks * split // SIZES.SPLITS
    last = before + blocks * (split + 1) // SIZES.SPLITS
    return sequence, pair % SIZES.KV_HEADS, length, begin, end, first, last


@gluon.jit
def row_of(given, layer, sequence, head, slot, SIZES: gl.constexpr):
    """The row of the cache in which a slot of a sequence lies. Of pages an entry that is none is the nearest one."""
    if given.pages is None:
        row = ((layer * SIZES.B + sequence) * SIZES.KV_HEADS + head) * SIZES.SLOTS + slot
    else:
        page = gl.minimum(gl.maximum(gl.load(entry_of(given, sequence, slot, SIZES)), 0), SIZES.POOL - 1)
        row = ((layer * SIZES.POOL + page) * SIZES.KV_HEADS + head) * SIZES.PAGE + slot % SIZES.PAGE
    return row


@gluon.jit
def entry_of(given, sequence, slot, SIZES: gl.constexpr):
    """Where it stands in which page a slot of a sequence is."""
    return given.pages + sequence * (SIZES.SLOTS // SIZES.PAGE) + slot // SIZES.PAGE


@gluon.jit
def has_place(given, sequence, length, SIZES: gl.constexpr):
    """Whether the cache has a place for a token behind so many."""
    there = (length >= 0) & (length < SIZES.SLOTS)
    if given.pages is not None:
        page = gl.load(entry_of(given, sequence, gl.where(there, length, 0), SIZES))
        there = there & (page >= 0) & (page < SIZES.POOL)
    return there


@gluon.jit
def fetch(ring, position, given, lengths, layer, SIZES: gl.constexpr):
    """Begins to load the old keys and values of this program's items."""
    window = phases.of_each_layer(given.windows, layer, SIZES.WINDOW)
    BLOCK: gl.constexpr = block_of(given.old_keys, SIZES)
    ITEMS: gl.constexpr = SIZES.B * SIZES.KV_HEADS * SIZES.SPLITS
    for item in range(gl.program_id(0), ITEMS, SIZES.PROGRAMS):
        sequence, head, _, _, _, first, last = blocks_of(given, lengths, window, item, SIZES)
        for block in range(first, last):
            row = row_of(given, layer, sequence, head, block * BLOCK, SIZES)
            position = fetch_block(ring, position, given.old_keys, row, SIZES)
            position = fetch_block(ring, position, given.old_values, row, SIZES)
    return position


@gluon.jit
def fetch_block(ring, position, desc, row, SIZES: gl.constexpr):
    """Begins to load a block of keys or values; returns the next position."""
    if SIZES.ATTENTION_CORES:
        position = tensor_cores.fetch(ring, position, desc, 0, row, SIZES.IN_FLIGHT, SIZES.PACE)
    else:
        position = rings.fetch(ring, position, desc, row, 0, SIZES.IN_FLIGHT, SIZES.PACE)
    return position


@triton.constexpr_function
def threads_of(block_shape):
    """How many threads share a group of a row: each has 8 columns, of which queries and results take registers."""
    return block_shape[2] // 8


@triton.constexpr_function
def layout_of(block_shape, warps):
    """The layout of a block [again, slots, groups, columns] of keys or values: what a thread has of a slot is its own.

    It is the ring's layout of the block [again * slots, groups, columns].
    """
    of = rings.layout_of(block_shape, warps, threads_of(block_shape))
    return gl.BlockedLayout(
        [1, *of.size_per_thread], [1, *of.threads_per_warp], [1, *of.warps_per_cta], [3, 2, 1, 0]
    )  # fmt: skip


@triton.constexpr_function
def slots_of(block_shape, warps):
    """How many keys of a block are on different threads."""
    of = rings.layout_of(block_shape, warps, threads_of(block_shape))
    return min(block_shape[0], of.threads_per_warp[0] * of.warps_per_cta[0])


@gluon.jit
def take(ring, position, desc):
    """The next block of keys or values, f32 [again, slots, groups, columns of one]; and the next position."""
    SLOTS: gl.constexpr = slots_of(desc.block_shape, gl.num_warps())
    AGAIN: gl.constexpr = desc.block_shape[0] // SLOTS
    block, position = rings.take(ring, position, desc, threads_of(desc.block_shape))
    block = block.reshape([AGAIN, SLOTS, desc.block_shape[1], desc.block_shape[2]])
    return gl.convert_layout(block, layout_of(desc.block_shape, gl.num_warps())), position


@gluon.jit
def rows_of(desc):
    """The rows of a block: i32 [again, slots]."""
    SLOTS: gl.constexpr = slots_of(desc.block_shape, gl.num_warps())
    LAYOUT: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, layout_of(desc.block_shape, gl.num_warps())))
    again = gl.arange(0, desc.block_shape[0] // SLOTS, gl.SliceLayout(1, LAYOUT))[:, None]
    return again * SLOTS + gl.arange(0, SLOTS, gl.SliceLayout(0, LAYOUT))[None, :]


@triton.constexpr_function
def columns_layout(block_shape, warps):
    """The layout of what every key of a block is multiplied by."""
    return gl.SliceLayout(0, gl.SliceLayout(1, layout_of(block_shape, warps)))


@gluon.jit
def columns_of(desc):
    """The columns of a block: i32 [groups, columns of one]."""
    WIDTH: gl.constexpr = desc.block_shape[2]
    LAYOUT: gl.constexpr = columns_layout(desc.block_shape, gl.num_warps())
    group = gl.arange(0, desc.block_shape[1], gl.SliceLayout(1, LAYOUT))[:, None]
    return group * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def attend(me, ring, position, given, kept, lengths, window, table, layer, factor, SIZES: gl.constexpr):
    """Leaves the parts of this program's items in `kept`, and the new keys and values.

    Threads that have different keys go on by themselves, each with a softmax of its own, and `together` adds them up.

    Args:
      lengths: what `lengths_of` returned.
      window, table: i32, those of the layer.
    """
    H: gl.constexpr = SIZES.H
    G: gl.constexpr = SIZES.HEADS // SIZES.KV_HEADS
    WIDTH: gl.constexpr = (SIZES.HEADS + 2 * SIZES.KV_HEADS) * H
    BLOCK: gl.constexpr = given.old_keys.block_shape[0]
    ITEMS: gl.constexpr = SIZES.B * SIZES.KV_HEADS * SIZES.SPLITS
    CAP: gl.constexpr = SIZES.SCORE_SOFT_CAP
    EIGHT: gl.constexpr = given.old_key_scales is not None
    MANY: gl.constexpr = G > 4  # heads, whose queries lie in shared memory, for lack of registers
    COLUMNS: gl.constexpr = columns_layout(given.old_keys.block_shape, gl.num_warps())
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SHAPE: gl.constexpr = given.old_keys.block_shape
    shelf = ring.sums.reinterpret(gl.float32, [triton.next_power_of_2(G), SHAPE[1], SHAPE[2]], PLAIN)
    column = columns_of(given.old_keys)
    rows = rows_of(given.old_keys)
    query_norm = phases.of_layer(given.query_norm, layer, H)
    key_norm = phases.of_layer(given.key_norm, layer, H)
    for item in range(gl.program_id(0), ITEMS, SIZES.PROGRAMS):
        sequence, head, length, begin, end, first, last = blocks_of(given, lengths, window, item, SIZES)
        row = table * SIZES.POSITIONS + gl.minimum(length, SIZES.POSITIONS - 1)
        cos, sin = rotation_of(given, row, column, SIZES)
        of = kept.qkv + sequence * WIDTH
        key = rotated(of + (SIZES.HEADS + head) * H, key_norm, cos, sin, column, SIZES)
        value = gl.load(of + (SIZES.HEADS + SIZES.KV_HEADS + head) * H + column)
        key, key_unit = stored(key, given)
        value, value_unit = stored(value, given)
        # The new token belongs to one thread of the first item; where the cache is full it is dropped.
        own = (rows == 0) & (item % SIZES.SPLITS == 0) & (length < SIZES.SLOTS)
        own_value = gl.where(own[:, :, None, None], value[None, None, :, :] * value_unit, 0.0)
        queries, tops, totals, accs = (), (), (), ()
        for g in gl.static_range(G):
            at = of + (head * G + g) * H
            query = rotated(at, query_norm, cos, sin, column, SIZES) * (factor * SIZES.SCORE_SCALE)
            score = capped(gl.sum(gl.sum(query * key, 1), 0) * key_unit, CAP)
            if MANY:
                shelf.index(g).store(query)
            else:
                queries = queries + (query,)
            tops = tops + (gl.max(gl.where(own, score, float("-inf")), 0, keep_dims=True),)
            totals = totals + (gl.max(gl.where(own, 1.0, 0.0), 0, keep_dims=True),)
            accs = accs + (gl.sum(own_value, 0, keep_dims=True),)
        # After the loads, which do not pass stores.
        pair = (layer * SIZES.B + sequence) * SIZES.KV_HEADS + head
        keep_new(me, kept, given, key, key_unit, value, value_unit, pair, column, item, SIZES)
        for block in range(first, last):
            slot = block * BLOCK + rows
            seen = (slot >= begin) & (slot < end)
            if EIGHT:  # on their way while the block comes
                of_block = row_of(given, layer, sequence, head, block * BLOCK, SIZES) + rows
                key_scale = gl.load(given.old_key_scales + of_block, mask=seen, other=0.0)
                value_scale = gl.load(given.old_value_scales + of_block, mask=seen, other=0.0)
            keys, position = take(ring, position, given.old_keys)
            weights, keeps, higher, sum_ = (), (), (), ()
            for g in gl.static_range(G):
                if MANY:
                    query = shelf.index(g).load(COLUMNS)
                else:
                    query = queries[g]
                scores = gl.sum(gl.sum(keys * query[None, None, :, :], 3), 2)
                if EIGHT:
                    scores = scores * key_scale
                scores = capped(scores, CAP)
                scores = gl.where(seen, scores, float("-inf"))
                top = gl.maximum(tops[g], gl.max(scores, 0, keep_dims=True))
                base = gl.where(top == float("-inf"), 0.0, top)
                weight = gl.exp2(scores - base)
                keep = gl.exp2(tops[g] - base)
                if EIGHT:
                    weights = weights + (weight * value_scale,)
                else:
                    weights = weights + (weight,)
                keeps = keeps + (keep,)
                higher = higher + (top,)
                sum_ = sum_ + (totals[g] * keep + gl.sum(weight, 0, keep_dims=True),)
            tops, totals = higher, sum_
            values, position = take(ring, position, given.old_values)
            # Behind the last key the cache may hold anything, and 0 * NaN is NaN.
            values = gl.where(seen[:, :, None, None], values, 0.0)
            added = ()
            for g in gl.static_range(G):
                more = gl.sum(values * weights[g][:, :, None, None], 0, keep_dims=True)
                added = added + (accs[g] * keeps[g][:, :, None, None] + more,)
            accs = added
        together(ring, given.old_keys, kept, item, tops, totals, accs, SIZES)
    return position


@gluon.jit
def keep_new(me, kept, given, key, key_unit, value, value_unit, pair, column, item, SIZES: gl.constexpr):
    """The first item of a pair, one of those of all layers, leaves what `stored` made of key and value for `put`."""
    H: gl.constexpr = SIZES.H
    PAIRS: gl.constexpr = SIZES.LAYERS * SIZES.B * SIZES.KV_HEADS
    DTYPE: gl.constexpr = given.old_keys.dtype
    place = pair * H + column
    new = shmem.scratch(me, kept.new, DTYPE)
    gl.store(new + place, key.to(DTYPE), mask=(item % SIZES.SPLITS == 0) & (column < H))
    gl.store(new + PAIRS * H + place, value.to(DTYPE), mask=(item % SIZES.SPLITS == 0) & (column < H))
    if given.old_key_scales is not None:
        scales = shmem.scratch(me, kept.new_scales, gl.float32)
        gl.store(scales + pair, key_unit, mask=item % SIZES.SPLITS == 0)
        gl.store(scales + PAIRS + pair, value_unit, mask=item % SIZES.SPLITS == 0)


@triton.constexpr_function
def pairs_layout(h, warps):
    """The layout of keys or values [pairs, h] that are copied: a thread has 8 columns."""
    return gl.BlockedLayout([1, 8], [256 // h, h // 8], [warps, 1], [1, 0])


@gluon.jit
def put(me, given, kept, results, SIZES: gl.constexpr):
    """Stores the new keys and values in the cache, as far as it has room for them: those of all layers at once.

    All programs have met since any has read the cache, also what blocks have of it behind the last key.
    """
    H: gl.constexpr = SIZES.H
    PAIRS: gl.constexpr = SIZES.LAYERS * SIZES.B * SIZES.KV_HEADS
    AT_ONCE: gl.constexpr = gl.num_warps() * 256 // H
    LAYOUT: gl.constexpr = pairs_layout(H, gl.num_warps())
    new = shmem.scratch(me, kept.new, given.old_keys.dtype)
    scales = shmem.scratch(me, kept.new_scales, gl.float32)
    column = gl.arange(0, H, gl.SliceLayout(0, LAYOUT))[None, :]
    for begin in range(gl.program_id(0) * AT_ONCE, PAIRS, SIZES.PROGRAMS * AT_ONCE):
        pair = begin + gl.arange(0, AT_ONCE, gl.SliceLayout(1, LAYOUT))
        sequence = pair // SIZES.KV_HEADS % SIZES.B
        length = gl.load(given.lengths + sequence, mask=pair < PAIRS, other=-1)  # as it was given
        own = has_place(given, sequence, length, SIZES)
        there = own[:, None] & (column < H)
        key = gl.load(new + pair[:, None] * H + column, mask=there)
        value = gl.load(new + (PAIRS + pair[:, None]) * H + column, mask=there)
        layer = pair // (SIZES.KV_HEADS * SIZES.B)
        slot = gl.where(own, length, 0)
        row = row_of(given, layer, sequence, pair % SIZES.KV_HEADS, slot, SIZES)
        row = row.to(gl.int64)  # a cache may have more than 2^31 elements
        gl.store(results.cache_keys + row[:, None] * H + column, key, mask=there)
        gl.store(results.cache_values + row[:, None] * H + column, value, mask=there)
        if results.cache_key_scales is not None:
            key_scale = gl.load(scales + pair, mask=own)
            value_scale = gl.load(scales + PAIRS + pair, mask=own)
            gl.store(results.cache_key_scales + row, key_scale, mask=own)
            gl.store(results.cache_value_scales + row, value_scale, mask=own)


@gluon.jit
def stored(x, given):
    """A new key or value as the cache has it: (numbers of its dtype, in f32; their scale or, of 16 bits, 1).

    The scale is that of `append_kv`: the largest magnitude becomes the largest number.
    """
    x = x.to(given.final_norm.dtype.element_ty).to(gl.float32)
    if given.old_key_scales is None:
        scale = 1.0
    else:
        scale = gl.max(gl.max(gl.maximum(x, -x), 1), 0) / largest_of(given.old_keys.dtype)
        x = rounded(x, scale, given.old_keys.dtype)
    return x, scale


@triton.constexpr_function
def largest_of(dtype):
    """The largest number of a cache of 8 bits."""
    return 127.0 if dtype == gl.int8 else 448.0


@gluon.jit
def rounded(x, scale, DTYPE: gl.constexpr):
    """x / scale as numbers of DTYPE, of 8 bits, in f32."""
    LARGEST: gl.constexpr = largest_of(DTYPE)
    x = gl.where(scale > 0, x / gl.where(scale > 0, scale, 1.0), 0.0)
    x = gl.minimum(gl.maximum(x, -LARGEST), LARGEST)
    if DTYPE == gl.int8:
        x = packed.nearest(x)
    else:
        x = x.to(DTYPE).to(gl.float32)
    return x


@gluon.jit
def together(ring, desc, kept, item, tops, totals, accs, SIZES: gl.constexpr):
    """Adds up what the threads have of an item, of each of its heads (top, total, acc), and leaves it in `kept`."""
    H: gl.constexpr = SIZES.H
    G: gl.constexpr = len(accs)
    WARPS: gl.constexpr = gl.num_warps()
    SLOTS: gl.constexpr = slots_of(desc.block_shape, WARPS)
    OF_RING: gl.constexpr = rings.layout_of(desc.block_shape, WARPS, threads_of(desc.block_shape))
    LANES: gl.constexpr = min(SLOTS, OF_RING.threads_per_warp[0])
    PARTS: gl.constexpr = SLOTS // LANES  # warps that have different slots
    HEADS: gl.constexpr = triton.next_power_of_2(G)
    AT_ONCE: gl.constexpr = min(HEADS, SIZES.SUMS // (PARTS * H))
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    EACH: gl.constexpr = gl.BlockedLayout([PARTS], [32], [WARPS], [0])  # each thread has all
    OF_HEADS: gl.constexpr = gl.BlockedLayout([1, PARTS], [32, 1], [WARPS, 1], [1, 0])
    OF_COLUMNS: gl.constexpr = gl.BlockedLayout([PARTS, 2], [1, 32], [1, WARPS], [1, 0])
    few = ring.few.reinterpret(gl.float32, [2 * HEADS, PARTS], LINE)
    for g in gl.static_range(G):
        few.index(g).store(gl.max(tops[g].reshape([PARTS, LANES]), 1))
    parts = ring.sums.reinterpret(gl.float32, [PARTS, AT_ONCE * H], PLAIN)
    for begin in gl.static_range(0, G, AT_ONCE):
        for g in gl.static_range(begin, min(begin + AT_ONCE, G)):
            highest = gl.max(few.index(g).load(EACH), 0)
            weight = gl.exp2(tops[g] - gl.where(highest == float("-inf"), 0.0, highest))
            few.index(HEADS + g).store(gl.sum((totals[g] * weight).reshape([PARTS, LANES]), 1))
            acc = (accs[g] * weight[:, :, None, None]).reshape([PARTS, LANES, H])
            parts.slice((g - begin) * H, H, dim=1).store(gl.sum(acc, 1))
        column = gl.arange(0, AT_ONCE * H, gl.SliceLayout(0, OF_COLUMNS))
        acc = gl.sum(parts.load(OF_COLUMNS), 0)
        gl.store(kept.accs + (item * G + begin) * H + column, acc, mask=begin * H + column < G * H)
    head = gl.arange(0, HEADS, gl.SliceLayout(1, OF_HEADS))
    both = ring.few.reinterpret(gl.float32, [2, HEADS, PARTS], PLAIN)
    at = (item * G + head) * 2
    gl.store(kept.tops + at, gl.max(both.index(0).load(OF_HEADS), 1), mask=head < G)
    gl.store(kept.tops + at + 1, gl.sum(both.index(1).load(OF_HEADS), 1), mask=head < G)


@gluon.jit
def rotation_of(given, row, column, SIZES: gl.constexpr):
    """cos and sin for each column of a head, from a row of the tables."""
    HALF: gl.constexpr = SIZES.ROTATED // 2
    turns = column < SIZES.ROTATED
    angle = row * HALF + gl.where(column < HALF, column, column - HALF)
    cos = gl.load(given.cos + angle, mask=turns, other=1.0)
    return cos, gl.load(given.sin + angle, mask=turns, other=0.0)


@gluon.jit
def rotated(source, gain_ptr, cos, sin, column, SIZES: gl.constexpr, there=True):
    """The query or key of a head, f32 [H], normalised if there is a gain, and rotated; for tensor cores [rows, H], of
    the heads at `source` [rows, 1], or zeros."""
    partner = partner_of(column, SIZES)
    if SIZES.ATTENTION_CORES:
        x = gl.load(source + column, mask=there & (column < SIZES.H), other=0.0)
        y = gl.load(source + partner, mask=there & (column < SIZES.H), other=0.0)
    else:
        x = gl.load(source + column)
        y = gl.load(source + partner)
    return turned(x, y, gain_ptr, cos, sin, column, SIZES)


@gluon.jit
def partner_of(column, SIZES: gl.constexpr):
    """With which column of a head one is rotated; those that are not have themselves."""
    HALF: gl.constexpr = SIZES.ROTATED // 2
    return gl.where(column < HALF, column + HALF, gl.where(column < SIZES.ROTATED, column - HALF, column))


@gluon.jit
def turned(x, y, gain_ptr, cos, sin, column, SIZES: gl.constexpr):
    """x and its partners y, normalised if there is a gain, and rotated."""
    low = column < SIZES.ROTATED // 2
    if gain_ptr is not None:
        partner = partner_of(column, SIZES)
        squares = gl.sum(x * x, 1, keep_dims=SIZES.ATTENTION_CORES)
        if not SIZES.ATTENTION_CORES:
            squares = gl.sum(squares, 0)
        scale = gl.rsqrt(squares / SIZES.H + SIZES.EPS)
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
def merge(me, kept, heads, layer, factor, SIZES: gl.constexpr):
    """Adds up the parts of some columns, which all items have left, and sends them: heads, messages f32 [B, HEADS * H].

    For tensor cores it stores them, in heads [vectors, HEADS * H].
    """
    H: gl.constexpr = SIZES.H
    G: gl.constexpr = SIZES.HEADS // SIZES.KV_HEADS
    MERGED: gl.constexpr = SIZES.MERGED
    PARTS: gl.constexpr = triton.next_power_of_2(SIZES.SPLITS)
    LANES: gl.constexpr = MERGED // 4
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    # Each warp has all parts' tops, so that the highest one and the whole total take no meeting of the warps.
    EACH: gl.constexpr = gl.BlockedLayout([max(1, PARTS // 32)], [32], [gl.num_warps()], [0])
    part = gl.arange(0, PARTS, gl.SliceLayout(1, LAYOUT))
    there = part < SIZES.SPLITS
    each = gl.arange(0, PARTS, EACH)
    for unit in range(gl.program_id(0), SIZES.B * SIZES.HEADS * (H // MERGED), SIZES.PROGRAMS):
        head = unit // (H // MERGED)  # of all sequences
        column = unit % (H // MERGED) * MERGED + gl.arange(0, MERGED, gl.SliceLayout(0, LAYOUT))
        of = head // G * SIZES.SPLITS
        if SIZES.QUERIES_TOLD:
            of += layer % 2 * (SIZES.B * SIZES.KV_HEADS * SIZES.SPLITS)
        tops = kept.tops + (of + each) * (2 * G) + head % G * 2
        top = gl.load(tops, mask=each < SIZES.SPLITS, other=float("-inf"))
        total = gl.load(tops + 1, mask=each < SIZES.SPLITS, other=0.0)
        at = (of + part) * G + head % G
        own_top = gl.load(kept.tops + at * 2, mask=there, other=float("-inf"))
        acc = gl.load(
            kept.accs + at[:, None] * H + column[None, :], mask=there[:, None] & (column[None, :] < H), other=0.0
        )
        highest = gl.max(top, 0)
        base = gl.where(highest == float("-inf"), 0.0, highest)
        whole = gl.sum(gl.exp2(top - base) * total, 0)
        result = gl.sum(acc * gl.exp2(own_top - base)[:, None], 0) * (factor / gl.where(whole == 0, 1.0, whole))
        leave_merged(me, heads, head, column, result, SIZES)


@gluon.jit
def leave_merged(me, heads, head, column, result, SIZES: gl.constexpr):
    """Hands on some columns of a head of one of all sequences, as `merge` takes `heads`."""
    H: gl.constexpr = SIZES.H
    if SIZES.TENSOR_CORES:
        tensor_cores.keep(heads, result, head // SIZES.HEADS, head % SIZES.HEADS * H + column, column < H, SIZES)
    else:
        shmem.send(me, heads + head * H + column, result, me.rank, column < H)
