"""The simulator itself: what it runs, what it finds, and what it says of it."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import triton
import triton.language as tl
from jax.sharding import PartitionSpec as P
from triton.language.extra import libdevice
from triton.language.extra.libdevice import atan2

import jaxtaxfree as jtf
from jaxtaxfree import simulator
from jaxtaxfree.kernels import shmem
from jaxtaxfree.simulator.scheduler import POLICIES
from tests.helpers.simulator_kernels import KERNELS, ROOT
from tests.helpers.support import fails, mesh_of

F32 = np.dtype(np.float32)
BF16 = jax.numpy.bfloat16.dtype


def shape_of(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@triton.jit
def exchange_kernel(x_ptr, team, inbox, arrived, out_ptr, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    """Two ranks swap a block; with a fault by name."""
    me = shmem.start(team)
    element = tl.arange(0, BLOCK)
    peer = 1 - me.rank
    mine = shmem.scratch(me, inbox, x_ptr.dtype.element_ty)
    if FAULT != "silent":
        shmem.put(me, mine + element, x_ptr + element, peer)
        shmem.signal(me, arrived, peer)
    if FAULT == "late store":
        shmem.put(me, mine + element, x_ptr + element, peer)
    ready = shmem.wait(me, arrived, me.epoch, peer)
    value = tl.load(mine + element)
    tl.store(out_ptr + element, tl.where(ready, value, float("nan")))
    if FAULT == "operand":
        tl.store(x_ptr + element, value)
    if FAULT == "own output":
        tl.store(out_ptr + element, tl.load(out_ptr + BLOCK + element) + value)
    if FAULT == "spin":
        while tl.load(out_ptr) == tl.load(out_ptr):
            pass
    shmem.finish(me)


def exchange(fault: str = "", size: int = 8, dtype: Any = F32, **settings: Any) -> tuple[list, list, simulator.Trace]:
    x = [(np.arange(size) + 100 * rank).astype(dtype) for rank in range(2)]
    out_size = 2 * size if fault == "own output" else size
    outs, trace = simulator.run(
        exchange_kernel,
        x,
        world=2,
        grid=1,
        out_type=shape_of(out_size, dtype=dtype),
        scratch={"inbox": shape_of(size, dtype=dtype)},
        signals={"arrived": 1},
        BLOCK=size,
        FAULT=fault,
        **settings,
    )
    return x, outs, trace


@pytest.mark.parametrize("dtype", [F32, BF16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_runs_a_kernel(policy: str, dtype: Any) -> None:
    x, outs, _ = exchange(policy=policy, dtype=dtype)
    np.testing.assert_array_equal(outs, x[::-1])


def test_calls_with_operands_of_their_own() -> None:
    calls = [[[np.full(8, 10.0 * call + rank, np.float32) for rank in range(2)]] for call in range(3)]
    keywords = {"world": 2, "grid": 1, "out_type": shape_of(8), "signals": {"arrived": 1}, "BLOCK": 8, "FAULT": ""}
    results, trace = simulator.run_calls(exchange_kernel, calls, scratch={"inbox": shape_of(8)}, **keywords)
    np.testing.assert_array_equal(results, [operands[0][::-1] for operands in calls])
    assert {span.call for span in trace.spans} == {1, 2, 3}
    with fails(ValueError, "The ranks have operands of several kinds, float32[4] and float32[8]"):
        simulator.run_calls(exchange_kernel, [calls[0], [[np.zeros(4, np.float32)] * 2]], **keywords)
    for wrong in ([], [calls[0], []]):
        with fails(ValueError, "one call or more, each with as many operands as the others"):
            simulator.run_calls(exchange_kernel, wrong, **keywords)


@triton.jit
def count_kernel(count_ptr, team, arrived, out_ptr):
    """Signals if there is anything to be sent."""
    me = shmem.start(team)
    count = tl.load(count_ptr)
    if count > 0:
        shmem.signal(me, arrived, 1 - me.rank)
        shmem.wait(me, arrived, me.epoch, 1 - me.rank)
    tl.store(out_ptr, count)
    shmem.finish(me)


def test_signals_that_depend_on_data() -> None:
    def run(*counts: int) -> None:
        calls = [[[np.array([count], np.int32)] * 2] for count in counts]
        out_type = shape_of(1, dtype=np.int32)
        simulator.run_calls(count_kernel, calls, world=2, grid=1, out_type=out_type, signals={"arrived": 1})

    run(3, 2, 1)
    run(0, 0, 0)
    with pytest.raises(simulator.DeadlockError, match=r"in call 3 waits(.|\n)*expects 3 and sees 2"):
        run(3, 0, 1)


@triton.jit
def faulty_kernel(x_ptr, team, inbox, other, arrived, out_ptr, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    """`exchange_kernel` with other faults."""
    me = shmem.start(team)
    element = tl.arange(0, BLOCK)
    peer = 1 - me.rank
    mine = shmem.scratch(me, inbox, x_ptr.dtype.element_ty) + element
    to, whom, awaited = mine, peer, peer
    if FAULT == "neighbour":
        to = mine + 2 * BLOCK
    if FAULT == "output":
        to = out_ptr + element
    if FAULT == "twice":
        to = shmem.remote(me, mine, peer)
    if FAULT == "nobody":
        whom = peer + 2
    if FAULT == "signal to nobody":
        shmem.signal(me, arrived, me.rank - 2)
    if FAULT == "peer":
        awaited = me.rank
    if FAULT == "dtype":
        mine = shmem.scratch(me, inbox, x_ptr.dtype)
    shmem.put(me, to, x_ptr + element, whom)
    shmem.signal(me, arrived, peer)
    ready = shmem.wait(me, arrived, me.epoch, awaited)
    tl.device_assert((me.rank == 0) | (FAULT != "assert"), "only rank 0 comes here")
    tl.store(out_ptr + element, tl.where(ready, tl.load(mine), float("nan")))
    shmem.finish(me)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    (
        ("neighbour", simulator.OutOfBoundsError, r"element 64 of scratch inbox .* has elements 0 to 31 of"),
        (
            "output",
            simulator.OutOfBoundsError,
            "remote of .*takes a pointer to the output out_ptr of rank .: peers share",
        ),
        ("twice", simulator.OutOfBoundsError, "takes a pointer to the scratch inbox .* this rank's own pointer"),
        ("nobody", simulator.OutOfBoundsError, "where rank [23] of a team of 2 would be"),
        ("signal to nobody", simulator.OutOfBoundsError, "where rank -[12] of a team of 2 would be"),
        ("peer", simulator.WrongPeerError, r"for signal arrived\[0\] of rank (.), and names rank \1 for it, but who"),
        ("assert", simulator.DeviceAssertError, "of rank 1, program 0 in call 1 at .*: only rank 0 comes here"),
        ("dtype", AssertionError, "shmem.scratch takes the dtype of the elements"),
    ),
)
def test_faults_that_results_do_not_show(fault: str, error: type[Exception], message: str) -> None:
    x = [np.arange(32, dtype=np.float32) + 100 * rank for rank in range(2)]

    def run(fault: str) -> list[np.ndarray]:
        buffers = {"scratch": {"inbox": shape_of(32), "other": shape_of(320)}, "signals": {"arrived": 1}}
        call = {"world": 2, "grid": 1, "out_type": shape_of(32), "BLOCK": 32, "FAULT": fault}
        return simulator.run(faulty_kernel, x, **buffers, **call)[0]

    np.testing.assert_array_equal(run(""), x[::-1])
    with pytest.raises(error, match=message):
        run(fault)


def test_a_store_after_the_barrier_is_not_published() -> None:
    with pytest.raises(simulator.DataRaceError) as found:
        for seed in range(20):
            exchange("late store", seed=seed)
    message = str(found.value)
    assert "inbox[" in message
    assert message.count("test_simulator.py:") == 2  # both sides
    assert re.search(r"rank \d, program 0 in call \d", message)
    assert found.value.trace is not None
    assert found.value.trace.spans


def test_a_deadlock_says_who_waits_for_whom() -> None:
    with pytest.raises(simulator.DeadlockError) as found:
        exchange("silent")
    for rank in range(2):
        assert f"rank {rank}, program 0 in call 1 waits at" in str(found.value)
        assert f"signal arrived[0] of rank {rank}: expects 1 and sees 0; rank {1 - rank} should raise it" in str(
            found.value
        )


def test_operands_are_read_only() -> None:
    with pytest.raises(simulator.OutOfBoundsError, match=r"writes into the operand x_ptr of rank \d"):
        exchange("operand")


def test_outputs_begin_unwritten() -> None:
    with pytest.raises(simulator.UninitializedReadError, match=r"out_ptr\[8\].*nobody has ever written"):
        exchange("own output")


def test_patience_ends() -> None:
    with pytest.raises(simulator.WaitTimeoutError, match=r"has not ended after \d+ steps"):
        exchange("spin", patience=1000)


@triton.jit
def twice_kernel(team, arrived, out_ptr, WORLD: tl.constexpr):
    """All ranks raise signal 0, where each was to raise its own; so that of rank 1 never comes."""
    me = shmem.start(team)
    shmem.signal_all(me, arrived, WORLD)
    came = shmem.wait_all(me, arrived, me.epoch)
    tl.store(out_ptr, came.to(tl.int32))
    shmem.finish(me)


@pytest.mark.parametrize("seed", range(4))
def test_a_deadlock_behind_a_signal_that_came_twice(seed: int) -> None:
    with pytest.raises(simulator.DeadlockError) as found:
        simulator.run(
            twice_kernel, world=2, grid=1, out_type=shape_of(1, dtype=np.int32), signals={"arrived": 2}, seed=seed
        )
    assert found.value.trace is not None and found.value.trace.steps < 1000


@triton.jit
def pushed_kernel(x_ptr, team, inbox, arrived, out_ptr, BLOCK: tl.constexpr):
    me = shmem.start(team)
    element = tl.arange(0, BLOCK)
    box = shmem.scratch(me, inbox, x_ptr.dtype.element_ty) + element
    shmem.store(me, box, tl.load(x_ptr + element), 1 - me.rank)
    shmem.signal(me, arrived, 1 - me.rank)
    shmem.wait(me, arrived, me.epoch, 1 - me.rank)
    tl.store(out_ptr + element, tl.load(box))
    shmem.finish(me)


def test_truth_values_are_pushed() -> None:
    truth = shape_of(8, dtype=np.bool_)
    values = [np.arange(8) % 2 == rank for rank in range(2)]
    outs, _ = simulator.run(
        pushed_kernel, values, world=2, grid=1, out_type=truth, scratch={"inbox": truth}, signals={"arrived": 1},
        BLOCK=8,
    )  # fmt: skip
    np.testing.assert_array_equal(outs, values[::-1])


@triton.jit
def adding_kernel(x_ptr, team, sums, zeroed, added, out_ptr, WORLD: tl.constexpr, SCOPE: tl.constexpr):
    """The sum of all ranks' values, by atomics in each other's scratch."""
    me = shmem.start(team)
    total = shmem.scratch(me, sums, tl.int32)
    tl.store(total, 0)
    shmem.signal_all(me, zeroed + me.rank, WORLD)
    shmem.wait_all(me, zeroed, me.epoch)
    for rank in range(WORLD):
        tl.atomic_add(shmem.remote(me, total, rank), tl.load(x_ptr), sem="relaxed", scope=SCOPE)
    shmem.signal_all(me, added + me.rank, WORLD)
    shmem.wait_all(me, added, me.epoch)
    tl.store(out_ptr, tl.load(total))
    shmem.finish(me)


def add(scope: str) -> list[Any]:
    values = [np.array([10**rank], np.int32) for rank in range(3)]
    one, each = shape_of(1, dtype=np.int32), {"zeroed": 3, "added": 3}
    outs, _ = simulator.run(
        adding_kernel, values, world=3, grid=1, out_type=one, scratch={"sums": one}, signals=each, SCOPE=scope
    )
    return [int(out[0]) for out in outs]


def test_atomics_of_different_gpus_need_the_scope_of_the_system() -> None:
    assert add("sys") == [111] * 3
    with pytest.raises(simulator.DataRaceError):
        add("gpu")


@triton.jit
def ring_kernel(team, token, out_ptr, ROUNDS: tl.constexpr):
    """Rank 1 waits for rank 0 while rank 0's other program still works."""
    me = shmem.start(team)
    if tl.program_id(0) == 0:
        if me.rank == 0:
            for _ in range(ROUNDS):
                tl.store(out_ptr, tl.load(out_ptr, mask=tl.program_id(0) > 0, other=0.0) + 1.0)
            shmem.signal(me, token, 1)
        else:
            shmem.wait(me, token, me.epoch, 0)
            tl.store(out_ptr, 1.0)
    shmem.finish(me)


