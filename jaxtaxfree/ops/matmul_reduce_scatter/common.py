"""What all kernels of `matmul_reduce_scatter` are launched with."""

from typing import Any

import numpy as np

from jaxtaxfree.ops.product import Call


def wire_of(call: Call, exact_wire: bool) -> np.dtype:
    """In which dtype partial sums travel."""
    return np.dtype(np.float32) if exact_wire else call.dtype


def common(call: Call, exact_wire: bool) -> dict[str, Any]:
    peers = 2 * wire_of(call, exact_wire).itemsize * (call.world - 1) * call.m * call.n
    return {
        "name": "matmul_reduce_scatter",
        "cost_estimate": {
            "flops": 2 * call.rows * call.n * call.k,
            "bytes_accessed": call.itemsize * (call.rows * call.k + call.k * call.n + call.m * call.n) + peers,
        },
    }
