"""What the kernel of `decode_step` must get right on GPUs, as functions of a mesh; as in `collectives_parity`.

A kernel takes some 20 seconds to compile, and is compiled anew for every model, batch and length of the cache. So cases
are compiled side by side, and what runs long shares the kernel of one case.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

import jaxtaxfree as jtf
from jaxtaxfree.ops.decode_step.call import FEW
from tests.helpers.decode_steps import call_of, refusals
from tests.helpers.decoders import FAMILIES, rotary_tables, tiny
from tests.helpers.parity import on_ranks, program, relative_error, run_all

SLOTS = 512
STEPS = 8
REPETITIONS = 1000
GROWN = 500  # tokens
TOLERANCE = 0.02
ROOM_FOR_NCCL = {"programs": 68}  # of 132, and NCCL takes 64 multiprocessors at most

SIZES = {"layers": 2, "d_model": 512, "heads": 8, "kv_heads": 4, "head_dim": 128, "d_mlp": 1024, "vocab": 1024}
LLAMA = tiny("llama-3-8b", **SIZES)
# The model, and the tokens of each sequence in the cache.
CASES: dict[str, tuple[jtf.DecoderSpec, tuple[int, ...]]] = {
    "one sequence": (LLAMA, (37,)),
    "an empty cache": (LLAMA, (0, 200)),
    "four sequences": (LLAMA, (5, 240, 64, 100)),
    "seven sequences": (LLAMA, (5, 240, 64, 100, 0, 511, 1)),
    "sixteen sequences": (LLAMA, tuple(range(0, 512, 32))),
    "five sequences of qwen 2": (tiny("qwen2.5-0.5b", **{**SIZES, "head_dim": 64}), (100, 3, 0, 77, 300)),
    "nine sequences of qwen 3": (tiny("qwen3-8b", **SIZES), (64, 1, 2, 3, 500, 0, 9, 8, 7)),
    "rows that nothing divides": (dataclasses.replace(LLAMA, d_mlp=2176, vocab=1004), (90,)),
    "qwen 2": (tiny("qwen2.5-0.5b", **{**SIZES, "head_dim": 64}), (100, 3)),
    "qwen 3": (tiny("qwen3-8b", **SIZES), (64,)),
    "gemma 2": (tiny("gemma-2-9b", **SIZES), (33, 200)),
    "five sequences of gemma 2": (tiny("gemma-2-9b", **SIZES), (33, 200, 0, 1, 511)),
    "nine sequences of gemma 2": (tiny("gemma-2-9b", **SIZES), tuple(range(0, 450, 50))),
    "a window": (dataclasses.replace(LLAMA, windows=(64, None)), (130, 20)),
    "caps": (dataclasses.replace(LLAMA, score_soft_cap=5.0, logit_soft_cap=2.0, activation="gelu_tanh"), (90,)),
}


# The dtype of the matrices, with a scale for each row; tied embeddings keep 16 bits.
EIGHT_BITS: dict[str, tuple[str, jtf.DecoderSpec, tuple[int, ...]]] = {
    "one sequence in int8": ("int8", LLAMA, (37,)),
    "one sequence in e4m3": ("float8_e4m3fn", LLAMA, (200,)),
    "four sequences in int8": ("int8", LLAMA, (5, 240, 64, 100)),
    "rows that nothing divides, in e4m3": (
        "float8_e4m3fn", dataclasses.replace(LLAMA, d_mlp=2304, vocab=1004), (90, 0)
    ),
    "qwen 2 in int8": ("int8", tiny("qwen2.5-0.5b", **{**SIZES, "head_dim": 64}), (100, 3)),
    "gemma 2 in e4m3": ("float8_e4m3fn", tiny("gemma-2-9b", **SIZES), (33, 200)),
    "seven sequences in int8": ("int8", LLAMA, (5, 240, 64, 100, 0, 511, 1)),
    "sixteen sequences in e4m3": ("float8_e4m3fn", LLAMA, tuple(range(0, 512, 32))),
}  # fmt: skip
# With a cache of 8 bits: its dtype, that of the weights if it has 8 bits, the model, the tokens of each sequence.
CACHES: dict[str, tuple[str, str | None, jtf.DecoderSpec, tuple[int, ...]]] = {
    "one sequence, a cache of int8": ("int8", None, LLAMA, (500,)),
    "four sequences, a cache of e4m3": ("float8_e4m3fn", None, LLAMA, (5, 240, 0, 511)),
    "weights and a cache of int8": ("int8", "int8", LLAMA, (33, 200)),
    "seven sequences, a cache of int8": ("int8", None, LLAMA, (5, 240, 64, 100, 0, 511, 1)),
    "sixteen sequences, weights of int8 and a cache of e4m3": (
        "float8_e4m3fn", "int8", LLAMA, tuple(range(0, 512, 32))
    ),
}  # fmt: skip
# With a cache in pages: the positions of one, a dtype of 8 bits or none, the model, the tokens of each sequence.
PAGES: dict[str, tuple[int, str | None, jtf.DecoderSpec, tuple[int, ...]]] = {
    "one sequence, pages of 16": (16, None, LLAMA, (500,)),
    "four sequences, pages of 64": (64, None, LLAMA, (5, 240, 0, 511)),
    "a window, pages of 8": (8, None, dataclasses.replace(LLAMA, windows=(64, None)), (130, 20)),
    "two sequences, pages of 32 of int8": (32, "int8", LLAMA, (33, 200)),
    "seven sequences, pages of 16": (16, None, LLAMA, (5, 240, 64, 100, 0, 511, 1)),
    "sixteen sequences, pages of 128": (128, None, LLAMA, tuple(range(0, 512, 32))),
}


def full_layers(world: int) -> dict[str, jtf.DecoderSpec]:
    """Two layers at their full size, and a part of the vocabulary, of each published model that the kernel takes."""
    models = {name: dataclasses.replace(model, layers=2, vocab=8192) for name, model in FAMILIES.items()}
    return {name: model for name, model in models.items() if is_taken(model, 1, world)}


def is_taken(model: jtf.DecoderSpec, b: int, world: int) -> bool:
    """Whether the kernel takes a step of b sequences."""
    return model.kv_heads % world == 0 and not refusals(call_of(model, world, b, SLOTS))


def for_ranks(cases: dict[str, Any], world: int) -> dict[str, Any]:
    """Cases, whose last are a model and lengths, with models of which more than two ranks have the shares of two."""
    more = max(1, world // 2)
    whole = ("heads", "kv_heads", "d_mlp", "vocab")

    def widened(model: jtf.DecoderSpec) -> jtf.DecoderSpec:
        return dataclasses.replace(model, **{name: more * getattr(model, name) for name in whole})

    return {name: (*how, widened(model), lengths) for name, (*how, model, lengths) in cases.items()}


def operands(
    model: jtf.DecoderSpec, b: int, slots: int, steps: int, eight: str | None = None, of_cache: str | None = None
) -> tuple[dict[str, jax.Array], jax.Array, Any]:
    """Random (parameters of this rank, x [steps, b, D] the same on every rank, cache) in bf16, inside of a program.

    Args:
      eight: a dtype of 8 bits for the matrices, whose rows have scales.
      of_cache: one for the cache.
    """
    rank, world = lax.axis_index("tp"), lax.axis_size("tp")
    root = jax.random.fold_in(
        jax.random.key(0), lax.optimization_barrier(0 * rank)
    )  # no constant, which XLA would fold
    keys = iter(jax.random.split(root, 40))

    def draw(shape: tuple[int, ...], scale: float, own: bool) -> jax.Array:
        key = jax.random.fold_in(next(keys), rank if own else 0)
        return (scale * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16)

    params, sharded = {}, model.sharded()
    for name, shape in model.param_shapes(world).items():
        params[name] = draw(shape, 0.1 if len(shape) < 3 and "embed" not in name else shape[-1] ** -0.5,
                            sharded[name] is not None)  # fmt: skip
        if name.endswith("norm") and not model.norm_plus_one:
            params[name] += 1
    size = (model.layers, b, model.kv_heads // world, slots, model.head_dim)
    cache: Any = draw(size, 1.0, True), draw(size, 1.0, True)
    if of_cache is not None:
        values, scales = zip(*(jtf.quantize(part, of_cache, block=(1, -1)) for part in cache))
        cache = *values, *(scale[..., 0] for scale in scales)
    if eight is not None:
        for name in model.matrices:
            params[name], params[f"{name}_scale"] = jtf.quantize(params[name], eight, block=(1, -1))
    return lax.optimization_barrier((params, draw((steps, b, model.d_model), 1.0, False), cache))


def decode(
    model: jtf.DecoderSpec, params: Any, xs: jax.Array, cache: Any, lengths: Any, **keywords: Any
) -> tuple[jax.Array, Any]:
    """Logits [steps, B, V / W] of so many steps, one after the other, and the cache."""
    tables = keywords.get("block_tables")
    cos, sin = rotary_tables(model, cache[0].shape[3] * (1 if tables is None else tables.shape[1]))

    def step(state: Any, x: jax.Array) -> Any:
        at, cache = state
        logits, cache = jtf.decode_step(params, x, cache, at, "tp", model=model, cos=cos, sin=sin, **keywords)
        return (at + 1, cache), logits

    (_, cache), logits = lax.scan(step, (jnp.asarray(lengths), cache), xs)
    return logits, cache


def errors_of(
    model: jtf.DecoderSpec, lengths: tuple[int, ...], slots: int = SLOTS, steps: int = STEPS, kernel: str = "hopper",
    eight: str | None = None, config: dict[str, Any] | None = None, of_cache: str | None = None, page: int = 0,
) -> jax.Array:  # fmt: skip
    """Relative errors of the kernel's logits, keys and values (of 8 bits with their scales) beside XLA's.

    Args:
      page: positions of a page, if the cache is to be in pages.
    """
    params, xs, cache = operands(model, len(lengths), slots, steps, eight, of_cache)
    asked = {"kernel": kernel, **(config or {})}
    how: dict[str, Any] = {}
    if page:
        cache, how["block_tables"] = in_pages(cache, page)
    ways = [decode(model, params, xs, cache, lengths, implementation="fused", config=asked, **how)]
    ways.append(decode(model, params, xs, cache, lengths, implementation="xla", **how))
    pairs = zip(*map(jax.tree.leaves, ways), strict=True)
    return jnp.stack([relative_error(*(x.astype(jnp.float32) for x in pair), ("tp",)) for pair in pairs])


def in_pages(cache: Any, page: int) -> tuple[Any, jax.Array]:
    """(The pools of a cache, in which its pages lie in any order, and where they are)."""
    b, pages = cache[0].shape[1], cache[0].shape[3] // page
    order = np.random.default_rng(0).permutation(b * pages)

    def pool(part: jax.Array) -> jax.Array:
        layers, _, heads, _, *rest = part.shape
        part = jnp.moveaxis(part.reshape(layers, b, heads, pages, page, *rest), 3, 2)
        return part.reshape(layers, b * pages, heads, page, *rest)[:, order]

    return jax.tree.map(pool, cache), jnp.asarray(np.argsort(order).reshape(b, pages), jnp.int32)


def check_cases(mesh: Mesh, *names: str) -> None:
    """Every case, or those that are named."""
    cases = for_ranks(CASES, mesh.devices.size)
    _check_all(mesh, {name: cases[name] for name in names or cases})


def check_operations(mesh: Mesh) -> None:
    """Every model and batch by operations, and one that the kernel does not take."""
    cases = {**CASES, "seventeen sequences": (LLAMA, tuple(range(0, 510, 30)))}
    _check_all(mesh, for_ranks(cases, mesh.devices.size), kernel="operations")


def check_eight_bits(mesh: Mesh, kernel: str = "hopper") -> None:
    """Weights of 8 bits beside XLA's of the same weights."""
    _run(mesh, {
        name: functools.partial(errors_of, model, lengths, kernel=kernel, eight=eight)
        for name, (eight, model, lengths) in for_ranks(EIGHT_BITS, mesh.devices.size).items()
    })  # fmt: skip


