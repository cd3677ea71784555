"""The words of Iris's device functions, for kernels that `jaxtaxfree.iris_call` runs: `from jaxtaxfree import iris`.

Signatures are Iris's (https://github.com/ROCm/iris), so a kernel file runs unchanged. `heap_bases` is the table that
`BASES` stands for, `context_tensor` what `CONTEXT` does. What is different:

* An address moves by a multiple of 16 bytes, which the compiler sees: accesses stay 16 bytes wide.
* Atomics are of the system unless `scope` says otherwise, because the memory is a peer's.
* `volatile` leaves out the cache modifier, which NVIDIA's assembler takes with neither.
* A rank may be a run-time value everywhere, in `Context` as well: one kernel serves all ranks.
* There are no copy engines and no traces.

A pointer is of this rank's heap; ranks are i32. `mask`, `other`, `cache_modifier`, `sem` and `scope` are those of
Triton's functions; `hint` is what `tl.multiple_of` and `tl.max_contiguous` take, of the translated pointers.
"""

import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate
from triton.language.core import builtin

from jaxtaxfree.kernels import shmem


@builtin
def _or(value, default, _semantic=None):
    """A constant, or another one in place of None."""
    value = getattr(value, "value", value)
    return tl.constexpr(getattr(default, "value", default) if value is None else value)


@builtin
def _modifier(modifier, volatile, _semantic=None):
    text, volatile = getattr(modifier, "value", modifier), getattr(volatile, "value", volatile)
    return tl.constexpr("" if text is None or volatile else text)


@triton.jit
def _translate(pointer, here, there, heap_bases, hint: tl.constexpr = None):
    """Where rank `there` keeps what rank `here`, whose address it is, keeps at `pointer`."""
    size: tl.constexpr = (pointer.dtype.scalar.element_ty.primitive_bitwidth + 7) // 8
    apart = (tl.load(heap_bases + there) - tl.load(heap_bases + here)).to(tl.int64)
    pointer = pointer + apart // (16 * size) * 16
    if hint is not None:
        pointer = tl.max_contiguous(tl.multiple_of(pointer, hint), hint)
    return pointer


@triton.jit
def load(
    pointer,
    to_rank,
    from_rank,
    heap_bases,
    mask=None,
    other=None,
    cache_modifier=None,
    volatile: tl.constexpr = False,
    hint: tl.constexpr = None,
):
    """What `from_rank` keeps at `pointer`, an address of `to_rank`, which is this rank."""
    at = _translate(pointer, to_rank, from_rank, heap_bases, hint)
    return tl.load(at, mask=mask, other=other, cache_modifier=_modifier(cache_modifier, volatile), volatile=volatile)


@triton.jit
def store(pointer, value, from_rank, to_rank, heap_bases, mask=None, hint: tl.constexpr = None, cache_modifier=None):
    """Stores to where `to_rank` keeps `pointer`, an address of `from_rank`, which is this rank."""
    at = _translate(pointer, from_rank, to_rank, heap_bases, hint)
    tl.store(at, value, mask=mask, cache_modifier=_modifier(cache_modifier, False))


@triton.jit
def copy(
    src_ptr,
    dst_ptr,
    from_rank,
    to_rank,
    cur_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier=None,
    store_cache_modifier=None,
    hint: tl.constexpr = None,
):
    """Copies from where `from_rank` keeps `src_ptr` to where `to_rank` keeps `dst_ptr`: addresses of `cur_rank`."""
    value = load(src_ptr, cur_rank, from_rank, heap_bases, mask, other, load_cache_modifier, False, hint)
    store(dst_ptr, value, cur_rank, to_rank, heap_bases, mask, hint, store_cache_modifier)


@triton.jit
def get(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier=None,
    store_cache_modifier=None,
    hint: tl.constexpr = None,
):
    """Copies to this rank's `to_ptr` what `to_rank` keeps at `from_ptr`, an address of `from_rank`, which is this rank.

    So Iris's code has it, and its tests; its documentation has the ranks the other way round.
    """
    value = load(from_ptr, from_rank, to_rank, heap_bases, mask, other, load_cache_modifier, False, hint)
    tl.store(to_ptr, value, mask=mask, cache_modifier=_modifier(store_cache_modifier, False))


