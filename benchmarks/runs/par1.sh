export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_FLAGS=--xla_gpu_autotune_level=0
cat > /tmp/par1.py <<'P'
import os, sys, time
sys.path.insert(0, os.getcwd())
import jax
from tests.helpers import step_parity as s, parity
mesh = parity.mesh_of(jax.devices("cuda")[:1], (1,), ("tp",))
for name, f in (("parity", s.check_cases), ("pages", s.check_pages), ("repetition", s.check_repetition), ("eight bits", s.check_eight_bits), ("caches", s.check_caches)):
    t = time.time()
    try:
        f(mesh); print("PASSED", name, f"{time.time() - t:.0f} s", flush=True)
    except Exception as e:
        print("FAILED", name, type(e).__name__, str(e)[-600:], flush=True)
P
timeout -k 5 ${SECS:-110} python3 -u /tmp/par1.py > $RES/par1.txt 2>&1; grep -a -E "PASSED|FAILED|rror" $RES/par1.txt | cut -c1-300