def test_a_wait_that_lasts_too_long() -> None:
    call = {"world": 2, "grid": 1, "out_type": shape_of(1), "signals": {"token": 1}, "calls": 1}
    simulator.run(ring_kernel, **call, ROUNDS=200)
    with pytest.raises(
        simulator.WaitTimeoutError, match=r"Rank 1, program 0 in call 1 has waited at .* signal token\[0\]"
    ):
        simulator.run(ring_kernel, **call, ROUNDS=200, patience=100)


@triton.jit
def ticket_kernel(team, done, out_ptr):
    """Program 0 waits for program 1."""
    me = shmem.start(team)
    if tl.program_id(0) == 0:
        shmem.wait(me, done, me.epoch, me.rank)
    else:
        shmem.signal(me, done, me.rank)
    tl.store(out_ptr + tl.program_id(0), 1.0)
    shmem.finish(me)


def test_a_wait_for_a_higher_id_may_be_declared() -> None:
    call = {"world": 2, "grid": 2, "out_type": shape_of(2), "signals": {"done": 1}}
    with pytest.raises(simulator.WaitOrderError, match="program 1 in call 1 raises: a program of a higher id"):
        simulator.run(ticket_kernel, **call)
    with pytest.raises(simulator.WaitOrderError):
        simulator.run(ticket_kernel, **call, slots=1)
    simulator.run(ticket_kernel, **call, tickets=True)
    with pytest.raises(simulator.DeadlockError, match="Further programs need a slot"):
        simulator.run(ticket_kernel, **call, tickets=True, slots=1)


