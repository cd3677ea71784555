"""Kernels that find each other by a table of bases, as Iris's do: rules that are kept, and faults that are found.

Iris's own kernels are in test_simulator_iris_wheel.py; these need nothing of it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate

from jaxtaxfree import simulator
from jaxtaxfree.kernels import shmem
from jaxtaxfree.simulator.iris import (
    BASES,
    CONTEXT,
    RANK,
    WORLD,
    Barrier,
    Buffer,
    Fill,
    Launch,
    PerRank,
    local,
    symmetric,
)
from jaxtaxfree.simulator.scheduler import POLICIES


@triton.jit
def there(ptr, here, rank, bases):
    """Where a rank keeps what is at an address here."""
    base = tl.load(bases + rank).to(tl.int64)
    return (base + (ptr.to(tl.int64) - tl.load(bases + here).to(tl.int64))).to(ptr.dtype)


def outcome(launches: Any, results: Any, expected: Any, *, world: int = 2, seeds: int = 3, **settings: Any) -> str:
    """ "right", or the name of what is found in some interleaving and what it says."""
    for policy in POLICIES:
        for seed in range(seeds):
            try:
                outs, _ = simulator.run_iris(
                    launches, world=world, results=results, seed=seed, policy=policy, patience=5_000, **settings
                )
            except simulator.SimulationError as error:
                return f"{type(error).__name__}: {error}"
            for rank, out in enumerate(outs):
                wanted = expected(rank)
                if wanted is not None:
                    np.testing.assert_array_equal(out.astype(np.float64), wanted)
    return "right"


# A word and a flag, from rank 0 to rank 1.


@triton.jit
def send(
    data, flag, rank, bases, SEM: tl.constexpr, SCOPE: tl.constexpr, BARRIER: tl.constexpr, LATE: tl.constexpr = False
):
    at = tl.arange(0, 8)
    to = there(data, rank, 1 - rank, bases)
    if not LATE:
        tl.store(to + at, at + 1)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(there(flag, rank, 1 - rank, bases), 1, sem=SEM, scope=SCOPE)
    if LATE:
        tl.store(to + at, at + 1)


@triton.jit
def take(data, flag, out, SEM: tl.constexpr, SCOPE: tl.constexpr, POLL: tl.constexpr, RESET: tl.constexpr):
    at = tl.arange(0, 8)
    if POLL == "add":
        while tl.atomic_add(flag, 0, sem=SEM, scope=SCOPE) != 1:
            pass
    elif POLL == "cas":
        while tl.atomic_cas(flag, 1, 1, sem=SEM, scope=SCOPE) != 1:
            pass
    elif POLL == "lock":
        while tl.atomic_cas(flag, 1, 0, sem=SEM, scope=SCOPE) != 1:
            pass
    elif POLL == "volatile":
        while tl.load(flag, volatile=True) != 1:
            pass
    elif POLL == "plain":
        while tl.load(flag) != 1:
            pass
    tl.store(out + at, tl.load(data + at))
    if RESET:
        tl.store(flag, 0)


def message(
    *,
    sem: str = "release",
    scope: str = "sys",
    barrier: bool = True,
    late: bool = False,
    acquire: str = "acquire",
    acquire_scope: str = "sys",
    poll: str = "add",
    reset: bool = False,
    rounds: int = 1,
    between: bool = True,
    triton: str = "3.9",
) -> str:
    data, flag, out = symmetric((8,), np.int32), symmetric((1,), np.int32, 0), local((8,), np.int32, 0)
    both = {"data": data, "flag": flag}
    settings = {"SEM": sem, "SCOPE": scope, "BARRIER": barrier, "LATE": late}
    launches: list[Any] = [
        Launch(send, 1, {**both, "rank": RANK, "bases": BASES, **settings}, ranks=(0,)),
        Launch(
            take,
            1,
            {**both, "out": out, "SEM": acquire, "SCOPE": acquire_scope, "POLL": poll, "RESET": reset},
            ranks=(1,),
        ),
    ]
    launches += [Barrier()] if between else []
    return outcome(launches, out, lambda rank: np.arange(1, 9) if rank else None, rounds=rounds, triton=triton)


@pytest.mark.parametrize("poll", ["add", "cas", "lock"])
def test_a_message(poll: str) -> None:
    assert message(poll=poll) == "right"
    # The compiler puts the barrier there by itself, from 3.9 on.
    assert message(poll=poll, barrier=False) == "right"
    assert message(poll=poll, triton="3.8") == "right"


def test_who_acquires_a_release_may_store_to_the_flag() -> None:
    assert message(reset=True, rounds=3) == "right"


@pytest.mark.parametrize(
    "fault, says",
    {
        "relaxed": ({"sem": "relaxed"}, "DataRaceError"),
        "relaxed poll": ({"acquire": "relaxed"}, "DataRaceError"),
        "volatile poll": ({"poll": "volatile"}, "DataRaceError"),
        "release at gpu": ({"scope": "gpu"}, "scopes 'gpu' and 'sys'"),
        "release at cta": ({"scope": "cta"}, "scopes 'cta' and 'sys'"),
        "acquire at gpu": ({"acquire_scope": "gpu"}, "scopes 'sys' and 'gpu'"),
        "stored behind": ({"late": True}, "DataRaceError|UninitializedReadError"),
        "bare release of 3.8": ({"barrier": False, "triton": "3.8"}, "as Triton before 3.9 compiles it"),
        "left flag": ({"rounds": 2}, "DataRaceError"),
        "no barrier between": ({"rounds": 3, "reset": True, "between": False}, "DataRaceError"),
    }.items(),
    ids=lambda value: value if isinstance(value, str) and " " in value else None,
)
def test_faults_in_a_message(fault: str, says: tuple[dict[str, Any], str]) -> None:
    keywords, text = says
    found = message(**keywords)
    assert any(part in found for part in text.split("|")), (fault, found)
    assert "in send" in found or "in take" in found


def test_a_plain_load_does_not_wait() -> None:
    """A GPU would wait for nothing: Triton deletes the loop."""
    found = message(poll="plain")
    assert found.startswith(("DroppedWaitError", "DataRaceError")) and "Triton deletes" in found and "in take" in found


@triton.jit
def poll_alone(flag):
    while tl.load(flag) == 0:
        pass


def test_a_plain_load_that_nobody_answers() -> None:
    flag = symmetric((4,), np.int32, 0)
    found = outcome(Launch(poll_alone, 1, {"flag": flag}), flag, lambda rank: None)
    assert found.startswith("DroppedWaitError") and "polls flag[0]" in found and "in poll_alone" in found


# Atomics.


@triton.jit
def two_flags(data, first, second, out, rank, bases, SCOPE: tl.constexpr, TAKES: tl.constexpr):
    """Rank 0 publishes by its first flag, and goes on without publishing; rank 1 waits for the second one."""
    if rank == 0:
        tl.store(there(data, rank, 1, bases), 5)
        tl.atomic_xchg(first, 1, sem="release", scope=SCOPE)
        tl.atomic_xchg(second, 1, sem="relaxed", scope="sys")
    else:
        while tl.atomic_add(there(second, rank, 0, bases), 0, sem="acquire", scope="sys") == 0:
            pass
        if TAKES == "first":
            tl.atomic_add(there(first, rank, 0, bases), 0, sem="acquire", scope="sys")
            tl.store(there(second, rank, 0, bases), 0)
        tl.store(out, tl.load(data))


def _two_flags(scope: str, takes: str) -> str:
    data, out = symmetric((1,), np.int32), local((1,), np.int32, 0)
    flags = {name: symmetric((1,), np.int32, 0) for name in ("first", "second")}
    arguments = {**flags, "data": data, "out": out, "rank": RANK, "bases": BASES, "SCOPE": scope, "TAKES": takes}
    return outcome(Launch(two_flags, 1, arguments), out, lambda rank: None)


@pytest.mark.parametrize("scope", ["gpu", "cta"])
def test_a_report_names_the_release_that_reaches_no_other_rank(scope: str) -> None:
    found = _two_flags(scope, "nothing")
    assert f"The writing program has released since at scope '{scope}', at " in found
    assert "in two_flags, which reaches no other rank" in found


def test_a_release_does_not_publish_what_follows() -> None:
    """The second flag was changed behind the release: who has acquired it may not store to it."""
    found = _two_flags("sys", "first")
    assert "Data race on second[0] of rank 0: the store of rank 1" in found and "overwrites what the atomic" in found


@triton.jit
def look_and_tell(flag, told, rank, bases, SEM: tl.constexpr):
    """Rank 1 looks at a flag of rank 0 and tells so, and rank 0 stores to it then."""
    if rank == 1:
        tl.atomic_add(there(flag, rank, 0, bases), 0, sem="relaxed", scope="sys")
        tl.atomic_xchg(there(told, rank, 0, bases), 1, sem=SEM, scope="sys")
    else:
        while tl.atomic_add(told, 0, sem="acquire", scope="sys") == 0:
            pass
        tl.store(flag, 1)


def test_a_store_over_what_somebody_polls() -> None:
    def run(sem: str) -> str:
        flag, told = symmetric((1,), np.int32, 0), symmetric((1,), np.int32, 0)
        arguments = {"flag": flag, "told": told, "rank": RANK, "bases": BASES, "SEM": sem}
        return outcome(Launch(look_and_tell, 1, arguments), flag, lambda rank: None)

    assert run("release") == "right"
    assert "who polls may find it before or after" in run("relaxed")


@triton.jit
def add_all(counts, came, out, rank, world, bases, B: tl.constexpr, RELEASE: tl.constexpr):
    """All but rank 0 add to a block of rank 0 and count up; rank 0 waits for them."""
    at = tl.arange(0, B)
    if rank > 0:
        tl.atomic_add(there(counts, rank, 0, bases) + at, 1, sem="relaxed", scope="sys")
        tl.atomic_add(there(came, rank, 0, bases), 1, sem=RELEASE, scope="sys")
    else:
        while tl.atomic_add(came, 0, sem="acquire", scope="sys") < world - 1:
            pass
        tl.store(out + at, tl.load(counts + at))


@pytest.mark.parametrize(
    "release, compiler, block, found",
    [
        ("release", "3.9", 8, "right"),
        ("release", "3.8", 8, "DataRaceError"),
        ("relaxed", "3.9", 8, "DataRaceError"),
        ("release", "3.8", 1, "right"),
    ],
)
def test_many_threads_of_a_block_add(release: str, compiler: str, block: int, found: str) -> None:
    """The atomics of a block are many threads', of which one releases: a barrier has to stand between."""
    counts, came, out = symmetric((block,), np.int32, 0), symmetric((1,), np.int32, 0), local((block,), np.int32, 0)
    arguments = {"counts": counts, "came": came, "out": out, "rank": RANK, "world": WORLD}
    launch = Launch(add_all, 1, {**arguments, "bases": BASES, "B": block, "RELEASE": release})

    def sums(rank: int) -> np.ndarray | None:
        return None if rank else np.full(block, 2)

    assert outcome(launch, out, sums, world=3, triton=compiler).startswith(found)


