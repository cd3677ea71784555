"""Kernels in Iris's words, read as a user's file is: it says `import iris`, or `from jaxtaxfree import iris`."""

import triton
import triton.language as tl

from jaxtaxfree import iris


@triton.jit
def rotate(x, inbox, flag, out, heap_bases, rank: tl.constexpr, after, SIZE: tl.constexpr):
    """Gives each rank what the rank before it has."""
    at = tl.arange(0, SIZE)
    iris.store(inbox + at, tl.load(x + at), rank, after, heap_bases)
    tl.debug_barrier()
    iris.atomic_xchg(flag, 1, rank, after, heap_bases, sem="release")
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def send(x, inbox, flag, heap_bases, rank, after, SIZE: tl.constexpr):
    """The first half of `rotate`, as a launch of its own."""
    at = tl.arange(0, SIZE)
    iris.put(x + at, inbox + at, rank, after, heap_bases)
    tl.debug_barrier()
    iris.atomic_add(flag, 1, rank, after, heap_bases, sem="release")


@triton.jit
def receive(inbox, flag, out, SIZE: tl.constexpr):
    """The second half."""
    at = tl.arange(0, SIZE)
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def scatter(x, out, heap_bases, rank, world: tl.constexpr, SIZE: tl.constexpr):
    """Stores x into its row of every rank's result."""
    at = tl.arange(0, SIZE)
    for peer in range(world):
        iris.store(out + rank * SIZE + at, tl.load(x + at), rank, peer, heap_bases)


@triton.jit
def moves(x, gathered, copied, heap_bases, rank, after, SIZE: tl.constexpr):
    """What the rank behind this one has, by each of the words that read it."""
    at = tl.arange(0, SIZE)
    inside = at < SIZE - 1
    loaded = iris.load(x + at, rank, after, heap_bases, inside, other=-1.0, cache_modifier=".cv", volatile=True)
    tl.store(gathered + at, loaded)
    iris.get(x + at, gathered + SIZE + at, rank, after, heap_bases)
    iris.copy(x + at, copied + at, after, rank, rank, heap_bases)
    tl.store(gathered + 2 * SIZE + at, tl.load(copied + at))


@triton.jit
def counts(cells, old, heap_bases, rank, world: tl.constexpr, flag):
    """Each rank applies each atomic once to rank 0, and rank 0 reads them when all have."""
    one = rank + 1
    iris.atomic_add(cells, one, rank, 0, heap_bases)
    iris.atomic_sub(cells + 1, one, rank, 0, heap_bases)
    iris.atomic_xor(cells + 2, one, rank, 0, heap_bases)
    iris.atomic_or(cells + 3, 1 << rank, rank, 0, heap_bases)
    iris.atomic_and(cells + 4, ~(1 << rank), rank, 0, heap_bases)
    iris.atomic_min(cells + 5, -one, rank, 0, heap_bases)
    iris.atomic_max(cells + 6, one, rank, 0, heap_bases)
    iris.atomic_cas(cells + 7, 0, one, rank, 0, heap_bases)
    iris.atomic_xchg(cells + 8, one, rank, 0, heap_bases)
    tl.debug_barrier()
    iris.atomic_add(flag, 1, rank, 0, heap_bases, sem="release")
    if rank == 0:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != world:
            pass
        at = tl.arange(0, 16)
        tl.store(old + at, tl.load(cells + at))


@triton.jit
def deaf(flag, out):
    """A wait that a compiler deletes."""
    while tl.load(flag, cache_modifier=".ca") == 0:
        pass
    tl.store(out, 1)


@triton.jit
def deaf_in_steps(flag, out):
    """The same in other words."""
    value = tl.load(flag)
    while value == 0:
        value = tl.load(flag)
    tl.store(out, value)


@triton.jit
def deaf_inside(flag, out):
    deaf(flag, out)


@triton.jit
def uncached(flag, out):
    """A load that NVIDIA's assembler does not take."""
    while tl.load(flag, cache_modifier=".cv", volatile=True) == 0:
        pass
    tl.store(out, 1)


@triton.jit
def attentive(flag, out, LIMIT: tl.constexpr):
    """Loops over loads that are no endless waits, or that last."""
    while tl.load(flag, volatile=True) == 0:
        pass
    i = 0
    while (tl.load(flag + i) == 0) & (i < LIMIT):
        i += 1
    tl.store(out, i)


@triton.jit
def wrong(x, out, SIZE: tl.constexpr):
    """Does not compile."""
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) + no_such_name)  # noqa: F821


@triton.jit
def as_python_says(out, rank: tl.constexpr):
    """Needs the rank as a constant."""
    tl.store(out, int(rank))


@triton.jit
def many(team, WORLD, x, out, me, axis_name: tl.constexpr, SIZE: tl.constexpr, scale=2, bias=None):
    """Parameters whose names others have as well, and defaults."""
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) * scale + team + WORLD * 10 + me * 100 + axis_name * 1000)


@triton.jit
def tiles(x, out, flags, context, rank, world: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of all ranks' tiles, each of which its rank has published."""
    ctx = iris.Context.initialize(context, rank, world)
    place = iris.TileView(tl.program_id(0), 0, ROWS, COLUMNS)
    view = iris.make_tensor_view(x, ROWS * tl.num_programs(0), COLUMNS, COLUMNS, 1)
    pointers, mask = view.tile_ptr(place)
    own = iris.Tile(tl.program_id(0), 0, ROWS, COLUMNS, tl.load(pointers, mask=mask))
    tl.debug_barrier()
    tl.atomic_xchg(flags + tl.program_id(0), 1, sem="release", scope="sys")
    ctx.all_reduce_one_shot(own, view, iris.make_tensor_view(out, view.M, view.N, COLUMNS, 1), flags)
