export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
timeout -k 5 185 python3 benchmarks/runs/exp.py rows --seconds 170 > $RES/rows.txt 2>&1; grep -vE "compiled|W0000|I0000" $RES/rows.txt | cut -c1-170 | tail -n 70
