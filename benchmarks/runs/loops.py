"""What is around the kernel of a decode step in a loop: unrolled loops, XLA's command buffers, the kernels of a step in a trace. 2 GPUs, 90 s.

python benchmarks/runs/loops.py [--tiny | --lower]
"""
import concurrent.futures as cf, os, statistics, sys, time
sys.path.insert(0, os.getcwd())
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
TINY, LOWER = "--tiny" in sys.argv, "--lower" in sys.argv
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxtaxfree as jtf
from benchmarks.one_launch import AXIS, CACHE, OUT, Problem, model_of
START = time.time()
sizes = [1, 256, 1, 256, 4, 2, 64, 256, 32] if TINY else list(map(int, "1,8192,8,4096,8,2,128,3584,32064".split(",")))
STEPS = 4 if TINY else 32
problem = Problem(model_of(sizes, 2), 2, sizes[0], sizes[1], [sizes[1] - STEPS - 1] * sizes[0])
V, D = problem.model.vocab, problem.model.d_model
embed = jax.device_put(jax.random.normal(jax.random.key(5), (V, D), jnp.bfloat16), NamedSharding(problem.mesh, P()))
tokens = jax.device_put(jax.random.randint(jax.random.key(6), (STEPS, sizes[0]), 0, V), NamedSharding(problem.mesh, P()))
impl = "xla" if TINY else "fused"

def whole(parts, unroll):
    """parts: of "embed", "choose", "total"."""
    def run(params, x, cache, lengths, tables, embed, tokens, ranks):
        given = ranks if "rank" in parts else None
        def step(params, x, cache, lengths, tables):
            return jtf.decode_step(params, x, cache, lengths, AXIS, model=problem.model, cos=tables[0], sin=tables[1],
                axis_index=given, implementation=impl, config=None if TINY else {"kernel": "hopper"})
        def one(i, carry):
            cache, total, last = carry
            if "embed" in parts:
                if "direct" in parts: token = tokens[i + jnp.where(last[0, 0] < -1, 1, 0)]
                else: token, _ = lax.optimization_barrier((tokens[i], last))
                new = embed[token]
            else:
                new, _ = lax.optimization_barrier((x, last))
            logits, cache = step(params, new, cache, lengths + i, tables)
            if "choose" in parts:
                value, last = jtf.top_k(logits, 1, AXIS, axis_index=given, implementation=impl)
                total = total + (logits if "total" in parts else value.sum())
            else:
                last = logits
                if "total" in parts: total = total + logits
            return cache, total, last
        zero = jnp.zeros((sizes[0], V // 2), jnp.float32)
        last = jnp.zeros((sizes[0], 1), jnp.int32) if "choose" in parts else zero
        total = zero if "total" in parts else jnp.float32(0)
        cache, total, last = lax.fori_loop(0, STEPS, one, (cache, total, last), unroll=unroll)
        return jnp.zeros((1, 2), jnp.float32) + jnp.sum(total) + jnp.sum(last)
    specs = (problem.specs, P(), (CACHE, CACHE), P(), (P(), P()), P(), P(), P(AXIS))
    return jax.jit(jax.shard_map(run, mesh=problem.mesh, in_specs=specs, out_specs=OUT, check_vma=False))

ALL = ("embed", "choose", "total")
NONE = {"xla_gpu_enable_command_buffer": ""}
SMALL = {"xla_gpu_graph_min_graph_size": 1}
cases = [
    ("as it was", ALL, 1, {}), ("rank given", (*ALL, "rank"), 1, {}), ("token by index", (*ALL, "direct"), 1, {}),
    ("both", (*ALL, "rank", "direct"), 1, {}), ("both", (*ALL, "rank", "direct"), 4, {}), ("both, without total", ("embed", "choose", "rank", "direct"), 1, {}),
    ("both, graphs of 1", (*ALL, "rank", "direct"), 1, SMALL), ("both, no command buffers", (*ALL, "rank", "direct"), 1, NONE),
    ("step alone", (), 1, {}), ("step alone, rank given", ("rank",), 1, {}), ("step alone, rank given", ("rank",), 4, {}),
]
ranks = jax.device_put(np.arange(2, dtype=np.int32), NamedSharding(problem.mesh, P(AXIS)))
args = (*problem.operands, embed, tokens, ranks)
def compiled(case):
    _, parts, unroll, options = case
    try:
        f = whole(parts, unroll)
        if LOWER:
            f.trace(*args).lower(lowering_platforms=("cuda",)); return "lowered"
        return f.lower(*args).compile(compiler_options=options or None)
    except Exception as e:
        return f"{type(e).__name__}: {str(e)[:300]}"
with cf.ThreadPoolExecutor(1 if LOWER else 16) as pool: runs = list(pool.map(compiled, cases))
print(f"compiled in {time.time() - START:.0f} s", flush=True)
times = {}
live = [(c, r) for c, r in zip(cases, runs) if not isinstance(r, str)]
for c, r in zip(cases, runs):
    if isinstance(r, str): print(c[0], c[2], r)
if LOWER: os._exit(0)
for rounds in range(1 if TINY else 5):
    for i, (c, r) in enumerate(live):
        jax.block_until_ready(r(*args))
        n = 1 if TINY else 6
        s = time.perf_counter()
        out = [r(*args) for _ in range(n)]
        jax.block_until_ready(out)
        times.setdefault(i, []).append((time.perf_counter() - s) / n / STEPS * 1e6)
for i, (c, r) in enumerate(live):
    print(f"{c[0]:32s} unroll {c[2]:2d} {statistics.median(times[i]):8.1f} us  ({min(times[i]):.1f} to {max(times[i]):.1f})", flush=True)
from jaxtaxfree.taxes import profile
if not TINY:
    for want in (3, 9):
        c, r = live[want]
        try:
            rec = profile.record(r, *args, steps=3, bandwidth=3e12)
            ks = sorted((k for k in rec.kernels if k.device == min(k.device for k in rec.kernels)), key=lambda k: k.start_ns)
            ks = ks[len(ks) // 2:]
            print("--", c[0], c[2], len(ks), "kernels")
            seen, last = {}, None
            for k in ks:
                seen.setdefault(k.name, []).append((k.end_ns - k.start_ns, k.start_ns - last if last else 0)); last = k.end_ns
            for name, v in seen.items():
                print(f"   {name[:60]:60s} x {len(v):4d} {statistics.median(a for a, _ in v)/1e3:8.2f} us, behind a gap of {statistics.median(b for _, b in v)/1e3:6.2f}", flush=True)
            for k, p in zip(ks[8:30], ks[7:29]): print(f"      {k.name[:40]:40s} {(k.end_ns-k.start_ns)/1e3:7.2f}  gap {(k.start_ns-p.end_ns)/1e3:6.2f}")
        except Exception as e:
            print("trace:", type(e).__name__, str(e)[:300], flush=True)
