"""The heap in memory that somebody else has allocated, at addresses of its own on each GPU."""

import contextlib
import functools
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import heap, iris
from jaxtaxfree.heap.driver import Driver
from tests.helpers import iris_programs
from tests.helpers.many_calls import Case, checked, whole

NBYTES = 64 << 20
SIZE = 1024


@contextlib.contextmanager
def allocated(mesh: Mesh) -> Generator[list[int]]:
    """What another library does: memory of each GPU that all of them reach, at any address."""
    driver, ordinals = Driver(), [device.local_hardware_id for device in mesh.devices.flat]
    with contextlib.ExitStack() as undo:
        bases = []
        for ordinal in ordinals:
            gap = driver.reserve(2 << 20, 0)  # so that the next address is at no equal distance
            undo.callback(driver.unreserve, gap, 2 << 20)
            bases.append(driver.reserve(NBYTES, 0))
            undo.callback(driver.unreserve, bases[-1], NBYTES)
            handle = driver.create(ordinal, NBYTES)
            undo.callback(driver.release, handle)
            driver.map(bases[-1], NBYTES, handle)
            undo.callback(driver.unmap, bases[-1], NBYTES)
            driver.allow(bases[-1], NBYTES, ordinals)
        yield bases


def product(mesh: Mesh) -> Case:
    def right(out: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        want = jnp.matmul(lax.all_gather(x, "tp", tiled=True), w, preferred_element_type=jnp.float32)
        return out == want.astype(out.dtype)

    call = functools.partial(jtf.all_gather_matmul, axis_name="tp", implementation="fused")
    return Case(call, right, (P("tp"), P()), (whole(mesh, P("tp"), 256, 512), whole(mesh, P(), 512, 256, seed=1)))


def total(mesh: Mesh) -> Case:
    """A kernel that waits for messages instead of signals."""
    call = functools.partial(jtf.psum, axis_name="tp", implementation="fused")
    x = whole(mesh, P("tp"), 2 * 64, 512, dtype=jnp.float32)
    return Case(call, lambda out, x: out == lax.psum(x, "tp"), (P("tp"),), (x,))


def rotated(mesh: Mesh) -> Case:
    """A kernel in Iris's words, which finds its peers by the table of bases."""

    def call(x: jax.Array) -> jax.Array:
        return jtf.iris_call(
            iris_programs.rotate,
            axis_name="tp",
            grid=1,
            x=x,
            inbox=iris.symmetric((SIZE,), x.dtype),
            flag=iris.symmetric((1,), jnp.int32, fill=0),
            out=iris.Out((SIZE,), x.dtype),
            heap_bases=iris.BASES,
            rank=iris.RANK,
            after=(iris.RANK + 1) % iris.WORLD,
            SIZE=SIZE,
        )

    def right(out: jax.Array, x: jax.Array) -> jax.Array:
        return out == lax.ppermute(x, "tp", [(0, 1), (1, 0)])

    return Case(call, right, (P("tp"),), (whole(mesh, P("tp"), 2 * SIZE, dtype=jnp.float32),))


@pytest.mark.gpu(2)
def test_a_thousand_calls_in_memory_of_another_library(gpu_mesh: Any) -> None:
    mesh = gpu_mesh(2, "tp")
    heap.close()
    with allocated(mesh) as bases:
        heap.adopt(bases, NBYTES, devices=list(mesh.devices.flat))
        try:
            with ThreadPoolExecutor(3) as pool:
                programs = list(pool.map(lambda make: checked(mesh, make(mesh)), (product, total, rotated)))
            wrong = [list(jtf.block_until_ready(program())) for program in programs]
            found = heap._heap._regions.values()
            assert len(found) == 3 and all(region.tables is not None for region in found)
        finally:
            heap.close()
    assert wrong == [[0, 0]] * 3
