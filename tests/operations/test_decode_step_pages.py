"""`decode_step` with a cache in pages, against the decoder in float64 and against the same cache without pages."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.ops.decode_step import VARIANTS, operations
from jaxtaxfree.ops.decode_step.hopper import Hopper
from jaxtaxfree.ops.kv_cache import placement_of
from jaxtaxfree.ops.untrusted import as_int32
from jaxtaxfree.ops.variant import choose
from tests.helpers.decode_loops import moved
from tests.helpers.decode_steps import call_of
from tests.helpers.decoders import FAMILIES, decode, make_params, rotary_tables, tiny
from tests.helpers.support import TRITON_CALL, lower_for_cuda, mesh_of, sharded

INT8, E4M3 = "int8", "float8_e4m3fn"
SLOTS, PAGE = 16, 2  # positions of a sequence on all ranks, and of a page
# Of each sequence the tokens of its prompt: to the end of a page, none, to the middle of one, and all but NEW.
PROMPTS, NEW = (4, 0, 7, 12), 4
GARBAGE = (-1, 10**6, np.iinfo(np.int32).min, np.iinfo(np.int32).max)
PLACES = [("heads", None), ("contiguous", None), ("round_robin", None), ("round_robin", 4), ("round_robin", 1)]


class Pages:
    """Of each rank shuffled pages of a pool for each sequence, and one page that nobody has.

    Attributes:
      tables: i32[W, B, pages of a sequence]. Entries that no token of `lengths` has are no pages.
    """

    def __init__(self, world: int, placement: str, block: int | None, lengths: Any, dtype: str, seed: int = 0) -> None:
        self.by_heads, self.world, self.dtype = placement == "heads", world, dtype
        parts = 1 if self.by_heads else world
        slots = SLOTS // parts
        stretch = slots if placement in ("heads", "contiguous") else block or PAGE
        slot = np.arange(slots)
        self.positions = [(slot // stretch * parts + rank) * stretch + slot % stretch for rank in range(parts)]
        count = slots // PAGE
        rng = np.random.default_rng(seed)
        self.pool = len(lengths) * count + 1
        tables = [rng.permutation(self.pool)[:-1].reshape(len(lengths), count) for _ in range(parts)]
        garbage = itertools.cycle((*GARBAGE, self.pool))
        for table, positions in zip(tables, self.positions):
            for row, length in zip(table, lengths):
                for i, of_page in enumerate(positions.reshape(-1, PAGE)):
                    if of_page.min() >= length:
                        row[i] = next(garbage)
        self.tables = np.stack(tables * (world // parts)).astype(np.int32)
        self.specs = P(None, None, "tp") if self.by_heads else P(None, "tp")

    def empty(self, model: jtf.DecoderSpec) -> tuple[jax.Array, ...]:
        """A rank's pools of nothing: what is there must not matter."""
        heads = model.kv_heads // self.world if self.by_heads else model.kv_heads
        shape = model.layers, self.pool, heads, PAGE, model.head_dim
        if self.dtype == "float32":
            return (jnp.full(shape, jnp.nan),) * 2
        values = jnp.full(shape, 77, INT8) if self.dtype == INT8 else jnp.full(shape, jnp.nan, self.dtype)
        return (values, values, *(jnp.full(shape[:-1], jnp.nan),) * 2)

    def laid_out(self, part: np.ndarray) -> np.ndarray:
        """All ranks' pools of an array [L, B, K, S, ...] without pages; each place that has no token is 0."""
        pools = []
        for table, positions in zip(self.tables, self.positions):
            pool = np.zeros((len(part), self.pool, part.shape[2], PAGE, *part.shape[4:]), part.dtype)
            for b, i in zip(*np.nonzero((table >= 0) & (table < self.pool))):
                pool[:, table[b, i]] = part[:, b][:, :, positions[i * PAGE : (i + 1) * PAGE]]
            pools.append(pool)
        return np.concatenate(pools, 1)

    def in_order(self, part: np.ndarray) -> np.ndarray:
        """The array [L, B, K, S, ...] of all ranks' pools. Places that have no page are 0."""
        pools = np.split(part, len(self.positions), 1)
        found = np.zeros((len(part), self.tables.shape[1], part.shape[2], SLOTS, *part.shape[4:]), part.dtype)
        for pool, table, positions in zip(pools, self.tables, self.positions):
            for b, i in zip(*np.nonzero((table >= 0) & (table < self.pool))):
                found[:, b][:, :, positions[i * PAGE : (i + 1) * PAGE]] = pool[:, table[b, i]]
        return found

    def untouched(self, lengths: Any) -> np.ndarray:
        """Which places of all ranks' pools no token of these lengths has: bool [pages of all ranks, PAGE]."""
        rest = np.ones((len(self.positions), self.pool, PAGE), bool)
        for own, table, positions in zip(rest, self.tables, self.positions):
            for b, i in zip(*np.nonzero((table >= 0) & (table < self.pool))):
                own[table[b, i]] &= positions[i * PAGE : (i + 1) * PAGE] >= lengths[b]
        return rest.reshape(-1, PAGE)


