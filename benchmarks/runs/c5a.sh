export XLA_PYTHON_CLIENT_PREALLOCATE=false; . benchmarks/runs/rows.sh
X=xla_heads_cudnn/graph_symmetric
row s1 60 1,8192,8,4096,8,2,128,3584,32064 "fused xla_step/graph" "sustained"
row s70 60 1,8192,8,8192,16,2,128,7168,32064 "fused $X" sustained
