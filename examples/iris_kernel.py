"""A kernel in Iris's words as a JAX operation: every rank stores its rows into all others', and waits for theirs.

    python examples/iris_kernel.py

It runs on two or more NVIDIA GPUs that reach each other's memory. Elsewhere the simulator runs the kernels of four
ranks on the CPU. The kernel would run under Iris as it is: `import iris` in place of `from jaxtaxfree import iris`.
"""

import sys

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import iris


@triton.jit
def all_gather_kernel(
    x_ptr, inbox_ptr, flags_ptr, out_ptr, heap_bases, rank, world: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0)
    element = block * BLOCK + tl.arange(0, BLOCK)
    mask = element < SIZE
    value = tl.load(x_ptr + element, mask=mask)
    for peer in range(world):
        iris.store(inbox_ptr + rank * SIZE + element, value, rank, peer, heap_bases, mask=mask)
    tl.debug_barrier()
    for peer in range(world):
        flag = flags_ptr + rank * tl.num_programs(0) + block
        iris.atomic_xchg(flag, 1, rank, peer, heap_bases, sem="release", scope="sys")
    for source in range(world):
        flag = flags_ptr + source * tl.num_programs(0) + block
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 1:
            pass
        value = tl.load(inbox_ptr + source * SIZE + element, mask=mask)
        tl.store(out_ptr + source * SIZE + element, value, mask=mask)


def all_gather(x: jax.Array, axis_name: str, implementation: str | None = None) -> jax.Array:
    """`lax.all_gather(x, axis_name)`. Inside `jax.shard_map`."""
    world, block = lax.axis_size(axis_name), 1024
    grid = triton.cdiv(x.size, block)
    return jtf.iris_call(
        all_gather_kernel,
        axis_name=axis_name,
        grid=grid,
        implementation=implementation,
        x_ptr=x,
        inbox_ptr=iris.symmetric((world, *x.shape), x.dtype),
        flags_ptr=iris.symmetric((world, grid), jnp.int32, fill=0),
        out_ptr=iris.Out((world, *x.shape), x.dtype),
        heap_bases=iris.BASES,
        rank=iris.RANK,
        world=iris.WORLD,
        SIZE=x.size,
        BLOCK=block,
    )


def main() -> int:
    jax.config.update("jax_num_cpu_devices", 4)  # virtual ones; GPUs come first all the same
    devices, implementation = jax.devices(), None
    if devices[0].platform != "gpu" or len(devices) < 2:
        devices, implementation = jax.devices("cpu"), "simulate"
        print(f"Fewer than two GPUs here, so the kernels of {len(devices)} ranks run in the simulator, on the CPU.")
    mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def ours_equals_xlas(x: jax.Array) -> jax.Array:
        return jnp.array_equal(all_gather(x, "x", implementation), lax.all_gather(x, "x"))[None]

    x = jax.device_put(jax.random.normal(jax.random.key(0), (len(devices) * 100, 33)), jax.NamedSharding(mesh, P("x")))
    equal = bool(jtf.block_until_ready(ours_equals_xlas(x)).all())
    print("All ranks have what lax.all_gather gives:", equal)
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
