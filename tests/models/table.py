"""The table of docs/models.md: which checkpoints the tests cover, from their own configurations.

python -m tests.models.table
"""

import json
import sys

import safetensors

from jaxtaxfree import DecoderSpec
from jaxtaxfree.models import read_config
from jaxtaxfree.models.config import ModelConfig
from jaxtaxfree.models.weights import is_whole_step
from tests.helpers.checkpoints import FOLDER, NAMES
from tests.helpers.decode_steps import call_of, refusals
from tests.helpers.decoders import FAMILIES

# The published models that a checkpoint of the tests stands for, and of one of them the sizes.
PUBLISHED = {
    "llama2": ("Llama 2", "llama-2-7b"),
    "llama3": ("Llama 3, 3.1, 3.2, 3.3", "llama-3-8b"),
    "mistral": ("Mistral 7B and its kind", "mistral-7b-v0.1"),
    "qwen2": ("Qwen 2, 2.5", "qwen2-7b"),
    "qwen3": ("Qwen 3", "qwen3-8b"),
    "gemma2": ("Gemma 2", "gemma-2-9b"),
    "gemma3": ("Gemma 3, text alone", "gemma-3-4b"),
    "mixtral": ("Mixtral", None),
    "qwen3_moe": ("Qwen 3 with experts", None),
}


def step_of(spec: DecoderSpec, by_heads: bool, published: str | None) -> str:
    """What a step of one sequence is on Hopper."""
    if not is_whole_step(spec, by_heads):
        return "operations"
    refused = refusals(call_of(FAMILIES[published], 2, slots=4096, by_heads=by_heads))
    return "`decode_step` by XLA" if refused else "one launch"


def parts(config: ModelConfig) -> str:
    """What its checkpoint has that a plain decoder has not."""
    spec = config.spec
    window = sum(window is not None for window in spec.window_by_layer)
    found = {
        f"{spec.group} queries a key": spec.group > 1,
        "bias of q, k, v": spec.qkv_bias,
        "norms of q, k": spec.qk_norm,
        "norms behind blocks": spec.post_norms,
        "a window" if window == spec.layers else "a window in some layers": window,
        "soft caps": spec.score_soft_cap or spec.logit_soft_cap,
        "two rotary tables": spec.tables > 1,
        f"{spec.experts_per_token} of {spec.experts} experts": spec.experts,
        "tied": spec.tied,
    }
    kinds = sorted({rotary.kind for rotary in config.rotaries} - {"default"})
    return ", ".join([*(name for name, there in found.items() if there), *(f"rotary scaling {kind}" for kind in kinds)])


def table() -> str:
    rows = ["| | `model_type` | the tests' checkpoint | a step, cache by heads | along the sequence | transformers |"]
    rows.append("|---|---|---|---|---|---|")
    for name in NAMES:
        config = read_config(FOLDER / name)
        kind = json.loads((FOLDER / name / "config.json").read_text())["model_type"]
        with safetensors.safe_open(FOLDER / name / "expected.safetensors", "numpy") as file:
            version = file.metadata()["transformers"]
        model, published = PUBLISHED[name]
        steps = [step_of(config.spec, by_heads, published) for by_heads in (True, False)]
        rows.append(f"| {' | '.join([model, f'`{kind}`', parts(config), *steps, version])} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
