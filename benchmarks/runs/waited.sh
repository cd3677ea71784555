#!/bin/bash
# 2 GPUs, nothing else on the host: a step a call with and without command buffers.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
one() {
  timeout -k 5 $2 python3 -u benchmarks/run.py decode_step --world 2 --modes $4 --seconds-per-shape 2 --shapes 1,8192,8,4096,8,2,128,3584,32064 --implementations $3 --commit ${COMMIT:?} --json $RES/$1.json > $RES/$1.txt 2>&1
  echo "== $1"; grep -a -E "refused|rror|left out" $RES/$1.txt | cut -c1-200 | head -n 3; grep -a -E "[0-9]+, [0-9]+" $RES/$1.txt | cut -c1-200 | tail -n 4
}
one quiet 42 "fused xla_step/graph" "sustained calls waited"
XLA_FLAGS=--xla_gpu_enable_command_buffer= one without 28 fused "calls waited"
