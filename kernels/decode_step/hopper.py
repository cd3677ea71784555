"""A decode step in one launch: one new token of each sequence through all layers of a dense decoder, to the logits.

One program runs on each multiprocessor, from the beginning to the end. Its warps have two roles:

* *load* streams all that is read once through a ring in shared memory: the program's rows of each layer's weights, and
  its part of the old keys and values. It waits for nothing but room in the ring, so it runs ahead of what depends on
  this token, into the next phases and layers.
* *compute* takes the blocks in the same order, and does depend: a layer has six phases. All programs of the rank meet
  at the end of a phase, or its results are messages, which say themselves whether they have come.

    project     queries, keys and values of the normalised stream, sent to those who attend; or all meet
    attend      each program to its part of the keys, sent to those who merge; or all meet
    merge       the parts of each head, sent to all programs
    add         the product of the heads, summed over the ranks and added to the stream
    gate        the gated MLP's inner part, sent to all
    add         its product, likewise

The end of `add` has three forms. Where that is not too much, each program sends its rows of this rank's part of the sum
to all programs of all ranks, packed (`packed.py`): each adds up all rows, and has the whole stream in registers. Else
it exchanges its rows with those who have the same ones on other ranks, and sends what the stream has become to the
programs of its rank. With norms behind the blocks a program needs all rows of a result first: there all meet instead.

`phases.py` has the products and how phases end, `attention.py` attention's part, `ring.py` the ring and the products of
its blocks, two at a time for one sequence. Those are of one sequence or few, whose vectors lie in registers in f32.
`many.py` has the same phases by tensor cores (`tensor_cores.py`), for more of them. `attention_cores.py` has attention
by tensor cores, which goes with either.

A block is taken without a meeting of the warps but the one that gives its stage back: each warp leaves what it has of
the sums in shared memory, and a phase adds these up at its end.

New keys and values go into the cache itself, in front of the logits: by then all programs have met since any of them
has read the old ones of the last layer, if only for this.

Scratch has one copy of most arrays for all layers: who writes it again has met everybody who read it. Parts of heads
have two, for who does not meet behind `project`. Messages, and the new keys and values, have places of their own in
each layer.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.decode_step import attention, attention_cores, many, phases
from jaxtaxfree.kernels.decode_step import ring as rings


class Sizes(NamedTuple):
    """The kernel's constants, all of one rank. They are explained where they are its parameters."""

    LAYERS: Any
    B: Any
    TENSOR_CORES: Any
    ATTENTION_CORES: Any
    VECTORS: Any
    NARROW: Any
    D: Any
    HEADS: Any
    KV_HEADS: Any
    H: Any
    F: Any
    V: Any
    SLOTS: Any
    PAGE: Any
    POOL: Any
    POSITIONS: Any
    ROTATED: Any
    EPS: Any
    PLUS_ONE: Any
    POST_NORMS: Any
    SCORE_SCALE: Any
    SCORE_SOFT_CAP: Any
    ACTIVATION: Any
    RESIDUAL_SCALE: Any
    LOGIT_SCALE: Any
    LOGIT_SOFT_CAP: Any
    WORLD: Any
    PROGRAMS: Any
    SPLITS: Any
    WORDS: Any
    MERGED: Any
    IN_FLIGHT: Any
    PACE: Any
    PATIENCE: Any
    STREAM_TOLD: Any
    SUMS_TOLD: Any
    QUERIES_TOLD: Any
    PARTS_TOLD: Any
    SUMS: Any
    WINDOW: Any
    TABLE: Any


class Given(NamedTuple):
    """What the kernel is given: descriptors of what it reads once, and pointers to the rest."""

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
    attn_norm: Any
    mlp_norm: Any
    final_norm: Any
    query_bias: Any
    key_bias: Any
    value_bias: Any
    query_norm: Any
    key_norm: Any
    post_attn_norm: Any
    post_mlp_norm: Any
    query_scale: Any
    key_scale: Any
    value_scale: Any
    out_scale: Any
    gate_scale: Any
    up_scale: Any
    down_scale: Any
    unembed_scale: Any
    old_key_scales: Any
    old_value_scales: Any
    cos: Any
    sin: Any
    lengths: Any
    pages: Any
    windows: Any
    tables: Any


class Kept(NamedTuple):
    """The kernel's scratch, as pointers; what is used but once a layer as it is given, which takes no registers."""

    new: Any
    new_scales: Any

    stream: Any
    block: Any
    scaled: Any
    squares: Any
    qkv: Any
    accs: Any
    tops: Any
    heads: Any
    hidden: Any
    told: Any


