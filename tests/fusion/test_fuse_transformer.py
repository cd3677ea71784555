"""`fuse` finds in plain form what the transformer of examples/ says by hand."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.helpers.support import mesh_of

pytest.importorskip("safetensors")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_step
import transformer

CFG = transformer.Config(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_mlp=48, context=64)
WORLD, BATCH, LENGTH = 2, 4, 6
GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"


def gather_matmul(
    x: jax.Array, w: jax.Array, axis_name: str, _: Any, gate: Any = None, activation: Any = None, **keywords: Any
) -> jax.Array:
    """As of examples/transformer.py, in plain JAX."""
    x = lax.all_gather(x, axis_name, tiled=True)
    y = jnp.matmul(x, w, precision=transformer.precision_of(x), **keywords)
    return y if gate is None else activation(transformer.matmul(x, gate)) * y


def scatter_matmul(y: jax.Array, w: jax.Array, residual: jax.Array, axis_name: str, _: Any) -> jax.Array:
    return residual + lax.psum_scatter(transformer.matmul(y, w), axis_name, tiled=True)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "gather_matmul", gather_matmul)
    monkeypatch.setattr(transformer, "scatter_matmul", scatter_matmul)


def params() -> transformer.Params:
    return transformer.init(jax.random.key(0), CFG)


def tokens(length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=(BATCH, length)).astype(np.int32)


def test_all_nine_products_of_a_decode_loop() -> None:
    """Four of each layer, and the logits: in the prompts, and in the loop."""
    lengths = np.full(BATCH, LENGTH, np.int32)
    positions = transformer.cache_length(LENGTH + 4, WORLD)

    def generate(params: transformer.Params, prompts: jax.Array, lengths: jax.Array) -> jax.Array:
        first, cache = transformer.prefill(params, prompts, lengths, positions, CFG)
        return transformer.decode(params, cache, first, lengths, 4, CFG)

    specs = (transformer.param_specs(CFG), P("tp"), P())
    fn = jax.shard_map(generate, mesh=mesh_of(WORLD), in_specs=specs, out_specs=P("tp"), check_vma=False)
    operands = params(), tokens(LENGTH), lengths
    report = jtf.fuse(fn).report(*operands)
    nine = [*(2 * CFG.n_layers * [GATHER, SCATTER]), GATHER]
    assert [each.operation for each in report.found] == 2 * nine, str(report)
    assert [each.where.split(", ")[0] for each in report.found] == 9 * ["shard_map"] + 9 * ["shard_map > while"]
    assert report.missed == (), str(report)


def test_a_decode_step() -> None:
    """All nine products, bit for bit."""
    lengths = np.full(BATCH, LENGTH, np.int32)
    positions = transformer.cache_length(LENGTH + 4, WORLD)
    keys = np.random.default_rng(1).normal(size=(BATCH, positions, CFG.n_kv_heads, CFG.head_dim)).astype(np.float32)

    def step(params: transformer.Params, cache: Any, token: jax.Array, lengths: jax.Array) -> jax.Array:
        x, _ = transformer.next_token(params, cache, token, lengths, CFG)
        return transformer.logits_shard(params, x)

    specs = (transformer.param_specs(CFG), transformer.cache_specs(CFG), P("tp"), P())
    fn = jax.shard_map(step, mesh=mesh_of(WORLD), in_specs=specs, out_specs=P(None, "tp"), check_vma=False)
    operands = params(), CFG.n_layers * [(keys, -keys)], tokens(1)[:, 0], lengths
    fused = jtf.fuse(fn)
    assert len(fused.report(*operands).found) == 9
    want, got = jax.jit(lambda *operands: (fn(*operands), fused(*operands)))(*operands)
    np.testing.assert_array_equal(got, want)


def test_a_training_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients: the loss of a rank is fused, then differentiated."""
    cfg = dataclasses.replace(CFG, n_layers=1)
    weights, specs = transformer.init(jax.random.key(0), cfg), transformer.param_specs(cfg)
    rows = tokens(LENGTH + 1)
    loss_share = train_step.loss_share

    def run(share: Any) -> Any:
        monkeypatch.setattr(train_step, "loss_share", share)

        def step(params: transformer.Params, rows: jax.Array) -> Any:
            return train_step.loss_and_gradients(params, rows, cfg)

        fn = jax.shard_map(step, mesh=mesh_of(WORLD), in_specs=(specs, P()), out_specs=(P(), specs))
        return jax.jit(fn)(weights, rows)

    found = []

    def fused(params: transformer.Params, rows: jax.Array, cfg: Any, axis_name: str, _: Any) -> jax.Array:
        fn = jtf.fuse(lambda params, rows: loss_share(params, rows, cfg, axis_name))
        found.append(fn.report(params, rows))
        return fn(params, rows)

    want, got = run(loss_share), run(fused)
    assert [each.operation for each in found[0].found] == [GATHER, SCATTER, GATHER, SCATTER, GATHER]
    assert found[0].missed == ()
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, want)
