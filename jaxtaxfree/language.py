"""Who has Triton's language, of which there is one: lowerings, several at a time, or a simulation, which rebinds it.

Threads get it in the order in which they ask, so that lowerings which overlap keep no simulation waiting for ever. Who
has it may ask again, for either.
"""

import contextlib
import threading
from collections.abc import Callable, Generator

_changed = threading.Condition()
_lowering: dict[int, int] = {}  # by thread, how many lowerings it is in, one inside of another
_simulating: list[int] = []  # the thread that simulates, as often
_queue: list[object] = []


@contextlib.contextmanager
def as_triton_has_it() -> Generator[None]:
    """While this lasts no simulation runs in another thread."""
    me = threading.get_ident()
    with _changed:
        if me not in _lowering and me not in _simulating:
            _wait_until(lambda: not _simulating)
        _lowering[me] = _lowering.get(me, 0) + 1
    try:
        yield
    finally:
        with _changed:
            _lowering[me] -= 1
            if not _lowering[me]:
                del _lowering[me]
            _changed.notify_all()


@contextlib.contextmanager
def rebound() -> Generator[None]:
    """While this lasts nothing is lowered, and nothing else simulated, in another thread."""
    me = threading.get_ident()
    with _changed:
        if me not in _simulating:
            _wait_until(lambda: not _simulating and not _lowering)
        _simulating.append(me)
    try:
        yield
    finally:
        with _changed:
            _simulating.pop()
            _changed.notify_all()


def _wait_until(free: Callable[[], bool]) -> None:
    """Waits for this thread's turn, and until the language is free for it.

    A lowering that waits for a simulation inside of it lets others go first: two might wait for each other.
    """
    me, ticket = threading.get_ident(), object()
    _queue.append(ticket)
    lowerings = _lowering.pop(me, 0)
    _changed.notify_all()
    try:
        _changed.wait_for(lambda: _queue[0] is ticket and free())
    finally:
        if lowerings:
            _lowering[me] = lowerings
        _queue.remove(ticket)
        _changed.notify_all()
