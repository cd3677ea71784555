"""The device API for Gluon kernels: `shmem.py` where it serves them, and in their own words where it does not.

`from jaxtaxfree.kernels import shmem_gluon as shmem` has the same names with the same meanings: `start`, `finish`,
`verify`, `scratch`, `remote`, `load`, `store`, `get`, `put`, `signal`, `signal_all`, `wait`, `wait_all`, `arrive`,
`meet`, `claim`, `pace`, `now`, `failed`, `fence_proxy`, `messages`, `send`, `send_words`, `words_of`,
`elements_of`; with other arguments `receive_vectors`, `clear_vectors`; and `receive_own`, `receive_all`,
`receive_pairs`. Tensors of pointers bring their layout with them. `start` and `finish` stand in the kernel itself, the
others in any partition of `gl.warp_specialize`, too: barriers and waits are those of the partition that calls.

* `signal` publishes what its own partition has stored. What TMA has stored it publishes only behind
  `tma.store_wait(0, read_only=False)`; what other partitions have stored, only behind an mbarrier at which they arrive.
* A stage that was read by ordinary loads goes back to TMA only behind `fence_async_shared` and an mbarrier, because TMA
  does not wait for reads that are on their way.
* TMA reads what peers have stored only behind `wait` and `fence_proxy`, in that order, in the partition that loads.
* A partition that waited in vain goes on to the end, past all its mbarriers: other partitions wait at those for ever.
* Descriptors of scratch a kernel makes itself, with `tma.make_tensor_descriptor`, in the partition that uses them.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxtaxfree.kernels import shmem

start = shmem.start
verify = shmem.verify
finish = shmem.finish
scratch = shmem.scratch
remote = shmem.remote
load = shmem.load
store = shmem.store
get = shmem.get
put = shmem.put
signal = shmem.signal
arrive = shmem.arrive
claim = shmem.claim
pace = shmem.pace
failed = shmem.failed
send = shmem.send
now = shmem.now
fence_proxy = shmem.fence_proxy
messages = shmem.messages
send_words = shmem.send_words
words_of = shmem.words_of
elements_of = shmem.elements_of


@gluon.jit
def signal_all(me, index, WORLD: gl.constexpr, mask=True):
    """Adds 1 to signal `index` of every rank. Like `shmem.signal_all`, of what the calling partition has stored."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    peers = gl.arange(0, triton.next_power_of_2(WORLD), LANES)
    shmem.signal(me, index, peers, (peers < WORLD) & mask)


@gluon.jit
def wait(me, index, count, peer):
    """Waits until this rank's signal `index` has reached `count`. Like `shmem.wait`, for the calling partition.

    Where it is false, `failed` is true from then on, even if the signal came a moment later.
    """
    count = gl.to_tensor(count).to(gl.int32)
    arrived = _poll(me, index, 1, count)
    if not arrived:
        shmem.report_signal(me, index, count, peer)
    return arrived


@gluon.jit
def wait_all(me, index, count):
    """Waits for signal `index + r` of each rank r, of at most 32. Like `shmem.wait_all`, for the calling partition."""
    count = gl.to_tensor(count).to(gl.int32)
    arrived = _poll(me, index, me.world, count)
    if not arrived:
        shmem.report_signals(me, index, count)
    return arrived


@gluon.jit
def meet(me, index, count):
    """Waits for what programs of this rank `arrive` at. Like `shmem.meet`, for the calling partition."""
    count = gl.to_tensor(count).to(gl.int32)
    arrived = _poll(me, index, 1, count, "gpu")
    if not arrived:
        shmem.report_signal(me, index, count, me.rank)
    return arrived


@gluon.jit
def _poll(me, index, counters, count, SCOPE: gl.constexpr = "sys"):
    """Waits for `counters` signals from `index` on to reach `count`; false if the time ran out."""
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    thread = gl.arange(0, 32 * WARPS, LANES)
    signals = me.signals + (index + thread % 32) * 4
    looking = counters
    if SCOPE == "gpu":  # all programs of the GPU poll one word: of each a single warp
        looking = gl.where(thread < 32, counters, 0)
    # The minimum lets no warp go on that disagrees with another one, on `me.ready` either.
    return gl.min(shmem._poll_in_warps(me, signals, looking, count, SCOPE) & me.ready.to(gl.int32), 0) != 0


@triton.constexpr_function
def vectors_of(size, warps):
    """The layout of a block of which each thread of a partition has so many elements next to each other at a time."""
    return gl.BlockedLayout([size], [32], [warps], [0])


