"""`ragged_dot` of operands of 8 bits with scales, against f64 of what the scales make of the operands."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtaxfree as jtf
from jaxtaxfree.ops.operand import Operand
from jaxtaxfree.ops.ragged_dot.common import Call
from jaxtaxfree.ops.ragged_dot.variants import VARIANTS
from jaxtaxfree.ops.variant import named
from jaxtaxfree.target import HOPPER
from tests.helpers.ragged_dot_parity import check_blocks
from tests.helpers.support import TRITON_CALL, fails, lower_for_cuda, mesh_of

E4M3 = "float8_e4m3fn"
SIZES = (5, 0, 11, 3)
M, K, N = 24, 64, 40  # five rows are behind the last group


def groups_of(w: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    return jax.vmap(lambda each: jtf.quantize(each, dtype, block=(1, -1)))(w)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtypes", [("float8_e4m3fn", "float8_e4m3fn"), ("int8", "int8"), ("bfloat16", "int8")])
def test_ragged_dot(dtypes: tuple[str, str], transposed: bool, gated: bool) -> None:
    x = jax.random.normal(jax.random.key(0), (M, K)).astype(jnp.bfloat16)
    weights = [groups_of(jax.random.normal(jax.random.key(i), (4, N, K)), dtypes[1]) for i in (1, 2)[: 1 + gated]]
    sizes = jnp.array(SIZES, jnp.int32)
    left, x_scale = np.asarray(x, np.float64), None
    if dtypes[0] != "bfloat16":
        x, x_scale = jtf.quantize(x, dtypes[0], block=(1, -1))
        left = np.asarray(jtf.dequantize(x, x_scale), np.float64)
    group = np.repeat(np.arange(4), SIZES)
    products = []
    for w, scale in weights:
        right = np.asarray(w, np.float64) * np.asarray(scale, np.float64)
        out = np.einsum("mk,mnk->mn", left[: sum(SIZES)], right[group])
        products.append(np.concatenate([out, np.zeros((M - len(out), N))]))
    wanted = products[0] * (products[1] / (1 + np.exp(-products[1])) if gated else 1)

    def call(x: jax.Array, *weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        named = [each if transposed else tuple(part.swapaxes(1, 2) for part in each) for each in weights]
        how: dict[str, Any] = {"lhs_scale": x_scale, "rhs_scale": named[0][1], "rhs_transposed": transposed}
        how |= {"gate": named[1][0], "gate_scale": named[1][1], "activation": "silu"} if gated else {}
        return jtf.ragged_dot(x, named[0][0], sizes, preferred_element_type=jnp.float32, **how)

    found = jax.jit(call)(x, *weights)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    assert jtf.ragged_dot(x, weights[0][0], sizes, rhs_scale=weights[0][1], rhs_transposed=True).dtype == jnp.bfloat16


SCALES_OF_BLOCKS = ((True, True), (True, False), (False, True))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("blocks", SCALES_OF_BLOCKS)
@pytest.mark.parametrize("dtypes", [("float8_e4m3fn", "float8_e4m3fn"), ("int8", "int8"), ("bfloat16", "int8")])
def test_scales_of_blocks(dtypes: tuple[str, str], blocks: tuple[bool, bool], transposed: bool) -> None:
    """Blocks that are not full, one that is 0, and NaN where no row of a group meets it."""
    m, k, n = 24, 272, 200
    draw = np.random.default_rng(0)
    small = lambda *shape: draw.integers(-8, 9, shape).astype(np.float32)  # noqa: E731
    x, weights = small(m, k), [small(4, n, k) for _ in range(2)]
    x_scale = draw.uniform(0.5, 2, (m, 3 if blocks[0] else 1)).astype(np.float32)
    scales = [draw.uniform(0.5, 2, (4, 2, 3) if blocks[1] else (4, n, 1)).astype(np.float32) for _ in range(2)]
    scales[0][2, 1, 0] = 0.0
    expand = lambda scale, shape: np.kron(scale, np.ones((1, 128) if len(shape) == 2 else (1, 128, 128)))[  # noqa: E731
        tuple(map(slice, shape))
    ]
    left = x.astype(np.float64)
    if dtypes[0] != "bfloat16":
        left = left * (expand(x_scale, x.shape) if blocks[0] else x_scale)
    group = np.repeat(np.arange(4), SIZES)
    products = []
    for w, scale in zip(weights, scales, strict=True):
        right = w.astype(np.float64) * (expand(scale, w.shape) if blocks[1] else scale)
        out = np.einsum("mk,mnk->mn", left[: len(group)], right[group])
        products.append(np.concatenate([out, np.zeros((m - len(out), n))]))
        scale[1] = np.nan  # of the empty group
    x_scale[len(group) :] = np.nan  # of nobody's rows
    wanted = products[0] * products[1]
    lie = lambda w: w if transposed else w.swapaxes(1, 2)  # noqa: E731
    how: dict[str, Any] = {"gate": jnp.asarray(lie(weights[1])).astype(dtypes[1]), "rhs_scale": lie(scales[0])}
    how |= {"lhs_scale": x_scale} if dtypes[0] != "bfloat16" else {}

    @jax.jit
    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        return jtf.ragged_dot(
            x, w, jnp.array(SIZES), rhs_transposed=transposed, gate_scale=lie(scales[1]), precision="highest",
            preferred_element_type=jnp.float32, **how,
        )  # fmt: skip

    found = call(jnp.asarray(x).astype(dtypes[0]), jnp.asarray(lie(weights[0])).astype(dtypes[1]))
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


def test_scales_of_blocks_by_the_kernel() -> None:
    """From the call to the kernel's bundle of scales, in the simulator."""
    check_blocks(mesh_of(1, "tp"), "simulate")


