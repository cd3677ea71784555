"""What decides how a product by groups runs, for all of its kernels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtaxfree.ops.operand import Operand
from jaxtaxfree.target import Target

# Groups whose sizes a warp keeps in registers.
MOST_GROUPS = 511
# Behind the name of what has scales of blocks of 128.
BLOCKS = "_blocks"


def check_operands(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, rhs_transposed: bool) -> None:
    """Raises ValueError unless the operands fit together."""
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[2 if rhs_transposed else 1]:
        wanted = "[G, N, K]" if rhs_transposed else "[G, K, N]"
        raise ValueError(
            f"ragged_dot takes lhs [M, K] and rhs {wanted}, not {list(lhs.shape)} and {list(rhs.shape)}: reshape lhs "
            "if it has more dimensions."
        )
    if sizes.shape != rhs.shape[:1] or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(
            f"ragged_dot takes group_sizes as integers [{rhs.shape[0]}], one for each group of rhs, not "
            f"{sizes.dtype}{list(sizes.shape)}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A product of groups of rows.

    Attributes:
      m: rows of lhs, of all groups together.
      k, n: lengths of the other dimensions of the weights.
      groups: their number.
      operand: of lhs, and of the weights, unless these are `narrow`.
      narrow: of weights with fewer bits than lhs has, or None.
      scales: which of "lhs", "rhs" and "gate" have scales, of blocks "lhs_blocks" and so on. Operands of 8 bits are
        multiplied by kernels that take some.
      out_dtype: of the result.
      precision: Triton's name of it, of f32 operands.
      activation: a key of `epilogue.ACTIVATIONS`, or None.
      gated: there is a gate.
      rhs_transposed: rhs is [groups, n, k].
      fill: rows behind the last group are zeros; else nothing is said of them.
      of_weights: the result is the gradient of the weights, lhs^T @ rhs of each group, [groups, k, n].
      target: the GPU.
    """

    m: int
    k: int
    n: int
    groups: int
    operand: Operand
    narrow: Operand | None = None
    scales: tuple[str, ...] = ()
    out_dtype: np.dtype
    precision: str
    activation: str | None = None
    gated: bool = False
    rhs_transposed: bool = False
    fill: bool = True
    of_weights: bool = False
    target: Target

    @property
    def products(self) -> int:
        return 2 if self.gated else 1

    @property
    def weights(self) -> Operand:
        return self.narrow or self.operand

    @property
    def scaled(self) -> bool:
        return self.weights.bits == 8

    @property
    def by_blocks(self) -> bool:
        return any(name.endswith(BLOCKS) for name in self.scales)

    @property
    def rows_of_a_group(self) -> float:
        """On average."""
        return self.m / self.groups

    @property
    def out_type(self) -> jax.ShapeDtypeStruct:
        shape = (self.groups, self.k, self.n) if self.of_weights else (self.m, self.n)
        return jax.ShapeDtypeStruct(shape, self.out_dtype)

    @property
    def cost_estimate(self) -> dict[str, int]:
        rows, weights = self.m, self.groups * self.k * self.n
        nbytes = self.operand.nbytes(rows * self.k) + self.weights.nbytes(self.products * weights)
        return {
            "flops": 2 * rows * self.k * self.n * self.products,
            "bytes_accessed": nbytes + rows * self.n * self.out_dtype.itemsize,
        }

    def keywords(self, config: Any) -> dict[str, Any]:
        """What all kernels want to know of a call."""
        return {
            "name": "ragged_dot_weights" if self.of_weights else "ragged_dot",
            "axis_name": (),
            "out_type": self.out_type,
            "cost_estimate": self.cost_estimate,
            "M": self.m,
            "N": self.n,
            "K": self.k,
            "GROUPS": self.groups,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n // self.products,
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
        }
