"""Random programs of products, casts, reshapes and collectives: with `fuse` they mean what they meant."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.helpers.support import mesh_of, whole_numbers

STEPS = (
    "dot",
    "dot-transposed",
    "dot-of-left",
    "two-dots",
    "gated",
    "gather",
    "gather-untiled",
    "psum",
    "scatter",
    "scatter-columns",
    "cast",
    "reshape",
    "transpose",
    "keep",
    "add",
    "bias",
)
Z = 4  # every dimension is a multiple of it, or an eighth of one


def program(steps: Sequence[str], x: jax.Array, w: jax.Array) -> list[jax.Array]:
    """Runs the steps on x [4, 4], with parts of w [64, 64] as weights; a step that does not fit is left out."""
    kept, first = [], x
    for step in steps:
        rows, columns = x.shape
        if step == "dot":
            x = x @ w[:columns, :Z].astype(x.dtype)
        elif step == "dot-transposed":
            x = x @ w[:Z, :columns].astype(x.dtype).T
        elif step == "dot-of-left":
            x = w[:Z, :rows].astype(x.dtype) @ x
        elif step == "two-dots":
            x = x @ w[:columns, :Z].astype(x.dtype) - x @ w[:columns, Z : 2 * Z].astype(x.dtype)
        elif step == "gated":
            x = jnp.clip((x @ w[:columns, :Z].astype(x.dtype)) * (x @ w[:columns, Z : 2 * Z].astype(x.dtype)), -8, 8)
        elif step == "gather" and rows < 16:
            x = lax.all_gather(x, "tp", tiled=True)
        elif step == "gather-untiled" and rows < 16:
            x = lax.all_gather(x, "tp", axis=1).reshape(-1, columns)
        elif step == "psum":
            x = lax.psum(x, "tp")
            x = lax.pcast(x, "tp", to="varying")
        elif step == "scatter" and rows % 2 == 0 and rows > 2:
            x = lax.psum_scatter(x, "tp", tiled=True)
        elif step == "scatter-columns" and columns % 2 == 0 and columns > 2:
            x = lax.psum_scatter(x, "tp", scatter_dimension=1, tiled=True)
        elif step == "cast":
            x = x.astype(jnp.bfloat16 if x.dtype == jnp.float32 else jnp.float32)
        elif step == "reshape" and rows % 2 == 0 and columns <= 8:
            x = x.reshape(rows // 2, 2 * columns)
        elif step == "transpose":
            x = x.T
        elif step == "keep":
            kept.append(x)
        elif step == "add" and x.shape == first.shape:
            x = x + first.astype(x.dtype)
        elif step == "bias":
            x = x + w[0, :columns].astype(x.dtype)
        # So that sums stay exact in f32.
        x = x if step != "keep" else jnp.clip(x, -8, 8)
    return [each.astype(jnp.float32)[None] for each in (*kept, x)]


def check(steps: Sequence[str]) -> None:
    def local(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        return program(steps, x[0], w[0])

    fn = jax.shard_map(local, mesh=mesh_of(2), in_specs=P("tp"), out_specs=P("tp"))
    x, w = whole_numbers(0, 2, Z, Z, limit=2), whole_numbers(1, 2, 64, 64, limit=1)
    fused = jtf.fuse(fn)
    report = fused.report(x, w)
    hypothesis.event(f"{len(report.found)} fused, {len(report.missed)} missed")
    want, got = jax.jit(lambda x, w: (fn(x, w), fused(x, w)))(x, w)
    for a, b in zip(got, want, strict=True):
        if "cast" in steps:
            scale = max(1.0, float(np.abs(b).max()))
            np.testing.assert_allclose(a, b, atol=0.05 * scale, err_msg=str(report))
        else:
            np.testing.assert_array_equal(a, b, err_msg=str(report))


between = st.lists(st.sampled_from(["cast", "reshape", "transpose", "keep"]), max_size=2)
dots, gathers = st.sampled_from(STEPS[:5]), st.sampled_from(STEPS[5:7])
sums = st.sampled_from(["psum", "scatter", "scatter-columns"])
after = st.lists(st.sampled_from(["bias", "add", "keep"]), max_size=2)
others = st.sampled_from(STEPS).map(lambda step: [step])
pieces = st.one_of(
    st.tuples(gathers, between, dots, after).map(lambda x: [x[0], *x[1], x[2], *x[3]]),
    st.tuples(dots, between, sums, after).map(lambda x: [x[0], *x[1], x[2], *x[3]]),
    others,
)
programs = st.lists(pieces, min_size=1, max_size=3).map(lambda x: [step for piece in x for step in piece])


@hypothesis.settings(max_examples=12)
@hypothesis.given(programs)
@hypothesis.example(["gather", "dot", "keep", "dot", "scatter", "gather-untiled", "transpose", "dot-of-left"])
@hypothesis.example(["gather", "gated", "two-dots", "scatter", "bias", "add", "gather", "two-dots", "scatter-columns"])
@hypothesis.example(["gather", "reshape", "dot-transposed", "reshape", "scatter", "dot", "transpose", "scatter"])
def test_means_the_same(steps: list[str]) -> None:
    check(steps)


@pytest.mark.soak
@hypothesis.settings(max_examples=300)
@hypothesis.given(programs)
def test_many_mean_the_same(steps: list[str]) -> None:
    check(steps)
