export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 ${LIMIT:-110} python3 benchmarks/runs/exp.py next --seconds ${SECONDS_OF:-95} > $RES/next.txt 2>&1; grep -vE "compiled|W0000|I0000" $RES/next.txt | cut -c1-150 | tail -n 58
