"""`attention.attend` of a decode step by tensor cores, of one sequence as of many.

The query heads of a key/value head are the 16 rows of an instruction, of which those behind the last head are zeros.
A block of keys or values, [groups of 64 columns, slots, 64], falls into parts of its slots. Each part has warps of its
own, and a softmax of its own until an item is over, so warps do not wait for each other. Warps of the same part have
the same scores, and share the columns of the values.

A cache of 8 bits comes in words of two neighbours, 64 of them where 64 numbers of 16 bits would be. Of keys both
numbers of a word are widened where they lie, and queries have their order. Of values the first numbers of all words are
one operand, and the second ones another: sums are of even columns, and of odd ones. A key's scale multiplies its score,
a value's its weight.

The items of a pair (a sequence and a key/value head) leave what they have for `attention.merge`.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.blocks import widen
from jaxtaxfree.kernels.decode_step import attention, phases, tensor_cores
from jaxtaxfree.kernels.decode_step import ring as rings

ROWS = gl.constexpr(16)  # of an instruction, and its slots
USED = gl.constexpr(8)  # at most, of these rows


@triton.constexpr_function
def parts_of(block_shape, warps):
    """Into how many parts the slots of a block fall."""
    return min(warps, block_shape[1] // ROWS.value, 8)


@triton.constexpr_function
def scores_layout(block_shape, warps):
    """The layout of scores [parts, 16, slots of a part]: all warps of a part have all of it."""
    parts = parts_of(block_shape, warps)
    return gl.NVMMADistributedLayout([2, 0], [parts, warps // parts, 1], [1, 16, 8])


@triton.constexpr_function
def sums_layout(block_shape, warps):
    """The layout of sums of values [parts, 16, 64]: the warps of a part have different columns."""
    parts = parts_of(block_shape, warps)
    return gl.NVMMADistributedLayout([2, 0], [parts, 1, warps // parts], [1, 16, 8])


@triton.constexpr_function
def rows_layout(h, warps):
    """The layout of queries [16, h] while they are rotated: each row is a warp's."""
    return gl.BlockedLayout([1, h // 32], [1, 32], [warps, 1], [1, 0])


@triton.constexpr_function
def sums_of(desc):
    """How many sums of values [parts, 16, 64] a head has."""
    return desc.block_shape[0] * desc.block_shape[2] // 64


@gluon.jit
def column_of(i, column, desc):
    """Which column of a head a column of its i-th sum is."""
    if desc.dtype.primitive_bitwidth == 8:
        place = i // 2 * 128 + i % 2 + 2 * column
    else:
        place = i * 64 + column
    return place


@gluon.jit
def attend(me, ring, position, given, kept, lengths, window, table, layer, factor, SIZES: gl.constexpr):
    """Hands on the parts of this program's items, for `merge`, and the new keys and values, for `put`.

    Args:
      lengths, window, table: as `attention.attend` takes them.
    """
    H: gl.constexpr = SIZES.H
    G: gl.constexpr = SIZES.HEADS // SIZES.KV_HEADS
    WIDTH: gl.constexpr = (SIZES.HEADS + 2 * SIZES.KV_HEADS) * H
    ITEMS: gl.constexpr = SIZES.B * SIZES.KV_HEADS * SIZES.SPLITS
    WIDE: gl.constexpr = given.final_norm.dtype.element_ty  # which tensor cores multiply
    EIGHT: gl.constexpr = given.old_key_scales is not None
    WARPS: gl.constexpr = gl.num_warps()
    SHAPE: gl.constexpr = given.old_keys.block_shape
    SCORES: gl.constexpr = scores_layout(SHAPE, WARPS)
    SUMS: gl.constexpr = sums_layout(SHAPE, WARPS)
    TURNED: gl.constexpr = rows_layout(H, WARPS)
    g = gl.arange(0, ROWS, gl.SliceLayout(1, TURNED))
    column = gl.arange(0, H, gl.SliceLayout(0, TURNED))[None, :]
    query_norm = phases.of_layer(given.query_norm, layer, H)
    key_norm = phases.of_layer(given.key_norm, layer, H)
    own_slot = slots_of(SHAPE)
    for item in range(gl.program_id(0), ITEMS, SIZES.PROGRAMS):
        sequence, head, length, begin, end, first, last = attention.blocks_of(given, lengths, window, item, SIZES)
        row = table * SIZES.POSITIONS + gl.minimum(length, SIZES.POSITIONS - 1)
        cos, sin = attention.rotation_of(given, row, column, SIZES)
        of = kept.qkv + sequence * WIDTH
        if SIZES.QUERIES_TOLD:
            memory, sources, late = received(
                me, ring, of + layer * SIZES.B * WIDTH, head, gl.where(item % SIZES.SPLITS == 0, G + 2, G), SIZES
            )  # fmt: skip
            query = gl.where(g[:, None] < G, attention.turned(
                memory.index(0).load(TURNED), memory.index(1).load(TURNED), query_norm, cos, sin, column, SIZES
            ), 0.0)  # fmt: skip
        else:
            memory = None
            query = attention.rotated(
                of + (head * G + g[:, None]) * H, query_norm, cos, sin, column, SIZES, g[:, None] < G
            )  # fmt: skip
        query = query.to(WIDE)
        tops, totals, accs = of_none(given.old_keys)
        # The new token belongs to a pair's first item. What only that one does keeps nobody else waiting.
        if item % SIZES.SPLITS == 0:
            pair = (layer * SIZES.B + sequence) * SIZES.KV_HEADS + head
            tops, totals, accs = of_new_token(
                me, ring, given, kept, (tops, totals, accs), query, memory, of, head, key_norm, cos, sin, column, pair,
                item, length < SIZES.SLOTS, factor, SIZES,
            )  # fmt: skip
        queries = keep_queries(ring, query, given.old_keys)
        for block in range(first, last):
            slot = block * SHAPE[1] + own_slot
            seen = (slot >= begin) & (slot < end)
            if EIGHT:  # on their way while the block comes
                of_block = attention.row_of(given, layer, sequence, head, block * SHAPE[1], SIZES) + own_slot
                key_scale = gl.load(given.old_key_scales + of_block, mask=seen, other=0.0)
                value_scale = gl.load(given.old_value_scales + of_block, mask=seen, other=0.0)
            scores, position = multiply_keys(ring, position, given.old_keys, queries, SCORES)
            if EIGHT:
                scores = scores * key_scale
            scores = attention.capped(scores * (factor * SIZES.SCORE_SCALE), SIZES.SCORE_SOFT_CAP)
            scores = gl.where(seen, scores, float("-inf"))
            higher = gl.maximum(tops, gl.max(scores, 2))
            base = gl.where(higher == float("-inf"), 0.0, higher)
            keep = gl.exp2(tops - base)
            weights = gl.exp2(scores - base[:, :, None])
            tops, totals = higher, totals * keep[:, :, None] + weights
            if EIGHT:
                weights = weights * value_scale
            # Warps of a part have the same scores, so nothing moves between threads.
            keep = gl.convert_layout(keep, gl.SliceLayout(2, SUMS), assert_trivial=True)[:, :, None]
            weights = gl.convert_layout(weights.to(WIDE), gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
            scaled = ()
            for i in gl.static_range(len(accs)):
                scaled = scaled + (accs[i] * keep,)
            accs, position = add_values(ring, position, given.old_values, weights, scaled, end - block * SHAPE[1], SUMS)
        if SIZES.PARTS_TOLD:
            item += layer * ITEMS
        elif SIZES.QUERIES_TOLD:
            item += layer % 2 * ITEMS  # who reads those of the layer before has met nobody since
        together(me, ring, given.old_keys, kept, item, tops, totals, accs, SIZES)
        if SIZES.QUERIES_TOLD:
            shmem.report_pairs(me, sources, late)
    return position


@gluon.jit
def received(me, ring, source, head, count, SIZES: gl.constexpr):
    """Waits for the queries of a pair, its new key and its new value, one row each, and for no more than `count` rows.

    Args:
      source: messages [HEADS + 2 KV_HEADS, H] of the sequence.

    Returns: (f32 [2, 16, H] in shared memory, behind the columns those that each is rotated with; for
      `shmem.report_pairs` from where, and what did not come).
    """
    H: gl.constexpr = SIZES.H
    G: gl.constexpr = SIZES.HEADS // SIZES.KV_HEADS
    HELD: gl.constexpr = triton.next_power_of_2(G + 2)  # rows; nobody uses those behind them
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    vector = gl.arange(0, HELD * H // 4, shmem.vectors_of(1, gl.num_warps()))
    row = vector // (H // 4)
    column = vector % (H // 4) * 4
    of_new = gl.where(row == G, SIZES.HEADS, SIZES.HEADS + SIZES.KV_HEADS) + head
    rows = source + gl.where(row < G, head * G + row, of_new) * H
    sources = rows + column
    # A thread polls both at once: one behind the other they take a way to the L2 cache each.
    values, partners, late = shmem.receive_pairs(
        me, sources, rows + attention.partner_of(column, SIZES), (row < count).to(gl.int32), 1, 0, 0,
        phases.patience_within(SIZES),
    )  # fmt: skip
    both = ring.sums.reinterpret(gl.float32, [2 * ROWS // HELD, HELD * H], LINE)
    both.index(0).store(values[0])
    both.index(ROWS // HELD).store(partners[0])
    return ring.sums.reinterpret(gl.float32, [2, ROWS, H], PLAIN), sources, late


@gluon.jit
def slots_of(SHAPE: gl.constexpr):
    """Which slots of a block scores [parts, 16, slots of a part] are of: i32 [parts, 1, slots of a part]."""
    PARTS: gl.constexpr = parts_of(SHAPE, gl.num_warps())
    EACH: gl.constexpr = SHAPE[1] // PARTS
    LAYOUT: gl.constexpr = scores_layout(SHAPE, gl.num_warps())
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    return part * EACH + gl.arange(0, EACH, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]


@gluon.jit
def of_none(desc):
    """(top, total, acc) of no token, as `attend` carries them: f32 [parts, 16], f32 [parts, 16, slots], and one [parts,
    16, 64] after the other, as `column_of` has them."""
    WARPS: gl.constexpr = gl.num_warps()
    SHAPE: gl.constexpr = desc.block_shape
    PARTS: gl.constexpr = parts_of(SHAPE, WARPS)
    SCORES: gl.constexpr = scores_layout(SHAPE, WARPS)
    accs = ()
    for _ in gl.static_range(sums_of(desc)):
        accs = accs + (gl.full([PARTS, ROWS, 64], 0.0, gl.float32, sums_layout(SHAPE, WARPS)),)
    tops = gl.full([PARTS, ROWS], float("-inf"), gl.float32, gl.SliceLayout(2, SCORES))
    return tops, gl.full([PARTS, ROWS, SHAPE[1] // PARTS], 0.0, gl.float32, SCORES), accs


@gluon.jit
def of_new_token(
    me, ring, given, kept, none, query, memory, of, head, key_norm, cos, sin, column, pair, item, there, factor,
    SIZES: gl.constexpr,
):  # fmt: skip
    """The same of the new token alone; its key and value are left for `put`.

    Args:
      none: what `of_none` returned.
      query: [16, H], rotated.
      memory: what `received` returned; None if queries are no messages.
      of: where the sequence's queries, keys and values are, if they are none.
      column, cos, sin: [1, H], as keys are rotated.
      there: whether the cache has a place for it; if not it is dropped.
    """
    H: gl.constexpr = SIZES.H
    G: gl.constexpr = SIZES.HEADS // SIZES.KV_HEADS
    WARPS: gl.constexpr = gl.num_warps()
    SHAPE: gl.constexpr = given.old_keys.block_shape
    PARTS: gl.constexpr = parts_of(SHAPE, WARPS)
    SCORES: gl.constexpr = scores_layout(SHAPE, WARPS)
    SUMS: gl.constexpr = sums_layout(SHAPE, WARPS)
    TURNED: gl.constexpr = rows_layout(H, WARPS)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if memory is not None:
        rows, partners = memory.index(0), memory.index(1)
        key = attention.turned(
            rows.slice(G, 1).load(TURNED), partners.slice(G, 1).load(TURNED), key_norm, cos, sin, column, SIZES
        )  # fmt: skip
        new_value = ring.sums.reinterpret(gl.float32, [2 * ROWS, H], LINE).index(G + 1)
        row = rows.slice(G + 1, 1).load(TURNED)
    else:
        key = attention.rotated(of + (SIZES.HEADS + head) * H, key_norm, cos, sin, column, SIZES)
        new_value = of + (SIZES.HEADS + SIZES.KV_HEADS + head) * H
        row = gl.load(new_value + column)
    key, key_unit = attention.stored(key, given)
    row, value_unit = attention.stored(row, given)
    score = gl.sum(query.to(gl.float32) * key, 1) * key_unit
    few = ring.few.slice(0, ROWS)
    few.store(score)
    score = few.load(gl.SliceLayout(0, gl.SliceLayout(2, SCORES)))[None, :]
    score = attention.capped(score * (factor * SIZES.SCORE_SCALE), SIZES.SCORE_SOFT_CAP)
    first = (gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, SCORES)))[:, None] == 0) & there
    no_tops, no_totals, no_accs = none
    tops = gl.where(first, score, no_tops)
    totals = gl.where(first[:, :, None] & (slots_of(SHAPE) == 0), 1.0, no_totals)
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None, None]
    place = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, None, :]
    accs = ()
    for i in gl.static_range(len(no_accs)):
        if SIZES.QUERIES_TOLD:
            value = new_value.slice(i * 64, 64).load(gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, None, :]
        else:
            value = gl.load(new_value + column_of(i, place, given.old_keys))
        value = value.to(given.final_norm.dtype.element_ty).to(gl.float32)
        if given.old_key_scales is not None:
            value = attention.rounded(value, value_unit, given.old_keys.dtype) * value_unit
        accs = accs + (gl.where((part == 0) & there, value, no_accs[i]),)
    # After the loads, which do not pass stores.
    attention.keep_new(me, kept, given, key, key_unit, row, value_unit, pair, column, item, SIZES)
    return tops, totals, accs


@gluon.jit
def keep_queries(ring, query, desc):
    """Leaves queries [16, H] in shared memory, and returns it: [groups, 16, columns of one]."""
    GROUPS: gl.constexpr = desc.block_shape[0]
    WIDTH: gl.constexpr = desc.block_shape[2]
    TURNED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    if desc.dtype.primitive_bitwidth == 8:
        query = tensor_cores.order(query)
    memory = ring.sums.reinterpret(query.dtype, [GROUPS, ROWS, WIDTH], TURNED)
    memory.store(query.reshape([ROWS, GROUPS, WIDTH]).permute([1, 0, 2]))
    return memory


@gluon.jit
def view(ring, stage, desc):
    """A stage as a block of `desc` in parts: [groups * parts, slots of a part, 64], of 8 bits in words of two."""
    GROUPS: gl.constexpr = desc.block_shape[0]
    PARTS: gl.constexpr = parts_of(desc.block_shape, gl.num_warps())
    EACH: gl.constexpr = desc.block_shape[1] // PARTS
    block = ring.stages.index(stage).reinterpret(desc.dtype, [GROUPS * PARTS, EACH, desc.block_shape[2]], desc.layout)
    if desc.dtype.primitive_bitwidth == 8:
        block = widen.pairs(block)
    return block


@gluon.jit
def multiply_keys(ring, position, desc, queries, SCORES: gl.constexpr):
    """Queries times the keys of the next block: f32 [parts, 16, slots of a part]; and the next position.

    Queries are loaded each time: in registers over the loop the compiler keeps each of two numbers in its own.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    GROUPS: gl.constexpr = desc.block_shape[0]
    PARTS: gl.constexpr = parts_of(desc.block_shape, gl.num_warps())
    EACH: gl.constexpr = desc.block_shape[1] // PARTS
    stage, phase = position
    mbarrier.wait(ring.full.index(stage), phase)
    block = view(ring, stage, desc).permute([0, 2, 1])
    zeros = gl.full([PARTS, ROWS, EACH], 0.0, gl.float32, SCORES)
    scores = zeros
    for group in gl.static_range(GROUPS):
        query = queries.slice(group, 1, dim=0).load(OPERAND)
        query, _ = gl.broadcast(query, gl.full([PARTS, ROWS, desc.block_shape[2]], 0.0, query.dtype, OPERAND))
        keys = block.slice(group * PARTS, PARTS, dim=0).load(gl.DotOperandLayout(1, SCORES, 2))
        if desc.dtype.primitive_bitwidth == 8:
            keys = tensor_cores.widened(keys, desc.dtype, query.dtype, SCORES)
        product = mma_v2(query, keys, zeros)
        # Apart, because a product waits for the one that it is added to.
        scores = product if group == 0 else scores + product
    rings.give_back(ring, stage)
    return scores, rings.after(ring, position)


@gluon.jit
def add_values(ring, position, desc, weights, accs, count, SUMS: gl.constexpr):
    """accs + weights times the first `count` values of the next block; and the next position."""
    GROUPS: gl.constexpr = desc.block_shape[0]
    PARTS: gl.constexpr = parts_of(desc.block_shape, gl.num_warps())
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    stage, phase = position
    mbarrier.wait(ring.full.index(stage), phase)
    block = view(ring, stage, desc)
    if count < desc.block_shape[1]:
        clear_behind(ring, stage, desc, count)
    added = ()
    for group in gl.static_range(GROUPS):
        values = block.slice(group * PARTS, PARTS, dim=0).load(OPERAND)
        if desc.dtype.primitive_bitwidth == 8:
            low, high = widen.words(values, desc.dtype, weights.dtype)
            added = added + (mma_v2(weights, low, accs[2 * group]), mma_v2(weights, high, accs[2 * group + 1]))
        else:
            added = added + (mma_v2(weights, values, accs[group]),)
    rings.give_back(ring, stage)
    return added, rings.after(ring, position)


@gluon.jit
def clear_behind(ring, stage, desc, count):
    """Makes the values of a block behind the first `count` slots zeros: the cache may hold anything there, and 0 * NaN
    is NaN. Of 8 bits two at once, which are both 0 if their word is."""
    WORD: gl.constexpr = desc.dtype if desc.dtype.primitive_bitwidth == 16 else gl.int16
    GROUPS: gl.constexpr = desc.block_shape[0]
    PIECES: gl.constexpr = desc.block_shape[1] // ROWS
    # Within a row swizzles do not matter.
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    pieces = ring.stages.index(stage).reinterpret(WORD, [GROUPS * PIECES, ROWS, 64], PLAIN)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LINES))[:, None]
    for i in range(gl.maximum(count, 0) // ROWS, PIECES):
        for group in gl.static_range(GROUPS):
            piece = pieces.index(group * PIECES + i)
            values = piece.load(LINES)
            piece.store(gl.where(i * ROWS + row < count, values, gl.full([ROWS, 64], 0, WORD, LINES)))


@gluon.jit
def together(me, ring, desc, kept, item, tops, totals, accs, SIZES: gl.constexpr):
    """Adds up the parts of an item, and hands them on."""
    H: gl.constexpr = SIZES.H
    G: gl.constexpr = SIZES.HEADS // SIZES.KV_HEADS
    WARPS: gl.constexpr = gl.num_warps()
    COUNT: gl.constexpr = len(accs)
    PARTS: gl.constexpr = parts_of(desc.block_shape, WARPS)
    SUMS: gl.constexpr = sums_layout(desc.block_shape, WARPS)
    OF_ROWS: gl.constexpr = gl.SliceLayout(2, SUMS)
    OF_ROW: gl.constexpr = gl.SliceLayout(0, OF_ROWS)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    TURNED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])  # rows that a warp stores at once, on all banks
    lines = ring.few.reinterpret(gl.float32, [2 * PARTS, ROWS], LINE)
    both = ring.few.reinterpret(gl.float32, [2, PARTS, ROWS], PLAIN)
    both.index(0).store(tops)
    highest = lines.index(0).load(OF_ROW)
    for part in gl.static_range(1, PARTS):
        highest = gl.maximum(highest, lines.index(part).load(OF_ROW))
    tops = gl.convert_layout(tops, OF_ROWS, assert_trivial=True)
    weight = gl.exp2(tops - gl.where(highest == float("-inf"), 0.0, highest)[None, :])
    both.index(1).store(gl.convert_layout(gl.sum(totals, 2), OF_ROWS, assert_trivial=True) * weight)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))[None, :, None]
    AT_ONCE: gl.constexpr = min(COUNT, SIZES.SUMS // (PARTS * USED * 64))
    COLUMNS: gl.constexpr = gl.BlockedLayout([PARTS, 1, 2], [1, 1, 32], [1, WARPS, 1], [2, 1, 0])
    OF_HEADS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, COLUMNS))
    head = gl.arange(0, USED, OF_HEADS)[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(0, COLUMNS)))[None, :]
    memory = ring.sums.reinterpret(gl.float32, [AT_ONCE, PARTS, USED, 64], TURNED)
    for begin in gl.static_range(0, COUNT, AT_ONCE):
        for i in gl.static_range(begin, min(COUNT, begin + AT_ONCE)):
            # The rows that are used are half of what each thread has.
            acc = gl.where(row < USED, accs[i] * weight[:, :, None], 0.0)
            memory.index(i - begin).store(gl.sum(acc.reshape([PARTS, ROWS // USED, USED, 64]), 1))
        for i in gl.static_range(begin, min(COUNT, begin + AT_ONCE)):
            acc = gl.sum(memory.index(i - begin).load(COLUMNS), 0)
            place = (item * G + head) * H + column_of(i, column, desc)
            hand_on(me, kept.accs + place, acc, (head < G) & (column >= 0), SIZES)
    # Stored at once: the memory takes longer for parts of 32 bytes that come one after the other.
    BOTH: gl.constexpr = gl.BlockedLayout([1, 1], [ROWS, 2], [WARPS, 1], [1, 0])
    OF_HEAD: gl.constexpr = gl.SliceLayout(1, BOTH)
    highest, total = lines.index(0).load(OF_HEAD), lines.index(PARTS).load(OF_HEAD)
    for part in gl.static_range(1, PARTS):
        highest = gl.maximum(highest, lines.index(part).load(OF_HEAD))
        total += lines.index(PARTS + part).load(OF_HEAD)
    EACH: gl.constexpr = heads_of_tops(SIZES)
    g = gl.arange(0, ROWS, OF_HEAD)[:, None]
    which = gl.arange(0, 2, gl.SliceLayout(0, BOTH))[None, :]
    value = gl.where(which == 0, highest[:, None], total[:, None])
    hand_on(me, kept.tops + (item * EACH + g) * 2 + which, value, g < EACH, SIZES)


@triton.constexpr_function
def heads_of_tops(sizes):
    """Of how many heads an item leaves tops: of messages 4 are polled at once, which are those of two heads."""
    heads = sizes.HEADS // sizes.KV_HEADS
    return heads + heads % 2 if sizes.PARTS_TOLD else heads


@gluon.jit
def hand_on(me, place, value, mask, SIZES: gl.constexpr):
    """Leaves part of an item for who merges it."""
    if SIZES.PARTS_TOLD:
        shmem.send(me, place, value, me.rank, mask)
    else:
        gl.store(place, value, mask=mask)


@triton.constexpr_function
def units_of(h, warps):
    """In how many units the parts of a head are merged: a program takes 4 columns a warp at a time."""
    return triton.cdiv(h, 4 * warps)


@gluon.jit
def merge(me, kept, heads, layer, factor, SIZES: gl.constexpr):
    """What `attention.merge` does, of parts that are messages.

    A warp has 4 columns of a head, and its threads have different items. So no thread waits for another warp, and what
    an item's accs are multiplied by is known to the thread that has them.
    """
    H: gl.constexpr = SIZES.H
    G: gl.constexpr = SIZES.HEADS // SIZES.KV_HEADS
    EACH: gl.constexpr = heads_of_tops(SIZES)
    WARPS: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = 4 * WARPS  # a program's at a time
    UNITS: gl.constexpr = units_of(H, WARPS)
    ITEMS: gl.constexpr = SIZES.B * SIZES.KV_HEADS * SIZES.SPLITS
    PLACES: gl.constexpr = triton.cdiv(SIZES.SPLITS, 32)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    thread = gl.arange(0, 32 * WARPS, shmem.vectors_of(1, WARPS))
    part = thread % 32
    count = (SIZES.SPLITS - part + 31) // 32
    of_lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))[None, :]
    OF_WARPS: gl.constexpr = gl.SliceLayout(1, WORDS)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, OF_WARPS))
    for unit in range(gl.program_id(0), SIZES.B * SIZES.HEADS * UNITS, SIZES.PROGRAMS):
        head = unit // UNITS  # of all sequences
        column = unit % UNITS * COLUMNS + thread // 32 * 4
        item = layer * ITEMS + head // G * SIZES.SPLITS + part
        accs = kept.accs + (item * G + head % G) * H + column
        tops = kept.tops + (item * EACH + head % G // 2 * 2) * 2
        parts, pairs, late = shmem.receive_pairs(
            me, accs, tops, gl.where(column < H, count, 0), PLACES, 32 * G * H, 64 * EACH,
            phases.patience_within(SIZES),
        )  # fmt: skip
        top, total = (), ()
        highest = gl.full([WARPS, 32], float("-inf"), gl.float32, gl.SliceLayout(2, WORDS))
        for i in gl.static_range(PLACES):
            own_top, own_total = of_head(pairs[i], head % G % 2, WORDS)
            top = top + (gl.where(of_lane + 32 * i < SIZES.SPLITS, own_top, float("-inf")),)
            total = total + (gl.where(of_lane + 32 * i < SIZES.SPLITS, own_total, 0.0),)
            highest = gl.maximum(highest, top[i])
        highest = gl.max(highest, 1, keep_dims=True)
        base = gl.where(highest == float("-inf"), 0.0, highest)
        whole = gl.full([WARPS, 32], 0.0, gl.float32, gl.SliceLayout(2, WORDS))
        acc = gl.full([WARPS, 32, 4], 0.0, gl.float32, WORDS)
        for i in gl.static_range(PLACES):
            weight = gl.exp2(top[i] - base)
            whole += total[i] * weight
            words = gl.convert_layout(parts[i].reshape([WARPS, 32, 4]), WORDS, assert_trivial=True)
            acc += gl.where((of_lane + 32 * i < SIZES.SPLITS)[:, :, None], words, 0.0) * weight[:, :, None]
        whole = gl.convert_layout(gl.sum(whole, 1), gl.SliceLayout(1, OF_WARPS), assert_trivial=True)
        result = gl.sum(acc, 1) * (factor / gl.where(whole == 0, 1.0, whole))[:, None]
        column = unit % UNITS * COLUMNS + 4 * warp[:, None] + gl.arange(0, 4, gl.SliceLayout(0, OF_WARPS))[None, :]
        attention.leave_merged(me, heads, head, column, result, SIZES)
        shmem.report_pairs(me, accs, late)


@gluon.jit
def of_head(pair, which, WORDS: gl.constexpr):
    """(top, total) of one of two heads, f32 [warps, 32], of the 4 words that each thread has of both."""
    WARPS: gl.constexpr = gl.num_warps()
    HEADS: gl.constexpr = gl.BlockedLayout([1, 1, 2, 2], [1, 32, 1, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    of_both = gl.convert_layout(pair.reshape([WARPS, 32, 2, 2]), HEADS, assert_trivial=True)
    tops, totals = gl.split(of_both)
    even, odd = gl.split(tops)
    top = gl.convert_layout(gl.where(which == 0, even, odd), gl.SliceLayout(2, WORDS), assert_trivial=True)
    even, odd = gl.split(totals)
    total = gl.convert_layout(gl.where(which == 0, even, odd), gl.SliceLayout(2, WORDS), assert_trivial=True)
    return top, total
