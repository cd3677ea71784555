"""The heap in memory that somebody else has allocated, at addresses of its own on each GPU."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import heap
from jaxtaxfree.heap.driver import Driver

NBYTES = 64 << 20


@contextlib.contextmanager
def allocated(mesh: Mesh) -> Iterator[list[int]]:
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


@pytest.mark.gpu(2)
def test_operations_in_memory_of_another_library(gpu_mesh: Any) -> None:
    mesh = gpu_mesh(2, "tp")
    heap.close()
    x = jax.device_put(jax.random.normal(jax.random.key(0), (256, 512), jnp.bfloat16), NamedSharding(mesh, P("tp")))
    w = jax.device_put(jax.random.normal(jax.random.key(1), (512, 256), jnp.bfloat16), NamedSharding(mesh, P()))

    def program(x: jax.Array, w: jax.Array, implementation: str) -> tuple[jax.Array, jax.Array]:
        product = jtf.all_gather_matmul(x, w, "tp", implementation=implementation)
        return product[None], jtf.psum(x[:8].astype(jnp.float32), "tp", implementation=implementation)[None]

    def run(implementation: str) -> list[np.ndarray]:
        call = jax.jit(
            jax.shard_map(
                lambda x, w: program(x, w, implementation),
                mesh=mesh,
                in_specs=(P("tp"), P()),
                out_specs=P("tp"),
                check_vma=False,
            )
        )
        for _ in range(20):
            found = call(x, w)
        return [np.asarray(each, np.float32) for each in jtf.block_until_ready(found)]

    expected = run("xla")
    with allocated(mesh) as bases:
        heap.adopt(bases, NBYTES, devices=list(mesh.devices.flat))
        try:
            found = run("fused")
        finally:
            heap.close()
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-2, atol=0.5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6, atol=1e-6)
