export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 55 python3 -u benchmarks/run.py decode_step --world 2 --modes sustained calls waited --seconds-per-shape 2 --shapes 1,8192,8,4096,8,2,128,3584,32064 --implementations fused xla_step/graph --commit ${COMMIT:?} --json $RES/waited.json > $RES/waited.txt 2>&1
grep -a -E "refused|rror|left out|checked and right" $RES/waited.txt | cut -c1-200 | head -n 5; grep -a "|" $RES/waited.txt | cut -c1-200
