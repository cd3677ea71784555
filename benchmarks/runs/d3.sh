export XLA_PYTHON_CLIENT_PREALLOCATE=false
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -s INT -k 8 ${LIMIT:-285} python3 -m pytest -p no:cacheprovider -v --durations=0 --durations-min=2 -o faulthandler_timeout=100 tests/gpu/test_gpu_decode_step.py -k "not (test_parity and not cache and not full and not (eight_bits and 2-operations))" > $RES/decode_step2.txt 2>&1
grep -a -E "PASSED|FAILED|ERROR|passed|failed|^E |s call" $RES/decode_step2.txt | cut -c1-170 | tail -n 55
