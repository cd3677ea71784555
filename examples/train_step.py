"""One step of training the demo's transformer, tensor parallel, with every collective fused or of jaxtaxfree.

    python examples/train_step.py
    python examples/train_step.py --dtype bfloat16 --batch 32 --length 256

The forward pass is that of decode_loop.py's prompts: an all-gather in the product before each block, a reduce-scatter
in the product after it. Backward each product turns into others of the same kind, so that no activation or gradient of
one is gathered or scattered by itself. What is left is small: the softmax over a vocabulary that the ranks share out
(`jaxtaxfree.all_gather` of two numbers a token), and the gradients of what every rank has (`jaxtaxfree.psum`).

The step is taken twice, by plain XLA and by the chosen implementation; loss, gradients and new parameters must agree.
It takes four GPUs where there are four, and four virtual CPU devices where there is none. The model is in
transformer.py; train.py has the loss on one device, and the optimiser.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import published
import train
import transformer
from decode_loop import WEIGHTS, UsageError, choose_devices, main
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table
from transformer import Config, Params

import jaxtaxfree as jtf

TIMED_STEPS = 5
LEARNING_RATE = 1e-3
# Relative errors (norm of the difference over the norm) of gradients that are summed in another order.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def loss_share(
    params: Params, rows: jax.Array, cfg: Config, axis_name: str = "tp", implementation: str | None = None
) -> jax.Array:
    """This rank's share of the mean cross-entropy in bits per byte; the shares add up to `train.loss_fn`.

    Args:
      params: this rank's shards.
      rows: all sequences [B, T + 1], the same on every rank.
    """
    (b, t), (rank, world) = (rows.shape[0], rows.shape[1] - 1), (lax.axis_index(axis_name), lax.axis_size(axis_name))
    own = lax.dynamic_slice_in_dim(rows[:, :-1], rank * (b // world), b // world)
    length = transformer.cache_length(t, world)
    x, _ = transformer.read_prompts(params, own, b, length, cfg, axis_name, implementation)
    logits = transformer.logits_shard(params, x.reshape(-1, cfg.d_model), axis_name, implementation)  # [B * T, V / W]

    own_log_sum = jax.nn.logsumexp(logits, axis=-1)
    place = rows[:, 1:].reshape(-1) - rank * logits.shape[1]
    is_own = (place >= 0) & (place < logits.shape[1])
    own_logit = jnp.take_along_axis(logits, jnp.where(is_own, place, 0)[:, None], axis=-1)[:, 0]
    # Two numbers a token of each part of the vocabulary: [W, 2, B * T].
    parts = jnp.stack([own_log_sum, jnp.where(is_own, own_logit, 0)])
    parts = jtf.all_gather(parts, axis_name, implementation=implementation)
    log_sum, logit = jax.nn.logsumexp(parts[:, 0], axis=0), jnp.sum(parts[:, 1], axis=0)
    # Every rank has the loss of all tokens.
    return jnp.mean(log_sum - logit) / (math.log(2) * world)


def loss_and_gradients(
    params: Params, rows: jax.Array, cfg: Config, axis_name: str = "tp", implementation: str | None = None
) -> tuple[jax.Array, Params]:
    """The loss, and its gradients for this rank's shards."""
    specs = transformer.param_specs(cfg, axis_name)
    # Of what every rank has, each computes a part of the gradient. Left to JAX, their sum would be XLA's.
    own = jax.tree.map(lambda p, spec: p if axis_name in spec else lax.pcast(p, axis_name, to="varying"), params, specs)
    loss, grads = jax.value_and_grad(loss_share)(own, rows, cfg, axis_name, implementation)
    psum = functools.partial(jtf.psum, axis_name=axis_name, implementation=implementation)
    return psum(loss), jax.tree.map(lambda g, spec: g if axis_name in spec else psum(g), grads, specs)


def step(
    params: Params, moments: train.Moments, rows: jax.Array, cfg: Config, implementation: str | None = None
) -> tuple[Params, train.Moments, jax.Array, Params]:
    """One step of training: new parameters and moments, the loss and the gradients of the old ones."""
    loss, grads = loss_and_gradients(params, rows, cfg, implementation=implementation)
    return *train.adam(params, moments, grads, jnp.int32(0), jnp.float32(LEARNING_RATE)), loss, grads


