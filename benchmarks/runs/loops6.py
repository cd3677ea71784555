"""Configs of decode_step in a loop with embedding and choice, and the loop with a cache that is donated, and of 128 steps.
us a step of queued programs. 2 GPUs. python benchmarks/runs/loops6.py [--lower] [PART/PARTS]"""
import json, os, sys
P = {"pace": 850}
def c(sums=1000, gate=1000, heads=0, hidden=1000, queries=0, parts=0, pace=850, gap=0, gaps="sghiqp"):
    names = dict(s="sums", g="gate", h="heads", i="hidden", q="queries", p="parts")
    values = dict(sums=sums, gate=gate, heads=heads, hidden=hidden, queries=queries, parts=parts)
    for k in gaps: values[names[k]] += gap << 16
    return {"pace": pace} | {"patience_" + k: v for k, v in values.items()}
configs = [c(), c(queries=400), c(heads=400), c(queries=400, heads=400), c(queries=400, heads=400, pace=800), c(queries=400, heads=400, hidden=800), c(pace=800),
    c(queries=300, heads=300, parts=300), c(queries=500, heads=500), c(gap=100), c(gap=200), c(gap=400), c(gap=200, gaps="hqp"), c(gap=200, gaps="sgi"), c(0, 0, 0, 0, gap=200), c(queries=400, heads=400, gap=200),
    c(1000, 1000, 400, 1000, 400, 0, 800, 200)]
SHAPE = os.environ.get("SHAPE")
if SHAPE: configs = [c(0, 0, 0, 0, pace=0), c(1000, 1000, 0, 0, pace=0), c(0, 0, 0, 800, pace=0), c(pace=0), c(1500, 1500, 0, 1200, pace=0), c(600, 600, 0, 500, pace=0)]
if SHAPE and not SHAPE.startswith("2"): configs = [x | {"in_flight": 3} for x in configs]
part = [a for a in sys.argv[1:] if "/" in a]
if part: k, n = map(int, part[0].split("/")); configs = configs[k::n]
src = open("benchmarks/runs/loops2.py").read()
src = src.replace('config={"kernel": "hopper", "pace": 850}', 'config={"kernel": "hopper"} | parts[-1]')
a = src.index("cases = ["); b = src.index("ranks = jax.device_put")
src = src[:a] + 'cases = [(json.dumps(c), (*ALL, c), 1, {}) for c in configs]\n' + src[b:]
if SHAPE: src = src.replace("1,8192,8,4096,8,2,128,3584,32064", SHAPE)
src = src.replace("def whole(parts, unroll):\n", "def whole(parts, unroll):\n    STEPS = 128 if 128 in parts else 32\n")
src = src.replace("        return jnp.zeros((1, 2), jnp.float32) + jnp.sum(total) + jnp.sum(last)\n",
    "        out = jnp.zeros((1, 2), jnp.float32) + jnp.sum(total) + jnp.sum(last)\n        return (out, cache) if 'donated' in parts else out\n")
src = src.replace("in_specs=specs, out_specs=OUT, check_vma=False))",
    "in_specs=specs, out_specs=(OUT, (CACHE, CACHE)) if 'donated' in parts else OUT, check_vma=False), donate_argnums=(2,) if 'donated' in parts else ())")
src = src.replace("[sizes[1] - STEPS - 1]", "[sizes[1] - 128 - 1]").replace("(STEPS, sizes[0])", "(128, sizes[0])")
src = src[:src.index("for rounds in range(5):")] + '''
def chain(c, r, n):
    if "donated" not in c[1]: return [r(*args) for _ in range(n)]
    outs = []
    for _ in range(n):
        out, kept[0] = r(*args[:2], kept[0], *args[3:]); outs.append(out)
    return outs
kept = [jax.tree.map(jnp.copy, args[2])]
for rounds in range(9):
    for i, (c, r) in enumerate(live):
        jax.block_until_ready(chain(c, r, 5))
        steps = 128 if 128 in c[1] else 32
        n = 20 * 32 // steps
        s = time.perf_counter()
        jax.block_until_ready(chain(c, r, n))
        times.setdefault(i, []).append((time.perf_counter() - s) / n / steps * 1e6)
for i, (c, r) in enumerate(live):
    q = statistics.quantiles(times[i], n=5)
    print(f"{" ".join(f"{k[9:] or k}={v & 65535}" + (f"/{v >> 16}" if v >> 16 else "") for k, v in json.loads(c[0]).items()):80s} {statistics.median(times[i]):8.1f} us  ({q[0]:.1f} to {q[-1]:.1f})", flush=True)
os._exit(0)
'''
src = "import json\n" + src.replace("configs]", "configs]")
exec(compile(src, "loops5", "exec"))
