"""What the compiler makes of all_gather_matmul's kernel for few rows on Hopper, read from the PTX: no GPU needed."""

import re
from typing import Any

import jax
import pytest
import triton
from jax.sharding import PartitionSpec as P

from jaxtaxfree import all_gather_matmul
from jaxtaxfree.ops import all_gather_matmul as gather_ops
from jaxtaxfree.ops.blocks.hopper_few import MULTIPROCESSORS
from jaxtaxfree.ops.epilogue import NONE, Epilogue
from tests.compiled.test_compiled import (
    SHARED_MEMORY,
    Statement,
    local_memory,
    narrow_remote_stores,
    parse,
    ptxas_report,
    publishes_out_of_order,
    spilled_bytes,
    waits_that_do_not_wait,
)
from tests.compiled.test_compiled_hopper import products_that_do_not_overlap, stages_released_for_ever
from tests.compiled.test_gluon import NAME, PTX, WARPS, launch_of
from tests.compiled.test_gluon import SHARED_MEMORY as SHARED
from tests.helpers.compiling import names
from tests.helpers.support import Compiled, by_shape, chosen, fails, lower_for_cuda, mesh_of, product_call, sharded

pytestmark = pytest.mark.usefixtures("no_cubin")

KERNEL = b"all_gather_matmul_hopper_few_kernel"
# Sizes and keywords of the operation; of gate, bias and residual whether there is one.
CASES: dict[str, dict[str, Any]] = {
    "16-rows": {},
    "128-rows": {"m": 128},
    "8-ranks": {"m": 64, "world": 8},
    "2-rows": {"m": 2, "world": 2},
    "odd": {"m": 60, "k": 136, "n": 4 * 40, "dtype": "float16"},
    "float32-result": {"preferred_element_type": "float32"},
    "pair": {"gate": True, "activation": "silu"},
    "128-rows-pair": {"m": 128, "gate": True, "bias": True, "activation": "gelu_exact", "residual": True},
    "256-rows-pair": {"m": 256, "gate": True, "bias": True, "activation": "gelu_exact", "residual": True},
    "128-rows-epilogue": {"m": 128, "bias": True, "activation": "gelu_tanh", "residual": True},
    "132-rows": {"m": 132},
    "144-rows-pair": {"m": 144, "gate": True, "bias": True, "activation": "gelu_exact", "residual": True},
    "160-rows-2-ranks": {"m": 160, "world": 2},
    "192-rows-epilogue": {"m": 192, "bias": True, "activation": "gelu_exact", "residual": True},
    "192-rows-float32": {"m": 192, "preferred_element_type": "float32"},
    "256-rows": {"m": 256},
    "256-rows-epilogue": {"m": 256, "bias": True, "activation": "gelu_exact", "residual": True},
    "256-rows-float32": {"m": 256, "preferred_element_type": "float32"},
    "256-rows-2-ranks": {"m": 256, "world": 2},
    "256-rows-8-ranks": {"m": 256, "world": 8},
    "512-rows": {"m": 512, "n": 4 * 3584, "world": 8},
    "512-rows-few-columns": {"m": 512, "world": 2, "n": 2 * 1280},
    "384-rows-pair": {"m": 384, "n": 4 * 3584, "gate": True, "activation": "silu"},
    "384-rows-epilogue": {"m": 384, "n": 4 * 3584, "bias": True, "activation": "gelu_exact", "residual": True},
    "300-rows-more-tiles": {"m": 300, "world": 2, "n": 2 * 8960},
    "440-rows-more-tiles-pair": {"m": 440, "world": 2, "n": 2 * 4480, "gate": True, "activation": "silu"},
    "2-ranks": {"world": 2},
    "144-rows-transposed": {"m": 144, "rhs_transposed": True},
    "2-ranks-128-rows-float32": {"world": 2, "m": 128, "residual": True, "preferred_element_type": "float32"},
}
SPECS = {"gate": P(None, "tp"), "bias": P("tp"), "residual": P(None, "tp")}


