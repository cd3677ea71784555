#!/bin/bash
# 2 GPUs, 230 s: what is around the kernel of a decode step; caches of 8 bits and in pages in one launch.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s)
timeout -k 5 110 python3 -u benchmarks/runs/loops.py > $RES/loops.txt 2>&1; echo "loops rc=$? at $(( $(date +%s)-s ))"; tail -n 60 $RES/loops.txt | cut -c1-200
left=$(( ${LIMIT:-230} - $(date +%s) + s ))
timeout -k 5 $left python3 -u benchmarks/runs/kv.py > $RES/kv.txt 2>&1; echo "kv rc=$? at $(( $(date +%s)-s ))"; tail -n 40 $RES/kv.txt | cut -c1-200
