"""Does I/O: a folder of the local file system (or a mounted one), with durable and create-only writes."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from archive.base import NotExclusiveError, layout
from archive.store.drivers import links, mounts, writeback
from archive.store.drivers.protocols import PAGE, Buffer, Driver, Found, Info, Place

_NO_HARD_LINKS = frozenset((errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS))
_WINDOWS = os.name == "nt"
_PARTS = 512  # in one call of the operating system, each of which lets other threads run, and waits for them
_WRITE_BYTES = 1024 * 1024  # and so many: Linux takes larger pages for larger writes, and four times as long
_READ_BYTES = 8 * 1024 * 1024
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class LocalDriver(Driver):
    """Objects as files below a folder. A name shows either a whole object or nothing, after a crash too.

    A symbolic link that leads out of the folder is not followed (UnsafePathError), but for where the caller allowed.
    """

    remote = False
    exclusive = True

    def __init__(self, place: Place) -> None:
        self._root = place.target
        self._inside = links.Inside(place.target, place.allowed)

    @property
    def creating(self) -> LocalDriver:
        return self

    @property
    def ranging(self) -> LocalDriver:
        return self

    @property
    def scanning(self) -> LocalDriver:
        return self

    @property
    def scattering(self) -> LocalDriver | None:
        return self if hasattr(os, "preadv") else None

    @property
    def telling(self) -> LocalDriver | None:
        return self if mounts.of_this_machine(self._root) else None

    def now(self, folder: str, timeout_s: float) -> datetime:
        """Look at the clock that the operating system gives files their times by."""
        return datetime.fromtimestamp(time.time() if _WINDOWS else time.clock_gettime(time.CLOCK_REALTIME), UTC)

    def get(self, key: str, start: int, stop: int | None, timeout_s: float) -> bytes:
        with self._inside.opened(self._path(key)) as descriptor:
            size = os.fstat(descriptor).st_size
            return _read_span(descriptor, start, size if stop is None else min(stop, size))

    def get_ranges(self, key: str, spans: Sequence[tuple[int, int]], timeout_s: float) -> list[bytes]:
        with self._inside.opened(self._path(key)) as descriptor:
            size = os.fstat(descriptor).st_size
            _announce(descriptor, spans)
            return [_read_span(descriptor, start, min(stop, size)) for start, stop in spans]

    def get_ranges_into(
        self, key: str, starts: Sequence[int], rooms: Sequence[memoryview], timeout_s: float
    ) -> list[memoryview]:
        with self._inside.opened(self._path(key)) as descriptor:
            _announce(descriptor, [(start, start + len(room)) for start, room in zip(starts, rooms, strict=True)])
            return [_read_into(descriptor, room, start) for start, room in zip(starts, rooms, strict=True)]

    def scatter(self, key: str, start: int, rooms: Sequence[memoryview], timeout_s: float) -> int:
        with self._inside.opened(self._path(key)) as descriptor:
            return _read_over(descriptor, rooms, start)

    def put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        path = self._path(key)
        temporary = _write_temporary(path, parts)
        try:
            os.replace(temporary, path)  # noqa: PTH105 (a Path per object is measurable)
        except OSError:
            _discard(temporary)
            raise
        _sync_folder(os.path.dirname(path))  # noqa: PTH120

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        path = self._path(key)
        temporary = _write_temporary(path, parts)
        try:
            _claim(temporary, path)
        finally:
            _discard(temporary)
        _sync_folder(os.path.dirname(path))  # noqa: PTH120

    def head(self, key: str, timeout_s: float) -> Info:
        try:
            found = os.stat(self._inside.resolved(self._path(key)))  # noqa: PTH116
        except NotADirectoryError:
            raise FileNotFoundError(key) from None
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(key)
        return Info(found.st_size, "", datetime.fromtimestamp(found.st_mtime, UTC))

    def list(self, prefix: str, timeout_s: float) -> tuple[list[str], int]:
        try:
            with os.scandir(self._folder(prefix)) as entries:
                names = [f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries]
        except (FileNotFoundError, NotADirectoryError):
            return [], 1
        return [name for name in names if not layout.is_temporary(name)], 1

    def scan(self, prefix: str, after: str, timeout_s: float) -> Iterator[Sequence[Found]]:
        below = _walk(self._folder(prefix), f"{prefix}/" if prefix else "")
        later = (found for found in below if found.key > after)
        while page := list(islice(later, PAGE)):
            yield page

    def delete(self, key: str, timeout_s: float) -> None:
        os.unlink(self._path(key))  # noqa: PTH108

    def _path(self, key: str) -> str:
        self._inside.check(key.rpartition("/")[0])
        return f"{self._root}/{key}"

    def _folder(self, prefix: str) -> str:
        self._inside.check(prefix)
        return f"{self._root}/{prefix}" if prefix else self._root or "/"


def _walk(folder: str, stem: str) -> Iterator[Found]:
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
                yield Found(stem + name, known.st_size, datetime.fromtimestamp(known.st_mtime, UTC))


def _announce(descriptor: int, spans: Sequence[tuple[int, int]]) -> None:
    """Tell the operating system what will be read, so that a disk is asked for all of it at once."""
    if len(spans) > 1 and hasattr(os, "posix_fadvise"):
        for start, stop in spans:
            os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)


def _read_span(descriptor: int, start: int, stop: int) -> bytes:
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


def _read_into(descriptor: int, room: memoryview, start: int) -> memoryview:
    """The part of `room` that bytes from `start` on have filled: all of it, unless the file ends before."""
    filled = 0
    while filled < len(room) and (count := _read_some(descriptor, room[filled:], start + filled)):
        filled += count
    return room[:filled]


def _read_some(descriptor: int, room: memoryview, start: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [room], start)
    piece = _read_at(descriptor, len(room), start)
    room[: len(piece)] = piece
    return len(piece)


def _read_over(descriptor: int, rooms: Sequence[memoryview], start: int) -> int:
    """The number of bytes from `start` on that have filled `rooms`; fewer than they hold if the file ends before."""
    filled = 0
    for rest in _batches(rooms, _READ_BYTES):
        while rest:
            count = os.preadv(descriptor, rest, start + filled)
            if not count:
                return filled
            filled += count
            rest = _after(rest, count)
    return filled


def _write_temporary(path: str, parts: Sequence[Buffer]) -> str:
    """A complete, synced file beside `path`."""
    folder = os.path.dirname(path)  # noqa: PTH120
    temporary = f"{folder}/{layout.temporary_name(secrets.token_hex(8))}"
    descriptor = _open_new(folder, temporary)
    try:
        _write_all(descriptor, parts)
        os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)
        _discard(temporary)
        raise
    os.close(descriptor)
    return temporary


def _open_new(folder: str, path: str) -> int:
    try:
        return os.open(path, _WRITE_FLAGS, 0o666)
    except FileNotFoundError:
        _make_folder(folder)
        return os.open(path, _WRITE_FLAGS, 0o666)


def _write_all(descriptor: int, parts: Sequence[Buffer]) -> None:
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    writeback.reserve(descriptor, sum(map(len, views)))
    begun = written = 0
    for rest in _batches(views, _WRITE_BYTES):
        while rest:
            count = _write_some(descriptor, rest)
            rest = _after(rest, count)
            written += count
        if written - begun >= writeback.STEP_BYTES:
            writeback.begin(descriptor, begun, written - begun)
            begun = written


def _batches(parts: Sequence[memoryview], max_bytes: int) -> Iterator[Sequence[memoryview]]:
    """Parts for one call of the operating system each."""
    batch: list[memoryview] = []
    size = 0
    for part in parts:
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
    """What is left of the parts once their first `count` bytes are written."""
    for i, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[i + 1 :]]
        count -= len(part)
    return []


def _claim(temporary: str, path: str) -> None:
    """Give a finished file its name, unless that is taken: FileExistsError."""
    if _WINDOWS:
        os.rename(temporary, path)  # noqa: PTH104 (refuses an existing target there, and only there)
        return
    try:
        os.link(temporary, path)
    except FileExistsError:
        if os.stat(temporary).st_nlink < 2:  # noqa: PTH116 (2: NFS made the link and lost its answer)
            raise
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        raise NotExclusiveError(
            f"create {path}: this file system has no hard links, so nothing can be created there exclusively; "
            "use another, or open with single_writer=True if one process alone writes there"
        ) from error


def _make_folder(folder: str) -> None:
    """`folder` and its parents, each entry synced so that a crash cannot lose the way to the object."""
    if os.path.isdir(folder):  # noqa: PTH112
        return
    parent = os.path.dirname(folder)  # noqa: PTH120
    _make_folder(parent)
    Path(folder).mkdir(exist_ok=True)
    _sync_folder(parent)


def _sync_folder(folder: str) -> None:
    if _WINDOWS:  # a folder cannot be opened there; NTFS journals its entries
        return
    descriptor = os.open(folder or "/", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some mounted file systems refuse to sync folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _discard(path: str) -> None:
    try:
        os.unlink(path)  # noqa: PTH108
    except OSError:
        return
