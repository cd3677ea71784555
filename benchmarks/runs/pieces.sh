#!/bin/bash
XLA_PYTHON_CLIENT_PREALLOCATE=false XLA_FLAGS=--xla_gpu_autotune_level=0 timeout -k 5 ${LIMIT:-60} python3 -u benchmarks/runs/pieces.py > $RES/pieces.txt 2>&1; grep -a -E "us|rror|compiled" $RES/pieces.txt | cut -c1-200 | tail -n 22
