"""Manifest files on the store: segment, chunk, live, checkpoint and branch tables, written whole and read by column."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from archive import tables
from archive.arrays import arrow
from archive.base import ByteRange, CorruptManifestError, MissingObjectError, layout
from archive.log.records import FileRef, StoredFile
from archive.shard import Placed, checksum
from archive.store import Storage, under_fresh_name
from archive.tables import CHUNK_FILE

if TYPE_CHECKING:
    import pyarrow as pa

MAX_FOLDED_BYTES = 32 * 1024 * 1024
_RECENT_ROWS = 256  # new segments go into the newest file while it holds at most this many rows,
_RECENT_COMMITS = 8  # or as many as are new, so often
_LONG = 4  # this many neighbours that may become one are joined even where the newest file takes the new rows


def write(storage: Storage, session: str, kind: str, table: pa.Table) -> FileRef:
    """Write a table as a new file; its FileRef."""
    data = tables.dumps(table)
    name = lambda: layout.manifest_key(uuid.uuid4().hex[:8], session, kind)  # noqa: E731
    key, _ = under_fresh_name(name, lambda key: storage.put_fresh(key, data))
    least, most = _bounds(table, "commit")
    return FileRef(
        key,
        len(data),
        checksum(data),
        table.num_rows,
        None if least is None or most is None else (least, most),
        _bounds(table, "update_count_min")[0],
        _bounds(table, "update_count_max")[1],
        int(table["length"].to_numpy().sum()) if kind == "segments" else None,
    )


def _bounds(table: pa.Table, column: str) -> tuple[int | None, int | None]:
    """Least and greatest value of a column; None where there is none."""
    import pyarrow.compute as pc

    if column not in table.column_names:
        return None, None
    bounds = pc.min_max(table[column]).as_py()
    return bounds["min"], bounds["max"]


class Reads(Protocol):
    """The verbs that reading manifest files needs: of a Storage, or of several roots as one."""

    @property
    def url(self) -> str: ...
    def full_url(self, key: str) -> str: ...
    def get_ranges(self, ranges: Sequence[ByteRange]) -> list[bytes]: ...


def checked(storage: Reads, ref: StoredFile, data: bytes) -> bytes:
    """The bytes of a manifest file; they must match the commit that names it."""
    if len(data) != ref.bytes or checksum(data) != ref.crc32c:
        raise CorruptManifestError(
            f"{storage.full_url(ref.path)} does not match the checksum in its commit: {len(data)} bytes, "
            f"{ref.bytes} expected; run `archive verify`"
        )
    return data


def fetch(storage: Reads, refs: Sequence[StoredFile]) -> list[bytes]:
    """The checked bytes of manifest files, fetched together."""
    try:
        parts = storage.get_ranges([ByteRange(ref.path, 0, ref.bytes) for ref in refs])
    except MissingObjectError as e:
        raise MissingObjectError(f"a manifest file that a commit names is gone: {e}; run `archive verify`") from e
    return [checked(storage, ref, data) for ref, data in zip(refs, parts, strict=True)]


def load(storage: Reads, kind: str, refs: Sequence[FileRef], columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of several files of one kind (all columns, or some), in their order."""
    return parsed(storage, kind, refs, fetch(storage, refs) if refs else [], columns)


def parsed(
    storage: Reads, kind: str, refs: Sequence[FileRef], found: Sequence[bytes], columns: Sequence[str] | None = None
) -> pa.Table:
    """The rows of files of one kind, decoded; CorruptManifestError if the commit has another number of rows."""
    parts = []
    for ref, data in zip(refs, found, strict=True):
        where = storage.full_url(ref.path)
        table = tables.loads(data, kind, where=where, columns=columns)
        if table.num_rows != ref.rows:
            raise CorruptManifestError(
                f"{where} has {table.num_rows} rows, the commit says {ref.rows}; run `archive verify`"
            )
        parts.append(table)
    return tables.concat(kind, parts)


def with_chunks(segments: pa.Table, chunks: StoredFile | None) -> pa.Table:
    """Rows of the segments table with the file of their chunks; null where there is none."""
    for column, value in chunk_columns(chunks).items():
        segments = tables.set_column(segments, column, value)
    return segments


