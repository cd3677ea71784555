"""`fuse` in whole programs: what it looks into, what it leaves, what it says, and what is lowered."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.fusion import Found, Missed, Report
from tests.conftest import MeshFactory
from tests.helpers.support import TRITON_CALL, assert_fused, fails, lower_for_cuda, mesh_of, sharded, whole_numbers

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
B, D, F = 8, 4, 6
ROWS, UP, DOWN = P("tp"), P(None, "tp"), P("tp")


def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """x [B / W, D] of this rank -> [B / W, D]."""
    h = jax.nn.silu(lax.all_gather(x, "tp", tiled=True) @ up)
    return x + lax.psum_scatter(h @ down, "tp", tiled=True)


def weights(layers: int | None = None) -> tuple[np.ndarray, ...]:
    lead = () if layers is None else (layers,)
    shapes = ((B, D), (*lead, D, F), (*lead, F, D))
    return tuple(whole_numbers(i, *shape) / 4 for i, shape in enumerate(shapes))


def scanned(body: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
        return lax.scan(lambda x, layer: (body(x, *layer), None), x, (ups, downs))[0]

    return run


def looped(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, x = state
        return i + 1, mlp(x, ups[i], downs[i])

    return lax.while_loop(lambda state: state[0] < len(ups), body, (jnp.int32(0), x))[1]


def branched(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    first = lambda x: mlp(x, ups[0], downs[0])  # noqa: E731
    return lax.cond(lax.psum(jnp.sum(x), "tp") > 0, first, lambda x: mlp(x, ups[1], downs[1]), x)


def in_helpers(x: jax.Array, ups: jax.Array, downs: jax.Array) -> jax.Array:
    """The collectives are in one call of jax.jit, the products in another."""
    gather = jax.jit(lambda x: lax.all_gather(x, "tp", tiled=True))
    dense = jax.jit(lambda x, w: jnp.matmul(x, w))
    scatter = jax.jit(lambda y: lax.psum_scatter(y, "tp", tiled=True))
    return scatter(dense(jax.nn.silu(dense(gather(x), ups[0])), downs[0]))


INSIDE = {
    "scan": (scanned(mlp), 1),
    "while": (looped, 1),
    "cond": (branched, 2),
    "checkpoint": (scanned(jax.checkpoint(mlp)), 1),
    "checkpoint-policy": (
        scanned(jax.checkpoint(mlp, policy=jax.checkpoint_policies.nothing_saveable, prevent_cse=False)),
        1,
    ),
    "jit": (scanned(jax.jit(mlp)), 1),
    "helpers": (in_helpers, 1),
}


def on_mesh(fn: Callable[..., Any], mesh: Mesh, stacked: bool = True, **keywords: Any) -> Callable[..., Any]:
    lead = (None,) if stacked else ()
    specs = (ROWS, P(*lead, *UP), P(*lead, *DOWN))
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=ROWS, **keywords)


def loss_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: jnp.sum(jnp.sin(fn(*operands)))


def close(got: Any, want: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), got, want)


@pytest.mark.parametrize(("name", "vma"), [*((name, True) for name in INSIDE), ("scan", False), ("checkpoint", False)])
def test_looks_into(name: str, vma: bool) -> None:
    fn, times = INSIDE[name]
    operands = weights(layers=2)
    plain = on_mesh(fn, mesh_of(2), check_vma=vma)
    fused = jtf.fuse(plain)
    report = fused.report(*operands)
    assert [x.operation for x in report.found] == times * [GATHER, SCATTER], str(report)
    assert report.missed == ()
    if name == "while":  # which has no reverse derivative
        want, got = jax.jit(lambda *operands: (plain(*operands), fused(*operands)))(*operands)
    else:
        grads = functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
        want, got = jax.jit(lambda *x: (grads(loss_of(plain))(*x), grads(loss_of(fused))(*x)))(*operands)
    close(got, want)


def test_report_says_where() -> None:
    report = jtf.fuse(on_mesh(scanned(jax.checkpoint(mlp)), mesh_of(2))).report(*weights(2))
    first = report.found[0]
    assert first.axes == ("tp",)
    assert first.operands == "float32[8, 4] @ float32[4, 3]"
    assert first.where.startswith("shard_map > scan > ")
    assert "test_fuse_programs.py" in first.where
    assert str(report).splitlines()[0] == "2 fused, 0 missed"


def test_text_of_a_report() -> None:
    report = Report(
        (Found("matmul_all_reduce", ("x", "y"), "a @ b", "scan, f.py:1 (f)", "copies the weights"),),
        (Missed("psum", ("x",), "f.py:2 (f)", "it is odd"),),
    )
    assert str(report) == (
        "1 fused, 1 missed\n"
        "fused   matmul_all_reduce over 'x', 'y': a @ b, scan, f.py:1 (f) (copies the weights)\n"
        "missed  psum over 'x', f.py:2 (f): it is odd"
    )


def test_report_runs_nothing() -> None:
    def traced(x: jax.Array, w: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: pytest.fail("it ran"))
        return lax.psum(x @ w, "tp")

    fn = jax.shard_map(traced, mesh=mesh_of(2), in_specs=(UP, DOWN), out_specs=P())
    shapes = jax.ShapeDtypeStruct((B, D), jnp.bfloat16), jax.ShapeDtypeStruct((D, F), jnp.bfloat16)
    assert [x.operation for x in jtf.fuse(fn).report(*shapes).found] == [REDUCE]


@pytest.mark.parametrize("implementation", ["fused", "simulate"])
def test_insists(implementation: str) -> None:
    def two(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return lax.psum(y, "tp") + y + lax.psum(checkpoint_name(x @ w, "z"), "tp")

    fn = jax.shard_map(two, mesh=mesh_of(2), in_specs=(UP, DOWN), out_specs=P("tp"))
    x, w = whole_numbers(0, B, D), whole_numbers(1, D, F)
    with fails(
        NotImplementedError,
        f"fuse(two, implementation='{implementation}')",
        "cannot replace 2 ",
        "psum_invariant over 'tp', shard_map, ",
        "the product is used before its sum as well",
        "there is a name between it and the product",
        "implementation=None leaves them",
    ):
        jtf.fuse(fn, implementation=implementation)(x, w)


def test_simulates() -> None:
    operands = weights()
    plain = on_mesh(mlp, mesh_of(2), stacked=False)
    got = jax.jit(jtf.fuse(plain, implementation="simulate"))(*operands)
    close(got, jax.jit(plain)(*operands))


def test_refuses_an_unknown_implementation() -> None:
    with fails(ValueError, "There is no implementation 'fast'"):
        jtf.fuse(mlp, implementation="fast")


def test_leaves_what_has_rules_of_its_own() -> None:
    @jax.custom_vjp
    def dense(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum(x @ w, "tp")

    dense.defvjp(lambda x, w: (dense(x, w), (x, w)), lambda saved, ct: (ct @ saved[1].T, saved[0].T @ ct))
    fn = jax.shard_map(dense, mesh=mesh_of(2), in_specs=(UP, DOWN), out_specs=P())
    x, w = whole_numbers(0, B, D), whole_numbers(1, D, F)
    report = jtf.fuse(fn).report(x, w)
    assert report.found == ()
    assert [each.collective for each in report.missed] == [REDUCE]
    assert "inside of custom_vjp_call" in report.missed[0].why
    np.testing.assert_array_equal(jtf.fuse(fn)(x, w), x @ w)


def test_logs_a_report_once(caplog: pytest.LogCaptureFixture) -> None:
    fused, operands = jtf.fuse(on_mesh(mlp, mesh_of(2), stacked=False)), weights()
    with caplog.at_level(logging.INFO, "jaxtaxfree"):
        jax.eval_shape(fused, *operands)
        jax.eval_shape(fused, *operands)
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(texts) == 1
    assert texts[0].startswith("fuse(mlp): 2 fused, 0 missed\nfused   all_gather_matmul over 'tp': ")


def test_has_the_signature_of_the_function() -> None:
    def double(tree: dict[str, Any], *, scale: Any, other: None = None) -> dict[str, Any]:
        """Doubles."""
        assert other is None
        return {"y": 2 * tree["x"] * scale, "z": None, "count": 3}

    fused = jtf.fuse(double)
    assert (fused.__name__, fused.__doc__) == ("double", "Doubles.")
    got = fused({"x": jnp.ones(2)}, scale=3.0)
    assert got.keys() == {"y", "z", "count"}
    assert got["z"] is None
    assert got["y"].tolist() == [6, 6]
    assert jax.grad(lambda x: fused({"x": x}, scale=2.0)["y"].sum())(jnp.ones(2)).tolist() == [4, 4]


def test_a_jitted_function_is_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    fused = jtf.fuse(jax.jit(on_mesh(mlp, mesh_of(2), stacked=False)))
    operands = [jnp.asarray(x) for x in weights()]
    compiled = []
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            caplog.clear()
            fused(*operands)
            compiled.append(sum("Compiling jit(mlp)" in record.getMessage() for record in caplog.records))
    assert compiled == [1, 0]


def test_in_the_body_of_shard_map_and_under_vmap() -> None:
    operands = weights()
    body = jtf.fuse(mlp)
    want = jax.jit(on_mesh(mlp, mesh_of(2), stacked=False))(*operands)
    close(jax.jit(on_mesh(body, mesh_of(2), stacked=False))(*operands), want)
    several = np.stack([operands[0], 2 * operands[0]])
    plain = on_mesh(mlp, mesh_of(2), stacked=False)
    mapped = [jax.jit(jax.vmap(f, in_axes=(0, None, None)))(several, *operands[1:]) for f in (plain, jtf.fuse(plain))]
    close(*mapped)


def test_partial_sums_keep_their_bits() -> None:
    """bf16 products that are summed as f32: the kernel for many rows would send bf16 if nobody said otherwise."""
    fn = lambda x, w: lax.psum_scatter(  # noqa: E731
        jnp.matmul(x, w, preferred_element_type=jnp.float32), "tp", tiled=True
    )
    mesh = mesh_of(2)
    on_ranks = jax.shard_map(fn, mesh=mesh, in_specs=(UP, DOWN), out_specs=ROWS)
    shapes = sharded(mesh, UP, (1024, 256), jnp.bfloat16), sharded(mesh, DOWN, (256, 128), jnp.bfloat16)
    assert jtf.fuse(on_ranks).report(*shapes).found[0].note == "partial sums are sent as float32"
    assert str(jax.make_jaxpr(jtf.fuse(on_ranks))(*shapes)).count("exact_wire") == 1


@pytest.mark.parametrize("partly", [False, True])
def test_axes_that_shard_map_leaves_over(partly: bool) -> None:
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("dp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    x, up, down = weights()

    def local(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        h = lax.all_gather(x, "tp", axis=1, tiled=True) @ up
        y = lax.psum(h @ down, "tp")
        return jnp.concatenate([y, y], axis=-1) if partly else y

    with jax.set_mesh(mesh):
        fn = jax.shard_map(local, in_specs=(P(None, "tp"), UP, DOWN), out_specs=P(), axis_names={"tp"}, check_vma=True)
        operands = jax.device_put((x.reshape(2, 4, D), up, down), (P("dp", "tp"), UP, DOWN))
        fused = jtf.fuse(fn)
        assert [each.operation for each in fused.report(*operands).found] == [GATHER, REDUCE]
        close(jax.jit(fused)(*operands), jax.jit(fn)(*operands))


def test_several_axes_and_two_devices_of_each() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("dp", "tp"))
    x, up, down = weights()

    def local(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        h = lax.all_gather(x, ("tp", "dp"), tiled=True) @ up
        return lax.psum_scatter(h @ down, ("tp", "dp"), tiled=True) + lax.psum(h[:2] @ down, ("dp", "tp"))

    rows, down_rows = P(("tp", "dp")), P("tp")
    fn = jax.shard_map(local, mesh=mesh, in_specs=(rows, UP, down_rows), out_specs=rows)
    report = jtf.fuse(fn).report(x, up, down)
    assert [(each.operation, each.axes) for each in report.found] == [
        (GATHER, ("tp", "dp")),
        (SCATTER, ("tp", "dp")),
        (REDUCE, ("dp", "tp")),
    ]
    close(jax.jit(jtf.fuse(fn))(x, up, down), jax.jit(fn)(x, up, down))


@pytest.mark.parametrize("used", [False, True])
def test_what_is_the_same_on_every_rank_stays_so(used: bool) -> None:
    """The weights differ along "dp", the gathered rows do not."""
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("dp", "tp"))
    x, up, _ = weights()

    def local(x: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
        g = lax.all_gather(x, "tp", tiled=True)
        return g @ up, 2 * (g if used else x)

    out_specs = (P(None, ("dp", "tp")), P("tp"))
    fn = jax.shard_map(local, mesh=mesh, in_specs=(P("tp"), P(None, "dp")), out_specs=out_specs)
    report = jtf.fuse(fn).report(x, up)
    assert len(report.found) == (not used)
    assert [each.why for each in report.missed] == used * [
        "the gathered array is used elsewhere as one that is the same on every rank along ['dp']"
    ]
    close(jax.jit(jtf.fuse(fn))(x, up), jax.jit(fn)(x, up))


def test_what_a_body_returns_is_used() -> None:
    """Gathered rows are given to it; a product that is not summed yet keeps its sum from being fused."""
    x, up, down = weights(layers=2)

    def local(x: jax.Array, ups: jax.Array, downs: jax.Array) -> Any:
        def body(x: jax.Array, layer: tuple[jax.Array, jax.Array]) -> Any:
            g = lax.all_gather(x, "tp", tiled=True)
            y = (g @ layer[0]) @ layer[1]
            return lax.psum_scatter(y, "tp", tiled=True), (g, y)

        return lax.scan(body, x, (ups, downs))

    out_specs = (ROWS, (P(None, "tp"), P(None, "tp")))
    specs = (ROWS, P(None, *UP), P(None, *DOWN))
    fn = jax.shard_map(local, mesh=mesh_of(2), in_specs=specs, out_specs=out_specs)
    report = jtf.fuse(fn).report(x, up, down)
    assert [(each.operation, each.note) for each in report.found] == [(GATHER, "returns the gathered rows")]
    assert [each.why for each in report.missed] == ["the product is used before its sum as well"]
    close(jax.jit(jtf.fuse(fn))(x, up, down), jax.jit(fn)(x, up, down))


def test_calls_that_say_how_results_are_sharded_stay() -> None:
    sharding = jax.NamedSharding(mesh_of(2), ROWS)
    inner = jax.jit(jnp.matmul, out_shardings=sharding)
    jaxpr = jax.make_jaxpr(jtf.fuse(lambda x, w: 2 * inner(x, w)))(jnp.ones((B, D)), jnp.ones((D, F)))
    assert [eqn.params["out_shardings"] for eqn in jaxpr.eqns if eqn.primitive.name == "jit"] == [(sharding,)]


def test_effects_keep_their_order() -> None:
    """The gather moves to its product, and what uses it before moves with it; so does whatever follows that."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("tp",), axis_types=(AxisType.Explicit,))

    def first(x: Any) -> None: ...

    def second() -> None: ...

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        g = jax.reshard(x, P())
        jax.debug.callback(first, g.astype(jnp.bfloat16), ordered=True)
        jax.debug.callback(second, ordered=True)
        return g.astype(jnp.bfloat16) @ w

    with jax.set_mesh(mesh):
        x = jax.device_put(whole_numbers(0, B, D), P("tp"))
        w = jax.device_put(whole_numbers(1, D, F, dtype="bfloat16"), P(None, "tp"))
        jaxpr = jax.make_jaxpr(jtf.fuse(fn))(x, w)
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    callbacks = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "debug_callback"]
    assert [len(eqn.invars) for eqn in callbacks] == [1, 0]
    assert names.index("shard_map") < names.index("debug_callback")


