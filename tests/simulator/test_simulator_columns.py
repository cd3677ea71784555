"""The forms of the products in which ranks have columns, in the simulator: right, and planted faults are found."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtaxfree.kernels.all_gather_matmul import hopper as gather_hopper
from jaxtaxfree.kernels.all_gather_matmul import portable as gather_portable
from jaxtaxfree.kernels.matmul_reduce_scatter import hopper as scatter_hopper
from jaxtaxfree.kernels.matmul_reduce_scatter import portable as scatter_portable
from jaxtaxfree.ops import all_gather_matmul as gather_ops
from jaxtaxfree.ops import matmul_reduce_scatter as scatter_ops
from jaxtaxfree.simulator import SimulationError
from tests.helpers.simulator_kernels import Call, Simulated, integers, launched, load
from tests.helpers.support import chosen, product_call
from tests.simulator.test_simulator_kernels import PORTION, PORTIONS
from tests.simulator.test_simulator_mutants import edit

WORLDS = (2, 3)
SEEDS = 10


def gather(world: int, dtype: np.dtype, shape: tuple, *, kernel: str) -> Call:
    """all_gather(lhs [M, K]) along K, times rhs [world * K, N]."""
    m, k, n, return_gathered, rhs_transposed, settings = shape
    lhs = [integers(rank, (m, k), dtype) for rank in range(world)]
    rhs = [integers(100 + rank, (world * k, n), dtype) for rank in range(world)]
    gathered = np.concatenate(lhs, axis=1)
    out = [(gathered.astype(np.float32) @ w.astype(np.float32)).astype(dtype) for w in rhs]
    if rhs_transposed:
        rhs = [np.ascontiguousarray(w.T) for w in rhs]
    config = getattr(gather_ops, kernel).Config(**settings)
    form = {"return_gathered": return_gathered, "rhs_transposed": rhs_transposed, "along_columns": True}
    keywords = launched(gather_ops, m, k, n, world, dtype, config, **form)
    arrays: tuple[Any, ...] = (lhs, {"rhs": rhs}, {})
    results = [(each, gathered) for each in out] if return_gathered else out
    if kernel == "hopper":
        blocks = [x[None] for x in lhs]
        arrays = (blocks, blocks, {"rhs": rhs}, {"rhs": rhs}, {}, {})
        results = [(each[None], gathered[None]) for each in out] if return_gathered else [each[None] for each in out]
    return Call(arrays=arrays, keywords=keywords, expected=results)


def scatter(world: int, dtype: np.dtype, shape: tuple, *, kernel: str) -> Call:
    """The sum of lhs [M, K] times rhs [K, world * N] over the ranks, of which each has N columns."""
    m, k, n, rhs_transposed, settings = shape
    lhs = [integers(rank, (m, k), dtype) for rank in range(world)]
    rhs = [integers(100 + rank, (k, world * n), dtype) for rank in range(world)]
    total = sum(a.astype(np.float32) @ b.astype(np.float32) for a, b in zip(lhs, rhs))
    results = np.split(total.astype(dtype), world, axis=1)
    if rhs_transposed:
        rhs = [np.ascontiguousarray(w.T) for w in rhs]
    config = getattr(scatter_ops, kernel).Config(**settings)
    form = {"rhs_transposed": rhs_transposed, "along_columns": True}
    keywords = launched(scatter_ops, m, k, n, world, dtype, config, **form)
    arrays: tuple[Any, ...] = (lhs, rhs, {})
    if kernel == "hopper":
        arrays, results = ([x[None] for x in lhs], rhs, rhs, {}, {}), [x[None] for x in results]
    return Call(arrays=arrays, keywords=keywords, expected=results)


PORTABLE = {"block_m": 16, "block_n": 16, "block_k": 32, "group_m": 2}
PUSHED = PORTABLE | {"pushers": 2, "units": 2, "chunk": 64}
GATHERED = {
    "block_m": 8, "block_n": 16, "block_k": 8, "part": 16, "num_stages": 2, "group_m": 2, "unit": 4, "programs": 2,
}  # fmt: skip
SUMMED = {"block_m": 32, "block_n": 32, "block_k": 16, "num_stages": 2, "group_m": 2, "chunk": 128, "programs": 2}
KERNELS = (
    Simulated(
        name="all_gather_matmul",
        module=gather_portable,
        function="all_gather_matmul_kernel",
        call=functools.partial(gather, kernel="portable"),
        # M, K, N, return_gathered, rhs_transposed, settings
        shapes=lambda world: (
            (17, 21, 9, False, False, PUSHED),
            (35, 40, 19, True, False, PUSHED | {"pushers": 3}),
            (16, 32, 16, False, True, PUSHED | {"pushers": 1, "units": 1}),
        ),
    ),
    Simulated(
        name="all_gather_matmul_hopper",
        module=gather_hopper,
        function="all_gather_matmul_hopper_kernel",
        call=functools.partial(gather, kernel="hopper"),
        # Three groups of rows, of which the last one is not full; parts of K that are not full; half tiles.
        shapes=lambda world: (
            (20, 24, 16, False, False, GATHERED | {"group_m": 1}),
            (37, 24, 24, True, False, GATHERED),
            (8, 16, 40, False, True, GATHERED | {"programs": 3}),
        ),
    ),
    Simulated(
        name="matmul_reduce_scatter",
        module=scatter_portable,
        function="matmul_reduce_scatter_kernel",
        call=functools.partial(scatter, kernel="portable"),
        # M, K, N, rhs_transposed, settings; an owner's last tile ends behind the whole matrix, or in the next owner's.
        shapes=lambda world: (
            (17, 21, 9, False, PORTABLE | {"lag": 2, "exact_wire": True, "num_warps": 1}),
            (35, 40, 24, False, PORTABLE | {"lag": 100}),
            (16, 64, 19, True, PORTABLE | {"lag": 3}),
        ),
    ),
    Simulated(
        name="matmul_reduce_scatter_hopper",
        module=scatter_hopper,
        function="matmul_reduce_scatter_hopper_kernel",
        call=functools.partial(scatter, kernel="hopper"),
        shapes=lambda world: (
            (33, 16, 40, False, SUMMED),
            (20, 40, 24, False, SUMMED | {"programs": 3, "num_stages": 3}),
            (20, 24, 40, True, SUMMED | {"programs": 3}),
        ),
    ),
)
KERNEL = {kernel.name: kernel for kernel in KERNELS}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_shape_is_right(kernel: Simulated, world: int) -> None:
    kernel.run(range((world - 1) * len(kernel.shapes(world))), world)


@pytest.mark.soak
@pytest.mark.parametrize("first", PORTIONS)
@pytest.mark.parametrize("world", (*WORLDS, 4, 8))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_interleaving_is_right(kernel: Simulated, world: int, first: int) -> None:
    kernel.run(range(first, first + PORTION), world)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault that has to be found: by the simulator, or by a result that is wrong."""

    name: str
    kernel: str
    edits: tuple[tuple, ...]

    def check(self, kernel: Simulated, folder: Path, seeds: int) -> None:
        """Fails unless one of so many seeds shows it."""
        module = load(edit(kernel.module, self.edits, folder), kernel.module.__name__)
        for seed in range(seeds):
            call, settings = kernel.case(seed, 3)
            try:
                call.run(getattr(module, kernel.function), **settings)
            except (SimulationError, AssertionError):
                return
        pytest.fail(f"not found in {seeds} seeds")


