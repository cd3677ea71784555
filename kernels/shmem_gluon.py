"""The device API for Gluon kernels: `shmem.py` where it serves them, and in their own words where it does not.

`from jaxtaxfree.kernels import shmem_gluon as shmem` has the same names with the same meanings: `start`, `finish`,
`scratch`, `remote`, `load`, `store`, `get`, `put`, `signal`, `wait`, `claim`, `failed`, `fence_proxy`. Tensors of
pointers bring their layout with them. `start` and `finish` stand in the kernel itself, the others in any partition of
`gl.warp_specialize`, too: barriers and waits are those of the partition that calls.

* `signal` publishes what its own partition has stored. What TMA has stored it publishes only behind
  `tma.store_wait(0, read_only=False)`; what other partitions have stored, only behind an mbarrier at which they arrive.
* TMA reads what peers have stored only behind `wait` and `fence_proxy`, in that order, in the partition that loads.
* A partition that waited in vain goes on to the end, past all its mbarriers: other partitions wait at those for ever.
* Descriptors of scratch a kernel makes itself, with `tma.make_tensor_descriptor`, in the partition that uses them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxtaxfree.kernels import shmem

start = shmem.start
finish = shmem.finish
scratch = shmem.scratch
remote = shmem.remote
load = shmem.load
store = shmem.store
get = shmem.get
put = shmem.put
signal = shmem.signal
claim = shmem.claim
failed = shmem.failed
fence_proxy = shmem.fence_proxy


@gluon.jit
def wait(me, index, count, peer):
    """Waits until this rank's signal `index` has reached `count`. Like `shmem.wait`, for the calling partition.

    Where it is false, `failed` is true from then on, even if the signal came a moment later.
    """
    arrived = _poll(me, index, count.to(gl.int32)) & me.ready
    if not arrived:
        seen = gl.load(shmem._signal_of(me, index, me.rank), volatile=True)
        shmem._report(me, index, count.to(gl.int32), seen, peer)
    return arrived


@gluon.jit
def _poll(me, index, count):
    """Waits for signal `index` to reach `count`; false if the time ran out."""
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    signals = gl.full([32 * WARPS], me.signals + index * 4, gl.int64, LANES)
    # The minimum lets no warp go on that disagrees with another one.
    return gl.min(shmem._poll_in_warps(me, signals, count), 0) != 0


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
