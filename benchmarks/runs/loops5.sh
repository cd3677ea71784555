export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 100 python3 -u benchmarks/runs/loops5.py > $RES/loops5.txt 2>&1; tail -n 19 $RES/loops5.txt | cut -c1-150
for s in 1,8192,8,8192,16,2,128,7168,32064 1,8192,8,4096,32,8,128,14336,32064 2,8192,8,4096,8,2,128,3584,32064; do SHAPE=$s timeout -k 5 50 python3 -u benchmarks/runs/loops5.py > $RES/loops5_$s.txt 2>&1; echo $s; tail -n 7 $RES/loops5_$s.txt | cut -c1-150; done
