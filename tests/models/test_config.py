"""`config.json` of published models as `DecoderSpec`s, and what is refused."""

import dataclasses
import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from jaxtaxfree import models
from jaxtaxfree.models.config import config_of
from jaxtaxfree.models.rotary import Rotary, rotary_tables
from jaxtaxfree.models.weights import Layout, layout_of
from tests.helpers.decoders import FAMILIES
from tests.models.table import table

CHECKPOINTS = pathlib.Path(__file__).parent / "checkpoints"
# As they were published, with what tools wrote besides.
USUAL = {
    "architectures": ["…ForCausalLM"], "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True,
    "transformers_version": "4.40.0.dev0", "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
LLAMA = USUAL | {
    "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "vocab_size": 128256, "attention_bias": False,
}  # fmt: skip
LLAMA_3_1 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
QWEN = USUAL | {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768,
    "use_sliding_window": False, "sliding_window": 131072, "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-2-7b": LLAMA | {
        "intermediate_size": 11008, "max_position_embeddings": 4096, "num_key_value_heads": 32, "vocab_size": 32000,
        "rope_theta": None, "torch_dtype": "float16",
    },
    "llama-3-8b": LLAMA,
    "llama-3-70b": LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80,
        "rope_scaling": LLAMA_3_1, "max_position_embeddings": 131072, "mlp_bias": False,
        "eos_token_id": [128001, 128008, 128009],
    },
    "mistral-7b-v0.1": USUAL | {
        "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "qwen2-7b": QWEN | {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "max_window_layers": 28,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    },
    "qwen2.5-0.5b": QWEN | {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "max_window_layers": 24,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN | {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 36,
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "vocab_size": 151936,
        "head_dim": 128, "attention_bias": False, "max_position_embeddings": 40960, "sliding_window": None,
    },
    "gemma-2-9b": USUAL | {
        "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "pad_token_id": 0,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "intermediate_size": 14336,
        "max_position_embeddings": 8192, "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096,
        "sliding_window_size": 4096, "vocab_size": 256000,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    },
}  # fmt: skip
MIXTURES = {
    "mixtral-8x7b": (46.70, USUAL | {
        "model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
        "vocab_size": 32000,
    }),
    "qwen3-30b-a3b": (30.53, QWEN | {
        "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "sliding_window": None, "vocab_size": 151936,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_published_models(name):
    """The specs that `decode_step` is tested with are what the published fields say."""
    spec = config_of(PUBLISHED[name]).spec
    short = dataclasses.replace(
        FAMILIES[name],
        windows=spec.windows and FAMILIES[name].window_by_layer,
        rotary_tables=FAMILIES[name].table_by_layer,
    )
    assert dataclasses.replace(spec, windows=spec.window_by_layer, rotary_tables=spec.table_by_layer) == short


@pytest.mark.parametrize("name", MIXTURES)
def test_published_mixtures(name):
    """They have as many parameters as they were published with."""
    billions, values = MIXTURES[name]
    layout = layout_of(config_of(values), 1, None)
    count = sum(math.prod(shape) for shape in layout.shapes().values())
    assert count / 1e9 == pytest.approx(billions, rel=1e-3)


def test_other_fields():
    config = config_of(PUBLISHED["llama-3-70b"])
    assert config.stop == (128001, 128008, 128009) and config.positions == 131072
    assert config.rotaries == (Rotary(theta=5e5, dim=128, kind="llama3", factor=8.0, original=8192, low=1.0, high=4.0),)
    near, far = config_of(PUBLISHED["gemma-3-4b"]).rotaries
    assert (near.theta, near.kind, far.theta, far.kind, far.factor) == (1e4, "default", 1e6, "linear", 8.0)
    assert config_of(LLAMA | {"sliding_window": None, "model_type": "mistral"}).spec.windows == (None,)
    longer = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert config_of(PUBLISHED["qwen2-7b"] | {"rope_scaling": longer}).positions == 131072
    late = config_of(PUBLISHED["qwen2-7b"] | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 26})
    assert late.spec.windows == (None,) * 26 + (8, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary_pct": 0.25}, "unknown field rotary_pct=0.25"),
        ({"a": 1, "b": 2}, "unknown fields a=1, b=2"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "4096"}, "hidden_size must be of type int, not '4096'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be of type int, not True"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"hidden_act": "relu2"}, "hidden_act='relu2' is not supported"),
        ({"torch_dtype": "float64"}, "torch_dtype='float64' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling of type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "x": 1}}, "rope_scaling cannot be taken: unknown field x"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method='gptq' is not supported"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
            "format='pack-quantized' is not supported",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {
                "num_bits": 8, "type": "int", "symmetric": False}}}}},
            "symmetric=False is not supported",
        ),
        ({"rope_theta": 0}, "rope_theta must be larger than 1, not 0"),
        ({"rope_theta": math.nan}, "rope_theta must be a finite number, not nan"),
        ({"rope_scaling": LLAMA_3_1 | {"high_freq_factor": 1.0}}, "high_freq_factor must be larger than 1, not 1"),
        ({"eos_token_id": ["a"]}, "eos_token_id must be a token or a list of tokens, not ['a']"),
        ({"num_attention_heads": 30}, "30 query heads are no multiple of 8"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True is not supported"),
    ],
)  # fmt: skip
def test_what_is_refused(change, message):
    """By the name of the field."""
    with pytest.raises(models.ModelError) as caught:
        config_of(LLAMA | change)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("qwen3-30b-a3b", {"mlp_only_layers": [0]}, "mlp_only_layers=[0] is not supported"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "a token cannot take 129 of 128 experts"),
    ],
)
def test_what_is_refused_of_mixtures(family, change, message):
    with pytest.raises(models.ModelError) as caught:
        config_of(MIXTURES[family][1] | change)
    assert message in str(caught.value)


