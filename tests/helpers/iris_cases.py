"""Calls of the kernels in Iris's packages `ccl` and `ops`, and what the simulator says of each."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxtaxfree import simulator
from jaxtaxfree.simulator.iris import BASES, CONTEXT, RANK, WORLD, Barrier, Fill, Launch, local, symmetric
from tests.helpers import iris_kernels

POLICIES = ("random", "round-robin", "ahead", "straggler")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Launches of one or several kernels.

    Attributes:
      launches, results: for `run_iris`.
      check: raises AssertionError unless the results of all ranks are right.
      world: number of ranks.
      settings: more for `run_iris`.
      error: what is found; None if the kernel keeps the rules.
      says: what the finding says, with the line at fault.
    """

    launches: Sequence[Any]
    results: Any
    check: Callable[[list[Any]], None]
    world: int = 2
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: type[Exception] | tuple[type[Exception], ...] | None = None
    says: tuple[str, ...] = ()

    def run(self, seeds: int, policies: Sequence[str] = POLICIES, **more: Any) -> None:
        """Asserts that every interleaving is right, or that the finding comes in one of them."""
        for policy in policies:
            for seed in range(seeds):
                settings = {**self.settings, **more, "seed": seed, "policy": policy}
                try:
                    outs, _ = simulator.run_iris(self.launches, world=self.world, results=self.results, **settings)
                except simulator.SimulationError as error:
                    if self.error is None:
                        raise
                    assert isinstance(error, self.error), error
                    assert all(text in str(error) for text in self.says), error
                    return
                if self.error is None:
                    self.check(outs)
        assert self.error is None, "every interleaving is right"


def equals(expected: Any) -> Callable[[list[Any]], None]:
    """A check of results that are the same on every rank, or that a function says of each rank."""

    def check(outs: list[Any]) -> None:
        for rank, out in enumerate(outs):
            np.testing.assert_array_equal(out, expected(rank) if callable(expected) else expected)

    return check


