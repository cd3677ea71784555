export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
timeout -k 5 70 python3 -u benchmarks/run.py decode_step --world 2 --modes sustained --seconds-per-shape 3 --shapes 1,8192,8,4096,8,2,128,3584,32064 --implementations fused xla_step/graph --commit ${COMMIT:?} --json $RES/one.json > $RES/one.txt 2>&1
grep -a -E "checked and right|refused|rror|left out|ended early" $RES/one.txt | cut -c1-200 | head -n 6; grep -a -E "[0-9]+, [0-9]+" $RES/one.txt | cut -c1-200 | tail -n 24
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -k 5 60 python3 -u -m pytest -p no:cacheprovider -q -m "not soak" "tests/gpu/test_gpu_decode_step.py::test_a_rank_that_does_not_arrive_is_named" > $RES/dead.txt 2>&1; grep -a -E "passed|failed|^E " $RES/dead.txt | cut -c1-300 | head
