"""Calls of `decode_step`'s kernel for the simulator: tiny models, and what must come out."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import simulator
from jaxtaxfree.ops.decode_step.call import Eight
from jaxtaxfree.ops.decode_step.hopper import Call, Config, Hopper
from jaxtaxfree.target import HOPPER
from tests.helpers.decoders import in_eight_bits, make_params, rotary_tables, tiny

SLOTS = 20  # of the cache, no multiple of a block
CONFIG = Config(programs=3, stage=512, num_stages=3, splits=1, merged=32, num_warps=4, in_flight=2)


def call_of(model: jtf.DecoderSpec, world: int, b: int = 1, slots: int = SLOTS, **changes: Any) -> Call:
    """A step in bf16 on Hopper, with a cache by heads."""
    bf16 = np.dtype(jnp.bfloat16)
    usual = {"tokens": 1, "positions": slots, "dtype": bf16, "cache_dtype": bf16, "by_heads": True, "target": HOPPER}
    return Call(model=model, world=world, batch=b, slots=slots, **{**usual, **changes})


def refusals(call: Call) -> list[str]:
    """Why the kernel does not take it, with the configuration of its shape."""
    kernel = Hopper()
    return kernel.refuses(call, kernel.by_shape(call, {}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A call of the kernel.

    Attributes:
      family: of the model.
      world: number of ranks. Each has one key/value head, and all have the same part of the vocabulary, so that all
        logits have to be the same bits.
      lengths: tokens of each sequence in the cache; -1 of one without a new token.
      layers, group: of the model.
      changes: what else is changed of the model.
      config: what is changed of CONFIG.
      eight: a dtype of 8 bits for the matrices of layers, and for the unembedding if it is said; or none.
      cache: a dtype of 8 bits for the cache, or bfloat16.
    """

    family: str = "llama-3-8b"
    world: int = 2
    lengths: tuple[int, ...] = (11,)
    layers: int = 1
    group: int = 2
    changes: tuple[tuple[str, Any], ...] = ()
    config: tuple[tuple[str, Any], ...] = ()
    eight: tuple[str, ...] = ()
    cache: str = "bfloat16"

    @property
    def model(self) -> jtf.DecoderSpec:
        world = self.world
        least = 128 if self.eight else 64
        sizes = {"heads": self.group * world, "kv_heads": world, "head_dim": 64}
        sizes |= {"d_model": least, "d_mlp": least * world}
        return dataclasses.replace(
            tiny(self.family, layers=self.layers, vocab=12 * world, **sizes), **dict(self.changes)
        )

    def run(self, kernel: Any = Hopper.kernel, **settings: Any) -> None:
        """Simulates the call. Its logits must be right, and the same on all ranks. In the cache only what is new may be
        other bits.
        """
        arrays, keywords, logits, cache, news = _prepared(self)
        outs, _ = simulator.run(kernel, *arrays, **{**keywords, **settings})
        lengths = np.asarray(self.lengths)
        kept = np.flatnonzero((lengths >= 0) & (lengths < SLOTS))
        there = lengths >= 0  # logits of others mean nothing
        for rank, out in enumerate(outs):
            new = []
            for part, before in zip(out[1 : 1 + len(news)], cache):
                wanted = before[rank].copy()
                new.append(part[:, kept, :, lengths[kept]].astype(np.float32))  # [kept, L, 1, ...]
                wanted[:, kept, :, lengths[kept]] = part[:, kept, :, lengths[kept]]
                assert part.tobytes() == wanted.tobytes(), f"rank {rank} has changed what is not new"
            wanted = [np.moveaxis(x[rank][:, kept], 1, 0).astype(np.float32) for x in news]
            if len(news) > 2 and kept.size:  # of the two dtypes of activations some numbers are another one of 8 bits
                for i in range(2):
                    assert np.mean(new[i] == wanted[i]) > 0.8
                    np.testing.assert_allclose(new[i], wanted[i], rtol=0.13, atol=1)
                np.testing.assert_allclose(np.stack(new[2:]), wanted[2:], rtol=0.02)
                new, wanted = [], []
            for found, expected in zip((out[0][there], *new), (logits[there], *wanted), strict=True):
                found = np.asarray(found, np.float32)
                np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.02, err_msg=f"of rank {rank}")
            np.testing.assert_array_equal(out[0][there], outs[0][0][there], err_msg="ranks have different bits")