@triton.jit
def put(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier=None,
    store_cache_modifier=None,
    hint: tl.constexpr = None,
    copy_engine_ctx=None,
    from_row_stride: tl.constexpr = 0,
    to_row_stride: tl.constexpr = 0,
    use_copy_engine: tl.constexpr = False,
    contiguous_copy: tl.constexpr = False,
    from_base_ptr=None,
    to_base_ptr=None,
):
    """Copies what this rank keeps at `from_ptr` to where `to_rank` keeps `to_ptr`."""
    tl.static_assert(not use_copy_engine, "jaxtaxfree.iris has no copy engines: leave use_copy_engine out")
    value = tl.load(from_ptr, mask=mask, other=other, cache_modifier=_modifier(load_cache_modifier, False))
    store(to_ptr, value, from_rank, to_rank, heap_bases, mask, hint, store_cache_modifier)


@triton.jit
def quiet(copy_engine_ctx, to_rank):
    """Waits for copy engines, of which there are none."""


@triton.jit
def atomic_add(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem=None,
    scope=None,
    hint: tl.constexpr = None,
    copy_engine_ctx=None,
    use_copy_engine: tl.constexpr = False,
):
    """Adds to what `to_rank` keeps at `pointer`, and returns what was there; so do the other atomics, each its way."""
    tl.static_assert(not use_copy_engine, "jaxtaxfree.iris has no copy engines: leave use_copy_engine out")
    at = _translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_add(at, val, mask=mask, sem=sem, scope=_or(scope, "sys"))


@triton.jit
def atomic_sub(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None, hint: tl.constexpr = None
):
    return atomic_add(pointer, -val, from_rank, to_rank, heap_bases, mask, sem, scope, hint)


@triton.jit
def atomic_cas(
    pointer,
    cmp,
    val,
    from_rank,
    to_rank,
    heap_bases,
    sem=None,
    scope=None,
    hint: tl.constexpr = None,
    copy_engine_ctx=None,
    use_copy_engine: tl.constexpr = False,
):
    tl.static_assert(not use_copy_engine, "jaxtaxfree.iris has no copy engines: leave use_copy_engine out")
    at = _translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_cas(at, cmp, val, sem=sem, scope=_or(scope, "sys"))


@triton.jit
def atomic_xchg(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None, hint: tl.constexpr = None
):
    at = _translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_xchg(at, val, mask=mask, sem=sem, scope=_or(scope, "sys"))


@triton.jit
def atomic_xor(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None, hint: tl.constexpr = None
):
    at = _translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_xor(at, val, mask=mask, sem=sem, scope=_or(scope, "sys"))


@triton.jit
def atomic_and(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None, hint: tl.constexpr = None
):
    at = _translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_and(at, val, mask=mask, sem=sem, scope=_or(scope, "sys"))


@triton.jit
def atomic_or(pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None, hint: tl.constexpr = None):
    at = _translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_or(at, val, mask=mask, sem=sem, scope=_or(scope, "sys"))


@triton.jit
def atomic_min(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None, hint: tl.constexpr = None
):
    at = _translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_min(at, val, mask=mask, sem=sem, scope=_or(scope, "sys"))


@triton.jit
def atomic_max(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem=None, scope=None, hint: tl.constexpr = None
):
    at = _translate(pointer, from_rank, to_rank, heap_bases, hint)
    return tl.atomic_max(at, val, mask=mask, sem=sem, scope=_or(scope, "sys"))


