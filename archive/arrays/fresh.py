"""Pure, no I/O: memory that nothing was in yet, for large results.

The operating system hands memory out when it is first touched: 4 KB at a time, which takes longer than reading what is
put there, or 2 MB at a time where it is asked to and the memory begins and ends on such a border. What numpy allocates
does not, so much of each array of some megabytes comes in small pages.

A virtual machine that gives free memory back to its host does so by huge pages. To have them again takes five times as
long as small ones, which lie between what is in use and stay; so there these are taken.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

LARGE_BYTES = 4 * 1024 * 1024
_HUGE_BYTES = 2 * 1024 * 1024
_CAN_ASK = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MAP_ANONYMOUS")  # Linux
_BALLOONS = Path("/sys/bus/virtio/drivers/virtio_balloon")
_REPORTS_FREE_PAGES = 5  # a bit of the features of such a device


def fresh(shape: Sequence[int], dtype: Any) -> Array:
    """An array like `np.empty`."""
    return fresh_together([shape[0]], shape[1:], dtype)[0]


def zeros(shape: Sequence[int], dtype: Any) -> Array:
    """An array like `np.zeros`. Large ones are not written to for it: memory that is handed out is zero."""
    return fresh(shape, dtype) if _is_large(shape, dtype) else np.zeros(shape, dtype)


def fresh_together(counts: Sequence[int], trailing: Sequence[int], dtype: Any) -> list[Array]:
    """Arrays like `np.empty`, of so many rows each, made together. Each gives its memory back when nobody uses it."""
    dtype = np.dtype(dtype)
    if not _is_large((sum(counts), *trailing), dtype):
        return [np.empty((count, *trailing), dtype) for count in counts]
    starts = _starts([count * dtype.itemsize * prod(trailing) for count in counts])
    memory = _mapped(starts[-1])
    made = []
    for count, start, stop in zip(counts, starts, starts[1:], strict=False):
        piece: Array = np.ndarray((count, *trailing), dtype, memory, start)
        if len(counts) > 1:
            weakref.finalize(piece, _give_back, memory, start, stop).atexit = False
        made.append(piece)
    return made


def _is_large(shape: Sequence[int], dtype: Any) -> bool:
    return _CAN_ASK and prod(shape) * np.dtype(dtype).itemsize >= LARGE_BYTES and not np.dtype(dtype).hasobject


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where pieces of these sizes begin, each on a page of its own, and where the last one stops."""
    out = [0]
    for size in sizes:
        out.append(out[-1] + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    return out


def _mapped(size: int) -> mmap.mmap:
    """Memory in huge pages, or in small ones; the kernel puts what is a number of huge ones on a border of theirs."""
    whole = -(-size // _HUGE_BYTES) * _HUGE_BYTES
    memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE if _host_takes_free_pages() else mmap.MADV_HUGEPAGE)
    return memory


@cache
def _host_takes_free_pages() -> bool:
    """Whether this is a virtual machine that tells its host which of its memory is free."""
    try:
        found = [file.read_text() for file in _BALLOONS.glob("virtio*/features")]
    except OSError:
        return False
    return any(bits[_REPORTS_FREE_PAGES : _REPORTS_FREE_PAGES + 1] == "1" for bits in found)


def _give_back(memory: mmap.mmap, start: int, stop: int) -> None:
    """Let the operating system have the pages of a piece that nobody uses."""
    if stop > start:
        memory.madvise(mmap.MADV_DONTNEED, start, stop - start)