MUTANTS = (
    Mutant(
        name="no wait for the columns of others",
        kernel="all_gather_matmul",
        edits=(("me.epoch * UNITS, source)", "(me.epoch - 1) * UNITS, source)"),),
    ),
    Mutant(
        name="rows of rhs that belong to this rank's own columns",
        kernel="all_gather_matmul",
        edits=(("above = source.to(tl.int64)", "above = me.rank.to(tl.int64)"),),
    ),
    Mutant(
        name="columns of the first rank alone",
        kernel="all_gather_matmul_hopper",
        edits=(("        source = (first + i) % work.WORLD\n", "        source = first\n"),),
    ),
    Mutant(
        name="one step of K too few",
        kernel="all_gather_matmul_hopper",
        edits=(("steps = sources_of_a_tile(work) * gl.cdiv", "steps = gl.cdiv"),),
    ),
    Mutant(
        name="rows of rhs of rank 0",
        kernel="all_gather_matmul_hopper",
        edits=(("above = source * work.K if work.COLUMNS else 0", "above = 0"),),
    ),
    Mutant(
        name="a last group as long as the others",
        kernel="all_gather_matmul_hopper",
        edits=(("rows = gl.minimum(units_a_part(work) - group * most, most)", "rows = most"),),
    ),
    Mutant(
        name="columns of the next owner",
        kernel="matmul_reduce_scatter",
        edits=(("        rhs += owner.to(tl.int64)", "        rhs += ((owner + 1) % WORLD).to(tl.int64)"),),
    ),
    Mutant(
        name="rhs as narrow as the result",
        kernel="matmul_reduce_scatter",
        edits=(("STRIDE=WORLD * N if COLUMNS and not RHS_TRANSPOSED else 0", "STRIDE=0"),),
    ),
    Mutant(
        name="columns of this rank for everybody",
        kernel="matmul_reduce_scatter_hopper",
        edits=(("(0, owner * work.N)", "(0, me.rank * work.N)"),),
    ),
)


@pytest.mark.filterwarnings("ignore::jaxtaxfree.simulator.WastedTrafficWarning")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    mutant.check(KERNEL[mutant.kernel], tmp_path, SEEDS)


def test_kernels_that_refuse() -> None:
    """Those for few rows take rows alone, and a rank's columns have to fill the steps of K of that for Hopper."""
    call = product_call(gather_ops, 16, 96, 64, world=2, dtype=jnp.bfloat16, along_columns=True)
    for few in ("few", "hopper_few"):
        with pytest.raises(NotImplementedError, match="it gathers and scatters rows, not columns"):
            chosen(gather_ops, call, kernel=few)
    with pytest.raises(NotImplementedError, match="96 columns of lhs, and it takes multiples of block_k, 64"):
        chosen(gather_ops, call, kernel="hopper")