@triton.jit
def _tile(ptr, rm, rn, M, N, stride_m, stride_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(pointers [BLOCK_M, BLOCK_N] to rows rm and columns rn of a matrix, whether each is inside)."""
    rm = tl.max_contiguous(tl.multiple_of(rm, BLOCK_M), BLOCK_M)
    rn = tl.max_contiguous(tl.multiple_of(rn, BLOCK_N), BLOCK_N)
    return ptr + rm[:, None] * stride_m + rn[None, :] * stride_n, (rm[:, None] < M) & (rn[None, :] < N)


@triton.jit
def _indices(tile):
    """The rows and columns of a tile."""
    rows = tile.pid_m * tile.block_m + tl.arange(0, tile.block_m)
    return rows, tile.pid_n * tile.block_n + tl.arange(0, tile.block_n)


@triton.jit
def _layout(tile, M, N):
    rows, columns = _indices(tile)
    return rows, columns, (rows[:, None] < M) & (columns[None, :] < N)


@aggregate
class TileView:
    """A place in a matrix: tile (pid_m, pid_n), of block_m rows and block_n columns."""

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
    def layout(self, M, N):
        """(rows, columns, mask [block_m, block_n] of those inside)."""
        return _layout(self, M, N)

    @triton.jit
    def indices(self):
        """(rows, columns)."""
        return _indices(self)


@aggregate
class Tile:
    """A `TileView` with the values of the tile: data [block_m, block_n]."""

    pid_m: tl.tensor
    pid_n: tl.tensor
    block_m: tl.constexpr
    block_n: tl.constexpr
    data: tl.tensor

    @triton.constexpr_function
    def __init__(self, pid_m, pid_n, block_m, block_n, data):
        self.pid_m = pid_m
        self.pid_n = pid_n
        self.block_m = tl.constexpr(block_m)
        self.block_n = tl.constexpr(block_n)
        self.data = data

    @triton.jit
    def layout(self, M, N):
        """(rows, columns, mask [block_m, block_n] of those inside)."""
        return _layout(self, M, N)

    @triton.jit
    def indices(self):
        """(rows, columns)."""
        return _indices(self)


@aggregate
class TensorView:
    """A matrix [M, N] in memory. `make_tensor_view` makes one."""

    ptr: tl.tensor
    M: tl.tensor
    N: tl.tensor
    stride_m: tl.tensor
    stride_n: tl.tensor

    @triton.constexpr_function
    def __init__(self, ptr, M, N, stride_m, stride_n):
        self.ptr = ptr
        self.M = M
        self.N = N
        self.stride_m = stride_m
        self.stride_n = stride_n

    @triton.jit
    def tile_ptr(self, tile):
        """(pointers to a tile, whether each is inside)."""
        rows, columns = _indices(tile)
        return self.tile_ptr_from_indices(rows, columns, tile.block_m, tile.block_n)

    @triton.jit
    def tile_ptr_from_indices(self, rm, rn, block_m: tl.constexpr, block_n: tl.constexpr):
        return _tile(self.ptr, rm, rn, self.M, self.N, self.stride_m, self.stride_n, block_m, block_n)

    @triton.jit
    def offset_tile_ptr(self, tile, offset_m=0, offset_n=0, src_mask=None):
        """(pointers to a tile that is moved by so many rows and columns, whether each is inside, and in src_mask)."""
        rows, columns = _indices(tile)
        pointers, mask = self.tile_ptr_from_indices(rows + offset_m, columns + offset_n, tile.block_m, tile.block_n)
        if src_mask is not None:
            mask = mask & src_mask
        return pointers, mask

    @triton.jit
    def offset(self, offset_m=0, offset_n=0):
        """A view that begins so many rows and columns later."""
        moved = self.ptr + offset_m * self.stride_m + offset_n * self.stride_n
        return make_tensor_view(moved, self.M, self.N, self.stride_m, self.stride_n)

    @triton.jit
    def number_of_tiles(self, block_m, block_n):
        return tl.cdiv(self.M, block_m) * tl.cdiv(self.N, block_n)


@triton.jit
def make_tensor_view(ptr, M, N, stride_m, stride_n):
    """A `TensorView` of numbers that may be constants."""
    return TensorView(ptr, tl.to_tensor(M), tl.to_tensor(N), tl.to_tensor(stride_m), tl.to_tensor(stride_n))


@aggregate
class AllReduceConfig:
    """Which all-reduce (0 atomic, 1 ring, 2 one shot, 3 two shots, 4 spin lock), and where its locks are."""

    variant_code: tl.constexpr
    locks_ptr: tl.tensor

    @triton.constexpr_function
    def __init__(self, variant_code, locks_ptr):
        self.variant_code = tl.constexpr(variant_code)
        self.locks_ptr = locks_ptr


@aggregate
class Context:
    """The rank, the number of ranks and the table of bases, so that calls need not name them."""

    rank: tl.tensor
    world_size: tl.constexpr
    heap_bases: tl.tensor

    @triton.constexpr_function
    def __init__(self, rank, world_size, heap_bases):
        self.rank = rank
        self.world_size = tl.constexpr(world_size)
        self.heap_bases = heap_bases

    @staticmethod
    @triton.jit
    def initialize(context_tensor, rank, world_size, tracing: tl.constexpr = False):
        """The context of a kernel.

        Args:
          context_tensor: what `CONTEXT` stands for.
          rank: this rank, a constant or not.
          world_size: number of ranks, a constant.
        """
        tl.static_assert(not tracing, "jaxtaxfree.iris keeps no trace: leave tracing out")
        return Context(tl.to_tensor(rank), world_size, context_tensor + 2)

    @triton.jit
    def load(
        self,
        pointer,
        from_rank,
        mask=None,
        other=None,
        cache_modifier=None,
        volatile: tl.constexpr = False,
        hint: tl.constexpr = None,
    ):
        at = _translate(pointer, self.rank, from_rank, self.heap_bases, hint)
        modifier: tl.constexpr = _modifier(cache_modifier, volatile)
        return tl.load(at, mask=mask, other=other, cache_modifier=modifier, volatile=volatile)

    @triton.jit
    def store(self, pointer, value, to_rank, mask=None, cache_modifier=None, hint: tl.constexpr = None):
        at = _translate(pointer, self.rank, to_rank, self.heap_bases, hint)
        tl.store(at, value, mask=mask, cache_modifier=_modifier(cache_modifier, False))

    @triton.jit
    def get(
        self,
        from_ptr,
        to_ptr,
        from_rank,
        mask=None,
        other=None,
        load_cache_modifier=None,
        store_cache_modifier=None,
        hint: tl.constexpr = None,
    ):
        value = self.load(from_ptr, from_rank, mask, other, load_cache_modifier, False, hint)
        tl.store(to_ptr, value, mask=mask, cache_modifier=_modifier(store_cache_modifier, False))

    @triton.jit
    def put(
        self,
        from_ptr,
        to_ptr,
        to_rank,
        mask=None,
        other=None,
        load_cache_modifier=None,
        store_cache_modifier=None,
        hint: tl.constexpr = None,
    ):
        value = tl.load(from_ptr, mask=mask, other=other, cache_modifier=_modifier(load_cache_modifier, False))
        self.store(to_ptr, value, to_rank, mask, store_cache_modifier, hint)

    @triton.jit
    def copy(
        self,
        src_ptr,
        dst_ptr,
        from_rank,
        to_rank,
        mask=None,
        other=None,
        load_cache_modifier=None,
        store_cache_modifier=None,
        hint: tl.constexpr = None,
    ):
        value = self.load(src_ptr, from_rank, mask, other, load_cache_modifier, False, hint)
        self.store(dst_ptr, value, to_rank, mask, store_cache_modifier, hint)

    @triton.jit
    def atomic_add(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint: tl.constexpr = None):
        at = _translate(pointer, self.rank, to_rank, self.heap_bases, hint)
        return tl.atomic_add(at, val, mask=mask, sem=sem, scope=_or(scope, "sys"))

    @triton.jit
    def atomic_sub(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint: tl.constexpr = None):
        at = _translate(pointer, self.rank, to_rank, self.heap_bases, hint)
        return tl.atomic_add(at, -val, mask=mask, sem=sem, scope=_or(scope, "sys"))

    @triton.jit
    def atomic_cas(self, pointer, cmp, val, to_rank, sem=None, scope=None, hint: tl.constexpr = None):
        at = _translate(pointer, self.rank, to_rank, self.heap_bases, hint)
        return tl.atomic_cas(at, cmp, val, sem=sem, scope=_or(scope, "sys"))

    @triton.jit
    def atomic_xchg(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint: tl.constexpr = None):
        at = _translate(pointer, self.rank, to_rank, self.heap_bases, hint)
        return tl.atomic_xchg(at, val, mask=mask, sem=sem, scope=_or(scope, "sys"))

    @triton.jit
    def atomic_xor(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint: tl.constexpr = None):
        at = _translate(pointer, self.rank, to_rank, self.heap_bases, hint)
        return tl.atomic_xor(at, val, mask=mask, sem=sem, scope=_or(scope, "sys"))

    @triton.jit
    def atomic_and(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint: tl.constexpr = None):
        at = _translate(pointer, self.rank, to_rank, self.heap_bases, hint)
        return tl.atomic_and(at, val, mask=mask, sem=sem, scope=_or(scope, "sys"))

    @triton.jit
    def atomic_or(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint: tl.constexpr = None):
        at = _translate(pointer, self.rank, to_rank, self.heap_bases, hint)
        return tl.atomic_or(at, val, mask=mask, sem=sem, scope=_or(scope, "sys"))

    @triton.jit
    def atomic_min(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint: tl.constexpr = None):
        at = _translate(pointer, self.rank, to_rank, self.heap_bases, hint)
        return tl.atomic_min(at, val, mask=mask, sem=sem, scope=_or(scope, "sys"))

    @triton.jit
    def atomic_max(self, pointer, val, to_rank, mask=None, sem=None, scope=None, hint: tl.constexpr = None):
        at = _translate(pointer, self.rank, to_rank, self.heap_bases, hint)
        return tl.atomic_max(at, val, mask=mask, sem=sem, scope=_or(scope, "sys"))

    @triton.jit
    def gather(self, tile, src_view, source_rank, hint: tl.constexpr = None):
        """A tile [block_m, block_n] of what `source_rank` keeps in a view; 0 outside of the view."""
        pointers, mask = src_view.tile_ptr(tile)
        return self.load(pointers, source_rank, mask=mask, other=0.0, hint=hint)

    @triton.jit
    def all_gather(self, tile, dst_view, dim: tl.constexpr):
        """Stores this rank's tile into the view of every rank, whose dimension `dim` has a part for each rank."""
        down = 0
        right = 0
        if dim == 0:
            down = self.rank * (dst_view.M // self.world_size)
        else:
            right = self.rank * (dst_view.N // self.world_size)
        pointers, mask = dst_view.offset_tile_ptr(tile, offset_m=down, offset_n=right)
        for peer in range(self.world_size):
            self.store(pointers, tile.data, peer, mask=mask)

    @triton.jit
    def all_reduce_atomic(self, tile, dst_view):
        """Adds this rank's tile to the views of all ranks, which hold 0 before."""
        pointers, mask = dst_view.tile_ptr(tile)
        for peer in range(self.world_size):
            self.atomic_add(pointers, tile.data, peer, mask=mask)

    @triton.jit
    def all_reduce_spinlock(self, tile, dst_view, locks):
        """Like `all_reduce_atomic`, each tile under a lock of its own, which holds 0 before."""
        pointers, mask = dst_view.tile_ptr(tile)
        lock = locks + tile.pid_m * tl.cdiv(dst_view.N, tile.block_n) + tile.pid_n
        for peer in range(self.world_size):
            while self.atomic_cas(lock, 0, 1, peer, sem="acquire") != 0:
                pass
            tl.debug_barrier()
            total = self.load(pointers, peer, mask=mask, volatile=True).to(tl.float32) + tile.data.to(tl.float32)
            self.store(pointers, total.to(tile.data.dtype), peer, mask=mask)
            tl.debug_barrier()
            self.atomic_xchg(lock, 0, peer, sem="release")

    @triton.jit
    def all_reduce_one_shot(self, tile, src_view, dst_view, locks):
        """Stores the sum of all ranks' tiles into this rank's view; each rank has published its own by a lock of 1."""
        pointers, mask = dst_view.tile_ptr(tile)
        tl.store(pointers, self._sum(tile, src_view, dst_view, locks), mask=mask)

    @triton.jit
    def all_reduce_two_shot(self, tile, src_view, dst_view, locks):
        """Like `all_reduce_one_shot`, but each tile is added by one rank, which stores the sum into all views."""
        tiles_n = tl.cdiv(dst_view.N, tile.block_n)
        if (tile.pid_m * tiles_n + tile.pid_n) % self.world_size == self.rank:
            total = self._sum(tile, src_view, dst_view, locks)
            pointers, mask = dst_view.tile_ptr(tile)
            for peer in range(self.world_size):
                self.store(pointers, total, peer, mask=mask)

    @triton.jit
    def reduce_scatter(self, tile, src_view, dst_view, locks):
        """Like `all_reduce_one_shot`, each rank for its part of the tiles."""
        tiles_n = tl.cdiv(dst_view.N, tile.block_n)
        tiles = tl.cdiv(dst_view.M, tile.block_m) * tiles_n
        each = tiles // self.world_size
        tile_id = tile.pid_m * tiles_n + tile.pid_n
        end = tl.where(self.rank == self.world_size - 1, tiles, (self.rank + 1) * each)
        if (tile_id >= self.rank * each) & (tile_id < end):
            total = self._sum(tile, src_view, dst_view, locks)
            pointers, mask = dst_view.tile_ptr(tile)
            tl.store(pointers, total, mask=mask)

    @triton.jit
    def _sum(self, tile, src_view, dst_view, locks):
        """This rank's tile and those of the others, once their locks hold 1."""
        lock = locks + tile.pid_m * tl.cdiv(dst_view.N, tile.block_n) + tile.pid_n
        pointers, mask = src_view.tile_ptr(tile)
        total = tile.data.to(tl.float32)
        for peer in range(self.world_size):
            if peer != self.rank:
                while self.atomic_add(lock, 0, peer, sem="acquire") != 1:
                    pass
                tl.debug_barrier()
                total += self.load(pointers, peer, mask=mask, other=0.0).to(tl.float32)
        return total.to(tile.data.dtype)


DeviceContext = Context


@triton.jit
def read_realtime():
    """A clock of the whole GPU, in nanoseconds."""
    return shmem._now()
