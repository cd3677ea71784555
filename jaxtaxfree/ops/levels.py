"""The collectives and `matmul_all_reduce` of a team that spans hosts, in two levels (`jaxtaxfree.levels`).

With t ranks on each of d hosts, n = t * d, and arrays x of each rank:

| | inside of each host | across hosts, by XLA | inside |
|---|---|---|---|
| `psum`, `matmul_all_reduce` | a t-th of the sum to each rank | sum of that | gather |
| `all_gather` | | gather x | gather |
| `psum_scatter` | a t-th of the sum to each rank | a d-th of that sum to each | |

What leaves a host is what it has to send at least, since no two of its ranks send the same: (n - t) blocks of a rank in
a gather or a scatter, 2 (d - 1) / d of the array in a sum. In a ring through all ranks it is (n - 1), and
2 (n - 1) / n. The other way round, a gather would send what all ranks of a host have t times.

Blocks are in the order of the ranks, whichever axes count fastest.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtaxfree import levels
from jaxtaxfree.levels import Levels, Split
from jaxtaxfree.ops import matmul, matmul_all_reduce, matmul_reduce_scatter
from jaxtaxfree.ops.collectives import all_gather_p, psum_p, psum_scatter_p
from jaxtaxfree.ops.epilogue import NONE, Epilogue, wide_type
from jaxtaxfree.ops.matmul_all_reduce.common import EXACT_SIZE
from jaxtaxfree.ops.scaled import UNSCALED, Scaling, result_dtype


def crossing(dtype: Any, size: int) -> np.dtype:
    """In which dtype partial sums of an array of so many elements cross hosts.

    Few are f32: as few as `matmul_all_reduce` does not round inside of a host either, so that two levels are as exact
    as one. That is 32 KiB more at most, 0.7 us of a link of 400 Gbit/s, where latency decides. (Reasoned, not
    measured.)
    """
    dtype = np.dtype(dtype)
    return np.dtype(wide_type(dtype)) if size <= EXACT_SIZE and jnp.issubdtype(dtype, jnp.floating) else dtype


def _psum(x: Any, *, axes: tuple[str, ...], config: Any, split: Split, implementation: str | None) -> Levels:
    del axes
    wire = crossing(x.dtype, x.size)
    size = _padded(x.size, split.ranks)
    how = {"dimension": 0, "tiled": True, "axes": split.inside, "config": config}

    def function(x: jax.Array) -> jax.Array:
        flat = jnp.pad(x.reshape(-1).astype(wire), (0, size - x.size))
        part = psum_scatter_p.bind(flat, implementation=implementation, **how)
        total = lax.psum(part, split.across).astype(x.dtype)
        return all_gather_p.bind(total, implementation=implementation, **how)[: x.size].reshape(x.shape)

    first = (psum_scatter_p, [jax.ShapeDtypeStruct((size,), wire)], how)
    return _sum(function, first, split, size * wire.itemsize, x.size * x.dtype.itemsize)


def _all_gather(
    x: Any,
    *,
    axes: tuple[str, ...],
    dimension: int,
    tiled: bool,
    config: Any,
    split: Split,
    implementation: str | None,
) -> Levels:
    del axes
    how = {"dimension": 0, "tiled": False, "axes": split.inside, "config": config}

    def function(x: jax.Array) -> jax.Array:
        of_hosts = lax.all_gather(x, split.across)  # [hosts, ...]
        parts = all_gather_p.bind(of_hosts, implementation=implementation, **how)  # [ranks, hosts, ...]
        lengths = [split.lengths[i] for i in split.order]
        parts = jnp.transpose(parts.reshape(*lengths, *x.shape), [*np.argsort(split.order), *_after(lengths, x)])
        parts = jnp.moveaxis(parts.reshape(-1, *x.shape), 0, dimension)
        return parts.reshape(*x.shape[:dimension], -1, *x.shape[dimension + 1 :]) if tiled else parts

    first = (all_gather_p, [jax.ShapeDtypeStruct((split.hosts, *x.shape), x.dtype)], how)
    return _blocks(function, first, split, x.size * x.dtype.itemsize, x.size * x.dtype.itemsize)


def _psum_scatter(
    x: Any,
    *,
    axes: tuple[str, ...],
    dimension: int,
    tiled: bool,
    config: Any,
    split: Split,
    implementation: str | None,
) -> Levels:
    del axes
    world = split.ranks * split.hosts
    wire = crossing(x.dtype, x.size)
    how = {"dimension": 0, "tiled": False, "axes": split.inside, "config": config}
    block = [size // world if i == dimension else size for i, size in enumerate(x.shape)]  # of a rank

    def function(x: jax.Array) -> jax.Array:
        parts = x.reshape(*x.shape[:dimension], world, block[dimension], *x.shape[dimension + 1 :])
        parts = jnp.moveaxis(parts, dimension, 0).reshape(*split.lengths, *block)
        parts = jnp.transpose(parts, [*split.order, *_after(split.order, block)])
        parts = parts.reshape(split.ranks, split.hosts, *block).astype(wire)
        of_hosts = psum_scatter_p.bind(parts, implementation=implementation, **how)
        total = lax.psum_scatter(of_hosts, split.across).astype(x.dtype)
        return total if tiled else lax.squeeze(total, [dimension])

    first = (psum_scatter_p, [jax.ShapeDtypeStruct((split.ranks, split.hosts, *block), wire)], how)
    size = math.prod(block)
    return _blocks(function, first, split, size * wire.itemsize, size * x.dtype.itemsize)


def _matmul_all_reduce(
    lhs: Any,
    rhs: Any,
    *others: Any,
    axes: tuple[str, ...],
    precision: Any,
    preferred_element_type: Any,
    config: Any,
    split: Split,
    implementation: str | None,
    epilogue: Epilogue = NONE,
    rhs_transposed: bool = False,
    scaling: Scaling = UNSCALED,
) -> Levels:
    del axes
    m, n = math.prod(lhs.shape[:-1]), rhs.shape[0 if rhs_transposed else -1]
    rows = _padded(m, split.ranks)
    scales, _ = scaling.split(others)
    dtype = result_dtype(lhs, rhs, preferred_element_type) if scaling else np.dtype(preferred_element_type or lhs.dtype)
    wire = crossing(dtype, m * n)
    product: dict[str, Any] = {
        "axes": split.inside,
        "scatter_dimension": 0,
        "precision": precision,
        "preferred_element_type": preferred_element_type if wire == dtype else wire,
        "rhs_transposed": rhs_transposed,
        "config": config,
    }
    product |= {"scaling": scaling} if scaling else {}
    scatter_p = matmul_reduce_scatter.with_epilogue_p if scaling else matmul_reduce_scatter.matmul_reduce_scatter_p
    gather = {"dimension": 0, "tiled": True, "axes": split.inside, "config": config}

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x.reshape(m, -1), ((0, rows - m), (0, 0)))

    def function(lhs: jax.Array, rhs: jax.Array, *operands: jax.Array) -> jax.Array:
        scales, operands = scaling.split(operands)
        scales = {name: padded(x) if name == "lhs" and x.ndim else x for name, x in scales.items()}
        part = matmul.bind(scatter_p, padded(lhs), rhs, *scales.values(), implementation=implementation, **product)
        part = part[0] if scaling else part
        # What an epilogue takes is not rounded before it, if it has not been so far.
        total = lax.psum(part, split.across).astype(wire if epilogue else dtype)
        total = all_gather_p.bind(total, implementation=implementation, **gather)[:m].reshape(*lhs.shape[:-1], n)
        return epilogue.apply([total], epilogue.split(rhs, operands)[1], dtype) if epilogue else total

    first = (scatter_p, [jax.ShapeDtypeStruct((rows, lhs.shape[-1]), lhs.dtype), rhs, *scales.values()], product)
    return _sum(function, first, split, rows * n * wire.itemsize, m * n * dtype.itemsize)


def _with_epilogue(*operands: Any, **params: Any) -> Levels:
    found = _matmul_all_reduce(*operands, **params)
    return Levels(
        function=lambda *arrays: [found.function(*arrays)],
        first=found.first,
        leaving=found.leaving,
        flat=found.flat,
    )


def _sum(function: Any, first: Any, split: Split, crossing: int, flat: int) -> Levels:
    """Of an all-reduce; arrays of so many bytes are added up across hosts, and in one level."""
    world = split.ranks * split.hosts
    leaving = 2 * (split.hosts - 1) / split.hosts * crossing
    return Levels(function=function, first=first, leaving=leaving, flat=2 * (world - 1) / world * flat)


def _blocks(function: Any, first: Any, split: Split, crossing: int, flat: int) -> Levels:
    """Of a gather or a scatter, of blocks of so many bytes for each rank."""
    leaving = split.ranks * (split.hosts - 1) * crossing
    return Levels(function=function, first=first, leaving=leaving, flat=(split.ranks * split.hosts - 1) * flat)


def _padded(size: int, parts: int) -> int:
    return math.ceil(size / parts) * parts


def _after(leading: Sequence[Any], x: Any) -> range:
    """The dimensions of x behind these."""
    shape = getattr(x, "shape", x)
    return range(len(leading), len(leading) + len(shape))


levels.define(psum_p, _psum)
levels.define(all_gather_p, _all_gather)
levels.define(psum_scatter_p, _psum_scatter)
levels.define(matmul_all_reduce.matmul_all_reduce_p, _matmul_all_reduce)
levels.define(matmul_all_reduce.with_epilogue_p, _with_epilogue)
