"""The kernel of `matmul_reduce_scatter` for few rows on any GPU."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxtaxfree.kernels.matmul_reduce_scatter.few import matmul_reduce_scatter_few_kernel
from jaxtaxfree.ops.blocks import portable
from jaxtaxfree.ops.matmul_reduce_scatter.common import common
from jaxtaxfree.ops.matmul_reduce_scatter.portable import keywords
from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.variant import Variant


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(portable.Tile):
    """How the kernel splits its work.

    Attributes:
      block_m, block_n, block_k, num_warps, num_stages: as in `portable.Tile`.
      exact_wire: whether partial sums travel as f32. Otherwise they travel in the operands' dtype.
    """

    exact_wire: bool = False


class Few(Variant[Call]):
    """A tile has rows for all ranks. If `block_m` holds all of them, rhs is read once."""

    name, Config, kernel, scales = "few", Config, matmul_reduce_scatter_few_kernel, True

    def refuses(self, call: Call, config: Config) -> list[str]:
        return portable.refuses_scales(call, config) + portable.refuses_columns(call)

    def arrays(self, call: Call, config: Any, *operands: Any) -> tuple[Any, ...]:
        return portable.with_scales(*operands)

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        del asked
        # Where rhs is all there is to read, f32 on the wire costs little.
        return Config(**portable.small_tile(call), exact_wire=True)

    def cost(self, call: Call, config: Config) -> float:
        return portable.FEW if call.rows <= portable.FEW_ROWS else math.inf

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        wire = call.wire(config.exact_wire)
        programs = portable.tiles(call.rows, call.n, config)
        return {
            **common(call, config.exact_wire),
            **keywords(call, config),
            "grid": programs,
            "scratch": {"partials": jax.ShapeDtypeStruct((call.world, call.m, call.n), wire)},
            "signals": {"arrived": (programs, call.world)},
        }

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        return portable.variations_of_few(call, config)
