"""The kernel of `matmul_reduce_scatter` for many rows on any GPU."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from triton import next_power_of_2

from jaxtaxfree.kernels.matmul_reduce_scatter.portable import matmul_reduce_scatter_kernel
from jaxtaxfree.ops.blocks import portable
from jaxtaxfree.ops.matmul import UNMEASURED
from jaxtaxfree.ops.matmul_reduce_scatter.common import common
from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.settings import setting
from jaxtaxfree.target import HOPPER


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(portable.Tile):
    """How the kernel splits its work.

    Attributes:
      block_m, block_n, block_k, num_warps, num_stages: as in `portable.Tile`.
      group_m: number of row blocks whose tiles run together, for the L2 cache.
      lag: distance from a program to the one that carries its tile, at least 1. If it is less than the number of
        programs that run at a time, programs wait for each other. If it is more than the number of a rank's own tiles,
        the last tiles are not carried.
      exact_wire: whether partial sums travel as f32. Otherwise they are rounded to the operands' dtype on the way, as
        in XLA. That halves the bytes of bf16 and f16.
    """

    group_m: int = setting(16, least=1)
    lag: int = setting(HOPPER.multiprocessors, least=1)
    exact_wire: bool = False


class Portable(Variant[Call]):
    """Tiles for other ranks come first. A later program carries each one, in slices, while it multiplies its own."""

    name, Config, kernel = "portable", Config, matmul_reduce_scatter_kernel

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        del asked
        config = Config(**portable.large_tile(call))
        # Rather a short wait than tiles that are not carried.
        tiles = portable.tiles(call.m, call.n, config)
        return dataclasses.replace(config, lag=tiles) if 120 <= tiles < config.lag else config

    def cost(self, call: Call, config: Config) -> float:
        return portable.MANY

    def slower(self, call: Call, config: Config) -> str | None:
        del config
        return UNMEASURED if call.along_columns else None

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        wire, tile = call.wire(config.exact_wire), (config.block_m, config.block_n)
        tiles, peers = portable.tiles(call.m, call.n, config), max(1, call.world - 1)  # no scratch is empty
        places = config.lag if config.lag <= peers * tiles else 1  # with a longer lag nothing is carried
        # A step of K carries whole lines of 128 bytes, at most 16 bytes a thread. The last steps carry nothing, so that
        # all has arrived when the tile is published.
        threads = 32 * config.num_warps
        steps = max(1, math.ceil(call.k / config.block_k) - 3)
        part = min(math.ceil(math.prod(tile) * wire.itemsize / steps / 128) * 32, 4 * threads)
        return {
            **common(call, config.exact_wire),
            **keywords(call, config),
            "grid": call.world * tiles,
            "scratch": {
                "partials": jax.ShapeDtypeStruct((peers, tiles, *tile), wire),
                "outbox": jax.ShapeDtypeStruct((places, *tile), wire),
            },
            "signals": {"arrived": (2, peers, tiles)},
            "GROUP_M": config.group_m,
            "COLUMNS": call.along_columns,
            "LAG": config.lag,
            "PART": part,
            "CHUNK": max(threads, next_power_of_2(part)),
        }

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        return [*portable.variations_of_many(call, config), *portable.each("lag", 124, 132, 148, 264)]


def keywords(call: Call, config: Any) -> dict[str, Any]:
    """What both portable kernels are launched with."""
    return {
        "out_type": jax.ShapeDtypeStruct((call.m, call.n), call.out_dtype),
        **portable.keywords(call, call.m, config),
        "RHS_TRANSPOSED": call.rhs_transposed,
        "EXACT_WIRE": config.exact_wire,
        "ACTIVATION": call.epilogue.activation,
    }
