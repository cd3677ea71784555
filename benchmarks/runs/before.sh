export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
timeout -k 5 75 python3 benchmarks/runs/exp.py ${SET:-before} --seconds 65 > $RES/exp.txt 2>&1; grep -A50 "of each form" $RES/exp.txt | grep -v xla| cut -c1-150
