"""Times a decode step of jax-llm-examples' llama3 as it is, and with the products of jaxtaxfree: a swap of two lines.

    python benchmarks/llama3_swap.py CHECKOUT --json llama3_swap.json

CHECKOUT is one of github.com/jax-ml/jax-llm-examples, of which `llama3` is needed. The model has the sizes of Llama 3.2
1B, random weights in bf16, and a ring cache that is half full. Its mesh is (x 1, y all devices, z 1): weights are
sharded along heads and along the columns of the MLP, and two products a layer end in a sum over all devices.

A step is the model's own `forward`, as its `decode_step` calls it, with the cache donated, from the tokens that it gave
to the next ones. It also returns the logits. All
implementations take turns, and each goes on where it was. A time is that of a step in a queue of STEPS of them.

xla/...: the model as it is, by sets of XLA's flags.
swap/...: with `jtf.einsum`, which chooses by what was measured.
fused/...: with `jtf.einsum(implementation="fused")`, where there is an operation for a product.

What is compared is the logits of a step, in the same state. The floor is the time to read a device's weights and cache
once, at the bandwidth of its memory that `measure_memory_bandwidths` finds.
"""

import argparse
import dataclasses
import itertools
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "swaps"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax_llm_examples as swaps
import report

import jaxtaxfree as jtf
from benchmarks.operation import AXIS, FLAG_SETS
from benchmarks.rows import environment, judge, write_rows
from benchmarks.sampling import MIN_ROUNDS, NOISY, quantiles, spread
from benchmarks.timing import guard, measure_memory_bandwidths

STEPS = 32  # that are launched before the first one is waited for
TOLERANCE = 2e-2  # of the logits, over the largest of them: rounding to bf16, 16 layers deep
SIZES: dict[str, dict[str, Any]] = {
    "1b": {"embed": 2048, "ffw_size": 8192, "q_heads": 32, "kv_heads": 8, "head_dim": 64, "num_layers": 16}
    | {"vocab_size": 128256, "max_seq_len": 2048},
    "tiny": {"embed": 64, "ffw_size": 128, "q_heads": 8, "kv_heads": 4, "head_dim": 16, "num_layers": 2}
    | {"vocab_size": 128, "max_seq_len": 32},
}
WAYS = {"xla": None, "swap": None, "fused": "fused"}  # and what `jtf.einsum` is asked for


@dataclasses.dataclass
class Step:
    """A compiled decode step, and where it is.

    Attributes:
      name: of the implementation.
      executable: (token, weights, cache) -> (token, cache, logits).
      state: token and cache.
      kernels: of jaxtaxfree in its program.
      first, logits: of the first and of the last step.
      samples: microseconds of a step.
    """

    name: str
    executable: Any
    state: tuple[Any, Any]
    kernels: int
    first: Any = None
    logits: Any = None
    samples: list[float] = dataclasses.field(default_factory=list)

    def run(self, weights: Any, steps: int, queue: bool) -> float:
        """Seconds of so many steps."""
        token, cache = self.state
        jax.block_until_ready((token, cache))
        start = time.perf_counter()
        for _ in range(steps):
            token, cache, self.logits = self.executable(token, weights, cache)
            if not queue:
                jax.block_until_ready(token)
        jax.block_until_ready((token, cache))
        seconds = time.perf_counter() - start
        self.state = token, cache
        return seconds


def config_of(model: Any, size: str, mesh: Mesh) -> Any:
    kernels = {"use_prefill_attn_kernel": False, "use_decode_attn_kernel": False}
    plain = {"quant_layer": False, "quant_cache": False, "causal": True, "dtype": jnp.bfloat16}
    return model.Config(mesh=mesh, **SIZES[size], **kernels, **plain)


