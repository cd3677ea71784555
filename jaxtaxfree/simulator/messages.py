"""The rules of messages: each word is sent once in each call, and again only after it has been read.

The lowest bit of a word tells a call from the one two calls before it, and nothing else. So a word that is left out in
one call, or sent twice, or read too late is a wrong number that no one notices. Here each word carries the number of
the call in which it was sent.

Words that the receiver clears (`shmem.send_words`) may be left out. But one that is sent before it has been cleared,
or that nobody receives, is taken for that of a later call, or erased before it is read.
"""

import numpy as np

from jaxtaxfree.simulator.clocks import HEARD, Clocks, each
from jaxtaxfree.simulator.errors import DataRaceError, MessageError
from jaxtaxfree.simulator.events import Event
from jaxtaxfree.simulator.memory import Messages

WORD = 4  # bytes


def units_of(part: Messages, addresses: np.ndarray, size: int, event: Event) -> np.ndarray:
    """Indices of the words at these addresses."""
    offsets = (addresses - np.uint64(part.start)).astype(np.int64)
    if size != WORD or (offsets % WORD).any():
        raise MessageError(f"{event} accesses {size} bytes of the {part.title}: messages are words of {WORD} bytes.")
    return offsets // WORD


def send(clocks: Clocks, part: Messages, units: np.ndarray, index: int) -> None:
    """Checks the words that were just sent, and remembers them.

    Args:
      index: of the event in `clocks.events`.
    """
    event = clocks.events[index]
    assert event is not None
    before = part.sent[units]
    wrong = before > event.call - 2 if part.cleared else before != event.call - 2
    if (wrong | (event.call % 2 != part.parity)).any():
        raise MessageError(_out_of_turn(clocks, part, int(units[np.argmax(wrong)]), event))
    ordered = np.sort(units)
    if (ordered[1:] == ordered[:-1]).any():
        values, counts = np.unique(units, return_counts=True)
        raise MessageError(
            f"{event} sends {part.title_of(values[counts > 1])} from several lanes at once: each word is sent once in "
            "a call."
        )
    if part.cleared:
        _check_cleared(clocks, part, units, event)
    elif (wrong := (part.words[units] & 1) != _bit(event.call)).any():
        raise MessageError(
            f"{event} sends {part.title_of(units[wrong])} with the lowest bit of another call. `shmem.send` sets it by "
            "the epoch that `shmem.start` returned; for `shmem.send_words` declare the messages as int32."
        )
    clocks.check_readers(part, units, event, HEARD, WORD)
    # Who has read a word has seen it arrive; what nobody has read may still be on its way.
    unread = units[part.received[units] != part.writers[units]]
    if unread.size:
        clocks.check_writers(part, unread, part.writers[unread], event, "sends again", WORD)
    part.sent[units] = event.call
    part.writers[units] = index
    part.full[units] = True


def _check_cleared(clocks: Clocks, part: Messages, units: np.ndarray, event: Event) -> None:
    """Checks that words may be sent which their receiver clears."""
    if (full := part.full[units]).any():
        unit = units[full][:1]
        raise MessageError(
            f"{event} sends {part.title_of(unit)}, where {clocks.events[part.writers[unit[0]]]} has sent a word that "
            "nobody has received: the receiver would clear both."
        )
    if (part.words[units] == 0).any():
        raise MessageError(
            f"{event} sends 0 as {part.title_of(units[part.words[units] == 0])}, which says that nothing has come. "
            "`shmem.send_words` sends words inverted, and none that is -1."
        )


def clear(clocks: Clocks, part: Messages, units: np.ndarray, event: Event) -> None:
    """The words have been received, and their receiver makes room for others."""
    if (early := part.sent[units] != event.call).any():
        raise MessageError(f"{event} clears {part.title_of(units[early])}, which has not come.")
    clocks.check_readers(part, units, event, HEARD, WORD)
    clocks.remember_read(part, units, event)
    part.full[units] = False
    part.received[units] = part.writers[units] = len(clocks.events)
    clocks.events.append(event)


def _out_of_turn(clocks: Clocks, part: Messages, unit: int, event: Event) -> str:
    """What is wrong with a word that was not sent two calls ago for the last time."""
    element, writer = part.title_of(np.array([unit])), clocks.events[part.writers[unit]]
    last = "nobody has sent it before" if writer is None else f"before, {writer} has sent it"
    if event.call % 2 != part.parity:
        return (
            f"{event} sends {element}; {last}. The lowest bit of a word tells a call from the one two calls before it, "
            "so the copies take turns: ask `shmem.messages` for the copy of this call."
        )
    if writer is not None and writer.call == event.call:
        return f"{event} sends {element} a second time in one call: {last}."
    if writer is not None and writer.call > event.call:
        return f"{event} sends {element}, which is taken: in a later call, {writer} has sent it."
    return (
        f"{event} sends {element}, which nobody has sent in call {event.call - 2}; {last}. Each word is sent once in "
        "each call, because its lowest bit tells a call from the one two calls before it only."
    )


