"""`decode_step` against a decoder in float64, of every family that it names."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.ops.decode_step import VARIANTS, operations
from jaxtaxfree.ops.decode_step.call import Eight
from jaxtaxfree.ops.decode_step.hopper import Call, Hopper
from jaxtaxfree.ops.decode_step.reference import scaled_embedding
from jaxtaxfree.ops.kv_cache import placement_of
from jaxtaxfree.ops.variant import choose
from jaxtaxfree.target import HOPPER, target_of
from tests.helpers import step_parity
from tests.helpers.decode_steps import call_of
from tests.helpers.decoders import FAMILIES, decode, in_eight_bits, make_params, rotary_tables, tiny
from tests.helpers.parity import program
from tests.helpers.support import TRITON_CALL, lower_for_cuda

PROMPTS = (5, 1, 7)  # tokens of each sequence
NEW = 3  # tokens after them
SLOTS = 16  # of the cache
LLAMA = FAMILIES["llama-3-8b"]


def specs(model: jtf.DecoderSpec, by_heads: bool = True) -> dict[str, P]:
    sharded = model.sharded(by_heads)
    return {name: P() if at is None else P(*[None] * at, "tp") for name, at in sharded.items()}


def generate(
    model: jtf.DecoderSpec, world: int, by_operations: bool = False, eight: Any = None, **keywords: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Logits [1 + NEW, B, V] after ragged prompts and each new token; and what they are to be.

    Args:
      by_operations: the new tokens are `operations.run`'s, whose operations are their references.
      eight: a dtype of 8 bits for the matrices, and whether blocks of them have scales, or rows.
    """
    params = wide = make_params(model)
    of_params = specs(model, keywords.get("placement", "heads") == "heads")
    if eight is not None:
        params, wide = in_eight_bits(params, model, of_params, world, *eight)
        of_params |= {f"{name}_scale": of_params[name] for name in model.matrices}
    cos, sin = rotary_tables(model, SLOTS)
    rng = np.random.default_rng(1)
    b, longest = len(PROMPTS), max(PROMPTS)
    xs = [rng.standard_normal((prompt + NEW, model.d_model)).astype(np.float32) for prompt in PROMPTS]
    prompts = np.full((b, longest, model.d_model), 7.0, np.float32)  # behind a prompt anything
    for prompt, row, x in zip(PROMPTS, prompts, xs):
        row[:prompt] = x[:prompt]
    by_heads = keywords.get("placement", "heads") == "heads"

    def run(params: Any, prompts: Any, news: Any) -> jax.Array:
        heads = model.kv_heads // world if by_heads else model.kv_heads
        slots = SLOTS if by_heads else SLOTS // world
        cache = (jnp.full((model.layers, b, heads, slots, model.head_dim), jnp.nan),) * 2
        cache = jax.lax.pcast(cache, "tp", to="varying")
        call = lambda x, cache, lengths, **more: jtf.decode_step(  # noqa: E731
            params, x, cache, lengths, "tp", model=model, cos=cos, sin=sin, **more, **keywords
        )
        counts = jnp.asarray(PROMPTS)
        if by_heads:
            logits, cache = call(prompts, cache, 0 * counts, counts=counts)
        else:  # one after the other: a sequence that has its prompt reads its last token again
            each = jnp.minimum(jnp.arange(longest)[:, None], counts - 1)  # [longest, B]

            def read(cache: Any, at: jax.Array) -> Any:
                found, cache = call(prompts[jnp.arange(b), at], cache, at)
                return cache, found

            cache, found = jax.lax.scan(read, cache, each)
            logits = found[-1]

        def step(state: Any, new: jax.Array) -> Any:
            lengths, cache = state
            if by_operations:
                block = keywords.get("block_size")
                place = None if by_heads else placement_of(keywords["placement"], block, slots, None, "decode_step")
                how = {"axes": ("tp",), "model": model, "placement": place, "implementation": "xla"}
                tables = (table if table.ndim == 3 else table[None] for table in map(jnp.asarray, (cos, sin)))
                found, cache = operations.run(params, new, cache, lengths, *tables, **how)
            else:
                found, cache = call(new, cache, lengths)
            return (lengths + 1, cache), found

        return jnp.concatenate([logits[None], jax.lax.scan(step, (counts, cache), news)[1]])

    mesh = Mesh(np.array(jax.devices()[:world]), ("tp",))
    run = jax.shard_map(run, mesh=mesh, in_specs=(of_params, P(), P()), out_specs=P(None, None, "tp"), check_vma=True)
    news = np.stack([[x[prompt + i] for prompt, x in zip(PROMPTS, xs)] for i in range(NEW)])
    logits = np.asarray(jax.jit(run)(params, prompts, news))
    expected = [
        [decode(model, wide, x[: prompt + i], cos, sin) for prompt, x in zip(PROMPTS, xs)] for i in range(1 + NEW)
    ]
    return logits, np.asarray(expected)


@pytest.mark.parametrize("family, world", list(zip(FAMILIES, itertools.cycle([1, 2, 4]))))
def test_every_family(family, world):
    logits, expected = generate(tiny(family), world)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_every_world(family, world):
    logits, expected = generate(tiny(family), world)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family, world", list(zip(FAMILIES, itertools.cycle([2, 4, 1]))))
def test_every_family_by_operations(family, world):
    logits, expected = generate(tiny(family), world, by_operations=True)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("by_operations", [False, True])
@pytest.mark.parametrize("placement", [pytest.param("contiguous", marks=pytest.mark.soak), "round_robin"])
def test_more_ranks_than_heads(placement, by_operations):
    """The cache is sharded along the sequence where the ranks do not divide the key/value heads."""
    block = {"block_size": 2} if placement == "round_robin" else {}
    logits, expected = generate(tiny("qwen2-7b", kv_heads=2), 4, by_operations, placement=placement, **block)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("by_operations", [False, True])
