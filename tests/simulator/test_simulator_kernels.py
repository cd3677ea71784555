"""Every kernel of `simulator_kernels` under every policy, with few and many slots: right, and without an alarm."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtaxfree import simulator
from tests.helpers.simulator_kernels import KERNELS, WORLDS, Simulated

SEEDS = 200
PORTION = 8  # seeds of a test, so that several processes share the work
PORTIONS = range(0, SEEDS, PORTION)


def first_seeds(kernel: Simulated, world: int) -> range:
    """The seeds of every run: of three ranks each shape has one, of two half of the shapes, of four a quarter of them.

    `make soak` has these, too.
    """
    shapes = len(kernel.shapes(world))
    if world == 2:
        return range(max(PORTION, shapes) // 2)
    if world == 3:
        return range(max(PORTION, shapes))
    return range(shapes // 2, shapes, 2) if world == 4 else range(1)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_shape_is_right(kernel: Simulated, world: int) -> None:
    kernel.run(first_seeds(kernel, world), world)


def test_without_peers() -> None:
    """A team of one rank, whose programs wait for each other alone."""
    [kernel] = [kernel for kernel in KERNELS if kernel.name == "decode_attention"]
    kernel.run(range(2 * len(kernel.shapes(1))), 1)


@pytest.mark.soak
@pytest.mark.parametrize("first", PORTIONS)
@pytest.mark.parametrize("world", (1, *WORLDS))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_interleaving_is_right(kernel: Simulated, world: int, first: int) -> None:
    kernel.run(range(first, first + PORTION), world)


@pytest.mark.parametrize("slots", (1, None))
def test_who_adds_up_waits_for_all_blocks_of_rows(slots: int | None) -> None:
    """Programs of the same columns are to run together, and the operation says so."""
    [kernel] = [kernel for kernel in KERNELS if kernel.name == "matmul_reduce_hopper_few"]
    call = kernel.call(2, np.dtype(jnp.bfloat16), (19, 40, 72, 0, False, None, 2, 1, 16))
    assert call.keywords["together"] == 3
    function = getattr(kernel.module, kernel.function)
    call.run(function, slots=slots)
    with pytest.raises((simulator.WaitOrderError, simulator.DeadlockError)):
        call.run(function, slots=slots, together=1)
