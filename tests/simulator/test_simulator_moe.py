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
from jaxtaxfree.simulator.memory import POISON
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
        if seed % 2 and not self.weighted and kernel in ("spread", "dispatch"):
            dtype = np.dtype(np.int8)
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
            how |= host_rows.keywords(f"moe_{kernel}", (self.tokens, self.k), self.d, dtype.itemsize)
            how |= {"TILE": 2, "BLOCK": 16, "grid": (-(-self.tokens // 2), 1 if kernel == "dots" else -(-self.d // 16))}
            del how["axis_name"]
        del how["name"]
        arrays: tuple[Any, ...]
        if kernel in ("spread", "dispatch"):
            arrays = own, place, bundle
            nothing = np.uint8(POISON).view(np.int8) if dtype == np.int8 else np.nan  # what memory is full of before
            expected = [np.full((self.rows, self.d), nothing) for _ in ranks]
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

    def run(self, kernel: str, seed: int, module: ModuleType | None = None) -> None:
        module = module or (exchange if self.world > 1 else rows)
        calls = {} if self.world > 1 else {"calls": 1}
        how = {"seed": seed, "policy": POLICIES[seed % len(POLICIES)], "slots": (1, 2, None)[seed % 3]}
        self.call(kernel, seed).run(getattr(module, f"{kernel}_kernel"), **how, **calls)


SPLIT = (("PROGRAMS", 2), ("STAGES", 2), ("TILE", 2), ("BLOCK", 16))
# Tokens that fill no tile, rows that fill no block, more rows than choices, and more programs than tiles.
ALONE = (Moved(5, 40, 3, 12), Moved(4, 16, 1, 9, weighted=False))
TOGETHER: dict[int, tuple[Moved, ...]] = {
    world: (
        Moved(9, 24, 2, 20, world, settings=SPLIT),
        Moved(3, 16, 3, 12, world, weighted=False, settings=(*SPLIT[:1], ("STAGES", 3), ("TILE", 1), ("BLOCK", 16))),
        Moved(2, 40, 1, 4, world, settings=(("PROGRAMS", 3), ("STAGES", 1), ("TILE", 1), ("BLOCK", 32))),
    )
    for world in (2, 3, 4, 8)
}


@pytest.mark.parametrize("kernel", ("spread", "collect", "dots"))
def test_rows_of_a_rank(kernel: str) -> None:
    for seed, moved in itertools.product(range(2), ALONE):
        moved.run(kernel, seed)


@pytest.mark.parametrize("kernel", ("dispatch", "combine"))
@pytest.mark.parametrize("world", (2, pytest.param(3, marks=pytest.mark.soak)))
def test_rows_of_all_ranks(kernel: str, world: int) -> None:
    for seed in range(4):
        moved = TOGETHER[world]
        moved[seed % len(moved)].run(kernel, seed)


@pytest.mark.soak
@pytest.mark.parametrize("kernel", ("dispatch", "combine"))
@pytest.mark.parametrize("world", TOGETHER)
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_every_interleaving_is_right(kernel: str, world: int, first: int) -> None:
    for seed in range(first, first + (50 if world < 8 else 5)):
        moved = TOGETHER[world]
        moved[seed % len(moved)].run(kernel, seed)


def in_order(world: int, module: ModuleType | None = None) -> None:
    """Compares sums of any numbers bit for bit: by choices, and then by ranks."""
    kernel, moved = ("combine", TOGETHER[world][0]) if world > 1 else ("collect", Moved(9, 40, 4, 40))
    module = module or (exchange if world > 1 else rows)
    call = moved.call(kernel, 1)
    draw = np.random.default_rng(0)
    values, places_of, bundle = call.arrays
    of_ranks = []
    for x, place, weight in zip(values, places_of, bundle["weights"]):
        x[:] = draw.normal(size=x.shape) * 10.0 ** draw.integers(-3, 4, (len(x), 1))
        weight[:] = draw.normal(size=weight.shape)
        total = np.zeros((len(place), x.shape[1]), np.float32)
        for j in range(place.shape[1]):
            there = place[:, j, None] >= 0
            total += np.where(there, x[np.maximum(place[:, j], 0)] * weight[:, j, None], np.float32(0))
        of_ranks.append(total)
    total = np.zeros_like(of_ranks[0])
    for part in of_ranks:
        total += part
    expected = np.split(total, world)
    how = {} if world > 1 else {"calls": 1}
    dataclasses.replace(call, expected=expected).run(getattr(module, f"{kernel}_kernel"), seed=0, **how)


@pytest.mark.parametrize("world", (1, 3))
def test_sums_have_an_order(world: int) -> None:
    in_order(world)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
      name: in the names of tests.
      module: which file has it.
      edits: (text, what to put in its place).
      run: runs the kernel of a module with a seed.
      errors: of which kind the finding must be; an AssertionError is a wrong result.
    """

    name: str
    module: ModuleType
    edits: tuple[tuple, ...]
    run: Callable[[int, ModuleType], None]
    errors: tuple[type[Exception], ...]


def _placed(seed: int, module: ModuleType) -> None:
    placing(CHOICES[1:][seed % 3], seed, module)


def _dispatched(seed: int, module: ModuleType) -> None:
    TOGETHER[2 + seed % 2][seed // 2 % 2].run("dispatch", seed, module)


def _combined(seed: int, module: ModuleType) -> None:
    TOGETHER[2 + seed % 2][seed // 2 % 2].run("combine", seed, module)


WRONG = (AssertionError, OutOfBoundsError, DataRaceError, UninitializedReadError)
EARLY = (DataRaceError, UninitializedReadError)
COUNTED = (*EARLY, SignalCountError)
WAIT = "(me.epoch - 1) * STAGES + stage + 1"
SIGNAL = "            shmem.signal_all(me, meeting + me.rank, WORLD)\n"
BEGIN = "        for stage in range(STAGES):\n            begin, end"
OF_STAGE = "            begin, end = tiles_of(stage, part, TOKENS, PROGRAMS, STAGES, TILE)\n"
SPREAD = "            for i in range(1, WORLD):\n                source ="
ADDED = "            for tile in range(begin, end):\n                token"
ONE_MORE = "            end += 1\n"
# From a copy of the inbox to the other one, in elements.
OTHER_COPY = "(1 - 2 * (me.epoch & 1)) * (inbox[1] * 128 // (box.dtype.element_ty.primitive_bitwidth // 8))"
CHOICE = "    for choice in tl.static_range(CHOICES):\n"
SUMMED = (
    "        place = tl.load(places_ptr + token * CHOICES + choice, mask=there, other=-1)\n        value = load_tile"
)
MUTANTS = (
    Mutant("a row more than there is room for", places, (("MOST - (end", "MOST + 1 - (end"),), _placed, WRONG),
    Mutant(
        "a choice counts itself",
        places,
        (("tl.cumsum(is_kind.to(tl.int32), 0) - 1", "tl.cumsum(is_kind.to(tl.int32), 0)"),),
        _placed,
        WRONG,
    ),
    Mutant("a block counts itself", places, (("other < block", "other <= block"),), _placed, WRONG),
    Mutant(
        "a source's rows begin where the first one's do",
        places,
        (("sizes + before, begin)", "before, begin)"),),
        _placed,
        WRONG,
    ),
    Mutant("sources have no order", places, (("        ahead += tl.sum(count, 0)\n", ""),), _placed, WRONG),
    Mutant(
        "nobody waits for tokens",
        exchange,
        ((f"shmem.wait_all(me, meeting, {WAIT})", "me.ready", 2),),
        _dispatched,
        (*EARLY, SimulationError),
    ),
    Mutant(
        "a stage is taken one too early", exchange, ((WAIT, "(me.epoch - 1) * STAGES + stage", 2),), _dispatched, EARLY
    ),
    Mutant(
        "sums are taken one stage too early",
        exchange,
        ((WAIT, "(me.epoch - 1) * STAGES + stage", 2),),
        _combined,
        EARLY,
    ),
    Mutant(
        "a tile that does not wait for its last row",
        exchange,
        ((OF_STAGE + SPREAD, OF_STAGE + ONE_MORE + SPREAD),),
        _dispatched,
        EARLY,
    ),
    Mutant(
        "a sum that does not wait for its last row",
        exchange,
        ((OF_STAGE + ADDED, OF_STAGE + ONE_MORE + ADDED),),
        _combined,
        EARLY,
    ),
    Mutant(
        "the inbox of the call before",
        exchange,
        (("of_source = box + source", f"of_source = box + {OTHER_COPY} + source"),),
        _dispatched,
        EARLY,
    ),
    Mutant(
        "sums in the inbox of the call before",
        exchange,
        (("load_tile(box + source * TOKENS", f"load_tile(box + {OTHER_COPY} + source * TOKENS"),),
        _combined,
        EARLY,
    ),
    Mutant("signals of the call before", exchange, ((WAIT, "stage + 1", 2),), _dispatched, COUNTED),
    Mutant("sums of the call before", exchange, ((WAIT, "stage + 1", 2),), _combined, COUNTED),
    Mutant(
        "the signal comes before its tokens",
        exchange,
        ((SIGNAL, "", 2), (BEGIN, BEGIN.replace(":\n", ":\n" + SIGNAL), 2)),
        _dispatched,
        COUNTED,
    ),
    Mutant(
        "one stage has no signal",
        exchange,
        ((SIGNAL, SIGNAL.replace("WORLD)", "WORLD, stage > 0)"), 2),),
        _dispatched,
        (DeadlockError, SignalCountError),
    ),
    Mutant(
        "the inbox of another rank",
        exchange,
        (("box + me.rank.to(tl.int64)", "box + ((me.rank + 1) % WORLD).to(tl.int64)", 2),),
        _dispatched,
        WRONG,
    ),
    Mutant(
        "the sum of another rank",
        exchange,
        (("box + source * TOKENS * D", "box + (source + 1) % WORLD * TOKENS * D"),),
        _combined,
        WRONG,
    ),
    Mutant(
        "places of another rank's tokens",
        exchange,
        (("weights, source * TOKENS + token", "weights, token"),),
        _dispatched,
        WRONG,
    ),
    Mutant(
        "sums for another rank",
        exchange,
        (("number = owner * TOKENS + token", "number = me.rank * TOKENS + token"),),
        _combined,
        WRONG,
    ),
    Mutant(
        "a tile that two programs take",
        exchange,
        (("(tile * PROGRAMS + part) * TILE +", "(tile * PROGRAMS + part // 2) * TILE +"),),
        _dispatched,
        WRONG,
    ),
    Mutant(
        "a tile of sums that two programs take",
        exchange,
        (("(tile * PROGRAMS + part) * TILE +", "(tile * PROGRAMS + part // 2) * TILE +"),),
        _combined,
        WRONG,
    ),
    Mutant(
        "choices are added in another order",
        rows,
        (
            (
                CHOICE + SUMMED,
                "    for i in tl.static_range(CHOICES):\n        choice = CHOICES - 1 - i\n" + SUMMED,
            ),
        ),
        lambda seed, module: in_order(1, module),
        (AssertionError,),
    ),
    Mutant(
        "sums begin with one's own",
        exchange,
        (
            (
                "for source in tl.static_range(WORLD):",
                "for i in tl.static_range(WORLD):\n                        source = (me.rank + i) % WORLD",
            ),
        ),
        lambda seed, module: in_order(3, module),
        (AssertionError,),
    ),
    Mutant(
        "what was dropped adds its neighbour",
        rows,
        (("value = load_tile(rows_ptr, place, place >= 0", "value = load_tile(rows_ptr, place, there"),),
        lambda seed, module: ALONE[0].run("collect", seed, module),
        WRONG,
    ),
    Mutant(
        "rows of what was dropped",
        rows,
        (("value, place, place >= 0", "value, place, there"),),
        lambda seed, module: ALONE[0].run("spread", seed, module),
        WRONG,
    ),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    module = load(edit(mutant.module, mutant.edits, tmp_path), mutant.module.__name__)
    for seed in range(SEEDS):
        try:
            mutant.run(seed, module)
        except (SimulationError, AssertionError) as error:
            assert isinstance(error, mutant.errors), error
            return
    pytest.fail(f"not found in {SEEDS} seeds")
