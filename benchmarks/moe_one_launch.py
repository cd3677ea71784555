"""Dispatch and first product of moe in one launch, against two, on two GPUs: is it right, and what does it win.

python benchmarks/moe_one_launch.py

From the project's root, at the size of Qwen3-30B-A3B with 4096 tokens a rank, even and uneven routing (Dirichlet(1)).
Prints how far results of the layer differ from those of two launches, which must be 0; the batched dense products; and
for both, µs as median and least of rounds in turn, of dispatch with the first product and of the layer. The places of
rows and `ends` are found before, `ends` outside of what is timed.
"""

import functools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.ops.moe import _gathered
from jaxtaxfree.ops.moe.dispatch_product import Launch, dispatch_product
from jaxtaxfree.ops.moe.exchange import combine, dispatch
from jaxtaxfree.ops.moe.places import places

T, D, F, E, K, W = 4096, 2048, 768, 128, 8, 2
HERE, CHAIN = E // W, 4
BF16 = jnp.bfloat16


def hidden(x, place, ends, sizes, wg, wu, most, how):
    if how is None:
        rows = dispatch(x, place, most, ("x",))
        return jtf.ragged_dot(rows, wu, sizes, gate=wg, activation="silu", fill=False)
    return dispatch_product(x, place, ends, wu, wg, most, ("x",), launch=how)[0]


def ends_of(experts):  # [W, HERE] of this rank, from those of all
    ex = lax.all_gather(experts, "x") - lax.axis_index("x") * HERE
    counts = jax.vmap(
        lambda e: jnp.bincount(jnp.where((e >= 0) & (e < HERE), e, HERE).reshape(-1), length=HERE + 1)[:HERE]
    )(ex)
    return jnp.cumsum(counts, 0).astype(jnp.int32)


def prepare(x, experts, weights, most):
    ex, w = _gathered(experts, weights, ("x",), None)
    place, sizes = places(ex - lax.axis_index("x") * HERE, HERE, W, most)
    return place, sizes, w


def part(x, experts, weights, ends, wg, wu, wd, *, most, how):
    place, sizes, _ = prepare(x, experts, weights, most)
    total, out = jnp.float32(0), x
    for _ in range(CHAIN):
        out = hidden(x, place, ends, sizes, wg, wu, most, how)
        x, out = lax.optimization_barrier((x, out))
        total += out[0, 0]
    return total[None], out


def layer(x, experts, weights, ends, wg, wu, wd, *, most, how):
    out = x
    for _ in range(CHAIN):
        place, sizes, w = prepare(x, experts, weights, most)
        h = hidden(x, place, ends, sizes, wg, wu, most, how)
        rows = jtf.ragged_dot(h, wd, sizes, fill=False)
        out = combine(rows, place, ("x",), w, x.dtype)
        x, out, experts = lax.optimization_barrier((x, out, experts))
    return out


def dense(x, experts, weights, ends, wg, wu, wd):
    each = jnp.tile(x[:512][None], (HERE, 1, 1))
    out = each
    for _ in range(CHAIN):
        h = jax.nn.silu(jnp.einsum("gmd,gdf->gmf", each, wg)) * jnp.einsum("gmd,gdf->gmf", each, wu)
        out = jnp.einsum("gmf,gfd->gmd", h, wd)
        each, out = lax.optimization_barrier((each, out))
    return out


def program(mesh, f):
    spec = P("x")
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(spec,) * 7, out_specs=spec, check_vma=False))


def timed(fs, args, rounds=9, calls=8):
    times = {name: [] for name in fs}
    for f in fs.values():
        jax.block_until_ready(f(*args))
    for _ in range(rounds):
        for name, f in fs.items():
            begin = time.perf_counter()
            jax.block_until_ready([f(*args) for _ in range(calls)])
            times[name].append((time.perf_counter() - begin) / calls / CHAIN * 1e6)
    return {name: (np.median(t), np.min(t)) for name, t in times.items()}


def routing(kind, draw):
    p = np.full(E, 1 / E) if kind == "even" else draw.dirichlet(np.ones(E))
    g = -np.log(-np.log(draw.random((W * T, E)))) + np.log(p)
    return np.argsort(-g, 1)[:, :K].astype(np.int32)


def main():
    mesh = jax.make_mesh((W,), ("x",), devices=jax.devices()[:W])
    draw = np.random.default_rng(0)

    def put(array, dtype=None):
        return jax.device_put(jnp.asarray(array, dtype), NamedSharding(mesh, P("x")))

    x = put(draw.standard_normal((W * T, D), np.float32), BF16)

    def make(i, *shape):
        draw_one = lambda: (jax.random.normal(jax.random.key(i), shape) / shape[1] ** 0.5).astype(BF16)  # noqa: E731
        return jax.jit(draw_one, out_shardings=NamedSharding(mesh, P("x")))()

    wg, wu, wd = make(1, E, D, F), make(2, E, D, F), make(3, E, F, D)
    weights = put(draw.random((W * T, K)), jnp.float32)
    routes = {kind: routing(kind, draw) for kind in ("even", "dirichlet")}
    most = max(max((e // HERE == r).sum() for r in range(W)) for e in routes.values())
    most = -(-int(most) // 1024) * 1024
    print("most", most, jax.devices()[0].device_kind)
    hows = {"two launches": None}
    for early in (0, 16, 32, 64):
        hows[f"one launch, early {early}"] = Launch(early=early)
    parts, layers = {}, {}
    for name, how in hows.items():
        parts[name] = program(mesh, functools.partial(part, most=most, how=how))
        layers[name] = program(mesh, functools.partial(layer, most=most, how=how))
    counted = jax.jit(jax.shard_map(ends_of, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    dense_f = program(mesh, dense)
    for kind, e in routes.items():
        experts = put(e)
        args = (x, experts, weights, counted(experts), wg, wu, wd)
        want = np.asarray(layers["two launches"](*args), np.float32)
        good: dict[str, float | str] = {}
        for name in list(hows)[1:]:
            for _ in range(3 if kind == "even" else 2):
                try:
                    found = np.asarray(layers[name](*args), np.float32)
                    good[name] = float(np.abs(found - want).max())
                except Exception as error:
                    good[name] = repr(error)[:200]
        print(kind, "greatest difference", good, flush=True)
        right = [n for n, v in good.items() if isinstance(v, float) and v < 1e-2]
        if kind == "even":
            print("dense", timed({"dense": dense_f}, args), flush=True)
        for what, fs in (("dispatch + first product", parts), ("layer", layers)):
            for name, (median, least) in timed({n: fs[n] for n in ["two launches", *right]}, args).items():
                print(f"{kind:10} {what:26} {name:28} {median:7.1f} {least:7.1f}", flush=True)


if __name__ == "__main__":
    main()
