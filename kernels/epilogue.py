"""What becomes of a tile of a product before it is rounded and stored: shared by every fused matmul."""

import triton
import triton.language as tl


@triton.jit
def apply(
    tile,  # f32 [BLOCK_M, BLOCK_N]
    gate,  # f32 [BLOCK_M, BLOCK_N], or None
    bias_ptr,  # [N], or None
    residual_ptr,  # first row of the result's shape; row stride N; or None
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
    if bias_ptr is not None:
        tile += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if gate is None:
        tile = activate(tile, ACTIVATION)
    else:
        tile *= activate(gate, ACTIVATION)
    if residual_ptr is not None:
        m = tl.arange(0, BLOCK_M)
        residual = residual_ptr + row.to(tl.int64) * N + m[:, None] * N + n[None, :]
        tile += tl.load(residual, mask=(m[:, None] < rows) & (n[None, :] < N), other=0.0).to(tl.float32)
    return tile


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """A function of `jax.nn`, of f32: "silu", "gelu_tanh", "gelu_exact", or None for x itself."""
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "gelu_exact":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION is None, "epilogue.activate has no such activation")
    return x
