"""decode_step in one launch on GPUs: is it right, and what do its settings and its parts cost.

python benchmarks/one_launch.py [--worlds 1,2] [--shape 1,8192,8,4096,8,2,128,3584,32064]
    [--weights bfloat16,int8,float8_e4m3fn] [--configs quick|all|none|JSON] [--no-small] [--no-parts] [--seconds 0.5]

`run.py decode_step` compares it with its peers, in loops and a step a call, with floors and in the rows of results.
From the project's root. The shape is B, context, layers, d_model, heads, kv heads, head size, d_mlp, vocabulary, of two
ranks together; on one rank half of the heads, of d_mlp and of the vocabulary. Checks come first; what is wrong is not
timed. JSON is a list of settings, as [{"in_flight": 1}]. Of each kind of weights all settings are timed. Those of 8
bits have a scale for each row.
Prints a line as soon as it has it, and a table of each world at the end.
"""

import argparse
import dataclasses
import json
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from benchmarks.operation import AXIS, ONE

STEPS = 32
CACHE = P(None, None, AXIS)
DEFAULT = "1,8192,8,4096,8,2,128,3584,32064"
QUICK = [
    {},
    {"num_warps": 4},
    {"stage": 16384, "num_stages": 6},
    {"stage": 4096, "num_stages": 24},
]
ALL = [
    *QUICK,
    {"num_warps": 16},
    {"programs": 128},
    {"num_stages": 10},
    {"num_stages": 8},
    {"in_flight": 32},
    {"in_flight": 1},
    {"merged": 4},
    {"merged": 16},
    {"merged": 32},
    {"splits": 64},
    {"splits": 32},
    {"stage": 16384, "num_stages": 6, "num_warps": 16},
    {"stage": 16384, "num_stages": 6, "num_warps": 4},
]


def model_of(sizes, world):
    _, _, layers, d, n, k, h, f, v = sizes
    part = lambda size: size * world // 2  # noqa: E731
    return jtf.DecoderSpec(
        layers=layers,
        d_model=d,
        heads=part(n),
        kv_heads=part(k),
        head_dim=h,
        d_mlp=part(f),
        vocab=part(v),
        norm_eps=1e-5,
    )


