"""How the processes of a job meet, through JAX's key-value store; memory handles pass through their doors.

A meeting has steps, and each step ends by one verdict for all: the member with the lowest number gives it when it has
heard all, or whoever finds first that the step fails, because of an error of its own, a member that has ended, or one
that does not come. A verdict is written once, so all members come to the same end. `Alone` takes the place of all this
in a job of one process.
"""

import contextlib
import errno
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax._src import distributed

from jaxtaxfree.heap import door, errors
from jaxtaxfree.heap.door import Door
from jaxtaxfree.heap.errors import HeapError, HeapUnavailableError

_log = logging.getLogger("jaxtaxfree")
_WAITS = "waits"  # under which a process tells what it waits for, once that takes long
_POLL = 1.0  # seconds, after which a wait looks whether there is something else to do, such as a Ctrl-C
_LOOK = 3.0  # seconds between two looks whether the others live
_PATIENCE = 10.0  # seconds, after which who waits says so
_MOST_NAMES = 8  # in a list of processes
_HERE, _FAILED = "here ", "failed"  # what an entry begins with by which a process comes to the end of a step

type Decide = Callable[[Mapping[int, str]], str]


class Late(Exception):
    """The others have waited for this process in vain; it meets them at their next attempt."""


class Meeting:
    """One attempt of some processes to do something together; here of one process with itself."""

    def __init__(self, process: int, members: Sequence[int]):
        self._process = process
        self.members = sorted(members)

    def settle(self, step: str, said: str = "", decide: Decide | None = None) -> str:
        """Ends a step, when all members have come to its end.

        Args:
          step: its name.
          said: what this process has to say.
          decide: what follows from what each of the members says; called in one of them.

        Returns:
          What was decided.

        Raises:
          Late: if the others have given up waiting for this process.
          HeapError: if anything fails in any member, or one does not come. All raise the same.
        """
        del step
        return decide({self._process: said}) if decide else ""

    def fail(self, error: BaseException, steps: Sequence[str]) -> None:
        """Makes these steps fail in all members, if they have not ended."""

    def pass_over(self, step: str) -> None:
        """Sends those who come later than this to their next attempt."""

    def offer(self, position: int, descriptor: int) -> None:
        """Lets the members fetch a file descriptor until the meeting ends."""
        raise AssertionError("a process that is alone shares nothing")

    def fetch(self, position: int, owner: int) -> int:
        """The file descriptor that process `owner` offers for a position."""
        raise AssertionError("a process that is alone imports nothing")

    def hand_over(self, position: int, handle: bytes) -> None:
        """Tells the members a handle that holds on other hosts, too."""
        raise AssertionError("a process that is alone shares nothing")

    def handed_over(self, position: int, owner: int) -> bytes:
        """The handle that process `owner` has told for a position."""
        raise AssertionError("a process that is alone imports nothing")

    def end(self) -> None:
        """Closes what was offered."""


class Alone:
    """The exchange of a job of one process: nobody to meet."""

    process = 0
    host = "this"

    def __init__(self) -> None:
        self._windows = 0
        self._attempts: dict[str, int] = {}
        self._lock = threading.Lock()

    def meeting(self, name: str, what: str, members: Sequence[int]) -> Meeting:
        """The next meeting of this name, where these processes set up `what`.

        Processes that have called this equally often meet at the same.
        """
        del name, what
        return Meeting(self.process, members)

    def next_window(self, size: int, hosts: Mapping[int, str], most: int) -> int | None:
        """The start of a window of `size` units that no region of these processes has yet; None if all are used up.

        Args:
          hosts: that of each process.
          most: units that there are.
        """
        del hosts
        return self._window(size, 0, most)

    def tell(self, name: str, said: str) -> None:
        """Tells the other processes something under a name; what is told last counts."""

    def heard(self, name: str, members: Sequence[int]) -> list[str]:
        """What those of the other members tell under a name that have told something so far."""
        del name, members
        return []

    def meet(self, name: str, members: Sequence[int]) -> None:
        """Waits until all members have come here; raises what any of them has told under this name instead.

        Unlike a `Meeting`, it allows each process to have members of its own.
        """

    def close(self) -> None:
        """Stops handing out descriptors."""

    def _window(self, size: int, first: int, last: int) -> int | None:
        with self._lock:
            self._windows += size
            return first + self._windows - size if first + self._windows <= last else None


