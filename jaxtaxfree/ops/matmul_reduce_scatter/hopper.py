"""The kernel of `matmul_reduce_scatter` for many rows on Hopper: persistent programs of warps with roles."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxtaxfree.kernels.matmul_reduce_scatter.hopper import PLACES, matmul_reduce_scatter_hopper_kernel
from jaxtaxfree.ops.blocks import hopper, portable
from jaxtaxfree.ops.matmul_reduce_scatter.common import common
from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(hopper.Tile):
    """How the kernel splits its work.

    Attributes:
      block_m, block_n, block_k, num_warps, num_stages, group_m, fast_sums, programs: as in `hopper.Tile`.
      chunk: elements of a tile that are sent at a time, a power of 2.
      pace: tiles are sent in this share of the time in which tiles for other ranks are multiplied. 0: as soon as
        possible.
      exact_wire: must be False. This kernel rounds partial sums to the operands' dtype on the way, and refuses to
        send f32.
    """

    chunk: int = setting(1024, least=16, most=1 << 16, power_of_2=True)
    pace: float = setting(0.95, most=1)
    exact_wire: bool = False


class Hopper(Variant[Call]):
    """In a program one warp claims and loads tiles, two groups of four warps multiply, and two warps send tiles."""

    name, Config, kernel, scales = "hopper", Config, matmul_reduce_scatter_hopper_kernel, True

    def refuses(self, call: Call, config: Config) -> list[str]:
        return refuses(call, config)

    def check_compiles(self, call: Call, config: Config) -> None:
        del call
        hopper.check_compiles(config, 32)

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        config = Config(exact_wire=asked.get("exact_wire", False))
        if call.lhs.bits == 8:
            config = dataclasses.replace(config, block_k=128)
        waves = call.world * portable.tiles(call.m, call.n, config) / config.programs
        if call.lhs.bits == 8 and hopper.narrow_of_8_bits(call, waves, reduction=True):
            config = dataclasses.replace(config, block_n=128, num_stages=6, chunk=2048)
        elif waves >= 1.5:
            return config
        else:
            config = dataclasses.replace(config, block_n=128, num_stages=6, chunk=2048)
        if call.world * portable.tiles(call.m, call.n, config) <= config.programs:
            # Nothing hides what is sent, so it is sent at once.
            config = dataclasses.replace(config, pace=0.0)
        return config

    def cost(self, call: Call, config: Config) -> float:
        return cost(call, call.world * math.ceil(call.m / config.block_m), config)

    def slower(self, call: Call, config: Config) -> str | None:
        del config
        return hopper.slower(call)

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        tiles, peers = portable.tiles(call.m, call.n, config), max(1, call.world - 1)  # no scratch is empty
        wire = call.wire(exact_wire=False)
        partials = jax.ShapeDtypeStruct((peers, tiles, config.block_m, config.block_n), wire)
        chunk = config.chunk * wire.itemsize
        return {
            **common(call, exact_wire=False),
            **hopper.reduce_keywords(call, call.m, config),
            "out_type": jax.ShapeDtypeStruct((1, call.m, call.n), call.out_dtype),
            "scratch": {"partials": partials, "outbox": hopper.outbox(config, PLACES.value, wire)},
            "signals": {"arrived": (peers, tiles), "tickets": 1},
            "CHUNK": config.chunk,
            "COLUMNS": call.along_columns,
            "PACE": hopper.pace(config.pace, length(call), wire.itemsize, chunk, config.programs),
        }

    def arrays(self, call: Call, config: Any, *operands: Any) -> tuple[Any, ...]:
        rows, rhs, epilogue, *scales = operands
        return hopper.reduce_arrays(rows.reshape(-1, call.m, call.k), rhs, epilogue, *scales)

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        other = {"kernel": "portable"}
        return [
            other,
            *(other | {"lag": lag} for lag in (124, 128, 148)),
            *portable.each("group_m", 8, 32),
            *portable.each("chunk", 2048),
            *portable.each("pace", 0.0, 0.7),
            *portable.each("num_stages", 3),
        ]


def refuses(call: Call, config: Any) -> list[str]:
    """What keeps the kernels for many rows that reduce from taking a call."""
    reasons = hopper.refuses(call) + hopper.refuses_blocks(call, config) + hopper.refuses_residual(call)
    reasons += hopper.refuses_arriving(call, config)
    return reasons + (["it rounds partial sums on their way"] if config.exact_wire else [])


def cost(call: Call, row_blocks: int, config: Any) -> float:
    """As `hopper.cost`; infinite for few rows by weights [N, K], which kernels for few rows take."""
    if call.rhs_transposed and call.rows <= portable.FEW_ROWS:
        return math.inf
    return hopper.cost(call, row_blocks, config)


def length(call: Call) -> int:
    """As `hopper.pace` counts it, in multiplications of 16 bits: of 8 bits two take the time of one."""
    return call.k * min(call.lhs.bits, 16) // 16
