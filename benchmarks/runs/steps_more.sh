#!/bin/bash
# 2 GPUs: 4 and 8 sequences, sustained; then PyTorch's e4m3 products.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s)
timeout -k 5 55 python3 -u benchmarks/run.py decode_step --world 2 --modes sustained --seconds-per-shape 2 --shapes 4,2048,8,4096,8,2,128,3584,32064 8,2048,8,4096,8,2,128,3584,32064 --implementations fused --commit ${COMMIT:?} --json $RES/more.json > $RES/more.txt 2>&1
grep -a -E "checked and right|refused|rror|left out" $RES/more.txt | cut -c1-200 | head -n 6
grep -a -E "[0-9]+, [0-9]+" $RES/more.txt | cut -c1-200 | tail -n 6
left=$(( 100 - $(date +%s) + s ))
timeout -k 5 $left python3 -u benchmarks/eight_bits.py --programs fused torch --kinds "e4m3 rows" --operations all_gather_matmul matmul_reduce_scatter --shapes 2048,8192,28672 8192,8192,28672 --world 2 --budget $(( left - 5 )) --torch-python $(which python3) --json $RES/torch8.jsonl > $RES/torch8.txt 2>&1
tail -n 14 $RES/torch8.txt | cut -c1-250
