#!/bin/bash
# 2 GPUs, quiet: one sequence in all three modes; beside XLA's fastest.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 ${LIMIT:-100} python3 -u benchmarks/run.py decode_step --world 2 --seconds-per-shape 2 --shapes 1,8192,8,4096,8,2,128,3584,32064 --implementations fused xla_step/graph --commit ${COMMIT:?} --json $RES/one.json > $RES/one.txt 2>&1
grep -a -E "checked and right|refused|rror|left out|ended early" $RES/one.txt | cut -c1-200 | head -n 6
grep -a -E "[0-9]+, [0-9]+" $RES/one.txt | cut -c1-230 | tail -n 14
