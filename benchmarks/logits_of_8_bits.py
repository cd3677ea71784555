"""How far the logits of a decoder of two layers are from those of f32, with products of 16 and of 8 bits.

    python benchmarks/logits_of_8_bits.py                    # on a CPU, half a minute

Weights are random, in the proportions of Llama 3 (SwiGLU, grouped queries, RMSNorm), with some channels that are larger
than others, as trained models have them. Products of all weights have operands in the dtype named, each activation and
weight with scales of its rows or blocks of the contracted dimension, by `jaxtaxfree.quantize` and the operations'
references; attention and norms are f32. "bf16" rounds operands and results. Reported are, over all tokens, the root
mean square of the difference over that of the logits, the divergence of the next token's distribution (nats), and how
often its most likely token is the same.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxtaxfree as jtf
from jaxtaxfree.ops.scaled import Scaled

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY, TOKENS = 2, 1024, 8, 2, 128, 3584, 8192, 256
# A dtype, and of what lhs and rhs [N, K] have one scale.
KINDS: dict[str, tuple[str, Any, Any]] = {
    "bf16": ("bfloat16", None, None),
    "e4m3 rows": ("float8_e4m3fn", (1, -1), (1, -1)),
    "e4m3 blocks": ("float8_e4m3fn", (1, 128), (128, 128)),
    "e5m2 rows": ("float8_e5m2", (1, -1), (1, -1)),
    "int8 rows": ("int8", (1, -1), (1, -1)),
}

type Product = Callable[[jax.Array, jax.Array], jax.Array]


def product_of(kind: str) -> Product:
    """x [T, K] by w [N, K]."""
    dtype, of_rows, of_weights = KINDS[kind]

    def rounded(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = x.astype(dtype), w.astype(dtype)
        return jnp.matmul(x, w.T, preferred_element_type=jnp.float32).astype(jnp.bfloat16).astype(jnp.float32)

    def scaled(x: jax.Array, w: jax.Array) -> jax.Array:
        (x, x_scale), (w, w_scale) = jtf.quantize(x, dtype, block=of_rows), jtf.quantize(w, dtype, block=of_weights)
        out = Scaled(x, w.T, x_scale, w_scale.T).matmul("highest")
        return out.astype(jnp.bfloat16).astype(jnp.float32)

    return rounded if of_rows is None else scaled


def exact(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w.T, precision="highest")


def weights(key: jax.Array) -> dict[str, Any]:
    """Normal numbers, [N, K] each; inputs of a product have channels of other sizes."""

    def normal(n: int, k: int) -> jax.Array:
        nonlocal key
        key, own, of_channels = jax.random.split(key, 3)
        channels = jnp.exp(0.5 * jax.random.normal(of_channels, (k,)))
        return jax.random.normal(own, (n, k)) * channels * k**-0.5

    layers = [
        {
            "qkv": normal((HEADS + 2 * KV_HEADS) * HEAD, WIDTH),
            "o": normal(WIDTH, HEADS * HEAD),
            "gate_up": normal(2 * INNER, WIDTH),
            "down": normal(WIDTH, INNER),
        }
        for _ in range(LAYERS)
    ]
    return {"embedding": normal(VOCABULARY, WIDTH) * WIDTH**0.5, "layers": layers, "head": normal(VOCABULARY, WIDTH)}


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def attend(qkv: jax.Array) -> jax.Array:
    q, k, v = jnp.split(qkv.reshape(len(qkv), -1, HEAD), [HEADS, HEADS + KV_HEADS], axis=1)
    return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].reshape(len(qkv), -1)


def logits(params: dict[str, Any], tokens: jax.Array, product: Product) -> jax.Array:
    x = params["embedding"][tokens]
    for layer in params["layers"]:
        x = x + product(attend(product(norm(x), layer["qkv"])), layer["o"])
        gate, up = jnp.split(product(norm(x), layer["gate_up"]), 2, axis=-1)
        x = x + product(jax.nn.silu(gate) * up, layer["down"])
    return product(norm(x), params["head"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2, help="models (default: %(default)s)")
    options = parser.parse_args(arguments)
    for seed in range(options.seeds):
        params = weights(jax.random.key(seed))
        tokens = jax.random.randint(jax.random.key(100 + seed), (TOKENS,), 0, VOCABULARY)
        wanted = logits(params, tokens, exact)
        likely = jax.nn.log_softmax(wanted)
        for kind in KINDS:
            found = logits(params, tokens, product_of(kind))
            error = jnp.sqrt(jnp.mean((found - wanted) ** 2) / jnp.mean(wanted**2))
            divergence = jnp.mean(jnp.sum(jnp.exp(likely) * (likely - jax.nn.log_softmax(found)), axis=-1))
            same = jnp.mean(jnp.argmax(found, -1) == jnp.argmax(wanted, -1))
            print(
                f"model {seed}, {kind}: error {error:.1e}, divergence {divergence:.1e}, same token {same:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
