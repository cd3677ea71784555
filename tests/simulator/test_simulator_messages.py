"""Messages in the simulator: healthy kernels run under every policy, and each fault is found by the right detector."""

import dataclasses
import functools
import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import triton
import triton.language as tl
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import simulator
from jaxtaxfree.kernels import shmem
from jaxtaxfree.simulator.scheduler import POLICIES
from tests.conftest import MeshFactory
from tests.helpers.simulator_kernels import load
from tests.helpers.support import fails
from tests.simulator.test_simulator_mutants import edit

HERE = r"simulator/test_simulator_messages\.py:\d+ in \w+"


@triton.jit
def gather_kernel(
    x_ptr,
    team,
    box,
    out_ptr,
    WORLD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    LANES: tl.constexpr,  # ROWS or more
    FAULT: tl.constexpr,
):
    """An all-gather: every program sends its rows to all ranks, and receives everybody's; with a fault by name."""
    me = shmem.start(team)
    program = tl.program_id(0)
    row = tl.arange(0, LANES)[:, None]
    element = row * COLS + tl.arange(0, COLS)[None, :]  # [LANES, COLS]
    mask = row < ROWS
    first = program * WORLD * ROWS * COLS
    words = shmem.messages(me, box) + first
    value = tl.load(x_ptr + program * ROWS * COLS + element, mask=mask)

    to, sender = words + me.rank * ROWS * COLS + element, me
    if FAULT == "even copy":
        to = shmem.messages(me._replace(epoch=me.epoch * 0), box) + first + me.rank * ROWS * COLS + element
    if FAULT == "wrong phase":
        sender = me._replace(epoch=me.epoch + 2)
    for i in range(WORLD):
        if FAULT != "silent" or me.rank != 1 or i != 1:
            shmem.send(sender, to, value, (me.rank + i) % WORLD, mask)
        if FAULT == "twice" and i == 1:
            shmem.send(me, to, value, (me.rank + i) % WORLD, mask & (row == ROWS - 1))
    if FAULT == "two programs" and program > 0:
        shmem.send(me, to - first, value, me.rank, mask)
    if FAULT == "lanes":
        shmem.send(me, to + 0 * element, value, me.rank, mask)
    if FAULT == "load":
        tl.store(out_ptr, tl.load(words))
    if FAULT == "store":
        tl.store(words, 0)
    if FAULT == "atomic":
        tl.atomic_add(words, 0, sem="relaxed", scope="sys")

    source = tl.arange(0, triton.next_power_of_2(WORLD))[:, None, None]
    block = source * ROWS * COLS + element[None]  # [WORLD or more, LANES, COLS]
    inbox, of = words, program
    if FAULT == "higher id":
        of = tl.minimum(program + 1, tl.num_programs(0) - 1)
    if FAULT == "odd copy":
        inbox = shmem.messages(me._replace(epoch=me.epoch * 0 + 1), box) + first
    if FAULT == "remote":
        inbox = shmem.remote(me, words, (me.rank + 1) % WORLD)
    mask = mask[None] & (source < WORLD)
    if FAULT == "ahead" and me.rank == 0:
        mask = mask & (source == 0)
    words = inbox - first + of * WORLD * ROWS * COLS + block
    sender = source
    if FAULT == "wrong peer":
        sender = (source + 1) % WORLD
    got, ready = shmem.receive(me, words, sender, mask)
    tl.store(out_ptr + first + block, tl.where(ready, got, float("nan")), mask=mask)
    shmem.finish(me)


def gather(world: int, fault: str = "", rows: int = 1, cols: int = 4, programs: int = 2, **settings: Any) -> Any:
    x = [np.random.default_rng(rank).integers(-9, 9, (programs, rows, cols)) for rank in range(world)]
    shape = (programs, world, rows, cols)
    outs, trace = simulator.run(
        gather_kernel,
        [part.astype(np.float32) for part in x],
        world=world,
        grid=programs,
        out_type=jax.ShapeDtypeStruct(shape, np.float32),
        messages={"box": shape},
        ROWS=rows,
        COLS=cols,
        LANES=triton.next_power_of_2(rows),
        FAULT=fault,
        **settings,
    )
    for out in outs:
        np.testing.assert_array_equal(out, np.stack(x, 1))
    return trace


