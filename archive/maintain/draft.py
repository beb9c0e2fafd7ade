"""The commit of a forgetting, made of what stays: its tables, and the tables by which each checkpoint is read from then
on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Mask, run_starts
from archive.base import CorruptManifestError
from archive.index import COLUMNS, EpisodeIndex, Snapshot, Walk
from archive.log import Commit, FileRef, Mark, RunEntry, commits, tablefiles
from archive.maintain.objects import Sizes, no_longer
from archive.maintain.plans import CheckpointFate
from archive.maintain.relocation import Relocation
from archive.maintain.survivors import KeptRows
from archive.store import Storage
from archive.tables import FOLLOWING, KEYS, follow

if TYPE_CHECKING:
    import pyarrow as pa

Files = tuple[FileRef, ...] | None
Place = tuple[int, int | None]  # of a checkpoint: its commit, and the one with whose tables it is read, if another
Write = Callable[[str, "pa.Table"], FileRef]
_SAME = tuple(name for name in COLUMNS if name not in ("run", "created_at", "commit"))  # of an episode, as it is seen


@dataclass(frozen=True)
class Decision:
    """A decision what stays of an archive as of a commit: its checkpoints, and the rows of its segments table.

    known: the commits of the checkpoints that stay, by number.  moved: rows whose steps lie elsewhere from then on.
    late: the late table, where it is not as it was.
    """

    snapshot: Snapshot
    fates: Sequence[CheckpointFate]
    survivors: KeptRows
    known: Mapping[int, Commit] = field(repr=False)
    moved: Relocation | None = None
    late: pa.Table | None = None

    @property
    def parent(self) -> Commit:
        """The commit as of which it was decided."""
        return self.snapshot.commit

    @property
    def rows(self) -> Mask:
        """A mask of the rows of the segments table that stay."""
        return self.survivors.rows

    @property
    def gone(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The numbers of the rows that go."""
        return np.flatnonzero(~self.rows)

    @property
    def kept(self) -> list[CheckpointFate]:
        """The checkpoints that stay."""
        return [one for one in self.fates if one.stays]

    @property
    def empty(self) -> bool:
        """True if nothing goes."""
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
    """The words of the commit, but for the table of what was forgotten; the objects that it no longer leads to; its
    checkpoints, and with which tables they are read."""

    says: Mapping[str, Any]
    gone: Sizes
    places: frozenset[Place]
    walk: Walk = field(repr=False)


def draft(decision: Decision, write: Write) -> Draft:
    """The commit that lets go, as it would follow the one as of which that was decided."""
    parent, snapshot, storage = decision.parent, decision.snapshot, decision.snapshot.storage
    walk = Walk(storage)
    before = walk.reach(parent)
    says: dict[str, Any] = {"let_go": parent.number + 1}
    if decision.moved is not None:
        says["chunks"] = decision.moved.chunks
    if not decision.rows.all():
        table = decision.table()
        ref = write("segments", table)
        walk.know(ref, table)
        snapshot = Snapshot.of(storage, as_commit(parent, says), table)
        says |= {"segments": (ref,) if table.num_rows else (), **_following(decision, table, write, walk)}
    serving = _Serving(decision, snapshot)
    places = {one.commit: serving.manifest(one.commit, one.manifest) for one in decision.kept}
    runs = {
        run: with_tables(entry, lambda _, mark: serving.manifest(mark.commit, mark.manifest))
        for run, entry in parent.runs.items()
    }
    says |= {"runs": parent.runs_with(runs), "checkpoints": _checkpoint_files(storage, parent, places, write)}
    marks = {(mark.commit, mark.manifest) for entry in runs.values() for mark in entry.marks.values()}
    every = {*places.items()} | marks
    after = walk.reach(as_commit(parent, says), every)
    return Draft(says, no_longer(storage, before.keys, after.keys), frozenset(every), walk)


def redraft(done: Draft, decision: Decision, parent: Commit, run: str | None, write: Write) -> Draft | None:
    """The draft as it would follow a newer commit, without a look at what is there; None where others have done more
    since than add rows, and checkpoints of other runs than `run` that cannot hold anything of it."""
    storage, since = decision.snapshot.storage, decision.parent.number
    between = list(commits.read_all(storage, range(since + 1, parent.number + 1), parent))
    if not all(_only_adds(one, run) for one in between):
        return None
    old, number = since + 1, parent.number + 1
    places = {(commit, number if manifest == old else manifest) for commit, manifest in done.places}
    places |= {(one.number, None) for one in between if one.checkpoint is not None}
    renumbered = dict(places)
    runs = {name: with_tables(entry, lambda _, mark: renumbered[mark.commit]) for name, entry in parent.runs.items()}
    says: dict[str, Any] = {"let_go": number, "runs": parent.runs_with(runs)}
    if not decision.rows.all():
        segments = with_since(storage, "segments", done.says["segments"], parent, since, write)
        says |= {"segments": segments, **{kind: done.says[kind] for kind in FOLLOWING}}
    says["checkpoints"] = _checkpoint_files(storage, parent, renumbered, write)
    after = done.walk.reach(as_commit(parent, says), places).keys
    gone = {ref.path: ref.bytes for ref in decision.parent.all_files + parent.all_files} | done.gone
    named = {ref.path for ref in parent.all_files} | done.gone.keys()
    return Draft(says, {key: gone[key] for key in sorted(named - after)}, frozenset(places), done.walk)


