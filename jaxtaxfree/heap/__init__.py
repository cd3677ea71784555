"""The symmetric heap: memory in which kernels exchange data and signals, at addresses that every rank can compute.

There is one heap in a process. It opens by itself when the first fused operation is lowered for GPUs, and grows as
operations ask for regions, so nobody sizes it. It lives in the memory that JAX leaves free (a quarter, unless
XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise).

What a caller may want of it:

* `set_timeout`: how long a rank waits for a peer;
* `check` and `block_until_ready`: raise `PeerTimeoutError` if a rank has waited in vain, and `GarbageError` if it was
  given sizes or offsets that fit nowhere;
* `reset`: go on after a PeerTimeoutError;
* `close`: give the memory back;
* `adopt`: take it from another library.

Environment variables: JAXTAXFREE_TIMEOUT (seconds that a kernel waits for a peer, 60), JAXTAXFREE_MEETING_TIMEOUT
(seconds that a process waits for another one to build the same program, 300), JAXTAXFREE_HEAP_BASE (address of the
heap).
"""

import atexit
import ctypes
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from jaxtaxfree import environment
from jaxtaxfree.heap import adopted, door, exchange
from jaxtaxfree.heap.cuda import STEPS, CudaHeap, Device, next_meeting
from jaxtaxfree.heap.driver import Driver, DriverError
from jaxtaxfree.heap.errors import GarbageError, HeapError, HeapUnavailableError, PeerTimeoutError
from jaxtaxfree.heap.hip import HipDriver
from jaxtaxfree.heap.layout import Garbage, Layout, Record, Region
from jaxtaxfree.heap.places import PLACES, Place, spanning
from jaxtaxfree.heap.places import next_meeting as next_look

__all__ = [
    "GarbageError",
    "Heap",
    "HeapError",
    "HeapUnavailableError",
    "Layout",
    "PeerTimeoutError",
    "Place",
    "Region",
    "adopt",
    "block_until_ready",
    "check",
    "close",
    "places",
    "region",
    "reset",
    "set_timeout",
    "spanning",
]

_log = logging.getLogger("jaxtaxfree")
_lock = threading.RLock()
_heap: "Heap | None" = None
_exchange: exchange.Alone | None = None  # of the heap, and before it opens
_generation = 0  # how often this process has called `close`, as all others have
_resets = 0  # likewise, of `reset`
_timeout: float | None = None  # until the heap opens: what JAXTAXFREE_TIMEOUT says
_failure: str | None = None  # why the heap takes no more calls
_delivered = False  # somebody has been told
_garbage: list[str] = []  # what ranks have found wrong in data, and nobody has been told

_WATCH_INTERVAL = 0.05  # seconds


class Heap(Protocol):
    """What an owner of symmetric memory offers: `heap.cuda` implements it, host memory or ROCm's Iris can."""

    timeout: float

    def region(self, name: str, devices: Sequence[Any], world: int, layout_: Layout) -> Region: ...

    def places(self, devices: Sequence[Any]) -> dict[int, Place]: ...

    def refuse(self, name: str, devices: Sequence[Any], world: int, why: str) -> None: ...

    def records(self) -> list[tuple[Region, Any, float, Record]]: ...

    def garbage(self) -> list[tuple[Region, Any, Garbage]]: ...

    def fail(self) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


def region(name: str, devices: Sequence[jax.Device], world: int, layout: Layout) -> Region:
    """The region of this name on these devices; opens the heap if need be.

    Args:
      name: what the region is for. Calls with equal names on equal devices share it.
      devices: CUDA devices of the mesh, in an order that puts the devices of each team next to each other.
      world: devices in a team.
      layout: what each device's part holds.

    Raises:
      PeerTimeoutError: if a rank has waited in vain and the heap was not reset since.
      HeapUnavailableError: if the devices of a team cannot share memory; SpansHostsError, in all processes, if they are
        on several hosts.
      ValueError: if an environment variable is no time or address.
      HeapError: if memory runs out, or another process fails or does not come.
    """
    members = [Device.of(device) for device in devices]
    with _lock:
        if _failure is not None:
            why = f"The heap takes no calls until jaxtaxfree.heap.reset(): {_failure}"
            if _heap is not None:
                _heap.refuse(name, members, world, why)
            raise PeerTimeoutError(why)
        try:
            heap = _open(devices)
        except Exception as error:
            if _exchange is not None:  # the others do not wait for this process
                next_meeting(_exchange, name, members, world).fail(error, STEPS)
            raise
    return heap.region(name, members, world, layout)


