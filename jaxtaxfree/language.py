"""Who has Triton's language, of which there is one: lowerings, several at a time, or a simulation, which rebinds it."""

import contextlib
import threading
from collections.abc import Iterator

_changed = threading.Condition()
_lowerings = 0
_simulating: list[int] = []  # the thread that does, once for each simulation inside of another


@contextlib.contextmanager
def as_triton_has_it() -> Iterator[None]:
    """While this lasts no simulation runs in another thread."""
    global _lowerings
    with _changed:
        _changed.wait_for(lambda: set(_simulating) <= {threading.get_ident()})
        _lowerings += 1
    try:
        yield
    finally:
        with _changed:
            _lowerings -= 1
            _changed.notify_all()


@contextlib.contextmanager
def rebound() -> Iterator[None]:
    """While this lasts nothing is lowered, and nothing else simulated, in another thread."""
    me = threading.get_ident()
    with _changed:
        _changed.wait_for(lambda: _simulating[-1] == me if _simulating else not _lowerings)
        _simulating.append(me)
    try:
        yield
    finally:
        with _changed:
            _simulating.pop()
            _changed.notify_all()
