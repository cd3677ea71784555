"""Fused compute-and-communicate GPU kernels for JAX."""

from jaxtaxfree import heap
from jaxtaxfree.heap import HeapError, HeapUnavailableError, PeerTimeoutError, block_until_ready
from jaxtaxfree.ops.all_gather_matmul import all_gather_matmul
from jaxtaxfree.shmem import shmem_call

__version__ = "0.1.0"

__all__ = [
    "HeapError",
    "HeapUnavailableError",
    "PeerTimeoutError",
    "all_gather_matmul",
    "block_until_ready",
    "heap",
    "shmem_call",
]
