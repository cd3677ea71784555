"""`decode_step`: one new token of each sequence through all layers of a dense decoder."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtaxfree.dispatch import Case
from jaxtaxfree.ops.decode_step import operations
from jaxtaxfree.ops.decode_step import reference as plain
from jaxtaxfree.ops.decode_step.call import EIGHT_BITS, Eight
from jaxtaxfree.ops.decode_step.hopper import Call, Hopper
from jaxtaxfree.ops.decode_step.reference import Params
from jaxtaxfree.ops.decode_step.spec import DecoderSpec
from jaxtaxfree.ops.kv_cache import Placement, like, placement_of
from jaxtaxfree.ops.untrusted import as_int32
from jaxtaxfree.ops.variant import Variant, choose, settings_of
from jaxtaxfree.primitive import Unsupported, check_implementation, collective, symbolic, takes_reference
from jaxtaxfree.settings import Settings
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.target import HOPPER, target_of
from jaxtaxfree.teams import Team, check_axes, check_index

# Keys and values; of 8 bits with the scales of both.
Cache = tuple[jax.Array, jax.Array] | tuple[jax.Array, jax.Array, jax.Array, jax.Array]
PARTS = "(keys, values) or (keys, values, key_scales, value_scales)"
PLACEMENTS = ("heads", "contiguous", "round_robin")
INDEX = "axis_index"  # among the names of weights: this rank's number
# Of those that do not refuse a call the cheapest one takes it.
VARIANTS: tuple[Variant[Call], ...] = (Hopper(), operations.Operations())


def decode_step[C: Cache](
    params: Params,
    x: jax.Array,
    cache: C,
    lengths: jax.Array,
    axis_name: str | Sequence[str],
    *,
    model: DecoderSpec,
    cos: jax.Array,
    sin: jax.Array,
    counts: jax.Array | None = None,
    placement: str = "heads",
    block_size: int | None = None,
    block_tables: jax.Array | None = None,
    axis_index: jax.Array | None = None,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> tuple[jax.Array, C]:
    """One new token of each sequence through all layers of a dense decoder, to the logits of the next one.

    Call it inside `jax.shard_map`. The letters are those of `jax.nn`: B sequences, T new tokens, S positions of the
    cache, N query heads, K key/value heads, H head size; and L layers, D model, F mlp, V vocabulary, W ranks. Weights
    are as checkpoints have them, [out, in], stacked over layers; each rank has whole heads, neighbours in their order.

    Args:
      params: this rank's part of the weights, of x's dtype but for those of 8 bits, see below. `model.param_shapes(W)`
        has the shapes, and `model.partition_specs(axis_name)` says how the ranks share the whole model's weights:

          q_proj          [L, N / W * H, D]      k_proj, v_proj   [L, K / W * H, D]
          o_proj          [L, D, N / W * H]      gate_proj, up_proj  [L, F / W, D]      down_proj  [L, D, F / W]
          attn_norm, mlp_norm  [L, D]            final_norm  [D]
          unembed         [V / W, D], or embed, likewise, if `model.tied`
          q_bias [L, N / W * H], k_bias, v_bias [L, K / W * H]   if `model.qkv_bias`
          q_norm, k_norm  [L, H]                                 if `model.qk_norm`
          post_attn_norm, post_mlp_norm  [L, D]                  if `model.post_norms`

        With a cache along the sequence each rank has `k_proj` and `v_proj` of all heads, [L, K * H, D], and their bias.

        Each of the matrices (those named `_proj`, and `unembed`) may have 8 bits instead: int8 or float8_e4m3fn, with
        its scales beside it, as `q_proj_scale`, of this rank's part: f32 [L, out, 1], one for each row, or
        [L, ceil(out / 128), ceil(in / 128)], one for each block; of `unembed` without L. That is what `jtf.quantize`
        gives with block=(1, -1) or (128, 128). The weight is then its values times their scales.
        `model.scale_shapes(W)` and `model.scale_specs(axis_name)` are as those of the weights.
      x: the embeddings of the new tokens, [B, D], the same on every rank, before `model.embedding_scale`. Or, to read
        prompts, [B, T, D].
      cache: (keys, values), each [L, B, K / W, S, H] by heads; along the sequence [L, B, K, S / W, H]. Of 8 bits, int8
        or float8_e4m3fn, it is (keys, values, key_scales, value_scales). The scales are f32 of the same shape without
        H, one for each position and head: [L, B, K / W, S], or [L, B, K, S / W]. New keys and values are quantised as
        by `append_kv`, each with its own scale. All tokens attend to what is stored, to their own keys as well, so that
        this is `decode_attention` behind `append_kv`, in steps and in prompts. With `block_tables` the parts are pools:
        they have pages in place of B, and the positions of a page in place of S.
      lengths: i32[B], tokens in the cache so far, the same on every rank. The first new token gets this position.
      axis_name: the mesh axis, or axes, along which the model is sharded.
      model: what the model is made of.
      cos, sin: f32 [positions, rotated / 2], or [tables, positions, rotated / 2] if the layers have several
        (`model.rotary_tables`): the rotation of each position. So a scaling of frequencies is the caller's arithmetic.
      counts: i32[B], how many of the new tokens each sequence has, from 0 to T; None: T. Those behind them leave no
        trace, and the logits of a sequence without any mean nothing.
      placement: "heads": each rank has the key/value heads of its queries, which W has to divide. "contiguous" and
        "round_robin", with `block_size`: as in `decode_attention`.
      block_tables: i32[B, pages of a sequence], for a paged cache: which pages of the pool hold the sequence, in order,
        the same ones in all layers. Then S is the positions of a page times the pages of a sequence. By heads it is the
        same on every rank; along the sequence each rank has the pages of its own positions. Sequences may share pages,
        but not those that their new tokens go to. A token is dropped if its entry is no page of the pool, as -1 is.
        Entries behind the last token do not matter; of one before it that is no page, the logits of its sequence mean
        nothing.
      axis_index: this rank's number, i32[] or i32[1], if the caller has it: `lax.axis_index(axis_name)`, taken in front
        of a loop, or an operand of the program. Without it XLA finds it out in each step, in some 3 us on an H100.
      implementation: as in `all_gather_matmul`. "fused" is, for one token of each sequence in bf16 or f16, all layers
        in one launch, on Hopper: of 1 to 16 sequences with a cache by heads, in f16 1 to 4. Of weights of 8 bits all
        layers have one dtype, with scales of rows whose lengths 128 divides; of 5 sequences or more the unembedding has
        8 bits, too. A cache of 8 bits has heads that 128 divides. Pages have positions that 8 divides, or 16 of 5
        sequences or more. It is our operations, some kernels a layer, of what is left, with a cache along the sequence,
        and on other GPUs. None takes what has been measured, on several ranks: not our operations with weights or a
        cache of 8 bits, or with pages.
      config: {"kernel": "hopper", ...} is one launch, and how its kernel splits its work; the shape decides whatever it
        leaves out. {"kernel": "operations"} is our operations.

    Returns: (logits f32[B, V / W] of each sequence's last new token, the cache with the new tokens, a tuple like the
      one that was passed). Positions past the cache's end or before its beginning are dropped: such a token attends to
      what is in the cache, not to itself.

    Raises:
      ValueError: if the operands do not fit together.
      TypeError: if `axis_index` is no whole number.
      NameError: if `axis_name` is not bound.
      NotImplementedError: for experts; for several tokens, or layers with different windows, and
        a cache along the sequence; and if "fused" is asked for and cannot run here.
    """
    axes = check_axes(axis_name, "decode_step")
    check_implementation(implementation)
    index = check_index(axis_index, "decode_step")
    _check_kinds(params, cache, model, placement, block_size)
    world = lax.axis_size(axes)
    params = {name: jnp.asarray(weight) for name, weight in params.items()}
    x, lengths = jnp.asarray(x), jnp.asarray(lengths)
    key, value, *scales = (jnp.asarray(part) for part in cache if part is not None)
    tables = [] if block_tables is None else [jnp.asarray(block_tables)]
    cos, sin = (jnp.asarray(table) for table in (cos, sin))
    cos, sin = (table[None] if table.ndim == 2 else table for table in (cos, sin))
    given = x if x.ndim == 3 else x[:, None]
    counts = jnp.full(given.shape[:1], given.shape[1], jnp.int32) if counts is None else jnp.asarray(counts)
    eight = _check(params, x, key, value, scales, tables, lengths, counts, cos, sin, model, world, placement)
    counts = jnp.clip(counts, 0, given.shape[1])
    place = None
    if placement != "heads":
        page, count = (key.shape[3], tables[0].shape[1]) if tables else (None, 1)
        place = placement_of(placement, block_size, count * key.shape[3], page, "decode_step")
        if len(set(model.windows)) > 1:
            raise NotImplementedError("decode_step takes layers with different windows only with a cache by heads.")
    settings = settings_of("decode_step", VARIANTS, config)
    operands = [given, key, value, lengths.astype(jnp.int32), counts.astype(jnp.int32), cos, sin]
    paged = bool(tables)
    named = params if index is None else params | {INDEX: index}
    operands += [*map(as_int32, tables), *scales, *named.values()]
    params_: dict[str, Any] = {"axes": axes, "names": tuple(named), "model": model, "placement": place}
    params_ |= {"eight": eight, "paged": paged}
    reasons = _refusals(operands, model, world, place, eight, paged)
    if takes_reference("decode_step", [x, key], implementation, reasons):
        logits, *parts = reference(*operands, **params_)
    else:
        logits, *parts = decode_step_p.bind(*operands, implementation=implementation, config=settings, **params_)
    return logits, like(cache, parts)


def reference(
    x: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, counts: jax.Array, cos: jax.Array,
    sin: jax.Array, *others: jax.Array, axes: tuple[str, ...], names: tuple[str, ...], model: DecoderSpec,
    placement: Placement | None, eight: tuple[Eight, ...] = (), paged: bool = False, config: Any = None,
) -> list[jax.Array]:  # fmt: skip
    """What the operation means, in plain `lax`: [logits, keys, values, and their scales if there are any].

    Args:
      others: tables, if it is paged, scales of keys and values, if there are any, and the weights with these names,
        of which the last may be INDEX.
    """
    del config, eight
    tables, scales, params, _ = _parted(others, names, paged)
    how = {"axes": axes, "model": model, "placement": placement, "block_tables": tables}
    logits, cache = plain.run(params, x, (key, value, *scales), lengths, counts, cos, sin, **how)
    return [logits, *cache]


def fused(
    x: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, counts: jax.Array, cos: jax.Array,
    sin: jax.Array, *others: jax.Array, axes: tuple[str, ...], names: tuple[str, ...], model: DecoderSpec,
    placement: Placement | None, config: tuple[tuple[str, Any], ...], compute_capability: int,
    eight: tuple[Eight, ...] = (), paged: bool = False, implementation: str | None = None,
) -> list[jax.Array]:  # fmt: skip
    """The operation by one kernel, or by operations. As `reference`."""
    operands = [x, key, value]
    tables, scales, params, index = _parted(others, names, paged)
    if reasons := symbolic(*operands):
        raise Unsupported("decode_step", reasons)
    pages = 0 if tables is None else tables.shape[1]
    call = _call_of(x, key, cos, model, lax.axis_size(axes), placement, eight, pages, compute_capability)
    chosen = choose("decode_step", VARIANTS, call, dict(config))
    lengths = jnp.where(counts > 0, lengths, -1)  # where there is no token, it leaves no trace
    if chosen.variant.name == operations.Operations.name:
        how: dict[str, Any] = {"axes": axes, "model": model, "placement": placement, "block_tables": tables}
        how["implementation"] = implementation or "fused"
        logits, cache = operations.run(params, x[:, 0], (key, value, *scales), lengths, cos, sin, **how)
        return [logits, *cache]
    stream = plain.scaled_embedding(x[:, 0], model).astype(jnp.float32)
    turns = cos.astype(jnp.float32), sin.astype(jnp.float32)
    cache = key, value, *scales
    arrays = chosen.arrays(params, stream, cache, lengths, *turns, *([] if tables is None else [tables]))
    kernel, keywords = chosen.variant.kernel, chosen.keywords
    outs = shmem_call(kernel, *arrays, axis_name=axes, axis_index=index, implementation=implementation, **keywords)
    return list(outs[: 1 + len(cache)])  # and times, if they are taken


def _parted(
    others: Sequence[jax.Array], names: tuple[str, ...], paged: bool
) -> tuple[jax.Array | None, Sequence[jax.Array], Params, jax.Array | None]:
    """Tables of a paged cache, its scales, if there are any, the weights with these names, one behind the other, and
    this rank's number, if the caller has given it."""
    tables, first, count = others[0] if paged else None, int(paged), len(others) - len(names)
    named = dict(zip(names, others[count:]))
    index = named.pop(INDEX, None)
    return tables, others[first:count], named, index


