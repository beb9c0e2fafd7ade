"""Pure, no I/O: rows of one stored array in bounded memory, whole chunks at a time;
the least recently used are evicted first.

Rows of a chunk are in pages of one large array, so that rows of any chunks of any shards are one `take`. The large
array's memory is only touched where a page was filled.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from archive.arrays import Ints, fresh
from archive.base import CorruptManifestError
from archive.fields import Array

_PAGE_BYTES = 8192
_EVICTED_SHARE = 32  # at least 1/32 of the pages is evicted at once, so that the oldest are rarely searched for


class RowPool:
    """Chunks, numbered in the order in which their shards were added. Not safe for threads: the owner has a lock."""

    def __init__(self, array: str, dtype: np.dtype[Any], trailing: tuple[int, ...], shards: int) -> None:
        self.array = array
        self.dtype = dtype
        self.trailing = trailing
        self.like = np.empty((0, *trailing), dtype)
        self.row_bytes = max(1, dtype.itemsize * math.prod(trailing))
        self._shift = max(0, (_PAGE_BYTES // self.row_bytes).bit_length() - 1)
        self._mask = (1 << self._shift) - 1
        self.page_bytes = self.row_bytes << self._shift
        self.rows_per_chunk = np.zeros(shards, np.int64)
        self.first_chunk = np.full(shards, -1, np.int64)
        self._stop_chunk = np.zeros(shards, np.int64)
        self.chunks = 0
        self._mapped = 0
        self._first_page = np.zeros(0, np.int64)
        self._page = np.zeros(0, np.int64)
        self.shard_of = np.zeros(0, np.int32)
        self._used = np.zeros(0, np.int64)
        self.present = np.zeros(0, np.bool_)
        self.on_disk = np.zeros(0, np.bool_)
        self._rows = np.empty((0, *trailing), dtype)
        self._free = np.zeros(0, np.int64)
        self._pages = 0
        self._fresh = 0
        self._batch = 0
        self._added = 0
        self.complete = not shards  # all were added

    def resize(self, max_bytes: int) -> None:
        """Hold at most these bytes from now on; the content stays if the room grows,
        and is dropped if it shrinks."""
        pages = max_bytes // self.page_bytes
        if pages == self._pages:
            return
        if pages < self._fresh:
            self._page[:], self.present[:] = -1, False
            self._free, self._fresh = np.zeros(0, np.int64), 0
        rows = fresh((pages << self._shift, *self.trailing), self.dtype)
        taken = self._fresh << self._shift
        rows[:taken] = self._rows[:taken]
        self._rows, self._pages = rows, pages

    @property
    def max_bytes(self) -> int:
        return self._pages * self.page_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the empty pages."""
        return (self._pages - self._fresh + len(self._free)) * self.page_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes that the largest chunk takes."""
        return self._chunk_pages(int(self.rows_per_chunk.max(initial=1))) * self.page_bytes

    @property
    def touched_bytes(self) -> int:
        """Bytes of the pages that ever were filled, which are the process's memory for them."""
        return self._fresh * self.page_bytes

    def knows(self, shards: Ints) -> Any:
        """Mask of the shards that were added."""
        return self.first_chunk[shards] >= 0

    def add_shard(self, shard: int, rows_per_chunk: int, chunks: int) -> None:
        """Make room for the numbers of its chunks; no data yet."""
        pages, first = self._chunk_pages(rows_per_chunk), self.chunks
        self.chunks += chunks
        self._first_page = _longer(self._first_page, self.chunks, 0)
        self._first_page[first : self.chunks] = self._mapped + pages * np.arange(chunks)
        self._mapped += pages * chunks
        self._page = _longer(self._page, self._mapped, -1)
        self.shard_of = _longer(self.shard_of, self.chunks, 0)
        self.shard_of[first : self.chunks] = shard
        self._used = _longer(self._used, self.chunks, 0)
        self.present = _longer(self.present, self.chunks, False)
        self.on_disk = _longer(self.on_disk, self.chunks, False)
        self.rows_per_chunk[shard], self.first_chunk[shard] = rows_per_chunk, first
        self._stop_chunk[shard] = self.chunks
        self._added += 1
        self.complete = self._added == len(self.first_chunk)

    def locate(self, shards: Ints, rows: Ints) -> tuple[Ints, Ints]:
        """The number of the chunk that has each row of a shard, and its row in it."""
        number, row = np.divmod(rows, self.rows_per_chunk[shards])
        chunk = number + self.first_chunk[shards]
        if len(chunk) and (int(rows.min()) < 0 or (chunk >= self._stop_chunk[shards]).any()):
            raise CorruptManifestError(
                f"the segments table names rows of {self.array!r} that no chunk of its shard holds; run `archive "
                "verify`"
            )
        return chunk, row

    def find(self, chunk: Ints, row: Ints, batch: int) -> Ints:
        """The places of rows here, below 0 for those of absent chunks. The newest batch's chunks are not evicted."""
        self._batch = batch
        self._used[chunk] = batch
        places: Ints = self._page[self._first_page[chunk] + (row >> self._shift)]  # of a page that is not here: -1
        places <<= self._shift
        places += row & self._mask
        return places

    def deliver(self, places: Ints, out: Array, at: Ints | None) -> None:
        """Copy the rows at these places into rows `at` of an array, or into all of its rows."""
        if at is None:
            self._rows.take(places, axis=0, out=out, mode="clip")
        elif len(at) and int(at[-1]) - int(at[0]) == len(at) - 1 and (np.diff(at) == 1).all():
            np.take(self._rows, places, axis=0, out=out[int(at[0]) : int(at[-1]) + 1], mode="clip")
        else:
            out[at] = np.take(self._rows, places, axis=0, mode="clip")

    def put(self, chunk: int, values: Array) -> bool:
        """Keep a chunk's rows; False if there is no room but that of this batch."""
        if self.present[chunk]:
            return True
        pages = self._chunk_pages(int(self.rows_per_chunk[self.shard_of[chunk]]))  # the last chunk may come short
        found = self._allocate(pages)
        if found is None:
            return False
        self._copy(found, values)
        first = int(self._first_page[chunk])
        self._page[first : first + pages] = found
        self._used[chunk], self.present[chunk] = self._batch, True
        return True

    def _copy(self, pages: Any, values: Array) -> None:
        size = 1 << self._shift
        start = int(pages[0]) << self._shift
        if int(pages[-1]) - int(pages[0]) == len(pages) - 1 and (np.diff(pages) == 1).all():
            self._rows[start : start + len(values)] = values
            return
        for i, page in enumerate(pages.tolist()):
            part = values[i * size : (i + 1) * size]
            self._rows[page * size : page * size + len(part)] = part

    def _chunk_pages(self, rows: int) -> int:
        return -(-rows // (1 << self._shift))

    def _allocate(self, pages: int) -> Any:
        if pages > self._pages:
            return None
        if len(self._free) < pages <= self._pages - self._fresh:
            self._fresh += pages
            return np.arange(self._fresh - pages, self._fresh, dtype=np.int64)
        if len(self._free) < pages:
            self._evict(max(pages, self._pages // _EVICTED_SHARE))
        if len(self._free) < pages:
            return None
        found, self._free = self._free[:pages], self._free[pages:]
        return found

    def _evict(self, pages: int) -> None:
        """Evict the oldest chunks that this batch does not use, until this many pages are free."""
        old = np.flatnonzero(self.present & (self._used < self._batch))
        old = old[np.argsort(self._used[old], kind="stable")]
        counts = -(-self.rows_per_chunk[self.shard_of[old]] // (1 << self._shift))
        rest = np.arange(self._fresh, self._pages, dtype=np.int64)
        self._fresh, freed = self._pages, [self._free, rest]
        enough = int((np.cumsum(counts) < pages - len(self._free) - len(rest)).sum()) + 1
        for chunk, count in zip(old[:enough].tolist(), counts[:enough].tolist(), strict=True):
            first = int(self._first_page[chunk])
            freed.append(self._page[first : first + count].copy())
            self._page[first : first + count] = -1
            self.present[chunk] = False
        self._free = np.sort(np.concatenate(freed))


def _longer(array: Array, size: int, fill: Any) -> Array:
    """The array, at least `size` long; it doubles if it has to grow, so that adding one by one stays cheap."""
    if len(array) >= size:
        return array
    out = np.full(max(size, 2 * len(array)), fill, array.dtype)
    out[: len(array)] = array
    return out
