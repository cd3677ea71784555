"""Per block: what consumers and the loader wait for. python benchmarks/runs/blocks_clock.py --world 2 --config ..."""
import argparse, json, sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import numpy as np
from benchmarks import step_clock
from benchmarks.one_launch import STEPS, Problem, model_of
p = argparse.ArgumentParser()
p.add_argument("--world", type=int, default=2)
p.add_argument("--shape", default="1,8192,8,4096,8,2,128,3584,32064")
p.add_argument("--config", type=json.loads, default={})
p.add_argument("--out")
p.add_argument("--file")
p.add_argument("--list", type=int)
o = p.parse_args()
sizes = tuple(map(int, o.shape.split(",")))
L = sizes[2]
if o.file:
    t = np.load(o.file)["t"]
else:
    b, context = sizes[:2]
    problem = Problem(model_of(sizes, o.world), o.world, b, context, [context - STEPS - 1] * b)
    t = step_clock.times_of(problem, o.config)
    if o.out: np.savez_compressed(o.out, t=t[-3:, :1, ::12])
NAMES = "project attend merge out gate down".split()
rows = {i: [] for i in range(6)}
layers = []
for step in range(-3, 0):
    log = t[step, 0][:, L + 1:].reshape(t.shape[2], -1)[:, :512 * 6].reshape(t.shape[2], 512, 6).astype(np.int64)
    st = t[step, 0][:, :L + 1].astype(np.int64)
    for prog in range(t.shape[2]):
        l, s = log[prog], st[prog]
        n = int((l[:, 5] != 0).sum()); l = l[:n]
        for layer in range(2, 7):
            layers.append(s[layer, 5, 3] - s[layer - 1, 5, 3])
            begin = s[layer - 1, 5, 3]
            for ph in range(6):
                end = s[layer, ph, 1]
                mine = (l[:, 1] - begin > 0) & (l[:, 1] - end < 0) if ph else (l[:, 1] - begin > 0) & (l[:, 1] - end < 0)
                mine = l[mine]
                if len(mine) and not (mine[:, 1] == 0).any():
                    period = np.diff(mine[:, 1]).mean() if len(mine) > 1 else np.nan
                    has = ph in (0, 3, 4, 5)
                    rows[ph].append((len(mine), mine[0, 0] - begin, period, end - mine[-1, 1], (mine[:, 1] - mine[:, 0]).mean(), (mine[:, 1] - mine[:, 0]).max(), s[layer, ph, 3] - end))
                begin = s[layer, ph, 3]
print(f"layer {np.mean(layers):.0f} cycles; blocks, cycles to the first, a block, from the last to products, mean wait, longest wait, to the end")
for ph in range(6):
    if rows[ph]: print(f"  {NAMES[ph]:8s}", " ".join(f"{x:8.0f}" for x in np.nanmean(np.array(rows[ph], float), 0)), f"  max wait {max(r[5] for r in rows[ph])}")
if o.list is not None:
    l, s = log[o.list], st[o.list]
    base, end = s[2, 5, 3], s[3, 5, 3]
    n = int((l[:, 5] != 0).sum())
    ev = [(s[3, i, k] - base, f"   phase {i} stamp {k}") for i in range(6) for k in range(4) if s[3, i, k]]
    for i in range(n):
        if -2000 < l[i, 0] - base < end - base:
            ev.append((l[i, 0] - base, f"block {i}: waits {l[i,1]-l[i,0]:6d}; loader: asks at {l[i,3]-base}, empty at {l[i,4]-base}, begins at {l[i,5]-base}"))
    for when, what in sorted(ev): print(f"{when:7d} {what}")
