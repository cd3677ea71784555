"""What the compiler makes of the kernel that reduces products of few rows on Hopper, read from PTX: no GPU needed."""

import functools
import re
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxtaxfree import matmul_all_reduce, matmul_reduce_scatter
from jaxtaxfree.ops import matmul_all_reduce as reduce_ops
from jaxtaxfree.ops import matmul_reduce_scatter as scatter_ops
from jaxtaxfree.ops import register
from tests.compiled.test_compiled import publishes_out_of_order, waits_that_do_not_wait
from tests.compiled.test_compiled_attention import polling_loops, widths
from tests.compiled.test_compiled_hopper_few import before_the_partitions, check_code, requests
from tests.compiled.test_gluon import PTX, launch_of
from tests.helpers.compiling import names
from tests.helpers.support import chosen, fails, lower_for_cuda, mesh_of, product_call, sharded

pytestmark = pytest.mark.usefixtures("no_cubin")

KERNEL = b"matmul_reduce_hopper_few_kernel"
# Rows in all, sizes and dtypes of the operation, of the reduce-scatter if `scattered`; `settings` of its kernel.
CASES: dict[str, dict[str, Any]] = {
    "scattered-16-rows": {"scattered": True},
    "scattered-16-rows-rounded": {"scattered": True, "settings": {"exact_wire": False}},
    "scattered-128-rows": {"scattered": True, "m": 128},
    "scattered-128-rows-2-ranks": {"scattered": True, "m": 128, "world": 2},
    "scattered-128-rows-epilogue": {"scattered": True, "m": 128, "epilogue": True},
    "scattered-odd": {"scattered": True, "m": 20, "k": 4 * 136, "n": 776, "dtype": "float16"},
    "scattered-8-ranks": {"scattered": True, "m": 64, "world": 8, "result": "float32"},
    "scattered-wide": {"scattered": True, "n": 28672},
    "1-row": {"m": 1},
    "16-rows": {},
    "16-rows-two-shots": {"settings": {"shots": 2}},
    "16-rows-2-ranks": {"world": 2},
    "64-rows": {"m": 64},
    "128-rows": {"m": 128},
    "132-rows": {"m": 132},
    "160-rows-2-ranks": {"m": 160, "world": 2, "epilogue": True},
    "192-rows-exact": {"m": 192, "settings": {"exact_wire": True}},
    "scattered-144-rows-epilogue": {"scattered": True, "m": 144, "epilogue": True},
    "scattered-192-rows-2-ranks": {"scattered": True, "m": 192, "world": 2},
    "256-rows": {"m": 256},
    "256-rows-epilogue": {"m": 256, "epilogue": True},
    "256-rows-2-ranks": {"m": 256, "world": 2},
    "scattered-256-rows": {"scattered": True, "m": 256},
    "scattered-256-rows-2-ranks": {"scattered": True, "m": 256, "world": 2, "epilogue": True},
    "scattered-256-rows-exact": {"scattered": True, "m": 256, "settings": {"exact_wire": True}},
    "128-rows-exact": {"m": 128, "settings": {"exact_wire": True}},
    "128-rows-2-ranks": {"m": 128, "world": 2},
    "128-rows-8-ranks": {"m": 128, "world": 8},
    "128-rows-epilogue": {"m": 128, "epilogue": True},
    "16-rows-epilogue": {"epilogue": True},
    "wide-epilogue": {"m": 128, "n": 16384, "epilogue": True},
    "512-rows": {"m": 512},
    "512-rows-epilogue": {"m": 512, "world": 2, "epilogue": True},
    "384-rows-few-columns": {"m": 384, "n": 1280},
    "scattered-512-rows": {"scattered": True, "m": 512},
    "scattered-512-rows-8-ranks-epilogue": {"scattered": True, "m": 512, "world": 8, "epilogue": True},
    "scattered-384-rows-2-ranks": {"scattered": True, "m": 384, "n": 4096, "world": 2},
    "16-rows-transposed": {"transposed": True},
    "scattered-144-rows-transposed": {"scattered": True, "m": 144, "transposed": True},
    "16-rows-int8-weights": {"transposed": True, "weights": "int8"},
    "scattered-144-rows-e4m3-weights-blocks": {
        **{"scattered": True, "m": 144, "transposed": True, "weights": "float8_e4m3fn", "blocks": True}
    },
    "16-rows-more-tiles": {"n": 18432},
    "128-rows-more-tiles-epilogue": {"m": 128, "n": 18432, "epilogue": True},
    "256-rows-more-tiles": {"m": 256, "n": 18432},
    "scattered-512-rows-more-tiles-epilogue": {"scattered": True, "m": 512, "n": 12288, "epilogue": True},
    "odd": {"m": 13, "k": 4 * 136, "n": 776, "dtype": "float16", "result": "float32", "epilogue": True},
    "wide": {"m": 128, "n": 28672},
}


