"""A lhs that is quantised before it travels, and results of 8 bits, against f64 of what the scales make of operands."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf

ROWS, COLUMNS = P("tp"), P(None, "tp")
# Of lhs, of rhs [N, K], of its scales of rows, and of the result.
SPECS = {
    jtf.all_gather_matmul: (ROWS, ROWS, ROWS, COLUMNS),
    jtf.matmul_reduce_scatter: (COLUMNS, COLUMNS, P(), ROWS),
    jtf.matmul_all_reduce: (COLUMNS, COLUMNS, P(), P()),
}
M, K, N, WORLD = 12, 512, 136, 2
# The relative step between numbers, at most.
STEP = {"float8_e4m3fn": 2**-4, "int8": 2**-7}


def operands(dtype: str) -> tuple[jax.Array, jax.Array, jax.Array, np.ndarray, np.ndarray]:
    """x, rhs of 8 bits, its scales, and x and what the scales make of rhs in f64."""
    x = jax.random.normal(jax.random.key(0), (M, K)) * jnp.exp(jax.random.normal(jax.random.key(1), (M, 1)))
    x = x.astype(jnp.bfloat16)
    w, scale = jtf.quantize(jax.random.normal(jax.random.key(2), (N, K)), dtype, block=(1, -1))
    return x, w, scale, np.asarray(x, np.float64), np.asarray(jtf.dequantize(w, scale), np.float64)


def run(mesh: Any, operation: Any, x: jax.Array, w: jax.Array, scale: jax.Array, **how: Any) -> Any:
    """The operation of global arrays."""
    *specs, out = SPECS[operation]

    def local(x: jax.Array, w: jax.Array, scale: jax.Array) -> Any:
        return operation(x, w, "tp", rhs_transposed=True, rhs_scale=scale, **how)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=out))(x, w, scale)


def quantised(x: jax.Array, dtype: str, kind: str, parts: int) -> np.ndarray:
    """What quantising the parts of x along K makes of it, f64."""
    block = {"row": (1, -1), "block": (1, 128)}[kind]
    each = [jtf.dequantize(*jtf.quantize(part, dtype, block=block)) for part in jnp.split(x, parts, axis=1)]
    return np.concatenate([np.asarray(part, np.float64) for part in each], axis=1)


@pytest.mark.parametrize(
    ("operation", "dtype", "kind"),
    [
        (jtf.all_gather_matmul, "float8_e4m3fn", "row"),
        (jtf.matmul_reduce_scatter, "int8", "block"),
        (jtf.matmul_all_reduce, "float8_e4m3fn", "row"),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (
                (jtf.all_gather_matmul, "int8", "block"),
                (jtf.matmul_reduce_scatter, "float8_e4m3fn", "row"),
                (jtf.matmul_all_reduce, "int8", "block"),
            )
        ),
    ],
)
def test_lhs_is_quantised_before_it_travels(cpu_mesh: Any, operation: Any, dtype: str, kind: str) -> None:
    mesh = cpu_mesh(WORLD, "tp")
    x, w, scale, _, right = operands(dtype)
    assert run(mesh, operation, x, w, scale, quantize_lhs=kind).dtype == x.dtype
    # Numbers of bf16 often lie in the middle between two of 8 bits.
    x = x.astype(jnp.float32) + 1e-3 * jax.random.normal(jax.random.key(6), x.shape)
    found = run(mesh, operation, x, w, scale, quantize_lhs=kind, preferred_element_type=jnp.bfloat16)
    wanted = quantised(x, dtype, kind, 1 if operation is jtf.all_gather_matmul else WORLD) @ right.T
    # bf16 rounds each part and the sum.
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2**-7, atol=2**-8 * np.abs(wanted).max())
    wide = run(mesh, operation, x, w, scale, quantize_lhs=kind)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("operation", SPECS)
def test_gradients_pass_straight_through(cpu_mesh: Any, operation: Any) -> None:
    mesh = cpu_mesh(WORLD, "tp")
    x, w, scale, left, right = operands("float8_e4m3fn")
    x, ct = x.astype(jnp.float32), np.asarray(jax.random.normal(jax.random.key(5), (M, N)), np.float64)
    *specs, out = SPECS[operation]

    def backward(x: jax.Array, w: jax.Array, scale: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
        def product(x: jax.Array, scale: jax.Array) -> jax.Array:
            how = {"rhs_transposed": True, "rhs_scale": scale, "quantize_lhs": "row", "precision": "highest"}
            return operation(x, w, "tp", **how)

        return jax.vjp(product, x, scale)[1](ct)

    local = jax.shard_map(backward, mesh=mesh, in_specs=(*specs, out), out_specs=(specs[0], specs[2]))
    of_x, of_scale = jax.jit(local)(x, w, scale, jnp.asarray(ct, jnp.float32))
    # Those of the product of x as it was.
    wanted = ct @ right
    np.testing.assert_allclose(of_x, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    wanted = np.sum((np.asarray(w, np.float64) @ left.T) * ct.T, axis=1, keepdims=True)
    np.testing.assert_allclose(of_scale, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        (jtf.all_gather_matmul, "float8_e4m3fn"),
        (jtf.matmul_reduce_scatter, "int8"),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in (
                (jtf.all_gather_matmul, "int8"),
                (jtf.matmul_reduce_scatter, "float8_e4m3fn"),
                (jtf.matmul_all_reduce, "float8_e4m3fn"),
                (jtf.matmul_all_reduce, "int8"),
            )
        ),
    ],
)
def test_results_of_8_bits(cpu_mesh: Any, operation: Any, dtype: str) -> None:
    mesh = cpu_mesh(WORLD, "tp")
    x, w, scale, left, right = operands("int8")
    wanted = left @ right.T
    largest = {"float8_e4m3fn": 448.0, "int8": 127.0}[dtype]
    # One that fits, and one by which half of the results are too large: those become the largest number.
    for out_scale in (np.abs(wanted).max() / largest, np.median(np.abs(wanted)) / largest):
        how = {"out_scale": jnp.float32(out_scale), "preferred_element_type": dtype}
        found = run(mesh, operation, x, w, scale, **how)
        assert found.dtype == dtype
        values = np.asarray(found.astype(jnp.float32), np.float64)
        assert np.abs(values).max() == largest
        clipped = np.clip(wanted / out_scale, -largest, largest)
        step = 0.5 if dtype == "int8" else 2**-4 * np.abs(clipped) + 2**-9
        # bf16 rounds the result, and before that the ranks' parts of a sum.
        gathers = operation is jtf.all_gather_matmul
        slack = 2**-6 * np.abs(clipped) if gathers else 2**-7 * np.abs(wanted).max() / out_scale
        assert np.all(np.abs(values - clipped) <= step + slack)


@pytest.mark.parametrize(
    "operation", [jtf.matmul_reduce_scatter, pytest.param(jtf.matmul_all_reduce, marks=pytest.mark.soak)]
)
def test_two_products_chain_without_a_cast(cpu_mesh: Any, operation: Any) -> None:
    """The blocks of one result are those that the next product takes."""
    mesh = cpu_mesh(WORLD, "tp")
    x, _, _, left, _ = operands("float8_e4m3fn")
    up, up_scale = jtf.quantize(jax.random.normal(jax.random.key(3), (512, K)), "float8_e4m3fn", block=(128, 128))
    down, down_scale = jtf.quantize(jax.random.normal(jax.random.key(4), (32, 512)), "float8_e4m3fn", block=(1, -1))

    def layer(x: jax.Array, up: jax.Array, up_scale: jax.Array, down: jax.Array, down_scale: jax.Array) -> jax.Array:
        narrow = {"preferred_element_type": "float8_e4m3fn", "out_scale": "block", "quantize_lhs": "block"}
        hidden, scale = jtf.all_gather_matmul(x, up, "tp", rhs_transposed=True, rhs_scale=up_scale, **narrow)
        assert hidden.dtype == jnp.float8_e4m3fn and scale.shape == (M, 2)
        return operation(hidden, down, "tp", rhs_transposed=True, lhs_scale=scale, rhs_scale=down_scale)

    specs = (ROWS, ROWS, ROWS, COLUMNS, P())
    out = SPECS[operation][-1]
    found = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=out))(x, up, up_scale, down, down_scale)
    hidden = left @ np.asarray(jtf.dequantize(up, up_scale), np.float64).T
    wanted = hidden @ np.asarray(jtf.dequantize(down, down_scale), np.float64).T
    # Two roundings to 3 bits of mantissa, of x and of what is between.
    error = np.sqrt(np.mean((np.asarray(found, np.float64) - wanted) ** 2) / np.mean(wanted**2))
    assert 0.01 < error < 0.06


def test_what_does_not_go_together(cpu_mesh: Any) -> None:
    mesh = cpu_mesh(WORLD, "tp")
    x, w, scale, _, _ = operands("int8")

    def error(x: jax.Array = x, operation: Any = jtf.matmul_all_reduce, **how: Any) -> str:
        with pytest.raises(ValueError) as raised:
            run(mesh, operation, x, w, scale, **how)
        return str(raised.value)

    assert "takes quantize_lhs as 'row', 'block', not 'tensor'" in error(quantize_lhs="tensor")
    assert "without lhs_scale, and this one is int8" in error(x.astype(jnp.int8), quantize_lhs="row")
    assert "out_scale with a preferred_element_type of float8_e4m3fn, float8_e5m2, int8, not None" in error(
        out_scale="block"
    )
    narrow = {"preferred_element_type": "int8"}
    assert "takes out_scale as float32 [] or 'block', not 'row'" in error(out_scale="row", **narrow)
    assert "takes out_scale as float32 [] or 'block', not float32[3]" in error(out_scale=jnp.ones(3), **narrow)
    assert "with one rhs, and without return_gathered" in error(
        operation=jtf.all_gather_matmul, quantize_lhs="row", return_gathered=True
    )


@pytest.mark.parametrize("operation", [jtf.all_gather_matmul, jtf.matmul_reduce_scatter, jtf.matmul_all_reduce])
def test_a_result_of_8_bits_without_a_scale_is_a_cast(cpu_mesh: Any, operation: Any) -> None:
    """JAX promotes no such dtype, also not to f32, in which scales and epilogues are computed."""
    x, w, scale, *_ = operands("int8")
    x = x.astype(jnp.bfloat16) / 64
    narrow, wide = (
        run(cpu_mesh(WORLD, "tp"), operation, x, w, scale, activation="silu", preferred_element_type=dtype)
        for dtype in ("float8_e5m2", "float32")
    )
    assert narrow.dtype == jnp.float8_e5m2
    # The ranks' parts of a sum are rounded to 8 bits before.
    parts = 0 if operation is jtf.all_gather_matmul else 2**-2 * np.abs(wide).max()
    np.testing.assert_allclose(narrow.astype(jnp.float32), wide, rtol=2**-3, atol=parts + 2**-16)


@pytest.mark.parametrize("operation", SPECS)
def test_operands_of_8_bits_without_scales_are_added_up_in_more(cpu_mesh: Any, operation: Any) -> None:
    """Their result is bf16 before it is divided, and not of 8 bits, where sums would wrap round."""
    x, w = jnp.full((M, K), 3, jnp.int8), jnp.full((N, K), 5, jnp.int8)
    *specs, out = SPECS[operation]

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        how = {"rhs_transposed": True, "preferred_element_type": "int8", "out_scale": jnp.float32(128)}
        return operation(x, w, "tp", **how)

    found = jax.jit(jax.shard_map(local, mesh=cpu_mesh(WORLD, "tp"), in_specs=tuple(specs[:2]), out_specs=out))(x, w)
    np.testing.assert_array_equal(found, 3 * 5 * K // 128)
