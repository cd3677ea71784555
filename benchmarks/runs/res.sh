# In a tree of the branch, 2 GPUs: results of a step in one launch, queries as messages and behind a meeting, in one run.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s)
nvidia-smi --query-gpu=name,clocks.sm,temperature.gpu --format=csv
timeout -k 5 130 python3 -u benchmarks/run.py decode_step --world 2 --seconds-per-shape 4 --shapes 1,8192,8,4096,8,2,128,3584,32064 --implementations fused xla_step/graph xla_heads_cudnn/graph_symmetric --config tell_queries=False --commit ${COMMIT:?} --json $RES/one.json > $RES/one.txt 2>&1
grep -a -E "checked and right|refused|rror|left out|ended early" $RES/one.txt | cut -c1-200 | head -n 6; grep -a -E "[0-9]+, [0-9]+" $RES/one.txt | cut -c1-230 | tail -n 24
echo "-- at $(( $(date +%s)-s ))"
timeout -k 5 260 python3 -u benchmarks/run.py decode_step --world 2 --modes sustained --seconds-per-shape 2 --shapes 1,8192,8,8192,16,2,128,7168,32064 1,8192,8,4096,32,8,128,14336,32064 1,32768,8,8192,64,8,128,28672,12800 2,8192,8,4096,8,2,128,3584,32064 --implementations fused xla_heads_cudnn/graph_symmetric --config tell_queries=False --commit ${COMMIT:?} --json $RES/more.json > $RES/more.txt 2>&1
grep -a -E "checked and right|refused|rror|left out|ended early" $RES/more.txt | cut -c1-200 | head -n 6; grep -a -E "[0-9]+, [0-9]+" $RES/more.txt | cut -c1-230 | tail -n 24
echo "-- at $(( $(date +%s)-s ))"
timeout -k 5 90 python3 -u benchmarks/run.py decode_step --world 2 --modes sustained --seconds-per-shape 2 --shapes 16,4096,8,8192,64,8,128,28672,12800 --implementations fused xla_heads_cudnn/graph_symmetric --config in_flight=3 --config in_flight=4 --config in_flight=6 --commit ${COMMIT:?} --json $RES/sixteen.json > $RES/sixteen.txt 2>&1
grep -a -E "checked and right|refused|rror|left out|ended early" $RES/sixteen.txt | cut -c1-200 | head -n 6; grep -a -E "[0-9]+, [0-9]+" $RES/sixteen.txt | cut -c1-230 | tail -n 24
echo "-- at $(( $(date +%s)-s ))"