@triton.jit
def next_kernel(team, done, out_ptr, DISTANCE: tl.constexpr):
    """Each program waits for the one that comes so many after it."""
    me = shmem.start(team)
    program = tl.program_id(0)
    shmem.signal(me, done + program, me.rank)
    if program + DISTANCE < tl.num_programs(0):
        shmem.wait(me, done + program + DISTANCE, me.epoch, me.rank)
    tl.store(out_ptr + program, 1.0)
    shmem.finish(me)


def test_programs_may_wait_together() -> None:
    """For those that come less than so many after them, and with that many slots they do not wait in vain."""
    call = {"world": 2, "grid": 5, "out_type": shape_of(5), "signals": {"done": 5}}
    for slots in (1, 2, None):
        simulator.run(next_kernel, **call, DISTANCE=1, together=2, slots=slots)
        simulator.run(next_kernel, **call, DISTANCE=2, together=3, slots=slots)
        for distance in (1, 2):
            with pytest.raises(simulator.WaitOrderError, match="a program of a higher id"):
                simulator.run(next_kernel, **call, DISTANCE=distance, together=distance, slots=slots)


@triton.jit
def claim_kernel(team, tickets, done, out_ptr, DRAWS: tl.constexpr):
    """Whoever draws the second ticket waits for whoever has drawn the first one."""
    me = shmem.start(team)
    ticket = shmem.claim(me, tickets, DRAWS)
    if ticket > 0:
        shmem.wait(me, done, me.epoch, me.rank)
    else:
        shmem.signal(me, done, me.rank)
    tl.store(out_ptr + ticket, 1.0)
    shmem.finish(me)


@pytest.mark.parametrize("slots", (1, 2))
def test_claimed_work_may_be_waited_for(slots: int) -> None:
    call = {"world": 2, "grid": 2, "out_type": shape_of(2), "signals": {"tickets": 1, "done": 1}, "slots": slots}
    for seed in range(5):
        simulator.run(claim_kernel, **call, DRAWS=2, seed=seed)
    for draws in (1, 3):
        with pytest.raises(simulator.SignalCountError, match=rf"tickets\[0\].*draw {draws} in each call"):
            simulator.run(claim_kernel, **call, DRAWS=draws)


@triton.jit
def epoch_kernel(team, out_ptr):
    me = shmem.start(team)
    tl.store(out_ptr, 1.0)
    shmem.finish(me)
    if me.rank == 1:
        shmem.finish(me._replace(epoch=me.epoch + 1))


def test_an_epoch_of_its_own() -> None:
    with pytest.raises(simulator.EpochMismatchError, match=r"rank|Rank 1, program 0 in call 1"):
        simulator.run(epoch_kernel, world=2, grid=1, out_type=shape_of(1))


