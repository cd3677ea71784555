"""The kernels of `all_gather_matmul`."""
