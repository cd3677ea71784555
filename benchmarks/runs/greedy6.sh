export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
one() { echo "== $*"; env "$@" timeout -k 5 40 python3 -u benchmarks/runs/greedy.py > $RES/x.txt 2>&1; grep -v "same bits True" $RES/x.txt | grep -v free | tail -n 25 | cut -c1-250; }
one IFS=0 OLDREP=1 EVENS=1 ONLY="loop"
one IFS=0 OLDREP=2 EVENS=1 ONLY="loop"
one IFS=0 OLDREP=3 EVENS=1 ONLY="loop"
IFS=0 OLDREP=1 EVENS=1 timeout -k 5 60 python3 -u benchmarks/run.py decode_step --world 2 --modes sustained --seconds-per-shape 2 --shapes 1,8192,8,4096,8,2,128,3584,32064 --implementations fused --commit ${COMMIT:?} --json $RES/one.json > $RES/one.txt 2>&1
grep -a -E "checked and right|refused|rror|left out|ended early" $RES/one.txt | cut -c1-200 | head -n 6; grep -a -E "[0-9]+, [0-9]+" $RES/one.txt | cut -c1-200 | tail -n 24
