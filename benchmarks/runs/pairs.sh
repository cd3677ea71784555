export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
for t in ${TWOS:-0 1}; do export EXP_TWO=$t; echo "== two $t"
timeout -k 5 80 python3 benchmarks/runs/exp.py ${SET:-pairs} --seconds 70 > $RES/exp$t.txt 2>&1; grep -A50 "of each form" $RES/exp$t.txt | grep -v xla| cut -c1-150
done
for c in '{"tell_parts": true, "tell_sums": true, "pace": 900}'; do
timeout -k 5 40 python3 benchmarks/step_clock.py --shape 1,8192,8,4096,8,2,128,3584,32064 --config "$c" > $RES/clock.txt 2>&1; echo "$c"; tail -n 14 $RES/clock.txt | cut -c1-160
done
