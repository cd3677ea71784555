export XLA_PYTHON_CLIENT_PREALLOCATE=false OLDREP=3 EVENS=1 ONLY=loop
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
while read d; do env IFS=0 DELAYS=$d timeout -k 5 40 python3 -u benchmarks/runs/greedy.py > $RES/x.txt 2>&1 < /dev/null; echo "$d $(grep -E 'loop .*given .* us' $RES/x.txt) $(grep -c 'same bits True' $RES/x.txt)"; done < benchmarks/runs/delays.txt
