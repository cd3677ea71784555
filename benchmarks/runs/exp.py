"""exp.py B SHAPE(of two ranks) FEW CONFIG [MODE]: one case at world 1; the timed part under a lock."""
import sys; sys.path.insert(0, ".")
import json, fcntl, time, os
from concurrent.futures import ThreadPoolExecutor
import jax
from benchmarks import one_launch as o
from jaxtaxfree.ops.decode_step import call as c
b, shape, few, config = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
label = sys.argv[5] if len(sys.argv) > 5 else ""
if few >= 0: c.FEW = few
S = {"8b8": "{b},2048,8,4096,8,2,128,3584,32064", "q4": "{b},8192,8,5120,32,4,128,12800,9496", "70b4": "{b},8192,8,8192,32,4,128,14336,6400",
     "8b4": "{b},2048,8,4096,32,8,128,14336,32064"}
sizes = tuple(map(int, S[shape].format(b=b).split(",")))
t0 = time.time()
p = o.Problem(o.model_of(sizes, 1), 1, b, sizes[1], [sizes[1] - 33] * b)
OUT = (o.OUT, o.OUT)
name = f"{shape} B={b} few={few} {config} {label}"
try:
    with ThreadPoolExecutor(3) as pool:
        run = pool.submit(p.program, p.steps("fused", config), OUT)
        six = pool.submit(p.program, p.steps("fused", config, steps=6), OUT)
        want = pool.submit(p.program, p.steps("xla", steps=6), OUT)
        run, six, want = run.result(), six.result(), want.result()
    t1 = time.time()
    with open("/tmp/lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        w = want(*p.operands); a = six(*p.operands); again = six(*p.operands)
        import numpy as np
        same = all(np.array_equal(x, y) for x, y in zip(a, again))
        e = [o.error_of(x, y) for x, y in zip(a, w)]
        us = [1e6 * o.seconds_of(lambda: run(*p.operands), 0.3) / 32 for _ in range(2)]
    print(name, "error %.1e %.1e" % tuple(e), "same", same, "us", " ".join(f"{x:.1f}" for x in us), f"compile {t1-t0:.0f} s", flush=True)
except Exception as e:
    print(name, type(e).__name__, str(e)[:300], flush=True)