def take_step(
    params: Params, rows: np.ndarray, cfg: Config, mesh: Mesh, implementation: str | None
) -> tuple[float, Params, Params, float]:
    """The loss, the gradients, the new parameters, and the seconds that a step takes."""
    specs = transformer.param_specs(cfg)
    state_specs = (specs, (specs, specs))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(*state_specs, P()), out_specs=(*state_specs, P(), specs))
    def run(params, moments, rows):
        return step(params, moments, rows, cfg, implementation)

    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    params, rows = jax.tree.map(put, params, specs), put(rows, P())
    moments = train.no_moments(params)
    new, _, loss, grads = jtf.block_until_ready(run(params, moments, rows))  # This one compiles and warms up.
    seconds = []
    for _ in range(TIMED_STEPS):
        start = time.perf_counter()
        jtf.block_until_ready(run(params, moments, rows))
        seconds.append(time.perf_counter() - start)
    return float(loss), jax.device_get(grads), jax.device_get(new), min(seconds)


def relative_errors(tree: Any, expected: Any) -> dict[str, float]:
    """Of each array, by its place in the tree."""

    def error(x: Any, y: Any) -> float:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        return float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30))

    errors = jax.tree.map(error, tree, expected)
    return {jax.tree_util.keystr(path): value for path, value in jax.tree_util.tree_leaves_with_path(errors)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Take one training step with fused kernels and with plain XLA, and check that they agree."
    )
    parser.add_argument(
        "--implementation",
        choices=("auto", "fused", "xla", "simulate"),
        default="auto",
        help="of the operations, compared with xla; auto is the fused kernels where they are not known to be slower",
    )
    parser.add_argument("--world", type=int, help="devices to use (default: the most of 4, 2 and 1 that there are)")
    parser.add_argument("--batch", type=int, default=8, help="sequences (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="bytes of a sequence (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=tuple(TOLERANCE), default="float32", help="of weights and activations (default: %(default)s)"
    )
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="a folder written by train.py")
    return parser.parse_args()


def run(args: argparse.Namespace, console: Console) -> int:
    if not published.is_there(args.weights):
        raise UsageError(f"there are no weights at {args.weights}; train them with: python examples/train.py")
    params, cfg, _ = published.load(args.weights, jnp.dtype(args.dtype))
    devices = choose_devices(args.world, cfg)
    if args.implementation == "fused" and devices[0].platform != "gpu":
        raise UsageError(f"--implementation fused needs CUDA GPUs, and JAX finds only {devices[0].platform} devices")
    if args.batch < 1 or args.batch % len(devices):
        raise UsageError(f"--batch {args.batch} is not a multiple of the {len(devices)} devices")
    if not 1 <= args.length <= cfg.context:
        raise UsageError(f"--length {args.length} is not from 1 to the model's context of {cfg.context}")
    training, _ = train.corpus()
    rows = train.sample(training, args.batch, args.length, np.random.default_rng(0))

    mesh = Mesh(np.array(devices), ("tp",))
    implementation = None if args.implementation == "auto" else args.implementation
    want_loss, want_grads, want_params, want_seconds = take_step(params, rows, cfg, mesh, "xla")
    loss, grads, new, seconds = take_step(params, rows, cfg, mesh, implementation)

    console.print(f"{len(devices)} x {devices[0].device_kind}, {args.dtype}, {args.batch} x {args.length} bytes")
    table = Table("implementation", "bits per byte", "step")
    table.add_row("xla", f"{want_loss:.5f}", f"{1e3 * want_seconds:.2f} ms")
    table.add_row(args.implementation, f"{loss:.5f}", f"{1e3 * seconds:.2f} ms")
    console.print(table)
    errors = {"gradient": relative_errors(grads, want_grads), "new": relative_errors(new, want_params)}
    errors["loss"] = {"": abs(loss - want_loss) / want_loss}
    worst, what = max((error, f"{kind} {name}".strip()) for kind, of in errors.items() for name, error in of.items())
    console.print(f"The largest relative error, of {what}, is {worst:.1e}.")
    if not worst <= TOLERANCE[args.dtype]:
        print(f"error: {what} differs by more than {TOLERANCE[args.dtype]:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_args(), run))
