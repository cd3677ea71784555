"""The kernels that the simulator runs in the tests: how to call each with small shapes, and what must come out."""

import dataclasses
import functools
import importlib.util
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton

from jaxtaxfree import simulator
from jaxtaxfree.ops import all_gather_matmul as gather_ops
from jaxtaxfree.ops import collectives as collective_ops
from jaxtaxfree.ops import decode_attention as attention_op
from jaxtaxfree.ops import matmul_all_reduce as reduce_ops
from jaxtaxfree.ops import matmul_reduce_scatter as scatter_ops
from jaxtaxfree.ops import register
from jaxtaxfree.ops.kv_cache import Placement
from jaxtaxfree.ops.variant import named
from jaxtaxfree.simulator.scheduler import POLICIES
from jaxtaxfree.target import target_of
from tests.helpers.attention_cases import TOLERANCE, Case, make
from tests.helpers.support import product_call, variant_of

ROOT = Path(__file__).parents[2]
WORLDS = (2, 3, 4, 8)
DTYPES = (np.dtype(np.float32), np.dtype(jnp.bfloat16))
SLOTS = (1, 2, None)
TILES = {"block_m": 16, "block_n": 16, "block_k": 32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a kernel by all ranks.

    Attributes:
      arrays: for each operand the array of each rank.
      keywords: of `simulator.run`.
      expected: the result of each rank, or its results.
      tolerance: how far results may be from that, absolutely and relatively; 0 for exact ones.
    """

    arrays: Sequence[Sequence[np.ndarray]]
    keywords: dict[str, Any]
    expected: Sequence[Any]
    tolerance: float = 0

    def run(self, kernel: Any, **settings: Any) -> simulator.Trace:
        """Simulates the call and compares its results."""
        outs, trace = simulator.run(kernel, *self.arrays, **{**self.keywords, **settings})
        for rank, pair in enumerate(zip(outs, self.expected)):
            for found, expected in zip(*map(jax.tree.leaves, pair), strict=True):
                found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
                np.testing.assert_allclose(
                    found, expected, rtol=self.tolerance, atol=self.tolerance, err_msg=f"result of rank {rank}"
                )
        return trace


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Simulated:
    """A kernel.

    Attributes:
      name: in the names of tests.
      module: the kernel's file.
      function: the kernel's name in it.
      call: (world, dtype, shape) -> Call.
      shapes: to choose from, by world size.
    """

    name: str
    module: ModuleType
    function: str
    call: Callable[[int, np.dtype, Any], Call]
    shapes: Callable[[int], Sequence[Any]]

    @property
    def kernel(self) -> Any:
        return getattr(self.module, self.function)

    def case(self, seed: int, world: int, most: int | None = None) -> tuple[Call, dict[str, Any]]:
        """The call and the settings of a seed. Seeds next to each other differ in everything.

        Args:
          most: of so many shapes, the first ones; None for all.
        """
        shapes, settings = self.shapes(world)[:most], list(itertools.product(DTYPES, SLOTS, POLICIES))
        # Shifted after each round of all settings, or a shape would meet some of them alone.
        dtype, slots, policy = settings[(seed * 7 + seed // len(settings)) % len(settings)]
        return self.call(world, dtype, shapes[seed % len(shapes)]), {"seed": seed, "slots": slots, "policy": policy}

    def run(self, seeds: Iterable[int], world: int) -> None:
        """Runs the calls of these seeds, which have to be right, without an alarm, and without wasted traffic."""
        with warnings.catch_warnings():
            warnings.simplefilter("error", simulator.WastedTrafficWarning)
            for seed in seeds:
                call, settings = self.case(seed, world)
                call.run(self.kernel, **settings)


def integers(seed: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Small integers: every order of adding up their products gives the same, even in bf16."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(dtype)


TRANSPOSED = "[N, K]"  # in a shape: so rhs lies
# In a shape, too: rhs is of 8 bits, or lhs and rhs, and has scales of rows and columns or of blocks.
EIGHT = {
    name: (lhs, rhs, kind)
    for rhs in ("int8", "float8_e4m3fn")
    for kind in ("row", "block")
    for name, lhs in ((f"{rhs} {kind}", ""), (f"{rhs} x {rhs} {kind}", rhs))
}


def _all_gather_matmul(world: int, dtype: np.dtype, m: int, n: int, k: int, **config: Any) -> Call:
    """As the operation launches it, with tiles of 16 x 16."""
    lhs, rhs, exact, config = _operands(world, dtype, m, k, n, config, gathers=True)
    gathered = np.concatenate(exact[0])
    expected = [(gathered @ w).astype(dtype) for w in exact[1]]
    keywords = _launch(gather_ops, world * m, k, n, world, dtype, **config)
    return Call(arrays=(lhs, {"rhs": rhs}, {}, *exact[2]), keywords=keywords, expected=expected)


def _operands(
    world: int, dtype: np.dtype, rows: int, k: int, n: int, config: dict[str, Any], gathers: bool = False
) -> tuple[list[np.ndarray], list[np.ndarray], tuple[Any, Any, tuple[Any, ...]], dict[str, Any]]:
    """lhs and rhs of each rank as they lie; both as f32, as their scales make them, and the bundle of these; settings.

    Scales are powers of 2, so that sums stay exact; where ranks gather, all have those of all rows.
    """
    config = dict(config)
    eight, bundles = config.pop("eight", None), ()
    types = (dtype, dtype)
    if eight:
        types = (np.dtype(jnp.dtype(EIGHT[eight][0] or "bfloat16")), np.dtype(jnp.dtype(EIGHT[eight][1])))
    lhs = [integers(rank, (rows, k), types[0]) for rank in range(world)]
    rhs = [integers(100 + rank, (k, n), types[1]) for rank in range(world)]
    exact = [[x.astype(np.float32) for x in each] for each in (lhs, rhs)]
    if eight:
        blocks, own = EIGHT[eight][2] == "block", types[0].itemsize == 1
        steps, columns = (math.ceil(k / 128), math.ceil(n / 128)) if blocks else (1, n)
        all_rows = world * rows if gathers else rows
        found: dict[str, list[np.ndarray]] = {}
        for name, shape in (("lhs", (steps, all_rows)), ("rhs", (steps, columns)))[0 if own else 1 :]:
            each = [2.0 ** integers(200 + (0 if gathers and name == "lhs" else rank), shape, np.dtype("float32"))
                    for rank in range(world)]  # fmt: skip
            found[f"{name}_blocks" if blocks else name] = [x.astype(np.float32) for x in each]
            for rank, scale in enumerate(each):
                if name == "lhs":
                    scale = scale[:, rank * rows : (rank + 1) * rows] if gathers else scale
                    exact[0][rank] *= np.repeat(scale, 128 if blocks else k, 0)[:k].T
                else:
                    wide = np.repeat(scale, 128 if blocks else k, 0)[:k]
                    exact[1][rank] *= np.repeat(wide, 128 if blocks else 1, 1)[:, :n]
        bundles = {name: [x if blocks else x[0] for x in each] for name, each in found.items()}
        config |= {"operands": types, "scales": ("none" if not own else EIGHT[eight][2], EIGHT[eight][2])}
    takes_scales = config.get("kernel", "").endswith("few")
    return lhs, _as_they_lie(rhs, config), (*exact, (bundles or {},) if takes_scales else ()), config


def _as_they_lie(rhs: Sequence[np.ndarray], config: dict[str, Any]) -> list[np.ndarray]:
    """Each [K, N], or turned over."""
    return [np.ascontiguousarray(each.T) for each in rhs] if config.get("rhs_transposed") else list(rhs)


def _launch(
    operation: ModuleType,
    rows: int,
    k: int,
    n: int,
    world: int,
    dtype: np.dtype,
    kernel: str = "portable",
    rhs_transposed: bool = False,
    operands: tuple[np.dtype, np.dtype] | None = None,
    scales: tuple[str, str] = ("none", "none"),
    **config: Any,
) -> dict:
    kind = named(operation.__name__, operation.VARIANTS, kernel).Config
    grouped = {"group_m": 2} if kernel == "portable" else {}
    form = {"rhs_transposed": rhs_transposed, "lhs_scales": scales[0], "rhs_scales": scales[1]}
    lhs, rhs = operands or (dtype, dtype)
    form |= {"rhs_dtype": rhs, "out_dtype": dtype}
    return launched(operation, rows, k, n, world, lhs, kind(**{**TILES, **grouped, **config}), **form)


def launched(
    operation: ModuleType, rows: int, k: int, n: int, world: int, dtype: np.dtype, config: Any, **form: Any
) -> dict:
    """The keywords of `simulator.run` for a kernel as its operation launches it; `form` is that of `product_call`."""
    call = product_call(operation, rows, k, n, world=world, dtype=dtype, precision="ieee", **form)
    keywords = variant_of(operation, config).launch(call, config)
    del keywords["name"]  # reports name the kernel, because several belong to one operation
    return {"world": world, **keywords}


def _large(world: int, dtype: np.dtype, shape: tuple[int, ...]) -> Call:
    m, n, k, pushers, units, chunk = shape
    return _all_gather_matmul(world, dtype, m, n, k, pushers=pushers, units=units, chunk=chunk)


def _few(world: int, dtype: np.dtype, shape: tuple[int, ...]) -> Call:
    (m, n, k, pushers, chunk), form = _lies(shape)
    return _all_gather_matmul(world, dtype, m, n, k, pushers=pushers, chunk=chunk, kernel="few", **form)


def _hopper_few(world: int, dtype: np.dtype, shape: tuple[int, ...]) -> Call:
    (m, n, k, pushers, chunk, part, stages, splits, *tile), transposed = _lies(shape)
    config = {**_tile(world * m, *tile), "part": part, "num_stages": stages, "splits": splits, **transposed}
    return _all_gather_matmul(world, dtype, m, n, k, pushers=pushers, chunk=chunk, kernel="hopper_few", **config)


def _lies(shape: tuple) -> tuple[tuple, dict[str, Any]]:
    """A shape without the words for operands of 8 bits and a transposed rhs, and what a call is told of them."""
    *numbers, _ = (*itertools.takewhile(lambda each: not isinstance(each, str), shape), None)
    words = shape[len(numbers) :]
    eight = next((word for word in words if word in EIGHT), None)
    return tuple(numbers), {"rhs_transposed": TRANSPOSED in words, "eight": eight}


def _tile(rows: int, block_m: int | None = None, whole: int = 0) -> dict[str, int]:
    """Settings of a tile, by default of one that has all rows; of many of them it is handled in pieces."""
    block_m = block_m or triton.next_power_of_2(max(8, rows))
    return {"block_m": block_m, "whole": whole, **({"block_n": 64, "num_warps": 4} if block_m > 128 else {})}


def _matmul_reduce_scatter(world: int, dtype: np.dtype, shape: tuple[int, ...], **config: Any) -> Call:
    (m, n, k), form = _lies(shape)
    config = form | config
    lhs, rhs, (left, right, bundles), config = _operands(world, dtype, world * m, k, n, config)
    total = sum(a @ b for a, b in zip(left, right))
    expected = np.split(total.astype(dtype), world)
    keywords = _launch(scatter_ops, world * m, k, n, world, dtype, **config)
    return Call(arrays=(lhs, rhs, {}, *bundles), keywords=keywords, expected=expected)


def _large_scatter(world: int, dtype: np.dtype, shape: tuple[int, ...]) -> Call:
    *sizes, lag = shape
    # With one warp a step of K carries so little that something is left after the last one.
    return _matmul_reduce_scatter(world, dtype, tuple(sizes), lag=lag, num_warps=1, exact_wire=True)


def _matmul_all_reduce(world: int, dtype: np.dtype, shape: tuple[int, ...], **config: Any) -> Call:
    (m, n, k), form = _lies(shape)
    config = form | config
    lhs, rhs, (left, right, bundles), config = _operands(world, dtype, m, k, n, config)
    total = sum(a @ b for a, b in zip(left, right))
    keywords = _launch(reduce_ops, m, k, n, world, dtype, **config)
    return Call(arrays=(lhs, rhs, {}, *bundles), keywords=keywords, expected=[total.astype(dtype)] * world)


def _matmul_all_reduce_few(world: int, dtype: np.dtype, shape: tuple) -> Call:
    (m, n, k, shots, exact_wire, apart, add_rows), form = _lies(shape)
    config = {
        "shots": shots,
        "exact_wire": exact_wire,
        "apart": apart,
        "linger": apart,
        "add_rows": add_rows,
    }
    return _matmul_all_reduce(world, dtype, (m, n, k), kernel="few", **config, **form)


def _reduce_hopper_few(world: int, dtype: np.dtype, shape: tuple) -> Call:
    """A reduce-scatter of M rows a rank for 0 shots, else an all-reduce of M rows in all."""
    (m, n, k, shots, exact_wire, add_rows, stages, splits, *tile), transposed = _lies(shape)
    rows = world * m if shots == 0 else m if shots == 1 else world * -(-m // world)
    config = {
        **_tile(rows, *tile),
        **transposed,
        "num_stages": stages,
        "splits": splits,
        "exact_wire": exact_wire,
        "kernel": "hopper_few",
    }
    if shots == 0:
        return _matmul_reduce_scatter(world, dtype, (m, n, k), **config)
    return _matmul_all_reduce(world, dtype, (m, n, k), **config, shots=shots, add_rows=add_rows)


def _decode_attention(world: int, dtype: np.dtype, shape: tuple[Case, attention_op.portable.Config]) -> Call:
    """As the operation launches it."""
    case, config = dataclasses.replace(shape[0], dtype=dtype.name), shape[1]
    (whole, parts), (out, residual) = make(case)
    given = {**{name: [x] * world for name, x in whole.items()}, **{name: list(x) for name, x in parts.items()}}
    names = ("block_tables", "key_scale", "value_scale", "sinks")
    lengths = given["key_value_seq_lengths"]  # stands for what is not there
    arrays = (given["query"], given["key"], given["value"], lengths, *(given.get(name, lengths) for name in names))
    if case.starts is not None:
        arrays += (given["starts"],)
    assert isinstance(case.window, int | None)
    spec = attention_op.Spec(
        placement=Placement(stretch=case.stretch, slots=case.s),
        page_size=case.page_size,
        kv_heads=case.k,
        layout=case.kv_layout,
        scale=case.h**-0.5 if case.scale is None else case.scale,
        window=case.window,
        soft_cap=case.soft_cap,
        by_heads=case.output == "heads",
        dtype=dtype,
    )
    kind = case.scales if case.cache else "none"
    call = attention_op.Call(
        query_shape=whole["query"].shape,
        value_head_size=case.hv or case.h,
        world=world,
        spec=spec,
        dtype=dtype,
        cache_dtype=parts["key"].dtype,
        target=target_of(90),
        key_scale=kind,
        value_scale=kind,
        sinks=case.sinks,
        starts=case.starts is not None,
        pages=parts["key"].shape[1 + case.kv_layout.index("B")],
    )
    (variant,) = attention_op.VARIANTS
    keywords = variant.launch(call, config)
    del keywords["name"]
    own = [slice(None)] * world
    if spec.by_heads:
        own = [slice(rank * case.n // world, (rank + 1) * case.n // world) for rank in range(world)]
    return Call(
        arrays=arrays,
        keywords={"world": world, **keywords},
        expected=[(out[:, :, heads], residual[:, :, heads]) for heads in own],
        tolerance=TOLERANCE[dtype.name],
    )


def _decode_attention_shapes(world: int) -> tuple[tuple[Case, attention_op.portable.Config], ...]:
    split = functools.partial(attention_op.portable.Config, block_s=16)
    case = functools.partial(Case, world=world, b=1, t=1, k=1, h=16)
    few = world > 4  # ranks take most of the time
    full = world * 24
    return (
        (
            case(b=2, n=2, s=32, lengths=(world * 32 - 3, 5), sinks=True),
            split(splits=2, merge_rows=1),
        ),
        (
            case(
                t=1 if few else 2,
                n=world,
                s=24 if few else 48,
                hv=24,
                lengths=(world * (20 if few else 40),),
                placement="round_robin",
                block_size=8,
                window=world * (10 if few else 20),
                output="heads",
            ),
            split(splits=2 if few else 3, merge_rows=max(2, world // 2)),
        ),
        (
            case(n=3, s=32, page_size=16, cache="int8", lengths=(33,), kv_layout="BKSH"),
            split(splits=2, merge_rows=4),
        ),
        # Rings: empty, full from the last place on, wrapped across ranks, and inside of one (and of its first block).
        (
            case(b=4, n=2, s=24, lengths=(0, full, 20, full - 2), starts=(0, full - 1, full - 5, 20)),
            split(splits=2, merge_rows=2),
        ),
        # Parts that are no whole blocks, several heads before the sequences, windows that wrap, scales of tokens.
        (
            case(
                t=2,
                b=2,
                n=2,
                k=2,
                s=24,
                lengths=(full, full - 5),
                starts=(full - 3, 13),
                window=world * 12,
                placement="round_robin",
                block_size=8,
                kv_layout="KBSH",
                cache="int8",
            ),
            split(splits=2, merge_rows=2),
        ),
        (
            case(n=2, k=2, s=48, page_size=16, lengths=(world * 48 - 7,), starts=(-29,), window=40, kv_layout="KBSH"),
            split(splits=3, merge_rows=1),
        ),
    )


def _collective(world: int, dtype: np.dtype, shape: tuple, *, operation: str) -> Call:
    size, outer, config = shape
    parts = world if operation in ("psum_scatter", "all_to_all") else 1
    x = [integers(rank, (parts * size,), dtype) for rank in range(world)]
    # Of `all_to_all` a part lies in one piece in the result.
    split = [part.reshape(outer, parts, -1).swapaxes(0, 1).reshape(parts, -1) for part in x]
    total = sum(part.astype(np.float32) for part in x).astype(dtype)
    expected = {
        "psum": lambda: [total] * world,
        "all_gather": lambda: [np.stack([part.reshape(outer, -1) for part in x], 1).reshape(-1)] * world,
        "psum_scatter": lambda: [total.reshape(outer, world, -1)[:, rank].reshape(-1) for rank in range(world)],
        "all_to_all": lambda: [np.concatenate([part[rank] for part in split]) for rank in range(world)],
    }[operation]()
    (variant,) = collective_ops.VARIANTS[operation]
    call = collective_ops.Call(size=size, outer=outer, world=world, dtype=dtype)
    keywords = variant.launch(call, variant.Config(**config))
    del keywords["name"]
    return Call(arrays=(x,), keywords={"world": world, **keywords}, expected=expected)


def _collective_shapes(world: int, *, operation: str) -> tuple[tuple[int, int, dict[str, Any]], ...]:
    """(elements, pieces of a rank's part, configuration)"""
    sizes = ((70 if world <= 4 else 20, 1), (3, 1) if operation == "psum" else (24, 3))
    shots = ({"shots": 1}, {"shots": 2}) if operation == "psum" else ({},)
    return tuple(
        (size, outer, {"protocol": protocol, "block": 16 if size < 70 or number == {"shots": 2} else 32, **number})
        for size, outer in sizes
        for protocol in ("messages", "words", "signals")
        for number in shots
    )


def _custom_kernel(world: int, dtype: np.dtype, shape: tuple[int, ...]) -> Call:
    size, block = shape
    x = [integers(rank, (size,), dtype) for rank in range(world)]
    everybodys = jax.ShapeDtypeStruct((world, size), dtype)
    grid = math.ceil(size / block)
    keywords = {
        "world": world,
        "grid": grid,
        "out_type": everybodys,
        "scratch": {"inbox": everybodys},
        "signals": {"arrived": (world, grid)},
        "SIZE": size,
        "BLOCK": block,
    }
    return Call(arrays=(x,), keywords=keywords, expected=[np.stack(x)] * world)


def load(path: Path, name: str, **names: Any) -> ModuleType:
    """The module in a file, as if its name were `name`, with these other globals."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(names)
    return module


# By the name of a kernel: (world, dtype, shape) -> Call, and the shapes to choose from, by world size. A kernel that is
# added here gets every test of test_simulator_kernels.py.
SIMULATED: dict[str, tuple[Callable[[int, np.dtype, Any], Call], Callable[[int], Sequence[Any]]]] = {
    "all_gather_matmul": (
        _large,
        # M, N, K, PUSHERS, UNITS, CHUNK
        lambda world: (
            ((17, 9, 21, 2, 2, 128), (5, 19, 9, 1, 1, 32), (16, 16, 32, 3, 1, 256))
            if world <= 4
            else ((5, 9, 21, 2, 1, 64), (16, 16, 16, 1, 2, 128))
        ),
    ),
    "all_gather_matmul_few": (
        _few,
        # M, N, K, PUSHERS, CHUNK
        lambda world: (
            (3, 21, 19, 2, 32),
            (7, 9, 33, 3, 64),
            (1, 16, 32, 1, 32),
            (3, 40, 136, 2, 32, TRANSPOSED, "int8 block"),
        ),
    ),
    "all_gather_matmul_hopper_few": (
        _hopper_few,
        # M, N, K, PUSHERS, CHUNK, PART, STAGES, SPLITS; BLOCK_M if that is not the next power of 2; WHOLE; TRANSPOSED
        lambda world: (
            (
                (3, 24, 136, 2, 32, 96, 2, 1),
                (1, 16, 40, 1, 32, 40, 3, 2),
                (5, 40, 104, 3, 64, 32, 2, 2),
                (2, 16, 392, 1, 256, 392, 10, 1),
                (2, 16, 584, 1, 256, 584, 10, 2),
                (3, 24, 136, 3, 32, 64, 2, 3),
                (256 // world, 40, 40, 2, 2048, 32, 2, 2),
                (11, 24, 136, 4, 256, 32, 2, 4),
                (11, 40, 104, 3, 64, 32, 2, 3, 16),
                (12, 24, 72, 2, 128, 64, 2, 1, 8),
                (11, 24, 104, 3, 64, 32, 3, 2, 24),
                (23, 40, 136, 2, 256, 64, 2, 3, 48),
                (11, 56, 104, 3, 64, 32, 2, 2, 16, 3),
                (5, 40, 104, 2, 64, 32, 2, 2, TRANSPOSED),
                (5, 48, 272, 2, 64, 32, 2, 2, TRANSPOSED, "int8 block"),
                (3, 32, 144, 2, 64, 32, 2, 1, TRANSPOSED, "float8_e4m3fn x float8_e4m3fn row"),
            )
            if world <= 4
            else (
                (3, 24, 72, 2, 64, 64, 2, 1),
                (1, 16, 32, 1, 32, 32, 3, 2),
                (5, 16, 136, 4, 64, 32, 2, 4),
                (3, 16, 104, 3, 64, 32, 2, 3, 16),
                (3, 16, 104, 2, 64, 32, 2, 2, 24),
                (3, 40, 104, 2, 64, 32, 2, 3, 24, 2),
            )
        ),
    ),
    "matmul_reduce_scatter": (
        _large_scatter,
        # M, N, K, LAG
        lambda world: (
            ((17, 39, 21, 4), (5, 19, 99, 2), (16, 16, 32, 1), (17, 9, 21, 3), (5, 9, 9, 9))
            if world <= 4
            else ((5, 9, 70, 2), (5, 9, 9, 1), (5, 9, 16, 9))
        ),
    ),
    "matmul_reduce_scatter_few": (
        functools.partial(_matmul_reduce_scatter, kernel="few", exact_wire=True),
        # M, N, K
        lambda world: ((3, 21, 19), (7, 9, 33), (1, 16, 32), (3, 37, 40, "float8_e4m3fn row")),
    ),
    "matmul_all_reduce": (
        _matmul_all_reduce,
        # M, N, K; TRANSPOSED
        lambda world: (
            ((33, 25, 21), (70, 9, 17), (5, 19, 9), (17, 9, 21, TRANSPOSED))
            if world <= 4
            else ((17, 40, 9), (5, 9, 21))
        ),
    ),
    "matmul_all_reduce_few": (
        _matmul_all_reduce_few,
        # M, N, K, SHOTS, EXACT_WIRE, APART, ADD_ROWS; TRANSPOSED; of EIGHT
        lambda world: (
            (3, 21, 19, 1, True, True, 2),
            (1, 16, 32, 1, True, False, 1),
            (17, 9, 5, 1, False, False, 16),
            (7, 21, 33, 2, True, False, 1),
            (5, 17, 9, 2, True, True, 4),
            (18, 9, 17, 2, False, False, 2),
            (9, 33, 5, 2, False, True, 1),
            (5, 17, 19, 2, True, False, 4, TRANSPOSED),
            (5, 40, 136, 2, True, False, 4, TRANSPOSED, "float8_e4m3fn block"),
        ),
    ),
    "matmul_reduce_hopper_few": (
        _reduce_hopper_few,
        # M, N, K, SHOTS, EXACT_WIRE, ADD_ROWS, STAGES, SPLITS; BLOCK_M if that is not the next power of 2; WHOLE;
        # TRANSPOSED
        lambda world: (
            (3, 24, 136, 0, True, None, 2, 1),
            (1, 16, 40, 0, False, None, 3, 2),
            (5, 40, 72, 1, False, 2, 2, 2),
            (1, 16, 392, 1, True, 1, 10, 1),
            (5, 24, 136, 2, False, 1, 2, 3),
            (1, 40, 72, 2, True, 1, 2, 1),
            (256 // world, 40, 40, 0, False, 16, 2, 2),
            (11, 24, 136, 0, True, None, 2, 4),
            (29, 24, 136, 2, False, 2, 2, 4),
            (21, 24, 136, 1, False, 1, 2, 2),
            (19, 40, 72, 0, False, None, 2, 1, 16),
            (45, 24, 136, 2, True, 2, 2, 3, 16),
            (21, 24, 72, 1, False, 1, 2, 1, 8),
            (11, 24, 104, 0, True, None, 3, 2, 24),
            (47, 40, 136, 2, False, 2, 2, 3, 48),
            (23, 24, 72, 1, True, 1, 2, 1, 24),
            (19, 40, 72, 0, False, None, 2, 2, 16, 4),
            (21, 24, 104, 2, True, 1, 2, 3, 8, 1),
            (11, 24, 72, 1, False, 1, 2, 2, 24, TRANSPOSED),
            (5, 48, 272, 0, True, None, 3, 2, TRANSPOSED, "int8 x int8 block"),
            (11, 32, 208, 1, True, 1, 2, 1, 24, TRANSPOSED, "float8_e4m3fn row"),
        ),
    ),
    "decode_attention": (
        _decode_attention,
        _decode_attention_shapes,
    ),
    **{
        operation: (
            functools.partial(_collective, operation=operation),
            functools.partial(_collective_shapes, operation=operation),
        )
        for operation in ("psum", "all_gather", "psum_scatter", "all_to_all")
    },
}


def _simulated(kernel: Any) -> Simulated:
    name = kernel.__name__.removesuffix("_kernel")
    call, shapes = SIMULATED[name]
    module = sys.modules[kernel.fn.__module__]
    return Simulated(name=name, module=module, function=kernel.__name__, call=call, shapes=shapes)


KERNELS = (
    *(
        _simulated(kernel)
        # Several operations may share a kernel.
        for kernel in dict.fromkeys(
            variant.kernel for entry in register.OPERATIONS.values() for variant in reversed(entry.variants)
        )
        if kernel.__name__.removesuffix("_kernel") in SIMULATED
    ),
    Simulated(
        name="custom_kernel",
        module=load(ROOT / "examples" / "custom_kernel.py", "custom_kernel"),
        function="all_gather_kernel",
        call=_custom_kernel,
        # SIZE, BLOCK
        shapes=lambda world: ((37, 16), (8, 8), (70, 32)),
    ),
)