def check_caches(mesh: Mesh, kernel: str = "hopper") -> None:
    """A cache of 8 bits beside XLA's; more sequences than registers have room for by tensor cores."""
    by_tensor_cores = {"tensor_cores": True}
    _run(mesh, {
        name: functools.partial(
            errors_of, model, lengths, kernel=kernel, eight=eight, of_cache=of_cache,
            config=by_tensor_cores if kernel == "hopper" and len(lengths) > FEW else None,
        )
        for name, (of_cache, eight, model, lengths) in for_ranks(CACHES, mesh.devices.size).items()
    })  # fmt: skip


def check_pages(mesh: Mesh, kernel: str = "hopper") -> None:
    """A cache in pages beside XLA's."""
    _run(mesh, {
        name: functools.partial(errors_of, model, lengths, kernel=kernel, of_cache=of_cache, page=page)
        for name, (page, of_cache, model, lengths) in for_ranks(PAGES, mesh.devices.size).items()
    })  # fmt: skip


def check_full_layers(mesh: Mesh) -> None:
    models = full_layers(mesh.devices.size)
    assert len(models) >= 6, list(models)
    _check_all(mesh, {name: (model, (300,)) for name, model in models.items()}, steps=2)


def _check_all(mesh: Mesh, cases: dict[str, tuple[jtf.DecoderSpec, tuple[int, ...]]], **how: Any) -> None:
    _run(mesh, {name: functools.partial(errors_of, *case, **how) for name, case in cases.items()})


