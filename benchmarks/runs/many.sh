#!/bin/bash
# 2 GPUs, 250 s. decode_step by tensor cores: messages between items, vectors of 8, and norms behind the blocks of 5
# sequences or more, beside the forms that have run. What is right everywhere, and not slower, goes into MEASURED of
# jaxtaxfree/ops/decode_step/call.py: "exchanged", "vectors", "post_norms" (if it is faster than operations).
timeout -k 5 ${LIMIT:-250} python3 -u benchmarks/runs/exp.py many --seconds $((${LIMIT:-250} - 10)) 2>&1 | grep -a -v -E "^(W|I)[0-9]{4}"
