export XLA_PYTHON_CLIENT_PREALLOCATE=false; . benchmarks/runs/rows.sh
X=xla_heads_cudnn/graph_symmetric
row t1 62 1,32768,8,8192,64,8,128,28672,12800 "fused $X" sustained
row w1 58 1,8192,8,4096,32,8,128,14336,32064 "fused $X" sustained
