# In a tree of the branch "kept-stream" (/tmp/runs/NAME is that of .gpu/NAME.tar.xz, if there is one), 2 GPUs, 230 s.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 ${LIMIT:-230} python3 benchmarks/runs/exp.py kept --seconds 215 > $RES/kept.txt 2>&1; tail -n 45 $RES/kept.txt | cut -c1-200
