export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
timeout -k 5 ${SECS:-100} python3 -u benchmarks/runs/greedy.py > $RES/greedy.txt 2>&1; tail -n 45 $RES/greedy.txt | cut -c1-250
