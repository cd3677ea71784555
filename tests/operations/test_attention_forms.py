"""`decode_attention` and `append_kv` of rings, of pools of which the heads stand first, and without peers."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtaxfree import append_kv, decode_attention
from tests.helpers.attention_cases import DTYPES, Case, Operands, alone, assert_right, attention, forms, make, program
from tests.helpers.support import assert_fused, assert_not_fused, fails, lower_for_cuda, mesh_of

# Small enough for the simulator: a few programs of each kind, tiles that nothing fills.
SPLIT = {"splits": 3, "block_s": 16, "block_r": 16, "merge_rows": 2}
SIMULATED = {"implementation": "simulate", "config": SPLIT}
FORMS = tuple(forms(Case(world=2)))


def run(case: Case, call: Callable) -> None:
    """Runs a call and compares what comes out."""
    operands, expected = make(case)
    assert_right(case, call(operands), expected)


def in_some_dtypes(worlds: tuple[int, ...], soaked: tuple[int, ...]) -> pytest.MarkDecorator:
    """Each form in one dtype on each number of ranks; in long tests in all of them, and on more numbers of ranks."""
    found = []
    for i, form in enumerate(FORMS):
        for j, world in enumerate((*worlds, *soaked)):
            for k, dtype in enumerate(DTYPES):
                usual = world in worlds and (i + j) % len(DTYPES) == k
                found.append(pytest.param(form, world, dtype, marks=() if usual else pytest.mark.soak))
    return pytest.mark.parametrize(("form", "world", "dtype"), found)


@in_some_dtypes((1, 4), (2, 3))
def test_forms(form: str, world: int, dtype: str) -> None:
    case = dataclasses.replace(forms(Case(world=world))[form], dtype=dtype)
    run(case, jax.jit(program(case, mesh_of(world)) if world > 1 else alone(case)))


@in_some_dtypes((2,), (1, 3, 4))
def test_forms_of_the_kernel(form: str, world: int, dtype: str) -> None:
    case = dataclasses.replace(forms(Case(world=world, n=2 * world, k=2, h=24, s=64))[form], dtype=dtype)
    run(case, jax.jit(program(case, mesh_of(world), **SIMULATED) if world > 1 else alone(case, **SIMULATED)))


PLAIN = Case(world=1, n=4, k=2, h=24, lengths=(64, 3, 0))


@pytest.mark.parametrize("axis_name", ((), [], None))
def test_without_peers_nothing_is_compiled_by_the_caller(axis_name: Any) -> None:
    run(PLAIN, alone(PLAIN, axis_name))
    run(PLAIN, alone(PLAIN, axis_name, **SIMULATED))


@pytest.mark.parametrize("keywords", ({}, SIMULATED))
def test_each_device_has_sequences_of_its_own(keywords: dict[str, Any]) -> None:
    case = dataclasses.replace(PLAIN, b=4, lengths=(64, 3, 0, 17), starts=(60, 1, 2, 63))
    operands, expected = make(case)
    specs = Operands({name: P("tp") for name in operands.whole}, {name: P(None, "tp") for name in operands.parts})
    call = jax.shard_map(alone(case, **keywords), mesh=mesh_of(4), in_specs=(specs,), out_specs=P("tp"))
    assert_right(case, jax.jit(call)(operands), expected)
    if not keywords:
        text = lower_for_cuda(call, operands)
        assert_fused(text)
        assert "all_gather" not in text


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_programs_for_several_devices_take_xla(kind: AxisType, caplog: pytest.LogCaptureFixture) -> None:
    """Outside of `jax.shard_map`, where a kernel cannot be split."""
    case = dataclasses.replace(PLAIN, b=4, lengths=(64, 3, 0, 17))
    operands, expected = make(case)
    mesh = Mesh(mesh_of(4).devices, ("tp",), axis_types=(kind,))
    put = lambda arrays, spec: jax.device_put(arrays, NamedSharding(mesh, spec))  # noqa: E731
    operands = Operands(put(operands.whole, P("tp")), put(operands.parts, P(None, "tp")))
    with jax.set_mesh(mesh):
        assert_right(case, jax.jit(alone(case))(operands), expected)
        with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
            assert_not_fused(lower_for_cuda(alone(case), operands), "dot_general")
        with fails(
            NotImplementedError, "the program is for several devices", "inside jax.shard_map, with axis_name=()"
        ):
            lower_for_cuda(alone(case, implementation="fused"), operands)
    assert "the program is for several devices" in caplog.text


@pytest.mark.parametrize(("form", "world"), (("ring-paged", 1), ("pool-ring", 2)))
def test_lowers_to_one_kernel(form: str, world: int) -> None:
    case = forms(Case(world=world, dtype="bfloat16"))[form]
    call = functools.partial(alone, case) if world == 1 else functools.partial(program, case, mesh_of(world))
    for implementation in ("fused", None):
        assert_fused(lower_for_cuda(call(implementation=implementation), make(case)[0]))


def test_a_call_without_peers_keeps_the_kernel_in_loops() -> None:
    operands, _ = make(PLAIN)
    query = jnp.asarray(operands.whole["query"])

    def with_query(query: jax.Array) -> jax.Array:
        return alone(PLAIN)(Operands(operands.whole | {"query": query}, operands.parts))[0]

    assert_fused(lower_for_cuda(lambda query: lax.fori_loop(0, 3, lambda _, query: with_query(query), query), query))


def softmax(case: Case, operands: Operands) -> jax.Array:
    """The result of a case without pages in `jnp`, from what each token has: for derivatives."""
    whole, parts = operands
    axis = case.kv_layout.index("S")
    total = case.world * case.s
    tokens = (np.array(case.starts)[:, None] + np.arange(total)) % total  # the places where they lie, [B, total]

    def of_tokens(x: jax.Array) -> jax.Array:
        """[world, ...] -> [B, total, N, H]."""
        x = jnp.moveaxis(
            jnp.concatenate(list(x), axis=axis), [case.kv_layout.index(letter) for letter in "BSK"], range(3)
        )
        return jnp.repeat(x[np.arange(case.b)[:, None], tokens], case.n // case.k, axis=2)

    key, value = of_tokens(parts["key"]), of_tokens(parts["value"])
    logits = jnp.einsum("btnh,bsnh->bnts", whole["query"], key, precision="highest") * case.h**-0.5
    last = (whole["key_value_seq_lengths"][:, None] - case.t + jnp.arange(case.t))[:, None, :, None]
    seen = (jnp.arange(total) <= last) & (jnp.arange(total) >= last - case.window)
    weights = jax.nn.softmax(jnp.where(seen, logits, -1e30))
    return jnp.einsum("bnts,bsnh->btnh", weights, value, precision="highest")


@pytest.mark.parametrize(("world", "check_vma"), ((1, True), (4, True), (4, False)))
def test_gradients(world: int, check_vma: bool) -> None:
    case = Case(
        world=world, b=2, t=2, n=4, k=2, h=16, s=16, lengths=(16 * world, 5), starts=(11, -2), window=12,
        kv_layout="KBSH",
    )  # fmt: skip
    (whole, parts), _ = make(case)
    floats = {"query": jnp.asarray(whole["query"]), **{name: jnp.nan_to_num(x) for name, x in parts.items()}}
    call = alone(case) if world == 1 else program(case, mesh_of(world), check_vma=check_vma)

    def gradients(function: Callable) -> dict[str, jax.Array]:
        def loss(floats: dict[str, jax.Array]) -> jax.Array:
            operands = Operands(whole | {"query": floats["query"]}, {name: floats[name] for name in parts})
            return jnp.sin(3 * function(operands)).sum()

        return jax.jit(jax.grad(loss))(floats)

    wanted = gradients(functools.partial(softmax, case))
    for name, found in gradients(lambda operands: call(operands)[0]).items():
        assert np.abs(wanted[name]).max() > 0.1
        np.testing.assert_allclose(found, wanted[name], rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("world", "settings"),
    (
        (1, {}),
        (1, {"kv_layout": "KBSH", **SIMULATED}),
        (2, {"placement": "round_robin", "block_size": 4}),
        (2, {"kv_layout": "BKSH", **SIMULATED}),
    ),
)
def test_a_window_that_slides_round_a_ring(world: int, settings: dict[str, Any]) -> None:
    """Each new token takes the place of the oldest one once the ring is full. A right-aligned prompt comes first."""
    b, n, k, h, s = 2, 4, 2, 16, 16
    places, prompt, steps = world * s, np.array([9, world * s - 3]), 12 if SIMULATED.items() <= settings.items() else 40
    rng = np.random.default_rng(0)
    keys, values = (rng.normal(size=(b, places + steps, k, h)).astype(np.float32) for _ in range(2))
    queries = rng.normal(size=(steps, b, n, h)).astype(np.float32)
    names = ("placement", "block_size", "kv_layout")
    where: dict[str, Any] = {name: settings[name] for name in names if name in settings}
    how = {name: x for name, x in settings.items() if name not in names}
    axis_name = "tp" if world > 1 else None
    shape = {"BSKH": (b, s, k, h), "BKSH": (b, k, s, h), "KBSH": (k, b, s, h)}[where.get("kv_layout", "BSKH")]
    at = np.arange(b)[:, None]

    def local(empty: tuple, keys: jax.Array, values: jax.Array, queries: jax.Array) -> jax.Array:
        # Its last token lies in the last place.
        starts, lengths = jnp.asarray(places - prompt, jnp.int32), jnp.zeros(b, jnp.int32)
        cache = empty
        for i in range(prompt.max()):
            # Of a prompt that is over, position -1 is dropped.
            now = jnp.where(i < prompt, i, -1)
            cache = append_kv(cache, keys[:, i], values[:, i], now, axis_name, starts=starts, **where)
        lengths = jnp.asarray(prompt, jnp.int32)

        def step(i: jax.Array, state: tuple) -> tuple:
            cache, starts, lengths, outs = state
            token = (prompt + i)[:, None]
            full = lengths == places
            starts, lengths = starts + full, lengths - full
            new = (x[at, token][:, 0] for x in (keys, values))
            cache = append_kv(cache, *new, lengths, axis_name, starts=starts, **where)
            keywords = {"key_value_seq_lengths": lengths + 1, "starts": starts}
            out = decode_attention(queries[i], *cache, axis_name, **keywords, **where, **how)
            return cache, starts, lengths + 1, outs.at[i].set(out)

        return lax.fori_loop(0, steps, step, (cache, starts, lengths, jnp.zeros_like(queries)))[3]

    empty = (jnp.zeros((world, *shape)),) * 2
    if world == 1:
        call = lambda empty, *rest: local(tuple(x[0] for x in empty), *rest)  # noqa: E731
    else:
        call = jax.shard_map(
            lambda empty, *rest: local(tuple(x[0] for x in empty), *rest),
            mesh=mesh_of(world),
            in_specs=(P("tp"), P(), P(), P()),
            out_specs=P(),
        )
    found = jax.jit(call)(empty, keys, values, queries)
    for i in range(steps):
        for j in range(b):
            held = slice(max(0, prompt[j] + i + 1 - places), prompt[j] + i + 1)
            own = slice(j, j + 1), held
            count = np.array([held.stop - held.start])
            wanted = attention(queries[i, own[0], None], keys[own], values[own], count)
            np.testing.assert_allclose(found[i, j], wanted.out[0, 0], rtol=1e-4, atol=1e-5, err_msg=f"step {i}")
