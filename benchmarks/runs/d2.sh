export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s)
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -s INT -k 5 110 python3 -m pytest -p no:cacheprovider -v --durations=8 tests/gpu/test_gpu_models.py > $RES/models.txt 2>&1
grep -a -E "PASSED|FAILED|ERROR|passed|failed|^E " $RES/models.txt | cut -c1-170 | tail -n 25
for op in all_gather_matmul matmul_reduce_scatter matmul_all_reduce; do
  left=$(( ${LIMIT:-290} - $(date +%s) + s )); [ $left -gt 25 ] || break; [ $left -gt 70 ] && left=70
  timeout -k 5 $left python3 -u benchmarks/eight_bits.py --world 2 --programs narrow wide --operations $op --shapes 2048,4096,14336 --kinds "e4m3 rows" "e4m3 blocks" "int8 rows" --budget $(( left - 3 )) --json $RES/wide.jsonl > $RES/wide.$op.txt 2>&1
  grep -a -E "us|fails" $RES/wide.$op.txt | cut -c1-200 | tail -n 8; echo "-- $op at $(( $(date +%s)-s ))"
done
