"""What `ragged_all_to_all` must get right on GPUs, as functions of a mesh; as in `collectives_parity`."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

import jaxtaxfree as jtf
from jaxtaxfree.ops.ragged_all_to_all import by_all_gather
from tests.helpers.collectives_parity import on_ranks, totals, wrong_bits
from tests.helpers.parity import program, run_all
from tests.helpers.ragged_cases import Routing, garbage
from tests.helpers.rehearsal import needs_real_gpus

DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "uint16", "bool")
CONFIGS: tuple[dict[str, Any] | None, ...] = (None, {"programs": 3, "chunk": 64, "stages": 3, "num_warps": 1})


def call(*operands: jax.Array, config: dict[str, Any] | None = None) -> jax.Array:
    return jtf.ragged_all_to_all(*operands, axis_name="tp", implementation="fused", config=config)


def routings(world: int) -> list[Routing]:
    one = np.zeros((world, world), int)
    one[:, -1] = np.arange(world) * 50
    return [
        *(Routing.drawn(world, seed=most, most=most) for most in (5, 300)),
        Routing(np.full((world, world), 64)),
        Routing(np.zeros((world, world), int)),
        Routing(one),
    ]


def arrays(key: int, routing: Routing, d: int, dtype: Any, rank: Any) -> tuple[jax.Array, jax.Array]:
    """Operand and output of a rank, of whole numbers."""
    keys = jax.random.split(jax.random.fold_in(jax.random.key(key), rank))
    drawn = (
        jax.random.randint(each, (rows, d), 0, 100).astype(dtype)
        for each, rows in zip(keys, (routing.rows_in, routing.rows_out))
    )
    return lax.optimization_barrier(tuple(drawn))


def tables_of(tables: list[np.ndarray], rank: Any) -> list[jax.Array]:
    return lax.optimization_barrier([jnp.asarray(x)[rank] for x in tables])


def bits(x: jax.Array) -> jax.Array:
    """Types of 8 bits as integers."""
    if x.dtype == bool:
        return x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x


@contextlib.contextmanager
def listening() -> Generator[list[str]]:
    """Collects what kernels say of garbage, also what would be raised in the main thread, in the midst of a check."""
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jtf.heap, "_raise_in_main_thread", lambda _, message: told.append(message))
        yield told
        try:
            jtf.heap.check()
        except jtf.GarbageError as error:
            told.append(str(error))


def check_values(mesh: Mesh) -> None:
    """Every routing in every way, rows of sizes that nothing divides among them, bit for bit."""
    world = mesh.devices.size

    def count(rank: jax.Array, dtype: str) -> jax.Array:
        wrong = []
        for i, (routing, d, config) in enumerate(itertools.product(routings(world), (7, 128), CONFIGS)):
            operand, output = arrays(i, routing, d, dtype, rank)
            tables = tables_of(routing.tables, rank)
            found = call(operand, output, *tables, config=config)
            wanted = by_all_gather(bits(operand), bits(output), *tables, axes=("tp",))
            wrong.append(wrong_bits(bits(found), wanted))
        return jnp.stack(wrong)

    counts = run_all([totals(mesh, functools.partial(count, dtype=dtype)) for dtype in DTYPES])
    assert not np.stack(counts).any(), dict(zip(DTYPES, counts))
    jtf.heap.check()


def check_garbage(mesh: Mesh) -> None:
    """Who cannot have a result has NaN, or the number of all bits; the others have theirs, and somebody is told."""
    world = mesh.devices.size
    cases = garbage(world)

    def local(rank: jax.Array) -> jax.Array:
        wrong = []
        for dtype in ("bfloat16", "uint8"):
            nothing = jnp.asarray(255 if dtype == "uint8" else jnp.nan, dtype)
            for i, (_, routing, tables, receivers) in enumerate(cases):
                operand, output = arrays(i, routing, 5, dtype, rank)
                wanted = by_all_gather(operand, output, *tables_of(routing.tables, rank), axes=("tp",))
                found = call(operand, output, *tables_of(tables, rank))
                is_nothing = jnp.isnan(found) if dtype == "bfloat16" else found == nothing
                none = jnp.isin(rank, jnp.asarray(receivers))
                wrong.append(jnp.sum(jnp.where(none, ~is_nothing, found != wanted)))
        return jnp.stack(wrong)

    with listening() as told:
        counts = on_ranks(mesh, local)
    assert not counts.any(), [name for (name, *_), count in zip(2 * cases, counts) if count]
    needs_real_gpus()
    assert told and all("ragged_all_to_all" in message for message in told)
    jtf.heap.check()


def check_repetition(mesh: Mesh, times: int = 1000) -> None:
    """Call after call, with other sizes each time, gives what it has to, bit for bit."""
    world = mesh.devices.size
    kinds = [Routing.drawn(world, seed=seed, most=40) for seed in range(3)]
    largest = max(kinds, key=lambda routing: routing.rows_in)
    widest = max(kinds, key=lambda routing: routing.rows_out)

    def count(rank: jax.Array, d: int) -> jax.Array:
        operand, _ = arrays(0, largest, d, "bfloat16", rank)
        _, output = arrays(1, widest, d, "bfloat16", rank)
        tables = [jnp.stack(each) for each in zip(*(tables_of(routing.tables, rank) for routing in kinds))]
        wanted = jnp.stack(
            [by_all_gather(operand, output, *(x[i] for x in tables), axes=("tp",)) for i in range(len(kinds))]
        )

        def step(i: jax.Array, wrong: jax.Array) -> jax.Array:
            found = call(operand, output, *(x[i % len(kinds)] for x in tables))
            return wrong + wrong_bits(found, wanted[i % len(kinds)])

        return lax.fori_loop(0, times, step, jnp.int32(0))

    assert not np.stack(run_all([totals(mesh, functools.partial(count, d=d)) for d in (8, 1024)])).any()
    jtf.heap.check()


def small_call(mesh: Mesh) -> tuple[Callable, tuple[jax.Array, ...]]:
    """As many rows of each rank to each other one."""
    world, rows = mesh.devices.size, 64

    def local() -> jax.Array:
        rank = lax.axis_index("tp")
        operand = jnp.full((world * rows, 128), rank + 1, jnp.float32)
        begin, sizes = jnp.arange(world, dtype=jnp.int32) * rows, jnp.full(world, rows, jnp.int32)
        there = jnp.full(world, rank * rows, jnp.int32)
        return call(operand, jnp.zeros_like(operand), begin, sizes, there, sizes)

    return program(mesh, local), ()


def check_gradients(mesh: Mesh) -> None:
    """Of operand and output, those of the reference."""
    world = mesh.devices.size
    routing = Routing.drawn(world, seed=1, most=50)

    def local(rank: jax.Array) -> jax.Array:
        operand, output = arrays(0, routing, 12, "float32", rank)
        tables = tables_of(routing.tables, rank)
        out, back = jax.vjp(lambda *x: call(*x, *tables), operand, output)
        _, wanted = jax.vjp(lambda *x: by_all_gather(*x, *tables, axes=("tp",)), operand, output)
        ct = jnp.sin(out)
        return jnp.stack([wrong_bits(x, y) for x, y in zip(back(ct), wanted(ct))])

    assert not on_ranks(mesh, local).any()
    jtf.heap.check()


CHECKS = (check_values, check_garbage, check_repetition, check_gradients)
