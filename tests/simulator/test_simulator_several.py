"""`all_gather_matmul` with several right-hand sides, in the simulator: right, and planted faults are found."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtaxfree.kernels.all_gather_matmul import few, hopper, hopper_few, portable
from jaxtaxfree.kernels.blocks import several as several_block
from jaxtaxfree.ops import all_gather_matmul as gather_ops
from jaxtaxfree.ops.epilogue import Epilogue, joined
from tests.helpers.simulator_kernels import Call, Simulated, integers, launched
from tests.simulator.test_simulator_columns import Mutant
from tests.simulator.test_simulator_kernels import PORTION, PORTIONS

WORLDS = (2, 3)
SEEDS = 6


def several(world: int, dtype: np.dtype, shape: tuple, *, kernel: str) -> Call:
    """all_gather(lhs [M, K]) times each rhs [K, N_i], and a bias for those that have one."""
    m, k, widths, biased, return_gathered, settings, *transposed = shape
    lhs = [integers(rank, (m, k), dtype) for rank in range(world)]
    rhs = [[integers(100 * i + rank, (k, n), dtype) for rank in range(world)] for i, n in enumerate(widths, 1)]
    biases = {i: [integers(1000 * i + rank, (widths[i],), dtype) for rank in range(world)] for i in biased}
    gathered = np.concatenate(lhs)
    results = []
    for rank in range(world):
        products = [gathered.astype(np.float32) @ w[rank].astype(np.float32) for w in rhs]
        outs = [out + biases[i][rank].astype(np.float32) if i in biases else out for i, out in enumerate(products)]
        outs = [out.astype(dtype) for out in outs]
        results.append([*outs, gathered] if return_gathered else outs)
    config = getattr(gather_ops, kernel).Config(**settings)
    epilogue = joined([Epilogue(None, ("bias",)) if i in biases else Epilogue() for i in range(len(widths))])
    form = {"widths": widths, "epilogue": epilogue, "return_gathered": return_gathered}
    form |= {"rhs_transposed": bool(transposed)}
    keywords = launched(gather_ops, world * m, k, sum(widths), world, dtype, config, **form)
    lie = (lambda x: np.ascontiguousarray(x.T)) if transposed else (lambda x: x)
    weights = {f"rhs{i}": [lie(of_rank) for of_rank in w] for i, w in enumerate(rhs)}
    bundle = {f"bias{i}": bias for i, bias in biases.items()}
    arrays: tuple[Any, ...] = (lhs, weights, bundle)
    if kernel.endswith("few"):
        arrays += ({},)  # no scales
    if kernel == "hopper":
        blocks = [x[None] for x in lhs]
        arrays = (blocks, blocks, weights, weights, bundle, {})
        results = [[out.reshape(world, m, -1) for out in outs] for outs in results]
    return Call(arrays=arrays, keywords=keywords, expected=results)


PORTABLE = {"block_m": 16, "block_n": 16, "block_k": 32}
PUSHED = PORTABLE | {"group_m": 2, "pushers": 2, "units": 2, "chunk": 64}
FEW = PORTABLE | {"pushers": 2, "chunk": 64}
HOPPER = {
    "block_m": 8, "block_n": 16, "block_k": 8, "part": 16, "num_stages": 2, "group_m": 2, "unit": 4, "programs": 2,
}  # fmt: skip
HOPPER_FEW = {
    "block_m": 8, "block_n": 16, "block_k": 8, "part": 16, "num_stages": 2, "num_warps": 1, "pushers": 2, "chunk": 64,
}  # fmt: skip
TRANSPOSED = "transposed"
# M, K, the widths, which of them have a bias, return_gathered, settings; and whether the weights lie as [N_i, K].
KERNELS = (
    Simulated(
        name="portable",
        module=portable,
        function="all_gather_matmul_kernel",
        call=functools.partial(several, kernel="portable"),
        shapes=lambda world: (
            (17, 21, (20, 9, 3), (0, 2), False, PUSHED),
            (16, 40, (16, 33), (1,), True, PUSHED),
            (17, 21, (20, 9, 3), (0,), False, PUSHED, TRANSPOSED),
        ),
    ),
    Simulated(
        name="few",
        module=few,
        function="all_gather_matmul_few_kernel",
        call=functools.partial(several, kernel="few"),
        shapes=lambda world: (
            (5, 21, (20, 9, 3), (0, 2), False, FEW),
            (4, 32, (7, 16, 16, 40), (3,), True, FEW),
            (5, 21, (20, 9, 3), (1,), False, FEW, TRANSPOSED),
        ),
    ),
    Simulated(
        name="hopper_few",
        module=hopper_few,
        function="all_gather_matmul_hopper_few_kernel",
        call=functools.partial(several, kernel="hopper_few"),
        # The second one has tiles that two programs share, and one that nobody shares.
        shapes=lambda world: (
            (2, 24, (40, 8, 16), (0, 2), False, HOPPER_FEW),
            (3, 48, (24, 16), (1,), False, HOPPER_FEW | {"block_m": 16, "splits": 2, "whole": 1}),
            (2, 24, (40, 8, 16), (0, 2), False, HOPPER_FEW, TRANSPOSED),
        ),
    ),
    Simulated(
        name="hopper",
        module=hopper,
        function="all_gather_matmul_hopper_kernel",
        call=functools.partial(several, kernel="hopper"),
        shapes=lambda world: (
            (9, 24, (24, 8, 16), (0, 2), False, HOPPER),
            (16, 16, (8, 40), (1,), True, HOPPER | {"programs": 3}),
            (9, 24, (24, 8, 16), (0, 2), False, HOPPER, TRANSPOSED),
        ),
    ),
)
KERNEL = {kernel.name: kernel for kernel in KERNELS}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_shape_is_right(kernel: Simulated) -> None:
    kernel.run(range(4), 2)


@pytest.mark.soak
@pytest.mark.parametrize("first", PORTIONS)
@pytest.mark.parametrize("world", (*WORLDS, 4))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_interleaving_is_right(kernel: Simulated, world: int, first: int) -> None:
    kernel.run(range(first, first + PORTION), world)


MUTANTS = (
    Mutant(
        name="columns of another rhs",
        kernel="portable",
        edits=(("matrices = several.weights_of(weights, N, NUMBER)", "matrices = several.weights_of(weights, N, 0)"),),
    ),
    Mutant(
        name="the first bias for all",
        kernel="few",
        edits=(("epilogues.of(epilogue, EPILOGUE, N, NUMBER)", "epilogues.of(epilogue, EPILOGUE, N, 0)"),),
    ),
    Mutant(
        name="no wait for the rows of others",
        kernel="few",
        edits=(("me.epoch * PUSHERS)", "(me.epoch - 1) * PUSHERS)"),),
    ),
    Mutant(
        name="the result of the first rhs",
        kernel="hopper_few",
        edits=(("out_ptr = outs[NUMBER]", "out_ptr = outs[0]"),),
    ),
    Mutant(
        name="the width of the first rhs",
        kernel="hopper_few",
        edits=(("WIDTH: gl.constexpr = several.of(N, NUMBER)", "WIDTH: gl.constexpr = several.of(N, 0)"),),
    ),
    Mutant(
        name="columns numbered over all rhs",
        kernel="hopper",
        edits=(("rhs, block * work.BLOCK_N", "rhs, column_block * work.BLOCK_N"),),
    ),
)


@pytest.mark.filterwarnings("ignore::jaxtaxfree.simulator.WastedTrafficWarning")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    mutant.check(KERNEL[mutant.kernel], tmp_path, SEEDS)


def test_blocks_are_numbered_over_all() -> None:
    widths = (40, 8, 16)
    assert [several_block.blocks_before(widths, 16, i) for i in range(4)] == [0, 3, 4, 5]
    assert several_block.blocks_before(40, 16, 1) == 3
    assert (several_block.count(widths), several_block.count(40)) == (3, 1)
