"""The kernel of `decode_step`: all layers in one launch, on Hopper."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from triton import next_power_of_2

from jaxtaxfree.kernels.decode_step.attention_cores import units_of
from jaxtaxfree.kernels.decode_step.hopper import decode_step_kernel
from jaxtaxfree.ops.blocks.portable import each
from jaxtaxfree.ops.decode_step import many
from jaxtaxfree.ops.decode_step.call import EIGHT_BITS, FEW, GROUP, LARGEST_BOX, Call, Config
from jaxtaxfree.ops.decode_step.spec import DecoderSpec
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.primitive import Lasting

# What the kernel calls the scales of each matrix.
SCALES = {
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down", "unembed": "unembed",
}  # fmt: skip
# And those of the cache, as operands and as results.
SCALES_OF_CACHE = ("old_key", "old_value", "cache_key", "cache_value")
MERGED = 32  # columns of a head, of one sequence with attention alone by tensor cores: 273 us a step, and 277 with 8
LARGE_LAYER = 1 << 29  # bytes of a rank's matrices of a layer from which on more is on its way
MOST_POLLED = 32 << 10  # bytes of a sum that all programs poll
MOST_TOLD = 256  # query heads of all sequences that are messages, by tensor cores
LEAST_OF_PAGE = 8  # positions of a page, as a load of fewer would be small


def refusals_of_form(call: Call) -> list[str]:
    """What keeps both variants from taking a call."""
    reasons: list[str] = []
    if call.dtype.name not in ("bfloat16", "float16"):
        reasons.append(Lasting(f"it takes weights of bfloat16 and float16, not {call.dtype}"))
    if call.cache_dtype.name not in (call.dtype.name, *EIGHT_BITS):
        known = " or ".join([call.dtype.name, *EIGHT_BITS])
        reasons.append(Lasting(f"it takes a cache of the weights' dtype, {known}, not {call.cache_dtype}"))
    if call.tokens != 1:
        reasons.append(f"it takes one new token of each sequence, not {call.tokens}")
    return reasons


def block_of(rows: int, columns: int, config: Config, divides: int = 0) -> tuple[int, int, int]:
    """The shape of a block of weights [rows, columns]: [rows of it, groups, 64].

    A block has as much of a row as a stage holds, in a power of 2, of which at most an eighth lies behind the end.

    Args:
      rows, columns: of weights of 8 bits two columns are one.
      divides: if not 0, the block's rows divide it.
    """
    width = config.stage
    while width > GROUP and (-(-columns // width) * width > columns * 8 / 7 or width // GROUP > LARGEST_BOX):
        width //= 2
    height = min(config.stage // width, LARGEST_BOX, next_power_of_2(-(-rows // config.programs)))
    return math.gcd(height, divides), width // GROUP, GROUP


def by_tensor_cores(call: Call, config: Config) -> bool:
    """Whether tensor cores are to multiply: there are too many sequences for registers, or it is faster.

    us a step on one H200 without a peer, 8 layers, 8192 tokens, by tensor cores and with products in registers: Llama 3
    8B's share of eight GPUs 250 and 234 for 2 sequences, 260 and 270 for 3, 268 and 320 for 4; 70B's share 595 and 645
    for 3; a quarter of Gemma 2 9B, 2048 tokens, 455 and 431 for 2 and 476 and 503 for 3. One sequence of Qwen3 32B's
    share of four, whose rows of 5120 come in five blocks in registers, takes 660, and 667. By tensor cores with
    messages of attention (`tells_parts`), which came later, all but Gemma's take some 10 less.
    """
    if many.refused(call, config) or _widths_differ(call) or not _attention_can(call, config):
        return call.batch > FEW
    if call.model.post_norms:
        return call.batch > 2
    _, groups, width = block_of(call.model.d_model, call.model.d_model, Config())
    most = 2 if attention_by_tensor_cores(call, config) else 1
    return call.batch > most or call.model.d_model > 2 * groups * width


def attention_by_tensor_cores(call: Call, config: Config) -> bool:
    """Whether attention is to be by tensor cores, where products are not: in registers it takes longer than its bytes,
    the more so the more heads a key has.

    us a step on 2 H100, 8 layers, one sequence, in registers and by tensor cores: Llama 3 8B's share of eight, 8192
    tokens, 282 and 278, with weights of int8 232 and 226; 70B's share 771 and 734; 8B on two 737 and 727; 70B's tenth,
    32768 tokens, 2781 and 2556; a half of Llama 3.2 1B, heads of 64, 342 and 331. A quarter of Gemma 2 9B, heads of
    256, takes 520 and 523.
    """
    return call.model.head_dim <= 128 and _attention_can(call, config)


def _attention_can(call: Call, config: Config) -> bool:
    """Whether attention can be by tensor cores."""
    asked = dataclasses.replace(config, attention_cores=True)
    return not many.refused_attention(call, asked) and not refused_pages(call, asked)


def _widths_differ(call: Call) -> bool:
    """Whether the last product's weights have other bits than those of layers, as where an embedding is tied."""
    return call.dtype_of("unembed").itemsize != call.dtype_of("q_proj").itemsize


