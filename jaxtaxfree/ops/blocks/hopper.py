"""The kernels for many rows on Hopper: persistent programs of warps with roles."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxtaxfree import gluon
from jaxtaxfree.kernels.blocks.tiles import box_of
from jaxtaxfree.ops.blocks import portable
from jaxtaxfree.ops.matmul import UNMEASURED
from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.quantize import BLOCK
from jaxtaxfree.primitive import Lasting
from jaxtaxfree.settings import setting
from jaxtaxfree.target import HOPPER

# Of the warps that multiply. Each has a part of them, and of the rows of a tile.
PARTITIONS = 2
# From so many rows on the forms along columns were measured: on 2 H100, 2048 to 8192 rows, the gather was 1.06 to 1.2
# times as fast as XLA, and the scatter 1.07 to 1.27 times.
COLUMNS_MEASURED = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile(portable.Tile):
    """The settings of a product by persistent programs.

    Attributes:
      block_m, block_n, block_k: as in `portable.Tile`.
      num_warps: 8, those that multiply.
      num_stages: steps of the loop in flight, at least 2, because a stage is released one step late.
      group_m: number of row blocks whose tiles run together, for the L2 cache.
      fast_sums: whether tensor cores add up products of 8-bit floating-point numbers along all of K, of which they keep
        some 14 bits. PyTorch calls it `use_fast_accum`, JAX `DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM`.
        Otherwise the sums of each step are added up in f32.
      programs: number of programs, by default one for each multiprocessor of the GPU.
    """

    num_stages: int = setting(4, least=2, most=32)
    group_m: int = setting(16, least=1)
    fast_sums: bool = False
    programs: int = setting(HOPPER.multiprocessors, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_warps != 4 * PARTITIONS:
            self.refuse("num_warps", f"{4 * PARTITIONS} for the kernel 'hopper', which multiplies by so many warps")


def check_compiles(config: Tile, columns: int) -> None:
    """Raises ValueError unless a tile is large enough: each partition takes 64 rows at least, which four warps share.

    Args:
      columns: the least that the kernel can divide among its stores.
    """
    if config.block_m < 64 * PARTITIONS:
        config.refuse("block_m", f"at least {64 * PARTITIONS} for the kernel 'hopper'")
    if config.block_n < columns:
        config.refuse("block_n", f"at least {columns} for the kernel 'hopper' here")


def refuses(call: Call) -> list[str]:
    """All that keeps every kernel for many rows on Hopper from taking a product."""
    return refuses_in_any_case(call) + (_refuses_scales(call) if call.scaled else refuses_dtypes(call))


def refuses_dtypes(call: Call) -> list[str]:
    """What keeps the kernels for Hopper from taking operands without scales."""
    if {call.lhs.bits, call.rhs.bits} == {16}:
        return []
    return [Lasting(f"it takes float16 and bfloat16, not {call.dtype}: name no kernel in config, or cast")]


def refuses_in_any_case(call: Call) -> list[str]:
    """What keeps every kernel for Hopper from taking a product, whatever its operands are."""
    reasons: list[str] = []
    if call.target.compute_capability != HOPPER.compute_capability:
        reasons.append(
            Lasting(f"it is for GPUs of compute capability {HOPPER}, not {call.target}: name no kernel in config")
        )
    elif why := gluon.unsupported("it", call.target.compute_capability):
        reasons.append(why)
    # Of the narrower operand, or of a result of 16 bits.
    elements = 128 // min(call.lhs.bits, call.rhs.bits, 16)
    sizes = (call.k, *(call.widths or (call.n,)))
    if any(size % elements for size in sizes):
        lengths = ", ".join(map(str, sizes[:-1]))
        reasons.append(f"TMA takes rows of multiples of 16 bytes, and these have {lengths} and {sizes[-1]} elements")
    return reasons


def _refuses_scales(call: Call) -> list[str]:
    reasons = []
    if call.lhs.bits != call.rhs.bits:
        reasons.append(f"it multiplies 8 bits by 8 bits, not {call.lhs.dtype} by {call.rhs.dtype}")
    if not call.rhs_transposed:
        reasons.append("tensor cores take 8 bits along K: give rhs as [N, K], with rhs_transposed=True")
    if call.along_columns:
        reasons.append("with scales it takes rows to gather or scatter, not columns")
    return reasons


def refuses_blocks(call: Call, config: Tile) -> list[str]:
    """What keeps a kernel with these settings from taking scales of blocks."""
    reasons = []
    if "block" in call.scales:
        if config.fast_sums:
            reasons.append("scales of blocks are applied to the sums of each step, so there are no fast_sums")
        if config.block_k != BLOCK:
            reasons.append(f"blocks of scales take steps of block_k={BLOCK}, not {config.block_k}")
        # A tile of 256 columns has two halves, each with its own scales.
        if "block" in (call.rhs.scales, call.gate_scales) and 2 * BLOCK % config.block_n:
            reasons.append(f"blocks of scales take a block_n that divides {2 * BLOCK}, not {config.block_n}")
    return reasons


def narrow_of_8_bits(call: Call, waves: float, *, reduction: bool) -> bool:
    """Whether a tile has 128 columns: where wide ones are dealt out less evenly, and with scales of blocks in a
    reduction, whose wide tiles put more registers aside.

    On 2 H100, 8192 x 8192 x 28672, wide and narrow tiles took 1505 and 1741 us in a gather, with scales of blocks 1850
    and 2233 in a gather and 2935 and 2016 in a scatter. 2048 x 8192 x 28672 took 404 and 429 in a gather, of 6.8 waves
    of wide tiles, and 417 and 460 in a scatter, of 3.9. In a gather with scales of blocks it took 502 and 556 on 2
    H200, and with a gate 1014 and 1093. Of 3.4 waves, 2048 x 4096 x 14336, those of blocks took 137 and 146 on 2 H100.

    Args:
      waves: of wide tiles, how many each program has.
    """
    return waves < 3 or (reduction and "block" in call.scales)


def slower(call: Call) -> str | None:
    """Why XLA is taken for a product that these kernels take, if it is."""
    return UNMEASURED if call.along_columns and call.rows < COLUMNS_MEASURED else None


def refuses_residual(call: Call) -> list[str]:
    """What keeps the kernels that load the residual by TMA from taking it."""
    if call.residual is None or call.residual.itemsize == 2:
        return []
    return [f"it takes a residual of float16 and bfloat16, not {call.residual}"]


def cost(call: Call, row_blocks: int, config: Tile) -> float:
    """The time of all tiles, in elements of a tile: in whole waves of programs, which go on without a pause.

    Args:
      row_blocks: of the tiles.
    """
    waves = math.ceil(row_blocks * math.ceil(call.columns / config.block_n) / config.programs) + 0.25
    return waves * config.block_m * config.block_n


def keywords(call: Call, m: int, config: Tile, *, stored: int | None = None) -> dict[str, Any]:
    """As `portable.keywords`, for these kernels.

    Args:
      m: what the kernel calls M.
      stored: at most this many columns are stored at a time.
    """
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    # 128 bytes, which is as much as TMA moves at a time.
    columns = min(128 // call.out_dtype.itemsize, block_n // 2, stored or block_n)
    return {
        "grid": config.programs,
        "num_warps": config.num_warps // PARTITIONS,
        "descriptors": {
            "lhs_desc": (1, box_of(m, block_m), block_k),
            "rhs_desc": (block_n, block_k) if call.rhs_transposed else (block_k, block_n),
            "half_desc": (block_n // 2, block_k) if call.rhs_transposed else (block_k, block_n // 2),
            "out_desc": (1, block_m // PARTITIONS, columns),
        },
        "M": m,
        "N": call.widths_or_n,
        "K": call.k,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GROUP_M": config.group_m,
        "FAST_SUMS": config.fast_sums,
        "STAGES": config.num_stages,
    }


def arriving(call: Call, config: Tile) -> int:
    """Of how many columns, all rows of them, a stage takes the parts of a tile, whose elements have 16 bits or more."""
    lines = config.block_k * call.rhs.bits // max(call.rhs.bits, 16)
    return min(config.block_n, config.block_n * lines // config.block_m)


def refuses_arriving(call: Call, config: Tile) -> list[str]:
    """What keeps the parts of a tile from the memory of a step's columns: they travel by 16 columns."""
    if arriving(call, config) >= 16:
        return []
    tile = f"block_m={config.block_m}, block_n={config.block_n} and block_k={config.block_k}"
    return [f"a step of K has to hold 16 columns of what arrives, and with {tile} it holds {arriving(call, config)}"]


