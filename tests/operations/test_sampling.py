"""Tokens from logits whose vocabulary is sharded, against `lax.top_k` and `jax.random` on the whole vocabulary."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from triton import next_power_of_2

import jaxtaxfree as jtf
from jaxtaxfree.ops.sampling import part_of
from tests.helpers.support import assert_fused, fails, lower_for_cuda, mesh_of, one_program, sharded

V = 24


def logits_of(batch: int = 5, dtype: Any = "float32", ties: bool = True) -> jax.Array:
    """[B, V]. With ties, of few values, so that the largest occur on several ranks; a row of one value, and -inf."""
    rng = np.random.default_rng(3)
    x = rng.integers(-2, 3, (batch, V)) if ties else rng.standard_normal((batch, V))
    x = x.astype(np.float32)
    if ties:
        x[0] = 1.0
        x[1, V // 4 :] = -np.inf
    return jnp.asarray(x, dtype)


def of_every_rank(function: Any, world: int, logits: jax.Array, *more: Any) -> Any:
    """What function(logits of this rank, *more) returns on all ranks, which must be the same; that of one."""
    run = one_program(
        lambda x, *more: jax.tree.map(lambda a: a[None], function(x, *more)),
        mesh=mesh_of(world), in_specs=(P(None, "tp"), *(P() for _ in more)), out_specs=P("tp"),
    )  # fmt: skip
    found = jax.tree.map(np.asarray, run(logits, *more))
    jax.tree.map(lambda a: np.testing.assert_array_equal(a, np.broadcast_to(a[:1], a.shape)), found)
    return jax.tree.map(lambda a: a[0], found)


@pytest.mark.parametrize(("world", "k"), [(1, 4), (2, 1), (2, V), (4, 4), (4, 9)])
def test_top_k_is_that_of_the_whole(world, k):
    """Also if k is more than a rank has; of equal values the lowest positions."""
    for dtype in ("float32", "bfloat16"):
        logits = logits_of(dtype=dtype)
        values, positions = of_every_rank(lambda x: jtf.top_k(x, k, "tp"), world, logits)
        wanted, at = lax.top_k(logits, k)
        assert values.dtype == dtype and positions.dtype == "int32"
        np.testing.assert_array_equal(values, wanted)
        np.testing.assert_array_equal(positions, at)


@pytest.mark.parametrize(("implementation", "k"), [("xla", 1), ("simulate", 1), ("xla", 4), ("simulate", 4)])
def test_the_caller_may_know_the_rank(implementation, k):
    """As an operand, or of in front of a loop."""
    logits = logits_of()
    wanted, at = lax.top_k(logits, k)
    for of in (lambda ranks: ranks, lambda _: lax.axis_index("tp")):

        def largest(x: jax.Array, ranks: jax.Array, of: Any = of) -> Any:
            how = {"axis_index": of(ranks), "implementation": implementation}
            if k > 1:
                values, positions = jtf.top_k(x, k, "tp", **how)
            else:
                once = lambda _, found: jtf.top_k(x + 0 * found[0], 1, "tp", **how)  # noqa: E731
                zeros = jnp.zeros((len(x), 1), x.dtype), jnp.zeros((len(x), 1), jnp.int32)
                values, positions = lax.fori_loop(0, 2, once, zeros)
            return values[None], positions[None]

        run = one_program(
            largest, mesh=mesh_of(2), in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp"), check_vma=False
        )
        values, positions = run(logits, jnp.arange(2, dtype=jnp.int32))
        np.testing.assert_array_equal(values, np.stack([wanted] * 2))
        np.testing.assert_array_equal(positions, np.stack([at] * 2))


@pytest.mark.parametrize("steps", [0.5, 2.0, 1e6])
@pytest.mark.parametrize("size", [700, 1024])
def test_the_largest_of_many(size, steps):
    """By chunks, of which the last one may be shorter. Of values few are large; many are equal, some are, none is."""
    rng = np.random.default_rng(0)
    x = np.floor(steps * rng.exponential(1.0, (30, 2 * size))).astype(np.float32)
    x[1, 5:] = -np.inf
    for k in (2, 9):
        found = of_every_rank(lambda x, k=k: jtf.top_k(x, k, "tp"), 2, jnp.asarray(x))
        for mine, wanted in zip(found, lax.top_k(x, k), strict=True):
            np.testing.assert_array_equal(mine, wanted)


@pytest.mark.parametrize("world", [2, 4])
def test_greedy_is_argmax(world):
    logits = logits_of()
    token = of_every_rank(lambda x: jtf.sample_greedy(x, "tp"), world, logits)
    np.testing.assert_array_equal(token, jnp.argmax(logits, axis=-1))
    assert token[0] == 0


def awkward(dtype: Any) -> jax.Array:
    """[6, V]: ties, a row of one number, -inf, NaN in two places, zeros of both signs, and negative numbers."""
    x = np.array(logits_of(6).astype("float32"))
    x[2, [V - 2, 7]] = np.nan
    x[3] = -np.inf
    x[4] = np.where(np.arange(V) < 5, -0.0, 0.0)
    x[5] = -1 - np.abs(x[5])
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_by_the_kernel(world, dtype):
    """As `jnp.argmax`: of equal numbers the lowest position, of NaN the first. Of any number of dimensions."""
    x = awkward(dtype)
    for shape in ((6, V), (V,), (2, 3, V)):
        whole = x[0] if len(shape) == 1 else x.reshape(shape)
        one = jax.shard_map(
            lambda a: jax.tree.map(lambda b: b[None], jtf.top_k(a, 1, "tp", implementation="simulate")),
            mesh=mesh_of(world), in_specs=P(*[None] * (len(shape) - 1), "tp"), out_specs=P("tp"),
        )  # fmt: skip
        values, positions = jax.jit(one)(whole)
        assert values.dtype == dtype and positions.dtype == jnp.int32
        at = jnp.argmax(whole, axis=-1, keepdims=True)
        wanted = jnp.take_along_axis(whole, at, axis=-1)
        for rank in range(world):
            np.testing.assert_array_equal(positions[rank], at)
            np.testing.assert_array_equal(values[rank].astype("float32"), wanted.astype("float32"))


@pytest.mark.parametrize("world", [2, 3])
def test_one_of_several_parts(world):
    """Rows of several programs, of which the last one has fewer numbers: ties across parts and ranks, -inf, NaN."""
    size = 4500
    assert part_of(9, size, world) == 1536
    rng = np.random.default_rng(1)
    x = rng.integers(-9, 9, (9, world * size)).astype(np.float32)
    first = (1600, 4499, size + 3100, size - 1, 7, 2 * size - 1)  # in a middle part, a last one, on another rank
    for row, at in enumerate(first):
        x[row, [at, min(at + 1, world * size - 1), world * size - 1]] = 20
    x[6] = -np.inf
    x[7, [size + 5, size + 1599]] = np.nan
    x[8] = -np.inf
    x[8, 4000] = np.finfo(np.float32).min
    values, positions = of_every_rank(lambda a: jtf.top_k(a, 1, "tp", implementation="simulate"), world, jnp.asarray(x))
    np.testing.assert_array_equal(positions[:, 0], [*first, 0, size + 5, 4000])
    np.testing.assert_array_equal(values[:, 0], x[np.arange(9), positions[:, 0]])


def test_the_parts_of_rows():
    """Few rows have parts of some 2048 numbers, many rows one; no rank receives more words than it may."""
    assert [part_of(1, size, 2) for size in (16032, 64128, 4096, 2049, 2048, 5)] == [2048, 2048, 2048, 1088, 2048, 5]
    assert part_of(16, 64128, 2) == 2048 and part_of(257, 64128, 2) == 64128
    for rows, size, world in itertools.product((1, 3, 100, 300), (1, 64, 77, 16032, 262144, 1 << 21), (2, 8, 72, 4096)):
        part = part_of(rows, size, world)
        parts = -(-size // part)
        assert (parts - 1) * part < size and 2 * next_power_of_2(world * parts) <= 16384
        assert rows * parts <= max(rows, 512)


def test_one_is_mapped():
    """By the kernel `jax.vmap` makes more rows."""
    x = logits_of(6, ties=False)

    def local(a: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, positions = jax.vmap(lambda row: jtf.top_k(row, 1, "tp", implementation="simulate"))(a)
        return values[None], positions[None]

    mapped = jax.shard_map(local, mesh=mesh_of(2), in_specs=P(None, "tp"), out_specs=P("tp"))
    values, positions = jax.jit(mapped)(x)
    np.testing.assert_array_equal(positions[1, :, 0], jnp.argmax(x, axis=-1))
    np.testing.assert_array_equal(values[0, :, 0], jnp.max(x, axis=-1))


@pytest.mark.parametrize("implementation", [None, "fused"])
def test_one_is_one_kernel(implementation):
    logits = sharded(mesh_of(2), P(None, "tp"), (16, 2 * 4096), "float32")
    greedy = lambda x: jtf.sample_greedy(x, "tp", implementation=implementation)  # noqa: E731
    program = one_program(greedy, mesh=mesh_of(2), in_specs=P(None, "tp"), out_specs=P(), check_vma=False)
    text = lower_for_cuda(program, logits)
    assert_fused(text)
    assert "stablehlo.reduce" not in text
    alone = one_program(greedy, mesh=mesh_of(1), in_specs=P(None, "tp"), out_specs=P(), check_vma=False)
    few = lower_for_cuda(alone, sharded(mesh_of(1), P(None, "tp"), (16, 64), "float32"))
    assert few.count("triton_kernel_call") == (0 if implementation is None else 1)


def plain(logits: jax.Array, key: jax.Array, k: int, temperature: Any, top_p: Any) -> np.ndarray:
    """The same on the whole vocabulary, sequence by sequence, in words of `jax.random`."""
    values, tokens = lax.top_k(logits, k)
    temperature, top_p = (np.broadcast_to(np.float32(x), len(logits)) for x in (temperature, top_p))
    scores = np.full(values.shape, -np.inf, np.float32)
    for row, (of_row, heat, share) in enumerate(zip(np.asarray(values), temperature, top_p)):
        scaled = of_row / (heat or np.float32(1))
        chances = np.exp(scaled.astype(np.float64) - scaled.max())
        total = np.cumsum(chances / chances.sum())
        count = 1 if heat == 0 else 1 + int(np.sum(total[:-1] < share))
        scores[row, :count] = scaled[:count]
    drawn = jax.random.categorical(key, jnp.asarray(scores))
    return np.take_along_axis(np.asarray(tokens), np.asarray(drawn)[:, None], axis=1)[:, 0]


@pytest.mark.parametrize(
    ("world", "k", "temperature", "top_p"),
    [
        (1, 7, 0.7, 1.0),
        (2, 1, 1.0, 1.0),
        (2, 6, [0.0, 0.5, 1.0, 2.0, 0.0], [1.0, 0.3, 0.6, 0.9, 0.2]),
        (4, 7, 0.7, 1.0),
        (4, V, 1.5, 0.8),
    ],
    ids=str,
)
def test_samples_are_those_of_the_whole(world, k, temperature, top_p):
    logits = logits_of(ties=False)

    def sample(x: jax.Array, key: jax.Array, heat: jax.Array, share: jax.Array) -> jax.Array:
        return jtf.sample_top_k(x, key, "tp", k=k, temperature=heat, top_p=share)

    many = jax.vmap(sample, in_axes=(None, 0, None, None))
    keys = jax.random.split(jax.random.key(5), 12)
    found = of_every_rank(many, world, logits, keys, jnp.asarray(temperature), jnp.asarray(top_p))
    for key, tokens in zip(keys, found, strict=True):
        np.testing.assert_array_equal(tokens, plain(logits, key, k, temperature, top_p))


def test_how_often_a_token_is_drawn():
    """As often as its logit says, and never one that is not among the k or the first `top_p`."""
    chances = np.array([0.4, 0.1, 0.3, 0.2])
    logits = jnp.log(jnp.asarray(chances))[None]

    def shares(**how: Any) -> np.ndarray:
        keys = jax.random.split(jax.random.key(0), 4000)
        run = jax.vmap(lambda x, key: jtf.sample_top_k(x, key, "tp", **how), in_axes=(None, 0))
        return np.bincount(of_every_rank(run, 2, logits, keys)[:, 0], minlength=4) / 4000

    np.testing.assert_allclose(shares(k=4), chances, atol=0.03)
    np.testing.assert_allclose(shares(k=3), np.array([0.4, 0, 0.3, 0.2]) / 0.9, atol=0.03)
    np.testing.assert_allclose(shares(k=4, top_p=0.65), np.array([0.4, 0, 0.3, 0]) / 0.7, atol=0.03)
    np.testing.assert_allclose(shares(k=2, temperature=0.5), np.array([16, 0, 9, 0]) / 25, atol=0.03)
    logits = jnp.where(jnp.arange(4) == 0, -jnp.inf, logits)
    np.testing.assert_allclose(shares(k=4), np.array([0, 0.1, 0.3, 0.2]) / 0.6, atol=0.03)


def test_what_is_exchanged():
    """One kernel, of a message of k values and positions from each rank; none of XLA's collectives."""
    logits = sharded(mesh_of(2), P(None, "tp"), (16, 2 * 4096), "float32")
    key = jax.random.key(0)

    def program(implementation: str) -> Any:
        sample = lambda x, key: jtf.sample_top_k(x, key, "tp", k=40, top_p=0.9, implementation=implementation)  # noqa: E731
        return one_program(
            sample, mesh=mesh_of(2), in_specs=(P(None, "tp"), P()), out_specs=P(), check_vma=False
        )  # fmt: skip

    text = lower_for_cuda(program("xla"), logits, key)
    (line,) = (line for line in text.splitlines() if "stablehlo.all_gather" in line)
    assert "(tensor<16x1x2x40xi32>)" in line
    assert_fused(lower_for_cuda(program("fused"), logits, key))


