"""Where the time of a decode step in one launch goes: the kernel's own clock, phase by phase.

python benchmarks/step_clock.py [--world 2] [--shape 1,8192,8,4096,8,2,128,3584,32064] [--config '{"num_warps": 4}']

From the project's root. The shape is that of `one_launch.py`. Each program writes down when a phase has its vectors,
its products, its sum over the ranks, and when all programs have met. A row of the table is a phase: the mean over
programs, layers and steps of what each stretch took, in microseconds, and of the slowest program.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.one_launch import AXIS, DEFAULT, STEPS, Problem, model_of
from jaxtaxfree.ops.decode_step import VARIANTS
from jaxtaxfree.ops.decode_step.hopper import Call
from jaxtaxfree.ops.variant import choose
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.target import HOPPER

PHASES = ("project", "attend", "merge", "add", "gate", "add")
STRETCHES = ("vectors", "products", "sum", "meeting", "all")


def times_of(problem, config=None, steps=STEPS, implementation=None):
    """The clocks of some steps in one program: i32 [steps, world, programs, layers + 1, phases, stamps]."""
    model, world = problem.model, problem.world
    call = Call(
        model=model, world=world, batch=problem.b, tokens=1, slots=problem.slots, positions=problem.slots,
        dtype=np.dtype(jnp.bfloat16), cache_dtype=np.dtype(jnp.bfloat16), by_heads=True, target=HOPPER,
    )  # fmt: skip
    chosen = choose("decode_step", VARIANTS, call, {"kernel": "hopper", **(config or {}), "times": True})

    def run(params, x, cache, lengths, tables):
        def step(state, _):
            before, cache = state
            after = lax.optimization_barrier((x.astype(jnp.float32), before))[0]
            arrays = chosen.arrays(params, after, cache, lengths, *(table[None] for table in tables))
            logits, *cache, times = shmem_call(
                chosen.variant.kernel, *arrays, axis_name=AXIS, implementation=implementation, **chosen.keywords
            )
            return (logits, tuple(cache)), times

        zero = jnp.zeros((problem.b, model.vocab // world), jnp.float32)
        return lax.scan(step, (zero, tuple(cache)), length=steps)[1][:, None]

    return np.asarray(problem.program(run, P(None, AXIS))(*problem.operands))


def stretches_of(times, steps=3):
    """Microseconds [phases, stretches, (mean, slowest program)] of a layer, of the last steps but the first few.

    Also those of the logits [(vectors, products), (mean, slowest)].
    """
    times = times[steps:].astype(np.int64) & 0xFFFFFFFF
    layers = times[:, :, :, :-1]
    met = layers[..., 3].reshape(*layers.shape[:3], -1)
    # A phase begins when the one before has met; the first phase of a call has no such time.
    begin = np.concatenate([np.full_like(met[..., :1], -1), met[..., :-1]], -1).reshape(layers.shape[:-1])
    vectors, products, summed = (layers[..., i] for i in range(3))
    phase = np.arange(len(PHASES))
    has_vectors, has_sum = (phase != 1) & (phase != 2), (phase == 3) | (phase == 5)
    if times.shape[1] == 1:
        has_sum &= False
    vectors = np.where(has_vectors, vectors, begin)
    summed = np.where(has_sum, summed, products)
    spans = np.stack([vectors - begin, products - vectors, summed - products, layers[..., 3] - summed], -1)
    spans = np.concatenate([spans, spans.sum(-1, keepdims=True)], -1)[:, :, :, 1:] / 1e3
    logits = times[:, :, :, -1, 0, :2] - met[..., -1:]
    logits = np.diff(logits, axis=-1, prepend=0) / 1e3
    table = np.stack([spans.mean((0, 1, 2, 3)), spans.max(2).mean((0, 1, 2))], -1)
    return table, np.stack([logits.mean((0, 1, 2)), logits.max(2).mean((0, 1))], -1)


def show(times):
    table, logits = stretches_of(times)
    print(f"  {'':8s}" + "".join(f"{name:>16s}" for name in STRETCHES))
    for name, row in zip(PHASES, table):
        print(f"  {name:8s}" + "".join(f"{mean:9.2f}{most:7.2f}" for mean, most in row))
    print(f"  {'layer':8s}" + "".join(f"{mean:9.2f}{most:7.2f}" for mean, most in table.sum(0)))
    print(f"  {'logits':8s}" + "".join(f"{mean:9.2f}{most:7.2f}" for mean, most in logits), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--shape", default=DEFAULT)
    parser.add_argument("--config", type=json.loads, default={})
    options = parser.parse_args()
    sizes = tuple(map(int, options.shape.split(",")))
    b, context = sizes[:2]
    problem = Problem(model_of(sizes, options.world), options.world, b, context, [context - STEPS - 1] * b)
    show(times_of(problem, options.config))


if __name__ == "__main__":
    main()
