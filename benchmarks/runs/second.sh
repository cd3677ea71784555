#!/bin/bash
# 1 GPU, <= 240 s: other lengths of K, and a gate.
export XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_COMPILATION_CACHE_DIR=/tmp/jc.$JOB.b JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
bench="python3 -u benchmarks/ragged_dot_of_8_bits.py --programs kernel dense --sets 2"
more="--shapes 4096,8192,14336,4,2 4096,2048,14336,4,2"
gated="--gated --shapes 4096,4096,14336,4,2 4096,7168,2048,16,8"
s=$(date +%s)
for k in bf16 e4m3 "e4m3 blocks" int8; do
  timeout 90 $bench $more --rounds 0 --kinds "$k" > "$RES/warm.more.${k// /_}.txt" 2>&1 &
  timeout 90 $bench $gated --rounds 0 --kinds "$k" > "$RES/warm.gated.${k// /_}.txt" 2>&1 &
done
wait
echo "checks $(( $(date +%s)-s )) s"
grep -h -E "ok False|fault" $RES/warm.*.txt | head -n 8
timeout 50 $bench $gated --rounds 3 --kinds bf16 e4m3 "e4m3 blocks" int8 --json $RES/rows.gated.jsonl > $RES/times.gated.txt 2>&1
grep -E " us |fault|ok False" $RES/times.gated.txt || tail -n 5 $RES/times.gated.txt
timeout $(( 166 - $(date +%s) + s )) $bench $more --rounds 3 --kinds bf16 e4m3 "e4m3 blocks" int8 --json $RES/rows.more.jsonl > $RES/times.more.txt 2>&1
grep -E " us |fault|ok False" $RES/times.more.txt || tail -n 5 $RES/times.more.txt