@gluon.jit
def receive_vectors(
    me, source, row, rows, PITCH: gl.constexpr, STRIDE: gl.constexpr, ROWS: gl.constexpr, ROW: gl.constexpr,
    SPREAD: gl.constexpr, WORLD: gl.constexpr, LINGER: gl.constexpr = False,
):  # fmt: skip
    """Waits for words of all ranks, this one included. Like `shmem.poll_vectors`, for the calling partition.

    Each thread polls vectors of its own, and nobody waits for another thread. `clear_vectors` has to follow.

    Args:
      source: scalar pointer to the first word of row 0 that rank 0 sends.
      row: i32, the first row of the block.
      rows: i32, how many rows there are, more than `row`. Of others nothing is waited for.
      PITCH: words from a row to the next one.
      STRIDE: words from what a rank sends to what the next one sends. All these are multiples of 4.
      ROWS: rows of a block, a power of 2; if they are spread, a multiple of 8.
      ROW: words of a row, a power of 2, at least 4.
      SPREAD: see `spread`.
      LINGER: waits for the first words of each rank before it looks at all of them, which pays where there are many.

    Returns: (for each rank a block of i32 words, one row after the other, in the layout `vectors_of(4, ...)`, longer
      than ROWS * ROW if that is less than 4 for each thread; -1 for those that did not come within the heap's timeout,
      or that there are not; what did not come).
    """
    WARPS: gl.constexpr = gl.num_warps()
    place, there = _places(row, rows, PITCH, ROWS, ROW, SPREAD, 4)
    patient = _linger(me, source + row * PITCH, STRIDE, WORLD) if LINGER else me.ready
    found, _, late = shmem.poll_vectors(me, source + place, STRIDE, WORLD, OWN=True, patient=patient, mask=there)
    blocks = ()
    for rank in gl.static_range(WORLD):
        blocks = blocks + (gl.convert_layout(found[rank], vectors_of(4, WARPS)),)
    return blocks, late


@gluon.jit
def receive_own(me, source, COUNT: gl.constexpr, SIZE: gl.constexpr, there=True, PATIENCE: gl.constexpr = 0):
    """Waits for messages (`send`) from programs of this rank, of which others may wait for the same.

    Each thread polls some of its own, all at the same time. `report_own` has to follow. Who sends them may wait for a
    peer, so this lasts for twice the heap's timeout, as `meet` does.

    Args:
      source: scalar pointer to the first one.
      COUNT: how many, next to each other, a multiple of 4.
      SIZE: of the result, a power of 2, COUNT or more.
      there: i1, whether there are any; if not, nothing is waited for.
      PATIENCE: as `shmem.poll_places` takes it.

    Returns: (f32 [SIZE] in whatever layout, NaN for what did not come in time, behind COUNT, and if there are none;
      what did not come).
    """
    found, late = _poll_pieces(me, source, COUNT, SIZE, 0, None, there, PATIENCE)
    pieces = ()
    for i in gl.static_range(len(found)):
        pieces = pieces + (_value_of(found[i]),)
    return joined(pieces, pieces_of(SIZE, gl.num_warps())), late


@gluon.jit
def receive_all(
    me, source, COUNT: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WORLD: gl.constexpr, there,
    PATIENCE: gl.constexpr,
):  # fmt: skip
    """Like `receive_own`, of COUNT messages from each rank, this one included. `report_own` has to follow.

    Args:
      source: scalar pointer to the first one that rank 0 sends.
      STRIDE: messages from what a rank sends to what the next one sends, a multiple of 4.

    Returns: (pieces for `joined`, i32, of each 4 words next to each other are a thread's: the first one of all ranks,
      and so on, with the lowest bits that they came with, and -1 for what did not come or is not there; what did not
      come).
    """
    return _poll_pieces(me, source, COUNT, SIZE, STRIDE, WORLD, there, PATIENCE)