@triton.jit
def mixed_kernel(x_ptr, team, out_ptr, BLOCK: tl.constexpr):
    """Much of the language: reductions, casts, three dimensions of a grid."""
    me = shmem.start(team)
    row = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
    x = tl.load(x_ptr + row * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    total = tl.sum(x, axis=0) + tl.max(x, 0) - tl.cdiv(BLOCK, 3)
    tl.store(out_ptr + row, total.to(x_ptr.dtype.element_ty))
    shmem.finish(me)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_language(dtype: Any) -> None:
    x = np.random.default_rng(0).integers(-4, 5, (6, 8)).astype(dtype)
    outs, _ = simulator.run(mixed_kernel, [x] * 2, world=2, grid=(2, 3), out_type=shape_of(6, dtype=dtype), BLOCK=8)
    wide = x.astype(np.float32)
    np.testing.assert_array_equal(outs[0], (wide.sum(1) + wide.max(1) - 3).astype(dtype))


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, team, out_ptr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    me = shmem.start(team)
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    if WIDE:
        x = x.to(tl.int64)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + BLOCK + i, x - y)
    tl.store(out_ptr + 2 * BLOCK + i, x * y)
    tl.store(out_ptr + 3 * BLOCK + i, x // y)
    tl.store(out_ptr + 4 * BLOCK + i, x % y)
    tl.store(out_ptr + 5 * BLOCK + i, x & y)
    tl.store(out_ptr + 6 * BLOCK + i, x << 3)
    tl.store(out_ptr + 7 * BLOCK + i, 7 - x * 3 + (-2))
    tl.store(out_ptr + 8 * BLOCK + i, ((x < y) & (x >= -3)) + 2 * (x == 4))
    # Scalars, and blocks of two dimensions.
    first = tl.load(x_ptr) + tl.load(y_ptr)
    tl.store(out_ptr + 9 * BLOCK + i[:, None] * BLOCK + i[None, :], (x[:, None] - y[None, :]) * first)
    shmem.finish(me)


@pytest.mark.parametrize("wide", [False, True])
def test_integers_are_those_of_c(wide: bool) -> None:
    rng = np.random.default_rng(0)
    x = np.append(rng.integers(-50, 50, 15), np.iinfo(np.int32).max).astype(np.int32)
    y = np.append(rng.integers(1, 9, 8), rng.integers(-9, 0, 8)).astype(np.int32)
    type_ = np.int64 if wide else np.int32
    outs, _ = simulator.run(
        arithmetic_kernel, [x], [y], world=1, grid=1, out_type=shape_of(25, 16, dtype=type_), BLOCK=16, WIDE=wide
    )
    a, b = x.astype(type_), y.astype(type_)
    quotient = np.trunc(a / b).astype(type_)
    compared = ((a < b) & (a >= -3)) + 2 * (a == 4)
    rows = [a + b, a - b, a * b, quotient, a - quotient * b, a & b, a << 3, 7 - a * 3 - 2, compared]
    rows.extend((a[:, None] - b[None, :]) * type_(x[0] + y[0]))
    np.testing.assert_array_equal(outs[0], np.stack(rows))


@triton.jit
def cast_kernel(x_ptr, team, f32_ptr, f16_ptr, bf16_ptr, back_ptr, SIZE: tl.constexpr):
    me = shmem.start(team)
    i = tl.arange(0, SIZE)
    x = tl.load(x_ptr + i, mask=i < SIZE - 1, other=0.0)
    tl.store(f32_ptr + i, x.to(tl.float32))
    tl.store(f16_ptr + i, x.to(tl.float16))
    tl.store(bf16_ptr + i, x.to(tl.bfloat16))
    tl.store(back_ptr + i, (x.to(tl.float32) * 1.0625).to(x_ptr.dtype.element_ty))
    shmem.finish(me)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "int8"])
def test_casts_from_8_bits(dtype: str) -> None:
    """All 256 numbers, infinities and NaN among them."""
    x = np.arange(256).astype(np.uint8).view(dtype)
    types = (F32, np.dtype(np.float16), BF16, x.dtype)
    (outs,), _ = simulator.run(
        cast_kernel, [x], world=1, grid=1, calls=1, out_type=[shape_of(256, dtype=type_) for type_ in types], SIZE=256
    )
    wide = np.append(x[:-1].astype(F32), F32.type(0))
    with np.errstate(all="ignore"):
        for out, type_ in zip(outs, types[:-1]):
            np.testing.assert_array_equal(out.astype(F32), wide.astype(type_).astype(F32))
        back = wide * F32.type(1.0625)
        if dtype != "int8":
            largest = float(jax.numpy.finfo(dtype).max)
            back = np.clip(back, -largest, largest)  # too large for 8 bits: the largest number
        np.testing.assert_array_equal(outs[-1].astype(F32), back.astype(x.dtype).astype(F32))


@triton.jit
def functions_kernel(x_ptr, team, out_ptr, BLOCK: tl.constexpr):
    me = shmem.start(team)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    bits = x.to(tl.int32, bitcast=True)
    tl.store(out_ptr + i, tl.exp2(x))
    tl.store(out_ptr + BLOCK + i, tl.log2(x))
    tl.store(out_ptr + 2 * BLOCK + i, 5 * (1 - 2 / (tl.exp2(x * (2 * 1.4426950408889634 / 5)) + 1)))
    tl.store(out_ptr + 3 * BLOCK + i, tl.where(x > 0, x, float("-inf")))
    tl.store(out_ptr + 4 * BLOCK + i, tl.where(x == x, 0.0, float("nan")))
    tl.store(out_ptr + 5 * BLOCK + i, tl.maximum(x, 0.5))
    tl.store(out_ptr + 6 * BLOCK + i, ((bits & -2) | 1).to(tl.float32, bitcast=True))
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(1, 6, 2):
        total += (x - j) * 0.5
    tl.store(out_ptr + 7 * BLOCK + i, total)
    tl.store(out_ptr + 8 * BLOCK + i, 2 - (x <= 1).to(tl.float32) - (x != 0.0).to(tl.float32))
    tl.store(out_ptr + 9 * BLOCK + i, tl.max(tl.where(x == x, float("nan"), x), axis=0) + x)
    shmem.finish(me)


