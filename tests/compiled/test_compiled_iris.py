"""Iris's own kernels, unmodified, inside `jax.shard_map`, compiled for sm_90: those of the package, and its examples.

The package is installed by scripts/setup.sh (the extra `iris`). JAXTAXFREE_IRIS_EXAMPLES names a checkout with the
examples.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from benchmarks import iris_kernels
from jaxtaxfree import iris, simulator
from tests.compiled.test_gluon import PTX, launch_of
from tests.helpers import iris_cases, iris_lowering, iris_words
from tests.helpers.support import TRITON_CALL, lower_for_cuda, mesh_of, one_program, sharded

M = N = 64
BLOCK = 16
COLUMNS = P(None, "tp")
ROWS = P("tp")
own_or_iris = pytest.mark.parametrize("own", (True, False), ids=("ours", "Iris's"))
packaged = pytest.mark.skipif(iris.home_of_iris() is None, reason="Iris is not installed (scripts/setup.sh does)")
checked_out = pytest.mark.skipif(
    iris_kernels.checkout() is None, reason="needs Iris's examples: set JAXTAXFREE_IRIS_EXAMPLES to a checkout of Iris"
)


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of(2)


def lower(mesh: Mesh, function: Callable, *operands: tuple[P, tuple[int, ...], Any], out: P = ROWS) -> str:
    arrays = [sharded(mesh, *operand) for operand in operands]
    specs = tuple(spec for spec, *_ in operands)
    return lower_for_cuda(one_program(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False), *arrays)


FLAGS = iris.symmetric((M // BLOCK * N // BLOCK,), jnp.int32, fill=0)
RING = {
    "ring_buffer": iris.symmetric((M, N), jnp.float32),
    "flags": FLAGS,
    "next_rank": (iris.RANK + 1) % iris.WORLD,
    "NUM_RINGS": 1,
    "SLICE_SIZE_N": BLOCK,
    "FLAGS_PER_TILE": 1,
}
# The kernel, its module, what its result has more rows of than its operand, and its parameters that others have not.
COLLECTIVES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "persistent_all_gather": ("all_gather", 2, {}),
    "persistent_all_gather_partitioned": ("all_gather", 2, {}),
    "persistent_all_reduce_atomic": ("all_reduce", 1, {}),
    "persistent_all_reduce_spinlock": ("all_reduce", 1, {"locks_ptr": FLAGS}),
    "persistent_all_reduce_one_shot": ("all_reduce", 1, {}),
    "persistent_all_reduce_two_shot": ("all_reduce", 1, {"DISTRIBUTION": 1}),
    "persistent_all_reduce_ring": ("all_reduce", 1, RING),
    "persistent_all_to_all": ("all_to_all", 1, {}),
    "persistent_reduce_scatter_two_shot": ("reduce_scatter", 1, {"DISTRIBUTION": 1}),
}


def collective(x: jax.Array, name: str, own: bool) -> jax.Array:
    """A kernel of `iris.ccl`: in one launch, between one that opens its workspace and one that reads the result."""
    module, rows, more = COLLECTIVES[name]
    kernel = iris_kernels.packaged(f"ccl.triton.{module}", name, own)
    arguments = {
        "M": M,
        "N": N,
        **iris_kernels.strides("stride_in_", "m n", x.shape),
        **iris_kernels.strides("stride_out_", "m n", x.shape),
        "heap_bases": iris.BASES,
        "group_rank": iris.RANK,
        "iris_rank": iris.RANK,
        "world_size": iris.WORLD,
        "rank_start": 0,
        "rank_stride": 1,
        "BLOCK_SIZE_M": BLOCK,
        "BLOCK_SIZE_N": BLOCK,
        "GROUP_SIZE_M": 2,
        "COMM_SMS": 2,
        "NUM_XCDS": 1,
        "CHUNK_SIZE": 1,
        "input_ptr": iris.symmetric(x),
        "output_ptr": iris.symmetric((rows * x.shape[0], x.shape[1]), x.dtype, fill=0, result=True),
        **more,
    }
    arguments = {key: value for key, value in arguments.items() if key in kernel.arg_names}
    return jtf.iris_call(kernel, arguments, axis_name="tp", grid=2, together=2)


WITH_IRIS = ("persistent_all_gather", "persistent_all_reduce_ring")  # the others take as long, and say as much


@packaged
@pytest.mark.parametrize(
    ("name", "own"),
    [(name, True) for name in COLLECTIVES]
    + [pytest.param(name, False, marks=() if name in WITH_IRIS else pytest.mark.soak) for name in COLLECTIVES],
)
def test_collectives(mesh: Mesh, name: str, own: bool, no_cubin: None) -> None:
    columns = 2 * N if name == "persistent_all_to_all" else N
    call = functools.partial(collective, name=name, own=own)
    program = lower(mesh, call, (P("tp"), (2 * M, columns), "float32"))
    assert program.count(TRITON_CALL) == 3


BLOCKS = {"blocks": (64, 64, 32)}
FEW = {**BLOCKS, "programs": 4}
MATRICES = ((COLUMNS, (256, 512), "bfloat16"), (COLUMNS, (512, 256), "bfloat16"))
CACHE = (COLUMNS, (2, 256, 2, 64), "bfloat16")
# The function of iris_kernels.py, its keywords, operands, and launches.
EXAMPLES: dict[str, tuple[Callable, dict[str, Any], tuple, int]] = {
    "06": (iris_kernels.message, {}, ((P("tp"), (600,), "float32"),), 3),
    "09": (iris_kernels.matmul_one_shot, FEW, ((COLUMNS, (128, 128), "float16"), (P("tp"), (128, 128), "float16")), 1),
    "13": (
        iris_kernels.flash_decode,
        {"splits": 4},
        ((P(), (2, 16, 64), "bfloat16"), CACHE, CACHE, (P(), (2, 2), "int32")),
        4,
    ),
    "14 pull": (iris_kernels.gather_matmul_pull, FEW, MATRICES, 1),
    "14 push": (iris_kernels.gather_matmul_push, FEW, MATRICES, 3),
    "15": (iris_kernels.matmul_ring, FEW, ((COLUMNS, (128, 128), "float16"), (P("tp"), (128, 128), "float16")), 4),
    "16": (iris_kernels.ring_all_reduce, {"programs": 4}, ((P("tp"), (256, 128), "float32"),), 1),
}


@packaged
@checked_out
@own_or_iris
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(mesh: Mesh, name: str, own: bool, no_cubin: None) -> None:
    function, keywords, operands, launches = EXAMPLES[name]
    program = lower(mesh, functools.partial(function, axis_name="tp", own=own, **keywords), *operands)
    assert program.count(TRITON_CALL) == launches


@packaged
@own_or_iris
def test_gather_and_product_of_the_package(mesh: Mesh, own: bool, no_cubin: None) -> None:
    """With Iris's Context, which wants the rank as a constant, there is a copy of the kernel for each rank."""
    call = functools.partial(iris_kernels.gather_matmul_hbm, axis_name="tp", own=own, fetchers=2, **BLOCKS)
    code = launch_of(lower(mesh, call, *MATRICES, out=COLUMNS))[PTX].decode()
    products = len(re.findall(r"^\s*(?:mma|wgmma\.mma_async)\.", code, re.MULTILINE))
    one_rank = functools.partial(call, own=True)
    alone = launch_of(lower(mesh, one_rank, *MATRICES, out=COLUMNS))[PTX].decode()
    assert products == (1 if own else 2) * len(re.findall(r"^\s*(?:mma|wgmma\.mma_async)\.", alone, re.MULTILINE)) > 0


