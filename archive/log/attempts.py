"""The tries of a change to become a commit, whoever commits beside: what one has read and written serves the next, no
episode id is given twice, and the lists of manifest files stay short."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from archive import tables
from archive.base import DuplicateEpisodeError, layout
from archive.log import tablefiles
from archive.log.commit import Commit
from archive.log.records import FileRef
from archive.store import Storage

if TYPE_CHECKING:
    import pyarrow as pa

MAX_FOLDED_BYTES = 32 * 1024 * 1024
_RECENT_ROWS = 256  # new segments go into the newest file while it holds at most so many rows,
_RECENT_COMMITS = 8  # or as many as are new, so often
_LONG = 4  # so many neighbours that may become one are joined also where the newest file takes the new rows
_TURN = (4, 16)  # of writers that meet, the one joins them that draws the least of these numbers, or all from the last
_chance = random.SystemRandom()  # the program's own stream of random numbers is not ours to draw from
_MAX_KEPT_BYTES = 1024 * 1024  # a file no larger is held for the next try
Load = Callable[[str, Sequence[FileRef], Sequence[str]], "pa.Table"]  # columns of manifest files of one kind


class KnownIds:
    """The ids of the episodes that there are, as one process has learned them; each file is read once.

    names: those that commits after `since` brought, and maybe more. at: the commit up to which they were learned.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.since: int | None = None  # nobody has asked yet
        self.at = 0

    def learn(self, parent: Commit, load: Load, since: int = 0) -> None:
        """Read the files that are newer than what is known, so that all ids that came after commit `since` are known
        as of `parent`."""
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
        """A commit was made. fresh: the rows that it adds, if they were checked: they need not be read then."""
        if commit.undoes is not None:  # what comes back lies in files that may be older than what is known
            self.since = self.at = 0
        elif fresh is not None and self.since is not None and self.at == commit.number - 1:
            self.names.update(fresh["episode_id"].to_pylist())
            self.at = commit.number


def _given(fresh: pa.Table, session: str) -> list[str]:
    """Ids of the episodes that begin in these rows, but for those that this session makes itself, and those that a row
    says to take the place of whatever there is."""
    import pyarrow.compute as pc

    replaces = pc.fill_null(fresh["replaces"], False)
    begins = fresh.filter(pc.and_(pc.is_null(fresh["predecessor"]), pc.invert(replaces)))
    replaced = set(fresh.filter(replaces)["episode_id"].to_pylist())
    names = begins["episode_id"].to_pylist()
    return [name for name in names if name not in replaced and not name.startswith(f"{session}-")]