@pytest.mark.parametrize("family", ["llama-3-8b", "gemma-2-9b"])
def test_what_no_family_has(family, by_operations):
    """Of the head a part is rotated, blocks and logits are scaled, these before their cap, and norms add much."""
    changes = {"rotary_dim": 4, "residual_scale": 0.5, "logit_scale": 4.0, "activation": "gelu", "norm_eps": 0.1}
    model = dataclasses.replace(tiny(family), **changes)
    logits, expected = generate(model, 2, by_operations)
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_published_sizes(family):
    """The shapes of the whole model's parameters have as many numbers as it was published with."""
    billions = {
        "llama-2-7b": 6.74, "llama-3-8b": 8.03, "llama-3-70b": 70.55, "mistral-7b-v0.1": 7.24, "qwen2-7b": 7.62,
        "qwen2.5-0.5b": 0.494, "qwen3-8b": 8.19, "gemma-2-9b": 9.24, "gemma-3-4b": 3.88,
    }  # fmt: skip
    model = FAMILIES[family]
    count = sum(np.prod(shape, dtype=np.int64) for shape in model.param_shapes().values())
    count += 0 if model.tied else model.vocab * model.d_model  # the embedding, which the caller looks up
    assert count / 1e9 == pytest.approx(billions[family], rel=2e-3)


