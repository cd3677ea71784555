"""Every family against what transformers said of the same checkpoint: logits of prompts, and greedy tokens."""

import collections

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from benchmarks import checkpoint
from jaxtaxfree import models, simulator
from jaxtaxfree.models import forward
from jaxtaxfree.ops.decode_step.hopper import Config, Hopper
from tests.helpers.checkpoints import FOLDER, NAMES, STEPS, expected_of, mesh_of, model_of


def check_logits(model: models.Model, name: str) -> None:
    """Of all positions of ragged prompts, to 1e-4 of the largest."""
    expected = expected_of(name)
    tokens, lengths = expected["tokens"], expected["lengths"]
    logits = np.asarray(model.logits(tokens, lengths))
    assert logits.shape == expected["logits"].shape and logits.dtype == np.float32
    inside = np.arange(tokens.shape[1]) < lengths[:, None]
    largest = np.abs(expected["logits"]).max()
    np.testing.assert_allclose(logits[inside], expected["logits"][inside], rtol=0, atol=1e-4 * largest)


def check_tokens(model: models.Model, name: str) -> None:
    """All greedy tokens of a batch of ragged prompts."""
    expected = expected_of(name)
    found = model.generate(expected["tokens"], STEPS, lengths=expected["lengths"])
    np.testing.assert_array_equal(found, expected["greedy"])


@pytest.mark.parametrize("name", NAMES)
def test_logits(name):
    check_logits(model_of(name), name)


# Mixtral's mixture is that of Qwen3-MoE with other names.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if name == "mixtral" else ()) for name in NAMES]
)
def test_tokens(name):
    check_tokens(model_of(name), name)


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_one_rank_and_four(name, world):
    check_logits(model_of(name, world), name)
    check_tokens(model_of(name, world), name)


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_cache_along_the_sequence(name, world):
    check_logits(model_of(name, world, "sequence"), name)
    check_tokens(model_of(name, world, "sequence"), name)


@pytest.mark.soak
def test_a_mesh_of_several_axes(cpu_mesh):
    """The model lies along two of three axes, and along the other one all have the same."""
    mesh = cpu_mesh((2, 2, 2), ("data", "a", "b"))
    model = models.load(FOLDER / "qwen2", mesh, ("a", "b"), dtype=np.float32)
    assert model.world == 4
    check_logits(model, "qwen2")
    check_tokens(model, "qwen2")


def test_fewer_heads_than_ranks():
    """Four ranks have two key/value heads: each has a copy of one."""
    model = model_of("llama3", 4)
    assert model.spec.kv_heads == 4
    check_tokens(model, "llama3")


@pytest.mark.parametrize(
    ("name", "cache", "slots"),
    [
        pytest.param("llama2", "heads", {32, 48}, marks=pytest.mark.soak),
        pytest.param("mistral", "sequence", {8, 12}, marks=pytest.mark.soak),  # all layers have the same window
        pytest.param("gemma2", "sequence", {8, 12}, marks=pytest.mark.soak),  # by operations, with two windows
        ("gemma2", "pages", {8, 12}),
        pytest.param("llama3", "pages", {8, 12}, marks=pytest.mark.soak),
    ],
)
def test_a_growing_cache(name, cache, slots, monkeypatch):
    """Along the sequence each of four ranks has every fourth block of four positions, of all heads."""
    monkeypatch.setattr("jaxtaxfree.models.model.BLOCK", 4)
    monkeypatch.setattr("jaxtaxfree.models.model.ROOM", 16)
    monkeypatch.setattr("jaxtaxfree.models.model.GROWTH", 16)
    model = models.load(FOLDER / name, mesh_of(4), dtype=np.float32, cache=cache)
    assert model.room([12], STEPS).slots == min(slots)
    check_tokens(model, name)
    assert {key[1].slots for key in model._programs if key[0] == "step"} == slots


