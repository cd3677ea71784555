# In a tree of the branch "kept-stream", 2 GPUs, 200 s: queries as messages or a meeting, and blocks on their way by tensor cores.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 110 python3 benchmarks/runs/exp.py told --seconds 105 > $RES/told.txt 2>&1; tail -n 42 $RES/told.txt | cut -c1-150
timeout -k 5 80 python3 benchmarks/runs/exp.py flight --seconds 75 > $RES/flight.txt 2>&1; tail -n 26 $RES/flight.txt | cut -c1-150
