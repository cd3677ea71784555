"""The door of a process for the others on its host: a socket at which they fetch descriptors, and a sign of life.

The sign of life is a second socket, whose name is in no file system, so that no other program can remove it: the kernel
closes it when the process ends, however it does.
"""

import atexit
import contextlib
import errno
import logging
import os
import pathlib
import secrets
import socket
import tempfile
import threading
import time

from jax import monitoring
from jax._src import distributed

from jaxtaxfree.heap.errors import HeapError

_log = logging.getLogger("jaxtaxfree")
ADDRESSES = "jaxtaxfree/doors"  # where JAX's key-value store has the address of each process's door
_LONGEST_FOLDER = 75  # bytes; a socket's path has at most 107
_lock = threading.Lock()
_door: "Door | None" = None
_tried: object = None  # the store in which `announce_early` has put its address


class Door:
    """A Unix socket in a folder of its own, which a process opens early and once.

    Attributes:
      host: the name of this host.
      address: by which other processes find it: host, network namespace, name of the sign of life, path.
    """

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()
        self.host = host()
        self._told: object = None  # the store that has the address
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pid = os.getpid()
        long = len(os.fsencode(tempfile.gettempdir())) > _LONGEST_FOLDER
        self.folder = tempfile.mkdtemp(prefix="jaxtaxfree-", dir="/tmp" if long else None)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._life = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._life.close)  # a child that lives on is no sign of life
        try:
            path, life = os.path.join(self.folder, "handles"), f"jaxtaxfree-{secrets.token_hex(8)}"
            self._listener.bind(path)
            self._listener.listen()
            self._life.bind(f"\0{life}")
            self._life.listen()
            self.address = f"{self.host} {_namespace()} {life} {path}"
        except BaseException:
            self.close()
            raise

    def announce(self, process: int) -> None:
        """Tells the other processes of `jax.distributed`, once they can meet, where the door of this one is."""
        store = distributed.global_state.client
        if store is not None and store is not self._told:
            try:
                store.key_value_set(f"{ADDRESSES}/{process}", self.address, allow_overwrite=True)
            except Exception as error:  # of a service that is gone
                raise HeapError(f"Process {process} cannot tell the others where they find it: {error}") from error
            self._told = store

    def offer(self, name: str, descriptor: int) -> None:
        """Lets the other processes fetch a file descriptor. It is closed when it is withdrawn."""
        with self._lock:
            self._descriptors[name] = descriptor
            if self._thread is None:  # until then the kernel keeps who comes waiting
                self._thread = threading.Thread(target=self._serve, name="jaxtaxfree-handles", daemon=True)
                self._thread.start()

    def withdraw(self, prefix: str) -> None:
        """Ends the offers of names that begin with `prefix`."""
        with self._lock:
            for name in [name for name in self._descriptors if name.startswith(prefix)]:
                os.close(self._descriptors.pop(name))

    def close(self) -> None:
        """Leaves nothing behind on this host."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            return  # of a fork, whose end is not that of the process that listens
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that serves
        self._listener.close()
        self._life.close()
        pathlib.Path(self.folder, "handles").unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.rmdir(self.folder)

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the end, or too many open files for a while
                time.sleep(0.0 if self._closed else 0.1)
                continue
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(10.0)
                name = connection.makefile().readline().strip()
                with self._lock:  # so that it is not closed meanwhile
                    descriptor = self._descriptors.get(name)
                    socket.send_fds(connection, [b"\0"], [] if descriptor is None else [descriptor])


def announce() -> Door:
    """This process's door; the other processes of the job find it from now on."""
    global _door
    with _lock:
        if _door is None:
            _door = Door()
        _door.announce(distributed.global_state.process_id)
        return _door


def announce_early(*_: object, **__: object) -> None:
    """Does so as soon as there are other processes, so that they see it if this one ends before it uses the heap."""
    global _tried
    state = distributed.global_state
    if state.client is None or state.client is _tried or state.num_processes == 1:
        return
    _tried = state.client
    try:
        announce()
    except Exception as error:  # the program at hand may not need it
        _log.debug("The other processes cannot see whether this one lives: %s", error)


def has_ended(address: str) -> bool:
    """Whether the process of this address has ended; False where that cannot be known."""
    where, namespace, life, _ = address.split(" ", 3)
    if where != host() or namespace != _namespace():
        return False  # the name says nothing here
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)  # nobody takes what comes there: it lives, too, if no more can wait
        return connection.connect_ex(f"\0{life}") == errno.ECONNREFUSED


def fetch(address: str, name: str, timeout: float) -> int | None:
    """The file descriptor that is offered at this address under a name; None if there is none.

    Raises:
      OSError: if nobody answers within so many seconds, or this process has too many open files.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        end = time.monotonic() + timeout
        connection.settimeout(timeout)
        while True:
            try:
                connection.connect(path_of(address))
                break
            except BlockingIOError:  # too many wait at this door already; the kernel lets none of them wait for that
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
        connection.sendall(name.encode() + b"\n")
        _, descriptors, flags, _ = socket.recv_fds(connection, 1, 1)
        if flags & socket.MSG_CTRUNC:  # there was one, and no place for it here
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return descriptors[0] if descriptors else None


def path_of(address: str) -> str:
    """The path of the socket of an address."""
    return address.split(" ", 3)[3]


def host() -> str:
    """The name of this host, another one after each start of it."""
    return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    """Where names of sockets hold, as containers of one host may have spaces of their own."""
    return str(os.stat("/proc/self/ns/net").st_ino)


announce_early()
# A program that calls jax.distributed.initialize() after its imports traces something soon after.
monitoring.register_event_duration_secs_listener(announce_early)