def narrow_block_of(rows: int, columns: int, config: Config, divides: int = 0) -> tuple[int, int, int]:
    """The same of weights of 8 bits, [rows of it, groups, 128]: as many bytes, or half of them if that takes less of
    the program that has the most rows.
    """
    height, groups, _ = block_of(rows, columns // 2, config, divides)
    most = lambda height: math.ceil(math.ceil(rows / height) / config.programs) * height  # noqa: E731
    if height > 1 and most(height // 2) < most(height):
        height //= 2
    return height, groups, 2 * GROUP


def refused_eight_bits(call: Call, config: Config) -> list[str]:
    """Why a call with weights of 8 bits cannot be taken."""
    if not call.eight:
        return []
    reasons: list[str] = []
    if config.tensor_cores and _widths_differ(call):
        reasons.append("by tensor cores it takes layers and an unembedding of 8 bits, or neither")
    if blocks := [each.name for each in call.eight if each.scales != "row"]:
        reasons.append(Lasting(f"it takes a scale for each row of weights of 8 bits, not for blocks, of {blocks[0]}"))
    layers = [name for name in call.model.matrices if name != "unembed"]
    dtypes = [call.dtype_of(name).name for name in layers]
    if len(set(dtypes)) > 1:
        of = ", ".join(f"{name} {dtype}" for name, dtype in zip(layers, dtypes))
        reasons.append(Lasting(f"it takes matrices of layers that all have one dtype, not {of}"))
    sizes = {"d_model": call.model.d_model, "d_mlp / ranks": call.d_mlp}
    sizes["heads / ranks * head_dim"] = call.heads * call.model.head_dim
    for name, size in sizes.items():
        if size % (2 * GROUP):
            reasons.append(f"with weights of 8 bits it takes a {name} that {2 * GROUP} divides, not {size}")
    return reasons


def refused_cache(call: Call) -> list[str]:
    """Why a call with a cache of 8 bits cannot be taken."""
    if call.narrow_cache and call.model.head_dim % (2 * GROUP):
        of = f"heads that {2 * GROUP} divides, not {call.model.head_dim}"
        return [Lasting(f"with a cache of 8 bits it takes {of}")]
    return []


def block_of_keys(call: Call, config: Config) -> int:
    """How many slots a block of keys has: one of pages lies in one page."""
    slots = min(config.stage // call.model.head_dim, LARGEST_BOX)
    return min(slots, call.slots & -call.slots) if call.paged else slots


def refused_pages(call: Call, config: Config) -> list[str]:
    """Why a cache in pages cannot be taken."""
    least = many.VECTORS if config.attention_cores else LEAST_OF_PAGE
    if call.paged and call.slots % least:
        of = "by tensor cores" if config.attention_cores else "without tensor cores"
        return [Lasting(f"{of} it takes pages whose positions {least} divides, not of {call.slots}")]
    return []


def refused_messages(call: Call, config: Config) -> list[str]:
    """Why queries cannot be messages: a thread polls 4 columns of a head, and those that they are rotated with."""
    of, reasons = "with tell_queries it takes", []
    if not config.attention_cores:
        reasons.append(f"{of} attention by tensor cores")
    if call.model.head_dim > 128:
        reasons.append(f"{of} heads of 64 and 128, not {call.model.head_dim}")
    if call.model.rotated % 8:
        reasons.append(f"{of} a rotary_dim that 8 divides, not {call.model.rotated}")
    if call.narrow_cache:
        reasons.append(f"{of} a cache of 16 bits, not of {call.cache_dtype}")
    return reasons


def refused_parts(config: Config) -> list[str]:
    """Why parts of heads cannot be messages."""
    return [] if config.attention_cores else ["with tell_parts it takes attention by tensor cores"]


def tells_queries(call: Call, config: Config) -> bool:
    """Whether queries are to be messages.

    us a step on one H200 without a peer, by tensor cores, 8 layers, without and with: Llama 3 8B's share of eight, 4
    and 16 sequences, 266 and 260, 285 and 278; 8B on two, 16 sequences, 660 and 651; 70B's tenth, 1951 and 1959.
    """
    too_many = config.tensor_cores and call.batch * call.heads > MOST_TOLD
    return not too_many and not refused_messages(call, config)


def tells_parts(call: Call, config: Config) -> bool:
    """Whether parts of heads are to be messages.

    us a step on 2 H200, 8 layers, 8192 tokens, without and with, where sums are told: Llama 3 8B on two, whose keys
    have 4 heads, 516 and 502; 8B's share of eight, 2 sequences, 260 and 253 (where they are not). 70B's share of eight,
    whose keys have 8, takes 521 and 525.

    By tensor cores, as in `tells_queries`: 8B's share, 4 and 16 sequences, 260 and 256, 278 and 273; where queries are
    not told 267 and 268 of 8; 70B's share, 4 sequences, 602 and 597. 8B on two, 16 sequences, of which a program
    merges 8 units one after the other, takes 651 and 675.
    """
    if not config.tensor_cores:
        return call.model.group <= 4 and not refused_parts(config)
    units = call.batch * call.heads * units_of(call.model.head_dim, config.num_warps)
    return units <= 2 * config.programs and tells_queries(call, config)


def refused_sums(call: Call, config: Config) -> list[str]:
    """Why parts of sums cannot be messages to all programs: each has the stream as those that take it do."""
    of, reasons = "with tell_sums it takes", []
    if config.tensor_cores:
        reasons.append(f"{of} products in registers")
    if _widths_differ(call):
        reasons.append(f"{of} layers and an unembedding of 8 bits, or neither")
    return reasons


def tells_sums(call: Call, config: Config) -> bool:
    """Whether parts of sums are to be messages to all programs, which then poll those of all ranks.

    us a step on 2 H200, 8 layers, without and with: Llama 3 8B's share of eight 213 and 208, two sequences 253 and 249,
    70B's share 531 and 521, a quarter of Gemma 2 9B 414 and 398. Four ranks with 70B's share, which poll 64 KB, take
    1000 and 1000.
    """
    polled = 2 * call.world * call.batch * call.model.d_model
    return call.world > 1 and polled <= MOST_POLLED and not refused_sums(call, config)


class Hopper(Variant[Call]):
    """One persistent program on each multiprocessor; a warp loads, the others compute."""

    name, Config, kernel = "hopper", Config, decode_step_kernel

    def cost(self, call: Call, config: Config) -> float:
        """It was faster than operations wherever it was measured."""
        del call, config
        return 0

    def refuses(self, call: Call, config: Config) -> list[str]:
        model = call.model
        reasons = []
        if call.target.compute_capability != 90:
            reasons.append(f"it is for GPUs of compute capability 9.0, not {call.target}")
        reasons += refusals_of_form(call)
        reasons += refused_cache(call)
        reasons += refused_eight_bits(call, config)
        if call.batch > many.VECTORS:
            reasons.append(f"it takes 1 to {many.VECTORS} sequences, not {call.batch}")
        if config.tensor_cores:
            reasons += many.refused(call, config)
        elif call.batch > FEW:
            reasons.append(f"without tensor cores it takes 1 to {FEW} sequences, not {call.batch}")
        reasons += many.refused_attention(call, config)
        reasons += refused_pages(call, config)
        if config.tell_queries:
            reasons += refused_messages(call, config)
        if config.tensor_cores:
            given = [name for name in ("pace", "patience") if getattr(config, name)]
            reasons += [f"{name} is for products in registers" for name in given]
        if config.tell_parts:
            reasons += refused_parts(config)
        if config.tell_sums:
            reasons += refused_sums(call, config)
        if not call.by_heads:
            reasons.append("it takes a cache by heads, not along the sequence")
            return reasons
        if model.head_dim not in (64, 128, 256):
            reasons.append(Lasting(f"it takes heads of 64, 128 and 256, not {model.head_dim}"))
        if model.group > 8:
            reasons.append(Lasting(f"it takes at most 8 query heads of a key/value head, not {model.group}"))
        for name, size in (("d_model", model.d_model), ("d_mlp / ranks", call.d_mlp)):
            if size % GROUP:
                reasons.append(f"it takes a {name} that {GROUP} divides, not {size}")
        if config.programs > call.target.multiprocessors:
            most = call.target.multiprocessors
            reasons.append(f"its {config.programs} programs wait for each other, and a GPU has room for {most}")
        if model.head_dim % config.merged:
            reasons.append(f"merged={config.merged} does not divide the head size, {model.head_dim}")
        return reasons

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        programs = asked.get("programs", call.target.multiprocessors)
        given = Config(**{name: asked[name] for name in ("stage", "num_warps") if name in asked})
        tensor_cores = asked.get("tensor_cores", by_tensor_cores(call, given))
        attention_cores = asked.get("attention_cores", tensor_cores or attention_by_tensor_cores(call, given))
        # A thread has as many numbers of a block of 8 bits as of one of 16: of more, registers are spilled. So it is
        # with a cache of 8 bits and several sequences in registers: 437 us a step with the smaller stage, and 453. For
        # one sequence it is 309, and 282. Where only the products are in registers nothing is spilled, and weights of
        # int8 take 227, and 221.
        several = call.narrow_cache and call.batch > 1 and not attention_cores
        small = several or (call.eight and (tensor_cores or not attention_cores))
        stage = asked.get("stage", Config.stage // 2 if small else Config.stage)
        given = dataclasses.replace(given, stage=stage)
        blocks = max(1, -(-call.slots_of_sequence // max(1, block_of_keys(call, given))))
        pairs = max(1, call.batch * call.kv_heads)
        stages = min(32, (192 << 10) // (2 * stage))
        splits = max(1, min(programs // pairs, blocks))
        merged = Config.merged
        if tensor_cores:
            merged = many.merged_of(call, programs, splits, merged)
        elif attention_cores and call.batch == 1:
            merged = MERGED
        config = Config(
            tensor_cores=tensor_cores, attention_cores=attention_cores, programs=programs, stage=stage,
            num_stages=stages, splits=splits, merged=merged, in_flight=_in_flight(call, stage),
        )  # fmt: skip
        return dataclasses.replace(
            config,
            tell_queries=tells_queries(call, config),
            tell_parts=tells_parts(call, config),
            tell_sums=tells_sums(call, config),
        )

    def blocks(self, call: Call, config: Config) -> dict[str, tuple[int, int, int]]:
        """The shape of a block of each array of weights, and of the cache."""
        model, h = call.model, call.model.head_dim
        queries, keys, d, f = call.heads * h, call.kv_heads * h, model.d_model, call.d_mlp
        slots = block_of_keys(call, config)
        group = 2 * GROUP // call.cache_dtype.itemsize
        old = (h // group, slots, group) if config.attention_cores else (slots, h // group, group)
        if config.tensor_cores:
            project = out = inner = down = unembed = many.tile_of(call, config)
        else:
            of_layers = narrow_block_of if call.dtype_of("q_proj").itemsize == 1 else block_of
            project = of_layers(queries + 2 * keys, d, config, math.gcd(queries, keys))
            inner = of_layers(f, d, config)
            out, down = (of_layers(d, columns, config) for columns in (queries, f))
            of_logits = narrow_block_of if call.dtype_of("unembed").itemsize == 1 else block_of
            unembed = of_logits(call.vocab, d, config)
        return {
            "query_desc": project,
            "key_desc": project,
            "value_desc": project,
            "out_desc": out,
            "gate_desc": inner,
            "up_desc": inner,
            "down_desc": down,
            "unembed_desc": unembed,
            "old_keys_desc": old,
            "old_values_desc": old,
        }

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        model, b, d, h = call.model, call.batch, call.model.d_model, call.model.head_dim
        heads, kv_heads, layers = call.heads, call.kv_heads, call.model.layers
        blocks = self.blocks(call, config)
        f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
        of_cache = layers, call.pool if call.paged else b, kv_heads, call.slots
        rows = math.prod(of_cache)
        part = jax.ShapeDtypeStruct((*of_cache, h), call.cache_dtype)
        read = _as_blocks((rows, h), call.cache_dtype, config.attention_cores)
        scratch, messages = self._buffers_of_attention(call, config)
        own = many.buffers(call, config) if config.tensor_cores else self._buffers(call, config, blocks)
        sizes = {name: math.prod(shape) for name, shape in model.param_shapes(call.world).items()}
        weights = sum(size * call.dtype_of(name).itemsize for name, size in sizes.items())
        scales = (f32(*of_cache),) * 2 if call.narrow_cache else ()
        # Of the operands of `arrays` the cache's parts, and the results that they become.
        first = 1 + len(_weights(call))
        parts = (first, first + 1, *(first + 2 + len(_vectors(call)) + i for i in range(len(scales))))
        times = (jax.ShapeDtypeStruct((config.programs, layers + 1, 6, 4), jnp.int32),) if config.times else ()
        return {
            "out_type": (f32(b, call.vocab), part, part, *scales, *times),
            "input_output_aliases": {operand: 1 + i for i, operand in enumerate(parts)},
            "grid": config.programs,
            "together": config.programs,
            "scratch": {
                **own.pop("scratch"),
                **scratch,
                "new": jax.ShapeDtypeStruct((2, layers, b, kv_heads, h), call.cache_dtype),
                "new_scales": f32(2 if call.narrow_cache else 0, layers, b, kv_heads),
            },
            "messages": own.pop("messages") | messages,
            "signals": {"met": 1},
            "descriptors": {**blocks, **{name: (blocks[name], read) for name in ("old_keys_desc", "old_values_desc")}},
            "name": "decode_step",
            "num_warps": config.num_warps,
            "cost_estimate": {
                "flops": 2 * b * sum(sizes.values()),
                "bytes_accessed": weights
                + call.cache_dtype.itemsize * 2 * layers * b * kv_heads * call.slots_of_sequence * h,
            },
            **_absent(call, config),
            "LAYERS": layers,
            "B": b,
            "TENSOR_CORES": int(config.tensor_cores),
            "ATTENTION_CORES": int(config.attention_cores),
            "QUERIES_TOLD": int(config.tell_queries),
            "PARTS_TOLD": int(config.tell_parts),
            "SUMS_TOLD": int(config.tell_sums),
            "VECTORS": many.vectors_of(call),
            "D": d,
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "H": h,
            "F": call.d_mlp,
            "V": call.vocab,
            "SLOTS": call.slots_of_sequence,
            "PAGE": call.slots,
            "POOL": call.pool,
            "POSITIONS": call.positions,
            "ROTATED": model.rotated,
            "EPS": model.norm_eps,
            "PLUS_ONE": model.norm_plus_one,
            "POST_NORMS": model.post_norms,
            "SCORE_SCALE": model.score_factor,
            "SCORE_SOFT_CAP": model.score_soft_cap or 0.0,
            "ACTIVATION": model.gate_activation,
            "RESIDUAL_SCALE": model.residual_scale,
            "LOGIT_SCALE": model.logit_scale,
            "LOGIT_SOFT_CAP": model.logit_soft_cap or 0.0,
            "PROGRAMS": config.programs,
            "SPLITS": config.splits,
            "IN_FLIGHT": min(config.in_flight, config.num_stages),
            "PACE": config.pace,
            "PATIENCE": config.patience,
            "STAGE": config.stage,
            "STAGES": config.num_stages,
            "MERGED": config.merged,
            "WINDOW": _windows(model)[0],
            "TABLE": model.table_by_layer[0],
            **own,
        }

    def _buffers_of_attention(self, call: Call, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
        """Scratch and messages of attention: what it gets, and the parts of heads that it leaves."""
        model, layers, b = call.model, call.model.layers, call.batch
        f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
        width, copies = (call.heads + 2 * call.kv_heads) * model.head_dim, 1 + config.tell_queries
        items = (b, call.kv_heads, config.splits)
        scratch: dict[str, Any] = {}
        messages: dict[str, Any] = {}
        if config.tell_queries:
            messages["qkv"] = (layers, b, width)
        else:
            scratch["qkv"] = f32(b, width)
        if config.tell_parts:
            pairs = -(-model.group // 2)  # 4 messages are those of two heads
            messages |= {"accs": (layers, *items, model.group, model.head_dim), "tops": (layers, *items, 2 * pairs, 2)}
        else:
            scratch["accs"] = f32(copies, *items, model.group, model.head_dim)
            scratch["tops"] = f32(copies, *items, model.group, 2)
        return scratch, messages

    def _buffers(self, call: Call, config: Config, blocks: Mapping[str, tuple[int, int, int]]) -> dict[str, Any]:
        """Scratch and messages of the launch, and the constants that go with them, without tensor cores."""
        model, b, d = call.model, call.batch, call.model.d_model
        f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
        vectors = next_power_of_2(b)
        words_of = {_words(d, vectors, blocks[name][0], config.programs) for name in ("out_desc", "down_desc")}
        words = max(words_of)
        # Where the same program has a row of both products, so that nobody else needs its part of the stream before.
        told = not model.post_norms and len(words_of) == 1 and not config.tell_sums
        sums = (2 * model.layers, call.world, words) if call.world > 1 and not config.tell_sums else (0,)
        own = (2 * model.layers, b, d) if told else (0,)
        if config.tell_sums:
            own = (2 * model.layers, call.world, b, d // 2)
        return {
            "scratch": {
                "stream": f32(0 if config.tell_sums else 2, b, d),
                "block": f32(2 if model.post_norms and not config.tell_sums else 0, b, d),
                "scaled": f32(0),
                "squares": f32(0),
            },
            "messages": {
                "heads": (model.layers, b, call.heads * model.head_dim),
                "hidden": (model.layers, b, call.d_mlp),
                "told": own,
                "sums": jax.ShapeDtypeStruct(sums, jnp.int32),
            },
            "WORDS": words,
            "STREAM_TOLD": int(told),
            "SUMS": max(512 * vectors, vectors * config.stage // 32, _sums_of_attention(call, config)),
        }

    def arrays(self, call: Call, config: Config, *operands: Any) -> tuple[Any, ...]:
        """Of (params, x, cache, lengths, cos, sin), x in f32 and scaled, and of the table of pages if there is one.

        The cache as it is: XLA copies an operand that is a result as well if it is reshaped, which it makes nothing of
        elsewhere.
        """
        params, x, cache, lengths, cos, sin, *pages = operands
        model = call.model
        as_blocks = lambda w: w.reshape(_as_blocks((-1, w.shape[-1]), w.dtype, config.tensor_cores))  # noqa: E731
        # Numbers that are the same for all layers are constants: XLA would start a kernel to write such an array.
        numbers = [each for each in (_windows(model), model.table_by_layer) if len(set(each)) > 1]
        return (
            x,
            *(as_blocks(params[name]) for name in _weights(call)),
            *cache[:2],
            *(params[name] for name in _vectors(call)),
            *cache[2:],
            cos,
            sin,
            lengths,
            *pages,
            *(jnp.asarray(each, jnp.int32) for each in numbers),
        )

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        return [
            *([{"tensor_cores": not config.tensor_cores}] if call.batch <= FEW else []),
            *each("in_flight", 2, 3, 4),
            *([] if config.tell_parts else each("merged", 4, 16, 32)),
            *([] if config.tensor_cores else [{"attention_cores": not config.attention_cores}]),
            *({told: False} for told in ("tell_queries", "tell_parts", "tell_sums") if getattr(config, told)),
            *([] if config.tensor_cores else [*each("pace", 700, 850, 1000), *each("patience", 800, 1000)]),
            *each("splits", config.splits // 2),
            *(
                {"stage": stage, "num_stages": (192 << 10) // (2 * stage), "in_flight": _in_flight(call, stage)}
                for stage in (4096, 16384)
            ),
            *each("in_flight", 1, 32),
            *each("num_warps", 4, 16),
        ]


def _sums_of_attention(call: Call, config: Config) -> int:
    """How many f32 of shared memory attention takes for what warps have of an item.

    That is of two heads or, by tensor cores, of 8 heads in each part of a block, as far as there is room.
    """
    h = call.model.head_dim
    if config.attention_cores:
        rows = 2 * many.VECTORS * h if config.tell_queries else 0
        return max(rows, min(min(config.num_warps, config.stage // h // many.VECTORS, 8) * 8 * h, 4096))
    return 2 * config.num_warps * h


def _as_blocks(shape: tuple[int, int], dtype: np.dtype, tensor_cores: bool) -> tuple[int, ...]:
    """The shape in which the kernel takes rows of weights or of the cache, for tensor cores or for registers."""
    rows, columns = shape
    group = 2 * GROUP // dtype.itemsize
    return shape if tensor_cores else (rows, columns // group, group)


def _absent(call: Call, config: Config) -> dict[str, None]:
    """The kernel's pointers to what this call has not."""
    model = call.model
    return {
        **({} if config.times else {"times_ptr": None}),
        **({} if call.paged else {"pages_ptr": None}),
        **({} if len(set(_windows(model))) > 1 else {"windows_ptr": None}),
        **({} if len(set(model.table_by_layer)) > 1 else {"tables_ptr": None}),
        **({} if model.qkv_bias else {f"{name}_bias_ptr": None for name in ("query", "key", "value")}),
        **({} if model.qk_norm else {f"{name}_norm_ptr": None for name in ("query", "key")}),
        **({} if model.post_norms else {f"post_{name}_norm_ptr": None for name in ("attn", "mlp")}),
        **{f"{name}_scale_ptr": None for param, name in SCALES.items() if call.dtype_of(param).itemsize > 1},
        **({} if call.narrow_cache else {f"{of}_scales_ptr": None for of in SCALES_OF_CACHE}),
    }


def _weights(call: Call) -> list[str]:
    """The matrices, in the kernel's order."""
    return [*(name for name in SCALES if name != "unembed"), "embed" if call.model.tied else "unembed"]


def _vectors(call: Call) -> list[str]:
    """What else the kernel takes of the weights."""
    model = call.model
    vectors = ["attn_norm", "mlp_norm", "final_norm"]
    vectors += ["q_bias", "k_bias", "v_bias"] if model.qkv_bias else []
    vectors += ["q_norm", "k_norm"] if model.qk_norm else []
    vectors += ["post_attn_norm", "post_mlp_norm"] if model.post_norms else []
    return vectors + [f"{name}_scale" for name in SCALES if call.dtype_of(name).itemsize == 1]


def _windows(model: DecoderSpec) -> tuple[int, ...]:
    """Of each layer the positions before a token that it attends to."""
    return tuple(1 << 30 if window is None else window for window in model.window_by_layer)


def _in_flight(call: Call, stage: int) -> int:
    """Blocks of this many elements, of 2 bytes each, that 32 KiB hold, or two; 48 KiB of large layers.

    us a step with two blocks of 8192 elements and with three, 8 layers: a tenth of Llama 3 70B, whose matrices of a
    layer are 856 MB on each of two ranks, one sequence on H100 2556 and 2532, on H200 1884 and 1800, 16 sequences on
    H200 2150 and 2101. Llama 3 8B's share of eight (55 MB), one sequence, takes 277 and 286 on H100, 235 and 240 on
    H200, 70B's share of eight (214 MB) 734 and 741 on H100, 16 sequences of 8B on two (218 MB) 698 and 707 on H200.
    """
    shapes = call.model.param_shapes(call.world)
    sizes = (math.prod(shapes[name][1:]) * call.dtype_of(name).itemsize for name in _weights(call)[:-1])
    size = (48 if sum(sizes) >= LARGE_LAYER else 32) << 10
    return min(32, max(2, size // (2 * stage)))


def _words(rows: int, vectors: int, block: int, programs: int) -> int:
    """Words of a sum from one rank, of all programs: `most_of` of the kernel, times what a block has."""
    unit = max(1, 4 // block)
    blocks = math.ceil(rows / block)
    most = math.ceil(blocks / (unit * programs)) * unit
    return programs * most * vectors * block
