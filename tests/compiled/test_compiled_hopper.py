"""What the compiler makes of the kernels that are for Hopper alone, read from the PTX: no GPU needed."""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxtaxfree import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from jaxtaxfree.kernels import shmem
from jaxtaxfree.kernels.all_gather_matmul import hopper as all_gather_matmul_hopper
from jaxtaxfree.kernels.blocks import hopper as matmul_hopper
from jaxtaxfree.kernels.matmul_all_reduce import hopper as matmul_all_reduce_hopper
from jaxtaxfree.kernels.matmul_reduce_scatter import hopper as matmul_reduce_scatter_hopper
from jaxtaxfree.ops import matmul
from jaxtaxfree.ops import matmul_reduce_scatter as scatter_ops
from jaxtaxfree.ops.all_gather_matmul import VARIANTS, all_gather_matmul_p, hopper
from jaxtaxfree.ops.blocks.hopper import pace as pace_of
from jaxtaxfree.ops.variant import settings_of
from tests.compiled.test_compiled import (
    SHARED_MEMORY,
    Statement,
    bytes_of,
    is_barrier,
    local_memory,
    loops,
    parse,
    places_of,
    ptxas_report,
    publishes_out_of_order,
    spilled_bytes,
    waits_that_do_not_wait,
)
from tests.compiled.test_gluon import NAME, PTX, WARPS, launch_of
from tests.compiled.test_gluon import SHARED_MEMORY as SHARED
from tests.helpers.compiling import names
from tests.helpers.support import Compiled, fails, lower_for_cuda, mesh_of, sharded

pytestmark = pytest.mark.usefixtures("no_cubin")

# Sizes and keywords of the operation.
CASES: dict[str, dict[str, Any]] = {
    "aligned": {},
    "two-ranks": {"world": 2},
    "eight-ranks": {"world": 8, "m": 16384, "n": 57344},
    "odd": {"m": 4 * 333, "k": 1000, "n": 4 * 264, "dtype": "float16"},
    "gathered": {"return_gathered": True},
    "float32-result": {"preferred_element_type": "float32"},
    "transposed": {"rhs_transposed": True},
    "transposed-odd": {"rhs_transposed": True, "m": 4 * 333, "k": 1000, "n": 4 * 264, "dtype": "float16"},
    "bias": {"bias": True, "activation": "gelu_exact"},
    "gate": {"gate": True, "activation": "silu"},
    "gate-odd": {"gate": True, "bias": True, "m": 4 * 333, "k": 1000, "n": 4 * 264, "dtype": "float16"},
    "gate-gathered": {
        "gate": True,
        "bias": True,
        "activation": "gelu_exact",
        "return_gathered": True,
        "preferred_element_type": "float32",
    },
}
SCATTER_CASES: dict[str, dict[str, Any]] = {
    "scatter-aligned": {},
    "scatter-two-ranks": {"world": 2},
    "scatter-eight-ranks": {"world": 8, "m": 16384, "k": 57344},
    "scatter-odd": {"m": 4 * 333, "k": 4 * 1000, "n": 264, "dtype": "float16"},
    "scatter-float32-result": {"preferred_element_type": "float32"},
    "scatter-transposed": {"rhs_transposed": True},
}
EPILOGUE_CASES: dict[str, dict[str, Any]] = {
    "scatter-residual": {"residual": True},
    "scatter-epilogue": {"bias": True, "activation": "silu", "residual": True},
    "scatter-gelu": {"m": 4 * 333, "k": 4 * 1000, "n": 264, "activation": "gelu_exact"},
    "reduce-epilogue": {"bias": True, "activation": "silu", "residual": True},
    "reduce-narrow-tiles-epilogue": {"m": 256, "bias": True, "activation": "gelu_exact", "residual": True},
}
REDUCE_CASES: dict[str, dict[str, Any]] = {
    "reduce-aligned": {},
    "reduce-narrow-tiles": {"m": 256},
    "reduce-two-ranks": {"world": 2},
    "reduce-eight-ranks": {"world": 8, "k": 57344},
    "reduce-odd": {"m": 1333, "k": 4 * 1000, "n": 264, "dtype": "float16"},
    "reduce-transposed": {"rhs_transposed": True},
}
LIKE_OTHERS = (
    "two-ranks",
    "eight-ranks",
    "transposed-odd",
    "gate-odd",
    "gate-gathered",
    "scatter-two-ranks",
    "scatter-eight-ranks",
    "scatter-odd",
    "scatter-gelu",
    "scatter-residual",
    "reduce-two-ranks",
    "reduce-transposed",
    "reduce-narrow-tiles-epilogue",
)
each_case = names(CASES, LIKE_OTHERS)
each_scatter = names(SCATTER_CASES, LIKE_OTHERS)
each_reduce = names(REDUCE_CASES, LIKE_OTHERS)
each_sum = names(SCATTER_CASES | REDUCE_CASES, LIKE_OTHERS)
ALL_CASES = CASES | SCATTER_CASES | EPILOGUE_CASES | REDUCE_CASES
each_kernel = names(ALL_CASES, LIKE_OTHERS)
OPERATIONS = {"scatter": matmul_reduce_scatter, "reduce": matmul_all_reduce}  # by the first part of a case's name


