"""An operand of a product as the kernels find it in memory: what follows from its dtype and its layout."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np

# One factor for all elements; for each row (of lhs) or column (of rhs); for each block of them.
Scales = Literal["none", "tensor", "row", "block"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
    """The type of lhs or rhs.

    Attributes:
      dtype: of its elements.
      transposed: it is rhs as [N, K], not [K, N].
      scales: by what its elements are multiplied. Kernels for many rows on Hopper take any, the others "none" alone.
    """

    dtype: np.dtype
    transposed: bool = False
    scales: Scales = "none"

    @property
    def bits(self) -> int:
        """Of an element. NumPy counts whole bytes of what has fewer."""
        kind = jnp.finfo if jnp.issubdtype(self.dtype, jnp.floating) else jnp.iinfo
        return kind(self.dtype).bits

    def nbytes(self, elements: int) -> int:
        """Of so many elements."""
        return -(-elements * self.bits // 8)

    def elements(self, nbytes: int) -> int:
        """How many elements so many bytes hold."""
        return nbytes * 8 // self.bits

    @property
    def wire(self) -> np.dtype:
        """In which dtype partial sums travel that are rounded on their way: that of the operand, of 16 bits or more."""
        return self.dtype if self.bits >= 16 else np.dtype(jnp.bfloat16)
