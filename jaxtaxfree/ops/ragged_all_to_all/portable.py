"""The kernel of `ragged_all_to_all`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtaxfree.kernels.ragged_all_to_all.portable import ragged_all_to_all_kernel
from jaxtaxfree.ops.blocks.portable import each
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.settings import Settings, setting
from jaxtaxfree.target import HOPPER


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """All that decides how rows travel.

    Attributes:
      rows_in, rows_out: of the operand and of the result.
      d: elements of a row.
      world: number of ranks.
      dtype: of the elements.
    """

    rows_in: int
    rows_out: int
    d: int
    world: int
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Of the result, or of the operand if that is less: more cannot travel to a rank."""
        return min(self.rows_in * self.world, self.rows_out) * self.d * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """How the kernel splits its work.

    Attributes:
      programs: number of programs that send, and of those that collect.
      chunk: elements that a program moves at a time, a power of 2.
      stages: parts in which rows are sent, each with a signal; while one is on its way, the one before is copied.
      num_warps: warps of a program.
    """

    programs: int = setting(HOPPER.multiprocessors, least=1)
    chunk: int = setting(8192, least=16, most=1 << 16, power_of_2=True)
    stages: int = setting(4, least=1, most=64)
    num_warps: int = setting(8, least=1, most=16, power_of_2=True)


class Portable(Variant[Call]):
    """Some programs send, each a part of the rows for every peer. As many collect what comes."""

    name, Config, kernel = "portable", Config, ragged_all_to_all_kernel

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        del asked
        chunk = 16384 // call.dtype.itemsize
        programs = max(1, min(HOPPER.multiprocessors, call.nbytes // 16384))
        # A stage has to be worth its signal.
        stages = 4 if call.nbytes >= 8 << 20 else 2 if call.nbytes >= 2 << 20 else 1
        return Config(programs=programs, chunk=chunk, stages=stages)

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        return {
            "name": "ragged_all_to_all",
            "grid": 2 * config.programs,
            "num_warps": config.num_warps,
            "out_type": jax.ShapeDtypeStruct((call.rows_out, call.d), call.dtype),
            "scratch": {
                "inbox": jax.ShapeDtypeStruct((call.rows_out, call.d), call.dtype),
                "transfers": jax.ShapeDtypeStruct((config.programs, call.world, 2), jnp.int32),
            },
            "signals": {"arrived": (config.programs, call.world)},
            "cost_estimate": {"flops": 0, "bytes_accessed": 3 * call.nbytes},
            "ROWS_IN": call.rows_in,
            "ROWS_OUT": call.rows_out,
            "D": call.d,
            "WORLD": call.world,
            "PROGRAMS": config.programs,
            "CHUNK": config.chunk,
            "STAGES": config.stages,
        }

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        return [
            *each("stages", 1, 2, 3, 6, 8),
            *each("chunk", 2048, 4096, 16384),
            *each("programs", 32, 64, 96, 264),
            *each("num_warps", 4, 16),
        ]


VARIANTS: tuple[Variant[Call], ...] = (Portable(),)
