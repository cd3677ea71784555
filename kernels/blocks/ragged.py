"""Groups of rows whose sizes are data: which group a tile belongs to, and where it begins.

Rows behind the last group are one more group, number GROUPS, so that somebody fills them. Sizes are checked before they
address anything: with a negative one, or more rows than there are, all groups are empty and all rows are behind them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jaxtaxfree.kernels.blocks import tiles

# Where the rows of a ragged descriptor end; `described_as` of jaxtaxfree/call.py makes it so.
END = tl.constexpr(1 << 30)


class Groups(NamedTuple):
    """What a program knows of all groups."""

    index: Any  # [more than GROUPS, a power of 2], their numbers
    sizes: Any  # of the same shape, their rows
    ends: Any  # their last row, and those of all before, counted
    blocks: Any  # the same in blocks of rows
    wrong: Any  # whether the sizes are
    scale: Any  # f32: 1, or NaN where they are


class Place(NamedTuple):
    """Where a tile lies."""

    group: Any  # GROUPS for rows behind the last one
    begin: Any  # the group's first row
    size: Any  # its rows
    row: Any  # the tile's first row; of the group, or of its weights
    column: Any  # the tile's first column


@triton.constexpr_function
def length_of(GROUPS):
    """Of the vectors of `Groups`: at least a warp has, so that no warp needs another one to add them up."""
    return max(32, triton.next_power_of_2(GROUPS + 1))


@triton.jit
def read(sizes_ptr, index, M: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, FILL: tl.constexpr = True):
    """The `Groups` of M rows.

    Args:
      sizes_ptr: i32 [GROUPS].
      index: 0 up to `length_of(GROUPS)`, in a layout in which each warp has all of them.
      FILL: rows behind the last group are a group, or else only where sizes are wrong.
    """
    sizes = tl.load(sizes_ptr + index, mask=index < GROUPS, other=0)
    total = tl.sum(sizes.to(tl.int64), 0)
    wrong = (tl.min(sizes, 0) < 0) | (total > M)
    rest = M - total if FILL else total * 0
    rest = tl.where(wrong, M, rest).to(tl.int32)
    sizes = tl.where(wrong, 0, sizes)
    sizes = tl.where(index == GROUPS, rest, sizes)
    ends = tl.cumsum(sizes, 0)
    blocks = tl.cumsum((sizes + (BLOCK_M - 1)) // BLOCK_M, 0)
    return Groups(index, sizes, ends, blocks, wrong, tl.where(wrong, float("nan"), 1.0))


@triton.jit
def blocks_of(groups):
    """How many blocks of rows all groups have together, those behind the last one included."""
    return tl.max(groups.blocks, 0)


@triton.jit
def place(groups, tile, blocks_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Where tile number `tile` lies. The tiles of a group follow each other, and empty groups have none.

    Args:
      blocks_n: of columns.
      GROUP_M: see `tiles.grouped`.
    """
    before = groups.blocks <= tile // blocks_n
    group = tl.sum(before.to(tl.int32), 0)
    first = tl.max(tl.where(before, groups.blocks, 0), 0)
    begin = tl.max(tl.where(before, groups.ends, 0), 0)
    size = tl.sum(tl.where(groups.index == group, groups.sizes, 0), 0)
    m, n = tiles.grouped(tile - first * blocks_n, tl.cdiv(size, BLOCK_M), blocks_n, GROUP_M)
    return Place(group, begin, size, m * BLOCK_M, n * BLOCK_N)


@triton.jit
def ranks_of(groups, sizes_ptr, GROUPS: tl.constexpr):
    """Which place each group has when the largest one comes first, and of equal ones that of the lower number.

    A loop, because a block of all pairs has too many elements.
    """
    own = tl.where(groups.index < GROUPS, groups.sizes, -1)
    ranks = groups.index * 0
    for i in range(GROUPS):
        other = tl.where(groups.wrong, 0, tl.load(sizes_ptr + i))
        ranks += ((other > own) | ((other == own) & (i < groups.index))).to(tl.int32)
    return ranks


@triton.jit
def place_of_weights(
    groups, ranks, tile, blocks_k, blocks_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr
):
    """Where a tile of the groups' weights lies, of which all groups have as many, the empty ones, too.

    Args:
      ranks: in which order groups come, from `ranks_of`; None: as they are numbered.
    """
    group = tile // (blocks_k * blocks_n)
    if ranks is not None:
        group = tl.sum(tl.where(ranks == group, groups.index, 0), 0)
    begin = tl.sum(tl.where(groups.index < group, groups.sizes, 0), 0)
    size = tl.sum(tl.where(groups.index == group, groups.sizes, 0), 0)
    m, n = tiles.grouped(tile % (blocks_k * blocks_n), blocks_k, blocks_n, GROUP_M)
    return Place(group, begin, size, m * BLOCK_M, n * BLOCK_N)


@triton.jit
def to_ragged(at, row):
    """The first three indices of a ragged descriptor: of a row of a group, whose rows end where the group does."""
    return END + at.group * 0, at.begin + at.size, END - at.size + row
