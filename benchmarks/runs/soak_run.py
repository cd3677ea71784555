"""run.py K N: every Nth portion from K, forms of messages first; a line a portion in /tmp/soak/done.txt."""
import sys, time, warnings, os
sys.path.insert(0, ".")
from tests.simulator.test_simulator_decode_step import *
from jaxtaxfree.simulator import WastedTrafficWarning
warnings.simplefilter("error", WastedTrafficWarning)
k, n = map(int, sys.argv[1:3])
out = sys.argv[3] if len(sys.argv) > 3 else "/tmp/soak/done.txt"
ALL = STEPS | MANY
first = list(TILED_MESSAGES)
told = [x for x in ALL if x in MESSAGES or x in NOBODY_MEETS or "nobody meets" in x]
rest = [x for x in ALL if x not in first and x not in told]
done = {tuple(line.split("|")[:2]) for line in open("benchmarks/runs/soak_skip.txt")} if os.path.exists("benchmarks/runs/soak_skip.txt") else set()
work = [(x, p) for p in range(0, SEEDS, PORTION) for x in first] + [(x, p) for p in range(0, SEEDS, PORTION) for x in rest]
if os.environ.get("TOLD"): work = [(x, p) for p in range(0, SEEDS, PORTION) for x in told]
work = [(x, p) for x, p in work if (x, str(p)) not in done]
for name, p in (work if os.environ.get("FORWARD") else work[::-1])[k::n]:
    t = time.time()
    try:
        test_every_interleaving_is_right(name, p); r = "PASSED"
    except BaseException as e:
        r = "FAILED " + type(e).__name__ + " " + str(e)[:300].replace("\n", " ")
    with open(out, "a") as f: f.write(f"{name}|{p}|{time.time()-t:.1f}|{r}\n")
