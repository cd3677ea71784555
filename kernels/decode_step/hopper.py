"""A decode step in one launch: one new token of each sequence through all layers of a dense decoder, to the logits.

One program runs on each multiprocessor, from the beginning to the end. Its warps have two roles:

* *load* streams all that is read once through a ring in shared memory: the program's rows of each layer's weights, and
  its part of the old keys and values. It waits for nothing but room in the ring, so it runs ahead of what depends on
  this token, into the next phases and layers.
* *compute* takes the blocks in the same order, and does depend: a layer has six phases, and at the end of each one all
  programs of the rank meet.

    project     queries, keys and values of the normalised stream
    attend      each program to its part of the keys
    merge       the parts of each head
    add         the product of the heads, summed over the ranks, added to the stream
    gate        the gated MLP's inner part
    add         its product, summed over the ranks, added to the stream

A row of weights belongs to the same program on every rank. So a sum over the ranks is exchanged between a program and its
twins alone, as words that say by themselves whether they have arrived, and is added up in the order of the ranks: every
rank has the same bits. No sum is divided among programs, so these are the same every time.

Scratch has one copy of each array for all layers: who writes it again has met everybody who read it.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.blocks import epilogue
from jaxtaxfree.kernels.decode_step import attention
from jaxtaxfree.kernels.decode_step import ring as rings

PHASES = gl.constexpr(6)  # of a layer


class Sizes(NamedTuple):
    """Constants that most functions need."""

    LAYERS: Any
    B: Any
    D: Any
    HEADS: Any
    KV_HEADS: Any
    H: Any
    F: Any
    V: Any
    PROGRAMS: Any
    SPLITS: Any  # parts of the keys of a sequence and key/value head
    WORDS: Any  # of a sum from one rank, at least


class Weights(NamedTuple):
    """Descriptors, all of arrays [rows, columns / 64, 64]: weights [out, in] of all layers, and the cache's rows."""

    query: Any
    key: Any
    value: Any
    out: Any
    gate: Any
    up: Any
    down: Any
    unembed: Any
    old_keys: Any
    old_values: Any


@triton.constexpr_function
def sizes_of(*sizes):
    """The constant of these sizes."""
    return Sizes(*sizes)


