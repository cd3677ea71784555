"""The device API for Gluon kernels: `shmem.py` where it serves them, and in their own words where it does not.

`from jaxtaxfree.kernels import shmem_gluon as shmem` has the same names with the same meanings: `start`, `finish`,
`verify`, `scratch`, `remote`, `load`, `store`, `get`, `put`, `signal`, `signal_all`, `wait`, `wait_all`, `claim`,
`pace`, `failed`, `fence_proxy`. Tensors of pointers bring their layout with them. `start` and `finish` stand in the
kernel itself, the others in any partition of `gl.warp_specialize`, too: barriers and waits are those of the partition
that calls.

* `signal` publishes what its own partition has stored. What TMA has stored it publishes only behind
  `tma.store_wait(0, read_only=False)`; what other partitions have stored, only behind an mbarrier at which they arrive.
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
claim = shmem.claim
pace = shmem.pace
failed = shmem.failed
fence_proxy = shmem.fence_proxy


@gluon.jit
def signal_all(me, index, WORLD: gl.constexpr):
    """Adds 1 to signal `index` of every rank. Like `shmem.signal_all`, of what the calling partition has stored."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    peers = gl.arange(0, triton.next_power_of_2(WORLD), LANES)
    shmem.signal(me, index, peers, peers < WORLD)


@gluon.jit
def wait(me, index, count, peer):
    """Waits until this rank's signal `index` has reached `count`. Like `shmem.wait`, for the calling partition.

    Where it is false, `failed` is true from then on, even if the signal came a moment later.
    """
    arrived = _poll(me, index, 1, count.to(gl.int32)) & me.ready
    if not arrived:
        seen = gl.load(shmem._signal_of(me, index, me.rank), volatile=True)
        shmem._report(me, index, count.to(gl.int32), seen, peer)
    return arrived


@gluon.jit
def wait_all(me, index, count):
    """Waits for signal `index + r` of each rank r, of at most 32. Like `shmem.wait_all`, for the calling partition."""
    arrived = _poll(me, index, me.world, count.to(gl.int32)) & me.ready
    if not arrived:
        for peer in range(me.world):
            shmem._report_signal(me, index + peer, count.to(gl.int32), peer)
    return arrived


@gluon.jit
def _poll(me, index, counters, count):
    """Waits for `counters` signals from `index` on to reach `count`; false if the time ran out."""
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    signals = me.signals + (index + gl.arange(0, 32 * WARPS, LANES) % 32) * 4
    # The minimum lets no warp go on that disagrees with another one.
    return gl.min(shmem._poll_in_warps(me, signals, counters, count), 0) != 0


@gluon.jit(repr=lambda specialization: specialization.constants["KERNEL"].__name__)
def run(KERNEL: gl.constexpr, arguments, TEAM: gl.constexpr):
    """What `shmem_call` launches for a Gluon kernel: the kernel, or nothing where the launch only loads the module.

    A single thread may not leave a kernel that has partitions: their warps would take what is left in shared memory
    for orders.

    Args:
      KERNEL: the kernel.
      arguments: of the kernel, a tuple.
      TEAM: which of them is `team`.
    """
    if gl.load(arguments[TEAM][0]) != shmem.POSITION_LOAD_ONLY:
        KERNEL(*arguments)
