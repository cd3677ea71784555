"""Operands of 8 bits with scales: quantisers, and the products against f64 of what the scales make of the operands."""

import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import simulator
from jaxtaxfree.ops import all_gather_matmul as gather_ops
from jaxtaxfree.ops import matmul_all_reduce as reduce_ops
from jaxtaxfree.ops import matmul_reduce_scatter as scatter_ops
from jaxtaxfree.ops.epilogue import Epilogue
from tests.helpers.support import by_shape, lower_for_cuda, mesh_of, product_call

DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
# The relative step between numbers of each dtype, at most, of what scales have brought into its range.
STEP = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3, "int8": 2**-7}
LHS = {"tensor": None, "row": (1, -1), "block": (1, 128)}
RHS = {"tensor": None, "row": (-1, 1), "block": (128, 128)}


def normal(*shape: int, seed: int = 0) -> jax.Array:
    spread = jnp.exp(jax.random.normal(jax.random.key(seed + 100), (*shape[:-1], 1)))
    return spread * jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.covers(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [None, (1, -1), (-1, 1), (1, 128), (128, 128)])
def test_quantize(dtype: str, block: Any) -> None:
    x = normal(2, 200, 300)
    values, scale = jtf.quantize(x, dtype, block=block)
    blocks = {None: (), (1, -1): (2, 200, 1), (-1, 1): (2, 1, 300), (1, 128): (2, 200, 3), (128, 128): (2, 2, 3)}
    assert values.dtype == dtype and values.shape == x.shape
    assert scale.dtype == jnp.float32 and scale.shape == blocks[block]
    back = np.asarray(jtf.dequantize(values, scale), np.float64)
    rounding = np.abs(back - x)
    largest = np.asarray(jtf.dequantize(jnp.full(x.shape, 127, jnp.int8), scale), np.float64)  # of int8, of its block
    bound = largest / 127 / 2 if dtype == "int8" else STEP[dtype] * np.abs(x) + 1e-3 * np.max(np.abs(x))
    assert np.all(rounding <= 1.001 * bound)
    assert np.max(np.abs(back)) == pytest.approx(float(jnp.max(jnp.abs(x))), rel=1e-6)  # the largest is met

    values, power = jtf.quantize(x, dtype, block=block, power_of_2=True)
    assert np.all(np.log2(np.asarray(power)) % 1 == 0) and np.all((power >= scale) & (power < 2 * scale))


@dataclasses.dataclass
class QArray:
    """What Qwix calls so."""

    qvalue: jax.Array
    scale: jax.Array  # of as many dimensions, one for each tile; of the dtype of what was quantised
    zero_point: jax.Array | None = None


