"""`all_to_all` against `lax`: every pair of dimensions, tiled and not, by every protocol; derivatives; `jax.vmap`."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.helpers.support import assert_fused, fails, lower_for_cuda, mesh_of, sharded

PAIRS = tuple(itertools.product(range(3), range(3)))
each_pair = pytest.mark.parametrize(("split", "concat"), PAIRS)


def on_ranks(world: int, function: Callable) -> Callable:
    """The function of a rank's array, on all of them [world, ...]."""
    program = jax.shard_map(lambda x: function(x[0])[None], mesh=mesh_of(world), in_specs=P("tp"), out_specs=P("tp"))
    return jax.jit(program)


def arrays(world: int, split: int, tiled: bool, dtype: Any = "float32") -> jax.Array:
    shape = [2, 3, 5]
    shape[split] = world * (2 if tiled else 1)
    return jnp.asarray(np.random.default_rng(0).integers(-9, 9, (world, *shape)), dtype)


@each_pair
@pytest.mark.parametrize("tiled", (False, True))
def test_values(split: int, concat: int, tiled: bool) -> None:
    x = arrays(2, split, tiled)
    keywords: dict[str, Any] = {"split_axis": split, "concat_axis": concat, "tiled": tiled}
    calls = [functools.partial(lax.all_to_all, axis_name="tp", **keywords)]
    configs = ({"protocol": protocol, "block": 16} for protocol in ("messages", "words", "signals"))
    for implementation, config in ((None, None), *zip(itertools.repeat("simulate"), configs)):
        call = functools.partial(jtf.all_to_all, axis_name="tp", implementation=implementation, config=config)
        calls.append(functools.partial(call, **keywords))
    # In one program, because compiling takes longest.
    wanted, *found = np.moveaxis(on_ranks(2, lambda x: jnp.stack([call(x) for call in calls]))(x), 1, 0)
    for out in found:
        np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("dtype", ("bfloat16", "int8", "uint16", "bool"))
def test_dtypes(dtype: str) -> None:
    x = arrays(3, 1, True, dtype)
    wanted = on_ranks(3, lambda x: lax.all_to_all(x, "tp", 1, 0, tiled=True))(x)
    found = on_ranks(3, lambda x: jtf.all_to_all(x, "tp", 1, 0, tiled=True, implementation="simulate"))(x)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.covers(1)
@each_pair
@pytest.mark.parametrize("tiled", (False, True))
def test_its_transpose(split: int, concat: int, tiled: bool) -> None:
    """<A x, y> is <x, A^T y>, of whole numbers. (The transpose of lax's own, not tiled, has the wrong shape.)"""
    x = arrays(2, split, tiled)
    call = on_ranks(2, lambda x: jtf.all_to_all(x, "tp", split, concat, tiled=tiled))
    out, back = jax.vjp(call, x)
    y = jnp.asarray(np.random.default_rng(1).integers(-9, 9, out.shape), out.dtype)
    assert float(jnp.vdot(out, y)) == float(jnp.vdot(x, back(y)[0]))


@pytest.mark.covers(1)
@each_pair
@pytest.mark.parametrize("tiled", (False, True))
def test_vmap(split: int, concat: int, tiled: bool) -> None:
    """Over every dimension, to any dimension; all in one program, because compiling takes longest."""
    ways = [(dim, out_dim) for dim in range(4) for out_dim in (0, 2)]

    def of(call: Callable) -> Callable:
        call = functools.partial(call, axis_name="tp", split_axis=split, concat_axis=concat, tiled=tiled)

        def each_way(x: jax.Array) -> jax.Array:
            outs = (jax.vmap(call, dim, out_dim)(jnp.moveaxis(x, 0, dim)) for dim, out_dim in ways)
            return jnp.stack([jnp.moveaxis(out, out_dim, 0) for out, (_, out_dim) in zip(outs, ways)])

        return on_ranks(2, each_way)

    x = jnp.stack([arrays(2, split, tiled), 2 * arrays(2, split, tiled)], axis=1)
    wanted, found = of(lax.all_to_all)(x), of(jtf.all_to_all)(x)
    assert wanted.shape[1] == len(ways)
    np.testing.assert_array_equal(found, wanted)


def test_two_axes_in_any_order() -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jnp.arange(4 * 8 * 3).reshape(32, 3)
    for axes in (("a", "b"), ("b", "a")):
        programs = (
            jax.shard_map(
                functools.partial(call, axis_name=axes, split_axis=0, concat_axis=1, tiled=True, **keywords),
                mesh=mesh,
                in_specs=P(axes),
                out_specs=P(axes),
            )
            for call, keywords in ((lax.all_to_all, {}), (jtf.all_to_all, {"implementation": "simulate"}))
        )
        wanted, found = (jax.jit(program)(x) for program in programs)
        np.testing.assert_array_equal(found, wanted)


def test_lowered_for_cuda() -> None:
    mesh = mesh_of(2)
    program = jax.shard_map(
        lambda x: jtf.all_to_all(x, "tp", 1, 0, tiled=True, implementation="fused"),
        mesh=mesh,
        in_specs=P("tp"),
        out_specs=P("tp"),
    )
    assert_fused(lower_for_cuda(program, sharded(mesh, P("tp"), (64, 32), "bfloat16")))


def test_errors() -> None:
    call = functools.partial(jtf.all_to_all, axis_name="tp", concat_axis=0)
    with fails(ValueError, "all_to_all cannot split dimension 1", "3 is not 2"):
        on_ranks(2, functools.partial(call, split_axis=1))(jnp.ones((2, 2, 3)))
    with fails(ValueError, "all_to_all cannot split dimension 1", "tiled=True, 3 is not a multiple of 2"):
        on_ranks(2, functools.partial(call, split_axis=1, tiled=True))(jnp.ones((2, 2, 3)))
    with fails(ValueError, "all_to_all cannot take dimension 2 of 2"):
        on_ranks(2, functools.partial(call, split_axis=2))(jnp.ones((2, 2, 3)))
    with fails(TypeError, "split_axis as a whole number"):
        on_ranks(2, functools.partial(call, split_axis=0.5))(jnp.ones((2, 2, 3)))
    with fails(NameError, "all_to_all needs a mesh axis", "'tp'"):
        call(jnp.ones((2, 3)), split_axis=0)
