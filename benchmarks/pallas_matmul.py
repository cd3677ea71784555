"""JAX's own fused kernel: the collective matmul of Pallas for Hopper GPUs, as a peer of `all_gather_matmul`.

It sends by plain stores from GPU to GPU. Pallas has a reduce-scatter as well, but that one goes through NVLink
multicast, which is not to be had on every machine and not used here, and is not fused with a product.

A rank that is ahead writes into the next call's buffer of one that is behind, which XLA may have put where the call
before still reads: nothing makes the ranks meet. In long queues of calls results were seen to be wrong; then there is
no time.
"""

import itertools

import jax

from benchmarks.operation import AXIS, Config

# The choices that matter at the listed shapes; two warpgroups of 128 x 128, four stages, as large as fits.
CONFIGS: tuple[Config, ...] = tuple(
    {"wg_dimension": wg_dimension, "grid_minor_dim": grid_minor_dim, "grid_tile_width": grid_tile_width}
    for wg_dimension, grid_minor_dim, grid_tile_width in itertools.product("MN", "MN", (8, 16))
)


def all_gather_matmul(lhs: jax.Array, rhs: jax.Array, *, config: Config) -> jax.Array:
    """Raises NotImplementedError at shapes that its tiles do not divide, and where not all devices take part."""
    # Here, because the import takes seconds and brings JAX's test utilities.
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as pallas

    dimensions = {name: pallas.MatmulDimension[config[name]] for name in ("wg_dimension", "grid_minor_dim")}
    tuning = pallas.TuningConfig(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4, **config | dimensions)
    try:
        return pallas.all_gather_lhs_matmul(lhs, rhs, AXIS, config=tuning, dtype=lhs.dtype)
    except ValueError as error:
        raise NotImplementedError(str(error)) from error


def unavailable() -> str:
    """Why it cannot run here; empty if it can."""
    device = jax.devices()[0]
    if device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0":
        return ""
    return "it needs Hopper GPUs"
