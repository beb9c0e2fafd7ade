"""Does I/O: a folder of the local file system (or a mounted one), with durable and create-only writes; symbolic links
that lead out of it; the clock of its files.

Linux by itself begins to write when a file is synced, and the caller waits for all of it. So data goes to the disk
while the rest is being written. Space that is reserved first is not searched for with each page, and a sync of one file
does not wait for the data of others (ext4). All of it is hints: only a sync shows that the bytes are stored, and a
write that there was space.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from pathlib import Path

from archive.base import UnsafePathError, layout
from archive.store.drivers.driver import PAGE, Buffer, Driver, Listed, Location, ObjectInfo
from archive.store.drivers.entries import WINDOWS, Entries, claim, discard

_PARTS = 512  # in one call of the operating system, each of which lets other threads run, and waits for them
_WRITE_BYTES = 1024 * 1024  # and so many: Linux takes larger pages for larger writes, and four times as long
_READ_BYTES = 8 * 1024 * 1024
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NOT_A_LINK = getattr(os, "O_NOFOLLOW", 0)
_IS_A_LINK = frozenset((errno.ELOOP, errno.EMLINK))  # as Linux and FreeBSD say it
STEP_BYTES = 8 * 1024 * 1024  # in less, the disk is not worth a call
_SYNC_FILE_RANGE_WRITE = 2  # of <fcntl.h>: begin, wait for nothing, report nothing

_Call = Callable[[int, int, int, int], int]
_MOUNTS = Path("/proc/self/mountinfo")
_OWN = (
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs", "tmpfs", "ramfs", "overlay",
    "vfat", "exfat", "msdos", "ntfs", "ntfs3",
)  # fmt: skip


class Inside:
    """The inside of one folder, wherever the way to that folder itself leads. Safe for several threads."""

    def __init__(self, root: str, allowed: bool | Sequence[str]) -> None:
        """allowed: file:// URLs below which links may lead, too; True for anywhere."""
        self._root = root
        self._anywhere = allowed is True
        self._allowed = () if isinstance(allowed, bool) else tuple(allowed)
        self._known: set[str] = set()  # folders that do not lead out; each is looked at once

    def check(self, folder: str) -> None:
        """UnsafePathError if a folder, by its key, lies elsewhere."""
        if folder not in self._known:
            self._resolve(f"{self._root}/{folder}")
            self._known.add(folder)

    def resolved(self, path: str) -> str:
        """The path, or the target of a link; UnsafePathError if that is outside."""
        return self._resolve(path) if os.path.islink(path) else path  # noqa: PTH114 (a Path per object is measurable)

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """The descriptor of a file, for reading; UnsafePathError for a link that leads elsewhere."""
        descriptor = self._open(path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _open(self, path: str) -> int:
        try:
            return os.open(path, _READ | _NOT_A_LINK)
        except OSError as error:
            if error.errno not in _IS_A_LINK:
                raise
        return os.open(self._resolve(path), _READ | _NOT_A_LINK)

    def _resolve(self, path: str) -> str:
        real = os.path.realpath(path)
        roots = [os.path.realpath(self._root or "/"), *map(_path_of, self._allowed)]
        if not self._anywhere and not any(_is_below(real, root) for root in roots):
            raise UnsafePathError(
                f"{path} leads out of the archive, by a symbolic link to {real}, and was not followed; put what it "
                f"leads to in its place, or open with archive.open(..., allow_bases=[{Path(real).as_uri()!r}]) if you "
                "trust it"
            )
        return real


def _path_of(url: str) -> str:
    return os.path.realpath(url.removeprefix("file://")) if url.startswith("file://") else "\0"


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root if root.endswith(os.sep) else root + os.sep)


def of_this_machine(folder: str) -> bool:
    """True if files below a folder get their times of this machine, and where nobody lists what is mounted."""
    path = os.path.realpath(folder)
    found, best = "", -1
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return True
    for line in lines:
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split(" ")[4]).rstrip("/")
        if (path == point or path.startswith(f"{point}/")) and len(point) >= best:  # the last of several is on top
            found, best = after.split(" ")[0], len(point)
    return found in _OWN


def announce(descriptor: int, spans: Sequence[tuple[int, int]]) -> None:
    """Announce reads to the operating system, so that a disk is asked for all of it at once."""
    if len(spans) > 1 and hasattr(os, "posix_fadvise"):
        for start, stop in spans:
            os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)


