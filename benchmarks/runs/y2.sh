export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1; s=$(date +%s)
one() { timeout -k 5 $1 python3 -u benchmarks/run.py decode_step --world 2 --modes $5 --seconds-per-shape $6 --shapes $3 --implementations fused $4 --commit ${COMMIT:?} --json $RES/$2.json > $RES/$2.txt 2>&1
grep -a -E "checked and right|refused|rror|left out|ended early" $RES/$2.txt | cut -c1-200 | head -n 6; grep -a -E "[0-9]+, [0-9]+" $RES/$2.txt | cut -c1-200 | tail -n 24
echo "-- at $(( $(date +%s)-s ))"; }
one 60 one 1,8192,8,4096,8,2,128,3584,32064 xla_step/graph sustained 2
one 48 waited 1,8192,8,4096,8,2,128,3584,32064 xla_step/graph "calls waited" 1
EXP_WORLD=2 timeout -k 5 90 python3 -u benchmarks/runs/exp.py patience --seconds 80 --only "8B/8, 1" > $RES/exp.txt 2>&1; tail -n 6 $RES/exp.txt; echo "-- at $(( $(date +%s)-s ))"
one 140 more "1,8192,8,8192,16,2,128,7168,32064 1,8192,8,4096,32,8,128,14336,32064 1,32768,8,8192,64,8,128,28672,12800" xla_heads_cudnn/graph_symmetric sustained 2
one 150 sixteen "16,4096,8,8192,64,8,128,28672,12800 16,2048,8,4096,32,8,128,14336,32064" xla_heads_cudnn/graph_symmetric sustained 2