@triton.jit
def number(x, out, OP: tl.constexpr):
    at = tl.arange(0, 2)
    if OP == "add":
        old = tl.atomic_add(x + at * 0, tl.full([2], 0.5, x.dtype.element_ty), sem="relaxed", scope="sys")
    else:
        old = tl.atomic_xchg(x + at, tl.full([2], 0.5, x.dtype.element_ty), sem="relaxed", scope="sys")
    tl.store(out + at, old)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32, np.float64])
def test_atomics_of_floats(dtype: Any) -> None:
    x, out = local((2,), dtype, 2), local((2,), dtype)
    outs, _ = simulator.run_iris(Launch(number, 1, {"x": x, "out": out, "OP": "add"}), world=1, results=[x, out])
    assert [sorted(each.astype(float)) for each in outs[0]] == [[2, 3], [2, 2.5]]  # two lanes, one word
    if np.dtype(dtype).itemsize == 2:
        return  # Triton has no exchange of these
    exchange = Launch(number, 1, {"x": x, "out": out, "OP": "xchg"})
    outs, _ = simulator.run_iris(exchange, world=1, results=[x, out])
    assert [each.astype(float).tolist() for each in outs[0]] == [[0.5, 0.5], [2, 2]]


@triton.jit
def wait_by(flag, rank, SEM: tl.constexpr):
    if rank == 0:
        while tl.atomic_cas(flag, 1, 2, sem=SEM, scope="sys") != 1:
            pass
    else:
        tl.debug_barrier()


