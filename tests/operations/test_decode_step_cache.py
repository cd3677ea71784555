"""`decode_step` with a cache of 8 bits, against a decoder in float64 whose keys and values are rounded as well."""

import dataclasses
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
from jaxtaxfree.ops.decode_step.hopper import Hopper
from jaxtaxfree.ops.kv_cache import placement_of
from jaxtaxfree.ops.variant import choose
from jaxtaxfree.target import target_of
from tests.helpers.decode_loops import decode_loop, moved
from tests.helpers.decode_steps import call_of
from tests.helpers.decoders import FAMILIES, decode, in_eight_bits, make_params, rotary_tables, tiny
from tests.helpers.support import TRITON_CALL, assert_fused, lower_for_cuda, mesh_of, sharded

INT8, E4M3 = "int8", "float8_e4m3fn"
PROMPTS = (5, 1, 7)  # tokens of each sequence
NEW = 3  # tokens after them
SLOTS = 16  # of the cache
OF_HEADS, OF_SEQUENCE = P(None, None, "tp"), P(None, None, None, "tp")


def specs(model: jtf.DecoderSpec, by_heads: bool = True) -> dict[str, P]:
    return {name: P() if at is None else P(*[None] * at, "tp") for name, at in model.sharded(by_heads).items()}


def empty(shape: tuple[int, ...], dtype: str) -> tuple[jax.Array, ...]:
    """Keys, values and scales of nothing: what is there must not matter."""
    values = jnp.full(shape, 77, dtype) if dtype == INT8 else jnp.full(shape, jnp.nan, dtype)
    return (values, values, *(jnp.full(shape[:-1], jnp.nan),) * 2)


