"""Times a decode step of jax-llm-examples' llama3 as it is, and with the products of jaxtaxfree: a swap of two lines.

    python benchmarks/llama3_swap.py CHECKOUT --json llama3_swap.json

CHECKOUT is one of github.com/jax-ml/jax-llm-examples, of which `llama3` is needed. The model has the sizes of Llama 3.2
1B, random weights in bf16, and a ring cache that is half full. Its mesh is (x 1, y all devices, z 1): weights are
sharded along heads and along the columns of the MLP, and two products a layer end in a sum over all devices.

All programs are compiled at once, each in a thread.

A step is the model's own `forward`, as its `decode_step` calls it, with the cache donated, from the tokens that it gave
to the next ones. It also returns the logits. All
implementations take turns, and each goes on where it was. A time is that of a step in a queue of STEPS of them.

xla/...: the model as it is, by sets of XLA's flags.
swap/...: with `jtf.einsum`, which chooses by what was measured.
fused/...: with `jtf.einsum(implementation="fused")`, where there is an operation for a product.

What is compared is the logits of a step, in the same state. Sixteen layers in bf16 round differently in any other order
of summation, so the judge is XLA on one device, which rounds no partial sum: a swap may be no farther from it than 1.5
times what XLA on all devices is. The floor is the time to read a device's weights and cache
once, at the bandwidth of its memory that `measure_memory_bandwidths` finds.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
import time
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
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
from benchmarks.layout import Row
from benchmarks.operation import AXIS, FLAG_SETS
from benchmarks.rows import environment, judge, write_rows
from benchmarks.sampling import MIN_ROUNDS, NOISY, quantiles, spread
from benchmarks.timing import guard, measure_memory_bandwidths

STEPS = 32  # that are launched before the first one is waited for
ALLOWED = 1.5  # times XLA's own distance from one device
LEAST = 1e-3  # a distance of logits, over the largest of them, that is always right: rounding to bf16 at the end
SIZES: dict[str, dict[str, Any]] = {
    "1b": {"embed": 2048, "ffw_size": 8192, "q_heads": 32, "kv_heads": 8, "head_dim": 64, "num_layers": 16}
    | {"vocab_size": 128256, "max_seq_len": 2048},
    "tiny": {"embed": 64, "ffw_size": 128, "q_heads": 8, "kv_heads": 4, "head_dim": 16, "num_layers": 2}
    | {"vocab_size": 128, "max_seq_len": 32},
}
WAYS = ("xla", "swap", "fused")


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


def config_of(model: Any, args: argparse.Namespace, mesh: Mesh) -> Any:
    kernels = {"use_prefill_attn_kernel": False, "use_decode_attn_kernel": False}
    plain = {"quant_layer": False, "quant_cache": False, "causal": True, "dtype": jnp.bfloat16}
    sizes = SIZES[args.size] | ({"num_layers": args.layers} if args.layers else {})
    return model.Config(mesh=mesh, **sizes, **kernels, **plain)


def random_arrays(model: Any, kind: Any, cfg: Any, *sizes: int) -> Any:
    """Weights or a cache of normal numbers: vectors are ones. One small program for each shape, to be compiled soon."""

    @functools.cache
    def maker(shape: tuple[int, ...], sharding: Any, dtype: Any) -> Any:
        def make(key: jax.Array) -> jax.Array:
            if len(shape) < 2:
                return jnp.ones(shape, dtype)
            return (jax.random.normal(key, shape) * max(shape[:-1]) ** -0.5).astype(dtype)

        return jax.jit(make, out_shardings=sharding)

    keys = map(jax.random.key, itertools.count())
    return jax.tree.map(
        lambda info, sharding: maker(info.shape, sharding, info.dtype)(next(keys)),
        kind.abstract(cfg, *sizes),
        kind.shardings(cfg, *sizes),
        is_leaf=lambda x: isinstance(x, model.ArrayInfo),
    )


def half_full(model: Any, cfg: Any, batch: int) -> tuple[jax.Array, Any]:
    """A token of each sequence, and a cache of random keys and values, half of which are of the past."""
    cache = random_arrays(model, model.KVCache, cfg, batch)
    cache = dataclasses.replace(cache, iter=cache.iter * 0 + cfg.max_seq_len // 2, starts=cache.starts * 0)
    tokens = jax.random.randint(jax.random.key(3), (batch, 1), 1, cfg.vocab_size)
    return jax.device_put(tokens, jax.NamedSharding(cfg.mesh, jax.P())), cache


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled: one implementation, by one set of flags, for one number of sequences."""

    way: str
    flags: str
    batch: int

    @property
    def name(self) -> str:
        return f"{self.way}/{self.flags}"


