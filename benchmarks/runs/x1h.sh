export XLA_PYTHON_CLIENT_PREALLOCATE=false; s=$(date +%s)
EXP_WORLD=1 timeout -k 5 75 python3 benchmarks/runs/exp.py patience --seconds 60 --only "8B/8, 1;8B/8, 1, int8" > $RES/patience.txt 2>&1; grep -A60 "of each form" $RES/patience.txt | cut -c1-150; grep -E "WRONG|Error" $RES/patience.txt | cut -c1-300 | head -5; echo "-- at $(( $(date +%s)-s ))"
LIMIT=${SOAK:-370} bash benchmarks/runs/soak16.sh; echo "-- at $(( $(date +%s)-s ))"
