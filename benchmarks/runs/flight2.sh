export XLA_PYTHON_CLIENT_PREALLOCATE=false EXP_GIVE=0 EXP_LOOP=2
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
timeout -k 5 100 python3 benchmarks/runs/exp.py flight2 --seconds 90 > $RES/flight2.txt 2>&1; grep -A50 "of each form" $RES/flight2.txt | grep -v xla| cut -c1-150
