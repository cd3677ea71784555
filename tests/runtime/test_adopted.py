"""A heap in another library's memory, on a model of a driver, and programs that find it by a table."""

import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import distributed
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import heap, shmem, teams
from jaxtaxfree.heap import HeapError, HeapUnavailableError, Layout, adopted, exchange
from jaxtaxfree.heap.layout import GRANULE
from tests.helpers.driver_model import MIB, DriverModel
from tests.helpers.support import TRITON_CALL, mesh_of
from tests.runtime import test_heap as with_cuda
from tests.runtime.test_heap import FOUR, LAYOUT, SIZE, TIMEOUT, together
from tests.runtime.test_heap import closed_doors as closed_doors

NBYTES = 3 * SIZE


def allocate(model: DriverModel, ordinals: range, at: int) -> list[int]:
    """What the other library does: memory of these devices at addresses of its own, which all of them reach."""
    bases = []
    for i, ordinal in enumerate(ordinals):
        address = at + i * 16 * GRANULE  # not next to each other
        model.reserved[address] = NBYTES
        model.map(address, NBYTES, model.create(ordinal, NBYTES))
        model.allow(address, NBYTES, list(ordinals))
        bases.append(address)
    return bases


@pytest.fixture
def model() -> DriverModel:
    return DriverModel()


def of(model: DriverModel, count: int = 4) -> tuple[adopted.AdoptedHeap, list[int]]:
    bases = allocate(model, range(count), 0x1234 * GRANULE)
    ids = [device.id for device in with_cuda.devices(count)]
    table = adopted.checked(bases, NBYTES, count)
    return adopted.AdoptedHeap(model, table, ids, NBYTES, exchange.Alone(), TIMEOUT), bases


def test_regions_lie_one_after_the_other(model: DriverModel) -> None:
    each, bases = of(model)
    order = [with_cuda.devices(4)[i] for i in (2, 0, 3, 1)]
    first, second = (each.region(name, order, 4, LAYOUT) for name in "ab")
    assert each.region("a", order, 4, LAYOUT) is first
    for region, offset in ((first, 0), (second, SIZE)):
        assert region.tables == (tuple(bases[i] + offset for i in (2, 0, 3, 1)),) * 4
        for position in range(4):
            memory = model.read(region.address(position), LAYOUT.control_bytes)
            magic, failed, record, timeout = struct.unpack_from("<iiqq", memory)
            assert (magic, failed, timeout) == (region.magic, 0, round(TIMEOUT * 1e9)) and record in model.host
            assert not any(memory[24:])
    each.region("c", order, 4, LAYOUT)
    with pytest.raises(HeapError, match=rf"d needs {SIZE >> 20} MiB of the adopted heap, of whose {NBYTES >> 20} MiB"):
        each.region("d", order, 4, LAYOUT)
    with pytest.raises(HeapError, match=r"e is for devices \[17\], whose bases heap.adopt was not told"):
        each.region("e", [heap.cuda.Device(17, 0, 0)], 1, LAYOUT)
    each.close()
    assert not model.host and len(model.mapped) == 4  # the memory is its owner's


def test_failing_calls_leave_nothing(model: DriverModel) -> None:
    each, _ = of(model)
    for call in ("allocate_host", "zero", "write"):
        model.fail(call, 2)
        with pytest.raises(HeapError, match="CUDA_ERROR_UNKNOWN"):
            each.region(call, with_cuda.devices(4), 4, Layout(programs=1))
        model.failures.clear()
        assert not model.host
    with_cuda.test_fail_and_reset(each, model)


