"""`all_gather_matmul` without peers: each rank has a product of its own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.helpers.support import (
    SIDE_EFFECT,
    TRITON_CALL,
    assert_fused,
    fails,
    lower_for_cuda,
    mesh_of,
    one_program,
    whole_numbers,
)

X = whole_numbers(0, 2, 16, dtype="bfloat16", limit=1)
W, GATE = (whole_numbers(seed, 16, 64, dtype="bfloat16", limit=1) for seed in (1, 2))
COLUMNS = P(None, "tp")


def program(of: Any = lambda product: product, **how: Any) -> Any:
    """Of [2, 16] that every rank has, and of its columns of W and GATE."""

    def local(x: jax.Array, w: jax.Array, gate: jax.Array) -> Any:
        return of(jtf.all_gather_matmul(x, w, (), gate=gate, activation=jax.nn.silu, **how))

    return one_program(local, mesh=mesh_of(2), in_specs=(P(), COLUMNS, COLUMNS), out_specs=COLUMNS)


@pytest.mark.parametrize("implementation", ["xla", None, "simulate"])
def test_it_is_a_product(implementation):
    x, w, gate = (np.asarray(each, np.float64) for each in (X, W, GATE))
    gated = x @ gate
    found = program(implementation=implementation)(X, W, GATE)
    np.testing.assert_allclose(np.asarray(found, np.float64), gated / (1 + np.exp(-gated)) * (x @ w), rtol=1e-2)


def test_it_is_one_kernel():
    assert_fused(lower_for_cuda(program(implementation="fused"), X, W, GATE))
    text = lower_for_cuda(program(), X, W, GATE)
    assert "triton" not in text and "all_gather" not in text  # by default XLA's product, and nothing else


@pytest.mark.parametrize(("axis_name", "has_peers"), [((), False), ("one", False), ("tp", True)])
def test_a_call_without_peers_has_results_alone(axis_name, has_peers):
    """So XLA hands it slices of stacked weights without a copy."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("tp", "one"))

    def local(x: jax.Array, w: jax.Array, gate: jax.Array) -> Any:
        return jtf.all_gather_matmul(x, w, axis_name, gate=gate, activation="silu", implementation="fused")

    call = one_program(local, mesh=mesh, in_specs=(P(), COLUMNS, COLUMNS), out_specs=COLUMNS, check_vma=False)
    text = lower_for_cuda(call, X, W, GATE)
    assert text.count(SIDE_EFFECT) == (text.count(TRITON_CALL) if has_peers else 0)
    assert TRITON_CALL in text


def test_its_gradient():
    def loss(x: jax.Array, w: jax.Array, implementation: str | None) -> jax.Array:
        if implementation is None:
            return jnp.sum((x @ w) ** 2)
        return jnp.sum(jtf.all_gather_matmul(x, w, (), implementation=implementation) ** 2)

    def gradients(implementation: str | None) -> Any:
        run = one_program(
            jax.grad(lambda x, w: loss(x, w, implementation), (0, 1)), mesh=mesh_of(2), in_specs=(P("tp"), P()),
            out_specs=(P("tp"), P("tp")), check_vma=False,
        )  # fmt: skip
        return run(X.astype(np.float32), W.astype(np.float32))

    for found, expected in zip(gradients("xla"), gradients(None), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_several_right_hand_sides():
    def local(x: jax.Array, w: jax.Array, gate: jax.Array) -> jax.Array:
        return jnp.concatenate(jtf.all_gather_matmul(x, (w, gate), (), implementation="xla"), axis=1)

    run = one_program(local, mesh=mesh_of(1), in_specs=(P(), P(), P()), out_specs=P())
    wanted = [np.asarray(X, np.float32) @ np.asarray(each, np.float32) for each in (W, GATE)]
    np.testing.assert_array_equal(np.asarray(run(X, W, GATE), np.float32), np.concatenate(wanted, axis=1))


def test_outside_of_shard_map():
    """XLA's product by default; the kernel has to know which devices it is for."""
    call = lambda x, w, how=None: jtf.all_gather_matmul(x, w, (), implementation=how)  # noqa: E731
    product = np.asarray(X, np.float32) @ np.asarray(W, np.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(call)(X, W), np.float32), product)
    with fails(NotImplementedError, "jax.shard_map"):
        lower_for_cuda(lambda x, w: call(x, w, "fused"), X, W)


@pytest.mark.parametrize("implementation", [None, "simulate"])
def test_by_the_functions_of_global_arrays(implementation):
    """Inside of `jax.shard_map` their arrays are local."""
    bias, residual = (
        whole_numbers(seed, *shape, dtype="bfloat16", limit=1) for seed, shape in ((3, (64,)), (4, (2, 64)))
    )

    def local(x: jax.Array, w: jax.Array, gate: jax.Array, bias: jax.Array, residual: jax.Array) -> Any:
        how = {"implementation": implementation, "residual": residual}
        gated = jtf.matmul(x, w, gate=gate, bias=bias, activation="silu", **how)
        return gated, jtf.einsum("mk,nk->mn", x, w.T, **how)

    specs = P(), COLUMNS, COLUMNS, P("tp"), COLUMNS
    run = one_program(local, mesh=mesh_of(2), in_specs=specs, out_specs=COLUMNS)
    found = run(X, W, GATE, bias, residual)
    x, w, gate, bias, residual = (np.asarray(each, np.float64) for each in (X, W, GATE, bias, residual))
    gated = x @ gate
    wanted = gated / (1 + np.exp(-gated)) * (x @ w + bias) + residual, x @ w + residual
    for each, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(each, np.float64), expected, rtol=2e-2, atol=1e-2)


def test_what_is_no_product_of_matrices_has_no_kernel():
    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        return jtf.einsum("mk,kn->nm", x, w, implementation="fused")

    with fails(NotImplementedError, "manual"):
        one_program(local, mesh=mesh_of(2), in_specs=(P(), COLUMNS), out_specs=P("tp"))(X, W)


@pytest.mark.parametrize("implementation", ["xla", None, "simulate"])
@pytest.mark.parametrize("shape", [(), (2, 1), (2, 2)])
def test_operands_of_8_bits(shape: tuple[int, ...], implementation: str | None) -> None:
    """With scales of a tensor, of rows and of blocks, which are gathered along no axis."""
    x, w = (whole_numbers(seed, n, 256, dtype="int8") for seed, n in ((3, 2), (4, 64)))
    scale = np.ldexp(1.0, whole_numbers(5, *shape, dtype="int32")).astype(np.float32)
    expanded = np.repeat(scale, 128, 1) if shape == (2, 2) else scale
    wanted = np.asarray(x, np.float64) * expanded @ np.asarray(w, np.float64).T / 4

    def local(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        how: dict[str, Any] = {"rhs_transposed": True, "implementation": implementation, "lhs_scale": scale}
        return jtf.all_gather_matmul(x, w, (), rhs_scale=jnp.float32(0.25), preferred_element_type="float32", **how)

    call = one_program(local, mesh=mesh_of(2), in_specs=(P(), P("tp"), P()), out_specs=COLUMNS)
    np.testing.assert_array_equal(call(x, w, scale), wanted)