def test_symbolic_shapes_are_left() -> None:
    (rows,) = jax.export.symbolic_shape("b")

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum((x @ w).reshape(-1, F), "tp")

    fn = jax.shard_map(fn, mesh=mesh_of(2), in_specs=(UP, DOWN), out_specs=P())
    shapes = jax.ShapeDtypeStruct((rows, D), jnp.float32), jax.ShapeDtypeStruct((D, F), jnp.float32)
    report = jtf.fuse(fn).report(*shapes)
    assert report.found == ()
    assert "compiled for known shapes" in report.missed[0].why


def test_shard_map_in_shard_map() -> None:
    def inner(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum(x @ w, "tp")

    def outer(x: jax.Array, w: jax.Array) -> jax.Array:
        specs = (P(None, "tp"), P("tp"))
        return 2 * jax.shard_map(inner, in_specs=specs, out_specs=P(), axis_names={"tp"})(x, w)

    x, w = whole_numbers(0, B, D), whole_numbers(1, D, F)
    with jax.set_mesh(Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("dp", "tp"))):
        fn = jax.shard_map(outer, in_specs=(P("dp"), P()), out_specs=P("dp"), axis_names={"dp"})
        (found,) = jtf.fuse(fn).report(x, w).found
        np.testing.assert_array_equal(jax.jit(jtf.fuse(fn))(x, w), 2 * x @ w)
    assert found.where.startswith("shard_map > shard_map, ")


