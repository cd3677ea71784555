"""The kernels that are for Hopper alone, on real GPUs: beside other kernels, and when a peer does not arrive."""

import contextlib
import ctypes
import functools
import math
import random
import re
import time
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxtaxfree as jtf
from jaxtaxfree import heap
from jaxtaxfree.ops import all_gather_matmul as gather_ops
from jaxtaxfree.ops import matmul_reduce_scatter as scatter_ops
from tests.gpu.test_gpu import give_up
from tests.helpers import parity
from tests.helpers.rehearsal import needs_real_gpus

pytestmark = pytest.mark.gpu(2, "9.0")

# Blocks of it leave a multiprocessor too little shared memory for another kernel that needs much.
OCCUPY = """
.version 8.0
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 taken[];
.visible .entry occupy(.param .u64 nanoseconds)
{
    .reg .pred p;
    .reg .b64 now, end;
    ld.param.u64 end, [nanoseconds];
    mov.u64 now, %globaltimer;
    add.u64 end, end, now;
AGAIN:
    mov.u64 now, %globaltimer;
    setp.lt.u64 p, now, end;
    @p bra AGAIN;
    ret;
}
"""
OCCUPIED_BYTES = 200 << 10


@contextlib.contextmanager
def occupied(devices: list[jax.Device], multiprocessors: int, seconds: float) -> Generator[None]:
    """So many multiprocessors of each device belong to a kernel of somebody else."""
    needs_real_gpus()
    driver = heap._heap._driver
    for device in devices:
        stream = driver._enter(device.local_hardware_id)
        function = _occupy(device.local_hardware_id)
        arguments = ((int(seconds * 1e9),), (ctypes.c_uint64,))
        grid, block = (multiprocessors, 1, 1), (32, 1, 1)
        driver._call("cuLaunchKernel", function, *grid, *block, OCCUPIED_BYTES, stream, arguments, 0)
    try:
        yield
    finally:
        for device in devices:
            driver._call("cuStreamSynchronize", driver._enter(device.local_hardware_id))


@functools.cache
def _occupy(ordinal: int) -> object:
    driver = heap._heap._driver
    driver._enter(ordinal)
    function = driver._call("cuModuleGetFunction", driver._call("cuModuleLoadData", OCCUPY.encode() + b"\0"), b"occupy")
    attribute = driver._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver._call("cuFuncSetAttribute", function, attribute, OCCUPIED_BYTES)
    return function


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.gpu(4, "9.0"))])
def mesh(request: pytest.FixtureRequest) -> jax.sharding.Mesh:
    return parity.mesh_of(jax.devices("cuda")[: request.param], (request.param,), ("tp",))


def many_rows(operation: parity.Operation) -> Any:
    """Settings of its kernel for many rows, with wide tiles."""
    wide = {parity.GATHER: gather_ops.hopper.Config(), parity.SCATTER: scatter_ops.hopper.Config()}
    return wide.get(operation, {"kernel": "hopper"})


def large_call(operation: parity.Operation, mesh: jax.sharding.Mesh) -> tuple[Callable, tuple[jax.Array, jax.Array]]:
    """The operation with a kernel for Hopper, and operands: tiles of every rank, clipped ones too."""
    call = parity.on_mesh(operation, mesh, implementation="fused", config=many_rows(operation))
    ranks = max(4, mesh.devices.size)
    return call, parity.operands(4 * 664, 264 * ranks, 520 * ranks, jnp.bfloat16, mesh, operation=operation)


def wrong_repetitions(operation: parity.Operation, mesh: jax.sharding.Mesh, times: int) -> int:
    """How many of so many calls, in a loop, with changing operands, do not give what the first ones gave."""

    def local() -> jax.Array:
        call, lhs, rhs, first = parity.three_calls(operation, 2048, 1024, 4096, config=many_rows(operation))

        def step(i: jax.Array, wrong: jax.Array) -> jax.Array:
            return wrong + jnp.where(jnp.array_equal(call(lhs[i % 3], rhs), first[i % 3]), 0, 1)

        return lax.psum(lax.fori_loop(0, times, step, jnp.int32(0)), "tp")

    return int(parity.on_ranks(mesh, local))


OPERATIONS = (parity.GATHER, parity.SCATTER, parity.REDUCE)
each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)


