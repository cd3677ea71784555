export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
one() { echo "== $*"; env "$@" timeout -k 5 50 python3 -u benchmarks/runs/greedy.py > $RES/x.txt 2>&1; grep -v "same bits True" $RES/x.txt | tail -n 25 | cut -c1-350; }
one IFS=0 OLDREP=1 EVENS=1 ONLY="loop;greedy 32 pace 850;greedy 1 pace 850;clock"
