"""The product by groups of tokamax (openxla) for Hopper GPUs, as a peer of `ragged_dot` and its gradients.

tokamax's own autotuner goes through 384 configurations, all with tiles of 64 columns, and takes minutes for each shape.
Here the fastest is taken of those that matter at the listed shapes, and of the same with 128 columns. So what is timed
is at least as fast as what its heuristics choose, tiles of 64 x 64.
"""

import importlib.util
import itertools
from typing import Any

import jax

from benchmarks.operation import Config

# Rows, columns and K of a tile, and steps in flight: as many as shared memory holds.
TILES = ((128, 64, 128, 4), (128, 128, 64, 4), (64, 64, 128, 4), (128, 64, 256, 2))
CONFIGS: tuple[Config, ...] = tuple(
    dict(zip(("block_m", "block_n", "block_k", "num_stages"), tile))
    | {"persistent": persistent, "grid_minor_dim": grid_minor_dim, "grid_tile_width": grid_tile_width}
    for tile, persistent, grid_minor_dim, grid_tile_width in itertools.product(TILES, (False, True), "MN", (1, 8))
)


def ragged_dot(lhs: jax.Array, y: Any, *, config: Config) -> jax.Array:
    """Raises NotImplementedError where its kernel does."""
    rhs, sizes = y
    return _product(lhs, rhs, sizes, config, "DEFAULT_RAGGED_DOT")


def lhs_gradient(ct: jax.Array, y: Any, *, config: Config) -> jax.Array:
    """As its backward pass has it, with a configuration: XLA transposes rhs before its kernel."""
    rhs, sizes = y
    return _product(ct, rhs, sizes, config, "TRANS_RHS_RAGGED_DOT")


def rhs_gradient(ct: jax.Array, y: Any, *, config: Config) -> jax.Array:
    """Likewise: XLA transposes lhs before its kernel, in which no configuration is persistent."""
    lhs, sizes = y
    return _product(lhs, ct, sizes, config, "RAGGED_CONTRACTING_DOT")


def _product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, config: Config, dimensions: str) -> jax.Array:
    from tokamax._src.ops.ragged_dot import base, pallas_mosaic_gpu, pallas_mosaic_gpu_common

    minor = pallas_mosaic_gpu_common.MatmulDimension[config["grid_minor_dim"]]
    tuned = pallas_mosaic_gpu_common.Config(**config | {"split_k": 1, "grid_minor_dim": minor})
    numbers = getattr(base, f"{dimensions}_DIM_NUMS")
    product = pallas_mosaic_gpu.PallasMosaicGpuRaggedDot(config=tuned)
    return product(lhs, rhs, group_sizes=sizes, ragged_dot_dimension_numbers=numbers)


def unavailable() -> str:
    """Why it cannot run here; empty if it can."""
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed"
    device = jax.devices()[0]
    if device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0":
        return ""
    return "it needs Hopper GPUs"
