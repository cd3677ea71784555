"""`fuse` in programs of global arrays on Explicit axes, whose types say what is gathered and summed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.helpers.support import assert_fused, lower_for_cuda, whole_numbers

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
B, S, D, F, H = 2, 4, 6, 8, 2
ROWS, WHOLE = P("data", "tp", None), P("data", None, None)


def explicit(axes: int = 2) -> Mesh:
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    return Mesh(devices, ("data", "tp"), axis_types=(AxisType.Explicit,) * axes + (AxisType.Auto,) * (2 - axes))


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of global arrays, their shapes and how they are sharded; see test_fuse.py."""

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    found: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    note: str = ""


X, U, W = (B, S, D), (D, F), (F, D)
COLUMNS, CONTRACTED = P(None, "tp"), P("tp", None)


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    h = jax.nn.relu(jax.reshard(x, WHOLE) @ up)
    return x + jnp.matmul(h, down, out_sharding=ROWS)


def heads(x: jax.Array, q: jax.Array, k: jax.Array, o: jax.Array) -> jax.Array:
    g = jax.reshard(x, WHOLE)
    a = jnp.einsum("bsd,dhk->bshk", g, q) * jnp.einsum("bsd,dhk->bshk", g, k)
    return jnp.einsum("bshk,hkd->bsd", a, o, out_sharding=WHOLE) + g


def gated(x: jax.Array, gate: jax.Array, up: jax.Array, bias: jax.Array, down: jax.Array) -> jax.Array:
    g = jax.reshard(x, WHOLE)
    return x + jnp.matmul((g @ gate) * (g @ up + bias), down, out_sharding=ROWS)


def summed(x: jax.Array, w: jax.Array, bias: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, w, out_sharding=WHOLE) + bias + y