def lowered(
    world: int,
    m: int,
    k: int,
    n: int,
    dtype: str,
    *,
    operation: Callable = all_gather_matmul,
    rhs_transposed: bool = False,
    **keywords: Any,
) -> str:
    """The program of a call of these sizes as of the whole; a gate, a bias or a residual is asked for by True."""
    rows, columns, mesh = P("tp"), P(None, "tp"), mesh_of(world)
    in_specs, out_specs = ((rows, columns), columns) if operation is all_gather_matmul else ((columns, rows), rows)
    out_specs = P() if operation is matmul_all_reduce else out_specs
    shapes = ((m, k), (k, n))
    bias_spec = rows if operation is all_gather_matmul else P()
    known = {"gate": ((k, n), columns), "bias": ((n,), bias_spec), "residual": ((m, n), out_specs)}
    others = {name: known[name] for name in known if keywords.pop(name, False)}
    shapes += tuple(shape for shape, _ in others.values())
    in_specs += tuple(spec for _, spec in others.values())

    def call(lhs: jax.Array, rhs: jax.Array, *arrays: jax.Array) -> Any:
        operands = dict(zip(others, arrays, strict=True))
        return operation(lhs, rhs, "tp", implementation="fused", **operands, **keywords)

    if rhs_transposed and operation is not all_gather_matmul:
        keywords["rhs_transposed"] = True
        in_specs, shapes = (columns, columns), ((m, k), (n, k))
    elif rhs_transposed:  # as the gradient of matmul_reduce_scatter calls it
        own = {"axes": ("tp",), "axis": 0, "rhs_transposed": True, "precision": None, "preferred_element_type": None}
        own["config"] = settings_of("all_gather_matmul", VARIANTS, keywords.pop("config"))
        call = functools.partial(matmul.bind, all_gather_matmul_p, implementation="fused", **own, **keywords)
        in_specs, shapes = (rows, rows), ((m, k), (n, k))
    if "return_gathered" in keywords:
        out_specs = (out_specs, P())
    arrays = [sharded(mesh, spec, shape, dtype) for spec, shape in zip(in_specs, shapes)]
    program = jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return lower_for_cuda(program, *arrays)


CONFIGS = {all_gather_matmul: hopper.Config(), matmul_reduce_scatter: scatter_ops.hopper.Config()}


@functools.cache
def compiled(name: str) -> tuple[Compiled, list[Statement]]:
    """The kernel of a case, and its statements."""
    call = {"world": 4, "m": 8192, "k": 8192, "n": 8192, "dtype": "bfloat16"}
    operation = OPERATIONS.get(name.split("-")[0], all_gather_matmul)
    call |= {"operation": operation, "config": CONFIGS.get(operation, {"kernel": "hopper"})}
    kernel = launch_of(lowered(**call | ALL_CASES[name]))
    assert kernel[NAME].decode() == f"{operation.__name__}_hopper_kernel"
    assert kernel[WARPS] == 12
    ptx = kernel[PTX].decode()
    return Compiled(ptx, kernel[SHARED], (), {}), parse(ptx)