@pytest.mark.parametrize("tiles", [(512, 256), (512, 1), (128, 128)])
def test_arrays_of_qwix(tiles: tuple[int, int]) -> None:
    """They go into a product as docs/eight_bits.md says, and those of `quantize` mean the same as an array of Qwix."""
    x, w = normal(8, 512, seed=1).astype(jnp.bfloat16), normal(512, 256).astype(jnp.bfloat16)

    def cut(x: Any) -> Any:
        return x.reshape(512 // tiles[0], tiles[0], 256 // tiles[1], tiles[1])

    def means(q: QArray) -> np.ndarray:
        scale = np.asarray(q.scale, np.float64)[:, None, :, None]
        return (np.asarray(cut(q.qvalue), np.float64) * scale).reshape(w.shape)

    scale = jnp.max(jnp.abs(cut(w)), (1, 3), keepdims=True) / 127
    q = QArray(jnp.round(cut(w) / scale).astype(jnp.int8).reshape(w.shape), scale[:, 0, :, 0])
    scale = q.scale.astype(jnp.float32)
    found = jtf.matmul(
        x, q.qvalue, preferred_element_type=jnp.float32, rhs_scale=scale.reshape(()) if scale.size == 1 else scale
    )
    wanted = np.asarray(x, np.float64) @ means(q)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    if tiles != (512, 256):
        own = QArray(*jtf.quantize(w, jnp.int8, block=(-1, 1) if tiles[1] == 1 else (128, 128)))
        assert own.scale.shape == q.scale.shape
        np.testing.assert_allclose(means(own), jtf.dequantize(own.qvalue, own.scale), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_what_is_no_ordinary_number(dtype: str) -> None:
    rows = jnp.array([[0.0, 0.0], [jnp.inf, 1.0], [1.0, -jnp.inf], [jnp.nan, 1.0], [1e-45, 0.0], [3e38, -3e38]])
    values, scale = jtf.quantize(rows, dtype, block=(1, -1))
    back = np.asarray(jtf.dequantize(values, scale))
    np.testing.assert_array_equal(
        np.isnan(back), [[False] * 2, [True] * 2, [True] * 2, [True] * 2, [False] * 2, [False] * 2]
    )
    np.testing.assert_array_equal(back[0], 0)
    assert np.all(np.abs(back[4]) < 1e-37)
    np.testing.assert_allclose(back[5], rows[5], rtol=1e-6)
    values, scale = jtf.quantize(jnp.zeros((0, 4)), dtype, block=(1, -1))
    assert values.shape == (0, 4) and scale.shape == (0, 1)
    # All of nothing has a scale, as the products want one for each row.
    for block, shape in (((1, -1), (4, 1)), ((-1, 1), (1, 0)), ((1, 128), (4, 0))):
        values, scale = jtf.quantize(jnp.zeros((4, 0)), dtype, block=block)
        assert values.shape == (4, 0) and scale.shape == shape and np.all(scale == 1)


def test_quantize_refuses() -> None:
    x = jnp.ones((4, 4))
    with pytest.raises(ValueError, match="quantize gives float8_e4m3fn, float8_e5m2, int8, not int4"):
        jtf.quantize(x, jnp.int4)
    for block in ((2, 2), 128, "row"):
        with pytest.raises(ValueError, match=rf"quantize has no block {re.escape(repr(block))}: take None, \(1, -1\)"):
            jtf.quantize(x, "int8", block=block)
    with pytest.raises(ValueError, match=r"blocks of rows and columns, and x has shape \[4\]"):
        jtf.quantize(x[0], "int8", block=(1, -1))
    with pytest.raises(TypeError, match="quantize takes floating-point numbers, not int32"):
        jtf.quantize(jnp.ones(3, int), "int8")
    with pytest.raises(ValueError, match=r"scales \[3, 1\] are of no blocks of 1, 128 or all of \[4, 4\]"):
        jtf.dequantize(x, jnp.ones((3, 1)))


# The products. Each rank quantises its own part of whole arrays; NumPy adds up in f64 what comes of that.

M, K, N = 24, 320, 136  # of a rank's part, where a dimension is sharded


def silu(x: np.ndarray) -> np.ndarray:
    return x * np.where(x > 0, 1, np.exp(np.minimum(x, 0))) / (1 + np.exp(-np.abs(x)))


def parts(
    dtype: str, kind: str, shape: tuple[int, int], world: int, seed: int
) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """What each of so many ranks has, side by side: values, scales, and what they make, f64."""
    x = normal(world, *shape, seed=seed)
    if dtype not in DTYPES:
        return x.astype(dtype), jnp.zeros(world), np.asarray(x.astype(dtype), np.float64)
    block = (LHS if seed == 0 else RHS)[kind]
    values, scale = jax.vmap(functools.partial(jtf.quantize, dtype=dtype, block=block))(x)
    whole = np.asarray(jax.vmap(jtf.dequantize)(values, scale), np.float64)
    return values, scale, whole


def on_ranks(mesh: Any, function: Any, *stacked: jax.Array) -> np.ndarray:
    """function of each rank's part of stacked arrays; its results stacked."""
    run = jax.shard_map(
        lambda *each: function(*(x[0] for x in each))[None],
        mesh=mesh,
        in_specs=P("tp"),
        out_specs=P("tp"),
    )
    return np.asarray(jax.jit(run)(*stacked).astype(jnp.float32), np.float64)


def scaled_by(scale: jax.Array, dtype: str) -> jax.Array | None:
    return scale if dtype in DTYPES else None


PAIRS = [
    *itertools.product(("float8_e4m3fn", "int8"), ("float8_e4m3fn", "int8")),
    ("float8_e5m2", "float8_e4m3fn"),
    ("bfloat16", "int8"),
    ("float16", "float8_e4m3fn"),
]


KINDS = [("tensor", "tensor"), ("row", "row"), ("row", "block"), ("block", "block")]


@pytest.mark.parametrize(
    ("pair", "kinds", "world"),
    [
        # Each pair and each kind of scales is in `make test`, all of them together in `make soak`.
        pytest.param(
            pair,
            kinds,
            world,
            marks=[] if world == 2 and j == i % len(KINDS) else [pytest.mark.soak],
            id=f"{'-'.join(pair)}-{'-'.join(kinds)}-{world}",
        )
        for i, pair in enumerate(PAIRS)
        for j, kinds in enumerate(KINDS)
        for world in (2, 3, 8)
    ],
)
def test_products(cpu_mesh: Any, world: int, kinds: tuple[str, str], pair: tuple[str, str]) -> None:
    mesh = cpu_mesh(world, "tp")
    lhs, lhs_scale, left = parts(pair[0], kinds[0], (world * M, K), world, 0)
    rhs, rhs_scale, right = parts(pair[1], kinds[1], (K, N), world, 1)
    gate, gate_scale, gates = parts(pair[1], kinds[1], (K, N), world, 2)
    bias = jax.random.normal(jax.random.key(3), (world, N))
    # Rows or columns of 384, so that no block lies on two ranks.
    deep, deep_scale, deeper = parts(pair[0], kinds[0], (world * M, 384), world, 0)
    low, low_scale, lower = parts(pair[1], kinds[1], (384, N), world, 1)

    def scales(lhs_scale: Any, rhs_scale: Any) -> dict[str, Any]:
        return {"lhs_scale": scaled_by(lhs_scale, pair[0]), "rhs_scale": scaled_by(rhs_scale, pair[1])}

    form = {"preferred_element_type": jnp.float32, "precision": "highest", "axis_name": "tp"}

    def gather(lhs: Any, lhs_scale: Any, rhs: Any, rhs_scale: Any) -> jax.Array:
        return jtf.all_gather_matmul(lhs, rhs, **form, **scales(lhs_scale, rhs_scale))

    def gated(lhs: Any, lhs_scale: Any, rhs: Any, rhs_scale: Any, gate: Any, gate_scale: Any, bias: Any) -> jax.Array:
        last = {"gate": gate, "gate_scale": gate_scale, "bias": bias, "activation": "silu"}
        return jtf.all_gather_matmul(lhs, rhs, **form, **scales(lhs_scale, rhs_scale), **last)

    def transposed(lhs: Any, lhs_scale: Any, rhs: Any, rhs_scale: Any) -> jax.Array:
        turned = rhs_scale.T if rhs_scale.ndim else rhs_scale
        return jtf.all_gather_matmul(lhs, rhs.T, rhs_transposed=True, **form, **scales(lhs_scale, turned))

    def scatter(lhs: Any, lhs_scale: Any, rhs: Any, rhs_scale: Any) -> jax.Array:
        return jtf.matmul_reduce_scatter(lhs, rhs, **form, **scales(lhs_scale, rhs_scale))

    def reduce(lhs: Any, lhs_scale: Any, rhs: Any, rhs_scale: Any) -> jax.Array:
        found = jtf.matmul_all_reduce(lhs, rhs, bias=jnp.full(N, 0.5), **form, **scales(lhs_scale, rhs_scale))
        return jax.lax.pcast(found, "tp", to="varying")

    operands = lhs, lhs_scale, rhs, rhs_scale
    whole = left.reshape(-1, K)
    products = np.einsum("mk,rkn->rmn", whole, right)
    total = np.einsum("rmk,rkn->mn", deeper, lower)

    def check(found: np.ndarray, wanted: np.ndarray) -> None:
        np.testing.assert_allclose(found, wanted, atol=2e-6 * np.max(np.abs(wanted)), rtol=1e-4)

    check(on_ranks(mesh, gather, *operands), products)
    check(on_ranks(mesh, transposed, *operands), products)
    inner = np.einsum("mk,rkn->rmn", whole, gates)
    outer = products + np.asarray(bias, np.float64)[:, None]
    check(on_ranks(mesh, gated, *operands, gate, gate_scale, bias), silu(inner) * outer)
    check(on_ranks(mesh, scatter, deep, deep_scale, low, low_scale), total.reshape(world, M, N))
    check(on_ranks(mesh, reduce, deep, deep_scale, low, low_scale), np.broadcast_to(total + 0.5, (world, *total.shape)))


@pytest.mark.covers(1)
@pytest.mark.parametrize("kinds", [("tensor", "tensor"), ("row", "row"), ("block", "block")])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_sums_in_the_simulator(cpu_mesh: Any, dtype: str, kinds: tuple[str, str]) -> None:
    """The kernels that reduce, from the public functions on: of what is scattered, the second dimension."""
    mesh, block_k = cpu_mesh(2, "tp"), 128 if "block" in kinds else 32
    lhs, lhs_scale, left = parts(dtype, kinds[0], (3 * 12, 256), 2, 0)
    rhs, rhs_scale, right = parts(dtype, kinds[1], (256, 48), 2, 1)
    residual = jax.random.normal(jax.random.key(4), (2, 3, 12, 48)).astype(jnp.bfloat16)
    tile = {"kernel": "hopper", "block_m": 32, "block_n": 32, "block_k": block_k, "num_stages": 2, "programs": 2}
    tile |= {"chunk": 128}
    form = {"axis_name": "tp", "rhs_transposed": True, "implementation": "simulate", "config": tile}

    def scales(lhs_scale: jax.Array, rhs_scale: jax.Array) -> dict[str, Any]:
        lhs_scale = lhs_scale.reshape(3, 12, -1) if lhs_scale.ndim else lhs_scale
        return {"lhs_scale": lhs_scale, "rhs_scale": rhs_scale.T if rhs_scale.ndim else rhs_scale}

    def scatter(lhs: Any, lhs_scale: Any, rhs: Any, rhs_scale: Any, residual: Any) -> jax.Array:
        own = {"scatter_dimension": 1, "preferred_element_type": jnp.float32, "residual": residual[:, :6]}
        return jtf.matmul_reduce_scatter(lhs.reshape(3, 12, -1), rhs.T, **form, **own, **scales(lhs_scale, rhs_scale))

    def reduce(lhs: Any, lhs_scale: Any, rhs: Any, rhs_scale: Any) -> jax.Array:
        found = jtf.matmul_all_reduce(lhs.reshape(3, 12, -1), rhs.T, **form, **scales(lhs_scale, rhs_scale))
        return jax.lax.pcast(found, "tp", to="varying")

    total = np.einsum("rmk,rkn->mn", left, right).reshape(3, 12, 48)
    operands = lhs, lhs_scale, rhs, rhs_scale
    bound = {"atol": 2**-8 * np.max(np.abs(total)), "rtol": 2**-7}
    with simulator.simulating(seed=1):
        found = on_ranks(mesh, reduce, *operands)
        np.testing.assert_allclose(found, np.broadcast_to(total, (2, *total.shape)), **bound)
        found = on_ranks(mesh, scatter, *operands, residual)
    wanted = total.reshape(3, 2, 6, 48).swapaxes(0, 1) + np.asarray(residual[:, :, :6], np.float64)
    np.testing.assert_allclose(found, wanted, **bound)


def test_gradients(cpu_mesh: Any) -> None:
    """Of operands of 16 bits and of scales, as of the dequantised product; what has 8 bits gets none, or its dtype."""
    mesh = cpu_mesh(2, "tp")
    x = normal(2, M, K)
    rhs, rhs_scale, right = parts("int8", "row", (K, N), 2, 1)
    ct = np.asarray(jax.random.normal(jax.random.key(5), (2, 2 * M, N)), np.float64)

    def backward(x: jax.Array, rhs: jax.Array, scale: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
        def product(x: jax.Array, scale: jax.Array) -> jax.Array:
            return jtf.all_gather_matmul(x[0], rhs[0], "tp", rhs_scale=scale[0], precision="highest")

        return jax.vjp(product, x, scale)[1](ct[0])

    run = jax.jit(jax.shard_map(backward, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))
    found, of_scale = run(x, rhs, rhs_scale, jnp.asarray(ct, jnp.float32))
    wanted = np.einsum("rmn,rkn->mk", ct, right).reshape(2, M, K)
    np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max(), rtol=1e-4)
    raw = np.einsum("mk,rkn->rmn", np.asarray(x, np.float64).reshape(-1, K), np.asarray(rhs, np.float64))
    wanted = np.sum(raw * ct, axis=1, keepdims=True)
    np.testing.assert_allclose(of_scale, wanted, atol=2e-6 * np.abs(wanted).max(), rtol=1e-4)

    weights, scale = jtf.quantize(normal(K, N), "float8_e4m3fn", block=(-1, 1))
    plain = Mesh(np.array(jax.devices("cpu")[:1]), ("one",))

    def of_eight_bits(w: jax.Array) -> jax.Array:
        return jnp.sum(jtf.all_gather_matmul(x[0], w, "one", rhs_scale=scale)) * 1e6

    grad = jax.shard_map(jax.grad(of_eight_bits), mesh=plain, in_specs=P(), out_specs=P(), check_vma=False)(weights)
    assert grad.dtype == weights.dtype and np.isnan(np.asarray(grad, np.float32)).any()  # beyond 448


@pytest.mark.parametrize("operation", [jtf.all_gather_matmul, jtf.matmul_reduce_scatter, jtf.matmul_all_reduce])
def test_gradients_of_scales_of_two_operands(cpu_mesh: Any, operation: Any) -> None:
    """Which a kernel would take."""
    lhs, lhs_scale, _ = parts("int8", "row", (8, 128), 2, 0)
    rhs, rhs_scale, right = parts("int8", "row", (128, 16), 2, 1)

    def backward(lhs: Any, lhs_scale: Any, rhs: Any, rhs_scale: Any) -> jax.Array:
        def total(scale: jax.Array) -> jax.Array:
            how = {"rhs_transposed": True, "preferred_element_type": jnp.float32, "rhs_scale": rhs_scale.T}
            return jnp.sum(operation(lhs, rhs.T, "tp", lhs_scale=scale, **how))

        return jax.grad(total)(lhs_scale)

    everybodys = np.broadcast_to(np.sum(right, axis=0), right.shape)  # whose columns multiply a rank's rows
    columns = everybodys if operation is jtf.all_gather_matmul else right
    wanted = np.einsum("rmk,rkn->rm", np.asarray(lhs, np.float64), columns)[..., None]
    found = on_ranks(cpu_mesh(2, "tp"), backward, lhs, lhs_scale, rhs, rhs_scale)
    np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max(), rtol=1e-4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("operation", [jtf.all_gather_matmul, jtf.matmul_reduce_scatter, jtf.matmul_all_reduce])
def test_what_is_taken_on_a_gpu(operation: Any, transposed: bool) -> None:
    """A kernel of as many rows as were measured, or if it is asked for; with an epilogue, whose operands come last."""

    def text(rows: int, **how: Any) -> str:
        shapes = (
            ((rows, 512), "float8_e4m3fn"),
            ((512, 512), "float8_e4m3fn"),
            ((rows, 1), "float32"),
            ((), "float32"),
            ((512,), "float32"),
        )

        def call(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, bias: Any) -> jax.Array:
            own = {"lhs_scale": lhs_scale, "rhs_scale": rhs_scale, "bias": bias, "activation": "silu"}
            return operation(lhs, rhs, "tp", rhs_transposed=transposed, **own, **how)

        program = jax.shard_map(call, mesh=mesh_of(2), in_specs=P(), out_specs=P(), check_vma=False)
        return lower_for_cuda(program, *(jax.ShapeDtypeStruct(*each) for each in shapes))

    assert "dot_general" in text(512)
    assert ("dot_general" in text(2048)) == (not transposed)
    assert ("dot_general" in text(8192)) == (not transposed)
    if transposed:
        assert "dot_general" not in text(512, implementation="fused")
    else:
        with pytest.raises(NotImplementedError, match=r"give rhs as \[N, K\], with rhs_transposed=True"):
            text(512, implementation="fused")


def test_what_does_not_fit_is_said(cpu_mesh: Any) -> None:
    x, w = jnp.ones((8, 192), jnp.int8), jnp.ones((192, 16), jnp.int8)
    one = jnp.float32(1)

    def error(operation: Any, *operands: jax.Array, **keywords: Any) -> str:
        run = jax.shard_map(
            functools.partial(operation, axis_name="tp", **keywords),
            mesh=cpu_mesh(2, "tp"),
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        )
        with pytest.raises((ValueError, NotImplementedError)) as raised:
            run(*operands)
        return str(raised.value)

    gather, scatter = jtf.all_gather_matmul, jtf.matmul_reduce_scatter
    assert "takes lhs_scale of shape [] (tensor), [8, 1] (row), [8, 2] (block) here, not [8]" in error(
        gather, x, w, lhs_scale=jnp.ones(8)
    )
    assert "takes rhs_scale of shape [] (tensor), [1, 16] (row), [2, 1] (block) here, not [16, 1]" in error(
        gather, x, w, rhs_scale=jnp.ones((16, 1))
    )
    assert "takes rhs_scale as float32, not bfloat16" in error(gather, x, w, rhs_scale=one.astype(jnp.bfloat16))
    assert "and this one is float32" in error(gather, x.astype(jnp.float32), w, lhs_scale=one)
    assert "takes lhs_scale by blocks of 128 where each rank has a multiple of 128" in error(
        scatter, x, w, lhs_scale=jnp.ones((8, 2))
    )
    assert "takes gate_scale with a gate only" in error(gather, x, w, rhs_scale=one, gate_scale=one)
    several = functools.partial(gather, rhs=(w, w))
    for name, value in (("gate", w), ("residual", jnp.ones((16, 16))), ("gate_scale", one)):
        for scales in ({}, {"lhs_scale": one, "rhs_scale": (one, one)}):
            assert f"takes no {name} with a tuple of rhs" in error(several, x, **scales, **{name: value})
    assert "not an empty tuple" in error(functools.partial(gather, rhs=()), x, lhs_scale=one)
    on = {"lhs_scale": one, "rhs_scale": one, "implementation": "simulate"}
    for operation in (scatter, jtf.matmul_all_reduce):
        assert "hopper: tensor cores take 8 bits along K: give rhs as [N, K]" in error(operation, x, w, **on)
        assert "portable: it takes no operands with scales" in error(operation, x, w, **on)
    assert "hopper: with scales it takes rows to gather or scatter, not columns" in error(
        scatter, x, w.T, scatter_dimension=1, rhs_transposed=True, **on
    )
    narrow = {"kernel": "hopper", "block_k": 16}
    assert (
        "has to hold 16 columns of what arrives, and with block_m=128, block_n=128 and block_k=16 it holds 8"
        in error(scatter, x, w.T, rhs_transposed=True, config=narrow, **on)
    )
    assert "results of the dtype of partial sums, bfloat16, not float32" in error(
        jtf.matmul_all_reduce,
        *(x, w.T),
        **{"preferred_element_type": jnp.float32, "rhs_transposed": True, "config": {"kernel": "hopper"}},
        **on,
    )
    for kernel, why in (
        ("hopper", "it multiplies 8 bits by 8 bits, not bfloat16 by int8"),
        ("hopper_few", "it reads 8 bits along K: give rhs as [N, K]"),
        ("portable", "it takes no operands with scales"),
    ):
        weights_alone = {"rhs_scale": one, "implementation": "simulate", "config": {"kernel": kernel}}
        assert why in error(jtf.matmul_all_reduce, x.astype(jnp.bfloat16), w, **weights_alone)
    assert "it takes weights of 8 bits under rows of 16, not rows of 8 bits" in error(
        gather, x, w, config={"kernel": "few"}, **on
    )
    wide = error(gather, x.astype(jnp.float32), w, rhs_scale=one, implementation="fused")
    assert "float16 and bfloat16 by either, not float32 by int8: quantize both, or rhs alone" in wide


@pytest.mark.parametrize("return_gathered", [False, True])
def test_several_weights_with_scales(cpu_mesh: Any, return_gathered: bool) -> None:
    mesh = cpu_mesh(2, "tp")
    lhs, lhs_scale, left = parts("int8", "row", (M, K), 2, 0)
    rhs, rhs_scale, right = parts("int8", "row", (K, N), 2, 1)
    wide = normal(2, K, 40, seed=2).astype(jnp.bfloat16)

    def local(lhs: jax.Array, lhs_scale: jax.Array, rhs: jax.Array, rhs_scale: jax.Array, wide: jax.Array) -> Any:
        weights, scales = (rhs[0], wide[0]), (rhs_scale[0], None)
        form = {"lhs_scale": lhs_scale[0], "rhs_scale": scales, "preferred_element_type": jnp.float32}
        found = jtf.all_gather_matmul(lhs[0], weights, "tp", return_gathered=return_gathered, **form)
        return jax.tree.map(lambda x: x[None], found)

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))
    outs = run(lhs, lhs_scale, rhs, rhs_scale, wide)
    if return_gathered:
        outs, gathered = outs
        np.testing.assert_array_equal(gathered, np.stack([np.asarray(lhs).reshape(-1, K)] * 2))
    whole = left.reshape(-1, K)
    for found, weights in zip(outs, (right, np.asarray(wide, np.float64)), strict=True):
        wanted = np.einsum("mk,rkn->rmn", whole, weights)
        np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max(), rtol=1e-4)


