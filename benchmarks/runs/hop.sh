export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
for s in sys gpu volatile; do
HOP_SCOPE=$s TRITON_CACHE_DIR=/tmp/hop_$s timeout -k 5 60 python3 benchmarks/runs/hop.py ${W:-1} 2>&1 | grep -v "^W0\|^I0" | tail -n 30
done
