"""One tile of a matrix product: shared by every fused matmul."""

import triton
import triton.language as tl


@triton.jit
def multiply(
    lhs_ptr,  # first row of the tile; row stride K
    rhs_ptr,  # [K, N]
    rows,  # i32, rows of the tile that exist, at least 1
    column,  # i32, first column of the tile
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,  # of f32 operands: "tf32", "tf32x3" or "ieee"
):
    """lhs[:rows] @ rhs[:, column : column + BLOCK_N] with f32 accumulation: f32 [BLOCK_M, BLOCK_N]."""
    m = tl.minimum(tl.arange(0, BLOCK_M), rows - 1)  # rows past the end read the last one again, and are not stored
    n = column + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    lhs_ptrs = lhs_ptr + m[:, None] * K + k[None, :]
    rhs_ptrs = rhs_ptr + k[:, None] * N + n[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            lhs = tl.load(lhs_ptrs)
        else:
            lhs = tl.load(lhs_ptrs, mask=k[None, :] < K - start, other=0.0)
        if K % BLOCK_K == 0 and N % BLOCK_N == 0:
            rhs = tl.load(rhs_ptrs)
        else:
            rhs = tl.load(rhs_ptrs, mask=(k[:, None] < K - start) & (n[None, :] < N), other=0.0)
        accumulator = tl.dot(lhs, rhs, accumulator, input_precision=PRECISION)
        lhs_ptrs += BLOCK_K
        rhs_ptrs += BLOCK_K * N
    return accumulator


@triton.jit
def store_tile(
    out_ptr,  # first row of the tile; row stride N
    tile,  # f32 [BLOCK_M, BLOCK_N]
    rows,
    column,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rounds a tile to the output's type and stores the part of it that exists."""
    m = tl.arange(0, BLOCK_M)
    n = column + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + m[:, None] * N + n[None, :]
    tl.store(out_ptrs, tile.to(out_ptr.dtype.element_ty), mask=(m[:, None] < rows) & (n[None, :] < N))
