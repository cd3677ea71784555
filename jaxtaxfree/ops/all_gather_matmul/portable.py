"""The kernels of `all_gather_matmul` for any GPU."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxtaxfree.kernels.all_gather_matmul.portable import all_gather_matmul_kernel
from jaxtaxfree.ops.all_gather_matmul.common import common, refuses_gate, refuses_several, results
from jaxtaxfree.ops.blocks import portable
from jaxtaxfree.ops.matmul import UNMEASURED
from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(portable.Tile):
    """How the kernel for many rows splits its work.

    Attributes:
      block_m, block_n, block_k, num_warps, num_stages: as in `portable.Tile`.
      pushers: number of programs that send.
      chunk: elements that a pusher moves at a time, a power of 2.
      units: number of parts in which a block of rows is sent, each with a signal.
      group_m: number of row blocks whose tiles run together, for the L2 cache.
    """

    pushers: int = setting(16, least=1)
    chunk: int = setting(8192, least=16, most=1 << 16, power_of_2=True)
    units: int = setting(2, least=1)
    group_m: int = setting(8, least=1)


class Portable(Variant[Call]):
    """A tile has rows of one rank."""

    name, Config, kernel = "portable", Config, all_gather_matmul_kernel

    def refuses(self, call: Call, config: Config) -> list[str]:
        del config
        return refuses_several(call) + refuses_gate(call)

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        del asked
        tile = portable.large_tile(call)
        if not call.target.has_big_shared_memory:
            return Config(**tile)
        if call.m <= 512:
            # Smaller tiles fill the GPU more evenly when there are few.
            return Config(**tile, block_n=128, num_warps=4)
        # With few columns the wire takes almost as long as the product, and wants more programs to feed it.
        pushers, units = (32, 1) if call.columns <= 2560 else (16, 2)
        return Config(**tile, pushers=pushers, units=units)

    def cost(self, call: Call, config: Config) -> float:
        return portable.MANY

    def slower(self, call: Call, config: Config) -> str | None:
        return slower(call)

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        config = dataclasses.replace(config, block_n=config.block_n // call.products)
        row_blocks = math.ceil(call.m / config.block_m)
        sources = 1 if call.along_columns else call.world
        return keywords(call, config) | {
            "grid": config.pushers + sources * row_blocks * call.column_blocks(config.block_n),
            "signals": {"arrived": (call.world, row_blocks), "turn": config.pushers},
            "UNITS": config.units,
            "GROUP_M": config.group_m,
            "COLUMNS": call.along_columns,
        }

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        sent = [*portable.each("pushers", 8, 16, 24, 32), *portable.each("units", 1, 2, 4)]
        return [*sent, *portable.variations_of_many(call, config)]


def keywords(call: Call, config: Any) -> dict[str, Any]:
    """What both portable kernels are launched with."""
    return {
        **common(call),
        **results(call, call.rows),
        **portable.keywords(call, call.m, config),
        "PUSHERS": config.pushers,
        "CHUNK": config.chunk,
        "RHS_TRANSPOSED": call.rhs_transposed,
        "ACTIVATION": call.epilogue.activation,
    }


def slower(call: Call) -> str | None:
    """Why XLA is known to be faster than both portable kernels. Measured on 2 and 4 H200."""
    if call.along_columns:
        return UNMEASURED
    if 256 <= call.rows <= 768:
        # Too many rows to hold up every tile for all of them, too few to read rhs again for each rank's.
        return f"with {call.rows} rows the portable kernel reads rhs too often or waits too long"
    if call.epilogue.gated and 128 < call.rows < 8192:
        return "with a gate XLA was faster than the portable kernel at 2048 rows, and slower at 16, 128 and 8192"
    return None
