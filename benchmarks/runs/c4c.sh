export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 75 python3 -u benchmarks/runs/waited.py decode_step --world 2 --modes calls waited --seconds-per-shape 10 --shapes 1,8192,8,4096,8,2,128,3584,32064 --implementations fused fused/plain fused/graph xla_step/graph --commit $COMMIT --json $RES/waited.json > $RES/waited.txt 2>&1
echo rc=$?; tail -n 20 $RES/waited.txt | cut -c1-200
