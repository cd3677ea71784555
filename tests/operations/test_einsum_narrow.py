"""Products of global arrays whose lhs is quantised before it travels, or whose results have 8 bits, against f64."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import simulator
from tests.helpers.support import TRITON_CALL, assert_fused, fails, lower_for_cuda, sharded

TYPES = [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.soak)]
E4M3 = "float8_e4m3fn"
ROWS, COLUMNS = P("tp"), P(None, "tp")
# Subscripts, shapes of lhs and rhs, their specs, that of the result, the kinds of scales of lhs, and in how many parts
# a row is quantised, of which each device has one.
QUANTISED = {
    "gather": ("mk,nk->mn", (16, 256), (32, 256), (ROWS, ROWS, COLUMNS), ("row", "block"), 1),
    "scatter": ("mk,nk->mn", (16, 512), (32, 512), (COLUMNS, COLUMNS, ROWS), ("row", "block"), 2),
    "sum heads": ("btnh,nhd->btd", (2, 2, 4, 32), (4, 32, 16), (P(None, None, "tp"), ROWS, P()), ("row",), 2),
    "gather heads": (
        "btd,dnh->btnh", (4, 4, 128), (128, 4, 8), (P("tp"), P(None, "tp"), P(None, None, "tp")), ("block",), 1
    ),
    "sum turned": ("kbm,kn->mbn", (256, 2, 8), (256, 32), (P("tp"), P(), P()), ("row", "block"), 2),
    # JAX's own: without communication, of a vector, of a lhs whose contracted dimension comes first, and of a batch.
    "data": ("mk,kn->mn", (16, 128), (128, 32), (P("data"), COLUMNS, P("data", "tp")), ("row",), 1),
    "vector": ("k,kn->n", (256,), (256, 32), (P(), COLUMNS, P("tp")), ("block",), 1),
    "turned": ("kbm,kn->mbn", (256, 2, 8), (256, 32), (P(None, "tp"), P(), P(None, "tp")), ("block",), 1),
    "batch": ("bmk,bkn->bmn", (2, 8, 256), (2, 256, 16), (P("tp"), P("tp"), P("tp")), ("row", "block"), 1),
}  # fmt: skip
# The same of products whose result has 8 bits, with the shape of its scales, and how these lie. The rows of "uneven"
# have blocks that lie on two devices, so its scales are whole.
NARROW = {
    "gather": ("mk,nk->mn", (16, 128), (512, 128), (ROWS, ROWS, COLUMNS), (16, 4), COLUMNS),
    "scatter": ("mk,kn->mn", (16, 128), (128, 200), (COLUMNS, ROWS, ROWS), (16, 2), ROWS),
    "turned": (
        "mbk,nk->bmn", (4, 8, 128), (200, 128), (P(None, None, "tp"), COLUMNS, COLUMNS), (8, 4, 2), COLUMNS
    ),
    "sum": ("btk,kn->btn", (2, 3, 128), (128, 136), (P(None, None, "tp"), ROWS, P()), (2, 3, 2), P()),
    "uneven": ("mk,nk->mn", (16, 128), (320, 128), (ROWS, ROWS, COLUMNS), (16, 3), P()),
    "data": ("mk,kn->mn", (16, 128), (128, 512), (P("data"), COLUMNS, P("data", "tp")), (16, 4), P("data", "tp")),
    "vector": ("k,kn->n", (128,), (128, 512), (P(), COLUMNS, P("tp")), (4,), P("tp")),
}  # fmt: skip


def mesh_of(kind: AxisType) -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "tp"), axis_types=(kind, kind))


def normal(key: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(key), shape)


def put(mesh: Mesh, specs: tuple[P, ...], *arrays: jax.Array) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs)]


def call_of(mesh: Mesh, subscripts: str, specs: tuple[P, ...], **how: Any) -> Any:
    """A jitted einsum of arrays that lie like this."""
    how["out_sharding"] = NamedSharding(mesh, specs[2])
    if AxisType.Auto in mesh.axis_types:
        how["in_shardings"] = [NamedSharding(mesh, each) for each in specs[:2]]

    def call(lhs: jax.Array, rhs: jax.Array, rhs_scale: jax.Array | None = None) -> Any:
        return jtf.einsum(subscripts, lhs, rhs, rhs_scale=rhs_scale, **how)

    return jax.jit(call)


def rounded(subscripts: str, lhs: jax.Array, dtype: str, kind: str, parts: int) -> np.ndarray:
    """What quantising the parts of each row of lhs makes of it, f64."""
    labels, result = subscripts.split(",")[0], subscripts.split("->")[1]
    order = sorted(range(lhs.ndim), key=lambda axis: labels[axis] not in result)
    turned = lhs.transpose(order)
    rows = [n for n, axis in zip(turned.shape, order) if labels[axis] in result]
    block = {"row": (1, -1), "block": (1, 128)}[kind]
    flat = jnp.split(turned.reshape(int(np.prod(rows)), -1), parts, axis=1)
    each = [np.asarray(jtf.dequantize(*jtf.quantize(part, dtype, block=block)), np.float64) for part in flat]
    return np.concatenate(each, axis=1).reshape(turned.shape).transpose(np.argsort(order))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("case", "block"), [(case, block) for case in QUANTISED for block in QUANTISED[case][4]])
def test_lhs_is_quantised(case: str, block: str, kind: AxisType) -> None:
    subscripts, lhs_shape, rhs_shape, specs, _, parts = QUANTISED[case]
    mesh = mesh_of(kind)
    lhs, rhs = put(mesh, specs, normal(0, lhs_shape), jnp.round(20 * normal(1, rhs_shape)).astype(jnp.int8))
    call = call_of(mesh, subscripts, specs, quantize_lhs=block)
    with jax.set_mesh(mesh):
        found = call(lhs, rhs, jnp.float32(0.25))
        plain = call_of(mesh, subscripts, specs, quantize_lhs=block, implementation="xla")(lhs, rhs, jnp.float32(0.25))
        assert call(lhs.astype(jnp.bfloat16), rhs, jnp.float32(0.25)).dtype == jnp.bfloat16
    right = np.asarray(rhs, np.float64) / 4
    for out, parts_of_a_row in ((found, parts), (plain, 1)):
        assert out.dtype == jnp.float32
        wanted = np.einsum(subscripts, rounded(subscripts, normal(0, lhs_shape), "int8", block, parts_of_a_row), right)
        np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("case", ["gather", pytest.param("scatter", marks=pytest.mark.soak), "sum heads"])
def test_gradients_pass_straight_through(case: str, implementation: str | None, kind: AxisType) -> None:
    subscripts, lhs_shape, rhs_shape, specs, _, _ = QUANTISED[case]
    mesh = mesh_of(kind)
    rhs = normal(1, rhs_shape).astype(E4M3)
    lhs, rhs = put(mesh, specs, normal(0, lhs_shape), rhs)
    scale = jnp.float32(0.25)
    call = call_of(mesh, subscripts, specs, quantize_lhs="row", implementation=implementation, precision="highest")

    def loss(lhs: jax.Array, scale: jax.Array) -> jax.Array:
        out = call(lhs, rhs, scale)
        return jnp.sum(out * jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape))

    with jax.set_mesh(mesh):
        of_lhs, of_scale = jax.jit(jax.grad(loss, (0, 1)))(lhs, scale)
    left, right = np.asarray(normal(0, lhs_shape), np.float64), np.asarray(rhs, np.float64)
    out = np.einsum(subscripts, left, right)
    ct = np.arange(out.size).reshape(out.shape)
    # Those of the product of lhs as it was.
    ins, result = subscripts.split("->")
    wanted = np.einsum(f"{result},{ins.split(',')[1]}->{ins.split(',')[0]}", ct, right) / 4
    np.testing.assert_allclose(of_lhs, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(of_scale, np.sum(ct * out), rtol=1e-4, atol=1e-5 * np.sum(np.abs(ct * out)))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", [E4M3, pytest.param("int8", marks=pytest.mark.soak)])
@pytest.mark.parametrize("case", NARROW)
def test_results_of_8_bits(case: str, dtype: str, kind: AxisType) -> None:
    subscripts, lhs_shape, rhs_shape, specs, scale_shape, scale_spec = NARROW[case]
    mesh = mesh_of(kind)
    lhs, rhs = put(mesh, specs, normal(0, lhs_shape), normal(1, rhs_shape))
    wanted = np.einsum(subscripts, np.asarray(lhs, np.float64), np.asarray(rhs, np.float64))
    largest = {E4M3: 448.0, "int8": 127.0}[dtype]
    how = {"preferred_element_type": dtype, "precision": "highest"}
    with jax.set_mesh(mesh):
        # Half of the results are too large for this scale: they become the largest number.
        given = np.median(np.abs(wanted)) / largest
        found = call_of(mesh, subscripts, specs, out_scale=jnp.float32(given), **how)(lhs, rhs)
        values, scale = call_of(mesh, subscripts, specs, out_scale="block", **how)(lhs, rhs)
    assert found.dtype == values.dtype == dtype and scale.dtype == jnp.float32 and scale.shape == scale_shape
    for out in (found, values):
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, specs[2]), out.ndim)
    if kind == AxisType.Explicit:
        assert scale.sharding.is_equivalent_to(NamedSharding(mesh, scale_spec), scale.ndim)
    n = wanted.shape[-1]
    blocks = np.pad(np.abs(wanted), [(0, 0)] * (wanted.ndim - 1) + [(0, -n % 128)])
    amax = blocks.reshape(*wanted.shape[:-1], -1, 128).max(-1)
    np.testing.assert_allclose(scale, amax / largest, rtol=1e-5)
    for out, factor in ((found, np.float64(given)), (values, np.repeat(scale, 128, -1)[..., :n])):
        units = np.clip(wanted / factor, -largest, largest)
        step = 0.5 if dtype == "int8" else 2**-4 * np.abs(units) + 2**-9
        assert np.all(np.abs(np.asarray(out.astype(jnp.float32), np.float64) - units) <= step + 1e-4 * largest)


@pytest.mark.parametrize("implementation", [None, "xla"])
@pytest.mark.parametrize("context", [True, False])
def test_epilogues(implementation: str | None, context: bool) -> None:
    """With a gate, a bias, an activation and a residual, on a mesh of the context or of the arrays alone."""
    mesh = mesh_of(AxisType.Explicit)
    x, bias, residual = normal(0, (16, 256)), normal(1, (512,)), normal(2, (16, 512))
    (w, w_scale), (gate, gate_scale) = (jtf.quantize(normal(i, (512, 256)), "int8", block=(1, 128)) for i in (3, 4))
    w_scale, gate_scale = (jnp.max(scale, axis=1, keepdims=True) for scale in (w_scale, gate_scale))
    left = rounded("mk,nk->mn", x, "int8", "block", 1)
    up, gated = (left @ np.asarray(jtf.dequantize(*each), np.float64).T for each in ((w, w_scale), (gate, gate_scale)))
    wanted = gated / (1 + np.exp(-gated)) * (up + np.asarray(bias)) + np.asarray(residual)
    how: dict[str, Any] = {"quantize_lhs": "block", "out_scale": "block", "preferred_element_type": E4M3}
    how |= {"activation": "silu", "out_sharding": NamedSharding(mesh, COLUMNS), "implementation": implementation}
    names = ("gate", "rhs_scale", "gate_scale", "bias", "residual")
    specs = (ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, COLUMNS)
    arrays = put(mesh, specs, x, w, gate, w_scale, gate_scale, bias, residual)
    call = jax.jit(lambda x, w, *others: jtf.einsum("mk,nk->mn", x, w, **dict(zip(names, others)), **how))
    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        values, scale = call(*arrays)
    units = wanted / np.repeat(scale, 128, axis=1)
    error = np.abs(np.asarray(values.astype(jnp.float32), np.float64) - units)
    assert np.all(error <= (2**-4 + 1e-3) * np.abs(units) + 0.01)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_gradients_of_epilogues(implementation: str | None) -> None:
    """They reach everything that has no 8 bits, with lhs as it was."""
    mesh = mesh_of(AxisType.Explicit)
    x, bias, residual = normal(0, (16, 256)), normal(1, (32,)), normal(2, (16, 32))
    (w, w_scale), (gate, gate_scale) = (jtf.quantize(normal(i, (32, 256)), "int8", block=(1, -1)) for i in (3, 4))
    ct = np.asarray(normal(5, (16, 32)), np.float64)
    specs = (ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, COLUMNS)
    x_, w_, gate_, *others = put(mesh, specs, x, w, gate, w_scale, gate_scale, bias, residual)
    names = ("rhs_scale", "gate_scale", "bias", "residual")

    def loss(*others: jax.Array) -> jax.Array:
        how: dict[str, Any] = {"quantize_lhs": "row", "out_sharding": COLUMNS, "precision": "highest"}
        how |= {"implementation": implementation, **dict(zip(names, others, strict=True))}
        return jnp.sum(jtf.einsum("mk,nk->mn", x_, w_, gate=gate_, **how) * jnp.asarray(ct, jnp.float32))

    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*others)
    up, gated = (np.asarray(x, np.float64) @ np.asarray(each, np.float64).T for each in (w, gate))
    of_up, of_gate, more = (np.asarray(each, np.float64).T for each in (w_scale, gate_scale, bias))
    of_columns = [ct * up * gated * of_gate, ct * gated * (up * of_up + more), ct * gated * of_gate]
    wanted = [*(each.sum(0) for each in of_columns), ct]
    for each, of in zip(found, wanted, strict=True):
        np.testing.assert_allclose(each.reshape(of.shape), of, rtol=1e-4, atol=1e-5 * np.abs(of).max())


def test_two_products_chain_without_a_cast() -> None:
    """The blocks of one result are those that the next product takes."""
    mesh = mesh_of(AxisType.Explicit)
    x = normal(0, (16, 256))
    up, up_scale = jtf.quantize(normal(1, (512, 256)), E4M3, block=(128, 128))
    down, down_scale = jtf.quantize(normal(2, (32, 512)), E4M3, block=(1, -1))
    hidden = np.asarray(x, np.float64) @ np.asarray(jtf.dequantize(up, up_scale), np.float64).T
    wanted = hidden @ np.asarray(jtf.dequantize(down, down_scale), np.float64).T
    narrow = {"preferred_element_type": E4M3, "out_scale": "block", "quantize_lhs": "block"}

    @jax.jit
    def layer(x: jax.Array, up: jax.Array, up_scale: jax.Array, down: jax.Array, down_scale: jax.Array) -> jax.Array:
        hidden, scale = jtf.einsum("mk,nk->mn", x, up, rhs_scale=up_scale, out_sharding=COLUMNS, **narrow)
        scales = {"lhs_scale": scale, "rhs_scale": down_scale}
        return jtf.einsum("mk,nk->mn", hidden, down, out_sharding=ROWS, preferred_element_type=jnp.float32, **scales)

    with jax.set_mesh(mesh):
        found = layer(*put(mesh, (ROWS, ROWS, ROWS, COLUMNS, P()), x, up, up_scale, down, down_scale))
    # Two roundings to 3 bits of mantissa, of x and of what is between.
    error = np.sqrt(np.mean((np.asarray(found, np.float64) - wanted) ** 2) / np.mean(wanted**2))
    assert 0.01 < error < 0.06


def test_it_is_the_operation() -> None:
    """A kernel in the simulator takes the quantised lhs, with a gate, and the result has 8 bits and scales."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("tp",), axis_types=(AxisType.Explicit,))
    x = normal(0, (16, 128))
    (w, w_scale), (gate, gate_scale) = (jtf.quantize(normal(i, (512, 128)), E4M3, block=(1, -1)) for i in (1, 2))
    left = np.asarray(jtf.dequantize(*jtf.quantize(x, E4M3, block=(1, -1))), np.float64)
    up, gated = (left @ np.asarray(jtf.dequantize(*each), np.float64).T for each in ((w, w_scale), (gate, gate_scale)))
    tile = {"kernel": "hopper", "block_m": 8, "block_n": 32, "block_k": 32, "part": 64, "unit": 4, "num_stages": 2}
    how: dict[str, Any] = {"quantize_lhs": "row", "out_scale": "block", "preferred_element_type": E4M3}
    how |= {"out_sharding": COLUMNS, "implementation": "simulate", "config": {**tile, "programs": 2}}

    @jax.jit
    def call(x: jax.Array, w: jax.Array, gate: jax.Array, w_scale: jax.Array, gate_scale: jax.Array) -> Any:
        scales = {"rhs_scale": w_scale, "gate_scale": gate_scale}
        return jtf.einsum("mk,nk->mn", x, w, gate=gate, **scales, **how)

    with jax.set_mesh(mesh), simulator.simulating(seed=1):
        values, scale = call(*put(mesh, (ROWS,) * 5, x, w, gate, w_scale, gate_scale))
    assert values.dtype == E4M3 and scale.shape == (16, 4)
    expected = gated * up
    # e4m3 has 3 bits of mantissa.
    found = np.asarray(jtf.dequantize(values, scale), np.float64)
    np.testing.assert_allclose(found, expected, rtol=2**-4 + 2**-7, atol=1e-3 * np.abs(expected).max())


