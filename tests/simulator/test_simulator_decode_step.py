"""`decode_step`'s kernel in the simulator: right in many interleavings, and with faults planted in it."""

import dataclasses
import inspect
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxtaxfree import simulator
from jaxtaxfree.kernels import shmem, shmem_gluon
from jaxtaxfree.kernels.decode_step import (
    attention,
    attention_cores,
    hopper,
    many,
    packed,
    phases,
    ring,
    tensor_cores,
)
from jaxtaxfree.simulator import (
    DataRaceError,
    DeadlockError,
    MbarrierError,
    MessageError,
    MissingFenceError,
    OutOfBoundsError,
    SignalCountError,
    UninitializedReadError,
    WaitOrderError,
)
from jaxtaxfree.simulator.agents import GluonMachine
from jaxtaxfree.simulator.scheduler import POLICIES
from tests.helpers.decode_steps import Step
from tests.helpers.simulator_kernels import load

SEEDS = 200
PORTION = 10
STEPS = {
    "one rank, two layers": Step(world=1, layers=2),
    "two ranks, an empty cache and a full one": Step(lengths=(0, 19), group=1),
    "three ranks, two layers": Step(world=3, layers=2),
    "two layers, no token and a full cache": Step(lengths=(6, -1, 20), group=1, layers=2),
    "qwen 2": Step(family="qwen2-7b", lengths=(20,)),
    "qwen 3": Step(world=1, family="qwen3-8b", lengths=(7,)),
    "a window": Step(world=1, family="mistral-7b-v0.1", lengths=(13,)),
    "four sequences": Step(world=1, lengths=(3, 0, 17, 9), group=1),
    "gemma 2, three layers": Step(family="gemma-2-9b", lengths=(3, 14), layers=3),
    "gemma 3": Step(world=1, family="gemma-3-4b", lengths=(12,), layers=2),
    "three parts of the keys": Step(world=1, lengths=(19,), config=(("splits", 3), ("in_flight", 1))),
    "messages that a thread polls two vectors of": Step(
        world=1, changes=(("d_model", 960),), config=(("stage", 1024),)
    ),
    "scales and caps": Step(
        world=1,
        changes=(
            ("residual_scale", 0.5), ("logit_scale", 0.5), ("logit_soft_cap", 2.0), ("score_soft_cap", 3.0),
            ("norm_plus_one", True), ("activation", "gelu_tanh"), ("rotary_dim", 32), ("embedding_scale", 2.0),
        ),
    ),
}  # fmt: skip
# By tensor cores, a block of whose weights has a group of 64 columns for each of four warps.
CORES = (("tensor_cores", True), ("attention_cores", True))
TILES = (*CORES, ("stage", 2048))
TENSOR_CORES = {
    "five sequences": Step(world=1, lengths=(3, 0, 17, 9, 5), group=1, config=TILES),
    "six sequences on two ranks, two layers": Step(lengths=(3, 0, 17, 9, 5, 20), layers=2, config=TILES),
    "sequences without a token and a full one": Step(
        world=1, lengths=(5, -1, 20, 9, -1), group=1, layers=2, config=TILES
    ),
    "nine sequences": Step(world=1, lengths=(0, 1, 2, 3, 11, 12, 13, 17, 19), config=TILES),
    "sixteen sequences on three ranks": Step(world=3, lengths=tuple(range(16)), group=1, config=TILES),
    "eight sequences of qwen 2, in parts": Step(
        family="qwen2-7b", lengths=(20, 1, 2, 3, 4, 5, 6, 19), config=(*TILES, ("splits", 3), ("merged", 64))
    ),
    "two sequences in many parts": Step(world=1, lengths=(20, 7), config=(*TILES, ("splits", 40), ("programs", 5))),
    "qwen 3 with scales and caps": Step(
        world=1,
        family="qwen3-8b",
        lengths=(7, 3, 0, 12, 19),
        changes=(
            ("residual_scale", 0.5),
            ("logit_scale", 0.5),
            ("logit_soft_cap", 2.0),
            ("score_soft_cap", 3.0),
            ("norm_plus_one", True),
            ("activation", "gelu_tanh"),
            ("embedding_scale", 2.0),
            ("windows", (4,)),
        ),
        config=TILES,
    ),
    "gemma 2 by tensor cores": Step(family="gemma-2-9b", lengths=(3, 0, 17, 9, 20), layers=2, config=TILES),
    # 24 tiles for two programs, of whose 12 eight are added up at once.
    "gemma 2 by tensor cores, many tiles": Step(
        world=1,
        family="gemma-2-9b",
        lengths=(3, 0, 17),
        layers=2,
        changes=(("d_model", 192),),
        config=(*TILES, ("programs", 2)),
    ),
    "gemma 3 by tensor cores, heads of 256": Step(
        world=1,
        family="gemma-3-4b",
        lengths=(12, 1, 5, 19, 8),
        layers=2,
        changes=(("head_dim", 256), ("d_model", 448)),
        config=(*CORES, ("stage", 4096)),
    ),
    # 19 tiles of the stream for each program are two turns of 10, and 14 of the gate two of 7.
    "rows in turns": Step(lengths=(3, 0, 17, 9, 5), group=1, changes=(("d_model", 448), ("d_mlp", 640)), config=TILES),
}
STEPS |= TENSOR_CORES
EIGHT_BITS = {
    "int8, two layers": Step(layers=2, eight=("int8", "unembed")),
    "e4m3, four sequences": Step(world=1, lengths=(3, 0, 17, 9), eight=("float8_e4m3fn", "unembed")),
    "int8 and a last product of bf16, qwen 2": Step(family="qwen2-7b", lengths=(20,), eight=("int8",)),
    "e4m3 and a tied one, gemma 2": Step(family="gemma-2-9b", lengths=(3, 14), layers=2, eight=("float8_e4m3fn",)),
    "int8 in several blocks of a row": Step(
        world=1,
        lengths=(5, 12),
        changes=(("d_model", 1920), ("vocab", 10)),
        eight=("int8", "unembed"),
    ),
}
EIGHT_BITS |= {
    "six sequences in int8 on two ranks, two layers": Step(
        lengths=(3, 0, 17, 9, 5, 20), layers=2, config=TILES, eight=("int8", "unembed")
    ),
    "eight sequences of qwen 2 in e4m3": Step(
        family="qwen2-7b",
        lengths=(20, 1, 2, 3, 4, 5, 6, 19),
        config=TILES,
        eight=("float8_e4m3fn", "unembed"),
        changes=(("tied", False), ("d_model", 640), ("d_mlp", 768)),
    ),
    "sixteen tiles a turn, int8": Step(
        world=1,
        lengths=(3, 0, 17, 9, 5),
        group=4,
        changes=(("d_model", 384),),
        eight=("int8", "unembed"),
        config=TILES,
    ),
}
STEPS |= EIGHT_BITS
# Blocks of 8 keys of 128, of which two warps have each a half.
OF_CACHE = {"changes": (("head_dim", 128),), "config": (("stage", 1024),)}
CACHES = {
    "a cache of int8, two layers": Step(layers=2, lengths=(11, 20), cache="int8", **OF_CACHE),
    "a cache of e4m3, four sequences": Step(
        world=1, lengths=(3, 0, 17, 9), group=1, cache="float8_e4m3fn", **OF_CACHE
    ),
    "a cache of int8, no token and a full one": Step(world=1, lengths=(20, -1, 7), group=1, cache="int8", **OF_CACHE),
    "a cache of int8 and a window, three parts": Step(
        world=1, family="mistral-7b-v0.1", lengths=(19,), cache="int8", changes=OF_CACHE["changes"],
        config=(*OF_CACHE["config"], ("splits", 3)),
    ),
    "weights and a cache of int8": Step(lengths=(13,), eight=("int8", "unembed"), cache="int8", **OF_CACHE),
    "a cache of e4m3, gemma 2, heads of 256": Step(
        world=1, family="gemma-2-9b", lengths=(14,), layers=2, cache="float8_e4m3fn", changes=(("head_dim", 256),),
        config=OF_CACHE["config"],
    ),
    "a cache of int8, more heads of a key": Step(world=1, lengths=(18,), group=8, cache="int8", **OF_CACHE),
}  # fmt: skip
# Blocks of 16 keys of 128.
OF_TILES = {"changes": (("head_dim", 128),), "config": TILES}
TILED_CACHES = {
    "a cache of int8 by tensor cores, two layers": Step(
        world=1, lengths=(3, 0, 17, 9, 20), group=1, layers=2, cache="int8", **OF_TILES
    ),
    "a cache of e4m3 by tensor cores, no token and a full one": Step(
        lengths=(3, -1, 17, 9, 5, 20), cache="float8_e4m3fn", **OF_TILES
    ),
    "weights and a cache of int8 by tensor cores": Step(
        world=1, lengths=(13, 2), eight=("int8", "unembed"), cache="int8", **OF_TILES
    ),
    "a cache of int8, qwen 3 with a window and caps, in parts, by tensor cores": Step(
        world=1, family="qwen3-8b", lengths=(7, 40, 0, 12, 19), group=8, page=64, cache="int8",
        changes=(*OF_TILES["changes"], ("score_soft_cap", 3.0), ("windows", (30,))), config=(*TILES, ("splits", 2)),
    ),
    "a cache of e4m3 by tensor cores, heads of 256": Step(
        world=1, family="gemma-2-9b", lengths=(14, 3, 19), cache="float8_e4m3fn",
        changes=(("head_dim", 256), ("d_model", 448)), config=(*CORES, ("stage", 4096)),
    ),
    "pages of e4m3 by tensor cores": Step(
        lengths=(3, 16, 17, 9, 0, 32), page=16, lost=(1, 4), cache="float8_e4m3fn", **OF_TILES
    ),
}  # fmt: skip
CACHES |= TILED_CACHES
STEPS |= CACHES
# Products in registers, and attention by tensor cores, of blocks of 16 keys of 64.
ATTENTION = (("attention_cores", True), ("stage", 1024))
ATTENTION_CORES = {
    "attention by tensor cores": Step(config=ATTENTION),
    "attention by tensor cores, four sequences on two ranks, two layers, in parts": Step(
        lengths=(3, 0, 17, 20), layers=2, config=(*ATTENTION, ("splits", 2)),
    ),
    "attention by tensor cores, no token, qwen 3 with a window and caps, eight heads of a key": Step(
        world=1, family="qwen3-8b", lengths=(19, -1), group=8, config=ATTENTION,
        changes=(("score_soft_cap", 3.0), ("windows", (9,))),
    ),
    "attention by tensor cores, gemma 2": Step(family="gemma-2-9b", lengths=(14,), layers=2, config=ATTENTION),
    "attention by tensor cores, heads of 256, a cache of e4m3": Step(
        world=1, lengths=(14, 3), cache="float8_e4m3fn", changes=(("head_dim", 256),),
        config=(("attention_cores", True), ("stage", 4096)),
    ),
    "attention by tensor cores, weights and a cache of int8": Step(
        lengths=(13,), eight=("int8", "unembed"), cache="int8", changes=(("head_dim", 128),),
        config=(("attention_cores", True), ("stage", 2048)),
    ),
    "attention by tensor cores, pages": Step(
        world=1, lengths=(40, 16), page=32, layers=2, lost=(1,), config=(*ATTENTION, ("splits", 3))
    ),
}  # fmt: skip
STEPS |= ATTENTION_CORES
# Queries are messages, as they are by default where attention is by tensor cores and products are in registers.
TOLD = (("tell_queries", True), *ATTENTION)
MESSAGES = {
    "queries are messages, two layers, four sequences": Step(
        lengths=(3, -1, 17, 20), layers=2, config=(*TOLD, ("splits", 2))
    ),
    "queries are messages, qwen 3 with a window, eight heads of a key, heads of 128": Step(
        family="qwen3-8b", lengths=(19, 0), group=8, changes=(("head_dim", 128), ("windows", (9,))),
        config=(*TOLD, ("stage", 2048)),
    ),
    "queries are messages, gemma 2": Step(family="gemma-2-9b", lengths=(14,), layers=2, config=TOLD),
    "queries are messages, qwen 2, pages": Step(
        family="qwen2-7b", lengths=(40, 16), page=32, layers=2, lost=(1,), config=(*TOLD, ("splits", 3))
    ),
    "queries are messages, a part of each head is rotated, weights of int8": Step(
        lengths=(13,), layers=3, changes=(("rotary_dim", 32),), eight=("int8", "unembed"), config=TOLD
    ),
}  # fmt: skip
STEPS |= MESSAGES
# Parts of sums are messages to all programs, and so are parts of heads to who merges them.
SUMS = (("tell_sums", True),)
PARTS = (("tell_parts", True), *TOLD)
NOBODY_MEETS = {
    "parts of sums are messages, four sequences": Step(lengths=(3, 0, 17, 9), group=1, layers=2, config=SUMS),
    "parts of sums are messages, three ranks, scales": Step(
        world=3, layers=2, changes=(("residual_scale", 0.5),), config=SUMS
    ),
    "parts of sums are messages, gemma 2": Step(family="gemma-2-9b", lengths=(3, 14), layers=3, config=SUMS),
    "parts of sums are messages, vectors in parts, one rank": Step(
        world=1, changes=(("d_model", 960),), config=(("stage", 1024), *SUMS)
    ),
    "parts of heads are messages, three heads of a key, no token": Step(
        lengths=(3, -1, 17), group=3, layers=2, config=(*PARTS, ("splits", 2))
    ),
    "parts of heads alone are messages": Step(
        lengths=(3, 17), layers=2, config=(("tell_parts", True), *ATTENTION, ("splits", 2))
    ),
    "nobody meets, heads in forty parts, a load of the next in 300 cycles, a look behind 200": Step(
        lengths=(20,), layers=2,
        config=(*PARTS, *SUMS, ("splits", 40), ("programs", 5), ("pace", 300), ("patience", 200))
    ),
    "nobody meets, qwen 3 with a window, eight heads of a key, heads of 128": Step(
        family="qwen3-8b", lengths=(19, 0), group=8, changes=(("head_dim", 128), ("windows", (9,))),
        config=(*PARTS, *SUMS, ("stage", 2048), ("splits", 2)),
    ),
    "nobody meets, weights of int8, three layers": Step(
        lengths=(13,), layers=3, changes=(("rotary_dim", 32),), eight=("int8", "unembed"), config=(*PARTS, *SUMS)
    ),
    "parts of both are messages, heads of 256, a cache of e4m3": Step(
        world=1, lengths=(14, 3), cache="float8_e4m3fn", changes=(("head_dim", 256),),
        config=(("attention_cores", True), ("stage", 4096), ("tell_parts", True), *SUMS),
    ),
}  # fmt: skip
STEPS |= NOBODY_MEETS
# The same by tensor cores, for which all still meet behind a merge.
TILES_TOLD = (("tell_queries", True), *TILES)
TILED_MESSAGES = {
    "queries are messages, five sequences, two layers": Step(lengths=(3, -1, 17, 9, 20), layers=2, config=TILES_TOLD),
    "parts of heads are messages, six sequences, three heads of a key": Step(
        lengths=(3, 0, 17, 9, 5, 20), group=3, layers=2, config=(("tell_parts", True), *TILES)
    ),
    "messages of attention, sixteen sequences on three ranks": Step(
        world=3, lengths=tuple(range(16)), group=1, config=(("tell_parts", True), *TILES_TOLD)
    ),
    "messages of attention, gemma 2 by tensor cores, in parts": Step(
        family="gemma-2-9b", lengths=(3, 0, 17, 9, 20), layers=2,
        config=(("tell_parts", True), ("splits", 3), *TILES_TOLD),
    ),
    "messages of attention, weights of int8, pages, in forty parts": Step(
        world=1, lengths=(20, 7), layers=3, page=32, eight=("int8", "unembed"), changes=(("head_dim", 128),),
        config=(("tell_parts", True), ("splits", 40), ("programs", 5), *TILES_TOLD),
    ),
    "parts of heads are messages, a cache of e4m3 by tensor cores": Step(
        world=1, lengths=(14, 3, 19), cache="float8_e4m3fn", **{**OF_TILES, "config": (("tell_parts", True), *TILES)}
    ),
}  # fmt: skip
STEPS |= TILED_MESSAGES
PAGES = {
    "pages": Step(lengths=(11, 16, 0, 20), group=1, page=8, layers=2, lost=(1, 2)),
    "pages of two blocks, no token, a full cache and lost tokens": Step(
        world=1, lengths=(16, 32, -1, 0), group=1, page=16, lost=(0, 3)
    ),
    "pages of three blocks, a window, three parts": Step(
        world=1, family="mistral-7b-v0.1", lengths=(19,), page=24, config=(("splits", 3),)
    ),
    "pages of int8": Step(layers=2, lengths=(8, 20, 16, 13), group=1, cache="int8", page=8, lost=(0, 2, 3), **OF_CACHE),
    "pages of e4m3 in blocks, more heads of a key": Step(
        world=1, lengths=(18,), group=8, cache="float8_e4m3fn", page=16, **OF_CACHE
    ),
    "pages by tensor cores": Step(lengths=(3, 16, 17, 9, 0, 32), page=16, layers=2, lost=(1, 4), config=TILES),
    "pages of two blocks by tensor cores, in parts": Step(
        world=1, lengths=(40, -1, 1, 0, 64), page=64, lost=(3,), config=(*TILES, ("splits", 3))
    ),
}
STEPS |= PAGES
MANY = {
    "tensor cores, eight ranks": Step(world=8, lengths=(5, 12, 0, 1, 20, 3), group=1, config=TILES),
    "tensor cores, one rank, rows in turns": Step(
        world=1, lengths=(3, 0, 17, 9, 5), changes=(("d_model", 448),), config=(*TILES, ("in_flight", 3))
    ),
    # 152 tiles for 9 programs, of which two turns take 18: the last program has 8.
    "a turn without rows": Step(
        lengths=(3, 0, 17, 9, 5), group=1, changes=(("d_model", 1216),), config=(*TILES, ("programs", 9))
    ),
    "four ranks": Step(world=4, layers=2),
    "eight ranks": Step(world=8, lengths=(5, 12)),
    "vectors in two parts": Step(changes=(("d_model", 960),)),
    "nobody meets, four ranks": Step(world=4, layers=2, config=(*PARTS, *SUMS)),
    "nobody meets, eight ranks": Step(world=8, lengths=(5, 12), config=(*PARTS, *SUMS)),
    "any number of loads": Step(layers=2, lengths=(5, 12), config=(("in_flight", 3),)),
}


