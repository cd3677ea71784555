#!/bin/bash
# 4 GPUs: tests of four ranks, each with its time; what hangs shows where.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
G=tests/gpu/test_gpu.py
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -s INT -k 8 ${LIMIT:-232} python3 -m pytest -p no:cacheprovider -v --durations=0 --durations-min=1 -o faulthandler_timeout=90 \
  "$G::test_parity_of_moe" "$G::test_parity_of_ragged_all_to_all" -k "4-" > $RES/four_tests.txt 2>&1
echo rc=$?; grep -E "PASSED|FAILED|ERROR|passed|failed|s call|s setup" $RES/four_tests.txt | cut -c1-160 | tail -n 50
