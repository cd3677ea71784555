"""Trains the demo's weights on the English text that ships with Python: `pydoc_data.topics`, the text of help().

    python examples/train.py

The corpus is about 400 kB, small enough for a CPU: the default run takes about a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import functools
import math
import platform
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import published
import transformer
from published import WEIGHTS
from transformer import Config, Params

BATCH = 8
PEAK_LR = 3e-3
WARMUP = 100
WEIGHT_DECAY = 0.1
BETA1, BETA2, EPS = 0.9, 0.99, 1e-8


def corpus() -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on, and the held-out last twentieth.

    Long topics repeat whole paragraphs of the short ones. Only the first copy is kept, or the held-out part would
    mostly be text of the training part.
    """
    kept: dict[str, str] = {}
    for topic in topics.topics.values():
        for paragraph in topic.strip().split("\n\n"):
            kept.setdefault(" ".join(paragraph.split()), paragraph)
    data = np.frombuffer("\n\n".join(kept.values()).encode(), np.uint8)
    split = len(data) * 19 // 20
    return data[:split], data[split:]


def loss_fn(params: Params, rows: jax.Array, cfg: Config) -> jax.Array:
    """Mean cross-entropy, in bits per byte, of rows [B, T + 1]: each byte given those before it in its row."""
    logits = transformer.forward(params, rows[:, :-1], cfg)
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], axis=-1)
    return nats.mean() / math.log(2)


def evaluate(params: Params, data: np.ndarray, cfg: Config, rows: int = 1_000_000) -> float:
    """Bits per byte of the first `rows` windows of `data`, which do not overlap."""
    loss = jax.jit(loss_fn, static_argnums=2)
    width = cfg.context + 1
    windows = data[: len(data) // width * width].reshape(-1, width)[:rows].astype(np.int32)
    # Chunks of one size compile once; the last one is filled from the end and so may repeat a few windows.
    chunk = min(16, len(windows))
    starts = [min(i, len(windows) - chunk) for i in range(0, len(windows), chunk)]
    return float(np.mean([loss(params, windows[i : i + chunk], cfg) for i in starts]))


def learning_rate(step: jax.Array, steps: int) -> jax.Array:
    """Linear warm-up, then a cosine down to zero."""
    warmup = min(WARMUP, steps // 10 + 1)
    progress = jnp.clip((step - warmup) / max(1, steps - warmup), 0, 1)
    return PEAK_LR * jnp.minimum((step + 1) / warmup, 0.5 * (1 + jnp.cos(jnp.pi * progress)))


Moments = tuple[Params, Params]  # running means of the gradients and of their squares


def no_moments(params: Params) -> Moments:
    """Before the first step."""
    return jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)


def adam(
    params: Params, moments: Moments, grads: Params, step: jax.Array, learning_rate: jax.Array
) -> tuple[Params, Moments]:
    """One step of Adam with decoupled weight decay on the matrices. Every parameter is on its own."""
    mean = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, moments[0], grads)
    square = jax.tree.map(lambda s, g: BETA2 * s + (1 - BETA2) * g * g, moments[1], grads)

    def apply(p: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        m_hat, s_hat = m / (1 - BETA1 ** (step + 1.0)), s / (1 - BETA2 ** (step + 1.0))
        decay = WEIGHT_DECAY * p if p.ndim == 2 else 0.0
        return p - learning_rate * (m_hat / (jnp.sqrt(s_hat) + EPS) + decay)

    return jax.tree.map(apply, params, mean, square), (mean, square)


@functools.partial(jax.jit, static_argnames=("cfg", "steps"), donate_argnums=(0, 1))
def update(
    params: Params, moments: Moments, rows: jax.Array, step: jax.Array, *, cfg: Config, steps: int
) -> tuple[Params, Moments, jax.Array]:
    """One step of training on rows [B, T + 1]."""
    loss, grads = jax.value_and_grad(loss_fn)(params, rows, cfg)
    return *adam(params, moments, grads, step, learning_rate(step, steps)), loss


def sample(data: np.ndarray, batch: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Rows [batch, length + 1] from random places of the text."""
    offsets = rng.integers(len(data) - length, size=batch)
    return np.stack([data[i : i + length + 1] for i in offsets]).astype(np.int32)


def train(data: np.ndarray, cfg: Config, steps: int, seed: int, log: Any = print) -> Params:
    params = transformer.init(jax.random.key(seed), cfg)
    moments = no_moments(params)
    rng = np.random.default_rng(seed)
    start, losses = time.perf_counter(), []
    for step in range(steps):
        rows = sample(data, BATCH, cfg.context, rng)
        params, moments, loss = update(params, moments, rows, np.int32(step), cfg=cfg, steps=steps)
        losses.append(float(loss))
        if (step + 1) % 100 == 0 or step + 1 == steps:
            elapsed = time.perf_counter() - start
            log(f"step {step + 1:5d}/{steps}  train {np.mean(losses[-100:]):.3f} bits/byte  {elapsed:.0f} s")
    return params


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the weights of the decode demo on Python's own documentation.")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--experts", type=int, default=0, metavar="E", help="a mixture of so many experts; needs --out")
    args = parser.parse_args()
    if args.experts and args.out == WEIGHTS:
        parser.error("--experts needs --out, because the demo's own weights are no mixture")

    # Two experts of a token have as many columns together as the one MLP has.
    cfg = Config(n_experts=args.experts, d_mlp=Config.d_mlp // 2) if args.experts else Config()
    training, held_out = corpus()
    print(f"{len(training)} bytes to train on, {len(held_out)} held out, {cfg}")
    params = train(training, cfg, args.steps, args.seed, log=functools.partial(print, flush=True))

    # Measure what is written: the weights as stored, in float16.
    stored = jax.tree.map(lambda p: p.astype(jnp.float16).astype(jnp.float32), params)
    train_loss, held_out_loss = evaluate(stored, training, cfg), evaluate(stored, held_out, cfg)
    published.save(
        args.out,
        params,
        cfg,
        corpus=f"pydoc_data.topics of Python {platform.python_version()}",
        steps=str(args.steps),
        seed=str(args.seed),
        train_bits_per_byte=f"{train_loss:.3f}",
        held_out_bits_per_byte=f"{held_out_loss:.3f}",
    )
    print(f"train {train_loss:.3f} bits/byte, held out {held_out_loss:.3f} bits/byte")
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"wrote {args.out}, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