def look(clocks: Clocks, part: Messages, units: np.ndarray, event: Event) -> tuple[np.ndarray, np.ndarray]:
    """Checks that none of the words has been sent in a later call, and remembers that a program has looked at them.

    Returns: (those that have not been sent in this call, for each word the index of the event that had sent it).
    """
    calls = part.sent[units]
    if (over := calls > event.call).any():
        unit = units[over][:1]
        raise DataRaceError(
            f"Data race on {part.title_of(unit)}: {clocks.events[part.writers[unit[0]]]} has overwritten what {event} "
            "was to receive, and nothing made it wait for that. Here the receiver would wait for ever."
        )
    if part.cleared and (gone := (calls == event.call) & ~part.full[units]).any():
        unit = units[gone][:1]
        raise MessageError(
            f"{event} waits for {part.title_of(unit)}, which has been received: {clocks.events[part.writers[unit[0]]]} "
            "has cleared it."
        )
    if (there := units[calls == event.call]).size:
        clocks.remember_read(part, there, event)
    return units[calls < event.call], part.writers[units]


def receive(clocks: Clocks, part: Messages, units: np.ndarray, writers: np.ndarray, event: Event) -> list[Event]:
    """Checks the words that a program has received, and remembers it.

    Args:
      writers: for each word the index of the event that had sent it when the program looked.

    Returns: the events that had sent them.
    """
    by = {index: clocks.events[index] for index in each(writers)}
    others = [index for index, send in by.items() if send is None or send.call != event.call]
    if others:
        wrong = np.isin(writers, others)
        writer = by[int(writers[np.argmax(wrong)])]
        sent = f"{writer} has sent it" if writer is not None else "nobody has ever sent it"
        raise MessageError(
            f"{event} takes {part.title_of(units[wrong][:1])} for a message of this call, but {sent}."
            f"{_others(int(wrong.sum()))}"
        )
    sends = [send for send in by.values() if send is not None]
    for send in sends:
        send.use()
    clocks.hear(event.thread, sends)
    if not part.cleared:
        part.received[units] = writers
    elif (left := ~part.full[units] & (part.words[units] != 0)).any():
        raise MessageError(f"{event} has received {part.title_of(units[left])}, and writes there, but not 0.")
    return sends


def senders(clocks: Clocks, writers: np.ndarray) -> np.ndarray:
    """The rank that has sent each word, by the index of the event."""
    if len(only := each(writers)) == 1:
        event = clocks.events[only[0]]
        return np.full(writers.shape, -1 if event is None else event.rank)
    indices, places = np.unique(writers, return_inverse=True)
    events = [clocks.events[index] for index in indices.tolist()]
    return np.array([-1 if event is None else event.rank for event in events])[places]


def check_complete(part: Messages, call: int, clocks: Clocks) -> None:
    """Checks that all words have been sent in a call, which all ranks have ended; or that all have been cleared."""
    if part.cleared and (left := ~part.full & (part.sent == call) & (part.words != 0)).any():
        units = np.flatnonzero(left)
        raise MessageError(f"{clocks.events[part.writers[units[0]]]} has written {part.title_of(units)}, but not 0.")
    if part.cleared and (left := part.full & (part.sent == call)).any():
        units = np.flatnonzero(left)
        raise MessageError(
            f"Nobody has received {part.title_of(units)}, which {clocks.events[part.writers[units[0]]]} has sent: it "
            "is not cleared, so a later call would take it for its own."
        )
    if part.cleared or call % 2 != part.parity or not (unsent := part.sent < call).any():
        return
    units = np.flatnonzero(unsent)
    writer = clocks.events[part.writers[units[0]]]
    last = "nobody has ever sent the first of them" if writer is None else f"{writer} was the last to send the first"
    raise MessageError(
        f"Nobody has sent {part.title_of(units)} in call {call}; {last}. Each word is sent once in each call: its "
        "lowest bit tells a call from the one two calls before it only, so a later call would take a word that is left "
        f"out for its own.{_to_itself(part, unsent, clocks.world)}"
    )


def _to_itself(part: Messages, unsent: np.ndarray, world: int) -> str:
    """What to say where the words that were not sent are exactly those that the rank would have sent to itself."""
    if world == 1 or unsent.size % world:
        return ""
    for shape in (part.shape, (world, unsent.size // world)):
        for axis, size in enumerate(shape):
            own = np.zeros(shape, bool)
            np.moveaxis(own, axis, 0)[part.rank : part.rank + 1] = True
            if size == world and (unsent == own.ravel()).all():
                return (
                    f" What is missing is exactly what rank {part.rank} would send to itself, of the parts of "
                    f"{world} ranks: send it, also where the rank takes its own value from elsewhere."
                )
    return ""


def _bit(call: int) -> int:
    return (call + 1) // 2 % 2


def _others(count: int) -> str:
    return f" The same goes for {count - 1} more." if count > 1 else ""
