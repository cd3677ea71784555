"""`ragged_dot` in the simulator: right in every interleaving, and planted faults are found."""

import dataclasses
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtaxfree.kernels.blocks import hopper as blocks
from jaxtaxfree.kernels.blocks import ragged, widen
from jaxtaxfree.kernels.ragged_dot import hopper, portable
from jaxtaxfree.ops.operand import Operand
from jaxtaxfree.ops.ragged_dot.common import Call as RaggedCall
from jaxtaxfree.ops.ragged_dot.variants import VARIANTS, VARIANTS_OF_WEIGHTS
from jaxtaxfree.ops.variant import named
from jaxtaxfree.simulator import (
    DataRaceError,
    DeadlockError,
    MbarrierError,
    OutOfBoundsError,
    SimulationError,
    UnfinishedOperationError,
    UninitializedReadError,
)
from jaxtaxfree.simulator.scheduler import POLICIES
from jaxtaxfree.target import HOPPER
from tests.helpers.ragged_dot_cases import Grouped, garbage
from tests.helpers.simulator_kernels import Call, load
from tests.simulator.test_simulator_mutants import edit

SEEDS = 6
BF16 = np.dtype(jnp.bfloat16)
TILE = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 2}
RING = {"block_n": 32, "block_k": 16, "num_stages": 2, "programs": 2, "group_m": 2}
# Sizes that end within blocks and at their ends; groups that are empty, of one row, and all rows; rows behind the last.
SIZES = (
    (150, (7, 0, 70, 41)),
    (130, (0, 0, 129, 1)),
    (96, (64, 32)),
    (70, (70,)),
    (40, (0, 0, 0)),
)
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"rhs_transposed": True},
    {"gated": True, "activation": "silu"},
    {"of_weights": True},
    {"fill": False},
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kernel, and how it is called."""

    name: str
    mode: int
    settings: dict[str, Any]

    @property
    def module(self) -> ModuleType:
        return hopper if self.name == "hopper" else portable

    @property
    def of_weights(self) -> bool:
        return MODES[self.mode].get("of_weights", False)

    def call(self, seed: int, k: int = 24, n: int = 40) -> Call:
        m, sizes = SIZES[seed % len(SIZES)]
        case = Grouped(m, k, n, sizes)
        dtype = BF16 if self.name == "hopper" or seed % 2 else np.dtype(np.float32)
        lhs, rhs, groups, ct = case.arrays(dtype, seed)
        mode = MODES[self.mode]
        call = RaggedCall(
            m=m, k=k, n=n, groups=len(sizes), operand=Operand(dtype=dtype), out_dtype=np.dtype(np.float32),
            precision="ieee", target=HOPPER, **mode,
        )  # fmt: skip
        variant = named("ragged_dot", VARIANTS_OF_WEIGHTS if self.of_weights else VARIANTS, self.name)
        config = variant.Config(**self.settings)
        keywords = variant.launch(call, config)
        del keywords["axis_name"], keywords["name"]
        if self.of_weights:
            expected, weights = case.of_weights(lhs, ct), {"rhs": ct}
        else:
            expected, weights = case.product(lhs, rhs), {"rhs": rhs.swapaxes(1, 2) if call.rhs_transposed else rhs}
        if not call.fill:
            expected[sum(sizes) :] = np.nan  # as the simulator shows what nobody wrote
        if call.gated:
            gate = (rhs[::-1] / 8).astype(dtype)
            gates = case.product(lhs, gate)
            expected, weights = expected * gates / (1 + np.exp(-gates)), weights | {"gate": gate}
        arrays = variant.arrays(call, config, [lhs], {name: [x] for name, x in weights.items()}, [groups])
        tolerance = 1e-4 if call.gated else 0
        return Call(arrays=arrays, keywords={"world": 1, **keywords}, expected=[expected], tolerance=tolerance)

    def run(self, seed: int, module: ModuleType | None = None) -> None:
        module = module or self.module
        function = "ragged_dot_hopper_kernel" if self.name == "hopper" else "ragged_dot_kernel"
        if self.name == "portable" and self.of_weights:
            function = "ragged_dot_weights_kernel"
        policy = POLICIES[seed % len(POLICIES)]
        self.call(seed).run(getattr(module, function), seed=seed, policy=policy, slots=(1, 2, None)[seed % 3], calls=1)


# Of operands of 8 bits: steps of K, of which the last one is not full.
TURNED = {"turned": True, "block_m": 16, "block_n": 64, "block_k": 32, "num_stages": 2, "programs": 2, "group_m": 2}
BY_BLOCKS = RING | {"block_n": 256, "block_k": 128}
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


@dataclasses.dataclass(frozen=True)
class EightBits(Kind):
    """The kernel for Hopper with operands of 8 bits and scales.

    Attributes:
      dtypes: of lhs and of the weights.
      gated: there is a gate, with SwiGLU.
      scaled: which have scales, "lhs_blocks" and so on of blocks.
    """

    dtypes: tuple[str, str] = (E4M3, E4M3)
    gated: bool = False
    scaled: tuple[str, ...] = ("lhs", "rhs", "gate")

    def call(self, seed: int, k: int = 48, n: int | None = None) -> Call:
        if any(name.endswith("_blocks") for name in self.scaled):
            k, n = k + 256, n or 400
        n = n or max(72, self.settings["block_n"] - 48 if not self.gated else 0)
        m, sizes = SIZES[seed % len(SIZES)]
        case = Grouped(m, k, n, sizes)
        lhs, rhs, groups, _ = case.arrays(np.float32, seed)
        weights = {"rhs": rhs, "gate": rhs[::-1] / 2} if self.gated else {"rhs": rhs}
        draw = np.random.default_rng(seed)
        # Powers of 2, with which every order of multiplying gives the same; of rows that nobody has, NaN.
        scales = {"lhs": 2.0 ** draw.integers(-3, 3, m)} | {
            name: 2.0 ** draw.integers(-3, 3, (len(sizes), n)) for name in weights
        }
        steps, wide = -(-k // 128), -(-n // 128)
        scales["lhs_blocks"] = 2.0 ** draw.integers(-3, 3, (m, steps))
        scales |= {f"{name}_blocks": 2.0 ** draw.integers(-3, 3, (len(sizes), wide, steps)) for name in weights}
        for name in weights:
            scales[f"{name}_blocks"][len(sizes) // 2, :, 0] = 0.0
        scales["lhs"][sum(sizes) :] = scales["lhs_blocks"][sum(sizes) :] = np.nan
        for name in weights:  # and NaN of empty groups
            scales[f"{name}_blocks"][np.array(sizes) == 0] = np.nan
        scales = {name: scale.astype(np.float32) for name, scale in scales.items() if name in self.scaled}
        left, right = (jnp.dtype(dtype) for dtype in self.dtypes)
        call = RaggedCall(
            m=m, k=k, n=n, groups=len(sizes), operand=Operand(dtype=left), narrow=Operand(dtype=right),
            scales=tuple(scales), out_dtype=np.dtype(np.float32), precision="", target=HOPPER, gated=self.gated,
            activation="silu" if self.gated else None, rhs_transposed=True,
        )  # fmt: skip
        if right == np.int8:  # of which there are no halves
            weights = {name: np.round(x) for name, x in weights.items()}
        rows = np.arange(m) < sum(sizes)
        of_rows = np.where(rows, scales["lhs"], 1)[:, None] if "lhs" in scales else 1
        products = []
        left_factors = np.ones((m, k))
        if "lhs_blocks" in scales:
            left_factors = np.where(rows[:, None], np.repeat(scales["lhs_blocks"], 128, 1)[:, :k], 1)
        for name, x in weights.items():
            if f"{name}_blocks" in scales:
                blocks_of_k = scales[f"{name}_blocks"].swapaxes(1, 2)
                factors = np.repeat(np.repeat(blocks_of_k, 128, 1), 128, 2)[:, :k, :n]
                x = x * np.where(np.isnan(factors), 0, factors)
            products.append(case.product(lhs * left_factors, x * scales.get(name, np.ones(1))[:, None]) * of_rows)
        expected = products[0] if not self.gated else products[0] * products[1] / (1 + np.exp(-products[1]))
        variant = named("ragged_dot", VARIANTS, "hopper")
        config = variant.Config(**self.settings)
        assert variant.refuses(call, config) == []
        keywords = variant.launch(call, config)
        del keywords["axis_name"], keywords["name"]
        turned = {name: [x.swapaxes(1, 2).astype(right)] for name, x in weights.items()}
        arrays = variant.arrays(
            call, config, [lhs.astype(left)], turned, [groups], {name: [scale] for name, scale in scales.items()}
        )
        tolerance = 1e-4 if self.gated else 0
        return Call(arrays=arrays, keywords={"world": 1, **keywords}, expected=[expected], tolerance=tolerance)


EIGHT = {
    "e4m3": EightBits("hopper", 0, RING | {"block_k": 32}),
    "e4m3-halves": EightBits("hopper", 0, RING | {"block_k": 32, "block_n": 256, "block_m": 64}, scaled=("rhs",)),
    "e4m3-gated": EightBits("hopper", 0, RING | {"block_k": 32, "block_n": 64}, gated=True),
    "e4m3-gated-halves": EightBits("hopper", 0, RING | {"block_k": 32, "block_n": 256}, (E4M3, E5M2), gated=True),
    "int8": EightBits("hopper", 0, RING | {"block_k": 32}, ("int8", "int8")),
    "e4m3-turned": EightBits("hopper", 0, TURNED),
    "int8-turned": EightBits("hopper", 0, TURNED | {"block_n": 128}, ("int8", "int8"), scaled=("lhs",)),
    "bf16-int8": EightBits("hopper", 0, TURNED, ("bfloat16", "int8"), scaled=("rhs",)),
    "bf16-e4m3": EightBits("hopper", 0, TURNED | {"block_n": 128}, ("bfloat16", E4M3), scaled=("rhs",)),
    "f16-e5m2-gated": EightBits("hopper", 0, TURNED | {"block_n": 256}, ("float16", E5M2), True, ("rhs", "gate")),
    "e4m3-blocks": EightBits("hopper", 0, BY_BLOCKS, scaled=("lhs_blocks", "rhs_blocks")),
    "e4m3-blocks-narrow": EightBits(
        "hopper", 0, BY_BLOCKS | {"block_n": 64, "block_m": 64}, scaled=("lhs", "rhs_blocks")
    ),
    "int8-blocks": EightBits("hopper", 0, BY_BLOCKS | {"block_n": 128}, ("int8", "int8"), scaled=("lhs_blocks", "rhs")),
    "e4m3-blocks-gated": EightBits(
        "hopper", 0, BY_BLOCKS, (E5M2, E4M3), True, ("lhs_blocks", "rhs_blocks", "gate_blocks")
    ),
    "e4m3-blocks-gated-narrow": EightBits(
        "hopper", 0, BY_BLOCKS | {"block_n": 128}, gated=True, scaled=("lhs_blocks", "rhs_blocks", "gate_blocks")
    ),
}
KINDS = EIGHT | {
    f"{name}-{'-'.join(map(str, MODES[mode])) or 'plain'}{more}": Kind(name, mode, settings)
    for (name, settings, more), mode in itertools.product(
        (("portable", TILE, ""), ("hopper", RING, ""), ("hopper", RING | {"block_m": 64}, "-64")), range(len(MODES))
    )
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@each_kind
def test_every_shape_is_right(kind: Kind) -> None:
    for seed in range(len(SIZES)):
        kind.run(seed)


@pytest.mark.soak
@each_kind
@pytest.mark.parametrize("first", range(0, 300, 30))
def test_every_interleaving_is_right(kind: Kind, first: int) -> None:
    for seed in range(first, first + 30):
        kind.run(seed)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
      name: in the names of tests.
      kind: which kernel is run.
      edits: (text, what to put in its place).
      errors: of which kind the finding must be; an AssertionError is a wrong result.
      module: the text is one of this, which the kernel uses.
    """

    name: str
    kind: str
    edits: tuple[tuple[str, str], ...]
    errors: tuple[type[Exception], ...]
    module: ModuleType | None = None


