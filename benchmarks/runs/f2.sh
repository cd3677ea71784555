export XLA_PYTHON_CLIENT_PREALLOCATE=false
s=$(date +%s)
timeout -k 5 95 python3 -u benchmarks/eight_bits.py --world 4 --programs fused --shapes 2048,8192,28672 8192,8192,28672 --operations all_gather_matmul matmul_reduce_scatter --budget 92 --json $RES/eight4.jsonl > $RES/eight4.txt 2>&1
grep -a -E "us|fails|error" $RES/eight4.txt | cut -c1-200 | tail -n 40; echo "-- at $(( $(date +%s)-s ))"
XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -s INT -k 5 120 python3 -m pytest -p no:cacheprovider -v --durations=8 tests/gpu/test_gpu_processes.py -k "4x1 and (decode_step or moe or ragged or explicit)" > $RES/processes.txt 2>&1
grep -a -E "FAILED|ERROR|passed|failed|^E |PASSED" $RES/processes.txt | cut -c1-170 | tail -n 45; echo "-- at $(( $(date +%s)-s ))"
