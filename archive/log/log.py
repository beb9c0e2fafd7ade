"""Adding a commit: a change of the archive is a value, which is tried until it is committed, whoever commits beside.

A commit carries a transaction key, so that the same intent is committed once however often it is tried and by however
many processes.
"""

from __future__ import annotations

import dataclasses
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from archive import tables
from archive.base import (
    AlreadyExistsError,
    CommitUnknownError,
    DuplicateEpisodeError,
    MissingObjectError,
    forking,
    layout,
)
from archive.log import tablefiles
from archive.log.commit import Commit, completed, dumps, loads, mark_of, recent
from archive.log.commits import newest_number, next_after, read, read_of
from archive.log.conflicts import Conflicts
from archive.log.records import FileRef
from archive.log.runs import served, settled
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

X = TypeVar("X")
Requirement = Callable[[Commit], None]  # raises if it does not hold as of a commit
Load = Callable[[str, Sequence[FileRef], Sequence[str]], "pa.Table"]  # columns of manifest files of one kind
Addition = tuple[Mapping[str, "pa.Table"], Mapping[str, Any]]  # rows by table, and the other keys of a commit


_NEAR = 2  # commits of others that a writer reads one by one; past more it goes to the newest
_chance = random.SystemRandom()  # the program's own stream of random numbers is not ours to draw from
_MOST_WINDOWS, _MOST_WAIT_S = 24, 10.0
_TURN = (4, 16)  # of writers that meet, the one joins them that draws the least of these numbers, or all from the last
_MAX_KEPT_BYTES = 1024 * 1024  # a file or table no larger is held for the next try


def new_session() -> str:
    """A session name that no other session has."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


class KnownIds:
    """The ids of the archive's episodes, as far as one process has learned them; each file is read once.

    names: those that commits after `since` brought, and maybe more. at: the commit up to which they were learned.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.since: int | None = None  # nobody has asked yet
        self.at = 0

    def learn(self, parent: Commit, load: Load, since: int = 0) -> None:
        """Read the files that are newer than what is known. All ids since commit `since` are then known as of
        `parent`."""
        if self.since is None or since < self.since:
            self.since = self.at = since
        files = [f for f in parent.files("segments") if f.commit is None or f.commit[1] > self.at]
        self.names.update(load("segments", files, ["episode_id"])["episode_id"].to_pylist())
        self.at = parent.number

    def check(self, parent: Commit, load: Load, fresh: pa.Table, session: str, since: int) -> None:
        """Refuse rows that begin an episode of an id that is taken. since: the commit up to which the ids were checked
        when they were given."""
        given = Counter(_given(fresh, session))
        if not given:
            return
        twice = sorted(name for name, count in given.items() if count > 1)
        if not twice:
            self.learn(parent, load, since)
        clash = twice or sorted(given.keys() & self.names)
        if clash:
            raise DuplicateEpisodeError(
                f"{'two ranks gave' if twice else 'another writer committed'} an episode {clash[0]!r} at the same time "
                f"({len(clash)} such ids in all); nothing was committed: write these episodes again under other ids, "
                "or with replace=True"
            )

    def note(self, commit: Commit, fresh: pa.Table | None = None) -> None:
        """Take note of a commit. fresh: the rows that it adds, if they were checked; they need not be read then."""
        if commit.undoes is not None:  # what comes back lies in files that may be older than what is known
            self.since = self.at = 0
        elif fresh is not None and self.since is not None and self.at == commit.number - 1:
            self.names.update(fresh["episode_id"].to_pylist())
            self.at = commit.number


def _given(fresh: pa.Table, session: str) -> list[str]:
    """Ids of the episodes that begin in these rows, without those that this session made up itself and those of rows
    that replace whatever is there."""
    import pyarrow.compute as pc

    replaces = pc.fill_null(fresh["replaces"], False)
    begins = fresh.filter(pc.and_(pc.is_null(fresh["predecessor"]), pc.invert(replaces)))
    replaced = set(fresh.filter(replaces)["episode_id"].to_pylist())
    names = begins["episode_id"].to_pylist()
    return [name for name in names if name not in replaced and not name.startswith(f"{session}-")]