def settings_of(seed: int) -> dict[str, Any]:
    return {"seed": seed, "policy": POLICIES[seed % len(POLICIES)]}


@pytest.mark.filterwarnings("error::jaxtaxfree.simulator.WastedTrafficWarning")
@pytest.mark.parametrize("name", STEPS)
def test_every_model_is_right(name):
    STEPS[name].run(calls=2, **settings_of(list(STEPS).index(name)))


@pytest.mark.soak
@pytest.mark.filterwarnings("error::jaxtaxfree.simulator.WastedTrafficWarning")
@pytest.mark.parametrize("first", range(0, SEEDS, PORTION))
@pytest.mark.parametrize("name", STEPS | MANY)
def test_every_interleaving_is_right(name, first):
    for seed in range(first, first + PORTION):
        (STEPS | MANY)[name].run(**settings_of(seed))


def test_all_programs_have_to_run_at_once():
    """All wait for all: with fewer slots than programs nobody could go on, and the launch says so by `together`."""
    step = Step(world=1)
    step.run(slots=1, calls=2)
    with pytest.raises((WaitOrderError, DeadlockError)):
        step.run(slots=1, calls=2, together=1)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_so_many_loads_are_on_their_way_and_no_more(in_flight, monkeypatch):
    most = Counter()
    expected = defaultdict(dict)

    def load_block(machine: GluonMachine, descriptor: Any, coordinates: Any, view: Any, into: Any) -> None:
        program, barrier = machine._program, machine._barrier_at(view)
        expected[program][barrier.address] = barrier
        on_their_way = sum(each.bytes > 0 for each in expected[program].values())
        most[program] = max(most[program], on_their_way)
        begin(machine, descriptor, coordinates, view, into)

    begin = GluonMachine.load_block
    monkeypatch.setattr(GluonMachine, "load_block", load_block)
    Step(world=1, config=(("in_flight", in_flight),)).run(calls=1)
    assert list(most.values()) == [in_flight] * 3  # of each program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault: in which file, what stands in place of what, the detectors that may find it, and in which call.

    With no errors it is found by its results, which are wrong or not the same on all ranks.
    """

    module: ModuleType
    edits: tuple[tuple[str, str], ...]
    errors: tuple[type[Exception], ...]
    step: Step = dataclasses.field(default_factory=Step)


TOO_EARLY = (DataRaceError, UninitializedReadError)
MEET = "factor = phases.meet(me, met, phase{}, factor, times, SIZES)\n"
END_PROJECT = "factor = phases.finish(me, met, phase, SIZES.QUERIES_TOLD, factor, times, SIZES)\n"
END_ATTEND = "factor = phases.finish(me, met, phase + 1, SIZES.PARTS_TOLD, factor, times, SIZES)\n"
ALONE = "shmem.arrive(me, met)\n"
AWAIT = "factor = await_all(me, met, phase, factor, times, SIZES)\n    return position, factor\n"
TELLS = "            shmem.send(me, told + at, before + total * SCALE, me.rank, inside)\n"
POST_NORMS = STEPS["gemma 2, three layers"]
TELLS_QUERIES = Step(lengths=(3, 17), layers=3, config=(*TOLD, ("splits", 2)))
TELLS_ALL = Step(lengths=(3, 17), layers=3, config=(*PARTS, *SUMS, ("splits", 2)))
TELLS_TILES = Step(lengths=(3, 17, 9), layers=2, config=(("tell_parts", True), ("splits", 2), *TILES_TOLD))
TWO_LAYERS = Step(layers=2)
SENDS = "    for i in gl.static_range(1, WORLD + 1):\n        shmem.send_words("
RECEIVED = """        for rank in gl.static_range(1, WORLD):
            total += words[rank].to(gl.float32, bitcast=True)
