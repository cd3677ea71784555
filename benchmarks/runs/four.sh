#!/bin/bash
# 4 GPUs, 575 s, and nothing else on the host: a busy host makes XLA's programs up to 25 % slower, and calls that are waited for twice.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s)
LIMIT=${LIMIT:-572}
row() {  # NAME SECONDS OP ARGUMENTS...
  local name=$1 most=$2; shift 2
  local left=$(( LIMIT - $(date +%s) + s )); [ $most -lt $left ] && left=$most
  [ $left -gt 20 ] || { echo "$name: no time left"; return; }
  timeout -k 5 $left python3 -u benchmarks/run.py "$@" --commit ${COMMIT:?of this tree} --json $RES/$name.json > $RES/$name.txt 2>&1
  echo "== $name rc=$? at $(( $(date +%s)-s )) s"; grep -a -E "^[a-z0-9/.-]+: [0-9]+ s|checked and right|refused|rror|wrong|left out|ended early" $RES/$name.txt | cut -c1-300 | head -n 12
  grep -a -E "[0-9]+, [0-9]+" $RES/$name.txt | cut -c1-230 | tail -n 14
}
M="--modes sustained --seconds-per-shape 2"
row ds4 130 decode_step --world 4 $M --shapes 16,4096,8,8192,64,8,128,28672,12800 16,2048,8,5120,64,8,128,25600,18992 --implementations xla_heads_cudnn/graph_symmetric fused fused/operations
row whole1 200 decode_step --world 4 $M --shapes 1,8192,32,4096,32,8,128,14336,128256 --implementations fused fused/operations xla_heads_cudnn/graph_symmetric
row moe4 80 moe --world 4 $M --shapes 4096,2048,768,128,8 64,2048,768,128,8 4096,7168,2048,64,8 --implementations fused dense
left=$(( LIMIT - $(date +%s) + s ))
[ $left -gt 45 ] && timeout -k 5 $left python3 -m tests.helpers.training --steps 10000 --seconds $(( left - 30 )) --only "one process, 2 x 2" > $RES/training.txt 2>&1; tail -n 8 $RES/training.txt | cut -c1-300
echo "-- all ended at $(( $(date +%s)-s ))"
