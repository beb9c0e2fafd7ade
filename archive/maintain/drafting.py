"""The commit of a forgetting, made of what stays: written, or only counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.base import layout
from archive.maintain.keeping import CheckpointFate
from archive.maintain.moving import Moved
from archive.maintain.objects import Sizes, no_longer
from archive.maintain.serving import serves
from archive.maintain.standing import Mask
from archive.manifest import Commit, FileRef, Mark, RunEntry, Snapshot, Walk, commits, tablefiles
from archive.store import Storage
from archive.tables import FOLLOWING, KEYS, follow

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
            rows = table.take(self.moved.rows).to_pylist()
            new = [(at, row | place) for at, row, place in zip(self.moved.rows, rows, self.moved.places, strict=True)]
            table = tables.replaced("segments", table, self.moved.rows, new)
        return _taken(table, self.rows)


@dataclass(frozen=True)
class Draft:
    """The commit, without its table of what was forgotten; the objects that it no longer leads to; its checkpoints, and
    with which tables they are read."""

    commit: Commit
    gone: Sizes
    places: frozenset[Place]
    finds: Walk = field(repr=False)


def unwritten(kind: str, table: pa.Table) -> FileRef:
    """A file that is named, but not written."""
    return FileRef(layout.manifest_key("planned", "forget", kind), 0, 0, table.num_rows)


def draft(decided: Decided, session: str, write: Write, known: Mapping[int, Commit]) -> Draft:
    """The commit that lets go, as it would follow its parent. known: commits of the checkpoints that stay."""
    parent, storage = decided.parent, decided.snapshot.storage
    finds = Walk(storage)
    before = finds.reach(parent)
    made = replace(_numbered(parent, session), chunks=None if decided.moved is None else decided.moved.chunks)
    rows = decided.snapshot
    if not decided.rows.all():
        table = decided.table()
        ref = write("segments", table)
        finds.know(ref, table)
        rows = Snapshot.of(storage, made, table)
        made = replace(made, segments=(ref,) if table.num_rows else ())
        made = replace(made, **_following(decided, table, write, finds))
    served = _Serving(storage, parent, known, rows, made.number)
    places = {one.commit: served.manifest(one.commit, one.manifest) for one in decided.kept}
    runs = {run: _marked(entry, served.manifest) for run, entry in parent.runs.items()}
    made = replace(made, runs=parent.runs_with(runs), checkpoints=_checkpoint_files(storage, parent, places, write))
    marks = {(m.commit, m.manifest) for entry in runs.values() for m in entry.marks.values()}
    every = {*places.items()} | marks
    after = finds.reach(made, every)
    return Draft(made, no_longer(storage, before.keys, after.keys), frozenset(every), finds)


def redrafted(
    done: Draft, decided: Decided, parent: Commit, run: str | None, session: str, write: Write
) -> Draft | None:
    """The draft as it would follow a newer commit, without a look at what is there; None where others have done more
    since than add rows, and checkpoints of other runs than `run` that cannot hold anything of it."""
    storage, since = decided.snapshot.storage, decided.parent.number
    between = [one for _, one in read_commits(storage, parent, range(since + 1, parent.number + 1))]
    if not all(_only_adds(one, run) for one in between):
        return None
    old, number = done.commit, parent.number + 1
    places = {(c, number if m == old.number else m) for c, m in done.places}
    places |= {(one.number, None) for one in between if one.checkpoint is not None}
    renumbered = dict(places)
    runs = {name: _marked(entry, lambda commit, _: renumbered[commit]) for name, entry in parent.runs.items()}
    made = replace(_numbered(parent, session), runs=parent.runs_with(runs))
    if not decided.rows.all():
        segments = with_since(storage, "segments", old.files("segments"), parent, since, write)
        made = replace(made, segments=segments, **{kind: getattr(old, kind) for kind in FOLLOWING})
    made = replace(made, checkpoints=_checkpoint_files(storage, parent, renumbered, write))
    after = done.finds.reach(made, places).keys
    gone = {ref.path: ref.bytes for ref in decided.parent.all_files + parent.all_files} | done.gone
    named = {ref.path for ref in parent.all_files} | done.gone.keys()
    return Draft(made, {key: gone[key] for key in sorted(named - after)}, frozenset(places), done.finds)


def _only_adds(commit: Commit, run: str | None) -> bool:
    """Whether it leaves what was decided of a run's checkpoints, or of all runs', as it is."""
    if commit.kind == "checkpoint":
        return run not in (None, commit.run) and commit.runs[commit.run].forked_from is None
    return commit.kind == "commit" and "ledger" not in commit.added


def with_since(storage: Storage, kind: str, files: Files, parent: Commit, number: int, write: Write) -> Files:
    """These files of a table, and one with the rows that commits after `number` brought to it."""
    import pyarrow.compute as pc

    newer = [ref for ref in parent.files(kind) if ref.commit is None or ref.commit[1] > number]
    table = tablefiles.load(storage, kind, newer)
    new = tables.only_used(table.filter(pc.greater(table["commit"], number)))
    return (*(files or ()), write(kind, new)) if new.num_rows else files


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


def _marked(entry: RunEntry, manifest: Callable[[int, int | None], int | None]) -> RunEntry:
    """A run's entry with the tables by which its newest checkpoints are read from now on."""
    marks: dict[str, Mark] = {
        name: replace(mark, manifest=manifest(mark.commit, mark.manifest)) for name, mark in entry.marks.items()
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


# -- what hangs on rows ------------------------------------------------------------------------------------------------


def _following(decided: Decided, kept: pa.Table, write: Write, finds: Walk) -> dict[str, Any]:
    """The files of the tables whose rows are of segments, without those that go with them: as they are, where none
    does."""
    storage, parent = decided.snapshot.storage, decided.parent
    gone = decided.snapshot.take(np.flatnonzero(~decided.rows), KEYS)
    out: dict[str, Any] = {}
    for kind in FOLLOWING:
        moved = decided.late if kind == "late" else None
        table = tablefiles.load(storage, kind, parent.files(kind)) if moved is None else moved
        goes = follow(kind, table, gone, kept)
        out[kind] = getattr(parent, kind)
        if moved is not None or goes.any():
            left = _taken(table, ~goes)
            out[kind] = files = (write(kind, left),) if left.num_rows else None
            if files and kind == "late":
                finds.know(files[0], left)
    return out
