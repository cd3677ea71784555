"""The kernel of `decode_attention`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from triton import next_power_of_2

from jaxtaxfree.kernels.decode_attention.portable import decode_attention_kernel
from jaxtaxfree.ops.blocks.portable import each
from jaxtaxfree.ops.decode_attention.spec import Spec
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.primitive import Lasting
from jaxtaxfree.settings import Settings, setting
from jaxtaxfree.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """All that decides how the kernel attends.

    Attributes:
      query_shape: [B, T, N, H].
      value_head_size: Hv, the head size of the values.
      world: number of ranks.
      spec: what the call means.
      dtype, cache_dtype: dtypes of the query and of the cache.
      target: the GPU.
      key_scale, value_scale: "none", "tensor", "head" or "token".
      sinks: whether there are any.
      starts: whether the cache is a ring whose first key may lie anywhere.
      pages: of the whole cache, or sequences if it is not paged. The kernel asks for it with the layout KBSH alone.
    """

    query_shape: tuple[int, ...]
    value_head_size: int
    world: int
    spec: Spec
    dtype: np.dtype
    cache_dtype: np.dtype
    target: Target
    key_scale: str = "none"
    value_scale: str = "none"
    sinks: bool = False
    starts: bool = False
    pages: int = 0

    @property
    def rows(self) -> int:
        """New tokens times query heads of a key/value head."""
        return self.query_shape[1] * self.query_shape[2] // self.spec.kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """How the kernel splits its work.

    Attributes:
      splits: number of parts of a rank's keys that run side by side, for each sequence and key/value head.
      block_s: keys of a tile, a power of 2, at least 16.
      block_r: rows of a tile (new tokens times the query heads of a key/value head), a power of 2, at least 16.
      merge_rows: rows that a merging program takes, a power of 2.
      alone: whether each warp attends to its own part of a tile and waits for no other warp. This needs parts of 16
        keys or more.
      num_warps, num_stages: warps of a program, and tiles of keys and values in flight.
    """

    splits: int = setting(1, least=1)
    block_s: int = setting(64, least=16, most=512, power_of_2=True)
    block_r: int = setting(16, least=16, most=256, power_of_2=True)
    merge_rows: int = setting(8, least=1, most=256, power_of_2=True)
    alone: bool = False
    num_warps: int = setting(4, least=1, most=16, power_of_2=True)
    num_stages: int = setting(3, least=1, most=32)


class Portable(Variant[Call]):
    """The first programs attend, each to a part of this rank's keys. The later ones merge."""

    name, Config, kernel = "portable", Config, decode_attention_kernel

    def refuses(self, call: Call, config: Config) -> list[str]:
        del config
        if call.cache_dtype == jnp.float8_e4m3fn and call.target.compute_capability < 89:
            wanted = "take float8_e5m2 or int8"
            return [Lasting(f"GPUs of compute capability {call.target} have no float8_e4m3fn: {wanted}")]
        return []

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        """From what was measured on H200."""
        del asked
        spec, target = call.spec, call.target
        batch, kv_heads, rows, dtype = call.query_shape[0], spec.kv_heads, call.rows, call.dtype
        head_sizes = (call.query_shape[3], call.value_head_size)
        paged = spec.page_size is not None
        block_r = min(64, max(16, next_power_of_2(rows)))
        width = sum(map(next_power_of_2, head_sizes))
        # The tiles of a stage may take 32 KiB: then two programs share an SM and leave room for a merging one.
        widest = max(call.cache_dtype.itemsize, dtype.itemsize)
        little = target.has_little_shared_memory
        if little and width * widest > 1024:
            block_r = min(block_r, 32)
        block_s = max(16, min(64, next_power_of_2((16 if little else 32) * 1024 // (width * widest) + 1) // 2))
        num_warps = 8 if width * widest >= 1024 else 4  # 4 have too few registers for rows of more
        groups = batch * kv_heads * math.ceil(rows / block_r)
        places = target.multiprocessors
        # Where tensor cores multiply, and a warp's registers hold a result; pages take many.
        alone = block_r == 16 and block_s >= 16 * num_warps and dtype.itemsize == 2 and not paged
        # Of few sequences one program an SM, with more tiles in flight, leaves the fewest partial results to add up.
        single = alone and groups <= places // 8 and target.has_big_shared_memory
        # As many programs as run at a time, or a little less; but no split without a few tiles.
        splits = max(
            1, min((places if single else 2 * places) // groups, math.ceil(spec.placement.slots / (2 * block_s)), 256)
        )
        splits -= splits % 8 if splits > 8 else 0  # merged without a remainder
        # One program in two SMs merges, with 8 elements of the result a thread at most: of twice as many, those that
        # find no room beside the programs that attend begin when these end.
        merge_rows = min(next_power_of_2(rows), max(1, next_power_of_2(batch * kv_heads * rows // 64)))
        merge_rows = max(1, min(merge_rows, 256 * num_warps // next_power_of_2(head_sizes[1])))
        return Config(
            splits=splits,
            block_s=block_s,
            block_r=block_r,
            alone=alone,
            merge_rows=merge_rows,
            num_warps=num_warps,
            # Pages are looked up stages before.
            num_stages=6
            if single
            else 2
            if little and width * widest > 1024
            else 5
            if spec.page_size is not None
            else 3,
        )

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        spec, world, rows = call.spec, call.world, call.rows
        b, t, n, h = call.query_shape
        k, hv, slots = spec.kv_heads, call.value_head_size, spec.placement.slots
        n_out = n // world if spec.by_heads else n
        attending = b * config.splits * math.ceil(rows / config.block_r) * k
        others = world if world > 1 else 0
        words = -(-hv // 4) * 4  # of a row of messages
        # Several threads of a merging program share the splits of each 4 neighbours of the result.
        groups = 32 * config.num_warps // (config.merge_rows * max(4, next_power_of_2(hv)) // 4)
        groups = max(1, min(groups, next_power_of_2(config.splits)))
        return {
            "out_type": (
                jax.ShapeDtypeStruct((b, t, n_out, hv), spec.dtype),
                jax.ShapeDtypeStruct((b, t, n_out), jnp.float32),
            ),
            "grid": attending + b * k * math.ceil(rows / config.merge_rows),
            "messages": {
                "partials": (b, k, config.splits, rows, words),
                "partial_sums": (b, k, config.splits, rows, 2),
                "merged": (others, b, t, n_out, words),
                "merged_sums": (others, b, t, n_out, 2),
            },
            "name": "decode_attention",
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "cost_estimate": {
                "flops": 2 * b * t * n * slots * (h + hv),
                "bytes_accessed": b * slots * k * (h + hv) * call.cache_dtype.itemsize,
            },
            "B": b,
            "T": t,
            "N": n,
            "N_OUT": n_out,
            "K": k,
            "H": h,
            "HV": hv,
            "S": slots,
            "PAGE": spec.page_size or slots,
            "PAGED": spec.page_size is not None,
            "HEAD_MAJOR": spec.layout == "BKSH",
            "POOL": call.pages if spec.layout == "KBSH" else 0,
            "STRETCH": spec.placement.stretch,
            "WINDOW": -1 if spec.window is None else spec.window,
            "SCALE": spec.scale,
            "SOFT_CAP": spec.soft_cap or 0.0,
            "KEY_SCALE": call.key_scale,
            "VALUE_SCALE": call.value_scale,
            "SINKS": call.sinks,
            **({} if call.starts else {"starts_ptr": None}),
            "SPLITS": config.splits,
            "BLOCK_R": config.block_r,
            "BLOCK_S": config.block_s,
            "TEAMS": config.num_warps if config.alone and config.block_s >= 16 * config.num_warps else 1,
            "MERGE_ROWS": config.merge_rows,
            "MERGE_GROUPS": groups,
        }

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        splits, rows = config.splits, config.merge_rows
        return [
            *each("splits", splits // 2, splits * 3 // 4, splits * 3 // 2, 2 * splits),
            *each("block_s", max(16, config.block_s // 2), 2 * config.block_s),
            *each("num_stages", 2, 4),
            *each("num_warps", 8),
            *each("merge_rows", rows // 2, 2 * rows),
            *each("alone", not config.alone),
        ]


# The kernels. Of those that do not refuse a call the cheapest one takes it.
VARIANTS: tuple[Variant[Call], ...] = (Portable(),)