def chunk_columns(chunks: StoredFile | None) -> dict[str, Any]:
    """The columns by which rows name the file of their shards' chunks."""
    file = (None, None, None) if chunks is None else (chunks.path, chunks.bytes, chunks.crc32c)
    return dict(zip(CHUNK_FILE, file, strict=True))


def chunk_files(rows: pa.Table) -> dict[str, StoredFile]:
    """Path -> file, of the chunk files that rows of the segments table name."""
    code = tables.coded(rows[CHUNK_FILE[0]])[1]
    named, first = np.unique(code, return_index=True)
    found = rows.select(CHUNK_FILE).take(arrow(first[named >= 0]))
    columns = (found[name].to_pylist() for name in CHUNK_FILE)
    return {path: StoredFile(path, size or 0, crc or 0) for path, size, crc in zip(*columns, strict=True)}


def chunk_rows(key: str, placed: Sequence[Placed]) -> pa.Table:
    """Rows of the chunk table for the members of one shard."""
    names = ("array", "chunk", "rows", "offset", "size", "crc32c")
    columns = {name: [getattr(one, name) for one in placed] for name in names}
    return tables.from_columns("chunks", {"shard": key, "member": [one.name for one in placed], **columns})


# -- folding -----------------------------------------------------------------------------------------------------------


def fold(rows: Sequence[int], sizes_bytes: Sequence[int], new_rows: int, *, least: int = 2) -> tuple[int, int, int]:
    """The place of new rows in the list of segments files: (start, stop, keep).

    The neighbours [start, stop) become one; `keep` files stay, the others join the new rows. least: the fewest files
    to join. `rows` and `sizes_bytes` are of the present files, oldest first.
    """
    keep, newer = len(rows), new_rows
    if is_recent(rows, sizes_bytes, new_rows):
        keep, newer, least = keep - 1, newer + rows[-1], max(least, _LONG)
    start, stop = files_to_join(rows[:keep], sizes_bytes[:keep], newer)
    return (start, stop, keep) if stop - start >= least else (0, 0, keep)


def is_recent(rows: Sequence[int], sizes_bytes: Sequence[int], new_rows: int) -> bool:
    """True if new segments go into the newest file, which is then written anew.

    `rows` and `sizes_bytes` are of the present files, oldest first.
    """
    most = max(_RECENT_ROWS, _RECENT_COMMITS * new_rows)
    return bool(rows) and rows[-1] + new_rows <= most and sizes_bytes[-1] <= MAX_FOLDED_BYTES


def files_to_join(rows: Sequence[int], sizes_bytes: Sequence[int], new_rows: int) -> tuple[int, int]:
    """The neighbours [start, stop) of the present segments files to be joined before new rows get a file of their own;
    none if start == stop.

    A joined file holds at most twice the rows of all newer ones together: a reader finds what was written last
    in small files, at any age. It holds at least twice the rows of any that it is made of, so that there are few files
    (some 13 after 10,000 commits of like size), and a row is rewritten a few times at most.

    `rows` and `sizes_bytes` are of these files, oldest first. Files too large to fold stay.
    """
    most, best = 0, (0, 0)
    newer = new_rows
    for stop in range(len(rows), 0, -1):
        total = largest = 0
        for start in range(stop - 1, -1, -1):
            total, largest = total + rows[start], max(largest, rows[start])
            if sizes_bytes[start] > MAX_FOLDED_BYTES or total > 2 * newer:
                break
            if total >= 2 * largest and total > most:
                most, best = total, (start, stop)
        newer += rows[stop - 1]
    return best


def files_to_keep(rows: Sequence[int], sizes_bytes: Sequence[int], new_rows: int) -> int:
    """The number of oldest files that stay as they are; the others are merged with the new rows.

    Each file holds at least twice the rows of all newer ones together. So there are few files at any age (at most 13
    after 10,000 commits of like size), and a row is rewritten a few times at most.

    `rows` and `sizes_bytes` are of the present files, oldest first. Files too large to fold stay, and so do all
    that are older than one of them.
    """
    large = [i for i, size in enumerate(sizes_bytes) if size > MAX_FOLDED_BYTES]
    first = large[-1] + 1 if large else 0
    newer = new_rows
    keep = len(rows)
    for i in range(len(rows) - 1, first - 1, -1):
        if rows[i] < 2 * newer:
            keep = i
        newer += rows[i]
    return keep