def reduces(name: str) -> bool:
    return name.startswith("reduce")


def is_wide(name: str) -> bool:
    """Whether the tiles of sums have 256 columns; chunks of others have twice as many elements."""
    return "n256k16" in compiled(name)[0].ptx


def products_that_do_not_overlap(report: str) -> list[str]:
    """What ptxas has to say of `wgmma`: that it orders instructions that were to overlap."""
    return re.findall(r"\(C75\d\d\).*", report)


@each_case
def test_every_role_is_there(name: str) -> None:
    ptx = compiled(name)[0].ptx
    assert ".target sm_90a" in ptx and ".version 8.8" in ptx
    assert {"64x256x16", "64x128x16"} == {
        "x".join(found) for found in re.findall(r"wgmma\.mma_async\.sync\.aligned\.m(\d+)n(\d+)k(\d+)", ptx)
    }
    rows_and_columns = r"cp\.async\.bulk\.tensor\.%dd\.shared::cta\.global"
    # Rows of this rank's and of others, for whole and for half tiles; each load of columns takes several instructions.
    assert len(re.findall(rows_and_columns % 3, ptx)) >= 4
    assert re.findall(rows_and_columns % 2, ptx)
    assert re.findall(r"cp\.async\.bulk\.tensor\.3d\.global\.shared::cta", ptx)
    assert "tensormap.replace" in ptx


@each_case
def test_waits_and_publishes(name: str) -> None:
    program = compiled(name)[1]
    # The role that loads, for whole and for half tiles, is a single warp, and needs no barrier.
    assert set(waits_that_do_not_wait(program, 3)) == {"no barrier behind a wait"}
    claims = places_of(shmem.claim, "drawn = tl.atomic_add(")
    assert len([s for s in program if s.place in claims and s.starts("atom")]) == 2
    # Those that return a value are claims, and reports of a wait in vain.
    assert publishes_out_of_order([s for s in program if not s.starts("atom.")]) == []


@each_case
def test_rows_travel_in_stores_of_16_bytes(name: str) -> None:
    (place,) = places_of(all_gather_matmul_hopper.copy, "gl.store(")
    stores = [s for s in compiled(name)[1] if s.place == place and s.starts("st.")]
    assert stores
    assert {bytes_of(store) for store in stores} == {16}


@each_case
def test_nothing_is_loaded_as_if_it_never_changed(name: str) -> None:
    """Rows that are passed on have arrived in this call."""
    loads = [s for s in compiled(name)[1] if s.starts("ld.") and s.has("global")]
    assert {bytes_of(load) for load in loads} >= {16}
    assert [load.text for load in loads if load.has("nc")] == []


@each_sum
def test_waits_and_publishes_of_sums(name: str) -> None:
    program = compiled(name)[1]
    # The role that loads is a single warp, and needs no barrier. For sums of others it waits, too.
    assert set(waits_that_do_not_wait(program, 2 if reduces(name) else 1)) == {"no barrier behind a wait"}
    claims = places_of(shmem.claim, "drawn = tl.atomic_add(")
    assert len([s for s in program if s.place in claims and s.starts("atom")]) == 2
    assert publishes_out_of_order([s for s in program if not s.starts("atom.")]) == []


@each_sum
def test_tiles_travel_in_accesses_of_16_bytes(name: str) -> None:
    """From the registers to the outbox, from there to a peer, and by shared memory to the registers."""
    program = compiled(name)[1]
    staged = [places_of(matmul_reduce_scatter_hopper.multiply, "gl.store(")]
    if reduces(name):
        staged = [places_of(matmul_all_reduce_hopper.multiply, "gl.store(")]
        staged += [places_of(matmul_reduce_scatter_hopper.complete, "gl.store(")]
    for place in (*staged, places_of(shmem.store, "tl.store(")):
        stores = [s for s in program if s.place in place and s.starts("st.")]
        assert stores
        assert {bytes_of(store) for store in stores} == {16}
    loads = [s for s in program if s.starts("ld.") and s.has("global") and bytes_of(s) == 16]
    # Of the outbox alone, in each of these places so many times: what peers have sent comes by TMA.
    chunk = 2 if is_wide(name) else 4
    assert len(loads) == (5 * chunk if reduces(name) else 2 * chunk)
    taken = places_of(matmul_hopper.take_block, "block = source.load(")
    loads = [s for s in program if s.place in taken and s.starts("ld.shared")]
    assert len(loads) == 32 * (2 if reduces(name) else 1)  # of each half of a tile; copies, too
    assert {bytes_of(load) for load in loads} == {16}


