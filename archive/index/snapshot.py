"""The tables of an archive as of one commit, read when they are asked for: the segments table and those beside it, with
the labels and derived columns of the archive's newest commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from archive import tables
from archive.arrays import arrow
from archive.base import MissingObjectError, at_once, layout
from archive.index.chains import Branches
from archive.log import Commit, FileRef, sessions, tablefiles
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

_AT_ONCE = 16  # claims


class Annotations:
    """Labels of episodes, and derived columns, as of one commit. An archive shares it with its checkpoints, whose own
    commits may be older."""

    def __init__(self, storage: Storage, head: Commit, *, read_only: bool = False) -> None:
        """head: the commit whose labels and derived columns apply; read_only: it stays that one."""
        self.storage = storage
        self.head = head
        self.read_only = read_only
        self._tables: dict[str, tuple[tuple[FileRef, ...], pa.Table]] = {}

    def show(self, head: Commit) -> None:
        """Apply what others committed up to that commit, too."""
        if head.number > self.head.number:
            self.head = head

    def without_fields(self) -> Annotations:
        """The same without derived columns."""
        return Annotations(self.storage, replace(self.head, late=None), read_only=True)

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
            self._tables[kind] = files, tablefiles.load(self.storage, kind, files)
        return self._tables[kind][1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}}


class Snapshot:
    """The segments table as of one commit, or its newest files, loaded by column. It is immutable, so what was read is
    kept. `later`: labels and derived columns; `files`: the files whose rows it has, oldest first."""

    def __init__(self, storage: Storage, commit: Commit, annotations: Annotations | None = None) -> None:
        self.storage = storage
        self.commit = commit
        self.annotations = Annotations(storage, commit) if annotations is None else annotations
        self.files = commit.files("segments")
        self._bytes: dict[str, bytes] = {}  # path of a file -> its content
        self._columns: dict[str, pa.ChunkedArray] = {}
        self._branches: Branches | None = None
        self._rows: int | None = None  # set where the rows are given
        self.chunk_rows: pa.Table | None = None  # of the chunk table, where they are given with these

    @classmethod
    def of(
        cls,
        storage: Storage,
        commit: Commit,
        table: pa.Table,
        annotations: Annotations | None = None,
        chunks: pa.Table | None = None,
    ) -> Self:
        """A snapshot with these rows (all columns, or those that will be asked for) instead of the commit's. chunks:
        rows of the chunk table, which then need not be read."""
        out = cls(storage, commit, annotations)
        out.chunk_rows = chunks
        out._columns = {name: table[name] for name in table.column_names}
        out._rows = table.num_rows
        return out

    def as_of(self, commit: Commit) -> Snapshot:
        """The table as of another commit; what was read is kept where that has the same."""
        annotations = Annotations(self.storage, commit, read_only=self.annotations.read_only)
        same = self.commit.same_episodes(commit)
        return (
            self._but(commit=commit, annotations=annotations) if same else Snapshot(self.storage, commit, annotations)
        )

    def as_written(self) -> Snapshot:
        """The same without derived columns; what was read is kept."""
        return self._but(annotations=self.annotations.without_fields())

    def frozen(self) -> Snapshot:
        """The same, which later labels and derived columns do not reach; what was read is kept."""
        return self._but(annotations=Annotations(self.storage, self.annotations.head, read_only=True))

    def newest(self, count: int) -> Snapshot:
        """The rows of `count` of its newest files alone, which are fetched once for all that have them."""
        return self._but(files=self.files[len(self.files) - count :], _columns={}, _rows=None)

    def _but(self, **changes: Any) -> Snapshot:
        """A copy with these attributes changed; it shares what was read."""
        out = object.__new__(Snapshot)
        out.__dict__.update(self.__dict__ | changes)
        return out

    @property
    def older(self) -> tuple[FileRef, ...]:
        """The files of the table whose rows it does not have."""
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
            table = tablefiles.parsed(self.storage, "segments", self.files, self._fetched(), missing)
            self._columns.update({n: table[n] for n in missing})
        return pa.table({n: self._columns[n] for n in names})

    def in_parts(self) -> Iterator[pa.Table]:
        """All columns of its rows, in their order, some rows at a time, which are not kept."""
        for ref, data in zip(self.files, self._fetched(), strict=True):
            yield from tables.loads_in_parts(data, "segments", where=self.storage.full_url(ref.path))

    def _fetched(self) -> list[bytes]:
        """The bytes of its files."""
        lacking = [ref for ref in self.files if ref.path not in self._bytes]
        if lacking:
            found = tablefiles.fetch(self.storage, lacking)
            self._bytes.update(zip((ref.path for ref in lacking), found, strict=True))
        return [self._bytes[ref.path] for ref in self.files]

    @property
    def branches(self) -> Branches:
        """The recorded resumes; nothing is fetched if there are none."""
        if self._branches is None:
            self._branches = Branches.of(tablefiles.load(self.storage, "branches", self.commit.files("branches")))
        return self._branches

    def take(self, rows: Any, names: Sequence[str]) -> pa.Table:
        return self.columns(names).take(arrow(np.asarray(rows, np.int64)))

    def __getstate__(self) -> dict[str, Any]:
        given: dict[str, Any] = (
            {} if self._rows is not None else {"_columns": {}}
        )  # rows that were given cannot be read again
        return self.__dict__ | {"_bytes": {}, "_branches": None, **given}


def run_of_session(snapshot: Snapshot) -> dict[str, str | None]:
    """Session -> run, for all sessions that have rows; None where it is recorded nowhere.

    A commit names each run's newest session and the hundred before it. For others, and for sessions that came with
    the episodes of another archive, the claim of one of their ranks names the run.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    runs = snapshot.commit.runs.items()
    known: dict[str, str | None] = {session: run for run, entry in runs for session in entry.sessions}
    table = snapshot.columns(["session", "rank"])
    names = table["session"].cast(pa.string())

    def claimed(session: str) -> str | None:
        rank = table["rank"][pc.index(names, session).as_py()].as_py()
        try:
            return sessions.read_claim(snapshot.storage, layout.rank_key(session, rank)).run or None
        except MissingObjectError:
            return None

    unknown = [session for session in tables.distinct(names) if session not in known]
    return known | dict(zip(unknown, at_once(claimed, unknown, _AT_ONCE), strict=True))
