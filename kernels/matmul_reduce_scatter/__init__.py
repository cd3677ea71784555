"""The kernels of `matmul_reduce_scatter`; that for few rows on Hopper is `matmul_all_reduce`'s."""
