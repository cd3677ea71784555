export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
timeout -k 5 110 python3 -u benchmarks/runs/loops2.py > $RES/loops2.txt 2>&1; tail -n 75 $RES/loops2.txt | cut -c1-150
