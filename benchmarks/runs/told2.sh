export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
timeout -k 5 170 python3 benchmarks/runs/exp.py told2 --seconds 150 > $RES/exp.txt 2>&1; grep -A50 "of each form" $RES/exp.txt | grep -v xla| cut -c1-150
grep -i "wrong\|error" $RES/exp.txt | cut -c1-300 | head
for c in '{}' '{"tell_parts": true, "tell_sums": true}'; do
timeout -k 5 40 python3 benchmarks/step_clock.py --shape 1,8192,8,4096,8,2,128,3584,32064 --config "$c" > $RES/clock.txt 2>&1; echo "$c"; tail -n 14 $RES/clock.txt | cut -c1-160
done
