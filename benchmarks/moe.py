"""Times of a whole layer of experts on several GPUs, beside its products alone.

    python benchmarks/moe.py                                  # expert parallel over all GPUs, at the shapes of SHAPES
    python benchmarks/moe.py --shapes 4096,2048,768,128,8 --capacity 1.25 --implementations fused xla

A shape is the tokens of a rank, D, F, the experts of all ranks and the choices of a token, in bf16. Routing is random.
"dense" is the three products as XLA's batched ones, in groups of equal size. Calls are queued one behind the other; a
time is the median over rounds of 20 calls. Every program is compiled before the first one is timed, and each result is
compared with that of `implementation="xla"` where that one is asked for.
"""

import argparse
import concurrent.futures
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxtaxfree as jtf
from benchmarks import timing

AXIS = "ep"
RANKS = P(AXIS)
# Qwen3-30B-A3B with many tokens, and as it decodes.
SHAPES = ("4096,2048,768,128,8", "32,2048,768,128,8")

type Shape = tuple[int, int, int, int, int]


def operands(mesh: Mesh, shape: Shape) -> tuple[jax.Array, ...]:
    """x, experts, weights, w_gate, w_up and w_down of all ranks."""
    tokens, d, f, experts, choices = shape
    keys = jax.random.split(jax.random.key(0), 6)
    rows = tokens * mesh.size

    def put(make: Callable[[], jax.Array]) -> jax.Array:
        return jax.jit(make, out_shardings=NamedSharding(mesh, RANKS))()

    def normal(key: int, *sizes: int) -> jax.Array:
        return put(lambda: jax.random.normal(keys[key], sizes, jnp.bfloat16) * sizes[-2] ** -0.5)

    def chosen() -> jax.Array:
        return lax.top_k(jax.random.normal(keys[1], (rows, experts)), choices)[1].astype(jnp.int32)

    weights = put(lambda: jax.nn.softmax(jax.random.normal(keys[2], (rows, choices))))
    w_gate, w_up, w_down = (normal(3, experts, d, f), normal(4, experts, d, f), normal(5, experts, f, d))
    return normal(0, rows, d) * rows**0.5, put(chosen), weights, w_gate, w_up, w_down


def layer(mesh: Mesh, implementation: str, capacity: int | None) -> Any:
    """The whole layer."""

    def local(
        x: jax.Array, experts: jax.Array, weights: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array
    ) -> jax.Array:
        how = {"capacity": capacity, "implementation": implementation}
        return jtf.moe(x, experts, weights, w_gate, w_up, w_down, AXIS, **how)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(RANKS,) * 6, out_specs=RANKS, check_vma=False))


def dense(mesh: Mesh, shape: Shape) -> Any:
    """The products of a rank, of as many rows in groups of equal size."""
    tokens, d, _, experts, choices = shape
    rows = max(1, tokens * choices * mesh.size // experts)

    def local(x: jax.Array, _: jax.Array, __: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> Any:
        x = jnp.broadcast_to(x[:1], (w_gate.shape[0], rows, d))
        hidden = jax.nn.silu(jnp.einsum("emd,edf->emf", x, w_gate)) * jnp.einsum("emd,edf->emf", x, w_up)
        return jnp.einsum("emf,efd->emd", hidden, w_down)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(RANKS,) * 6, out_specs=RANKS, check_vma=False))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="T,D,F,E,K")
    parser.add_argument("--world", type=int, help="number of devices (default: all)")
    parser.add_argument("--capacity", type=float, help="rows that a rank takes, of those of even routing; else all")
    parser.add_argument("--implementations", nargs="+", default=["fused"], choices=["fused", "xla"])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each time (default: %(default)s)")
    options = parser.parse_args(arguments)
    mesh = Mesh(np.array(jax.devices()[: options.world]), (AXIS,))
    print(f"{mesh.size} x {jax.devices()[0].device_kind}, JAX {jax.__version__}", flush=True)
    for text in options.shapes:
        tokens, d, f, experts, choices = map(int, text.split(","))
        shape = (tokens, d, f, experts, choices)
        arrays = operands(mesh, shape)
        capacity = int(options.capacity * tokens * choices) if options.capacity else None
        programs = {name: layer(mesh, name, capacity) for name in options.implementations}
        programs["dense"] = dense(mesh, shape)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            lowered = {name: program.lower(*arrays) for name, program in programs.items()}
            compiled = dict(zip(lowered, pool.map(lambda each: each.compile(), lowered.values()), strict=True))
        line = [f"{name} {timing.queued_us(run, arrays, options.seconds):.0f} us" for name, run in compiled.items()]
        if {"fused", "xla"} <= compiled.keys():
            ours, wanted = (compiled[name](*arrays).astype(jnp.float32) for name in ("fused", "xla"))
            apart = jnp.max(jnp.abs(jtf.block_until_ready(ours) - wanted)) / jnp.max(jnp.abs(wanted))
            line.append(f"results apart by {float(apart):.1e}")
        print(f"{text}: {', '.join(line)}", flush=True)


if __name__ == "__main__":
    main()
