"""Products of global arrays of 8 bits with scales, against f64 of what the scales make of the operands."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import simulator
from tests.helpers.support import fails

# Subscripts, shapes of lhs and rhs, their specs, that of the result, and what has one scale: "1" is one for a
# dimension, "n" one for each element, "b" one for a block.
CASES = {
    "gather rows": ("mk,nk->mn", (16, 256), (32, 256), (P("tp"), P("tp"), P(None, "tp")), ("n1", "n1")),
    "gather blocks": ("mk,nk->mn", (16, 256), (512, 256), (P("tp"), P("tp"), P(None, "tp")), ("nb", "bb")),
    "scatter blocks": ("mk,nk->mn", (16, 512), (32, 512), (P(None, "tp"), P(None, "tp"), P("tp")), ("nb", "bb")),
    "sum rows": ("mk,kn->mn", (16, 512), (512, 32), (P(None, "tp"), P("tp"), P()), ("n1", "1n")),
    "gather heads": (
        "btd,dnh->btnh", (4, 4, 128), (128, 4, 8), (P("tp"), P(None, "tp"), P(None, None, "tp")), ("nn1", "1nn")
    ),
    "sum heads": ("btnh,nhd->btd", (2, 2, 4, 32), (4, 32, 16), (P(None, None, "tp"), P("tp"), P()), ("nn11", "11n")),
    "gather and weights": ("mk,nk->mn", (16, 256), (512, 256), (P("tp"), P("tp", "data"), P(None, "tp")), ("nb", "bb")),
    "no communication": ("mk,kn->mn", (16, 128), (128, 32), (P("data"), P(None, "tp"), P("data", "tp")), ("n1", "1n")),
}  # fmt: skip


def scale(key: int, x: jax.Array, kind: str) -> jax.Array:
    lengths = {"1": lambda n: 1, "n": lambda n: n, "b": lambda n: -(-n // 128)}
    shape = [lengths[each](n) for each, n in zip(kind, x.shape, strict=True)]
    return jnp.exp(jax.random.normal(jax.random.key(key), shape))


def wide(x: jax.Array, scale: jax.Array) -> np.ndarray:
    found = np.asarray(scale, np.float64)
    for axis, (n, blocks) in enumerate(zip(x.shape, found.shape, strict=True)):
        found = np.repeat(found, 128, axis)[(slice(None),) * axis + (slice(n),)] if blocks not in (1, n) else found
    return np.asarray(x, np.float64) * found


@pytest.mark.parametrize(
    ("case", "explicit"),
    [
        pytest.param(case, explicit, marks=[] if explicit or "and" in case or "no" in case else [pytest.mark.soak])
        for case in CASES
        for explicit in (False, True)
    ],
)
def test_einsum(case: str, explicit: bool) -> None:
    subscripts, lhs_shape, rhs_shape, specs, kinds = CASES[case]
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "tp"), axis_types=(kind, kind))
    draw = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate((lhs_shape, rhs_shape))]
    lhs, rhs = (jnp.round(20 * x).astype(jnp.int8) for x in draw)
    lhs_scale, rhs_scale = scale(2, lhs, kinds[0]), scale(3, rhs, kinds[1])
    lhs, rhs = (jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((lhs, rhs), specs))
    wanted = np.einsum(subscripts, wide(lhs, lhs_scale), wide(rhs, rhs_scale))

    def call(lhs: jax.Array, rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array, **how: Any) -> jax.Array:
        how |= {"out_sharding": NamedSharding(mesh, specs[2]), "preferred_element_type": jnp.float32}
        how |= {} if explicit else {"in_shardings": [NamedSharding(mesh, each) for each in specs[:2]]}
        return jtf.einsum(subscripts, lhs, rhs, lhs_scale=lhs_scale, rhs_scale=rhs_scale, **how)

    with jax.set_mesh(mesh):
        found = jax.jit(call)(lhs, rhs, lhs_scale, rhs_scale)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-6 * np.abs(wanted).max())
        # With one scale each, and a result of bf16.
        found = jax.jit(call)(lhs, rhs, jnp.float32(0.5), jnp.float32(2))
    plain = np.einsum(subscripts, np.asarray(lhs, np.float64), np.asarray(rhs, np.float64))
    np.testing.assert_allclose(found, plain, rtol=1e-6)


def test_it_is_the_operation_with_scales() -> None:
    """Not a product of what has been dequantised: a kernel in the simulator, of weights where they lie, with a gate."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("tp",), axis_types=(AxisType.Explicit,))
    x, w, gate = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((16, 128), (32, 128), (32, 128)))
    )
    quantised = [jtf.quantize(each, "float8_e4m3fn", block=(1, -1)) for each in (x, w, gate)]
    wanted = [np.asarray(jtf.dequantize(*each), np.float64) for each in quantised]
    (x, x_scale), (w, w_scale), (gate, gate_scale) = (
        (jax.device_put(each[0], NamedSharding(mesh, P("tp"))), each[1]) for each in quantised
    )
    tile = {"kernel": "hopper", "block_m": 8, "block_n": 32, "block_k": 32, "part": 64, "unit": 4, "num_stages": 2}

    @jax.jit
    def call(x: jax.Array, w: jax.Array, gate: jax.Array) -> jax.Array:
        how = {"lhs_scale": x_scale, "rhs_scale": w_scale, "gate": gate, "gate_scale": gate_scale}
        return jtf.einsum(
            "mk,nk->mn",
            x,
            w,
            out_sharding=P(None, "tp"),
            implementation="simulate",
            config={**tile, "programs": 2},
            **how,
        )

    with jax.set_mesh(mesh), simulator.simulating(seed=1):
        found = call(x, w, gate)
    assert found.dtype == jnp.bfloat16
    expected = (wanted[0] @ wanted[2].T) * (wanted[0] @ wanted[1].T)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-7, atol=1e-3 * np.abs(expected).max())


