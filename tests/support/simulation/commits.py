"""Histories of the log room alone: sessions, commits, forgettings and looks with tables of a row, and none but these.

The log is linearizable: its numbers have no gaps, each acknowledged commit is in it exactly once, each look is at a
beginning of it that has all that was acknowledged before, and who was replaced commits nothing more.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from archive import tables
from archive.base import AmbiguousWriteError, ArchiveError, CommitUnknownError, DeadlineError, SupersededError
from archive.log import Change, Commit, CommitLog, Place, commits, open_session
from archive.store import Storage
from tests.support.simulation.histories import FAULTS, KINDS, Kind
from tests.support.simulation.store import ObjectStore

ID = "0" * 32
_ABOUT = {"magic": "trajectory-archive", "id": ID, "layout": "packed", "created_at": "2030-01-01T00:00:00+00:00"}


@dataclass
class Look:
    """A commit that a party saw as the newest, and the newest acknowledged one when it began to look."""

    party: str
    least: int
    number: int
    digest: str


@dataclass
class Log:
    """What the parties of a history share, and what was said to them."""

    store: ObjectStore
    url: str
    said: dict[str, tuple[int, str]] = field(default_factory=dict)  # transaction -> number, digest
    tried: set[str] = field(default_factory=set)
    looks: list[Look] = field(default_factory=list)
    opened: int = 0

    def actor(self, name: str) -> Actor:
        return Actor(self, name)

    @property
    def newest_said(self) -> int:
        return max((number for number, _ in self.said.values()), default=0)


class Actor:
    """One process, with what it knows."""

    def __init__(self, log: Log, name: str) -> None:
        self.world, self.name = log, name
        self.storage = Storage.connect(log.url)
        self.log: CommitLog | None = None
        self.place: Place | None = None

    def look(self) -> Commit:
        """The newest commit, as somebody who opens the archive finds it."""
        least = self.world.newest_said
        head = commits.newest(self.storage)
        self.world.looks.append(Look(self.name, least, head.number, head.digest))
        return head

    def said(self, transaction: str, made: Commit) -> None:
        self.world.store.told("committed", transaction, made.number)
        known = self.world.said.setdefault(transaction, (made.number, made.digest))
        assert known == (made.number, made.digest), f"{transaction} was committed twice: {known}, {made.number}"


def look(me: Actor, rng: random.Random) -> None:
    me.look()


def begin(me: Actor, rng: random.Random) -> None:
    """Open a session of one of two runs, by what was known a moment ago."""
    me.log = CommitLog(me.storage, ID, me.look())
    me.world.opened += 1
    me.place = Place(0, 1, f"run{rng.randrange(2)}", f"{me.name}{me.world.opened}")
    try:
        open_session(me.log, me.place, me.log.head.number)
    except SupersededError:
        me.place = None


def _log(me: Actor) -> CommitLog:
    if me.log is None:
        me.log = CommitLog(me.storage, ID, me.look())
    return me.log


def _commit(me: Actor, transaction: str, change: Change) -> Commit | None:
    me.world.tried.add(transaction)
    for _ in range(2):  # who does not know asks again
        try:
            made = _log(me).commit(transaction, change)
        except CommitUnknownError:
            continue
        except ArchiveError:
            return None
        me.said(transaction, made)
        return made
    return None


def commit(me: Actor, rng: random.Random) -> None:
    """A commit of the session, if it may."""
    log = _log(me)
    if me.place is None:
        return
    name = f"{me.name}-{len(me.world.tried)}"
    rows: dict[str, Any] = {}
    if rng.random() < 0.3:
        row = {"name": [name], "target": [log.head.number], "checkpoint": [None], "run": [None], "by": [None]}
        rows["tags"] = tables.from_columns("tags", row | {"created_at": [None]})
    place = me.place
    change = Change("commit", lambda parent, attempt: (rows, {}), [place.newest], place.run, place.session, 0)
    if _commit(me, name, change) is None and rng.random() < 0.5:
        me.place = None


def forget(me: Actor, rng: random.Random) -> None:
    """A commit that lets go of what there was before."""
    key = f"shards/{rng.getrandbits(32):08x}-x-00000.zip"

    def adds(parent: Commit, attempt: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        rows = tables.from_columns("forgotten", {"key": [key], "bytes": [1]})
        return {"forgotten": rows}, {"let_go": parent.number + 1}

    _commit(me, f"{me.name}-{len(me.world.tried)}", Change("forget", adds))


def check(world: Log) -> None:
    """Hold the log against what was said of it."""
    raw = {key: one.data for key, one in world.store.objects.items() if key.startswith("commits/")}
    bodies: list[dict[str, Any]] = []
    digests = [""]
    for number, key in enumerate(sorted(raw), 1):
        line, digest, _ = raw[key].decode().split("\n")
        body = json.loads(line)
        assert hashlib.sha256(line.encode()).hexdigest() == digest
        assert body["number"] == number, f"there is a gap before {key}"
        assert key == f"commits/{number // 1000:06}/{number:09}.json"
        assert (body["parent"] or "") == digests[-1], f"{key} does not follow the one before"
        bodies.append(body)
        digests.append(digest)
    check_transactions(bodies, world)
    for one in world.looks:
        assert one.number >= one.least, f"{one.party} saw {one.number} after {one.least} was acknowledged"
        assert one.digest == dict(enumerate(digests)).get(one.number), f"{one.party} saw another {one.number}"
    assert commits.newest(Storage.connect(world.url)).number == len(bodies)


def check_transactions(bodies: list[dict[str, Any]], world: Log) -> None:
    """Each is there once, and where it was said to be; and of the newest session of its run."""
    places: dict[str, int] = {}
    newest: dict[str, str] = {}
    for body in bodies:
        name = body["transaction"]
        assert name not in places, f"{name} is committed twice: {places[name]} and {body['number']}"
        places[name] = body["number"]
        if body["kind"] == "commit":
            assert newest.get(body["run"]) == body["session"], f"{body['number']} is of a session that was replaced"
        newest = {run: entry["session"] for run, entry in body["runs"].items()}
    for name, (number, _) in world.said.items():
        assert places.get(name) == number, f"{name} was said to be {number} and is {places.get(name)}"


def _made(store: ObjectStore, url: str) -> Log:
    from archive.base import layout

    about = json.dumps(_ABOUT | {"format": layout.format_block()}, indent=1).encode() + b"\n"
    store.objects.keep("archive.json", about, only_new=True)
    return Log(store, url)


_PARTIES = ({"begin": 2, "commit": 5, "look": 1}, {"look": 1}, {"forget": 2, "look": 1, "commit": 1})
LOG = KINDS["log"] = Kind(
    "log",
    _made,
    {"look": look, "begin": begin, "commit": commit, "forget": forget},
    _PARTIES,
    check,
    length=4,
    lead=_PARTIES,
    points=60,
    refusals=(DeadlineError, AmbiguousWriteError),
    befalls=("crash", "stop", "clock", *FAULTS),  # there are no ranks
)
