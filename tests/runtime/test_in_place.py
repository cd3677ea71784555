"""`input_output_aliases`: results that are operands, in the program, in the simulator, and what is refused."""

import functools
import re
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
from tests.helpers.support import TRITON_CALL, fails, lower_for_cuda, mesh_of

SIZE = 48
ONE = jax.ShapeDtypeStruct((1,), np.dtype(np.float32))


@triton.jit
def triton_kernel(by_ptr, team, x_ptr, out_ptr, after_ptr, at):
    """Adds to an element of x, where x lies; gives as well what x has there afterwards."""
    me = shmem.start(team)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + tl.load(by_ptr))
    tl.debug_barrier()
    tl.store(after_ptr, tl.load(x_ptr + at))
    shmem.finish(me)


@triton.jit
def alone_kernel(terms, out_ptr, SIZE: tl.constexpr):
    """Adds the first of two arrays to the second one."""
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tl.load(terms[0] + i) + tl.load(terms[1] + i))


@gluon.jit
def gluon_kernel(by_ptr, team, x_ptr, out_ptr, after_ptr, at):
    me = shmem_gluon.start(team)
    gl.store(out_ptr + at, gl.load(x_ptr + at) + gl.load(by_ptr))
    gl.barrier()
    gl.store(after_ptr, gl.load(x_ptr + at))
    shmem_gluon.finish(me)


@triton.jit
def racing_kernel(x_ptr, team, out_ptr, PROGRAMS: tl.constexpr):
    """Each program reads what another one writes."""
    me = shmem.start(team)
    i = tl.program_id(0)
    tl.store(out_ptr + i, tl.load(x_ptr + (i + 1) % PROGRAMS))
    shmem.finish(me)


@gluon.jit
def through_descriptors_kernel(x_desc, team, out_ptr, out_desc):
    """Adds 1 to x [4, 4, 16] where it lies, as to an array [16, 16], and gives a copy as well."""
    me = shmem_gluon.start(team)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [gl.num_warps(), 1], [1, 0])
    smem = gl.allocate_shared_memory(x_desc.dtype, x_desc.block_shape, x_desc.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x_desc.nbytes_per_cta)
    tma.async_load(x_desc, [0, 0], bar, smem)
    mbarrier.wait(bar, 0)
    tma.async_store(out_desc, [0, 0], smem)
    tma.store_wait(0)
    row = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT))[None, :]
    gl.store(out_ptr + row * 16 + column, smem.load(LAYOUT) + 1)
    shmem_gluon.finish(me)


KERNELS = pytest.mark.parametrize("kernel", (triton_kernel, gluon_kernel), ids=("triton", "gluon"))


def update(by: jax.Array, x: jax.Array, kernel: Any, at: int = 32, **changed: Any) -> Any:
    given: dict[str, Any] = {"axis_name": "tp", "out_type": (x, ONE), "grid": 1, "at": at}
    return shmem_call(kernel, by, x, **given | {"input_output_aliases": {1: 0}} | changed)


def on_mesh(function: Any, world: int = 2, **keywords: Any) -> Any:
    return jax.shard_map(function, mesh=mesh_of(world), in_specs=P(), out_specs=P(), check_vma=False, **keywords)