class Attempt:
    """The tries of one change to become a commit. What an earlier one wrote or read serves those that follow: on these,
    nothing is written or read that the change does not need.

    number: how many were lost before this one. crowded: others were committing at the same time when it began. is_dry:
    nothing is written, as the commit is not to be made.
    """

    def __init__(
        self, storage: Storage, ids: KnownIds | None = None, *, crowded: bool = False, is_dry: bool = False
    ) -> None:
        self.storage = storage
        self.is_dry = is_dry
        self.number = 0
        self.fresh: pa.Table | None = None  # rows whose ids were looked at
        self._ids = KnownIds() if ids is None else ids
        self._least = _chance.randint(*_TURN) if crowded else 2
        self._joined: dict[tuple[str, ...], FileRef] = {}  # by the paths of what was joined
        self._written: dict[str, tuple[pa.Table, FileRef]] = {}
        self._fetched: dict[str, bytes] = {}

    def write(self, session: str, kind: str, table: pa.Table) -> FileRef:
        """The new file of a table; of a dry run, it is named alone."""
        if self.is_dry:
            return FileRef(layout.manifest_key("planned", session, kind), 0, 0, table.num_rows)
        return tablefiles.write(self.storage, session, kind, table)

    def once(self, session: str, kind: str, table: pa.Table) -> FileRef:
        """The new file of a table, which is written once as long as the table is the same at each try."""
        known = self._written.get(kind)
        if known is None or not known[0].equals(table):
            self._written[kind] = known = table, self.write(session, kind, table)
        return known[1]

    def load(self, kind: str, refs: Sequence[FileRef], columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of files of one kind, each of which is fetched once if it is small."""
        lacking = [ref for ref in refs if ref.path not in self._fetched]
        found = dict(zip((ref.path for ref in lacking), tablefiles.fetch(self.storage, lacking), strict=True))
        self._fetched |= {path: data for path, data in found.items() if len(data) <= _MAX_KEPT_BYTES}
        data = [found[ref.path] if ref.path in found else self._fetched[ref.path] for ref in refs]
        return tablefiles.parsed(self.storage, kind, refs, data, columns)

    def check_ids(self, parent: Commit, fresh: pa.Table, session: str, since: int) -> None:
        """DuplicateEpisodeError for rows that begin an episode of an id that is taken. since: the commit up to which
        the ids were checked when they were given."""
        self._ids.check(parent, self.load, fresh, session, since)
        self.fresh = fresh

    def add_rows(self, session: str, kind: str, parent: Commit, new: pa.Table) -> tuple[FileRef, ...]:
        """Write new rows of one of the tables that a commit lists: its list of files, with the new one.

        The commit number is filled in here. The newest files are folded into the new one as `files_to_keep` says; of
        segments as `fold` says. At a later try, unless the list is long, this is so of files alone that are held, as
        their ids were looked at or an earlier one read them; what was joined at the first takes its place again.
        """
        present = parent.files(kind)
        if new.num_rows == 0:
            return present
        new = tables.set_column(new, "commit", parent.number + 1)
        rows, again = [f.rows for f in present], self.number > 0
        spare = again and len(rows) <= _TURN[1]
        sizes = [MAX_FOLDED_BYTES + 1 if spare and f.path not in self._fetched else f.bytes for f in present]
        if kind == "segments":
            start, stop, keep = fold(rows, sizes, new.num_rows, least=len(rows) + 1 if again else self._least)
            if start < stop:
                parts = present[start:stop]
                whole = tablefiles.load(self.storage, kind, parts)
                self._joined[_paths(parts)] = self.write(session, kind, whole)
        else:
            keep = files_to_keep(rows, sizes, new.num_rows)
        older = self.load(kind, present[keep:])
        made = self.write(session, kind, tables.concat(kind, [older, new]))
        return (*self._with_joined(present[:keep]), made)

    def _with_joined(self, files: tuple[FileRef, ...]) -> tuple[FileRef, ...]:
        """The list with what was joined in place of those that it was made of, where these are in it still."""
        for parts, whole in self._joined.items():
            for start in range(len(files) - len(parts) + 1):
                if _paths(files[start : start + len(parts)]) == parts:
                    files = (*files[:start], whole, *files[start + len(parts) :])
                    break
        return files


def _paths(files: Sequence[FileRef]) -> tuple[str, ...]:
    return tuple(ref.path for ref in files)


class Fold(NamedTuple):
    """The neighbours [start, stop) of the present files that become one; `keep` stay, the others join the new rows."""

    start: int
    stop: int
    keep: int


def fold(rows: Sequence[int], sizes_bytes: Sequence[int], new_rows: int, *, least: int = 2) -> Fold:
    """The way in which new rows of the segments table go into the list of its files.

    least: so many files are joined at least. `rows` and `sizes_bytes` are of the present files, oldest first.
    """
    keep, newer = len(rows), new_rows
    if is_recent(rows, sizes_bytes, new_rows):
        keep, newer, least = keep - 1, newer + rows[-1], max(least, _LONG)
    start, stop = files_to_join(rows[:keep], sizes_bytes[:keep], newer)
    return Fold(start, stop, keep) if stop - start >= least else Fold(0, 0, keep)


def is_recent(rows: Sequence[int], sizes_bytes: Sequence[int], new_rows: int) -> bool:
    """True if new segments go into the newest file, which is written anew then.

    `rows` and `sizes_bytes` are of the present files, oldest first.
    """
    most = max(_RECENT_ROWS, _RECENT_COMMITS * new_rows)
    return bool(rows) and rows[-1] + new_rows <= most and sizes_bytes[-1] <= MAX_FOLDED_BYTES


def files_to_join(rows: Sequence[int], sizes_bytes: Sequence[int], new_rows: int) -> tuple[int, int]:
    """The neighbours [start, stop) of the present segments files that are to become one, before new rows get a file of
    their own; none if start == stop.

    A joined file holds at most twice the rows of all newer ones together: who looks for what was written last finds it
    in small files, at any age. It holds at least twice the rows of any that it is made of, so that there are few files
    (some 13 after 10,000 commits of like size), and a row is rewritten a few times at most.

    `rows` and `sizes_bytes` are of these files, oldest first. Files too large to fold stay.
    """
    most, best = 0, (0, 0)
    newer = new_rows
    for stop in range(len(rows), 0, -1):
        total = largest = 0
        for start in range(stop - 1, -1, -1):
            total, largest = total + rows[start], max(largest, rows[start])
            if sizes_bytes[start] > MAX_FOLDED_BYTES or total > 2 * newer:
                break
            if total >= 2 * largest and total > most:
                most, best = total, (start, stop)
        newer += rows[stop - 1]
    return best


def files_to_keep(rows: Sequence[int], sizes_bytes: Sequence[int], new_rows: int) -> int:
    """The number of oldest files that stay as they are; the others are folded with the new rows.

    Each file holds at least twice the rows of all newer ones together. So there are few files at any age (at most 13
    after 10,000 commits of like size), and a row is rewritten a few times at most.

    `rows` and `sizes_bytes` are of the present files, oldest first. Files too large to fold stay, and so do all
    that are older than one of them.
    """
    large = [i for i, size in enumerate(sizes_bytes) if size > MAX_FOLDED_BYTES]
    first = large[-1] + 1 if large else 0
    newer = new_rows
    keep = len(rows)
    for i in range(len(rows) - 1, first - 1, -1):
        if rows[i] < 2 * newer:
            keep = i
        newer += rows[i]
    return keep
