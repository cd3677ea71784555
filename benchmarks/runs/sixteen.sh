export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 ${LIMIT:-150} python3 benchmarks/runs/exp.py sixteen --seconds 140 > $RES/sixteen.txt 2>&1; tail -n 20 $RES/sixteen.txt | cut -c1-200
