#!/bin/bash
# 4 GPUs, 205 s, quiet host: 16 sequences; then parity on four.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s)
M="--modes sustained --seconds-per-shape 2"
timeout -k 5 130 python3 -u benchmarks/run.py decode_step --world 4 $M --shapes 16,4096,8,8192,64,8,128,28672,12800 16,2048,8,5120,64,8,128,25600,18992 --implementations xla_heads_cudnn/graph_symmetric fused fused/operations --commit ${COMMIT:?} --json $RES/ds4.json > $RES/ds4.txt 2>&1
echo "== ds4 rc=$? at $(( $(date +%s)-s )) s"; grep -a -E "checked and right|refused|rror|wrong|left out|ended early" $RES/ds4.txt | cut -c1-300 | head -n 12
grep -a -E "[0-9]+, [0-9]+" $RES/ds4.txt | cut -c1-230 | tail -n 14
LIMIT=$(( 200 - $(date +%s) + s )) bash benchmarks/runs/check.sh
