"""Fused compute-and-communicate GPU kernels for JAX."""

from jaxtaxfree import private

private.check()  # before other modules import these names

# ruff: noqa: E402
from jaxtaxfree import heap, iris, routing
from jaxtaxfree.fusion import fuse
from jaxtaxfree.heap import GarbageError, HeapError, HeapUnavailableError, PeerTimeoutError, block_until_ready
from jaxtaxfree.iris import iris_call
from jaxtaxfree.ops import gradients as _gradients  # noqa: F401 (gives the operations their derivatives)
from jaxtaxfree.ops import levels as _levels  # noqa: F401 (divides operations whose axes span hosts)
from jaxtaxfree.ops.all_gather_matmul import all_gather_matmul
from jaxtaxfree.ops.collectives import all_gather, all_to_all, psum, psum_scatter
from jaxtaxfree.ops.decode_attention import decode_attention, merge_attention
from jaxtaxfree.ops.decode_step import DecoderSpec, decode_step
from jaxtaxfree.ops.kv_cache import KVCache, append_kv
from jaxtaxfree.ops.matmul_all_reduce import matmul_all_reduce
from jaxtaxfree.ops.matmul_reduce_scatter import matmul_reduce_scatter
from jaxtaxfree.ops.moe import moe
from jaxtaxfree.ops.quantize import dequantize, quantize
from jaxtaxfree.ops.ragged_all_to_all import ragged_all_to_all
from jaxtaxfree.ops.ragged_dot import ragged_dot
from jaxtaxfree.ops.sampling import sample_greedy, sample_top_k, top_k
from jaxtaxfree.sharded import dot_general, einsum, matmul
from jaxtaxfree.shmem import CompileError, shmem_call

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "DecoderSpec",
    "GarbageError",
    "HeapError",
    "HeapUnavailableError",
    "KVCache",
    "PeerTimeoutError",
    "all_gather",
    "all_gather_matmul",
    "all_to_all",
    "append_kv",
    "block_until_ready",
    "decode_attention",
    "decode_step",
    "dequantize",
    "dot_general",
    "einsum",
    "fuse",
    "heap",
    "iris",
    "iris_call",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "merge_attention",
    "moe",
    "psum",
    "psum_scatter",
    "quantize",
    "ragged_all_to_all",
    "ragged_dot",
    "routing",
    "sample_greedy",
    "sample_top_k",
    "shmem_call",
    "top_k",
]