@gluon.jit
def decode_step_kernel(
    x_ptr,  # f32 [B, D]
    query_desc,  # [L * HEADS * H, D / 64, 64]
    key_desc,  # [L * KV_HEADS * H, D / 64, 64]
    value_desc,
    out_desc,  # [L * D, HEADS * H / 64, 64]
    gate_desc,  # [L * F, D / 64, 64]
    up_desc,
    down_desc,  # [L * D, F / 64, 64]
    unembed_desc,  # [V, D / 64, 64]
    old_keys_desc,  # [L * B * KV_HEADS * SLOTS, H / 64, 64]
    old_values_desc,
    attn_norm_ptr,  # [L, D]
    mlp_norm_ptr,  # [L, D]
    final_norm_ptr,  # [D]
    query_bias_ptr,  # [L, HEADS * H], or None
    key_bias_ptr,  # [L, KV_HEADS * H], or None
    value_bias_ptr,
    query_norm_ptr,  # [L, H], or None
    key_norm_ptr,
    cos_ptr,  # f32 [tables, POSITIONS, ROTATED / 2]
    sin_ptr,
    lengths_ptr,  # i32 [B], tokens in the cache
    windows_ptr,  # i32 [L], positions before a token that it attends to
    tables_ptr,  # i32 [L], which rotary table is a layer's
    team,
    stream,  # scratch f32 [B, D], the residual stream
    qkv,  # scratch f32 [B, (HEADS + 2 KV_HEADS) * H]
    accs,  # scratch f32 [B, KV_HEADS, SPLITS, G, H]
    tops,  # scratch f32 [B, KV_HEADS, SPLITS, G, 2]
    heads,  # scratch f32 [B, HEADS * H]
    hidden,  # scratch f32 [B, F]
    sums,  # messages i32 [2 * L, WORLD, WORDS]
    met,  # signal: programs that have come to the end of a phase
    logits_ptr,  # f32 [B, V]
    new_keys_ptr,  # [L, B, KV_HEADS, H]
    new_values_ptr,
    LAYERS: gl.constexpr,
    B: gl.constexpr,
    D: gl.constexpr,
    HEADS: gl.constexpr,  # those of this rank, as are all sizes below
    KV_HEADS: gl.constexpr,
    H: gl.constexpr,
    F: gl.constexpr,
    V: gl.constexpr,
    SLOTS: gl.constexpr,
    POSITIONS: gl.constexpr,
    ROTATED: gl.constexpr,
    EPS: gl.constexpr,
    PLUS_ONE: gl.constexpr,  # gains of norms are 1 + weight
    SCALE: gl.constexpr,  # of scores
    SOFT_CAP: gl.constexpr,  # of scores; 0: none
    ACTIVATION: gl.constexpr,
    RESIDUAL_SCALE: gl.constexpr,
    LOGIT_SCALE: gl.constexpr,
    LOGIT_SOFT_CAP: gl.constexpr,
    WORLD: gl.constexpr,
    PROGRAMS: gl.constexpr,
    SPLITS: gl.constexpr,
    WORDS: gl.constexpr,  # of a sum from one rank, at least
    STAGE: gl.constexpr,  # elements of a stage of the ring
    STAGES: gl.constexpr,
    MERGED: gl.constexpr,  # see `attention.merge`
):
    me = shmem.start(team, WORLD=WORLD)
    SIZES: gl.constexpr = sizes_of(LAYERS, B, D, HEADS, KV_HEADS, H, F, V, PROGRAMS, SPLITS, WORDS)
    weights = Weights(
        query_desc, key_desc, value_desc, out_desc, gate_desc, up_desc, down_desc, unembed_desc, old_keys_desc,
        old_values_desc,
    )  # fmt: skip
    ring = rings.allocate(query_desc, STAGE, STAGES)
    gl.warp_specialize(
        [
            (
                compute,
                (
                    me, ring, weights, x_ptr, attn_norm_ptr, mlp_norm_ptr, final_norm_ptr, query_bias_ptr, key_bias_ptr,
                    value_bias_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, lengths_ptr, windows_ptr,
                    tables_ptr, stream, qkv, accs, tops, heads, hidden, sums, met, logits_ptr, new_keys_ptr,
                    new_values_ptr, SIZES, SLOTS, POSITIONS, ROTATED, EPS, PLUS_ONE, SCALE, SOFT_CAP, ACTIVATION,
                    RESIDUAL_SCALE, LOGIT_SCALE, LOGIT_SOFT_CAP, WORLD, MERGED,
                ),
            ),
            (load, (ring, weights, lengths_ptr, windows_ptr, SIZES, SLOTS)),
        ],
        [1],
        [40],
    )  # fmt: skip
    shmem.finish(me)


@gluon.jit
def load(ring, weights, lengths_ptr, windows_ptr, SIZES: gl.constexpr, SLOTS: gl.constexpr):
    """Fetches all that the program reads once, in the order in which `compute` takes it."""
    position = (gl.program_id(0) * 0, gl.program_id(0) * 0 + 1)
    for layer in range(SIZES.LAYERS):
        position = fetch_projections(ring, position, weights, layer, SIZES)
        window = gl.load(windows_ptr + layer)
        position = attention.fetch(
            ring, position, weights.old_keys, weights.old_values, lengths_ptr, window, layer, SIZES, SLOTS
        )
        position = fetch_share(ring, position, weights.out, layer, SIZES.D, SIZES.HEADS * SIZES.H, SIZES)
        first, count = share_of(SIZES.F, weights.gate.block_shape[0], 1, SIZES.PROGRAMS)
        for i in range(count):
            row = layer * SIZES.F + (first + i) * weights.gate.block_shape[0]
            position = rings.fetch_rows(ring, position, weights.gate, row, SIZES.D)
            position = rings.fetch_rows(ring, position, weights.up, row, SIZES.D)
        position = fetch_share(ring, position, weights.down, layer, SIZES.D, SIZES.F, SIZES)
    first, count = share_of(SIZES.V, weights.unembed.block_shape[0], 1, SIZES.PROGRAMS)
    for i in range(count):
        row = (first + i) * weights.unembed.block_shape[0]
        position = rings.fetch_rows(ring, position, weights.unembed, row, SIZES.D)


