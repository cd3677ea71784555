"""`ragged_dot` and the gradient of its weights for any GPU.

A program computes one tile, of one group. The host does not know how many row blocks there are: it launches as many
programs as there can be, and those behind the last tile leave at once.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels.blocks import epilogue, matmul, ragged


@triton.jit
def ragged_dot_kernel(
    lhs_ptr,  # [M, K]
    weights,  # rhs, and gate if any, [GROUPS, K, N]; with TRANSPOSED rhs [GROUPS, N, K]
    sizes_ptr,  # i32 [GROUPS]
    out_ptr,  # [M, N]
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # of each product, if there is a gate
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FILL: tl.constexpr,  # rows behind the last group are zeros, or whatever was there
):
    groups = ragged.read(sizes_ptr, tl.arange(0, ragged.length_of(GROUPS)), M, GROUPS, BLOCK_M, FILL)
    tile = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    if tile < ragged.blocks_of(groups) * columns:
        at = ragged.place(groups, tile, columns, BLOCK_M, BLOCK_N, GROUP_M)
        rows = tl.minimum(at.size - at.row, BLOCK_M)
        out = out_ptr + (at.begin + at.row).to(tl.int64) * N
        if at.group < GROUPS:
            lhs = lhs_ptr + (at.begin + at.row).to(tl.int64) * K
            own = (weights[0] + at.group.to(tl.int64) * (K * N),)
            if len(weights) > 1:
                own = (own[0], weights[1] + at.group.to(tl.int64) * (K * N))
            # Rows behind the group's are its last one again, which `multiply` makes of an M that is no whole block.
            tile_, gate = matmul.multiply_gated(
                lhs, own, rows, at.column, 2 * BLOCK_M + 1, N, K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, TRANSPOSED
            )
            last = epilogue.Epilogue(None, None)
            epilogue.store_tile(out, tile_, gate, last, 0, rows, at.column, N, BLOCK_M, BLOCK_N, ACTIVATION)
        else:
            nothing = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32) * groups.scale
            matmul.store_tile(out, nothing, rows, at.column, N, BLOCK_M, BLOCK_N)


@triton.jit
def ragged_dot_weights_kernel(
    lhs_ptr,  # [M, K]
    rhs_ptr,  # [M, N]
    sizes_ptr,  # i32 [GROUPS]
    out_ptr,  # [GROUPS, K, N]: lhs^T @ rhs of each group's rows
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # of K
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # rows of a step
    GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    groups = ragged.read(sizes_ptr, tl.arange(0, ragged.length_of(GROUPS)), M, GROUPS, BLOCK_M)
    at = ragged.place_of_weights(
        groups, None, tl.program_id(0), tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N), BLOCK_M, BLOCK_N, GROUP_M
    )
    row = tl.arange(0, BLOCK_K)
    k = at.row + tl.arange(0, BLOCK_M)
    n = at.column + tl.arange(0, BLOCK_N)
    lhs = lhs_ptr + at.begin.to(tl.int64) * K + row[:, None] * K + k[None, :]
    rhs = rhs_ptr + at.begin.to(tl.int64) * N + row[:, None] * N + n[None, :]
    product = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, at.size, BLOCK_K):
        there = row[:, None] < at.size - first
        x = tl.load(lhs, mask=there & (k[None, :] < K), other=0.0)
        y = tl.load(rhs, mask=there & (n[None, :] < N), other=0.0)
        product = tl.dot(tl.trans(x), y, product, input_precision=PRECISION)
        lhs += BLOCK_K * K
        rhs += BLOCK_K * N
    out = out_ptr + at.group.to(tl.int64) * (K * N) + at.row.to(tl.int64) * N
    matmul.store_tile(out, product * groups.scale, K - at.row, at.column, N, BLOCK_M, BLOCK_N)