CASES = {
    "mlp": Case(mlp, (X, U, W), (ROWS, COLUMNS, CONTRACTED), (GATHER, SCATTER), note="(with a residual)"),
    "gated": Case(
        gated,
        (X, U, U, (F,), W),
        (ROWS, COLUMNS, COLUMNS, P("tp"), CONTRACTED),
        (GATHER, SCATTER),
        note="(with a gate, with a bias)",
    ),
    "whole-bias": Case(
        lambda x, w, b: jax.reshard(x, WHOLE) @ w + jax.reshard(b, P("tp")),
        (X, U, (F,)),
        (ROWS, COLUMNS, P()),
        (GATHER,),
        note="(with a bias)",
    ),
    "summed": Case(
        summed,
        ((B, S, F), W, (D,), X),
        (P("data", None, "tp"), CONTRACTED, P(), WHOLE),
        (REDUCE,),
        note="(with a bias, with a residual)",
    ),
    "heads": Case(
        heads,
        (X, (D, H, 4), (D, H, 4), (H, 4, D)),
        (ROWS, P(None, "tp", None), P(None, "tp", None), P("tp", None, None)),
        (GATHER, REDUCE),
        note="returns the gathered rows",
    ),
    "by-out-sharding": Case(
        lambda x, w: jnp.matmul(x, w, out_sharding=P("data", None, "tp")), (X, U), (ROWS, COLUMNS), (GATHER,)
    ),
    "cast": Case(
        lambda x, w: jax.reshard(x, WHOLE).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16),
        (X, U),
        (ROWS, COLUMNS),
        (GATHER,),
    ),
    "transposed": Case(
        lambda x, w: jax.reshard(x, WHOLE) @ w.T, (X, (F, D)), (ROWS, CONTRACTED), (GATHER,), note="[N, K]"
    ),
    "two-axes": Case(
        lambda x, w: jnp.matmul(x, w, out_sharding=P()),
        ((S, F), W),
        (P(None, ("data", "tp")), P(("data", "tp"))),
        (REDUCE,),
    ),
    "two-axes-scatter": Case(
        lambda x, w: jnp.matmul(x, w, out_sharding=P(("data", "tp"))),
        ((S, F), W),
        (P(None, ("data", "tp")), P(("data", "tp"))),
        (SCATTER,),
    ),
    "minor-axis": Case(
        lambda x, w: jnp.matmul(x, w, out_sharding=P("data", "tp")),
        ((S, D), U),
        (P(("data", "tp")), COLUMNS),
        (GATHER,),
    ),
    "fsdp": Case(
        lambda x, w: jnp.matmul(x, w, out_sharding=P()), ((S, F), W), (P(None, "tp"), P("tp", "data")), (REDUCE,)
    ),
    "whole-weights": Case(
        lambda x, w: jnp.matmul(x, w, out_sharding=P()), ((S, F), W), (P(None, "tp"), P()), (REDUCE,)
    ),
    "local": Case(lambda x, w: x @ w, (X, U), (WHOLE, COLUMNS)),
    "nothing-is-sharded": Case(lambda x, w: x @ w, (X, U), (P(), P())),
    "not-by-columns": Case(
        lambda x, w: jax.reshard(x, WHOLE) @ w, (X, U), (ROWS, P()), missed=("the axis 'tp' along 'b' of lhs alone",)
    ),
    "columns-of-the-sum": Case(
        lambda x, w: jnp.matmul(x, w, out_sharding=P("data", None, "tp")),
        (X, (D, D)),
        (P("data", None, "tp"), CONTRACTED),
        (SCATTER,),
        note="scatters columns",
    ),
    "contracted-rows": Case(
        lambda x, w: jnp.matmul(x, w, out_sharding=P("data", None, "tp")),
        (X, U),
        (P("data", None, "tp"), COLUMNS),
        (GATHER,),
        note="gathers the contracted dimension",
    ),
    "three-products": Case(
        lambda x, q, k, v: tuple(jax.reshard(x, WHOLE) @ w for w in (q, k, v)),
        (X, U, (D, 4), (D, 4)),
        (ROWS, COLUMNS, COLUMNS, COLUMNS),
        (GATHER,),
        note="@ (float32[6, 8], float32[6, 4], float32[6, 4])",
    ),
    "three-products-fsdp": Case(
        lambda x, q, k, v: tuple(
            jnp.einsum("bsd,df->bsf", jax.reshard(x, WHOLE), w, out_sharding=P("data", None, "tp")) for w in (q, k, v)
        ),
        (X, U, (D, 4), (D, 4)),
        (ROWS, P("data", "tp"), P("data", "tp"), P("data", "tp")),
        (GATHER,),
        note="@ (float32[6, 8], float32[6, 4], float32[6, 4])",
    ),
    "dependent-products": Case(
        lambda x, w, v: (lambda g: (g @ w, g @ (v + jnp.sum(g @ w))))(jax.reshard(x, WHOLE)),
        (X, U, U),
        (ROWS, COLUMNS, COLUMNS),
        (GATHER,),
        note="returns the gathered rows",
    ),
    "sum-transposed": Case(
        lambda x, w: jnp.einsum("bsf,df->bsd", x, w, out_sharding=WHOLE),
        ((B, S, F), (D, F)),
        (P("data", None, "tp"), COLUMNS),
        (REDUCE,),
        note="reads the weights as [N, K]",
    ),
    "batch": Case(
        lambda x, w: jnp.einsum("bsd,bdf->bsf", x, w, out_sharding=P("data")),
        (X, (B, D, F)),
        (P("data", None, "tp"), P("data", "tp")),
        missed=("a batch of products",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_forms(name: str) -> None:
    """Of whole numbers, so that values and gradients are exact; all is sharded as without `fuse`."""
    case = CASES[name]
    with jax.set_mesh(explicit()):
        numbers = [whole_numbers(i, *shape, limit=2) for i, shape in enumerate(case.shapes)]
        operands = [jax.device_put(x, spec) for x, spec in zip(numbers, case.specs)]
        fused = jtf.fuse(case.fn)
        report = fused.report(*operands)
        assert tuple(each.operation for each in report.found) == case.found, str(report)
        assert len(report.missed) == len(case.missed), str(report)
        for missed, why in zip(report.missed, case.missed):
            assert missed.collective == "dot_general"
            assert why in missed.why
        assert case.note in str(report)

        def both(*operands: jax.Array) -> Any:
            out = []
            for fn in (case.fn, fused):
                y, back = jax.vjp(fn, *operands)
                out.append((y, back(jax.tree.map(lambda y: 2 * y, y))))
            return out

        want, got = jax.jit(both)(*operands)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))


def test_without_set_mesh() -> None:
    """The types of the arguments alone say on which mesh they are."""
    mesh = explicit()
    rows, whole = jax.NamedSharding(mesh, ROWS), jax.NamedSharding(mesh, WHOLE)

    def fn(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jnp.matmul(jax.reshard(x, whole) @ up, down, out_sharding=rows)

    shardings = [jax.NamedSharding(mesh, spec) for spec in CASES["mlp"].specs]
    operands = [jax.device_put(whole_numbers(i, *s), to) for i, (s, to) in enumerate(zip((X, U, W), shardings))]
    assert [each.operation for each in jtf.fuse(fn).report(*operands).found] == [GATHER, SCATTER]
    np.testing.assert_array_equal(jax.jit(jtf.fuse(fn))(*operands), jax.jit(fn)(*operands))


def test_axes_of_the_compiler_are_left() -> None:
    with jax.set_mesh(explicit(axes=1)):
        x = jax.device_put(whole_numbers(0, S, F), P(None, "data"))
        w = jax.device_put(whole_numbers(1, F, D), P("data"))
        report = jtf.fuse(lambda x, w: jnp.matmul(x, w, out_sharding=P())).report(x, w)
    assert report.found == ()
    assert "axes ['tp'] that are not Explicit" in report.missed[0].why


def test_lowers_to_kernels() -> None:
    mesh = explicit()
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in zip(((2, 32, 64), (64, 128), (128, 64)), CASES["mlp"].specs)
    ]
    with jax.set_mesh(mesh):
        assert_fused(lower_for_cuda(jtf.fuse(mlp), *shapes), 2)
