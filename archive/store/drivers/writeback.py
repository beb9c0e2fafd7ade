"""Does I/O: has what was written to a file go to the disk while the rest is being written.

Left alone, Linux begins when the file is synced, and whoever syncs waits for all of it. Where the room is reserved
first, it need not look for room with each page, and a sync of one file does not wait for the data of others (ext4).
All of it is hints: only a sync says whether the bytes are there, and a write whether there was room.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

STEP_BYTES = 8 * 1024 * 1024  # in less, the disk is not worth a call
_SYNC_FILE_RANGE_WRITE = 2  # of <fcntl.h>: begin, wait for nothing, report nothing

_Call = Callable[[int, int, int, int], int]


def reserve(descriptor: int, size: int) -> None:
    """Have the file system set aside room for a new file that will be of this size."""
    if size >= STEP_BYTES and (call := _system_call("fallocate", ctypes.c_int, ctypes.c_int64, ctypes.c_int64)):
        call(descriptor, 0, 0, size)  # the C library's posix_fallocate would write where a file system cannot do it


def begin(descriptor: int, start: int, size: int) -> None:
    """Have these bytes of an open file written out."""
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
