"""The kernel of `top_k` of 1 in the simulator: right in every interleaving, and planted faults are found."""

import dataclasses
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtaxfree.kernels.collectives import largest
from jaxtaxfree.simulator import DeadlockError, MessageError, OutOfBoundsError, UninitializedReadError
from jaxtaxfree.simulator.scheduler import POLICIES
from tests.helpers.simulator_kernels import Call, load
from tests.simulator.test_simulator_mutants import edit


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of few different numbers, so that the largest occur on several ranks; and of one, of NaN, and of -inf."""

    rows: int
    size: int
    block: int

    def whole(self, world: int, seed: int) -> np.ndarray:
        draw = np.random.default_rng(seed)
        x = draw.integers(-3, 2, (self.rows, world * self.size)).astype(np.float32)
        x[seed % self.rows] = (1.5, -np.inf, np.nan, -2)[seed // 2 % 4]
        x[draw.integers(self.rows), draw.integers(x.shape[1], size=2)] = (-0.0, np.nan)[seed % 2]
        return x

    def call(self, world: int, seed: int) -> Call:
        x = self.whole(world, seed)
        dtype = np.dtype(np.float32) if seed % 3 else np.dtype(jnp.bfloat16)
        at = np.argmax(x, axis=1)  # of equal ones the first, and NaN before all
        out = jax.ShapeDtypeStruct((self.rows,), np.float32), jax.ShapeDtypeStruct((self.rows,), np.int32)
        keywords = {
            "world": world, "out_type": out, "grid": self.rows,
            "messages": {"found": jax.ShapeDtypeStruct((self.rows, world, 2), np.int32)}, "SIZE": self.size,
            "RANKS": 1 << (world - 1).bit_length(), "BLOCK": self.block,
        }  # fmt: skip
        expected = x[np.arange(self.rows), at], at
        return Call(
            arrays=[[part.astype(dtype) for part in np.split(x, world, axis=1)]], keywords=keywords,
            expected=[expected] * world,
        )  # fmt: skip

    def run(self, world: int, seed: int, module: ModuleType = largest) -> None:
        how = {"seed": seed, "policy": POLICIES[seed % len(POLICIES)], "slots": (1, 2, None)[seed % 3]}
        self.call(world, seed).run(module.largest_kernel, **how)


ROWS = (Rows(3, 37, 16), Rows(2, 16, 16), Rows(1, 5, 8))


@pytest.mark.parametrize("world", (2, 3, 4, 8))
@pytest.mark.parametrize("first", (0, pytest.param(12, marks=pytest.mark.soak)))
def test_the_largest_of_all_ranks(world: int, first: int) -> None:
    for seed in range(first, first + (12 if not first else 200)):
        ROWS[seed % 3].run(world, seed)


MUTANTS: dict[str, tuple[tuple[str, str], tuple[type[Exception], ...]]] = {
    "of equal numbers the last one": (("(ALL - position).to(tl.int64)", "position.to(tl.int64)"), (AssertionError,)),
    "a rank's own number is left out": (("0), own)", "0), LEAST)"), (AssertionError, OutOfBoundsError)),
    "positions are a rank's own": (("both(ordered(x.to(tl.float32)), me.rank * SIZE + column)",
                                    "both(ordered(x.to(tl.float32)), column)"), (AssertionError,)),
    "what is behind the row counts": (("tl.where(column < SIZE, number, LEAST)", "number"),
                                      (AssertionError, UninitializedReadError)),
    "a message in another rank's place": (("box + 2 * me.rank + which", "box + which"), (MessageError, DeadlockError)),
    "rows share their messages": (("+ row * (2 * WORLD)", "+ row * 0"), (MessageError, DeadlockError)),
    "a position travels as what does not arrive": (("position_of(own))\n", "position_of(own) * 0 - 1)\n"),
                                                   (AssertionError, MessageError)),
    "negative numbers are not turned": (("tl.where(bits < 0, bits ^ ALL, bits)", "bits"), (AssertionError,)),
    "-0 is less than 0": (("tl.where(x == 0, 0.0, x)", "x"), (AssertionError,)),
    "NaN is a number": (("tl.where(x != x, NAN, ", "tl.where(x != x, 0, "), (AssertionError,)),
    "words are waited for of one rank": (("(rank < WORLD) & (rank != me.rank) &", "(rank == (me.rank + 1) % WORLD) &"),
                                         (AssertionError, MessageError, UninitializedReadError)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fault_is_found(name: str, tmp_path: Path) -> None:
    change, errors = MUTANTS[name]
    module = load(edit(largest, (change,), tmp_path), largest.__name__)
    for seed in range(40):
        try:
            ROWS[seed % 2].run(3, seed, module)
        except errors:
            return
    pytest.fail("nobody noticed")
