#!/bin/bash
# 2 GPUs, 250 s. decode_step with weights of 8 bits in one launch, 8 and 16 sequences, beside bf16: as eight.sh.
timeout -k 5 ${LIMIT:-250} python3 -u benchmarks/runs/exp.py eightmany --seconds $((${LIMIT:-250} - 10)) 2>&1 | grep -a -v -E "^(W|I)[0-9]{4}"
