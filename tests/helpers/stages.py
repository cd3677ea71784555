"""Stands for `tritonblas.kernels.stages`, the matrix products that Iris's `ops` call: as much of it as they use."""

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate


@aggregate
class View:
    ptr: tl.tensor
    rows: tl.tensor
    columns: tl.tensor
    stride_row: tl.tensor
    stride_column: tl.tensor

    @triton.constexpr_function
    def __init__(self, ptr, rows, columns, stride_row, stride_column):
        self.ptr = ptr
        self.rows = rows
        self.columns = columns
        self.stride_row = stride_row
        self.stride_column = stride_column


@triton.jit
def make_tensor_view(ptr, rows, columns, stride_row, stride_column):
    zero = tl.program_id(0) * 0  # Triton makes a constant of a parameter that is 1, and a view takes tensors
    return View(ptr, rows + zero, columns + zero, stride_row + zero, stride_column + zero)


@aggregate
class Tile:
    pid_m: tl.tensor
    pid_n: tl.tensor
    block_m: tl.constexpr
    block_n: tl.constexpr

    @triton.constexpr_function
    def __init__(self, pid_m, pid_n, block_m, block_n):
        self.pid_m = pid_m
        self.pid_n = pid_n
        self.block_m = tl.constexpr(block_m)
        self.block_n = tl.constexpr(block_n)

    @triton.jit
    def indices(self):
        row = self.pid_m * self.block_m + tl.arange(0, self.block_m)
        return row, self.pid_n * self.block_n + tl.arange(0, self.block_n)


@aggregate
class GemmContext:
    block_m: tl.constexpr
    block_n: tl.constexpr
    block_k: tl.constexpr
    num_sms: tl.constexpr

    @triton.constexpr_function
    def __init__(self, block_m, block_n, block_k, num_sms=1, num_xcds=1, group_size_m=1, even_k=True, allow_tf32=False):
        self.block_m = tl.constexpr(block_m)
        self.block_n = tl.constexpr(block_n)
        self.block_k = tl.constexpr(block_k)
        self.num_sms = tl.constexpr(num_sms)

    @triton.jit
    def init_accumulator(self):
        return tl.zeros((self.block_m, self.block_n), tl.float32)

    @triton.jit
    def reduce_axis(self, lhs, rhs, tile):
        row, column = tile.indices()
        acc = self.init_accumulator()
        for begin in range(0, lhs.columns, self.block_k):
            k = begin + tl.arange(0, self.block_k)
            a_at = lhs.ptr + row[:, None] * lhs.stride_row + k[None, :] * lhs.stride_column
            b_at = rhs.ptr + k[:, None] * rhs.stride_row + column[None, :] * rhs.stride_column
            a = tl.load(a_at, mask=(row[:, None] < lhs.rows) & (k[None, :] < lhs.columns), other=0.0)
            b = tl.load(b_at, mask=(k[:, None] < rhs.rows) & (column[None, :] < rhs.columns), other=0.0)
            acc = tl.dot(a, b, acc)
        return acc


@aggregate
class ScheduleContext:
    m: tl.tensor
    n: tl.tensor
    gemm: GemmContext

    @triton.constexpr_function
    def __init__(self, m, n, k, gemm):
        self.m = m
        self.n = n
        self.gemm = gemm

    @triton.jit
    def persistent_tile_range(self):
        tiles = tl.cdiv(self.m, self.gemm.block_m) * tl.cdiv(self.n, self.gemm.block_n)
        return tl.program_id(0), tiles, self.gemm.num_sms

    @triton.jit
    def get_tile_from_idx(self, index):
        tiles_n = tl.cdiv(self.n, self.gemm.block_n)
        return Tile(index // tiles_n, index % tiles_n, self.gemm.block_m, self.gemm.block_n)