def test_processes_see_it_at_addresses_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.global_state, "client", with_cuda.Store())
    models = [DriverModel(2, first=i + 1) for i in range(2)]
    own = [allocate(model, range(2), (1 + i) << 36) for i, model in enumerate(models)]
    far = [[0x10 << 36, 0x11 << 36], [0x20 << 36, 0x21 << 36]]  # where each sees the other one's
    rows = [[*own[0], *far[0]]] * 2 + [[*far[1], *own[1]]] * 2
    table = adopted.checked(rows, NBYTES, 4)
    heaps = [
        adopted.AdoptedHeap(model, table, range(4), NBYTES, with_cuda.one_of_several(i, 2.0), TIMEOUT)
        for i, model in enumerate(models)
    ]
    mine, yours = together(heaps, lambda each: each.region("a", FOUR, 4, LAYOUT))
    assert mine == yours and mine.tables == table
    assert [model.read(mine.address(2 * i), 4) for i, model in enumerate(models)] == [struct.pack("<i", mine.magic)] * 2
    # Who asks in another order has other offsets.
    heaps[0].region("b", FOUR[:1], 1, LAYOUT)
    for result in together(heaps, lambda each: each.region("c", FOUR, 4, LAYOUT)):
        assert isinstance(result, HeapError) and "in different orders" in str(result)


@pytest.mark.parametrize(
    "bases, nbytes, reason",
    (
        ([128, 256], NBYTES, "bases are whole numbers [3], or [3, 3]"),
        ([128.0] * 3, NBYTES, "not float64[3]"),
        ([128, 256, 300], NBYTES, "an address that 128 divides, not 0x12c"),
        ([128, 256, 0], NBYTES, "not 0x0"),
        ([128, 256, 512], 100, f"nbytes is at least {GRANULE}, not 100"),
    ),
)
def test_tables_that_are_none(bases: list, nbytes: int, reason: str) -> None:
    with pytest.raises(ValueError) as error:
        adopted.checked(bases, nbytes, 3)
    assert reason in str(error.value)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, model: DriverModel) -> Iterator[None]:
    """The CPU's devices are taken for GPUs, by the lowering and by the heap."""
    for name, value in {"on_gpus": True, "compute_capability": 90, "multiprocessors": 132, "device_kind": ""}.items():
        monkeypatch.setattr(teams.Team, name, property(lambda _, value=value: value))
    monkeypatch.setattr(heap, "Driver", lambda: model)
    monkeypatch.setattr(shmem, "_load_modules", lambda *_: None)
    heap.close()
    yield
    heap.close()


def a_product_too() -> None:
    """Of Gluon, whose partitions of warps take the table, too."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2048, 256), (256, 512)))
    program = jax.shard_map(
        lambda x, w: jtf.all_gather_matmul(x, w, "tp", implementation="fused", config={"kernel": "hopper"}),
        mesh=mesh_of(4),
        in_specs=(P("tp"), P()),
        out_specs=P(None, "tp"),
        check_vma=False,
    )
    text = jax.jit(program).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(TRITON_CALL) == 1 and "tensor<4x8xui32>" in text


def test_programs_find_it_by_a_table(gpus: None, no_code: None, model: DriverModel) -> None:
    bases = allocate(model, range(4), 0x1234 * GRANULE)
    heap.adopt(bases, NBYTES, devices=jax.devices()[:4])
    a_product_too()
    x = jax.ShapeDtypeStruct((1024,), np.float32)

    def total(x: jax.Array) -> jax.Array:
        return jtf.psum(x, "tp", implementation="fused")

    program = jax.shard_map(total, mesh=mesh_of(4), in_specs=P(), out_specs=P(), check_vma=False)
    text = jax.jit(program).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(TRITON_CALL) == 1
    assert "tensor<4x8xui32>" in text and "tensor<8xui32>" in text  # the table, and this rank's row of it
    with pytest.raises(HeapError, match=r"heap\.adopt comes before the first fused operation"):
        heap.adopt(bases, NBYTES, devices=jax.devices()[:4])


def test_without_a_driver(gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise RuntimeError("no libcuda.so")

    monkeypatch.setattr(heap, "Driver", absent)
    devices = [SimpleNamespace(id=0, compute_capability="9.0")]
    with pytest.raises(HeapUnavailableError, match=r"no libcuda\.so"):
        heap.adopt([GRANULE], MIB << 4, devices=devices)