@pytest.mark.parametrize(
    ("scales", "lhs", "config", "reason"),
    [
        (("lhs_blocks",), E4M3, {"block_k": 128}, None),
        (
            ("rhs_blocks",),
            "bfloat16",
            {"turned": True, "block_k": 128},
            "both operands of 8 bits, of tiles that are not",
        ),
        (("rhs_blocks",), E4M3, {"turned": True, "block_k": 128}, "both operands of 8 bits, of tiles that are not"),
        (("lhs_blocks",), E4M3, {"block_k": 64}, "a step of K has 128, not 64: give block_k"),
        (("rhs_blocks", "gate"), E4M3, {"block_k": 128}, "it takes them of rhs and of its gate, or of neither"),
    ],
)
def test_what_the_kernel_does_not_take_of_blocks(
    scales: tuple[str, ...], lhs: str, config: dict[str, Any], reason: str | None
) -> None:
    call = Call(
        m=4096, k=512, n=512, groups=4, operand=Operand(dtype=jnp.dtype(lhs)), narrow=Operand(dtype=jnp.dtype(E4M3)),
        scales=scales, out_dtype=np.dtype(np.float32), precision="", rhs_transposed=True, gated="gate" in scales,
        target=HOPPER,
    )  # fmt: skip
    variant = named("ragged_dot", VARIANTS, "hopper")
    found = variant.refuses(call, variant.Config(**config))
    assert len(found) == (reason is not None) and (reason or "") in "".join(found)


def test_nan_of_a_block_stays_with_its_rows_and_columns() -> None:
    x, w = jnp.ones((6, 256), jnp.int8), jnp.ones((2, 256, 256), jnp.int8)
    x_scale, w_scale = np.ones((6, 2), np.float32), np.ones((2, 2, 2), np.float32)
    x_scale[1, 1], w_scale[1, 0, 1] = np.nan, np.nan
    out = jtf.ragged_dot(x, w, jnp.array([3, 2]), rhs_transposed=True, lhs_scale=x_scale, rhs_scale=w_scale)
    wanted = np.zeros((6, 256), bool)
    wanted[1] = wanted[3:5, :128] = True
    np.testing.assert_array_equal(np.isnan(np.asarray(out, np.float32)), wanted)