def _call_of(
    x: Any, key: Any, cos: Any, model: DecoderSpec, world: int, placement: Placement | None, eight: tuple[Eight, ...],
    pages: int, compute_capability: int,
) -> Call:  # fmt: skip
    """The call with these operands (arrays or their types), and so many pages of a sequence."""
    return Call(
        model=model,
        world=world,
        batch=x.shape[0],
        tokens=x.shape[1],
        slots=key.shape[3],
        positions=cos.shape[1],
        dtype=np.dtype(x.dtype),
        cache_dtype=np.dtype(key.dtype),
        by_heads=placement is None,
        eight=eight,
        pool=key.shape[1] if pages else 0,
        pages=pages,
        target=target_of(compute_capability),
    )


def _refusals(
    operands: Sequence[Any], model: DecoderSpec, world: int, placement: Placement | None, eight: tuple[Eight, ...],
    paged: bool,
) -> list[str]:  # fmt: skip
    """All that keeps every kernel from taking these operands, whatever the GPU."""
    if reasons := symbolic(*operands):
        return reasons
    of = operands[0], operands[1], operands[5], model, world, placement, eight, operands[7].shape[1] if paged else 0
    call = _call_of(*of, HOPPER.compute_capability)
    refusals = [variant.refuses_by_shape(call) for variant in VARIANTS]
    return [] if not all(refusals) else list(dict.fromkeys(reason for reasons in refusals for reason in reasons))


