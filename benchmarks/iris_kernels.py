"""Iris's kernels as functions for `jax.shard_map`: how each parameter of its examples is given.

The kernels are Iris's (https://github.com/ROCm/iris, MIT), unmodified, and not a part of this project: those of the
package `iris` come from where it is installed, and those of its examples from a checkout that JAXTAXFREE_IRIS_EXAMPLES
names. They are read by `jaxtaxfree.iris.kernels_of`, with our device functions or, with own=False, with Iris's.
"""

import functools
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax

import jaxtaxfree as jtf
from jaxtaxfree import iris

FLAG = jnp.int32


def checkout() -> Path | None:
    """The folder of Iris's examples: JAXTAXFREE_IRIS_EXAMPLES, or the folder `examples` in it."""
    named = os.environ.get("JAXTAXFREE_IRIS_EXAMPLES")
    return next((each for each in (Path(named) / "examples", Path(named)) if each.is_dir()), None) if named else None


@functools.cache
def example(path: str, name: str, own: bool = True) -> Any:
    """A kernel of Iris's examples."""
    folder = checkout()
    assert folder is not None, "JAXTAXFREE_IRIS_EXAMPLES names no checkout of Iris"
    return getattr(iris.kernels_of(folder / path, own=own), name)


@functools.cache
def packaged(module: str, name: str, own: bool = True) -> Any:
    """A kernel of the package."""
    return getattr(iris.kernels_of(f"iris.{module}", own=own), name)