@dataclasses.dataclass
class Models:
    """The model by each way, and its weights in the classes of each way's module.

    Attributes:
      mesh: on which they are.
      modules, configs, weights: by way.
      queue: whether programs are launched before earlier ones have ended.
    """

    mesh: Mesh
    modules: dict[str, Any]
    configs: dict[str, Any]
    weights: dict[str, Any]
    queue: bool

    def compiled(self, program: Program) -> tuple[Any, int]:
        """The executable of a program, and its kernels of jaxtaxfree."""
        started = time.perf_counter()
        model, cfg, weights = (of[program.way] for of in (self.modules, self.configs, self.weights))

        def step(token: jax.Array, weights: Any, cache: Any) -> Any:
            logits, cache = model.forward(token, jnp.ones(token.shape, jnp.int32), weights, cfg, cache)
            return jax.reshard(jnp.argmax(logits, -1), jax.P()), cache, logits

        with jax.set_mesh(self.mesh):  # of this thread
            cache = jax.tree.map(
                lambda info, sharding: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding),
                model.KVCache.abstract(cfg, program.batch),
                model.KVCache.shardings(cfg, program.batch),
                is_leaf=lambda x: isinstance(x, model.ArrayInfo),
            )
            whole = jax.NamedSharding(self.mesh, jax.P())
            token = jax.ShapeDtypeStruct((program.batch, 1), jnp.int32, sharding=whole)
            lowered = jax.jit(step, donate_argnums=2).lower(token, weights, cache)
            kernels = lowered.as_text().count("triton_kernel_call_ffi")
            options = FLAG_SETS[program.flags] if self.queue else {}
            executable = lowered.compile(compiler_options=options or None)
        seconds = time.perf_counter() - started
        what = f"{program.name}, {program.batch} sequences, {self.mesh.size} devices"
        print(f"  {what}: compiled in {seconds:.1f} s", flush=True)
        return executable, kernels

    def started(self, program: Program, executable: Any, kernels: int) -> Step:
        """A step that has run twice, and the logits of its first state."""
        with jax.set_mesh(self.mesh):
            state = half_full(self.modules[program.way], self.configs[program.way], program.batch)
            made = Step(program.name, executable, state, kernels)
            made.run(self.weights[program.way], 1, queue=False)
            made.first = made.logits
            made.run(self.weights[program.way], 1, queue=False)
        return made


def models_of(args: argparse.Namespace, ways: Sequence[str], devices: Sequence[Any]) -> Models:
    """Several ways of the model, with one set of random weights, the same on any devices."""
    mesh = Mesh(np.array(devices).reshape(1, -1, 1), ("x", "y", "z"), axis_types=(AxisType.Explicit,) * 3)
    folder, module, queue = args.checkout / "llama3", "llama3_jax.model", jax.default_backend() == "gpu"
    made, weights = Models(mesh, {}, {}, {}, queue), None
    with jax.set_mesh(mesh):
        for way in ways:
            patch = None if way == "xla" else {"llama3_jax/model.py": swaps.DENSE}
            (model,), lines = report.load(folder, [module], patch)
            if way == "fused":
                asked = "fused" if queue else "simulate"
                vars(model)["jtf"] = types.SimpleNamespace(einsum=report.lenient(jtf.einsum, asked))
            cfg = config_of(model, args, mesh)
            if weights is None:
                weights = random_arrays(model, model.Weights, cfg)
            # Each module has classes of its own.
            abstract = jax.eval_shape(lambda model=model, cfg=cfg: model.Weights.init(jax.random.key(0), cfg))
            made.weights[way] = jax.tree.unflatten(jax.tree.structure(abstract), jax.tree.leaves(weights))
            made.modules[way], made.configs[way] = model, cfg
            print(f"llama3 {args.size}, {way} on {len(devices)}: {lines} lines changed", flush=True)
    return made


