LIST=p8 LIMIT=${LIMIT:-140} WORKERS=60 bash benchmarks/runs/soak.sh
