"""How much room a cache has, and which pages of a pool each sequence has."""

import dataclasses
from collections.abc import Sequence

import numpy as np

POOL = 8  # what pages of a pool are a multiple of, so that not every batch has programs of its own


@dataclasses.dataclass(frozen=True)
class Room:
    """Of a cache on each rank.

    Attributes:
      batch: sequences.
      slots: positions of the longest sequence for which there is room.
      pages: of the pool that all sequences share; 0: each has `slots` of its own.
    """

    batch: int
    slots: int
    pages: int = 0


def pool_of(counts: Sequence[int]) -> int:
    """Pages of a pool in which sequences have so many."""
    return sum(counts) + -sum(counts) % POOL


def first_tables(counts: Sequence[int]) -> np.ndarray:
    """i32[B, most of them]: pages of sequences that have so many, one sequence behind the other; then -1."""
    tables = np.full((len(counts), max(counts)), -1, np.int32)
    ends = np.cumsum(counts)
    for row, count, end in zip(tables, counts, ends, strict=True):
        row[:count] = np.arange(end - count, end)
    return tables


def more_tables(tables: np.ndarray, pages: int, more: int) -> np.ndarray:
    """The tables where each sequence has `more` pages besides, which lie behind the pool of `pages`."""
    wide = np.pad(tables, [(0, 0), (0, more)], constant_values=-1)
    for i, row in enumerate(wide):
        count = int(np.sum(row >= 0))
        row[count : count + more] = pages + i * more + np.arange(more)
    return wide
