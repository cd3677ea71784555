"""Greedy decoding of a small language model, tensor parallel, with a cache that is sharded along the sequence.

    python examples/decode_loop.py
    python examples/decode_loop.py --prompt 'The "with" statement ' --tokens 100

Every all-gather is fused into the matrix product that needs it (`jaxtaxfree.all_gather_matmul`), with SwiGLU after
it, and every reduce-scatter into the product before it (`jaxtaxfree.matmul_reduce_scatter`), with the residual
addition after it. Attention over the keys of all devices is one kernel (`jaxtaxfree.decode_attention`), and what is
gathered by itself is small (`jaxtaxfree.all_gather`). The same text is generated four times: by `jaxtaxfree.models`,
which reads the model as Hugging Face publishes models, its tokenizer too, by plain XLA, by the chosen implementation of
all four, and by `jaxtaxfree.decode_step`, which is a whole step (on Hopper GPUs one launch, of one sequence in
bfloat16). Every token must agree. It takes four GPUs where there are four, and four
virtual CPU devices where there is none; there the first tokens are decoded once more, by the kernels of all four ranks
in the simulator, which draws what they did. The model is in transformer.py; train.py made its weights, and
published.py has them as they are published.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import published
import transformer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from transformer import Config

import jaxtaxfree as jtf
from jaxtaxfree import models, simulator
from jaxtaxfree.models.tokenizer import Tokenizer

WEIGHTS = published.WEIGHTS
WORLDS = (4, 2, 1)
TIMED_RUNS = 3
SIMULATED_TOKENS = 4
SLOTS = 4  # programs of a simulated rank that run at a time: rows of the picture
PICTURE = Path("decode_attention.png")
# Operations in the text of a program. Each product and each collective is a launch.
KERNEL = r'custom_call @"?triton_kernel_call'
PRODUCT = r"stablehlo\.dot_general"
COLLECTIVE = r"stablehlo\.(?:all_gather|all_reduce|all_to_all|reduce_scatter|collective_permute)\b"
PROMPTS = (
    'A "return" statement ',
    "A function definition ",
    "If the class defines a method named ",
    'The "import" statement searches ',
    "An exception is raised ",
    "Dictionaries are ",
    "The value of the expression ",
    "When a class ",
)


class UsageError(Exception):
    """A request that cannot be met, as one sentence for the user."""


@dataclasses.dataclass(frozen=True)
class Result:
    tokens: np.ndarray  # [runs, B, n_tokens]
    prefill_s: float
    decode_s: float
    step: str  # the text of the program that decodes: its loop, which is all there is, takes one step; or ""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Decode text with fused kernels and with plain XLA, and check that every token agrees."
    )
    parser.add_argument("--prompt", action="append", help="text to continue; repeat for more (default: eight prompts)")
    parser.add_argument("--tokens", type=int, default=160, help="bytes to generate per prompt (default: %(default)s)")
    parser.add_argument(
        "--implementation",
        choices=("auto", "fused", "xla", "simulate"),
        default="auto",
        help="of the operations, compared with xla; auto is the fused kernels where they are not known to be slower",
    )
    parser.add_argument("--world", type=int, help="devices to use (default: the most of 4, 2 and 1 that there are)")
    parser.add_argument("--batch", type=int, help="sequences to decode; prompts repeat to fill it")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and activations; in bfloat16 rounding may flip tokens, so agreement is reported, not required",
    )
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="a folder written by train.py")
    parser.add_argument(
        "--picture", type=Path, default=PICTURE, help="of the simulated kernels, on a CPU (default: %(default)s)"
    )
    return parser.parse_args()


def choose_devices(world: int | None, cfg: Config) -> list[jax.Device]:
    devices = jax.devices()
    if world is None:
        return devices[: next(w for w in WORLDS if w <= len(devices) and cfg.divides(w))]
    if world < 1 or not cfg.divides(world):
        raise UsageError(f"--world {world} does not divide the model's {cfg.n_kv_heads} key/value heads")
    if world > len(devices):
        raise UsageError(f"--world {world} needs {world} devices, and JAX finds {len(devices)} ({devices[0].platform})")
    return devices[:world]


def encode_prompts(prompts: list[str], batch: int, n_tokens: int, cfg: Config) -> tuple[np.ndarray, np.ndarray]:
    """The prompts, repeated to fill the batch, as bytes [B, T] padded on the right, and their lengths [B]."""
    encoded = [prompt.encode() for prompt in prompts]
    for text in encoded:
        if not text:
            raise UsageError("a prompt needs at least one character")
        if len(text) + n_tokens > cfg.context:
            raise UsageError(
                f"the prompt {text.decode()[:30]!r}... has {len(text)} bytes, which with --tokens {n_tokens} is more "
                f"than the model's context of {cfg.context}"
            )
    lengths = np.array([len(encoded[i % len(encoded)]) for i in range(batch)], np.int32)
    padded = np.zeros((batch, lengths.max()), np.int32)
    for i, length in enumerate(lengths):
        padded[i, :length] = np.frombuffer(encoded[i % len(encoded)], np.uint8)
    return padded, lengths


def count(lowered: str, operation: str) -> int:
    """How often the program has an operation, by a pattern of its text; a shared function counts per call."""
    name = r'@("[^"]+"|[\w.$-]+)'  # MLIR quotes a name with unusual characters.
    functions = dict(re.findall(rf"func\.func (?:\w+ )?{name}(.*?\n  }})", lowered, re.DOTALL))

    def count_in(function: str) -> int:
        body = functions.get(function, "")
        return len(re.findall(operation, body)) + sum(map(count_in, re.findall(rf"\bcall {name}", body)))

    return count_in("main")


class Generator:
    """Two programs, one that reads prompts and one that decodes, with their operands on a mesh.

    Args:
      prompts, lengths: as `encode_prompts` gives them.
      n_tokens: to generate for each prompt.
      implementation: of the fused operations.
      whole: a step is one operation, `decode_step`.
    """

    def __init__(
        self,
        params: Any,
        prompts: np.ndarray,
        lengths: np.ndarray,
        n_tokens: int,
        cfg: Config,
        mesh: Mesh,
        implementation: str | None,
        whole: bool = False,
    ):
        if whole:
            self._prepare_whole(params, prompts, lengths, n_tokens, cfg, mesh, implementation)
            return
        params_specs, cache_specs = transformer.param_specs(cfg), transformer.cache_specs(cfg)
        length = transformer.cache_length(prompts.shape[1] + n_tokens, mesh.size)

        def prefill(params, prompts, lengths):
            return transformer.prefill(params, prompts, lengths, length, cfg, implementation=implementation)

        def decode(params, cache, first, lengths):
            return transformer.decode(params, cache, first, lengths, n_tokens, cfg, implementation=implementation)

        def on_mesh(f: Callable, in_specs: Any, out_specs: Any) -> Any:
            return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

        self._prefill = on_mesh(prefill, (params_specs, P("tp"), P()), (P("tp"), cache_specs))
        self._decode = on_mesh(decode, (params_specs, cache_specs, P("tp"), P()), P("tp"))

        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
        self._params = jax.tree.map(put, params, params_specs)
        self._prompts, self._lengths = put(prompts, P("tp")), put(lengths, P())

    def _prepare_whole(
        self,
        params: Any,
        prompts: np.ndarray,
        lengths: np.ndarray,
        n_tokens: int,
        cfg: Config,
        mesh: Mesh,
        implementation: str | None,
    ) -> None:
        """The same two programs, and operands of which the ranks share the weights and the cache by heads."""
        spec = transformer.whole_spec(cfg, mesh.size)
        specs = spec.partition_specs("tp")
        by_heads = (P(None, None, "tp"),) * 2
        length = prompts.shape[1] + n_tokens

        def prefill(params, prompts, lengths):
            weights, embed = params
            return transformer.read_whole(weights, embed, prompts, lengths, length, cfg, implementation=implementation)

        def decode(params, cache, first, lengths):
            weights, embed = params
            how = {"implementation": implementation}
            return transformer.decode_whole(weights, embed, cache, first, lengths, n_tokens, cfg, **how)

        def on_mesh(f: Callable, in_specs: Any, out_specs: Any) -> Any:
            # Tokens are the same on every rank, which types of what was gathered do not say.
            return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))

        self._prefill = on_mesh(prefill, ((specs, P()), P(), P()), (P(), by_heads))
        self._decode = on_mesh(decode, ((specs, P()), by_heads, P(), P()), P())
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
        stacked = transformer.stack(params, cfg, spec)
        self._params = {name: put(x, specs[name]) for name, x in stacked.items()}, put(params["embed"], P())
        self._prompts, self._lengths = put(prompts, P()), put(lengths, P())

    def read(self) -> tuple[jax.Array, Any]:
        """Reads the prompts: the first token of each of them, and the cache."""
        return jtf.block_until_ready(self._prefill(self._params, self._prompts, self._lengths))

    def decode(self, first: jax.Array, cache: Any) -> np.ndarray:
        """All tokens, [B, n_tokens], from what `read` gave."""
        return np.asarray(jtf.block_until_ready(self._decode(self._params, cache, first, self._lengths)))

    def step(self, first: jax.Array, cache: Any) -> str:
        """The text of the program that decodes. The body of its loop is one step, and the loop is all there is."""
        return self._decode.lower(self._params, cache, first, self._lengths).as_text()


def generate(*args: Any, whole: bool = False) -> Result:
    """Generates the tokens several times, as a `Generator` of these arguments does."""
    generator = Generator(*args, whole=whole)
    first, cache = generator.read()  # These two compile and warm up.
    runs, prefill_s, decode_s = [generator.decode(first, cache)], [], []
    for _ in range(TIMED_RUNS):
        start = time.perf_counter()
        first, cache = generator.read()
        middle = time.perf_counter()
        runs.append(generator.decode(first, cache))
        prefill_s.append(middle - start)
        decode_s.append(time.perf_counter() - middle)
    return Result(np.stack(runs), min(prefill_s), min(decode_s), generator.step(first, cache))


def generate_published(
    folder: Path, prompts: np.ndarray, lengths: np.ndarray, n_tokens: int, dtype: Any, mesh: Mesh
) -> Result:
    """The same of `jaxtaxfree.models`: from a published checkpoint, as `python -m jaxtaxfree generate` does it."""
    model = models.load(folder, mesh, dtype=dtype)
    model.compile(lengths, n_tokens)
    runs, prefill_s, decode_s = [], [], []
    for _ in range(1 + TIMED_RUNS):
        start, made, times = time.perf_counter(), [], []
        for token in model.stream(prompts, n_tokens, lengths=lengths):
            made.append(token)
            times.append(time.perf_counter())
        runs.append(np.stack(made, axis=1))
        prefill_s.append(times[0] - start)
        decode_s.append(times[-1] - times[0])
    return Result(np.stack(runs), min(prefill_s[1:]), min(decode_s[1:]), "")


def simulate(generator: Generator, n_tokens: int, picture: Path) -> tuple[np.ndarray, int]:
    """Generates the tokens by the kernels of all ranks in the simulator, and draws an attention.

    Args:
      generator: of "simulate", for `n_tokens` of each prompt, two or more.

    Returns: the tokens, and how many kernels a step launched.
    """
    with simulator.simulating(slots=SLOTS) as recording:
        first, cache = generator.read()
        before = len(recording.traces)
        tokens = generator.decode(first, cache)
    recording.traces[max(i for i, trace in enumerate(recording.traces) if trace.name == "decode_attention")].save_png(
        picture
    )
    return tokens, (len(recording.traces) - before) // (n_tokens - 1)


def describe_difference(a: np.ndarray, b: np.ndarray, names: tuple[str, str]) -> str:
    """The earliest position at which tokens [runs, B, n] differ, of the first prompt and run that differ there."""
    position, prompt, run = min(index[::-1] for index in np.argwhere(a != b).tolist())
    x, y = a[run, prompt, position], b[run, prompt, position]
    return (
        f"token {position} of prompt {prompt} is {bytes([x])!r} with {names[0]} and {bytes([y])!r} with {names[1]} "
        f"in run {run} (all count from 0)"
    )


def compare(a: np.ndarray, b: np.ndarray, names: tuple[str, str], exact: bool, console: Console) -> bool:
    """Says whether tokens [runs, B, n] agree; returns whether that is as it should be."""
    if np.array_equal(a, b):
        runs = f", in each of {len(a)} runs" if len(a) > 1 else ""
        console.print(f"All {a[0].size} tokens of {names[1]} agree with those of {names[0]}{runs}.")
        return True
    difference = describe_difference(a, b, names)
    if not exact:
        console.print(f"{100 * np.mean(a == b):.1f} % of the tokens agree; the first that does not: {difference}.")
        return True
    print(f"error: the tokens differ: {difference}", file=sys.stderr)
    return False


def show_kernels(
    generator: Generator, step: str, expected: np.ndarray, exact: bool, picture: Path, console: Console
) -> bool:
    """Decodes some tokens in the simulator, and says what its kernels are worth; returns whether the tokens are right.

    Args:
      generator: of "simulate".
      step: the text of the program of plain XLA that decodes.
      expected: its tokens, [B, n].
    """
    batch, n = expected.shape
    console.print(
        f"\nThe kernels that GPUs would run, of all ranks, in the simulator: {n} tokens of {batch} prompts, which "
        "takes half a minute ..."
    )
    tokens, launches = simulate(generator, n, picture)
    if not compare(expected[None], tokens[None], ("xla", "the simulated kernels"), exact, console):
        return False
    products, collectives = count(step, PRODUCT), count(step, COLLECTIVE)
    console.print(
        f"A decode step took {launches} launches instead of {products + collectives}: the fused kernels do what plain "
        f"XLA does by {products} matrix products and {collectives} collectives. (Norms and the like are XLA's in both.)"
    )
    console.print("What every rank did in one launch, of decode_attention, step by step:")
    console.print(str(picture.resolve()), soft_wrap=True)
    return True


def run(args: argparse.Namespace, console: Console) -> int:
    if args.tokens < 1:
        raise UsageError(f"--tokens {args.tokens} must be at least 1")
    if not published.is_there(args.weights):
        raise UsageError(f"there are no weights at {args.weights}; train them with: python examples/train.py")
    params, cfg, _ = published.load(args.weights, jax.numpy.dtype(args.dtype))
    devices = choose_devices(args.world, cfg)
    world, platform = len(devices), devices[0].platform
    if args.implementation == "fused" and platform != "gpu":
        raise UsageError(f"--implementation fused needs CUDA GPUs, and JAX finds only {platform} devices")

    prompts = args.prompt or list(PROMPTS)
    batch = max(len(prompts), args.batch or 0)
    batch += -batch % world  # The residual stream is sharded over sequences.
    padded, lengths = encode_prompts(prompts, batch, args.tokens, cfg)

    where = f"{world} virtual CPU devices" if platform == "cpu" else f"{world} x {devices[0].device_kind}"
    console.print(f"{where}, {args.dtype}, {batch} sequences")
    mesh = Mesh(np.array(devices), ("tp",))
    of_models = generate_published(args.weights, padded, lengths, args.tokens, params["embed"].dtype, mesh)
    reference = generate(params, padded, lengths, args.tokens, cfg, mesh, "xla")
    implementation = None if args.implementation == "auto" else args.implementation
    result = generate(params, padded, lengths, args.tokens, cfg, mesh, implementation)
    chosen = args.implementation
    if implementation is None:
        chosen = "auto: fused" if count(result.step, KERNEL) else "auto: xla"
    ways = {"models": of_models, "xla": reference, chosen: result}
    if not cfg.n_experts:  # which decode_step does not take
        # What is neither one sequence nor in bfloat16 takes XLA.
        ways["decode_step"] = generate(params, padded, lengths, args.tokens, cfg, mesh, None, whole=True)

    tokenizer = Tokenizer(args.weights)
    for prompt, tokens in zip(prompts, of_models.tokens[0, : len(prompts)], strict=True):
        text = tokenizer.decode(tokens.tolist())
        console.print(Rule(style="dim"), Text.assemble((prompt, "bold"), text))

    table = Table("implementation", "prefill", "decode", "tokens/s", "fused kernel calls per decode step")
    for name, timed in ways.items():
        per_step = timed.decode_s / max(1, args.tokens - 1)
        table.add_row(
            name,
            f"{1e3 * timed.prefill_s:.1f} ms",
            f"{1e3 * per_step:.2f} ms/step",
            f"{batch / per_step:.0f}",
            str(count(timed.step, KERNEL)) if timed.step else "",
        )
    console.print(table)

    # All runs count, the warm-up too: a kernel that races with its neighbours need not fail every time.
    exact, right = args.dtype == "float32", True
    for name in (name for name in ways if name != "xla"):
        plain, found = np.broadcast_arrays(reference.tokens[:1], ways[name].tokens)
        right &= compare(plain, found, ("xla", name), exact, console)
    if right and platform == "cpu" and implementation is None and min(world, args.tokens) > 1:
        n = min(SIMULATED_TOKENS, args.tokens)
        generator = Generator(params, padded[:world], lengths[:world], n, cfg, mesh, "simulate")
        right = show_kernels(generator, reference.step, reference.tokens[0, :world, :n], exact, args.picture, console)
    return 0 if right else 1


def main(args: argparse.Namespace, run: Callable[[argparse.Namespace, Console], int]) -> int:
    """Runs an example on GPUs, or on virtual CPU devices; returns the exit status."""
    # This has to come before the first look at any device, when nobody knows yet whether there are GPUs; it is safe
    # because it leaves them alone: jax.devices() lists the CPUs only where it finds nothing better.
    jax.config.update("jax_num_cpu_devices", max(WORLDS[0], args.world or 0))
    try:
        return run(args, Console(highlight=False))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(parse_args(), run))