@each_operation
def test_values(mesh: jax.sharding.Mesh, operation: parity.Operation) -> None:
    call, operands = large_call(operation, mesh)
    # In f32: XLA rounds each sum of two ranks, which is a greater error than ours.
    want = parity.on_mesh(operation, mesh, implementation="xla", preferred_element_type=jnp.float32)(*operands)
    assert parity.error(jtf.block_until_ready(call(*operands)), want) < parity.TOLERANCE["bfloat16"]


def test_the_gathered_rows_are_exact(mesh: jax.sharding.Mesh) -> None:
    def local() -> jax.Array:
        lhs, rhs = parity.local_operands(parity.GATHER, 0, 4 * 333, 1000, 4 * 264, jnp.float16)
        call = functools.partial(jtf.all_gather_matmul, lhs, rhs, "tp", config=many_rows(parity.GATHER))
        call = functools.partial(call, implementation="fused")
        product, gathered = call(return_gathered=True)
        wrong = jnp.sum(gathered != lax.all_gather(lhs, "tp", tiled=True)) + jnp.sum(product != call())
        return lax.psum(wrong, "tp")

    assert not parity.on_ranks(mesh, local)


def test_every_rank_has_the_same_sums(mesh: jax.sharding.Mesh) -> None:
    """In tiles of either width, with an epilogue."""

    def case(m: int, groups: int, block_n: int) -> Callable:
        def local() -> jax.Array:
            lhs, rhs = parity.local_operands(parity.REDUCE, 0, m, 1056, 2080, jnp.bfloat16)
            bias, residual = (jax.random.normal(jax.random.key(i), size) for i, size in enumerate(((2080,), (m, 2080))))
            call = functools.partial(jtf.matmul_all_reduce, lhs, rhs, "tp", bias=bias, activation="silu")
            call = functools.partial(call, residual=residual.astype(jnp.bfloat16))
            config = {"kernel": "hopper", "block_n": block_n, "num_stages": 4, "groups": groups}
            of_ranks = lax.all_gather(call(implementation="fused", config=config).astype(jnp.float32), "tp")
            wanted = call(implementation="xla", preferred_element_type=jnp.float32)
            error = parity.relative_error(of_ranks[lax.axis_index("tp")], wanted, "tp")
            different = lax.psum(jnp.sum(of_ranks != of_ranks[0]), "tp")
            return jnp.where(different == 0, error / parity.TOLERANCE["bfloat16"], jnp.inf)

        return parity.program(mesh, local)

    found = parity.run_all([case(*sizes) for sizes in ((2643, 3, 256), (2643, 1, 128), (256, 1, 128), (8, 1, 256))])
    assert all(each < 1 for each in found), found
    jtf.heap.check()


@each_operation
def test_a_thousand_repetitions(mesh: jax.sharding.Mesh, operation: parity.Operation) -> None:
    assert wrong_repetitions(operation, mesh, 1000) == 0
    jtf.heap.check()


@pytest.mark.parametrize("seed", (0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 17))))
@each_operation
def test_random_shapes(mesh: jax.sharding.Mesh, operation: parity.Operation, seed: int) -> None:
    """Sizes drawn at random, of which TMA can take rows: many rows and few, in turns. Of all seeds 204."""
    draw = random.Random(seed)
    wide = 8 * mesh.devices.size

    def case(many: bool) -> Callable:
        m = round(2 ** draw.uniform(*((8, 12.5) if many else (0, 9))))
        k, n, key = (draw.randint(1, 300) for _ in range(3))
        dtype = draw.choice((jnp.bfloat16, jnp.float16))

        def local() -> jax.Array:
            operands = parity.local_operands(operation, key, m, wide * k, wide * n, dtype)
            call = functools.partial(operation.function, *operands, "tp")
            found = call(implementation="fused", config=many_rows(operation) if many else None)
            wanted = call(implementation="xla", preferred_element_type=jnp.float32)
            wrong = parity.relative_error(found.astype(jnp.float32), wanted, "tp")
            return wrong / parity.TOLERANCE[jnp.dtype(dtype).name]

        return parity.program(mesh, local)

    programs = [case(i % 2 == 0) for i in range(12)]
    found = parity.run_all(programs)
    assert all(each < 1 for each in found), found
    jtf.heap.check()


