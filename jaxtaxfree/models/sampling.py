"""The next token, of logits whose vocabulary is sharded."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxtaxfree.ops.sampling import sample_greedy, sample_top_k
from jaxtaxfree.primitive import check_whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn.

    Attributes:
      temperature: divides the logits; 0: the likeliest token.
      top_k: how many of the likeliest tokens are candidates; None: all.
      top_p: of them the fewest, likeliest first, whose probabilities add up to it or more.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k is not None:
            check_whole("a sampling", "top_k", self.top_k)
        wrong = []
        if not self.temperature >= 0:
            wrong.append(f"temperature must not be negative, and is {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            wrong.append(f"top_k must be 1 or more, and is {self.top_k}")
        if not 0 < self.top_p <= 1:
            wrong.append(f"top_p must be above 0 and at most 1, and is {self.top_p}")
        if wrong:
            raise ValueError(f"There is no such sampling: {'; '.join(wrong)}.")


def next_tokens(
    logits: jax.Array,
    key: jax.Array,
    axes: tuple[str, ...],
    *,
    sampling: Sampling,
    vocab: int,
    implementation: str | None = None,
) -> jax.Array:
    """A token of each sequence, the same on every rank.

    Args:
      logits: f32 [B, V / W], of this rank's part of the vocabulary.
      key: of `jax.random`, the same on every rank; another one in each step.
      vocab: tokens that there are. Those behind them only fill the ranks' parts.
      implementation: as in `sample_top_k`.

    Returns: i32[B].
    """
    own = logits.shape[-1]
    if vocab < own * lax.axis_size(axes):
        ids = own * lax.axis_index(axes) + jnp.arange(own)
        logits = jnp.where(ids < vocab, logits, -jnp.inf)
    if not sampling.temperature:
        return sample_greedy(logits, axes, implementation=implementation)
    return sample_top_k(
        logits, key, axes, k=min(sampling.top_k or vocab, vocab), temperature=sampling.temperature,
        top_p=sampling.top_p, implementation=implementation,
    )  # fmt: skip