def _only_adds(commit: Commit, run: str | None) -> bool:
    """True if it leaves what was decided of a run's checkpoints, or of all runs', as it is."""
    if commit.kind == "checkpoint":
        return run not in (None, commit.run) and commit.runs[commit.run].forked_from is None
    return commit.kind == "commit" and "ledger" not in commit.added


def as_commit(parent: Commit, says: Mapping[str, Any]) -> Commit:
    """The commit after this one that says so, to see what it leads to."""
    return parent.after("forget", **says, number=parent.number + 1, archive=parent.archive)


def with_since(storage: Storage, kind: str, files: Files, parent: Commit, number: int, write: Write) -> Files:
    """These files of a table, and one with the rows that commits after `number` brought to it."""
    import pyarrow.compute as pc

    newer = [ref for ref in parent.files(kind) if ref.commit is None or ref.commit[1] > number]
    table = tablefiles.load(storage, kind, newer)
    new = tables.only_used(table.filter(pc.greater(table["commit"], number)))
    return (*(files or ()), write(kind, new)) if new.num_rows else files


def with_tables(entry: RunEntry, manifest: Callable[[str, Mark], int | None]) -> RunEntry:
    """A run's entry with the tables by which its newest checkpoints are read from then on. manifest: of a mark by its
    name, the commit with whose tables it is read."""
    marks = {name: replace(mark, manifest=manifest(name, mark)) for name, mark in entry.marks.items()}
    return replace(entry, **marks)  # type: ignore[arg-type]


def _taken(table: pa.Table, rows: Mask) -> pa.Table:
    import pyarrow as pa

    return tables.only_used(table.filter(pa.array(rows)))


def _checkpoint_files(storage: Storage, parent: Commit, places: Mapping[int, int | None], write: Write) -> Files:
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


def _following(decision: Decision, kept: pa.Table, write: Write, walk: Walk) -> dict[str, Any]:
    """The files of the tables whose rows are of segments, without those that go with them: as they are, where none
    does."""
    storage, parent = decision.snapshot.storage, decision.parent
    gone = decision.snapshot.take(decision.gone, KEYS)
    out: dict[str, Any] = {}
    for kind in FOLLOWING:
        moved = decision.late if kind == "late" else None
        table = tablefiles.load(storage, kind, parent.files(kind)) if moved is None else moved
        goes = follow(kind, table, gone, kept)
        out[kind] = getattr(parent, kind)
        if moved is not None or goes.any():
            left = _taken(table, ~goes)
            out[kind] = files = (write(kind, left),) if left.num_rows else None
            if files and kind == "late":
                walk.know(files[0], left)
    return out


# -- by which tables checkpoints are read ------------------------------------------------------------------------------


class _Serving:
    """Finds out which checkpoints are the same with the new rows."""

    def __init__(self, decision: Decision, rows: Snapshot) -> None:
        self._decision = decision
        self._new = rows
        self._before: dict[int, Snapshot] = {}
        self._found: dict[Place, int | None] = {}

    def manifest(self, number: int, manifest: int | None) -> int | None:
        """The number of the commit with whose tables a checkpoint is read from now on: the new one, or as before."""
        place = (number, manifest)
        if place not in self._found:
            before = self._snapshot(number if manifest is None else manifest)
            same = _serves(self._new, before, self._decision.known[number])
            self._found[place] = self._decision.parent.number + 1 if same else manifest
        return self._found[place]

    def _snapshot(self, number: int) -> Snapshot:
        if number not in self._before:
            parent, storage = self._decision.parent, self._new.storage
            known = {**self._decision.known, parent.number: parent}
            commit = known.get(number) or commits.read_of(storage, number, parent)
            self._before = {number: Snapshot(storage, commit)}  # one at a time: they may be large
        return self._before[number]


def _serves(after: Snapshot, before: Snapshot, commit: Commit) -> bool:
    """True if a checkpoint has the same live steps, of the same episodes, with other tables as it had before."""
    if commit.live is None:
        return True
    live = tablefiles.load(after.storage, "live", [commit.live])
    try:
        now = _seen(after, commit, live)
    except CorruptManifestError:  # some steps are not there
        return False
    return bool(now.equals(_seen(before, commit, live)))


def _seen(snapshot: Snapshot, commit: Commit, live: pa.Table) -> pa.Table:
    """A row for each live run and episode in a checkpoint, with its steps and the episode's summary."""
    import pyarrow as pa

    located = tables.locate(live, snapshot.columns(tables.LOCATING))
    sequences = None if commit.checkpoint is None else commit.checkpoint.sequences
    index = EpisodeIndex(snapshot, lambda: located.stream, (commit.session, sequences))
    episode = index.episode_of_row[located.stream]
    heads = run_starts(located["run"], episode)
    steps = np.add.reduceat(located.length, heads) if len(heads) else heads
    if (episode < 0).any():
        raise CorruptManifestError(f"live steps of commit {commit.number} at {snapshot.storage.url} are in no episode")
    summary = index.table(_SAME).take(pa.array(episode[heads])).combine_chunks()
    plain = {name: _plain(summary[name]) for name in _SAME}
    return pa.table({"live_run": located["run"][heads], "position": located["position"][heads], "steps": steps} | plain)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Repeated strings may be numbered otherwise in other tables."""
    import pyarrow as pa

    return column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
