"""The device API: what a Triton kernel calls to reach its peers' memory.

The words are OpenSHMEM's and Iris's. A kernel launched by `shmem_call` begins with `start` and ends with `finish`.
In between it finds its symmetric scratch (`scratch`), turns an address of its own into a peer's (`remote`), moves
data (`load`, `store`, `get`, `put`), raises counters on peers (`signal`) and waits for its own (`wait`). What is small
and urgent travels as messages (`send`, `receive`; `send_words`, `receive_words`): words that say by themselves whether
they have arrived.

How the memory lies (`jaxtaxfree.heap` lays it out, this file reads it): every rank of a team has one region of the
same size. The region at `position` of the mesh begins at `origin + position * stride`, or at `table[position]` where
another allocator owns the memory. A region holds a header, one epoch counter for each program, the signals, and two
copies of the messages and of the scratch.

What the functions do for the kernel's author:

* Counters only grow and are never reset: in its n-th call (`Rank.epoch` is n) a kernel waits for n times the signals
  of one call. Comparisons wrap around, so a counter may overflow.
* `signal` is a release at system scope behind a block barrier: everything the program stored before it is published.
* `claim` deals out work by tickets, so that whoever waits for it waits for a program that runs.
* `pace` spreads what is sent over time.
* `wait` is an acquire at system scope followed by a block barrier, and it is bounded in time. If it gives up it
  leaves a record of who was missing for the host; from then on this rank's waits return at once and its remote stores
  and signals do nothing.
* `report_garbage` leaves a record of a number that arrived as data and fits nowhere. Calls go on.

The one file of the project that calls inline assembly; `assembly.py` has its longer texts. Gluon kernels reach this
one through `shmem_gluon.py`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.core import builtin

from jaxtaxfree.kernels import assembly

# Scalars of a launch are 32 bits wide, so addresses of regions travel in granules of 2 MiB (in which the heap maps
# memory anyway) and offsets within a region in lines of 128 bytes.
GRANULE_SHIFT = tl.constexpr(21)
LINE_SHIFT = tl.constexpr(7)

# Header of a region: byte offsets within its first line.
HEADER_MAGIC = tl.constexpr(0)  # i32: says which region this is
HEADER_FAILED = tl.constexpr(4)  # i32: not 0 once this rank has given up; the host clears it
HEADER_RECORD = tl.constexpr(8)  # i64: address of the error record, in memory that the host reads
HEADER_TIMEOUT = tl.constexpr(16)  # i64: the longest that one wait may last, in nanoseconds

# Error record: indices of its 4-byte words. STATE is written last.
RECORD_STATE = tl.constexpr(0)
RECORD_MAGIC = tl.constexpr(1)
RECORD_RANK = tl.constexpr(2)
RECORD_PEER = tl.constexpr(3)
RECORD_PROGRAM = tl.constexpr(4)
RECORD_SIGNAL = tl.constexpr(5)  # index of a signal, or -1 minus the place of a word of messages in the region
RECORD_EXPECTED = tl.constexpr(6)
RECORD_SEEN = tl.constexpr(7)
RECORD_EPOCH = tl.constexpr(8)

# Reports of garbage in the same memory, GARBAGE_SLOTS of them behind the record, of GARBAGE_WORDS each. STATE is
# written last; the host makes it 0 once it has read the report.
GARBAGE_BEGIN = tl.constexpr(16)
GARBAGE_WORDS = tl.constexpr(8)
GARBAGE_SLOTS = tl.constexpr(2)
GARBAGE_STATE = tl.constexpr(0)
GARBAGE_OPERAND = tl.constexpr(1)  # which of the kernel's parameters, or -1: what a peer has sent
GARBAGE_INDEX = tl.constexpr(2)  # of the number in the operand; or the peer
GARBAGE_VALUE = tl.constexpr(3)
GARBAGE_LEAST = tl.constexpr(4)  # that it may be
GARBAGE_MOST = tl.constexpr(5)
GARBAGE_EPOCH = tl.constexpr(6)

STOP = tl.constexpr(1 << 16)  # among what is late: do not go on waiting
RANKS_TOGETHER = tl.constexpr(8)  # whose vectors one loop polls, as many as there are registers for
PLACES_TOGETHER = tl.constexpr(12)  # that one loop polls, whose addresses take no registers

# Positions of launches that have no place in a team.
POSITION_LOAD_ONLY = tl.constexpr(-1)  # the launch is there to load the module: leave at once
POSITION_NO_HEAP = tl.constexpr(-2)  # the program was built where there was no heap: trap


class Rank(NamedTuple):
    """A program's place in its team, as `start` returns it and every other function takes it."""

    rank: tl.tensor  # i32: 0 <= rank < world
    world: tl.tensor  # i32: ranks in the team
    epoch: tl.tensor  # i64: 1 in the first call on this region, one more in each later call
    found: tl.tensor  # i1: the region is the one that the launch is for
    ready: tl.tensor  # i1: false if this rank gave up in an earlier call
    position: tl.tensor  # i32: place in the mesh; the team's rank 0 stands at position - rank
    base: tl.tensor  # i64: address of this rank's region
    stride: tl.tensor  # i64: bytes between neighbouring regions; with a table of bases, the table
    epochs: tl.tensor  # i64: address of this program's epoch counter
    signals: tl.tensor  # i64: address of signal 0


@builtin
def _backend(_semantic=None):
    """What the kernel is compiled for, as a constant: "cuda", "hip" or "interpreter"."""
    return tl.constexpr(_semantic.builder.options.backend_name)


@builtin
def _has_tma(_semantic=None):
    """Whether the kernel is compiled for a GPU with TMA, as a constant."""
    options = _semantic.builder.options
    return tl.constexpr(options.backend_name == "cuda" and int("".join(filter(str.isdigit, options.arch))) >= 90)


@builtin
def _of_triton(_semantic=None):
    """Whether the kernel is Triton's, where all warps of a block go together, and not Gluon's, as a constant."""
    return tl.constexpr(_semantic.lang is tl.core)


