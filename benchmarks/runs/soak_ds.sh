LIST=ds LIMIT=${LIMIT:-285} WORKERS=48 bash benchmarks/runs/soak.sh
