timeout 80 python3 -u benchmarks/runs/icache.py 2>&1 | tail -20
