"""What `psum`, `all_gather`, `psum_scatter` and `all_to_all` must get right on GPUs, as functions of a mesh.

As in `parity`, everything ends in replicated numbers, and many cases share a program, because compiling takes longest.
"""

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.ops import register
from jaxtaxfree.ops.collectives import DTYPES
from jaxtaxfree.ops.variant import fields
from tests.helpers.parity import program, run_all

NAMES = ("psum", "all_gather", "psum_scatter", "all_to_all")
# Each way of moving data, with blocks that leave several programs to small arrays. Shots are those of `psum`.
CONFIGS: tuple[dict[str, Any], ...] = (
    {"protocol": "messages", "shots": 1, "block": 128, "num_warps": 1},
    {"protocol": "messages", "shots": 2, "block": 64, "num_warps": 2},
    {"protocol": "signals", "shots": 1, "block": 512, "num_warps": 4},
    {"protocol": "signals", "shots": 2, "block": 256, "num_warps": 2},
)
# For sums of floats, and gathers of 16 and 32 bits.
WORDS: tuple[dict[str, Any], ...] = (
    {"protocol": "words", "shots": 1, "block": 256, "num_warps": 1},
    {"protocol": "words", "shots": 2, "block": 128, "num_warps": 1},
)
# Cases of one program.
TOGETHER = 6


def numbers(key: int, shape: tuple[int, ...], dtype: Any, rank: Any) -> jax.Array:
    """Random whole numbers of a rank, whose sums are exact in every dtype; of unsigned types not negative."""
    lowest = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -8
    drawn = jax.random.randint(jax.random.fold_in(jax.random.key(key), rank), shape, lowest, 9)
    return lax.optimization_barrier(drawn.astype(dtype))


def wrong_bits(found: jax.Array, wanted: jax.Array) -> jax.Array:
    """How many elements differ in any bit."""
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[found.dtype.itemsize]
    return jnp.sum(lax.bitcast_convert_type(found, kind) != lax.bitcast_convert_type(wanted, kind))


def totals(mesh: Mesh, local: Callable[[jax.Array], jax.Array]) -> Callable:
    """A program for the sums over the ranks of what each counts; `local` takes the rank."""

    def total() -> jax.Array:
        return lax.psum(local(lax.axis_index(mesh.axis_names)), mesh.axis_names)

    return program(mesh, total)


def on_ranks(mesh: Mesh, local: Callable[[jax.Array], jax.Array]) -> np.ndarray:
    """The sums over the ranks of what each counts."""
    return np.asarray(totals(mesh, local)())


def call(name: str, x: jax.Array, axes: Any, implementation: str | None, dimension: int = 0, **keywords: Any) -> Any:
    """An operation by the kernel, or by `lax` itself; of a configuration, the settings that the kernel has."""
    if name == "all_gather":
        keywords |= {"axis": dimension, "tiled": True}
    elif name == "psum_scatter":
        keywords |= {"scatter_dimension": dimension, "tiled": True}
    elif name == "all_to_all":
        keywords |= {"split_axis": dimension, "concat_axis": (dimension + 1) % x.ndim, "tiled": True}
    if implementation is None:
        keywords.pop("config", None)
        return getattr(lax, name)(x, axes, **keywords)
    if keywords.get("config"):
        (variant,) = register.OPERATIONS[name].variants
        keywords["config"] = {key: value for key, value in keywords["config"].items() if key in fields(variant)}
    return getattr(jtf, name)(x, axes, implementation=implementation, **keywords)


def check_cases(mesh: Mesh, cases: Sequence[tuple], axes: Any = "tp") -> None:
    """Each case (name, shape, dtype, dimension, config) gives what `lax` gives, bit for bit."""

    def differences(some: Sequence[tuple]) -> Callable:
        def local(rank: jax.Array) -> jax.Array:
            found = []
            for i, (name, shape, dtype, dimension, config) in enumerate(some):
                x = numbers(i, shape, dtype, rank)
                ours = call(name, x, axes, "fused", dimension, config=config)
                found.append(wrong_bits(ours, call(name, x, axes, None, dimension)))
            return jnp.stack(found)

        return totals(mesh, local)

    counts = np.concatenate(run_all([differences(some) for some in itertools.batched(cases, TOGETHER)]))
    wrong = [(case, count) for case, count in zip(cases, counts.tolist(), strict=True) if count]
    assert not wrong, wrong
    jtf.heap.check()


