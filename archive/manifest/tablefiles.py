"""Manifest files on the store: segment, chunk, live, checkpoint and branch tables, written whole and read by column."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, Self

from archive import tables
from archive.base import ByteRange, CorruptManifestError, MissingObjectError, layout
from archive.manifest.branches import Branches
from archive.manifest.commit import Commit
from archive.manifest.records import FileRef, StoredFile
from archive.shard import checksum, packing
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
    """What reading manifest files takes: a Storage, or several roots as one."""

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
    """What rows say of the file that has the chunks of their shards, by column."""
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


def write_shard(storage: Storage, key: str, members: Sequence[packing.Member], archive_layout: str) -> pa.Table:
    """Write one encoded shard; its rows of the chunk table."""
    if archive_layout == "packed":
        buffers, placed = packing.pack(members)
        storage.put(key, buffers)
    else:
        objects, placed = packing.loose(members)
        storage.put_many((f"{key}/{name}", data) for name, data in objects)
    return chunk_rows(key, placed)


def chunk_rows(key: str, placed: Sequence[packing.Placed]) -> pa.Table:
    """Rows of the chunk table for the members of one shard."""
    names = ("array", "chunk", "rows", "offset", "size", "crc32c")
    columns = {name: [getattr(one, name) for one in placed] for name in names}
    return tables.from_columns("chunks", {"shard": key, "member": [one.name for one in placed], **columns})


class Later:
    """What was said of episodes, and added to them, after they were written; as of one commit. An archive shares it
    with its checkpoints, whose own commits may be older."""

    def __init__(self, storage: Storage, head: Commit, *, read_only: bool = False) -> None:
        """head: the commit whose labels and late fields count; read_only: it stays that one."""
        self.storage = storage
        self.head = head
        self.read_only = read_only
        self._tables: dict[str, tuple[tuple[FileRef, ...], pa.Table]] = {}

    def show(self, head: Commit) -> None:
        """What others said until then counts, too."""
        if head.number > self.head.number:
            self.head = head

    def without_fields(self) -> Later:
        """The same, but for the fields that were added."""
        return Later(self.storage, replace(self.head, late=None), read_only=True)

    @property
    def labels(self) -> pa.Table:
        """The rows of the labels table, oldest first: nothing is fetched where there are none."""
        return self._rows("labels")

    @property
    def late(self) -> pa.Table:
        """The rows of the late table, oldest first: nothing is fetched where there are none."""
        return self._rows("late")

    def _rows(self, kind: str) -> pa.Table:
        files = self.head.files(kind)
        if kind not in self._tables or self._tables[kind][0] != files:
            self._tables[kind] = files, load(self.storage, kind, files)
        return self._tables[kind][1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}}


class Snapshot:
    """The segments table as one commit sees it, or its newest files, loaded by column; immutable, so what was read is
    kept. `later`: what was said of its episodes since; `files`: those whose rows it has, oldest first."""

    def __init__(
        self, storage: Storage, commit: Commit, later: Later | None = None, *, read_only: bool = False
    ) -> None:  # fmt: skip
        self.storage = storage
        self.commit = commit
        self.later = Later(storage, commit, read_only=read_only) if later is None else later
        self.files = commit.files("segments")
        self._bytes: dict[str, bytes] = {}  # path of a file -> what it holds
        self._columns: dict[str, pa.ChunkedArray] = {}
        self._branches: Branches | None = None
        self._rows: int | None = None  # where they are given

    @classmethod
    def of(cls, storage: Storage, commit: Commit, table: pa.Table) -> Self:
        """With these rows (all of its columns, or those that will be asked for) instead of the commit's."""
        out = cls(storage, commit)
        out._columns = {name: table[name] for name in table.column_names}
        out._rows = table.num_rows
        return out

    def as_of(self, commit: Commit) -> Snapshot:
        """As another commit sees it; what was read is kept where that has the same."""
        out = Snapshot(self.storage, commit, read_only=self.later.read_only)
        if self.commit.same_episodes(commit):
            self._give(out)
        return out

    def as_written(self) -> Snapshot:
        """The same, without the fields that were added later; what was read is kept."""
        out = Snapshot(self.storage, self.commit, self.later.without_fields())
        self._give(out)
        return out

    def _give(self, other: Snapshot) -> None:
        """Let one that has the same rows have what was read."""
        other.files, other._bytes = self.files, self._bytes
        other._columns, other._branches, other._rows = self._columns, self._branches, self._rows

    def newest(self, count: int) -> Snapshot:
        """Only the rows of so many of its newest files, which are fetched once for all that have them."""
        out = Snapshot(self.storage, self.commit, self.later)
        out.files = self.files[len(self.files) - count :]
        out._bytes, out._branches = self._bytes, self._branches
        return out

    @property
    def older(self) -> tuple[FileRef, ...]:
        """The files of the table whose rows it has not."""
        every = self.commit.files("segments")
        return every[: len(every) - len(self.files)]

    @property
    def rows(self) -> int:
        return sum(f.rows for f in self.files) if self._rows is None else self._rows

    def columns(self, names: Sequence[str]) -> pa.Table:
        """These columns of the segments table, in the order of the files."""
        import pyarrow as pa

        missing = [n for n in names if n not in self._columns]
        if missing:
            table = parsed(self.storage, "segments", self.files, self._fetched(), missing)
            self._columns.update({n: table[n] for n in missing})
        return pa.table({n: self._columns[n] for n in names})

    def _fetched(self) -> list[bytes]:
        """What its files hold."""
        lacking = [ref for ref in self.files if ref.path not in self._bytes]
        if lacking:
            found = fetch(self.storage, lacking)
            self._bytes.update(zip((ref.path for ref in lacking), found, strict=True))
        return [self._bytes[ref.path] for ref in self.files]

    @property
    def branches(self) -> Branches:
        """Which sessions went on from which: nothing is fetched where none did."""
        if self._branches is None:
            self._branches = Branches.of(load(self.storage, "branches", self.commit.files("branches")))
        return self._branches

    def take(self, rows: Any, names: Sequence[str]) -> pa.Table:
        import pyarrow as pa

        return self.columns(names).take(pa.array(rows))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_bytes": {}, "_columns": {}, "_branches": None, "_rows": None}
