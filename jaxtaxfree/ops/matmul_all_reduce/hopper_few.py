"""The kernel of `matmul_all_reduce` for few rows on Hopper."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtaxfree.kernels.matmul_all_reduce.hopper_few import matmul_reduce_hopper_few_kernel
from jaxtaxfree.ops.blocks import hopper_few, portable
from jaxtaxfree.ops.matmul_all_reduce.common import common, exchange_of_few, rows_sent, variations_of_adding
from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(hopper_few.Tile):
    """How the kernel splits its work. Partial sums and sums travel as words. The programs that multiply also add up.

    Attributes:
      block_m, block_n, block_k, num_warps, num_stages, splits, whole: as in `hopper_few.Tile`.
      exact_wire: whether partial sums travel as f32. Otherwise they travel in the operands' dtype.
      shots: 1: every rank adds up all rows. 2: each rank adds up some rows, and sends the sums to all.
      linger: whether a program that adds up waits for one word of each rank before it looks at all words. This pays
        where there are many words.
      add_rows: rows of a tile that a program adds up at once, a power of 2.
    """

    exact_wire: bool = True
    shots: int = setting(2, least=1, most=2)
    linger: bool = True
    add_rows: int = setting(8, least=1, most=256, power_of_2=True)


class HopperFew(Variant[Call]):
    """The kernel of `matmul_reduce_scatter` for few rows; in two shots the sums are gathered as well."""

    name, Config, kernel, scales = "hopper_few", Config, matmul_reduce_hopper_few_kernel, True

    def refuses(self, call: Call, config: Config) -> list[str]:
        return hopper_few.refuses(call, config)

    def arrays(self, call: Call, config: Any, *operands: Any) -> tuple[Any, ...]:
        return portable.with_scales(*operands)

    def check_compiles(self, call: Call, config: Config) -> None:
        hopper_few.check_compiles(call, config)

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        exchange = exchange_of_few(call, asked)
        return Config(**exchange, **hopper_few.tile(call, rows_sent(call, exchange["shots"])))

    def cost(self, call: Call, config: Config) -> float:
        return hopper_few.cost(call, rows_sent(call, config.shots), config)

    def slower(self, call: Call, config: Config) -> str | None:
        return hopper_few.slower(call, config)

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        two_shots = config.shots == 2
        return common(call) | hopper_few.reduce_keywords(
            call,
            call.rows,
            scattered=two_shots,
            gathered=two_shots,
            add_rows=config.add_rows,
            linger=config.linger,
            config=config,
        )

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        shots = portable.each("shots", 1, 2)
        return [*shots, *variations_of_adding(config), *hopper_few.variations(config)]