def test_functions_of_f32() -> None:
    special = [np.nan, np.inf, -np.inf, 0, -0.0, 1e-40, 1, -1]
    x = np.append(np.random.default_rng(0).standard_normal(24) * 9, special).astype(F32)
    outs, _ = simulator.run(functions_kernel, [x], world=1, grid=1, out_type=shape_of(10, 32), BLOCK=32)
    with np.errstate(all="ignore"):
        expected: list[Any] = [
            np.exp2(x),
            np.log2(x),
            5 * np.tanh(x / 5),
            np.where(x > 0, x, -np.inf),
            np.where(x == x, 0, np.nan),
            np.fmax(x, 0.5),
            (x.view(np.int32) & -2 | 1).view(F32),
            1.5 * x - 4.5,
            2.0 - (x <= 1) - (x != 0),
            x * np.nan,
        ]
        np.testing.assert_allclose(outs[0], np.stack(expected), rtol=3e-5, atol=1e-6)


@triton.jit
def libdevice_kernel(x_ptr, team, out_ptr, missing_ptr, BLOCK: tl.constexpr, UNKNOWN: tl.constexpr):
    me = shmem.start(team)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, libdevice.tanh(x))
    tl.store(out_ptr + BLOCK + i, libdevice.pow(x, 3))
    tl.store(out_ptr + 2 * BLOCK + i, atan2(x, 2.0))
    tl.store(out_ptr + 3 * BLOCK + i, libdevice.round(x))
    tl.store(out_ptr + 4 * BLOCK + i, libdevice.fast_expf(x) * libdevice.rsqrt(4.0))
    tl.store(out_ptr + 5 * BLOCK + i, tl.extra.libdevice.erf(x))
    tl.store(missing_ptr + i, libdevice.isnan(x))
    if UNKNOWN == "j0":
        tl.store(out_ptr + i, libdevice.j0(x))
    if UNKNOWN == "erfcx":
        tl.store(out_ptr + i, libdevice.erfcx(x.to(tl.float64)).to(tl.float32))
    shmem.finish(me)


def test_functions_of_libdevice() -> None:
    x = np.append(np.random.default_rng(0).standard_normal(12), [0.5, -1.5, np.nan, 0.49999997]).astype(F32)
    keywords = {"world": 1, "grid": 1, "out_type": (shape_of(6, 16), shape_of(16, dtype="bool")), "BLOCK": 16}
    ((out, missing),), _ = simulator.run(libdevice_kernel, [x], **keywords, UNKNOWN=None)
    expected = [
        np.tanh(x),
        x**3,
        np.arctan2(x, 2),
        np.trunc(x.astype(float) + np.copysign(0.5, x)),
        np.exp(x) / 2,
        np.vectorize(math.erf)(x),
    ]
    np.testing.assert_allclose(out, np.stack(expected), rtol=1e-6)
    np.testing.assert_array_equal(missing, np.isnan(x))
    for name, symbol in (("j0", "__nv_j0f"), ("erfcx", "__nv_erfcx")):
        with fails(NotImplementedError, f"the simulator has no {symbol} of libdevice"):
            simulator.run(libdevice_kernel, [x], **keywords, UNKNOWN=name)


@triton.jit
def blocks_kernel(x_ptr, team, out_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    """Of a block of two dimensions and one of three."""
    me = shmem.start(team)
    a, b, c = tl.arange(0, A), tl.arange(0, B), tl.arange(0, C)
    plane = b[:, None] * C + c[None, :]
    y = tl.load(x_ptr + plane)
    x = tl.load(x_ptr + a[:, None, None] * (B * C) + plane[None])
    at = out_ptr
    tl.store(at + c, tl.sum(y, axis=0))
    at += C
    tl.store(at + b, tl.max(y, axis=1))
    at += B
    tl.store(at + plane, tl.sum(x, axis=0))
    at += B * C
    tl.store(at + a[:, None] * C + c[None, :], tl.max(x, axis=1))
    at += A * C
    tl.store(at + a[:, None] * B + b[None, :], tl.min(x, axis=2))
    at += A * B
    tl.store(at + c[:, None] * B + b[None, :], tl.trans(y))
    at += B * C
    tl.store(at + plane, tl.cumsum(y, axis=1))
    at += B * C
    tl.store(at + plane, tl.where(y > 0, y, float("-inf")))
    at += B * C
    tl.store(at + plane, tl.fma(y, y, y))
    at += B * C
    tl.store(at + plane, tl.clamp(y, -1.0, 1.0))
    at += B * C
    tl.store(at + plane, tl.abs(-y) + y[:, None, :].reshape(B, C))
    at += B * C
    tl.store(at + b, tl.argmax(y, axis=1).to(y.dtype))
    at += B
    tl.store(at, tl.sum(y))
    shmem.finish(me)


@pytest.mark.parametrize("dtype", [F32, BF16, np.dtype(np.float16)], ids=str)
def test_blocks_of_more_dimensions(dtype: Any) -> None:
    x = np.random.default_rng(0).integers(-4, 5, (4, 8, 16)).astype(dtype)
    wide = x.astype(F32)
    y = wide[0]
    expected = [
        y.sum(0),
        y.max(1),
        wide.sum(0),
        wide.max(1),
        wide.min(2),
        y.T,
        y.cumsum(1),
        np.where(y > 0, y, -np.inf),
    ]
    expected += [y * y + y, np.clip(y, -1, 1), abs(y) + y, y.argmax(1), y.sum()]
    flat = np.concatenate([np.ravel(part) for part in expected])
    outs, _ = simulator.run(
        blocks_kernel, [x], world=1, grid=1, out_type=shape_of(flat.size, dtype=dtype), A=4, B=8, C=16
    )
    np.testing.assert_array_equal(outs[0].astype(F32), flat)


@triton.jit
def dot_kernel(x_ptr, y_ptr, team, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr):
    me = shmem.start(team)
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(x_ptr + m[:, None] * K + k[None, :]).to(DTYPE)
    y = tl.load(y_ptr + n[:, None] * K + k[None, :]).to(DTYPE)
    acc = tl.dot(x, tl.trans(y), tl.full((M, N), 1.0, tl.float32), input_precision="ieee")
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc)
    shmem.finish(me)