class Processes(Alone):
    """The exchange of the processes of `jax.distributed`.

    Args:
      process: index of this process.
      generation: how often the processes have closed their heaps, so that a new one does not read an old one's entries.
      timeout: the longest wait for another process, in seconds.
      entrance: the door of this process.
    """

    def __init__(self, process: int, generation: int, timeout: float, entrance: Door):
        super().__init__()
        self.process = process
        self.host = entrance.host
        self.timeout = timeout
        self.door = entrance
        self._prefix = f"jaxtaxfree/{generation}"
        self._addresses: dict[int, str] = {}
        entrance.announce(process)

    def meeting(self, name: str, what: str, members: Sequence[int]) -> Meeting:
        if list(members) == [self.process]:  # it needs no store, which may have ended
            return super().meeting(name, what, members)
        with self._lock:
            attempt = self._attempts[name] = self._attempts.get(name, 0) + 1
        return _Meeting(self, f"{name}/{attempt}", what, members)

    def next_window(self, size: int, hosts: Mapping[int, str], most: int) -> int | None:
        # Each kind of mesh has a part of the range: so meshes of one process ask nobody, and those inside of hosts use
        # up nothing of each other's.
        if list(hosts) == [self.process]:
            return self._window(size, most // 4 * 3, most)
        inside = len(set(hosts.values())) == 1
        first, last = (0, most // 2) if inside else (most // 2, most // 4 * 3)
        key = f"windows/{self.host}" if inside else "windows"
        start = first + self._ask("key_value_increment", self.name(key), size) - size
        return start if start + size <= last else None

    def tell(self, name: str, said: str) -> None:
        if distributed.global_state.client is not None:  # else nobody is there to hear it
            self.put(f"told/{name}/{self.process}", said)

    def heard(self, name: str, members: Sequence[int]) -> list[str]:
        found = (self.get(f"told/{name}/{member}") for member in members if member != self.process)
        return [said for said in found if said is not None]

    def meet(self, name: str, members: Sequence[int]) -> None:
        self.tell(name, "")
        others = [member for member in members if member != self.process]
        patience = _Patience(self, name)
        for member in others:
            while (failed := patience.poll(f"told/{name}/{member}")) is None:
                if failure := patience.failure([member], lambda member=member: [member]):
                    patience.end(failed=True)
                    raise failure
            if failed:
                raise HeapError(failed)
        patience.end()

    def close(self) -> None:
        self.door.withdraw(f"{self._prefix}/")

    def addresses(self, members: Sequence[int]) -> dict[int, str]:
        """Of the doors of those of these processes that have told theirs. They are constants, so asked for once."""
        if not self._addresses.keys() >= set(members):
            self._addresses.update(_by_process(self._ask("key_value_dir_get", door.ADDRESSES)))
        return {member: self._addresses[member] for member in members if member in self._addresses}

    def put(self, key: str, said: str, overwrite: bool = True) -> bool:
        """Writes an entry of the store; False if it is there and may not be overwritten."""
        try:
            self._ask("key_value_set", self.name(key), said, allow_overwrite=overwrite)
        except HeapError as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def get(self, key: str, seconds: float = 0.0) -> str | None:
        """An entry of the store; None if it is not there by then."""
        try:
            if seconds:
                return self._ask("blocking_key_value_get", self.name(key), max(1, round(seconds * 1000)))
            return self._ask("key_value_try_get", self.name(key))
        except HeapError as error:
            if any(code in str(error) for code in ("DEADLINE_EXCEEDED", "NOT_FOUND")):
                return None
            raise

    def folder(self, key: str) -> dict[int, str]:
        """The entries below a key, one of each process, by one question."""
        return _by_process(self._ask("key_value_dir_get", self.name(key)))

    def delete(self, key: str) -> None:
        """Removes an entry of the store."""
        self._ask("key_value_delete", self.name(key))

    def name(self, key: str) -> str:
        """What an entry or an offer of this generation is called."""
        return f"{self._prefix}/{key}"

    @property
    def _store(self) -> Any:
        store = distributed.global_state.client
        if store is None:
            raise HeapUnavailableError(
                "The processes of this job cannot meet: call jax.distributed.initialize() first, and "
                "jax.distributed.shutdown() last. Meshes of this process's own devices need neither."
            )
        return store

    def _ask(self, call: str, key: str, *args: Any, **named: Any) -> Any:
        store = self._store
        try:
            return getattr(store, call)(key, *args, **named)
        except Exception as error:  # among them that of a key that is not there
            raise HeapError(
                f"Process {self.process} gets no answer of JAX's coordination service to {call} {key}: {error}"
            ) from error


class _Patience:
    """A wait for other processes: who lives, who is missing, and how long it may last."""

    def __init__(self, exchange: Processes, what: str):
        self._exchange, self._what = exchange, what
        self._start = time.monotonic()
        self._end = self._start + exchange.timeout
        self._next_look = self._start + _POLL
        self._speaks_at: float | None = self._start + min(_PATIENCE, exchange.timeout / 2)

    @property
    def left(self) -> float:
        """Seconds until this gives up; a little longer than that, so that it asks once more."""
        return max(0.001, self._end - time.monotonic())

    def poll(self, key: str) -> str | None:
        """An entry of the store, for which this waits a little; None if it has not come."""
        return self._exchange.get(key, min(self.left, _POLL))

    def failure(self, needed: Sequence[int], missing: Callable[[], list[int]]) -> HeapError | None:
        """Why it is no use to wait any longer, if so.

        Args:
          needed: processes that have to live.
          missing: finds who has not come.
        """
        now, me = time.monotonic(), self._exchange.process
        if now >= self._next_look:
            self._next_look = now + _LOOK
            found = self._exchange.addresses([process for process in needed if process != me])
            if ended := [process for process, address in found.items() if door.has_ended(address)]:
                return HeapError(
                    f"{processes(ended).capitalize()} ended before all processes of the mesh had set up {self._what}. "
                    "Start the program again in all of them."
                )
        if now >= self._end:
            absent = missing()
            error = HeapError(
                f"Process {me} waited {self._exchange.timeout:g} s for {processes(absent)} to set up {self._what}. "
                f"{self._elsewhere(absent)} Every process of the mesh must run the same program. "
                "(JAXTAXFREE_MEETING_TIMEOUT sets the time.)"
            )
            error.missing = tuple(absent)
            return error
        if self._speaks_at is not None and now >= self._speaks_at:
            self._speaks_at = None
            self._exchange.put(f"{_WAITS}/{me}", f"waits for others to set up {self._what}")
            absent = missing()
            text = "Process %d has waited %.0f s (of %g: JAXTAXFREE_MEETING_TIMEOUT) for %s to set up %s. %s"
            who, state = processes(absent), self._elsewhere(absent)
            _log.warning(text, me, now - self._start, self._exchange.timeout, who, self._what, state)
        return None

    def end(self, failed: bool = False) -> None:
        """Waits no more, and says so if it has said that it waits."""
        if self._speaks_at is None:
            key = f"{_WAITS}/{self._exchange.process}"
            if failed:  # for those who look a little later
                self._exchange.put(key, f"waited for others to set up {self._what}")
            else:
                self._exchange.delete(key)

    def _elsewhere(self, absent: Sequence[int]) -> str:
        """What those do who have not come here, as far as it is known."""
        heard = self._exchange.addresses(absent)
        silent = [member for member in absent if member not in heard]
        does = {member: self._exchange.get(f"{_WAITS}/{member}") for member in absent[:_MOST_NAMES]}
        known = [f"Process {member} {what}." for member, what in does.items() if what]
        if silent:
            known.append(f"Nothing was heard of {processes(silent)} so far.")
        return " ".join(known) or f"Nothing else is known of {processes(absent)}."


class _Meeting(Meeting):
    """A meeting of several processes."""

    def __init__(self, exchange: Processes, name: str, what: str, members: Sequence[int]):
        super().__init__(exchange.process, members)
        self._exchange = exchange
        self._key = name
        self._patience = _Patience(exchange, what)
        self._began = False  # a step has ended well

    def settle(self, step: str, said: str = "", decide: Decide | None = None) -> str:
        self._exchange.put(self._seat(step, self._process), _HERE + said)
        if self._process == self.members[0]:
            self._lead(step, decide)
        while (verdict := self._patience.poll(self._verdict(step))) is None:
            if failure := self._failure(step):
                self._condemn(step, failure)
        found = json.loads(verdict)
        self._patience.end(failed="decided" not in found)
        if "decided" in found:
            self._began = True
            return found["decided"]
        if self._process in found["missing"] and not self._began:
            raise Late
        raise getattr(errors, found["kind"])(found["why"])

    def fail(self, error: BaseException, steps: Sequence[str]) -> None:
        why = f"Process {self._process}: {str(error) or type(error).__name__}"
        kind = type(error) if isinstance(error, HeapError) else HeapError
        with contextlib.suppress(HeapError):  # then the others find out by waiting
            for step in steps:
                self._condemn(step, kind(why))
                self._exchange.put(self._seat(step, self._process), _FAILED)  # for who waits for it there

    def pass_over(self, step: str) -> None:
        verdict = json.dumps({"missing": self.members})
        self._exchange.put(self._verdict(step), verdict)

    def offer(self, position: int, descriptor: int) -> None:
        self._exchange.door.offer(self._exchange.name(f"{self._key}/{position}"), descriptor)

    def fetch(self, position: int, owner: int) -> int:
        process, name = self._process, self._exchange.name(f"{self._key}/{position}")
        address = self._exchange.addresses([owner]).get(owner)
        if address is None:
            raise HeapUnavailableError(f"Process {process} does not know where process {owner} shares its memory.")
        try:
            descriptor = door.fetch(address, name, self._patience.left)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise HeapError(
                    f"Process {process} cannot open what process {owner} shares ({error}): lift its limit (ulimit -n)."
                ) from error
            if door.has_ended(address):
                raise HeapError(f"Process {owner} ended before it had shared its memory.") from error
            raise HeapUnavailableError(
                f"Process {process} cannot reach process {owner} at {door.path_of(address)} ({error}): processes that "
                "share memory must run on one host and see the same temporary folder (TMPDIR). Where they run in "
                "containers, mount one folder of the host into all of them, at the same path, and set TMPDIR to it."
            ) from error
        if descriptor is None:
            raise HeapError(f"Process {owner} does not share {name!r} with process {process}.")
        return descriptor

    def hand_over(self, position: int, handle: bytes) -> None:
        self._exchange.put(f"{self._key}/handles/{position}", handle.hex())

    def handed_over(self, position: int, owner: int) -> bytes:
        told = self._exchange.get(f"{self._key}/handles/{position}", self._patience.left)
        if told is None:
            raise HeapError(f"Process {owner} does not share its memory with process {self._process}.")
        return bytes.fromhex(told)

    def end(self) -> None:
        self._exchange.door.withdraw(self._exchange.name(f"{self._key}/"))

    def _lead(self, step: str, decide: Decide | None) -> None:
        """Hears what all members say, and gives the verdict, unless there is one."""
        heard = self._seats(step)
        while absent := [member for member in self.members if member not in heard]:
            if self._patience.poll(self._seat(step, absent[0])) is None:
                if failure := self._failure(step):
                    return self._condemn(step, failure)
                if self._exchange.get(self._verdict(step)) is not None:
                    return None
            heard = self._seats(step)
        if _FAILED in heard.values():
            return None
        try:
            said = {member: heard[member].removeprefix(_HERE) for member in self.members}
            decided = decide(said) if decide else ""
        except HeapError as error:
            return self._condemn(step, error)
        self._exchange.put(self._verdict(step), json.dumps({"decided": decided}), overwrite=False)
        return None

    def _condemn(self, step: str, error: HeapError) -> None:
        verdict = {"kind": type(error).__name__, "why": str(error), "missing": error.missing}
        self._exchange.put(self._verdict(step), json.dumps(verdict), overwrite=False)

    def _failure(self, step: str) -> HeapError | None:
        def missing() -> list[int]:
            seats = self._seats(step)  # if all are there, the one that gives the verdict is missed
            return [member for member in self.members if member not in seats] or self.members[:1]

        return self._patience.failure(self.members, missing)

    def _seats(self, step: str) -> dict[int, str]:
        return self._exchange.folder(f"{self._key}/{step}/seats")

    def _seat(self, step: str, member: int) -> str:
        return f"{self._key}/{step}/seats/{member}"

    def _verdict(self, step: str) -> str:
        return f"{self._key}/{step}/verdict"


def _by_process(entries: Sequence[tuple[str, str]]) -> dict[int, str]:
    return {int(key.rpartition("/")[2]): said for key, said in entries}


def processes(numbers: Sequence[int]) -> str:
    """These processes in words, the first few by their numbers."""
    named = ", ".join(map(str, numbers[:_MOST_NAMES]))
    more = f" and {len(numbers) - _MOST_NAMES} more" if len(numbers) > _MOST_NAMES else ""
    return f"process{'es' if len(numbers) > 1 else ''} {named}{more}"
