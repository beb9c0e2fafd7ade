"""Does I/O: objects that no commit names, and what they would have been. A writer that died has left them; or the
commit that named them was removed. Reads what is small."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from archive import tables
from archive.base import ArchiveError, CorruptCommitError, escape, layout, size
from archive.journal import tails
from archive.maintain.missing import Evidence
from archive.manifest import Commit, FileRef, commits, files_there, tablefiles
from archive.saved import Part
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

FOLDERS = ("journal", "manifest", "shards", "states")
_DIED = "its writer died before it was committed, or the commit that named it was removed"
_MAY = "it may still be committed, or its writer died before it was, or the commit that named it was removed"


@dataclass
class Named:
    """What all commits have named, and how far the journals of each session are in checkpoints."""

    keys: set[str] = field(default_factory=set)
    rows: dict[str, dict[str, FileRef]] = field(default_factory=lambda: {"segments": {}, "late": {}})
    journaled: dict[tuple[str, int], int] = field(default_factory=dict)  # session (escaped), rank -> below this number
    lists: list[FileRef] = field(default_factory=list)  # of what prunes have deleted
    head: Commit | None = None

    def add(self, commit: Commit) -> None:
        """One more, oldest first."""
        self.head = commit
        record = commit.checkpoint
        staged = () if record is None else (*(one.key for one in record.ranks), *record.borrowed)
        self.keys.update(staged, (ref.path for ref in files_there(commit)))
        for kind, files in self.rows.items():
            files.update({ref.path: ref for ref in commit.files(kind)})
        self.lists += [] if commit.pruned is None else [commit.pruned]
        for entry in commit.own_runs.values():  # which has those that it changes
            for rank, number in (entry.journal or {}).items():
                self.journaled[(escape(entry.session), rank)] = number

    @property
    def running(self) -> set[str]:
        """The sessions that may still commit, escaped."""
        return set() if self.head is None else {escape(one.session) for one in self.head.runs.values()}


@dataclass(frozen=True, slots=True)
class Leftover:
    """An object that no commit names, or several of one rank. what: what it would have been."""

    key: str
    what: str


@dataclass
class _Pile:
    """Objects of one kind that one rank has left."""

    keys: list[str] = field(default_factory=list)
    bytes: int = 0
    newest: datetime | None = None


def find(storage: Storage, named: Named, needed: Iterable[str], evidence: Evidence) -> list[Leftover]:
    """What no commit names, but for journals that can still be recovered; nothing where the store cannot say what there
    is, or a later commit what it names (of an archive that is open at an earlier one). needed: shards and chunk files
    that rows are known to name. Adds to `evidence` what these objects say."""
    if storage.driver.scanning is None:
        return []
    there = _scanned(storage)
    try:
        for commit in () if named.head is None else list(commits.following(storage, named.head)):  # made meanwhile
            named.add(commit)
    except CorruptCommitError:
        return []
    unknown = there.keys() - named.keys - set(needed) - _let_go(storage, named)
    if any(key.startswith(("shards/", "journal/")) or key.endswith(".chunks.parquet") for key in unknown):
        unknown -= _of_rows(storage, named, there.keys())
    _hear_journals(storage, named, unknown, evidence)
    return [*_single(storage, named, unknown, there, evidence), *_piles(named, unknown, there)]


def _scanned(storage: Storage) -> dict[str, tuple[int, datetime]]:
    """Key -> bytes, and when it was put; of a shard that is a directory, of all of it."""
    out: dict[str, tuple[int, datetime]] = {}
    for folder in FOLDERS:
        for one in storage.scan(folder):
            key = "/".join(one.key.split("/")[:2]) if folder == "shards" else one.key
            nbytes, modified = out.get(key, (0, one.modified))
            out[key] = nbytes + one.bytes, max(modified, one.modified)
    return out


def _let_go(storage: Storage, named: Named) -> set[str]:
    """What was forgotten, or listed by a prune."""
    forgotten = () if named.head is None else named.head.files("forgotten")
    found = [tablefiles.load(storage, kind, files, ["key"])["key"].to_pylist() for kind, files in (
        ("forgotten", forgotten), ("pruned", named.lists)
    )]  # fmt: skip
    return {key for keys in found for key in keys}


def _of_rows(storage: Storage, named: Named, there: Set[str]) -> set[str]:
    """The shards and chunk files that rows of any table name which is still there."""
    out: set[str] = set()
    for kind, files in named.rows.items():
        present = [ref for path, ref in files.items() if path in there]
        rows = tablefiles.load(storage, kind, present, ["shard", "chunks"])
        for name in ("shard", "chunks"):
            out.update(rows[name].drop_null().unique().to_pylist())
    return out


def _single(
    storage: Storage, named: Named, unknown: set[str], there: dict[str, tuple[int, datetime]], evidence: Evidence
) -> Iterator[Leftover]:
    """Tables and staged objects: each says what it is."""
    tell = {"manifest": _table, "states": _staged}
    for key in sorted(unknown):
        session, kind = layout.session_of(key), key.partition("/")[0]
        if session is not None and kind in tell:
            try:
                what = tell[kind](storage, key, evidence)
            except ArchiveError as e:
                what = f"it cannot be read: {e}"
            yield Leftover(key, f"{what}, {there[key][1]:%Y-%m-%d %H:%M:%S}Z; {_fate(named, session)}")


def _fate(named: Named, session: str) -> str:
    return _MAY if session in named.running else _DIED


def _staged(storage: Storage, key: str, evidence: Evidence) -> str:
    index = Part(storage, key).index
    evidence.add(key, index.seen)
    steps = sum(one.steps for one in index.buffers.values())
    rows = 0 if index.rows is None else index.rows.segments
    return (
        f"rank {index.rank} of {index.world_size} of checkpoint {index.name!r}, step {index.step}, of run "
        f"{index.run!r}, session {index.session!r}: {steps} live steps, {rows} new segments"
    )


def _table(storage: Storage, key: str, evidence: Evidence) -> str:
    import pyarrow.compute as pc

    kind = key.split(".")[-2]
    rows = tables.loads(storage.get(key), kind, where=storage.full_url(key))
    text = f"{rows.num_rows} rows of the {kind} table{_of_checkpoint(kind, rows)}"
    if rows.num_rows and "commit" in rows.column_names:
        made_for = int(pc.max(rows["commit"]).as_py())
        evidence.made_for[made_for] = key
        text += f", made for commit {made_for}"
    return text


def _of_checkpoint(kind: str, rows: pa.Table) -> str:
    if kind == "segments":
        return f" ({len(rows['episode_id'].unique())} episodes, {sum(rows['length'].to_numpy())} steps)"
    if kind == "checkpoints" and rows.num_rows:
        return f" (the last one is {str(rows['name'][-1].as_py())!r}, step {rows['step'][-1].as_py()})"
    return ""


def _piles(named: Named, unknown: set[str], there: dict[str, tuple[int, datetime]]) -> Iterator[Leftover]:
    """Shards and objects of journals, together for each rank."""
    piles: dict[tuple[str, str], _Pile] = {}
    for key in sorted(unknown):
        session = layout.session_of(key)
        if session is None or not key.startswith(("shards/", "journal/")) or _recoverable(named, key):
            continue
        pile = piles.setdefault((key.partition("/")[0], session), _Pile())
        pile.keys.append(key)
        pile.bytes += there[key][0]
        pile.newest = max(pile.newest or there[key][1], there[key][1])
    for (kind, session), pile in piles.items():
        noun = "shards" if kind == "shards" else "objects of a journal"
        what = f"{len(pile.keys)} {noun} of session {session!r}, {size(pile.bytes)}, the newest of "
        what += f"{pile.newest:%Y-%m-%d %H:%M:%S}Z; {_fate(named, session)}"
        yield Leftover(pile.keys[0], what)


def _recoverable(named: Named, key: str) -> bool:
    """Whether an object of a journal is in a checkpoint, or beyond one of a session that can still be recovered."""
    place = layout.journal_place(key)
    if place is None:
        return False
    session, rank, number = place
    return session in named.running or number < named.journaled.get((session, rank), 0)


def _hear_journals(storage: Storage, named: Named, unknown: set[str], evidence: Evidence) -> None:
    """What the newest object of each rank beyond the checkpoints says that it had seen."""
    newest: dict[tuple[str, int], tuple[int, str]] = {}
    for key in unknown:
        place = layout.journal_place(key)
        if place is not None and place[2] >= named.journaled.get(place[:2], 0):
            newest[place[:2]] = max(newest.get(place[:2], (-1, "")), (place[2], key))
    for _, key in newest.values():
        with suppress(ArchiveError):  # where it is damaged its tail says so
            evidence.add(key, tails.index_at(storage, key).seen)
