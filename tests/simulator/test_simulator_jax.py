"""implementation="simulate" inside JAX programs on virtual CPU devices."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import simulator
from jaxtaxfree.ops.all_gather_matmul import few, portable
from jaxtaxfree.settings import Settings
from jaxtaxfree.simulator.scheduler import POLICIES
from tests.conftest import MeshFactory
from tests.helpers.simulator_kernels import KERNELS, integers
from tests.simulator.test_simulator import exchange_kernel

CONFIG = portable.Config(block_m=16, block_n=16, block_k=32, pushers=2, chunk=64, units=2, group_m=2)
FEW = few.Config(block_m=16, block_n=16, block_k=32, pushers=2, chunk=64)
gather_matmul = functools.partial(jtf.all_gather_matmul, axis_name="tp", implementation="simulate", precision="highest")


def operands(mesh: jax.sharding.Mesh, m: int, n: int, k: int, dtype: Any = np.float32) -> tuple[jax.Array, jax.Array]:
    world = mesh.shape["tp"]
    lhs, rhs = integers(0, (world * m, k), np.dtype(dtype)), integers(1, (k, world * n), np.dtype(dtype))
    return (
        jax.device_put(lhs, NamedSharding(mesh, P("tp", None))),
        jax.device_put(rhs, NamedSharding(mesh, P(None, "tp"))),
    )


def program(mesh: jax.sharding.Mesh, f: Callable, **keywords: Any) -> Callable:
    specs = {"in_specs": (P("tp", None), P(None, "tp")), "out_specs": P(None, "tp")}
    return jax.jit(jax.shard_map(f, mesh=mesh, **{**specs, **keywords}))


def product(lhs: jax.Array, rhs: jax.Array) -> np.ndarray:
    return np.asarray(lhs).astype(np.float32) @ np.asarray(rhs).astype(np.float32)


@pytest.mark.parametrize("config", [CONFIG, FEW], ids=["portable", "few"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_all_gather_matmul(cpu_mesh: MeshFactory, world: int, dtype: Any, config: Settings) -> None:
    mesh = cpu_mesh(world, "tp")
    lhs, rhs = operands(mesh, 5, 9, 21, dtype)
    out = program(mesh, functools.partial(gather_matmul, config=config))(lhs, rhs)
    np.testing.assert_array_equal(np.asarray(out).astype(np.float32), product(lhs, rhs))


def test_the_configuration_that_gpus_take(cpu_mesh: MeshFactory) -> None:
    mesh = cpu_mesh(2, "tp")
    lhs, rhs = operands(mesh, 600, 300, 70)
    np.testing.assert_array_equal(program(mesh, gather_matmul)(lhs, rhs), product(lhs, rhs))


@pytest.mark.covers(1)
@pytest.mark.parametrize("seeds", [3, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_while_loop(cpu_mesh: MeshFactory, world: int, dtype: Any, seeds: int) -> None:
    mesh = cpu_mesh(world, "tp")
    lhs, rhs = operands(mesh, 4, 16, 4, dtype)

    def steps(lhs: jax.Array, rhs: jax.Array, implementation: str) -> jax.Array:
        def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            i, x = state
            y = jtf.all_gather_matmul(
                x, rhs, "tp", implementation=implementation, config=CONFIG, precision="highest"
            )  # [world * 4, 16]
            return i + 1, (y.reshape(-1)[: x.size].reshape(x.shape) + x) % 3

        return lax.while_loop(lambda state: state[0] < 3, step, (jnp.int32(0), lhs))[1]

    xla, simulated = (
        program(mesh, functools.partial(steps, implementation=name), out_specs=P("tp", None))
        for name in ("xla", "simulate")
    )
    expected = jax.block_until_ready(xla(lhs, rhs))
    choices = itertools.product(POLICIES, (1, 2, None))
    for seed, (policy, slots) in zip(range(seeds), itertools.cycle(choices), strict=False):
        with simulator.simulating(seed=seed, policy=policy, slots=slots) as recording:
            np.testing.assert_array_equal(jax.block_until_ready(simulated(lhs, rhs)), expected)
        assert len(recording.traces) == 3


@pytest.mark.parametrize("check_vma", [True, False])
def test_shmem_call(cpu_mesh: MeshFactory, check_vma: bool) -> None:
    mesh = cpu_mesh(4, "x")
    kernel = next(kernel for kernel in KERNELS if kernel.name == "custom_kernel").kernel

    def all_gather(x: jax.Array) -> jax.Array:
        grid = triton.cdiv(x.size, 32)
        everybodys = jax.ShapeDtypeStruct((4, *x.shape), x.dtype)
        return jtf.shmem_call(
            kernel,
            x,
            axis_name="x",
            out_type=everybodys,
            grid=grid,
            scratch={"inbox": everybodys},
            signals={"arrived": (4, grid)},
            implementation="simulate",
            SIZE=x.size,
            BLOCK=32,
        )

    f = jax.jit(jax.shard_map(all_gather, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma))
    x = np.arange(4 * 5 * 7, dtype=np.float32).reshape(20, 7)
    out = f(jax.device_put(x, NamedSharding(mesh, P("x"))))
    np.testing.assert_array_equal(np.asarray(out).reshape(4, 20, 7), np.broadcast_to(x, (4, 20, 7)))


def test_teams_of_a_larger_mesh_and_calls_that_do_not_depend_on_each_other(cpu_mesh: MeshFactory) -> None:
    mesh = cpu_mesh((2, 4), ("dp", "tp"))
    lhs, rhs = integers(0, (2 * 4 * 3, 8), np.dtype(np.float32)), integers(1, (8, 4 * 16), np.dtype(np.float32))

    def two(a: jax.Array, b: jax.Array) -> jax.Array:
        return gather_matmul(a, b, config=CONFIG) - gather_matmul(2 * a, b, config=CONFIG)

    f = program(mesh, two, in_specs=(P(("dp", "tp")), P(None, "tp")), out_specs=P("dp", "tp"))
    out = f(
        jax.device_put(lhs, NamedSharding(mesh, P(("dp", "tp")))),
        jax.device_put(rhs, NamedSharding(mesh, P(None, "tp"))),
    )
    np.testing.assert_array_equal(out, -product(lhs, rhs))


def test_operands_of_megabytes_do_not_stop_the_ranks(cpu_mesh: MeshFactory) -> None:
    mesh = cpu_mesh(8, "tp")
    lhs, rhs = operands(mesh, 128, 1, 4096)
    config = dataclasses.replace(CONFIG, block_m=128, block_k=1024, chunk=65536, units=1)
    out = program(mesh, functools.partial(gather_matmul, config=config))(lhs, rhs)
    np.testing.assert_array_equal(out, product(lhs, rhs))


def test_settings_reach_the_calls(cpu_mesh: MeshFactory) -> None:
    mesh = cpu_mesh(3, "tp")
    lhs, rhs = operands(mesh, 17, 9, 21)
    f = program(mesh, functools.partial(gather_matmul, config=CONFIG))
    runs = {}
    for seed, policy, slots in [(0, "random", None), (1, "random", None), *((2, policy, 1) for policy in POLICIES)]:
        simulator.reset()
        with simulator.simulating(seed=seed, policy=policy, slots=slots) as recording:
            np.testing.assert_array_equal(jax.block_until_ready(f(lhs, rhs)), product(lhs, rhs))
        (trace,) = recording.traces  # one simulation for the three ranks
        assert slots is None or max(trace.lanes().values()) == 0
        runs[seed, policy, slots] = tuple(trace.spans)
    assert len(set(runs.values())) == len(runs)


def test_findings_reach_the_caller_and_the_next_call_runs(cpu_mesh: MeshFactory) -> None:
    mesh = cpu_mesh(2, "tp")
    x = jax.device_put(np.arange(16, dtype=np.float32), NamedSharding(mesh, P("tp")))

    def exchange(fault: str) -> Callable:
        def call(x: jax.Array) -> jax.Array:
            return jtf.shmem_call(
                exchange_kernel,
                x,
                axis_name="tp",
                out_type=x,
                grid=1,
                scratch={"inbox": x},
                signals={"arrived": (1, 1)},
                implementation="simulate",
                name="exchange",
                BLOCK=8,
                FAULT=fault,
            )

        return program(mesh, call, in_specs=P("tp"), out_specs=P("tp"))

    for _ in range(2):
        where = r"test_simulator.py:\d+(.|\n)*signal arrived\[0, 0\] of rank 0"
        with pytest.raises(Exception, match=rf"DeadlockError: exchange: Deadlock(.|\n)*{where}"):
            jax.block_until_ready(exchange("silent")(x))
    np.testing.assert_array_equal(exchange("")(x), np.roll(np.asarray(x), 8))


def test_derivatives(cpu_mesh: MeshFactory) -> None:
    mesh = cpu_mesh(2, "tp")
    lhs, rhs = operands(mesh, 4, 16, 8)

    def loss(implementation: str) -> Callable:
        f = functools.partial(
            jtf.all_gather_matmul, axis_name="tp", implementation=implementation, config=CONFIG, precision="highest"
        )
        return jax.grad(lambda a, b: (program(mesh, f)(a, b) ** 2).sum(), argnums=(0, 1))

    jax.tree.map(np.testing.assert_array_equal, loss("simulate")(lhs, rhs), loss("xla")(lhs, rhs))


def test_refusals(cpu_mesh: MeshFactory) -> None:
    mesh = cpu_mesh(2, "tp")
    x = jnp.ones((2, 4, 8), jnp.int32)
    with pytest.raises(NotImplementedError, match="not int32"):
        program(mesh, gather_matmul)(x[0], jnp.ones((8, 4), jnp.int32))
    with pytest.raises(ValueError, match="no implementation 'emulate'"):
        jax.shard_map(
            lambda x: jtf.shmem_call(
                exchange_kernel, x, axis_name="tp", out_type=x, grid=1, implementation="emulate", BLOCK=8, FAULT=""
            ),
            mesh=mesh,
            in_specs=P("tp"),
            out_specs=P("tp"),
        )(x[0])
