"""Engine: the commit of a forgetting, made of what stays: written, or only counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from archive.base import layout
from archive.maintain import sealing
from archive.maintain.keeping import CheckpointFate
from archive.maintain.moving import Moved, replaced
from archive.maintain.objects import Sizes, no_longer
from archive.maintain.retained import walk
from archive.maintain.serving import serves
from archive.maintain.standing import Mask
from archive.manifest import Commit, FileRef, Mark, RunEntry, Snapshot, commits, tablefiles, tables
from archive.read import latefields
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

Files = tuple[FileRef, ...] | None
Place = tuple[int, int | None]  # of a checkpoint: its commit, and the one with whose tables it is read, if another
Write = Callable[[str, "pa.Table"], FileRef]
_AT_ONCE = 256


@dataclass(frozen=True)
class Decided:
    """What stays of an archive as of a commit: the rows of its segments table, and the checkpoints."""

    snapshot: Snapshot
    rows: Mask
    fates: Sequence[CheckpointFate]
    moved: Moved | None = None
    late: pa.Table | None = None  # rows of the table of late fields, where they are not as they were

    @property
    def parent(self) -> Commit:
        """As of which commit."""
        return self.snapshot.commit

    @property
    def kept(self) -> list[CheckpointFate]:
        """The checkpoints that stay."""
        return [one for one in self.fates if one.stays]

    @property
    def empty(self) -> bool:
        """Whether nothing goes."""
        return bool(self.rows.all()) and len(self.kept) == len(self.fates)

    def table(self) -> pa.Table:
        """The rows of the segments table that stay."""
        table = self.snapshot.columns(tables.schema("segments").names)
        if self.moved is not None and len(self.moved.rows):
            table = replaced(table, self.moved)
        return _taken(table, self.rows)


@dataclass(frozen=True)
class Draft:
    """The commit, without its table of what was forgotten; the objects that it no longer leads to; its checkpoints, and
    with which tables they are read."""

    commit: Commit
    gone: Sizes
    places: frozenset[Place]


def unwritten(kind: str, table: pa.Table) -> FileRef:
    """A file that is named, but not written."""
    return FileRef(layout.manifest_key("planned", "forget", kind), 0, 0, table.num_rows)


def draft(decided: Decided, session: str, write: Write, known: Mapping[int, Commit]) -> Draft:
    """The commit that lets go, as it would follow its parent. known: commits of the checkpoints that stay."""
    parent, storage = decided.parent, decided.snapshot.storage
    finds = walk(storage)
    before = finds.reach(parent)
    made = replace(_numbered(parent, session), chunks=None if decided.moved is None else decided.moved.chunks)
    rows = decided.snapshot
    if not decided.rows.all():
        table = decided.table()
        ref = write("segments", table)
        finds.know(ref, table)
        rows = Snapshot.of(storage, made, table)
        made = replace(made, segments=(ref,) if table.num_rows else (), ledger=_ledger(decided, table, write))
        labels, late = _beside(decided, table, write, finds.know)
        made = replace(made, labels=labels, late=late)
    served = _Serving(storage, parent, known, rows, made.number)
    places = {one.commit: served.manifest(one.commit, one.manifest) for one in decided.kept}
    runs = {run: _marked(entry, served) for run, entry in parent.runs.items()}
    made = replace(made, runs=runs, checkpoints=_checkpoint_files(storage, parent, places, write))
    marks = {(m.commit, m.manifest) for entry in runs.values() for m in entry.marks.values()}
    every = {*places.items()} | marks
    after = finds.reach(made, every)
    return Draft(made, no_longer(storage, before.keys, after.keys), frozenset(every))


def commits_of(storage: Storage, parent: Commit, fates: Sequence[CheckpointFate]) -> dict[int, Commit]:
    """The commits of checkpoints, and of those that runs name as their newest, by number."""
    marks = {mark.commit for entry in parent.runs.values() for mark in entry.marks.values()}
    numbers = sorted(marks | {one.commit for one in fates})
    return dict(read_commits(storage, parent, numbers))


def read_commits(storage: Storage, head: Commit, numbers: Sequence[int]) -> Iterator[tuple[int, Commit]]:
    """Commits by their numbers, many at once."""
    for at in range(0, len(numbers), _AT_ONCE):
        some = numbers[at : at + _AT_ONCE]
        data = storage.get_all([layout.commit_key(number) for number in some])
        yield from ((n, commits.loads_of(storage, one, n, head)) for n, one in zip(some, data, strict=True))


def _numbered(parent: Commit, session: str) -> Commit:
    number = parent.number + 1
    return replace(parent.after("forget", session=session, let_go=number), number=number, archive=parent.archive)


def _taken(table: pa.Table, rows: Mask) -> pa.Table:
    import pyarrow as pa

    return tables.only_used(table.filter(pa.array(rows)))


# -- by which tables checkpoints are read ------------------------------------------------------------------------------


class _Serving:
    """Finds out which checkpoints are the same with the new rows."""

    def __init__(
        self, storage: Storage, parent: Commit, known: Mapping[int, Commit], rows: Snapshot, number: int
    ) -> None:  # fmt: skip
        self._storage = storage
        self._parent = parent
        self._known = known
        self._new = rows
        self._number = number
        self._before: dict[int, Snapshot] = {}
        self._found: dict[tuple[int, int | None], int | None] = {}

    def manifest(self, number: int, manifest: int | None) -> int | None:
        """The number of the commit with whose tables a checkpoint is read from now on: the new one, or as before."""
        place = (number, manifest)
        if place not in self._found:
            before = self._snapshot(number if manifest is None else manifest)
            same = serves(self._new, before, self._known[number])
            self._found[place] = self._number if same else manifest
        return self._found[place]

    def _snapshot(self, number: int) -> Snapshot:
        if number not in self._before:
            self._before = {number: Snapshot(self._storage, self._commit(number))}  # one at a time: they may be large
        return self._before[number]

    def _commit(self, number: int) -> Commit:
        if number == self._parent.number:
            return self._parent
        return self._known.get(number) or commits.read_of(self._storage, number, self._parent)


def _marked(entry: RunEntry, served: _Serving) -> RunEntry:
    """A run's entry with the tables by which its newest checkpoints are read from now on."""
    marks: dict[str, Mark] = {
        name: replace(mark, manifest=served.manifest(mark.commit, mark.manifest)) for name, mark in entry.marks.items()
    }
    return replace(entry, **marks)  # type: ignore[arg-type]