def reduce_keywords(call: Call, m: int, config: Tile) -> dict[str, Any]:
    """As `keywords`, where the peers' parts of a tile arrive in the memory of a step's columns."""
    columns = arriving(call, config)
    found = keywords(call, m, config, stored=columns) | {"ACTIVATION": call.epilogue.activation}
    if "residual" in call.epilogue.operands:
        found["descriptors"]["epilogue.residual"] = (1, config.block_m, columns)
    return found


def reduce_arrays(
    rows: jax.Array, rhs: jax.Array, epilogue: Mapping[str, jax.Array], scales: Mapping[str, jax.Array] | None = None
) -> tuple[Any, ...]:
    """The operands of a kernel that reduces: rhs in blocks and in halves of them, the residual as the result lies."""
    return rows, rhs, rhs, {name: x[None] if name == "residual" else x for name, x in epilogue.items()}, scales or {}


def pace(share: float, length: int, itemsize: int, chunk: int, programs: int) -> int:
    """Cycles from one chunk that a program sends to the next one; 0 for as fast as it can.

    What goes to or comes from other ranks travels in a share of the time in which it is multiplied, so that it is there
    in time, and evenly. But never faster than the wire takes it.

    Args:
      share: of the time at the tensor cores' full speed.
      length: multiplications and additions for each element that travels.
      itemsize: bytes of such an element, or of as many as are multiplied in the same time.
      chunk: bytes.
      programs: that send at the same time.
    """
    assert HOPPER.multiply_adds and HOPPER.wire
    product = length / itemsize / HOPPER.multiply_adds
    return math.ceil(max(share * product, programs / HOPPER.wire) * chunk) if share else 0


def outbox(config: Tile, places: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """Scratch where tiles wait to be carried to their owners."""
    return jax.ShapeDtypeStruct((config.programs, places, config.block_m, config.block_n), np.dtype(dtype))
