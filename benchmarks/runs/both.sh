export XLA_PYTHON_CLIENT_PREALLOCATE=false EXP_WORLD=${EXP_WORLD:-1}
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
timeout -k 5 50 python3 benchmarks/runs/exp.py both --seconds 44 > $RES/exp.txt 2>&1; grep -A50 "of each form" $RES/exp.txt | grep -v xla| cut -c1-150
