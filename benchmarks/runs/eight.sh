#!/bin/bash
# 2 GPUs, 250 s. decode_step with weights of 8 bits in one launch, 1 and 4 sequences, beside bf16. If all are right and
# int8 is faster than bf16, "eight_bits" goes into MEASURED of jaxtaxfree/ops/decode_step/call.py (with eightmany.sh).
# Of 4 sequences, which are faster: in registers, or by tensor cores? That decides `by_tensor_cores` for 8 bits.
timeout -k 5 ${LIMIT:-250} python3 -u benchmarks/runs/exp.py eight --seconds $((${LIMIT:-250} - 10)) 2>&1 | grep -a -v -E "^(W|I)[0-9]{4}"
