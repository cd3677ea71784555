#!/bin/bash
# 2 GPUs, <= 200 s. Llama 3 8B's share of eight, 8 and 16 sequences: is one launch right in 8 bits, and how fast beside bf16.
# Every line comes at once; what is first is what matters.
cat > $RES/eight.py <<'PY'
import concurrent.futures, copy, os, sys, time, traceback
start = time.time()
sys.path.insert(0, os.getcwd())
import jax, numpy as np
import jaxtaxfree as jtf
from benchmarks import one_launch as ol
say = lambda *a: print(f"[{time.time() - start:.0f}s]", *a, flush=True)
say(jax.devices()[0].device_kind, len(jax.devices()))
SHAPE = "1,8192,8,4096,8,2,128,3584,32064"
JOBS = [("int8", 8, {}), ("bfloat16", 8, {}), ("int8", 16, {}), ("bfloat16", 16, {}), ("float8_e4m3fn", 8, {}),
        ("int8", 8, {"in_flight": 8})]
shape = list(map(int, SHAPE.split(",")))
base = ol.Problem(ol.model_of(shape, 2), 2, 1, shape[1], [shape[1] - ol.STEPS - 1])
narrow = {}
def problem_of(weights, b):
    problem, length = copy.copy(base), shape[1] - ol.STEPS - 1
    if b > 1:
        problem.b = b
        size = (shape[2], b, *base.cache[0].shape[2:])
        problem.cache = tuple(base.make(jax.random.key(i), size, (1.0, (length / np.e) ** 0.5)[i], ol.CACHE) for i in range(2))
        problem.x = base.make(jax.random.key(2), (b, shape[3]), 1.0, ol.P())
        problem.lengths = jax.device_put(jax.numpy.full(b, length, jax.numpy.int32), base.lengths.sharding)
    if weights != "bfloat16":
        problem.specs = base.specs | base.model.scale_specs(ol.AXIS)
        if weights not in narrow:
            narrow[weights] = problem.in_eight_bits(weights)
        problem.params = base.params | narrow[weights]
    return problem
problems = {}
for weights, b, _ in JOBS:
    if (weights, b) not in problems:
        problems[weights, b] = problem_of(weights, b)
say("weights made")
out = (ol.OUT, ol.OUT)
def made(job):
    weights, b, config = job
    problem = problems[weights, b]
    return problem.program(problem.steps("fused", config), out)
pool = concurrent.futures.ThreadPoolExecutor(len(JOBS) + 4)
runs = [pool.submit(made, job) for job in JOBS]
plain = {key: pool.submit(p.program, p.steps("xla"), out) for key, p in problems.items()}
for job, run in zip(JOBS, runs):
    weights, b, config = job
    problem = problems[weights, b]
    try:
        run, wanted = run.result(), plain[weights, b].result()
        say(*job, "compiled")
        found = jtf.block_until_ready(run(*problem.operands))
        wanted = wanted(*problem.operands)
        errors = [f"{ol.error_of(*pair):.2e}" for pair in zip(found, wanted)]
        again = [jtf.block_until_ready(run(*problem.operands)) for _ in range(4)]
        same = all(np.array_equal(x, y) for each in again for x, y in zip(each, found))
        times = [1e6 * ol.seconds_of(lambda: run(*problem.operands), 0.3) / ol.STEPS for _ in range(3)]
        say(*job, "errors", *errors, "same bits", same, "us a step", *(f"{t:.1f}" for t in times))
    except Exception as error:
        say(*job, type(error).__name__, str(error)[:700])
        traceback.print_exc(limit=4)
say("again, in turn")
for _ in range(2):
    for job, run in zip(JOBS, runs):
        if run.done() and not run.exception():
            problem, program = problems[job[:2]], run.result()
            say(*job, f"{1e6 * ol.seconds_of(lambda: program(*problem.operands), 0.3) / ol.STEPS:.1f} us a step")
os._exit(0)
PY
timeout -k 5 ${LIMIT:-198} python3 -u $RES/eight.py 2>&1 | grep -a -v -E "^(W|I)[0-9]{4}|^$" | cut -c1-400
true
