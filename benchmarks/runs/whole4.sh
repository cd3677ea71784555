export XLA_PYTHON_CLIENT_PREALLOCATE=false
timeout -k 5 300 python3 -u benchmarks/run.py decode_step --world 4 --modes sustained --seconds-per-shape 2 --shapes 1,8192,32,4096,32,8,128,14336,128256 --implementations fused fused/operations xla_heads_cudnn/graph_symmetric --commit $COMMIT --json $RES/whole1.json > $RES/whole1.txt 2>&1
echo rc=$?; grep -a -E "checked and right|refused|rror|wrong|left out|ended early" $RES/whole1.txt | cut -c1-300 | head -n 12; tail -n 30 $RES/whole1.txt | cut -c1-230
