"""Errors and times of `ragged_dot` with operands of 8 bits, beside ours of 16 bits and XLA's dense product, on a GPU.

    python benchmarks/ragged_dot_of_8_bits.py                       # all shapes and kinds
    python benchmarks/ragged_dot_of_8_bits.py --shapes 4096,4096,14336,4,2 --kinds e4m3 bf16 --json rows.jsonl

A shape is as in `benchmarks/ragged_dot.py`: TOKENS,D,F,GROUPS,TOP_K or with ROUTING. Weights are [G, N, K]. Kinds are
those of `KINDS`, programs:

* "kernel" is the kernel of the kind; "kernel {...}" has settings of its own (`--configs`, JSON).
* "cast" is what there was before it: operands become 16 bits in front of the kernel, and sums are scaled behind it.
  With scales of blocks, 1 x 128 of lhs and 128 x 128 of weights, operands become f32, are scaled, and
  are multiplied by the portable kernel (TF32).
* "dense" is XLA's product of groups of equal size: of bf16 batched, of e4m3 one for each group, as they are and without
  scales, because cuBLASLt has those of whole operands alone. The floor is as much, or where both operands have 8 bits
  and no product of them was timed half of that of bf16, or what it takes to read the weights.

With `--gated` there is a gate and SiLU, which is the first product of `moe`; "cast" has none. Weights of bf16 are then
[G, K, N], which its kernel takes with a gate.

Each program calls the operation with several sets of weights, one after the other, so that none is in the L2 cache.
Results are compared with f32 products of the dequantised operands. An error is the largest difference over the sum of
what is expected and the root mean square of all that is expected.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxtaxfree as jtf
from benchmarks.eight_bits import Clock
from benchmarks.operations import OPERATIONS
from benchmarks.ragged_dot import sizes_of
from jaxtaxfree.ops.shapes import GroupedShape

# Dtypes of lhs and of the weights.
KINDS = {
    "bf16": ("bfloat16", "bfloat16"),
    "e4m3": ("float8_e4m3fn", "float8_e4m3fn"),
    "e4m3 blocks": ("float8_e4m3fn", "float8_e4m3fn"),
    "int8": ("int8", "int8"),
    "int8 weights": ("bfloat16", "int8"),
    "e4m3 weights": ("bfloat16", "float8_e4m3fn"),
}
PROGRAMS = ("kernel", "cast", "dense")
MEMORY = 3.35e12  # bytes a second of an H100
TOLERANCE = 0.02


def of_kind(x: jax.Array, dtype: str, block: tuple[int, int]) -> tuple[jax.Array, jax.Array | None]:
    """Values, and a scale for each block if they have 8 bits."""
    return (x.astype(dtype), None) if dtype == "bfloat16" else jtf.quantize(x, dtype, block=block)


def blocks_of(kind: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of lhs and of the weights: rows, or those of DeepSeek-V3."""
    return ((1, 128), (128, 128)) if kind.endswith("blocks") else ((1, -1), (1, -1))


def make(shape: GroupedShape, kind: str, count: int, gated: bool) -> Any:
    """A program that makes lhs [M, K] and so many sets of rhs [G, N, K] and of a gate if any, each with its scales."""
    left, right = KINDS[kind]
    of_lhs, of_weights = blocks_of(kind)

    def of_group(key: jax.Array) -> Any:
        w = jax.random.normal(key, (shape.f, shape.d)) / shape.d**0.5
        return of_kind(w.T if gated and right == "bfloat16" else w, right, of_weights)

    def arrays() -> Any:
        keys = jax.random.split(jax.random.key(0), 1 + count * (1 + gated))
        x = of_kind(jax.random.normal(keys[0], (shape.rows, shape.d)), left, of_lhs)
        arrays = [lax.map(of_group, jax.random.split(key, shape.groups)) for key in keys[1:]]
        return x, [arrays[i::count] for i in range(count)]

    return jax.jit(arrays)


def calls(kind: str, how: str, config: Any, implementation: str) -> Callable[..., Any]:
    """Of lhs, sets of weights, and sizes: a result of each set."""

    def dense(x: jax.Array, w: jax.Array, gated: bool) -> Any:
        rows = x.reshape(w.shape[0], -1, x.shape[1])
        if kind == "bf16":
            return jnp.einsum("gmk,gkn->gmn" if gated else "gmk,gnk->gmn", rows, w).reshape(x.shape[0], -1)
        return [jnp.dot(left, right.T, preferred_element_type=jnp.bfloat16) for left, right in zip(rows, w)]

    def one(x: Any, weights: Any, sizes: jax.Array) -> Any:
        (x, x_scale), (w, w_scale), *gates = x, *weights
        if how == "dense":
            return [dense(x, each, len(weights) > 1) for each, _ in weights]
        given: dict[str, Any] = {"rhs_transposed": kind != "bf16" or not gates, "implementation": implementation}
        given |= {"gate": gates[0][0], "activation": "silu"} if gates else {}
        scales = {} if kind == "bf16" else {"lhs_scale": x_scale, "rhs_scale": w_scale}
        scales |= {"gate_scale": gates[0][1]} if gates and scales else {}
        if how == "cast" and kind.endswith("blocks"):
            return jtf.ragged_dot(x, w, sizes, config={"kernel": "portable"}, **scales, **given)
        if how == "cast":
            out = jtf.ragged_dot(
                x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), sizes, preferred_element_type=jnp.float32, **given
            )
            group = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=x.shape[0])
            out *= w_scale[..., 0][group]
            return (out if x_scale is None else out * x_scale).astype(jnp.bfloat16)
        return jtf.ragged_dot(x, w, sizes, config=config, **scales, **given)

    return lambda x, sets, sizes: [one(x, weights, sizes) for weights in sets]


