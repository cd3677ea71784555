"""What all kernels of `matmul_reduce_scatter` are launched with."""

from typing import Any

from jaxtaxfree.ops.product import Call


def common(call: Call, exact_wire: bool) -> dict[str, Any]:
    peers = 2 * call.wire(exact_wire).itemsize * (call.world - 1) * call.m * call.n
    return {
        "name": "matmul_reduce_scatter",
        "cost_estimate": {
            "flops": 2 * call.world * call.m * call.n * call.k,
            "bytes_accessed": call.operand_bytes + call.wire(False).itemsize * call.m * call.n + peers,
        },
    }