def test_a_compare_and_swap_that_fails_sleeps() -> None:
    """Who polls by it leaves the others their turns, and is named where nobody comes."""
    flag = symmetric((1,), np.int32, 0)
    with pytest.raises(simulator.DeadlockError, match=r"flag\[0\] of rank 0: sees 0"):
        simulator.run_iris(Launch(wait_by, 1, {"flag": flag, "rank": RANK, "SEM": "acq_rel"}), world=2, patience=200)


@triton.jit
def failed_release(data, flag, out, rank, bases):
    """Rank 0 stores, and swaps what is not there: it publishes nothing."""
    mine = there(flag, rank, 1, bases)
    if rank == 0:
        tl.store(there(data, rank, 1, bases), 5)
        tl.atomic_cas(mine, 7, 1, sem="acq_rel", scope="sys")
        tl.atomic_xchg(mine, 1, sem="relaxed", scope="sys")
    else:
        while tl.atomic_add(mine, 0, sem="acquire", scope="sys") == 0:
            pass
        tl.store(out, tl.load(data))


def test_a_compare_and_swap_that_fails_does_not_release() -> None:
    data, flag, out = symmetric((1,), np.int32), symmetric((1,), np.int32, 0), local((1,), np.int32, 0)
    arguments = {"data": data, "flag": flag, "out": out, "rank": RANK, "bases": BASES}
    assert outcome(Launch(failed_release, 1, arguments), out, lambda rank: None).startswith("DataRaceError")