def test_for_cuda_the_kernel_takes_8_bits() -> None:
    """One kernel gathers the scales, and one the rows of 8 bits."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("tp",), axis_types=(AxisType.Explicit,))
    shapes = [sharded(mesh, ROWS, (4096, 512), "bfloat16"), sharded(mesh, ROWS, (1024, 512), E4M3)]
    shapes.append(sharded(mesh, ROWS, (1024, 1), "float32"))
    with jax.set_mesh(mesh):
        how = {"quantize_lhs": "row", "out_scale": "block", "preferred_element_type": E4M3, "implementation": "fused"}
        call = call_of(mesh, "mk,nk->mn", (ROWS, ROWS, COLUMNS), **how)
        text = lower_for_cuda(call, *shapes)
    assert_fused(text, calls=2)
    gather, product = [line for line in text.splitlines() if TRITON_CALL in line]
    assert "(tensor<2048xf32>, tensor<1xi32>) -> tensor<4096xf32>" in gather
    assert "(tensor<1x2048x512xf8E4M3FN>" in product and "(tensor<2x2048x512xbf16>" in product


@pytest.mark.parametrize("implementation", [None, "simulate"])
def test_products_of_local_arrays(implementation: str | None) -> None:
    """Inside of `jax.shard_map`: JAX's own, or a kernel of each device."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("tp",), axis_types=(AxisType.Explicit,))
    x, (w, scale) = normal(0, (16, 128)), jtf.quantize(normal(1, (256, 128)), "int8", block=(1, -1))
    left = rounded("mk,nk->mn", x, "int8", "row", 1)
    wanted = left @ np.asarray(jtf.dequantize(w, scale), np.float64).T

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(ROWS, P(), P()), out_specs=(ROWS, ROWS))
    def local(x: jax.Array, w: jax.Array, scale: jax.Array) -> Any:
        how: dict[str, Any] = {"preferred_element_type": "int8", "out_scale": "block", "quantize_lhs": "row"}
        return jtf.einsum("mk,nk->mn", x, w, rhs_scale=scale, implementation=implementation, **how)

    found = np.asarray(jtf.dequantize(*jax.jit(local)(*put(mesh, (ROWS, P(), P()), x, w, scale))), np.float64)
    assert np.all(np.abs(found - wanted) <= (0.5 / 127 + 1e-4) * np.abs(wanted).max(1, keepdims=True))


