#!/bin/bash
# 2 GPUs: the choice kernel's test and times, then layers of experts in 8 bits.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s)
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -s INT -k 8 60 python3 -m pytest -p no:cacheprovider -v --durations=5 tests/gpu/test_gpu.py -k "largest and 2-" > $RES/largest.txt 2>&1
grep -a -E "PASSED|FAILED|passed|failed|^E " $RES/largest.txt | cut -c1-200 | tail -n 8
timeout -k 5 70 python3 benchmarks/runs/choice.py > $RES/choice.txt 2>&1; tail -n 14 $RES/choice.txt
echo "at $(( $(date +%s)-s )) s"
export JAX_COMPILATION_CACHE_DIR=/tmp/jc.$JOB.c JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
for shape in 4096,2048,768,64,8 64,2048,768,64,8 4096,7168,2048,16,8 4096,4096,14336,4,2; do
  left=$(( 192 - $(date +%s) + s ))
  [ $left -gt 22 ] && timeout $left python3 -u benchmarks/moe_of_8_bits.py --world 2 --programs fused --kinds bf16 int8 e4m3 "e4m3 blocks" --shapes $shape --rounds 5 --json $RES/rows.moe8.jsonl > $RES/times.moe8.$shape.txt 2>&1
  grep -E " us |fault" $RES/times.moe8.$shape.txt || tail -n 2 $RES/times.moe8.$shape.txt
done
