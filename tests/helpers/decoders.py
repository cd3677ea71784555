"""Published decoders as `DecoderSpec`s, small ones of the same families, and a decoder in float64 that knows no JAX."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

from jaxtaxfree import DecoderSpec, quantize

# The configurations that the models were published with (config.json), as far as a step depends on them.
FAMILIES = {
    "llama-2-7b": DecoderSpec(
        layers=32, d_model=4096, heads=32, kv_heads=32, head_dim=128, d_mlp=11008, vocab=32000, norm_eps=1e-5
    ),
    "llama-3-8b": DecoderSpec(
        layers=32, d_model=4096, heads=32, kv_heads=8, head_dim=128, d_mlp=14336, vocab=128256, norm_eps=1e-5
    ),
    "llama-3-70b": DecoderSpec(
        layers=80, d_model=8192, heads=64, kv_heads=8, head_dim=128, d_mlp=28672, vocab=128256, norm_eps=1e-5
    ),
    "mistral-7b-v0.1": DecoderSpec(
        layers=32, d_model=4096, heads=32, kv_heads=8, head_dim=128, d_mlp=14336, vocab=32000, norm_eps=1e-5,
        windows=(4095,),
    ),
    "qwen2-7b": DecoderSpec(
        layers=28, d_model=3584, heads=28, kv_heads=4, head_dim=128, d_mlp=18944, vocab=152064, qkv_bias=True
    ),
    "qwen2.5-0.5b": DecoderSpec(
        layers=24, d_model=896, heads=14, kv_heads=2, head_dim=64, d_mlp=4864, vocab=151936, qkv_bias=True, tied=True
    ),
    "qwen3-8b": DecoderSpec(
        layers=36, d_model=4096, heads=32, kv_heads=8, head_dim=128, d_mlp=12288, vocab=151936, qk_norm=True
    ),
    "gemma-2-9b": DecoderSpec(
        layers=42, d_model=3584, heads=16, kv_heads=8, head_dim=256, d_mlp=14336, vocab=256000, norm_plus_one=True,
        post_norms=True, windows=(4095, None), score_scale=256**-0.5, score_soft_cap=50.0, activation="gelu_tanh",
        tied=True, embedding_scale=math.sqrt(3584), logit_soft_cap=30.0,
    ),
    "gemma-3-4b": DecoderSpec(
        layers=34, d_model=2560, heads=8, kv_heads=4, head_dim=256, d_mlp=10240, vocab=262208, norm_plus_one=True,
        post_norms=True, qk_norm=True, windows=(1023,) * 5 + (None,), rotary_tables=(0,) * 5 + (1,),
        score_scale=256**-0.5, activation="gelu_tanh", tied=True, embedding_scale=math.sqrt(2560),
    ),
}  # fmt: skip


def tiny(name: str, **sizes: int) -> DecoderSpec:
    """A small decoder of the family: two layers (of Gemma 3, six), 4 or 8 query heads, windows of 3 positions."""
    spec = FAMILIES[name]
    kv_heads = 8 if spec.group == 1 else 4
    small = {
        "layers": max(2, len(spec.windows)),
        "d_model": 32,
        "heads": 8,
        "kv_heads": kv_heads,
        "head_dim": 8,
        "d_mlp": 48,
        "vocab": 64,
    }
    windows = tuple(window and 3 for window in spec.windows)
    scales = {"embedding_scale": math.sqrt(32)} if spec.embedding_scale != 1 else {}
    scores = {"score_scale": 0.3, "score_soft_cap": spec.score_soft_cap and 2.0} if spec.score_scale else {}
    caps = {"logit_soft_cap": spec.logit_soft_cap and 3.0}
    return dataclasses.replace(spec, windows=windows, **scales, **scores, **caps, **{**small, **sizes})


def make_params(spec: DecoderSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """Random parameters of a whole model, float32, of such sizes that nothing vanishes."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, shape in spec.param_shapes().items():
        scale = 0.3 if len(shape) < 3 and "embed" not in name else 1 / math.sqrt(shape[-1])
        params[name] = (scale * rng.standard_normal(shape)).astype(np.float32)
        if name.endswith("norm") and not spec.norm_plus_one:
            params[name] += 1
    return params


