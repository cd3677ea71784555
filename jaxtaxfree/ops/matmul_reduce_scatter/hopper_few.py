"""The kernel of `matmul_reduce_scatter` for few rows on Hopper."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtaxfree.kernels.matmul_all_reduce.hopper_few import matmul_reduce_hopper_few_kernel
from jaxtaxfree.ops.blocks import hopper_few, portable
from jaxtaxfree.ops.matmul_reduce_scatter.common import common
from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.variant import Variant

# Partial sums of more elements are rounded on their way. On 4 H200 those of 16 rows of 8192 took the same time either
# way, those of 128 rows 47 us instead of 42.
EXACT_SIZE = 2**18


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(hopper_few.Tile):
    """How the kernel splits its work. Partial sums travel as words, without a signal.

    Attributes:
      block_m, block_n, block_k, num_warps, num_stages, splits, whole: as in `hopper_few.Tile`.
      exact_wire: whether partial sums travel as f32. Otherwise they travel in the operands' dtype.
    """

    exact_wire: bool = False


class HopperFew(Variant[Call]):
    """The weights are on their way before anything else. Sums travel as words, which show whether they have arrived."""

    name, Config, kernel, scales = "hopper_few", Config, matmul_reduce_hopper_few_kernel, True

    def refuses(self, call: Call, config: Config) -> list[str]:
        return hopper_few.refuses(call, config) + portable.refuses_columns(call)

    def arrays(self, call: Call, config: Any, *operands: Any) -> tuple[Any, ...]:
        return portable.with_scales(*operands)

    def check_compiles(self, call: Call, config: Config) -> None:
        hopper_few.check_compiles(call, config)

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        del asked
        exact_wire = call.widens or call.rows * call.n <= EXACT_SIZE
        return Config(**hopper_few.tile(call, call.rows), exact_wire=exact_wire)

    def cost(self, call: Call, config: Config) -> float:
        return hopper_few.cost(call, call.rows, config)

    def slower(self, call: Call, config: Config) -> str | None:
        return hopper_few.slower(call, config)

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        return {
            **common(call, config.exact_wire),
            **hopper_few.reduce_keywords(call, call.m, scattered=True, gathered=False, config=config),
        }

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        wide = {"block_n": 128, "num_warps": 8, "num_stages": config.num_stages // 2}
        return [wide, *hopper_few.variations(config)]
