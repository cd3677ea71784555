"""`config.json` as what a model is made of: a `DecoderSpec`, its rotary tables, and how its weights are stored."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtaxfree.models.errors import ModelError
from jaxtaxfree.models.fields import Fields
from jaxtaxfree.models.quantized import Quantization, quantization_of
from jaxtaxfree.models.rotary import Rotary
from jaxtaxfree.ops.decode_step.spec import DecoderSpec

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(jnp.bfloat16)}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a `config.json` says.

    Attributes:
      family: its `model_type`.
      spec: what the decoder is made of.
      rotaries: the rotary tables that `spec.rotary_tables` counts.
      positions: the longest sequence that the model was made for.
      dtype: of its weights, once they are dequantised.
      stop: tokens after which a text ends.
      prefix: what the names of all tensors but the last product's begin with, in the order in which they are tried.
      skipped: beginnings of names of tensors that are not read, with the reason.
      quantization: how 8-bit weights are stored.
    """

    family: str
    spec: DecoderSpec
    rotaries: tuple[Rotary, ...]
    positions: int
    dtype: np.dtype
    stop: tuple[int, ...] = ()
    prefix: tuple[str, ...] = ("model.",)
    skipped: tuple[tuple[str, str], ...] = ()
    quantization: Quantization | None = None


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration of a checkpoint's folder.

    Raises:
      ModelError: if there is none, or a field is unknown, missing or not supported. It names all such fields.
    """
    folder = Path(folder)
    values = read_json(folder / "config.json")
    if values is None:
        raise ModelError(f"{folder} has no config.json: give the folder of a checkpoint as Hugging Face publishes it.")
    config = config_of(values, f"{folder / 'config.json'}")
    generation = read_json(folder / "generation_config.json") or {}
    if generation.get("eos_token_id") is not None:
        fields = Fields(generation, f"{folder / 'generation_config.json'}")
        config = dataclasses.replace(config, stop=_stop(fields))
        fields.check()
    return config


def _stop(fields: Fields) -> tuple[int, ...]:
    """The tokens after which a text ends: of one number, or of a list."""
    stop = fields.take("eos_token_id", object, None)
    tokens = stop if isinstance(stop, list) else [] if stop is None else [stop]
    if any(not isinstance(token, int) or isinstance(token, bool) for token in tokens):
        fields.wrong.append(f"eos_token_id must be a token or a list of tokens, not {stop!r}")
        return ()
    return tuple(tokens)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object of a JSON file; None if there is no file. Raises ModelError if it is something else."""
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is no JSON ({error}): download it again.") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds no JSON object: download it again.")
    return values


