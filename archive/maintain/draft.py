"""The draft of a forgetting's commit, made of what stays: its tables, and the commits whose tables serve each
checkpoint from then on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from archive import tables
from archive.arrays import Mask, run_starts
from archive.base import CorruptManifestError
from archive.index import COLUMNS, EpisodeIndex, Snapshot, Walk
from archive.log import Commit, FileRef, Mark, RunEntry, commits, tablefiles
from archive.maintain.objects import Sizes, no_longer
from archive.maintain.survivors import Decision
from archive.store import Storage
from archive.tables import FOLLOWING, KEYS, follow

if TYPE_CHECKING:
    import pyarrow as pa

Files = tuple[FileRef, ...] | None
Place = tuple[int, int | None]  # of a checkpoint: its commit, and the one whose tables serve it, if another
Write = Callable[[str, "pa.Table"], FileRef]
_SAME = tuple(name for name in COLUMNS if name not in ("run", "created_at", "commit"))  # of an episode's summary


@dataclass(frozen=True)
class Draft:
    """The keys of the commit, but for the table of forgotten objects; the objects that it no longer leads to; its
    checkpoints, with the commits whose tables serve them."""

    decision: Decision = field(repr=False)
    says: Mapping[str, Any]
    gone: Sizes
    places: frozenset[Place]
    walk: Walk = field(repr=False)


def draft(decision: Decision, write: Write) -> Draft:
    """The draft of the commit that forgets, to follow the commit as of which that was decided."""
    parent, snapshot, storage = decision.parent, decision.snapshot, decision.snapshot.storage
    walk = Walk(storage)
    before = walk.reach(parent)
    says: dict[str, Any] = {"let_go": parent.number + 1}
    if decision.chunks is not None:
        says["chunks"] = decision.chunks
    if not decision.rows.all():
        every = decision.moved.get("segments")
        table = _taken(snapshot.columns(tables.schema("segments").names) if every is None else every, decision.rows)
        ref = write("segments", table)
        walk.know(ref, table)
        snapshot = Snapshot.of(storage, as_commit(parent, says), table)
        says |= {"segments": (ref,) if table.num_rows else (), **_following(decision, table, write, walk)}
    serving = _serving(decision, snapshot)
    places = {one.commit: serving(one.commit, one.manifest) for one in decision.kept}
    runs = {
        run: with_tables(entry, lambda _, mark: serving(mark.commit, mark.manifest))
        for run, entry in parent.runs.items()
    }
    says |= {"runs": parent.runs_with(runs), "checkpoints": _checkpoint_files(storage, parent, places, write)}
    marks = {(mark.commit, mark.manifest) for entry in runs.values() for mark in entry.marks.values()}
    retained = {*places.items()} | marks
    after = walk.reach(as_commit(parent, says), retained)
    gone = no_longer(storage, parent, before.keys, after.keys)
    return Draft(decision, says, gone, frozenset(retained), walk)


def redraft(done: Draft, parent: Commit, run: str | None, write: Write) -> Draft | None:
    """The draft, made to follow a newer commit without deciding again. None if others have since done more than add
    rows, and checkpoints of other runs than `run` that cannot hold what is forgotten."""
    decision = done.decision
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
    lost = {key: gone[key] for key in sorted(named - after)}
    return Draft(decision, says, lost, frozenset(places), done.walk)


def _only_adds(commit: Commit, run: str | None) -> bool:
    """True if the commit leaves valid what was decided about checkpoints of this run, or of all runs."""
    if commit.kind == "checkpoint":
        return run not in (None, commit.run) and commit.runs[commit.run].forked_from is None
    return commit.kind == "commit" and "ledger" not in commit.added


def as_commit(parent: Commit, says: Mapping[str, Any]) -> Commit:
    """The commit after `parent` with these keys, to find what it leads to."""
    return parent.after("forget", **says, number=parent.number + 1, archive=parent.archive)


def with_since(storage: Storage, kind: str, files: Files, parent: Commit, number: int, write: Write) -> Files:
    """These files of a table, and one with the rows that commits after `number` added to it."""
    import pyarrow.compute as pc

    newer = [ref for ref in parent.files(kind) if ref.commit is None or ref.commit[1] > number]
    table = tablefiles.load(storage, kind, newer)
    new = tables.only_used(table.filter(pc.greater(table["commit"], number)))
    return (*(files or ()), write(kind, new)) if new.num_rows else files


def with_tables(entry: RunEntry, manifest: Callable[[str, Mark], int | None]) -> RunEntry:
    """A run's entry with the commits whose tables serve its newest checkpoints from now on. manifest: the commit that
    serves a checkpoint, given its reference."""
    marks = {name: replace(mark, manifest=manifest(name, mark)) for name, mark in entry.marks.items()}
    return replace(entry, **marks)  # type: ignore[arg-type]


def _taken(table: pa.Table, rows: Mask) -> pa.Table:
    import pyarrow as pa

    return tables.only_used(table.filter(pa.array(rows)))


def _checkpoint_files(storage: Storage, parent: Commit, places: Mapping[int, int | None], write: Write) -> Files:
    """The rows of the checkpoints that stay, each with the commit whose tables serve it."""
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
    """The files of the tables whose rows follow segments, without rows of segments that go; unchanged where none go."""
    storage, parent = decision.snapshot.storage, decision.parent
    gone = decision.snapshot.take(decision.gone, KEYS)
    out: dict[str, Any] = {}
    for kind in FOLLOWING:
        moved = decision.moved.get(kind)
        table = tablefiles.load(storage, kind, parent.files(kind)) if moved is None else moved
        goes = follow(kind, table, gone, kept)
        out[kind] = getattr(parent, kind)
        if moved is not None or goes.any():
            left = _taken(table, ~goes)
            out[kind] = files = (write(kind, left),) if left.num_rows else None
            if files and kind == "late":
                walk.know(files[0], left)
    return out


# -- the tables that serve checkpoints ---------------------------------------------------------------------------------


def _serving(decision: Decision, rows: Snapshot) -> Callable[[int, int | None], int | None]:
    """A function: the commit whose tables serve a checkpoint from now on, given its number and the commit that served
    it so far. The new one serves it if the new rows give the same checkpoint."""
    parent, storage = decision.parent, rows.storage
    known, one = {**decision.known, parent.number: parent}, dict[int, Snapshot]()

    @cache
    def manifest(number: int, before: int | None) -> int | None:
        serving = number if before is None else before
        if serving not in one:
            one.clear()  # they may be large
            one[serving] = Snapshot(storage, known.get(serving) or commits.read_of(storage, serving, parent))
        return parent.number + 1 if _serves(rows, one[serving], decision.known[number]) else before

    return manifest


def _serves(after: Snapshot, before: Snapshot, commit: Commit) -> bool:
    """True if a checkpoint has the same live steps, of the same episodes, with the other tables."""
    if commit.live is None:
        return True
    live = tablefiles.load(after.storage, "live", [commit.live])
    try:
        now = _seen(after, commit, live)
    except CorruptManifestError:  # some steps are missing
        return False
    return bool(now.equals(_seen(before, commit, live)))


def _seen(snapshot: Snapshot, commit: Commit, live: pa.Table) -> pa.Table:
    """A row for each live range and episode in a checkpoint, with its steps and the episode's summary."""
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
    of_dictionary = [name for name in _SAME if pa.types.is_dictionary(summary[name].type)]
    plain = {name: summary[name] for name in _SAME}
    plain |= {name: plain[name].cast(pa.string()) for name in of_dictionary}  # numbered otherwise in other tables
    return pa.table({"live_run": located["run"][heads], "position": located["position"][heads], "steps": steps} | plain)