@pytest.mark.parametrize("computed", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_products(dtype: str, computed: str) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-4, 5, shape).astype(dtype) for shape in ((16, 64), (32, 64)))
    outs, _ = simulator.run(
        dot_kernel,
        [x],
        [y],
        world=1,
        grid=1,
        out_type=shape_of(16, 32),
        M=16,
        N=32,
        K=64,
        DTYPE=getattr(tl, computed),
    )
    np.testing.assert_array_equal(outs[0], x.astype(F32) @ y.astype(F32).T + 1)


def test_the_same_seed_is_the_same_run() -> None:
    kernel = KERNELS[0]
    call, settings = kernel.case(1, 3)
    settings["policy"] = "random"
    first, again = (call.run(kernel.kernel, **settings) for _ in range(2))
    assert first.spans == again.spans
    assert any(call.run(kernel.kernel, **{**settings, "seed": seed}).spans != first.spans for seed in range(2, 6))


def test_slots_limit_the_programs_that_run() -> None:
    kernel = KERNELS[0]
    call, settings = kernel.case(1, 2)
    for slots in (1, 2):
        trace = call.run(kernel.kernel, **{**settings, "slots": slots})
        assert max(trace.lanes().values()) + 1 <= slots


def test_one_rank_runs_ahead() -> None:
    """The policies differ: ahead, a rank is in its second call while another one is in its first."""
    kernel = next(kernel for kernel in KERNELS if kernel.name == "all_gather_matmul")
    call, _ = kernel.case(0, 4)
    overlaps = 0
    for seed in range(5):
        spans = call.run(kernel.kernel, policy="straggler", seed=seed, slots=2).spans
        begin = min(span.begin for span in spans if span.call == 2)
        overlaps += any(span.call == 1 and span.end > begin for span in spans)
    assert overlaps


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"policy": "fair"}, "no policy 'fair'"), ({"slots": 0}, "at least one slot")],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exchange(**settings)


FORGOTTEN = "1 operands and 1 results make 2 pointers, but it has 3 parameters for them"


@triton.jit
def talkative_kernel(x_ptr, team, inbox, arrived, box, out_ptr, SIZE: tl.constexpr):
    """Has a parameter of each kind, and uses none."""
    shmem.finish(shmem.start(team))


def test_wrong_operands() -> None:
    with pytest.raises(ValueError, match="one for each rank"):
        simulator.run(exchange_kernel, [np.zeros(8, F32)], world=2, grid=1, out_type=shape_of(8))
    with fails(TypeError, "The kernel of mixed_kernel does not fit its call: 1 operands and 2 results make 3 pointers"):
        simulator.run(mixed_kernel, [np.zeros(8, F32)] * 2, world=2, grid=1, out_type=[shape_of(8)] * 2, BLOCK=8)


@pytest.mark.parametrize(
    ("wrong", "message"),
    (
        ({"grid": 0}, "a grid of one to three positive whole numbers, not 0"),
        ({"grid": 1.5}, "a grid of one to three positive whole numbers, not 1.5"),
        ({"calls": 0}, "calls of at least 1, not 0"),
        ({"scratch": {"inbox": 8}}, "for scratch 'inbox' an object with shape and dtype, not 8"),
        ({"out_type": [8]}, "for out_type an object with shape and dtype, not 8"),
        ({"signals": {"arrived": -1}}, "for signals 'arrived' sizes that are whole numbers and not negative"),
        ({"together": 0}, "together of at least 1"),
        ({"BLOCK": [8]}, "constants that can be hashed"),
    ),
)
def test_wrong_calls(wrong: dict[str, Any], message: str) -> None:
    x = [np.zeros(8, F32)] * 2
    call = {"world": 2, "grid": 1, "out_type": shape_of(8), "scratch": {"inbox": shape_of(8)}, "BLOCK": 8, "FAULT": ""}
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        simulator.run(exchange_kernel, x, **{"signals": {"arrived": 1}} | call | wrong)


def test_wrong_kinds() -> None:
    call = {"world": 2, "grid": 1, "out_type": shape_of(8), "BLOCK": 8}
    with pytest.raises(ValueError, match=r"operands of several kinds, float32\[4\] and float32\[8\]"):
        simulator.run(exchange_kernel, [np.zeros(8, F32), np.zeros(4, F32)], **call)
    with pytest.raises(TypeError, match=r"simulator\.run takes a kernel that is decorated"):
        simulator.run(exchange, **call)