def half_full(model: Any, cfg: Any, batch: int) -> tuple[jax.Array, Any]:
    """A token of each sequence, and a cache of random keys and values, half of which are of the past."""
    cache = model.KVCache.init(jax.random.key(1), cfg, batch)
    keys = iter(jax.random.split(jax.random.key(2), 2 * cfg.num_layers))

    @jax.jit
    def like(key: jax.Array, x: jax.Array) -> jax.Array:
        return jax.random.normal(key, x.shape, x.dtype, out_sharding=jax.typeof(x).sharding)

    k, v = ([like(next(keys), x) for x in some] for some in (cache.k, cache.v))
    cache = dataclasses.replace(cache, k=k, v=v, iter=cache.iter * 0 + cfg.max_seq_len // 2)
    tokens = jax.random.randint(jax.random.key(3), (batch, 1), 1, cfg.vocab_size)
    return jax.device_put(tokens, jax.NamedSharding(cfg.mesh, jax.P())), cache


def prepare(name: str, model: Any, cfg: Any, weights: Any, batch: int, options: dict[str, Any]) -> Step:
    """A step that has run twice, and the logits of its first state."""

    def step(token: jax.Array, weights: Any, cache: Any) -> Any:
        logits, cache = model.forward(token, jnp.ones(token.shape, jnp.int32), weights, cfg, cache)
        return jax.reshard(jnp.argmax(logits, -1), jax.P()), cache, logits

    token, cache = half_full(model, cfg, batch)
    lowered = jax.jit(step, donate_argnums=2).lower(token, weights, cache)
    kernels = lowered.as_text().count("triton_kernel_call_ffi")
    made = Step(name, lowered.compile(compiler_options=options or None), (token, cache), kernels)
    made.run(weights, 1, queue=False)
    made.first = made.logits
    made.run(weights, 1, queue=False)
    return made


def nbytes(tree: Any) -> int:
    """On one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def measured(args: argparse.Namespace, flags: str, batch: int) -> list[dict[str, Any]]:
    """The rows of a batch by a set of flags."""
    mesh = Mesh(np.array(jax.devices()).reshape(1, -1, 1), ("x", "y", "z"), axis_types=(AxisType.Explicit,) * 3)
    queue = jax.default_backend() == "gpu"
    folder, module = args.checkout / "llama3", "llama3_jax.model"
    (original,), _ = report.load(folder, [module])
    (swapped,), lines = report.load(folder, [module], {"llama3_jax/model.py": swaps.DENSE})
    print(f"llama3 {args.size}, {batch} sequences, {mesh.size} x {jax.devices()[0].device_kind}: {lines} lines changed")
    steps, own = {}, {}
    with jax.set_mesh(mesh):
        weights = original.Weights.init(jax.random.key(0), config_of(original, args.size, mesh))
        for way, implementation in WAYS.items():
            model = original if way == "xla" else swapped
            cfg = config_of(model, args.size, mesh)
            # Each module has classes of its own.
            abstract = jax.eval_shape(lambda model=model, cfg=cfg: model.Weights.init(jax.random.key(0), cfg))
            own[way] = jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(weights))
            if way == "fused":
                asked = implementation if queue else "simulate"
                vars(swapped)["jtf"] = types.SimpleNamespace(einsum=report.lenient(jtf.einsum, asked))
            with guard(f"{way}/{flags}", args.timeout):
                steps[way] = prepare(f"{way}/{flags}", model, cfg, own[way], batch, FLAG_SETS[flags] if queue else {})
        end, rounds, order = time.perf_counter() + args.seconds, 0, list(steps)
        while rounds < MIN_ROUNDS or time.perf_counter() < end:
            for way in order[rounds % len(order) :] + order[: rounds % len(order)]:
                with guard(way, args.timeout):
                    steps[way].run(own[way], STEPS // 4, queue)
                    steps[way].samples.append(steps[way].run(own[way], STEPS, queue) / STEPS * 1e6)
            rounds += 1
    plain = Mesh(np.array(jax.devices()), (AXIS,), axis_types=(AxisType.Auto,))
    best = max(measure_memory_bandwidths(plain, 2**30 if queue else 2**16).values())
    floor = (nbytes(weights) - nbytes(weights.embedding) + nbytes(steps["xla"].state[1])) / best * 1e6
    return [row_of(args, batch, mesh.size, made, steps["xla"].first, floor) for made in steps.values()]


def row_of(args: argparse.Namespace, batch: int, world: int, made: Step, wanted: Any, floor: float) -> dict[str, Any]:
    error = report.distance(made.first, wanted)
    checked = judge(error, TOLERANCE)
    median, p20, p80 = (round(x, 3) for x in quantiles(made.samples))
    print(
        f"  {made.name:16}{median:10.1f} us ({p20:.1f} to {p80:.1f}), floor {floor:.1f}, {made.kernels} kernels, "
        f"logits differ by {error:.1e}",
        flush=True,
    )
    return {
        "op": "llama3_swap",
        "b": batch,
        "s": SIZES[args.size]["max_seq_len"],
        "dtype": "bfloat16",
        "world": world,
        "implementation": made.name,
        "config": None,
        "median_us": median if checked == "ok" else None,
        "p20_us": p20 if checked == "ok" else None,
        "p80_us": p80 if checked == "ok" else None,
        "floor_us": round(floor, 3),
        **environment(),
        **({"commit": args.commit} if args.commit else {}),
        "l2": "usual",
        "mode": "sustained",
        "name": f"llama3-{args.size}/decode-{batch}",
        "ratio_to_floor": round(floor / median, 4),
        "checked": checked,
        "noisy": spread(median, p20, p80) > NOISY,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--size", choices=SIZES, default="1b", help="tiny: for a trial on CPU devices")
    parser.add_argument("--flags", choices=FLAG_SETS, nargs="+", default=["default", "graph"], help="of XLA")
    parser.add_argument("--seconds", type=float, default=10, help="for each batch")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a step is given up")
    parser.add_argument("--commit", metavar="HASH", help="of this code, where it is no git checkout")
    args = parser.parse_args(argv)
    report.stand_in_for_missing()
    if args.size == "tiny":
        jax.config.update("jax_num_cpu_devices", 2)
    rows: list[dict[str, Any]] = []
    for flags, batch in itertools.product(args.flags, args.batches):
        rows += measured(args, flags, batch)
        if args.json:
            write_rows(args.json, rows)
    return int(any(row["checked"] != "ok" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
