"""Configs of decode_step in a loop with embedding and choice, and the loop with a cache that is donated, and of 128 steps.
us a step of queued programs. 2 GPUs. python benchmarks/runs/loops5.py [--lower] [PART/PARTS]"""
import json, os, sys
P = {"pace": 850}
def c(sums=1000, gate=1000, heads=0, hidden=800, queries=0, parts=0, pace=850):
    return {"pace": pace, "patience_sums": sums, "patience_gate": gate, "patience_heads": heads, "patience_hidden": hidden, "patience_queries": queries, "patience_parts": parts}
configs = [c(), c(sums=800), c(sums=1200), c(gate=800), c(gate=1200), c(heads=400), c(heads=800), c(heads=1200), c(queries=400), c(queries=800), c(parts=400), c(parts=800),
    c(hidden=700), c(hidden=900), c(pace=800), c(pace=900), c(pace=950), c(heads=600, parts=400, queries=400)]
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
    print(f"{" ".join(f"{k[9:]}={v}" for k, v in json.loads(c[0]).items()):80s} {statistics.median(times[i]):8.1f} us  ({q[0]:.1f} to {q[-1]:.1f})", flush=True)
os._exit(0)
'''
src = "import json\n" + src.replace("configs]", "configs]")
exec(compile(src, "loops5", "exec"))
