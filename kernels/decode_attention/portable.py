"""Attention of a few new tokens over keys and values that the ranks share out among them, in one launch.

The first programs attend: each takes a part (a split) of this rank's keys for one sequence and one key/value head, and
sends the partial result to this rank's own messages. The later programs merge: each takes some rows of the result,
adds up this rank's splits as they arrive, sends the sum to the ranks that need it, and adds up those of all ranks.

A partial result is (acc, top, total) with acc = sum_s 2^(logit_s - top) value_s and total = sum_s 2^(logit_s - top),
logits in units of log 2, as in FlashDecoding. A part without keys has top = -inf and adds nothing.

A merging program waits for attending ones, which have lower ids, and for its twin on every other rank.

With `starts` the slots of all ranks, in the order of their places, are a ring that wraps round: key i of a sequence
lies in place (start + i) mod (WORLD * S). What a rank has of a ring is one piece of its slots, or two, at their end and
at their beginning: its blocks of slots are a ring, too.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import shmem

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def decode_attention_kernel(
    query_ptr,  # [B, T, N, H]
    key_ptr,  # [pages in all, PAGE, K, H], [pages in all, K, PAGE, H] if HEAD_MAJOR, or [K, POOL, PAGE, H] if POOL
    value_ptr,  # the same with HV
    lengths_ptr,  # i32 [B], keys of all ranks, the new tokens' included
    tables_ptr,  # i32 [B, S / PAGE] if PAGED: which pages hold a sequence; else page b holds sequence b
    key_scale_ptr,  # f32; KEY_SCALE says of what: "none", "tensor", "head" [K] or "token" (one for each row of H)
    value_scale_ptr,
    sinks_ptr,  # [N] if SINKS
    starts_ptr,  # i32 [B]: the place in the ring of a sequence's key 0; None without a ring
    team,
    partials,  # messages [B, K, SPLITS, T * G, ~HV]: acc of each split
    partial_sums,  # messages [B, K, SPLITS, T * G, 2]: top and total
    merged,  # messages [WORLD, B, T, N_OUT, ~HV]: acc of each rank
    merged_sums,  # messages [WORLD, B, T, N_OUT, 2]
    out_ptr,  # [B, T, N_OUT, HV]
    residual_ptr,  # f32 [B, T, N_OUT], log-sum-exp
    B: tl.constexpr,
    T: tl.constexpr,  # new tokens
    N: tl.constexpr,  # query heads
    N_OUT: tl.constexpr,  # query heads whose result a rank gets
    K: tl.constexpr,  # key/value heads
    H: tl.constexpr,
    HV: tl.constexpr,
    S: tl.constexpr,  # keys that this rank has room for, of a sequence
    PAGE: tl.constexpr,
    PAGED: tl.constexpr,
    HEAD_MAJOR: tl.constexpr,
    POOL: tl.constexpr,  # pages in all, if the heads stand before them; else 0
    STRETCH: tl.constexpr,  # keys with consecutive positions before the next rank's follow
    WINDOW: tl.constexpr,  # keys before a token that it attends to; negative: all
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,  # 0: none
    KEY_SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    SINKS: tl.constexpr,
    WORLD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr,  # rows (new token, query head) of a tile
    BLOCK_S: tl.constexpr,  # keys of a tile
    TEAMS: tl.constexpr,  # of warps, of which each attends to a part of every tile on its own
    MERGE_ROWS: tl.constexpr,  # rows that a merging program takes
    MERGE_GROUPS: tl.constexpr,  # groups of its threads, of which each adds up a share of the splits
):
    row_tiles: tl.constexpr = tl.cdiv(T * (N // K), BLOCK_R)
    attending: tl.constexpr = B * SPLITS * row_tiles * K
    program = tl.program_id(0)
    if program < attending:
        attend(
            team, program, query_ptr, key_ptr, value_ptr, lengths_ptr, tables_ptr, key_scale_ptr, value_scale_ptr,
            starts_ptr, partials, partial_sums,
            T, N, K, H, HV, S, PAGE, PAGED, HEAD_MAJOR, POOL, STRETCH, WINDOW, SCALE, SOFT_CAP, KEY_SCALE, VALUE_SCALE,
            WORLD, SPLITS, BLOCK_R, BLOCK_S, TEAMS,
        )  # fmt: skip
    else:
        merge(
            team, program - attending, partials, partial_sums, merged, merged_sums, sinks_ptr, out_ptr, residual_ptr,
            B, T, N, N_OUT, K, HV, SINKS, WORLD, SPLITS, MERGE_ROWS, MERGE_GROUPS,
        )  # fmt: skip


@triton.jit
def attend(
    team, program, query_ptr, key_ptr, value_ptr, lengths_ptr, tables_ptr, key_scale_ptr, value_scale_ptr,
    starts_ptr, partials, partial_sums,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    S: tl.constexpr, PAGE: tl.constexpr, PAGED: tl.constexpr, HEAD_MAJOR: tl.constexpr, POOL: tl.constexpr,
    STRETCH: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
    KEY_SCALE: tl.constexpr, VALUE_SCALE: tl.constexpr,
    WORLD: tl.constexpr, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
    TEAMS: tl.constexpr,
):  # fmt: skip
    """Sends this rank the partial result of one split.

    With TEAMS, blocks have that many parts, one for each warp: no barrier but that of the copies into shared memory
    stands in the loop, and the warps' results are added up behind it.
    """
    group: tl.constexpr = N // K
    rows: tl.constexpr = T * group
    row_tiles: tl.constexpr = tl.cdiv(rows, BLOCK_R)
    # Neighbours take the heads of the same keys, which lie next to each other.
    head = program % K
    row = program // K % row_tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    split = program // (K * row_tiles) % SPLITS
    sequence = program // (K * row_tiles * SPLITS)
    # What the first loads of keys depend on is under way at the same time; the heap's header has time until the end.
    length = tl.maximum(tl.load(lengths_ptr + sequence), 0)
    me = shmem.start(team, VERIFY=False)

    h = tl.arange(0, depth_of(H, query_ptr.dtype.element_ty))
    hv = tl.arange(0, width_of(HV))
    query_row = (sequence * T + row // group) * N + head * group + row % group
    valid = (row < rows)[:, None] & (h[None, :] < H)
    query = tl.load(query_ptr + query_row.to(tl.int64)[:, None] * H + h[None, :], mask=valid, other=0.0)

    # This rank's keys that some row attends to, in blocks, of which the split takes its share.
    if starts_ptr is None:
        stop = tl.minimum(keys_before(length, me.rank, WORLD, STRETCH), S)
        begin = 0
        if WINDOW >= 0:
            begin = tl.minimum(keys_before(tl.maximum(length - T - WINDOW, 0), me.rank, WORLD, STRETCH), stop)
        first_block = begin // BLOCK_S
        blocks = tl.maximum(tl.cdiv(stop, BLOCK_S) - first_block, 0)
    else:
        start = tl.load(starts_ptr + sequence) % (WORLD * S)
        start = tl.where(start < 0, start + WORLD * S, start)
        end = tl.minimum(length, WORLD * S)
        oldest = 0
        if WINDOW >= 0:
            oldest = tl.minimum(tl.maximum(length - T - WINDOW, 0), end)
        first_block, blocks = blocks_of_ring(start, oldest, end, me.rank, WORLD, S, STRETCH, BLOCK_S)
    last = first_block + (blocks.to(tl.int64) * (split + 1) // SPLITS).to(tl.int32)
    first = first_block + (blocks.to(tl.int64) * split // SPLITS).to(tl.int32)
    position_of_row = length - T + row // group

    scale = SCALE
    if KEY_SCALE == "tensor":
        scale = SCALE * tl.load(key_scale_ptr)
    elif KEY_SCALE == "head":
        scale = SCALE * tl.load(key_scale_ptr + head)

    acc = tl.zeros((BLOCK_R, width_of(HV)), dtype=tl.float32)
    total = tl.zeros((BLOCK_R,), dtype=tl.float32)
    if TEAMS > 1:
        query = tl.broadcast_to(query[None], (TEAMS, BLOCK_R, query.shape[1]))
        acc = tl.broadcast_to(acc[None], (TEAMS, BLOCK_R, acc.shape[1]))
        total = tl.broadcast_to(total[None], (TEAMS, BLOCK_R))
    top = total - float("inf")
    for block in range(first, last):
        if starts_ptr is None:
            tile = block
        else:
            tile = tl.where(block < tl.cdiv(S, BLOCK_S), block, block - tl.cdiv(S, BLOCK_S))
        slot = tile * BLOCK_S + tl.arange(0, BLOCK_S)
        if TEAMS > 1:
            slot = slot.reshape(TEAMS, BLOCK_S // TEAMS)
        if starts_ptr is None:
            there = slot < stop
        else:
            position = place_of(slot, me.rank, WORLD, STRETCH) - start
            position = tl.where(position < 0, position + WORLD * S, position)
            there = (slot < S) & (position < end)
        if not PAGED:
            page = sequence.to(tl.int64)
        elif PAGE % BLOCK_S == 0:
            page = tl.load(tables_ptr + sequence * (S // PAGE) + tile // (PAGE // BLOCK_S)).to(tl.int64)
        else:
            page = tl.load(tables_ptr + sequence * (S // PAGE) + slot // PAGE, mask=there, other=0).to(tl.int64)
        if POOL > 0:
            cache_row = (head.to(tl.int64) * POOL + page) * PAGE + slot % PAGE
        elif HEAD_MAJOR:
            cache_row = (page * K + head) * PAGE + slot % PAGE
        else:
            cache_row = (page * PAGE + slot % PAGE) * K + head

        key = tl.load(
            key_ptr + tl.expand_dims(cache_row, -1) * H + h, mask=tl.expand_dims(there, -1) & (h < H), other=0.0
        ).to(query.dtype)
        # [BLOCK_R, BLOCK_S], or [TEAMS, BLOCK_R, BLOCK_S / TEAMS]
        if TEAMS > 1:
            logits = tl.dot(query, tl.trans(key, 0, 2, 1), input_precision="ieee") * scale
        else:
            logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if KEY_SCALE == "token":
            logits = logits * tl.load(key_scale_ptr + cache_row, mask=there, other=0.0).expand_dims(-2)
        if SOFT_CAP > 0:
            # tanh(x) = 1 - 2 / (e^2x + 1), right at both ends.
            logits = SOFT_CAP * (1 - 2 / (tl.exp2(logits * (2 * LOG2_E / SOFT_CAP)) + 1))
        if starts_ptr is None:
            position = place_of(slot, me.rank, WORLD, STRETCH)
        position = tl.expand_dims(position, -2)
        seen = tl.expand_dims(there, -2) & (position <= position_of_row[:, None])
        if WINDOW >= 0:
            seen = seen & (position >= position_of_row[:, None] - WINDOW)
        logits = tl.where(seen, logits * LOG2_E, float("-inf"))

        higher = tl.maximum(top, tl.max(logits, axis=-1))
        # A row that has seen no key yet keeps the weight 0 for all.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(logits - tl.expand_dims(base, -1))
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weight, axis=-1)
        top = higher
        # Scales of an fp8 cache may be so small that weights times them are no f16: the largest goes to the sum.
        UNIT: tl.constexpr = VALUE_SCALE == "token" and query.dtype == tl.float16
        if VALUE_SCALE == "token":
            value_scale = tl.load(value_scale_ptr + cache_row, mask=there, other=0.0)
            if UNIT:
                unit = tl.max(tl.abs(value_scale))
                value_scale = value_scale / tl.where(unit == 0, 1.0, unit)
            weight = weight * tl.expand_dims(value_scale, -2)
        # What lies behind the last key may be anything, and 0 * NaN is NaN.
        value = tl.load(
            value_ptr + tl.expand_dims(cache_row, -1) * HV + hv, mask=tl.expand_dims(there, -1) & (hv < HV), other=0.0
        ).to(query.dtype)
        if UNIT:
            acc = acc * tl.expand_dims(kept, -1) + tl.dot(weight.to(query.dtype), value, input_precision="ieee") * unit
        else:
            acc = tl.dot(weight.to(query.dtype), value, acc * tl.expand_dims(kept, -1), input_precision="ieee")

    if TEAMS > 1:
        if rows <= BLOCK_R // 2:
            # Half of the rows is all there is.
            acc = tl.split(acc.reshape(TEAMS, 2, BLOCK_R // 2, acc.shape[2]).permute(0, 2, 3, 1))[0]
            top = tl.split(top.reshape(TEAMS, 2, BLOCK_R // 2).permute(0, 2, 1))[0]
            total = tl.split(total.reshape(TEAMS, 2, BLOCK_R // 2).permute(0, 2, 1))[0]
            row = tl.arange(0, BLOCK_R // 2)
        highest = tl.max(top, axis=0)
        kept = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest)[None, :])
        total, top = tl.sum(total * kept, axis=0), highest
        # Pair by pair: that takes one exchange through shared memory, and tl.sum many.
        acc = (acc * kept[:, :, None]).permute(1, 2, 0)
        for i in tl.static_range(TEAMS.bit_length() - 1):
            left, right = tl.split(acc.reshape(acc.shape[0], acc.shape[1], TEAMS >> (i + 1), 2))
            acc = left + right
        acc = acc.reshape(acc.shape[0], acc.shape[1])
    if VALUE_SCALE == "tensor":
        acc = acc * tl.load(value_scale_ptr)
    elif VALUE_SCALE == "head":
        acc = acc * tl.load(value_scale_ptr + head)
    shmem.verify(me)
    at = (sequence * K + head) * SPLITS + split
    acc_at = shmem.messages(me, partials) + at.to(tl.int64) * (rows * words_of(HV))
    sums_at = shmem.messages(me, partial_sums) + at * (2 * rows)
    # Of top a message loses nothing that matters, if acc and total are made to fit what arrives.
    sent = shmem.sendable(top)
    shift = tl.where(top == sent, 1.0, tl.exp2(top - sent))
    send_partial(me, acc * shift[:, None], sent, total * shift, acc_at, sums_at, row, row < rows, HV)
    shmem.finish(me)


@triton.jit
def send_partial(
    me,
    acc,  # [rows, ~HV]
    top,  # [rows], sendable
    total,
    acc_at,  # messages [ROWS, ~HV]
    sums_at,  # messages [ROWS, 2]
    row,  # [rows], where they go
    mask,
    HV: tl.constexpr,
):
    """Sends this rank a partial result, the sums last: who waits polls them first."""
    h = tl.arange(0, width_of(HV))
    acc_ptrs = acc_at + row[:, None] * words_of(HV) + h[None, :]
    shmem.send(me, acc_ptrs, acc, me.rank, mask[:, None] & (h[None, :] < words_of(HV)))
    shmem.send(me, sums_at + 2 * row + 1, total, me.rank, mask)
    shmem.send(me, sums_at + 2 * row, top, me.rank, mask)


@triton.jit
def merge(
    team, program, partials, partial_sums, merged, merged_sums, sinks_ptr, out_ptr, residual_ptr,
    B: tl.constexpr, T: tl.constexpr, N: tl.constexpr, N_OUT: tl.constexpr, K: tl.constexpr, HV: tl.constexpr,
    SINKS: tl.constexpr, WORLD: tl.constexpr, SPLITS: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_GROUPS: tl.constexpr,
):  # fmt: skip
    """Adds up some rows: the splits of this rank, then those of all ranks; stores the result.

    Blocks are [group, place]: a place is 4 neighbours of a row of the result, and each group has a share of the parts
    of all places.
    """
    me = shmem.start(team)
    rows: tl.constexpr = T * (N // K)
    parts: tl.constexpr = tl.cdiv(rows, MERGE_ROWS)
    PLACES: tl.constexpr = width_of(HV) // 4
    at = tl.arange(0, MERGE_ROWS * PLACES)[None, :]
    row = program % parts * MERGE_ROWS + at // PLACES
    h = at % PLACES * 4
    valid = (row < rows) & (h < HV)
    group = tl.arange(0, MERGE_GROUPS)[:, None]
    of = program // parts  # sequence and key/value head
    acc, top, total, late, blamed = add_partials(
        me,
        shmem.messages(me, partials) + (of.to(tl.int64) * (SPLITS * rows) + row) * words_of(HV) + h,
        rows * words_of(HV),
        shmem.messages(me, partial_sums) + (of * SPLITS * rows + row) * 2,
        rows * 2,
        SPLITS, group, MERGE_GROUPS, me.rank, 0, valid,
    )  # fmt: skip

    head = of % K * (N // K) + row % (N // K)
    result = ((of // K) * T + row // (N // K)) * N_OUT + head % N_OUT  # which row of the result
    if WORLD > 1:
        results: tl.constexpr = B * T * N_OUT
        acc_from = shmem.messages(me, merged) + result.to(tl.int64) * words_of(HV) + h
        sums_from = shmem.messages(me, merged_sums) + result * 2
        sent = shmem.sendable(top)
        shift = tl.where(top == sent, 1.0, tl.exp2(top - sent))
        acc_at = acc_from + me.rank.to(tl.int64) * (results * words_of(HV))
        sums_at = sums_from + me.rank * (results * 2)
        acc = acc * shift[:, :, None]
        for first in tl.static_range(0, WORLD, MERGE_GROUPS):
            # Each group sends to another rank.
            peer = (me.rank + 1 + first + group) % WORLD
            wanted = valid & (first + group < WORLD) & ((N == N_OUT) | (head // N_OUT == peer))
            word = tl.arange(0, 4)[None, None, :]
            shmem.send(me, acc_at[:, :, None] + word, acc, peer[:, :, None], wanted[:, :, None] & (word >= 0))
            shmem.send(me, sums_at + 1, total * shift, peer, wanted & (h == 0))
            shmem.send(me, sums_at, sent, peer, wanted & (h == 0))
        valid = valid & ((N == N_OUT) | (head // N_OUT == me.rank))
        shmem.report_late(me, late, blamed)
        acc, top, total, late, blamed = add_partials(
            me, acc_from, results * words_of(HV), sums_from, results * 2,
            WORLD, tl.zeros((1, 1), tl.int32), 1, 0, 1, valid,
        )  # fmt: skip

    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        higher = tl.maximum(top, sink)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(top - base)
        acc, total, top = acc * kept[:, :, None], total * kept + tl.exp2(sink - base), higher
    share = tl.where(total == 0, 0.0, 1 / total)
    word = tl.arange(0, 4)[None, None, :]
    out_ptrs = (out_ptr + result.to(tl.int64) * HV + h)[:, :, None] + word
    out = acc * share[:, :, None]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=valid[:, :, None] & (h[:, :, None] + word < HV))
    tl.store(residual_ptr + result, (top + tl.log2(total)) * LN_2, mask=valid & (h == 0))
    shmem.report_late(me, late, blamed)
    shmem.finish(me)


@triton.jit
def add_partials(
    me,
    acc_from,  # [1, places], of part 0
    acc_stride,  # from one part to the next
    sums_from,
    sums_stride,
    PARTS: tl.constexpr,
    group,  # [groups, 1]
    GROUPS: tl.constexpr,
    peer,  # who sends part 0
    peer_step: tl.constexpr,  # and each later one
    mask,  # [1, places]
):
    """Adds up partial results as they arrive: (acc, top, total, and the two that `report_late` takes)."""
    TOGETHER: tl.constexpr = min(9, tl.cdiv(PARTS, GROUPS))
    EVEN: tl.constexpr = PARTS % (GROUPS * TOGETHER) == 0
    zero = tl.zeros((GROUPS, mask.shape[1]), tl.float32)
    a, b, c, d, top, total = zero, zero, zero, zero, zero - float("inf"), zero
    late, blamed = zero.to(tl.int32), zero.to(tl.int32)
    for first in range(0, PARTS, GROUPS * TOGETHER):
        part = first + group * TOGETHER
        begin = tl.minimum(part, PARTS - 1)
        found, missing, of = shmem.receive_parts(
            me, acc_from + begin.to(tl.int64) * acc_stride, acc_stride, sums_from + begin * sums_stride, sums_stride,
            tl.minimum(PARTS - 1 - begin, TOGETHER - 1), peer + begin * peer_step, peer_step, TOGETHER, mask,
        )  # fmt: skip
        higher = top
        for i in tl.static_range(TOGETHER):
            higher = tl.maximum(higher, found[6 * i + 4])  # copies do no harm
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(top - base)
        a, b, c, d, total, top = a * kept, b * kept, c * kept, d * kept, total * kept, higher
        for i in tl.static_range(TOGETHER):
            weight = tl.exp2(found[6 * i + 4] - base)
            if not EVEN:
                weight = tl.where(part + i < PARTS, weight, 0.0)
            a += weight * found[6 * i]
            b += weight * found[6 * i + 1]
            c += weight * found[6 * i + 2]
            d += weight * found[6 * i + 3]
            total += weight * found[6 * i + 5]
        late, blamed = tl.where(missing > 0, missing, late), tl.where(missing > 0, of, blamed)
    acc = fours(a, b, c, d)
    if GROUPS > 1:
        highest = tl.max(top, axis=0, keep_dims=True)
        kept = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
        acc = tl.sum(acc * kept[:, :, None], axis=0, keep_dims=True)
        total = tl.sum(total * kept, axis=0, keep_dims=True)
        top = highest
    return acc, top, total, late, blamed


@triton.jit
def keys_before(position, rank, WORLD: tl.constexpr, STRETCH: tl.constexpr):
    """How many of the keys before a position a rank has."""
    turn: tl.constexpr = STRETCH * WORLD
    rest = tl.minimum(tl.maximum(position % turn - rank * STRETCH, 0), STRETCH)
    return position // turn * STRETCH + rest


@triton.jit
def place_of(slot, rank, WORLD: tl.constexpr, STRETCH: tl.constexpr):
    """The place, among those of all ranks, of a rank's slot; without a ring, the position that it keeps."""
    return (slot // STRETCH * WORLD + rank) * STRETCH + slot % STRETCH


@triton.jit
def blocks_of_ring(
    start,  # the place of key 0, at least 0 and less than WORLD * S
    oldest,  # of the keys that are needed; at most end
    end,  # of all keys, at most WORLD * S
    rank,
    WORLD: tl.constexpr,
    S: tl.constexpr,
    STRETCH: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The first of a rank's blocks with keys of a ring, and how many there are: past its last block is its first."""
    rest = WORLD * S - start
    place = tl.where(oldest < rest, start + oldest, oldest - rest)
    over = end - oldest - (WORLD * S - place)  # so many lie at the beginning, if any
    begin = keys_before(place, rank, WORLD, STRETCH)
    stop = keys_before(tl.minimum(over, 0) + WORLD * S, rank, WORLD, STRETCH)
    wrapped = keys_before(tl.maximum(over, 0), rank, WORLD, STRETCH)
    first = tl.where(begin < stop, begin // BLOCK_S, 0)
    count = tl.where(begin < stop, tl.cdiv(stop, BLOCK_S) - first, 0) + tl.cdiv(wrapped, BLOCK_S)
    # The oldest keys and the newest ones may lie in one block.
    return first, tl.minimum(count, tl.cdiv(S, BLOCK_S))


@triton.constexpr_function
def words_of(hv):
    """Messages for a row of acc: whole fours."""
    return (hv + 3) // 4 * 4


@triton.constexpr_function
def width_of(hv):
    """The same as a power of 2."""
    return max(4, triton.next_power_of_2(hv))


@triton.constexpr_function
def depth_of(h, dtype):
    """The width of a block of queries or keys: tl.dot takes 32 bytes of a row or more."""
    return max(256 // dtype.primitive_bitwidth, triton.next_power_of_2(h))


@triton.jit
def fours(a, b, c, d):
    """[..., 4] of 4 blocks."""
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(a.shape[0], a.shape[1], 4)