def test_errors():
    model = tiny("llama-3-8b")
    with pytest.raises(ValueError, match="6 query heads are no multiple of 4 key/value heads"):
        dataclasses.replace(model, heads=6)
    with pytest.raises(ValueError, match="a token cannot take 3 of 2 experts"):
        dataclasses.replace(model, experts=2, experts_per_token=3)
    with pytest.raises(ValueError, match="activation must be one of 'silu', 'gelu', 'gelu_tanh', not 'relu'"):
        dataclasses.replace(model, activation="relu")
    for field, value, message in (
        ("layers", True, "layers must be a positive whole number, not True"),
        ("norm_eps", -1e-6, "norm_eps must not be negative"),
        ("norm_eps", "1e-6", "norm_eps must be a finite number, not '1e-6'"),
        ("score_scale", float("nan"), "score_scale must be None or a finite number, not nan"),
        ("logit_soft_cap", 0, "logit_soft_cap must be positive, not 0"),
        ("windows", [3], r"windows must be a tuple of None and whole numbers, not \[3\]"),
        ("windows", (2.5,), r"windows must be a tuple of None and whole numbers, not \(2.5,\)"),
        ("windows", (-1,), r"windows must be None or not negative, not \(-1,\)"),
        ("windows", (), "need an entry or more"),
        ("rotary_tables", (0.5,), "rotary_tables must be a tuple of whole numbers"),
        ("rotary_tables", (-1,), "rotary_tables must not be negative"),
        ("rotary_dim", 4.0, "rotary_dim must be None or a whole number, not 4.0"),
        ("rotary_dim", 10, "rotary_dim must be even and at most head_dim=8, not 10"),
        ("head_dim", 7, "a head of 7 dimensions cannot be rotated in pairs"),
        ("activation", [], r"activation must be one of .*, not \[\]"),
        ("experts", None, "experts must be a whole number, not None"),
    ):
        with pytest.raises(ValueError, match=f"^There is no such DecoderSpec: .*{message}"):
            dataclasses.replace(model, **{field: value})
    same = dataclasses.replace(model, layers=np.int64(2))
    assert same == model and type(same.layers) is int

    def call(world: int = 2, model: jtf.DecoderSpec = model, **changed: Any) -> None:
        params = {name: jnp.zeros(shape) for name, shape in model.param_shapes(world).items()}
        cache = (jnp.zeros((2, 3, 4 // world, SLOTS, 8)),) * 2
        given = {"params": params, "x": jnp.zeros((3, 32)), "cache": cache, "lengths": jnp.zeros(3, jnp.int32)}
        tables = dict(zip(("cos", "sin"), rotary_tables(model, SLOTS)))
        given |= tables | changed
        mesh = Mesh(np.array(jax.devices()[:world]), ("tp",))
        f = jax.shard_map(
            lambda: jtf.decode_step(axis_name="tp", model=model, **given)[0],
            mesh=mesh, in_specs=(), out_specs=P(), check_vma=False,
        )  # fmt: skip
        jax.eval_shape(f)

    call()
    with pytest.raises(ValueError, match=r"params lacks .*; params has embed, which this model has not"):
        call(params={"embed": jnp.zeros((32, 32))})
    with pytest.raises(ValueError, match=r"x must be \[B, 32\] or \[B, T, 32\], not \[3, 31\]"):
        call(x=jnp.zeros((3, 31)))
    with pytest.raises(ValueError, match=r"3 ranks do not divide heads=8; .*kv_heads=4"):
        call(world=3)
    with pytest.raises(ValueError, match=r"lengths must be i32\[3\]"):
        call(lengths=jnp.zeros(3))
    with pytest.raises(NotImplementedError, match=r"this model has experts=4: jaxtaxfree\.models runs it"):
        call(model=dataclasses.replace(model, experts=4, experts_per_token=2))
    with pytest.raises(ValueError, match="there is no placement 'ring'"):
        call(placement="ring")
    call(counts=[1, 0, 1])
    full, empty = jnp.zeros((2, 3, 2, SLOTS, 8)), jnp.zeros((2, 3, 2, 0, 8))
    for changed, message in (
        ({"counts": jnp.ones(3)}, r"counts must be i32\[3\], not float32"),
        ({"x": jnp.zeros((3, 0, 32))}, "x has no token"),
        ({"x": jnp.zeros((3, 32), jnp.int32)}, "x must be of floats, not int32"),
        ({"cos": jnp.zeros((SLOTS, 4), jnp.int32)}, "cos must be of floats, not int32"),
        ({"cos": jnp.zeros((0, 4)), "sin": jnp.zeros((0, 4))}, r"cos must be \[1, positions, 4\], not \[1, 0, 4\]"),
        ({"sin": jnp.zeros((SLOTS + 1, 4))}, r"cos is \[1, 16, 4\] and sin \[1, 17, 4\]"),
        ({"cache": (full, full.astype(jnp.bfloat16))}, r"keys are float32\[.*\] and values bfloat16"),
        (
            {"cache": (full, full[:, :, :, 1:])},
            r"keys are float32\[2, 3, 2, 16, 8\] and values float32\[2, 3, 2, 15, 8\]",
        ),
        ({"cache": (empty, empty)}, "the cache's keys have no room"),
        ({"cache": (jnp.zeros((2, 3, 2, SLOTS, 8), jnp.int32),) * 2}, "the cache must be of floats, or int8 .* int32"),
        ({"cache": (empty,)}, r"cache must be \(keys, values\) or \(keys, .*value_scales\), not 1 parts"),
        ({"cache": (full, full, None, full)}, r"cache must be .*, not 4 parts, of which 1 None"),
        ({"cache": None}, r"cache must be \(keys, values\) or .*, not NoneType"),
        ({"params": [1]}, "params must be a mapping of names to arrays, not list"),
        ({"block_size": 4}, 'block_size=4 goes with placement="round_robin"'),
    ):
        with pytest.raises(ValueError, match=f"^decode_step cannot take these .*{message}"):
            call(**changed)
    with pytest.raises(ValueError, match="model must be a DecoderSpec, not dict"):
        jax.shard_map(
            lambda: jtf.decode_step({}, 0, (0, 0), 0, "tp", model={}, cos=0, sin=0),  # pyrefly: ignore[bad-argument-type]
            mesh=Mesh(np.array(jax.devices()[:1]), ("tp",)), in_specs=(), out_specs=P(),
        )()  # fmt: skip


def test_the_scale_of_the_embedding_is_rounded_as_in_published_models():
    """It multiplies in the dtype of the embedding: of Gemma 3, whose scale is 50.6, 50.5."""
    model = FAMILIES["gemma-3-4b"]
    found = scaled_embedding(jnp.ones((1, 1), jnp.bfloat16), model)
    assert found.dtype == jnp.bfloat16 and float(found[0, 0]) == 50.5 != round(model.embedding_scale, 1)


@pytest.mark.covers(3)
@pytest.mark.parametrize("eight", [False, True])
@pytest.mark.parametrize("by_operations", [False, True])
@pytest.mark.parametrize("placement", ["heads", "contiguous"])
def test_sequences_without_a_token_leave_no_trace(placement, by_operations, eight):
    """Whatever the length, which may be outside of the cache, and with a count that is outside of 0 to 1.

    Tokens outside of the cache leave none either, in numbers of 8 bits and in their scales.
    """
    model, slots, by_heads = tiny("llama-3-8b", layers=1), 8, placement == "heads"
    lengths = np.array([3, 3, 0, 8, 9, -1, 5], np.int32)
    counts = np.array([1, 0, 0, 1, 0, 1, 7], np.int32)
    cos, sin = map(jnp.asarray, rotary_tables(model, slots))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((len(lengths), model.d_model)).astype(np.float32)
    shape = (1, len(lengths), 4, slots, 8)
    if eight:
        cache = tuple(rng.integers(-127, 128, shape).astype(np.int8) for _ in range(2))
        cache += tuple(rng.random(shape[:-1]).astype(np.float32) for _ in range(2))
    else:
        cache = tuple(rng.standard_normal(shape).astype(np.float32) for _ in range(2))

    def step(params: Any, cache: Any) -> Any:
        if not by_operations:
            how = {"model": model, "cos": cos, "sin": sin, "placement": placement}
            return jtf.decode_step(params, x, cache, lengths, "tp", counts=counts, **how)
        place = None if by_heads else placement_of(placement, None, slots // 2, None, "decode_step")
        how = {"axes": ("tp",), "model": model, "placement": place, "implementation": "xla"}
        return operations.run(params, x, cache, jnp.where(counts > 0, lengths, -1), cos, sin, **how)

    of_cache = P(None, None, "tp") if by_heads else P(None, None, None, "tp")
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    specs_of_step = specs(model, by_heads), of_cache
    run = jax.shard_map(step, mesh=mesh, in_specs=specs_of_step, out_specs=(P(None, "tp"), of_cache), check_vma=True)
    logits, new = jax.jit(run)(make_params(model), cache)
    assert np.isfinite(np.asarray(logits)).all()
    for old, found in zip(cache, map(np.asarray, new), strict=True):
        differs = (old != found).any(axis=(0, 2, *range(4, old.ndim)))
        assert [(int(b), int(at)) for b, at in zip(*np.nonzero(differs))] == [(0, 3), (6, 5)]


@pytest.mark.parametrize(
    ("world", "placement", "by_operations"),
    [(3, "heads", False), (3, "contiguous", True), (8, "heads", True), (8, "contiguous", False)],
)
def test_sixteen_sequences_on_other_worlds(world, placement, by_operations):
    """From an empty cache to one with room for one more token, and what the step leaves in it."""
    by_heads, slots, lengths = placement == "heads", 24, np.array([*range(15), 23], np.int32)
    heads = {"heads": 6, "kv_heads": 3 if by_heads else 2} if world == 3 else {"heads": 8, "kv_heads": 8}
    if world == 8 and not by_heads:
        heads["kv_heads"] = 2
    model = tiny("qwen3-8b", layers=1, vocab=72, d_mlp=48, **heads)
    params, tables = make_params(model), rotary_tables(model, slots)
    cos, sin = map(jnp.asarray, tables)
    xs = np.random.default_rng(2).standard_normal((len(lengths), slots, model.d_model)).astype(np.float32)
    empty = np.full((2, 1, len(lengths), model.kv_heads, slots, model.head_dim), np.nan, np.float32)
    how = {"model": model, "cos": cos, "sin": sin}

    def read(params: Any, counts: Any) -> Any:
        return jtf.decode_step(params, xs, tuple(empty), 0 * counts, "tp", counts=counts, **how)[1]

    def step(params: Any, cache: Any) -> Any:
        new = xs[np.arange(len(lengths)), lengths]
        if not by_operations:
            return jtf.decode_step(params, new, cache, lengths, "tp", placement=placement, **how)
        place = None if by_heads else placement_of(placement, None, slots // world, None, "decode_step")
        of_operations = {"axes": ("tp",), "model": model, "placement": place, "implementation": "xla"}
        return operations.run(params, jnp.asarray(new), cache, jnp.asarray(lengths), cos, sin, **of_operations)

    def on(count: int, f: Any, specs: Any, out_specs: Any) -> Any:
        mesh = Mesh(np.array(jax.devices()[:count]), ("tp",))
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False))

    alone = on(1, read, (P(), P()), P())
    cache, wanted = (jax.tree.map(np.asarray, alone(params, lengths + more)) for more in (0, 1))
    of_cache = P(None, None, "tp") if by_heads else P(None, None, None, "tp")
    run = on(world, step, (specs(model, by_heads), of_cache), (P(None, "tp"), of_cache))
    logits, found = run(params, cache)
    expected = [decode(model, params, x[: length + 1], *tables) for x, length in zip(xs, lengths)]
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)
    for part, of_prompt in zip(found, wanted):
        np.testing.assert_allclose(part, of_prompt, rtol=1e-4, atol=1e-4)  # NaN where there is nothing


def test_what_the_kernel_does_not_take():
    """It names all that is missing, and None takes XLA for it."""
    call = Call(
        model=FAMILIES["gemma-2-9b"], world=2, batch=17, tokens=1, slots=64, positions=64, dtype=np.dtype(np.float32),
        cache_dtype=np.dtype(np.float32), by_heads=True, target=HOPPER,
    )  # fmt: skip
    kernel = Hopper()
    found = kernel.refuses(call, kernel.by_shape(call, {}))
    for part in ("weights of bfloat16 and float16, not float32", "1 to 16 sequences, not 17"):
        assert any(part in reason for reason in found), found
    several = dataclasses.replace(call, batch=5, dtype=np.dtype(np.float16), cache_dtype=np.dtype(np.float16))
    asked = {"stage": 2048, "tensor_cores": True}
    found = kernel.refuses(several, kernel.by_shape(several, asked))
    keys = "by tensor cores it takes stages of 16 keys of 256 or more, not of 2048 elements"
    wanted = ("of 5 sequences it takes weights of bfloat16, not float16", "4096 to 131072", keys)
    assert len(found) == 3 and all(part in reason for part, reason in zip(wanted, found)), found
    few = dataclasses.replace(kernel.by_shape(several, asked), attention_cores=False)
    (*_, reason) = kernel.refuses(several, few)
    assert reason.endswith("do so by old keys, too, not with attention_cores=False")
    other = dataclasses.replace(call, target=target_of(100), tokens=3, by_heads=False)
    found = kernel.refuses(other, kernel.by_shape(other, {}))
    for part in ("compute capability 9.0, not 10.0", "one new token of each sequence, not 3", "not along the sequence"):
        assert any(part in reason for reason in found), found
    with pytest.raises(NotImplementedError, match=r"The fused kernel of decode_step cannot run here: .*") as caught:
        generate(tiny("llama-3-8b"), 2, implementation="fused")
    assert str(caught.value).count("it takes weights of bfloat16 and float16, not float32") == 1  # of two kernels


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 16])
def test_what_the_kernel_takes(family, world, batch):
    """Every published model."""
    model = FAMILIES[family]
    if model.kv_heads % world:
        pytest.skip("the ranks do not divide the key/value heads")
    call = Call(
        model=model, world=world, batch=batch, tokens=1, slots=4096, positions=4096, dtype=np.dtype(jnp.bfloat16),
        cache_dtype=np.dtype(jnp.bfloat16), by_heads=True, target=HOPPER,
    )  # fmt: skip
    kernel = Hopper()
    config = kernel.by_shape(call, {})
    assert kernel.refuses(call, config) == []
    for name, (rows, groups, width) in kernel.blocks(call, config).items():
        assert width == 64 and max(rows, groups) <= 256, name
        assert rows * groups * width <= config.stage, name


