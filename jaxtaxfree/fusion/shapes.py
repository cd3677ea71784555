"""A dimension of which each rank has a part, seen through casts, reshapes and transposes."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxtaxfree.fusion.graph import CASTS, SHAPES, Node


@dataclasses.dataclass(frozen=True)
class Move:
    """What a node does to a rank's part of an array.

    Attributes:
      shape: of the part, afterwards.
      permutation: the order of the dimensions before that; None if they stay.
      dtype: of the elements; None if it stays.
    """

    shape: tuple[int, ...]
    permutation: tuple[int, ...] | None = None
    dtype: Any = None

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.permutation is not None:
            x = lax.transpose(x, self.permutation)
        if self.dtype is not None:
            x = lax.convert_element_type(x, self.dtype)
        return x if x.shape == self.shape else lax.reshape(x, self.shape)

    def undone(self, before: Sequence[int]) -> "Move":
        """What leads back to an array of this shape; dtypes are not brought back."""
        if self.permutation is None:
            return Move(tuple(before))
        return Move(tuple(before), tuple(int(i) for i in np.argsort(self.permutation)))


def through(before: Sequence[int], after: Sequence[int], dimension: int, parts: int) -> int | None:
    """The dimension of a reshaped array whose parts are those of this one; None if none has the same parts.

    Args:
      before, after: shapes of the whole array.
      parts: into so many the dimension falls; a multiple of it is its size.
    """
    outer = math.prod(before[:dimension])
    for place, size in enumerate(after):
        if math.prod(after[:place]) == outer and size % parts == 0 and size:
            return place
    return None


def forward(chain: Sequence[Node], dimension: int | None, parts: int) -> tuple[list[Move], int | None] | str:
    """What the nodes of a chain do to a rank's part, and where the dimension that is in parts comes to lie; or why the
    parts do not stay whole. Without a dimension: what they do to the whole.
    """
    moves = []
    for node in chain:
        (x, *_), y = node.ins, node.outs[0].aval
        found = _one(node, x.aval.shape, dimension, parts)
        if isinstance(found, str):
            return found
        permutation, dimension = found
        shape = [size // parts if i == dimension else size for i, size in enumerate(y.shape)]
        moves.append(Move(tuple(shape), permutation, y.dtype if node.name in CASTS else None))
    return moves, dimension


def backward(chain: Sequence[Node], dimension: int, parts: int) -> int | str:
    """Where the dimension of a chain's result lies in what the chain begins with; or why it does not."""
    for node in reversed(chain):
        if node.name == "transpose":
            dimension = node.params["permutation"][dimension]
        elif node.name in SHAPES:
            before, after = node.ins[0].aval.shape, node.outs[0].aval.shape
            found = through(after, before, dimension, parts)
            if found is None:
                return _split(before, after, parts)
            dimension = found
    return dimension


def _one(
    node: Node, before: Sequence[int], dimension: int | None, parts: int
) -> tuple[tuple[int, ...] | None, int | None] | str:
    if node.name == "transpose":
        permutation = tuple(node.params["permutation"])
        return permutation, None if dimension is None else permutation.index(dimension)
    if node.name not in SHAPES or dimension is None:
        return None, dimension
    after = node.outs[0].aval.shape
    found = through(before, after, dimension, parts)
    return _split(before, after, parts) if found is None else (None, found)


def _split(before: Sequence[int], after: Sequence[int], parts: int) -> str:
    return f"the reshape of {list(before)} to {list(after)} takes apart what one of {parts} ranks has"


def keeps_elements(node: Node) -> bool:
    """Whether a node of a chain only orders elements anew: no broadcast, and no reshape in another order."""
    if len(node.ins) != 1:
        return False
    before, after = node.ins[0].aval.shape, node.outs[0].aval.shape
    if node.name == "reshape":
        return node.params.get("dimensions") is None
    if node.name == "broadcast_in_dim":
        return math.prod(before) == math.prod(after)
    return True