@triton.jit
def narrow_swap(flag):
    tl.atomic_cas(flag, 0, 1)


def test_a_compare_and_swap_of_another_width() -> None:
    with pytest.raises(Exception, match=r"of a word int16 takes numbers of that type, not int32") as error:
        simulator.run_iris(Launch(narrow_swap, 1, {"flag": local((1,), np.int16, 0)}), world=1)
    assert any("TypeError" in repr(each) for each in (error.value, error.value.__cause__))


# Aggregates.


@triton.jit
def scaled(x, factor):
    return x * factor


@aggregate
class Pair:
    first: tl.tensor
    second: tl.tensor
    factor: tl.constexpr

    @triton.constexpr_function
    def __init__(self, first, second, factor):
        self.first = first
        self.second = second
        self.factor = tl.constexpr(factor)

    @staticmethod
    @triton.jit
    def of(ptr, factor: tl.constexpr):
        return Pair(tl.load(ptr), tl.load(ptr + 1), factor)

    @triton.jit
    def scaled(self):
        return scaled(self.first, self.factor) + scaled(self.second, self.factor)


@aggregate
class Named:
    pair: Pair
    factor: tl.constexpr = 10


@triton.jit
def aggregates(x, out):
    pair = Pair.of(x, 3)
    tl.store(out, pair.scaled())
    named = Named(pair)
    tl.store(out + 1, named.pair.first * named.factor)


def test_aggregates() -> None:
    x, out = local((2,), np.int32, [np.array([4, 5], np.int32)]), local((2,), np.int32)
    outs, _ = simulator.run_iris(Launch(aggregates, 1, {"x": x, "out": out}), world=1, results=out)
    assert outs[0].tolist() == [27, 40]


@triton.jit
def aggregates_of_a_team(x, team, out):
    me = shmem.start(team)
    tl.store(out, Pair.of(x, 3).scaled())
    shmem.finish(me)


def test_aggregates_and_assumptions_in_simulator_run() -> None:
    word = jax.ShapeDtypeStruct((1,), np.int32)
    x = [np.array([1, 2], np.int32)]
    outs, _ = simulator.run(aggregates_of_a_team, x, world=1, grid=1, out_type=word)
    assert outs[0].tolist() == [9]
    with pytest.raises(simulator.AssumptionError, match=r"The assume of rank 0.* in assume_of_a_team is false"):
        simulator.run(assume_of_a_team, x, world=1, grid=1, out_type=word)


@triton.jit
def assume_of_a_team(x, team, out):
    me = shmem.start(team)
    first = tl.load(x)
    tl.assume(first > 0)
    tl.assume(first > 1)
    tl.store(out, first)
    shmem.finish(me)


@triton.jit
def bare_release(team, data, flag, out):
    """Rank 0 stores to rank 1 and releases, without a barrier in between."""
    me = shmem.start(team)
    mine = shmem.scratch(me, data, tl.int32)
    if me.rank == 0:
        shmem.store(me, mine, 5, 1)
        tl.atomic_add(shmem._signal_of(me, flag, 1), 1, sem="release", scope="sys")
    else:
        shmem.wait(me, flag, me.epoch, 0)
        tl.store(out, tl.load(mine))
    shmem.signal_all(me, flag + 1 + me.rank, 2)
    shmem.wait_all(me, flag + 1, me.epoch)
    shmem.finish(me)


def test_barriers_of_the_compiler_in_simulator_run() -> None:
    word = jax.ShapeDtypeStruct((1,), np.int32)
    call = {"world": 2, "grid": 1, "out_type": word, "scratch": {"data": word}, "signals": {"flag": 3}}
    for seed in range(5):
        outs, _ = simulator.run(bare_release, **call, seed=seed, implicit_barriers=True)
        assert outs[1][0] == 5
    with pytest.raises(simulator.DataRaceError, match=r"Data race on data\[0\]"):
        for seed in range(5):
            simulator.run(bare_release, **call, seed=seed)


# Launches, grids and buffers.