def config_of_taken(model, batch, dtype, asked):
    """How the kernel takes a call of four ranks, which it does."""
    call = call_of(model, 4, batch, 2048, dtype=jnp.dtype(dtype), cache_dtype=jnp.dtype(dtype))
    kernel = Hopper()
    config = dataclasses.replace(kernel.by_shape(call, asked), **asked)
    assert kernel.refuses(call, config) == []
    return config


@pytest.mark.parametrize(
    ("model", "batch", "dtype", "asked", "expected"),
    [
        (LLAMA, 1, "bfloat16", {}, False),
        (FAMILIES["llama-3-70b"], 1, "bfloat16", {}, False),
        (dataclasses.replace(LLAMA, d_model=5120), 1, "bfloat16", {}, True),
        (LLAMA, 2, "bfloat16", {}, False),
        (LLAMA, 2, "bfloat16", {"attention_cores": True}, False),
        (LLAMA, 3, "bfloat16", {}, True),
        (LLAMA, 3, "bfloat16", {"tensor_cores": False}, False),
        (LLAMA, 3, "bfloat16", {"stage": 2048}, False),  # tiles are too narrow for eight warps
        (LLAMA, 3, "bfloat16", {"stage": 2048, "num_warps": 4}, True),
        (LLAMA, 4, "float16", {}, False),
        (FAMILIES["gemma-2-9b"], 2, "bfloat16", {}, False),
        (FAMILIES["gemma-2-9b"], 3, "bfloat16", {}, True),
        (FAMILIES["gemma-2-9b"], 5, "bfloat16", {}, True),
        (LLAMA, 5, "bfloat16", {}, True),
    ],
)
def test_when_tensor_cores_multiply(model, batch, dtype, asked, expected):
    """From two sequences on and for rows of several blocks, of what they take."""
    assert config_of_taken(model, batch, dtype, asked).tensor_cores == expected


