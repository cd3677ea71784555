export FORWARD=1 CUDA_VISIBLE_DEVICES= JAX_PLATFORMS=cpu OMP_NUM_THREADS=1
N=$(env -u OMP_NUM_THREADS nproc); for k in $(seq 0 $((N-1))); do timeout -s KILL ${LIMIT:-340} python3 benchmarks/runs/soak_run.py $k $N $RES/soaked.txt > $RES/soak_$k.log 2>&1 & done; wait
wc -l < $RES/soaked.txt; grep -v PASSED $RES/soaked.txt | head; tail -n 2 $RES/soak_0.log
