"""How the processes of a job meet: names and numbers through JAX's key-value store, memory handles over Unix sockets.

A file descriptor cannot travel through a key-value store, so each process listens at a socket in a folder of its own
and hands out the descriptors of the memory that it shares. `Alone` takes the place of all this in a job of one
process.
"""

import atexit
import contextlib
import errno
import os
import pathlib
import socket
import tempfile
import threading
import time
from collections.abc import Sequence

from jax._src import distributed

from jaxtaxfree.heap.errors import HeapError, HeapUnavailableError

_ADDRESS = "its address"  # under which a process tells its host and the path of its socket
_LONGEST_FOLDER = 75  # bytes; a socket's path has at most 107
_LOOK_INTERVAL = 1.0  # seconds, after which a wait looks whether Python has something else to do, such as a Ctrl-C


class Alone:
    """The exchange of a job of one process: nobody to meet."""

    process = 0

    def __init__(self) -> None:
        self._windows = 0
        self._told: dict[str, str] = {}
        self._lock = threading.Lock()

    def check_host(self, members: Sequence[int]) -> None:
        """Raises unless all members run on this host."""

    def next_window(self, name: str, size: int, members: Sequence[int]) -> int:
        """The start of a window of `size` units that no region has used yet, the same for all members."""
        del name, members
        with self._lock:
            self._windows += size
            return self._windows - size

    def offer(self, meeting: str, position: int, descriptor: int) -> None:
        """Lets the members of a meeting fetch a file descriptor. It is closed when it is withdrawn."""
        raise AssertionError("a process that is alone shares nothing")

    def withdraw(self, meeting: str) -> None:
        """Ends the offers of a meeting."""

    def fetch(self, meeting: str, position: int, owner: int) -> int:
        """The file descriptor that process `owner` offers for a position."""
        raise AssertionError("a process that is alone imports nothing")

    def tell(self, name: str, said: str) -> None:
        """Tells all processes something under a name; what is told last counts."""
        self._told[name] = said

    def told(self, name: str, members: Sequence[int]) -> list[str]:
        """What each of the members tells under a name; waits until it does."""
        del members
        return [self._told[name]]

    def heard(self, name: str, members: Sequence[int]) -> list[str]:
        """What those of the members tell under a name that have told something so far."""
        del members
        return [self._told[name]] if name in self._told else []

    def meet(self, name: str, members: Sequence[int], error: str | None = None) -> None:
        """Waits until all members have come here; raises what any of them reports."""
        self.tell(name, error or "")
        if any(errors := self.told(name, members)):
            raise HeapError(next(filter(None, errors)))

    def close(self) -> None:
        """Stops handing out descriptors."""


