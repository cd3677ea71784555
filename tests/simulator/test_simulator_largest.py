"""The kernel of `top_k` of 1 in the simulator: right in every interleaving, and planted faults are found."""

import dataclasses
import warnings
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtaxfree.kernels.collectives import largest
from jaxtaxfree.simulator import (
    DataRaceError,
    DeadlockError,
    MessageError,
    OutOfBoundsError,
    UninitializedReadError,
    WaitOrderError,
)
from jaxtaxfree.simulator.scheduler import POLICIES
from tests.helpers.simulator_kernels import Call, load
from tests.simulator.test_simulator_mutants import edit


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of few different numbers, so that the largest occur in several parts and on several ranks.

    One row is of equal numbers, of NaN, or of -inf.
    """

    rows: int
    size: int
    part: int
    block: int

    def whole(self, world: int, seed: int) -> np.ndarray:
        draw = np.random.default_rng(seed)
        x = draw.integers(-3, 2, (self.rows, world * self.size)).astype(np.float32)
        x[seed % self.rows] = (1.5, -np.inf, np.nan, -2)[seed // 2 % 4]
        x[draw.integers(self.rows), draw.integers(x.shape[1], size=2)] = (-0.0, np.nan)[seed % 2]
        if seed % 5 == 4:  # the largest are two, and in the last part of a rank
            at = self.size - 1 + self.size * draw.integers(world)
            x[-1] = -np.abs(x[-1]) - 1
            x[-1, [at, at - 1 if self.part > 1 else at]] = -0.5
        return x

    def call(self, world: int, seed: int) -> Call:
        x = self.whole(world, seed)
        dtype = np.dtype(np.float32) if seed % 3 else np.dtype(jnp.bfloat16)
        at = np.argmax(x, axis=1)  # of equal ones the first, and NaN before all
        parts = -(-self.size // self.part)
        out = jax.ShapeDtypeStruct((self.rows,), dtype), jax.ShapeDtypeStruct((self.rows,), np.int32)
        keywords = {
            "world": world, "out_type": out, "grid": self.rows * parts,
            "messages": {"found": jax.ShapeDtypeStruct((self.rows, world, parts, 2), np.int32)}, "SIZE": self.size,
            "PART": self.part, "BLOCK": self.block,
        }  # fmt: skip
        expected = x[np.arange(self.rows), at], at
        return Call(
            arrays=[[part.astype(dtype) for part in np.split(x, world, axis=1)]], keywords=keywords,
            expected=[expected] * world,
        )  # fmt: skip

    def run(self, world: int, seed: int, module: ModuleType = largest) -> None:
        how = {"seed": seed, "policy": POLICIES[seed % len(POLICIES)], "slots": (1, 2, None)[seed % 3]}
        self.call(world, seed).run(module.largest_kernel, **how)


ROWS = (
    Rows(3, 37, 16, 16),  # the last part has fewer numbers
    Rows(2, 32, 16, 16),
    Rows(2, 37, 37, 16),  # one part, in several steps
    Rows(2, 40, 24, 16),  # several parts, in several steps each
    Rows(1, 5, 5, 8),
)


@pytest.mark.parametrize("world", (2, 3, 4, 8))
@pytest.mark.parametrize("first", (0, pytest.param(20, marks=pytest.mark.soak)))
def test_the_largest_of_all_ranks(world: int, first: int) -> None:
    for seed in range(first, first + (20 if not first else 200)):
        ROWS[seed % len(ROWS)].run(world, seed)


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_the_largest_of_many_orders(row: int) -> None:
    for seed in range(8):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ROWS[row].run(3, seed)


SENT = "2 * (me.rank * PARTS + part) + which"
WRONG = (AssertionError, MessageError)
LOST = (MessageError, DeadlockError)
MUTANTS: dict[str, tuple[tuple[str, str], tuple[type[Exception], ...]]] = {
    "of equal numbers the last one": (("tl.min(tl.where(number == most, place, ALL), 0)",
                                       "tl.max(tl.where(number == most, place, 0), 0)"), (AssertionError,)),
    "of equal numbers of two steps the last one": (("tl.where(now > number, at", "tl.where(now >= number, at"),
                                                   (AssertionError,)),
    "a place is that of another number": (("tl.where(number == most, place, ALL)", "place"), (AssertionError,)),
    "positions are a rank's own": (("me.rank * SIZE + column", "column"), (AssertionError,)),
    "positions are a part's own": (("at = start + within", "at = within"), (AssertionError,)),
    "what is behind the row counts": (("(within < PART) & (at < SIZE)", "within < PART"),
                                      (AssertionError, OutOfBoundsError, UninitializedReadError)),
    "what is behind the last step counts": (("tl.where(there, ordered(x.to(tl.float32)), LEAST)",
                                             "ordered(x.to(tl.float32))"), (AssertionError, UninitializedReadError)),
    "a part that no rank has counts": (("tl.where(sent, number, LEAST)", "number"), (AssertionError,)),
    "a message in another rank's place": ((SENT, "2 * part + which"), LOST),
    "a message in another part's place": ((SENT, "2 * me.rank * PARTS + which"), LOST),
    "rows share their messages": (("+ row * (2 * WORLD * PARTS)", "+ row * 0"), LOST),
    "a rank sends itself nothing": (("peer, peer < WORLD)", "peer, (peer < WORLD) & (peer != me.rank))"), LOST),
    "a program waits for later ones": (("if part == PARTS - 1:", "if part == 0:"), (WaitOrderError, DeadlockError)),
    "every program of a row receives": (("if part == PARTS - 1:", "if part >= 0:"),
                                        (WaitOrderError, DeadlockError, DataRaceError)),
    "a position travels as what does not arrive": (("me.rank * SIZE + column", "-1"), WRONG),
    "negative numbers are not turned": (("tl.where(bits < 0, bits ^ ALL, bits)", "bits"), (AssertionError,)),
    "-0 is less than 0": (("tl.where(x == 0, 0.0, x)", "x"), WRONG),
    "NaN is a number": (("tl.where(x != x, NAN, ", "tl.where(x != x, 0, "), (AssertionError,)),
    "words are waited for of one rank": (("sent[:, None] & (which >= 0)",
                                          "(pair[:, None] // PARTS == (me.rank + 1) % WORLD) & (which >= 0)"),
                                         (*WRONG, UninitializedReadError)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fault_is_found(name: str, tmp_path: Path) -> None:
    change, errors = MUTANTS[name]
    module = load(edit(largest, (change,), tmp_path), largest.__name__)
    for seed in range(40):
        try:
            ROWS[seed % 4].run(3, seed, module)
        except errors:
            return
    pytest.fail("nobody noticed")