@pytest.mark.parametrize(
    ("model", "batch", "dtype", "asked", "expected"),
    [
        (LLAMA, 1, "bfloat16", {}, True),
        (LLAMA, 4, "float16", {}, True),
        (LLAMA, 1, "bfloat16", {"attention_cores": False}, False),
        (LLAMA, 1, "bfloat16", {"stage": 1024}, False),  # a block has fewer than 16 keys
        (FAMILIES["gemma-2-9b"], 1, "bfloat16", {}, False),
        (FAMILIES["gemma-2-9b"], 1, "bfloat16", {"attention_cores": True}, True),
        (FAMILIES["gemma-2-9b"], 3, "bfloat16", {}, True),
        (dataclasses.replace(LLAMA, head_dim=64), 1, "bfloat16", {}, True),
    ],
)
def test_when_tensor_cores_multiply_by_keys(model, batch, dtype, asked, expected):
    """With those that multiply by weights, and without for heads of up to 128."""
    assert config_of_taken(model, batch, dtype, asked).attention_cores == expected


def test_too_many_sequences_for_registers():
    call = call_of(LLAMA, 2, 5, 2048)
    with pytest.raises(NotImplementedError, match="without tensor cores it takes 1 to 4 sequences, not 5"):
        choose("decode_step", VARIANTS, call, {"kernel": "hopper", "tensor_cores": False})


def test_what_operations_do_not_take():
    call = Call(
        model=FAMILIES["llama-3-8b"], world=2, batch=9, tokens=2, slots=64, positions=64, dtype=np.dtype(np.float32),
        cache_dtype=np.dtype(np.uint8), by_heads=True, target=HOPPER,
    )  # fmt: skip
    found = operations.Operations().refuses(call, operations.Config())
    wanted = ("bfloat16 and float16, not float32", "float32 or int8 or float8_e4m3fn, not uint8", "sequence, not 2")
    assert len(found) == 3 and all(part in reason for part, reason in zip(wanted, found)), found
    eight = tuple(Eight(name=name, dtype="int8", scales="block") for name in ("o_proj", "down_proj"))
    call = dataclasses.replace(call, model=FAMILIES["qwen2.5-0.5b"], eight=eight)
    found = operations.Operations().refuses(call, operations.Config())[3:]
    assert found == [
        "it takes scales of blocks of o_proj where each rank has a multiple of 128 of its columns, not 448"
    ]


# Of a layer by operations: three products by one left-hand side, attention, two sums and the gated product.
@pytest.mark.parametrize(
    ("sequences", "world", "kernels"),
    [(1, 2, 1), (4, 2, 1), (5, 2, 1), (16, 2, 1), (17, 2, 2 * 5 + 1), (33, 2, 2 * 5 + 1), (1, 1, 0)],
)
def test_what_none_takes(sequences, world, kernels):
    """On several Hopper GPUs the kernel for up to 16 sequences, and for more of them operations."""
    model = tiny("llama-3-8b", layers=2, d_model=128, heads=4, kv_heads=2, head_dim=64, d_mlp=128, vocab=128)
    shape = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    params = {name: shape(*w.shape) for name, w in make_params(model).items()}
    cos, sin = rotary_tables(model, SLOTS)
    cache = (shape(2, sequences, 2, SLOTS, 64),) * 2

    def step(params: Any, x: Any, cache: Any, lengths: Any) -> Any:
        return jtf.decode_step(params, x, cache, lengths, "tp", model=model, cos=cos, sin=sin)

    mesh, of_cache = Mesh(np.array(jax.devices()[:world]), ("tp",)), P(None, None, "tp")
    in_specs = specs(model), P(), (of_cache, of_cache), P()
    call = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(P(None, "tp"), (of_cache, of_cache)))
    text = lower_for_cuda(call, params, shape(sequences, 128), cache, shape(sequences, dtype=jnp.int32))
    assert text.count(TRITON_CALL) == kernels


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("case", step_parity.CASES)
def test_what_gpus_compare_is_a_call(case, world):
    """Of as many ranks as tests have GPUs."""
    model, lengths = step_parity.for_ranks(step_parity.CASES, world)[case]
    call = functools.partial(step_parity.errors_of, model, lengths, kernel="operations")
    mesh = Mesh(np.array(jax.devices()[:world]), ("tp",))
    assert jax.eval_shape(program(mesh, call)).shape == (3,)