@pytest.mark.parametrize(
    ("transposed", "config", "reason"),
    [
        (
            True,
            {"block_k": 64},
            "ragged_dot ('hopper')",
        ),
        (False, {}, "it takes all operands of 8 bits, rhs as [G, N, K] with rhs_transposed=True"),
    ],
)
def test_a_kernel_that_is_named_says_why_it_refuses_blocks(
    transposed: bool, config: dict[str, Any], reason: str
) -> None:
    """And nothing of f32, which operands would become for another kernel. XLA takes the call where it is left to us."""
    x, w = jnp.ones((6, 256), jnp.int8), jnp.ones((2, 256, 256), jnp.int8)
    x_scale, w_scale = np.ones((6, 2), np.float32), np.ones((2, 2, 2), np.float32)

    def call(x: jax.Array, w: jax.Array, implementation: str | None) -> jax.Array:
        return jtf.ragged_dot(
            x, w, jnp.array([3, 2]), rhs_transposed=transposed, lhs_scale=x_scale, rhs_scale=w_scale,
            implementation=implementation, config={"kernel": "hopper"} | config,
        )  # fmt: skip

    with fails(NotImplementedError, reason) as caught:
        lower_for_cuda(functools.partial(call, implementation="fused"), x, w)
    assert "float" not in str(caught.value)
    assert TRITON_CALL not in lower_for_cuda(functools.partial(call, implementation=None), x, w)


WIDE = 200  # columns, so that a second block is smaller


def narrow_operands(dtypes: tuple[str, str]) -> tuple[jax.Array, jax.Array, dict[str, Any], np.ndarray]:
    """lhs, rhs [G, K, N], their scales, and the product in f64."""
    x = jax.random.normal(jax.random.key(0), (M, K)).astype(jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (4, WIDE, K)).astype(jnp.bfloat16)
    left, right, scales = x, w, {}
    if dtypes[1] != "bfloat16":
        w, scale = groups_of(w, dtypes[1])
        right, scales["rhs_scale"] = np.asarray(w, np.float64) * np.asarray(scale, np.float64), scale.swapaxes(1, 2)
    if dtypes[0] != "bfloat16":
        x, scales["lhs_scale"] = jtf.quantize(x, dtypes[0], block=(1, -1))
        left = jtf.dequantize(x, scales["lhs_scale"])
    rows = np.asarray(left, np.float64)[: sum(SIZES)], np.asarray(right, np.float64)[np.repeat(np.arange(4), SIZES)]
    wanted = np.pad(np.einsum("mk,mnk->mn", *rows), [(0, M - sum(SIZES)), (0, 0)])
    return x, w.swapaxes(1, 2), scales, wanted


