"""Where the row of each choice of an expert lies when rows are in groups by expert."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from triton import next_power_of_2

from jaxtaxfree.kernels.moe.places import count_kernel, place_kernel
from jaxtaxfree.primitive import Unsupported, collective, needs_devices, symbolic, takes_reference
from jaxtaxfree.shmem import shmem_call

# Experts of which a program keeps the counts in registers.
MOST_EXPERTS = 1024
MOST_CHOICES = 2**30
# Choices by experts that a program has in registers.
MOST_PAIRS = 65536


def places(
    experts: jax.Array, count: int, sources: int, most: int, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """The row of each choice among rows in groups by expert, and how many rows each expert has.

    Choices of an expert keep their order. At most `most` rows are taken: in the order of the sources, then of the
    experts, then of the tokens, the last ones are left out.

    Args:
      experts: i32[T, k], the tokens of `sources` ranks, one rank after the other. What is below 0, or `count` or more,
        is no expert.
      count: number of experts.

    Returns: (i32[T, k], -1 where a choice has no row; i32[count]).
    """
    reasons = unsupported(experts, count=count, sources=sources)
    if takes_reference("moe_places", [experts], implementation, reasons):
        found = reference(experts, count=count, sources=sources, most=most)
    else:
        found = places_p.bind(
            experts, axes=(), count=count, sources=sources, most=most, implementation=implementation, config=()
        )
    return found[0], found[1]


def reference(experts: jax.Array, *, count: int, sources: int, most: int, **_: Any) -> list[jax.Array]:
    """In plain `jnp`."""
    flat = jnp.where((experts >= 0) & (experts < count), experts, count).reshape(-1)
    each = jnp.arange(flat.size, dtype=jnp.int32)
    source = each // max(1, flat.size // sources)
    # [source, expert, and none]
    wanted = jnp.zeros((sources, count + 1), jnp.int32).at[source, flat].add(1)
    ends = jnp.cumsum(wanted[:, :count].reshape(-1))
    taken = jnp.diff(jnp.minimum(ends, most), prepend=0).reshape(sources, count)
    sizes = jnp.sum(taken, 0)
    begin = jnp.cumsum(sizes) - sizes + jnp.cumsum(taken, 0) - taken
    kind = source * (count + 1) + flat
    order = jnp.argsort(kind, stable=True)
    first = (jnp.cumsum(wanted.reshape(-1)) - wanted.reshape(-1))[kind[order]]
    index = jnp.zeros_like(each).at[order].set(each - first)  # among the source's choices of this expert
    own = jnp.minimum(flat, count - 1)
    fits = (flat < count) & (index < taken[source, own])
    return [jnp.where(fits, begin[source, own] + index, -1).reshape(experts.shape), sizes]


def unsupported(experts: Any, *, count: int, sources: int, **_: Any) -> list[str]:
    """All that keeps the kernels from taking these operands."""
    if reasons := symbolic(experts):
        return reasons
    if count > MOST_EXPERTS:
        reasons.append(f"it takes at most {MOST_EXPERTS} experts of a rank, not {count}")
    if not 0 < experts.size <= MOST_CHOICES:
        reasons.append(f"it takes 1 to {MOST_CHOICES} choices of all tokens, not {experts.size}")
    if experts.size % sources:
        reasons.append(f"the {experts.size} choices are not of {sources} ranks alike")
    return reasons


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launches:
    """The two launches of a call.

    Attributes:
      choices: of all sources.
      count, sources, most: as in `places`.
    """

    choices: int
    count: int
    sources: int
    most: int

    @property
    def per_source(self) -> int:
        return self.choices // self.sources

    @property
    def length(self) -> int:
        """Of vectors that have something for each expert."""
        return max(16, next_power_of_2(self.count))

    @property
    def block(self) -> int:
        """Choices of a program, each of which is compared with each expert."""
        return min(256, MOST_PAIRS // self.length, max(16, next_power_of_2(self.per_source)))

    @property
    def blocks(self) -> int:
        """Of a source."""
        return math.ceil(self.per_source / self.block)

    @property
    def _alike(self) -> dict[str, Any]:
        return {
            "axis_name": (),
            "grid": self.sources * self.blocks,
            "num_warps": min(16, max(4, self.block * self.length // 2048)),
            "PER": self.per_source,
            "EXPERTS": self.count,
            "BLOCK": self.block,
            "BLOCKS": self.blocks,
        }

    def counting(self) -> Mapping[str, Any]:
        """The keywords of `shmem_call` for `count_kernel`."""
        counts = jax.ShapeDtypeStruct((self.sources * self.blocks, self.count), jnp.int32)
        step = min(64, max(16, next_power_of_2(self.count)))
        return {**self._alike, "name": "moe_counts", "out_type": counts, "STEP": step}

    def placing(self) -> Mapping[str, Any]:
        """The keywords of `shmem_call` for `place_kernel`."""
        return {
            **self._alike,
            "name": "moe_places",
            "out_type": [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (self.choices, self.count)],
            "SOURCES": self.sources,
            "LENGTH": self.length,
            "MOST": self.most,
            "STEP": min(max(1, 16384 // self.length), next_power_of_2(self.blocks)),
        }


def _fused(
    experts: jax.Array, *, count: int, sources: int, most: int, implementation: str | None = None, **_: Any
) -> list[jax.Array]:
    """By two kernels."""
    if reasons := unsupported(experts, count=count, sources=sources):
        raise Unsupported("moe", reasons)
    flat = experts.reshape(-1)
    launches = Launches(choices=flat.size, count=count, sources=sources, most=most)
    counts = shmem_call(count_kernel, flat, implementation=implementation, **launches.counting())
    found, sizes = shmem_call(place_kernel, flat, counts, implementation=implementation, **launches.placing())
    return [found.reshape(experts.shape), sizes]


def _slower(experts: Any, *, count: int, sources: int, **_: Any) -> str | None:
    """Why XLA is taken, whose sort is slower where both run."""
    return "; ".join(unsupported(experts, count=count, sources=sources)) or None


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[jax.Array], list[Any]]:
    """Whole numbers have no tangents."""
    del tangents
    found = places_p.bind(*primals, **params)
    return found, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in found]


places_p = collective("moe_places", reference=reference, fused=_fused, slower=_slower)
needs_devices(places_p)
ad.primitive_jvps[places_p] = _jvp
