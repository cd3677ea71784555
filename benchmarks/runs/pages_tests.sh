#!/bin/bash
export XLA_PYTHON_CLIENT_PREALLOCATE=false
D=tests/gpu/test_gpu_decode_step.py
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -s INT -k 8 ${LIMIT:-145} python3 -m pytest -p no:cacheprovider -v --durations=0 --durations-min=2 -o faulthandler_timeout=80 \
  "$D::test_parity_with_a_cache_in_pages" "$D::test_a_loop_copies_nothing" "$D::test_parity[2]" "$D::test_parity_with_a_cache_of_eight_bits" "$D::test_parity_in_eight_bits[2-hopper]" \
  "$D::test_longer_programs" "$D::test_repetitions_are_bitwise_equal[2]" -k "not operations" > $RES/pages_tests.txt 2>&1
grep -a -E "PASSED|FAILED|ERROR|passed|failed|^E " $RES/pages_tests.txt | cut -c1-200 | tail -n 40
