"""All steps in one launch beside a loop of steps. 2 GPUs. python benchmarks/runs/greedy.py [--lower] [--tiny]"""
import concurrent.futures as cf, dataclasses, os, statistics, sys, time
sys.path.insert(0, os.getcwd())
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
LOWER = "--lower" in sys.argv
import jax
if LOWER:
    jax.config.update("jax_platforms", "cpu"); jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxtaxfree as jtf
from benchmarks.one_launch import AXIS, CACHE, OUT, Problem, model_of
from jaxtaxfree.ops.decode_step import VARIANTS
from jaxtaxfree.ops.decode_step.hopper import Call
from jaxtaxfree.ops.variant import choose
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.target import HOPPER
START = time.time()
SHAPE = os.environ.get("SHAPE", "1,8192,8,4096,8,2,128,3584,32064")
sizes = list(map(int, SHAPE.split(",")))
if LOWER: sizes[1] = 8192
STEPS = 32
W = 2
PACE = int(os.environ.get("PACE", "850"))
if not LOWER:
    problem = Problem(model_of(sizes, W), W, sizes[0], sizes[1], [sizes[1] - STEPS - 1] * sizes[0])
    model, mesh = problem.model, problem.mesh
else:
    model = model_of(sizes, W)
    from tests.helpers.support import mesh_of, sharded, lower_for_cuda
    mesh = mesh_of(W, AXIS)
V, D = model.vocab, model.d_model

