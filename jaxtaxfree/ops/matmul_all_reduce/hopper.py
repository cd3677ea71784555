"""The kernel of `matmul_all_reduce` for many rows on Hopper: persistent programs of warps with roles."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxtaxfree.kernels.matmul_all_reduce.hopper import PLACES, matmul_all_reduce_hopper_kernel
from jaxtaxfree.ops.blocks import hopper, portable
from jaxtaxfree.ops.matmul_all_reduce.common import common, exchanged
from jaxtaxfree.ops.matmul_reduce_scatter.hopper import cost, length, refuses
from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(hopper.Tile):
    """How the kernel splits its work. Partial sums and the result are rounded to the operands' dtype.

    Attributes:
      block_m, block_n, block_k, num_warps, num_stages, group_m, fast_sums, programs: as in `hopper.Tile`.
      chunk: elements of a tile that are sent at a time, a power of 2.
      pace: tiles are sent in this share of the time in which tiles for other ranks are multiplied. This holds where
        later products hide the sending. All other data is sent at the speed of the wire. 0: as soon as possible.
      groups: number of groups of a rank's tiles. The sums of a group travel while later groups are multiplied.
      lag: number of further groups whose tiles for other ranks are multiplied before a group's own tiles. Meanwhile the
        parts of the group arrive.
      exact_wire: must be False. This kernel rounds partial sums, and refuses to send f32.
    """

    chunk: int = setting(1024, least=16, most=1 << 16, power_of_2=True)
    pace: float = setting(0.95, most=1)
    groups: int = setting(1, least=1)
    lag: int = setting(1)
    exact_wire: bool = False


class Hopper(Variant[Call]):
    """The roles are those of `matmul_reduce_scatter`. A rank's tiles come in groups, whose sums travel meanwhile."""

    name, Config, kernel, scales = "hopper", Config, matmul_all_reduce_hopper_kernel, True

    def refuses(self, call: Call, config: Config) -> list[str]:
        reasons = refuses(call, config)
        if call.out_dtype != call.lhs.wire:
            reasons.append(f"it gives results of the dtype of partial sums, {call.lhs.wire}, not {call.out_dtype}")
        return reasons

    def check_compiles(self, call: Call, config: Config) -> None:
        del call
        hopper.check_compiles(config, 32)

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        config = Config(exact_wire=asked.get("exact_wire", False))
        if call.lhs.bits == 8:
            config = dataclasses.replace(config, block_k=128)
        waves = portable.tiles(call.rows, call.n, config) / config.programs
        if call.lhs.bits == 8 and hopper.narrow_of_8_bits(call, waves, reduction=True):
            config = dataclasses.replace(config, block_n=128, num_stages=6, chunk=2048)
        elif waves < 1:
            # Nothing hides what is sent, so it is sent at once, and by more programs.
            config = dataclasses.replace(config, block_n=128, num_stages=6, chunk=2048)
        # The sums of 32 tiles of a rank take three ranks some 16 us: at most this much is left at the end.
        tiles = math.ceil(portable.tiles(call.rows, call.n, config) / call.world)
        groups = max(1, min(tiles // 32, 16))
        # Parts travel while about as many tiles are multiplied as there are programs.
        between = 0.9 * config.programs / math.ceil(tiles / groups)
        lag = max(0, math.ceil((between - 1) / max(1, call.world - 1)))
        return dataclasses.replace(config, groups=groups, lag=lag)

    def cost(self, call: Call, config: Config) -> float:
        return cost(call, math.ceil(call.rows / config.block_m), config)

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        tiles, peers, block = exchanged(call, config)
        groups = min(config.groups, tiles)
        a_group = math.ceil(tiles / groups)
        wire = call.wire(exact_wire=False)

        def cycles(length: int, chunks: int, programs: int) -> int:
            nbytes = chunks * config.chunk * wire.itemsize
            return hopper.pace(config.pace, length, wire.itemsize, nbytes, min(programs, config.programs))

        return {
            **common(call),
            **hopper.reduce_keywords(call, call.rows, config),
            "out_type": jax.ShapeDtypeStruct((1, call.rows, call.n), call.out_dtype),
            "scratch": {
                "partials": jax.ShapeDtypeStruct((peers, tiles, *block), wire),
                "sums": jax.ShapeDtypeStruct((call.world, tiles, *block), wire),
                "outbox": hopper.outbox(config, PLACES.value, wire),
            },
            "signals": {"arrived": (peers, tiles), "added": (call.world, tiles), "tickets": 1},
            "TILES": tiles,
            "GROUPS": groups,
            "LAG": min(config.lag, groups - 1),
            "CHUNK": config.chunk,
            "PACE": cycles(length(call), 1, config.programs),
            # The wire takes no more from this many programs together.
            "LAST_PACE": cycles(0, 1, peers * a_group),
            "SUM_PACE": cycles(0, peers, a_group),
        }

    def arrays(self, call: Call, config: Any, *operands: Any) -> tuple[Any, ...]:
        """With one more dimension, as the kernel that scatters has it for the ranks."""
        rows, rhs, epilogue, *scales = operands
        return hopper.reduce_arrays(rows[None], rhs, epilogue, *scales)

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        return [
            {"kernel": "portable", "exact_wire": False},
            *portable.each("groups", config.groups // 2, config.groups * 2),
            *portable.each("lag", config.lag + 1),
            *portable.each("chunk", 1024, 2048),
            *portable.each("pace", 0.0, 0.7),
            *portable.each("group_m", 8, 32),
        ]
