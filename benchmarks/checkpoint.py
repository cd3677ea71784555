"""Tokens a second of a published model on several GPUs, from its files to its tokens.

    python benchmarks/checkpoint.py FOLDER                  # of a checkpoint that is there
    python benchmarks/checkpoint.py /tmp/random --layers 4  # of random weights at Llama 3 8B's sizes, written first

It loads the checkpoint once, and generates with each implementation. Times are of a step, which is the mean over the
steps behind the first ones, as the host sees it: one program a step, the next one launched before a token is read.
"""

import argparse
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterator

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from jaxtaxfree import models
from jaxtaxfree.target import memory_bandwidth_of

SCALE = 0.02  # of random weights
LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def tensors_of(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of a Llama's tensors."""
    d, f, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    h = config.get("head_dim") or d // heads
    q, kv = heads * h, config["num_key_value_heads"] * h
    yield "model.embed_tokens.weight", (config["vocab_size"], d)
    for i in range(config["num_hidden_layers"]):
        for name, shape in (
            ("input_layernorm", (d,)), ("post_attention_layernorm", (d,)), ("self_attn.q_proj", (q, d)),
            ("self_attn.k_proj", (kv, d)), ("self_attn.v_proj", (kv, d)), ("self_attn.o_proj", (d, q)),
            ("mlp.gate_proj", (f, d)), ("mlp.up_proj", (f, d)), ("mlp.down_proj", (d, f)),
        ):  # fmt: skip
            yield f"model.layers.{i}.{name}.weight", shape
    yield "model.norm.weight", (d,)
    yield "lm_head.weight", (config["vocab_size"], d)


def write_random(folder: pathlib.Path, config: dict) -> None:
    """A checkpoint whose weights are the same random numbers over and over, and whose norms are 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in tensors_of(config):
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    some = (SCALE * np.random.default_rng(0).standard_normal(1 << 22, np.float32)).astype(ml_dtypes.bfloat16).tobytes()
    one = np.ones(1, ml_dtypes.bfloat16).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in (shape for _, shape in tensors_of(config)):
            left = 2 * int(np.prod(shape))
            block = one * shape[0] if len(shape) == 1 else some
            while left:
                left -= file.write(block[: min(left, len(block))])


def anonymous() -> int:
    """Bytes of this process that are in no file."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def timed(model: models.Model, tokens: np.ndarray, steps: int) -> tuple[float, float, np.ndarray]:
    """Seconds of the prompt, seconds of a step, and the tokens."""
    list(itertools.islice(model.stream(tokens, steps), 4))  # compiles both programs
    begin, times, made = time.perf_counter(), [], []
    for token in model.stream(tokens, steps):
        times.append(time.perf_counter())
        made.append(token)
    return times[0] - begin, (times[-1] - times[2]) / (len(times) - 3), np.stack(made, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=4, help="of the random checkpoint")
    parser.add_argument("--world", type=int)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--implementations", nargs="+", default=["xla", "auto"])
    options = parser.parse_args()
    if not (options.folder / "config.json").is_file():
        write_random(options.folder, LLAMA_3_8B | {"num_hidden_layers": options.layers})
    devices = jax.devices()[: options.world]
    mesh = Mesh(np.array(devices), ("tp",))
    before, most, begin = anonymous(), 0, time.perf_counter()

    def watch(done: int, total: int) -> None:
        nonlocal most
        del done, total
        most = max(most, anonymous())

    model = models.load(options.folder, mesh, progress=watch)
    seconds, nbytes = time.perf_counter() - begin, sum(w.nbytes for w in model.params.values())
    print(
        f"{len(devices)} x {devices[0].device_kind}: loaded {nbytes / 1e9:.2f} GB in {seconds:.1f} s, with at most "
        f"{max(0, most - before) / 1e9:.2f} GB of the host"
    )
    bandwidth = memory_bandwidth_of(devices[0].device_kind)
    line = "{:>9}  {:14}  {:>10}  {:>8}  {:>8}  {:>12}  {:>13}".format
    print(line("sequences", "implementation", "prompt, ms", "step, ms", "tokens/s", "of the floor", "tokens agree"))
    for batch in options.batch:
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, model.config.spec.vocab, (batch, options.prompt)).astype(np.int32)
        first = None
        for name in options.implementations:
            model = model.by(None if name == "auto" else name)
            prompt, step, made = timed(model, tokens, options.steps)
            first = made if first is None else first
            floor = model.step_bytes(batch, options.prompt + options.steps // 2) / bandwidth if bandwidth else 0
            share = f"{floor / step:.2f}" if bandwidth else ""
            row = batch, name, f"{1e3 * prompt:.1f}", f"{1e3 * step:.3f}", f"{batch / step:.0f}", share
            print(line(*row, f"{np.mean(made == first):.2f}"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
