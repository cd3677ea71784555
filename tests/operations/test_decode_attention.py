"""`decode_attention`, `merge_attention` and `append_kv` as JAX operations, and the kernel simulated. No GPU needed."""

import dataclasses
import functools
import itertools
import logging
import random
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtaxfree import KVCache, append_kv, decode_attention, merge_attention
from jaxtaxfree.ops.decode_attention.portable import Config
from jaxtaxfree.ops.decode_attention.shapes import SHAPES
from jaxtaxfree.ops.shapes import AttentionShape
from tests.conftest import MeshFactory
from tests.helpers import attention_cases, compiling
from tests.helpers.attention_cases import (
    DTYPES,
    HEAD_SIZES,
    LARGEST,
    SCALES,
    WORLDS,
    Case,
    Operands,
    assert_right,
    attention,
    features,
    lay_out,
    make,
    program,
    quantise,
    shuffled_tables,
)
from tests.helpers.support import TRITON_CALL, fails, lower_for_cuda, mesh_of, one_program, sharded

# Small enough for the simulator: a few programs of each kind, tiles that nothing fills.
SPLIT = {"splits": 3, "block_s": 16, "block_r": 16, "merge_rows": 2}


def run(case: Case, mesh: Mesh | None = None, *arguments: Any, **keywords: Any) -> None:
    """Runs a call and compares what comes out."""
    operands, expected = make(case)
    assert_right(case, jax.jit(program(case, mesh or mesh_of(case.world), *arguments, **keywords))(operands), expected)


def small(world: int) -> Case:
    """To be simulated."""
    return Case(world=world, n=2 * world, k=2, h=24)


FEATURES = tuple(features(Case(world=2)))


# Of the other worlds `test_combinations` draws some.
@pytest.mark.parametrize("world", (4, *(pytest.param(world, marks=pytest.mark.soak) for world in WORLDS if world != 4)))
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, world: int) -> None:
    run(features(Case(world=world))[feature])


@pytest.mark.parametrize("world", (2, pytest.param(3, marks=pytest.mark.soak)))
@pytest.mark.parametrize("feature", FEATURES)
def test_features_of_the_kernel(feature: str, world: int) -> None:
    run(features(small(world))[feature], implementation="simulate", config=SPLIT)


@pytest.mark.covers(1)
@pytest.mark.parametrize("h", HEAD_SIZES)
@pytest.mark.parametrize("hv", (None, 64, 128))
def test_head_sizes(h: int, hv: int | None) -> None:
    run(Case(world=2, n=4, k=2, h=h, hv=hv, b=1, lengths=(100,)))


@pytest.mark.parametrize(
    "h, dtype",
    [
        pytest.param(h, dtype, marks=[] if h == 5 or dtype == "bfloat16" else pytest.mark.soak)
        for h, dtype in itertools.product((1, 4, 5, 8), DTYPES)
    ],
)
def test_heads_smaller_than_what_is_multiplied_at_once(h: int, dtype: str) -> None:
    case = Case(world=2, n=4, k=2, h=h, b=1, s=32, lengths=(40,), dtype=dtype)
    run(case, implementation="simulate", config=SPLIT)
    assert_fused(lower_for_cuda(program(case, mesh_of(2)), make(case)[0]))


@pytest.mark.parametrize("implementation", ("xla", "simulate"))
@pytest.mark.parametrize("scales", ("tensor", "head", "token"))
def test_small_scales_in_f16(scales: str, implementation: str) -> None:
    """Of 1e-4, for numbers up to 57344: f16 has no such weights."""
    case = Case(world=2, s=256, h=32, cache="float8_e5m2", scales=scales, dtype="float16", lengths=(450,), b=1)
    given, expected = make(case)
    out, _ = program(case, mesh_of(2), implementation=implementation)(given)
    wanted = expected.out
    assert np.max(np.abs(np.asarray(out, np.float64) - wanted)) < 1e-3 * np.max(np.abs(wanted))


@pytest.mark.parametrize(
    "page_size", (16, 256, *(pytest.param(size, marks=pytest.mark.soak) for size in (32, 64, 128)))
)
@pytest.mark.parametrize("kv_layout", ("BSKH", "BKSH"))
@pytest.mark.parametrize("placement", ("contiguous", "round_robin"))
def test_page_sizes(page_size: int, kv_layout: str, placement: str) -> None:
    lengths = (0, 257, 511)
    run(Case(world=2, s=256, page_size=page_size, kv_layout=kv_layout, placement=placement, lengths=lengths))


@hypothesis.settings(max_examples=10)
@hypothesis.given(data=st.data(), world=st.sampled_from(WORLDS))
def test_combinations(data: st.DataObject, world: int) -> None:
    run(data.draw(attention_cases.cases(world=world)))


@pytest.mark.soak
@hypothesis.settings(max_examples=100)
@hypothesis.given(data=st.data(), world=st.sampled_from(WORLDS))
def test_more_combinations(data: st.DataObject, world: int) -> None:
    run(data.draw(attention_cases.cases(world=world)))


def splits(choose: random.Random) -> Config:
    """A way to split the kernel's work."""
    return Config(
        splits=choose.randint(1, 5),
        block_s=choose.choice((16, 32, 64)),
        block_r=16,
        merge_rows=choose.choice((1, 2, 4, 8)),
        alone=choose.choice((False, True)),
        num_warps=choose.choice((1, 2, 4)),
    )


@hypothesis.settings(max_examples=10)  # of which `test_more_combinations_of_the_kernel` has more
@hypothesis.given(data=st.data(), world=st.sampled_from((1, 2, 3)), choose=st.randoms(use_true_random=False))
def test_combinations_of_the_kernel(data: st.DataObject, world: int, choose: random.Random) -> None:
    case = data.draw(attention_cases.cases(world=world, small=True))
    run(case, implementation="simulate", config=splits(choose))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed < 5 else pytest.mark.soak) for seed in range(110)]
)
def test_more_combinations_of_the_kernel(seed: int) -> None:
    choose = random.Random(seed)
    case = attention_cases.draw(choose, world=choose.choice((2, 3, 4, 8)), small=True)
    run(case, implementation="simulate", config=splits(choose))


@pytest.mark.parametrize("keywords", ({"implementation": "xla"}, {"implementation": "simulate", "config": SPLIT}))
def test_every_rank_has_the_same_bits(keywords: dict[str, Any]) -> None:
    case = features(small(3))["tokens-2"]
    operands, _ = make(case)
    for result in jax.jit(program(case, mesh_of(3), **keywords))(operands):
        first, *others = [np.asarray(shard.data) for shard in result.addressable_shards]
        for other in others:
            np.testing.assert_array_equal(other, first)


def test_what_splits_the_work_changes_nothing_but_rounding() -> None:
    case = features(small(2))["ends"]
    for count, rows in ((1, 1), (7, 4), (2, 8), (4, 1)):
        config = Config(splits=count, block_s=16, merge_rows=rows)
        run(case, implementation="simulate", config=config)


@pytest.mark.parametrize("output", ("replicated", "heads"))
@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("implementation", (None, "xla"))
def test_implementations(output: str, check_vma: bool, implementation: str | None) -> None:
    case = Case(world=4, output=output, lengths=(256, 3, 100))
    run(case, check_vma=check_vma, implementation=implementation)


@pytest.mark.parametrize("axes", (("dp", "tp"), ("tp", "dp")))
@pytest.mark.parametrize("output", ("replicated", "heads"))
def test_axis_tuple_counts_the_last_axis_fastest(cpu_mesh: MeshFactory, axes: tuple[str, str], output: str) -> None:
    run(Case(world=8, output=output), cpu_mesh((2, 4), ("dp", "tp")), axes)


@pytest.mark.parametrize("keywords", ({}, {"implementation": "simulate", "config": SPLIT}))
def test_one_axis_of_two(cpu_mesh: MeshFactory, keywords: dict[str, Any]) -> None:
    case = dataclasses.replace(small(3), b=4, lengths=(0, 17, 192, 90), output="heads")
    run(case, cpu_mesh((2, 3), ("dp", "tp")), batch="dp", **keywords)


def test_permuted_devices() -> None:
    run(Case(world=4, lengths=(256, 3, 100)), Mesh(np.array(jax.devices("cpu"))[[5, 2, 7, 0]], ("tp",)))


def test_explicit_mesh() -> None:
    mesh = Mesh(mesh_of(4).devices, ("tp",), axis_types=(AxisType.Explicit,))
    case = Case(world=4, output="heads")
    (whole, parts), expected = make(case)
    parts = jax.device_put(parts, NamedSharding(mesh, P("tp")))
    with jax.set_mesh(mesh):
        found = jax.jit(program(case, mesh))(Operands(whole, parts))
    assert jax.typeof(found[0]).sharding.spec == P(None, "tp", None)
    assert_right(case, found, expected)


def test_no_residual_by_default() -> None:
    case = Case(world=2, t=2)
    (whole, parts), expected = make(case)
    call = lambda q, k, v: decode_attention(q, k[0], v[0], "tp")  # noqa: E731
    specs = (P(), P("tp"), P("tp"))
    out = jax.shard_map(call, mesh=mesh_of(2), in_specs=specs, out_specs=P())(
        whole["query"], parts["key"], parts["value"]
    )
    np.testing.assert_allclose(out, expected.out, rtol=1e-5, atol=1e-5)


