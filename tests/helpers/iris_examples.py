"""Calls of the kernels in Iris's folder `examples`, of a checkout, and what the simulator says of each."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxtaxfree import simulator
from jaxtaxfree.simulator.iris import BASES, RANK, WORLD, Barrier, Buffer, Fill, Launch, local, symmetric
from tests.helpers.iris_cases import Case, equals, numbers
from tests.helpers.iris_kernels import example

M = N = K = 32
BLOCK, PROGRAMS = 16, 2
TILES = (M // BLOCK) * (N // BLOCK)
RACE = simulator.DataRaceError


def message_passing(file: str, rounds: int = 1) -> Case:
    """06: rank 0 sends blocks to rank 1, which doubles them."""
    module = example(f"06_message_passing/message_passing_{file}.py")
    size, block = 100, 32
    target = symmetric((size,), np.float32, 0)
    flags = symmetric((4,), np.int32, 0)
    both = {"flag": flags, "buffer_size": size, "consumer_rank": 1, "BLOCK_SIZE": block, "heap_bases_ptr": BASES}
    source = symmetric((size,), np.float32, 3)
    sends = {"source_buffer": source, "target_buffer": target, "producer_rank": 0, **both}
    return Case(
        launches=[
            Launch(module.producer_kernel, 4, sends, ranks=(0,)),
            Launch(module.consumer_kernel, 4, {"buffer": target, **both}, ranks=(1,)),
            Barrier(),
        ],
        results=target,
        check=lambda outs: np.testing.assert_array_equal(outs[1], np.full(size, 6)),
        settings={"rounds": rounds},
    )


def _product(lhs: tuple[int, int], rhs: tuple[int, int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return (
        [numbers(rank, *lhs, dtype=np.float16) for rank in range(2)],
        [numbers(9 + rank, *rhs, dtype=np.float16) for rank in range(2)],
    )


def _strides(a: int, b: int, c: int) -> dict[str, int]:
    """Of row-major arrays so wide."""
    return {"stride_am": a, "stride_ak": 1, "stride_bk": b, "stride_bn": 1, "stride_cm": c, "stride_cn": 1}


def _blocks() -> dict[str, Any]:
    sizes = {"BLOCK_SIZE_M": BLOCK, "BLOCK_SIZE_N": BLOCK, "BLOCK_SIZE_K": BLOCK, "GROUP_SIZE_M": 2}
    return {**sizes, "NUM_SMS": PROGRAMS, "NUM_XCDS": 1, "EVEN_K": True}


def _place(rank: str = "cur_rank", bases: str = "heap_bases") -> dict[str, Any]:
    return {bases: BASES, rank: RANK, "world_size": WORLD}


def one_shot(assumptions: bool) -> Case:
    """09: a product, and every rank adds up the sums of its rows."""
    module = example("09_gemm_one_shot_all_reduce/gemm_one_shot_all_reduce.py")
    lhs, rhs = _product((M, K // 2), (K // 2, N))
    out = symmetric((M, N), np.float32, 0)
    arguments = {
        **{"A": local((M, K // 2), np.float16, lhs), "B": local((K // 2, N), np.float16, rhs)},
        **{"C": symmetric((M, N), np.float32), "c_global": out, "bias_ptr": None, "P": local((1,), np.float32)},
        **{"locks": local((PROGRAMS,), np.int32, 0), "tile_completed": symmetric((TILES,), np.int32, 0)},
        **{"M": M, "N": N, "K": K // 2, **_strides(K // 2, N, N)},
        **{"stride_cm_global": N, "stride_cn_global": 1, "stride_bias": 0, **_blocks(), "STREAMK_TILES": 0},
        **{"BIAS": False, **_place()},
    }
    launch = Launch(module.persistent_gemm_all_reduce, PROGRAMS, arguments)
    total = sum(a.astype(np.float32) @ b for a, b in zip(lhs, rhs))
    found: dict[str, Any] = {
        "error": simulator.AssumptionError,
        "says": ("The assume of", "gemm_one_shot_all_reduce.py:1"),
    }
    return Case(
        launches=[launch, Barrier()],
        results=out,
        check=equals(total),
        settings={"assumptions": assumptions},
        **(found if assumptions else {}),
    )


def flash_decode(rounds: int = 1, between: bool = False, **found: Any) -> Case:
    """13: attention of a split, a sum over splits that is sent to all ranks, and one over the ranks."""
    module = example("13_flash_decode/decode_kernels.py")
    world, batch, heads, kv_heads, depth, keys, splits = 2, 2, 4, 2, 16, 24, 2
    random = np.random.default_rng(0)
    q = (random.standard_normal((batch, heads, depth)) / 2).astype(np.float16)
    k, v = (
        [random.standard_normal((keys * batch, 1, kv_heads, depth)).astype(np.float16) for _ in range(world)]
        for _ in range(2)
    )
    lengths = np.array([[keys, keys - 5]] * world, np.int32)
    table = np.arange(batch * keys, dtype=np.int32).reshape(batch, keys)
    scale, entry = depth**-0.5, depth + 1
    mid = local((batch, heads, splits, entry), np.float16)
    gathered = symmetric((world, batch, heads, entry), np.float16)
    flags = symmetric((world, world, batch, heads), np.int32, 0)
    out = local((batch, heads, depth), np.float16)
    signals = {"stride_signal_dest": world * batch * heads, "stride_signal_src": batch * heads}
    signals |= {"stride_signal_bs": heads, "stride_signal_h": 1}
    of_ranks = {"rank": batch * heads * entry, "bs": heads * entry, "h": entry}
    length = local((batch,), np.int32, list(lengths))
    split = {
        **{"q_ptr": local(q.shape, q.dtype, [q] * world), "k_cache_ptr": local(k[0].shape, q.dtype, k)},
        **{"v_cache_ptr": local(v[0].shape, q.dtype, v), "output_ptr": mid, "sm_scale": scale},
        **{"block_table_ptr": local(table.shape, np.int32, [table] * world), "kv_length_ptr": length, "batch": batch},
        **{"stride_q_bs": heads * depth, "stride_q_h": depth, "stride_k_cache_bs": kv_heads * depth},
        **{"stride_k_cache_h": depth, "stride_v_cache_bs": kv_heads * depth, "stride_v_cache_h": depth},
        **{"stride_o_bs": heads * splits * entry, "stride_o_h": splits * entry, "stride_o_split": entry},
        **{"stride_table_bs": keys, "kv_group_num": heads // kv_heads, "q_head_num": heads, "BLOCK_HEAD_DIM": depth},
        **{"BLOCK_DPE": 0, "BLOCK_DV": depth, "BLOCK_N": 16, "BLOCK_H": 16, "NUM_KV_SPLITS": splits, "PAGE_SIZE": 1},
        **{"soft_cap": 0.0, "K_DIM": depth, "V_DIM": depth},
    }
    reduce = {
        **{"Mid_O": mid, "B_Seqlen": length, "gathered_output_ptr": gathered, "signal_flags_ptr": flags, **signals},
        **{"stride_mid_ob": heads * splits * entry, "stride_mid_oh": splits * entry, "stride_mid_os": entry},
        **{f"stride_gathered_{name}": stride for name, stride in of_ranks.items()},
        **{"q_head_num": heads, "NUM_KV_SPLITS": splits, "BLOCK_DV": depth, "Lv": depth},
        **_place("my_rank", "heap_bases_ptr"),
    }
    merge = {
        **{"All_Ranks_Mid_O": gathered, "o": out, "B_Seqlens": local(lengths.shape, np.int32, [lengths] * world)},
        **{"signal_flags_ptr": flags, **signals, "batch": batch, "q_heads": heads, "stride_mid_ob": of_ranks["bs"]},
        **{"stride_mid_oh": entry, "stride_mid_os": of_ranks["rank"], "stride_obs": heads * depth, "stride_oh": depth},
        **{"my_rank": RANK, "NUM_KV_SPLITS": WORLD, "BLOCK_DV": depth, "Lv": depth},
    }
    expected = np.zeros((batch, heads, depth))
    for b, h in itertools.product(range(batch), range(heads)):
        of = [(table[b, : lengths[rank, b]], rank) for rank in range(world)]
        head = h // (heads // kv_heads)
        all_keys, values = (np.concatenate([x[rank][at, 0, head] for at, rank in of]).astype(float) for x in (k, v))
        scores = all_keys @ q[b, h].astype(float) * scale
        weights = np.exp(scores - scores.max())
        expected[b, h] = weights @ values / weights.sum()
    launches: list[Any] = [
        Launch(module.gqa_local_decode_split_k, (batch, kv_heads, splits), split),
        Launch(module.gqa_local_reduce_fused, (batch, heads), reduce),
        Launch(module.gqa_global_reduce_fused, (batch, heads), merge),
    ]

    def check(outs: list[Any]) -> None:
        for result in outs:
            np.testing.assert_allclose(result, expected, atol=4e-3, rtol=0)

    return Case(
        launches=[*([Fill(flags), Barrier()] if between else []), *launches],
        results=out,
        check=check,
        settings={"rounds": rounds},
        **found,
    )


def pull(rounds: int = 1) -> Case:
    """14: a product whose left-hand side is loaded from all ranks."""
    kernel = example("14_all_gather_gemm/all_gather_gemm_pull.py").persistent_ag_gemm
    lhs, rhs = _product((M, K // 2), (K, N))
    out = local((M, N), np.float32)
    arguments = {
        **{"A": symmetric((M, K // 2), np.float16, lhs), "B": local((K, N), np.float16, rhs), "C": out},
        **{"M": M, "N": N, "K": K, **_strides(K // 2, N, N), **_blocks(), **_place()},
    }
    whole = np.concatenate(lhs, 1).astype(np.float32)
    launch = Launch(kernel, PROGRAMS, arguments)
    return Case(
        launches=[launch], results=out, check=equals(lambda rank: whole @ rhs[rank]), settings={"rounds": rounds}
    )


def push() -> Case:
    """14: the left-hand side is stored to all ranks, and the product waits for flags by plain loads."""
    module = example("14_all_gather_gemm/all_gather_gemm_push.py")
    lhs, rhs = _product((M, K // 2), (K, N))
    tiles_m, tiles_k = M // BLOCK, K // 2 // BLOCK
    out = local((M, N), np.float32)
    both = {
        **{"A_inbox": symmetric((2, M, K // 2), np.float16), "cur_rank": RANK, "world_size": WORLD},
        **{"signal_flags": symmetric((2, 2, tiles_m, tiles_k), np.int32, 0), "M": M},
        **{"stride_ai_rank": M * K // 2, "stride_ai_m": K // 2, "stride_ai_k": 1},
        **{"stride_sf_d": 2 * tiles_m * tiles_k, "stride_sf_s": tiles_m * tiles_k, "stride_sf_m": tiles_k},
        "stride_sf_k": 1,
    }
    sends = {
        **{"A_local": local((M, K // 2), np.float16, lhs), "K_local": K // 2, "stride_al_m": K // 2, "stride_al_k": 1},
        **{"BLOCK_SIZE_M": BLOCK, "BLOCK_SIZE_K": BLOCK, "heap_bases": BASES, **both},
    }
    product = {
        **{"B": local((K, N), np.float16, rhs), "C": out, "N": N, "K": K, "stride_b_k": N, "stride_b_n": 1},
        **{"stride_c_m": N, "stride_c_n": 1, **_blocks(), **both},
    }
    kernels = module.push_shards_kernel, module.gemm_push_kernel
    launches = [Launch(*each) for each in zip(kernels, ((tiles_m, tiles_k), PROGRAMS), (sends, product))]
    whole = np.concatenate(lhs, 1).astype(np.float32)
    return Case(
        launches=launches,
        results=out,
        check=equals(lambda rank: whole @ rhs[rank]),
        # As a flag is found by the first loads, or after many.
        error=(simulator.DroppedWaitError, RACE),
        says=("all_gather_gemm_push.py:155 in gemm_push_kernel", "signal_flags", "Triton deletes"),
    )


def gemm_ring(assumptions: bool) -> Case:
    """15: a product, and a ring of sums beside it."""
    module = example("15_gemm_all_reduce_ring_based/gemm_all_reduce_ring_based.py")
    lhs, rhs = _product((M, K // 2), (K // 2, N))
    out, locks = symmetric((M, N), np.float32, 0), symmetric((TILES,), np.int32, 0)
    mine = symmetric((M, N), np.float32)
    sizes = {"M": M, "N": N, **_place()}
    product = {
        **{"A": local((M, K // 2), np.float16, lhs), "B": local((K // 2, N), np.float16, rhs), "local_C": mine},
        **{"bias_ptr": None, "locks": locks, "K": K // 2, **_strides(K // 2, N, N), "stride_bias": 0, **_blocks()},
        **{"BIAS": False, "COLLECT_TIMESTAMPS": False, **sizes},
    }
    ring = {
        **{"C": out, "local_C": mine, "ring_buffer": symmetric((M, N), np.float32), "locks": locks},
        **{"flags": symmetric((TILES,), np.int32, 0), "stride_cm_global": N, "stride_cn_global": 1},
        **{"BLOCK_SIZE_M": BLOCK, "BLOCK_SIZE_N": BLOCK, "GROUP_SIZE_M": 2, "COMM_SMS": PROGRAMS, "NUM_XCDS": 1},
        **sizes,
    }
    found: dict[str, Any] = {
        "error": simulator.AssumptionError,
        "says": ("The assume of", "gemm_all_reduce_ring_based.py:8"),
    }
    return Case(
        launches=[
            Launch(module.persistent_gemm, PROGRAMS, _taken(module.persistent_gemm, product)),
            Launch(module.persistent_all_reduce, PROGRAMS, ring),
            Barrier(),
        ],
        results=out,
        check=equals(sum(a.astype(np.float32) @ b for a, b in zip(lhs, rhs))),
        settings={"assumptions": assumptions},
        **(found if assumptions else {}),
    )


def _taken(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in kernel.arg_names}


def ring(rounds: int = 1) -> Case:
    """16: a ring of sums, which resets its own flags."""
    kernel = example("16_all_reduce_ring_based/all_reduce_ring_based.py").persistent_all_reduce
    world = 3
    x = [numbers(rank, M, N) for rank in range(world)]
    out: Buffer = local((M, N), np.float32)
    arguments = {
        **{"partials": local((M, N), np.float32, x), "ring_buffer": symmetric((M, N), np.float32), "output": out},
        **{"flags": symmetric((TILES,), np.int32, 0), "M": M, "N": N, "stride_cm": N, "stride_cn": 1},
        **{"BLOCK_SIZE_M": BLOCK, "BLOCK_SIZE_N": BLOCK, "GROUP_SIZE_M": 2, "COMM_SMS": PROGRAMS, "NUM_XCDS": 1},
        **_place(),
    }
    launch = Launch(kernel, PROGRAMS, arguments)
    return Case(launches=[launch], results=out, check=equals(sum(x)), world=world, settings={"rounds": rounds})


EXAMPLES: dict[str, Callable[[], Case]] = {
    "06 load_store": lambda: message_passing("load_store"),
    "06 load_store, again": lambda: message_passing("load_store", 3),
    "06 put": lambda: message_passing("put"),
    "09": lambda: one_shot(True),
    "09, assumptions ignored": lambda: one_shot(False),
    "13": flash_decode,
    "13, again": lambda: flash_decode(3, error=RACE, says=("decode_kernels.py",)),
    "13, again behind a barrier": lambda: flash_decode(2, True),
    "14 pull": pull,
    "14 pull, again": lambda: pull(3),
    "14 push": push,
    "15": lambda: gemm_ring(True),
    "15, assumptions ignored": lambda: gemm_ring(False),
    "16": ring,
    "16, again": lambda: ring(3),
}

# What is right only because Triton puts a barrier in front of a release.
BARE_RELEASES = ("06 load_store", "06 put", "13", "16")
