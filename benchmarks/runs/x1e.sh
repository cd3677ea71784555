export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 165 python3 -u benchmarks/runs/shared.py 2 100 155 > $RES/shared2.txt 2>&1; grep -a RESULT $RES/shared2.txt | cut -c1-500 | tail -20 || tail -c 600 $RES/shared2.txt
