"""Does I/O: a folder of chunks that any number of processes fill and read, of bounded size.

Chunks never change, so an entry is right or it is not there: it is written beside its place and renamed, and its length
and checksums are compared when it is read back. The least recently used entries are evicted first. The folder is its
owner's alone: it has the mode 0700 and a file 0600, whatever the umask. Files in it that are not entries are not read,
followed or removed, and neither are symbolic links below it, which others may have planted.
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

from archive.base import AccessDeniedError, StorageError, UsageError, in_child
from archive.index import chunkindex
from archive.shard import Buffer
from archive.store import local_path

try:
    import fcntl
except ImportError:  # Windows: processes there may together exceed the bound by what they write at the same time
    fcntl = None  # type: ignore[assignment]

_KEPT_SHARE = 0.9  # of the bound, once it was reached
_USED_AGAIN_S = 60.0  # entries are not marked as used more often than that
_ABANDONED_S = 3600.0
_COUNT = ".bytes"
_FOLDER = re.compile(r"[0-9a-f]{2}")
_ENTRY = re.compile(r"[0-9a-f]{38}|\.[0-9a-f]+\.tmp")
_OF_OTHERS = 0o077
_WRITTEN_BY_OTHERS = 0o022
_LINK_IS_NO_FILE = getattr(os, "O_NOFOLLOW", 0)
_PLAIN_FILE = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_READ = os.O_RDONLY | _LINK_IS_NO_FILE | getattr(os, "O_NONBLOCK", 0) | _PLAIN_FILE  # nor waits for who fills a pipe
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _LINK_IS_NO_FILE | _PLAIN_FILE
_SHARE = os.O_RDWR | os.O_CREAT | _LINK_IS_NO_FILE | _PLAIN_FILE
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
            _make_folder(self.folder)
        except StorageError:
            raise
        except OSError as e:
            raise StorageError(
                f"the disk cache at {self.folder} cannot be made: {e}; give another folder as disk_cache"
            ) from e

    def get(self, name: str, size: int, crc32c: int) -> bytes | None:
        """The chunk of this name, size and own checksum; None if it is not here. A damaged one is removed."""
        path = self._path(name, size, crc32c)
        try:
            with _reading(path) as descriptor:
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    data = file.read(size + 1)  # one byte more shows that there is more
                if len(data) == size and chunkindex.is_sound(memoryview(data), crc32c, is_chunk=True):
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
                # FileExistsError where there is anything of that name, a link too.
                with os.fdopen(os.open(temporary, _CREATE, 0o600), "wb") as file:
                    _set_mode(file.fileno())
                    file.write(data)
                temporary.replace(path)
        except OSError as e:
            _remove(temporary)
            raise StorageError(
                f"the disk cache at {self.folder} cannot be written: {e}; make room there, or leave out disk_cache"
            ) from e
        return True

    def _make_subfolder(self, folder: Path) -> None:
        try:
            _make_subfolder(folder)
        except FileNotFoundError:  # somebody has removed all of it
            _make_folder(self.folder)
            _make_subfolder(folder)

    def _path(self, name: str, size: int, crc32c: int) -> Path:
        digest = hashlib.sha256(f"{name}:{size}:{crc32c}".encode()).hexdigest()
        return self.folder / digest[:2] / digest[2:40]

    def _reserve(self, count: int, size: int) -> None:
        """Count `size` bytes more before they are written; entries are evicted if that is too much."""
        held = _read_count(count)
        if held is None or held + size > self.max_bytes:
            held = self._shrink(int(self.max_bytes * _KEPT_SHARE), size)
        os.lseek(count, 0, os.SEEK_SET)
        os.write(count, struct.pack("<q", held + size))

    def _shrink(self, most: int, coming: int) -> int:
        """Evict the least recently used entries until `coming` bytes fit; the bytes that stay."""
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
        descriptor = os.open(self.folder / _COUNT, _SHARE, 0o600)
        _open.add(descriptor)
        try:
            _set_mode(descriptor)
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
        """(last use, bytes, path) of each entry; abandoned temporary files are removed."""
        for folder in self._folders():
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as found:
                for entry in found:
                    if not _ENTRY.fullmatch(entry.name) or entry.is_dir(follow_symlinks=False):
                        continue  # not the cache's
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if entry.name.endswith(".tmp") and time.time() - status.st_mtime > _ABANDONED_S:
                            _remove(Path(entry.path))
                            continue
                        yield status.st_mtime, status.st_size, Path(entry.path)

    def _folders(self) -> list[str]:
        with os.scandir(self.folder) as found:
            return [
                entry.path for entry in found if _FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]


def as_disk_cache(given: Any) -> DiskCache | None:
    """A disk cache as users give it: None, a folder, or a DiskCache with a bound of its own."""
    return given if given is None or isinstance(given, DiskCache) else DiskCache(given)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode) and not path.parent.is_symlink()
    except OSError:
        return False


def _mark(descriptor: int) -> None:
    """Record the use of an entry."""
    with contextlib.suppress(OSError):  # Windows knows no such call for descriptors, other systems may refuse it
        if time.time() - os.fstat(descriptor).st_mtime > _USED_AGAIN_S:
            os.utime(descriptor)


def _read_count(descriptor: int) -> int | None:
    os.lseek(descriptor, 0, os.SEEK_SET)
    stored = os.read(descriptor, 8)
    count = struct.unpack("<q", stored)[0] if len(stored) == 8 else None
    return count if count is None or count >= 0 else None


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


# -- private files and folders -----------------------------------------------------------------------------------------


def _make_folder(folder: Path) -> None:
    """Make a private folder; or make private one that is empty or a cache.

    AccessDeniedError for one that is not this user's, or in which others may write.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _make(folder)
    for status in (folder.lstat(), folder.stat()):  # of a link, and of where it leads
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            raise AccessDeniedError(
                f"the disk cache at {folder} belongs to another user, who could read or replace its content; "
                "give a folder of your own"
            )
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & _OF_OTHERS and ((folder / _COUNT).is_file() or not any(folder.iterdir())):
        folder.chmod(0o700)
    elif mode & _WRITTEN_BY_OTHERS and os.name != "nt":
        raise AccessDeniedError(
            f"the disk cache at {folder} would lie where other users may write: give a folder of its own, or take that "
            f"right from them (chmod 700 {folder})"
        )


def _make_subfolder(folder: Path) -> None:
    """Make a private folder in one; NotADirectoryError for a symbolic link."""
    _make(folder)
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise NotADirectoryError(f"{folder} is no folder")


def _make(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
        folder.chmod(0o700)  # a umask can take rights from its owner, too


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[int]:
    """The descriptor of a plain file in a folder that is no link; OSError for anything else."""
    if not stat.S_ISDIR(path.parent.lstat().st_mode):
        raise NotADirectoryError(f"{path.parent} is no folder")
    descriptor = os.open(path, _READ)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no plain file")
        yield descriptor
    finally:
        os.close(descriptor)


def _set_mode(descriptor: int) -> None:
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, 0o600)