class Attempt:
    """The tries of one change to become a commit. What an earlier try wrote or read serves the later ones; they write
    and read only what the change needs.

    number: how many tries were lost. held: small tables that were written here, by the paths of their files.
    crowded: others were committing when it began. is_dry: nothing is written, as the commit is not to
    be made.
    """

    def __init__(
        self,
        storage: Storage,
        held: Mapping[str, pa.Table] | None = None,
        *,
        crowded: bool = False,
        is_dry: bool = False,
    ) -> None:
        self.storage = storage
        self.is_dry = is_dry
        self.number = 0
        self.held = dict(held or {})
        self.fresh: pa.Table | None = None  # rows whose ids were looked at
        self._least = _chance.randint(*_TURN) if crowded else 2
        self._joined: dict[tuple[str, ...], FileRef] = {}  # by the paths of what was joined
        self._written: dict[str, tuple[pa.Table, FileRef]] = {}
        self._fetched: dict[str, bytes] = {}

    def write(self, session: str, kind: str, table: pa.Table) -> FileRef:
        """The new file of a table. A dry run only names it."""
        if self.is_dry:
            return FileRef(layout.manifest_key("planned", session, kind), 0, 0, table.num_rows)
        return tablefiles.write(self.storage, session, kind, table)

    def once(self, session: str, kind: str, table: pa.Table) -> FileRef:
        """The new file of a table, written once for as long as the table is the same at each try."""
        known = self._written.get(kind)
        if known is None or not known[0].equals(table):
            self._written[kind] = known = table, self.write(session, kind, table)
        return known[1]

    def load(self, kind: str, refs: Sequence[FileRef], columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of files of one kind. A small file is fetched once, and not at all if it was written here."""
        lacking = [ref for ref in refs if not self._has(ref)]
        found = dict(zip((ref.path for ref in lacking), tablefiles.fetch(self.storage, lacking), strict=True))
        self._fetched |= {path: data for path, data in found.items() if len(data) <= _MAX_KEPT_BYTES}
        found = self._fetched | found

        def rows(ref: FileRef) -> pa.Table:
            if ref.path not in self.held:
                return tablefiles.parsed(self.storage, kind, [ref], [found[ref.path]], columns)
            return self.held[ref.path] if columns is None else self.held[ref.path].select(columns)

        return tables.concat(kind, map(rows, refs))

    def _has(self, ref: FileRef) -> bool:
        return ref.path in self.held or ref.path in self._fetched

    def add_rows(self, session: str, kind: str, parent: Commit, new: pa.Table) -> tuple[FileRef, ...]:
        """Write new rows of a table that commits list; the table's list of files, with the new one.

        The commit number is filled in here. The newest files are merged into the new one as `files_to_keep` says; of
        segments as `fold` says. A later try, unless the list is long, merges only files that are held, because
        their ids were looked at or an earlier try read them; what the first try joined takes its place again.
        """
        present = parent.files(kind)
        if new.num_rows == 0:
            return present
        new = tables.set_column(new, "commit", parent.number + 1)
        rows, again = [f.rows for f in present], self.number > 0
        spare = again and len(rows) <= _TURN[1]
        sizes = [tablefiles.MAX_FOLDED_BYTES + 1 if spare and not self._has(f) else f.bytes for f in present]
        if kind == "segments":
            start, stop, keep = tablefiles.fold(
                rows, sizes, new.num_rows, least=len(rows) + 1 if again else self._least
            )
            if start < stop:
                parts = present[start:stop]
                whole = tablefiles.load(self.storage, kind, parts)
                self._joined[_paths(parts)] = self.write(session, kind, whole)
        else:
            keep = tablefiles.files_to_keep(rows, sizes, new.num_rows)
        table = tables.concat(kind, [self.load(kind, present[keep:]), new])
        made = self.write(session, kind, table)
        if table.nbytes <= _MAX_KEPT_BYTES:
            self.held[made.path] = table.combine_chunks()
        return (*self._with_joined(present[:keep]), made)

    def _with_joined(self, files: tuple[FileRef, ...]) -> tuple[FileRef, ...]:
        """The list with joined files in place of their sources, where these are still in it."""
        for parts, whole in self._joined.items():
            for start in range(len(files)):
                if _paths(files[start : start + len(parts)]) == parts:
                    files = (*files[:start], whole, *files[start + len(parts) :])
                    break
        return files


def _paths(files: Sequence[FileRef]) -> tuple[str, ...]:
    return tuple(ref.path for ref in files)


@dataclass(frozen=True)
class Change:
    """A change of the archive. `CommitLog.commit` makes a commit of it.

    adds: gives the rows that it adds, and what else its commit says, as of the one that it is to follow; it may write
    files that are named there. Rows of chunks and live steps get files of the commit's own; segments that come with
    rows of chunks are told where these are.  requires: what must hold as of that one.  ids_at: the commit as of which
    the ids of episodes that begin in it were free; None where they are not to be looked at.
    """

    kind: str
    adds: Callable[[Commit, Attempt], Addition]
    requires: Sequence[Requirement] = ()
    run: str = ""
    session: str = dataclasses.field(default_factory=new_session)
    rank: int | None = None
    ids_at: int | None = None

    def draft(self, parent: Commit, attempt: Attempt, ids: KnownIds) -> Commit:
        """Write the files of its rows; the commit that is to follow `parent`."""
        given, says = self.adds(parent, attempt)
        rows = {table: new for table, new in given.items() if new.num_rows or table in ("segments", "live")}
        if self.ids_at is not None:
            attempt.fresh = rows["segments"]
            ids.check(parent, attempt.load, attempt.fresh, self.session, self.ids_at)
        files: dict[str, Any] = {
            table: attempt.once(self.session, table, rows.pop(table)) for table in ("chunks", "live") if table in rows
        }
        if "chunks" in given:
            rows["segments"] = _stamped(rows["segments"], files.get("chunks"))
        files |= {table: attempt.add_rows(self.session, table, parent, new) for table, new in rows.items()}
        if "ledger" in files:
            files["format"] = layout.with_feature(parent.format, layout.JOURNAL)
        added = {table: rows[table].num_rows for table in ("segments", "ledger") if table in files}
        who = {"run": self.run, "session": self.session, "rank": self.rank}
        return parent.after(self.kind, **{"added": added, **who, **files, **says})


def _stamped(segments: pa.Table, chunks: FileRef | None) -> pa.Table:
    """New segments with the file of their chunks, and the time at which they were collected."""
    if segments.num_rows == 0:
        return segments
    return tablefiles.with_chunks(tables.set_column(segments, "created_at", datetime.now(UTC)), chunks)


class CommitLog:
    """The commits of an archive as one process knows them; it adds commits."""

    def __init__(self, storage: Storage, archive_id: str, head: Commit) -> None:
        self.storage = storage
        self.archive_id = archive_id
        self.head = head
        self.began = head.number
        self.ids = KnownIds()
        self._held: Mapping[str, pa.Table] = {}  # small tables of the newest own commit, by the paths of their files
        self._lock = forking.lock(self)
        self._seen: dict[str, list[int]] = {mark_of(head.transaction): [head.number]}
        self._conflicts = Conflicts(head)
        self._windows = 1  # tries are spread over this many times the length of a try: 1 where nobody else commits
        self._window_s = self._lost_at = 0.0  # length of the last lost try; its time

    def catch_up(self) -> Commit:
        """Read the commits that others made since; the newest commit."""
        with self._lock: return self._caught_up()  # fmt: skip  # noqa: E701 (see IOStats.add)

    def look_for(self, transaction: str) -> Commit | None:
        """The commit with this key, if it was made since this log began. Of those that others made since the last look
        none beyond it is read."""
        with self._lock: return self._looked_for(transaction)  # fmt: skip  # noqa: E701 (see IOStats.add)

    def learn_ids(self) -> Commit:
        """Learn the ids of all episodes into `ids`; the newest commit."""
        with self._lock: return self._learnt_ids()  # fmt: skip  # noqa: E701 (see IOStats.add)

    def _looked_for(self, transaction: str) -> Commit | None:
        for _ in range(_NEAR):
            if (found := self.find(transaction)) is not None:
                return found
            if (commit := next_after(self.storage, self.head)) is None:
                return None
            self._know(commit)
        self._caught_up()
        return self.find(transaction)

    def _learnt_ids(self) -> Commit:
        self.ids.learn(self._caught_up(), partial(tablefiles.load, self.storage))
        return self.head

    def _caught_up(self, near: int = _NEAR) -> Commit:
        """Read the commits that others made since: up to `near` one by one, else the newest; the newest commit."""
        while True:
            if near == 0:
                self._leap(newest_number(self.storage, self.head.number))
                if self.storage.driver.lists_at_once:
                    return self.head
            commit = next_after(self.storage, self.head)
            if commit is None:
                return self.head
            self._know(commit)
            near -= 1

    def _leap(self, number: int) -> None:
        """Move on to this commit. Those in between are read only where the marks of later ones do not identify them."""
        if number == self.head.number:
            return
        own = replace(self.head, archive=self.archive_id)
        newest = read_of(self.storage, number, own)
        marks = list(newest.recent or ())
        while len(marks) < number - 1 - own.number:
            marks += recent(read_of(self.storage, number - 1 - len(marks), own))
        for between in range(own.number + 1, number):
            if mark := marks[number - 1 - between]:
                self._seen.setdefault(mark, []).append(between)
            else:
                self._note(read_of(self.storage, between, own))
        self._know(newest)

    def find(self, transaction: str) -> Commit | None:
        """The commit with this key, if it was made since this log began."""
        for number in self._seen.get(mark_of(transaction), ()):
            found = self.head if number == self.head.number else read(self.storage, number)
            if found.transaction == transaction:
                return found
        return None

    def commit(self, transaction: str, change: Change) -> Commit:
        """Commit a change once under this key; who committed it first does not matter.

        It is drafted again after each lost race, and where a prune has deleted what was read for it. Any other error
        of its functions ends it with nothing committed.
        """
        with self._lock: return self._commit(transaction, change)  # fmt: skip  # noqa: E701 (see IOStats.add)

    def _commit(self, transaction: str, change: Change) -> Commit:
        attempt = Attempt(self.storage, self._held, crowded=self._windows > 1)
        while True:
            self._catch_up_in_turn(attempt.number)
            began = time.monotonic()
            if found := self.find(transaction):
                return found
            parent = self.head
            try:
                for required in change.requires:
                    required(parent)
                draft = change.draft(parent, attempt, self.ids)
                self._conflicts.check(self.storage, parent, draft)
                draft = settled(self.storage, parent, draft, attempt.number)
            except MissingObjectError:
                if not self._pruned_since(parent):
                    raise
                continue
            made = completed(draft, self.head, self.archive_id, transaction)
            data = dumps(made)
            if self._create(made.number, data):
                commit = served(self.storage, loads(data, made.number, self.storage.url))
                self._know(commit, attempt.fresh)
                self._conflicts.passed(commit)
                named = {ref.path for ref in commit.all_files}
                self._held = {path: table for path, table in attempt.held.items() if path in named}
                if attempt.number == 0:
                    self._windows = max(1, self._windows // 2)
                return commit
            attempt.number += 1
            self._lost_at = time.monotonic()
            self._window_s = self._lost_at - began
            if attempt.number <= 2:
                self._windows = min(2 * self._windows, _MOST_WINDOWS)

    def _catch_up_in_turn(self, lost: int) -> None:
        """Catch up. Where writers meet, a random wait comes first, longer the more of them there seem to be. The winner
        lets others go first. A loser waits half as long each time, but over two tries, so that those that lost most
        do not only meet one another."""
        most_s = min(self._windows * self._window_s, _MOST_WAIT_S)
        if lost == 0 and time.monotonic() - self._lost_at > 4 * most_s:  # that was long ago
            self._windows = 1
        if self._windows == 1:
            self._caught_up()
            return
        least_s, longest_s = (most_s / 2, most_s) if lost == 0 else (0, max(2 * self._window_s, most_s / 2**lost))
        time.sleep(_chance.uniform(least_s, min(longest_s, _MOST_WAIT_S)))
        self._caught_up(near=0 if self._windows > _NEAR else _NEAR)

    def gone(self, keys: Collection[str], since: int) -> Collection[str]:
        """The objects in `keys` that were forgotten or pruned by now after commit `since`, which led to them."""
        return self.beside_prunes(lambda: self._conflicts.gone(self.storage, self.catch_up(), keys, since))

    def beside_prunes(self, call: Callable[[], X]) -> X:
        """The call's result. It is called again where it missed an object that a prune has deleted meanwhile."""
        while True:
            known = self.head
            try:
                return call()
            except MissingObjectError:
                if not self._pruned_since(known):
                    raise

    def _pruned_since(self, known: Commit) -> bool:
        """True if a prune was committed after `known`."""
        self.catch_up()
        return self._conflicts.newest_prune > known.number

    def _create(self, number: int, data: bytes) -> bool:
        """True if commit `number` is ours now; the same object is tried until an answer is certain."""
        unclear = CommitUnknownError(
            f"no answer within {self.storage.deadline_s:.0f} s whether commit {number} at {self.storage.url} was made; "
            "call commit() again: it will be committed once"
        )
        try:
            self.storage.create_once(layout.commit_key(number), data, unclear=unclear, look=False)
        except AlreadyExistsError:  # were it ours after all, the next try would find it by its transaction
            return False
        return True

    def _know(self, commit: Commit, fresh: pa.Table | None = None) -> None:
        self._note(commit, fresh)
        self.head = commit  # last: after an interrupt in between the commit is read again

    def _note(self, commit: Commit, fresh: pa.Table | None = None) -> None:
        self._conflicts.note(commit)
        self.ids.note(commit, fresh)
        self._seen.setdefault(mark_of(commit.transaction), []).append(commit.number)