@each_sum
def test_peers_tiles_come_by_tma(name: str) -> None:
    """Each block in one piece; and what has read a stage is fenced and over before it is released."""
    program = compiled(name)[1]
    (place,) = places_of(matmul_hopper.load_block, "tma.async_load(")
    loads = [s for s in program if s.place == place and s.starts("cp.async.bulk.tensor.2d.shared::cta.global")]
    (place,) = places_of(matmul_hopper.load_block, "mbarrier.expect(")
    announced = [s.text for s in program if s.place == place and s.starts("mbarrier.arrive.expect_tx")]
    assert len(loads) == len(announced) > 0
    assert all(text.endswith(f", {64 * (256 if is_wide(name) else 128) * 2}") for text in announced)
    released = places_of(matmul_hopper.take_block, "mbarrier.arrive(")
    arrivals = [i for i, s in enumerate(program) if s.place in released and s.starts("mbarrier.arrive")]
    assert len(arrivals) >= 8 if reduces(name) else len(arrivals) == 4
    for i in arrivals:
        order = [s.text.split()[0] for s in program[i - 12 : i] if is_barrier(s) or s.starts("fence.proxy.async")]
        assert order[-2].startswith("fence.proxy.async.shared::cta") and order[-1].startswith("bar.sync")


@each_sum
def test_a_hand_over_is_behind_a_barrier(name: str) -> None:
    """All warps of a part have stored, or read, before its one thread arrives."""
    program = compiled(name)[1]
    functions = (matmul_reduce_scatter_hopper.give, matmul_reduce_scatter_hopper.release)
    places = {place for function in functions for place in places_of(function, "mbarrier.arrive(")}
    arrivals = [i for i, s in enumerate(program) if s.place in places and s.starts("mbarrier.arrive")]
    behind = [any(is_barrier(s) for s in program[i - 6 : i]) for i in arrivals]
    # The role that loads is one warp, and hands over in two places.
    assert len(arrivals) - sum(behind) == 2
    assert sum(behind) >= 5


@each_kernel
def test_what_is_sent_keeps_a_pace(name: str) -> None:
    """Behind each place that waits for the clock something is loaded, then stored, up to the next such place."""
    program = compiled(name)[1]
    clocks = [i for i, s in enumerate(program) if "%clock64" in s.text]
    stores = {i for i, s in enumerate(program) if s.starts("st.")}
    loop = min((loop for loop in loops(program) if set(clocks) <= set(loop) and stores & set(loop)), key=len)
    assert clocks
    for begin, end in itertools.pairwise([*clocks, loop.stop]):
        sent = [s for s in program[begin:end] if s.starts("ld.", "st.") and s.has("global") and bytes_of(s) == 16]
        kinds = [s.text.split(".")[0].split()[-1] for s in sent]
        chunk = kinds.index("st")
        assert kinds[: 2 * chunk] == ["ld"] * chunk + ["st"] * chunk != []
        assert kinds[2 * chunk :] == [] or reduces(name)  # where a tile's first and last chunk have no pace


def test_cycles_from_one_chunk_to_the_next() -> None:
    pace = functools.partial(pace_of, itemsize=2, chunk=4096, programs=132)
    assert pace(0, 8192) == 0
    assert pace(1, 8192) == 2 * pace(0.5, 8192) == 8192 / 2 / 2048 * 4096
    # As fast as the wire at least: 393 GB/s are 132 chunks in 2207 cycles of 1.6 GHz.
    assert pace(1, 8) == pace(1, 2048) == pytest.approx(132 * 4096 / 393e9 * 1.6e9, rel=0.01)