@pytest.mark.parametrize(
    ("wrong", "message"),
    (
        (
            {"messages": {}},
            f"{FORGOTTEN} (x_ptr, box, out_ptr): is one of these a constant, or a scratch, signals or messages, that "
            "the call does not name?",
        ),
        ({"messages": {"boxes": 4}}, "it has no parameter 'boxes'; 1 operands and 1 results make 2 pointers, but"),
        ({"scratch": {}}, f"{FORGOTTEN} (x_ptr, inbox, out_ptr)"),
        ({"signals": {}}, f"{FORGOTTEN} (x_ptr, arrived, out_ptr)"),
        ({"SIZES": 4}, "it has no parameter 'SIZES'"),
        ({"descriptors": {"x_ptr": (8,)}}, "descriptors are for Gluon kernels"),
    ),
)
def test_a_call_and_a_simulation_say_the_same_of_what_was_forgotten(wrong: dict[str, Any], message: str) -> None:
    buffers = {"scratch": {"inbox": shape_of(8)}, "signals": {"arrived": 1}, "messages": {"box": 8}}
    keywords = buffers | {"grid": 1, "out_type": shape_of(8), "SIZE": 8} | wrong
    message = f"The kernel of talkative_kernel does not fit its call: {message}"
    with fails(TypeError, message) as simulated:
        simulator.run(talkative_kernel, [np.zeros(8, F32)] * 2, world=2, **keywords)
    call = lambda x: jtf.shmem_call(talkative_kernel, x, axis_name="tp", **keywords)  # noqa: E731
    with fails(TypeError, message) as called:
        jax.eval_shape(jax.shard_map(call, mesh=mesh_of(2), in_specs=P("tp"), out_specs=P("tp")), np.zeros(16, F32))
    assert str(simulated.value) == str(called.value)


@triton.jit
def careless_kernel(x_ptr, team, inbox, box, out_ptr, MESSAGES: tl.constexpr):
    me = shmem.start(team)
    if MESSAGES:
        shmem.receive(me, box + tl.arange(0, 8), 0)
    shmem.put(me, inbox, x_ptr, 0)
    shmem.finish(me)


@pytest.mark.parametrize(
    ("of_messages", "pointer"), ((False, "shmem.scratch(me, inbox, dtype)"), (True, "shmem.messages(me, box)"))
)
def test_scratch_and_messages_that_are_taken_for_pointers(of_messages: bool, pointer: str) -> None:
    call = {"world": 2, "grid": 1, "out_type": shape_of(8), "scratch": {"inbox": shape_of(8)}, "messages": {"box": 8}}
    with fails(AttributeError, "'tuple' object has no attribute") as found:
        simulator.run(careless_kernel, [np.zeros(8, F32)] * 2, **call, MESSAGES=of_messages)
    [note] = found.value.__notes__
    name = "box" if of_messages else "inbox"
    assert re.fullmatch(
        rf"in rank \d, program 0 in call 1 of careless_kernel; the parameter {name} is a tuple, and the pointer is "
        rf"{re.escape(pointer)}",
        note,
    )


def test_grids_of_numpy_numbers() -> None:
    x = [np.zeros(8, F32)] * 2
    launch = {"scratch": {"inbox": shape_of(8)}, "signals": {"arrived": 1}, "BLOCK": np.int64(8), "FAULT": ""}
    simulator.run(exchange_kernel, x, world=2, grid=np.int64(1), out_type=shape_of(8), **launch)


def test_the_kernels_stay_as_they_are() -> None:
    before = dict(vars(shmem)), tl.load, tl.tensor.__add__
    exchange()
    with pytest.raises(simulator.DeadlockError):
        exchange("silent")
    assert (dict(vars(shmem)), tl.load, tl.tensor.__add__) == before


DOCUMENTATION = (ROOT / "docs" / "simulator.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", DOCUMENTATION, re.DOTALL)


