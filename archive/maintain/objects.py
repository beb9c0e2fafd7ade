"""Does I/O: the objects of an archive: stored ones, ones that retained commits lead to, ones that any commit ever
named, and ones that other archives refer to."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from archive import tables
from archive.base import CorruptManifestError, CorruptStateError, escape, layout, records
from archive.index import Reach, Walk
from archive.jobs import Job, JobRound, Jobs
from archive.log import Commit, FileRef, Pin, RunEntry, commits, files_there, new_session, tablefiles
from archive.maintain.tags import Tags
from archive.store import Storage, split_key
from archive.tables import among, distinct

if TYPE_CHECKING:
    import pyarrow as pa

FOLDERS = (layout.JOBS, "journal", "manifest", "plans", "shards", "states")  # the folders in which a prune may delete
REDACT = "redact"  # the kind of jobs that rewrite shards without some episodes
_COPIES = "merge"  # the kind of those whose items are the numbers of archives, and shards to be copied from there
_FEW = 100  # objects that are asked for by name: a LIST takes longer the more there are
_AT_ONCE = 256  # manifest files
_LOSES_ROWS = frozenset(("compact", "forget", "undo", "restore"))  # kinds that may name less than their parent

Sizes = dict[str, int]  # key -> bytes


# -- what is stored ----------------------------------------------------------------------------------------------------


class StoredObject(NamedTuple):
    """An object, or all of a shard that is a directory: its bytes, and the time of its newest put."""

    bytes: int
    modified: datetime


def stored(storage: Storage, folders: Iterable[str] = FOLDERS) -> dict[str, StoredObject]:
    """The objects in these folders, by key; one request for each thousand."""
    out: dict[str, StoredObject] = {}
    for folder in folders:
        for one in storage.scan(folder):
            key = unit(one.key)
            before = out.get(key, StoredObject(0, one.modified))
            out[key] = StoredObject(before.bytes + one.bytes, max(before.modified, one.modified))
    return out


def unit(key: str) -> str:
    """The key of what is kept or deleted as one: the object or, for a shard that is a directory, its folder."""
    return "/".join(key.split("/")[:2]) if key.startswith("shards/") else key


def sizes(storage: Storage, keys: Collection[str]) -> Sizes:
    """The bytes of each object, as the store has them; a shard that is a directory is one. 0: it is gone already."""
    if len(keys) <= _FEW and not any(key.endswith(".zarr") for key in keys):
        return storage.sizes(sorted(keys))
    there = stored(storage, sorted({key.partition("/")[0] for key in keys} & {*FOLDERS}))
    return {key: there[key].bytes if key in there else 0 for key in sorted(keys)}


def check_made(storage: Storage, keys: Iterable[str]) -> None:
    """Refuse to forget or delete what is not a shard, journal object, staged object or manifest file of the archive: a
    table that names such a thing is damaged, or forged."""
    strange = [key for key in keys if layout.session_of(key) is None]
    if strange:
        raise CorruptManifestError(
            f"a table of the archive at {storage.url} names the object {strange[0]!r:.200}, which is no shard, no "
            "staged object and no manifest file: nothing was deleted and nothing committed; run `archive verify`"
        )


def read_pins(storage: Storage) -> dict[str, str]:
    """Key of a shard or chunk file -> URL of an archive that refers to it."""
    keys = [f"pins/{name}" for name in storage.list("pins") if name.endswith(".json")]
    out: dict[str, str] = {}
    for key, data in zip(keys, storage.get_all(keys), strict=True):
        where = storage.full_url(key)
        value = records.parse(data, what=where, error=CorruptStateError, max_depth=records.MAX_DEPTH)
        pin = Pin.from_json(value, what=where, error=CorruptStateError, remedy="put it back from a copy")
        out |= dict.fromkeys(pin.objects, pin.url)
    return out


# -- objects that commits lead to --------------------------------------------------------------------------------------


def retained(storage: Storage, head: Commit, rounds: Sequence[JobRound] | None = None) -> list[Commit]:
    """The newest commit, those that tags name, and those that unfinished jobs have frozen, but for redactions: what is
    to go must not stay for a driver that died, before its commit or after. rounds: of these jobs; None looks for them.
    """
    numbers = {tag.commit for tag in Tags(storage, head).values()} - {head.number}
    for one in Jobs(storage).unfinished() if rounds is None else rounds:
        numbers |= {number for number in one.frozen if 0 < number < head.number and one.kind != REDACT}
    return [head, *commits.read_all(storage, numbers, head)]


def retained_reach(
    storage: Storage, head: Commit, walk: Walk | None = None, rounds: Sequence[JobRound] | None = None
) -> Reach:
    """The objects that the retained commits lead to, together; none of them is forgotten or pruned."""
    out, walk = Reach(), walk or Walk(storage)
    for commit in retained(storage, head, rounds):
        out.add(walk.reach(commit))
    return out


def forgotten(storage: Storage, head: Commit) -> dict[str, int]:
    """The forgotten objects, each with the commit that forgot it."""
    table = tablefiles.load(storage, "forgotten", head.files("forgotten"), ["key", "commit"])
    return dict(zip(table["key"].to_pylist(), table["commit"].to_pylist(), strict=True))


def no_longer(storage: Storage, head: Commit, before: Collection[str], after: Collection[str]) -> Sizes:
    """The objects in `before` and not in `after`, but for the lists of prunes, which stalled processes read, and for
    what is awaited as of `head`: ticks of other ranks lie in an object of a node, and a name that is listed may go.

    CorruptManifestError if there is one that a prune could not delete.
    """
    keys = {key for key in before if not key.endswith(layout.PRUNED)}.difference(after)
    check_made(storage, keys)
    journaled = Watermarks.of(head)
    return sizes(storage, {key for key in keys if not journaled.awaited(key)})


def note_forgotten(storage: Storage, parent: Commit, gone: Sizes, back: Collection[str] = ()) -> tuple[FileRef, ...]:
    """The files of the forgotten table with these objects added, and without those that are led to again.

    Small files are merged into the new one; they are forgotten objects, too.
    """
    present = parent.files("forgotten")
    keep = tablefiles.files_to_keep([f.rows for f in present], [f.bytes for f in present], len(gone) + len(present))
    if back:
        keep = 0
    gone = gone | {ref.path: ref.bytes for ref in present[keep:]}
    new = tables.from_columns(
        "forgotten", {"key": list(gone), "bytes": list(gone.values()), "commit": [parent.number + 1] * len(gone)}
    )
    older = tablefiles.load(storage, "forgotten", present[keep:])
    table = tables.concat("forgotten", [without(older, back), new])
    return (*present[:keep], tablefiles.write(storage, new_session(), "forgotten", table)) if table.num_rows else ()


def without(table: pa.Table, keys: Collection[str]) -> pa.Table:
    """The rows of a table of objects without these."""
    return table.filter(~among(table["key"], keys))


def running(head: Commit, rounds: Sequence[JobRound] = ()) -> set[str]:
    """The sessions that may still commit, those of unfinished jobs among them, escaped."""
    return {escape(entry.session) for entry in head.runs.values()} | {escape(one.session) for one in rounds}


def copied(storage: Storage, rounds: Sequence[JobRound]) -> set[str]:
    """The sessions (escaped) in the names of shards that unfinished jobs copy here, which keep their names."""
    plans = (Job(storage, one.job).plan(one) for one in rounds if one.kind == _COPIES)
    keys = (split_key(name.partition(" ")[2])[1] for plan in plans for name in plan.items.to_pylist())
    return {session for session in map(layout.session_of, keys) if session is not None}


class Watermarks:
    """Watermarks of journals: the numbers of each session's objects up to which checkpoints have them."""

    def __init__(self) -> None:
        # session (escaped), line of objects -> how many of these are in checkpoints
        self._numbers: dict[tuple[str, str], int] = {}

    @classmethod
    def of(cls, head: Commit) -> Watermarks:
        """The watermarks of the runs' newest sessions, as of a commit."""
        out = cls()
        out.note(head.runs)
        return out

    def note(self, runs: Mapping[str, RunEntry]) -> None:
        """Raise the marks to what these entries have."""
        for entry in runs.values():
            for line, number in entry.journal_lines.items():
                self._numbers[escape(entry.session), line] = number

    def awaited(self, key: str) -> bool:
        """True if the key is of an object that may still be recovered, or committed by its session."""
        place = layout.journal_place(key)
        return place is not None and place[2] >= self._numbers.get(place[:2], 1 << 63)

    def passed(self, key: str) -> bool:
        """True if the key is of an object that a checkpoint has: only its steps are needed, if any."""
        place = layout.journal_place(key)
        return place is not None and place[2] < self._numbers.get(place[:2], 0)


