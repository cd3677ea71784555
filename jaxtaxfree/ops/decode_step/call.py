"""A call of `decode_step` as its kernels see it, and the settings of the kernel for all layers."""

import dataclasses
from typing import Any, Self

import numpy as np

from jaxtaxfree.ops.decode_step.spec import DecoderSpec
from jaxtaxfree.ops.operand import Scales
from jaxtaxfree.settings import Settings, setting
from jaxtaxfree.target import Target

GROUP = 64  # columns that TMA's swizzle keeps together
LARGEST_BOX = 256  # rows, or groups, of a block
FEW = 4  # sequences, whose vectors registers have room for
EIGHT_BITS = ("int8", "float8_e4m3fn")  # of weights and of a cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eight:
    """A weight of 8 bits: its name, its dtype, and what of it has one scale, "row" or "block"."""

    name: str
    dtype: str
    scales: Scales

    @classmethod
    def of(cls, name: str, weight: Any, scales: Any) -> Self:
        """Of a weight [..., out, in] and its scales, arrays or their types."""
        kind: Scales = "row" if scales.shape == (*weight.shape[:-1], 1) else "block"
        return cls(name=name, dtype=weight.dtype.name, scales=kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """All that decides how the kernel works.

    Attributes:
      model: what the decoder is made of.
      world: number of ranks.
      batch, tokens: B and T.
      slots: positions of the cache, or of a page of it.
      positions: of the rotary tables.
      dtype, cache_dtype: dtypes of the weights and of the cache.
      eight: the weights that have 8 bits instead.
      by_heads: whether the cache is by heads.
      pool, pages: of a cache in pages the pages of the pool, and those of a sequence; otherwise 0.
      target: the GPU.
    """

    model: DecoderSpec
    world: int
    batch: int
    tokens: int
    slots: int
    positions: int
    dtype: np.dtype
    cache_dtype: np.dtype
    by_heads: bool
    target: Target
    eight: tuple[Eight, ...] = ()
    pool: int = 0
    pages: int = 0

    def dtype_of(self, name: str) -> np.dtype:
        """That of the weight of this name."""
        return next((np.dtype(each.dtype) for each in self.eight if each.name == name), self.dtype)

    @property
    def paged(self) -> bool:
        """Whether the cache is in pages."""
        return self.pages > 0

    @property
    def slots_of_sequence(self) -> int:
        """Positions that a sequence has in the cache."""
        return self.slots * max(self.pages, 1)

    @property
    def narrow_cache(self) -> bool:
        """Whether the cache has 8 bits."""
        return self.cache_dtype.itemsize == 1

    @property
    def heads(self) -> int:
        """Query heads of a rank."""
        return self.model.heads // self.world

    @property
    def kv_heads(self) -> int:
        """Key/value heads of a rank."""
        return self.model.kv_heads // self.world

    @property
    def d_mlp(self) -> int:
        """F of a rank."""
        return self.model.d_mlp // self.world

    @property
    def vocab(self) -> int:
        """Logits of a rank."""
        return self.model.vocab // self.world


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """How the kernel splits its work.

    Attributes:
      tensor_cores: whether these multiply, up to 16 vectors at a time. Otherwise up to 4 vectors lie in registers.
      attention_cores: whether these multiply by old keys and values, as they do with `tensor_cores`.
      tell_queries: whether attention by tensor cores gets queries, new keys and new values by messages. Otherwise all
        programs meet behind them.
      tell_parts: whether who merges parts of heads gets them by messages, from attention by tensor cores. Otherwise all
        programs meet behind them.
      tell_sums: whether all programs get each rank's part of a sum by messages, of 14 bits a number and an exponent for
        each 8, and have the stream in registers, in f32. It is for products in registers. Otherwise who has a row adds
        it up in f32, and sends it to the other programs; with norms behind the blocks all meet.
      programs: all of which run at once, one on each multiprocessor.
      stage: elements of 16 bits of a stage of the ring, a power of 2.
      num_stages: stages of the ring.
      splits: parts of the keys of a sequence and key/value head.
      merged: columns of a head that a program merges at a time, a power of 2 that divides the head size; with
        `tell_parts` these are 4 for each warp.
      num_warps: warps that compute.
      in_flight: how many blocks are on their way into the ring at a time, at most; `num_stages` or more is no bound.
        Messages and meetings queue behind loads, so phases end sooner with fewer, as long as these keep the memory
        busy. By default those that 32 KiB hold, 48 where a rank has 512 MB of a layer's matrices or more, and two at
        least, so that one comes while the next one is asked for (docs/experiments.md).
      pace: clock cycles of a multiprocessor from one such load to the next at least, in all layers but not before the
        logits. Who sends and polls messages is faster beside a memory that is not full. 0: none.
      patience: clock cycles for which a program does not look for parts of sums that are told, or for the inner part of
        an MLP, and a third of them in which it does not look for queries, parts of heads, or heads: who polls holds up
        what it waits for, and who has just looked learns of it a look later. 0: none.
      times: whether the kernel has one more result, i32 [programs, layers + 1, 6, 4]: when each program came to which
        place of each phase, in nanoseconds modulo 2**32. `phases.stamp` of the kernel says to which.
    """

    tensor_cores: bool = False
    attention_cores: bool = False
    tell_queries: bool = False
    tell_parts: bool = False
    tell_sums: bool = False
    programs: int = setting(132, least=1)
    stage: int = setting(8192, least=512, most=1 << 15, power_of_2=True)
    num_stages: int = setting(12, least=2, most=32)
    splits: int = setting(1, least=1)
    merged: int = setting(8, least=4, most=128, power_of_2=True)
    num_warps: int = setting(8, least=4, most=16, power_of_2=True)
    in_flight: int = setting(2, least=1, most=32)
    pace: int = setting(0, least=0, most=1 << 16)
    patience: int = setting(0, least=0, most=1 << 16)
    times: bool = False