def nbytes(tree: Any) -> int:
    """On one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def measured(
    args: argparse.Namespace, models: Models, flags: str, batch: int, best: float, compiled: Mapping[Program, Any],
    alone: np.ndarray,
) -> list[Row]:  # fmt: skip
    """The rows of a batch by a set of flags; `best` is the bandwidth of a memory, `alone` the logits of one device."""
    steps = {}
    for way in args.ways:
        program = Program(way, flags, batch)
        with guard(program.name, args.timeout):
            try:
                steps[way] = models.started(program, *compiled[program].result())
            except Exception as error:  # of a set of flags; nothing can be compared without XLA's
                print(f"{program.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                if way == "xla":
                    return []
    end, rounds, order = time.perf_counter() + args.seconds, 0, list(steps)
    while rounds < MIN_ROUNDS or time.perf_counter() < end:
        for way in order[rounds % len(order) :] + order[: rounds % len(order)]:
            with guard(way, args.timeout):
                steps[way].run(models.weights[way], STEPS // 4, models.queue)
                steps[way].samples.append(steps[way].run(models.weights[way], STEPS, models.queue) / STEPS * 1e6)
        rounds += 1
    weights = models.weights["xla"]
    floor = (nbytes(weights) - nbytes(weights.embedding) + nbytes(steps["xla"].state[1])) / best * 1e6
    print(f"{batch} sequences, {models.mesh.size} x {jax.devices()[0].device_kind}, floor {floor:.1f} us", flush=True)
    allowed = max(LEAST, ALLOWED * report.distance(steps["xla"].first, alone))
    return [
        row_of(args, batch, models.mesh.size, made, report.distance(made.first, alone), allowed, floor)
        for made in steps.values()
    ]


def row_of(
    args: argparse.Namespace, batch: int, world: int, made: Step, error: float, allowed: float, floor: float
) -> Row:
    checked = judge(error, allowed)
    median, p20, p80 = (round(x, 3) for x in quantiles(made.samples))
    print(
        f"  {made.name:16}{median:10.1f} us ({p20:.1f} to {p80:.1f}), {made.kernels} kernels, "
        f"logits differ by {error:.1e} from one device's",
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
        "name": f"llama3-{args.size}{f'-{args.layers}-layers' if args.layers else ''}/decode-{batch}",
        "ratio_to_floor": round(floor / median, 4) if checked == "ok" else None,
        "error": float(f"{error:.3g}"),
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
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS), help="xla has to be one of them")
    parser.add_argument("--layers", type=int, help="not as many as the model has, for a run that compiles sooner")
    parser.add_argument("--seconds", type=float, default=10, help="for each batch")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a step is given up")
    parser.add_argument("--commit", metavar="HASH", help="of this code, where it is no git checkout")
    args = parser.parse_args(argv)
    report.stand_in_for_missing()
    if args.size == "tiny":
        jax.config.update("jax_num_cpu_devices", 2)
    rows: list[Row] = []
    models = models_of(args, args.ways, jax.devices())
    alone = models_of(args, ["xla"], jax.devices()[:1])
    cases = list(itertools.product(args.batches, args.flags))
    with ThreadPoolExecutor(len(cases) * len(args.ways) + len(args.batches)) as pool:
        judges = {batch: pool.submit(alone.compiled, Program("xla", "default", batch)) for batch in args.batches}
        compiled = {
            program: pool.submit(models.compiled, program)
            for program in (Program(way, flags, batch) for batch, flags in cases for way in args.ways)
        }
        with guard("compilation", args.timeout):
            wait([*compiled.values(), *judges.values()])
    logits = {}
    for batch, made in judges.items():
        first = alone.started(Program("xla", "default", batch), *made.result()).first
        logits[batch] = np.asarray(first, np.float32)
    del alone
    plain = Mesh(np.array(jax.devices()), (AXIS,), axis_types=(AxisType.Auto,))
    best = max(measure_memory_bandwidths(plain, 2**30 if models.queue else 2**16).values())
    for batch, flags in cases:
        rows += measured(args, models, flags, batch, best, compiled, logits[batch])
        if args.json:  # a run that is cut short has these
            write_rows(args.json, rows)
    return int(any(row["checked"] != "ok" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
