#!/bin/bash
# 2 GPUs, <= 175 s: whether reports of garbage cost ragged_all_to_all anything; then what is left of the time for columns.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 ${LIMIT:-110} python3 -u benchmarks/run.py ragged_all_to_all --world 2 --modes sustained --seconds-per-shape 2 --commit ${COMMIT:?} --json $RES/exchange.json > $RES/exchange.txt 2>&1
grep -a -E "checked and right|refused|rror|left out" $RES/exchange.txt | cut -c1-200 | head -n 6
grep -a -E "[0-9]+, [0-9]+" $RES/exchange.txt | cut -c1-200 | tail -n 14