def test_blocks_of_long_prompts(monkeypatch):
    """Attention goes through a long prompt in blocks of queries."""
    monkeypatch.setattr("jaxtaxfree.models.forward.QUERIES", 4)
    model, expected = model_of("gemma2").by(None), expected_of("gemma2")
    logits = np.asarray(model.logits(expected["tokens"][:1]))
    np.testing.assert_allclose(logits, expected["logits"][:1], rtol=0, atol=1e-4 * np.abs(expected["logits"]).max())


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_simulated_kernels(name):
    """Prompts and steps by the kernels of both ranks, simulated. They are too small for the kernel of a whole step."""
    model, expected = model_of(name).by("simulate"), expected_of(name)
    with simulator.simulating() as recording:
        found = model.generate(expected["tokens"], 3, lengths=expected["lengths"])
    np.testing.assert_array_equal(found, expected["greedy"][:, :3])
    # Of each layer, once for a prompt and twice for steps; the MLP's products are those of experts in a mixture.
    each = model.spec.layers * 3 * (1 if model.spec.experts else 2)
    names = collections.Counter(trace.name for trace in recording.traces)
    assert names["all_gather_matmul"] == names["matmul_reduce_scatter"] == each, names
    assert names["top_k"] == names["psum"] == 3  # of the tokens whose logits are wanted; embeddings are scattered
    if model.spec.experts:  # and two products of each rank, to itself; and two gathers
        assert names["ragged_dot"] == 2 * 2 * each and names["psum_scatter"] == each + 3, names
        assert names["all_gather"] == 2 * each, names


@pytest.mark.parametrize(
    ("weights", "cache_dtype"),
    [
        (None, None),
        pytest.param("float8_e4m3fn", None, marks=pytest.mark.soak),
        pytest.param(None, "int8", marks=pytest.mark.soak),
        ("int8", "float8_e4m3fn"),
    ],
)
def test_the_simulated_kernel_of_a_step(tmp_path, monkeypatch, weights, cache_dtype):
    """A Llama that the kernel takes: its steps are one launch each, and its tokens those of XLA."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 2, "vocab_size": 64, "head_dim": 128 if cache_dtype else 64}
    monkeypatch.setattr(checkpoint, "SCALE", 0.3)
    checkpoint.write_random(tmp_path, checkpoint.LLAMA_3_8B | sizes)
    config = Config(programs=2, stage=1024, num_stages=2, merged=32, splits=1, num_warps=4)
    monkeypatch.setattr(Hopper, "by_shape", lambda *_: config)
    model = models.load(tmp_path, mesh_of(2), weights=weights, cache_dtype=cache_dtype)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 9))
    expected = model.by("xla").generate(tokens, 4)
    with simulator.simulating() as recording:
        found = model.by("simulate").generate(tokens, 4)
    np.testing.assert_array_equal(found, expected)
    assert sum(trace.name == "decode_step" for trace in recording.traces) == 3


@pytest.mark.parametrize("normalized", [True, False])
def test_shares_of_experts(normalized):
    """A token's experts have the shares of a softmax over all, divided by their sum where the model says so."""
    spec = jtf.DecoderSpec(
        layers=1, d_model=8, heads=2, kv_heads=2, head_dim=4, d_mlp=4, vocab=8, experts=4, experts_per_token=2,
        normalized_experts=normalized,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    names = ("router", "gate_proj", "up_proj", "down_proj")
    w = {name: rng.standard_normal(spec.param_shapes()[name][1:]).astype(np.float32) for name in names}
    y = rng.standard_normal((5, 8)).astype(np.float32)
    how = forward.How(model=spec, axes=("tp",), implementation="xla", placement=None)
    f = jax.shard_map(
        lambda y, w: forward._mlp(0 * y, y, w, how), mesh=mesh_of(1), in_specs=P(), out_specs=P(), check_vma=False
    )
    expected = np.zeros((5, 8))
    for row, token in zip(expected, y.astype(np.float64)):
        shares = np.exp(w["router"] @ token) / np.exp(w["router"] @ token).sum()
        chosen = np.argsort(-shares)[:2]
        for expert in chosen:
            gate, up = token @ w["gate_proj"][expert], token @ w["up_proj"][expert]
            of = (gate / (1 + np.exp(-gate)) * up) @ w["down_proj"][expert]
            row += shares[expert] / (shares[chosen].sum() if normalized else 1) * of
    np.testing.assert_allclose(jax.jit(f)(y, w), expected, rtol=1e-4, atol=1e-4)
