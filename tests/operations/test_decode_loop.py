"""Several steps of `decode_step` in one program, the sampler between them: the tokens, and that nothing is copied."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.ops import decode_step as step_ops
from tests.helpers.decode_loops import CACHES, OF_CACHE, decode_loop, moved
from tests.helpers.decoders import decode, make_params, rotary_tables, tiny
from tests.helpers.support import TRITON_CALL, assert_fused, lower_for_cuda, mesh_of, sharded

SLOTS, STEPS, B = 128, 6, 2
MODEL = tiny("llama-3-8b", d_model=64, head_dim=64, d_mlp=128, vocab=64)
WIDE = tiny("llama-3-8b", d_model=64, head_dim=128, d_mlp=128, vocab=64)  # whose cache may have 8 bits
SIZE = (MODEL.layers, B, MODEL.kv_heads, SLOTS, MODEL.head_dim)


def types(world: int, model: jtf.DecoderSpec = MODEL, dtype: str = "bfloat16") -> tuple[Any, ...]:
    mesh, shapes = mesh_of(world), model.param_shapes()
    params = {name: sharded(mesh, spec, shapes[name], "bfloat16") for name, spec in model.partition_specs("tp").items()}
    rows, size = sharded(mesh, P(), (B,), "int32"), (*SIZE[:-1], model.head_dim)
    cache = (sharded(mesh, OF_CACHE, size, dtype),) * 2
    cache += () if dtype == "bfloat16" else (sharded(mesh, OF_CACHE, size[:-1], "float32"),) * 2
    return params, sharded(mesh, P(), (64, 64), "bfloat16"), rows, cache, rows, jax.random.key(0)


# Some function that JAX registers for CPUs: programs with it are compiled, and not run.
IN_ITS_PLACE = "lapack_sgetrf_ffi"


@pytest.fixture
def a_call_in_its_place(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """ "fused" is what surrounds the kernel, and in its place a call that XLA cannot look into either.

    The list is of the bytes that it was given, each time that it was traced.
    """
    given = []

    def stand_in(kernel: Any, *arrays: Any, out_type: Any, input_output_aliases: dict[int, int], **_: Any) -> Any:
        del kernel
        given.append(sum(x.size * x.dtype.itemsize for x in arrays))
        call = jax.ffi.ffi_call(IN_ITS_PLACE, out_type, input_output_aliases=input_output_aliases)
        return call(*arrays)

    def decode_step(params: Any, x: Any, cache: Any, lengths: Any, axis: str, *, model: Any, cos: Any, sin: Any) -> Any:
        logits, *cache = step_ops.fused(
            x[:, None], *cache[:2], lengths, jnp.ones_like(lengths), jnp.asarray(cos), jnp.asarray(sin), *cache[2:],
            *params.values(), axes=(axis,), names=tuple(params), model=model, placement=None,
            config=(("kernel", "hopper"),), compute_capability=90,
        )  # fmt: skip
        return logits, tuple(cache)

    monkeypatch.setattr(step_ops, "shmem_call", stand_in)
    monkeypatch.setattr(jtf, "decode_step", decode_step)
    return given


@pytest.mark.parametrize(
    "world, model, dtype",
    [pytest.param(1, MODEL, "bfloat16", marks=pytest.mark.soak), (2, MODEL, "bfloat16"), (2, WIDE, "int8")],
)
def test_nothing_is_copied_around_the_kernel(world, model, dtype, a_call_in_its_place):
    """In the program that XLA compiles, of a donated cache: neither the cache nor a layer of weights is moved."""
    operands = types(world, model, dtype)
    compiled = decode_loop(model, mesh_of(world), SLOTS, STEPS).lower(*operands).compile()
    weights = sum(np.prod(shape) for shape in model.param_shapes(world).values())
    cache = sum(np.prod(part.shape) * part.dtype.itemsize for part in operands[3]) // world
    assert a_call_in_its_place[0] > 2 * weights + cache  # it is given all of them
    layer_of_weights = model.d_model * model.head_dim * model.kv_heads // world  # the smallest
    scales = SIZE[0] * B * model.kv_heads * SLOTS // world
    assert moved(compiled.as_text(), min(layer_of_weights, scales)) == []
    aliased = compiled.as_text().partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
    assert aliased.count("may-alias") == len(operands[3])
    (call,) = (line for line in compiled.as_text().splitlines() if "custom-call" in line and IN_ITS_PLACE in line)
    in_place = call.partition("output_to_operand_aliasing={")[2].partition("}, api_version")[0]
    assert in_place.count("{}") == len(operands[3])


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_reference_copies_no_cache(world):
    compiled = decode_loop(MODEL, mesh_of(world), SLOTS, STEPS, implementation="xla").lower(*types(world)).compile()
    assert moved(compiled.as_text(), int(np.prod(SIZE)) // world) == []


def test_a_copy_is_found(a_call_in_its_place):
    """Of a cache that somebody else reads as well."""
    loop = decode_loop(MODEL, mesh_of(2), SLOTS, STEPS)

    def twice(params: Any, embed: Any, token: Any, cache: Any, lengths: Any, key: Any) -> Any:
        return loop(params, embed, token, cache, lengths, key), loop(params, embed, token, cache, lengths + 1, key)

    compiled = jax.jit(twice, donate_argnums=3).lower(*types(2)).compile()
    assert moved(compiled.as_text(), int(np.prod(SIZE)) // 2)


def test_what_a_gpu_is_given():
    """A step is one launch, the sampler's exchange another; and what is large is never transposed or converted."""
    loop = decode_loop(MODEL, mesh_of(2), SLOTS, STEPS, implementation="fused")
    text = lower_for_cuda(loop, *types(2))
    assert_fused(text, calls=2)
    (step,) = (line for line in text.splitlines() if TRITON_CALL in line and "operand_index" in line)
    # The cache, which is reshaped nowhere.
    cache = "x".join(map(str, (SIZE[0], B, SIZE[2] // 2, *SIZE[3:])))
    assert re.findall(r"output_tuple_indices = \[(\d)\]", step) == ["1", "2"]
    assert not [line for line in text.splitlines() if "stablehlo.reshape" in line and f"tensor<{cache}xbf16>" in line]
    for line in text.splitlines():
        if "stablehlo.transpose" in line or "stablehlo.convert" in line or "stablehlo.concatenate" in line:
            sizes = [int(size) for size in line.rpartition("tensor<")[2].partition(">")[0].split("x")[:-1]]
            assert np.prod(sizes) < 64 * 64, line


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 4])
def test_tokens(world):
    """Those of the decoder in float64 that knows no JAX, drawn with k = 1, in one program."""
    params = make_params(MODEL)
    rng = np.random.default_rng(2)
    embed = rng.standard_normal((MODEL.vocab, MODEL.d_model)).astype(np.float32)
    cos, sin = rotary_tables(MODEL, SLOTS)
    texts = [[3], [41]]
    for text in texts:
        for _ in range(STEPS):
            logits = decode(MODEL, params, embed[text], cos, sin)
            assert np.diff(np.sort(logits)[-2:]) > 1e-4  # no tie that rounding could decide
            text.append(int(np.argmax(logits)))
    loop = decode_loop(MODEL, mesh_of(world), SLOTS, STEPS, k=1)
    cache = tuple(jnp.full(SIZE, jnp.nan) for _ in range(2))
    tokens, _ = loop(params, embed, jnp.array([3, 41]), cache, jnp.zeros(B, jnp.int32), jax.random.key(1))
    np.testing.assert_array_equal(np.asarray(tokens).T, [text[1:] for text in texts])


def test_a_prompt_in_parts():
    """A prompt that is read in two calls, of sequences of different lengths, gives what it gives in one."""
    params, (cos, sin) = make_params(MODEL), rotary_tables(MODEL, SLOTS)
    x = np.random.default_rng(4).standard_normal((B, 9, MODEL.d_model)).astype(np.float32)
    counts = jnp.array([9, 6])

    def run(params: Any, x: Any, cache: Any) -> Any:
        read = lambda x, cache, lengths, counts: jtf.decode_step(  # noqa: E731
            params, x, cache, lengths, "tp", model=MODEL, cos=cos, sin=sin, counts=counts
        )
        whole, at_once = read(x, cache, 0 * counts, counts)
        _, part = read(x[:, :4], cache, 0 * counts, jnp.full(B, 4))
        rest, part = read(x[:, 4:], part, jnp.full(B, 4), counts - 4)
        return whole, at_once, rest, part

    call = jax.shard_map(
        run, mesh=mesh_of(2), in_specs=(MODEL.partition_specs("tp"), P(), CACHES),
        out_specs=(P(None, "tp"), CACHES, P(None, "tp"), CACHES), check_vma=False,
    )  # fmt: skip
    whole, at_once, rest, part = jax.jit(call)(params, x, (jnp.zeros(SIZE),) * 2)
    np.testing.assert_allclose(rest, whole, rtol=1e-4, atol=1e-4)
    for mine, other in zip(part, at_once):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)
        assert np.abs(other[:, 0, :, 8]).min() > 0 and not np.any(other[:, 1, :, 6:])
