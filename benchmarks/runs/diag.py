"""check_the_largest piece by piece, with times."""
import os, sys, time, functools
sys.path.insert(0, os.getcwd())
os.environ.setdefault("JAXTAXFREE_TIMEOUT", "5")
import faulthandler; faulthandler.dump_traceback_later(40, exit=False)
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
import jaxtaxfree as jtf
TINY = "--tiny" in sys.argv
IMPL = "simulate" if TINY else "fused"
mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
SHAPES = ((1, 16032), (16, 32064), (3, 77), (300, 500))
def local(_, which, times):
    rank = lax.axis_index("tp")
    def step(i, wrong):
        for key in which:
            rows, size = SHAPES[key]
            draw = jax.random.fold_in(jax.random.key(key), i)
            whole = jnp.round(jax.random.normal(draw, (rows, 2 * size)) * (40 if key % 2 else 1e4)) / 4
            whole = whole.astype(jnp.bfloat16 if key % 2 else jnp.float32)
            own = lax.dynamic_slice_in_dim(whole, rank * size, size, axis=1)
            values, positions = jtf.top_k(own, 1, "tp", implementation=IMPL)
            at = jnp.argmax(whole, axis=1, keepdims=True)
            wrong += jnp.sum(positions != at) + jnp.sum(values != jnp.take_along_axis(whole, at, axis=1))
        return wrong
    return lax.fori_loop(0, times, step, jnp.int32(0))[None]
start = time.time()
for which in ((0,), (2,), (1,), (3,), (0, 1, 2, 3)):
    for times in (1,) if TINY else (20, 1000):
        f = jax.jit(jax.shard_map(functools.partial(local, which=which, times=times), mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False))
        s = time.time(); g = f.lower(jnp.zeros(2)).compile(); c = time.time() - s
        s = time.time()
        try:
            found = np.asarray(g(jnp.zeros(2))); jtf.heap.check()
        except Exception as e:
            found = f"{type(e).__name__}: {str(e)[:300]}"
        print(which, times, "compile %.1f run %.2f" % (c, time.time() - s), found, "at %.0f" % (time.time() - start), flush=True)