@pytest.mark.parametrize("slots", [1, 2, None])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_right_kernel_runs(world: int, policy: str, slots: int | None) -> None:
    for seed in range(5):
        gather(world, seed=seed, policy=policy, slots=slots, calls=5, programs=3)


def test_every_seed_is_right() -> None:
    for seed, (world, policy) in zip(range(60), itertools.cycle(itertools.product((2, 3, 4), POLICIES))):
        gather(world, rows=3, seed=seed, policy=policy, slots=(1, 2, None)[seed % 5 % 3], calls=4)


# What it is found as, and what is said of it. "L" stands for a line of this file.
FAULTS = {
    "wrong peer": (
        simulator.WrongPeerError,
        "program . in call 1 waits at L for messages box.* names rank [12] for it, but who sends it is rank [01]",
    ),
    "load": (simulator.MessageError, "the load of rank .* at L touches box.*: only shmem.send and shmem.receive may"),
    "store": (simulator.MessageError, "the store of rank .* at L touches box.*: only shmem.send and shmem.receive"),
    "atomic": (simulator.MessageError, "the atomic of rank .* at L touches box.*: only shmem.send and shmem.receive"),
    "twice": (
        simulator.MessageError,
        "the send of .* at L .* sends box.* a second time in one call: .*send of .* at L",
    ),
    "two programs": (simulator.MessageError, "sends box.* a second time in one call: before, the send of .* at L"),
    "even copy": (simulator.MessageError, r"send of .* in call 1 at L .* \(copy of even calls\) of .* take turns"),
    "wrong phase": (simulator.MessageError, "the send of .* at L .* with the lowest bit of another call"),
    "odd copy": (
        simulator.MessageError,
        "the receive of .* in call 2 at L .* takes box.* for a message of this call, but the send .* in call 1 at L",
    ),
    "remote": (
        simulator.MessageError,
        "the receive of .* at L .* polls the messages box .* receives only what is sent",
    ),
    "higher id": (
        simulator.WaitOrderError,
        r"rank \d, program 0 in call \d waits at L for messages box.*, which rank \d, program 1 in call \d sends",
    ),
    "ahead": (simulator.DataRaceError, "race on box.*: the send of .* overwrites what the receive of .* at L"),
    "silent": (
        simulator.DeadlockError,
        r"rank \d, program \d in call 1 waits at L.*box\[.*, 1, 0, 0\] to .*\(4 words\).*: rank 1 should send them, .*"
        "nobody has ever sent them",
    ),
}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_found(fault: str, world: int) -> None:
    error, message = FAULTS[fault]
    for seed, policy in enumerate(POLICIES):
        with pytest.raises(error) as found:
            gather(world, fault, seed=seed, policy=policy, slots=(None, 1)[seed % 2], calls=4)
        text = str(found.value)
        overtaken = "has overwritten what the receive of" in text and fault == "ahead"
        assert overtaken or re.search(message.replace("L", HERE), text, re.DOTALL | re.IGNORECASE), text
        assert text.count("test_simulator_messages.py:") >= 1 + (" L.* L" in message)
        assert f"(seed={seed}, " in text


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault in the device API: text, what to put in its place, and what the simulator finds."""

    name: str
    old: str
    new: str
    error: type[simulator.SimulationError]
    message: str


MUTANTS = (
    Mutant("scope of the GPU", 'me.ready, sem="relaxed", scope="sys")', 'me.ready, sem="relaxed", scope="gpu")',
           simulator.MessageError, "is at scope 'gpu'"),
    Mutant("one word for all", "    return late\n", "    return late * 0 + tl.min(late)\n",
           simulator.MessageError, "for a message of this call"),
    Mutant("no wait", "late = (words ^ _call_bit(me)) & 1", "late = words & 0",
           simulator.MessageError, "for a message of this call, but nobody has ever sent it"),
    Mutant("always the same bit", "(((me.epoch + 1) >> 1) & 1)", "(((me.epoch + 1) >> 1) & 0)",
           simulator.MessageError, "with the lowest bit of another call"),
    Mutant("the bit of every other call", "(((me.epoch + 1) >> 1) & 1)", "(me.epoch & 1)",
           simulator.MessageError, "with the lowest bit of another call"),
    Mutant("no copies", "(me.epoch & 1) * lines", "(me.epoch & 0) * lines",
           simulator.MessageError, "so the copies take turns"),
    Mutant("deaf", "    return late\n", "    return late * 0 + 1\n",
           simulator.DeadlockError, "which have come: it does not take them for those of its call"),
)  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_fault_in_the_device_api_is_found(mutant: Mutant, tmp_path: Path) -> None:
    times = inspect.getsource(shmem).count(mutant.old)
    path = edit(shmem, ((mutant.old, mutant.new, max(times, 1)),), tmp_path)
    module = load(Path(__file__), __name__, shmem=load(path, shmem.__name__))
    with pytest.raises(mutant.error, match=mutant.message):
        for seed, policy in zip(range(30), itertools.cycle(POLICIES)):
            module.gather(4, rows=2, seed=seed, policy=policy, calls=4)


@triton.jit
def pair_kernel(team, box, data, flag, out_ptr, CASE: tl.constexpr):
    """Two ranks send each other words 0 and 1; what else they do has a name."""
    me = shmem.start(team)
    words = shmem.messages(me, box)
    mine = shmem.scratch(me, data, tl.float32)
    peer, two = 1 - me.rank, tl.arange(0, 2)
    value = two.to(tl.float32) * 21
    if CASE == "scratch" or CASE == "scratch and signal":
        shmem.store(me, mine, 42.0, peer)
    if CASE == "scratch and signal":
        shmem.signal(me, flag, peer)
    shmem.send(me, words + two, value, peer)
    if CASE == "left out":
        shmem.send(me, words + 2 + two, value, peer, (two == 0) & (me.epoch <= 2))
    elif CASE == "in turn, unread" or CASE == "in turn":
        # Word 2 of rank 0 is sent by whoever's turn it is.
        shmem.send(me, words + 2 + two, value, 0, (two == 0) & (me.epoch // 2 % 2 == me.rank))
        shmem.send(me, words + 2 + two, value, 1, (two == 0) & (me.rank == 1))
    else:
        shmem.send(me, words + 2 + two, value, peer, two == 0)
    if CASE == "in turn" and me.rank == 0:
        shmem.receive(me, words + 2 + two, me.epoch.to(tl.int32) // 2 % 2, two == 0)
    got, ready = shmem.receive(me, words + two, peer, two == 1)
    shmem.receive(me, words + two, peer, two < 0)  # of nothing
    got = 2 * tl.sum(tl.where(two == 1, got, 0), axis=0)
    if CASE == "scratch and signal":
        shmem.wait(me, flag, me.epoch, peer)
    if CASE == "scratch" or CASE == "scratch and signal":
        got = tl.load(mine)
    tl.store(out_ptr, tl.where(ready, got, float("nan")))
    shmem.finish(me)


def pair(case: str, **settings: Any) -> list[np.ndarray]:
    word = jax.ShapeDtypeStruct((1,), np.float32)
    outs, _ = simulator.run(
        pair_kernel,
        world=2,
        grid=1,
        out_type=word,
        messages={"box": 3},
        scratch={"data": word},
        signals={"flag": 1},
        CASE=case,
        **settings,
    )
    return outs


# Word 2 is nobody's.
wasteful = pytest.mark.filterwarnings("ignore::jaxtaxfree.simulator.WastedTrafficWarning")


@wasteful
@pytest.mark.parametrize("policy", POLICIES)
def test_a_message_publishes_nothing_but_itself(policy: str) -> None:
    assert pair("scratch and signal", policy=policy) == [42, 42]
    with pytest.raises(simulator.DataRaceError, match=f"{HERE}.*{HERE}.*Messages came after it, but they publish noth"):
        pair("scratch", policy=policy)


@wasteful
@pytest.mark.parametrize("policy", POLICIES)
def test_a_word_that_is_left_out(policy: str) -> None:
    pair("left out", policy=policy, calls=2)
    with pytest.raises(
        simulator.MessageError,
        match=rf"Nobody has sent box\[2\] .* in call 3; the send of .* in call 1 at {HERE} .* was the last",
    ):
        pair("left out", policy=policy, calls=3)


@pytest.mark.parametrize("policy", POLICIES)
def test_senders_may_take_turns_if_their_words_are_read(policy: str) -> None:
    assert pair("in turn", policy=policy, calls=8) == [42, 42]
    with pytest.raises(simulator.DataRaceError, match=f"send of .* at {HERE}.* sends again what the send .* at {HERE}"):
        pair("in turn, unread", policy=policy, calls=8)


@triton.jit
def sum_kernel(
    x_ptr,
    team,
    sums,
    out_ptr,
    WORLD: tl.constexpr,
    STRIDE: tl.constexpr,  # words from a rank's to the next one's
    STEP: tl.constexpr,  # from one of its words to the next one
    FIRST: tl.constexpr,  # of those to send to: 0 for the rank itself
):
    """The sum of two values over the ranks. Each rank takes its own ones from where they lie."""
    me = shmem.start(team)
    two = tl.arange(0, 2)
    value = tl.load(x_ptr + two)
    words = shmem.messages(me, sums) + two * STEP
    for i in range(FIRST, WORLD):
        shmem.send(me, words + me.rank * STRIDE, value, (me.rank + i) % WORLD)
    total = shmem.sendable(value)
    for i in range(1, WORLD):
        source = (me.rank + i) % WORLD
        got, ready = shmem.receive(me, words + source * STRIDE, source)
        total += tl.where(ready, got, float("nan"))
    tl.store(out_ptr + two, total)
    shmem.finish(me)


@pytest.mark.parametrize("shape", ((3, 2), (2, 3), (6,)), ids=str)
def test_each_message_is_sent_to_oneself_too(shape: tuple[int, ...]) -> None:
    x = [np.array([2.0, 10.0], np.float32) * 4**rank for rank in range(3)]
    stride, step = (1, 3) if shape == (2, 3) else (2, 1)

    def run(**keywords: Any) -> list[np.ndarray]:
        out_type = jax.ShapeDtypeStruct((2,), np.float32)
        call = {"world": 3, "grid": 1, "out_type": out_type, "messages": {"sums": shape}, "STEP": step}
        return simulator.run(sum_kernel, x, **call, **keywords)[0]

    own = "What is missing is exactly what rank 0 would send to itself, of the parts of 3 ranks: send it"
    np.testing.assert_array_equal(run(STRIDE=stride, FIRST=0), np.broadcast_to(sum(x), (3, 2)))
    with fails(simulator.MessageError, "Nobody has sent sums[0", "of rank 0 in call 1", own):
        run(STRIDE=stride, FIRST=1)


def test_other_messages_that_are_left_out_are_not_one_s_own() -> None:
    with pytest.raises(simulator.MessageError, match="Nobody has sent") as found:
        pair("left out", calls=3)
    assert "send to itself" not in str(found.value)


def test_a_wait_that_lasts_too_long() -> None:
    with pytest.raises(
        simulator.WaitTimeoutError,
        match=rf"has waited at {HERE} for messages box.*: rank \d should send them, .* while others took \d+ steps",
    ):
        gather(4, programs=8, policy="straggler", patience=15)


def test_waits_are_in_the_trace(tmp_path: Path) -> None:
    trace = gather(2)
    trace.save_chrome(tmp_path / "trace.json")
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert "wait box[0, 0, 0, 0] to [0, 1, 0, 3] (8 words) (copy of odd calls) of rank 1" in names
    assert "publish box to rank 1" in names
    waits = [span for span in trace.spans if span.kind == "wait"]
    assert len(waits) == 2 * 2 * 3
    assert any(span.end > span.begin for span in waits)


def steps_of_python(function: Callable[[], Any]) -> int:
    """How many functions begin and how many jumps are made, as those of loops, while one runs."""
    monitoring, tool, count = sys.monitoring, sys.monitoring.PROFILER_ID, 0

    def step(*_: Any) -> None:
        nonlocal count
        count += 1

    events = (monitoring.events.PY_START, monitoring.events.JUMP)
    monitoring.use_tool_id(tool, "steps")
    try:
        for event in events:
            monitoring.register_callback(tool, event, step)
        monitoring.set_events(tool, sum(events))
        function()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    return count


def test_large_blocks_take_no_more_steps_than_small_ones() -> None:
    """Work goes by accesses, not by words: the checks are vectorised."""
    gather(4, rows=1, cols=16)  # what happens once has happened
    small, large = (
        steps_of_python(functools.partial(gather, 4, rows=rows, cols=cols)) for rows, cols in ((1, 16), (15, 256))
    )
    assert large < 2 * small


def test_messages_last_from_call_to_call_in_jax(cpu_mesh: MeshFactory) -> None:
    mesh = cpu_mesh(4, "x")

    def all_gather(x: jax.Array) -> jax.Array:
        def step(i: int, x: jax.Array) -> jax.Array:
            gathered = jtf.shmem_call(
                gather_kernel,
                x,
                axis_name="x",
                out_type=jax.ShapeDtypeStruct((2, 4, *x.shape[1:]), x.dtype),
                grid=2,
                messages={"box": (2, 4, *x.shape[1:])},
                implementation="simulate",
                ROWS=x.shape[1],
                COLS=x.shape[2],
                LANES=4,
                FAULT="",
            )
            return gathered.sum(axis=1) + lax.axis_index("x")

        return lax.fori_loop(0, 5, step, x)

    x = np.arange(4 * 2 * 3 * 4, dtype=np.float32).reshape(4 * 2, 3, 4) % 5
    f = jax.jit(jax.shard_map(all_gather, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    expected = x.reshape(4, 2, 3, 4)
    for _ in range(5):
        expected = expected.sum(axis=0) + np.arange(4)[:, None, None, None]
    for seed, policy in enumerate(POLICIES):
        with simulator.simulating(seed=seed, policy=policy) as recording:
            out = jax.block_until_ready(f(jax.device_put(x, NamedSharding(mesh, P("x")))))
        np.testing.assert_array_equal(np.asarray(out).reshape(expected.shape), expected)
        assert len(recording.traces) == 5


@triton.jit
def words_kernel(x_ptr, team, box, out_ptr, WORLD: tl.constexpr, WORDS: tl.constexpr, FAULT: tl.constexpr):
    """Each program sends its words to all ranks, but every third only in odd calls; with a fault by name."""
    me = shmem.start(team)
    first = tl.program_id(0) * WORLD * WORDS
    word = tl.arange(0, WORDS)
    mask = (word % 3 != 2) | (me.epoch % 4 < 2)
    value = tl.load(x_ptr + tl.program_id(0) * WORDS + word)
    words = shmem.messages(me, box) + first
    for i in range(WORLD):
        peer = (me.rank + i) % WORLD
        if FAULT != "one way" or peer == 0:
            shmem.send_words(me, words + me.rank * WORDS + word, value, peer, mask)
    if FAULT == "twice":
        shmem.send_words(me, words + me.rank * WORDS + word, value, me.rank, word < 1)
    if FAULT == "store":
        tl.store(words + word, 0)
    source = tl.arange(0, triton.next_power_of_2(WORLD))[:, None]
    there = (source < WORLD) & mask[None, :]
    wanted = there
    if FAULT == "not received":
        wanted = there & (word[None, :] < WORDS - 1)
    if FAULT == "one way":
        wanted = there & (me.rank == 0)
    if FAULT == "f32":
        got, ready = shmem.receive(me, words + source * WORDS + word[None, :], source, wanted)
        got = got.to(tl.int32, bitcast=True)
    else:
        got, ready = shmem.receive_words(me, words + source * WORDS + word[None, :], source, wanted)
    if FAULT == "again":
        shmem.receive_words(me, words + source * WORDS + word[None, :], source, wanted)
    tl.store(out_ptr + first + source * WORDS + word[None, :], tl.where(there & ready, got, -2), mask=source < WORLD)
    shmem.finish(me)


def send_words(world: int, fault: str = "", programs: int = 2, calls: int = 3, **settings: Any) -> None:
    x = [np.random.default_rng(rank).integers(-(2**31), 2**31, (programs, 8), np.int32) for rank in range(world)]
    for part in x:
        part[0, :5] = 0, -1, 1, -(2**31), 2**31 - 1
    outs, _ = simulator.run(
        words_kernel,
        x,
        world=world,
        grid=programs,
        out_type=jax.ShapeDtypeStruct((programs, world, 8), np.int32),
        messages={"box": jax.ShapeDtypeStruct((programs, world, 8), np.int32)},
        calls=calls,
        WORDS=8,
        FAULT=fault,
        **settings,
    )
    want = np.where(np.stack(x, 1) == -1, 0x7FFFFFFF, np.stack(x, 1))
    want[..., 2::3] = want[..., 2::3] if calls % 4 < 2 else -2
    for out in outs:
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("world", [2, 3, 4, pytest.param(8, marks=pytest.mark.soak)])
def test_words_arrive_and_may_be_left_out(world: int) -> None:
    for seed, policy in zip(range(12), itertools.cycle(POLICIES)):
        slots, calls = (1, 2, None)[seed % 3], 3 + seed % 4
        send_words(world, seed=seed, policy=policy, slots=slots, calls=calls)


WORD_FAULTS = {
    "twice": "the send of .* at L .* sends box.* a second time in one call",
    "not received": r"Nobody has received box.* which the send of .* at L .* has sent: it is not cleared",
    "again": "the receive of .* at L .* waits for box.*, which has been received: the clear of .* has cleared it",
    "store": "the store of .* at L touches box.*: only shmem.send and shmem.receive may",
    "f32": "Nobody has received box|which have come: it does not take them for those of its call",
}


@pytest.mark.parametrize("fault", WORD_FAULTS)
def test_a_fault_with_words_is_found(fault: str) -> None:
    for seed, policy in enumerate(POLICIES):
        with pytest.raises((simulator.MessageError, simulator.DeadlockError)) as found:
            send_words(3, fault, seed=seed, policy=policy, calls=4)
        text = str(found.value)
        assert re.search(WORD_FAULTS[fault].replace("L", HERE), text, re.DOTALL | re.IGNORECASE), text


def test_words_that_are_sent_before_there_is_room_are_found() -> None:
    """Whoever does not hear of its receiver may be calls ahead of it."""
    with pytest.raises((simulator.MessageError, simulator.DataRaceError)) as found:
        for seed, policy in zip(range(50), itertools.cycle(POLICIES)):
            send_words(2, "one way", seed=seed, policy=policy, calls=5)
    assert re.search("nobody has received|overwrites what the (receive|clear)", str(found.value)), found.value


WORD_MUTANTS = (
    Mutant("not cleared", "    tl.store(source, tl.zeros_like(words),", "    tl.store(source, words,",
           simulator.MessageError, "and writes there, but not 0"),
    Mutant("nothing means nothing", "words = ~tl.where(words == -1, 0x7FFFFFFF, words)", "words = ~words",
           simulator.MessageError, "sends 0 as box"),
    Mutant("not awaited", "absent = (words == 0).to(tl.int32)", "absent = words & 0",
           simulator.MessageError, "for a message of this call|has not come"),
)  # fmt: skip


@pytest.mark.parametrize("mutant", WORD_MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_fault_in_the_device_api_of_words_is_found(mutant: Mutant, tmp_path: Path) -> None:
    path = edit(shmem, ((mutant.old, mutant.new),), tmp_path)
    module = load(Path(__file__), __name__, shmem=load(path, shmem.__name__))
    with pytest.raises(mutant.error, match=mutant.message):
        for seed, policy in zip(range(30), itertools.cycle(POLICIES)):
            module.send_words(4, seed=seed, policy=policy, calls=4)
