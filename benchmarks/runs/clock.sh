export XLA_PYTHON_CLIENT_PREALLOCATE=false
for c in '{"tell_queries": false}' '{"tell_queries": true}'; do
timeout -k 5 45 python3 benchmarks/step_clock.py --shape 1,32768,8,8192,64,8,128,28672,12800 --config "$c" > $RES/clock.txt 2>&1; echo "$c"; cat $RES/clock.txt | tail -n 14 | cut -c1-160
done