def aliased(text: str) -> tuple[str, str]:
    """(type of the operand, type of the result that it becomes) of a program's one launch."""
    (line,) = (line for line in text.splitlines() if TRITON_CALL in line)
    (pair,) = re.findall(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", line)
    operands, results = re.search(r"\} : \((.*)\) -> \(?(.*?)\)?$", line).groups()
    return operands.split(", ")[int(pair[1])], results.split(", ")[int(pair[0] or 0)]


@KERNELS
@pytest.mark.parametrize("at", (32, 5, 16))
def test_in_the_program(kernel: Any, at: int) -> None:
    """The operand is the right one, whatever stands before it: the team, and numbers."""
    text = lower_for_cuda(on_mesh(functools.partial(update, kernel=kernel, at=at)), ONE, jnp.zeros(SIZE))
    assert aliased(text) == (f"tensor<{SIZE}xf32>", f"tensor<{SIZE}xf32>")
    without = on_mesh(functools.partial(update, kernel=kernel, input_output_aliases=None))
    assert "operand_index" not in lower_for_cuda(without, ONE, jnp.zeros(SIZE))


@pytest.mark.parametrize("platform", ("cuda", "rocm"))
def test_of_a_bundle(platform: str) -> None:
    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        return shmem_call(
            alone_kernel, {"x": x, "y": y}, axis_name=(), out_type=y, grid=1, input_output_aliases={1: 0}, SIZE=64
        )

    text = lower_for_cuda(on_mesh(add), jnp.zeros(64), jnp.zeros(64), platforms=(platform,))
    assert re.search(r"operand_index = 1, ", text)


@KERNELS
def test_in_the_simulator(kernel: Any) -> None:
    """Both pointers are of one memory, and the operand that the caller has stays as it is."""
    x, by = np.arange(SIZE, dtype=np.float32), np.array([100.0], np.float32)
    given: dict[str, Any] = {"out_type": (x, by), "grid": 1, "at": 5, "input_output_aliases": {1: 0}}
    outs, _ = simulator.run(kernel, [by, by], [x, 2 * x], world=2, **given)
    for rank, (changed, after) in enumerate(outs):
        wanted = np.arange(SIZE) * np.float32(1 + rank)
        wanted[5] += 100
        np.testing.assert_array_equal(changed, wanted)
        assert after == wanted[5]
    np.testing.assert_array_equal(x, np.arange(SIZE))


@KERNELS
def test_a_simulated_loop(kernel: Any) -> None:
    def steps(by: jax.Array, x: jax.Array) -> Any:
        def step(i: Any, x: jax.Array) -> jax.Array:
            return update(by, x, kernel, implementation="simulate")[0] + 0 * i

        return jax.lax.fori_loop(0, 3, step, x)

    out = jax.jit(on_mesh(steps))(jnp.full(1, 7.0), jnp.zeros(SIZE))
    np.testing.assert_array_equal(out, np.where(np.arange(SIZE) == 32, 21, 0))


@pytest.mark.parametrize("changed", ({}, {"out_type": (jax.ShapeDtypeStruct((16, 4, 4), np.dtype(np.float32)),) * 2}))
def test_an_array_that_is_read_in_another_shape(changed: dict[str, Any]) -> None:
    x = np.arange(256, dtype=np.float32).reshape(4, 4, 16)
    given: dict[str, Any] = {"out_type": (x, x), "grid": 1, "input_output_aliases": {0: 0}} | changed
    given["descriptors"] = {name: ((16, 16), [16, 16]) for name in ("x_desc", "out_desc")}
    if changed:
        given["input_output_aliases"] = None
    (outs,), _ = simulator.run(through_descriptors_kernel, [x], world=1, **given)
    np.testing.assert_array_equal(outs[0].ravel(), x.ravel() + 1)
    np.testing.assert_array_equal(outs[1].ravel(), x.ravel())

    def local(x: jax.Array) -> Any:
        return shmem_call(through_descriptors_kernel, x, axis_name="tp", **given)

    text = lower_for_cuda(on_mesh(local), x)
    assert ("operand_index" in text) == (not changed) and "stablehlo.reshape" not in text


def test_races_are_found() -> None:
    x = np.arange(4, dtype=np.float32)
    given: dict[str, Any] = {"out_type": x, "grid": 4, "input_output_aliases": {0: 0}, "PROGRAMS": 4}
    with pytest.raises(simulator.DataRaceError, match="x_ptr"):
        simulator.run(racing_kernel, [x], world=1, **given)


def test_without_it_operands_are_not_written() -> None:
    @triton.jit
    def writes(x_ptr, out_ptr):
        tl.store(x_ptr, tl.load(x_ptr))
        tl.store(out_ptr, tl.load(x_ptr))

    x = np.zeros(1, np.float32)
    with pytest.raises(simulator.OutOfBoundsError, match="writes into the operand x_ptr"):
        simulator.run(writes, [x], world=1, grid=1, out_type=x)


@pytest.mark.parametrize(
    "aliases", ({2: 0}, {-1: 0}, {1: 2}, {1: -1}, {0: 1, 1: 1}, {1: "0"}, {1.0: 0}, {True: 0}, [(1, 0)], 0)
)
def test_numbers_of_nothing(aliases: Any) -> None:
    call = on_mesh(functools.partial(update, kernel=triton_kernel, input_output_aliases=aliases))
    with fails(
        ValueError,
        "triton_kernel takes input_output_aliases as a mapping from numbers of its 2 operands to numbers of its 2 "
        f"results, each of them once, not {aliases!r}.",
    ):
        jax.eval_shape(call, ONE, jnp.zeros(SIZE))


@pytest.mark.parametrize(
    ("x", "out"),
    (
        (jnp.zeros(SIZE), jax.ShapeDtypeStruct((SIZE, 1), np.dtype(np.float32))),
        (jnp.zeros(SIZE), jax.ShapeDtypeStruct((SIZE,), np.dtype(np.int32))),
    ),
)
def test_another_shape_or_dtype(x: jax.Array, out: Any) -> None:
    call = on_mesh(functools.partial(update, kernel=triton_kernel, out_type=(out, ONE)))
    with fails(ValueError, "operand 1 is float32[48] and result 0 is ", f"{out.dtype}{list(out.shape)}."):
        jax.eval_shape(call, ONE, x)
