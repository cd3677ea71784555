#!/bin/bash
export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s)
timeout -k 3 35 python3 -u benchmarks/run.py moe --world 4 --modes sustained --seconds-per-shape 2 --shapes 64,2048,768,128,8 --implementations fused dense --commit ${COMMIT:?} --json $RES/moe4.json > $RES/moe4.txt 2>&1
grep -a -E "[0-9]+, [0-9]+" $RES/moe4.txt | cut -c1-200 | tail -n 4
LIMIT=35 bash benchmarks/runs/pieces.sh
left=$(( ${LIMIT:-125} - $(date +%s) + s ))
[ $left -gt 30 ] && timeout -k 5 $left python3 -m tests.helpers.training --steps 10000 --seconds $(( left - 22 )) --only "one process, 2 x 2" > $RES/training.txt 2>&1; tail -n 8 $RES/training.txt | cut -c1-300
