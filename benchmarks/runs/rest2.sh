#!/bin/bash
export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s)
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -k 3 50 python3 -u benchmarks/runs/diag.py > $RES/diag.txt 2>&1; grep -a -v "leaked" $RES/diag.txt | cut -c1-220 | tail -n 16
echo "at $(( $(date +%s)-s )) s"
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -k 3 55 python3 -u benchmarks/runs/kv.py > $RES/kv.txt 2>&1; grep -a -E "sequences|error|rror|compiled" $RES/kv.txt | cut -c1-200 | tail -n 32
echo "at $(( $(date +%s)-s )) s"
timeout -k 3 25 python3 -u benchmarks/run.py moe --world 2 --modes sustained --seconds-per-shape 2 --shapes 64,2048,768,128,8 8,2048,768,128,8 --implementations fused dense --commit ${COMMIT:?} --json $RES/moe2.json > $RES/moe2.txt 2>&1
grep -a -E "[0-9]+, [0-9]+" $RES/moe2.txt | cut -c1-200 | tail -n 4
timeout -k 3 $(( 148 - $(date +%s) + s )) python3 -u benchmarks/moe_of_8_bits.py --world 2 --programs fused --shapes 64,2048,768,64,8 --rounds 5 --json $RES/few8.jsonl > $RES/few8.txt 2>&1; grep -a -E " us |fault" $RES/few8.txt
