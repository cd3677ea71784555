"""Times of products of few rows, as in a decode step, by weights [N, K] of 16 and of 8 bits.

    python benchmarks/few_rows.py                                        # 1, 16 and 128 rows over all GPUs
    python benchmarks/few_rows.py --shapes 28672,8192 --rows 16 --out rows.json

A shape is K, N of the whole product. Weights are as many different matrices as do not fit into the L2 cache. A program
multiplies by all of them in turns, at least `--calls` times, so that the launch of the program is not what is measured:
a time is that of one product. What is printed as an error is the largest difference from XLA's result with the same
operands, over its largest element. A row of JSON is written as soon as it is measured. `--profile` adds what the
profiler says of each kernel of device 0: how often a product runs it, and the median of its microseconds.
"""

import argparse
import concurrent.futures
import json
import sys
import time
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
from benchmarks import timing
from benchmarks.eight_bits import COLUMNS, ROWS
from benchmarks.eight_bits import SPECS as ALL_SPECS
from benchmarks.operation import AXIS, GRAPH, NCCL_SYMMETRIC
from jaxtaxfree.taxes import profile

# Of lhs, of rhs [N, K] and of the result. "alone" is of columns, without peers: `all_gather_matmul` over no axis.
SPECS = {name: specs for name, specs in ALL_SPECS.items() if name != "gated"} | {"alone": (P(), ROWS, COLUMNS)}
# The dtypes of lhs and of rhs, and what of each has one scale.
KINDS: dict[str, tuple[str, str, Any, Any]] = {
    "bf16": ("bfloat16", "bfloat16", None, None),
    "int8 weights": ("bfloat16", "int8", None, (1, -1)),
    "e4m3 weights": ("bfloat16", "float8_e4m3fn", None, (1, -1)),
    "e4m3 weights, blocks": ("bfloat16", "float8_e4m3fn", None, (128, 128)),
    "int8": ("int8", "int8", (1, -1), (1, -1)),
    "e4m3": ("float8_e4m3fn", "float8_e4m3fn", (1, -1), (1, -1)),
    "e4m3, blocks": ("float8_e4m3fn", "float8_e4m3fn", (1, 128), (128, 128)),
}
# An implementation, settings of its kernel, and options of XLA.
HOW: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any]]] = {
    "xla": ("xla", None, {}),
    "xla, graph": ("xla", None, GRAPH | NCCL_SYMMETRIC),
    "few": ("fused", {"kernel": "few"}, {}),
    "hopper_few": ("fused", {"kernel": "hopper_few"}, {}),
    "hopper_few, graph": ("fused", {"kernel": "hopper_few"}, GRAPH),
    "hopper_few, 1 split": ("fused", {"kernel": "hopper_few", "splits": 1}, {}),
    "hopper_few, 4 splits": ("fused", {"kernel": "hopper_few", "splits": 4}, {}),
    "hopper_few, longer steps": ("fused", {"kernel": "hopper_few", "block_k": 128, "num_stages": 8}, {}),
    "hopper_few, half as deep": ("fused", {"kernel": "hopper_few", "num_stages": 8}, {}),
    "hopper_few, 4 warps": ("fused", {"kernel": "hopper_few", "block_n": 64, "num_warps": 4, "splits": 1}, {}),
    "hopper_few, 8 warps": ("fused", {"kernel": "hopper_few", "block_n": 128, "num_warps": 8, "splits": 2}, {}),
    "simulate": ("simulate", {"kernel": "hopper_few"}, {}),
}
L2 = 50 << 20


def operand(mesh: Mesh, key: int, shape: tuple[int, int], spec: P, dtype: str, block: Any) -> tuple[jax.Array, ...]:
    """An array, and if it has 8 bits its scales; each rank draws its own part."""
    parts = [size // (mesh.size if axis else 1) for size, axis in zip(shape, (*spec, None, None))]

    def local() -> tuple[jax.Array, ...]:
        own = jax.random.fold_in(jax.random.key(key), lax.axis_index(AXIS))
        x = jax.random.normal(own, parts)
        return (x.astype(dtype),) if block is None else jtf.quantize(x, dtype, block=block)

    count = 1 if block is None else 2
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=(spec,) * count, check_vma=False))()


