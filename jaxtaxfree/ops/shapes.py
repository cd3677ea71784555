"""What a shape is at which an operation is tested, tuned and timed; `shapes.py` of each operation lists its own.

A class of shapes has `sizes`, the attributes by which people tell one from another, and `of`, which makes one of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Self


@dataclass(frozen=True, kw_only=True)
class MatmulShape:
    """One product [m, k] @ [k, n]. The sizes are those of the whole arrays, before they are sharded."""

    name: str
    m: int
    k: int
    n: int
    sizes: ClassVar[tuple[str, ...]] = ("m", "k", "n")

    @classmethod
    def of(cls, m: int, k: int, n: int) -> Self:
        """Named by its sizes."""
        return cls(name=f"{m}x{k}x{n}", m=m, k=k, n=n)

    def wire_bytes(self, world: int, itemsize: int = 2) -> int:
        """Bytes of lhs that each rank of an all-gather receives from its peers."""
        return self.m * self.k * itemsize * (world - 1) // world

    def scattered_bytes(self, world: int, itemsize: int = 2) -> int:
        """Bytes of the result that each rank of a reduce-scatter sends to its peers."""
        return self.m * self.n * itemsize * (world - 1) // world

    def flops(self, world: int) -> int:
        """Floating-point operations of one rank: [m, k] @ [k, n / world], or [m, k / world] @ [k / world, n]."""
        return 2 * self.m * self.k * self.n // world


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Attention of one new token over a cache that is sharded along the sequence.

    Attributes:
      b: sequences.
      s: keys of a sequence that each rank keeps, so that world * s are attended to.
      n: query heads.
      kv_heads: key/value heads, K in docstrings.
      h: head size of queries, keys and values.
    """

    name: str
    b: int
    s: int
    n: int
    kv_heads: int
    h: int
    sizes: ClassVar[tuple[str, ...]] = ("b", "s")

    @classmethod
    def of(cls, b: int, s: int, n: int = 64, kv_heads: int = 8, h: int = 128) -> Self:
        """Named by its sizes, with the heads of Llama 3 70B."""
        return cls(name=f"{b}x{s}x{n}x{kv_heads}x{h}", b=b, s=s, n=n, kv_heads=kv_heads, h=h)

    def kv_bytes(self, itemsize: int = 2) -> int:
        """Bytes of keys and values that one rank reads."""
        return 2 * self.b * self.s * self.kv_heads * self.h * itemsize


@dataclass(frozen=True, kw_only=True)
class CollectiveShape:
    """A collective of arrays of so many bytes a rank."""

    name: str
    nbytes: int
    sizes: ClassVar[tuple[str, ...]] = ("nbytes",)

    @classmethod
    def of(cls, nbytes: int) -> Self:
        """Named by its size."""
        return cls(name=f"{nbytes} B", nbytes=nbytes)


@dataclass(frozen=True, kw_only=True)
class RaggedShape:
    """Rows of d elements that each rank sends.

    Attributes:
      routing: "even": as many to each rank. "skewed": so that some ranks receive far more than others.
    """

    name: str
    rows: int
    d: int
    routing: str = "even"
    sizes: ClassVar[tuple[str, ...]] = ("rows", "d", "routing")

    @classmethod
    def of(cls, rows: int, d: int, routing: str = "even") -> Self:
        """Named by its sizes."""
        return cls(name=f"{rows}x{d}/{routing}", rows=rows, d=d, routing=routing)


@dataclass(frozen=True, kw_only=True)
class GroupedShape:
    """One product of the tokens that a rank's experts have, [tokens * top_k, d] by [groups, d, f].

    Attributes:
      tokens: of a rank; as many choices as they make come to it from all ranks.
      groups: experts of a rank.
      top_k: choices of a token.
      routing: "even": as many rows to each expert. "dirichlet": by a draw from Dirichlet(1).
    """

    name: str
    tokens: int
    d: int
    f: int
    groups: int
    top_k: int
    routing: str = "even"
    sizes: ClassVar[tuple[str, ...]] = ("tokens", "d", "f", "groups", "top_k", "routing")

    @classmethod
    def of(cls, tokens: int, d: int, f: int, groups: int, top_k: int, routing: str = "even") -> Self:
        """Named by its sizes."""
        name = f"{tokens}x{d}x{f}/{groups}x{top_k}/{routing}"
        return cls(name=name, tokens=tokens, d=d, f=f, groups=groups, top_k=top_k, routing=routing)

    @property
    def rows(self) -> int:
        """Of a rank."""
        return self.tokens * self.top_k

    def flops(self) -> int:
        """Floating-point operations of a rank."""
        return 2 * self.rows * self.d * self.f


@dataclass(frozen=True, kw_only=True)
class MoeShape:
    """A layer of experts, divided among ranks by experts.

    Attributes:
      tokens: of a rank.
      experts: of all ranks.
      top_k: choices of a token.
      routing: "even": all experts alike. "dirichlet": by a draw from Dirichlet(1).
    """

    name: str
    tokens: int
    d: int
    f: int
    experts: int
    top_k: int
    routing: str = "even"
    sizes: ClassVar[tuple[str, ...]] = ("tokens", "d", "f", "experts", "top_k", "routing")

    @classmethod
    def of(cls, tokens: int, d: int, f: int, experts: int, top_k: int, routing: str = "even") -> Self:
        """Named by its sizes."""
        name = f"{tokens}x{d}x{f}/{experts}x{top_k}/{routing}"
        return cls(name=name, tokens=tokens, d=d, f=f, experts=experts, top_k=top_k, routing=routing)

    def flops(self) -> int:
        """Floating-point operations of a rank, if all have as many rows."""
        return 6 * self.tokens * self.top_k * self.d * self.f

    def weight_bytes(self, world: int, itemsize: int = 2) -> int:
        """Of the experts of a rank."""
        return 3 * self.experts // world * self.d * self.f * itemsize


def evenly_and_unevenly[Shape: (GroupedShape, MoeShape)](shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """Each shape with experts chosen alike, and by a draw from Dirichlet(1)."""
    return tuple(
        replace(shape, name=shape.name + end, routing=routing)
        for shape in shapes
        for routing, end in (("even", ""), ("dirichlet", "/dirichlet"))
    )