def _run(mesh: Mesh, cases: dict[str, Callable[[], jax.Array]]) -> None:
    """Compiles and runs what returns errors, which have to be small."""
    found = dict(zip(cases, run_all([program(mesh, case) for case in cases.values()]), strict=True))
    wrong = [f"{name}: {error}" for name, error in found.items() if not np.all(error < TOLERANCE)]
    assert not wrong, wrong


def check_repetition(mesh: Mesh, times: int = REPETITIONS) -> None:
    """The same bits each time, of three steps in turn; logits and the cache."""
    model, lengths = for_ranks(CASES, mesh.devices.size)["one sequence"]

    def local() -> jax.Array:
        params, xs, cache = operands(model, len(lengths), SLOTS, 3)
        call = lambda x: decode(model, params, x[None], cache, lengths, implementation="fused")  # noqa: E731
        first = [call(x) for x in xs]
        first = jax.tree.map(lambda *of_steps: jnp.stack(of_steps), *first)

        def step(i: jax.Array, wrong: jax.Array) -> jax.Array:
            found = call(xs[i % 3])
            same = [jnp.array_equal(a, b[i % 3]) for a, b in zip(*map(jax.tree.leaves, (found, first)), strict=True)]
            return wrong + jnp.where(functools.reduce(jnp.logical_and, same), 0, 1)

        return lax.psum(lax.fori_loop(0, times, step, jnp.int32(0)), "tp")

    assert int(on_ranks(mesh, local)) == 0
    jtf.heap.check()


