"""How the processes of a job meet: names and numbers through JAX's key-value store, memory handles over Unix sockets.

A file descriptor cannot travel through a key-value store, so each process listens at a socket in a folder of its own
and hands out the descriptors of the memory that it shares. `Alone` takes the place of all this in a job of one
process.
"""

import contextlib
import os
import pathlib
import socket
import tempfile
import threading
from collections.abc import Sequence

from jax._src import distributed

from jaxtaxfree.heap.errors import HeapError, HeapUnavailableError

_ADDRESS = "its address"  # under which a process tells its host and the path of its socket


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
        """Tells all processes something under a name, once."""
        self._told[name] = said

    def told(self, name: str, members: Sequence[int]) -> list[str]:
        """What each of the members tells under a name; waits until it does."""
        del members
        return [self._told[name]]

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
      generation: how many heaps this process had before, so that a new one does not read an old one's entries.
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
        self._folder = tempfile.mkdtemp(prefix="jaxtaxfree-")
        path = os.path.join(self._folder, "handles")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()
        self.tell(_ADDRESS, f"{_host()} {path}")
        threading.Thread(target=self._serve, name="jaxtaxfree-handles", daemon=True).start()

    def next_window(self, name: str, size: int, members: Sequence[int]) -> int:
        if self.process == min(members):
            end = self._store.key_value_increment(f"{self._prefix}/windows", size)
            self._set(f"window/{name}", str(end - size))
        return int(self._get(f"window/{name}", min(members), name))

    def offer(self, meeting: str, position: int, descriptor: int) -> None:
        self._descriptors[f"{meeting}/{position}"] = descriptor

    def withdraw(self, meeting: str) -> None:
        for name in [name for name in self._descriptors if name.startswith(f"{meeting}/")]:
            os.close(self._descriptors.pop(name))

    def fetch(self, meeting: str, position: int, owner: int) -> int:
        name = f"{meeting}/{position}"
        _, _, path = self.told(_ADDRESS, [owner])[0].partition(" ")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(self._timeout)
            try:
                connection.connect(path)
                connection.sendall(name.encode() + b"\n")
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            except OSError as error:
                raise HeapUnavailableError(
                    f"Process {self.process} cannot reach process {owner} at {path} ({error}): processes that share "
                    "memory must run on one host and see the same temporary folder (TMPDIR)."
                ) from error
        if not descriptors:
            raise HeapError(f"Process {owner} does not share {name!r} with process {self.process}.")
        return descriptors[0]

    def tell(self, name: str, said: str) -> None:
        self._set(f"told/{name}/{self.process}", said)

    def told(self, name: str, members: Sequence[int]) -> list[str]:
        return [self._get(f"told/{name}/{member}", member, name) for member in members]

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
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that serves
        self._listener.close()
        with contextlib.suppress(Exception):  # of a job that has ended
            self._store.key_value_delete(f"{self._prefix}/told/{_ADDRESS}/{self.process}")
        pathlib.Path(self._folder, "handles").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)

    def _set(self, key: str, value: str) -> None:
        self._store.key_value_set(f"{self._prefix}/{key}", value)

    def _get(self, key: str, owner: int, what: str) -> str:
        try:
            return self._store.blocking_key_value_get(f"{self._prefix}/{key}", round(self._timeout * 1000))
        except Exception as error:
            raise HeapError(
                f"Process {self.process} waited {self._timeout:g} s for process {owner} to set up {what}. Every "
                f"process of the mesh must run the same program; is process {owner} alive? "
                f"(JAXTAXFREE_MEETING_TIMEOUT sets the time.) {error}"
            ) from error

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                name = connection.makefile().readline().strip()
                descriptor = self._descriptors.get(name)
                socket.send_fds(connection, [b"\0"], [] if descriptor is None else [descriptor])


def _host() -> str:
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _list(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
