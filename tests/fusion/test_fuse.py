"""`fuse` inside of `jax.shard_map`: every form in which a gather, a product and a sum may stand next to each other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.fusion import Report
from tests.helpers.support import mesh_of, whole_numbers

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
WORLD = 2
gather = functools.partial(lax.all_gather, axis_name="tp", tiled=True)
scatter = functools.partial(lax.psum_scatter, axis_name="tp", tiled=True)
psum = functools.partial(lax.psum, axis_name="tp")


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of a rank's operands.

    Attributes:
      fn: the function.
      shapes: of its operands, which are different on each rank.
      found: the operations that are put into it.
      missed: for each collective that is left next to a product, a part of the reason.
      note: a part of what the report says of one that is found.
      dtype: of the operands.
    """

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    found: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    note: str = ""
    dtype: str = "float32"


def relu_mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    g = gather(x)
    return scatter(jax.nn.relu(g @ up) * (g @ up), scatter_dimension=0) @ down.T @ down


def gathered_before(x: jax.Array, w: jax.Array) -> jax.Array:
    """The gathered array has another use before the product, and the weights come after that."""
    g = gather(x)
    scaled = 2 * g
    return scaled[:, :1] + g @ (w + 1)


def weights_of_gathered(x: jax.Array, y: jax.Array) -> jax.Array:
    """The weights of each product are of the other's gathered rows."""
    g, h = gather(x), gather(y)
    return g @ (2 * h[:M]) + h @ (2 * g[:M])


