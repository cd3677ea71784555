"""The kernels of `matmul_all_reduce`."""
