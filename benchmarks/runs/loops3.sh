export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 45 python3 -u benchmarks/runs/loops3.py > $RES/loops3.txt 2>&1; tail -n 3 $RES/loops3.txt | cut -c1-150
