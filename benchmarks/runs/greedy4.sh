export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
one() { echo "== $*"; env "$@" timeout -k 5 40 python3 -u benchmarks/runs/greedy.py > $RES/x.txt 2>&1; grep -v "same bits True" $RES/x.txt | grep -v free | tail -n 25 | cut -c1-250; }
one IFS=0 OLDREP=1 EVENS=0 ONLY="loop;greedy 32 pace 850;clock"
one IFS=0 OLDREP=1 EVENS=1 ONLY="loop;greedy 32 pace 850"
one IFS=0 OLDREP=0 EVENS=1 ONLY="loop;greedy 32 pace 850"
one IFS=1 OLDREP=1 EVENS=1 ONLY="loop;greedy 32 pace 850"