def _checkpoint_files(
    storage: Storage, parent: Commit, places: Mapping[int, int | None], write: Write
) -> tuple[FileRef, ...] | None:  # fmt: skip
    """The rows of the checkpoints that stay, each with the commit with whose tables it is read."""
    import pyarrow as pa

    table = tablefiles.load(storage, "checkpoints", parent.files("checkpoints"))
    numbers = table["commit"].to_pylist()
    rows = [at for at, number in enumerate(numbers) if number in places]
    if not rows:
        return () if parent.checkpoints else parent.checkpoints
    manifest = pa.array([places[numbers[at]] for at in rows], pa.int64())
    kept = table.take(pa.array(rows))
    field = kept.schema.field("manifest")
    kept = kept.set_column(kept.schema.get_field_index("manifest"), field, manifest)
    return (write("checkpoints", tables.only_used(kept)),)


# -- what is said of rows ----------------------------------------------------------------------------------------------


def _beside(
    decided: Decided, kept: pa.Table, write: Write, know: Callable[[FileRef, pa.Table], None]
) -> tuple[Files, Files]:  # fmt: skip
    """The files of the tables of labels and of late fields, with the rows that are of segments that stay."""
    storage, parent = decided.snapshot.storage, decided.parent
    labels = tablefiles.load(storage, "labels", parent.files("labels"))
    late = tablefiles.load(storage, "late", parent.files("late")) if decided.late is None else decided.late
    left = _taken(late, _late_of(late, kept))
    if decided.late is None:
        late_files = _rewritten(late, left, parent.late, partial(write, "late"))
    else:
        late_files = (write("late", left),) if left.num_rows else None
    if late_files != parent.late:
        for ref in late_files or ():
            know(ref, left)
    return _rewritten(
        labels, _taken(labels, _labels_of(labels, kept)), parent.labels, partial(write, "labels")
    ), late_files


def _ledger(decided: Decided, kept: pa.Table, write: Write) -> Files:
    """The files of the ledger table, without what names an episode that goes."""
    ledger = tablefiles.load(decided.snapshot.storage, "ledger", decided.parent.files("ledger"))
    gone = sealing.of_gone(ledger, decided.snapshot.columns(["episode_id"]), kept)
    return _rewritten(ledger, _taken(ledger, ~gone), decided.parent.ledger, partial(write, "ledger"))


def _rewritten(table: pa.Table, left: pa.Table, files: Files, write: Callable[[pa.Table], FileRef]) -> Files:
    """The files of a table of which these rows are left: as they are, where all are."""
    if left.num_rows == table.num_rows:
        return files
    return (write(left),) if left.num_rows else None


def _labels_of(labels: pa.Table, kept: pa.Table) -> Mask:
    """Those that were said of a segment that stays."""
    import pyarrow.compute as pc

    out: Mask = pc.is_in(_addresses(labels), value_set=_addresses(kept)).to_numpy(zero_copy_only=False)
    return out


def _addresses(table: pa.Table) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = [table[name].cast(pa.string()) for name in ("episode_id", "session", "rank", "sequence")]
    return pc.binary_join_element_wise(*parts, "\n").combine_chunks()


def _late_of(late: pa.Table, kept: pa.Table) -> Mask:
    """Those of which a step is in a segment that stays."""
    out = np.zeros(late.num_rows, bool)
    out[latefields.overlaps(late, kept).late] = True
    return out
