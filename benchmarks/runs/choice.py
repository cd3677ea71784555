"""Times top_k of 1 on 2 GPUs: our kernel, argmax with our all_gather, and XLA. Every call depends on the one before.

python .gpu_choice.py          on GPUs, within a minute
XLA_FLAGS=--xla_force_host_platform_device_count=2 JAX_PLATFORMS=cpu python .gpu_choice.py --tiny      its form
"""

import concurrent.futures
import os
import sys
import time

START = time.monotonic()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf  # noqa: E402

TINY = "--tiny" in sys.argv
FUSED = "simulate" if TINY else "fused"
STEPS, REPEATS = (2, 1) if TINY else (1000, 5)
ROWS, SIZES = ((1, 4), (40, 3000)) if TINY else ((1, 4, 16), (16032, 64128))
DEADLINE = 55 if not TINY else 600


def old(x):
    """As top_k of 1 was before: argmax, a gather, a stack, our all_gather, argmax, two gathers."""
    size, at = x.shape[-1], jnp.argmax(x, axis=-1, keepdims=True)
    own = jnp.take_along_axis(x, at, axis=-1)
    at = at.astype(jnp.int32) + size * lax.axis_index("tp").astype(jnp.int32)
    pair = jnp.stack([lax.bitcast_convert_type(own, jnp.int32), at], axis=-2)
    pair = jtf.all_gather(pair, "tp", axis=1, implementation=FUSED)
    values, positions = (pair[..., i, :].reshape(x.shape[0], -1) for i in range(2))
    values = lax.bitcast_convert_type(values, jnp.float32)
    best = jnp.argmax(values, axis=-1, keepdims=True)
    return jnp.take_along_axis(values, best, axis=-1), jnp.take_along_axis(positions, best, axis=-1)


WAYS = {
    "loop alone": lambda x: (lax.slice_in_dim(x, 1, 2, axis=1), jnp.zeros((x.shape[0], 1), jnp.int32)),
    "kernel": lambda x: jtf.top_k(x, 1, "tp", implementation=FUSED),
    "None": lambda x: jtf.top_k(x, 1, "tp"),
    "old": old,
    "xla": lambda x: jtf.top_k(x, 1, "tp", implementation="xla"),
}


def loop(way, mesh):
    def local(x):
        def step(_, state):
            x, _, _ = state
            values, positions = way(x)
            # Always -100, which is there, but the compiler does not know: the next call depends on this one.
            told = jnp.minimum(values[:1, :1], -100.0) - (positions[:1, :1] < 0)
            return lax.dynamic_update_slice(x, told, (0, 0)), values, positions

        rows = x.shape[0]
        state = x, jnp.zeros((rows, 1), x.dtype), jnp.zeros((rows, 1), jnp.int32)
        _, values, positions = lax.fori_loop(0, STEPS, step, state)
        return values[None], positions[None]

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(None, "tp"), out_specs=P("tp"), check_vma=False))


def logits(rows, size, world):
    rng = np.random.default_rng(rows * size)
    x = np.clip(rng.standard_normal((rows, world * size)) * 4, -99, 99).astype(np.float32)
    for row in range(1, rows, 2):  # of every second row the largest occurs on several ranks and in several parts
        x[row, rng.integers(1, world * size, 9)] = 64
    x[0, ::size] = -100
    return x


def main():
    world = 2
    mesh = Mesh(np.array(jax.devices()[:world]), ("tp",))
    print(f"{world} x {jax.devices()[0].device_kind}, us a call in a loop of {STEPS}, least and median of {REPEATS}")
    print(f"{'rows':>5} {'size':>6}  " + "".join(f"{name:>17}" for name in WAYS) + "   (of which the loop alone)")
    pool = concurrent.futures.ThreadPoolExecutor(16)
    cases = {}
    for size in SIZES:
        for rows in ROWS:
            whole = logits(rows, size, world)
            x = jax.device_put(whole, NamedSharding(mesh, P(None, "tp")))
            runs = {}
            for name, way in WAYS.items():
                try:
                    lowered = loop(way, mesh).lower(x)
                    runs[name] = pool.submit(lowered.compile)
                    kernels = lowered.as_text().count("triton_kernel_call")
                    if not TINY and kernels != (name in ("kernel", "None", "old")):
                        print(f"{name}, {rows} x {size}: {kernels} of our kernels in the program", flush=True)
                except Exception as error:
                    print(f"{name} is not lowered: {type(error).__name__}: {str(error).splitlines()[0][:300]}")
            cases[rows, size] = whole, x, runs
    print(f"{time.monotonic() - START:.0f} s: all is lowered", flush=True)
    wrong = 0
    for (rows, size), (whole, x, futures) in cases.items():
        at = np.argmax(whole, axis=1)
        bits = np.broadcast_to(whole[np.arange(rows), at], (world, rows)).view(np.int32)
        runs = {}
        for name, future in futures.items():
            try:
                run = future.result(timeout=max(0.1, DEADLINE - (time.monotonic() - START)))
                values, positions = (np.asarray(a) for a in jtf.block_until_ready(run(x)))
            except Exception as error:
                print(f"{name}, {rows} x {size}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}")
                continue
            runs[name] = run
            same = np.array_equal(positions[..., 0], np.broadcast_to(at, (world, rows)))
            same &= np.array_equal(np.ascontiguousarray(values[..., 0]).view(np.int32), bits)
            if name != "loop alone" and not same:
                wrong += 1
                print(f"{name}, {rows} x {size}: WRONG", flush=True)
        times = {name: [] for name in runs}
        for _ in range(REPEATS if time.monotonic() - START < DEADLINE else 0):  # in turns
            for name, run in runs.items():
                begin = time.perf_counter()
                jax.block_until_ready(run(x))
                times[name].append((time.perf_counter() - begin) / STEPS * 1e6)
        line = f"{rows:>5} {size:>6}  "
        for name in WAYS:
            taken = times.get(name)
            line += f"{min(taken):>9.2f}{np.median(taken):>8.2f}" if taken else f"{'-':>17}"
        print(line, flush=True)
    print(f"{'all right' if not wrong else f'{wrong} WRONG'}; {time.monotonic() - START:.0f} s", flush=True)
    sys.stdout.flush()
    os._exit(int(wrong > 0))  # threads that still compile would hold the process


if __name__ == "__main__":
    main()
