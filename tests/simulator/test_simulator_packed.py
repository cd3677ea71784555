"""Eight numbers in four words: how far they may be off, and what is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxtaxfree import simulator
from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.decode_step import packed, ring

N = 32


@gluon.jit
def there_and_back(
    x_ptr,  # f32 [N, 8]
    bit_ptr,  # i32 [1], the lowest bit of messages
    team,
    words_ptr,  # i32 [N, 4]
    out_ptr,  # f32 [N, 8]
    N: gl.constexpr,
):
    me = shmem.start(team)
    LAYOUT: gl.constexpr = ring.in_order((N, 4, 2), gl.num_warps())
    n = gl.arange(0, N, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    which = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    words = packed.pack(gl.load(x_ptr + 8 * n + 2 * word + which).reshape([8 * N]), LAYOUT)
    words = (words & -2) | gl.load(bit_ptr)
    gl.store(words_ptr + (4 * n + word).reshape([N, 4]), words)
    OUT: gl.constexpr = shmem.vectors_of(8, gl.num_warps())
    values = packed.unpack(gl.convert_layout(words.reshape([4 * N]), shmem.vectors_of(4, gl.num_warps())))
    gl.store(out_ptr + gl.arange(0, 8 * N, OUT), gl.convert_layout(values, OUT))
    shmem.finish(me)


def run(x, bit):
    """(words [N, 4], what they are unpacked to [N, 8])."""
    out_type = (jax.ShapeDtypeStruct((4 * N,), jnp.int32), jax.ShapeDtypeStruct((8 * N,), jnp.float32))
    outs, _ = simulator.run(
        there_and_back,
        [x.reshape(-1)],
        [np.array([bit], np.int32)],
        world=1,
        out_type=out_type,
        grid=1,
        num_warps=4,
        N=N,
    )
    words, out = outs[0]
    return np.asarray(words).reshape(N, 4), np.asarray(out).reshape(N, 8)


@pytest.mark.parametrize("bit", [0, 1])
def test_numbers_of_all_magnitudes(bit):
    """None is off by more than 2^-14 of the power of 2 above the largest, which is cut if it is nearly that."""
    rng = np.random.default_rng(bit)
    x = rng.standard_normal((N, 8)) * np.exp2(rng.uniform(-100, 120, (N, 1))) * np.exp2(rng.uniform(-12, 0, (N, 8)))
    x = x.astype(np.float32)
    x[0], x[1], x[2] = 0.0, 1.0, -1.0
    x[3] = [8191.9, -8191.9, 0.5, 1, 2, 3, 4, -5]
    words, out = run(x, bit)
    above = np.exp2(np.floor(np.log2(np.abs(x).max(1, keepdims=True) + 1e-38)) + 1)
    np.testing.assert_array_equal(out[:3], x[:3])
    np.testing.assert_array_equal(out[3], [8191, -8192, 0, 1, 2, 3, 4, -5])
    bound = np.where(x > above * (1 - 2.0**-14), 2.0**-13, 2.0**-14)
    assert (np.abs(out - x) <= above * bound).all()
    assert (words[:, 3] != -1).all()
    assert (words & 1 == bit).all()
    out[3] = 0.0  # of which one became that power
    np.testing.assert_array_equal(run(out, bit)[1], out)  # what has been packed is not rounded again


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_makes_all_eight_none(what):
    x = np.ones((N, 8), np.float32)
    x[5, 3] = what
    words, out = run(x, 1)
    assert np.isnan(out[5]).all()
    assert (words[:, 3] != -1).all()
    np.testing.assert_array_equal(np.delete(out, 5, 0), 1.0)


def test_tiny_numbers():
    """Below 2^-111 all have one exponent: 2^-123 is the least number."""
    x = np.full((N, 8), 1e-36, np.float32)
    x[1], x[2], x[3] = 2.0**-111, 2.0**-123, 2.0**-125
    _, out = run(x, 0)
    assert (np.abs(out[0] - x[0]) <= 2.0**-124).all()
    np.testing.assert_array_equal(out[1:3], x[1:3])
    np.testing.assert_array_equal(out[3], 0.0)
