"""Iris's kernels beside our operations and XLA's, each through `jaxtaxfree.iris_call` in the same run.

JAXTAXFREE_IRIS_EXAMPLES=/path/to/iris python benchmarks/iris.py [op ...] [what benchmarks/run.py takes]

Operations: all_gather_matmul_columns (Iris's example 14, pull and push, and `iris.ops.all_gather_matmul_hbm_buffer`),
decode_attention (example 13) and psum (example 16). The kernels are Iris's; how they are called is in iris_kernels.py.
Of each kernel some settings are tried, and the fastest is timed: Iris's own are for another GPU.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from benchmarks import iris_kernels, operations, run
from benchmarks.attention import REFERENCE as ATTENTION
from benchmarks.attention import DecodeAttention
from benchmarks.collectives import Psum
from benchmarks.columns import GATHER_REFERENCE, AllGatherMatmulColumns
from benchmarks.operation import AXIS, Config, Implementation
from jaxtaxfree.iris import home_of_iris

_BLOCKS = (
    {"blocks": (128, 128, 64), "num_warps": 4, "num_stages": 4},
    {"blocks": (128, 128, 64), "num_warps": 8, "num_stages": 3},
    {"blocks": (128, 256, 64), "num_warps": 8, "num_stages": 3},
)
_FETCHED = tuple({**each, "fetchers": count} for each in _BLOCKS[1:] for count in (16, 32))


def _gather(function: Any, x: jax.Array, y: jax.Array, *, config: Config, own: bool = True) -> jax.Array:
    return function(x, y, AXIS, own=own, **config)


def _attention(x: jax.Array, y: Any, *, config: Config, own: bool = True) -> jax.Array:
    key, value, *_ = y
    lengths = jnp.full((jax.lax.axis_size(AXIS), key.shape[0]), key.shape[1], jnp.int32)  # caches are full
    return iris_kernels.flash_decode(x, key, value, lengths, AXIS, own=own, **config)


def _ring(x: jax.Array, y: Any, *, config: Config, own: bool = True) -> jax.Array:
    del y
    return iris_kernels.ring_all_reduce(x.reshape(-1, 64), AXIS, own=own, **config).reshape(x.shape)


class Gather(AllGatherMatmulColumns):
    peers = ("xla", "iris")

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        functions = {
            "pull": (iris_kernels.gather_matmul_pull, _BLOCKS),
            "push": (iris_kernels.gather_matmul_push, _BLOCKS),
            "hbm_buffer": (iris_kernels.gather_matmul_hbm, _FETCHED),
        }
        iris = {
            f"iris/{name}{suffix}": replace(
                GATHER_REFERENCE,
                name=f"iris/{name}{suffix}",
                call=partial(_gather, function, own=own),
                alternatives=alternatives,
            )
            for name, (function, alternatives) in functions.items()
            for suffix, own in (("", True), ("-own-functions", False))
        }
        return super().implementations(configs) | iris


class Attention(DecodeAttention):
    peers = ("xla", "local+gather", "iris")

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        alternatives = tuple({"splits": splits, "block": block} for splits in (16, 32, 64) for block in (64, 128))
        iris = replace(ATTENTION, name="iris/flash_decode", call=_attention, alternatives=alternatives)
        return super().implementations(configs) | {iris.name: iris}


class AllReduce(Psum):
    peers = ("xla", "iris")

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        known = super().implementations(configs)
        alternatives = tuple({"blocks": (rows, 64), "programs": 128} for rows in (16, 64))
        iris = replace(known["fused"], name="iris/ring", call=_ring, alternatives=alternatives)
        return known | {iris.name: iris}


OPERATIONS = {each.name: each for each in (Gather(), Attention(), AllReduce())}


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if iris_kernels.checkout() is None or home_of_iris() is None:
        raise SystemExit("JAXTAXFREE_IRIS_EXAMPLES names no checkout of Iris, or its package is not installed.")
    operations.OPERATIONS.update(OPERATIONS)
    named = any(each in OPERATIONS for each in argv)
    return run.main(argv if named else [*OPERATIONS, *argv])


if __name__ == "__main__":
    sys.exit(main())