def test_errors():
    def call(function: Any, logits: Any = None) -> None:
        of_every_rank(function, 2, logits_of() if logits is None else logits)

    key = jax.random.key(0)
    with fails(ValueError, "from 1 to 24 of 24 values, not 25"):
        call(lambda x: jtf.top_k(x, 25, "tp"))
    with fails(ValueError, "not 0"):
        call(lambda x: jtf.sample_top_k(x, key, "tp", k=0))
    with fails(TypeError, "floats of up to 32 bits, not int32"):
        call(lambda x: jtf.sample_greedy(x, "tp"), jnp.zeros((2, V), jnp.int32))
    with fails(ValueError, "temperature must not be negative, and is -1"):
        call(lambda x: jtf.sample_top_k(x, key, "tp", k=2, temperature=-1))
    with fails(ValueError, "top_p must be above 0 and at most 1, and is 1.5"):
        call(lambda x: jtf.sample_top_k(x, key, "tp", k=2, top_p=1.5))
    for k in (2.5, None, "2"):
        with fails(TypeError, f"k as a whole number, not {k!r}"):
            call(lambda x, k=k: jtf.sample_top_k(x, key, "tp", k=k))
    with fails(ValueError, "temperature must not be negative, and is -1.0"):
        call(lambda x: jtf.sample_top_k(x, key, "tp", k=2, temperature=np.float32(-1)))
    with fails(ValueError, "top_p must be one number or [5], not [2]"):
        call(lambda x: jtf.sample_top_k(x, key, "tp", k=2, top_p=np.ones(2)))
    with fails(NameError, "tp"):
        jtf.sample_greedy(logits_of(), "tp")
    with fails(NotImplementedError, "it takes 1 to 65536 rows, not 0"):
        call(lambda x: jtf.top_k(x, 1, "tp", implementation="simulate"), jnp.zeros((0, V)))
    with fails(ValueError, "There is no implementation 'cuda'"):
        call(lambda x: jtf.top_k(x, 1, "tp", implementation="cuda"))
