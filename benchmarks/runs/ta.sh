# 2 GPUs, 60 s: three blocks on their way of layers of some 214 MB, for the tables.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1; s=$(date +%s)
timeout -k 5 100 python3 -u benchmarks/run.py decode_step --world 2 --modes sustained --seconds-per-shape 2 --shapes 1,8192,8,8192,16,2,128,7168,32064 1,8192,8,4096,32,8,128,14336,32064 --implementations fused/one_launch xla_step/default --config in_flight=3 --commit ${COMMIT:?} --json $RES/blocks.json > $RES/blocks.txt 2>&1
grep -a -E "checked and right|refused|rror|left out|ended early" $RES/blocks.txt | cut -c1-200 | head -n 6; grep -a -E "[0-9]+, [0-9]+" $RES/blocks.txt | cut -c1-230 | tail -n 24
echo "-- at $(( $(date +%s)-s ))"