def loop(params, cache, lengths, tables, embed, tokens, ranks):
    def one(i, carry):
        cache, total, last, _ = carry
        token = jnp.where(tokens[i] < 0, last[:, 0], tokens[i])
        logits, cache = jtf.decode_step(params, embed[token], cache, lengths + i, AXIS, model=model, cos=tables[0], sin=tables[1],
            axis_index=ranks, implementation="fused", config={"kernel": "hopper", "pace": PACE})
        value, last = jtf.top_k(logits, 1, AXIS, axis_index=ranks, implementation="fused")
        return cache, total.at[i].set(last[:, 0]), last, logits
    zero = jnp.zeros((sizes[0], V // W), jnp.float32)
    cache, total, last, logits = lax.fori_loop(0, STEPS, one, (cache, jnp.zeros((STEPS, sizes[0]), jnp.int32), jnp.zeros((sizes[0], 1), jnp.int32), zero))
    return logits, total[None], cache

def greedy(steps, pace, clock, params, cache, lengths, tables, embed, tokens, ranks):
    call = Call(model=model, world=W, batch=sizes[0], tokens=1, slots=sizes[1], positions=sizes[1],
        dtype=np.dtype(jnp.bfloat16), cache_dtype=np.dtype(jnp.bfloat16), by_heads=True, target=HOPPER, steps=steps, embeddings=V)
    chosen = choose("decode_step", VARIANTS, call, {"kernel": "hopper", "pace": pace, "times": clock})
    def some(cache, i, tokens):
        arrays = chosen.arrays(params, (embed, tokens), cache, lengths + i, *(t[None] for t in tables))
        logits, k, v, tok, val, *t = shmem_call(chosen.variant.kernel, *arrays, axis_name=AXIS, axis_index=ranks, **chosen.keywords)
        if clock: tok = t[0]
        return logits, (k, v), tok
    if steps == STEPS:
        logits, cache, tok = some(cache, 0, tokens)
        return logits, tok[None], cache
    def one(i, carry):
        cache, total, last, _ = carry
        own = lax.dynamic_slice_in_dim(tokens, i * steps, steps)
        own = own.at[0].set(jnp.where(own[0] < 0, last, own[0]))
        logits, cache, tok = some(cache, i * steps, own)
        return cache, lax.dynamic_update_slice_in_dim(total, tok, i * steps, 0), tok[-1], logits
    zero = jnp.zeros((sizes[0], V // W), jnp.float32)
    cache, total, last, logits = lax.fori_loop(0, STEPS // steps, one, (cache, jnp.zeros((STEPS, sizes[0]), jnp.int32), jnp.zeros(sizes[0], jnp.int32), zero))
    return logits, total[None], cache

cases = {"loop": loop}
for k, pace in ((32, PACE), (8, PACE), (1, PACE), (32, 0)):
    cases[f"greedy {k} pace {pace}"] = lambda *a, k=k, pace=pace: greedy(k, pace, False, *a)
cases["clock"] = lambda *a: greedy(32, PACE, True, *a)
if os.environ.get("ONLY"): cases = {n: f for n, f in cases.items() if n in os.environ["ONLY"].split(";")}
specs = (model.partition_specs(AXIS), (CACHE, CACHE), P(), (P(), P()), P(), P(), P(AXIS))
programs = {n: jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=(OUT, P(AXIS), (CACHE, CACHE)), check_vma=False) for n, f in cases.items()}
if LOWER:
    shapes = model.param_shapes()
    params = {n: sharded(mesh, s, shapes[n], "bfloat16") for n, s in specs[0].items()}
    cache = (sharded(mesh, CACHE, (model.layers, sizes[0], model.kv_heads, sizes[1], model.head_dim), "bfloat16"),) * 2
    table = sharded(mesh, P(), (sizes[1], model.rotated // 2), "float32")
    args = (params, cache, sharded(mesh, P(), (sizes[0],), jnp.int32), (table, table), sharded(mesh, P(), (V, D), "bfloat16"), sharded(mesh, P(), (STEPS, sizes[0]), jnp.int32), sharded(mesh, P(AXIS), (W,), jnp.int32))
    from tests.compiled.test_compiled import ptxas_report, spilled_bytes
    from tests.compiled.test_gluon import PTX, SHARED_MEMORY, launch_of
    from tests.helpers.support import Compiled
    for n, f in programs.items():
        try:
            text = lower_for_cuda(f, *args)
            kernel = launch_of(text) if "loop" not in n else None
            if kernel:
                report = ptxas_report(Compiled(kernel[PTX].decode(), kernel[SHARED_MEMORY], (), {}))
                print(n, spilled_bytes(report), "spilled", kernel[SHARED_MEMORY], f"{time.time()-START:.0f}", flush=True)
            else: print(n, "lowered", flush=True)
        except Exception as e: print(n, type(e).__name__, str(e)[-1500:], flush=True)
    os._exit(0)
put = lambda x, s: jax.device_put(x, NamedSharding(mesh, s))
embed = put(jax.random.normal(jax.random.key(5), (V, D), jnp.bfloat16), P())
given = put(jax.random.randint(jax.random.key(6), (STEPS, sizes[0]), 0, V), P())
free = put(jnp.full((STEPS, sizes[0]), -1).at[0].set(given[0]), P())
ranks = put(np.arange(W, dtype=np.int32), P(AXIS))
of = lambda tokens: (problem.params, problem.cache, problem.lengths, problem.tables, embed, tokens, ranks)
def compiled(n):
    try: return jax.jit(programs[n]).lower(*of(given)).compile()
    except Exception as e: return f"{type(e).__name__}: {str(e)[:600]}"
with cf.ThreadPoolExecutor(8) as pool: runs = dict(zip(programs, pool.map(compiled, programs)))
print(f"compiled in {time.time() - START:.0f} s", flush=True)
for n, r in runs.items():
    if isinstance(r, str): print(n, r, flush=True)
runs = {n: r for n, r in runs.items() if not isinstance(r, str)}
if "clock" in runs:
    r = runs.pop("clock")
    from benchmarks import step_clock
    ts = np.stack([np.asarray(r(*of(free))[1]) for _ in range(8)])  # [8, world, programs, ...]
    print("clock", flush=True); step_clock.show(ts)
    t = ts[3:].astype(np.int64) & 0xFFFFFFFF
    print("first x to the end of the last layer", np.median((t[:, :, :, -2, 5, 3] - t[:, :, :, 0, 0, 0]).mean(-1)) / 1e3, "to logits", np.median((t[:, :, :, -1, 0, 1] - t[:, :, :, 0, 0, 0]).max(-1)) / 1e3, "layers end to logits' x", np.median((t[:, :, :, -1, 0, 0] - t[:, :, :, -2, 5, 3]).mean(-1)) / 1e3, flush=True)
    x = t[:, :, :, -1].reshape(*t.shape[:3], 24); end = x[..., 1].max(-1)[..., None]
    print("behind the last program's logits: " + ", ".join(f"{n} {np.median((x[..., i] - end).mean(-1)) / 1e3:.2f}/{np.median((x[..., i] - end).max(-1)) / 1e3:.2f}" for n, i in (("logits", 1), ("sent", 4), ("received", 5), ("known", 6), ("reported", 7))))
    print("before the last step's first x: " + ", ".join(f"{n} {np.median((t[:, :, :, 0, 0, 0] - x[..., i]).mean(-1)) / 1e3:.2f}" for n, i in (("begin", 8), ("embedded", 9))), "; first x to", f"{np.median((end[..., 0] - t[:, :, :, 0, 0, 0].mean(-1))) / 1e3:.2f}")
    starts = x[:, :, :32, 12]
    print("step to step, us:", " ".join(f"{v / 1e3:.1f}" for v in np.median(np.diff(starts, axis=-1), (0, 1))))
    jax.block_until_ready(r(*of(free))); s = time.perf_counter(); o = [r(*of(free))[0] for _ in range(20)]; jax.block_until_ready(o); print("wall, a step of 20 calls", (time.perf_counter() - s) / 20 / 32 * 1e6)
    for l in range(8): print("layer", l, f"{np.median((t[:, :, :, l, 5, 3] - (t[:, :, :, l - 1, 5, 3] if l else t[:, :, :, 0, 0, 0])).mean(-1)) / 1e3:.2f}", end="; ")
    print()
wanted = {}
for n, r in runs.items():
    for which, tokens in (("given", given),):
        outs = [jax.device_get(r(*of(tokens))) for _ in range(3)]
        logits, tok, cache = outs[0]
        same = all(np.array_equal(a, b) for o in outs[1:] for a, b in zip(jax.tree.leaves(o), jax.tree.leaves(outs[0])))
        wanted.setdefault(which, (logits, tok, cache))
        l, t, c = wanted[which]
        err = np.linalg.norm(logits - l) / np.linalg.norm(l)
        print(f"{n:20s} {which}: logits {err:.1e}, tokens equal {np.mean(tok == t):.3f}, ranks agree {np.array_equal(tok[0], tok[1])}, caches equal {[bool(np.array_equal(np.asarray(a).view(np.int16), np.asarray(b).view(np.int16))) for a, b in zip(cache, c)]}, same bits {same}", flush=True)
times = {}
for rounds in range(5):
    for n, r in runs.items():
        for which, tokens in (("given", given),):
            args = of(tokens)
            jax.block_until_ready(r(*args)[0])
            s = time.perf_counter()
            out = [r(*args)[0] for _ in range(20)]
            jax.block_until_ready(out)
            times.setdefault((n, which), []).append((time.perf_counter() - s) / 20 / STEPS * 1e6)
for (n, which), t in times.items(): print(f"{n:20s} {which}  {statistics.median(t):8.1f} us  ({min(t):.1f} to {max(t):.1f})", flush=True)
os._exit(0)
