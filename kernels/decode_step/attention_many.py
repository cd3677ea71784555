"""Attention of a decode step of many sequences: `attention.attend` by tensor cores.

The query heads of a key/value head are the 16 rows of an instruction, of which those behind the last head are zeros.
A block of keys or values, [groups of 64 columns, slots, 64], falls into parts of its slots. Each part has warps of its
own, and a softmax of its own until an item is over, so warps do not wait for each other. Warps of the same part have
the same scores, and share the columns of the values.

The items of a pair (a sequence and a key/value head) leave what they have for `attention.merge`.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.decode_step import attention, phases
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
    DTYPE: gl.constexpr = given.old_keys.dtype
    WARPS: gl.constexpr = gl.num_warps()
    SHAPE: gl.constexpr = given.old_keys.block_shape
    GROUPS: gl.constexpr = SHAPE[0]
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
        value_ptr = of + (SIZES.HEADS + SIZES.KV_HEADS + head) * H
        query = attention.rotated(of + (head * G + g[:, None]) * H, query_norm, cos, sin, column, SIZES, g[:, None] < G)
        key = attention.rotated(of + (SIZES.HEADS + head) * H, key_norm, cos, sin, column, SIZES)
        query, new_key = query.to(DTYPE), key.to(DTYPE)
        new_value = gl.load(value_ptr + column).to(DTYPE)
        score = gl.sum(query.to(gl.float32) * new_key.to(gl.float32), 1)
        # The new token belongs to the first part of the first item; where the cache is full it is dropped.
        own = (item % SIZES.SPLITS == 0) & (length < SIZES.SLOTS)
        tops, totals, accs = of_new_token(ring, score, value_ptr, own, factor, SHAPE, DTYPE, SIZES)
        queries = keep_queries(ring, query, SHAPE)
        # After the loads, which do not pass stores.
        place = ((layer * SIZES.B + sequence) * SIZES.KV_HEADS + head) * H + column
        SIZE: gl.constexpr = SIZES.LAYERS * SIZES.B * SIZES.KV_HEADS * H
        new = shmem.scratch(me, kept.new, DTYPE)
        gl.store(new + place, new_key, mask=(item % SIZES.SPLITS == 0) & (column < H))
        gl.store(new + SIZE + place, new_value, mask=(item % SIZES.SPLITS == 0) & (column < H))
        for block in range(first, last):
            slot = block * SHAPE[1] + own_slot
            seen = (slot >= begin) & (slot < end)
            scores, position = multiply_keys(ring, position, given.old_keys, queries, SCORES)
            scores = attention.capped(scores * (factor * SIZES.SCORE_SCALE), SIZES.SCORE_SOFT_CAP)
            scores = gl.where(seen, scores, float("-inf"))
            higher = gl.maximum(tops, gl.max(scores, 2))
            base = gl.where(higher == float("-inf"), 0.0, higher)
            keep = gl.exp2(tops - base)
            weights = gl.exp2(scores - base[:, :, None])
            tops, totals = higher, totals * keep[:, :, None] + weights
            # Warps of a part have the same scores, so nothing moves between threads.
            keep = gl.convert_layout(keep, gl.SliceLayout(2, SUMS), assert_trivial=True)[:, :, None]
            weights = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
            scaled = ()
            for group in gl.static_range(GROUPS):
                scaled = scaled + (accs[group] * keep,)
            accs, position = add_values(ring, position, given.old_values, weights, scaled, end - block * SHAPE[1], SUMS)
        together(ring, SHAPE, kept, item, tops, totals, accs, SIZES)
    return position


@gluon.jit
def slots_of(SHAPE: gl.constexpr):
    """Which slots of a block scores [parts, 16, slots of a part] are of: i32 [parts, 1, slots of a part]."""
    PARTS: gl.constexpr = parts_of(SHAPE, gl.num_warps())
    EACH: gl.constexpr = SHAPE[1] // PARTS
    LAYOUT: gl.constexpr = scores_layout(SHAPE, gl.num_warps())
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    return part * EACH + gl.arange(0, EACH, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]


@gluon.jit
def of_new_token(
    ring, score, value_ptr, own, factor, SHAPE: gl.constexpr, DTYPE: gl.constexpr, SIZES: gl.constexpr
):  # fmt: skip
    """(top, total, acc) of the new token alone, as `attend` carries them: f32 [parts, 16], f32 [parts, 16, slots], and
    [parts, 16, 64] for each group of columns.

    Args:
      score: f32 [16], before it is scaled.
      value_ptr: to its value, f32 [H].
      own: whether the token is one of this item.
    """
    WARPS: gl.constexpr = gl.num_warps()
    PARTS: gl.constexpr = parts_of(SHAPE, WARPS)
    EACH: gl.constexpr = SHAPE[1] // PARTS
    SCORES: gl.constexpr = scores_layout(SHAPE, WARPS)
    SUMS: gl.constexpr = sums_layout(SHAPE, WARPS)
    few = ring.few.slice(0, ROWS)
    few.store(score)
    score = few.load(gl.SliceLayout(0, gl.SliceLayout(2, SCORES)))[None, :]
    score = attention.capped(score * (factor * SIZES.SCORE_SCALE), SIZES.SCORE_SOFT_CAP)
    first = (gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, SCORES)))[:, None] == 0) & own
    tops = gl.where(first, score, float("-inf"))
    zeros = gl.full([PARTS, ROWS, EACH], 0.0, gl.float32, SCORES)
    totals = gl.where(first[:, :, None] & (slots_of(SHAPE) == 0), 1.0, zeros)
    part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, None, :]
    accs = ()
    for group in gl.static_range(SHAPE[0]):
        value = gl.load(value_ptr + group * 64 + column).to(DTYPE).to(gl.float32)
        zeros = gl.full([PARTS, ROWS, 64], 0.0, gl.float32, SUMS)
        accs = accs + (gl.where((part == 0) & own, value, zeros),)
    return tops, totals, accs


@gluon.jit
def keep_queries(ring, query, SHAPE: gl.constexpr):
    """Leaves queries [16, H] in shared memory, and returns it: [groups, 16, 64]."""
    TURNED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    memory = ring.sums.reinterpret(query.dtype, [SHAPE[0], ROWS, 64], TURNED)
    memory.store(query.reshape([ROWS, SHAPE[0], 64]).permute([1, 0, 2]))
    return memory


@gluon.jit
def view(ring, stage, desc):
    """A stage as a block of `desc` in parts: [groups * parts, slots of a part, 64]."""
    GROUPS: gl.constexpr = desc.block_shape[0]
    PARTS: gl.constexpr = parts_of(desc.block_shape, gl.num_warps())
    EACH: gl.constexpr = desc.block_shape[1] // PARTS
    return ring.stages.index(stage).reinterpret(desc.dtype, [GROUPS * PARTS, EACH, 64], desc.layout)


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
        query, _ = gl.broadcast(query, gl.full([PARTS, ROWS, 64], 0.0, query.dtype, OPERAND))
        keys = block.slice(group * PARTS, PARTS, dim=0).load(gl.DotOperandLayout(1, SCORES, 2))
        product = mma_v2(query, keys, zeros)
        # Apart, because a product waits for the one that it is added to.
        scores = product if group == 0 else scores + product
    rings.give_back(ring, stage)
    return scores, rings.after(ring, position)


@gluon.jit
def add_values(ring, position, desc, weights, accs, count, SUMS: gl.constexpr):
    """accs + weights times the first `count` values of the next block; and the next position."""
    PARTS: gl.constexpr = parts_of(desc.block_shape, gl.num_warps())
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    stage, phase = position
    mbarrier.wait(ring.full.index(stage), phase)
    block = view(ring, stage, desc)
    if count < desc.block_shape[1]:
        clear_behind(ring, stage, desc, count)
    added = ()
    for group in gl.static_range(len(accs)):
        values = block.slice(group * PARTS, PARTS, dim=0).load(OPERAND)
        added = added + (mma_v2(weights, values, accs[group]),)
    rings.give_back(ring, stage)
    return added, rings.after(ring, position)


@gluon.jit
def clear_behind(ring, stage, desc, count):
    """Makes the values of a block behind the first `count` slots zeros: the cache may hold anything there, and 0 * NaN
    is NaN."""
    GROUPS: gl.constexpr = desc.block_shape[0]
    PIECES: gl.constexpr = desc.block_shape[1] // ROWS
    # Within a row swizzles do not matter.
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    pieces = ring.stages.index(stage).reinterpret(desc.dtype, [GROUPS * PIECES, ROWS, 64], PLAIN)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LINES))[:, None]
    for i in range(gl.maximum(count, 0) // ROWS, PIECES):
        for group in gl.static_range(GROUPS):
            piece = pieces.index(group * PIECES + i)
            values = piece.load(LINES)
            piece.store(gl.where(i * ROWS + row < count, values, gl.full([ROWS, 64], 0.0, desc.dtype, LINES)))


@gluon.jit
def together(ring, SHAPE: gl.constexpr, kept, item, tops, totals, accs, SIZES: gl.constexpr):
    """Adds up the parts of an item, and hands them on."""
    H: gl.constexpr = SIZES.H
    G: gl.constexpr = SIZES.HEADS // SIZES.KV_HEADS
    WARPS: gl.constexpr = gl.num_warps()
    GROUPS: gl.constexpr = SHAPE[0]
    PARTS: gl.constexpr = parts_of(SHAPE, WARPS)
    SUMS: gl.constexpr = sums_layout(SHAPE, WARPS)
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
    AT_ONCE: gl.constexpr = min(GROUPS, SIZES.SUMS // (PARTS * USED * 64))
    COLUMNS: gl.constexpr = gl.BlockedLayout([PARTS, 1, 2], [1, 1, 32], [1, WARPS, 1], [2, 1, 0])
    OF_HEADS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, COLUMNS))
    head = gl.arange(0, USED, OF_HEADS)[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(0, COLUMNS)))[None, :]
    memory = ring.sums.reinterpret(gl.float32, [AT_ONCE, PARTS, USED, 64], TURNED)
    for begin in gl.static_range(0, GROUPS, AT_ONCE):
        for group in gl.static_range(begin, min(GROUPS, begin + AT_ONCE)):
            # The rows that are used are half of what each thread has.
            acc = gl.where(row < USED, accs[group] * weight[:, :, None], 0.0)
            memory.index(group - begin).store(gl.sum(acc.reshape([PARTS, ROWS // USED, USED, 64]), 1))
        for group in gl.static_range(begin, min(GROUPS, begin + AT_ONCE)):
            acc = gl.sum(memory.index(group - begin).load(COLUMNS), 0)
            gl.store(kept.accs + (item * G + head) * H + group * 64 + column, acc, mask=(head < G) & (column >= 0))
    total = lines.index(PARTS).load(OF_ROW)
    for part in gl.static_range(1, PARTS):
        total += lines.index(PARTS + part).load(OF_ROW)
    g = gl.arange(0, ROWS, OF_ROW)
    gl.store(kept.tops + (item * G + g) * 2, highest, mask=g < G)
    gl.store(kept.tops + (item * G + g) * 2 + 1, total, mask=g < G)
