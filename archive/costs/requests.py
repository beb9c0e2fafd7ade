"""Pure, no I/O: the requests that the library sends for each thing that a run does, by verb of the store.

Creates, puts and lists are exact, but for the joins of tables, which are few; gets are bounds, since ranks that wait
for one another look again (tests/costs/test_requests.py holds both to what a store counts).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import ceil

from archive.arrays import MAX_BLOCK_BYTES
from archive.checkpoint import assembly
from archive.checkpoint import requests as asked
from archive.journal import LOOK_S
from archive.store.drivers import PAGE

Requests = Mapping[str, float]  # how many there are, by verb

_JOINED = 1 / 8  # of the commits with new segments, at most: they join earlier files of the table, too
_COMMIT_GETS = 3  # of a rank at a checkpoint: is there another commit, and the one that was made
_FIRST_LOOKS = 6  # of a wait, whose pauses double up to a second
_PART_GETS = 2  # of a part that is read: its index, and the rows behind it
_TABLES = 8  # files of tables that a reader fetches: segments and checkpoints, of which there are few at any age
IDLE_LOOK_S = 30.0  # of a viewer that follows a run: between looks while nothing happens
_FORGET_GETS = 6  # for a checkpoint that goes: its commit, its tables
_BY_NAME = 100  # objects that a forgetting asks for one by one; more are listed


def together(*parts: Requests) -> Requests:
    """The requests of all of these."""
    out: Counter[str] = Counter()
    for part in parts:
        out.update(part)
    return dict(out)


def times(count: float, one: Requests) -> Requests:
    """The requests of so many of the same."""
    return {verb: count * number for verb, number in one.items()}


def listed(objects: float) -> float:
    """The lists that find so many objects below a folder: one for each page, and one that finds no more."""
    return 1 + ceil(objects / PAGE)


# -- writing -----------------------------------------------------------------------------------------------------------


def ticks(objects: float = 1) -> Requests:
    """Objects of a journal: a create each, and nothing else."""
    return {"create": objects}


def shards(objects: float = 1) -> Requests:
    """Shards: a put each, as none is so large that a client would send it in parts."""
    return {"put": objects}


def heartbeat(seconds: float, ranks: int, commits: float = 0) -> Requests:
    """The looks of ranks with a journal for a newer session: one a minute each, and one for each commit that came
    meanwhile."""
    return {"get": ranks * (seconds / LOOK_S + commits)}


def watch(seconds: float, ranks: int, *, group: bool) -> Requests:
    """The looks of writers for requests of checkpoints. One rank lists these or, without a process group, each, the
    first ones in line most often; each looks then whether another rank was asked."""
    if group or ranks == 1:
        return {"list": seconds / asked.POLL_S}
    lists = sum(seconds / asked.list_s(turn) for turn in range(ranks))
    return {"list": lists, "head": ranks * seconds / asked.ASKED_POLL_S}


def parts(ranks: int, wait_s: float = 0.0) -> Requests:
    """The parts of a checkpoint: each rank creates one and, until all have, looks at most once a second; one of them
    reads all."""
    if ranks == 1:
        return {"create": 1}
    looks = _FIRST_LOOKS + wait_s / assembly.MAX_POLL_S
    return {"create": ranks, "get": (ranks - 1) * _PART_GETS + ranks * looks}


def commit(ranks: int = 1, *, adds: bool = True) -> Requests:
    """The commit of a checkpoint, with the files of its tables. adds: whether there are new steps."""
    puts = 2 + 2 * adds  # live steps, checkpoints; segments, and the chunks of their shards
    return {"create": 1, "put": puts + adds * _JOINED, "get": ranks * _COMMIT_GETS + 2 * adds}


# -- going on, letting go ----------------------------------------------------------------------------------------------


def opened(ranks: int = 1) -> Requests:
    """Opening an archive: its identity, and the newest commit, which a list finds."""
    return {"get": 2 * ranks, "list": ranks}


def session(ranks: int, *, journal: bool, resumed: bool, group: bool = False) -> Requests:
    """Opening a session, rank after rank: each checks that the store refuses to overwrite, claims its place, and, but
    for all but one of a process group, lists earlier requests; one of them commits. That of a resumed run ends the
    journals of the one before, and each rank journals what is live."""
    journals = 2 * ranks * (journal and resumed)
    earlier = 1 if group else ranks
    return {
        "create": 2 * ranks + 1 + journals,
        "put": float(resumed),  # the origin, in the table of branches
        "list": 1.0 + earlier + resumed,  # earlier requests; claims and parts of the session's name
        "get": 6 * ranks,
    }


def recovery(ranks: int, objects: float) -> Requests:
    """A checkpoint that is made of journals: `objects` of them are read, and a part is created for each rank."""
    made = commit(1)
    return together(made, {"create": ranks, "get": objects + ranks * (1 + 2 * _PART_GETS)})


def reading(objects: float, nbytes: float, commits: float, ranks: int = 1) -> Requests:
    """Reading steps in bulk: ranges of at most 8 MB of each object, and the tables of those who read."""
    return {"get": objects + nbytes / MAX_BLOCK_BYTES + commits + ranks * _TABLES}


def forgetting(checkpoints: float, objects: float) -> Requests:
    """A forgetting, by a commit: what goes is sized before it, and again as it is made."""
    few = objects <= _BY_NAME
    sized = {"head": 2 * objects} if few else {"list": 2 * (4 + listed(objects))}
    tables = {"create": 1, "put": 3, "get": checkpoints * _FORGET_GETS + 2 * _TABLES, "list": 1}
    return together(sized, tables)


def prune(objects: Mapping[str, float], commits: float, going: float) -> Requests:
    """A prune: all objects are listed, by folder, then a commit names those that go, and these are deleted."""
    folders = sum(listed(count) if count else 1 for count in objects.values())
    return {
        "list": 1 + listed(commits) + folders + 2 + 4,  # the clock; unfinished jobs, pins; these twice again
        "create": 1,
        "put": 2,
        "get": commits + 2 * _TABLES + 8,
        "delete": going,
    }


# -- looking -----------------------------------------------------------------------------------------------------------


def following(seconds: float, commits: float) -> Requests:
    """A viewer that follows a run: looks for a newer commit and, for each, the tables that changed."""
    return {"get": seconds / IDLE_LOOK_S + commits * (_TABLES + 2)}


def drawing(samples: float) -> Requests:
    """Random steps that are in no memory yet: a range each, where their fields lie close to one another."""
    return {"get": samples}