def in_order(part: np.ndarray, world: int, block: int) -> np.ndarray:
    """Of an array [L, B, K, S, ...] of all ranks' slots, one rank after the other, the positions in their order."""
    position = np.arange(SLOTS)
    rank, slot = position // block % world, position // block // world * block + position % block
    return part[:, :, :, rank * (SLOTS // world) + slot]


def check(
    model: jtf.DecoderSpec, dtype: str, world: int, placement: str = "heads", by_operations: bool = False,
    weights: str | None = None,
) -> None:  # fmt: skip
    """Ragged prompts and some steps: logits, the cache, and that what no token has is as it was.

    Args:
      by_operations: the new tokens are `operations.run`'s, whose operations are their references.
      weights: a dtype of 8 bits for the matrices, or none.
    """
    by_heads, block = placement == "heads", 2 if placement == "round_robin" else None
    params = wide = make_params(model)
    of_params = specs(model, by_heads)
    if weights is not None:
        params, wide = in_eight_bits(params, model, of_params, world, weights, False)
        of_params |= {f"{name}_scale": of_params[name] for name in model.matrices}
    tables = rotary_tables(model, SLOTS)
    cos, sin = map(jnp.asarray, tables)
    rng = np.random.default_rng(1)
    b, longest = len(PROMPTS), max(PROMPTS)
    xs = rng.standard_normal((b, longest + NEW, model.d_model)).astype(np.float32)
    slots = SLOTS if by_heads else SLOTS // world
    place = None if by_heads else placement_of(placement, block, slots, None, "decode_step")
    how = {"model": model, "cos": cos, "sin": sin, "placement": placement, "block_size": block}

    def run(params: Any, xs: jax.Array) -> Any:
        heads = model.kv_heads // world if by_heads else model.kv_heads
        cache = jax.lax.pcast(empty((model.layers, b, heads, slots, model.head_dim), dtype), "tp", to="varying")
        counts = jnp.asarray(PROMPTS)
        if by_heads:
            given = xs[:, :longest]
            logits, cache = jtf.decode_step(params, given, cache, 0 * counts, "tp", counts=counts, **how)
        else:  # one after the other: a sequence that has its prompt has no token
            each = jnp.arange(longest)

            def read(state: Any, at: jax.Array) -> Any:
                cache, logits = state
                there = at < counts
                given = {"counts": there.astype(jnp.int32), **how}
                found, cache = jtf.decode_step(params, xs[:, at], cache, jnp.full(b, at), "tp", **given)
                return (cache, jnp.where(there[:, None], found, logits)), None

            nothing = jax.lax.pcast(jnp.zeros((b, model.vocab // world)), "tp", to="varying")
            (cache, logits), _ = jax.lax.scan(read, (cache, nothing), each)

        def step(state: Any, i: jax.Array) -> Any:
            cache, lengths = state[0], counts + i
            new = xs[jnp.arange(b), lengths]
            if by_operations:
                of_run = {"axes": ("tp",), "model": model, "placement": place, "implementation": "xla"}
                found, cache = operations.run(params, new, cache, lengths, cos, sin, **of_run)
            else:
                found, cache = jtf.decode_step(params, new, cache, lengths, "tp", **how)
            return (cache,), found

        (cache,), others = jax.lax.scan(step, (cache,), jnp.arange(NEW))
        return jnp.concatenate([logits[None], others]), cache

    of_cache = OF_HEADS if by_heads else OF_SEQUENCE
    mesh = Mesh(np.array(jax.devices()[:world]), ("tp",))
    out_specs = P(None, None, "tp"), of_cache
    run = jax.shard_map(run, mesh=mesh, in_specs=(of_params, P()), out_specs=out_specs, check_vma=True)
    logits, cache = jax.tree.map(np.asarray, jax.jit(run)(params, xs))
    assert [part.dtype.name for part in cache] == [dtype, dtype, "float32", "float32"]
    if not by_heads:
        cache = tuple(in_order(part, world, block or slots) for part in cache)
    for i, (row, prompt) in enumerate(zip(xs, PROMPTS)):
        stored = tuple(part[:, i] for part in cache)
        for part, before in zip(stored, empty((1,), dtype)):
            rest = part[:, :, prompt + NEW :].astype(np.float32)
            np.testing.assert_array_equal(rest, np.float32(np.asarray(before).ravel()[0]))
        for j in range(1 + NEW):
            expected = decode(model, wide, row[: prompt + j], *tables, stored)
            np.testing.assert_allclose(logits[j, i], expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "family, world, dtype, by_operations",
    list(zip(FAMILIES, itertools.cycle([1, 2, 4]), itertools.cycle([INT8, E4M3]), itertools.cycle([0, 0, 1]))),
)
def test_every_family(family, world, dtype, by_operations):
    check(tiny(family), dtype, world, by_operations=bool(by_operations))


@pytest.mark.parametrize("by_operations", [False, True])
@pytest.mark.parametrize("dtype", [INT8, E4M3])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_by_heads(world, dtype, by_operations):
    check(tiny("qwen3-8b"), dtype, world, by_operations=by_operations)


@pytest.mark.parametrize("by_operations", [False, True])
@pytest.mark.parametrize("dtype", [INT8, E4M3])
@pytest.mark.parametrize(
    "placement, world", [("contiguous", 1), ("contiguous", 4), ("round_robin", 2), ("round_robin", 4)]
)
def test_along_the_sequence(placement, world, dtype, by_operations):
    check(tiny("qwen2-7b", kv_heads=2), dtype, world, placement, by_operations)


@pytest.mark.parametrize("dtype, by_operations", [(INT8, False), (E4M3, True)])
def test_weights_of_8_bits_as_well(dtype, by_operations):
    check(tiny("llama-3-8b"), dtype, 2, by_operations=by_operations, weights=INT8)


def one_step(model: jtf.DecoderSpec, world: int, cache: Any, x: Any = None, **keywords: Any) -> Any:
    """The types of what a step of 3 sequences returns, on ranks that all have the same."""
    by_heads = keywords.get("placement", "heads") == "heads"
    params = {name: jnp.zeros(shape) for name, shape in model.param_shapes(world, by_heads).items()}
    cos, sin = rotary_tables(model, SLOTS)
    f = jax.shard_map(
        lambda: jtf.decode_step(
            params, jnp.zeros((3, model.d_model)) if x is None else x, cache, jnp.zeros(3, jnp.int32), "tp",
            model=model, cos=cos, sin=sin, **keywords,
        ),
        mesh=mesh_of(world), in_specs=(), out_specs=P(), check_vma=False,
    )  # fmt: skip
    return jax.eval_shape(f)


def test_the_structure_of_the_cache_stays():
    model, shape = tiny("llama-3-8b"), (2, 3, 2, SLOTS, 8)
    eight, wide = empty(shape, INT8), (jnp.zeros(shape),) * 2
    for cache in (eight, list(eight), jtf.KVCache(*eight), wide, (*wide, None, None), jtf.KVCache(*wide)):
        found = one_step(model, 2, cache)[1]
        assert type(found) is type(cache)
        assert jax.tree.structure(found) == jax.tree.structure(cache)
        for new, old in zip(jax.tree.leaves(found), jax.tree.leaves(cache), strict=True):
            assert (new.shape, new.dtype) == (old.shape, old.dtype)


def test_errors():
    model, shape = tiny("llama-3-8b"), (2, 3, 2, SLOTS, 8)
    values, wide, scales = jnp.zeros(shape, INT8), jnp.zeros(shape), jnp.ones(shape[:-1])
    four = r"it must be \(keys, values, key_scales, value_scales\)"
    for cache, message in (
        ((values, values), f"the cache is int8, so {four}"),
        ((values.astype(E4M3),) * 2, f"the cache is float8_e4m3fn, so {four}"),
        ((values, values, None, None), f"the cache is int8, so {four}"),
        ((wide, wide, scales, scales), "the cache has scales, so it must be int8 or float8_e4m3fn, not float32"),
        ((wide.astype("float8_e5m2"),) * 2, "must be of floats, or int8 or float8_e4m3fn, not float8_e5m2"),
        ((values.astype("uint8"), values.astype("uint8"), scales, scales), "int8 or float8_e4m3fn, not uint8"),
        ((values, values.astype(E4M3), scales, scales), r"keys are int8\[.*\] and values float8_e4m3fn\["),
        (
            (values, values, scales[..., None], scales),
            r"key_scales must be float32\[2, 3, 2, 16\], not float32\[2, 3, 2, 16, 1\]",
        ),
        (
            (values, values, scales, scales.astype("bfloat16")),
            r"value_scales must be float32\[2, 3, 2, 16\], not bfloat16\[2, 3, 2, 16\]",
        ),
        ((values, values, scales[0], scales), r"key_scales must be .*, not float32\[3, 2, 16\]"),
        ((values, values, scales), r"cache must be \(keys, values\) or .*, not 3 parts"),
        ((values, values, scales, None), "cache must be .*, not 4 parts, of which 1 None"),
    ):
        with pytest.raises(ValueError, match=f"^decode_step cannot take these .*{message}"):
            one_step(model, 2, cache)
    with pytest.raises(NotImplementedError, match="several new tokens only with a cache by heads"):
        along = empty((2, 3, 4, SLOTS // 2, 8), INT8)
        one_step(model, 2, along, jnp.zeros((3, 2, 32)), placement="contiguous")


@pytest.mark.parametrize("dtype", [INT8, E4M3])
def test_who_takes_it(dtype):
    """One launch of 1 to 16 sequences of heads of 128; else operations, where the GPU has the dtype."""
    call = call_of(FAMILIES["llama-3-8b"], 8, 4, 2048, cache_dtype=np.dtype(dtype))
    kernel = Hopper()
    for batch in (1, 2, 4, 5, 16):
        chosen = choose("decode_step", VARIANTS, dataclasses.replace(call, batch=batch), {})
        assert chosen.variant.name == "hopper" and chosen.config.tensor_cores == (batch > 2)
        assert chosen.config.attention_cores and chosen.config.stage == 8192
    for batch, stage in ((1, 8192), (2, 4096), (4, 4096)):  # in registers
        asked = {"tensor_cores": False, "attention_cores": False}
        assert kernel.by_shape(dataclasses.replace(call, batch=batch), asked).stage == stage
    for batch in (1, 4, 5, 16):
        asked = {"kernel": "hopper", "tensor_cores": True}
        chosen = choose("decode_step", VARIANTS, dataclasses.replace(call, batch=batch), asked)
        assert chosen.config.tensor_cores and chosen.config.stage == 8192
        blocks = chosen.variant.blocks(dataclasses.replace(call, batch=batch), chosen.config)
        assert blocks["old_keys_desc"] == (1, 64, 128)
    for changes in ({"batch": 17}, {"model": dataclasses.replace(call.model, head_dim=64)}, {"by_heads": False}):
        assert choose("decode_step", VARIANTS, dataclasses.replace(call, **changes), {}).variant.name == "operations"
    for changes, asked, refused in (
        ({"batch": 17}, {"tensor_cores": True}, "it takes 1 to 16 sequences, not 17"),
        ({"batch": 5}, {"tensor_cores": False}, "without tensor cores it takes 1 to 4 sequences, not 5"),
        (
            {"model": dataclasses.replace(call.model, head_dim=64)}, {},
            "with a cache of 8 bits it takes heads that 128 divides, not 64",
        ),
    ):  # fmt: skip
        other = dataclasses.replace(call, **changes)
        config = dataclasses.replace(kernel.by_shape(other, asked), **asked)
        assert kernel.refuses(other, config) == [refused]
        with pytest.raises(NotImplementedError, match=refused):
            choose("decode_step", VARIANTS, other, {"kernel": "hopper", **asked})
    old = call_of(FAMILIES["llama-3-8b"], 8, 1, 2048, cache_dtype=np.dtype(dtype), target=target_of(80))
    found = operations.Operations().refuses(old, operations.Config())
    wanted = [] if dtype == INT8 else ["GPUs of compute capability 8.0 have no float8_e4m3fn: take int8"]
    assert found == wanted


SMALL = tiny("llama-3-8b", layers=3, d_model=64, head_dim=64, d_mlp=128, vocab=64)
B, STEPS, LONG = 2, 6, 128
SIZE = (SMALL.layers, B, SMALL.kv_heads, LONG, SMALL.head_dim)


def types(dtype: str, world: int = 2) -> tuple[Any, ...]:
    """Of the operands of a loop."""
    mesh, shapes = mesh_of(world), SMALL.param_shapes()
    of_params = SMALL.partition_specs("tp")
    params = {name: sharded(mesh, spec, shapes[name], "bfloat16") for name, spec in of_params.items()}
    values, scales = sharded(mesh, OF_HEADS, SIZE, dtype), sharded(mesh, OF_HEADS, SIZE[:-1], "float32")
    rows = sharded(mesh, P(), (B,), "int32")
    cache = (values, values, scales, scales)
    return params, sharded(mesh, P(), (64, 64), "bfloat16"), rows, cache, rows, jax.random.key(0)


@pytest.mark.parametrize("by_operations", [False, True])
@pytest.mark.parametrize("placement", ["heads", "contiguous"])
def test_a_loop_keeps_the_cache_in_place(placement, by_operations):
    """A donated one, in a `lax.while_loop`: neither numbers nor scales are copied, and all are the results.

    Nor is a layer of it taken out and put back.
    """
    by_heads, world = placement == "heads", 2
    cos, sin = map(jnp.asarray, rotary_tables(SMALL, LONG))
    place = None if by_heads else placement_of(placement, None, LONG // world, None, "decode_step")

    def local(params: Any, x: jax.Array, cache: Any, lengths: jax.Array) -> Any:
        def step(state: Any) -> Any:
            i, x, cache = state
            if by_operations:
                how = {"axes": ("tp",), "model": SMALL, "placement": place, "implementation": "xla"}
                logits, cache = operations.run(params, x, cache, lengths + i, cos, sin, **how)
            else:
                how = {"model": SMALL, "cos": cos, "sin": sin, "placement": placement, "implementation": "xla"}
                logits, cache = jtf.decode_step(params, x, cache, lengths + i, "tp", **how)
            return i + 1, jax.lax.all_gather(logits, "tp", axis=1, tiled=True).astype(x.dtype), cache

        return jax.lax.while_loop(lambda state: state[0] < STEPS, step, (jnp.int32(0), x, cache))[2]

    of_cache = OF_HEADS if by_heads else OF_SEQUENCE
    shapes, mesh, of_params = SMALL.param_shapes(), mesh_of(world), specs(SMALL, by_heads)
    params = {name: sharded(mesh, spec, shapes[name], "bfloat16") for name, spec in of_params.items()}
    values, scales = sharded(mesh, of_cache, SIZE, INT8), sharded(mesh, of_cache, SIZE[:-1], "float32")
    in_specs = of_params, P(), of_cache, P()
    loop = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=of_cache, check_vma=False)
    rows, x = sharded(mesh, P(), (B,), "int32"), sharded(mesh, P(), (B, 64), "bfloat16")
    given = params, x, (values, values, scales, scales), rows
    text = jax.jit(loop, donate_argnums=2).lower(*given).compile().as_text()
    layers, b, heads, slots, h = SIZE
    heads, slots = (heads // world, slots) if by_heads else (heads, slots // world)
    for sizes in (f"s8[{layers},{b},{heads},{slots},{h}]", f"f32[{layers},{b},{heads},{slots}]"):
        made = [line for line in text.splitlines() if f" = {sizes}" in line]
        assert any("scatter" in line for line in made)
        assert moved("\n".join(made), 1) == []
        assert [line for line in made if "dynamic-update-slice" in line] == []
    aliased = text.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
    assert aliased.count("may-alias") == 4


@pytest.mark.parametrize("implementation, kernels", [(None, 0), ("fused", 5 * SMALL.layers + 1)])
@pytest.mark.parametrize("dtype", [INT8, E4M3])
def test_what_a_gpu_is_given(dtype, implementation, kernels):
    """ "fused": operations, whose kernels read 8 bits: nothing as large is transposed or converted. None: XLA."""
    loop = decode_loop(SMALL, mesh_of(2), LONG, STEPS, implementation=implementation)
    text = lower_for_cuda(loop, *types(dtype))
    exchange = 1  # the sampler's
    assert text.count(TRITON_CALL) == kernels + exchange
    if implementation == "fused":
        assert_fused(text, calls=kernels + exchange)
        for line in text.splitlines():
            if "stablehlo.transpose" in line or "stablehlo.convert" in line or "stablehlo.concatenate" in line:
                sizes = [int(size) for size in line.rpartition("tensor<")[2].partition(">")[0].split("x")[:-1]]
                assert np.prod(sizes) < LONG * 64, line


@pytest.mark.parametrize(
    ("placement", "sequences", "eight", "page", "kernels"),
    [
        ("heads", 1, False, 0, 1), ("heads", 4, True, 0, 1), ("heads", 5, False, 0, 1), ("contiguous", 1, False, 0, 0),
        ("heads", 17, False, 0, 0), ("heads", 2, False, 64, 1), ("heads", 2, False, 4, 0),
    ],
)  # fmt: skip
def test_what_none_takes(placement, sequences, eight, page, kernels):
    """One launch, and not operations."""
    model = tiny("llama-3-8b", layers=2, d_model=256, heads=4, kv_heads=2, head_dim=128, d_mlp=256, vocab=128)
    mesh, by_heads = mesh_of(2), placement == "heads"
    of_cache, of_params = (OF_HEADS if by_heads else OF_SEQUENCE), specs(model, by_heads)
    shapes, dtypes = model.param_shapes(), {}
    if eight:
        of_params, shapes = of_params | model.scale_specs("tp"), shapes | model.scale_shapes()
        dtypes = dict.fromkeys(model.matrices, INT8) | dict.fromkeys(model.scale_shapes(), "float32")
    params = {name: sharded(mesh, spec, shapes[name], dtypes.get(name, "bfloat16")) for name, spec in of_params.items()}
    rows = (sequences * LONG // page, page) if page else (sequences, LONG)
    size = (model.layers, rows[0], model.kv_heads, rows[1], model.head_dim)
    cache = (sharded(mesh, of_cache, size, INT8),) * 2 + (sharded(mesh, of_cache, size[:-1], "float32"),) * 2
    x, lengths = sharded(mesh, P(), (sequences, model.d_model), "bfloat16"), sharded(mesh, P(), (sequences,), "int32")
    cos, sin = rotary_tables(model, LONG)

    def step(params: Any, x: Any, cache: Any, lengths: Any) -> Any:
        tables = jnp.arange(rows[0], dtype=jnp.int32).reshape(sequences, -1) if page else None
        how = {"placement": placement, "block_tables": tables}
        return jtf.decode_step(params, x, cache, lengths, "tp", model=model, cos=cos, sin=sin, **how)

    call = jax.shard_map(
        step, mesh=mesh, in_specs=(of_params, P(), of_cache, P()), out_specs=(P(None, "tp"), of_cache), check_vma=False
    )
    assert lower_for_cuda(call, params, x, cache, lengths).count(TRITON_CALL) == kernels


ONE_LAUNCH = {
    "kernel": "hopper", "programs": 3, "stage": 1024, "num_stages": 3, "splits": 1, "merged": 32, "num_warps": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    "dtype, world, placement, config",
    [
        (INT8, 1, "heads", None),
        (E4M3, 2, "heads", None),
        (INT8, 2, "contiguous", None),
        (E4M3, 2, "round_robin", None),
        (INT8, 2, "heads", ONE_LAUNCH),
        (E4M3, 1, "heads", ONE_LAUNCH),
    ],
)
def test_the_kernels_in_a_program(dtype, world, placement, config):
    """Two steps by operations, or of one launch each, simulated, beside the reference: the second one reads what the
    first one has stored.
    """
    by_heads, block, h = placement == "heads", 4 if placement == "round_robin" else None, 128 if config else 64
    model = tiny("qwen2-7b", layers=1, heads=4, kv_heads=2, head_dim=h, vocab=64, d_model=64, d_mlp=128)
    params = {name: jnp.asarray(w, jnp.bfloat16) for name, w in make_params(model).items()}
    cos, sin = rotary_tables(model, SLOTS)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 2, model.d_model)), jnp.bfloat16)
    shape = (1, 2, 2, SLOTS, h)
    values = tuple(jnp.asarray(rng.integers(-100, 101, shape), dtype) for _ in range(2))
    cache = (*values, *(jnp.asarray(rng.uniform(0.01, 0.02, shape[:-1]), jnp.float32) for _ in range(2)))
    of_cache = OF_HEADS if by_heads else OF_SEQUENCE

    def run(implementation: str) -> tuple[Any, Any]:
        def steps(params: Any, cache: Any) -> Any:
            found = []
            for i in range(2):
                logits, cache = jtf.decode_step(
                    params, x[i], cache, jnp.array([5, 0]) + i, "tp", model=model, cos=cos, sin=sin,
                    implementation=implementation, placement=placement, block_size=block, config=config,
                )  # fmt: skip
                found.append(logits)
            return jnp.stack(found), cache

        out_specs, of_params = (P(None, None, "tp"), of_cache), specs(model, by_heads)
        call = jax.shard_map(steps, mesh=mesh_of(world), in_specs=(of_params, of_cache), out_specs=out_specs)
        return jax.tree.map(np.asarray, jax.jit(call)(params, cache))

    (logits, found), (wanted, stored) = run("simulate"), run("xla")
    np.testing.assert_allclose(logits, wanted, rtol=0.03, atol=0.03)
    for part, other in zip(found, stored):
        assert part.dtype == other.dtype
    for i in range(2):  # bf16's last bit may make another number of 8 bits
        part, other = (of[i].astype(np.float32) * of[i + 2][..., None] for of in (found, stored))
        np.testing.assert_allclose(part, other, rtol=0.13, atol=0.03)
