"""What `decode_attention` must get right on GPUs, as functions of a mesh: the kernel against XLA, on the devices.

As in `parity`, everything ends in replicated numbers, and many cases share a program, because compiling takes longest.
"""

import dataclasses
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
from tests.helpers.attention_cases import LARGEST, TOLERANCE, Case, draw, features, forms
from tests.helpers.parity import program, run_all

# Cases of one program.
TOGETHER = 3


def operands(case: Case, key: jax.Array, rank: jax.Array) -> dict[str, Any]:
    """Random arrays of a rank's call. Inside `shard_map`."""
    shared, own = jax.random.split(key)
    own = jax.random.fold_in(own, rank)
    keys = iter([*jax.random.split(shared, 8), *jax.random.split(own, 8)])
    query = jax.random.normal(next(keys), (case.b, *((case.t,) if case.t else ()), case.n, case.h), case.dtype)
    arrays = {"query": query}
    lead = (case.b, case.s)
    if case.page_size:
        pages = case.b * case.s // case.page_size
        lead = (pages + 3, case.page_size)
        arrays["block_tables"] = jax.random.permutation(own, lead[0])[:pages].reshape(case.b, -1)
    lead = tuple({"B": lead[0], "S": lead[1], "K": case.k}[letter] for letter in case.kv_layout[:3])
    if case.lengths is not None:
        arrays["key_value_seq_lengths"] = jnp.array(case.lengths)
    if case.starts is not None:
        arrays["starts"] = jnp.array(case.starts)
    if case.sinks:
        arrays["sinks"] = jax.random.normal(next(keys), (case.n,))
    scale_keys = [next(keys), next(keys)]  # the same on every rank
    own_keys = iter(jax.random.split(own, 4))
    for name, size, scale_key in zip(("key", "value"), (case.h, case.hv or case.h), scale_keys):
        numbers = jax.random.normal(next(own_keys), (*lead, size))
        if case.cache is None:
            arrays[name] = numbers.astype(case.dtype)
            continue
        unit = 6 / LARGEST[case.cache]
        arrays[name] = jnp.clip(numbers / unit, -LARGEST[case.cache], LARGEST[case.cache]).astype(case.cache)
        scale_shape = {"tensor": (), "head": (case.k,), "token": lead}[case.scales]
        scale_key = next(own_keys) if case.scales == "token" else scale_key
        arrays[f"{name}_scale"] = unit * jax.random.uniform(scale_key, scale_shape, minval=0.5, maxval=1.5)
    # XLA would leave out the rounding to the cache's dtype for whoever widens the numbers again.
    return lax.optimization_barrier(arrays)


def attend(
    case: Case, arrays: dict[str, Any], implementation: str, axis_name: Any = "tp", **keywords: Any
) -> tuple[jax.Array, jax.Array]:
    """(result, log-sum-exp)"""
    call = functools.partial(jtf.decode_attention, axis_name=axis_name, return_residual=True)
    return call(**arrays, **case.keywords, implementation=implementation, **keywords)