def config_of(values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """The configuration of a parsed `config.json`, called `where` in errors."""
    family = values.get("model_type")
    if family == "gemma3" and isinstance(values.get("text_config"), dict):
        return _gemma3_with_images(values, where)
    if not isinstance(family, str) or family not in _FAMILIES:
        named = ", ".join(sorted(["gemma3", *_FAMILIES]))
        raise ModelError(f"{where} has model_type={family!r}, which is not supported; supported are {named}.")
    fields = Fields(values, where)
    fields.take("model_type", str)
    made = _FAMILIES[family](fields)
    stop = _stop(fields)
    name = fields.take("dtype", str, None) or "float32"
    name = fields.take("torch_dtype", str, None) or name
    if name not in DTYPES:
        fields.wrong.append(f"torch_dtype={name!r} is not supported (one of {', '.join(DTYPES)})")
    quantization = quantization_of(fields.take("quantization_config", dict, None), fields.wrong)
    fields.only("is_encoder_decoder", False, why="decoders only")
    fields.only("is_decoder", True, False, why="decoders only")
    fields.only("add_cross_attention", False, why="decoders only")
    rotaries, sizes = made.pop("rotaries"), made
    # Yarn is put into a config.json to have longer texts than it says.
    longer = [int(each.factor * each.original) for each in rotaries if each.kind == "yarn"]
    positions = max(sizes.pop("positions"), *longer, 0)
    fields.finish()
    try:
        spec = DecoderSpec(**sizes)
    except ValueError as error:
        raise ModelError(f"{where} cannot be taken: {error}") from None
    return ModelConfig(
        family=family,
        spec=spec,
        rotaries=rotaries,
        positions=positions,
        dtype=DTYPES[name],
        stop=stop,
        quantization=quantization,
    )


def _gemma3_with_images(values: Mapping[str, Any], where: str) -> ModelConfig:
    """Gemma 3 as it is published from 4B on: its text model, without the part that reads images."""
    outer = {name: value for name, value in values.items() if name not in _OF_IMAGES}
    inner = dict(outer.pop("text_config"))
    inner.setdefault("model_type", "gemma3_text")
    outer.pop("model_type")
    for name in ("eos_token_id", "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings"):
        if name in outer:
            inner[name] = outer.pop(name)
    Fields(outer, where).finish()
    return dataclasses.replace(
        config_of(inner, where),
        prefix=("language_model.model.", "model.language_model."),
        skipped=tuple((name, "images are not read") for name in _IMAGE_TENSORS),
    )


_OF_IMAGES = (
    "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
    "boi_token_id", "eoi_token_id", "image_token_id",
)  # fmt: skip
_IMAGE_TENSORS = (
    "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.",
)  # fmt: skip


def _sizes(fields: Fields, **defaults: Any) -> dict[str, Any]:
    """What all families say in the same fields. A default is what transformers takes for a field that is not there."""
    heads = fields.take("num_attention_heads", int, **_default(defaults, "num_attention_heads"))
    d_model = fields.take("hidden_size", int, above=0, **_default(defaults, "hidden_size"))
    return {
        "layers": fields.take("num_hidden_layers", int, **_default(defaults, "num_hidden_layers")),
        "d_model": d_model,
        "heads": heads,
        "kv_heads": fields.take("num_key_value_heads", int, defaults.get("num_key_value_heads", heads)),
        "head_dim": fields.take("head_dim", int, defaults.get("head_dim", d_model // max(1, heads))),
        "d_mlp": fields.take("intermediate_size", int, **_default(defaults, "intermediate_size")),
        "vocab": fields.take("vocab_size", int, **_default(defaults, "vocab_size")),
        "norm_eps": fields.take("rms_norm_eps", float, defaults.get("rms_norm_eps", 1e-6)),
        "tied": fields.take("tie_word_embeddings", bool, defaults.get("tie_word_embeddings", False)),
        "positions": fields.take("max_position_embeddings", int, **_default(defaults, "max_position_embeddings")),
    }


def _default(defaults: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"default": defaults[name]} if name in defaults else {}


def _activation(fields: Fields, *names: str, default: str) -> str:
    found = [name for name in (fields.take(each, str, None) for each in names) if name is not None]
    activation = found[-1] if found else default
    if activation not in ACTIVATIONS:
        fields.wrong.append(f"{names[-1]}={activation!r} is not supported (one of {', '.join(ACTIVATIONS)})")
    return ACTIVATIONS.get(activation, "silu")


def _rotary(fields: Fields, sizes: Mapping[str, Any], theta: float = 10000.0) -> tuple[Rotary, ...]:
    """The one table of a model, of `rope_theta` and `rope_scaling`, or of `rope_parameters`, which holds both."""
    scaling = dict(fields.take("rope_scaling", dict, None) or {})
    scaling |= fields.take("rope_parameters", dict, None) or {}
    theta = fields.take("rope_theta", float, theta, above=1)
    return (rotary_of(scaling, theta, sizes["head_dim"], sizes["positions"], fields.wrong),)


def rotary_of(scaling: Mapping[str, Any], theta: float, dim: int, positions: int, wrong: list[str]) -> Rotary:
    """The table of a `rope_scaling`; what is wrong with it is appended to `wrong`."""
    inner = Fields(scaling, "rope_scaling")
    theta = inner.take("rope_theta", float, theta, above=1)
    kind = inner.take("type", str, None) or "default"
    kind = inner.take("rope_type", str, None) or kind
    made: dict[str, Any] = {"theta": theta, "dim": dim, "kind": kind}
    inner.only("partial_rotary_factor", 1, 1.0, why="all of a head is rotated")
    if kind in ("linear", "llama3", "yarn"):
        made["factor"] = inner.take("factor", float, above=0)
    if kind == "llama3":
        made["low"] = inner.take("low_freq_factor", float, above=0)
        made["high"] = inner.take("high_freq_factor", float, above=made["low"])
        made["original"] = inner.take("original_max_position_embeddings", int, above=0)
    elif kind == "yarn":
        made["original"] = inner.take("original_max_position_embeddings", int, positions, above=0)
        made["beta_fast"] = inner.take("beta_fast", float, 32.0, above=0)
        made["beta_slow"] = inner.take("beta_slow", float, 1.0, above=0)
        made["truncate"] = inner.take("truncate", bool, True)
        scale, all_dims = (inner.take(name, float, None) for name in ("mscale", "mscale_all_dim"))
        usual = _mscale(made["factor"], 1.0)
        if scale and all_dims:
            usual = _mscale(made["factor"], scale) / _mscale(made["factor"], all_dims)
        made["attention_factor"] = inner.take("attention_factor", float, usual)
    elif kind not in ("default", "linear"):
        wrong.append(f"rope_scaling of type {kind!r} is not supported (one of default, linear, llama3, yarn)")
        return Rotary(theta=theta, dim=dim)
    try:
        inner.finish()
    except ModelError as error:
        wrong.append(str(error).rstrip("."))
    return Rotary(**made)


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _layer_types(fields: Fields, layers: int, usual: list[bool]) -> list[bool]:
    """Whether each layer has a window: of `layer_types`, or as is usual."""
    types = fields.take("layer_types", list, None)
    if types is None:
        return usual
    known = {"sliding_attention": True, "full_attention": False}
    if len(types) != layers or any(kind not in known for kind in types):
        fields.wrong.append(f"layer_types must be {' or '.join(known)} for each of {layers} layers, not {types!r}")
        return usual
    return [known[kind] for kind in types]


def _windows(window: int | None, of_layers: list[bool]) -> tuple[int | None, ...]:
    """As `DecoderSpec` has them, which does not count the token itself."""
    windows = tuple(window - 1 if window and inside else None for inside in of_layers)
    return windows[:1] if len(set(windows)) == 1 else windows


def _llama(fields: Fields) -> dict[str, Any]:
    made = _sizes(fields)
    made["rotaries"] = _rotary(fields, made)
    made["activation"] = _activation(fields, "hidden_act", default="silu")
    fields.only("attention_bias", False, why="queries, keys, values and the output would have a bias")
    fields.only("mlp_bias", False, why="the MLP would have a bias")
    return made


def _mistral(fields: Fields) -> dict[str, Any]:
    # Where the field is missing the window is 4096; null is none.
    window = fields.take("sliding_window", int, None if "sliding_window" in fields else 4096)
    made = _llama(fields)
    types = _layer_types(fields, made["layers"], [True] * made["layers"])
    made["windows"] = _windows(window, types)
    return made


def _qwen2(fields: Fields) -> dict[str, Any]:
    made = _qwen(fields)
    made["qkv_bias"] = True
    return made


def _qwen3(fields: Fields) -> dict[str, Any]:
    made = _qwen(fields, head_dim=128)
    made["qk_norm"] = True
    return made


def _qwen(fields: Fields, **defaults: Any) -> dict[str, Any]:
    made = _sizes(fields, **defaults)
    made["rotaries"] = _rotary(fields, made)
    made["activation"] = _activation(fields, "hidden_act", default="silu")
    fields.only("attention_bias", False, why="queries, keys, values and the output would have a bias")
    used = fields.take("use_sliding_window", bool, False)
    window = fields.take("sliding_window", int, None if "sliding_window" in fields else 4096)
    first = fields.take("max_window_layers", int, 28)
    types = _layer_types(fields, made["layers"], [used and i >= first for i in range(made["layers"])])
    made["windows"] = _windows(window if used else None, types)
    return made


def _mixtral(fields: Fields) -> dict[str, Any]:
    made = _sizes(fields, rms_norm_eps=1e-5)
    made["rotaries"] = _rotary(fields, made, theta=1e6)
    made["activation"] = _activation(fields, "hidden_act", default="silu")
    made["windows"] = _windows(fields.take("sliding_window", int, None), [True] * made["layers"])
    made["experts"] = _experts(fields, 8)
    made["experts_per_token"] = fields.take("num_experts_per_tok", int, 2)
    return made


def _experts(fields: Fields, usual: int) -> int:
    """Two names for the same number."""
    count = fields.take("num_experts", int, None)
    return fields.take("num_local_experts", int, count or usual)


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    made = _qwen3(fields)
    made["d_mlp"] = fields.take("moe_intermediate_size", int)
    made["experts"] = _experts(fields, 128)
    made["experts_per_token"] = fields.take("num_experts_per_tok", int, 8)
    made["normalized_experts"] = fields.take("norm_topk_prob", bool, False)
    fields.only("decoder_sparse_step", 1, why="layers without experts")
    fields.only("mlp_only_layers", [], why="layers without experts")
    return made


def _gemma(fields: Fields, **defaults: Any) -> dict[str, Any]:
    made = _sizes(fields, head_dim=256, tie_word_embeddings=True, **defaults)
    # transformers takes hidden_activation, whatever hidden_act says.
    made["activation"] = _activation(fields, "hidden_act", "hidden_activation", default="gelu_pytorch_tanh")
    made["score_scale"] = float(fields.take("query_pre_attn_scalar", float, 256.0, above=0)) ** -0.5
    made["score_soft_cap"] = fields.take("attn_logit_softcapping", float, defaults.get("attn_logit_softcapping"))
    made["logit_soft_cap"] = fields.take("final_logit_softcapping", float, defaults.get("final_logit_softcapping"))
    fields.only("attention_bias", False, why="queries, keys, values and the output would have a bias")
    fields.only("use_bidirectional_attention", False, why="a decoder does not see later tokens")
    made |= {"norm_plus_one": True, "post_norms": True, "embedding_scale": math.sqrt(made["d_model"])}
    return made


def _gemma2(fields: Fields) -> dict[str, Any]:
    caps = {name: None if name in fields else cap for name, cap in _GEMMA2_CAPS.items()}
    made = _gemma(fields, **caps)
    made["rotaries"] = _rotary(fields, made)
    window = fields.take("sliding_window", int, None if "sliding_window" in fields else 4096)
    fields.only("sliding_window_size", window, why="sliding_window beside it says another number")
    types = _layer_types(fields, made["layers"], [i % 2 == 0 for i in range(made["layers"])])
    made["windows"] = _windows(window, types)
    return made


_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def _gemma3_text(fields: Fields) -> dict[str, Any]:
    made = _gemma(
        fields, vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=131072,
    )  # fmt: skip
    made["qk_norm"] = True
    window = fields.take("sliding_window", int, None if "sliding_window" in fields else 4096)
    pattern = max(1, fields.take("sliding_window_pattern", int, 6))
    types = _layer_types(fields, made["layers"], [(i + 1) % pattern != 0 for i in range(made["layers"])])
    made["windows"] = _windows(window, types)
    made["rotary_tables"] = tuple(0 if inside else 1 for inside in types)
    # Layers with a window have a table of their own, which is not scaled.
    both = fields.take("rope_parameters", dict, None) or {}
    scaling = fields.take("rope_scaling", dict, None) or {}
    inner = Fields(both, "rope_parameters")
    near, far = inner.take("sliding_attention", dict, {}), inner.take("full_attention", dict, scaling)
    fields.wrong += inner.wrong
    if unknown := [name for name in both if name not in ("sliding_attention", "full_attention")]:
        fields.wrong.append(f"rope_parameters has {', '.join(unknown)} beside sliding_attention and full_attention")
    thetas = tuple(
        fields.take(name, float, usual, above=1)
        for name, usual in (("rope_local_base_freq", 10000.0), ("rope_theta", 1e6))
    )
    made["rotaries"] = tuple(
        rotary_of(part, theta, made["head_dim"], made["positions"], fields.wrong)
        for part, theta in zip((near, far), thetas)
    )
    return made


_FAMILIES: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3_text,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
