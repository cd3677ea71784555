"""What a kernel sends to peers and nobody uses: a warning with the line, and none where all is used."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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
from tests.simulator.test_simulator import BLOCKS

SIZE = 8
STORE = "shmem.store(me, mine + block * SIZE, value, after)"
SIGNAL = "shmem.signal(me, arrived + block, after)"


@triton.jit
def ring_kernel(x_ptr, team, inbox, arrived, out_ptr, WORLD: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """An all-gather: each rank passes on what has come, in WORLD - 1 steps."""
    me = shmem.start(team)
    element = tl.arange(0, SIZE)
    mine = shmem.scratch(me, inbox, tl.float32) + element  # [WORLD, SIZE]
    before, after = (me.rank + WORLD - 1) % WORLD, (me.rank + 1) % WORLD
    value = tl.load(x_ptr + element)
    tl.store(out_ptr + me.rank * SIZE + element, value)
    for step in range(STEPS):
        block = (me.rank + WORLD - step) % WORLD
        shmem.store(me, mine + block * SIZE, value, after)
        shmem.signal(me, arrived + block, after)
        if step < WORLD - 1:
            block = (block + WORLD - 1) % WORLD
            ready = shmem.wait(me, arrived + block, me.epoch, before)
            value = tl.where(ready, tl.load(mine + block * SIZE), float("nan"))
            tl.store(out_ptr + block * SIZE + element, value)
    shmem.finish(me)


def line_of(source: str) -> int:
    [line] = [i + 1 for i, line in enumerate(Path(__file__).read_text().splitlines()) if line.strip() == source]
    return line


def waste_of(run: Callable[[], Any]) -> list[warnings.WarningMessage]:
    """The warnings of wasted traffic that a run ends with, in the order of their lines."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    found = [each for each in caught if each.category is simulator.WastedTrafficWarning]
    return sorted(found, key=lambda each: each.lineno)


def ring(steps: int, world: int = 4, **settings: Any) -> None:
    x = [np.arange(SIZE, dtype=np.float32) + 100 * rank for rank in range(world)]
    everybodys = jax.ShapeDtypeStruct((world, SIZE), np.float32)
    outs, _ = simulator.run(
        ring_kernel,
        x,
        world=world,
        grid=1,
        out_type=everybodys,
        scratch={"inbox": everybodys},
        signals={"arrived": world},
        SIZE=SIZE,
        STEPS=steps,
        **settings,
    )
    np.testing.assert_array_equal(outs, np.broadcast_to(x, (world, world, SIZE)))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_ring_that_sends_a_block_too_many(policy: str) -> None:
    assert not waste_of(lambda: ring(3, policy=policy))
    texts = set()
    for seed in range(5):
        store, signal = waste_of(lambda seed=seed: ring(4, policy=policy, seed=seed))
        assert (store.filename, store.lineno) == (__file__, line_of(STORE))
        assert (signal.filename, signal.lineno) == (__file__, line_of(SIGNAL))
        texts.add((str(store.message), str(signal.message)))
    [(store_text, signal_text)] = texts  # the same in every interleaving
    place = r"of rank 0, program 0 in call 1 at simulator/test_simulator_waste.py:{} in ring_kernel \({}, kernels/"
    assert re.search(
        r"ring_kernel: Nobody has read inbox\[1, 0\] \(copy of odd calls\) of rank 1, where the store "
        + place.format(store.lineno, "store"),
        store_text,
    )
    assert re.search(
        r"ring_kernel: Nobody has waited for signal arrived\[1\] of rank 1, which the atomic "
        + place.format(signal.lineno, "signal"),
        signal_text,
    )
    [shown] = [body for _, body in BLOCKS if body.startswith("WastedTrafficWarning")]
    shown, said = (
        re.sub(r":\d+", "", " ".join(text.split())) for text in (shown, f"WastedTrafficWarning: {store_text}")
    )
    assert shown == said


def test_signals_are_in_question_from_the_second_call_on() -> None:
    [store] = waste_of(lambda: ring(4, calls=1))
    assert store.lineno == line_of(STORE)


def test_a_warning_can_be_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", simulator.WastedTrafficWarning)
        ring(3)
        with pytest.raises(simulator.WastedTrafficWarning, match=r"Nobody has read inbox\[1, 0\]"):
            ring(4)


def test_a_jax_program_is_warned_once(cpu_mesh: MeshFactory) -> None:
    mesh = cpu_mesh(4, "x")

    def program(x: jax.Array) -> jax.Array:
        def step(_: Any, x: jax.Array) -> jax.Array:
            gathered = jtf.shmem_call(
                ring_kernel,
                x,
                axis_name="x",
                out_type=jax.ShapeDtypeStruct((4, SIZE), x.dtype),
                grid=1,
                scratch={"inbox": jax.ShapeDtypeStruct((4, SIZE), x.dtype)},
                signals={"arrived": 4},
                implementation="simulate",
                SIZE=SIZE,
                STEPS=4,
            )
            return gathered.sum(0) / 4

        return lax.fori_loop(0, 3, step, x)

    f = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    x = jax.device_put(jnp.arange(4.0 * SIZE), NamedSharding(mesh, P("x")))
    found = waste_of(lambda: jax.block_until_ready(f(x)))
    assert [each.lineno for each in found] == [line_of(STORE), line_of(SIGNAL)]
    assert not waste_of(lambda: jax.block_until_ready(f(x)))