@pytest.mark.parametrize("to", [E4M3, "int8"])
@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), (E4M3, E4M3), ("bfloat16", "int8")])
def test_results_of_8_bits(dtypes: tuple[str, str], to: str) -> None:
    """By a scale that is given, and by blocks of 1 x 128. Rows behind the last group are zeros, whose scale is 1."""
    x, w, scales, wanted = narrow_operands(dtypes)
    largest = {E4M3: 448.0, "int8": 127.0}[to]

    @functools.partial(jax.jit, static_argnames="blocks")
    def call(x: jax.Array, w: jax.Array, out_scale: jax.Array, blocks: bool = False) -> Any:
        how: dict[str, Any] = {"preferred_element_type": to, "out_scale": "block" if blocks else out_scale, **scales}
        return jtf.ragged_dot(x, w, jnp.array(SIZES), **how)

    # Half of the results are too large for the given one: they become the largest number.
    given = jnp.float32(np.median(np.abs(wanted[: sum(SIZES)])) / largest)
    found, (values, scale) = call(x, w, given), call(x, w, given, blocks=True)
    assert found.dtype == values.dtype == to and scale.dtype == jnp.float32 and scale.shape == (M, 2)
    blocks = np.abs(np.pad(wanted, [(0, 0), (0, 256 - WIDE)])).reshape(M, 2, 128).max(2)
    # The result is bf16 before.
    np.testing.assert_allclose(scale, np.where(blocks == 0, 1, blocks / largest), rtol=2**-8)
    for out, factor in ((found, float(given)), (values, np.repeat(scale, 128, axis=1)[:, :WIDE])):
        units = np.clip(wanted / factor, -largest, largest)
        step = 0.5 if to == "int8" else 2**-4 * np.abs(units) + 2**-9
        out = np.asarray(out.astype(jnp.float32), np.float64)
        assert np.all(np.abs(out - units) <= step + 2**-7 * np.abs(units) + 1e-5 * largest)
        assert not out[sum(SIZES) :].any()


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), (E4M3, E4M3)])
@pytest.mark.parametrize("config", [None, {"kernel": "portable"}])
def test_results_of_8_bits_of_kernels(dtypes: tuple[str, str], config: dict[str, Any] | None) -> None:
    """What the kernel's result becomes, in the simulator, is what XLA's becomes."""
    x, w, scales, _ = narrow_operands(dtypes)
    if transposed := config is None:
        w, scales = w.swapaxes(1, 2), {name: s.swapaxes(1, 2) if s.ndim == 3 else s for name, s in scales.items()}
        config = {"kernel": "hopper", "block_n": 32, "block_k": 32, "num_stages": 2, "programs": 3}
    how: dict[str, Any] = {"preferred_element_type": E4M3, "out_scale": "block", "rhs_transposed": transposed, **scales}
    call = functools.partial(jtf.ragged_dot, x, w, jnp.array(SIZES), **how)
    found, plain = (
        np.asarray(jtf.dequantize(*call(implementation=implementation, config=own)), np.float64)
        for implementation, own in (("simulate", config), ("xla", None))
    )
    assert found.any()
    # Sums in another order may fall on the other side of a boundary of bf16 and of e4m3.
    np.testing.assert_allclose(found, plain, rtol=2**-3 + 2**-6, atol=1e-3 * np.abs(plain).max())
    assert np.mean(found != plain) < 0.02


def test_two_products_chain_without_a_cast() -> None:
    x, w, scales, hidden = narrow_operands((E4M3, E4M3))
    down, down_scale = groups_of(jax.random.normal(jax.random.key(2), (4, N, WIDE)), E4M3)
    right = np.asarray(down, np.float64) * np.asarray(down_scale, np.float64)
    wanted = np.einsum("mk,mnk->mn", hidden[: sum(SIZES)], right[np.repeat(np.arange(4), SIZES)])

    @jax.jit
    def layer(x: jax.Array, w: jax.Array, down: jax.Array) -> jax.Array:
        sizes = jnp.array(SIZES)
        values, scale = jtf.ragged_dot(x, w, sizes, None, E4M3, out_scale="block", **scales)
        return jtf.ragged_dot(
            values, down, sizes, None, jnp.float32, rhs_transposed=True, lhs_scale=scale, rhs_scale=down_scale
        )

    found = np.asarray(layer(x, w, down), np.float64)[: sum(SIZES)]
    # A rounding to 3 bits of mantissa.
    error = np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2))
    assert 0.01 < error < 0.04


