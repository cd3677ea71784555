"""The kernels for Hopper alone, in the simulator: right in every interleaving, and planted faults are found."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtaxfree import all_gather_matmul as operation
from jaxtaxfree import simulator
from jaxtaxfree.kernels.all_gather_matmul import hopper as all_gather_matmul_hopper
from jaxtaxfree.kernels.blocks import hopper as matmul_hopper
from jaxtaxfree.kernels.matmul_all_reduce import hopper as matmul_all_reduce_hopper
from jaxtaxfree.kernels.matmul_reduce_scatter import hopper as matmul_reduce_scatter_hopper
from jaxtaxfree.ops import all_gather_matmul as gather_ops
from jaxtaxfree.ops import matmul_all_reduce as reduce_ops
from jaxtaxfree.ops import matmul_reduce_scatter as scatter_ops
from jaxtaxfree.ops.epilogue import Epilogue
from jaxtaxfree.simulator import (
    DataRaceError,
    DeadlockError,
    MbarrierError,
    MissingFenceError,
    OutOfBoundsError,
    SignalCountError,
    SimulationError,
    UnfinishedOperationError,
)
from tests.conftest import MeshFactory
from tests.helpers.attention_cases import TOLERANCE
from tests.helpers.simulator_kernels import WORLDS, Call, Simulated, integers, launched, load
from tests.simulator.test_simulator_gluon import indent
from tests.simulator.test_simulator_kernels import PORTION, PORTIONS, first_seeds
from tests.simulator.test_simulator_mutants import SEEDS, TOO_EARLY, edit, looked_for

TILES = {"block_n": 16, "block_k": 8, "part": 16, "num_stages": 2, "group_m": 2}


def all_gather_matmul(world: int, dtype: np.dtype, shape: tuple) -> Call:
    """As the operation launches it."""
    m, n, k, programs, return_gathered, rhs_transposed, *rows = shape
    block_m, unit = rows or (8, 4)
    lhs = [integers(rank, (1, m, k), dtype) for rank in range(world)]
    rhs = [integers(100 + rank, (k, n), dtype) for rank in range(world)]
    gathered = np.concatenate(lhs)
    expected = [(gathered.astype(np.float32) @ w.astype(np.float32)).astype(dtype) for w in rhs]
    config = gather_ops.hopper.Config(**TILES, block_m=block_m, unit=unit, programs=programs)
    others = {"return_gathered": return_gathered, "rhs_transposed": rhs_transposed}
    if rhs_transposed:
        rhs = [np.ascontiguousarray(w.T) for w in rhs]
    return Call(
        arrays=(lhs, lhs, {"rhs": rhs}, {"rhs": rhs}, {}, {}),
        keywords=launched(gather_ops, world * m, k, n, world, dtype, config, **others),
        expected=[(out, gathered) for out in expected] if return_gathered else expected,
    )


def all_gather_matmul_with_epilogue(world: int, dtype: np.dtype, shape: tuple) -> Call:
    """As the operation launches it: with a bias, and with a gate too where there is one."""
    m, n, k, programs, epilogue = shape
    lhs = [integers(rank, (1, m, k), dtype) for rank in range(world)]
    rhs, gate = ([integers(key + rank, (k, n), dtype) for rank in range(world)] for key in (100, 200))
    bias = [integers(300 + rank, (n,), np.dtype(np.float32)) for rank in range(world)]
    gathered = np.concatenate(lhs).astype(np.float32)
    products = [[gathered @ w.astype(np.float32) for w in weights] for weights in zip(rhs, gate)]
    products = products if epilogue.gated else [one[:1] for one in products]
    with jax.default_device(jax.devices("cpu")[0]):
        others = [{"bias": jnp.asarray(b)} for b in bias]
        expected = [np.asarray(epilogue.apply(*pair, dtype)) for pair in zip(products, others)]
    tiles = {**TILES, "block_n": 32 if epilogue.gated else 16}
    weights = {"rhs": rhs, "gate": gate} if epilogue.gated else {"rhs": rhs}
    config = gather_ops.hopper.Config(**tiles, block_m=8, unit=4, programs=programs)
    return Call(
        arrays=(lhs, lhs, weights, weights, {"bias": bias}, {}),
        keywords=launched(gather_ops, world * m, k, n, world, dtype, config, epilogue=epilogue),
        expected=expected,
        tolerance=TOLERANCE[dtype.name],
    )


def all_gather_matmul_with_scales(world: int, dtype: np.dtype, shape: tuple) -> Call:
    """As the operation launches it for operands of 8 bits; the dtype is that of the result."""
    m, n, k, programs, eight_bits, of_lhs, of_rhs, *of_gate = shape
    wide, fast = "wide" in of_gate, "fast" in of_gate
    of_gate = [kind for kind in of_gate if kind not in ("wide", "fast")]
    eight, names = np.dtype(eight_bits), ("rhs", "gate")[: 1 + len(of_gate)]
    lhs = [integers(rank, (1, m, k), eight) for rank in range(world)]
    weights = {
        name: [integers(100 * i + rank, (n, k), eight) for rank in range(world)] for i, name in enumerate(names, 1)
    }
    steps, rows, draw = -(-k // 128), world * m, np.random.default_rng(world)
    # Powers of 2, of which every rank has others.
    scales = [
        {"none": (1, 1), "row": (1, rows), "block": (steps, rows)},
        {"none": (1, 1), "row": (1, n), "block": (steps, -(-n // 128))},
    ]

    def scale(kind: str, shapes: dict[str, tuple[int, int]]) -> np.ndarray:
        return np.exp2(draw.integers(-1, 2, shapes[kind])).astype(np.float32) if kind != "none" else np.ones((1, 1))

    left = scale(of_lhs, scales[0])
    kinds = dict(zip(names, (of_rhs, *of_gate), strict=True))
    right = {name: [scale(kind, scales[1]) for _ in range(world)] for name, kind in kinds.items()}
    whole = np.concatenate(lhs).astype(np.float64) * _of_steps(left, k, rows).reshape(k, world, m).transpose(1, 2, 0)
    expected = [np.float64(1)] * world
    for name, each in weights.items():
        full = [w.astype(np.float64) * _of_steps(own, k, n).T for w, own in zip(each, right[name])]
        expected = [product * (whole @ w.T) for product, w in zip(expected, full)]
    bundle = {}
    for name, kind, arrays in (("lhs", of_lhs, [left] * world), *((name, kinds[name], right[name]) for name in names)):
        if kind != "none":
            bundle[f"{name}_blocks" if kind == "block" else name] = [x if kind == "block" else x[0] for x in arrays]
    in_blocks = "block" in (of_lhs, *kinds.values())
    tiles = {"block_n": 64, "block_k": 128, "part": 128} if in_blocks else {"block_k": 16, "part": 32}
    tiles |= {"block_n": 256 if wide else 32} if of_gate or wide else {}
    config = gather_ops.hopper.Config(**TILES | tiles, block_m=8, unit=4, programs=programs, fast_sums=fast)
    form = {"rhs_transposed": True, "out_dtype": dtype, "lhs_scales": of_lhs, "rhs_scales": of_rhs}
    form |= {"epilogue": Epilogue(operands=("gate",)), "gate_scales": of_gate[0]} if of_gate else {}
    return Call(
        arrays=(lhs, lhs, weights, weights, {}, bundle),
        keywords=launched(gather_ops, world * m, k, n, world, eight, config, **form),
        expected=[each.astype(dtype) for each in expected],
        tolerance=TOLERANCE[dtype.name],
    )


def _of_steps(scale: np.ndarray, k: int, n: int) -> np.ndarray:
    """Scales [1 or blocks of K, 1 or N or blocks of N] of all elements [K, N]."""
    scale = np.repeat(scale, 128, 0)[:k] if scale.shape[0] > 1 else scale
    scale = np.repeat(scale, 128, 1)[:, :n] if 1 < scale.shape[1] < n else scale
    return np.broadcast_to(scale, (k, n))


TILES_OF_SUMS = {"block_m": 32, "block_n": 32, "block_k": 16, "num_stages": 2, "group_m": 2, "chunk": 128}


def matmul_reduce_scatter(world: int, dtype: np.dtype, shape: tuple) -> Call:
    """As the operation launches it."""
    m, n, k, programs, stages, *names = shape
    rhs_transposed = "transposed" in names
    names = [name for name in names if name != "transposed"]
    lhs = [integers(rank, (world, m, k), dtype) for rank in range(world)]
    rhs = [integers(100 + rank, (k, n), dtype) for rank in range(world)]
    total = sum(a.astype(np.float32) @ b.astype(np.float32) for a, b in zip(lhs, rhs))
    given = {"bias": [integers(200, (n,), dtype)] * world, "residual": list(integers(300, (world, 1, m, n), dtype))}
    for name in names:
        total = total + np.stack(given[name]).reshape(world, -1, n).astype(np.float32)
    tiles = TILES_OF_SUMS | {"num_stages": stages}
    config = scatter_ops.hopper.Config(**tiles, programs=programs)
    form = {"epilogue": Epilogue(operands=tuple(names)), "rhs_transposed": rhs_transposed}
    rhs = [np.ascontiguousarray(w.T) for w in rhs] if rhs_transposed else rhs
    return Call(
        arrays=(lhs, rhs, rhs, {name: given[name] for name in names}, {}),
        keywords=launched(scatter_ops, world * m, k, n, world, dtype, config, **form),
        expected=[total[rank : rank + 1].astype(dtype) for rank in range(world)],
    )


def matmul_all_reduce(world: int, dtype: np.dtype, shape: tuple) -> Call:
    """As the operation launches it."""
    m, n, k, programs, groups, lag, *names = shape
    rhs_transposed = "transposed" in names
    names = [name for name in names if name != "transposed"]
    lhs = [integers(rank, (1, m, k), dtype) for rank in range(world)]
    rhs = [integers(100 + rank, (k, n), dtype) for rank in range(world)]
    total = sum(a.astype(np.float32) @ b.astype(np.float32) for a, b in zip(lhs, rhs))
    given = {"bias": integers(200, (n,), dtype), "residual": integers(300, (1, m, n), dtype)}
    total = (total + sum(given[name].astype(np.float32) for name in names)).astype(dtype)
    config = reduce_ops.hopper.Config(**TILES_OF_SUMS, programs=programs, groups=groups, lag=lag)
    form = {"epilogue": Epilogue(operands=tuple(names)), "rhs_transposed": rhs_transposed}
    rhs = [np.ascontiguousarray(w.T) for w in rhs] if rhs_transposed else rhs
    return Call(
        arrays=(lhs, rhs, rhs, {name: [given[name]] * world for name in names}, {}),
        keywords=launched(reduce_ops, m, k, n, world, dtype, config, **form),
        expected=[total] * world,
    )


def scaled_operands(
    world: int, rows: int, k: int, n: int, eight_bits: str, of_lhs: str, of_rhs: str
) -> tuple[dict[str, list[np.ndarray]], dict[str, list[np.ndarray]], list[np.ndarray]]:
    """Each rank's operands of 8 bits, lhs [rows, k] and rhs [n, k], the bundle of their scales, and their products."""
    draw, steps = np.random.default_rng(world), -(-k // 128)
    sizes = {"lhs": (rows, rows), "rhs": (n, -(-n // 128))}
    kinds = {"lhs": of_lhs, "rhs": of_rhs}
    arrays: dict[str, list[np.ndarray]] = {"lhs": [], "rhs": []}
    bundle: dict[str, list[np.ndarray]] = {}
    products = []
    for _ in range(world):
        whole = []
        for name, kind in kinds.items():
            length, blocks = sizes[name]
            # Mostly 0, and scales of 1 and 2: bf16, in which they travel, holds the sums.
            x = draw.choice((-1, 0, 0, 0, 1), (length, k))
            arrays[name].append(x.astype(eight_bits))
            scale = np.exp2(draw.integers(0, 2, {"row": (1, length), "block": (steps, blocks)}.get(kind, (1, 1))))
            scale = scale.astype(np.float32) if kind != "none" else np.ones((1, 1))
            whole.append(x * _of_steps(scale, k, length).T)
            if kind != "none":
                member = f"{name}_blocks" if kind == "block" else name
                bundle.setdefault(member, []).append(scale if kind == "block" else scale[0])
        products.append(whole[0] @ whole[1].T)
        np.testing.assert_array_equal(products[-1], products[-1].astype(jnp.bfloat16).astype(np.float64))
    return arrays, bundle, products


def added_names(shape: tuple) -> tuple[str, ...]:
    """What is added to the products of these operands of 8 bits."""
    return tuple(name for name in shape[7:] if name != "fast")


def matmul_reduce_scatter_with_scales(world: int, dtype: np.dtype, shape: tuple) -> Call:
    """As the operation launches it for operands of 8 bits; the dtype is that of the result."""
    m, n, k, _, eight_bits, of_lhs, of_rhs, *_ = shape
    names = added_names(shape)
    arrays, bundle, products = scaled_operands(world, world * m, k, n, eight_bits, of_lhs, of_rhs)
    lhs, total = [x.reshape(world, m, k) for x in arrays["lhs"]], sum(products).reshape(world, m, n)
    residual = integers(300, (world, 1, m, n), np.dtype(jnp.bfloat16))
    total = total + residual[:, 0].astype(np.float64) if names else total
    return Call(
        arrays=(lhs, arrays["rhs"], arrays["rhs"], {name: list(residual) for name in names}, bundle),
        keywords=_launched_with_scales(scatter_ops, world, world * m, dtype, shape),
        expected=[total[rank : rank + 1].astype(dtype) for rank in range(world)],
    )


def matmul_all_reduce_with_scales(world: int, dtype: np.dtype, shape: tuple) -> Call:
    """As the operation launches it for operands of 8 bits, with results of bf16."""
    del dtype
    m, n, k, _, eight_bits, of_lhs, of_rhs, *_ = shape
    names = added_names(shape)
    arrays, bundle, products = scaled_operands(world, m, k, n, eight_bits, of_lhs, of_rhs)
    residual = integers(300, (1, m, n), np.dtype(jnp.bfloat16))
    total = sum(products)[None] + (residual.astype(np.float64) if names else 0)
    lhs, out_dtype = [x[None] for x in arrays["lhs"]], np.dtype(jnp.bfloat16)
    return Call(
        arrays=(lhs, arrays["rhs"], arrays["rhs"], {name: [residual] * world for name in names}, bundle),
        keywords=_launched_with_scales(reduce_ops, world, m, out_dtype, shape, groups=2, lag=1),
        expected=[total.astype(out_dtype)] * world,
    )


def _launched_with_scales(operation: Any, world: int, rows: int, dtype: np.dtype, shape: tuple, **settings: Any) -> Any:
    _, n, k, programs, eight_bits, of_lhs, of_rhs, *_ = shape
    # Steps of 32 bytes of K, so that a part of a tile as it arrives has the 16 columns of an instruction.
    tile = (
        {"block_k": 128, "block_n": max(64, TILES_OF_SUMS["block_n"])}
        if "block" in (of_lhs, of_rhs)
        else {"block_k": 32}
    )
    config = operation.hopper.Config(**TILES_OF_SUMS | tile, programs=programs, fast_sums="fast" in shape, **settings)
    form = {"rhs_transposed": True, "out_dtype": dtype, "lhs_scales": of_lhs, "rhs_scales": of_rhs}
    form["epilogue"] = Epilogue(operands=added_names(shape))
    return launched(operation, rows, k, n, world, np.dtype(eight_bits), config, **form)


SWIGLU = Epilogue("silu", ("gate", "bias"))
BIASED = Epilogue("gelu_tanh", ("bias",))
ALL_ROWS = (8, 24, 24, 2, False, False)
# Of more tiles for others than an outbox has places, and of one step each, so that loads may be several tiles ahead.
ONE_PROGRAM = (33, 64, 16, 1, 6)
KERNELS = (
    Simulated(
        name="all_gather_matmul",
        module=all_gather_matmul_hopper,
        function="all_gather_matmul_hopper_kernel",
        call=all_gather_matmul,
        # M, N, K, programs, return_gathered, rhs_transposed, and rows of a tile and of a unit; clipped at all ends, so
        # that the second half of the rows may be missing, and with half tiles
        shapes=lambda world: (
            (8, 16, 24, 2, True, False),
            (20, 8, 16, 3, False, False, 16, 16),
            ALL_ROWS,
            (4, 24, 24, 3, False, True),
            (4, 24, 24, 2, True, True),
        ),
    ),
    Simulated(
        name="all_gather_matmul_with_epilogue",
        module=all_gather_matmul_hopper,
        function="all_gather_matmul_hopper_kernel",
        call=all_gather_matmul_with_epilogue,
        # M, N, K, programs, epilogue; clipped at all ends, with half tiles and without
        shapes=lambda world: ((4, 24, 24, 3, SWIGLU), (12, 16, 40, 2, SWIGLU), (4, 24, 24, 3, BIASED)),
    ),
    Simulated(
        name="all_gather_matmul with scales",
        module=all_gather_matmul_hopper,
        function="all_gather_matmul_hopper_kernel",
        call=all_gather_matmul_with_scales,
        # M, N, K, programs, dtype, what has scales, and those of a gate, or tiles that are wide, or sums that are fast;
        # clipped at all ends, with half tiles and without
        shapes=lambda world: (
            (4, 32, 32, 3, "float8_e4m3fn", "row", "row"),
            (12, 48, 48, 2, "int8", "row", "row"),
            (7, 48, 64, 1, "float8_e5m2", "none", "row"),
            (12, 144, 272, 2, "float8_e4m3fn", "block", "block"),
            (12, 32, 144, 2, "int8", "block", "none"),
            (7, 272, 48, 2, "float8_e4m3fn", "row", "row", "wide"),
            (4, 48, 32, 3, "float8_e4m3fn", "row", "row", "row"),
            (12, 144, 272, 2, "float8_e4m3fn", "block", "block", "block"),
            (12, 32, 144, 2, "int8", "none", "row", "block"),
            # Two halves with a scale each, the second beyond the last columns; then a product and its gate.
            (7, 272, 272, 2, "float8_e4m3fn", "block", "block", "wide"),
            (7, 384, 144, 2, "int8", "none", "block", "wide"),
            (7, 272, 272, 2, "float8_e4m3fn", "block", "block", "block", "wide"),
            (7, 272, 48, 2, "float8_e4m3fn", "row", "row", "wide", "fast"),
        ),
    ),
    Simulated(
        name="matmul_reduce_scatter",
        module=matmul_reduce_scatter_hopper,
        function="matmul_reduce_scatter_hopper_kernel",
        call=matmul_reduce_scatter,
        # M, N, K, programs, stages, and what is added; clipped at all ends, so that the second half of the rows may be
        # missing, and with more programs than a rank has tiles
        shapes=lambda world: (
            (5, 40, 16, 1, 2),
            (36, 40, 24, 2, 2, "bias", "residual"),
            (32, 32, 40, 3, 2, "residual"),
            ONE_PROGRAM,
            (36, 40, 24, 2, 2, "residual", "transposed"),
        ),
    ),
    Simulated(
        name="matmul_reduce_scatter with scales",
        module=matmul_reduce_scatter_hopper,
        function="matmul_reduce_scatter_hopper_kernel",
        call=matmul_reduce_scatter_with_scales,
        # M, N, K, programs, dtype, what has scales, and what is added; clipped at all ends
        shapes=lambda world: (
            (5, 48, 64, 1, "float8_e5m2", "none", "row"),
            (20, 48, 48, 2, "float8_e4m3fn", "row", "row", "residual"),
            (5, 144, 272, 2, "float8_e4m3fn", "block", "block", "residual"),
            (36, 32, 80, 3, "int8", "row", "none"),
            (20, 32, 144, 1, "int8", "block", "row"),
            (20, 48, 48, 2, "float8_e4m3fn", "row", "row", "residual", "fast"),
        ),
    ),
    Simulated(
        name="matmul_all_reduce",
        module=matmul_all_reduce_hopper,
        function="matmul_all_reduce_hopper_kernel",
        call=matmul_all_reduce,
        # M, N, K, programs, groups, lag, and what is added; clipped at all ends, where the last ranks own fewer tiles
        # or none, the last group has fewer, and with more programs than a rank has tiles
        shapes=lambda world: (
            (40, 104, 16, 2, 2, 1, "bias", "residual"),
            (34, 40, 24, 1, 3, 0),
            (32, 32, 40, 3, 1, 1, "residual"),
            (16 * world, 96, 8, 2, 2 if world > 4 else 3, 1),
            (128, 16 * world, 8, 2, 4, 2),
            (34, 40, 24, 1, 2, 1, "residual", "transposed"),
        ),
    ),
    Simulated(
        name="matmul_all_reduce with scales",
        module=matmul_all_reduce_hopper,
        function="matmul_all_reduce_hopper_kernel",
        call=matmul_all_reduce_with_scales,
        # M, N, K, programs, dtype, what has scales, and what is added; clipped at all ends
        shapes=lambda world: (
            (20, 112, 64, 1, "float8_e5m2", "none", "row"),
            (36, 80, 48, 2, "float8_e4m3fn", "row", "row", "residual"),
            (5, 144, 272, 2, "float8_e4m3fn", "block", "block", "residual"),
            (70, 32, 80, 3, "int8", "row", "none"),
            (36, 32, 144, 1, "int8", "block", "row"),
            (36, 80, 48, 2, "float8_e5m2", "none", "row", "fast"),
        ),
    ),
)
KERNEL = {kernel.name: kernel for kernel in KERNELS}


# Scales change nothing of who waits for whom: `make soak` has them of other numbers of ranks than three, and with more
# than one seed for a shape.
@pytest.mark.parametrize(
    ("kernel", "world"),
    [
        pytest.param(
            kernel,
            world,
            marks=[pytest.mark.soak] if world == 8 or (world != 3 and kernel.name.endswith("with scales")) else [],
            id=f"{kernel.name}-{world}",
        )
        for kernel in KERNELS
        for world in WORLDS
    ],
)
def test_every_shape_is_right(kernel: Simulated, world: int) -> None:
    scaled = kernel.name.endswith("with scales")
    kernel.run(range(len(kernel.shapes(world))) if scaled else first_seeds(kernel, world), world)


@pytest.mark.soak
@pytest.mark.parametrize("first", PORTIONS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_interleaving_is_right(kernel: Simulated, world: int, first: int) -> None:
    kernel.run(range(first, first + PORTION), world)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault.

    Attributes:
      edits: (text, what to put in its place, and how often it occurs if not once).
      errors, says: of which kind the finding must be, and what it must say.
      kernel: in whose calls it shows.
      product: the fault is in `matmul_hopper`, not in the kernel's own file.
      shape: of the call; None for all shapes of the kernel.
    """

    name: str
    edits: tuple[tuple, ...]
    errors: tuple[type[SimulationError], ...]
    says: str = ""
    kernel: str = "all_gather_matmul"
    product: bool = False
    shape: tuple | None = None


GATHERED = (8, 16, 24, 2, True, False)
MANY_SUMS = (80, 96, 8, 1, 3, 1)  # one program, of more tiles than an outbox has places
CLAIM = "        following = shmem.claim(me, tickets, draws)\n"
LOAD_WAIT = "            wait_for_part(me, arrived, source, row, part, work)\n"
FENCE = "            shmem.fence_proxy()\n"
COPIED = "origin, row, part, came, True, due, work.PACE, work"
SEND = f"        due = copy(remote + offset_of(source, work), work.K, {COPIED})\n"
SIGNAL = "        shmem.signal(me, signal_of(source, row, part, arrived, work), peer, came)\n"
FIND_WAIT = "came = wait_for_part(me, arrived, source, row, part, work)"
FIND = "origin, came = find(me, lhs_ptr, inbox, arrived, source, row, part, work)"
SEND_FIND = f"ticket, work.WORLD - 1, work)\n        {FIND}"
COPY_FIND = f"unit, work.WORLD, work)\n            {FIND}"
TILE_WAIT = "shmem.wait(me, arrived + part, me.epoch, (me.rank + work.WORLD - 1 - i) % work.WORLD)"
TILE_FENCE = "                shmem.fence_proxy()\n"
TILE_LOAD = "            position = matmul.load_block(ring, position, parts_desc, [part * work.BLOCK_M + first, 0])\n"
STAGED = "            gl.store(places + to_push[0] * size + in_order(part, work, PARTITION), part)\n"
GIVEN = "            to_push = give(staged, to_push, ticket, PARTITION)\n"
CARRIED = "        due = carry(me, places + place[0] * size, dest, owner, 1, due, work.PACE, work)\n"
RELEASED = "        place = release(staged, place)\n"
TILE_SIGNAL = "        shmem.signal(me, arrived + ticket, owner)\n"
NUMBER = "    number = take(relay, position)\n    place, phase = release(relay, position)\n"
NUMBER_AFTER = """    WARP: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    number = gl.max(relay.numbers.index(position[0]).load(WARP), 0)
"""
LINES = "    block = source.load(LAYOUT)\n"
TAKEN = "    mbarrier.arrive(ring.empty.index(stage), count=1)\n    return block"
GATE_LOAD = "tma.async_load(gate_desc, [above + step * BLOCK_K, column], bar, dest.slice(COLUMNS, COLUMNS, 1))"
RETIRE = "warpgroup_mma_wait(num_outstanding=1, deps=(product,))"

SUM_WAIT = "    shmem.wait(me, added + place, me.epoch, owner)\n"
SUM_FENCE = "    shmem.fence_proxy()\n"
SUM_LINES = "(0, work.BLOCK_M, work.LINES):\n        position = matmul.load_block"
PLACE_WAIT = "            scatter.wait_for_place(staged, to_push)\n"
SUM_CARRIED = "scatter.carry(me, source, to_all, me.rank + 1, me.world - 1, due, work.SUM_PACE, work)\n"
PART_SIGNAL = "            shmem.signal(me, arrived + part, owner)\n"
SUM_SIGNAL = "            shmem.signal_all(me, added + total, work.WORLD)\n"
OWN_FIRST = (
    ("unit - (work.LAG + 1) * (work.WORLD - 1)", "unit"),
    ("mixed // work.WORLD + gl.where(is_own, 0, work.LAG + 1)", "mixed // work.WORLD"),
    ("mixed - (work.GROUPS - work.LAG - 1) * work.WORLD", "mixed - work.GROUPS * work.WORLD"),
    ("own - (work.LAG + 1)", "own"),
)

MUTANTS = (
    Mutant(
        name="units claimed twice",
        edits=((CLAIM, "        following = ticket + 1\n"),),
        errors=(DataRaceError, SignalCountError),
    ),
    Mutant(
        name="first tickets lost",
        edits=(("draws)\n    due", "draws) + 1\n    due"),),
        errors=(DeadlockError, *TOO_EARLY),
    ),
    Mutant(
        name="last draws forgotten",
        edits=(("to_send + gl.num_programs(0)", "to_send"),),
        errors=(SignalCountError,),
    ),
    Mutant(
        name="wait for the part before",
        edits=((LOAD_WAIT, LOAD_WAIT.replace("part,", "part // 2,")),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="wait for the first part alone",
        edits=((LOAD_WAIT, "            if part == 0:\n" + indent(LOAD_WAIT)),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="wait for a unit too few",
        edits=(("me.epoch * (work.BLOCK_M // work.UNIT)", "me.epoch * (work.BLOCK_M // work.UNIT) - 1"),),
        errors=(*TOO_EARLY, SignalCountError),
    ),
    Mutant(
        name="no proxy fence",
        edits=((FENCE, ""),),
        errors=(MissingFenceError,),
        says="shmem.fence_proxy",
    ),
    Mutant(
        name="proxy fence before the wait",
        edits=((LOAD_WAIT + FENCE, FENCE + LOAD_WAIT),),
        errors=(MissingFenceError,),
        says="shmem.fence_proxy",
    ),
    Mutant(
        name="signal before the unit",
        edits=((SIGNAL, ""), (SEND, SIGNAL + SEND)),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="no wait before a unit is passed on",
        edits=((FIND_WAIT, "came = me.ready"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="passed on behind the first part alone",
        edits=((SEND_FIND, SEND_FIND.replace("part", "0")),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="copied behind the first part alone",
        edits=((COPY_FIND, COPY_FIND.replace("part", "0")),),
        errors=TOO_EARLY,
        shape=GATHERED,
    ),
    Mutant(
        name="nothing is passed on",
        edits=(("(work.WORLD - 1) * units_a_rank", "units_a_rank"),),
        errors=(DeadlockError,),
        says="arrived",
    ),
    Mutant(
        name="a rank that sends nothing",
        edits=(("    came = me.ready\n", "    came = me.ready & (me.rank != 1)\n"),),
        errors=(DeadlockError,),
        says="arrived",
    ),
    Mutant(
        name="full stages taken for empty ones",
        edits=(("position = (0, 1)", "position = (0, 0)"),),
        errors=(DeadlockError,),
        says="arrivals",
    ),
    Mutant(
        name="empty stages taken for full ones",
        edits=(("position = (0, 0)", "position = (0, 1)"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="columns of the gate in the place of the others",
        kernel="all_gather_matmul_with_epilogue",
        product=True,
        edits=((GATE_LOAD, GATE_LOAD.replace("dest.slice(COLUMNS,", "dest.slice(0,")),),
        errors=(DataRaceError,),
        shape=(4, 24, 24, 3, SWIGLU),
    ),
    Mutant(
        name="the gate not announced",
        kernel="all_gather_matmul_with_epilogue",
        product=True,
        edits=(("+ PRODUCTS * rhs_desc", "+ rhs_desc"),),
        errors=(MbarrierError,),
        shape=(4, 24, 24, 3, SWIGLU),
    ),
    Mutant(
        name="tiles claimed twice",
        kernel="matmul_reduce_scatter",
        edits=(("        ticket = shmem.claim(me, tickets, count + gl.num_programs(0))\n", "        ticket += 1\n"),),
        errors=(DataRaceError, SignalCountError, OutOfBoundsError),
    ),
    Mutant(
        name="tile handed over before it is stored",
        kernel="matmul_reduce_scatter",
        edits=((STAGED + GIVEN, GIVEN.replace("to_push =", "after =") + STAGED + "            to_push = after\n"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="a place taken before it is free",
        kernel="matmul_reduce_scatter",
        edits=(("            wait_for_place(staged, to_push)\n", ""),),
        errors=(DataRaceError,),
        shape=ONE_PROGRAM,
    ),
    Mutant(
        name="a place released before it is carried",
        kernel="matmul_reduce_scatter",
        edits=((CARRIED + RELEASED, RELEASED.replace("place =", "after =") + CARRIED + "        place = after\n"),),
        errors=(DataRaceError,),
        shape=ONE_PROGRAM,
    ),
    Mutant(
        name="a place taken from both partitions by one",
        kernel="matmul_reduce_scatter",
        edits=(("allocate_relay(1, 2)", "allocate_relay(1, 1)"),),
        errors=(DeadlockError, *TOO_EARLY),
        shape=ONE_PROGRAM,
    ),
    Mutant(
        name="a tile carried when half of it is stored",
        kernel="matmul_reduce_scatter",
        edits=(("allocate_relay(2, 1)", "allocate_relay(1, 1)"),),
        errors=TOO_EARLY,
        shape=ONE_PROGRAM,
    ),
    Mutant(
        name="a number released before it is read",
        kernel="matmul_reduce_scatter",
        edits=((NUMBER, NUMBER.replace("    number =", "    early =") + NUMBER_AFTER),),
        errors=(DataRaceError,),
        shape=ONE_PROGRAM,
    ),
    Mutant(
        name="numbers written by both partitions",
        kernel="matmul_reduce_scatter",
        edits=(("    if PARTITION == 0:\n", "    if True:\n"),),
        errors=(DataRaceError,),
        shape=ONE_PROGRAM,
    ),
    Mutant(
        name="signal before the tile",
        kernel="matmul_reduce_scatter",
        edits=((TILE_SIGNAL, ""), (CARRIED, TILE_SIGNAL + CARRIED)),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="the last lines not carried",
        kernel="matmul_reduce_scatter",
        edits=(
            (
                "        shmem.store(me, dest + (size - work.CHUNK) + element, value, (peer + i) % work.WORLD)\n",
                "        pass\n",
            ),
        ),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="no wait for a peer's tile",
        kernel="matmul_reduce_scatter",
        edits=((TILE_WAIT, "me.ready"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="tiles of the previous epoch",
        kernel="matmul_reduce_scatter",
        edits=((TILE_WAIT, TILE_WAIT.replace("me.epoch", "me.epoch - 1")),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="wait for the first peer's tile alone",
        kernel="matmul_reduce_scatter",
        edits=(("if first == 0:", "if first + i == 0:"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="no proxy fence before a peer's tile",
        kernel="matmul_reduce_scatter",
        edits=((TILE_FENCE, ""),),
        errors=(MissingFenceError,),
        says="shmem.fence_proxy",
    ),
    Mutant(
        name="a peer's tile left out",
        kernel="matmul_reduce_scatter",
        edits=((TILE_LOAD, "            if part + first > 0:\n" + indent(TILE_LOAD)),),
        errors=(DeadlockError, *TOO_EARLY),
    ),
    Mutant(
        name="the last ticket not handed over",
        kernel="matmul_reduce_scatter",
        edits=(("    give(staged, to_push, ticket, PARTITION)\n    matmul", "    matmul"),),
        errors=(DeadlockError,),
        says="arrivals",
    ),
    Mutant(
        name="own tiles before the others' of their group",
        kernel="matmul_all_reduce",
        edits=OWN_FIRST,
        errors=(DeadlockError,),
        says="arrived",
    ),
    Mutant(
        name="no wait for a sum",
        kernel="matmul_all_reduce",
        edits=((SUM_WAIT, ""),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="no proxy fence before a sum",
        kernel="matmul_all_reduce",
        edits=((SUM_FENCE, ""),),
        errors=(MissingFenceError,),
        says="shmem.fence_proxy",
    ),
    Mutant(
        name="a sum in the place of another tile",
        kernel="matmul_all_reduce",
        edits=((PLACE_WAIT, ""),),
        errors=(DataRaceError,),
        shape=MANY_SUMS,
    ),
    Mutant(
        name="signal before the sum",
        kernel="matmul_all_reduce",
        edits=(
            (SUM_SIGNAL, "            pass\n"),
            ("            due = " + SUM_CARRIED, SUM_SIGNAL + "            due = " + SUM_CARRIED),
        ),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="a sum for all peers but one",
        kernel="matmul_all_reduce",
        edits=((SUM_CARRIED, SUM_CARRIED.replace("world - 1", "world - 2")),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="the last lines of a sum not loaded",
        kernel="matmul_all_reduce",
        edits=((SUM_LINES, SUM_LINES.replace("(0, work.BLOCK_M,", "(0, work.BLOCK_M - 1 - work.LINES,")),),
        errors=(DeadlockError, *TOO_EARLY),
    ),
    Mutant(
        name="a stage released too early",
        product=True,
        edits=((RETIRE, RETIRE.replace("=1", "=2")),),
        errors=(DataRaceError,),
        says="warpgroup MMA",
    ),
    Mutant(
        name="a stage released before its lines are read",
        kernel="matmul_reduce_scatter",
        product=True,
        edits=((LINES, ""), (TAKEN, TAKEN.replace("    return", LINES + "    return"))),
        errors=(DataRaceError,),
        says="TMA load",
    ),
    Mutant(
        name="lines read before they are there",
        kernel="matmul_reduce_scatter",
        product=True,
        edits=(("    mbarrier.wait(ring.ready.index(stage), phase)\n" + LINES, LINES),),
        errors=(DeadlockError, *TOO_EARLY),
    ),
    Mutant(
        name="one buffer for all pieces",
        product=True,
        edits=(("PIECE % 2)", "0)"),),
        errors=(DataRaceError,),
        says="TMA store",
    ),
    Mutant(
        name="buffers of both partitions",
        product=True,
        edits=(("ring.results.index(2 * PARTITION + PIECE % 2)", "ring.results.index(PIECE % 2)"),),
        errors=(DataRaceError,),
        shape=ALL_ROWS,
    ),
    Mutant(
        name="a stage released by one partition for both",
        product=True,
        edits=(("count=PARTITIONS", "count=1"),),
        errors=TOO_EARLY,
        shape=ALL_ROWS,
    ),
    Mutant(
        name="no wait for the last stores",
        product=True,
        edits=(("    tma.store_wait(0)\n", "    pass\n"),),
        errors=(UnfinishedOperationError,),
        says="TMA store",
    ),
)


@looked_for(SEEDS)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_fault_is_found(mutant: Mutant, seeds: int, tmp_path: Path) -> None:
    """By the right detector under whichever seeds show it, and never as a wrong result without a finding."""
    kernel = KERNEL[mutant.kernel]
    faulty = matmul_hopper if mutant.product else kernel.module
    module = load(edit(faulty, mutant.edits, tmp_path), faulty.__name__)
    if mutant.product:
        module = load(Path(kernel.module.__file__ or ""), kernel.module.__name__, matmul=module)
    found = 0
    for seed in range(SEEDS):
        if found and seed >= seeds:
            break
        call, settings = kernel.case(seed, 3, most=3)
        if mutant.shape is not None:
            call = kernel.call(3, np.dtype(jnp.bfloat16), mutant.shape)
        try:
            call.run(getattr(module, kernel.function), **settings)
        except SimulationError as error:
            found += 1
            assert isinstance(error, mutant.errors), f"found as {type(error).__name__}: {error}"
            assert mutant.says in str(error)
            assert str(error).startswith(f"{kernel.function}: ")
    assert found, f"not found in {SEEDS} seeds"


# With the seed of a call that has such scales.
GATHERED_SCALES = (
    ("rank", 1, "of_rows + source * M + m", "of_rows + m"),
    ("partition", 1, "m = row + PARTITION * ring.results.shape[2] + gl", "m = row + gl"),
    ("columns", 1, "of_columns + n, mask", "of_columns + n - column, mask"),
    ("rank of a block", 3, "rows += source * M + first", "rows += first"),
    ("block of columns", 3, "columns += column // SCALED", "columns += 0"),
    ("step of rows", 3, "Factors(rows, SOURCES * M,", "Factors(rows, 0,"),
    ("row of rows", 3, "SOURCES * M, 1, M - first", "SOURCES * M, 0, M - first"),
    ("step of columns", 3, "gates, further, BLOCKS)", "gates, further, 0)"),
    ("block of a gate", 7, "gates += column // SCALED", "gates += 0"),
    ("columns of a gate", 7, "column < COLUMNS // 2, left", "column < COLUMNS, left"),
    (
        "half of a wide tile",
        5,
        "right += sums_of_step(ring, stage, HALF, PARTITION, COLUMNS, COLUMNS)",
        "right += left",
    ),
    (
        "half of a wide tile of blocks",
        9,
        "        sums = sums_of_step(ring, stage, HALF, PARTITION, COLUMNS, COLUMNS)\n",
        "",
    ),
    ("block of the right half", 9, "column_step + factors.further", "column_step"),
    (
        "left half by the scale of the right one",
        9,
        "product[0] + sums * (rows * left)\n        sums",
        "product[0] + sums * (rows * right)\n        sums",
    ),
    ("gate of a wide tile", 11, "product[1] + sums * (rows * right)", "product[1] + sums * (rows * left)"),
    ("next step of a wide tile", 9, "gl.minimum(step + 1, last)", "step"),
    ("step after next", 3, "2 * pair + 2", "2 * pair + 1"),
)
SCATTERED_SCALES = (
    ("rank", 1, "scales, source, work.WORLD, row, column", "scales, 0, work.WORLD, row, column"),
    ("ranks", 2, "scales, source, work.WORLD, row, column", "scales, source, 1, row, column"),
    ("row", 3, "scales, source, work.WORLD, row, column", "scales, source, work.WORLD, 0, column"),
    ("column", 1, "scales, source, work.WORLD, row, column", "scales, source, work.WORLD, row, 0"),
)
REDUCED_SCALES = (
    ("row", 1, "scales, 0, 1, row, column", "scales, 0, 1, 0, column"),
    ("column", 1, "scales, 0, 1, row, column", "scales, 0, 1, row, 0"),
)
SCALE_FAULTS = {
    f"{name} {fault}": (f"{name} with scales", *edited)
    for name, faults in (
        ("all_gather_matmul", GATHERED_SCALES),
        ("matmul_reduce_scatter", SCATTERED_SCALES),
        ("matmul_all_reduce", REDUCED_SCALES),
    )
    for fault, *edited in faults
}


@pytest.mark.parametrize("fault", SCALE_FAULTS)
def test_the_scale_of_something_else_gives_a_wrong_result(fault: str, tmp_path: Path) -> None:
    """It is no race: whoever compares sees it."""
    name, seed, old, new = SCALE_FAULTS[fault]
    kernel = KERNEL[name]
    if "gather" in name:  # a fault of what all of them multiply by
        product = load(edit(matmul_hopper, ((old, new),), tmp_path), matmul_hopper.__name__)
        module = load(Path(kernel.module.__file__ or ""), kernel.module.__name__, matmul=product)
    else:
        module = load(edit(kernel.module, ((old, new),), tmp_path), kernel.module.__name__)
    call, settings = kernel.case(seed, 3)
    with pytest.raises(AssertionError, match="result of rank"):
        call.run(getattr(module, kernel.function), **settings, calls=1)


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("name", ["matmul_reduce_scatter with scales", "matmul_all_reduce with scales"])
def test_wide_tiles_of_sums_are_multiplied_by_halves(name: str, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TILES_OF_SUMS, "block_n", 256)
    kernel = KERNEL[name]
    call = kernel.call(2, np.dtype(jnp.bfloat16), (20, 272, 272, 2, "float8_e4m3fn", scales, scales, "residual"))
    call.run(getattr(kernel.module, kernel.function), **kernel.case(1, 2)[1])


def test_as_many_lines_as_of_16_bits_do_not_fit_into_a_step_of_8(tmp_path: Path) -> None:
    kernel = KERNEL["matmul_reduce_scatter with scales"]
    edits = (("ring.lhs.shape[3] * bits // max(bits, 16)", "ring.lhs.shape[3]"),)
    module = load(edit(kernel.module, edits, tmp_path), kernel.module.__name__)
    call, settings = kernel.case(1, 3)
    with pytest.raises(OutOfBoundsError, match=r"bf16\[32, 32\] of rhs .* and the view is fp8e4nv\[32, 32\]"):
        call.run(getattr(module, kernel.function), **settings)


def test_the_missing_rank_is_waited_for_before_the_sums_of_others(tmp_path: Path) -> None:
    """Sums of other ranks do not come either, but it is not they that are to be named."""
    kernel = KERNEL["matmul_all_reduce"]
    edits = ((PART_SIGNAL, PART_SIGNAL.replace("owner)", "owner, me.rank != 1)")),)
    module = load(edit(kernel.module, edits, tmp_path), kernel.module.__name__)
    for seed in range(SEEDS):
        call, settings = kernel.call(3, np.dtype(jnp.bfloat16), (40, 104, 16, 2, 2, 1)), kernel.case(seed, 3)[1]
        with pytest.raises(DeadlockError, match=r"signal arrived\[") as error:
            call.run(getattr(module, kernel.function), **settings)
        assert not re.search(r"signal added\[.*?\] of rank [02]", str(error.value))


@pytest.mark.parametrize("gated", (False, True))
@pytest.mark.parametrize("return_gathered", (False, True))
def test_through_the_operation(cpu_mesh: MeshFactory, return_gathered: bool, gated: bool) -> None:
    """Rows that are no leading dimension, and a result of another dtype; with a gate and a bias, too."""
    mesh = cpu_mesh(2, "tp")
    lhs, rhs = integers(0, (3, 12, 24), np.dtype(jnp.bfloat16)), integers(1, (24, 32), np.dtype(jnp.bfloat16))
    others = {"gate": integers(2, (24, 32), rhs.dtype), "bias": integers(3, (32,), rhs.dtype)} if gated else {}

    def call(lhs: jax.Array, rhs: jax.Array, others: dict[str, jax.Array], **keywords: Any) -> Any:
        keywords |= {"return_gathered": return_gathered, "preferred_element_type": np.float32}
        return operation(lhs, rhs, "tp", axis=1, **others, **keywords)

    columns = P(None, "tp")
    in_specs = (columns, columns, {"gate": columns, "bias": P("tp")} if gated else {})
    specs = {"mesh": mesh, "in_specs": in_specs, "check_vma": False}
    out_specs = (P(None, None, "tp"), P()) if return_gathered else P(None, None, "tp")

    def run(**keywords: Any) -> Any:
        program = jax.shard_map(functools.partial(call, **keywords), **specs, out_specs=out_specs)
        return jax.block_until_ready(jax.jit(program)(lhs, rhs, others))

    config = gather_ops.hopper.Config(**TILES | {"block_n": 32 if gated else 16}, block_m=8, unit=4, programs=2)
    with simulator.simulating(seed=1):
        found = run(implementation="simulate", config=config)
    for one, other in zip(*map(jax.tree.leaves, (found, run(implementation="xla"))), strict=True):
        np.testing.assert_array_equal(one, other)
