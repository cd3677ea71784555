"""The kernel of `all_gather_matmul` for many rows on Hopper: persistent programs of warps with roles."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxtaxfree.kernels.all_gather_matmul.hopper import CHUNK, all_gather_matmul_hopper_kernel
from jaxtaxfree.ops.all_gather_matmul.common import common, refuses_several, results
from jaxtaxfree.ops.blocks import hopper, hopper_few, portable
from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(hopper.Tile):
    """How the kernel splits its work. Two warps of every program push.

    Attributes:
      block_m, block_n, block_k, num_warps, num_stages, group_m, fast_sums, programs: as in `hopper.Tile`.
      part: columns that are sent together, a multiple of `block_k`.
      unit: rows that are sent together, a divisor of `block_m`.
      pace: rows are sent in this share of the time in which rows of other ranks are multiplied. 0: as soon as possible.
    """

    part: int = setting(512, least=8)
    unit: int = setting(16, least=1)
    pace: float = setting(0.95, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part % self.block_k:
            self.refuse("part", f"a multiple of block_k, {self.block_k}")
        if self.block_m % self.unit:
            self.refuse("unit", f"a divisor of block_m, {self.block_m}")


class Hopper(Variant[Call]):
    """In each program two warps push, one loads, and two groups of four warps multiply half of a tile's rows each."""

    name, Config, kernel, scales = "hopper", Config, all_gather_matmul_hopper_kernel, True

    def refuses(self, call: Call, config: Config) -> list[str]:
        reasons = hopper.refuses(call) + refuses_several(call)
        if "residual" in call.epilogue.operands:
            reasons.append("it adds no residual")
        if call.along_columns and call.k % config.block_k:
            reasons.append(
                f"each rank has {call.k} columns of lhs, and it takes multiples of block_k, {config.block_k}"
            )
        return reasons + hopper.refuses_blocks(call, config)

    def check_compiles(self, call: Call, config: Config) -> None:
        hopper.check_compiles(config, 16 * call.products)

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        del asked
        # Every tile needs columns of all ranks, so what is gathered is sent early, and by few rows at a time.
        config = Config(pace=0.7, group_m=8) if call.along_columns else Config()
        waves = _sources(call) * portable.tiles(call.m, call.columns, config) / config.programs
        if call.lhs.bits == 8:
            config = dataclasses.replace(config, block_k=128, part=1024)
            if hopper.narrow_of_8_bits(call, waves, reduction=False):
                return dataclasses.replace(config, block_n=128, num_stages=6)
        # Narrow tiles are dealt out more evenly. With a gate they have not been measured.
        wide = waves >= 3 or call.epilogue.gated
        return config if wide else dataclasses.replace(config, block_n=128, num_stages=6)

    def cost(self, call: Call, config: Config) -> float:
        if call.rows <= hopper_few.ROWS_OF_A_TILE:
            return math.inf
        return hopper.cost(call, _sources(call) * math.ceil(call.m / config.block_m), config)

    def slower(self, call: Call, config: Config) -> str | None:
        del config
        return hopper.slower(call)

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        config = dataclasses.replace(config, block_n=config.block_n // call.products)
        keywords = hopper.keywords(call, call.m, config)
        blocks = keywords["descriptors"]
        whole, half = blocks.pop("rhs_desc"), blocks.pop("half_desc")
        for name in call.weights:
            blocks |= {f"weights.{name}": whole, f"half_weights.{name}": half}
        # In the time of a number of 16 bits two of 8 bits are multiplied.
        chunk = call.lhs.nbytes(CHUNK.value * config.part)
        for i in range(1, len(call.widths)):
            blocks[f"out{i}_desc"] = blocks["out_desc"]
        return {
            **common(call),
            **keywords,
            "ACTIVATION": call.epilogue.activation,
            **results(call, _sources(call), call.m, kind="desc"),
            "signals": {
                "arrived": (call.world, math.ceil(call.m / config.block_m), math.ceil(call.k / config.part)),
                "tickets": 1,
            },
            "PART": config.part,
            "UNIT": config.unit,
            "COLUMNS": call.along_columns,
            "PACE": hopper.pace(config.pace, call.columns, 2, chunk, config.programs),
        }

    def arrays(self, call: Call, config: Any, *operands: Any) -> tuple[Any, ...]:
        """Each in two ways: the rows by pointers and in blocks, the columns in blocks and in halves of them."""
        rows, weights, epilogue, *scales = operands
        return rows[None], rows[None], weights, weights, epilogue, *(scales or [{}])

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        other = {"kernel": "portable"}
        return [
            other,
            other | {"pushers": 32, "units": 1},
            other | {"block_n": 128, "num_warps": 4},
            *portable.each("part", 256, 1024),
            *portable.each("unit", 8, 32),
            *portable.each("pace", 0.0, 0.7),
            *portable.each("group_m", 8, 32),
            *portable.each("num_stages", 3),
        ]


def _sources(call: Call) -> int:
    """How many ranks have tiles of their own."""
    return 1 if call.along_columns else call.world
