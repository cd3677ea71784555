"""What can go wrong with the heap."""


class HeapError(RuntimeError):
    """The symmetric heap cannot do what was asked, for example because the devices' memory is full."""

    missing: tuple[int, ...] = ()  # processes for which this one has waited in vain, and which may come later


class HeapUnavailableError(HeapError):
    """There can be no symmetric heap here: a driver, a device or an address range does not allow it."""


class SpansHostsError(HeapUnavailableError):
    """Devices of one team are on several hosts; all processes of the mesh find the same."""


class GarbageError(ValueError):
    """A kernel was given sizes or offsets that fit nowhere. It has addressed nothing by them; its result is NaN.

    Later calls are right again: nothing has to be reset.
    """


class PeerTimeoutError(HeapError):
    """A rank waited for a peer that did not arrive in time. The result of the call is NaN."""