@functools.lru_cache(maxsize=32)
def _prepared(step: Step) -> tuple[Any, ...]:
    """The operands of each rank, the keywords of the launch, and what must come out: logits, each part of the cache by
    ranks, in which nothing is new, and all that is new.
    """
    model, world, b = step.model, step.world, len(step.lengths)
    rng = np.random.default_rng(0)
    made = make_params(model)
    unembed = "embed" if model.tied else "unembed"
    made[unembed] = np.tile(made[unembed][:12], (world, 1))
    params = wide = {name: w.astype(jnp.bfloat16) for name, w in made.items()}
    narrow = [name for name in model.matrices if name != "unembed" or len(step.eight) > 1] if step.eight else []
    if narrow:
        eight, dequantised = in_eight_bits(made, model, model.partition_specs("tp"), world, step.eight[0], False)
        params = params | {name: w for name, w in eight.items() if name.removesuffix("_scale") in narrow}
        wide = wide | {name: dequantised[name] for name in narrow}
    shape = model.layers, b, world, SLOTS, model.head_dim
    cache = [rng.standard_normal(shape) for _ in range(2)]
    if step.cache != "bfloat16":  # each position has a scale that is far from its neighbours'
        cache = [(50 * x).clip(-100, 100).round() for x in cache]
        cache += [np.exp(rng.uniform(-6, -3, shape[:-1])).astype(np.float32) for _ in range(2)]
    cache = [x.astype(step.cache) if x.ndim == 5 else x for x in cache]
    x = rng.standard_normal((b, model.d_model)).astype(jnp.bfloat16)
    cos, sin = rotary_tables(model, SLOTS)
    lengths = np.asarray(step.lengths, np.int32)
    logits, news = _expected(model, wide, x, cache, lengths, cos, sin)
    for row, length in enumerate(lengths):
        for part in cache:
            part[:, row, :, max(length, 0) :] = 77 if part.dtype == np.int8 else np.nan  # behind the last key anything
    of_eight = tuple(Eight(name=name, dtype=step.eight[0], scales="row") for name in narrow)
    call = call_of(model, world, b, eight=of_eight, cache_dtype=np.dtype(step.cache))
    variant, config = Hopper(), dataclasses.replace(CONFIG, **dict(step.config))
    if reasons := variant.refuses(call, config):
        raise ValueError(f"No call of the kernel: {'; '.join(reasons)}.")  # no AssertionError, which finds faults
    stream = x.astype(np.float32) * model.embedding_scale
    arrays, caches = [], []
    for rank in range(world):
        of_rank = {
            name: w if (at := model.sharded()[name.removesuffix("_scale")]) is None else np.split(w, world, at)[rank]
            for name, w in params.items()
        }
        own = [np.ascontiguousarray(part[:, :, rank : rank + 1]) for part in cache]
        caches.append(own)
        arrays.append(list(map(np.asarray, variant.arrays(call, config, of_rank, stream, own, lengths, cos, sin))))
    keywords = variant.launch(call, config)
    for of_jax in ("cost_estimate", "name"):
        del keywords[of_jax]
    return list(zip(*arrays)), keywords | {"world": world}, logits, list(zip(*caches)), news


def _expected(model: jtf.DecoderSpec, params: Any, x: Any, cache: Any, lengths: Any, cos: Any, sin: Any) -> tuple:
    """The reference's, in f32: logits of rank 0, new keys and values [W, L, B, 1, H], and their scales, if any."""
    wide = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)  # noqa: E731

    def step(params: Any, x: Any, cache: Any) -> Any:
        return jtf.decode_step(params, x, cache, lengths, "tp", model=model, cos=cos, sin=sin, implementation="xla")

    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    step = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    given = tuple(cache) if len(cache) > 2 else tuple(wide(cache))
    logits, cache = jax.jit(step)(wide(params), wide(x), given)
    last = np.clip(lengths, 0, SLOTS - 1)
    new = [np.stack([part[:, row, :, at] for row, at in enumerate(last)], axis=1) for part in map(np.asarray, cache)]
    return np.asarray(logits)[:, : logits.shape[1] // (model.kv_heads)], [
        np.moveaxis(part, 2, 0)[:, :, :, None] for part in new
    ]
