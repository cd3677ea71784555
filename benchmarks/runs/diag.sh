#!/bin/bash
# 1 GPU, <= 150 s
export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout 145 python3 -u diag.py 2>&1 | grep -v -E "^[WIE][0-9]{4}" | tee $RES/diag.txt | cut -c1-330 | tail -n 24
