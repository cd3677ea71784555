"""The demo's model as Hugging Face publishes models: config.json, safetensors and a tokenizer of bytes.

    python -m jaxtaxfree generate examples/weights/pydoc --prompt 'The "with" statement '

The model of transformer.py is a Llama, or with experts a Mixtral, whose matrices are stored in another way: transposed,
and queries, keys and values of a key/value head side by side. So whoever reads those reads it, transformers among them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from transformer import Config, Params

WEIGHTS = Path(__file__).parent / "weights" / "pydoc"
# The fields of config.json that say what `Config` says.
FIELDS = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "d_mlp": "intermediate_size",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
    "rope_theta": "rope_theta",
}
OTHER_FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
FIELDS_OF_MIXTURES = {"n_experts": "num_local_experts", "n_chosen": "num_experts_per_tok"}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
# The matrices of a layer that are only transposed; those of experts [E, in, out] are one tensor an expert.
MATRICES = {"w_o": "self_attn.o_proj"}
MLP = {"w_gate": "mlp.gate_proj", "w_up": "mlp.up_proj", "w_down": "mlp.down_proj"}
ROUTER = {"router": "block_sparse_moe.gate"}
EXPERT = {f"w_{x}": f"block_sparse_moe.experts.{{}}.{w}" for x, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))}
NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def matrices(cfg: Config) -> dict[str, str]:
    return MATRICES | (ROUTER if cfg.n_experts else MLP)


def tensors_of(params: Params, cfg: Config) -> dict[str, np.ndarray]:
    """The parameters by the names of a Llama or Mixtral, each [out, in], in float16."""
    k, group, h, d = cfg.n_kv_heads, cfg.group, cfg.head_dim, cfg.d_model
    tensors = {
        "model.embed_tokens": params["embed"],
        "model.norm": params["final_norm"],
        "lm_head": np.asarray(params["unembed"]).T,
    }
    for i, layer in enumerate(params["layers"]):
        layer = {name: np.asarray(weight) for name, weight in layer.items()}
        qkv = layer["w_qkv"].T.reshape(k, group + 2, h, d)
        of_layer = {"self_attn.q_proj": qkv[:, :group].reshape(-1, d)}
        of_layer |= {f"self_attn.{x}_proj": qkv[:, group + n].reshape(-1, d) for n, x in enumerate("kv")}
        of_layer |= {name: layer[own].T for own, name in matrices(cfg).items()}
        for own, name in EXPERT.items() if cfg.n_experts else ():
            of_layer |= {name.format(e): weight.T for e, weight in enumerate(layer[own])}
        of_layer |= {name: layer[own] for own, name in NORMS.items()}
        tensors |= {f"model.layers.{i}.{name}": weight for name, weight in of_layer.items()}
    return {f"{name}.weight": np.ascontiguousarray(weight, np.float16) for name, weight in tensors.items()}


def params_of(tensors: dict[str, np.ndarray], cfg: Config) -> Params:
    """The inverse of `tensors_of`."""
    k, h, d = cfg.n_kv_heads, cfg.head_dim, cfg.d_model
    layers = []
    for i in range(cfg.n_layers):
        of = lambda name, i=i: tensors[f"model.layers.{i}.{name}.weight"]  # noqa: E731
        parts = [of(f"self_attn.{x}_proj").reshape(k, -1, h, d) for x in "qkv"]
        layer = {"w_qkv": np.concatenate(parts, axis=1).reshape(-1, d).T}
        layer |= {own: of(name).T for own, name in matrices(cfg).items()}
        for own, name in EXPERT.items() if cfg.n_experts else ():
            layer[own] = np.stack([of(name.format(e)).T for e in range(cfg.n_experts)])
        layers.append(layer | {own: of(name) for own, name in NORMS.items()})
    return {
        "embed": tensors["model.embed_tokens.weight"],
        "layers": layers,
        "final_norm": tensors["model.norm.weight"],
        "unembed": tensors["lm_head.weight"].T,
    }


def tokenizer() -> dict[str, Any]:
    """A tokenizer.json whose tokens are bytes: byte-level BPE without merges."""
    # The format writes a byte as a character that can be seen: itself, or one from 256 on (GPT-2's table).
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    vocab = {chr(byte if byte in seen else next(hidden)): byte for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False, "fuse_unk": False}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}


def is_there(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def save(folder: Path, params: Params, cfg: Config, **metadata: str) -> None:
    """Writes weights in float16, config.json and tokenizer.json; the metadata of the weights is what else is given."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors_of(params, cfg), folder / "model.safetensors", {"format": "pt", **metadata})
    names = FIELDS | (FIELDS_OF_MIXTURES if cfg.n_experts else {})
    fields = (
        OTHER_FIELDS | (MIXTRAL if cfg.n_experts else {}) | {field: getattr(cfg, own) for own, field in names.items()}
    )
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(), ensure_ascii=False) + "\n", encoding="utf-8")


def load(folder: Path, dtype: Any = np.float32) -> tuple[Params, Config, dict[str, str]]:
    """Reads what `save` wrote: the parameters as NumPy arrays of `dtype`, the config, and the metadata."""
    fields = json.loads((folder / "config.json").read_text())
    names = FIELDS | FIELDS_OF_MIXTURES
    cfg = Config(**{own: fields[field] for own, field in names.items() if field in fields})
    with safetensors.safe_open(folder / "model.safetensors", framework="numpy") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name).astype(dtype) for name in file.keys()}  # noqa: SIM118
    return params_of(tensors, cfg), cfg, metadata