@pytest.mark.parametrize(
    ("family", "world", "batch", "told"),
    [
        ("llama-3-8b", 1, 1, ("queries", "parts")),
        ("llama-3-8b", 2, 1, ("queries", "parts", "sums")),
        ("llama-3-8b", 2, 2, ("queries", "parts", "sums")),
        ("llama-3-8b", 4, 1, ("queries", "parts", "sums")),
        ("llama-3-8b", 8, 1, ("queries", "parts")),  # 64 KB of a sum
        ("llama-3-70b", 2, 1, ("queries", "sums")),  # 8 heads of a key
        ("llama-3-70b", 4, 1, ("queries",)),
        ("gemma-2-9b", 2, 1, ("sums",)),  # attention in registers
        ("llama-3-8b", 8, 16, ("queries", "parts")),  # by tensor cores, as all below
        ("llama-3-8b", 2, 16, ("queries",)),
        ("llama-3-70b", 2, 16, ()),
        ("gemma-2-9b", 2, 4, ()),
    ],
)
def test_what_is_told(family, world, batch, told):
    """Messages of a layer, as its sizes say or as it is asked, and the places that they have."""
    call, kernel = call_of(FAMILIES[family], world, batch, slots=4096), Hopper()
    config = kernel.by_shape(call, {})
    names = ("tell_queries", "tell_parts", "tell_sums")
    assert tuple(name.removeprefix("tell_") for name in names if getattr(config, name)) == told
    launch, (b, d) = kernel.launch(call, config), (batch, call.model.d_model)
    if config.tell_sums:
        assert launch["messages"]["told"] == (2 * call.model.layers, world, b, d // 2)
        assert (launch["messages"]["sums"].shape, launch["STREAM_TOLD"], launch["SUMS_TOLD"]) == ((0,), 0, 1)
    silent = kernel.launch(call, dataclasses.replace(config, **dict.fromkeys(names, False)))
    assert (silent["QUERIES_TOLD"], silent["PARTS_TOLD"], silent["SUMS_TOLD"]) == (0, 0, 0)
    assert {"qkv", "accs", "tops"} <= set(silent["scratch"]) and "accs" not in silent["messages"]


def test_what_cannot_be_told():
    call, kernel = call_of(FAMILIES["llama-3-8b"], 2, 1, slots=4096), Hopper()
    of = lambda call, **asked: kernel.refuses(call, dataclasses.replace(kernel.by_shape(call, asked), **asked))  # noqa: E731
    assert of(call, attention_cores=False, tell_parts=True) == ["with tell_parts it takes attention by tensor cores"]
    assert of(call, tensor_cores=True, attention_cores=True, tell_sums=True) == [
        "with tell_sums it takes products in registers"
    ]
    assert of(call, tensor_cores=True, attention_cores=True, pace=1, patience=1) == [
        "pace is for products in registers",
        "patience is for products in registers",
    ]
    narrow = tuple(Eight(name=name, dtype="int8", scales="row") for name in call.model.matrices if name != "unembed")
    assert of(dataclasses.replace(call, eight=narrow), tell_sums=True) == [
        "with tell_sums it takes layers and an unembedding of 8 bits, or neither"
    ]


@pytest.mark.parametrize(
    ("stage", "stages", "in_flight", "of_large"),
    [(8192, 12, 2, 3), (4096, 24, 4, 6), (16384, 6, 2, 2), (32768, 3, 2, 2)],
)
def test_how_much_is_on_its_way(stage, stages, in_flight, of_large):
    """Of the ring's 192 KiB 32 in at least two blocks, 48 where a rank has much of a layer; and what is asked for."""
    model = FAMILIES["llama-3-70b"]
    # Of 2 and 4 ranks 856 and 428 MB of a layer, and half of that in 8 bits.
    for world, eight, expected in ((4, False, in_flight), (2, True, in_flight), (2, False, of_large)):
        narrow = tuple(Eight(name=name, dtype="int8", scales="row") for name in model.matrices) if eight else ()
        call = call_of(model, world, slots=8192, eight=narrow)
        kernel = Hopper()
        for asked, wanted in (({}, expected), ({"in_flight": 5}, min(5, stages)), ({"in_flight": 32}, min(32, stages))):
            config = dataclasses.replace(kernel.by_shape(call, {"stage": stage, **asked}), **asked)
            launch = kernel.launch(call, config)
            assert (launch["STAGES"], launch["IN_FLIGHT"]) == (stages, wanted)
    for wrong in (0, "many"):
        with pytest.raises(ValueError, match="stage of a config is a power of 2 from 512 to 32768, not"):
            kernel.by_shape(call, {"stage": wrong})


@pytest.mark.parametrize(
    "world, kernel, eight",
    [
        *itertools.product((1, 2), ("hopper", "operations"), (None,)),
        (2, "hopper", "int8"),
        (1, "hopper", "float8_e4m3fn"),
    ],
)
def test_the_kernel_in_a_program(world, kernel, eight):
    """Two steps, simulated: the second one sees the keys of the first one where that has put them.

    In the second one a sequence has no token, and the caller says which rank it is.
    """
    sizes = {"d_model": 128, "d_mlp": 256} if eight else {"d_model": 64, "d_mlp": 128}
    model = tiny("qwen2-7b", layers=1, heads=4, kv_heads=2, head_dim=64, vocab=64, **sizes)
    made, of_params = make_params(model), specs(model)
    params = {name: jnp.asarray(w, jnp.bfloat16) for name, w in made.items()}
    if eight:
        narrow, _ = in_eight_bits(made, model, of_params, world, eight, False)
        params |= {name: jnp.asarray(w) for name, w in narrow.items() if name.removesuffix("_scale") in model.matrices}
        of_params |= {f"{name}_scale": of_params[name] for name in model.matrices}
    cos, sin = rotary_tables(model, SLOTS)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 2, model.d_model)), jnp.bfloat16)
    cache = tuple(jnp.asarray(rng.standard_normal((1, 2, 2, SLOTS, 64)), jnp.bfloat16) for _ in range(2))
    config = {"kernel": kernel}
    if kernel == "hopper":
        config |= {"programs": 2, "stage": 1024, "num_stages": 2, "merged": 32}
    mesh = Mesh(np.array(jax.devices()[:world]), ("tp",))
    of_cache = P(None, None, "tp")

    def run(implementation: str) -> list[np.ndarray]:
        def steps(params: Any, cache: Any, ranks: Any) -> Any:
            found = []
            for i in range(2):
                logits, cache = jtf.decode_step(
                    params, x[i], cache, jnp.array([5, 0]) + i, "tp", model=model, cos=cos, sin=sin,
                    axis_index=[None, ranks][i], implementation=implementation, config=config,
                    counts=jnp.array([1, 1 - i]),
                )  # fmt: skip
                found.append(logits)
            return (found[0], found[1][:1]), cache

        in_specs, out_specs = (of_params, of_cache, P("tp")), (P(None, "tp"), of_cache)
        call = jax.jit(jax.shard_map(steps, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
        ranks = jnp.arange(world, dtype=jnp.int32)
        return [np.asarray(part, np.float32) for part in jax.tree.leaves(call(params, cache, ranks))]

    for found, expected in zip(run("simulate"), run("xla"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0.03, atol=0.03)


INT8, E4M3 = "int8", "float8_e4m3fn"


@pytest.mark.parametrize(
    "family, world, dtype, blocks",
    list(zip(FAMILIES, itertools.cycle([1, 2, 4]), itertools.cycle([INT8, E4M3]), itertools.cycle([0, 0, 0, 1]))),
)
def test_every_family_in_eight_bits(family, world, dtype, blocks):
    logits, expected = generate(tiny(family), world, eight=(dtype, blocks))
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.covers(1)
@pytest.mark.parametrize("dtype", [INT8, E4M3])
@pytest.mark.parametrize(
    "world, blocks, by_operations",
    [(1, True, False), (2, True, False), (8, False, False), (1, True, True), (8, False, True)],
)
def test_eight_bits_of_odd_sizes(world, blocks, by_operations, dtype):
    sizes = {"d_model": 160, "heads": 8, "kv_heads": 8, "head_dim": 40, "d_mlp": 400, "vocab": 272}
    logits, expected = generate(tiny("qwen2-7b", **sizes), world, by_operations, eight=(dtype, blocks))
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


def test_eight_bits_along_the_sequence():
    logits, expected = generate(
        tiny("qwen2-7b", kv_heads=2), 4, eight=(INT8, False), placement="round_robin", block_size=2
    )
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype, most", [(INT8, 0.02), (E4M3, 0.08)])
def test_logits_in_eight_bits(dtype, most):
    """Two layers, beside the weights as they were: further from them than bf16 is, but not by much."""
    model = tiny("llama-3-8b", d_model=256, head_dim=32, d_mlp=512, vocab=512)
    params = make_params(model)
    _, eight = in_eight_bits(params, model, specs(model), 1, dtype, False)
    half = {name: np.asarray(w.astype(jnp.bfloat16), np.float32) for name, w in params.items()}
    xs = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    exact, rounded, found = (decode(model, w, xs, *rotary_tables(model, SLOTS)) for w in (params, half, eight))
    errors = [np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (rounded, found)]
    assert errors[0] < errors[1] < most, errors


@pytest.mark.parametrize("blocks", [False, True])
def test_scales_of_the_whole_model(blocks):
    """They are `quantize`'s of the whole weights, shared out by `scale_specs`."""
    model = tiny("llama-3-8b", d_model=256, heads=8, kv_heads=4, head_dim=64, d_mlp=512, vocab=512)
    block = (128, 128) if blocks else (1, -1)
    whole = {name: jtf.quantize(w, "int8", block=block)[1] for name, w in make_params(model).items() if w.ndim > 2}
    shapes = model.scale_shapes(1, blocks=blocks)
    assert {f"{name}_scale": scale.shape for name, scale in whole.items()} == {
        name: shape for name, shape in shapes.items() if name != "unembed_scale"
    }
    specs, of_ranks = model.scale_specs("tp", blocks=blocks), model.scale_shapes(2, blocks=blocks)
    for name, shape in shapes.items():
        part = [n // 2 if at == "tp" else n for n, at in itertools.zip_longest(shape, specs[name])]
        assert tuple(part) == of_ranks[name], name


def test_errors_of_scales():
    model = tiny("llama-3-8b")
    params = {name: jnp.asarray(w) for name, w in make_params(model).items()}
    eight, _ = in_eight_bits(make_params(model), model, specs(model), 1, INT8, False)
    cache = (jnp.zeros((2, 3, 4, SLOTS, 8)),) * 2
    cos, sin = rotary_tables(model, SLOTS)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))

    def call(implementation: str | None = None, params: Any = eight, **changed: Any) -> None:
        given = {name: w for name, w in (params | changed).items() if w is not None}
        f = jax.shard_map(
            lambda: jtf.decode_step(
                given, jnp.zeros((3, 32)), cache, jnp.zeros(3, jnp.int32), "tp", model=model, cos=cos, sin=sin,
                implementation=implementation,
            )[0],
            mesh=mesh, in_specs=(), out_specs=P(), check_vma=False,
        )  # fmt: skip
        jax.eval_shape(f)

    call()
    for changed, message in (
        ({"q_proj_scale": None}, "q_proj is int8, so params needs q_proj_scale"),
        ({"q_proj": params["q_proj"]}, "params has q_proj_scale, and q_proj has no 8 bits"),
        ({"o_proj_scale": jnp.ones((2, 32))},
         r"o_proj_scale must be float32\[2, 32, 1\] \(of rows\) or \[2, 1, 1\] \(of blocks\), not float32\[2, 32\]"),
        ({"up_proj_scale": jnp.ones((2, 48, 1), jnp.bfloat16)}, "up_proj_scale must be float32.* not bfloat16"),
        ({"up_proj": eight["up_proj"].astype("float8_e5m2")},
         r"up_proj must be float32\[2, 48, 32\], or int8 or float8_e4m3fn, not float8_e5m2\[2, 48, 32\]"),
        ({"attn_norm": jnp.ones((2, 32), jnp.int8)}, r"attn_norm must be float32\[2, 32\], not int8"),
        ({"attn_norm_scale": jnp.ones((2, 32))}, "params has attn_norm_scale, which this model has not"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call(**changed)


@pytest.mark.parametrize(
    "sequences, implementation, config, kernels",
    [
        (17, None, None, 0),
        (17, "fused", None, 2 * 8 + 1),
        (16, None, None, 1),
        (1, None, None, 1),
        (1, "fused", {"kernel": "operations"}, 2 * 8 + 1),
    ],
)
def test_what_takes_eight_bits(sequences, implementation, config, kernels):
    """One launch for up to 16 sequences; or operations, each product one of its own, which are asked for."""
    model = tiny("llama-3-8b", layers=2, d_model=128, heads=4, kv_heads=2, head_dim=64, d_mlp=256, vocab=128)
    params, _ = in_eight_bits(make_params(model), model, specs(model), 2, INT8, False)
    types = {
        name: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16 if w.dtype == np.float32 and "scale" not in name else w.dtype)
        for name, w in params.items()
    }
    of_params = specs(model) | {f"{name}_scale": specs(model)[name] for name in model.matrices}
    cos, sin = rotary_tables(model, SLOTS)
    cache = (jax.ShapeDtypeStruct((2, sequences, 2, SLOTS, 64), jnp.bfloat16),) * 2

    def step(params: Any, x: Any, cache: Any, lengths: Any) -> Any:
        return jtf.decode_step(
            params, x, cache, lengths, "tp", model=model, cos=cos, sin=sin, implementation=implementation, config=config
        )

    mesh, of_cache = Mesh(np.array(jax.devices()[:2]), ("tp",)), P(None, None, "tp")
    in_specs = of_params, P(), (of_cache, of_cache), P()
    call = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(P(None, "tp"), (of_cache, of_cache)))
    x, lengths = (jax.ShapeDtypeStruct(*of) for of in (((sequences, 128), jnp.bfloat16), ((sequences,), jnp.int32)))
    assert lower_for_cuda(call, types, x, cache, lengths).count(TRITON_CALL) == kernels


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_the_kernel_takes_of_eight_bits(family, world):
    """Every published model whose rows 128 divides, with scales of rows, for 1 to 4 sequences."""
    model = FAMILIES[family]
    if model.kv_heads % world:
        pytest.skip("the ranks do not divide the key/value heads")
    eight = tuple(Eight(name=name, dtype="int8", scales="row") for name in model.matrices)
    call = Call(
        model=model, world=world, batch=4, tokens=1, slots=4096, positions=4096, dtype=np.dtype(jnp.bfloat16),
        cache_dtype=np.dtype(jnp.bfloat16), by_heads=True, target=HOPPER, eight=eight,
    )  # fmt: skip
    kernel = Hopper()
    config = kernel.by_shape(call, {})
    odd = {"qwen2.5-0.5b": [448] if world == 2 else [], "llama-2-7b": [], "gemma-2-9b": []}.get(family, [])
    odd += [call.d_mlp] if call.d_mlp % 128 else []
    found = kernel.refuses(call, config)
    assert len(found) == len(odd) and all("that 128 divides" in reason for reason in found), found
    for name, (rows, groups, width) in kernel.blocks(call, config).items():
        narrow = "old" not in name and (name != "unembed_desc" or not model.tied)
        assert width == (128 if narrow else 64) and max(rows, groups) <= 256, name
        assert rows * groups * width * (1 if narrow else 2) <= 2 * config.stage, name


def test_what_the_kernel_does_not_take_of_eight_bits():
    model = FAMILIES["llama-3-8b"]

    def refused(batch: int = 1, dtypes: Any = "int8", scales: Any = "row", **changed: Any) -> list[str]:
        names = model.matrices
        dtypes = [dtypes] * len(names) if isinstance(dtypes, str) else dtypes
        eight = tuple(
            Eight(name=name, dtype=each, scales=scales) for name, each in zip(names, dtypes) if each != "bfloat16"
        )
        call = Call(
            model=dataclasses.replace(model, **changed), world=2, batch=batch, tokens=1, slots=64, positions=64,
            dtype=np.dtype(jnp.bfloat16), cache_dtype=np.dtype(jnp.bfloat16), by_heads=True, target=HOPPER, eight=eight,
        )  # fmt: skip
        return Hopper().refuses(call, Hopper().by_shape(call, {}))

    assert refused() == refused(4) == refused(5) == refused(16) == []
    assert refused(dtypes=["int8"] * 7) == []  # the unembedding may have 16 bits
    for some in (["int8"] * 7, ["bfloat16"] * 7 + ["int8"]):
        assert "by tensor cores it takes layers and an unembedding of 8 bits, or neither" in refused(5, dtypes=some)
    assert refused(scales="block") == ["it takes a scale for each row of weights of 8 bits, not for blocks, of q_proj"]
    mixed = refused(dtypes=[INT8] * 6 + [E4M3])
    assert len(mixed) == 1 and "all have one dtype, not q_proj int8, " in mixed[0] and "down_proj float8" in mixed[0]
    assert refused(d_mlp=2 * 64) == ["with weights of 8 bits it takes a d_mlp / ranks that 128 divides, not 64"]
