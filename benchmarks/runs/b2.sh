export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s)
timeout -k 5 100 python3 -u benchmarks/runs/kv.py > $RES/kv.txt 2>&1; echo "kv rc=$? at $(( $(date +%s)-s ))"; tail -n 40 $RES/kv.txt | cut -c1-200
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -s INT -k 5 60 python3 -m pytest -p no:cacheprovider -q --durations=5 tests/gpu/test_gpu_decode_step.py -k "(cache_of_eight and hopper and 2-) or (2-check_growing)" > $RES/steps.txt 2>&1; tail -n 12 $RES/steps.txt; echo "at $(( $(date +%s)-s ))"
