"""Compiles the kernels of the checks of decode_step for so many ranks: lower_steps.py WORLD ...; needs no GPU."""
import os, sys, time
sys.path.insert(0, os.getcwd())
from concurrent.futures import ThreadPoolExecutor
import pytest
import jax
import numpy as np
from tests.helpers import rehearsal, parity, step_parity
started = time.time()
def run_all(programs):
    def lower(each):
        try: each.lower()
        except pytest.skip.Exception: pass
    with ThreadPoolExecutor(2) as pool: list(pool.map(lower, programs))
    raise pytest.skip.Exception("lowered")
step_parity.run_all = run_all
checks = [step_parity.check_cases, step_parity.check_repetition, step_parity.check_eight_bits, step_parity.check_caches, step_parity.check_pages]
with rehearsal.rehearsing(os.environ.get("LOWER_FOR", "NVIDIA H200"), run=False) as seen:
    for world in map(int, sys.argv[1:]):
        mesh = parity.mesh_of(jax.devices("cpu")[:world], (world,), ("tp",))
        for check in checks:
            if world > 2 and check in (step_parity.check_growing, step_parity.check_beside_collectives): continue
            try: check(mesh)
            except pytest.skip.Exception: pass
            print(world, check.__name__, seen.programs, f"{time.time() - started:.0f} s", flush=True)
