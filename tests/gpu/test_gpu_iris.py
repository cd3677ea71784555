"""Iris's kernels on real GPUs, a thousand calls each: every one right, and a rank that does not come is named.

They are Iris's own: of the package `iris`, and of a checkout that JAXTAXFREE_IRIS_EXAMPLES names.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from benchmarks import iris_kernels
from jaxtaxfree import heap, iris
from tests.gpu.test_gpu import give_up
from tests.helpers import parity
from tests.helpers.many_calls import Case, checked, whole

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.skipif(iris_kernels.checkout() is None, reason="JAXTAXFREE_IRIS_EXAMPLES names no checkout of Iris"),
    pytest.mark.skipif(iris.home_of_iris() is None, reason="Iris is not installed"),
]

COLUMNS = P(None, "tp")
M, N, K = 256, 512, 1024


def gathered_product(out: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    want = jnp.matmul(lax.all_gather(x, "tp", axis=1, tiled=True), y, preferred_element_type=jnp.float32)
    return out == want.astype(out.dtype)


GATHERS = {
    "14 pull": functools.partial(iris_kernels.gather_matmul_pull, blocks=(64, 64, 64)),
    "14 push": functools.partial(iris_kernels.gather_matmul_push, blocks=(64, 64, 64)),
    "hbm_buffer": functools.partial(iris_kernels.gather_matmul_hbm, blocks=(64, 64, 64), fetchers=8),
}


def matrices(mesh: Mesh) -> tuple[jax.Array, jax.Array]:
    return whole(mesh, COLUMNS, M, K), whole(mesh, COLUMNS, K, 2 * N, seed=1)


def gather_and_product(mesh: Mesh, name: str, own: bool) -> Case:
    call = functools.partial(GATHERS[name], axis_name="tp", own=own)
    return Case(call, gathered_product, (COLUMNS, COLUMNS), matrices(mesh))


def flash_decode(mesh: Mesh, own: bool) -> Case:
    """Three launches that share a workspace."""
    b, n, heads, h, s = 2, 16, 2, 64, 512
    query = jax.random.normal(jax.random.key(0), (b, n, h), jnp.float32).astype(jnp.bfloat16)
    key, value = (
        jax.random.normal(jax.random.key(i), (b, 2 * s, heads, h), jnp.float32).astype(jnp.bfloat16) for i in (1, 2)
    )
    lengths = jnp.array([[s, s - 37], [s - 100, 5]], jnp.int32)

    def near(out: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        keys, values = (lax.all_gather(x, "tp").astype(jnp.float32) for x in (k, v))  # [W, B, S, K, H]
        grouped = q.reshape(b, heads, -1, h).astype(jnp.float32)
        logits = jnp.einsum("bkgh,wbskh->bkgws", grouped, keys, precision="highest") * h**-0.5
        there = jnp.arange(s) < lengths[:, :, None]  # [W, B, S]
        logits = jnp.where(there.transpose(1, 0, 2)[:, None, None], logits, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=(-2, -1))
        want = jnp.einsum("bkgws,wbskh->bkgh", weights, values, precision="highest").reshape(out.shape)
        return jnp.abs(out.astype(jnp.float32) - want) < 2e-2

    cache = P(None, "tp")
    specs = (P(), cache, cache, P())
    operands = (jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((query, key, value, lengths), specs))
    call = functools.partial(iris_kernels.flash_decode, axis_name="tp", splits=8, own=own)
    return Case(call, near, specs, tuple(operands))


def ring_all_reduce(mesh: Mesh, own: bool) -> Case:
    x = whole(mesh, P("tp"), 2 * 256, 256, dtype=jnp.float32)
    call = functools.partial(iris_kernels.ring_all_reduce, axis_name="tp", own=own)
    return Case(call, lambda out, x: out == lax.psum(x, "tp"), (P("tp"),), (x,))


def message(mesh: Mesh, own: bool) -> Case:
    """A result that a peer has stored: behind a meeting of all ranks."""

    def arrived(out: jax.Array, x: jax.Array) -> jax.Array:
        first = lax.all_gather(x, "tp")[0]
        return out == jnp.where(lax.axis_index("tp") == 1, 2 * first, 0)

    x = whole(mesh, P("tp"), 2 * 1024, dtype=jnp.float32)
    return Case(functools.partial(iris_kernels.message, axis_name="tp", own=own), arrived, (P("tp"),), (x,))


CASES: dict[str, Callable[[Mesh, bool], Case]] = {
    "13 flash decode": flash_decode,
    "16 ring": ring_all_reduce,
    "06 message": message,
    **{name: lambda mesh, own, name=name: gather_and_product(mesh, name, own) for name in GATHERS},
}


@pytest.fixture(scope="module")
def programs(request: pytest.FixtureRequest) -> dict[tuple[str, bool], Future]:
    """Those of the tests that run. Compiled side by side, which would take minutes one after the other, and before any
    of them runs."""
    devices = mesh_of_two()
    chosen = [each for each in request.session.items if isinstance(each, pytest.Function)]
    keys = [
        (each.callspec.params["name"], each.callspec.params["own"])
        for each in chosen
        if each.function is test_a_thousand_calls
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return {
            (name, own): pool.submit(lambda name=name, own=own: checked(devices, CASES[name](devices, own)))
            for name, own in keys
        }


def mesh_of_two() -> Mesh:
    return parity.mesh_of(jax.devices("cuda")[:2], (2,), ("tp",))


@pytest.mark.parametrize("own", (True, False), ids=("our functions", "Iris's functions"))
@pytest.mark.parametrize("name", CASES)
def test_a_thousand_calls(programs: dict[tuple[str, bool], Future], name: str, own: bool) -> None:
    wrong = jtf.block_until_ready(programs[name, own].result()())
    assert list(wrong) == [0, 0]


@pytest.mark.parametrize("name", ("14 pull", "14 push"), ids=("one launch", "a workspace"))
def test_a_rank_that_does_not_come_is_named(name: str) -> None:
    mesh, (x, y) = mesh_of_two(), matrices(mesh_of_two())
    call = functools.partial(GATHERS[name], axis_name="tp")
    specs = (COLUMNS, COLUMNS)
    program = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=COLUMNS, check_vma=False))
    heap.set_timeout(1.0)
    heap.reset()
    try:
        want = jtf.block_until_ready(program(x, y))
        give_up(mesh.devices.flat[0])
        with pytest.raises(jtf.PeerTimeoutError, match="waited 1 s for rank 0") as raised:
            result = program(x, y)
            jtf.block_until_ready(result)
        assert "iris_opened" in str(raised.value)
        assert bool(jnp.isnan(result).all())
        heap.reset()
        for _ in range(3):
            assert bool(jnp.array_equal(jtf.block_until_ready(program(x, y)), want))
    finally:
        heap.set_timeout(60.0)
        heap.reset()
