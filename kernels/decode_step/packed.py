"""Eight f32 in the 16 bytes that a thread polls at a time: 14 bits of each, and one exponent for all.

None is further off than 2^-14 times the power of 2 above the largest of the eight (2^-13 if it is nearly that power).
As bf16 the largest itself may be off by 2^-9 of it. Infinity and NaN make all eight NaN.

Words are messages (`shmem.send`), so their lowest bits are not theirs. The three highest bits are the exponent's, and 0
in the last word: so that word is -1 only if it did not come.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BITS = gl.constexpr(14)
LEAST = gl.constexpr(16)  # exponent, as f32 has it: f32 has no scale for smaller ones
ROUNDS = gl.constexpr(1.5 * 2**23)  # plus this an f32 has no room for a fraction: it is rounded to the nearest


@gluon.jit
def nearest(x):
    """x, of magnitudes up to 2^22, as whole numbers."""
    return (x + ROUNDS) - ROUNDS


@gluon.jit
def pack(values, LAYOUT: gl.constexpr):
    """i32 [n, 4], four words of each eight of f32 [8 n].

    Args:
      LAYOUT: of [n, 4, 2]. If it is that of `values`, and eight numbers are a warp's, no warp waits for another one.
    """
    N: gl.constexpr = values.shape[0] // 8
    values = gl.convert_layout(values.reshape([N, 4, 2]), LAYOUT)
    # As integers magnitudes have their order, and infinity and NaN are the largest.
    largest = gl.max(gl.max(values.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 2, keep_dims=True), 1, keep_dims=True)
    exponent = gl.maximum(largest >> 23, LEAST)
    # The largest is below 2^(exponent - 126), and becomes a number below 2^(BITS - 1).
    scale = ((252 + BITS - gl.minimum(exponent, 254)) << 23).to(gl.float32, bitcast=True)
    scaled = gl.minimum(gl.maximum(values * scale, -(2.0 ** (BITS - 1))), 2.0 ** (BITS - 1) - 1)
    numbers = nearest(scaled).to(gl.int32) & ((1 << BITS) - 1)
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    which = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    # The second number's part has the exponent's.
    parts = (numbers << 1) << (BITS * which) | ((exponent >> (3 * word)) & 7) << (29 * which) & -which
    return gl.sum(parts, 2)


@gluon.jit
def unpack(words):
    """f32 [2 n] of i32 [n], of which each thread has four at a time; NaN of -1, what did not come."""
    N: gl.constexpr = words.shape[0] // 4
    even, odd = gl.split(words.reshape([N, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    exponent = ((first >> 29) & 7) | ((second >> 26) & 0x38) | ((third >> 23) & 0x1C0)
    scale = ((exponent + (2 - BITS)) << 23).to(gl.float32, bitcast=True)
    scale = gl.where((exponent >= 255) | (fourth == -1), float("nan"), scale)
    lows = gl.join(gl.join(low(first) * scale, low(third) * scale), gl.join(low(second) * scale, low(fourth) * scale))
    highs = gl.join(
        gl.join(high(first) * scale, high(third) * scale), gl.join(high(second) * scale, high(fourth) * scale)
    )  # fmt: skip
    return gl.join(lows, highs).reshape([8 * N])


@gluon.jit
def low(word):
    """The first number of a word, in f32."""
    return ((word << (31 - BITS)) >> (32 - BITS)).to(gl.float32)


@gluon.jit
def high(word):
    """The second one."""
    return ((word << (31 - 2 * BITS)) >> (32 - BITS)).to(gl.float32)
