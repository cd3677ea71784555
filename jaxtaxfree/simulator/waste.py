"""Warnings of what a kernel leaves at a peer and nobody uses: stores, signals and messages."""

import warnings

import numpy as np

from jaxtaxfree.simulator.errors import WastedTrafficWarning
from jaxtaxfree.simulator.events import Event, kernel_line, where
from jaxtaxfree.simulator.memory import Messages, Part


class Waste:
    """What a run has sent to peers, and what of it nobody has used."""

    def __init__(self) -> None:
        self._stored: list[tuple[Event, Part, int, int]] = []
        self._sent: list[tuple[Event, Messages, np.ndarray]] = []
        self._found: dict[str, list[tuple[Event, str]]] = {}  # by the line

    def stored(self, part: Part, address: int, size: int, event: Event) -> None:
        """Something was stored to scratch."""
        if part.rank != event.rank:
            self._stored.append((event, part, address, size))

    def sent(self, part: Messages, units: np.ndarray, event: Event) -> None:
        """Messages were sent. Those that the receiver clears are not in question: of these it is an error."""
        if part.rank != event.rank and not part.cleared:
            self._sent.append((event, part, units))

    def end_call(self, call: int) -> None:
        """All ranks have ended a call."""
        for event, part, address, size in self._stored:
            if event.call == call and not (event.whole or event).used:
                self.add(event, f"read {part.element(address, size)}, where {event} has written")
        sent: dict[tuple[Event, Messages], list[np.ndarray]] = {}
        for event, part, units in self._sent:
            if event.call == call and not (event.whole or event).used:
                sent.setdefault((event.whole or event, part), []).append(units)
        for (event, part), portions in sent.items():
            self.add(event, f"received {part.title_of(np.concatenate(portions))}, which {event} has sent")
        self._stored = [each for each in self._stored if each[0].call != call]
        self._sent = [each for each in self._sent if each[0].call != call]

    def add(self, event: Event, what: str) -> None:
        """Nobody has done this with what an event has left."""
        self._found.setdefault(where(event.lines), []).append((event, what))

    def warn(self, name: str, warned: set[str]) -> None:
        """Warns of each line once, but of those of which was `warned`, and adds it to them.

        Args:
          name: of the operation.
        """
        for line, found in self._found.items():
            if line in warned:
                continue
            warned.add(line)
            # Of several the same one in every interleaving.
            event, what = min(found, key=lambda each: (each[0].call, each[0].rank, each[0].program, each[1]))
            code, number, _ = kernel_line(event.lines)
            warnings.warn_explicit(
                f"{name}: Nobody has {what}. Leave it out, or use it: what is on the wire in vain takes time.",
                WastedTrafficWarning,
                code.co_filename,
                number,
            )
