export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s)
CUDA_VISIBLE_DEVICES=0,1 timeout -k 5 48 python3 -u benchmarks/run.py decode_step --world 2 --modes calls waited --seconds-per-shape 1 --shapes 1,8192,8,4096,8,2,128,3584,32064 --implementations fused xla_step/graph --commit ${COMMIT:?} --json $RES/waited.json > $RES/waited.txt 2>&1
grep -a -E "refused|rror|left out|checked and right" $RES/waited.txt | cut -c1-200 | head -n 5; grep -a "^|" $RES/waited.txt | cut -c1-200;  echo "-- at $(( $(date +%s)-s ))"
[ "$(nvidia-smi -L | wc -l)" -ge 4 ] && { EXP_WORLD=4 timeout -k 5 70 python3 benchmarks/runs/exp.py w4 --seconds 60 > $RES/w4.txt 2>&1; grep -A50 "of each form" $RES/w4.txt | grep -v xla| cut -c1-150; echo "-- at $(( $(date +%s)-s ))"; }
