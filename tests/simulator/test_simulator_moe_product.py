"""Dispatch and first product of `moe` in one launch, in the simulator: right, and planted faults are found."""

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtaxfree.kernels.moe import dispatch_product
from jaxtaxfree.ops.moe.dispatch_product import Launch
from jaxtaxfree.ops.ragged_dot.hopper import Config
from jaxtaxfree.simulator import DataRaceError, MissingFenceError, UninitializedReadError
from jaxtaxfree.simulator.scheduler import POLICIES
from tests.helpers.simulator_kernels import Call, load
from tests.simulator.test_simulator_mutants import edit

BF16 = np.dtype(jnp.bfloat16)
TILE = Config(block_n=64, block_k=32, num_stages=2, group_m=2, programs=2)
# Tokens of a rank, ranks, and groups with early tiles: without whole blocks of own rows, and with some in some groups,
# in all, and in none of them; tokens that fill no stage.
CASES = ((70, 2, 2), (150, 2, 1), (151, 2, 2), (150, 2, 0), (150, 3, 2))


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A layer of two experts a rank, of small whole numbers."""

    tokens: int
    world: int
    early: int
    k: int = 2
    d: int = 48
    f: int = 40
    groups: int = 2

    def call(self, seed: int) -> Call:
        draw = np.random.default_rng(seed)
        everybody = self.world * self.tokens
        most = everybody * self.k
        y = draw.integers(-2, 3, (everybody, self.d))
        arrays, expected = [], []
        for rank in range(self.world):
            # Also of no expert of this rank; or 129 of each rank's rows of one, the others of the other one, or all.
            experts = draw.integers(-1 + seed % 2, self.groups + 1, (everybody, self.k))
            if seed % 4 >= 2:
                experts[:] = 1
            if seed % 4 == 2:
                experts.reshape(self.world, -1)[:, :129] = 0
            there = sorted(
                map(tuple, np.argwhere((experts >= 0) & (experts < self.groups))), key=lambda at: experts[at]
            )
            places = np.full(experts.shape, -1, np.int32)
            counts = np.zeros((self.world, self.groups), np.int32)
            up, gate = draw.integers(-2, 3, (2, self.groups, self.d, self.f)) / np.array([1, 8])[:, None, None, None]
            out, rows = (np.full((most, n), np.nan) for n in (self.f, self.d))
            for row, at in enumerate(there):
                places[at] = row
                counts[at[0] // self.tokens, experts[at]] += 1
                rows[row] = y[at[0]]
                gated = y[at[0]] @ gate[experts[at]]
                out[row] = (y[at[0]] @ up[experts[at]]) * gated / (1 + np.exp(-gated))
            own = y[rank * self.tokens :][: self.tokens].astype(BF16)
            ends = np.cumsum(counts, 0, dtype=np.int32)
            arrays.append((own, own, places, ends, up.astype(BF16), gate.astype(BF16)))
            expected.append((out, rows))
        launch = Launch(tile=TILE, early=self.early)
        how = launch.keywords(self.tokens, self.k, most, (self.groups, self.d, self.f), BF16, self.world)
        del how["name"]
        how |= {"world": self.world, "ACTIVATION": "silu"}
        # Of 32 bits, which show what the sums are.
        how["out_type"][0] = jax.ShapeDtypeStruct((most, self.f), np.float32)
        how["descriptors"] |= {"out_desc": (1, 1, 64, 16)}
        *operands, up, gate = map(list, zip(*arrays))
        given: Any = (*operands, {"rhs": up, "gate": gate})
        return Call(arrays=given, keywords=how, expected=expected, tolerance=1e-4)

    def run(self, seed: int, module: ModuleType = dispatch_product) -> None:
        policy = POLICIES[seed % len(POLICIES)]
        self.call(seed).run(module.dispatch_product_kernel, seed=seed, policy=policy, slots=None, calls=2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_and_products_are_right(case: tuple[int, int, int]) -> None:
    for seed in range(4):
        Drawn(*case).run(seed)


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_interleaving_is_right(case: tuple[int, int, int]) -> None:
    for seed in range(20):
        Drawn(*case).run(seed)


NEEDED = "needed = gl.where(tile < own, 1, 2)"
OWN = "    spread(rows_ptr, y_ptr, places_ptr, me.rank, begin, end, me.ready, tokens)\n"
ARRIVE = "    shmem.arrive(me, placed)\n"
EARLY = (DataRaceError, UninitializedReadError)
MUTANTS: dict[str, tuple[tuple[str, str], tuple[type[Exception], ...]]] = {
    "an own tile waits for nobody": (("if needed > waited", "if (needed == 2) & (waited < 2)"), EARLY),
    "a mixed tile waits for own rows alone": ((NEEDED, "needed = 1"), EARLY),
    "a tile does not wait for the last program": (("me.epoch * gl.num_programs(0))", "me.epoch * 2 - 1)"), EARLY),
    "a block that is not full is an own one": (
        ("last = end // work.BLOCK_M", "last = (end + work.BLOCK_M - 1) // work.BLOCK_M"),
        EARLY,
    ),
    "a block with a peer's first rows is an own one": (
        ("first = (before + work.BLOCK_M - 1) // work.BLOCK_M", "first = before // work.BLOCK_M"),
        EARLY,
    ),
    "the count of the ranks before is one too low": (
        ("before = gl.load(", "before = -1 + gl.load("),
        EARLY,
    ),
    "a stage is taken one too early": (("+ stage + 1)", "+ stage)"), EARLY),
    "own rows are said to be there before they are": ((OWN + ARRIVE, ARRIVE + OWN), EARLY),
    "TMA reads what no fence has shown it": (("            shmem.fence_proxy()\n", ""), (MissingFenceError,)),
    "other blocks are the own ones again": (
        ("gl.where(m >= first, count, 0)", "gl.where(m >= first, 0, 0)"),
        (AssertionError, DataRaceError),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_faults_are_found(name: str, tmp_path: Path) -> None:
    change, errors = MUTANTS[name]
    module: Any = load(edit(dispatch_product, (change,), tmp_path), "mutant")
    with pytest.raises(errors):
        for seed in range(2, 8):
            Drawn(150, 2, 2).run(seed, module)