def _slower(
    x: Any, key: Any, *others: Any, axes: tuple[str, ...], model: DecoderSpec, placement: Placement | None,
    eight: tuple[Eight, ...], paged: bool, **_: Any,
) -> str | None:  # fmt: skip
    """Why XLA is taken. Us a step of ours and of XLA's same program, each at its best flags:

    One launch, on 2 H100: Llama 3 8B's share of 8 GPUs, 1 and 4 sequences, 283 and 458, and 866 and 1235; Llama 3 70B's
    share, one sequence, 787 and 2410; Llama 3 8B on 4 GPUs 756 and 2412. On 2 H200, Llama 3 8B's share of 8 GPUs, 8
    sequences: one launch 362, operations 477 to 504, XLA 1145. On 4 GPUs, 16 sequences: 757, 868 to 913, and 1176 by
    the best of XLA's by hand.

    With weights of int8, on 2 H100, Llama 3 8B's share of 8 GPUs: one launch 236, 288 and 358 for 1, 2 and 8 sequences,
    XLA without flags 648, 990 and 1213.

    The same share with a cache of int8, 1, 4, 8 and 16 sequences: one launch 282, 306, 318 and 349, operations 585,
    537, 572 and 608, XLA without flags 855, 1343, 1382 and 1453. In pages, 1 and 4: one launch 278 and 301, operations
    549 and 490, XLA 784 for one.
    """
    if placement is not None:
        return "operations were measured with a cache by heads alone"
    which = {"weights of 8 bits": eight, "a cache of 8 bits": key.dtype.itemsize == 1, "a cache in pages": paged}
    if any(which.values()):
        pages, target = others[5].shape[1] if paged else 0, HOPPER.compute_capability
        call = _call_of(x, key, others[3], model, lax.axis_size(axes), placement, eight, pages, target)
        if Hopper().refuses_by_shape(call):
            of = " and ".join(name for name, given in which.items() if given)
            return f"with {of} it was measured in one launch alone"
    return None if lax.axis_size(axes) > 1 else "it was measured with several ranks alone"


