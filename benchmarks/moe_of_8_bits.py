"""Times of `moe` with weights of 8 bits beside the same layer of bf16, on GPUs that have experts of their own.

    python benchmarks/moe_of_8_bits.py                       # all shapes and kinds, one GPU
    python benchmarks/moe_of_8_bits.py --world 2 --shapes 4096,4096,14336,4,2 --kinds bf16 "e4m3 blocks"

A shape is as in `benchmarks/ragged_dot.py`: TOKENS,D,F,GROUPS,TOP_K, the tokens and the experts of a rank. Choices are
drawn evenly from the experts of all ranks. With peers a rank has room for 1.25 times the rows that are due to it.
Kinds are the dtype of the weights and what becomes of rows, before they travel (`quantize_rows`). Programs are the
layer as None chooses it ("default"), and by kernels ("fused"). Each calls the layer with several sets of weights, one
after the other, so that none is in the L2 cache; of few tokens again and again, in a loop, as models decode: XLA makes
its body a CUDA graph, and the host's launches cost nothing. Results are compared with the layer of bf16 of the same
weights: the error is the root mean square of the difference over that of the result, which is that of the quantisation.

`--lower` compiles the kernels for a GPU and runs nothing. It needs no GPU, and a run behind it finds them on the disk.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxtaxfree as jtf
from benchmarks.eight_bits import Clock, lower
from benchmarks.operation import repeated
from benchmarks.operations import OPERATIONS
from benchmarks.ragged_dot_of_8_bits import times
from jaxtaxfree.ops.shapes import GroupedShape

AXIS = "ep"
# The dtype of weights, the block of a scale of theirs as they lie, and `quantize_rows`.
KINDS: dict[str, tuple[str, tuple[int, int], str | None]] = {
    "bf16": ("bfloat16", (1, -1), None),
    "int8 weights": ("int8", (1, -1), None),
    "int8": ("int8", (1, -1), "row"),
    "e4m3": ("float8_e4m3fn", (1, -1), "row"),
    "e4m3 blocks": ("float8_e4m3fn", (128, 128), "block"),
}
PROGRAMS = ("default", "fused")
NAMES = ("w_gate", "w_up", "w_down")


def make(mesh: Mesh, shape: GroupedShape, kind: str, count: int) -> Any:
    """A program that makes tokens, their experts and weights, and so many sets of what `moe` takes of experts."""
    dtype, block, _ = KINDS[kind]

    def of_expert(key: jax.Array, rows: int, columns: int) -> Any:
        w = (jax.random.normal(key, (rows, columns)) / rows**0.5).astype(jnp.bfloat16)
        return (w, None) if dtype == "bfloat16" else jtf.quantize(w.T, dtype, block=block)

    def arrays() -> Any:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), lax.axis_index(AXIS)), 2 + 3 * count)
        x = jax.random.normal(keys[0], (shape.tokens, shape.d)).astype(jnp.bfloat16)
        logits = jax.random.normal(keys[1], (shape.tokens, shape.groups * mesh.size))
        experts, weights = jtf.routing.top_k(logits, shape.top_k)
        sets = []
        for i in range(count):
            found = {}
            for key, name in zip(keys[2 + 3 * i :], NAMES):
                size = (shape.f, shape.d) if name == "w_down" else (shape.d, shape.f)
                draw = functools.partial(of_expert, rows=size[0], columns=size[1])
                found[name], scale = lax.map(draw, jax.random.split(key, shape.groups))
                found |= {} if scale is None else {f"{name}_scale": scale}
            sets.append(found)
        return (x, experts, weights), sets

    return jax.jit(jax.shard_map(arrays, mesh=mesh, in_specs=(), out_specs=P(AXIS), check_vma=False))


def layers(mesh: Mesh, shape: GroupedShape, kind: str, implementation: str | None) -> Callable[..., Any]:
    """Of tokens and sets of weights: the results of each set."""
    how: dict[str, Any] = {"implementation": implementation}
    if mesh.size > 1:
        how["capacity"] = -(-shape.rows * 5 // 4 // 128) * 128
    if kind != "bf16":
        how |= {"weights_transposed": True, "quantize_rows": KINDS[kind][2]}

    def layer(tokens: Any, experts: Any) -> jax.Array:
        return jtf.moe(*tokens, **experts, axis_name=AXIS, **how)

    def local(tokens: Any, sets: Any) -> list[jax.Array]:
        return repeated(layer, [tokens] * len(sets), sets, calls_of(shape))

    return jax.shard_map(local, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)


def calls_of(shape: GroupedShape) -> int:
    """How often a program goes through its sets of weights."""
    return 32 if shape.tokens <= 256 else 1


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    operation = OPERATIONS["ragged_dot"]
    even = [shape for shape in operation.shapes if shape.routing == "even"]
    parser.add_argument("--shapes", nargs="+", type=operation.parse_shape, default=even)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--world", type=int, default=1, help="number of GPUs (default: %(default)s)")
    parser.add_argument("--sets", type=int, default=2, help="of weights")
    parser.add_argument("--rounds", type=int, default=5, help="of times (default: %(default)s; 0: none)")
    parser.add_argument("--lower", action="store_true", help="only compile")
    parser.add_argument("--json", metavar="PATH", help="where rows are appended")
    options = parser.parse_args(arguments)
    mesh = Mesh(np.array(jax.devices()[: options.world]), (AXIS,))
    clock = Clock(math.inf, options.json)

    for shape in options.shapes:
        programs: dict[str, Any] = {}
        wanted: Any = None
        for kind in options.kinds:
            maker = make(mesh, shape, kind, options.sets)
            arrays = jax.eval_shape(maker) if options.lower else maker()
            for how in options.programs:
                row = {"shape": shape.name, "world": mesh.size, "kind": kind, "program": how}
                try:
                    run = jax.jit(layers(mesh, shape, kind, "fused" if how == "fused" else None))
                    if options.lower:
                        clock.row(**row, kernels=lower(run, *arrays))
                        continue
                    found = np.asarray(run(*arrays)[0], np.float32)
                except Exception as fault:
                    clock.row(**row, fault=f"{type(fault).__name__}: {str(fault)[:300]}")
                    continue
                wanted = found if wanted is None else wanted
                clock.row(**row, error=float(np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2))))
                programs[f"{kind}: {how}"] = run, arrays
        if programs and options.rounds:
            for name, us in times(programs, options.rounds, options.sets * calls_of(shape)).items():
                kind, _, how = name.partition(": ")
                clock.row(shape=shape.name, world=mesh.size, kind=kind, program=how, us=round(us, 1))


if __name__ == "__main__":
    main()
