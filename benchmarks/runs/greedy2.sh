export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
export ONLY="loop;greedy 32 pace 850;greedy 8 pace 850;greedy 1 pace 850;clock"
for e in 1 0; do echo EARLY $e; EARLY=$e timeout -k 5 60 python3 -u benchmarks/runs/greedy.py > $RES/greedy$e.txt 2>&1; tail -n 45 $RES/greedy$e.txt | cut -c1-250; done
