"""`python -m jaxtaxfree generate`: text of a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.rule import Rule

from jaxtaxfree.models.config import DTYPES
from jaxtaxfree.models.errors import ModelError
from jaxtaxfree.models.model import CACHES, Model, load
from jaxtaxfree.models.sampling import Sampling
from jaxtaxfree.models.tokenizer import Tokenizer
from jaxtaxfree.ops.decode_step.call import EIGHT_BITS
from jaxtaxfree.target import memory_bandwidth_of

IMPLEMENTATIONS = ("auto", "fused", "xla", "simulate")
CPU_DEVICES = 4  # where JAX finds no GPU


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that say which model, where, and which prompts."""
    parser.add_argument("folder", type=Path, help="of a checkpoint: config.json, safetensors, tokenizer.json")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be repeated")
    parser.add_argument("--ids", action="append", default=[], metavar="1,2,3", help="a prompt as numbers of tokens")
    parser.add_argument("--world", type=int, metavar="N", help="devices to use (default: all)")
    parser.add_argument(
        "--implementation", choices=IMPLEMENTATIONS, default="auto", help="of the operations (default: %(default)s)"
    )
    parser.add_argument("--cache", choices=CACHES, help="by heads, along the sequence, or in pages (default: heads)")
    parser.add_argument("--cache-dtype", choices=EIGHT_BITS, help="of the cache, with scales (default: --dtype)")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and activations (default: the checkpoint's)")
    parser.add_argument(
        "--weights", choices=EIGHT_BITS, help="of the matrices of layers, with scales (default: --dtype)"
    )
    parser.add_argument(
        "--quantize-activations", action="store_true", help="to the 8 bits of --weights, in front of each matrix"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `generate`."""
    add_model_arguments(parser)
    parser.add_argument("--batch", type=Path, metavar="FILE", help="a prompt in each line, all of them at once")
    parser.add_argument("--chat", action="store_true", help="each prompt is what a user says, in the model's template")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="at most so many (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 is the likeliest token (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="of the K likeliest tokens (default: of all)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="of the likeliest whose sum is P")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing (default: %(default)s)")
    parser.add_argument("--ignore-stop", action="store_true", help="go on behind a stop token, as a benchmark does")


def main(options: argparse.Namespace) -> int:
    """Prints the text. Returns the exit code."""
    return reporting(_generate, options)


def reporting(run: object, options: argparse.Namespace) -> int:
    """Runs a command; what it cannot do is one sentence, and exit code 2."""
    # Before the first look at devices; it leaves GPUs alone.
    jax.config.update("jax_num_cpu_devices", max(CPU_DEVICES, options.world or 0))
    try:
        return run(options, Console(highlight=False))  # pyrefly: ignore[not-callable]
    except (ModelError, ValueError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def mesh_of(options: argparse.Namespace) -> Mesh:
    """The devices that were asked for; raises ModelError if there are too few."""
    devices = jax.devices()
    world = options.world
    if world is None:
        world = len(devices) if devices[0].platform != "cpu" else 1
    if not 1 <= world <= len(devices):
        raise ModelError(
            f"--world {world} needs {world} devices, and JAX finds {len(devices)} ({devices[0].platform})."
        )
    return Mesh(np.array(devices[:world]), ("tp",))


def load_showing(options: argparse.Namespace, mesh: Mesh, console: Console) -> Model:
    """Loads the model, with a bar."""
    columns = TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        return load(
            options.folder,
            mesh,
            dtype=None if options.dtype is None else DTYPES[options.dtype],
            cache=options.cache,
            cache_dtype=options.cache_dtype,
            weights=options.weights,
            quantize_activations=options.quantize_activations,
            implementation=None if options.implementation == "auto" else options.implementation,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def encoded(options: argparse.Namespace, tokenizer: Tokenizer | None) -> list[list[int]]:
    """All prompts as tokens."""
    try:
        prompts = [[int(token) for token in text.split(",")] for text in options.ids]
    except ValueError:
        raise ModelError(f"--ids takes numbers with commas between them, not {options.ids[-1]!r}.") from None
    if none := [token for prompt in prompts for token in prompt if not 0 <= token < 1 << 31]:
        raise ModelError(f"--ids has {none[0]}, which is no number of a token.")
    texts = list(options.prompt)
    if batch := getattr(options, "batch", None):
        if not batch.is_file():
            raise ModelError(f"--batch {batch} is no file.")
        texts += [line for line in batch.read_text(encoding="utf-8").splitlines() if line.strip()]
    if texts:
        tokenizer = tokenizer or Tokenizer(options.folder)
        if getattr(options, "chat", False):
            prompts += [tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
        else:
            prompts += [tokenizer.encode(text) for text in texts]
    if any(not prompt for prompt in prompts):
        raise ModelError("a prompt needs one token or more.")
    return prompts


def padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as i32[B, T], padded on the right, and their lengths i32[B]."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = prompt
    return tokens, lengths


def _generate(options: argparse.Namespace, console: Console) -> int:
    tokenizer = Tokenizer(options.folder) if (options.folder / "tokenizer.json").is_file() else None
    prompts = encoded(options, tokenizer)
    if not prompts:
        raise ModelError("there is no prompt: give --prompt, --ids or --batch.")
    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    model = load_showing(options, mesh_of(options), console)
    tokens, lengths = padded(prompts)
    stop = () if options.ignore_stop else model.config.stop
    times, made = [], []
    stream = model.stream(tokens, options.tokens, lengths=lengths, sampling=sampling, stop=stop, seed=options.seed)
    befores = [tokenizer.decode(prompt) if tokenizer else f"{','.join(map(str, prompt))} ->" for prompt in prompts]
    alone = _Text(tokenizer, stop) if len(prompts) == 1 else None
    with console.status("compiling"):
        model.compile(lengths, options.tokens, sampling)
    begin = time.perf_counter()
    # Text is printed as it is: a console would leave characters out.
    if alone:
        print(befores[0], end="", flush=True)
    with contextlib.nullcontext() if alone else console.status("") as status:
        for token in stream:
            times.append(time.perf_counter())
            made.append(token)
            if alone:
                print(alone.add(int(token[0])), end="", flush=True)
            elif status:
                status.update(f"{len(made)} of {options.tokens} tokens")
    if alone:
        print(alone.rest())
    else:
        for before, found in zip(befores, np.stack(made, axis=1)):
            text = _Text(tokenizer, stop)
            shown = [*(text.add(int(token)) for token in _until(found, stop)), text.rest()]
            console.print(Rule(style="dim"))
            print(before + "".join(shown))
    console.print(Rule(style="dim"))
    console.print(summary(model, lengths, options.tokens, sampling, begin, times), soft_wrap=True)
    return 0


def _until(tokens: np.ndarray, stop: Sequence[int]) -> Iterator[int]:
    """The tokens, with the first stop token and not those behind it."""
    for token in tokens:
        yield token
        if token in stop:
            return


class _Text:
    """Text as its tokens come: characters whose bytes are not complete wait."""

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[int]):
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens: list[int] = []
        self._shown = ""

    def add(self, token: int) -> str:
        """What can be shown because of one more token."""
        if self._tokenizer is None:
            return f" {token}"
        if token in self._stop:
            return ""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        return "" if text.endswith("\ufffd") else self._new(text)

    def rest(self) -> str:
        """What has been waiting at the end."""
        return self._new(self._tokenizer.decode(self._tokens)) if self._tokenizer else ""

    def _new(self, text: str) -> str:
        new, self._shown = text[len(self._shown) :], text
        return new


def summary(
    model: Model, lengths: np.ndarray, steps: int, sampling: Sampling, begin: float, times: Sequence[float]
) -> str:
    """One line: how fast it was, and what a step could take at best.

    Args:
      begin, times: seconds of a clock, when it began and when each token was there.
    """
    batch, device = len(lengths), model.mesh.devices.flat[0]
    where = "virtual CPU" if device.platform == "cpu" else device.device_kind
    parts = [f"{batch} x {len(times)} tokens on {model.world} x {where}", f"the first after {times[0] - begin:.2f} s"]
    # The first two steps compile programs, or wait for them.
    if len(times) > 3:
        step = (times[-1] - times[2]) / (len(times) - 3)
        parts += [f"{batch / step:.1f} tokens/s", f"{1e3 * step:.3g} ms a step"]
        if bandwidth := memory_bandwidth_of(device.device_kind):
            nbytes = model.step_bytes(batch, int(lengths.mean()) + len(times))
            floor = nbytes / bandwidth
            parts.append(
                f"{floor / step:.2f} of the floor ({nbytes / 1e9:.3g} GB a rank at {bandwidth / 1e12:.3g} TB/s)"
            )
    kernels = model.kernels(model.room(lengths, steps), sampling) if device.platform != "cpu" else 0
    parts.append(f"{kernels} fused kernels in the program of a step" if kernels else "nothing fused: plain XLA")
    return ", ".join(parts) + "."
