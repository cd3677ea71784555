"""`decode_step` in one launch on real GPUs: right, and the same bits each time."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.helpers import parity
from tests.helpers.decoders import make_params, rotary_tables, tiny

pytestmark = pytest.mark.gpu(2)

SLOTS = 256
STEPS = 8
SIZES = {"layers": 2, "d_model": 512, "heads": 8, "kv_heads": 2, "head_dim": 128, "d_mlp": 1024, "vocab": 1024}
LLAMA = tiny("llama-3-8b", **SIZES)
# The model, and the tokens of each sequence in the cache.
CASES = {
    "one sequence": (LLAMA, (37,)),
    "an empty cache": (LLAMA, (0, 200)),
    "four sequences": (LLAMA, (5, 240, 64, 100)),
    "rows that nothing divides": (dataclasses.replace(LLAMA, d_mlp=2176, vocab=1002), (90,)),
    "qwen 2": (tiny("qwen2.5-0.5b", **{**SIZES, "head_dim": 64}), (100, 3)),
    "qwen 3": (tiny("qwen3-8b", **SIZES), (64,)),
    "gemma 2": (tiny("gemma-2-9b", **SIZES), (33, 200)),
    "a window": (dataclasses.replace(LLAMA, windows=(64, None)), (130, 20)),
    "caps": (dataclasses.replace(LLAMA, score_soft_cap=5.0, logit_soft_cap=2.0, activation="gelu_tanh"), (90,)),
}


def programs(model: jtf.DecoderSpec, lengths: tuple[int, ...], world: int) -> tuple[Any, Any, tuple[Any, ...]]:
    """Some steps, one after the other, by the kernel and by XLA; and their operands."""
    mesh = parity.mesh_of(jax.devices("cuda")[:world], (world,), ("tp",))
    specs = {name: P() if at is None else P(*[None] * at, "tp") for name, at in model.sharded().items()}
    of_cache = P(None, None, "tp")
    rng = np.random.default_rng(0)
    b = len(lengths)
    cos, sin = rotary_tables(model, SLOTS)

    def put(array: np.ndarray, spec: P) -> jax.Array:
        return jax.device_put(jnp.asarray(array, jnp.bfloat16), NamedSharding(mesh, spec))

    params = {name: put(w, specs[name]) for name, w in make_params(model).items()}
    xs = put(rng.standard_normal((STEPS, b, model.d_model)), P())
    size = (model.layers, b, model.kv_heads, SLOTS, model.head_dim)
    cache = tuple(put(rng.standard_normal(size), of_cache) for _ in range(2))

    def program(implementation: str) -> Any:
        def run(params: Any, xs: jax.Array, cache: Any) -> Any:
            def step(state: Any, x: jax.Array) -> Any:
                at, cache = state
                logits, cache = jtf.decode_step(
                    params, x, cache, at, "tp", model=model, cos=cos, sin=sin, implementation=implementation
                )
                return (at + 1, cache), logits

            (_, cache), logits = jax.lax.scan(step, (jnp.asarray(lengths), cache), xs)
            return logits, cache

        out_specs = (P(None, None, "tp"), (of_cache, of_cache))
        in_specs = (specs, P(), (of_cache, of_cache))
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))

    return program("fused"), program("xla"), (params, xs, cache)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_parity(name, world):
    fused, plain, operands = programs(*CASES[name], world)
    found, expected = jtf.block_until_ready(fused(*operands)), plain(*operands)
    for mine, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        mine, wanted = np.asarray(mine, np.float64), np.asarray(wanted, np.float64)
        assert np.linalg.norm(mine - wanted) < 0.02 * np.linalg.norm(wanted)


@pytest.mark.parametrize("world", [1, 2])
def test_repetitions_are_bitwise_equal(world):
    fused, _, operands = programs(*CASES["an empty cache"], world)
    first = jax.tree.map(np.asarray, jtf.block_until_ready(fused(*operands)))
    for _ in range(1000 // STEPS):
        again = jtf.block_until_ready(fused(*operands))
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(first), strict=True))
