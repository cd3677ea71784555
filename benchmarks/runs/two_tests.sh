#!/bin/bash
# 2 GPUs: tests of two ranks, each with its time.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
G=tests/gpu/test_gpu.py D=tests/gpu/test_gpu_decode_step.py
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -s INT -k 8 ${LIMIT:-150} python3 -m pytest -p no:cacheprovider -v --durations=0 --durations-min=1 -o faulthandler_timeout=60 \
  $D "$G::test_a_rank_that_sends_no_messages_is_named" "$G::test_parity_of_moe" -k "(cache_of_eight and hopper) or no_messages or (moe and 2-)" > $RES/two_tests.txt 2>&1