def lowered(**given: Any) -> str:
    """The program of a call of these sizes as of the whole."""
    call = {"world": 4, "m": 16, "k": 8192, "n": 28672, "dtype": "bfloat16", **given}
    world, m, k, n, dtype = (call.pop(name) for name in ("world", "m", "k", "n", "dtype"))
    names = [name for name in SPECS if call.pop(name, False)]
    mesh = mesh_of(world)
    shapes = {"gate": (k, n), "bias": (n,), "residual": (m, n)}
    turned = call.get("rhs_transposed")
    in_specs = (P("tp"), P("tp") if turned else P(None, "tp"), *(SPECS[name] for name in names))

    def local(lhs: jax.Array, rhs: jax.Array, *others: jax.Array) -> Any:
        return all_gather_matmul(lhs, rhs, "tp", implementation="fused", **dict(zip(names, others)), **call)

    out_specs = (P(None, "tp"), P()) if call.get("return_gathered") else P(None, "tp")
    program = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    sizes = ((m, k), (n, k) if turned else (k, n), *(shapes[name] for name in names))
    return lower_for_cuda(program, *(sharded(mesh, spec, size, dtype) for spec, size in zip(in_specs, sizes)))


def with_barriers_of_a_warp(ptx: str) -> str:
    """The code with ordinary barriers where a partition of one warp has those of a warp."""
    ptx = re.sub(r"bar\.warp\.sync\s+-1;", "bar.sync 9;", ptx)
    # That of a poll is one where its result goes to no other warp.
    alone = r"bar\.warp\.sync 0xffffffff;(\s*\}(?:.*\n){1,12}?\s*redux\.sync.*\n(?:\s*(?:\.loc|\$L__tmp).*\n)*\s*setp)"
    return re.sub(alone, r"bar.sync 9;\1", ptx)


