export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 140 python3 -u benchmarks/runs/loops6.py > $RES/loops6.txt 2>&1; tail -n 20 $RES/loops6.txt | cut -c1-170
