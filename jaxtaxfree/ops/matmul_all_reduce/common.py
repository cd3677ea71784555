"""What kernels of `matmul_all_reduce` share: the launch, and how few rows are added up."""

import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxtaxfree.ops.blocks import hopper_few, portable
from jaxtaxfree.ops.product import Call

# Partial sums of this many elements are sent to every rank, because a second way over the wire takes longer than their
# bytes. At 16 rows of 8192, on 4 H200, both took the same time.
ONE_SHOT_SIZE = 2**17
# Between two ranks it is no more bytes, and saves time as long as there are few to be added up: on 2 H200 64 rows of
# 8192 took 65.4 us instead of 66.3, 128 rows 76.0 instead of 74.4.
ONE_SHOT_SIZE_OF_TWO = 2**19
# Partial sums of more elements are rounded on their way.
EXACT_SIZE = 2**14


def common(call: Call) -> dict[str, Any]:
    nbytes = call.operand_bytes + call.wire(False).itemsize * call.rows * call.n
    return {
        "name": "matmul_all_reduce",
        "out_type": jax.ShapeDtypeStruct((call.rows, call.n), call.out_dtype),
        "cost_estimate": {"flops": 2 * call.rows * call.n * call.k, "bytes_accessed": nbytes},
    }


def exchanged(call: Call, config: Any) -> tuple[int, int, tuple[int, int]]:
    """How many tiles a rank owns, how many peers send it parts of them, and the shape of a tile."""
    tiles = math.ceil(portable.tiles(call.rows, call.n, config) / call.world)
    return tiles, max(1, call.world - 1), (config.block_m, config.block_n)  # no scratch is empty


def exchange_of_few(call: Call, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of how few rows are added up; what a caller asks for decides about the rest."""
    size = call.rows * call.n
    shots = asked.get("shots", 1 if size <= (ONE_SHOT_SIZE_OF_TWO if call.world == 2 else ONE_SHOT_SIZE) else 2)
    exact_wire = asked.get("exact_wire", call.widens or size <= EXACT_SIZE)
    owned = call.rows if shots == 1 else math.ceil(call.rows / call.world)
    return {
        "shots": shots,
        "exact_wire": exact_wire,
        "linger": owned > 16,
        "add_rows": hopper_few.rows_added_at_once(owned, call.world, call.wire(exact_wire).itemsize),
    }


def rows_sent(call: Call, shots: int) -> int:
    """How many rows a kernel for few rows sends: in two shots as many to each rank, past the end of the result."""
    return call.rows if shots == 1 else math.ceil(call.rows / call.world) * call.world


def variations_of_adding(config: Any) -> list[dict[str, Any]]:
    """What a tuner may change of how few rows are added up."""
    rows = config.add_rows
    return [*portable.each("linger", False, True), *portable.each("add_rows", rows // 2, 2 * rows)]
