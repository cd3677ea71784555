if nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | grep -q H100; then exec timeout 480 bash benchmarks/runs/h100.sh; else exec bash benchmarks/runs/gap.sh; fi