def check_growing(mesh: Mesh) -> None:
    """From an empty cache, full of NaN, to 500 tokens: each step's logits, and the cache as a prompt leaves it.

    The rank's number is taken in front of the loop.
    """

    def local() -> jax.Array:
        params, xs, cache = operands(LLAMA, 1, SLOTS, GROWN)
        empty = jax.tree.map(lambda part: jnp.full_like(part, jnp.nan), cache)
        rank = lax.axis_index("tp")
        (found, filled), (wanted, _) = (
            decode(LLAMA, params, xs, empty, [0], axis_index=rank, implementation=how) for how in ("fused", "xla")
        )
        cos, sin = rotary_tables(LLAMA, SLOTS)
        read = functools.partial(jtf.decode_step, axis_name="tp", model=LLAMA, cos=cos, sin=sin, implementation="xla")
        last, read_cache = read(params, jnp.swapaxes(xs, 0, 1), empty, jnp.zeros(1, jnp.int32))
        pairs = [(found, wanted), (found[-1], last)]
        pairs += [(a[:, :, :, :GROWN], b[:, :, :, :GROWN]) for a, b in zip(filled, read_cache)]
        pairs += [(found[i], wanted[i]) for i in range(0, GROWN, 50)]
        untouched = jnp.stack([jnp.all(jnp.isnan(part[:, :, :, GROWN:])) for part in filled])
        error = jnp.stack([relative_error(*(x.astype(jnp.float32) for x in pair), ("tp",)) for pair in pairs])
        return jnp.where(lax.psum(1 - jnp.all(untouched), "tp") == 0, error, jnp.inf)

    error = on_ranks(mesh, local)
    assert np.all(error < TOLERANCE), error


