#!/bin/bash
# 4 GPUs, <= 90 s.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 ${LIMIT:-85} python3 -u benchmarks/run.py moe --world 4 --modes sustained --seconds-per-shape 2 --shapes 4096,2048,768,128,8 64,2048,768,128,8 4096,7168,2048,64,8 --implementations fused dense --commit ${COMMIT:?} --json $RES/moe4.json > $RES/moe4.txt 2>&1
grep -a -E "checked and right|refused|rror|left out" $RES/moe4.txt | cut -c1-200 | head -n 6
grep -a -E "[0-9]+, [0-9]+" $RES/moe4.txt | cut -c1-200 | tail -n 14
