"""Pure, no I/O: fresh memory for large results; and reused memory for short-lived copies, where fresh memory costs more
than the copy itself.

The operating system hands memory out when it is first touched: 4 KB at a time, which takes longer than reading what is
put there, or 2 MB at a time where it is asked to and the memory begins and ends on such a border. What numpy allocates
does not, so much of each array of some megabytes comes in small pages.

A virtual machine that gives free memory back to its host does so by huge pages. To have them again takes five times as
long as small ones, which lie between what is in use and stay; so there these are taken.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

LARGE_BYTES = 4 * 1024 * 1024
_HUGE_BYTES = 2 * 1024 * 1024
_CAN_ASK = hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MAP_ANONYMOUS")  # Linux
_BALLOONS = Path("/sys/bus/virtio/drivers/virtio_balloon")
_REPORTS_FREE_PAGES = 5  # a bit of the features of such a device
_SMALL_BYTES = 256 * 1024
_ALIGN_BYTES = 64
_LARGEST_KEPT_BYTES = 31 * 1024 * 1024  # glibc maps anew what is larger than 32 MB, whatever was freed


def fresh(shape: Sequence[int], dtype: Any) -> Array:
    """An array like `np.empty`."""
    return fresh_together([shape[0]], shape[1:], dtype)[0] if _is_large(shape, dtype) else np.empty(shape, dtype)


def zeros(shape: Sequence[int], dtype: Any) -> Array:
    """An array like `np.zeros`. Large ones are not written to for it: memory that is handed out is zero."""
    return fresh(shape, dtype) if _is_large(shape, dtype) else np.zeros(shape, dtype)


def fresh_together(counts: Sequence[int], trailing: Sequence[int], dtype: Any) -> list[Array]:
    """Arrays like `np.empty`, of so many rows each, made together. Each gives its memory back when nobody uses it."""
    dtype = np.dtype(dtype)
    if not _is_large((sum(counts), *trailing), dtype):
        return [np.empty((count, *trailing), dtype) for count in counts]
    starts = _starts([count * dtype.itemsize * math.prod(trailing) for count in counts])
    memory = _mapped(starts[-1])
    made = []
    for count, start, stop in zip(counts, starts, starts[1:], strict=False):
        piece: Array = np.ndarray((count, *trailing), dtype, memory, start)
        if len(counts) > 1:
            weakref.finalize(piece, _give_back, memory, start, stop).atexit = False
        made.append(piece)
    return made


def _is_large(shape: Sequence[int], dtype: Any) -> bool:
    return _CAN_ASK and math.prod(shape) * np.dtype(dtype).itemsize >= LARGE_BYTES and not np.dtype(dtype).hasobject


def _starts(sizes: Sequence[int]) -> list[int]:
    """The starts of pieces of these sizes, each on a page of its own, and the end of the last one."""
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
    """True on a virtual machine that tells its host which of its memory is free."""
    try:
        found = [file.read_text() for file in _BALLOONS.glob("virtio*/features")]
    except OSError:
        return False
    return any(bits[_REPORTS_FREE_PAGES : _REPORTS_FREE_PAGES + 1] == "1" for bits in found)


def _give_back(memory: mmap.mmap, start: int, stop: int) -> None:
    """Return the pages of an unused piece to the operating system."""
    if stop > start:
        memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


# -- reused memory -----------------------------------------------------------------------------------------------------


def _unused(pieces: Sequence[Any], references: int) -> Any:
    """A piece that so many refer to and no more, the list and this function included; None if there is none."""
    for piece in pieces:
        if sys.getrefcount(piece) <= references:
            return piece
    return None


# What counts as a reference differs between versions of Python.
_REFERENCES_WHEN_FREE = next(n for n in range(1, 10) if _unused([object()], n) is not None)


class Memory:
    """Pieces of one size. A piece is free when nothing refers to it any more, so it need not be given back. Safe for
    several threads."""

    def __init__(self, piece_bytes: int, *, keep: int) -> None:
        self.piece_bytes, self._keep = piece_bytes, keep
        self._kept: list[Array] = []
        self._open: Array | None = None  # what `empty` cuts from
        self._at = 0
        self._idle = 0  # how many refer to it while nobody has what was cut from it
        self._prepared = False
        self._lock = threading.Lock()

    def take(self) -> Array:
        """A piece that nothing else uses, with undefined content."""
        with self._lock: return self._take()  # fmt: skip  # noqa: E701 (an interrupt by line finds no gap)

    def _take(self) -> Array:
        piece: Array | None = _unused(self._kept, _REFERENCES_WHEN_FREE)
        if piece is None:
            piece = fresh((self.piece_bytes,), np.uint8)
            if len(self._kept) < self._keep:
                self._kept.append(piece)
        return piece

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array of its own, beside earlier ones in one piece; a small or too large one is elsewhere."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if not _SMALL_BYTES <= nbytes <= self.piece_bytes or np.dtype(dtype).hasobject:
            return np.empty(shape, dtype)
        with self._lock: piece = self._cut(nbytes)  # fmt: skip  # noqa: E701 (as above)
        own: Array = piece.view(dtype).reshape(shape)
        return own

    def _cut(self, nbytes: int) -> Array:
        unused = self._open is not None and sys.getrefcount(self._open) <= self._idle
        if unused or self._open is None or self._at + nbytes > len(self._open):
            self._open = None  # of those that are free the first is taken, of which most was written to before
            self._open, self._at = self._take(), 0
            self._idle = sys.getrefcount(self._open)
        start, self._at = self._at, self._at + -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return self._open[start : start + nbytes]

    def prepare(self) -> None:
        """Once, after `empty` has cut from a piece: have another that was written to, where no more than are kept come
        of it. For the background, as that takes long."""
        with self._lock:
            if self._prepared or self._open is None or len(self._kept) >= self._keep:
                return
            self._prepared = True
            piece = fresh((self.piece_bytes,), np.uint8)
            self._kept.insert(0, piece)  # nobody else takes it as long as it is referred to here
        piece[:: mmap.PAGESIZE] = 0

    def release(self) -> None:
        """Keep no piece that is free."""
        self._kept.clear()
        self._open = None


class Shelf:
    """One piece of memory for bytes of any length, end to end, from several threads."""

    def __init__(self, piece: Array) -> None:
        self._rest = piece.data
        self._lock = threading.Lock()

    def hold(self, data: bytes) -> bytes | memoryview:
        """The same bytes in this memory; as they are given if there is no room left."""
        with self._lock:
            if len(data) > len(self._rest):
                return data
            held, self._rest = self._rest[: len(data)], self._rest[len(data) :]
        held[:] = data
        return held


@cache
def reuse_freed_memory() -> None:
    """Let this process's allocator keep memory that was freed, up to some dozens of MB, for what is allocated next.

    glibc maps large pieces anew each time, until one of that size was freed once: this is that one.
    It is never touched.
    """
    np.empty(_LARGEST_KEPT_BYTES, np.uint8)


def end_to_end(parts: Sequence[Array]) -> Array:
    """The arrays as one; without a copy if they lie so in memory already."""
    if len(parts) == 1:
        return parts[0]
    base: Any = parts[0].base
    if base is None or not all(p.base is base and p.flags.c_contiguous for p in parts) or not _adjacent(parts):
        return np.concatenate(parts)
    shape = (sum(len(p) for p in parts), *parts[0].shape[1:])
    return np.ndarray(shape, parts[0].dtype, buffer=base, offset=_address(parts[0]) - _address(base))


def _adjacent(parts: Sequence[Array]) -> bool:
    first = parts[0]
    alike = all(p.dtype == first.dtype and p.shape[1:] == first.shape[1:] for p in parts)
    return alike and all(_address(a) + a.nbytes == _address(b) for a, b in pairwise(parts))


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
