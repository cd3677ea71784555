export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
timeout -k 5 150 python3 benchmarks/runs/exp.py digits --seconds 130 > $RES/digits.txt 2>&1; sed -n '/of each form/,$p' $RES/digits.txt | cut -c1-150 | python3 -c "
import sys,re
for l in sys.stdin: print(re.sub(r'\{\"in_flight\": (\d\d+)\}\s*', lambda m: ' '.join(f'{int(m[1])>>(4*i)&15}' for i in range(6))+'   ', l).rstrip())"
HALF=1 timeout -k 5 40 python3 benchmarks/runs/exp.py half --seconds 30 > $RES/half.txt 2>&1; sed -n '/of each form/,$p' $RES/half.txt | cut -c1-150
for s in 1,8192,8,4096,8,2,128,3584,32064 1,8192,8,8192,16,2,128,7168,32064; do timeout -k 5 45 python3 benchmarks/step_clock.py --shape $s > $RES/clock.txt 2>&1; echo $s; tail -n 9 $RES/clock.txt | cut -c1-160; done
HALF=1 timeout -k 5 45 python3 benchmarks/step_clock.py > $RES/clock.txt 2>&1; echo half; tail -n 9 $RES/clock.txt | cut -c1-160
