#!/bin/bash
export XLA_PYTHON_CLIENT_PREALLOCATE=false; ROOT=$PWD; nvidia-smi --query-gpu=name --format=csv,noheader | head -1; rm -f /tmp/many.lock
cat > benchmarks/many_bench.py <<"PYEOF"
"""bench.py LABEL SHAPE TASKS: compiles, then runs under a lock that all processes of the request share."""
import sys, time, fcntl, dataclasses, json
sys.path.insert(0, ".")
import jax, numpy as np
from benchmarks.one_launch import Problem, model_of, error_of, seconds_of, STEPS, OUT, CACHE
from benchmarks import step_clock
label, shape, tasks = sys.argv[1:4]
sizes = tuple(map(int, shape.split(",")))
b, context = sizes[:2]
t0 = time.time()
def problem_of(layers=None):
    model = model_of(sizes, 2)
    if layers: model = dataclasses.replace(model, layers=layers)
    return Problem(model, 2, b, context, [context - STEPS - 1] * b)
import jaxtaxfree as jtf
class Lock:
    def __enter__(self): self.f = open("/tmp/many.lock", "w"); fcntl.flock(self.f, fcntl.LOCK_EX)
    def __exit__(self, *a): fcntl.flock(self.f, fcntl.LOCK_UN); self.f.close()
p = problem_of() if tasks != 'small' else None
def say(*a): print(f"{label} [{time.time()-t0:.0f}s]", *a, flush=True)
def timed(name, run, of):
    with Lock():
        say(name, " ".join(f"{1e6 * seconds_of(lambda: run(*of.operands), 0.3) / STEPS:.1f}" for _ in range(3)), "us a step")
def checked(name, p):
    runs = [p.program(p.steps("xla", steps=6), (OUT, OUT)), p.program(p.steps("fused", None, steps=6), (OUT, OUT))]
    steps = [p.program(p.step(w, None), (OUT, (CACHE, CACHE))) for w in ("xla", "fused")]
    with Lock():
        want, got = (jtf.block_until_ready(r(*p.operands)) for r in runs)
        again = [jtf.block_until_ready(runs[1](*p.operands)) for _ in range(5)]
        same = all(np.array_equal(x, y) for each in again for x, y in zip(each, got))
        caches = [s(*p.operands)[1] for s in steps]
        say(name, "errors", *[f"{error_of(g, w):.2e}" for g, w in zip(got, want)], "caches", f"{max(error_of(g, w) for g, w in zip(caches[1], caches[0])):.1e}", "same bits", same)
base = jtf.DecoderSpec(layers=2, d_model=512, heads=8, kv_heads=2, head_dim=128, d_mlp=1024, vocab=1024, norm_eps=1e-5)
lengths16 = [0, 200, 255, 1, 63, 64, 65, 127, 128, 129, 31, 5, 250, 17, 90, 3]
SMALL = {
    "gemma 2": (dict(post_norms=True, norm_plus_one=True, head_dim=256, heads=4, activation="gelu_tanh", logit_soft_cap=30.0, score_soft_cap=50.0, windows=(64, None)), lengths16),
    "qwen 3, 5": (dict(qk_norm=True), lengths16[:5]),
    "heads of 64, qwen 2": (dict(qkv_bias=True, head_dim=64, tied=True, heads=4), lengths16[:9]),
    "8 queries a head": (dict(heads=16), lengths16),
}
for task in tasks.split(";"):
    try:
        if task == "check":
            checked("check", p)
        elif task == "small":
            for name, (changes, lengths) in SMALL.items():
                try:
                    checked(name, Problem(dataclasses.replace(base, **changes), 2, len(lengths), 256, lengths))
                except Exception as e:
                    say(name, type(e).__name__, str(e)[:600])
        elif task == "clock":
            import io, contextlib
            # compiled and run in one call, so under the lock
            with Lock():
                times = step_clock.times_of(p)
            say("clock"); step_clock.show(times)
        elif task == "layer":
            q = problem_of(1); timed("1 layer", q.program(q.steps("fused"), (OUT, OUT)), q)
        elif task == "nocache":
            timed("no cache update", p.program(p.steps("fused", keeps_cache=False), (OUT, OUT)), p)
        elif task == "short":
            q = Problem(p.model, 2, b, context, [1] * b); timed("short context", q.program(q.steps("fused"), (OUT, OUT)), q)
        else:
            config = json.loads(task) if task != "time" else None
            timed(f"{config or 'default'}", p.program(p.steps("fused", config), (OUT, OUT)), p)
    except Exception as e:
        say(task, type(e).__name__, str(e)[:600])
PYEOF
)
)
L16=16,2048,8,4096,32,8,128,14336,32064; L8=8,8192,8,4096,8,2,128,3584,32064; S8=8,2048,8,4096,8,2,128,3584,32064
bench() { ( cd $1; PYTHONPATH=$1:${PYTHONPATH//$ROOT/$1} timeout -k 5 190 python3 benchmarks/many_bench.py "${@:2}" > $RES/$2.txt 2>&1 ) & }
bench $ROOT new16 $L16 'time;check;clock'
bench $ROOT new8 $L8 'time;check;clock'
bench /tmp/many_mid mid16 $L16 'time'
bench /tmp/many_mid mid8 $L8 'time'
bench /tmp/many_old old8s $S8 'time'
bench $ROOT new8s $S8 'time;clock'
bench $ROOT small $L16 small
wait
for f in new16 mid16 new8 mid8 new8s old8s small; do grep -v Warning $RES/$f.txt | tail -n 16 | cut -c1-180; done
