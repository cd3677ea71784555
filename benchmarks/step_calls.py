"""A program of many steps as servers run it: each step is a call of its own, and gives its cache to the next one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.operation import Implementation
from benchmarks.timing import can_queue


@dataclass(frozen=True, kw_only=True)
class StepCalls:
    """Launches a program for each step.

    Attributes:
      start: (x, y) -> what is carried from step to step, with a cache of its own.
      step: (what is carried, x, y) -> the same of the next step. It takes for its own what is carried.
      steps: how many.
      queue: steps may be launched before earlier ones have ended.
    """

    start: Callable[..., Any]
    step: Callable[..., Any]
    steps: int
    queue: bool

    def __call__(self, xs: Any, ys: Any, *, waits: bool = False) -> tuple[None, Any]:
        """All steps of one x; like the usual program it returns its samples, of which there are none, and the result.

        With `waits` the tokens of each step are waited for, before the next one is launched.
        """
        (x,), y = xs, ys[0]
        carry = self.start(x, y)
        for _ in range(self.steps):
            carry = self.step(carry, x, y)
            if waits or not self.queue:
                jax.block_until_ready(carry[-1])
        return None, carry[1:3]


def compile_calls(
    implementation: Implementation,
    mesh: Mesh,
    xs: Any,
    ys: Any,
    rounds: int,
    *,
    begin: Callable[..., Any],
    one_step: Callable[..., Any],
    steps: int,
) -> StepCalls:
    """The step of an implementation as a program.

    Args:
      implementation: its x are (tokens, lengths, cache).
      begin: (x, y) -> what is carried: the two parts of the result, the cache, and the last tokens.
      one_step: (i, what is carried, x, y) -> the same of the next step.
    """
    assert rounds == 1 and len(xs) == 1, "there is one chain of one call"
    x_specs, y_specs = implementation.in_specs
    carried = (P(), *implementation.out_spec, x_specs[2], P())
    local = partial(jax.shard_map, mesh=mesh, check_vma=False)

    def start(x: Any, y: Any) -> Any:
        logits, chosen, cache, last = begin(x, y)
        return jnp.int32(0), logits, chosen, jax.tree.map(jnp.copy, cache), last

    def step(carry: Any, x: Any, y: Any) -> Any:
        i, *state = carry
        return i + 1, *one_step(i, tuple(state), x, y)

    starts = jax.jit(local(start, in_specs=(x_specs, y_specs), out_specs=carried))
    program = jax.jit(local(step, in_specs=(carried, x_specs, y_specs), out_specs=carried), donate_argnums=0)
    lowered = program.lower(starts(xs[0], ys[0]), xs[0], ys[0])
    return StepCalls(
        start=starts,
        step=lowered.compile(compiler_options=implementation.options or None),
        steps=steps,
        queue=can_queue(mesh),
    )
