"""`decode_step` in one launch on real GPUs: right, the same bits each time, whatever else they have to do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxtaxfree as jtf
from jaxtaxfree import heap
from tests.gpu.test_gpu import TOGETHER, give_up, start_python
from tests.gpu.test_gpu_hopper import occupied
from tests.helpers import parity, step_parity
from tests.helpers.decode_loops import OF_CACHE, decode_loop, moved

WHOLE = PartitionSpec()

pytestmark = pytest.mark.gpu(2, "9.0")


def mesh_of(world: int) -> jax.sharding.Mesh:
    return parity.mesh_of(jax.devices("cuda")[:world], (world,), ("tp",))


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.gpu(4, "9.0"))])
def mesh(request: pytest.FixtureRequest) -> jax.sharding.Mesh:
    return mesh_of(request.param)


@pytest.mark.parametrize("world", [1, 2])
def test_parity(world: int) -> None:
    step_parity.check_cases(mesh_of(world))


@pytest.mark.parametrize("world", [1, 2])
def test_parity_by_operations(world: int) -> None:
    step_parity.check_operations(mesh_of(world))


@pytest.mark.parametrize("kernel", ["hopper", "operations"])
@pytest.mark.parametrize("world", [1, 2])
def test_parity_in_eight_bits(world: int, kernel: str) -> None:
    step_parity.check_eight_bits(mesh_of(world), kernel)


@pytest.mark.parametrize("kernel", ["hopper", "operations"])
@pytest.mark.parametrize("world", [1, 2])
def test_parity_with_a_cache_of_eight_bits(world: int, kernel: str) -> None:
    step_parity.check_caches(mesh_of(world), kernel)


@pytest.mark.parametrize("kernel", ["hopper", "operations"])
@pytest.mark.parametrize("world", [1, 2])
def test_parity_with_a_cache_in_pages(world: int, kernel: str) -> None:
    step_parity.check_pages(mesh_of(world), kernel)


def test_parity_of_full_layers() -> None:
    step_parity.check_full_layers(mesh_of(2))


@pytest.mark.parametrize("world", [1, 2])
def test_repetitions_are_bitwise_equal(world: int) -> None:
    step_parity.check_repetition(mesh_of(world))


@pytest.mark.parametrize(
    "check", (step_parity.check_growing, step_parity.check_between_collectives, step_parity.check_beside_collectives)
)
def test_longer_programs(mesh: jax.sharding.Mesh, check: Any) -> None:
    check(mesh)


@pytest.mark.parametrize("multiprocessors", (1, 8, 64))
def test_beside_another_kernel(mesh: jax.sharding.Mesh, multiprocessors: int) -> None:
    """It waits for the end of a kernel that has some multiprocessors, of all devices and of one."""
    call = step_parity.small_call(mesh)
    want = jtf.block_until_ready(call())
    assert bool(jnp.array_equal(call(), want))  # all is compiled
    for devices in (list(mesh.devices.flat), [mesh.devices.flat[-1]]):
        with occupied(devices, multiprocessors, 0.2):
            for _ in range(3):
                assert bool(jnp.array_equal(jtf.block_until_ready(call()), want))


def test_a_rank_that_does_not_arrive_is_named(mesh: jax.sharding.Mesh) -> None:
    """The others end within the time that is set, with NaN; after a reset all is as before."""
    world, missing = mesh.devices.size, mesh.devices.size - 2
    heap.set_timeout(1.0)
    heap.reset()
    try:
        call = step_parity.small_call(mesh)
        want = jtf.block_until_ready(call())
        device = mesh.devices.flat[missing]
        give_up(device)
        result = None
        with pytest.raises(jtf.PeerTimeoutError) as raised:
            result = call()
            jtf.block_until_ready(result)
        message = str(raised.value)
        for rank in range(world):
            own = mesh.devices.flat[rank].id
            blamed = f"rank {rank} (device {own}) waited 1 s for rank {missing} (device {device.id})"
            assert (blamed in message) == (rank != missing), message
        assert "decode_step" in message and f"at message told[0, {missing}, 0, " in message, message
        assert result is not None and bool(jnp.isnan(result).all())
        heap.reset()
        for _ in range(4):
            assert bool(jnp.array_equal(jtf.block_until_ready(call()), want))
    finally:
        heap.set_timeout(60.0)
        heap.reset()


def test_without_room_for_all_programs_the_wait_ends(mesh: jax.sharding.Mesh) -> None:
    """Another kernel keeps one multiprocessor longer than programs wait, as a collective does whose peers are late."""
    heap.set_timeout(1.0)
    heap.reset()
    try:
        call = step_parity.small_call(mesh)
        want = jtf.block_until_ready(call())
        with occupied([mesh.devices.flat[0]], 1, 3.0), pytest.raises(jtf.PeerTimeoutError, match="decode_step"):
            jtf.block_until_ready(call())
        heap.reset()
        for _ in range(4):
            assert bool(jnp.array_equal(jtf.block_until_ready(call()), want))
    finally:
        heap.set_timeout(60.0)
        heap.reset()


def test_a_loop_copies_nothing() -> None:
    """Of the cache and the weights, in the program that XLA makes for the GPU; and its tokens are XLA's."""
    model, slots, steps, b = step_parity.LLAMA, step_parity.SLOTS, 16, 1
    mesh = mesh_of(2)
    specs, size = model.partition_specs("tp"), (model.layers, b, model.kv_heads, slots, model.head_dim)

    def put(x: Any, spec: PartitionSpec = WHOLE) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, spec))

    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)  # noqa: E731
    shapes = model.param_shapes()
    params = {name: put(draw(*shapes[name]) * shapes[name][-1] ** -0.5, spec) for name, spec in specs.items()}
    params |= {name: put(jnp.ones_like(x)) for name, x in params.items() if name.endswith("norm")}
    embed, token = put(draw(model.vocab, model.d_model)), put(jnp.array([3]))
    lengths, key = put(jnp.array([100])), put(jax.random.key(0))
    tokens = {}
    for how in ("fused", "xla"):
        cache = tuple(put(jnp.zeros(size, jnp.bfloat16), OF_CACHE) for _ in range(2))
        loop = decode_loop(model, mesh, slots, steps, k=1, implementation=how)
        compiled = loop.lower(params, embed, token, cache, lengths, key).compile()
        if how == "fused":
            least = min(np.prod(size), *(np.prod(shapes[name]) for name, at in model.sharded().items() if at)) // 2
            assert moved(compiled.as_text(), int(least)) == []
        tokens[how], _ = jtf.block_until_ready(compiled(params, embed, token, cache, lengths, key))
    # Rounding may decide between two tokens, and then the rest differs.
    assert np.mean(np.asarray(tokens["fused"])[:4] == np.asarray(tokens["xla"])[:4]) > 0.7


COLD = """
import jax
from tests.helpers import parity, step_parity
devices = jax.devices("cuda")[:2]
step_parity.check_cases(parity.mesh_of(devices, (2,), ("tp",)), "one sequence")
"""


@pytest.mark.slow
def test_cold_starts() -> None:
    """Fresh processes compile, load and run without a hang, all at the same time."""
    processes = [start_python(COLD, memory="0.04") for _ in range(TOGETHER)]
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-2000:]