@triton.jit
def message_kernel(team, box, out_ptr, WORLD: tl.constexpr, RECEIVED: tl.constexpr):
    """All send two words to all, and receive some of what others have sent."""
    me = shmem.start(team)
    two = tl.arange(0, 2)
    words = shmem.messages(me, box) + two
    for i in range(WORLD):
        shmem.send(me, words + 2 * me.rank, two.to(tl.float32), (me.rank + i) % WORLD)
    total = two.to(tl.float32)
    for i in range(1, WORLD):
        source = (me.rank + i) % WORLD
        if RECEIVED > 0:
            got, ready = shmem.receive(me, words + 2 * source, source, two < RECEIVED)
            total += tl.where(ready & (two < RECEIVED), got, 0.0)
    tl.store(out_ptr + two, total)
    shmem.finish(me)


@pytest.mark.parametrize("policy", POLICIES)
def test_messages_that_nobody_receives(policy: str) -> None:
    """Those to oneself are not in question, nor what a store has besides: a word of one that is received."""

    def run(received: int, seed: int) -> None:
        call = {"world": 3, "grid": 1, "out_type": jax.ShapeDtypeStruct((2,), np.float32), "messages": {"box": (3, 2)}}
        simulator.run(message_kernel, **call, RECEIVED=received, policy=policy, seed=seed, calls=2)

    for seed in range(6):
        assert not waste_of(lambda seed=seed: run(2, seed))
        assert not waste_of(lambda seed=seed: run(1, seed))
    [found] = waste_of(lambda: run(0, 0))
    assert found.lineno == line_of("shmem.send(me, words + 2 * me.rank, two.to(tl.float32), (me.rank + i) % WORLD)")
    assert re.search(
        r"Nobody has received box\[0, 0\] to \[0, 1\] \(2 words\) .* of rank 1, which the send of rank 0",
        str(found.message),
    )


@triton.jit
def usual_kernel(x_ptr, team, inbox, parts, sums, free, done, tickets, out_ptr, WORLD: tl.constexpr):
    """Ways to use what comes: a part of a store, a sum by atomics, words that are polled, a wait one call later."""
    me = shmem.start(team)
    four = tl.arange(0, 4)
    peer = (me.rank + 1) % WORLD
    mine, flags = shmem.scratch(me, inbox, tl.float32), shmem.scratch(me, parts, tl.int32)
    total = shmem.scratch(me, sums, tl.int32)
    shmem.claim(me, tickets, 1)
    tl.store(total, 0)
    if me.epoch > 1:
        shmem.wait(me, free, me.epoch - 1, (me.rank + WORLD - 1) % WORLD)
    shmem.signal_all(me, done + me.rank, WORLD)
    shmem.wait_all(me, done, me.epoch)
    shmem.store(me, mine + four, tl.load(x_ptr + four), peer)
    for rank in range(WORLD):
        tl.atomic_add(shmem.remote(me, total, rank), 1, sem="relaxed", scope="sys")
    tl.atomic_store(shmem.remote(me, flags, peer) + four, four + 1, sem="relaxed", scope="sys")
    value = tl.load(flags + 1, volatile=True)
    while value != 2:
        value = tl.load(flags + 1, volatile=True)
    shmem.signal_all(me, done + WORLD + me.rank, WORLD)
    shmem.wait_all(me, done + WORLD, me.epoch)
    tl.store(out_ptr, tl.load(mine + 3) + tl.load(total) + value)
    shmem.signal(me, free, peer)
    shmem.finish(me)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_used_in_other_ways(policy: str) -> None:
    def run(**settings: Any) -> None:
        one, four = jax.ShapeDtypeStruct((1,), np.int32), jax.ShapeDtypeStruct((4,), np.int32)
        x = [np.array([0, 0, 0, 10 * rank], np.float32) for rank in range(3)]
        outs, _ = simulator.run(
            usual_kernel,
            x,
            world=3,
            grid=1,
            out_type=jax.ShapeDtypeStruct((1,), np.float32),
            scratch={"inbox": jax.ShapeDtypeStruct((4,), np.float32), "parts": four, "sums": one},
            signals={"free": 1, "done": (2, 3), "tickets": 1},
            policy=policy,
            **settings,
        )
        np.testing.assert_array_equal(np.ravel(outs), [25, 5, 15])

    for seed in range(8):
        assert not waste_of(lambda seed=seed: run(seed=seed, calls=1 + seed % 2))
