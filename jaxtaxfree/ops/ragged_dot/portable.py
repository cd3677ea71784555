"""The kernels of `ragged_dot` for any GPU."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from triton import next_power_of_2

from jaxtaxfree.kernels.ragged_dot.portable import ragged_dot_kernel, ragged_dot_weights_kernel
from jaxtaxfree.ops.blocks.portable import MANY, each
from jaxtaxfree.ops.blocks.portable import Tile as ProductTile
from jaxtaxfree.ops.matmul import UNMEASURED
from jaxtaxfree.ops.ragged_dot.common import Call
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ProductTile):
    """How the kernel splits its work.

    Attributes:
      block_m, block_n, block_k, num_warps, num_stages: as in `blocks.portable.Tile`. In the gradient of the weights
        rows are contracted, `block_k` of them in a step.
      group_m: number of row blocks whose tiles run together, for the L2 cache.
    """

    group_m: int = setting(8, least=1)


class _Measured(Variant[Call]):
    """What is common to both."""

    def cost(self, call: Call, config: Config) -> float:
        del call, config
        return MANY

    def slower(self, call: Call, config: Config) -> str | None:
        """Operands of 16 bits were measured on an H100: half as fast as the kernel for Hopper, and faster than XLA."""
        del config
        return UNMEASURED if call.operand.bits != 16 else None


class Portable(_Measured):
    """Each program computes a tile of one group."""

    name, Config, kernel = "portable", Config, ragged_dot_kernel

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        del asked
        return tile_of(call, min(128, max(16, next_power_of_2(math.ceil(call.rows_of_a_group)))))

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        # Each group may end within a block, and so may what is behind the last one.
        blocks = math.ceil(call.m / config.block_m) + min(call.groups, call.m)
        return {
            **call.keywords(config),
            "grid": blocks * math.ceil(call.n / (config.block_n // call.products)),
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "TRANSPOSED": call.rhs_transposed,
            "PRECISION": call.precision,
            "ACTIVATION": call.activation,
            "FILL": call.fill,
        }

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        return [
            *each("block_m", 16, 32, 64, 128),
            *each("block_n", 64, 128, 256),
            *each("num_stages", 2, 3, 4),
            *each("num_warps", 4, 8),
        ]


class PortableWeights(_Measured):
    """Each program computes a tile of the gradient of one group's weights."""

    name, Config, kernel = "portable", Config, ragged_dot_weights_kernel

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        del asked
        return tile_of(call, min(128, max(16, next_power_of_2(call.k))))

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        tiles = math.ceil(call.k / config.block_m) * math.ceil(call.n / config.block_n)
        return {
            **call.keywords(config),
            "grid": call.groups * tiles,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "PRECISION": call.precision,
        }

    def arrays(self, call: Call, config: Any, *operands: Any) -> tuple[Any, ...]:
        lhs, weights, sizes = operands
        return lhs, weights["rhs"], sizes

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        return [*each("block_n", 64, 128, 256), *each("block_k", 32, 64), *each("num_stages", 2, 3, 4)]


def tile_of(call: Call, block_m: int) -> Config:
    """Settings for tiles of so many rows."""
    small = call.operand.bits > 16 or not call.target.has_big_shared_memory
    block_n = min(128, max(16 * call.products, next_power_of_2(call.n) * call.products))
    return Config(
        block_m=block_m,
        block_n=block_n,
        block_k=max(16, call.operand.elements(128 if block_m * block_n <= 128 * 128 else 64)),
        num_warps=4 if block_m <= 64 else 8,
        num_stages=3 if small else 4,
    )
