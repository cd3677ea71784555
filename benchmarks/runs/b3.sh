export XLA_PYTHON_CLIENT_PREALLOCATE=false; . benchmarks/runs/rows.sh
X=xla_heads_cudnn/graph_symmetric
row w1 50 1,8192,8,4096,32,8,128,14336,32064 "fused $X" sustained
row w16 55 16,2048,8,4096,32,8,128,14336,32064 "fused $X" sustained
row t1 60 1,32768,8,8192,64,8,128,28672,12800 "fused $X" sustained
row t16 60 16,4096,8,8192,64,8,128,28672,12800 "fused $X" sustained