def read_span(descriptor: int, start: int, stop: int) -> bytes:
    """Bytes [start, stop); fewer only if the file has shrunk meanwhile."""
    pieces: list[bytes] = []
    while start < stop:
        piece = _read_at(descriptor, stop - start, start)
        if not piece:
            break
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _read_at(descriptor: int, size: int, start: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, start)
    os.lseek(descriptor, start, os.SEEK_SET)
    return os.read(descriptor, size)


def read_into(descriptor: int, start: int, rooms: Sequence[memoryview]) -> int:
    """The number of bytes from `start` on that have filled `rooms`; fewer than they hold if the file ends before."""
    filled = 0
    for rest in _batches(rooms, _READ_BYTES):
        while rest:
            count = _read_some(descriptor, rest, start + filled)
            if not count:
                return filled
            filled += count
            rest = _after(rest, count)
    return filled


def _read_some(descriptor: int, rooms: Sequence[memoryview], start: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, rooms, start)
    piece = _read_at(descriptor, len(rooms[0]), start)
    rooms[0][: len(piece)] = piece
    return len(piece)


def write_temporary(folder: str, entries: Entries, parts: Sequence[Buffer]) -> str:
    """A complete, synced file in a folder, which is made if it is missing."""
    temporary = f"{folder}/{layout.temporary_name(secrets.token_hex(8))}"
    entries.make(folder)
    try:
        descriptor = os.open(temporary, _WRITE_FLAGS, 0o666)
    except FileNotFoundError:  # somebody has removed the folder since
        entries.forget()
        entries.make(folder)
        descriptor = os.open(temporary, _WRITE_FLAGS, 0o666)
    try:
        _write_all(descriptor, parts)
        os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)
        discard(temporary)
        raise
    os.close(descriptor)
    return temporary


def _write_all(descriptor: int, parts: Sequence[Buffer]) -> None:
    views = [memoryview(part).cast("B") for part in parts]
    _reserve(descriptor, sum(map(len, views)))
    begun = written = 0
    for rest in _batches(views, _WRITE_BYTES):
        while rest:
            count = _write_some(descriptor, rest)
            rest = _after(rest, count)
            written += count
        if written - begun >= STEP_BYTES:
            _begin_writing(descriptor, begun, written - begun)
            begun = written


def _batches(parts: Sequence[memoryview], max_bytes: int) -> Iterator[Sequence[memoryview]]:
    """Parts for one call of the operating system each; none of them is empty."""
    batch: list[memoryview] = []
    size = 0
    for part in filter(len, parts):
        if batch and (size + len(part) > max_bytes or len(batch) == _PARTS):
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += len(part)
    if batch:
        yield batch


def _write_some(descriptor: int, parts: Sequence[memoryview]) -> int:
    return os.writev(descriptor, parts) if hasattr(os, "writev") else os.write(descriptor, parts[0])


def _after(parts: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """The rest of the parts once their first `count` bytes are written."""
    for i, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[i + 1 :]]
        count -= len(part)
    return []


def _reserve(descriptor: int, size: int) -> None:
    """Let the file system reserve space for a new file of this size."""
    if size >= STEP_BYTES and (call := _system_call("fallocate", ctypes.c_int, ctypes.c_int64, ctypes.c_int64)):
        call(descriptor, 0, 0, size)  # the C library's posix_fallocate would write where a file system cannot do it


def _begin_writing(descriptor: int, start: int, size: int) -> None:
    """Start writing these bytes of an open file to the disk."""
    if call := _system_call("sync_file_range", ctypes.c_int64, ctypes.c_int64, ctypes.c_uint):
        call(descriptor, start, size, _SYNC_FILE_RANGE_WRITE)


@cache
def _system_call(name: str, *types: type[ctypes._SimpleCData[int]]) -> _Call | None:
    """A call of Linux that Python has no function for; other threads run meanwhile. None where there is none."""
    if sys.platform != "linux":
        return None
    try:
        found = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    found.argtypes = [ctypes.c_int, *types]
    call: _Call = found
    return call