class Results(NamedTuple):
    logits: Any
    cache_keys: Any
    cache_values: Any
    cache_key_scales: Any
    cache_value_scales: Any
    times: Any


@triton.constexpr_function
def sizes_of(*sizes):
    """The constant of these sizes."""
    return Sizes(*sizes)


@gluon.jit
def decode_step_kernel(
    x_ptr,  # f32 [B, D]
    query_desc,  # [L * HEADS * H, D / 64, 64]; weights of 8 bits are [..., 128]
    key_desc,  # [L * KV_HEADS * H, D / 64, 64]
    value_desc,
    out_desc,  # [L * D, HEADS * H / 64, 64]
    gate_desc,  # [L * F, D / 64, 64]
    up_desc,
    down_desc,  # [L * D, F / 64, 64]
    unembed_desc,  # [V, D / 64, 64]
    old_keys_desc,  # [L * B * KV_HEADS * SLOTS, H / 64, 64]; of 8 bits [..., 128]; of pages POOL * PAGE for B * SLOTS
    old_values_desc,
    attn_norm_ptr,  # [L, D]
    mlp_norm_ptr,  # [L, D]
    final_norm_ptr,  # [D]
    query_bias_ptr,  # [L, HEADS * H], or None
    key_bias_ptr,  # [L, KV_HEADS * H], or None
    value_bias_ptr,
    query_norm_ptr,  # [L, H], or None
    key_norm_ptr,
    post_attn_norm_ptr,  # [L, D], or None
    post_mlp_norm_ptr,
    query_scale_ptr,  # f32 [L, HEADS * H], of each row of weights of 8 bits; or None
    key_scale_ptr,  # f32 [L, KV_HEADS * H], likewise
    value_scale_ptr,
    out_scale_ptr,  # f32 [L, D], or None
    gate_scale_ptr,  # f32 [L, F], or None
    up_scale_ptr,
    down_scale_ptr,  # f32 [L, D], or None
    unembed_scale_ptr,  # f32 [V], or None
    old_key_scales_ptr,  # f32 [L, B, KV_HEADS, SLOTS], or [L, POOL, KV_HEADS, PAGE], of keys of 8 bits; or None
    old_value_scales_ptr,
    cos_ptr,  # f32 [tables, POSITIONS, ROTATED / 2]
    sin_ptr,
    lengths_ptr,  # i32 [B], tokens in the cache; the new one is not stored if it is below 0, or the cache is full
    pages_ptr,  # i32 [B, SLOTS / PAGE], which pages of the pool a sequence has; or None
    windows_ptr,  # i32 [L], positions before a token that it attends to; None if they are WINDOW in all layers
    tables_ptr,  # i32 [L], which rotary table is a layer's; None likewise
    team,
    stream,  # scratch f32 [2, B, D], the residual stream before a layer's attention, and before its MLP
    block,  # scratch f32 [2, B, D], results of attention and of the MLP before the norm behind them; [B, D] for
    # tensor cores
    scaled,  # for tensor cores: scratch [8 or 16, D] of the weights' dtype, the stream times the gains of the next norm
    squares,  # and f32 [2, PROGRAMS, 16], sums of squares of the stream, and of a block's result
    qkv,  # scratch f32 [B, (HEADS + 2 KV_HEADS) * H]; or messages [L, ...]
    new,  # scratch [2, L, B, KV_HEADS, H] of the cache's dtype, the new keys and values
    new_scales,  # scratch f32 [2, L, B, KV_HEADS], their scales if they have 8 bits
    accs,  # scratch f32 [1 or 2, B, KV_HEADS, SPLITS, HEADS / KV_HEADS, H]; or messages [L, ...]
    tops,  # scratch f32 [1 or 2, B, KV_HEADS, SPLITS, HEADS / KV_HEADS, 2]; or messages [L, ...], of heads in pairs
    heads,  # messages f32 [L, B, HEADS * H]; for tensor cores scratch [8 or 16, HEADS * H] of the weights' dtype
    hidden,  # messages f32 [L, B, F]; likewise
    told,  # messages f32 [2 * L, B, D], the stream behind each block; or [2 * L, WORLD, B, D / 2], the ranks' parts
    # of the blocks' results, packed; or none
    sums,  # messages i32 [2 * L, WORLD, WORDS], or none
    met,  # signal: programs that have come to the end of a phase
    logits_ptr,  # f32 [B, V]
    cache_keys_ptr,  # the memory of old_keys_desc
    cache_values_ptr,
    cache_key_scales_ptr,  # that of old_key_scales_ptr, or None
    cache_value_scales_ptr,
    times_ptr,  # i32 [PROGRAMS, LAYERS + 1, 6, 4], what `phases.stamp` writes; or None
    LAYERS: gl.constexpr,
    B: gl.constexpr,
    TENSOR_CORES: gl.constexpr,  # which multiply, see `many.py`
    ATTENTION_CORES: gl.constexpr,  # which multiply by old keys and values, see `attention_cores.py`
    VECTORS: gl.constexpr,  # that lie in memory for these, 8 or 16
    D: gl.constexpr,
    HEADS: gl.constexpr,  # those of this rank, as are all sizes
    KV_HEADS: gl.constexpr,
    H: gl.constexpr,
    F: gl.constexpr,
    V: gl.constexpr,
    SLOTS: gl.constexpr,  # of a sequence
    PAGE: gl.constexpr,  # slots of a page
    POOL: gl.constexpr,  # pages of the pool
    POSITIONS: gl.constexpr,
    ROTATED: gl.constexpr,
    WINDOW: gl.constexpr,
    TABLE: gl.constexpr,
    EPS: gl.constexpr,
    PLUS_ONE: gl.constexpr,  # gains of norms are 1 + weight
    POST_NORMS: gl.constexpr,  # there are norms behind the blocks
    SCORE_SCALE: gl.constexpr,
    SCORE_SOFT_CAP: gl.constexpr,  # 0: none
    ACTIVATION: gl.constexpr,
    RESIDUAL_SCALE: gl.constexpr,
    LOGIT_SCALE: gl.constexpr,
    LOGIT_SOFT_CAP: gl.constexpr,
    WORLD: gl.constexpr,
    PROGRAMS: gl.constexpr,
    SPLITS: gl.constexpr,  # parts of the keys of a sequence and key/value head
    WORDS: gl.constexpr,  # of a sum from one rank, at least
    MERGED: gl.constexpr,  # columns of a head that a program merges at a time, a power of 2 that divides H
    IN_FLIGHT: gl.constexpr,  # blocks on their way into the ring at a time, at most
    PACE: gl.constexpr,  # cycles from one load to the next, at least
    PATIENCE: gl.constexpr,  # cycles before a program looks for told sums or the inner part, see `patience_within`
    STREAM_TOLD: gl.constexpr,  # all programs get the stream by messages, and `stream` is for a program's own rows
    SUMS_TOLD: gl.constexpr,  # all programs get the ranks' parts of sums by messages, and have the stream in registers
    QUERIES_TOLD: gl.constexpr,  # programs get queries, new keys and values by messages
    PARTS_TOLD: gl.constexpr,  # who merges parts of heads gets them by messages
    STAGE: gl.constexpr,  # elements of 16 bits of a stage of the ring
    STAGES: gl.constexpr,
    SUMS: gl.constexpr,  # f32 in shared memory for what warps have of some sums
):
    me = shmem.start(team, VERIFY=False, WORLD=WORLD)  # `load` does not wait for what `compute` verifies
    SIZES: gl.constexpr = sizes_of(
        LAYERS, B, TENSOR_CORES, ATTENTION_CORES, VECTORS, query_desc.dtype.primitive_bitwidth == 8, D, HEADS, KV_HEADS,
        H, F, V, SLOTS, PAGE, POOL, POSITIONS, ROTATED, EPS, PLUS_ONE, POST_NORMS, SCORE_SCALE, SCORE_SOFT_CAP,
        ACTIVATION, RESIDUAL_SCALE, LOGIT_SCALE, LOGIT_SOFT_CAP, WORLD, PROGRAMS, SPLITS, WORDS, MERGED, IN_FLIGHT,
        PACE, PATIENCE, STREAM_TOLD, SUMS_TOLD, QUERIES_TOLD, PARTS_TOLD, SUMS, WINDOW, TABLE,
    )  # fmt: skip
    given = Given(
        query_desc, key_desc, value_desc, out_desc, gate_desc, up_desc, down_desc, unembed_desc, old_keys_desc,
        old_values_desc, attn_norm_ptr, mlp_norm_ptr, final_norm_ptr, query_bias_ptr,
        key_bias_ptr, value_bias_ptr, query_norm_ptr, key_norm_ptr, post_attn_norm_ptr, post_mlp_norm_ptr,
        query_scale_ptr, key_scale_ptr, value_scale_ptr, out_scale_ptr, gate_scale_ptr, up_scale_ptr, down_scale_ptr,
        unembed_scale_ptr, old_key_scales_ptr, old_value_scales_ptr, cos_ptr, sin_ptr, lengths_ptr, pages_ptr,
        windows_ptr, tables_ptr,
    )  # fmt: skip
    if TENSOR_CORES:
        heads_ptr = shmem.scratch(me, heads, final_norm_ptr.dtype.element_ty)
        hidden_ptr = shmem.scratch(me, hidden, final_norm_ptr.dtype.element_ty)
    else:
        heads_ptr, hidden_ptr = shmem.messages(me, heads), shmem.messages(me, hidden)
    qkv_ptr = shmem.messages(me, qkv) if QUERIES_TOLD else shmem.scratch(me, qkv, gl.float32)
    accs_ptr = shmem.messages(me, accs) if PARTS_TOLD else shmem.scratch(me, accs, gl.float32)
    tops_ptr = shmem.messages(me, tops) if PARTS_TOLD else shmem.scratch(me, tops, gl.float32)
    kept = Kept(
        new, new_scales, shmem.scratch(me, stream, gl.float32), shmem.scratch(me, block, gl.float32),
        shmem.scratch(me, scaled, final_norm_ptr.dtype.element_ty), shmem.scratch(me, squares, gl.float32),
        qkv_ptr, accs_ptr, tops_ptr, heads_ptr, hidden_ptr, shmem.messages(me, told),
    )  # fmt: skip
    results = Results(
        logits_ptr, cache_keys_ptr, cache_values_ptr, cache_key_scales_ptr, cache_value_scales_ptr, times_ptr
    )  # fmt: skip
    ring = rings.allocate(final_norm_ptr.dtype.element_ty, STAGE, STAGES, SUMS)
    if TENSOR_CORES:
        gl.warp_specialize(
            [
                (many.compute, (me, ring, given, kept, results, x_ptr, sums, met, SIZES)),
                (many.load, (ring, given, SIZES)),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(compute, (me, ring, given, kept, results, x_ptr, sums, met, SIZES)), (load, (ring, given, SIZES))],
            [1], [24],
        )  # fmt: skip
    shmem.finish(me)


