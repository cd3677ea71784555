export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1; s=$(date +%s)
one() { timeout -k 5 $1 python3 -u benchmarks/run.py decode_step --world 2 --modes sustained --seconds-per-shape 2 --shapes $3 --implementations fused $4 --commit ${COMMIT:?} --json $RES/$2.json > $RES/$2.txt 2>&1
grep -a -E "checked and right|refused|rror|left out|ended early" $RES/$2.txt | cut -c1-200 | head -n 6; grep -a -E "[0-9]+, [0-9]+" $RES/$2.txt | cut -c1-200 | tail -n 24
echo "-- at $(( $(date +%s)-s ))"; }
one 60 one 1,8192,8,4096,8,2,128,3584,32064 xla_step/graph
one 140 more "1,8192,8,8192,16,2,128,7168,32064 1,8192,8,4096,32,8,128,14336,32064 1,32768,8,8192,64,8,128,28672,12800" xla_heads_cudnn/graph_symmetric
