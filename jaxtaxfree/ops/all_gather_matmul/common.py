"""What all kernels of `all_gather_matmul` are launched with."""

from typing import Any

import jax

from jaxtaxfree.ops.product import Call

MOST = 4  # right-hand sides that a kernel takes, because it has a parameter for each result


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


def results(call: Call, *rows: int, kind: str = "ptr") -> dict[str, Any]:
    """The results of a kernel that can return the gathered rows, all of which have these dimensions; as `products`."""
    found = products(call, *rows, kind=kind)
    if not call.return_gathered:
        return found | {"gathered_ptr": None}
    outs = found["out_type"] if call.widths else (found["out_type"],)
    return found | {"out_type": (*outs, jax.ShapeDtypeStruct((*rows, whole_k(call)), call.dtype))}


def products(call: Call, *rows: int, kind: str = "ptr") -> dict[str, Any]:
    """The result of a kernel, of these dimensions; of several rhs a tuple of results.

    Args:
      kind: what the kernel's parameters for more results are, such as out1_ptr.
    """
    outs = tuple(jax.ShapeDtypeStruct((*rows, n), call.out_dtype) for n in call.widths or (call.n,))
    missing = {f"out{i}_{kind}": None for i in range(len(outs), MOST)}
    return missing | {"out_type": outs if call.widths else outs[0]}


def refuses_gate(call: Call) -> list[str]:
    """What keeps a kernel from taking a gate that lies as [N, K]."""
    return ["it takes a gate with rhs [K, N] alone"] if call.epilogue.gated and call.rhs_transposed else []


def refuses_several(call: Call) -> list[str]:
    """What keeps a kernel with MOST results from taking a call."""
    return [f"it takes up to {MOST} rhs, not {len(call.widths)}"] if len(call.widths) > MOST else []
