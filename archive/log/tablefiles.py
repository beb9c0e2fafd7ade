"""Manifest files on the store: segment, chunk, live, checkpoint and branch tables, written whole and read by column."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from archive import tables
from archive.base import ByteRange, CorruptManifestError, MissingObjectError, layout
from archive.log.records import FileRef, StoredFile
from archive.shard import Placed, checksum
from archive.store import Storage
from archive.tables import CHUNK_FILE

if TYPE_CHECKING:
    import pyarrow as pa


def write(storage: Storage, session: str, kind: str, table: pa.Table) -> FileRef:
    """Write a table as a new file, and say how a commit names it."""
    data = tables.dumps(table)
    key = layout.manifest_key(uuid.uuid4().hex[:8], session, kind)
    storage.put(key, data)
    least, most = _bounds(table, "commit")
    return FileRef(
        key, len(data), checksum(data), table.num_rows, None if least is None or most is None else (least, most),
        _bounds(table, "update_count_min")[0], _bounds(table, "update_count_max")[1],
        int(table["length"].to_numpy().sum()) if kind == "segments" else None,
    )  # fmt: skip


def _bounds(table: pa.Table, column: str) -> tuple[int | None, int | None]:
    """Least and greatest value of a column; None where there is none."""
    import pyarrow.compute as pc

    if column not in table.column_names:
        return None, None
    bounds = pc.min_max(table[column]).as_py()
    return bounds["min"], bounds["max"]


class Reads(Protocol):
    """The verbs that reading manifest files takes: of a Storage, or of several roots as one."""

    @property
    def url(self) -> str: ...
    def full_url(self, key: str) -> str: ...
    def get_ranges(self, ranges: Sequence[ByteRange]) -> list[bytes]: ...


def checked(storage: Reads, ref: StoredFile, data: bytes) -> bytes:
    """The bytes of a manifest file, if they are those that the commit names."""
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
    """The rows of several files of one kind (or some columns of them), in their order."""
    return parsed(storage, kind, refs, fetch(storage, refs) if refs else [], columns)


def parsed(
    storage: Reads, kind: str, refs: Sequence[FileRef], found: Sequence[bytes], columns: Sequence[str] | None = None
) -> pa.Table:
    """The rows of files of one kind, from their bytes;
    CorruptManifestError if they are not as many as the commit says."""
    parts = []
    for ref, data in zip(refs, found, strict=True):
        where = storage.full_url(ref.path)
        parts.append(tables.loads(data, kind, where=where, columns=columns))
        if parts[-1].num_rows != ref.rows:
            raise CorruptManifestError(
                f"{where} has {parts[-1].num_rows} rows, the commit says {ref.rows}; run `archive verify`"
            )
    return tables.concat(kind, parts)


def with_chunks(segments: pa.Table, chunks: StoredFile | None) -> pa.Table:
    """Rows of the segments table with the file that has their chunks; null where there is none."""
    for column, value in chunk_columns(chunks).items():
        segments = tables.set_column(segments, column, value)
    return segments


def chunk_columns(chunks: StoredFile | None) -> dict[str, Any]:
    """The columns by which rows name the file that has the chunks of their shards."""
    file = (None, None, None) if chunks is None else (chunks.path, chunks.bytes, chunks.crc32c)
    return dict(zip(CHUNK_FILE, file, strict=True))


def chunk_files(rows: pa.Table) -> dict[str, StoredFile]:
    """Path -> file, of the files that rows of the segments table name for their chunks."""
    columns = (rows[name].to_pylist() for name in CHUNK_FILE)
    return {
        path: StoredFile(path, size or 0, crc or 0)
        for path, size, crc in zip(*columns, strict=True)
        if path is not None
    }


def chunk_rows(key: str, placed: Sequence[Placed]) -> pa.Table:
    """Rows of the chunk table for the members of one shard."""
    names = ("array", "chunk", "rows", "offset", "size", "crc32c")
    columns = {name: [getattr(one, name) for one in placed] for name in names}
    return tables.from_columns("chunks", {"shard": key, "member": [one.name for one in placed], **columns})