def case(
    x: Any, key: Any, *others: Any, team: Team, model: DecoderSpec, placement: Placement | None,
    eight: tuple[Eight, ...] = (), paged: bool = False, **_: Any,
) -> Case | None:  # fmt: skip
    """What the tables know a call by; None if none of its kind is in them, as where operations take it.

    Layers do alike, so a row is of models of any number of layers; and of any vocabulary, which is one product of many.
    """
    if eight or key.dtype.itemsize == 1 or paged:
        return None  # the tables are of weights and caches of 16 bits, without pages
    cos = others[3]
    call = _call_of(x, key, cos, model, team.world, placement, eight, 0, team.compute_capability)
    if Hopper().refuses_by_shape(call):
        return None  # such as a cache along the sequence: operations have tables of their own
    sizes = {name: getattr(model, name) for name in ("d_model", "heads", "kv_heads", "head_dim", "d_mlp")}
    return Case(
        operation="decode_step",
        device_kind=team.device_kind,
        same={"world": team.world, "dtype": x.dtype.name, "b": call.batch, **sizes},
        along="slots",
        size=call.slots,
        choose=lambda slots, asked: choose("decode_step", VARIANTS, dataclasses.replace(call, slots=slots), asked),
    )


decode_step_p = collective("decode_step", reference=reference, fused=fused, slower=_slower, case=case)


