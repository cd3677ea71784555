"""Calls of `decode_attention` for its tests: what it takes on each rank, and what must come out, in f64.

The whole sequence is made first. Then it is dealt out, cut into pages and quantised, in NumPy and step by step.
"""

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtaxfree import decode_attention
from tests.helpers.support import one_program

WORLDS = (1, 2, 3, 4, 8)
DTYPES = ("float32", "bfloat16", "float16")
HEAD_SIZES = (64, 80, 96, 128, 192, 256)
LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
SCALES = ("tensor", "head", "token")
# Of weights that are rounded to the dtype before they are multiplied, and of one rounding of the result.
TOLERANCE = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call. What has no comment is the parameter of that name, or its letter.

    Attributes:
      t: None for a query [B, N, H].
      hv: None for h.
      s: keys of a sequence that a rank has room for.
      cache: dtype of a quantised cache, or None.
      scales: of what a quantised cache has scales.
      window: local_window_size.
      result: preferred_element_type.
    """

    world: int
    b: int = 3
    t: int | None = None
    n: int = 24
    k: int = 4
    h: int = 64
    hv: int | None = None
    s: int = 64
    dtype: str = "float32"
    kv_layout: str = "BSKH"
    placement: str = "contiguous"
    block_size: int | None = None
    page_size: int | None = None
    cache: str | None = None
    scales: str = "token"
    lengths: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    window: int | tuple[int, int] | None = None
    soft_cap: float | None = None
    scale: float | None = None
    sinks: bool = False
    output: str = "replicated"
    result: str | None = None

    @property
    def stretch(self) -> int:
        """Positions that a rank keeps next to each other."""
        if self.placement == "contiguous":
            return self.s
        largest = max(2**i for i in range(7) if self.s % 2**i == 0)
        return self.block_size or self.page_size or largest

    @property
    def keywords(self) -> dict[str, Any]:
        """Of `decode_attention`, apart from arrays."""
        return {
            "scale": self.scale,
            "placement": self.placement,
            "block_size": self.block_size,
            "kv_layout": self.kv_layout,
            "local_window_size": self.window,
            "logits_soft_cap": self.soft_cap,
            "output": self.output,
            "preferred_element_type": self.result,
        }


class Operands(NamedTuple):
    """The arrays of a call, by the names of the parameters.

    Attributes:
      whole: the same on every rank.
      parts: [world, ...], one for each rank.
    """

    whole: dict[str, np.ndarray]
    parts: dict[str, np.ndarray]


class Expected(NamedTuple):
    """f64: the result [B, (T,) N, Hv] of all heads, and the log-sum-exp [B, (T,) N]."""

    out: np.ndarray
    residual: np.ndarray


def attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    lengths: np.ndarray,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> Expected:
    """Of the last tokens [B, T, N, H] of sequences of these lengths over keys [B, S, K, H], one row at a time."""
    b, t, n, h = query.shape
    group = n // key.shape[2]
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    out, residual = np.zeros((b, t, n, value.shape[3])), np.full((b, t, n), -np.inf)
    for i, j, head in np.ndindex(b, t, n):
        position = int(lengths[i]) - t + j
        first = max(0, position - window) if window is not None else 0
        seen = slice(first, max(first, position + 1))
        logits = key[i, seen, head // group] @ query[i, j, head] * (h**-0.5 if scale is None else scale)
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        sink = [] if sinks is None else [np.float64(sinks[head])]
        if len(logits) + len(sink) == 0:
            continue
        top = max(*logits, *sink, -np.inf)
        weights = np.exp(logits - top)
        total = weights.sum() + np.exp(np.array(sink) - top).sum()
        out[i, j, head] = weights @ value[i, seen, head // group] / total
        residual[i, j, head] = top + np.log(total)
    return Expected(out, residual)


def quantise(x: np.ndarray, dtype: str, scales: str) -> tuple[np.ndarray, np.ndarray]:
    """x [B, S, K, H] in numbers of a dtype, and the scales [], [K] or [B, S, K] by which to multiply them."""
    over = {"tensor": None, "head": (0, 1, 3), "token": 3}[scales]
    scale = (np.abs(x).max(axis=over, keepdims=True) / LARGEST[dtype]).astype(np.float32)
    numbers = x / scale
    numbers = np.rint(numbers) if dtype == "int8" else numbers
    return numbers.astype(jnp.dtype(dtype)), scale.squeeze(over)


def deal_out(x: np.ndarray, world: int, stretch: int) -> np.ndarray:
    """[B, world * S, ...] -> [world, B, S, ...]: stretches of positions, the first one to rank 0."""
    b, _, *rest = x.shape
    hands = x.reshape(b, -1, world, stretch, *rest)
    return np.moveaxis(hands, 2, 0).reshape(world, b, -1, *rest)


def cut_into_pages(parts: np.ndarray, tables: np.ndarray, pages: int, garbage: Any) -> np.ndarray:
    """[world, B, S, ...] -> pools [world, pages, page size, ...], as tables [world, B, pages of S] say."""
    world, b, s, *rest = parts.shape
    size = s // tables.shape[2]
    pools = np.full((world, pages, size, *rest), garbage, parts.dtype)
    for rank in range(world):
        pools[rank, tables[rank]] = parts[rank].reshape(b, -1, size, *rest)
    return pools


SPARE_PAGES = 3  # of a pool, which no sequence uses


def shuffled_tables(case: Case, rng: np.random.Generator) -> np.ndarray | None:
    """i32 [world, B, pages of S]: which pages of a rank hold a sequence."""
    if case.page_size is None:
        return None
    pages = case.b * case.s // case.page_size + SPARE_PAGES
    some = np.stack([rng.permutation(pages)[:-SPARE_PAGES] for _ in range(case.world)])
    return some.reshape(case.world, case.b, -1).astype(np.int32)


def in_places(case: Case, x: np.ndarray) -> np.ndarray:
    """What each token has, [B, world * S, ...], in the order of the places where the tokens lie."""
    if case.starts is None:
        return x
    places = np.empty_like(x)
    for b, token in np.ndindex(x.shape[:2]):
        places[b, (case.starts[b] + token) % x.shape[1]] = x[b, token]
    return places


def lay_out(case: Case, x: np.ndarray, tables: np.ndarray | None, garbage: Any = 0) -> np.ndarray:
    """Keys, values or their scales [B, world * S, K, ...] as the ranks keep them: [world, ...]."""
    x = deal_out(in_places(case, x), case.world, case.stretch)
    if tables is not None:
        x = cut_into_pages(x, tables, tables[0].size + SPARE_PAGES, garbage)
    return np.moveaxis(x, 3, {"BSKH": 3, "BKSH": 2, "KBSH": 1}[case.kv_layout])


def make(case: Case, seed: int = 0) -> tuple[Operands, Expected]:
    """Random operands of a call, with garbage wherever there is no key, and what must come out."""
    rng = np.random.default_rng(seed)
    total = case.world * case.s
    query = rng.normal(size=(case.b, case.t or 1, case.n, case.h)).astype(jnp.dtype(case.dtype))
    lengths = np.full(case.b, total) if case.lengths is None else np.array(case.lengths)
    behind = np.arange(total) >= lengths[:, None]  # [B, world * S]
    tables = shuffled_tables(case, rng)
    whole: dict[str, np.ndarray] = {"query": query if case.t else query[:, 0]}
    parts: dict[str, np.ndarray] = {}
    if case.lengths is not None:
        whole["key_value_seq_lengths"] = lengths.astype(np.int32)
    if case.starts is not None:
        whole["starts"] = np.array(case.starts, np.int32)
    if case.sinks:
        whole["sinks"] = rng.normal(size=case.n).astype(np.float32)
    if tables is not None:
        unused = deal_out(in_places(case, behind), case.world, case.stretch).reshape(*tables.shape, -1).all(-1)
        parts["block_tables"] = np.where(unused, -1, tables)

    def put(name: str, x: np.ndarray) -> None:
        garbage = x.dtype.type(99 if x.dtype == np.int8 else np.nan)
        x = np.where(behind.reshape(*behind.shape, *[1] * (x.ndim - 2)), garbage, x)
        parts[name] = lay_out(case, x, tables, garbage)

    exact = {}
    for name, size in (("key", case.h), ("value", case.hv or case.h)):
        # Of very different magnitudes, so that every scale matters.
        x = rng.normal(size=(case.b, total, case.k, size)) * rng.uniform(0.5, 2, (case.b, total, case.k, 1))
        if case.cache is None:
            x = exact[name] = x.astype(jnp.dtype(case.dtype))
        else:
            x, scale = quantise(x, case.cache, case.scales)
            exact[name] = x.astype(np.float64) * (scale[..., None] if scale.ndim == 3 else scale.reshape(-1, 1))
            if case.scales == "token":
                put(f"{name}_scale", scale)
            else:
                whole[f"{name}_scale"] = scale
        put(name, x)

    expected = attention(
        query,
        exact["key"],
        exact["value"],
        lengths,
        scale=case.scale,
        window=case.window[0] if isinstance(case.window, tuple) else case.window,
        soft_cap=case.soft_cap,
        sinks=whole.get("sinks"),
    )
    return Operands(whole, parts), expected if case.t else Expected(*(x[:, 0] for x in expected))


def alone(case: Case, axis_name: Any = (), **keywords: Any) -> Callable:
    """(Operands) -> (result, log-sum-exp) by `decode_attention` without peers and outside of `jax.shard_map`."""

    def call(operands: Operands) -> Any:
        own = {name: x[0] for name, x in operands.parts.items()}
        attend = functools.partial(decode_attention, axis_name=axis_name, return_residual=True)
        return attend(**operands.whole, **own, **case.keywords, **keywords)

    return call


def program(
    case: Case, mesh: Mesh, axis_name: Any = "tp", *, batch: str | None = None, check_vma: bool = True, **keywords: Any
) -> Callable:
    """(Operands) -> (result, log-sum-exp) of all heads, by `decode_attention`; sequences along the axis `batch`."""

    local = alone(case, axis_name, **keywords)
    heads = axis_name if case.output == "heads" else None
    out = P(batch, None, heads) if case.t else P(batch, heads)
    operands = Operands(P(batch) if batch else P(), P(axis_name, batch) if batch else P(axis_name))
    return one_program(local, mesh=mesh, in_specs=(operands,), out_specs=(out, out), check_vma=check_vma)


def assert_right(case: Case, found: Any, expected: Expected) -> None:
    """The result and the log-sum-exp that were found are those that must come out, and of the right types."""
    out, residual = found
    assert out.dtype == jnp.dtype(case.result or case.dtype)
    assert residual.dtype == jnp.float32
    tolerance = max(TOLERANCE[case.dtype], TOLERANCE[out.dtype.name])
    np.testing.assert_allclose(np.asarray(out, np.float64), expected.out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(residual, expected.residual, rtol=1e-5, atol=1e-4)


def features(base: Case) -> dict[str, Case]:
    """Calls with one feature each, or with some that touch each other, by name."""
    s, full = base.s, base.world * base.s
    ends = (0, 1, s - 1, s, s + 1, full)
    uneven = (full, 3, full // 2 + 1)
    change = functools.partial(dataclasses.replace, base)
    cases = {
        "full": change(),
        "multi-head": change(k=base.n),
        "multi-query": change(k=1),
        "value-heads": change(hv=base.h * 2),
        **{f"tokens-{t}": change(t=t, lengths=uneven) for t in (1, 2, 5, 8)},
        "tokens-shorter": change(t=4, b=6, lengths=(0, 1, 2, 3, 4, 5)),
        "tokens-full": change(t=3),
        "head-major": change(kv_layout="BKSH", lengths=uneven),
        "ends": change(b=6, lengths=ends),
        "ends-round-robin": change(b=6, lengths=ends, placement="round_robin"),
        "no-keys": change(lengths=(0, 0, 0)),
        "past-the-end": change(lengths=(full + 2, full, 1)),
        **{
            f"blocks-{size}": change(placement="round_robin", block_size=size, lengths=uneven, t=2)
            for size in (1, 8, 32, s)
        },
        "window-0": change(window=0, lengths=uneven),
        "window": change(window=7, t=3, lengths=uneven),
        "window-pair": change(window=(s, 5), t=2, lengths=uneven, placement="round_robin", block_size=8),
        "soft-cap": change(soft_cap=2.0, lengths=uneven),
        "scale-1": change(scale=1.0, lengths=uneven),
        "sinks": change(sinks=True, lengths=(full, 0, 2), t=3),
        "sinks-heads": change(sinks=True, lengths=uneven, output="heads"),
        "heads": change(output="heads", lengths=uneven),
        "heads-multi-query": change(output="heads", k=1, t=2),
        "paged": change(page_size=16, lengths=uneven),
        "paged-head-major": change(page_size=32, kv_layout="BKSH", lengths=uneven, t=2),
        "paged-full": change(page_size=64),
        "paged-blocks": change(page_size=32, placement="round_robin", block_size=16, lengths=uneven),
        "paged-round-robin": change(page_size=16, placement="round_robin", lengths=uneven, window=20),
        **{f"result-{dtype}": change(result=dtype, dtype="bfloat16") for dtype in DTYPES},
        "bfloat16": change(dtype="bfloat16", lengths=uneven),
        "float16": change(dtype="float16", lengths=uneven),
    }
    for i, (cache, scales) in enumerate((cache, scales) for cache in LARGEST for scales in SCALES):
        quantised = change(cache=cache, scales=scales, lengths=uneven, dtype=DTYPES[(i + i // 3) % 2])
        cases[f"{cache}-{scales}"] = quantised
    cases["quantised-paged"] = change(cache="int8", page_size=16, kv_layout="BKSH", lengths=uneven)
    cases["quantised-paged-heads"] = change(cache="float8_e4m3fn", page_size=32, lengths=uneven, output="heads")
    return cases


def forms(base: Case) -> dict[str, Case]:
    """Rings, and pools of which the heads stand first, by name; every one has three sequences."""
    s, full = base.s, base.world * base.s
    uneven = (full, 3, full // 2 + 1)
    change = functools.partial(dataclasses.replace, base, lengths=uneven)
    pool = functools.partial(change, kv_layout="KBSH")
    return {
        "ring": change(lengths=(0, full, s + 1), starts=(7, full - 1, full - 3)),
        "ring-full": change(lengths=None, starts=(0, s + 5, -1), hv=32),
        "ring-past-the-end": change(lengths=(full + 2, full, 1), starts=(s + 3, 0, full - 1), soft_cap=2.0),
        "ring-window": change(starts=(s - 2, full - 2, 3), window=7, t=3, sinks=True),
        "ring-round-robin": change(
            starts=(full - 5, full - 1, 9), placement="round_robin", block_size=8, output="heads"
        ),
        "ring-paged": change(starts=(s + 17, full - 1, 40), page_size=16, cache="int8", window=s + 7),
        "pool": pool(sinks=True),
        "pool-paged": pool(page_size=32, t=2, output="heads"),
        "pool-quantised": pool(page_size=16, cache="float8_e4m3fn"),
        "pool-ring": pool(page_size=16, starts=(1, full - 2, s), placement="round_robin", cache="int8", scales="head"),
    }


def draw(choose: random.Random, *, world: int, small: bool = False) -> Case:
    """A call with features at random.

    Args:
      small: for the simulator.
    """

    def maybe(value: Any) -> Any:
        return choose.choice((None, value))

    k, group = choose.choice((1, 2, 3)), choose.choice((1, 2, 4))
    output = choose.choice(("replicated", "heads"))
    if output == "heads":
        group *= world // math.gcd(world, k * group)
    page_size = maybe(choose.choice((16, 32) if small else (16, 32, 64, 128, 256)))
    s = (page_size or 8) * choose.randint(1, 2 if small else 3)
    sizes = (16, 24, 32) if small else HEAD_SIZES
    b = choose.randint(1, 2 if small else 3)
    ends = (0, 1, s - 1, s, s + 1, world * s, choose.randint(0, world * s))
    placement = choose.choice(("contiguous", "round_robin"))
    return Case(
        world=world,
        b=b,
        t=maybe(choose.randint(1, 3 if small else 8)),
        n=k * group,
        k=k,
        h=choose.choice(sizes),
        hv=maybe(choose.choice(sizes)),
        s=s,
        dtype=choose.choice(DTYPES),
        kv_layout=choose.choice(("BSKH", "BKSH", "KBSH")),
        placement=placement,
        block_size=maybe(choose.choice([i for i in range(1, s + 1) if s % i == 0]))
        if placement == "round_robin"
        else None,
        page_size=page_size,
        cache=maybe(choose.choice(tuple(LARGEST))),
        scales=choose.choice(SCALES),
        lengths=maybe(tuple(choose.choice(ends) for _ in range(b))),
        starts=maybe(tuple(choose.choice((*ends, -choose.randint(1, s))) for _ in range(b))),
        window=choose.choice((None, None, choose.randint(0, s), (choose.randint(0, 2 * s), 0))),
        soft_cap=maybe(5.0),
        scale=choose.choice((None, None, 1.0)),
        sinks=choose.choice((False, True)),
        output=output,
        result=maybe(choose.choice(DTYPES)),
    )


def cases(**keywords: Any) -> st.SearchStrategy[Case]:
    """`draw`, with hypothesis choosing."""
    return st.randoms(use_true_random=False).map(functools.partial(draw, **keywords))