def lowered(**given: Any) -> str:
    """The program of a call of these sizes as of the whole."""
    case = {"world": 4, "m": 16, "k": 28672, "n": 8192, "dtype": "bfloat16", **given}
    world, m, k, n, dtype = (case[name] for name in ("world", "m", "k", "n", "dtype"))
    scattered, mesh = case.get("scattered"), mesh_of(world)
    settings = {"kernel": "hopper_few", **case.get("settings", {})}
    operation = matmul_reduce_scatter if scattered else matmul_all_reduce
    out_spec = P("tp") if scattered else P()
    in_specs, shapes, names = (P(None, "tp"), P("tp")), ((m, k), (k, n)), ()
    dtypes = [dtype] * 4
    if case.get("transposed"):
        in_specs, shapes = (P(None, "tp"), P(None, "tp")), ((m, k), (n, k))
    if "weights" in case:
        dtypes[1:3], names = [case["weights"], "float32"], ("rhs_scale",)
        in_specs = (*in_specs, P(None, "tp") if case.get("blocks") else P())
        shapes = (*shapes, (n // 128, k // 128) if case.get("blocks") else (n, 1))
    if case.get("epilogue"):
        in_specs, shapes, names = (*in_specs, P(), out_spec), (*shapes, (n,), (m, n)), ("bias", "residual")

    def local(lhs: jax.Array, rhs: jax.Array, *others: jax.Array) -> Any:
        keywords = {
            "preferred_element_type": case.get("result"),
            "activation": "gelu_tanh" if "bias" in names else None,
        }
        keywords |= {"rhs_transposed": case.get("transposed", False)}
        call = functools.partial(operation, lhs, rhs, "tp", implementation="fused", config=settings)
        return call(**keywords, **dict(zip(names, others)))

    program = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_spec, check_vma=False)
    return lower_for_cuda(program, *(sharded(mesh, *each) for each in zip(in_specs, shapes, dtypes)))


LIKE_OTHERS = (
    *("16-rows-2-ranks", "16-rows-epilogue", "64-rows", "128-rows-2-ranks", "128-rows-8-ranks", "128-rows-exact"),
    *("132-rows", "256-rows-2-ranks", "256-rows-more-tiles", "512-rows", "scattered-128-rows-2-ranks"),
    *("scattered-192-rows-2-ranks", "scattered-256-rows", "scattered-256-rows-exact", "scattered-512-rows"),
    *("scattered-128-rows", "scattered-384-rows-2-ranks", "16-rows-more-tiles", "128-rows-epilogue"),
    *("160-rows-2-ranks", "256-rows", "wide"),
    *("scattered-256-rows-2-ranks", "256-rows-epilogue", "128-rows-more-tiles-epilogue", "scattered-144-rows-epilogue"),
    "scattered-144-rows-e4m3-weights-blocks",
)


@names(CASES, LIKE_OTHERS)
def test_code(name: str) -> None:
    case = CASES[name]
    rows = case.get("m", 16)
    columns = case.get("n", 8192)
    wide = rows > 128 or columns > 64 * 132 or "weights" in case
    program = check_code(lowered(**case), KERNEL, rows=rows, wide=wide)
    tiles = -(-rows // 256) * -(-columns // (128 if wide else 64))
    if tiles <= (66 if rows > 64 else 40) or "more-tiles" in name or "weights" in case:
        # Programs that share a tile signal that its sums are there.
        assert waits_that_do_not_wait(program, 1) == []
        assert publishes_out_of_order(program) == []
    else:
        # Words alone say that they have come: nothing is released or acquired before what is missing is reported.
        assert not any(s.starts("membar", "fence") and not s.has("proxy") for s in program)
        assert not any("ld.acquire" in s.text for s in program)
    if "weights" in case:
        # Products take weights from registers, which nobody may write before they have ended.
        assert {s.text.split()[-1].strip(";") for s in program if s.starts("wgmma.wait_group")} == {"0"}
    stores, polls = widths(program, "st."), widths(program, "ld.")
    assert set(stores) | set(polls) == {16}
    assert polling_loops(program) >= 1


def test_weights_are_on_their_way_before_a_wait() -> None:
    before = before_the_partitions(lowered())
    assert requests(before) == 8 and "ld.relaxed" not in before


def test_no_barrier_is_of_all_warps() -> None:
    """But those of the partitions themselves: other ones would wait for the warp that loads."""
    ptx = launch_of(lowered(m=128))[PTX].decode()
    assert re.findall(r"\bbarrier\.(?!sync\s+1;)\S+", ptx) == []
    assert set(re.findall(r"\bbar\.sync\s+(.*?);", ptx)) == {"0, 128"}


def test_the_shapes_of_the_benchmarks_are_compiled() -> None:
    for name, scattered in (("matmul_reduce_scatter", True), ("matmul_all_reduce", None)):
        rows = {case.get("m", 16) for case in CASES.values() if case.get("scattered") == scattered}
        assert {shape.m for shape in register.OPERATIONS[name].shapes if shape.m <= 128} <= rows


def is_chosen(scattered: bool, *, m: int = 16, k: int = 1024, n: int = 1024, **given: Any) -> bool:
    """Whether such a call of 4 ranks is the kernel's, if nobody says what kernel it is for."""
    module = scatter_ops if scattered else reduce_ops
    return chosen(module, product_call(module, m, k, n, world=4, **given)).variant.name == "hopper_few"


@pytest.mark.parametrize("scattered", (False, True))
@pytest.mark.parametrize(
    ("changed", "taken"),
    (
        ({}, True),
        ({"m": 128}, True),
        ({"m": 260}, True),
        ({"m": 512}, True),
        ({"m": 512, "n": 8192}, False),  # as many tiles of 128 by 128 as fill two waves
        ({"m": 516}, False),
        ({"dtype": "float32"}, False),
        ({"k": 1028}, False),
        ({"n": 1028}, False),
        ({"n": 18432}, True),
        ({"compute_capability": 80}, False),
        ({"compute_capability": 100}, False),
    ),
    ids=str,
)
def test_where_the_kernel_is_the_default(changed: dict, taken: bool, scattered: bool) -> None:
    assert is_chosen(scattered, **changed) == taken


def test_of_more_rows_a_scatter_has_another_kernel() -> None:
    calls = [product_call(scatter_ops, 2 * m, 1024, 8192, world=2) for m in (64, 128, 192, 256, 257)]
    found = [chosen(scatter_ops, call).variant.name for call in calls]
    assert found == ["hopper_few", "hopper_few", "hopper_few", "hopper", "hopper"]


@pytest.mark.parametrize("scattered", (False, True))
def test_all_reasons_why_it_cannot_run(scattered: bool) -> None:
    parts = ("float16 and bfloat16, not float32", "1028 elements")
    operation = "matmul_reduce_scatter" if scattered else "matmul_all_reduce"
    settings = {"block_m": 16, "block_n": 64, "num_warps": 4}
    with fails(NotImplementedError, f"{operation} ('hopper_few')", *parts):
        lowered(scattered=scattered, m=64, k=4096, n=1028, dtype="float32", settings=settings)
