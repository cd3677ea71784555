"""`dispatch` and the experts' first product in one launch, for Hopper. No GPU has run it, and nothing takes it.

It means what `dispatch` and `ragged_dot` with a gate mean. It has no derivative.
"""

import dataclasses
from typing import Any

import jax
from jax import lax

from jaxtaxfree.kernels.moe.dispatch_product import dispatch_product_kernel
from jaxtaxfree.ops.ragged_dot.hopper import ROWS, Config
from jaxtaxfree.shmem import shmem_call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """How the launch splits its work.

    Attributes:
      tile: as of `ragged_dot`, with 128 rows of a tile.
      early: of so many groups tiles of this rank's own rows come first.
      stages: in how many parts tokens cross, each with a signal.
    """

    tile: Config = dataclasses.field(default_factory=lambda: Config(group_m=8))
    early: int = 32
    stages: int = 2

    def keywords(
        self, tokens: int, choices: int, most: int, weights: tuple[int, ...], dtype: Any, world: int
    ) -> dict[str, Any]:
        """Of `shmem_call`; `weights` is the shape of those of this rank, [E, D, F]."""
        groups, d, f = weights
        block_n, block_k, programs = self.tile.block_n // 2, self.tile.block_k, self.tile.programs
        rows = ROWS.value
        nbytes = dtype.itemsize
        return {
            "name": "moe_dispatch_product",
            "grid": programs,
            "together": programs,  # all of them place rows that each of them multiplies
            "num_warps": 4,
            "out_type": [jax.ShapeDtypeStruct((most, n), dtype) for n in (f, d)],
            "descriptors": {
                "y_desc": (rows, block_k),
                "weights.rhs": (1, block_k, block_n),
                "weights.gate": (1, block_k, block_n),
                "out_desc": (1, 1, rows, min(128 // nbytes, block_n // 2)),
            },
            "scratch": {"inbox": jax.ShapeDtypeStruct((world, tokens, d), dtype)},
            "signals": {"arrived": (programs, world), "placed": 2},
            "cost_estimate": {
                "flops": 4 * most * d * f,
                "bytes_accessed": nbytes * (2 * groups * d * f + most * (2 * d + f)),
            },
            "M": most,
            "N": f,
            "K": d,
            "GROUPS": groups,
            "BLOCK_M": 2 * rows,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "GROUP_M": self.tile.group_m,
            "STAGES": self.tile.num_stages,
            "TOKENS": tokens,
            "CHOICES": choices,
            "SEND_STAGES": self.stages,
            "EARLY": self.early,
        }


def dispatch_product(
    y: jax.Array,
    places: jax.Array,
    ends: jax.Array,
    w_up: jax.Array,
    w_gate: jax.Array,
    most: int,
    axes: tuple[str, ...],
    *,
    activation: str = "silu",
    launch: Launch = Launch(),
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`act(rows @ w_gate) * (rows @ w_up)` by groups, of rows that `dispatch` brings; and these rows.

    Args:
      y: [T, D], of this rank, 16 bits.
      places: i32[world * T, k], the rows here of all tokens, a group's in the order of their ranks.
      ends: i32[world, E], how many rows of each group are of this rank's tokens or of a rank's before.
      w_up, w_gate: [E, D, F]; D and F multiples of 8.
      most: number of rows.

    Returns: ([most, F], [most, D]). Nothing is said of rows that no choice has.
    """
    tokens, choices = y.shape[0], places.shape[1]
    how = launch.keywords(tokens, choices, most, w_up.shape, y.dtype, lax.axis_size(axes))
    how |= {"axis_name": axes, "implementation": implementation, "ACTIVATION": activation}
    out, rows = shmem_call(dispatch_product_kernel, y, y, places, ends, {"rhs": w_up, "gate": w_gate}, **how)
    return out, rows