@each_kernel
def test_registers_and_shared_memory(name: str) -> None:
    code, _ = compiled(name)
    report = ptxas_report(code)
    # Exact GELU and rows in boxes: six values of the roles that load and push, none of them in a loop of steps.
    assert spilled_bytes(report) == (68 if name == "scatter-gelu" else 0)
    assert products_that_do_not_overlap(report) == []
    assert local_memory(code.ptx) == []
    assert code.shared <= SHARED_MEMORY[90]


def stages_released_for_ever(program: list[Statement]) -> list[str]:
    """Arrivals in a loop of products at an mbarrier whose address the loop does not compute.

    Triton drops a variable that begins a loop as another one does, and becomes that one again in the loop.
    """
    wrong = []
    for loop in loops(program):
        body = [s.text for s in program[loop.start : loop.stop]]
        if any(text.startswith("wgmma.mma_async") for text in body):
            arrivals = [text for text in body if re.match(r"mbarrier\.arrive\.shared::cta\.b64 _", text)]
            addresses = [(text, re.search(r"\[(%r\d+)\]", text)[1]) for text in arrivals]
            wrong += [text for text, of in addresses if not any(re.match(rf"add\S+\s+{of},", line) for line in body)]
            wrong += [] if arrivals else ["no arrival"]
    return wrong


@each_kernel
def test_every_stage_is_released(name: str) -> None:
    assert stages_released_for_ever(compiled(name)[1]) == []


def test_a_stage_released_for_ever_is_reported() -> None:
    code, _ = compiled("aligned")
    arrival = r"(mbarrier\.arrive\.shared::cta\.b64 _, \[)%r\d+"
    assert stages_released_for_ever(parse(re.sub(arrival, r"\1%r1", code.ptx))) != []


def test_products_that_do_not_overlap_are_reported() -> None:
    code, _ = compiled("aligned")
    first = re.search(r"wgmma\.wait_group\.sync\.aligned 1;", code.ptx)
    assert first
    accumulator = re.search(r"wgmma\.mma_async\S+ \{(%r\d+)", code.ptx)[1]
    used = f"{code.ptx[: first.start()]}add.f32 {accumulator}, {accumulator}, {accumulator};\n"
    report = ptxas_report(Compiled(used + code.ptx[first.start() :], 0, (), {}))
    assert products_that_do_not_overlap(report) != []


@pytest.mark.parametrize(
    ("changed", "taken"),
    (
        ({}, True),
        ({"m": 520}, True),
        ({"m": 512}, True),
        ({"m": 512, "n": 4 * 1280}, False),  # few tiles, which programs for few rows share
        ({"m": 512, "n": 4 * 1280, "return_gathered": True}, True),
        ({"m": 384}, False),  # blocks of 128 rows of each rank would not be full
        ({"m": 256}, False),
        ({"gate": True, "m": 520}, True),
        ({"n": 4 * 128}, True),
        ({"dtype": "float32"}, False),
        ({"k": 1028}, False),
        ({"n": 4 * 2700}, False),
        ({"activation": "silu"}, True),
        ({"gate": True, "bias": True}, True),
        ({"gate": True, "m": 128}, False),
        ({"residual": True}, False),
        ({"compute_capability": 80}, False),
        ({"compute_capability": 100}, False),
    ),
    ids=str,
)
@pytest.mark.usefixtures("no_code")
def test_the_kernel_is_chosen_by_shape(changed: dict, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"world": 4, "m": 2048, "k": 512, "n": 4 * 2704, "dtype": "bfloat16", "compute_capability": 90, **changed}
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", str(call.pop("compute_capability")))
    assert (launch_of(lowered(**call))[NAME] == b"all_gather_matmul_hopper_kernel") == taken


def test_all_reasons_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "100")
    parts = ("9.0, not 10.0", "float16 and bfloat16, not float32", "1028 and 257 elements", "adds no residual")
    with fails(NotImplementedError, "all_gather_matmul ('hopper')", *parts):
        call = {"world": 4, "m": 1024, "k": 1028, "n": 4 * 257, "dtype": "float32", "residual": True}
        lowered(**call, config=hopper.Config())