def places(devices: Sequence[jax.Device]) -> dict[int, Place]:
    """Where the processes of a mesh are, as all of them find it; opens the heap if need be.

    Processes are asked once. All of them call it, as they build the same programs.

    Args:
      devices: CUDA devices of the mesh, one of this process among them.

    Raises:
      HeapUnavailableError: if there can be no heap here.
      HeapError: if another process fails or does not come.
    """
    with _lock:
        try:
            heap = _open(devices)
        except Exception as error:
            if _exchange is not None:  # the others do not wait for this process
                members = sorted({device.process_index for device in devices})
                next_look(_exchange, members).fail(error, [PLACES])
            raise
    return heap.places([Device.of(device) for device in devices])


def adopt(bases: Any, nbytes: int, *, devices: Sequence[jax.Device] | None = None) -> None:
    """Takes the heap from memory that another library has allocated on all ranks, such as Iris's or rocSHMEM's heap.

    Call it in every process, before the first fused operation is lowered. Nothing else may use the memory, and it has
    to stay. `close` gives it back to its owner. This was run on NVIDIA GPUs, with memory of CUDA's driver.

    Args:
      bases: addresses of the ranks' memory, [n] if all processes see them alike. Otherwise [n, n], the same in all
        processes: row r has them as rank r sees them, such as `multihost_utils.process_allgather` of Iris's
        `heap_bases`.
      nbytes: of each rank's memory that may be used.
      devices: of the ranks; None: `jax.devices()`.

    Raises:
      ValueError: if the table does not fit the devices, or a base is not a multiple of 128.
      HeapError: if the heap is open.
      HeapUnavailableError: if there is no driver.
    """
    global _heap
    devices = jax.devices() if devices is None else devices
    table = adopted.checked(bases, nbytes, len(devices))
    with _lock:
        if _heap is not None:
            raise HeapError(
                "heap.adopt comes before the first fused operation: call jaxtaxfree.heap.close() before it."
            )
        ids = [device.id for device in devices]
        of = _meet(), _timeout or environment.timeout(), _resets
        _begin(adopted.AdoptedHeap(_driver_of(devices), table, ids, nbytes, *of))


def set_timeout(seconds: float) -> None:
    """Sets how long a rank waits for a peer: the peers' compilation is part of it.

    Holds for regions made later, and for all after the next `reset`.

    Raises:
      ValueError: if it is not a positive, finite number.
    """
    global _timeout
    with _lock:
        _timeout = environment.seconds("A timeout", seconds)
        if _heap is not None:
            _heap.timeout = _timeout


def check() -> None:
    """Raises PeerTimeoutError if a rank of this process has waited in vain for a peer, or GarbageError.

    GarbageError is of sizes and offsets that a kernel has found to fit nowhere. It is raised once: later calls are
    right. A program that never calls this is told all the same: errors are logged, and raised in the main thread.
    """
    global _delivered
    with _lock:
        _look()
        if _failure is not None:
            _delivered = True
            raise PeerTimeoutError(_failure)
        if _garbage:
            raise GarbageError(_take_garbage())


def block_until_ready[T](x: T) -> T:
    """Like `jax.block_until_ready`, and then raises what `heap.check` does: PeerTimeoutError or GarbageError."""
    result = jax.block_until_ready(x)
    check()
    return result


def reset() -> None:
    """Makes the heap usable again after a PeerTimeoutError.

    All processes call it together, those that have not used the heap as well, when no program runs on their devices.
    """
    global _failure, _delivered, _resets
    with _lock:
        _resets += 1
        if _heap is not None:
            _heap.reset()
        _failure, _delivered = None, False
        _garbage.clear()


def close() -> None:
    """Gives the heap's memory back; the next fused operation opens a new one.

    All processes call it together, those that have not used the heap as well.
    Clears JAX's caches, so that jitted functions are built anew. Programs that were compiled ahead of time
    (`jit(f).lower(x).compile()`) must not run any more: they fail with an illegal address.
    """
    global _heap, _exchange, _failure, _delivered, _generation
    with _lock:
        _generation += 1
        closing, _heap, _exchange, _failure, _delivered = _heap, None, None, None, False
        _garbage.clear()
        if closing is not None:
            try:
                closing.close()
            finally:
                jax.clear_caches()


