#!/bin/bash
# Here, behind rehearsals with `. env.sh`: packs what Triton compiled into .wheels/triton_cache.tar.xz. On the GPU machine, behind
# .wheels/activate.sh: tar -xJf .wheels/triton_cache.tar.xz -C / && . /tmp/pack/device.sh
set -e
python3 - <<'P'
import json, pathlib
kept = 0
for group in pathlib.Path("/tmp/pack/home/.triton/cache").glob("*/__grp__*.json"):
    paths = {n: p for n, p in json.loads(group.read_text())["child_paths"].items() if n.endswith((".json", ".ptx", ".cubin"))}
    group.write_text(json.dumps({"child_paths": paths}))
    for file in group.parent.iterdir():
        if file != group and str(file) not in paths.values(): file.unlink()
    kept += 1
print(kept, "kernels")
P
cat > /tmp/pack/device.sh <<'D'
export TRITON_PTXAS_PATH=/tmp/pack/ptxas TRITON_PTXAS_BLACKWELL_PATH=/tmp/pack/ptxas TRITON_HOME=/tmp/pack/home REAL_PTXAS=$(command -v ptxas || echo "${CUDA_HOME:-}/bin/ptxas")
D
tar -cJf /work/main/.wheels/triton_cache.tar.xz -C / tmp/pack/home tmp/pack/ptxas tmp/pack/device.sh
ls -la /work/main/.wheels/triton_cache.tar.xz
