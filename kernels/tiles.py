"""Which program does which part: index arithmetic that the kernels share."""

import triton
import triton.language as tl


@triton.jit
def grouped(tile, blocks_m, blocks_n, GROUP_M: tl.constexpr):
    """The block (m, n) of a tile, in an order that reuses the L2 cache.

    Tiles run down a group of `GROUP_M` row blocks before they move one column block on, so that the tiles in flight
    at one time share few rows and columns (Triton's matrix multiplication tutorial).
    """
    tiles_a_group = GROUP_M * blocks_n
    first_m = tile // tiles_a_group * GROUP_M
    rows = tl.minimum(blocks_m - first_m, GROUP_M)
    within = tile % tiles_a_group
    return first_m + within % rows, within // rows