def program(mesh: Mesh, operation: str, kind: str, how: str, turns: int = 1) -> Any:
    """(lhs, weights) -> the products of lhs by each of the weights, one after the other, `turns` times."""
    lhs, rhs, out = SPECS[operation]
    _, _, lhs_block, rhs_block = KINDS[kind]
    implementation, config, _ = HOW[how]

    def local(x: tuple[jax.Array, ...], weights: list[tuple[jax.Array, ...]]) -> list[jax.Array]:
        outs = []
        for w in weights * turns:
            scales = {} if lhs_block is None else {"lhs_scale": x[1]}
            scales |= {} if rhs_block is None else {"rhs_scale": w[1]}
            call: Any = getattr(jtf, "all_gather_matmul" if operation == "alone" else operation)
            axes = () if operation == "alone" else AXIS
            out = call(x[0], w[0], axes, rhs_transposed=True, implementation=implementation, config=config, **scales)
            x, out = lax.optimization_barrier((x, out))
            outs.append(out)
        return outs

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(lhs, rhs), out_specs=out, check_vma=False))


def compiled(program: Any, operands: tuple[Any, ...], how: str) -> Any:
    """The executable, or the error."""
    try:
        return program.lower(*operands).compile(compiler_options=HOW[how][2] or None)
    except Exception as error:  # of XLA, of Triton, or a refusal
        return error


def profiled(run: Any, operands: tuple[Any, ...], calls: int) -> dict[str, list[float]]:
    """Of each kernel that device 0 runs: how often a call runs it, and the median of its microseconds."""
    recording = profile.record(run, *operands, steps=5, bandwidth=1.0)
    found: dict[str, list[float]] = {}
    for kernel in recording.kernels:
        if kernel.device == 0:
            found.setdefault(kernel.name[:60], []).append((kernel.end_ns - kernel.start_ns) / 1000)
    count = recording.steps * calls
    return {name: [round(len(times) / count, 2), round(float(np.median(times)), 2)] for name, times in found.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["28672,8192", "14336,4096"], metavar="K,N")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 128])
    parser.add_argument("--operations", nargs="+", default=["matmul_all_reduce"], choices=list(SPECS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--how", nargs="+", default=["xla", "xla, graph", "hopper_few"], choices=list(HOW))
    parser.add_argument("--world", type=int, help="number of devices (default: all)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each time (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file of JSON rows, to which they are appended")
    parser.add_argument("--calls", type=int, default=1, help="products of a program at least (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="also times each kernel by the profiler")
    parser.add_argument("--copies", type=int, help="matrices of weights (default: as many as the L2 cache cannot hold)")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    mesh = Mesh(np.array(jax.devices()[: options.world]), (AXIS,))
    device = jax.devices()[0].device_kind
    print(f"{mesh.size} x {device}, JAX {jax.__version__}", flush=True)
    for shape in options.shapes:
        k, n = map(int, shape.split(","))
        copies = options.copies or max(1, -(-4 * L2 // (k * n // mesh.size)))
        turns = -(-options.calls // copies)
        for operation in options.operations:
            lhs, rhs, _ = SPECS[operation]
            weights = {
                kind: [operand(mesh, 1 + i, (n, k), rhs, *KINDS[kind][1::2]) for i in range(copies)]
                for kind in options.kinds
            }
            cases = [(m, kind, how) for m in options.rows for kind in options.kinds for how in options.how]
            rows = {
                (m, kind): operand(
                    mesh, 0, (m * (mesh.size if m == 1 and lhs == ROWS else 1), k), lhs, *KINDS[kind][::2]
                )
                for m, kind, _ in cases
            }
            with concurrent.futures.ThreadPoolExecutor() as pool:
                begun = {
                    (m, kind, how): pool.submit(
                        compiled, program(mesh, operation, kind, how, turns), (rows[m, kind], weights[kind]), how
                    )
                    for m, kind, how in cases
                }
                runs = {case: each.result() for case, each in begun.items()}
            print(f"{time.monotonic() - began:.0f} s: {operation} {shape} is compiled", flush=True)
            expected: dict[tuple[int, str], jax.Array] = {}
            for case, run in runs.items():
                m, kind, how = case
                row = {"operation": operation, "m": m, "k": k, "n": n, "world": mesh.size, "device": device}
                row |= {"kind": kind, "how": how, "copies": copies, "turns": turns, "jax": jax.__version__}
                if isinstance(run, Exception):
                    row |= {"failed": str(run)[:300]}
                else:
                    operands = rows[case[:2]], weights[kind]
                    found = jtf.block_until_ready(run(*operands))[-1].astype(jnp.float32)
                    wanted = expected.setdefault(case[:2], found)
                    row["error"] = float(jnp.max(jnp.abs(found - wanted)) / jnp.max(jnp.abs(wanted)))
                    row["us"] = round(timing.queued_us(run, operands, options.seconds, 10) / (copies * turns), 2)
                    if options.profile:
                        row["kernels"] = profiled(run, operands, copies * turns)
                print(f"{time.monotonic() - began:.0f} s: {json.dumps(row)}", flush=True)
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
