# Wide tiles of a gather with scales of blocks at three waves, 2 GPUs, 60 s.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 ${LIMIT:-60} python3 benchmarks/eight_bits.py --programs narrow wide --kinds "e4m3 blocks" "e4m3 rows" --operations all_gather_matmul --shapes 2048,8192,28672 4096,8192,28672 --json $RES/blocks.json > $RES/blocks.txt 2>&1; tail -n 30 $RES/blocks.txt | cut -c1-200