@gluon.jit
def _poll_pieces(
    me, source, COUNT: gl.constexpr, SIZE: gl.constexpr, STRIDE: gl.constexpr, WORLD: gl.constexpr, there,
    PATIENCE: gl.constexpr,
):  # fmt: skip
    """The words of messages in pieces, of which each thread has a vector: of the first piece those of all ranks, and so
    on. And what did not come. WORLD is None if they are all of this rank."""
    EACH: gl.constexpr = SIZE // pieces_of(SIZE, gl.num_warps())
    RANKS: gl.constexpr = 1 if WORLD is None else WORLD
    USED: gl.constexpr = triton.cdiv(COUNT, EACH)
    vector = gl.arange(0, EACH // 4, vectors_of(1, gl.num_warps()))
    count = gl.where(4 * vector + (USED - 1) * EACH < COUNT, USED, USED - 1) * RANKS
    PLACES: gl.constexpr = _pieces(USED, EACH, RANKS, STRIDE)
    return shmem.poll_places(me, source + 4 * vector, PLACES, count, WORLD, there, PATIENCE=PATIENCE)


@triton.constexpr_function
def _pieces(pieces, size, ranks, stride):
    """The places of so many pieces, as `shmem.poll_places` takes them."""
    return tuple((0, i * size + rank * stride, i * ranks + rank) for i in range(pieces) for rank in range(ranks))


@gluon.jit
def receive_pairs(
    me, source, beside, count, PLACES: gl.constexpr, STRIDE: gl.constexpr, STEP: gl.constexpr,
    PATIENCE: gl.constexpr,
):  # fmt: skip
    """Waits for messages (`send`) of this rank at so many places behind each of two pointers, all at once.

    There are 4 at each place. Otherwise it is like `receive_own`. `report_pairs` has to follow.

    Args:
      source, beside: blocks of pointers in the layout `vectors_of(1, ...)`. Of more than one for each thread the next
        ones are polled when those before have come, which takes a way to the L2 cache each.
      count: i32 block: for how many of PLACES to wait.
      STRIDE, STEP: words from such a place to the next one.
      PATIENCE: as `shmem.poll_places` takes it.

    Returns: (for each place f32, 4 for each pointer of `source`, one behind the other; the same of `beside`; what did
      not come).
    """
    found, late = shmem.poll_places(
        me, source, _pairs(PLACES, STRIDE, STEP), count, beside=beside, PATIENCE=PATIENCE
    )  # fmt: skip
    at_source, at_beside = (), ()
    for i in gl.static_range(PLACES):
        at_source = at_source + (_value_of(found[2 * i]),)
        at_beside = at_beside + (_value_of(found[2 * i + 1]),)
    return at_source, at_beside, late


@triton.constexpr_function
def _pairs(places, stride, step):
    """The places of `receive_pairs`, as `shmem.poll_places` takes them."""
    return tuple((of, i * each, i) for i in range(places) for of, each in ((0, stride), (1, step)))


@gluon.jit
def report_pairs(me, source, late):
    """Reports what `receive_pairs` waited for in vain, by the pointer of `source`. All warps of the partition meet.

    The meeting is worth more than the report. Warps that have nothing to send would poll for the next messages, while
    another one of their program still sends, which they hold up: a decode step took 227 us without it, and 204.
    """
    for i in gl.static_range(len(late)):
        if gl.max(late[i], 0) != 0:
            place = ((source.to(gl.int64) - me.base) // 4).to(gl.int32)
            first = gl.min(gl.where(late[i] > 0, place, 0x7FFFFFFF), 0)
            shmem._report(me, -1 - first, 4, 0, me.rank)


@gluon.jit
def joined(blocks, PIECES: gl.constexpr):
    """One block of so many, a power of 2, one behind the other; the last ones may not be there."""
    pieces = ()
    for i in gl.static_range(PIECES):
        pieces = pieces + (blocks[min(i, len(blocks) - 1)],)
    for doubled in gl.static_range(PIECES.bit_length() - 1):
        longer = ()
        for i in gl.static_range(0, PIECES >> doubled, 2):
            both = gl.join(pieces[i], pieces[i + 1])
            longer = longer + (both.permute([1, 0]).reshape([2 * pieces[i].shape[0]]),)
        pieces = longer
    return pieces[0]


@gluon.jit
def _value_of(words):
    """The values of words of messages, NaN for those that did not come."""
    return gl.where(words == -1, float("nan"), shmem._value(words))


@triton.constexpr_function
def pieces_of(size, warps):
    """How many vectors of 4 words each thread has of so many words."""
    return max(1, size // (4 * 32 * warps))


@gluon.jit
def report_own(me, source, late, SIZE: gl.constexpr, STRIDE: gl.constexpr = 0, WORLD: gl.constexpr = None):
    """Reports what `receive_own` or `receive_all` waited for in vain. All warps of the partition meet, see
    `report_pairs`.

    Args:
      late: what it returned last; it took the other arguments.
    """
    EACH: gl.constexpr = SIZE // pieces_of(SIZE, gl.num_warps())
    RANKS: gl.constexpr = 1 if WORLD is None else WORLD
    for chunk in gl.static_range(len(late)):
        missing = late[chunk]
        if gl.max(missing, 0) != 0:
            vector = gl.arange(0, EACH // 4, vectors_of(1, gl.num_warps()))
            number = shmem.PLACES_TOGETHER * chunk + missing - 1
            offset = 4 * vector + number // RANKS * EACH + number % RANKS * STRIDE
            first = gl.min(gl.where(missing > 0, offset, 0x7FFFFFFF), 0)
            peer = me.rank
            if WORLD is not None:
                peer = gl.max(gl.where((missing > 0) & (offset == first), number % RANKS, -1), 0)
            place = ((source.to(gl.int64) - me.base) // 4).to(gl.int32) + first
            shmem._report(me, -1 - place, 4, 0, peer)


@gluon.jit
def _linger(me, source, STRIDE: gl.constexpr, WORLD: gl.constexpr):
    """Waits for a vector of each rank, at the least expense of the memory. All warps of the partition meet.

    Returns: i1, false if they did not come within the heap's timeout.
    """
    BACKEND: gl.constexpr = shmem._backend()
    came = me.ready
    if BACKEND == "cuda":
        # The first thread of each warp looks.
        lane = gl.arange(0, 32 * gl.num_warps(), vectors_of(1, gl.num_warps()))
        _, each, _ = shmem.poll_vectors(me, source + 0 * lane, STRIDE, WORLD, OWN=True, mask=lane % 32 == 0)
        came = gl.min(each.to(gl.int32), 0) != 0
    return came


@gluon.jit
def clear_vectors(
    me, source, row, rows, late, PITCH: gl.constexpr, STRIDE: gl.constexpr, ROWS: gl.constexpr, ROW: gl.constexpr,
    SPREAD: gl.constexpr, WORLD: gl.constexpr,
):  # fmt: skip
    """Makes room for the words of the next call but one, and reports those that did not come.

    All warps of the partition meet here, so a kernel stores its result before.

    Args:
      late: what `receive_vectors` returned last; it took the other arguments.
    """
    if len(late) > 0:
        # What comes later than this is of no use to anyone: the rank has given up.
        place, there = _places(row, rows, PITCH, ROWS, ROW, SPREAD, 1)
        for rank in gl.static_range(WORLD):
            gl.store(source + place + rank * STRIDE, place * 0, mask=there & me.ready)
        place, _ = _places(row, rows, PITCH, ROWS, ROW, SPREAD, 4)
        reports = ()
        for chunk in gl.static_range(len(late)):
            reports = reports + ((late[chunk], gl.max(late[chunk], 0)),)
        shmem.report_vectors(me, source + place, STRIDE, reports)


@gluon.jit
def _places(
    row, rows, PITCH: gl.constexpr, ROWS: gl.constexpr, ROW: gl.constexpr, SPREAD: gl.constexpr, STEP: gl.constexpr
):
    """Where every 4th word of a block lies, or every word, and whether it is there: each thread has 4 words."""
    WARPS: gl.constexpr = gl.num_warps()
    SIZE: gl.constexpr = max(ROWS * ROW, 4 * 32 * WARPS)
    word = STEP * gl.arange(0, SIZE // STEP, vectors_of(4 // STEP, WARPS))
    line = row + spread(word // ROW, SPREAD)
    return line * PITCH + word % ROW, (word < ROWS * ROW) & (line < rows)


@gluon.jit
def spread(row, SPREAD: gl.constexpr):
    """Where rows lie, counted from the first one, of which 8 lie together in every 8 * SPREAD."""
    if SPREAD > 1:
        row = row // 8 * (8 * SPREAD) + row % 8
    return row


@gluon.jit(repr=lambda specialization: specialization.constants["KERNEL"].__name__)
def run(KERNEL: gl.constexpr, arguments, TEAM: gl.constexpr):
    """What `shmem_call` launches for a Gluon kernel: the kernel, or nothing where the launch only loads the module.

    A single thread may not leave a kernel that has partitions: their warps would take what is left in shared memory
    for orders.

    Args:
      KERNEL: the kernel.
      arguments: of the kernel, a tuple.
      TEAM: which of them is `team`; None of a kernel that has none, and is never launched for its module alone.
    """
    if TEAM is None:
        KERNEL(*arguments)
    elif gl.load(arguments[TEAM][0]) != shmem.POSITION_LOAD_ONLY:
        KERNEL(*arguments)
