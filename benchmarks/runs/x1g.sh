export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s)
timeout -k 5 290 python3 -u -m pytest -p no:cacheprovider -v --durations=4 "tests/runtime/test_processes.py::test_parity_of_ranks_that_share_a_gpu[decode_step of 8 bits and in pages-8]" -m "not soak" > $RES/share8.txt 2>&1; grep -a -E "PASSED|FAILED|SKIPPED|ERROR|passed|failed|s call|^E " $RES/share8.txt | cut -c1-200 | tail -n 30
echo "-- at $(( $(date +%s)-s ))"
LIMIT=$(( 350 - $(date +%s) + s )) bash benchmarks/runs/soak16.sh