def error_of(out: jax.Array, x: Any, weights: Any, sizes: jax.Array, lie: bool) -> jax.Array:
    """Args: lie: whether weights are [G, N, K]."""
    x, *weights = (
        values.astype(jnp.float32) if scale is None else jtf.dequantize(values, scale)
        for values, scale in (x, *weights)
    )
    row, ends = jnp.arange(x.shape[0])[:, None], jnp.cumsum(sizes)

    def with_group(i: Any, found: jax.Array) -> jax.Array:
        inside = (row >= ends[i] - sizes[i]) & (row < ends[i])
        product, *gate = (jnp.matmul(x, w[i].T if lie else w[i], precision="highest") for w in weights)
        return jnp.where(inside, jax.nn.silu(gate[0]) * product if gate else product, found)

    wanted = lax.fori_loop(0, sizes.shape[0], with_group, jnp.zeros(out.shape, jnp.float32))
    usual = jnp.sqrt(jnp.mean(jnp.square(wanted)))
    return jnp.max(jnp.abs(out.astype(jnp.float32) - wanted) / (usual + jnp.abs(wanted)))


def floor_us(shape: GroupedShape, kind: str, dense: dict[str, float], products: int) -> float:
    """The larger of the product, by XLA's of bf16 or of e4m3, and the bytes of weights."""
    left, right = (jnp.dtype(dtype).itemsize for dtype in KINDS[kind])
    product = dense.get("bf16", 0.0)
    if left == 1:
        product = dense.get("e4m3", product / 2)
    return max(product, products * shape.groups * shape.d * shape.f * right / MEMORY * 1e6)


def times(programs: dict[str, Any], rounds: int, count: int) -> dict[str, float]:
    """Medians of microseconds of a call, the programs in turns."""
    found: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, (run, arrays) in programs.items():
            jax.block_until_ready(run(*arrays))
            start = time.perf_counter()
            for _ in range(9):
                run(*arrays)
            jax.block_until_ready(run(*arrays))
            found[name].append((time.perf_counter() - start) / (10 * count) * 1e6)
    return {name: float(np.median(samples)) for name, samples in found.items()}


def program_names(kind: str, shape: GroupedShape, configs: Sequence[str], gated: bool) -> list[tuple[str, Any]]:
    """The programs of a kind, and their settings."""
    found: list[tuple[str, Any]] = [("kernel", None if kind == "bf16" else {"kernel": "hopper"})]
    if kind in ("bf16", "e4m3") and shape.routing == "even":
        found.append(("dense", None))
    if kind != "bf16":
        found += [] if gated else [("cast", None)]
        found += [(f"kernel {each}", {"kernel": "hopper"} | json.loads(each)) for each in configs]
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    operation = OPERATIONS["ragged_dot"]
    parser.add_argument("--shapes", nargs="+", type=operation.parse_shape, default=list(operation.shapes))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--configs", nargs="+", default=[], help="JSON, of programs beside that by shape")
    parser.add_argument("--gated", action="store_true", help="with a gate and SiLU")
    parser.add_argument("--sets", type=int, default=4, help="of weights")
    parser.add_argument("--rounds", type=int, default=5, help="of times (default: %(default)s; 0: none)")
    parser.add_argument("--budget", type=float, default=600, help="seconds (default: %(default)s)")
    parser.add_argument("--json", metavar="PATH", help="where rows are appended")
    parser.add_argument("--implementation", default="fused", choices=("fused", "xla"))
    options = parser.parse_args(arguments)
    clock = Clock(options.budget, options.json)

    for shape in options.shapes:
        if clock.over:
            break
        count = min(options.sets, max(1, int(8e9 // (2 * shape.groups * shape.d * shape.f * (1 + options.gated)))))
        sizes = jnp.asarray(sizes_of(shape))
        programs: dict[str, Any] = {}
        for kind in options.kinds:
            x, sets = make(shape, kind, count, options.gated)()
            for how, config in program_names(kind, shape, options.configs, options.gated):
                if how.split()[0] not in options.programs:
                    continue
                left, right = KINDS[kind]
                row = {
                    "shape": shape.name,
                    "lhs_dtype": left,
                    "rhs_dtype": right,
                    "program": how,
                    "gated": options.gated,
                }
                lie = kind != "bf16" or not options.gated
                rows = "blocks" if kind.endswith("blocks") else "rows" if left == right else "rows of rhs"
                row["scales"] = "none" if kind == "bf16" else rows
                try:
                    run = jax.jit(calls(kind, how, config, options.implementation))
                    outs = run(x, sets, sizes)
                    error = (
                        float(jax.jit(error_of, static_argnums=4)(outs[-1], x, sets[-1], sizes, lie))
                        if how != "dense"
                        else 0.0
                    )
                    clock.row(**row, error=error, ok=error < TOLERANCE)
                except Exception as fault:
                    clock.row(**row, fault=f"{type(fault).__name__}: {str(fault)[:300]}")
                    continue
                programs[f"{kind}: {how}"] = run, (x, sets, sizes)
        if not options.rounds or clock.over:
            continue
        medians = times(programs, options.rounds, count)
        dense = {name.partition(":")[0]: us for name, us in medians.items() if name.endswith(": dense")}
        for name, us in medians.items():
            kind, _, how = name.partition(": ")
            floor = floor_us(shape, kind, dense, 1 + options.gated)
            clock.row(
                shape=shape.name, kind=kind, program=how, gated=options.gated, us=round(us, 1), floor=round(floor, 1)
            )


if __name__ == "__main__":
    main()
