"""What `ragged_dot` must get right on GPUs, as functions of a mesh; as in `collectives_parity`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.helpers.ragged_dot_cases import Grouped, garbage

CASES = (
    (Grouped(150, 40, 40, (7, 0, 70, 41)), "bfloat16", None),
    (Grouped(40, 24, 41, (7, 0, 18, 9)), "float32", {"kernel": "portable", "block_m": 16, "block_n": 16}),
)
LARGE = (
    (Grouped(1000, 264, 520, (1, 129, 0, 300, 511, 3)), "bfloat16", None),
    (Grouped(1000, 264, 520, (1, 129, 0, 300, 511, 59)), "float16", {"kernel": "hopper", "block_m": 64}),
    (Grouped(1000, 264, 520, (1, 129, 0, 300, 511, 3)), "bfloat16", {"kernel": "portable"}),
)


def _check(mesh: Mesh, case: Grouped, dtype: str, config: Any) -> None:
    """Result and both gradients on each device, exactly, and NaN of every kind of garbage."""
    lhs, rhs, sizes, ct = case.arrays(jnp.dtype(dtype))
    call = functools.partial(jtf.ragged_dot, implementation="fused")

    def local(sizes: jax.Array) -> Any:
        out = call(lhs, rhs, sizes, config=config)
        _, back = jax.vjp(lambda *x: call(*x, sizes), lhs, rhs)
        return jax.tree.map(lambda x: x[None], (out, *back(jnp.asarray(ct))))

    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(mesh.axis_names), check_vma=False))
    wanted = case.product(lhs, rhs), case.product(ct, rhs.swapaxes(1, 2)), case.of_weights(lhs, ct)
    for found, of in zip(program(sizes), wanted, strict=True):
        rounded = np.asarray(jnp.asarray(of, jnp.float32).astype(dtype), np.float64)
        for each in np.asarray(found, np.float64):
            np.testing.assert_array_equal(each, rounded)
    for name, wrong in garbage(sizes, case.m):
        assert all(np.isnan(np.asarray(x, np.float32)).all() for x in program(wrong)), name


def check_groups(mesh: Mesh) -> None:
    for case in CASES:
        _check(mesh, *case)


def check_sizes(mesh: Mesh) -> None:
    """Larger, with another tile for each."""
    for case in LARGE:
        _check(mesh, *case)


# Dtypes of lhs and of weights, whether there is a gate, and sizes of groups: many rows and few.
EIGHT_BITS = (
    ("float8_e4m3fn", "float8_e4m3fn", False, (1, 129, 0, 300, 511, 3)),
    ("float8_e5m2", "float8_e4m3fn", True, (1, 129, 0, 300, 511, 3)),
    ("int8", "int8", False, (1, 129, 0, 300, 511, 59)),
    ("float8_e4m3fn", "float8_e4m3fn", True, (3, 0, 17, 40, 1, 8)),
    ("int8", "int8", False, (3, 0, 17, 40, 1, 8)),
    ("bfloat16", "int8", True, (3, 0, 17, 40, 1, 8)),
    ("bfloat16", "float8_e4m3fn", False, (1, 129, 0, 300, 511, 3)),
    ("float16", "float8_e5m2", False, (3, 0, 17, 40, 1, 8)),
)


def check_eight_bits(mesh: Mesh) -> None:
    """Exactly: small whole numbers, and scales that are powers of 2. Rows behind the last group have scales of NaN."""
    for left, right, gated, sizes in EIGHT_BITS:
        _check_eight_bits(mesh, left, right, gated, Grouped(sum(sizes) + 13, 272, 520, sizes))


def _check_eight_bits(mesh: Mesh, left: str, right: str, gated: bool, case: Grouped) -> None:
    lhs, rhs, sizes, _ = case.arrays(np.float32)
    draw = np.random.default_rng(1)
    weights = [rhs, np.roll(rhs, 1, axis=0)][: 1 + gated]
    scales = [2.0 ** draw.integers(-3, 3, (len(sizes), 1, case.n)) for _ in weights]
    products = [case.product(lhs, w * scale) for w, scale in zip(weights, scales, strict=True)]
    given: dict[str, Any] = {}
    if left in ("float8_e4m3fn", "float8_e5m2", "int8"):
        of_rows = 2.0 ** draw.integers(-3, 3, (case.m, 1))
        products = [product * of_rows for product in products]
        of_rows[sum(case.sizes) :] = np.nan
        given["lhs_scale"] = of_rows.astype(np.float32)
    turned = [jnp.asarray(w.swapaxes(1, 2)).astype(right) for w in weights]
    given["rhs_scale"], *of_gate = [scale.swapaxes(1, 2).astype(np.float32) for scale in scales]
    given |= {"gate": turned[1], "gate_scale": of_gate[0]} if gated else {}

    def local(sizes: jax.Array) -> jax.Array:
        how: dict[str, Any] = {"rhs_transposed": True, "preferred_element_type": jnp.float32} | given
        out = jtf.ragged_dot(jnp.asarray(lhs).astype(left), turned[0], sizes, implementation="fused", **how)
        return out[None]

    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(mesh.axis_names), check_vma=False))
    wanted = products[0] * products[1] if gated else products[0]
    for found in np.asarray(program(sizes), np.float64):
        np.testing.assert_array_equal(found, np.asarray(wanted, np.float32), err_msg=f"{left} by {right}")
    for name, wrong in garbage(sizes, case.m)[:2]:
        assert np.isnan(np.asarray(program(wrong))).all(), name


def check_blocks(mesh: Mesh, implementation: str = "fused") -> None:
    """Scales of blocks, exactly, as in `check_eight_bits`; those of the empty group are NaN."""
    case = Grouped(957, 272, 520, (1, 129, 0, 300, 511, 3))
    lhs, rhs, sizes, _ = case.arrays(np.float32)
    draw = np.random.default_rng(1)
    steps, wide = 3, 5
    of_rows = 2.0 ** draw.integers(-2, 3, (case.m, steps))
    scales = [2.0 ** draw.integers(-2, 3, (6, steps, wide)) for _ in range(2)]
    scales[0][3, 1, 2] = 0.0
    left = lhs * np.repeat(of_rows, 128, 1)[:, : case.k]
    weights = [rhs, np.roll(rhs, 1, axis=0)]
    factors = [np.repeat(np.repeat(each, 128, 1), 128, 2)[:, : case.k, : case.n] for each in scales]
    products = [case.product(left, w * factor) for w, factor in zip(weights, factors, strict=True)]
    of_rows[sum(sizes) :] = np.nan
    scales[0][2] = scales[1][2] = np.nan
    of_weights = [scale.swapaxes(1, 2).astype(np.float32) for scale in scales]
    for dtype in ("float8_e4m3fn", "int8"):
        turned = [jnp.asarray(w.swapaxes(1, 2)).astype(dtype) for w in weights]
        for gated in (False, True):
            how: dict[str, Any] = {"gate": turned[1], "gate_scale": of_weights[1]} if gated else {}
            how |= {"rhs_transposed": True, "preferred_element_type": jnp.float32, "precision": "highest"}
            how |= {"lhs_scale": of_rows.astype(np.float32), "rhs_scale": of_weights[0]}
            x = jnp.asarray(lhs).astype(dtype)
            call = functools.partial(jtf.ragged_dot, x, turned[0], implementation=implementation, **how)
            local = lambda sizes, call=call: call(sizes)[None]  # noqa: E731
            program = jax.jit(
                jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(mesh.axis_names), check_vma=False)
            )
            wanted = products[0] * products[1] if gated else products[0]
            for found in np.asarray(program(sizes), np.float64):
                np.testing.assert_array_equal(found, np.asarray(wanted, np.float32), err_msg=f"{dtype}, {gated}")


def check_promotion(mesh: Mesh) -> None:
    """Sums of many numbers of one sign, of which tensor cores alone lose some hundredths: see docs/eight_bits.md."""
    k, n, sizes = 4096, 256, np.array([100, 3, 25], np.int32)
    draw = np.random.default_rng(0)
    lhs, rhs = (draw.uniform(0.5, 1, shape).astype(jnp.float8_e4m3fn) for shape in ((128, k), (3, n, k)))

    def local(lhs: jax.Array, rhs: jax.Array, turned: bool) -> jax.Array:
        one = jnp.ones((), jnp.float32)
        out = jtf.ragged_dot(
            lhs, rhs, sizes, rhs_transposed=True, lhs_scale=one, preferred_element_type=np.float32,
            implementation="fused", config={"kernel": "hopper", "turned": turned, "block_m": 64},
        )  # fmt: skip
        return out[None]

    wanted = Grouped(128, k, n, tuple(sizes.tolist())).product(lhs, rhs.swapaxes(1, 2))
    for turned in (False, True):
        call = functools.partial(local, turned=turned)
        program = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(mesh.axis_names), check_vma=False))
        for found in np.asarray(program(lhs, rhs), np.float64):
            np.testing.assert_allclose(found, wanted, rtol=2e-3)


CHECKS = (check_groups, check_sizes)
