"""The kernel of `ragged_dot` for Hopper: persistent programs of warps with roles."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from triton import next_power_of_2

from jaxtaxfree import gluon
from jaxtaxfree.kernels.ragged_dot.hopper import ROWS, ragged_dot_hopper_kernel
from jaxtaxfree.ops.blocks.portable import each
from jaxtaxfree.ops.matmul import UNMEASURED
from jaxtaxfree.ops.quantize import BLOCK
from jaxtaxfree.ops.ragged_dot.common import BLOCKS, MOST_GROUPS, Call
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.primitive import Lasting
from jaxtaxfree.settings import Settings, setting
from jaxtaxfree.target import HOPPER

# Up to so many rows of a group, on average, a tile has half as many, or of operands of 8 bits is turned round.
FEW_ROWS = 64
# Bytes of shared memory for a tile that is turned round: its steps, and itself to be stored.
SHARED_MEMORY = 220 << 10
# Rows of a group, on average, from which on operands of 8 bits were timed, and up to which weights alone were.
LEAST_MEASURED, MOST_MEASURED = 8, 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """How the kernel splits its work.

    Attributes:
      block_m: rows of a tile, 64 or 128: 64 for each four warps that multiply. Of one that is turned round 8 to 256.
      block_n: columns of a tile, a power of 2 from 16 to 256. With a gate half of them are of each product. In a tile
        that is turned round each four warps that multiply have 64 of them, or more; there are eight at most.
      block_k: the part of K that a step of the loop takes; in the gradient of the weights the rows.
      num_stages: steps of the loop in flight, at least 2, because a stage is released one step late.
      group_m: number of row blocks whose tiles run together, for the L2 cache.
      programs: number of programs, by default one for each multiprocessor of the GPU.
      turned: the tensor cores take the weights' columns as rows, so that few rows waste little. For rhs [G, N, K].
    """

    block_m: int = setting(2 * ROWS.value, least=8, most=256, power_of_2=True)
    block_n: int = setting(256, least=16, most=512, power_of_2=True)
    block_k: int = setting(64, least=16, most=256, power_of_2=True)
    num_stages: int = setting(4, least=2, most=32)
    group_m: int = setting(16, least=1)
    programs: int = setting(HOPPER.multiprocessors, least=1)
    turned: bool = False


class Hopper(Variant[Call]):
    """In each program a warp loads, and one or two groups of four warps multiply 64 rows of a tile each."""

    name, Config, kernel, scales = "hopper", Config, ragged_dot_hopper_kernel, True

    def refuses(self, call: Call, config: Config) -> list[str]:
        reasons: list[str] = []
        if call.target.compute_capability != HOPPER.compute_capability:
            reasons.append(
                Lasting(f"it is for GPUs of compute capability {HOPPER}, not {call.target}: name no kernel in config")
            )
        elif why := gluon.unsupported("it", call.target.compute_capability):
            reasons.append(why)
        if call.scaled:
            reasons += _refuses_scaled(call, config)
        elif call.operand.bits != 16:
            reasons.append(
                Lasting(f"it takes float16 and bfloat16, not {call.operand.dtype}: name no kernel in config, or cast")
            )
        reasons += _refuses_tile(call, config)
        if call.k % (128 // min(16, call.weights.bits)) or call.n % 8:
            reasons.append(f"TMA takes rows of multiples of 16 bytes, and these have {call.k} and {call.n} elements")
        if call.groups > MOST_GROUPS:
            reasons.append(f"it takes at most {MOST_GROUPS} groups, not {call.groups}")
        return reasons

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        """As it was fastest on an H100, of the shapes in shapes.py."""
        del asked
        if call.of_weights:
            return Config(block_k=32, num_stages=8)
        if call.scaled:
            return _of_8_bits(call)
        if call.rows_of_a_group <= FEW_ROWS:
            return Config(block_m=ROWS.value, block_n=128, num_stages=8)
        return Config(group_m=16 if call.rhs_transposed else 8)

    def cost(self, call: Call, config: Config) -> float:
        return 1

    def slower(self, call: Call, config: Config) -> str | None:
        """Whether operands of 8 bits should be cast for the kernel of 16, with the scales applied behind it.

        On an H100, rows by groups x K x N, us of this kernel and of that with its casts: 32768 by 64 x 2048 x 768 e4m3
        101 and 381, int8 105 and 382, int8 weights under bf16 181 and 360; 8192 by 4 x 4096 x 14336 898 and 1891, 673
        and 1822, 1707 and 1926; 32768 by 16 x 7168 x 2048 767 and 1866, 646 and 1795, 1699 and 1828. The last figures
        are close, and casts are paid once while the widening of weights is paid for each row. With scales of blocks,
        where the cast is to f32, the second and the third shape take 982 and 946, and bf16 1383 and 1277. With a gate
        the second one takes 1565 (e4m3), 1814 (blocks) and 1552 (int8), and bf16 2525. Of few rows, 512 by 64 x 2048 x
        768 take 50 (e4m3), 52 (int8 weights) and 57 (blocks) where casts take 217, 218 and 344; 512 by 4 x 4096 x 14336
        take 106, 131 and 110 where casts take 503, 502 and 786.
        """
        del config
        most = MOST_MEASURED if call.operand.bits == 16 else math.inf
        gated = call.gated and call.operand.bits == 16
        measured = not gated and LEAST_MEASURED <= call.rows_of_a_group <= most
        return None if measured or not call.scaled else UNMEASURED

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        block_k, block_n = config.block_k, config.block_n // call.products
        if config.turned:
            partitions = min(2, max(1, block_n // 64))
            rows, stored = config.block_m, block_n // partitions
        else:
            partitions, rows = config.block_m // ROWS.value, ROWS.value
            # 128 bytes, which is as much as TMA moves at a time; and an even number of pieces, which take turns with
            # two buffers.
            stored = min(128 // call.out_dtype.itemsize, block_n // 2)
        blocks: dict[str, tuple[int, ...]]
        if call.of_weights:
            blocks = {"lhs_desc": (1, 1, block_k, rows), "out_desc": (1, rows, stored)}
            weights = (1, 1, block_k, block_n)
        else:
            blocks = {"lhs_desc": (rows, block_k), "out_desc": (1, 1, rows, stored)}
            weights = (1, block_n, block_k) if call.rhs_transposed else (1, block_k, block_n)
        for name in ("rhs", "gate")[: call.products]:
            blocks[f"weights.{name}"] = weights
        return {
            **call.keywords(config),
            "grid": config.programs,
            "num_warps": 4,
            "descriptors": blocks,
            "STAGES": config.num_stages,
            "PARTITIONS": partitions,
            "TRANSPOSED": call.rhs_transposed,
            "TURNED": config.turned,
            "OUTER": call.of_weights,
            "ACTIVATION": call.activation,
            "FILL": call.fill,
        }

    def arrays(self, call: Call, config: Any, *operands: Any) -> tuple[Any, ...]:
        """The scales behind the sizes, none of 16 bits by 16 bits."""
        lhs, weights, sizes, *scales = operands
        return lhs, weights, sizes, *(scales or [{}])

    def variations(self, call: Call, config: Config) -> list[dict[str, Any]]:
        return [
            {"kernel": "portable"},
            {"block_n": 128, "num_stages": 6},
            {"block_m": 64, "num_stages": 5},
            {"block_m": 64, "block_n": 128, "num_stages": 8},
            *each("group_m", 4, 8, 32),
            *each("num_stages", 3),
        ]


def _refuses_tile(call: Call, config: Config) -> list[str]:
    reasons = []
    if config.turned:
        if not call.rhs_transposed:
            reasons.append("it turns tiles round with rhs [G, N, K], rhs_transposed=True, only")
        if config.block_n < 64 * call.products:
            reasons.append(f"turned round, a tile has {64 * call.products} columns or more, not {config.block_n}")
    else:
        if config.block_m not in (ROWS.value, 2 * ROWS.value):
            reasons.append(f"not turned round, a tile has {ROWS.value} or {2 * ROWS.value} rows, not {config.block_m}")
        if config.block_n > 256:
            reasons.append(f"not turned round, a tile has at most 256 columns, not {config.block_n}")
    return reasons


def _refuses_scaled(call: Call, config: Config) -> list[str]:
    reasons = []
    if call.by_blocks:
        reasons += _refuses_blocks(call, config)
    if not call.rhs_transposed:
        reasons.append("tensor cores take 8 bits along K: give rhs as [G, N, K], with rhs_transposed=True")
    pair = {call.operand.dtype.name, call.weights.dtype.name}
    if call.operand.bits not in (8, 16) or (call.operand.bits == 8 and "int8" in pair and len(pair) > 1):
        reasons.append(f"it does not multiply {call.operand.dtype} by {call.weights.dtype}")
    if call.operand.bits == 16 and not config.turned:
        reasons.append("it makes 16 bits of weights of 8 only where the tile is turned round: turned=True")
    return reasons


def _refuses_blocks(call: Call, config: Config) -> list[str]:
    reasons = []
    if config.turned or call.operand.bits != 8:
        reasons.append("scales of blocks: it takes both operands of 8 bits, of tiles that are not turned round")
    if config.block_k != BLOCK:
        reasons.append(f"scales of blocks: a step of K has {BLOCK}, not {config.block_k}: give block_k")
    if call.gated and (f"rhs{BLOCKS}" in call.scales) != (f"gate{BLOCKS}" in call.scales):
        reasons.append("scales of blocks: it takes them of rhs and of its gate, or of neither")
    return reasons


def _of_8_bits(call: Call) -> Config:
    """A step of K is one of 128, after which sums leave the tensor cores."""
    if call.operand.bits == 8 and (call.rows_of_a_group > FEW_ROWS or call.by_blocks):
        return Config(block_k=128)
    block_m = min(128, max(16, next_power_of_2(math.ceil(call.rows_of_a_group))))
    block_n = 128 * call.products
    step = 128 * (block_n + block_m * call.operand.bits // 8)
    stages = (SHARED_MEMORY - block_m * block_n // call.products * call.out_dtype.itemsize) // step
    return Config(turned=True, block_m=block_m, block_n=block_n, block_k=128, num_stages=min(12, stages))
