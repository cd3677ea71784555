export XLA_PYTHON_CLIENT_PREALLOCATE=false
nvidia-smi --query-gpu=name --format=csv,noheader | head -1
for v in ${VARIANTS:-0,0 1,1 1,2 0,2}; do
export EXP_GIVE=${v%,*} EXP_LOOP=${v#*,}; echo "== give $EXP_GIVE loop $EXP_LOOP"
EXP_LOG=1 timeout -k 5 30 python3 benchmarks/runs/blocks_clock.py --out $RES/bc$v.npz > $RES/bc$v.txt 2>&1; tail -n 6 $RES/bc$v.txt | cut -c1-160
[ -s $RES/bc$v.txt ] && grep -q layer $RES/bc$v.txt || { tail -3 $RES/bc$v.txt; continue; }
timeout -k 5 60 python3 benchmarks/runs/exp.py fast --seconds 50 > $RES/fast$v.txt 2>&1; grep -A30 "of each form" $RES/fast$v.txt | grep -v xla| cut -c1-150
done
