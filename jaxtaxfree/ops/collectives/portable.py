"""The kernels of `psum`, `all_gather`, `psum_scatter` and `all_to_all`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from triton import next_power_of_2

from jaxtaxfree.kernels.collectives.portable import (
    all_gather_kernel,
    all_to_all_kernel,
    psum_kernel,
    psum_scatter_kernel,
)
from jaxtaxfree.ops.blocks.portable import each
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.settings import Settings, setting

# Of all ranks, that a program can wait for at a time.
MOST_MESSAGES = 8192
# Bytes of a rank: above the first number, and up to the second, a gather takes words.
GATHERED_AS_WORDS = (32 << 10, 2 << 20)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """All that decides how a collective travels.

    Attributes:
      size: number of elements of x in `psum`, and of a rank's part in the others.
      outer: number of pieces of a rank's part in the whole array.
      out_outer: of `all_to_all` the same in the result.
      world: number of ranks.
      dtype: dtype of the elements.
    """

    size: int
    outer: int = 1
    out_outer: int = 1
    world: int
    dtype: np.dtype

    @property
    def words(self) -> int:
        """Messages of an element, which carry 16 bits each."""
        return max(1, self.dtype.itemsize // 2)

    @property
    def longest_block(self) -> int:
        """Elements that a program can receive as messages."""
        return MOST_MESSAGES // (self.words * next_power_of_2(self.world))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """How a kernel splits its work.

    Attributes:
      protocol: how elements travel.
        "messages": in words that show whether they have arrived. This takes twice the bytes, and no fence.
        "words": the same with half the bytes, for sums of floats and for elements of 16 and 32 bits that are not
        summed. Of the latter, words of ones only (-1, NaN) take longer.
        "signals": as they are, with a signal after them.
      block: elements of each rank's part that a program takes, a power of 2.
      num_warps: warps of a program.
    """

    protocol: str = "messages"
    block: int = setting(256, least=16, most=1 << 14, power_of_2=True)
    num_warps: int = setting(2, least=1, most=16, power_of_2=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol not in ("messages", "words", "signals"):
            raise ValueError(f"There is no protocol {self.protocol!r}: choose 'messages', 'words' or 'signals'.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PsumConfig(Config):
    """How the kernel of `psum` splits its work.

    Attributes:
      protocol, block, num_warps: as in `Config`.
      shots: 1: every rank adds up everything. 2: each rank adds up its share, and the ranks then gather the sums.
    """

    shots: int = setting(1, least=1, most=2)


class _Collective(Variant[Call]):
    """A program talks only with the programs of its id on the other ranks.

    Attributes:
      operation: its name.
    """

    name, Config = "portable", Config
    operation: str

    def shots(self, config: Config) -> int:
        del config
        return 1

    def carries_words(self, call: Call) -> bool:
        """Whether the protocol "words" delivers what it is given."""
        return jnp.issubdtype(call.dtype, jnp.floating)

    def refuses(self, call: Call, config: Config) -> list[str]:
        if config.protocol == "words" and not self.carries_words(call):
            return [
                "words carry sums of floats, and what is not summed of 16 and 32 bits; "
                f"{self.operation} of {call.dtype} takes the protocol 'messages' or 'signals'"
            ]
        if config.protocol != "signals" and config.block > call.longest_block:
            most = call.longest_block
            return [f"over {call.world} ranks it takes blocks of at most {most} of {call.dtype} as messages"]
        return []

    def _by_size(self, call: Call, *, part: int, num_warps: int, by_words: bool, most: int) -> dict[str, Any]:
        """Settings by size.

        Args:
          part: bytes that a rank takes from each other one.
          num_warps: where elements travel as words.
          by_words: whether they do, if a block is short enough.
          most: bytes of a call that travel as messages.
        """
        itemsize = call.dtype.itemsize
        # Each thread has one access of 16 bytes.
        if by_words and (block := 512 * num_warps // itemsize) <= call.longest_block:
            return {"protocol": "words", "block": block, "num_warps": num_warps}
        if call.size * itemsize > most:
            # Two accesses of 16 bytes for each thread and rank.
            return {"protocol": "signals", "block": 8192 // itemsize, "num_warps": 8}
        messages = part * call.words // itemsize
        num_warps = 1 if messages <= 8192 else 2 if messages <= 32768 else 4
        block = min(128 * num_warps // call.words, call.longest_block)
        return {"protocol": "messages", "block": block, "num_warps": num_warps}

    def _sums_by_size(self, call: Call, *, part: int, most: int) -> dict[str, Any]:
        num_warps = 1 if part <= 64 << 10 else 4 if part <= 512 << 10 else 8
        return self._by_size(call, part=part, num_warps=num_warps, by_words=self.carries_words(call), most=most)

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Any:
        del asked
        return Config(**self._sums_by_size(call, part=call.size * call.dtype.itemsize, most=128 << 10))

    def launch(self, call: Call, config: Any) -> dict[str, Any]:
        two_shots, dense = self.shots(config) == 2, config.protocol == "signals"
        # What begins at a multiple of 16 elements can be moved by 16 bytes at a time.
        part = math.ceil(call.size / (16 * call.world)) * 16 if two_shots else call.size
        programs = math.ceil(part / config.block)
        return {
            "out_type": jax.ShapeDtypeStruct((call.size,), call.dtype),
            "grid": programs,
            **self._buffers(call, config, (call.world, programs, config.block)),
            "signals": {"arrived": (1 + two_shots, programs, call.world) if dense else 0},
            "name": self.operation,
            "num_warps": config.num_warps,
            "cost_estimate": {
                "flops": (call.world - 1) * call.size,
                "bytes_accessed": 2 * call.world * call.size * call.dtype.itemsize,
            },
            "SIZE": call.world * call.size,
            "PART": part,
            "BLOCK": config.block,
            "PROTOCOL": config.protocol,
            "INNER": call.size // call.outer,
        }

    def inboxes(self, config: Any, inbox: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The memory in which the ranks' elements arrive, by the kernel's parameter."""
        del config
        return {"parts": inbox}

    def _buffers(self, call: Call, config: Any, inbox: tuple[int, ...]) -> dict[str, Any]:
        inboxes = self.inboxes(config, inbox)
        if config.protocol == "signals":
            return {"scratch": {name: jax.ShapeDtypeStruct(shape, call.dtype) for name, shape in inboxes.items()}}
        if config.protocol == "words":
            sizes = {name: math.prod(shape) * call.dtype.itemsize // 4 for name, shape in inboxes.items()}
            return {"messages": {name: jax.ShapeDtypeStruct((size,), np.int32) for name, size in sizes.items()}}
        return {"messages": {name: (*shape, call.words) for name, shape in inboxes.items()}}

    def variations(self, call: Call, config: Any) -> list[dict[str, Any]]:
        block = config.block
        return [
            *each("protocol", "messages", "signals"),
            *each("block", max(16, block // 2), 2 * block, 4 * block),
            *each("num_warps", 1, 2, 4, 8),
        ]


class Psum(_Collective):
    operation, Config, kernel = "psum", PsumConfig, psum_kernel

    def shots(self, config: Any) -> int:
        return config.shots

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> PsumConfig:
        del asked
        nbytes = call.size * call.dtype.itemsize
        shots = 2 if call.world > 2 and nbytes > 64 << 10 else 1
        part, most = (nbytes // call.world, 512 << 10) if shots == 2 else (nbytes, 128 << 10)
        return PsumConfig(**self._sums_by_size(call, part=part, most=most), shots=shots)

    def inboxes(self, config: Any, inbox: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"parts": inbox, "sums": inbox if config.shots == 2 else (0,)}

    def launch(self, call: Call, config: Any) -> dict[str, Any]:
        found = super().launch(call, config) | {"SIZE": call.size, "TWO_SHOT": config.shots == 2}
        del found["INNER"]
        return found

    def variations(self, call: Call, config: Any) -> list[dict[str, Any]]:
        return [*each("shots", 1, 2), *each("protocol", "words"), *super().variations(call, config)]


class AllGather(_Collective):
    operation, kernel = "all_gather", all_gather_kernel

    def carries_words(self, call: Call) -> bool:
        return call.dtype.itemsize > 1

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        del asked
        part = call.size * call.dtype.itemsize
        # In the gather fewer threads wait for each other.
        num_warps = 1 if part <= 256 << 10 else 4
        by_words = self.carries_words(call) and GATHERED_AS_WORDS[0] < part <= GATHERED_AS_WORDS[1]
        return Config(**self._by_size(call, part=part, num_warps=num_warps, by_words=by_words, most=128 << 10))

    def inboxes(self, config: Any, inbox: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {"parts": inbox, "doubts": inbox if config.protocol == "words" else (0,)}

    def launch(self, call: Call, config: Any) -> dict[str, Any]:
        found = super().launch(call, config)
        found["cost_estimate"]["flops"] = 0
        return found | {"out_type": jax.ShapeDtypeStruct((call.world * call.size,), call.dtype)}


class PsumScatter(_Collective):
    operation, kernel = "psum_scatter", psum_scatter_kernel

    def variations(self, call: Call, config: Any) -> list[dict[str, Any]]:
        return [*each("protocol", "words"), *super().variations(call, config)]


class AllToAll(AllGather):
    operation, kernel = "all_to_all", all_to_all_kernel

    def launch(self, call: Call, config: Any) -> dict[str, Any]:
        return super().launch(call, config) | {"OUT_INNER": call.size // call.out_outer}


# The kernels of each operation.
VARIANTS = {variant.operation: (variant,) for variant in (Psum(), AllGather(), PsumScatter(), AllToAll())}
