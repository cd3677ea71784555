"""What `decode_step`'s kernel needs for the sequences that tensor cores take (`kernels/decode_step/many.py`)."""

from typing import Any

import jax
import jax.numpy as jnp
from triton import next_power_of_2

from jaxtaxfree.kernels.decode_step.many import tiles_of, turns_of
from jaxtaxfree.ops.decode_step.call import GROUP, LARGEST_BOX, Call, Config
from jaxtaxfree.primitive import Lasting

VECTORS = 16  # that tensor cores multiply at a time, and the least keys
TILE = 8  # rows of weights, likewise


def refused(call: Call, config: Config) -> list[str]:
    """Why a call of so many sequences cannot be taken."""
    of = f"of {call.batch} sequences"
    reasons: list[str] = []
    if call.dtype.name != "bfloat16":
        # The stream times a norm's gains is kept in this dtype before it is scaled, and f16 has not its range.
        reasons.append(Lasting(f"{of} it takes weights of bfloat16, not {call.dtype}"))
    if not config.num_warps <= tile_of(call, config)[0] <= LARGEST_BOX:
        least, most = TILE * GROUP * config.num_warps, TILE * GROUP * LARGEST_BOX
        reasons.append(f"{of} it takes stages of {least} to {most} elements, not {config.stage}")
    return reasons


def refused_attention(call: Call, config: Config) -> list[str]:
    """Why tensor cores cannot multiply by old keys and values, if they are to, or why they have to."""
    if config.tensor_cores and not config.attention_cores:
        return ["tensor cores that multiply by weights do so by old keys, too, not with attention_cores=False"]
    if config.attention_cores and config.stage < VECTORS * call.model.head_dim:
        keys = f"{VECTORS} keys of {call.model.head_dim}"
        return [f"by tensor cores it takes stages of {keys} or more, not of {config.stage} elements"]
    return []


def tile_of(call: Call, config: Config) -> tuple[int, int, int]:
    """The shape of a block of weights: [groups of columns, rows, 64], or 128 of 8 bits, which are as many bytes."""
    return config.stage // (TILE * GROUP), TILE, GROUP * 2 // call.dtype_of("q_proj").itemsize


def vectors_of(call: Call) -> int:
    """How many vectors lie in memory, 8 or 16; tensor cores multiply 16.

    Of 8 sequences of Llama 3 8B's share of eight GPUs a step on 2 H100 took 379 us by 16, and 371 by 8.
    """
    return VECTORS // 2 if call.batch <= VECTORS // 2 else VECTORS


def merged_of(call: Call, programs: int, splits: int, least: int) -> int:
    """How many columns of a head a program merges at a time: so many that each program does it once, if it can be.

    Each time costs two ways to the L2 cache. 16 sequences of Llama 3 8B on 4 GPUs took 15.3 us a layer for 8 columns,
    and 1.2 for 128. Warps add up the parts, of which shared memory has room for 256 numbers.
    """
    merged, h = least, call.model.head_dim
    most = min(h, 128, 256 // min(next_power_of_2(splits), 8))
    while merged < most and call.batch * call.heads * (h // merged) > programs:
        merged *= 2
    return merged


def buffers(call: Call, config: Config) -> dict[str, Any]:
    """Scratch and messages of the launch, and the constants that go with them."""
    b, d, queries = call.batch, call.model.d_model, call.heads * call.model.head_dim
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    vectors = lambda columns: jax.ShapeDtypeStruct((vectors_of(call), columns), call.dtype)  # noqa: E731
    words = config.programs * turns_of(d, 1, config.programs) * tiles_of(d, 1, config.programs) * VECTORS * TILE
    sums = (2 * call.model.layers, call.world, words) if call.world > 1 else (0,)
    least = 8 * VECTORS * TILE * config.num_warps  # of 8 tiles, which is more than attention needs of an item
    return {
        "scratch": {
            "stream": f32(1, b, d),
            "block": f32(b if call.model.post_norms else 0, d),
            "scaled": vectors(d),
            "squares": f32(2 if call.model.post_norms else 1, config.programs, VECTORS),
            "heads": vectors(queries),
            "hidden": vectors(call.d_mlp),
        },
        "messages": {"told": (0,), "sums": jax.ShapeDtypeStruct(sums, jnp.int32)},
        "WORDS": words,
        "STREAM_TOLD": 0,
        "STREAM_KEPT": 0,
        "QUERIES_TOLD": 0,
        "SUMS": least,
    }
