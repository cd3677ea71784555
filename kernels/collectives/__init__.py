"""The kernels of `psum`, `all_gather` and `psum_scatter`."""