def test_matmul_and_dot_general_take_them() -> None:
    x, (w, scale) = normal(0, (8, 256)), jtf.quantize(normal(1, (256, 40)), "int8", block=(-1, 1))
    how: dict[str, Any] = {"rhs_scale": scale, "quantize_lhs": "block"}
    wanted = rounded("mk,kn->mn", x, "int8", "block", 1) @ np.asarray(jtf.dequantize(w, scale), np.float64)
    numbers = (((1,), (0,)), ((), ()))
    for call in (jtf.matmul, functools.partial(jtf.dot_general, dimension_numbers=numbers)):
        np.testing.assert_allclose(call(x, w, **how), wanted, rtol=1e-4, atol=2e-6 * np.abs(wanted).max())
        narrow: dict[str, Any] = {"preferred_element_type": "int8", "out_scale": jnp.float32(1)}
        found = call(x, w, **how, **narrow)
        assert found.dtype == jnp.int8
        assert np.all(np.abs(np.asarray(found, np.float64) - np.clip(wanted, -127, 127)) <= 0.5 + 1e-3)


def test_mapped() -> None:
    x, (w, scale) = normal(0, (3, 8, 128)), jtf.quantize(normal(1, (128, 40)), "int8", block=(-1, 1))
    how: dict[str, Any] = {"preferred_element_type": "int8", "out_scale": "block", "quantize_lhs": "row"}
    call = functools.partial(jtf.einsum, "mk,kn->mn", rhs_scale=scale, **how)
    values, scales = jax.vmap(lambda x: call(x, w))(x)
    for i in range(3):
        each, own = call(x[i], w)
        np.testing.assert_array_equal(values[i], each)
        np.testing.assert_array_equal(scales[i], own)


