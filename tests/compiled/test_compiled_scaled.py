"""What the compiler makes of kernels whose operands have 8 bits and scales, read from the PTX: no GPU needed."""

import functools
import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxtaxfree import all_gather_matmul
from tests.compiled.test_compiled import ptxas_report, spilled_bytes
from tests.compiled.test_compiled_hopper import products_that_do_not_overlap
from tests.compiled.test_gluon import NAME, PTX, launches_of
from tests.compiled.test_gluon import SHARED_MEMORY as SHARED
from tests.helpers.support import Compiled, lower_for_cuda, mesh_of, sharded

pytestmark = pytest.mark.usefixtures("no_cubin")


@functools.cache
def compiled(dtype: str, other: str, blocks: bool) -> Compiled:
    """The kernel for 8192 x 8192 x 8192 on four ranks, with scales of rows and columns or of blocks."""
    mesh, rows, columns = mesh_of(4), P("tp"), P(None, "tp")

    def call(lhs: jax.Array, rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array) -> jax.Array:
        scales = {"lhs_scale": lhs_scale, "rhs_scale": rhs_scale, "rhs_transposed": True}
        return all_gather_matmul(lhs, rhs, "tp", implementation="fused", config={"kernel": "hopper"}, **scales)

    arrays = [
        sharded(mesh, rows, (8192, 8192), dtype),
        sharded(mesh, rows, (8192, 8192), other),
        sharded(mesh, rows, (8192, 64 if blocks else 1), "float32"),
        sharded(mesh, rows, (64, 64) if blocks else (8192, 1), "float32"),
    ]
    program = jax.shard_map(call, mesh=mesh, in_specs=(rows,) * 4, out_specs=columns, check_vma=False)
    *_, kernel = launches_of(lower_for_cuda(program, *arrays))  # behind the gather of the scales
    assert kernel[NAME].decode() == "all_gather_matmul_hopper_kernel"
    ptx = kernel[PTX].decode()
    return Compiled(ptx, kernel[SHARED], (), {})


CASES = (
    ("float8_e4m3fn", "float8_e4m3fn", False),
    ("float8_e4m3fn", "float8_e4m3fn", True),
    ("int8", "int8", False),
    ("int8", "int8", True),
    ("float8_e5m2", "float8_e4m3fn", False),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tensor_cores_multiply_eight_bits(case: tuple[str, str, bool]) -> None:
    code = compiled(*case)
    ptx = code.ptx
    names = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "s8"}
    sums = "s32" if case[0] == "int8" else "f32"
    found = set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+k\d+)\.(\w+)\.(\w+)\.(\w+)", ptx))
    assert found == {(f"m64n{n}k32", sums, names[case[0]], names[case[1]]) for n in (64, 128)}
    report = ptxas_report(code)
    # With scales of blocks one address is put aside, outside of the loop over K.
    assert spilled_bytes(report) <= (32 if case[2] else 0), report
    assert products_that_do_not_overlap(report) == []