def specs(model: jtf.DecoderSpec, by_heads: bool) -> dict[str, P]:
    return {name: P() if at is None else P(*[None] * at, "tp") for name, at in model.sharded(by_heads).items()}


def step_of(
    model: jtf.DecoderSpec, world: int, placement: str, block: int | None, slots: int = SLOTS,
    by_operations: bool = False, **keywords: Any,
) -> Any:  # fmt: skip
    """(params, x, cache, lengths, tables or None, counts or None) -> (logits, cache), inside of `jax.shard_map`.

    Args:
      by_operations: it is `operations.run`, whose operations are their references.
    """
    cos, sin = map(jnp.asarray, rotary_tables(model, slots))

    def step(params: Any, x: Any, cache: Any, lengths: Any, tables: Any = None, counts: Any = None) -> Any:
        if not by_operations:
            size = PAGE if placement == "round_robin" and block is None and tables is None else block
            how = {"model": model, "cos": cos, "sin": sin, "placement": placement, "block_size": size, **keywords}
            return jtf.decode_step(params, x, cache, lengths, "tp", block_tables=tables, counts=counts, **how)
        of_rank, page = (slots // world, None if tables is None else PAGE)
        size = PAGE if placement == "round_robin" and block is None else block
        place = None if placement == "heads" else placement_of(placement, size, of_rank, page, "decode_step")
        lengths = lengths if counts is None else jnp.where(counts > 0, lengths, -1)
        tables = None if tables is None else as_int32(jnp.asarray(tables))
        how = {"axes": ("tp",), "model": model, "placement": place, "implementation": "xla"}
        return operations.run(params, x, cache, lengths, cos, sin, block_tables=tables, **how)

    return step


def check(
    model: jtf.DecoderSpec, world: int, placement: str, block: int | None = None, dtype: str = "float32",
    by_operations: bool = False,
) -> None:  # fmt: skip
    """Ragged prompts and some steps in a `lax.while_loop`: logits, and all that is in the pools."""
    b, longest, ends = len(PROMPTS), max(PROMPTS), np.asarray(PROMPTS) + NEW
    pages = Pages(world, placement, block, ends, dtype)
    params, tables = make_params(model), rotary_tables(model, SLOTS)
    xs = np.random.default_rng(1).standard_normal((b, SLOTS, model.d_model)).astype(np.float32)
    read, step = (step_of(model, world, placement, block, by_operations=by) for by in (False, by_operations))

    def run(params: Any, xs: jax.Array, tables: jax.Array) -> Any:
        cache, counts = jax.lax.pcast(pages.empty(model), "tp", to="varying"), jnp.asarray(PROMPTS)
        if pages.by_heads:
            first, cache = read(params, xs[:, :longest], cache, 0 * counts, tables[0], counts)
        else:  # one after the other: a sequence that has its prompt has no token

            def one(state: Any, at: jax.Array) -> Any:
                cache, logits = state
                there = at < counts
                given = jnp.full(b, at), tables[0], there.astype(jnp.int32)
                found, cache = read(params, xs[:, at], cache, *given)
                return (cache, jnp.where(there[:, None], found, logits)), None

            nothing = jax.lax.pcast(jnp.zeros((b, model.vocab // world)), "tp", to="varying")
            (cache, first), _ = jax.lax.scan(one, (cache, nothing), jnp.arange(longest))

        def more(state: Any) -> Any:
            i, cache, logits = state
            lengths = counts + i
            found, cache = step(params, xs[jnp.arange(b), lengths], cache, lengths, tables[0])
            return i + 1, cache, logits.at[i + 1].set(found)

        logits = jnp.zeros((1 + NEW, *first.shape)).at[0].set(first)
        state = jnp.int32(0), cache, logits
        _, cache, logits = jax.lax.while_loop(lambda state: state[0] < NEW, more, state)
        return logits, cache

    in_specs, out_specs = (specs(model, pages.by_heads), P(), P("tp")), (P(None, None, "tp"), pages.specs)
    run = jax.shard_map(run, mesh=mesh_of(world), in_specs=in_specs, out_specs=out_specs, check_vma=True)
    logits, cache = jax.tree.map(np.asarray, jax.jit(run)(params, xs, pages.tables))
    rest = pages.untouched(ends)
    assert rest.sum() >= PAGE * len(pages.positions)
    for part, before in zip(cache, pages.empty(model), strict=True):
        assert part.dtype == before.dtype
        found = np.moveaxis(part, 3, 2)[:, rest].astype(np.float32)
        np.testing.assert_array_equal(found, np.float32(np.asarray(before).ravel()[0]))
    stored = [pages.in_order(part) for part in cache] if dtype != "float32" else []
    for i, (row, prompt) in enumerate(zip(xs, PROMPTS)):
        for j in range(prompt == 0, 1 + NEW):
            of_row = tuple(part[:, i] for part in stored)
            expected = decode(model, params, row[: prompt + j], *tables, of_row)
            np.testing.assert_allclose(logits[j, i], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("family", "world", "by_operations"),
    list(zip(FAMILIES, itertools.cycle([1, 2, 4]), itertools.cycle([False, True]))),
)
def test_every_family(family, world, by_operations):
    check(tiny(family), world, "heads", by_operations=by_operations)


@pytest.mark.parametrize("by_operations", [False, True])
@pytest.mark.parametrize("dtype", ["float32", INT8, E4M3])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.covers(2)
def test_by_heads(world, dtype, by_operations):
    check(tiny("qwen3-8b"), world, "heads", dtype=dtype, by_operations=by_operations)


@pytest.mark.parametrize("by_operations", [False, True])
@pytest.mark.parametrize("dtype", ["float32", INT8, E4M3])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("placement", "block"), PLACES[1:])
@pytest.mark.covers(2)
def test_along_the_sequence(placement, block, world, dtype, by_operations):
    """Blocks of a page, of two, and of half a one."""
    check(tiny("qwen2-7b", kv_heads=2), world, placement, block, dtype, by_operations)


LENGTHS = (0, 1, 3, 4, 15, 16, 17, -1)  # of the cache: empty, about the end of a page, full, and outside of it


def both(model: jtf.DecoderSpec, world: int, pages: Pages, f: Any, *given: Any) -> Any:
    """f of (params, cache, tables) with pages, and of (params, cache, None) without.

    Args:
      given: a cache [L, B, K, S, ...] of all positions in their order, in parts.
    """
    of_params, params = specs(model, pages.by_heads), make_params(model)
    order = np.concatenate(pages.positions)
    whole = P(None, None, "tp") if pages.by_heads else P(None, None, None, "tp")
    found = []
    for cache, tables, of_cache in (
        (tuple(map(pages.laid_out, given)), pages.tables, pages.specs),
        (tuple(part[:, :, :, order] for part in given), None, whole),
    ):
        out_specs = P(None, "tp"), of_cache
        local = lambda params, cache, tables: f(params, cache, None if tables is None else tables[0])  # noqa: E731
        in_specs = of_params, of_cache, P("tp")
        call = jax.shard_map(local, mesh=mesh_of(world), in_specs=in_specs, out_specs=out_specs, check_vma=True)
        logits, cache = jax.tree.map(np.asarray, jax.jit(call)(params, cache, tables))
        restored = np.argsort(order)
        found.append((logits, [pages.in_order(x) if tables is not None else x[:, :, :, restored] for x in cache]))
    return found


def random_cache(model: jtf.DecoderSpec, b: int, dtype: str = "float32") -> list[np.ndarray]:
    """In the order of positions, of all ranks."""
    rng, shape = np.random.default_rng(3), (model.layers, b, model.kv_heads, SLOTS, model.head_dim)
    values = [rng.standard_normal(shape).astype(np.float32) for _ in range(2)]
    if dtype == "float32":
        return values
    scales = [rng.uniform(0.01, 0.02, shape[:-1]).astype(np.float32) for _ in range(2)]
    return [*(np.asarray(50 * x).clip(-100, 100).astype(dtype) for x in values), *scales]


def changed(model: jtf.DecoderSpec, world: int, pages: Pages, f: Any, given: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Where each part of the cache is another one than before; logits and cache are those without pages."""
    (logits, found), (wanted, stored) = both(model, world, pages, f, *given)
    np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-5)
    for part, other in zip(found, stored, strict=True):
        np.testing.assert_allclose(part.astype(np.float32), other.astype(np.float32), rtol=1e-5, atol=1e-5)
    return [part != old for part, old in zip(found, given, strict=True)]


@pytest.mark.parametrize("by_operations", [False, True])
@pytest.mark.parametrize("dtype", ["float32", INT8, E4M3])
@pytest.mark.parametrize(("placement", "block"), PLACES)
@pytest.mark.covers(2)
def test_a_step_is_that_without_pages(placement, block, dtype, by_operations):
    """Logits and contents, of a full cache and of lengths outside of it, too. A sequence has no token."""
    model, world = tiny("llama-3-8b", layers=2), 2
    pages = Pages(world, placement, block, [SLOTS] * len(LENGTHS), dtype)
    x = np.random.default_rng(2).standard_normal((len(LENGTHS), model.d_model)).astype(np.float32)
    step, counts = step_of(model, world, placement, block, by_operations=by_operations), jnp.array([1] * 7 + [0])

    def f(params: Any, cache: Any, tables: Any) -> Any:
        return step(params, x, cache, jnp.asarray(LENGTHS), tables, counts)

    for differs in changed(model, world, pages, f, random_cache(model, len(LENGTHS), dtype)):
        differs = differs.any(axis=(0, 2, *range(4, differs.ndim)))
        assert [(int(b), int(at)) for b, at in zip(*np.nonzero(differs))] == list(enumerate(LENGTHS[:5]))


@pytest.mark.parametrize("dtype", ["float32", INT8])
def test_prompts_are_those_without_pages(dtype):
    """Over the ends of pages, past the end of the cache, and of different lengths behind different lengths."""
    model, world, t = tiny("gemma-2-9b"), 2, 5
    pages = Pages(world, "heads", None, [SLOTS] * len(LENGTHS), dtype)
    x = np.random.default_rng(2).standard_normal((len(LENGTHS), t, model.d_model)).astype(np.float32)
    step, counts = step_of(model, world, "heads", None), jnp.array([5, 4, 3, 0, 1, 2, 5, 5])

    def f(params: Any, cache: Any, tables: Any) -> Any:
        return step(params, x, cache, jnp.asarray(LENGTHS), tables, counts)

    for differs in changed(model, world, pages, f, random_cache(model, len(LENGTHS), dtype)):
        assert differs.any()


@pytest.mark.parametrize("by_operations", [False, True])
@pytest.mark.parametrize("dtype", ["float32", INT8])
@pytest.mark.parametrize(("placement", "world"), [("heads", 1), ("heads", 2), ("round_robin", 2)])
@pytest.mark.parametrize("kind", ["int32", "uint32", "int8"])
@pytest.mark.covers(2)
def test_garbage_writes_nothing(kind, placement, world, dtype, by_operations):
    """Where a new token's entry is no page of the pool, nothing changes, and other sequences have what is theirs."""
    model = tiny("llama-3-8b")
    info = jnp.iinfo(kind)
    entries = [int(info.max), *([-1, int(info.min)] if info.min else [int(info.max) // 2 + 1])]
    lengths = np.array([5, *[4] * (len(entries) + 1)], np.int32)
    b = len(lengths)
    pages = Pages(world, placement, None, [SLOTS] * b, dtype)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((b, model.d_model)).astype(np.float32)
    step = step_of(model, world, placement, None, by_operations=by_operations)
    pools = tuple(map(pages.laid_out, random_cache(model, b, dtype)))
    wrong = pages.tables.astype(kind)
    for sequence, entry in enumerate([*entries, pages.pool], start=1):
        wrong[:, sequence] = entry  # all of them, so also those that are read

    def run(tables: Any) -> Any:
        local = lambda params, cache, tables: step(params, x, cache, jnp.asarray(lengths), tables[0])  # noqa: E731
        in_specs, out_specs = (specs(model, pages.by_heads), pages.specs, P("tp")), (P(None, "tp"), pages.specs)
        call = jax.shard_map(local, mesh=mesh_of(world), in_specs=in_specs, out_specs=out_specs, check_vma=True)
        return jax.tree.map(np.asarray, jax.jit(call)(make_params(model), pools, tables))

    (logits, found), (wanted, stored) = run(wrong), run(pages.tables)
    np.testing.assert_allclose(logits[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert np.isfinite(logits).all()  # what is read by a wrong entry is in the pool, too
    changed = []
    for part, other, old in zip(found, stored, pools, strict=True):
        axes = (0, 2, *range(4, part.ndim))
        places = [[*zip(*np.nonzero((new != old).any(axis=axes)))] for new in (part, other)]
        assert len(places[0]) == 1 and len(places[1]) == b and set(places[0]) < set(places[1])
        changed += places[0]
    assert len(set(changed)) == 1


@pytest.mark.parametrize(("placement", "world"), [("heads", 1), ("heads", 2), ("contiguous", 2)])
def test_gradients(placement, world):
    """Of weights and of what is in the cache, those without pages."""
    model = tiny("qwen2-7b")
    lengths = np.array([0, 3, 4, 15], np.int32)
    pages = Pages(world, placement, None, [SLOTS] * 4, "float32")
    x = np.random.default_rng(2).standard_normal((4, model.d_model)).astype(np.float32)
    step = step_of(model, world, placement, None)
    given = random_cache(model, 4)

    def f(params: Any, cache: Any, tables: Any) -> Any:
        def loss(cache: Any, x: Any) -> jax.Array:
            logits, cache = step(params, x, cache, jnp.asarray(lengths), tables)
            return jnp.sum(jnp.sin(logits)) + sum(jnp.sum(jnp.cos(part)) for part in cache)

        of_cache, of_x = jax.grad(loss, argnums=(0, 1))(cache, jnp.asarray(x))
        return of_x, of_cache

    (of_x, found), (wanted, of_cache) = both(model, world, pages, f, *given)
    assert np.abs(wanted).max() > 0.01
    np.testing.assert_allclose(of_x, wanted, rtol=1e-4, atol=1e-5)
    for part, other in zip(found, of_cache, strict=True):
        assert np.abs(other).max() > 0.01
        np.testing.assert_allclose(part, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("placement", ["heads", "round_robin"])
def test_vmap(placement):
    """Over tokens and tables, of pools that all examples have, and of pools of their own."""
    model, world = tiny("llama-3-8b"), 2
    each = [Pages(world, placement, None, [SLOTS] * 2, "float32", seed) for seed in range(3)]
    xs = np.random.default_rng(2).standard_normal((3, 2, model.d_model)).astype(np.float32)
    pools = [tuple((1 + i) * pages.laid_out(x) for x in random_cache(model, 2)) for i, pages in enumerate(each)]
    step, lengths = step_of(model, world, placement, None), jnp.array([4, 7])
    tables = np.stack([pages.tables for pages in each], 1)
    stacked = jax.tree.map(lambda *parts: np.stack(parts), *pools)

    def local(params: Any, shared: Any, own: Any, tables: Any) -> Any:
        of = lambda x, cache, table: step(params, x, cache, lengths, table)[0]  # noqa: E731
        mapped = [jax.vmap(of, in_axes=(0, i, 0))(xs, cache, tables[0]) for i, cache in ((None, shared), (0, own))]
        caches = [[shared] * 3, [jax.tree.map(lambda x, i=i: x[i], own) for i in range(3)]]
        alone = [jnp.stack([of(x, *given) for x, *given in zip(xs, of_cache, tables[0])]) for of_cache in caches]
        return jnp.stack(mapped), jnp.stack(alone)

    in_specs = specs(model, placement == "heads"), each[0].specs, P(None, *each[0].specs), P("tp")
    out = P(None, None, None, "tp")
    call = jax.shard_map(local, mesh=mesh_of(world), in_specs=in_specs, out_specs=(out, out), check_vma=True)
    mapped, alone = jax.jit(call)(make_params(model), pools[0], stacked, tables)
    assert np.abs(alone[0, 1] - alone[1, 1]).max() > 0.01
    np.testing.assert_allclose(mapped, alone, rtol=1e-5, atol=1e-5)


def test_errors():
    model = tiny("llama-3-8b")
    pool, tables = jnp.zeros((2, 9, 2, PAGE, 8)), jnp.zeros((3, 4), jnp.int32)

    def call(cache: Any = (pool, pool), tables: Any = tables, t: int | None = None, **keywords: Any) -> Any:
        by_heads = keywords.get("placement", "heads") == "heads"
        params = {name: jnp.zeros(shape) for name, shape in model.param_shapes(2, by_heads).items()}
        x = jnp.zeros((3, 32) if t is None else (3, t, 32))
        cos, sin = rotary_tables(model, SLOTS)
        how = {"model": model, "cos": cos, "sin": sin, "block_tables": tables, **keywords}
        local = lambda: jtf.decode_step(params, x, cache, jnp.zeros(3, jnp.int32), "tp", **how)  # noqa: E731
        return jax.eval_shape(jax.shard_map(local, mesh=mesh_of(2), in_specs=(), out_specs=P(), check_vma=False))

    assert [part.shape for part in call()[1]] == [pool.shape] * 2
    along = jnp.zeros((2, 9, 4, PAGE, 8))
    wanted = r"block_tables must be i32\[3, pages of a sequence\]"
    for changed, message in (
        ({"tables": jnp.zeros((2, 4), jnp.int32)}, rf"{wanted}, not int32\[2, 4\]"),
        ({"tables": jnp.zeros((3, 4))}, rf"{wanted}, not float32\[3, 4\]"),
        ({"tables": jnp.zeros(3, jnp.int32)}, rf"{wanted}, not int32\[3\]"),
        ({"tables": jnp.zeros((3, 0), jnp.int32)}, rf"{wanted}, of one page or more, not int32\[3, 0\]"),
        (
            {"cache": (along, along)},
            r"the cache's keys must be \[2, pages, 2, page size, 8\], not \[2, 9, 4, 2, 8\]",
        ),
        ({"cache": (pool[:, :0],) * 2}, r"the cache's keys have no room for a position: \[2, 0, 2, 2, 8\]"),
        ({"cache": (pool[..., :0, :],) * 2}, r"the cache's keys have no room for a position: \[2, 9, 2, 0, 8\]"),
        ({"cache": (pool, pool[:, :8])}, r"keys are float32\[2, 9, 2, 2, 8\] and values float32\[2, 8, 2, 2, 8\]"),
        (
            {"cache": (*(pool.astype(INT8),) * 2, *(jnp.zeros(pool.shape[1:-1]),) * 2)},
            r"the cache's key_scales must be float32\[2, 9, 2, 2\], not float32\[9, 2, 2\]",
        ),
    ):
        with pytest.raises(ValueError, match=f"^decode_step cannot take these operands: .*{message}"):
            call(**changed)
    with pytest.raises(ValueError, match="blocks of block_size=3 positions, which does not divide the 8 positions"):
        call((along, along), placement="round_robin", block_size=3)
    with pytest.raises(NotImplementedError, match="several new tokens only with a cache by heads"):
        call((along, along), t=2, placement="contiguous")


def test_who_takes_it():
    """One launch of pages that its blocks divide, else operations."""
    call = call_of(FAMILIES["llama-3-8b"], 8, 1, 64, pool=9, pages=4)
    kernel = Hopper()
    assert choose("decode_step", VARIANTS, call, {}).variant.name == "hopper"
    assert choose("decode_step", VARIANTS, dataclasses.replace(call, slots=4), {}).variant.name == "operations"
    for slots, by_tensor_cores in ((16, True), (8, False)):
        chosen = choose("decode_step", VARIANTS, dataclasses.replace(call, batch=4, slots=slots), {})
        assert chosen.variant.name == "hopper" and chosen.config.tensor_cores == by_tensor_cores
    for tensor_cores, slots, least in ((False, 4, 8), (False, 12, 8), (True, 24, 16), (True, 8, 16)):
        asked = {"tensor_cores": tensor_cores}
        other = dataclasses.replace(call, slots=slots)
        by = "by" if tensor_cores else "without"
        refused = f"{by} tensor cores it takes pages whose positions {least} divides, not of {slots}"
        config = dataclasses.replace(kernel.by_shape(other, asked), **asked)
        assert kernel.refuses(other, config) == [refused]
        with pytest.raises(NotImplementedError, match=refused):
            choose("decode_step", VARIANTS, other, {"kernel": "hopper", **asked})


@pytest.mark.parametrize("page, slots", [(8, 8), (16, 16), (24, 8), (64, 64), (96, 32), (128, 64)])
def test_a_block_of_keys_lies_in_a_page(page, slots):
    call = call_of(FAMILIES["llama-3-8b"], 8, 1, page, pool=9, pages=4)
    kernel = Hopper()
    config = kernel.by_shape(call, {"kernel": "hopper"})
    of_cores = config.attention_cores  # where 16 slots and more are next to each other
    assert of_cores == (page % 16 == 0)
    assert kernel.blocks(call, config)["old_keys_desc"] == ((2, slots, 64) if of_cores else (slots, 2, 64))


@pytest.mark.parametrize("world, dtype, h", [(1, "bfloat16", 64), (2, INT8, 128)])
def test_one_launch_in_a_program(world, dtype, h):
    """Two steps, simulated, beside the reference: the first sequence goes on in its second page, where the second step
    reads what the first one has stored. The second one has no page for its second token, and the third one is full.
    """
    model = tiny("qwen2-7b", layers=2, heads=4, kv_heads=2, head_dim=h, vocab=64, d_model=64, d_mlp=128)
    params = {name: jnp.asarray(w, jnp.bfloat16) for name, w in make_params(model).items()}
    tables, lengths = jnp.array([[4, 1], [0, -1], [2, 5]]), np.array([8, 7, 15])
    cos, sin = map(jnp.asarray, rotary_tables(model, 16))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 3, model.d_model)), jnp.bfloat16)
    shape = (2, 6, 2, 8, h)
    if dtype == INT8:
        cache = tuple(jnp.asarray(rng.integers(-100, 101, shape), dtype) for _ in range(2))
        cache += tuple(jnp.asarray(rng.uniform(0.01, 0.02, shape[:-1]), jnp.float32) for _ in range(2))
    else:
        cache = tuple(jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2))
    config = {
        "kernel": "hopper", "programs": 3, "stage": 512 * h // 64, "num_stages": 3, "splits": 2, "merged": 32,
        "num_warps": 4, "tensor_cores": False,
    }  # fmt: skip

    def run(implementation: str) -> tuple[Any, Any]:
        def steps(params: Any, cache: Any) -> Any:
            found = []
            for i in range(2):
                logits, cache = jtf.decode_step(
                    params, x[i], cache, jnp.asarray(lengths) + i, "tp", model=model, cos=cos, sin=sin, config=config,
                    block_tables=tables, implementation=implementation,
                )  # fmt: skip
                found.append(logits)
            return jnp.stack(found), cache

        of_cache = P(None, None, "tp")
        call = jax.shard_map(
            steps, mesh=mesh_of(world), in_specs=(specs(model, True), of_cache),
            out_specs=(P(None, None, "tp"), of_cache), check_vma=False,
        )  # fmt: skip
        return jax.tree.map(np.asarray, jax.jit(call)(params, cache))

    (logits, found), (wanted, stored) = run("simulate"), run("xla")
    means = np.array([[True, True, True], [True, False, True]])  # of a token without a page nothing
    np.testing.assert_allclose(logits[means], wanted[means], rtol=0.03, atol=0.03)
    new = np.zeros((6, 8), bool)
    new[[1, 1, 0, 5], [0, 1, 7, 7]] = True
    for part, old in zip(found, map(np.asarray, cache), strict=True):
        part, old = (np.moveaxis(of, 2, 3)[:, ~new] for of in (part, old))
        assert part.tobytes() == old.tobytes()
    for i in range(2):  # bf16's last bit may make another number of 8 bits
        scales = (of[i + 2][..., None] if len(found) > 2 else 1 for of in (found, stored))
        part, other = (of[i].astype(np.float32) * scale for of, scale in zip((found, stored), scales))
        np.testing.assert_allclose(part, other, rtol=0.13, atol=0.03)


SMALL = tiny("llama-3-8b", layers=3, d_model=64, head_dim=64, d_mlp=128, vocab=64)
STEPS, POOL, B = 6, 17, 2


def loop_of(
    placement: str, dtype: str, by_operations: bool = False, **keywords: Any
) -> tuple[Any, Any, tuple[int, ...]]:
    """A program of several steps, the types of its operands, and the sizes of a rank's pool."""
    by_heads, world, mesh = placement == "heads", 2, mesh_of(2)
    step = step_of(SMALL, world, placement, None, by_operations=by_operations, **keywords)

    def local(params: Any, x: jax.Array, cache: Any, lengths: jax.Array, tables: jax.Array) -> Any:
        def more(state: Any) -> Any:
            i, x, cache = state
            logits, cache = step(params, x, cache, lengths + i, tables)
            return i + 1, jax.lax.all_gather(logits, "tp", axis=1, tiled=True).astype(x.dtype), cache

        return jax.lax.while_loop(lambda state: state[0] < STEPS, more, (jnp.int32(0), x, cache))[2]

    of_cache, of_params = P(None, None, "tp") if by_heads else P(None, "tp"), specs(SMALL, by_heads)
    loop = jax.shard_map(
        local, mesh=mesh, in_specs=(of_params, P(), of_cache, P(), P()), out_specs=of_cache, check_vma=False
    )
    shapes = SMALL.param_shapes()
    params = {name: sharded(mesh, spec, shapes[name], "bfloat16") for name, spec in of_params.items()}
    size = SMALL.layers, POOL * (1 if by_heads else world), SMALL.kv_heads, PAGE, SMALL.head_dim
    pool = sharded(mesh, of_cache, size, dtype)
    scales = (sharded(mesh, of_cache, size[:-1], "float32"),) * 2 if dtype == INT8 else ()
    rows, x = sharded(mesh, P(), (B,), "int32"), sharded(mesh, P(), (B, 64), "bfloat16")
    tables = sharded(mesh, P(), (B, SLOTS // PAGE // (1 if by_heads else world)), "int32")
    own = size[0], POOL, size[2] // (world if by_heads else 1), *size[3:]
    return jax.jit(loop, donate_argnums=2), (params, x, (pool, pool, *scales), rows, tables), own


@pytest.mark.parametrize("by_operations", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", INT8])
@pytest.mark.parametrize("placement", ["heads", "round_robin"])
@pytest.mark.covers(2)
def test_a_loop_keeps_the_pools_in_place(placement, dtype, by_operations):
    """Donated ones, in a `lax.while_loop`: they are scattered into, never copied, and are the results."""
    loop, given, own = loop_of(placement, dtype, by_operations, **({} if by_operations else {"implementation": "xla"}))
    text = loop.lower(*given).compile().as_text()
    name = {"bfloat16": "bf16", INT8: "s8"}[dtype]
    parts = [(name, own), *([("f32", own[:-1])] if dtype == INT8 else [])]
    for kind, sizes in parts:
        made = [line for line in text.splitlines() if f" = {kind}[{','.join(map(str, sizes))}]" in line]
        assert any("scatter" in line for line in made)
        assert moved("\n".join(made), 1) == []
        assert [line for line in made if "dynamic-update-slice" in line] == []
    aliased = text.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
    assert aliased.count("may-alias") == 2 * len(parts)


@pytest.mark.parametrize("implementation, kernels", [(None, 0), ("fused", 5 * SMALL.layers + 1)])
@pytest.mark.parametrize("dtype", ["bfloat16", INT8])
@pytest.mark.parametrize("placement", ["heads", "round_robin"])
@pytest.mark.covers(2)
def test_what_a_gpu_is_given(placement, dtype, implementation, kernels):
    """ "fused": operations, whose kernels read pages where they lie. None: XLA."""
    loop, given, own = loop_of(placement, dtype, implementation=implementation)
    text = lower_for_cuda(loop, *given)
    assert text.count(TRITON_CALL) == kernels
    if implementation == "fused":
        least = np.prod(own[1:])  # a layer of a pool
        for line in text.splitlines():
            if "stablehlo.transpose" in line or "stablehlo.convert" in line or "stablehlo.gather" in line:
                sizes = [int(size) for size in line.rpartition("tensor<")[2].partition(">")[0].split("x")[:-1]]
                assert np.prod(sizes) < least, line


@pytest.mark.parametrize(
    "dtype, world, placement",
    [("bfloat16", 1, "heads"), (INT8, 2, "heads"), ("bfloat16", 2, "contiguous"), (E4M3, 2, "round_robin")],
)
def test_the_kernels_in_a_program(dtype, world, placement):
    """Two steps by operations, simulated, beside the reference, the first one to the end of a page.

    Entries that no token has are no pages, and a third sequence has no other ones: nobody reads or writes by them.
    """
    model = tiny("qwen2-7b", layers=1, heads=4, kv_heads=2, head_dim=64, vocab=64, d_model=64, d_mlp=128)
    pages = Pages(world, placement, None, [5, 2, 0], dtype)
    params = {name: jnp.asarray(w, jnp.bfloat16) for name, w in make_params(model).items()}
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, model.d_model)), jnp.bfloat16)
    kind = "float32" if dtype == "bfloat16" else dtype
    given = tuple(jnp.asarray(pages.laid_out(part)) for part in random_cache(model, 3, kind))
    given = tuple(part.astype(jnp.bfloat16) for part in given) if kind == "float32" else given

    def run(implementation: str) -> tuple[Any, Any]:
        step = step_of(model, world, placement, None, implementation=implementation)

        def steps(params: Any, cache: Any, tables: Any) -> Any:
            found = []
            for i in range(2):
                logits, cache = step(params, x[i], cache, jnp.array([3, 0, 3]) + i, tables[0])
                found.append(logits)
            return jnp.stack(found), cache

        out_specs = P(None, None, "tp"), pages.specs
        in_specs = specs(model, pages.by_heads), pages.specs, P("tp")
        call = jax.shard_map(steps, mesh=mesh_of(world), in_specs=in_specs, out_specs=out_specs)
        return jax.tree.map(np.asarray, jax.jit(call)(params, given, pages.tables))

    (logits, found), (wanted, stored) = run("simulate"), run("xla")
    np.testing.assert_allclose(logits, wanted, rtol=0.03, atol=0.03)
    for part, other, old in zip(found, stored, given, strict=True):
        differs = [(np.asarray(new) != np.asarray(old)).any(axis=(0, 2, *range(4, old.ndim))) for new in (part, other)]
        np.testing.assert_array_equal(*differs)
        assert differs[0].sum() == 4  # two tokens of the first two sequences
    for i in range(2):  # bf16's last bit may make another number of 8 bits
        scales = (of[i + 2][..., None] if len(found) > 2 else 1 for of in (found, stored))
        part, other = (of[i].astype(np.float32) * scale for of, scale in zip((found, stored), scales))
        np.testing.assert_allclose(part, other, rtol=0.13, atol=0.03)
