"""Does I/O: a folder of chunks that any number of processes fill and read, of at most so many bytes.

Chunks never change, so an entry is right or it is not there: it is written beside its place and renamed, and its length
and checksums are compared when it is read back. What was used longest ago leaves first. The folder is its owner's
alone; nothing in it that is not an entry is read, followed or removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from archive.base import StorageError, UsageError, in_child
from archive.read.chunks import private
from archive.shard import Buffer, checksum
from archive.store import local_path

try:
    import fcntl
except ImportError:  # Windows: processes there may together exceed the bound by what they write at the same time
    fcntl = None  # type: ignore[assignment]

_CHECKSUM_BYTES = 4
_KEPT_SHARE = 0.9  # of the bound, once it was reached
_USED_AGAIN_S = 60.0  # entries are not marked as used more often than that
_ABANDONED_S = 3600.0
_COUNT = ".bytes"
_FOLDER = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{38}|\.[0-9a-f]+\.tmp")
_open: set[int] = set()  # descriptors that may hold a lock


def _close_inherited() -> None:
    """A child's copy of a descriptor would hold its parent's lock for as long as the child lives."""
    for descriptor in _open:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _open.clear()


in_child(_close_inherited)


class DiskCache:
    """Stored chunks as files below `folder`, together at most `max_bytes`. Pickles; safe for threads and processes.

    The folder is made private (0700, its files 0600). One that belongs to another user, or in which others may write,
    is refused with AccessDeniedError.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int = 2**36) -> None:
        if max_bytes < 1:
            raise UsageError(
                f"a disk cache of {max_bytes} bytes holds nothing; give max_bytes above 0, or no disk cache"
            )
        self.folder, self.max_bytes = local_path(folder, "the disk cache").absolute(), max_bytes
        try:
            self._make()
        except StorageError:
            raise
        except OSError as e:
            raise StorageError(
                f"the disk cache at {self.folder} cannot be made: {e}; give another folder as disk_cache"
            ) from e

    def _make(self) -> None:
        private.make_folder(self.folder, "the disk cache", known_by=_COUNT)

    def get(self, name: str, size: int, crc32c: int) -> bytes | None:
        """The chunk of this name, size and own checksum; None if it is not here. What is damaged is removed."""
        path = self._path(name, size, crc32c)
        try:
            with private.reading(path) as descriptor:
                data = _content(descriptor, size)
                if len(data) == size and _sound(data, crc32c):
                    _mark(descriptor)
                    return data
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:  # a link or a pipe, say
            pass
        _remove(path)
        return None

    def put(self, name: str, data: Buffer, crc32c: int) -> bool:
        """Keep a chunk, making room for it; False if it is larger than the whole cache."""
        size = len(data)
        path = self._path(name, size, crc32c)
        if size > self.max_bytes or _is_file(path):
            return size <= self.max_bytes
        temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            self._make_subfolder(path.parent)
            with self._locked() as count:
                self._reserve(count, size)
                private.write_new(temporary, data)
                temporary.replace(path)
        except OSError as e:
            _remove(temporary)
            raise StorageError(
                f"the disk cache at {self.folder} cannot be written: {e}; make room there, or leave out disk_cache"
            ) from e
        return True

    def _make_subfolder(self, folder: Path) -> None:
        try:
            private.make_subfolder(folder)
        except FileNotFoundError:  # somebody has removed all of it
            self._make()
            private.make_subfolder(folder)

    def _path(self, name: str, size: int, crc32c: int) -> Path:
        digest = hashlib.sha256(f"{name}:{size}:{crc32c}".encode()).hexdigest()
        return self.folder / digest[:2] / digest[2:40]

    def _reserve(self, count: int, size: int) -> None:
        """Count `size` bytes more before they are written; entries leave if that is too much."""
        held = _read_count(count)
        if held is None or held + size > self.max_bytes:
            held = self._shrink(int(self.max_bytes * _KEPT_SHARE), size)
        os.lseek(count, 0, os.SEEK_SET)
        os.write(count, struct.pack("<q", held + size))

    def _shrink(self, most: int, coming: int) -> int:
        """Remove what was used longest ago until `coming` bytes fit; bytes that stay."""
        entries = sorted(self._entries())
        held = sum(size for _, size, _ in entries)
        if held + coming <= self.max_bytes:
            return held
        for _, size, path in entries:
            if held + coming <= max(most, coming):
                break
            _remove(path)
            held -= size
        return held

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The file that counts the bytes, for one process at a time."""
        descriptor = private.open_shared(self.folder / _COUNT)
        _open.add(descriptor)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            if descriptor in _open:  # else this is a forked child, which has closed it
                _open.discard(descriptor)
                if fcntl is not None:  # a child that was forked before it could be told has the lock too
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """(last use, bytes, path) of each entry; temporaries that nobody finishes are removed."""
        for folder in self._folders():
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as found:
                for entry in filter(_is_ours, found):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if entry.name.endswith(".tmp") and time.time() - status.st_mtime > _ABANDONED_S:
                            _remove(Path(entry.path))
                            continue
                        yield status.st_mtime, status.st_size, Path(entry.path)

    def _folders(self) -> list[str]:
        with os.scandir(self.folder) as found:
            return [
                entry.path for entry in found
                if _FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]  # fmt: skip


def as_disk_cache(given: Any) -> DiskCache | None:
    """A disk cache as users give it: None, a folder, or a DiskCache with a bound of its own."""
    return given if given is None or isinstance(given, DiskCache) else DiskCache(given)


def _is_ours(entry: os.DirEntry[str]) -> bool:
    """Whether it has a name that entries and temporaries have: what else is in the folder is not the cache's."""
    return bool(_ENTRY.fullmatch(entry.name)) and not entry.is_dir(follow_symlinks=False)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode) and not path.parent.is_symlink()
    except OSError:
        return False


def _content(descriptor: int, size: int) -> bytes:
    """What a file holds, but no more than shows that it has more than `size` bytes."""
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        return file.read(size + 1)


def _mark(descriptor: int) -> None:
    """Say that an entry was used."""
    with contextlib.suppress(OSError):  # Windows knows no such call for descriptors, other systems may refuse it
        if time.time() - os.fstat(descriptor).st_mtime > _USED_AGAIN_S:
            os.utime(descriptor)


def _sound(data: bytes, crc32c: int) -> bool:
    """Whether a chunk ends in its own checksum, and that is the one meant."""
    return (
        int.from_bytes(data[-_CHECKSUM_BYTES:], "little") == crc32c
        and checksum(memoryview(data)[:-_CHECKSUM_BYTES]) == crc32c
    )


def _read_count(descriptor: int) -> int | None:
    os.lseek(descriptor, 0, os.SEEK_SET)
    stored = os.read(descriptor, 8)
    count = struct.unpack("<q", stored)[0] if len(stored) == 8 else None
    return count if count is None or count >= 0 else None


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
