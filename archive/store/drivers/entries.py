"""Does I/O: entries of folders on a local disk, which outlast a power cut.

A file that was synced is still lost with its entry in its folder, and with that of each folder on the way to it.

- Nobody is told that an object is there before its folder was synced. Those who wait for that at once share one sync.
- A folder is made after the one above, whose entry was synced before. So of a folder that is there only its own entry
  can be lost (another process has just made it), and is synced once before something is put there.
- An object that was created has a second name, its temporary one, until its folder was synced. Whoever finds both syncs
  the folder himself, so that nothing he makes can outlast what it goes by.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

from archive.base import NotExclusiveError, forking

WINDOWS = os.name == "nt"
_NO_HARD_LINKS = frozenset((errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS))
_NOT_SYNCED = frozenset((errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EROFS))  # of folders, where there is no need


class _Turns:
    """The syncs of one folder, one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = self._done = 0

    def take(self, folder: str) -> None:
        """Return once a sync that began after this call is done, by whichever thread."""
        due = self._begun + 1
        with self._lock:
            if self._done < due:
                self._begun += 1
                sync_folder(folder)
                self._done = self._begun


class Entries:
    """The entries of folders as one process makes and finds them. Safe for several threads."""

    def __init__(self) -> None:
        self._kept: set[str] = set()  # folders whose own entries are on the disk
        self._turns = forking.own(self, "_turns", WeakValueDictionary[str, _Turns])

    def make(self, folder: str) -> None:
        """Make a folder, and those above that are missing; their entries are on the disk afterwards."""
        if folder in self._kept:
            return
        above = os.path.dirname(folder)  # noqa: PTH120
        if os.path.isdir(folder):  # noqa: PTH112
            with suppress(PermissionError):  # it is the root, or above: somebody else has made it
                self.sync(above)
        else:
            self.make(above)
            Path(folder).mkdir(exist_ok=True)
            self.sync(above)
        self._kept.add(folder)

    def forget(self) -> None:
        """Look at all folders anew: one is gone that was there."""
        self._kept.clear()

    def sync(self, folder: str) -> None:
        """Return once all entries that were made in a folder before this call are on the disk."""
        self._turns.setdefault(folder, _Turns()).take(folder)

    def settle(self, path: str, found: os.stat_result) -> None:
        """Sync the entry of an object that was found, where its maker may not have done so yet."""
        if found.st_nlink > 1:
            with suppress(PermissionError):  # it only reads here: nothing that it makes goes by the object
                self.sync(os.path.dirname(path))  # noqa: PTH120


def claim(temporary: str, path: str) -> None:
    """Give a finished file its name, unless that is taken: FileExistsError."""
    if WINDOWS:
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


def sync_folder(folder: str) -> None:
    if WINDOWS:  # a folder cannot be opened there; NTFS journals its entries
        return
    descriptor = os.open(folder or "/", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SYNCED:
            raise
    finally:
        os.close(descriptor)


def discard(path: str) -> None:
    try:
        os.unlink(path)  # noqa: PTH108
    except OSError:
        return
