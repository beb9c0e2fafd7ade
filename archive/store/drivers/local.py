"""Does I/O: a folder of the local file system (or a mounted one), with durable and create-only writes."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice

from archive.base import layout
from archive.store.drivers import disk
from archive.store.drivers.driver import PAGE, Buffer, Driver, Listed, Location, ObjectInfo


class LocalDriver(Driver):
    """Objects as files below a folder. A name shows either a whole object or nothing, after a crash too.

    A symbolic link that leads out of the folder is not followed (UnsafePathError), but for where the caller allowed.
    """

    remote = False
    exclusive = True

    def __init__(self, place: Location) -> None:
        self._root = place.target
        self._inside = disk.Inside(place.target, place.allowed)

    def can(self, verb: str) -> bool:
        return super().can(verb) and (verb != "now" or disk.of_this_machine(self._root))

    def now(self, folder: str, timeout_s: float) -> datetime:
        """Look at the clock that the operating system gives files their times by."""
        return datetime.fromtimestamp(time.time() if disk.WINDOWS else time.clock_gettime(time.CLOCK_REALTIME), UTC)

    def get(self, key: str, start: int, stop: int | None, timeout_s: float) -> bytes:
        with self._inside.opened(self._path(key)) as descriptor:
            size = os.fstat(descriptor).st_size
            return disk.read_span(descriptor, start, size if stop is None else min(stop, size))

    def get_ranges(self, key: str, spans: Sequence[tuple[int, int]], timeout_s: float) -> list[bytes]:
        with self._inside.opened(self._path(key)) as descriptor:
            size = os.fstat(descriptor).st_size
            disk.announce(descriptor, spans)
            return [disk.read_span(descriptor, start, min(stop, size)) for start, stop in spans]

    def read_into(
        self, key: str, starts: Sequence[int], rooms: Sequence[Sequence[memoryview]], timeout_s: float
    ) -> list[int]:
        with self._inside.opened(self._path(key)) as descriptor:
            if len(starts) > 1:
                disk.announce(descriptor, [(at, at + sum(map(len, of))) for at, of in zip(starts, rooms, strict=True)])
            return [disk.read_into(descriptor, at, of) for at, of in zip(starts, rooms, strict=True)]

    def put(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        path = self._path(key)
        temporary = disk.write_temporary(path, parts)
        try:
            os.replace(temporary, path)  # noqa: PTH105 (a Path per object is measurable)
        except OSError:
            disk.discard(temporary)
            raise
        disk.sync_folder(os.path.dirname(path))  # noqa: PTH120

    def create(self, key: str, parts: Sequence[Buffer], timeout_s: float) -> None:
        path = self._path(key)
        temporary = disk.write_temporary(path, parts)
        try:
            disk.claim(temporary, path)
        finally:
            disk.discard(temporary)
        disk.sync_folder(os.path.dirname(path))  # noqa: PTH120

    def head(self, key: str, timeout_s: float) -> ObjectInfo:
        try:
            found = os.stat(self._inside.resolved(self._path(key)))  # noqa: PTH116
        except NotADirectoryError:
            raise FileNotFoundError(key) from None
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(key)
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
