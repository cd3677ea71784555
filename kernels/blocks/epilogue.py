"""What becomes of a tile of a product before it is rounded and stored: shared by every fused matmul."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jaxtaxfree.kernels.blocks import bundle, matmul


class Epilogue(NamedTuple):
    """What is added to a tile. Of pointers, `apply` does it; where TMA loads the residual, its kernel does."""

    bias: Any  # [N], or None
    residual: Any  # of the result's shape, or None


@triton.jit
def of(operands, NAMES: tl.constexpr):
    """The `Epilogue` of a kernel's bundle."""
    return Epilogue(bundle.member(operands, NAMES, "bias"), bundle.member(operands, NAMES, "residual"))


@triton.jit
def apply(
    tile,  # f32 [BLOCK_M, BLOCK_N]
    gate,  # f32 [BLOCK_M, BLOCK_N], or None
    last,  # an `Epilogue`
    row,  # i32, first row of the tile
    rows,  # i32, rows of the tile that exist
    column,  # i32, first column of the tile
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,  # see `activate`
):
    """activation(tile + bias) + residual; with a gate activation(gate) * (tile + bias) + residual."""
    n = column + tl.arange(0, BLOCK_N)
    if last.bias is not None:
        tile += tl.load(last.bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tile = activate_gated(tile, gate, ACTIVATION)
    if last.residual is not None:
        m = tl.arange(0, BLOCK_M)
        residual = last.residual + row.to(tl.int64) * N + m[:, None] * N + n[None, :]
        tile += tl.load(residual, mask=(m[:, None] < rows) & (n[None, :] < N), other=0.0).to(tl.float32)
    return tile


@triton.jit
def store_tile(
    out_ptr,  # first row of the tile; row stride N
    tile,
    gate,
    last,
    row,
    rows,
    column,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """What `apply` makes of a tile, stored as `matmul.store_tile` does."""
    ALONE: tl.constexpr = gate is None and last.bias is None and last.residual is None and ACTIVATION is None
    if gate is None and not ALONE and BLOCK_M * BLOCK_N > 64 * 128:
        # By halves, and these again, because the registers hold no second tile beside a large one.
        half: tl.constexpr = BLOCK_N // 2
        left, right = matmul.halves(tile, BLOCK_M, BLOCK_N)
        store_tile(out_ptr, left, None, last, row, rows, column, N, BLOCK_M, half, ACTIVATION)
        column += half
        store_tile(out_ptr, right, None, last, row, rows, column, N, BLOCK_M, half, ACTIVATION)
    else:
        tile = apply(tile, gate, last, row, rows, column, N, BLOCK_M, BLOCK_N, ACTIVATION)
        matmul.store_tile(out_ptr, tile, rows, column, N, BLOCK_M, BLOCK_N)


@triton.jit
def activate_gated(x, gate, ACTIVATION: tl.constexpr):
    """activate(x), or activate(gate) * x if there is a gate."""
    if gate is None:
        x = activate(x, ACTIVATION)
    else:
        x *= activate(gate, ACTIVATION)
    return x


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """A function of `jax.nn`, of f32: "silu", "gelu_tanh", "gelu_exact", or None for x itself."""
    if ACTIVATION == "silu":
        x = x * sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        x = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "gelu_exact":
        x = x * normal_cdf(x)
    else:
        tl.static_assert(ACTIVATION is None, "epilogue.activate has no such activation")
    return x


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return reciprocal(1.0 + tl.exp(-x))


@triton.jit
def normal_cdf(x):
    """(1 + erf(x / sqrt(2))) / 2 within 6e-7, in fewer registers than `tl.erf`.

    By formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions.
    """
    z = tl.abs(x) * 0.7071067811865476
    t = reciprocal(1.0 + 0.3275911 * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * tl.exp(-z * z)
    return tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def reciprocal(x):
    """1 / x of a positive x, in fewer registers than a quotient."""
    root = tl.rsqrt(x)
    return root * root
