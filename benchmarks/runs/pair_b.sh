#!/bin/bash
# 2 GPUs, 285 s: layers of experts in 8 bits; PyTorch's e4m3 products; the kernel of top_k of 1.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s); L=${LIMIT:-285}
left() { echo $(( L - $(date +%s) + s )); }
for shape in 64,2048,768,64,8 4096,2048,768,64,8 4096,4096,14336,4,2 4096,7168,2048,16,8; do
  timeout -k 5 55 python3 -u benchmarks/moe_of_8_bits.py --world 2 --programs fused --shapes $shape --rounds 5 --json $RES/rows.moe8.jsonl > $RES/times.moe8.$shape.txt 2>&1
  echo "moe8 $shape rc=$? at $(( $(date +%s)-s ))"; grep -E "^\[" $RES/times.moe8.$shape.txt | tail -n 6 || tail -n 4 $RES/times.moe8.$shape.txt
done
b=$(left); [ $b -gt 85 ] && b=75
timeout -k 5 $b python3 -u benchmarks/eight_bits.py --programs fused torch --kinds "e4m3 rows" --operations all_gather_matmul matmul_reduce_scatter --shapes 2048,8192,28672 8192,8192,28672 --world 2 --budget $(( b - 5 )) --torch-python $(which python3) --json $RES/torch8.jsonl > $RES/torch8.txt 2>&1
echo "torch rc=$? at $(( $(date +%s)-s ))"; tail -n 16 $RES/torch8.txt | cut -c1-300
b=$(left)
[ $b -gt 15 ] && XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -s INT -k 5 $b python3 -m pytest -p no:cacheprovider -q tests/gpu/test_gpu.py -k largest > $RES/largest.txt 2>&1; tail -n 5 $RES/largest.txt
