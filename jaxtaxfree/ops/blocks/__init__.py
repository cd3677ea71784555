"""What the kernels of several products share on the host: tiles by shape, costs, and keywords of `shmem_call`."""
