"""Programs that decode several tokens, the sampler between the steps; and what they copy."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.helpers.decoders import rotary_tables

OF_CACHE = P(None, None, "tp")
CACHES = (OF_CACHE, OF_CACHE)

# An instruction of optimised HLO that moves a whole array: its result's sizes, and what it is.
_MOVES = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = \(?\w+\[(?P<sizes>[\d,]*)\]\S* (?P<what>copy|copy-start|transpose|fusion)\("
)
_ADDS = re.compile(r"copy|transpose|convert")  # in the name of a fusion


def moved(text: str, least: int) -> list[str]:
    """The lines of optimised HLO that copy, transpose or convert an array of so many elements, or more."""
    found = []
    for line in text.splitlines():
        move = _MOVES.match(line)
        if move is None or (move["what"] == "fusion" and not _ADDS.search(move["name"])):
            continue
        if math.prod(int(size) for size in move["sizes"].split(",") if size) >= least:
            found.append(line.strip())
    return found


def decode_loop(
    model: jtf.DecoderSpec, mesh: Mesh, slots: int, steps: int, k: int = 8, **keywords: Any
) -> Callable[..., Any]:
    """A program of so many steps, each of which reads the token that the one before has drawn.

    Returns: (params, embed [V, D], token [B], cache, lengths [B], key) -> (tokens [steps, B], cache). It takes the
      cache for its own.
    """
    cos, sin = rotary_tables(model, slots)

    def local(
        params: Mapping[str, jax.Array], embed: jax.Array, token: jax.Array, cache: Any, lengths: jax.Array, key: Any
    ) -> Any:
        def step(state: Any) -> Any:
            i, token, cache, out = state
            logits, cache = jtf.decode_step(
                params, embed[token], cache, lengths + i, "tp", model=model, cos=cos, sin=sin, **keywords
            )
            token = jtf.sample_top_k(logits, jax.random.fold_in(key, i), "tp", k=k, temperature=0.8)
            return i + 1, token, cache, out.at[i].set(token)

        out = jnp.zeros((steps, len(token)), jnp.int32)
        state = (jnp.int32(0), token, cache, out)
        *_, cache, out = lax.while_loop(lambda state: state[0] < steps, step, state)
        return out, cache

    call = jax.shard_map(
        local, mesh=mesh, in_specs=(model.partition_specs("tp"), P(), P(), OF_CACHE, P(), P()),
        out_specs=(P(), OF_CACHE), check_vma=False,
    )  # fmt: skip
    return jax.jit(call, donate_argnums=3)
