#!/bin/bash
# Here, once, behind ../shared/gpu/pack_wheels.sh .wheels: makes /tmp/pack with the very Triton that the GPU machine gets, and
# env.sh for rehearsals (`. /tmp/pack/env.sh`, a Python with JAX 0.11.2, PYTHONPATH with the tree):
#   python -m pytest -p no:cacheprovider -q --rehearse -m "not soak" tests/gpu/test_gpu_decode_step.py
#   python benchmarks/runs/lower.py decode_step --world 2 --shapes ... --implementations fused/one_launch fused/operations
set -e
mkdir -p /tmp/pack/site /tmp/pack/home
tar -xJf /work/main/.wheels/triton.tar.xz -C /tmp/pack/site
cat > /tmp/pack/ptxas <<'P'
#!/bin/sh
# One version everywhere, so that Triton's keys are the same on both machines.
if [ "$1" = --version ]; then
  printf 'ptxas: NVIDIA (R) Ptx optimizing assembler\nCuda compilation tools, release 13.0, V13.0.48\n'
else exec "${REAL_PTXAS:-ptxas}" "$@"; fi
P
chmod +x /tmp/pack/ptxas
cat > /tmp/pack/env.sh <<'P'
export TRITON_PTXAS_PATH=/tmp/pack/ptxas TRITON_PTXAS_BLACKWELL_PATH=/tmp/pack/ptxas TRITON_DEFAULT_FP_FUSION=1 TRITON_HOME=/tmp/pack/home
export PYTHONPATH=/tmp/pack/site${PYTHONPATH:+:$PYTHONPATH} REAL_PTXAS=/work/main/.venv/lib/python3.12/site-packages/triton/backends/nvidia/bin/ptxas
P