WRONG = (AssertionError, DataRaceError, OutOfBoundsError, UninitializedReadError)
RACES = (DataRaceError, UninitializedReadError, MbarrierError)
MUTANTS = (
    Mutant(
        "a tile that two programs take",
        "hopper-plain",
        (("return wave * gl.num_programs(0) + place", "return wave * (gl.num_programs(0) - 1) + place"),),
        (DataRaceError,),
    ),
    Mutant(
        "waves that turn round one place too far",
        "hopper-of_weights",
        (("gl.num_programs(0) - 1 - place)", "gl.num_programs(0) - place)"),),
        WRONG,
    ),
    Mutant(
        "equal groups in one place",
        "hopper-of_weights",
        ((" | ((other == own) & (i < groups.index))", ""),),
        WRONG,
        module=ragged,
    ),
    Mutant(
        "the last tile of nobody",
        "hopper-plain",
        (("count = ragged.blocks_of(groups) * columns", "count = ragged.blocks_of(groups) * columns - 1"),),
        WRONG,
    ),
    Mutant(
        "the last row of a group is missed",
        "portable-plain",
        (("rows = tl.minimum(at.size - at.row, BLOCK_M)", "rows = tl.minimum(at.size - at.row - 1, BLOCK_M)"),),
        WRONG,
    ),
    Mutant(
        "the last row of a group is missed by TMA",
        "hopper-plain",
        (("END - at.size + row", "END - at.size + row + 1"),),
        WRONG,
        module=ragged,
    ),
    Mutant(
        "rows behind a group are contracted",
        "hopper-of_weights",
        (("at.begin + at.size, END - at.size + row", "at.begin + at.size + 1, END - at.size - 1 + row"),),
        WRONG,
        module=ragged,
    ),
    Mutant(
        "rows behind a group are contracted",
        "portable-of_weights",
        (("there = row[:, None] < at.size - first", "there = row[:, None] <= at.size - first"),),
        WRONG,
    ),
    Mutant(
        "weights of the wrong group",
        "portable-plain",
        (("own = (weights[0] + at.group.to(tl.int64)", "own = (weights[0] + (at.group // 2).to(tl.int64)"),),
        WRONG,
    ),
    Mutant(
        "rows of the group before",
        "hopper-plain",
        (("begin = tl.max(tl.where(before, groups.ends, 0), 0)", "begin = first * 0"),),
        WRONG,
        module=ragged,
    ),
    Mutant(
        "sizes counted without the blocks that are not full",
        "portable-plain",
        (("(sizes + (BLOCK_M - 1)) // BLOCK_M", "sizes // BLOCK_M"),),
        (*WRONG, UnfinishedOperationError),
        module=ragged,
    ),
    Mutant(
        "nobody fills the rows behind the last group",
        "portable-plain",
        (("sizes = tl.where(index == GROUPS, rest, sizes)", "sizes = tl.where(index == GROUPS, 0, sizes)"),),
        WRONG,
        module=ragged,
    ),
    Mutant(
        "a stage is free too early",
        "hopper-plain",
        (("mbarrier.arrive(ring.empty.index(previous), count=1, pred=step > 0)",
          "mbarrier.arrive(ring.empty.index(stage), count=1)"),
         ("mbarrier.arrive(ring.empty.index(previous), count=1, pred=steps > 0)", "pass")),
        RACES,
    ),
    Mutant(
        "rows that do not exist keep their stage",
        "hopper-plain",
        (("                mbarrier.arrive(ring.empty.index(stage), count=1)\n", ""),),
        (DeadlockError,),
    ),
    Mutant(
        "a store is read while the next one is written",
        "hopper-plain",
        (("tma.store_wait(1)", "tma.store_wait(2)"),),
        (DataRaceError,),
    ),
    Mutant(
        "no fence before a store",
        "hopper-plain",
        (("    fence_async_shared()\n", ""),),
        (SimulationError,),
    ),
    *(
        Mutant(f"8 bits, {name}", kind, ((old, new),), WRONG)
        for name, kind, old, new in (
            ("scales of another group", "e4m3", "of_columns + at.group.to(gl.int64) * work.N", "of_columns"),
            ("scales of other columns", "e4m3-halves", "column += NUMBER * WIDTH", "column += 0"),
            ("scales of the other partition's columns", "bf16-e4m3", "PARTITION * (work.BLOCK_N // work.PARTITIONS)",
             "0 * (work.BLOCK_N // work.PARTITIONS)"),
            ("scales of the group before", "int8", "of_rows + at.begin + m", "of_rows + m"),
            ("scales of rows that nobody has", "e4m3", "there = (m < at.size) & (at.group < work.GROUPS)",
             "there = m < at.size"),
            ("scales of rhs for the gate", "f16-e5m2-gated", 'scale(gate, scales, "gate"', 'scale(gate, scales, "rhs"'),
            ("sums of one step alone", "e4m3", "left += blocks.sums_of_step", "left = blocks.sums_of_step"),
            ("sums of one half", "e4m3-halves", "right += blocks.sums_of_step", "left += blocks.sums_of_step"),
            ("columns for those of the gate", "f16-e5m2-gated", "stage, work.BLOCK_N + FIRST", "stage, FIRST"),
            ("columns of the first partition", "int8-turned", "FIRST: gl.constexpr = PARTITION * COLUMNS",
             "FIRST: gl.constexpr = 0 * COLUMNS"),
        )
    ),
    *(
        Mutant(f"scales of blocks, {name}", kind, ((old, new),), WRONG, module)
        for name, kind, old, new, module in (
            ("those of another group", "e4m3-blocks", "above = (gl.minimum(at.group, work.GROUPS - 1)",
             "above = (gl.minimum(at.group, 0)", None),
            ("rows of another group", "int8-blocks", "rows += (at.begin + row)", "rows += (at.begin * 0 + row)", None),
            ("rows that nobody has", "e4m3-blocks", "at.size - row, 0)", "at.size - row + 1, 0) * 0 + work.M", None),
            ("columns of the first block", "e4m3-blocks-narrow", "BLOCKS + block).to", "BLOCKS).to", None),
            ("the left half for the right one", "e4m3-blocks", "further = gl.minimum(1,",
             "further = gl.minimum(0,", None),
            ("the next step for the right half", "e4m3-blocks", "BLOCKS - 1 - block) * STEPS",
             "BLOCKS - 1 - block)", None),
            ("rows that lie one behind the other", "int8-blocks", "Factors(rows, 1, STEPS,",
             "Factors(rows, 1, 1,", None),
            ("the first step of rows", "int8-blocks", "Factors(rows, 1, STEPS,", "Factors(rows, 0, STEPS,", None),
            ("the first step of columns", "e4m3-blocks", "gates, further, 1)", "gates, further, 0)", None),
            ("rhs for the gate", "e4m3-blocks-gated", "gl.load(factors.gates +", "gl.load(factors.columns +", blocks),
            ("the step before", "int8-blocks", "factors_of(factors, gl.minimum(2 * pair + 2, last)",
             "factors_of(factors, gl.minimum(2 * pair + 1, last)", blocks),
            ("the step before, of halves", "e4m3-blocks", "factors_of(factors, gl.minimum(step + 1, last)",
             "factors_of(factors, gl.minimum(step, last)", blocks),
        )
    ),
    Mutant("bytes in each other's place", "bf16-int8", (("gl.join(low, high)", "gl.join(high, low)"),), WRONG, widen),
    Mutant(
        "a stage is free before it is multiplied",
        "e4m3-turned",
        (("        product = add_turned(product, ring, stage, FIRST, LAYOUT, work)\n",
          "        mbarrier.arrive(ring.empty.index(stage), count=1)\n"
          "        product = add_turned(product, ring, stage, FIRST, LAYOUT, work)\n"),
         ("            gate = add_turned(gate, ring, stage, work.BLOCK_N + FIRST, LAYOUT, work)\n"
          "        mbarrier.arrive(ring.empty.index(stage), count=1)\n",
          "            gate = add_turned(gate, ring, stage, work.BLOCK_N + FIRST, LAYOUT, work)\n")),
        RACES,
    ),
    Mutant(
        "a tile is put where the one before is still stored from",
        "bf16-int8",
        (("tma.store_wait(0)\n        put", "put"),),
        (DataRaceError,),
    ),
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.kind}: {mutant.name}")
def test_the_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    kind = KINDS[mutant.kind]
    if mutant.module:
        name = mutant.module.__name__
        other = load(edit(mutant.module, mutant.edits, tmp_path), name)
        called = next(key for key, value in vars(kind.module).items() if value is mutant.module)
        module = load(Path(kind.module.__file__ or ""), kind.module.__name__, **{called: other})
    else:
        module = load(edit(kind.module, mutant.edits, tmp_path), kind.module.__name__)
    for seed in range(SEEDS):
        try:
            kind.run(seed, module)
        except (SimulationError, AssertionError) as error:
            assert isinstance(error, mutant.errors), error
            return
    pytest.fail(f"not found in {SEEDS} seeds")


@pytest.mark.parametrize("guard", ("(tl.min(sizes, 0) < 0) | ", " | (total > M)"))
def test_every_guard_guards(guard: str, tmp_path: Path) -> None:
    """With it garbage leads to NaN, and without it outside, or to a result."""
    kind = KINDS["portable-plain"]
    call = kind.call(1)
    (sizes,) = call.arrays[2]
    nothing = dataclasses.replace(call, expected=[np.full_like(call.expected[0], np.nan)])
    groups = load(edit(ragged, ((guard, ""),), tmp_path), ragged.__name__)
    without = load(Path(portable.__file__ or ""), portable.__name__, ragged=groups)
    found = 0
    for _, wrong in garbage(sizes, SIZES[1][0]):
        given = dataclasses.replace(nothing, arrays=(*call.arrays[:2], [wrong]))
        given.run(portable.ragged_dot_kernel, calls=1)
        try:
            given.run(without.ragged_dot_kernel, calls=1)
        except (OutOfBoundsError, AssertionError, UninitializedReadError, DataRaceError):
            found += 1
    assert found
