"""The kernel of `matmul_all_reduce` for many rows on any GPU."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxtaxfree.kernels.matmul_all_reduce.portable import matmul_all_reduce_kernel
from jaxtaxfree.ops.blocks import portable
from jaxtaxfree.ops.matmul_all_reduce.common import common, exchanged
from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(portable.Tile):
    """How the kernel splits its work.

    Attributes:
      block_m, block_n, block_k, num_warps, num_stages: as in `portable.Tile`.
      group_m: number of row blocks whose tiles run together, for the L2 cache.
      exact_wire: whether partial sums travel as f32. Otherwise they are rounded to the operands' dtype on the way, as
        in XLA. That halves the bytes of bf16 and f16.
    """

    group_m: int = setting(8, least=1)
    exact_wire: bool = True


class Portable(Variant[Call]):
    """Each rank owns a part of the tiles, adds them up and pushes the sums to all."""

    name, Config, kernel = "portable", Config, matmul_all_reduce_kernel

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        del asked
        tile = portable.large_tile(call)
        if call.rhs_transposed and call.rhs.bits == 32:
            # Of 256 columns of f32 the sums and what is added to them need more registers than there are.
            tile["block_n"] = 128
        return Config(**tile)

    def cost(self, call: Call, config: Config) -> float:
        return portable.MANY

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        tiles, peers, block = exchanged(call, config)
        wire = call.wire(config.exact_wire)
        return {
            **common(call),
            **keywords(call, config),
            "grid": (2 * call.world - 1) * tiles,
            "scratch": {
                "partials": jax.ShapeDtypeStruct((peers, tiles, *block), wire),
                "sums": jax.ShapeDtypeStruct((call.world, tiles, *block), call.out_dtype),
            },
            "signals": {"arrived": (peers, tiles), "added": (call.world, tiles)},
            "GROUP_M": config.group_m,
        }

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        return portable.variations_of_many(call, config)


def keywords(call: Call, config: Any) -> dict[str, Any]:
    """What both portable kernels are launched with."""
    return {
        **portable.keywords(call, call.rows, config),
        "RHS_TRANSPOSED": call.rhs_transposed,
        "ACTIVATION": call.epilogue.activation,
        "EXACT_WIRE": config.exact_wire,
    }