def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **edits: str) -> Any:
    """The test that the documentation shows, of the example with these edits."""
    text = (ROOT / "examples" / "custom_kernel.py").read_text()
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "custom_kernel.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "examples")
    monkeypatch.delitem(sys.modules, "custom_kernel", raising=False)
    (source,) = (body for language, body in BLOCKS if language == "python" and "def test_all_gather" in body)
    names: dict[str, Any] = {}
    exec(source, names)
    monkeypatch.delitem(sys.modules, "custom_kernel")
    return names["test_all_gather"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_documented_test_passes(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documented(tmp_path, monkeypatch)(0, 2, policy)


@pytest.mark.parametrize(
    ("policy", "error"), [("random", simulator.DataRaceError), ("straggler", simulator.UninitializedReadError)]
)
def test_the_documented_bug_is_found(
    policy: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = """    for i in range(WORLD):
        shmem.store(me, inbox_ptr + me.rank * SIZE + element, value, (me.rank + i) % WORLD, mask)
"""
    signals = """    for i in range(WORLD):
        shmem.signal(me, arrived + me.rank * tl.num_programs(0) + block, (me.rank + i) % WORLD)
"""
    (bug,) = (
        body for language, body in BLOCKS if language == "python" and body.startswith("    for i in range(WORLD)")
    )
    with pytest.raises(error) as found:
        documented(tmp_path, monkeypatch, **{stores + signals: bug})(0, None, policy)
    (shown,) = (body for _, body in BLOCKS if body.startswith(error.__name__))
    # Lines of the device API may move.
    shown, message = (
        re.sub(r":\d+", "", " ".join(text.split())) for text in (shown, f"{error.__name__}: {found.value}")
    )
    assert shown == message


def test_chrome_trace(tmp_path: Path) -> None:
    _, _, trace = exchange()
    trace.save_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {event.get("cat") for event in events} >= {"wait", "publish", "push"}
    assert any(event["name"] == "wait arrived[0] of rank 1" for event in events)
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kernel = KERNELS[0]
    call, settings = kernel.case(3, 3)
    call.run(kernel.kernel, **settings).save_png(tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


@triton.jit
def often_kernel(team, flag, out_ptr, LOOKS: tl.constexpr):
    """Waits twice for the same signal, and looks at it some more times."""
    me = shmem.start(team)
    shmem.signal(me, flag, 1 - me.rank)
    shmem.wait(me, flag, me.epoch, 1 - me.rank)
    shmem.wait(me, flag, me.epoch, 1 - me.rank)
    for _ in range(LOOKS):
        tl.atomic_add(shmem._signal_of(me, flag, me.rank), 0, sem="acquire", scope="sys")
    tl.store(out_ptr, 1.0)
    shmem.finish(me)


@pytest.mark.parametrize("policy", POLICIES)
def test_looking_again_is_no_deadlock(policy: str) -> None:
    simulator.run(
        often_kernel, world=2, grid=1, out_type=shape_of(1), signals={"flag": 1}, policy=policy, slots=1, LOOKS=10
    )


@triton.jit
def lonely_kernel(team, flag, out_ptr):
    """Polls, in a way of its own, what nobody writes."""
    me = shmem.start(team)
    while tl.atomic_add(shmem._signal_of(me, flag, me.rank), 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(out_ptr, 1.0)
    shmem.finish(me)


def test_a_poll_in_vain_is_a_deadlock() -> None:
    with pytest.raises(
        simulator.DeadlockError, match=r"test_simulator.py:\d+ in lonely_kernel(.|\n)*flag\[0\].* sees 0"
    ):
        simulator.run(lonely_kernel, world=2, grid=1, out_type=shape_of(1), signals={"flag": 1})


@triton.jit
def backward_kernel(team, flag, out_ptr):
    """The first program polls, in a way of its own, what the second one writes."""
    me = shmem.start(team)
    if tl.program_id(0) == 0:
        while tl.atomic_add(shmem._signal_of(me, flag, me.rank), 0, sem="acquire", scope="sys") < me.epoch:
            pass
        tl.store(out_ptr, 1.0)
    else:
        shmem.signal(me, flag, me.rank)
    shmem.finish(me)


def test_a_poll_for_a_later_program_is_a_deadlock() -> None:
    call = {"world": 2, "grid": 2, "out_type": shape_of(1), "signals": {"flag": 1}}
    simulator.run(backward_kernel, **call)
    with pytest.raises(simulator.DeadlockError, match="Further programs need a slot"):
        simulator.run(backward_kernel, **call, slots=1)


@triton.jit
def peek_kernel(x_ptr, team, inbox, address, out_ptr):
    """Sends the address of an operand to the peer, which reads there."""
    me = shmem.start(team)
    mine = shmem.scratch(me, inbox, tl.int64)
    shmem.store(me, mine, x_ptr.to(tl.int64), 1 - me.rank)
    shmem.signal(me, address, 1 - me.rank)
    shmem.wait(me, address, me.epoch, 1 - me.rank)
    tl.store(out_ptr, tl.load(tl.load(mine).to(tl.pointer_type(tl.float32))))
    shmem.finish(me)


def test_the_operands_of_a_peer_are_out_of_bounds() -> None:
    with pytest.raises(simulator.OutOfBoundsError, match=r"reaches the operand x_ptr of rank \d: peers share only"):
        simulator.run(
            peek_kernel,
            [np.zeros(4, F32)] * 2,
            world=2,
            grid=1,
            out_type=shape_of(1),
            scratch={"inbox": shape_of(1, dtype=np.int64)},
            signals={"address": 1},
        )


@triton.jit
def two_arrays_kernel(x_ptr, y_ptr, team, inbox, outbox, out_ptr, OPERANDS: tl.constexpr):
    """One access that has an element of each of two arrays."""
    me = shmem.start(team)
    first, second = x_ptr, y_ptr
    if not OPERANDS:
        first = shmem.scratch(me, inbox, tl.float32)
        second = shmem.scratch(me, outbox, tl.float32)
        tl.store(first, 1.0)
        tl.store(second, 2.0)
    apart = (second.to(tl.int64) - first.to(tl.int64)) // 4
    element = tl.arange(0, 2)
    tl.store(out_ptr + element, tl.load(first + element * apart))
    shmem.finish(me)


@pytest.mark.parametrize("operands", (True, False))
def test_only_operands_are_read_together(operands: bool) -> None:
    def run() -> Any:
        arrays = ([np.full(1, value, F32)] * 2 for value in (1, 2))
        return simulator.run(
            two_arrays_kernel,
            *arrays,
            world=2,
            grid=1,
            out_type=shape_of(2),
            scratch={"inbox": shape_of(1), "outbox": shape_of(1)},
            OPERANDS=operands,
        )

    if operands:
        np.testing.assert_array_equal(run()[0][0], [1, 2])
    else:
        with pytest.raises(simulator.OutOfBoundsError, match="runs from one array into another"):
            run()


@triton.jit
def volatile_kernel(x_ptr, team, flags, out_ptr, BLOCK: tl.constexpr):
    """Signals of its own: ranks swap blocks of flags, by relaxed atomics, and poll them by volatile loads."""
    me = shmem.start(team)
    element = tl.arange(0, BLOCK)
    mine = shmem.scratch(me, flags, tl.int32)
    tl.atomic_xchg(shmem.remote(me, mine, 1 - me.rank) + element, tl.load(x_ptr + element), sem="relaxed", scope="sys")
    value = tl.load(mine + element, volatile=True)
    while tl.min(value, axis=0) < 0:  # scratch begins with -1 in each word
        value = tl.load(mine + element, volatile=True)
    tl.store(out_ptr + element, value)
    shmem.finish(me)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_poll_by_volatile_loads_sleeps(policy: str) -> None:
    x = [np.arange(4, dtype=np.int32) + 10 * rank for rank in range(2)]
    outs, _ = simulator.run(
        volatile_kernel,
        x,
        world=2,
        grid=1,
        out_type=shape_of(4, dtype=np.int32),
        scratch={"flags": shape_of(4, dtype=np.int32)},
        calls=2,
        policy=policy,
        patience=200,
        BLOCK=4,
    )
    np.testing.assert_array_equal(outs, x[::-1])
