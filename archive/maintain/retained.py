"""Which commits an archive retains, and what they lead to; which objects of journals may still be recovered, and which
nobody needs any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from archive.base import escape, layout
from archive.manifest import Commit, Reach, Walk, commits, tablefiles
from archive.store import Storage


def retained(storage: Storage, head: Commit) -> list[Commit]:
    """The newest commit, and those that tags name."""
    named = tablefiles.load(storage, "tags", head.files("tags"), ["target"])["target"].to_pylist()
    return [head, *(commits.read_of(storage, number, head) for number in sorted({*named} - {head.number}))]


def retained_reach(storage: Storage, head: Commit) -> Reach:
    """What the retained commits lead to, together."""
    out, finds = Reach(), Walk(storage)
    for commit in retained(storage, head):
        out.add(finds.reach(commit))
    return out


class Journaled:
    """The journals of the runs' newest sessions, and how far checkpoints have them."""

    def __init__(self, numbers: Mapping[tuple[str, int], int]) -> None:
        """numbers: of a session (its escaped name) and rank: its objects below this number are in a checkpoint."""
        self._numbers = numbers

    @classmethod
    def of(cls, head: Commit) -> Self:
        """As of a commit."""
        entries = ((escape(entry.session), entry.journal or {}) for entry in head.runs.values())
        return cls({(session, rank): n for session, journal in entries for rank, n in journal.items()})

    def awaited(self, key: str) -> bool:
        """Whether it is the key of an object that may still be recovered, or committed by its session."""
        place = layout.journal_place(key)
        return place is not None and place[2] >= self._numbers.get(place[:2], 1 << 63)

    def passed(self, key: str) -> bool:
        """Whether it is the key of one that a checkpoint has: only its steps are needed, if it has any."""
        place = layout.journal_place(key)
        return place is not None and place[2] < self._numbers.get(place[:2], 0)
