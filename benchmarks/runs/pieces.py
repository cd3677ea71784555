"""Where a layer of experts of few tokens spends its time: each piece alone, at 2 and 4 ranks. us a call."""
import functools, os, sys, time
sys.path.insert(0, os.getcwd())
import concurrent.futures as cf
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jaxtaxfree as jtf
from jaxtaxfree.ops.moe import rows as R
from jaxtaxfree.ops.moe.places import places as places_of
T, D, F, E, K, N = (64, 2048, 768, 128, 8, 4) if "--tiny" not in sys.argv else (8, 128, 128, 8, 2, 1)
TINY = "--tiny" in sys.argv
IMPL = "simulate" if TINY else "fused"

ROUNDS = 1 if TINY else 32
def chain(f):
    def g(x, *a):
        def body(_, x):
            for _ in range(N):
                y = f(x, *a)
                x = lax.optimization_barrier(x + jnp.where(jnp.isnan(jnp.ravel(y)[0].astype(jnp.float32)), 1, 0).astype(x.dtype))
            return x
        return lax.fori_loop(0, ROUNDS, body, x)
    return g

def pieces(W):
    mesh = Mesh(np.array(jax.devices()[:W]), ("tp",))
    cap = -(-T * K // 1024) * 1024
    e = E // W
    key = jax.random.key(0)
    put = lambda x, s=P("tp"): jax.device_put(x, NamedSharding(mesh, s))
    x = put(jax.random.normal(key, (W * T, D), jnp.bfloat16))
    ex = put(lax.top_k(jax.random.gumbel(key, (W * T, E)), K)[1].astype(jnp.int32))
    w = put(jnp.ones((W * T, K), jnp.float32) / K)
    a, b = (put(jax.random.normal(key, (E, D, F), jnp.bfloat16)) for _ in range(2))
    c = put(jax.random.normal(key, (E, F, D), jnp.bfloat16))
    rows = put(jax.random.normal(key, (W * cap, D), jnp.bfloat16))
    hid = put(jax.random.normal(key, (W * cap, F), jnp.bfloat16))
    gat = functools.partial(jtf.all_gather, axis_name="tp", tiled=True, implementation=IMPL)
    wide = put(jax.random.normal(key, (W * W * T, D), jnp.float32))
    allx = put(jnp.tile(x, (W, 1)))
    allex = put(jnp.tile(ex, (W, 1)))
    def own(v):
        r = lax.axis_index("tp")
        return jnp.where((v // e) == r, v % e, e)
    pl = lambda v: places_of(own(v), e, W, cap, implementation=IMPL)
    progs = {
        "nothing": (lambda x: x, (x,)),
        "whole": (lambda x, ex, w, a, b, c: jtf.moe(x, ex, w, a, b, c, "tp", implementation=IMPL, capacity=cap), (x, ex, w, a, b, c)),
        "all_gather x": (lambda x: gat(x), (x,)),
        "all_gather experts": (lambda x: gat(x), (w,)),
        "places": (lambda v: pl(v)[0], (allex,)),
        "places and spread": (lambda x, v: R.spread(x, pl(v)[0], cap, implementation=IMPL), (allx, allex)),
        "and products": (lambda x, v, a, b, c: (lambda p: jtf.ragged_dot(jtf.ragged_dot(R.spread(x, p[0], cap, implementation=IMPL), a, p[1], gate=b, activation="silu", implementation=IMPL), c, p[1], implementation=IMPL))(pl(v)), (allx, allex, a, b, c)),
        "psum_scatter f32": (lambda x: jtf.psum_scatter(x, "tp", tiled=True, implementation=IMPL), (wide,)),
        "psum_scatter bf16": (lambda x: jtf.psum_scatter(x, "tp", tiled=True, implementation=IMPL), (allx,)),
    }
    out = {}
    for name, (f, args) in progs.items():
        g = jax.jit(jax.shard_map(chain(f), mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False))
        out[name] = g, args
    return out

def compiled(item):
    (W, name), (g, args) = item
    try:
        return (W, name), g.lower(*args).compile(), args
    except Exception as e:
        return (W, name), None, f"{type(e).__name__}: {str(e)[:200]}"

worlds = (2,) if TINY else (2, 4)
items = [((W, n), ga) for W in worlds for n, ga in pieces(W).items()]
start = time.time()
with cf.ThreadPoolExecutor(18) as pool:
    done = list(pool.map(compiled, items))
print(f"compiled in {time.time()-start:.0f} s", flush=True)
for key, run, args in done:
    if run is None:
        print(key, args); continue
    jax.block_until_ready(run(*args))
    best = []
    for _ in range(1 if TINY else 5):
        jax.block_until_ready([run(*args) for _ in range(3)])
        s = time.perf_counter(); n = 1 if TINY else 5
        jax.block_until_ready([run(*args) for _ in range(n)])
        best.append((time.perf_counter() - s) / n / N / ROUNDS * 1e6)
    print(f"{key[0]} ranks, {key[1]:22s} {sorted(best)[len(best)//2]:8.1f} us  ({min(best):.1f} to {max(best):.1f})", flush=True)
