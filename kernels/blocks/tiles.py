"""Which program does which part, and in what pieces: arithmetic that the kernels share."""

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


@triton.constexpr_function
def box_of(rows, block_m):
    """How many rows TMA is to load at a time of an array that is multiplied in blocks of `block_m` rows: a power of 2.

    A row of a box that lies outside of the array takes TMA 3.8 ns on an H200, and one inside 1 ns. So where the last
    block is not full, boxes have fewer rows, and in place of those that would lie outside others come (`row_of_box`):
    the result of these rows is nobody's.

    Args:
      block_m: a power of 2, or the sum of two.
    """
    whole = block_m & -block_m
    if rows % block_m == 0:
        return whole
    fourth = 1 << (max(8, block_m // 4).bit_length() - 1)
    return min(whole, max(fourth, rows & -rows))


@triton.jit
def row_of_box(row, box: tl.constexpr, ROWS: tl.constexpr, BOX: tl.constexpr):
    """The first row of a box of the block that begins at `row`; that of the first one where there are no more rows."""
    if box > 0:
        row = tl.where(row + box * BOX < ROWS, row + box * BOX, row)
    return row