"""
BACK = "    rings.give_back(ring, stage)\n"
OF_KEYS = "    block = view(ring, stage, desc).permute"
OF_VALUES = "    added = ()\n    for group in gl.static_range(GROUPS):\n        values"
FULL = "    mbarrier.wait(ring.full.index(stage), phase)\n"
EMPTY = "    mbarrier.wait(ring.empty.index(stage), phase)\n"
ARRIVE = "    give_back(ring, position[0])\n"
FENCE = "    fence_async_shared()\n"
VIEW = "    block = view(ring, stage, desc)\n"
BACK_EARLY = "    give_back(ring, stage)\n"
SECOND = "    second = load(ring, later, desc)\n"
BOTH_BACK = "    mbarrier.arrive(ring.empty.index(later[0]), count=1)\n"
INT8 = EIGHT_BITS["int8, two layers"]
SEVERAL_INT8 = EIGHT_BITS["six sequences in int8 on two ranks, two layers"]
CLEAR = "        shmem.clear_vectors(me, box, begin, end, late, 4, SIZES.WORDS, MOST, 4, 1, WORLD)\n"
RECEIVED_BY_TURNS = """    for rank in gl.static_range(1, WORLD):
        total += words[rank].to(gl.float32, bitcast=True)
"""
CLEARED = "    shmem.clear_vectors(me, box, begin // 4, end, late, 4, SIZES.WORDS, MOST_ROWS, 4, 1, WORLD)\n"
SEVERAL = TENSOR_CORES["six sequences on two ranks, two layers"]
SEVERAL_POST_NORMS = TENSOR_CORES["gemma 2 by tensor cores"]
EPOCH = "((me.epoch - 1) * A_CALL).to(gl.int32) + "
COUNT = "(phase + 1) * SIZES.PROGRAMS"
RELEASE = '    tl.debug_barrier()\n    tl.atomic_add(_signal_of(me, index, me.rank), 1, mask=me.ready, sem="release"'
ACQUIRE = 'tl.atomic_add(signals + i, 0, sem="acquire", scope=SCOPE)'
DROPPED = TENSOR_CORES["sequences without a token and a full one"]
INT8_CACHE = CACHES["a cache of int8, two layers"]
OLD_KEYS, OLD_VALUES = (f"given.old_{of}_scales + of_block" for of in ("key", "value"))
MUTANTS = {
    "attention does not wait for queries": Mutant(
        module=hopper, edits=((END_PROJECT, ALONE),), errors=TOO_EARLY
    ),
    "the merge does not wait for all parts": Mutant(
        module=hopper, edits=((END_ATTEND, ALONE),), errors=TOO_EARLY, step=Step(config=(("splits", 3),))
    ),
    "heads are sent in the place of another layer's": Mutant(
        module=hopper, edits=(("kept.heads + layer * (SIZES", "kept.heads + 0 * (SIZES"),), errors=(MessageError,),
        step=TWO_LAYERS,
    ),
    "the MLP's inner part, likewise": Mutant(
        module=hopper, edits=(("kept.hidden + layer * (SIZES", "kept.hidden + 0 * (SIZES"),), errors=(MessageError,),
        step=TWO_LAYERS,
    ),
    "the stream, likewise": Mutant(
        module=hopper, edits=(("told + NEXT, sums", "told, sums"),), errors=(MessageError, DeadlockError),
    ),
    "nobody hears of the stream": Mutant(
        module=phases, edits=((TELLS, "            pass\n"),), errors=(MessageError, DeadlockError)
    ),
    "a program adds to what was the stream before attention": Mutant(
        module=hopper, edits=(("hidden, later_stream,\n", "hidden, stream,\n"),),
        errors=(AssertionError, UninitializedReadError), step=TWO_LAYERS,
    ),
    "some columns of messages are those of others": Mutant(
        module=ring, edits=(("return part // chunks * columns + part", "return part"),),
        errors=(AssertionError, MessageError, DeadlockError), step=STEPS["two ranks, an empty cache and a full one"],
    ),
    "nobody waits for the sums": Mutant(
        module=phases, edits=((AWAIT, "pass\n    return position, factor\n"),), errors=TOO_EARLY, step=POST_NORMS
    ),
    "a phase is not counted": Mutant(
        module=hopper, edits=((END_ATTEND, "pass\n"),), errors=(*TOO_EARLY, DeadlockError, SignalCountError)
    ),
    "a counter is one too low": Mutant(module=phases, edits=((COUNT, COUNT + " - 1"),), errors=TOO_EARLY),
    "a counter is one too high": Mutant(module=phases, edits=((COUNT, COUNT + " + 1"),), errors=(DeadlockError,)),
    "the counter of an earlier call": Mutant(
        module=phases, edits=((EPOCH, ""),), errors=(*TOO_EARLY, SignalCountError)
    ),
    "a load into a stage in use": Mutant(module=ring, edits=((EMPTY, ""),), errors=(DataRaceError, MbarrierError)),
    "a bound on loads that waits for the wrong phase": Mutant(
        module=ring, edits=(("gl.where(around, phase, phase ^ 1)", "phase"),), errors=(DeadlockError, MbarrierError),
    ),
    "a stage is given back before it is read": Mutant(
        module=ring, edits=((ARRIVE, ""), (FULL + VIEW, FULL + BACK_EARLY + VIEW)),
        errors=(DataRaceError, MissingFenceError),
        step=Step(lengths=(3, 17)),
    ),
    **{
        f"the second of two stages is given back before it is read{of}": Mutant(
            module=ring, edits=((SECOND, ""), (BOTH_BACK, BOTH_BACK + SECOND)),
            errors=(DataRaceError, MissingFenceError), step=step,
        )
        for of, step in (("", Step()), (", of 8 bits", INT8))
    },
    "the last block of an odd number is multiplied in another one's place": Mutant(
        module=ring, edits=(("vectors, sums, count - 1, COLUMNS", "vectors, sums, count - 2, COLUMNS"),),
        errors=(AssertionError,), step=Step(),
    ),
    "two blocks in each other's place": Mutant(
        module=ring, edits=(("gl.join(first, second)", "gl.join(second, first)"),), errors=(AssertionError,)
    ),
    "a stage is given back without a fence": Mutant(
        module=ring, edits=((FENCE, ""),), errors=(MissingFenceError,)
    ),
    "the same by tensor cores": Mutant(module=ring, edits=((FENCE, ""),), errors=(MissingFenceError,), step=SEVERAL),
    "a block is read before it has come": Mutant(module=ring, edits=((FULL, ""),), errors=TOO_EARLY),
    "roles disagree on the order": Mutant(
        module=phases,
        edits=(
            ("given.gate, row,", "given.other, row,"),
            ("given.up, row,", "given.gate, row,"),
            ("given.other, row,", "given.up, row,"),
        ),
        errors=(AssertionError,),
    ),
    "the twin's sum is missed": Mutant(
        module=phases, edits=((RECEIVED, ""),), errors=(AssertionError,)
    ),
    "a twin is sent nothing": Mutant(
        module=phases, edits=((SENDS, SENDS.replace("range(1,", "range(2,")),), errors=(DeadlockError, MessageError)
    ),
    "each rank begins to add with its own part": Mutant(
        module=phases,
        edits=(
            (
                "total = words[0].to(gl.float32, bitcast=True)\n" + RECEIVED,
                "total = words[int(me.rank.value)].to(gl.float32, bitcast=True)\n"
                + RECEIVED.replace("range(1,", "range(0,").replace(
                    "            total", "            if rank != int(me.rank.value):\n                total"
                ),
            ),
        ),
        errors=(AssertionError,),
        step=Step(world=3),
    ),
    "the stream goes where others still read it": Mutant(
        module=hopper,
        edits=(("x, found, stream, layer,", "x, found, later_stream, layer,"),),
        errors=(DataRaceError, UninitializedReadError),
        step=POST_NORMS,
    ),
    "all programs store the same rows of the stream": Mutant(
        module=phases, edits=(("column // OWN == gl.program_id(0)", "column // OWN == 0"),),
        errors=TOO_EARLY, step=STEPS["gemma 2, three layers"],
    ),
    "a block's result is added to the stream before its norm": Mutant(
        module=phases, edits=(("if SIZES.POST_NORMS else SIZES.RESIDUAL_SCALE", "if True else 0"),
                              ("mask=inside & (not SIZES.POST_NORMS)", "mask=inside")),
        errors=(AssertionError, *TOO_EARLY), step=STEPS["gemma 2, three layers"],
    ),
    "warps' sums of the wrong matrix": Mutant(
        module=phases, edits=(("(sums, PORTION, 1, 2)", "(sums, PORTION, 0, 2)"),),
        errors=(AssertionError,),
    ),
    "words are not cleared": Mutant(module=phases, edits=((CLEAR, ""),), errors=(MessageError, *TOO_EARLY)),
    "the sums of two phases in one place": Mutant(
        module=phases, edits=(("which * (WORLD * SIZES.WORDS)", "0"),), errors=(MessageError, DataRaceError)
    ),
    "a key behind the end": Mutant(
        module=attention, edits=(("(slot >= begin) & (slot < end)", "slot >= begin"),), errors=(AssertionError,)
    ),
    "the new token does not see itself": Mutant(
        module=attention, edits=(("& (length < SIZES.SLOTS)", "& (length < 0)"),), errors=(AssertionError,)
    ),
    # Of the new keys and values.
    **{
        f"{fault}{by}": Mutant(module=attention, edits=((found, changed),), errors=errors, step=step)
        for fault, found, changed, errors in (
            ("the new token goes to the next position", "own, length, 0)", "own, length + 1, 0)", (AssertionError,)),
            ("the new token goes to another layer", "layer = pair //", "layer = pair * 0 //",
             (AssertionError, DataRaceError)),
            ("a token that there is not is stored", "(length >= 0) & (length < SIZES.SLOTS)", "length < SIZES.SLOTS",
             (AssertionError, OutOfBoundsError)),
            ("a token is stored in a full cache", "(length >= 0) & (length < SIZES.SLOTS)", "length >= 0",
             (AssertionError, OutOfBoundsError)),
            ("new values are the keys", "results.cache_values + row[:, None] * H + column, value",
             "results.cache_values + row[:, None] * H + column, key", (AssertionError,)),
            ("all programs store what is new", "gl.program_id(0) * AT_ONCE, PAIRS", "0, PAIRS", (DataRaceError,)),
            ("a sequence has the length of another one", "pair // SIZES.KV_HEADS % SIZES.B", "pair * 0",
             (AssertionError, OutOfBoundsError)),
        )
        for by, step in (("", STEPS["two layers, no token and a full cache"]), (", by tensor cores", DROPPED))
    },
    # Of pages.
    **{
        f"{fault}{by}": Mutant(module=attention, edits=((found, changed),), errors=(AssertionError, *errors), step=step)
        for fault, found, changed, *errors in (
            ("a page of another layer", "layer * SIZES.POOL", "0 * SIZES.POOL", DataRaceError),
            ("a page of another sequence", "given.pages + sequence *", "given.pages + 0 *"),
            ("another page of a sequence", "+ slot // SIZES.PAGE", "+ (slot // SIZES.PAGE) * 0"),
            ("a slot of another page", "+ slot % SIZES.PAGE", "+ slot", OutOfBoundsError),
            ("a page behind the pool takes a token", "(page >= 0) & (page < SIZES.POOL)", "(page >= 0)"),
            ("a page before the pool takes a token", "(page >= 0) & (page < SIZES.POOL)", "(page < SIZES.POOL)"),
        )
        for by, step in (
            ("", PAGES["pages"]),
            (", of int8", PAGES["pages of int8"]),
            (", by tensor cores", PAGES["pages by tensor cores"]),
        )
    },
    "an entry that is no page is an address": Mutant(
        module=attention, edits=(("gl.minimum(gl.maximum(gl.load(", "((gl.load("), (", 0), SIZES.POOL - 1)", "))")),
        errors=(OutOfBoundsError,), step=PAGES["pages of int8"],
    ),
    "every part of the keys leaves a new token": Mutant(
        module=attention,
        edits=(("key.to(DTYPE), mask=(item % SIZES.SPLITS == 0)", "key.to(DTYPE), mask=(item >= 0)"),),
        errors=(DataRaceError,), step=STEPS["three parts of the keys"],
    ),
    "every part of the keys sees the new token, by tensor cores": Mutant(
        module=attention_cores, edits=(("if item % SIZES.SPLITS == 0:", "if item >= 0:"),),
        errors=(AssertionError,), step=TENSOR_CORES["two sequences in many parts"],
    ),
    "new tokens are stored while others read the cache": Mutant(
        module=hopper, edits=((END_ATTEND, "attention.put(me, given, kept, results, SIZES)\n        " + END_ATTEND),),
        errors=(DataRaceError, UninitializedReadError), step=STEPS["three parts of the keys"],
    ),
    # Of weights of 8 bits.
    "stages of 8 bits are given back without a fence": Mutant(
        module=ring, edits=((FENCE, ""),), errors=(MissingFenceError,), step=INT8
    ),
    "a word's bytes in each other's place": Mutant(
        module=ring, edits=(("gl.join(low, high)", "gl.join(high, low)"),), errors=(AssertionError,), step=INT8
    ),
    **{
        f"scales of another layer, {name}": Mutant(
            module=module, edits=((f"of_layer(given.{name}_scale, layer,", f"of_layer(given.{name}_scale, 0,"),),
            errors=(AssertionError,), step=INT8,
        )
        for name, module in {
            **dict.fromkeys(("query", "key", "value", "gate", "up"), phases), **dict.fromkeys(("out", "down"), hopper)
        }.items()
    },
    **{
        f"scales of another {of}": Mutant(module=module, edits=(edit,), errors=(AssertionError,), step=INT8)
        for of, module, edit in (
            ("matrix", hopper, ("of_layer(given.down_scale,", "of_layer(given.out_scale,")),
            ("row", phases, ("gl.load(ptr + row, mask=there", "gl.load(ptr + row // 2 * 2, mask=there")),
            ("row, of keys", phases, ("layer, KEYS), row - QUERIES, KEYS)\n    scale +=",
             "layer, KEYS), row - QUERIES + 1, KEYS)\n    scale +=")),
            ("program's rows", phases, ("scale_of(scales, own, there)", "scale_of(scales, own % 4, there)")),
        )
    },
    "the bias is scaled": Mutant(
        module=phases, edits=(("rings.collect(sums, PORTION) * scale + bias",
                               "(rings.collect(sums, PORTION) + bias) * scale"),),
        errors=(AssertionError,), step=EIGHT_BITS["int8 and a last product of bf16, qwen 2"],
    ),
    "gains of the last norm lie as those of weights of 8 bits": Mutant(
        module=phases, edits=(("norms_of(desc, given.final_norm", "norms_of(desc, given.attn_norm"),),
        errors=(AssertionError,), step=EIGHT_BITS["e4m3 and a tied one, gemma 2"],
    ),
    # Of a cache of 8 bits.
    **{
        f"of a cache of 8 bits, {fault}": Mutant(
            module=attention, edits=((found, changed),), errors=(AssertionError, OutOfBoundsError), step=INT8_CACHE
        )
        for fault, found, changed in (
            ("a key's scale of another position", OLD_KEYS, f"{OLD_KEYS} + 1 - 2 * (slot & 1)"),
            ("a value's scale of another position", OLD_VALUES,
             f"{OLD_VALUES} + 1 - 2 * (slot & 1)"),
            ("scales of another layer", "of_block = row_of(given, layer,", "of_block = row_of(given, 0,"),
            ("keys' scales for values", "gl.load(given.old_value_scales", "gl.load(given.old_key_scales"),
            ("values' scales in the sum of weights", "keep + gl.sum(weight, 0", "keep + gl.sum(weights[g], 0"),
            ("a key without its scale", "scores = scores * key_scale", "pass"),
            ("the new key without its scale", "(query * key, 1), 0) * key_unit", "(query * key, 1), 0)"),
            ("the new value without its scale", "[None, None, :, :] * value_unit", "[None, None, :, :]"),
            ("a value's scale behind the end", f"{OLD_VALUES}, mask=seen",
             f"{OLD_VALUES}, mask=slot >= 0"),
            ("the new value's scale is the key's", "scales + PAIRS + pair, value_unit",
             "scales + PAIRS + pair, key_unit"),
            ("the new value's scale is stored for the key", "results.cache_key_scales + row, key_scale",
             "results.cache_key_scales + row, value_scale"),
            ("a new scale goes to the next position", "results.cache_value_scales + row",
             "results.cache_value_scales + row + 1"),
            ("numbers are not rounded to the nearest", "x = packed.nearest(x)", "pass"),
        )
    },
    **{
        f"of a cache of 8 bits by tensor cores, {fault}": Mutant(
            module=module, edits=((found, changed),), errors=(AssertionError, OutOfBoundsError),
            # Of int8 there is no NaN, which 0 times a value behind the end could be.
            step=TILED_CACHES[
                "a cache of e4m3 by tensor cores, no token and a full one" if "behind" in fault
                else "a cache of int8 by tensor cores, two layers"
            ],
        )
        for module, fault, found, changed in (
            (attention_cores, "a key's scale of another position", OLD_KEYS, f"{OLD_KEYS} + 1 - 2 * (slot & 1)"),
            (attention_cores, "a value's scale of another position", OLD_VALUES, f"{OLD_VALUES} + 1 - 2 * (slot & 1)"),
            (attention_cores, "scales of another layer", "attention.row_of(given, layer,",
             "attention.row_of(given, 0,"),
            (attention_cores, "keys' scales for values", "gl.load(given.old_value_scales",
             "gl.load(given.old_key_scales"),
            (attention_cores, "values without their scales", "weights = weights * value_scale", "pass"),
            (attention_cores, "a key without its scale", "scores = scores * key_scale", "pass"),
            (attention_cores, "the new key without its scale", "key, 1) * key_unit", "key, 1)"),
            (attention_cores, "the new value without its scale",
             "attention.rounded(value, value_unit, given.old_keys.dtype) * value_unit",
             "attention.rounded(value, value_unit, given.old_keys.dtype)"),
            (attention_cores, "the new value is not rounded",
             "attention.rounded(value, value_unit, given.old_keys.dtype) * value_unit", "value * 1.2"),
            (attention, "the new value's scale is the key's", "scales + PAIRS + pair, value_unit",
             "scales + PAIRS + pair, key_unit"),
            (attention_cores, "odd columns of values are the even ones", "accs[2 * group]), mma_v2(weights, high,",
             "accs[2 * group]), mma_v2(weights, low,"),
            (attention_cores, "columns are those of 16 bits", "i // 2 * 128 + i % 2 + 2 * column", "i * 64 + column"),
            (attention_cores, "queries lie as for keys of 16 bits", "query = tensor_cores.order(query)", "pass"),
            (attention_cores, "behind the last value there is anything", "if count < desc.block_shape[1]:",
             "if count < 0:"),
        )
    },
    # Attention by tensor cores, and products in registers.
    **{
        f"attention by tensor cores, {fault}": Mutant(
            module=module, edits=((found, changed),), errors=errors,
            step=ATTENTION_CORES["attention by tensor cores, four sequences on two ranks, two layers, in parts"],
        )
        for module, fault, found, changed, errors in (
            (hopper, "which does not wait for queries", END_PROJECT, ALONE, TOO_EARLY),
            (hopper, "whose parts are merged too early", END_ATTEND, ALONE, TOO_EARLY),
            (attention, "blocks of keys come as registers take them", "    if SIZES.ATTENTION_CORES:\n        position",
             "    if SIZES.TENSOR_CORES:\n        position", (AssertionError, OutOfBoundsError)),
            (attention_cores, "a query of another head", "(head * G + g[:, None])", "(head * G + 1 - g[:, None])",
             (AssertionError, OutOfBoundsError)),
            (attention_cores, "a softmax that keeps no sums", "totals * keep[:, :, None] + weights", "weights",
             (AssertionError,)),
        )
    },
    # By tensor cores.
    "a key behind the end, by tensor cores": Mutant(
        module=attention_cores, edits=(("(slot >= begin) & (slot < end)", "slot >= begin"),), errors=(AssertionError,),
        step=SEVERAL,
    ),
    "a key before the window, by tensor cores": Mutant(
        module=attention_cores, edits=(("(slot >= begin) & (slot < end)", "slot < end"),), errors=(AssertionError,),
        step=TENSOR_CORES["qwen 3 with scales and caps"],
    ),
    "a value behind the end counts 0 times": Mutant(
        module=attention_cores, edits=(("if count < desc.block_shape[1]:", "if count < 0:"),), errors=(AssertionError,),
        step=SEVERAL,
    ),
    "the new token does not see itself, by tensor cores": Mutant(
        module=attention_cores, edits=(("length < SIZES.SLOTS, factor", "length < 0, factor"),),
        errors=(AssertionError,),
        step=SEVERAL,
    ),
    "every part of a block sees the new token": Mutant(
        module=attention_cores,
        edits=(
            ("(part == 0) & there, value", "(part >= 0) & there, value"),
            ("[:, None] == 0) & there", "[:, None] >= 0) & there"),
            ("slots_of(SHAPE) == 0", "slots_of(SHAPE) % no_totals.shape[2] == 0"),
        ),
        errors=(AssertionError,), step=SEVERAL,
    ),
    "a part of a block is taken for another one": Mutant(
        module=attention_cores, edits=(("part * EACH + gl", "(1 - part) * EACH + gl"),), errors=(AssertionError,),
        step=SEVERAL,
    ),
    "a part of a block is left out": Mutant(
        module=attention_cores, edits=(("acc = gl.sum(memory.index(i - begin).load(COLUMNS), 0)",
                                       "acc = gl.max(memory.index(i - begin).load(COLUMNS), 0)"),),
        errors=(AssertionError,), step=SEVERAL,
    ),
    "parts of a block are added up as if their highest scores were the same": Mutant(
        module=attention_cores, edits=(("weight = gl.exp2(tops - gl", "weight = gl.exp2(tops * 0.0 - 0.0 * gl"),),
        errors=(AssertionError,), step=SEVERAL,
    ),
    "the query heads of another key/value head's row": Mutant(
        module=attention_cores, edits=(("(head * G + g[:, None]) * H", "(head * G + G - 1 - g[:, None]) * H"),),
        errors=(AssertionError,), step=SEVERAL,
    ),
    "keys are given back before they are read": Mutant(
        module=attention_cores,
        edits=((OF_KEYS, BACK + OF_KEYS), (BACK + "    return scores", "    return scores")),
        errors=(DataRaceError, MissingFenceError), step=SEVERAL,
    ),
    "values are given back before they are read": Mutant(
        module=attention_cores,
        edits=((OF_VALUES, BACK + OF_VALUES), (BACK + "    return added", "    return added")),
        errors=(DataRaceError, MissingFenceError), step=SEVERAL,
    ),
    "the first phase does not wait for the stream": Mutant(
        module=many, edits=(("met, 0, factor, None, SIZES)", "met, -1, factor, None, SIZES)"),), errors=TOO_EARLY,
        step=SEVERAL,
    ),
    **{
        f"{name} does not wait": Mutant(
            module=many, edits=((end, ALONE),), errors=TOO_EARLY, step=SEVERAL
        )
        for name, end in (
            ("attention", END_PROJECT), ("the merge", END_ATTEND), ("the product of the heads", MEET.format(" + 2")),
            ("the gate", MEET.format(" + 3 + POST")), ("the product behind the gate", MEET.format(" + 4 + POST")),
            ("the next layer", MEET.format(" + 5 + 2 * POST")),
        )
    },
    "a norm behind a block does not wait": Mutant(
        module=many, edits=(("factor = phases.meet(me, met, phase, factor, None, SIZES)", "shmem.arrive(me, met)"),),
        errors=TOO_EARLY, step=SEVERAL_POST_NORMS,
    ),
    "its squares go where those of the stream are": Mutant(
        module=many, edits=(("kept.squares + SIZES.PROGRAMS * 16", "kept.squares"),), errors=TOO_EARLY,
        step=SEVERAL_POST_NORMS,
    ),
    "the gains of the norm behind the layer's other block": Mutant(
        module=many, edits=(("given.post_mlp_norm, layer", "given.post_attn_norm, layer"),), errors=(AssertionError,),
        step=SEVERAL_POST_NORMS,
    ),
    "a block's result is added to the stream before its norm, by tensor cores": Mutant(
        module=many, edits=(("if SIZES.POST_NORMS:\n        gl.store", "if False:\n        gl.store"),),
        errors=(AssertionError, *TOO_EARLY), step=SEVERAL_POST_NORMS,
    ),
    "a tile of the wrong columns": Mutant(
        module=tensor_cores, edits=(("chunk * desc.block_shape[0], row, IN", "0 * desc.block_shape[0], row, IN"),),
        errors=(AssertionError,), step=dataclasses.replace(TENSOR_CORES["rows in turns"], world=1),
    ),
    "vectors lie otherwise than a warp reads them": Mutant(
        module=tensor_cores, edits=(("+ half * (2", "+ (1 - half) * (2"),),
        errors=(AssertionError,), step=SEVERAL,
    ),
    "vectors lie as they do for weights of 16 bits": Mutant(
        module=tensor_cores, edits=(("    if NARROW:\n        thread", "    if False:\n        thread"),),
        errors=(AssertionError,), step=SEVERAL_INT8,
    ),
    "a word's bytes in each other's place, by tensor cores": Mutant(
        module=tensor_cores, edits=(("gl.join(low, high)", "gl.join(high, low)"),), errors=(AssertionError,),
        step=SEVERAL_INT8,
    ),
    "a stage of 8 bits is given back without a fence by tensor cores": Mutant(
        module=tensor_cores, edits=(("    rings.give_back(ring, stage)\n",
                                     "    mbarrier.arrive(ring.empty.index(stage), count=1)\n"),),
        errors=(MissingFenceError,), step=SEVERAL_INT8,
    ),
    **{
        f"scales of another layer by tensor cores, {name}": Mutant(
            module=module, edits=((f"of_layer(given.{name}_scale, layer,", f"of_layer(given.{name}_scale, 0,"),),
            errors=(AssertionError,), step=SEVERAL_INT8,
        )
        for name, module in {
            **dict.fromkeys(("query", "key", "value"), phases), **dict.fromkeys(("gate", "up", "out", "down"), many)
        }.items()
    },
    "scales of another row by tensor cores": Mutant(
        module=many, edits=(("gl.load(ptr + row, mask=row < ROWS", "gl.load(ptr + row // 2 * 2, mask=row < ROWS"),),
        errors=(AssertionError,), step=SEVERAL_INT8,
    ),
    "scales of another turn's tiles": Mutant(
        module=many, edits=(("scales[tile // PORTION]", "scales[0]"),), errors=(AssertionError,),
        step=EIGHT_BITS["sixteen tiles a turn, int8"],
    ),
    "the upper 8 of 16 vectors lie where the lower ones are read": Mutant(
        module=tensor_cores, edits=(("+ b // 8 * 2 +", "+ (1 - b // 8) * 2 +"),), errors=(AssertionError,),
        step=TENSOR_CORES["nine sequences"],
    ),
    "more vectors are stored than lie in memory": Mutant(
        module=tensor_cores, edits=(("mask=there & (b < COUNT)", "mask=there"),),
        errors=(AssertionError, DataRaceError, simulator.SimulationError), step=SEVERAL,
    ),
    "a warp's sums are left out": Mutant(
        module=tensor_cores, edits=(("16, 8], ALL).load", "16, 8], ALL).slice(0, 2, 1).load"),),
        errors=(AssertionError,), step=TENSOR_CORES["rows in turns"],
    ),
    "the gate's tiles for those that it gates": Mutant(
        module=many, edits=(("products, 2 * tile + 1, 2", "products, 2 * tile, 2"),), errors=(AssertionError,),
        step=SEVERAL,
    ),
    "the norm's scale is of some programs": Mutant(
        module=many, edits=(("program < SIZES.PROGRAMS", "program < SIZES.PROGRAMS - 1"),), errors=(AssertionError,),
        step=SEVERAL,
    ),
    "the gains of the layer's other norm": Mutant(
        module=many, edits=(("given.mlp_norm + layer * D, behind", "given.attn_norm + layer * D, behind"),),
        errors=(AssertionError,), step=SEVERAL,
    ),
    "a turn that has no rows is waited for": Mutant(
        module=many, edits=(("end = begin // 4 + turns *", "end = begin // 4 + TURNS *"),),
        errors=(DeadlockError, MessageError), step=MANY["a turn without rows"],
    ),
    "vectors behind the last sequence are anything": Mutant(
        module=many, edits=(("(b >= SIZES.B)", "(b >= 16)"),), errors=(UninitializedReadError,), step=SEVERAL
    ),
    "the twin's sum is missed by tensor cores": Mutant(
        module=many, edits=((RECEIVED_BY_TURNS, ""),),
        errors=(AssertionError,), step=SEVERAL,
    ),
    "its words are not cleared": Mutant(
        module=many, edits=((CLEARED, ""),), errors=(MessageError, *TOO_EARLY), step=SEVERAL
    ),
    # Of queries that are messages.
    **{
        fault: Mutant(module=module, edits=((found, changed),), errors=errors, step=TELLS_QUERIES)
        for fault, module, found, changed, errors in (
            ("queries are sent in the place of another layer's", phases, "(layer * SIZES.B + b) * WIDTH", "b * WIDTH",
             (MessageError,)),
            ("queries of another layer", attention_cores, "of + layer * SIZES.B * WIDTH", "of", (AssertionError,)),
            ("parts go where others still read", attention_cores, "item += layer % 2 * ITEMS", "item += 0", TOO_EARLY),
            ("the parts of another layer", attention, "of += layer % 2 *", "of += (layer + 1) % 2 *", TOO_EARLY),
            ("columns without their partners", attention_cores, "rows + attention.partner_of(column, SIZES)",
             "rows + column", (AssertionError,)),
            ("a new value is the key", attention_cores, "rows.slice(G + 1, 1)", "rows.slice(G, 1)", (AssertionError,)),
            ("for itself the new token has the key", attention_cores, ".index(G + 1)", ".index(G)", (AssertionError,)),
            ("a query of another head", attention_cores, "head * G + row, of_new", "head * G + G - 1 - row, of_new",
             (AssertionError,)),
            ("nobody waits for the last query", attention_cores, "row < count)", "(row < count) & (row != G - 1))",
             (AssertionError,)),
        )
    },
    # Where nobody meets.
    **{
        fault: Mutant(module=module, edits=edits, errors=errors, step=step)
        for fault, module, edits, errors, step in (
            ("a rank's part of a sum is missed", ring,
             (("                total += packed.unpack(found[piece * WORLD + rank])", "                pass"),),
             (AssertionError,), TELLS_ALL),
            ("a rank is sent no part of a sum", ring, (("range(1, WORLD + 1):\n        shmem.send(me, dest, words",
             "range(1, WORLD):\n        shmem.send(me, dest, words"),), (DeadlockError, MessageError), TELLS_ALL),
            ("a rank's part of a sum is another one's", ring, (("B * COLUMNS // 2, WORLD, there", "0, WORLD, there"),),
             (AssertionError, MessageError, simulator.SimulationError), TELLS_ALL),
            ("parts of sums in another layer's place", hopper,
             (("after_attention, told, sums,", "after_attention, kept.told, sums,"),), (MessageError,), TELLS_ALL),
            ("a result is added to no stream", phases, (("held + (x[i] + gl.where", "held + (gl.where"),),
             (AssertionError,), TELLS_ALL),
            ("numbers have the exponent of another word", packed, (("(second >> 26) & 0x38", "(third >> 26) & 0x38"),),
             (AssertionError,), TELLS_ALL),
            ("columns of a word in each other's place", packed, (("gl.join(lows, highs)", "gl.join(highs, lows)"),),
             (AssertionError,), TELLS_ALL),
            ("parts of heads in another layer's place", attention_cores, (("item += layer * ITEMS", "item += 0"),),
             (MessageError,), TELLS_ALL),
            ("parts of another layer's heads", attention_cores, (("item = layer * ITEMS + head", "item = head"),),
             (AssertionError,), TELLS_ALL),
            ("parts of a head with the tops of another one", attention_cores,
             (("head % G % 2, WORDS", "1 - head % G % 2, WORDS"),), (AssertionError,), TELLS_ALL),
            ("the last part of a head is left out", attention_cores,
             (("(SIZES.SPLITS - part + 31) // 32", "(SIZES.SPLITS - part + 30) // 32"),), (AssertionError,), TELLS_ALL),
            ("a warp's columns are those of the next one", attention_cores,
             (("4 * warp[:, None] + gl", "4 * (warp[:, None] ^ 1) + gl"),), (AssertionError,), TELLS_ALL),
            ("what is new is stored before others have left it", hopper,
             (("factor = phases.await_all(me, met, SIZES.LAYERS", "phases.meetings_of(SIZES) # ("),), TOO_EARLY,
             TELLS_ALL),
            ("a program says too early that it has read the cache", hopper, (
                ("        if phases.last_meeting_of(SIZES) and layer == SIZES.LAYERS - 1:\n"
                 "            shmem.arrive(me, met)  # it has read the cache, and left what is new\n", ""),
                ("        if SIZES.ATTENTION_CORES:\n", "        if layer == SIZES.LAYERS - 1:\n            "
                 "shmem.arrive(me, met)\n        if SIZES.ATTENTION_CORES:\n"),
             ), TOO_EARLY, TELLS_ALL),
        )
    },
    # Messages of attention between products of tensor cores.
    **{
        f"by tensor cores, {fault}": Mutant(
            module=module, edits=((found, changed),), errors=errors, step=TELLS_TILES
        )
        for fault, module, found, changed, errors in (
            ("queries in another layer's place", many, "(layer * SIZES.B + b) * WIDTH", "b * WIDTH", (MessageError,)),
            ("queries of another sequence", many, "(layer * SIZES.B + b) * WIDTH",
             "(layer * SIZES.B + SIZES.B - 1 - b) * WIDTH", (AssertionError,)),
            ("the last sequence is sent no queries", many, "value, me.rank, own & (b < SIZES.B)",
             "value, me.rank, own & (b < SIZES.B - 1)", (DeadlockError, MessageError)),
            ("heads merged into another sequence's", attention, "head // SIZES.HEADS, head %",
             "SIZES.B - 1 - head // SIZES.HEADS, head %", (AssertionError,)),
            ("nobody waits for merged heads", many, MEET.format(" + 2"), ALONE, TOO_EARLY),
            ("a meeting is counted that is none", many, "        phase -= SIZES.PARTS_TOLD\n", "", (DeadlockError,)),
        )
    },
    "no barrier before the release": Mutant(
        module=shmem, edits=((RELEASE, RELEASE.replace("tl.debug_barrier()", "pass")),), errors=TOO_EARLY
    ),
    "the release is none": Mutant(
        module=shmem, edits=((RELEASE, RELEASE.replace("release", "relaxed")),), errors=TOO_EARLY
    ),
    "the acquire is none": Mutant(
        module=shmem, edits=((ACQUIRE, ACQUIRE.replace("acquire", "relaxed")),), errors=TOO_EARLY
    ),
}  # fmt: skip


def kernel_of(mutant: Mutant, folder: Path) -> Any:
    """The kernel, loaded anew with the mutated file in place of the real one."""
    text = inspect.getsource(mutant.module)
    for old, new in mutant.edits:
        assert old in text, f"{mutant.module.__name__} has changed: {old!r}"
        text = text.replace(old, new)
    path = folder / Path(mutant.module.__file__ or "").name
    path.write_text(text)
    # Each file anew, with the others that it knows, in the order in which they know each other.
    again: dict[ModuleType, ModuleType] = {}
    for module in (shmem, shmem_gluon, packed, ring, tensor_cores, phases, attention, attention_cores, many, hopper):
        names = {name: again[of] for name, of in vars(module).items() if isinstance(of, ModuleType) and of in again}
        source = path if module is mutant.module else Path(module.__file__ or "")
        again[module] = load(source, module.__name__, **names)
    if mutant.module is shmem:
        for name in ("start", "finish", "scratch", "messages", "arrive", "send", "send_words"):
            setattr(again[shmem_gluon], name, getattr(again[shmem], name))
    return again[hopper].decode_step_kernel


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fault_is_found(name, tmp_path):
    mutant = MUTANTS[name]
    kernel = kernel_of(mutant, tmp_path)
    # One call finds most, in a third of the time.
    for seed, calls in ((0, 1), *((seed, 3) for seed in range(20))):
        try:
            mutant.step.run(kernel, calls=calls, **settings_of(seed))
        except (simulator.SimulationError, AssertionError) as error:
            assert isinstance(error, mutant.errors), f"found as {type(error).__name__}: {error}"
            return
    pytest.fail("not found in 20 seeds")
