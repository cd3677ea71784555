#!/bin/bash
# 1 GPU, <= 200 s: ragged_dot in 8 bits of few rows, as in a decode step.
export XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_COMPILATION_CACHE_DIR=/tmp/jc.$JOB.d JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
bench="python3 -u benchmarks/ragged_dot_of_8_bits.py --programs kernel cast dense --sets 4 --shapes 64,2048,768,64,8 64,4096,14336,4,2 256,4096,14336,4,2"
s=$(date +%s)
for k in bf16 e4m3 int8 "int8 weights" "e4m3 weights" "e4m3 blocks"; do
  timeout 110 $bench --rounds 0 --kinds "$k" > "$RES/warm.few.${k// /_}.txt" 2>&1 &
done
wait
echo "checks $(( $(date +%s)-s )) s"
grep -h -E "ok False|fault" $RES/warm.few.*.txt | head -n 8
timeout $(( 196 - $(date +%s) + s )) $bench --rounds 5 --kinds bf16 e4m3 int8 "int8 weights" "e4m3 weights" "e4m3 blocks" --json $RES/rows.few.jsonl > $RES/times.few.txt 2>&1
grep -E " us |fault|ok False" $RES/times.few.txt || tail -n 5 $RES/times.few.txt
