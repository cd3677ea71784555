"""The launches of a workspace in the simulator, which knows single launches: a kernel that calls theirs, one by one.

What a launch has stored the next one sees, as it does behind a block barrier. So this is the protocol between ranks and
from call to call, for launches of one program each.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxtaxfree as jtf
from jaxtaxfree import iris, simulator
from jaxtaxfree.iris import wrapper
from jaxtaxfree.iris.arguments import Arguments, Buffer
from jaxtaxfree.written import compiled_from
from tests.helpers import iris_programs

SIZE, WORLD = 32, 3
HELD = {"inbox": iris.symmetric((SIZE,), jnp.float32), "flag": iris.symmetric((1,), jnp.int32, fill=0)}
BUFFERS = tuple(Buffer(name, of.shape, of.dtype) for name, of in HELD.items())
NUMBERS = {"heap_bases": iris.BASES, "rank": iris.RANK, "after": (iris.RANK + 1) % iris.WORLD}
SHARED = ("team", "iris_table", "inbox_symmetric", "flag_symmetric", "iris_opened", "iris_closed")


def launches() -> dict[str, Any]:
    """Opens, sends, receives, and reads the inbox."""
    inbox, flag = BUFFERS
    sent = Arguments({"x": None}, {}, {}, {"inbox": inbox, "flag": flag}, dict(NUMBERS), {"SIZE": SIZE})
    out = iris.Out((SIZE,), jnp.float32)
    got = Arguments({}, {"out": out}, {}, {"inbox": inbox, "flag": flag}, {}, {"SIZE": SIZE})
    return {
        "opening": wrapper.opening(HELD, 1),
        "sending": wrapper.joining(iris_programs.send, sent, BUFFERS, False),
        "receiving": wrapper.joining(iris_programs.receive, got, BUFFERS, False),
        "closing": wrapper.closing(BUFFERS, [inbox], 1),
    }


CALLS = {
    "opening": "iris_before=x, iris_token=token",
    "sending": "iris_joined=token, iris_token=token_1, x=x, SIZE=SIZE",
    "receiving": "iris_joined=token_1, iris_token=token_2, out=out, SIZE=SIZE",
    "closing": "iris_joined=token_1, iris_token=token_3, inbox=read",
}


def in_one(kernels: dict[str, Any], names: tuple[str, ...] = tuple(CALLS)) -> Callable:
    """A function of a rank's x [SIZE] that gives (what it received, what it read), by one kernel."""
    shared = ", ".join(f"{name}={name}" for name in SHARED)
    parameters = ["x", *SHARED, "token", "token_1", "token_2", "token_3", "out", "read"]
    lines = [f"def together({', '.join(parameters)}, SIZE: tl.constexpr, WORLD: tl.constexpr):"]
    for name in names:
        lines += [f"    {name}({shared}, {CALLS[name]}, WORLD=WORLD)", "    tl.debug_barrier()"]
    space = {"tl": iris_programs.tl, "triton": iris_programs.triton, **kernels}
    kernel = compiled_from("\n".join(lines) + "\n", "<together>", "together", space)
    token = jax.ShapeDtypeStruct((1,), jnp.int32)
    scratch = {"iris_table": jax.ShapeDtypeStruct((1, WORLD + 2), np.dtype(np.int64))}
    scratch |= {f"{name}_symmetric": jax.ShapeDtypeStruct(of.shape, of.dtype) for name, of in HELD.items()}

    def call(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        *_, out, read = jtf.shmem_call(
            kernel,
            x,
            axis_name="tp",
            out_type=(token,) * 4 + (jax.ShapeDtypeStruct(x.shape, x.dtype),) * 2,
            grid=1,
            scratch=scratch,
            signals={"iris_opened": (WORLD,), "iris_closed": (WORLD,)},
            implementation="simulate",
            SIZE=SIZE,
        )
        return out, read

    return call


def simulate(call: Callable, seeds: int, calls: int = 4) -> None:
    """Raises what the simulator finds, or if a result is wrong, in any of several calls in a row."""
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:WORLD]), ("tp",))
    spec = jax.sharding.PartitionSpec("tp")

    def step(x: jax.Array, _: None) -> Any:
        out, read = call(x)
        return out + 1, (out, read)

    def run(x: jax.Array) -> Any:
        return lax.scan(step, x, None, length=calls)[1]

    program = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec(None, "tp"), check_vma=False)
    )
    x = np.arange(SIZE * WORLD, dtype=np.float32)
    for seed in range(seeds):
        with simulator.simulating(seed=seed, policy=("random", "ahead", "straggler")[seed % 3], patience=5000):
            outs = jax.block_until_ready(program(x))
        for number in range(calls):
            for out in outs:
                np.testing.assert_array_equal(out[number], np.roll(x, SIZE * (number + 1)) + number)


def test_launches_of_a_workspace() -> None:
    simulate(in_one(launches()), 12)


def test_a_call_that_is_not_read() -> None:
    """The signals of `read` are numbers of calls: where some calls have none, the next ones are right."""
    kernels = launches()
    without = in_one(kernels, ("opening", "sending", "receiving"))

    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return without(x)[0], without(x)[0]

    simulate(both, 3)


FAULTS = {
    "nobody meets": ("shmem.wait_all(", "DataRaceError"),
    "nothing is published": ("around.publish(", "Deadlock"),
    "flags are not filled": ("around.fill(", "DataRaceError|UninitializedReadError|Deadlock|Livelock"),
    "no table": ("around.write_table(", "UninitializedReadError"),
    "no token": ("tl.store(iris_token", "UninitializedReadError|trap"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_launch_without_one_of_its_parts_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    line, error = FAULTS[fault]
    original = wrapper.defined.__wrapped__

    def faulty(kernel: Any, source: str, called: str) -> Any:
        if "around.publish" in source:
            (at,) = (each for each in source.splitlines() if line in each)
            source = source.replace(at, at[: len(at) - len(at.lstrip())] + "pass")
        return original(kernel, source, called)

    monkeypatch.setattr(wrapper, "defined", faulty)
    with pytest.raises(Exception, match=error):
        simulate(in_one(launches()), 12)
    forget()


def test_reading_without_a_meeting_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer stores last has not arrived."""
    original, meeting = wrapper.defined.__wrapped__, "around.close(iris_me, iris_closed, iris_part, WORLD)"
    monkeypatch.setattr(
        wrapper, "defined", lambda kernel, source, called: original(kernel, source.replace(meeting, "True"), called)
    )
    calls = in_one(launches(), ("opening", "sending", "closing"))
    with pytest.raises(Exception, match=r"DataRaceError|UninitializedReadError"):
        simulate(lambda x: (calls(x)[1],) * 2, 12)
    forget()


def forget() -> None:
    """What a program that failed leaves behind."""
    with contextlib.suppress(Exception):
        jax.effects_barrier()
    simulator.reset()
