"""What the simulator finds, and what it warns of."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtaxfree.simulator.trace import Trace


class WastedTrafficWarning(UserWarning):
    """A kernel has sent to a peer what nobody used: a store that was not read, a signal or message not awaited."""


class SimulationError(RuntimeError):
    """A kernel broke a rule of the memory model or of the protocol. The message names both sides.

    Attributes:
      trace: what everybody did until then.
    """

    trace: "Trace | None" = None


class DataRaceError(SimulationError):
    """Two programs touch the same memory, at least one of them writes, and nothing orders the two."""


class MissingFenceError(DataRaceError):
    """An asynchronous operation comes after a store, but no fence between the proxies does."""


class UninitializedReadError(SimulationError):
    """A program read scratch that nobody has written in this call, or an output or shared memory that nobody has."""


class OutOfBoundsError(SimulationError):
    """A program accessed memory outside of its operands, its outputs and the parts of the regions."""


class DeadlockError(SimulationError):
    """No program can go on: each waits for what nobody is left to send."""


class WaitOrderError(SimulationError):
    """A program waits for one of a higher id, which on a GPU may not start before the waiting one has ended."""


class WaitTimeoutError(SimulationError):
    """A program waited, or ran, for more steps than the simulation allows; on a GPU the wait would have timed out."""


class SignalCountError(SimulationError):
    """A signal was lowered, or raised more or less often than the waits for it count on."""


class WrongPeerError(SimulationError):
    """A wait names a rank that did not send what it waited for: if nothing came, the error would blame that one."""


class DeviceAssertError(SimulationError):
    """A `tl.device_assert` does not hold. GPUs check it in kernels that are compiled for debugging alone."""


class AssumptionError(SimulationError):
    """A `tl.assume` does not hold: the compiler builds on it, and what it makes of the kernel may do anything."""


class DroppedWaitError(SimulationError):
    """A program polls by plain loads, which a compiler may leave out or do once."""


class MessageError(SimulationError):
    """A word of messages was sent twice in a call or not at all, taken for that of another call, or touched otherwise.

    Only `shmem.send` and `shmem.receive` may touch messages, or `shmem.send_words` and `shmem.receive_words`.
    """


class MbarrierError(SimulationError):
    """An mbarrier was used before it was initialised, or arrived at more often than it counts."""


class UnfinishedOperationError(SimulationError):
    """A program ended, and nobody has waited for an asynchronous operation that it had begun."""


class EpochMismatchError(SimulationError):
    """A program left its epoch counter at another number than that of the call."""
