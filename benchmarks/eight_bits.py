"""Times of the three products with operands of 8 bits, beside XLA's and beside ours of 16 bits.

    python benchmarks/eight_bits.py                          # 8192 x 8192 x 8192 over all GPUs
    python benchmarks/eight_bits.py --shapes 2048,8192,28672 --operations matmul_all_reduce

A shape is M, K, N of the whole product; weights are [N, K]. Every rank quantises its own parts. Calls are queued one
behind the other; a time is the median over rounds of 20 calls. What is printed as an error is the largest difference
from XLA's result, over its largest element.
"""

import argparse
import concurrent.futures
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxtaxfree as jtf
from benchmarks import timing

AXIS = "tp"
ROWS, COLUMNS = P(AXIS), P(None, AXIS)
# Of lhs, of rhs and of the result.
SPECS = {
    "all_gather_matmul": (ROWS, ROWS, COLUMNS),
    "matmul_reduce_scatter": (COLUMNS, COLUMNS, ROWS),
    "matmul_all_reduce": (COLUMNS, COLUMNS, P()),
}
# A dtype, and what of lhs and rhs has one scale.
KINDS: dict[str, tuple[str, Any, Any]] = {
    "bfloat16": ("bfloat16", None, None),
    "e4m3 rows": ("float8_e4m3fn", (1, -1), (1, -1)),
    "e4m3 blocks": ("float8_e4m3fn", (1, 128), (128, 128)),
    "int8 rows": ("int8", (1, -1), (1, -1)),
}


def operand(mesh: Mesh, key: int, shape: tuple[int, int], spec: P, dtype: str, block: Any) -> tuple[jax.Array, ...]:
    """An array, and if it has 8 bits its scales; each rank draws its own part."""
    parts = [size // (mesh.size if axis else 1) for size, axis in zip(shape, (*spec, None))]

    def local() -> tuple[jax.Array, ...]:
        own = jax.random.fold_in(jax.random.key(key), jax.lax.axis_index(AXIS))
        x = jax.random.normal(own, parts)
        return (x.astype(dtype),) if block is None else jtf.quantize(x, dtype, block=block)

    count = 1 if block is None else 2
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=(spec,) * count, check_vma=False))()


def program(mesh: Mesh, operation: str, scaled: bool, implementation: str) -> Any:
    lhs, rhs, out = SPECS[operation]

    def local(x: tuple[jax.Array, ...], w: tuple[jax.Array, ...]) -> jax.Array:
        scales = {"lhs_scale": x[1], "rhs_scale": w[1]} if scaled else {}
        call = getattr(jtf, operation)
        return call(x[0], w[0], AXIS, rhs_transposed=True, implementation=implementation, **scales)

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(lhs, rhs), out_specs=out, check_vma=False))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["8192,8192,8192"], metavar="M,K,N")
    parser.add_argument("--operations", nargs="+", default=list(SPECS), choices=list(SPECS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--implementations", nargs="+", default=["xla", "fused"], choices=["xla", "fused", "simulate"])
    parser.add_argument("--world", type=int, help="number of devices (default: all)")
    parser.add_argument("--seconds", type=float, default=0.4, help="of each time (default: %(default)s)")
    options = parser.parse_args(arguments)
    mesh = Mesh(np.array(jax.devices()[: options.world]), (AXIS,))
    print(f"{mesh.size} x {jax.devices()[0].device_kind}, JAX {jax.__version__}", flush=True)
    for shape in options.shapes:
        m, k, n = map(int, shape.split(","))
        for operation in options.operations:
            lhs, rhs, _ = SPECS[operation]
            for kind in options.kinds:
                dtype, *blocks = KINDS[kind]
                operands = (
                    operand(mesh, 0, (m, k), lhs, dtype, blocks[0]),
                    operand(mesh, 1, (n, k), rhs, dtype, blocks[1]),
                )
                lowered = {
                    name: program(mesh, operation, blocks[0] is not None, name).lower(*operands)
                    for name in options.implementations
                }
                with concurrent.futures.ThreadPoolExecutor() as pool:
                    runs = dict(zip(lowered, pool.map(lambda each: each.compile(), lowered.values()), strict=True))
                outs = [jtf.block_until_ready(run(*operands)).astype(jnp.float32) for run in runs.values()]
                errors = [float(jnp.max(jnp.abs(out - outs[0])) / jnp.max(jnp.abs(outs[0]))) for out in outs]
                times = [
                    f"{name} {timing.queued_us(run, operands, options.seconds):.0f} us (error {error:.1e})"
                    for (name, run), error in zip(runs.items(), errors, strict=True)
                ]
                print(f"{operation} {shape} {kind}: {', '.join(times)}", flush=True)


if __name__ == "__main__":
    main()