@gluon.jit
def load(ring, given, SIZES: gl.constexpr):
    """Fetches all that the program reads once, in the order in which `compute` takes it."""
    position = rings.first_of_loads()
    lengths = attention.lengths_of(given, SIZES)
    for layer in range(SIZES.LAYERS):
        position = phases.fetch_projections(ring, position, given, layer, SIZES)
        position = attention.fetch(ring, position, given, lengths, layer, SIZES)
        position = phases.fetch_share(ring, position, given.out, layer, SIZES.HEADS * SIZES.H, SIZES)
        position = phases.fetch_gate(ring, position, given, layer, SIZES)
        position = phases.fetch_share(ring, position, given.down, layer, SIZES.F, SIZES)
    phases.fetch_unembed(ring, position, given, SIZES)


@gluon.jit
def compute(me, ring, given, kept, results, x_ptr, sums, met, SIZES: gl.constexpr):
    """The phases of all layers, and the logits."""
    shmem.verify(me)
    x = x_ptr
    position = (me.rank * 0, me.rank * 0)
    factor = gl.where(me.ready, 1.0, float("nan"))
    lengths = attention.lengths_of(given, SIZES)
    SIZE: gl.constexpr = SIZES.B * SIZES.D
    SUMS_TOLD: gl.constexpr = SIZES.SUMS_TOLD
    NEXT: gl.constexpr = SIZES.WORLD * SIZE // 2 if SUMS_TOLD else SIZE  # from what is told to the next
    stream, block = kept.stream, kept.block
    later_stream, later_block = stream + SIZE, block + SIZE
    # With norms behind the blocks a phase has to add the result of the last block to the stream that it finds.
    if SIZES.POST_NORMS:
        last, between, after_attention, after_mlp = later_stream, stream, block, later_block
    elif SIZES.STREAM_TOLD:
        last, between, after_attention, after_mlp = stream, None, later_stream, stream
    else:
        last, between, after_attention, after_mlp = stream, later_stream, later_stream, stream
    held = rings.load_vectors(given.query, x_ptr, SIZES.D, SIZES.B) if SUMS_TOLD else ()
    norms = phases.norms_of(given.query, given.attn_norm, given.post_mlp_norm, SIZES)
    for layer in range(SIZES.LAYERS):
        phase = layer * phases.meetings_of(SIZES) - SIZES.QUERIES_TOLD  # of those that end with a meeting
        window = phases.of_each_layer(given.windows, layer, SIZES.WINDOW)
        table = phases.of_each_layer(given.tables, layer, SIZES.TABLE)
        times = phases.times_of(results.times, layer, 0, SIZES)
        told = kept.told + 2 * layer * NEXT
        if SIZES.STREAM_TOLD or SUMS_TOLD:
            found, later_found = told - NEXT, told
        else:
            found, later_found = later_block, block
        position, held = phases.project(
            me, ring, position, given, kept, held if SUMS_TOLD else x, found, stream, layer, norms, times, factor, SIZES
        )  # fmt: skip
        factor = phases.finish(me, met, phase, SIZES.QUERIES_TOLD, factor, times, SIZES)
        times = phases.times_of(results.times, layer, 1, SIZES)
        if SIZES.ATTENTION_CORES:
            position = attention_cores.attend(
                me, ring, position, given, kept, lengths, window, table, layer, factor, SIZES
            )  # fmt: skip
        else:
            position = attention.attend(
                me, ring, position, given, kept, lengths, window, table, layer, factor, SIZES
            )  # fmt: skip
        factor = phases.finish(me, met, phase + 1, SIZES.PARTS_TOLD, factor, times, SIZES)
        if phases.last_meeting_of(SIZES) and layer == SIZES.LAYERS - 1:
            shmem.arrive(me, met)  # it has read the cache, and left what is new
        phase -= SIZES.PARTS_TOLD
        times = phases.times_of(results.times, layer, 2, SIZES)
        heads = kept.heads + layer * (SIZES.B * SIZES.HEADS * SIZES.H)
        if SIZES.PARTS_TOLD:
            attention_cores.merge(me, kept, heads, layer, factor, SIZES)
        else:
            attention.merge(me, kept, heads, layer, factor, SIZES)
        phases.pass_by(times)
        # A phase's gains are on their way while the one before works.
        behind = phases.of_layer(given.post_attn_norm, layer, SIZES.D)
        mlp_norm = given.mlp_norm + layer * SIZES.D
        norms = phases.norms_of(given.gate, mlp_norm, behind, SIZES)
        times = phases.times_of(results.times, layer, 3, SIZES)
        position, factor = phases.add(
            me, ring, position, given.out, phases.of_layer(given.out_scale, layer, SIZES.D), heads, x,
            after_attention, told, sums, met, 2 * layer, phase + 2, times, factor, SIZES.HEADS * SIZES.H,
            phases.patience_within(SIZES), SIZES,
        )  # fmt: skip
        times = phases.times_of(results.times, layer, 4, SIZES)
        hidden = kept.hidden + layer * (SIZES.B * SIZES.F)
        position, held = phases.gate(
            me, ring, position, given, held if SUMS_TOLD else between, later_found, later_stream, hidden, layer, norms,
            times, factor, SIZES,
        )  # fmt: skip
        phases.pass_by(times)
        before = gl.where(layer == SIZES.LAYERS - 1, given.final_norm, given.attn_norm + (layer + 1) * SIZES.D)
        behind = phases.of_layer(given.post_mlp_norm, layer, SIZES.D)
        norms = phases.norms_of(given.query, before, behind, SIZES)
        times = phases.times_of(results.times, layer, 5, SIZES)
        position, factor = phases.add(
            me, ring, position, given.down, phases.of_layer(given.down_scale, layer, SIZES.D), hidden, later_stream,
            after_mlp, told + NEXT, sums, met, 2 * layer + 1, phase + 3, times, factor, SIZES.F, SIZES.PATIENCE, SIZES,
        )  # fmt: skip
        x = last
    if phases.last_meeting_of(SIZES):
        factor = phases.await_all(me, met, SIZES.LAYERS * phases.meetings_of(SIZES), factor, None, SIZES)
    attention.put(me, given, kept, results, SIZES)
    times = phases.times_of(results.times, SIZES.LAYERS, 0, SIZES)
    found = later_block
    if SUMS_TOLD:
        x, found = held, kept.told + (2 * SIZES.LAYERS - 1) * NEXT
    elif SIZES.STREAM_TOLD:
        x, found = None, kept.told + (2 * SIZES.LAYERS - 1) * NEXT
    phases.unembed(me, ring, position, given, x, found, norms, results.logits, times, factor, SIZES)
