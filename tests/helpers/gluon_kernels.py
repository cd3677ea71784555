"""A warp-specialised Gluon kernel for tests: partners exchange blocks of rows."""

from typing import Any

import jax
from jax import lax
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from jaxtaxfree import shmem_call
from jaxtaxfree.kernels import shmem_gluon as shmem

ROWS, COLS = gl.constexpr(32), gl.constexpr(64)  # of a tile
STAGES = 2
BLOCK = (ROWS.value, COLS.value)
PROGRAMS = 4
WARPS = 4 + 1 + 2  # send, load, receive


@gluon.jit
def tile(i):
    """The first row of this program's i-th tile."""
    return (gl.program_id(0) + i * gl.num_programs(0)) * ROWS


@gluon.jit
def load(x_desc, tiles, full, empty, TILES: gl.constexpr, STAGES: gl.constexpr):
    for i in range(TILES):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), (i // STAGES + 1) % 2)
        mbarrier.expect(full.index(stage), x_desc.nbytes_per_cta)
        tma.async_load(x_desc, [tile(i), 0], full.index(stage), tiles.index(stage))


@gluon.jit
def send(me, inbox_ptr, arrived, tiles, full, empty, TILES: gl.constexpr, STAGES: gl.constexpr):
    ROWWISE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, ROWWISE))[:, None]
    column = gl.arange(0, COLS, gl.SliceLayout(0, ROWWISE))[None, :]
    partner = me.rank ^ 1
    for i in range(TILES):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES % 2)
        value = tiles.index(stage).load(ROWWISE)
        mbarrier.arrive(empty.index(stage), count=1)
        shmem.store(me, inbox_ptr + (tile(i) + row) * COLS + column, value, partner)
        shmem.signal(me, arrived + gl.program_id(0), partner)


@gluon.jit
def receive(me, inbox_ptr, arrived, out_desc, OWN_DESCRIPTOR: gl.constexpr, TILES: gl.constexpr):
    ROWWISE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, ROWWISE))[:, None]
    column = gl.arange(0, COLS, gl.SliceLayout(0, ROWWISE))[None, :]
    buffer = gl.allocate_shared_memory(out_desc.dtype, [ROWS, COLS], out_desc.layout)
    if OWN_DESCRIPTOR:
        inbox_desc = tma.make_tensor_descriptor(
            inbox_ptr, [TILES * gl.num_programs(0) * ROWS, COLS], [COLS, 1], [ROWS, COLS], out_desc.layout
        )
        came = mbarrier.allocate_mbarrier()
        mbarrier.init(came, count=1)
    for i in range(TILES):
        ready = shmem.wait(me, arrived + gl.program_id(0), (me.epoch - 1) * TILES + i + 1, me.rank ^ 1)
        if OWN_DESCRIPTOR:
            shmem.fence_proxy()
            mbarrier.expect(came, inbox_desc.nbytes_per_cta)
            tma.async_load(inbox_desc, [tile(i), 0], came, buffer)
            mbarrier.wait(came, i % 2)
            value = buffer.load(ROWWISE)
        else:
            value = gl.load(inbox_ptr + (tile(i) + row) * COLS + column)
        buffer.store(gl.where(ready, value, float("nan")))
        fence_async_shared()
        tma.async_store(out_desc, [tile(i), 0], buffer)
        tma.store_wait(0)


@gluon.jit
def exchange_kernel(
    x_desc,
    team,
    inbox,
    arrived,
    out_desc,
    TILES: gl.constexpr,
    STAGES: gl.constexpr,
    OWN_DESCRIPTOR: gl.constexpr,
):
    me = shmem.start(team)
    inbox_ptr = shmem.scratch(me, inbox, x_desc.dtype)
    tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, COLS], x_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    gl.warp_specialize(
        [
            (send, (me, inbox_ptr, arrived, tiles, full, empty, TILES, STAGES)),
            (load, (x_desc, tiles, full, empty, TILES, STAGES)),
            (receive, (me, inbox_ptr, arrived, out_desc, OWN_DESCRIPTOR, TILES)),
        ],
        [1, 2],
        [64, 64],
    )
    shmem.finish(me)


def exchange(x: jax.Array, axis_name: str = "tp", *, own_descriptor: bool = False, **changed: Any) -> jax.Array:
    """What the partner has for x: [rows, COLS]. Of ranks 0 and 1, of 2 and 3, and so on. Inside `jax.shard_map`."""
    arguments: dict[str, Any] = {
        "axis_name": axis_name,
        "out_type": x,
        "grid": PROGRAMS,
        "scratch": {"inbox": x},
        "signals": {"arrived": PROGRAMS},
        "descriptors": {"x_desc": BLOCK, "out_desc": BLOCK},
        "TILES": x.shape[0] // (BLOCK[0] * PROGRAMS),
        "STAGES": STAGES,
        "OWN_DESCRIPTOR": own_descriptor,
    }
    return shmem_call(exchange_kernel, x, **arguments | changed)


def exchange_by_xla(x: jax.Array, axis_name: str = "tp") -> jax.Array:
    return lax.ppermute(x, axis_name, [(rank, rank ^ 1) for rank in range(lax.axis_size(axis_name))])
