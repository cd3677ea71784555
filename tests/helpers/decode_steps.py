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
    return Hopper().refuses_by_shape(call)


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
      page: positions of a page, if the cache is in pages. Then a sequence has as many as SLOTS need. Entries that no
        token has are no pages, and neither is that of a new token of the sequences `lost`.
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
    page: int = 0
    lost: tuple[int, ...] = ()

    @property
    def pages(self) -> int:
        """Those of a sequence."""
        return -(-SLOTS // self.page) if self.page else 0

    @property
    def slots(self) -> int:
        """Positions of a sequence."""
        return self.pages * self.page or SLOTS

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
        arrays, keywords, logits, cache, news, (row, slot) = _prepared(self)
        outs, _ = simulator.run(kernel, *arrays, **{**keywords, **settings})
        # Logits of others mean nothing.
        there = (np.asarray(self.lengths) >= 0) & ~np.isin(np.arange(len(self.lengths)), self.lost)
        for rank, out in enumerate(outs):
            new = []
            for part, before in zip(out[1 : 1 + len(news)], cache):
                wanted = before[rank].copy()
                new.append(part[:, row, :, slot].astype(np.float32))  # [tokens, L, 1, ...]
                wanted[:, row, :, slot] = part[:, row, :, slot]
                assert part.tobytes() == wanted.tobytes(), f"rank {rank} has changed what is not new"
            wanted = [x[:, :, rank : rank + 1].astype(np.float32) for x in news]
            if len(news) > 2 and len(row):  # of the two dtypes of activations some numbers are another one of 8 bits
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
    ranks, in which nothing is new, all that is new [tokens, L, W, ...], and in which (rows, slots) of the cache.
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
    shape = model.layers, b, world, step.slots, model.head_dim
    cache = [rng.standard_normal(shape) for _ in range(2)]
    if step.cache != "bfloat16":  # each position has a scale that is far from its neighbours'
        cache = [(50 * x).clip(-100, 100).round() for x in cache]
        cache += [np.exp(rng.uniform(-6, -3, shape[:-1])).astype(np.float32) for _ in range(2)]
    cache = [x.astype(step.cache) if x.ndim == 5 else x for x in cache]
    x = rng.standard_normal((b, model.d_model)).astype(jnp.bfloat16)
    cos, sin = rotary_tables(model, step.slots)
    lengths = np.asarray(step.lengths, np.int32)
    tables, pool = _table_of(step, rng) if step.page else (None, b)
    logits, after = _expected(model, wide, x, _laid_out(cache, tables, pool, step), lengths, cos, sin, tables)
    for row, length in enumerate(lengths):
        for part in cache:
            part[:, row, :, max(length, 0) :] = 77 if part.dtype == np.int8 else np.nan  # behind the last key anything
    cache = _laid_out(cache, tables, pool, step)
    kept = np.flatnonzero((lengths >= 0) & (lengths < step.slots))
    row, slot = kept, lengths[kept]
    if tables is not None:
        row, slot = tables[row, slot // step.page], slot % step.page
        row, slot = row[(row >= 0) & (row < pool)], slot[(row >= 0) & (row < pool)]
    news = [part[:, row, :, slot] for part in after]
    of_eight = tuple(Eight(name=name, dtype=step.eight[0], scales="row") for name in narrow)
    in_pages = {"pool": pool, "pages": step.pages} if step.page else {}
    call = call_of(
        model, world, b, step.page or SLOTS, positions=step.slots, eight=of_eight, cache_dtype=np.dtype(step.cache),
        **in_pages,
    )  # fmt: skip
    variant, config = Hopper(), dataclasses.replace(CONFIG, **dict(step.config))
    if reasons := variant.refuses(call, config):
        raise ValueError(f"No call of the kernel: {'; '.join(reasons)}.")  # no AssertionError, which finds faults
    stream = x.astype(np.float32) * model.embedding_scale
    arrays, caches, pages = [], [], [] if tables is None else [tables]
    for rank in range(world):
        of_rank = {
            name: w if (at := model.sharded()[name.removesuffix("_scale")]) is None else np.split(w, world, at)[rank]
            for name, w in params.items()
        }
        own = [np.ascontiguousarray(part[:, :, rank : rank + 1]) for part in cache]
        caches.append(own)
        arrays.append(
            list(map(np.asarray, variant.arrays(call, config, of_rank, stream, own, lengths, cos, sin, *pages)))
        )
    keywords = variant.launch(call, config)
    for of_jax in ("cost_estimate", "name"):
        del keywords[of_jax]
    return list(zip(*arrays)), keywords | {"world": world}, logits, list(zip(*caches)), news, (row, slot)


def _table_of(step: Step, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Shuffled pages of a pool for each sequence, i32[B, pages], and how many the pool has: two more."""
    pool = len(step.lengths) * step.pages + 2
    tables = rng.permutation(pool)[:-2].reshape(len(step.lengths), step.pages).astype(np.int32)
    garbage = -1, pool, 2**31 - 1, -(2**31)
    for b, length in enumerate(step.lengths):
        for page in range((length if b in step.lost else length + step.page) // step.page, step.pages):
            tables[b, page] = garbage[(b + page) % 4]
    return tables, pool


def _laid_out(cache: list[np.ndarray], tables: np.ndarray | None, pool: int, step: Step) -> list[np.ndarray]:
    """A cache [L, B, W, S, ...] in the pages of a pool, if there are tables. In other pages there is anything."""
    if tables is None:
        return cache
    made = []
    for part in cache:
        shape = len(part), pool, part.shape[2], step.page, *part.shape[4:]
        paged = np.full(shape, 77 if part.dtype == np.int8 else np.nan, part.dtype)
        for b, i in zip(*np.nonzero((tables >= 0) & (tables < pool))):
            paged[:, tables[b, i]] = part[:, b, :, i * step.page : (i + 1) * step.page]
        made.append(paged)
    return made


def _expected(
    model: jtf.DecoderSpec, params: Any, x: Any, cache: Any, lengths: Any, cos: Any, sin: Any, tables: Any
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The reference's, in f32: logits of rank 0, and the parts of the cache."""
    wide = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)  # noqa: E731

    def step(params: Any, x: Any, cache: Any) -> Any:
        how = {"model": model, "cos": cos, "sin": sin, "block_tables": tables, "implementation": "xla"}
        return jtf.decode_step(params, x, cache, lengths, "tp", **how)

    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    step = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    given = tuple(cache) if len(cache) > 2 else tuple(wide(cache))
    logits, cache = jax.jit(step)(wide(params), wide(x), given)
    return np.asarray(logits)[:, : logits.shape[1] // (model.kv_heads)], list(map(np.asarray, cache))
