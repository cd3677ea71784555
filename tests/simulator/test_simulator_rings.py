"""Faults planted into the index arithmetic of rings and pools: each must give wrong results, or leave the memory."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxtaxfree.simulator import SimulationError
from tests.helpers.simulator_kernels import KERNELS, Call, load
from tests.simulator.test_simulator_mutants import edit

[KERNEL] = [kernel for kernel in KERNELS if kernel.name == "decode_attention"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """Attributes: name, in those of tests; edits, as (text, what to put in its place)."""

    name: str
    edits: tuple[tuple[str, str], ...]


FAULTS = (
    Fault(
        name="the ring does not wrap in what is masked",
        edits=(("position = tl.where(position < 0, position + WORLD * S, position)", "position = position"),),
    ),
    Fault(
        name="the ring wraps behind a rank's part",
        edits=(("position = tl.where(position < 0, position + WORLD * S, position)", "position = position % S"),),
    ),
    Fault(
        name="blocks do not wrap",
        edits=(("tile = tl.where(block < tl.cdiv(S, BLOCK_S), block, block - tl.cdiv(S, BLOCK_S))", "tile = block"),),
    ),
    Fault(
        name="blocks wrap too late",
        edits=(("tl.where(block < tl.cdiv(S, BLOCK_S), block", "tl.where(block <= tl.cdiv(S, BLOCK_S), block"),),
    ),
    Fault(
        name="the start of another sequence",
        edits=(("tl.load(starts_ptr + sequence)", "tl.load(starts_ptr + sequence // 2)"),),
    ),
    Fault(
        name="no start",
        edits=(("tl.load(starts_ptr + sequence) % (WORLD * S)", "tl.load(starts_ptr + sequence) * 0"),),
    ),
    Fault(
        name="a start that is negative",
        edits=(("start = tl.where(start < 0, start + WORLD * S, start)", "start = tl.maximum(start, 0)"),),
    ),
    Fault(
        name="the newest keys left out where they share a block with the oldest",
        edits=(("there = (slot < S) & (position < end)", "there = (slot < S) & (position < end) & (slot >= start)"),),
    ),
    Fault(
        name="the oldest block twice",
        edits=(("return first, tl.minimum(count, tl.cdiv(S, BLOCK_S))", "return first, count"),),
    ),
    Fault(
        name="slots that are not there",
        edits=(("there = (slot < S) & (position < end)", "there = position < end"),),
    ),
    Fault(
        name="keys past the end",
        edits=(("there = (slot < S) & (position < end)", "there = (slot < S) & (position <= end)"),),
    ),
    Fault(
        name="what has wrapped left out",
        edits=((" + tl.cdiv(wrapped, BLOCK_S)\n", "\n"),),
    ),
    Fault(
        name="the first block of a rank without an older piece",
        edits=(("first = tl.where(begin < stop, begin // BLOCK_S, 0)", "first = begin // BLOCK_S"),),
    ),
    Fault(
        name="a window that does not wrap",
        edits=(("place = tl.where(oldest < rest, start + oldest, oldest - rest)", "place = start"),),
    ),
    Fault(
        name="heads a page apart in a pool",
        edits=(("(head.to(tl.int64) * POOL + page) * PAGE", "(head.to(tl.int64) + page) * PAGE"),),
    ),
    Fault(
        name="a pool as if it stood before the heads",
        edits=(("(head.to(tl.int64) * POOL + page) * PAGE", "(page * K + head) * PAGE"),),
    ),
)


def calls(world: int) -> list[Call]:
    return [KERNEL.call(world, np.dtype(np.float32), shape) for shape in KERNEL.shapes(world)[3:]]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_the_fault_shows(fault: Fault, tmp_path: Path) -> None:
    module = load(edit(KERNEL.module, fault.edits, tmp_path), KERNEL.module.__name__)
    for world in (2, 3):
        for call in calls(world):
            try:
                call.run(getattr(module, KERNEL.function))
            except (AssertionError, SimulationError):
                return
    pytest.fail("every result is right")