def _driver_of(devices: Sequence[jax.Device]) -> Driver | HipDriver:
    """What takes memory of these GPUs. Raises HeapUnavailableError if it is not there."""
    if str(getattr(devices[0], "compute_capability", "")).startswith("gfx"):
        try:
            return HipDriver()
        except (OSError, DriverError) as error:
            raise HeapUnavailableError(f"The heap needs AMD's driver and ROCm's HIP runtime: {error}") from error
    try:
        return Driver()
    except Exception as error:  # cuda-bindings raises its own kinds
        raise HeapUnavailableError(
            f"The heap needs an NVIDIA driver and the package cuda-bindings (pip install 'jaxtaxfree[cuda13]'): {error}"
        ) from error


def _open(devices: Sequence[jax.Device]) -> "Heap":
    if _heap is None:
        met, timeout = _meet(), _timeout or environment.timeout()
        return _begin(CudaHeap(_driver_of(devices), met, timeout, _resets))
    return _heap


def _meet() -> exchange.Alone:
    """How this process meets the others."""
    global _exchange
    if _exchange is None:
        patience = environment.meeting_timeout()
        if jax.process_count() == 1:
            _exchange = exchange.Alone()
        else:
            _exchange = exchange.Processes(jax.process_index(), _generation, patience, door.announce())
    return _exchange


def _begin(heap: "Heap") -> "Heap":
    """Makes this the heap of the process."""
    global _heap
    _heap = heap
    threading.Thread(target=_watch, args=(heap,), name="jaxtaxfree-watch", daemon=True).start()
    return heap


def _look() -> None:
    """Reads what ranks have left behind; the first error record found makes the heap fail."""
    global _failure
    if _heap is None:
        return
    for region, device, garbage in _heap.garbage():
        rank = f"rank {region.device_ids.index(device.id) % region.world} (device {device.id})"
        tell_garbage(garbage.describe(region.name, rank, region.layout.parameters))
    if _failure is not None or not _heap.records():
        return
    # Ranks give up at about the same time, and a record may appear before all of it has left the device.
    time.sleep(0.01)
    _failure = " ".join(_describe(*found) for found in _heap.records())
    _log.error("%s", _failure)
    try:
        _heap.fail()
    except DriverError as error:  # of a device that takes no more calls anyway
        _log.error("The heap cannot stop later calls: %s", error)


def _describe(region: Region, device: Any, timeout: float, record: Record) -> str:
    start = region.device_ids.index(device.id) // region.world * region.world
    # Whom to blame and what for is said by the kernel, which may be a user's.
    culprit = region.device_ids[start + record.peer] if 0 <= record.peer < region.world else "none of its team"
    came = "did not arrive" if (record.seen - record.expected) & 1 << 31 else "came too late"  # counters wrap around
    return (
        f"{region.name}: rank {record.rank} (device {device.id}) waited {timeout:g} s for rank {record.peer} "
        f"(device {culprit}), which {came}: program {record.program} saw {record.seen} of {record.expected} "
        f"at {region.layout.awaited(record.signal)} in call {record.epoch}. The result of the call is NaN."
    )


def tell_garbage(message: str) -> None:
    """For the next `check` to raise."""
    _log.error("%s", message)
    with _lock:
        _garbage.append(message)


def _take_garbage() -> str:
    message = " ".join(_garbage)
    _garbage.clear()
    return message


def _watch(heap: "Heap") -> None:
    """Tells the main thread what ranks have left behind, even if the program never asks."""
    global _delivered
    while _heap is heap:
        time.sleep(_WATCH_INTERVAL)
        with _lock:
            if _heap is not heap:
                return
            _look()
            if (_failure is None or _delivered) and not _garbage:
                continue
        time.sleep(_WATCH_INTERVAL)  # a caller of `check` gets there first
        with _lock:
            if _failure is not None and not _delivered:
                _delivered = True
                _raise_in_main_thread(PeerTimeoutError, _failure)
            elif _heap is heap and _garbage:
                _raise_in_main_thread(GarbageError, _take_garbage())


def _look_at_exit(pid: int = os.getpid()) -> None:
    """A last look, for the log: a program may end before the watcher sees that its last call has failed."""
    if os.getpid() == pid and _lock.acquire(timeout=1):
        try:
            _look()
        finally:
            _lock.release()


atexit.register(_look_at_exit)


def _raise_in_main_thread(kind: type[Exception], message: str) -> None:
    # Python raises a class in another thread, not an instance; this one makes its instance with the message.
    def init(self: Exception) -> None:
        kind.__init__(self, message)

    error = type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})
    thread = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread or 0), ctypes.py_object(error))
