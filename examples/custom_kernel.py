"""A kernel of your own: a one-shot all-gather, in which every rank writes its block straight into its peers' memory.

    python examples/custom_kernel.py

It runs on two or more NVIDIA GPUs that reach each other's memory. Elsewhere the simulator runs the kernels of four
ranks on the CPU, and draws what every program did: custom_kernel.png.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import simulator
from jaxtaxfree.kernels import shmem

PICTURE = Path("custom_kernel.png")


@triton.jit
def all_gather_kernel(
    x_ptr, team, inbox, arrived, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, WORLD: tl.constexpr
):
    me = shmem.start(team)
    block = tl.program_id(0)  # each program moves one block, to and from every rank
    element = block * BLOCK + tl.arange(0, BLOCK)
    mask = element < SIZE
    inbox_ptr = shmem.scratch(me, inbox, x_ptr.dtype.element_ty)  # [WORLD, SIZE]: a row for each sender
    value = tl.load(x_ptr + element, mask=mask)
    for i in range(WORLD):
        shmem.store(me, inbox_ptr + me.rank * SIZE + element, value, (me.rank + i) % WORLD, mask)
    for i in range(WORLD):
        shmem.signal(me, arrived + me.rank * tl.num_programs(0) + block, (me.rank + i) % WORLD)
    for source in range(WORLD):
        ready = shmem.wait(me, arrived + source * tl.num_programs(0) + block, me.epoch, source)
        value = tl.load(inbox_ptr + source * SIZE + element, mask=mask)
        tl.store(out_ptr + source * SIZE + element, tl.where(ready, value, float("nan")), mask=mask)
    shmem.finish(me)


def all_gather(x: jax.Array, axis_name: str, implementation: str | None = None) -> jax.Array:
    """`lax.all_gather(x, axis_name)` for floating-point x. Inside `jax.shard_map`."""
    world, block = lax.axis_size(axis_name), 1024
    grid = triton.cdiv(x.size, block)
    everybodys = jax.ShapeDtypeStruct((world, *x.shape), x.dtype)
    return jtf.shmem_call(
        all_gather_kernel,
        x,
        axis_name=axis_name,
        out_type=everybodys,
        grid=grid,
        scratch={"inbox": everybodys},
        signals={"arrived": (world, grid)},
        implementation=implementation,
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

    x = jax.device_put(jax.random.normal(jax.random.key(0), (len(devices) * 100, 77)), jax.NamedSharding(mesh, P("x")))
    with simulator.simulating() as recording:
        equal = bool(jtf.block_until_ready(ours_equals_xlas(x)).all())
    print("All ranks have what lax.all_gather gives:", equal)
    for trace in recording.traces:
        trace.save_png(PICTURE)
        print(f"What every program did, step by step, is drawn in\n{PICTURE.resolve()}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