class Problem:
    """A model with random weights on a mesh, and programs of it; its matrices are of dtype `weights`."""

    def __init__(self, model, world, b, slots, length, seed=0, weights="bfloat16"):
        self.model, self.world, self.b, self.slots = model, world, b, slots
        self.mesh = Mesh(np.array(jax.devices()[:world]).reshape(world, 1), (AXIS, ONE))
        key = jax.random.key(seed)
        self.specs = model.partition_specs(AXIS)
        self.params = {}
        for i, (name, shape) in enumerate(model.param_shapes().items()):
            self.params[name] = self.make(jax.random.fold_in(key, i), shape, shape[-1] ** -0.5, self.specs[name])
            if name.endswith("norm"):
                gain = np.ones(shape) if not model.norm_plus_one else np.zeros(shape)
                self.params[name] = jax.device_put(
                    jnp.asarray(gain, jnp.bfloat16), NamedSharding(self.mesh, self.specs[name])
                )
        if weights != "bfloat16":
            self.specs = self.specs | model.scale_specs(AXIS)
            self.params = self.params | self.in_eight_bits(weights)
        size = (model.layers, b, model.kv_heads, slots, model.head_dim)
        # So that attention of so many keys counts for as much as the rest.
        scales = (1.0, max(1.0, (max(length) / np.e) ** 0.5))
        self.cache = tuple(self.make(jax.random.fold_in(key, 100 + i), size, scales[i], CACHE) for i in range(2))
        self.x = self.make(jax.random.fold_in(key, 200), (b, model.d_model), 1.0, P())
        whole = NamedSharding(self.mesh, P())
        self.lengths = jax.device_put(jnp.asarray(length, jnp.int32), whole)
        half = model.rotated // 2
        angle = np.outer(np.arange(slots), 5e5 ** (-np.arange(half) / half))
        self.tables = tuple(jax.device_put(jnp.asarray(f(angle), jnp.float32), whole) for f in (np.cos, np.sin))

    def make(self, key, shape, scale, spec):
        make = jax.jit(
            lambda key: (scale * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16),
            out_shardings=NamedSharding(self.mesh, spec),
        )
        return make(key)

    def in_eight_bits(self, dtype):
        """The matrices, and their scales."""

        def narrow(params):
            found = {name: jtf.quantize(w, dtype, block=(1, -1)) for name, w in params.items()}
            return {name: w for name, (w, _) in found.items()} | {f"{name}_scale": s for name, (_, s) in found.items()}

        names = self.model.matrices
        placed = {
            each: NamedSharding(self.mesh, self.specs[each]) for name in names for each in (name, f"{name}_scale")
        }
        return jax.jit(narrow, out_shardings=placed)({name: self.params[name] for name in names})

    def program(self, function, out_specs, options=None, donate=()):
        specs = (self.specs, P(), (CACHE, CACHE), P(), (P(), P()))
        f = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        lowered = jax.jit(f, donate_argnums=donate).lower(*self.operands)
        return lowered.compile(compiler_options=options or {})

    @property
    def operands(self):
        return self.params, self.x, self.cache, self.lengths, self.tables

    def step(self, implementation, config=None):
        config = {"kernel": "hopper"} | (config or {}) if implementation == "fused" else None

        def step(params, x, cache, lengths, tables):
            return jtf.decode_step(
                params, x, cache, lengths, AXIS, model=self.model, cos=tables[0], sin=tables[1],
                implementation=implementation, config=config,
            )  # fmt: skip

        return step

    def steps(self, implementation, config=None, steps=STEPS, keeps_cache=True):
        """So many steps in one program, each after the one before; the sum of the logits, and the last ones."""
        step = self.step(implementation, config)

        def run(params, x, cache, lengths, tables):
            def one(i, carry):
                cache, total, last = carry
                # Who serves knows no token before the last step is over.
                new, _ = lax.optimization_barrier((x + (i % 7).astype(x.dtype), last))
                logits, after = step(params, new, cache, lengths + i, tables)
                return after if keeps_cache else cache, total + logits, logits

            zero = jnp.zeros((self.b, self.model.vocab // self.world), jnp.float32)
            _, total, last = lax.fori_loop(0, steps, one, (cache, zero, zero))
            return total, last

        return run


OUT = P(None, AXIS)


def error_of(found, wanted):
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def check(label, problem, config=None, steps=6, tolerance=0.03):
    """Raises unless the kernel's logits are XLA's, the same bits each time, and the cache too."""
    wanted = problem.program(problem.steps("xla", steps=steps), (OUT, OUT))(*problem.operands)
    start = time.perf_counter()
    run = problem.program(problem.steps("fused", config, steps=steps), (OUT, OUT))
    compiled = time.perf_counter() - start
    found = jtf.block_until_ready(run(*problem.operands))
    errors = [error_of(*pair) for pair in zip(found, wanted)]
    again = [jtf.block_until_ready(run(*problem.operands)) for _ in range(5)]
    same = all(np.array_equal(a, b) for each in again for a, b in zip(each, found))
    outs = (OUT, (CACHE, CACHE))
    caches = [problem.program(problem.step(which, config), outs)(*problem.operands)[1] for which in ("fused", "xla")]
    caches = [error_of(*pair) for pair in zip(*caches)]
    print(
        f"  {label}: error {errors[0]:.2e} {errors[1]:.2e}, caches {max(caches):.1e}, same bits {same}, "
        f"compiled in {compiled:.0f} s",
        flush=True,
    )
    if not (max(errors) < tolerance and max(caches) < 0.02 and same):
        raise AssertionError(f"{label} is wrong")


def small_checks(world, weights):
    odd = (1088 if weights == "bfloat16" else 1152) * 2
    base = jtf.DecoderSpec(
        layers=2, d_model=512, heads=8, kv_heads=2, head_dim=128, d_mlp=1024, vocab=1024, norm_eps=1e-5
    )
    cases = {
        "llama": (base, 1, [37]),
        "llama, 2 sequences, an empty cache": (base, 2, [0, 200]),
        "llama, 4 sequences": (base, 4, [5, 255, 64, 100]),
        "qwen 2, heads of 64": (
            dataclasses.replace(base, qkv_bias=True, head_dim=64, tied=True, heads=4, kv_heads=2), 1, [100],
        ),
        "qwen 3": (dataclasses.replace(base, qk_norm=True), 2, [64, 63]),
        "gemma 2": (
            dataclasses.replace(base, post_norms=True, norm_plus_one=True, head_dim=256, heads=4,
                                activation="gelu_tanh", logit_soft_cap=30.0, score_soft_cap=50.0), 2, [64, 200],
        ),
        "mistral's window": (dataclasses.replace(base, windows=(64,)), 2, [130, 20]),
        "gelu, caps, 1 + w, odd sizes": (
            dataclasses.replace(base, d_mlp=odd, vocab=1002, activation="gelu_tanh", score_soft_cap=30.0,
                                logit_soft_cap=5.0,
                                norm_plus_one=True, windows=(32, None), rotary_dim=64), 1, [90]),
    }  # fmt: skip
    wrong = 0
    for label, (model, b, length) in cases.items():
        try:
            check(f"{label}, {weights}", Problem(model, world, b, 256, length, weights=weights))
        except Exception as error:
            wrong += 1
            print(f"  {label}, {weights}: {str(error)[:1500]}", flush=True)
    return wrong


def seconds_of(run, seconds):
    """Seconds of one call, of so many that they last as long as asked for."""
    for _ in range(3):
        result = run()
    jtf.block_until_ready(result)
    count = 3
    while True:
        start = time.perf_counter()
        for _ in range(count):
            result = run()
        jax.block_until_ready(result)
        took = time.perf_counter() - start
        if took >= seconds:
            return took / count
        count = max(count + 1, int(count * 1.3 * seconds / max(took, 1e-4)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", default="1,2")
    parser.add_argument("--shape", default=DEFAULT)
    parser.add_argument("--weights", default="bfloat16")
    parser.add_argument("--configs", default="quick")
    parser.add_argument("--no-small", action="store_true")
    parser.add_argument("--no-parts", action="store_true", help="without the times of a step's parts")
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    sizes = tuple(map(int, options.shape.split(",")))
    b, context = sizes[:2]
    tables = []
    print(jax.devices(), jax.__version__, flush=True)
    for world in map(int, options.worlds.split(",")):
        if world > len(jax.devices()):
            continue
        print(f"== {world} GPU{'s' if world > 1 else ''}", flush=True)
        rows: dict[str, float] = {}
        for weights in options.weights.split(","):
            if not options.no_small and small_checks(world, weights):
                print("  WRONG: see above", flush=True)
            problem = Problem(model_of(sizes, world), world, b, context, [context - STEPS - 1] * b, weights=weights)
            named = {"quick": QUICK, "all": ALL, "none": [{}]}
            for config in named.get(options.configs) or json.loads(options.configs):
                name = f"one launch, {weights} {config or ''}"
                try:
                    check(name, problem, config)
                    run = problem.program(problem.steps("fused", config), (OUT, OUT))
                    rows[name] = 1e6 * seconds_of(lambda: run(*problem.operands), options.seconds) / STEPS  # noqa: B023
                    print(f"  {name}: {rows[name]:.1f} us a step", flush=True)
                except Exception as error:
                    print(f"  {name}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
                    if not config:
                        traceback.print_exc()
            extra = {} if options.no_parts else {
                f"one launch, {weights}, without the cache's update": (problem, {"keeps_cache": False}),
                f"one launch, {weights}, 1 layer": (
                    Problem(
                        dataclasses.replace(problem.model, layers=1), world, b, context, [context - STEPS - 1] * b,
                        weights=weights,
                    ), {},
                ),
                f"one launch, {weights}, short context": (
                    Problem(problem.model, world, b, context, [1] * b, weights=weights), {},
                ),
            }  # fmt: skip
            for name, (of, how) in extra.items():
                try:
                    run = of.program(of.steps("fused", None, **how), (OUT, OUT))
                    rows[name] = 1e6 * seconds_of(lambda: run(*of.operands), options.seconds) / STEPS  # noqa: B023
                    print(f"  {name}: {rows[name]:.1f} us a step", flush=True)
                except Exception as error:
                    print(f"  {name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
        tables.append((world, rows))
    for world, rows in tables:
        print(f"\n{world} GPU{'s' if world > 1 else ''}, {options.shape}: us a step")
        for name, value in sorted(rows.items(), key=lambda row: row[1]):
            print(f"{value:10.1f}  {name}")


if __name__ == "__main__":
    main()