def check_code(text: str, name: bytes, *, rows: int, wide: bool) -> list[Statement]:
    """Checks what kernels for few rows on Hopper have in common, and gives the code.

    Args:
      text: a program with one launch.
      name: of the kernel.
      rows: of all ranks.
      wide: whether more warps multiply wider tiles: narrow ones are more than a GPU runs at a time, or rows are
        many, or there is a gate.
    """
    kernel = launch_of(text)
    code = Compiled(kernel[PTX].decode(), kernel[SHARED], (), {})
    program = parse(with_barriers_of_a_warp(code.ptx))
    assert kernel[NAME] == name
    assert kernel[WARPS] == (12 if wide else 8)
    assert code.shared <= SHARED_MEMORY[90]
    assert stages_released_for_ever(program) == []
    assert local_memory(code.ptx) == []
    report = ptxas_report(code)
    assert spilled_bytes(report) == 0
    assert products_that_do_not_overlap(report) == []
    products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32", code.ptx)
    each = -(-rows // -(-rows // 256))
    # In two parts where that is less than 256 rows.
    expected = (
        {128, max(16, triton.next_power_of_2(each - 128))} if 128 < each <= 192 else {triton.next_power_of_2(each)}
    )
    assert {int(found) for found in products} == {max(8, size) for size in expected}
    return program


def before_the_partitions(text: str) -> str:
    """What the code does from the first mbarrier on, until warps take roles."""
    return re.search(r"mbarrier\.init.*?barrier\.sync\s+1;", launch_of(text)[PTX].decode(), re.DOTALL)[0]


def requests(ptx: str) -> int:
    """How many loads by TMA there are in the code."""
    return len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared", ptx))


LIKE_OTHERS = (
    *("pair", "128-rows-epilogue", "160-rows-2-ranks", "192-rows-epilogue", "192-rows-float32"),
    *("256-rows", "256-rows-2-ranks", "256-rows-8-ranks", "512-rows", "2-ranks", "float32-result"),
    *("128-rows-pair", "256-rows-pair", "384-rows-pair", "256-rows-float32", "384-rows-epilogue"),
)


@names(CASES, LIKE_OTHERS)
def test_code(name: str) -> None:
    case = CASES[name]
    rows = case.get("m", 16)
    program = check_code(
        lowered(**case), KERNEL, rows=rows, wide=case.get("world") == 2 or rows > 128 or "gate" in case
    )
    assert waits_that_do_not_wait(program, 1, of_a_warp=rows <= 16) == []
    assert publishes_out_of_order(program) == []
    assert narrow_remote_stores(program) == []


def test_weights_are_on_their_way_before_a_wait() -> None:
    before = before_the_partitions(lowered())
    assert requests(before) == 8 and "ld.acquire" not in before


@pytest.mark.parametrize(
    ("changed", "hopper"),
    (
        ({"m": 128}, True),
        ({"m": 256}, True),
        ({"m": 260}, True),
        ({"m": 512}, True),
        ({"m": 516}, False),
        ({"m": 256, "gate": True}, True),
        ({"dtype": "float32"}, False),
        ({"k": 132}, False),
        ({"n": 4 * 100}, False),
        ({"return_gathered": True}, False),
        ({"activation": "silu", "residual": True}, True),
        ({"compute_capability": 80}, False),
        ({"compute_capability": 100}, False),
    ),
    ids=str,
)
@pytest.mark.usefixtures("no_code")
def test_the_kernel_is_chosen_by_shape(changed: dict, hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"k": 1024, "n": 1024, "compute_capability": 90, **changed}
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", str(call.pop("compute_capability")))
    assert (launch_of(lowered(**call))[NAME] == KERNEL) == hopper


@pytest.mark.covers(3)
@pytest.mark.parametrize("rows", (2, 16, 64, 128, 256))
@pytest.mark.parametrize("n", (8, 640, 1280, 3584, 7168, 8192, 28672))
@pytest.mark.parametrize("gated", (False, True))
def test_programs_of_its_configuration(rows: int, n: int, gated: bool) -> None:
    """Where there are fewer tiles than multiprocessors some share one, and all run at once, and those that send."""
    epilogue = Epilogue("silu", ("gate",)) if gated else NONE
    config = by_shape(gather_ops, "hopper_few", product_call(gather_ops, rows, 1024, n, world=2, epilogue=epilogue))
    tiles = -(-n // config.block_n)
    assert config.splits == 1 or config.pushers + tiles * config.splits <= MULTIPROCESSORS
    more = 16 + 2 * tiles * config.splits
    assert config.splits == 8 or more > MULTIPROCESSORS or (rows <= 64 and tiles > 40)
    # As many groups of them send as programs begin at different parts of K.
    assert config.pushers % config.splits == 0 and config.part * config.splits <= 8192


@pytest.mark.parametrize(
    ("rows", "n", "world", "slower"),
    (
        (300, 14336, 2, True),
        (300, 14336, 4, False),  # not measured
        (300, 7168, 2, False),  # a single wave
        (384, 14336, 2, False),
        (384, 8960, 2, True),
        (512, 12288, 2, False),
        (256, 14336, 2, False),
    ),
)
def test_xla_is_taken_for_waves_that_are_not_full(rows: int, n: int, world: int, slower: bool) -> None:
    call = product_call(gather_ops, rows, 1024, n, world=world)
    found = chosen(gather_ops, call)
    why = found.variant.slower(call, found.config)
    assert bool(why) == slower
    assert not slower or f"of {rows} rows need several waves" in why


@pytest.mark.parametrize(
    ("rows", "n", "world", "few"),
    (
        (512, 1280, 2, True),
        (512, 7168, 2, False),
        (512, 7168, 8, True),  # of 64 rows a rank the tiles of the other kernel are half empty
        (384, 3584, 2, True),
        (384, 14336, 2, True),
        (514, 1280, 2, False),
    ),
)
def test_the_kernel_whose_waves_take_less_time(rows: int, n: int, world: int, few: bool) -> None:
    found = chosen(gather_ops, product_call(gather_ops, rows, 1024, n, world=world))
    assert found.variant.name == ("hopper_few" if few else "hopper")


@pytest.mark.usefixtures("no_code")
def test_unknown_versions_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    assert launch_of(lowered(k=1024, n=1024))[NAME] == b"all_gather_matmul_few_kernel"


def test_all_reasons_why_it_cannot_run() -> None:
    parts = ("float16 and bfloat16, not float32", "not return the gathered rows")
    with fails(NotImplementedError, "all_gather_matmul ('hopper_few')", *parts):
        config = {"kernel": "hopper_few", "block_m": 16, "block_n": 64, "num_warps": 4}
        lowered(m=64, k=1024, n=1024, dtype="float32", return_gathered=True, config=config)


@pytest.mark.covers(3)
@pytest.mark.parametrize("world", (2, 4, 8))
@pytest.mark.parametrize("n", (1024, 4096))
@pytest.mark.parametrize("k", (512, 8192))
def test_every_pusher_has_something_to_send(world: int, k: int, n: int) -> None:
    """Behind its first load it finds out whether the region is there, without which it must not signal."""
    for m in range(1, 256 // world + 1):
        call = product_call(gather_ops, world * m, k, n, world=world)
        keywords = chosen(gather_ops, call, kernel="hopper_few").keywords
        others = keywords["PUSHERS"] // keywords["GROUPS"] - 1
        assert keywords["PUSHERS"] % keywords["GROUPS"] == 0
        assert others * keywords["CHUNK"] < m * keywords["PART"], (m, keywords)
