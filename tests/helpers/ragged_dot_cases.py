"""Rows in groups for `ragged_dot`, and what must come of them, in NumPy."""

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Grouped:
    """Operands of small whole numbers, so that every order of adding up gives the same.

    Attributes:
      m, k, n: rows of all groups and of none, and the lengths of the other dimensions.
      sizes: of the groups.
    """

    m: int
    k: int
    n: int
    sizes: tuple[int, ...]

    def arrays(self, dtype: Any, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """lhs [m, k], rhs [g, k, n], the sizes, and a cotangent [m, n]."""
        draw = np.random.default_rng(seed)
        shapes = ((self.m, self.k), (len(self.sizes), self.k, self.n), (self.m, self.n))
        lhs, rhs, ct = (draw.integers(-2, 3, shape).astype(dtype) for shape in shapes)
        return lhs, rhs, np.array(self.sizes, np.int32), ct

    def slices(self) -> list[slice]:
        ends = np.cumsum(self.sizes)
        return [slice(int(end) - size, int(end)) for end, size in zip(ends, self.sizes, strict=True)]

    def product(self, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
        """f64 [m, n]."""
        out = np.zeros((self.m, rhs.shape[2]))
        for rows, w in zip(self.slices(), rhs, strict=True):
            out[rows] = lhs[rows].astype(np.float64) @ w.astype(np.float64)
        return out

    def of_weights(self, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
        """lhs^T @ rhs of each group, f64 [g, k, n]."""
        return np.stack([lhs[rows].astype(np.float64).T @ rhs[rows].astype(np.float64) for rows in self.slices()])


def garbage(sizes: np.ndarray, m: int) -> list[tuple[str, np.ndarray]]:
    """Sizes that are none."""
    found = []
    for name, place, value in (
        ("negative", 0, -1),
        ("negative, and the sum fits", -1, -(2**31)),
        ("more than there are", 0, m + 1),
        ("a sum that wraps around", slice(None), 2**31 - 1),
        ("one row too many", 0, m - int(sizes[1:].sum()) + 1),
    ):
        wrong = sizes.copy()
        wrong[place] = value
        found.append((name, wrong))
    return found
