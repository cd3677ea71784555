"""One launch with caches of 8 bits and in pages beside bf16's, operations and XLA: us a step, 2 GPUs, 8B's share of eight.

python benchmarks/runs/kv.py [--tiny | --lower]
"""
import concurrent.futures as cf, os, sys, time
sys.path.insert(0, os.getcwd())
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jaxtaxfree as jtf
TINY, LOWER = "--tiny" in sys.argv, "--lower" in sys.argv
L, D, N, K, H, F, V = (2, 256, 4, 2, 128, 256, 256) if TINY else (8, 4096, 8, 2, 128, 3584, 32064)
STEPS = 2 if TINY else 32
mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
model = jtf.DecoderSpec(layers=L, d_model=D, heads=N, kv_heads=K, head_dim=H, d_mlp=F, vocab=V, norm_eps=1e-5)
specs = model.partition_specs("tp")
put = lambda x, s: jax.device_put(x, NamedSharding(mesh, s))
def params():
    shapes = model.param_shapes(1)
    key = jax.random.key(0)
    made = {}
    for i, (name, shape) in enumerate(shapes.items()):
        scale = 1.0 if "norm" in name else shape[-1] ** -0.5
        f = jax.jit(lambda k: (jax.random.normal(k, shape, jnp.float32) * (0.1 if scale == 1.0 else scale) + (1 if scale == 1.0 else 0)).astype(jnp.bfloat16), out_shardings=NamedSharding(mesh, specs[name]))
        made[name] = f(jax.random.fold_in(key, i))
    return made
HEADS = P(None, None, "tp")
def problem(b, slots, kind):
    length = slots - STEPS - 2
    dtype = jnp.int8 if kind == "int8" else jnp.bfloat16
    PAGE = int(kind[5:]) if kind[:5] == "pages" else 0
    shape = (L, b, K, slots, H) if not PAGE else (L, b * slots // PAGE, K, PAGE, H)
    def make(i):
        k = jax.random.fold_in(jax.random.key(7), i)
        if kind == "int8":
            return jax.random.randint(k, shape, -127, 128, jnp.int32).astype(jnp.int8)
        return jax.random.normal(k, shape, jnp.float32).astype(dtype)
    cache = [jax.jit(make, out_shardings=NamedSharding(mesh, HEADS))(i) for i in range(2)]
    if kind == "int8":
        cache += [put(jnp.full(shape[:-1], 1 / 64, jnp.float32), HEADS) for _ in range(2)]
    x = put(jax.random.normal(jax.random.key(3), (b, D), jnp.bfloat16), P())
    lengths = put(jnp.full((b,), length, jnp.int32), P())
    tables = put(jnp.asarray(np.random.default_rng(0).permutation(b * slots // PAGE).reshape(b, -1).astype(np.int32)), P()) if PAGE else None
    return tuple(cache), x, lengths, tables
angles = np.outer(np.arange(8192 if not TINY else 256), 10000.0 ** (-np.arange(0, H, 2) / H)).astype(np.float32)
cos, sin = jnp.cos(angles), jnp.sin(angles)
def program(how):
    def local(p, cache, x, lengths, tables):
        def one(i, carry):
            cache, total = carry
            new = x + (total[:, :1] * 1e-30).astype(x.dtype)
            logits, cache = jtf.decode_step(p, new, cache, lengths + i, "tp", model=model, cos=cos, sin=sin, block_tables=tables, **how)
            return cache, total + logits
        zero = lax.pcast(jnp.zeros((x.shape[0], V // 2), jnp.float32), "tp", to="varying")
        return lax.fori_loop(0, STEPS, one, (cache, zero))
    return lambda n, t: jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs, tuple([HEADS] * n), P(), P(), P()), out_specs=(tuple([HEADS] * n), P(None, "tp")), check_vma=False), donate_argnums=(1,))
HOP = {"kernel": "hopper"}
FORMS = {"registers": {"implementation": "fused", "config": HOP | {"tensor_cores": False, "attention_cores": False}}, "cores": {"implementation": "fused", "config": HOP | {"tensor_cores": True}},
    "mixed": {"implementation": "fused", "config": HOP | {"tensor_cores": False, "attention_cores": True}},
    "operations": {"implementation": "fused", "config": {"kernel": "operations"}}, "xla": {"implementation": "xla"}}
if TINY: FORMS = {"one launch": {"implementation": "xla"}}
p = params()
slots_of = {1: 8192, 2: 4096, 4: 2048}
cases = [(1, k, f) for k in ("int8", "pages16", "pages64", "pages128") for f in ("registers", "mixed")]
cases += [(2, "int8", f) for f in ("registers", "cores", "mixed", "operations")]
cases += [(4, "pages16", f) for f in ("cores", "mixed", "registers")] + [(4, "int8", "mixed"), (1, "int8", "xla")]
made, start = {}, time.time()
for b in slots_of:
    for kind in ("int8", "pages16", "pages64", "pages128"):
        made[b, kind] = problem(b, slots_of[b], kind)
def compiled(case):
    b, kind, form = case
    ops = made[b, kind]
    try:
        low = program(FORMS[form])(len(ops[0]), 0)
        if LOWER:
            low.trace(p, *ops).lower(lowering_platforms=("cuda",)); return case, None
        lowered = low.lower(p, *ops)
        return case, more.submit(lowered.compile)
    except Exception as e:
        return case, f"{type(e).__name__}: {str(e)[:250]}"
more = cf.ThreadPoolExecutor(12)
with cf.ThreadPoolExecutor(1) as pool:
    found = list(pool.map(compiled, cases))
found = [(case, run if run is None or isinstance(run, str) else run.result()) for case, run in found]
print(f"compiled in {time.time()-start:.0f} s", flush=True)
logits = {}
for (b, kind, form), run in found:
    if run is None or isinstance(run, str):
        print(b, kind, form, run or "lowered"); continue
    cache, x, lengths, tables = made[b, kind]
    copy = lambda: tuple(jnp.copy(c) for c in cache)
    ours = copy(); jax.block_until_ready(ours)
    ours, out = run(p, ours, x, lengths, tables)
    first = np.asarray(out)
    logits[b, kind, form] = first
    samples = []
    for _ in range(2 if TINY else 6):
        n = 1 if TINY else 5
        jax.block_until_ready(ours); s = time.perf_counter()
        for _ in range(n):
            ours, out = run(p, ours, x, lengths, tables)
        jax.block_until_ready(out); samples.append((time.perf_counter() - s) / n / STEPS * 1e6)
    reference = logits.get((b, kind, "xla"))
    print(f"{b} sequences, {kind:9s} {form:11s} {np.median(samples):8.1f} us ({min(samples):.1f} to {max(samples):.1f}), sum of logits {float(np.abs(first).mean()):.4f}", flush=True)
    del ours
for (b, kind, form), x in logits.items():
    if form != "xla" and (b, kind, "xla") in logits:
        want = logits[b, kind, "xla"]
        print(b, kind, form, "error to XLA", float(np.sqrt(np.mean((x - want) ** 2) / np.mean(want**2))))
