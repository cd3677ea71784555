"""What all kernels of `all_gather_matmul` are launched with."""

from typing import Any

import jax

from jaxtaxfree.ops.product import Call


def common(call: Call) -> dict[str, Any]:
    k = whole_k(call)
    return {
        "scratch": {"gathered": jax.ShapeDtypeStruct((call.world, call.m, call.k), call.dtype)},
        "name": "all_gather_matmul",
        "cost_estimate": {
            "flops": 2 * call.rows * call.columns * k,
            "bytes_accessed": call.operand_bytes + call.wire(False).itemsize * call.rows * call.n,
        },
    }


def whole_k(call: Call) -> int:
    """The contracted dimension, of all ranks."""
    return call.world * call.k if call.along_columns else call.k


def results(call: Call, *rows: int) -> dict[str, Any]:
    """The results of a kernel that can return the gathered rows, all of which have these dimensions."""
    out = jax.ShapeDtypeStruct((*rows, call.n), call.out_dtype)
    if not call.return_gathered:
        return {"out_type": out, "gathered_ptr": None}
    return {"out_type": (out, jax.ShapeDtypeStruct((*rows, whole_k(call)), call.dtype))}
