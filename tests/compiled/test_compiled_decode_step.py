"""What the compiler makes of decode_step's kernel on Hopper, read from the PTX: no GPU needed."""

import functools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxtaxfree import DecoderSpec, decode_step, shmem
from jaxtaxfree.kernels import shmem as device
from jaxtaxfree.kernels.decode_step import ring as rings
from tests.compiled.test_compiled import SHARED_MEMORY, local_memory, ptxas_report, spilled_bytes
from tests.compiled.test_gluon import NAME, PTX, WARPS, launch_of
from tests.compiled.test_gluon import SHARED_MEMORY as SHARED
from tests.helpers.support import Compiled, lower_for_cuda, mesh_of, sharded, soak

SLOTS = 8192
CACHE = P(None, None, "tp")
# Llama 3 8B's share of eight GPUs, of two of them.
SHARE_OF_8B = DecoderSpec(layers=8, d_model=4096, heads=8, kv_heads=2, head_dim=128, d_mlp=3584, vocab=32064)


def lowered(
    model: DecoderSpec, world: int, batch: int, eight: str | None = None, of_cache: str | None = None, page: int = 0,
    **config: Any,
) -> str:  # fmt: skip
    """The program of a step of this model, of all ranks together.

    Args:
      eight, of_cache: dtypes of 8 bits for its matrices and its cache, if given.
      page: positions of a page, if the cache is in pages.
    """
    config = {"kernel": "hopper"} | config
    mesh = mesh_of(world)
    specs = model.partition_specs("tp")
    shapes = model.param_shapes()
    dtypes = dict.fromkeys(shapes, "bfloat16") | (dict.fromkeys(model.matrices, eight) if eight else {})
    if eight:
        dtypes |= dict.fromkeys(model.scale_shapes(), "float32")
        specs, shapes = specs | model.scale_specs("tp"), shapes | model.scale_shapes()
    params = {name: sharded(mesh, spec, shapes[name], dtypes[name]) for name, spec in specs.items()}
    rows = (batch * SLOTS // page + 1, page) if page else (batch, SLOTS)
    size = (model.layers, rows[0], model.kv_heads, rows[1], model.head_dim)
    cache = (sharded(mesh, CACHE, size, of_cache or "bfloat16"),) * 2
    cache += (sharded(mesh, CACHE, size[:-1], "float32"),) * 2 if of_cache else ()
    table = sharded(mesh, P(), (SLOTS, model.rotated // 2), "float32")

    def step(params: dict, x: Any, cache: tuple, lengths: Any, cos: Any, sin: Any, *tables: Any) -> tuple:
        how = {"model": model, "cos": cos, "sin": sin, "block_tables": tables[0] if tables else None}
        return decode_step(params, x, cache, lengths, "tp", **how, implementation="fused", config=config)

    tables = [sharded(mesh, P(), (batch, SLOTS // page), jnp.int32)] if page else []
    program = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, P(), CACHE, *[P()] * (3 + len(tables))), out_specs=(P(None, "tp"), CACHE),
        check_vma=False,
    )  # fmt: skip
    x, lengths = sharded(mesh, P(), (batch, model.d_model), "bfloat16"), sharded(mesh, P(), (batch,), jnp.int32)
    return lower_for_cuda(program, params, x, cache, lengths, table, table, *tables)


@pytest.mark.parametrize("eight", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_share_of_llama_3_8b(world, eight):
    """That of eight GPUs: a warp loads, two groups of four compute, nothing is spilled, and a block is one TMA load."""
    model = DecoderSpec(
        layers=8, d_model=4096, heads=4 * world, kv_heads=world, head_dim=128, d_mlp=1792 * world, vocab=16032 * world
    )
    kernel = launch_of(lowered(model, world, 1, eight))
    code = Compiled(kernel[PTX].decode(), kernel[SHARED], (), {})
    # Bytes are widened by twos or fours, not one by one.
    assert ("prmt.b32 y, x, 0x4b000000" in code.ptx) == (eight == "int8")
    assert ("cvt.rn.f16x2.e4m3x2" in code.ptx) == (eight == "float8_e4m3fn")
    assert not re.findall(r"cvt\.rn\.f32\.[su]\d", re.sub(r"cvt\.rn\.f32\.[su]32", "", code.ptx))
    assert kernel[NAME] == b"decode_step_kernel"
    assert kernel[WARPS] == 12
    assert 190 << 10 < code.shared <= SHARED_MEMORY[90]
    assert local_memory(code.ptx) == []
    assert spilled_bytes(ptxas_report(code)) == 0
    # Warps that add up rows halve them: 103 shuffles of 16 bits, and 240 if each adds up all that its threads have.
    assert code.ptx.count("shfl.sync.bfly") <= 104
    # Queries, keys, values, two of attention, out, gate, up, down and the last product: one load each, of 3 dimensions.
    loads = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared::cta\.global", code.ptx)
    assert loads and set(loads) == {"3"}
    assert len(loads) <= 10
    # Programs of a rank meet at the scope of the GPU, and nothing else is published.
    assert "ld.acquire.gpu.global.b32" in code.ptx
    assert re.search(r"(atom|red)[\w.:]*\.release\.gpu|(atom|red)[\w.:]*\.gpu[\w.:]*\.release|\.release\.gpu", code.ptx)
    assert "release.sys" not in code.ptx


# Of one sequence sums before queries, before the gate and before the logits, of two ranks; queries and what they are
# rotated with; parts of heads and their tops; heads; the inner part. Of four queries, parts, and the sums of two ranks.
@pytest.mark.parametrize(("batch", "polled"), [(1, [4, 2, 8, 1, 4, 2, 4]), (4, [2, 4, 2, 2])])
def test_a_thread_polls_all_of_its_messages_at_once(batch, polled):
    """Each poll is one loop, and none follows another one: two would take two ways to the L2 cache."""
    ptx = launch_of(lowered(SHARE_OF_8B, 2, batch))[PTX].decode()
    polls = re.findall(r"AGAIN:\n((?:@looks\d+ ld\.relaxed\.sys\.global\.v4\.b32 .*\n)+)", ptx)
    assert [poll.count("ld.relaxed") for poll in polls] == polled


def test_patience_is_longer_for_sums_and_the_inner_part_than_within_attention():
    """A thread looks behind so many cycles: before queries, thrice in attention, before the gate and the others."""
    ptx = launch_of(lowered(SHARE_OF_8B, 2, 1, patience=1234))[PTX].decode()
    code = re.sub(r"\t\.loc\s.*\n", "", ptx)
    cycles = re.findall(r"(?:setp\.lt\.u32 p, v, (\d+);\n@p bra EARLY;\n)?AGAIN:\n@looks0 ld\.relaxed", code)
    assert cycles == ["1234", "411", "411", "411", "1234", "1234", "1234"]


@pytest.mark.parametrize(("rows", "groups"), [(2, 64), (16, 8), (4, 32), (128, 1)])
def test_no_three_threads_read_sums_from_one_bank(rows, groups):
    """Of the 8 threads that shared memory serves at a time. Blocks are those of 8B's share of eight, and one more."""
    across = rings.across_of((rows, groups, 64), 8)
    read = rings.collected(across, 8)
    assert read.size_per_thread == [1, across] and read.threads_per_warp == [32, 1]
    for part in range(0, across, 4):
        banks = [(thread * across + part + i) % 32 for thread in range(8) for i in range(min(4, across))]
        assert max(Counter(banks).values()) <= 2


@pytest.mark.parametrize(("rows", "groups"), [(2, 64), (16, 8), (4, 32), (128, 1), (2, 2)])
def test_a_warp_adds_up_each_part_of_a_sum_once(rows, groups):
    """Whatever the threads of a warp had of rows, half of them take half of it, until each has one row or one part."""
    of, halved = rings.layout_of((rows, groups, 64), 8), rings.halved((rows, groups, 64), 8)
    shape = [rows, of.warps_per_cta[1], of.threads_per_warp[1] * of.threads_per_warp[2]]
    assert halved.shape == shape
    bases = [base for base in halved.reg_bases + halved.lane_bases + halved.warp_bases if any(base)]
    bits = [(axis, i) for axis in range(3) for i in range(shape[axis].bit_length() - 1)]
    each = [[1 << i if axis == k else 0 for k in range(3)] for axis, i in bits]
    assert sorted(bases) == sorted(each)
    assert len(halved.lane_bases) == 5
    of_rows = [base for base in halved.reg_bases if base[0]]
    assert of_rows == [] or not any(base[2] for base in halved.lane_bases)


def test_messages_that_a_thread_polls_sixteen_vectors_of():
    """They are more than one loop polls, as are the words of more than eight ranks."""
    model = DecoderSpec(layers=1, d_model=16384, heads=8, kv_heads=2, head_dim=128, d_mlp=1024, vocab=64)
    kernel = launch_of(lowered(model, 2, 1, stage=16384))
    assert kernel[NAME] == b"decode_step_kernel"
    assert local_memory(kernel[PTX].decode()) == []


def test_more_tiles_than_are_added_up_at_once():
    """Sixteen tiles of the stream for each program, with norms behind the blocks."""
    model = DecoderSpec(layers=1, d_model=1024, heads=4, kv_heads=2, head_dim=128, d_mlp=512, vocab=64, post_norms=True)
    kernel = launch_of(lowered(model, 2, 4, programs=8, tensor_cores=True))
    assert kernel[NAME] == b"decode_step_kernel"
    assert local_memory(kernel[PTX].decode()) == []


def test_the_launch_that_loads_the_module_has_the_same_code():
    """Of tiny operands, of which the cache is a result as well."""
    model = DecoderSpec(layers=2, d_model=256, heads=4, kv_heads=2, head_dim=64, d_mlp=256, vocab=64)
    programs, launch = [], shmem._launch

    def twice(*args: Any, **params: Any) -> Any:
        tiny = [jax.ShapeDtypeStruct(shmem._tiny(x.ndim), x.dtype) for x in args]
        load = functools.partial(launch, **params, position=device.POSITION_LOAD_ONLY.value, programs=1)
        programs.append(lower_for_cuda(load, *tiny))
        return launch(*args, **params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shmem, "_launch", twice)
        program = lowered(model, 2, 1)
    (load,) = programs
    assert launch_of(load) == launch_of(program)
    assert load.count("operand_index") == program.count("operand_index") == 2


@pytest.mark.parametrize("eight", [None, "int8", "float8_e4m3fn"])
def test_sixteen_sequences(eight):
    """By tensor cores: their operands come as they are taken, and stages go back behind a fence."""
    kernel = launch_of(lowered(SHARE_OF_8B, 2, 16, eight))
    code = Compiled(kernel[PTX].decode(), kernel[SHARED], (), {})
    assert code.shared <= SHARED_MEMORY[90]
    assert spilled_bytes(ptxas_report(code)) <= (24 if eight else 0)  # for the end, and for a layer's attention
    assert set(re.findall(r"mma\.sync\.[\w.]+", code.ptx)) == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
    products = code.ptx.count("mma.sync")
    # 32 columns of 8 rows or keys at a time, or 16 slots of 16 columns of values, which two products take; nothing goes
    # through shared memory in between. Queries take 8 more, 16 columns of a head of 128 each. Of weights of 8 bits it
    # is 64 columns, which four products take.
    loads = code.ptx.count("ldmatrix.sync.aligned.m8n8.x4.shared.b16")
    turned = code.ptx.count("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16")
    assert loads + turned == code.ptx.count("ldmatrix")
    # 16 slots of 64 columns, of a head of 128 that two warps share; with weights of 8 bits a block has half as many.
    assert turned == (2 if eight else 4)
    keys, queries = 8, 8
    assert (4 if eight else 2) * (loads - keys - queries) + 2 * (keys + turned) == products
    returns = len(re.findall(r"mbarrier\.arrive\.shared::cta", code.ptx))  # the loading warp's expect bytes
    assert 0 < returns == code.ptx.count("fence.proxy.async.shared::cta")


@pytest.mark.parametrize("batch", [3, 4])
def test_several_sequences_of_eight_bits(batch):
    """What is spilled is so at the beginning, for the end: 40 bytes."""
    kernel = launch_of(lowered(SHARE_OF_8B, 2, batch, "int8"))
    code = Compiled(kernel[PTX].decode(), kernel[SHARED], (), {})
    assert code.shared <= SHARED_MEMORY[90]
    assert local_memory(code.ptx) == []
    assert spilled_bytes(ptxas_report(code)) <= 40


@pytest.mark.parametrize(
    ("batch", "of_cache", "eight"),
    [
        (1, "int8", None),
        (1, "float8_e4m3fn", "float8_e4m3fn"),
        (4, "float8_e4m3fn", None),
        pytest.param(4, "int8", None, marks=pytest.mark.soak),
        pytest.param(1, "int8", "int8", marks=pytest.mark.soak),
    ],
)
def test_a_cache_of_eight_bits(batch, of_cache, eight):
    """In registers. Its bytes go through the ring, too, and are widened by twos or fours; scales come while a block is
    on its way.

    What is spilled is so at the beginning, for the end: 24 bytes, and 40 where weights and cache are int8. One sequence
    with a cache of int8 alone puts three more numbers aside: 48.
    """
    registers = {"tensor_cores": False, "attention_cores": False}
    kernel = launch_of(lowered(SHARE_OF_8B, 2, batch, eight, of_cache, **registers))
    code = Compiled(kernel[PTX].decode(), kernel[SHARED], (), {})
    assert ("prmt.b32 y, x, 0x4b000000" in code.ptx) == ("int8" in (of_cache, eight))
    assert not re.findall(r"cvt\.rn\.f32\.[su]\d", re.sub(r"cvt\.rn\.f32\.[su]32", "", code.ptx))
    assert code.shared <= SHARED_MEMORY[90]
    assert local_memory(code.ptx) == []
    most = {(1, "int8", "int8"): 40, (1, "int8", None): 48}
    assert spilled_bytes(ptxas_report(code)) <= most.get((batch, of_cache, eight), 24)
    loads = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared::cta\.global", code.ptx)
    assert loads and set(loads) == {"3"}


@pytest.mark.parametrize(
    ("batch", "of_cache", "page"),
    [
        (16, "int8", 0),
        pytest.param(4, "float8_e4m3fn", 0, marks=pytest.mark.soak),
        pytest.param(16, "float8_e4m3fn", 64, marks=pytest.mark.soak),
    ],
)
def test_a_cache_of_eight_bits_by_tensor_cores(batch, of_cache, page):
    """Words of two numbers are loaded as numbers of 16 bits are, and widened to the operands of four products each."""
    kernel = launch_of(lowered(SHARE_OF_8B, 2, batch, None, of_cache, page, tensor_cores=True))
    code = Compiled(kernel[PTX].decode(), kernel[SHARED], (), {})
    assert code.shared <= SHARED_MEMORY[90]
    assert local_memory(code.ptx) == []
    assert spilled_bytes(ptxas_report(code)) == 0
    assert ("prmt.b32 x, x, 0x43434343, 0x4140" in code.ptx) == (of_cache == "int8")
    assert set(re.findall(r"mma\.sync\.[\w.]+", code.ptx)) == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
    # 16 slots of 64 words of values, which two warps share: half as many loads as of 16 bits.
    assert code.ptx.count("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16") == 2


@pytest.mark.parametrize(
    ("heads", "eight", "of_cache"),
    [(64, None, None), (64, "int8", None), pytest.param(8, None, "int8", marks=pytest.mark.soak)],
)
def test_attention_by_tensor_cores_and_products_in_registers(heads, eight, of_cache):
    """Of 4 and 8 heads of a key; registers' attention of 8 heads spills 96 bytes, and this 16 with weights of int8."""
    model = DecoderSpec(
        layers=8, d_model=4096, heads=heads, kv_heads=max(2, heads // 8), head_dim=128, d_mlp=3584, vocab=32064
    )
    kernel = launch_of(lowered(model, 2, 1, eight, of_cache))
    code = Compiled(kernel[PTX].decode(), kernel[SHARED], (), {})
    assert code.shared <= SHARED_MEMORY[90]
    assert local_memory(code.ptx) == []
    assert spilled_bytes(ptxas_report(code)) <= 16
    assert set(re.findall(r"mma\.sync\.[\w.]+", code.ptx)) == {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"}
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in code.ptx
    # Old keys and values, and of registers' blocks of weights no other dimension.
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared::cta\.global", code.ptx)) <= 10


@pytest.mark.parametrize(
    ("batch", "page", "of_cache"),
    [(1, 16, None), (4, 64, "int8"), (16, 64, None), *soak((4, 8, None), (16, 16, None))],
)
def test_a_cache_in_pages(batch, page, of_cache):
    """The warp that loads looks up its pages, for which it has 24 registers; a block is one TMA load.

    Four sequences in registers, in pages of 8, put three numbers aside: 12 bytes of stores, of loads, and their stack.
    """
    kernel = launch_of(lowered(SHARE_OF_8B, 2, batch, None, of_cache, page))
    code = Compiled(kernel[PTX].decode(), kernel[SHARED], (), {})
    assert code.shared <= SHARED_MEMORY[90]
    assert local_memory(code.ptx) == []
    assert spilled_bytes(ptxas_report(code)) <= (40 if (batch, page) == (4, 8) else 24)
    loads = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared::cta\.global", code.ptx)
    assert loads and set(loads) == {"3"}


@pytest.mark.parametrize("batch", [2, 16])
def test_norms_behind_the_blocks(batch):
    """A share of Gemma 2. One address is spilled for two sequences, at the beginning, for the end: 16 bytes."""
    model = DecoderSpec(
        layers=2, d_model=3584, heads=4, kv_heads=2, head_dim=256, d_mlp=3584, vocab=2048, norm_plus_one=True,
        post_norms=True, score_soft_cap=50.0, activation="gelu_tanh", tied=True, logit_soft_cap=30.0,
    )  # fmt: skip
    kernel = launch_of(lowered(model, 2, batch))
    code = Compiled(kernel[PTX].decode(), kernel[SHARED], (), {})
    assert code.shared <= SHARED_MEMORY[90]
    assert spilled_bytes(ptxas_report(code)) <= (16 if batch == 2 else 0)
