export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 60 python3 -u benchmarks/runs/hlo.py > $RES/hlo.log 2>&1; tail -n 3 $RES/hlo.log; ls -la $RES
