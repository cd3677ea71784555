"""The memory model: which releases and acquires order what, by litmus tests."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
import triton
import triton.language as tl

from jaxtaxfree import simulator
from jaxtaxfree.kernels import shmem
from jaxtaxfree.simulator.scheduler import POLICIES

WORD = jax.ShapeDtypeStruct((1,), np.int32)


def outcome(kernel: Any, **call: Any) -> str:
    """ "right", or the name of what is found under some seed."""
    for seed, policy in itertools.product(range(2), POLICIES):
        try:
            outs, _ = simulator.run(kernel, **call, seed=seed, policy=policy)
        except simulator.SimulationError as error:
            return type(error).__name__
        assert outs[-1][0] == 42
    return "right"


@triton.jit
def message_kernel(
    team,
    data,
    flag,
    out_ptr,
    TO: tl.constexpr,
    BARRIER: tl.constexpr,
    RELEASE: tl.constexpr,
    ACQUIRE: tl.constexpr,
    FROM_SCOPE: tl.constexpr,
    TO_SCOPE: tl.constexpr,
):
    """Program 0 of rank 0 sends a word to program 1 of rank TO."""
    me = shmem.start(team)
    mine = shmem.scratch(me, data, tl.int32)
    if tl.program_id(0) == 0:
        if me.rank == 0:
            shmem.store(me, mine, 42, TO)
            if BARRIER:
                tl.debug_barrier()
            tl.atomic_add(shmem._signal_of(me, flag, TO), 1, sem=RELEASE, scope=FROM_SCOPE)
    elif me.rank == TO:
        flag_ptr = shmem._signal_of(me, flag, me.rank)
        while tl.atomic_add(flag_ptr, 0, sem=ACQUIRE, scope=TO_SCOPE) < me.epoch:
            pass
        tl.store(out_ptr, tl.load(mine))
    shmem.finish(me)


@pytest.mark.covers(3)
@pytest.mark.parametrize("to", [0, 1], ids=["same-rank", "peer"])
@pytest.mark.parametrize("from_scope", ["cta", "gpu", "sys"])
@pytest.mark.parametrize("to_scope", ["cta", "gpu", "sys"])
def test_message(to: int, from_scope: str, to_scope: str) -> None:
    reaches = {0: ("gpu", "sys"), 1: ("sys",)}[to]
    in_scope = from_scope in reaches and to_scope in reaches
    for barrier, release, acquire in itertools.product(
        (True, False), ("release", "acq_rel", "relaxed"), ("acquire", "acq_rel", "relaxed")
    ):
        ordered = in_scope and barrier and release != "relaxed" and acquire != "relaxed"
        found = outcome(
            message_kernel,
            # Rank 0 alone has the word that it sends to itself.
            world=to + 1,
            grid=2,
            out_type=WORD,
            scratch={"data": WORD},
            signals={"flag": 1},
            calls=1,
            TO=to,
            BARRIER=barrier,
            RELEASE=release,
            ACQUIRE=acquire,
            FROM_SCOPE=from_scope,
            TO_SCOPE=to_scope,
        )
        assert found == ("right" if ordered else "DataRaceError"), (barrier, release, acquire)


@triton.jit
def relay_kernel(team, data, flag, out_ptr, LAST: tl.constexpr, THROUGH: tl.constexpr):
    """Rank 0 stores into the memory of rank LAST, and tells it through the ranks between."""
    me = shmem.start(team)
    mine = shmem.scratch(me, data, tl.int32)
    if me.rank == 0:
        shmem.store(me, mine, 42, LAST)
        shmem.signal(me, flag, 1)
    elif me.rank < LAST:
        if THROUGH:
            shmem.wait(me, flag, me.epoch, me.rank - 1)
        shmem.signal(me, flag, me.rank + 1)
    else:
        shmem.wait(me, flag, me.epoch, me.rank - 1)
        tl.store(out_ptr, tl.load(mine))
    shmem.finish(me)


@pytest.mark.parametrize("last", [2, 3])
def test_what_a_program_has_learned_it_passes_on(last: int) -> None:
    call = {
        "world": last + 1,
        "grid": 1,
        "out_type": WORD,
        "scratch": {"data": WORD},
        "signals": {"flag": 1},
        "calls": 1,
        "LAST": last,
    }
    assert outcome(relay_kernel, **call, THROUGH=True) == "right"
    assert outcome(relay_kernel, **call, THROUGH=False) in ("DataRaceError", "UninitializedReadError")


@triton.jit
def turns_kernel(team, data, flag, answer, out_ptr, ANSWER: tl.constexpr):
    """Rank 0 sends a word in each call; rank 1 reads it and, to be asked again, answers."""
    me = shmem.start(team)
    mine = shmem.scratch(me, data, tl.int32)
    if me.rank == 0:
        if ANSWER:
            # The copy of this call was read two calls ago.
            shmem.wait(me, answer, me.epoch - 2, 1)
        shmem.store(me, mine, 42, 1)
        shmem.signal(me, flag, 1)
    else:
        shmem.wait(me, flag, me.epoch, 0)
        tl.store(out_ptr, tl.load(mine))
        if ANSWER:
            shmem.signal(me, answer, 0)
    shmem.finish(me)


@pytest.mark.parametrize("calls", [1, 2, 3, 5])
def test_a_buffer_is_free_again_when_its_reader_says_so(calls: int) -> None:
    call = {
        "world": 2,
        "grid": 1,
        "out_type": WORD,
        "scratch": {"data": WORD},
        "signals": {"flag": 1, "answer": 1},
        "calls": calls,
    }
    assert outcome(turns_kernel, **call, ANSWER=True) == "right"
    # Two copies hold for two calls; the third one may overtake the reader of the first.
    assert outcome(turns_kernel, **call, ANSWER=False) == ("right" if calls < 3 else "DataRaceError")


@triton.jit
def neighbours_kernel(team, out_ptr, SPLIT: tl.constexpr, SIZE: tl.constexpr):
    """Two programs write neighbouring elements, or the same one."""
    me = shmem.start(team)
    at = tl.program_id(0) * SPLIT
    element = at + tl.arange(0, SIZE)
    tl.store(out_ptr + element, (element * 0 + 42).to(out_ptr.dtype.element_ty), mask=element < at + 3)
    shmem.finish(me)


@pytest.mark.parametrize("dtype", [np.int8, np.float16, np.float32, np.int64], ids=lambda dtype: dtype.__name__)
def test_neighbouring_elements_are_no_race(dtype: Any) -> None:
    call = {"world": 2, "grid": 3, "out_type": jax.ShapeDtypeStruct((9,), dtype), "SIZE": 4}
    assert outcome(neighbours_kernel, **call, SPLIT=3) == "right"
    assert outcome(neighbours_kernel, **call, SPLIT=2) == "DataRaceError"