def test_lowers_to_kernels() -> None:
    mesh = mesh_of(4)
    fused = jtf.fuse(on_mesh(mlp, mesh, stacked=False))
    shapes = [
        sharded(mesh, spec, shape, jnp.bfloat16)
        for spec, shape in ((ROWS, (64, 256)), (UP, (256, 512)), (DOWN, (512, 256)))
    ]
    assert_fused(lower_for_cuda(fused, *shapes), 2)
    assert TRITON_CALL not in lower_for_cuda(jtf.fuse(on_mesh(mlp, mesh, stacked=False), implementation="xla"), *shapes)


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """The products that take x are one kernel, and what is added is in the other one."""
    g = lax.all_gather(x, "tp", tiled=True)
    return x + lax.psum_scatter((jax.nn.silu(g @ gate) * (g @ up)) @ down, "tp", tiled=True)


def attention(x: jax.Array, q: jax.Array, k: jax.Array, o: jax.Array) -> jax.Array:
    g = lax.all_gather(x, "tp", tiled=True)
    return x + lax.psum_scatter((g @ q) * jnp.tile(g @ k, 2) @ o, "tp", tiled=True)


@pytest.mark.parametrize(("fn", "widths"), [(swiglu, (512, 512, 512)), (attention, (512, 256, 512))])
def test_two_kernels(fn: Callable[..., Any], widths: tuple[int, int, int]) -> None:
    mesh, specs = mesh_of(4), (ROWS, UP, UP, DOWN)
    first, second, third = widths
    shapes = ((64, 256), (256, first), (256, second), (third, 256))
    program = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=ROWS)
    given = [sharded(mesh, spec, shape, jnp.bfloat16) for spec, shape in zip(specs, shapes)]
    fused = jtf.fuse(program, implementation="fused")
    assert_fused(lower_for_cuda(fused, *given), 2)
    # The first one forward; backward that of the gathered gradient, and the scatter of the sum of all gradients of x.
    gradient = jax.grad(lambda *given: jnp.sum(fused(*given).astype(jnp.float32)), (0, 1, 2, 3))
    assert_fused(lower_for_cuda(gradient, *given), 3)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("differentiate", [False, True])
