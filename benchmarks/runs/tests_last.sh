export XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_FLAGS=--xla_gpu_autotune_level=0
timeout -k 5 ${LIMIT:-330} python3 -m pytest -p no:cacheprovider -q -m "not soak" --durations=15 tests/gpu/test_gpu_decode_step.py -k "(parity and not operations) or bitwise or copies or growing" > $RES/tests.txt 2>&1; tail -30 $RES/tests.txt | cut -c1-160
