"""What the compiler makes of kernels whose operands have 8 bits and scales, read from the PTX: no GPU needed."""

import functools
import re
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxtaxfree import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from tests.compiled.test_compiled import ptxas_report, spilled_bytes
from tests.compiled.test_compiled_hopper import products_that_do_not_overlap
from tests.compiled.test_gluon import NAME, PTX, launches_of
from tests.compiled.test_gluon import SHARED_MEMORY as SHARED
from tests.helpers.support import Compiled, lower_for_cuda, mesh_of, sharded, soak

pytestmark = pytest.mark.usefixtures("no_cubin")

OPERATIONS = {each.__name__: each for each in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)}


@functools.cache
def compiled(dtype: str, other: str, blocks: bool, operation: str = "all_gather_matmul", **settings: int) -> Compiled:
    """The kernel for 8192 x 8192 x 8192 on four ranks, with scales of rows and columns or of blocks; or "gated"."""
    mesh, rows, columns, gated = mesh_of(4), P("tp"), P(None, "tp"), operation == "gated"
    operation = "all_gather_matmul" if gated else operation
    gathers = operation == "all_gather_matmul"
    specs = (rows,) * 4 if gathers else (columns, columns, *((columns, columns) if blocks else (P(), P())))
    out_specs = {"all_gather_matmul": columns, "matmul_reduce_scatter": rows, "matmul_all_reduce": P()}[operation]

    def call(lhs: jax.Array, rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array) -> jax.Array:
        scales = {"lhs_scale": lhs_scale, "rhs_scale": rhs_scale, "rhs_transposed": True}
        scales |= {"gate": rhs, "gate_scale": rhs_scale, "activation": "silu"} if gated else {}
        how: Any = {"implementation": "fused", "config": {"kernel": "hopper"} | settings}
        return OPERATIONS[operation](lhs, rhs, "tp", **how, **scales)

    arrays = [
        sharded(mesh, specs[0], (8192, 8192), dtype),
        sharded(mesh, specs[1], (8192, 8192), other),
        sharded(mesh, specs[2], (8192, 64 if blocks else 1), "float32"),
        sharded(mesh, specs[3], (64, 64) if blocks else (8192, 1), "float32"),
    ]
    program = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    *_, kernel = launches_of(lower_for_cuda(program, *arrays))  # behind the gather of the scales
    assert kernel[NAME].decode() == f"{operation}_hopper_kernel"
    ptx = kernel[PTX].decode()
    return Compiled(ptx, kernel[SHARED], (), {})


CASES = (
    ("float8_e4m3fn", "float8_e4m3fn", False),
    ("float8_e4m3fn", "float8_e4m3fn", True),
    ("int8", "int8", False),
    ("float8_e5m2", "float8_e4m3fn", False),
    ("float8_e4m3fn", "float8_e4m3fn", True, "matmul_reduce_scatter"),
    ("int8", "int8", True, "matmul_all_reduce"),
    ("float8_e4m3fn", "float8_e4m3fn", True, "gated"),
)
LIKE_OTHERS = (
    ("int8", "int8", True),
    ("float8_e4m3fn", "float8_e4m3fn", False, "matmul_reduce_scatter"),
    ("int8", "int8", False, "matmul_reduce_scatter"),
    ("float8_e4m3fn", "float8_e4m3fn", False, "matmul_all_reduce"),
    ("float8_e4m3fn", "float8_e4m3fn", True, "matmul_all_reduce"),
    ("int8", "int8", False, "gated"),
)


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.soak) for case in LIKE_OTHERS)], ids=str
)
def test_tensor_cores_multiply_eight_bits(case: tuple) -> None:
    code = compiled(*case)
    ptx = code.ptx
    names = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "s8"}
    sums = "s32" if case[0] == "int8" else "f32"
    found = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)\.(\w+)\.(\w+)\.(\w+)", ptx))
    gathers = len(case) == 3 or case[3] == "gated"
    # Wide tiles are multiplied by halves of 128 columns.
    assert found == {("m64n128k32", sums, names[case[0]], names[case[1]])}
    report = ptxas_report(code)
    # Where the tile is wide, or scales are of blocks, some registers are put aside: of stack, stores and loads.
    assert spilled_bytes(report) <= (288 if gathers else 0 if case[2] else 640), report
    assert products_that_do_not_overlap(report) == []


def test_narrow_tiles_of_a_gather_have_half_ones_too() -> None:
    code = compiled("float8_e4m3fn", "float8_e4m3fn", True, block_n=128, num_stages=6)
    assert set(re.findall(r"m64n(\d+)k32\.f32\.e4m3\.e4m3", code.ptx)) == {"64", "128"}
    report = ptxas_report(code)
    assert spilled_bytes(report) <= 160, report
    assert products_that_do_not_overlap(report) == []


@pytest.mark.parametrize(
    "operation, wide",
    [("all_gather_matmul", True), *soak(("matmul_reduce_scatter", True), ("all_gather_matmul", False))],
)
def test_fast_sums_stay_in_the_tensor_cores(operation: str, wide: bool) -> None:
    """An instruction has all columns, as of 16 bits, and the next step is multiplied meanwhile."""
    tile = {"block_n": 256, "num_stages": 4} if wide else {"block_n": 128, "num_stages": 6}
    code = compiled("float8_e4m3fn", "float8_e4m3fn", False, operation, fast_sums=True, **tile)
    whole = 256 if wide else 128
    found = set(re.findall(r"m64n(\d+)k32\.f32\.e4m3\.e4m3", code.ptx))
    gathers = operation == "all_gather_matmul"
    assert found == ({str(whole), str(whole // 2)} if gathers else {str(whole)})  # a gather has half tiles, too
    report = ptxas_report(code)
    assert spilled_bytes(report) <= (0 if gathers else 400), report
    assert products_that_do_not_overlap(report) == []


@pytest.mark.soak
def test_wide_tiles_of_a_reduction_hold_scales_of_blocks() -> None:
    code = compiled("float8_e4m3fn", "float8_e4m3fn", True, "matmul_all_reduce", block_n=256, num_stages=4, chunk=1024)
    assert "m64n128k32.f32.e4m3.e4m3" in code.ptx
    report = ptxas_report(code)
    assert spilled_bytes(report) <= 640, report
    assert products_that_do_not_overlap(report) == []


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_weights_alone_that_blocks_do_not_divide(dtype):
    """Behind the last row there are zeros, which a number of 8 bits has to be made of."""
    shape = jax.ShapeDtypeStruct

    def call(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        how: Any = {"rhs_transposed": True, "implementation": "fused", "config": {"kernel": "few"}}
        return all_gather_matmul(x, w, (), rhs_scale=scale, **how)

    program = jax.shard_map(call, mesh=mesh_of(1), in_specs=P(), out_specs=P(), check_vma=False)
    operands = shape((2, 512), "bfloat16"), shape((1002, 512), dtype), shape((1002, 1), "float32")
    assert len(launches_of(lower_for_cuda(program, *operands))) == 1