def in_eight_bits(
    params: dict[str, np.ndarray], spec: DecoderSpec, sharded: Mapping[str, Any], world: int, dtype: str, blocks: bool
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Parameters whose matrices have 8 bits, each rank's part with scales of its own; and their values, float32.

    Args:
      sharded: PartitionSpecs of the parameters, which are those of their scales, too.
      blocks: whether blocks have scales, or rows.
    """
    params, wide = dict(params), dict(params)
    axes = {name: next((i for i, of in enumerate(sharded[name]) if of is not None), None) for name in spec.matrices}
    parts = {name: [params[name]] if at is None else np.split(params[name], world, at) for name, at in axes.items()}
    for name, quantized in _quantized(parts, dtype, (128, 128) if blocks else (1, -1)).items():
        found = []
        for values, scales in quantized:
            values, scales = np.asarray(values), np.asarray(scales)
            repeats = (128, 128) if blocks else (1, values.shape[-1])
            each = scales.repeat(repeats[0], -2).repeat(repeats[1], -1)[..., : values.shape[-2], : values.shape[-1]]
            found.append((values, scales, values.astype(np.float32) * each))
        at = axes[name]
        joined = [of[0] if at is None else np.concatenate(of, at) for of in zip(*found, strict=True)]
        params[name], params[f"{name}_scale"], wide[name] = joined
    return params, wide


@functools.partial(jax.jit, static_argnums=(1, 2))  # else XLA compiles each operation for each shape
def _quantized(parts: dict[str, list], dtype: str, block: tuple[int, int]) -> dict[str, list]:
    return {name: [quantize(part, dtype, block=block) for part in of] for name, of in parts.items()}


def rotary_tables(spec: DecoderSpec, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32 [tables, positions, rotated / 2], each table with a base of its own."""
    half = spec.rotated // 2
    bases = [10_000.0 * 10.0**i for i in range(spec.tables)]
    angles = np.stack([np.outer(np.arange(positions), base ** (-np.arange(half) / half)) for base in bases])
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def decode(
    spec: DecoderSpec, params: dict[str, np.ndarray], xs: np.ndarray, cos: np.ndarray, sin: np.ndarray,
    stored: tuple[np.ndarray, ...] = (),
) -> np.ndarray:  # fmt: skip
    """The logits [V] of the last of a sequence's tokens xs [T, D], all computed anew in float64.

    Args:
      stored: keys, values [L, K, S, H] and the scales of both [L, K, S] of a cache of 8 bits, which has to hold what
        is computed, rounded. Attention reads the rounded numbers.
    """
    w = {name: value.astype(np.float64) for name, value in params.items()}
    x = xs.astype(np.float64) * spec.embedding_scale
    for i in range(spec.layers):
        of_layer = tuple(part[i] for part in stored)
        attended = _attention(spec, w, i, _norm(spec, x, w["attn_norm"][i]), cos, sin, of_layer)
        x = x + spec.residual_scale * (_norm(spec, attended, w["post_attn_norm"][i]) if spec.post_norms else attended)
        y = _norm(spec, x, w["mlp_norm"][i])
        y = (_activation(spec, y @ w["gate_proj"][i].T) * (y @ w["up_proj"][i].T)) @ w["down_proj"][i].T
        x = x + spec.residual_scale * (_norm(spec, y, w["post_mlp_norm"][i]) if spec.post_norms else y)
    logits = spec.logit_scale * (w["embed" if spec.tied else "unembed"] @ _norm(spec, x[-1], w["final_norm"]))
    return _cap(logits, spec.logit_soft_cap)


def _norm(spec: DecoderSpec, x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    gain = 1 + gain if spec.norm_plus_one else gain
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.norm_eps) * gain


def _cap(x: np.ndarray, cap: float | None) -> np.ndarray:
    return x if cap is None else cap * np.tanh(x / cap)


def _activation(spec: DecoderSpec, x: np.ndarray) -> np.ndarray:
    if spec.activation == "silu":
        return x / (1 + np.exp(-x))
    if spec.activation == "gelu_tanh":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _rounded(x: np.ndarray, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """x [T, heads, H] as it is in a cache of 8 bits: values [heads, S, H] times scales [heads, S], if these are right.

    A number in the middle between two of the dtype may be either, by as much as f32 may miss it.
    """
    values, scales = values[:, : len(x)].swapaxes(0, 1), scales[:, : len(x)].T
    whole = values.dtype == np.int8
    largest = 127.0 if whole else float(ml_dtypes.finfo(values.dtype).max)
    exact = np.abs(x).max(-1) / largest
    np.testing.assert_allclose(scales, exact, rtol=1e-5)
    at, found = x / exact[..., None], values.astype(np.float64)
    nearest = np.rint(at) if whole else at.astype(np.float32).astype(values.dtype).astype(np.float64)
    assert (np.abs(found - at) <= np.abs(nearest - at) + 1e-5 * largest).all()
    return found * scales[..., None]


def _attention(
    spec: DecoderSpec, w: dict[str, np.ndarray], layer: int, y: np.ndarray, cos: np.ndarray, sin: np.ndarray,
    stored: tuple[np.ndarray, ...],
) -> np.ndarray:  # fmt: skip
    """Head by head and token by token."""
    h, count = spec.head_dim, len(y)
    table = spec.rotary_tables[layer % len(spec.rotary_tables)]
    window = spec.windows[layer % len(spec.windows)]
    made = {}
    for name, heads in (("q", spec.heads), ("k", spec.kv_heads), ("v", spec.kv_heads)):
        rows = y @ w[f"{name}_proj"][layer].T
        if spec.qkv_bias:
            rows = rows + w[f"{name}_bias"][layer]
        rows = rows.reshape(count, heads, h)
        if name != "v" and spec.qk_norm:
            rows = _norm(spec, rows, w[f"{name}_norm"][layer])
        if name != "v":
            # A pair of dimensions is a complex number, which is turned.
            half = spec.rotated // 2
            turned = (rows[..., :half] + 1j * rows[..., half : 2 * half]) * (
                cos[table, :count, None].astype(np.float64) + 1j * sin[table, :count, None].astype(np.float64)
            )
            rows = np.concatenate([turned.real, turned.imag, rows[..., 2 * half :]], axis=-1)
        made[name] = rows
    for name, values, scales in zip("kv", stored[:2], stored[2:]):
        made[name] = _rounded(made[name], values, scales)
    factor = 1 / math.sqrt(h) if spec.score_scale is None else spec.score_scale
    out = np.zeros((count, spec.heads, h))
    for token in range(count):
        first = 0 if window is None else max(0, token - window)
        for head in range(spec.heads):
            of = head // spec.group
            scores = _cap(factor * made["k"][first : token + 1, of] @ made["q"][token, head], spec.score_soft_cap)
            weights = np.exp(scores - scores.max())
            out[token, head] = weights / weights.sum() @ made["v"][first : token + 1, of]
    return out.reshape(count, -1) @ w["o_proj"][layer].T