def test_gradients_and_maps_of_results_of_8_bits() -> None:
    """As of the three products: those of the product and of what rounds it."""
    x, w, _, wanted = narrow_operands(("bfloat16", "bfloat16"))
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    wide, sizes = 4 * float(np.abs(wanted).max()), jnp.array(SIZES)

    def call(x: jax.Array, w: jax.Array, out_scale: Any) -> Any:
        return jtf.ragged_dot(x, w, sizes, "highest", E4M3, out_scale=out_scale)

    def loss(x: jax.Array, w: jax.Array, out_scale: jax.Array) -> jax.Array:
        return jnp.sum(call(x, w, out_scale).astype(jnp.float32))

    # Nothing is cut off, so the gradient is that of the product over the scale; the cotangent is 1, which e4m3 has.
    of_x, of_w, of_scale = jax.jit(jax.grad(loss, (0, 1, 2)))(x, w, jnp.float32(wide / 448))
    group = np.repeat(np.arange(4), SIZES)
    right = np.asarray(w, np.float64).sum(2)[group] * 448 / wide
    np.testing.assert_allclose(of_x[: len(group)], right, rtol=1e-4, atol=1e-5 * np.abs(right).max())
    left = np.stack([np.asarray(x, np.float64)[: len(group)][group == i].sum(0) for i in range(4)]) * 448 / wide
    np.testing.assert_allclose(of_w, np.repeat(left[:, :, None], WIDE, 2), rtol=1e-4, atol=1e-5 * np.abs(left).max())
    total = -np.sum(wanted) * (448 / wide) ** 2
    np.testing.assert_allclose(of_scale, total, rtol=1e-3, atol=1e-5 * np.sum(np.abs(wanted)) * (448 / wide) ** 2)
    several = jnp.stack([x, -2 * x])
    values, scale = jax.jit(jax.vmap(lambda x: call(x, w, "block")))(several)
    for i in range(2):
        each, own = call(several[i], w, "block")
        np.testing.assert_array_equal(values[i].astype(jnp.float32), each.astype(jnp.float32))
        np.testing.assert_array_equal(scale[i], own)


def test_wrong_sizes_make_scales_nan() -> None:
    x, w = jnp.ones((8, 16)), jnp.ones((2, 16, 4))
    for dtype in (E4M3, "int8"):
        values, scale = jtf.ragged_dot(x, w, jnp.array([9, 9]), preferred_element_type=dtype, out_scale="block")
        assert np.isnan(np.asarray(jtf.dequantize(values, scale))).all()
    values = jtf.ragged_dot(x, w, jnp.array([-1, 2]), preferred_element_type=E4M3, out_scale=jnp.float32(1))
    assert np.isnan(np.asarray(values, np.float32)).all()


@pytest.mark.parametrize("lhs", [E4M3, "bfloat16"])
def test_results_of_8_bits_for_cuda(lhs: str) -> None:
    """The kernel's result is bf16: 8 bits are made behind it."""
    shape = jax.ShapeDtypeStruct
    operands = [shape((2048, 256), lhs), shape((4, 128, 256), lhs), shape((4,), "int32")]
    scales = {} if lhs == "bfloat16" else {"lhs_scale": jnp.float32(1), "rhs_scale": jnp.float32(1)}
    how: dict[str, Any] = {"rhs_transposed": True, "preferred_element_type": E4M3, "out_scale": "block", **scales}
    text = lower_for_cuda(functools.partial(jtf.ragged_dot, implementation="fused", **how), *operands)
    (kernel,) = [line for line in text.splitlines() if TRITON_CALL in line]
    wanted = "tensor<2048x256xf8E4M3FN>" if lhs == E4M3 else "tensor<2048x256xbf16>"
    assert f"({wanted}" in kernel and kernel.rstrip().endswith("tensor<2048x128xbf16>")
    assert "tensor<2048x128xf8E4M3FN>" in text