@gluon.jit
def fetch_projections(ring, position, weights, layer, SIZES: gl.constexpr):
    """Begins to load the program's rows of queries, keys and values, which it counts one after the other."""
    ROWS: gl.constexpr = weights.query.block_shape[0]
    QUERIES: gl.constexpr = SIZES.HEADS * SIZES.H
    KEYS: gl.constexpr = SIZES.KV_HEADS * SIZES.H
    first, count = share_of(QUERIES + 2 * KEYS, ROWS, 1, SIZES.PROGRAMS)
    for i in range(count):
        row = (first + i) * ROWS
        if row < QUERIES:
            position = rings.fetch_rows(ring, position, weights.query, layer * QUERIES + row, SIZES.D)
        elif row < QUERIES + KEYS:
            position = rings.fetch_rows(ring, position, weights.key, layer * KEYS + row - QUERIES, SIZES.D)
        else:
            position = rings.fetch_rows(ring, position, weights.value, layer * KEYS + row - QUERIES - KEYS, SIZES.D)
    return position


@gluon.jit
def fetch_share(ring, position, desc, layer, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SIZES: gl.constexpr):
    """Begins to load the program's rows of a matrix whose product is summed over the ranks."""
    first, count = share_of(ROWS, desc.block_shape[0], unit_of(desc), SIZES.PROGRAMS)
    for i in range(count):
        row = layer * ROWS + (first + i) * desc.block_shape[0]
        position = rings.fetch_rows(ring, position, desc, row, COLUMNS)
    return position