def strides(prefix: str, names: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """The strides of a contiguous array as parameters "<prefix><name>"."""
    return {f"{prefix}{name}": math.prod(shape[i + 1 :]) for i, name in enumerate(names.split())}


def _launched(how: dict[str, Any]) -> dict[str, Any]:
    return {"num_warps": 8, "num_stages": 3, **how}


def blocks_of(m: int, n: int, k: int) -> dict[str, Any]:
    return {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k}


def gather_matmul_pull(
    x: jax.Array,
    y: jax.Array,
    axis_name: str,
    *,
    blocks: tuple[int, int, int] = (128, 128, 64),
    group: int = 6,
    programs: int = 132,
    own: bool = True,
    **how: Any,
) -> jax.Array:
    """Example 14, pull: x [M, K / world] gathered along K, times y [K, N]: [M, N]. A program loads its peers' x."""
    m, n, k = x.shape[0], y.shape[1], y.shape[0]
    return jtf.iris_call(
        example("14_all_gather_gemm/all_gather_gemm_pull.py", "persistent_ag_gemm", own),
        axis_name=axis_name,
        grid=programs,
        **_launched(how),
        A=iris.symmetric(x),
        B=y,
        C=iris.Out((m, n), x.dtype),
        M=m,
        N=n,
        K=k,
        **strides("stride_a", "m k", x.shape),
        **strides("stride_b", "k n", y.shape),
        **strides("stride_c", "m n", (m, n)),
        **blocks_of(*blocks),
        GROUP_SIZE_M=group,
        NUM_SMS=programs,
        NUM_XCDS=1,
        EVEN_K=x.shape[1] % blocks[2] == 0,
        heap_bases=iris.BASES,
        cur_rank=iris.RANK,
        world_size=iris.WORLD,
    )


def gather_matmul_push(
    x: jax.Array,
    y: jax.Array,
    axis_name: str,
    *,
    blocks: tuple[int, int, int] = (128, 128, 64),
    group: int = 6,
    programs: int = 132,
    own: bool = True,
    **how: Any,
) -> jax.Array:
    """Example 14, push: like the other one in two launches, the first of which stores x into all inboxes.

    The product waits by a plain load, which compilers delete: `acquiring` makes it one that lasts.
    """
    (m, local), n, k, world = x.shape, y.shape[1], y.shape[0], lax.axis_size(axis_name)
    file = "14_all_gather_gemm/all_gather_gemm_push.py"
    push = example(file, "push_shards_kernel", own)
    multiply = _acquiring(example(file, "gemm_push_kernel", own))
    tiles = (triton.cdiv(m, blocks[0]), triton.cdiv(local, blocks[2]))
    inbox, flags = (world, m, local), (world, world, *tiles)
    ws = iris.workspace(
        axis_name,
        name="iris 14 push",
        after=(x, y),
        inbox=iris.symmetric(inbox, x.dtype),
        flags=iris.symmetric(flags, FLAG, fill=0),
    )
    common: dict[str, Any] = {
        **strides("stride_ai_", "rank m k", inbox),
        **strides("stride_sf_", "d s m k", flags),
        "cur_rank": iris.RANK,
        "world_size": iris.WORLD,
        "signal_flags": ws.flags,
        "A_inbox": ws.inbox,
        "M": m,
    }
    ws = jtf.iris_call(
        push,
        workspace=ws,
        grid=tiles,
        **_launched({**how, "num_stages": 1}),
        A_local=x,
        K_local=local,
        **strides("stride_al_", "m k", x.shape),
        BLOCK_SIZE_M=blocks[0],
        BLOCK_SIZE_K=blocks[2],
        heap_bases=iris.BASES,
        **common,
    )
    out, _ = jtf.iris_call(
        multiply,
        workspace=ws,
        grid=programs,
        **_launched(how),
        B=y,
        C=iris.Out((m, n), x.dtype),
        N=n,
        K=k,
        **strides("stride_b_", "k n", y.shape),
        **strides("stride_c_", "m n", (m, n)),
        **blocks_of(*blocks),
        GROUP_SIZE_M=group,
        NUM_SMS=programs,
        NUM_XCDS=1,
        EVEN_K=local % blocks[2] == 0,
        **common,
    )
    return out


@functools.cache
def _acquiring(kernel: Any) -> Any:
    return iris.acquiring(kernel)


def gather_matmul_hbm(
    x: jax.Array,
    y: jax.Array,
    axis_name: str,
    *,
    blocks: tuple[int, int, int] = (128, 128, 64),
    group: int = 8,
    fetchers: int = 32,
    stages: int = 1,
    blocks_a_flag: int = 8,
    own: bool = True,
    **how: Any,
) -> jax.Array:
    """`iris.ops.all_gather_matmul_hbm_buffer`: fetchers copy x of all ranks into a buffer, others wait and multiply."""
    (m, local), n, k = x.shape, y.shape[1], y.shape[0]
    rows, columns, depth = m // blocks[0], triton.cdiv(n, blocks[1]), k // blocks[2]
    blocks_a_flag = math.gcd(blocks_a_flag, depth)
    tiles = triton.cdiv(rows, stages) * columns
    # Fetchers leave out some of a group that is not whole, for which the others would wait for ever.
    group = math.gcd(group, rows // stages)
    return jtf.iris_call(
        packaged("ops.all_gather_matmul_hbm_buffer", "_hbm_buffer_all_gather_matmul_kernel", own),
        axis_name=axis_name,
        grid=stages * (fetchers + tiles),
        **_launched(how),
        A_sharded=iris.symmetric(x),
        B=y,
        C=iris.Out((m, n), x.dtype),
        bias_ptr=None,
        staged_a=iris.symmetric((m, k), x.dtype),
        flags_ptr=iris.symmetric((rows * depth // blocks_a_flag,), FLAG, fill=0),
        M=m,
        N=n,
        K=k,
        K_local=local,
        **strides("stride_a", "m k", x.shape),
        **strides("stride_b", "k n", y.shape),
        **strides("stride_c", "m n", (m, n)),
        **strides("stride_sa_", "m k", (m, k)),
        stride_bias=0,
        context_tensor=iris.CONTEXT,
        cur_rank=iris.RANK,
        world_size=iris.WORLD,
        **blocks_of(*blocks),
        GROUP_SIZE_M=group,
        NUM_FETCH_SMS=fetchers,
        NUM_M_TILES=rows,
        NUM_TILES_N=columns,
        NUM_K_BLOCKS=depth,
        NUM_K_BLOCKS_LOCAL=local // blocks[2],
        K_PER_FLAG=blocks_a_flag,
        NUM_FLAG_GROUPS_K=depth // blocks_a_flag,
        TOTAL_GATHER_TILES=rows * depth,
        BIAS=False,
        ALLOW_TF32=False,
        NUM_FETCH_STAGES=stages,
        GEMM_TILES_PER_STAGE=tiles,
        FIRST_STAGE_FETCH_SMS=fetchers,
        TRACE=False,
    )


def flash_decode(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    axis_name: str,
    *,
    splits: int = 32,
    block: int = 64,
    own: bool = True,
) -> jax.Array:
    """Example 13: attention of query [B, N, H] over keys and values [B, S, K, H] of each rank, in three launches.

    Args:
      lengths: i32 [world, B], how many keys of each rank there are.
    """
    file, world = "13_flash_decode/decode_kernels.py", lax.axis_size(axis_name)
    split, reduce, merge = (
        example(file, name, own)
        for name in ("gqa_local_decode_split_k", "gqa_local_reduce_fused", "gqa_global_reduce_fused")
    )
    (b, n, h), (_, s, heads, _) = query.shape, key.shape
    gathered, flags, parts = (world, b, n, h + 1), (world, world, b, n), (b, n, splits, h + 1)
    ws = iris.workspace(
        axis_name,
        name="iris 13",
        after=query,
        gathered=iris.symmetric(gathered, jnp.float32),
        flags=iris.symmetric(flags, FLAG, fill=0),
    )
    own_lengths = lax.dynamic_index_in_dim(lengths, lax.axis_index(axis_name), keepdims=False)
    signals = strides("stride_signal_", "dest src bs h", flags)
    group = n // heads
    partial, ws = jtf.iris_call(
        split,
        workspace=ws,
        grid=(b, triton.cdiv(n, min(16, group)), splits),
        num_stages=2,
        q_ptr=query,
        k_cache_ptr=key,
        v_cache_ptr=value,
        output_ptr=iris.Out(parts, jnp.float32),
        sm_scale=h**-0.5,
        block_table_ptr=jnp.arange(b, dtype=jnp.int32).reshape(b, 1),  # a page is a sequence
        kv_length_ptr=own_lengths,
        batch=b,
        **strides("stride_q_", "bs h", query.shape),
        stride_k_cache_bs=heads * h,
        stride_k_cache_h=h,
        stride_v_cache_bs=heads * h,
        stride_v_cache_h=h,
        **strides("stride_o_", "bs h split", parts),
        stride_table_bs=1,
        kv_group_num=group,
        q_head_num=n,
        BLOCK_HEAD_DIM=h,
        BLOCK_DPE=0,
        BLOCK_DV=h,
        BLOCK_N=block,
        BLOCK_H=16,
        NUM_KV_SPLITS=splits,
        PAGE_SIZE=s,
        soft_cap=0.0,
        K_DIM=h,
        V_DIM=h,
    )
    ws = jtf.iris_call(
        reduce,
        workspace=ws,
        grid=(b, n),
        Mid_O=partial,
        B_Seqlen=own_lengths,
        gathered_output_ptr=ws.gathered,
        signal_flags_ptr=ws.flags,
        **signals,
        heap_bases_ptr=iris.BASES,
        **strides("stride_mid_o", "b h s", parts),
        **strides("stride_gathered_", "rank bs h", gathered),
        my_rank=iris.RANK,
        world_size=iris.WORLD,
        q_head_num=n,
        NUM_KV_SPLITS=splits,
        BLOCK_DV=h,
        Lv=h,
    )
    out, _ = jtf.iris_call(
        merge,
        workspace=ws,
        grid=(b, n),
        All_Ranks_Mid_O=ws.gathered,
        o=iris.Out(query.shape, query.dtype),
        B_Seqlens=lengths,
        signal_flags_ptr=ws.flags,
        **signals,
        batch=b,
        q_heads=n,
        **strides("stride_mid_o", "s b h", gathered),
        stride_obs=n * h,
        stride_oh=h,
        my_rank=iris.RANK,
        NUM_KV_SPLITS=iris.WORLD,
        BLOCK_DV=h,
        Lv=h,
    )
    return out


def ring_all_reduce(
    x: jax.Array,
    axis_name: str,
    *,
    blocks: tuple[int, int] = (64, 64),
    programs: int = 64,
    own: bool = True,
    **how: Any,
) -> jax.Array:
    """Example 16: the sum of x [M, N] of all ranks. Whole blocks."""
    m, n = x.shape
    tiles = m // blocks[0] * (n // blocks[1])
    return jtf.iris_call(
        example("16_all_reduce_ring_based/all_reduce_ring_based.py", "persistent_all_reduce", own),
        axis_name=axis_name,
        grid=programs,
        together=programs,
        **how,
        partials=x,
        ring_buffer=iris.symmetric((m, n), jnp.float32),
        output=iris.Out((m, n), x.dtype),
        flags=iris.symmetric((tiles,), FLAG, fill=0),
        M=m,
        N=n,
        stride_cm=n,
        stride_cn=1,
        BLOCK_SIZE_M=blocks[0],
        BLOCK_SIZE_N=blocks[1],
        GROUP_SIZE_M=2,
        COMM_SMS=programs,
        NUM_XCDS=1,
        heap_bases=iris.BASES,
        cur_rank=iris.RANK,
        world_size=iris.WORLD,
    )


def _multiplying(x: jax.Array, y: jax.Array, blocks: tuple[int, int, int], programs: int) -> dict[str, Any]:
    """Parameters that Iris's persistent products have in common, of x [M, K] and y [K, N]."""
    return {
        "A": x,
        "B": y,
        "bias_ptr": None,
        "M": x.shape[0],
        "N": y.shape[1],
        "K": x.shape[1],
        **strides("stride_a", "m k", x.shape),
        **strides("stride_b", "k n", y.shape),
        **strides("stride_c", "m n", (x.shape[0], y.shape[1])),
        "stride_bias": 0,
        **blocks_of(*blocks),
        "GROUP_SIZE_M": 6,
        "NUM_SMS": programs,
        "NUM_XCDS": 1,
        "BIAS": False,
        "EVEN_K": x.shape[1] % blocks[2] == 0,
        "heap_bases": iris.BASES,
        "cur_rank": iris.RANK,
        "world_size": iris.WORLD,
    }


def matmul_one_shot(
    x: jax.Array,
    y: jax.Array,
    axis_name: str,
    *,
    blocks: tuple[int, int, int] = (128, 128, 64),
    programs: int = 132,
    own: bool = True,
    **how: Any,
) -> jax.Array:
    """Example 09: the sum over ranks of x [M, K / world] times y [K / world, N], [M, N]."""
    m, n = x.shape[0], y.shape[1]
    tiles = triton.cdiv(m, blocks[0]) * triton.cdiv(n, blocks[1])
    return jtf.iris_call(
        example("09_gemm_one_shot_all_reduce/gemm_one_shot_all_reduce.py", "persistent_gemm_all_reduce", own),
        axis_name=axis_name,
        grid=programs,
        **_launched(how),
        **_multiplying(x, y, blocks, programs),
        C=iris.symmetric((m, n), jnp.float32),
        c_global=iris.Out((m, n), jnp.float32),
        P=iris.symmetric((1,), jnp.float32),
        locks=iris.symmetric((programs,), FLAG, fill=0),
        tile_completed=iris.symmetric((tiles,), FLAG, fill=0),
        **strides("stride_c", "m_global n_global", (m, n)),
        STREAMK_TILES=0,
    )


def matmul_ring(
    x: jax.Array,
    y: jax.Array,
    axis_name: str,
    *,
    blocks: tuple[int, int, int] = (128, 128, 64),
    programs: int = 64,
    own: bool = True,
    **how: Any,
) -> jax.Array:
    """Example 15: the same as example 09, the products in one launch and a ring in the next one."""
    m, n = x.shape[0], y.shape[1]
    file = "15_gemm_all_reduce_ring_based/gemm_all_reduce_ring_based.py"
    tiles = triton.cdiv(m, blocks[0]) * triton.cdiv(n, blocks[1])
    ws = iris.workspace(
        axis_name,
        name="iris 15",
        after=(x, y),
        part=iris.symmetric((m, n), jnp.float32),
        ring=iris.symmetric((m, n), jnp.float32),
        total=iris.symmetric((m, n), jnp.float32),
        locks=iris.symmetric((tiles,), FLAG, fill=0),
        flags=iris.symmetric((tiles,), FLAG, fill=0),
    )
    common = _multiplying(x, y, blocks, programs)
    multiply, add = (example(file, name, own) for name in ("persistent_gemm", "persistent_all_reduce"))
    ws = jtf.iris_call(
        multiply, workspace=ws, grid=programs, **_launched(how), **common, local_C=ws.part, locks=ws.locks
    )
    ws = jtf.iris_call(
        add,
        {key: value for key, value in common.items() if key in add.arg_names},
        workspace=ws,
        grid=programs,
        together=programs,
        C=ws.total,
        local_C=ws.part,
        ring_buffer=ws.ring,
        locks=ws.locks,
        flags=ws.flags,
        **strides("stride_c", "m_global n_global", (m, n)),
        COMM_SMS=programs,
    )
    return ws.read("total")[0]


def message(x: jax.Array, axis_name: str, *, block: int = 128, own: bool = True) -> jax.Array:
    """Example 06: rank 1 gets twice x [N] of rank 0, by a producer and a consumer, one of which each rank runs."""
    file = "06_message_passing/message_passing_load_store.py"
    kernel = _either(example(file, "producer_kernel", own), example(file, "consumer_kernel", own))
    return jtf.iris_call(
        kernel,
        axis_name=axis_name,
        grid=triton.cdiv(x.size, block),
        source=iris.symmetric(x),
        target=iris.symmetric(x.shape, x.dtype, fill=0, result=True),
        flag=iris.symmetric((triton.cdiv(x.size, block),), FLAG, fill=0),
        heap_bases=iris.BASES,
        rank=iris.RANK,
        SIZE=x.size,
        BLOCK=block,
    )


@functools.cache
def _either(producer: Any, consumer: Any) -> Any:
    """What Iris's host does: a kernel on rank 0, another one on rank 1."""

    @triton.jit
    def kernel(source, target, flag, heap_bases, rank, SIZE: tl.constexpr, BLOCK: tl.constexpr):
        if rank == 0:
            producer(source, target, flag, SIZE, 0, 1, BLOCK, heap_bases)
        if rank == 1:
            consumer(target, flag, SIZE, 1, BLOCK, heap_bases)

    return kernel
