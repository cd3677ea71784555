export XLA_PYTHON_CLIENT_PREALLOCATE=false; . benchmarks/runs/rows.sh
X=xla_heads_cudnn/graph_symmetric
row s4 50 4,2048,8,4096,8,2,128,3584,32064 "fused $X" sustained
row s8 50 8,2048,8,4096,8,2,128,3584,32064 "fused $X" sustained
row s70 50 1,8192,8,8192,16,2,128,7168,32064 "fused $X" sustained
