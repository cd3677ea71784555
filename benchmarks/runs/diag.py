"""Where a layer of e4m3 by kernels differs from XLA's: each product by itself, of the same operands, and exactly."""
import functools, sys, time
sys.path.insert(0, ".")
import jax, jax.numpy as jnp, numpy as np
import jaxtaxfree as jtf
from tests.helpers import moe_parity as mp, ragged_dot_parity as rp
from tests.helpers.ragged_dot_cases import Grouped
CPU = jax.default_backend() == "cpu"
FUSED = "simulate" if CPU else "fused"
T, D, F, E = (256, 256, 128, 4) if CPU else mp.SHAPES[0]
start = time.time()
def say(*what): print(f"[{time.time() - start:5.1f}]", *what, flush=True)
def errors(f, w):
    f, w = np.asarray(f, np.float64), np.asarray(w, np.float64)
    d, row = f - w, np.sqrt((w**2).sum(1))
    at = np.unravel_index(np.abs(d).argmax(), d.shape)
    worst = np.sqrt((d**2).sum(1)) / np.maximum(row, 1e-30)
    return f"max/max {np.abs(d).max() / np.abs(w).max():.2e} at {tuple(map(int, at))} found {f[at]:.5g} wanted {w[at]:.5g}, rms {np.sqrt((d**2).mean() / (w**2).mean()):.2e}, worst row {worst.max():.2e} ({int(worst.argmax())}), rows > 1e-2: {int((worst > 1e-2).sum())}"
x, experts, weights, wg, wu, wd = mp.operands(0, (T, D, F, E), 1, 1)
for block, how in (((1, -1), "row"), ((128, 128), "block")):
    q = functools.partial(jtf.quantize, dtype=jnp.float8_e4m3fn, block=block)
    (g, gs), (u, us), (d, ds) = (jax.vmap(q)(w.swapaxes(1, 2)) for w in (wg, wu, wd))
    order = np.argsort(np.where((np.asarray(experts[:, 0]) < 0) | (np.asarray(experts[:, 0]) >= E), E, np.asarray(experts[:, 0])), kind="stable")
    sizes = np.bincount(np.clip(np.asarray(experts[:, 0]), -1, E)[(np.asarray(experts[:, 0]) >= 0) & (np.asarray(experts[:, 0]) < E)], minlength=E).astype(np.int32)
    n = int(sizes.sum())
    rq = functools.partial(jtf.quantize, dtype=jnp.float8_e4m3fn, block={"row": (1, -1), "block": (1, 128)}[how])
    r, rs = jax.jit(rq)(x[order])
    first = lambda impl, dt: jax.jit(lambda r, rs: jtf.ragged_dot(r, u, sizes, lhs_scale=rs, rhs_scale=us, gate=g, gate_scale=gs, activation="silu", rhs_transposed=True, preferred_element_type=dt, precision="highest" if impl == "xla" else None, implementation=impl))(r, rs)[:n]
    h = {i: first(i, jnp.float32) for i in (FUSED, "xla")}
    say(how, "sizes", sizes.tolist(), "first product f32:", errors(h[FUSED], h["xla"]))
    hb = jnp.zeros((T, F), jnp.bfloat16).at[:n].set(h["xla"].astype(jnp.bfloat16))
    hq, hs = jax.jit(rq)(hb)
    second = lambda impl: jax.jit(lambda r, rs: jtf.ragged_dot(r, d, sizes, lhs_scale=rs, rhs_scale=ds, rhs_transposed=True, preferred_element_type=jnp.float32, precision="highest" if impl == "xla" else None, implementation=impl))(hq, hs)[:n]
    o = {i: second(i) for i in (FUSED, "xla")}
    say(how, "second product f32:", errors(o[FUSED], o["xla"]))
    dq = lambda h: jax.jit(rq)(h)
    fused_h = jnp.zeros((T, F), jnp.bfloat16).at[:n].set(h[FUSED].astype(jnp.bfloat16))
    f8, fs = jax.jit(rq)(fused_h)
    say(how, "hidden quantised:", errors(jtf.dequantize(f8, fs)[:n], jtf.dequantize(hq, hs)[:n]), "scales apart in rows:", int((np.asarray(fs) != np.asarray(hs)).sum()), "values flipped:", int((np.asarray(f8, np.float32) != np.asarray(hq, np.float32)).sum()))
    hq, hs = f8, fs
    say(how, "second product of that:", errors(second("xla"), o["xla"]))
    try:
        layer = lambda impl: jax.jit(jax.shard_map(lambda *a: jtf.moe(*a, g, u, d, "tp", w_gate_scale=gs, w_up_scale=us, w_down_scale=ds, weights_transposed=True, quantize_rows=how, precision="highest" if impl == "xla" else None, implementation=impl), mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tp",)), in_specs=jax.sharding.PartitionSpec(), out_specs=jax.sharding.PartitionSpec(), check_vma=False))(x, experts, weights)
        y = {i: layer(i) for i in (FUSED, "xla")}
        say(how, "layer:", errors(y[FUSED], y["xla"]))
    except Exception as fault: say('layer', repr(fault)[:200])
if not CPU:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tp",))
    for k, nn, gated in ((128, 256, False), (256, 128, True), (256, 256, True)):
        try:
            rp._check_eight_bits(mesh, "float8_e4m3fn", "float8_e4m3fn", gated, Grouped(1000, k, nn, (200, 129, 300, 300)))
            say("exact", k, nn, gated)
        except AssertionError as fault: say("WRONG", k, nn, gated, str(fault)[:300])