M, K, N = 6, 3, 5
X, W = (M, K), (K, N)
CASES = {
    # Gathers.
    "gather": Case(lambda x, w: gather(x) @ w, (X, W), (GATHER,)),
    "gather-cast": Case(lambda x, w: gather(x).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), (X, W), (GATHER,)),
    "gather-second": Case(lambda x, w: gather(x, axis=1) @ w, ((2, M, K), W), (GATHER,)),
    "gather-untiled": Case(lambda x, w: lax.all_gather(x, "tp").reshape(-1, K) @ w, (X, W), (GATHER,)),
    "gather-untiled-rows": Case(lambda x, w: lax.all_gather(x, "tp", axis=1) @ w, (X, W), (GATHER,)),
    "gather-reshaped": Case(lambda x, w: gather(x).reshape(4, -1, K) @ w, (X, W), (GATHER,)),
    "gather-moved": Case(lambda x, w: gather(x, axis=1).transpose(1, 0, 2) @ w, ((2, M, K), W), (GATHER,)),
    "gather-einsum": Case(
        lambda x, w: jnp.einsum("bsd,dhk->bshk", gather(x, axis=1), w), ((2, M, K), (K, 2, 4)), (GATHER,)
    ),
    "gather-heads": Case(
        lambda x, w: jnp.einsum("bshk,hkd->bsd", gather(x, axis=1), w), ((2, M, 2, 4), (2, 4, K)), (GATHER,)
    ),
    "gather-transposed": Case(lambda x, w: gather(x) @ w.T, (X, (N, K)), (GATHER,), note="reads the weights as [N, K]"),
    "gather-middle": Case(
        lambda x, w: jnp.einsum("bsd,hdk->bshk", gather(x, axis=1), w),
        ((2, M, K), (2, K, 4)),
        (GATHER,),
        note="copies the weights",
    ),
    "gather-right": Case(lambda x, w: jnp.einsum("nk,mk->nm", w, gather(x)), (X, (N, K)), (GATHER,)),
    "gather-two-products": Case(
        lambda x, w, v: (gather(x) @ w, gather(x) @ v),
        (X, W, (K, 2)),
        (GATHER,),
        note="@ (float32[3, 5], float32[3, 2])",
    ),
    "gather-five-products": Case(
        lambda x, w: tuple(gather(x) @ (w * i) for i in range(5)),
        (X, W),
        (GATHER,),
        note="(returns the gathered rows)",
    ),
    "gather-two-dtypes": Case(
        lambda x, w: (gather(x) @ w, jnp.matmul(gather(x), w, preferred_element_type=jnp.float32)),
        (X, W),
        (GATHER,),
        note="@ bfloat16[3, 5], shard_map",
        dtype="bfloat16",
    ),
    "gather-then-weights-of-it": Case(
        lambda x, w: (lambda y: (y, gather(x) @ y[:K]))(gather(x) @ w),
        (X, W),
        (GATHER,),
        note="(returns the gathered rows)",
    ),
    "gather-used": Case(gathered_before, (X, W), (GATHER,), note="returns the gathered rows"),
    "gather-untiled-used": Case(
        lambda x, w: (lax.all_gather(x, "tp").reshape(-1, K) @ w, lax.all_gather(x, "tp") * 2),
        (X, W),
        (GATHER,),
        note="returns the gathered rows",
    ),
    "gather-moved-used": Case(
        lambda x, w: (gather(x, axis=1).transpose(1, 0, 2).reshape(-1, K) @ w, gather(x, axis=1) * 2),
        ((2, M, K), W),
        (GATHER,),
        note="returns the gathered rows",
    ),
    "gather-turned-used": Case(
        lambda x, w: (gather(x, axis=1).transpose(1, 2, 0, 3) @ w, gather(x, axis=1) * 2),
        ((2, M, 3, K), W),
        (GATHER,),
        note="returns the gathered rows",
    ),
    "gather-known-alike": Case(lambda x, w: gather(x, to="invarying") @ w, (X, W), (GATHER,)),
    "gather-known-alike-used": Case(
        lambda x, w: (lambda g: (g @ w, 2 * g))(gather(x, to="invarying")),
        (X, W),
        missed=("the same on every rank along ['tp']",),
    ),
    "gather-other-chain": Case(
        lambda x, w: (gather(x).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), gather(x)[:, None] @ w),
        (X, W),
        (GATHER,),
        note="returns the gathered rows",
    ),
    "gather-self": Case(lambda x: gather(x) @ gather(x).T, (X,), missed=("depend on the gathered",)),
    "gather-circle": Case(weights_of_gathered, ((M, M), (M, M)), found=(GATHER,), missed=("depend on the gathered",)),
    "gather-both": Case(
        lambda x, w: gather(x) @ gather(w).T, (X, (N, K)), (GATHER,), missed=("one with another collective",)
    ),
    "gather-contracted": Case(
        lambda x, w: gather(x, axis=1) @ w, (X, (WORLD * K, N)), (GATHER,), note="gathers the contracted dimension"
    ),
    "gather-contracted-used": Case(
        lambda x, w, v: (gather(x, axis=1) @ w, gather(x, axis=1) @ v, gather(x, axis=1) * 2),
        (X, (WORLD * K, N), (WORLD * K, 2)),
        (GATHER,),
        note="returns the gathered rows, gathers the contracted dimension",
    ),
    "gather-contracted-heads": Case(
        lambda x, w: jnp.einsum("bshk,hkd->bsd", gather(x, axis=2), w), ((2, M, 2, 4), (4, 4, K)), (GATHER,)
    ),
    "gather-contracted-last": Case(
        lambda x, w: jnp.einsum("bshk,hkd->bsd", gather(x, axis=3), w),
        ((2, M, 2, 4), (2, 8, K)),
        missed=("not the first of the contracted dimensions",),
    ),
    "gather-cast-used": Case(
        lambda x, w: (gather(x).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), gather(x) * 2),
        (X, W),
        missed=("before its cast",),
    ),
    "gather-widened": Case(
        lambda x, w: gather(x).astype(jnp.float32) @ w.astype(jnp.float32),
        (X, W),
        missed=("cast to float32",),
        dtype="bfloat16",
    ),
    "gather-batch": Case(
        lambda x, w: jnp.einsum("bmk,bkn->bmn", gather(x, axis=1), w),
        ((2, M, K), (2, K, N)),
        missed=("a batch of products",),
    ),
    "gather-groups": Case(
        lambda x, w: lax.all_gather(x, "tp", axis_index_groups=[[0], [1]], tiled=True) @ w,
        (X, W),
        missed=("axis_index_groups",),
    ),
    "gather-named": Case(lambda x, w: checkpoint_name(gather(x), "g") @ w, (X, W), missed=("there is a name between",)),
    "gather-integers": Case(lambda x, w: gather(x) @ w, (X, W), missed=("not int32",), dtype="int32"),
    "gather-alone": Case(lambda x, w: jnp.sin(gather(x)), (X, W)),
    # Sums.
    "psum": Case(lambda x, w: psum(x @ w), (X, W), (REDUCE,)),
    "psum-row": Case(lambda x, w: psum(x @ w), ((K,), W), (REDUCE,)),
    "psum-mean": Case(lambda x, w: lax.pmean(x @ w, "tp"), (X, W), (REDUCE,)),
    "psum-reshaped": Case(lambda x, w: psum((x @ w).reshape(2, 3, N).transpose(1, 0, 2)), (X, W), (REDUCE,)),
    "psum-heads": Case(lambda x, w: psum(jnp.einsum("bshk,hkd->bsd", x, w)), ((2, M, 2, 4), (2, 4, K)), (REDUCE,)),
    "psum-both": Case(lambda x, w: psum((x @ w, 2 * x)), (X, W), (REDUCE,)),
    "psum-transposed": Case(lambda x, w: psum(x @ w.T), (X, (N, K)), (REDUCE,), note="reads the weights as [N, K]"),
    "psum-transposed-many": Case(lambda x, w: psum(x @ w.T), ((512, K), (N, K)), (REDUCE,), note="copies the weights"),
    "psum-used": Case(lambda x, w: (psum(x @ w), jnp.sin(x @ w)), (X, W), (REDUCE,)),
    "psum-same-used": Case(lambda x, w: (lambda y: (psum(y), 2 * y))(x @ w), (X, W), missed=("used before its sum",)),
    "psum-scaled": Case(lambda x, w: psum(((x @ w) * 3).astype(jnp.bfloat16)), (X, W)),
    "psum-cast-used": Case(
        lambda x, w: (lambda y: (psum(y), 2 * y))((x @ w).astype(jnp.bfloat16)), (X, W), missed=("used before its sum",)
    ),
    "psum-rounded-twice": Case(
        lambda x, w: psum((x @ w).astype(jnp.bfloat16).astype(jnp.float32)), (X, W), missed=("rounds it twice",)
    ),
    "psum-vector": Case(lambda x, w: psum(x @ w[:, 0]), (X, W), (REDUCE,)),
    "psum-scalar": Case(lambda x: psum(jnp.vdot(x, x)), (X,)),
    "psum-alone": Case(lambda x, w: psum(x) @ w, (X, W)),
    "scatter": Case(lambda x, w: scatter(x @ w), (X, W), (SCATTER,)),
    "scatter-second": Case(lambda x, w: scatter(x @ w, scatter_dimension=1), ((2, M, K), W), (SCATTER,)),
    "scatter-reshaped": Case(lambda x, w: scatter((x @ w).reshape(-1, N)), ((2, M, K), W), (SCATTER,)),
    "scatter-moved": Case(lambda x, w: scatter((x @ w).transpose(1, 0, 2)), ((2, M, K), W), (SCATTER,)),
    "scatter-untiled": Case(lambda x, w: lax.psum_scatter((x @ w).reshape(2, M // 2, N), "tp"), (X, W), (SCATTER,)),
    "scatter-heads": Case(
        lambda x, w: scatter(jnp.einsum("bshk,hkd->bsd", x, w), scatter_dimension=1),
        ((2, M, 2, 4), (2, 4, K)),
        (SCATTER,),
    ),
    "scatter-transposed": Case(
        lambda x, w: scatter(x @ w.T), (X, (N, K)), (SCATTER,), note="reads the weights as [N, K]"
    ),
    "scatter-columns": Case(
        lambda x, w: scatter(x @ w, scatter_dimension=1), (X, (K, 4)), (SCATTER,), note="scatters columns"
    ),
    "scatter-columns-heads": Case(
        lambda x, w: scatter(jnp.einsum("bsd,dhk->bshk", x, w), scatter_dimension=2),
        ((2, M, K), (K, 4, 2)),
        (SCATTER,),
        note="scatters columns",
    ),
    "scatter-columns-last": Case(
        lambda x, w: scatter(jnp.einsum("bsd,dhk->bshk", x, w), scatter_dimension=3),
        ((2, M, K), (K, 4, 2)),
        missed=("not the first of the columns",),
    ),
    "scatter-columns-moved": Case(
        lambda x, w: scatter((x @ w).T, scatter_dimension=0), (X, (K, 4)), (SCATTER,), note="scatters columns"
    ),
    "scatter-apart": Case(lambda x, w: scatter((x @ w).reshape(-1, N)), ((3, M, K), W), missed=("takes apart",)),
    "gather-and-scatter": Case(relu_mlp, (X, (K, N), (N, N)), (GATHER,)),
    "gather-then-sum": Case(
        lambda x, w: psum(gather(x) @ w), (X, W), (REDUCE,), missed=("the product is one with another collective",)
    ),
    "mlp": Case(
        lambda x, up, down: x + scatter(jax.nn.silu(gather(x) @ up) @ down), (X, (K, N), (N, K)), (GATHER, SCATTER)
    ),
}


BIAS = (N,)
# What follows is the operation's epilogue.
EPILOGUES = {
    "gather-bias": Case(lambda x, w, b: gather(x) @ w + b, (X, W, BIAS), (GATHER,), note="(with a bias)"),
    "gather-bias-heads": Case(
        lambda x, w, b: jax.nn.gelu(jnp.einsum("bsd,dhk->bshk", gather(x, axis=1), w) + b, approximate=True),
        ((2, M, K), (K, 2, 4), (2, 4)),
        (GATHER,),
        note="(with a bias, with gelu_tanh)",
    ),
    "gather-silu": Case(lambda x, w: jax.nn.silu(gather(x) @ w), (X, W), (GATHER,), note="(with silu)"),
    "gather-silu-by-hand": Case(
        lambda x, w: (lambda y: y * jax.nn.sigmoid(y))(gather(x) @ w), (X, W), (GATHER,), note="(with silu)"
    ),
    "gather-gelu": Case(lambda x, w: jax.nn.gelu(gather(x) @ w), (X, W), (GATHER,), note="(with gelu_tanh)"),
    "gather-gelu-bfloat16": Case(
        lambda x, w: jax.nn.gelu(gather(x) @ w), (X, W), (GATHER,), note="(with gelu_tanh)", dtype="bfloat16"
    ),
    "gather-gate": Case(
        lambda x, w, g, b: jax.nn.silu(gather(x) @ g) * (gather(x) @ w + b),
        (X, W, W, BIAS),
        (GATHER,),
        note="@ float32[3, 5], shard_map",
    ),
    "gather-gate-right": Case(
        lambda x, w, g: (gather(x) @ w) * jax.nn.silu(gather(x) @ g), (X, W, W), (GATHER,), note="with a gate"
    ),
    "gather-gate-alone": Case(
        lambda x, w, g: (gather(x) @ w) * (gather(x) @ g), (X, W, W), (GATHER,), note="with a gate"
    ),
    "gather-gate-and-another": Case(
        lambda x, w, g: (jax.nn.silu(gather(x) @ w) * (gather(x) @ g), gather(x) @ (g + w)),
        (X, W, W),
        (GATHER,),
        note="with silu of the product 0",
    ),
    "gather-several-epilogues": Case(
        lambda x, w, g, b: (jax.nn.silu(gather(x) @ g), gather(x) @ w + b),
        (X, W, W, BIAS),
        (GATHER,),
        note="with silu of the product 0, with a bias of the product 1",
    ),
    "gather-gate-by-two-biases": Case(
        lambda x, w, g, b: jax.nn.silu(gather(x) @ g + b) * (gather(x) @ w + b),
        (X, W, W, BIAS),
        (GATHER,),
        note="with silu of the product 0",
    ),
    "gather-used-before": Case(
        lambda x, w: (lambda y: (y, jax.nn.silu(y)))(gather(x) @ w),
        (X, W),
        (GATHER,),
        note="@ float32[3, 5], shard_map",
    ),
    "scatter-residual": Case(
        lambda x, w, r: r + scatter(x @ w), (X, W, (M // 2, N)), (SCATTER,), note="(with a residual)"
    ),
    "scatter-all": Case(
        lambda x, w, b, r: jax.nn.silu(scatter(x @ w) + b) + r,
        (X, W, BIAS, (M // 2, N)),
        (SCATTER,),
        note="(with a bias, with silu, with a residual)",
    ),
    "scatter-residual-moved": Case(
        lambda x, w, r: r + scatter((x @ w).transpose(1, 0, 2)),
        ((2, M, K), W, (M // 2, 2, N)),
        (SCATTER,),
        note="(with a residual)",
    ),
    "scatter-columns-residual": Case(
        lambda x, w, b, r: scatter(x @ w, scatter_dimension=1) + b + r,
        (X, (K, 4), (2,), (M, 2)),
        (SCATTER,),
        note="scatters columns)",
    ),
    "scatter-two": Case(
        lambda x, w: scatter(x @ w) + scatter(x @ (w + 1)), (X, W), (SCATTER, SCATTER), note="with a residual"
    ),
    "psum-of-its-own": Case(lambda x, w: psum(x @ w) + psum(2 * x)[:, :1], (X, W), (REDUCE,)),
    "psum-residual-alike": Case(lambda x, w, b: psum(x @ w) + psum(b), (X, W, BIAS), (REDUCE,), note="(with a bias)"),
    "psum-residual-of-each": Case(
        lambda x, w, r: psum(x @ w) + r, (X, W, (M, N)), (REDUCE,), note="@ float32[3, 5], shard_map"
    ),
    "psum-residual-of-itself": Case(lambda x, w: (lambda y: y + jnp.flip(y))(psum(x @ w)), (X, W), (REDUCE,)),
}


def on_ranks(fn: Callable[..., Any], mesh: Mesh, vma: bool = True) -> Callable[..., Any]:
    """The function on all ranks: operands and results have a dimension for them in front."""

    def local(*operands: jax.Array) -> Any:
        out = fn(*(x[0] for x in operands))
        return jax.tree.map(
            lambda y: lax.pcast(y, tuple({"tp"} - jax.typeof(y).mat.varying), to="varying")[None] if vma else y[None],
            out,
        )

    return jax.shard_map(local, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=vma)


def operands_of(case: Case) -> list[np.ndarray]:
    return [whole_numbers(i, WORLD, *shape, dtype=case.dtype, limit=2) for i, shape in enumerate(case.shapes)]


def gradients(fn: Callable[..., Any], operands: list[np.ndarray]) -> tuple[Any, Any]:
    """Values and gradients; of integers values alone."""
    if not jnp.issubdtype(operands[0].dtype, jnp.floating):
        return fn(*operands), None
    out, back = jax.vjp(fn, *operands)
    cts = jax.tree.map(lambda y: (jnp.arange(y.size) % 5 - 2.0).astype(y.dtype).reshape(y.shape), out)
    return out, back(cts)


def assert_equal(got: Any, want: Any) -> None:
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))


def operations(report: Report) -> tuple[str, ...]:
    return tuple(each.operation for each in report.found)


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str) -> None:
    """Values and gradients, and without `check_vma` as well."""
    case = EPILOGUES[name]
    operands = [x / 4 for x in operands_of(case)]
    for vma in (True, False):
        fn = on_ranks(case.fn, mesh_of(WORLD), vma)
        fused = jtf.fuse(fn)
        report = fused.report(*operands)
        assert operations(report) == case.found and not report.missed, str(report)
        # Without it nobody knows what is the same on all ranks.
        assert case.note in str(report) or not (vma or case.found != (REDUCE,)), str(report)
        both = jax.jit(lambda *x, fn=fn, fused=fused: (gradients(fn, list(x)), gradients(fused, list(x))))
        for got, want in zip(*map(jax.tree.leaves, both(*operands)), strict=True):
            assert got.dtype == want.dtype
            # The operation rounds once, and the program after each step.
            tolerance = 1e-5 if got.dtype == jnp.float32 else 3e-2
            got, want = (np.asarray(each, np.float32) for each in (got, want))
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * max(1, np.abs(want).max()))


def test_exact_gelu() -> None:
    """Of which JAX gives no gradient in `jax.shard_map`."""
    fn = on_ranks(lambda x, w: jax.nn.gelu(gather(x) @ w, approximate=False), mesh_of(WORLD))
    x, w = (whole_numbers(i, WORLD, *shape, limit=2) / 4 for i, shape in enumerate((X, W)))
    assert "(with gelu_exact)" in str(jtf.fuse(fn).report(x, w))
    np.testing.assert_allclose(jax.jit(jtf.fuse(fn))(x, w), jax.jit(fn)(x, w), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_forms(name: str) -> None:
    """Of whole numbers, so that values and gradients are exact."""
    case = CASES[name]
    fn, operands = on_ranks(case.fn, mesh_of(WORLD)), operands_of(case)
    fused = jtf.fuse(fn)
    report = fused.report(*operands)
    assert operations(report) == case.found, str(report)
    assert len(report.missed) == len(case.missed), str(report)
    for missed, why in zip(report.missed, case.missed):
        assert why in missed.why
    assert case.note in str(report)
    both = jax.jit(lambda *operands: (gradients(fn, list(operands)), gradients(fused, list(operands))))
    want, got = both(*operands)
    assert_equal(got, want)