ONE_OF_A_KERNEL = "matmul_all_reduce spinlock"


@packaged
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.soak if name.startswith("matmul_all_reduce") else ())
        for name in iris_cases.OPS
        if "," not in name and name != ONE_OF_A_KERNEL
    ]
    + [ONE_OF_A_KERNEL],
)
def test_ops(name: str, no_cubin: None) -> None:
    """The calls that the simulator runs."""
    case = iris_cases.ops(name)
    program = iris_lowering.lowered(case.launches, case.world)
    assert program.count(TRITON_CALL) == iris_lowering.launched(case.launches) == 3


def lower_words(cases: list[iris_words.Case]) -> None:
    program = iris_lowering.lowered([case.launch for case in cases], iris_words.WORLD_SIZE)
    assert program.count(TRITON_CALL) == 2 + len(cases)


@packaged
def test_device_functions(no_cubin: None) -> None:
    """One of the calls that Iris's unit tests make of each, in one program."""
    of = {name: [case for case in iris_words.cases() if case.function == name] for name in iris_words.FUNCTIONS}
    lower_words([cases[len(cases) // 2] for cases in of.values()])


@packaged
@pytest.mark.soak
@pytest.mark.parametrize("function", iris_words.FUNCTIONS)
def test_device_functions_as_iris_tests_them(function: str) -> None:
    """All of them, assembled."""
    lower_words([case for case in iris_words.cases() if case.function == function])


SCATTER = """
import triton
import triton.language as tl
import iris


@triton.jit
def scatter(x, out, heap_bases, rank, world: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    for peer in range(world):
        iris.store(out + rank * SIZE + at, tl.load(x + at), rank, peer, heap_bases)
"""


@packaged
def test_our_functions_move_16_bytes_at_a_time(mesh: Mesh, tmp_path: Path, no_cubin: None) -> None:
    """An address that moves by a multiple of 16 bytes stays aligned, as the compiler sees; Iris's does not."""
    (tmp_path / "scatter.py").write_text(SCATTER)
    width = {}
    for own in (True, False):
        kernel = iris.kernels_of(tmp_path / "scatter.py", own=own).scatter

        def call(x: jax.Array, kernel: Any = kernel) -> jax.Array:
            numbers = {"heap_bases": iris.BASES, "rank": iris.RANK, "world": iris.WORLD, "SIZE": x.size}
            out = iris.symmetric((2, x.size), x.dtype, result=True)
            return jtf.iris_call(kernel, axis_name="tp", grid=1, x=x, out=out, **numbers)

        _, code, _ = codes_of(lower(mesh, call, (P("tp"), (2 * 1024,), "float16")))
        width[own] = set(re.findall(r"st\.global\.(v4\.b32|b16)", code))
    assert width == {True: {"v4.b32"}, False: {"b16"}}


def codes_of(program: str) -> list[str]:
    """The PTX of each kernel that a program launches."""
    lines = [line for line in program.splitlines() if TRITON_CALL in line]
    return [launch_of(line)[PTX].decode() for line in lines]


@packaged
@checked_out
def test_a_wait_that_was_made_to_last_is_in_the_code(mesh: Mesh, no_cubin: None) -> None:
    call = functools.partial(iris_kernels.gather_matmul_push, axis_name="tp", **FEW)
    _, _, multiply = codes_of(lower(mesh, call, *MATRICES, out=COLUMNS))
    assert "ld.relaxed.sys.global" in multiply and "fence.acquire.sys" in multiply


@packaged
@checked_out
def test_a_wait_that_does_not_last_is_refused(mesh: Mesh) -> None:
    kernel = iris_kernels.example("14_all_gather_gemm/all_gather_gemm_push.py", "gemm_push_kernel")
    found = iris.reading.problems(kernel)
    assert [re.search(r"push.py:(\d+) waits by `(.*?)`", each).groups() for each in found] == [
        (line, "tl.load(flag_ptr, cache_modifier='.ca')") for line in ("155", "181")
    ]


@packaged
@checked_out
@own_or_iris
def test_an_example_in_the_simulator(own: bool) -> None:
    mesh = mesh_of(2)
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((32, 64), (64, 64)))
    call = functools.partial(
        iris_kernels.gather_matmul_pull,
        axis_name="tp",
        blocks=(16, 16, 16),
        programs=2,
        own=own,
        implementation="simulate",
    )
    program = one_program(call, mesh=mesh, in_specs=COLUMNS, out_specs=COLUMNS, check_vma=False)
    for policy in ("random", "ahead"):
        with simulator.simulating(policy=policy):
            for _ in range(3):
                np.testing.assert_array_equal(program(x, y), x @ y)
