"""Does I/O: whether symbolic links on the local disk lead out of an archive, as in one that somebody else packed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from archive.base import UnsafePathError

_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NOT_A_LINK = getattr(os, "O_NOFOLLOW", 0)
_IS_A_LINK = frozenset((errno.ELOOP, errno.EMLINK))  # as Linux and FreeBSD say it


class Inside:
    """What lies below one folder, wherever the way to that folder itself leads. Safe for several threads."""

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
        """The same path, or where it leads as a link; UnsafePathError if that is elsewhere."""
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
