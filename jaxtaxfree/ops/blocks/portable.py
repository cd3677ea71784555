"""The kernels for any GPU: tiles by shape."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from triton import next_power_of_2

from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.quantize import BLOCK
from jaxtaxfree.settings import Settings, setting

# Up to this many rows of all ranks a tile has them all.
FEW_ROWS = 256
# What these kernels cost: more than any kernel that is made for the GPU at hand.
FEW, MANY = 1e30, 2e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile(Settings):
    """The settings of every product.

    Attributes:
      block_m, block_n: rows and columns of a tile, powers of 2 from 8 to 256. With a gate a tile has half of its
        columns from each of the two products.
      block_k: the part of K that a step of the loop takes, a power of 2 from 8 to 1024.
      num_warps: warps of a program.
      num_stages: steps of the loop in flight.
    """

    block_m: int = setting(128, least=8, most=256, power_of_2=True)
    block_n: int = setting(256, least=8, most=256, power_of_2=True)
    block_k: int = setting(64, least=8, most=1024, power_of_2=True)
    num_warps: int = setting(8, least=1, most=16, power_of_2=True)
    num_stages: int = setting(4, least=1, most=32)


def refuses_columns(call: Call) -> list[str]:
    """What keeps the kernels for few rows from taking a call whose ranks have columns."""
    return ["it gathers and scatters rows, not columns"] if call.along_columns else []


def refuses_scales(call: Call, config: Tile) -> list[str]:
    """What keeps the kernels for few rows from taking a call with scales."""
    if not call.scaled:
        return []
    reasons = []
    if call.lhs.bits == 8:
        reasons.append("it takes weights of 8 bits under rows of 16, not rows of 8 bits")
    if call.epilogue.gated:
        reasons.append("it takes no gate of 8 bits")
    if call.rhs.dtype == jnp.float8_e4m3fn and not call.target.has_e4m3:
        reasons.append(f"{call.target} has no float8_e4m3fn: take int8")
    if call.rhs.scales == "block" and BLOCK % config.block_k:
        reasons.append(f"blocks of scales take steps of a block_k that divides {BLOCK}, not {config.block_k}")
    return reasons


def with_scales(*operands: Any) -> tuple[Any, ...]:
    """A kernel's operands, with a bundle of scales even if there are none."""
    return operands if len(operands) > 3 else (*operands, {})


def large_tile(call: Call) -> dict[str, Any]:
    """Settings for products of many rows."""
    if not call.target.has_big_shared_memory:
        return {"block_n": 128, "block_k": call.depth_of(64), "num_stages": 3}
    return {"block_k": call.depth_of(128)}


def small_tile(call: Call) -> dict[str, Any]:
    """Settings for products of at most 256 rows: all of them in few tiles, and much of rhs in flight."""
    block_m = min(128, max(16, next_power_of_2(call.rows)))
    nbytes, stages = (256, 6) if block_m <= 32 else (128, 8)
    if not call.target.has_big_shared_memory:
        nbytes, stages = 128, 3
    return {
        "block_m": block_m,
        "block_n": 64,
        "block_k": call.depth_of(nbytes),
        "num_warps": 4,
        "num_stages": stages,
    }


def tiles(m: int, n: int, config: Any) -> int:
    """Number of tiles of a product [m, n]."""
    return math.ceil(m / config.block_m) * math.ceil(n / config.block_n)


def keywords(call: Call, m: int, config: Any) -> dict[str, Any]:
    """What `shmem_call` needs to know of a product and its tiles.

    Args:
      m: what the kernel calls M.
    """
    return {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "M": m,
        "N": call.widths_or_n,
        "K": call.k,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "PRECISION": call.precision,
    }


def variations_of_few(call: Call, config: Any) -> list[dict[str, Any]]:
    """What a tuner may change of a tile of few rows. A smaller one leaves room for more steps in flight."""
    blocks = [{"block_n": 32}, {"block_n": 128}, {"block_k": 64}, {"block_k": 128}]
    deep = [_as_deep_as_fits(call, config, **change) for change in blocks]
    return [*deep, *each("num_stages", 4, 5, 6, 8), *each("num_warps", 8)]


def variations_of_many(call: Call, config: Any) -> list[dict[str, Any]]:
    """What a tuner may change of a tile of many rows."""
    wide, narrow = {"block_n": 256, "num_warps": 8}, {"block_n": 128, "num_warps": 4}
    deep = _as_deep_as_fits(call, config, block_n=128)
    return [wide, narrow, deep, *each("group_m", 4, 8, 16), *each("num_stages", 3)]


def _as_deep_as_fits(call: Call, config: Any, **blocks: int) -> dict[str, Any]:
    """These blocks, with as many steps in flight as shared memory holds."""
    step = bytes_of_a_step(call, dataclasses.replace(config, **blocks))
    return blocks | {"num_stages": min(8, (call.target.shared_memory or 0) // step)}


def bytes_of_a_step(call: Call, config: Any) -> int:
    """Of a product's loop, in shared memory."""
    return call.bytes_of_a_step(config.block_m, config.block_n, config.block_k)


def each(name: str, *values: Any) -> list[dict[str, Any]]:
    """Changes of one setting."""
    return [{name: value} for value in values]
