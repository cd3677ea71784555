"""What the kernels of several operations share: products, epilogues, tiles, bundles."""