class Processes(Alone):
    """The exchange of the processes of `jax.distributed`.

    Args:
      process: index of this process.
      generation: how often the processes have closed their heaps, so that a new one does not read an old one's entries.
      timeout: the longest wait for another process, in seconds.
    """

    def __init__(self, process: int, generation: int, timeout: float):
        super().__init__()
        store = distributed.global_state.client
        if store is None:
            raise HeapUnavailableError(
                "The processes of this job cannot meet: call jax.distributed.initialize() first."
            )
        self.process = process
        self._store = store
        self._prefix = f"jaxtaxfree/{generation}"
        self._timeout = timeout
        self._descriptors: dict[str, int] = {}
        self._closed = False
        self._pid = os.getpid()
        long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER
        self._folder = tempfile.mkdtemp(prefix="jaxtaxfree-", dir="/tmp" if long else None)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        atexit.register(self._stop)
        try:
            path = os.path.join(self._folder, "handles")
            self._listener.bind(path)
            self._listener.listen()
            self.tell(_ADDRESS, f"{_host()} {path}")
            threading.Thread(target=self._serve, name="jaxtaxfree-handles", daemon=True).start()
        except BaseException:
            self._stop()
            raise

    def next_window(self, name: str, size: int, members: Sequence[int]) -> int:
        if self.process == min(members):
            try:
                end = self._store.key_value_increment(f"{self._prefix}/windows/{_host()}", size)
            except Exception as error:  # of a service that is gone
                raise HeapError(f"Process {self.process} finds no window for {name}: {error}") from error
            self.tell(f"{name}/window", str(end - size))
        (said,) = self.told(f"{name}/window", [min(members)])
        if not said.isdecimal():  # but why there will be none
            raise HeapError(said)
        return int(said)

    def offer(self, meeting: str, position: int, descriptor: int) -> None:
        with self._lock:
            self._descriptors[f"{meeting}/{position}"] = descriptor

    def withdraw(self, meeting: str) -> None:
        with self._lock:
            for name in [name for name in self._descriptors if name.startswith(f"{meeting}/")]:
                os.close(self._descriptors.pop(name))

    def fetch(self, meeting: str, position: int, owner: int) -> int:
        name = f"{meeting}/{position}"
        _, _, path = self.told(_ADDRESS, [owner])[0].partition(" ")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._timeout)
                connection.connect(path)
                connection.sendall(name.encode() + b"\n")
                _, descriptors, flags, _ = socket.recv_fds(connection, 1, 1)
                if flags & socket.MSG_CTRUNC:  # there was one, and no place for it here
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise HeapError(
                    f"Process {self.process} cannot open what process {owner} shares ({error}): lift its limit "
                    "(ulimit -n)."
                ) from error
            raise HeapUnavailableError(
                f"Process {self.process} cannot reach process {owner} at {path} ({error}): processes that share "
                "memory must run on one host and see the same temporary folder (TMPDIR)."
            ) from error
        if not descriptors:
            raise HeapError(f"Process {owner} does not share {name!r} with process {self.process}.")
        return descriptors[0]

    def tell(self, name: str, said: str) -> None:
        try:
            self._store.key_value_set(f"{self._prefix}/told/{name}/{self.process}", said, allow_overwrite=True)
        except Exception as error:  # of a service that is gone
            raise HeapError(f"Process {self.process} cannot tell the others {name!r}: {error}") from error

    def told(self, name: str, members: Sequence[int]) -> list[str]:
        return [self._get(f"told/{name}/{member}", member, name) for member in members]

    def heard(self, name: str, members: Sequence[int]) -> list[str]:
        heard = []
        for member in members:
            with contextlib.suppress(Exception):  # of a key that is not there
                heard.append(self._store.key_value_try_get(f"{self._prefix}/told/{name}/{member}"))
        return heard

    def check_host(self, members: Sequence[int]) -> None:
        hosts = {member: told.partition(" ")[0] for member, told in zip(members, self.told(_ADDRESS, members))}
        elsewhere = sorted(member for member, host in hosts.items() if host != _host())
        if elsewhere:
            raise HeapUnavailableError(
                f"The mesh spans hosts: process {self.process} is on another host than "
                f"{_list('process', elsewhere)}. Put only devices of one host on the axis of a fused operation, or "
                "use implementation='xla'."
            )

    def close(self) -> None:
        with contextlib.suppress(Exception):  # of a job that has ended
            self._store.key_value_delete(f"{self._prefix}/told/{_ADDRESS}/{self.process}")
        self._stop()

    def _stop(self) -> None:
        """Leaves nothing behind on this host."""
        atexit.unregister(self._stop)
        if os.getpid() != self._pid:
            return  # of a fork, whose end is not that of the process that listens
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that serves
        self._listener.close()
        pathlib.Path(self._folder, "handles").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)

    def _get(self, key: str, owner: int, what: str) -> str:
        end = time.monotonic() + self._timeout
        while True:
            left = min(end - time.monotonic(), _LOOK_INTERVAL)
            try:
                return self._store.blocking_key_value_get(f"{self._prefix}/{key}", max(1, round(left * 1000)))
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise HeapError(
                        f"Process {self.process} cannot ask for what process {owner} says of {what}, because JAX's "
                        f"coordination service does not answer. {error}"
                    ) from error
                if time.monotonic() < end:
                    continue
                missed = HeapError(
                    f"Process {self.process} waited {self._timeout:g} s for process {owner} to set up {what}. Every "
                    f"process of the mesh must run the same program; is process {owner} alive? "
                    f"(JAXTAXFREE_MEETING_TIMEOUT sets the time.) {error}"
                )
                missed.waited_in_vain = True
                raise missed from error

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the end, or too many open files for a while
                time.sleep(0.0 if self._closed else 0.1)
                continue
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(self._timeout)
                name = connection.makefile().readline().strip()
                with self._lock:  # so that it is not closed meanwhile
                    descriptor = self._descriptors.get(name)
                    socket.send_fds(connection, [b"\0"], [] if descriptor is None else [descriptor])


def _host() -> str:
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _list(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