class History:
    """The objects that commits have named. Commits are noted oldest first; each table is read once.

    named: manifest file or staged object -> the newest commit that names it.  lost_rows: commits with fewer rows than
    the one before.  journaled: the watermarks of all sessions that ever were.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.head: Commit | None = None
        self.named: dict[str, int] = {}
        self.lost_rows: list[int] = []
        self.journaled = Watermarks()
        self._let_go: dict[int, int | None] = {}  # by number
        self._chunks: dict[str, FileRef] = {}  # not read yet, like lists of prunes:
        self._lists: list[FileRef] = []
        self._shards: set[str] = set()
        self._pruned: set[str] = set()

    def follow(self, head: Commit) -> None:
        """Note the commits since the last one that was noted."""
        known = 0 if self.head is None else self.head.number
        for commit in commits.read_all(self._storage, range(known + 1, head.number + 1), head):
            self.note(commit)

    def note(self, commit: Commit) -> None:
        """Note one more commit."""
        self.head = commit
        record = commit.checkpoint
        staged = () if record is None else (*(one.key for one in record.ranks), *record.borrowed)
        self.named.update(dict.fromkeys((*(ref.path for ref in files_there(commit)), *staged), commit.number))
        self.journaled.note(commit.own_runs)  # which has those that it changes
        self._let_go[commit.number] = commit.let_go
        self._chunks |= {} if commit.chunks is None else {commit.chunks.path: commit.chunks}
        self._lists += [] if commit.pruned is None else [commit.pruned]
        if commit.kind in _LOSES_ROWS:
            self.lost_rows.append(commit.number)

    def let_go(self, settled: int) -> int:
        """The newest commit up to `settled` that forgot rows and is not undone as of the newest one; 0: none."""
        number = 0 if self.head is None else self.head.number
        while number and (number := min(self._let_go.get(number) or 0, number)) > settled:
            number -= 1
        return number

    @property
    def pruned(self) -> Set[str]:
        """The objects that prunes have listed."""
        if self._lists:
            self._pruned.update(tablefiles.load(self._storage, "pruned", self._lists, ["key"])["key"].to_pylist())
            self._lists = []
        return self._pruned

    def shards(self, there: Container[str]) -> Set[str]:
        """The shards and journal objects with steps that commits have named, by the chunk files that still exist."""
        found = [ref for path, ref in self._chunks.items() if path in there]
        for at in range(0, len(found), _AT_ONCE):
            table = tablefiles.load(self._storage, "chunks", found[at : at + _AT_ONCE], ["shard"])
            self._shards.update(map(layout.object_of, distinct(table["shard"])))
        self._chunks = {}
        return self._shards

    def learn(self, path: str, shards: Iterable[str]) -> None:
        """Give the shards of a chunk file, which is then not read again."""
        if self._chunks.pop(path, None) is not None:
            self._shards.update(map(layout.object_of, shards))