def test_what_does_not_go_together() -> None:
    x, w = jnp.ones((4, 256)), jnp.ones((256, 16), jnp.int8)
    scaled: dict[str, Any] = {"rhs_scale": jnp.float32(1)}
    narrow: dict[str, Any] = {"preferred_element_type": "int8"}
    with fails(ValueError, "einsum takes quantize_lhs as 'row', 'block', not 'tensor'"):
        jtf.einsum("mk,kn->mn", x, w, quantize_lhs="tensor", **scaled)
    with fails(
        ValueError, "matmul takes quantize_lhs with a rhs of float8_e4m3fn", "int8 and its rhs_scale, and rhs is"
    ):
        jtf.matmul(x, w, quantize_lhs="row")
    with fails(ValueError, "without lhs_scale, and this one is int8"):
        jtf.matmul(x.astype(jnp.int8), w, quantize_lhs="row", **scaled)
    with fails(ValueError, "takes quantize_lhs='block' where lhs has one contracted dimension, not ['n', 'h']: take"):
        jtf.einsum("mnh,nhd->md", x.reshape(4, 2, 128), w.reshape(2, 128, 16), quantize_lhs="block", **scaled)
    with fails(ValueError, "dot_general takes out_scale with a preferred_element_type of float8_e4m3fn", "not None"):
        jtf.dot_general(x, x, (((1,), (1,)), ((), ())), out_scale="block")
    with fails(ValueError, "einsum takes out_scale as float32 [] or 'block', not float32[3]"):
        jtf.einsum("mk,kn->mn", x, x.T, out_scale=jnp.ones(3), **narrow)
    for subscripts in ("mk,kn->nm", "kn,mk->mn"):
        operands = (x, x.T) if subscripts.startswith("mk") else (x.T, x)
        with fails(ValueError, "einsum takes out_scale='block' where rhs has one dimension that lhs has not"):
            jtf.einsum(subscripts, *operands, out_scale="block", **narrow)
    with fails(ValueError, "it is the last one of the result, not ['n', 'h'] in ['m', 'n', 'h']: give an out_scale of"):
        jtf.einsum("mk,knh->mnh", x, w.reshape(256, 2, 8).astype(jnp.float32), out_scale="block", **narrow)
    with fails(ValueError, "einsum takes quantize_lhs and out_scale with two operands only"):
        jtf.einsum("mk,kn,no->mo", x, x.T, x, out_scale=jnp.float32(1), **narrow)
    with fails(ValueError, "einsum takes quantize_lhs and out_scale with one rhs"):
        jtf.einsum("mk,kn->mn", x, (w, w), quantize_lhs="row", rhs_scale=(jnp.float32(1), jnp.float32(1)))


def test_blocks_on_two_devices_are_refused_where_a_kernel_is_asked_for() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("tp",), axis_types=(AxisType.Explicit,))
    x, w = put(mesh, (ROWS, ROWS), normal(0, (16, 128)), normal(1, (320, 128)))
    how: dict[str, Any] = {"preferred_element_type": "int8", "out_scale": "block", "implementation": "simulate"}
    with (
        jax.set_mesh(mesh),
        fails(NotImplementedError, "blocks of 128 of the result do not divide among 2 devices"),
    ):
        jtf.einsum("mk,nk->mn", x, w, out_sharding=COLUMNS, **how)
