"""Trains a tensor-parallel layer with one process a GPU, on one host or on many.

By Slurm, where JAX finds out everything itself:

    srun --ntasks-per-node=8 --gpus-per-node=8 --gpu-bind=none python examples/processes.py

By a plain shell, with one process for each of this host's 4 GPUs:

    for i in 0 1 2 3; do python examples/processes.py localhost:9876 4 $i & done; wait

The mesh is ("data", "model") with "model" inside a host, so the kernels of "model" go through NVLink, and the gradients
are summed over "data" by XLA. The fused losses must be those of plain XLA.
"""

import sys

import jax

if len(sys.argv) > 1:
    address, count, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    jax.distributed.initialize(address, count, number, local_device_ids=[number])
else:
    jax.distributed.initialize()

# After `initialize`: the other processes see from now on whether this one lives.
import functools

import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf

ROWS, WIDTH, HIDDEN = 1024, 512, 2048
MOST_ON_MODEL = 8  # GPUs of a host, or fewer

model = min(MOST_ON_MODEL, jax.device_count())
mesh = jax.make_mesh((jax.device_count() // model, model), ("data", "model"))
SPECS = (P(("data", "model")), P(None, "model"), P("model"))  # of x [rows, width], up [width, hidden], down


def loss(up, down, x, implementation):
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=SPECS, out_specs=SPECS[0])
    def layer(x, up, down):
        hidden = jtf.all_gather_matmul(x, up, "model", activation=jax.nn.silu, implementation=implementation)
        return jtf.matmul_reduce_scatter(hidden, down, "model", residual=x, implementation=implementation)

    return jnp.mean(layer(x, up, down).astype(jnp.float32) ** 2)


@functools.partial(jax.jit, static_argnums=3)
def step(up, down, x, implementation):
    value, gradients = jax.value_and_grad(loss, (0, 1))(up, down, x, implementation)
    return *(w - (3 * g).astype(w.dtype) for w, g in zip((up, down), gradients)), value


@functools.partial(jax.jit, out_shardings=tuple(NamedSharding(mesh, spec) for spec in SPECS))
def begin(key):  # each process makes the parts of its own devices
    keys = jax.random.split(key, 3)
    shapes = (ROWS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    return tuple(
        jax.random.normal(key, shape, jnp.bfloat16) * scale for key, shape, scale in zip(keys, shapes, (1, 0.04, 0.02))
    )


def train(implementation):
    x, up, down = begin(jax.random.key(0))
    losses = []
    for _ in range(10):
        up, down, value = step(up, down, x, implementation)
        losses.append(float(jtf.block_until_ready(value)))
    return losses


found, wanted = train(None), train("xla")
if jax.process_index() == 0:
    print(f"{jax.process_count()} processes, {jax.device_count()} devices, mesh {dict(mesh.shape)}")
    print("loss", *(f"{value:.4f}" for value in found))
assert all(abs(a - b) < 0.01 * b for a, b in zip(found, wanted)), (found, wanted)
jax.distributed.shutdown()  # waits for the others: what ends first must not be process 0
