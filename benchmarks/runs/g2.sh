# 4 GPUs: one process a GPU.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -s INT -k 5 ${LIMIT:-245} python3 -m pytest -p no:cacheprovider -v --durations=8 tests/gpu/test_gpu_processes.py -k "4x1 and (decode_step or moe)" > $RES/processes.txt 2>&1
grep -a -E "FAILED|ERROR|passed|failed|^E |PASSED|s call" $RES/processes.txt | cut -c1-170 | tail -n 45