@pytest.mark.parametrize(
    ("kernel", "kind", "dtype"), [("hopper_few", "block", "int8"), ("few", "row", "float8_e4m3fn")], ids=str
)
def test_weights_alone_in_the_simulator(cpu_mesh: Any, kernel: str, kind: str, dtype: str) -> None:
    """Of 8 bits under rows of 16, in the kernels for few rows, from the public functions on."""
    mesh = cpu_mesh(2, "tp")
    x = jax.random.normal(jax.random.key(0), (2, 6, 128)).astype(jnp.bfloat16)
    rhs, rhs_scale, right = parts(dtype, kind, (128, 32), 2, 1)
    left = np.asarray(x, np.float64)
    config = {"kernel": kernel, "block_m": 16, "block_n": 16, "block_k": 32, "num_stages": 2}
    form = {"axis_name": "tp", "rhs_transposed": True, "implementation": "simulate", "config": config}
    form |= {"preferred_element_type": jnp.float32}

    def products(x: jax.Array, rhs: jax.Array, scale: jax.Array) -> jax.Array:
        weights = rhs.T, {**form, "rhs_scale": scale.T}
        gathered = jtf.all_gather_matmul(x, weights[0], **weights[1])
        scattered = jtf.matmul_reduce_scatter(x, weights[0], **weights[1])
        reduced = jtf.matmul_all_reduce(x, weights[0], **weights[1])
        return jnp.concatenate([gathered, scattered, jax.lax.pcast(reduced, "tp", to="varying")])

    with simulator.simulating(seed=1):
        found = on_ranks(mesh, products, x, rhs, rhs_scale)
    total = np.einsum("rmk,rkn->mn", left, right)
    wanted = [np.concatenate([*(left @ right[i]), total[3 * i : 3 * i + 3], total]) for i in range(2)]
    np.testing.assert_allclose(found, wanted, atol=2e-6 * np.max(np.abs(wanted)), rtol=1e-5)


