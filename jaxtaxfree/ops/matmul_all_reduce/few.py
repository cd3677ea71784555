"""The kernel of `matmul_all_reduce` for few rows on any GPU."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxtaxfree.kernels.matmul_all_reduce.few import matmul_all_reduce_few_kernel
from jaxtaxfree.ops.blocks import portable
from jaxtaxfree.ops.matmul_all_reduce.common import common, exchange_of_few, rows_sent, variations_of_adding
from jaxtaxfree.ops.matmul_all_reduce.portable import keywords
from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.settings import setting
from jaxtaxfree.target import HOPPER


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(portable.Tile):
    """How the kernel splits its work. Partial sums and sums travel as words, without a signal.

    Attributes:
      block_m, block_n, block_k, num_warps, num_stages: as in `portable.Tile`.
      exact_wire: whether partial sums travel as f32. Otherwise they travel in the operands' dtype.
      shots: 1: every rank adds up all rows. 2: each rank adds up some rows, and sends the sums to all.
      apart: whether separate programs add up, so that the programs that multiply do not wait.
      linger: whether a program that adds up waits for one word of each rank before it looks at all words. This pays
        where there are many words.
      add_rows: rows of a tile that a program adds up at once, a power of 2.
    """

    exact_wire: bool = True
    shots: int = setting(2, least=1, most=2)
    apart: bool = True
    linger: bool = True
    add_rows: int = setting(8, least=1, most=256, power_of_2=True)


class Few(Variant[Call]):
    """Every program sends its tile as words, to all ranks or to those that own its rows."""

    name, Config, kernel, scales = "few", Config, matmul_all_reduce_few_kernel, True

    def refuses(self, call: Call, config: Config) -> list[str]:
        return portable.refuses_scales(call, config)

    def arrays(self, call: Call, config: Any, *operands: Any) -> tuple[Any, ...]:
        return portable.with_scales(*operands)

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        config = Config(**portable.small_tile(call), **exchange_of_few(call, asked))
        tiles = portable.tiles(rows_sent(call, config.shots), call.n, config)
        return dataclasses.replace(config, apart=tiles > HOPPER.multiprocessors)

    def cost(self, call: Call, config: Config) -> float:
        return portable.FEW if call.rows <= portable.FEW_ROWS else math.inf

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        column_blocks = math.ceil(call.n / config.block_n)
        two_shots = config.shots == 2
        owned = math.ceil(call.rows / call.world) if two_shots else call.rows
        tiles = portable.tiles(rows_sent(call, config.shots), call.n, config)
        parts = math.ceil(owned / config.add_rows) * column_blocks

        def words(boxes: int, of: np.dtype) -> jax.ShapeDtypeStruct:
            elements = boxes * owned * column_blocks * config.block_n
            return jax.ShapeDtypeStruct((elements * of.itemsize // 4,), np.int32)

        wire = call.wire(config.exact_wire)
        return {
            **common(call),
            **keywords(call, config),
            "grid": tiles + parts * config.apart,
            "messages": {"partials": words(call.world, wire), "sums": words(call.world * two_shots, call.out_dtype)},
            "OWNED": owned,
            "SHOTS": config.shots,
            "APART": config.apart,
            "LINGER": config.linger,
            "ADD_ROWS": config.add_rows,
        }

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        apart = portable.each("apart", False, True)
        return [*apart, *variations_of_adding(config), *portable.variations_of_few(call, config)]
