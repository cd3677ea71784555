"""A training step with FSDP and tensor parallelism under `jax.jit`, on Auto axes: as it was, and with `jtf.einsum`.

Layers are scanned and rematerialised; the residual stream is sharded along the sequence.

    python examples/swaps/train_step.py
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf

X, H = P("data", "model"), P("data", None, "model")  # the residual stream [B, T, D], and between the products [B, T, F]
UP, DOWN = P("data", "model"), P("model", "data")  # weights [D, F] and [F, D]
LAYERS, B, T, D, F = 2, 4, 16, 32, 64


def original(x: jax.Array, w_up: jax.Array, w_down: jax.Array, einsum: Callable[..., jax.Array]) -> jax.Array:
    del einsum
    h = x @ w_up
    h = jax.lax.with_sharding_constraint(jax.nn.silu(h), H)
    y = h @ w_down
    return jax.lax.with_sharding_constraint(x + y, X)


def swapped(x: jax.Array, w_up: jax.Array, w_down: jax.Array, einsum: Callable[..., jax.Array]) -> jax.Array:
    del einsum
    h = jtf.einsum("btd,df->btf", x, w_up, in_shardings=(X, UP), out_sharding=H)
    h = jax.nn.silu(h)
    y = jtf.einsum("btf,fd->btd", h, w_down, in_shardings=(H, DOWN), out_sharding=X)
    return x + y
