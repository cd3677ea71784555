export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
export ONLY="${ONLY:-loop;greedy 32 pace 850;greedy 1 pace 850;clock}"
timeout -k 5 70 python3 -u benchmarks/runs/greedy.py > $RES/greedy.txt 2>&1; tail -n 45 $RES/greedy.txt | cut -c1-250