def test_on_gpus(gpu_mesh: MeshFactory, differentiate: bool) -> None:
    mesh, shapes = gpu_mesh(2, "tp"), ((256, 512), (512, 1024), (1024, 512))
    operands = [
        jax.device_put(whole_numbers(i, *shape, dtype="bfloat16", limit=1) / 8, jax.NamedSharding(mesh, spec))
        for i, (shape, spec) in enumerate(zip(shapes, (ROWS, UP, DOWN)))
    ]
    plain = on_mesh(mlp, mesh, stacked=False)
    fused = jtf.fuse(plain, implementation="fused")
    take = (lambda fn: jax.grad(loss_of(fn), argnums=(0, 1, 2))) if differentiate else (lambda fn: fn)
    want, got = (jtf.block_until_ready(jax.jit(take(fn))(*operands)) for fn in (plain, fused))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.linalg.norm(x - y) < 0.02 * np.linalg.norm(y)


def code_of_the_page() -> list[str]:
    page = (Path(__file__).parents[2] / "docs" / "fuse.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def test_the_page_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    inside, outside = code_of_the_page()
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "jtf": jtf, "P": P, "mesh": mesh_of(4)}
    names |= dict(zip(("x", "up", "down"), (jnp.ones((64, 256)), jnp.ones((256, 512)), jnp.ones((512, 256)))))
    exec(inside, names)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "2 fused, 0 missed"
    assert said[1].startswith("fused   all_gather_matmul over 'tp': float32[64, 256] @ float32[256, 128], shard_map, ")
    assert said[2].startswith(
        "fused   matmul_reduce_scatter over 'tp': float32[64, 128] @ float32[128, 256], shard_map"
    )

    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("data", "tp"), axis_types=(AxisType.Explicit,) * 2)
    exec(outside, names)
    specs = {"x": P("data", "tp", None), "up": UP, "down": P("tp", None)}
    with jax.set_mesh(mesh):
        shapes = {"x": (2, 4, 8), "up": (8, 4), "down": (4, 8)}
        operands = [jax.device_put(jnp.ones(shapes[name]), spec) for name, spec in specs.items()]
        report = jtf.fuse(names["mlp"]).report(*operands)
    assert [each.operation for each in report.found] == [GATHER, SCATTER]