def test_what_does_not_fit_is_said() -> None:
    x, w = jnp.ones((4, 256), jnp.int8), jnp.ones((256, 16), jnp.int8)
    one = jnp.float32(1)
    with fails(ValueError, "einsum takes lhs_scale of shape [], [4, 1], [4, 2] here, not [4]"):
        jtf.einsum("mk,kn->mn", x, w, lhs_scale=jnp.ones(4), rhs_scale=one)
    with fails(ValueError, "matmul takes rhs_scale of shape [], [1, 16], [2, 1] here, not [256, 1]"):
        jtf.matmul(x, w, rhs_scale=jnp.ones((256, 1)))
    with fails(ValueError, "dot_general takes rhs_scale as float32, not bfloat16"):
        jtf.dot_general(x, w, (((1,), (0,)), ((), ())), rhs_scale=one.astype(jnp.bfloat16))
    with fails(ValueError, "and this one is float32"):
        jtf.matmul(x.astype(jnp.float32), w, lhs_scale=one)
    with fails(ValueError, "einsum takes gate_scale with a gate only"):
        jtf.einsum("mk,kn->mn", x, w, gate_scale=one)
    with fails(ValueError, "einsum takes rhs_scale as a tuple where rhs is one"):
        jtf.einsum("mk,kn->mn", x, (w, w), rhs_scale=one)


def test_blocks_on_two_devices_are_dequantised_before() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("tp",), axis_types=(AxisType.Explicit,))
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((8, 192), (16, 192))))
    (x, x_scale), (w, w_scale) = jtf.quantize(x, "int8", block=(1, 128)), jtf.quantize(w, "int8", block=(1, -1))
    wanted = np.asarray(jtf.dequantize(x, x_scale), np.float64) @ np.asarray(jtf.dequantize(w, w_scale), np.float64).T
    x, w = (jax.device_put(each, NamedSharding(mesh, P(None, "tp"))) for each in (x, w))
    with jax.set_mesh(mesh):
        how: Any = {
            "lhs_scale": x_scale,
            "rhs_scale": w_scale,
            "out_sharding": P(),
            "preferred_element_type": jnp.float32,
        }
        found = jax.jit(lambda x, w: jtf.einsum("mk,nk->mn", x, w, **how))(x, w)
        with fails(NotImplementedError, "blocks of 128 of lhs_scale do not divide among 2 devices"):
            jtf.einsum("mk,nk->mn", x, w, implementation="simulate", **how)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-6 * np.abs(wanted).max())