@triton.jit
def start(team, VERIFY: tl.constexpr = True, EARLY: tl.constexpr = False, WORLD: tl.constexpr = None, joined=None):
    """Opens a call. The first statement of every kernel.

    Args:
      team: the kernel's parameter `team`, filled in by `shmem_call`: a tuple (position, origin, stride, world, magic,
        signal_line). `origin` and `stride` are in granules; or `origin` is a pointer to a table of i64 bases.
      VERIFY: wait for the region's header, some 0.7 us. If false, the kernel has to call `verify` later, before it
        sends, stores or signals anything.
      EARLY: it may send, store and signal before it calls `verify`, which does nothing if the region is not there;
        but not wait or claim.
      WORLD: the number of ranks, where the kernel knows it: saves a division.
      joined: pointer to the epoch (i32) of a call that an earlier launch on the same region has opened: this launch is
        a part of that call, and does not close it. It stops if another call has been opened since.

    Returns: the program's `Rank`.
    """
    position_ptr, origin, stride, world, magic, signal_line = team
    # Which program this is takes a while to find out, too: ask for it while the position is on its way.
    program = _program()
    position = tl.load(position_ptr)
    program = _leave_if_not_placed(position, program)
    if origin.dtype.is_ptr():
        step = origin.to(tl.pointer_type(tl.int64))  # JAX may have it as pairs of words of 32 bits
        base = tl.load(step + position)
    else:
        step = stride.to(tl.int64) << GRANULE_SHIFT
        base = (origin.to(tl.int64) << GRANULE_SHIFT) + position.to(tl.int64) * step
    if joined is not None:
        program = program * 0
    epochs = base + (1 << LINE_SHIFT) + program.to(tl.int64) * 8
    found = tl.load((base + HEADER_MAGIC).to(tl.pointer_type(tl.int32)))
    failed = tl.load((base + HEADER_FAILED).to(tl.pointer_type(tl.int32)))
    epoch = tl.load(epochs.to(tl.pointer_type(tl.int64))) + 1
    signals = base + (signal_line.to(tl.int64) << LINE_SHIFT)
    found = found == magic
    if joined is not None:
        epoch -= 1
        found = found & (tl.load(joined) == epoch.to(tl.int32))
    if WORLD is None:
        rank = position % world
    else:
        rank = (position.to(tl.uint32) % WORLD).to(tl.int32)
    ready = failed == 0
    if EARLY:
        ready = ready & found
    me = Rank(rank, world, epoch, found, ready, position, base, step, epochs, signals)
    if VERIFY:
        verify(me)
    return me


