"""Bundles: several arrays as one parameter of a kernel, in Triton, in partitions of Gluon, and in the simulator."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from jax.sharding import PartitionSpec as P
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from jaxtaxfree import shmem_call, simulator
from jaxtaxfree.kernels import shmem, shmem_gluon
from jaxtaxfree.kernels.blocks import bundle
from tests.compiled.test_gluon import PTX, launch_of
from tests.helpers.support import TRITON_CALL, fails, lower_for_cuda, mesh_of

SIZE = 128


@triton.jit
def combine(x, scales, n, NAMES: tl.constexpr):
    """(x * lhs) * rhs, of the scales that there are."""
    lhs = bundle.member(scales, NAMES, "lhs")
    rhs = bundle.member(scales, NAMES, "rhs")
    if lhs is not None:
        x *= tl.load(lhs)
    if rhs is not None:
        x *= tl.load(rhs + n)
    return x


@triton.jit
def add_all(x, terms, n):
    """x and all terms of a bundle without names."""
    for i in tl.static_range(len(terms)):
        x += tl.load(terms[i] + n)
    return x


@triton.jit
def triton_kernel(x_ptr, scales, terms, team, out_ptr, SIZE: tl.constexpr, SCALES: tl.constexpr):
    me = shmem.start(team)
    n = tl.arange(0, SIZE)
    tl.store(out_ptr + n, add_all(combine(tl.load(x_ptr + n), scales, n, SCALES), terms, n))
    shmem.finish(me)


@gluon.jit
def compute(x_ptr, scales, terms, out_ptr, SIZE: gl.constexpr, SCALES: gl.constexpr):
    n = gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    gl.store(out_ptr + n, add_all(combine(gl.load(x_ptr + n), scales, n, SCALES), terms, n))


@gluon.jit
def idle():
    pass


@gluon.jit
def gluon_kernel(x_ptr, scales, terms, team, out_ptr, SIZE: gl.constexpr, SCALES: gl.constexpr):
    me = shmem_gluon.start(team)
    gl.warp_specialize([(compute, (x_ptr, scales, terms, out_ptr, SIZE, SCALES)), (idle, ())], [4], [64])
    shmem_gluon.finish(me)


@gluon.jit
def descriptor_kernel(parts, team, out_desc):
    """Copies the second of the parts: the first one is a pointer that is not read."""
    me = shmem_gluon.start(team)
    smem = gl.allocate_shared_memory(parts[1].dtype, parts[1].block_shape, parts[1].layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, parts[1].nbytes_per_cta)
    tma.async_load(parts[1], [0, 0], bar, smem)
    mbarrier.wait(bar, 0)
    tma.async_store(out_desc, [0, 0], smem)
    tma.store_wait(0)
    shmem_gluon.finish(me)


SCALES = ((), ("lhs",), ("rhs",), ("lhs", "rhs"), ("rhs", "lhs"))
KERNELS = pytest.mark.parametrize("kernel", (triton_kernel, gluon_kernel), ids=lambda kernel: kernel.__name__)


def arguments(names: tuple[str, ...], terms: int = 2) -> tuple[list[Any], np.ndarray]:
    """x, scales of these names and so many terms, and what comes out."""
    x = np.arange(SIZE, dtype=np.float32)
    scales = {"lhs": np.full(1, 3, np.float32), "rhs": np.arange(SIZE, dtype=np.float32) % 5}
    expected = x * (3 if "lhs" in names else 1) * (scales["rhs"] if "rhs" in names else 1)
    others = {str(i): np.full(SIZE, i + 1, np.float32) for i in range(terms)}
    return [x, {name: scales[name] for name in names}, others], expected + sum(others.values())


def call(kernel: Any, *args: Any, **keywords: Any) -> Any:
    out_type = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
    keywords = {"axis_name": "tp", "out_type": out_type, "grid": 1, "SIZE": SIZE} | keywords
    return shmem_call(kernel, *args, **keywords)


def program(kernel: Any, **keywords: Any) -> Any:
    def local(*args: Any) -> jax.Array:
        return call(kernel, *args, **keywords)

    return jax.shard_map(local, mesh=mesh_of(2), in_specs=P(), out_specs=P("tp"), check_vma=False)


@KERNELS
@pytest.mark.parametrize("names", SCALES, ids="-".join)
def test_the_arrays_that_there_are(kernel: Any, names: tuple[str, ...]) -> None:
    args, expected = arguments(names)
    everybodys = [jax.tree.map(lambda x: [x, x], arg) for arg in args]
    out_type = jax.ShapeDtypeStruct((SIZE,), np.float32)
    outs, _ = simulator.run(kernel, *everybodys, world=2, grid=1, out_type=out_type, SIZE=SIZE)
    np.testing.assert_array_equal(outs, [expected] * 2)
    text = lower_for_cuda(program(kernel), *args)
    assert text.count(TRITON_CALL) == 1
    if kernel is gluon_kernel:
        pointers = 1 + len(names) + 2 + 2  # x, scales, terms, team and the result
        assert launch_of(text)[PTX].decode().count(".ptr .global") == pointers + 2  # scratch of Triton's own


def test_in_a_program() -> None:
    args, expected = arguments(("rhs",), terms=0)
    out = jax.jit(program(triton_kernel, implementation="simulate"))(*args)
    np.testing.assert_array_equal(out, np.tile(expected, 2))


def test_a_descriptor_in_a_bundle() -> None:
    parts = {"unread": np.zeros(4, np.float32), "read": np.arange(64 * 16, dtype=np.float32).reshape(64, 16)}
    keywords = {"grid": 1, "out_type": jax.ShapeDtypeStruct((64, 16), np.float32)}
    keywords["descriptors"] = {"parts.read": (64, 16), "out_desc": (64, 16)}
    outs, _ = simulator.run(descriptor_kernel, {name: [x, x] for name, x in parts.items()}, world=2, **keywords)
    np.testing.assert_array_equal(outs, [parts["read"]] * 2)

    def local(unread: jax.Array, read: jax.Array) -> jax.Array:
        return shmem_call(descriptor_kernel, {"unread": unread, "read": read}, axis_name="tp", **keywords)

    lowered = jax.shard_map(local, mesh=mesh_of(2), in_specs=P(), out_specs=P("tp"), check_vma=False)
    ptx = launch_of(lower_for_cuda(lowered, *parts.values()))[PTX].decode()
    assert "cp.async.bulk.tensor.2d" in ptx


def test_reports_name_the_array_of_a_bundle() -> None:
    args, _ = arguments(("rhs",))
    args[1]["rhs"] = args[1]["rhs"][: SIZE // 2]
    with pytest.raises(simulator.SimulationError, match=r"scales\.rhs"):
        everybodys = [jax.tree.map(lambda x: [x], arg) for arg in args]
        out_type = jax.ShapeDtypeStruct((SIZE,), np.float32)
        simulator.run(triton_kernel, *everybodys, world=1, grid=1, out_type=out_type, SIZE=SIZE)


@pytest.mark.parametrize(
    ("change", "error", "parts"),
    (
        ({1: {"lhs": None}}, TypeError, ("a bundle of arrays", "'lhs': None", "those that there are")),
        ({1: {0: np.ones(1)}}, TypeError, ("from their names", "0: array")),
        ({1: np.ones(1)}, TypeError, ("SCALES", "is one of these a constant")),
        ({"descriptors": {"scales.rhs": (16,)}}, TypeError, ("no pointer 'scales.rhs'",)),
        ({"descriptors": {"scales.lhs": (16, 16)}}, TypeError, ("'scales.lhs' is an array [1]", "[16, 16]")),
    ),
    ids=("none", "number", "array", "unknown-descriptor", "descriptor"),
)
def test_errors(change: dict[Any, Any], error: type[Exception], parts: tuple[str, ...]) -> None:
    args, _ = arguments(("lhs",))
    keywords = {key: value for key, value in change.items() if isinstance(key, str)}
    args = [change.get(i, arg) for i, arg in enumerate(args)]

    def local() -> jax.Array:
        return call(gluon_kernel, *args, **keywords)

    with fails(error, *parts):
        jax.jit(jax.shard_map(local, mesh=mesh_of(2), in_specs=(), out_specs=P("tp"), check_vma=False)).trace()


def test_calls_with_different_bundles_are_refused() -> None:
    calls = [[[np.ones(SIZE, np.float32)], {name: [np.ones(SIZE, np.float32)]}, {}] for name in ("lhs", "rhs")]
    out_type = jax.ShapeDtypeStruct((SIZE,), np.float32)
    with pytest.raises(ValueError, match="as many operands as the others"):
        simulator.run_calls(triton_kernel, calls, world=1, grid=1, out_type=out_type, SIZE=SIZE)