@pytest.mark.parametrize(
    ("module", "rows", "n", "scales", "gate", "columns"),
    [
        (gather_ops, 2048, 14336, "row", False, 256),
        (gather_ops, 2048, 14336, "block", False, 256),
        (gather_ops, 2048, 14336, "block", True, 256),
        (gather_ops, 2048, 6144, "block", False, 128),  # 2.9 tiles of 256 columns for each program
        (gather_ops, 8192, 1536, "row", False, 128),  # likewise
        (scatter_ops, 8192, 8192, "row", False, 256),
        (scatter_ops, 8192, 8192, "block", False, 128),
        (reduce_ops, 8192, 8192, "block", False, 128),
    ],
)  # fmt: skip
def test_how_wide_tiles_of_eight_bits_are(
    module: Any, rows: int, n: int, scales: Any, gate: bool, columns: int
) -> None:
    form: dict[str, Any] = {"rhs_transposed": True, "lhs_scales": scales, "rhs_scales": scales, "out_dtype": "bfloat16"}
    form |= {"epilogue": Epilogue("silu", ("gate",)), "gate_scales": scales} if gate else {}
    call = product_call(module, rows, 8192, n, world=2, dtype="float8_e4m3fn", **form)
    assert by_shape(module, "hopper", call).block_n == columns


