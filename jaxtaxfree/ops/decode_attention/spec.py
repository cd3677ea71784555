"""What a call of `decode_attention` means, apart from its operands."""

import dataclasses
from typing import Self

import numpy as np

from jaxtaxfree.ops.kv_cache import Placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """What a call means, apart from its operands.

    Attributes:
      placement: which positions a rank keeps.
      page_size: None if the cache is not paged.
      kv_heads: K.
      layout: of the cache, one of KV_LAYOUTS.
      scale: factor of the logits.
      window: number of positions before a token that it attends to; None for all.
      soft_cap: soft cap of the logits, or None.
      by_heads: whether each rank gets the result of its own heads only.
      dtype: dtype of the result.
    """

    placement: Placement
    page_size: int | None
    kv_heads: int
    layout: str
    scale: float
    window: int | None
    soft_cap: float | None
    by_heads: bool
    dtype: np.dtype

    @classmethod
    def usual(cls, *, slots: int, kv_heads: int, head_size: int, dtype: np.dtype) -> Self:
        """Of a call that leaves everything at its default, over `slots` positions a rank."""
        return cls(
            placement=Placement(stretch=slots, slots=slots),
            page_size=None,
            kv_heads=kv_heads,
            layout="BSKH",
            scale=head_size**-0.5,
            window=None,
            soft_cap=None,
            by_heads=False,
            dtype=dtype,
        )
