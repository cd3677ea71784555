"""What a dense decoder is made of, as far as `decode_step` has to know it."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jaxtaxfree.ops.quantize import BLOCK

ACTIVATIONS = {"silu": "silu", "gelu": "gelu_exact", "gelu_tanh": "gelu_tanh"}  # as `ops.epilogue` calls them
SIZES = ("layers", "d_model", "heads", "kv_heads", "head_dim", "d_mlp", "vocab")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A family of decoders with RMSNorm, rotary positions, grouped queries and a gated MLP, and the sizes of one.

    It covers Llama 2 and 3, Mistral, Qwen 2, 2.5 and 3, and Gemma 2 and 3; with experts Mixtral and Qwen3-MoE, which
    `jaxtaxfree.models` runs and `decode_step` refuses. Sizes are those of the whole model, of all ranks together. What
    a model does with numbers of its own (frequencies of the rotation, weights) is an operand.

    Attributes:
      layers: L.
      d_model: D.
      heads, kv_heads: N and K, query heads and key/value heads. N is a multiple of K.
      head_dim: H.
      d_mlp: F, of an expert if there are any.
      vocab: V, a multiple of the number of ranks.
      norm_eps: what RMSNorm adds to the mean square.
      norm_plus_one: RMSNorm multiplies by 1 + weight, not by the weight.
      post_norms: a block's result is normalised before it is added to the residual stream, as well as its input.
      qkv_bias: queries, keys and values have a bias.
      qk_norm: each head of queries and keys is normalised before it is rotated.
      rotary_dim: how many of a head's dimensions are rotated, the first ones; None: all. Dimensions i and
        i + rotary_dim / 2 make a pair.
      windows: for each layer the positions before a token that it attends to, besides itself; None: all. Fewer entries
        than layers are taken in turn. (A checkpoint's `sliding_window` counts the token itself, and is 1 more.)
      rotary_tables: for each layer which of the rotary tables is its own, in turn as well.
      score_scale: multiplies attention's scores; None: 1 / sqrt(H).
      score_soft_cap: c. A score becomes c * tanh(score / c).
      activation: of the gate: "silu", "gelu" or "gelu_tanh".
      tied: the logits' weights are the embedding.
      embedding_scale: multiplies x. Gemma has sqrt(D).
      residual_scale: multiplies a block's result before it is added to the residual stream.
      logit_scale: multiplies the logits.
      logit_soft_cap: as `score_soft_cap`, after the scale.
      experts: E, the MLPs of a layer among which a router chooses; 0: there is one, and no router.
      experts_per_token: how many of them a token takes, those with the largest logits of the router.
      normalized_experts: their weights, which are a softmax over all experts, are divided by their sum.
    """

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_mlp: int
    vocab: int
    norm_eps: float = 1e-6
    norm_plus_one: bool = False
    post_norms: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    rotary_dim: int | None = None
    windows: tuple[int | None, ...] = (None,)
    rotary_tables: tuple[int, ...] = (0,)
    score_scale: float | None = None
    score_soft_cap: float | None = None
    activation: str = "silu"
    tied: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    experts: int = 0
    experts_per_token: int = 0
    normalized_experts: bool = True

    def __post_init__(self) -> None:
        for name in SIZES:  # of NumPy's whole numbers Python's, by which tables know a model
            if _is_whole(size := getattr(self, name)):
                object.__setattr__(self, name, int(size))
        if wrong := self._wrong_kinds() or self._wrong_values():
            raise ValueError(f"There is no such DecoderSpec: {'; '.join(wrong)}.")

    def _wrong_kinds(self) -> list[str]:
        """What is of a type that cannot be compared."""
        wrong = [
            f"{name} must be a positive whole number, not {size!r}"
            for name in SIZES
            if type(size := getattr(self, name)) is not int or size < 1
        ]
        for name, least in (("rotary_dim", "None or a whole number"), ("experts", "a whole number"),
                            ("experts_per_token", "a whole number")):  # fmt: skip
            if not (_is_whole(size := getattr(self, name)) or (name == "rotary_dim" and size is None)):
                wrong.append(f"{name} must be {least}, not {size!r}")
        for name in ("norm_eps", "embedding_scale", "residual_scale", "logit_scale"):
            if not _is_finite(number := getattr(self, name)):
                wrong.append(f"{name} must be a finite number, not {number!r}")
        for name in ("score_scale", "score_soft_cap", "logit_soft_cap"):
            if (number := getattr(self, name)) is not None and not _is_finite(number):
                wrong.append(f"{name} must be None or a finite number, not {number!r}")
        of_layers: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
            ("windows", "None and whole numbers", lambda entry: entry is None or _is_whole(entry)),
            ("rotary_tables", "whole numbers", _is_whole),
        )
        for name, entries, known in of_layers:
            if not isinstance(given := getattr(self, name), tuple) or not all(map(known, given)):
                wrong.append(f"{name} must be a tuple of {entries}, not {given!r}")
        if not isinstance(self.activation, str):
            wrong.append(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, not {self.activation!r}")
        return wrong

    def _wrong_values(self) -> list[str]:
        wrong = []
        if self.heads % self.kv_heads:
            wrong.append(f"{self.heads} query heads are no multiple of {self.kv_heads} key/value heads")
        rotated = self.rotary_dim
        if rotated is not None and (rotated % 2 or not 0 <= rotated <= self.head_dim):
            wrong.append(f"rotary_dim must be even and at most head_dim={self.head_dim}, not {rotated}")
        if rotated is None and self.head_dim % 2:
            wrong.append(f"a head of {self.head_dim} dimensions cannot be rotated in pairs: give rotary_dim")
        if not self.windows or not self.rotary_tables:
            wrong.append("windows and rotary_tables need an entry or more, which the layers take in turn")
        if any(window is not None and window < 0 for window in self.windows):
            wrong.append(f"windows must be None or not negative, not {self.windows}")
        if any(table < 0 for table in self.rotary_tables):
            wrong.append(f"rotary_tables must not be negative, not {self.rotary_tables}")
        if self.norm_eps < 0:
            wrong.append(f"norm_eps must not be negative, not {self.norm_eps}")
        if self.activation not in ACTIVATIONS:
            wrong.append(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}, not {self.activation!r}")
        for name in ("score_soft_cap", "logit_soft_cap"):
            if (cap := getattr(self, name)) is not None and not cap > 0:
                wrong.append(f"{name} must be positive, not {cap}")
        if not (0 < self.experts_per_token <= self.experts or self.experts == self.experts_per_token == 0):
            wrong.append(f"a token cannot take {self.experts_per_token} of {self.experts} experts")
        return wrong

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.heads // self.kv_heads

    @property
    def rotated(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def tables(self) -> int:
        """How many rotary tables there are."""
        return 1 + max(self.rotary_tables)

    @property
    def score_factor(self) -> float:
        """What multiplies attention's scores."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    @property
    def gate_activation(self) -> str:
        """`activation`, as `ops.epilogue.ACTIVATIONS` calls it."""
        return ACTIVATIONS[self.activation]

    @property
    def window_by_layer(self) -> tuple[int | None, ...]:
        """`windows`, one for each layer."""
        return _in_turn(self.windows, self.layers)

    @property
    def table_by_layer(self) -> tuple[int, ...]:
        """`rotary_tables`, one for each layer."""
        return _in_turn(self.rotary_tables, self.layers)

    def param_shapes(self, world: int = 1, by_heads: bool = True) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter of a rank, as `decode_step` takes them; of experts as `moe` takes them.

        Args:
          world: number of ranks.
          by_heads: whether each rank has some of the key/value heads, or all of them.
        """
        layers, d, h = self.layers, self.d_model, self.head_dim
        n, f = self.heads // world, self.d_mlp // world
        k = self.kv_heads // world if by_heads else self.kv_heads
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (layers, d),
            "q_proj": (layers, n * h, d),
            "k_proj": (layers, k * h, d),
            "v_proj": (layers, k * h, d),
            "o_proj": (layers, d, n * h),
            "mlp_norm": (layers, d),
            "gate_proj": (layers, f, d),
            "up_proj": (layers, f, d),
            "down_proj": (layers, d, f),
            "final_norm": (d,),
            "embed" if self.tied else "unembed": (self.vocab // world, d),
        }
        if self.qkv_bias:
            shapes |= {"q_bias": (layers, n * h), "k_bias": (layers, k * h), "v_bias": (layers, k * h)}
        if self.qk_norm:
            shapes |= {"q_norm": (layers, h), "k_norm": (layers, h)}
        if self.post_norms:
            shapes |= {"post_attn_norm": (layers, d), "post_mlp_norm": (layers, d)}
        if self.experts:
            into, out = (layers, self.experts, d, f), (layers, self.experts, f, d)
            shapes |= {"router": (layers, self.experts, d), "gate_proj": into, "up_proj": into, "down_proj": out}
        return shapes

    @property
    def matrices(self) -> tuple[str, ...]:
        """The parameters that may have 8 bits, with a scale of the same name and `_scale` behind it."""
        own = () if self.tied else ("unembed",)
        return ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", *own)

    def scale_shapes(self, world: int = 1, by_heads: bool = True, blocks: bool = False) -> dict[str, tuple[int, ...]]:
        """The shapes of a rank's scales of weights of 8 bits, as `decode_step` takes them.

        Args:
          world, by_heads: as in `param_shapes`.
          blocks: there is one for each block of 128 x 128 of the rank's part, else for each row of it.
        """
        shapes = self.param_shapes(world, by_heads)
        found = {}
        for name in self.matrices:
            *layers, rows, columns = shapes[name]
            of = (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)) if blocks else (rows, 1)
            found[f"{name}_scale"] = (*layers, *of)
        return found

    def scale_specs(
        self, axis_name: str | tuple[str, ...], by_heads: bool = True, blocks: bool = False
    ) -> dict[str, PartitionSpec]:
        """The PartitionSpec of each scale of the whole model's weights, as `partition_specs` has those of weights.

        A scale of a row whose columns the ranks share is the same on all of them. Blocks must not lie on two ranks.
        """
        specs = self.partition_specs(axis_name, by_heads)
        row = {name: at for name, at in self.sharded(by_heads).items() if at == len(self.param_shapes()[name]) - 1}
        found = {name: PartitionSpec() if name in row and not blocks else specs[name] for name in self.matrices}
        return {f"{name}_scale": spec for name, spec in found.items()}

    def sharded(self, by_heads: bool = True) -> dict[str, int | None]:
        """The dimension along which the ranks share each parameter of the whole model; None: each has all of it."""
        kv = 1 if by_heads else None
        rows = {"q_proj": 1, "k_proj": kv, "v_proj": kv, "q_bias": 1, "k_bias": kv, "v_bias": kv}
        into, out = (3, 2) if self.experts else (1, 2)
        rows |= {"gate_proj": into, "up_proj": into, "down_proj": out, "o_proj": 2, "embed": 0, "unembed": 0}
        return {name: rows.get(name) for name in self.param_shapes()}

    def partition_specs(self, axis_name: str | tuple[str, ...], by_heads: bool = True) -> dict[str, PartitionSpec]:
        """The PartitionSpec of each parameter of the whole model, along the axes that `decode_step` gets."""
        sharded = self.sharded(by_heads).items()
        return {name: PartitionSpec() if at is None else PartitionSpec(*[None] * at, axis_name) for name, at in sharded}


def _is_whole(x: Any) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _is_finite(x: Any) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and math.isfinite(x)


def _in_turn[T](entries: Sequence[T], count: int) -> tuple[T, ...]:
    return tuple(entries[i % len(entries)] for i in range(count))
