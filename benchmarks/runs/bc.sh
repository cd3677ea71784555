export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name,clocks.sm --format=csv,noheader | head -1
for c in '{}' '{"in_flight": 3}' '{"in_flight": 12}'; do
timeout -k 5 50 python3 benchmarks/runs/blocks_clock.py --world 2 --shape 1,8192,8,4096,8,2,128,3584,32064 --config "$c" --out $RES/bc$((i=i+1)).npz > $RES/bc$i.txt 2>&1; echo "$c rc=$?"; tail -n 4 $RES/bc$i.txt | cut -c1-160
done
