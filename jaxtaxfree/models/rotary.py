"""Rotary tables of published models: the angles of each position, and the scalings of frequencies."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
    """One rotary table.

    The names and the arithmetic are those of the field `rope_scaling` of a `config.json`.

    Attributes:
      theta: the base of the frequencies.
      dim: how many of a head's dimensions are rotated.
      kind: "default", "linear" (positions are divided by `factor`), "llama3" (low frequencies alone are) or "yarn"
        (arXiv 2309.00071).
      factor: of the scaling.
      original: positions that the model was trained for before its frequencies were scaled.
      low, high: of "llama3", the factors of its low and high frequencies.
      beta_fast, beta_slow, truncate: of "yarn", where it passes from one scaling to the other.
      attention_factor: multiplies cos and sin.
    """

    theta: float
    dim: int
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def frequencies(self) -> np.ndarray:
        """Radians a position of each pair of dimensions, f32 [dim / 2]."""
        plain = 1 / np.float32(self.theta) ** (np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim))
        if self.kind == "linear":
            return plain / np.float32(self.factor)
        if self.kind == "llama3":
            return self._llama3(plain)
        return self._yarn(plain) if self.kind == "yarn" else plain

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        turns = self.original * plain / (2 * math.pi)  # of a pair in the context of the first training
        share = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return ((1 - share) * plain / self.factor + share * plain).astype(np.float32)

    def _yarn(self, plain: np.ndarray) -> np.ndarray:
        def dimension(turns: float) -> float:
            """Which pair of dimensions turns so often in the context of the first training."""
            return self.dim * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        first, last = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.dim - 1)
        ramp = np.clip((np.arange(self.dim // 2) - first) / (max(last - first, 1e-3)), 0, 1)
        return (ramp * plain / self.factor + (1 - ramp) * plain).astype(np.float32)


def rotary_tables(rotaries: Sequence[Rotary], positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, each f32 [tables, positions, dim / 2], as `decode_step` takes them."""
    # In f32, as the models were trained: far from 0 an angle's rounding is larger than that of the logits.
    at = np.arange(positions, dtype=np.float32)
    angles = np.stack([np.outer(at, rotary.frequencies()) for rotary in rotaries])
    scale = np.asarray([rotary.attention_factor for rotary in rotaries], np.float32)[:, None, None]
    return np.cos(angles) * scale, np.sin(angles) * scale