def test_what_does_not_fit_is_said() -> None:
    x, w, sizes = jnp.ones((8, 16), jnp.int8), jnp.ones((2, 16, 4), jnp.int8), jnp.array([4, 4])
    with fails(ValueError, "ragged_dot takes rhs_scale of shape [], [2, 1, 4] or [2, 1, 1] here, not [2, 4, 1]"):
        jtf.ragged_dot(x, w, sizes, rhs_scale=jnp.ones((2, 4, 1)))
    with fails(ValueError, "ragged_dot takes lhs_scale of shape [], [8, 1] or [8, 1] here, not [8]"):
        jtf.ragged_dot(x, w, sizes, lhs_scale=jnp.ones(8))
    with fails(ValueError, "takes gate_scale for a gate of float8_e4m3fn, float8_e5m2, int8, and there is none"):
        jtf.ragged_dot(x, w, sizes, gate_scale=jnp.float32(1))
    with fails(ValueError, "takes lhs_scale as float32, not int32"):
        jtf.ragged_dot(x, w, sizes, lhs_scale=jnp.int32(1))
    for out_scale, dtype, reason in (
        ("block", None, "out_scale with a preferred_element_type of float8_e4m3fn, float8_e5m2, int8, not None"),
        ("row", "int8", "out_scale as float32 [] or 'block', not 'row'"),
        (jnp.ones(3), "int8", "out_scale as float32 [] or 'block', not float32[3]"),
        (jnp.int32(1), "int8", "out_scale as float32 [] or 'block', not int32[]"),
    ):
        with fails(ValueError, f"ragged_dot takes {reason}"):
            jtf.ragged_dot(x, w, sizes, out_scale=out_scale, preferred_element_type=dtype)
    scaled = {"rhs_scale": jnp.float32(1)}
    with fails(ValueError, "ragged_dot takes a gate like rhs, [2, 16, 4], not [2, 16, 1]."):
        jtf.ragged_dot(x, w, sizes, gate=w[..., :1], gate_scale=jnp.float32(1), **scaled)
    with fails(ValueError, "ragged_dot takes lhs [M, K] and rhs [G, K, N], not [] and [2, 16, 4]"):
        jtf.ragged_dot(x[0, 0], w, sizes, lhs_scale=jnp.ones((8, 1)))
    with fails(ValueError, "ragged_dot takes lhs [M, K] and rhs [G, K, N], not [8, 16] and [16]"):
        jtf.ragged_dot(x, w[0, :, 0], sizes, **scaled)
    for transposed in (False, True):
        rhs, how = w.swapaxes(1, 2) if transposed else w, {"rhs_transposed": transposed, **scaled}
        with fails(ValueError, "ragged_dot takes group_sizes as integers [2]", "float32[2]"):
            jtf.ragged_dot(x, rhs, sizes.astype(jnp.float32), **how)
        with fails(ValueError, "There is no implementation 'cuda'"):
            jtf.ragged_dot(x, rhs, sizes, implementation="cuda", **how)


@pytest.mark.parametrize(
    ("rows", "lhs", "more", "kernel"),
    [
        (8, "int8", "", True),
        (7, "int8", "", False),
        (2048, "bfloat16", "", True),
        (2049, "bfloat16", "", False),
        (8, "int8", "blocks", True),
        (7, "int8", "blocks", False),
        (256, "int8", "gate", True),
        (2048, "bfloat16", "gate", False),
    ],
)
def test_which_calls_take_the_kernel_of_8_bits(rows: int, lhs: str, more: str, kernel: bool) -> None:
    """So many rows of a group; else values of 8 bits become bf16 in front of a kernel, or f32 with scales of blocks."""
    shape, blocks = jax.ShapeDtypeStruct, more == "blocks"
    operands = [shape((4 * rows, 256), lhs), shape((4, 128, 256), "int8"), shape((4,), "int32")]

    def call(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        scale = jnp.ones((4, 1, 2) if blocks else (4, 128, 1))
        how: dict[str, Any] = {"gate": w + 1, "gate_scale": scale} if more == "gate" else {}
        how |= {"lhs_scale": jnp.ones((4 * rows, 2)) if blocks else jnp.float32(1)} if lhs == "int8" else {}
        return jtf.ragged_dot(x, w, sizes, rhs_transposed=True, rhs_scale=scale, **how)

    text = lower_for_cuda(call, *operands)
    cast = f"tensor<4x128x256x{'f32' if blocks else 'bf16'}>"
    assert (cast not in text) == kernel
    assert (TRITON_CALL in text) == (kernel or not blocks)