def _check_kinds(params: Any, cache: Any, model: Any, placement: Any, block_size: Any) -> None:
    """Raises ValueError if something is of another kind than what has shapes to be checked."""
    wrong = []
    if not isinstance(model, DecoderSpec):
        wrong.append(f"model must be a DecoderSpec, not {type(model).__name__}")
    if not isinstance(params, Mapping):
        wrong.append(f"params must be a mapping of names to arrays, not {type(params).__name__}")
    if not isinstance(cache, tuple | list):
        wrong.append(f"cache must be {PARTS}, not {type(cache).__name__}")
    elif (missing := [part is None for part in cache]) not in ([False] * 2, [False] * 4, [False, False, True, True]):
        found = f"{len(cache)} parts" + (f", of which {sum(missing)} None" if any(missing) else "")
        wrong.append(f"cache must be {PARTS}, not {found}")
    if placement == "heads" and block_size is not None:
        wrong.append(f'block_size={block_size} goes with placement="round_robin": by heads there are no blocks')
    if wrong:
        raise ValueError(f"decode_step cannot take these arguments: {'; '.join(wrong)}.")


def _check(
    params: Params, x: jax.Array, key: jax.Array, value: jax.Array, scales: Sequence[jax.Array],
    tables: Sequence[jax.Array], lengths: jax.Array, counts: jax.Array, cos: jax.Array, sin: jax.Array,
    model: DecoderSpec, world: int, placement: str,
) -> tuple[Eight, ...]:  # fmt: skip
    """The weights of 8 bits.

    Raises ValueError, with all reasons, if the operands do not fit together; NotImplementedError for what is not there.
    """
    if model.experts:
        raise NotImplementedError(
            f"decode_step has no experts, and this model has experts={model.experts}: jaxtaxfree.models runs it."
        )
    wrong = []
    by_heads = placement == "heads"
    if placement not in PLACEMENTS:
        wrong.append(f"there is no placement {placement!r} (choose one of {', '.join(map(repr, PLACEMENTS))})")
    for name in ("heads", "d_mlp", "vocab", *(["kv_heads"] if by_heads else [])):
        if getattr(model, name) % world:
            wrong.append(f"{world} ranks do not divide {name}={getattr(model, name)}")
    if wrong:
        raise ValueError(f"decode_step cannot take this model: {'; '.join(wrong)}.")
    if x.ndim not in (2, 3) or x.shape[-1] != model.d_model:
        wrong.append(f"x must be [B, {model.d_model}] or [B, T, {model.d_model}], not {list(x.shape)}")
    elif x.ndim == 3 and x.shape[1] == 0:
        wrong.append("x has no token, and the logits are those of the last one")
    for name, of in (("x", x), ("cos", cos), ("sin", sin)):
        if not jnp.issubdtype(of.dtype, jnp.floating):
            wrong.append(f"{name} must be of floats, not {of.dtype}")
    shapes = model.param_shapes(world, by_heads)
    if missing := [name for name in shapes if name not in params]:
        wrong.append(f"params lacks {', '.join(missing)}")
    narrow = [name for name in model.matrices if name in params and params[name].dtype.name in EIGHT_BITS]
    known = [*shapes, *(f"{name}_scale" for name in model.matrices)]
    if unknown := [name for name in params if name not in known]:
        wrong.append(f"params has {', '.join(unknown)}, which this model has not")
    for name, shape in shapes.items():
        if name in params and (params[name].shape != shape or (params[name].dtype != x.dtype and name not in narrow)):
            found, other = params[name], f", or {' or '.join(EIGHT_BITS)}" if name in model.matrices else ""
            wrong.append(f"{name} must be {x.dtype}{list(shape)}{other}, not {found.dtype}{list(found.shape)}")
    rows, blocks = (model.scale_shapes(world, by_heads, blocks) for blocks in (False, True))
    eight = []
    for name in model.matrices:
        scale = f"{name}_scale"
        if name in narrow and scale not in params:
            wrong.append(f"{name} is {params[name].dtype}, so params needs {scale}")
        elif name not in narrow and scale in params:
            wrong.append(f"params has {scale}, and {name} has no 8 bits")
        elif name in narrow:
            found = params[scale]
            if found.dtype != np.float32 or found.shape not in (rows[scale], blocks[scale]):
                of = f"{list(rows[scale])} (of rows) or {list(blocks[scale])} (of blocks)"
                wrong.append(f"{scale} must be float32{of}, not {found.dtype}{list(found.shape)}")
            eight.append(Eight.of(name, params[name], found))
    b, heads = x.shape[0], model.kv_heads // world if by_heads else model.kv_heads
    rows_of, positions = ("pages", "page size") if tables else (b, "S")
    wrong += _cache_faults(key, value, scales, (model.layers, rows_of, heads, positions, model.head_dim))
    for of in tables:
        wanted = f"block_tables must be i32[{b}, pages of a sequence]"
        if of.ndim != 2 or of.shape[0] != b or not jnp.issubdtype(of.dtype, jnp.integer):
            wrong.append(f"{wanted}, not {of.dtype}{list(of.shape)}")
        elif of.shape[1] == 0:
            wrong.append(f"{wanted}, of one page or more, not {of.dtype}{list(of.shape)}")
    for name, of in (("lengths", lengths), ("counts", counts)):
        if of.shape != (b,) or not jnp.issubdtype(of.dtype, jnp.integer):
            wrong.append(f"{name} must be i32[{b}], not {of.dtype}{list(of.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        small = table.ndim != 3 or table.shape[0] < model.tables or table.shape[1] == 0
        if small or table.shape[2] != model.rotated // 2:
            wanted = f"[{model.tables}, positions, {model.rotated // 2}]"
            wrong.append(f"{name} must be {wanted}, not {list(table.shape)}")
    if cos.shape != sin.shape:
        wrong.append(f"cos is {list(cos.shape)} and sin {list(sin.shape)}")
    if wrong:
        raise ValueError(f"decode_step cannot take these operands: {'; '.join(wrong)}.")
    return tuple(eight)


def _cache_faults(
    key: jax.Array, value: jax.Array, scales: Sequence[jax.Array], sizes: tuple[int | str, ...]
) -> list[str]:
    """All reasons for which these are not the parts of a cache of these sizes, of which those with names may be any."""
    wrong = []
    for name, part in (("keys", key), ("values", value)):
        each = list(zip(sizes, part.shape))
        if part.ndim != 5 or any(found != size for size, found in each if not isinstance(size, str)):
            wanted = f"[{', '.join(map(str, sizes))}]"
            wrong.append(f"the cache's {name} must be {wanted}, not {list(part.shape)}")
        elif any(found == 0 for size, found in each if isinstance(size, str)):
            wrong.append(f"the cache's {name} have no room for a position: {list(part.shape)}")
    if key.dtype.name in EIGHT_BITS and not scales:
        wrong.append(f"the cache is {key.dtype}, so it must be (keys, values, key_scales, value_scales)")
    elif key.dtype.name not in EIGHT_BITS and (key.dtype.itemsize == 1 or not jnp.issubdtype(key.dtype, jnp.floating)):
        wrong.append(f"the cache must be of floats, or {' or '.join(EIGHT_BITS)}, not {key.dtype}")
    elif key.dtype.name not in EIGHT_BITS and scales:
        wrong.append(f"the cache has scales, so it must be {' or '.join(EIGHT_BITS)}, not {key.dtype}")
    for name, scale, part in zip(("key_scales", "value_scales"), scales, (key, value)):
        if scale.dtype != np.float32 or scale.shape != part.shape[:-1]:
            wanted = f"float32{list(part.shape[:-1])}"
            wrong.append(f"the cache's {name} must be {wanted}, not {scale.dtype}{list(scale.shape)}")
    if key.shape != value.shape or key.dtype != value.dtype:
        wrong.append(f"keys are {key.dtype}{list(key.shape)} and values {value.dtype}{list(value.shape)}")
    return wrong


__all__ = ["Cache", "DecoderSpec", "Params", "Placement", "decode_step"]
