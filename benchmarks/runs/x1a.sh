export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s)
timeout -k 5 150 python3 -u benchmarks/runs/shared.py 2 300 140 > $RES/shared2.txt 2>&1; tail -n 20 $RES/shared2.txt | cut -c1-700; echo "-- at $(( $(date +%s)-s ))"
timeout -k 5 300 python3 -u -m pytest -p no:cacheprovider -v --durations=3 tests/runtime/test_processes.py -k "share_a_gpu and decode_step and not soak" > $RES/share.txt 2>&1; grep -a -E "PASSED|FAILED|SKIPPED|ERROR|passed|failed|s call|^E " $RES/share.txt | cut -c1-200 | tail -n 30; echo "-- at $(( $(date +%s)-s ))"