@pytest.mark.parametrize(
    ("operation", "rows", "dtype", "taken"),
    [
        (jtf.matmul_all_reduce, 16, "bfloat16", True),
        (jtf.matmul_all_reduce, 128, "int8", True),
        (jtf.matmul_all_reduce, 256, "bfloat16", False),  # not measured
        (jtf.matmul_reduce_scatter, 16, "bfloat16", False),
        (jtf.matmul_all_reduce, 16, "float32", False),  # no kernel
    ],
)
@pytest.mark.usefixtures("no_code")
def test_which_few_rows_a_kernel_takes_by_default(operation: Any, rows: int, dtype: str, taken: bool) -> None:
    def call(lhs: Any, rhs: Any, rhs_scale: Any, bias: Any, lhs_scale: Any = None) -> jax.Array:
        scales = {"lhs_scale": lhs_scale, "rhs_scale": rhs_scale, "bias": bias}
        return operation(lhs, rhs, "tp", rhs_transposed=True, **scales)

    shapes = [((rows, 512), dtype), ((512, 512), "int8"), ((512, 1), "float32"), ((512,), "float32")]
    shapes += [((), "float32")] if dtype == "int8" else []
    program = jax.shard_map(call, mesh=mesh_of(2), in_specs=P(), out_specs=P(), check_vma=False)
    text = lower_for_cuda(program, *(jax.ShapeDtypeStruct(*each) for each in shapes))
    assert ("dot_general" not in text) == taken
