"""decode_step's checks by two processes that share a GPU."""
import os, sys, time
sys.path.insert(0, os.getcwd())
from tests.runtime import test_processes as t
BODY = """
import functools, time
from tests.helpers import step_parity
started = time.time()
checks = [step_parity.check_cases, step_parity.check_eight_bits, step_parity.check_caches, step_parity.check_pages,
    functools.partial(step_parity.check_repetition, times=TIMES)]
for check in checks:
    name = getattr(check, "__name__", "check_repetition")
    try:
        check(mesh); print("RESULT", rank, name, "passed", f"{time.time() - started:.0f} s", flush=True)
    except BaseException as error:
        print("RESULT", rank, name, "FAILED", type(error).__name__, str(error)[:600], flush=True)
        heap.reset()
"""
world, times = int(sys.argv[1]), sys.argv[2]
try:
    outs = t.run_processes(world, BODY.replace("TIMES", times), gpus="shared", timeout=float(sys.argv[3]))
    for r, out in enumerate(outs):
        print("\n".join(l for l in out.splitlines() if l.startswith("RESULT")) or out[-1500:])
except BaseException as error:
    print(type(error).__name__, str(error)[-1500:], getattr(error, "output", None))
