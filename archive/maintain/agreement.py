"""Whether rows of tables agree with each other, and with what they name: files with what a commit says of them, live
steps with segments, segments with stored rows, and segments with those that they go on from.

A splice is a segment that goes on from one which its session has never seen, as another branch wrote it. What a session
goes on from is recorded when it is opened.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from archive.base import ArchiveError, CorruptManifestError, FieldError
from archive.manifest import FileRef, Origin, Rows, Snapshot, chains, chunkindex, tablefiles
from archive.read import Reader, Selection, Spans, sizes
from archive.store import Roots, split_key

_READ_BYTES = 64 * 1024 * 1024


class Unreadable(NamedTuple):
    """A segment whose rows cannot be read, and why."""

    shard: str
    episode_id: str
    why: str


def check_file(roots: Roots, kind: str, ref: FileRef, data: list[bytes]) -> None:
    """A file of a table must be one, and hold what the commit that names it says: readers go by that."""
    import pyarrow.compute as pc

    rows = tablefiles.parsed(roots, kind, [ref], data)
    if kind == "chunks":
        chunkindex.from_table(rows)
    if kind != "segments":
        return
    commits, steps = tuple(pc.min_max(rows["commit"]).as_py().values()), pc.sum(rows["length"]).as_py()
    if ref.commit not in (None, commits) or ref.steps not in (None, steps):
        raise CorruptManifestError(
            f"{roots.full_url(ref.path)} has rows of commits {commits} with {steps} steps; the commit that names it "
            f"says {ref.commit} and {ref.steps}"
        )


def unreadable(snapshot: Snapshot, roots: Roots, known: Collection[str]) -> Iterator[Unreadable]:
    """The first segment in each shard that does not come out of it as tables and schemas say, but for shards of which
    that is known. All others are read, in runs of bounded size."""
    table = snapshot.columns(["shard", "length", "episode_id"])
    shards, bad = np.array(table["shard"].to_pylist(), object), set(known)
    there = [n for n, one in enumerate(shards) if one is not None and roots.allows(split_key(one)[0])]
    rows = np.array([n for n in there if shards[n] not in bad], np.int64)
    rows = rows[np.argsort(shards[rows].astype(str), kind="stable")]
    reader, spans = Reader(snapshot), Spans.of_each(rows, 0 * rows, table["length"].to_numpy()[rows])
    for start, stop in sizes.runs(reader.as_written().sizes(spans), _READ_BYTES):
        if _why(reader, spans, range(start, stop)) is None:
            continue
        for n in range(start, stop):
            shard = shards[rows[n]]
            if shard not in bad and (why := _why(reader, spans, range(n, n + 1))) is not None:
                bad.add(shard)
                yield Unreadable(shard, table["episode_id"][int(rows[n])].as_py(), why)


def _why(reader: Reader, spans: Spans, numbers: range) -> str | None:
    """Why these steps, as they were written and with what was added to them, cannot be read; None: they can."""
    some = spans.pick(np.array(numbers))
    try:
        reader.read_stored(some)
        if reader.snapshot.later.head.late:
            with suppress(FieldError):  # fields that were added to some of them only, or of another kind
                reader.read(some, Selection(missing="skip"))
    except ArchiveError as e:
        return str(e)
    return None


class Splice(NamedTuple):
    """A segment, the one that it goes on from, and what its session went on from instead."""

    episode_id: str
    segment: str
    predecessor: str
    origin: Origin | None

    def __str__(self) -> str:
        where = "began by itself" if self.origin is None else f"resumed from commit {self.origin.commit}"
        return (
            f"episode {self.episode_id!r} is spliced: segment {self.segment!r} goes on from {self.predecessor!r}, "
            f"which is of a branch that its session, which {where}, does not have"
        )


def find(snapshot: Snapshot) -> Iterator[Splice]:
    """All splices in a segments table."""
    known = snapshot.branches
    if not known:
        return
    table = snapshot.columns(chains.DETAIL)
    before = chains.predecessors(table)
    for row in np.sort(known.spliced(Rows(table), before)).tolist():
        (mine, other) = snapshot.take(np.array([row, before[row]]), chains.DETAIL).to_pylist()
        names = [chains.address(r["session"], r["rank"], r["sequence"]) for r in (mine, other)]
        yield Splice(mine["episode_id"], names[0], names[1], known.origins.get(mine["session"]))