@each_operation
def test_beside_nccl(mesh: jax.sharding.Mesh, operation: parity.Operation) -> None:
    """A collective of XLA's is under way while the kernel runs: on some ranks it has come first, on others second."""
    world = mesh.devices.size

    def local() -> jax.Array:
        call, lhs, rhs, first = parity.three_calls(operation, 2048, 1024, 4096, config=many_rows(operation))
        ones = jnp.ones(1 << 22) + lax.axis_index("tp")

        def step(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            wrong, x = state
            total = lax.psum(x, "tp")  # nothing that the kernel needs
            found = call(lhs[i % 3], rhs)
            right = jnp.array_equal(found, first[i % 3]) & jnp.all(total == world * (world + 1) / 2)
            return wrong + jnp.where(right, 0, 1), ones + 0 * total

        return lax.psum(lax.fori_loop(0, 1000, step, (jnp.int32(0), ones))[0], "tp")

    # Without graphs, in which XLA runs one thing at a time.
    options = {"xla_gpu_enable_latency_hiding_scheduler": True, "xla_gpu_graph_min_graph_size": 1 << 20}
    compiled = parity.program(mesh, local).lower().compile(compiler_options=options)
    during = re.search(r"all-reduce-start\(.*?all-reduce-done\(", compiled.as_text(), re.DOTALL)
    assert during and "custom-call(" in during[0], "nothing is under way beside the kernel"
    assert int(compiled()) == 0
    jtf.heap.check()


@each_operation
@pytest.mark.parametrize("multiprocessors", (1, 8, 64))
def test_beside_another_kernel(mesh: jax.sharding.Mesh, operation: parity.Operation, multiprocessors: int) -> None:
    call, operands = large_call(operation, mesh)
    want = jtf.block_until_ready(call(*operands))
    assert bool(jnp.array_equal(call(*operands), want))  # all is compiled
    with occupied(list(mesh.devices.flat), multiprocessors, 1.0):
        begin = time.perf_counter()
        for _ in range(10):
            assert bool(jnp.array_equal(jtf.block_until_ready(call(*operands)), want))
        assert time.perf_counter() - begin < 0.8  # it has not waited for the other kernel's end


@each_operation
def test_when_another_kernel_comes_late(mesh: jax.sharding.Mesh, operation: parity.Operation) -> None:
    """One that has the whole of one GPU for a while: the others wait for that rank."""
    call, operands = large_call(operation, mesh)
    want = jtf.block_until_ready(call(*operands))
    for device in mesh.devices.flat:
        with occupied([device], 132, 0.05):
            assert bool(jnp.array_equal(jtf.block_until_ready(call(*operands)), want))


@each_operation
def test_a_rank_that_does_not_arrive_is_named(mesh: jax.sharding.Mesh, operation: parity.Operation) -> None:
    """All that its peers have waited for is NaN, and no role of a program hangs."""
    missing = mesh.devices.size - 2
    call, operands = large_call(operation, mesh)
    heap.set_timeout(1.0)
    heap.reset()
    try:
        want = jtf.block_until_ready(call(*operands))
        device = mesh.devices.flat[missing]
        give_up(device)
        with pytest.raises(jtf.PeerTimeoutError) as raised:
            result = call(*operands)
            jtf.block_until_ready(result)
        for rank in range(mesh.devices.size):
            assert (f"rank {rank} (device {mesh.devices.flat[rank].id}) waited 1 s" in str(raised.value)) == (
                rank != missing
            )
        assert operation.name in str(raised.value) and "arrived[" in str(raised.value)
        assert bool(jnp.isnan(result).any(axis=0).all())
        heap.reset()
        assert bool(jnp.array_equal(jtf.block_until_ready(call(*operands)), want))
    finally:
        heap.set_timeout(60.0)
        heap.reset()


def few_rows(kind: str, **others: Any) -> tuple[parity.Operation, dict[str, Any]]:
    """The operation and the settings of its kernel for few rows; `others` are settings, too.

    Args:
      kind: "gather", "scatter", or of an all-reduce "1" or "2" shots.
    """
    settings = {"kernel": "hopper_few", **others}
    if kind == "gather":
        return parity.GATHER, settings
    if kind == "scatter":
        return parity.SCATTER, settings
    return parity.REDUCE, {"shots": int(kind), **settings}


each_kind = pytest.mark.parametrize("kind", ("gather", "scatter", "1", "2"))


@each_kind
def test_few_rows(mesh: jax.sharding.Mesh, kind: str) -> None:
    """Of sizes drawn at random, in both dtypes, with an epilogue and without."""
    draw, world = random.Random(0), mesh.devices.size
    in_two_parts = (75, 139, 186, 293, 380)

    def case(i: int) -> Callable:
        m = in_two_parts[i - 8] if i >= 8 else round(2 ** draw.uniform(0, 9))
        k, n = 8 * world * draw.randint(1, 300), 8 * world * draw.randint(1, 150)
        dtype = (jnp.bfloat16, jnp.float16)[i % 2]
        exact = {} if kind == "gather" else {"exact_wire": True}
        operation, settings = few_rows(kind, splits=(1, 2, 3, 8, 4)[i % 5], whole=i % 4, **exact)

        def local() -> jax.Array:
            lhs, rhs = parity.local_operands(operation, i, m, k, n, dtype)
            call = functools.partial(operation.function, lhs, rhs, "tp")
            shape = jax.eval_shape(functools.partial(call, implementation="xla")).shape
            if i % 3:
                values = jnp.sin(jnp.arange(math.prod(shape), dtype=jnp.float32)).reshape(shape)
                others = {"bias": values[0], "residual": values.astype(dtype)}
                call = functools.partial(call, activation=("silu", "gelu_exact")[i % 3 - 1], **others)
            wanted = call(implementation="xla", preferred_element_type=jnp.float32)
            wide = {"preferred_element_type": jnp.float32} if i % 4 == 0 else {}
            found = call(implementation="fused", config=settings, **wide)
            return parity.relative_error(found.astype(jnp.float32), wanted, "tp") / parity.TOLERANCE[dtype.__name__]

        return parity.program(mesh, local)

    found = parity.run_all([case(i) for i in range(8 + len(in_two_parts))])
    assert all(each < 1 for each in found), found
    jtf.heap.check()


@each_kind
@pytest.mark.parametrize(("m", "columns"), ((16, 2048), (144, 2048), (256, 2048), (448, 2048), (144, 18432)))
def test_few_rows_a_thousand_times(mesh: jax.sharding.Mesh, kind: str, m: int, columns: int) -> None:
    """What the calls give does not depend on when words arrive. Of many columns some tiles are whole ones."""
    n = columns * (mesh.devices.size if kind == "gather" and columns > 2048 else 1)
    operation, settings = few_rows(kind)

    def local() -> jax.Array:
        call, lhs, rhs, first = parity.three_calls(operation, m, 4096, n, config=settings)

        def step(i: jax.Array, wrong: jax.Array) -> jax.Array:
            return wrong + jnp.where(jnp.array_equal(call(lhs[i % 3], rhs), first[i % 3]), 0, 1)

        return lax.psum(lax.fori_loop(0, 1000, step, jnp.int32(0)), "tp")

    assert int(parity.on_ranks(mesh, local)) == 0
    jtf.heap.check()


@each_kind
def test_few_rows_beside_another_kernel(mesh: jax.sharding.Mesh, kind: str) -> None:
    """Which leaves some programs no place at first; and more of them than a GPU runs at a time."""
    n = 12000 * (mesh.devices.size if kind == "gather" else 1)
    operation, settings = few_rows(kind, block_n=64, num_warps=4, splits=2)
    call = parity.on_mesh(operation, mesh, implementation="fused", config=settings)
    operands = parity.operands(16, 1024, n, jnp.bfloat16, mesh, operation=operation)
    want = jtf.block_until_ready(call(*operands))
    with occupied(list(mesh.devices.flat), 64, 0.5):
        for _ in range(10):
            assert bool(jnp.array_equal(jtf.block_until_ready(call(*operands)), want))


@each_kind
@pytest.mark.parametrize("m", (16, 256))
def test_few_rows_of_a_rank_that_does_not_arrive(mesh: jax.sharding.Mesh, kind: str, m: int) -> None:
    missing = mesh.devices.size - 2
    operation, settings = few_rows(kind)
    call = parity.on_mesh(operation, mesh, implementation="fused", config=settings)
    operands = parity.operands(m, 1024, 1024, jnp.bfloat16, mesh, operation=operation)
    heap.set_timeout(1.0)
    heap.reset()
    try:
        want = jtf.block_until_ready(call(*operands))
        give_up(mesh.devices.flat[missing])
        with pytest.raises(jtf.PeerTimeoutError) as raised:
            result = call(*operands)
            jtf.block_until_ready(result)
        awaited = "arrived[" if kind == "gather" else "message partials["
        assert operation.name in str(raised.value) and awaited in str(raised.value)
        assert "left[" not in str(raised.value)  # nobody blames who shares a tile with him
        assert bool(jnp.isnan(result).all())
        heap.reset()
        assert bool(jnp.array_equal(jtf.block_until_ready(call(*operands)), want))
    finally:
        heap.set_timeout(60.0)
        heap.reset()
