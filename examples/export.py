"""Writes the demo's model as Hugging Face publishes models: config.json, safetensors and a tokenizer of bytes.

    python examples/export.py /tmp/pydoc
    python -m jaxtaxfree generate /tmp/pydoc --prompt 'The "with" statement ' --tokens 160 --world 2

The model of transformer.py is a Llama whose matrices are stored in another way: transposed, and queries, keys and
values of a key/value head side by side. So whoever reads Llamas reads it, transformers among them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import transformer
from transformer import Config

WEIGHTS = Path(__file__).parent / "weights" / "pydoc.safetensors"


def tensors_of(params: dict[str, Any], cfg: Config) -> dict[str, np.ndarray]:
    """The parameters by the names of a Llama, each [out, in]."""
    k, group, h, d = cfg.n_kv_heads, cfg.group, cfg.head_dim, cfg.d_model
    tensors = {
        "model.embed_tokens.weight": params["embed"],
        "model.norm.weight": params["final_norm"],
        "lm_head.weight": params["unembed"].T,
    }
    for i, layer in enumerate(params["layers"]):
        qkv = layer["w_qkv"].T.reshape(k, group + 2, h, d)
        q, keys, values = qkv[:, :group], qkv[:, group], qkv[:, group + 1]
        tensors |= {
            f"model.layers.{i}.{name}.weight": weight
            for name, weight in {
                "input_layernorm": layer["attn_norm"],
                "self_attn.q_proj": q.reshape(-1, d),
                "self_attn.k_proj": keys.reshape(-1, d),
                "self_attn.v_proj": values.reshape(-1, d),
                "self_attn.o_proj": layer["w_o"].T,
                "post_attention_layernorm": layer["mlp_norm"],
                "mlp.gate_proj": layer["w_gate"].T,
                "mlp.up_proj": layer["w_up"].T,
                "mlp.down_proj": layer["w_down"].T,
            }.items()
        }
    return {name: np.ascontiguousarray(weight) for name, weight in tensors.items()}


def config_of(cfg: Config) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_mlp,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "head_dim": cfg.head_dim,
        "vocab_size": cfg.vocab,
        "max_position_embeddings": cfg.context,
        "rms_norm_eps": 1e-6,
        "rope_theta": cfg.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
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


def export(folder: Path, weights: Path = WEIGHTS) -> None:
    params, cfg, _ = transformer.load(weights, np.float16)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors_of(params, cfg), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(cfg), indent=2) + "\n")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(), ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    export(Path(sys.argv[1]))