def shape_of(name: str, world: int, elements: int) -> tuple[int, ...]:
    return (world * elements,) if name in ("psum_scatter", "all_to_all") else (elements,)


def check_sizes(mesh: Mesh) -> None:
    """The sizes of the benchmarks, as the operations choose to move them."""
    world = mesh.devices.size
    check_cases(
        mesh,
        [
            (name, shape_of(name, world, shape.nbytes // jnp.dtype(dtype).itemsize), dtype, 0, None)
            for name in NAMES
            for shape in register.OPERATIONS[name].shapes
            for dtype in ("bfloat16", "float32")
            if shape.nbytes >= 4
        ],
    )


def check_dtypes_and_odd_sizes(mesh: Mesh) -> None:
    """Every dtype, and the first two in every way, at sizes that nothing divides."""
    world, draw = mesh.devices.size, random.Random(0)
    cases = []
    for name, (i, dtype) in itertools.product(NAMES, enumerate(DTYPES)):
        configs = CONFIGS if name == "psum" else CONFIGS[::2]
        for config in configs if i < 2 else [configs[i % len(configs)]]:
            cases.append((name, shape_of(name, world, draw.choice((1, 2, 3, 7, 129, 1000, 5003))), dtype, 0, config))
    check_cases(mesh, cases)


def check_dimensions(mesh: Mesh) -> None:
    """Gathers and scatters along each dimension."""
    world = mesh.devices.size
    cases = []
    ways = (("bfloat16", CONFIGS[0]), ("int32", CONFIGS[2]))
    for name, dimension, (dtype, config) in itertools.product(NAMES[1:], range(3), ways):
        shape = [5, 12, 33]
        if name in ("psum_scatter", "all_to_all"):
            shape[dimension] *= world
        cases.append((name, tuple(shape), dtype, dimension, config))
    check_cases(mesh, cases)


def check_every_pattern(mesh: Mesh) -> None:
    """Gathers are copies: of every pattern of 16 bits, NaN with any payload among them."""

    def local(rank: jax.Array) -> jax.Array:
        wrong = []
        patterns = jnp.roll(jnp.arange(2**16, dtype=jnp.uint16), 1000 * rank)
        # As words, pairs of which some have to be told apart.
        patterns = patterns.at[:8].set(jnp.array([2**16 - 1] * 3 + [2**15 - 1] + [2**16 - 1] * 2 + [0, 0], jnp.uint16))
        wanted = lax.all_gather(patterns, "tp")
        for dtype, config in itertools.product((jnp.bfloat16, jnp.float16, jnp.float32), CONFIGS[::2] + WORDS[:1]):
            if dtype == jnp.float32:
                x = lax.bitcast_convert_type(patterns.reshape(-1, 2), dtype)
            else:
                x = lax.bitcast_convert_type(patterns, dtype)
            found = call("all_gather", x, "tp", "fused", config=config)
            wrong.append(jnp.sum(lax.bitcast_convert_type(found, jnp.uint16).reshape(wanted.shape) != wanted))
        return jnp.stack(wrong)

    wrong = on_ranks(mesh, local)
    assert not wrong.any(), wrong


def check_order_of_sums(mesh: Mesh) -> None:
    """Sums are those of f32 in the order of the ranks, rounded once, on every rank; -0.0 stays -0.0."""

    def local(rank: jax.Array) -> jax.Array:
        wrong = []
        for dtype, config in itertools.product((jnp.float32, jnp.bfloat16, jnp.float16), CONFIGS + WORDS):
            x = jax.random.normal(jax.random.fold_in(jax.random.key(0), rank), (4097,), dtype).at[:100].set(-0.0)
            parts = lax.all_gather(x, "tp").astype(jnp.float32)
            wanted = functools.reduce(lambda total, part: lax.optimization_barrier(total + part), list(parts))
            found = jtf.psum(x, "tp", implementation="fused", config=config)
            wrong.append(wrong_bits(found, wanted.astype(dtype)))
        return jnp.stack(wrong)

    wrong = on_ranks(mesh, local)
    assert not wrong.any(), wrong


def check_integers_wrap(mesh: Mesh) -> None:
    """Sums of integers of any size are XLA's."""

    def local(rank: jax.Array) -> jax.Array:
        wrong = []
        for i, dtype in enumerate(("int8", "uint8", "int16", "uint16", "int32", "uint32")):
            config = CONFIGS[i % len(CONFIGS)]
            key = jax.random.fold_in(jax.random.key(1), rank)
            x = jax.random.bits(key, (1001,), f"uint{8 * jnp.dtype(dtype).itemsize}").astype(dtype)
            found = jtf.psum(x, "tp", implementation="fused", config=config)
            wrong.append(wrong_bits(found, lax.psum(x, "tp")))
        return jnp.stack(wrong)

    wrong = on_ranks(mesh, local)
    assert not wrong.any(), wrong


def check_repetition(mesh: Mesh, times: int = 1000) -> None:
    """Call after call gives what the first call with those operands gave, bit for bit, of sums that are not exact."""
    world = mesh.devices.size
    ways = [(name, config, 5000) for name in NAMES for config in (CONFIGS + WORDS if name == "psum" else CONFIGS[::2])]
    ways += [(name, None, elements) for name in NAMES for elements in (1, 100_000)]

    def count(rank: jax.Array, name: str, config: Any, elements: int) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(2), rank)
        xs = jax.random.normal(key, (3, *shape_of(name, world, elements)), jnp.bfloat16)
        run = functools.partial(call, name, axes="tp", implementation="fused", config=config)
        first = jnp.stack([run(x=x) for x in xs])

        def step(i: jax.Array, wrong: jax.Array) -> jax.Array:
            return wrong + wrong_bits(run(x=xs[i % 3]), first[i % 3])

        return lax.fori_loop(0, times, step, jnp.int32(0))

    programs = [totals(mesh, functools.partial(count, name=n, config=c, elements=e)) for n, c, e in ways]
    assert not np.stack(run_all(programs)).any()
    jtf.heap.check()


def check_independent_calls(mesh: Mesh) -> None:
    """Calls that share a region and depend on nothing of each other, also when XLA replays them as a CUDA graph."""
    world = mesh.devices.size

    def local(rank: jax.Array) -> jax.Array:
        cases = [(name, elements) for name in NAMES for elements in (100, 200_000)]
        made = [
            [numbers(i, shape_of(name, world, elements), "bfloat16", rank) for i in range(4)]
            for name, elements in cases
        ]
        made = lax.optimization_barrier(made)
        found = [[call(name, x, "tp", "fused") for x in xs] for (name, _), xs in zip(cases, made)]
        found = lax.optimization_barrier(found)
        wrong = [
            sum(wrong_bits(ours, call(name, x, "tp", None)) for ours, x in zip(outs, xs))
            for (name, _), outs, xs in zip(cases, found, made)
        ]
        return jnp.stack(wrong)

    program = jax.jit(
        jax.shard_map(
            lambda: lax.psum(local(lax.axis_index("tp")), "tp"), mesh=mesh, in_specs=(), out_specs=P(), check_vma=False
        )
    )
    for _ in range(5):
        wrong = np.asarray(program())
        assert not wrong.any(), wrong
    jtf.heap.check()


def check_many_calls(mesh: Mesh, calls: int = 10_000) -> None:
    """So many sums of changing sizes, one after the other in one program: whole numbers, so that all are exact."""
    sizes = (1, 1000, 17, 8192, 3, 130_000, 100, 1, 30_000, 500_000)
    world = mesh.devices.size

    def local(rank: jax.Array) -> jax.Array:
        def step(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            wrong, carried = state
            for j, size in enumerate(sizes):
                # Depends on the sum before, which is 0 modulo what is added.
                element = jnp.arange(size, dtype=jnp.int32)
                base = (i * 7 + j * 3 + element) % 5 + carried
                found = jtf.psum((base + rank).astype(jnp.bfloat16), "tp", implementation="fused")
                wanted = (world * base + world * (world - 1) // 2).astype(jnp.bfloat16)
                wrong = wrong + wrong_bits(found, wanted)
                carried = (found[0] != wanted[0]).astype(jnp.int32)
            return wrong, carried

        return lax.fori_loop(0, -(-calls // len(sizes)), step, (jnp.int32(0), jnp.int32(0)))[0]

    assert int(on_ranks(mesh, local)) == 0
    jtf.heap.check()


def check_meshes(mesh: Mesh) -> None:
    """Permuted devices, one axis of two, both axes as one."""
    devices = list(mesh.devices.flat)
    world = len(devices)

    def cases(ranks: int) -> list[tuple]:
        return [
            (name, shape_of(name, ranks, elements), "bfloat16", 0, None) for name in NAMES for elements in (5, 100_000)
        ]

    check_cases(Mesh(np.array(devices[::-1]), ("tp",)), cases(world))
    if world % 2 == 0:
        pairs = Mesh(np.array(random.Random(1).sample(devices, world)).reshape(2, -1), ("dp", "tp"))
        check_cases(pairs, cases(2), axes="dp")
        for axes in (("dp", "tp"), ("tp", "dp")):
            check_cases(pairs, cases(world), axes=axes)


def check_gradients(mesh: Mesh) -> None:
    """Of all three, inside the program and across it."""

    def gradients(implementation: str | None, check_vma: bool) -> list[jax.Array]:
        found = []
        for name in NAMES:
            program = jax.shard_map(
                lambda x, name=name: call(name, x, "tp", implementation),
                mesh=mesh,
                in_specs=P("tp"),
                out_specs=P() if name == "psum" else P("tp"),
                check_vma=check_vma,
            )
            x = jax.random.normal(jax.random.key(0), (world * world * 6, 5))
            found.append(jax.jit(jax.grad(lambda x, program=program: jnp.sum(jnp.sin(program(x)))))(x))
        return found

    world = mesh.devices.size
    for check_vma in (True, False):
        for ours, wanted in zip(gradients("fused", check_vma), gradients(None, check_vma)):
            assert float(jnp.max(jnp.abs(ours - wanted))) < 1e-5
    jtf.heap.check()


def check_the_largest(mesh: Mesh, times: int = 1000) -> None:
    """`top_k` of 1, of vocabularies of models and of rows with equal numbers, call after call in a loop."""
    world = mesh.devices.size
    shapes = ((1, 16032), (16, 32064), (3, 77), (300, 500))

    def local(rank: jax.Array) -> jax.Array:
        # Drawn before the loop: XLA takes minutes to compile a long loop of numbers that its counter decides.
        drawn, wanted = [], []
        for key, (rows, size) in enumerate(shapes):
            draw = jax.random.normal(jax.random.key(key), (3, rows, world * size))
            whole = (jnp.round(draw * (40 if key % 2 else 1e4)) / 4).astype(jnp.bfloat16 if key % 2 else jnp.float32)
            at = jnp.argmax(whole, axis=2, keepdims=True).astype(jnp.int32)
            drawn.append(lax.dynamic_slice_in_dim(whole, rank * size, size, axis=2))
            wanted.append((jnp.take_along_axis(whole, at, axis=2), at))

        def step(i: jax.Array, wrong: jax.Array) -> jax.Array:
            for own, expected in zip(drawn, wanted):
                found = jtf.top_k(own[i % 3], 1, "tp", implementation="fused")
                wrong += sum(jnp.sum(each != of[i % 3]) for each, of in zip(found, expected))
            return wrong

        return lax.fori_loop(0, times, step, jnp.int32(0))

    assert not on_ranks(mesh, local).any()
    jtf.heap.check()


def small_call(mesh: Mesh) -> tuple[Callable, tuple[jax.Array, ...]]:
    """A call of a kernel on a whole array, and its operand."""
    x = jax.jit(lambda: jnp.ones((mesh.devices.size, 1000)), out_shardings=NamedSharding(mesh, P("tp")))()
    program = functools.partial(call, "psum", axes="tp", implementation="fused")
    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False)), (x,)


CHECKS = (
    check_sizes,
    check_dtypes_and_odd_sizes,
    check_dimensions,
    check_every_pattern,
    check_order_of_sums,
    check_integers_wrap,
    check_repetition,
    check_independent_calls,
    check_many_calls,
    check_meshes,
    check_gradients,
    check_the_largest,
)
