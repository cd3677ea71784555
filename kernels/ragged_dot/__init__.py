"""The kernels of `ragged_dot` and of its gradients: products by groups of rows, of sizes that are data."""
