"""Makes the checkpoints of tests/models/checkpoints, and what transformers says of them.

    python tests/models/make_checkpoints.py        # of all families
    python tests/models/make_checkpoints.py llama  # of one

It needs torch and transformers, which the tests do not. The project itself is not imported, so any environment will do.
Each folder has a random decoder of one family as `save_pretrained` writes it, and `expected.safetensors`:

  tokens      i32[B, T]   prompts, padded on the right with 0
  lengths     i32[B]      of the prompts
  logits      f32[B, T, V]  of `forward` in f32, prompt by prompt; 0 behind a prompt
  greedy      i32[B, STEPS]  what `generate` says, prompt by prompt

Its metadata has the versions of torch and transformers, and the least distance between the largest and the second
largest logit of all greedy tokens, as a part of the largest logit. Where there is a tokenizer, `text.json` has the
tokens of a text and of a chat.
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import safetensors.numpy
import safetensors.torch
import tokenizers
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "checkpoints"
LENGTHS = (12, 5, 9)
STEPS = 32
CLOSEST = 1e-3  # below it another seed is tried: greedy tokens have to be beyond doubt

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.35,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
GEMMA = {"query_pre_attn_scalar": 24, "sliding_window": 6}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
BOTH = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}

# By the name of the folder: the class of the configuration, what differs from SIZES, and the files' largest size.
FAMILIES = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4, "num_hidden_layers": 1}, None),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3, "vocab_size": 288, "tie_word_embeddings": True}, None),
    "mistral": ("MistralConfig", {"sliding_window": 6}, None),
    "qwen2": ("Qwen2Config", {"rope_parameters": YARN, "head_dim": None}, 20_000),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}, None),
    "gemma2": ("Gemma2Config", GEMMA, None),
    "gemma3": ("Gemma3TextConfig", GEMMA | {
        "num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        "rope_parameters": BOTH}, None),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}, None),
    "qwen3_moe": ("Qwen3MoeConfig", {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}, None),
}  # fmt: skip


def model_of(name: str, seed: int) -> transformers.PreTrainedModel:
    """A random model, in f32, whose weights are numbers of bf16."""
    kind, changes, _ = FAMILIES[name]
    values = {key: value for key, value in (SIZES | changes).items() if value is not None}
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**values)).float().eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith(("norm.weight", "layernorm.weight", "bias")):
                weight += 0.2 * torch.randn_like(weight)
            if "experts" in key or key.endswith("mlp.gate.weight"):
                weight.normal_(0, SIZES["initializer_range"])
            if name.startswith("gemma") and "embed" in key:  # scaled up, and tied: else each token would follow itself
                weight *= 0.1
            weight.copy_(weight.bfloat16())
    return model


@torch.no_grad()
def expected_of(model: transformers.PreTrainedModel) -> tuple[dict[str, np.ndarray], float]:
    """What the tests compare with, and how close the second-best token ever comes."""
    rng = np.random.default_rng(0)
    vocab, longest = model.config.vocab_size, max(LENGTHS)
    tokens = np.zeros((len(LENGTHS), longest), np.int32)
    logits = np.zeros((len(LENGTHS), longest, vocab), np.float32)
    greedy = np.zeros((len(LENGTHS), STEPS), np.int32)
    closest = np.inf
    for i, length in enumerate(LENGTHS):
        tokens[i, :length] = rng.integers(3, vocab, length)
        ids = torch.tensor(tokens[i : i + 1, :length].astype(np.int64))
        logits[i, :length] = model(ids).logits[0].numpy()
        made = model.generate(
            ids, max_new_tokens=STEPS, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(ids)
        )
        greedy[i] = made[0, length:].numpy()
        best = model(made).logits[0, length - 1 : -1].topk(2).values.numpy()
        closest = min(closest, ((best[:, 0] - best[:, 1]) / np.abs(best[:, 0])).min())
    return {"tokens": tokens, "lengths": np.asarray(LENGTHS, np.int32), "logits": logits, "greedy": greedy}, closest


def make(name: str) -> None:
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    for seed in range(100):
        model = model_of(name, seed)
        expected, closest = expected_of(model)
        if closest > CLOSEST and len({tuple(row[-8:]) for row in expected["greedy"]}) > 1:
            break
    else:
        sys.exit(f"{name}: no seed keeps the greedy tokens apart")
    size = FAMILIES[name][2]
    model.bfloat16().save_pretrained(folder, **({"max_shard_size": size} if size else {}))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    metadata = versions | {"seed": str(seed), "closest": f"{closest:.2g}"}
    safetensors.numpy.save_file(expected, folder / "expected.safetensors", metadata)
    if name == "llama3":
        make_tokenizer(folder)
    total = sum(path.stat().st_size for path in folder.iterdir())
    tokens = len(set(expected["greedy"].ravel()))
    print(f"{name}: seed {seed}, {total / 1e3:.0f} KB, {tokens} different greedy tokens, closest {closest:.2g}")


TEXT = "Each folder has a naïve decoder, 木."
CHAT = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(folder: pathlib.Path) -> None:
    """Bytes, some merges, and special tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=288,
        special_tokens=special,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([__doc__], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "chat_template": CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}) + "\n")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What has a folder? "}]
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    said = {"text": TEXT, "ids": theirs(TEXT)["input_ids"], "chat": chat, "chat_ids": ids}
    (folder / "text.json").write_text(json.dumps(said) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or FAMILIES:
        make(name)


if __name__ == "__main__":
    main()
