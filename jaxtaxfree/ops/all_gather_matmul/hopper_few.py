"""The kernel of `all_gather_matmul` for few rows on Hopper."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from triton import next_power_of_2

from jaxtaxfree.kernels.all_gather_matmul.hopper_few import all_gather_matmul_hopper_few_kernel
from jaxtaxfree.ops.all_gather_matmul.common import common, products, refuses_several
from jaxtaxfree.ops.blocks import hopper_few, portable
from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(hopper_few.Tile):
    """How the kernel splits its work.

    Attributes:
      block_m, block_n, block_k, num_warps, num_stages, splits, whole: as in `hopper_few.Tile`.
      pushers: number of programs that send.
      chunk: elements that a pusher moves at a time, a power of 2.
      part: columns that are sent together, a multiple of `block_k`.
    """

    pushers: int = setting(16, least=1)
    chunk: int = setting(8192, least=16, most=1 << 16, power_of_2=True)
    part: int = setting(512, least=8)


class HopperFew(Variant[Call]):
    """The tensor cores take the weights' columns as rows. The weights are on their way before the first row arrives."""

    name, Config, kernel, scales = "hopper_few", Config, all_gather_matmul_hopper_few_kernel, True

    def refuses(self, call: Call, config: Config) -> list[str]:
        gathered = ["it does not return the gathered rows"] if call.return_gathered else []
        return hopper_few.refuses(call, config) + portable.refuses_columns(call) + refuses_several(call) + gathered

    def arrays(self, call: Call, config: Any, *operands: Any) -> tuple[Any, ...]:
        return portable.with_scales(*operands)

    def check_compiles(self, call: Call, config: Config) -> None:
        hopper_few.check_compiles(call, config)

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        del asked
        rows, pushers = call.rows, 16 if call.world > 1 else 0
        tile = hopper_few.tile(call, rows, others=pushers)
        splits = 1 if tile["whole"] else tile["splits"]  # programs that begin with another part of K
        tiles = math.ceil(rows / tile["block_m"]) * math.ceil(call.n / tile["block_n"])
        if pushers and tiles * splits <= hopper_few.MULTIPROCESSORS - 32:
            pushers = 32
        pushers -= pushers % splits
        # Few rows are there before anyone needs them, many in the order in which they are needed, and in the smaller
        # parts the more programs there are that begin with another one.
        part = 8192 if rows <= 32 else 2048 if rows <= 64 else max(512, 2048 // splits)
        part = min(part, 8192 // splits) // 512 * 512
        chunk = next_power_of_2(math.ceil(call.m * part * splits / max(1, pushers)))
        chunk = min(4096 if rows <= 128 else 16384, max(16 * tile["block_n"], chunk))
        return Config(**tile, pushers=max(1, pushers), chunk=chunk, part=part)

    def cost(self, call: Call, config: Config) -> float:
        return hopper_few.cost(call, call.rows, config, others=config.pushers)

    def slower(self, call: Call, config: Config) -> str | None:
        return hopper_few.slower(call, config, others=config.pushers)

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        shared = common(call)
        keywords = hopper_few.keywords(call, call.rows, config, *(f"weights.{name}" for name in call.weights))
        # Whole steps, and at least as many parts as there are programs that begin with another one.
        splits = 1 if keywords["WHOLE"] else keywords["SPLITS"]
        part = math.ceil(min(config.part, call.k / splits) / config.block_k) * config.block_k
        parts = math.ceil(call.k / part)
        groups = math.gcd(config.pushers, splits) if parts >= splits else 1
        # A program that has nothing to send would not find out whether the region is there, and signal.
        pushers = groups * min(config.pushers // groups, math.ceil(call.m * part / config.chunk))
        exchange = {"signals": keywords["signals"] | {"arrived": (parts, call.world)}}
        exchange |= {"scratch": shared["scratch"] | keywords["scratch"]}
        if call.world == 1:
            pushers, groups, exchange = 0, 1, {"gathered": None, "arrived": None}
        return {
            **{name: value for name, value in shared.items() if name != "scratch"},
            **keywords,
            **products(call, call.rows),
            **exchange,
            "grid": pushers + keywords["grid"],
            "ACTIVATION": call.epilogue.activation,
            "M": call.m,
            "N": call.widths_or_n,
            "K": call.k,
            "PUSHERS": pushers,
            "GROUPS": groups,
            "PART": part,
            "CHUNK": config.chunk,
        }

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        return [
            *portable.each("pushers", 8, 12),
            *portable.each("part", config.part // 2, 2 * config.part),
            *portable.each("chunk", 1024, 4096),
            *hopper_few.variations(config),
        ]
