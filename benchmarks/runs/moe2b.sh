#!/bin/bash
# 2 GPUs, <= 240 s: a decode step of 8 and of 64 tokens, and columns of experts.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
LIMIT=236
RES=$RES/two; mkdir -p $RES
s=$(date +%s)
row() {  # NAME SECONDS OP ARGUMENTS...
  local name=$1 most=$2; shift 2
  local left=$(( LIMIT - $(date +%s) + s )); [ $most -lt $left ] && left=$most
  [ $left -gt 20 ] || { echo "$name: no time left"; return; }
  timeout $left python3 -u benchmarks/run.py "$@" --implementations fused dense --modes sustained --seconds-per-shape 2 \
    --commit ${COMMIT:?of this tree} --json $RES/$name.json > $RES/$name.txt 2>&1
  echo "== $name rc=$? at $(( $(date +%s)-s )) s"; grep -a -E "^[a-z0-9/.-]+: [0-9]+ s|checked and right|refused|rror|wrong" $RES/$name.txt | head -n 8
  grep -a -E "[0-9]+, [0-9]+, [0-9]+" $RES/$name.txt | cut -c1-200 | head -n 12
}
row moe_tensor 110 moe_tensor --world 2 --shapes 4096,2048,768,128,8 8,2048,768,128,8
row moe-decode 150 moe --world 2 --shapes 8,2048,768,128,8 64,2048,768,128,8,dirichlet 64,2048,768,128,8
