"""Processes of one machine that meet: one of them listens at a socket in a folder of their user's, the others connect
to it, and when it ends another one listens. Does no I/O but that.

Who holds the lock of a file listens; the kernel takes it from who dies. Messages have a head of fixed size and maybe
some bytes, which are never unpickled.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import struct
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MAX_DATA_BYTES = 64 * 1024 * 1024  # of a message
_HEAD = struct.Struct(">cQQQdI")
_MAX_PATH_BYTES = 100  # of a socket; kernels allow a few more
_BACKLOG = 128
_SEND_S = 2  # a process that takes nothing in for so long is stopped


class Message(NamedTuple):
    """A message between two processes: its kind, a byte; numbers; seconds; bytes."""

    kind: bytes
    number: int = 0
    place: int = 0
    offset: int = 0
    seconds: float = 0.0
    data: bytes = b""


class Link:
    """A connection to another process. Several threads may send; one receives."""

    def __init__(self, connected: socket.socket, receive_s: float | None = None) -> None:
        """receive_s: the longest wait for a message; None: without end. A send never waits long."""
        self._socket = connected
        self._sending = threading.Lock()
        connected.settimeout(receive_s)
        if receive_s is None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))

    def send(self, message: Message) -> None:
        """Send a message. OSError if the other end is gone, or takes nothing in for long."""
        try:
            with self._sending:
                self._socket.sendall(_HEAD.pack(*message[:-1], len(message.data)))
                if message.data:
                    self._socket.sendall(message.data)
        except OSError:
            self.close()  # half a message may be on its way
            raise

    def receive(self) -> Message | None:
        """The next message; None at the end of the connection. OSError, such as TimeoutError after the time."""
        head = self._read(_HEAD.size)
        if head is None:
            return None
        kind, number, place, offset, seconds, size = _HEAD.unpack(head)
        if size > MAX_DATA_BYTES:
            raise OSError(f"a message of {size} bytes, which is longer than any")
        data = self._read(size)
        return None if data is None else Message(kind, number, place, offset, seconds, data)

    def _read(self, size: int) -> bytes | None:
        """So many bytes; None if the connection ends before."""
        out = bytearray(size)
        view, done = memoryview(out), 0
        while done < size:
            count = self._socket.recv_into(view[done:])
            if not count:
                return None
            done += count
        return bytes(out)

    def close(self) -> None:
        """End the connection for both; who receives is woken."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def forget(self) -> None:
        """Drop a forked child's copy; the connection goes on in its parent."""
        self._socket.close()


class Rendezvous:
    """A name under which processes of this machine and user meet."""

    def __init__(self, *names: object) -> None:
        """OSError where they cannot: without such sockets, or without a folder that is the user's alone."""
        if not hasattr(socket, "AF_UNIX"):
            raise OSError("this system's Python has no Unix sockets")
        folder = Path(tempfile.gettempdir()) / f"archive-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise OSError(f"{folder} is no folder of this user's alone: remove it, or set TMPDIR to another place")
        name = hashlib.sha256("\n".join(map(str, names)).encode("utf-8", "surrogatepass")).hexdigest()[:24]
        self._at, self._lock_at = folder / f"{name}.socket", folder / f"{name}.lock"
        if len(os.fsencode(self._at)) > _MAX_PATH_BYTES:
            raise OSError(f"{self._at} is too long for a socket: set TMPDIR to a shorter path")
        self._lock: int | None = None

    def listen(self) -> socket.socket | None:
        """A socket that takes connections; None if another process, or another caller of this one, has it."""
        import fcntl

        lock = os.open(self._lock_at, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._lock_at.stat().st_ino != os.fstat(lock).st_ino:  # who held it has removed the file since
                raise FileNotFoundError
            self._at.unlink(missing_ok=True)
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.bind(str(self._at))
            made.listen(_BACKLOG)
        except (BlockingIOError, FileNotFoundError):
            os.close(lock)
            return None
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        return made

    def connect(self, receive_s: float) -> Link | None:
        """A connection to who listens; None if nobody does, or not yet. receive_s: as of a Link."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(_SEND_S)
        try:
            made.connect(str(self._at))
        except OSError:
            made.close()
            return None
        return Link(made, receive_s)

    def leave(self) -> None:
        """Listen no more; another one may."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            with suppress(OSError):
                if self._lock_at.stat().st_ino == os.fstat(lock).st_ino:  # else another one listens: it was removed
                    self._at.unlink(missing_ok=True)
                    self._lock_at.unlink()
            os.close(lock)

    def forget(self) -> None:
        """Drop a forked child's copy of the lock; its parent keeps it."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            os.close(lock)
