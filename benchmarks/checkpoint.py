"""Tokens a second of a published model on several GPUs, from its files to its tokens.

    python benchmarks/checkpoint.py FOLDER                  # of a checkpoint that is there
    python benchmarks/checkpoint.py /tmp/random --layers 4  # of random weights of --sizes, written first

It loads the checkpoint once, and generates with each implementation; all programs are compiled at once. Times are of a
step, which is the mean over the steps behind the first ones, as the host sees it: one program a step, the next one
launched before a token is read. Of prompts the best time is shown. Tokens are judged by XLA's logits of the same ones.
An indented line is what `python -m jaxtaxfree generate` says.
"""

import argparse
import functools
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks.layout import Row
from benchmarks.rows import environment, write_rows
from jaxtaxfree import models
from jaxtaxfree.models import commands
from jaxtaxfree.target import memory_bandwidth_of

SCALE = 0.02  # of random weights
PROMPTS = 5  # times that a prompt is read
LLAMA_3_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 48, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
SIZES = {"llama-3-8b": LLAMA_3_8B, "qwen3-30b-a3b": QWEN3_30B_A3B}


def tensors_of(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the tensors of a Llama, or of a Qwen 3 with experts."""
    d, f, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    h, experts = config.get("head_dim") or d // heads, config.get("num_experts", 0)
    q, kv = heads * h, config["num_key_value_heads"] * h
    layer = [
        ("input_layernorm", (d,)), ("post_attention_layernorm", (d,)), ("self_attn.q_proj", (q, d)),
        ("self_attn.k_proj", (kv, d)), ("self_attn.v_proj", (kv, d)), ("self_attn.o_proj", (d, q)),
    ]  # fmt: skip
    if experts:
        f = config["moe_intermediate_size"]
        layer += [("self_attn.q_norm", (h,)), ("self_attn.k_norm", (h,)), ("mlp.gate", (experts, d))]
    for mlp in (f"mlp.experts.{expert}" for expert in range(experts)) if experts else ["mlp"]:
        layer += [(f"{mlp}.gate_proj", (f, d)), (f"{mlp}.up_proj", (f, d)), (f"{mlp}.down_proj", (d, f))]
    yield "model.embed_tokens.weight", (config["vocab_size"], d)
    for i in range(config["num_hidden_layers"]):
        for name, shape in layer:
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


def timed(model: models.Model, tokens: np.ndarray, steps: int) -> tuple[str, float, list[float], np.ndarray]:
    """What the command says of it, the seconds of a prompt at best, when each token was there, and the tokens."""
    list(itertools.islice(model.stream(tokens, steps), 4))  # both programs have run
    prompts = []
    for _ in range(PROMPTS):
        begin = time.perf_counter()
        next(model.stream(tokens, steps))
        prompts.append(time.perf_counter() - begin)
        time.sleep(0.02)  # the step behind it ends
    begin, times, made = time.perf_counter(), [], []
    for token in model.stream(tokens, steps):
        times.append(time.perf_counter())
        made.append(token)
    lengths = np.full(len(tokens), tokens.shape[1])
    said = commands.summary(model, lengths, steps, models.Sampling(), begin, times)
    return said, min(prompts), times, np.stack(made, 1)


def margin(judge: models.Model, tokens: np.ndarray, made: np.ndarray) -> float:
    """By how much the judge's likeliest tokens are likelier than those made, of its largest logit, at worst.

    Tokens of random weights agree for a while at best: two logits are soon closer than a rounding.
    """
    logits = judge.logits(np.concatenate([tokens, made[:, :-1]], axis=1))[:, tokens.shape[1] - 1 :]
    chosen = jnp.take_along_axis(logits, jnp.asarray(made)[..., None], axis=-1)[..., 0]
    return float(jnp.max(jnp.max(logits, axis=-1) - chosen) / jnp.max(jnp.abs(logits)))


def loaded(folder: pathlib.Path, mesh: Mesh, **how: Any) -> tuple[models.Model, Row]:
    """The model, and how long that took, with how much of the host's memory."""
    some = jax.device_put(np.zeros(1 << 20, np.uint8), NamedSharding(mesh, P()))  # what drivers take is not the model's
    jax.block_until_ready(some)
    before, most, begin = anonymous(), 0, time.perf_counter()

    def watch(done: int, total: int) -> None:
        nonlocal most
        del done, total
        most = max(most, anonymous())

    model = models.load(folder, mesh, progress=watch, **how)
    seconds, nbytes = time.perf_counter() - begin, sum(w.nbytes for w in model.params.values())
    kept = anonymous() - before
    return model, {
        "loaded_bytes": nbytes,
        "loaded_s": round(seconds, 3),
        "host_bytes": max(0, most - before),
        "host_bytes_kept": max(0, kept),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--sizes", choices=SIZES, default="llama-3-8b", help="of the random checkpoint")
    parser.add_argument("--layers", type=int, default=4, help="of the random checkpoint")
    parser.add_argument("--world", type=int)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--implementations", nargs="+", default=["xla", "auto"])
    parser.add_argument("--weights", help="the matrices of layers in int8 or float8_e4m3fn")
    parser.add_argument("--quantize-activations", action="store_true", help="to the 8 bits of --weights")
    parser.add_argument("--json", type=pathlib.Path, help="write the rows here")
    parser.add_argument("--commit", metavar="HASH", help="of this code, where it is no git checkout")
    options = parser.parse_args()
    if not (options.folder / "config.json").is_file():
        write_random(options.folder, SIZES[options.sizes] | {"num_hidden_layers": options.layers})
    devices = jax.devices()[: options.world]
    how = {"weights": options.weights, "quantize_activations": options.quantize_activations}
    first, load = loaded(options.folder, Mesh(np.array(devices), ("tp",)), **how)
    say = functools.partial(print, flush=True)
    say(
        f"{len(devices)} x {devices[0].device_kind}: loaded {load['loaded_bytes'] / 1e9:.2f} GB in "
        f"{load['loaded_s']:.1f} s, with at most {load['host_bytes'] / 1e9:.2f} GB of the host, of which "
        f"{load['host_bytes_kept'] / 1e9:.2f} are kept"
    )
    by = {name: first.by(None if name == "auto" else name) for name in options.implementations}
    judge, started = first.by("xla"), time.perf_counter()
    with ThreadPoolExecutor(2 + len(by) * len(options.batch)) as pool:  # all at once
        cases = itertools.product(by.values(), options.batch)
        made = [pool.submit(model.compile, [options.prompt] * batch, options.steps) for model, batch in cases]
        for batch in options.batch:
            judge.logits(np.zeros((batch, options.prompt + options.steps - 1), np.int32))
        for done in made:
            done.result()
    say(f"compiled in {time.perf_counter() - started:.1f} s")
    bandwidth = memory_bandwidth_of(devices[0].device_kind)
    rows: list[Row] = []
    line = "{:>9}  {:14}  {:>10}  {:>8}  {:>8}  {:>12}  {:>13}".format
    say(line("sequences", "implementation", "prompt, ms", "step, ms", "tokens/s", "of the floor", "tokens agree"))
    for batch in options.batch:
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, first.config.spec.vocab, (batch, options.prompt)).astype(np.int32)
        wanted = None
        for name, model in by.items():
            said, prompt, times, made = timed(model, tokens, options.steps)
            step = (times[-1] - times[2]) / (len(times) - 3)
            wanted = made if wanted is None else wanted
            floor = model.step_bytes(batch, options.prompt + options.steps) / bandwidth if bandwidth else 0
            share, agree = f"{floor / step:.2f}" if bandwidth else "", round(float(np.mean(made == wanted)), 4)
            row = batch, name, f"{1e3 * prompt:.1f}", f"{1e3 * step:.3f}", f"{batch / step:.0f}", share
            say(line(*row, f"{agree:.2f}"))
            worst = round(margin(judge, tokens, made), 5)
            say(f"  {said}\n  A token was at most {worst} of the largest logit less likely than XLA's likeliest.")
            rows.append(
                {
                    "op": "generate",
                    "sizes": options.sizes,
                    "layers": first.spec.layers,
                    "b": batch,
                    "prompt": options.prompt,
                    "steps": options.steps,
                    "dtype": str(first.dtype),
                    "world": len(devices),
                    "implementation": name,
                    "prompt_us": round(1e6 * prompt, 1),
                    "median_us": round(1e6 * step, 1),
                    "floor_us": round(1e6 * floor, 1),
                    "ratio_to_floor": round(floor / step, 4),
                    "tokens_agree": agree,
                    "worst_margin": worst,
                    "said": said,
                    **how,
                    **load,
                    **environment(),
                    **({"commit": options.commit} if options.commit else {}),
                }
            )
            if options.json:
                write_rows(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
