#!/bin/bash
# 2 or 4 GPUs, 200 s, on a quiet host: what changed since GPUs ran it last. First ragged_all_to_all, whose kernel reports garbage now.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
G=tests/gpu/test_gpu.py D=tests/gpu/test_gpu_decode_step.py
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -k 5 ${LIMIT:-195} python3 -m pytest -p no:cacheprovider -v --durations=12 tests/gpu/test_gpu_garbage.py \
  "$G::test_parity_of_ragged_all_to_all" "$G::test_parity_of_moe" "$G::test_a_rank_that_sends_no_messages_is_named" $D \
  -k "garbage or ragged or moe or (cache_of_eight and hopper)" 2>&1 | grep -v "^$" | tail -n 40 | cut -c1-250
