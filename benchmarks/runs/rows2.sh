export XLA_PYTHON_CLIENT_PREALLOCATE=false
for c in '{"row_cores": false}' '{"row_cores": true}'; do
timeout -k 5 50 python3 benchmarks/step_clock.py --config "$c" > $RES/clock.txt 2>&1; echo "$c"; cat $RES/clock.txt | tail -n 14 | cut -c1-160
done