def plain(case: Case, operands: Operands) -> jax.Array:
    """The result over the whole of a contiguous cache in `jnp`, for derivatives to be compared with."""
    whole, parts = operands
    query = whole["query"]
    key, value = (jnp.concatenate(list(parts[name]), axis=1) for name in ("key", "value"))
    key, value = (jnp.repeat(x, case.n // case.k, axis=2) for x in (key, value))
    logits = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest") * case.h**-0.5
    if case.soft_cap:
        logits = case.soft_cap * jnp.tanh(logits / case.soft_cap)
    last = (whole["key_value_seq_lengths"][:, None] - case.t + jnp.arange(case.t))[:, None, :, None]
    position = jnp.arange(key.shape[1])
    seen = (position <= last) & (position >= last - case.window)
    logits = jnp.where(seen, logits, -1e30)
    sinks = jnp.broadcast_to(whole["sinks"][:, None, None], (*logits.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([logits, sinks], axis=-1))[..., :-1]
    return jnp.einsum("bnts,bsnh->btnh", weights, value, precision="highest")


DIFFERENTIATED = Case(world=4, t=2, n=8, k=4, h=64, s=16, lengths=(64, 1, 37), window=30, soft_cap=3.0, sinks=True)


def split_operands(case: Case) -> tuple[dict[str, Any], Callable[[dict[str, Any]], Operands]]:
    """The operands by which one may differentiate, and how to put them among the others."""
    (whole, parts), _ = make(case)
    parts = {name: np.nan_to_num(x) for name, x in parts.items()}
    floats = {"query": whole["query"], "sinks": whole["sinks"], "key": parts["key"], "value": parts["value"]}

    def put(floats: dict[str, Any]) -> Operands:
        lengths = {"key_value_seq_lengths": whole["key_value_seq_lengths"]}
        return Operands(
            {**lengths, "query": floats["query"], "sinks": floats["sinks"]},
            {"key": floats["key"], "value": floats["value"]},
        )

    return {name: jnp.asarray(x) for name, x in floats.items()}, put


@pytest.mark.parametrize("output", ("replicated", "heads"))
@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("implementation", (None, "xla"))
def test_gradients(output: str, check_vma: bool, implementation: str | None) -> None:
    case = dataclasses.replace(DIFFERENTIATED, output=output)
    floats, put = split_operands(case)
    call = program(case, mesh_of(4), check_vma=check_vma, implementation=implementation)

    def gradients(function: Callable) -> dict[str, jax.Array]:
        return jax.jit(jax.grad(lambda floats: jnp.sin(3 * function(put(floats))).sum()))(floats)

    wanted = gradients(functools.partial(plain, case))
    for name, found in gradients(lambda operands: call(operands)[0]).items():
        assert np.abs(wanted[name]).max() > 0.1
        np.testing.assert_allclose(found, wanted[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_derivative_in_a_direction() -> None:
    floats, put = split_operands(DIFFERENTIATED)
    tangents = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), floats)
    call = program(DIFFERENTIATED, mesh_of(4))

    def derivative(function: Callable) -> tuple:
        return jax.jit(lambda *directions: jax.jvp(lambda x: function(put(x)), *directions))((floats,), (tangents,))

    found = derivative(lambda operands: call(operands)[0])
    for mine, plain_s in zip(found, derivative(functools.partial(plain, DIFFERENTIATED))):
        np.testing.assert_allclose(mine, plain_s, rtol=1e-3, atol=1e-4)


def test_gradient_of_a_sequence_without_keys_is_none() -> None:
    case = Case(world=2, b=2, t=1, n=4, k=2, s=16, lengths=(0, 20), sinks=True)
    floats, put = split_operands(case)
    found = jax.jit(jax.grad(lambda floats: program(case, mesh_of(2))(put(floats))[0].sum()))(floats)
    assert all(np.isfinite(x).all() for x in found.values())
    assert not np.any(found["query"][0])


# Of each of three sets of keys 8 sequences have so many, or none, in every combination.
SET_LENGTHS = np.stack([np.where(np.arange(8) >> i & 1, np.arange(8) % 6 + 1, 0) for i in range(3)])


def set_operands() -> dict[str, Any]:
    """A query, keys and values of all ranks by set, and a sink for each head."""
    rng = np.random.default_rng(3)
    sizes = {"query": (8, 4, 4), "keys": (3, 8, 6, 2, 4), "values": (3, 8, 6, 2, 4)}
    arrays = {name: jnp.asarray(rng.normal(size=size), jnp.float32) for name, size in sizes.items()}
    return arrays | {"sinks": jnp.array([-jnp.inf, 0.5, -jnp.inf, -0.5])}


def merged_sets(given: dict[str, Any], *, output: str) -> tuple[jax.Array, jax.Array]:
    """The attention over each set, in one call, merged one after the other."""
    query = jnp.concatenate([given["query"]] * 3)
    keys, values = (lax.collapse(given[name], 0, 2) for name in ("keys", "values"))

    def local(query: jax.Array, keys: jax.Array, values: jax.Array, sinks: Any) -> tuple[jax.Array, jax.Array]:
        keywords = {"key_value_seq_lengths": SET_LENGTHS.ravel(), "sinks": sinks, "output": output}
        out, residual = decode_attention(query, keys, values, "tp", return_residual=True, **keywords)
        first, *others = zip(jnp.split(out, 3), jnp.split(residual, 3))
        return functools.reduce(lambda one, other: merge_attention(*one, *other), others, first)

    heads = P(None, "tp") if output == "heads" else P()
    specs = (P(), P(None, "tp"), P(None, "tp"), P())
    call = jax.shard_map(local, mesh=mesh_of(2), in_specs=specs, out_specs=(heads, heads))
    return call(query, keys, values, given.get("sinks"))


def softmax_over_sets(given: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """The same by `jax.nn`, with large numbers in place of infinite ones."""
    keys, values = (jnp.repeat(jnp.concatenate(given[name], axis=1), 2, axis=2) for name in ("keys", "values"))
    seen = np.concatenate(np.arange(6) < SET_LENGTHS[..., None], axis=1)[:, None]
    logits = jnp.einsum("bnh,bsnh->bns", given["query"], keys, precision="highest") / 2
    sinks = given.get("sinks", jnp.full(4, -jnp.inf))
    sinks = jnp.where(jnp.isinf(sinks), -1e30, sinks) + np.log(3)  # once for each set
    logits = jnp.concatenate(
        [jnp.where(seen, logits, -1e30), jnp.broadcast_to(sinks[None, :, None], (8, 4, 1))], axis=-1
    )
    weights = jnp.where(seen, jax.nn.softmax(logits)[..., :-1], 0)
    out = jnp.einsum("bns,bsnh->bnh", weights, values, precision="highest")
    return out, jnp.where(seen.any(-1) | (sinks > -1e29), jax.nn.logsumexp(logits, axis=-1), -jnp.inf)


def directions(given: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), given)


def by_query(of: Callable, call: Callable, given: dict[str, Any]) -> Any:
    return of(lambda query: call(given | {"query": query}))(given["query"])


def gradient(call: Callable, given: dict[str, Any]) -> dict[str, Any]:
    out, back = jax.vjp(call, given)
    return back(directions(out, 5))[0]


DERIVATIVES: dict[str, Callable] = {
    "jvp": lambda call, given: jax.jvp(call, (given,), (directions(given, 4),)),
    "jvp-of-zeros": lambda call, given: jax.jvp(call, (given,), (jax.tree.map(jnp.zeros_like, given),))[1],
    "linearize": lambda call, given: jax.linearize(call, given)[1](directions(given, 4)),
    "grad": gradient,
    "jacfwd": functools.partial(by_query, jax.jacfwd),
    "jacrev": functools.partial(by_query, jax.jacrev),
    "jvp-of-grad": lambda call, given: jax.jvp(functools.partial(gradient, call), (given,), (directions(given, 4),))[1],
}


# Of four sinks two are -inf, as if there were none.
@pytest.mark.parametrize(
    ("with_sinks", "output"), (pytest.param(False, "replicated", marks=pytest.mark.soak), (True, "heads"))
)
def test_derivatives_where_sets_are_empty(with_sinks: bool, output: str) -> None:
    given = set_operands()
    if not with_sinks:
        del given["sinks"]

    # One program that nobody optimises, because compiling takes longest.
    @functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
    def results(call: Callable, given: dict[str, Any]) -> dict[str, Any]:
        return {name: derivative(call, given) for name, derivative in DERIVATIVES.items()}

    found = results(functools.partial(merged_sets, output=output), given)
    for name, wanted in results(softmax_over_sets, given).items():
        for mine, other in zip(jax.tree.leaves(found[name]), jax.tree.leaves(wanted), strict=True):
            assert np.any(other) or name == "jvp-of-zeros"
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5, equal_nan=False, err_msg=name)


@pytest.mark.parametrize(("residual", "other"), ((-np.inf, -np.inf), (-np.inf, 1.0), (1.0, -np.inf), (1.0, 2.0)))
def test_merge_takes_any_direction_of_what_is_empty(residual: float, other: float) -> None:
    """Also one in which a log-sum-exp of -inf would change."""
    out, other_out = (np.full((1, 2), 3.0 * (x > -np.inf), np.float32) for x in (residual, other))
    given = out, np.array([residual], np.float32), other_out, np.array([other], np.float32)
    total = np.exp(residual) + np.exp(other)
    weights = np.array([np.exp(residual), np.exp(other)]) / (total or 1)
    tangents = jax.jit(lambda *given: jax.jvp(merge_attention, given, tuple(map(jnp.ones_like, given)))[1])(*given)
    np.testing.assert_allclose(tangents[0], np.full((1, 2), weights.sum()), rtol=1e-5)
    np.testing.assert_allclose(tangents[1], [weights.sum()], rtol=1e-5)
    back = jax.jit(jax.grad(lambda *given: sum(x.sum() for x in merge_attention(*given)), argnums=(0, 1, 2, 3)))(*given)
    for found, wanted in zip(back, (weights[0], weights[0], weights[1], weights[1])):
        np.testing.assert_allclose(found, np.full_like(found, wanted), rtol=1e-5)


def test_scales_that_are_numbers() -> None:
    """They are literals in the program of a jitted call."""
    cache = np.random.default_rng(0).integers(-9, 9, (2, 1, 16, 2, 8)).astype(np.int8)
    query = jnp.ones((3, 1, 4, 8))

    def results(implementation: str | None) -> list[jax.Array]:
        def local(query: jax.Array, cache: jax.Array) -> jax.Array:
            scales = {"key_scale": 0.05, "value_scale": 0.5}
            return decode_attention(query, *cache, "tp", implementation=implementation, **scales)

        call = jax.jit(jax.shard_map(local, mesh=mesh_of(2), in_specs=(P(), P(None, None, "tp")), out_specs=P()))
        mapped = jax.vmap(call, in_axes=(0, None))
        return jax.jit(lambda query: [mapped(query, cache), jax.grad(lambda query: mapped(query, cache).sum())(query)])(
            query
        )

    for found, wanted in zip(results(None), results("xla")):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_gradient_by_a_scale_of_zero() -> None:
    query, key, value = jnp.ones((1, 2, 8)), jnp.zeros((1, 8, 1, 8)), jnp.ones((1, 8, 1, 8))

    def total(scale: jax.Array) -> jax.Array:
        call = lambda scale, key, value: decode_attention(query, key, value, "tp", value_scale=scale)  # noqa: E731
        specs = (P(), P(None, "tp"), P(None, "tp"))
        return one_program(call, mesh=mesh_of(2), in_specs=specs, out_specs=P())(scale, key, value).sum()

    gradient = jax.jit(jax.grad(total))
    np.testing.assert_allclose([gradient(scale) for scale in (0.0, 1e-3, 1.0)], 16, rtol=1e-5)


def examples(case: Case, kind: str) -> tuple[Callable, Callable]:
    """A call as several that `jax.vmap` makes one of, each of a sequence, or of some query heads of each kv head.

    Returns: how the arguments of `decode_attention` are mapped, as the dimensions of their examples and what makes
      these of an argument; and what makes one result of those of the examples, which stand first.
    """
    query = 1 + (case.t is not None)  # the dimension of its heads

    def split(name: str, x: jax.Array) -> tuple[jax.Array, int | None]:
        of_cache = name in ("key", "value") or (name.endswith("_scale") and case.scales == "token" and case.cache)
        if kind == "sequences":
            if name in ("query", "key_value_seq_lengths", "block_tables") or (of_cache and case.page_size is None):
                return jnp.moveaxis(x[:, None], 0, -1), x.ndim
            return x, None
        if name not in ("query", "sinks"):
            return x, None
        dim = query if name == "query" else 0
        x = x.reshape(*x.shape[:dim], case.k, 2, case.n // case.k // 2, *x.shape[dim + 1 :])
        return lax.collapse(jnp.moveaxis(x, dim + 1, -1), dim, dim + 2), x.ndim - 2

    def join(x: jax.Array) -> jax.Array:
        if kind == "sequences":
            return lax.collapse(x, 0, 2)
        x = x.reshape(*x.shape[: query + 1], -1, case.n // case.k // 2, *x.shape[query + 2 :])
        return lax.collapse(jnp.moveaxis(x, 0, query + 1), query, query + 3)

    return split, join


def mapped_program(case: Case, kind: str, **keywords: Any) -> Callable:
    """`tests.helpers.attention_cases.program` by `jax.vmap` over `examples`."""
    split, join = examples(case, kind)

    def local(operands: Operands) -> Any:
        own = operands.whole | {name: x[0] for name, x in operands.parts.items()}
        pairs = {name: split(name, x) for name, x in own.items()}
        call = lambda own: decode_attention(**own, axis_name="tp", return_residual=True, **case.keywords, **keywords)  # noqa: E731
        found = jax.vmap(call, in_axes=({name: dim for name, (_, dim) in pairs.items()},))(
            {name: x for name, (x, _) in pairs.items()}
        )
        return jax.tree.map(join, found)

    out = P(None, *[None] * (case.t is not None), "tp" if case.output == "heads" else None)
    return one_program(local, mesh=mesh_of(case.world), in_specs=(Operands(P(), P("tp")),), out_specs=(out, out))


# Of which operands are mapped in different ways.
MAPPED = [
    (feature, kind)
    for feature, case in features(Case(world=2)).items()
    if re.match("full|multi-query|value-heads|tokens-2|head-major|ends$|sinks|heads|.*paged|int8", feature)
    for kind in ("sequences", "heads")
    if kind == "sequences" or (case.n // case.k % 2 == 0 and (case.output != "heads" or case.k % 2 == 0))
]


# Of two kinds each feature has one, in turns.
@pytest.mark.parametrize(
    ("feature", "kind"),
    [
        pytest.param(*mapped, marks=pytest.mark.soak if len(kinds) == 2 and kinds[i % 2] != mapped else [])
        for i, kinds in enumerate([[m for m in MAPPED if m[0] == feature] for feature in dict(MAPPED)])
        for mapped in kinds
    ],
)
def test_vmap_is_one_call(feature: str, kind: str) -> None:
    case = features(Case(world=2))[feature]
    operands, expected = make(case)
    call = mapped_program(case, kind)
    assert_right(case, jax.jit(call)(operands), expected)
    assert str(jax.make_jaxpr(call)(operands)).count("decode_attention[") == 1


@pytest.mark.covers(1)
@pytest.mark.parametrize("kind", ("sequences", "heads"))
@pytest.mark.parametrize("feature", ("sinks", "heads", "paged-blocks", "quantised-paged-heads"))
def test_vmap_of_the_kernel(feature: str, kind: str) -> None:
    case = features(Case(world=2, n=8, k=2, h=24))[feature]
    operands, expected = make(case)
    found = jax.jit(mapped_program(case, kind, implementation="simulate", config=SPLIT))(operands)
    assert_right(case, found, expected)
    assert_fused(lower_for_cuda(mapped_program(case, kind, implementation="fused"), operands))


RING = {"kv_layout": "KBSH", "starts": (100, 127, 3)}


@pytest.mark.parametrize(
    "case",
    (
        Case(world=2, page_size=16, lengths=(5, 128, 70)),
        Case(world=2, cache="int8"),
        Case(world=2, cache="int8", lengths=(5, 128, 70), **RING),
        Case(world=2, page_size=16, lengths=(5, 128, 70), **RING),
    ),
)
def test_vmap_over_caches(case: Case) -> None:
    """Pools of pages, and tokens with scales, of each example."""
    variants, expected = zip(*(make(case, seed) for seed in range(3)))
    stacked = jax.tree.map(lambda *x: np.stack(x), *variants)
    call = jax.vmap(program(case, mesh_of(2)))
    assert str(jax.make_jaxpr(call)(stacked)).count("decode_attention[") == 1
    found = jax.jit(call)(stacked)
    for i, wanted in enumerate(expected):
        assert_right(case, jax.tree.map(lambda x, i=i: x[i], found), wanted)


@pytest.mark.parametrize("mapped", (("query",), ("key", "value"), ("query", "key", "value", "sinks")))
def test_vmap(mapped: tuple[str, ...]) -> None:
    floats, put = split_operands(DIFFERENTIATED)
    call = jax.jit(lambda floats: program(DIFFERENTIATED, mesh_of(4))(put(floats)))
    variants = [{**floats, **{name: floats[name] * factor for name in mapped}} for factor in (1, 0.5, -1)]
    stacked = {name: jnp.stack([v[name] for v in variants]) if name in mapped else floats[name] for name in floats}
    found = jax.jit(jax.vmap(call, in_axes=({name: 0 if name in mapped else None for name in floats},)))(stacked)
    for mine, wanted in zip(found, zip(*map(call, variants))):
        np.testing.assert_allclose(mine, np.stack(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_sinks", (False, True))
def test_merge(dtype: str, with_sinks: bool) -> None:
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=shape) for shape in ((4, 1, 6, 16), (4, 40, 3, 16), (4, 40, 3, 8)))
    # Keys on both sides, on one alone, on none.
    middle, ends = (30, 40, 0, 0), (40, 40, 10, 0)

    def of(begin: tuple[int, ...], end: tuple[int, ...], sinks: np.ndarray | None = None) -> tuple:
        found = []
        for i, (first, last) in enumerate(zip(begin, end)):
            own = slice(i, i + 1), slice(first, last)
            found.append(attention(query[i : i + 1], key[own], value[own], np.array([last - first]), sinks=sinks))
        out, residual = (np.concatenate(x) for x in zip(*found))
        return out.astype(jnp.dtype(dtype)), residual.astype(np.float32)

    sinks = rng.normal(size=6) if with_sinks else None  # of one side
    merged, residual = jax.jit(merge_attention)(*of((0,) * 4, middle, sinks), *of(middle, ends))
    wanted, wanted_residual = of((0,) * 4, ends, sinks)
    assert merged.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(
        merged.astype(np.float32), wanted.astype(np.float32), atol=attention_cases.TOLERANCE[dtype]
    )
    np.testing.assert_allclose(residual, wanted_residual, rtol=1e-6, atol=1e-6)


def test_merge_with_a_prefix_that_all_sequences_share() -> None:
    rng = np.random.default_rng(0)
    query = rng.normal(size=(3, 4, 8)).astype(np.float32)
    prefix, rest = (rng.normal(size=(2, 2, b, s, 2, 8)).astype(np.float32) for b, s in ((1, 24), (3, 16)))

    def local(query: jax.Array, prefix: jax.Array, rest: jax.Array) -> jax.Array:
        attend = functools.partial(decode_attention, axis_name="tp", return_residual=True)
        of_prefix = jax.vmap(lambda q: jax.tree.map(lambda x: x[0], attend(q[None], *prefix[0])))(query)
        return merge_attention(*of_prefix, *attend(query, *rest[0]))[0]

    call = jax.shard_map(local, mesh=mesh_of(2), in_specs=(P(), P("tp"), P("tp")), out_specs=P())
    key, value = (
        np.concatenate([*np.repeat(prefix[:, i], 3, axis=1), *rest[:, i]], axis=1) for i in range(2)
    )  # [B, S, K, H], in an order that does not matter
    wanted = attention(query[:, None], key, value, np.full(3, 2 * (24 + 16)))
    np.testing.assert_allclose(jax.jit(call)(query, prefix, rest), wanted.out[:, 0], rtol=1e-5, atol=1e-5)
    assert_fused(lower_for_cuda(call, query, prefix, rest), calls=2)


def test_merge_with_attention_over_keys_that_are_not_sharded() -> None:
    """Of a prefix that all sequences share, say."""
    case = Case(world=4, b=2, lengths=(100, 0), k=2, n=4)
    operands, expected = make(case)
    found = jax.jit(program(case, mesh_of(4)))(operands)
    nothing = jnp.zeros_like(found[0]), jnp.full_like(found[1], -jnp.inf)
    for merged in (merge_attention(*found, *nothing), merge_attention(*nothing, *found)):
        assert_right(case, merged, expected)
    twice, residual = merge_attention(*found, *found)
    np.testing.assert_allclose(twice, expected.out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(residual, expected.residual + np.log(2), rtol=1e-5)


CACHES = (
    {},
    {"kv_layout": "BKSH"},
    {"placement": "round_robin"},
    {"placement": "round_robin", "block_size": 3, "kv_layout": "BKSH"},
    {"page_size": 16},
    {"page_size": 8, "placement": "round_robin", "kv_layout": "BKSH"},
    {"page_size": 16, "placement": "round_robin", "block_size": 6},
    {"dtype": "bfloat16", "hv": 12},
    *({"cache": cache, "scales": scales} for cache in LARGEST for scales in SCALES),
    {"cache": "int8", "kv_layout": "BKSH", "page_size": 16},
    {"cache": "float8_e4m3fn", "placement": "round_robin", "page_size": 8},
    {"kv_layout": "KBSH", "cache": "int8"},
    {"kv_layout": "KBSH", "page_size": 16, "starts": (-7, 100)},
    {"starts": (140, 77), "placement": "round_robin", "block_size": 6, "cache": "int8"},
)


@dataclasses.dataclass(frozen=True)
class Growth:
    """A cache that takes tokens, a few of each sequence at a time.

    Attributes:
      case: what is kept how.
      tokens: (keys, values) [B, world * S, K, ...], in the order of their positions.
      cache: of each rank, [world, ...] before the first token; the scales of a tensor or head are whole.
      tables: [world, B, pages of S], or None.
    """

    case: Case
    tokens: tuple[np.ndarray, np.ndarray]
    cache: KVCache
    tables: np.ndarray | None

    @classmethod
    def of(cls, case: Case) -> "Growth":
        rng = np.random.default_rng(1)
        tables = shuffled_tables(case, rng)
        shapes = [(case.b, case.world * case.s, case.k, size) for size in (case.h, case.hv or case.h)]
        tokens = tuple(rng.normal(size=shape).astype(jnp.dtype(case.dtype)) for shape in shapes)
        empty = cls(case, tokens, KVCache(*tokens), tables)
        return dataclasses.replace(empty, cache=empty.filled(np.zeros(case.b, int), np.zeros(case.b, int)))

    def filled(self, begin: np.ndarray, end: np.ndarray) -> KVCache:
        """The cache with the tokens at these positions of each sequence, made at once."""
        case, positions = self.case, np.arange(self.case.world * self.case.s)
        kept = (positions >= begin[:, None]) & (positions < end[:, None])
        arrays, scales = [], []
        for x in self.tokens:
            if case.cache is None:
                arrays.append(x)
            else:
                numbers, scale = quantise(x, case.cache, case.scales)
                arrays.append(numbers)
                scales.append(scale)
        laid_out = [
            lay_out(case, np.where(kept.reshape(*kept.shape, *[1] * (x.ndim - 2)), x, x.dtype.type(0)), self.tables)
            if x.ndim > 2
            else x
            for x in (*arrays, *scales)
        ]
        return KVCache(*laid_out)

    @property
    def specs(self) -> KVCache:
        return KVCache(*(None if x is None else P("tp") if x.ndim > 2 else P() for x in self.cache))

    @property
    def keywords(self) -> dict[str, Any]:
        names = ("placement", "block_size", "kv_layout")
        return {name: self.case.keywords[name] for name in names}


def own_part(cache: KVCache) -> KVCache:
    """Without the dimension of the ranks."""
    return KVCache(*(x if x is None or x.ndim < 2 else x[0] for x in cache))


def all_parts(cache: KVCache) -> KVCache:
    """With it."""
    return KVCache(*(x if x is None or x.ndim < 2 else x[None] for x in cache))


@pytest.mark.covers(1)
@pytest.mark.parametrize("settings", CACHES, ids=lambda settings: "-".join(map(str, settings.values())) or "plain")
@pytest.mark.parametrize("t", (None, 1, 5))
def test_append_puts_tokens_where_they_belong(settings: dict[str, Any], t: int | None) -> None:
    case = Case(**{"world": 3, "b": 2, "k": 2, "n": 2, "h": 8, "s": 48, **settings})
    growth, steps, begin = Growth.of(case), 17, np.array([0, 66])
    starts = None if case.starts is None else np.array(case.starts)
    end = np.minimum(begin + steps * (t or 1), 3 * case.s)

    def local(cache: KVCache, tables: Any, keys: jax.Array, values: jax.Array) -> KVCache:
        def step(i: jax.Array, cache: KVCache) -> KVCache:
            lengths = begin + i * (t or 1)
            # The last tokens lie past the end, where there are none to be taken: any will do.
            at = jnp.minimum(lengths[:, None] + jnp.arange(t or 1), keys.shape[1] - 1)
            new = [jnp.take_along_axis(x, at[:, :, None, None], axis=1) for x in (keys, values)]
            new = [x if t else x[:, 0] for x in new]
            pages = None if tables is None else tables[0]
            return append_kv(cache, *new, lengths, "tp", block_tables=pages, starts=starts, **growth.keywords)

        return all_parts(lax.fori_loop(0, steps, step, own_part(cache)))

    grown = jax.jit(
        jax.shard_map(local, mesh=mesh_of(3), in_specs=(growth.specs, P("tp"), P(), P()), out_specs=growth.specs)
    )(growth.cache, growth.tables, *growth.tokens)
    for found, wanted in zip(jax.tree.leaves(grown), jax.tree.leaves(growth.filled(begin, end)), strict=True):
        assert found.dtype == wanted.dtype
        # XLA multiplies by the reciprocal where NumPy divides.
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=2e-7)


def test_append_drops_what_lies_past_the_end() -> None:
    case = Case(world=2, b=2, k=1, n=1, h=4, s=8, kv_layout="BKSH")
    growth = Growth.of(case)
    new = [x[:, :5] for x in growth.tokens]
    local = lambda cache, *new: all_parts(  # noqa: E731
        append_kv(own_part(cache), *new, jnp.array([13, 16]), "tp", kv_layout="BKSH")
    )
    call = one_program(local, mesh=mesh_of(2), in_specs=(growth.specs, P(), P()), out_specs=growth.specs)
    grown = call(growth.cache, *new)
    for found, x in zip(grown[:2], new):
        whole = np.concatenate(list(np.asarray(found)), axis=2).swapaxes(1, 2)  # [B, 16, K, H]
        np.testing.assert_array_equal(whole[0, 13:], x[0, :3])
        assert not whole[0, :13].any()
        assert not whole[1].any()


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_append_scales_tokens_of_wide_floats(dtype: str) -> None:
    """The largest number of these takes scales below the smallest one of f32."""
    token = jnp.array([[[1e-3, -2e-3, 0, 5e-4]], [[3, 1, -4, 0]]])  # [B, K, H]
    cache = KVCache(*(jnp.zeros((2, 3, 1, 4), dtype),) * 2, *(jnp.zeros((2, 3, 1)),) * 2)
    local = functools.partial(append_kv, axis_name="tp")
    call = one_program(local, mesh=mesh_of(1), in_specs=P(), out_specs=P(), check_vma=False)
    grown = call(cache, token, token, jnp.array([0, 2]))
    for numbers, scales in ((grown.key, grown.key_scale), (grown.value, grown.value_scale)):
        found = np.asarray(numbers, np.float32) * np.asarray(scales)[..., None]
        np.testing.assert_allclose(found[[0, 1], [0, 2]], token, rtol=1e-2)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float8_e4m3fn", "int8"))
def test_derivatives_of_a_quantised_token_of_zeros(dtype: str) -> None:
    """Its scale is 0, by which nothing can be divided."""
    tokens = jnp.array([[[0.0, 0, 0, 0]], [[3, 1, -4, 0]]])  # [B, K, H]
    cache = KVCache(*(jnp.zeros((2, 3, 1, 4), dtype),) * 2, *(jnp.zeros((2, 3, 1)),) * 2)

    def total(tokens: jax.Array) -> jax.Array:
        local = lambda tokens: append_kv(cache, tokens, tokens, jnp.array([0, 2]), "tp")  # noqa: E731
        grown = jax.shard_map(local, mesh=mesh_of(1), in_specs=P(), out_specs=P(), check_vma=False)(tokens)
        return (grown.key.astype(jnp.float32) * grown.key_scale[..., None]).sum()

    found, (_, tangent) = jax.jit(
        lambda tokens: (jax.grad(total)(tokens), jax.jvp(total, (tokens,), (jnp.ones_like(tokens),)))
    )(tokens)
    np.testing.assert_array_equal(found[0], 0)
    # Integers have no derivatives; other numbers have those of what they stand for, rounded to their dtype.
    np.testing.assert_allclose(found[1], np.full((1, 4), 0 if dtype == "int8" else 1), rtol=0.2)
    np.testing.assert_allclose(tangent, found.sum(), rtol=0.1, atol=1e-6)


@pytest.mark.parametrize("parts", (2, 4))
def test_append_takes_and_returns_tuples(parts: int) -> None:
    growth = Growth.of(Case(world=2, b=2, k=1, n=1, h=4, s=8, cache=None if parts == 2 else "int8"))
    new = [x[:, 0] for x in growth.tokens]

    def local(cache: KVCache) -> tuple:
        grown = append_kv(tuple(own_part(cache))[:parts], *new, jnp.zeros(2, jnp.int32), "tp")
        assert type(grown) is tuple
        assert len(grown) == parts
        return grown

    call = one_program(local, mesh=mesh_of(2), in_specs=(growth.specs,), out_specs=P("tp"))
    assert np.asarray(call(growth.cache)[0]).any()


def test_lists_and_python_numbers() -> None:
    """They are what they are for `jax.numpy`."""
    growth = Growth.of(Case(world=2, b=2, k=1, n=1, h=4, s=8, cache="int8", scales="tensor", page_size=4))
    new = [x[:, 0] for x in growth.tokens]

    def found(new: Any, lengths: Any, new_lengths: Any, tables: Any, scales: Any) -> tuple:
        def local(cache: KVCache) -> tuple:
            cache = KVCache(*own_part(cache)[:2], *scales)
            cache = append_kv(cache, *new, lengths, "tp", block_tables=tables)
            scaled = {"key_scale": scales[0], "value_scale": scales[1]}
            paged = {"key_value_seq_lengths": new_lengths, "block_tables": tables}
            return *cache[:2], decode_attention(new[0], *cache[:2], "tp", **paged, **scaled)

        specs = (P("tp"), P("tp"), P())
        return one_program(local, mesh=mesh_of(2), in_specs=(growth.specs,), out_specs=specs)(growth.cache)

    lists = [3, 9], [4, 10], [[0, 1], [2, 3]], (0.01, 0.02)
    wanted = found(new, *map(jnp.array, lists))
    assert all(np.any(x) for x in wanted)
    for mine, other in zip(found([x.tolist() for x in new], *lists), wanted):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.covers(1)
@pytest.mark.parametrize(
    "settings",
    (
        {"placement": "round_robin", "block_size": 4},
        {"cache": "int8", "page_size": 16, "placement": "round_robin"},
        {"kv_layout": "BKSH", "output": "heads", "window": 9},
    ),
    ids=("round-robin", "quantised", "heads"),
)
@pytest.mark.parametrize("simulated", (False, True))
def test_decoding_loop(settings: dict[str, Any], simulated: bool) -> None:
    """A cache that grows in a `while_loop`, one token of each sequence at a time, from different lengths on."""
    world, steps = 2, 6 if simulated else 40
    case = Case(**{"world": world, "b": 2, "n": 4, "k": 2, "h": 16, "s": 32, **settings})
    growth, begin = Growth.of(case), np.array([0, 19])
    queries = np.random.default_rng(2).normal(size=(steps, 2, 4, 16)).astype(np.float32)
    keywords: dict[str, Any] = {"implementation": "simulate", "config": SPLIT} if simulated else {}

    def local(cache: KVCache, tables: Any, keys: jax.Array, values: jax.Array) -> jax.Array:
        pages = None if tables is None else tables[0]
        outs = jnp.zeros((steps, 2, 4 // world if case.output == "heads" else 4, 16))
        if case.output == "heads":
            outs = lax.pcast(outs, "tp", to="varying")

        def step(state: tuple) -> tuple:
            i, cache, lengths, outs = state
            new = [jnp.take_along_axis(x, lengths[:, None, None, None], axis=1)[:, 0] for x in (keys, values)]
            cache = append_kv(cache, *new, lengths, "tp", block_tables=pages, **growth.keywords)
            scales = {"key_scale": cache.key_scale, "value_scale": cache.value_scale}
            out = decode_attention(
                jnp.asarray(queries)[i],
                cache.key,
                cache.value,
                "tp",
                key_value_seq_lengths=lengths + 1,
                block_tables=pages,
                **scales,
                **case.keywords,
                **keywords,
            )
            return i + 1, cache, lengths + 1, outs.at[i].set(out)

        state = 0, own_part(cache), jnp.asarray(begin, jnp.int32), outs
        return lax.while_loop(lambda state: state[0] < steps, step, state)[3]

    start = growth.filled(np.zeros(2, int), begin)
    out_specs = P(None, None, "tp") if case.output == "heads" else P()
    specs = (growth.specs, P("tp"), P(), P())
    call = jax.shard_map(local, mesh=mesh_of(world), in_specs=specs, out_specs=out_specs)
    found = jax.jit(call)(start, growth.tables, *growth.tokens)
    exact = growth.tokens
    if case.cache:
        exact = [numbers * scale[..., None] for numbers, scale in (quantise(x, case.cache, "token") for x in exact)]
    for i in range(steps):
        wanted = attention(queries[i][:, None], *exact, begin + i + 1, window=case.window)
        np.testing.assert_allclose(found[i], wanted.out[:, 0], rtol=1e-4, atol=1e-5, err_msg=f"step {i}")


def shape_of(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


WHOLE, PART = shape_of(2, 8, 64), shape_of(2, 32, 4, 64)


def traced(
    query: Any = WHOLE, key: Any = PART, value: Any = None, axis_name: Any = "tp", world: int = 4, **keywords: Any
) -> None:
    """Traces a call in which every rank has these operands."""
    arrays = {name: x for name, x in keywords.items() if isinstance(x, jax.ShapeDtypeStruct)}
    rest = {name: x for name, x in keywords.items() if name not in arrays}

    def call(query: Any, key: Any, value: Any, arrays: dict[str, Any]) -> Any:
        return decode_attention(query, key, value, axis_name, **arrays, **rest)

    program = jax.shard_map(call, mesh=mesh_of(world), in_specs=P(), out_specs=P("tp"), check_vma=False)
    jax.eval_shape(program, query, key, key if value is None else value, arrays)


def int8(*shape: int) -> jax.ShapeDtypeStruct:
    return shape_of(*shape, dtype="int8")


def int16(*shape: int) -> jax.ShapeDtypeStruct:
    return shape_of(*shape, dtype="int16")


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return shape_of(*shape, dtype="int32")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    (
        ({"query": shape_of()}, ("[B, N, H] or [B, T, N, H]", "not []")),
        ({"query": shape_of(8, 64)}, ("[B, N, H] or [B, T, N, H]", "not [8, 64]")),
        ({"query": shape_of(2, 1, 1, 8, 64)}, ("not [2, 1, 1, 8, 64]",)),
        ({"query": shape_of(2, 8, 0), "key": shape_of(2, 32, 4, 0)}, ("H > 0, not [2, 8, 0]",)),
        ({"query": i32(2, 8, 64)}, ("query must be floating-point, not int32",)),
        ({"preferred_element_type": "int8"}, ("preferred_element_type must be floating-point, not int8",)),
        ({"query": shape_of(2, 6, 64)}, ("6 heads, which is no multiple of the 4 heads of key",)),
        ({"query": shape_of(2, 8, 80)}, ("query has heads of size 80 and key of 64",)),
        ({"query": shape_of(3, 8, 64)}, ("query is of 3 sequences and key of 2",)),
        ({"value": shape_of(2, 32, 2, 64)}, ("key is [2, 32, 4, 64] and value [2, 32, 2, 64]",)),
        ({"value": shape_of(2, 32, 64)}, ("key is [2, 32, 4, 64] and value [2, 32, 64]",)),
        ({"value": shape_of(2, 32, 4, 64, dtype="bfloat16")}, ("key is float32 and value bfloat16",)),
        ({"key": shape_of(2, 32, 64)}, ("takes keys and values of 4 dimensions", "[2, 32, 64]")),
        ({"output": "rows"}, ("no output 'rows'", "'replicated', 'heads'")),
        ({"output": "heads", "world": 3}, ("8 heads to 3 ranks",)),
        ({"key_value_seq_lengths": i32(3)}, ("must be i32[2], not int32[3]",)),
        ({"key_value_seq_lengths": shape_of(2)}, ("must be i32[2], not float32[2]",)),
        ({"starts": i32(2, 1)}, ("starts must be i32[2], not int32[2, 1]",)),
        ({"starts": shape_of(2)}, ("starts must be i32[2], not float32[2]",)),
        ({"kv_layout": "KBSH"}, ("query is of 2 sequences and key of 32",)),
        ({"block_tables": i32(3, 5)}, ("query is of 2 sequences and block_tables of 3",)),
        ({"block_tables": shape_of(2, 5)}, ("block_tables of integers", "float32[2, 5]")),
        ({"block_tables": i32(10)}, ("block_tables of integers", "int32[10]")),
        ({"key": int8(2, 32, 4, 64)}, ("cache of int8 needs a key_scale", "cache of int8 needs a value_scale")),
        ({"key_scale": shape_of(2)}, ("key_scale must be f32 [], [4] or [2, 32, 4], not float32[2]",)),
        ({"value_scale": shape_of(2, 32)}, ("value_scale must be f32 [], [4] or [2, 32, 4], not float32[2, 32]",)),
        ({"key_scale": i32(2, 32, 4)}, ("key_scale must be f32", "not int32[2, 32, 4]")),
        ({"key": int16(2, 32, 4, 64)}, ("cache of int16 needs a key_scale",)),
        ({"sinks": shape_of(4)}, ("sinks must be [8], not [4]",)),
        ({"logits_soft_cap": 0.0}, ("logits_soft_cap must be positive, not 0.0",)),
        ({"local_window_size": -1}, ("local_window_size of 0 or more positions, not -1",)),
        ({"local_window_size": (-2, 0)}, ("local_window_size of 0 or more positions, not (-2, 0)",)),
        ({"placement": "striped"}, ("no placement 'striped'", "'contiguous', 'round_robin'")),
        ({"block_size": 8}, ("block_size=8", 'placement="round_robin" only')),
        ({"placement": "round_robin", "block_size": 5}, ("block_size=5", "does not divide the 32 positions")),
        ({"placement": "round_robin", "block_size": 0}, ("block_size=0",)),
        ({"kv_layout": "SBKH"}, ("no kv_layout 'SBKH'", "'BSKH', 'BKSH', 'KBSH'")),
        ({"implementation": "triton"}, ("no implementation 'triton'", "None, 'fused', 'xla', 'simulate'")),
        ({"config": {"block_q": 64}}, ("no setting 'block_q'", "splits, block_s, block_r")),
        ({"query": shape_of(2, 6, 80), "sinks": shape_of(4)}, ("6 heads", "size 80", "not [4]")),  # all at once
    ),
)  # fmt: skip
def test_arguments_that_do_not_fit(arguments: dict[str, Any], parts: tuple[str, ...]) -> None:
    with fails(ValueError, "decode_attention" if "implementation" not in arguments else "implementation", *parts):
        traced(**arguments)


SAME = (
    "takes a cache that is sharded along the sequence over axis_name={}, but its {} is the same on every rank along {},"
)


def of_cache(operation: str, key: Any, value: Any, axes: Any, **keywords: Any) -> jax.Array:
    """Either operation on a cache [2, S, 1, 4] of which each position counts."""
    if operation == "append_kv":
        new = jnp.ones((2, 1, 4))
        return append_kv((key, value), new, new, jnp.array([0, 1]), axes, **keywords)[1]
    return decode_attention(jnp.ones((2, 2, 4)), key, value, axes, **keywords)


@pytest.mark.parametrize(
    ("axes", "specs", "wrong"),
    (
        ("tp", (P(), P()), ("key", ("tp",))),
        ("tp", (P(None, "dp"), P(None, "dp")), ("key", ("tp",))),
        ("tp", (P(None, "tp"), P()), ("value", ("tp",))),
        (("dp", "tp"), (P(None, "tp"), P(None, "tp")), ("key", ("dp",))),
        (("one", "tp"), (P(None, "one"), P(None, "one")), ("key", ("tp",))),
        (("tp", "dp"), (P(), P()), ("key", ("tp", "dp"))),
        ("one", (P(), P()), None),
        (("one", "tp"), (P(None, "tp"), P(None, "tp")), None),
        (("dp", "tp"), (P(None, ("dp", "tp")), P(None, ("dp", "tp"))), None),
    ),
)
@pytest.mark.parametrize(
    ("operation", "keywords"),
    (
        ("append_kv", {}),
        *(("decode_attention", {"implementation": each}) for each in (None, "xla", "fused", "simulate")),
    ),
)
def test_caches_that_are_the_same_on_every_rank(
    cpu_mesh: MeshFactory, operation: str, keywords: dict[str, Any], axes: Any, specs: tuple, wrong: Any
) -> None:
    """Of a mesh with an axis of one rank."""
    mesh = cpu_mesh((1, 2, 2), ("one", "dp", "tp"))
    shapes = [jax.ShapeDtypeStruct((2, 4 if spec == P() else 8, 1, 4), "float32") for spec in specs]

    def traced(check_vma: bool) -> None:
        local = functools.partial(of_cache, operation, axes=axes, **keywords)
        out_specs = P(("one", "dp", "tp"))
        jax.eval_shape(
            jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma), *shapes
        )

    traced(check_vma=False)  # where nobody knows
    if wrong is None:
        traced(check_vma=True)
        return
    name, along = wrong
    axes = (axes,) if isinstance(axes, str) else axes
    with fails(ValueError, operation, SAME.format(axes, name, along), f"jax.lax.pcast({name}, {along}, to='varying')"):
        traced(check_vma=True)


@pytest.mark.parametrize("operation", ("decode_attention", "append_kv"))
def test_pages_of_one_pool(operation: str) -> None:
    """Which every rank has, are positions of its own if its table says so."""
    pool, tables = shape_of(4, 2, 1, 4), i32(4, 2)

    def traced(of_tables: P) -> None:
        local = lambda pool, tables: of_cache(operation, pool, pool, "tp", block_tables=tables[:2])  # noqa: E731
        call = jax.shard_map(local, mesh=mesh_of(2), in_specs=(P(), of_tables), out_specs=P("tp"))
        jax.eval_shape(call, pool, tables)

    traced(P("tp"))
    with fails(ValueError, operation, SAME.format(("tp",), "key", ("tp",))):
        traced(P())


def test_copies_that_are_meant_as_other_positions() -> None:
    """Of an empty cache; the new tokens are those of `lengths`, dealt out to two ranks."""
    rng = np.random.default_rng(0)
    query, tokens = rng.normal(size=(1, 2, 4)).astype(np.float32), rng.normal(size=(2, 1, 6, 1, 4)).astype(np.float32)

    def local(query: jax.Array, tokens: jax.Array) -> jax.Array:
        empty = lax.pcast(jnp.zeros((1, 4, 1, 4)), "tp", to="varying")
        keys, values = append_kv((empty, empty), *tokens, jnp.array([0]), "tp", placement="round_robin", block_size=1)
        placed = {"placement": "round_robin", "block_size": 1}
        return decode_attention(query, keys, values, "tp", key_value_seq_lengths=jnp.array([6]), **placed)

    found = jax.jit(jax.shard_map(local, mesh=mesh_of(2), in_specs=P(), out_specs=P()))(query, tokens)
    np.testing.assert_allclose(found, attention(query[:, None], *tokens, np.array([6])).out[:, 0], rtol=1e-5, atol=1e-5)


def symbolic_shapes(symbols: dict[int, str], arrays: Any) -> Any:
    """The shapes of arrays on a mesh, with some sizes as symbols."""
    scope = jax.export.SymbolicScope()

    def shape_with(x: jax.Array) -> jax.ShapeDtypeStruct:
        sizes = jax.export.symbolic_shape(", ".join(symbols.get(size, str(size)) for size in x.shape), scope=scope)
        return jax.ShapeDtypeStruct(sizes, x.dtype, sharding=x.sharding)

    return jax.tree.map(shape_with, arrays)


# Each size is there once: 2 ranks, 3 sequences, 4 heads of keys, 5 tokens, 8 pages of a sequence, 12 heads of queries,
# pages of 16 positions, heads of 24, 27 pages, 128 positions of a rank.
SYMBOLIC = Case(world=2, b=3, t=5, n=12, k=4, h=24, s=128, lengths=(256, 7, 130))
DEALT = {"placement": "round_robin"}


@pytest.mark.parametrize(
    ("symbols", "changes"),
    (
        ({3: "b"}, {}),
        ({3: "b", 5: "t"}, {"output": "heads"}),
        ({12: "4*n"}, {"output": "heads", "sinks": True}),
        ({4: "2*k", 12: "6*k"}, {"cache": "int8", "scales": "head"}),
        ({24: "h"}, {"scale": 0.2}),
        ({40: "v"}, {"hv": 40, "output": "heads"}),
        ({128: "s"}, {"window": 9}),
        ({128: "64*s"}, DEALT),
        ({3: "b", 128: "s"}, {"kv_layout": "BKSH", "cache": "float8_e5m2"}),
        ({8: "r", 27: "p"}, {"page_size": 16}),
        ({16: "g"}, {"page_size": 16, **DEALT}),
        ({16: "8*g", 27: "p"}, {"page_size": 16, "block_size": 8, "kv_layout": "BKSH", "cache": "int8", **DEALT}),
    ),
    ids=lambda given: "-".join(map(str, given.values())),
)
def test_symbolic_shapes(symbols: dict[int, str], changes: dict[str, Any]) -> None:
    """They are exported. JAX 0.12.0 cannot call the result, nor that of any other `shard_map` of such shapes."""
    case, mesh = dataclasses.replace(SYMBOLIC, **changes), mesh_of(2)
    shapes = symbolic_shapes(symbols, jax.device_put(make(case)[0], NamedSharding(mesh, P())))

    def exported(implementation: str | None, case: Case = case) -> str:
        call = jax.jit(program(case, mesh, implementation=implementation))
        return jax.export.export(call, platforms=("cuda",))(shapes).mlir_module()

    text = exported(None)
    assert TRITON_CALL not in text
    assert ("stablehlo.all_to_all" if case.output == "heads" else "stablehlo.all_gather") in text
    if changes == DEALT:
        assert re.sub("loc.*", "", text) == re.sub(
            "loc.*", "", exported(None, dataclasses.replace(case, block_size=64))
        )
    with fails(NotImplementedError, "decode_attention", "compiled for known shapes, not [", *symbols.values()):
        exported("fused")


@pytest.mark.parametrize(
    ("error", "symbols", "changes", "part"),
    (
        (TypeError, {24: "h"}, {}, "takes scale as a number here"),
        (TypeError, {128: "s"}, DEALT, "takes block_size as a number here"),
        (TypeError, {128: "32*s"}, DEALT, "takes block_size as a number here"),
        (
            ValueError,
            {128: "s"},
            {"block_size": 64, **DEALT},
            "block_size=64 positions, which does not divide the s positions",
        ),
        (ValueError, {12: "n"}, {}, "query has n heads, which is no multiple of the 4 heads of key"),
        (ValueError, {4: "k", 12: "3*k"}, {"output": "heads"}, "deals out 3*k heads to 2 ranks"),
        (
            ValueError,
            {16: "g"},
            {"page_size": 16, "block_size": 16, **DEALT},
            "block_size=16 positions, which does not divide",
        ),
    ),
)
@pytest.mark.parametrize("implementation", (None, "xla", "fused"))
def test_what_must_be_a_number(
    error: type[Exception],
    symbols: dict[int, str],
    changes: dict[str, Any],
    part: str,
    implementation: str | None,
) -> None:
    case, mesh = dataclasses.replace(SYMBOLIC, **changes), mesh_of(2)
    shapes = symbolic_shapes(symbols, jax.device_put(make(case)[0], NamedSharding(mesh, P())))
    with fails(error, "decode_attention", part):
        jax.eval_shape(program(case, mesh, implementation=implementation), shapes)


@pytest.mark.parametrize(
    ("symbols", "changes", "part"),
    (
        ({3: "b", 5: "t"}, {"kv_layout": "BKSH"}, None),
        ({4: "k", 24: "h"}, {"cache": "int8"}, None),
        ({128: "s"}, {}, None),
        ({128: "64*s"}, DEALT, None),
        ({128: "s"}, DEALT, "append_kv takes block_size as a number here"),
        ({16: "g", 27: "p"}, {"page_size": 16, **DEALT}, None),
    ),
    ids=lambda given: "-".join(map(str, given.values())) if isinstance(given, dict) else "",
)
def test_appending_to_a_cache_of_symbolic_shape(
    symbols: dict[int, str], changes: dict[str, Any], part: str | None
) -> None:
    mesh = mesh_of(2)
    growth = Growth.of(dataclasses.replace(SYMBOLIC, **changes))
    new = [x[:, :5] for x in growth.tokens]
    specs = growth.specs, None if growth.tables is None else P("tp"), [P(), P()], P()
    operands = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
        (growth.cache, growth.tables, new, np.array([0, 125, 250])),
        specs,
    )

    def local(cache: KVCache, tables: Any, new: Any, lengths: jax.Array) -> KVCache:
        tables = None if tables is None else tables[0]
        return all_parts(append_kv(own_part(cache), *new, lengths, "tp", block_tables=tables, **growth.keywords))

    call = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=growth.specs))
    shapes = symbolic_shapes(symbols, operands)
    if part:
        with fails(TypeError, part):
            jax.export.export(call)(*shapes)
        return
    text = jax.export.export(call)(*shapes).mlir_module()
    assert text.count('"stablehlo.scatter"') == len(jax.tree.leaves(growth.cache))


@pytest.mark.parametrize("given", (4.0, "4", np.array([4])))
def test_blocks_are_of_whole_positions(given: Any) -> None:
    with fails(TypeError, "decode_attention takes block_size as a whole number, not"):
        traced(placement="round_robin", block_size=given)


def test_a_window_of_more_positions_than_there_can_be() -> None:
    operands, _ = make(DIFFERENTIATED)
    every, none, none_said = (
        program(dataclasses.replace(DIFFERENTIATED, window=window), mesh_of(4))(operands)
        for window in (2**31 - 2, 2**31, None)
    )
    jax.tree.map(np.testing.assert_array_equal, none, none_said)
    jax.tree.map(np.testing.assert_array_equal, every, none_said)


@pytest.mark.parametrize("name", ("scale", "logits_soft_cap", "local_window_size"))
@pytest.mark.parametrize("given", ("traced", "four", [4, 0], (), (4.5, 0), (4, 0, 0)))
def test_what_is_compiled_in_is_a_number(name: str, given: Any) -> None:
    kind = "an integer or a pair of integers" if name == "local_window_size" else "a number"
    wrong = i32() if given == "traced" else given
    with fails(TypeError, f"decode_attention takes {kind} for {name}, known when it is traced, not "):
        traced(**{name: wrong})


@pytest.mark.parametrize(
    ("arguments", "parts"),
    (
        ({"cache": (PART,)}, ("(key, value) or (key, value, key_scale, value_scale), not of 1 parts",)),
        ({"cache": (int8(2, 32, 4, 64),) * 2}, ("int8 needs a key_scale", "int8 needs a value_scale")),
        ({"cache": (int16(2, 32, 4, 64),) * 2}, ("int16 needs a key_scale",)),
        ({"cache": (shape_of(2, 32, 4, 64, dtype="float8_e5m2"),) * 2}, ("float8_e5m2 needs a key_scale",)),
        ({"cache": (PART, shape_of(2, 16, 4, 64))}, ("key is [2, 32, 4, 64] and value [2, 16, 4, 64]",)),
        ({"cache": (PART, shape_of(1, 32, 4, 64))}, ("key is [2, 32, 4, 64] and value [1, 32, 4, 64]",)),
        ({"cache": (PART, shape_of(2, 32, 2, 64))}, ("key is [2, 32, 4, 64] and value [2, 32, 2, 64]",)),
        ({"cache": (PART, shape_of(2, 32, 4))}, ("key is [2, 32, 4, 64] and value [2, 32, 4]",)),
        ({"cache": (PART, int8(2, 32, 4, 64))}, ("key is float32 and value int8",)),
        ({"cache": (*(int8(2, 32, 4, 64),) * 2, shape_of(2), shape_of())}, ("key_scale must", "not float32[2]")),
        ({"cache": (*(int8(2, 32, 4, 64),) * 2, *(i32(2, 32, 4),) * 2)}, ("value_scale must", "int32[2, 32, 4]")),
        ({"key": shape_of(2, 2, 64)}, ("a new key [B, 4, 64] or [B, T, 4, 64]", "[2, 1, 2, 64]")),
        ({"value": shape_of(2, 4, 32)}, ("a new value [B, 4, 64]", "[2, 1, 4, 32]")),
        ({"value": shape_of(2, 3, 4, 64)}, ("a new value [B, 4, 64]", "[2, 3, 4, 64]")),
        ({"key": shape_of()}, ("a new key [B, 4, 64]", "not []")),
        ({"value": shape_of()}, ("a new value [B, 4, 64]", "not []")),
        ({"key": shape_of(3, 4, 64), "value": shape_of(3, 4, 64)}, ("a cache of 2 sequences and new tokens of 3",)),
        ({"lengths": i32(3)}, ("lengths i32[2], not int32[3]",)),
        ({"lengths": shape_of(2)}, ("lengths i32[2], not float32[2]",)),
        ({"lengths": i32()}, ("lengths i32[2], not int32[]",)),
        ({"starts": np.zeros(3, int)}, ("starts i32[2], not int32[3]",)),
        ({"starts": np.zeros(2)}, ("starts i32[2], not float32[2]",)),
        ({"kv_layout": "KBSH"}, ("a new key [B, 2, 64] or [B, T, 2, 64]",)),
        ({"block_tables": np.zeros((3, 5), int)}, ("block_tables of 3 sequences and new tokens of 2",)),
        ({"block_tables": [0, 1]}, ("block_tables of integers", "int32[2]")),
        ({"placement": "striped"}, ("no placement 'striped'",)),
        ({"block_size": 8}, ("block_size=8", 'placement="round_robin" only')),
        ({"placement": "round_robin", "block_size": 5}, ("does not divide the 32 positions",)),
        ({"kv_layout": "SBKH"}, ("no kv_layout 'SBKH'",)),
    ),
)  # fmt: skip
def test_tokens_that_do_not_fit(arguments: dict[str, Any], parts: tuple[str, ...]) -> None:
    token = shape_of(2, 4, 64)
    given = {"cache": (PART, PART), "key": token, "value": token, "lengths": i32(2), **arguments}
    arrays = [given.pop(name) for name in ("cache", "key", "value", "lengths")]
    program = jax.shard_map(
        lambda *arrays: append_kv(*arrays, "tp", **given), mesh=mesh_of(4), in_specs=P(), out_specs=P(), check_vma=False
    )
    with fails(ValueError, "append_kv", *parts):
        jax.eval_shape(program, *arrays)


@pytest.mark.parametrize(
    ("index", "wrong", "part"),
    (
        (0, shape_of(3, 6, 8), "not out [3, 6, 8],"),
        (0, shape_of(), "not out [],"),
        (1, shape_of(1, 6), "residual [1, 6],"),
        (1, shape_of(4, 6, 1), "residual [4, 6, 1],"),
        (2, shape_of(4, 1, 8), "other [4, 1, 8]"),
        (3, shape_of(6), "other_residual [6]."),
        (0, i32(4, 6, 8), "must be floating-point, not int32"),
    ),
)
def test_results_that_do_not_fit(index: int, wrong: Any, part: str) -> None:
    given = [shape_of(4, 6, 8), shape_of(4, 6)] * 2
    with fails(ValueError, "merge_attention", part):
        jax.eval_shape(merge_attention, *given[:index], wrong, *given[index + 1 :])


@pytest.mark.parametrize("axes", ("model", ("tp", "model")))
def test_unbound_axis_name(axes: Any) -> None:
    with fails(NameError, "decode_attention needs a mesh axis", "'model'", "jax.shard_map", "axis_name=()"):
        traced(axis_name=axes)


def test_outside_shard_map() -> None:
    token = jnp.zeros((2, 4, 64))
    cache = jnp.zeros((2, 32, 4, 64))
    with fails(NameError, "decode_attention needs a mesh axis", "'tp'"):
        decode_attention(jnp.zeros((2, 8, 64)), cache, cache, "tp")
    with fails(NameError, "append_kv needs a mesh axis", "'tp'"):
        append_kv((cache, cache), token, token, jnp.zeros(2, jnp.int32), "tp")


@pytest.mark.parametrize(
    ("arguments", "part"),
    (
        ({"query": shape_of(2, 8, 64, dtype="float8_e5m2")}, "a query of float32, bfloat16, float16, not float8_e5m2"),
        ({"key": shape_of(2, 32, 4, 64, dtype="bfloat16")}, "not bfloat16 with float32"),
        ({"preferred_element_type": "float8_e5m2"}, "it gives float32, bfloat16, float16, not float8_e5m2"),
        ({"query": shape_of(2, 8, 512), "key": shape_of(2, 32, 4, 512)}, "at most 256, not 512 and 512"),
        ({"query": shape_of(0, 8, 64), "key": shape_of(0, 32, 4, 64)}, "an operand is empty: [0, 1, 8, 64]"),
    ),
)
@pytest.mark.parametrize("implementation", ("fused", "simulate"))
def test_what_the_kernel_cannot_do(arguments: dict[str, Any], part: str, implementation: str) -> None:
    with fails(NotImplementedError, "decode_attention", part, "implementation=None or 'xla'"):
        traced(implementation=implementation, **arguments)


def test_all_reasons_at_once() -> None:
    wrong = {"query": shape_of(2, 8, 512, dtype="float8_e5m2"), "key": shape_of(2, 32, 4, 512)}
    with fails(NotImplementedError, "not float8_e5m2", "it gives", "at most 256"):
        traced(implementation="fused", **wrong)


def test_fused_on_cpus_names_the_platform() -> None:
    case = Case(world=4)
    with fails(NotImplementedError, "decode_attention", "for NVIDIA GPUs", "lowered for cpu"):
        jax.jit(program(case, mesh_of(4), implementation="fused"))(make(case)[0])


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize(
    ("mapped", "case", "why"),
    (
        ({"sinks", "key", "value"}, {"sinks": True}, "jax.vmap maps over sinks, and the kernel takes one for all"),
        ({"key", "value", "value_scale"}, {"cache": "int8", "scales": "head"}, "maps over value_scale, and"),
        ({"query", "value"}, {}, "does not map over key, which"),
        ({"key_value_seq_lengths"}, {"lengths": (1, 2, 3)}, "does not map over key, value, which"),
        ({"query", "key", "value"}, {"cache": "int8"}, "does not map over key_scale, value_scale, which"),
        ({"query", "value"}, {"page_size": 16}, "does not map over key, which"),
        ({"query"}, {"output": "heads", "k": 1}, "does not map over key, value, which"),
    ),
)
def test_what_the_kernel_cannot_map(mapped: set[str], case: dict[str, Any], why: str) -> None:
    call = Case(world=2, s=16, **case)
    operands = make(call)[0]
    dims = Operands(*({name: 0 if name in mapped else None for name in part} for part in operands))
    stacked = Operands(
        *({name: np.stack([x] * 2) if name in mapped else x for name, x in part.items()} for part in operands)
    )
    for implementation in ("fused", "simulate"):
        with fails(NotImplementedError, "decode_attention", why):
            jax.vmap(program(call, mesh_of(2), implementation=implementation), in_axes=(dims,))(stacked)
    found = jax.jit(jax.vmap(program(call, mesh_of(2)), in_axes=(dims,)))(stacked)
    for mine, wanted in zip(found, jax.jit(program(call, mesh_of(2)))(operands)):
        np.testing.assert_allclose(mine, np.stack([wanted] * 2), rtol=1e-5, atol=1e-5)


def test_gpus_without_a_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "80")
    case = Case(world=4, cache="float8_e4m3fn")
    with fails(NotImplementedError, "compute capability 8.0 have no float8_e4m3fn"):
        lower_for_cuda(program(case, mesh_of(4), implementation="fused"), make(case)[0])


def assert_fused(text: str, calls: int = 1) -> None:
    assert text.count(TRITON_CALL) == calls
    assert "all_gather" not in text and "all-gather" not in text and "all_to_all" not in text


@pytest.mark.slow
@compiling.each_depth
@pytest.mark.parametrize("feature", FEATURES)
def test_lowers_to_one_kernel(feature: str, memory: bool) -> None:
    case = features(Case(world=4, n=8))[feature]
    with compiling.no_code(memory=memory):
        assert_fused(lower_for_cuda(program(case, mesh_of(4)), make(case)[0]))


def listed(shape: AttentionShape, mesh: Mesh, dtype: str = "bfloat16", **keywords: Any) -> str:
    """The program of a shape of the benchmarks."""
    cache = sharded(mesh, P(None, "tp"), (shape.b, 4 * shape.s, shape.kv_heads, shape.h), dtype)
    query = sharded(mesh, P(), (shape.b, shape.n, shape.h), dtype)
    call = functools.partial(decode_attention, axis_name="tp", **keywords)
    specs = (P(), P(None, "tp"), P(None, "tp"))
    return lower_for_cuda(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P()), query, cache, cache)


# tests/compiled/test_compiled_attention.py compiles them.
@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_shapes_of_the_benchmarks_are_fused_by_default(shape: AttentionShape) -> None:
    assert_fused(listed(shape, mesh_of(4)))


@pytest.mark.usefixtures("no_code")
def test_f32_takes_xla_where_it_is_faster() -> None:
    few = dataclasses.replace(SHAPES[0], s=1024)
    assert_fused(listed(few, mesh_of(4), "float32"))
    assert TRITON_CALL not in listed(SHAPES[0], mesh_of(4), "float32")
    assert_fused(listed(SHAPES[0], mesh_of(4), "float32", implementation="fused"))


def test_xla_lowers_to_none() -> None:
    text = listed(SHAPES[0], mesh_of(4), implementation="xla")
    assert TRITON_CALL not in text
    assert "stablehlo.all_gather" in text


def test_lowers_for_two_platforms() -> None:
    case = Case(world=4)
    text = lower_for_cuda(program(case, mesh_of(4)), make(case)[0], platforms=("cuda", "cpu"))
    assert text.count(TRITON_CALL) == 1
    assert "stablehlo.all_gather" in text


def test_loops_keep_the_kernel() -> None:
    case = Case(world=4, n=8, dtype="bfloat16", lengths=(1, 2, 3))
    operands, _ = make(case)

    def local(operands: Operands) -> jax.Array:
        cache = [operands.parts[name][0] for name in ("key", "value")]

        def step(state: tuple) -> tuple:
            lengths, query, cache = state
            new = query[:, ::2]
            cache = append_kv(cache, new, new, lengths, "tp")
            query = decode_attention(query, *cache, "tp", key_value_seq_lengths=lengths + 1)
            return lengths + 1, query, cache

        start = operands.whole["key_value_seq_lengths"], operands.whole["query"], tuple(cache)
        return lax.while_loop(lambda state: state[0][0] < 9, step, start)[1]

    call = jax.shard_map(local, mesh=mesh_of(4), in_specs=(Operands(P(), P("tp")),), out_specs=P())
    text = lower_for_cuda(call, operands)
    assert_fused(text)
    assert "stablehlo.while" in text


def test_gradient_program_keeps_the_kernel_out_of_what_is_differentiated() -> None:
    floats, put = split_operands(DIFFERENTIATED)
    loss = lambda floats: program(DIFFERENTIATED, mesh_of(4))(put(floats))[0].sum()  # noqa: E731
    assert TRITON_CALL not in lower_for_cuda(jax.grad(loss), floats)
    assert lower_for_cuda(loss, floats).count(TRITON_CALL) == 1


def test_log_says_why_not(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(world=4, h=512, n=4)
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        text = lower_for_cuda(program(case, mesh_of(4)), make(case)[0])
    assert TRITON_CALL not in text
    (record,) = caplog.records
    assert "decode_attention" in record.getMessage()
    assert "at most 256, not 512" in record.getMessage()


def test_new_tokens_without_a_page_are_dropped() -> None:
    pool, tables = jnp.zeros((3, 4, 1, 2)), jnp.array([[2, 0], [-1, -1]])
    new = jnp.stack([jnp.full((1, 2), 1.0), jnp.full((1, 2), 99.0)])

    def local(pool: jax.Array) -> jax.Array:
        return append_kv([pool, pool], new, new, jnp.array([0, 0]), "tp", block_tables=tables)[0]

    call = jax.shard_map(local, mesh=mesh_of(1), in_specs=P("tp"), out_specs=P("tp"))
    np.testing.assert_array_equal(call(pool), pool.at[2, 0].set(1.0))


def test_lengths_of_unsigned_integers() -> None:
    query, cache = jnp.ones((1, 2, 1, 16)), jnp.ones((1, 4, 1, 16))

    def call(dtype: Any) -> jax.Array:
        def local(cache: jax.Array) -> jax.Array:
            return decode_attention(query, cache, cache, "tp", key_value_seq_lengths=jnp.array([1], dtype))

        return one_program(local, mesh=mesh_of(1), in_specs=P(None, "tp"), out_specs=P())(cache)

    np.testing.assert_array_equal(call(jnp.uint8), call(jnp.int32))


@pytest.mark.parametrize(("size", "dtype"), ((192, "bfloat16"), (256, "float32")))
def test_gpus_of_little_shared_memory(size: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "89")
    mesh = mesh_of(4)
    call = functools.partial(decode_attention, axis_name="tp", implementation="fused")
    call = jax.shard_map(call, mesh=mesh, in_specs=(P(), P(None, "tp"), P(None, "tp")), out_specs=P())
    keys = jax.ShapeDtypeStruct((2, 4096, 2, size), dtype)
    assert TRITON_CALL in lower_for_cuda(call, jax.ShapeDtypeStruct((2, 8, 16, size), dtype), keys, keys)