def test_other_families():
    with pytest.raises(models.ModelError, match=r"model_type='phi3', which is not supported; supported are gemma2, "):
        config_of(LLAMA | {"model_type": "phi3"})
    with pytest.raises(models.ModelError, match="layer_types must be"):
        config_of(PUBLISHED["gemma-2-9b"] | {"layer_types": ["full_attention"]})
    with pytest.raises(models.ModelError, match="unknown field audio_config"):
        config_of(PUBLISHED["gemma-3-4b"] | {"audio_config": {}})


def test_ranks_that_do_not_divide():
    config = config_of(LLAMA)
    with pytest.raises(
        models.ModelError, match="3 ranks do not divide num_attention_heads=32 and intermediate_size=14336"
    ):
        layout_of(config, 3, None)
    few = config_of(PUBLISHED["qwen2-7b"] | {"num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 128})
    assert not layout_of(few, 4, None).by_heads
    with pytest.raises(models.ModelError, match="4 ranks and num_key_value_heads=6 do not divide each other"):
        layout_of(few, 4, "heads")
    spec = config_of(LLAMA | {"vocab_size": 128257}).spec
    assert Layout(spec=spec, copies=1, vocab=128258, by_heads=True).shapes()["unembed"] == (128258, 4096)
    assert layout_of(config_of(LLAMA | {"vocab_size": 128257}), 2, None).vocab == 128258


def test_rotary_tables():
    """Llama 3.1's slow pairs turn `factor` times more slowly, and its fast ones as ever; yarn likewise, and larger."""
    plain = Rotary(theta=5e5, dim=128)
    scaled = Rotary(theta=5e5, dim=128, kind="llama3", factor=8.0, original=8192, low=1.0, high=4.0)
    share = scaled.frequencies() / plain.frequencies()
    assert share[0] == 1 and share[-1] == pytest.approx(1 / 8) and np.all(np.diff(share) <= 0)
    yarn = Rotary(theta=1e6, dim=128, kind="yarn", factor=4.0, original=32768, attention_factor=1.1386)
    share = yarn.frequencies() / Rotary(theta=1e6, dim=128).frequencies()
    assert share[0] == 1 and share[-1] == pytest.approx(1 / 4)
    cos, sin = rotary_tables([plain, yarn], 5)
    assert cos.shape == sin.shape == (2, 5, 64) and cos.dtype == np.float32
    np.testing.assert_allclose(np.hypot(cos[1], sin[1]), 1.1386, rtol=1e-6)


VALUES = (None, 0, -1, 1, 1.5, 0.0, -2.0, "x", "", True, [], {}, [1], ["a"], {"a": 1}, math.nan, math.inf)


def places_in(values: dict[str, Any]) -> list[tuple[str, ...]]:
    """Where fields are, in objects too."""
    inside = [(name, *more) for name, value in values.items() if isinstance(value, dict) for more in places_in(value)]
    return [*((name,) for name in values), *inside]


@pytest.mark.parametrize("checkpoint", sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json")))
@pytest.mark.filterwarnings("error")
def test_no_value_ends_in_another_error(checkpoint):
    """Whatever stands in a field: it is taken, and its rotary tables are finite, or it is a ModelError."""
    text = (CHECKPOINTS / checkpoint / "config.json").read_text()
    for *outer, name in [*places_in(json.loads(text)), ("quantization_config",)]:
        for value in VALUES:
            values = json.loads(text)
            at = values
            for part in outer:
                at = at[part]
            at[name] = value
            try:
                made = config_of(values)
            except models.ModelError:
                continue
            assert all(np.isfinite(table).all() for table in rotary_tables(made.rotaries, 4)), (outer, name, value)
            assert all(isinstance(token, int) for token in made.stop)


def test_files(tmp_path):
    with pytest.raises(models.ModelError, match=r"has no config\.json: give the folder of a checkpoint"):
        models.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(models.ModelError, match=r"config\.json is no JSON"):
        models.read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(models.ModelError, match="holds no JSON object"):
        models.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert models.read_config(tmp_path).stop == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert models.read_config(tmp_path).stop == (5, 6)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "5"}))
    with pytest.raises(
        models.ModelError, match=r"generation_config\.json cannot be taken: eos_token_id must be a token"
    ):
        models.read_config(tmp_path)


def test_the_table_of_the_documentation():
    """`python -m tests.models.table` makes it."""
    assert f"\n\n{table()}\n\n" in (pathlib.Path(__file__).parents[2] / "docs" / "models.md").read_text()
