export CUDA_VISIBLE_DEVICES= JAX_PLATFORMS=cpu OMP_NUM_THREADS=1
timeout -s INT -k 8 ${LIMIT:-200} python3 -m pytest -p no:cacheprovider -v -m soak -n 56 --dist worksteal tests/simulator/test_simulator_decode_step.py > $RES/soak.txt 2>&1
echo rc=$?; tail -n 4 $RES/soak.txt | cut -c1-200; grep -c PASSED $RES/soak.txt; grep -c FAILED $RES/soak.txt
