"""Does I/O: folders and files of this machine that are for its owner's eyes, and lead nowhere else.

A folder has the mode 0700 and a file 0600, whatever the umask. No symbolic link below such a folder is followed, be it
one that somebody planted.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from archive.base import AccessDeniedError

_OF_OTHERS = 0o077
_WRITTEN_BY_OTHERS = 0o022
_LINK_IS_NO_FILE = getattr(os, "O_NOFOLLOW", 0)
_PLAIN = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_READ = os.O_RDONLY | _LINK_IS_NO_FILE | getattr(os, "O_NONBLOCK", 0) | _PLAIN  # nor waits for who fills a pipe
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _LINK_IS_NO_FILE | _PLAIN
_COUNT = os.O_RDWR | os.O_CREAT | _LINK_IS_NO_FILE | _PLAIN


def make_folder(folder: Path, what: str, *, known_by: str) -> None:
    """Make a private folder, or make one private that is empty or holds a file called `known_by`.

    AccessDeniedError for one that is not this user's, or in which others may write.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _make(folder)
    for status in (folder.lstat(), folder.stat()):  # of a link, and of where it leads
        if _is_of_another(status):
            raise AccessDeniedError(
                f"{what} at {folder} belongs to another user, who could read it or put something else there; give a "
                "folder of your own"
            )
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & _OF_OTHERS and ((folder / known_by).is_file() or not any(folder.iterdir())):
        folder.chmod(0o700)
    elif mode & _WRITTEN_BY_OTHERS and os.name != "nt":
        raise AccessDeniedError(
            f"{what} at {folder} would lie where other users may write: give a folder of its own, or take that right "
            f"from them (chmod 700 {folder})"
        )


def make_subfolder(folder: Path) -> None:
    """Make a private folder in one; NotADirectoryError for a symbolic link."""
    _make(folder)
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise NotADirectoryError(f"{folder} is no folder")


def _make(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
        folder.chmod(0o700)  # a umask can take rights from its owner, too


@contextlib.contextmanager
def reading(path: Path) -> Iterator[int]:
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


def write_new(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Make a private file; FileExistsError where there is anything of that name, a link too."""
    with os.fdopen(os.open(path, _CREATE, 0o600), "wb") as file:
        _set_mode(file.fileno())
        file.write(data)


def open_shared(path: Path) -> int:
    """A descriptor of a private file that several processes read and write, made where it is not there."""
    descriptor = os.open(path, _COUNT, 0o600)
    _set_mode(descriptor)
    return descriptor


def _set_mode(descriptor: int) -> None:
    if hasattr(os, "fchmod"):
        os.fchmod(descriptor, 0o600)


def _is_of_another(status: os.stat_result) -> bool:
    return hasattr(os, "geteuid") and status.st_uid != os.geteuid()
