export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s)
timeout -k 5 70 python3 -u benchmarks/runs/loops.py > $RES/loops.txt 2>&1; echo "loops rc=$? at $(( $(date +%s)-s ))"; tail -n 62 $RES/loops.txt | cut -c1-150
timeout -k 5 40 python3 -u benchmarks/runs/hlo.py > $RES/hlo.log 2>&1; tail -n 1 $RES/hlo.log
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -s INT -k 5 60 python3 -m pytest -p no:cacheprovider -q --durations=5 tests/gpu/test_gpu_models.py > $RES/models.txt 2>&1; tail -n 14 $RES/models.txt; echo "at $(( $(date +%s)-s ))"
