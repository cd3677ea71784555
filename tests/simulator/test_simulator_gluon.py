"""The simulator of Gluon kernels: right ones pass in every interleaving, and planted faults are found."""

import dataclasses
import functools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from jaxtaxfree import simulator
from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.simulator import (
    DataRaceError,
    DeadlockError,
    MbarrierError,
    MissingFenceError,
    OutOfBoundsError,
    SimulationError,
    UnfinishedOperationError,
    UninitializedReadError,
)
from tests.conftest import MeshFactory
from tests.helpers import gluon_products
from tests.helpers.gluon_kernels import BLOCK, PROGRAMS, exchange, exchange_by_xla
from tests.helpers.simulator_kernels import Call, Simulated, integers, load
from tests.simulator.test_simulator import exchange_kernel as triton_kernel
from tests.simulator.test_simulator_kernels import PORTION, PORTIONS
from tests.simulator.test_simulator_mutants import TOO_EARLY, edit, looked_for

F32 = np.dtype(np.float32)
SEEDS = 20


def shape_of(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def matmul(world: int, dtype: np.dtype, shape: tuple[int, ...]) -> Call:
    rows, columns, depth, stages, programs = shape
    lhs = [integers(rank, (rows, depth), dtype) for rank in range(world)]
    rhs = [integers(100 + rank, (depth, columns), dtype) for rank in range(world)]
    keywords = {
        "world": world,
        "grid": programs,
        "out_type": shape_of(rows, columns, dtype=dtype),
        "descriptors": {"lhs_desc": (16, 8), "rhs_desc": (8, 16), "out_desc": (16, 8)},
        "rows": rows,
        "columns": columns,
        "depth": depth,
        "STAGES": stages,
        **{"M": 16, "N": 16, "K": 8},
    }
    expected = [(a.astype(F32) @ b.astype(F32)).astype(dtype) for a, b in zip(lhs, rhs)]
    return Call(arrays=(lhs, rhs), keywords=keywords, expected=expected)


def all_gather_matmul(world: int, dtype: np.dtype, shape: tuple[int, ...]) -> Call:
    programs, depth, stages, parts = shape
    rows = 16 * programs
    x = [integers(rank, (rows, depth), dtype) for rank in range(world)]
    rhs = [integers(100 + rank, (depth, 16), dtype) for rank in range(world)]
    keywords = {
        "world": world,
        "grid": programs,
        "out_type": shape_of(world * rows, 16, dtype=dtype),
        "scratch": {"gathered": shape_of(world, rows, depth, dtype=dtype)},
        "signals": {"arrived": (world, programs, parts)},
        "descriptors": {"x_desc": (16, 8), "rhs_desc": (8, 16), "out_desc": (16, 8)},
        "rows": rows,
        "depth": depth,
        "STAGES": stages,
        "PARTS": parts,
        **{"M": 16, "N": 16, "K": 8},
    }
    gathered = np.concatenate(x).astype(F32)
    expected = [(gathered @ w.astype(F32)).astype(dtype) for w in rhs]
    return Call(arrays=(x, x, rhs), keywords=keywords, expected=expected)


KERNELS = (
    Simulated(
        name="matmul",
        module=gluon_products,
        function="matmul_kernel",
        call=matmul,
        # ROWS, COLUMNS, DEPTH, STAGES, programs; the second one is clipped at both ends.
        shapes=lambda world: ((32, 32, 40, 2, 2), (40, 24, 32, 3, 3), (16, 48, 8, 4, 1)),
    ),
    Simulated(
        name="all_gather_matmul",
        module=gluon_products,
        function="all_gather_matmul_kernel",
        call=all_gather_matmul,
        # programs, DEPTH, STAGES, PARTS
        shapes=lambda world: ((2, 32, 2, 2), (1, 48, 3, 3), (2, 16, 4, 1)) if world < 8 else ((1, 16, 2, 2),),
    ),
)
KERNEL = {kernel.name: kernel for kernel in KERNELS}


@pytest.mark.parametrize("world", (1, 2, 3, 4, 8))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_interleaving_is_right(kernel: Simulated, world: int) -> None:
    for seed in range(8 if world < 4 else 2):
        call, settings = kernel.case(seed, world)
        call.run(kernel.kernel, **settings)


@pytest.mark.soak
@pytest.mark.parametrize("first", PORTIONS)
@pytest.mark.parametrize("world", (2, 3, 4))
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_many_interleavings_are_right(kernel: Simulated, world: int, first: int) -> None:
    for seed in range(first, first + PORTION):
        call, settings = kernel.case(seed, world)
        call.run(kernel.kernel, **settings)


@pytest.mark.parametrize("own_descriptor", (False, True), ids=("pointer", "descriptor"))
def test_a_kernel_that_runs_on_gpus(cpu_mesh: MeshFactory, own_descriptor: bool) -> None:
    mesh = cpu_mesh(4, "tp")
    rows = 2 * BLOCK[0] * PROGRAMS
    x = jax.device_put(integers(0, (4 * rows, BLOCK[1]), F32), NamedSharding(mesh, P("tp")))

    def program(function: Callable[..., jax.Array], **keywords: Any) -> jax.Array:
        call = functools.partial(function, **keywords)
        return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("tp"), out_specs=P("tp")))(x)

    expected = program(exchange_by_xla)
    for seed in range(2):
        with simulator.simulating(seed=seed, slots=2):
            out = program(exchange, own_descriptor=own_descriptor, implementation="simulate")
            np.testing.assert_array_equal(out, expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault: (text, what to put in its place, and how often it occurs if not once), and how it must be found.

    Attributes:
      says: what the finding must say.
    """

    name: str
    kernel: str
    edits: tuple[tuple, ...]
    errors: tuple[type[SimulationError], ...]
    says: str = ""


def indent(text: str) -> str:
    return textwrap.indent(text, "    ")


WAIT = "                shmem.wait(me, signal, me.epoch, source)\n"
FENCE = "                shmem.fence_proxy()\n"
RETIRE = "        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))\n"
RELEASE = "        mbarrier.arrive(empty.index(previous), count=1, pred=step > 0)\n"
LAST_RELEASE = "    mbarrier.arrive(empty.index(previous), count=1)\n"
INIT = "        mbarrier.init(empty.index(i), count=1)\n"
RHS_LOAD = "                tma.async_load(rhs_desc, [step * K, 0], bar, rhs.index(stage))\n"
END = "    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))\n"
EXPECT = "mbarrier.expect(bar, lhs_desc.nbytes_per_cta + rhs_desc.nbytes_per_cta)"
LOAD = "            tma.async_load(lhs_desc, [row, k], bar, lhs.index(stage))\n"
STORE = "    buffers.index(half).store(tile.to(out_desc.dtype))\n"

MUTANTS = (
    Mutant(
        name="wait for the part before",
        kernel="all_gather_matmul",
        edits=(("PARTS + part\n                shmem.wait", "PARTS + part // 2\n                shmem.wait"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="wait for the first part alone",
        kernel="all_gather_matmul",
        edits=((WAIT, "                if part == 0:\n" + indent(WAIT)),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="load before the wait",
        kernel="all_gather_matmul",
        edits=(
            (WAIT + FENCE, "                pass\n"),
            (RHS_LOAD, RHS_LOAD + "                if i > 0:\n" + indent(WAIT + FENCE)),
        ),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="no wait",
        kernel="all_gather_matmul",
        edits=((WAIT, ""),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="no proxy fence",
        kernel="all_gather_matmul",
        edits=((FENCE, ""),),
        errors=(MissingFenceError,),
        says="shmem.fence_proxy",
    ),
    Mutant(
        name="proxy fence before the wait",
        kernel="all_gather_matmul",
        edits=((WAIT + FENCE, FENCE + WAIT),),
        errors=(MissingFenceError,),
        says="shmem.fence_proxy",
    ),
    Mutant(
        name="signal before the last stores",
        kernel="all_gather_matmul",
        edits=(
            (
                "part * steps, (part + 1) * steps):\n                element",
                "part * steps, (part + 1) * steps - 1):\n                element",
            ),
        ),
        errors=(UninitializedReadError,),
    ),
    Mutant(
        name="the other copy",
        kernel="all_gather_matmul",
        edits=(
            (
                "inbox = shmem.scratch(me, gathered, x_desc.dtype)",
                "inbox = shmem.scratch(me._replace(epoch=me.epoch + 1), gathered, x_desc.dtype)",
            ),
        ),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="empty barriers taken for full",
        kernel="matmul",
        edits=(("    phase = 1\n    for tile", "    phase = 0\n    for tile"),),
        errors=(DeadlockError,),
        says="arrivals",
    ),
    Mutant(
        name="a phase that does not change",
        kernel="matmul",
        edits=(
            (
                "            tma.async_load(rhs_desc, [k, column], bar, rhs.index(stage))\n"
                "            stage += 1\n            if stage == STAGES:\n                stage = 0\n"
                "                phase = phase ^ 1\n",
                "            tma.async_load(rhs_desc, [k, column], bar, rhs.index(stage))\n"
                "            stage += 1\n            if stage == STAGES:\n                stage = 0\n",
            ),
        ),
        errors=(DataRaceError, MbarrierError),
    ),
    Mutant(
        name="full barriers one phase off",
        kernel="matmul",
        edits=(("    stage = 0\n    phase = 0\n    for tile", "    stage = 0\n    phase = 1\n    for tile"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="no wait for the empty buffer",
        kernel="matmul",
        edits=(
            (
                "            mbarrier.wait(empty.index(stage), phase)\n            mbarrier.expect(bar, lhs",
                "            mbarrier.expect(bar, lhs",
            ),
        ),
        errors=(DataRaceError, MbarrierError),
    ),
    Mutant(
        name="no wait for the full buffer",
        kernel="matmul",
        edits=(("        mbarrier.wait(ready.index(stage), phase)\n", ""),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="wait for another stage",
        kernel="matmul",
        edits=(
            (
                "        mbarrier.wait(ready.index(stage), phase)\n",
                "        mbarrier.wait(ready.index(previous), phase)\n",
            ),
        ),
        errors=(*TOO_EARLY, DeadlockError),
    ),
    Mutant(
        name="one stage too few released",
        kernel="matmul",
        edits=((RELEASE, RELEASE.replace("step > 0", "step > 1")),),
        errors=(DeadlockError,),
        says="arrivals",
    ),
    Mutant(
        name="the stage in use released",
        kernel="matmul",
        edits=((RELEASE, RELEASE.replace("previous", "stage").replace("step > 0", "True")), (LAST_RELEASE, "")),
        errors=(DataRaceError,),
        says="warpgroup MMA",
    ),
    Mutant(
        name="released before the product has ended",
        kernel="matmul",
        edits=((RETIRE, ""),),
        errors=(DataRaceError,),
        says="warpgroup MMA",
    ),
    Mutant(
        name="released one product too early",
        kernel="matmul",
        edits=((RETIRE, RETIRE.replace("=1", "=2")),),
        errors=(DataRaceError,),
        says="warpgroup MMA",
    ),
    Mutant(
        name="result used before the last product has ended",
        kernel="matmul",
        edits=((END, END.replace("=0", "=1")),),
        errors=(DataRaceError,),
        says="before a warpgroup_mma_wait",
    ),
    Mutant(
        name="too few bytes expected",
        kernel="matmul",
        edits=((EXPECT, "mbarrier.expect(bar, lhs_desc.nbytes_per_cta)"),),
        errors=(*TOO_EARLY, MbarrierError, DeadlockError),
    ),
    Mutant(
        name="too many bytes expected",
        kernel="matmul",
        edits=((EXPECT, "mbarrier.expect(bar, 2 * lhs_desc.nbytes_per_cta + rhs_desc.nbytes_per_cta)"),),
        errors=(DeadlockError,),
        says="bytes have not come",
    ),
    Mutant(
        name="released twice",
        kernel="matmul",
        edits=((RELEASE, RELEASE.replace("count=1", "count=2")),),
        errors=(MbarrierError,),
        says="counts 2 times at empty",
    ),
    Mutant(
        name="a barrier too few",
        kernel="matmul",
        edits=((INIT, "        if i > 0:\n" + indent(INIT), 2),),
        errors=(MbarrierError,),
        says="nobody initialised it",
    ),
    Mutant(
        name="a load too many",
        kernel="matmul",
        edits=((LOAD, LOAD + "            if k == depth - K:\n" + indent(LOAD)),),
        errors=(DataRaceError,),
    ),
    Mutant(
        name="no fence before a store",
        kernel="matmul",
        edits=(("    fence_async_shared()\n", ""),),
        errors=(MissingFenceError,),
        says="fence_async_shared",
    ),
    Mutant(
        name="fence before the buffer is filled",
        kernel="matmul",
        edits=(("    fence_async_shared()\n", ""), (STORE, "    fence_async_shared()\n" + STORE)),
        errors=(MissingFenceError,),
        says="fence_async_shared",
    ),
    Mutant(
        name="buffer filled while a store reads it",
        kernel="matmul",
        edits=(("    tma.store_wait(1)\n", ""),),
        errors=(DataRaceError,),
        says="TMA store",
    ),
    Mutant(
        name="one store too many on its way",
        kernel="matmul",
        edits=(("    tma.store_wait(1)\n", "    tma.store_wait(2)\n"),),
        errors=(DataRaceError,),
        says="TMA store",
    ),
    Mutant(
        name="no wait for the last stores",
        kernel="all_gather_matmul",
        edits=(("    tma.store_wait(0)\n", "", 2),),
        errors=(UnfinishedOperationError,),
        says="TMA store",
    ),
)


@looked_for(SEEDS)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_fault_is_found(mutant: Mutant, seeds: int, tmp_path: Path) -> None:
    """By the right detector under whichever seeds show it, and never as a wrong result without a finding."""
    kernel = KERNEL[mutant.kernel]
    module = load(edit(gluon_products, mutant.edits, tmp_path), gluon_products.__name__)
    found = 0
    for seed in range(SEEDS):
        if found and seed >= seeds:
            break
        call, settings = kernel.case(seed, 3)
        try:
            call.run(getattr(module, kernel.function), **settings)
        except SimulationError as error:
            found += 1
            assert isinstance(error, mutant.errors), f"found as {type(error).__name__}: {error}"
            assert mutant.says in str(error)
            assert str(error).startswith(f"{kernel.function}: ")
    assert found, f"not found in {SEEDS} seeds"


@gluon.jit
def views_kernel(x_ptr, team, out_ptr, INDEX: gl.constexpr):
    """Parts of a buffer: half a row, a transposed part, and one with other elements."""
    me = shmem.start(team)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    row = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    value = gl.load(x_ptr + row * 16 + column)
    buffers = gl.allocate_shared_memory(gl.float32, [2, 8, 16], SHARED)
    buffers.index(INDEX).store(value)
    buffer = buffers.index(1)
    turned = buffer.slice(8, 8, dim=1).permute([1, 0]).load(LAYOUT)
    square = (
        gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))[:, None] * 8 + gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))[None, :]
    )
    gl.store(out_ptr + square, turned)
    bits = buffer.reinterpret(gl.int32, [128], SHARED).load(gl.AutoLayout())
    gl.store(out_ptr + 64 + gl.arange(0, 128, gl.AutoLayout()), bits.to(gl.float32, bitcast=True))
    flat = buffer.reshape([4, 32]).index(3).load(gl.AutoLayout())
    gl.store(out_ptr + 192 + gl.arange(0, 32, gl.AutoLayout()), flat)
    shmem.finish(me)


def views(index: int) -> None:
    x = np.arange(128, dtype=F32).reshape(8, 16)
    outs, _ = simulator.run(views_kernel, [x], world=1, grid=1, out_type=shape_of(224), INDEX=index)
    expected = np.concatenate([x[:, 8:].T.ravel(), x.ravel(), x.reshape(4, 32)[3]])
    np.testing.assert_array_equal(outs[0], expected)


def test_views_of_shared_memory() -> None:
    views(1)


def test_shared_memory_begins_unwritten() -> None:
    with pytest.raises(
        UninitializedReadError, match=r"reads buffers\[1, 0, 8\] in shared memory of program 0 of rank 0"
    ):
        views(0)


def test_a_buffer_that_is_not_there() -> None:
    with pytest.raises(OutOfBoundsError, match=r"takes \[2\] of buffers in shared memory of program 0 of rank 0"):
        views(2)


@gluon.jit
def put_by_tma_kernel(x_desc, team, inbox, arrived, out_ptr, READ_ONLY: gl.constexpr, WAIT_FOR_LOAD: gl.constexpr):
    """Two ranks swap blocks by TMA."""
    me = shmem.start(team)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    peer = 1 - me.rank
    buffer = gl.allocate_shared_memory(x_desc.dtype, [8, 16], x_desc.layout)
    came = mbarrier.allocate_mbarrier()
    mbarrier.init(came, count=1)
    mbarrier.expect(came, x_desc.nbytes_per_cta)
    tma.async_load(x_desc, [0, 0], came, buffer)
    if WAIT_FOR_LOAD:
        mbarrier.wait(came, 0)
        mine = shmem.scratch(me, inbox, x_desc.dtype)
        theirs = shmem.remote(me, mine, peer)
        inbox_desc = tma.make_tensor_descriptor(theirs, [8, 16], [16, 1], [8, 16], x_desc.layout)
        tma.async_store(inbox_desc, [0, 0], buffer)
        tma.store_wait(0, read_only=READ_ONLY)
        shmem.signal(me, arrived, peer)
        shmem.wait(me, arrived, me.epoch, peer)
        row = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))[:, None]
        column = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
        gl.store(out_ptr + row * 16 + column, gl.load(mine + row * 16 + column))
    shmem.finish(me)


def put_by_tma(seed: int = 0, *, read_only: bool = False, wait_for_load: bool = True) -> None:
    x = [integers(rank, (8, 16), F32) for rank in range(2)]
    outs, _ = simulator.run(
        put_by_tma_kernel,
        x,
        world=2,
        grid=1,
        out_type=shape_of(8, 16),
        scratch={"inbox": shape_of(8, 16)},
        signals={"arrived": 1},
        descriptors={"x_desc": (8, 16)},
        READ_ONLY=read_only,
        WAIT_FOR_LOAD=wait_for_load,
        seed=seed,
    )
    np.testing.assert_array_equal(outs, x[::-1])


def test_tma_reaches_peers() -> None:
    for seed in range(10):
        put_by_tma(seed)


def test_a_signal_behind_a_store_that_has_only_been_read() -> None:
    with pytest.raises((DataRaceError, UninitializedReadError), match=r"TMA store|nobody has written"):
        put_by_tma(read_only=True)


def test_a_program_ends_before_its_load() -> None:
    with pytest.raises(UnfinishedOperationError, match=r"nobody has waited for the TMA load of rank \d, program 0"):
        put_by_tma(wait_for_load=False)


@gluon.jit
def load_acquire(pointer):
    return gl.inline_asm_elementwise(
        "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_proxy():
    gl.inline_asm("fence.proxy.async.global;", "~{memory}", [], [], is_pure=False)


@gluon.jit
def take_part(me, mine, arrived, buffer, came, out_ptr, LAYOUT: gl.constexpr, FAULT: gl.constexpr):
    desc = tma.make_tensor_descriptor(mine, [8, 16], [16, 1], [8, 16], buffer.layout)
    want = me.epoch.to(gl.int32)
    pointer = (me.signals + arrived * 4).to(gl.pointer_type(gl.int32))
    polls = 0
    while (load_acquire(pointer) < want) & (polls < 100000):
        polls += 1
    if FAULT != "no fence":
        fence_proxy()
    mbarrier.expect(came, desc.nbytes_per_cta)
    tma.async_load(desc, [0, 0], came, buffer)
    mbarrier.wait(came, 0)
    row = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(out_ptr + row * 16 + column, buffer.load(LAYOUT))


@gluon.jit
def write_part(me, x_ptr, mine, written, LAYOUT: gl.constexpr, FAULT: gl.constexpr):
    row = gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    shmem.store(me, mine + row * 16 + column, gl.load(x_ptr + row * 16 + column), 1 - me.rank)
    if FAULT != "silent":
        mbarrier.arrive(written, count=1)


@gluon.jit
def tell_part(me, arrived, written, FAULT: gl.constexpr):
    if FAULT != "no wait":
        mbarrier.wait(written, 0)
    shmem.signal(me, arrived, 1 - me.rank)


@gluon.jit
def roles_kernel(x_ptr, x_desc, team, inbox, arrived, out_ptr, FAULT: gl.constexpr):
    """Two ranks swap blocks: one partition stores, one signals, one receives, by assembly of their own."""
    me = shmem.start(team)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    mine = shmem.scratch(me, inbox, gl.float32)
    buffer = gl.allocate_shared_memory(gl.float32, [8, 16], x_desc.layout)
    bars = mbarrier.allocate_mbarrier(batch=2)
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=1)
    gl.warp_specialize(
        [
            (take_part, (me, mine, arrived, buffer, bars.index(0), out_ptr, LAYOUT, FAULT)),
            (write_part, (me, x_ptr, mine, bars.index(1), LAYOUT, FAULT)),
            (tell_part, (me, arrived, bars.index(1), FAULT)),
        ],
        [4, 1],
    )
    shmem.finish(me)


def swap_by_roles(fault: str = "", **settings: Any) -> simulator.Trace:
    x = [integers(rank, (8, 16), F32) for rank in range(2)]
    outs, trace = simulator.run(
        roles_kernel,
        x,
        x,
        world=2,
        grid=1,
        out_type=shape_of(8, 16),
        scratch={"inbox": shape_of(8, 16)},
        signals={"arrived": 1},
        descriptors={"x_desc": (8, 16)},
        FAULT=fault,
        **settings,
    )
    np.testing.assert_array_equal(outs, x[::-1])
    return trace


def test_partitions_work_together(tmp_path: Path) -> None:
    for seed in range(10):
        trace = swap_by_roles(seed=seed)
    assert {span.part for span in trace.spans} == {0, 1, 2}
    trace.save_chrome(tmp_path / "trace.json")


@pytest.mark.parametrize(
    ("fault", "errors", "says"),
    (
        ("no fence", MissingFenceError, "fence_proxy"),
        ("no wait", TOO_EARLY, "inbox"),
        ("silent", DeadlockError, r"phase 0 of bars\[1\] has 0 of 1 arrivals"),
    ),
)
def test_partitions_that_do_not(fault: str, errors: Any, says: str) -> None:
    with pytest.raises(errors, match=says):
        for seed in range(20):
            swap_by_roles(fault, seed=seed)


@gluon.jit
def fill_part(x_ptr, lhs, rhs, full, FAULT: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    value = gl.load(x_ptr + row * 16 + column)
    lhs.store(value)
    rhs.store(value)
    if FAULT == "":
        fence_async_shared()
    mbarrier.arrive(full, count=1)


@gluon.jit
def square_part(out_ptr, lhs, rhs, full, FAULT: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16])
    row = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    if FAULT != "no wait":
        mbarrier.wait(full, 0)
    if FAULT == "fence by the reader":
        fence_async_shared()
    acc = gl.full((16, 16), 100, gl.float32, LAYOUT)
    acc = warpgroup_mma(lhs, rhs, acc, use_acc=False)
    acc = warpgroup_mma(lhs.load(LAYOUT), rhs, acc)
    gl.store(out_ptr + row * 16 + column, acc)


@gluon.jit
def square_kernel(x_ptr, team, out_ptr, FAULT: gl.constexpr):
    """Twice the square of a matrix that one partition stores for another one."""
    me = shmem.start(team)
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, 16], gl.float32)
    lhs = gl.allocate_shared_memory(gl.float32, [16, 16], SHARED)
    rhs = gl.allocate_shared_memory(gl.float32, [16, 16], SHARED)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    gl.warp_specialize(
        [(square_part, (out_ptr, lhs, rhs, full, FAULT)), (fill_part, (x_ptr, lhs, rhs, full, FAULT))], [4]
    )
    shmem.finish(me)


def square(fault: str, seed: int) -> None:
    x = integers(0, (16, 16), F32)
    outs, _ = simulator.run(square_kernel, [x], world=1, grid=1, out_type=x, FAULT=fault, seed=seed)
    np.testing.assert_array_equal(outs[0], 2 * (x @ x))


@pytest.mark.parametrize("fence", ("", "fence by the reader"))
def test_products_of_what_another_partition_has_stored(fence: str) -> None:
    for seed in range(10):
        square(fence, seed)


@pytest.mark.parametrize(("fault", "errors"), (("no fence", MissingFenceError), ("no wait", TOO_EARLY)))
def test_products_of_what_may_not_be_there(fault: str, errors: Any) -> None:
    with pytest.raises(errors, match="warpgroup MMA"):
        square(fault, 0)


@gluon.jit
def loose_kernel(team, out_ptr, FAULT: gl.constexpr):
    me = shmem.start(team)
    if FAULT == "assembly":
        gl.inline_asm("trap;", "", [], [])
    if FAULT == "shape":
        buffer = gl.allocate_shared_memory(gl.float32, [8, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        buffer.store(gl.zeros([8, 8], gl.float32, gl.AutoLayout()))
    shmem.finish(me)


def test_descriptors_do_not_fit() -> None:
    with pytest.raises(TypeError, match="it has no pointer 'y_desc' to be a descriptor"):
        simulator.run(loose_kernel, world=1, grid=1, out_type=shape_of(1), FAULT="", descriptors={"y_desc": (16,)})
    with pytest.raises(TypeError, match="are for Gluon kernels"):
        x = [np.zeros(8, F32)] * 2
        descriptors = {"x_ptr": (8,)}
        keywords = {"scratch": {"inbox": x[0]}, "signals": {"arrived": 1}, "BLOCK": 8, "FAULT": ""}
        simulator.run(triton_kernel, x, world=2, grid=1, out_type=x[0], descriptors=descriptors, **keywords)


def test_rows_that_tma_cannot_take() -> None:
    with pytest.raises(ValueError, match="lie multiples of 16 bytes apart"):
        call = matmul(1, F32, (16, 16, 9, 2, 1))
        call.run(gluon_products.matmul_kernel)


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    (("assembly", NotImplementedError, "trap;"), ("shape", TypeError, r"fp32\[8, 8\] does not fit")),
)
def test_what_does_not_work_at_all(fault: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        simulator.run(loose_kernel, world=1, grid=1, out_type=shape_of(1), FAULT=fault)
