"""The fields of a `config.json`, each of which is taken, or allowed for a reason, or an error."""

import math
from collections.abc import Mapping
from typing import Any

from jaxtaxfree.models.errors import ModelError

REQUIRED: Any = object()

# Fields that no result depends on, with the reason.
IRRELEVANT = {
    "_name_or_path": "where somebody loaded it from",
    "_attn_implementation_autoset": "which of transformers' attentions",
    "_sliding_window_pattern": "layer_types beside it says it",
    "architectures": "model_type says it",
    "attention_dropout": "training",
    "auto_map": "code of another library",
    "bos_token_id": "the tokenizer puts it",
    "cache_implementation": "how transformers keeps its cache",
    "chunk_size_feed_forward": "how transformers splits its work",
    "hybrid_cache": "how transformers keeps its cache",
    "id2label": "classifiers",
    "initializer_range": "training",
    "label2id": "classifiers",
    "output_attentions": "what transformers returns",
    "output_hidden_states": "what transformers returns",
    "output_router_logits": "what transformers returns",
    "pad_token_id": "prompts of a batch have lengths",
    "pretraining_tp": "the same sums in another order",
    "problem_type": "classifiers",
    "return_dict": "what transformers returns",
    "router_aux_loss_coef": "training",
    "router_jitter_noise": "training",
    "transformers_version": "who wrote it",
    "unsloth_version": "who wrote it",
    "unsloth_fixed": "who wrote it",
    "use_cache": "what transformers returns",
}


class Fields:
    """Fields of a configuration, crossed off as they are taken.

    Args:
      values: the parsed JSON object.
      where: what it is called in errors.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._values, self._where = values, where
        self._left = dict(values)
        self.wrong: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def take(self, name: str, kind: type, default: Any = REQUIRED, above: float | None = None) -> Any:
        """The value of a field, of this kind; `default` if it is not there, or null where the default is not REQUIRED.

        Numbers are finite, and larger than `above`. What is wrong is kept for `finish`, and a value of the kind is
        returned.
        """
        value = self._left.pop(name, None)
        if value is None:
            if default is REQUIRED:
                self.wrong.append(f"{name} is missing")
                return kind(1) if kind in (int, float) else kind()
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.wrong.append(f"{name} must be of type {kind.__name__}, not {_short(value)}")
            return kind(1) if kind in (int, float) else kind()
        if kind is float and not math.isfinite(value):
            self.wrong.append(f"{name} must be a finite number, not {value}")
            return 1.0
        if above is not None and not value > above:
            self.wrong.append(f"{name} must be larger than {above:g}, not {value}")
            return kind(above + 1)
        return value

    def only(self, name: str, *allowed: Any, why: str) -> None:
        """A field that may be missing, null, or one of these values."""
        value = self._left.pop(name, None)
        if value is not None and value not in allowed:
            self.wrong.append(f"{name}={value!r} is not supported ({why})")

    def finish(self) -> None:
        """Raises ModelError with all that is wrong, and what is left over."""
        if unknown := [name for name in self._left if name not in IRRELEVANT]:
            named = ", ".join(f"{name}={_short(self._left[name])}" for name in unknown)
            self.wrong.append(f"unknown field{'s' * (len(unknown) > 1)} {named}")
        self.check()

    def check(self) -> None:
        """Raises ModelError with all that is wrong so far."""
        if self.wrong:
            raise ModelError(f"{self._where} cannot be taken: {'; '.join(self.wrong)}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
