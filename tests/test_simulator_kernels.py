"""Every kernel of `simulator_kernels` under every policy, with few and many slots: right, and without an alarm."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtaxfree import simulator
from tests.simulator_kernels import KERNELS, WORLDS, Simulated

SEEDS = 200
FEW = 3  # the first ones, in every run
PORTION = 8  # seeds of a test, so that several processes share the work
# The first portion always, the others by `make soak`.
PORTIONS = [
    pytest.param(first, marks=pytest.mark.soak if first else pytest.mark.slow) for first in range(0, SEEDS, PORTION)
]


@pytest.mark.parametrize("first", PORTIONS)
@pytest.mark.parametrize("world", (2, 3, *(pytest.param(world, marks=pytest.mark.soak) for world in (4, 8))))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_interleaving_is_right(kernel: Simulated, world: int, first: int) -> None:
    kernel.run(range(max(first, FEW if world < 8 else 1), first + PORTION), world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_some_interleavings_are_right(kernel: Simulated, world: int) -> None:
    kernel.run(range(FEW if world < 8 else 1), world)


@pytest.mark.parametrize("slots", (1, None))
def test_who_adds_up_waits_for_all_blocks_of_rows(slots: int | None) -> None:
    """Programs of the same columns are to run together, and the operation says so."""
    [kernel] = [kernel for kernel in KERNELS if kernel.name == "matmul_reduce_decode_hopper"]
    call = kernel.call(2, np.dtype(jnp.bfloat16), (19, 40, 72, 0, False, None, 2, 1, 16))
    assert call.keywords["together"] == 3
    function = getattr(kernel.module, kernel.function)
    call.run(function, slots=slots)
    with pytest.raises((simulator.WaitOrderError, simulator.DeadlockError)):
        call.run(function, slots=slots, together=1)
