"""Does I/O: what goes and what stays as of a commit, and why. Nothing is written, and no data is read."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from archive.base import escape, layout
from archive.maintain import Journaled, check_made, read_pins, retained
from archive.maintain.pruning.past import Past
from archive.maintain.pruning.plans import Going, Group, grouped
from archive.maintain.pruning.scanning import Scan
from archive.manifest import FORGOTTEN, LEFT, Commit, Reach, Walk, read_of, tablefiles
from archive.store import Storage

LET_GO = "forgotten, longer ago than the wait"
SUPERSEDED = "needed by no commit that can still be opened"
CRASHED = "never committed, and older than the wait"
UNFINISHED = "listed by an earlier prune, which did not come to its end"
PINNED = "another archive refers to it"
WAITING = "forgotten, but not for as long as the wait"
EARLIER = "needed by commits that can still be opened"
RUNNING = "of a session that may still commit"
YOUNG = "not committed yet, and younger than the wait"
STRANGE = "of no session: not made by this library"
LIST = "the list of an earlier prune"
_OF_STEPS = ("shards/", "journal/")  # what shards lie below


@dataclass(frozen=True)
class Fate:
    """What becomes of an object that retained commits do not lead to. reason: of one that goes; else None."""

    key: str
    why: str
    reason: str | None = None


@dataclass(frozen=True)
class Choice:
    """What goes, and all that retained commits do not lead to in groups, as of a commit."""

    commit: Commit
    going: tuple[Going, ...]
    groups: tuple[Group, ...]


class Chooser:
    """Decides as of one commit after the other, and reads each commit and table once."""

    def __init__(self, storage: Storage, scan: Scan) -> None:
        self._storage = storage
        self.scan = scan
        self._walk = Walk(storage)
        self._past = Past(storage)
        self._rows: dict[int, Reach] = {}  # commit -> what its tables name

    def choose(self, head: Commit) -> Choice:
        """What goes and what stays as of a commit: one that is not older than the scan."""
        fates = list(self._fates(head))
        counted = ((one.key.partition("/")[0], self.scan.bytes(one.key), bool(one.reason), one.why) for one in fates)
        going = (
            Going(one.key, self.scan.bytes(one.key), one.reason, one.why, one.why == UNFINISHED)
            for one in fates
            if one.reason is not None
        )
        return Choice(head, tuple(going), grouped(counted))

    def _fates(self, head: Commit) -> Iterator[Fate]:
        needed = self._needed(head)
        pins = read_pins(self._storage)
        forgotten = tablefiles.load(self._storage, "forgotten", head.files("forgotten"), ["key", "commit"])
        let_go = dict(zip(forgotten["key"].to_pylist(), forgotten["commit"].to_pylist(), strict=True))
        check_made(self._storage, let_go)
        for key, number in let_go.items():
            if key not in needed:
                yield self._forgotten(key, number, key in pins)
        unknown = [key for key in self.scan.seen if key not in needed and key not in let_go]
        yield from self._unknown(head, unknown, set(pins))

    def _needed(self, head: Commit) -> set[str]:
        """What the retained commits lead to."""
        reach = Reach()
        for commit in retained(self._storage, head):
            reach.add(self._walk.reach(commit))
        return reach.keys

    def _forgotten(self, key: str, number: int, pinned: bool) -> Fate:
        if pinned or key.endswith(layout.PRUNED):
            return Fate(key, PINNED if pinned else LIST)
        return Fate(key, LET_GO, FORGOTTEN) if number <= self.scan.settled else Fate(key, WAITING)

    def _unknown(self, head: Commit, keys: list[str], pins: set[str]) -> Iterator[Fate]:
        """Of what no table says what it is."""
        if not keys:
            return
        self._past.follow(head)
        if self._past.lost_rows and any(key.startswith(_OF_STEPS) for key in keys):
            self._past.read_shards(self._there())
        running = {escape(entry.session) for entry in head.runs.values()}
        journaled = Journaled.of(head)
        for key in keys:
            if key in pins:
                yield Fate(key, PINNED)
            elif key.endswith(layout.PRUNED):
                yield Fate(key, LIST)
            elif key in self._past.pruned:
                yield Fate(key, UNFINISHED, FORGOTTEN)
            elif key in self._past.named or key in self._past.shards:
                yield self._superseded(head, key)
            else:
                yield self._left(key, running - ({layout.session_of(key)} if journaled.passed(key) else set()))

    def _superseded(self, head: Commit, key: str) -> Fate:
        """Of what commits named that are not retained: all stay that can still be opened, which those from the last
        letting go on can; that itself must be older than the wait."""
        since = self._past.let_go(self.scan.settled)
        if not since or self._past.named.get(key, 0) >= since or key in self._later(head, since):
            return Fate(key, EARLIER)
        return Fate(key, SUPERSEDED, FORGOTTEN)

    def _later(self, head: Commit, since: int) -> set[str]:
        """What rows of the tables of commits from that one on name: of those after which there were less."""
        numbers = {since, *(number - 1 for number in self._past.lost_rows if number > since)}
        out: set[str] = set()
        for number in sorted(numbers):
            if number not in self._rows:
                commit = head if number == head.number else read_of(self._storage, number, head)
                self._rows[number] = self._walk.tables(commit, self._there())
            out |= self._rows[number].keys
        return out

    def _there(self) -> Set[str]:
        """What may still be read."""
        return self.scan.seen.keys() - self._past.pruned

    def _left(self, key: str, running: set[str]) -> Fate:
        session = layout.session_of(key)
        if session is None and not layout.is_temporary(key):
            return Fate(key, STRANGE)
        if session in running:
            return Fate(key, RUNNING)
        return Fate(key, CRASHED, LEFT) if self.scan.old(key) else Fate(key, YOUNG)
