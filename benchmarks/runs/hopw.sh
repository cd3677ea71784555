export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
timeout -k 5 80 python3 benchmarks/runs/hop.py 1 2>&1 | grep -v "^W0\|^I0" | tail -n 30
