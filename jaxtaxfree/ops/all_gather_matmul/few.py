"""The kernel of `all_gather_matmul` for few rows on any GPU."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxtaxfree.kernels.all_gather_matmul.few import all_gather_matmul_few_kernel
from jaxtaxfree.ops.all_gather_matmul.common import refuses_gate, refuses_several
from jaxtaxfree.ops.all_gather_matmul.portable import keywords, slower
from jaxtaxfree.ops.blocks import portable
from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(portable.Tile):
    """How the kernel for few rows splits its work.

    Attributes:
      block_m, block_n, block_k, num_warps, num_stages: as in `portable.Tile`.
      pushers: number of programs that send.
      chunk: elements that a pusher moves at a time, a power of 2.
    """

    pushers: int = setting(16, least=1)
    chunk: int = setting(8192, least=16, most=1 << 16, power_of_2=True)


class Few(Variant[Call]):
    """A tile has rows of all ranks. If `block_m` holds all of them, rhs is read once."""

    name, Config, kernel, scales = "few", Config, all_gather_matmul_few_kernel, True

    def refuses(self, call: Call, config: Config) -> list[str]:
        return (
            portable.refuses_scales(call, config)
            + portable.refuses_columns(call)
            + refuses_several(call)
            + refuses_gate(call)
        )

    def arrays(self, call: Call, config: Any, *operands: Any) -> tuple[Any, ...]:
        return portable.with_scales(*operands)

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        del asked
        return Config(**portable.small_tile(call), pushers=20, chunk=2048)

    def cost(self, call: Call, config: Config) -> float:
        return portable.FEW if call.rows <= portable.FEW_ROWS else math.inf

    def slower(self, call: Call, config: Config) -> str | None:
        return slower(call)

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        config = dataclasses.replace(config, block_n=config.block_n // call.products)
        return keywords(call, config) | {
            "grid": config.pushers + math.ceil(call.rows / config.block_m) * call.column_blocks(config.block_n),
            "signals": {"arrived": call.world},
        }

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        sent = [*portable.each("pushers", 12, 32), *portable.each("chunk", 1024, 4096)]
        return [*sent, *portable.variations_of_few(call, config)]
