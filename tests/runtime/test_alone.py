"""Kernels that work alone, without a team, and descriptors of slices of rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import simulator
from jaxtaxfree.call import described_as
from tests.helpers.support import TRITON_CALL, fails, lower_for_cuda, mesh_of

SHAPE = jax.ShapeDtypeStruct((64,), np.dtype(np.float32))


@triton.jit
def double_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, 2 * tl.load(x_ptr + i))


@triton.jit
def outside_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i + 1, tl.load(x_ptr + i))


def double(x: jax.Array, implementation: str | None = None) -> jax.Array:
    return jtf.shmem_call(double_kernel, x, axis_name=(), out_type=SHAPE, grid=1, implementation=implementation, N=64)


def test_in_the_simulator() -> None:
    """It has no epoch to count, and a write outside is found as ever."""
    x = np.arange(64, dtype=np.float32)
    out, _ = simulator.run(double_kernel, [x], world=1, grid=1, out_type=SHAPE, N=64)
    np.testing.assert_array_equal(out[0], 2 * x)
    with pytest.raises(simulator.OutOfBoundsError):
        simulator.run(outside_kernel, [x], world=1, grid=1, out_type=SHAPE, N=64)
    mesh = mesh_of(2)
    program = jax.shard_map(lambda x: double(x[0], "simulate")[None], mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    both = np.stack([x, x + 1])
    np.testing.assert_array_equal(program(both), 2 * both)


def test_lowered_for_cuda() -> None:
    """No address of a heap is in the program, and what nobody uses is not there."""
    inside = functools.partial(jax.shard_map, mesh=mesh_of(1), in_specs=P(), out_specs=P())
    text = lower_for_cuda(inside(double), SHAPE)
    assert text.count(TRITON_CALL) == 1
    assert "has_side_effect = true" not in text
    assert TRITON_CALL not in lower_for_cuda(inside(lambda x: (double(x), x)[1]), SHAPE)


def test_errors() -> None:
    with fails(TypeError, "'signal' of the heap", "no parameter 'team'"):
        jtf.shmem_call(double_kernel, jnp.zeros(64), axis_name=(), out_type=SHAPE, grid=1, signals={"signal": 1}, N=64)


def test_descriptors_of_slices() -> None:
    """Indices of `ragged.to_ragged` lead to the row that they say, and end where the slice does."""
    assert described_as((10, 8), (4, 8)) == ((10, 8), (8, 1))
    assert described_as((10, 256), (2, 8, 64)) == ((4, 10, 64), (64, 256, 1))  # groups of columns, then rows
    shape, strides = described_as((1000, 24), (1, 1, 64, 8))
    begin, size, row, column = 130, 70, 64, 8
    end = 1 << 30
    at = (end, begin + size, end - size + row, column)
    address = 2 * sum(i * stride for i, stride in zip(at, strides, strict=True)) % 2**64
    assert address == 2 * ((begin + row) * 24 + column)
    assert [i for i in range(64) if at[2] + i < shape[2]] == list(range(size - row))
    assert all(i < most for i, most in zip(at, shape, strict=True))
    assert all(2 * stride % 16 == 0 and 2 * stride < 2**40 for stride in strides[:-1])
