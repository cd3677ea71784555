"""The kernels for few rows on Hopper: the weights stream, and programs share tiles where there are few.

Up to FEW_ROWS rows of all ranks are few. A tile has at most ROWS_OF_A_TILE of them.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from triton import next_power_of_2

from jaxtaxfree.kernels.blocks.hopper_few import PIECE
from jaxtaxfree.kernels.blocks.tiles import box_of
from jaxtaxfree.ops.blocks import hopper, portable
from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.quantize import BLOCK
from jaxtaxfree.settings import setting
from jaxtaxfree.target import HOPPER

FEW_ROWS = 512
ROWS_OF_A_TILE = 256
# Each runs one program of a product at a time.
MULTIPROCESSORS = HOPPER.multiprocessors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile(portable.Tile):
    """The settings of a product of few rows.

    Attributes:
      block_m: rows of a tile, at least 8. A power of 2, or the sum of two powers of 2.
      block_n: columns that a tile has of each product. Each warp takes 16 of the columns of all products, or more.
      block_k, num_warps: as in `portable.Tile`.
      num_stages: steps of the loop in flight, at least 2.
      splits: number of programs that share a tile. Each multiplies a part of K.
      whole: number of leading tiles that one program computes alone, even where `splits` is more than 1.
    """

    block_m: int = setting(128, least=8, most=256)
    num_stages: int = setting(4, least=2, most=32)
    splits: int = setting(1, least=1, most=32)
    whole: int = setting(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        rest = self.block_m & (self.block_m - 1)  # without the least power of 2 that it is a sum of
        if rest & (rest - 1) or self.block_m % 8:
            self.refuse("block_m", "a multiple of 8 and a power of 2, or the sum of two")


def check_compiles(call: Call, config: Tile) -> None:
    """Raises ValueError unless warps multiply in whole groups of four, and each has 16 columns of a tile or more."""
    columns = call.products * config.block_n
    of = f"block_n={config.block_n}" + (" of each of two products" if call.products == 2 else "")
    if config.num_warps % 4:
        config.refuse("num_warps", "4, 8 or 16 for the kernel 'hopper_few', whose warps multiply in groups of four")
    if columns < 64:
        config.refuse("block_n", f"at least {64 // call.products} for the kernel 'hopper_few' here")
    if columns < 16 * config.num_warps:
        config.refuse("num_warps", f"at most {columns // 16} for the kernel 'hopper_few' with {of}, 16 columns a warp")


def refuses(call: Call, config: Tile) -> list[str]:
    reasons = hopper.refuses_in_any_case(call)
    if not call.scaled:
        return reasons + hopper.refuses_dtypes(call)
    if call.epilogue.gated:
        reasons.append("it takes no gate of 8 bits")
    if not call.rhs_transposed:
        reasons.append("it reads 8 bits along K: give rhs as [N, K], with rhs_transposed=True")
    if "block" in (call.lhs.scales, call.rhs.scales) and BLOCK % config.block_k:
        reasons.append(f"blocks of scales take steps of a block_k that divides {BLOCK}, not {config.block_k}")
    return reasons


def tile(call: Call, rows: int, *, others: int = 0) -> dict[str, Any]:
    """Settings by shape.

    Args:
      rows: that the kernel multiplies, few.
      others: programs that do something else.
    """
    n, products = call.n, call.products
    # To make 16 bits of 8 takes the more warps.
    widens = call.rhs.bits < call.lhs.bits
    # Wider tiles where narrow ones are more than a GPU runs at a time; not measured for two products. Of more rows,
    # that programs read again and again from the L2 cache, tiles are wide in any case.
    block_n = 128 if products == 1 and (n > 64 * MULTIPROCESSORS or rows > 128 or widens) else 64
    blocks = math.ceil(rows / ROWS_OF_A_TILE)
    tiles = blocks * math.ceil(n / block_n)
    waves, left = divmod(tiles, MULTIPROCESSORS)
    # Of those left over from whole waves one program alone adds up what the others leave. After several waves programs
    # no longer begin together, and the last one is not felt.
    most = 8 if waves == 0 else 4 if waves < 3 else 1
    # On 2 H100 two programs for a tile of weights of 8 bits took 29 us (16 rows, 7168 x 4096 of a rank), four 35.
    most = min(most, 2) if widens else most
    if rows > ROWS_OF_A_TILE:
        splits = min(range(1, most + 1), key=lambda splits: time_of_waves(tiles, splits, others))
    elif left and (rows > 64 or left <= 40 or widens):
        splits = max(1, min((MULTIPROCESSORS - (0 if waves else others)) // left, most))
    else:
        # Of up to 64 rows some 40 programs keep the memory busy, and to wait for each other takes longer than it saves.
        splits = 1
    block_m, block_k = _rows_of_a_block(math.ceil(rows / blocks), splits), call.lhs.elements(128)
    stage = call.bytes_of_a_step(block_m, products * block_n, block_k)
    return {
        "block_m": block_m,
        "block_n": block_n,
        "block_k": block_k,
        "num_warps": products * block_n // 16,
        # Beside them a piece of the tile, in f32, is put in order to be stored.
        "num_stages": max(2, min(16, ((226 << 10) - 4 * min(PIECE.value, products * block_m * block_n)) // stage)),
        "splits": splits,
        "whole": waves * MULTIPROCESSORS if splits > 1 else 0,
    }


def _rows_of_a_block(rows: int, splits: int) -> int:
    """The least rows of a tile that has `rows`: a power of 2, or above 64 the sum of it and another one.

    Args:
      splits: programs that share the tile. Each of them, up to a power of 2, can add up 8 of the least power.
    """
    whole = max(8, next_power_of_2(rows))
    if whole <= 64:
        return whole
    rest = max(16, 8 * _power_of_2_up_to(splits), next_power_of_2(rows - whole // 2))
    return min(whole, whole // 2 + rest)


def time_of_waves(tiles: int, splits: int, others: int) -> float:
    """What tiles take in the time of one of them, and 0.2 of that for each wave of programs.

    Args:
      splits: programs that share a tile of those that are left over from whole waves.
      others: as in `tile`. They are soon done, but not before all programs of a few tiles begin.
    """
    waves, left = divmod(tiles, MULTIPROCESSORS)
    places = MULTIPROCESSORS if waves or splits == 1 else MULTIPROCESSORS - others
    return waves * 1.2 + math.ceil(left * splits / places) * (1 / splits + 0.2)


def cost(call: Call, rows: int, config: Any, *, others: int = 0) -> float:
    """The time of all tiles, to be compared with `hopper.cost`; 0 for rows that these kernels take in any case.

    Args:
      rows: that the kernel multiplies.
      others: as in `tile`.
    """
    if rows <= ROWS_OF_A_TILE:
        return 0
    if rows > FEW_ROWS:
        return math.inf
    time = time_of_waves(portable.tiles(rows, call.n, config), config.splits, others)
    return time * config.block_m * call.products * config.block_n


def slower(call: Call, config: Any, *, others: int = 0) -> str | None:
    """Why XLA is known to be faster, if it is. Measured on 2 H200.

    Args:
      others: as in `tile`.
    """
    number = portable.tiles(call.rows, call.n, config)
    if call.world > 2 or call.rows <= ROWS_OF_A_TILE or number <= MULTIPROCESSORS:
        return None
    waves = time_of_waves(number, config.splits, others) / 1.2
    full = call.rows * call.n / (waves * MULTIPROCESSORS * config.block_m * config.block_n)
    if full < 0.78 or (others and call.rows < 384):
        return f"its tiles of {call.rows} rows need several waves of programs, and these are full to {full:.0%}"
    return None


def keywords(call: Call, rows: int, config: Any, *descriptors: str) -> dict[str, Any]:
    """What `shmem_call` needs to know of such a product.

    Args:
      rows: that the kernel multiplies.
      *descriptors: its parameters for the matrices.
    """
    number = math.ceil(rows / config.block_m) * call.column_blocks(config.block_n)
    splits = min(config.splits, math.ceil(call.k / config.block_k)) if config.whole < number else 1
    whole = config.whole if splits > 1 else 0
    shared: dict[str, Any] = {"shares": None, "left": None, "scratch": {}, "signals": {}}
    if splits > 1:
        size = call.products * config.block_n * config.block_m
        shares = jax.ShapeDtypeStruct((number - whole, splits, size), np.float32)
        shared = {"scratch": {"shares": shares}, "signals": {"left": number - whole}}
    block = config.block_k, config.block_n
    return {
        **shared,
        "grid": whole + (number - whole) * splits,
        "num_warps": config.num_warps,
        "together": splits,
        "descriptors": dict.fromkeys(descriptors, block[::-1] if call.rhs_transposed else block),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "RHS_TRANSPOSED": call.rhs_transposed,
        "STAGES": config.num_stages,
        "SPLITS": splits,
        "WHOLE": whole,
        # A power of 2, each with 8 rows at least. Who has a whole tile adds nothing up.
        "ADDERS": 1 if whole else min(_power_of_2_up_to(splits), (config.block_m & -config.block_m) // 8),
    }


def _power_of_2_up_to(most: int) -> int:
    return 1 << (most.bit_length() - 1)


def rows_added_at_once(owned: int, world: int, itemsize: int) -> int:
    """How many of the rows that a rank owns one program of few rows adds up at a time.

    Args:
      itemsize: of what arrives.
    """
    # 4 warps have 64 columns, and a thread 32 words in its registers.
    most = 2**14 // (next_power_of_2(world) * 64 * itemsize)
    return max(1, min(next_power_of_2(owned), most))


def reduce_keywords(
    call: Call,
    m: int,
    *,
    scattered: bool,
    gathered: bool,
    add_rows: int | None = None,
    linger: bool | None = None,
    config: Any,
) -> dict[str, Any]:
    """What `shmem_call` needs to know for the kernel that adds up products of few rows.

    Args:
      m: rows of the result [m, n].
      scattered: each rank adds up rows of its own.
      gathered: and sends the sums to all, or has them from the others.
      add_rows, linger: as in `matmul_all_reduce`; None chooses.
    """
    world = call.world
    owned = math.ceil(m / world) if gathered else m
    rows = world * owned if scattered else owned
    found = keywords(call, rows, config, "rhs_desc")
    found["descriptors"]["lhs_desc"] = (box_of(rows, config.block_m), config.block_k)
    blocks = math.ceil(rows / config.block_m)
    adders = blocks * found["ADDERS"]
    columns = math.ceil(call.n / config.block_n) * config.block_n
    wire = call.wire(config.exact_wire)
    add_rows = add_rows or rows_added_at_once(owned, world, wire.itemsize)
    if adders > 1:
        add_rows = max(8, min(add_rows, next_power_of_2(math.ceil(owned / adders))))

    def words(of: np.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((world * owned * columns * of.itemsize // 4,), np.int32)

    messages = {"partials": words(wire)}
    if gathered:
        messages["sums"] = words(call.out_dtype)
    return {
        **found,
        "together": blocks * found["SPLITS"],
        **({} if gathered else {"sums": None}),
        "out_type": jax.ShapeDtypeStruct((m, call.n), call.out_dtype),
        "messages": messages,
        "M": m,
        "N": call.n,
        "K": call.k,
        "OWNED": owned,
        "SCATTERED": scattered,
        "EXACT_WIRE": config.exact_wire,
        "ADD_ROWS": add_rows,
        "LINGER": owned > 16 if linger is None else linger,
        "ACTIVATION": call.epilogue.activation,
    }


def variations(config: Any) -> list[dict[str, Any]]:
    """What a tuner may change of them all."""
    shared = portable.each("splits", config.splits // 2, 2 * config.splits)
    return [*shared, *portable.each("num_stages", config.num_stages // 2, config.num_stages * 3 // 4)]