class LocalDriver(Driver):
    """Objects as files below a folder. A name shows either a whole object or nothing, after a crash too.

    A symbolic link that leads out of the folder is not followed (UnsafePathError), but for where the caller allowed.
    """

    remote = False
    exclusive = True

    def __init__(self, place: Location) -> None:
        self._root = place.target
        self._inside = Inside(place.target, place.allowed)
        self._entries = Entries()

    def can(self, verb: str) -> bool:
        return super().can(verb) and (verb != "now" or of_this_machine(self._root))

    def now(self, folder: str, timeout_s: float) -> datetime:
        """Look at the clock that the operating system gives files their times by."""
        return datetime.fromtimestamp(time.time() if WINDOWS else time.clock_gettime(time.CLOCK_REALTIME), UTC)

    def get(self, key: str, start: int, stop: int | None, timeout_s: float) -> bytes:
        path = self._path(key)
        with self._inside.opened(path) as descriptor:
            found = os.fstat(descriptor)
            self._entries.settle(path, found)
            return read_span(descriptor, start, found.st_size if stop is None else min(stop, found.st_size))

    def get_ranges(self, key: str, spans: Sequence[tuple[int, int]], timeout_s: float) -> list[bytes]:
        with self._inside.opened(self._path(key)) as descriptor:
            size = os.fstat(descriptor).st_size
            announce(descriptor, spans)
            return [read_span(descriptor, start, min(stop, size)) for start, stop in spans]

    def read_into(
        self, key: str, starts: Sequence[int], rooms: Sequence[Sequence[memoryview]], timeout_s: float
    ) -> list[int]:
        with self._inside.opened(self._path(key)) as descriptor:
            if len(starts) > 1:
                announce(descriptor, [(at, at + sum(map(len, of))) for at, of in zip(starts, rooms, strict=True)])
            return [read_into(descriptor, at, of) for at, of in zip(starts, rooms, strict=True)]

    def put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        path, folder = self._place(key)
        temporary = write_temporary(folder, self._entries, parts)
        try:
            os.replace(temporary, path)  # noqa: PTH105 (a Path per object is measurable)
        except OSError:
            discard(temporary)
            raise
        self._entries.sync(folder)

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        """Its temporary name goes last: whoever sees both knows that its entry may not be on the disk yet."""
        path, folder = self._place(key)
        temporary = write_temporary(folder, self._entries, parts)
        try:
            claim(temporary, path)
        except Exception as error:
            discard(temporary)
            if isinstance(error, FileExistsError):
                with contextlib.suppress(FileNotFoundError):  # it was deleted since
                    self._entries.settle(path, os.stat(path))  # noqa: PTH116
            raise
        self._entries.sync(folder)
        discard(temporary)

    def put_fresh(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        self.create(key, parts, timeout_s)

    def head(self, key: str, timeout_s: float) -> ObjectInfo:
        path = self._path(key)
        try:
            found = os.stat(self._inside.resolved(path))  # noqa: PTH116
        except NotADirectoryError:
            raise FileNotFoundError(key) from None
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(key)
        self._entries.settle(path, found)
        return ObjectInfo(found.st_size, "", datetime.fromtimestamp(found.st_mtime, UTC))

    def list(self, prefix: str, timeout_s: float) -> tuple[list[str], int]:
        try:
            with os.scandir(self._folder(prefix)) as entries:
                names = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries]
        except (FileNotFoundError, NotADirectoryError):
            return [], 1
        return [name for name in names if not layout.is_temporary(name)], 1

    def scan(self, prefix: str, after: str, timeout_s: float) -> Iterator[Sequence[Listed]]:
        below = _walk(self._folder(prefix), f"{prefix}/" if prefix else "")
        later = (found for found in below if found.key > after)
        while page := list(islice(later, PAGE)):
            yield page

    def delete(self, key: str, timeout_s: float) -> None:
        os.unlink(self._path(key))  # noqa: PTH108

    def _place(self, key: str) -> tuple[str, str]:
        """The path of an object, and that of its folder."""
        path = self._path(key)
        return path, os.path.dirname(path)  # noqa: PTH120

    def _path(self, key: str) -> str:
        self._inside.check(key.rpartition("/")[0])
        return f"{self._root}/{key}"

    def _folder(self, prefix: str) -> str:
        self._inside.check(prefix)
        return f"{self._root}/{prefix}" if prefix else self._root or "/"


def _walk(folder: str, stem: str) -> Iterator[Listed]:
    """The files below a folder, half written ones too, in the order of their keys; `stem` is that of the keys."""
    try:
        with os.scandir(folder) as entries:
            named = {f"{one.name}/" if one.is_dir(follow_symlinks=False) else one.name: one for one in entries}
    except (FileNotFoundError, NotADirectoryError):
        return
    for name, entry in sorted(named.items()):
        if name.endswith("/"):
            yield from _walk(entry.path, stem + name)
        elif entry.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):
                known = entry.stat(follow_symlinks=False)
                yield Listed(stem + name, known.st_size, datetime.fromtimestamp(known.st_mtime, UTC))
