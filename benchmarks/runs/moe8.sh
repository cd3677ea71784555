#!/bin/bash
# 2 GPUs, <= 180 s: a layer of experts in 8 bits beside bf16.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
export JAX_COMPILATION_CACHE_DIR=/tmp/jc.$JOB.c JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
bench="python3 -u benchmarks/moe_of_8_bits.py --world 2 --programs fused"
s=$(date +%s)
warm() { JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2 timeout 60 $bench --lower "$@"; }
for shape in 4096,2048,768,64,8 64,2048,768,64,8 4096,4096,14336,4,2 4096,7168,2048,16,8; do
  for k in bf16 "int8 weights" int8 e4m3 "e4m3 blocks"; do warm --shapes $shape --kinds "$k" >> $RES/warm.moe8.txt 2>&1 & done
done
wait
echo "compiled in $(( $(date +%s)-s )) s, kernels of $(grep -c kernels $RES/warm.moe8.txt) of 20 programs"
for shape in 4096,2048,768,64,8 64,2048,768,64,8 4096,4096,14336,4,2 4096,7168,2048,16,8; do
  left=$(( 176 - $(date +%s) + s ))
  [ $left -gt 15 ] && timeout $left $bench --shapes $shape --rounds 5 --json $RES/rows.moe8.jsonl > $RES/times.moe8.$shape.txt 2>&1
  grep -E "^\[" $RES/times.moe8.$shape.txt || tail -n 4 $RES/times.moe8.$shape.txt
done
