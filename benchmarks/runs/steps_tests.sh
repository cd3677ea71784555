#!/bin/bash
# 2 GPUs: one launch with the cache written inside, each test with its time.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
D=tests/gpu/test_gpu_decode_step.py
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -s INT -k 8 ${LIMIT:-195} python3 -m pytest -p no:cacheprovider -v --durations=0 --durations-min=2 -o faulthandler_timeout=80 \
  "$D::test_a_loop_copies_nothing" "$D::test_parity[1]" "$D::test_parity[2]" "$D::test_repetitions_are_bitwise_equal" "$D::test_parity_with_a_cache_of_eight_bits[2-hopper]" \
  "$D::test_parity_in_eight_bits[2-hopper]" "$D::test_longer_programs" "$D::test_parity_of_full_layers" "$D::test_a_rank_that_does_not_arrive_is_named" "$D::test_cold_starts" > $RES/steps_tests.txt 2>&1
grep -a -E "PASSED|FAILED|ERROR|passed|failed|^E " $RES/steps_tests.txt | cut -c1-200 | tail -n 40