@triton.jit
def verify(me):
    """Stops a program whose region is not there, rather than let it write into memory that now is somebody else's."""
    BACKEND: tl.constexpr = _backend()
    if BACKEND == "cuda":
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p trap; mov.b32 $0, $1; }",
            "=r,r",
            [me.found.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    elif BACKEND == "hip":
        tl.inline_asm_elementwise(
            assembly.AMD_TRAP, "=v,s,~{scc}", [me.found.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def finish(me):
    """Closes the call: the next one on this region sees the next epoch.

    The last statement of every kernel, but for reports of what is missing.
    """
    OF_TRITON: tl.constexpr = _of_triton()
    if OF_TRITON:
        tl.debug_barrier()  # each warp has asked for itself which call this is
    tl.store(me.epochs.to(tl.pointer_type(tl.int64)), me.epoch)


@triton.jit
def scratch(me, region, dtype: tl.constexpr):
    """This rank's copy of a scratch for this call: a pointer to `dtype`, aligned to 128 bytes.

    There are two copies, used in turn: a peer that is one call ahead writes into the other one.

    Args:
      region: the kernel's parameter of the scratch's name, filled in by `shmem_call`: a tuple (line, lines a copy).
    """
    tl.static_assert(
        not dtype.is_ptr(), "shmem.scratch takes the dtype of the elements: of a pointer .dtype.element_ty"
    )
    line, lines = region
    offset = (line.to(tl.int64) + (me.epoch & 1) * lines) << LINE_SHIFT
    return tl.multiple_of((me.base + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _region_of(me, peer):
    """Address of a peer's region; of a lane behind the last rank, as there are where ranks lie in a block, any."""
    if me.stride.dtype.is_ptr():
        base = tl.load(me.stride + (me.position - me.rank + tl.minimum(peer, me.world - 1)))
    else:
        base = me.base + (peer - me.rank).to(tl.int64) * me.stride
    return base


@triton.jit
def remote(me, ptr, peer):
    """The address at which `peer` keeps what this rank keeps at `ptr` (OpenSHMEM's `shmem_ptr`).

    Args:
      ptr: scalar pointer or tensor of pointers into this rank's scratch.
      peer: i32 rank; or a block of them, one for each pointer.
    """
    # Whole elements, in a multiple of 16, so that the compiler still sees how the pointers are aligned and keeps
    # 16-byte accesses.
    size: tl.constexpr = (ptr.dtype.scalar.element_ty.primitive_bitwidth + 7) // 8
    return ptr + (_region_of(me, peer) - me.base) // (16 * size) * 16


@triton.jit
def load(me, ptr, peer, mask=None):
    """Loads what `peer` keeps at `ptr`. A load over the wire takes twice as long as a store: prefer to push."""
    return tl.load(remote(me, ptr, peer), mask=mask)


@triton.jit
def store(me, ptr, value, peer, mask=True):
    """Stores `value` where `peer` keeps `ptr`. Visible to the peer once it has seen a later `signal`."""
    tl.store(remote(me, ptr, peer), value, mask=mask & me.ready)


@triton.jit
def get(me, dest, source, peer, mask=None):
    """Copies what `peer` keeps at `source` to the local pointers `dest`."""
    tl.store(dest, load(me, source, peer, mask), mask=mask)


@triton.jit
def put(me, dest, source, peer, mask=True):
    """Copies from the local pointers `source` to where `peer` keeps `dest`.

    Visible to the peer once it has seen a later `signal`.
    """
    store(me, dest, tl.load(source, mask=mask), peer, mask)


@triton.jit
def signal(me, index, peer, mask=True):
    """Adds 1 to the peer's signal `index` and publishes to it all that this program has stored so far.

    One release after one block barrier: about 1 us idle, 3 us while the memory is busy. Cheap once a chunk, dear in
    an inner loop.

    Args:
      index: i32; or a small block of them, with the peers of each, which costs no more than one.
      peer: i32 rank.
      mask: which of them to signal.
    """
    _finish_stores()
    tl.debug_barrier()
    tl.atomic_add(_signal_of(me, index, peer), 1, mask=mask & me.ready, sem="release", scope="sys")


@triton.jit
def signal_all(me, index, WORLD: tl.constexpr, mask=True):
    """Adds 1 to signal `index` of every rank, this one included, at the price of a single `signal`.

    Args:
      mask: whether to.
    """
    _finish_stores()
    tl.debug_barrier()
    peers = tl.arange(0, triton.next_power_of_2(WORLD))
    # One atomic of a few lanes: the fence of a release is paid once for all of them.
    tl.atomic_add(_signal_of(me, index, peers), 1, mask=(peers < WORLD) & mask & me.ready, sem="release", scope="sys")


@triton.jit
def wait(me, index, count, peer):
    """Waits until this rank's signal `index` has reached `count`; what the signallers published is then visible here.

    Wait only for programs that are running or must start before this one, and not inside a pipelined `tl.dot` loop,
    which would turn the pipelining off.

    Args:
      index: i32, which signal.
      count: signals since the first call: in call n, n times what one call sends (`me.epoch * signals_a_call`).
      peer: i32, who is to blame if nothing comes.

    Returns: i1, false if the signal did not come within the heap's timeout; then store NaN. The host raises the error,
      even if the signal came a moment later.
    """
    count = tl.to_tensor(count).to(tl.int32)
    arrived = _poll(me, index, 1, count)
    if not arrived:
        report_signal(me, index, count, peer)
    return arrived


@triton.jit
def wait_all(me, index, count):
    """Waits for one signal of each rank: `index + r` must reach `count` for every rank r. Otherwise like `wait`."""
    count = tl.to_tensor(count).to(tl.int32)
    arrived = _poll(me, index, me.world, count)
    if not arrived:
        report_signals(me, index, count)
    return arrived


@triton.jit
def arrive(me, index):
    """Adds 1 to this rank's own signal `index`, and publishes what this program has stored to programs of this rank.

    Like `signal` for those who `meet`, at the scope of the GPU. On an H100 a meeting of 128 programs takes 0.6 us less
    than by `signal` and `wait`. Peers learn nothing by it.
    """
    _finish_stores()
    tl.debug_barrier()
    tl.atomic_add(_signal_of(me, index, me.rank), 1, mask=me.ready, sem="release", scope="gpu")


@triton.jit
def meet(me, index, count):
    """Waits until programs of this rank have raised signal `index` by `arrive` to `count`, and sees what they stored.

    Like `wait`, at the scope of the GPU. What one program has received of a peer others may wait for here: so it lasts
    for twice the heap's timeout, and who is to blame is a peer for whom somebody waits.
    """
    count = tl.to_tensor(count).to(tl.int32)
    arrived = _poll(me, index, 1, count, "gpu")
    if not arrived:
        report_signal(me, index, count, me.rank)
    return arrived


@triton.jit
def claim(me, index, draws):
    """Draws a ticket on this rank: 0, 1, 2, ... in each call, whichever programs draw.

    Work that others wait for may belong to tickets: those that are drawn belong to programs that run. Work of one
    ticket may wait for that of lower ones, on any rank. Drawing orders nothing: who draws the last one has not seen
    what the others have stored, and may not signal for them.

    Args:
      index: i32, a signal of which nothing else is done.
      draws: how many tickets are drawn in each call, always, by all programs together. If each one stops at the first
        ticket that has no work, these are the pieces of work and the number of programs.
    """
    drawn = tl.atomic_add(_signal_of(me, index, me.rank), 1, sem="relaxed", scope="gpu")
    return drawn - ((me.epoch - 1) * draws).to(tl.int32)


@triton.jit
def pace(due, cycles: tl.constexpr, behind: tl.constexpr = 4):
    """Waits until the next piece of what a program sends is due: when the one behind it will be.

    Nobody waits for stores to a peer. Where all programs send as fast as they can, stores queue up in front of the
    wire, and loads, TMA's as well, behind them. Who sends no faster than it has to leaves a product its speed.

    Args:
      due: i64, what this function returned; 0 for the first piece.
      cycles: clock cycles of the multiprocessor from one piece to the next; 0: do not wait.
      behind: by how many pieces who is late catches up.
    """
    BACKEND: tl.constexpr = _backend()
    if BACKEND == "cuda" and cycles > 0:
        due = tl.inline_asm_elementwise(
            assembly.pace(cycles, behind), "=&l,l", [due], dtype=tl.int64, is_pure=False, pack=1
        )
    return due


@triton.jit
def failed(me):
    """Whether this rank has given up, in this call or before, so that what was waited for may not be there.

    For those who did not wait themselves, but behind an mbarrier at which the one arrived that did.
    """
    return tl.load((me.base + HEADER_FAILED).to(tl.pointer_type(tl.int32)), volatile=True) != 0


@triton.jit
def messages(me, region):
    """This rank's copy of an array of messages for this call: a pointer to i32, for those functions alone that send and
    receive. An array of dtype int32 is for `send_words` and `receive_words`, another one for `send` and `receive`.

    Args:
      region: the kernel's parameter of the array's name, filled in by `shmem_call`.
    """
    return scratch(me, region, tl.int32)


@triton.jit
def sendable(value):
    """An f32 value as it arrives when it is sent."""
    return _value(value.to(tl.int32, bitcast=True))


@triton.jit
def send(me, dest, value, peer, mask=True):
    """Sends f32 values to where `peer` keeps the messages `dest`, without a fence and without a signal.

    The lowest bit of each word says in which call it was sent, so that whoever polls the word knows by itself that it
    is there; the value loses that bit, half a unit in the last place. Nothing but the value is published: for stores
    into scratch use `signal`. Costs little more than the way over the wire (0.8 us on NVLink 4), where a release takes
    1.3 us, and 4 while the memory is busy.

    Every word of the array is sent once in each call, by whatever rank; a word that is left out is taken for that of
    another call. The method is that of NCCL's LL protocol, with a bit in place of a flag word.

    Args:
      dest: pointers of `messages`, 4 next to each other at a time for 16-byte stores.
      value: f32; or i32, for who polls words and not values.
      peer: i32 rank, this one included.
    """
    tl.static_assert(
        value.dtype == tl.float32 or value.dtype == tl.int32,
        "shmem.send sends f32 values, or the upper 31 bits of i32; send_words sends words of 32 bits",
    )
    words = (value.to(tl.int32, bitcast=True) & -2) | _call_bit(me)
    tl.atomic_store(remote(me, dest, peer), words, mask=mask & me.ready, sem="relaxed", scope="sys")


@triton.jit
def receive(me, source, peer, mask=None, patient=True):
    """Waits until the messages at `source` have arrived. Several programs may receive the same ones.

    Whoever waits here polls all of `source`. Where that is much, or the wait long, use `linger` first.

    Args:
      source: a block of at most 16384 pointers of this rank's `messages`.
      peer: i32, who sends them: a block that broadcasts to `source`, or a scalar.
      mask: which of them to wait for.
      patient: i1, what `linger` returned; if false, only look.

    Returns: (f32 values, i1: false if they did not come within the heap's timeout; then store NaN).
    """
    words, came = _receive(me, source, peer, mask, patient, False)
    return _value(words), came & me.ready


@triton.jit
def receive_parts(
    me, source, stride, pairs, pair_stride, last, peer, peer_step: tl.constexpr, PARTS: tl.constexpr, mask
):
    """Waits until several parts have arrived, of each 4 messages next to each other and 2 others.

    Each thread polls messages of its own. So nothing stands between their arrival and their use: no barrier, and no
    message of another thread. Until a part is there, pairs alone are polled; then what is missing of all parts.

    Args:
      source: a block of pointers to the 4 messages of part 0.
      stride: i32, words from one part's to the next one's, a multiple of 4.
      pairs: a block of pointers to the 2 messages of part 0, which are sent last.
      pair_stride: i32, words from one part's to the next one's, a multiple of 2.
      last: i32 block, the last part to wait for. The parts behind it are copies of it.
      peer: i32, who sends part 0, and `peer_step` more each later one.
      mask: of which pointers to wait for all this.

    Returns: (for each part 6 blocks of f32, the pair's last; for `report_late`, i32 blocks: 0, or 1 + the place of a
      message that did not come within the heap's timeout, and who is to blame). What did not come is NaN.
    """
    BACKEND: tl.constexpr = _backend()
    tl.static_assert(_of_triton(), "Gluon kernels cannot call shmem.receive_parts")
    values = ()
    if BACKEND == "cuda":
        words = tl.inline_asm_elementwise(
            assembly.parts(PARTS),
            assembly.constraints(6 * PARTS + 1, "l", "l", "r", "r", "r", "r", "r", "l"),
            [source, pairs, stride * 4, pair_stride * 4, last, (mask & me.ready).to(tl.int32), _call_bit(me), me.base],
            dtype=_words(6 * PARTS + 1),
            is_pure=False,
            pack=1,
        )
        missing = words[6 * PARTS]  # 0, or 1 more than the part
        for i in tl.static_range(6 * PARTS):
            values = values + (_value(words[i]),)
    else:
        missing = last * 0
        for part in tl.static_range(PARTS):
            at = tl.minimum(part, last)
            of = peer + at * peer_step
            of_4, of_2 = tl.arange(0, 4)[None, None, :], tl.arange(0, 2)[None, None, :]
            four_ptrs = (source + at * stride)[:, :, None] + of_4
            two_ptrs = (pairs + at * pair_stride)[:, :, None] + of_2
            four_mask = mask[:, :, None] & (of_4 >= 0) & (of[:, :, None] >= 0)
            two_mask = mask[:, :, None] & (of_2 >= 0) & (of[:, :, None] >= 0)
            four, came = receive(me, four_ptrs, of[:, :, None], four_mask)
            two, both_came = receive(me, two_ptrs, of[:, :, None], two_mask)
            even, odd = tl.split(four.reshape(four.shape[0], four.shape[1], 2, 2))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            top, total = tl.split(two)
            values = values + (first, second, third, fourth, top, total)
            missing = tl.where(came & both_came, missing, part + 1)
    received = ()
    for i in tl.static_range(6 * PARTS):
        received = received + (tl.where(missing == 0, values[i], float("nan")),)
    late = ((source.to(tl.int64) - me.base) // 4).to(tl.int32) + tl.minimum(missing - 1, last) * stride + 1
    late = tl.where(mask & (missing > 0), late, 0)
    return received, late, peer + tl.minimum(missing - 1, last) * peer_step


@triton.jit
def report_late(me, late, peer):
    """Reports what `receive_parts` said is missing, if anything is."""
    first = tl.min(tl.where(late > 0, late, 0x7FFFFFFF).reshape(late.numel), axis=0)
    if first < 0x7FFFFFFF:
        _report(me, -first, 1, 0, tl.max(tl.where(late == first, peer, 0).reshape(late.numel), axis=0))


@triton.constexpr_function
def _words(count):
    return (tl.int32,) * count


@triton.jit
def send_words(me, dest, words, peer, mask=True):
    """Sends words of 32 bits to where `peer` keeps the messages `dest`, without a fence and without a signal.

    A word that is not 0 has arrived, and `receive_words` makes it 0 again. So all bits are payload, but one pattern has
    to stand for "not yet": words travel inverted, and -1 arrives as 0x7FFFFFFF. Both are NaN as an f32 and as a pair of
    f16 or bf16; integers that may be -1 do not travel like this. The method is that of TensorRT-LLM's Lamport kernels.

    A word is sent at most once in each call, by whatever rank. Who sends one must have heard of the rank that received
    the last one there since then, as by a message of the next call.

    Args:
      dest: pointers of `messages` of dtype int32, 4 next to each other at a time for 16-byte stores.
      words: i32.
      peer: i32 rank, this one included.
    """
    words = ~tl.where(words == -1, 0x7FFFFFFF, words)
    tl.atomic_store(remote(me, dest, peer), words, mask=mask & me.ready, sem="relaxed", scope="sys")


@triton.jit
def receive_words(me, source, peer, mask=None):
    """Waits until the words at `source` have arrived, and makes room for those of the next call but one.

    So one program alone may receive a word.

    Args:
      source: a block of at most 16384 pointers of this rank's `messages` of dtype int32.
      peer: i32, who sends them: a block that broadcasts to `source`, or a scalar.
      mask: which of them to wait for.

    Returns: (i32 words, i1: false if they did not come within the heap's timeout; then store NaN).
    """
    words, came = _take_words(me, source, peer, mask)
    # The sum over the block lies in between: no thread still looks.
    tl.store(source, tl.zeros_like(words), mask=came if mask is None else mask & came)
    return ~words, came & me.ready


@triton.jit
def _take_words(me, source, peer, mask=None):
    """What `receive_words` waits for, as it was sent, and whether it came. Somebody has to make it 0."""
    return _receive(me, source, peer, mask, True, True)


@triton.jit
def words_of(block):
    """A block of elements of 32 bits, or of 16 in pairs along the last dimension, as i32 words to be sent."""
    if block.dtype.primitive_bitwidth == 32:
        words = block.to(tl.int32, bitcast=True)
    else:
        low, high = tl.split(block.to(tl.int16, bitcast=True).reshape(_in_pairs(block.shape)))
        words = (high.to(tl.int32) << 16) | (low.to(tl.int32) & 65535)
    return words


@triton.jit
def elements_of(words, dtype: tl.constexpr):
    """The block of elements that `words_of` has made words of."""
    if dtype.primitive_bitwidth == 32:
        block = words.to(dtype, bitcast=True)
    else:
        both = tl.join(words, words >> 16).reshape(_of_pairs(words.shape))
        block = both.to(tl.int16).to(dtype, bitcast=True)
    return block


@triton.constexpr_function
def _in_pairs(shape):
    return [*shape[:-1], shape[-1] // 2, 2]


@triton.constexpr_function
def _of_pairs(shape):
    return [*shape[:-1], 2 * shape[-1]]


@triton.jit
def receive_vectors(me, source, stride, WORLD: tl.constexpr, OWN: tl.constexpr = False, patient=True):
    """Like `receive_words` of 4 words next to each other of each rank.

    Each thread polls words of its own, and looks at nothing else meanwhile.

    Args:
      source: a block of pointers, to 4 words each that rank 0 sends.
      stride: i32, words from what a rank sends to what the next one sends, a multiple of 4.
      OWN: whether this rank sends itself words, too.
      patient: i1, what `linger` returned; if false, only look.

    Returns: for each rank a block of i32 words, 4 times as long as `source`; -1 for those that did not come within the
      heap's timeout, which as a float is NaN, and for this rank unless OWN.
    """
    blocks, _, late = poll_vectors(me, source, stride, WORLD, OWN, patient)
    late = clear_vectors(me, source, stride, late, WORLD, OWN)
    report_vectors(me, source, stride, late)
    return blocks


@triton.constexpr_function
def _ranks_from(begin, world):
    """How many ranks one loop polls, from this one on. No constant of a loop's body: those cannot change."""
    return min(RANKS_TOGETHER.value, world - begin)


@triton.jit
def poll_vectors(
    me,
    source,
    stride,
    WORLD: tl.constexpr,
    OWN: tl.constexpr = False,
    patient=True,
    CLEARED: tl.constexpr = True,
    mask=True,
):
    """The first step of `receive_vectors`, which has the result: `clear_vectors` and `report_vectors` are the others.

    Args:
      patient: as in `receive_vectors`, or one for each pointer.
      CLEARED: whether they are words (`send_words`), and not messages (`send`).
      mask: which pointers to look at.

    Returns: (the blocks that `receive_vectors` returns, of messages with the lowest bits that they came with; for each
      pointer i1, whether the words of all ranks came; what `clear_vectors` takes as `late`).
    """
    left_out = _left_out(me, OWN)
    over = 1 - (me.ready & patient).to(tl.int32)
    BACKEND: tl.constexpr = _backend()
    blocks = ()
    late = ()
    all_came = me.ready
    if BACKEND == "cuda":
        for begin in tl.static_range(0, WORLD, RANKS_TOGETHER):
            found = tl.inline_asm_elementwise(
                assembly.vectors(_ranks_from(begin, WORLD), CLEARED),
                assembly.constraints(4 * _ranks_from(begin, WORLD) + 1, "l", "r", "r", "r", "r", "r", "l"),
                [
                    source + begin * stride,
                    stride * 4,
                    (me.ready & mask).to(tl.int32),
                    over,
                    left_out - begin,
                    _call_bit(me),
                    me.base,
                ],
                dtype=_words(4 * _ranks_from(begin, WORLD) + 1),
                is_pure=False,
                pack=1,
            )
            words, missing = _blocks_of(found, source.shape[0])
            for rank in tl.static_range(len(words)):
                blocks = blocks + (~words[rank] if CLEARED else words[rank],)
            late = late + (missing,)
            all_came = all_came & (missing == 0)
    else:
        rank = tl.arange(0, triton.next_power_of_2(WORLD))[:, None]
        awaited = (rank < WORLD) & (rank != left_out)
        awaited = awaited & _of_each_word(mask & (tl.arange(0, source.shape[0]) >= 0))
        blocks, came = _look_at(me, source, rank * stride, rank, awaited, WORLD, CLEARED)
        if CLEARED:
            for _ in tl.static_range(0, WORLD, RANKS_TOGETHER):
                late = late + (tl.zeros([source.shape[0]], tl.int32),)  # that has been reported
        all_came = all_came & came & (tl.arange(0, source.shape[0]) >= 0)
    return blocks, all_came, late


@triton.jit
def poll_places(
    me, source, PLACES: tl.constexpr, count, RANKS: tl.constexpr = None, mask=True, beside=None,
    PATIENCE: tl.constexpr = 0,
):  # fmt: skip
    """Waits for messages (`send`), 4 of them next to each other at each of several places.

    Each thread polls its own, those of PLACES_TOGETHER places at a time.

    Args:
      source: a block of pointers.
      PLACES: ((0, words behind `source`, number), ...), or (1, ...) for what is behind `beside`.
      count: i32 block: which places to wait for, those whose number is less.
      RANKS: if given, the place of number i is what rank i % RANKS sends; otherwise all is sent by this rank. Who sends
        may wait for a peer: so this lasts for twice as long, like `meet`, and who waits for a peer is the first to say
        so.
      mask: which pointers to look at.
      beside: a block of pointers, if there are two.
      PATIENCE: clock cycles before the first look, where nothing comes earlier: who polls holds up what it waits for,
        and who has just looked learns of it a look later. A simulator has no clock, and looks at once.

    Returns: (for each place a block of i32 words, 4 times as long as `source`, with the lowest bits that they came
      with, and -1 for what did not come or was not waited for; for each PLACES_TOGETHER places a block of i32: 0, or 1
      more than the last of these places of which words are missing).
    """
    BACKEND: tl.constexpr = _backend()
    COUNT: tl.constexpr = len(PLACES)
    blocks = ()
    late = ()
    if BACKEND == "cuda":
        looks = (me.ready & mask).to(tl.int32)
        over = 1 - me.ready.to(tl.int32)
        more = source if beside is None else beside
        for begin in tl.static_range(0, COUNT, PLACES_TOGETHER):
            found, missing = _poll_some(
                me, source, more, looks, over, count, _places_from(PLACES, begin), RANKS is None,
                PATIENCE if begin == 0 else 0,
            )  # fmt: skip
            blocks, late = blocks + found, late + (missing,)
    else:
        for i in tl.static_range(COUNT):
            of = source if PLACES[i][0] == 0 else beside
            peer = me.rank if RANKS is None else PLACES[i][2] % RANKS
            there = (PLACES[i][2] < count) & mask & (tl.arange(0, source.shape[0]) >= 0)
            words, _ = _look_at(me, of, PLACES[i][1], peer, _of_each_word(there), 1, False)
            blocks = blocks + words
    return blocks, late


@triton.jit
def _poll_some(
    me, source, beside, looks, over, count, PLACES: tl.constexpr, TWICE: tl.constexpr, PATIENCE: tl.constexpr
):  # fmt: skip
    """What `poll_places` does of as many places as one loop polls."""
    COUNT: tl.constexpr = len(PLACES)
    found = tl.inline_asm_elementwise(
        assembly.vectors(COUNT, False, TWICE, PLACES, PATIENCE),
        assembly.constraints(4 * COUNT + 1, "l", "r", "r", "r", "r", "r", "l", "l"),
        [source, looks, looks, over, count, _call_bit(me), me.base, beside],  # there is no stride
        dtype=_words(4 * COUNT + 1),
        is_pure=False,
        pack=1,
    )
    return _blocks_of(found, source.shape[0])


@triton.constexpr_function
def _places_from(places, begin):
    """The places that one loop polls, from this one on, with offsets in bytes."""
    return tuple((of, 4 * words, number) for of, words, number in places[begin : begin + PLACES_TOGETHER.value])


@triton.jit
def _blocks_of(found, SIZE: tl.constexpr):
    """What `assembly.vectors` returns: (blocks of the words of each place, what is missing)."""
    blocks = ()
    for i in tl.static_range(len(found) // 4):
        even = tl.join(found[4 * i], found[4 * i + 2])
        odd = tl.join(found[4 * i + 1], found[4 * i + 3])
        blocks = blocks + (tl.join(even, odd).reshape(4 * SIZE),)
    return blocks, found[len(found) - 1]


@triton.jit
def _look_at(me, source, offset, peers, awaited, PLACES: tl.constexpr, CLEARED: tl.constexpr):
    """Where there is no assembly: (the blocks of words of so many places, whether all came).

    Args:
      offset: i32 [places, 1], words behind `source`.
      peers: i32 [places, 1], who sends.
      awaited: i1 [places, words], for which to wait.
    """
    rank = tl.arange(0, triton.next_power_of_2(PLACES))[:, None]
    words = _of_each_word(source) + tl.arange(0, 4 * source.shape[0])[None, :] % 4 + offset + 0 * rank
    awaited = awaited & (rank >= 0)
    if CLEARED:
        words, came = _take_words(me, words, peers, awaited)
        words, came = ~words, came & me.ready
    else:
        values, came = receive(me, words, peers, awaited)
        words = values.to(tl.int32, bitcast=True) | _call_bit(me)
    words = tl.where(came & awaited, words, -1)
    blocks = ()
    for of in tl.static_range(PLACES):
        blocks = blocks + (tl.sum(tl.where(rank == of, words, 0), axis=0),)
    return blocks, came


@triton.jit
def _of_each_word(block):
    """A block of something of each vector as [1, words]."""
    return tl.broadcast_to(block[:, None], [block.shape[0], 4]).reshape(4 * block.shape[0])[None, :]


@triton.jit
def _left_out(me, OWN: tl.constexpr):
    """The rank whose vectors nobody waits for: this one, or -1 if it sends itself some."""
    rank = me.rank
    if OWN:
        rank = me.rank * 0 - 1
    return rank


@triton.jit
def clear_vectors(
    me, source, stride, late, WORLD: tl.constexpr, OWN: tl.constexpr = False, CLEARED: tl.constexpr = True
):
    """Makes room for the words of the next call but one. All warps meet here, so a kernel stores its result before.

    Args:
      late: what `poll_vectors` returned last; it took the other arguments.
      CLEARED: if false there is nothing to clear, and what is late is told to all threads alone.

    Returns: what `report_vectors` takes as `reports`.
    """
    left_out = _left_out(me, OWN)
    WORDS: tl.constexpr = 4 * source.shape[0]
    words = (source[:, None] + tl.arange(0, 4)[None, :]).reshape(WORDS)
    reports = ()
    for chunk in tl.static_range(len(late)):
        some = _any(tl.max(late[chunk], axis=0))
        reports = reports + ((late[chunk], some),)
        if CLEARED:
            for rank in tl.static_range(RANKS_TOGETHER * chunk, min(RANKS_TOGETHER * (chunk + 1), WORLD)):
                # All threads have met in between: none still looks.
                came = me.ready & (some == 0) & (left_out != rank)
                tl.store(words + rank * stride, tl.zeros([WORDS], tl.int32), mask=came)
    return reports


@triton.jit
def report_vectors(me, source, stride, reports):
    """Reports the words that did not come, if any did not.

    Args:
      reports: what `clear_vectors` returned; it took the other arguments.
    """
    for chunk in tl.static_range(len(reports)):
        missing, some = reports[chunk]
        if some != 0:
            place = ((source.to(tl.int64) - me.base) // 4).to(tl.int32)
            place += (RANKS_TOGETHER * chunk + missing - 1) * stride
            first = tl.min(tl.where(missing > 0, place, 0x7FFFFFFF))
            of = tl.max(tl.where((missing > 0) & (place == first), missing - 1, 0))
            _report(me, -1 - first, 4, 0, RANKS_TOGETHER * chunk + of)


@triton.jit
def leave_if_all_came(me, reports):
    """Ends the program here if `report_vectors` has nothing to do, rather than behind its code.

    Args:
      reports: what `clear_vectors` returned, once or several times, one after the other.
    """
    BACKEND: tl.constexpr = _backend()
    if BACKEND == "cuda" and len(reports) > 0:
        some = me.rank * 0
        for i in tl.static_range(len(reports)):
            some = some | reports[i][1]
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p exit; mov.b32 $0, $1; }",
            "=r,r",
            [some],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _any(late):
    """Whether `late`, of which warps may have different values, is not 0 on one of them: 1 or 0. A block barrier.

    Triton reduces a block that is shorter than the program has threads in every warp by itself.
    """
    BACKEND: tl.constexpr = _backend()
    if BACKEND == "cuda":
        some = tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $1, 0; barrier.red.or.pred p, 0, p; selp.b32 $0, 1, 0, p; }",
            "=r,r",
            [late],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.debug_barrier()
        some = (late != 0).to(tl.int32)
    return some


@triton.jit
def linger(me, source, count, stride, CLEARED: tl.constexpr = False):
    """Waits for some messages at the least expense, of the memory and of time. A function that receives has to follow.

    Of many messages that are sent together, wait here for one of each sender.

    Args:
      source: scalar pointer to the first one.
      count: i32, how many.
      stride: i32, words from one to the next.
      CLEARED: whether they are words (`send_words`).

    Returns: i1, false if they did not come within the heap's timeout.
    """
    BACKEND: tl.constexpr = _backend()
    tl.static_assert(_of_triton(), "Gluon kernels cannot call shmem.linger")
    came = me.ready
    if BACKEND == "cuda":
        # Each thread polls messages of its own, and they meet when all have theirs.
        all_came = tl.inline_asm_elementwise(
            assembly.linger(CLEARED),
            "=r,l,r,r,r,l",
            [source.to(tl.int64), count, stride * 4, _call_bit(me), me.base],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        came = came & (all_came != 0)
    return came


@triton.jit
def _receive(me, source, peer, mask, patient, CLEARED: tl.constexpr):
    """Waits for messages, of the kind that the receiver makes 0 or of the other one: (i32 words, whether all came)."""
    tl.static_assert(source.numel <= 16384, "shmem.receive and shmem.receive_words take at most 16384 words at a time")
    timeout = _timeout(me)
    patient = me.ready & patient
    words = _look(source, mask)
    # Threads may disagree on whether to wait, if the rank failed while they began. Their sum is the same in all.
    missing, going = _count(tl.sum(_missing(me, words, mask, CLEARED) + tl.where(patient, 0, STOP)))
    if missing > 0:
        end = _deadline(timeout)
        polls = end * 0
        while (missing > 0) & going:
            late_all = _too_late(me, end, polls)
            words = _look(source, mask)
            missing, going = _count(tl.sum(_missing(me, words, mask, CLEARED) + late_all))
            polls += 1
        if missing > 0:
            _report_words(me, _missing(me, words, mask, CLEARED), source, peer, mask)
    return words, missing == 0


@triton.jit
def _missing(me, words, mask, CLEARED: tl.constexpr):
    """1 for each word that has not arrived in this call."""
    if CLEARED:
        missing = _absent(words, mask)
    else:
        missing = _late(me, words, mask)
    return missing


@triton.jit
def _look(source, mask):
    """One look at messages.

    An atomic, because a word may be on several threads. A volatile load would be made by each, and they might see
    different words: some the message, others what was there before.
    """
    return tl.atomic_load(source, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def _value(words):
    """The f32 values in words of messages."""
    return (words & -2).to(tl.float32, bitcast=True)


@triton.jit
def _call_bit(me):
    """What the lowest bit of a message is in this call: the other one than in the last call of the same parity."""
    return (((me.epoch + 1) >> 1) & 1).to(tl.int32)


@triton.jit
def _late(me, words, mask):
    """1 for each word that is of another call."""
    late = (words ^ _call_bit(me)) & 1
    if mask is not None:
        late = tl.where(mask, late, 0)
    return late


@triton.jit
def _absent(words, mask):
    """1 for each word that has not arrived."""
    absent = (words == 0).to(tl.int32)
    if mask is not None:
        absent = tl.where(mask, absent, 0)
    return absent


@triton.jit
def _report_words(me, late, source, peer, mask):
    """Reports the first of some messages that are missing, if any are: those where `late` is 1."""
    missing = tl.sum(late)
    if missing > 0:
        place = ((source.to(tl.int64) - me.base) // 4).to(tl.int32)
        first = tl.min(tl.where(late != 0, place, 0x7FFFFFFF))
        of = tl.max(tl.where(place == first, peer, 0))
        total = tl.sum(late * 0 + 1)
        if mask is not None:
            total = tl.sum(tl.where(mask, late * 0 + 1, 0))
        _report(me, -1 - first, total, total - missing, of)


@triton.jit
def _timeout(me):
    """Nanoseconds that a wait may last. Loaded along with the first look, not after it."""
    return tl.load((me.base + HEADER_TIMEOUT).to(tl.pointer_type(tl.int64)))


@triton.jit
def _deadline(timeout):
    """How long a `receive` may last: a point in time on CUDA, a number of polls elsewhere."""
    BACKEND: tl.constexpr = _backend()
    if BACKEND == "cuda":
        end = _now() + timeout
    else:
        end = timeout // 1000
    return end


@triton.jit
def _too_late(me, end, polls):
    """0; or what makes `_count` stop, once the time is up or another program has given up.

    A thread's own view: threads that read the clock one after the other disagree. So it goes into the sum of what is
    late, which is the same on all of them.
    """
    BACKEND: tl.constexpr = _backend()
    failed = tl.load((me.base + HEADER_FAILED).to(tl.pointer_type(tl.int32)), volatile=True)
    if BACKEND == "cuda":
        up = _now() >= end
    else:
        up = polls >= end
    return tl.where(up | (failed != 0), STOP, 0)


@triton.jit
def _count(late):
    """(messages that are missing, whether to go on waiting), from the sum of what is late and of `_too_late`."""
    return late & (STOP - 1), late < STOP


@triton.jit
def _now():
    """Nanoseconds, on a clock of the whole GPU."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def now():
    """Nanoseconds on a clock of the whole GPU, i64; 0 where there is none. To see where a kernel's time goes."""
    BACKEND: tl.constexpr = _backend()
    if BACKEND == "cuda":
        time = _now()
    else:
        time = tl.program_id(0).to(tl.int64) * 0
    return time


@triton.jit
def _signal_of(me, index, peer):
    """Where `peer` keeps signal `index`."""
    address = _region_of(me, peer) + (me.signals - me.base) + index * 4
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def _poll(me, index, counters, count, SCOPE: tl.constexpr = "sys"):
    """Waits for `counters` signals from `index` on to reach `count`; false if the time ran out or ran out before.

    The answer is the same in all threads, which may disagree on `me.ready` if the rank failed while they began.
    """
    BACKEND: tl.constexpr = _backend()
    tl.static_assert(_of_triton(), "in Gluon kernels call shmem_gluon.wait")
    address = me.signals + index * 4
    if BACKEND == "cuda":
        # A thread for each signal polls; the barrier that lets the others go tells them how it ended.
        arrived = tl.inline_asm_elementwise(
            assembly.poll(SCOPE),
            "=r,l,r,r,l,r",
            [address, counters, count, me.base, me.ready.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        # Without a clock that all threads of a block agree on, the bound counts polls, each of about a microsecond.
        signals = address.to(tl.pointer_type(tl.int32))
        failed = (me.base + HEADER_FAILED).to(tl.pointer_type(tl.int32))
        polls = _timeout(me) // 1000
        missing = count * 0
        for i in range(counters):
            missing = count - tl.atomic_add(signals + i, 0, sem="acquire", scope=SCOPE)
            while (missing > 0) & (polls > 0):
                if tl.atomic_add(failed, 0, sem="relaxed", scope="gpu") != 0:
                    polls = polls * 0
                missing = count - tl.atomic_add(signals + i, 0, sem="acquire", scope=SCOPE)
                polls -= 1
        tl.debug_barrier()
        arrived = ((missing <= 0) & me.ready).to(tl.int32)
    return arrived != 0


@triton.jit
def _poll_in_warps(me, signals, counters, count, SCOPE: tl.constexpr = "sys"):
    """Waits like `_poll`, with the first threads of each warp and without a barrier of the block.

    Args:
      signals: the address of a signal for each thread.
      counters: how many threads of a warp poll theirs.

    Returns: 1 for each thread, 0 for those of a warp for which the time ran out.
    """
    return tl.inline_asm_elementwise(
        assembly.poll_in_warps(SCOPE),
        "=&r,l,r,r,l",
        [signals, counters, count, me.base],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def report_signal(me, index, count, peer):
    """Reports that signal `index` did not come in time. For `wait`."""
    _report(me, index, count, tl.load(_signal_of(me, index, me.rank), volatile=True), peer)


@triton.jit
def report_signals(me, index, count):
    """Reports the first of the signals `index + r` that is missing, or the last one if none is. For `wait_all`."""
    late = me.world - 1
    for i in range(1, me.world):
        peer = me.world - 1 - i
        seen = tl.load(_signal_of(me, index + peer, me.rank), volatile=True)
        late = tl.where(seen - count < 0, peer, late)
    report_signal(me, index + late, count, late)


@triton.jit
def _report(me, index, expected, seen, peer):
    """Marks this rank as failed; the first program to do so writes the error record."""
    failed = (me.base + HEADER_FAILED).to(tl.pointer_type(tl.int32))
    if tl.atomic_cas(failed, 0, 1, sem="acq_rel", scope="sys") == 0:
        record = tl.load((me.base + HEADER_RECORD).to(tl.pointer_type(tl.int64))).to(tl.pointer_type(tl.int32))
        tl.store(record + RECORD_MAGIC, tl.load((me.base + HEADER_MAGIC).to(tl.pointer_type(tl.int32))))
        tl.store(record + RECORD_RANK, me.rank)
        tl.store(record + RECORD_PEER, peer)
        tl.store(record + RECORD_PROGRAM, _program())
        tl.store(record + RECORD_SIGNAL, index)
        tl.store(record + RECORD_EXPECTED, expected)
        tl.store(record + RECORD_SEEN, seen)
        tl.store(record + RECORD_EPOCH, me.epoch.to(tl.int32))
        tl.debug_barrier()
        tl.atomic_xchg(failed, 2, sem="release", scope="sys")
        tl.store(record + RECORD_STATE, 1)


@triton.jit
def report_garbage(me, operand, index, value, least, most, SLOT: tl.constexpr):
    """Tells the host of a number that arrived as data and fits nowhere. It raises GarbageError; later calls are right.

    Call it where the kernel has found by itself that it cannot use the number. It costs nothing elsewhere. A report
    stays until the host has read it, and those that come meanwhile are dropped.

    Args:
      operand: i32, which of the kernel's parameters has the number, from 0 on; -1: it is of a peer, which reports it.
      index: i32, the number's place in the operand; or the peer.
      value: i32, the number.
      least, most: i32, what it may be.
      SLOT: one program of a rank alone may report into a slot, of which there are GARBAGE_SLOTS.
    """
    record = tl.load((me.base + HEADER_RECORD).to(tl.pointer_type(tl.int64))).to(tl.pointer_type(tl.int32))
    record += GARBAGE_BEGIN + SLOT * GARBAGE_WORDS
    if me.ready & (tl.load(record + GARBAGE_STATE, volatile=True) == 0):
        tl.store(record + GARBAGE_OPERAND, operand)
        tl.store(record + GARBAGE_INDEX, index)
        tl.store(record + GARBAGE_VALUE, value)
        tl.store(record + GARBAGE_LEAST, least)
        tl.store(record + GARBAGE_MOST, most)
        tl.store(record + GARBAGE_EPOCH, me.epoch.to(tl.int32))
        tl.debug_barrier()
        tl.atomic_store(record + GARBAGE_STATE, 1, sem="release", scope="sys")


@triton.jit
def _program():
    """The linear id of this program."""
    return tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))


@triton.jit
def fence_proxy():
    """Orders a TMA load after the `wait` before it.

    Peers wrote the data by ordinary stores, and TMA reads by another path.
    """
    HAS_TMA: tl.constexpr = _has_tma()
    if HAS_TMA:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _leave_if_not_placed(position, program):
    BACKEND: tl.constexpr = _backend()
    if BACKEND == "cuda":
        program = tl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            setp.ge.s32 p, $1, 0;
            @p bra PLACED;
            setp.eq.s32 p, $1, -1;
            @p exit;
            trap;
            PLACED:
            mov.b32 $0, $2;
            }
            """,
            "=r,r,r",
            [position, program],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    elif BACKEND == "hip":
        program = tl.inline_asm_elementwise(
            assembly.AMD_LEAVE, "=v,s,v,~{scc}", [position, program], dtype=tl.int32, is_pure=False, pack=1
        )
    return program


@triton.jit
def _finish_stores():
    """Each warp waits until its own stores have been done, where a block barrier alone does not order them.

    On AMD a release waits for the stores of the warp that makes it, and a barrier of the block for no stores.
    """
    BACKEND: tl.constexpr = _backend()
    if BACKEND == "hip":
        tl.inline_asm_elementwise(assembly.AMD_FINISH, "=v,v", [0], dtype=tl.int32, is_pure=False, pack=1)
