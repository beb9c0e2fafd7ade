"""Histories of archives as the specification sees them: requests that took effect, and what parties were told, become
the events that `specification.check_traces` holds against the guards (archive/docs/spec/README.md, Observations)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from archive.base import MissingObjectError, escape, layout
from archive.index import Walk
from archive.journal.ends import ended_by
from archive.log import Commit, RunEntry, commits, tablefiles
from archive.maintain.tags import Tags
from archive.store import Storage

Event = dict[str, Any]
_FOLDERS = ("shards/", "states/", "manifest/", "journal/")
_NEVER = 2**30  # a time after all others


class Seen(Protocol):
    """A request that took effect (its verb, the key, the bytes), or what a party was told."""

    @property
    def kind(self) -> str: ...
    @property
    def what(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def data(self) -> bytes | None: ...


class Opening(NamedTuple):
    """The decision to open a session: the newest commit that was known, whether it goes on from all that its run has,
    and whether it begins a run at a checkpoint of another."""

    seen: int
    takes: bool = False
    forks: bool = False


class Projection:
    """The events of one history. storage: has every object that there ever was."""

    def __init__(self, storage: Storage, openings: Mapping[str, Opening]) -> None:
        self._storage, self._openings = storage, openings
        self._walk = Walk(storage)
        self._numbers: dict[str, int] = {}
        self._there: set[str] = set()
        self._head = commits.EMPTY

    def events(self, seen: Sequence[Seen]) -> Iterator[Event]:
        """The events, in order. An event for a request that changed nothing, or of no interest, is left out."""
        for time, one in enumerate(seen):
            if one.kind in ("create", "put") and one.data is not None:
                yield from self._put(one.what, one.data, time)
            elif one.kind == "delete":
                yield from ({"event": "delete", "object": self._number(key)} for key in self._gone(one.what.split(",")))
            elif one.kind == "durable":
                yield {"event": "durable", "journal": one.what.partition("/")[2], "number": int(one.digest)}
            elif one.kind == "committed":
                yield {"event": "told", "intent": one.what, "number": int(one.digest)}

    def _number(self, key: str) -> int:
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def _gone(self, keys: Sequence[str]) -> list[str]:
        gone = [key for key in keys if key in self._there]
        self._there.difference_update(gone)
        return gone

    def _put(self, key: str, data: bytes, time: int) -> Iterator[Event]:
        if key.startswith("commits/") and key.endswith(".json"):
            number = int(key.rpartition("/")[2].removesuffix(".json"))
            commit = commits.read(self._storage, number)
            if number == self._head.number + 1:
                event, self._head = self._commit(commit, time), commit
                yield event
            return
        again = key in self._there and self._storage.get(key) == data  # its first answer was lost
        if again or not key.startswith(_FOLDERS):
            return
        self._there.add(key)
        event = {"event": "put", "object": self._number(key), "by": layout.session_of(key) or "", "time": time}
        place = layout.journal_place(key)
        if place is None:
            yield event | {"journal": "", "number": 0}
        else:
            session, line, number = place
            is_end = ended_by(self._storage, key) is not None
            yield event | {"event": "end" if is_end else "tick", "journal": f"{session}/{line}", "number": number}

    def _commit(self, commit: Commit, time: int) -> Event:
        """The event of a commit. Its `forgot` and `tags` are those of its tables, `adds` its new rows."""
        before = self._head.runs.get(commit.run)
        made, entry = commit.checkpoint, commit.runs.get(commit.run)
        opens = entry is not None and commit.kind == "session" and entry.opened == commit.number
        is_save = made is not None and made.whole and commit.kind == "checkpoint"
        opening = self._openings.get(commit.session, Opening(_NEVER))
        lists = [] if commit.pruned is None else [commit.pruned]
        forgotten = tablefiles.load(self._storage, "forgotten", commit.files("forgotten"), ["key", "commit"])
        rows = zip(forgotten["key"].to_pylist(), forgotten["commit"].to_pylist(), strict=True)
        return {
            "event": "commit",
            "number": commit.number,
            "intent": commit.transaction,
            "kind": "open" if opens else _saved_as(commit) if is_save else commit.kind,
            "run": commit.run,
            "by": escape(commit.session),
            "time": time,
            "leads": {self._number(key) for key in self._leads(commit)},
            "letgo": commit.let_go or 0,
            "forgot": {(self._number(key), number) for key, number in rows},
            "tags": {tag.commit for tag in Tags(self._storage, commit).values()},
            "pruned": {
                self._number(key) for key in tablefiles.load(self._storage, "pruned", lists, ["key"])["key"].to_pylist()
            },
            "cutoff": _NEVER,
            "borrowed": set() if made is None else {self._number(key) for key in made.borrowed},
            "adds": self._adds(commit),
            "upto": _upto(entry) if is_save and entry is not None else {},
            "order": 0 if made is None else made.ordinal,
            "seen": opening.seen,
            "takes": opening.takes,
            "forks": opening.forks,
            "ends": {*_upto(before)} if opens and before is not None else set(),
        }

    def _leads(self, commit: Commit) -> set[str]:
        """The objects that it leads to, by the tables; if one of these is nowhere, those that it names."""
        try:
            return {*self._walk.reach(commit).keys}
        except MissingObjectError:
            return {ref.path for ref in commit.all_files}

    def _adds(self, commit: Commit) -> set[str]:
        """The rows that it adds, by session, rank and sequence."""
        out: set[str] = set()
        for kind in ("segments", "ledger"):
            known = {ref.path for ref in self._head.files(kind)}
            files = [ref for ref in commit.files(kind) if ref.path not in known]
            table = tablefiles.load(self._storage, kind, files, ["session", "rank", "sequence", "commit"])
            columns = (table[name].to_pylist() for name in ("session", "rank", "sequence", "commit"))
            out |= {f"{kind} {s} {r} {n}" for s, r, n, made in zip(*columns, strict=True) if made == commit.number}
        return out


def _saved_as(commit: Commit) -> str:
    """The kind of a whole checkpoint."""
    assert commit.checkpoint is not None
    if commit.checkpoint.recovered is not None:
        return "recover"
    return "save" if commit.checkpoint.replay_saved else "light"


def _upto(entry: RunEntry) -> dict[str, int]:
    """Journal -> the number of its next object as of the newest checkpoint."""
    return {f"{escape(entry.session)}/{line}": number for line, number in entry.journal_lines.items()}
