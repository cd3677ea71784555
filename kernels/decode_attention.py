"""Attention of a few new tokens over keys and values that the ranks share out among them, in one launch.

The first programs attend: each takes a part (a split) of this rank's keys for one sequence and one key/value head, and
sends the partial result to this rank's own messages. The later programs merge: each takes some rows of the result,
adds up this rank's splits as they arrive, sends the sum to the ranks that need it, and adds up those of all ranks.

A partial result is (acc, top, total) with acc = sum_s 2^(logit_s - top) value_s and total = sum_s 2^(logit_s - top),
logits in units of log 2, as in FlashDecoding. A part without keys has top = -inf and adds nothing.

A merging program waits for attending ones, which have lower ids, and for its twin on every other rank.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import shmem

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def decode_attention_kernel(
    query_ptr,  # [B, T, N, H]
    key_ptr,  # [PAGES in all, PAGE, K, H], or [PAGES in all, K, PAGE, H] if HEAD_MAJOR
    value_ptr,  # the same with HV
    lengths_ptr,  # i32 [B], keys of all ranks, the new tokens' included
    tables_ptr,  # i32 [B, S / PAGE] if PAGED: which pages hold a sequence; else page b holds sequence b
    key_scale_ptr,  # f32; KEY_SCALE says of what: "none", "tensor", "head" [K] or "token" (one for each row of H)
    value_scale_ptr,
    sinks_ptr,  # [N] if SINKS
    team,
    partials,  # messages [B, K, SPLITS, T * G, HV]: acc of each split
    partial_sums,  # messages [B, K, SPLITS, 2, T * G]: top and total
    merged,  # messages [WORLD, B, T, N_OUT, HV]: acc of each rank
    merged_sums,  # messages [WORLD, 2, B, T, N_OUT]
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
    MERGE_ROWS: tl.constexpr,  # rows that a merging program takes
    MERGE_SPLITS: tl.constexpr,  # splits that it adds up at once
):
    row_tiles: tl.constexpr = tl.cdiv(T * (N // K), BLOCK_R)
    attending: tl.constexpr = B * SPLITS * row_tiles * K
    program = tl.program_id(0)
    if program < attending:
        attend(
            team, program, query_ptr, key_ptr, value_ptr, lengths_ptr, tables_ptr, key_scale_ptr, value_scale_ptr,
            partials, partial_sums,
            T, N, K, H, HV, S, PAGE, PAGED, HEAD_MAJOR, STRETCH, WINDOW, SCALE, SOFT_CAP, KEY_SCALE, VALUE_SCALE,
            WORLD, SPLITS, BLOCK_R, BLOCK_S,
        )  # fmt: skip
    else:
        merge(
            team, program - attending, partials, partial_sums, merged, merged_sums, sinks_ptr, out_ptr, residual_ptr,
            B, T, N, N_OUT, K, HV, SINKS, WORLD, SPLITS, MERGE_ROWS, MERGE_SPLITS,
        )  # fmt: skip


@triton.jit
def attend(
    team, program, query_ptr, key_ptr, value_ptr, lengths_ptr, tables_ptr, key_scale_ptr, value_scale_ptr,
    partials, partial_sums,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    S: tl.constexpr, PAGE: tl.constexpr, PAGED: tl.constexpr, HEAD_MAJOR: tl.constexpr,
    STRETCH: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr,
    KEY_SCALE: tl.constexpr, VALUE_SCALE: tl.constexpr,
    WORLD: tl.constexpr, SPLITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Sends this rank the partial result of one split."""
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

    h = tl.arange(0, triton.next_power_of_2(H))
    hv = tl.arange(0, triton.next_power_of_2(HV))
    query_row = (sequence * T + row // group) * N + head * group + row % group
    valid = (row < rows)[:, None] & (h[None, :] < H)
    query = tl.load(query_ptr + query_row.to(tl.int64)[:, None] * H + h[None, :], mask=valid, other=0.0)

    # This rank's keys that some row attends to, in blocks, of which the split takes its share.
    stop = tl.minimum(keys_before(length, me.rank, WORLD, STRETCH), S)
    begin = 0
    if WINDOW >= 0:
        begin = tl.minimum(keys_before(tl.maximum(length - T - WINDOW, 0), me.rank, WORLD, STRETCH), stop)
    first_block = begin // BLOCK_S
    blocks = tl.maximum(tl.cdiv(stop, BLOCK_S) - first_block, 0)
    last = first_block + (blocks.to(tl.int64) * (split + 1) // SPLITS).to(tl.int32)
    first = first_block + (blocks.to(tl.int64) * split // SPLITS).to(tl.int32)
    position_of_row = length - T + row // group

    scale = SCALE
    if KEY_SCALE == "tensor":
        scale = SCALE * tl.load(key_scale_ptr)
    elif KEY_SCALE == "head":
        scale = SCALE * tl.load(key_scale_ptr + head)

    acc, top, total = nothing(BLOCK_R, HV)
    for block in range(first, last):
        slot = block * BLOCK_S + tl.arange(0, BLOCK_S)
        there = slot < stop
        if not PAGED:
            page = sequence.to(tl.int64)
        elif PAGE % BLOCK_S == 0:
            page = tl.load(tables_ptr + sequence * (S // PAGE) + block // (PAGE // BLOCK_S)).to(tl.int64)
        else:
            page = tl.load(tables_ptr + sequence * (S // PAGE) + slot // PAGE, mask=there, other=0).to(tl.int64)
        if HEAD_MAJOR:
            cache_row = (page * K + head) * PAGE + slot % PAGE
        else:
            cache_row = (page * PAGE + slot % PAGE) * K + head

        key = tl.load(
            key_ptr + cache_row[:, None] * H + h[None, :], mask=there[:, None] & (h[None, :] < H), other=0.0
        ).to(query.dtype)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # [BLOCK_R, BLOCK_S]
        if KEY_SCALE == "token":
            logits = logits * tl.load(key_scale_ptr + cache_row, mask=there, other=0.0)[None, :]
        if SOFT_CAP > 0:
            # tanh(x) = 1 - 2 / (e^2x + 1), right at both ends.
            logits = SOFT_CAP * (1 - 2 / (tl.exp2(logits * (2 * LOG2_E / SOFT_CAP)) + 1))
        position = (slot // STRETCH * WORLD + me.rank) * STRETCH + slot % STRETCH
        seen = there[None, :] & (position[None, :] <= position_of_row[:, None])
        if WINDOW >= 0:
            seen = seen & (position[None, :] >= position_of_row[:, None] - WINDOW)
        logits = tl.where(seen, logits * LOG2_E, float("-inf"))

        higher = tl.maximum(top, tl.max(logits, axis=1))
        # A row that has seen no key yet keeps the weight 0 for all.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(logits - base[:, None])
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weight, axis=1)
        top = higher
        # Scales of an fp8 cache may be so small that weights times them are no f16: the largest goes to the sum.
        UNIT: tl.constexpr = VALUE_SCALE == "token" and query.dtype == tl.float16
        if VALUE_SCALE == "token":
            value_scale = tl.load(value_scale_ptr + cache_row, mask=there, other=0.0)
            if UNIT:
                unit = tl.max(tl.abs(value_scale), axis=0)
                value_scale = value_scale / tl.where(unit == 0, 1.0, unit)
            weight = weight * value_scale[None, :]
        # What lies behind the last key may be anything, and 0 * NaN is NaN.
        value = tl.load(
            value_ptr + cache_row[:, None] * HV + hv[None, :], mask=there[:, None] & (hv[None, :] < HV), other=0.0
        ).to(query.dtype)
        if UNIT:
            acc = acc * kept[:, None] + tl.dot(weight.to(query.dtype), value, input_precision="ieee") * unit
        else:
            acc = tl.dot(weight.to(query.dtype), value, acc * kept[:, None], input_precision="ieee")

    if VALUE_SCALE == "tensor":
        acc = acc * tl.load(value_scale_ptr)
    elif VALUE_SCALE == "head":
        acc = acc * tl.load(value_scale_ptr + head)
    shmem.verify(me)
    at = (sequence * K + head) * SPLITS + split
    acc_at = shmem.messages(me, partials) + at.to(tl.int64) * (rows * HV)
    sums_at = shmem.messages(me, partial_sums) + at * (2 * rows)
    send_partial(me, acc, top, total, acc_at, sums_at, rows, row, row < rows, HV, me.rank)
    shmem.finish(me)


@triton.jit
def merge(
    team, program, partials, partial_sums, merged, merged_sums, sinks_ptr, out_ptr, residual_ptr,
    B: tl.constexpr, T: tl.constexpr, N: tl.constexpr, N_OUT: tl.constexpr, K: tl.constexpr, HV: tl.constexpr,
    SINKS: tl.constexpr, WORLD: tl.constexpr, SPLITS: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_SPLITS: tl.constexpr,
):  # fmt: skip
    """Adds up some rows: the splits of this rank, then those of all ranks; stores the result."""
    me = shmem.start(team)
    rows: tl.constexpr = T * (N // K)
    parts: tl.constexpr = tl.cdiv(rows, MERGE_ROWS)
    group = program // parts
    row = program % parts * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
    valid = row < rows
    acc_from = shmem.messages(me, partials) + group.to(tl.int64) * (SPLITS * rows * HV)
    sums_from = shmem.messages(me, partial_sums) + group * (SPLITS * 2 * rows)
    acc, top, total = nothing(MERGE_ROWS, HV)
    arrived = me.ready
    for first in range(0, SPLITS, MERGE_SPLITS):
        split = first + tl.arange(0, MERGE_SPLITS)
        tops_from = sums_from + (first * (2 * rows) + program % parts * MERGE_ROWS)
        patient = shmem.linger(me, tops_from, tl.minimum(SPLITS - first, MERGE_SPLITS), 2 * rows)
        acc, top, total, came = add_partials(
            me, acc, top, total, acc_from, sums_from, rows, split, split < SPLITS, row, valid, HV, me.rank, patient
        )
        arrived = arrived & came

    head = group % K * (N // K) + row % (N // K)
    place = ((group // K) * T + row // (N // K)) * N_OUT + head % N_OUT  # of the row in the result
    if WORLD > 1:
        results: tl.constexpr = B * T * N_OUT
        acc_from, sums_from = shmem.messages(me, merged), shmem.messages(me, merged_sums)
        acc_at, sums_at = acc_from + me.rank.to(tl.int64) * (results * HV), sums_from + me.rank * (2 * results)
        for i in tl.static_range(1, WORLD + 1):
            peer = (me.rank + i) % WORLD
            wanted = valid & ((N == N_OUT) | (head // N_OUT == peer))
            send_partial(me, acc, top, total, acc_at, sums_at, results, place, wanted, HV, peer)
        valid = valid & ((N == N_OUT) | (head // N_OUT == me.rank))
        rank = tl.arange(0, triton.next_power_of_2(WORLD))
        acc, top, total = nothing(MERGE_ROWS, HV)
        acc, top, total, came = add_partials(
            me, acc, top, total, acc_from, sums_from, results,
            rank, rank < WORLD, place, valid, HV, rank[:, None], me.ready,
        )  # fmt: skip
        arrived = arrived & came

    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        acc, top, total = add(acc, top, total, tl.zeros_like(acc), sink, 1.0)
    h = tl.arange(0, triton.next_power_of_2(HV))
    out = tl.where(total[:, None] == 0, 0.0, acc / total[:, None])
    out = tl.where(arrived, out, float("nan"))
    residual = tl.where(arrived, (top + tl.log2(total)) * LN_2, float("nan"))
    out_ptrs = out_ptr + place.to(tl.int64)[:, None] * HV + h[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (h[None, :] < HV))
    tl.store(residual_ptr + place, residual, mask=valid)
    shmem.finish(me)


@triton.jit
def keys_before(position, rank, WORLD: tl.constexpr, STRETCH: tl.constexpr):
    """How many of the keys before a position a rank has."""
    turn: tl.constexpr = STRETCH * WORLD
    rest = tl.minimum(tl.maximum(position % turn - rank * STRETCH, 0), STRETCH)
    return position // turn * STRETCH + rest


@triton.jit
def nothing(ROWS: tl.constexpr, HV: tl.constexpr):
    """The partial result of no keys."""
    acc = tl.zeros((ROWS, triton.next_power_of_2(HV)), dtype=tl.float32)
    return acc, tl.full((ROWS,), float("-inf"), dtype=tl.float32), tl.zeros((ROWS,), dtype=tl.float32)


@triton.jit
def add(acc, top, total, other_acc, other_top, other_total):
    """The sum of two partial results."""
    higher = tl.maximum(top, other_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept, others = tl.exp2(top - base), tl.exp2(other_top - base)
    return acc * kept[:, None] + other_acc * others[:, None], higher, total * kept + other_total * others


@triton.jit
def send_partial(
    me,
    acc,  # [rows, HV]
    top,  # [rows]
    total,
    acc_at,  # messages [ROWS, HV]
    sums_at,  # messages [2, ROWS]
    ROWS: tl.constexpr,
    row,  # [rows], where they go
    mask,
    HV: tl.constexpr,
    peer,
):
    """Sends a partial result, the sums last: who waits polls them alone."""
    # Of top a message loses nothing that matters, if acc and total are made to fit what arrives.
    sent = shmem.sendable(top)
    shift = tl.where(top == sent, 1.0, tl.exp2(top - sent))
    h = tl.arange(0, triton.next_power_of_2(HV))
    acc_ptrs = acc_at + row[:, None] * HV + h[None, :]
    shmem.send(me, acc_ptrs, acc * shift[:, None], peer, mask[:, None] & (h[None, :] < HV))
    shmem.send(me, sums_at + ROWS + row, total * shift, peer, mask)
    shmem.send(me, sums_at + row, sent, peer, mask)


@triton.jit
def add_partials(
    me,
    acc,  # [rows, HV]
    top,  # [rows]
    total,
    acc_from,  # messages [PARTS, ROWS, HV]
    sums_from,  # messages [PARTS, 2, ROWS]
    ROWS: tl.constexpr,
    part,  # [parts]
    part_mask,
    row,  # [rows], where they are
    row_mask,
    HV: tl.constexpr,
    peer,  # who sends them, scalar or [parts, 1]
    patient,
):
    """Adds partial results as they arrive: (acc, top, total, whether all came)."""
    mask = part_mask[:, None] & row_mask[None, :]
    h = tl.arange(0, triton.next_power_of_2(HV))
    acc_ptrs = acc_from + (part[:, None] * ROWS + row[None, :])[:, :, None] * HV + h[None, None, :]
    acc_mask = mask[:, :, None] & (h[None, None, :] < HV)
    # Tops and totals as one block [2, parts, rows], so that one look fetches them.
    which = tl.arange(0, 2)[:, None, None]
    sums = sums_from + ((part[:, None] * (2 * ROWS) + row[None, :])[None, :, :] + which * ROWS)
    sums_mask = mask[None, :, :] & (which >= 0)
    acc_peer, sums_peer = peer, peer
    if len(peer.shape) == 2:
        acc_peer, sums_peer = peer[:, :, None], peer[None, :, :]
    tops_totals, accs, came = shmem.receive_both(me, sums, acc_ptrs, sums_peer, acc_peer, sums_mask, acc_mask, patient)
    tops = tl.max(tl.where((which == 0) & mask[None, :, :], tops_totals, float("-inf")), axis=0)
    totals = tl.sum(tl.where((which == 1) & mask[None, :, :], tops_totals, 0.0), axis=0)

    higher = tl.maximum(top, tl.max(tops, axis=0))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.where(mask, tl.exp2(tops - base[None, :]), 0.0)
    kept = tl.exp2(top - base)
    total = total * kept + tl.sum(weights * totals, axis=0)
    acc = acc * kept[:, None] + tl.sum(weights[:, :, None] * tl.where(mask[:, :, None], accs, 0.0), axis=0)
    return acc, higher, total, came