def numbers(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Small whole numbers, of which sums are exact."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


M, N, BLOCK, PROGRAMS = 32, 40, 16, 2  # with tiles at the edge

RACE = simulator.DataRaceError


def _collective(module: str, name: str, inputs: Sequence[np.ndarray], out: Any, **extra: Any) -> Launch:
    kernel = getattr(iris_kernels.module(f"iris.ccl.triton.{module}"), name)
    shape = inputs[0].shape
    arguments = {
        "input_ptr": symmetric(shape, np.float32, inputs),
        "output_ptr": out,
        **{"M": M, "N": N, "stride_in_m": shape[1], "stride_in_n": 1, "stride_out_m": out.shape[1], "stride_out_n": 1},
        **{"heap_bases": BASES, "group_rank": RANK, "iris_rank": RANK, "world_size": WORLD},
        **{"rank_start": 0, "rank_stride": 1, "BLOCK_SIZE_M": BLOCK, "BLOCK_SIZE_N": BLOCK, "GROUP_SIZE_M": 2},
        **{"COMM_SMS": PROGRAMS, "NUM_XCDS": 1, "CHUNK_SIZE": 1, **extra},
    }
    taken = {name: value for name, value in arguments.items() if name in kernel.arg_names}
    return Launch(kernel, PROGRAMS, taken)


def _all_reduce(name: str, world: int = 2, **found: Any) -> Case:
    x = [numbers(rank, M, N) for rank in range(world)]
    tiles = -(-M // BLOCK) * -(-N // BLOCK)
    out = symmetric((M, N), np.float32, 0)
    flags = symmetric((tiles,), np.int32, 0)
    extra = {
        "spinlock": {"locks_ptr": flags},
        "two_shot": {"DISTRIBUTION": 1},
        "ring": {
            **{"ring_buffer": symmetric((M, N), np.float32), "flags": flags, "NUM_RINGS": 1, "SLICE_SIZE_N": BLOCK},
            **{"next_rank": (RANK + 1) % WORLD, "FLAGS_PER_TILE": 1},
        },
    }
    launch = _collective("all_reduce", f"persistent_all_reduce_{name}", x, out, **extra.get(name, {}))
    return Case(launches=[launch, Barrier()], results=out, check=equals(sum(x)), world=world, **found)


def _all_gather(name: str, world: int = 2) -> Case:
    x = [numbers(rank, M, N) for rank in range(world)]
    out = symmetric((world * M, N), np.float32)
    launch = _collective("all_gather", name, x, out)
    return Case(launches=[launch, Barrier()], results=out, check=equals(np.concatenate(x)), world=world)


def _all_to_all(world: int = 2) -> Case:
    x = [numbers(rank, M, world * N) for rank in range(world)]
    out = symmetric((M, world * N), np.float32)
    launch = _collective("all_to_all", "persistent_all_to_all", x, out)
    check = equals(lambda rank: np.concatenate([each[:, rank * N : (rank + 1) * N] for each in x], 1))
    return Case(launches=[launch, Barrier()], results=out, check=check, world=world)


def _scattered(x: Sequence[np.ndarray]) -> Callable[[list[Any]], None]:
    """A check that each tile of a sum is on one rank, and zeros are on the others."""

    def check(outs: list[Any]) -> None:
        total = sum(x)
        for m in range(0, M, BLOCK):
            for n in range(0, N, BLOCK):
                tile = slice(m, m + BLOCK), slice(n, n + BLOCK)
                owners = [rank for rank, out in enumerate(outs) if out[tile].any()]
                assert len(owners) == 1, (m, n, owners)
                np.testing.assert_array_equal(outs[owners[0]][tile], total[tile])

    return check


def _reduce_scatter(distribution: int, world: int = 2) -> Case:
    x = [numbers(rank, M, N) for rank in range(world)]
    out = symmetric((M, N), np.float32, 0)
    launch = _collective("reduce_scatter", "persistent_reduce_scatter_two_shot", x, out, DISTRIBUTION=distribution)
    return Case(launches=[launch, Barrier()], results=out, check=_scattered(x), world=world)


def ccl(name: str) -> Case:
    """A call of a kernel of `iris.ccl` by the name that CCL has for it."""
    return {
        "all_reduce atomic": lambda: _all_reduce(
            "atomic", error=RACE, says=("both must be at scope sys", "in persistent_all_reduce_atomic")
        ),
        "all_reduce spinlock": lambda: _all_reduce("spinlock"),
        "all_reduce one_shot": lambda: _all_reduce("one_shot", 3),
        "all_reduce two_shot": lambda: _all_reduce("two_shot", 3),
        "all_reduce ring": lambda: _all_reduce("ring", 3),
        "all_gather persistent": lambda: _all_gather("persistent_all_gather", 3),
        "all_gather partitioned": lambda: _all_gather("persistent_all_gather_partitioned"),
        "all_to_all": lambda: _all_to_all(3),
        "reduce_scatter striding": lambda: _reduce_scatter(0),
        "reduce_scatter block": lambda: _reduce_scatter(1, 3),
    }[name]()


CCL = (
    *("all_reduce atomic", "all_reduce spinlock", "all_reduce one_shot", "all_reduce two_shot", "all_reduce ring"),
    *("all_gather persistent", "all_gather partitioned", "all_to_all"),
    *("reduce_scatter striding", "reduce_scatter block"),
)


# Products.

ROWS, COLUMNS, DEPTH = 32, 48, 32  # whole tiles
_TILES = ROWS // BLOCK * (COLUMNS // BLOCK)


def _strides(**widths: int) -> dict[str, int]:
    """`stride_am` and `stride_ak` of a="mk", as Iris names them, for arrays so wide."""
    both = {f"stride_{name[:-1]}": width for name, width in widths.items()}
    return both | {f"stride_{name[0]}{name[2:]}": 1 for name in widths}


def _tiles() -> dict[str, int]:
    return {"BLOCK_SIZE_M": BLOCK, "BLOCK_SIZE_N": BLOCK, "BLOCK_SIZE_K": BLOCK}


def _persistent() -> dict[str, Any]:
    return {"GROUP_SIZE_M": 2, "NUM_SMS": PROGRAMS, "NUM_XCDS": 1, "BIAS": False, "ALLOW_TF32": False}


def _place() -> dict[str, Any]:
    return {"context_tensor": CONTEXT, "cur_rank": RANK, "world_size": WORLD}


def _op(name: str) -> Any:
    return iris_kernels.module(f"iris.ops.{name}")


def _products(world: int, rows: int = ROWS, depth: int = DEPTH) -> tuple[list[np.ndarray], list[np.ndarray]]:
    lhs = [numbers(rank, rows, depth, dtype=np.float16) for rank in range(world)]
    return lhs, [numbers(10 + rank, DEPTH, COLUMNS, dtype=np.float16) for rank in range(world)]


def _reduction(kernel: Any, variant: str | None, **found: Any) -> Case:
    world = 2
    lhs, rhs = _products(world)
    out, locks = symmetric((ROWS, COLUMNS), np.float32, 0), symmetric((_TILES,), np.int32, 0)
    arguments = {
        **{"A": local((ROWS, DEPTH), np.float16, lhs), "B": local((DEPTH, COLUMNS), np.float16, rhs), "C": out},
        **{"aux_buffer": symmetric((ROWS, COLUMNS), np.float32), "locks": locks},
        **{"M": ROWS, "N": COLUMNS, "K": DEPTH, **_strides(amk=DEPTH, bkn=COLUMNS, cmn=COLUMNS)},
        **{"EVEN_K": True, **_place(), **_tiles()},
    }
    if variant is not None:
        arguments["VARIANT"] = variant
    total = sum(a.astype(np.float32) @ b for a, b in zip(lhs, rhs))
    return Case(launches=[Launch(kernel, _TILES, arguments), Barrier()], results=out, check=equals(total), **found)


def _matmul_all_gather() -> Case:
    world = 2
    lhs, rhs = _products(world)
    rhs = [rhs[0]] * world
    out = symmetric((world * ROWS, COLUMNS), np.float32)
    arguments = {
        **{"A": local((ROWS, DEPTH), np.float16, lhs), "B": local((DEPTH, COLUMNS), np.float16, rhs)},
        **{"C_gathered": out, "bias_ptr": None, "stride_bias": 0},
        **{"M_local": ROWS, "M": world * ROWS, "N": COLUMNS, "K": DEPTH, **_strides(amk=DEPTH, bkn=COLUMNS)},
        **{"stride_cm_gathered": COLUMNS, "stride_cn_gathered": 1, "EVEN_K": True},
        **{**_place(), **_tiles(), **_persistent()},
    }
    launch = Launch(_op("matmul_all_gather")._fused_matmul_all_gather_kernel, PROGRAMS, arguments)
    expected = np.concatenate(lhs).astype(np.float32) @ rhs[0]
    return Case(launches=[launch, Barrier()], results=out, check=equals(expected))


def _all_gather_matmul() -> Case:
    world = 2
    lhs, rhs = _products(world, depth=DEPTH // world)
    out = local((ROWS, COLUMNS), np.float32)
    arguments = {
        **{"A_sharded": symmetric(lhs[0].shape, np.float16, lhs), "B": local((DEPTH, COLUMNS), np.float16, rhs)},
        **{
            "C": out,
            "bias_ptr": None,
            "stride_bias": 0,
            "M": ROWS,
            "N": COLUMNS,
            "K": DEPTH,
            "K_local": DEPTH // world,
        },
        **_strides(amk=DEPTH // world, bkn=COLUMNS, cmn=COLUMNS),
        **{"NUM_K_BLOCKS_LOCAL": DEPTH // world // BLOCK, "EVEN_K": True, **_place(), **_tiles(), **_persistent()},
    }
    launch = Launch(_op("all_gather_matmul")._fused_all_gather_matmul_kernel, PROGRAMS, arguments)
    whole = np.concatenate(lhs, 1).astype(np.float32)
    return Case(launches=[launch], results=out, check=equals(lambda rank: whole @ rhs[rank]))


def _hbm_buffer(reset: str | None = None, stages: int = 2, group: int = 1, **found: Any) -> Case:
    """`reset`: how the flags get back to 0 in a second round: None for one round."""
    world, fetch = 2, 1
    lhs, rhs = _products(world, depth=DEPTH // world)
    out = local((ROWS, COLUMNS), np.float32)
    tiles_m, tiles_n, steps = ROWS // BLOCK, COLUMNS // BLOCK, DEPTH // BLOCK
    each = tiles_m // stages * tiles_n
    flags = symmetric((tiles_m * steps,), np.int32, 0)
    arguments = {
        **{"A_sharded": symmetric(lhs[0].shape, np.float16, lhs), "B": local((DEPTH, COLUMNS), np.float16, rhs)},
        **{"C": out, "bias_ptr": None, "stride_bias": 0, "flags_ptr": flags},
        **{"staged_a": symmetric((ROWS, DEPTH), np.float16), "stride_sa_m": DEPTH, "stride_sa_k": 1},
        **{"M": ROWS, "N": COLUMNS, "K": DEPTH, "K_local": DEPTH // world},
        **_strides(amk=DEPTH // world, bkn=COLUMNS, cmn=COLUMNS),
        **{"GROUP_SIZE_M": group, "NUM_FETCH_SMS": fetch, "NUM_M_TILES": tiles_m, "NUM_TILES_N": tiles_n},
        **{"NUM_K_BLOCKS": steps, "NUM_K_BLOCKS_LOCAL": steps // world, "K_PER_FLAG": 1, "NUM_FLAG_GROUPS_K": steps},
        **{"TOTAL_GATHER_TILES": tiles_m * steps, "BIAS": False, "ALLOW_TF32": False, "NUM_FETCH_STAGES": stages},
        **{"GEMM_TILES_PER_STAGE": each, "FIRST_STAGE_FETCH_SMS": fetch, "TRACE": False, **_place(), **_tiles()},
    }
    kernel = _op("all_gather_matmul_hbm_buffer")._hbm_buffer_all_gather_matmul_kernel
    launches: list[Any] = [Launch(kernel, stages * (fetch + each), arguments)]
    launches = [*([Fill(flags)] if reset == "fill" else []), *launches]
    whole = np.concatenate(lhs, 1).astype(np.float32)
    return Case(
        launches=launches,
        results=out,
        check=equals(lambda rank: whole @ rhs[rank]),
        settings={"rounds": 2 if reset else 1},
        **found,
    )


def _matmul_all_reduce(variant: str, **found: Any) -> Case:
    return _reduction(_op("matmul_all_reduce")._fused_matmul_all_reduce_kernel, variant, **found)


def ops(name: str) -> Case:
    """A call of a kernel of `iris.ops`."""
    return {
        "matmul_all_reduce atomic": lambda: _matmul_all_reduce(
            "atomic", error=RACE, says=("both must be at scope sys", "in _fused_matmul_all_reduce_kernel")
        ),
        "matmul_all_reduce spinlock": lambda: _matmul_all_reduce("spinlock"),
        "matmul_all_reduce one_shot": lambda: _matmul_all_reduce("one_shot"),
        "matmul_all_reduce two_shot": lambda: _matmul_all_reduce("two_shot"),
        "matmul_reduce_scatter": lambda: _reduction(
            _op("matmul_reduce_scatter")._fused_matmul_reduce_scatter_kernel,
            None,
            error=RACE,
            says=("scopes 'gpu' and 'gpu'", "in _fused_matmul_reduce_scatter_kernel"),
        ),
        "matmul_all_gather": _matmul_all_gather,
        "all_gather_matmul": _all_gather_matmul,
        "all_gather_matmul_hbm_buffer": _hbm_buffer,
        "all_gather_matmul_hbm_buffer, again": lambda: _hbm_buffer(
            "nothing", error=RACE, says=("in _hbm_buffer_all_gather_matmul_kernel",)
        ),
        "all_gather_matmul_hbm_buffer, filled": lambda: _hbm_buffer("fill"),
        # A fetcher goes through the tiles of a stage, here two, by whole groups: it stores the last one several times,
        # and blocks of columns that it leaves out are waited for.
        "all_gather_matmul_hbm_buffer, half a group": lambda: _hbm_buffer(
            stages=1,
            group=4,
            error=(RACE, simulator.DeadlockError),
            says=("hbm_buffer.py:3", "in _hbm_buffer_all_gather_matmul_kernel"),
        ),
    }[name]()


OPS = (
    *(f"matmul_all_reduce {variant}" for variant in ("atomic", "spinlock", "one_shot", "two_shot")),
    *("matmul_reduce_scatter", "matmul_all_gather", "all_gather_matmul", "all_gather_matmul_hbm_buffer"),
    *("all_gather_matmul_hbm_buffer, again", "all_gather_matmul_hbm_buffer, filled"),
    "all_gather_matmul_hbm_buffer, half a group",
)