def distance(case: Case, found: tuple[jax.Array, jax.Array], wanted: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The largest difference of any rank, in units of what is allowed; NaN if there is one."""
    tolerance = 2 * max(TOLERANCE[case.dtype], TOLERANCE[case.result or case.dtype])
    worst = jnp.float32(0)
    for x, y, allowed in zip(found, wanted, (tolerance, 1e-3)):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        difference = jnp.where(x == y, 0, jnp.abs(x - y) / (allowed * (1 + jnp.abs(y))))
        worst = jnp.maximum(worst, jnp.max(difference))
    return worst


def per_rank(mesh: Mesh, local: Callable[[jax.Array], jax.Array], *, check_vma: bool = False) -> Callable:
    """A program for the largest of what the ranks return, element by element; `local` takes the rank. NaN stays NaN."""

    def largest() -> jax.Array:
        found = local(lax.axis_index("tp"))
        return jnp.max(lax.all_gather(found, "tp", to="invarying" if check_vma else "varying"), axis=0)

    return program(mesh, largest, check_vma=check_vma)


def check_cases(mesh: Mesh, cases: dict[str, Case], together: int = TOGETHER) -> None:
    """The kernel agrees with XLA in each case; so many share a program."""
    names = list(cases)

    def distances(some: Sequence[str]) -> Callable:
        def local(rank: jax.Array) -> jax.Array:
            found = []
            for i, name in enumerate(some):
                arrays = operands(cases[name], jax.random.key(i), rank)
                results = [attend(cases[name], arrays, implementation) for implementation in ("fused", "xla")]
                found.append(distance(cases[name], *results))
            return jnp.stack(found)

        return per_rank(mesh, local, check_vma=True)

    parts = itertools.batched(names, together)
    found = np.concatenate(run_all([distances(some) for some in parts]))
    wrong = {name: (cases[name], each) for name, each in zip(names, found.tolist(), strict=True) if not each < 1}
    assert not wrong, wrong
    jtf.heap.check()


def check_features(mesh: Mesh) -> None:
    """Calls with every feature, and with some that touch each other."""
    world = mesh.devices.size
    named = features(Case(world=world, n=16 if world < 8 else 32, k=4, h=128, s=256, dtype="bfloat16"))
    # Each is a kernel to compile, and most of the others hold one of these features alone.
    chosen = (
        "multi-head", "multi-query", "value-heads", "tokens-shorter", "ends-round-robin", "past-the-end", "no-keys",
        "blocks-8", "window-pair", "soft-cap", "sinks", "heads-multi-query", "paged-head-major", "paged-blocks",
        "int8-token", "int8-head", "float8_e4m3fn-tensor", "float8_e5m2-token", "quantised-paged-heads",
        "result-float32",
    )  # fmt: skip
    check_cases(mesh, {name: named[name] for name in chosen})


def check_forms(mesh: Mesh) -> None:
    """Rings, and pools of which the heads stand first."""
    world = mesh.devices.size
    n = 16 if world < 8 else 32
    check_cases(mesh, forms(Case(world=world, n=n, k=4, h=128, s=256, dtype="bfloat16")))
    check_cases(mesh, forms(Case(world=world, n=n, k=2, h=64, s=192, dtype="float16")))


def check_alone(device: jax.Device) -> None:
    """Calls without peers, outside of `jax.shard_map`, in all forms and some features."""
    base = Case(world=1, n=16, k=4, h=128, s=512, dtype="bfloat16")
    cases = forms(base) | {
        name: features(base)[name] for name in ("full", "tokens-8", "sinks-heads", "paged", "int8-token", "no-keys")
    }

    @functools.partial(jax.jit, static_argnums=0)
    def distance_of(case: Case, key: jax.Array) -> jax.Array:
        arrays = operands(case, key, jnp.int32(0))
        results = [attend(case, arrays, implementation, axis_name=None) for implementation in ("fused", "xla")]
        return distance(case, *results)

    with jax.default_device(device):
        found = {name: float(distance_of(case, jax.random.key(i))) for i, (name, case) in enumerate(cases.items())}
    wrong = {name: (cases[name], each) for name, each in found.items() if not each < 1}
    assert not wrong, wrong
    jtf.heap.check()


def check_ring_that_slides(device: jax.Device, tokens: int = 500) -> None:
    """Every step of a loop in which each new token takes the place of the oldest one; the fused kernel beside XLA."""
    for layout in ("BSKH", "KBSH"):
        case = Case(world=1, b=2, n=16, k=4, h=128, s=192, dtype="bfloat16", kv_layout=layout, lengths=(0, 0))

        @jax.jit
        def slide(case: Case = case) -> jax.Array:
            empty = operands(dataclasses.replace(case, starts=(0, 0)), jax.random.key(0), jnp.int32(0))

            def step(i: jax.Array, state: tuple) -> tuple:
                cache, starts, lengths, worst = state
                full = lengths == case.s
                starts, lengths = starts + full, lengths - full
                keys = jax.random.split(jax.random.fold_in(jax.random.key(1), i), 3)
                new = [jax.random.normal(key, (case.b, case.k, case.h), case.dtype) for key in keys[:2]]
                cache = jtf.append_kv(cache, *new, lengths, None, starts=starts, kv_layout=case.kv_layout)
                given = {
                    "query": jax.random.normal(keys[2], (case.b, case.n, case.h), case.dtype),
                    "key": cache[0],
                    "value": cache[1],
                    "key_value_seq_lengths": lengths + 1,
                    "starts": starts,
                }
                results = [attend(case, given, implementation, axis_name=()) for implementation in ("fused", "xla")]
                return cache, starts, lengths + 1, jnp.maximum(worst, distance(case, *results))

            state = (empty["key"], empty["value"]), jnp.array([190, 3]), jnp.array([0, 100]), jnp.float32(0)
            return lax.fori_loop(0, tokens, step, state)[3]

        with jax.default_device(device):
            assert slide() < 1
    jtf.heap.check()


def check_combinations(mesh: Mesh, count: int = 12) -> None:
    """Features at random, of other cases on a mesh of another size."""
    world = mesh.devices.size
    check_cases(mesh, {f"seed {seed}": draw(random.Random(1000 * world + seed), world=world) for seed in range(count)})


def check_listed_shapes(mesh: Mesh) -> None:
    """The shapes of the benchmarks."""
    cases = {}
    for shape in register.OPERATIONS["decode_attention"].shapes:
        sizes = {"b": shape.b, "n": shape.n, "k": shape.kv_heads, "h": shape.h, "s": shape.s}
        cases[shape.name] = Case(world=mesh.devices.size, dtype="bfloat16", **sizes)
    check_cases(mesh, cases, together=1)


def check_repetition(mesh: Mesh, case: Case, times: int) -> None:
    """Call after call with changing operands gives what the first call with those operands gave, bit for bit."""

    def local(rank: jax.Array) -> jax.Array:
        arrays = [operands(case, jax.random.key(i), rank) for i in range(3)]
        first = [jnp.stack(results) for results in zip(*(attend(case, x, "fused") for x in arrays))]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)

        def step(i: jax.Array, wrong: jax.Array) -> jax.Array:
            results = attend(case, jax.tree.map(lambda x: x[i % 3], stacked), "fused")
            same = [jnp.array_equal(found, wanted[i % 3]) for found, wanted in zip(results, first)]
            return wrong + jnp.where(same[0] & same[1], 0, 1)

        return lax.fori_loop(0, times, step, jnp.int32(0))

    assert int(per_rank(mesh, local)()) == 0
    jtf.heap.check()


def check_repetitions(mesh: Mesh, times: int = 1000) -> None:
    """Of a batch of one, and of one with a few tokens of each sequence."""
    world = mesh.devices.size
    sizes = {"world": world, "n": 64, "k": 8, "h": 128, "dtype": "bfloat16"}
    check_repetition(mesh, Case(b=1, s=2048, **sizes), times)
    check_repetition(mesh, Case(b=4, t=3, s=512, lengths=(1, 77, 512, world * 512), **sizes), times)


def check_growing_cache(mesh: Mesh, tokens: int = 500) -> None:
    """Every step of a `while_loop` in which the cache grows, plain and quantised in pages."""
    world = mesh.devices.size
    begin = np.array([0, 130, 700])
    room = -(-(int(begin.max()) + tokens) // (64 * world)) * 64
    base = Case(world=world, n=32, k=8, h=128, s=room, placement="round_robin", dtype="bfloat16")
    for case in (base, dataclasses.replace(base, cache="int8", page_size=64, output="heads")):
        check_growth(mesh, case, begin, tokens)


def check_growth(mesh: Mesh, case: Case, begin: np.ndarray, tokens: int) -> None:
    """Decodes random tokens from these lengths on."""

    def local(rank: jax.Array) -> jax.Array:
        arrays = operands(case, jax.random.key(0), rank)
        cache = jtf.KVCache(*(arrays.get(name) for name in jtf.KVCache._fields))
        tables = arrays.get("block_tables")
        layout = {name: case.keywords[name] for name in ("placement", "block_size", "kv_layout")}

        def step(state: tuple) -> tuple:
            i, cache, lengths, worst = state
            keys = jax.random.split(jax.random.fold_in(jax.random.key(1), i), 3)
            new = [jax.random.normal(key, (case.b, case.k, case.h), case.dtype) for key in keys[:2]]
            cache = jtf.append_kv(cache, *new, lengths, "tp", block_tables=tables, **layout)
            given = {name: x for name, x in cache._asdict().items() if x is not None}
            given["query"] = jax.random.normal(keys[2], (case.b, case.n, case.h), case.dtype)
            given["key_value_seq_lengths"] = lengths + 1
            if tables is not None:
                given["block_tables"] = tables
            found, wanted = (attend(case, given, implementation) for implementation in ("fused", "xla"))
            return i + 1, cache, lengths + 1, jnp.maximum(worst, distance(case, found, wanted))

        state = 0, cache, jnp.asarray(begin, jnp.int32), jnp.float32(0)
        return lax.while_loop(lambda state: state[0] < tokens, step, state)[3]

    assert per_rank(mesh, local)() < 1
    jtf.heap.check()


def check_mixture(mesh: Mesh) -> None:
    """Attention, a fused product and an XLA collective take turns in a loop of one program."""
    world = mesh.devices.size
    case = Case(world=world, b=2 * world, n=8, k=2, h=64, s=128, output="heads")
    width = case.n * case.h

    def run(rank: jax.Array, implementation: str) -> jax.Array:
        arrays = operands(case, jax.random.key(0), rank)
        weights = jax.random.normal(jax.random.fold_in(jax.random.key(1), rank), (width, width // world)) / width**0.5

        def step(_: Any, query: jax.Array) -> jax.Array:
            out, residual = attend(case, {**arrays, "query": query}, implementation)
            rows = lax.all_to_all(out.reshape(case.b, -1), "tp", 0, 1, tiled=True)  # [B / world, N * H]
            product = jtf.all_gather_matmul(rows, weights, "tp", precision="highest", implementation=implementation)
            columns = lax.all_gather(product, "tp", axis=1, tiled=True).reshape(query.shape)
            return jnp.tanh(4 * columns + lax.pmean(jnp.mean(residual), "tp"))

        return lax.fori_loop(0, 50, step, arrays["query"])

    def local(rank: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(run(rank, "fused") - run(rank, "xla")))

    assert per_rank(mesh, local)() < 1e-2
    jtf.heap.check()


def small_call(mesh: Mesh) -> tuple[Callable, tuple[jax.Array, ...]]:
    """A call of the kernel on whole arrays, and its operands."""
    shapes = {
        "query": (2, 8, 64),
        "key": (2, 64 * mesh.devices.size, 2, 64),
        "value": (2, 64 * mesh.devices.size, 2, 64),
    }
    specs = (P(), P(None, "tp"), P(None, "tp"))
    call = functools.partial(jtf.decode_attention, axis_name="tp", implementation="fused")
    arrays = [
        jax.jit(functools.partial(jax.random.normal, shape=shape), out_shardings=NamedSharding(mesh, spec))(
            jax.random.key(i)
        )
        for i, (shape, spec) in enumerate(zip(shapes.values(), specs))
    ]
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("tp"), check_vma=False)), tuple(arrays)


# Whose checks these are.
NAMES = ("decode_attention",)
CHECKS = (
    check_features,
    check_forms,
    check_combinations,
    check_listed_shapes,
    check_repetitions,
    check_growing_cache,
    check_mixture,
)
# Of calls without peers, on one device.
ALONE = (check_alone, check_ring_that_slides)
