"""One tile of a matrix product: shared by every fused matmul."""

import triton
import triton.language as tl
from triton.language.core import builtin

from jaxtaxfree.kernels.blocks import bundle

SCALED = tl.constexpr(128)  # of K, and of N, have one scale where scales are of blocks


@builtin
def _precision(wanted, _semantic=None):
    """The precision of products of f32 that is wanted, or "ieee" where the GPU has no such products, as a constant.

    GPUs of AMD have no "tf32x3", and from gfx950 on no "tf32".
    """
    wanted = tl.core._unwrap_if_constexpr(wanted)
    return tl.constexpr(wanted if wanted in _semantic.builder.options.allowed_dot_input_precisions else "ieee")


@triton.jit
def multiply(
    lhs_ptr,  # first row of the tile
    rhs_ptr,  # [K, N]; with RHS_TRANSPOSED [N, K]
    rows,  # i32, rows of the tile that exist, at least 1
    column,  # i32, first column of the tile
    M: tl.constexpr,  # rows of lhs [M, K]
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,  # of f32 operands: "tf32", "tf32x3" or "ieee"
    RHS_TRANSPOSED: tl.constexpr = False,
    other_ptr=None,  # [K, N], not with RHS_TRANSPOSED: the tile's right half is one of lhs @ other, of the same columns
    source=None,  # what is to be copied meanwhile, or None
    dest=None,  # where to
    count=None,  # i32, how many elements, a multiple of 16; the steps copy K / BLOCK_K * PART of them
    PART: tl.constexpr = 0,  # elements that are copied in a step
    CHUNK: tl.constexpr = 0,  # a power of 2, at least PART
    STRIDE: tl.constexpr = 0,  # from one row of rhs to the next one, if rhs is a part of a wider matrix
    accumulator=None,  # f32 [BLOCK_M, BLOCK_N], to which the product is added, or None
):
    """lhs[:rows] @ rhs[:, column : column + BLOCK_N] with f32 accumulation: f32 [BLOCK_M, BLOCK_N]."""
    if accumulator is None:
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    precision: tl.constexpr = _precision(PRECISION)
    stride: tl.constexpr = STRIDE if STRIDE > 0 else K if RHS_TRANSPOSED else N
    COLUMNS: tl.constexpr = BLOCK_N if other_ptr is None else BLOCK_N // 2
    m = rows_to_read(rows, M, BLOCK_M)
    n = column + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    lhs_ptrs = lhs_ptr + m[:, None] * K + k[None, :]
    if RHS_TRANSPOSED:
        rhs_ptrs = rhs_ptr + k[:, None] + n[None, :].to(tl.int64) * stride
    else:
        rhs_ptrs = rhs_ptr + k[:, None] * stride + n[None, :]
    if other_ptr is not None:
        # One load for both halves, and one product, which makes better use of lhs than two of half the columns.
        size: tl.constexpr = rhs_ptr.dtype.element_ty.primitive_bitwidth // 8
        right = tl.arange(0, BLOCK_N) >= COLUMNS
        rhs_ptrs += tl.where(right, (other_ptr.to(tl.int64) - rhs_ptr.to(tl.int64)) // size - COLUMNS, 0)[None, :]
        n -= tl.where(right, COLUMNS, 0)
        if N * size % 16 == 0:
            rhs_ptrs = tl.max_contiguous(tl.multiple_of(rhs_ptrs, (1, 16)), (1, COLUMNS))
    if source is not None:
        element = tl.arange(0, CHUNK)
        size = tl.multiple_of(tl.minimum(count, PART), 16)
        part = tl.load(source + element, mask=element < size)
    for start in range(0, K, BLOCK_K):
        lhs = load_rows(lhs_ptrs, m, rows, k, K - start, M, K, BLOCK_M, BLOCK_K)
        if K % BLOCK_K == 0 and N % COLUMNS == 0:
            rhs = tl.load(rhs_ptrs)
        else:
            rhs = tl.load(rhs_ptrs, mask=(k[:, None] < K - start) & (n[None, :] < N), other=0.0)
        accumulator = tl.dot(lhs, rhs, accumulator, input_precision=precision)
        lhs_ptrs += BLOCK_K
        rhs_ptrs += BLOCK_K if RHS_TRANSPOSED else BLOCK_K * stride
        if source is not None:
            # What one step loads the next one stores, so that no step waits for memory.
            tl.store(dest + element, part, mask=element < size)
            source += PART
            dest += PART
            count -= PART
            size = tl.multiple_of(tl.minimum(count, PART), 16)
            part = tl.load(source + element, mask=element < size)
    return accumulator


@triton.jit
def multiply_narrow(
    lhs_ptr,  # first row of the tile
    rhs_ptr,  # weights of 8 bits [K, N]; with RHS_TRANSPOSED [N, K]
    scales,  # a bundle: "rhs" f32 [N], or "rhs_blocks" f32 [blocks of K, blocks of N]
    rows,
    column,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RHS_TRANSPOSED: tl.constexpr,
    SCALES: tl.constexpr,  # the names of `scales`
):
    """`multiply` by weights of 8 bits under rows of 16, with their scales."""
    of_columns = bundle.member(scales, SCALES, "rhs")
    of_blocks = bundle.member(scales, SCALES, "rhs_blocks")
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    m = rows_to_read(rows, M, BLOCK_M)
    n = column + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    lhs_ptrs = lhs_ptr + m[:, None] * K + k[None, :]
    if RHS_TRANSPOSED:
        rhs_ptrs = rhs_ptr + k[:, None] + n[None, :].to(tl.int64) * K
    else:
        rhs_ptrs = rhs_ptr + k[:, None] * N + n[None, :]
    for start in range(0, K, BLOCK_K):
        lhs = load_rows(lhs_ptrs, m, rows, k, K - start, M, K, BLOCK_M, BLOCK_K)
        if K % BLOCK_K == 0 and N % BLOCK_N == 0:
            rhs = tl.load(rhs_ptrs)
        else:
            rhs = tl.load(rhs_ptrs, mask=(k[:, None] < K - start) & (n[None, :] < N), other=0.0)
        rhs = rhs.to(lhs.dtype)
        if of_blocks is None:
            accumulator = tl.dot(lhs, rhs, accumulator)
        else:
            at = start // SCALED * tl.cdiv(N, SCALED) + n // SCALED
            factor = tl.load(of_blocks + at, mask=n < N, other=0.0)
            accumulator += tl.dot(lhs, rhs) * factor[None, :]
        lhs_ptrs += BLOCK_K
        rhs_ptrs += BLOCK_K if RHS_TRANSPOSED else BLOCK_K * N
    if of_columns is not None:
        accumulator *= tl.load(of_columns + n, mask=n < N, other=0.0)[None, :]
    return accumulator


@triton.jit
def multiply_gated(
    lhs_ptr,  # first row of the tile
    weights,  # rhs [K, N], or with RHS_TRANSPOSED [N, K]; and gate [K, N], if there is one
    rows,
    column,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    RHS_TRANSPOSED: tl.constexpr,  # not with a gate
    scales=(),  # of weights of 8 bits, not with a gate; see `multiply_narrow`
    SCALES: tl.constexpr = (),
):
    """A tile of lhs @ rhs by `multiply`, and that of lhs @ gate, or None."""
    if len(SCALES) > 0:
        gate: tl.constexpr = None
        product = multiply_narrow(
            lhs_ptr, weights[0], scales, rows, column, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, RHS_TRANSPOSED, SCALES
        )
    elif len(weights) == 1:
        gate: tl.constexpr = None
        product = multiply(
            lhs_ptr, weights[0], rows, column, M, N, K,
            BLOCK_M, BLOCK_N, BLOCK_K, PRECISION, RHS_TRANSPOSED=RHS_TRANSPOSED,
        )  # fmt: skip
    else:
        pair = multiply(
            lhs_ptr, weights[0], rows, column, M, N, K,
            BLOCK_M, 2 * BLOCK_N, BLOCK_K, PRECISION, other_ptr=weights[1],
        )  # fmt: skip
        product, gate = halves(pair, BLOCK_M, 2 * BLOCK_N)
    return product, gate


@triton.jit
def split_gated(tile, GATED: tl.constexpr, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """The product and the gate of which a tile [BLOCK_M, WIDTH] has one half each; without a gate the tile and None."""
    if GATED:
        product, gate = halves(tile, BLOCK_M, WIDTH)
    else:
        product = tile
        gate: tl.constexpr = None
    return product, gate


@triton.jit
def rows_to_read(rows, M: tl.constexpr, BLOCK_M: tl.constexpr):
    """The rows of a tile, of which those past the end are the last one again: they are read, and not stored.

    But in a matrix of less than a tile `load_rows` leaves them out, or that one row would be read far too often.
    """
    m = tl.arange(0, BLOCK_M)
    if M > BLOCK_M and M % BLOCK_M != 0:
        m = tl.minimum(m, rows - 1)
    return m


@triton.jit
def load_rows(
    pointers, m, rows, k, rest,
    M: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The part of a tile's rows that a step of K takes, of which `rest` is left."""
    if M < BLOCK_M:
        tile = tl.load(pointers, mask=(m[:, None] < rows) & (k[None, :] < rest), other=0.0)
    elif K % BLOCK_K == 0:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=k[None, :] < rest, other=0.0)
    return tile


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


@triton.jit
def halves(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The left and the right half of a tile [BLOCK_M, BLOCK_N], without leaving the registers."""
    return tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
