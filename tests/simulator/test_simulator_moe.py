"""The kernels of `moe` in the simulator: right for all choices, in every interleaving, and planted faults are found."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtaxfree.kernels.moe import exchange, places, rows
from jaxtaxfree.ops.moe import exchange as host_exchange
from jaxtaxfree.ops.moe import rows as host_rows
from jaxtaxfree.ops.moe.places import Launches
from jaxtaxfree.simulator import (
    DataRaceError,
    DeadlockError,
    OutOfBoundsError,
    SignalCountError,
    SimulationError,
    UninitializedReadError,
)
from jaxtaxfree.simulator.scheduler import POLICIES
from tests.helpers.simulator_kernels import Call, load
from tests.simulator.test_simulator_mutants import edit

BF16 = np.dtype(jnp.bfloat16)
SEEDS = 12


@dataclasses.dataclass(frozen=True)
class Choices:
    """Experts of the tokens of some sources, and where their rows are, counted one by one."""

    sources: int
    tokens: int
    k: int
    count: int
    most: int

    def experts(self, seed: int) -> np.ndarray:
        draw = np.random.default_rng(seed)
        found = draw.integers(-1, self.count + 1, (self.sources * self.tokens, self.k))
        if seed % 4 == 0:
            found[:] = seed % self.count
        if seed % 4 == 1:
            found[found % 3 == 1] = -(2**31)
        return found.astype(np.int32)

    def places(self, experts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        there = [tuple(at) for at in np.argwhere((experts >= 0) & (experts < self.count))]
        taken = sorted(there, key=lambda at: (at[0] // self.tokens, experts[at], *at))[: self.most]
        found = np.full(experts.shape, -1, np.int32)
        for row, at in enumerate(sorted(taken, key=lambda at: (experts[at], *at))):
            found[at] = row
        sizes = np.bincount([experts[at] for at in taken], minlength=self.count)
        return found, sizes.astype(np.int32)


CHOICES = (
    Choices(1, 9, 3, 5, 1000),
    Choices(3, 40, 2, 20, 1000),
    Choices(2, 30, 4, 3, 100),
    Choices(2, 3, 1, 4, 4),
)


@dataclasses.dataclass(frozen=True)
class Small(Launches):
    """With blocks so small that there are several."""

    @property
    def block(self) -> int:
        return 16


def placing(choices: Choices, seed: int, module: ModuleType = places, **run: Any) -> None:
    """Counts, and then places."""
    experts = choices.experts(seed)
    flat = experts.reshape(-1)
    launches = Small(choices=flat.size, count=choices.count, sources=choices.sources, most=choices.most)
    blocks = np.full((choices.sources * launches.blocks, 16), -1, np.int32)
    for source in range(choices.sources):
        own = flat.reshape(choices.sources, -1)[source]
        for i in range(launches.blocks):
            part = own[16 * i : 16 * i + 16]
            blocks[source * launches.blocks + i, : part.size] = part
    counts = np.stack([(blocks == e).sum(1) for e in range(choices.count)], axis=1).astype(np.int32)
    for kernel, arrays, how, expected in (
        (module.count_kernel, (flat,), launches.counting(), counts),
        (module.place_kernel, (flat, counts), launches.placing(), choices.places(experts)),
    ):
        how = {name: value for name, value in how.items() if name not in ("axis_name", "name")}
        if kernel is module.place_kernel:
            how["STEP"] = 2
            expected = (expected[0].reshape(-1), expected[1])
        call = Call(arrays=tuple([x] for x in arrays), keywords={"world": 1, **how}, expected=[expected])
        call.run(kernel, seed=seed, calls=1, **run)


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_every_choice_has_its_place(choices: Choices) -> None:
    for seed in range(5):
        placing(choices, seed)


@dataclasses.dataclass(frozen=True)
class Moved:
    """Rows of tokens, of small whole numbers, so that every sum is exact.

    Attributes:
      tokens: of a rank.
      world: ranks; 1 for a kernel that works alone.
    """

    tokens: int
    d: int
    k: int
    rows: int
    world: int = 1
    weighted: bool = True
    settings: tuple[tuple[str, int], ...] = ()

    def call(self, kernel: str, seed: int) -> Call:
        draw = np.random.default_rng(seed)
        dtype = np.dtype(np.float32) if seed % 2 else BF16
        small = lambda *shape: draw.integers(-2, 3, shape)  # noqa: E731
        everybody, ranks = self.world * self.tokens, range(self.world)
        y = small(everybody, self.d)
        place, weight, full = [], [], []
        for _ in ranks:
            at = np.full(everybody * self.k, -1)
            some = draw.permutation(at.size)[: min(self.rows, at.size * 3 // 4)]
            at[some] = draw.permutation(self.rows)[: some.size]
            place.append(at.reshape(everybody, self.k).astype(np.int32))
            weight.append(small(everybody, self.k) if self.weighted else np.ones((everybody, self.k)))
            full.append(small(self.rows, self.d))
        bundle = {"weights": [w.astype(np.float32) for w in weight]} if self.weighted else {}
        own = [y[rank * self.tokens :][: self.tokens].astype(dtype) for rank in ranks]
        rows_of = [x.astype(dtype) for x in full]
        each = [np.where(p[..., None] < 0, 0, x[np.maximum(p, 0)]) for p, x in zip(place, full)]  # [T, k, D]
        how: dict[str, Any] = {"world": self.world}
        if kernel in ("dispatch", "combine"):
            how |= host_exchange.keywords(f"moe_{kernel}", self.tokens, self.k, self.d, dtype, self.world)
            how |= dict(self.settings)
            how["grid"] = 2 * how["PROGRAMS"]
            how["signals"] = {"arrived": (how["PROGRAMS"], self.world)}
        else:
            how |= host_rows.keywords(f"moe_{kernel}", self.tokens, self.k, self.d, dtype.itemsize)
            how |= {"TILE": 2, "BLOCK": 16, "grid": (-(-self.tokens // 2), 1 if kernel == "dots" else -(-self.d // 16))}
            del how["axis_name"]
        del how["name"]
        arrays: tuple[Any, ...]
        if kernel in ("spread", "dispatch"):
            arrays = own, place, bundle
            expected = [np.full((self.rows, self.d), np.nan) for _ in ranks]
            for out, p, w in zip(expected, place, weight):
                for t, j in np.argwhere(p >= 0):
                    out[p[t, j]] = y[t] * w[t, j]
            how["out_type"] = jax.ShapeDtypeStruct((self.rows, self.d), dtype)
        elif kernel == "dots":
            arrays = rows_of, own, place
            expected = [np.einsum("tkd,td->tk", each[0], y)]
            how["out_type"] = jax.ShapeDtypeStruct((self.tokens, self.k), np.float32)
        else:
            arrays = rows_of, place, bundle
            total = sum(np.einsum("tkd,tk->td", x, w) for x, w in zip(each, weight))
            expected = [total[rank * self.tokens :][: self.tokens] for rank in ranks]
            how["out_type"] = jax.ShapeDtypeStruct((self.tokens, self.d), dtype)
        return Call(arrays=arrays, keywords=how, expected=expected)

    def run(self, kernel: str, seed: int, module: ModuleType, **settings: Any) -> None:
        call = self.call(kernel, seed)
        try:
            call.run(getattr(module, f"{kernel}_kernel"), seed=seed, **settings)
        except UninitializedReadError:
            raise