def check_between_collectives(mesh: Mesh) -> None:
    """One of XLA's collectives before each step, and one behind it, which depend on it."""
    model, lengths = CASES["one sequence"]

    def local() -> jax.Array:
        params, xs, cache = operands(model, len(lengths), SLOTS, 1)
        call = lambda x: decode(model, params, x, cache, lengths, implementation="fused")[0]  # noqa: E731
        first = call(xs)
        ones = jnp.ones(1 << 20)

        def step(_: jax.Array, state: Any) -> Any:
            wrong, total = state
            x = xs + (0 * total[0]).astype(xs.dtype)
            logits = call(x)
            total = lax.psum(ones + 0 * jnp.sum(logits), "tp") / lax.axis_size("tp")
            return wrong + jnp.where(jnp.array_equal(logits, first) & jnp.all(total == 1), 0, 1), total

        return lax.psum(lax.fori_loop(0, 200, step, (jnp.int32(0), ones))[0], "tp")

    assert int(on_ranks(mesh, local)) == 0
    jtf.heap.check()


def check_beside_collectives(mesh: Mesh) -> None:
    """A collective of XLA's is under way while the kernel runs, which does not take all multiprocessors."""
    model, lengths = CASES["one sequence"]

    def local() -> jax.Array:
        params, xs, cache = operands(model, len(lengths), SLOTS, 1)
        cos, sin = rotary_tables(model, SLOTS)
        how = {"model": model, "cos": cos, "sin": sin, "implementation": "fused", "config": ROOM_FOR_NCCL}
        # No loop of one step, into which the scheduler would not look.
        call = lambda x: jtf.decode_step(params, x, cache, jnp.asarray(lengths), "tp", **how)[0]  # noqa: E731
        first = call(xs[0])
        ones = jnp.ones(1 << 22) + lax.axis_index("tp")
        sum_of_ranks = lax.axis_size("tp") * (lax.axis_size("tp") + 1) // 2

        def step(_: jax.Array, state: Any) -> Any:
            wrong, x = state
            total = lax.psum(x, "tp")  # nothing that the kernel needs
            logits = call(xs[0] + (0 * wrong).astype(xs.dtype))
            right = jnp.array_equal(logits, first) & jnp.all(total == sum_of_ranks)
            return wrong + jnp.where(right, 0, 1), ones + 0 * total

        return lax.psum(lax.fori_loop(0, 200, step, (jnp.int32(0), ones))[0], "tp")

    # Without graphs, in which XLA runs one thing at a time.
    options = {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_graph_min_graph_size": 1 << 20}
    compiled = program(mesh, local).lower().compile(compiler_options=options)
    during = re.findall(r"all-reduce-start\(.*?all-reduce-done\(", compiled.as_text(), re.DOTALL)
    beside = [
        line.strip()[:100] for line in compiled.as_text().splitlines() if re.search(r"(all-reduce|custom).*\(", line)
    ]
    assert any("custom-call(" in each for each in during), f"nothing is under way beside the kernel: {beside}"
    assert int(compiled()) == 0
    jtf.heap.check()


def small_call(mesh: Mesh) -> Callable[[], jax.Array]:
    """A program of one step, that returns each rank's logits [W, V / W]."""
    model, lengths = CASES["one sequence"]

    def local() -> jax.Array:
        params, xs, cache = operands(model, len(lengths), SLOTS, 1)
        return decode(model, params, xs, cache, lengths, implementation="fused")[0][0]

    out = jax.sharding.PartitionSpec("tp")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=out, check_vma=False))


# With several processes as well.
CHECKS = (
    check_cases,
    check_operations,
    check_repetition,
    check_growing,
    check_between_collectives,
    check_beside_collectives,
)
