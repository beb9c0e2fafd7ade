"""Does I/O: who has seen commits that are not there any more. What a writer puts names the newest commit that it knew,
so that a removed newest one is noticed by who goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from archive.base import AccessDeniedError, CorruptCommitError, IntegrityError, MissingObjectError, escape, layout
from archive.manifest import Claim, Commit, Mark, Sighting, commits, sessions
from archive.saved import Part
from archive.store import Storage

_REMEDY = "put it back from a copy or an older version of the object; or `archive repair` goes on without it"
_LOOKED_AT = 2  # sessions that no commit names, at most, when a session is opened


class Witness(NamedTuple):
    """An object, and the newest commit that its writer knew."""

    key: str
    seen: Sighting


def check_newest(storage: Storage, run: str, head: Commit) -> None:
    """Refuse to open a session where the newest commits were removed; CorruptCommitError says which, and what to do.

    Two listings at once; what they have that `head` does not name is all that is read: the newest claims of other
    sessions, and what the run's newest session staged last. Whoever may not list does not look.
    """
    with suppress(AccessDeniedError):
        for one in _newest(storage, run, head):
            why = commits.missing(storage, head, one.seen, storage.full_url(one.key))
            if why is not None:
                raise CorruptCommitError(why)


def _newest(storage: Storage, run: str, head: Commit) -> Iterator[Witness]:
    entry = head.runs.get(run)
    with storage.meanwhile(lambda cancelled: storage.list("sessions", cancelled)) as sessions:
        staged = None if entry is None else _staged_last(storage, escape(entry.session), entry.latest)
        named = {escape(name) for one in head.own_runs.values() for name in one.sessions}
        unknown = {name.rstrip("/") for name in sessions()} - named
    last = sorted(unknown, key=_natural)[-_LOOKED_AT:]
    keys = [f"sessions/{name}/rank-00000.json" for name in last]
    for key in (*keys, staged, *(_staged_last(storage, name, None) for name in last)):
        if key is None:
            continue
        with suppress(MissingObjectError, IntegrityError):  # of what is damaged `archive verify` tells
            if (seen := seen_by(storage, key)) is not None:
                yield Witness(key, seen)


def _staged_last(storage: Storage, session: str, latest: Mark | None) -> str | None:
    """What a session (escaped) staged for its newest checkpoint, as its name goes; None if that is the latest."""
    folder = f"states/{session}"
    names = [name.rstrip("/") for name in storage.list(folder)]
    newest = max(names, key=_natural, default=None)
    if newest is None or (latest and (escape(latest.session), escape(latest.name)) == (session, newest)):
        return None
    ranks = storage.list(f"{folder}/{newest}")
    return f"{folder}/{newest}/{ranks[0]}" if ranks else None


def _natural(name: str) -> list[str | int]:
    """Sorts "step-9" before "step-10"."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


def seen_by(storage: Storage, key: str) -> Sighting | None:
    """The newest commit that the writer of a claim or of a staged object knew; None if it says of none."""
    if key.startswith("sessions/"):
        claim: Claim = sessions.read_claim(storage, key)
        return claim.seen
    return Part(storage, key).index.seen


@dataclass
class Evidence:
    """What there is to say that a commit was there: `seen` by who wrote an object, or next to it as a table was made
    for the commit after it."""

    seen: list[Witness] = field(default_factory=list)
    made_for: dict[int, str] = field(default_factory=dict)  # commit -> a table that was made for it

    def add(self, key: str, seen: Sighting | None) -> None:
        """An object says which commit its writer knew, or of none."""
        if seen is not None:
            self.seen.append(Witness(key, seen))

    def newest(self, head: Commit) -> int:
        """The greatest number that a commit of this archive had, by all that is known."""
        return max([head.number, *(one.seen.commit for one in self._mine(head)), *(n - 1 for n in self.made_for)])

    def problems(self, storage: Storage, head: Commit, known: Mapping[int, Commit]) -> Iterator[tuple[int, str]]:
        """Number of a commit that is missing, or is another one than a writer had seen, and what says so.

        known: commits up to `head`; what was put in the place of a damaged or missing one is as good as that.
        """
        for number in range(head.number + 1, self.newest(head) + 1):
            if not storage.exists(layout.commit_key(number)):
                yield number, f"it is missing: {self._who(head, number)} was written by who had seen it; {_REMEDY}"
        for one in self._mine(head):
            there = known.get(one.seen.commit)
            if there is not None and there.kind != "repair" and there.digest != one.seen.digest:
                yield there.number, f"it is another one than the writer of {one.key} had seen: that was removed"

    def _mine(self, head: Commit) -> list[Witness]:
        """What was said of this archive, not of one that it was copied from."""
        return [one for one in self.seen if head.archive in ("", one.seen.archive)]

    def _who(self, head: Commit, number: int) -> str:
        """An object of one who had seen this commit or a later one."""
        told = [one.key for one in self._mine(head) if one.seen.commit >= number]
        return min([*told, *(key for made_for, key in self.made_for.items() if made_for > number)])