@triton.constexpr_function
def unit_of(desc):
    """How many blocks of rows go together where they are sent: 4 words or more."""
    return max(1, 4 // desc.block_shape[0])


@triton.constexpr_function
def most_of(rows, block, unit, programs):
    """The most blocks of rows that a program has."""
    blocks = -(-rows // block)
    return -(-blocks // (unit * programs)) * unit


@gluon.jit
def share_of(ROWS: gl.constexpr, BLOCK: gl.constexpr, UNIT: gl.constexpr, PROGRAMS: gl.constexpr):
    """The program's blocks of rows: (the first one, how many)."""
    MOST: gl.constexpr = most_of(ROWS, BLOCK, UNIT, PROGRAMS)
    first = gl.program_id(0) * MOST
    return first, gl.minimum(gl.maximum((ROWS + BLOCK - 1) // BLOCK - first, 0), MOST)


@gluon.jit
def compute(
    me, ring, weights, x_ptr, attn_norm_ptr, mlp_norm_ptr, final_norm_ptr, query_bias_ptr, key_bias_ptr,
    value_bias_ptr, query_norm_ptr, key_norm_ptr, cos_ptr, sin_ptr, lengths_ptr, windows_ptr, tables_ptr, stream, qkv,
    accs, tops, heads, hidden, sums, met, logits_ptr, new_keys_ptr, new_values_ptr, SIZES: gl.constexpr, SLOTS: gl.constexpr,
    POSITIONS: gl.constexpr, ROTATED: gl.constexpr, EPS: gl.constexpr, PLUS_ONE: gl.constexpr, SCALE: gl.constexpr,
    SOFT_CAP: gl.constexpr, ACTIVATION: gl.constexpr, RESIDUAL_SCALE: gl.constexpr, LOGIT_SCALE: gl.constexpr,
    LOGIT_SOFT_CAP: gl.constexpr, WORLD: gl.constexpr, MERGED: gl.constexpr,
):  # fmt: skip
    """The phases of all layers, and the logits."""
    B: gl.constexpr = SIZES.B
    D: gl.constexpr = SIZES.D
    QUERIES: gl.constexpr = SIZES.HEADS * SIZES.H
    KEYS: gl.constexpr = SIZES.KV_HEADS * SIZES.H
    stream = shmem.scratch(me, stream, gl.float32)
    qkv = shmem.scratch(me, qkv, gl.float32)
    accs = shmem.scratch(me, accs, gl.float32)
    tops = shmem.scratch(me, tops, gl.float32)
    heads = shmem.scratch(me, heads, gl.float32)
    hidden = shmem.scratch(me, hidden, gl.float32)
    x = x_ptr
    position = (me.rank * 0, me.rank * 0)
    # NaN once something has not come, so that nothing is sent that looks like a result.
    factor = gl.where(me.ready, 1.0, float("nan"))
    for layer in range(SIZES.LAYERS):
        position = project(
            ring, position, weights, x, attn_norm_ptr + layer * D, bias_of(query_bias_ptr, layer, QUERIES),
            bias_of(key_bias_ptr, layer, KEYS), bias_of(value_bias_ptr, layer, KEYS), qkv, factor, SIZES, EPS, PLUS_ONE,
        )  # fmt: skip
        factor = meet(me, met, layer * PHASES, factor, SIZES)
        position = attention.attend(
            ring, position, weights.old_keys, weights.old_values, qkv, bias_of(query_norm_ptr, layer, SIZES.H),
            bias_of(key_norm_ptr, layer, SIZES.H), cos_ptr, sin_ptr, lengths_ptr, gl.load(windows_ptr + layer),
            gl.load(tables_ptr + layer), layer, factor, accs, tops, new_keys_ptr, new_values_ptr, SIZES, SLOTS,
            POSITIONS, ROTATED, SCALE, SOFT_CAP, EPS, PLUS_ONE,
        )  # fmt: skip
        factor = meet(me, met, layer * PHASES + 1, factor, SIZES)
        attention.merge(accs, tops, heads, factor, SIZES, MERGED)
        factor = meet(me, met, layer * PHASES + 2, factor, SIZES)
        position, factor = add(
            me, ring, position, weights.out, heads, x, stream, sums, met, 2 * layer, layer * PHASES + 3,
            factor, QUERIES, RESIDUAL_SCALE, WORLD, SIZES,
        )  # fmt: skip
        position = gate(
            ring, position, weights, stream, mlp_norm_ptr + layer * D, hidden, factor, SIZES, ACTIVATION, EPS,
            PLUS_ONE,
        )  # fmt: skip
        factor = meet(me, met, layer * PHASES + 4, factor, SIZES)
        position, factor = add(
            me, ring, position, weights.down, hidden, stream, stream, sums, met, 2 * layer + 1,
            layer * PHASES + 5, factor, SIZES.F, RESIDUAL_SCALE, WORLD, SIZES,
        )  # fmt: skip
        x = stream
    unembed(
        ring,
        position,
        weights,
        x,
        final_norm_ptr,
        logits_ptr,
        factor,
        SIZES,
        EPS,
        PLUS_ONE,
        LOGIT_SCALE,
        LOGIT_SOFT_CAP,
    )


@gluon.jit
def bias_of(ptr, layer, SIZE: gl.constexpr):
    """A layer's part of [L, SIZE], or None."""
    if ptr is not None:
        ptr = ptr + layer * SIZE
    return ptr


@gluon.jit
def meet(me, met, phase, factor, SIZES: gl.constexpr):
    """Ends a phase: what any program of this rank has stored in it all others see.

    Returns: `factor`, NaN if some did not come.
    """
    shmem.arrive(me, met)
    return await_all(me, met, phase, factor, SIZES)


@gluon.jit
def await_all(me, met, phase, factor, SIZES: gl.constexpr):
    """The second half of `meet`."""
    PHASES_A_CALL: gl.constexpr = SIZES.LAYERS * PHASES
    count = ((me.epoch - 1) * (PHASES_A_CALL * SIZES.PROGRAMS)).to(gl.int32) + (phase + 1) * SIZES.PROGRAMS
    return gl.where(shmem.meet(me, met, count), factor, float("nan"))


@gluon.jit
def project(
    ring, position, weights, x, norm_ptr, query_bias_ptr, key_bias_ptr, value_bias_ptr, qkv, factor, SIZES: gl.constexpr,
    EPS: gl.constexpr, PLUS_ONE: gl.constexpr,
):  # fmt: skip
    """Queries, keys and values: the program's rows of them, one after the other."""
    desc = weights.query
    B: gl.constexpr = SIZES.B
    ROWS: gl.constexpr = desc.block_shape[0]
    QUERIES: gl.constexpr = SIZES.HEADS * SIZES.H
    KEYS: gl.constexpr = SIZES.KV_HEADS * SIZES.H
    first, count = share_of(QUERIES + 2 * KEYS, ROWS, 1, SIZES.PROGRAMS)
    vectors = rings.vectors_of(desc, x, norm_ptr, factor, SIZES.D, SIZES.B, EPS, PLUS_ONE)
    for i in range(count):
        products, position = rings.multiply(ring, position, desc, vectors, SIZES.D, SIZES.B)
        row = (first + i) * ROWS + rings.rows_of(desc)
        bias = row.to(gl.float32) * 0.0
        if query_bias_ptr is not None:
            of_key, of_value = row - QUERIES, row - QUERIES - KEYS
            bias += gl.load(query_bias_ptr + row, mask=row < QUERIES, other=0.0).to(gl.float32)
            bias += gl.load(key_bias_ptr + of_key, mask=(of_key >= 0) & (of_key < KEYS), other=0.0).to(gl.float32)
            bias += gl.load(value_bias_ptr + of_value, mask=(of_value >= 0) & (of_value < KEYS), other=0.0).to(
                gl.float32
            )
        for b in gl.static_range(B):
            gl.store(qkv + b * (QUERIES + 2 * KEYS) + row, products[b] + bias)
    return position


@gluon.jit
def gate(
    ring, position, weights, x, norm_ptr, hidden, factor, SIZES: gl.constexpr, ACTIVATION: gl.constexpr, EPS: gl.constexpr,
    PLUS_ONE: gl.constexpr,
):  # fmt: skip
    """The program's rows of activation(gate) * up."""
    desc = weights.gate
    B: gl.constexpr = SIZES.B
    ROWS: gl.constexpr = desc.block_shape[0]
    first, count = share_of(SIZES.F, ROWS, 1, SIZES.PROGRAMS)
    vectors = rings.vectors_of(desc, x, norm_ptr, factor, SIZES.D, SIZES.B, EPS, PLUS_ONE)
    for i in range(count):
        gates, position = rings.multiply(ring, position, desc, vectors, SIZES.D, SIZES.B)
        ups, position = rings.multiply(ring, position, weights.up, vectors, SIZES.D, SIZES.B)
        row = (first + i) * ROWS + rings.rows_of(desc)
        for b in gl.static_range(B):
            value = epilogue.activate_gated(ups[b], gates[b], ACTIVATION)
            gl.store(hidden + b * SIZES.F + row, value, mask=row < SIZES.F)
    return position


@gluon.jit
def add(
    me, ring, position, desc, source, old, new, sums, met, which, phase, factor, COLUMNS: gl.constexpr,
    SCALE: gl.constexpr, WORLD: gl.constexpr, SIZES: gl.constexpr,
):  # fmt: skip
    """new = old + SCALE * (product of `source`, summed over the ranks): the program's rows. Ends the phase.

    Args:
      source: f32 [B, COLUMNS].
      old, new: f32 [B, D], the stream before and after, which may be the same.
      which: number of the sum in this call.

    Returns: (position, factor).
    """
    B: gl.constexpr = SIZES.B
    ROWS: gl.constexpr = desc.block_shape[0]
    MOST: gl.constexpr = most_of(SIZES.D, ROWS, unit_of(desc), SIZES.PROGRAMS)
    WORDS: gl.constexpr = MOST * B * ROWS  # of a program
    first, count = share_of(SIZES.D, ROWS, unit_of(desc), SIZES.PROGRAMS)
    vectors = rings.vectors_of(desc, source, None, factor, COLUMNS, B, 0.0, False)
    box = shmem.messages(me, sums) + which * (WORLD * SIZES.WORDS)
    for i in range(count):
        products, position = rings.multiply(ring, position, desc, vectors, COLUMNS, B)
        r = rings.rows_of(desc)
        row = (first + i) * ROWS + r
        for b in gl.static_range(B):
            if WORLD == 1:
                value = gl.load(old + b * SIZES.D + row, mask=row < SIZES.D, other=0.0) + products[b] * SCALE
                gl.store(new + b * SIZES.D + row, value, mask=row < SIZES.D)
            else:
                word = ((first + i) * B + b) * ROWS + r
                send(me, box, word, products[b], WORLD, SIZES.WORDS)
    if WORLD == 1:
        factor = meet(me, met, phase, factor, SIZES)
    else:
        # A quarter of the words is a row of vectors.
        begin, end = first * (B * ROWS) // 4, (first + count) * (B * ROWS) // 4
        SPREAD: gl.constexpr = triton.next_power_of_2(WORDS // 4)
        words, late = shmem.receive_vectors(me, box, begin, end, 4, SIZES.WORDS, SPREAD, 4, 1, WORLD)
        word = gl.arange(0, words[0].shape[0], shmem.vectors_of(4, gl.num_warps()))
        row = (first + word // (B * ROWS)) * ROWS + word % ROWS
        at = word // ROWS % B * SIZES.D + row
        inside = (word < count * (B * ROWS)) & (row < SIZES.D)
        total = words[0].to(gl.float32, bitcast=True)
        for rank in gl.static_range(1, WORLD):
            total += words[rank].to(gl.float32, bitcast=True)
        value = gl.load(old + at, mask=inside, other=0.0) + total * SCALE
        gl.store(new + at, value, mask=inside)
        shmem.arrive(me, met)
        shmem.clear_vectors(me, box, begin, end, late, 4, SIZES.WORDS, SPREAD, 4, 1, WORLD)
        factor = await_all(me, met, phase, factor, SIZES)
    return position, factor


@gluon.jit
def send(me, box, word, value, WORLD: gl.constexpr, STRIDE: gl.constexpr):
    """Sends this rank's part of a sum to the twins of this program, on every rank."""
    words = value.to(gl.int32, bitcast=True)
    for i in gl.static_range(1, WORLD + 1):
        shmem.send_words(me, box + me.rank * STRIDE + word, words, (me.rank + i) % WORLD)


@gluon.jit
def unembed(
    ring, position, weights, x, norm_ptr, logits_ptr, factor, SIZES: gl.constexpr, EPS: gl.constexpr, PLUS_ONE: gl.constexpr,
    SCALE: gl.constexpr, SOFT_CAP: gl.constexpr,
):  # fmt: skip
    """The program's logits."""
    desc = weights.unembed
    B: gl.constexpr = SIZES.B
    ROWS: gl.constexpr = desc.block_shape[0]
    first, count = share_of(SIZES.V, ROWS, 1, SIZES.PROGRAMS)
    vectors = rings.vectors_of(desc, x, norm_ptr, factor, SIZES.D, SIZES.B, EPS, PLUS_ONE)
    for i in range(count):
        products, position = rings.multiply(ring, position, desc, vectors, SIZES.D, SIZES.B)
        row = (first + i) * ROWS + rings.rows_of(desc)
        for b in gl.static_range(B):
            logit = products[b] * SCALE
            if SOFT_CAP > 0:
                logit = SOFT_CAP * (1 - 2 / (gl.exp(logit * (2 / SOFT_CAP)) + 1))
            gl.store(logits_ptr + b * SIZES.V + row, logit, mask=row < SIZES.V)