@triton.jit
def places(out, rank, world, context, X: tl.constexpr, Y: tl.constexpr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = (z * Y + y) * X + x
    tl.store(out + at, tl.load(context) * 1000 + tl.load(context + 1) * 100 + rank * 10 + tl.num_programs(1))


@triton.jit
def add(x, by):
    tl.store(x, tl.load(x) + by)


def test_launches_follow_each_other() -> None:
    out, x = local((2, 3, 2), np.int64, 0), local((1,), np.int32, 1)
    arguments = {"out": out, "rank": RANK, "world": WORLD, "context": CONTEXT, "X": 2, "Y": 3}
    launches = [
        Launch(places, (2, 3, 2), arguments),
        Launch(add, 1, {"x": x, "by": PerRank((1, 10, 100))}),
        Launch(add, (1, 1), {"x": x, "by": 1000}, ranks=[2]),
    ]
    outs, trace = simulator.run_iris(launches, world=3, results=(out, x), rounds=2)
    for rank, (of, value) in enumerate(outs):
        assert (of == rank * 1000 + 300 + rank * 10 + 3).all()
        assert value[0] == 1 + 2 * (10**rank + 1000 * (rank == 2))
    assert trace.steps > 0


@triton.jit
def copy_from(x, out, peer, rank, bases):
    tl.store(out, tl.load(there(x, rank, peer, bases)))


def _copy(x: Buffer, out: Buffer) -> Launch:
    return Launch(copy_from, 1, {"x": x, "out": out, "peer": PerRank((1, 0)), "rank": RANK, "bases": BASES})


def test_what_a_fill_races_with() -> None:
    x, out = symmetric((1,), np.int32), local((1,), np.int32)

    def both(rank: int) -> list[int]:
        return [7]

    assert outcome([Fill(x, 7), Barrier(), _copy(x, out)], out, both) == "right"
    found = outcome([Fill(x, 7), _copy(x, out)], out, both)
    assert "DataRaceError" in found or "UninitializedReadError" in found
    assert outcome([Fill(x, 7), Barrier(), _copy(x, out), Barrier()], out, both, rounds=3) == "right"
    found = outcome([Fill(x, 7), Barrier(), _copy(x, out)], out, both, rounds=3)
    assert "DataRaceError" in found and "host:1 in Fill" in found and "3 copy_from" in found


def test_what_peers_do_not_reach() -> None:
    out = local((1,), np.int32)
    assert outcome(_copy(local((1,), np.int32, 1), out), out, lambda rank: None).startswith("OutOfBoundsError")
    found = outcome(_copy(symmetric((1,), np.int32), out), out, lambda rank: None)
    assert found.startswith("UninitializedReadError") and "x[0] of rank" in found


@triton.jit
def chain(flags, PROGRAMS: tl.constexpr):
    """A program waits for the one behind it."""
    pid = tl.program_id(0)
    if pid < PROGRAMS - 1:
        while tl.atomic_add(flags + pid + 1, 0, sem="acquire", scope="gpu") == 0:
            pass
    tl.atomic_xchg(flags + pid, 1, sem="release", scope="gpu")


def test_programs_that_need_each_other() -> None:
    """With a slot for each it is right; on a GPU with less room it hangs."""
    flags = symmetric((4,), np.int32, 0)
    launch = Launch(chain, 4, {"flags": flags, "PROGRAMS": 4})
    assert outcome(launch, flags, lambda rank: np.ones(4)) == "right"
    assert outcome(launch, flags, lambda rank: None, slots=2).startswith("DeadlockError")


def test_what_run_iris_refuses() -> None:
    x, out = symmetric((1,), np.int32, [np.zeros(2, np.int32)]), local((1,), np.int32)
    launch = Launch(copy_from, (), {"x": x, "out": out, "peer": PerRank((1,)), "nobody": 1, "rank": RANK})
    with pytest.raises(ValueError) as error:
        simulator.run_iris([launch], world=2, results=local((1,), np.int32), triton="3.7")
    for reason in (
        "it knows Triton 3.8 and 3.9, not '3.7'",
        "launch 1, copy_from, has no parameter nobody",
        "gets nothing for bases",
        "gets 1 values of peer for 2 ranks",
        "takes a grid of one to three positive sizes, not ()",
        "a buffer [1] takes as value a number or an array of its shape for each of 2 ranks",
        "a result is a buffer that some launch takes",
    ):
        assert reason in str(error.value), reason
    with pytest.raises(TypeError, match="takes launches of Launch, Fill and Barrier, not 1"):
        simulator.run_iris([1], world=1)
    with pytest.raises(ValueError, match="world and rounds of at least 1"):
        simulator.run_iris([], world=0)
