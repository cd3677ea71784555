export XLA_PYTHON_CLIENT_PREALLOCATE=false
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -s INT -k 5 120 python3 -m pytest -p no:cacheprovider -q --durations=3 tests/gpu/test_gpu_models.py > $RES/models.txt 2>&1; tail -n 30 $RES/models.txt | cut -c1-160
