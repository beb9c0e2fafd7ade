"""Manifest files on the store: segment, chunk, live, checkpoint and branch tables, written whole and read by column."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from archive.base import ByteRange, CorruptManifestError, MissingObjectError, layout
from archive.manifest import tables
from archive.manifest.branches import Branches
from archive.manifest.commits import Body, Commit
from archive.manifest.folding import files_to_keep
from archive.shard import checksum
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

FileRef = dict[str, Any]


def write(storage: Storage, session: str, kind: str, table: pa.Table) -> FileRef:
    """Write a table as a new file; what a commit says of it."""
    data = tables.dumps(table)
    key = layout.manifest_key(uuid.uuid4().hex[:8], session, kind)
    storage.put(key, data)
    ref: FileRef = {"path": key, "rows": table.num_rows, "bytes": len(data), "crc32c": checksum(data)}
    return ref | _bounds(table)


def _bounds(table: pa.Table) -> FileRef:
    import pyarrow.compute as pc

    out: FileRef = {}
    for name, column in (
        ("commit", "commit"),
        ("update_count_min", "update_count_min"),
        ("update_count_max", "update_count_max"),
    ):
        if column in table.column_names and table.num_rows:
            bounds = pc.min_max(table[column]).as_py()
            if bounds["min"] is not None:
                out[name] = [bounds["min"], bounds["max"]] if name == "commit" else bounds[name.rsplit("_", 1)[1]]
    return out


class Reads(Protocol):
    """What reading manifest files takes: a Storage, or several roots as one."""

    @property
    def url(self) -> str: ...
    def full_url(self, key: str) -> str: ...
    def get_ranges(self, ranges: Sequence[ByteRange]) -> list[bytes]: ...


def checked(storage: Reads, ref: Mapping[str, Any], data: bytes) -> bytes:
    """The bytes of a manifest file, if they are those that the commit names."""
    if len(data) != ref["bytes"] or checksum(data) != ref["crc32c"]:
        raise CorruptManifestError(
            f"{storage.full_url(ref['path'])} does not match the checksum in its commit: {len(data)} bytes, "
            f"{ref['bytes']} expected; run `archive verify`"
        )
    return data


def fetch(storage: Reads, refs: Sequence[FileRef]) -> list[bytes]:
    """The checked bytes of manifest files, fetched together."""
    try:
        parts = storage.get_ranges([ByteRange(ref["path"], 0, ref["bytes"]) for ref in refs])
    except MissingObjectError as e:
        raise MissingObjectError(f"a manifest file that a commit names is gone: {e}; run `archive verify`") from e
    return [checked(storage, ref, data) for ref, data in zip(refs, parts, strict=True)]


def load(storage: Storage, kind: str, ref: FileRef) -> pa.Table:
    (data,) = fetch(storage, [ref])
    return tables.loads(data, kind, where=storage.full_url(ref["path"]))


def add_rows(
    storage: Storage, session: str, kind: str, parent: Commit, new: pa.Table | None, *, fold: bool
) -> tuple[Body, list[FileRef]]:
    """Write new rows of a folded table (segments, checkpoints, branches): the commit's list of files, with the new one.

    The commit number is filled in here. The newest files are folded into the new one as `folding` says, unless the
    commit has lost a race: then speed matters more.
    """
    present = parent.files(kind)
    if new is None or new.num_rows == 0:
        return {kind: present}, present
    new = tables.set_column(new, "commit", parent.number + 1)
    keep = len(present)
    if fold:
        keep = files_to_keep([f["rows"] for f in present], [f["bytes"] for f in present], new.num_rows)
    older = fetch(storage, present[keep:])
    parts = [tables.loads(d, kind, where=f["path"]) for d, f in zip(older, present[keep:], strict=True)]
    files = [*present[:keep], write(storage, session, kind, tables.concat(kind, [*parts, new]))]
    return {kind: files}, files


class Snapshot:
    """The segments table as one commit sees it, loaded by column; immutable, so what was read is kept."""

    def __init__(self, storage: Storage, commit: Commit) -> None:
        self.storage, self.commit = storage, commit
        self._bytes: list[bytes] | None = None
        self._columns: dict[str, pa.ChunkedArray] = {}
        self._branches: Branches | None = None

    @property
    def rows(self) -> int:
        return sum(f["rows"] for f in self.commit.files("segments"))

    def columns(self, names: Sequence[str]) -> pa.Table:
        """These columns of the segments table, in the order of the files."""
        import pyarrow as pa

        missing = [n for n in names if n not in self._columns]
        if missing:
            files = self.commit.files("segments")
            if self._bytes is None:
                self._bytes = fetch(self.storage, files)
            parts = [
                tables.loads(data, "segments", where=self.storage.full_url(ref["path"]), columns=missing)
                for data, ref in zip(self._bytes, files, strict=True)
            ]
            table = pa.concat_tables(parts).unify_dictionaries() if parts else tables.schema("segments").empty_table()
            self._columns.update({n: table[n] for n in missing})
        return pa.table({n: self._columns[n] for n in names})

    @property
    def branches(self) -> Branches:
        """Which sessions went on from which: nothing is fetched where none did."""
        if self._branches is None:
            files = self.commit.files("branches")
            parts = zip(fetch(self.storage, files), files, strict=True) if files else ()
            found = [tables.loads(d, "branches", where=self.storage.full_url(f["path"])) for d, f in parts]
            self._branches = Branches.of(tables.concat("branches", found))
        return self._branches

    def take(self, rows: Any, names: Sequence[str]) -> pa.Table:
        import pyarrow as pa

        return self.columns(names).take(pa.array(rows))

    def __getstate__(self) -> dict[str, Any]:
        return {"storage": self.storage, "commit": self.commit, "_bytes": None, "_columns": {}, "_branches": None}
