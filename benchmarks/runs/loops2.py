"""What is around the kernel of a decode step in a loop. 2 GPUs. python benchmarks/runs/loops2.py [--lower]"""
import concurrent.futures as cf, os, statistics, sys, time
sys.path.insert(0, os.getcwd())
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
LOWER = "--lower" in sys.argv
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxtaxfree as jtf
from benchmarks.one_launch import AXIS, CACHE, OUT, Problem, model_of
START = time.time()
sizes = list(map(int, "1,8192,8,4096,8,2,128,3584,32064".split(",")))
STEPS = 32
problem = Problem(model_of(sizes, 2), 2, sizes[0], sizes[1], [sizes[1] - STEPS - 1] * sizes[0])
V, D = problem.model.vocab, problem.model.d_model
embed = jax.device_put(jax.random.normal(jax.random.key(5), (V, D), jnp.bfloat16), NamedSharding(problem.mesh, P()))
tokens = jax.device_put(jax.random.randint(jax.random.key(6), (STEPS, sizes[0]), 0, V), NamedSharding(problem.mesh, P()))

def whole(parts, unroll):
    def run(params, x, cache, lengths, tables, embed, tokens, ranks):
        x32 = x
        def step(x, cache, lengths):
            return jtf.decode_step(params, x, cache, lengths, AXIS, model=problem.model, cos=tables[0], sin=tables[1],
                axis_index=ranks, implementation="fused", config={"kernel": "hopper", "pace": 850})
        def one(i, carry):
            cache, total, last = carry
            if "embed" in parts:
                token = tokens[i + jnp.where(last.reshape(-1)[0] < -1, 1, 0)] if "given" in parts else last[0]
                new = embed[token]
            else:
                new = x32
            logits, cache = step(new, cache, lengths + i if "lengths" in parts else lengths)
            if "choose" in parts:
                value, last = jtf.top_k(logits, 1, AXIS, axis_index=ranks, implementation="fused")
                if "keep" in parts: total = total.at[i].set(value[0, 0])
            else:
                last = logits
            return cache, total, last
        last = jnp.zeros((sizes[0], 1), jnp.int32) if "choose" in parts else jnp.zeros((sizes[0], V // 2), jnp.float32)
        total = jnp.zeros(STEPS, jnp.float32)
        cache, total, last = lax.fori_loop(0, STEPS, one, (cache, total, last), unroll=unroll)
        return jnp.zeros((1, 2), jnp.float32) + jnp.sum(total) + jnp.sum(last)
    specs = (problem.specs, P(), (CACHE, CACHE), P(), (P(), P()), P(), P(), P(AXIS))
    return jax.jit(jax.shard_map(run, mesh=problem.mesh, in_specs=specs, out_specs=OUT, check_vma=False))

ALL = ("embed", "given", "choose", "keep", "lengths")
NONE = {"xla_gpu_enable_command_buffer": ""}
FULL = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION", "xla_gpu_graph_min_graph_size": 1}
SMALL = {"xla_gpu_graph_min_graph_size": 1}
cases = [
    ("all", ALL, 1, {}), ("all, no graphs", ALL, 1, NONE), ("all, while in graph", ALL, 1, FULL), ("all, graphs of 1", ALL, 1, SMALL),
    ("all", ALL, 4, {}), ("greedy", ("embed", "choose", "lengths"), 1, {}),
    ("bare", (), 1, {}), ("bare, no graphs", (), 1, NONE), ("bare, while in graph", (), 1, FULL), ("bare", (), 4, {}),
    ("lengths", ("lengths",), 1, {}), ("choose", ("choose",), 1, {}), ("choose, lengths", ("choose", "lengths"), 1, {}), ("embed, choose", ("embed", "choose", "given"), 1, {}),
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
if os.environ.get("RES"): open(os.environ["RES"] + "/all.hlo", "w").write(live[0][1].as_text())
for rounds in range(5):
    for i, (c, r) in enumerate(live):
        jax.block_until_ready(r(*args))
        n = 6
        s = time.perf_counter()
        out = [r(*args) for _ in range(n)]
        jax.block_until_ready(out)
        times.setdefault(i, []).append((time.perf_counter() - s) / n / STEPS * 1e6)
for i, (c, r) in enumerate(live):
    print(f"{c[0]:32s} unroll {c[2]:2d} {statistics.median(times[i]):8.1f} us  ({min(times[i]):.1f} to {max(times[i]):.1f})", flush=True)
from jaxtaxfree.taxes import profile
for want in (0, 1, 6, 7):
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
        for k, p in zip(ks[8:22], ks[7:21]): print(f"      {k.name[:40]:40s} {(k.end_ns-k.start_ns)/1e3:7.2f}  gap {(k.start_ns-p.end_ns)/1e3:6.2f}")
    except Exception as e:
        print("trace:", type(e).__name__, str(e)[:300], flush=True)
os._exit(0)
