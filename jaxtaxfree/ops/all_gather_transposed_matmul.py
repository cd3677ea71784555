"""`all_gather(lhs)^T @ rhs`: the gradient of a tensor-parallel layer's weights. Not public."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxtaxfree.kernels.all_gather_transposed_matmul import all_gather_transposed_matmul_kernel
from jaxtaxfree.ops import matmul
from jaxtaxfree.primitive import Unsupported, bilinear
from jaxtaxfree.shmem import shmem_call


def reference(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    axes: tuple[str, ...],
    swapped: bool,
    precision: Any,
    preferred_element_type: Any,
    config: Any = None,
) -> jax.Array:
    """lhs [M, K] of each rank and rhs [world * M, N] -> [K, N], or rhs^T @ all_gather(lhs) [N, K] if `swapped`."""
    del config
    gathered = lax.all_gather(lhs, axes, axis=0, tiled=True)
    left, right = (rhs, gathered) if swapped else (gathered, rhs)
    return lax.dot_general(
        left, right, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=preferred_element_type
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel splits its work.

    Attributes:
      block_m, block_n, block_k: rows and columns of a tile, and the rows of lhs that a step of its loop takes: powers
        of 2, at least 16.
      num_warps, num_stages: warps of a program, and steps of the loop in flight.
      pushers: programs that send.
      chunk: elements that a pusher moves at a time, a power of 2.
      units: parts in which a panel is sent, each with a signal.
      panel: columns of lhs that are sent together, a multiple of `block_m` (`block_n` if swapped).
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 4
    pushers: int = 16
    chunk: int = 8192
    units: int = 16
    panel: int = 1024


def default_config(dtype: Any, compute_capability: int) -> Config:
    """A configuration for operands of a dtype on a GPU (90 for 9.0)."""
    return Config(**matmul.large_tile(dtype, compute_capability))


def fused(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    axes: tuple[str, ...],
    swapped: bool,
    precision: Any,
    preferred_element_type: Any,
    config: Config | None,
    compute_capability: int,
    implementation: str | None = None,
) -> jax.Array:
    """The operation by one kernel."""
    if reasons := matmul.unsupported(lhs, rhs, precision=precision, preferred_element_type=preferred_element_type):
        raise Unsupported("all_gather_transposed_matmul", reasons)
    precision = matmul.triton_precision(precision)
    assert precision is not None  # `unsupported` has seen to it
    (m, k), n = lhs.shape, rhs.shape[1]
    kernel, keywords = launch(
        m,
        k,
        n,
        world=lax.axis_size(axes),
        dtype=lhs.dtype,
        out_dtype=preferred_element_type or lhs.dtype,
        precision=precision,
        config=config or default_config(lhs.dtype, compute_capability),
        swapped=swapped,
    )
    return shmem_call(kernel, lhs, rhs, axis_name=axes, implementation=implementation, **keywords)


def launch(
    m: int,
    k: int,
    n: int,
    *,
    world: int,
    dtype: Any,
    out_dtype: Any,
    precision: str,
    config: Config,
    swapped: bool,
) -> tuple[Any, dict[str, Any]]:
    """The kernel for a rank's lhs [m, k] and rhs [world * m, n], and the keywords with which it is launched."""
    size = np.dtype(dtype).itemsize
    rows, columns = (n, k) if swapped else (k, n)
    block = config.block_n if swapped else config.block_m  # of the gathered columns
    group = max(1, config.panel // block)
    panels = math.ceil(k / (group * block))
    return all_gather_transposed_matmul_kernel, {
        "out_type": jax.ShapeDtypeStruct((rows, columns), out_dtype),
        "grid": config.pushers + math.ceil(rows / config.block_m) * math.ceil(columns / config.block_n),
        "scratch": {"gathered": jax.ShapeDtypeStruct((world, m, k), dtype)},
        "signals": {"arrived": (world, panels), "turn": config.pushers},
        "name": "all_gather_transposed_matmul",
        "cost_estimate": {"flops": 2 * world * m * n * k, "bytes_accessed": size * (world * m * (k + n) + k * n)},
        **matmul.tile_keywords(m, k, n, precision, config),
        "GROUP": group,
        "PUSHERS": config.pushers,
        "UNITS": config.units,
        "CHUNK": config.chunk,
        "SWAPPED": swapped,
    }


def _slower(lhs: Any, rhs: Any, *, axes: tuple[str, ...], precision: Any, **_: Any) -> str | None:
    """Why XLA is taken, measured on 4 H200."""
    if lax.axis_size(axes) == 1:
        return "there is one rank, so nothing to gather"
    why = matmul.slower(lhs, precision, rhs.shape[0], 2 * lhs.shape[1] * math.prod(rhs.shape))
    return why or matmul.SLOWER_GRADIENTS


all_gather_transposed_matmul_p = bilinear(
    "all_gather_transposed_matmul", reference=reference, fused=fused, slower=_slower
)
