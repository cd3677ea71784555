"""The kernels of `psum`, `all_gather`, `psum_scatter` and `all_to_all`."""
